//! Garbage goes, and nothing else does.

use super::*;
use crate::{Chunking, Collected, Error, pack::PACK};
use bytes::Bytes;

pub async fn what_nothing_refers_to_is_collected(place: &Location) {
    let repository = fresh(place).await;
    let (keep, lose) = (random_bytes(3_000_000, 1), random_bytes(3_000_000, 2));
    let kept = store(&repository, "keep", &keep, Chunking::MEMORY).await;
    let lost = store(&repository, "lose", &lose, Chunking::MEMORY).await;
    assert_eq!(collect(&repository).await, Collected::default());
    repository.delete_manifest("lose").await.unwrap();
    let done = collect(&repository).await;
    assert_eq!(done.packs_removed, 1);
    assert!(done.bytes_freed > 3_000_000 && done.chunks_removed > 700, "{done:?}");
    assert!(read(&repository, &kept).await.unwrap() == keep);
    assert!(matches!(read(&repository, &lost).await, Err(Error::Missing { .. })));
    expect_whole(&repository).await;
    let again = open(place).await;
    assert!(again.usage().await.unwrap().stored_bytes < 3_300_000);
    assert!(read(&again, &kept).await.unwrap() == keep);
    again.delete_manifest("keep").await.unwrap();
    collect(&again).await;
    let usage = again.usage().await.unwrap();
    assert_eq!((usage.packs, usage.chunks, usage.plain_bytes), (0, 0, 0));
}

pub async fn a_rehearsal_changes_nothing(place: &Location) {
    let repository = fresh(place).await;
    let stream = store(&repository, "one", &random_bytes(2_000_000, 1), Chunking::MEMORY).await;
    repository.delete_manifest("one").await.unwrap();
    let before = repository.usage().await.unwrap();
    let told = repository.collect(mark(&repository).await, true).await.unwrap();
    assert_eq!(told.bytes_freed, before.pack_bytes);
    assert_eq!(repository.usage().await.unwrap(), before);
    assert!(read(&repository, &stream).await.is_ok());
    let done = collect(&repository).await;
    assert_eq!(done, told);
}

pub async fn mostly_dead_packs_are_rewritten(place: &Location) {
    let repository = fresh(place).await;
    let writer = repository.writer().unwrap();
    let (keep, lose) = (random_bytes(PACK / 8, 1), random_bytes(PACK / 2, 2));
    // In one pack, mixed.
    let lost = writer.write_stream(&lose[..PACK / 4], Chunking::MEMORY).await.unwrap();
    let kept = writer.write_stream(&keep[..], Chunking::MEMORY).await.unwrap();
    writer.write_stream(&lose[PACK / 4..], Chunking::MEMORY).await.unwrap();
    commit(writer, "keep", &kept).await;
    assert_eq!(repository.usage().await.unwrap().packs, 1);
    let told = repository.collect(mark(&repository).await, true).await.unwrap();
    let done = collect(&repository).await;
    assert_eq!((done.packs_removed, done.packs_rewritten), (0, 1));
    assert_eq!(done.chunks_removed, told.chunks_removed);
    assert!(done.bytes_freed.abs_diff(told.bytes_freed) < 100_000, "{done:?} {told:?}");
    let usage = repository.usage().await.unwrap();
    assert!(usage.pack_bytes < PACK as u64 / 6, "{usage:?}");
    assert!(read(&repository, &kept).await.unwrap() == keep);
    assert!(read(&repository, &lost).await.is_err());
    expect_whole(&repository).await;
    let again = open(place).await;
    assert!(read(&again, &kept).await.unwrap() == keep);
    assert_eq!(collect(&again).await, Collected::default());
}

pub async fn small_packs_are_put_together(place: &Location) {
    let repository = fresh(place).await;
    let mut streams = Vec::new();
    for n in 0..12_u64 {
        let bytes = random_bytes(5000, n);
        streams.push((store(&repository, &format!("m{n}"), &bytes, Chunking::Content).await, bytes));
    }
    assert_eq!(repository.usage().await.unwrap().packs, 12);
    assert_eq!(collect(&repository).await.packs_rewritten, 12);
    assert_eq!(repository.usage().await.unwrap().packs, 1);
    // One small pack that is all alive stays as it is.
    assert_eq!(collect(&repository).await, Collected::default());
    for repository in [repository, open(place).await] {
        for (stream, bytes) in &streams {
            assert!(read(&repository, stream).await.unwrap() == *bytes);
        }
        expect_whole(&repository).await;
    }
}

