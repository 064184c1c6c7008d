//! An upgrade is: install, restart. What an older build began, a newer one goes on with: its store, its supervisors, the
//! guests in its sandboxes and in its images.
//!
//! The older build is a real one, kept in `tests/frozen` (its README says of what, and how it is replaced).

use base64::{Engine as _, prelude::BASE64_STANDARD};
use dormouse_tests::{Options, Server, Session, eventually};
use serde_json::{Value, json};
use std::{os::unix::fs::PermissionsExt, path::PathBuf, process::Command};

/// Unpacks the frozen build.
fn frozen(dir: &std::path::Path) -> PathBuf {
    let packed = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("frozen/dormouse.zst");
    let binary = dir.join("dormouse");
    let unpacked = Command::new("zstd").arg("-dqo").arg(&binary).arg(&packed).status().expect("zstd is there");
    assert!(unpacked.success(), "{}: {unpacked}", packed.display());
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).expect("it is there");
    binary
}

const COUNTER: &str = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done";

fn counted(session: &Session, exec: &str) -> Vec<u64> {
    let text = String::from_utf8(session.output(exec, "stdout")).expect("numbers");
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| line.parse().expect("a number")).collect()
}

#[track_caller]
fn counts_on(session: &Session, exec: &str) {
    let before = counted(session, exec).len();
    eventually("it counts on", || (counted(session, exec).len() > before + 5).then_some(()));
    let numbers = counted(session, exec);
    assert!(numbers.iter().enumerate().all(|(n, number)| *number == n as u64 + 1), "every number once, in order");
}

#[test]
fn a_newer_server_goes_on_with_what_an_older_one_began() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut server = Server::with(Options { binary: Some(frozen(dir.path())), ..Options::default() });
    let (awake, asleep) = (server.session_with(&json!({ "key": "awake" })), server.session());
    let (counter, sleeper) = (awake.start_sh(COUNTER), asleep.start_sh(COUNTER));
    let shell = awake.client.post(&awake.path("/terminals"), &json!({ "argv": ["sh", "-c", "echo pid $$; exec cat"] }));
    let shell = shell.expect(201).json()["id"].as_str().expect("an id").to_owned();
    asleep.out("echo kept > /tmp/memory");
    counts_on(&awake, &counter);
    asleep.hibernate();
    let version = |server: &Server| server.client.get("/v1/server").expect(200).json();
    let older = version(&server);

    server.terminate();
    server.install(None);
    server.start_again();
    assert_ne!(older["pid"], version(&server)["pid"]);
    let (awake, asleep) = (awake.on(&server.client), asleep.on(&server.client));

    // Under its older supervisor, with its older guest.
    let answer = awake.client.post(&awake.path("/connect"), &json!({})).expect(200).json();
    assert_eq!((&answer["status"], &answer["session"]["key"]), (&json!("connected"), &json!("awake")), "{answer}");
    counts_on(&awake, &counter);
    assert_eq!(awake.out("echo works"), "works");
    awake.write_file("/root/file", b"works").expect(204);
    let screen = awake.client.get(&awake.path(&format!("/terminals/{shell}/screen?format=text"))).expect(200).text();
    assert!(screen.starts_with("pid "), "{screen}");
    // It can't say what goes on in it: nothing is put to sleep on a guess.
    let idle = json!({ "idle": { "after_seconds": 1, "action": "hibernate" } });
    awake.client.patch(&awake.path(""), &idle).expect(200);
    counts_on(&awake, &counter);
    awake.client.patch(&awake.path(""), &json!({ "idle": null })).expect(200);

    // Its older image, and older guests under a newer supervisor.
    awake.hibernate();
    for (session, exec) in [(&awake, &counter), (&asleep, &sleeper)] {
        let woken = session.client.post(&session.path("/wake"), &json!({})).expect(200).json();
        assert_eq!((&woken["state"], &woken["generation"]), (&json!("running"), &json!(2)), "{woken}");
        counts_on(session, exec);
    }
    assert_eq!(asleep.out("cat /tmp/memory"), "kept");
    let lines: Vec<Value> = awake
        .client
        .get(&awake.path(&format!("/terminals/{shell}/output?from=0")))
        .expect(200)
        .text()
        .lines()
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let bytes = BASE64_STANDARD.decode(lines[0]["data_b64"].as_str().expect("data")).expect("base64");
    assert!(bytes.starts_with(b"pid "), "{lines:?}");
    // Put to sleep and woken once more, now by a newer supervisor.
    asleep.hibernate();
    asleep.wake();
    counts_on(&asleep, &sleeper);
    server.delete_all_and_check();
}
