//! The HTTP interface: sessions as objects, tokens, repeated requests, history, operations, and what the server tells
//! about itself.

use dormouse_tests::{Reply, Server, Session, eventually, http::Client, server::binary};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
};

const NOBODY: &str = "01890000-0000-7000-8000-000000000000";

fn items(reply: Reply) -> Vec<Value> {
    reply.expect(200).json()["items"].as_array().expect("a list").clone()
}

fn ids(list: &[Value]) -> Vec<String> {
    list.iter().map(|item| item["id"].as_str().expect("an id").to_owned()).collect()
}

#[track_caller]
fn token(server: &Server, body: &Value) -> (String, Client) {
    let made = server.client.post("/v1/tokens", body).expect(201).json();
    let secret = made["token"].as_str().expect("the secret is told once");
    (made["id"].as_str().expect("an id").to_owned(), server.client.with_token(secret))
}

#[test]
fn a_key_is_one_session_until_it_is_deleted() {
    let server = Server::start();
    let create = |body: &Value| server.client.post("/v1/sessions", body);
    let body = json!({ "key": "job/1".replace('/', ":"), "name": "n", "task": "t", "metadata": { "team": "a" } });
    let made = create(&body).expect(201).json();
    for (field, value) in [
        ("state", json!("running")),
        ("memory", json!("live")),
        ("generation", json!(1)),
        ("runtime", json!("gvisor")),
        ("name", json!("n")),
        ("task", json!("t")),
        ("operation", Value::Null),
        ("ephemeral", json!(false)),
    ] {
        assert_eq!(made[field], value, "{field}");
    }
    let fields = "id key name task state reason runtime template generation ephemeral metadata created_at updated_at last_activity_at idle \
        hibernate_after timeout_seconds timeout_at on_timeout ttl_seconds expires_at wake_at memory parent parent_task machine services \
        volumes network operation access usage server_time";
    for field in fields.split_whitespace() {
        assert!(made.get(field).is_some(), "a session has '{field}': {made}");
    }
    assert!(made["created_at"].as_str().is_some_and(|at| at.ends_with('Z') && at.contains('.')), "{made}");

    // Ten callers at once get the same.
    let same: BTreeSet<String> = std::thread::scope(|scope| {
        let calls: Vec<_> =
            (0..10).map(|_| scope.spawn(|| create(&json!({ "key": "shared" })).json()["id"].to_string())).collect();
        calls.into_iter().map(|call| call.join().expect("it answers")).collect()
    });
    assert_eq!(same.len(), 1);

    let again = create(&json!({ "key": "job:1", "name": "other", "metadata": { "team": "b" } })).expect(200).json();
    assert_eq!((&again["id"], &again["name"]), (&made["id"], &json!("n")));
    assert_eq!(again["ignored"], json!(["name", "metadata"]));
    assert_eq!(create(&json!({ "key": "job:1", "template": "other" })).expect(409).problem(), "key_conflict");
    let path = format!("/v1/sessions/{}", made["id"].as_str().expect("an id"));
    server.client.delete(&path).expect(204);
    server.client.delete(&path).expect(204);
    let gone = server.client.get(&path).expect(410);
    assert_eq!(gone.problem(), "deleted");
    assert!(gone.json()["at"].is_string(), "{}", gone.text());
    let anew = create(&body).expect(201).json();
    assert_ne!(anew["id"], made["id"], "a deleted session's key is free");
    let bad_keys = ["", "a/b", "a b", "a\nb", &"x".repeat(201)];
    bad_keys.iter().for_each(|key| drop(create(&json!({ "key": key })).expect(400)));
    server.delete_all_and_check();
}

