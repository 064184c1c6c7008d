//! Small steps on files that must survive a crash: whole-file replacement, directory sync, locks.

use model::Timestamp;
use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// The present moment. A clock before 1970 counts as 1970.
pub(crate) fn now() -> Timestamp {
    to_timestamp(SystemTime::now())
}

pub(crate) fn to_timestamp(at: SystemTime) -> Timestamp {
    let ms = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    Timestamp(i64::try_from(ms).unwrap_or(i64::MAX))
}

/// Makes names in `dir` durable (fsync(2): a file's fsync doesn't cover its entry in the directory).
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    faults::file("dir.sync")?;
    File::open(dir)?.sync_all()
}

/// Creates `dir` and what is missing above it with `mode`, whatever the umask; fine if it exists.
pub(crate) fn ensure_dir(dir: &Path, mode: u32) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    if let Some(parent) = dir.parent().filter(|p| !p.as_os_str().is_empty()) {
        ensure_dir(parent, mode)?;
    }
    match fs::create_dir(dir) {
        Ok(()) => fs::set_permissions(dir, Permissions::from_mode(mode)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        Err(e) => Err(e),
    }
}

/// Puts `bytes` at `path` so that a reader, or a crash at any point, sees the old content or the new, never a part.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let dir = path.parent().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    faults::file("replace.create")?;
    let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(dir)?;
    file.as_file().set_permissions(Permissions::from_mode(mode))?;
    faults::file("replace.write")?;
    file.write_all(bytes)?;
    faults::file("replace.sync")?;
    file.as_file().sync_all()?;
    faults::file("replace.rename")?;
    file.persist(path).map_err(|e| e.error)?;
    sync_dir(dir)
}

/// Removes a file; fine if it is gone already.
pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Removes a tree; fine if it is gone already.
pub(crate) fn remove_tree_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Opens a file to hold a lock on. The lock ends with the descriptor, so a dead process holds none.
pub(crate) fn open_lock_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)
}

/// True where `path` still names the file that `file` is: someone may have removed it before we had the lock.
pub(crate) fn is_still_at(file: &File, path: &Path) -> io::Result<bool> {
    let held = file.metadata()?;
    match fs::metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (held.dev(), held.ino())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Reads a whole file of at most `limit` bytes.
///
/// # Errors
/// `FileTooLarge` for a longer one: a descriptor that has grown beyond all measure is damage, not data.
pub(crate) fn read_limited(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(File::open(path)?, limit + 1), &mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("{} has over {limit} bytes", path.display())));
    }
    Ok(bytes)
}
