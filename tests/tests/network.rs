//! The way out of a session: what its rules allow is reached by every kind of client, what they deny says so at once.

use dormouse_tests::{Options, Server, eventually, leftovers, upstream::Upstream};
use serde_json::{Value, json};

/// A session whose rules allow these servers and nothing else.
fn session(server: &Server, allowed: &[&Upstream]) -> dormouse_tests::Session {
    let rules: Vec<Value> = allowed.iter().map(|upstream| upstream.rule()).collect();
    server.session_with(&json!({ "network": { "default": "deny", "rules": rules } }))
}

/// The refusals that the session's history has, as (host, port, reason).
fn denied(session: &dormouse_tests::Session) -> Vec<(String, u64, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let refusals = session.events().into_iter().filter(|event| event["type"] == "network.denied");
    refusals.map(|e| (text(&e["data"]["host"]), e["data"]["port"].as_u64().unwrap(), text(&e["data"]["reason"]))).collect()
}

#[test]
fn what_is_allowed_is_reached_by_http_socks_names_and_a_command() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let url = upstream.url("/hello");
    let hello = "hello from outside";
    // By the variables that are set, as a tunnel, by SOCKS with the name resolved outside, and without any proxy.
    assert_eq!(session.out(&format!("curl -sS {url}")), hello);
    assert_eq!(session.out(&format!("curl -sS --proxytunnel {url}")), hello);
    assert_eq!(session.out(&format!("curl -sS --proxy socks5h://127.0.0.1:7429 {url}")), hello);
    assert_eq!(session.out(&format!("curl -sS --noproxy '*' {url}")), hello);
    let port = upstream.port;
    let raw = format!(
        "printf 'GET /hello HTTP/1.0\\r\\n\\r\\n' | /usr/lib/dormouse/dormouse-guest connect host.dormouse.internal {port}"
    );
    assert!(session.out(&raw).ends_with(hello));
    // A request's body goes up, and half of a connection can end while the other goes on.
    let sum = session.out(&format!(
        "head -c 3000000 /dev/zero | curl -sS -T - -X PUT {} | grep -o '\"length\": [0-9]*'",
        upstream.url("/echo")
    ));
    assert_eq!(sum, "\"length\": 3000000");
    let half = "import socket,sys\ns=socket.create_connection(('host.dormouse.internal',int(sys.argv[1])))\n\
        s.sendall(b'GET /hello HTTP/1.0\\r\\n\\r\\n'); s.shutdown(socket.SHUT_WR)\n\
        d=b''\nwhile True:\n  p=s.recv(4096)\n  if not p: break\n  d+=p\nprint(d.decode().splitlines()[-1])";
    session.write_file("/tmp/half.py", half.as_bytes()).expect(204);
    assert_eq!(session.out(&format!("python3 /tmp/half.py {port}")), hello);
    assert_eq!(session.out("getent hosts host.dormouse.internal | cut -c1-7"), "127.64.", "an address of its own");
    assert!(denied(&session).is_empty(), "{:?}", denied(&session));
    // Another policy, from now on.
    session.client.patch(&session.path(""), &json!({ "network": { "default": "deny" } })).expect(200);
    assert_eq!(session.out(&format!("curl -s -o /dev/null -w '%{{http_code}}' {url}")), "403");
    session.delete();
    server.delete_all_and_check();
}

#[test]
fn what_is_denied_fails_at_once_with_a_reason_and_is_an_event() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let other = Upstream::plain();
    let refusal = session.out(&format!("curl -sS -w ' %{{http_code}}' {}", other.url("/hello")));
    assert!(refusal.ends_with("403") && refusal.contains("host.dormouse.internal"), "{refusal}");
    let tunnel = session.sh("curl -sS https://example.org/");
    assert!(tunnel.code == Some(56) && tunnel.stderr.contains("403"), "{tunnel:?}");
    let socks = session.sh("curl -sS --proxy socks5h://127.0.0.1:7429 http://example.org/");
    assert!(socks.code == Some(97) && socks.stderr.contains("(2)"), "not allowed by the ruleset: {socks:?}");
    let command = session.sh("/usr/lib/dormouse/dormouse-guest connect example.org 22 < /dev/null");
    assert!(command.code == Some(1) && command.stderr.contains("example.org"), "{command:?}");
    // A name that may not be reached isn't one.
    let name = session.sh("getent hosts example.org");
    assert_eq!(name.code, Some(2), "{name:?}");
    let told = eventually("the refusals are told", || Some(denied(&session)).filter(|told| told.len() >= 4));
    for (host, port) in
        [("host.dormouse.internal", u64::from(other.port)), ("example.org", 443), ("example.org", 80), ("example.org", 22)]
    {
        assert!(told.iter().any(|(h, p, reason)| h == host && *p == port && !reason.is_empty()), "{host}:{port} of {told:?}");
    }
    // It keeps what it can't reach out of its own reach, and what it listens on is its own.
    assert_ne!(session.sh(&format!("curl -sS http://127.0.0.1:{}/hello", upstream.port)).code, Some(0));
    session.delete();
    server.delete_all_and_check();
}