#[test]
fn lists_are_filtered_and_come_in_pages() {
    let server = Server::start();
    let mut made = Vec::new();
    for (key, team) in [("k0", "a"), ("k1", "a"), ("k2", "b"), ("k3", "b"), ("k4", "b")] {
        made.push(server.session_with(&json!({ "key": key, "metadata": { "team": team, "n": key } })));
    }
    made[0].hibernate();
    made[1].call("stop").expect(200);
    made[4].delete();
    let list = |query: &str| ids(&items(server.client.get(&format!("/v1/sessions{query}"))));
    let of = |indices: &[usize]| indices.iter().map(|i| made[*i].id.clone()).collect::<Vec<_>>();
    assert_eq!(list(""), of(&[3, 2, 1, 0]), "newest first, without deleted ones");
    assert_eq!(list("?include_deleted=true"), of(&[4, 3, 2, 1, 0]));
    assert_eq!(list("?state=running"), of(&[3, 2]));
    assert_eq!(list("?state=hibernated,stopped"), of(&[1, 0]));
    assert_eq!(list("?metadata.team=b"), of(&[3, 2]));
    assert_eq!(list("?metadata.team=b&metadata.n=k2"), of(&[2]));
    assert_eq!(list("?key=k3"), of(&[3]));
    assert_eq!(list("?key=k4"), of(&[]));
    assert_eq!(list("?runtime=gvisor&state=paused"), of(&[]));

    // Pages of each size have all, once; what is made meanwhile doesn't disturb.
    for limit in 1..=3 {
        let (mut all, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = server.client.get(&format!("/v1/sessions?limit={limit}{cursor}")).expect(200).json();
            let found = ids(page["items"].as_array().expect("a list"));
            assert!(found.len() <= limit);
            all.extend(found);
            let Some(next) = page["next_cursor"].as_str() else { break };
            cursor = format!("&cursor={next}");
        }
        assert_eq!(all, of(&[3, 2, 1, 0]), "pages of {limit}");
    }
    for bad in ["limit=0", "limit=1001", "limit=many", "state=asleep", "colour=red", "cursor=nonsense", "include_deleted=perhaps"]
    {
        server.client.get(&format!("/v1/sessions?{bad}")).expect(400);
    }
    server.client.get("/v1/sessions?limit=1000").expect(200);
    assert_eq!(server.client.get("/v1/sessions?machine=m").expect(400).problem(), "not_built");
    server.delete_all_and_check();
}

#[test]
fn a_session_is_changed_in_place_and_reading_it_changes_nothing() {
    let server = Server::start();
    let session = server.session_with(&json!({ "name": "a", "task": "b", "metadata": { "x": "1", "y": "2" } }));
    let patch = |body: Value| server.client.patch(&session.path(""), &body);
    let changed = patch(json!({ "name": "new", "task": null, "metadata": { "x": null, "z": "3" } })).expect(200).json();
    assert_eq!(
        (&changed["name"], &changed["task"], &changed["metadata"]),
        (&json!("new"), &Value::Null, &json!({ "y": "2", "z": "3" }))
    );
    assert_eq!(session.event("session.updated")["data"]["fields"], json!(["name", "task", "metadata"]));
    let before = session.events().len();
    patch(json!({})).expect(200);
    patch(json!({ "name": "new" })).expect(200);
    assert_eq!(session.events().len(), before, "what changes nothing is no event");
    let refused = patch(json!({ "nam": "x" })).expect(400);
    assert_eq!((refused.problem().as_str(), refused.json()["field"].as_str()), ("unknown_field", Some("nam")));
    assert_eq!(patch(json!({ "network": { "default": "perhaps" } })).expect(400).problem(), "bad_request");
    // While it sleeps, too; and no reading wakes it.
    session.hibernate();
    patch(json!({ "name": "asleep" })).expect(200);
    let active = session.show()["last_activity_at"].clone();
    for path in
        ["", "/events", "/execs", "/terminals", "/services", "/logs", "/files/stat?path=/etc/hostname", "/files/list?path=/root"]
    {
        server.client.get(&session.path(path)).expect(200);
    }
    for path in ["/stats", "/processes"] {
        assert_eq!(server.client.get(&session.path(path)).expect(422).problem(), "not_running");
    }
    let show = session.show();
    assert_eq!((&show["state"], &show["name"], &show["last_activity_at"]), (&json!("hibernated"), &json!("asleep"), &active));
    server.delete_all_and_check();
}

