//! Reading the disk of a session that isn't running.
//!
//! The disk's layers are put together in a read-only overlay that is attached nowhere: it has no name that a process
//! could walk into, and it vanishes with the last open file. What lies on the disk was made by strangers, so only regular
//! files are ever opened, and every path is looked up beneath the disk's root.

mod archive;
pub use archive::Archived;

use crate::{
    inroot,
    overlay::{self, OverlayError},
};
use model::{FileMeta, FileType, Timestamp};
use rustix::{
    fs::{AtFlags, OFlags, Stat},
    io::Errno,
};
use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    path::{Path, PathBuf},
};

/// The most entries that one listing returns.
const LIST_MAX: usize = 100_000;
/// How deep a listing or an archive goes: each level holds a descriptor open.
const DEPTH_MAX: usize = 256;

/// Why a disk or a file on it can't be read.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    #[error("'{0}' doesn't exist")]
    NotFound(String),
    #[error("'{0}' isn't in a directory, or is none")]
    NotADirectory(String),
    #[error("'{0}' is a directory")]
    IsADirectory(String),
    #[error("'{path}' is a {kind}: only regular files can be read")]
    NotRegular { path: String, kind: FileType },
    #[error("the path {path:?} can't be used: {why}")]
    Invalid { path: String, why: &'static str },
    #[error("'{0}' goes through too many symbolic links")]
    TooManyLinks(String),
    #[error("'{0}' has more than {LIST_MAX} entries: list parts of it")]
    TooMany(String),
    #[error("'{0}' is nested deeper than {DEPTH_MAX} directories")]
    TooDeep(String),
    #[error("reading a disk that isn't mounted needs root (CAP_SYS_ADMIN)")]
    NoRights,
    #[error("can't put the disk's layers together: {0}")]
    Layers(String),
    #[error("can't read '{path}': {source}")]
    Io { path: String, source: io::Error },
    #[error("can't write the archive: {0}")]
    Output(#[source] io::Error),
}

/// A disk as it is now. Files opened from it stay readable after it is dropped.
#[derive(Debug)]
pub struct DiskView {
    root: OwnedFd,
}

impl DiskView {
    /// Puts `upper` above `lower` (top-most layer first, as when the disk is mounted), read-only.
    ///
    /// The disk should not be mounted for writing meanwhile: what is read then may be old or new.
    ///
    /// # Errors
    /// [`ViewError::NoRights`], [`ViewError::Layers`].
    pub fn open(lower: &[PathBuf], upper: &Path) -> Result<DiskView, ViewError> {
        if lower.is_empty() {
            return Err(ViewError::Layers("there is no layer below the disk's own".into()));
        }
        let layers: Vec<&Path> = std::iter::once(upper).chain(lower.iter().map(PathBuf::as_path)).collect();
        let mount = overlay::make(&layers, None).map_err(|error| match error {
            OverlayError::Refused { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => ViewError::NoRights,
            other => ViewError::Layers(other.to_string()),
        })?;
        Ok(DiskView { root: mount })
    }

    /// Opens the regular file at `path`, following symlinks within the disk. Never waits for a FIFO or device.
    ///
    /// # Errors
    /// [`ViewError::NotFound`], [`ViewError::IsADirectory`], [`ViewError::NotRegular`] and the rest of its kind.
    pub fn read(&self, path: &str) -> Result<(File, FileMeta), ViewError> {
        let fd = self.open_path(path, OFlags::empty())?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| path_error(path, e))?;
        match FileType::from_mode(stat.st_mode) {
            FileType::File => {}
            FileType::Dir => return Err(ViewError::IsADirectory(path.to_owned())),
            kind => return Err(ViewError::NotRegular { path: path.to_owned(), kind }),
        }
        let file = inroot::reopen_for_reading(fd.as_fd()).map_err(|e| io_error(path, e))?;
        Ok((file, meta(path.to_owned(), &stat, None)))
    }

    /// What is known about `path`; of a symlink, about itself.
    ///
    /// # Errors
    /// [`ViewError::NotFound`] and the rest of its kind.
    pub fn stat(&self, path: &str) -> Result<FileMeta, ViewError> {
        // A path that ends in a slash asks for what the link leads to, as everywhere.
        let fd = self.open_path(path, OFlags::NOFOLLOW)?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| path_error(path, e))?;
        let target = match FileType::from_mode(stat.st_mode) {
            FileType::Symlink => Some(read_link(fd.as_fd(), OsStr::new("")).map_err(|e| path_error(path, e))?),
            _ => None,
        };
        Ok(meta(path.to_owned(), &stat, target.as_deref()))
    }

    /// What is in the directory `path`, `depth` levels deep (1: its own entries), without itself, in the order of names.
    ///
    /// # Errors
    /// [`ViewError::NotADirectory`]; [`ViewError::TooMany`] rather than a part that looks like the whole.
    pub fn list(&self, path: &str, depth: usize) -> Result<Vec<FileMeta>, ViewError> {
        let dir = self.open_path(path, OFlags::DIRECTORY)?;
        let mut found = Vec::new();
        list_into(dir.as_fd(), Path::new(path), depth.min(DEPTH_MAX), &mut found)?;
        Ok(found)
    }

    /// Writes a tar archive of the directory or file at `path` into `out`, for a user's own computer: names begin
    /// with the directory's own, as from the guest, without set-uid bits, devices, FIFOs, sockets, and without
    /// symlinks that lead out of it. What was left out is counted.
    ///
    /// # Errors
    /// [`ViewError::Output`] where `out` fails; else as [`DiskView::read`].
    pub fn archive(&self, path: &str, out: impl io::Write) -> Result<Archived, ViewError> {
        let fd = self.open_path(path, OFlags::empty())?;
        archive::write(fd.as_fd(), path, out)
    }

    fn open_path(&self, path: &str, flags: OFlags) -> Result<OwnedFd, ViewError> {
        let invalid = |why| ViewError::Invalid { path: shown(path), why };
        if path.is_empty() {
            return Err(invalid("it is empty"));
        }
        if path.contains('\0') {
            return Err(invalid("it contains a NUL"));
        }
        inroot::open(self.root.as_fd(), Path::new(path), OFlags::PATH | flags).map_err(|e| path_error(path, e))
    }
}

