//! What a layer keeps, one thing at a time.

use super::world::*;
use crate::{
    disk::fingerprint,
    layer::{Layer, xattr},
};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::{
        fs::{FileExt, FileTypeExt, MetadataExt, symlink},
        net::UnixListener,
    },
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

/// Captures in two passes with nothing changed in between, and compares what a fork sees with what the source does.
fn two_passes(world: &World, session: &Session) -> Layer {
    let expected = listing(&session.at);
    let before = fingerprint(&session.disk.upper()).unwrap();
    let mut capture = world.capture(session, None);
    capture.precopy().unwrap();
    capture.freeze().unwrap();
    let layer = finish(capture);
    assert_eq!(fingerprint(&session.disk.upper()).unwrap(), before, "a memory image still fits the disk");
    assert_same(&world.seen(&session.above(&layer)), &expected, "a fork sees what the source did");
    layer
}

#[test]
fn whiteouts_stay() {
    let Some(world) = World::new() else { return };
    for name in ["a", "d/b", "d/c", "gone/x"] {
        world.template(name, "template");
    }
    let session = world.session(&[]);
    fs::remove_file(session.path("a")).unwrap();
    fs::remove_file(session.path("d/b")).unwrap();
    fs::remove_dir_all(session.path("gone")).unwrap();
    let layer = two_passes(&world, &session);
    let (a, b) = (meta(&world.tree(&layer).join("a")), meta(&world.tree(&layer).join("d/b")));
    assert!(a.file_type().is_char_device() && a.rdev() == 0);
    assert_eq!(a.ino(), b.ino(), "one file for all of them");
    let fork = world.session(&session.above(&layer));
    assert_eq!((names(&fork.at), names(&fork.path("d"))), (vec!["d".to_owned()], vec!["c".to_owned()]));
    put(&fork.path("a"), "fork");
    assert!(is_gone(&session.path("a")), "the source doesn't see what the fork did");
}

/// The other form of a whiteout is made by tools, not by our overlays.
#[test]
fn whiteouts_by_attribute_stay() {
    let Some(world) = World::new() else { return };
    world.template("d/a", "template");
    world.template("d/b", "template");
    let session = world.session(&[]);
    session.unmount();
    put(&session.upper("d/a"), "");
    set_attribute(&session.upper("d/a"), "trusted.overlay.whiteout", "").unwrap();
    set_attribute(&session.upper("d"), "trusted.overlay.opaque", "x").unwrap();
    let layer = world.layer(&session, None);
    assert!(attributes(&world.tree(&layer).join("d/a")).contains_key(xattr::WHITEOUT.to_bytes()));
    let fork = world.session(&session.above(&layer));
    assert_eq!(names(&fork.path("d")), ["b"]);
    assert!(is_gone(&fork.path("d/a")));
    session.mount(&world);
}

#[test]
fn opaque_directories_stay() {
    let Some(world) = World::new() else { return };
    world.template("d/old", "template");
    let session = world.session(&[]);
    fs::remove_dir_all(session.path("d")).unwrap();
    put(&session.path("d/new"), "session");
    let layer = two_passes(&world, &session);
    assert_eq!(attributes(&world.tree(&layer).join("d"))[xattr::OPAQUE.to_bytes()], b"y");
    assert_eq!(names(&world.session(&session.above(&layer)).path("d")), ["new"]);
}

#[test]
fn renamed_directories_stay() {
    let Some(world) = World::new() else { return };
    world.template("a/b/file", "template");
    let session = world.session(&[]);
    fs::rename(session.path("a/b"), session.path("a/c")).unwrap();
    fs::create_dir(session.path("new")).unwrap();
    fs::rename(session.path("a"), session.path("new/a")).unwrap();
    let layer = two_passes(&world, &session);
    let redirect = |path: &str| attributes(&world.tree(&layer).join(path))[xattr::REDIRECT.to_bytes()].clone();
    assert_eq!((redirect("new/a"), redirect("new/a/c")), (b"/a".to_vec(), b"b".to_vec()));
    assert_eq!(text(&world.session(&session.above(&layer)).path("new/a/c/file")), "template");
}

