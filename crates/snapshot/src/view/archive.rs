//! Archives of a disk's files that are safe to unpack on the computer of whoever asked for them.

use super::{DEPTH_MAX, ViewError, io_error, path_error, read_link};
use crate::inroot;
use model::{FileType, link_stays_inside};
use rustix::fs::{AtFlags, OFlags, Stat};
use std::{
    collections::HashMap,
    ffi::OsStr,
    io::{self, Read},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

/// What an archive has, and what of the disk it doesn't have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Archived {
    pub entries: u64,
    pub bytes: u64,
    /// Symlinks that lead out of the archived directory.
    pub outward_links: u64,
    /// Devices, FIFOs and sockets.
    pub special_files: u64,
}

struct Writer<W: io::Write> {
    out: tar::Builder<W>,
    /// The first name of each file that has several.
    links: HashMap<(u64, u64), PathBuf>,
    done: Archived,
}

pub(super) fn write(fd: BorrowedFd<'_>, path: &str, out: impl io::Write) -> Result<Archived, ViewError> {
    let stat = rustix::fs::fstat(fd).map_err(|e| path_error(path, e))?;
    let mut writer = Writer { out: tar::Builder::new(out), links: HashMap::new(), done: Archived::default() };
    match FileType::from_mode(stat.st_mode) {
        FileType::Dir => {
            let name = top_name(path);
            let mut header = header(tar::EntryType::Directory, &stat);
            writer.done.entries += 1;
            writer.out.append_data(&mut header, name.join(""), io::empty()).map_err(ViewError::Output)?;
            writer.directory(fd, &name, 0)?;
        }
        FileType::File => {
            writer.file(fd, &top_name(path), &stat)?;
        }
        kind => return Err(ViewError::NotRegular { path: path.to_owned(), kind }),
    }
    writer.out.into_inner().map_err(ViewError::Output)?.flush().map_err(ViewError::Output)?;
    Ok(writer.done)
}

/// What all names of an archive begin with: the name of what is archived; of the root, `.`.
fn top_name(path: &str) -> PathBuf {
    Path::new(path).file_name().unwrap_or(OsStr::new(".")).into()
}

impl<W: io::Write> Writer<W> {
    fn directory(&mut self, dir: BorrowedFd<'_>, path: &Path, depth: usize) -> Result<(), ViewError> {
        let text = |p: &Path| p.to_string_lossy().into_owned();
        if depth > DEPTH_MAX {
            return Err(ViewError::TooDeep(text(path)));
        }
        for (name, _) in inroot::names(dir).map_err(|e| io_error(&text(path), e))? {
            let here = path.join(&name);
            let error = |e| path_error(&text(&here), e);
            let stat = rustix::fs::statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(error)?;
            match FileType::from_mode(stat.st_mode) {
                FileType::Dir => {
                    let flags = OFlags::PATH | OFlags::DIRECTORY;
                    let inner = inroot::open_plain(dir, Path::new(&name), flags).map_err(error)?;
                    let mut header = header(tar::EntryType::Directory, &stat);
                    self.done.entries += 1;
                    self.out.append_data(&mut header, here.join(""), io::empty()).map_err(ViewError::Output)?;
                    self.directory(inner.as_fd(), &here, depth + 1)?;
                }
                FileType::File => {
                    let file = inroot::open_plain(dir, Path::new(&name), OFlags::PATH).map_err(error)?;
                    self.file(file.as_fd(), &here, &stat)?;
                }
                FileType::Symlink => {
                    let target = read_link(dir, &name).map_err(error)?;
                    if link_stays_inside(depth, &target) {
                        let mut header = header(tar::EntryType::Symlink, &stat);
                        self.done.entries += 1;
                        self.out.append_link(&mut header, &here, &target).map_err(ViewError::Output)?;
                    } else {
                        self.done.outward_links += 1;
                    }
                }
                _ => self.done.special_files += 1,
            }
        }
        Ok(())
    }

    fn file(&mut self, fd: BorrowedFd<'_>, path: &Path, stat: &Stat) -> Result<(), ViewError> {
        let text = || path.to_string_lossy().into_owned();
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&(stat.st_dev, stat.st_ino)) {
                let mut header = header(tar::EntryType::Link, stat);
                self.done.entries += 1;
                return self.out.append_link(&mut header, path, first).map_err(ViewError::Output);
            }
            self.links.insert((stat.st_dev, stat.st_ino), path.to_owned());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let mut header = header(tar::EntryType::Regular, stat);
        header.set_size(size);
        let mut content =
            Exactly { file: inroot::reopen_for_reading(fd).map_err(|e| io_error(&text(), e))?, left: size, error: None };
        self.done.entries += 1;
        self.done.bytes += size;
        let written = self.out.append_data(&mut header, path, &mut content);
        match content.error {
            Some(error) => Err(io_error(&text(), error)),
            None => written.map_err(ViewError::Output),
        }
    }
}

/// As many bytes of a file as its header promises: a file that is shorter by now is an error, not a broken archive.
struct Exactly {
    file: std::fs::File,
    left: u64,
    /// What went wrong on the disk, as against at the receiver.
    error: Option<io::Error>,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let result = match self.file.read(&mut buffer[..want]) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it became shorter while it was read")),
            other => other,
        };
        match result {
            Ok(n) => {
                self.left -= n as u64;
                Ok(n)
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Err(e),
            Err(e) => {
                let told = io::Error::new(e.kind(), "reading the disk failed");
                self.error = Some(e);
                Err(told)
            }
        }
    }
}

fn header(kind: tar::EntryType, stat: &Stat) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    // No set-uid, set-gid or sticky bit reaches a user's computer.
    header.set_mode(stat.st_mode & 0o777);
    header.set_uid(u64::from(stat.st_uid));
    header.set_gid(u64::from(stat.st_gid));
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header
}