#[test]
fn what_is_wrong_or_not_built_is_named() {
    let server = Server::start();
    let session = server.session();
    let create = |body: Value| server.client.post("/v1/sessions", &body);
    for (field, value) in [
        ("machine", json!("m")),
        ("volumes", json!([])),
        ("confirm", json!([])),
        ("runtime", json!("host")),
        ("ephemeral", json!(true)),
    ] {
        let refused = create(json!({ field: value })).expect(400);
        assert_eq!(refused.problem(), "not_built", "{field}");
        assert!(refused.text().contains(field), "{}", refused.text());
    }
    let unknown = create(json!({ "kee": "x" })).expect(400);
    assert_eq!((unknown.problem().as_str(), &unknown.json()["field"]), ("unknown_field", &json!("kee")));
    for bad in [
        json!([]),
        json!("x"),
        json!({ "key": 5 }),
        json!({ "runtime": "cloud" }),
        json!({ "workdir": "relative" }),
        json!({ "env": { "a=b": "c" } }),
        json!({ "resources": { "cpus": -1 } }),
        json!({ "resources": { "memory_bytes": 5 } }),
    ] {
        assert_eq!(create(bad.clone()).expect(400).content_type, "application/problem+json", "{bad}");
    }
    let raw = |body: &[u8]| {
        server.client.send("POST", "/v1/sessions", &[("content-type", "application/json")], Some(body)).expect("an answer")
    };
    for bad in [&b"{"[..], b"{\"key\":\"\xff\"}", b"{\"key\":\"a\",\"key\":\"b\"}", b"nonsense"] {
        assert_eq!(raw(bad).expect(400).problem(), "bad_request");
    }
    assert_eq!(create(json!({ "template": "nowhere" })).expect(404).problem(), "not_found");
    assert_eq!(create(json!({ "snapshot_id": NOBODY })).expect(404).problem(), "not_found");
    // An empty body is an empty object.
    let made = server.client.send("POST", "/v1/sessions", &[], None).expect("an answer").expect(201).json();
    server.client.delete(&format!("/v1/sessions/{}", made["id"].as_str().expect("an id"))).expect(204);

    for path in [
        "",
        "/events",
        "/execs",
        "/logs",
        "/stats",
        "/services",
        "/terminals",
        "/processes",
        "/files?path=/etc/passwd",
        "/archive?path=/",
    ] {
        assert_eq!(server.client.get(&format!("/v1/sessions/{NOBODY}{path}")).expect(404).problem(), "not_found", "{path}");
    }
    for path in ["/wake", "/hibernate", "/execs", "/terminals", "/start"] {
        let body = if path == "/execs" { json!({ "shell": "true" }) } else { json!({}) };
        server.client.post(&format!("/v1/sessions/{NOBODY}{path}"), &body).expect(404);
    }
    for path in [
        format!("/v1/operations/{NOBODY}"),
        session.path(&format!("/execs/{NOBODY}")),
        session.path(&format!("/terminals/{NOBODY}")),
        "/v1/sessions/not-an-id".to_owned(),
        "/v1/nowhere".to_owned(),
        "/".to_owned(),
    ] {
        assert_eq!(server.client.get(&path).expect(404).problem(), "not_found", "{path}");
    }
    let wrong = server.client.send("PUT", "/v1/sessions", &[], Some(b"{}")).expect("an answer").expect(405);
    assert_eq!(wrong.problem(), "method_not_allowed");
    // Parts of the contract that come later say so.
    for path in ["/v1/machines", "/v1/volumes", "/v1/recovery"] {
        assert_eq!(server.client.get(path).expect(400).problem(), "not_built", "{path}");
    }
    for path in ["/feed", "/notes", "/checkpoints"] {
        assert_eq!(server.client.post(&session.path(path), &json!({})).expect(400).problem(), "not_built", "{path}");
    }
    server.delete_all_and_check();
}

