//! Snapshots, forks and rollbacks as a client sees them: what was kept never changes, and many go on from it.

use dormouse_tests::{Reply, Server, Session, eventually, http::Client};
use serde_json::{Value, json};
use std::{collections::BTreeSet, fs, thread};

const NOBODY: &str = "01890000-0000-7000-8000-000000000000";

#[track_caller]
fn take(session: &Session, body: &Value) -> Value {
    let snapshot = session.client.post(&session.path("/snapshots"), body).expect(201).json();
    assert_eq!((&snapshot["state"], &snapshot["session_id"]), (&json!("ready"), &json!(session.id)), "{snapshot}");
    snapshot
}

fn id(object: &Value) -> &str {
    object["id"].as_str().expect("an id")
}

fn path(snapshot: &Value) -> String {
    format!("/v1/snapshots/{}", id(snapshot))
}

/// The sessions of a fork, all of them made.
#[track_caller]
fn forks(client: &Client, path: &str, body: &Value) -> Vec<Session> {
    let answer = client.post(path, body).expect(201).json();
    assert_eq!(answer["errors"], json!([]), "{answer}");
    let items = answer["items"].as_array().expect("a list");
    items.iter().for_each(|fork| assert_eq!(fork["state"], "running", "{fork}"));
    items.iter().map(|fork| Session::new(client.clone(), fork)).collect()
}

#[track_caller]
fn back(session: &Session, snapshot: &Value) -> Value {
    let answer = session.client.post(&session.path("/rollback"), &json!({ "snapshot_id": id(snapshot) })).expect(200).json();
    assert_eq!((&answer["state"], &answer["id"]), (&json!("running"), &json!(session.id)), "{answer}");
    answer
}

fn listed(client: &Client, query: &str) -> Vec<String> {
    let list = client.get(&format!("/v1/snapshots{query}")).expect(200).json();
    list["items"].as_array().expect("a list").iter().map(|item| id(item).to_owned()).collect()
}

/// Deletes everything and checks that neither sessions nor snapshots have left anything.
#[track_caller]
fn clear(server: &Server) {
    server.delete_all_and_check();
    for snapshot in listed(&server.client, "?limit=1000") {
        server.client.delete(&format!("/v1/snapshots/{snapshot}")).expect(204);
    }
    eventually("nothing is left of the deleted snapshots", || {
        let names = |dir: &str| fs::read_dir(server.data().join(dir)).map(|entries| entries.count()).unwrap_or_default();
        (names("snapshots") + names("layers") == 0).then_some(())
    });
}

/// A mark on the disk, one in memory, and a process that goes on.
fn mark(session: &Session, text: &str) -> String {
    session.out(&format!("echo {text} > /root/disk; echo {text} > /tmp/memory; sleep 10000 >/dev/null 2>&1 & echo $!"))
}

fn marks(session: &Session) -> (String, String) {
    (session.out("cat /root/disk"), session.out("cat /tmp/memory 2>/dev/null || echo none"))
}

fn both(text: &str) -> (String, String) {
    (text.to_owned(), text.to_owned())
}

