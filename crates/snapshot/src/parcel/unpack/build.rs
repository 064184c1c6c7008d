//! Builds a tree as its stream comes in, on a thread that blocks.

use crate::{
    inroot,
    layer::{
        dirs::{DirId, Dirs, Name, Opener, ROOT},
        xattr::{self, Kept, Rule},
    },
    parcel::{feed::Source, format},
};
use rustix::{
    fs::{
        AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags, linkat, mkdirat, mknodat,
        openat,
    },
    io::Errno,
};
use std::{
    ffi::{CString, OsStr, OsString},
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            ffi::{OsStrExt, OsStringExt},
            fs::FileExt,
        },
    },
    path::{Path, PathBuf},
};

/// What a tree was said to have: a stream that has more is refused before it has filled the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Limits {
    pub(super) entries: u64,
    pub(super) plain_bytes: u64,
}

/// Why a tree can't be built.
#[derive(Debug)]
pub(super) enum Fault {
    /// There are no more bytes.
    Ended,
    Malformed(&'static str),
    Newer(u32),
    Io(&'static str, Errno),
}

/// Where the builder stands.
#[derive(Debug)]
pub(super) struct Spot {
    pub(super) path: PathBuf,
    /// False where the path is that of the entry before.
    pub(super) is_named: bool,
    /// In the file.
    pub(super) offset: u64,
    pub(super) stream_offset: u64,
}

type Done<T = ()> = Result<T, Fault>;

const NUL: &str = "it has a NUL in a name";

pub(super) struct Builder {
    source: Source,
    limits: Limits,
    seen: Limits,
    dirs: Dirs,
    opener: Opener,
    stack: Vec<DirId>,
    linkable: Linkable,
    /// The whiteout that others are links of, as in the kernel's own overlays.
    whiteout: Option<OwnedFd>,
    /// The latest entry, and whether it is the one that is being built.
    place: (DirId, OsString),
    is_named: bool,
    offset: u64,
}

/// Files, symlinks and FIFOs by their number.
#[derive(Debug, Default)]
struct Linkable {
    names: Vec<u8>,
    list: Vec<(DirId, usize)>,
}

impl Linkable {
    fn push(&mut self, dir: DirId, name: &OsStr) {
        self.list.push((dir, self.names.len()));
        self.names.extend_from_slice(name.as_bytes());
    }

    /// The `back`-th last.
    fn get(&self, back: u64) -> Option<(DirId, &OsStr)> {
        let number = self.list.len().checked_sub(usize::try_from(back).ok().filter(|back| *back > 0)?)?;
        let (dir, from) = *self.list.get(number)?;
        let till = self.list.get(number + 1).map_or(self.names.len(), |(_, next)| *next);
        Some((dir, OsStr::from_bytes(&self.names[from..till])))
    }
}

/// What all entries but links and whiteouts have.
struct Plain {
    mode: Mode,
    owner: (Option<Uid>, Option<Gid>),
    times: Timestamps,
    extended: u16,
}

impl Builder {
    /// `root` is empty.
    pub(super) fn new(root: OwnedFd, source: Source, limits: Limits) -> Builder {
        Builder {
            source,
            limits,
            seen: Limits::default(),
            dirs: Dirs::new(),
            opener: Opener::new(ROOT, root),
            stack: vec![ROOT],
            linkable: Linkable::default(),
            whiteout: None,
            place: (ROOT, OsString::new()),
            is_named: false,
            offset: 0,
        }
    }

    pub(super) fn spot(&self) -> Spot {
        let (dir, name) = &self.place;
        let (path, stream_offset) = (self.dirs.path(*dir, name), self.source.taken);
        Spot { path, is_named: self.is_named, offset: self.offset, stream_offset }
    }

    /// Builds the whole tree, which has to be all that the stream has.
    pub(super) fn build(&mut self) -> Done {
        let (magic, version) = (self.array::<16>()?, u32::from_le_bytes(self.array()?));
        match version {
            _ if magic != *format::MAGIC => return Err(Fault::Malformed("it doesn't begin as one")),
            0 => return Err(Fault::Malformed("it has format 0")),
            version if version > format::FORMAT => return Err(Fault::Newer(version)),
            _ => {}
        }
        while let Some(&dir) = self.stack.last() {
            (self.is_named, self.offset) = (false, 0);
            match self.array()? {
                [format::END] => self.end(dir)?,
                [kind] => self.entry(kind, dir)?,
            }
        }
        match self.source.is_at_end() {
            false => Err(Fault::Malformed("something comes after its end")),
            true if self.seen != self.limits => Err(Fault::Malformed("it has less than it should")),
            true => Ok(()),
        }
    }

    fn entry(&mut self, kind: u8, dir: DirId) -> Done {
        let name = self.name()?;
        self.place = (dir, name.clone());
        self.is_named = true;
        self.seen.entries += 1;
        if self.seen.entries > self.limits.entries {
            return Err(Fault::Malformed("it has more entries than it should"));
        }
        match kind {
            format::DIRECTORY => self.directory(dir, &name),
            format::FILE => self.file(dir, &name),
            format::SYMLINK => self.symlink(dir, &name),
            format::FIFO => self.fifo(dir, &name),
            format::WHITEOUT => self.whiteout(dir, &name),
            format::LINK => self.link(dir, &name),
            _ => Err(Fault::Malformed("it has an entry of an unknown kind")),
        }
    }

    fn directory(&mut self, dir: DirId, name: &OsStr) -> Done {
        mkdirat(self.dir(dir)?, name, Mode::RWXU).map_err(made("create"))?;
        let id = self.dirs.add(dir, Name::from(name));
        self.stack.push(id);
        Ok(())
    }

    /// The directory is full: now it gets what it had.
    fn end(&mut self, id: DirId) -> Done {
        self.place = match id {
            ROOT => (ROOT, OsString::new()),
            _ => (self.dirs.place(id).0, self.dirs.place(id).1.as_ref().to_owned()),
        };
        self.is_named = true;
        let plain = self.plain()?;
        let opened = self.opener.open(&self.dirs, id).map_err(|e| Fault::Io("open", e))?;
        self.dress(opened.as_fd(), &plain)?;
        self.extended(&inroot::handle_path(opened.as_fd()).join("."), &plain, xattr::of_directory)?;
        rustix::fs::futimens(&opened, &plain.times).map_err(|e| Fault::Io("set the times of", e))?;
        self.stack.pop();
        Ok(())
    }

    fn file(&mut self, dir: DirId, name: &OsStr) -> Done {
        let size = u64::from_le_bytes(self.array()?);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(self.dir(dir)?, name, flags, Mode::RUSR | Mode::WUSR).map_err(made("create"))?;
        let file = File::from(file);
        let mut ends_in_hole = false;
        while self.offset < size {
            ends_in_hole = self.piece(&file, size)?;
        }
        if ends_in_hole {
            rustix::fs::ftruncate(&file, size).map_err(|e| Fault::Io("set the size of", e))?;
        }
        let plain = self.plain()?;
        self.dress(file.as_fd(), &plain)?;
        let path = inroot::handle_path(self.dir(dir)?).join(name);
        self.extended(&path, &plain, xattr::of_file)?;
        rustix::fs::futimens(&file, &plain.times).map_err(|e| Fault::Io("set the times of", e))?;
        self.linkable.push(dir, name);
        Ok(())
    }

    /// True where it is a hole only, which has to be the last one.
    fn piece(&mut self, file: &File, size: u64) -> Done<bool> {
        let (hole, mut data) = (u64::from_le_bytes(self.array()?), u64::from_le_bytes(self.array()?));
        let left = size - self.offset;
        // A piece without bytes is the hole at the end.
        if hole > left || data > left - hole || (data == 0 && hole < left) {
            return Err(Fault::Malformed("a file has other bytes than its size tells"));
        }
        self.seen.plain_bytes = self.seen.plain_bytes.saturating_add(data);
        if self.seen.plain_bytes > self.limits.plain_bytes {
            return Err(Fault::Malformed("it has more bytes than it should"));
        }
        self.offset += hole;
        let is_hole = data == 0;
        while data > 0 {
            let some = self.source.some(data).ok_or(Fault::Ended)?;
            let written = file.write_all_at(some, self.offset);
            written.map_err(|e| Fault::Io("write", Errno::from_io_error(&e).unwrap_or(Errno::IO)))?;
            self.offset += some.len() as u64;
            data -= some.len() as u64;
        }
        Ok(is_hole)
    }

    fn symlink(&mut self, dir: DirId, name: &OsStr) -> Done {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        if !(1..=format::TARGET_MAX).contains(&length) {
            return Err(Fault::Malformed("a symlink's target has an impossible length"));
        }
        let target = self.text(length)?;
        let plain = self.plain()?;
        let at = self.dir(dir)?;
        rustix::fs::symlinkat(OsStr::from_bytes(&target), at, name).map_err(made("create"))?;
        let (uid, gid) = plain.owner;
        rustix::fs::chownat(at, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| Fault::Io("set the owner of", e))?;
        self.finish(dir, name, &plain)
    }

    fn fifo(&mut self, dir: DirId, name: &OsStr) -> Done {
        let plain = self.plain()?;
        let at = self.dir(dir)?;
        mknodat(at, name, FileType::Fifo, Mode::RUSR, 0).map_err(made("create"))?;
        let (uid, gid) = plain.owner;
        rustix::fs::chownat(at, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| Fault::Io("set the owner of", e))?;
        rustix::fs::chmodat(at, name, plain.mode, AtFlags::empty()).map_err(|e| Fault::Io("set the mode of", e))?;
        self.finish(dir, name, &plain)
    }

    /// What is to be done with something that nothing opens.
    fn finish(&mut self, dir: DirId, name: &OsStr, plain: &Plain) -> Done {
        let path = inroot::handle_path(self.dir(dir)?).join(name);
        self.extended(&path, plain, xattr::of_file)?;
        let times = rustix::fs::utimensat(self.dir(dir)?, name, &plain.times, AtFlags::SYMLINK_NOFOLLOW);
        times.map_err(|e| Fault::Io("set the times of", e))?;
        self.linkable.push(dir, name);
        Ok(())
    }

    fn whiteout(&mut self, dir: DirId, name: &OsStr) -> Done {
        let first = self.whiteout.as_ref().map(|first| inroot::handle_path(first.as_fd()));
        let at = self.dir(dir)?;
        if let Some(first) = first {
            match linkat(CWD, &first, at, name, AtFlags::SYMLINK_FOLLOW) {
                // A file has no more than so many names.
                Err(Errno::MLINK) => {}
                other => return other.map_err(made("create")),
            }
        }
        mknodat(at, name, FileType::CharacterDevice, Mode::empty(), 0).map_err(made("create"))?;
        let handle = crate::layer::content::handle_at(at, name).map_err(|e| Fault::Io("open", e))?;
        self.whiteout = Some(handle);
        Ok(())
    }

    fn link(&mut self, dir: DirId, name: &OsStr) -> Done {
        let back = u64::from_le_bytes(self.array()?);
        let (from, old) = self.linkable.get(back).ok_or(Fault::Malformed("a link is to a file that didn't come before it"))?;
        let from = self.opener.open(&self.dirs, from).map_err(|e| Fault::Io("open", e))?;
        let old = old.to_owned();
        linkat(&from, &old, self.dir(dir)?, name, AtFlags::empty()).map_err(made("link"))
    }

    fn dress(&self, fd: BorrowedFd<'_>, plain: &Plain) -> Done {
        let (uid, gid) = plain.owner;
        rustix::fs::fchown(fd, uid, gid).map_err(|e| Fault::Io("set the owner of", e))?;
        // After the owner: a change of owner clears the set-uid bit.
        rustix::fs::fchmod(fd, plain.mode).map_err(|e| Fault::Io("set the mode of", e))
    }

    /// Reads the extended attributes, and sets each at once.
    fn extended(&mut self, path: &Path, plain: &Plain, rule: Rule) -> Done {
        for _ in 0..plain.extended {
            let [length] = self.array()?;
            let name = self.text(usize::from(length))?;
            let length = u32::from_le_bytes(self.array()?) as usize;
            match rule(&name) {
                Kept::Whole if length <= format::VALUE_MAX => {}
                Kept::Empty if length == 0 => {}
                Kept::Whole => return Err(Fault::Malformed("an attribute is too long")),
                Kept::Empty | Kept::Not => return Err(Fault::Malformed("it has an attribute that copies don't keep")),
            }
            let mut value = Vec::with_capacity(length);
            self.source.append(&mut value, length).ok_or(Fault::Ended)?;
            let name = CString::new(name).map_err(|_| Fault::Malformed(NUL))?;
            let set = rustix::fs::lsetxattr(path, &name, &value, XattrFlags::empty());
            set.map_err(|e| Fault::Io("set an attribute of", e))?;
        }
        Ok(())
    }

    fn plain(&mut self) -> Done<Plain> {
        let [mode, uid, gid] = [self.number()?, self.number()?, self.number()?];
        let (seconds, nanoseconds) = (i64::from_le_bytes(self.array()?), self.number()?);
        let extended = u16::from_le_bytes(self.array()?);
        if mode > 0o7777 || uid == u32::MAX || gid == u32::MAX || nanoseconds >= 1_000_000_000 {
            return Err(Fault::Malformed("it has an impossible mode, owner or time"));
        }
        if usize::from(extended) > format::ATTRIBUTES_MAX {
            return Err(Fault::Malformed("it has too many attributes"));
        }
        let modified = Timespec { tv_sec: seconds, tv_nsec: i64::from(nanoseconds) };
        Ok(Plain {
            mode: Mode::from_raw_mode(mode),
            owner: (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))),
            times: Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification: modified },
            extended,
        })
    }

    fn number(&mut self) -> Done<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn array<const N: usize>(&mut self) -> Done<[u8; N]> {
        self.source.array().ok_or(Fault::Ended)
    }

    /// A name of one component: anything else would lead out of its directory.
    fn name(&mut self) -> Done<OsString> {
        let [length] = self.array()?;
        let name = self.text(usize::from(length))?;
        if matches!(name.as_slice(), b"" | b"." | b"..") || name.contains(&b'/') {
            return Err(Fault::Malformed("it has a name that is none"));
        }
        Ok(OsString::from_vec(name))
    }

    /// The caller has checked the length.
    fn text(&mut self, length: usize) -> Done<Vec<u8>> {
        let mut text = Vec::with_capacity(length);
        self.source.append(&mut text, length).ok_or(Fault::Ended)?;
        if text.contains(&0) { Err(Fault::Malformed(NUL)) } else { Ok(text) }
    }

    fn dir(&mut self, dir: DirId) -> Done<BorrowedFd<'_>> {
        self.opener.borrow(&self.dirs, dir).map_err(|e| Fault::Io("open", e))
    }
}

/// The error of making an entry.
fn made(what: &'static str) -> impl FnOnce(Errno) -> Fault {
    move |error| match error {
        Errno::EXIST => Fault::Malformed("it has two entries of one name"),
        other => Fault::Io(what, other),
    }
}