#[test]
fn tokens_reach_as_far_as_they_say_and_end_at_once() {
    let server = Server::start();
    let (one, other) = (server.session(), server.session());
    let (_, read) = token(&server, &json!({ "name": "r", "scopes": ["read"] }));
    let (write_id, write) = token(&server, &json!({ "name": "w" }));
    let (_, limited) = token(&server, &json!({ "name": "l", "sessions": [one.id] }));
    let exec = json!({ "argv": ["true"] });

    for bad in [server.client.with_token(""), server.client.with_token("nonsense")] {
        let refused = bad.get("/v1/sessions").expect(401);
        assert_eq!(refused.problem(), "unauthorized");
        bad.post(&one.path("/execs"), &exec).expect(401);
        bad.get("/metrics").expect(401);
    }
    read.get("/v1/sessions").expect(200);
    assert_eq!(read.get(&one.path("")).expect(200).json()["access"], "read");
    assert_eq!(read.post(&one.path("/execs"), &exec).expect(403).problem(), "forbidden");
    read.delete(&one.path("")).expect(403);
    read.patch(&one.path(""), &json!({})).expect(403);
    read.get("/v1/tokens").expect(403);
    write.post(&one.path("/execs?wait=true"), &exec).expect(201);
    assert_eq!(one.event("exec.started")["actor"], "token:w");
    for path in ["/v1/tokens", "/v1/audit"] {
        assert_eq!(write.get(path).expect(403).problem(), "forbidden");
    }
    write.post("/v1/tokens", &json!({ "name": "more", "scopes": ["admin"] })).expect(403);
    write.post("/v1/server/shutdown", &json!({})).expect(403);

    // Limited to sessions: it sees and reaches no other, and makes none.
    assert_eq!(ids(&items(limited.get("/v1/sessions"))), std::slice::from_ref(&one.id));
    limited.post(&one.path("/execs?wait=true"), &exec).expect(201);
    for reply in [
        limited.get(&other.path("")),
        limited.post(&other.path("/execs"), &exec),
        limited.get(&other.path("/events")),
        limited.delete(&other.path("")),
    ] {
        assert!(matches!(reply.status, 403 | 404), "{}", reply.text());
    }
    limited.post("/v1/sessions", &json!({})).expect(403);
    let seen = items(limited.get("/v1/events?limit=1000"));
    assert!(!seen.is_empty() && seen.iter().all(|event| event["session_id"] == json!(one.id)), "{seen:?}");
    let operation = other.call("stop").expect(200).json();
    assert_eq!(operation["state"], "stopped");
    let of_other = other.event("operation.done")["operation_id"].as_str().expect("an id").to_owned();
    assert!(matches!(limited.get(&format!("/v1/operations/{of_other}")).status, 403 | 404));

    // Revoked at once, also on a stream that is open.
    let mut stream = write.stream(&one.path("/events?follow=true"), "application/x-ndjson").expect("a stream");
    let mut first = [0u8; 1];
    stream.read_exact(&mut first).expect("it begins");
    server.client.delete(&format!("/v1/tokens/{write_id}")).expect(204);
    write.get("/v1/sessions").expect(401);
    let list = items(server.client.get("/v1/tokens"));
    assert!(list.iter().all(|token| token.get("token").is_none()), "no secret is shown again");
    let (_, short) = token(&server, &json!({ "name": "s", "ttl_seconds": 1 }));
    eventually("a token's time is over", || (short.get("/v1/sessions").status == 401).then_some(()));
    for bad in [json!({}), json!({ "name": "" }), json!({ "name": "x", "scopes": [] }), json!({ "name": "x", "scopes": ["all"] })]
    {
        server.client.post("/v1/tokens", &bad).expect(400);
    }

    // Every access is on the list, without secrets.
    eventually("the accesses are listed", || {
        let list = items(server.client.get("/v1/audit?limit=1000"));
        let refused = list.iter().any(|a| a["actor"] == "token:r" && a["method"] == "DELETE" && a["status"] == 403);
        let stranger =
            list.iter().any(|a| a["status"] == 401 && a["actor"].as_str().is_some_and(|actor| actor.starts_with("unknown")));
        (refused && stranger).then_some(())
    });
    server.delete_all_and_check();
}

#[test]
fn a_token_in_the_address_is_for_streams_and_never_in_a_log() {
    let mut server =
        Server::with(dormouse_tests::Options { args: vec!["--log-level".into(), "trace".into()], ..Default::default() });
    let session = server.session();
    let (_, client) = token(&server, &json!({ "name": "stream", "scopes": ["read"] }));
    let bare = server.client.with_token("");
    let path = session.path(&format!("/events?access_token={}", client.token));
    let accept = |media: &str| bare.send("GET", &format!("{path}&follow=false"), &[("accept", media)], None).expect("an answer");
    accept("text/event-stream").expect(200);
    assert_eq!(accept("application/json").expect(401).problem(), "unauthorized");
    bare.post(&session.path(&format!("/execs?access_token={}", server.client.token)), &json!({ "argv": ["true"] })).expect(401);
    bare.send("GET", &session.path("/events?access_token=wrong"), &[("accept", "text/event-stream")], None)
        .expect("an answer")
        .expect(401);
    let audit = server.client.get("/v1/audit?limit=1000").expect(200).text();
    session.delete();
    server.terminate();
    let log = server.log();
    assert!(log.contains("answered"), "the log has the requests");
    for text in [&log, &audit] {
        assert!(
            !text.contains(&client.token) && !text.contains(&server.client.token) && !text.contains("access_token"),
            "a token is in a log"
        );
    }
    // Nor in any file of the data directory but the administrator's.
    let found = Command::new("grep").args(["-rlF", &client.token]).arg(server.data()).output().expect("grep runs");
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
    let found = Command::new("grep").args(["-rlF", &server.client.token]).arg(server.data()).output().expect("grep runs");
    assert_eq!(String::from_utf8_lossy(&found.stdout).trim(), server.data().join("admin.token").to_string_lossy());
    let mode = |path: &Path| std::fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    assert_eq!((mode(server.data()), mode(&server.data().join("admin.token"))), (0o700, 0o600));
    server.start_again();
    server.delete_all_and_check();
}

