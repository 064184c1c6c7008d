//! From a tree to its stream.

use super::{ParcelError, TreeRef, blocking, format, io_error, open_dir};
use crate::{
    inroot,
    layer::{
        content::{handle_at, is_whiteout, kind, next_data, stat_at},
        dirs::{DirId, Dirs, Name, Opener, ROOT, names},
        xattr::{self, Attributes, Rule},
    },
};
use blob::{Chunking, Writer};
use rustix::{
    fs::{FileType, Mode, OFlags, Stat, fstat},
    io::Errno,
};
use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// Stores the tree `dir`, which nobody changes meanwhile: a disk layer's `tree`, a template, any directory. What a disk
/// never has, sockets and devices, comes back as a whiteout, as [layers](crate::layer) have it; FIFOs, which templates may
/// have, come back.
///
/// # Errors
/// [`ParcelError::Changed`], [`ParcelError::Io`], and what the store says.
pub async fn pack_tree(dir: &Path, writer: &Writer) -> Result<TreeRef, ParcelError> {
    let (owned, outcome) = (dir.to_owned(), Arc::new(Mutex::new(None)));
    let shared = outcome.clone();
    let reader = blocking("opening a tree", move || TreeReader::open(owned, shared)).await?;
    let written = writer.write_file(reader, Chunking::Content).await;
    let outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (written, outcome) {
        (_, Some(Err(error))) => Err(error),
        (Err(error), _) => Err(ParcelError::Store(error)),
        (Ok(stream), Some(Ok(Totals { entries, plain_bytes }))) => {
            Ok(TreeRef { digest: TreeRef::digest_of(&stream), stream, entries, plain_bytes })
        }
        (Ok(_), None) => Err(ParcelError::Store(blob::Error::Aborted("reading a tree".to_owned()))),
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    entries: u64,
    plain_bytes: u64,
}

/// How it ended, told to whoever can't see more than an I/O error or the end of the bytes.
type Outcome = Arc<Mutex<Option<Result<Totals, ParcelError>>>>;

/// Reads a tree as its stream.
struct TreeReader {
    root: PathBuf,
    dirs: Dirs,
    opener: Opener,
    attributes: Attributes,
    stack: Vec<Frame>,
    file: Option<Reading>,
    /// Files with several names, by device and inode: the number of the first.
    linked: HashMap<(u64, u64), u64>,
    /// Files, symlinks and FIFOs so far.
    count: u64,
    totals: Totals,
    /// What goes out next, and how much of it has.
    out: Vec<u8>,
    sent: usize,
    outcome: Outcome,
}

/// A directory on the way, and what is still to come of it, the next one last.
struct Frame {
    id: DirId,
    others: Vec<Name>,
    directories: Vec<Name>,
    /// A whiteout stands for something that can't be kept.
    has_substitute: bool,
}

/// A file whose bytes are going out.
struct Reading {
    at: (DirId, Name),
    handle: OwnedFd,
    stat: Stat,
    file: File,
    size: u64,
    /// All before it went out.
    offset: u64,
    /// So many bytes from there on are no hole.
    data: u64,
}

impl TreeReader {
    fn open(root: PathBuf, outcome: Outcome) -> Result<TreeReader, ParcelError> {
        let top = open_dir(&root).map_err(|e| io_error("open", &root)(e.into()))?;
        let mut reader = TreeReader {
            root,
            dirs: Dirs::new(),
            opener: Opener::new(ROOT, top),
            attributes: Attributes::new(),
            stack: Vec::new(),
            file: None,
            linked: HashMap::new(),
            count: 0,
            totals: Totals::default(),
            out: Vec::new(),
            sent: 0,
            outcome,
        };
        format::head(&mut reader.out);
        reader.enter(ROOT)?;
        Ok(reader)
    }

    /// Puts what comes next into `out`, or into `buffer`, where it returns how much that was. `None` at the end.
    fn step(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, ParcelError> {
        if let Some(mut file) = self.file.take() {
            if file.data > 0 {
                let read = self.read_file(&mut file, buffer)?;
                self.file = Some(file);
                return Ok(Some(read));
            }
            self.next_piece(file)?;
            return Ok(Some(0));
        }
        let Some(frame) = self.stack.last_mut() else { return Ok(None) };
        let id = frame.id;
        if let Some(name) = frame.others.pop() {
            self.totals.entries += 1;
            self.entry(id, name)?;
        } else if let Some(name) = frame.directories.pop() {
            self.totals.entries += 1;
            self.head(format::DIRECTORY, id, &name)?;
            let below = self.dirs.add(id, name);
            self.enter(below)?;
        } else {
            self.leave()?;
        }
        Ok(Some(0))
    }

    fn enter(&mut self, id: DirId) -> Result<(), ParcelError> {
        let nameless = OsStr::new("");
        let dir = self.opener.open(&self.dirs, id).map_err(|e| self.error("open", id, nameless, e))?;
        let mut frame = Frame { id, others: Vec::new(), directories: Vec::new(), has_substitute: false };
        let mut names = names(dir.as_fd()).map_err(|e| self.error("list", id, nameless, e))?;
        // The next one is taken from the end.
        names.sort_unstable_by(|a, b| b.cmp(a));
        for name in names {
            let stat = stat_at(dir.as_fd(), &name).map_err(|e| self.error("look at", id, &name, e))?;
            let list = if kind(&stat) == FileType::Directory { &mut frame.directories } else { &mut frame.others };
            list.push(Name::from(name));
        }
        self.stack.push(frame);
        Ok(())
    }

    fn leave(&mut self) -> Result<(), ParcelError> {
        let Some(frame) = self.stack.pop() else { return Ok(()) };
        let (id, nameless) = (frame.id, OsStr::new(""));
        let mut look = || {
            let dir = self.opener.open(&self.dirs, id)?;
            let (stat, mut extended) = (fstat(&dir)?, self.attributes.read(dir.as_fd(), xattr::of_directory)?);
            if frame.has_substitute && extended.iter().all(|(name, _)| name.as_c_str() != xattr::ORIGIN) {
                // It lets a listing leave whiteouts out where there is nothing below: see `xattr`.
                extended.push((xattr::ORIGIN.to_owned(), Vec::new()));
            }
            Ok((stat, extended))
        };
        let looked: rustix::io::Result<_> = look();
        let (stat, extended) = looked.map_err(|e| self.error("look at", id, nameless, e))?;
        self.out.push(format::END);
        format::attributes(&mut self.out, &stat, extended).ok_or_else(|| self.unwritable(id, nameless))
    }

    /// One that is no directory.
    fn entry(&mut self, dir: DirId, name: Name) -> Result<(), ParcelError> {
        let open = |opener: &mut Opener, dirs: &Dirs| {
            let handle = handle_at(opener.borrow(dirs, dir)?, &name)?;
            let stat = fstat(&handle)?;
            Ok((handle, stat))
        };
        let opened: rustix::io::Result<_> = open(&mut self.opener, &self.dirs);
        let (handle, stat) = opened.map_err(|e| self.error("open", dir, &name, e))?;
        match kind(&stat) {
            FileType::RegularFile | FileType::Symlink | FileType::Fifo if self.is_known(dir, &name, &stat)? => Ok(()),
            FileType::RegularFile => self.begin_file(dir, name, handle, stat),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&handle, "", Vec::new());
                let target = target.map_err(|e| self.error("read", dir, &name, e))?;
                self.head(format::SYMLINK, dir, &name)?;
                format::target(&mut self.out, target.as_bytes()).ok_or_else(|| self.unwritable(dir, &name))?;
                self.put_attributes((dir, &name), &handle, &stat, xattr::of_file)
            }
            FileType::Fifo => {
                self.head(format::FIFO, dir, &name)?;
                self.put_attributes((dir, &name), &handle, &stat, xattr::of_file)
            }
            FileType::Directory => Err(self.changed(dir, &name)),
            _ => {
                if let Some(frame) = self.stack.last_mut() {
                    frame.has_substitute |= !is_whiteout(&stat);
                }
                self.head(format::WHITEOUT, dir, &name)
            }
        }
    }

    /// Writes it down as one more name, where it is one. Names outside of the tree don't count, so that the stream says
    /// nothing of who else shares the file.
    fn is_known(&mut self, dir: DirId, name: &Name, stat: &Stat) -> Result<bool, ParcelError> {
        if stat.st_nlink > 1 {
            match self.linked.get(&(stat.st_dev, stat.st_ino)) {
                Some(first) => {
                    let back = self.count - first;
                    self.head(format::LINK, dir, name)?;
                    self.out.extend_from_slice(&back.to_le_bytes());
                    return Ok(true);
                }
                None => self.linked.insert((stat.st_dev, stat.st_ino), self.count),
            };
        }
        self.count += 1;
        Ok(false)
    }

    fn begin_file(&mut self, dir: DirId, name: Name, handle: OwnedFd, stat: Stat) -> Result<(), ParcelError> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOATIME | OFlags::CLOEXEC;
        let file = rustix::fs::open(inroot::handle_path(handle.as_fd()), flags, Mode::empty());
        let file = File::from(file.map_err(|e| self.error("open", dir, &name, e))?);
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.head(format::FILE, dir, &name)?;
        self.out.extend_from_slice(&size.to_le_bytes());
        self.next_piece(Reading { at: (dir, name), handle, stat, file, size, offset: 0, data: 0 })
    }

    fn next_piece(&mut self, mut file: Reading) -> Result<(), ParcelError> {
        if file.offset == file.size {
            return self.end_file(&file);
        }
        let found = next_data(&file.file, file.offset, file.size);
        let found = found.map_err(|e| io_error("read", &self.path(file.at.0, &file.at.1))(e))?;
        // Where there is no more, it ends in a hole.
        let (from, to) = found.unwrap_or((file.size, file.size));
        format::piece(&mut self.out, from - file.offset, to - from);
        (file.offset, file.data) = (from, to - from);
        self.totals.plain_bytes += file.data;
        self.file = Some(file);
        Ok(())
    }

    fn read_file(&self, file: &mut Reading, buffer: &mut [u8]) -> Result<usize, ParcelError> {
        let length = usize::try_from(file.data).unwrap_or(usize::MAX).min(buffer.len());
        let read = loop {
            match file.file.read_at(&mut buffer[..length], file.offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other.map_err(|e| io_error("read", &self.path(file.at.0, &file.at.1))(e))?,
            }
        };
        if read == 0 {
            return Err(self.changed(file.at.0, &file.at.1));
        }
        file.offset += read as u64;
        file.data -= read as u64;
        Ok(read)
    }

    fn end_file(&mut self, file: &Reading) -> Result<(), ParcelError> {
        let (dir, name) = &file.at;
        let now = fstat(&file.file).map_err(|e| self.error("look at", *dir, name, e))?;
        // Not by the change time: a link that another layer makes of it changes that, too.
        let facts = |stat: &Stat| (stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
        if facts(&now) != facts(&file.stat) {
            return Err(self.changed(*dir, name));
        }
        self.put_attributes((*dir, name), &file.handle, &file.stat, xattr::of_file)
    }

    fn put_attributes(&mut self, (dir, name): (DirId, &Name), of: &OwnedFd, stat: &Stat, rule: Rule) -> Result<(), ParcelError> {
        let extended = self.attributes.read(of.as_fd(), rule).map_err(|e| self.error("read the attributes of", dir, name, e))?;
        format::attributes(&mut self.out, stat, extended).ok_or_else(|| self.unwritable(dir, name))
    }

    fn head(&mut self, kind: u8, dir: DirId, name: &OsStr) -> Result<(), ParcelError> {
        self.out.push(kind);
        format::name(&mut self.out, name).ok_or_else(|| self.unwritable(dir, name))
    }

    fn path(&self, dir: DirId, name: &OsStr) -> PathBuf {
        self.root.join(self.dirs.path(dir, name))
    }

    fn error(&self, what: &'static str, dir: DirId, name: &OsStr, error: Errno) -> ParcelError {
        match error {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE | Errno::NODATA => self.changed(dir, name),
            other => ParcelError::Io { what, path: self.path(dir, name), source: other.into() },
        }
    }

    fn changed(&self, dir: DirId, name: &OsStr) -> ParcelError {
        ParcelError::Changed(self.path(dir, name))
    }

    /// Longer or older than anything that the format has room for, and than what the kernel allows.
    fn unwritable(&self, dir: DirId, name: &OsStr) -> ParcelError {
        ParcelError::Name(self.path(dir, name))
    }

    fn tell(&self, outcome: Result<Totals, ParcelError>) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

impl Read for TreeReader {
    /// Fills the buffer, but for the end.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            let waiting = &self.out[self.sent..];
            if !waiting.is_empty() {
                let length = waiting.len().min(buffer.len() - filled);
                buffer[filled..filled + length].copy_from_slice(&waiting[..length]);
                (self.sent, filled) = (self.sent + length, filled + length);
                continue;
            }
            self.out.clear();
            self.sent = 0;
            match self.step(&mut buffer[filled..]) {
                Ok(Some(read)) => filled += read,
                Ok(None) => {
                    self.tell(Ok(self.totals));
                    break;
                }
                Err(error) => {
                    self.tell(Err(error));
                    return Err(io::Error::other("the tree can't be read"));
                }
            }
        }
        Ok(filled)
    }
}
