//! The network of a session: downloads beside the sandbox's plain pipes, the cost of a connection, previews.

use crate::{
    measure::{Samples, rate, resident_mib},
    raw::Raw,
    report::{Row, figure},
};
use anyhow::{Context, Result, ensure};
use dormouse_tests::{
    Options, Server, Session, eventually,
    upstream::{Authority, Upstream},
};
use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::Instant,
};

const BYTES: usize = 128 << 20;
/// Downloads at once.
const SEVERAL: usize = 8;
/// Connections that are opened one after the other.
const OPENED: usize = 200;
/// Connections that do nothing.
const IDLE: usize = 500;

/// A web server of one answer: as many zeros as the path says, from a thread for each connection.
fn zeros() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || serve(stream));
        }
    });
    Ok(port)
}

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte)? == 0 {
            return Ok(());
        }
        head.push(byte[0]);
    }
    let path = String::from_utf8_lossy(&head);
    let mut left: usize = path.split(['/', ' ']).find_map(|part| part.parse().ok()).unwrap_or(0);
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {left}\r\nConnection: close\r\n\r\n")?;
    let piece = vec![0; 256 * 1024];
    while left > 0 {
        let count = left.min(piece.len());
        stream.write_all(&piece[..count])?;
        left -= count;
    }
    Ok(())
}

fn allowing(server: &Server, rules: &[Value]) -> Session {
    server.session_with(&json!({ "network": { "default": "deny", "rules": rules } }))
}

fn rule(port: u16) -> Value {
    json!({ "allow": "host.dormouse.internal", "ports": [port] })
}

/// One download, eight at once, and one whose TLS ends at the edge, beside bytes into a raw sandbox's standard input.
pub fn downloads() -> Result<Vec<Row>> {
    let authority = Authority::new();
    let ca = authority.certificate().to_string_lossy().into_owned();
    let server = Server::with(Options { args: vec!["--egress-ca".to_owned(), ca], ..Options::default() });
    let (plain, tls) = (zeros()?, Upstream::tls(&authority, ""));
    let mut read = rule(tls.port);
    read["methods"] = json!(["GET"]);
    let session = allowing(&server, &[rule(plain), read]);
    let mut sandbox = Raw::new("while read bytes; do head -c $bytes >/dev/null; echo done; done")?;
    sandbox.run()?;
    let url = format!("http://host.dormouse.internal:{plain}/{BYTES}");
    let (mut one, mut several, mut ended) = (Samples::default(), Samples::default(), Samples::default());
    let mut raw = Samples::default();
    for _ in 0..5 {
        one.push(timed(&session, &format!("curl -sSo /dev/null {url}"))?);
        let part = format!("http://host.dormouse.internal:{plain}/{}", BYTES / SEVERAL);
        let all = format!("for n in $(seq {SEVERAL}); do curl -sSo /dev/null {part} & done; wait");
        several.push(timed(&session, &all)?);
        let over_tls = tls.https(&format!("/bytes/{BYTES}"));
        ended.push(timed(&session, &format!("curl -sSo /dev/null {over_tls}"))?);
        let start = Instant::now();
        sandbox.send(&BYTES.to_string())?;
        sandbox.feed(BYTES)?;
        ensure!(sandbox.line()? == "done", "the raw sandbox has read it all");
        raw.push(rate(BYTES, start.elapsed()));
    }
    server.delete_all_and_check();
    let raw = raw.median();
    let row = |id, what: &str, ours: &Samples, factor| {
        Row::at_least(id, format!("{what} (128 MiB)"), ours.median(), "MB/s", 0.0)
            .times_raw(raw, factor)
            .beside(format!("standard input of a raw sandbox: {}", figure(raw, "MB/s")))
    };
    Ok(vec![
        row("egress-download", "a download through the proxy", &one, 0.5),
        row("egress-download-8", "eight downloads at once", &several, 0.5),
        row("egress-download-tls", "a download whose TLS ends at the edge", &ended, 0.3),
    ])
}

/// How fast [`BYTES`] went through, in MB/s.
fn timed(session: &Session, command: &str) -> Result<f64> {
    let start = Instant::now();
    let exec = session.sh(command);
    ensure!(exec.code == Some(0), "{command}: {}", exec.stderr);
    Ok(rate(BYTES, start.elapsed()))
}

/// Opens connections one after the other, each to its first byte; prints milliseconds, one a line.
const CONNECTS: &str = r#"
import socket, sys, time
mode, host, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
request = b"GET /1 HTTP/1.0\r\n\r\n"
for n in range(count):
    start = time.perf_counter()
    if mode == "proxy":
        s = socket.create_connection(("127.0.0.1", 7429))
        s.sendall(b"CONNECT %s:%d HTTP/1.1\r\n\r\n" % (host.encode(), port))
        answer = b""
        while not answer.endswith(b"\r\n\r\n"): answer += s.recv(4096)
    else:
        s = socket.create_connection((host, port))
    s.sendall(request)
    while s.recv(65536): pass
    print((time.perf_counter() - start) * 1000)
    s.close()
"#;

