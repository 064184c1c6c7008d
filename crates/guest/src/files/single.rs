//! Requests on one file: stat, read, replace, make, move, remove.

use super::{
    absolute,
    transfer::{Sink, Source},
};
use crate::guest::path_error;
use model::{FileMeta, FileType, Timestamp};
use std::{
    fs::{self, File, Metadata, OpenOptions, Permissions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};
use wire::{
    Code, WireError,
    files::{FileReply, FileRequest},
};

/// Requests without bytes.
pub fn run(request: FileRequest) -> Result<FileReply, WireError> {
    match request {
        FileRequest::Stat { path, follow } => {
            let path = absolute(&path)?;
            let meta = if follow { fs::metadata(&path) } else { fs::symlink_metadata(&path) };
            let meta = meta.map_err(|e| path_error(&path, &e))?;
            Ok(FileReply::Meta { meta: describe(Path::new(&path), &meta) })
        }
        FileRequest::Mkdir { path, parents } => {
            let path = absolute(&path)?;
            if parents { make_parents(Path::new(&path)) } else { fs::create_dir(&path) }
                .map(|()| FileReply::Done)
                .map_err(|e| path_error(&path, &e))
        }
        FileRequest::Move { from, to } => {
            let (from, to) = (absolute(&from)?, absolute(&to)?);
            fs::rename(&from, &to).map(|()| FileReply::Done).map_err(|e| match e.raw_os_error() {
                Some(libc::EXDEV) => WireError::new(
                    Code::Invalid,
                    format!("{from} and {to} are on different file systems inside; copy and remove instead"),
                ),
                // Which of the two is missing can be told.
                _ if fs::symlink_metadata(&from).is_err() => path_error(&from, &e),
                _ => path_error(&to, &e),
            })
        }
        FileRequest::Remove { path, recursive } => {
            let path = absolute(&path)?;
            remove(Path::new(&path), recursive).map(|()| FileReply::Done).map_err(|e| path_error(&path, &e))
        }
        _ => Err(WireError::new(Code::Internal, "this request needs a stream")),
    }
}

fn remove(path: &Path, recursive: bool) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.is_dir() {
        fs::remove_file(path)
    } else if recursive {
        fs::remove_dir_all(path)
    } else {
        fs::remove_dir(path)
    }
}

fn make_parents(path: &Path) -> io::Result<()> {
    match fs::create_dir_all(path) {
        // A file stands where a directory should be.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
        other => other,
    }
}

/// A file's facts as they travel.
pub fn describe(path: &Path, meta: &Metadata) -> FileMeta {
    let kind = FileType::from_mode(meta.mode());
    let target = (kind == FileType::Symlink).then(|| fs::read_link(path).ok()).flatten();
    FileMeta {
        path: path.to_string_lossy().into_owned(),
        kind,
        size_bytes: meta.size(),
        mode: meta.mode() & 0o7777,
        uid: meta.uid(),
        gid: meta.gid(),
        modified_at: Timestamp(meta.mtime() * 1000 + meta.mtime_nsec() / 1_000_000),
        target: target.map(|t| t.to_string_lossy().into_owned()),
    }
}

/// Opens a regular file for reading; never waits for a FIFO's writer or a device.
///
/// # Errors
/// [`Code::IsADirectory`], [`Code::NotRegular`], or what the kernel says.
pub fn open_regular(path: &str) -> Result<(File, Metadata), WireError> {
    let failed = |e: io::Error| path_error(path, &e);
    // Looked at before it is opened: opening some devices does something.
    check_regular(path, &fs::metadata(path).map_err(failed)?)?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    check_regular(path, &meta)?;
    Ok((file, meta))
}

fn check_regular(path: &str, meta: &Metadata) -> Result<(), WireError> {
    if meta.is_dir() {
        return Err(WireError::new(Code::IsADirectory, format!("{path}: is a directory")));
    }
    if !meta.is_file() {
        return Err(WireError::new(Code::NotRegular, format!("{path}: not a regular file but a device, FIFO or socket")));
    }
    Ok(())
}

/// Sends a file's bytes.
pub fn read(path: &str, offset: u64, length: Option<u64>, sink: &mut Sink) -> Result<(), WireError> {
    let path = absolute(path)?;
    let failed = |e: io::Error| path_error(&path, &e);
    let (mut file, meta) = open_regular(&path)?;
    if offset > 0 {
        file.seek(SeekFrom::Start(offset)).map_err(failed)?;
    }
    sink.answer(FileReply::Meta { meta: describe(Path::new(&path), &meta) });
    io::copy(&mut file.take(length.unwrap_or(u64::MAX)), sink).map_err(failed)?;
    sink.flush().map_err(failed)
}

/// A temporary file that is removed unless it becomes the real one.
struct Temporary {
    path: PathBuf,
    kept: bool,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.kept {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Where a write to `path` goes: a link is written through, not replaced, also one to a file that isn't there yet.
fn behind_links(mut path: PathBuf) -> io::Result<PathBuf> {
    /// As many as the kernel follows.
    const MOST: usize = 40;
    for _ in 0..MOST {
        match fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("/")).join(target),
            // No link, or nothing there.
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// Replaces a file by the bytes that come; until they all have, the old one stays.
pub fn write(path: &str, mode: Option<u32>, parents: bool, mut source: Source) -> Result<FileReply, WireError> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let shown = absolute(path)?;
    let failed = |e: io::Error| path_error(&shown, &e);
    if shown.ends_with('/') {
        return Err(WireError::new(Code::IsADirectory, format!("{shown}: names a directory")));
    }
    let path = behind_links(PathBuf::from(&shown)).map_err(failed)?;
    let old = match fs::metadata(&path) {
        Ok(meta) => Some(meta),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(failed(error)),
    };
    if let Some(old) = &old {
        check_regular(&shown, old)?;
    }
    let name = path.file_name().filter(|name| name.len() <= 255);
    let (Some(dir), Some(_)) = (path.parent(), name) else {
        return Err(WireError::new(Code::Invalid, format!("{shown}: the last part is no file name, or longer than 255 bytes")));
    };
    if parents {
        make_parents(dir).map_err(failed)?;
    }
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let temporary = dir.join(format!(".dormouse-{}-{number}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary).map_err(failed)?;
    let mut guard = Temporary { path: temporary, kept: false };
    io::copy(&mut source, &mut file).map_err(failed)?;
    let mode = mode.or(old.as_ref().map(|m| m.mode())).unwrap_or(0o644) & 0o7777;
    if let Some(old) = &old {
        // A file that belongs to somebody keeps its owner where that is allowed.
        let _ = fchown(&file, Some(old.uid()), Some(old.gid()));
    }
    file.set_permissions(Permissions::from_mode(mode)).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    fs::rename(&guard.path, &path).map_err(failed)?;
    guard.kept = true;
    // The rename is on disk when its directory is; not every file system can sync one.
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
    Ok(FileReply::Done)
}
