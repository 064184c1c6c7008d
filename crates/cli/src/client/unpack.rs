//! Unpacks an archive from a session onto the user's computer.
//!
//! The archive is hostile. Nothing is written outside the target: names are plain, no name leads through a link, links
//! lead to inside only, and neither devices nor setuid bits come out. What is left out is said.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read},
    os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink},
    path::{Component, Path, PathBuf},
    time::{Duration, SystemTime},
};
use tar::{Archive, Entry, EntryType};

/// Why an archive could not be unpacked.
#[derive(Debug)]
pub struct UnpackError(pub String);

/// What came out of an archive.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    pub files: u64,
    /// What was left out, and why.
    pub left_out: Vec<String>,
}

/// Unpacks `archive`, whose names all begin with the same component: that component becomes `target`, which is made.
///
/// # Errors
/// The archive breaks off or is none; the target can't be written.
pub fn unpack(archive: impl Read, target: &Path) -> Result<Unpacked, UnpackError> {
    let mut done = Unpacked::default();
    let mut modes: Vec<(PathBuf, u32)> = Vec::new();
    make_dir(target).map_err(|e| at(target, &e))?;
    let mut archive = Archive::new(archive);
    let entries = archive.entries().map_err(|e| UnpackError(format!("the archive can't be read: {e}")))?;
    for entry in entries {
        let mut entry = entry.map_err(|e| UnpackError(format!("the archive broke off: {e}")))?;
        let name = entry.path().map_err(|e| UnpackError(format!("the archive has a name that is none: {e}")))?.into_owned();
        let parts = match plain(&name) {
            Ok(parts) => parts,
            Err(why) => {
                done.left_out.push(format!("{}: {why}", name.display()));
                continue;
            }
        };
        // Of the root the first component is `.`, which is no part.
        let first = usize::from(!name.starts_with("."));
        let inner = parts.get(first..).unwrap_or_default();
        let mode = entry.header().mode().unwrap_or(0o644) & 0o777;
        if inner.is_empty() {
            if entry.header().entry_type() == EntryType::Directory {
                modes.push((target.to_owned(), mode));
            }
            continue;
        }
        match place(&mut entry, target, inner, mode) {
            Ok(()) if entry.header().entry_type() == EntryType::Directory => modes.push((join(target, inner), mode)),
            Ok(()) => done.files += 1,
            Err(Trouble::LeftOut(why)) => done.left_out.push(format!("{}: {why}", name.display())),
            Err(Trouble::Failed(error)) => return Err(at(&join(target, inner), &error)),
        }
    }
    // Last, and the deepest first: a directory that its owner may not write takes no files.
    for (path, mode) in modes.iter().rev() {
        fs::set_permissions(path, fs::Permissions::from_mode(mode | 0o700)).map_err(|e| at(path, &e))?;
    }
    Ok(done)
}

fn at(path: &Path, error: &io::Error) -> UnpackError {
    UnpackError(format!("can't write {}: {error}", path.display()))
}

enum Trouble {
    LeftOut(String),
    Failed(io::Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Trouble {
        Trouble::Failed(error)
    }
}

fn left_out(why: &str) -> Trouble {
    Trouble::LeftOut(why.to_owned())
}

/// The components of a name that leads nowhere but down.
fn plain(name: &Path) -> Result<Vec<OsString>, &'static str> {
    let mut parts = Vec::new();
    for component in name.components() {
        match component {
            Component::Normal(part) => parts.push(part.to_owned()),
            Component::CurDir => {}
            Component::ParentDir => return Err("its name has '..'"),
            Component::RootDir | Component::Prefix(_) => return Err("its name is absolute"),
        }
    }
    Ok(parts)
}

fn join(root: &Path, parts: &[OsString]) -> PathBuf {
    parts.iter().fold(root.to_owned(), |path, part| path.join(part))
}

/// Makes the directory; one that is there stays.
fn make_dir(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && fs::metadata(path)?.is_dir() => Ok(()),
        done => done,
    }
}

