//! What was unpacked gets its place under its name, once it is known to deserve it.

use super::world::*;
use crate::{
    Hash,
    layer::{Capture, LayerDescriptor, LayerError, LayerStore},
    parcel::remove,
    pin::{BinaryStore, GUEST_PATH, PinError},
    template::{Descriptor, TemplateError, TemplateKind, TemplateStore},
};
use model::{LayerId, SessionId, Timestamp};
use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::Path,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_layer_comes_back_into_its_place() {
    if !is_root() {
        return;
    }
    let world = World::new().await;
    let (here, there) = (LayerStore::open(world.path("here")).unwrap(), LayerStore::open(world.path("there")).unwrap());
    let upper = world.empty("upper");
    super::special::fill(&upper);
    // Layers have whiteouts for these.
    fs::remove_file(upper.join("fifo")).unwrap();
    fs::remove_file(upper.join("fifo too")).unwrap();
    let mut capture = Capture::begin(&here, LayerId::new(), &upper, None).unwrap();
    capture.freeze().unwrap();
    let layer = capture.finish(SessionId::new(), Timestamp(1_700_000_000_000)).unwrap();
    let before = listing(&here.path(layer.id));
    let (tree, _) = world.pack(&here.path(layer.id)).await;
    assert_eq!(tree.entries, layer.descriptor.entries);

    let unpacked = world.unpack(&tree, "unpacked").await.unwrap();
    let adopted = there.adopt(layer.id, &layer.descriptor, &unpacked).unwrap();
    assert_eq!((there.read(layer.id).unwrap(), unpacked.exists()), (adopted.clone(), false));
    assert_eq!(adopted.descriptor.own_bytes, adopted.descriptor.size_bytes);
    let LayerDescriptor { session, created_at, entries, .. } = adopted.descriptor;
    assert_eq!((session, created_at, entries), (layer.descriptor.session, layer.descriptor.created_at, layer.descriptor.entries));
    assert_same(&listing(&there.path(layer.id)), &before, "adopted");
    // Once more: what is there stays, and what was brought goes.
    let unpacked = world.unpack(&tree, "unpacked").await.unwrap();
    assert_eq!(there.adopt(layer.id, &layer.descriptor, &unpacked).unwrap(), adopted);
    assert!(!unpacked.exists());
    // The next capture goes on above it, and shares nothing.
    let mut capture = Capture::begin(&there, LayerId::new(), &upper, Some(layer.id)).unwrap();
    capture.freeze().unwrap();
    let next = capture.finish(SessionId::new(), Timestamp(1_700_000_000_001)).unwrap();
    assert_eq!(next.descriptor.own_bytes, next.descriptor.size_bytes);

    let unpacked = world.unpack(&tree, "unpacked").await.unwrap();
    let wrong = LayerDescriptor { entries: 1, ..layer.descriptor };
    let refused = there.adopt(LayerId::new(), &wrong, &unpacked);
    assert!(matches!(&refused, Err(LayerError::Io { what: "describe", .. })), "{refused:?}");
    assert!(!unpacked.exists());
    assert_eq!(there.list().unwrap().len(), 2);
    let missing = there.adopt(LayerId::new(), &wrong, &world.path("none"));
    assert!(matches!(&missing, Err(LayerError::Io { what: "move", .. })), "{missing:?}");
    assert_eq!(fs::read_dir(world.path("there")).unwrap().count(), 2, "nothing half-made is left");
}

