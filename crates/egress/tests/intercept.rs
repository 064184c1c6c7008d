//! Requests that are read: TLS ends at the edge, rules and headers apply, and everything else passes as it is.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod common;

use common::*;
use egress::Credentials;
use http_body_util::BodyExt;
use serde_json::json;
use std::{io, sync::atomic::Ordering::SeqCst};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const BEARER: &str = "Bearer canary-3b1f-secret";

/// A policy that adds a key to what goes to `api.test`, where only `/v1/` may be read and anything posted.
fn policy() -> serde_json::Value {
    let inject = json!({ "header": "Authorization", "value": "Bearer {KEY}" });
    json!({ "log_requests": true, "rules": [
        { "allow": "api.test", "ports": ["1-65535"], "methods": ["GET"], "path": "/v1/", "inject": inject },
        { "allow": "api.test", "ports": ["1-65535"], "methods": ["POST"], "inject": inject },
        { "allow": "api.test", "path": "/ws" }, { "allow": "api.test", "path": "/sse" }, { "allow": "api.test", "path": "/endless" },
        { "allow": "api.test", "path": "/trailers" }, { "allow": "api.test", "path": "/close" },
        { "deny": "api.test" }
    ] })
}

#[tokio::test]
async fn http1_and_http2_get_the_header_and_are_judged() {
    for alpn in ["http/1.1", "h2"] {
        let world = world(policy());
        let origin = origin(Some(world.server_config(&["h2", "http/1.1"]))).await;
        let to = format!("api.test:{}", origin.port);
        let stream = world.tls(&to, "api.test", &[alpn]).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(alpn.as_bytes()));
        let h2 = alpn == "h2";
        let (mut one, mut two) = (None, None);
        if h2 {
            two = Some(client2(stream).await)
        } else {
            one = Some(client1(stream).await)
        };
        let mut send = async |method: &str, path: &str, headers: &[(&str, &str)], body| {
            let uri = if h2 { format!("https://{to}{path}") } else { path.to_owned() };
            let mut headers = headers.to_vec();
            if !h2 {
                headers.push(("host", &to));
            }
            let request = ask(method, &uri, &headers, body);
            let response = match (&mut one, &mut two) {
                (Some(one), _) => one.send_request(request).await,
                (_, Some(two)) => two.send_request(request).await,
                _ => unreachable!(),
            };
            read(response.unwrap()).await
        };
        let (status, _, _) = send("GET", "/v1/models?q=1", &[("authorization", "Bearer forged"), ("x-kept", "1")], "").await;
        assert_eq!(status, 200);
        let got = origin.last();
        assert!(
            got.contains(&format!("authorization: {BEARER}\n")) && !got.contains("forged") && got.contains("x-kept: 1"),
            "{got}"
        );
        assert!(got.contains("/v1/models?q=1") && got.contains(if h2 { "HTTP/2.0" } else { "HTTP/1.1" }), "{got}");

        let (status, _, body) = send("POST", "/echo", &[], "a body").await;
        assert_eq!((status, body.as_str()), (200, "a body"));
        for path in ["/v2/x", "/v1/../v2", "/v1/%2e%2e/v2", "/v1/..%2fv2", "/v1%2f..%2fv2", "/v1/..;/v2", "/v1/%zz"] {
            let (status, reason, body) = send("GET", path, &[], "").await;
            assert_eq!((status, reason.is_empty()), (403, false), "{path}");
            assert!(body.contains(&to), "{body}");
        }
        let (status, _, _) = send("DELETE", "/v1/x", &[], "").await;
        assert_eq!(status, 403);
        let (status, _, _) = send("GET", "/x/../v1/y", &[], "").await;
        assert_eq!(status, 200);
        assert!(
            origin.last().contains("/v1/y ") && !origin.last().contains(".."),
            "what was judged is what is sent: {}",
            origin.last()
        );
        assert_eq!((origin.count(), origin.accepted.load(SeqCst)), (3, 1));
        soon(world.seen.until(|seen| seen.requests.lock().unwrap().len() == 11)).await;
        let lines = world.seen.requests.lock().unwrap();
        let post = lines.iter().find(|line| line.method == "POST").unwrap();
        assert_eq!((post.sent_bytes, post.received_bytes, post.path.as_str()), (6, 6, "/echo"));
        assert!(!format!("{lines:?} {:?}", world.seen.denied.lock().unwrap()).contains("canary"));
    }
}

