//! Credentials that are added at the edge: programs inside use what they never see.

use dormouse_tests::{
    Options, Server, Session, eventually, place,
    upstream::{Authority, Upstream},
};
use serde_json::{Value, json};

/// What no file, memory, journal or answer may ever hold.
const CANARY: &str = "canary-7c0e9d41b6aa4f3f";

/// A server that trusts an upstream's authority and has a secret.
fn server(authority: &Authority) -> Server {
    let args = vec!["--egress-ca".to_owned(), authority.certificate().to_string_lossy().into_owned()];
    let server = Server::with(Options { args, ..Options::default() });
    set_secret(&server, "MODEL_KEY", CANARY);
    server
}

fn set_secret(server: &Server, name: &str, value: &str) {
    let body = json!({ "value": value }).to_string();
    let reply = server.client.put(&format!("/v1/secrets/{name}"), body.as_bytes());
    assert!(reply.status < 300, "{}: {}", reply.status, reply.text());
}

/// Rules by which the upstream gets the secret in the header that it wants.
fn injecting(upstream: &Upstream) -> Value {
    json!({ "default": "deny", "rules": [{
        "allow": "host.dormouse.internal", "ports": [upstream.port],
        "inject": { "header": "x-api-key", "value": "{MODEL_KEY}" } }] })
}

fn echo(session: &Session, upstream: &Upstream, more: &str) -> Value {
    serde_json::from_str(&session.out(&format!("curl -sS {more} {}", upstream.https("/echo")))).unwrap()
}

#[test]
fn a_header_is_added_for_its_host_and_programs_trust_the_session() {
    let authority = Authority::new();
    let server = server(&authority);
    let (upstream, other) = (Upstream::tls(&authority, ""), Upstream::tls(&authority, ""));
    let mut network = injecting(&upstream);
    network["rules"].as_array_mut().unwrap().push(other.rule());
    let session = server.session_with(&json!({ "network": network }));
    let told = echo(&session, &upstream, "-H 'X-Api-Key: my own' -H 'Authorization: Bearer mine'");
    assert_eq!(told["headers"]["x-api-key"], CANARY, "the client's own is replaced: {told}");
    assert_eq!(told["headers"]["authorization"], "Bearer mine", "others are left alone");
    // By HTTP/1.1, by Python's own library, by git, and for programs that know no proxy.
    assert_eq!(echo(&session, &upstream, "--http1.1")["headers"]["x-api-key"], CANARY);
    assert_eq!(echo(&session, &upstream, "--noproxy '*'")["headers"]["x-api-key"], CANARY);
    let python = format!(
        "import urllib.request,json; print(json.load(urllib.request.urlopen('{}'))['headers']['x-api-key'])",
        upstream.https("/echo")
    );
    assert_eq!(session.out(&format!("python3 -c \"{python}\"")), CANARY);
    // No other host gets it, and TLS to that one doesn't end on the way: its authority isn't known inside.
    let through = session.sh(&format!("curl -sS {}", other.https("/echo")));
    assert_eq!(through.code, Some(60), "{through:?}");
    assert!(echo(&session, &other, "-k")["headers"]["x-api-key"].is_null());
    // Large bodies, both ways, and answers that come piece by piece.
    let up =
        format!("head -c 3000000 /dev/zero | curl -sS -T - -X PUT {} | grep -o '\"length\": [0-9]*'", upstream.https("/echo"));
    assert_eq!(session.out(&up), "\"length\": 3000000");
    assert_eq!(session.out(&format!("curl -sS {} | wc -c", upstream.https("/bytes/5000000"))), "5000000");
    let events = session.start_sh(&format!("curl -sSN {}", upstream.https("/events")));
    eventually("the first event", || {
        String::from_utf8_lossy(&session.output(&events, "stdout")).contains("event 0").then_some(())
    });
    session.out(&format!("curl -sS {}", upstream.https("/release")));
    assert_eq!(session.ended(&events)["exit_code"], 0);
    server.delete_all_and_check();
}

#[test]
fn methods_and_paths_are_judged_request_by_request() {
    let authority = Authority::new();
    let server = server(&authority);
    let upstream = Upstream::tls(&authority, "");
    let rules = json!({ "default": "deny", "rules": [{
        "allow": "host.dormouse.internal", "ports": [upstream.port], "methods": ["GET"], "path": "/echo" }] });
    let session = server.session_with(&json!({ "network": rules }));
    let code = |what: &str| session.out(&format!("curl -sS -o /tmp/said -w '%{{http_code}}' {what}"));
    assert_eq!(code(&upstream.https("/echo")), "200");
    assert_eq!(code(&format!("-d x {}", upstream.https("/echo"))), "403");
    assert!(session.out("cat /tmp/said").contains("POST"), "the reason is said");
    assert_eq!(code(&upstream.https("/hello")), "403");
    assert_eq!(code(&format!("--path-as-is {}", upstream.https("/echo/../hello"))), "403");
    assert_eq!(code(&format!("--path-as-is {}", upstream.https("/echo/%2e%2e/hello"))), "403");
    assert_eq!(code(&format!("-H 'Host: other.example' {}", upstream.https("/echo"))), "421");
    server.delete_all_and_check();
}

