//! Whatever is damaged or missing in the store: an error that says what, never wrong bytes.

use super::*;
use crate::{
    Chunking, Error,
    envelope::{self, Kind},
};
use std::collections::BTreeMap;

/// What is stored in the repositories that are damaged here.
struct Stored {
    streams: BTreeMap<String, (StreamRef, Vec<u8>)>,
}

async fn fill(repository: &Repository) -> Stored {
    let writer = repository.writer().unwrap();
    let mut streams = BTreeMap::new();
    for (n, bytes) in [mixed_bytes(500, 1), random_bytes(100, 2)].into_iter().enumerate() {
        // Of several chunks each, the first with a list of its own.
        let stream = writer.write_stream(&bytes[..], Chunking::Fixed(64)).await.unwrap();
        streams.insert(format!("m{n}"), (stream, bytes));
    }
    writer.finish().await.unwrap();
    for (name, (stream, _)) in &streams {
        repository.put_manifest(name, &serde_json::to_vec(stream).unwrap()).await.unwrap();
    }
    Stored { streams }
}

/// Opens and reads everything. All that is read is right; what is wrong is returned.
async fn try_all(place: &Location, key: Option<KeySource>, stored: &Stored) -> Vec<Error> {
    let repository = match Repository::open(place, &options().with_key(key)).await {
        Ok(repository) => repository,
        Err(error) => return vec![error],
    };
    let mut errors = Vec::new();
    for (name, (stream, bytes)) in &stored.streams {
        match repository.manifest(name).await {
            Ok(Some(manifest)) => assert_eq!(manifest, serde_json::to_vec(stream).unwrap(), "{name}"),
            Ok(None) => errors.push(Error::Missing { what: name.clone(), chunk: None }),
            Err(error) => errors.push(error),
        }
        match read(&repository, stream).await {
            Ok(read) => assert!(read == *bytes, "{name} came out wrong"),
            Err(error) => errors.push(error),
        }
    }
    match repository.check(|_| ()).await {
        Ok(found) => errors.extend(found.into_iter().map(|d| Error::Damaged { object: d.object, chunk: d.chunk, what: d.what })),
        Err(error) => errors.push(error),
    }
    errors
}

/// One bit in each byte of each object in turn, in a plain and in an encrypted repository. A server takes long for that: there
/// it is every 29th byte.
pub async fn every_damaged_byte_is_told(place: &Location) {
    let step = if matches!(place, Location::Folder(_)) || std::env::var_os("DORMOUSE_LONG").is_some() { 1 } else { 29 };
    for given in [None, Some(key(1))] {
        let part = place.below(if given.is_some() { "encrypted" } else { "plain" });
        let stored = fill(&Repository::create(&part, &options().with_key(given.clone())).await.unwrap()).await;
        let objects = objects(&part);
        assert!(try_all(&part, given.clone(), &stored).await.is_empty());
        for listed in objects.list("").await.unwrap() {
            let good = objects.get(&listed.path, 1 << 30).await.unwrap();
            for at in (0..good.len()).step_by(step) {
                let mut bad = good.to_vec();
                bad[at] ^= 1 << (at % 8);
                objects.replace(&listed.path, bad.into()).await.unwrap();
                let errors = try_all(&part, given.clone(), &stored).await;
                let place = format!("byte {at} of {}", listed.path);
                assert!(!errors.is_empty(), "{place} was not noticed");
                for error in errors {
                    assert!(error.is_loss(), "{place}: {error}");
                }
            }
            objects.replace(&listed.path, good.into()).await.unwrap();
        }
        assert!(try_all(&part, given, &stored).await.is_empty());
    }
}

pub async fn every_missing_object_is_told(place: &Location) {
    let stored = fill(&fresh(place).await).await;
    let objects = objects(place);
    for listed in objects.list("").await.unwrap() {
        let good = objects.get(&listed.path, 1 << 30).await.unwrap();
        objects.delete(&listed.path).await.unwrap();
        let errors = try_all(place, None, &stored).await;
        match listed.path.split('/').next() {
            // The packs tell the same, and a lock is simply taken.
            Some("index" | "lock") => assert!(errors.is_empty(), "{}: {errors:?}", listed.path),
            Some("config") => assert!(matches!(errors[0], Error::NoRepository { .. }), "{errors:?}"),
            _ => assert!(!errors.is_empty() && errors.iter().all(Error::is_loss), "{}: {errors:?}", listed.path),
        }
        objects.replace(&listed.path, good.into()).await.unwrap();
    }
    // One that is cut off.
    for listed in objects.list("").await.unwrap() {
        let good = objects.get(&listed.path, 1 << 30).await.unwrap();
        for length in [0, 1, good.len() / 2, good.len() - 1] {
            objects.replace(&listed.path, good.slice(..length).into()).await.unwrap();
            let errors = try_all(place, None, &stored).await;
            assert!(!errors.is_empty() && errors.iter().all(Error::is_loss), "{} cut to {length}: {errors:?}", listed.path);
        }
        objects.replace(&listed.path, good.into()).await.unwrap();
    }
    assert!(try_all(place, None, &stored).await.is_empty());
}

pub async fn newer_formats_are_refused(place: &Location) {
    let stored = fill(&Repository::create(place, &options().with_key(Some(key(1)))).await.unwrap()).await;
    let objects = objects(place);
    let kinds = [
        ("config", Kind::CONFIG),
        ("lock", Kind::LOCK),
        ("keys", Kind::KEY),
        ("packs", Kind::PACK),
        ("index", Kind::INDEX),
        ("manifests", Kind::MANIFEST),
    ];
    for (folder, kind) in kinds {
        let listed = objects.list("").await.unwrap().into_iter().find(|object| object.path.starts_with(folder)).unwrap();
        let good = objects.get(&listed.path, 1 << 30).await.unwrap();
        let mut newer = good.to_vec();
        envelope::make_newer(kind, &mut newer);
        objects.replace(&listed.path, newer.into()).await.unwrap();
        let errors = try_all(place, Some(key(1)), &stored).await;
        let told =
            errors.iter().any(|error| matches!(error, Error::Newer { found: 2, .. }) && error.to_string().contains("format 2"));
        assert!(told, "{folder}: {errors:?}");
        objects.replace(&listed.path, good.into()).await.unwrap();
    }
}