#[tokio::test]
async fn the_header_goes_to_its_own_host_only() {
    let world = world(policy());
    let origin = origin(Some(world.server_config(&["http/1.1"]))).await;
    // No rule reads the requests of this one: its TLS is its own.
    let to = format!("other.test:{}", origin.port);
    let error = world.tls(&to, "other.test", &[]).await.unwrap_err();
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
    // A request for it can't be slipped into a connection to the other.
    let to = format!("api.test:{}", origin.port);
    let mut client = client1(world.tls(&to, "api.test", &[]).await.unwrap()).await;
    for host in ["other.test", "api.test.evil.test", "127.0.0.1"] {
        let (status, _, body) = read(client.send_request(get("/v1/", &[("host", host)])).await.unwrap()).await;
        assert_eq!(status, 421, "{body}");
    }
    let (status, _, _) =
        read(client.send_request(get("/v1/", &[("host", "api.test"), ("host", "other.test")])).await.unwrap()).await;
    assert_eq!(status, 400);
    assert_eq!(origin.count(), 0);
}

#[tokio::test]
async fn plain_requests_are_judged_the_same() {
    let world = world(policy());
    let origin = origin(None).await;
    let to = format!("api.test:{}", origin.port);
    // In a tunnel, and to the proxy.
    let mut tunnel = client1(world.tunnel(&to).await).await;
    let (status, _, _) = read(tunnel.send_request(get("/v1/a", &[("host", &to)])).await.unwrap()).await;
    assert_eq!(status, 200);
    assert!(origin.last().contains(BEARER));
    let (status, _, _) = read(tunnel.send_request(get("/v2/a", &[("host", &to)])).await.unwrap()).await;
    assert_eq!(status, 403);
    let mut proxy = client1(world.proxy()).await;
    let (status, _, _) = read(proxy.send_request(get(&format!("http://{to}/v1/b"), &[])).await.unwrap()).await;
    assert_eq!(status, 200);
    assert!(origin.last().contains(BEARER));
    let (status, _, _) = read(proxy.send_request(get(&format!("http://{to}/v2/b"), &[])).await.unwrap()).await;
    assert_eq!((status, origin.count()), (403, 2));
}

#[tokio::test]
async fn a_secret_goes_over_plain_http_only_where_its_rule_names_the_port() {
    let inject = json!({ "header": "Authorization", "value": "Bearer {KEY}" });
    let world = world(json!({ "rules": [{ "allow": "api.test", "inject": inject }] }));
    let origin = origin(None).await;
    let to = format!("http://api.test:{}/", origin.port);
    let mut proxy = client1(world.proxy()).await;
    let (status, _, sentence) = read(proxy.send_request(get(&to, &[])).await.unwrap()).await;
    assert!(status == 403 && sentence.contains("TLS"), "{status} {sentence}");
    assert_eq!(origin.count(), 0, "nothing was sent");
}

