//! The way in: listeners inside are listed, and reached by path, by preview host and by a raw connection.

use dormouse_tests::{Options, Server, Session, eventually};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Stdio},
};

/// A page inside, with what it was asked in its answer: `tests/net/upstream.py`, on a port of its own.
fn serving(server: &Server) -> (Session, u16) {
    let session = server.session();
    session.write_file("/root/upstream.py", include_bytes!("../net/upstream.py")).expect(204);
    session.out("mkdir -p /root/files");
    let exec = session.start_sh("sleep 100000 | python3 /root/upstream.py /root");
    let port = eventually("its port", || String::from_utf8_lossy(&session.output(&exec, "stdout")).trim().parse().ok());
    (session, port)
}

#[test]
fn listeners_are_listed_told_of_and_reached_by_path() {
    let server = Server::start();
    let (session, port) = serving(&server);
    let listed = eventually("it is listed", || {
        let ports = session.client.get(&session.path("/ports")).expect(200).json();
        ports["items"].as_array()?.iter().find(|item| item["port"] == port).cloned()
    });
    assert!(listed["program"].as_str().is_some_and(|name| name.contains("python")), "{listed}");
    let event = eventually("it is told", || session.events().into_iter().find(|event| event["type"] == "port.opened"));
    assert_eq!(event["data"]["port"], port);
    let told = server.cli(&["port", &session.id]).output().unwrap();
    assert!(String::from_utf8_lossy(&told.stdout).contains(&port.to_string()), "{told:?}");
    let path = |rest: &str| session.path(&format!("/ports/{port}{rest}"));
    let hello = session.client.get(&path("/hello")).expect(200);
    assert_eq!(hello.text(), "hello from outside\n");
    assert_eq!(hello.header("content-security-policy"), Some("sandbox"));
    assert_eq!(hello.header("x-content-type-options"), Some("nosniff"));
    let echo = session.client.post(&path("/echo?a=b%2Fc"), &json!({ "x": 1 })).expect(200).json();
    assert_eq!((echo["method"].as_str(), echo["path"].as_str()), (Some("POST"), Some("/echo?a=b%2Fc")));
    assert_eq!(echo["body"], "{\"x\":1}");
    assert!(echo["headers"]["authorization"].is_null(), "our token goes no further: {echo}");
    // Streams, large and small.
    assert_eq!(session.client.get(&path("/bytes/3000000")).expect(200).body.len(), 3_000_000);
    let mut events = BufReader::new(session.client.stream(&path("/events"), "text/event-stream").unwrap()).lines();
    assert_eq!(events.next().unwrap().unwrap(), "id: 0");
    session.client.get(&path("/release")).expect(200);
    assert!(events.map(Result::unwrap).any(|line| line == "data: event 2"));
    // Nobody listens there; nobody may who has no token; no such port.
    let closed = session.client.get(&session.path("/ports/9/"));
    assert!(closed.status == 502 && closed.text().contains('9'), "{} {}", closed.status, closed.text());
    assert_eq!(server.client.with_token("wrong").get(&path("/hello")).status, 401);
    for bad in ["0", "99999", "x"] {
        assert!(matches!(session.client.get(&session.path(&format!("/ports/{bad}/"))).status, 400 | 404), "{bad}");
    }
    server.delete_all_and_check();
}

#[test]
fn a_request_wakes_a_session_and_connections_of_the_generation_before_are_not_used_again() {
    let server = Server::start();
    let (session, port) = serving(&server);
    for _ in 0..2 {
        assert_eq!(session.client.get(&session.path(&format!("/ports/{port}/hello"))).expect(200).text(), "hello from outside\n");
        session.hibernate();
        session.client.get(&session.path("/ports")).expect(200);
        assert_eq!(session.state(), "hibernated", "looking wakes nobody");
    }
    assert_eq!(session.client.get(&session.path(&format!("/ports/{port}/hello"))).expect(200).text(), "hello from outside\n");
    assert_eq!(session.state(), "running");
    session.call("stop").expect(200);
    let stopped = session.client.get(&session.path(&format!("/ports/{port}/hello")));
    assert_eq!((stopped.status, stopped.problem().as_str()), (422, "not_running"));
    server.delete_all_and_check();
}

