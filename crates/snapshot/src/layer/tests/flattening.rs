//! One layer instead of many: each thing by its name. `properties` has the random ones.

use super::world::*;
use crate::layer::{Layer, LayerError, flatten, flatten::flatten_within, xattr};
use model::LayerId;
use std::{fs, os::unix::fs::MetadataExt, path::PathBuf};

/// A chain that grows by one session after the other.
struct Chain<'a> {
    world: &'a World,
    layers: Vec<LayerId>,
    all: Vec<Layer>,
}

impl<'a> Chain<'a> {
    fn new(world: &'a World) -> Chain<'a> {
        Chain { world, layers: Vec::new(), all: Vec::new() }
    }

    fn then(&mut self, work: impl FnOnce(&Session)) -> &mut Self {
        let session = self.world.session(&self.layers);
        work(&session);
        let layer = self.world.layer(&session, None);
        session.end();
        self.layers.insert(0, layer.id);
        self.all.insert(0, layer);
        self
    }

    /// Makes one layer of all, and of each part of the chain, and compares what is seen above the template, above nothing,
    /// and below the rest of the chain.
    fn flatten(&self) -> Layer {
        let (world, all) = (self.world, &self.layers);
        let expected = world.seen(all);
        let paths = |ids: &[LayerId]| ids.iter().map(|id| world.store.path(*id)).collect::<Vec<PathBuf>>();
        for (from, to) in (0..all.len()).flat_map(|from| (from + 1..=all.len()).map(move |to| (from, to))) {
            let flat = flatten(&world.store, &all[from..to], LayerId::new()).unwrap();
            let shorter = [&all[..from], &[flat.id], &all[to..]].concat();
            assert_same(&world.seen(&shorter), &expected, &format!("layers {from} to {to} as one"));
            let bare = merged(world, &paths(&all[from..to]), listing);
            assert_same(&merged(world, &paths(&[flat.id]), listing), &bare, &format!("layers {from} to {to} above nothing"));
        }
        flatten(&world.store, all, LayerId::new()).unwrap()
    }

    fn attribute(&self, layer: &Layer, path: &str, name: &std::ffi::CStr) -> Option<Vec<u8>> {
        attributes(&self.world.tree(layer).join(path)).get(name.to_bytes()).cloned()
    }
}

#[test]
fn the_top_most_file_is_it() {
    let Some(world) = World::new() else { return };
    world.template("d/a", "template");
    world.template("d/b", "template");
    let mut chain = Chain::new(&world);
    chain.then(|s| put(&s.path("d/a"), "one")).then(|s| put(&s.path("d/a"), "two")).then(|s| put(&s.path("d/c"), "three"));
    let flat = chain.flatten();
    assert_eq!(text(&world.tree(&flat).join("d/a")), "two");
    let inodes = |layer: &Layer| meta(&world.tree(layer).join("d/a")).ino();
    assert_eq!(inodes(&flat), inodes(&chain.all[1]), "shared, not copied");
    assert_eq!(
        (flat.descriptor.session, flat.descriptor.created_at),
        (chain.all[0].descriptor.session, chain.all[0].descriptor.created_at)
    );
    assert!(!world.store.place(flat.id).join("prints").exists());
}

#[test]
fn whiteouts_are_kept_where_something_could_be_below() {
    let Some(world) = World::new() else { return };
    for name in ["d/gone", "d/back", "d/stays", "opaque/x"] {
        world.template(name, "template");
    }
    let mut chain = Chain::new(&world);
    chain.then(|s| {
        put(&s.path("d/mine"), "1");
        fs::remove_file(s.path("d/gone")).unwrap();
        fs::remove_file(s.path("d/back")).unwrap();
        fs::remove_dir_all(s.path("opaque")).unwrap();
        put(&s.path("opaque/y"), "1");
        put(&s.path("opaque/z"), "1");
    });
    chain.then(|s| {
        fs::remove_file(s.path("d/mine")).unwrap();
        put(&s.path("d/back"), "2");
        fs::remove_file(s.path("opaque/y")).unwrap();
    });
    let flat = chain.flatten();
    let tree = world.tree(&flat);
    assert_eq!(names(&tree.join("d")), ["back", "gone", "mine"], "the second could be in another template");
    assert_eq!(names(&tree.join("opaque")), ["z"], "nothing below an opaque directory needs hiding");
    assert_eq!(chain.attribute(&flat, "opaque", xattr::OPAQUE).as_deref(), Some(&b"y"[..]));
    assert_eq!(chain.attribute(&flat, "d", xattr::OPAQUE), None);
}

#[test]
fn what_replaced_something_of_another_kind_hides_it() {
    let Some(world) = World::new() else { return };
    world.template("dir/inner", "template");
    world.template("file", "template");
    let mut chain = Chain::new(&world);
    chain.then(|s| {
        fs::remove_dir_all(s.path("dir")).unwrap();
        fs::remove_file(s.path("file")).unwrap();
        put(&s.path("dir"), "a file now");
        put(&s.path("file/inner"), "a directory now");
    });
    chain.then(|s| {
        fs::remove_file(s.path("dir")).unwrap();
        put(&s.path("dir/other"), "a directory again");
        put(&s.path("file/more"), "x");
    });
    chain.then(|s| {
        fs::remove_dir_all(s.path("file")).unwrap();
        std::os::unix::fs::symlink("dir", s.path("file")).unwrap();
    });
    chain.flatten();
}

#[test]
fn redirects_are_resolved_within_the_chain_and_lead_to_the_bottom() {
    let Some(world) = World::new() else { return };
    world.template("a/b/c/file", "template");
    world.template("a/b/other", "template");
    world.template("plain/x", "template");
    let mut chain = Chain::new(&world);
    // A relative redirect, then changes beneath it, then an absolute one through it, then a move within.
    chain.then(|s| fs::rename(s.path("a/b"), s.path("a/renamed")).unwrap());
    chain.then(|s| {
        put(&s.path("a/renamed/c/new"), "2");
        put(&s.path("mine/deep/file"), "2");
    });
    chain.then(|s| {
        fs::create_dir(s.path("top")).unwrap();
        fs::rename(s.path("a/renamed/c"), s.path("top/c")).unwrap();
        fs::rename(s.path("mine"), s.path("top/mine")).unwrap();
    });
    chain.then(|s| {
        fs::rename(s.path("top/c"), s.path("top/d")).unwrap();
        fs::remove_file(s.path("top/d/file")).unwrap();
        put(&s.path("a/renamed/c/again"), "4");
    });
    let flat = chain.flatten();
    assert_eq!(chain.attribute(&flat, "a/renamed", xattr::REDIRECT).as_deref(), Some(&b"b"[..]), "relative, as it was");
    assert_eq!(chain.attribute(&flat, "top/d", xattr::REDIRECT).as_deref(), Some(&b"/a/b/c"[..]), "through the chain");
    assert_eq!(chain.attribute(&flat, "top/mine", xattr::REDIRECT), None, "all of it is in the chain");
    assert_eq!(text(&world.session(&[flat.id]).path("top/d/new")), "2");
}

#[test]
fn a_directory_that_went_and_came_back_is_not_merged_with_its_past() {
    let Some(world) = World::new() else { return };
    world.template("d/template", "template");
    let mut chain = Chain::new(&world);
    chain.then(|s| put(&s.path("d/one"), "1")).then(|s| fs::remove_dir_all(s.path("d")).unwrap());
    chain.then(|s| put(&s.path("d/three"), "3")).then(|s| put(&s.path("d/four"), "4"));
    let flat = chain.flatten();
    assert_eq!(names(&world.tree(&flat).join("d")), ["four", "three"]);
}

#[test]
fn two_directories_that_changed_places_did() {
    let Some(world) = World::new() else { return };
    world.template("a/of-a", "template");
    world.template("b/of-b", "template");
    let mut chain = Chain::new(&world);
    for _ in 0..3 {
        chain.then(|s| {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(rustix::fs::CWD, s.path("a"), rustix::fs::CWD, s.path("b"), flags).unwrap();
        });
    }
    let flat = chain.flatten();
    assert_eq!(names(&world.session(&[flat.id]).path("a")), ["of-b"]);
}

#[test]
fn names_of_one_file_stay_that_in_one_layer() {
    let Some(world) = World::new() else { return };
    let mut chain = Chain::new(&world);
    chain.then(|s| {
        put(&s.path("a"), "1");
        fs::create_dir(s.path("d")).unwrap();
        for name in ["b", "d/c"] {
            fs::hard_link(s.path("a"), s.path(name)).unwrap();
        }
    });
    chain.then(|s| put(&s.path("b"), "2"));
    chain.flatten();
    // The same where the files have too many names to share, which makes them copies.
    for (links_max, is_shared) in [(60_000, true), (1, false)] {
        let flat = flatten_within(&world.store, &chain.layers, LayerId::new(), links_max).unwrap();
        let inode = |layer: &Layer, name: &str| meta(&world.tree(layer).join(name)).ino();
        assert_eq!(inode(&flat, "a"), inode(&flat, "d/c"));
        assert_eq!(inode(&flat, "a") == inode(&chain.all[1], "a"), is_shared);
        assert_eq!((text(&world.tree(&flat).join("a")), text(&world.tree(&flat).join("b"))), ("1".into(), "2".into()));
    }
}

#[test]
fn a_chain_that_cannot_be_one_says_why() {
    let Some(world) = World::new() else { return };
    let new = LayerId::new();
    assert!(matches!(flatten(&world.store, &[], new), Err(LayerError::NoChain)));
    assert!(matches!(flatten(&world.store, &[new], new), Err(LayerError::Missing(_))));
    let mut chain = Chain::new(&world);
    chain.then(|s| put(&s.path("d/a"), "1"));
    rustix::fs::lremovexattr(world.tree(&chain.all[0]).join("d"), xattr::OPAQUE).unwrap();
    for target in ["", "/", "//a", "/a//b", "a/b", "..", "/a/../b", "/a/"] {
        set_attribute(&world.tree(&chain.all[0]).join("d"), "trusted.overlay.redirect", target).unwrap();
        let refused = flatten(&world.store, &chain.layers, new);
        let is_right = matches!(&refused, Err(LayerError::Damaged { what, .. }) if what.contains("d is redirected"));
        assert!(is_right, "{target}: {refused:?}");
    }
    assert_eq!(world.store.list().unwrap(), chain.layers, "nothing is left of what failed");
}

/// The oldest chain that a session gets, and then some, above guest and template: at rest, mounted, and as one layer.
#[test]
fn a_disk_above_a_long_chain_can_be_read() {
    use crate::view::DiskView;
    use std::io::Read;
    let Some(world) = World::new() else { return };
    world.template("etc/template", "template");
    world.template("moving-0/inner", "template");
    put(&world.bottom[0].join("etc/guest"), "guest");
    let mut chain = Chain::new(&world);
    for n in 0..20 {
        chain.then(|s| {
            put(&s.path(&format!("etc/{n}")), format!("layer {n}"));
            put(&s.path("same"), format!("layer {n}"));
            fs::rename(s.path(&format!("moving-{n}")), s.path(&format!("moving-{}", n + 1))).unwrap();
        });
    }
    let session = world.session(&chain.layers);
    put(&session.path("own"), "own");
    let expected = listing(&session.at);
    session.unmount();
    let flat = flatten(&world.store, &chain.layers, LayerId::new()).unwrap();
    for layers in [&chain.layers[..], &[flat.id]] {
        let view = DiskView::open(&world.lower(layers), &session.disk.upper()).unwrap();
        let read = |path: &str| {
            let mut text = String::new();
            view.read(path).unwrap().0.read_to_string(&mut text).unwrap();
            text
        };
        assert_eq!([read("/own"), read("/etc/template"), read("/etc/guest")], ["own", "template", "guest"]);
        assert_eq!((read("/etc/0"), read("/etc/19"), read("/same")), ("layer 0".into(), "layer 19".into(), "layer 19".into()));
        assert_eq!(read("/moving-20/inner"), "template", "{} layers", layers.len());
        assert_eq!(view.list("/etc", 1).unwrap().len(), 22);
    }
    assert_eq!(expected.len(), 28);
    session.mount(&world);
}
