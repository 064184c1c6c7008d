//! A layer that is being made: its own directory, out of sight until it is whole.
//!
//! ```text
//! LAYERS/.new-ID/tree/     what the layer is going to be
//! LAYERS/.new-ID/trash/    what was in it a moment ago and is not in it any more
//! LAYERS/.new-ID/whiteout  the whiteout that all others are links of, as in the kernel's own overlays
//! ```
//! The directory is locked while its maker lives, so that whoever clears up can tell it from the rest of a dead one.
//! Nothing is removed while a layer is filled: removing takes time, and what has lost its name at one place may be needed
//! at another a moment later.

use super::{
    LayerDescriptor, LayerError, STAGED, TRASH_DIR, TREE_DIR, clear,
    dirs::{DirId, Dirs, Name, Opener, ROOT},
    io_error,
};
use crate::fsutil;
use model::LayerId;
use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, linkat, mkdirat, mknodat, renameat, unlinkat},
    io::Errno,
};
use std::{
    ffi::{OsStr, OsString},
    fs::{File, TryLockError},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

const WHITEOUT: &str = "whiteout";

/// The directory that becomes the layer's `tree`.
pub(super) const TREE: DirId = DirId(1);
pub(super) const TRASH: DirId = DirId(2);

#[derive(Debug)]
pub(super) struct Staging {
    pub(super) id: LayerId,
    pub(super) dirs: Dirs,
    store: PathBuf,
    path: PathBuf,
    /// The staging directory itself, locked. After [`Staging::publish`] it is the layer's.
    root: File,
    opener: Opener,
    discarded: u64,
    is_published: bool,
}

impl Staging {
    /// Begins a layer in the store `store`. The rest of an earlier attempt at the same one is removed.
    pub(super) fn create(store: &Path, id: LayerId) -> Result<Staging, LayerError> {
        let name = OsString::from(format!("{STAGED}{id}"));
        let path = store.join(&name);
        let root = create_locked(store, &name).map_err(io_error("create", &path))?;
        let mut dirs = Dirs::new();
        for (dir, mode) in [(TREE_DIR, 0o755), (TRASH_DIR, 0o700)] {
            mkdirat(&root, dir, Mode::from_raw_mode(mode)).map_err(|e| io_error("create", &path.join(dir))(e.into()))?;
            dirs.add(ROOT, Arc::from(OsStr::new(dir)));
        }
        let top = root.try_clone().map_err(io_error("open", &path))?;
        let opener = Opener::new(ROOT, top.into());
        Ok(Staging { id, dirs, store: store.to_owned(), path, root, opener, discarded: 0, is_published: false })
    }

    /// Where it lies while it is made.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// An error of doing something to a name in a directory of the layer.
    pub(super) fn error(&self, what: &'static str, dir: DirId, name: &OsStr, error: Errno) -> LayerError {
        let path = self.store.join(self.id.to_string()).join(self.dirs.path(dir, name));
        LayerError::Io { what, path, source: error.into() }
    }

    pub(super) fn open(&mut self, dir: DirId) -> Result<OwnedFd, LayerError> {
        let opened = self.opener.open(&self.dirs, dir);
        opened.map_err(|e| self.error("open", dir, OsStr::new(""), e))
    }

    /// Makes an empty directory, private until it is dressed.
    pub(super) fn make_dir(&mut self, parent: BorrowedFd<'_>, at: DirId, name: &Name) -> Result<DirId, LayerError> {
        mkdirat(parent, name.as_ref(), Mode::RWXU).map_err(|e| self.error("create", at, name, e))?;
        Ok(self.dirs.add(at, name.clone()))
    }

    /// Makes `name` in `target` a further name of `from`, which is in the layer or in the trash.
    pub(super) fn link(
        &mut self,
        (from, old): (DirId, &OsStr),
        target: BorrowedFd<'_>,
        (at, name): (DirId, &OsStr),
    ) -> Result<(), LayerError> {
        let linked = self.opener.borrow(&self.dirs, from).and_then(|dir| linkat(dir, old, target, name, AtFlags::empty()));
        linked.map_err(|e| self.error("link", at, name, e))
    }

    /// Makes `name` a whiteout.
    pub(super) fn whiteout(&self, target: BorrowedFd<'_>, at: DirId, name: &OsStr) -> Result<(), LayerError> {
        let link = || linkat(&self.root, WHITEOUT, target, name, AtFlags::empty());
        let linked = match link() {
            // The first one, or a file has no more than so many names.
            Err(Errno::NOENT | Errno::MLINK) => self.new_whiteout().and_then(|()| link()),
            other => other,
        };
        linked.map_err(|e| self.error("create", at, name, e))
    }

    fn new_whiteout(&self) -> rustix::io::Result<()> {
        match unlinkat(&self.root, WHITEOUT, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        mknodat(&self.root, WHITEOUT, FileType::CharacterDevice, Mode::empty(), 0)
    }

    /// Takes a name out of the layer; it is in the trash, under the name that is returned.
    pub(super) fn discard(&mut self, target: BorrowedFd<'_>, at: DirId, name: &OsStr) -> Result<Name, LayerError> {
        self.discarded += 1;
        let there: Name = Arc::from(OsStr::new(&self.discarded.to_string()));
        let moved = self.opener.borrow(&self.dirs, TRASH).and_then(|trash| renameat(target, name, trash, there.as_ref()));
        moved.map_err(|e| self.error("remove", at, name, e))?;
        Ok(there)
    }

    /// Makes the layer durable and whole, describes it, and puts it in its place.
    pub(super) fn publish(
        mut self,
        describe: impl FnOnce(&File) -> io::Result<LayerDescriptor>,
    ) -> Result<LayerDescriptor, LayerError> {
        for name in [WHITEOUT, TRASH_DIR] {
            clear::remove(self.root.as_fd(), OsStr::new(name))
                .map_err(|e| io_error("remove", &self.path.join(name))(e.into()))?;
        }
        let synced = faults::file("layer.sync").and_then(|()| Ok(rustix::fs::syncfs(&self.root)?));
        synced.map_err(io_error("sync", &self.path))?;
        faults::point("layer.synced");
        // After the sync: before it the file system may not know how many blocks a file takes.
        let tree = File::from(self.open(TREE)?);
        let described = describe(&tree).and_then(|it| it.write(self.id, &self.path).map(|()| it));
        let descriptor = described.map_err(io_error("describe", &self.path))?;
        let place = self.store.join(self.id.to_string());
        let renamed = faults::file("layer.rename").and_then(|()| std::fs::rename(&self.path, &place));
        renamed.map_err(io_error("create", &place))?;
        self.is_published = true;
        fsutil::sync_dir(&self.store).map_err(io_error("sync", &self.store))?;
        Ok(descriptor)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.is_published {
            return;
        }
        if let Err(error) = remove(&self.store, self.path.file_name().unwrap_or_default()) {
            tracing::warn!(layer = %self.id, %error, "the rest of a disk layer that wasn't finished stays until the next start");
        }
    }
}

/// Makes a directory and locks it.
fn create_locked(store: &Path, name: &OsStr) -> io::Result<File> {
    faults::file("layer.create")?;
    let path = store.join(name);
    loop {
        match mkdirat(CWD, &path, Mode::RWXU) {
            Ok(()) => {}
            // It is the rest of an earlier attempt, unless its maker lives.
            Err(Errno::EXIST) => {
                match try_lock(&path)? {
                    Some(_lock) => remove(store, name)?,
                    None if path.exists() => return Err(io::ErrorKind::AlreadyExists.into()),
                    None => {}
                }
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        // Somebody who clears up may be faster than the lock.
        let root = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        root.lock()?;
        if fsutil::is_still_at(&root, &path)? {
            return Ok(root);
        }
    }
}

/// Locks a directory; `None` where somebody else has locked it, or where it is gone.
pub(super) fn try_lock(path: &Path) -> io::Result<Option<File>> {
    let dir = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    match dir.try_lock() {
        Ok(()) => Ok(Some(dir)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Removes one entry of the store's directory.
pub(super) fn remove(store: &Path, name: &OsStr) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let store = rustix::fs::open(store, flags, Mode::empty())?;
    Ok(clear::remove(store.as_fd(), name)?)
}
