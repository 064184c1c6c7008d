//! The directories of a tree by number, and how they are opened however deep they lie.
//!
//! A program can nest directories deeper than any path is long, and deeper than a process may hold descriptors. So a
//! directory is known by its parent and its name, and is opened by walking from the root, or from the nearest ancestor
//! that was kept open on the way, in paths that the kernel takes. No symlink is ever followed.

use crate::inroot;
use rustix::fs::{OFlags, RawDir};
use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    path::PathBuf,
    sync::Arc,
};

/// A name in a directory, shared by all that remember it.
pub(crate) type Name = Arc<OsStr>;

/// A directory of [`Dirs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DirId(pub(crate) u32);

/// The directory that all others lie in.
pub(crate) const ROOT: DirId = DirId(0);

/// One directory in this many levels is kept open: a bound for the length of a walk.
const ANCHOR_EVERY: u32 = 512;
/// So many are kept open at once: a tree can have any number of directories at one depth.
const ANCHORS_MAX: usize = 64;
/// The kernel takes paths of 4096 bytes with their NUL (path_resolution(7)).
const PATH_MAX: usize = 4095;

#[derive(Debug)]
struct Dir {
    parent: DirId,
    name: Name,
    depth: u32,
}

/// Directories by number; a parent's number is always less than its child's.
#[derive(Debug)]
pub(crate) struct Dirs {
    list: Vec<Dir>,
}

impl Dirs {
    /// Only the root.
    pub(crate) fn new() -> Dirs {
        Dirs { list: vec![Dir { parent: ROOT, name: Arc::from(OsStr::new("")), depth: 0 }] }
    }

    pub(crate) fn add(&mut self, parent: DirId, name: Name) -> DirId {
        let id = DirId(u32::try_from(self.list.len()).expect("a tree of 4 billion directories fits into no memory"));
        self.list.push(Dir { parent, name, depth: self.depth(parent) + 1 });
        id
    }

    /// A directory was renamed. Those below it keep the depth that they had, which only spreads the anchors.
    pub(crate) fn moved(&mut self, id: DirId, parent: DirId, name: Name) {
        let dir = &mut self.list[id.0 as usize];
        (dir.parent, dir.name) = (parent, name);
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// A directory's parent and its name there; the root's parent is the root.
    pub(crate) fn place(&self, id: DirId) -> (DirId, &Name) {
        let dir = &self.list[id.0 as usize];
        (dir.parent, &dir.name)
    }

    fn depth(&self, id: DirId) -> u32 {
        self.list[id.0 as usize].depth
    }

    /// For messages: the path of `name` in a directory, cut where it is very long.
    pub(crate) fn path(&self, id: DirId, name: &OsStr) -> PathBuf {
        const SHOWN: usize = 40;
        let mut names = vec![name];
        let mut at = id;
        while at != ROOT && names.len() < SHOWN {
            let (parent, name) = self.place(at);
            names.push(name);
            at = parent;
        }
        if at != ROOT {
            names.push(OsStr::new("…"));
        }
        names.iter().rev().collect()
    }
}

/// Opens the directories of one tree.
#[derive(Debug)]
pub(crate) struct Opener {
    /// What the descriptor `root` is.
    top: DirId,
    root: OwnedFd,
    anchors: HashMap<DirId, OwnedFd>,
    /// The one that [`Opener::borrow`] opened last.
    last: Option<(DirId, OwnedFd)>,
}

impl Opener {
    /// `root` is the directory that `top` means.
    pub(crate) fn new(top: DirId, root: OwnedFd) -> Opener {
        Opener { top, root, anchors: HashMap::new(), last: None }
    }

    pub(crate) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Opens a directory so that it can be listed.
    pub(crate) fn open(&mut self, dirs: &Dirs, id: DirId) -> rustix::io::Result<OwnedFd> {
        let mut names = Vec::new();
        let mut at = id;
        let start = loop {
            if at == self.top {
                break self.root.as_fd();
            }
            if let Some(anchor) = self.anchors.get(&at) {
                break anchor.as_fd();
            }
            let (parent, name) = dirs.place(at);
            names.push(name);
            at = parent;
        };
        let opened = walk(start, &names)?;
        if id != self.top && dirs.depth(id).is_multiple_of(ANCHOR_EVERY) && !self.anchors.contains_key(&id) {
            if self.anchors.len() == ANCHORS_MAX {
                self.anchors.clear();
            }
            self.anchors.insert(id, rustix::io::fcntl_dupfd_cloexec(&opened, 0)?);
        }
        Ok(opened)
    }

    /// The same for somebody who will soon ask for the same one again.
    pub(crate) fn borrow(&mut self, dirs: &Dirs, id: DirId) -> rustix::io::Result<BorrowedFd<'_>> {
        if self.last.as_ref().is_none_or(|(last, _)| *last != id) {
            self.last = Some((id, self.open(dirs, id)?));
        }
        let (_, opened) = self.last.as_ref().expect("it was set above");
        Ok(opened.as_fd())
    }
}

/// Opens the directory that lies below `start` by `names`, the innermost first.
fn walk(start: BorrowedFd<'_>, names: &[&Name]) -> rustix::io::Result<OwnedFd> {
    let mut left = names.iter().rev().peekable();
    let mut on_the_way: Option<OwnedFd> = None;
    loop {
        let mut path = PathBuf::from(".");
        while let Some(name) = left.next_if(|name| path.as_os_str().len() + 1 + name.len() <= PATH_MAX) {
            path.push(name.as_ref());
        }
        let from = on_the_way.as_ref().map_or(start, |fd| fd.as_fd());
        let flags = OFlags::DIRECTORY | OFlags::NOATIME;
        if left.peek().is_none() {
            return inroot::open_plain(from, &path, flags | OFlags::RDONLY);
        }
        on_the_way = Some(inroot::open_plain(from, &path, OFlags::DIRECTORY | OFlags::PATH)?);
    }
}

/// The names in a directory that was opened just now, without `.` and `..`.
pub(crate) fn names(dir: BorrowedFd<'_>) -> rustix::io::Result<Vec<OsString>> {
    let mut buffer = [MaybeUninit::uninit(); 32 << 10];
    let mut entries = RawDir::new(dir, &mut buffer);
    let mut found = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            found.push(OsString::from_vec(name.to_vec()));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode, mkdirat, openat};
    use std::ffi::OsStr;

    #[test]
    fn however_many_directories_lie_at_one_depth_few_stay_open() {
        let dir = tempfile::tempdir().unwrap();
        let open =
            |dir: BorrowedFd<'_>, name: &OsStr| openat(dir, name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let root = open(CWD, dir.path().as_os_str());
        let (mut dirs, mut at, mut inner) = (Dirs::new(), ROOT, open(root.as_fd(), OsStr::new(".")));
        for _ in 1..ANCHOR_EVERY {
            mkdirat(&inner, "d", Mode::RWXU).unwrap();
            inner = open(inner.as_fd(), OsStr::new("d"));
            at = dirs.add(at, Arc::from(OsStr::new("d")));
        }
        let mut opener = Opener::new(ROOT, root);
        for n in 0..2 * ANCHORS_MAX {
            mkdirat(&inner, n.to_string(), Mode::RWXU).unwrap();
            let id = dirs.add(at, Arc::from(OsStr::new(&n.to_string())));
            assert!(names(opener.open(&dirs, id).unwrap().as_fd()).unwrap().is_empty());
            assert!(!opener.anchors.is_empty() && opener.anchors.len() <= ANCHORS_MAX);
        }
    }
}