pub async fn writers_keep_what_they_use(place: &Location) {
    let repository = fresh(place).await;
    let bytes = random_bytes(2_000_000, 1);
    store(&repository, "old", &bytes, Chunking::MEMORY).await;
    repository.delete_manifest("old").await.unwrap();
    // Before the mark begins, while it goes on, and stored only after the sweep.
    let early = repository.writer().unwrap();
    let half = early.write_stream(&bytes[..1_000_000], Chunking::MEMORY).await.unwrap();
    let marked = mark(&repository).await;
    let late = repository.writer().unwrap();
    let rest = late.write_stream(&bytes[1_000_000..1_500_000], Chunking::MEMORY).await.unwrap();
    let fresh_one = late.add(Bytes::from_static(b"new")).await.unwrap();
    repository.collect(marked, false).await.unwrap();
    commit(early, "half", &half).await;
    late.finish().await.unwrap();
    commit(late, "rest", &rest).await;
    assert!(read(&repository, &half).await.unwrap() == bytes[..1_000_000]);
    assert!(read(&repository, &rest).await.unwrap() == bytes[1_000_000..1_500_000]);
    assert_eq!(repository.get(fresh_one).await.unwrap(), "new");
    // A writer that was begun before the mark and has ended before the sweep.
    let ended = repository.writer().unwrap();
    let third = ended.write_stream(&bytes[..250_000], Chunking::MEMORY).await.unwrap();
    repository.delete_manifest("half").await.unwrap();
    let marked = mark(&repository).await;
    commit(ended, "third", &third).await;
    repository.collect(marked, false).await.unwrap();
    assert!(read(&repository, &third).await.unwrap() == bytes[..250_000]);
    // And in the end all the rest goes.
    collect(&repository).await;
    assert!(repository.usage().await.unwrap().plain_bytes < 780_000);
    expect_whole(&open(place).await).await;
}

pub async fn a_pack_that_comes_back_stays(place: &Location) {
    let repository = fresh(place).await;
    let bytes = random_bytes(1_000_000, 1);
    for round in 0..5 {
        let stream = store(&repository, "it", &bytes, Chunking::Content).await;
        repository.delete_manifest("it").await.unwrap();
        let marked = mark(&repository).await;
        // The same chunks in the same order are the same pack, just while it is removed.
        let again = async {
            let writer = repository.writer().unwrap();
            let stream = writer.write_stream(&bytes[..], Chunking::Content).await.unwrap();
            commit(writer, "again", &stream).await;
        };
        let (_, collected) = tokio::join!(again, repository.collect(marked, false));
        collected.unwrap();
        assert!(read(&repository, &stream).await.unwrap() == bytes, "round {round}");
        expect_whole(&repository).await;
        assert!(read(&open(place).await, &stream).await.unwrap() == bytes, "round {round}");
        repository.delete_manifest("again").await.unwrap();
        collect(&repository).await;
    }
}

pub async fn readers_go_on_while_packs_move(place: &Location) {
    let repository = fresh(place).await;
    let mut streams = Vec::new();
    for round in 0..4_u64 {
        for n in 0..8 {
            let bytes = random_bytes(300_000, round * 100 + n);
            streams.push((store(&repository, &format!("m{round}.{n}"), &bytes, Chunking::MEMORY).await, bytes));
        }
        let reads = async {
            for (stream, bytes) in streams.iter().rev() {
                assert!(read(&repository, stream).await.unwrap() == *bytes);
            }
        };
        let ((), done) = tokio::join!(reads, collect(&repository));
        assert!(done.packs_rewritten >= 8, "{done:?}");
    }
    expect_whole(&repository).await;
}
