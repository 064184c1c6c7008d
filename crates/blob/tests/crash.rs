//! A process that dies at each step in turn, and what the next one finds: through the points of `faults`.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use blob::{Chunking, Error, KeySource, Location, Options, Repository, StreamRef};
use std::{
    collections::BTreeSet,
    env, fs,
    path::Path,
    process::{Command, Output},
    time::Duration,
};

fn key(n: u8) -> KeySource {
    KeySource::Bytes(vec![n; 32])
}

fn options(n: u8) -> Options {
    Options::new("tests").with_patience(Duration::from_secs(10)).with_key(Some(key(n)))
}

/// The contents of each name, so that who finds a name knows what it has to be.
fn contents(name: &str) -> Vec<u8> {
    let length = 2000 + name.len() * 7000;
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(name.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Told by the one who works, each once it is certain.
fn done(folder: &Path, step: &str) {
    let path = folder.with_extension("done");
    let before = fs::read_to_string(&path).unwrap_or_default();
    fs::write(path, before + step + "\n").unwrap();
}

async fn put(repository: &Repository, folder: &Path, name: &str) {
    let writer = repository.writer().unwrap();
    // Shares a part with all others.
    let bytes = [contents("shared"), contents(name)].concat();
    let stream = writer.write_stream(&bytes[..], Chunking::MEMORY).await.unwrap();
    writer.commit(name, &serde_json::to_vec(&stream).unwrap()).await.unwrap();
    done(folder, &format!("put {name}"));
}

async fn collect(repository: &Repository) {
    let mut mark = repository.mark();
    for name in repository.manifests().await.unwrap() {
        mark.stream(&reference(repository, &name).await).await.unwrap();
    }
    repository.collect(mark, false).await.unwrap();
}

async fn reference(repository: &Repository, name: &str) -> StreamRef {
    serde_json::from_slice(&repository.manifest(name).await.unwrap().unwrap()).unwrap()
}

/// All that can be done to a repository.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, in a process that is killed"]
async fn inside_work() {
    let Some(folder) = env::var_os("DORMOUSE_TEST_FOLDER") else { return };
    let folder = Path::new(&folder);
    let place = Location::Folder(folder.to_owned());
    let repository = Repository::create(&place, &options(1)).await.unwrap();
    done(folder, "created");
    for n in 0..10 {
        put(&repository, folder, &format!("m{n}")).await;
    }
    for n in [0, 1, 2, 5, 6, 7] {
        done(folder, &format!("deleting m{n}"));
        repository.delete_manifest(&format!("m{n}")).await.unwrap();
    }
    collect(&repository).await;
    put(&repository, folder, "last").await;
    repository.rotate(&key(1), &key(2)).await.unwrap();
    done(folder, "rotated");
}

fn run(dir: &Path, plan: &str) -> Output {
    fs::write(dir.join("plan"), plan).unwrap();
    fs::write(dir.join("armed"), "").unwrap();
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "inside_work", "--ignored", "--nocapture", "--test-threads=1"]);
    child.env("DORMOUSE_FAULTS", dir).env("DORMOUSE_TEST_FOLDER", dir.join("repository")).output().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_dies_at_any_step_leaves_a_whole_repository() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(dir.path(), "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let trace = fs::read_to_string(dir.path().join("trace.server")).unwrap();
    let names: BTreeSet<&str> = trace.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    for point in
        ["blob.pack.put", "blob.pack.remove", "blob.index.remove", "blob.collect.moved", "blob.key.stored", "blob.key.retire"]
    {
        assert!(names.contains(point), "{point} is not among {names:?}");
    }
    // Who dies before it reads has done what it had done before.
    let changes: Vec<(usize, &str)> = trace.lines().enumerate().filter(|(_, line)| !line.ends_with(" blob.get")).collect();
    let step = if env::var_os("DORMOUSE_LONG").is_some() { 1 } else { 2 };
    for (at, what) in changes.into_iter().step_by(step) {
        let dir = tempfile::tempdir().unwrap();
        let output = run(dir.path(), &format!("server {at} kill\n"));
        assert!(!output.status.success(), "it was not killed at {what}");
        inspect(dir.path(), what).await;
    }
}

/// What has to hold, wherever the other one died.
async fn inspect(dir: &Path, died_at: &str) {
    let folder = dir.join("repository");
    let place = Location::Folder(folder.clone());
    let told = fs::read_to_string(folder.with_extension("done")).unwrap_or_default();
    let repository = match Repository::open(&place, &options(1)).await {
        Err(Error::WrongKey { .. }) => Repository::open(&place, &options(2)).await.unwrap(),
        Err(Error::NoRepository { .. }) => {
            assert!(!told.contains("created"), "{died_at}");
            Repository::open_or_create(&place, &options(1)).await.unwrap()
        }
        other => other.unwrap(),
    };
    assert_eq!(repository.check(|_| ()).await.unwrap(), vec![], "{died_at}");
    let names = repository.manifests().await.unwrap();
    for line in told.lines().filter_map(|line| line.strip_prefix("put ")) {
        let deleted = told.contains(&format!("deleting {line}\n"));
        assert!(deleted || names.iter().any(|name| name == line), "{line} is gone; {died_at}");
    }
    collect(&repository).await;
    for name in &names {
        let mut read = Vec::new();
        repository.read_stream(&reference(&repository, name).await, &mut read).await.unwrap();
        assert!(read == [contents("shared"), contents(name)].concat(), "{name}; {died_at}");
    }
    put(&repository, &folder, "after").await;
    assert_eq!(repository.check(|_| ()).await.unwrap(), vec![], "{died_at}");
    for name in repository.manifests().await.unwrap() {
        repository.delete_manifest(&name).await.unwrap();
    }
    collect(&repository).await;
    let usage = repository.usage().await.unwrap();
    assert_eq!((usage.packs, usage.chunks), (0, 0), "{died_at}: {usage:?}");
}