/// Makes the directories above an entry. None of them may be a link: it could lead anywhere.
fn make_parents(root: &Path, parents: &[OsString]) -> Result<PathBuf, Trouble> {
    let mut path = root.to_owned();
    for part in parents {
        path.push(part);
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Err(left_out("what is above it is a link or a file")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => fs::create_dir(&path)?,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(path)
}

fn place(entry: &mut Entry<impl Read>, root: &Path, parts: &[OsString], mode: u32) -> Result<(), Trouble> {
    let Some((name, parents)) = parts.split_last() else { return Ok(()) };
    let kind = entry.header().entry_type();
    match kind {
        EntryType::Directory => {
            let path = make_parents(root, parents)?.join(name);
            match fs::symlink_metadata(&path) {
                Ok(meta) if meta.is_dir() => Ok(()),
                Ok(_) => Err(left_out("something that is no directory is there")),
                Err(_) => Ok(fs::create_dir(&path)?),
            }
        }
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            let path = make_parents(root, parents)?.join(name);
            clear(&path)?;
            write_file(entry, &path, mode)
        }
        EntryType::Symlink => {
            let target = entry.link_name()?.ok_or_else(|| left_out("a link to nothing"))?.into_owned();
            inward(&target, parents.len()).map_err(left_out)?;
            let path = make_parents(root, parents)?.join(name);
            clear(&path)?;
            Ok(symlink(target, path)?)
        }
        EntryType::Link => {
            let target = entry.link_name()?.ok_or_else(|| left_out("a link to nothing"))?.into_owned();
            let source = plain(&target).map_err(|_| left_out("it is linked to something outside"))?;
            let inner =
                source.get(1..).filter(|inner| !inner.is_empty()).ok_or_else(|| left_out("it is linked to a directory"))?;
            let (last, above) = inner.split_last().ok_or_else(|| left_out("it is linked to a directory"))?;
            let from = make_parents(root, above)?.join(last);
            match fs::symlink_metadata(&from) {
                Ok(meta) if meta.is_file() => {}
                _ => return Err(left_out("what it is linked to didn't come out")),
            }
            let path = make_parents(root, parents)?.join(name);
            if path == from {
                return Ok(());
            }
            clear(&path)?;
            Ok(fs::hard_link(from, path)?)
        }
        EntryType::Fifo | EntryType::Char | EntryType::Block => Err(left_out("it is a device or a pipe")),
        _ => Err(left_out("it is of a kind that isn't known")),
    }
}

/// Removes a file or link that is there, so that nothing is written through it. A directory stays and is an error.
fn clear(path: &Path) -> Result<(), Trouble> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => Err(left_out("a directory is there")),
        Ok(_) => Ok(fs::remove_file(path)?),
        Err(_) => Ok(()),
    }
}

fn write_file(entry: &mut Entry<impl Read>, path: &Path, mode: u32) -> Result<(), Trouble> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    io::copy(entry, &mut file)?;
    if let Ok(seconds) = entry.header().mtime() {
        let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
        // A time that the file system can't keep is no reason to lose the file.
        let _ = at.map(|at| file.set_modified(at));
    }
    Ok(())
}

/// Whether a link in a directory `depth` below the root stays inside. `..` is allowed at its beginning only: directories
/// above an entry are real ones, while what comes after a name could be a link itself.
fn inward(target: &Path, depth: usize) -> Result<(), &'static str> {
    let mut up = 0;
    let mut down = false;
    for component in target.components() {
        match component {
            Component::ParentDir if down => return Err("its link has '..' after a name"),
            Component::ParentDir => up += 1,
            Component::Normal(_) => down = true,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return Err("its link is absolute"),
        }
    }
    if up > depth { Err("its link leads outside") } else { Ok(()) }
}

