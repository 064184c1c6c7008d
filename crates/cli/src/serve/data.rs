//! The data directory: who may look into it, and who holds it.

use anyhow::{Context, bail};
use rustix::{fs::Mode, process::umask};
use std::{
    fs::{self, DirBuilder, Permissions},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::Path,
};
use store::DataLock;

/// From here on whatever is made is for this user only, unless it says otherwise itself.
pub fn keep_private() {
    umask(Mode::from_raw_mode(0o077));
}

/// Makes the data directory where it is missing, closes it to others, and locks it.
///
/// # Errors
/// A directory of another user; one that another server holds.
pub fn open(dir: &Path) -> anyhow::Result<DataLock> {
    let make = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    make.with_context(|| format!("can't make the data directory {}", dir.display()))?;
    let known = fs::metadata(dir).with_context(|| format!("can't look at the data directory {}", dir.display()))?;
    let uid = rustix::process::geteuid();
    if known.uid() != uid.as_raw() {
        bail!("the data directory {} belongs to uid {}, not to this user (uid {uid})", dir.display(), known.uid());
    }
    if known.mode() & 0o777 != 0o700 {
        let closed = fs::set_permissions(dir, Permissions::from_mode(0o700));
        closed.with_context(|| format!("can't close the data directory {} to others", dir.display()))?;
    }
    match DataLock::acquire(dir) {
        Ok(lock) => Ok(lock),
        Err(error @ store::LockError::Locked { .. }) => {
            bail!("{error}; stop it first ('dormouse down'), or give this one another --data")
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_closed_and_held_by_one() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("a/data");
        let lock = open(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        let refused = open(&dir).unwrap_err().to_string();
        assert!(refused.contains(&format!("pid {}", std::process::id())), "{refused}");
        drop(lock);
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        open(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
    }
}
