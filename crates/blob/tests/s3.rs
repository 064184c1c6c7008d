//! The blob store on a real S3 server: the same suite as on a folder, and what only a server can do: go away.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use blob::{Chunking, Error, Location, Options, Repository, StreamRef};
use dormouse_tests::s3::{BUCKET, S3};
use std::{
    io::{self, Read},
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// One server for the suite, ended by the last test that has it. Each test has a prefix of its own.
fn place() -> (Location, Arc<S3>) {
    static SERVER: LazyLock<Mutex<std::sync::Weak<S3>>> = LazyLock::new(Mutex::default);
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let mut kept = SERVER.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let server = kept.upgrade().unwrap_or_else(|| Arc::new(S3::start()));
    *kept = Arc::downgrade(&server);
    let prefix = format!("suite/{}", COUNT.fetch_add(1, Ordering::Relaxed));
    (at(&server, &prefix), server)
}

/// A place on the server.
fn at(server: &S3, prefix: &str) -> Location {
    Location::parse_with(&server.url(prefix), server.settings()).unwrap()
}

blob::conformance_tests!(place);

fn options(patience: u64) -> Options {
    Options::new("tests").with_patience(Duration::from_secs(patience))
}

/// Bytes that don't compress; `read` counts how many were taken.
struct Noise {
    reader: io::Take<blake3::OutputReader>,
    read: Arc<AtomicU64>,
}

impl Noise {
    fn new(bytes: u64) -> Noise {
        let reader = blake3::Hasher::new().update(b"noise").finalize_xof().take(bytes);
        Noise { reader, read: Arc::default() }
    }
}

impl Read for Noise {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

async fn expect_noise(repository: &Repository, stream: &StreamRef, bytes: u64) {
    let mut read = Vec::new();
    repository.read_stream(stream, &mut read).await.unwrap();
    let mut expected = Vec::new();
    Noise::new(bytes).read_to_end(&mut expected).unwrap();
    assert!(read == expected, "what was read is not what was written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_goes_on_when_the_server_was_killed_in_the_middle_of_it() {
    let mut server = S3::start();
    let place = at(&server, "killed");
    let repository = Repository::create(&place, &options(120)).await.unwrap();
    const BYTES: u64 = 200 << 20;
    let writer = repository.writer().unwrap();
    let noise = Noise::new(BYTES);
    let read = noise.read.clone();
    let upload = tokio::spawn(async move {
        let stream = writer.write_file(noise, Chunking::Content).await?;
        writer.commit("image", &serde_json::to_vec(&stream).unwrap()).await?;
        Ok::<_, Error>(stream)
    });
    for part in 1..4 {
        wait_until("the upload goes on", || read.load(Ordering::Relaxed) > BYTES / 5 * part).await;
        tokio::task::block_in_place(|| server.kill());
        assert!(!upload.is_finished());
        tokio::task::block_in_place(|| server.start_again());
    }
    let stream = upload.await.unwrap().unwrap();
    expect_noise(&repository, &stream, BYTES).await;
    assert_eq!(repository.check(|_| ()).await.unwrap(), vec![]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_whose_writer_is_gone_is_resumed_by_the_next() {
    let mut server = S3::start();
    let place = at(&server, "resumed");
    const BYTES: u64 = 150 << 20;
    let repository = Repository::create(&place, &options(2)).await.unwrap();
    let writer = repository.writer().unwrap();
    let noise = Noise::new(BYTES);
    let read = noise.read.clone();
    let upload = tokio::spawn(async move { writer.write_file(noise, Chunking::Content).await });
    wait_until("half of it is read", || read.load(Ordering::Relaxed) > BYTES / 2).await;
    tokio::task::block_in_place(|| server.kill());
    let error = upload.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && error.is_retryable(), "{error}");
    drop(repository);
    tokio::task::block_in_place(|| server.start_again());
    let repository = Repository::open(&place, &options(60)).await.unwrap();
    let there = repository.usage().await.unwrap();
    assert!(there.packs > 0 && there.plain_bytes < BYTES, "{there:?}");
    let writer = repository.writer().unwrap();
    let stream = writer.write_file(Noise::new(BYTES), Chunking::Content).await.unwrap();
    let written = writer.finish().await.unwrap();
    assert!(written.new_bytes <= written.bytes - there.plain_bytes, "{written:?} {there:?}");
    expect_noise(&repository, &stream, BYTES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_is_tried_until_it_comes_back() {
    let mut server = S3::start();
    let place = at(&server, "away");
    let repository = Repository::create(&place, &options(60)).await.unwrap();
    repository.put_manifest("one", b"first").await.unwrap();
    server.kill();
    let impatient = Repository::open(&place, &options(1)).await.unwrap_err();
    let Error::Unreachable { store, tried, .. } = &impatient else { panic!("{impatient}") };
    assert!(store.contains(BUCKET) && *tried >= Duration::from_secs(1) && *tried < Duration::from_secs(10), "{impatient}");
    let mut waiting = tokio::spawn(async move { repository.manifest("one").await });
    // Through several tries.
    assert!(tokio::time::timeout(Duration::from_secs(2), &mut waiting).await.is_err());
    tokio::task::block_in_place(|| server.start_again());
    let begun = Instant::now();
    assert_eq!(waiting.await.unwrap().unwrap().unwrap(), b"first");
    assert!(begun.elapsed() < Duration::from_secs(15));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_credentials_and_a_bucket_that_is_not_there_are_clear_errors() {
    let server = S3::start();
    let with = |name: &str, value: &str, bucket: &str| {
        let mut settings = server.settings();
        settings.retain(|(known, _)| known != name);
        settings.push((name.to_owned(), value.to_owned()));
        Location::parse_with(&format!("s3://{bucket}/x"), settings).unwrap()
    };
    for (name, says) in [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId")] {
        let begun = Instant::now();
        let error = Repository::create(&with(name, "wrong", BUCKET), &options(60)).await.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        assert!(error.to_string().contains(says) && error.to_string().contains("credentials"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(10), "what is refused is not tried again");
    }
    let error = Repository::open(&with("AWS_REGION", "us-east-1", "no-such-pail"), &options(60)).await.unwrap_err();
    assert!(matches!(error, Error::NoRepository { .. }) && error.to_string().contains("s3://no-such-pail/x"), "{error}");
}

async fn wait_until(what: &'static str, mut look: impl FnMut() -> bool) {
    let deadline = Instant::now() + dormouse_tests::PATIENCE;
    while !look() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
