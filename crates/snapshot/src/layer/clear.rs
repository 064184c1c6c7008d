//! Removing trees that may be deeper than any path is long.

use super::dirs::names;
use rustix::{
    fs::{AtFlags, Mode, OFlags, RenameFlags, renameat_with, unlinkat},
    io::Errno,
};
use std::{
    ffi::{OsStr, OsString},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// How often a directory that is being filled at the same time is emptied.
const ROUNDS: usize = 16;

/// Removes whatever is called `name` in `dir`, with all that is in it. Never follows a symlink; fine if there is nothing.
///
/// It needs two descriptors and no stack, however deep the tree is: a directory that isn't empty is moved up to the top of
/// the tree, where its turn comes.
pub(crate) fn remove(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        Err(Errno::NOENT) => return Ok(()),
        other => return other,
    }
    let top = match open(dir, name) {
        Err(Errno::NOENT) => return Ok(()),
        other => other?,
    };
    let mut hoisted = 0;
    for _ in 0..ROUNDS {
        let mut waiting = clear(top.as_fd())?;
        while let Some(name) = waiting.pop() {
            let below = match open(top.as_fd(), &name) {
                // Somebody else removes it, too.
                Err(Errno::NOENT) => continue,
                other => other?,
            };
            for inner in clear(below.as_fd())? {
                waiting.extend(hoist(below.as_fd(), &inner, top.as_fd(), &mut hoisted)?);
            }
            remove_dir(top.as_fd(), &name)?;
        }
        match unlinkat(dir, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            Err(Errno::NOENT) => return Ok(()),
            other => return other,
        }
    }
    Err(Errno::NOTEMPTY)
}

fn open(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

/// Removes all that is in a directory but directories that aren't empty: those are returned.
fn clear(dir: BorrowedFd<'_>) -> rustix::io::Result<Vec<OsString>> {
    let mut left = Vec::new();
    for name in names(dir)? {
        let removed = match unlinkat(dir, &name, AtFlags::empty()) {
            Err(Errno::ISDIR) => unlinkat(dir, &name, AtFlags::REMOVEDIR),
            other => other,
        };
        match removed {
            Err(Errno::NOTEMPTY | Errno::EXIST) => left.push(name),
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(left)
}

/// Moves a directory to the top under a name that nothing there has; `None` where it is gone.
fn hoist(from: BorrowedFd<'_>, name: &OsStr, top: BorrowedFd<'_>, number: &mut u64) -> rustix::io::Result<Option<OsString>> {
    loop {
        *number += 1;
        let there = OsString::from(format!(".hoisted-{number}"));
        match renameat_with(from, name, top, &there, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {}
            Err(Errno::NOENT) => return Ok(None),
            other => return other.map(|()| Some(there)),
        }
    }
}

/// Removes a directory that was emptied; fine where somebody filled it again: the next round comes.
fn remove_dir(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
    match unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOENT) => Ok(()),
        other => other,
    }
}
