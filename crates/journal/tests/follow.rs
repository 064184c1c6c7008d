//! Readers that run beside a writer, with nothing between them but the directory.
#![allow(clippy::unwrap_used)]

use journal::{Chunk, ReadError, Reader, Retention, Writer};
use model::Offset;
use std::{
    hash::{DefaultHasher, Hasher},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

/// The byte that belongs at an offset: a wrong, doubled or missing one shows.
fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn bytes(from: u64, len: u64) -> Vec<u8> {
    (from..from + len).map(byte_at).collect()
}

struct Followed {
    hash: u64,
    data: u64,
    gaps: Vec<(u64, u64)>,
}

/// Reads from the start until `end` says that the writer has finished there.
fn follow(dir: &Path, end: &AtomicU64, max: usize) -> Followed {
    let mut reader = Reader::open(dir);
    let mut hasher = DefaultHasher::new();
    let mut found = Followed { hash: 0, data: 0, gaps: Vec::new() };
    let mut at = 0;
    loop {
        match reader.read(Offset(at), max) {
            Ok(Chunk::Data { offset, bytes: got }) => {
                assert_eq!(offset, Offset(at));
                assert!(got == bytes(at, got.len() as u64), "wrong bytes at {at}");
                hasher.write(&got);
                at += got.len() as u64;
                found.data += got.len() as u64;
            }
            Ok(Chunk::Gap { from, to }) => {
                found.gaps.push((from.0, to.0));
                at = to.0;
            }
            Ok(Chunk::End) if end.load(Ordering::Acquire) == at => break,
            Ok(Chunk::End) => thread::yield_now(),
            // The writer may lap a slow reader at every look; that is told, not hidden.
            Err(ReadError::Unsettled(_)) => {}
            Err(e) => panic!("{e}"),
        }
    }
    found.hash = hasher.finish();
    found
}

fn write(dir: &Path, retention: Retention, end: &AtomicU64, total: u64, skips: bool) -> Vec<(u64, u64)> {
    let mut writer = Writer::open(dir, retention).unwrap();
    let mut gaps = Vec::new();
    let mut random = 12345u64;
    while writer.tail().0 < total {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let len = (random >> 33) % 5000;
        let tail = writer.tail().0;
        if skips && random >> 60 == 0 && len > 0 {
            writer.skip_to(Offset(tail + len)).unwrap();
            gaps.push((tail, tail + len));
        } else {
            writer.append(&bytes(tail, len)).unwrap();
        }
    }
    end.store(writer.tail().0, Ordering::Release);
    gaps
}

#[test]
fn readers_see_each_byte_once_and_each_gap() {
    for skips in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("journal");
        let end = AtomicU64::new(u64::MAX);
        let retention = Retention { head_bytes: 1000, tail_bytes: u64::MAX, segment_bytes: 6000 };
        let total = if skips { 1_000_000 } else { 8_000_000 };
        thread::scope(|s| {
            let readers: Vec<_> = [100, 4096, 262_144]
                .map(|max| {
                    s.spawn({
                        let (dir, end) = (&dir, &end);
                        move || follow(dir, end, max)
                    })
                })
                .into();
            let gaps = write(&dir, retention, &end, total, skips);
            assert_eq!(skips, !gaps.is_empty());
            let tail = end.load(Ordering::Acquire);
            let mut hasher = DefaultHasher::new();
            let mut at = 0;
            for (from, to) in gaps.iter().copied().chain([(tail, tail)]) {
                hasher.write(&bytes(at, from - at));
                at = to;
            }
            let want = hasher.finish();
            for reader in readers {
                let found = reader.join().unwrap();
                assert_eq!(found.hash, want);
                // A reader that comes late sees two gaps in a row as one.
                let joined = |gaps: &[(u64, u64)]| {
                    let mut all: Vec<(u64, u64)> = Vec::new();
                    for &(from, to) in gaps {
                        match all.last_mut() {
                            Some(last) if last.1 == from => last.1 = to,
                            _ => all.push((from, to)),
                        }
                    }
                    all
                };
                assert_eq!(joined(&found.gaps), joined(&gaps));
            }
        });
    }
}

#[test]
fn readers_that_retention_overtakes_see_true_bytes_and_gaps() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("journal");
    let end = AtomicU64::new(u64::MAX);
    let retention = Retention { head_bytes: 3000, tail_bytes: 4000, segment_bytes: 1000 };
    thread::scope(|s| {
        let readers: Vec<_> = [50, 262_144]
            .map(|max| {
                s.spawn({
                    let (dir, end) = (&dir, &end);
                    move || follow(dir, end, max)
                })
            })
            .into();
        write(&dir, retention, &end, 20_000_000, false);
        let tail = end.load(Ordering::Acquire);
        for reader in readers {
            let found = reader.join().unwrap();
            assert!(found.gaps.iter().all(|g| g.0 >= retention.head_bytes), "the head is kept: {:?}", found.gaps.first());
            let missing: u64 = found.gaps.iter().map(|g| g.1 - g.0).sum();
            assert_eq!(found.data + missing, tail);
            assert!(found.gaps.iter().all(|g| g.1 <= tail - retention.tail_bytes), "the last bytes are kept");
        }
    });
}
