//! Limits of tokens: what doesn't fit is refused with numbers, before anything of it exists, however many come at once.

use dormouse_tests::{Reply, Server, Session, eventually, http::Client, leftovers};
use serde_json::{Value, json};
use std::{
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A client with a token of these limits.
fn limited(server: &Server, name: &str, limits: Value) -> Client {
    let made = server.client.post("/v1/tokens", &json!({ "name": name, "limits": limits })).expect(201).json();
    assert_eq!(made["limits"], limits, "{made}");
    server.client.with_token(made["token"].as_str().expect("a secret"))
}

fn create(client: &Client, body: &Value) -> Session {
    let made = client.post("/v1/sessions", body).expect(201).json();
    Session::new(client.clone(), &made)
}

/// A refusal by a limit, with these words in it.
#[track_caller]
fn refused(reply: &Reply, words: &str) {
    assert_eq!(reply.status, 429, "{}", reply.text());
    assert_eq!(reply.problem(), "limit_exceeded");
    let problem = reply.json();
    assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains(words)), "{problem}");
    assert_eq!((&problem["retryable"], &problem["no_side_effects"]), (&json!(true), &json!(true)), "{problem}");
    let after: u64 = reply.header("retry-after").and_then(|text| text.parse().ok()).expect("it says when to ask again");
    assert!(after > 0);
}

fn how_many(server: &Server) -> usize {
    server.client.get("/v1/sessions?limit=1000").expect(200).json()["items"].as_array().expect("a list").len()
}

/// Does the same from many threads at once.
fn at_once<T: Send + 'static>(count: usize, work: impl Fn(usize) -> T + Clone + Send + 'static) -> Vec<T> {
    let threads: Vec<_> = (0..count)
        .map(|n| {
            let work = work.clone();
            thread::spawn(move || work(n))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("it ends well")).collect()
}

#[test]
fn of_twenty_creates_at_once_exactly_as_many_get_in_as_there_is_room_for() {
    let mut server = Server::start();
    let client = limited(&server, "three", json!({ "sessions": 3 }));
    let client_ = client.clone();
    let replies = at_once(20, move |_| client_.post("/v1/sessions", &json!({})));
    let (made, others): (Vec<_>, Vec<_>) = replies.into_iter().partition(|reply| reply.status == 201);
    assert_eq!((made.len(), others.len()), (3, 17), "{:?}", others.iter().map(Reply::text).collect::<Vec<_>>());
    for reply in &others {
        refused(reply, "'three' has a limit of 3 sessions (used: 3, asked: 1)");
    }
    assert_eq!(how_many(&server), 3);
    assert_eq!(leftovers::directories(server.data()).len(), 3, "nothing of the others was begun");
    // Others have no part in it, and a restart forgets nothing.
    create(&server.client, &json!({})).delete();
    server.crash();
    let client = server.client.with_token(&client.token);
    refused(&client.post("/v1/sessions", &json!({})), "used: 3, asked: 1");
    Session::new(client.clone(), &made[0].json()).delete();
    create(&client, &json!({}));
    refused(&client.post("/v1/sessions", &json!({})), "used: 3, asked: 1");
    server.delete_all_and_check();
}

#[test]
fn a_session_that_is_there_is_found_whatever_the_limit() {
    let server = Server::start();
    let client = limited(&server, "one", json!({ "sessions": 1, "running_sessions": 1 }));
    let client_ = client.clone();
    let replies = at_once(10, move |_| client_.post("/v1/sessions", &json!({ "key": "mine" })));
    let mut statuses: Vec<u16> = replies.iter().map(|reply| reply.status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [[200; 9].as_slice(), &[201]].concat(), "one made it, the others found it");
    assert!(replies.iter().all(|reply| reply.json()["id"] == replies[0].json()["id"]));
    refused(&client.post("/v1/sessions", &json!({ "key": "another" })), "used: 1, asked: 1");
    server.delete_all_and_check();
}

#[test]
fn running_sessions_are_limited_at_creates_wakes_and_starts() {
    let server = Server::start();
    let client = limited(&server, "two", json!({ "running_sessions": 2 }));
    let (a, b) = (create(&client, &json!({})), create(&client, &json!({})));
    let full = "a limit of 2 running sessions (used: 2, asked: 1)";
    refused(&client.post("/v1/sessions", &json!({})), full);
    a.call("pause").expect(200);
    refused(&client.post("/v1/sessions", &json!({})), full);
    a.call("unpause").expect(200);

    a.hibernate();
    let c = create(&client, &json!({}));
    let generation = a.show()["generation"].clone();
    refused(&a.call("wake"), full);
    refused(&client.post(&a.path("/execs?wait=true"), &json!({ "shell": "true" })), full);
    // It counts for whom the session belongs to, not for who asks.
    refused(&a.on(&server.client).call("wake"), full);
    let show = a.show();
    assert_eq!((&show["state"], &show["generation"], &show["operation"]), (&json!("hibernated"), &generation, &Value::Null));

    b.call("stop").expect(200);
    assert_eq!(a.out("echo awake"), "awake", "there is room again");
    refused(&b.call("start"), full);
    c.delete();
    b.call("start").expect(200);
    server.delete_all_and_check();
}

#[test]
fn of_many_wakes_at_once_exactly_as_many_get_in_as_there_is_room_for() {
    let server = Server::start();
    let client = limited(&server, "one", json!({ "running_sessions": 1 }));
    let sessions: Vec<Session> = (0..4)
        .map(|_| {
            let session = create(&client, &json!({}));
            session.hibernate();
            session
        })
        .collect();
    let sessions_ = sessions.clone();
    // Two for each session: those join.
    let replies = at_once(8, move |n| sessions_[n / 2].call("wake"));
    let awake = sessions.iter().filter(|session| session.state() == "running").count();
    assert_eq!(awake, 1);
    assert_eq!(replies.iter().filter(|reply| reply.status == 200).count(), 2);
    for reply in replies.iter().filter(|reply| reply.status != 200) {
        refused(reply, "a limit of 1 running sessions (used: 1, asked: 1)");
    }
    server.delete_all_and_check();
}

/// Nobody waits for the answer to a timed wake: the history tells it.
#[test]
fn a_timed_wake_that_a_limit_refuses_stands_in_the_history() {
    let server = Server::start();
    let client = limited(&server, "one", json!({ "running_sessions": 1 }));
    let sleeper = create(&client, &json!({}));
    sleeper.hibernate();
    let other = create(&client, &json!({}));
    let at = now().plus(Duration::from_secs(1));
    client.patch(&sleeper.path(""), &json!({ "wake_at": at })).expect(200);
    let event = sleeper.event("operation.failed");
    assert_eq!((&event["actor"], &event["data"]["kind"]), (&json!("system"), &json!("wake")), "{event}");
    assert_eq!(event["data"]["code"], "limit_exceeded", "{event}");
    assert_eq!(sleeper.state(), "hibernated");
    other.delete();
    sleeper.wake();
    server.delete_all_and_check();
}

fn now() -> model::Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock after 1970");
    model::Timestamp(i64::try_from(since.as_millis()).expect("a clock of our time"))
}

