//! The programs that people use, from inside a session, against real servers.

use dormouse_tests::{
    Options, Server, Session, eventually,
    upstream::{Postgres, Redis, Sshd, Upstream},
};
use serde_json::{Value, json};
use std::{fs, path::Path, process::Command};

/// A server whose template is this machine, with all that is installed on it.
fn server() -> (Server, tempfile::TempDir) {
    let templates = tempfile::tempdir().unwrap();
    let made = Command::new(dormouse_tests::server::binary())
        .args(["template", "make", "host", "--templates"])
        .arg(templates.path())
        .output();
    let made = made.unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    (Server::with(Options { templates: Some(templates.path().to_owned()), ..Options::default() }), templates)
}

fn session(server: &Server, rules: &[Value]) -> Session {
    server.session_with(&json!({ "template": "host", "network": { "default": "deny", "rules": rules } }))
}

/// Runs a program on this machine.
fn tool(name: &str, args: &[&str], dir: &Path) {
    let done = Command::new(name).args(args).current_dir(dir).output().unwrap();
    assert!(done.status.success(), "{name} {args:?}: {}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn clients_of_http_and_those_that_know_no_proxy() {
    let (server, _templates) = server();
    let upstream = Upstream::plain();
    let (postgres, redis, sshd) = (Postgres::start(), Redis::start(), Sshd::start());
    let port = |port: u16| json!({ "allow": "host.dormouse.internal", "ports": [port] });
    let session = session(&server, &[upstream.rule(), port(postgres.port), port(redis.port), port(sshd.port)]);
    git(&session, &upstream);
    pip(&session, &upstream);
    npm(&session, &upstream);
    python_and_node(&session, &upstream);
    // Without any proxy setting.
    let host = "host.dormouse.internal";
    let psql = format!(
        "env -i PATH=$PATH PGPASSWORD={} psql -h {host} -p {} -U postgres -tAc 'select 6 * 7'",
        postgres.password, postgres.port
    );
    assert_eq!(session.out(&psql), "42");
    let redis_cli = format!("env -i PATH=$PATH redis-cli -h {host} -p {}", redis.port);
    assert_eq!(session.out(&format!("{redis_cli} set a b && {redis_cli} get a")), "OK\nb");
    // By the ProxyCommand that is set.
    session.out("mkdir -p -m 700 /root/.ssh");
    session.write_file("/root/.ssh/id", &fs::read(sshd.key()).unwrap()).expect(204);
    let ssh = format!(
        "chmod 600 /root/.ssh/id; ssh -i /root/.ssh/id -p {} -o StrictHostKeyChecking=no root@{host} echo over ssh",
        sshd.port
    );
    assert_eq!(session.out(&ssh), "over ssh");
    session.delete();
    server.delete_all_and_check();
}

fn git(session: &Session, upstream: &Upstream) {
    let dir = upstream.dir().join("git");
    fs::create_dir(&dir).unwrap();
    tool("git", &["init", "-q", "--bare", "-b", "main", "repo.git"], &dir);
    tool("git", &["config", "http.receivepack", "true"], &dir.join("repo.git"));
    let url = upstream.url("/git/repo.git");
    session.out(&format!(
        "cd /root && git clone -q {url} work 2>/dev/null; cd work && git config user.email a@b.c && git config user.name n && \
         git checkout -q -b main && head -c 300000 /dev/urandom > file && git add . && git commit -qm one && git push -q origin main"
    ));
    assert_eq!(
        session.out(&format!(
            "cd /tmp && git clone -q {url} again && cmp again/file /root/work/file && git -C again log --oneline | wc -l"
        )),
        "1"
    );
}

fn pip(session: &Session, upstream: &Upstream) {
    let dir = upstream.dir().join("files/simple/greet");
    fs::create_dir_all(&dir).unwrap();
    let wheel = "import zipfile\nz=zipfile.ZipFile('greet-1.0-py3-none-any.whl','w')\nz.writestr('greet.py','WORD=\"from a wheel\"\\n')\n\
        i='greet-1.0.dist-info/'\nz.writestr(i+'METADATA','Metadata-Version: 2.1\\nName: greet\\nVersion: 1.0\\n')\n\
        z.writestr(i+'WHEEL','Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
        z.writestr(i+'RECORD','greet.py,,\\n')\nz.close()";
    tool("python3", &["-c", wheel], &dir);
    let (index, host) = (upstream.url("/files/simple/"), "host.dormouse.internal");
    let install = format!(
        "env -u PIP_FIND_LINKS python3 -m pip install -q --target /tmp/py --index-url {index} --trusted-host {host} greet 2>&1"
    );
    session.out(&install);
    assert_eq!(session.out("PYTHONPATH=/tmp/py python3 -c 'import greet; print(greet.WORD)'"), "from a wheel");
}

fn npm(session: &Session, upstream: &Upstream) {
    let dir = upstream.dir().join("files/npm");
    fs::create_dir_all(dir.join("package")).unwrap();
    fs::write(dir.join("package/package.json"), r#"{"name":"greet","version":"1.0.0","main":"i.js"}"#).unwrap();
    fs::write(dir.join("package/i.js"), "module.exports = 'from a registry'\n").unwrap();
    tool("tar", &["-czf", "greet-1.0.0.tgz", "package"], &dir);
    let page = json!({ "name": "greet", "dist-tags": { "latest": "1.0.0" }, "versions": { "1.0.0": {
        "name": "greet", "version": "1.0.0", "main": "i.js",
        "dist": { "tarball": "http://@HOST@/files/npm/greet-1.0.0.tgz" } } } });
    fs::write(dir.join("greet"), page.to_string()).unwrap();
    let registry = upstream.url("/files/npm/");
    session.out(&format!("mkdir -p /tmp/js && cd /tmp/js && npm install --no-audit --no-fund --registry {registry} greet 2>&1"));
    assert_eq!(session.out("cd /tmp/js && node -p 'require(\"greet\")'"), "from a registry");
}

/// `requests` and `httpx` are installed from PyPI, by `pip` inside, through the proxy: a server that nobody here has made.
fn python_and_node(session: &Session, upstream: &Upstream) {
    let pypi = json!({ "default": "deny", "rules": [
        { "allow": "pypi.org", "ports": [443] }, { "allow": "*.pypi.org", "ports": [443] },
        { "allow": "*.pythonhosted.org", "ports": [443] }, upstream.rule() ] });
    let before = session.show()["network"].clone();
    session.client.patch(&session.path(""), &json!({ "network": pypi })).expect(200);
    session.out("env -u PIP_FIND_LINKS python3 -m pip install -q --target /tmp/py requests httpx websockets 2>&1");
    session.client.patch(&session.path(""), &json!({ "network": before })).expect(200);
    let hello = upstream.url("/hello");
    let python = |code: &str| session.out(&format!("PYTHONPATH=/tmp/py python3 -c '{code}'"));
    assert_eq!(python(&format!("import requests; print(requests.get(\"{hello}\").text)")), "hello from outside");
    assert_eq!(python(&format!("import httpx; print(httpx.get(\"{hello}\").text)")), "hello from outside");
    assert_eq!(
        session.out(&format!("node -e 'fetch(\"{hello}\").then(r => r.text()).then(t => console.log(t))'")),
        "hello from outside"
    );
    let ws = upstream.url("/ws").replace("http:", "ws:");
    let talk = format!(
        "from websockets.sync.client import connect\nwith connect(\"{ws}\") as w:\n  w.send(\"over a websocket\")\n  print(w.recv())"
    );
    assert_eq!(python(&talk), "over a websocket");
    // Server-sent events come as they are sent: the rest is sent only after the first was read.
    let events = session.start_sh(&format!("curl -sSN {}", upstream.url("/events")));
    eventually("the first event", || {
        String::from_utf8_lossy(&session.output(&events, "stdout")).contains("event 0").then_some(())
    });
    session.out(&format!("curl -sS {}", upstream.url("/release")));
    assert_eq!(session.ended(&events)["exit_code"], 0);
    assert!(String::from_utf8_lossy(&session.output(&events, "stdout")).contains("event 2"));
}
