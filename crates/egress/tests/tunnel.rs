//! Streams, proxies and refusals, over real sockets on loopback.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod common;

use common::*;
use egress::{Ask, Credentials, Egress, Grant, Settings};
use serde_json::json;
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, atomic::Ordering::SeqCst},
    time::Duration,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

async fn ping(stream: &mut (impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin)) {
    stream.write_all(b"ping").await.unwrap();
    let mut back = [0; 4];
    stream.read_exact(&mut back).await.unwrap();
    assert_eq!(&back, b"ping");
}

async fn socks(world: &World, request: &[u8]) -> (u8, tokio::io::DuplexStream) {
    let mut stream = world.proxy();
    stream.write_all(&[5, 1, 0]).await.unwrap();
    let mut method = [0; 2];
    stream.read_exact(&mut method).await.unwrap();
    assert_eq!(method, [5, 0]);
    stream.write_all(request).await.unwrap();
    let mut reply = [0; 10];
    stream.read_exact(&mut reply).await.unwrap();
    (reply[1], stream)
}

fn socks_name(name: &str, port: u16) -> Vec<u8> {
    [&[5, 1, 0, 3, name.len() as u8], name.as_bytes(), &port.to_be_bytes()].concat()
}

#[tokio::test]
async fn connect_socks_and_raw_streams_carry_bytes() {
    let world = world(json!({}));
    let port = echo().await;
    ping(&mut world.tunnel(&format!("a.test:{port}")).await).await;
    ping(&mut world.tunnel(&format!("127.0.0.1:{port}")).await).await;
    ping(&mut world.dial("a.test", port)).await;
    let (code, mut stream) = socks(&world, &socks_name("a.test", port)).await;
    assert_eq!(code, 0);
    ping(&mut stream).await;
    let (code, mut stream) = socks(&world, &[&[5, 1, 0, 1, 127, 0, 0, 1][..], &port.to_be_bytes()].concat()).await;
    assert_eq!(code, 0);
    ping(&mut stream).await;
    let mapped = "::ffff:127.0.0.1".parse::<std::net::Ipv6Addr>().unwrap().octets();
    let (code, mut stream) = socks(&world, &[&[5, 1, 0, 4][..], &mapped, &port.to_be_bytes()].concat()).await;
    assert_eq!(code, 0);
    ping(&mut stream).await;

    let open = world.egress.open();
    assert!(open.iter().any(|open| open.to == format!("a.test:{port}") && open.sent_bytes >= 4), "{open:?}");
    let traffic = world.egress.take_traffic();
    let named = traffic.iter().find(|traffic| traffic.host == "a.test").unwrap();
    assert_eq!((named.connections, named.sent_bytes, named.received_bytes), (3, 12, 12));
    assert!(world.egress.take_traffic().is_empty());
    assert!(world.seen.traffic.load(SeqCst) > 0);
}

#[tokio::test]
async fn socks_takes_a_user_and_password() {
    let world = world(json!({}));
    let port = echo().await;
    let mut stream = world.proxy();
    stream.write_all(&[5, 1, 2, 1, 1, b'u', 1, b'p']).await.unwrap();
    stream.write_all(&socks_name("a.test", port)).await.unwrap();
    let mut answers = [0; 14];
    stream.read_exact(&mut answers).await.unwrap();
    assert_eq!(answers[..6], [5, 2, 1, 0, 5, 0]);
    ping(&mut stream).await;
}

