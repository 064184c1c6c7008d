//! Names that strangers chose, looked up beneath a root that the kernel enforces (openat2(2), `RESOLVE_IN_ROOT`).
//!
//! In such a lookup an absolute symlink starts at the root, `..` stops at it, and magic links (`/proc/*/fd`) are refused.

use rustix::{
    fs::{Dir, FileType, Mode, OFlags, ResolveFlags, openat2},
    io::Errno,
};
use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Component, Path, PathBuf},
};

/// Opens `path` beneath `root`. `path` may begin with `/`.
pub(crate) fn open(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    resolve(root, path, flags, ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS)
}

/// The same without following any symlink: for a path that this process made itself.
pub(crate) fn open_plain(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    resolve(root, path, flags | OFlags::NOFOLLOW, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)
}

fn resolve(root: BorrowedFd<'_>, path: &Path, flags: OFlags, how: ResolveFlags) -> rustix::io::Result<OwnedFd> {
    let mut left = 100;
    loop {
        match openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), how) {
            // A rename somewhere on the way; the kernel asks to try again. It must not be able to hold us for ever.
            Err(Errno::AGAIN) if left > 0 => left -= 1,
            other => return other,
        }
    }
}

/// Opens the directory `path` (components only, as from [`normal_path`]) and makes what is missing on the way.
pub(crate) fn ensure_dir(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    match open(root, if path.as_os_str().is_empty() { Path::new(".") } else { path }, flags) {
        Err(Errno::NOENT) => {}
        other => return Ok(other?),
    }
    let mut walked = PathBuf::new();
    let mut dir = open(root, Path::new("."), flags)?;
    for name in path.components() {
        walked.push(name);
        let next = match open(root, &walked, flags) {
            Err(Errno::NOENT) => {
                rustix::fs::mkdirat(&dir, name.as_os_str(), Mode::RWXU)?;
                let made = open_plain(dir.as_fd(), Path::new(&name), OFlags::RDONLY | OFlags::DIRECTORY)?;
                // Whatever the umask.
                rustix::fs::fchmod(&made, Mode::from_raw_mode(0o755))?;
                made
            }
            other => other?,
        };
        dir = next;
    }
    Ok(dir)
}

/// Reads a descriptor got with `O_PATH` whose file is known to be regular. Never waits: the file was looked at before
/// it is opened, and this opens the same one.
pub(crate) fn reopen_for_reading(fd: BorrowedFd<'_>) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(handle_path(fd), flags, Mode::empty())?))
}

/// A path that means exactly this descriptor in this process.
pub(crate) fn handle_path(fd: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Removes whatever is called `name` in `dir`, with all that is in it; never follows a symlink; fine if there is nothing.
pub(crate) fn remove_at(dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, name, rustix::fs::AtFlags::empty()) {
        Err(Errno::ISDIR) => std::fs::remove_dir_all(handle_path(dir).join(name)),
        Err(Errno::NOENT) => Ok(()),
        other => Ok(other?),
    }
}

/// The names in a directory with their types, sorted, without `.` and `..`.
pub(crate) fn names(dir: BorrowedFd<'_>) -> io::Result<Vec<(OsString, FileType)>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let readable = rustix::fs::openat(dir, ".", flags, Mode::empty())?;
    let mut found = Vec::new();
    for entry in Dir::new(readable)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            found.push((OsString::from_vec(name.to_vec()), entry.file_type()));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// A relative path of plain components; `None` for an absolute one and for one with `..` or a NUL. `./` and doubled
/// slashes are dropped, so the empty path is the root itself.
pub(crate) fn normal_path(bytes: &[u8]) -> Option<PathBuf> {
    if bytes.contains(&0) {
        return None;
    }
    let mut path = PathBuf::new();
    for component in Path::new(OsStr::from_bytes(bytes)).components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::RootDir | Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}