#[test]
fn a_repeated_request_has_one_effect_and_one_answer() {
    let mut server = Server::start();
    let post = |client: &Client, path: &str, key: &str, body: &Value| {
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        client.send("POST", path, &headers, Some(body.to_string().as_bytes())).expect("an answer")
    };
    let made = post(&server.client, "/v1/sessions", "one", &json!({ "name": "x" })).expect(201);
    let again = post(&server.client, "/v1/sessions", "one", &json!({ "name": "x" })).expect(201);
    assert_eq!(made.json(), again.json());
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(
        post(&server.client, "/v1/sessions", "one", &json!({ "name": "y" })).expect(409).problem(),
        "idempotency_conflict"
    );
    assert_eq!(items(server.client.get("/v1/sessions")).len(), 1);

    let session = Session::new(server.client.clone(), &made.json());
    let line = json!({ "shell": "echo x >> /root/effects; cat /root/effects" });
    let path = session.path("/execs?wait=true");
    let same: BTreeSet<String> = std::thread::scope(|scope| {
        let calls: Vec<_> =
            (0..5).map(|_| scope.spawn(|| post(&server.client, &path, "run", &line).expect(201).json().to_string())).collect();
        calls.into_iter().map(|call| call.join().expect("it answers")).collect()
    });
    assert_eq!(same.len(), 1, "{same:?}");
    server.crash();
    let session = session.on(&server.client);
    let after = post(&server.client, &path, "run", &line).expect(201).json();
    assert!(same.contains(&after.to_string()), "through a crash, too");
    assert_eq!(session.out("cat /root/effects"), "x");
    // Keys are a token's own.
    let (_, other) = token(&server, &json!({ "name": "other" }));
    post(&other, "/v1/sessions", "one", &json!({ "name": "y" })).expect(201);
    // A refusal is an answer as well.
    post(&server.client, "/v1/sessions", "bad", &json!({ "template": "nowhere" })).expect(404);
    post(&server.client, "/v1/sessions", "bad", &json!({ "template": "nowhere" })).expect(404);
    for bad in ["", &"k".repeat(256)] {
        assert_eq!(post(&server.client, "/v1/sessions", bad, &json!({})).status, 400, "{bad:?}");
    }
    server.delete_all_and_check();
}

/// Server-sent events as (id, data).
fn sse(reader: impl Read) -> impl Iterator<Item = (String, Value)> {
    let mut id = String::new();
    BufReader::new(reader).lines().map_while(Result::ok).filter_map(move |line| {
        if let Some(text) = line.strip_prefix("id: ") {
            id = text.to_owned();
        }
        let data = line.strip_prefix("data: ")?;
        Some((id.clone(), serde_json::from_str(data).expect("JSON")))
    })
}