#[test]
fn cpus_and_memory_are_limited_and_must_be_stated() {
    let server = Server::start();
    let client = limited(&server, "small", json!({ "cpus": 1.5, "memory_bytes": 1 << 30 }));
    let with = |cpus: Option<f64>, memory: Option<u64>| {
        let mut resources = json!({});
        if let Some(cpus) = cpus {
            resources["cpus"] = json!(cpus);
        }
        if let Some(memory) = memory {
            resources["memory_bytes"] = json!(memory);
        }
        json!({ "resources": resources })
    };
    let unstated = [
        (json!({}), "resources.cpus"),
        (with(None, Some(1 << 28)), "resources.cpus"),
        (with(Some(0.5), None), "resources.memory_bytes"),
    ];
    for (body, field) in unstated {
        let reply = client.post("/v1/sessions", &body).expect(400);
        assert_eq!((reply.problem().as_str(), &reply.json()["field"]), ("bad_request", &json!(field)), "{}", reply.text());
    }
    let first = create(&client, &with(Some(0.5), Some(512 << 20)));
    create(&client, &with(Some(0.5), Some(256 << 20)));
    let cpus = client.post("/v1/sessions", &with(Some(0.75), Some(256 << 20)));
    refused(&cpus, "1.5 CPUs for its running sessions (used: 1, asked: 0.75)");
    let memory = client.post("/v1/sessions", &with(Some(0.5), Some(512 << 20)));
    refused(&memory, "1073741824 bytes of memory for its running sessions (used: 805306368, asked: 536870912)");
    assert_eq!(how_many(&server), 2);
    // Asleep it takes neither.
    first.hibernate();
    create(&client, &with(Some(0.75), Some(256 << 20)));
    refused(&first.call("wake"), "1.5 CPUs for its running sessions (used: 1.25, asked: 0.5)");
    server.delete_all_and_check();
}

