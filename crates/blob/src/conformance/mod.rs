//! What a repository must do at every kind of place: the same checks for a local folder and a real S3 server.
//!
//! Each check takes a place that is empty and panics where a promise is broken.
//! [`conformance_tests!`](crate::conformance_tests) makes one test of each.
#![allow(clippy::unwrap_used)] // A check fails by panicking.

mod basics;
mod collecting;
mod damage;
mod keys;
mod random;

pub use basics::*;
pub use collecting::*;
pub use damage::*;
pub use keys::*;
pub use random::*;

use crate::{KeySource, Location, Mark, Options, Repository, StreamRef, Writer, store::Store};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Makes a `#[tokio::test]` of each check. `$make` is a function without arguments that returns an empty [`Location`] and
/// something that is kept alive as long as the place.
#[macro_export]
macro_rules! conformance_tests {
    ($make:path) => {
        $crate::conformance_tests!(@each $make:
            streams_read_back, chunks_are_stored_once, parts_of_streams_are_read, zeros_cost_nothing, many_small_files_share_packs,
            forks_of_an_image_cost_what_changed, manifests_are_kept, a_repeated_upload_adds_nothing, who_opens_again_finds_all,
            index_objects_are_merged, another_server_is_refused, readers_write_nothing, what_is_cancelled_says_so, limits_are_kept,
            what_nothing_refers_to_is_collected, a_rehearsal_changes_nothing, mostly_dead_packs_are_rewritten,
            small_packs_are_put_together, writers_keep_what_they_use, a_pack_that_comes_back_stays, readers_go_on_while_packs_move,
            an_encrypted_repository_needs_its_key, names_and_contents_are_hidden, keys_rotate, a_rotation_that_was_cut_off_leaves_both,
            every_damaged_byte_is_told, every_missing_object_is_told, newer_formats_are_refused,
            random_work_agrees_with_a_model, random_work_agrees_with_a_model_encrypted);
    };
    (@each $make:path: $($check:ident),+ $(,)?) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $check() {
            let (place, _kept) = $make();
            $crate::conformance::$check(&place).await;
        }
    )+};
}

/// What the checks write as.
const SERVER: &str = "server-one";

fn options() -> Options {
    Options::new(SERVER).with_patience(Duration::from_secs(20))
}

fn key(n: u8) -> KeySource {
    KeySource::Bytes(vec![n; 32])
}

async fn fresh(place: &Location) -> Repository {
    Repository::create(place, &options()).await.unwrap()
}

async fn open(place: &Location) -> Repository {
    Repository::open(place, &options()).await.unwrap()
}

/// The objects themselves, past the repository.
fn objects(place: &Location) -> Store {
    Store::new(place, Duration::from_secs(20), CancellationToken::new()).unwrap()
}

/// Bytes that don't compress, the same for the same seed.
fn random_bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Bytes that compress about as programs and texts do.
fn mixed_bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = random_bytes(length, seed);
    for (n, part) in bytes.chunks_mut(64).enumerate() {
        if n % 2 == 0 {
            part.fill(b'a' + (n / 2 % 20) as u8);
        }
    }
    bytes
}

async fn read(repository: &Repository, stream: &StreamRef) -> Result<Vec<u8>, crate::Error> {
    let mut out = Vec::new();
    repository.read_stream(stream, &mut out).await.map(|()| out)
}

/// Stores a stream under a name; the manifest is its reference.
async fn commit(writer: Writer, name: &str, stream: &StreamRef) {
    writer.commit(name, &serde_json::to_vec(stream).unwrap()).await.unwrap();
}

async fn store(repository: &Repository, name: &str, bytes: &[u8], chunking: crate::Chunking) -> StreamRef {
    let writer = repository.writer().unwrap();
    let stream = writer.write_stream(bytes, chunking).await.unwrap();
    commit(writer, name, &stream).await;
    stream
}

/// Marks what all manifests refer to.
async fn mark(repository: &Repository) -> Mark {
    let mut mark = repository.mark();
    for name in repository.manifests().await.unwrap() {
        let Some(manifest) = repository.manifest(&name).await.unwrap() else { continue };
        mark.stream(&serde_json::from_slice(&manifest).unwrap()).await.unwrap();
    }
    mark
}

async fn collect(repository: &Repository) -> crate::Collected {
    let mark = mark(repository).await;
    repository.collect(mark, false).await.unwrap()
}

async fn expect_whole(repository: &Repository) {
    assert_eq!(repository.check(|_| ()).await.unwrap(), vec![]);
}