/// What the way out adds to a new connection: beside the same between two programs inside.
pub fn connections() -> Result<Vec<Row>> {
    let server = Server::start();
    let port = zeros()?;
    let session = allowing(&server, &[rule(port)]);
    session.write_file("/root/connects.py", CONNECTS.as_bytes()).expect(204);
    let inside = "import socket\ns=socket.create_server(('127.0.0.1',9000),backlog=100)\n\
        while True:\n  c,_=s.accept(); c.recv(4096); c.sendall(b'HTTP/1.0 200 OK\\r\\n\\r\\n0'); c.close()";
    session.write_file("/root/inside.py", inside.as_bytes()).expect(204);
    session.start_sh("exec python3 /root/inside.py");
    eventually("the program inside listens", || {
        (session.sh("python3 /root/connects.py direct 127.0.0.1 9000 1").code == Some(0)).then_some(())
    });
    let run = |mode: &str, host: &str, port: u16| -> Result<Samples> {
        let mut samples = Samples::default();
        for line in session.out(&format!("python3 /root/connects.py {mode} {host} {port} {OPENED}")).lines() {
            samples.push(line.parse().context("milliseconds")?);
        }
        Ok(samples)
    };
    let (mut ours, mut direct) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        direct.push(run("direct", "127.0.0.1", 9000)?.median());
        ours.push(run("proxy", "host.dormouse.internal", port)?.median());
    }
    ours.sort_by(f64::total_cmp);
    direct.sort_by(f64::total_cmp);
    let (ours, direct) = (ours[1], direct[1]);
    server.delete_all_and_check();
    let beside = format!("through the proxy {}, between programs inside {}", figure(ours, "ms"), figure(direct, "ms"));
    Ok(vec![
        Row::at_most("egress-connect", "added by the way out to a new connection, p50", ours - direct, "ms", 2.0).beside(beside),
    ])
}

/// Connections that are open and do nothing: what they cost the supervisor.
pub fn idle() -> Result<Vec<Row>> {
    let server = Server::start();
    let port = zeros()?;
    let session = allowing(&server, &[rule(port)]);
    let holder = "import socket,sys,time\nport,count=int(sys.argv[1]),int(sys.argv[2])\nall=[]\nfor n in range(count):\n  \
        s=socket.create_connection(('127.0.0.1',7429)); s.sendall(b'CONNECT host.dormouse.internal:%d HTTP/1.1\\r\\n\\r\\n'%port)\n  \
        d=b''\n  while not d.endswith(b'\\r\\n\\r\\n'): d+=s.recv(4096)\n  all.append(s)\nprint('open',flush=True)\ntime.sleep(1e9)";
    session.write_file("/root/holder.py", holder.as_bytes()).expect(204);
    // What the first connection brings with it is not the price of one.
    session.out(&format!("curl -sS http://host.dormouse.internal:{port}/1 > /dev/null"));
    let pid = dormouse_tests::faults::mark(server.data(), &session)["pid"].as_u64().context("its supervisor's pid")?;
    let pid = u32::try_from(pid)?;
    let before = resident_mib(pid);
    let exec = session.start_sh(&format!("ulimit -n 4096; exec python3 /root/holder.py {port} {IDLE}"));
    eventually("all are open", || (session.output(&exec, "stdout") == b"open\n").then_some(()));
    let after = resident_mib(pid);
    server.delete_all_and_check();
    let beside = format!("supervisor: {} before", figure(before, "MiB"));
    Ok(vec![Row::at_most("egress-500-idle", "500 idle connections, resident memory", after - before, "MiB", 10.0).beside(beside)])
}

/// A request to a listener inside by the server, beside one from a program inside.
pub fn previews() -> Result<Vec<Row>> {
    let server = Server::start();
    let session = server.session();
    let page = "import http.server\nclass P(http.server.BaseHTTPRequestHandler):\n  protocol_version='HTTP/1.1'\n  \
        def do_GET(self): self.send_response(200); self.send_header('Content-Length','2'); self.end_headers(); self.wfile.write(b'ok')\n  \
        def log_message(self,*a): pass\nhttp.server.ThreadingHTTPServer(('127.0.0.1',8000),P).serve_forever()";
    session.write_file("/root/page.py", page.as_bytes()).expect(204);
    session.start_sh("exec python3 /root/page.py");
    let path = session.path("/ports/8000/");
    eventually("the page is there", || (session.client.get(&path).status == 200).then_some(()));
    session.write_file("/root/connects.py", CONNECTS.as_bytes()).expect(204);
    let (mut ours, mut direct) = (Samples::default(), Vec::new());
    for _ in 0..3 {
        for _ in 0..OPENED {
            ours.time(|| session.client.get(&path).expect(200));
        }
        let mut samples = Samples::default();
        for line in session.out(&format!("python3 /root/connects.py direct 127.0.0.1 8000 {OPENED}")).lines() {
            samples.push(line.parse().context("milliseconds")?);
        }
        direct.push(samples.median());
    }
    direct.sort_by(f64::total_cmp);
    let direct = direct[1];
    server.delete_all_and_check();
    let beside = format!("by path {}, from a program inside {}", figure(ours.median(), "ms"), figure(direct, "ms"));
    Ok(vec![
        Row::at_most("preview-request", "added by a preview to a request, p50", ours.median() - direct, "ms", 2.0).beside(beside),
    ])
}