#[test]
fn a_snapshot_is_taken_shown_listed_and_deleted() {
    let server = Server::start();
    let (session, other) = (server.session(), server.session());
    let pid = mark(&session, "one");
    let body = json!({ "name": "base", "keep_seconds": 3600, "labels": { "step": "1" } });
    let first = take(&session, &body);
    for (field, value) in [
        ("name", json!("base")),
        ("labels", json!({ "step": "1" })),
        ("generation", json!(1)),
        ("memory", json!(true)),
        ("parent_id", Value::Null),
        ("taken_by", json!("user")),
    ] {
        assert_eq!(first[field], value, "{field}: {first}");
    }
    for field in ["size_bytes", "unique_bytes"] {
        assert!(first[field].as_u64().is_some_and(|bytes| bytes > 0), "{field}: {first}");
    }
    assert!(first["keep_until"].is_string() && first["created_at"].is_string(), "{first}");
    let requires = &first["requires"];
    assert_eq!((&requires["runtime"], requires["template_hash"].is_string()), (&json!("gvisor"), true), "{first}");
    assert_eq!(session.state(), "running");
    assert_eq!(session.out(&format!("kill -0 {pid} && cat /tmp/memory")), "one", "it has gone on");
    let event = session.event("snapshot.taken");
    assert_eq!(event["data"]["snapshot_id"], first["id"], "{event}");

    let second = take(&session, &json!({ "memory": false }));
    assert_eq!((&second["memory"], &second["name"]), (&json!(false), &Value::Null), "{second}");
    assert_eq!(second["parent_id"], first["id"], "{second}");
    assert_eq!(session.show()["latest_snapshot_id"], second["id"]);
    let third = take(&other, &json!({}));
    let ids = [id(&third), id(&second), id(&first)].map(str::to_owned);
    assert_eq!(listed(&server.client, ""), ids, "newest first");
    assert_eq!(listed(&server.client, &format!("?session={}", session.id)), ids[1..]);
    assert_eq!(listed(&server.client, "?find=base"), ids[2..]);
    let page = server.client.get("/v1/snapshots?limit=2").expect(200).json();
    let cursor = page["next_cursor"].as_str().expect("there is more");
    assert_eq!(listed(&server.client, &format!("?limit=2&cursor={cursor}")), ids[2..]);
    assert_eq!(server.client.get(&path(&first)).expect(200).json(), first, "what was kept never changes");

    server.client.delete(&path(&second)).expect(204);
    for reply in [server.client.delete(&path(&second)), server.client.get(&path(&second))] {
        let gone = reply.expect(410);
        assert_eq!((gone.problem().as_str(), gone.json()["at"].is_string()), ("deleted", true), "{}", gone.text());
    }
    assert_eq!(session.event("snapshot.deleted")["data"]["snapshot_id"], second["id"]);
    assert_eq!(listed(&server.client, ""), [ids[0].clone(), ids[2].clone()]);
    clear(&server);
}

#[test]
fn every_state_that_has_a_disk_can_be_kept() {
    let server = Server::start();
    let session = server.session();
    mark(&session, "kept");
    session.call("pause").expect(200);
    let paused = take(&session, &json!({}));
    assert_eq!(session.state(), "paused", "a user's pause is a user's");
    session.call("unpause").expect(200);
    session.hibernate();
    let asleep = take(&session, &json!({}));
    assert_eq!(session.state(), "hibernated", "nothing was started for it");
    assert_eq!(session.show()["memory"], "saved");
    session.wake();
    assert_eq!(marks(&session), both("kept"));
    session.call("stop").expect(200);
    let stopped = take(&session, &json!({}));
    assert_eq!(session.state(), "stopped");
    for (snapshot, memory) in [(&paused, true), (&asleep, true), (&stopped, false)] {
        assert_eq!(snapshot["memory"], memory, "{snapshot}");
        let fork = forks(&server.client, &format!("{}/fork", path(snapshot)), &json!({})).remove(0);
        let expected = if memory { both("kept") } else { ("kept".to_owned(), "none".to_owned()) };
        assert_eq!(marks(&fork), expected);
    }
    session.delete();
    let gone = session.client.post(&session.path("/snapshots"), &json!({})).expect(410);
    assert_eq!(gone.problem(), "deleted");
    clear(&server);
}

#[test]
fn three_forks_go_on_from_one_moment_and_never_see_each_other() {
    let server = Server::start();
    let session = server.session_with(&json!({ "key": "source", "metadata": { "team": "a", "n": "0" } }));
    let pid = mark(&session, "then");
    let snapshot = take(&session, &json!({}));
    // What happens later is in none of them.
    mark(&session, "later");
    let body = json!({ "count": 3, "name": "try", "metadata": { "n": "1" } });
    let made = forks(&server.client, &format!("{}/fork", path(&snapshot)), &body);
    assert_eq!(made.len(), 3);
    let ids: BTreeSet<&str> = made.iter().map(|fork| fork.id.as_str()).chain([session.id.as_str()]).collect();
    assert_eq!(ids.len(), 4);
    let mut identities = BTreeSet::from([(session.out("hostname"), session.out("cat /etc/machine-id"))]);
    for (n, fork) in made.iter().enumerate() {
        let show = fork.show();
        assert_eq!(show["parent"], json!({ "session_id": session.id, "snapshot_id": id(&snapshot) }), "{show}");
        assert_eq!((&show["generation"], &show["key"], &show["name"]), (&json!(1), &Value::Null, &json!("try")), "{show}");
        assert_eq!(show["metadata"], json!({ "team": "a", "n": "1" }), "{show}");
        assert_eq!(marks(fork), both("then"));
        assert_eq!(fork.out(&format!("kill -0 {pid} && echo alive")), "alive", "its processes go on");
        identities.insert((fork.out("hostname"), fork.out("cat /etc/machine-id")));
        fork.out(&format!("echo {n} > /root/disk; echo {n} > /tmp/memory; echo {n} > /root/only-{n}"));
    }
    assert_eq!(identities.len(), 4, "each is a machine of its own: {identities:?}");
    for (n, fork) in made.iter().enumerate() {
        assert_eq!(marks(fork), both(&n.to_string()));
        assert_eq!(fork.out("ls /root | grep only"), format!("only-{n}"));
    }
    assert_eq!(marks(&session), both("later"), "the source is left alone");
    assert_eq!(session.show()["key"], "source");
    let list = server.client.get(&format!("/v1/sessions?parent={}", session.id)).expect(200).json();
    assert_eq!(list["items"].as_array().map(Vec::len), Some(3));
    // They sleep and wake like any other, and outlive what they were made from.
    session.delete();
    server.client.delete(&path(&snapshot)).expect(204);
    made[0].hibernate();
    made[0].wake();
    made[1].call("stop").expect(200);
    made[1].call("start").expect(200);
    assert_eq!(marks(&made[0]), both("0"));
    assert_eq!(made[1].out("cat /root/disk /root/only-1"), "1\n1");
    clear(&server);
}