#[test]
fn history_has_no_holes_and_can_be_followed_from_anywhere() {
    let mut server = Server::start();
    let session = server.session();
    session.out("true");
    session.hibernate();
    session.wake();
    session.write_file("/root/file", b"x").expect(204);
    let whole = session.events();
    let numbers = |events: &[Value]| events.iter().map(|event| event["seq"].as_u64().expect("a number")).collect::<Vec<_>>();
    assert_eq!(numbers(&whole), (1..=whole.len() as u64).collect::<Vec<_>>());
    assert_eq!(whole[0]["type"], "session.created");
    for kind in ["state.changed", "operation.started", "operation.done", "exec.started", "exec.ended", "wake.done"] {
        assert!(whole.iter().any(|event| event["type"] == kind), "{kind} is told");
    }
    for event in &whole {
        assert!(event["session_id"] == json!(session.id) && event["at"].is_string() && event["actor"].is_string(), "{event}");
    }
    // In pages.
    let page = server.client.get(&session.path("/events?limit=3")).expect(200).json();
    assert_eq!(numbers(page["items"].as_array().expect("a list")), [1, 2, 3]);
    let next = page["next_cursor"].as_str().expect("there is more");
    let page = items(server.client.get(&session.path(&format!("/events?limit=3&cursor={next}"))));
    assert_eq!(numbers(&page), [4, 5, 6]);
    for bad in ["limit=0", "from=x", "cursor=x", "colour=red"] {
        server.client.get(&session.path(&format!("/events?{bad}"))).expect(400);
    }

    // Followed: what was, what comes, and from a number on after a lost link and a crash of the server.
    let mut follow = sse(server.client.stream(&session.path("/events"), "text/event-stream").expect("a stream"));
    let known: Vec<_> = follow.by_ref().take(whole.len()).collect();
    assert_eq!(known.iter().map(|(id, _)| id.parse::<u64>().expect("a number")).collect::<Vec<_>>(), numbers(&whole));
    server.client.patch(&session.path(""), &json!({ "name": "live" })).expect(200);
    let (_, live) = follow.by_ref().find(|(_, event)| event["type"] == "session.updated").expect("it comes at once");
    let last = live["seq"].as_u64().expect("a number");
    drop(follow);
    server.crash();
    let session = session.on(&server.client);
    server.client.patch(&session.path(""), &json!({ "name": "again" })).expect(200);
    let missed = |header: &str| {
        let headers = [("accept", "text/event-stream"), ("last-event-id", header)];
        let reply =
            server.client.send("GET", &session.path("/events?follow=false"), &headers, None).expect("an answer").expect(200);
        numbers(reply.json()["items"].as_array().expect("a list"))
    };
    assert_eq!(missed(&last.to_string()).first(), Some(&(last + 1)));
    session.out("true");
    let whole = session.events();
    assert_eq!(numbers(&whole), (1..=whole.len() as u64).collect::<Vec<_>>(), "no hole after a crash");

    // Of all sessions, in one order, each event once.
    let other = server.session();
    let (mut all, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = server.client.get(&format!("/v1/events?limit=5{cursor}")).expect(200).json();
        all.extend(page["items"].as_array().expect("a list").clone());
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    for one in [&session, &other] {
        let of_one: Vec<Value> = all.iter().filter(|event| event["session_id"] == json!(one.id)).cloned().collect();
        assert_eq!(numbers(&of_one), (1..=of_one.len() as u64).collect::<Vec<_>>());
        assert!(of_one.len() > 2);
    }
    server.delete_all_and_check();
}

#[test]
fn an_operation_can_be_started_and_looked_up() {
    let server = Server::start();
    let session = server.session();
    session.out("echo kept > /root/kept");
    let state_after = |what: &str, state: &str| {
        let begun = server.client.post(&session.path(&format!("/{what}?wait=false")), &json!({})).expect(202).json();
        assert_eq!((&begun["session_id"], &begun["kind"]), (&json!(session.id), &json!(what)));
        let path = format!("/v1/operations/{}", begun["id"].as_str().expect("an id"));
        let done = eventually("the operation ends", || {
            Some(server.client.get(&path).expect(200).json()).filter(|operation| operation["state"] != "running")
        });
        assert!(done["state"] == "done" && done["ended_at"].is_string(), "{done}");
        assert_eq!(session.state(), state);
        // Already so.
        assert_eq!(session.call(what).expect(200).json()["state"], state, "{what} again");
    };
    state_after("hibernate", "hibernated");
    assert_eq!(session.call("start").expect(409).problem(), "conflict");
    state_after("wake", "running");
    state_after("pause", "paused");
    assert_eq!(server.client.post(&session.path("/execs"), &json!({ "shell": "true" })).expect(409).problem(), "paused");
    state_after("unpause", "running");
    state_after("stop", "stopped");
    assert_eq!(session.call("wake").expect(422).problem(), "no_memory_snapshot");
    assert_eq!(session.call("hibernate").expect(422).problem(), "not_running");
    assert_eq!(server.client.post(&session.path("/execs"), &json!({ "shell": "true" })).expect(422).problem(), "not_running");
    let started = server
        .client
        .post(&session.path("/execs?start=true&wait=true"), &json!({ "shell": "cat /root/kept" }))
        .expect(201)
        .json();
    assert_eq!(started["stdout"], "kept\n");
    session.hibernate();
    assert_eq!(session.call("stop").expect(200).json()["memory"], "lost", "stop gives up a sleeping session's memory");
    let refused = server.client.post(&session.path("/stop"), &json!({ "force": true })).expect(400);
    assert_eq!(refused.problem(), "unknown_field");
    server.delete_all_and_check();
}

#[test]
fn logs_figures_and_processes_tell_what_happens_inside() {
    let server = Server::start();
    let service = json!({ "name": "web", "argv": ["sh", "-c", "echo from the service; exec sleep 1000"] });
    let session = server.session_with(&json!({ "services": [service] }));
    let exec = session.exec_with(&json!({ "shell": "echo out 1; echo err 1 >&2; printf 'no end'" }));
    let wanted = [
        (format!("exec:{}", exec.id), "stdout", "out 1"),
        (format!("exec:{}", exec.id), "stderr", "err 1"),
        (format!("exec:{}", exec.id), "stdout", "no end"),
        ("service:web".to_owned(), "stdout", "from the service"),
    ];
    let log = |query: &str| {
        let text = server.client.get(&session.path(&format!("/logs{query}"))).expect(200).text();
        text.lines()
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_str::<Value>(line).expect("JSON"))
            .collect::<Vec<_>>()
    };
    eventually("all lines are there", || {
        let lines = log("");
        let has = |(source, stream, text): &(String, &str, &str)| {
            lines
                .iter()
                .filter(|l| l["source"] == json!(source) && l["stream"] == json!(stream) && l["text"] == json!(text))
                .count()
                == 1
        };
        wanted.iter().all(has).then_some(())
    });
    assert_eq!(log("?since=2099-01-01T00:00:00Z"), Vec::<Value>::new());
    assert!(log("?since=1h").len() >= 4);
    server.client.get(&session.path("/logs?since=soon")).expect(400);
    // Followed, a new exec's lines come by themselves.
    let follow = server.client.stream(&session.path("/logs?follow=true"), "application/x-ndjson").expect("a stream");
    let mut lines = BufReader::new(follow).lines().map_while(Result::ok).filter(|line| !line.is_empty());
    lines.by_ref().find(|line| line.contains("from the service")).expect("what was");
    session.out("echo later");
    let later = lines.find(|line| line.contains("later")).expect("what comes");
    assert_eq!(serde_json::from_str::<Value>(&later).expect("JSON")["text"], "later");

    let sleeper = session.start_sh("exec sleep 987");
    let process = eventually("the process is listed", || {
        let list = items(server.client.get(&session.path("/processes")));
        list.into_iter().find(|process| process["command"] == "sleep 987")
    });
    assert_eq!(process["pid"], session.exec(&sleeper)["pid"], "{process}");
    let stats = server.client.get(&session.path("/stats")).expect(200).json();
    assert!(stats["memory_bytes"].as_u64() > Some(1 << 20) && stats["processes"].as_u64() >= Some(2), "{stats}");
    session.out("head -c 3000000 /dev/zero > /root/big; sync");
    let after = server.client.get(&session.path("/stats")).expect(200).json();
    assert!(after["disk_bytes"].as_u64() >= Some(3_000_000), "{after}");
    let shown = server.cli(&["stats", &session.id]).output().expect("the CLI runs");
    assert!(shown.status.success(), "{shown:?}");
    server.delete_all_and_check();
}

