//! What sandboxes are made of: templates, the guest, `runsc`; and private copies of them for those that sleep.
//!
//! A memory image can only be loaded with exactly the files that it was made with. So each is kept under its hash, and a
//! sleeping session names the hashes it needs.

use crate::{Config, Error, OpenError};
use model::Resources;
use snapshot::{
    Hash,
    pin::BinaryStore,
    template::{Changed, Descriptor, TemplateError, TemplateStore},
};
use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};
use store::{SessionRow, SnapshotRow};
use wire::control::{Pins, RuntimeSpec};

/// Hash, place and version of a program that is kept.
#[derive(Debug, Clone)]
struct Kept {
    hash: Hash,
    path: PathBuf,
    version: String,
}

/// Everything that sandboxes start from, but for the layers that a session has of its own.
pub(crate) struct Programs {
    pub templates: TemplateStore,
    pub binaries: BinaryStore,
    guest: Kept,
    /// What is wrong with it, where it can't be used.
    runsc: Result<Kept, String>,
    state_dir: PathBuf,
    platform: String,
    /// Names this server among the owners of pins: templates can be shared.
    instance: String,
    pinned: Mutex<HashSet<Hash>>,
    /// What was found changed in place, of each template that was looked at. Looking takes a moment, so it is done once
    /// in a server's life: at its start, or before the first wake where that is earlier.
    changed: Mutex<HashMap<Hash, Vec<Changed>>>,
}

/// What one sandbox is made of.
#[derive(Debug, Clone)]
pub(crate) struct Base {
    /// Layers below the session's own, top-most first.
    pub lower: Vec<PathBuf>,
    pub runtime: RuntimeSpec,
    pub pins: Pins,
}

impl Base {
    /// The same with a session's own layers on top.
    pub(crate) fn below(self, layers: Vec<PathBuf>) -> Base {
        Base { lower: [layers, self.lower].concat(), ..self }
    }
}

impl Programs {
    /// Takes private copies of what the configuration names. Blocks.
    ///
    /// # Errors
    /// The data directory can't be written. A missing `runsc` is told when a sandbox is wanted.
    pub(crate) fn open(config: &Config, instance: String) -> Result<Programs, OpenError> {
        let other = |e: &dyn std::fmt::Display| OpenError::Other(e.to_string());
        let templates = TemplateStore::open(&config.templates_dir).map_err(|e| other(&e))?;
        let binaries = BinaryStore::open(config.data_dir.join("programs")).map_err(|e| other(&e))?;
        let layer = binaries.guest_layer(config.guest).map_err(|e| other(&e))?;
        let guest = Kept { hash: Hash::of(config.guest), path: layer, version: String::new() };
        let runsc = keep_runsc(&binaries, &config.runsc);
        if let Err(error) = &runsc {
            tracing::warn!(%error, "no sandbox can be made");
        }
        let state_dir = config.data_dir.join("runsc");
        let platform = config.platform.clone();
        Ok(Programs {
            templates,
            binaries,
            guest,
            runsc,
            state_dir,
            platform,
            instance,
            pinned: Mutex::default(),
            changed: Mutex::default(),
        })
    }

    /// Where the runtime keeps its sandboxes.
    pub(crate) fn runsc_state(&self) -> &Path {
        &self.state_dir
    }

    /// What a new sandbox of this template (a name or a hash) is made of now. Blocks.
    pub(crate) fn present(&self, template: &str) -> Result<Base, Error> {
        let runsc = self.runsc.clone().map_err(|detail| Error::NoCapacity { detail })?;
        self.base(template, self.guest.clone(), runsc)
    }

    /// What the session's saved memory was made with. Blocks.
    pub(crate) fn pinned(&self, row: &SessionRow) -> Result<Base, Error> {
        let session = row.id;
        let missing = |what: &str| Error::internal(format!("session {session} doesn't say which {what} its memory needs"));
        let guest = hash_of(row.guest_hash.as_deref()).ok_or_else(|| missing("guest"))?;
        let runsc = hash_of(row.runsc_hash.as_deref()).ok_or_else(|| missing("runsc"))?;
        let layer = self.binaries.layer_of(guest).map_err(Error::internal)?;
        let program = self.binaries.get(runsc).map_err(Error::internal)?.path;
        let version = match &self.runsc {
            Ok(present) if present.hash == runsc => present.version.clone(),
            _ => runtime_gvisor::runsc_version(&program).unwrap_or_default(),
        };
        let template = row.template_hash.as_deref().ok_or_else(|| missing("template"))?;
        let guest = Kept { hash: guest, path: layer, version: String::new() };
        self.base(template, guest, Kept { hash: runsc, path: program, version })
    }

    /// What the memory of a snapshot was made with. Blocks.
    pub(crate) fn made_of(&self, snapshot: &SnapshotRow) -> Result<Base, Error> {
        let mut row = SessionRow::new(snapshot.session_id, snapshot.runtime, snapshot.template.clone(), snapshot.created_at);
        row.template_hash.clone_from(&snapshot.template_hash);
        row.guest_hash.clone_from(&snapshot.guest_hash);
        row.runsc_hash.clone_from(&snapshot.runsc_hash);
        self.pinned(&row)
    }