#[test]
fn a_fork_of_a_session_is_a_snapshot_and_a_fork() {
    let server = Server::start();
    let session = server.session();
    mark(&session, "now");
    let fork = forks(&session.client, &session.path("/fork"), &json!({})).remove(0);
    assert_eq!((marks(&fork), marks(&session)), (both("now"), both("now")));
    let parent = fork.show()["parent"].clone();
    assert_eq!(parent["session_id"], session.id.as_str());
    let taken = server.client.get(&format!("/v1/snapshots/{}", parent["snapshot_id"].as_str().expect("one"))).expect(200).json();
    assert_eq!((&taken["taken_by"], &taken["session_id"]), (&json!("fork"), &json!(session.id)), "{taken}");
    // A fork of the fork has all of it above each other.
    fork.out("echo more > /root/more");
    let second = forks(&fork.client, &fork.path("/fork"), &json!({ "count": 2 }));
    assert!(second.iter().all(|fork| fork.out("cat /root/disk /root/more /tmp/memory") == "now\nmore\nnow"));
    session.sh("test -e /root/more").code.filter(|code| *code == 1).expect("the source has nothing of it");
    clear(&server);
}

#[test]
fn a_session_is_made_from_a_snapshot_by_its_key() {
    let server = Server::start();
    let session = server.session_with(&json!({ "env": { "FROM": "source" } }));
    mark(&session, "base");
    let (base, disk) = (take(&session, &json!({})), take(&session, &json!({ "memory": false })));
    let create = |body: &Value| server.client.post("/v1/sessions", body);
    let body = json!({ "key": "k", "snapshot_id": base["id"], "task": "t" });
    let made = Session::new(server.client.clone(), &create(&body).expect(201).json());
    assert_eq!(marks(&made), both("base"));
    let show = made.show();
    assert_eq!((&show["task"], &show["parent"]["snapshot_id"]), (&json!("t"), &base["id"]), "{show}");
    assert_eq!(create(&body).expect(200).json()["id"], made.id.as_str(), "the same key gives the same session");
    let other = json!({ "key": "k", "snapshot_id": disk["id"] });
    assert_eq!(create(&other).expect(409).problem(), "key_conflict");
    let booted = create(&json!({ "snapshot_id": disk["id"] })).expect(201).json();
    let booted = Session::new(server.client.clone(), &booted);
    assert_eq!(marks(&booted), ("base".to_owned(), "none".to_owned()), "without memory it is booted afresh");
    create(&json!({ "snapshot_id": base["id"], "template": "debian" })).expect(400);
    server.client.delete(&path(&base)).expect(204);
    assert_eq!(create(&json!({ "snapshot_id": base["id"] })).expect(410).problem(), "deleted");
    clear(&server);
}

