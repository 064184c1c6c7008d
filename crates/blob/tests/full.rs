//! A store without room, and one whose reads and writes fail: through the points of `faults`, in a process of its own, since
//! these are read when a process starts.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use blob::{Chunking, Error, Location, Options, Repository};
use std::{env, fs, path::Path, process::Command, time::Duration};

/// Runs one of the tests below that are ignored by themselves, with faults from `dir`.
fn run(name: &str, dir: &Path) {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]);
    let output = child.env("DORMOUSE_FAULTS", dir).env("DORMOUSE_TEST_FOLDER", dir.join("repository")).output().unwrap();
    let says = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && says.contains("1 passed"), "{says}{}", String::from_utf8_lossy(&output.stderr));
}

struct Faults(std::path::PathBuf);

impl Faults {
    fn of_environment() -> Faults {
        Faults(env::var_os("DORMOUSE_FAULTS").unwrap().into())
    }

    /// Points are counted from 0 for the whole life of the process, so a plan by names is made and taken back.
    fn while_failing(&self, point: &str, how: &str) -> Armed {
        fs::write(self.0.join("plan"), format!("server {point} {how}\n")).unwrap();
        fs::write(self.0.join("armed"), "").unwrap();
        Armed(self.0.clone())
    }
}

/// Armed until it is dropped.
struct Armed(std::path::PathBuf);

impl Drop for Armed {
    fn drop(&mut self) {
        fs::remove_file(self.0.join("armed")).unwrap();
    }
}

#[test]
fn a_full_store_says_so_and_what_was_there_stays() {
    let dir = tempfile::tempdir().unwrap();
    run("inside_full_store", dir.path());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, in a process with faults"]
async fn inside_full_store() {
    let Some(folder) = env::var_os("DORMOUSE_TEST_FOLDER") else { return };
    let faults = Faults::of_environment();
    let place = Location::Folder(folder.into());
    let options = Options::new("tests").with_patience(Duration::from_secs(10));
    let repository = Repository::create(&place, &options).await.unwrap();
    let bytes: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let writer = repository.writer().unwrap();
    let old = writer.write_stream(&b"what was there"[..], Chunking::Content).await.unwrap();
    writer.commit("old", b"x").await.unwrap();
    {
        let _armed = faults.while_failing("blob.put", "enospc");
        let writer = repository.writer().unwrap();
        let stored = async {
            writer.write_stream(&bytes[..], Chunking::MEMORY).await?;
            writer.finish().await
        };
        let error = stored.await.unwrap_err();
        assert!(matches!(error, Error::NoSpace { .. }) && error.is_retryable(), "{error}");
        let error = repository.put_manifest("new", b"y").await.unwrap_err();
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
    }
    assert_eq!(repository.manifests().await.unwrap(), ["old"]);
    let mut read = Vec::new();
    repository.read_stream(&old, &mut read).await.unwrap();
    assert_eq!(read, b"what was there");
    assert_eq!(repository.check(|_| ()).await.unwrap(), vec![]);
    // Once there is room, the same succeeds with a new writer, in the same process.
    let writer = repository.writer().unwrap();
    let new = writer.write_stream(&bytes[..], Chunking::MEMORY).await.unwrap();
    writer.commit("new", b"y").await.unwrap();
    let mut read = Vec::new();
    repository.read_stream(&new, &mut read).await.unwrap();
    assert!(read == bytes);
    {
        let _armed = faults.while_failing("blob.get", "eio");
        let error = Repository::open(&place, &options).await.unwrap_err();
        assert!(matches!(error, Error::Store { .. }), "{error}");
    }
    Repository::open(&place, &options).await.unwrap();
}
