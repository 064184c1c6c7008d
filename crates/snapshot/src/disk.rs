//! A session's disk: its own layer of changes above layers that many sessions share.
//!
//! ```text
//! DIR/upper   what this session changed      (survives the sandbox)
//! DIR/work    scratch space of the overlay   (worthless when not mounted)
//! ```

use crate::{
    Hash, fsutil,
    overlay::{self, OverlayError, Upper},
};
use rustix::{
    fs::CWD,
    mount::{MoveMountFlags, UnmountFlags, move_mount},
};
use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

mod quota;
pub use quota::{keeps_limits, lift_project_quota, set_project_quota};

/// Why a disk couldn't be mounted, unmounted, measured or limited.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("the disk {} is mounted already, at {}", dir.display(), at.display())]
    AlreadyMounted { dir: PathBuf, at: PathBuf },
    #[error("a disk needs at least one layer below it")]
    NoLower,
    #[error("mounting disks needs root (CAP_SYS_ADMIN)")]
    NoRights,
    #[error("can't mount the disk {}: {detail}", dir.display())]
    Refused { dir: PathBuf, detail: String },
    #[error("{reason}")]
    Unsupported { reason: String },
    #[error("can't {what} {}: {source}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DiskError {
    let path = path.to_owned();
    move |source| DiskError::Io { what, path, source }
}

/// How an unmount went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmounted {
    /// Gone; nothing uses the disk any more.
    Clean,
    /// Out of the tree of names, but some process still has it open and may still write. The disk must not be mounted
    /// again before that process has ended.
    Lazy,
    /// There was no mount.
    NotMounted,
}

/// Where a session's own layer lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskLayout {
    /// The folder that holds `upper` and `work`.
    pub dir: PathBuf,
}

impl DiskLayout {
    /// The disk in `dir`. Nothing is touched.
    pub fn new(dir: impl Into<PathBuf>) -> DiskLayout {
        DiskLayout { dir: dir.into() }
    }

    /// The layer of changes.
    pub fn upper(&self) -> PathBuf {
        self.dir.join("upper")
    }

    /// The overlay's scratch space.
    pub fn work(&self) -> PathBuf {
        self.dir.join("work")
    }

    /// Makes the folders where they are missing.
    ///
    /// # Errors
    /// [`DiskError::Io`].
    pub fn create(&self) -> Result<(), DiskError> {
        fsutil::ensure_dir(&self.dir, 0o700).map_err(io_error("create", &self.dir))?;
        for dir in [self.upper(), self.work()] {
            // The mode of `upper` is the mode of `/` inside.
            fsutil::ensure_dir(&dir, 0o755).map_err(io_error("create", &dir))?;
        }
        Ok(())
    }

