//! The interface from outside, over a real engine and store, as far as it goes without a sandbox.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use api::{AppState, Listeners, Peer, router, serve};
use axum::{
    Router,
    body::Body,
    extract::ConnectInfo,
    http::{HeaderMap, Request, StatusCode, header},
};
use engine::{Caller, Config, Engine, NewToken, Scope};
use http_body_util::BodyExt;
use model::{Runtime, SessionId, SnapshotId, SnapshotState, State, Timestamp};
use serde_json::{Value, json};
use std::sync::Arc;
use store::{SessionChange, SessionRow, SnapshotRow};
use store_sqlite::SqliteStore;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

/// A server without sandboxes, and a token of every kind that a test asks for.
struct Server {
    router: Router,
    engine: Engine,
    background: api::Background,
    stop: CancellationToken,
    _dir: tempfile::TempDir,
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Value,
    text: String,
}

impl Server {
    async fn start() -> Server {
        let dir = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(dir.path()).await.unwrap();
        let config = Config {
            data_dir: dir.path().to_owned(),
            templates_dir: dir.path().join("templates"),
            runsc: "/nonexistent/runsc".into(),
            platform: "systrap".into(),
            supervisor: "/nonexistent/dormouse".into(),
            guest: b"guest",
            pool_size: 0,
            default_template: "debian".into(),
            confirm: true,
            keep_output: None,
            webhooks: Vec::new(),
            object_store: engine::ObjectStore::folder(dir.path().join("objects")),
            pack_after: std::time::Duration::from_secs(300),
            cache_bytes: 1 << 30,
            closed: Vec::new(),
            egress_roots: None,
            secrets_key: None,
            forget_secrets: false,
        };
        let engine = Engine::open(config, Arc::new(store)).await.unwrap();
        let stop = CancellationToken::new();
        let (state, background) = AppState::new(engine.clone(), api::Previews::default(), stop.clone());
        Server { router: router(state), engine, background, stop, _dir: dir }
    }

    async fn token(&self, scopes: &[Scope], sessions: Option<Vec<SessionId>>) -> String {
        let new =
            NewToken { name: "test".into(), scopes: scopes.to_vec(), sessions, ttl_seconds: None, limits: Default::default() };
        self.engine.token_new(&Caller::system(), new).await.unwrap().secret
    }

    async fn admin(&self) -> String {
        self.token(&[Scope::Admin], None).await
    }

    async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        Answer { status: parts.status, headers: parts.headers, body, text }
    }

    async fn call(&self, method: &str, uri: &str, token: &str, body: &str) -> Answer {
        self.send(request(method, uri, token, body)).await
    }
}

