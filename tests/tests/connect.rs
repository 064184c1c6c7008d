//! Coming back to a session: what `connect` says in every state, and that it claims nothing it hasn't seen.

use dormouse_tests::{Server, Session, eventually, http::Reply};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn connect_with(session: &Session, query: &str, body: &Value) -> Reply {
    session.client.post(&session.path(&format!("/connect{query}")), body)
}

#[track_caller]
fn connect(session: &Session) -> Value {
    connect_with(session, "", &json!({})).expect(200).json()
}

#[track_caller]
fn look(session: &Session) -> Value {
    connect_with(session, "", &json!({ "wake": false })).expect(200).json()
}

#[test]
fn every_state_is_told_as_it_is_and_one_call_is_enough_to_go_on() {
    let server = Server::start();
    let session = server.session_with(&json!({ "timeout_seconds": 3600, "ttl_seconds": 7200 }));
    let exec = session.start_sh("echo from before; sleep 1000");
    let terminal = session.client.post(&session.path("/terminals"), &json!({ "argv": ["sh", "-c", "echo here; read x"] }));
    let terminal = terminal.expect(201).json()["id"].clone();
    eventually("both have printed", || {
        let answer = look(&session);
        let printed = |list: &str, field: &str| answer[list][0][field].as_u64().is_some_and(|bytes| bytes > 4);
        (printed("execs", "stdout_bytes") && printed("terminals", "output_bytes")).then_some(())
    });
    let answer = connect(&session);
    assert_eq!(answer["status"], "connected", "{answer}");
    assert_eq!((&answer["woken"], &answer["has_snapshot"]), (&json!(false), &json!(false)), "{answer}");
    assert!(answer.get("wake").is_none(), "{answer}");
    assert_eq!((&answer["execs"][0]["id"], &answer["execs"][0]["stdout_bytes"]), (&json!(exec), &json!(12)), "{answer}");
    assert_eq!((&answer["terminals"][0]["id"], &answer["terminals"][0]["state"]), (&terminal, &json!("running")), "{answer}");
    let lifecycle = &answer["lifecycle"];
    assert_eq!(lifecycle["state"], "running");
    for field in ["server_time", "last_activity_at", "timeout_at", "expires_at"] {
        assert!(lifecycle[field].is_string(), "{field}: {lifecycle}");
    }

    session.hibernate();
    let before = session.show();
    let answer = look(&session);
    assert_eq!((&answer["status"], &answer["woken"]), (&json!("hibernated"), &json!(false)), "{answer}");
    assert_eq!(answer["has_snapshot"], true);
    assert_eq!(answer["restore_options"][0]["action"], "wake");
    assert_eq!(answer["restore_options"][0]["memory"], true);
    assert_eq!(answer["execs"][0]["stdout_bytes"], 12, "its cursors are told asleep, too: {answer}");
    let after = session.show();
    for field in ["state", "updated_at", "last_activity_at", "timeout_at", "expires_at", "generation", "idle"] {
        assert_eq!(before[field], after[field], "a look changes nothing: {field}");
    }

    let answer = connect(&session);
    assert_eq!((&answer["status"], &answer["woken"]), (&json!("connected"), &json!(true)), "{answer}");
    assert_eq!((&answer["wake"]["memory"], &answer["wake"]["generation"]), (&json!("restored"), &json!(2)), "{answer}");
    assert!(answer["wake"]["gap_seconds"].as_f64().is_some_and(|gap| gap > 0.0), "{answer}");
    assert_eq!(session.exec(&exec)["state"], "running");

    session.call("pause").expect(200);
    for answer in [look(&session), connect(&session)] {
        assert_eq!(answer["status"], "paused", "a user's pause is a user's: {answer}");
    }
    session.call("unpause").expect(200);

    session.call("stop").expect(200);
    for answer in [look(&session), connect(&session)] {
        assert_eq!((&answer["status"], &answer["woken"]), (&json!("stopped"), &json!(false)), "{answer}");
        assert_eq!(
            answer["restore_options"],
            json!([{ "action": "start", "snapshot_id": null, "at": answer["restore_options"][0]["at"], "memory": false }])
        );
        assert_eq!(answer["session"]["memory"], "lost");
    }
    let answer = connect_with(&session, "?start=true", &json!({})).expect(200).json();
    assert_eq!((&answer["status"], &answer["woken"]), (&json!("connected"), &json!(true)), "{answer}");
    assert!(answer.get("wake").is_none(), "a boot is no wake: {answer}");
    assert_eq!(connect_with(&session, "?start=true", &json!({ "wake": false })).expect(400).json()["field"], "start");

    session.delete();
    for answer in [look(&session), connect(&session)] {
        assert_eq!(answer["status"], "deleted", "{answer}");
        assert_eq!(answer["session"]["reason"], "asked");
    }
    let unknown = Session { client: session.client.clone(), id: "01890000-0000-7000-8000-000000000000".to_owned() };
    connect_with(&unknown, "", &json!({})).expect(404);
    server.delete_all_and_check();
}

/// A guest that doesn't answer in time is unresponsive, which is not dead: nothing of it is touched.
#[test]
fn a_slow_guest_is_unresponsive_and_nothing_is_killed_for_it() {
    let server = Server::start();
    let session = server.session();
    let pid = session.out("sleep 1000 >/dev/null 2>&1 & echo $!");
    let frozen = Frozen::sandbox_of(&server, &session);
    let began = Instant::now();
    let answer = connect(&session);
    assert_eq!(answer["status"], "unresponsive", "{answer}");
    assert!(began.elapsed() >= Duration::from_secs(14), "it was given its time: {:?}", began.elapsed());
    assert_eq!(answer["problem"]["retryable"], true, "{answer}");
    assert_eq!(answer["session"]["state"], "running");
    drop(frozen);
    assert_eq!(eventually("it answers again", || Some(connect(&session)).filter(|a| a["status"] == "connected"))["woken"], false);
    assert_eq!(session.out(&format!("kill -0 {pid} && echo alive")), "alive");
    assert_eq!(session.show()["generation"], 1);
    server.delete_all_and_check();
}

