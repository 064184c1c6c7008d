//! A little room on the disk that is given away when everything else is full: deleting must work then, and an operation
//! that has had its effect must be able to say so.

use crate::{Error, inner::Inner};
use std::{
    fs::OpenOptions,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// How much is kept: the store's log of many small commits.
const SIZE: u64 = 4 << 20;
/// Free room beside it that there must be before it is set aside again.
const SPARE: u64 = 32 << 20;
/// Free room without which no session is begun: its directory, its journals, its part of the store.
const LEAST: u64 = 8 << 20;
/// How often is looked whether there is room again.
const LOOK: Duration = Duration::from_secs(5);

fn path(data: &Path) -> PathBuf {
    data.join("reserve")
}

/// Sets the room aside, now and whenever it was given away.
pub(crate) async fn keep(inner: Arc<Inner>) {
    let mut told = false;
    loop {
        let data = inner.config.data_dir.clone();
        let kept = tokio::task::spawn_blocking(move || set_aside(&data)).await;
        match kept {
            Ok(Ok(())) => told = false,
            Ok(Err(error)) if !told => {
                told = true;
                tracing::warn!(%error, "no room is kept back: a full disk may stop deletes, too");
            }
            _ => {}
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = inner.closing.cancelled() => return,
        }
    }
}

fn set_aside(data: &Path) -> std::io::Result<()> {
    let path = path(data);
    if path.metadata().is_ok_and(|file| file.len() == SIZE) {
        return Ok(());
    }
    let stat = rustix::fs::statvfs(data)?;
    if stat.f_bavail * stat.f_frsize < SIZE + SPARE {
        return Err(std::io::ErrorKind::StorageFull.into());
    }
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path)?;
    let done = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, SIZE);
    if done.is_err() {
        let _ = std::fs::remove_file(&path);
    }
    Ok(done?)
}

/// Refuses to begin what needs room where there is next to none.
///
/// # Errors
/// [`Error::NoSpace`] with numbers.
pub(crate) fn check_room(data: &Path) -> Result<(), Error> {
    // A file system that can't be asked is asked by the writes themselves.
    let Ok(stat) = rustix::fs::statvfs(data) else { return Ok(()) };
    let free = stat.f_bavail * stat.f_frsize;
    if free < LEAST {
        let detail = format!("{free} bytes are free in the data directory, and a new session needs {LEAST}");
        return Err(Error::NoSpace { detail });
    }
    Ok(())
}

/// Gives the room away; false where there was none.
pub(crate) fn give_away(data: &Path) -> bool {
    let given = std::fs::remove_file(path(data)).is_ok();
    if given {
        tracing::warn!("the disk is full; the room that was kept back is used");
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_is_really_taken_and_given_once() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        assert!(!give_away(dir.path()));
        set_aside(dir.path()).unwrap();
        assert!(path(dir.path()).metadata().unwrap().blocks() * 512 >= SIZE, "it holds blocks, not only a length");
        assert!(give_away(dir.path()));
        assert!(!give_away(dir.path()));
    }
}