#[test]
fn the_hosts_own_network_is_closed_unless_an_address_rule_opens_it() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let (own, port) = (server.client.base.rsplit(':').next().unwrap().to_owned(), upstream.port);
    let code = |session: &dormouse_tests::Session, url: &str| {
        session.sh(&format!("curl -s -o /dev/null -w '%{{http_code}}' --proxy http://127.0.0.1:7429 --noproxy '' '{url}'")).stdout
    };
    let open = server.session_with(&json!({ "network": { "rules": [{ "allow": "*" }, { "allow": "localhost.example" }] } }));
    for host in [
        "127.0.0.1",
        "127.1.2.3",
        "localhost",
        "host.dormouse.internal",
        "0.0.0.0",
        "169.254.169.254",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "[fe80::1]",
        "[fd00::1]",
        "255.255.255.255",
        "224.0.0.1",
    ] {
        assert_eq!(code(&open, &format!("http://{host}:{port}/hello")), "403", "{host}");
    }
    // Spellings that only some programs take for addresses are none here: sent as they are, by a client that doesn't know.
    for host in ["2130706433", "0x7f000001", "017700000001", "127.1", "0177.0.0.1", "0x7f.1"] {
        let asked = format!("printf 'GET http://{host}:{port}/hello HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n'");
        let answer = open.out(&format!("{asked} | python3 -c \"{}\"", SAY));
        assert!(answer.starts_with("HTTP/1.1 40"), "{host}: {answer}");
    }
    // An address rule opens an address; the server's own listeners stay closed.
    let lan = json!({ "rules": [{ "allow": "127.0.0.0/8" }, { "allow": "host.dormouse.internal" }] });
    let lan = server.session_with(&json!({ "network": lan }));
    assert_eq!(code(&lan, &format!("http://127.0.0.1:{port}/hello")), "200");
    assert_eq!(code(&lan, &upstream.url("/hello")), "200");
    assert_eq!(code(&lan, &format!("http://127.0.0.1:{own}/healthz")), "403");
    // By its name the other loopback is tried as well, on which nobody listens.
    assert_ne!(code(&lan, &format!("http://host.dormouse.internal:{own}/healthz")), "200");
    // Redirects are judged where they lead.
    let to = format!("{}?http://169.254.169.254/latest/", upstream.url("/redirect"));
    assert_eq!(lan.out(&format!("curl -sL -o /dev/null -w '%{{http_code}}' '{to}'")), "403");
    server.delete_all_and_check();
}

/// Sends its standard input to the proxy and prints how the answer begins, if there is one.
const SAY: &str = "import socket,sys\ns=socket.create_connection(('127.0.0.1',7429)); s.settimeout(5)\n\
try:\n  s.sendall(sys.stdin.buffer.read())\nexcept OSError: pass\n\
try: sys.stdout.buffer.write(s.recv(65536))\nexcept OSError: pass";