#[tokio::test]
async fn a_rule_speaks_for_its_own_host_whatever_the_connection_was_aimed_at_since() {
    let inject = json!({ "header": "Authorization", "value": "Bearer {KEY}" });
    let world = world(json!({ "rules": [{ "allow": "api.test", "ports": ["1-65535"], "inject": inject }, { "allow": "*" }] }));
    let evil = origin(None).await;
    let to = format!("http://other.test:{}/", evil.port);
    let mut proxy = client1(world.proxy()).await;
    let (status, _, _) = read(proxy.send_request(get(&to, &[])).await.unwrap()).await;
    assert_eq!(status, 200);
    // A tunnel that can't be made leaves the connection to the proxy as it was.
    let (listener, closed) = listen().await;
    drop(listener);
    let tunnel = ask("CONNECT", &format!("api.test:{closed}"), &[], "");
    let (status, _, _) = read(proxy.send_request(tunnel).await.unwrap()).await;
    assert_eq!(status, 502);
    let (status, _, _) = read(proxy.send_request(get(&to, &[])).await.unwrap()).await;
    assert_eq!((status, evil.count()), (200, 2));
    assert!(!evil.last().contains(BEARER), "{}", evil.last());
}

#[tokio::test]
async fn basic_credentials_work_as_git_wants_them() {
    let inject = json!({ "header": "authorization", "value": "Basic {basic:x-access-token:KEY}" });
    let world = world(json!({ "rules": [{ "allow": "*.test", "inject": inject }] }));
    let origin = origin(Some(world.server_config(&["http/1.1"]))).await;
    let to = format!("api.test:{}", origin.port);
    let mut client = client1(world.tls(&to, "api.test", &["http/1.1"]).await.unwrap()).await;
    let (status, _, body) = read(client.send_request(get("/", &[("host", "api.test")])).await.unwrap()).await;
    assert_eq!(status, 200);
    assert!(body.contains("authorization: Basic eC1hY2Nlc3MtdG9rZW46Y2FuYXJ5LTNiMWYtc2VjcmV0"), "{body}");
}

#[tokio::test]
async fn without_the_secret_nothing_is_sent() {
    let world = world(policy());
    let origin = origin(Some(world.server_config(&["http/1.1"]))).await;
    let to = format!("api.test:{}", origin.port);
    let mut client = client1(world.tls(&to, "api.test", &[]).await.unwrap()).await;
    let mut missing = Credentials::default();
    missing.ca = Some(ca_key());
    let mut withheld = credentials();
    withheld.withheld = true;
    let mut unfit = credentials();
    unfit.secrets.insert("KEY".parse().unwrap(), format!("{SECRET}\nx: y"));
    for (given, says) in [(missing, "isn't set"), (withheld, "given no secrets"), (unfit, "no header can carry")] {
        world.egress.set_credentials(given);
        let (status, reason, body) = read(client.send_request(get("/v1/", &[("host", "api.test")])).await.unwrap()).await;
        assert_eq!(status, 403);
        assert!(reason.contains("KEY") && body.contains(says) && !body.contains(SECRET), "{body}");
    }
    assert_eq!(origin.count(), 0);
    world.egress.set_credentials(credentials());
    let (status, _, _) = read(client.send_request(get("/v1/", &[("host", "api.test")])).await.unwrap()).await;
    assert_eq!((status, origin.count()), (200, 1));
}

#[tokio::test]
async fn an_answer_to_trace_shows_no_secret() {
    let inject = json!({ "header": "authorization", "value": "Bearer {KEY}" });
    let world = world(json!({ "rules": [{ "allow": "api.test", "inject": inject }] }));
    let origin = origin(None).await;
    let mut client = client1(world.tunnel(&format!("api.test:{}", origin.port)).await).await;
    let (status, _, _) = read(client.send_request(ask("TRACE", "/", &[("host", "api.test")], "")).await.unwrap()).await;
    assert_eq!((status, origin.count()), (403, 0));
}

#[tokio::test]
async fn requests_wait_for_the_credentials() {
    let world = world_without_policy();
    world.set_policy(policy());
    let origin = origin(Some(world.server_config(&["http/1.1"]))).await;
    let to = format!("api.test:{}", origin.port);
    let give = async {
        tokio::task::yield_now().await;
        world.egress.set_credentials(credentials());
    };
    let (stream, ()) = tokio::join!(world.tls(&to, "api.test", &[]), give);
    let (status, _, _) = read(client1(stream.unwrap()).await.send_request(get("/v1/", &[])).await.unwrap()).await;
    assert_eq!(status, 200);
    assert!(origin.last().contains(&format!("host: api.test:{}", origin.port)), "{}", origin.last());
}

