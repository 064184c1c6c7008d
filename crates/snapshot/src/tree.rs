//! Trees of files: their content address, and copies that keep everything the address covers.

use crate::Hash;
use std::{
    collections::HashMap,
    ffi::CStr,
    fs::{self, File, Metadata},
    io,
    os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
        },
    },
    path::{Path, PathBuf},
};

/// Names the listing and its version: a change of what is listed, or how, needs another name.
const LISTING: &str = "dormouse template tree 1";

/// Why a tree couldn't be listed or copied.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    #[error("{} is a device or socket: a template has only files, directories, links and FIFOs", .0.display())]
    Special(PathBuf),
    #[error("can't read or write {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> TreeError {
    let path = path.to_owned();
    move |source| TreeError::Io { path, source }
}

/// What a tree is, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) hash: Hash,
    pub(crate) size_bytes: u64,
    pub(crate) files: u64,
}

/// The content address of the tree at `root`: BLAKE3 over every entry in the order of its path, with type, mode, owner,
/// size, content hash, link target, extended attributes and hard-link group. Times are left out: the same content made
/// twice is the same tree. `by_metadata` names files that are too many to read (the `host` template): for these size and
/// modification time stand for the content.
pub(crate) fn summarize(root: &Path, by_metadata: &dyn Fn(&Metadata) -> bool) -> Result<Summary, TreeError> {
    let mut listing = blake3::Hasher::new_derive_key(LISTING);
    let (mut size_bytes, mut files) = (0u64, 0u64);
    let mut link_groups: HashMap<u64, u64> = HashMap::new();
    for entry in walk(root) {
        let (path, meta) = entry?;
        files += 1;
        let name = path.strip_prefix(root).unwrap_or(&path).as_os_str().as_bytes();
        field(&mut listing, name);
        let kind = meta.file_type();
        let head = [u64::from(meta.mode()), u64::from(meta.uid()), u64::from(meta.gid())];
        head.iter().for_each(|n| number(&mut listing, *n));
        if kind.is_file() {
            let by_metadata = by_metadata(&meta);
            // A file that is linked from outside of the tree has no group in it.
            let group = if meta.nlink() > 1 && !by_metadata { *link_groups.entry(meta.ino()).or_insert(files) } else { files };
            number(&mut listing, files - group);
            number(&mut listing, meta.size());
            if by_metadata {
                number(&mut listing, meta.mtime() as u64);
                number(&mut listing, meta.mtime_nsec() as u64);
            } else if group == files {
                size_bytes += meta.size();
                field(&mut listing, hash_file(&path).map_err(at(&path))?.to_string().as_bytes());
            }
        } else if kind.is_symlink() {
            field(&mut listing, fs::read_link(&path).map_err(at(&path))?.as_os_str().as_bytes());
        } else if !kind.is_dir() && !kind.is_fifo() {
            return Err(TreeError::Special(path));
        }
        let attributes = xattrs(&path).map_err(at(&path))?;
        number(&mut listing, attributes.len() as u64);
        for (key, value) in attributes {
            field(&mut listing, &key);
            field(&mut listing, &value);
        }
    }
    Ok(Summary { hash: listing.finalize().into(), size_bytes, files })
}

fn number(hasher: &mut blake3::Hasher, n: u64) {
    hasher.update(&n.to_le_bytes());
}

fn field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    number(hasher, bytes.len() as u64);
    hasher.update(bytes);
}

/// The content address of one file.
pub(crate) fn hash_file(path: &Path) -> io::Result<Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok(hasher.finalize().into())
}

/// Every entry of a tree that nobody changes meanwhile, in a fixed order, the root first.
pub(crate) fn walk(root: &Path) -> impl Iterator<Item = Result<(PathBuf, Metadata), TreeError>> {
    let root = root.to_owned();
    walkdir::WalkDir::new(&root).sort_by_file_name().into_iter().map(move |entry| {
        let entry = entry.map_err(|e| at(&root)(e.into()))?;
        let meta = entry.metadata().map_err(|e| at(entry.path())(e.into()))?;
        Ok((entry.into_path(), meta))
    })
}

/// The extended attributes that a template keeps. Those of an overlay are not among them: in a layer they would tell
/// the kernel to show other files than the tree has.
pub(crate) fn keeps_xattr(name: &[u8]) -> bool {
    name.starts_with(b"user.") || name == b"security.capability" || name.starts_with(b"system.posix_acl_")
}

/// The kept extended attributes of a file, in order; none where the file system has none.
pub(crate) fn xattrs(path: &Path) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut names = vec![0u8; 64 << 10];
    let length = match rustix::fs::llistxattr(path, names.as_mut_slice()) {
        Ok(length) => length,
        Err(rustix::io::Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    };
    let mut found = Vec::new();
    for name in names[..length].split_inclusive(|b| *b == 0) {
        let Some(key) = CStr::from_bytes_with_nul(name).ok().filter(|n| keeps_xattr(n.to_bytes())) else { continue };
        let mut value = vec![0u8; 64 << 10];
        let size = rustix::fs::lgetxattr(path, key, value.as_mut_slice())?;
        value.truncate(size);
        found.push((key.to_bytes().to_vec(), value));
    }
    found.sort();
    Ok(found)
}

