//! Forks and rollbacks with all that lives: memory, processes, terminals, output, identity.

use dormouse_tests::{Server, Session, eventually, terminal::Viewer};
use serde_json::{Value, json};
use wire::terminal::ServerFrame;

/// Counts the lines that it is given; the number so far is known to its memory alone.
const COUNTER: &str = "n=0; while read line; do n=$((n+1)); echo $n $line; done";

#[track_caller]
fn snapshot(session: &Session, body: &Value) -> Value {
    session.client.post(&session.path("/snapshots"), body).expect(201).json()
}

/// Forks a session or, with its path, a snapshot.
#[track_caller]
fn fork(session: &Session, path: &str, body: &Value) -> Vec<Session> {
    let forked = session.client.post(path, body).expect(201).json();
    assert_eq!(forked["errors"], json!([]), "{forked}");
    let items = forked["items"].as_array().expect("a list");
    items.iter().map(|item| Session::new(session.client.clone(), item)).collect()
}

#[track_caller]
fn rollback(session: &Session, snapshot: &Value) -> Value {
    session.client.post(&session.path("/rollback"), &json!({ "snapshot_id": snapshot["id"] })).expect(200).json()
}

/// Starts a program that answers each line that it is given.
fn start_counter(session: &Session) -> String {
    let exec = session.client.post(&session.path("/execs"), &json!({ "shell": COUNTER, "stdin": true })).expect(201);
    exec.json()["id"].as_str().expect("an id").to_owned()
}

/// Gives the counter a line; waits for its answer.
#[track_caller]
fn count(session: &Session, exec: &str, word: &str) -> String {
    let path = session.path(&format!("/execs/{exec}/stdin"));
    session
        .client
        .send("POST", &path, &[("content-type", "application/octet-stream")], Some(format!("{word}\n").as_bytes()))
        .expect("an answer");
    eventually("the counter answers", || {
        let output = String::from_utf8(session.output(exec, "stdout")).expect("text");
        output.lines().rev().find(|line| line.ends_with(word)).map(str::to_owned)
    })
}

#[test]
fn forks_of_a_running_session_go_on_from_one_moment_and_never_meet() {
    let server = Server::start();
    let parent = server.session_with(&json!({ "key": "parent", "metadata": { "team": "a" }, "env": { "COLOUR": "red" } }));
    parent.out("echo kept > /root/disk; echo kept > /tmp/memory; mkdir /root/dir; echo x > /root/dir/x");
    let counter = start_counter(&parent);
    assert_eq!(count(&parent, &counter, "first"), "1 first");
    let forks = fork(&parent, &parent.path("/fork"), &json!({ "count": 3, "metadata": { "try": "yes" } }));
    assert_eq!(forks.len(), 3);
    assert_eq!(parent.state(), "running");
    let mut names = std::collections::HashSet::new();
    for (n, fork) in forks.iter().enumerate() {
        let shown = fork.show();
        assert_eq!(
            (&shown["state"], &shown["generation"], &shown["key"]),
            (&json!("running"), &json!(1), &Value::Null),
            "{shown}"
        );
        assert_eq!(shown["metadata"], json!({ "team": "a", "try": "yes" }));
        assert_eq!(shown["parent"]["session_id"], json!(parent.id));
        assert_eq!(fork.out("cat /root/disk /tmp/memory; echo $COLOUR"), "kept\nkept\nred");
        names.insert(fork.out("hostname; cat /etc/machine-id"));
        // Its memory goes on from the snapshot: the same program under the same id, its output by the same offsets.
        assert_eq!(fork.exec(&counter)["state"], "running");
        assert_eq!(count(fork, &counter, &format!("fork{n}")), format!("2 fork{n}"));
        fork.out(&format!("echo {n} > /root/disk; echo {n} > /tmp/memory; rm -r /root/dir; echo {n} > /root/only-{n}"));
        assert_eq!(fork.event("fork.made")["data"]["parent"], json!(parent.id));
    }
    names.insert(parent.out("hostname; cat /etc/machine-id"));
    assert_eq!(names.len(), 4, "{names:?}");
    assert_eq!(count(&parent, &counter, "parent"), "2 parent");
    assert_eq!(parent.out("cat /root/disk /tmp/memory /root/dir/x; ls /root"), "kept\nkept\nx\ndir\ndisk");
    for (n, fork) in forks.iter().enumerate() {
        assert_eq!(fork.out("cat /root/disk /tmp/memory; ls /root"), format!("{n}\n{n}\ndisk\nonly-{n}"));
        assert_eq!(String::from_utf8(fork.output(&counter, "stdout")).unwrap(), format!("1 first\n2 fork{n}\n"));
    }
    // A fork sleeps and wakes like any other session, and can be forked itself.
    forks[0].hibernate();
    let second = fork(&forks[0], &forks[0].path("/fork"), &json!({})).remove(0);
    assert_eq!(forks[0].state(), "hibernated", "a fork of a sleeping session doesn't wake it");
    assert_eq!(count(&second, &counter, "second"), "3 second");
    assert_eq!(count(&forks[0], &counter, "woken"), "3 woken");
    assert_eq!(second.out("cat /root/disk /tmp/memory"), "0\n0");
    // Nothing of a fork hangs on its parent.
    parent.delete();
    forks[1].delete();
    assert_eq!(second.out("cat /root/disk; ls /root"), "0\ndisk\nonly-0");
    assert_eq!(forks[2].out("cat /root/disk"), "2");
    server.delete_all_and_check();
}

