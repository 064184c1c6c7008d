//! A session's first files: a git repository or a tar archive, fetched by the server.

use dormouse_tests::{Reply, Server, Session, http::Client};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

#[track_caller]
fn git(dir: &Path, args: &[&str]) -> String {
    let identity = ["-c", "user.name=T", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"];
    let mut command = Command::new("git");
    command.arg("-C").arg(dir).args(identity).args(args).env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
    let done = command.stdin(Stdio::null()).output().expect("git runs");
    assert!(done.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).trim_end().to_owned()
}

/// A repository with three commits on `main`, a tag on the first, a branch `side`, a program and links.
fn repository(dir: &Path) -> PathBuf {
    let repo = dir.join("project");
    fs::create_dir_all(repo.join("bin")).expect("a directory");
    git(&repo, &["init", "-q"]);
    fs::write(repo.join("file"), "one\n").expect("a file");
    fs::write(repo.join("bin/run"), "#!/bin/sh\necho it runs\n").expect("a file");
    fs::set_permissions(repo.join("bin/run"), fs::Permissions::from_mode(0o755)).expect("a mode");
    std::os::unix::fs::symlink("file", repo.join("link")).expect("a link");
    std::os::unix::fs::symlink("/etc/shadow", repo.join("outward")).expect("a link");
    // Neither a filter that the repository names nor a hook may run anywhere.
    fs::write(repo.join(".gitattributes"), "*.f filter=evil\n").expect("a file");
    fs::write(repo.join("x.f"), "as it is\n").expect("a file");
    git(&repo, &["add", "."]);
    git(&repo, &["commit", "-q", "-m", "first"]);
    git(&repo, &["tag", "v1"]);
    git(&repo, &["branch", "side"]);
    for text in ["two\n", "three\n"] {
        fs::write(repo.join("file"), text).expect("a file");
        git(&repo, &["commit", "-q", "-a", "-m", text.trim()]);
    }
    repo
}

/// Serves the folder over HTTP: `/git/…` with git's own smart server, the rest as files.
const SERVER: &str = r#"
import http.server, os, subprocess, sys
root = sys.argv[1]
class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *a): pass
    def git(self):
        path, _, query = self.path.partition('?')
        body = self.rfile.read(int(self.headers.get('content-length') or 0))
        env = dict(os.environ, GIT_PROJECT_ROOT=root, GIT_HTTP_EXPORT_ALL='1', PATH_INFO=path[4:], QUERY_STRING=query,
            REQUEST_METHOD=self.command, CONTENT_TYPE=self.headers.get('content-type') or '', REMOTE_ADDR='127.0.0.1',
            HTTP_CONTENT_ENCODING=self.headers.get('content-encoding') or '', GIT_PROTOCOL=self.headers.get('git-protocol') or '',
            CONTENT_LENGTH=str(len(body)), GIT_CONFIG_COUNT='1', GIT_CONFIG_KEY_0='safe.directory', GIT_CONFIG_VALUE_0='*')
        out = subprocess.run(['git', 'http-backend'], input=body, env=env, capture_output=True).stdout
        head, _, rest = out.partition(b'\r\n\r\n')
        lines = [l.split(': ', 1) for l in head.decode().split('\r\n') if ': ' in l]
        status = next((int(v.split()[0]) for k, v in lines if k == 'Status'), 200)
        self.send_response(status)
        for k, v in lines:
            if k != 'Status': self.send_header(k, v)
        self.send_header('Content-Length', str(len(rest)))
        self.end_headers()
        self.wfile.write(rest)
    def do_GET(self):
        self.git() if self.path.startswith('/git/') else super().do_GET()
    def do_POST(self): self.git()
os.chdir(root)
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"#;

struct Web {
    child: Child,
    port: u16,
}

