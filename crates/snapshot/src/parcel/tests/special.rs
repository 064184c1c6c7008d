//! Everything special that a tree can have, by name.

use super::world::*;
use crate::parcel::{ParcelError, TreeRef, pack_tree, remove, sync, unpack_tree};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, mkdirat, openat};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::{
        fd::OwnedFd,
        unix::fs::{MetadataExt, chown, lchown, symlink},
    },
    path::Path,
};

/// A tree with everything that comes back exactly.
pub(super) fn fill(root: &Path) {
    let at = |path: &str| root.join(path);
    put(&at("plain"), "bytes");
    put(&at("empty"), "");
    put(&at("dir/sub/file"), "below");
    fs::create_dir(at("empty dir")).unwrap();
    put(&root.join(name(b"no \xff text\n")), "x");
    put(&at(&"n".repeat(255)), "y");
    put(&at("set-uid"), "z");
    chown(at("set-uid"), Some(1234), Some(4_000_000_000)).unwrap();
    mode(&at("set-uid"), 0o6755);
    set_attribute(&at("set-uid"), "security.capability", [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    set_attribute(&at("plain"), "user.a/b", "value");
    set_attribute(&at("plain"), "user.empty", "");
    set_attribute(&at("plain"), "trusted.t", random(3000, 1));
    symlink("../nowhere/at all", at("link")).unwrap();
    lchown(at("link"), Some(7), Some(8)).unwrap();
    set_attribute(&at("link"), "trusted.of.link", "l");
    symlink("n".repeat(4000), at("long link")).unwrap();
    for name in ["gone", "gone too", "dir/gone"] {
        make(&at(name), FileType::CharacterDevice, 0);
    }
    make(&at("fifo"), FileType::Fifo, 0);
    mode(&at("fifo"), 0o622);
    for (first, more) in [("plain", "dir/again"), ("plain", "zz"), ("link", "dir/the link"), ("fifo", "fifo too")] {
        rustix::fs::linkat(CWD, at(first), CWD, at(more), AtFlags::empty()).unwrap();
    }
    sparse(&at("holes"), 10 << 20, &[(1 << 20, &[7; 5000]), (4 << 20, &[0; 8192]), ((10 << 20) - 3, b"end")]);
    sparse(&at("hole only"), 123_456_789, &[]);
    sparse(&at("begins with bytes"), 1 << 20, &[(0, b"x")]);
    put(&at("large"), random(5_000_000, 2));
    put(&at("zeros"), vec![0; 3_000_000]);
    for (attribute, value) in [("trusted.overlay.opaque", &b"y"[..]), ("trusted.overlay.origin", b""), ("user.d", b"dir")] {
        set_attribute(&at("dir"), attribute, value);
    }
    set_attribute(&at("dir/sub"), "trusted.overlay.redirect", "/etc/elsewhere");
    set_attribute(root, "user.of.root", "r");
    // What is made in the directory later gets it, too.
    set_attribute(&at("dir/sub"), "system.posix_acl_default", rights());
    set_attribute(&at("set-uid"), "system.posix_acl_access", rights());
    fs::create_dir(at("read only")).unwrap();
    put(&at("read only/f"), "in it");
    mode(&at("read only"), 0o555);
    mode(&at("dir"), 0o1777);
    mode(root, 0o750);
    for (path, seconds, nanoseconds) in [
        ("plain", 1, 999_999_999),
        ("link", 1_000_000_000, 1),
        ("empty", -5, 7),
        ("dir/sub", 2_000_000_000, 123_456_789),
        ("dir", 3, 4),
        ("", 5, 6),
    ] {
        modified(&at(path), seconds, nanoseconds);
    }
}

/// An access control list that lets group 5 read (`linux/posix_acl_xattr.h`).
fn rights() -> Vec<u8> {
    let mut list = 2_u32.to_le_bytes().to_vec();
    let nobody = u32::MAX;
    for (tag, rights, id) in [(1_u16, 7_u16, nobody), (4, 5, nobody), (8, 4, 5), (0x10, 5, nobody), (0x20, 0, nobody)] {
        list.extend_from_slice(&tag.to_le_bytes());
        list.extend_from_slice(&rights.to_le_bytes());
        list.extend_from_slice(&id.to_le_bytes());
    }
    list
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_special_comes_back() {
    if !is_root() {
        return;
    }
    let world = World::new().await;
    let root = world.empty("tree");
    fill(&root);
    let before = listing(&root);
    assert!(before[Path::new("holes")] != before[Path::new("large")] && before.len() > 25);
    let (tree, _) = world.pack(&root).await;
    assert_eq!(tree.entries as usize, before.len() - 1);
    let back = world.unpack(&tree, "back").await.unwrap();
    sync(&back).unwrap();
    assert_same(&listing(&back), &before, "unpacked");
    assert_same(&listing(&root), &before, "packing changed something");
    // The holes are holes.
    assert_eq!(fs::metadata(back.join("hole only")).unwrap().blocks(), 0);
    assert_eq!(data(&back.join("holes")).len(), 3);
    assert!(tree.plain_bytes < 9_000_000);
    // Whiteouts are one file, as in the kernel's own layers.
    assert_eq!(fs::symlink_metadata(back.join("gone")).unwrap().nlink(), 3);
    // As text, and from another handle.
    let text = serde_json::to_string(&tree).unwrap();
    assert!(text.len() < 1000, "{text}");
    let (reopened, again) = (world.reopened().await.unwrap(), world.path("again"));
    unpack_tree(&reopened, &serde_json::from_str(&text).unwrap(), &again).await.unwrap();
    assert_same(&listing(&again), &before, "from another handle");
    // At a place that hands down rights to all that is made in it.
    set_attribute(&world.empty("place"), "system.posix_acl_default", rights());
    let there = world.unpack(&tree, "place/back").await.unwrap();
    assert_same(&listing(&there), &before, "at another place");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn equal_trees_are_equal_streams() {
    if !is_root() {
        return;
    }
    let world = World::new().await;
    let (one, two) = (world.empty("one"), world.empty("two"));
    for (root, order) in [(&one, [0_u64, 1, 2]), (&two, [2, 0, 1])] {
        for n in order {
            put(&root.join(format!("d{n}/f")), random(40_000, n));
            make(&root.join(format!("w{n}")), FileType::CharacterDevice, 0);
            set_attribute(&root.join(format!("d{n}/f")), &format!("user.{n}"), "x");
        }
        for n in order {
            set_attribute(&root.join("d0/f"), &format!("user.{n}"), "x");
        }
        for n in 0..3 {
            modified(&root.join(format!("d{n}/f")), 9, 9);
            modified(&root.join(format!("d{n}")), 9, 9);
        }
        fs::hard_link(root.join("d1/f"), root.join("l")).unwrap();
        modified(root, 9, 9);
    }
    // Others share the file, which is no part of the tree; and whiteouts have times that nobody sees.
    fs::hard_link(two.join("d2/f"), world.path("elsewhere")).unwrap();
    fs::hard_link(two.join("d2/f"), world.path("elsewhere too")).unwrap();
    modified(&two.join("w1"), 1, 1);
    let ((first, _), (second, written)) = (world.pack(&one).await, world.pack(&two).await);
    assert_eq!(first, second);
    assert_eq!(written.new_chunks, 0);
    // Each least thing makes it another.
    let mut seen = vec![first.digest];
    let changes: [&dyn Fn(); 5] = [
        &|| modified(&two.join("d2/f"), 9, 10),
        &|| mode(&two.join("d2"), 0o700),
        &|| set_attribute(&two.join("d2/f"), "user.2", "y"),
        &|| chown(two.join("l"), Some(1), None).unwrap(),
        &|| fs::remove_file(two.join("w0")).unwrap(),
    ];
    for change in changes {
        change();
        let (tree, _) = world.pack(&two).await;
        assert!(!seen.contains(&tree.digest));
        seen.push(tree.digest);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_change_adds_few_chunks() {
    let world = World::new().await;
    let root = world.empty("tree");
    for n in 0..120 {
        put(&root.join(format!("d{}/f{n}", n / 30)), random(200_000, n));
    }
    let (_, all) = world.pack(&root).await;
    assert!(all.new_chunks > 30 && all.new_bytes > 24_000_000, "{all:?}");
    // One in a hundred, which lie together; one of them has become longer, so that all the rest is moved.
    put(&root.join("d2/f70"), random(200_100, 1000));
    let (_, some) = world.pack(&root).await;
    // It is one chunk or two, of some 600 KB, and the list that has them.
    assert!(some.new_bytes < all.bytes / 12 && some.new_chunks <= 6, "{some:?} of {all:?}");
    // What is added in front moves all numbers, if there were any.
    fs::create_dir(root.join("a")).unwrap();
    put(&root.join("a/link me"), "x");
    fs::hard_link(root.join("a/link me"), root.join("a/linked")).unwrap();
    let (_, some) = world.pack(&root).await;
    assert!(some.new_bytes < all.bytes / 12 && some.new_chunks <= 6, "{some:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_disk_never_has_is_a_whiteout() {
    if !is_root() {
        return;
    }
    let world = World::new().await;
    let root = world.empty("tree");
    for (name, kind, device) in
        [("socket", FileType::Socket, 0), ("char", FileType::CharacterDevice, 0x103), ("block", FileType::BlockDevice, 0)]
    {
        make(&root.join(name), kind, device);
    }
    put(&root.join("plain/f"), "");
    set_attribute(&root.join("plain"), "trusted.overlay.origin", "a handle");
    set_attribute(&root.join("plain"), "trusted.overlay.impure", "y");
    set_attribute(&root.join("plain/f"), "trusted.overlay.origin", "a handle");
    let (tree, _) = world.pack(&root).await;
    let back = world.unpack(&tree, "back").await.unwrap();
    let found = listing(&back);
    for name in ["socket", "char", "block"] {
        assert_eq!(found[Path::new(name)], whiteout());
    }
    // As layers have it: the attribute lets listings leave whiteouts out.
    let origin = BTreeMap::from([(c"trusted.overlay.origin".to_owned(), Vec::new())]);
    assert_eq!(attributes(&back), origin);
    assert_eq!(attributes(&back.join("plain")), origin);
    assert!(attributes(&back.join("plain/f")).is_empty());
}

/// The server does all this in tasks, of which some are given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_run_in_tasks_and_may_be_given_up() {
    let world = World::new().await;
    let root = world.empty("tree");
    put(&root.join("large"), random(30_000_000, 1));
    let (writer, dir) = (world.repository.writer().unwrap(), root.clone());
    let packed = tokio::spawn(async move {
        let tree = pack_tree(&dir, &writer).await.unwrap();
        writer.finish().await.unwrap();
        tree
    });
    let tree = packed.await.unwrap();
    let (repository, into) = (world.repository.clone(), world.path("back"));
    let unpacking = tokio::spawn(async move { unpack_tree(&repository, &tree, &into).await });
    let large = world.path("back/large");
    while !large.exists() {
        tokio::task::yield_now().await;
    }
    unpacking.abort();
    let ended = unpacking.await;
    assert!(ended.is_ok() || ended.unwrap_err().is_cancelled());
    // What is left of it, whoever still works on it.
    remove(&world.path("back")).unwrap();
}

fn dig(at: &Path, name: &str, levels: usize) -> OwnedFd {
    let mut dir: OwnedFd = File::open(at).unwrap().into();
    for _ in 0..levels {
        mkdirat(&dir, name, Mode::RWXU).unwrap();
        dir = openat(&dir, name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    }
    drop(openat(&dir, "file", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).unwrap());
    dir
}

fn depth(at: &Path, name: &str) -> (usize, bool) {
    let mut dir: OwnedFd = File::open(at).unwrap().into();
    for level in 0.. {
        match openat(&dir, name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()) {
            Ok(next) => dir = next,
            Err(_) => return (level, rustix::fs::statat(&dir, "file", AtFlags::SYMLINK_NOFOLLOW).is_ok()),
        }
    }
    unreachable!("a tree has an end")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paths_longer_than_any_path_come_back() {
    let world = World::new().await;
    let root = world.empty("tree");
    let long = "n".repeat(255);
    drop(dig(&root, &long, 40));
    // More levels than there may be open files.
    let inner = dig(&root, "d", 1500);
    put(&root.join("before"), "x");
    rustix::fs::linkat(CWD, root.join("before"), &inner, "linked", AtFlags::empty()).unwrap();
    drop(inner);
    let (tree, _) = world.pack(&root).await;
    let back = world.unpack(&tree, "back").await.unwrap();
    assert_eq!((depth(&back, &long), depth(&back, "d")), ((40, true), (1500, true)));
    assert_eq!(fs::metadata(back.join("before")).unwrap().nlink(), 2);
    for path in [&root, &back] {
        remove(path).unwrap();
        assert!(!path.exists());
    }
    remove(&back).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cant_be_read_or_made_is_said_so() {
    let world = World::new().await;
    let writer = world.repository.writer().unwrap();
    let missing = pack_tree(&world.path("none"), &writer).await;
    assert!(matches!(&missing, Err(ParcelError::Io { path, .. }) if path.ends_with("none")), "{missing:?}");
    let root = world.empty("tree");
    put(&root.join("f"), "x");
    let (tree, _) = world.pack(&root).await;
    // What is there already is nobody's to remove.
    let there = world.empty("there");
    put(&there.join("mine"), "y");
    let refused = world.unpack(&tree, "there").await;
    assert!(matches!(&refused, Err(ParcelError::Io { what: "create", .. })), "{refused:?}");
    assert_eq!(contents(&there.join("mine")), b"y");
    let other = TreeRef { digest: crate::Hash::of(b"other"), ..tree };
    assert!(matches!(world.unpack(&other, "back").await, Err(ParcelError::Damaged(_))));
}