/// The last component of a path in a session, for its name here.
pub fn last_name(path: &str) -> Option<&OsStr> {
    Path::new(path).file_name()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tar::{Builder, Header};

    enum Item<'a> {
        File(&'a str, u32, &'a str),
        Dir(&'a str, u32),
        Symlink(&'a str, &'a str),
        Hard(&'a str, &'a str),
        Fifo(&'a str),
    }

    /// Writes names as they are: the builder itself would refuse the hostile ones.
    fn header(name: &str, kind: EntryType, mode: u32, size: u64) -> Header {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size);
        header.set_mtime(1_000_000);
        header
    }

    fn link(name: &str, kind: EntryType, target: &str) -> Header {
        let mut header = header(name, kind, 0o777, 0);
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        header
    }

    fn archive(items: &[Item]) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        for item in items {
            match item {
                Item::File(name, mode, text) => {
                    let mut header = header(name, EntryType::Regular, *mode, text.len() as u64);
                    header.set_cksum();
                    builder.append(&header, text.as_bytes()).unwrap();
                }
                Item::Dir(name, mode) => {
                    let mut header = header(name, EntryType::Directory, *mode, 0);
                    header.set_cksum();
                    builder.append(&header, io::empty()).unwrap();
                }
                Item::Symlink(name, target) => builder.append(&link(name, EntryType::Symlink, target), io::empty()).unwrap(),
                Item::Hard(name, target) => builder.append(&link(name, EntryType::Link, target), io::empty()).unwrap(),
                Item::Fifo(name) => {
                    let mut header = header(name, EntryType::Fifo, 0o644, 0);
                    header.set_cksum();
                    builder.append(&header, io::empty()).unwrap();
                }
            }
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn a_tree_comes_out_as_it_is() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("here");
        let bytes = archive(&[
            Item::Dir("src", 0o755),
            Item::Dir("src/a", 0o500),
            Item::File("src/a/run", 0o4755, "x"),
            Item::File("src/b/c/deep", 0o600, "y"),
            Item::Symlink("src/b/c/up", "../../a/run"),
            Item::Symlink("src/l", "a"),
            Item::Hard("src/hard", "src/a/run"),
        ]);
        let done = unpack(&bytes[..], &target).unwrap();
        assert_eq!(done, Unpacked { files: 5, left_out: vec![] });
        assert_eq!(fs::read_to_string(target.join("b/c/up")).unwrap(), "x");
        assert_eq!(fs::read_to_string(target.join("hard")).unwrap(), "x");
        let mode = |name: &str| fs::metadata(target.join(name)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("a/run") & 0o7000, mode("b/c/deep")), (0, 0o600), "setuid doesn't come out");
        assert_eq!(mode("a"), 0o700, "the user can delete what came out");
    }

    #[test]
    fn nothing_is_written_outside() {
        let home = tempfile::tempdir().unwrap();
        let outside = home.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "old").unwrap();
        let target = home.path().join("here");
        fs::create_dir(&target).unwrap();
        symlink(&outside, target.join("old_link")).unwrap();
        let hostile = [
            Item::File("../outside/kept", 0o644, "new"),
            Item::File("src/../../outside/kept", 0o644, "new"),
            Item::File("/tmp/dormouse-unpack-test", 0o644, "new"),
            Item::Symlink("src/abs", "/etc"),
            Item::Symlink("src/out", "../outside"),
            Item::Symlink("src/d/out", "../../outside"),
            Item::Symlink("src/tricky", "x/../../outside"),
            Item::File("src/old_link/kept", 0o644, "new"),
            Item::Hard("src/hard", "src/old_link/kept"),
            Item::Hard("src/hard2", "../outside/kept"),
            Item::Fifo("src/pipe"),
        ];
        let count = hostile.len();
        let done = unpack(&archive(&hostile)[..], &target).unwrap();
        assert_eq!((done.files, done.left_out.len()), (0, count), "{:?}", done.left_out);
        assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "old");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        assert!(!Path::new("/tmp/dormouse-unpack-test").exists());
    }

    #[test]
    fn links_made_by_the_archive_are_not_written_through() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("here");
        let bytes = archive(&[
            Item::Dir("src/real", 0o755),
            Item::Symlink("src/way", "real"),
            Item::File("src/way/x", 0o644, "through"),
            Item::File("src/f", 0o644, "old"),
            Item::Symlink("src/g", "f"),
            Item::File("src/g", 0o644, "new"),
        ]);
        let done = unpack(&bytes[..], &target).unwrap();
        assert_eq!(done.left_out.len(), 1);
        assert!(!target.join("real/x").exists());
        assert_eq!(fs::read_to_string(target.join("f")).unwrap(), "old");
        assert_eq!(fs::read_to_string(target.join("g")).unwrap(), "new");
    }

    #[test]
    fn an_archive_that_breaks_off_is_an_error() {
        let home = tempfile::tempdir().unwrap();
        let bytes = archive(&[Item::File("src/f", 0o644, &"x".repeat(2000))]);
        assert!(unpack(&bytes[..1000], &home.path().join("here")).is_err());
    }
}
