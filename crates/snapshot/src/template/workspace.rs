//! A place where a tree is built or taken apart, that a later process can tell from one whose builder is dead.

use crate::fsutil;
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// A folder in `TEMPLATES/tmp`, locked while its owner lives and removed with it.
pub(super) struct Workspace {
    dir: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl Workspace {
    pub(super) fn create(tmp: &Path) -> io::Result<Workspace> {
        loop {
            let name = format!("{:016x}", fresh_number());
            let (dir, lock_path) = (tmp.join(&name), tmp.join(format!("{name}.lock")));
            let lock = fsutil::open_lock_file(&lock_path)?;
            lock.lock()?;
            // A sweeper may have taken the file away between its creation and the lock.
            if fsutil::is_still_at(&lock, &lock_path)? {
                fsutil::ensure_dir(&dir, 0o700)?;
                return Ok(Workspace { dir, lock_path, _lock: lock });
            }
        }
    }

    /// A path in the workspace.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Removes what dead builders left. Those that live are left alone.
    pub(super) fn sweep(tmp: &Path) -> io::Result<usize> {
        let mut removed = 0;
        for entry in fs::read_dir(tmp)? {
            let lock_path = entry?.path();
            if lock_path.extension().is_none_or(|e| e != "lock") {
                continue;
            }
            let lock = match File::open(&lock_path) {
                Ok(lock) => lock,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(e),
            };
            if lock.try_lock().is_ok() && fsutil::is_still_at(&lock, &lock_path)? {
                fsutil::remove_tree_if_there(&lock_path.with_extension(""))?;
                fsutil::remove_if_there(&lock_path)?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // What can't be removed now is removed by a later sweep; the lock file goes last.
        let result = fsutil::remove_tree_if_there(&self.dir).and_then(|()| fsutil::remove_if_there(&self.lock_path));
        if let Err(error) = result {
            tracing::warn!(dir = %self.dir.display(), %error, "can't remove a template's building place");
        }
    }
}

/// A number that no other process on any machine sharing the folder is likely to take at the same time.
fn fresh_number() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library seeds each of these from the system's random source.
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}