async fn template(world: &World) -> (TemplateStore, Descriptor) {
    let here = TemplateStore::open(world.path("here")).unwrap();
    put(&world.path("source/usr/bin/tool"), random(100_000, 1));
    mode(&world.path("source/usr/bin/tool"), 0o4755);
    symlink("tool", world.path("source/usr/bin/link")).unwrap();
    make(&world.path("source/fifo"), rustix::fs::FileType::Fifo, 0);
    let found = here.add_dir("mine", &world.path("source")).unwrap();
    let descriptor = here.descriptor(found.hash).unwrap();
    (here, descriptor)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_template_comes_back_under_its_address() {
    let world = World::new().await;
    let (here, descriptor) = template(&world).await;
    let root = here.resolve("mine").unwrap().root_path;
    let (tree, _) = world.pack(&root).await;
    let there = TemplateStore::open(world.path("there")).unwrap();
    let unpacked = world.unpack(&tree, "unpacked").await.unwrap();
    let adopted = there.adopt(&descriptor, &unpacked, "server-1").unwrap();
    assert_eq!((adopted.hash, adopted.name.as_str(), unpacked.exists()), (descriptor.hash, "mine", false));
    assert_eq!(there.descriptor(adopted.hash).unwrap(), descriptor);
    assert_same(&listing(&adopted.root_path), &listing(&root), "adopted");
    // It has no name, and stays because it is pinned.
    assert!(there.list().unwrap().is_empty() && there.resolve("mine").is_err());
    assert_eq!(there.collect().unwrap().trees, []);
    assert_eq!(there.pinned_by("server-1").unwrap(), [descriptor.hash]);
    let unpacked = world.unpack(&tree, "unpacked").await.unwrap();
    assert_eq!(there.adopt(&descriptor, &unpacked, "server-2").unwrap(), adopted);
    assert_eq!(there.pinned_by("server-2").unwrap(), [descriptor.hash]);
    for who in ["server-1", "server-2"] {
        there.unpin(descriptor.hash, who).unwrap();
    }
    assert_eq!(there.collect().unwrap().trees, [descriptor.hash]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_that_is_another_is_no_template() {
    if !is_root() {
        return;
    }
    let world = World::new().await;
    let (here, descriptor) = template(&world).await;
    let (tree, _) = world.pack(&here.resolve("mine").unwrap().root_path).await;
    let there = TemplateStore::open(world.path("there")).unwrap();
    let changes: [&dyn Fn(&Path); 6] = [
        &|root| put(&root.join("usr/bin/tool"), "evil"),
        &|root| put(&root.join("one more"), ""),
        &|root| mode(&root.join("usr"), 0o777),
        // An address says nothing of these, and in a layer they would show other files than the tree has.
        &|root| set_attribute(&root.join("usr"), "trusted.overlay.redirect", "/etc"),
        &|root| make(&root.join("usr/gone"), rustix::fs::FileType::CharacterDevice, 0),
        &|root| fs::remove_file(root.join("fifo")).unwrap(),
    ];
    for (number, change) in changes.iter().enumerate() {
        let unpacked = world.unpack(&tree, "unpacked").await.unwrap();
        change(&unpacked);
        let refused = there.adopt(&descriptor, &unpacked, "server");
        assert!(matches!(&refused, Err(TemplateError::Damaged { .. } | TemplateError::Tree(_))), "{number}: {refused:?}");
        assert!(there.resolve(&descriptor.hash.to_string()).is_err() && there.pinned_by("server").unwrap().is_empty());
        remove(&unpacked).unwrap();
        assert_eq!(fs::read_dir(world.path("there/tmp")).unwrap().count(), 0);
    }
    let unpacked = world.unpack(&tree, "unpacked").await.unwrap();
    let newer = Descriptor { format_version: 99, ..descriptor.clone() };
    assert!(matches!(there.adopt(&newer, &unpacked, "server"), Err(TemplateError::Newer { version: 99, .. })));
    let unnamed = Descriptor { made_as: "../x".to_owned(), ..descriptor.clone() };
    assert!(matches!(there.adopt(&unnamed, &unpacked, "server"), Err(TemplateError::BadName(_))));
    // The address of a machine is nobody's to claim.
    let host = Descriptor { kind: TemplateKind::Host, hash: Hash::of(b"a machine"), ..descriptor.clone() };
    let adopted = there.adopt(&host, &unpacked, "server").unwrap();
    assert_eq!(adopted.hash, descriptor.hash);
    assert_eq!(there.descriptor(adopted.hash).unwrap().kind, TemplateKind::Dir);
    assert!(there.verify_host(adopted.hash).unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_s_layer_comes_back_as_it_was() {
    let world = World::new().await;
    let (here, there) = (BinaryStore::open(world.path("here")).unwrap(), BinaryStore::open(world.path("there")).unwrap());
    let guest = random(50_000, 3);
    let (hash, layer) = (Hash::of(&guest), here.guest_layer(&guest).unwrap());
    modified(&layer.join(&GUEST_PATH[1..]), 1_000_000_000, 5);
    let (tree, _) = world.pack(&layer).await;
    let unpack = async |changed: &dyn Fn(&Path)| {
        let unpacked = world.unpack(&tree, "unpacked").await.unwrap();
        changed(&unpacked);
        unpacked
    };
    let changes: [&dyn Fn(&Path); 6] = [
        &|root| put(&root.join(&GUEST_PATH[1..]), "evil"),
        &|root| put(&root.join("usr/bin/git"), "evil"),
        &|root| symlink(GUEST_PATH, root.join("usr/bin/git")).unwrap(),
        &|root| {
            fs::remove_file(root.join("usr/bin/sudo")).unwrap();
            symlink("/tmp/evil", root.join("usr/bin/sudo")).unwrap();
        },
        &|root| mode(&root.join("usr/bin"), 0o777),
        &|root| fs::create_dir(root.join("etc")).unwrap(),
    ];
    for (number, change) in changes.iter().enumerate() {
        let unpacked = unpack(*change).await;
        let refused = there.adopt_layer(hash, &unpacked);
        assert!(matches!(&refused, Err(PinError::NoLayer { .. })), "{number}: {refused:?}");
        assert!(there.layer_of(hash).is_err());
        remove(&unpacked).unwrap();
    }
    // From an older version, which had fewer names.
    let unpacked = unpack(&|root| fs::remove_file(root.join("usr/bin/systemctl")).unwrap()).await;
    let adopted = there.adopt_layer(hash, &unpacked).unwrap();
    assert_eq!((there.layer_of(hash).unwrap(), unpacked.exists()), (adopted.clone(), false));
    // A restore compares the times.
    assert_eq!(fs::metadata(adopted.join(&GUEST_PATH[1..])).unwrap().mtime(), 1_000_000_000);
    let unpacked = unpack(&|_| ()).await;
    assert_eq!(there.adopt_layer(hash, &unpacked).unwrap(), adopted);
}

#[test]
fn a_program_has_to_be_the_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = BinaryStore::open(dir.path().join("store")).unwrap();
    let file = dir.path().join("unpacked");
    put(&file, "a program");
    let hash = Hash::of(b"a program");
    let other = store.adopt(Hash::of(b"another"), "runsc", &file);
    assert!(matches!(&other, Err(PinError::Other { found, .. }) if *found == hash), "{other:?}");
    assert!(store.get(hash).is_err() && store.get(Hash::of(b"another")).is_err());
    assert!(matches!(store.adopt(hash, "../runsc", &file), Err(PinError::BadName(_))));
    let pinned = store.adopt(hash, "runsc", &file).unwrap();
    assert_eq!((contents(&pinned.path), pinned.path.file_name().unwrap().to_str()), (b"a program".to_vec(), Some("runsc")));
    // The next time nothing needs to be there.
    assert_eq!(store.adopt(hash, "runsc", &dir.path().join("none")).unwrap(), pinned);
}
