//! A limit on the size of a disk, kept by the file system itself: a project of its own for each session.
//!
//! ext4 and xfs count the space of everything that belongs to a project, and refuse more than the project's limit, to
//! whoever writes. A directory passes its project on to what is made in it, so marking the two empty directories of a
//! new disk is enough. Sources: quotactl(2), ext4(5), xfs_quota(8), `linux/fs.h`, `linux/quota.h`, `linux/dqblk_xfs.h`.

use super::{DiskError, DiskLayout, io_error, mounts};
use crate::fsutil;
use model::ByteSize;
use std::{
    ffi::c_int,
    fs::{self, File},
    io,
    os::fd::AsRawFd,
    path::Path,
};

/// Sessions' projects have numbers from here to `2^31 - 1`; those that people give by hand are small.
const FIRST_ID: u32 = 1 << 30;
/// How many numbers are tried for one session: each is another's with a chance of one in a million.
const TRIES: u32 = 16;

/// `struct fsxattr` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
    padding: [u8; 8],
}
const _: () = assert!(size_of::<Attributes>() == 28);

/// `FS_XFLAG_PROJINHERIT`: what is made in the directory belongs to its project.
const INHERIT: u32 = 0x200;
/// `FS_IOC_FSGETXATTR` is `_IOR('X', 31, struct fsxattr)`, `FS_IOC_FSSETXATTR` is `_IOW('X', 32, struct fsxattr)`.
const GET_ATTRIBUTES: rustix::ioctl::Opcode = rustix::ioctl::opcode::read::<Attributes>(b'X', 31);
const SET_ATTRIBUTES: rustix::ioctl::Opcode = rustix::ioctl::opcode::write::<Attributes>(b'X', 32);

/// `struct fs_quota_stat` of `linux/dqblk_xfs.h`, of which only the flags matter here.
#[repr(C, align(8))]
struct QuotaState {
    version: i8,
    flags: u16,
    rest: [u8; 76],
}
const _: () = assert!(size_of::<QuotaState>() == 80);

/// `PRJQUOTA`: quotas of projects.
const PROJECT: c_int = 2;
/// `Q_XGETQSTAT`.
const GET_STATE: c_int = 0x5805;
/// `FS_QUOTA_PDQ_ENFD`: limits of projects are enforced.
const ENFORCED: u16 = 1 << 5;
/// Quotas count blocks of this size.
const BLOCK: u64 = 1024;

/// Has the file system keep the disk `layout` within `limit`, from its first mount on; for one that is limited already,
/// sets the limit anew. `name`: the session's id, or whatever else nobody else has. A disk that is mounted without a
/// project gets none.
///
/// Several servers on one file system never share a project: a number is taken only where nothing belongs to it.
///
/// # Errors
/// [`DiskError::Unsupported`] with the reason where the file system keeps no limits, or where this disk can't be counted
/// by itself; then callers watch its size ([`super::usage_bytes`]). [`DiskError::Io`].
pub fn set_project_quota(layout: &DiskLayout, name: &str, limit: ByteSize) -> Result<(), DiskError> {
    layout.create()?;
    let upper = layout.upper();
    let dir = File::open(&upper).map_err(io_error("open", &upper))?;
    enforced(&dir, &upper)?;
    let project = match project_of(&dir) {
        Ok(Some(project)) if numbers(name).any(|ours| ours == project) => project,
        Ok(Some(project)) => {
            return unsupported(format!("{} belongs to project {project} of this machine already", upper.display()));
        }
        Ok(None) => {
            if !is_empty(&upper)? {
                return unsupported(format!("{} holds files that belong to no project", upper.display()));
            }
            let real = fs::canonicalize(&upper).map_err(io_error("find", &upper))?;
            if mounts()?.iter().any(|mount| mount.upper_dir().as_ref() == Some(&real)) {
                return unsupported(format!("{} is mounted already, without a project", upper.display()));
            }
            let work = layout.work();
            let begun = File::open(&work).and_then(|work| project_of(&work)).map_err(io_error("look at", &work))?;
            match begun.filter(|begun| numbers(name).any(|ours| ours == *begun)) {
                Some(begun) => begun,
                None => unused(&dir, &upper, name)?,
            }
        }
        Err(error) => return unsupported(format!("{} can't be given a project: {error}", upper.display())),
    };
    // Renames across projects are refused, so the overlay's scratch space goes along; nothing in it is worth keeping.
    let work = layout.work();
    let of_work = File::open(&work).and_then(|work| project_of(&work)).map_err(io_error("look at", &work))?;
    if of_work != Some(project) {
        fs::remove_dir_all(&work).map_err(io_error("empty", &work))?;
        fsutil::ensure_dir(&work, 0o755).map_err(io_error("create", &work))?;
        File::open(&work).and_then(|work| assign(&work, project)).map_err(io_error("limit", &work))?;
    }
    assign(&dir, project).map_err(io_error("limit", &upper))?;
    set_limit(&dir, project, limit.0).map_err(io_error("limit", &upper))
}

