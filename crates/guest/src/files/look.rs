//! How files stood at one moment, and what differs from one moment to the next.
//!
//! Names are only looked at (lstat(2)), never followed: what a link leads to is another file.

use rustix::fs::StatFs;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};
use wire::files::WatchEvent;

/// File systems that the kernel makes up as they are read (statfs(2)): they change all the time and mean nothing.
const MADE_UP: [u64; 4] = [0x9fa0, 0x6265_6572, 0x0027_e0eb, 0x6367_7270];

/// What is known of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    dev: u64,
    ino: u64,
    mode: u32,
    owner: (u32, u32),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    /// A directory of which every name is in the look.
    listed: bool,
}

impl Entry {
    fn of(meta: &Metadata) -> Entry {
        Entry {
            dev: meta.dev(),
            ino: meta.ino(),
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
            listed: false,
        }
    }

    fn kind(&self) -> u32 {
        self.mode & libc::S_IFMT
    }

    fn is_dir(&self) -> bool {
        self.kind() == libc::S_IFDIR
    }

    fn is_same_file(&self, other: &Entry) -> bool {
        (self.dev, self.ino, self.kind()) == (other.dev, other.ino, other.kind())
    }

    /// A directory's own times and size change with the names in it, which are told by themselves.
    fn differs(&self, other: &Entry) -> bool {
        if (self.mode, self.owner) != (other.mode, other.owner) {
            return true;
        }
        !self.is_dir() && (self.size, self.modified, self.changed) != (other.size, other.modified, other.changed)
    }

    /// What a file keeps when only its name changes. The number alone isn't enough: file systems use it again at once.
    fn identity(&self) -> (u64, u64, u32, (i64, i64)) {
        (self.dev, self.ino, self.kind(), self.modified)
    }
}

/// What a look found, by path: a directory stands before what is in it.
#[derive(Debug, Clone, Default)]
pub struct Look {
    entries: BTreeMap<PathBuf, Entry>,
    cut: bool,
}

impl Look {
    /// True where there was more than fits.
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// Looks at `top`, at what is in it, and where `recursive` at everything below; at `most` names in all. Ends early
    /// where `stop` is set. Blocks.
    pub fn take(top: &Path, recursive: bool, most: usize, stop: &AtomicBool) -> Look {
        let mut look = Look::default();
        let Ok(meta) = fs::symlink_metadata(top) else { return look };
        look.entries.insert(top.to_owned(), Entry::of(&meta));
        let mut queue = std::collections::VecDeque::new();
        if meta.is_dir() {
            queue.push_back((top.to_owned(), meta.dev()));
        }
        while let Some((dir, dev)) = queue.pop_front() {
            match look.list(&dir, most, stop) {
                Ok(found) if recursive => {
                    queue.extend(found.into_iter().filter(|(path, its)| *its == dev || !is_made_up(path)));
                }
                Ok(_) => {}
                // It went a moment ago.
                Err(error) if error.kind() == io::ErrorKind::NotFound => drop(look.entries.remove(&dir)),
                // What can't be read isn't watched.
                Err(_) => {}
            }
            if look.cut || stop.load(Ordering::Relaxed) {
                break;
            }
        }
        look
    }

    /// Looks at every name in `dir`; returns the directories, each with its file system's number.
    fn list(&mut self, dir: &Path, most: usize, stop: &AtomicBool) -> io::Result<Vec<(PathBuf, u64)>> {
        let mut dirs = Vec::new();
        for name in fs::read_dir(dir)? {
            if stop.load(Ordering::Relaxed) {
                return Ok(dirs);
            }
            if self.entries.len() >= most {
                self.cut = true;
                return Ok(dirs);
            }
            let path = name?.path();
            // Gone between the list and the look: it is as if it had not been in the list.
            let Ok(meta) = fs::symlink_metadata(&path) else { continue };
            if meta.is_dir() {
                dirs.push((path.clone(), meta.dev()));
            }
            self.entries.insert(path, Entry::of(&meta));
        }
        if let Some(entry) = self.entries.get_mut(dir) {
            entry.listed = true;
        }
        Ok(dirs)
    }

    /// True where `path` is missing for certain, and not only left out for lack of room: the directory that it would be
    /// in was listed, or is missing itself.
    fn lacks(&self, path: &Path, missing: &HashSet<&Path>) -> bool {
        let Some(parent) = path.parent() else { return true };
        match self.entries.get(parent) {
            Some(parent) => parent.listed,
            None => missing.contains(parent),
        }
    }
}