#[test]
fn malformed_requests_harm_nobody() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let (session, other) = (session(&server, &[&upstream]), session(&server, &[&upstream]));
    session.write_file("/tmp/say.py", SAY.as_bytes()).expect(204);
    let long = "h".repeat(300);
    for (what, expected) in [
        ("CONNECT host.dormouse.internal:0 HTTP/1.1\\r\\n\\r\\n".to_owned(), "HTTP/1.1 400"),
        ("CONNECT host.dormouse.internal:99999 HTTP/1.1\\r\\n\\r\\n".to_owned(), "HTTP/1.1 400"),
        ("CONNECT host.dormouse.internal HTTP/1.1\\r\\n\\r\\n".to_owned(), "HTTP/1.1 400"),
        (format!("CONNECT {long}:443 HTTP/1.1\\r\\n\\r\\n"), "HTTP/1.1 400"),
        ("SSH-2.0-nobody\\r\\n".to_owned(), ""),
        ("\\005\\001\\377".to_owned(), ""),
        ("\\026\\003\\001\\000\\001".to_owned(), ""),
        ("GET / HTTP/1.1\\r\\n\\r\\n".to_owned(), "HTTP/1.1 400"),
    ] {
        let answer = session.sh(&format!("printf '{what}' | timeout 60 python3 /tmp/say.py"));
        assert!(answer.stdout.starts_with(expected), "{what:.40}: {answer:?}");
    }
    let header = "printf 'GET http://host.dormouse.internal/ HTTP/1.1\\r\\nX: '; head -c 1048576 /dev/zero | tr '\\0' x; printf '\\r\\n\\r\\n'";
    let refused = session.sh(&format!("({header}) | python3 /tmp/say.py | head -c 12"));
    assert!(refused.stdout.starts_with("HTTP/1.1 4") || refused.stdout.is_empty(), "{refused:?}");
    // An upstream that resets, and one that never answers while the session goes on.
    let reset = session.sh(&format!("curl -sS {}", upstream.url("/reset")));
    assert!(matches!(reset.code, Some(18 | 56)), "half an answer is no answer: {reset:?}");
    session.start_sh(&format!("curl -sS {}", upstream.url("/never")));
    for session in [&session, &other] {
        assert_eq!(session.out(&format!("curl -sS {}", upstream.url("/hello"))), "hello from outside");
    }
    server.delete_all_and_check();
}

#[test]
fn a_rule_that_is_malformed_is_named_and_changes_nothing() {
    let server = Server::start();
    let session = server.session_with(&json!({ "network": { "rules": [{ "allow": "255.255.255.255/32" }] } }));
    let before = session.show()["network"].clone();
    for (network, named) in [
        (json!({ "rules": [{ "allow": "a" }, { "allow": "ex*mple" }] }), "rules[1]"),
        (json!({ "rules": [{ "allow": "10.0.0.0/40" }] }), "10.0.0.0/40"),
        (json!({ "rules": [{ "allow": "a", "ports": [0] }] }), "rules[0]"),
        (json!({ "rules": [{ "allow": "a", "sing": true }] }), "sing"),
        (json!({ "default": "perhaps" }), "perhaps"),
        (json!([]), "network"),
        (json!("deny"), "network"),
    ] {
        let reply = session.client.patch(&session.path(""), &json!({ "network": network })).expect(400);
        assert!(reply.text().contains(named), "{network}: {}", reply.text());
        let made = server.client.post("/v1/sessions", &json!({ "network": network })).expect(400);
        assert!(made.text().contains(named), "{network}: {}", made.text());
    }
    assert_eq!(session.show()["network"], before);
    server.delete_all_and_check();
}

#[test]
fn a_change_of_policy_cuts_what_it_denies_and_a_restart_of_the_server_cuts_nothing() {
    let mut server = Server::start();
    let (kept, cut) = (Upstream::plain(), Upstream::plain());
    let session = session(&server, &[&kept, &cut]);
    let download = |upstream: &Upstream| {
        let exec = session.start_sh(&format!("curl -sS --no-buffer {}", upstream.url("/slow")));
        eventually("the first line has come", || (session.output(&exec, "stdout") == b"first\n").then_some(()));
        exec
    };
    let (goes_on, is_cut) = (download(&kept), download(&cut));
    // While no server runs, programs reach what they may.
    server.kill();
    let while_down = session.path("");
    server.start_again();
    let session = session.on(&server.client);
    assert!(while_down.contains(&session.id));
    let policy = json!({ "default": "deny", "rules": [kept.rule()] });
    session.client.patch(&session.path(""), &json!({ "network": policy })).expect(200);
    let ended = session.ended(&is_cut);
    assert_ne!(ended["exit_code"], 0, "{ended}");
    assert_eq!(session.out(&format!("curl -sS {}", kept.url("/release"))), "released");
    let ended = session.ended(&goes_on);
    assert_eq!((ended["exit_code"].as_i64(), session.output(&goes_on, "stdout")), (Some(0), b"first\nsecond\n".to_vec()));
    server.delete_all_and_check();
}

