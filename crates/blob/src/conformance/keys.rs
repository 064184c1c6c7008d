//! Encryption: without the key nothing can be read, and keys change without a chunk being rewritten.

use super::*;
use crate::{Chunking, Error};

async fn encrypted(place: &Location) -> Repository {
    Repository::create(place, &options().with_key(Some(key(1)))).await.unwrap()
}

async fn open_with(place: &Location, n: u8) -> Result<Repository, Error> {
    Repository::open(place, &options().with_key(Some(key(n)))).await
}

pub async fn an_encrypted_repository_needs_its_key(place: &Location) {
    assert!(matches!(Repository::open(place, &options()).await, Err(Error::NoRepository { .. })));
    let repository = encrypted(place).await;
    assert!(repository.is_encrypted());
    let bytes = mixed_bytes(2_000_000, 1);
    let stream = store(&repository, "one", &bytes, Chunking::MEMORY).await;
    assert!(matches!(Repository::open(place, &options()).await, Err(Error::KeyNeeded { .. })));
    let wrong = open_with(place, 2).await.unwrap_err();
    assert!(matches!(wrong, Error::WrongKey { found: 1, .. }), "{wrong}");
    let again = open_with(place, 1).await.unwrap();
    assert!(read(&again, &stream).await.unwrap() == bytes);
    assert_eq!(again.manifests().await.unwrap(), ["one"]);
    collect(&again).await;
    expect_whole(&again).await;
    // The same once more is the same objects: nonces are made of what is encrypted.
    let before = again.usage().await.unwrap();
    store(&again, "one", &bytes, Chunking::MEMORY).await;
    assert_eq!(again.usage().await.unwrap(), before);
}

pub async fn names_and_contents_are_hidden(place: &Location) {
    let repository = encrypted(place).await;
    let plain = b"a sentence that nobody else shall ever read. ".repeat(100);
    let stream = store(&repository, "a-name-to-hide", &plain, Chunking::Content).await;
    let crate::Root::Entries(entries) = &stream.root else { panic!("one chunk") };
    let crate::Entry::Chunk { id, .. } = entries[0] else { panic!("one chunk") };
    assert_ne!(id, crate::crypto::Cipher::Plain.chunk_id(&plain), "ids tell nothing of contents");
    let objects = objects(place);
    for listed in objects.list("").await.unwrap() {
        assert!(!listed.path.contains("name-to-hide"), "{}", listed.path);
        let bytes = objects.get(&listed.path, 1 << 30).await.unwrap();
        for secret in [&b"name-to-hide"[..], b"nobody else", &id.0, id.to_string().as_bytes()] {
            assert!(!bytes.windows(secret.len()).any(|window| window == secret), "{}", listed.path);
        }
    }
}

pub async fn keys_rotate(place: &Location) {
    let repository = encrypted(place).await;
    let stream = store(&repository, "one", b"some bytes", Chunking::Content).await;
    let packs = |listed: Vec<crate::store::Listed>| listed.into_iter().map(|object| object.path).collect::<Vec<_>>();
    let before = packs(objects(place).list("packs").await.unwrap());
    assert!(matches!(repository.rotate(&key(7), &key(8)).await, Err(Error::WrongKey { .. })));
    repository.rotate(&key(1), &key(2)).await.unwrap();
    // Once more is fine.
    repository.rotate(&key(1), &key(2)).await.unwrap();
    assert!(matches!(open_with(place, 1).await, Err(Error::WrongKey { .. })));
    let again = open_with(place, 2).await.unwrap();
    assert_eq!(read(&again, &stream).await.unwrap(), b"some bytes");
    assert_eq!(packs(objects(place).list("packs").await.unwrap()), before);
    assert_eq!(objects(place).list("keys").await.unwrap().len(), 1);
    store(&repository, "two", b"the old handle goes on", Chunking::Content).await;
    expect_whole(&again).await;
}

pub async fn a_rotation_that_was_cut_off_leaves_both(place: &Location) {
    let repository = encrypted(place).await;
    store(&repository, "one", b"some bytes", Chunking::Content).await;
    let objects = objects(place);
    let old = objects.list("keys").await.unwrap().remove(0).path;
    let wrap = objects.get(&old, 4096).await.unwrap();
    repository.rotate(&key(1), &key(2)).await.unwrap();
    // As if the second step had never been.
    objects.replace(&old, wrap.into()).await.unwrap();
    for n in [1, 2] {
        let opened = open_with(place, n).await.unwrap();
        assert_eq!(opened.manifests().await.unwrap(), ["one"]);
    }
    assert!(matches!(open_with(place, 3).await, Err(Error::WrongKey { found: 2, .. })));
    repository.rotate(&key(1), &key(2)).await.unwrap();
    assert!(matches!(open_with(place, 1).await, Err(Error::WrongKey { .. })));
    open_with(place, 2).await.unwrap();
    let plain = Repository::create(&Location::Folder(tempfile::tempdir().unwrap().keep()), &options()).await.unwrap();
    assert!(matches!(plain.rotate(&key(1), &key(2)).await, Err(Error::NotEncrypted { .. })));
    let Location::Folder(folder) = Location::parse(&plain.place()).unwrap() else { panic!("a folder") };
    let keyed = Repository::open(&Location::Folder(folder.clone()), &options().with_key(Some(key(1)))).await;
    assert!(matches!(keyed, Err(Error::NotEncrypted { .. })));
    std::fs::remove_dir_all(folder).unwrap();
}
