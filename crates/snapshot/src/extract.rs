//! Unpacking archives that strangers made, so that nothing lands outside of the folder they are unpacked in.
//!
//! Every name is looked up beneath the folder by the kernel, so a symlink laid by an earlier entry or layer can't lead
//! out. Symlinks themselves are kept as they are written: in a root tree most are absolute, and they mean something only
//! inside of it.

mod layer;
pub mod oci;

use crate::{inroot, tree};
use layer::Seen;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

/// Why an archive wasn't unpacked.
#[derive(Debug, thiserror::Error)]
pub enum ExtractError {
    #[error("the archive names '{0}': only relative paths without '..' are unpacked")]
    UnsafePath(String),
    #[error("'{0}' is a device node: an archive may have these in /dev only, where they are left out")]
    Device(String),
    #[error("'{path}' is an entry of a kind that isn't known ({kind:?})")]
    UnknownKind { path: String, kind: tar::EntryType },
    #[error("the hard link '{path}' points to '{target}', which isn't in the archive before it")]
    BadLink { path: String, target: String },
    #[error("the archive unpacks to more than {0} bytes")]
    TooBig(u64),
    #[error("the archive has more than {0} entries")]
    TooMany(u64),
    #[error("the archive can't be read: {0}")]
    Archive(#[source] io::Error),
    #[error("can't write '{path}': {source}")]
    Io { path: String, source: io::Error },
    #[error("the image layout is not usable: {0}")]
    Layout(String),
    #[error("the image's {what} has the digest {found}, but {expected} is promised")]
    Digest { what: String, expected: String, found: String },
}

/// What to keep of an archive's metadata, and how much to take.
#[derive(Debug, Clone)]
pub struct ExtractOptions {
    /// Everything belongs to this (uid, gid); `None` keeps the archive's owners.
    pub owner: Option<(u32, u32)>,
    /// Permission bits that are kept.
    pub mode_mask: u32,
    /// Most bytes of content.
    pub max_bytes: u64,
    /// Most entries.
    pub max_entries: u64,
}

impl ExtractOptions {
    /// For a root tree: owners, modes and attributes are part of it.
    pub fn template() -> Self {
        ExtractOptions { owner: None, mode_mask: 0o7777, max_bytes: 64 << 30, max_entries: 10_000_000 }
    }

    /// For files put into a session: they belong to root, without set-uid bits.
    pub fn source(max_bytes: u64) -> Self {
        ExtractOptions { owner: Some((0, 0)), mode_mask: 0o1777, max_bytes, max_entries: 10_000_000 }
    }
}

/// What was unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extracted {
    pub entries: u64,
    pub bytes: u64,
}

/// Unpacks a tar archive (plain, gzip or zstd, told by its first bytes) into the directory `dest` beneath `root`, which
/// is made where it is missing. What stands in the way of an entry is replaced. Nothing is undone on an error.
///
/// # Errors
/// See [`ExtractError`].
pub fn extract_tar_into(
    root: &impl AsFd,
    dest: &Path,
    archive: impl Read,
    options: &ExtractOptions,
) -> Result<Extracted, ExtractError> {
    let bytes = dest.as_os_str().as_bytes();
    let relative =
        inroot::normal_path(bytes.strip_prefix(b"/").unwrap_or(bytes)).ok_or_else(|| ExtractError::UnsafePath(shown(dest)))?;
    let dest = inroot::ensure_dir(root.as_fd(), &relative).map_err(io_at(dest))?;
    let mut extractor = Extractor::new(dest.as_fd(), options, None);
    extractor.run(decompressed(archive).map_err(ExtractError::Archive)?)?;
    Ok(extractor.done)
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().chars().take(300).collect()
}

fn io_at<E: Into<io::Error>>(path: &Path) -> impl FnOnce(E) -> ExtractError {
    let path = shown(path);
    move |e| ExtractError::Io { path, source: e.into() }
}

