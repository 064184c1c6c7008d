//! A session's clocks: the running time, the time to live, the time to wake; through sleeps, pauses and restarts.

use dormouse_tests::{Server, Session, eventually};
use serde_json::{Value, json};

fn millis(time: &Value) -> i64 {
    let text = time.as_str().unwrap_or_else(|| panic!("{time} is no time"));
    text.parse::<model::Timestamp>().expect("RFC 3339").0
}

fn now() -> model::Timestamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    model::Timestamp(i64::try_from(since.as_millis()).expect("milliseconds"))
}

fn patch(session: &Session, body: &Value) -> Value {
    session.client.patch(&session.path(""), body).expect(200).json()
}

#[track_caller]
fn becomes(session: &Session, state: &str) -> Value {
    eventually(&format!("it is {state}"), || Some(session.show()).filter(|session| session["state"] == state))
}

fn count(session: &Session, kind: &str) -> usize {
    session.events().iter().filter(|event| event["type"] == kind).count()
}

#[test]
fn the_running_time_ends_in_a_sleep_and_is_set_anew_by_a_wake() {
    let server = Server::start();
    let session = server.session_with(&json!({ "timeout_seconds": 4, "hooks": { "on_timeout": "echo $DORMOUSE_SECONDS_LEFT" } }));
    let shown = session.show();
    assert!(shown["timeout_at"].is_string(), "{shown}");
    session.out("echo kept > /tmp/memory");
    let slept = becomes(&session, "hibernated");
    assert_eq!((&slept["reason"], &slept["timeout_at"]), (&json!("timeout"), &Value::Null), "{slept}");
    assert!(slept["sentence"].as_str().is_some_and(|text| text.contains("running time was over")), "{slept}");
    assert_eq!(count(&session, "timeout.near"), 1);
    let hook = session.event("hook.ended");
    assert_eq!((&hook["data"]["hook"], &hook["data"]["exit_code"]), (&json!("on_timeout"), &json!(0)), "{hook}");
    // Needed again: it runs for its whole time again.
    assert_eq!(session.out("cat /tmp/memory"), "kept");
    let awake = session.show();
    assert!(millis(&awake["timeout_at"]) > millis(&shown["timeout_at"]), "{awake}");
    // Moved in time, it stays.
    let moved = session.client.post(&session.path("/extend"), &json!({ "seconds": 3600 })).expect(200).json();
    assert_eq!(millis(&moved["timeout_at"]) - millis(&awake["timeout_at"]), 3_600_000, "{moved}");
    patch(&session, &json!({ "timeout_seconds": 2, "on_timeout": "stop" }));
    let stopped = becomes(&session, "stopped");
    assert_eq!((&stopped["reason"], &stopped["memory"]), (&json!("timeout"), &json!("lost")), "{stopped}");
    server.delete_all_and_check();
}

#[test]
fn a_pause_stops_the_running_time_and_nothing_else_moves_it() {
    let mut server = Server::start();
    let session = server.session_with(&json!({ "timeout_seconds": 600, "ttl_seconds": 6000 }));
    let before = session.show();
    session.client.post(&session.path("/connect"), &json!({})).expect(200);
    server.crash();
    let session = session.on(&server.client);
    let after = session.show();
    for clock in ["timeout_at", "expires_at"] {
        assert_eq!(before[clock], after[clock], "neither a reconnect nor a restart moves {clock}");
    }
    session.call("pause").expect(200);
    assert_eq!(session.show()["timeout_at"], Value::Null);
    std::thread::sleep(std::time::Duration::from_millis(1100));
    session.call("unpause").expect(200);
    let unpaused = session.show();
    assert!(millis(&unpaused["timeout_at"]) - millis(&before["timeout_at"]) >= 1000, "{unpaused}");
    session.hibernate();
    session.wake();
    assert_eq!(session.show()["expires_at"], before["expires_at"], "a sleep moves no end of the session");
    server.delete_all_and_check();
}

#[test]
fn the_end_of_a_session_comes_asleep_or_awake_and_its_tombstone_says_so() {
    let mut server = Server::start();
    let asleep = server.session_with(&json!({ "key": "k", "ttl_seconds": 5 }));
    asleep.hibernate();
    let awake = server.session_with(&json!({ "ttl_seconds": 5 }));
    // Both become overdue while no server runs.
    server.kill();
    std::thread::sleep(std::time::Duration::from_secs(6));
    server.start_again();
    for session in [asleep.on(&server.client), awake.on(&server.client)] {
        let gone =
            eventually("its time is over", || Some(session.client.get(&session.path(""))).filter(|r| r.status == 410)).json();
        assert_eq!((&gone["code"], &gone["reason"]), (&json!("expired"), &json!("expired")), "{gone}");
        assert!(gone["at"].is_string(), "{gone}");
        let answer = session.client.post(&session.path("/connect"), &json!({})).expect(200).json();
        assert_eq!(answer["status"], "expired", "{answer}");
        assert_eq!(count(&session, "session.expired"), 1);
    }
    // Its key says that it has expired, until somebody wants another.
    assert_eq!(server.client.post("/v1/sessions", &json!({ "key": "k" })).expect(410).json()["code"], "expired");
    let new = server.client.post("/v1/sessions", &json!({ "key": "k", "replace": true })).expect(201).json();
    assert_eq!(new["replaced"], json!({ "session_id": asleep.id, "reason": "expired" }));
    server.delete_all_and_check();
}

