//! Snapshots on a file system that shares blocks between files (XFS): a large file costs a snapshot nothing, and what either
//! side changes afterwards is its own.

use dormouse_tests::{Options, Server, Session};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// An XFS in a file, unmounted with this value.
struct Xfs {
    at: PathBuf,
    _dir: tempfile::TempDir,
}

impl Xfs {
    fn new(size: &str) -> Xfs {
        let dir = tempfile::tempdir().expect("a directory");
        let (image, at) = (dir.path().join("image"), dir.path().join("xfs"));
        std::fs::create_dir(&at).expect("a directory");
        let run = |program: &str, args: &[&str], path: &Path| {
            let mut command = Command::new(program);
            let status = command.args(args).arg(path).status().unwrap_or_else(|e| panic!("{program}: {e}"));
            assert!(status.success(), "{program}");
        };
        run("truncate", &["--size", size], &image);
        run("mkfs.xfs", &["-q", "-m", "reflink=1"], &image);
        let mounted = Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at).status();
        assert!(mounted.expect("mount is there").success());
        Xfs { at, _dir: dir }
    }

    /// Bytes that are taken.
    fn used(&self) -> u64 {
        // What was written is counted once it has its blocks.
        rustix::fs::syncfs(std::fs::File::open(&self.at).expect("a directory")).expect("it syncs");
        let stat = rustix::fs::statvfs(&self.at).expect("a file system");
        (stat.f_blocks - stat.f_bfree) * stat.f_frsize
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["--lazy"]).arg(&self.at).status();
    }
}

const LARGE: u64 = 256 << 20;
const SUM: &str = "sha256sum < /root/large";

fn take(session: &Session, memory: bool) -> Value {
    session.client.post(&session.path("/snapshots"), &json!({ "memory": memory })).expect(201).json()
}

#[test]
fn a_snapshot_shares_the_blocks_of_large_files_and_neither_side_sees_the_others_changes() {
    let xfs = Xfs::new("3G");
    let server = Server::with(Options { dir: Some(xfs.at.clone()), ..Options::default() });
    let session = server.session();
    session.out(&format!("head -c {LARGE} /dev/urandom > /root/large; echo one > /root/small; echo memory > /tmp/memory; sync"));
    let (sum, before) = (session.out(SUM), xfs.used());
    let taken = take(&session, true);
    let cost = xfs.used().saturating_sub(before);
    assert!(cost < LARGE / 4, "{cost} bytes for a snapshot of {taken}");
    // One page of the live file, and the other way round.
    session.out("printf changed | dd of=/root/large conv=notrunc bs=1 seek=1000000 2>/dev/null; echo two > /root/small; sync");
    let changed = session.out(SUM);
    assert_ne!(changed, sum);
    let path = format!("/v1/snapshots/{}/fork", taken["id"].as_str().expect("an id"));
    let made = server.client.post(&path, &json!({})).expect(201).json();
    let fork = Session::new(server.client.clone(), &made["items"][0]);
    assert_eq!((fork.out(SUM), fork.out("cat /root/small /tmp/memory").as_str()), (sum.clone(), "one\nmemory"));
    fork.out("printf other | dd of=/root/large conv=notrunc bs=1 seek=5 2>/dev/null; sync");
    assert_eq!(session.out(SUM), changed);
    // The next one again costs what has changed.
    let before = xfs.used();
    let second = take(&session, false);
    let cost = xfs.used().saturating_sub(before);
    assert!(cost < LARGE / 4, "{cost} bytes for a second snapshot");
    let back = json!({ "snapshot_id": taken["id"] });
    session.client.post(&session.path("/rollback"), &back).expect(200);
    assert_eq!(session.out(SUM), sum);
    let back = json!({ "snapshot_id": second["id"] });
    session.client.post(&session.path("/rollback"), &back).expect(200);
    assert_eq!(session.out(SUM), changed);
    // Asleep its upper directory stands still: shared as well.
    session.hibernate();
    let before = xfs.used();
    take(&session, true);
    let cost = xfs.used().saturating_sub(before);
    assert!(cost < LARGE / 4, "{cost} bytes for a snapshot of a sleeping session");
    server.delete_all_and_check();
}
