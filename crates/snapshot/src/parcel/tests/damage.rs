//! Whatever is damaged or missing in the store: an error that names the file, never wrong bytes.

use super::world::*;
use crate::parcel::{ImageRef, ParcelError, TreeRef, pack_file, pack_image, pour::pour, unpack_file, unpack_image, unpack_tree};
use blob::{Repository, StreamRef};
use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

struct Stored {
    tree: TreeRef,
    image: ImageRef,
    program: StreamRef,
    /// The tree's stream as it should be.
    bytes: Vec<u8>,
}

async fn fill(world: &World) -> Stored {
    let root = world.empty("tree");
    for n in 0..6_usize {
        put(&root.join(format!("d{n}/large")), random(200_000 + 70_000 * n, n as u64));
        for m in 0..20 {
            put(&root.join(format!("d{n}/small{m}")), random(3000, (1000 * n + m) as u64));
        }
    }
    super::files::image(&world.empty("image"), 300);
    put(&world.path("program"), random(900_000, 77));
    let writer = world.repository.writer().unwrap();
    let tree = crate::parcel::pack_tree(&root, &writer).await.unwrap();
    // In packs of their own, so that there is more than one.
    writer.finish().await.unwrap();
    let image = pack_image(&world.path("image"), &writer).await.unwrap();
    writer.finish().await.unwrap();
    let program = pack_file(&world.path("program"), &writer).await.unwrap();
    writer.finish().await.unwrap();
    let bytes = world.bytes(&tree.stream).await;
    Stored { tree, image, program, bytes }
}

/// Unpacks everything. What comes back is right; returns what doesn't, with how it is called here.
async fn try_all(world: &World, repository: &Repository, stored: &Stored) -> Vec<(&'static str, ParcelError)> {
    let mut errors = Vec::new();
    let (tree, image, program) = (world.path("tree back"), world.path("image back"), world.path("program back"));
    match unpack_tree(repository, &stored.tree, &tree).await {
        Ok(()) => {
            assert!(listing(&tree) == listing(&world.path("tree")), "the tree came out wrong");
            fs::remove_dir_all(&tree).unwrap();
        }
        Err(error) => errors.push(("tree", error)),
    }
    match unpack_image(repository, &stored.image, &image).await {
        Ok(()) => {
            for name in ["pages.img", "checkpoint.img", "image.json", "works"] {
                assert!(contents(&image.join(name)) == contents(&world.path("image").join(name)), "{name} came out wrong");
            }
            fs::remove_dir_all(&image).unwrap();
        }
        Err(error) => errors.push(("image", error)),
    }
    match unpack_file(repository, &stored.program, &program, 0o755).await {
        Ok(()) => {
            assert!(contents(&program) == contents(&world.path("program")), "the program came out wrong");
            fs::remove_file(&program).unwrap();
        }
        Err(error) => errors.push(("program", error)),
    }
    for path in [tree, image, program] {
        assert!(!path.exists(), "{} is left", path.display());
    }
    errors
}

/// The error names exactly what is lost.
async fn check(world: &World, repository: &Repository, stored: &Stored, what: &str, error: &ParcelError) -> (PathBuf, u64) {
    assert!(error.is_loss() && !error.is_retryable(), "{what}: {error}");
    let (path, offset) = match error {
        ParcelError::File { path, offset, .. } => (path.clone(), *offset),
        // Its name is lost, too: it is the one after this.
        ParcelError::After { path, .. } => {
            assert!(world.path("tree").join(path).exists(), "{error}");
            return (path.clone(), 0);
        }
        other => panic!("{what}: {other}"),
    };
    match what {
        "tree" => {
            let whole = contents_of(&world.path("tree").join(&path));
            let broken = pour(repository, &stored.tree.stream, tokio::io::sink()).await.unwrap_err();
            let (lost, own) = (&stored.bytes[broken.at as usize..], &whole[offset as usize..]);
            let length = lost.len().min(own.len()).min(64);
            // Beyond its bytes come its attributes.
            assert!(lost[..length] == own[..length], "{} is not what is lost at {offset}", path.display());
        }
        "image" => {
            assert!(world.path("image").join(&path).exists(), "{error}");
            assert!(offset.is_multiple_of(4096), "{error}");
        }
        _ => assert_eq!(path, world.path("program back")),
    }
    (path, offset)
}