#[tokio::test]
async fn events_pass_as_they_come_and_trailers_pass() {
    for alpn in ["http/1.1", "h2"] {
        let world = world(policy());
        let origin = origin(Some(world.server_config(&[alpn]))).await;
        let to = format!("api.test:{}", origin.port);
        let base = if alpn == "h2" { format!("https://{to}") } else { String::new() };
        let headers = [("te", "trailers"), ("host", to.as_str())];
        let stream = world.tls(&to, "api.test", &[alpn]).await.unwrap();
        let (events, trailers) = if alpn == "h2" {
            let mut client = client2(stream).await;
            let events = client.send_request(get(&format!("{base}/sse"), &[])).await.unwrap();
            (events, client.send_request(get(&format!("{base}/trailers"), &headers[..1])).await.unwrap())
        } else {
            let events = client1(stream).await.send_request(get("/sse", &headers)).await.unwrap();
            let mut other = client1(world.tls(&to, "api.test", &[alpn]).await.unwrap()).await;
            (events, other.send_request(get("/trailers", &headers)).await.unwrap())
        };
        let mut events = events.into_body();
        for n in 0..3 {
            origin.next_event.notify_one();
            let frame = soon(events.frame()).await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), format!("data: {n}\n\n"));
        }
        let collected = soon(trailers.into_body().collect()).await.unwrap();
        assert_eq!(collected.trailers().unwrap()["grpc-status"], "0", "{alpn}");
    }
}

#[tokio::test]
async fn websockets_pass_and_other_forms_of_http_dont() {
    let world = world(policy());
    let origin = origin(Some(world.server_config(&["http/1.1"]))).await;
    let to = format!("api.test:{}", origin.port);
    let mut stream = world.tls(&to, "api.test", &["http/1.1"]).await.unwrap();
    let head = "GET /ws HTTP/1.1\r\nhost: api.test\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let head = read_head(&mut stream).await.to_lowercase();
    assert!(
        head.starts_with("http/1.1 101") && head.contains("upgrade: websocket") && head.contains("sec-websocket-accept: x"),
        "{head}"
    );
    stream.write_all(b"ping").await.unwrap();
    let mut back = [0; 4];
    stream.read_exact(&mut back).await.unwrap();
    assert_eq!(&back, b"ping");
    // A change that denies what it began with cuts it.
    world.set_policy(json!({ "rules": [{ "allow": "api.test", "path": "/v1/" }, { "deny": "api.test" }] }));
    let _ = soon(stream.read_to_end(&mut Vec::new())).await;

    world.set_policy(policy());
    let mut client = client1(world.tls(&to, "api.test", &[]).await.unwrap()).await;
    let headers = [("host", "api.test"), ("connection", "upgrade, http2-settings"), ("upgrade", "h2c"), ("http2-settings", "x")];
    let (status, _, body) = read(client.send_request(get("/v1/", &headers)).await.unwrap()).await;
    assert_eq!(status, 200);
    assert!(!body.contains("upgrade") && !body.contains("http2-settings"), "{body}");
}

#[tokio::test]
async fn a_change_of_policy_cuts_a_request_under_way() {
    let world = world(policy());
    let origin = origin(Some(world.server_config(&["http/1.1"]))).await;
    let to = format!("api.test:{}", origin.port);
    let mut client = client1(world.tls(&to, "api.test", &[]).await.unwrap()).await;
    let mut body = client.send_request(get("/endless", &[("host", "api.test")])).await.unwrap().into_body();
    soon(body.frame()).await.unwrap().unwrap();
    world.set_policy(json!({ "rules": [{ "allow": "api.test", "path": "/v1/" }, { "deny": "api.test" }] }));
    let end = soon(async {
        loop {
            match body.frame().await {
                Some(Ok(_)) => {}
                other => break other,
            }
        }
    });
    assert!(matches!(end.await, Some(Err(_))), "a body that was cut must not look whole");
}

