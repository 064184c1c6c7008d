//! Disks that somebody made, or changes meanwhile, to do harm.

use super::world::*;
use crate::layer::{LayerError, flatten};
use model::LayerId;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, mkdirat, openat, renameat_with, symlinkat};
use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

/// Directories within directories, further than any path reaches; a file in the innermost.
fn dig(at: &Path, name: &str, levels: usize) -> OwnedFd {
    let open = |dir: &OwnedFd, name: &str| openat(dir, name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    let mut dir: OwnedFd = fs::File::open(at).unwrap().into();
    for _ in 0..levels {
        mkdirat(&dir, name, Mode::RWXU).unwrap();
        dir = open(&dir, name);
    }
    drop(openat(&dir, "file", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).unwrap());
    dir
}

/// How many levels there are, and whether the file is in the last.
fn depth(at: &Path, name: &str) -> (usize, bool) {
    let mut dir: OwnedFd = fs::File::open(at).unwrap().into();
    for level in 0.. {
        match openat(&dir, name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()) {
            Ok(next) => dir = next,
            Err(_) => return (level, rustix::fs::statat(&dir, "file", AtFlags::SYMLINK_NOFOLLOW).is_ok()),
        }
    }
    unreachable!("a tree has an end")
}

#[test]
fn paths_longer_than_any_path_are_kept() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    let long = "n".repeat(255);
    dig(&session.at, &long, 40);
    // More levels than a process usually may have open files.
    let levels = if is_long() { 3000 } else { 1100 };
    let inner = dig(&session.at, "d", levels);
    wait_until_calm(&session.upper("d"));
    let mut capture = world.capture(&session, None);
    capture.precopy().unwrap();
    drop(openat(&inner, "late", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).unwrap());
    drop(inner);
    capture.freeze().unwrap();
    let first = finish(capture);
    let entries = (40 + 1 + levels + 2) as u64;
    assert_eq!(first.descriptor.entries, entries);
    // The second is shared with the first; and both as one.
    let second = world.layer(&session, Some(first.id));
    let flat = flatten(&world.store, &[second.id, first.id], LayerId::new()).unwrap();
    for layer in [&first, &second, &flat] {
        assert_eq!(depth(&world.tree(layer), &long), (40, true));
        assert_eq!(depth(&world.tree(layer), "d"), (levels, true));
        assert!(world.store.unique_bytes(&[layer.id]).unwrap() > levels as u64 * 4096);
        assert_eq!(layer.descriptor.entries, entries);
    }
    // Nor can it get in the way of its removal.
    for layer in [&first, &second, &flat] {
        world.store.remove(layer.id).unwrap();
    }
    assert!(all_in(&world.dir.path().join("layers")).is_empty());
    let mine = fs::File::open(world.dir.path()).unwrap();
    let own = session.at.parent().unwrap().to_owned();
    drop(session);
    crate::layer::clear::remove(mine.as_fd(), own.file_name().unwrap()).unwrap();
}

/// While the disk is copied somebody exchanges directories for symlinks that lead out of it, files for FIFOs and devices,
/// and moves what is being walked somewhere else.
#[test]
fn nothing_from_outside_gets_into_a_layer() {
    let Some(world) = World::new() else { return };
    let secret = world.dir.path().join("secret");
    put(&secret.join("f"), "secret");
    put(&secret.join("sub/f"), "secret");
    let session = world.session(&[]);
    // Right in the upper directory, which is as close as anybody could come.
    let upper = session.disk.upper();
    for n in 0..8 {
        for m in 0..8 {
            put(&upper.join(format!("d{n}/sub/f{m}")), "plain");
        }
        put(&upper.join(format!("d{n}/f")), "plain");
        symlinkat(&secret, CWD, upper.join(format!("s{n}"))).unwrap();
        symlinkat(secret.join("f"), CWD, upper.join(format!("l{n}"))).unwrap();
        let fifo = nix::sys::stat::SFlag::S_IFIFO;
        nix::sys::stat::mknod(&upper.join(format!("p{n}")), fifo, nix::sys::stat::Mode::S_IRUSR, 0).unwrap();
    }
    // By descriptors: this one, too, mustn't go through its own symlinks, or it would carry the secret in by itself.
    let open = |path: String| -> OwnedFd { fs::File::open(upper.join(path)).unwrap().into() };
    let (top, dirs): (OwnedFd, Vec<OwnedFd>) = (open(String::new()), (0..8).map(|n| open(format!("d{n}"))).collect());
    let subs: Vec<OwnedFd> = (0..8).map(|n| open(format!("d{n}/sub"))).collect();
    let exchange = |a: &OwnedFd, name: &str, b: &OwnedFd, other: &str| {
        let _ = renameat_with(a, name, b, other, rustix::fs::RenameFlags::EXCHANGE);
    };
    let is_over = AtomicBool::new(false);
    let mut captures = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..8).cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
                let (dir, sub, link) = (&dirs[n], &subs[n], format!("l{n}"));
                exchange(&top, &format!("d{n}"), &top, &format!("s{n}"));
                exchange(dir, "sub", &top, &link);
                exchange(dir, "f", &top, &format!("p{n}"));
                exchange(sub, &format!("f{n}"), &top, &link);
                exchange(dir, "sub", &dirs[(n + 1) % 8], "sub");
                drop(openat(sub, "new", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR));
                let _ = rustix::fs::unlinkat(sub, "new", AtFlags::empty());
            }
        });
        for _ in 0..6 {
            let mut capture = world.capture(&session, None);
            // Everything is calm, so that everything is copied at once.
            capture = capture.with_bounds(std::time::Duration::ZERO, LINKS_MAX);
            for _ in 0..4 {
                capture.precopy().unwrap();
            }
            captures.push(capture);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let last = captures.pop().unwrap();
    assert!(raw_text(&world.dir.path().join("layers")).iter().any(|(_, text)| text == "plain"));
    assert!(raw_text(&world.dir.path().join("layers")).iter().all(|(_, text)| text != "secret"));
    drop(captures);
    let mut last = last.with_bounds(SETTLE, LINKS_MAX);
    let expected = raw_text(&upper);
    last.freeze().unwrap();
    let layer = finish(last);
    assert_eq!(raw_text(&world.tree(&layer)), expected, "once all is still the copy is exact");
}

/// The regular files of a tree.
fn raw_text(root: &Path) -> Vec<(String, String)> {
    let files =
        walkdir::WalkDir::new(root).sort_by_file_name().into_iter().map(Result::unwrap).filter(|e| e.file_type().is_file());
    let relative = |path: &Path| path.strip_prefix(root).unwrap().display().to_string();
    files.map(|e| (relative(e.path()), text(e.path()))).collect()
}

#[test]
fn a_disk_that_moves_while_it_should_stand_still_is_refused() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    for n in 0..200 {
        put(&session.path(&format!("d/{n}")), "x");
    }
    let is_over = AtomicBool::new(false);
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..).take_while(|_| !is_over.load(Ordering::Relaxed)) {
                let _ = fs::rename(session.path(&format!("d/{}", n % 200)), session.path(&format!("d/moved-{}", n % 200)));
                let _ = fs::rename(session.path(&format!("d/moved-{}", n % 200)), session.path(&format!("d/{}", n % 200)));
            }
        });
        // Not every walk meets a change; one of many does.
        let refused = (0..500).find_map(|_| world.capture(&session, None).freeze().err());
        is_over.store(true, Ordering::Relaxed);
        refused
    });
    assert!(matches!(&refused, Some(LayerError::Moved { path }) if path.starts_with(session.upper("d"))), "{refused:?}");
}