/// The processes of a sandbox, stopped by a signal until this is dropped.
struct Frozen(Vec<u32>);

impl Frozen {
    fn sandbox_of(server: &Server, session: &Session) -> Frozen {
        let mark = server.data().join("sessions").join(&session.id).join("run/supervisor.json");
        let mark: Value = serde_json::from_slice(&std::fs::read(&mark).expect("the supervisor's mark")).expect("JSON");
        let pids = mark["sandbox_pids"].as_array().expect("a list").iter().filter_map(|pid| pid.as_u64());
        let frozen = Frozen(pids.map(|pid| u32::try_from(pid).expect("a process id")).collect());
        assert!(!frozen.0.is_empty(), "{mark}");
        frozen.signal(libc::SIGSTOP);
        frozen
    }

    fn signal(&self, signal: i32) {
        for pid in &self.0 {
            // SAFETY: kill takes two integers; the processes are those of this test's sandbox.
            unsafe { libc::kill(pid.cast_signed(), signal) };
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.signal(libc::SIGCONT);
    }
}

/// A hundred callers who all need a sleeping session wake it once, and all are served.
#[test]
fn a_hundred_callers_make_one_wake() {
    let server = Server::start();
    let session = server.session();
    session.hibernate();
    let answers: Vec<(u16, Value)> = std::thread::scope(|scope| {
        let call = |n: usize| {
            let session = session.clone();
            move || {
                let reply = match n % 3 {
                    0 => session.call("wake"),
                    1 => connect_with(&session, "", &json!({})),
                    _ => session.client.post(&session.path("/execs?wait=true"), &json!({ "shell": format!("echo {n}") })),
                };
                (reply.status, reply.json())
            }
        };
        let threads: Vec<_> = (0..100).map(|n| scope.spawn(call(n))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no caller panics")).collect()
    });
    for (n, (status, answer)) in answers.iter().enumerate() {
        match n % 3 {
            0 => assert_eq!((*status, &answer["state"]), (200, &json!("running")), "{answer}"),
            1 => assert_eq!((*status, &answer["status"]), (200, &json!("connected")), "{answer}"),
            _ => assert_eq!((*status, &answer["stdout"]), (201, &json!(format!("{n}\n"))), "{answer}"),
        }
    }
    assert_eq!(session.show()["generation"], 2);
    assert_eq!(session.events().iter().filter(|event| event["type"] == "wake.done").count(), 1);
    server.delete_all_and_check();
}

#[test]
fn a_hundred_callers_of_a_new_key_get_one_session() {
    let server = Server::start();
    let ids: std::collections::BTreeSet<String> = std::thread::scope(|scope| {
        let client = &server.client;
        let call = || client.post("/v1/sessions", &json!({ "key": "one" })).json()["id"].as_str().expect("an id").to_owned();
        let threads: Vec<_> = (0..100).map(|_| scope.spawn(call)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no caller panics")).collect()
    });
    assert_eq!(ids.len(), 1, "{ids:?}");
    server.delete_all_and_check();
}

/// Wake right after hibernate, hibernate right after wake, deletes in between: never "not found", never stuck.
#[test]
fn what_comes_right_after_its_opposite_is_never_lost() {
    let server = Server::start();
    let session = server.session();
    session.out("echo kept > /tmp/memory");
    for round in 0..4 {
        // Asked for without waiting: each meets the one before it.
        for what in ["hibernate", "wake"] {
            let reply = session.client.post(&session.path(&format!("/{what}?wait=false")), &json!({}));
            assert!(matches!(reply.status, 200 | 202), "{what}, round {round}: {} {}", reply.status, reply.text());
        }
    }
    assert_eq!(session.out("cat /tmp/memory"), "kept");
    session.client.post(&session.path("/hibernate?wait=false"), &json!({})).expect(202);
    session.delete();
    assert_eq!(look(&session)["status"], "deleted");
    session.call("wake").expect(410);
    server.delete_all_and_check();
}

/// A session that failed says so under its key until somebody wants another, and can be deleted before and after.
#[test]
fn a_failed_session_gives_way_where_another_is_wanted_and_can_be_deleted() {
    let server = Server::start();
    let nowhere = json!({ "key": "k", "source": { "git": "http://127.0.0.1:1/nowhere.git" } });
    let failed = server.client.post("/v1/sessions", &nowhere);
    assert!(failed.status >= 400, "{}", failed.text());
    let again = server.client.post("/v1/sessions", &json!({ "key": "k" })).expect(409).json();
    assert_eq!(again["code"], "failed", "{again}");
    let id = again["session_id"].as_str().expect("it is named").to_owned();
    let old = Session { client: server.client.clone(), id: id.clone() };
    assert_eq!(look(&old)["status"], "failed");
    let new = server.client.post("/v1/sessions", &json!({ "key": "k", "replace": true })).expect(201).json();
    assert_eq!(new["replaced"]["session_id"], json!(id), "{new}");
    assert_eq!(server.client.post("/v1/sessions", &json!({ "key": "k" })).expect(200).json()["id"], new["id"]);
    old.delete();
    assert_eq!(look(&old)["status"], "deleted");
    assert_eq!(server.client.post("/v1/sessions", &json!({ "key": "k" })).expect(200).json()["id"], new["id"]);
    server.delete_all_and_check();
}
