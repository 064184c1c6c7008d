//! The folder of layers.

use super::{
    GONE, Layer, LayerDescriptor, LayerError, STAGED, TREE_DIR,
    content::{Copier, set_times},
    dirs::Dirs,
    io_error,
    measure::Measure,
    prints,
    staging::{self, Staging, try_lock},
    xattr,
};
use crate::fsutil;
use model::LayerId;
use rustix::fs::{CWD, Mode, OFlags};
use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

/// A folder of layers. Cheap to open; several processes may have the same one open.
#[derive(Debug, Clone)]
pub struct LayerStore {
    dir: PathBuf,
}

impl LayerStore {
    /// Opens the folder, and makes it where it is missing. It should be on the file system of the sessions' disks, since
    /// only there can blocks be shared with them. Layers have set-uid programs of strangers in them, so no other user of
    /// this machine gets in.
    ///
    /// # Errors
    /// [`LayerError::Io`].
    pub fn open(dir: impl Into<PathBuf>) -> Result<LayerStore, LayerError> {
        let dir = dir.into();
        fsutil::ensure_dir(&dir, 0o700).map_err(io_error("create", &dir))?;
        let dir = fs::canonicalize(&dir).map_err(io_error("find", &dir))?;
        Ok(LayerStore { dir })
    }

    /// A layer's tree, for the `lower` list of a disk. Nothing is looked at.
    pub fn path(&self, id: LayerId) -> PathBuf {
        self.place(id).join(TREE_DIR)
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn place(&self, id: LayerId) -> PathBuf {
        self.dir.join(id.to_string())
    }

    /// Reads what a layer is.
    ///
    /// # Errors
    /// [`LayerError::Missing`], also for one that was cut short; [`LayerError::Damaged`], [`LayerError::Newer`].
    pub fn read(&self, id: LayerId) -> Result<Layer, LayerError> {
        let descriptor = LayerDescriptor::read(id, &self.place(id))?;
        Ok(Layer { id, descriptor })
    }

    /// Puts a layer in its place whose tree was made elsewhere: at `unpacked`, on this file system. There it is gone
    /// afterwards. A layer that is here already stays as it is. The next capture above it shares no files with it.
    ///
    /// # Errors
    /// [`LayerError::Io`]; then the tree may still be at `unpacked`.
    pub fn adopt(&self, id: LayerId, descriptor: &LayerDescriptor, unpacked: &Path) -> Result<Layer, LayerError> {
        if let Some(layer) = self.find(id)? {
            crate::parcel::remove(unpacked).map_err(|e| io_error("remove", unpacked)(io::Error::other(e)))?;
            return Ok(layer);
        }
        let staging = Staging::create(&self.dir, id)?;
        let tree = staging.path().join(TREE_DIR);
        fs::rename(unpacked, &tree).map_err(io_error("move", unpacked))?;
        prints::write(staging.path(), &Dirs::new(), [].iter()).map_err(io_error("describe", staging.path()))?;
        let descriptor = staging.publish(|tree| {
            let measured = LayerDescriptor::measured(tree, descriptor.session, descriptor.created_at)?;
            if measured.entries == descriptor.entries {
                return Ok(measured);
            }
            let (found, expected) = (measured.entries, descriptor.entries);
            Err(io::Error::other(format!("the layer has {found} entries, not {expected} as when it was made")))
        })?;
        Ok(Layer { id, descriptor })
    }

    fn find(&self, id: LayerId) -> Result<Option<Layer>, LayerError> {
        match self.read(id) {
            Err(LayerError::Missing(_)) => Ok(None),
            other => other.map(Some),
        }
    }

    /// All whole layers, oldest first. Damaged ones are among them.
    ///
    /// # Errors
    /// [`LayerError::Io`].
    pub fn list(&self) -> Result<Vec<LayerId>, LayerError> {
        let whole = |id: &LayerId| !matches!(self.read(*id), Err(LayerError::Missing(_)));
        let mut ids: Vec<LayerId> = self.names()?.iter().filter_map(|name| id_of(name)).filter(whole).collect();
        ids.sort_unstable();
        Ok(ids)
    }

    fn names(&self) -> Result<Vec<OsString>, LayerError> {
        let read = || fs::read_dir(&self.dir)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>();
        read().map_err(io_error("read", &self.dir))
    }

    /// Removes a layer; fine if there is none. It is out of sight at once, and stays so after a crash. What other layers
    /// share with it stays theirs. Nothing may be mounted above it.
    ///
    /// # Errors
    /// [`LayerError::Io`].
    pub fn remove(&self, id: LayerId) -> Result<(), LayerError> {
        let (place, gone) = (self.place(id), format!("{GONE}{id}"));
        // The rest of an earlier removal would be in the way.
        staging::remove(&self.dir, OsStr::new(&gone)).map_err(io_error("remove", &place))?;
        let renamed = faults::file("layer.remove").and_then(|()| fs::rename(&place, self.dir.join(&gone)));
        match renamed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.and_then(|()| fsutil::sync_dir(&self.dir)).map_err(io_error("remove", &place))?,
        }
        faults::point("layer.gone");
        staging::remove(&self.dir, OsStr::new(&gone)).map_err(io_error("remove", &place))
    }

