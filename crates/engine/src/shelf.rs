//! Where snapshots and disk layers lie, and who still needs them.
//!
//! ```text
//! DATA/layers/LAYER/       disk layers: see `snapshot::layer`
//! DATA/snapshots/SNAP/     laid out as a session's directory: the memory image and the journals of what ran
//! ```
//! A directory that the store knows nothing of is the rest of something that was cut short; the next start clears it away.

use crate::{
    Error, OpenError, ending,
    inner::{Inner, blocking},
    launch::{ensure_private_dir, io_error},
    parcels::evict,
    scan,
};
use model::{Generation, LayerId, Offset, ServiceName, SnapshotId};
use snapshot::{
    image::{DISK, STARTED},
    layer::LayerStore,
};
use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use wire::{
    layout::{JournalName, SessionLayout},
    records::{ExecRecord, TerminalRecord},
};

/// The parts of a session's directory that hold journals of what runs.
const JOURNALS: [&str; 3] = ["execs", "terminals", "services"];
/// The journal of what supervisors wrote down.
pub(crate) const FACTS: &str = "facts";

/// Snapshots and layers of one data directory.
pub(crate) struct Shelf {
    dir: PathBuf,
    layers_dir: PathBuf,
    pub layers: LayerStore,
    /// Held shared while something begins to need a snapshot or a layer, exclusively while what nobody needs is removed.
    needs: Arc<RwLock<()>>,
    /// Layers that are being made: nothing in the store needs them yet.
    making: Arc<Mutex<HashSet<LayerId>>>,
}

/// A layer that is being made; it isn't cleared away before this is dropped.
pub(crate) struct Making {
    pub id: LayerId,
    all: Arc<Mutex<HashSet<LayerId>>>,
}