#[test]
fn a_rollback_sets_back_disk_and_memory_and_can_be_taken_back() {
    let mut server = Server::start();
    let session = server.session_with(&json!({ "key": "mine" }));
    let pid = mark(&session, "good");
    let good = take(&session, &json!({ "name": "good" }));
    let late = session.out("rm /root/disk; mkdir -p /root/new; echo bad > /tmp/memory; sleep 10000 >/dev/null 2>&1 & echo $!");
    let before = session.show();
    let after = back(&session, &good);
    assert_eq!((&after["id"], &after["key"]), (&before["id"], &json!("mine")));
    assert!(after["generation"].as_u64() > before["generation"].as_u64(), "{after}");
    assert_eq!(marks(&session), both("good"));
    assert_eq!(session.out(&format!("kill -0 {pid} && echo alive; test -e /root/new || echo gone")), "alive\ngone");
    assert_eq!(session.sh(&format!("kill -0 {late}")).code, Some(1), "what began later is not there");
    let event = session.event("rollback.done");
    assert_eq!(event["data"]["snapshot_id"], good["id"], "{event}");

    // One of the moment before was taken first.
    let list = server.client.get(&format!("/v1/snapshots?session={}", session.id)).expect(200).json();
    let bad = list["items"].as_array().expect("a list").iter().find(|one| one["taken_by"] == "rollback").expect("one").clone();
    back(&session, &bad);
    assert_eq!(session.out("ls /root; cat /tmp/memory"), "new\nbad");
    // What was kept is as it was, as often as it is gone back to, through a restart and from any state.
    server.crash();
    let session = session.on(&server.client);
    session.hibernate();
    back(&session, &good);
    assert_eq!(marks(&session), both("good"));
    session.call("stop").expect(200);
    back(&session, &good);
    assert_eq!(marks(&session), both("good"));
    session.call("pause").expect(200);
    back(&session, &good);
    assert_eq!(marks(&session), both("good"));
    let disk = take(&session, &json!({ "memory": false }));
    session.out("echo other > /root/disk");
    back(&session, &disk);
    assert_eq!(marks(&session), ("good".to_owned(), "none".to_owned()), "without memory it is booted afresh");
    let numbers: Vec<u64> = session.events().iter().map(|event| event["seq"].as_u64().expect("a number")).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>(), "its history goes on");
    clear(&server);
}

#[test]
fn the_middle_of_a_chain_of_ten_can_go_and_the_last_is_whole() {
    let server = Server::start();
    let session = server.session();
    let mut chain = Vec::new();
    for n in 0..10 {
        session.out(&format!("echo {n} > /root/file-{n}; echo {n} > /root/last; rm -f /root/file-{}", n - 2));
        chain.push(take(&session, &json!({ "name": format!("s{n}"), "memory": n % 2 == 0 })));
    }
    for (n, snapshot) in chain.iter().enumerate().skip(1) {
        assert_eq!(snapshot["parent_id"], chain[n - 1]["id"], "{snapshot}");
    }
    for n in [4, 5, 1] {
        server.client.delete(&path(&chain[n])).expect(204);
    }
    let content = "cat /root/last; ls /root | grep file | tr '\\n' ' '";
    for (n, expected) in [(9, "9\nfile-8 file-9"), (6, "6\nfile-5 file-6"), (0, "0\nfile-0")] {
        let fork = forks(&server.client, &format!("{}/fork", path(&chain[n])), &json!({})).remove(0);
        assert_eq!(fork.out(content), expected);
        fork.delete();
    }
    back(&session, &chain[2]);
    assert_eq!(session.out(content), "2\nfile-1 file-2");
    assert_eq!(server.client.get(&path(&chain[9])).expect(200).json()["parent_id"], chain[8]["id"]);
    clear(&server);
}

#[test]
fn two_snapshots_at_once_are_both_whole_and_an_exec_waits_for_neither() {
    let server = Server::start();
    let session = server.session();
    mark(&session, "same");
    let taken: Vec<Value> = thread::scope(|scope| {
        let calls: Vec<_> = (0..2).map(|_| scope.spawn(|| take(&session, &json!({})))).collect();
        assert_eq!(session.out("echo through"), "through");
        calls.into_iter().map(|call| call.join().expect("it is taken")).collect()
    });
    assert_ne!(taken[0]["id"], taken[1]["id"]);
    for snapshot in &taken {
        let fork = forks(&server.client, &format!("{}/fork", path(snapshot)), &json!({})).remove(0);
        assert_eq!(marks(&fork), both("same"));
    }
    clear(&server);
}

#[test]
fn a_snapshot_that_is_deleted_while_it_is_forked_is_whole_or_gone() {
    let server = Server::start();
    let session = server.session();
    mark(&session, "whole");
    for _ in 0..5 {
        let snapshot = take(&session, &json!({}));
        let (forked, deleted) = thread::scope(|scope| {
            let fork = scope.spawn(|| server.client.post(&format!("{}/fork", path(&snapshot)), &json!({ "count": 2 })));
            let delete = scope.spawn(|| server.client.delete(&path(&snapshot)));
            (fork.join().expect("an answer"), delete.join().expect("an answer"))
        });
        deleted.expect(204);
        match forked.status {
            410 => assert_eq!(forked.problem(), "deleted"),
            _ => {
                let answer = forked.expect(201).json();
                for error in answer["errors"].as_array().expect("a list") {
                    assert_eq!(error["status"], 410, "{answer}");
                }
                for fork in answer["items"].as_array().expect("a list") {
                    let fork = Session::new(server.client.clone(), fork);
                    assert_eq!(marks(&fork), both("whole"));
                    fork.delete();
                }
            }
        }
    }
    clear(&server);
}