#[test]
fn the_server_describes_itself() {
    let server = Server::start();
    let bare = server.client.with_token("");
    for path in ["/healthz", "/readyz"] {
        bare.get(path).expect(200);
    }
    let document = bare.get("/openapi.json").expect(200).json();
    assert!(document["openapi"].as_str().is_some_and(|version| version.starts_with("3.")), "{}", document["openapi"]);
    let paths = document["paths"].as_object().expect("paths");
    let calls: usize = paths.values().map(|methods| methods.as_object().map_or(0, serde_json::Map::len)).sum();
    assert!(calls >= 50, "{calls} calls are described");
    // Each that it describes is served: no method of it is unknown to the router.
    for (path, methods) in paths {
        for method in methods.as_object().expect("methods").keys().filter(|name| *name != "parameters") {
            // Without a token nothing is done; an address that isn't served would be 404 or 405.
            let concrete = path.replace("{id}", NOBODY).replace(['{', '}'], "");
            let body = (method != "get" && method != "delete").then_some(&b"{}"[..]);
            let reply = bare.send(&method.to_uppercase(), &concrete, &[], body).expect("an answer");
            assert!(matches!(reply.status, 200 | 401), "{method} {path}: {}", reply.status);
        }
    }
    // Every reference leads somewhere.
    let text = document.to_string();
    for reference in text.split("\"$ref\":\"#/").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert!(document.pointer(&format!("/{reference}")).is_some(), "{reference}");
    }
    let docs = bare.get("/docs").expect(200);
    assert!(docs.content_type.starts_with("text/html"));
    let page = docs.text();
    for outside in ["src=\"http", "href=\"http", "src='http", "@import", "url(http", "//cdn"] {
        assert!(!page.contains(outside), "the page needs nothing from elsewhere: {outside}");
    }
    assert!(docs.header("content-security-policy").is_some_and(|policy| policy.contains("default-src 'none'")));

    let session = server.session();
    session.out("true");
    let figures = server.client.get("/metrics").expect(200).text();
    let mut seen = BTreeSet::new();
    for line in figures.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').expect("a name and a value");
        value.parse::<f64>().unwrap_or_else(|_| panic!("a number: {line}"));
        seen.insert(name.split('{').next().expect("a name").to_owned());
        assert!(name.starts_with("dormouse_"), "{line}");
        assert!(!name.contains(&session.id), "no figure grows with the sessions: {line}");
    }
    assert!(seen.contains("dormouse_sessions") && seen.contains("dormouse_execs_started_total"), "{seen:?}");
    assert!(figures.contains("dormouse_sessions{state=\"running\"} 1"), "{figures}");
    let told = server.client.get("/v1/server").expect(200).json();
    assert_eq!(told["pid"], json!(server.pid()));
    server.delete_all_and_check();
}