#[tokio::test]
async fn an_upstream_that_ended_is_connected_again() {
    let world = world(policy());
    let origin = origin(Some(world.server_config(&["http/1.1"]))).await;
    let to = format!("api.test:{}", origin.port);
    let mut client = client1(world.tls(&to, "api.test", &[]).await.unwrap()).await;
    for round in 1..=3 {
        let (status, _, body) = read(client.send_request(get("/close", &[("host", "api.test")])).await.unwrap()).await;
        assert_eq!((status, body.as_str(), origin.accepted.load(SeqCst)), (200, "closing", round));
    }
}

#[tokio::test]
async fn a_connection_that_ended_unseen_loses_no_harmless_request() {
    let world = world(policy());
    let (listener, port) = listen().await;
    let to = format!("api.test:{port}");
    let mut client = client1(world.tunnel(&to).await).await;
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    let server = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_head(&mut stream).await;
        stream.write_all(answer).await.unwrap();
        // The next request is read, and the connection ends without an answer.
        read_head(&mut stream).await;
        drop(stream);
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await;
        stream.write_all(answer).await.unwrap();
        // One that may do harm is not sent again.
        read_head(&mut stream).await;
        head
    };
    let requests = async {
        let mut all = Vec::new();
        for method in ["GET", "GET", "POST"] {
            let response = client.send_request(ask(method, "/v1/", &[("host", "api.test")], "")).await.unwrap();
            all.push(read(response).await.0);
        }
        all
    };
    let (head, statuses) = soon(async { tokio::join!(server, requests) }).await;
    assert_eq!(statuses, [200, 200, 502]);
    assert!(head.contains(BEARER), "{head}");
}

#[tokio::test]
async fn a_client_that_goes_away_takes_its_request_along() {
    let world = world(policy());
    for tunnel in [true, false] {
        let (listener, port) = listen().await;
        let to = format!("api.test:{port}");
        let mut inside = if tunnel { world.tunnel(&to).await } else { world.proxy() };
        let whole = if tunnel { String::new() } else { format!("http://{to}") };
        inside.write_all(format!("GET {whole}/v1/ HTTP/1.1\r\nhost: {to}\r\n\r\n").as_bytes()).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        assert!(read_head(&mut stream).await.contains(BEARER));
        assert!(world.egress.open().iter().any(|open| open.to == to && open.awaits_answer_for.is_some()));
        drop(inside);
        assert!(matches!(soon(stream.read(&mut [0])).await, Ok(0) | Err(_)));
    }
}