fn is_made_up(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|fs: StatFs| MADE_UP.contains(&(fs.f_type as u64)))
}

/// The names in `one` that `other` lacks for certain.
fn only_in<'a>(one: &'a Look, other: &Look) -> HashSet<&'a Path> {
    let mut found = HashSet::new();
    for (n, path) in one.entries.keys().enumerate() {
        // The first is what is watched; nothing above it is looked at.
        if !other.entries.contains_key(path) && (n == 0 || other.lacks(path, &found)) {
            found.insert(path.as_path());
        }
    }
    found
}

/// What happened between two looks, as far as they show it: names that moved (from and to stand together), names that
/// went, names that came, files that changed. Their order in time isn't known.
pub fn differences(before: &Look, now: &Look) -> Vec<WatchEvent> {
    let (gone, come) = (only_in(before, now), only_in(now, before));
    let replaced: Vec<&Path> = before
        .entries
        .iter()
        .filter(|(path, old)| now.entries.get(*path).is_some_and(|new| !new.is_same_file(old)))
        .map(|(path, _)| path.as_path())
        .collect();
    let moves = moves(before, now, &gone, &come, &replaced);
    let left: HashSet<&Path> = moves.iter().map(|(from, _)| *from).collect();
    let arrived: HashSet<&Path> = moves.iter().map(|(_, to)| *to).collect();

    let mut events = Vec::new();
    let mut tell = |kind: &str, path: &Path, entry: &Entry| {
        events.push(WatchEvent { kind: kind.into(), path: path.to_string_lossy().into_owned(), is_dir: entry.is_dir() });
    };
    for (from, to) in &moves {
        // What went along with its directory is told by the directory.
        let along = from
            .parent()
            .zip(to.parent())
            .is_some_and(|pair| from.file_name() == to.file_name() && moves.binary_search(&pair).is_ok());
        if !along {
            tell("moved_from", from, &before.entries[*from]);
            tell("moved_to", to, &now.entries[*to]);
        }
    }
    let became_another = |path: &&Path| before.entries[*path].kind() != now.entries[*path].kind();
    // A directory goes after what was in it, and comes before it.
    let mut went: Vec<&Path> = gone.iter().copied().chain(replaced.iter().copied().filter(became_another)).collect();
    went.retain(|path| !left.contains(path) && !arrived.contains(path));
    went.sort_unstable_by(|a, b| b.cmp(a));
    for path in went {
        tell("removed", path, &before.entries[path]);
    }
    // Where something moved away, what stands there now is new, whatever it is.
    let new_here = |path: &&Path| became_another(path) || left.contains(path);
    let mut came: Vec<&Path> = come.iter().copied().chain(replaced.iter().copied().filter(new_here)).collect();
    came.retain(|path| !arrived.contains(path));
    came.sort_unstable();
    for path in &came {
        tell("created", path, &now.entries[*path]);
    }
    let origin: HashMap<&Path, &Path> = moves.iter().map(|(from, to)| (*to, *from)).collect();
    for (path, new) in &now.entries {
        let path = path.as_path();
        let old = match origin.get(path) {
            Some(from) => before.entries.get(*from),
            None => before.entries.get(path).filter(|_| came.binary_search(&path).is_err()),
        };
        let Some(old) = old else { continue };
        let changed = match (old.is_same_file(new), origin.contains_key(path)) {
            // A new name changes the inode's time, and is told already.
            (true, true) => (old.mode, old.owner) != (new.mode, new.owner),
            (true, false) => old.differs(new),
            // Another file under the same name: how most programs save.
            (false, _) => true,
        };
        if changed {
            tell("modified", path, new);
        }
    }
    events
}