#[test]
fn names_of_one_file_stay_names_of_one_file() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    put(&session.path("a"), "one");
    put(&session.path("x"), "other");
    symlink("target", session.path("link")).unwrap();
    for (from, to) in [("a", "b"), ("a", "d"), ("link", "link2")] {
        fs::hard_link(session.path(from), session.path(to)).unwrap();
    }
    wait_until_calm(&session.upper("link"));
    let mut capture = world.capture(&session, None);
    capture.precopy().unwrap();
    // The group changes between the passes: one name less, two more, other bytes.
    fs::remove_file(session.path("b")).unwrap();
    fs::create_dir(session.path("dir")).unwrap();
    fs::hard_link(session.path("a"), session.path("dir/c")).unwrap();
    fs::rename(session.path("x"), session.path("b")).unwrap();
    fs::write(session.path("d"), "two").unwrap();
    let expected = listing(&session.at);
    capture.freeze().unwrap();
    let layer = finish(capture);
    assert_same(&world.seen(&session.above(&layer)), &expected, "two passes");
    let inode = |path: &str| meta(&world.tree(&layer).join(path)).ino();
    assert_eq!([inode("a"), inode("d")], [inode("dir/c"); 2]);
    assert_eq!(inode("link"), inode("link2"));
    assert_ne!(inode("a"), inode("b"));
    assert_eq!(text(&world.tree(&layer).join("dir/c")), "two");
}

#[test]
fn holes_stay_holes() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    let sparse = |name: &str, parts: &[(u64, usize)], length: u64| {
        let file = File::create(session.path(name)).unwrap();
        parts.iter().for_each(|(at, size)| file.write_all_at(&vec![7; *size], *at).unwrap());
        file.set_len(length).unwrap();
    };
    sparse("empty", &[], 0);
    sparse("all-hole", &[], 100 << 20);
    sparse("middle", &[(10 << 20, 5000), (50 << 20, 1)], 100 << 20);
    sparse("end", &[((64 << 20) - 3, 3)], 64 << 20);
    sparse("tail-hole", &[(0, 4097)], 8 << 20);
    sparse("full", &[(0, 300_000)], 300_000);
    let reserved = File::create(session.path("reserved")).unwrap();
    rustix::fs::fallocate(&reserved, rustix::fs::FallocateFlags::empty(), 0, 16 << 20).unwrap();
    reserved.write_all_at(b"x", 5 << 20).unwrap();
    let layer = two_passes(&world, &session);
    // What is reserved counts as data once somebody has read it.
    for name in ["all-hole", "middle", "end", "tail-hole"] {
        let copy = meta(&world.tree(&layer).join(name));
        assert!(copy.blocks() * 512 < 200_000, "{name}: {} blocks", copy.blocks());
    }
}