#[tokio::test]
async fn a_hello_in_pieces_is_read() {
    let world = world(policy());
    let origin = origin(Some(world.server_config(&["http/1.1"]))).await;
    let tunnel = world.tunnel(&format!("api.test:{}", origin.port)).await;
    let (client, wire) = tokio::io::duplex(16 * 1024);
    tokio::spawn(async move {
        // One byte at a time, each waiting until the edge had the one before.
        let (mut from, mut to) = tokio::io::split(wire);
        let (mut back, mut out) = tokio::io::split(tunnel);
        let returning = tokio::io::copy(&mut back, &mut to);
        let going = async {
            while let Ok(byte) = from.read_u8().await {
                out.write_u8(byte).await.unwrap();
                out.flush().await.unwrap();
                tokio::task::yield_now().await;
            }
        };
        let _ = tokio::join!(returning, going);
    });
    let name = rustls::pki_types::ServerName::try_from("api.test").unwrap();
    let stream = soon(connector(&[]).connect(name, client)).await.unwrap();
    let (status, _, _) = read(client1(stream).await.send_request(get("/v1/", &[])).await.unwrap()).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn tls_for_another_name_is_refused_with_a_sentence() {
    let world = world(policy());
    let origin = origin(Some(world.server_config(&["http/1.1"]))).await;
    let to = format!("api.test:{}", origin.port);
    let mut client = client1(world.tls(&to, "other.test", &["http/1.1"]).await.unwrap()).await;
    let (status, reason, _) = read(client.send_request(get("/v1/", &[("host", "api.test")])).await.unwrap()).await;
    assert_eq!((status, origin.count()), (403, 0));
    assert!(reason.contains("other.test"), "{reason}");
    assert_eq!(world.seen.denied.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn an_upstream_that_is_not_trusted_is_refused_with_a_sentence() {
    let world = world(policy());
    let key = rcgen::KeyPair::generate().unwrap();
    let own = rcgen::CertificateParams::new(vec!["api.test".into()]).unwrap().self_signed(&key).unwrap();
    let untrusted = origin(Some(server_config(own, &key, &["h2", "http/1.1"]))).await;
    let plain = origin(None).await;
    for port in [untrusted.port, plain.port] {
        let to = format!("api.test:{port}");
        let mut client = client1(world.tls(&to, "api.test", &["http/1.1"]).await.unwrap()).await;
        let (status, _, body) = read(client.send_request(get("/v1/", &[("host", "api.test")])).await.unwrap()).await;
        assert_eq!(status, 502);
        assert!(body.contains("TLS handshake failed") && !body.contains(SECRET), "{body}");
        let mut client = client2(world.tls(&to, "api.test", &["h2"]).await.unwrap()).await;
        let (status, _, _) = read(client.send_request(get(&format!("https://{to}/v1/"), &[])).await.unwrap()).await;
        assert_eq!(status, 502);
    }
    assert_eq!(untrusted.count() + plain.count(), 0);
}

#[tokio::test]
async fn what_is_no_http_is_closed_and_told() {
    let world = world(policy());
    let (_listener, port) = listen().await;
    for bytes in [
        &b"SSH-2.0-OpenSSH_9.2\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00\x01\x02",
        b"EHLO x\r\n",
        b"\x16\x03\x01\x00\x05\xff\x00\x00\x01\x00",
        b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    ] {
        let mut stream = world.dial("api.test", port);
        stream.write_all(bytes).await.unwrap();
        let _ = soon(stream.read_to_end(&mut Vec::new())).await;
    }
    let reasons = world.seen.reasons();
    assert!(reasons.len() == 1 && reasons[0].contains("no HTTP"), "one destination is told once: {reasons:?}");
    // Nothing that isn't offered is chosen.
    let error: io::Error = world.tls(&format!("api.test:{port}"), "api.test", &["acme-tls/1"]).await.unwrap_err();
    assert!(!error.to_string().is_empty());
}

#[tokio::test]
async fn large_bodies_pass_both_ways() {
    for alpn in ["http/1.1", "h2"] {
        let world = world(json!({ "rules": [{ "allow": "api.test", "methods": ["POST"] }] }));
        let origin = origin(Some(world.server_config(&[alpn]))).await;
        let to = format!("api.test:{}", origin.port);
        let stream = world.tls(&to, "api.test", &[alpn]).await.unwrap();
        let body: &'static str = Box::leak("0123456789abcdef".repeat(300_000).into_boxed_str());
        let response = if alpn == "h2" {
            client2(stream).await.send_request(ask("POST", &format!("https://{to}/stream"), &[], body)).await
        } else {
            client1(stream).await.send_request(ask("POST", "/stream", &[("host", &to)], body)).await
        };
        let (status, _, back) = soon(read(response.unwrap())).await;
        assert!(status == 200 && back == body, "{status}, {} bytes", back.len());
    }
}