#[test]
fn snapshots_outlive_their_session_and_unnamed_ones_have_an_end() {
    let mut server = Server::start();
    let session = server.session();
    mark(&session, "left");
    let (named, unnamed) = (take(&session, &json!({ "name": "left" })), take(&session, &json!({})));
    let short = take(&session, &json!({ "keep_seconds": 2 }));
    session.delete();
    server.crash();
    let show = |snapshot: &Value| server.client.get(&path(snapshot)).expect(200).json();
    assert_eq!(show(&named)["keep_until"], Value::Null, "a named one is kept");
    assert!(show(&unnamed)["keep_until"].is_string(), "{}", show(&unnamed));
    let fork = forks(&server.client, &format!("{}/fork", path(&named)), &json!({})).remove(0);
    assert_eq!(marks(&fork), both("left"));
    let gone = eventually("its time is over", || Some(server.client.get(&path(&short))).filter(|reply| reply.status == 410));
    assert_eq!(gone.problem(), "deleted");
    clear(&server);
}

#[test]
fn what_cant_be_is_refused_and_changes_nothing() {
    let server = Server::start();
    let session = server.session();
    let snapshot = take(&session, &json!({ "name": "base" }));
    let own = |what: &str, body: Value| session.client.post(&session.path(what), &body);
    let field = |reply: Reply, field: &str, words: &str| {
        let reply = reply.expect(400);
        let problem = reply.json();
        assert_eq!(problem["field"], field, "{problem}");
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains(words)), "{problem}");
    };
    for count in [json!(0), json!(-1), json!(1_000_000), json!(101), json!("2"), json!(1.5)] {
        field(own("/fork", json!({ "count": count })), "count", "1 to 100");
        field(server.client.post(&format!("{}/fork", path(&snapshot)), &json!({ "count": count })), "count", "1 to 100");
    }
    for name in ["", "a/b", "a b", "a\nb", NOBODY, &"x".repeat(101)] {
        field(own("/snapshots", json!({ "name": name })), "name", "");
    }
    for keep in [json!(0), json!(-1), json!(u64::MAX)] {
        field(own("/snapshots", json!({ "keep_seconds": keep })), "keep_seconds", "");
    }
    assert_eq!(own("/snapshots", json!({ "name": "base" })).expect(409).problem(), "conflict");
    assert_eq!(own("/rollback", json!({})).expect(400).problem(), "bad_request");
    assert_eq!(own("/rollback", json!({ "snapshot_id": NOBODY })).expect(404).problem(), "not_found");
    for path in [format!("/v1/snapshots/{NOBODY}"), "/v1/snapshots/base".to_owned()] {
        server.client.get(&path).expect(404);
        server.client.delete(&path).expect(404);
        server.client.post(&format!("{path}/fork"), &json!({})).expect(404);
    }
    for query in ["limit=0", "limit=1001", "cursor=x", "session=x", "colour=red"] {
        server.client.get(&format!("/v1/snapshots?{query}")).expect(400);
    }
    assert_eq!(server.client.get("/v1/snapshots?find=nothing").expect(404).problem(), "not_found");
    assert_eq!(listed(&server.client, ""), [id(&snapshot)], "nothing of it was taken");
    assert_eq!(session.show()["generation"], 1);
    let list = server.client.get("/v1/sessions").expect(200).json();
    assert_eq!(list["items"].as_array().map(Vec::len), Some(1), "nothing was made");
    // A name is free again once its snapshot is gone.
    server.client.delete(&path(&snapshot)).expect(204);
    take(&session, &json!({ "name": "base" }));
    clear(&server);
}