#[test]
fn the_network_works_while_no_server_runs() {
    let mut server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let waits = format!(
        "until test -e /tmp/go; do sleep 0.1; done; curl -sS {} > /tmp/got; touch /tmp/done; sleep 600",
        upstream.url("/slow")
    );
    session.start_sh(&waits);
    session.write_file("/tmp/go", b"").expect(204);
    server.kill();
    // The answer comes only now, when there is no server.
    let address = format!("127.0.0.1:{}", upstream.port);
    release(&address);
    server.start_again();
    let session = session.on(&server.client);
    eventually("it was fetched", || (session.sh("cat /tmp/got").stdout == "first\nsecond\n").then_some(()));
    server.delete_all_and_check();
}

fn release(address: &str) {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /release HTTP/1.0\r\n\r\n").unwrap();
    stream.read_to_string(&mut String::new()).unwrap();
}

#[test]
fn after_a_wake_old_connections_are_reset_new_ones_work_and_the_history_says_which() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let hang = format!("curl -sS --no-buffer {}", upstream.url("/slow"));
    let by_name = format!("curl -sS --no-buffer --noproxy '*' {}", upstream.url("/slow"));
    for round in 0..2 {
        let execs: Vec<String> = [&hang, &by_name].iter().map(|command| session.start_sh(command)).collect();
        for exec in &execs {
            eventually("the first line has come", || (session.output(exec, "stdout") == b"first\n").then_some(()));
        }
        session.hibernate();
        if round == 1 {
            // Not from the frozen original: by its image, under a new supervisor.
            eventually("the original is gone", || leftovers::processes(server.data()).is_empty().then_some(()));
        }
        let woken = session.client.post(&session.path("/connect"), &json!({})).expect(200).json();
        assert_eq!(woken["wake"]["memory"], "restored", "{woken}");
        assert_eq!(woken["wake"]["connections_reset"], 2, "{woken}");
        for exec in &execs {
            let ended = session.ended(exec);
            let text = String::from_utf8_lossy(&session.output(exec, "stderr")).into_owned();
            assert!(ended["exit_code"] == 56 || ended["exit_code"] == 18, "a reset, at once: {ended} {text}");
        }
        assert_eq!(session.out(&format!("curl -sS {}", upstream.url("/hello"))), "hello from outside");
        assert_eq!(session.out(&format!("curl -sS --noproxy '*' {}", upstream.url("/hello"))), "hello from outside");
    }
    let wake = session.event("wake.done");
    let to = wake["data"]["reset_to"].to_string();
    assert!(to.contains(&format!("host.dormouse.internal:{}", upstream.port)), "{wake}");
    server.delete_all_and_check();
}

#[test]
fn connections_go_on_through_a_snapshot_and_a_fork_has_none_of_them() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let exec = session.start_sh(&format!("curl -sS --no-buffer {}", upstream.url("/slow")));
    eventually("the first line has come", || (session.output(&exec, "stdout") == b"first\n").then_some(()));
    let snapshot = session.client.post(&session.path("/snapshots"), &json!({})).expect(201).json();
    let forked =
        server.client.post(&format!("/v1/snapshots/{}/fork", snapshot["id"].as_str().unwrap()), &json!({})).expect(201).json();
    let fork = dormouse_tests::Session::new(server.client.clone(), &forked["items"][0]);
    assert_ne!(fork.ended(&exec)["exit_code"], 0, "its connection was its parent's");
    assert_eq!(fork.out(&format!("curl -sS {}", upstream.url("/hello"))), "hello from outside", "under the same rules");
    assert_eq!(session.out(&format!("curl -sS {}", upstream.url("/release"))), "released");
    assert_eq!(session.ended(&exec)["exit_code"], 0);
    assert_eq!(session.output(&exec, "stdout"), b"first\nsecond\n");
    server.delete_all_and_check();
}