#[test]
fn git_pushes_with_a_token_that_it_does_not_have() {
    let authority = Authority::new();
    let server = server(&authority);
    let upstream = Upstream::tls(&authority, CANARY);
    let dir = upstream.dir().join("git");
    std::fs::create_dir(&dir).unwrap();
    for args in
        [&["init", "-q", "--bare", "-b", "main", "repo.git"][..], &["-C", "repo.git", "config", "http.receivepack", "true"]]
    {
        assert!(std::process::Command::new("git").args(args).current_dir(&dir).status().unwrap().success());
    }
    let rules = json!({ "default": "deny", "rules": [{
        "allow": "host.dormouse.internal", "ports": [upstream.port],
        "inject": { "header": "Authorization", "value": "Basic {basic:x-access-token:MODEL_KEY}" } }] });
    let session = server.session_with(&json!({ "network": rules }));
    let url = upstream.https("/git/repo.git");
    session.out(&format!(
        "cd /root && git clone -q {url} work 2>/dev/null; cd work && git config user.email a@b.c && git config user.name n && \
         git checkout -q -b main && echo hello > file && git add . && git commit -qm one && git push -q origin main"
    ));
    assert_eq!(session.out(&format!("git clone -q {url} /tmp/again && cat /tmp/again/file")), "hello");
    server.delete_all_and_check();
}

#[test]
fn a_secret_is_in_no_answer_file_memory_or_snapshot() {
    let authority = Authority::new();
    let mut server = server(&authority);
    let upstream = Upstream::tls(&authority, CANARY);
    let session = server
        .session_with(&json!({ "network": { "log_requests": true, "default": "deny", "rules": injecting(&upstream)["rules"] } }));
    assert_eq!(session.out(&format!("curl -sS {}", upstream.https("/hello"))), "hello from outside");
    session.client.post(&session.path("/snapshots"), &json!({})).expect(201);
    session.hibernate();
    place::pack(&server);
    session.wake();
    assert_eq!(session.out(&format!("curl -sS {}", upstream.https("/hello"))), "hello from outside", "after a wake, too");
    let answers = ["", "/events?limit=1000", "/network", "/execs"].map(|path| session.client.get(&session.path(path)).text());
    let secrets = server.client.get("/v1/secrets").expect(200).text();
    assert!(secrets.contains("MODEL_KEY"));
    for answer in answers.iter().chain([&secrets, &server.client.get("/metrics").text(), &server.log()]) {
        assert!(!answer.contains(CANARY), "{answer}");
    }
    // Inside: environments, files, and the memory of every process.
    let inside = format!("grep -rlsa {} /proc/[0-9]*/environ /etc /root /run /tmp /var/tmp | head; true", &CANARY[..12]);
    assert!(!session.out(&inside).contains('/'), "{}", session.out(&inside));
    session.hibernate();
    server.kill();
    // Every byte that lies on the disk: images, snapshots, store, journals, specifications, logs.
    for file in place::files_below(server.data()) {
        let bytes = std::fs::read(&file).unwrap_or_default();
        assert!(!bytes.windows(CANARY.len()).any(|part| part == CANARY.as_bytes()), "{}", file.display());
    }
    server.start_again();
    assert_eq!(session.on(&server.client).out(&format!("curl -sS {}", upstream.https("/hello"))), "hello from outside");
    server.delete_all_and_check();
}

