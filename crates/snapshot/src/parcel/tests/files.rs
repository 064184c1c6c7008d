//! Memory images, programs, journals.

use super::world::*;
use crate::{
    image::{DISK, ImageDescriptor, ImageError, Needs, STARTED},
    parcel::{ParcelError, pack_file, pack_files, pack_image, unpack_file, unpack_files, unpack_image},
};
use model::{Generation, SessionId, Timestamp};
use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::Path,
};

/// An image with so many pages, as a hibernate leaves it.
pub(super) fn image(dir: &Path, pages: usize) -> ImageDescriptor {
    let mut memory = random(4096 * pages, 5);
    memory[4096 * 10..4096 * 12].fill(0);
    put(&dir.join("pages.img"), memory);
    put(&dir.join("checkpoint.img"), random(10_000, 6));
    put(&dir.join("works"), "{}");
    let needs = Needs { runsc_hash: "r", runsc_version: "20240729.0", guest_hash: "g", template_hash: "t" };
    let lower = vec![dir.to_owned()];
    let described =
        ImageDescriptor::of(dir, SessionId::new(), Generation(3), Timestamp(1_700_000_000_000), needs, lower).unwrap();
    described.write(dir).unwrap();
    described
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_comes_back_without_what_belongs_to_its_place() {
    let world = World::new().await;
    let dir = world.empty("image");
    let described = image(&dir, 40);
    for extra in [STARTED, DISK, ".image.json"] {
        put(&dir.join(extra), "not of it");
    }
    let writer = world.repository.writer().unwrap();
    let packed = pack_image(&dir, &writer).await.unwrap();
    let names: Vec<&str> = packed.files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["checkpoint.img", "image.json", "pages.img", "works"]);
    // Another with two pages more in its middle: pages are found again.
    let other = world.empty("other");
    image(&other, 40);
    let mut memory = contents(&dir.join("pages.img"));
    memory.splice(4096 * 20..4096 * 20, random(8192, 9));
    put(&other.join("pages.img"), memory);
    fs::remove_file(other.join("image.json")).unwrap();
    image_descriptor(&other);
    let before = writer.finish().await.unwrap();
    let second = pack_image(&other, &writer).await.unwrap();
    let after = writer.finish().await.unwrap();
    assert!(after.new_bytes - before.new_bytes < 30_000, "{before:?} {after:?}");

    for (image, from, into) in [(&packed, &dir, "back"), (&second, &other, "other back")] {
        let into = world.path(into);
        unpack_image(&world.repository, image, &into).await.unwrap();
        for name in &names {
            assert!(contents(&into.join(name)) == contents(&from.join(name)), "{name}");
        }
        assert!([STARTED, DISK].iter().all(|name| !into.join(name).exists()));
        let meta = fs::metadata(into.join("pages.img")).unwrap();
        assert_eq!((meta.mode() & 0o777, fs::metadata(&into).unwrap().mode() & 0o777), (0o600, 0o700));
    }
    assert_eq!(ImageDescriptor::read(&world.path("back")).unwrap(), described);
}

fn image_descriptor(dir: &Path) {
    let needs = Needs { runsc_hash: "r", runsc_version: "1", guest_hash: "g", template_hash: "t" };
    let described = ImageDescriptor::of(dir, SessionId::new(), Generation(4), Timestamp(0), needs, Vec::new()).unwrap();
    described.write(dir).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_isnt_whole_is_neither_packed_nor_unpacked() {
    let world = World::new().await;
    let dir = world.empty("image");
    image(&dir, 20);
    let writer = world.repository.writer().unwrap();
    let packed = pack_image(&dir, &writer).await.unwrap();
    writer.finish().await.unwrap();
    let into = world.path("back");
    for left_out in 0..packed.files.len() {
        let mut image = packed.clone();
        image.files.remove(left_out);
        let refused = unpack_image(&world.repository, &image, &into).await;
        assert!(matches!(&refused, Err(ParcelError::Image(_))), "{left_out}: {refused:?}");
        assert!(refused.unwrap_err().is_loss() && !into.exists());
    }
    for wrong in [STARTED, DISK, ".hidden", "..", "a/b", "", "nul\0", &"n".repeat(256)] {
        let mut image = packed.clone();
        image.files[0].0 = wrong.to_owned();
        let refused = unpack_image(&world.repository, &image, &into).await;
        assert!(matches!(&refused, Err(ParcelError::Damaged(_))), "{wrong}: {refused:?}");
        assert!(!into.exists());
    }
    let mut twice = packed.clone();
    twice.files[0].0 = twice.files[1].0.clone();
    assert!(matches!(unpack_image(&world.repository, &twice, &into).await, Err(ParcelError::Io { what: "create", .. })));
    fs::remove_file(dir.join("image.json")).unwrap();
    assert!(matches!(pack_image(&dir, &writer).await, Err(ParcelError::Image(ImageError::Missing(_)))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_files_come_back() {
    let world = World::new().await;
    let writer = world.repository.writer().unwrap();
    for (name, length) in [("empty", 0), ("short", 10), ("long", 3_000_000)] {
        put(&world.path(name), random(length, 1));
        let stream = pack_file(&world.path(name), &writer).await.unwrap();
        writer.finish().await.unwrap();
        let back = world.path(&format!("{name} back"));
        unpack_file(&world.repository, &stream, &back, 0o4755).await.unwrap();
        assert!(contents(&back) == contents(&world.path(name)));
        assert_eq!(fs::metadata(&back).unwrap().mode() & 0o7777, 0o4755);
        let there = unpack_file(&world.repository, &stream, &back, 0o600).await;
        assert!(matches!(&there, Err(ParcelError::Io { what: "create", .. })), "{there:?}");
        assert!(back.exists());
    }
    symlink(world.path("short"), world.path("link")).unwrap();
    make(&world.path("fifo"), rustix::fs::FileType::Fifo, 0);
    for wrong in ["link", "fifo", "none", ""] {
        assert!(matches!(pack_file(&world.path(wrong), &writer).await, Err(ParcelError::Io { what: "open", .. })), "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segments_of_a_journal_come_back() {
    let world = World::new().await;
    let journal = world.path("journal");
    for n in 0..5 {
        put(&journal.join(format!("{n:020}.seg")), random(1000 * n, n as u64));
    }
    put(&journal.join("index"), "left out");
    fs::create_dir(journal.join("dir.seg")).unwrap();
    let writer = world.repository.writer().unwrap();
    let segments = pack_files(&journal, |name| name.ends_with(".seg"), &writer).await.unwrap();
    writer.finish().await.unwrap();
    assert_eq!(segments.len(), 5);
    let back = world.path("back");
    unpack_files(&world.repository, &segments, &back).await.unwrap();
    assert_eq!(fs::read_dir(&back).unwrap().count(), 5);
    for (name, _) in &segments {
        assert!(contents(&back.join(name)) == contents(&journal.join(name)), "{name}");
    }
    put(&journal.join(name(b"\xff.seg")), "x");
    assert!(matches!(pack_files(&journal, |_| true, &writer).await, Err(ParcelError::Name(_))));
}