/// The plain bytes of an archive.
pub(crate) fn decompressed<'a>(mut archive: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut start = Vec::new();
    archive.by_ref().take(6).read_to_end(&mut start)?;
    let unsupported =
        |kind| Err(io::Error::new(io::ErrorKind::Unsupported, format!("{kind} isn't supported: use gzip, zstd or none")));
    let whole = io::Cursor::new(start.clone()).chain(archive);
    match start.as_slice() {
        [] => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is empty")),
        [0x1f, 0x8b, ..] => Ok(Box::new(flate2::read::MultiGzDecoder::new(whole))),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Ok(Box::new(zstd::Decoder::new(whole)?)),
        [b'B', b'Z', b'h', ..] => unsupported("bzip2"),
        [0xfd, b'7', b'z', b'X', b'Z', 0] => unsupported("xz"),
        _ => Ok(Box::new(whole)),
    }
}

/// What is set on a directory after everything is in it.
struct Directory {
    path: PathBuf,
    attributes: Attributes,
}

#[derive(Clone, Copy)]
struct Attributes {
    mode: u32,
    uid: u32,
    gid: u32,
    mtime: i64,
}

/// Unpacks one archive into one folder.
struct Extractor<'a> {
    root: BorrowedFd<'a>,
    options: &'a ExtractOptions,
    /// Present for a layer of an image: whiteouts are carried out, on what earlier layers left.
    layer: Option<Seen>,
    /// The directory that the last entry was in: archives go directory by directory.
    parent: Option<(PathBuf, OwnedFd)>,
    directories: Vec<Directory>,
    done: Extracted,
}

impl<'a> Extractor<'a> {
    fn new(root: BorrowedFd<'a>, options: &'a ExtractOptions, layer: Option<Seen>) -> Self {
        Extractor { root, options, layer, parent: None, directories: Vec::new(), done: Extracted::default() }
    }

    fn run(&mut self, archive: impl Read) -> Result<(), ExtractError> {
        let mut archive = tar::Archive::new(archive);
        for entry in archive.entries().map_err(ExtractError::Archive)? {
            let mut entry = entry.map_err(ExtractError::Archive)?;
            self.entry(&mut entry)?;
        }
        // The rest of the stream: a checksum at its end is only tested by reading to it.
        io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(ExtractError::Archive)?;
        self.finish_directories()
    }

    fn entry(&mut self, entry: &mut tar::Entry<'_, impl Read>) -> Result<(), ExtractError> {
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() {
            return Ok(());
        }
        self.done.entries += 1;
        if self.done.entries > self.options.max_entries {
            return Err(ExtractError::TooMany(self.options.max_entries));
        }
        let raw = entry.path_bytes().into_owned();
        let path =
            inroot::normal_path(&raw).ok_or_else(|| ExtractError::UnsafePath(shown(Path::new(OsStr::from_bytes(&raw)))))?;
        let attributes = self.attributes(entry.header())?;
        let Some(name) = path.file_name().map(OsStr::to_owned) else {
            // The folder itself.
            self.directories.push(Directory { path, attributes });
            return Ok(());
        };
        if self.whiteout(&path, &name)? {
            return Ok(());
        }
        match kind {
            tar::EntryType::Char | tar::EntryType::Block if path.starts_with("dev") => return Ok(()),
            tar::EntryType::Char | tar::EntryType::Block => return Err(ExtractError::Device(shown(&path))),
            _ => {}
        }
        let parent = self.open_parent(&path)?;
        if let Some(seen) = &mut self.layer {
            seen.add(parent.as_fd(), &name).map_err(io_at(&path))?;
        }
        let is_dir = kind.is_dir() || (kind.is_file() && raw.ends_with(b"/"));
        self.make_room(parent.as_fd(), &name, is_dir).map_err(io_at(&path))?;
        if is_dir {
            self.directory(entry, parent.as_fd(), &name, &path, attributes)?;
        } else if matches!(kind, tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse) {
            self.file(entry, parent.as_fd(), &name, &path, attributes)?;
        } else if kind.is_symlink() {
            let target = entry.link_name_bytes().unwrap_or_default();
            rustix::fs::symlinkat(&*target, &parent, &*name).map_err(io_at(&path))?;
            set_attributes(parent.as_fd(), &name, attributes, false).map_err(io_at(&path))?;
        } else if kind.is_hard_link() {
            self.hard_link(&entry.link_name_bytes().unwrap_or_default(), parent.as_fd(), &name, &path)?;
        } else if kind.is_fifo() {
            rustix::fs::mknodat(&parent, &*name, FileType::Fifo, Mode::RUSR, 0).map_err(io_at(&path))?;
            set_attributes(parent.as_fd(), &name, attributes, true).map_err(io_at(&path))?;
        } else {
            return Err(ExtractError::UnknownKind { path: shown(&path), kind });
        }
        self.parent = Some((path.parent().unwrap_or(Path::new("")).to_owned(), parent));
        Ok(())
    }

