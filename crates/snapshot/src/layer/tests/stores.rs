//! The folder of layers: descriptors, removal, leftovers, sizes.

use super::world::*;
use crate::layer::{LayerError, LayerStore, clear, prints::Previous, staging::try_lock};
use model::LayerId;
use std::{
    collections::HashSet,
    ffi::OsStr,
    fs::{self, File},
    os::{fd::AsFd, unix::fs::MetadataExt},
};

#[test]
fn a_layer_reads_back_as_it_was_described() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    put(&session.path("d/a"), vec![1; 100_000]);
    let first = world.layer(&session, None);
    let second = world.layer(&session, Some(first.id));
    assert_eq!(world.store.read(first.id).unwrap(), first);
    assert_eq!(first.descriptor.entries, 2);
    assert!((100_000..200_000).contains(&first.descriptor.size_bytes), "{first:?}");
    assert_eq!(world.store.list().unwrap(), [first.id, second.id]);
    let elsewhere = LayerStore::open(world.dir.path().join("layers")).unwrap();
    assert_eq!(elsewhere.path(first.id), world.store.path(first.id));
    assert_eq!(meta(&world.dir.path().join("layers")).mode() & 0o777, 0o700);
}

#[test]
fn every_flipped_byte_of_a_descriptor_is_noticed() {
    let Some(world) = World::new() else { return };
    let layer = world.layer(&world.session(&[]), None);
    let path = world.store.place(layer.id).join("layer.json");
    let good = fs::read(&path).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x01;
        fs::write(&path, &bad).unwrap();
        let read = world.store.read(layer.id);
        assert!(read.is_err() || read.unwrap() == layer, "byte {at}");
    }
    fs::write(&path, String::from_utf8(good.clone()).unwrap().replace("\"format\":1", "\"format\":2")).unwrap();
    assert!(matches!(world.store.read(layer.id), Err(LayerError::Newer { found: 2, newest: 1, .. })));
    fs::write(&path, vec![b' '; 1 << 20]).unwrap();
    assert!(matches!(world.store.read(layer.id), Err(LayerError::Damaged { what, .. }) if what.contains("longer")));
    // Another's descriptor, and one without its files.
    let other = LayerId::new();
    fs::write(&path, &good).unwrap();
    fs::rename(world.store.place(layer.id), world.store.place(other)).unwrap();
    let mixed = world.store.read(other);
    assert!(matches!(&mixed, Err(LayerError::Damaged { what, .. }) if what.contains(&layer.id.to_string())), "{mixed:?}");
    fs::rename(world.store.place(other), world.store.place(layer.id)).unwrap();
    fs::remove_dir_all(world.store.path(layer.id)).unwrap();
    assert!(matches!(world.store.read(layer.id), Err(LayerError::Damaged { .. })));
    assert!(matches!(world.store.read(other), Err(LayerError::Missing(id)) if id == other));
}

/// The prints decide what is shared, so no damage to them may decide it otherwise.
#[test]
fn damaged_prints_share_nothing() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    put(&session.path("d/a"), "a");
    wait_until_calm(&session.upper("d/a"));
    let first = world.layer(&session, None);
    let path = world.store.place(first.id).join("prints");
    let good = fs::read(&path).unwrap();
    let is_shared = || Previous::read(&world.store.place(first.id), &world.store.path(first.id)).is_ok();
    assert!(is_shared());
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        fs::write(&path, &bad).unwrap();
        assert!(!is_shared(), "byte {at}");
        fs::write(&path, &good[..at]).unwrap();
        assert!(!is_shared(), "cut at {at}");
    }
    // With whatever prints, a capture is right.
    let mut capture = world.capture(&session, Some(first.id));
    capture.precopy().unwrap();
    capture.freeze().unwrap();
    assert_eq!(text(&world.tree(&finish(capture)).join("d/a")), "a");
}