fn contents_of(path: &Path) -> Vec<u8> {
    if path.is_file() { contents(path) } else { Vec::new() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_damaged_chunk_names_its_file() {
    let world = World::new().await;
    let stored = fill(&world).await;
    let packs = world.packs();
    assert!(packs.len() >= 3, "{packs:?}");
    assert!(try_all(&world, &world.reopened().await.unwrap(), &stored).await.is_empty());
    let (mut named, mut unnoticed) = (HashSet::new(), 0);
    for pack in &packs {
        let length = fs::metadata(pack).unwrap().len();
        // Every chunk: none of them is shorter than the steps, but for pages, which share blocks that are longer.
        for at in (0..length).step_by(usize::try_from(length / 25).unwrap()).chain([length - 1]) {
            flip(pack, at);
            match world.reopened().await {
                // What names the chunks is damaged: nothing can be read.
                Err(error) => assert!(error.is_loss(), "{error}"),
                Ok(repository) => {
                    let errors = try_all(&world, &repository, &stored).await;
                    unnoticed += usize::from(errors.is_empty());
                    for (what, error) in errors {
                        named.insert(check(&world, &repository, &stored, what, &error).await);
                    }
                }
            }
            flip(pack, at);
        }
    }
    // The header and the trailer of a pack aren't looked at while there is an index.
    assert!(unnoticed <= 4 * packs.len(), "{unnoticed} times nothing was noticed");
    assert!(named.len() >= 8, "{named:?}");
    for what in ["d3/large", "pages.img", "program back"] {
        assert!(named.iter().any(|(path, _)| path.ends_with(what)), "{what}: {named:?}");
    }
    assert!(try_all(&world, &world.reopened().await.unwrap(), &stored).await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_missing_pack_names_a_file() {
    let world = World::new().await;
    let stored = fill(&world).await;
    for pack in world.packs() {
        let aside = world.path("aside");
        fs::rename(&pack, &aside).unwrap();
        if let Ok(repository) = world.reopened().await {
            let errors = try_all(&world, &repository, &stored).await;
            assert!(!errors.is_empty(), "{}", pack.display());
            for (what, error) in errors {
                check(&world, &repository, &stored, what, &error).await;
            }
        }
        fs::rename(&aside, &pack).unwrap();
    }
    assert!(try_all(&world, &world.reopened().await.unwrap(), &stored).await.is_empty());
}

/// A page of an image: the error has its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_page_is_named_by_its_place() {
    let world = World::new().await;
    super::files::image(&world.empty("image"), 3000);
    let writer = world.repository.writer().unwrap();
    let image = pack_image(&world.path("image"), &writer).await.unwrap();
    writer.finish().await.unwrap();
    let pack = world.packs().into_iter().max_by_key(|pack| fs::metadata(pack).unwrap().len()).unwrap();
    let mut offsets = HashSet::new();
    for part in 1..6 {
        let at = fs::metadata(&pack).unwrap().len() / 8 * part;
        flip(&pack, at);
        let lost = unpack_image(&world.reopened().await.unwrap(), &image, &world.path("back")).await;
        let Err(ParcelError::File { path, offset, .. }) = &lost else { panic!("{lost:?}") };
        // Small files share a block with pages, and which ones do depends on what was ready first.
        if path == Path::new("pages.img") {
            assert_eq!(offset % 4096, 0);
            offsets.insert(*offset);
        } else {
            assert_eq!(path, Path::new("checkpoint.img"));
        }
        flip(&pack, at);
    }
    assert!(offsets.len() >= 3, "{offsets:?}");
}

/// Where the store is away, no file is blamed for it, and it can be tried again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_store_says_of_itself_is_passed_on() {
    let world = World::new().await;
    let stored = fill(&world).await;
    let cancel = tokio_util::sync::CancellationToken::new();
    let options = blob::Options::reading().with_cancel(cancel.clone());
    let place = blob::Location::parse(world.path("store").to_str().unwrap()).unwrap();
    let repository = Repository::open(&place, &options).await.unwrap();
    cancel.cancel();
    let gone = unpack_tree(&repository, &stored.tree, &world.path("back")).await.unwrap_err();
    assert!(matches!(&gone, ParcelError::Store(blob::Error::Cancelled)) && gone.is_retryable() && !gone.is_loss(), "{gone}");
    assert!(!world.path("back").exists());
}
