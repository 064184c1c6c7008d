//! The examples do what they say, in shell and in Python.

use dormouse_tests::{Server, eventually};
use serde_json::json;
use std::{
    path::PathBuf,
    process::{Command, Output, Stdio},
};

fn example(server: &Server, name: &str, args: &[&str]) -> Command {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples").join(name);
    let mut command = Command::new(path);
    command.args(args).env("DORMOUSE_URL", &server.client.base).env("DORMOUSE_TOKEN", &server.client.token);
    command
}

#[track_caller]
fn run(server: &Server, name: &str, args: &[&str]) -> Output {
    let output = example(server, name, args).output().unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// Get-or-create at the top of each turn, from an orchestrator that remembers nothing and whose server crashes.
#[test]
fn turns_go_on_in_one_session_through_crashes() {
    let mut server = Server::start();
    for name in ["turns.sh", "turns.py"] {
        let count = "echo >> log; wc -l < log";
        for turn in 1..=3 {
            let output = run(&server, name, &[name, count]);
            assert_eq!(text(&output.stdout).trim(), turn.to_string(), "{name}");
            assert!(text(&output.stderr).contains(&format!("turn {turn}")), "{name}");
            match turn {
                1 => server.crash(),
                _ => drop(server.client.get(&format!("/v1/sessions?key={name}")).expect(200)),
            }
        }
        // A turn whose orchestrator died after asking: the same turn again gets the first one's result.
        let id = server.client.get(&format!("/v1/sessions?key={name}")).expect(200).json()["items"][0]["id"].clone();
        let path = format!("/v1/sessions/{}/execs?wait=true", id.as_str().expect("an id"));
        server.client.post(&path, &json!({ "shell": count, "key": "turn-4" })).expect(201);
        assert_eq!(text(&run(&server, name, &[name, count]).stdout).trim(), "4", "{name}: it ran once");
    }
    server.delete_all_and_check();
}

#[test]
fn a_countdown_shows_what_is_left_and_moves_nothing() {
    let server = Server::start();
    let session = server.session_with(&json!({ "timeout_seconds": 1000, "ttl_seconds": 5000 }));
    let before = session.show();
    for name in ["countdown.sh", "countdown.py"] {
        let shown = run(&server, name, &[&session.id]);
        let lines: Vec<&str> = text(&shown.stdout).lines().collect();
        assert_eq!(lines[0], "connected", "{name}: {lines:?}");
        let left = |clock: &str| {
            let line = lines.iter().find(|line| line.starts_with(clock)).unwrap_or_else(|| panic!("{name}: {lines:?}"));
            line.split(' ').nth(1).expect("a number").parse::<u64>().expect("a number")
        };
        assert!((900..=1000).contains(&left("timeout_at")) && (4900..=5000).contains(&left("expires_at")), "{lines:?}");
    }
    assert_eq!((&before["timeout_at"], &before["expires_at"]), (&session.show()["timeout_at"], &session.show()["expires_at"]));
    session.hibernate();
    for name in ["countdown.sh", "countdown.py"] {
        let shown = run(&server, name, &[&session.id]);
        assert!(text(&shown.stdout).starts_with("hibernated\n"), "{name}");
        assert!(text(&shown.stdout).contains("way back: wake with memory"), "{name}");
    }
    let woken = run(&server, "countdown.py", &[&session.id, "--wake"]);
    assert!(text(&woken.stdout).starts_with("connected\n") && text(&woken.stdout).contains("memory restored"));
    server.delete_all_and_check();
}

/// The second device goes on exactly where the first one stopped.
#[test]
fn a_viewer_comes_back_from_another_device_without_a_byte_twice_or_missing() {
    let mut server = Server::start();
    let session = server.session();
    let exec = session.start_sh("for n in $(seq 1 200); do echo line $n; sleep 0.02; done");
    let printed = |session: &dormouse_tests::Session| session.output(&exec, "stdout").len();
    eventually("some of it is there", || (printed(&session) > 300).then_some(()));
    let first = run(&server, "viewer.sh", &[&session.id, &exec]);
    let offset = text(&first.stderr).trim().to_owned();
    let mut second = example(&server, "viewer.py", &[&session.id, &exec, &offset]);
    let second = second.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // The server dies under the second device.
    server.crash();
    let session = session.on(&server.client);
    let second = second.wait_with_output().expect("it ends");
    assert!(second.status.success(), "{}", text(&second.stderr));
    let all: String = (1..=200).map(|n| format!("line {n}\n")).collect();
    assert_eq!(format!("{}{}", text(&first.stdout), text(&second.stdout)), all);
    assert_eq!(text(&second.stderr).trim(), all.len().to_string());
    assert_eq!(printed(&session), all.len());
    server.delete_all_and_check();
}