#[test]
fn whatever_state_a_session_is_in_it_can_be_kept_and_forked_and_stays_as_it_is() {
    let server = Server::start();
    let session = server.session();
    session.out("echo disk > /root/f; echo memory > /tmp/f");
    for (call, state, memory) in [("pause", "paused", true), ("unpause", "running", true), ("hibernate", "hibernated", true)] {
        session.call(call).expect(200);
        let taken = snapshot(&session, &json!({ "name": format!("as-{state}") }));
        assert_eq!((&taken["memory"], &taken["state"]), (&json!(memory), &json!("ready")), "{taken}");
        assert_eq!(session.state(), state);
        let forked = fork(&session, &format!("/v1/snapshots/{}/fork", taken["id"].as_str().unwrap()), &json!({})).remove(0);
        assert_eq!(forked.out("cat /root/f /tmp/f"), "disk\nmemory", "{state}");
        forked.delete();
    }
    let without = snapshot(&session, &json!({ "memory": false }));
    assert_eq!(without["memory"], false);
    let booted = fork(&session, &format!("/v1/snapshots/{}/fork", without["id"].as_str().unwrap()), &json!({})).remove(0);
    assert_eq!(booted.out("cat /root/f; ls /tmp"), "disk", "booted afresh on the disk");
    session.wake();
    session.call("stop").expect(200);
    let stopped = snapshot(&session, &json!({}));
    assert_eq!((&stopped["memory"], session.state().as_str()), (&json!(false), "stopped"));
    let booted = fork(&session, &session.path("/fork"), &json!({})).remove(0);
    assert_eq!(booted.out("cat /root/f; ls /tmp"), "disk");
    // A new session with a key of its own, from a snapshot by name.
    let named = server.client.get("/v1/snapshots?limit=100").expect(200).json();
    let id = named["items"].as_array().unwrap().iter().find(|item| item["name"] == "as-hibernated").unwrap()["id"].clone();
    let from = server.session_with(&json!({ "key": "from", "snapshot_id": id, "task": "try again" }));
    assert_eq!(from.out("cat /root/f /tmp/f"), "disk\nmemory");
    assert_eq!(from.show()["task"], "try again");
    let conflict = server.client.post("/v1/sessions", &json!({ "key": "from", "snapshot_id": stopped["id"] })).expect(409);
    assert_eq!(conflict.problem(), "key_conflict");
    server.delete_all_and_check();
}