    /// The layers below a session's own disk, for reading it. Blocks.
    pub(crate) fn layers(&self, row: &SessionRow) -> Result<Vec<PathBuf>, Error> {
        let template = row.template_hash.as_deref().unwrap_or(&row.template);
        let found = self.templates.resolve(template).map_err(template_error)?;
        let guest = hash_of(row.guest_hash.as_deref()).and_then(|guest| self.binaries.layer_of(guest).ok());
        Ok(guest.into_iter().chain([found.root_path]).collect())
    }

    fn base(&self, template: &str, guest: Kept, runsc: Kept) -> Result<Base, Error> {
        let found = self.templates.resolve(template).map_err(template_error)?;
        self.pin(found.hash)?;
        let pins = Pins {
            template: found.hash.to_string(),
            guest: guest.hash.to_string(),
            runsc: runsc.hash.to_string(),
            runsc_version: runsc.version,
        };
        let runtime = RuntimeSpec { runsc: runsc.path, state_dir: self.state_dir.clone(), platform: self.platform.clone() };
        Ok(Base { lower: vec![guest.path, found.root_path], runtime, pins })
    }

    /// Takes a template that comes from elsewhere, unpacked; answers its address, which can be another one here. Blocks.
    pub(crate) fn adopt_template(&self, descriptor: &Descriptor, unpacked: &Path) -> Result<Hash, TemplateError> {
        let adopted = self.templates.adopt(descriptor, unpacked, &self.instance)?;
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).insert(adopted.hash);
        Ok(adopted.hash)
    }

    /// Keeps a template for as long as sessions of this server need it.
    fn pin(&self, hash: Hash) -> Result<(), Error> {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        if !pinned.contains(&hash) {
            self.templates.pin(hash, &self.instance).map_err(template_error)?;
            pinned.insert(hash);
        }
        Ok(())
    }

    /// Gives up what no session needs: `needed` are the hashes that sessions name. Blocks. Nothing may be starting
    /// meanwhile.
    pub(crate) fn collect(&self, needed: &HashSet<String>) {
        let mut keep: HashSet<Hash> = needed.iter().filter_map(|hash| hash.parse().ok()).collect();
        keep.insert(self.guest.hash);
        keep.extend(self.runsc.as_ref().map(|runsc| runsc.hash));
        if let Err(error) = self.binaries.collect(&keep) {
            tracing::warn!(%error, "programs that no session needs stay");
        }
        // Also those whose names are gone.
        let pinned = self.templates.pinned_by(&self.instance).unwrap_or_default();
        for hash in pinned.into_iter().filter(|hash| !needed.contains(&hash.to_string())) {
            if let Err(error) = self.templates.unpin(hash, &self.instance) {
                tracing::warn!(%hash, %error, "a template stays pinned");
            }
        }
        if let Err(error) = self.templates.collect() {
            tracing::warn!(%error, "templates that nobody needs stay");
        }
    }

    /// Files of a template that somebody wrote into in place on the machine, which `host` shares them with. Sessions of
    /// it see the change, and memory that was saved before may not fit to it. Nothing is refused for it: most files are
    /// in nobody's memory, and only the restore can tell. Blocks.
    pub(crate) fn changed_in_place(&self, template: &str) -> Vec<Changed> {
        let Ok(hash) = template.parse::<Hash>() else { return Vec::new() };
        let mut known = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known.entry(hash).or_insert_with(|| match self.templates.verify_host(hash) {
            Ok(changed) => {
                if let Some(first) = changed.first() {
                    let (files, first) = (changed.len(), first.path.display());
                    tracing::warn!(%hash, files, %first, "files of a template were changed in place on this machine");
                }
                changed
            }
            Err(error) => {
                tracing::warn!(%hash, %error, "whether a template was changed can't be told");
                Vec::new()
            }
        });
        found.clone()
    }

    /// Looks at all templates that are shared with the machine. Blocks.
    pub(crate) fn verify_all(&self) {
        let named = self.templates.list().unwrap_or_default().into_iter().map(|listed| listed.descriptor.hash);
        let all: HashSet<Hash> = named.chain(self.templates.pinned_by(&self.instance).unwrap_or_default()).collect();
        for hash in all {
            self.changed_in_place(&hash.to_string());
        }
    }
}

fn keep_runsc(binaries: &BinaryStore, program: &Path) -> Result<Kept, String> {
    let advice = "install it (`cargo xtask up` does), or name another with --runsc";
    let kept = binaries.ensure(program).map_err(|e| format!("runsc can't be used: {e}; {advice}"))?;
    let version = runtime_gvisor::runsc_version(&kept.path).map_err(|e| format!("{e}; {advice}"))?;
    Ok(Kept { hash: kept.hash, path: kept.path, version })
}

pub(crate) fn hash_of(text: Option<&str>) -> Option<Hash> {
    text?.parse().ok()
}

/// A template's failure, as callers are told.
pub(crate) fn template_error(error: TemplateError) -> Error {
    match error {
        TemplateError::NotFound(name) => Error::NotFound {
            what: format!(
                "template '{name}'; make the default one with `cargo xtask build`, or add one with `dormouse template add`"
            ),
        },
        TemplateError::BadName(_) => Error::invalid("template", error),
        other => Error::internal(other),
    }
}

/// True where a sandbox with these limits can come from the pool.
pub(crate) fn is_default(resources: &Resources) -> bool {
    *resources == Resources::default()
}
