//! The lock that lets one server at a time hold a data directory.
//!
//! It is an flock(2) on `DIR/lock`, which the kernel gives back however the holder ends; the file
//! stays and tells the holder's process id. A lock belongs to the open file, not to the process:
//! handing over the descriptor hands over the lock, without a moment in which nobody holds it.

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

/// Why the data directory was not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error("another server{} holds the data directory {}", pid_words(*pid), dir.display())]
    Locked {
        dir: PathBuf,
        /// The holder, where it has written itself down.
        pid: Option<u32>,
    },
    #[error("the lock of the data directory, {}, can't be taken: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

fn pid_words(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
}

/// A data directory held by this process, until it is dropped or the process ends.
#[derive(Debug)]
pub struct DataLock {
    file: File,
}

impl DataLock {
    /// Locks `dir`, which must exist. Never waits.
    ///
    /// # Errors
    /// [`LockError::Locked`] where another holds it.
    pub fn acquire(dir: &Path) -> Result<DataLock, LockError> {
        let path = dir.join("lock");
        let io_error = |source: io::Error| LockError::Io { path: path.clone(), source };
        // NOFOLLOW: a link planted in a shared directory must not make us overwrite its target.
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| io_error(e.into()))?;
        let mut file = File::from(fd);
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(LockError::Locked { dir: dir.to_owned(), pid: read_pid(&mut file) }),
            Err(e) => return Err(io_error(e.into())),
        }
        write_pid(&mut file).map_err(io_error)?;
        Ok(DataLock { file })
    }

    /// Goes on with a lock whose descriptor another server handed over.
    ///
    /// # Errors
    /// [`LockError::Locked`] where the descriptor doesn't carry the lock and another holds it.
    pub fn adopt(dir: &Path, fd: OwnedFd) -> Result<DataLock, LockError> {
        let mut file = File::from(fd);
        let io_error = |source: io::Error| LockError::Io { path: dir.join("lock"), source };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(LockError::Locked { dir: dir.to_owned(), pid: read_pid(&mut file) }),
            Err(e) => return Err(io_error(e.into())),
        }
        write_pid(&mut file).map_err(io_error)?;
        Ok(DataLock { file })
    }
}

impl AsFd for DataLock {
    /// What to hand over. The lock is free once every copy is closed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.seek(SeekFrom::Start(0)).ok()?;
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn write_pid(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    writeln!(file, "{}", std::process::id())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.
    use super::*;

    #[test]
    fn a_second_holder_is_refused_and_told_the_pid() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DataLock::acquire(dir.path()).unwrap();
        let error = DataLock::acquire(dir.path()).unwrap_err();
        assert!(matches!(&error, LockError::Locked { pid: Some(pid), .. } if *pid == std::process::id()), "{error:?}");
        assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
        drop(lock);
        DataLock::acquire(dir.path()).unwrap();
    }

    #[test]
    fn a_handed_over_descriptor_carries_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataLock::acquire(dir.path()).unwrap();
        let copy = first.as_fd().try_clone_to_owned().unwrap();
        drop(first);
        assert!(DataLock::acquire(dir.path()).is_err(), "the copy still holds it");
        let second = DataLock::adopt(dir.path(), copy).unwrap();
        assert!(DataLock::acquire(dir.path()).is_err());
        drop(second);
        DataLock::acquire(dir.path()).unwrap();
    }

    #[test]
    fn the_lock_file_is_private_and_no_link() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let _lock = DataLock::acquire(dir.path()).unwrap();
        assert_eq!(dir.path().join("lock").metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let other = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), other.path().join("lock")).unwrap();
        assert!(matches!(DataLock::acquire(other.path()), Err(LockError::Io { .. })));
        assert!(!dir.path().join("elsewhere").exists());
    }
}
