//! Copies of single files: their bytes with the holes, owner, mode, attributes, times.

use super::xattr::{self, Attributes};
use crate::inroot;
use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps, Uid},
    io::Errno,
};
use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
};

/// How much is copied at once where the kernel can't do it by itself.
const BLOCK: usize = 1 << 20;
/// The most that the kernel is asked to copy at once: a signal or a kill is not to wait for more.
const STRETCH: u64 = 64 << 20;

/// What kind of file it is.
pub(crate) fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// True for a whiteout: it hides what lower layers have by that name (`Documentation/filesystems/overlayfs.rst`).
pub(crate) fn is_whiteout(stat: &Stat) -> bool {
    kind(stat) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Looks at a name, never at what a symlink means.
pub(crate) fn stat_at(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<Stat> {
    rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// A handle of exactly the file that has this name now, whatever kind it is. Nothing of it is opened.
pub(crate) fn handle_at(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Copies files, and remembers what the file system can't do.
#[derive(Debug)]
pub(super) struct Copier {
    shares_blocks: bool,
    copies_in_kernel: bool,
    attributes: Attributes,
}

impl Copier {
    pub(super) fn new() -> Copier {
        Copier { shares_blocks: true, copies_in_kernel: true, attributes: Attributes::new() }
    }

    /// Makes `name` in `target`, where nothing has that name, like the file `from`: a handle whose `stat` says that it is
    /// a regular file or a symlink. After an error nothing is left.
    pub(super) fn copy(
        &mut self,
        from: BorrowedFd<'_>,
        stat: &Stat,
        target: BorrowedFd<'_>,
        name: &OsStr,
    ) -> rustix::io::Result<()> {
        let copied = match kind(stat) {
            FileType::Symlink => self.symlink(from, stat, target, name),
            _ => self.regular(from, stat, target, name),
        };
        if copied.is_err() {
            // What can't be removed is in a place that will be removed.
            let _ = rustix::fs::unlinkat(target, name, AtFlags::empty());
        }
        copied
    }

    fn symlink(&mut self, from: BorrowedFd<'_>, stat: &Stat, target: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
        let to = rustix::fs::readlinkat(from, "", Vec::new())?;
        rustix::fs::symlinkat(to, target, name)?;
        let (uid, gid) = owner(stat);
        rustix::fs::chownat(target, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        self.attributes.copy_to_link(from, target, name, xattr::of_file)?;
        set_times(target, name, stat)
    }

    fn regular(&mut self, from: BorrowedFd<'_>, stat: &Stat, target: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
        // It is known to be a regular file, so opening it waits for nothing. Its access time is nobody's business.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOATIME | OFlags::CLOEXEC;
        let source = File::from(rustix::fs::open(inroot::handle_path(from), flags, Mode::empty())?);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = File::from(rustix::fs::openat(target, name, flags, Mode::RUSR | Mode::WUSR)?);
        self.bytes(&source, stat, &made).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        dress(made.as_fd(), stat)?;
        // It may have got access control lists from its directory.
        self.attributes.make_equal(from, made.as_fd(), xattr::of_file, &[])?;
        rustix::fs::futimens(&made, &times(stat))
    }

    /// Gives a directory the owner, mode and attributes of another, and `further` attributes. Its times come last:
    /// [`set_times`].
    pub(super) fn directory(
        &mut self,
        from: BorrowedFd<'_>,
        stat: &Stat,
        target: BorrowedFd<'_>,
        rule: xattr::Rule,
        further: &[xattr::Attribute],
    ) -> rustix::io::Result<()> {
        dress(target, stat)?;
        self.attributes.make_equal(from, target, rule, further)
    }

    fn bytes(&mut self, source: &File, stat: &Stat, made: &File) -> io::Result<()> {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size == 0 || self.share(source, made) {
            return Ok(());
        }
        let mut at = 0;
        while let Some((from, to)) = next_data(source, at, size)? {
            self.range(source, made, from, to)?;
            // At least one byte further, so that nobody who punches holes all the time can hold us.
            at = to.max(from + 1);
        }
        made.set_len(size)
    }

    /// Lets both files have the same blocks until one is written to (ioctl_ficlone(2)).
    fn share(&mut self, source: &File, made: &File) -> bool {
        if !self.shares_blocks {
            return false;
        }
        let shared = rustix::fs::ioctl_ficlone(made, source);
        // EINVAL can be about these two files alone.
        self.shares_blocks = !matches!(shared, Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::NOTTY | Errno::NOSYS));
        shared.is_ok()
    }

    /// Copies what lies between two offsets; less where the file has become shorter.
    fn range(&mut self, source: &File, made: &File, from: u64, to: u64) -> io::Result<()> {
        let mut at = from;
        while at < to && self.copies_in_kernel {
            let (mut read, mut written) = (at, at);
            let length = usize::try_from((to - at).min(STRETCH)).unwrap_or(BLOCK);
            match rustix::fs::copy_file_range(source, Some(&mut read), made, Some(&mut written), length) {
                Ok(0) => return Ok(()),
                Ok(copied) => at += copied as u64,
                Err(Errno::INTR) => {}
                Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => self.copies_in_kernel = false,
                Err(error) => return Err(error.into()),
            }
        }
        if at == to {
            return Ok(());
        }
        let mut buffer = vec![0; BLOCK.min(usize::try_from(to - at).unwrap_or(BLOCK))];
        while at < to {
            let length = buffer.len().min(usize::try_from(to - at).unwrap_or(BLOCK));
            match source.read_at(&mut buffer[..length], at) {
                Ok(0) => return Ok(()),
                Ok(read) => {
                    made.write_all_at(&buffer[..read], at)?;
                    at += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Where the next bytes that are no hole lie at or after `at` (lseek(2), `SEEK_DATA`).
pub(crate) fn next_data(file: &File, at: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    let from = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(from) if from < size => from,
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        // No such question can be put to this file system.
        Err(Errno::INVAL) => return Ok((at < size).then_some((at, size))),
        Err(error) => return Err(error.into()),
    };
    match rustix::fs::seek(file, SeekFrom::Hole(from)) {
        Ok(to) => Ok(Some((from, to.min(size)))),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn owner(stat: &Stat) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))
}

/// The mode comes after the owner: a change of owner clears the set-uid bit.
fn dress(fd: BorrowedFd<'_>, stat: &Stat) -> rustix::io::Result<()> {
    let (uid, gid) = owner(stat);
    rustix::fs::fchown(fd, uid, gid)?;
    rustix::fs::fchmod(fd, Mode::from_raw_mode(stat.st_mode & 0o7777))
}

fn times(stat: &Stat) -> Timestamps {
    let time = |tv_sec, nsec| Timespec { tv_sec, tv_nsec: i64::try_from(nsec).unwrap_or(0) };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}

/// Gives a name the times of another file.
pub(super) fn set_times(dir: BorrowedFd<'_>, name: &OsStr, stat: &Stat) -> rustix::io::Result<()> {
    rustix::fs::utimensat(dir, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)
}