/// Pairs of an old and a new name of one file, in the order of the old names.
fn moves<'a>(
    before: &'a Look,
    now: &'a Look,
    gone: &HashSet<&'a Path>,
    come: &HashSet<&'a Path>,
    replaced: &[&'a Path],
) -> Vec<(&'a Path, &'a Path)> {
    let mut homeless: BTreeMap<_, Vec<&Path>> = BTreeMap::new();
    for path in gone.iter().chain(replaced) {
        homeless.entry(before.entries[*path].identity()).or_default().push(path);
    }
    homeless.values_mut().for_each(|paths| paths.sort_unstable_by(|a, b| b.cmp(a)));
    let mut targets: Vec<&Path> = come.iter().chain(replaced).copied().collect();
    targets.sort_unstable();
    let mut pairs = Vec::new();
    for to in targets {
        let from = homeless.get_mut(&now.entries[to].identity()).and_then(Vec::pop);
        pairs.extend(from.map(|from| (from, to)));
    }
    pairs.sort_unstable();
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: u32 = libc::S_IFDIR | 0o755;
    const FILE: u32 = libc::S_IFREG | 0o644;

    /// A name with its file's number, mode, and a number that stands for its size and times.
    fn entry(ino: u64, mode: u32, version: i64) -> Entry {
        let (modified, changed) = ((version, 0), (version, 0));
        Entry { dev: 1, ino, mode, owner: (0, 0), size: version.unsigned_abs(), modified, changed, listed: mode == DIR }
    }

    fn look(entries: &[(&str, Entry)]) -> Look {
        Look { entries: entries.iter().map(|(path, entry)| (PathBuf::from(path), entry.clone())).collect(), cut: false }
    }

    fn told(before: &[(&str, Entry)], now: &[(&str, Entry)]) -> Vec<String> {
        differences(&look(before), &look(now)).iter().map(|e| format!("{} {}", e.kind, e.path)).collect()
    }

    #[test]
    fn names_that_came_and_went_and_files_that_changed_are_told() {
        let top = ("/w", entry(1, DIR, 1));
        let busy = ("/w", entry(1, DIR, 2));
        let (a, b, c) = (("/w/a", entry(2, FILE, 1)), ("/w/b", entry(3, FILE, 1)), ("/w/c", entry(4, FILE, 1)));
        let none: [&str; 0] = [];
        assert_eq!(told(&[top.clone(), a.clone()], &[top.clone(), a.clone()]), none);
        assert_eq!(told(&[top.clone(), a.clone()], &[busy.clone(), a.clone(), b.clone()]), ["created /w/b"], "not the directory");
        assert_eq!(told(&[top.clone(), a.clone(), b], &[busy.clone(), a.clone()]), ["removed /w/b"]);
        assert_eq!(told(&[top.clone(), a.clone()], &[busy.clone(), c]), ["removed /w/a", "created /w/c"]);
        let written = ("/w/a", entry(2, FILE, 2));
        assert_eq!(told(&[top.clone(), a.clone()], &[top.clone(), written]), ["modified /w/a"]);
        let touched = ("/w/a", Entry { changed: (9, 9), ..entry(2, FILE, 1) });
        assert_eq!(told(&[top.clone(), a.clone()], &[top.clone(), touched]), ["modified /w/a"]);
        let closed = ("/w", entry(1, libc::S_IFDIR | 0o700, 1));
        assert_eq!(told(&[top.clone(), a.clone()], &[closed, a.clone()]), ["modified /w"], "a directory's mode");
        let saved_anew = ("/w/a", entry(9, FILE, 2));
        assert_eq!(told(&[top.clone(), a.clone()], &[busy.clone(), saved_anew]), ["modified /w/a"]);
        let now_a_directory = ("/w/a", entry(9, DIR, 2));
        assert_eq!(told(&[top, a], &[busy, now_a_directory]), ["removed /w/a", "created /w/a"]);
    }

    #[test]
    fn a_file_under_another_name_has_moved() {
        let top = ("/w", entry(1, DIR, 1));
        let (a, b) = (("/w/a", entry(2, FILE, 1)), ("/w/b", entry(3, FILE, 7)));
        let renamed = ("/w/c", Entry { changed: (5, 5), ..entry(2, FILE, 1) });
        assert_eq!(told(&[top.clone(), a.clone()], &[top.clone(), renamed]), ["moved_from /w/a", "moved_to /w/c"]);
        let over = ("/w/b", entry(2, FILE, 1));
        let moved = ["moved_from /w/a", "moved_to /w/b"];
        assert_eq!(told(&[top.clone(), a.clone(), b.clone()], &[top.clone(), over.clone()]), moved, "over another");
        let new = ("/w/a", entry(8, FILE, 9));
        let with_new = ["moved_from /w/a", "moved_to /w/b", "created /w/a"];
        assert_eq!(told(&[top.clone(), a.clone()], &[top.clone(), new, over.clone()]), with_new);
        let swapped = ["moved_from /w/a", "moved_to /w/b", "moved_from /w/b", "moved_to /w/a"];
        let back = ("/w/a", entry(3, FILE, 7));
        assert_eq!(told(&[top.clone(), a.clone(), b], &[top.clone(), back, over]), swapped);
        let linked = ("/w/d", entry(2, FILE, 1));
        assert_eq!(told(&[top.clone(), a.clone()], &[top.clone(), a.clone(), linked]), ["created /w/d"], "a second name");
        let reused = ("/w/d", entry(2, FILE, 3));
        let expected = ["removed /w/a", "created /w/d"];
        assert_eq!(told(&[top.clone(), a], &[top, reused]), expected, "another file with the number of one that went");
    }

    #[test]
    fn a_tree_is_told_from_the_outside_in_and_goes_from_the_inside_out() {
        let top = ("/w", entry(1, DIR, 1));
        let tree = |at: [&'static str; 3]| [(at[0], entry(5, DIR, 1)), (at[1], entry(6, DIR, 1)), (at[2], entry(7, FILE, 1))];
        let (d, e) = (tree(["/w/d", "/w/d/e", "/w/d/e/f"]), tree(["/w/x", "/w/x/e", "/w/x/e/f"]));
        let with = |tree: &[(&'static str, Entry); 3]| [std::slice::from_ref(&top), tree].concat();
        let alone = vec![top.clone()];
        assert_eq!(told(&alone, &with(&d)), ["created /w/d", "created /w/d/e", "created /w/d/e/f"]);
        assert_eq!(told(&with(&d), &alone), ["removed /w/d/e/f", "removed /w/d/e", "removed /w/d"]);
        assert_eq!(told(&with(&d), &with(&e)), ["moved_from /w/d", "moved_to /w/x"], "what is in it goes along");
        assert_eq!(told(&alone, &[]), ["removed /w"], "what is watched itself");
        assert_eq!(told(&[], &alone), ["created /w"], "and is back");
    }

    #[test]
    fn what_was_not_looked_at_is_neither_gone_nor_new() {
        let partly = |path| (path, Entry { listed: false, ..entry(1, DIR, 1) });
        let a = ("/w/a", entry(2, FILE, 1));
        let deep = [("/w/d", entry(5, DIR, 1)), ("/w/d/x", entry(6, FILE, 1))];
        let whole = [[("/w", entry(1, DIR, 1)), a].as_slice(), &deep].concat();
        let none: [&str; 0] = [];
        assert_eq!(told(&whole, &[partly("/w")]), none);
        assert_eq!(told(&[partly("/w")], &whole), none);
        assert_eq!(told(&whole, &[("/w", entry(1, DIR, 1)), ("/w/d", entry(5, DIR, 1))]), ["removed /w/d/x", "removed /w/a"]);
    }

    #[test]
    fn a_look_finds_what_is_there_follows_no_link_and_stays_within_its_bounds() {
        let top = std::env::temp_dir().join(format!("dormouse-look-{}", std::process::id()));
        fs::create_dir_all(top.join("a/b")).unwrap();
        fs::write(top.join("a/b/f"), "x").unwrap();
        std::os::unix::fs::symlink("/", top.join("a/out")).unwrap();
        let never = AtomicBool::new(false);
        let take = |recursive, most| Look::take(&top, recursive, most, &never);
        let names = |look: &Look| {
            let path = |path: &PathBuf| path.strip_prefix(&top).unwrap().to_string_lossy().into_owned();
            look.entries.keys().map(path).collect::<Vec<_>>()
        };
        assert_eq!(names(&take(false, 99)), ["", "a"]);
        let all = take(true, 99);
        assert_eq!(names(&all), ["", "a", "a/b", "a/b/f", "a/out"]);
        assert!(!all.is_cut() && take(true, 5).entries == all.entries);
        let few = take(true, 3);
        assert!(few.is_cut() && few.entries.len() == 3);
        assert!(differences(&all, &few).is_empty() && differences(&few, &all).is_empty());
        fs::remove_dir_all(top.join("a/b")).unwrap();
        let kinds: Vec<String> = differences(&all, &take(true, 99)).into_iter().map(|event| event.kind).collect();
        assert_eq!(kinds, ["removed", "removed"]);
        fs::remove_dir_all(&top).unwrap();
        assert!(take(true, 99).entries.is_empty());
        let stopped = Look::take(Path::new("/"), true, usize::MAX, &AtomicBool::new(true));
        assert!(stopped.entries.len() <= 1, "it ends when nobody wants it any more");
    }
}