#[test]
fn a_rollback_keeps_the_session_and_brings_back_what_was() {
    let server = Server::start();
    let session = server.session_with(&json!({ "key": "mine" }));
    let counter = start_counter(&session);
    assert_eq!(count(&session, &counter, "one"), "1 one");
    session.out("echo then > /root/f; echo then > /tmp/f");
    let before = snapshot(&session, &json!({ "name": "before" }));
    assert_eq!(count(&session, &counter, "two"), "2 two");
    session.out("echo now > /root/f; echo now > /tmp/f; echo new > /root/g");
    let since = session.start_sh("exec sleep 100000");
    let back = rollback(&session, &before);
    assert_eq!(
        (&back["id"], &back["key"], &back["state"], &back["generation"]),
        (&json!(session.id), &json!("mine"), &json!("running"), &json!(2))
    );
    assert_eq!(session.out("cat /root/f /tmp/f; ls /root"), "then\nthen\nf");
    assert_eq!(count(&session, &counter, "again"), "2 again");
    assert_eq!(String::from_utf8(session.output(&counter, "stdout")).unwrap(), "1 one\n2 again\n");
    let lost = session.exec(&since);
    assert_eq!((&lost["state"], &lost["reason"]), (&json!("lost"), &json!("rolled_back")));
    // What was given up was kept first, and one can go back to that, too.
    let kept = server.client.get(&format!("/v1/snapshots?session={}", session.id)).expect(200).json();
    let kept = kept["items"].as_array().unwrap().iter().find(|item| item["id"] != before["id"]).expect("one of now").clone();
    rollback(&session, &kept);
    assert_eq!(session.out("cat /root/f /tmp/f /root/g"), "now\nnow\nnew");
    assert_eq!(session.exec(&since)["state"], "running");
    assert_eq!(count(&session, &counter, "three"), "3 three");
    // Of a sleeping and of a stopped one.
    session.hibernate();
    rollback(&session, &before);
    assert_eq!(session.out("cat /root/f /tmp/f"), "then\nthen");
    session.call("stop").expect(200);
    rollback(&session, &before);
    assert_eq!(count(&session, &counter, "last"), "2 last");
    // The history is one line, without holes.
    let events = session.events();
    assert!(events.iter().enumerate().all(|(n, event)| event["seq"] == json!(n + 1)));
    assert_eq!(events.iter().filter(|event| event["type"] == "rollback.done").count(), 4);
    // What belongs to others is no way back.
    let other = server.session();
    let refused = other.client.post(&other.path("/rollback"), &json!({ "snapshot_id": before["id"] })).expect(400);
    assert!(refused.text().contains("snapshot_id"), "{}", refused.text());
    let forked = fork(&session, &session.path("/fork"), &json!({})).remove(0);
    rollback(&forked, &before);
    assert_eq!(forked.out("cat /root/f"), "then", "a fork's forebears are its own");
    server.delete_all_and_check();
}

#[test]
fn a_terminal_goes_on_in_a_fork_with_its_screen() {
    let server = Server::start();
    let session = server.session();
    let body = json!({ "argv": ["sh", "-c", "echo before; while read l; do echo \"<$l>\"; done"], "cols": 80, "rows": 24 });
    let terminal = session.client.post(&session.path("/terminals"), &body).expect(201).json();
    let id = terminal["id"].as_str().expect("an id").to_owned();
    let screen = |session: &Session| session.client.get(&session.path(&format!("/terminals/{id}/screen?format=text"))).text();
    eventually("it is on the screen", || screen(&session).contains("before").then_some(()));
    let forked = fork(&session, &session.path("/fork"), &json!({})).remove(0);
    assert!(screen(&forked).contains("before"), "{}", screen(&forked));
    for (session, word) in [(&forked, "fork"), (&session, "parent")] {
        let mut viewer = Viewer::attach(session, &id, "client=0190a1b2-0000-7000-8000-000000000001&cols=80&rows=24&mode=take")
            .expect("a viewer");
        viewer.type_text(1, &format!("{word}\r"));
        viewer.until("its answer", |frame| {
            matches!(frame, ServerFrame::Output { bytes, .. } if String::from_utf8_lossy(bytes).contains(&format!("<{word}>")))
        });
    }
    assert!(!screen(&forked).contains("<parent>") && !screen(&session).contains("<fork>"));
    server.delete_all_and_check();
}

