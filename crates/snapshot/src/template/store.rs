//! The folder of templates: adding, finding, pinning, removing.

use super::{
    Descriptor, FORMAT_VERSION, Listed, TemplateError, TemplateKind, TemplateRef, debian, host, io_error, workspace::Workspace,
};
use crate::{
    Hash,
    extract::{self, ExtractOptions},
    fsutil,
    tree::{self, Summary},
};
use model::Timestamp;
use std::{
    collections::HashSet,
    fs::{self, File, Metadata},
    io::{self, Read},
    path::{Path, PathBuf},
};

/// The longest descriptor that is read.
const DESCRIPTOR_MAX: u64 = 64 << 10;

/// A folder of templates. Cheap to open; several processes may have the same one open.
#[derive(Debug, Clone)]
pub struct TemplateStore {
    dir: PathBuf,
}

/// What [`TemplateStore::collect`] removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    pub trees: Vec<Hash>,
}

/// What a builder hands over.
pub(super) struct Built {
    pub(super) kind: TemplateKind,
    pub(super) summary: Summary,
    /// Further files kept beside the tree: (extension, content).
    pub(super) beside: Vec<(&'static str, Vec<u8>)>,
}

/// Fills an empty folder with a tree, telling people how it goes.
type Builder = fn(&Path, &mut dyn FnMut(&str)) -> Result<Built, TemplateError>;

impl TemplateStore {
    /// Opens the folder, makes it where it is missing, and removes what builders that died left in it.
    ///
    /// # Errors
    /// [`TemplateError::Io`].
    pub fn open(dir: impl Into<PathBuf>) -> Result<TemplateStore, TemplateError> {
        let dir = dir.into();
        fsutil::ensure_dir(&dir, 0o755).map_err(io_error("create", &dir))?;
        let dir = fs::canonicalize(&dir).map_err(io_error("find", &dir))?;
        let store = TemplateStore { dir };
        for (name, mode) in [("names", 0o755), ("pins", 0o755), ("trees", 0o700), ("tmp", 0o700)] {
            // Trees contain set-uid programs, maybe of strangers: no other user of this machine may reach them.
            let path = store.dir.join(name);
            fsutil::ensure_dir(&path, mode).map_err(io_error("create", &path))?;
        }
        let tmp = store.tmp();
        Workspace::sweep(&tmp).map_err(io_error("clean", &tmp))?;
        Ok(store)
    }

