//! The two passes of a capture: what the second must see, and what it needn't copy again.

use super::world::*;
use crate::layer::{Capture, Layer, LayerError};
use std::{
    fs::{self, File, OpenOptions},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt, symlink},
    },
    path::Path,
    time::UNIX_EPOCH,
};

/// In memory nothing says that a mapped file changes, and nothing can be shared with the layers on disk.
#[test]
fn a_disk_on_another_file_system_that_tells_no_changes_is_copied_exactly() {
    let Some(world) = World::new() else { return };
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    let upper = elsewhere.path().join("upper");
    put(&upper.join("d/a"), vec![b'a'; 10_000]);
    symlink("a", upper.join("d/link")).unwrap();
    fs::hard_link(upper.join("d/a"), upper.join("b")).unwrap();
    let file = File::create(upper.join("sparse")).unwrap();
    file.write_all_at(b"x", 5 << 20).unwrap();
    let mut previous = None;
    for round in b"bcd" {
        let begun = Capture::begin(&world.store, model::LayerId::new(), &upper, previous).unwrap();
        let mut capture = begun.with_bounds(SETTLE, LINKS_MAX);
        wait_until_calm(&upper.join("sparse"));
        capture.precopy().unwrap();
        assert_eq!(capture.copied_at_last(), 0, "nothing can be relied on");
        Mapping::of(&upper.join("d/a"), 10_000).store(7, *round);
        capture.freeze().unwrap();
        assert_eq!(capture.copied_at_last(), 3);
        let layer = finish(capture);
        assert_same(&raw(&world.tree(&layer)), &raw(&upper), "a copy");
        assert!(meta(&world.tree(&layer).join("sparse")).blocks() < 100);
        previous = Some(layer.id);
    }
}

#[test]
fn stores_through_a_mapping_are_seen() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    put(&session.path("mapped"), vec![b'a'; 8192]);
    let map = Mapping::of(&session.path("mapped"), 8192);
    // Dirty, and nothing tells from now on: the page takes stores without asking the kernel.
    map.store(10, b'b');
    wait_until_calm(&session.upper("mapped"));
    map.store(11, b'c');
    let read = |layer: &Layer| fs::read(world.tree(layer).join("mapped")).unwrap();
    let mut capture = world.capture(&session, None);
    capture.precopy().unwrap();
    map.store(12, b'd');
    capture.freeze().unwrap();
    map.store(13, b'e');
    let first = finish(capture);
    assert_eq!(&read(&first)[10..15], b"bcdaa");
    // The file's change time is old by now, and the store after the freeze has left no trace in it.
    wait_until_calm(&session.upper("mapped"));
    let mut capture = world.capture(&session, Some(first.id));
    capture.precopy().unwrap();
    capture.freeze().unwrap();
    let second = finish(capture);
    assert_eq!(&read(&second)[10..15], b"bcdea");
    assert_eq!(&read(&first)[10..15], b"bcdaa", "a layer never changes");
    // Without a change it is shared.
    let third = world.layer(&session, Some(second.id));
    assert_eq!(meta(&world.tree(&third).join("mapped")).ino(), meta(&world.tree(&second).join("mapped")).ino());
}

#[test]
fn changes_within_one_tick_are_seen() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    for round in 0..50u8 {
        fs::write(session.path("f"), [round, 0]).unwrap();
        let mut capture = world.capture(&session, None);
        capture.precopy().unwrap();
        // Same size, maybe the same tick.
        OpenOptions::new().write(true).open(session.path("f")).unwrap().write_all_at(&[1], 1).unwrap();
        capture.freeze().unwrap();
        assert_eq!(capture.copied_at_last(), 1, "round {round}");
    }
}

#[test]
fn unchanged_files_are_shared_with_the_previous_layer_and_never_with_the_disk() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    for name in ["same", "changed", "same-size", "touched", "mode", "moved/inner", "linked"] {
        put(&session.path(name), format!("content of {name}"));
    }
    symlink("same", session.path("link")).unwrap();
    fs::hard_link(session.path("linked"), session.path("linked-too")).unwrap();
    wait_until_calm(&session.upper("linked-too"));
    let first = world.layer(&session, None);
    fs::write(session.path("changed"), "longer than it was before").unwrap();
    fs::write(session.path("same-size"), "CONTENT of same-size").unwrap();
    File::open(session.path("touched")).unwrap().set_modified(UNIX_EPOCH).unwrap();
    mode(&session.path("mode"), 0o600);
    // What is in a renamed directory is as it was.
    fs::rename(session.path("moved"), session.path("elsewhere")).unwrap();
    let expected = listing(&session.at);
    let mut capture = world.capture(&session, Some(first.id));
    capture.precopy().unwrap();
    capture.freeze().unwrap();
    let second = finish(capture);
    assert_same(&world.seen(&session.above(&second)), &expected, "the second layer");
    let pair = |old: &str, new: &str| (meta(&world.tree(&first).join(old)).ino(), meta(&world.tree(&second).join(new)).ino());
    for (old, new) in [("same", "same"), ("link", "link"), ("linked", "linked-too"), ("moved/inner", "elsewhere/inner")] {
        let (old_inode, new_inode) = pair(old, new);
        assert_eq!(old_inode, new_inode, "{old}");
    }
    for name in ["changed", "same-size", "touched", "mode"] {
        let (old, new) = pair(name, name);
        assert_ne!(old, new, "{name}");
    }
    assert_eq!(meta(&session.upper("same")).nlink(), 1, "the disk's own file is its own");
    assert!(second.descriptor.own_bytes < second.descriptor.size_bytes);
    assert_eq!(first.descriptor.own_bytes, first.descriptor.size_bytes);
    // Without prints everything is copied.
    fs::write(world.store.path(second.id).with_file_name("prints"), "no prints").unwrap();
    let third = world.layer(&session, Some(second.id));
    assert_ne!(meta(&world.tree(&third).join("same")).ino(), meta(&world.tree(&second).join("same")).ino());
}

