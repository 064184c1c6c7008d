//! Writing and reading, names, locks, limits.

use super::*;
use crate::{Chunking, Error, MAX_CHUNK, MAX_MANIFEST};
use bytes::Bytes;
use std::{
    fs::File,
    io::{Cursor, Read, Seek},
    time::Instant,
};

fn contents(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

pub async fn streams_read_back(place: &Location) {
    let repository = fresh(place).await;
    let writer = repository.writer().unwrap();
    let mut streams = Vec::new();
    for (n, length) in [0, 1, 4095, 4096, 4097, 70_000, 600_000, 9_000_001].into_iter().enumerate() {
        for chunking in [Chunking::Content, Chunking::MEMORY, Chunking::Fixed(10_000)] {
            let bytes = mixed_bytes(length, n as u64);
            let slow = writer.write_stream(&bytes[..], chunking).await.unwrap();
            let quick = writer.write_file(Cursor::new(bytes.clone()), chunking).await.unwrap();
            assert_eq!((slow.digest(), slow.len), (quick.digest(), length as u64));
            assert_eq!(slow, quick);
            streams.push((slow, bytes));
        }
    }
    let written = writer.finish().await.unwrap();
    assert!(written.new_bytes < written.bytes && written.new_chunks < written.chunks);
    for (stream, bytes) in &streams {
        assert!(read(&repository, stream).await.unwrap() == *bytes, "{} bytes", bytes.len());
        let file = tempfile::tempfile().unwrap();
        repository.read_to_file(stream, file.try_clone().unwrap()).await.unwrap();
        assert!(contents(&file) == *bytes, "{} bytes as a file", bytes.len());
    }
    expect_whole(&repository).await;
}

pub async fn chunks_are_stored_once(place: &Location) {
    let repository = fresh(place).await;
    let (one, two) = (repository.writer().unwrap(), repository.writer().unwrap());
    let bytes = Bytes::from(random_bytes(300_000, 1));
    // At once, so that one finds the other's chunk while it is under way.
    let (first, second) = tokio::join!(one.add(bytes.clone()), two.add(bytes.clone()));
    assert_eq!(first.unwrap(), second.unwrap());
    let id = one.add_all(vec![bytes.clone(), bytes.clone()]).await.unwrap()[1];
    // The one who had it first goes away; the other still gets it stored.
    drop(one);
    two.finish().await.unwrap();
    let usage = repository.usage().await.unwrap();
    assert_eq!((usage.chunks, usage.plain_bytes), (1, 300_000));
    assert!(usage.pack_bytes < 301_000);
    assert_eq!(repository.get(id).await.unwrap(), bytes);
    assert!(repository.has(id));
}

pub async fn parts_of_streams_are_read(place: &Location) {
    let repository = fresh(place).await;
    let mut bytes = mixed_bytes(6_000_000, 3);
    bytes[1_000_000..2_500_000].fill(0);
    for (name, chunking) in [("pages", Chunking::MEMORY), ("file", Chunking::Content)] {
        let stream = store(&repository, name, &bytes, chunking).await;
        for (from, till) in [(0, 0), (0, 1), (999_999, 2_500_001), (4095, 4097), (5_999_999, 9_000_000), (7_000_000, 8_000_000)] {
            let mut out = Vec::new();
            repository.read_range(&stream, from..till, &mut out).await.unwrap();
            let expected = bytes.get(from as usize..bytes.len().min(till as usize)).unwrap_or_default();
            assert!(out == expected, "{name} {from}..{till}: {} bytes instead of {}", out.len(), expected.len());
        }
    }
}

pub async fn zeros_cost_nothing(place: &Location) {
    let repository = fresh(place).await;
    let stream = store(&repository, "zeros", &vec![0; 50_000_000], Chunking::MEMORY).await;
    assert!(serde_json::to_vec(&stream).unwrap().len() < 100);
    assert_eq!(repository.usage().await.unwrap().chunks, 0);
    let file = tempfile::tempfile().unwrap();
    repository.read_to_file(&stream, file.try_clone().unwrap()).await.unwrap();
    let meta = file.metadata().unwrap();
    assert_eq!(meta.len(), 50_000_000);
    assert_eq!(std::os::unix::fs::MetadataExt::blocks(&meta), 0, "zeros are holes");
    assert_eq!(read(&repository, &stream).await.unwrap(), vec![0; 50_000_000]);
}

pub async fn many_small_files_share_packs(place: &Location) {
    let repository = fresh(place).await;
    let writer = repository.writer().unwrap();
    let files: Vec<Bytes> = (0..5000_u64).map(|n| mixed_bytes(200 + (n as usize * 37) % 3000, n).into()).collect();
    let mut ids = Vec::new();
    for some in files.chunks(500) {
        ids.extend(writer.add_all(some.to_vec()).await.unwrap());
    }
    writer.finish().await.unwrap();
    let usage = repository.usage().await.unwrap();
    assert!(usage.packs <= 2, "{usage:?}");
    assert!(usage.stored_bytes < usage.plain_bytes, "{usage:?}");
    for (id, file) in ids.iter().zip(&files).step_by(97) {
        assert_eq!(repository.get(*id).await.unwrap(), file);
    }
}

/// The measure, on a smaller image: 20 forks that each change 1 % of the pages at random.
pub async fn forks_of_an_image_cost_what_changed(place: &Location) {
    let repository = fresh(place).await;
    let image = random_bytes(30 << 20, 1);
    store(&repository, "image", &image, Chunking::MEMORY).await;
    let pages = image.len() / 4096;
    for fork in 0..20_u64 {
        let mut changed = image.clone();
        let choices = random_bytes(pages / 100 * 4, 1000 + fork);
        for (n, choice) in choices.chunks_exact(4).enumerate() {
            let page = u32::from_le_bytes(choice.try_into().unwrap()) as usize % pages;
            changed[page * 4096..][..8].copy_from_slice(&(fork << 32 | n as u64).to_le_bytes());
        }
        store(&repository, &format!("fork-{fork}"), &changed, Chunking::MEMORY).await;
    }
    let usage = repository.usage().await.unwrap();
    let ratio = usage.plain_bytes as f64 / image.len() as f64;
    println!(
        "20 forks: {ratio:.3} of one image as chunks and lists, {:.3} stored",
        usage.stored_bytes as f64 / image.len() as f64
    );
    // The bytes are random, so that stored ones are those before compression, with all that goes with them.
    assert!(usage.stored_bytes as f64 <= 1.4 * image.len() as f64, "{usage:?}");
}

pub async fn manifests_are_kept(place: &Location) {
    let repository = fresh(place).await;
    assert!(repository.manifests().await.unwrap().is_empty());
    assert_eq!(repository.manifest("none").await.unwrap(), None);
    repository.put_manifest("b", b"second").await.unwrap();
    repository.put_manifest("a.1-x_Y", &random_bytes(1 << 20, 1)).await.unwrap();
    repository.put_manifest("b", b"second").await.unwrap();
    assert!(matches!(repository.put_manifest("b", b"other").await, Err(Error::ManifestExists { name }) if name == "b"));
    assert_eq!(repository.manifests().await.unwrap(), ["a.1-x_Y", "b"]);
    let again = open(place).await;
    assert_eq!(again.manifest("b").await.unwrap().unwrap(), b"second");
    assert_eq!(again.manifest("a.1-x_Y").await.unwrap().unwrap(), random_bytes(1 << 20, 1));
    again.delete_manifest("b").await.unwrap();
    again.delete_manifest("b").await.unwrap();
    assert_eq!(again.manifests().await.unwrap(), ["a.1-x_Y"]);
}

pub async fn a_repeated_upload_adds_nothing(place: &Location) {
    let repository = fresh(place).await;
    let bytes = mixed_bytes(5_000_000, 1);
    store(&repository, "one", &bytes, Chunking::Content).await;
    let before = repository.usage().await.unwrap();
    drop(repository);
    let repository = open(place).await;
    let writer = repository.writer().unwrap();
    let stream = writer.write_stream(&bytes[..], Chunking::Content).await.unwrap();
    let written = writer.finish().await.unwrap();
    assert_eq!((written.new_chunks, written.new_bytes), (0, 0));
    assert!(written.bytes >= stream.len && written.chunks > 5);
    let after = repository.usage().await.unwrap();
    assert_eq!((before.packs, before.pack_bytes, before.chunks), (after.packs, after.pack_bytes, after.chunks));
}

pub async fn who_opens_again_finds_all(place: &Location) {
    let repository = fresh(place).await;
    let id = repository.id();
    let bytes = random_bytes(40 << 20, 9);
    let stream = store(&repository, "one", &bytes, Chunking::Content).await;
    drop(repository);
    // Without any index, packs are read by their trailers: an upload that was cut off looks like this.
    let objects = objects(place);
    let listed = objects.list("index").await.unwrap();
    assert!(!listed.is_empty());
    for object in listed {
        objects.delete(&object.path).await.unwrap();
    }
    for _ in 0..2 {
        let repository = open(place).await;
        assert_eq!(repository.id(), id);
        assert!(read(&repository, &stream).await.unwrap() == bytes);
        collect(&repository).await;
        assert!(read(&repository, &stream).await.unwrap() == bytes);
        let writer = repository.writer().unwrap();
        writer.add(Bytes::from_static(b"more")).await.unwrap();
        writer.finish().await.unwrap();
        expect_whole(&repository).await;
    }
    assert!(!objects.list("index").await.unwrap().is_empty());
}

pub async fn index_objects_are_merged(place: &Location) {
    let repository = fresh(place).await;
    for n in 0..30_u64 {
        store(&repository, &format!("m{n}"), &random_bytes(1000, n), Chunking::Content).await;
    }
    let objects = objects(place).list("index").await.unwrap();
    assert!(objects.len() <= 9, "{} index objects", objects.len());
    let again = open(place).await;
    assert_eq!(again.usage().await.unwrap().chunks, 30);
    expect_whole(&again).await;
}

pub async fn another_server_is_refused(place: &Location) {
    let repository = fresh(place).await;
    let other = Options::new("server-two").with_patience(Duration::from_secs(20));
    let error = Repository::open(place, &other).await.unwrap_err();
    assert!(matches!(&error, Error::InUse { by, .. } if by == SERVER), "{error}");
    assert!(error.to_string().contains(SERVER), "{error}");
    // The same server again is no other.
    drop(open(place).await);
    let taken = Repository::open(place, &other.clone().taking_over()).await.unwrap();
    for error in [
        repository.put_manifest("x", b"x").await.unwrap_err(),
        repository.delete_manifest("x").await.unwrap_err(),
        repository.collect(repository.mark(), false).await.unwrap_err(),
    ] {
        assert!(matches!(&error, Error::InUse { by, .. } if by == "server-two"), "{error}");
    }
    taken.release().await.unwrap();
    drop(open(place).await);
}

pub async fn readers_write_nothing(place: &Location) {
    let stream = store(&fresh(place).await, "one", b"some bytes", Chunking::Content).await;
    let reader = Repository::open(place, &Options { patience: Duration::from_secs(20), ..Options::reading() }).await.unwrap();
    assert_eq!(read(&reader, &stream).await.unwrap(), b"some bytes");
    assert!(matches!(reader.writer(), Err(Error::ReadOnly { .. })));
    assert!(matches!(reader.put_manifest("x", b"").await, Err(Error::ReadOnly { .. })));
    assert!(matches!(reader.delete_manifest("one").await, Err(Error::ReadOnly { .. })));
    assert!(matches!(reader.collect(reader.mark(), false).await, Err(Error::ReadOnly { .. })));
    let rehearsed = reader.collect(reader.mark(), true).await.unwrap();
    assert_eq!(rehearsed.packs_removed, 1);
    expect_whole(&reader).await;
}

pub async fn what_is_cancelled_says_so(place: &Location) {
    let cancel = CancellationToken::new();
    let repository = Repository::create(place, &options().with_cancel(cancel.clone())).await.unwrap();
    let writer = repository.writer().unwrap();
    writer.add(Bytes::from_static(b"never stored")).await.unwrap();
    cancel.cancel();
    let begun = Instant::now();
    assert!(matches!(writer.finish().await, Err(Error::Cancelled)));
    assert!(matches!(writer.add(Bytes::from_static(b"more")).await, Err(Error::Cancelled)));
    assert!(matches!(repository.manifests().await, Err(Error::Cancelled)));
    assert!(begun.elapsed() < Duration::from_secs(5));
    let again = open(place).await;
    assert_eq!(again.usage().await.unwrap().chunks, 0);
}

pub async fn limits_are_kept(place: &Location) {
    let repository = fresh(place).await;
    let writer = repository.writer().unwrap();
    let long = writer.add(Bytes::from(vec![1; MAX_CHUNK + 1])).await;
    assert!(matches!(long, Err(Error::TooLarge { bytes, .. }) if bytes == MAX_CHUNK as u64 + 1));
    let id = writer.add(Bytes::from(random_bytes(MAX_CHUNK, 1))).await.unwrap();
    let empty = writer.add(Bytes::new()).await.unwrap();
    writer.finish().await.unwrap();
    assert_eq!(repository.get(id).await.unwrap().len(), MAX_CHUNK);
    assert!(repository.get(empty).await.unwrap().is_empty());
    for name in ["", ".x", "a/b", "a b", "ä", &"x".repeat(201)] {
        assert!(matches!(repository.put_manifest(name, b"").await, Err(Error::ManifestName { .. })), "{name}");
        assert!(matches!(repository.manifest(name).await, Err(Error::ManifestName { .. })), "{name}");
    }
    let large = repository.put_manifest("x", &vec![0; MAX_MANIFEST + 1]).await;
    assert!(matches!(large, Err(Error::TooLarge { .. })));
    repository.put_manifest("x", &vec![0; MAX_MANIFEST]).await.unwrap();
    assert_eq!(repository.manifest("x").await.unwrap().unwrap().len(), MAX_MANIFEST);
    let unknown = repository.get(crate::ChunkId([9; 32])).await.unwrap_err();
    assert!(matches!(&unknown, Error::Missing { chunk: Some(_), .. }), "{unknown}");
    assert!(matches!(Repository::create(place, &options()).await, Err(Error::Exists { .. })));
}