    /// All names with what they mean now, sorted.
    ///
    /// # Errors
    /// [`TemplateError::Io`], and what [`TemplateStore::descriptor`] says about a damaged one.
    pub fn list(&self) -> Result<Vec<Listed>, TemplateError> {
        let mut all = Vec::new();
        for name in names_in(&self.dir.join("names"))? {
            // Removed meanwhile: not in the list.
            let Some(hash) = self.hash_of_name(&name)? else { continue };
            let descriptor = self.descriptor(hash)?;
            all.push(Listed { name, descriptor, pins: names_in(&self.pins_of(hash))?.len() });
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Finds a template by name, or by its whole hash.
    ///
    /// # Errors
    /// [`TemplateError::NotFound`], [`TemplateError::Newer`], [`TemplateError::Damaged`].
    pub fn resolve(&self, name_or_hash: &str) -> Result<TemplateRef, TemplateError> {
        let not_found = || TemplateError::NotFound(name_or_hash.chars().take(100).collect());
        let by_name = check_name(name_or_hash).is_ok();
        let hash = match name_or_hash.parse() {
            Ok(hash) => hash,
            Err(_) if by_name => self.hash_of_name(name_or_hash)?.ok_or_else(not_found)?,
            Err(_) => return Err(not_found()),
        };
        let root_path = self.root_of(hash);
        if !root_path.is_dir() {
            return Err(not_found());
        }
        let descriptor = self.descriptor(hash)?;
        let name = if by_name { name_or_hash.to_owned() } else { descriptor.made_as };
        Ok(TemplateRef { hash, name, root_path })
    }

    /// What is known about a tree.
    ///
    /// # Errors
    /// [`TemplateError::NotFound`], [`TemplateError::Newer`], [`TemplateError::Damaged`].
    pub fn descriptor(&self, hash: Hash) -> Result<Descriptor, TemplateError> {
        let path = self.beside(hash, "json");
        let bytes = match fsutil::read_limited(&path, DESCRIPTOR_MAX) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(TemplateError::NotFound(hash.to_string())),
            Err(e) => return Err(io_error("read", &path)(e)),
        };
        let damaged = |what: String| TemplateError::Damaged { hash, what };
        // The version first: a newer descriptor may have another shape.
        let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
        match value["format_version"].as_u64() {
            Some(version) if version > u64::from(FORMAT_VERSION) => {
                return Err(TemplateError::Newer { hash, version: u32::try_from(version).unwrap_or(u32::MAX) });
            }
            Some(_) => {}
            None => return Err(damaged("its descriptor has no format_version".into())),
        }
        let descriptor: Descriptor = serde_json::from_value(value).map_err(|e| damaged(e.to_string()))?;
        if descriptor.hash != hash {
            return Err(damaged(format!("its descriptor belongs to {}", descriptor.hash)));
        }
        Ok(descriptor)
    }

    /// Copies the tree at `path` in and gives it `name`, which may have meant another tree before. Device nodes are left
    /// out of `/dev` and refused elsewhere.
    ///
    /// # Errors
    /// [`TemplateError::BadName`], [`TemplateError::Tree`], [`TemplateError::Io`].
    pub fn add_dir(&self, name: &str, path: &Path) -> Result<TemplateRef, TemplateError> {
        if !path.is_dir() {
            return Err(io_error("read", path)(io::ErrorKind::NotADirectory.into()));
        }
        let source = fs::canonicalize(path).map_err(io_error("find", path))?;
        if self.dir.starts_with(&source) {
            return Err(io_error("copy", path)(io::Error::other("the folder of templates lies in it")));
        }
        self.build(name, |root| {
            fs::remove_dir(root).map_err(io_error("prepare", root))?;
            tree::copy(&source, root)?;
            summarized(TemplateKind::Dir, root)
        })
    }

    /// Unpacks an archive (tar, plain or compressed with gzip or zstd) and gives the tree `name`. Device nodes are left
    /// out of `/dev` and refused elsewhere.
    ///
    /// # Errors
    /// [`TemplateError::BadName`], [`TemplateError::Extract`], [`TemplateError::Io`].
    pub fn add_tar(&self, name: &str, archive: impl Read) -> Result<TemplateRef, TemplateError> {
        self.build(name, |root| {
            let fd = File::open(root).map_err(io_error("open", root))?;
            extract::extract_tar_into(&fd, Path::new("."), archive, &ExtractOptions::template())?;
            summarized(TemplateKind::Tar, root)
        })
    }

    /// Unpacks the layers of an image in an OCI layout folder (image-spec, `image-layout.md`) and gives the tree `name`.
    /// `reference` picks one of several images by its `org.opencontainers.image.ref.name`.
    ///
    /// # Errors
    /// [`TemplateError::BadName`], [`TemplateError::Extract`] (also for a wrong digest), [`TemplateError::Io`].
    pub fn add_oci_layout(&self, name: &str, layout: &Path, reference: Option<&str>) -> Result<TemplateRef, TemplateError> {
        self.build(name, |root| {
            let fd = File::open(root).map_err(io_error("open", root))?;
            extract::oci::extract_image(&fd, layout, reference)?;
            summarized(TemplateKind::OciLayout, root)
        })
    }

    /// The built-in template `debian`, built where it is missing (about a minute). Of several callers, in this process or
    /// others, one builds and the others wait. `progress` gets lines for people.
    ///
    /// # Errors
    /// [`TemplateError::Missing`] names the package to install, [`TemplateError::Build`] has the builder's last lines.
    pub fn ensure_debian(&self, progress: &mut dyn FnMut(&str)) -> Result<TemplateRef, TemplateError> {
        self.ensure("debian", progress, debian::build)
    }

    /// The built-in template `host`: this machine's tools, taken where it is missing.
    ///
    /// # Errors
    /// [`TemplateError::Io`], [`TemplateError::Tree`].
    pub fn ensure_host(&self, progress: &mut dyn FnMut(&str)) -> Result<TemplateRef, TemplateError> {
        self.ensure("host", progress, host::build)
    }

    /// Which files of a `host` template were changed in place on the machine since it was taken. Empty for a template
    /// that shares no file with the machine.
    ///
    /// # Errors
    /// [`TemplateError::NotFound`], [`TemplateError::Damaged`], [`TemplateError::Io`].
    pub fn verify_host(&self, hash: Hash) -> Result<Vec<host::Changed>, TemplateError> {
        if self.descriptor(hash)?.kind != TemplateKind::Host {
            return Ok(Vec::new());
        }
        host::verify(hash, &self.root_of(hash), &self.beside(hash, host::MANIFEST))
    }

    /// Puts a template in its place whose tree was made elsewhere: at `unpacked`, where nobody else changes it, and where it
    /// is gone afterwards, but for an error. It gets no name, but a pin of `who`. A template that is here already stays as
    /// it is.
    ///
    /// The address of a `host` template isn't that of its content but of another machine at some moment, so nobody can tell
    /// whether a tree deserves it. Such a tree becomes a template of kind `dir` with an address of its own: the returned one.
    ///
    /// # Errors
    /// [`TemplateError::Damaged`] where the tree has another address or what no template has, [`TemplateError::Newer`],
    /// [`TemplateError::BadName`], [`TemplateError::BadPin`], [`TemplateError::Tree`], [`TemplateError::Io`].
    pub fn adopt(&self, descriptor: &Descriptor, unpacked: &Path, who: &str) -> Result<TemplateRef, TemplateError> {
        let (hash, version) = (descriptor.hash, descriptor.format_version);
        if version > FORMAT_VERSION {
            return Err(TemplateError::Newer { hash, version });
        }
        check_pin(who)?;
        check_name(&descriptor.made_as)?;
        if let Some(path) = tree::first_trusted(unpacked)? {
            let path = path.strip_prefix(unpacked).unwrap_or(&path).display().to_string();
            return Err(TemplateError::Damaged { hash, what: format!("'{path}' has attributes of an overlay") });
        }
        let is_host = descriptor.kind == TemplateKind::Host;
        let built = summarized(if is_host { TemplateKind::Dir } else { descriptor.kind }, unpacked)?;
        let found = built.summary.hash;
        if found != hash && !is_host {
            return Err(TemplateError::Damaged { hash, what: format!("its files have the address {found}") });
        }
        let workspace = self.workspace()?;
        let root = workspace.path("root");
        tree::relocate(unpacked, &root)?;
        sync(&root)?;
        let _lock = self.lock()?;
        self.publish(&root, &built, &descriptor.made_as, descriptor.created_at)?;
        self.write_pin(found, who)?;
        Ok(TemplateRef { hash: found, name: descriptor.made_as.clone(), root_path: self.root_of(found) })
    }

    /// Takes the name away, and the tree too where it has no other name and no pin.
    ///
    /// # Errors
    /// [`TemplateError::NotFound`], [`TemplateError::Io`].
    pub fn remove(&self, name: &str) -> Result<(), TemplateError> {
        {
            let _lock = self.lock()?;
            if check_name(name).is_err() || self.hash_of_name(name)?.is_none() {
                return Err(TemplateError::NotFound(name.chars().take(100).collect()));
            }
            let path = self.dir.join("names").join(name);
            fsutil::remove_if_there(&path)
                .and_then(|()| fsutil::sync_dir(&self.dir.join("names")))
                .map_err(io_error("remove", &path))?;
        }
        self.collect().map(|_| ())
    }

    /// Keeps a tree until [`TemplateStore::unpin`], whatever happens to its names. Again: no change.
    ///
    /// # Errors
    /// [`TemplateError::NotFound`], [`TemplateError::BadPin`], [`TemplateError::Io`].
    pub fn pin(&self, hash: Hash, who: &str) -> Result<(), TemplateError> {
        check_pin(who)?;
        let _lock = self.lock()?;
        if !self.root_of(hash).is_dir() {
            return Err(TemplateError::NotFound(hash.to_string()));
        }
        self.write_pin(hash, who)
    }

    fn write_pin(&self, hash: Hash, who: &str) -> Result<(), TemplateError> {
        let dir = self.pins_of(hash);
        fsutil::ensure_dir(&dir, 0o755)
            .and_then(|()| fsutil::sync_dir(&self.dir.join("pins")))
            .and_then(|()| fsutil::write_atomic(&dir.join(who), b"", 0o644))
            .map_err(io_error("write a pin in", &dir))
    }

    /// Takes a pin away; fine if there is none. The tree goes at the next [`TemplateStore::collect`].
    ///
    /// # Errors
    /// [`TemplateError::BadPin`], [`TemplateError::Io`].
    pub fn unpin(&self, hash: Hash, who: &str) -> Result<(), TemplateError> {
        check_pin(who)?;
        let _lock = self.lock()?;
        let dir = self.pins_of(hash);
        fsutil::remove_if_there(&dir.join(who)).map_err(io_error("remove a pin in", &dir))?;
        // Fails while others pin it, too.
        let _ = fs::remove_dir(&dir);
        Ok(())
    }

    /// The trees that `who` has pinned, with a name or without.
    ///
    /// # Errors
    /// [`TemplateError::BadPin`], [`TemplateError::Io`].
    pub fn pinned_by(&self, who: &str) -> Result<Vec<Hash>, TemplateError> {
        check_pin(who)?;
        let pinned = names_in(&self.dir.join("pins"))?.into_iter().filter_map(|name| name.parse().ok());
        Ok(pinned.filter(|hash| self.pins_of(*hash).join(who).exists()).collect())
    }

    /// Removes every tree without name and pin.
    ///
    /// # Errors
    /// [`TemplateError::Io`].
    pub fn collect(&self) -> Result<Collected, TemplateError> {
        let workspace = self.workspace()?;
        let mut collected = Collected::default();
        {
            let _lock = self.lock()?;
            let mut named = HashSet::new();
            for name in names_in(&self.dir.join("names"))? {
                named.extend(self.hash_of_name(&name)?);
            }
            for tree in names_in(&self.dir.join("trees"))? {
                let Ok(hash) = tree.parse::<Hash>() else { continue };
                if named.contains(&hash) || !names_in(&self.pins_of(hash))?.is_empty() {
                    continue;
                }
                // The tree loses its name in one step, and is taken apart after.
                let path = self.root_of(hash);
                fs::rename(&path, workspace.path(&tree)).map_err(io_error("remove", &path))?;
                for beside in ["json", host::MANIFEST] {
                    let path = self.beside(hash, beside);
                    fsutil::remove_if_there(&path).map_err(io_error("remove", &path))?;
                }
                collected.trees.push(hash);
            }
        }
        Ok(collected)
    }

    fn ensure(&self, name: &'static str, progress: &mut dyn FnMut(&str), build: Builder) -> Result<TemplateRef, TemplateError> {
        let found = |result| match result {
            Err(TemplateError::NotFound(_)) => Ok(None),
            other => other.map(Some),
        };
        if let Some(template) = found(self.resolve(name))? {
            return Ok(template);
        }
        let lock_path = self.dir.join(format!(".lock-{name}"));
        let lock = fsutil::open_lock_file(&lock_path).map_err(io_error("open", &lock_path))?;
        if lock.try_lock().is_err() {
            progress(&format!("another process is making the template '{name}', waiting for it"));
            lock.lock().map_err(io_error("lock", &lock_path))?;
        }
        if let Some(template) = found(self.resolve(name))? {
            return Ok(template);
        }
        self.build(name, |root| build(root, progress))
    }

    /// Builds a tree in an empty folder, then publishes it under its hash and its name.
    fn build(&self, name: &str, build: impl FnOnce(&Path) -> Result<Built, TemplateError>) -> Result<TemplateRef, TemplateError> {
        check_name(name)?;
        let workspace = self.workspace()?;
        let root = workspace.path("root");
        fsutil::ensure_dir(&root, 0o755).map_err(io_error("create", &root))?;
        let built = build(&root)?;
        sync(&root)?;
        let hash = built.summary.hash;
        let _lock = self.lock()?;
        self.publish(&root, &built, name, fsutil::now())?;
        let path = self.dir.join("names").join(name);
        fsutil::write_atomic(&path, hash.to_string().as_bytes(), 0o644).map_err(io_error("write", &path))?;
        Ok(TemplateRef { hash, name: name.to_owned(), root_path: self.root_of(hash) })
    }

    /// Gives a tree, which is on the disk for good, its place, unless another has it. The caller holds the lock.
    fn publish(&self, root: &Path, built: &Built, made_as: &str, created_at: Timestamp) -> Result<(), TemplateError> {
        let hash = built.summary.hash;
        let target = self.root_of(hash);
        if target.is_dir() {
            return Ok(());
        }
        let descriptor = Descriptor {
            format_version: FORMAT_VERSION,
            hash,
            made_as: made_as.to_owned(),
            kind: built.kind,
            created_at,
            size_bytes: built.summary.size_bytes,
            files: built.summary.files,
        };
        let json = serde_json::to_vec_pretty(&descriptor).map_err(|e| io_error("describe", &target)(e.into()))?;
        for (extension, content) in built.beside.iter().map(|(e, c)| (*e, c)).chain([("json", &json)]) {
            let path = self.beside(hash, extension);
            fsutil::write_atomic(&path, content, 0o644).map_err(io_error("write", &path))?;
        }
        fs::rename(root, &target).map_err(io_error("publish", &target))?;
        let trees = self.dir.join("trees");
        fsutil::sync_dir(&trees).map_err(io_error("sync", &trees))
    }

    fn hash_of_name(&self, name: &str) -> Result<Option<Hash>, TemplateError> {
        let path = self.dir.join("names").join(name);
        match fsutil::read_limited(&path, 256) {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&bytes);
                let bad = |e: crate::HashError| io_error("read", &path)(io::Error::new(io::ErrorKind::InvalidData, e));
                text.trim().parse().map(Some).map_err(bad)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io_error("read", &path)(e)),
        }
    }