/// Most of a disk in a directory that gets another name at the last moment.
#[test]
fn a_directory_renamed_between_the_passes_is_not_copied_again() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    for n in 0..20 {
        put(&session.path(&format!("tmp/deep/{n}")), vec![n; 10_000]);
    }
    wait_until_calm(&session.upper("tmp/deep/19"));
    let mut capture = world.capture(&session, None);
    capture.precopy().unwrap();
    assert_eq!(capture.copied_at_last(), 20);
    fs::rename(session.path("tmp"), session.path("final")).unwrap();
    let expected = listing(&session.at);
    capture.freeze().unwrap();
    assert_eq!(capture.copied_at_last(), 0, "all are linked from where they were");
    assert_same(&world.seen(&session.above(&finish(capture))), &expected, "renamed");
}

#[test]
fn a_file_with_too_many_names_is_copied() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    for name in ["single", "a"] {
        put(&session.path(name), name);
    }
    for name in ["b", "c"] {
        fs::hard_link(session.path("a"), session.path(name)).unwrap();
    }
    wait_until_calm(&session.upper("a"));
    let expected = listing(&session.at);
    let mut previous = None;
    let mut inodes = Vec::new();
    for _ in 0..3 {
        let mut capture = world.capture(&session, previous).with_bounds(SETTLE, 8);
        capture.freeze().unwrap();
        let layer = finish(capture);
        assert_same(&world.seen(&session.above(&layer)), &expected, "a copy");
        let inode = |name: &str| meta(&world.tree(&layer).join(name)).ino();
        assert_eq!([inode("b"), inode("c")], [inode("a"); 2]);
        inodes.push(inode("a"));
        previous = Some(layer.id);
    }
    assert_eq!(inodes[0], inodes[1], "six names");
    assert_ne!(inodes[1], inodes[2], "nine would be too many");
}

#[test]
fn only_a_frozen_capture_becomes_a_layer() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    put(&session.path("a"), "a");
    let finish = |capture: Capture| capture.finish(model::SessionId::new(), model::Timestamp(0));
    assert!(matches!(finish(world.capture(&session, None)), Err(LayerError::Unfrozen(_))));
    let mut capture = world.capture(&session, None);
    capture.freeze().unwrap();
    capture.precopy().unwrap();
    assert!(matches!(finish(capture), Err(LayerError::Unfrozen(_))), "programs have run since");
    let mut capture = world.capture(&session, None);
    capture.freeze().unwrap();
    drop(capture);
    assert!(all_in(&world.dir.path().join("layers")).is_empty(), "nothing is left of those");
}

/// A shared, writable mapping of a file.
struct Mapping {
    at: *mut u8,
    length: usize,
}

impl Mapping {
    fn of(path: &Path, length: usize) -> Mapping {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping, which takes the place of nothing; the kernel checks the descriptor.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Mapping { at: at.cast(), length }
    }

    fn store(&self, offset: usize, byte: u8) {
        assert!(offset < self.length);
        // SAFETY: within the mapping, which lives as long as `self`; nobody has a reference into it.
        unsafe { self.at.add(offset).write_volatile(byte) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own, and nothing refers to it.
        unsafe { libc::munmap(self.at.cast(), self.length) };
    }
}

/// The size that the project promises times for: a gigabyte in 10,000 files, of which 50 MiB in 100 files change while the
/// first pass is over and the second hasn't begun. Only the long form is of that size.
#[test]
fn the_second_pass_copies_what_changed_and_nothing_else() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    let (files, size, changed) = if is_long() { (10_000, 100_000, 100) } else { (1000, 10_000, 10) };
    let name = |n: usize| format!("d{}/e{}/file-{n}", n % 10, n % 500);
    for n in 0..files {
        put(&session.path(&name(n)), vec![n as u8; if n < changed { 512 << 10 } else { size }]);
    }
    wait_until_calm(&session.upper(&name(files - 1)));
    let mut previous = None;
    for round in 0..3u8 {
        let mut capture = world.capture(&session, previous);
        capture.precopy().unwrap();
        assert_eq!(capture.copied_at_last(), files as u64);
        for n in 0..changed {
            File::options().write(true).open(session.path(&name(n))).unwrap().write_all_at(&vec![round; 512 << 10], 0).unwrap();
        }
        capture.freeze().unwrap();
        assert_eq!(capture.copied_at_last(), changed as u64);
        wait_until_calm(&session.upper(&name(changed - 1)));
        previous = Some(finish(capture).id);
    }
}
