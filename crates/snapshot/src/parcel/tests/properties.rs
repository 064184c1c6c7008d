//! Random trees: what comes back is what went in, byte for byte and attribute for attribute.

use super::world::*;
use proptest::{prelude::*, test_runner::TestRunner};
use rustix::fs::{AtFlags, CWD, FileType, Mode, linkat, mknodat};
use std::{
    cell::Cell,
    fs,
    os::unix::fs::{MetadataExt, lchown, symlink},
    path::{Path, PathBuf},
};

/// Names that are awkward one way or another.
const NAMES: &[&[u8]] =
    &[b"a", b"b", b"c", b"~", b".hidden", b"-rf", b"new\nline", b"\xff\xfe", b"a b", b"\xc3\xa9", &[b'n'; 255]];

#[derive(Debug, Clone)]
enum What {
    Directory,
    /// Pieces of so many pages of hole and so many bytes.
    File(Vec<(u64, usize)>),
    Symlink(Vec<u8>),
    Whiteout,
    Fifo,
    /// Of one of the entries before.
    Link(prop::sample::Index),
}

#[derive(Debug, Clone)]
struct Entry {
    parent: prop::sample::Index,
    name: prop::sample::Index,
    what: What,
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    attributes: Vec<(u8, Vec<u8>)>,
    seed: u64,
}

fn what() -> impl Strategy<Value = What> {
    let target = prop::collection::vec(1..=255_u8, 1..300);
    prop_oneof![
        3 => Just(What::Directory),
        6 => prop::collection::vec((0..5_u64, 0..20_000_usize), 0..4).prop_map(What::File),
        1 => Just(What::File(vec![(0, 1_500_000)])),
        2 => target.prop_map(What::Symlink),
        1 => Just(What::Whiteout),
        1 => Just(What::Fifo),
        2 => any::<prop::sample::Index>().prop_map(What::Link),
    ]
}

fn entry() -> impl Strategy<Value = Entry> {
    let owner = (prop_oneof![Just(0), Just(1000), any::<u32>().prop_map(|id| id.min(u32::MAX - 1))], 0..100_000_u32);
    let modified = (prop_oneof![Just(0), -1_000_000..3_000_000_000_i64], 0..1_000_000_000_i64);
    let attributes = prop::collection::vec((0..8_u8, prop::collection::vec(any::<u8>(), 0..60)), 0..3);
    let places = (any::<prop::sample::Index>(), any::<prop::sample::Index>());
    (places, what(), 0..=0o7777_u32, owner, modified, attributes, any::<u64>()).prop_map(
        |((parent, name), what, mode, owner, modified, attributes, seed)| Entry {
            parent,
            name,
            what,
            mode,
            owner,
            modified,
            attributes,
            seed,
        },
    )
}

/// Makes the tree; entries whose name is taken are left out.
fn build(root: &Path, entries: &[Entry]) {
    let (mut directories, mut files) = (vec![PathBuf::new()], Vec::new());
    let mut made = Vec::new();
    for entry in entries {
        let named: &&[u8] = entry.name.get(NAMES);
        let below = entry.parent.get(&directories).join(name(named));
        let path = root.join(&below);
        if path.symlink_metadata().is_ok() {
            continue;
        }
        match &entry.what {
            What::Directory => {
                fs::create_dir(&path).unwrap();
                directories.push(below.clone());
            }
            What::File(pieces) => {
                let (mut at, mut places) = (0, Vec::new());
                for (hole, length) in pieces {
                    at += hole * 4096;
                    places.push((at, random(*length, entry.seed ^ at)));
                    at += *length as u64;
                }
                let tail = (entry.seed % 3) * 5000;
                let borrowed: Vec<_> = places.iter().map(|(at, bytes)| (*at, &bytes[..])).collect();
                sparse(&path, at + tail, &borrowed);
            }
            What::Symlink(target) => symlink(name(target), &path).unwrap(),
            What::Whiteout => make(&path, FileType::CharacterDevice, 0),
            What::Fifo => mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap(),
            What::Link(_) if files.is_empty() => continue,
            What::Link(of) => {
                linkat(CWD, root.join(of.get(&files)), CWD, &path, AtFlags::empty()).unwrap();
                continue;
            }
        }
        if matches!(entry.what, What::File(_) | What::Symlink(_) | What::Fifo) {
            files.push(below);
        }
        made.push((path, entry));
    }
    // Directories are dressed when they are full.
    for (path, entry) in made.iter().rev() {
        dress(path, entry);
    }
}

fn dress(path: &Path, entry: &Entry) {
    if matches!(entry.what, What::Whiteout) {
        return;
    }
    lchown(path, Some(entry.owner.0), Some(entry.owner.1)).unwrap();
    if !matches!(entry.what, What::Symlink(_)) {
        mode(path, entry.mode);
    }
    for (number, value) in &entry.attributes {
        // Programs set no attributes on anything but files and directories.
        let space = if matches!(entry.what, What::File(_) | What::Directory) { "user" } else { "trusted" };
        set_attribute(path, &format!("{space}.n{number}"), value);
    }
    modified(path, entry.modified.0, entry.modified.1);
}

#[test]
fn random_trees_come_back() {
    if !is_root() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let world = runtime.block_on(World::new());
    let cases = if std::env::var_os("DORMOUSE_LONG").is_some() { 1000 } else { 40 };
    let mut runner = TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() });
    let number = Cell::new(0);
    let checked = runner.run(&prop::collection::vec(entry(), 0..60), |entries| {
        number.set(number.get() + 1);
        let root = world.empty(&format!("tree-{}", number.get()));
        build(&root, &entries);
        modified(&root, 5, 5);
        let before = listing(&root);
        runtime.block_on(async {
            let (tree, _) = world.pack(&root).await;
            prop_assert_eq!(tree.entries as usize, before.len() - 1);
            let back = world.unpack(&tree, &format!("back-{}", number.get())).await.unwrap();
            assert_same(&listing(&back), &before, "unpacked");
            // What came back is the same tree, so it is the same stream.
            let (again, written) = world.pack(&back).await;
            prop_assert_eq!(&again, &tree);
            prop_assert_eq!(written.new_chunks, 0);
            prop_assert!(fs::metadata(&back).unwrap().mtime() == 5);
            for path in [&root, &back] {
                fs::remove_dir_all(path).unwrap();
            }
            Ok(())
        })
    });
    // The message has the least case, which can be built again.
    checked.unwrap_or_else(|error| panic!("{error}"));
}