/// Forgets the limit of a disk that is about to be deleted. Fine where it has none.
///
/// # Errors
/// [`DiskError::Io`]: a line of the file system's table stays in use, and nothing else.
pub fn lift_project_quota(layout: &DiskLayout, name: &str) -> Result<(), DiskError> {
    let upper = layout.upper();
    let Ok(dir) = File::open(&upper) else { return Ok(()) };
    match project_of(&dir) {
        Ok(Some(project)) if numbers(name).any(|ours| ours == project) => {
            set_limit(&dir, project, 0).map_err(io_error("lift the limit of", &upper))
        }
        _ => Ok(()),
    }
}

/// Whether the file system that `path` is on can keep disks within limits.
///
/// # Errors
/// [`DiskError::Unsupported`] with the reason; [`DiskError::Io`] where it can't be looked at.
pub fn keeps_limits(path: &Path) -> Result<(), DiskError> {
    enforced(&File::open(path).map_err(io_error("open", path))?, path)
}

fn unsupported<T>(reason: String) -> Result<T, DiskError> {
    Err(DiskError::Unsupported { reason })
}

fn enforced(dir: &File, path: &Path) -> Result<(), DiskError> {
    let mut state = QuotaState { version: 1, flags: 0, rest: [0; 76] };
    // SAFETY: the kernel writes a `struct fs_quota_stat`, which `QuotaState` is as long as.
    let asked = unsafe { quota(dir, GET_STATE, 0, (&raw mut state).cast()) };
    match asked {
        Ok(()) if state.flags & ENFORCED != 0 => Ok(()),
        // ENOSYS: no quota is on, or the kernel is older than 5.14 and can't be asked.
        _ => unsupported(format!("the file system of {} has no project quota in force", path.display())),
    }
}

/// The project that `dir` belongs to and passes on; `None`: none.
fn project_of(dir: &File) -> io::Result<Option<u32>> {
    let attributes = attributes(dir)?;
    Ok((attributes.project != 0 || attributes.flags & INHERIT != 0).then_some(attributes.project))
}

fn attributes(dir: &File) -> io::Result<Attributes> {
    // SAFETY: the request writes a `struct fsxattr`, which `Attributes` is.
    Ok(unsafe { rustix::ioctl::ioctl(dir, rustix::ioctl::Getter::<GET_ATTRIBUTES, Attributes>::new()) }?)
}

fn assign(dir: &File, project: u32) -> io::Result<()> {
    let mut attributes = attributes(dir)?;
    attributes.project = project;
    attributes.flags |= INHERIT;
    // SAFETY: the request reads a `struct fsxattr`, which `Attributes` is.
    Ok(unsafe { rustix::ioctl::ioctl(dir, rustix::ioctl::Setter::<SET_ATTRIBUTES, Attributes>::new(attributes)) }?)
}

fn is_empty(dir: &Path) -> Result<bool, DiskError> {
    Ok(fs::read_dir(dir).map_err(io_error("read", dir))?.next().is_none())
}

/// The numbers that the project of `name` may have, in the order in which they are tried.
fn numbers(name: &str) -> impl Iterator<Item = u32> {
    (0..TRIES).map(move |n| {
        let mut hasher = blake3::Hasher::new_derive_key("dormouse disk project 1");
        hasher.update(&n.to_le_bytes()).update(name.as_bytes());
        let [a, b, c, d, ..] = *hasher.finalize().as_bytes();
        FIRST_ID | (u32::from_le_bytes([a, b, c, d]) & (FIRST_ID - 1))
    })
}