    fn attributes(&self, header: &tar::Header) -> Result<Attributes, ExtractError> {
        let id = |n: u64| u32::try_from(n).map_err(|_| ExtractError::Archive(io::Error::other("an owner's number is too large")));
        let (uid, gid) = match self.options.owner {
            Some(owner) => owner,
            None => (id(header.uid().map_err(ExtractError::Archive)?)?, id(header.gid().map_err(ExtractError::Archive)?)?),
        };
        let mode = header.mode().map_err(ExtractError::Archive)? & self.options.mode_mask;
        Ok(Attributes { mode, uid, gid, mtime: header.mtime().ok().and_then(|t| i64::try_from(t).ok()).unwrap_or(0) })
    }

    fn open_parent(&mut self, path: &Path) -> Result<OwnedFd, ExtractError> {
        let dir = path.parent().unwrap_or(Path::new(""));
        match self.parent.take() {
            Some((known, fd)) if known == dir => Ok(fd),
            _ => inroot::ensure_dir(self.root, dir).map_err(io_at(path)),
        }
    }

    /// Removes what the entry replaces. A directory stays for a directory.
    fn make_room(&self, parent: BorrowedFd<'_>, name: &OsStr, is_dir: bool) -> io::Result<()> {
        match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(e) => Err(e.into()),
            Ok(stat) if is_dir && FileType::from_raw_mode(stat.st_mode) == FileType::Directory => Ok(()),
            Ok(_) => inroot::remove_at(parent, name),
        }
    }

    fn directory(
        &mut self,
        entry: &mut tar::Entry<'_, impl Read>,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
        attributes: Attributes,
    ) -> Result<(), ExtractError> {
        match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(io_at(path)(e)),
        }
        let dir = inroot::open_plain(parent, Path::new(name), OFlags::RDONLY | OFlags::DIRECTORY).map_err(io_at(path))?;
        self.set_xattrs(entry, dir.as_fd()).map_err(io_at(path))?;
        self.directories.push(Directory { path: path.to_owned(), attributes });
        Ok(())
    }

    fn file(
        &mut self,
        entry: &mut tar::Entry<'_, impl Read>,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
        attributes: Attributes,
    ) -> Result<(), ExtractError> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file: File = rustix::fs::openat(parent, name, flags, Mode::RUSR | Mode::WUSR).map_err(io_at(path))?.into();
        let left = self.options.max_bytes - self.done.bytes;
        let promised = entry.size();
        if promised > left {
            return Err(ExtractError::TooBig(self.options.max_bytes));
        }
        copy_all(entry, &mut file, path)?;
        self.done.bytes += promised;
        rustix::fs::fchown(&file, Some(Uid::from_raw(attributes.uid)), Some(Gid::from_raw(attributes.gid)))
            .map_err(io_at(path))?;
        // After the owner: a change of owner clears set-uid bits and capabilities.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(attributes.mode)).map_err(io_at(path))?;
        self.set_xattrs(entry, file.as_fd()).map_err(io_at(path))?;
        rustix::fs::futimens(&file, &times(attributes.mtime)).map_err(io_at(path))
    }

    fn hard_link(&mut self, target: &[u8], parent: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<(), ExtractError> {
        let text = || shown(Path::new(OsStr::from_bytes(target)));
        let target_path = inroot::normal_path(target).ok_or_else(|| ExtractError::UnsafePath(text()))?;
        let bad = || ExtractError::BadLink { path: shown(path), target: text() };
        let target_name = target_path.file_name().ok_or_else(bad)?;
        let dir = match target_path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        let dir = inroot::open(self.root, dir, OFlags::PATH | OFlags::DIRECTORY).map_err(|_| bad())?;
        rustix::fs::linkat(&dir, target_name, parent, name, AtFlags::empty()).map_err(|e| match e {
            rustix::io::Errno::NOENT | rustix::io::Errno::PERM => bad(),
            e => io_at(path)(e),
        })
    }

    /// Sets the kept extended attributes (pax records `SCHILY.xattr.*`). A file system without them loses them.
    fn set_xattrs(&self, entry: &mut tar::Entry<'_, impl Read>, fd: BorrowedFd<'_>) -> io::Result<()> {
        let Some(records) = entry.pax_extensions()? else { return Ok(()) };
        for record in records.flatten() {
            let Some(key) = record.key_bytes().strip_prefix(b"SCHILY.xattr.").filter(|k| tree::keeps_xattr(k)) else { continue };
            if key == b"security.capability" && self.options.mode_mask & 0o4000 == 0 {
                continue;
            }
            match rustix::fs::fsetxattr(fd, key, record.value_bytes(), XattrFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn finish_directories(&mut self) -> Result<(), ExtractError> {
        for Directory { path, attributes } in std::mem::take(&mut self.directories).into_iter().rev() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            let here = if path.as_os_str().is_empty() { Path::new(".") } else { &path };
            // A later entry may have replaced it by something else. Its parents may be symlinks, itself not.
            let Ok(dir) = inroot::open(self.root, here, flags | OFlags::NOFOLLOW) else { continue };
            let owner = (Some(Uid::from_raw(attributes.uid)), Some(Gid::from_raw(attributes.gid)));
            rustix::fs::fchown(&dir, owner.0, owner.1).map_err(io_at(here))?;
            rustix::fs::fchmod(&dir, Mode::from_raw_mode(attributes.mode)).map_err(io_at(here))?;
            rustix::fs::futimens(&dir, &times(attributes.mtime)).map_err(io_at(here))?;
        }
        Ok(())
    }
}

/// Copies an entry's content; an archive that ends in the middle of it is an error, not a short file.
fn copy_all(entry: &mut tar::Entry<'_, impl Read>, file: &mut File, path: &Path) -> Result<(), ExtractError> {
    let promised = entry.size();
    let mut buffer = vec![0u8; 128 << 10];
    let mut copied = 0;
    loop {
        let n = entry.read(&mut buffer).map_err(ExtractError::Archive)?;
        if n == 0 {
            break;
        }
        io::Write::write_all(file, &buffer[..n]).map_err(io_at(path))?;
        copied += n as u64;
    }
    if copied == promised { Ok(()) } else { Err(ExtractError::Archive(io::ErrorKind::UnexpectedEof.into())) }
}

fn set_attributes(parent: BorrowedFd<'_>, name: &OsStr, attributes: Attributes, has_mode: bool) -> io::Result<()> {
    let owner = (Some(Uid::from_raw(attributes.uid)), Some(Gid::from_raw(attributes.gid)));
    rustix::fs::chownat(parent, name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)?;
    if has_mode {
        rustix::fs::chmodat(parent, name, Mode::from_raw_mode(attributes.mode), AtFlags::empty())?;
    }
    Ok(rustix::fs::utimensat(parent, name, &times(attributes.mtime), AtFlags::SYMLINK_NOFOLLOW)?)
}

fn times(mtime: i64) -> Timestamps {
    let at = Timespec { tv_sec: mtime, tv_nsec: 0 };
    Timestamps { last_access: at, last_modification: at }
}

#[cfg(test)]
mod tests;