#[test]
fn removing_a_layer_breaks_no_other() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    for n in 0..3 {
        put(&session.path(&format!("file-{n}")), vec![n; 40_000]);
    }
    wait_until_calm(&session.upper("file-2"));
    let mut layers = vec![world.layer(&session, None)];
    for n in 1..3 {
        put(&session.path(&format!("file-{n}")), vec![n + 10; 40_000]);
        wait_until_calm(&session.upper(&format!("file-{n}")));
        layers.push(world.layer(&session, layers.last().map(|l| l.id)));
    }
    let ids: Vec<LayerId> = layers.iter().map(|l| l.id).collect();
    let before: Vec<Listing> = layers.iter().map(|l| raw(&world.tree(l))).collect();
    let unique = |ids: &[LayerId]| world.store.unique_bytes(ids).unwrap();
    // What the second changed the third has, too; the first two share what the third changed.
    assert!(unique(&ids[1..2]) < 40_000, "{}", unique(&ids[1..2]));
    assert!((40_000..80_000).contains(&unique(&ids[..1])), "{}", unique(&ids[..1]));
    assert!((80_000..120_000).contains(&unique(&ids[..2])), "{}", unique(&ids[..2]));
    assert_eq!(unique(&ids), unique(&[ids[2], ids[0], ids[1], ids[0]]), "neither order nor repetition matters");
    world.store.remove(ids[1]).unwrap();
    world.store.remove(ids[1]).unwrap();
    assert!(matches!(world.store.unique_bytes(&ids[1..2]), Err(LayerError::Missing(id)) if id == ids[1]));
    assert_eq!(world.store.list().unwrap(), [ids[0], ids[2]]);
    for at in [0, 2] {
        assert_same(&raw(&world.tree(&layers[at])), &before[at], "a layer whose neighbour is gone");
    }
    // The next capture shares with the last one as before, and one whose previous layer is gone copies.
    let shared = world.layer(&session, Some(ids[2]));
    assert!(shared.descriptor.own_bytes < 40_000, "{shared:?}");
    let copied = world.layer(&session, Some(ids[1]));
    assert_eq!(copied.descriptor.own_bytes, copied.descriptor.size_bytes);
}

#[test]
fn leftovers_of_every_kind_are_swept_and_nothing_else() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    put(&session.path("d/a"), "a");
    let (kept, unknown) = (world.layer(&session, None), world.layer(&session, None));
    let place = |name: &str| world.dir.path().join("layers").join(name);
    let mut alive = world.capture(&session, Some(kept.id));
    alive.precopy().unwrap();
    let (dead, half_gone, torn) = (LayerId::new(), LayerId::new(), LayerId::new());
    put(&place(&format!(".new-{dead}/tree/x/y")), "x");
    put(&place(&format!(".gone-{half_gone}/tree/x/y")), "x");
    put(&place(&format!("{torn}/tree/x/y")), "x");
    put(&place("others"), "no layer");
    assert_eq!(world.store.list().unwrap(), [kept.id, unknown.id], "what has no descriptor is none");

    let keep = HashSet::from([kept.id]);
    let swept: HashSet<LayerId> = world.store.sweep_leftovers(&keep).unwrap().into_iter().collect();
    assert_eq!(swept, HashSet::from([dead, half_gone, torn, unknown.id]));
    assert_eq!(world.store.list().unwrap(), [kept.id]);
    assert_eq!(text(&place("others")), "no layer");
    alive.freeze().unwrap();
    let alive = finish(alive);
    assert_eq!(text(&world.tree(&alive).join("d/a")), "a", "one that was being made was left alone");
    assert_eq!(world.store.sweep_leftovers(&HashSet::from([kept.id, alive.id])).unwrap(), []);
}

/// A supervisor that dies, and is asked for the same layer again.
#[test]
fn a_layer_is_made_by_one_at_a_time_and_again_after_a_crash() {
    let Some(world) = World::new() else { return };
    let session = world.session(&[]);
    put(&session.path("a"), "a");
    let id = LayerId::new();
    let begin = || crate::layer::Capture::begin(&world.store, id, &session.disk.upper(), None);
    let first = begin().unwrap();
    let busy = begin();
    assert!(matches!(&busy, Err(error) if error.io().unwrap().kind() == std::io::ErrorKind::AlreadyExists), "{busy:?}");
    drop(first);
    put(&world.dir.path().join(format!("layers/.new-{id}/tree/old")), "of a dead one");
    let mut second = begin().unwrap();
    second.freeze().unwrap();
    let layer = finish(second);
    assert_eq!(names(&world.tree(&layer)), ["a"]);
    let lock = try_lock(&world.store.place(id)).unwrap();
    assert!(lock.is_some(), "a finished layer is nobody's");
    let mut third = begin().unwrap();
    third.freeze().unwrap();
    let refused = third.finish(model::SessionId::new(), model::Timestamp(0));
    assert!(refused.is_err(), "a layer is never replaced");
    assert_eq!(world.store.read(id).unwrap(), layer);
}

#[test]
fn a_tree_is_removed_however_it_is_made() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["t/.hoisted-1/a/b", "t/a/.hoisted-1/c", "t/a/b/c/d/e", "t/x"] {
        put(&dir.path().join(name), "x");
    }
    put(&dir.path().join("outside/file"), "stays");
    std::os::unix::fs::symlink(dir.path().join("outside"), dir.path().join("t/a/link")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("outside"), dir.path().join("link")).unwrap();
    let parent = File::open(dir.path()).unwrap();
    for name in ["t", "t", "link", "outside/file"] {
        clear::remove(parent.as_fd(), OsStr::new(name)).unwrap();
        assert!(is_gone(&dir.path().join(name)), "{name}");
        assert_eq!(name == "outside/file", is_gone(&dir.path().join("outside/file")), "{name}");
    }
}