fn shown(path: &str) -> String {
    path.chars().take(300).collect()
}

fn path_error(path: &str, error: Errno) -> ViewError {
    let shown = shown(path);
    match error {
        Errno::NOENT => ViewError::NotFound(shown),
        Errno::NOTDIR => ViewError::NotADirectory(shown),
        Errno::LOOP => ViewError::TooManyLinks(shown),
        Errno::NAMETOOLONG => ViewError::Invalid { path: shown, why: "it is too long" },
        other => ViewError::Io { path: shown, source: other.into() },
    }
}

fn io_error(path: &str, source: io::Error) -> ViewError {
    ViewError::Io { path: shown(path), source }
}

fn read_link(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<PathBuf> {
    let target = rustix::fs::readlinkat(dir, name, Vec::new())?;
    Ok(PathBuf::from(std::ffi::OsString::from_vec(target.into_bytes())))
}

fn meta(path: String, stat: &Stat, target: Option<&Path>) -> FileMeta {
    let ms = i64::try_from(stat.st_mtime_nsec / 1_000_000).unwrap_or(0);
    FileMeta {
        path,
        kind: FileType::from_mode(stat.st_mode),
        size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified_at: Timestamp(stat.st_mtime.saturating_mul(1000).saturating_add(ms)),
        target: target.map(|t| t.to_string_lossy().into_owned()),
    }
}

fn list_into(dir: BorrowedFd<'_>, path: &Path, depth: usize, found: &mut Vec<FileMeta>) -> Result<(), ViewError> {
    let text = || path.to_string_lossy().into_owned();
    if depth == 0 {
        return Ok(());
    }
    for (name, _) in inroot::names(dir).map_err(|e| io_error(&text(), e))? {
        if found.len() == LIST_MAX {
            return Err(ViewError::TooMany(text()));
        }
        let here = path.join(&name);
        let here_text = here.to_string_lossy().into_owned();
        let stat = rustix::fs::statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| path_error(&here_text, e))?;
        let kind = FileType::from_mode(stat.st_mode);
        let target = match kind {
            FileType::Symlink => Some(read_link(dir, &name).map_err(|e| path_error(&here_text, e))?),
            _ => None,
        };
        found.push(meta(here_text.clone(), &stat, target.as_deref()));
        if kind == FileType::Dir {
            let inner = inroot::open_plain(dir, Path::new(&name), OFlags::PATH | OFlags::DIRECTORY)
                .map_err(|e| path_error(&here_text, e))?;
            list_into(inner.as_fd(), &here, depth - 1, found)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