#[test]
fn a_sleep_until_a_time_ends_then_also_where_no_server_ran_and_once() {
    let mut server = Server::start();
    let session = server.session();
    session.out("echo kept > /tmp/memory");
    let soon = |seconds: u64| now().plus(std::time::Duration::from_secs(seconds)).to_string();
    let hibernate = |session: &Session, until: &str| {
        session.client.post(&session.path("/hibernate"), &json!({ "until": until })).expect(200).json()
    };
    let slept = hibernate(&session, &soon(2));
    assert!(slept["wake_at"].is_string(), "{slept}");
    assert_eq!(becomes(&session, "running")["wake_at"], Value::Null);
    hibernate(&session, &soon(2));
    server.kill();
    std::thread::sleep(std::time::Duration::from_secs(3));
    server.start_again();
    let session = session.on(&server.client);
    becomes(&session, "running");
    assert_eq!(session.out("cat /tmp/memory"), "kept");
    session.hibernate();
    server.crash();
    let session = session.on(&server.client);
    assert_eq!((session.state().as_str(), count(&session, "wake.done")), ("hibernated", 2), "what was overdue goes off once");
    // Changed and taken back while it sleeps.
    patch(&session, &json!({ "wake_at": soon(3600) }));
    assert_eq!(patch(&session, &json!({ "wake_at": null }))["wake_at"], Value::Null);
    patch(&session, &json!({ "wake_at": soon(1) }));
    becomes(&session, "running");
    server.delete_all_and_check();
}

/// A deleted session says so for thirty days, then it is forgotten.
#[test]
fn a_tombstone_stands_for_thirty_days() {
    let mut server = Server::start();
    let (old, young) = (server.session(), server.session());
    for session in [&old, &young] {
        session.delete();
        let gone = session.client.get(&session.path("")).expect(410).json();
        assert_eq!((&gone["code"], &gone["reason"]), (&json!("deleted"), &json!("asked")), "{gone}");
        assert!(gone["at"].is_string(), "{gone}");
    }
    // Thirty-one days pass for one of them, and twenty-nine for the other.
    server.terminate();
    let script = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); \
        db.execute('update sessions set deleted_at = deleted_at - ? where id = ?', (int(sys.argv[3]) * 86400000, sys.argv[2])); \
        assert db.total_changes == 1; db.commit()";
    for (session, days) in [(&old, "31"), (&young, "29")] {
        let store = server.data().join("store.db");
        let status = std::process::Command::new("python3").args(["-c", script]).arg(store).args([&session.id, days]).status();
        assert!(status.expect("python3 is there").success());
    }
    server.start_again();
    let (old, young) = (old.on(&server.client), young.on(&server.client));
    eventually("it is forgotten", || (old.client.get(&old.path("")).status == 404).then_some(()));
    young.client.get(&young.path("")).expect(410);
}

#[test]
fn zero_negative_and_absurd_times_are_refused() {
    let server = Server::start();
    for body in [
        json!({ "timeout_seconds": 0 }),
        json!({ "timeout_seconds": -1 }),
        json!({ "timeout_seconds": 1e300 }),
        json!({ "timeout_seconds": u64::MAX }),
        json!({ "ttl_seconds": 0 }),
        json!({ "ttl_seconds": u64::MAX }),
        json!({ "ttl_seconds": "1h" }),
        json!({ "idle": { "after_seconds": 0, "action": "hibernate" } }),
        json!({ "idle": { "after_seconds": -5, "action": "hibernate" } }),
        json!({ "idle": { "after_seconds": u64::MAX, "action": "stop" } }),
        json!({ "idle": { "after_seconds": 60, "action": "sleep" } }),
        json!({ "on_timeout": "explode" }),
        json!({ "hooks": { "on_create": [] } }),
        json!({ "hooks": { "on_monday": "true" } }),
        json!({ "hooks": { "on_wake": ["a\u{0}b"] } }),
    ] {
        server.client.post("/v1/sessions", &body).expect(400);
    }
    let session = server.session();
    for body in [
        json!({ "timeout_seconds": 0 }),
        json!({ "ttl_seconds": u64::MAX }),
        json!({ "wake_at": "2001-01-01T00:00:00Z" }),
        json!({ "wake_at": "9999-01-01T00:00:00Z" }),
        json!({ "wake_at": "tomorrow" }),
        json!({ "idle": { "after_seconds": 0, "action": "hibernate" } }),
    ] {
        session.client.patch(&session.path(""), &body).expect(400);
    }
    for until in ["2001-01-01T00:00:00Z", "9999-01-01T00:00:00Z", "soon"] {
        session.client.post(&session.path("/hibernate"), &json!({ "until": until })).expect(400);
    }
    for seconds in [json!(0), json!(-1), json!(u64::MAX)] {
        session.client.post(&session.path("/extend"), &json!({ "seconds": seconds })).expect(400);
    }
    assert_eq!(session.client.post(&session.path("/extend"), &json!({ "seconds": 5 })).expect(409).json()["code"], "conflict");
    assert_eq!(session.state(), "running", "nothing of it was done");
    session.call("stop").expect(200);
    session.client.post(&session.path("/extend"), &json!({ "seconds": 5 })).expect(422);
    server.delete_all_and_check();
}