/// A number for `name` that nothing belongs to and that has no limit.
fn unused(dir: &File, path: &Path, name: &str) -> Result<u32, DiskError> {
    for project in numbers(name) {
        let known = limits(dir, project).map_err(io_error("ask for the limits of", path))?;
        if known.is_none_or(|known| known.dqb_curspace == 0 && known.dqb_curinodes == 0 && known.dqb_bhardlimit == 0) {
            return Ok(project);
        }
    }
    unsupported(format!("no project is free for {name} on the file system of {}", path.display()))
}

/// What the file system keeps of a project; `None`: it has never heard of it.
fn limits(dir: &File, project: u32) -> io::Result<Option<libc::dqblk>> {
    // SAFETY: a `dqblk` is nothing but numbers.
    let mut known: libc::dqblk = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a `struct if_dqblk`, which `dqblk` is.
    match unsafe { quota(dir, libc::Q_GETQUOTA, project, (&raw mut known).cast()) } {
        Ok(()) => Ok(Some(known)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// One file for so many bytes that a project may take; as a new ext4 has half of.
const BYTES_PER_FILE: u64 = 8192;
/// And so many in any case: a small disk holds many small files.
const LEAST_FILES: u64 = 65536;

/// Sets how many bytes a project may take; 0: as many as it likes.
fn set_limit(dir: &File, project: u32, bytes: u64) -> io::Result<()> {
    // SAFETY: a `dqblk` is nothing but numbers.
    let mut wanted: libc::dqblk = unsafe { std::mem::zeroed() };
    wanted.dqb_bhardlimit = bytes / BLOCK;
    // Empty files take no room, and a file system has only so many: without this one session could use them all up.
    wanted.dqb_ihardlimit = if bytes == 0 { 0 } else { (bytes / BYTES_PER_FILE).max(LEAST_FILES) };
    wanted.dqb_valid = libc::QIF_BLIMITS | libc::QIF_ILIMITS;
    // SAFETY: the kernel reads a `struct if_dqblk`, which `dqblk` is.
    unsafe { quota(dir, libc::Q_SETQUOTA, project, (&raw mut wanted).cast()) }
}

/// Asks for quotas of projects on the file system of `dir`: quotactl_fd(2), Linux 5.14.
///
/// # Safety
/// `data` points to what `command` reads or writes.
unsafe fn quota(dir: &File, command: c_int, project: u32, data: *mut libc::c_void) -> io::Result<()> {
    // `QCMD` of `linux/quota.h`; the type is an unsigned number to the kernel.
    let command = (command as u32) << 8 | PROJECT as u32;
    // SAFETY: the caller vouches for `data`; the rest are numbers.
    let answer = unsafe { libc::syscall(libc::SYS_quotactl_fd, dir.as_raw_fd(), command, project, data) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projects_are_told_apart_and_far_from_those_given_by_hand() {
        let (a, b): (Vec<u32>, Vec<u32>) = (numbers("a").collect(), numbers("b").collect());
        assert_eq!(a, numbers("a").collect::<Vec<_>>(), "found again after a restart");
        assert!(a.iter().all(|number| !b.contains(number)));
        assert!(a.iter().chain(&b).all(|number| (FIRST_ID..1 << 31).contains(number)));
    }

    #[test]
    fn a_file_system_without_quotas_says_so_and_nothing_is_changed() {
        // Memory: no project quota there, on any kernel.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let layout = DiskLayout::new(dir.path().join("disk"));
        let refused = set_project_quota(&layout, "a", ByteSize(1 << 20)).unwrap_err();
        assert!(matches!(&refused, DiskError::Unsupported { reason } if reason.contains("no project quota")), "{refused}");
        assert!(matches!(keeps_limits(dir.path()), Err(DiskError::Unsupported { .. })));
        assert!(matches!(keeps_limits(&dir.path().join("none")), Err(DiskError::Io { .. })));
        fs::write(layout.upper().join("f"), vec![0; 2 << 20]).unwrap();
        lift_project_quota(&layout, "a").unwrap();
        lift_project_quota(&DiskLayout::new(dir.path().join("none")), "a").unwrap();
    }
}
