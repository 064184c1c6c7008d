//! Whiteouts: how a layer of an image says that something of the layers below it is gone (image-spec, `layer.md`).

use super::{ExtractError, Extractor, io_at};
use crate::inroot;
use rustix::fs::OFlags;
use std::{
    collections::HashSet,
    ffi::OsStr,
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

const PREFIX: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Other names with this beginning are bookkeeping of old layer formats.
const RESERVED: &[u8] = b".wh..wh.";

/// What the present layer has put into the tree: its own whiteouts don't touch that, in whichever order they come.
/// Paths are those after symlinks, since one directory may be written to under two names.
#[derive(Default)]
pub(super) struct Seen(HashSet<PathBuf>);

impl Seen {
    pub(super) fn add(&mut self, parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
        let mut path = real_path(parent)?.join(name);
        // Whatever leads to it must stay, too.
        while self.0.insert(path.clone()) && path.pop() {}
        Ok(())
    }

    fn has(&self, path: &Path) -> bool {
        self.0.contains(path)
    }
}

fn real_path(dir: BorrowedFd<'_>) -> io::Result<PathBuf> {
    std::fs::read_link(inroot::handle_path(dir))
}

impl Extractor<'_> {
    /// Carries out a whiteout; false where the entry is none.
    pub(super) fn whiteout(&mut self, path: &Path, name: &OsStr) -> Result<bool, ExtractError> {
        let Some(seen) = &self.layer else { return Ok(false) };
        let Some(hidden) = name.as_bytes().strip_prefix(PREFIX) else { return Ok(false) };
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        // Nothing below: nothing to hide.
        let Ok(dir) = inroot::open(self.root, dir, OFlags::PATH | OFlags::DIRECTORY) else { return Ok(true) };
        let real = real_path(dir.as_fd()).map_err(io_at(path))?;
        if name.as_bytes() == OPAQUE {
            clear_lower(dir.as_fd(), &real, seen).map_err(io_at(path))?;
        } else if hidden.is_empty() || hidden == b"." || hidden == b".." {
            return Err(ExtractError::UnsafePath(super::shown(path)));
        } else if !name.as_bytes().starts_with(RESERVED) {
            remove_lower(dir.as_fd(), OsStr::from_bytes(hidden), &real, seen).map_err(io_at(path))?;
        }
        // The directory that is held open may be among what was removed.
        self.parent = None;
        Ok(true)
    }
}

fn remove_lower(dir: BorrowedFd<'_>, name: &OsStr, real: &Path, seen: &Seen) -> io::Result<()> {
    let path = real.join(name);
    if !seen.has(&path) {
        return inroot::remove_at(dir, name);
    }
    match inroot::open_plain(dir, Path::new(name), OFlags::PATH | OFlags::DIRECTORY) {
        Ok(inner) => clear_lower(inner.as_fd(), &path, seen),
        // A file of this layer.
        Err(_) => Ok(()),
    }
}

fn clear_lower(dir: BorrowedFd<'_>, real: &Path, seen: &Seen) -> io::Result<()> {
    inroot::names(dir)?.iter().try_for_each(|(name, _)| remove_lower(dir, name, real, seen))
}