/// A request over a Unix socket, by the user `uid`; the status and the body.
fn over_socket(socket: &Path, uid: u32, method: &str, path: &str) -> (u16, String) {
    if uid != 0 {
        let url = format!("http://localhost{path}");
        let mut command = Command::new("curl");
        command.args(["-s", "-X", method, "-w", "\n%{http_code}", "--unix-socket"]).arg(socket).arg(url).uid(uid).gid(uid);
        let done = command.output().expect("curl runs");
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        let (body, status) = text.rsplit_once('\n').expect("a status");
        return (status.parse().expect("a number"), body.to_owned());
    }
    let mut stream = UnixStream::connect(socket).expect("the socket listens");
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("it takes the request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, text.split_once("\r\n\r\n").expect("a body").1.to_owned())
}

#[test]
fn the_servers_socket_knows_its_peers_by_uid() {
    let open = tempfile::Builder::new().prefix("dormouse-socket-").tempdir().expect("a directory");
    std::fs::set_permissions(open.path(), std::fs::Permissions::from_mode(0o755)).expect("a mode");
    let socket = open.path().join("server.sock");
    let args = vec!["--socket".to_owned(), socket.to_string_lossy().into_owned()];
    let mut server = Server::with(dormouse_tests::Options { args, ..Default::default() });
    let (status, body) = over_socket(&socket, 0, "GET", "/v1/tokens");
    assert_eq!(status, 200, "root needs no token there: {body}");
    // Another user of the machine is no administrator, whatever the socket's mode.
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).expect("a mode");
    let (status, body) = over_socket(&socket, 65534, "GET", "/v1/sessions");
    assert_eq!(status, 401, "{body}");
    assert_eq!(over_socket(&socket, 65534, "GET", "/healthz").0, 200);
    let listed = server
        .cli(&["ls", "--json"])
        .env("DORMOUSE_URL", format!("unix:{}", socket.display()))
        .env_remove("DORMOUSE_TOKEN")
        .output();
    assert!(listed.expect("the CLI runs").status.success());
    // It ends with the server, and a rest of a killed one is no obstacle.
    server.kill();
    assert!(socket.exists());
    server.start_again();
    assert_eq!(over_socket(&socket, 0, "GET", "/v1/sessions").0, 200);
    server.terminate();
    assert!(!socket.exists());
    server.start_again();
    server.delete_all_and_check();
}

#[test]
fn one_server_holds_a_data_directory_and_its_settings_come_from_flags_environment_and_file() {
    let server = Server::start();
    let serve = |args: &[&str]| {
        let mut command = Command::new(binary());
        command.arg("serve").args(["--listen", "127.0.0.1:0", "--pool", "0"]).args(args).stdin(Stdio::null());
        command.env_remove("DORMOUSE_TEMPLATES").env_remove("DORMOUSE_DATA");
        command
    };
    let data = server.data().to_string_lossy().into_owned();
    let second = serve(&["--data", &data]).output().expect("it runs");
    let told = String::from_utf8_lossy(&second.stderr);
    assert!(second.status.code() == Some(1) && told.contains(&server.pid().to_string()), "it names the other's pid: {told}");

    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    for (name, text, says) in
        [("typo", "lisen = 1", "lisen"), ("kind", "pool = \"many\"", "pool"), ("broken", "listen = [", "broken")]
    {
        std::fs::write(path(name), text).expect("a file");
        let refused = serve(&["--data", &path("d"), "--config", &path(name)]).output().expect("it runs");
        let told = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(1) && told.contains(says), "{name}: {told}");
    }
    // The file counts last, a variable before it, a flag first.
    let config = format!("data = \"{}\"\nsocket = \"{}\"\nlog_level = \"debug\"\n", path("from-file"), path("file.sock"));
    std::fs::write(path("config.toml"), config).expect("a file");
    let mut command = serve(&["--config", &path("config.toml")]);
    command.env("DORMOUSE_SOCKET", path("env.sock")).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    let ready = lines.find(|line| line.starts_with("listening on http://127.0.0.1:"));
    let there = (
        Path::new(&path("from-file")).join("admin.token").exists(),
        Path::new(&path("env.sock")).exists(),
        Path::new(&path("file.sock")).exists(),
    );
    // SAFETY: kill takes two integers; the child is ours and not waited for yet.
    unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) };
    let ended = child.wait().expect("it ends");
    assert!(ready.is_some() && ended.success(), "{ready:?} {ended:?}");
    assert_eq!(there, (true, true, false));
    server.delete_all_and_check();
}