#[test]
fn a_fork_is_told_so_and_kernel_randomness_differs_but_a_seeded_generator_does_not() {
    let server = Server::start();
    let hook = json!(["sh", "-c", "echo $DORMOUSE_FORK_OF > /root/fork-of"]);
    let session = server.session_with(&json!({ "hooks": { "on_wake": hook } }));
    // A warm interpreter whose own generator is seeded, that says four numbers at each wake that it is told of.
    let script = r#"
import json, os, random, socket
random.seed(7); random.random()
s = socket.socket(socket.AF_UNIX); s.connect("/run/dormouse.sock"); lines = s.makefile("rw")
print("warm", flush=True)
while True:
    print(json.dumps({"op": "wait_wake"}), file=lines, flush=True)
    wake = json.loads(lines.readline())
    print(wake.get("fork_of"), os.urandom(8).hex(), random.random(), flush=True)
"#;
    session.write_file("/root/warm.py", script.as_bytes()).expect(204);
    let warm = session.start_sh("exec python3 /root/warm.py");
    eventually("it is warm", || (session.output(&warm, "stdout") == b"warm\n").then_some(()));
    let forks = fork(&session, &session.path("/fork"), &json!({ "count": 2 }));
    let said: Vec<Vec<String>> = forks
        .iter()
        .map(|fork| {
            let line = eventually("it was told", || {
                let output = String::from_utf8(fork.output(&warm, "stdout")).expect("text");
                output.lines().nth(1).map(str::to_owned)
            });
            line.split(' ').map(str::to_owned).collect()
        })
        .collect();
    assert!(said.iter().all(|words| words[0] == session.id), "{said:?}");
    assert_ne!(said[0][1], said[1][1], "the kernel's randomness");
    assert_eq!(said[0][2], said[1][2], "a generator that was seeded before can't be renewed from outside");
    for fork in &forks {
        eventually("the hook has run", || (fork.read_file("/root/fork-of").text().trim() == session.id).then_some(()));
    }
    server.delete_all_and_check();
}

/// Fills 64 MiB with a pattern by a seed, and checks it when asked.
const PATTERN: &str = r#"
import hashlib, sys
seed = sys.argv[1].encode()
def block(n): return hashlib.sha256(seed + n.to_bytes(4, "big")).digest() * 2048
memory = [bytearray(block(n)) for n in range(1024)]
print("filled", flush=True)
for line in sys.stdin:
    bad = [n for n in range(1024) if memory[n] != block(n)]
    print("good" if not bad else f"bad {bad[:5]}", line.strip(), flush=True)
"#;

#[test]
fn memory_is_exact_after_four_generations_of_forks_and_wakes() {
    let seed = dormouse_tests::seed();
    let server = Server::start();
    let mut session = server.session();
    session.write_file("/root/pattern.py", PATTERN.as_bytes()).expect(204);
    let argv = json!(["python3", "/root/pattern.py", seed.to_string()]);
    let exec = session.client.post(&session.path("/execs"), &json!({ "argv": argv, "stdin": true })).expect(201).json();
    let exec = exec["id"].as_str().expect("an id").to_owned();
    eventually("it is filled", || session.output(&exec, "stdout").starts_with(b"filled").then_some(()));
    for generation in 0..4 {
        let forked = fork(&session, &session.path("/fork"), &json!({})).remove(0);
        assert_eq!(count(&session, &exec, &format!("parent{generation}")), format!("good parent{generation}"));
        session.delete();
        session = forked;
        session.hibernate();
        session.wake();
        assert_eq!(count(&session, &exec, &format!("fork{generation}")), format!("good fork{generation}"));
    }
    server.delete_all_and_check();
}