impl Drop for Making {
    fn drop(&mut self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

impl Shelf {
    /// Opens the shelf of a data directory. Blocks.
    ///
    /// # Errors
    /// It can't be written.
    pub(crate) fn open(data_dir: &Path) -> Result<Shelf, OpenError> {
        let (dir, layers_dir) = (data_dir.join("snapshots"), data_dir.join("layers"));
        for dir in [&dir, &layers_dir] {
            ensure_private_dir(dir).map_err(|source| OpenError::Io { what: "make the directory", path: dir.clone(), source })?;
        }
        let layers = LayerStore::open(&layers_dir).map_err(|e| OpenError::Other(e.to_string()))?;
        Ok(Shelf { dir, layers_dir, layers, needs: Arc::default(), making: Arc::default() })
    }

    /// Where disk layers are kept.
    pub(crate) fn layers_dir(&self) -> &Path {
        &self.layers_dir
    }

    /// What lies where in a snapshot's directory.
    pub(crate) fn layout(&self, id: SnapshotId) -> SessionLayout {
        SessionLayout::new(self.dir.join(id.to_string()))
    }

    /// The directories of layers, for an overlay.
    pub(crate) fn lower(&self, layers: &[LayerId]) -> Vec<PathBuf> {
        layers.iter().map(|layer| self.layers.path(*layer)).collect()
    }

    /// Announces a layer that is going to be made.
    pub(crate) fn make(&self) -> Making {
        let id = LayerId::new();
        self.making.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
        Making { id, all: self.making.clone() }
    }

    /// While it is held, no snapshot and no layer is removed.
    pub(crate) async fn hold(&self) -> OwnedRwLockReadGuard<()> {
        self.needs.clone().read_owned().await
    }

    /// While it is held, nothing new begins to need a snapshot or a layer.
    pub(crate) async fn alone(&self) -> OwnedRwLockWriteGuard<()> {
        self.needs.clone().write_owned().await
    }

    /// Removes a snapshot's directory. Blocks.
    pub(crate) fn remove(&self, id: SnapshotId) -> io::Result<()> {
        ending::remove_tree(self.layout(id).dir())
    }

    /// Directories of snapshots, by their names.
    fn present(&self) -> io::Result<Vec<SnapshotId>> {
        let entries = fs::read_dir(&self.dir)?;
        Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
    }
}

/// Removes the layers that neither a snapshot nor a session needs.
pub(crate) async fn collect_layers(inner: &Arc<Inner>) -> Result<(), Error> {
    let _alone = inner.shelf.alone().await;
    // In this order: a layer that is there and isn't being made any more is in the store by now, or given up.
    let inner_ = inner.clone();
    let mut unneeded = blocking(move || inner_.shelf.layers.list()).await?.map_err(Error::internal)?;
    let making = inner.shelf.making.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let needed = needed_layers(inner).await?;
    unneeded.retain(|layer| !making.contains(layer) && !needed.contains(layer));
    let inner_ = inner.clone();
    blocking(move || {
        for layer in unneeded {
            if let Err(error) = inner_.shelf.layers.remove(layer) {
                tracing::warn!(%layer, %error, "a disk layer that nobody needs stays");
            }
        }
    })
    .await
}

async fn needed_layers(inner: &Inner) -> Result<HashSet<LayerId>, Error> {
    let (mut of_snapshots, mut of_sessions) = (HashSet::new(), HashSet::new());
    scan::all(&*inner.store, |row| of_snapshots.extend(row.layers), |row| of_sessions.extend(row.layers)).await?;
    of_snapshots.extend(of_sessions);
    Ok(of_snapshots)
}

/// Clears away, at the start, what a server or a supervisor that died was making.
pub(crate) async fn clear_leftovers(inner: &Arc<Inner>) -> Result<(), Error> {
    let keep = needed_layers(inner).await?;
    let inner_ = inner.clone();
    let present = blocking(move || {
        if let Err(error) = inner_.shelf.layers.sweep_leftovers(&keep) {
            tracing::warn!(%error, "the rest of a disk layer stays");
        }
        inner_.shelf.present()
    })
    .await?
    .map_err(|e| io_error(&e, "read the snapshots' directory"))?;
    for id in present {
        let row = inner.store.snapshot(id).await?;
        if row.is_none_or(|row| row.deleted_at.is_some()) {
            let inner = inner.clone();
            let removed = blocking(move || inner.shelf.remove(id)).await?;
            if let Err(error) = removed {
                tracing::warn!(snapshot = %id, %error, "the rest of a snapshot stays");
            }
        }
    }
    evict::clear_away(inner).await
}

/// Puts the memory of `from`, which is that of `generation`, into the directory `image`. Its files never change, so they
/// are shared where both lie on one file system. What the last wake noted in it stays behind. Synced. Blocks.
pub(crate) fn copy_image(from: &Path, image: &Path) -> io::Result<()> {
    ending::remove_tree(image)?;
    faults::file("image.copy")?;
    fs::create_dir_all(image)?;
    for entry in fs::read_dir(from)? {
        let name = entry?.file_name();
        if name == STARTED || name == DISK {
            continue;
        }
        let (from, into) = (from.join(&name), image.join(&name));
        match fs::hard_link(&from, &into) {
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                fs::copy(&from, &into)?;
                File::open(&into)?.sync_all()?;
            }
            other => other?,
        }
    }
    image.ancestors().take(2).try_for_each(|dir| File::open(dir)?.sync_all())
}

/// Puts a snapshot's journals beside those that a session has; of a stream that both have, the snapshot's is it. Blocks.
pub(crate) fn copy_journals(from: &SessionLayout, into: &SessionLayout) -> io::Result<()> {
    for kind in JOURNALS {
        let entries = match fs::read_dir(from.dir().join(kind)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for entry in entries {
            let name = entry?.file_name();
            let journal = into.dir().join(kind).join(&name);
            ending::remove_tree(&journal)?;
            journal::copy(&from.dir().join(kind).join(&name), &journal, Offset(u64::MAX))?;
        }
    }
    Ok(())
}

/// Moves journals that were staged in `from` to their places in a session's directory. Can be repeated. Blocks.
pub(crate) fn move_journals(from: &SessionLayout, into: &SessionLayout) -> io::Result<()> {
    for kind in JOURNALS {
        let Ok(entries) = fs::read_dir(from.dir().join(kind)) else { continue };
        for entry in entries {
            let name = entry?.file_name();
            let (staged, journal) = (from.dir().join(kind).join(&name), into.dir().join(kind).join(&name));
            fs::create_dir_all(into.dir().join(kind))?;
            ending::remove_tree(&journal)?;
            fs::rename(staged, journal)?;
        }
    }
    if from.dir().join(FACTS).is_dir() {
        ending::remove_tree(&into.dir().join(FACTS))?;
        fs::rename(from.dir().join(FACTS), into.dir().join(FACTS))?;
    }
    Ok(())
}

/// Directories of all journals below `dir`, relative to it, sorted: those of what runs, and the facts. Blocks.
pub(crate) fn journals_of(dir: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for kind in JOURNALS {
        let Ok(entries) = fs::read_dir(dir.join(kind)) else { continue };
        for entry in entries {
            let name = entry?.file_name();
            found.push(format!("{kind}/{}", name.to_string_lossy()));
        }
    }
    found.sort_unstable();
    if dir.join(FACTS).is_dir() {
        found.push(FACTS.to_owned());
    }
    Ok(found)
}

/// True for what [`journals_of`] can answer, and nothing that leads elsewhere.
pub(crate) fn is_journal(path: &str) -> bool {
    let plain = |name: &str| (1..=255).contains(&name.len()) && !name.starts_with('.') && !name.contains(['/', '\0']);
    path == FACTS || path.split_once('/').is_some_and(|(kind, name)| JOURNALS.contains(&kind) && plain(name))
}

/// Where the memory of a snapshot lies.
pub(crate) fn image_of(inner: &Inner, id: SnapshotId, generation: Generation) -> PathBuf {
    inner.shelf.layout(id).image(generation)
}

/// The journals of what runs.
pub(crate) fn streams(execs: &[ExecRecord], terminals: &[TerminalRecord], services: Vec<ServiceName>) -> Vec<JournalName> {
    let of_execs = execs.iter().flat_map(|exec| [JournalName::Stdout(exec.id), JournalName::Stderr(exec.id)]);
    let of_terminals = terminals.iter().map(|terminal| JournalName::Terminal(terminal.id));
    of_execs.chain(of_terminals).chain(services.into_iter().map(JournalName::Service)).collect()
}