#[tokio::test]
async fn requests_with_a_whole_address_are_judged_one_by_one() {
    let world = world(json!({ "rules": [{ "deny": "b.test" }, { "allow": "a.test", "methods": ["GET"] }, { "deny": "a.test" }],
        "log_requests": true }));
    let origin = origin(None).await;
    let mut client = client1(world.proxy()).await;
    let url = |host: &str, path: &str| format!("http://{host}:{}{path}", origin.port);
    let (status, _, body) = read(
        client
            .send_request(get(
                &url("a.test", "/x?q=secret"),
                &[
                    ("host", "evil.test"),
                    ("proxy-connection", "keep-alive"),
                    ("proxy-authorization", "Basic x"),
                    ("connection", "x-own"),
                    ("x-own", "1"),
                    ("X-Kept", "2"),
                ],
            ))
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(status, 200);
    assert!(body.starts_with("GET /x?q=secret HTTP/1.1\n"), "{body}");
    assert!(body.contains(&format!("host: a.test:{}\n", origin.port)) && body.contains("x-kept: 2"), "{body}");
    for gone in ["proxy-", "connection", "x-own", "evil"] {
        assert!(!body.contains(gone), "{body}");
    }
    let (status, reason, body) = read(client.send_request(get(&url("b.test", "/"), &[])).await.unwrap()).await;
    assert_eq!((status, reason.contains("b.test")), (403, true));
    assert!(body.contains(&format!("b.test:{}", origin.port)) && body.ends_with(".\n"), "{body}");
    let (status, _, _) = read(client.send_request(ask("POST", &url("a.test", "/echo"), &[], "no")).await.unwrap()).await;
    assert_eq!(status, 403);
    let (status, _, _) = read(client.send_request(get(&url("a.test", "/"), &[])).await.unwrap()).await;
    assert_eq!((status, origin.count()), (200, 2));
    // An upstream that ends its connection is connected again.
    for _ in 0..3 {
        let (status, _, body) = read(client.send_request(get(&url("a.test", "/close"), &[])).await.unwrap()).await;
        assert_eq!((status, body.as_str()), (200, "closing"));
    }
    assert_eq!(world.seen.denied.lock().unwrap().len(), 2);
    soon(world.seen.until(|seen| seen.requests.lock().unwrap().len() == 7)).await;
    let lines = world.seen.requests.lock().unwrap();
    assert_eq!((lines[0].path.as_str(), lines[0].host.as_str(), lines[0].status), ("/x", "a.test", 200));
    assert!(lines[0].received_bytes > 0 && lines.iter().any(|line| line.status == 403 && line.method == "POST"));
}

#[tokio::test]
async fn bodies_stream_and_old_clients_work() {
    let world = world(json!({}));
    let origin = origin(None).await;
    let answer = world.exchange(format!("GET http://a.test:{}/ HTTP/1.0\r\n\r\n", origin.port)).await;
    assert!(answer.starts_with("HTTP/1.0 200") && answer.contains("GET / HTTP/1.1"), "{answer}");
    let mut client = client1(world.proxy()).await;
    let url = format!("http://a.test:{}/stream", origin.port);
    let (status, _, body) =
        read(client.send_request(ask("POST", &url, &[("expect", "100-continue")], "a body")).await.unwrap()).await;
    assert_eq!((status, body.as_str()), (200, "a body"));
    let mut upgraded = world.proxy();
    let head = format!("GET http://a.test:{}/ws HTTP/1.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n", origin.port);
    upgraded.write_all(head.as_bytes()).await.unwrap();
    let head = read_head(&mut upgraded).await;
    assert!(head.starts_with("HTTP/1.1 101") && head.contains("sec-websocket-accept: x"), "{head}");
    ping(&mut upgraded).await;
}

#[tokio::test]
async fn denials_have_the_form_of_their_protocol() {
    let world = world(json!({ "default": "deny", "rules": [] }));
    let answer = world.exchange("CONNECT a.test:443 HTTP/1.1\r\nconnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("x-dormouse-denied: no rule allows it"), "{answer}");
    assert!(answer.contains("the connection to a.test:443 is denied"), "{answer}");
    let answer = world.exchange("GET http://a.test/ HTTP/1.1\r\nconnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("a.test:80"), "{answer}");
    assert_eq!(socks(&world, &socks_name("a.test", 443)).await.0, 2);
    assert_eq!(world.dial("a.test", 443).read(&mut [0]).await.unwrap(), 0);
    assert!(world.names.asked.lock().unwrap().is_empty(), "a denied name was given to a resolver");
    let denied = world.seen.denied.lock().unwrap();
    assert_eq!(denied.iter().map(|denied| denied.port).collect::<Vec<_>>(), [443, 80], "each destination is told once");
}

#[tokio::test]
async fn upstream_failures_have_the_form_of_their_protocol() {
    let world = world(json!({}));
    let closed = listen().await.1;
    let answer = world.exchange(format!("CONNECT a.test:{closed} HTTP/1.1\r\nconnection: close\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 502") && answer.contains("refused"), "{answer}");
    assert_eq!(socks(&world, &socks_name("a.test", closed)).await.0, 5);
    assert_eq!(socks(&world, &socks_name("unknown.test", 80)).await.0, 4);
    let answer = world.exchange("GET http://unknown.test/ HTTP/1.1\r\nconnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 502") && answer.contains("no such name"), "{answer}");
    assert!(!answer.contains("x-dormouse-denied"));
    assert!(world.seen.denied.lock().unwrap().is_empty());
    // A server that speaks no HTTP.
    let (listener, port) = listen().await;
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"SSH-2.0-x\r\n").await.unwrap();
        let _ = stream.read(&mut [0; 1000]).await;
    });
    let answer = world.exchange(format!("GET http://a.test:{port}/ HTTP/1.1\r\nconnection: close\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
}

#[tokio::test]
async fn an_upstream_that_never_answers_is_given_up() {
    let world = world_with(|settings| settings.connect_timeout = Duration::from_millis(200));
    world.set_policy(json!({}));
    world.egress.set_credentials(credentials());
    let (address, mut held, socket) = deaf().await;
    let _listener = socket.listen(1).unwrap();
    // Its queue takes a few; the next stays without an answer.
    while let Ok(Ok(stream)) = tokio::time::timeout(Duration::from_millis(300), tokio::net::TcpStream::connect(address)).await {
        held.push(stream);
    }
    let port = address.port();
    let answer = soon(world.exchange(format!("CONNECT a.test:{port} HTTP/1.1\r\nconnection: close\r\n\r\n"))).await;
    assert!(answer.starts_with("HTTP/1.1 504"), "{answer}");
    assert_eq!(soon(socks(&world, &socks_name("a.test", port))).await.0, 6);
}

#[tokio::test]
async fn odd_spellings_are_neither_name_nor_address() {
    let world = world(json!({}));
    let port = echo().await;
    for host in [
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0x7f.0.0.1",
        "127.0.0.1.",
        "[::ffff:127.0.0.1%25lo]",
        &"a".repeat(300),
    ] {
        let answer = world.exchange(format!("CONNECT {host}:{port} HTTP/1.1\r\nconnection: close\r\n\r\n")).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{host}: {answer}");
        if host.len() < 256 {
            assert_eq!(socks(&world, &socks_name(host, port)).await.0, 1, "{host}");
            assert_eq!(world.dial(host, port).read(&mut [0]).await.unwrap(), 0, "{host}");
        }
    }
    assert!(world.names.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn private_addresses_are_denied_in_every_form() {
    let world = world_without_policy();
    world.egress.set_policy(Grant::default());
    let port = echo().await;
    world.names.set("inner.test", &[&["10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "169.254.169.254"]]);
    for host in [
        "127.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "169.254.169.254",
        "inner.test",
        "localhost",
        "x.localhost",
        "a.test",
        "host.dormouse.internal",
    ] {
        let answer = world.exchange(format!("CONNECT {host}:{port} HTTP/1.1\r\nconnection: close\r\n\r\n")).await;
        assert!(answer.starts_with("HTTP/1.1 403"), "{host}: {answer}");
    }
}

#[tokio::test]
async fn the_hosts_loopback_has_a_name_of_its_own() {
    let world = world_without_policy();
    let port = echo().await;
    let policy =
        serde_json::from_value(json!({ "default": "deny", "rules": [{ "allow": "host.dormouse.internal", "ports": [port] }] }));
    world.egress.set_policy(Grant { policy: policy.unwrap(), closed: Vec::new() });
    ping(&mut world.tunnel(&format!("host.dormouse.internal:{port}")).await).await;
    assert!(world.names.asked.lock().unwrap().is_empty());
    assert_eq!(world.egress.lookup("host.dormouse.internal"), Some(vec![port]));
}

#[tokio::test]
async fn the_servers_listeners_are_closed_whatever_the_rules_say() {
    let world = world_without_policy();
    let port = echo().await;
    let policy = json!({ "rules": [{ "allow": "127.0.0.0/8" }, { "allow": "host.dormouse.internal" }] });
    for closed in ["127.0.0.1", "0.0.0.0", "[::]"] {
        let closed: SocketAddr = format!("{closed}:{port}").parse().unwrap();
        world.egress.set_policy(Grant { policy: serde_json::from_value(policy.clone()).unwrap(), closed: vec![closed] });
        for host in ["127.0.0.1", "a.test", "host.dormouse.internal"] {
            let answer = world.exchange(format!("GET http://{host}:{port}/ HTTP/1.1\r\nconnection: close\r\n\r\n")).await;
            // The host's own name leads to ::1, too, where nothing listens here.
            let other = host == "host.dormouse.internal" && closed.ip().is_ipv4() && !closed.ip().is_unspecified();
            let expected = if other { "refused" } else { "Dormouse itself" };
            assert!(answer.starts_with("HTTP/1.1 403") != other && answer.contains(expected), "{host} {closed}: {answer}");
        }
    }
}

#[tokio::test]
async fn what_was_checked_is_what_is_connected_to() {
    let world = world_without_policy();
    let port = echo().await;
    let policy = json!({ "default": "deny", "rules": [{ "allow": "turn.test" }, { "allow": "127.0.0.1/32" }] });
    world.egress.set_policy(Grant { policy: serde_json::from_value(policy).unwrap(), closed: Vec::new() });
    // A second resolution would give an address that is denied.
    world.names.set("turn.test", &[&["10.0.0.1", "127.0.0.1"], &["10.0.0.1"]]);
    ping(&mut world.dial("turn.test", port)).await;
    assert_eq!(world.names.asked.lock().unwrap().len(), 1);
    assert_eq!(world.dial("turn.test", port).read(&mut [0]).await.unwrap(), 0);
    assert!(world.seen.reasons()[0].contains("10.0.0.1"), "{:?}", world.seen.reasons());
}

#[tokio::test]
async fn each_direction_ends_by_itself() {
    let world = world(json!({}));
    let (listener, port) = listen().await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        stream.write_all(&all).await.unwrap();
        stream.shutdown().await.unwrap();
    });
    let mut stream = world.tunnel(&format!("a.test:{port}")).await;
    stream.write_all(b"all of it").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut back = String::new();
    soon(stream.read_to_string(&mut back)).await.unwrap();
    assert_eq!(back, "all of it");
    server.await.unwrap();

    // The other way round: the server ends first, and still gets what comes.
    let (listener, port) = listen().await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"bye").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).await.unwrap();
        all
    });
    let mut stream = world.dial("a.test", port);
    let mut back = String::new();
    soon(stream.read_to_string(&mut back)).await.unwrap();
    stream.write_all(b"late").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!((back.as_str(), soon(server).await.unwrap().as_str()), ("bye", "late"));
}

