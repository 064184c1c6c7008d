//! Unpacking a tar that nobody vouches for.

use super::{
    absolute,
    root::{Place, Root},
    transfer::Source,
};
use crate::guest::path_error;
use rustix::fs::{self, AtFlags, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT};
use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};
use tar::{Archive, Entry, EntryType};
use wire::{Code, WireError, files::FileReply};

/// Unpacks into the directory `path`. Files belong to whom the guest runs as and lose setuid and setgid; FIFOs and
/// devices are left out; a name that leads out of the directory is an error, and what came before it stays.
pub fn unpack(path: &str, mut source: Source) -> Result<FileReply, WireError> {
    let path = absolute(path)?;
    let failed = |e: io::Error| path_error(&path, &e);
    std::fs::create_dir_all(&path).map_err(failed)?;
    let root = Root::open(Path::new(&path)).map_err(failed)?;
    let mut archive = Archive::new(&mut source);
    for entry in archive.entries().map_err(failed)? {
        let mut entry = entry.map_err(|e| bad_archive(&path, &e))?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        unpack_entry(&root, &mut entry).map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput => WireError::new(Code::Invalid, format!("archive entry {name:?}: {e}")),
            _ => path_error(&format!("{path}/{name}"), &e),
        })?;
    }
    // What follows the end of the archive (padding) is read, so that the sender can finish.
    io::copy(&mut source, &mut io::sink()).map_err(failed)?;
    Ok(FileReply::Done)
}

fn bad_archive(path: &str, error: &io::Error) -> WireError {
    match error.kind() {
        io::ErrorKind::ConnectionAborted => path_error(path, error),
        _ => WireError::new(Code::Invalid, format!("not a tar archive: {error}")),
    }
}

fn unpack_entry(root: &Root, entry: &mut Entry<'_, impl Read>) -> io::Result<()> {
    let path = entry.path()?.into_owned();
    let kind = entry.header().entry_type();
    // The directory itself, as in an archive of ".".
    if kind == EntryType::Directory && path.components().all(|c| c == std::path::Component::CurDir) {
        return Ok(());
    }
    match kind {
        EntryType::Directory => make_directory(&root.place(&path)?, mode_of(entry)?),
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => make_file(&root.place(&path)?, entry),
        EntryType::Symlink => {
            let place = root.place(&path)?;
            let target = link_of(entry)?;
            place.clear()?;
            Ok(fs::symlinkat(&target, &place.dir, &place.name)?)
        }
        EntryType::Link => {
            let source = root.place(Path::new(&link_of(entry)?))?;
            let place = root.place(&path)?;
            place.clear()?;
            Ok(fs::linkat(&source.dir, &source.name, &place.dir, &place.name, AtFlags::empty())?)
        }
        _ => Ok(()),
    }
}

fn link_of(entry: &Entry<'_, impl Read>) -> io::Result<std::path::PathBuf> {
    let target = entry.link_name()?.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a link without a target"))?;
    Ok(target.into_owned())
}

fn mode_of(entry: &Entry<'_, impl Read>) -> io::Result<Mode> {
    Ok(Mode::from_raw_mode(entry.header().mode()? & 0o1777))
}

fn make_directory(place: &Place, mode: Mode) -> io::Result<()> {
    match fs::mkdirat(&place.dir, &place.name, Mode::from_raw_mode(0o755)) {
        Ok(()) => Ok(fs::chmodat(&place.dir, &place.name, mode | Mode::RWXU, AtFlags::empty())?),
        Err(rustix::io::Errno::EXIST) => {
            let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
            // A link to a directory may stay, as with every tar.
            fs::openat(&place.dir, &place.name, flags, Mode::empty())?;
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

fn make_file(place: &Place, entry: &mut Entry<'_, impl Read>) -> io::Result<()> {
    let mode = mode_of(entry)?;
    place.clear()?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(fs::openat(&place.dir, &place.name, flags, Mode::from_raw_mode(0o600))?);
    io::copy(entry, &mut file)?;
    fs::fchmod(&file, mode)?;
    if let Ok(seconds) = entry.header().mtime()
        && let Ok(seconds) = i64::try_from(seconds)
    {
        let modified = Timespec { tv_sec: seconds, tv_nsec: 0 };
        let accessed = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        fs::futimens(&file, &Timestamps { last_access: accessed, last_modification: modified })?;
    }
    Ok(())
}
