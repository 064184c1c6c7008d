//! How fast packing and unpacking are, beside the plain steps on the same bytes with as many threads. Ignored: run it with
//! `cargo test --release -p blob --test speed -- --ignored --nocapture`.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use blob::{Chunking, Location, Options, Repository, StreamRef};
use std::{
    fs::File,
    io::{Cursor, Write},
    num::NonZero,
    time::Instant,
};

const MIB: usize = 1 << 20;

/// About what disks and memory hold: a third programs and texts, a third that doesn't compress, a third half-empty pages.
fn mixed(bytes: usize) -> Vec<u8> {
    let mut noise = blake3::Hasher::new().update(b"mixed").finalize_xof();
    let mut out = vec![0; bytes];
    for (n, part) in out.chunks_mut(MIB).enumerate() {
        noise.fill(part);
        match n % 3 {
            0 => {
                // Words of a small vocabulary.
                for (at, byte) in part.iter_mut().enumerate() {
                    *byte = if at % 6 == 5 { b' ' } else { b'a' + *byte % 16 };
                }
            }
            1 => {}
            _ => part.chunks_mut(4096).for_each(|page| page[1500..].fill(0)),
        }
    }
    out
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, NonZero::get)
}

/// Does `work` to pieces of 1 MiB on all processors.
fn on_all<T: Send>(pieces: &[Vec<u8>], work: impl Fn(&[u8]) -> T + Sync) -> Vec<T> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let mut done: Vec<(usize, T)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads())
            .map(|_| {
                scope.spawn(|| {
                    let mut own = Vec::new();
                    loop {
                        let n = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        let Some(piece) = pieces.get(n) else { return own };
                        own.push((n, work(piece)));
                    }
                })
            })
            .collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    done.sort_by_key(|(n, _)| *n);
    done.into_iter().map(|(_, result)| result).collect()
}

struct Figures {
    name: &'static str,
    seconds: f64,
}

fn measure<T>(name: &'static str, bytes: usize, work: impl FnOnce() -> T) -> (Figures, T) {
    let begun = Instant::now();
    let done = work();
    let seconds = begun.elapsed().as_secs_f64();
    println!("{name:44} {:6.0} ms {:6.0} MiB/s", seconds * 1e3, bytes as f64 / MIB as f64 / seconds);
    (Figures { name, seconds }, done)
}

fn compare(ours: &Figures, plain: &Figures) {
    println!("  = {:.2} of '{}'", plain.seconds / ours.seconds, plain.name);
}

#[test]
#[ignore = "a measurement"]
fn packing_and_unpacking_beside_the_plain_steps() {
    let data = mixed(300 * MIB);
    let pieces: Vec<Vec<u8>> = data.chunks(MIB).map(<[u8]>::to_vec).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for round in 0..3 {
        println!("round {round}, {} threads", threads());
        let (plain, packed) = measure("plain BLAKE3 + zstd 1 + write", data.len(), || {
            let mut file = tempfile::tempfile().unwrap();
            let packed = on_all(&pieces, |piece| {
                std::hint::black_box(blake3::hash(piece));
                zstd::bulk::compress(piece, 1).unwrap()
            });
            packed.iter().for_each(|piece| file.write_all(piece).unwrap());
            file.sync_all().unwrap();
            packed
        });
        let (unplain, _) = measure("plain zstd + BLAKE3 + write", data.len(), || {
            let mut file = tempfile::tempfile().unwrap();
            let unpacked = on_all(&packed, |piece| {
                let plain = zstd::bulk::decompress(piece, MIB).unwrap();
                std::hint::black_box(blake3::hash(&plain));
                plain
            });
            unpacked.iter().for_each(|piece| file.write_all(piece).unwrap());
        });
        for (name, unname, chunking) in
            [("packing a file", "unpacking a file", Chunking::Content), ("packing memory", "unpacking memory", Chunking::MEMORY)]
        {
            let dir = tempfile::tempdir().unwrap();
            let place = Location::Folder(dir.path().join("repository"));
            let repository = runtime.block_on(Repository::create(&place, &Options::new("speed"))).unwrap();
            let source = Cursor::new(data.clone());
            let (figures, stream) = measure(name, data.len(), || runtime.block_on(pack(&repository, source, chunking)));
            compare(&figures, &plain);
            let usage = runtime.block_on(repository.usage()).unwrap();
            println!(
                "  {} chunks, {} packs, {:.2} of the plain bytes",
                usage.chunks,
                usage.packs,
                usage.stored_bytes as f64 / data.len() as f64
            );
            let repository = runtime.block_on(Repository::open(&place, &Options::new("speed"))).unwrap();
            let file = tempfile::tempfile().unwrap();
            let (figures, ()) = measure(unname, data.len(), || runtime.block_on(unpack(&repository, &stream, file)));
            compare(&figures, &unplain);
        }
    }
}

async fn pack(repository: &Repository, source: Cursor<Vec<u8>>, chunking: Chunking) -> StreamRef {
    let writer = repository.writer().unwrap();
    let stream = writer.write_file(source, chunking).await.unwrap();
    writer.finish().await.unwrap();
    stream
}

async fn unpack(repository: &Repository, stream: &StreamRef, file: File) {
    repository.read_to_file(stream, file).await.unwrap();
}