#[test]
fn who_may_use_a_secret_is_checked() {
    let server = Server::start();
    set_secret(&server, "ANY", "a");
    let bound = json!({ "value": "b", "hosts": ["api.example.com"] }).to_string();
    assert!(server.client.put("/v1/secrets/BOUND", bound.as_bytes()).status < 300);
    let token = server.client.post("/v1/tokens", &json!({ "name": "writer", "scopes": ["read", "write"] })).expect(201).json();
    let writer = server.client.with_token(token["token"].as_str().unwrap());
    let with = |host: &str, secret: &str| json!({ "network": { "rules": [{ "allow": host, "inject": { "header": "a", "value": format!("{{{secret}}}") } }] } });
    writer.post("/v1/sessions", &with("api.example.com", "BOUND")).expect(201);
    for (host, secret) in [("evil.example.com", "BOUND"), ("*.example.com", "BOUND"), ("api.example.com", "ANY")] {
        let refused = writer.post("/v1/sessions", &with(host, secret)).expect(403);
        assert!(refused.text().contains(secret), "{}", refused.text());
    }
    server.client.post("/v1/sessions", &with("api.example.com", "ANY")).expect(201);
    assert_eq!(writer.get("/v1/secrets").status, 403);
    assert_eq!(writer.put("/v1/secrets/MORE", br#"{"value":"x"}"#).status, 403);
    assert_eq!(server.client.put("/v1/secrets/bad-name", br#"{"value":"x"}"#).status, 400);
    server.client.delete("/v1/secrets/ANY").expect(204);
    server.client.delete("/v1/secrets/ANY").expect(404);
    server.delete_all_and_check();
}

/// An agent that calls a model without a key, retries what breaks, and can be looked at on a port.
const AGENT: &str = r#"
import http.server, json, os, threading, time, urllib.request
steps = []
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(steps).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
threading.Thread(target=http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Page).serve_forever, daemon=True).start()
while True:
    try:
        with urllib.request.urlopen(os.environ["MODEL"], data=b"{}") as answer:
            for line in answer:
                if line.strip():
                    steps.append(line.decode().strip())
                    print(steps[-1], flush=True)
        # A library may take a reset for an end: only the model's last word is one.
        if steps[-1] != "data: done":
            raise ConnectionError("cut off")
        break
    except Exception as error:
        steps.append("broken")
        print("broken", flush=True)
        time.sleep(0.2)
print("finished", flush=True)
time.sleep(600)
"#;

#[test]
fn an_agent_without_a_key_sleeps_in_the_middle_of_a_call_and_its_fork_has_no_credential_until_it_is_given_one() {
    let authority = Authority::new();
    let server = server(&authority);
    let upstream = Upstream::tls(&authority, CANARY);
    let session = server.session_with(&json!({ "network": injecting(&upstream) }));
    session.write_file("/root/agent.py", AGENT.as_bytes()).expect(204);
    let agent = session.start_sh(&format!("MODEL={} exec python3 -u /root/agent.py", upstream.https("/v1/messages")));
    let said = |session: &Session| String::from_utf8_lossy(&session.output(&agent, "stdout")).into_owned();
    eventually("the model has begun to answer", || said(&session).contains("thinking").then_some(()));
    session.hibernate();
    // Somebody looks at its page, and that wakes it.
    let page = eventually("the page says that the call broke", || {
        let page = session.client.get(&session.path("/ports/8000/"));
        (page.status == 200 && page.text().contains("broken")).then(|| page.text())
    });
    assert!(page.contains("thinking") && session.state() == "running");
    eventually("it asks again", || (said(&session).matches("thinking").count() >= 2).then_some(()));
    let forked = session.client.post(&session.path("/fork"), &json!({})).expect(201).json();
    let fork = Session::new(server.client.clone(), &forked["items"][0]);
    let call = format!("curl -s -w ' %{{http_code}}' -d x {}", upstream.https("/v1/messages"));
    let refused = fork.out(&call);
    assert!(refused.ends_with("403") && !refused.contains(CANARY), "{refused}");
    // The original goes on to its end.
    assert_eq!(session.out(&format!("curl -sS {}", upstream.https("/release"))), "released");
    eventually("it is done", || said(&session).ends_with("data: done\nfinished\n").then_some(()));
    // Given its own, the fork calls again.
    fork.client.patch(&fork.path(""), &json!({ "network": injecting(&upstream) })).expect(200);
    assert!(fork.out(&call).ends_with("200"), "{}", fork.out(&call));
    let with = session.client.post(&session.path("/fork"), &json!({ "secrets": true })).expect(201).json();
    let with = Session::new(server.client.clone(), &with["items"][0]);
    assert!(with.out(&call).ends_with("200"), "{}", with.out(&call));
    server.delete_all_and_check();
}

#[test]
fn secrets_are_set_listed_and_removed_on_the_command_line() {
    use std::{io::Write, process::Stdio};
    let server = Server::start();
    let mut set = server.cli(&["secret", "set", "TOKEN", "--host", "api.example.com"]);
    let mut child = set.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(format!("{CANARY}\n").as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success() && !String::from_utf8_lossy(&done.stdout).contains(CANARY));
    let list = server.cli(&["secret", "ls"]).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    assert!(list.contains("TOKEN") && list.contains("api.example.com") && !list.contains(CANARY), "{list}");
    assert!(server.cli(&["secret", "rm", "TOKEN"]).status().unwrap().success());
    assert_eq!(server.cli(&["secret", "rm", "TOKEN"]).output().unwrap().status.code(), Some(3));
    server.delete_all_and_check();
}