#[tokio::test]
async fn a_reset_passes_to_the_other_side() {
    let world = world(json!({}));
    let (listener, port) = listen().await;
    let mut inside = world.dial("a.test", port);
    let (mut stream, _) = listener.accept().await.unwrap();
    // Upstream resets: the inside ends.
    stream.set_zero_linger().unwrap();
    inside.write_all(b"x").await.unwrap();
    stream.read_exact(&mut [0]).await.unwrap();
    drop(stream);
    assert_eq!(soon(inside.read(&mut [0])).await.unwrap(), 0);
    // The inside is gone without an end: upstream is reset.
    let inside = world.dial("a.test", port);
    let (mut stream, _) = listener.accept().await.unwrap();
    drop(inside);
    let mut taken = 0;
    let error = loop {
        if let Err(error) = stream.write_all(&vec![0; 65536]).await {
            break error;
        }
        taken += 65536;
        assert!(taken < 1 << 30);
    };
    assert!(matches!(error.kind(), std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe), "{error}");
}

#[tokio::test]
async fn a_change_of_policy_cuts_what_is_denied_now() {
    let world = world(json!({}));
    let origin = origin(None).await;
    let (kept, cut) = (format!("a.test:{}", origin.port), format!("b.test:{}", origin.port));
    let mut downloads = Vec::new();
    for to in [&kept, &cut] {
        let mut stream = world.tunnel(to).await;
        stream.write_all(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        stream.read_exact(&mut vec![0; 100_000]).await.unwrap();
        downloads.push(stream);
    }
    // The same as requests to a proxy.
    let mut plain = world.proxy();
    plain.write_all(format!("GET http://{cut}/endless HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    plain.read_exact(&mut vec![0; 100_000]).await.unwrap();
    downloads.push(plain);

    world.set_policy(json!({ "rules": [{ "deny": "b.test" }] }));
    for stream in &mut downloads[1..] {
        soon(stream.read_to_end(&mut Vec::new())).await.unwrap();
    }
    downloads[0].read_exact(&mut vec![0; 1_000_000]).await.unwrap();
    // Rules that read requests can't judge a stream that is under way.
    world.set_policy(json!({ "rules": [{ "allow": "a.test", "methods": ["GET"] }] }));
    soon(downloads[0].read_to_end(&mut Vec::new())).await.unwrap();

    let mut last = world.tunnel(&format!("127.0.0.1:{}", origin.port)).await;
    world.egress.close_all();
    assert_eq!(soon(last.read(&mut [0])).await.unwrap(), 0);
}

#[tokio::test]
async fn nothing_is_connected_before_the_policy_is_known() {
    let world = world_without_policy();
    let port = echo().await;
    assert_eq!(world.egress.lookup("a.test"), None);
    let mut waiting = world.dial("a.test", port);
    waiting.write_all(b"ping").await.unwrap();
    tokio::task::yield_now().await;
    assert!(world.names.asked.lock().unwrap().is_empty());
    world.set_policy(json!({}));
    let mut back = [0; 4];
    soon(waiting.read_exact(&mut back)).await.unwrap();
    tokio::time::pause();
    let silent = world_without_policy();
    let answer = silent.exchange("CONNECT a.test:443 HTTP/1.1\r\nconnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
}

#[tokio::test]
async fn the_destination_is_told_once() {
    let world = world(json!({}));
    let port = echo().await;
    let (mut inside, edge) = duplex(1024);
    let told: Arc<Mutex<Vec<String>>> = Arc::default();
    let (egress, telling) = (world.egress.clone(), told.clone());
    let served = tokio::spawn(async move {
        egress.serve(edge, Ask::Proxy, move |to| telling.lock().unwrap().push(to.into())).await;
    });
    inside.write_all(format!("CONNECT A.test.:{port} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    read_head(&mut inside).await;
    ping(&mut inside).await;
    let open = world.egress.open();
    assert_eq!(open[0].awaits_answer_for, None);
    drop(inside);
    soon(served).await.unwrap();
    assert_eq!(*told.lock().unwrap(), [format!("a.test:{port}")]);
    assert!(world.egress.open().is_empty());
}

#[tokio::test]
async fn an_open_request_is_told_as_such() {
    let world = world(json!({}));
    let (listener, port) = listen().await;
    let mut inside = world.dial("a.test", port);
    let (mut stream, _) = listener.accept().await.unwrap();
    inside.write_all(b"ask").await.unwrap();
    stream.read_exact(&mut [0; 3]).await.unwrap();
    assert!(world.egress.open()[0].awaits_answer_for.is_some());
    stream.write_all(b"answer").await.unwrap();
    inside.read_exact(&mut [0; 6]).await.unwrap();
    assert_eq!(world.egress.open()[0].awaits_answer_for, None);
}

#[tokio::test]
async fn bad_input_is_refused_and_harms_nothing() {
    let world = world(json!({}));
    for (line, status) in [
        ("CONNECT a.test:0 HTTP/1.1", "400"),
        ("CONNECT a.test:99999 HTTP/1.1", "400"),
        ("CONNECT a.test HTTP/1.1", "400"),
        ("CONNECT / HTTP/1.1", "400"),
        ("CONNECT user@a.test:80 HTTP/1.1", "400"),
        ("GET / HTTP/1.1", "400"),
        ("GET https://a.test/ HTTP/1.1", "400"),
        ("GET ftp://a.test/ HTTP/1.1", "400"),
        ("GET http://:80/ HTTP/1.1", "400"),
        ("GET http://a.test:99999/ HTTP/1.1", "400"),
        ("nonsense", "400"),
        ("GET http://a.test/ HTTP/9.9", "400"),
    ] {
        let answer = soon(world.exchange(format!("{line}\r\nconnection: close\r\n\r\n"))).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{line}: {answer}");
    }
    let header = format!("GET http://a.test/ HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(1 << 20));
    assert!(soon(world.exchange(header)).await.starts_with("HTTP/1.1 431"));
    let garbage: Vec<u8> = (0..100_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for first in [0u8, 4, 5, 0x16, b'G', 0xff] {
        soon(world.exchange([&[first][..], &garbage].concat())).await;
    }
    for bytes in [&[5][..], &[5, 0], &[5, 1, 9], &[5, 1, 0, 4, 1, 0, 1], &[5, 1, 0, 5, 1, 0, 3, 0, 0, 80], &[5, 1, 0, 5, 1, 0, 9]]
    {
        let mut stream = world.proxy();
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        soon(stream.read_to_end(&mut Vec::new())).await.unwrap();
    }
    assert_eq!(socks(&world, &[5, 2, 0, 1, 1, 1, 1, 1, 0, 80]).await.0, 7, "BIND is not served");
    assert_eq!(socks(&world, &socks_name("a.test", 0)).await.0, 1);
    let port = echo().await;
    ping(&mut world.dial("a.test", port)).await;
}

#[tokio::test]
async fn a_client_that_is_slow_with_its_head_is_given_up() {
    let world = world(json!({}));
    for begun in [&b""[..], b"GET http://a.test/ HTTP/1.1\r\nx: ", &[5, 1], &[5, 1, 0, 5, 1]] {
        let mut stream = world.proxy();
        stream.write_all(begun).await.unwrap();
        tokio::task::yield_now().await;
        // The clock moves only while everything waits.
        tokio::time::pause();
        let _ = stream.read_to_end(&mut Vec::new()).await;
        tokio::time::resume();
    }
}

#[tokio::test]
async fn too_many_connections_are_closed() {
    let world = world_with(|settings| settings.max_connections = 2);
    world.set_policy(json!({}));
    let port = echo().await;
    let mut first = world.tunnel(&format!("a.test:{port}")).await;
    let mut second = world.tunnel(&format!("a.test:{port}")).await;
    assert_eq!(world.proxy().read(&mut [0]).await.unwrap(), 0);
    ping(&mut first).await;
    second.shutdown().await.unwrap();
    soon(second.read_to_end(&mut Vec::new())).await.unwrap();
}

#[tokio::test]
async fn bulk_data_arrives_whole() {
    let world = world(json!({}));
    let port = echo().await;
    let (mut read, mut write) = tokio::io::split(world.tunnel(&format!("a.test:{port}")).await);
    let data: Vec<u8> = (0..20_000_000u32).map(|n| (n ^ (n >> 8)) as u8).collect();
    let sent = data.clone();
    let writer = tokio::spawn(async move {
        write.write_all(&sent).await.unwrap();
        write.shutdown().await.unwrap();
    });
    let mut back = Vec::new();
    soon(read.read_to_end(&mut back)).await.unwrap();
    writer.await.unwrap();
    assert!(back == data);
}

#[test]
fn secrets_are_not_in_debug_output() {
    let credentials = credentials();
    let text = format!("{credentials:?}");
    assert!(text.contains("KEY") && !text.contains(SECRET) && !text.contains("7, 7"), "{text}");
    let observer = Arc::new(Seen::default());
    let egress = Egress::new(Settings::default(), observer);
    egress.set_credentials(Credentials::default());
    assert!(format!("{egress:?}").contains("Egress"));
}