#[test]
fn a_thousand_connections_at_once() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let client = "import socket,sys\nport=int(sys.argv[1])\nall=[]\nfor n in range(1000):\n  \
        s=socket.create_connection(('127.0.0.1',7429)); s.sendall(b'CONNECT host.dormouse.internal:%d HTTP/1.1\\r\\n\\r\\n'%port); all.append(s)\n\
        for s in all:\n  d=b''\n  while not d.endswith(b'\\r\\n\\r\\n'): d+=s.recv(1)\n  assert b' 200 ' in d, d\n\
        for s in all: s.sendall(b'GET /bytes/1000 HTTP/1.0\\r\\n\\r\\n')\nwhole=0\n\
        for s in all:\n  d=b''\n  while True:\n    p=s.recv(65536)\n    if not p: break\n    d+=p\n  whole+=len(d.split(b'\\r\\n\\r\\n',1)[1])==1000\nprint(whole)";
    session.write_file("/tmp/many.py", client.as_bytes()).expect(204);
    assert_eq!(session.out(&format!("ulimit -n 4096; python3 /tmp/many.py {}", upstream.port)), "1000");
    let traffic = eventually("it was counted", || {
        let traffic = session.client.get(&session.path("/network")).expect(200).json()["traffic"].clone();
        traffic.as_array().and_then(|all| all.iter().find(|host| host["connections"].as_u64() >= Some(1000))).cloned()
    });
    assert!(traffic["received_bytes"].as_u64().unwrap() >= 1_000_000, "{traffic}");
    server.delete_all_and_check();
}

#[test]
fn traffic_and_an_awaited_answer_keep_a_session_awake() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let rules = json!({ "default": "deny", "rules": [upstream.rule()] });
    let session = server.session_with(&json!({ "network": rules, "idle": { "after_seconds": 2, "action": "hibernate" } }));
    // A detached agent that waits for a slow answer: no exec, no CPU.
    session.out(&format!("setsid curl -sS --no-buffer {} > /tmp/answer 2>&1 < /dev/null & exit 0", upstream.url("/slow")));
    eventually("it is said", || {
        let awake = session.show()["activity"].to_string();
        awake.contains("traffic").then_some(()).filter(|()| awake.contains("host.dormouse.internal"))
    });
    let since = std::time::Instant::now();
    while since.elapsed().as_secs() < 5 {
        assert_eq!(session.state(), "running");
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    release(&format!("127.0.0.1:{}", upstream.port));
    eventually("it sleeps once it has its answer", || (session.state() == "hibernated").then_some(()));
    server.delete_all_and_check();
}

#[test]
fn requests_are_written_down_where_that_is_asked_for() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let network = json!({ "default": "deny", "rules": [upstream.rule()], "log_requests": true });
    let session = server.session_with(&json!({ "network": network }));
    session.out(&format!("curl -sS -d hush '{}?query=hush'", upstream.url("/echo")));
    let lines = eventually("a line", || {
        let log = server.cli(&["logs", &session.id, "requests", "--json"]).output().unwrap();
        let text = String::from_utf8(log.stdout).unwrap();
        (!text.trim().is_empty()).then_some(text)
    });
    let line = lines.lines().next().unwrap();
    let line: Value = serde_json::from_str(&line[line.find('{').unwrap()..]).unwrap();
    assert_eq!(
        (line["method"].as_str(), line["path"].as_str(), line["status"].as_u64()),
        (Some("POST"), Some("/echo"), Some(200))
    );
    assert_eq!(line["sent_bytes"], 4);
    assert!(!lines.contains("hush"), "no query, no body: {lines}");
    server.delete_all_and_check();
}

#[test]
fn another_server_of_the_same_policy_finds_it_in_force() {
    let mut server = Server::with(Options { pool: 1, ..Options::default() });
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    session.client.post(&session.path("/stop"), &json!({})).expect(200);
    server.kill();
    server.start_again();
    let session = session.on(&server.client);
    session.client.post(&session.path("/start"), &json!({})).expect(200);
    assert_eq!(session.out(&format!("curl -sS {}", upstream.url("/hello"))), "hello from outside");
    assert_eq!(session.out("curl -s -o /dev/null -w '%{http_code}' http://example.org/"), "403");
    session.delete();
}