/// A request to a preview host, by hand: its name leads nowhere here.
fn preview(server: &Server, host: &str, path: &str, headers: &str) -> String {
    let address = server.client.base.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn previews_are_pages_of_their_own_public_by_token_or_by_a_signed_link() {
    let server = Server::start();
    let (session, port) = serving(&server);
    let host = format!("{port}-{}.localhost", session.id);
    let get = |path: &str, headers: &str| preview(&server, &host, path, headers);
    let body = |answer: &str| serde_json::from_str::<Value>(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert!(get("/hello", "").starts_with("HTTP/1.1 401"));
    assert!(get("/hello", "Authorization: Bearer nobody\r\n").starts_with("HTTP/1.1 401"));
    let by_token = get("/echo", &format!("Authorization: Bearer {}\r\nCookie: theirs=1\r\n", server.client.token));
    assert!(by_token.starts_with("HTTP/1.1 200") && !by_token.to_lowercase().contains("content-security-policy"), "{by_token}");
    let told = body(&by_token);
    assert!(told["headers"]["authorization"].is_null() && told["headers"]["cookie"] == "theirs=1", "{told}");
    assert_eq!(told["headers"]["host"], host.as_str());
    // A signed link becomes a cookie of that host, which its pages never see.
    let link = session.client.post(&session.path(&format!("/links/{port}")), &json!({ "seconds": 600 })).expect(201).json();
    let url = link["url"].as_str().unwrap();
    assert!(url.contains(&host) && link["expires_at"].is_string(), "{link}");
    let query = url.split_once(&host).unwrap().1.split_once('/').unwrap().1;
    let redirect = get(&format!("/{query}"), "");
    assert!(redirect.starts_with("HTTP/1.1 30"), "{redirect}");
    let cookie =
        redirect.lines().find_map(|line| line.strip_prefix("set-cookie: ").or(line.strip_prefix("Set-Cookie: "))).unwrap();
    assert!(cookie.contains("HttpOnly") && !cookie.contains("Domain"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap();
    let seen = body(&get("/echo", &format!("Cookie: {cookie}; theirs=1\r\nAuthorization: Basic app\r\n")));
    assert_eq!(seen["headers"]["cookie"], "theirs=1");
    assert_eq!(seen["headers"]["authorization"], "Basic app", "the page's own is its own");
    // Not for another port, not changed, not when it is over.
    let other = format!("1{}-{}.localhost", port % 1000, session.id);
    assert!(preview(&server, &other, "/", &format!("Cookie: {cookie}\r\n")).starts_with("HTTP/1.1 401"));
    assert!(get("/echo", &format!("Cookie: {cookie}x\r\n")).starts_with("HTTP/1.1 401"));
    for seconds in [json!(0), json!(-1), json!(1e12)] {
        let path = session.path(&format!("/links/{port}"));
        session.client.post(&path, &json!({ "seconds": seconds })).expect(400);
    }
    // Public, until it isn't.
    let network = |ports: Value| json!({ "network": { "public_ports": ports } });
    session.client.patch(&session.path(""), &network(json!([port]))).expect(200);
    assert!(get("/hello", "").starts_with("HTTP/1.1 200"));
    session.client.patch(&session.path(""), &network(json!([]))).expect(200);
    assert!(get("/hello", "").starts_with("HTTP/1.1 401"));
    // The interface itself isn't there.
    assert!(!get("/v1/sessions", &format!("Authorization: Bearer {}\r\n", server.client.token)).contains("\"items\""));
    server.delete_all_and_check();
}

#[test]
fn websockets_pass_by_path_and_by_preview_host() {
    let server = Server::start();
    let (session, port) = serving(&server);
    let address = server.client.base.trim_start_matches("http://").to_owned();
    let by_path = format!("ws://{address}{}", session.path(&format!("/ports/{port}/ws")));
    for (url, host) in [(by_path, address.clone()), (format!("ws://{address}/ws"), format!("{port}-{}.localhost", session.id))] {
        let stream = TcpStream::connect(&address).unwrap();
        let request = tungstenite::http::Request::get(&url)
            .header("Host", host)
            .header("Authorization", format!("Bearer {}", server.client.token))
            .header("Connection", "Upgrade")
            .header("Upgrade", "websocket")
            .header("Sec-WebSocket-Version", "13")
            .header("Sec-WebSocket-Key", tungstenite::handshake::client::generate_key())
            .body(())
            .unwrap();
        let (mut socket, _) = tungstenite::client(request, stream).unwrap();
        for text in ["one", "two"] {
            socket.send(tungstenite::Message::text(text)).unwrap();
            assert_eq!(socket.read().unwrap().to_text().unwrap(), text);
        }
    }
    server.delete_all_and_check();
}

/// `dormouse port SESSION PORT 0`, and where it listens.
fn forward(server: &Server, session: &Session, port: u16) -> (Child, u16) {
    let mut command = server.cli(&["port", &session.id, &port.to_string(), "0"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let at = line.rsplit("127.0.0.1:").next().unwrap();
    let digits: String = at.chars().take_while(char::is_ascii_digit).collect();
    (child, digits.parse().unwrap_or_else(|_| panic!("where does it listen? {line:?}")))
}

#[test]
fn a_raw_connection_is_carried_and_half_of_it_can_end() {
    let mut server = Server::with(Options::default());
    let session = server.session();
    let echo = "import socket,threading\ns=socket.create_server(('127.0.0.1',7000))\n\
        def serve(c):\n  d=b''\n  while True:\n    p=c.recv(65536)\n    if not p: break\n    d+=p\n  c.sendall(b'%d ' % len(d)+d[-5:]); c.close()\n\
        while True: threading.Thread(target=serve,args=(s.accept()[0],)).start()";
    session.write_file("/root/echo.py", echo.as_bytes()).expect(204);
    session.start_sh("exec python3 /root/echo.py");
    eventually("it listens", || session.client.get(&session.path("/ports")).expect(200).text().contains("7000").then_some(()));
    let (mut forward, local) = forward(&server, &session, 7000);
    let talk = || -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", local)).ok()?;
        stream.write_all(&vec![b'x'; 2_000_000]).ok()?;
        stream.write_all(b"hello").ok()?;
        stream.shutdown(std::net::Shutdown::Write).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer).filter(|answer| !answer.is_empty())
    };
    assert_eq!(talk().unwrap(), "2000005 hello");
    // A sleeping session is woken, and a server that comes back is found again.
    session.hibernate();
    assert_eq!(talk().unwrap(), "2000005 hello");
    server.crash();
    assert_eq!(eventually("it goes on with the next server", talk), "2000005 hello");
    forward.kill().unwrap();
    forward.wait().unwrap();
    server.delete_all_and_check();
}

#[test]
fn http_2_is_spoken_in_front() {
    let server = Server::start();
    let (session, port) = serving(&server);
    let url = format!("{}{}", server.client.base, session.path(&format!("/ports/{port}/echo")));
    let token = format!("Authorization: Bearer {}", server.client.token);
    let args = ["-sS", "--http2-prior-knowledge", "-w", "\n%{http_version}", "-H", &token, "--data-binary", "@/dev/stdin", &url];
    let body = "b".repeat(300_000);
    let mut curl = std::process::Command::new("curl").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    curl.stdin.take().unwrap().write_all(body.as_bytes()).unwrap();
    let answer = String::from_utf8(curl.wait_with_output().unwrap().stdout).unwrap();
    let (told, version) = answer.rsplit_once('\n').unwrap();
    assert_eq!(version, "2");
    assert_eq!(serde_json::from_str::<Value>(told).unwrap()["length"], 300_000);
    server.delete_all_and_check();
}