    /// Mounts the disk above `lower` (top-most layer first, e.g. guest layer, then template) at `at`, which is made
    /// where it is missing. Set-uid bits and device nodes on it have no effect.
    ///
    /// # Errors
    /// [`DiskError::AlreadyMounted`] where `at` is a mount point or the disk is mounted anywhere else: two overlays over
    /// one layer corrupt it. [`DiskError::NoRights`], [`DiskError::Refused`] with the kernel's reason.
    pub fn mount(&self, lower: &[PathBuf], at: &Path) -> Result<(), DiskError> {
        if lower.is_empty() {
            return Err(DiskError::NoLower);
        }
        self.create()?;
        fsutil::ensure_dir(at, 0o755).map_err(io_error("create", at))?;
        // Of two that mount at once, the second sees the first's mount.
        let lock = File::open(&self.dir).map_err(io_error("open", &self.dir))?;
        lock.lock().map_err(io_error("lock", &self.dir))?;
        let upper = fs::canonicalize(self.upper()).map_err(io_error("find", &self.upper()))?;
        let work = fs::canonicalize(self.work()).map_err(io_error("find", &self.work()))?;
        let here = fs::canonicalize(at).map_err(io_error("find", at))?;
        if let Some(mount) = mounts()?.into_iter().find(|m| m.at == here || m.upper_dir().as_ref() == Some(&upper)) {
            return Err(DiskError::AlreadyMounted { dir: self.dir.clone(), at: mount.at });
        }
        let lower: Vec<&Path> = lower.iter().map(PathBuf::as_path).collect();
        let mount = overlay::make(&lower, Some(Upper { upper: &upper, work: &work })).map_err(|e| mount_error(e, &self.dir))?;
        move_mount(&mount, "", CWD, &here, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(|e| {
            mount_error(OverlayError::Refused { step: "attaching it", detail: String::new(), source: e.into() }, &self.dir)
        })
    }

    /// How much space the session's own layer takes: allocated blocks, hard links once.
    ///
    /// # Errors
    /// [`DiskError::Io`].
    pub fn usage_bytes(&self) -> Result<u64, DiskError> {
        usage_bytes(&self.upper())
    }
}

fn mount_error(error: OverlayError, dir: &Path) -> DiskError {
    match error {
        OverlayError::Refused { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => DiskError::NoRights,
        other => DiskError::Refused { dir: dir.to_owned(), detail: other.to_string() },
    }
}

/// Takes the mount at `at` away. Where processes still use it, it is only taken out of sight: see [`Unmounted::Lazy`].
///
/// # Errors
/// [`DiskError::NoRights`], [`DiskError::Io`].
pub fn unmount(at: &Path) -> Result<Unmounted, DiskError> {
    if !is_mounted(at)? {
        return Ok(Unmounted::NotMounted);
    }
    let (result, way) = match rustix::mount::unmount(at, UnmountFlags::NOFOLLOW) {
        Err(rustix::io::Errno::BUSY) => {
            (rustix::mount::unmount(at, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH), Unmounted::Lazy)
        }
        other => (other, Unmounted::Clean),
    };
    match result {
        Ok(()) => Ok(way),
        // Another was faster.
        Err(rustix::io::Errno::INVAL) => Ok(Unmounted::NotMounted),
        Err(rustix::io::Errno::PERM) => Err(DiskError::NoRights),
        Err(e) => Err(io_error("unmount", at)(e.into())),
    }
}

/// True where something is mounted exactly at `at`.
///
/// # Errors
/// [`DiskError::Io`] where the kernel's list can't be read.
pub fn is_mounted(at: &Path) -> Result<bool, DiskError> {
    match fs::canonicalize(at) {
        Ok(at) => Ok(mounts()?.iter().any(|m| m.at == at)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(io_error("find", at)(e)),
    }
}

/// Everything mounted in or below `dir`, deepest first: the order in which a clean-up unmounts.
///
/// # Errors
/// [`DiskError::Io`] where the kernel's list can't be read.
pub fn mounts_below(dir: &Path) -> Result<Vec<PathBuf>, DiskError> {
    let dir = match fs::canonicalize(dir) {
        Ok(dir) => dir,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io_error("find", dir)(e)),
    };
    let mut found: Vec<PathBuf> = mounts()?.into_iter().map(|m| m.at).filter(|at| at.starts_with(&dir)).collect();
    // Later mounts cover earlier ones at the same place, and the list is in order of mounting.
    found.reverse();
    found.sort_by_key(|at| std::cmp::Reverse(at.components().count()));
    Ok(found)
}

/// Makes everything written to the file system of `upper` so far durable (syncfs(2)).
///
/// # Errors
/// [`DiskError::Io`], also for an earlier write that failed in the background.
pub fn sync(upper: &Path) -> Result<(), DiskError> {
    let dir = File::open(upper).map_err(io_error("open", upper))?;
    rustix::fs::syncfs(&dir).map_err(|e| io_error("sync", upper)(e.into()))
}

/// The space that a tree takes: allocated blocks, hard links once, nothing on other file systems. Files whose paths are
/// longer than the kernel takes are left out.
///
/// # Errors
/// [`DiskError::Io`].
pub fn usage_bytes(tree: &Path) -> Result<u64, DiskError> {
    let mut seen = HashSet::new();
    let mut total = 0;
    for entry in walkdir::WalkDir::new(tree).same_file_system(true) {
        // A file that vanishes under a running session takes no space; one beyond any path hides from nobody but itself.
        let Some(meta) = gone_is_none(entry.and_then(|e| e.metadata())).map_err(io_error("measure", tree))? else {
            continue;
        };
        if meta.is_dir() || meta.nlink() == 1 || seen.insert(meta.ino()) {
            total += meta.blocks() * 512;
        }
    }
    Ok(total)
}

/// A value that changes whenever anything in the layer changes: path, inode, change time, size, mode of every file.
/// It says whether a disk is still the one that a memory image was taken with. A copy of the layer has another.
///
/// # Errors
/// [`DiskError::Io`].
pub fn fingerprint(upper: &Path) -> Result<Hash, DiskError> {
    let mut hasher = blake3::Hasher::new_derive_key("dormouse disk fingerprint 1");
    for entry in walkdir::WalkDir::new(upper).sort_by_file_name() {
        let entry = entry.map_err(|e| io_error("read", upper)(e.into()))?;
        let meta = entry.metadata().map_err(|e| io_error("read", entry.path())(e.into()))?;
        let path = entry.path().strip_prefix(upper).unwrap_or(entry.path()).as_os_str().as_bytes();
        hasher.update(&(path.len() as u64).to_le_bytes()).update(path);
        for number in [meta.ino(), meta.ctime() as u64, meta.ctime_nsec() as u64, meta.size(), u64::from(meta.mode())] {
            hasher.update(&number.to_le_bytes());
        }
    }
    Ok(hasher.finalize().into())
}

fn gone_is_none<T>(result: Result<T, walkdir::Error>) -> io::Result<Option<T>> {
    match result.map_err(io::Error::from) {
        Ok(value) => Ok(Some(value)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidFilename) => Ok(None),
        Err(e) => Err(e),
    }
}

/// One line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mount {
    at: PathBuf,
    super_options: Vec<u8>,
}

impl Mount {
    fn upper_dir(&self) -> Option<PathBuf> {
        let value = self.super_options.split(|b| *b == b',').find_map(|o| o.strip_prefix(b"upperdir="))?;
        Some(PathBuf::from(std::ffi::OsString::from_vec(value.to_vec())))
    }
}

fn mounts() -> Result<Vec<Mount>, DiskError> {
    let path = Path::new("/proc/self/mountinfo");
    Ok(parse_mounts(&fs::read(path).map_err(io_error("read", path))?))
}

fn parse_mounts(text: &[u8]) -> Vec<Mount> {
    let one = |line: &[u8]| {
        let mut fields = line.split(|b| *b == b' ');
        let at = PathBuf::from(std::ffi::OsString::from_vec(unescape(fields.nth(4)?)));
        let super_options = unescape(line.split(|b| *b == b' ').next_back()?);
        Some(Mount { at, super_options })
    };
    text.split(|b| *b == b'\n').filter_map(one).collect()
}

/// Undoes the octal escapes of blank, tab, newline and backslash.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|d| *first == b'\\' && d.iter().all(|b| (b'0'..=b'7').contains(b)));
        match octal {
            Some(digits) => {
                out.push(digits.iter().fold(0u8, |n, d| n.wrapping_mul(8).wrapping_add(d - b'0')));
                rest = &after[3..];
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests;