#[test]
fn settings_are_shown_and_the_sandbox_itself_needs_no_proxy() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let shown = server.cli(&["show", &session.id, "--network"]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let environment = session.out("env");
    for name in ["http_proxy", "HTTPS_PROXY", "NO_PROXY", "NODE_USE_ENV_PROXY"] {
        let set = environment.lines().find(|line| line.starts_with(&format!("{name}="))).unwrap_or_else(|| panic!("{name}"));
        assert!(shown.contains(set), "{set} of {shown}");
    }
    assert!(shown.contains(&format!("{}", upstream.port)), "its rules: {shown}");
    session.start_sh("cd /tmp && exec python3 -m http.server --bind 127.0.0.1 8000");
    eventually("a page of its own", || (session.sh("curl -sSf http://localhost:8000/").code == Some(0)).then_some(()));
    let own = session.exec_with(&json!({ "shell": "echo $http_proxy", "env": { "http_proxy": "http://mine" } }));
    assert_eq!(own.stdout, "http://mine\n", "the program's own comes first");
    server.delete_all_and_check();
}

#[test]
fn a_program_that_listens_on_the_port_of_a_name_is_not_hindered() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let by_name = format!("curl -sS --noproxy '*' {}", upstream.url("/hello"));
    assert_eq!(session.out(&by_name), "hello from outside");
    let port = upstream.port;
    session.out("mkdir -p /tmp/own && echo mine > /tmp/own/hello");
    session.start_sh(&format!("cd /tmp/own && exec python3 -m http.server --bind 0.0.0.0 {port}"));
    eventually("its own page", || {
        (session.sh(&format!("curl -sS http://127.0.0.1:{port}/hello")).stdout == "mine\n").then_some(())
    });
    assert_eq!(session.out(&by_name), "hello from outside", "each gets what is meant for it");
    server.delete_all_and_check();
}

#[test]
fn a_rollback_keeps_the_present_policy() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let hello = format!("curl -s -o /dev/null -w '%{{http_code}}' {}", upstream.url("/hello"));
    let snapshot = session.client.post(&session.path("/snapshots"), &json!({})).expect(201).json();
    session.client.patch(&session.path(""), &json!({ "network": { "default": "deny" } })).expect(200);
    session.client.post(&session.path("/rollback"), &json!({ "snapshot_id": snapshot["id"] })).expect(200);
    assert_eq!(session.out(&hello), "403", "what was taken away does not come back with an old state");
    server.delete_all_and_check();
}

#[test]
fn traffic_is_counted_exactly_once_and_shown() {
    let mut server = Server::start();
    let upstream = Upstream::plain();
    let mut session = session(&server, &[&upstream]);
    let name = "host.dormouse.internal";
    let of_host = |session: &dormouse_tests::Session| {
        let traffic = session.client.get(&session.path("/network")).expect(200).json()["traffic"].clone();
        let host =
            traffic.as_array().into_iter().flatten().find(|host| host["host"].as_str().is_some_and(|h| h.starts_with(name)));
        host.map_or((0, 0), |host| (host["connections"].as_u64().unwrap(), host["received_bytes"].as_u64().unwrap()))
    };
    for round in 1..=3_u64 {
        session.out(&format!("curl -sS -o /dev/null {}", upstream.url("/bytes/1000000")));
        match round {
            1 => server.crash(),
            2 => drop(session.hibernate()),
            _ => {}
        }
        session = session.on(&server.client);
        eventually("it is counted", || (of_host(&session).0 == round).then_some(()));
        let bytes = of_host(&session).1;
        assert!((round * 1_000_000..round * 1_001_000).contains(&bytes), "{round}: {bytes}");
    }
    assert!(server.client.get("/metrics").expect(200).text().contains(name));
    let shown = server.cli(&["show", &session.id, "--network"]).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains(name));
    server.delete_all_and_check();
}

#[test]
fn an_upstream_that_sends_without_end_costs_no_memory() {
    let server = Server::start();
    let upstream = Upstream::plain();
    let session = session(&server, &[&upstream]);
    let bytes: u64 = if dormouse_tests::long() { 10_000_000_000 } else { 1_000_000_000 };
    let pid = dormouse_tests::faults::mark(server.data(), &session)["pid"].as_u64().unwrap();
    // A reader that is slower than the sender: what it doesn't take has to wait outside.
    let exec = session.start_sh(&format!("curl -sS {} | (sleep 1; wc -c)", upstream.url(&format!("/bytes/{bytes}"))));
    session.ended(&exec);
    assert_eq!(String::from_utf8_lossy(&session.output(&exec, "stdout")).trim(), bytes.to_string());
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap();
    assert!(peak < 150_000, "{peak} KiB at most");
    server.delete_all_and_check();
}