    fn lock(&self) -> Result<File, TemplateError> {
        let path = self.dir.join(".lock");
        let lock = fsutil::open_lock_file(&path).map_err(io_error("open", &path))?;
        lock.lock().map_err(io_error("lock", &path))?;
        Ok(lock)
    }

    fn workspace(&self) -> Result<Workspace, TemplateError> {
        let tmp = self.tmp();
        Workspace::create(&tmp).map_err(io_error("create a folder in", &tmp))
    }

    fn tmp(&self) -> PathBuf {
        self.dir.join("tmp")
    }

    fn root_of(&self, hash: Hash) -> PathBuf {
        self.dir.join("trees").join(hash.to_string())
    }

    fn beside(&self, hash: Hash, extension: &str) -> PathBuf {
        self.dir.join("trees").join(format!("{hash}.{extension}"))
    }

    fn pins_of(&self, hash: Hash) -> PathBuf {
        self.dir.join("pins").join(hash.to_string())
    }
}

/// Everything in a tree must be on the disk before its name is.
fn sync(root: &Path) -> Result<(), TemplateError> {
    let dir = File::open(root).map_err(io_error("open", root))?;
    rustix::fs::syncfs(&dir).map_err(|e| io_error("sync", root)(e.into()))
}

pub(super) fn summarized(kind: TemplateKind, root: &Path) -> Result<Built, TemplateError> {
    let by_content = |_: &Metadata| false;
    Ok(Built { kind, summary: tree::summarize(root, &by_content)?, beside: Vec::new() })
}

/// The names in a folder, without those of files being written; none where the folder is missing.
fn names_in(dir: &Path) -> Result<Vec<String>, TemplateError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io_error("read", dir)(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io_error("read", dir))?;
        names.extend(entry.file_name().into_string().ok().filter(|n| !n.starts_with('.')));
    }
    Ok(names)
}

fn is_file_name(name: &str, max: usize, allowed: fn(u8) -> bool) -> bool {
    (1..=max).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(|b| allowed(b) || b"._-".contains(&b))
}

fn check_name(name: &str) -> Result<(), TemplateError> {
    let fine = is_file_name(name, 64, |b| b.is_ascii_lowercase() || b.is_ascii_digit())
        && name.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
        && name.parse::<Hash>().is_err();
    if fine { Ok(()) } else { Err(TemplateError::BadName(name.chars().take(100).collect())) }
}

fn check_pin(who: &str) -> Result<(), TemplateError> {
    let fine = is_file_name(who, 128, |b| b.is_ascii_alphanumeric());
    if fine { Ok(()) } else { Err(TemplateError::BadPin(who.chars().take(100).collect())) }
}

#[cfg(test)]
mod tests;