#[test]
fn disk_is_limited_and_a_full_one_keeps_nobody_from_cleaning_up() {
    let server = Server::start();
    let client = limited(&server, "little", json!({ "disk_bytes": 8 << 20 }));
    let session = create(&client, &json!({}));
    create(&client, &json!({})).delete();
    session.out("head -c 12M /dev/urandom > /root/much && sync");
    let full = eventually("what was written is measured", || {
        let reply = client.post("/v1/sessions", &json!({}));
        if reply.status == 201 {
            Session::new(client.clone(), &reply.json()).delete();
        }
        (reply.status != 201).then_some(reply)
    });
    assert_eq!((full.status, full.problem().as_str()), (507, "no_space"), "{}", full.text());
    let problem = full.json();
    assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains("8388608 bytes of disk (used: ")), "{problem}");
    assert_eq!((&problem["retryable"], &problem["no_side_effects"]), (&json!(false), &json!(true)), "{problem}");
    assert_eq!(how_many(&server), 1);
    session.hibernate();
    session.wake();
    session.out("rm /root/much && sync");
    eventually("there is room again", || (client.post("/v1/sessions", &json!({})).status == 201).then_some(()));
    server.delete_all_and_check();
}

#[test]
fn the_space_of_snapshots_is_limited_and_the_session_goes_on() {
    let server = Server::start();
    let client = limited(&server, "few", json!({ "snapshot_bytes": 16 << 20 }));
    let session = create(&client, &json!({}));
    let take = || client.post(&session.path("/snapshots"), &json!({ "memory": false }));
    let first = take().expect(201).json();
    session.out("head -c 20M /dev/urandom > /root/much; echo kept > /tmp/memory");
    let full = take();
    assert_eq!((full.status, full.problem().as_str()), (507, "no_space"), "{}", full.text());
    let detail = full.json()["detail"].as_str().expect("a text").to_owned();
    assert!(detail.contains("16777216 bytes of snapshots (used: "), "{detail}");
    assert_eq!(session.out("cat /tmp/memory"), "kept");
    let kept = server.client.get("/v1/snapshots").expect(200).json();
    assert_eq!(kept["items"].as_array().map(Vec::len), Some(1), "nothing of it is left: {kept}");
    session.out("rm /root/much");
    client.delete(&format!("/v1/snapshots/{}", first["id"].as_str().expect("an id"))).expect(204);
    take().expect(201);
    server.delete_all_and_check();
}

#[test]
fn limits_are_kept_and_shown_and_mistakes_are_named() {
    let mut server = Server::start();
    let all = json!({ "sessions": 9, "running_sessions": 3, "cpus": 1.5, "memory_bytes": 4u64 << 30, "disk_bytes": 20u64 << 30, "snapshot_bytes": 1u64 << 30 });
    limited(&server, "over HTTP", all.clone());
    let flags = [
        "--max-sessions",
        "9",
        "--max-running",
        "3",
        "--max-cpus",
        "1.5",
        "--max-memory",
        "4g",
        "--max-disk",
        "20g",
        "--max-snapshots",
        "1g",
    ];
    let made = server.cli(&[["token", "new", "cli"].as_slice(), &flags].concat()).output().expect("it runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    server.crash();
    let tokens = server.client.get("/v1/tokens").expect(200).json();
    for token in tokens["items"].as_array().expect("a list") {
        let expected = if token["name"] == "admin" { &Value::Null } else { &all };
        assert_eq!(&token["limits"], expected, "{token}");
    }
    let listed = server.cli(&["token", "ls"]).output().expect("it runs");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains("9 sessions, 3 running, 1.5 cpus, 4"), "{listed}");
    for (limits, field) in [
        (json!({ "sessions": 0 }), "limits.sessions"),
        (json!({ "cpus": -1 }), "limits.cpus"),
        (json!({ "disk_bytes": 0 }), "limits.disk_bytes"),
        (json!({ "sesions": 1 }), "sesions"),
    ] {
        let reply = server.client.post("/v1/tokens", &json!({ "name": "x", "limits": limits })).expect(400);
        assert!(reply.json()["field"].as_str().is_some_and(|found| found.contains(field)), "{}", reply.text());
    }
}