#[test]
fn owners_modes_and_times_stay() {
    let Some(world) = World::new() else { return };
    world.template("d/sub/file", "template");
    let session = world.session(&[]);
    put(&session.path("program"), "x");
    put(&session.path("d/secret"), "x");
    symlink("nowhere", session.path("link")).unwrap();
    let own = |path: &str, uid, gid| std::os::unix::fs::lchown(session.path(path), Some(uid), Some(gid)).unwrap();
    own("program", 1000, 1001);
    own("d", 7, 8);
    own("link", 1002, 1003);
    mode(&session.path("program"), 0o6755);
    mode(&session.path("d/secret"), 0o000);
    mode(&session.path("d"), 0o3751);
    mode(&session.at, 0o701);
    set_attribute(&session.at, "user.root", "kept").unwrap();
    let time = |path: &str, nanoseconds: i64| {
        let at = rustix::fs::Timespec { tv_sec: 1_000_000_007, tv_nsec: nanoseconds as _ };
        let times = rustix::fs::Timestamps { last_access: at, last_modification: at };
        rustix::fs::utimensat(rustix::fs::CWD, session.path(path), &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
    };
    for (n, path) in ["program", "d/secret", "link", "d/sub", "d", ""].into_iter().enumerate() {
        time(path, 123_456_789 + n as i64);
    }
    let layer = two_passes(&world, &session);
    let program = meta(&world.tree(&layer).join("program"));
    assert_eq!((program.mode() & 0o7777, program.uid(), program.gid()), (0o6755, 1000, 1001));
    assert_eq!(meta(&world.tree(&layer).join("d")).modified().unwrap(), UNIX_EPOCH + Duration::new(1_000_000_007, 123_456_793));
    let fork = world.session(&session.above(&layer));
    assert_eq!(meta(&fork.at).mode() & 0o7777, 0o701, "the root looks as it did");
    assert_eq!(attributes(&fork.at)[&b"user.root"[..]], b"kept");
}

#[test]
fn attributes_stay_but_for_those_of_one_inode() {
    let Some(world) = World::new() else { return };
    world.template("d/from-template", "template");
    let session = world.session(&[]);
    put(&session.path("a"), "x");
    symlink("a", session.path("link")).unwrap();
    set_attribute(&session.path("a"), "user.big", vec![b'v'; 3000]).unwrap();
    set_attribute(&session.path("a"), "user.empty", "").unwrap();
    set_attribute(&session.path("a"), "trusted.own", "t").unwrap();
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    set_attribute(&session.path("a"), "security.capability", capability).unwrap();
    set_attribute(&session.path("link"), "trusted.of-link", "l").unwrap();
    set_attribute(&session.path("d"), "user.of-directory", "d").unwrap();
    fs::write(session.path("d/from-template"), "copied up").unwrap();
    let upper = attributes(&session.upper("d/from-template"));
    assert!(upper.contains_key(xattr::ORIGIN.to_bytes()), "else this test shows nothing");
    let layer = two_passes(&world, &session);
    let kept = |path: &str| attributes(&world.tree(&layer).join(path));
    assert_eq!(kept("a"), attributes(&session.upper("a")));
    assert_eq!(kept("a").len(), 4);
    assert_eq!(kept("link"), attributes(&session.upper("link")));
    assert!(kept("d/from-template").is_empty());
    let of_directory = kept("d");
    assert_eq!(of_directory.len(), 2, "{of_directory:?}");
    assert_eq!((&*of_directory[&b"user.of-directory"[..]], &*of_directory[xattr::ORIGIN.to_bytes()]), (&b"d"[..], &b""[..]));
}

#[test]
fn a_directory_loses_what_the_original_lost_between_the_passes() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    put(&session.path("d/file"), "x");
    set_attribute(&session.path("d"), "user.a", "1").unwrap();
    set_attribute(&session.path("d"), "user.b", "1").unwrap();
    mode(&session.path("d"), 0o700);
    wait_until_calm(&session.upper("d"));
    let mut capture = world.capture(&session, None);
    capture.precopy().unwrap();
    rustix::fs::lremovexattr(session.path("d"), "user.a").unwrap();
    set_attribute(&session.path("d"), "user.b", "2").unwrap();
    mode(&session.path("d"), 0o755);
    let expected = listing(&session.at);
    capture.freeze().unwrap();
    assert_same(&world.seen(&session.above(&finish(capture))), &expected, "after the second pass");
}