/// The first entry with an attribute that only the kernel's own file systems and root use: no template has one.
pub(crate) fn first_trusted(root: &Path) -> Result<Option<PathBuf>, TreeError> {
    let mut names = vec![0u8; 64 << 10];
    for entry in walk(root) {
        let (path, _) = entry?;
        let length = match rustix::fs::llistxattr(&path, names.as_mut_slice()) {
            Ok(length) => length,
            Err(rustix::io::Errno::OPNOTSUPP) => 0,
            Err(e) => return Err(at(&path)(e.into())),
        };
        if names[..length].split(|b| *b == 0).any(|name| name.starts_with(b"trusted.")) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Moves the tree at `from` to `to` (which must not exist), by a copy where they lie on different file systems.
pub(crate) fn relocate(from: &Path, to: &Path) -> Result<(), TreeError> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            copy(from, to)?;
            fs::remove_dir_all(from).map_err(at(from))
        }
        other => other.map_err(at(from)),
    }
}

/// Copies the tree at `from` to `to` (which must not exist), with owners, modes, times, links and attributes.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), TreeError> {
    let mut links: HashMap<(u64, u64), PathBuf> = HashMap::new();
    let mut directories = Vec::new();
    for entry in walk(from) {
        let (path, meta) = entry?;
        let target = match path.strip_prefix(from) {
            Ok(below) if !below.as_os_str().is_empty() => to.join(below),
            _ => to.to_owned(),
        };
        // Every sandbox gets a `/dev` of its own.
        if (meta.file_type().is_char_device() || meta.file_type().is_block_device()) && target.starts_with(to.join("dev")) {
            continue;
        }
        if meta.is_file() && meta.nlink() > 1 {
            if let Some(first) = links.get(&(meta.dev(), meta.ino())) {
                fs::hard_link(first, &target).map_err(at(&target))?;
                continue;
            }
            links.insert((meta.dev(), meta.ino()), target.clone());
        }
        copy_entry(&path, &meta, &target)?;
        if meta.is_dir() {
            directories.push((target, meta));
        }
    }
    // Filling a directory changes its time, and a read-only one can't be filled by everybody.
    directories.iter().rev().try_for_each(|(path, meta)| set_times(path, meta).map_err(at(path)))
}

/// Makes one entry like another; a directory comes out empty.
pub(crate) fn copy_entry(from: &Path, meta: &Metadata, to: &Path) -> Result<(), TreeError> {
    let kind = meta.file_type();
    if kind.is_dir() {
        fs::create_dir(to).map_err(at(to))?;
    } else if kind.is_symlink() {
        let target = fs::read_link(from).map_err(at(from))?;
        std::os::unix::fs::symlink(target, to).map_err(at(to))?;
    } else if kind.is_fifo() {
        nix::unistd::mkfifo(to, nix::sys::stat::Mode::S_IRUSR).map_err(|e| at(to)(e.into()))?;
    } else if kind.is_file() {
        copy_content(from, to).map_err(at(from))?;
    } else {
        return Err(TreeError::Special(from.to_owned()));
    }
    std::os::unix::fs::lchown(to, Some(meta.uid()), Some(meta.gid())).map_err(at(to))?;
    if !kind.is_symlink() {
        // After the owner: a change of owner clears the set-uid bit and capabilities.
        fs::set_permissions(to, fs::Permissions::from_mode(meta.mode() & 0o7777)).map_err(at(to))?;
        for (key, value) in xattrs(from).map_err(at(from))? {
            rustix::fs::lsetxattr(to, key.as_slice(), &value, rustix::fs::XattrFlags::empty()).map_err(|e| at(to)(e.into()))?;
        }
    }
    if kind.is_dir() { Ok(()) } else { set_times(to, meta).map_err(at(to)) }
}

/// Copies bytes, sharing them with the original where the file system can (ioctl_ficlone(2)).
pub(crate) fn copy_content(from: &Path, to: &Path) -> io::Result<()> {
    let mut source = File::open(from)?;
    let mut target = File::create_new(to)?;
    if rustix::fs::ioctl_ficlone(target.as_fd(), source.as_fd()).is_err() {
        io::copy(&mut source, &mut target)?;
    }
    Ok(())
}

pub(crate) fn set_times(path: &Path, meta: &Metadata) -> io::Result<()> {
    let spec = |sec, nsec| rustix::fs::Timespec { tv_sec: sec, tv_nsec: nsec };
    let times = rustix::fs::Timestamps {
        last_access: spec(meta.atime(), meta.atime_nsec()),
        last_modification: spec(meta.mtime(), meta.mtime_nsec()),
    };
    Ok(rustix::fs::utimensat(rustix::fs::CWD, path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?)
}