impl Web {
    fn serve(root: &Path) -> Web {
        let mut command = Command::new("python3");
        command.args(["-c", SERVER]).arg(root).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("python runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        Web { child, port: line.trim().parse().expect("a port") }
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/{path}", self.port)
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn create(server: &Server, source: &Value, more: Value) -> Reply {
    let mut body = more;
    body["source"] = source.clone();
    server.client.post("/v1/sessions", &body)
}

#[track_caller]
fn made(server: &Server, source: &Value, more: Value) -> Session {
    let created = create(server, source, more).expect(201).json();
    assert_eq!(created["state"], "running", "{created}");
    Session::new(server.client.clone(), &created)
}

/// An answer that says why there is no session, and that it stays so.
#[track_caller]
fn refused(client: &Client, reply: Reply, says: &str) {
    let text = reply.text();
    let told = reply.json();
    // One that waited was answered with 201 before it failed; then the session says it.
    let failed = if reply.status == 201 { told["state"] == "failed" } else { (400..500).contains(&reply.status) };
    assert!(failed && text.contains(says), "{} {text}", reply.status);
    let running = client.get("/v1/sessions?state=running,creating").expect(200).json();
    assert_eq!(running["items"], json!([]), "{running}");
}

#[test]
fn a_repository_is_cloned_into_the_workdir() {
    let dir = tempfile::tempdir().expect("a directory");
    let repo = repository(dir.path());
    let first = git(&repo, &["rev-parse", "v1"]);
    let web = Web::serve(dir.path());
    let server = Server::start();
    let url = web.url("git/project");

    let session = made(&server, &json!({ "git": url }), json!({}));
    assert_eq!(session.show()["workdir"], "/root/project");
    assert_eq!(
        session.out("pwd; cat file; ./bin/run; readlink link outward; cat x.f"),
        "/root/project\nthree\nit runs\nfile\n/etc/shadow\nas it is"
    );
    assert_eq!(
        session.out("git status --porcelain; git log --format=%s; git rev-parse --abbrev-ref HEAD"),
        "three\ntwo\nfirst\nmain"
    );
    assert_eq!(session.out("git config remote.origin.url"), url);
    // No hook that git would run is there.
    assert_eq!(session.out("find .git/hooks -type f -perm /111 ! -name '*.sample' 2>/dev/null | wc -l"), "0");
    assert_eq!(
        session.out("echo more > file && git -c user.name=T -c user.email=t@e commit -qam more && git log --format=%s | head -1"),
        "more"
    );

    let cases = [
        (json!({ "git": url, "depth": 1 }), "three\n1"),
        (json!({ "git": url, "ref": "side" }), "one\n1"),
        (json!({ "git": url, "ref": "v1" }), "one\n1"),
        (json!({ "git": url, "ref": first }), "one\n1"),
        (json!({ "git": url, "ref": "main", "depth": 2 }), "three\n2"),
    ];
    for (source, expected) in cases {
        let session = made(&server, &source, json!({ "workdir": "/srv/work/here" }));
        assert_eq!(session.out("cat /srv/work/here/file; git rev-list --count HEAD"), expected, "{source}");
        session.delete();
    }

    // The same key with the same source is the same session, with another source a contradiction.
    let keyed = |reference: &str| create(&server, &json!({ "git": url, "ref": reference }), json!({ "key": "k" }));
    let id = keyed("main").expect(201).json()["id"].clone();
    assert_eq!(keyed("main").expect(200).json()["id"], id);
    assert_eq!(keyed("side").expect(409).problem(), "key_conflict");
    server.delete_all_and_check();
}

#[test]
fn an_archive_is_unpacked_into_the_workdir() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::create_dir_all(dir.path().join("tree/sub")).expect("a directory");
    fs::write(dir.path().join("tree/sub/file"), "content\n").expect("a file");
    std::os::unix::fs::symlink("sub/file", dir.path().join("tree/link")).expect("a link");
    for (name, flag) in [("a.tar", "-cf"), ("b.tar.gz", "-czf")] {
        let done =
            Command::new("tar").arg(flag).arg(dir.path().join(name)).arg("-C").arg(dir.path().join("tree")).arg(".").status();
        assert!(done.expect("tar runs").success());
    }
    let web = Web::serve(dir.path());
    let server = Server::start();
    for (name, workdir) in [("a.tar", "/root/a"), ("b.tar.gz", "/root/b")] {
        let session = made(&server, &json!({ "tar": web.url(name) }), json!({}));
        assert_eq!(session.out("pwd; cat sub/file link"), format!("{workdir}\ncontent\ncontent"), "{name}");
    }
    // On disk it survives what disk survives.
    let session = made(&server, &json!({ "tar": web.url("a.tar") }), json!({ "workdir": "/w" }));
    session.call("stop").expect(200);
    session.call("start").expect(200);
    assert_eq!(session.out("cat /w/link"), "content");
    server.delete_all_and_check();
}

#[test]
fn files_of_the_servers_machine_are_for_administrators_on_its_socket() {
    let dir = tempfile::tempdir().expect("a directory");
    let repo = repository(dir.path());
    let server = Server::start();
    let url = format!("file://{}", repo.display());
    assert_eq!(create(&server, &json!({ "git": url }), json!({})).expect(403).problem(), "forbidden");
    let socket = format!("unix:{}", server.data().join("dormouse.sock").display());
    let made = server
        .cli(&["new", "local", "--source", &format!("{url}#side")])
        .env("DORMOUSE_URL", socket)
        .env_remove("DORMOUSE_TOKEN")
        .output();
    let made = made.expect("the CLI runs");
    assert!(made.status.success(), "{made:?}");
    let id = String::from_utf8_lossy(&made.stdout).trim().to_owned();
    let session = Session::new(server.client.clone(), &json!({ "id": id }));
    assert_eq!(session.out("cat file; git log --format=%s"), "one\nfirst");
    server.delete_all_and_check();
}

#[test]
fn a_source_that_is_wrong_or_hostile_makes_no_session() {
    let dir = tempfile::tempdir().expect("a directory");
    let repo = repository(dir.path());
    let web = Web::serve(dir.path());
    let server = Server::start();
    let url = web.url("git/project");
    let post = |source: Value| create(&server, &source, json!({}));

    for bad in [
        json!({}),
        json!({ "git": url, "tar": url }),
        json!({ "tar": url, "depth": 1 }),
        json!({ "git": url, "depth": 0 }),
        json!({ "git": url, "branch": "x" }),
        json!({ "git": "ext::sh -c 'touch /tmp/evil'" }),
        json!({ "git": "--upload-pack=evil" }),
        json!({ "git": "ssh://127.0.0.1/x" }),
        json!({ "tar": "/etc/passwd" }),
    ] {
        post(bad.clone()).expect(400);
    }
    refused(&server.client, post(json!({ "git": web.url("git/nowhere") })), "nowhere");
    refused(&server.client, post(json!({ "git": url, "ref": "no-such-branch" })), "no-such-branch");
    refused(&server.client, post(json!({ "tar": web.url("nowhere.tar") })), "404");
    refused(&server.client, post(json!({ "git": "http://127.0.0.1:1/x" })), "127.0.0.1:1");
    fs::write(dir.path().join("no.tar"), "this is no archive, whatever it is called".repeat(100)).expect("a file");
    refused(&server.client, post(json!({ "tar": web.url("no.tar") })), "");

    // Archives whose entries lead elsewhere.
    let hostile = "import sys, tarfile, io\nt = tarfile.open(sys.argv[1], 'w')\ndef f(name, **k):\n  i = tarfile.TarInfo(name)\n  \
        d = b'evil'\n  i.size = 0 if k else len(d)\n  for a, v in k.items(): setattr(i, a, v)\n  t.addfile(i, io.BytesIO(d))\n";
    for (number, entries) in
        ["f('../../etc/evil')", "f('l', type=tarfile.SYMTYPE, linkname='/etc'); f('l/evil')"].iter().enumerate()
    {
        let name = format!("hostile{number}.tar");
        let made =
            Command::new("python3").args(["-c", &format!("{hostile}{entries}\nt.close()")]).arg(dir.path().join(&name)).status();
        assert!(made.expect("python runs").success());
        let reply = post(json!({ "tar": web.url(&name) }));
        assert!(!Path::new("/etc/evil").exists());
        if reply.status == 201 && reply.json()["state"] == "running" {
            let session = Session::new(server.client.clone(), &reply.json());
            assert_eq!(session.sh("test -e /etc/evil").code, Some(1), "{entries} left the workdir");
            session.delete();
        } else {
            refused(&server.client, reply, "");
        }
    }

    // A repository whose tree would write its own hook.
    let blob = git(&repo, &["hash-object", "-w", "bin/run"]);
    let tree = |mode: &str, kind: &str, id: &str, name: &str| {
        let mut child = Command::new("git")
            .arg("-C")
            .arg(&repo)
            .arg("mktree")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("git runs");
        std::io::Write::write_all(&mut child.stdin.take().expect("a pipe"), format!("{mode} {kind} {id}\t{name}\n").as_bytes())
            .expect("it reads");
        String::from_utf8(child.wait_with_output().expect("it ends").stdout).expect("a hash").trim().to_owned()
    };
    let hooks = tree("100755", "blob", &blob, "post-checkout");
    let inner = tree("040000", "tree", &hooks, "hooks");
    let root = tree("040000", "tree", &inner, ".git");
    let commit = git(&repo, &["commit-tree", &root, "-m", "evil"]);
    git(&repo, &["update-ref", "refs/heads/evil", &commit]);
    refused(&server.client, post(json!({ "git": url, "ref": "evil" })), "");

    // What failed keeps nothing on the machine.
    server.delete_all_and_check();
    let left = fs::read_dir(server.data().join("tmp")).map(|entries| entries.count()).unwrap_or(0);
    assert_eq!(left, 0);
}
