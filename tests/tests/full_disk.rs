//! A full disk: what needs room is refused with numbers, what runs goes on, what prints waits, what is deleted goes.

use dormouse_tests::{Options, Server, eventually};
use serde_json::json;
use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

/// A small file system in memory, unmounted with this value.
struct Small {
    at: PathBuf,
    _dir: tempfile::TempDir,
}

impl Small {
    fn new(size: &str) -> Small {
        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path().join("small");
        std::fs::create_dir(&at).expect("a directory");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(&at).status();
        assert!(mounted.expect("mount is there").success());
        Small { at, _dir: dir }
    }

    /// Takes all the room there is.
    fn fill(&self) {
        let mut file = File::options().create(true).append(true).open(self.filler()).expect("a file");
        let zeros = [0u8; 4096];
        while file.write_all(&zeros).is_ok() {}
    }

    fn filler(&self) -> PathBuf {
        self.at.join("filler")
    }

    fn empty(&self) {
        std::fs::remove_file(self.filler()).expect("it is there");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["--lazy"]).arg(&self.at).status();
    }
}

fn reserve(data: &Path) -> PathBuf {
    data.join("reserve")
}

#[test]
fn a_full_disk_loses_nothing_and_stops_nothing_that_runs() {
    let small = Small::new("300m");
    let server = Server::with(Options { dir: Some(small.at.clone()), ..Options::default() });
    eventually("room is kept back", || reserve(server.data()).exists().then_some(()));
    let session = server.session();
    session.write_file("/root/kept", b"kept").expect(204);
    session.out("echo kept > /tmp/memory");
    let asleep = server.session();
    asleep.hibernate();
    let stopped = server.session();
    stopped.call("stop").expect(200);
    // Prints about a megabyte a second until it is told to end; another program counts in memory meanwhile.
    let printer = session.start_sh("while [ ! -e /tmp/enough ]; do head -c 100000 /dev/zero | tr '\\0' x; sleep 0.1; done");
    session.out("(n=0; while :; do n=$((n+1)); echo $n > /tmp/count; sleep 0.05; done) >/dev/null 2>&1 & echo");
    small.fill();

    // What needs room is refused before anything is begun, or leaves everything as it was.
    let refused = server.client.post("/v1/sessions", &json!({ "key": "no-room" })).expect(507).json();
    assert_eq!(refused["code"], "no_space", "{refused}");
    let list = server.client.get("/v1/sessions?key=no-room").expect(200).json();
    assert_eq!(list["items"], json!([]), "nothing was begun: {list}");
    let refused = session.call("hibernate").expect(507).json();
    assert_eq!(refused["code"], "no_space", "{refused}");
    let shown = session.show();
    assert_eq!((&shown["state"], &shown["memory"]), (&json!("running"), &json!("live")), "{shown}");

    // What runs goes on; what prints waits, and the session says so.
    eventually("it says that output waits", || {
        let shown = session.show();
        (shown["activity"]["output_waits"] == true).then_some(())
    });
    assert_eq!(session.read_file("/root/kept").expect(200).body, b"kept");
    let count = || session.read_file("/tmp/count").expect(200).text().trim().parse::<u64>().unwrap_or(0);
    let before = count();
    eventually("what doesn't print goes on", || (count() > before + 10).then_some(()));

    // Deleting works, running or asleep, and makes room.
    stopped.delete();
    asleep.delete();
    small.empty();
    session.write_file("/tmp/enough", b"").expect(204);
    let ended = session.ended(&printer);
    assert_eq!((&ended["state"], &ended["exit_code"]), (&json!("exited"), &json!(0)), "{ended}");
    let printed = session.output(&printer, "stdout");
    assert_eq!(printed.len() as u64, ended["stdout_bytes"].as_u64().expect("a number"));
    assert!(
        printed.len().is_multiple_of(100_000) && printed.iter().all(|byte| *byte == b'x'),
        "each byte is there: {}",
        printed.len()
    );
    session.hibernate();
    assert_eq!(session.out("cat /tmp/memory /root/kept"), "kept\nkept");
    eventually("room is kept back again", || reserve(server.data()).exists().then_some(()));
    server.delete_all_and_check();
}
