//! The file `prints` of a layer: what each file of the upper directory looked like when it was captured, and where it is
//! in the layer. The next capture of the same directory shares what still looks the same.
//!
//! Only prints that tell any later change are in it (see [`super::print`]). It is no part of the layer: where it is missing
//! or damaged, the next capture copies everything.
//!
//! ```text
//! magic, format u32
//! directories u32, each: parent u32, name      the first after the root is 1; a parent comes before its children
//! files u64, each: directory u32, name, device u64, inode u64, change time i64 + u32, size u64, mode u32
//! BLAKE3 of all before it
//! ```
//! Numbers are little-endian; a name is its length (u16) and its bytes.

use super::{
    content::stat_at,
    dirs::{DirId, Dirs, Name, Opener, ROOT},
    print::Print,
};
use crate::fsutil;
use rustix::fs::{AtFlags, Mode, OFlags};
use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::File,
    io::{self, BufWriter, Write},
    os::{fd::BorrowedFd, unix::ffi::OsStrExt},
    path::Path,
    sync::Arc,
};

const FILE: &str = "prints";
const MAGIC: &[u8; 16] = b"dormouse-prints\n";
const FORMAT: u32 = 1;
/// The longest that is read: a few million files.
const MAX_BYTES: u64 = 512 << 20;
const HASH_BYTES: usize = 32;
/// No entry of the file is shorter.
const LEAST_ENTRY: usize = 6;

/// A file of a layer and its original's print.
#[derive(Debug)]
pub(super) struct Printed {
    pub(super) dir: DirId,
    pub(super) name: Name,
    pub(super) print: Print,
}

/// Writes the prints of a layer that lies in `layer`. `dirs` has the layer's directories, from [`ROOT`], its tree.
pub(super) fn write<'a>(layer: &Path, dirs: &Dirs, files: impl ExactSizeIterator<Item = &'a Printed>) -> io::Result<()> {
    faults::file("prints.write")?;
    let file = BufWriter::with_capacity(1 << 20, File::create_new(layer.join(FILE))?);
    let mut out = Hashing { file, hasher: blake3::Hasher::new() };
    out.write_all(MAGIC)?;
    out.write_all(&FORMAT.to_le_bytes())?;
    let count = u32::try_from(dirs.len() - 1).map_err(io::Error::other)?;
    out.write_all(&count.to_le_bytes())?;
    for id in 1..=count {
        let (parent, name) = dirs.place(DirId(id));
        out.write_all(&parent.0.to_le_bytes())?;
        out.name(name)?;
    }
    out.write_all(&(files.len() as u64).to_le_bytes())?;
    for Printed { dir, name, print } in files {
        out.write_all(&dir.0.to_le_bytes())?;
        out.name(name)?;
        let (seconds, nanoseconds) = print.changed;
        for number in [print.device, print.inode, seconds as u64] {
            out.write_all(&number.to_le_bytes())?;
        }
        out.write_all(&nanoseconds.to_le_bytes())?;
        out.write_all(&print.size.to_le_bytes())?;
        out.write_all(&print.mode.to_le_bytes())?;
    }
    let Hashing { mut file, hasher } = out;
    file.write_all(hasher.finalize().as_bytes())?;
    file.flush()
}

struct Hashing<W> {
    file: W,
    hasher: blake3::Hasher,
}

impl<W: Write> Hashing<W> {
    fn name(&mut self, name: &OsStr) -> io::Result<()> {
        let length = u16::try_from(name.len()).map_err(io::Error::other)?;
        self.write_all(&length.to_le_bytes())?;
        self.write_all(name.as_bytes())
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A layer from which unchanged files are shared.
#[derive(Debug)]
pub(super) struct Previous {
    dirs: Dirs,
    opener: Opener,
    /// By device and inode.
    files: HashMap<(u64, u64), Printed>,
}

impl Previous {
    /// Reads the prints of the layer in `layer`, whose files are in `tree`.
    ///
    /// # Errors
    /// There are none, or they are damaged or of another format.
    pub(super) fn read(layer: &Path, tree: &Path) -> io::Result<Previous> {
        let bytes = fsutil::read_limited(&layer.join(FILE), MAX_BYTES)?;
        let (dirs, files) = parse(&bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the prints are damaged"))?;
        let root = rustix::fs::open(tree, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Previous { dirs, opener: Opener::new(ROOT, root), files })
    }

    /// Gives the copy of the file with this print a further name; `false` where the layer has none, or where it can't.
    /// The file has `names` names; all that share a copy may have `most`.
    pub(super) fn share(&mut self, print: &Print, names: u64, most: u64, target: BorrowedFd<'_>, name: &OsStr) -> bool {
        let Some(file) = self.files.get(&(print.device, print.inode)).filter(|file| file.print == *print) else { return false };
        let Ok(dir) = self.opener.borrow(&self.dirs, file.dir) else { return false };
        // Of a file with several names either all are shared or none.
        let has_room = || stat_at(dir, &file.name).is_ok_and(|stat| stat.st_nlink + names <= most);
        (names == 1 || has_room()) && rustix::fs::linkat(dir, file.name.as_ref(), target, name, AtFlags::empty()).is_ok()
    }
}

type Files = HashMap<(u64, u64), Printed>;

/// `None` for anything but what [`write`] writes.
fn parse(bytes: &[u8]) -> Option<(Dirs, Files)> {
    let (body, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH_BYTES)?)?;
    if blake3::hash(body).as_bytes() != hash {
        return None;
    }
    let mut reader = Reader(body);
    if reader.bytes(MAGIC.len())? != MAGIC || reader.u32()? != FORMAT {
        return None;
    }
    let mut dirs = Dirs::new();
    for id in 1..=reader.u32()? {
        let parent = reader.u32().filter(|parent| *parent < id)?;
        dirs.add(DirId(parent), reader.name()?);
    }
    let count = usize::try_from(reader.u64()?).ok().filter(|count| *count <= reader.0.len() / LEAST_ENTRY)?;
    let mut files = HashMap::with_capacity(count);
    for _ in 0..count {
        let dir = DirId(reader.u32().filter(|dir| (*dir as usize) < dirs.len())?);
        let name = reader.name()?;
        let (device, inode) = (reader.u64()?, reader.u64()?);
        let changed = (reader.u64()? as i64, reader.u32()?);
        let print = Print { device, inode, changed, size: reader.u64()?, mode: reader.u32()? };
        files.insert((device, inode), Printed { dir, name, print });
    }
    reader.0.is_empty().then_some((dirs, files))
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, left) = self.0.split_at_checked(length)?;
        self.0 = left;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.bytes(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    /// A name of one component: anything else would lead out of its directory.
    fn name(&mut self) -> Option<Name> {
        let length = self.bytes(2)?.try_into().ok().map(u16::from_le_bytes)?;
        let name = self.bytes(usize::from(length))?;
        let plain = !matches!(name, b"" | b"." | b"..") && !name.iter().any(|b| matches!(b, b'/' | 0));
        plain.then(|| Arc::from(OsStr::from_bytes(name)))
    }
}