fn request(method: &str, uri: &str, token: &str, body: &str) -> Request<Body> {
    let mut builder = Request::builder().method(method).uri(uri);
    if !token.is_empty() {
        builder = builder.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    builder.body(Body::from(body.to_owned())).unwrap()
}

impl Answer {
    /// Checks that this is a problem with this status and code.
    #[track_caller]
    fn refused(&self, status: u16, code: &str) {
        assert_eq!((self.status.as_u16(), self.body["code"].as_str()), (status, Some(code)), "{}", self.text);
        assert_eq!(self.headers[header::CONTENT_TYPE], "application/problem+json");
        for field in ["type", "title", "status", "detail", "retryable", "no_side_effects"] {
            assert!(!self.body[field].is_null(), "{field} is missing in {}", self.text);
        }
    }

    #[track_caller]
    fn ok(&self) {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
    }
}

#[tokio::test]
async fn nothing_but_the_open_pages_is_told_without_a_token() {
    let server = Server::start().await;
    for open in ["/healthz", "/readyz", "/docs", "/openapi.json"] {
        server.call("GET", open, "", "").await.ok();
    }
    for closed in ["/metrics", "/v1/sessions", "/v1/tokens", "/v1/server"] {
        let answer = server.call("GET", closed, "", "").await;
        answer.refused(401, "unauthorized");
        assert_eq!(answer.headers[header::WWW_AUTHENTICATE], "Bearer");
    }
    server.call("GET", "/v1/sessions", "wrong", "").await.refused(401, "unauthorized");
    let admin = server.admin().await;
    server.call("GET", "/v1/sessions", &admin, "").await.ok();
    assert!(server.call("GET", "/metrics", &admin, "").await.text.contains("dormouse_http_requests_total"));
}

#[tokio::test]
async fn scopes_reach_as_far_as_they_say() {
    let server = Server::start().await;
    let read = server.token(&[Scope::Read], None).await;
    let write = server.token(&[Scope::Write], None).await;
    server.call("GET", "/v1/sessions", &read, "").await.ok();
    server.call("POST", "/v1/sessions", &read, "{}").await.refused(403, "forbidden");
    server.call("GET", "/v1/sessions", &write, "").await.ok();
    for (method, uri) in [("GET", "/v1/tokens"), ("POST", "/v1/tokens"), ("GET", "/v1/audit"), ("POST", "/v1/server/shutdown")] {
        let body = if uri == "/v1/tokens" && method == "POST" { r#"{"name":"x"}"# } else { "" };
        server.call(method, uri, &write, body).await.refused(403, "forbidden");
    }
    assert!(!server.stop.is_cancelled());
}

#[tokio::test]
async fn a_token_for_one_session_reaches_no_other() {
    let server = Server::start().await;
    let (own, other) = (SessionId::new(), SessionId::new());
    let token = server.token(&[Scope::Write], Some(vec![own])).await;
    server.call("GET", &format!("/v1/sessions/{own}"), &token, "").await.refused(404, "not_found");
    for uri in
        [format!("/v1/sessions/{other}"), format!("/v1/sessions/{other}/execs"), format!("/v1/sessions/{other}/files?path=/x")]
    {
        server.call("GET", &uri, &token, "").await.refused(403, "forbidden");
    }
    server.call("POST", "/v1/sessions", &token, "{}").await.refused(403, "forbidden");
}

#[tokio::test]
async fn a_revoked_token_is_worth_nothing_at_once() {
    let server = Server::start().await;
    let admin = server.admin().await;
    let made = server.call("POST", "/v1/tokens", &admin, r#"{"name":"ci","scopes":["read"]}"#).await;
    assert_eq!(made.status, StatusCode::CREATED, "{}", made.text);
    let secret = made.body["token"].as_str().unwrap().to_owned();
    assert!(!secret.contains('.'));
    server.call("GET", "/v1/sessions", &secret, "").await.ok();
    let listed = server.call("GET", "/v1/tokens", &admin, "").await;
    assert!(!listed.text.contains(&secret), "a secret is told once");
    let id = made.body["id"].as_str().unwrap();
    assert_eq!(server.call("DELETE", &format!("/v1/tokens/{id}"), &admin, "").await.status, StatusCode::NO_CONTENT);
    server.call("GET", "/v1/sessions", &secret, "").await.refused(401, "unauthorized");
}

#[tokio::test]
async fn the_sockets_peers_are_told_apart() {
    let server = Server::start().await;
    let own = nix::unistd::geteuid().as_raw();
    for (uid, status) in [(Some(0), 200), (Some(own), 200), (Some(own + 4242), 401), (None, 401)] {
        let mut request = request("GET", "/v1/tokens", "", "");
        request.extensions_mut().insert(ConnectInfo(Peer::Unix { uid }));
        assert_eq!(server.send(request).await.status.as_u16(), status, "{uid:?}");
    }
}

#[tokio::test]
async fn bad_requests_are_told_what_is_wrong() {
    let server = Server::start().await;
    let admin = server.admin().await;
    let unknown = server.call("POST", "/v1/sessions", &admin, r#"{"tempalte":"debian"}"#).await;
    unknown.refused(400, "unknown_field");
    assert_eq!(unknown.body["field"], "tempalte");
    let broken = server.call("POST", "/v1/sessions", &admin, "{\"key\":\n oops}").await;
    broken.refused(400, "bad_request");
    assert!(broken.body["detail"].as_str().unwrap().contains("line 2"), "{}", broken.text);
    let later = server.call("POST", "/v1/sessions", &admin, r#"{"volumes":[{"name":"a","path":"/v"}]}"#).await;
    later.refused(400, "not_built");
    assert_eq!(later.body["field"], "volumes");
    server.call("POST", "/v1/sessions", &admin, r#"{"key":"a b"}"#).await.refused(400, "bad_request");
    server.call("GET", "/v1/sessions?stat=running", &admin, "").await.refused(400, "unknown_field");
    server.call("GET", "/v1/sessions?limit=1001", &admin, "").await.refused(400, "bad_request");
    server.call("GET", "/v1/sessions?cursor=zzz", &admin, "").await.refused(400, "bad_request");
    server
        .call("POST", "/v1/sessions", &admin, &format!(r#"{{"name":"{}"}}"#, "x".repeat(2 << 20)))
        .await
        .refused(413, "too_large");
}

#[tokio::test]
async fn addresses_that_lead_nowhere() {
    let server = Server::start().await;
    let admin = server.admin().await;
    let id = SessionId::new();
    for uri in ["/v1/sessions/not-an-id", "/v1/operations/7", "/nowhere", "/v1/sessions/%ff"] {
        server.call("GET", uri, &admin, "").await.refused(404, "not_found");
    }
    for (method, tail) in [("GET", ""), ("GET", "/events"), ("GET", "/execs"), ("POST", "/wake"), ("GET", "/files?path=/etc")] {
        server.call(method, &format!("/v1/sessions/{id}{tail}"), &admin, "").await.refused(404, "not_found");
    }
    server.call("PUT", "/v1/sessions", &admin, "").await.refused(405, "method_not_allowed");
    for (method, uri) in [("POST", format!("/v1/sessions/{id}/feed")), ("GET", "/v1/volumes".into())] {
        server.call(method, &uri, &admin, "").await.refused(400, "not_built");
    }
    for path in ["../etc/passwd", "/a%00b", ""] {
        server.call("GET", &format!("/v1/sessions/{id}/files?path={path}"), &admin, "").await.refused(400, "bad_request");
    }
}

#[tokio::test]
async fn what_no_snapshot_can_be_is_refused_by_name() {
    let server = Server::start().await;
    let admin = server.admin().await;
    let (session, snapshot) = (SessionId::new(), SnapshotId::new());
    for uri in [format!("/v1/snapshots/{snapshot}"), "/v1/snapshots/base".into(), "/v1/snapshots?find=base".into()] {
        server.call("GET", &uri, &admin, "").await.refused(404, "not_found");
    }
    server.call("DELETE", &format!("/v1/snapshots/{snapshot}"), &admin, "").await.refused(404, "not_found");
    server.call("POST", &format!("/v1/snapshots/{snapshot}/fork"), &admin, "").await.refused(404, "not_found");
    let back = format!(r#"{{"snapshot_id":"{snapshot}"}}"#);
    server.call("POST", &format!("/v1/sessions/{session}/rollback"), &admin, &back).await.refused(404, "not_found");
    for (what, body, field) in [
        ("snapshots", r#"{"name":"a b"}"#, "name"),
        ("snapshots", r#"{"name":"01890000-0000-7000-8000-000000000001"}"#, "name"),
        ("snapshots", r#"{"keep_seconds":0}"#, "keep_seconds"),
        ("snapshots", r#"{"keep_seconds":-1}"#, "keep_seconds"),
        ("snapshots", r#"{"labels":{"":"x"}}"#, "labels"),
        ("fork", r#"{"count":0}"#, "count"),
        ("fork", r#"{"count":-1}"#, "count"),
        ("fork", r#"{"count":1000000}"#, "count"),
        ("fork", r#"{"count":1.5}"#, "count"),
        ("rollback", r#"{"snapshot_id":"base"}"#, "snapshot_id"),
    ] {
        let refused = server.call("POST", &format!("/v1/sessions/{session}/{what}"), &admin, body).await;
        refused.refused(400, "bad_request");
        assert_eq!(refused.body["field"], field, "{what} {body}: {}", refused.text);
        if field == "count" {
            assert!(refused.body["detail"].as_str().unwrap().contains("from 1 to 100"), "{}", refused.text);
        }
    }
    server.call("POST", &format!("/v1/sessions/{session}/rollback"), &admin, "{}").await.refused(400, "bad_request");
    let secrets = server.call("POST", &format!("/v1/sessions/{session}/fork"), &admin, r#"{"secrets":true}"#).await;
    secrets.refused(404, "not_found");
    for (what, body) in [("snapshots", r#"{"keep":1}"#), ("fork", r#"{"n":1}"#), ("rollback", r#"{"snapshot":1}"#)] {
        server.call("POST", &format!("/v1/sessions/{session}/{what}"), &admin, body).await.refused(400, "unknown_field");
    }
    for query in ["limit=0", "cursor=zzz", "session=x", "include_deleted=perhaps"] {
        server.call("GET", &format!("/v1/snapshots?{query}"), &admin, "").await.refused(400, "bad_request");
    }
    server.call("POST", "/v1/sessions", &admin, r#"{"snapshot_id":"base"}"#).await.refused(400, "bad_request");
}

#[tokio::test]
async fn a_token_for_one_session_sees_the_snapshots_of_that_one() {
    let server = Server::start().await;
    let (own, other) = (SessionId::new(), SessionId::new());
    let token = server.token(&[Scope::Write], Some(vec![own])).await;
    let (admin, read) = (server.admin().await, server.token(&[Scope::Read], None).await);
    let row = |session, name: Option<&str>| SnapshotRow {
        state: SnapshotState::Ready,
        name: name.map(|name| name.parse().unwrap()),
        ..SnapshotRow::new(SnapshotId::new(), session, Runtime::Gvisor, "debian", Timestamp(1_700_000_000_000))
    };
    let (base, theirs) = (row(own, Some("base")), row(other, Some("theirs")));
    let gone = SnapshotRow { state: SnapshotState::Deleted, deleted_at: Some(Timestamp(1_700_000_000_001)), ..row(own, None) };
    let all = vec![base.clone(), theirs.clone(), gone.clone()];
    server.engine.store().commit_snapshots(all).await.unwrap();

    let ids = async |uri: &str, token: &str| -> Vec<String> {
        let answer = server.call("GET", uri, token, "").await;
        answer.ok();
        answer.body["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap().to_owned()).collect()
    };
    let of = |rows: &[&SnapshotRow]| rows.iter().map(|row| row.id.to_string()).collect::<Vec<_>>();
    assert_eq!(ids("/v1/snapshots", &token).await, of(&[&base]));
    assert_eq!(ids("/v1/snapshots?include_deleted=true", &token).await, of(&[&gone, &base]));
    assert_eq!(ids("/v1/snapshots", &read).await, of(&[&theirs, &base]));
    assert_eq!(ids(&format!("/v1/snapshots?session={other}"), &admin).await, of(&[&theirs]));
    assert_eq!(ids("/v1/snapshots?find=base", &token).await, of(&[&base]));
    let piece = base.id.to_string()[28..].to_owned();
    assert_eq!(ids(&format!("/v1/snapshots?find={piece}"), &token).await, of(&[&base]));
    let page = server.call("GET", "/v1/snapshots?limit=1", &admin, "").await;
    let cursor = page.body["next_cursor"].as_str().unwrap();
    assert_eq!(ids(&format!("/v1/snapshots?limit=1&cursor={cursor}"), &admin).await, of(&[&base]));

    let shown = server.call("GET", &format!("/v1/snapshots/{}", base.id), &token, "").await;
    shown.ok();
    for field in "id session_id name state generation memory size_bytes unique_bytes parent_id created_at keep_until requires"
        .split_whitespace()
    {
        assert!(shown.body.get(field).is_some(), "a snapshot has '{field}': {}", shown.text);
    }
    assert_eq!((&shown.body["name"], &shown.body["requires"]["template"]), (&json!("base"), &json!("debian")));
    for uri in
        [format!("/v1/snapshots/{}", theirs.id), "/v1/snapshots?find=theirs".into(), format!("/v1/snapshots?session={other}")]
    {
        server.call("GET", &uri, &token, "").await.refused(403, "forbidden");
    }
    server.call("DELETE", &format!("/v1/snapshots/{}", theirs.id), &token, "").await.refused(403, "forbidden");
    server.call("POST", &format!("/v1/snapshots/{}/fork", base.id), &token, "").await.refused(403, "forbidden");
    for (method, uri) in [
        ("DELETE", format!("/v1/snapshots/{}", base.id)),
        ("POST", format!("/v1/snapshots/{}/fork", base.id)),
        ("POST", format!("/v1/sessions/{own}/snapshots")),
        ("POST", format!("/v1/sessions/{own}/rollback")),
    ] {
        server.call(method, &uri, &read, "").await.refused(403, "forbidden");
    }
    for (method, tail) in [("GET", ""), ("DELETE", ""), ("POST", "/fork")] {
        let answer = server.call(method, &format!("/v1/snapshots/{}{tail}", gone.id), &admin, "").await;
        answer.refused(410, "deleted");
        assert!(answer.body["at"].is_string(), "{}", answer.text);
    }
}

#[tokio::test]
async fn a_request_that_is_sent_again_is_answered_again() {
    let server = Server::start().await;
    let admin = server.admin().await;
    let send = |key: &str, body: &str| {
        let mut request = request("POST", "/v1/tokens", &admin, body);
        request.headers_mut().insert("idempotency-key", key.parse().unwrap());
        request
    };
    let (first, second) =
        tokio::join!(server.send(send("k1", r#"{"name":"one"}"#)), server.send(send("k1", r#"{"name":"one"}"#)));
    assert_eq!(first.status, StatusCode::CREATED, "{}", first.text);
    assert_eq!((first.status, &first.body), (second.status, &second.body), "both get the answer of one");
    server.send(send("k1", r#"{"name":"two"}"#)).await.refused(409, "idempotency_conflict");
    let tokens = server.call("GET", "/v1/tokens", &admin, "").await;
    let named_one = tokens.body["items"].as_array().unwrap().iter().filter(|token| token["name"] == "one").count();
    assert_eq!(named_one, 1);
    // What changed nothing can be put right under the same key.
    server.send(send("k2", r#"{"nam":"three"}"#)).await.refused(400, "unknown_field");
    assert_eq!(server.send(send("k2", r#"{"name":"three"}"#)).await.status, StatusCode::CREATED);
    server.send(send("", r#"{"name":"four"}"#)).await.refused(400, "bad_request");
}

#[tokio::test]
async fn a_query_token_opens_streams_only_and_is_not_written_down() {
    let server = Server::start().await;
    let admin = server.admin().await;
    server.call("GET", &format!("/v1/events?access_token={admin}"), "", "").await.refused(401, "unauthorized");
    let mut stream = request("GET", &format!("/v1/events?access_token={admin}"), "", "");
    stream.headers_mut().insert(header::ACCEPT, "text/event-stream".parse().unwrap());
    let response = server.router.clone().oneshot(stream).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    drop(response);
    let Server { engine, background, .. } = server;
    background.finish().await;
    let audit = engine.store().list_audit(100, None).await.unwrap().items;
    assert!(audit.iter().any(|row| row.path == "/v1/events" && row.status == 200), "{audit:?}");
    assert!(audit.iter().all(|row| !format!("{row:?}").contains(&admin)));
}

#[tokio::test]
async fn every_access_is_in_the_list() {
    let server = Server::start().await;
    let admin = server.admin().await;
    let id = SessionId::new();
    server.call("GET", &format!("/v1/sessions/{id}?access_token=leak"), &admin, "").await;
    server.call("DELETE", "/v1/tokens/x", "", "").await;
    let Server { engine, background, .. } = server;
    background.finish().await;
    let rows = engine.store().list_audit(100, None).await.unwrap().items;
    let row = rows.iter().find(|row| row.session_id == Some(id)).unwrap();
    assert_eq!((row.method.as_str(), row.status, row.actor.as_str()), ("GET", 404, "token:test"));
    assert!(rows.iter().any(|row| row.method == "DELETE" && row.status == 401));
}

#[tokio::test]
async fn the_server_ends_when_it_is_asked_to() {
    let server = Server::start().await;
    let admin = server.admin().await;
    let answer = server.call("POST", "/v1/server/shutdown", &admin, "").await;
    answer.ok();
    assert_eq!(answer.body["pid"], json!(std::process::id()));
    assert!(server.stop.is_cancelled());
    server.call("GET", "/readyz", "", "").await.refused(503, "shutting_down");
}

#[tokio::test]
async fn over_a_real_socket_and_until_the_end() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listeners = Listeners { tcp: Vec::new(), unix: vec![tokio::net::UnixListener::bind(&path).unwrap()] };
    let serving = tokio::spawn(serve(server.router.clone(), listeners, server.stop.clone()));
    let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    stream.write_all(b"GET /v1/server HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    // A stream without an end must not hold the server up.
    let mut endless = tokio::net::UnixStream::connect(&path).await.unwrap();
    endless.write_all(b"GET /v1/events?follow=true HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut head = [0; 12];
    endless.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    server.stop.cancel();
    tokio::time::timeout(std::time::Duration::from_secs(5), serving).await.unwrap().unwrap();
}

/// A sleeping session with this policy, as the store has it.
async fn sleeping(server: &Server, policy: Value) -> SessionId {
    let mut row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(1));
    row.state = State::Stopped;
    row.network = serde_json::from_value(policy).unwrap();
    let id = row.id;
    server.engine.store().commit(SessionChange::new(row)).await.unwrap();
    id
}

#[tokio::test]
async fn secrets_are_set_and_listed_and_never_shown() {
    let server = Server::start().await;
    let (admin, write) = (server.admin().await, server.token(&[Scope::Write], None).await);
    for (method, uri, body) in
        [("GET", "/v1/secrets", ""), ("PUT", "/v1/secrets/A", r#"{"value":"x"}"#), ("DELETE", "/v1/secrets/A", "")]
    {
        server.call(method, uri, &write, body).await.refused(403, "forbidden");
    }
    server.call("POST", "/v1/secrets", &admin, r#"{"name":"A","value":"canary-1","hosts":["API.example.com"]}"#).await.ok();
    let changed = server.call("PUT", "/v1/secrets/A", &admin, r#"{"value":"canary-2"}"#).await;
    changed.ok();
    assert_eq!(changed.body["hosts"], json!(["api.example.com"]), "its hosts stay");
    let list = server.call("GET", "/v1/secrets", &admin, "").await;
    assert_eq!(list.body["items"][0]["name"], "A");
    assert!(!format!("{}{}", list.text, changed.text).contains("canary"));
    for (uri, body, field) in [
        ("/v1/secrets/a-b", r#"{"value":"x"}"#, "name"),
        ("/v1/secrets/A", r#"{"value":""}"#, "value"),
        ("/v1/secrets/A", r#"{"value":"a\nb"}"#, "value"),
        ("/v1/secrets/A", r#"{"value":"x","hosts":["10.0.0.0/8"]}"#, "hosts"),
    ] {
        let refused = server.call("PUT", uri, &admin, body).await;
        refused.refused(400, "bad_request");
        assert_eq!(refused.body["field"], field, "{}", refused.text);
    }
    assert_eq!(server.call("DELETE", "/v1/secrets/A", &admin, "").await.status, 204);
    server.call("DELETE", "/v1/secrets/A", &admin, "").await.refused(404, "not_found");
    let kept = std::fs::read(server._dir.path().join("store.db-wal")).unwrap_or_default();
    assert!(!kept.windows(6).any(|window| window == b"canary"), "it is nowhere in the store");
}

#[tokio::test]
async fn a_policy_is_read_strictly_and_names_only_what_it_may() {
    let server = Server::start().await;
    let (admin, write) = (server.admin().await, server.token(&[Scope::Write], None).await);
    let id = sleeping(&server, json!({})).await;
    let uri = format!("/v1/sessions/{id}");
    let patch = |policy: Value| json!({ "network": policy }).to_string();
    let rule = |to: &str, name: &str| json!({ "rules": [{ "allow": to, "inject": { "header": "x-key", "value": format!("{{{name}}}") } }] });
    server.call("PATCH", &uri, &write, &patch(json!({ "default": "deny", "rules": [{ "allow": "a.example" }] }))).await.ok();
    let shown = server.call("GET", &uri, &write, "").await;
    assert_eq!(shown.body["network"], json!({ "default": "deny", "rules": [{ "allow": "a.example" }] }));
    let wrong = server.call("PATCH", &uri, &write, &patch(json!({ "rules": [{ "allow": "a" }, { "allow": "a b" }] }))).await;
    wrong.refused(400, "bad_request");
    assert!(wrong.body["detail"].as_str().unwrap().contains("rules[1]"), "{}", wrong.text);
    server.call("PATCH", &uri, &write, &patch(json!({ "defualt": "deny" }))).await.refused(400, "unknown_field");

    server.call("PUT", "/v1/secrets/BOUND", &admin, r#"{"value":"x","hosts":["*.example.com"]}"#).await.ok();
    server.call("PUT", "/v1/secrets/FREE", &admin, r#"{"value":"x"}"#).await.ok();
    server.call("PATCH", &uri, &write, &patch(rule("api.example.com", "BOUND"))).await.ok();
    for refused in [rule("evil.example", "BOUND"), rule("api.example.com", "FREE"), rule("api.example.com", "NONE")] {
        server.call("PATCH", &uri, &write, &patch(refused.clone())).await.refused(403, "forbidden");
    }
    server.call("PATCH", &uri, &admin, &patch(rule("evil.example", "BOUND"))).await.refused(403, "forbidden");
    server.call("PATCH", &uri, &admin, &patch(rule("api.example.com", "FREE"))).await.ok();
    let network = server.call("GET", &format!("{uri}/network"), &write, "").await;
    network.ok();
    assert_eq!((&network.body["open_count"], &network.body["traffic"]), (&json!(0), &json!([])));
    server.call("PATCH", &uri, &write, r#"{"network":null}"#).await.ok();
    assert_eq!(server.call("GET", &uri, &write, "").await.body["network"], json!({ "default": "allow" }));
}

#[tokio::test]
async fn the_way_in_is_for_those_who_may_write() {
    let server = Server::start().await;
    let (read, write) = (server.token(&[Scope::Read], None).await, server.token(&[Scope::Write], None).await);
    let id = sleeping(&server, json!({})).await;
    let uri = |tail: &str| format!("/v1/sessions/{id}{tail}");
    let list = server.call("GET", &uri("/ports"), &read, "").await;
    list.ok();
    assert_eq!(list.body["items"], json!([]), "nothing is woken to be looked at");
    server.call("GET", &uri("/ports/80/x"), &read, "").await.refused(403, "forbidden");
    server.call("GET", &uri("/ports/80/x"), "", "").await.refused(401, "unauthorized");
    server.call("GET", &format!("{}?access_token={write}", uri("/ports/80/x")), "", "").await.refused(401, "unauthorized");
    for (method, tail) in [("GET", "/ports/80/x"), ("POST", "/ports/80"), ("PUT", "/ports/80/"), ("POST", "/ports/80/link")] {
        server.call(method, &uri(tail), &write, "").await.refused(422, "not_running");
    }
    for port in ["0", "65536", "x"] {
        server.call("GET", &uri(&format!("/ports/{port}/x")), &write, "").await.refused(400, "bad_request");
    }
    server.call("GET", &uri("/tcp/80"), &write, "").await.refused(400, "bad_request");
}

#[tokio::test]
async fn a_preview_opens_by_link_or_token_or_where_it_is_public() {
    let server = Server::start().await;
    let (admin, write) = (server.admin().await, server.token(&[Scope::Write], None).await);
    let id = sleeping(&server, json!({ "public_ports": [3000] })).await;
    let page = |port: u16, path: &str, headers: &[(&str, &str)]| {
        let mut builder = Request::builder().uri(path).header(header::HOST, format!("{port}-{id}.localhost:7420"));
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(Body::empty()).unwrap()
    };
    // The API isn't there, not even its open pages, and nothing is told of the session.
    for path in ["/", "/healthz", "/v1/sessions"] {
        let closed = server.send(page(8080, path, &[])).await;
        assert_eq!(closed.status, 401, "{}", closed.text);
        assert!(closed.text.contains("isn't public"), "{}", closed.text);
    }
    let stranger = Request::builder().uri("/").header(header::HOST, format!("80-{}.localhost", SessionId::new()));
    assert_eq!(server.send(stranger.body(Body::empty()).unwrap()).await.status, 401);
    // Whoever is let in meets a session that doesn't run.
    server.send(page(3000, "/", &[])).await.refused(422, "not_running");
    let bearer = format!("Bearer {write}");
    server.send(page(8080, "/", &[("authorization", &bearer)])).await.refused(422, "not_running");
    let other = format!("Bearer {}", server.token(&[Scope::Write], Some(vec![SessionId::new()])).await);
    assert_eq!(server.send(page(8080, "/", &[("authorization", &other)])).await.status, 401);

    let made = server.call("POST", &format!("/v1/sessions/{id}/links/8080"), &write, r#"{"seconds":60}"#).await;
    assert_eq!(made.status, 201, "{}", made.text);
    let url = made.body["url"].as_str().unwrap();
    let link = url.split_once("?dormouse_link=").unwrap().1;
    assert!(url.starts_with(&format!("http://8080-{id}.localhost")), "{url}");
    let led = server.send(page(8080, &format!("/a?x=1&dormouse_link={link}"), &[])).await;
    assert_eq!((led.status.as_u16(), led.headers[header::LOCATION].to_str().unwrap()), (303, "/a?x=1"));
    let cookie = led.headers[header::SET_COOKIE].to_str().unwrap().split(';').next().unwrap().to_owned();
    server.send(page(8080, "/a", &[("cookie", &cookie)])).await.refused(422, "not_running");
    assert_eq!(server.send(page(8081, "/a", &[("cookie", &cookie)])).await.status, 401, "it is for one port");
    let bent = link.replace('-', "-0");
    assert_eq!(server.send(page(8080, &format!("/?dormouse_link={bent}"), &[])).await.status, 401);
    for body in [r#"{"seconds":0}"#, r#"{"seconds":99999999}"#] {
        let refused = server.call("POST", &format!("/v1/sessions/{id}/links/8080"), &write, body).await;
        refused.refused(400, "bad_request");
    }
    let figures = server.call("GET", "/metrics", &admin, "").await.text;
    assert!(figures.contains(r#"route="preview",status="401""#), "{figures}");
}