/// A directory with a default list hands it on to whatever is made in it, also to copies.
#[test]
fn access_control_lists_stay_where_they_were() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    // acl(5) as the kernel stores it (`linux/posix_acl_xattr.h`): version 2, then tag, permissions, id.
    let entry = |tag: u16, mode: u16, id: u32| [&tag.to_le_bytes()[..], &mode.to_le_bytes(), &id.to_le_bytes()].concat();
    let list = [
        2u32.to_le_bytes().to_vec(),
        entry(1, 7, u32::MAX),
        entry(2, 7, 1000),
        entry(4, 5, u32::MAX),
        entry(0x10, 7, u32::MAX),
        entry(0x20, 4, u32::MAX),
    ];
    let seen = |path: &Path| attributes(path).into_keys().filter(|name| name.starts_with(b"system.")).collect::<Vec<_>>();
    put(&session.path("d/plain"), "x");
    set_attribute(&session.path("d"), "system.posix_acl_default", list.concat()).unwrap();
    put(&session.path("d/with"), "x");
    wait_until_calm(&session.upper("d/with"));
    let mut capture = world.capture(&session, None);
    capture.precopy().unwrap();
    // Copied into a directory that has the list already: some have it, some don't.
    for name in ["d/moved", "d/late", "d/sub/late"] {
        put(&session.path(name), "x");
    }
    put(&session.path("without"), "x");
    fs::rename(session.path("without"), session.path("d/without")).unwrap();
    fs::create_dir(session.path("bare")).unwrap();
    fs::rename(session.path("bare"), session.path("d/bare")).unwrap();
    symlink("x", session.path("d/link")).unwrap();
    let expected = listing(&session.at);
    capture.freeze().unwrap();
    let layer = finish(capture);
    assert_same(&world.seen(&session.above(&layer)), &expected, "modes follow the lists");
    for name in ["d", "d/plain", "d/with", "d/moved", "d/late", "d/sub", "d/sub/late", "d/without", "d/bare"] {
        assert_eq!(seen(&world.tree(&layer).join(name)), seen(&session.upper(name)), "{name}");
    }
    assert_eq!((seen(&session.upper("d/sub")).len(), seen(&session.upper("d/without")).len()), (2, 0));
}

/// None of these can get onto a disk of ours; a hostile one is made here by hand.
#[test]
fn what_no_disk_has_is_left_out_and_hides_what_it_hid() {
    let Some(world) = World::new() else { return };
    for name in ["d/fifo", "d/disk", "d/zero", "d/socket"] {
        world.template(name, "template");
    }
    let session = world.session(&[]);
    session.unmount();
    fs::create_dir_all(session.upper("d")).unwrap();
    fs::create_dir_all(session.upper("new")).unwrap();
    for dir in ["d", "new"] {
        let node = |name: &str, kind, number| mknod(&session.upper(dir).join(name), kind, Mode::S_IRUSR, number).unwrap();
        node("fifo", SFlag::S_IFIFO, 0);
        node("zero", SFlag::S_IFCHR, makedev(1, 5));
        node("disk", SFlag::S_IFBLK, makedev(7, 0));
        drop(UnixListener::bind(session.upper(dir).join("socket")).unwrap());
        put(&session.upper(dir).join("file"), "kept");
    }
    let layer = world.layer(&session, None);
    let fork = world.session(&session.above(&layer));
    assert_eq!((names(&fork.path("d")), names(&fork.path("new"))), (vec!["file".to_owned()], vec!["file".to_owned()]));
    assert!(is_gone(&fork.path("d/fifo")), "what the FIFO hid is not back");
    session.mount(&world);
}

/// What is copied is what was there, also in files that need several reads.
#[test]
fn long_files_are_copied_whole() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    let mut file = File::create(session.path("long")).unwrap();
    for n in 0..(3 << 18) + 1u32 {
        file.write_all(&n.to_le_bytes()).unwrap();
    }
    let layer = two_passes(&world, &session);
    let mut copy = File::open(world.tree(&layer).join("long")).unwrap();
    copy.seek(SeekFrom::End(-4)).unwrap();
    let mut last = [0; 4];
    copy.read_exact(&mut last).unwrap();
    assert_eq!(u32::from_le_bytes(last), 3 << 18);
}