#[test]
fn a_request_that_comes_again_is_answered_again_through_a_restart() {
    let mut server = Server::start();
    let session = server.session();
    mark(&session, "once");
    let send = |client: &Client, path: &str, key: &str, body: &Value| {
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        client.send("POST", path, &headers, Some(body.to_string().as_bytes())).expect("an answer").expect(201).json()
    };
    let (take, fork, body) = (session.path("/snapshots"), session.path("/fork"), json!({ "count": 2 }));
    let snapshot = send(&server.client, &take, "s", &json!({}));
    let forked = send(&server.client, &fork, "f", &body);
    for _ in 0..2 {
        assert_eq!(send(&server.client, &take, "s", &json!({}))["id"], snapshot["id"]);
        let again = send(&server.client, &fork, "f", &body);
        assert_eq!((&again["items"][0]["id"], &again["items"][1]["id"]), (&forked["items"][0]["id"], &forked["items"][1]["id"]));
        server.crash();
    }
    let sessions = server.client.get("/v1/sessions").expect(200).json();
    assert_eq!(sessions["items"].as_array().map(Vec::len), Some(3));
    assert_eq!(listed(&server.client, "").len(), 2, "one, and the one that was forked");
    clear(&server);
}

#[test]
fn the_command_line_takes_lists_forks_and_goes_back() {
    let server = Server::start();
    let run = |args: &[&str]| {
        let output = server.cli(args).output().expect("it runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        (output.status.code().expect("a status"), text(&output.stdout), text(&output.stderr))
    };
    let out = |args: &[&str]| {
        let (code, out, err) = run(args);
        assert_eq!(code, 0, "{args:?}: {out} {err}");
        out
    };
    let session = server.session_with(&json!({ "key": "src" }));
    mark(&session, "cli");
    let base = out(&["snapshot", "src", "--name", "base", "--keep", "7d", "--label", "step=1"]);
    assert_eq!(server.client.get(&format!("/v1/snapshots/{base}")).expect(200).json()["labels"], json!({ "step": "1" }));
    let disk = out(&["snapshot", "src", "--no-memory"]);
    let table = out(&["snapshots", "src"]);
    assert!(table.contains(&base) && table.contains("base") && table.contains(&disk), "{table}");
    assert_eq!(out(&["-q", "snapshots"]).lines().collect::<Vec<_>>(), [disk.as_str(), base.as_str()]);
    let list: Value = serde_json::from_str(&out(&["--json", "snapshots"])).expect("JSON");
    assert_eq!(list["items"][1]["name"], "base");

    let made = out(&["fork", "base", "-n", "2", "--name", "try", "--meta", "a=b"]);
    let made: Vec<&str> = made.lines().collect();
    assert_eq!(made.len(), 2);
    let fork = Session { client: server.client.clone(), id: made[0].to_owned() };
    assert_eq!((marks(&fork), &fork.show()["metadata"]), (both("cli"), &json!({ "a": "b" })));
    let of_session = out(&["fork", "src"]);
    let from = out(&["new", "mine", "--from", "base"]);
    assert_eq!(out(&["exec", "mine", "--", "cat", "/tmp/memory"]), "cli");

    session.out("echo changed > /root/disk");
    assert_eq!(out(&["rollback", "src", "base"]), session.id);
    assert_eq!(marks(&session), both("cli"));
    let history = out(&["history", "src"]);
    for word in [&base, &disk, made[0], made[1], &of_session, &from, &session.id, "(this one)"] {
        assert!(history.contains(word), "{word} is in {history}");
    }
    let story: Value = serde_json::from_str(&out(&["--json", "history", "mine"])).expect("JSON");
    assert!(story["snapshots"].as_array().is_some_and(|all| all.iter().any(|one| one["name"] == "base")), "{story}");

    assert_eq!(out(&["snapshot-rm", "base", &disk]), format!("{base}\n{disk}"));
    for (args, code, words) in [
        (&["snapshot-rm", "base"][..], 3, "base"),
        (&["snapshot-rm", &disk], 3, "deleted"),
        (&["rollback", "src", "nothing"], 3, "nothing"),
        (&["fork", "nothing"], 3, "no session or snapshot"),
        (&["snapshot", "src", "--name", "a b"], 2, "name"),
        (&["fork", "src", "-n", "0"], 2, "1 to 100"),
        (&["fork", "src", "-n", "1000000"], 2, "1 to 100"),
        (&["history", "nothing"], 3, "nothing"),
    ] {
        let (status, _, err) = run(args);
        assert_eq!((status, err.contains(words)), (code, true), "{args:?}: {err}");
    }
    out(&["snapshot", "src", "--name", "again"]);
    let (status, _, err) = run(&["snapshot", "src", "--name", "again"]);
    assert_eq!((status, err.contains("name")), (5, true), "{err}");
    clear(&server);
}