    /// Removes what nobody needs: layers that were never finished and whose maker is dead, layers whose removal was cut
    /// short, and whole layers that aren't in `keep`. A layer that is being made now, by whatever process, stays.
    /// Returns what was removed.
    ///
    /// # Errors
    /// [`LayerError::Io`]; the others are removed all the same.
    pub fn sweep_leftovers(&self, keep: &HashSet<LayerId>) -> Result<Vec<LayerId>, LayerError> {
        let (mut removed, mut failed) = (Vec::new(), None);
        for name in self.names()? {
            match self.sweep(&name, keep) {
                Ok(id) => removed.extend(id),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(removed),
        }
    }

    fn sweep(&self, name: &OsStr, keep: &HashSet<LayerId>) -> Result<Option<LayerId>, LayerError> {
        let text = name.to_str().unwrap_or_default();
        if let Some(id) = id_of(name) {
            if keep.contains(&id) {
                return Ok(None);
            }
            return self.remove(id).map(|()| Some(id));
        }
        let Some(id) = text.strip_prefix(STAGED).or(text.strip_prefix(GONE)).and_then(|id| id_of(OsStr::new(id))) else {
            return Ok(None);
        };
        let path = self.dir.join(name);
        let Some(lock) = try_lock(&path).map_err(io_error("lock", &path))? else { return Ok(None) };
        // Its maker may have finished it between the look at the directory and the lock.
        let is_there = fsutil::is_still_at(&lock, &path).map_err(io_error("look at", &path))?;
        staging::remove(&self.dir, name).map_err(io_error("remove", &path))?;
        Ok(is_there.then_some(id))
    }

    /// How many bytes would be free if these layers were removed: the blocks of all inodes that have no name outside of
    /// them. Blocks that a file system shares between inodes by itself count for each.
    ///
    /// # Errors
    /// [`LayerError::Missing`], [`LayerError::Io`].
    pub fn unique_bytes(&self, layers: &[LayerId]) -> Result<u64, LayerError> {
        let mut measure = Measure::default();
        for id in layers.iter().collect::<HashSet<_>>() {
            measure.add(self.open_tree(*id)?).map_err(io_error("measure", &self.path(*id)))?;
        }
        Ok(measure.own_bytes())
    }

    /// Gives the root of a fresh upper directory the owner, mode, times and attributes of the root of `id`, the layer right
    /// below it: in an overlay the top-most layer's root is what `/` looks like.
    ///
    /// # Errors
    /// [`LayerError::Missing`], [`LayerError::Io`].
    pub fn dress_root(&self, id: LayerId, upper: &Path) -> Result<(), LayerError> {
        let tree = self.open_tree(id)?;
        let dress = || {
            let upper = open_dir(upper)?;
            let stat = rustix::fs::fstat(&tree)?;
            Copier::new().directory(tree.as_fd(), &stat, upper.as_fd(), xattr::apart_from_layers, &[])?;
            set_times(upper.as_fd(), OsStr::new("."), &stat)
        };
        dress().map_err(|e| io_error("dress", upper)(e.into()))
    }

    pub(super) fn open_tree(&self, id: LayerId) -> Result<OwnedFd, LayerError> {
        let path = self.path(id);
        match open_dir(&path) {
            Err(rustix::io::Errno::NOENT) => Err(LayerError::Missing(id)),
            other => other.map_err(|e| io_error("open", &path)(e.into())),
        }
    }
}

fn open_dir(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, path, flags, Mode::empty())
}

/// Only the one spelling that this store writes.
fn id_of(name: &OsStr) -> Option<LayerId> {
    let text = name.to_str()?;
    text.parse().ok().filter(|id: &LayerId| id.to_string() == text)
}
