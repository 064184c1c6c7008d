//! What nobody should send, and what programs inside do wrong: each gets a clear answer, and nothing else is disturbed.

use dormouse_tests::{Server, Session, eventually, http::query};
use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
};

const NO_SUCH: &str = "01890000-0000-7000-8000-000000000000";

/// The problem of an answer: its status, code and detail.
#[track_caller]
fn problem(reply: &dormouse_tests::Reply) -> (u16, String, String) {
    let code = reply.problem();
    let json = reply.json();
    assert_eq!(json["status"], reply.status, "{json}");
    (reply.status, code, json["detail"].as_str().expect("a problem says what happened").to_owned())
}

/// Shows that a session still does its work.
#[track_caller]
fn undisturbed(session: &Session) {
    assert_eq!(session.out("echo well"), "well");
}

#[test]
fn an_unknown_id_is_not_found_on_every_route() {
    let server = Server::start();
    let session = server.session();
    let own = session.path("");
    let gets = [
        format!("/v1/sessions/{NO_SUCH}"),
        "/v1/sessions/no-such-thing".to_owned(),
        "/v1/sessions/%00".to_owned(),
        format!("/v1/sessions/{NO_SUCH}/execs"),
        format!("/v1/sessions/{NO_SUCH}/events"),
        format!("/v1/sessions/{NO_SUCH}/terminals"),
        format!("/v1/sessions/{NO_SUCH}/logs"),
        format!("/v1/sessions/{NO_SUCH}/files?path=/etc/passwd"),
        format!("/v1/sessions/{NO_SUCH}/files/stat?path=/"),
        format!("/v1/sessions/{NO_SUCH}/files/list?path=/"),
        format!("/v1/sessions/{NO_SUCH}/archive?path=/"),
        format!("{own}/execs/{NO_SUCH}"),
        format!("{own}/execs/x"),
        format!("{own}/execs/{NO_SUCH}/output"),
        format!("{own}/terminals/{NO_SUCH}/screen"),
        format!("{own}/terminals/{NO_SUCH}/output"),
        format!("/v1/operations/{NO_SUCH}"),
        format!("/v1/snapshots/{NO_SUCH}"),
        "/v1/snapshots/no-such-thing".to_owned(),
        "/v1/no/such/address".to_owned(),
    ];
    for path in gets {
        let reply = server.client.get(&path);
        assert_eq!((reply.status, reply.problem().as_str()), (404, "not_found"), "{path}: {}", reply.text());
    }
    let posts = [
        (format!("/v1/sessions/{NO_SUCH}/execs"), json!({ "shell": "true" })),
        (format!("/v1/sessions/{NO_SUCH}/terminals"), json!({ "cols": 80, "rows": 24 })),
        (format!("/v1/sessions/{NO_SUCH}/hibernate"), json!({})),
        (format!("/v1/sessions/{NO_SUCH}/wake"), json!({})),
        (format!("/v1/sessions/{NO_SUCH}/snapshots"), json!({})),
        (format!("/v1/sessions/{NO_SUCH}/fork"), json!({})),
        (format!("/v1/sessions/{NO_SUCH}/rollback"), json!({ "snapshot_id": NO_SUCH })),
        (format!("{own}/rollback"), json!({ "snapshot_id": NO_SUCH })),
        (format!("/v1/snapshots/{NO_SUCH}/fork"), json!({})),
        (format!("/v1/sessions/{NO_SUCH}/files/mkdir"), json!({ "path": "/x" })),
        (format!("{own}/execs/{NO_SUCH}/signal"), json!({ "signal": "TERM" })),
    ];
    for (path, body) in posts {
        let reply = server.client.post(&path, &body);
        assert_eq!((reply.status, reply.problem().as_str()), (404, "not_found"), "{path}: {}", reply.text());
    }
    let stdin = server.client.send("POST", &format!("{own}/execs/{NO_SUCH}/stdin"), &[], Some(b"x")).expect("an answer");
    assert_eq!(stdin.expect(404).problem(), "not_found");
    assert_eq!(server.client.delete(&format!("/v1/sessions/{NO_SUCH}")).expect(404).problem(), "not_found");
    let put = server.client.put(&format!("/v1/sessions/{NO_SUCH}/files?path=/x"), b"x");
    assert_eq!(put.expect(404).problem(), "not_found");
    undisturbed(&session);
    server.delete_all_and_check();
}

#[test]
fn malformed_json_is_refused_and_says_where() {
    let server = Server::start();
    let session = server.session();
    let json_body = [("content-type", "application/json")];
    let bodies: [&[u8]; 8] =
        [b"{", b"{\"shell\": }", b"{\"shell\":\n \"a\",,}", b"\xff\xfe", b"[1]", b"\"text\"", b"{} {}", b"{\"shell\":\"a\"} x"];
    for path in ["/v1/sessions".to_owned(), session.path("/execs"), session.path("/terminals"), session.path("/files/mkdir")] {
        for body in bodies {
            let reply = server.client.send("POST", &path, &json_body, Some(body)).expect("an answer");
            let (status, code, detail) = problem(&reply);
            let unknown_is_told_first = code == "unknown_field" && body.starts_with(b"{\"shell");
            assert!(status == 400 && (code == "bad_request" || unknown_is_told_first), "{path} {body:?}: {detail}");
        }
    }
    let reply = server.client.send("POST", "/v1/sessions", &json_body, Some(b"{\"name\":\n \"a\",,}")).expect("an answer");
    assert!(problem(&reply).2.contains("line 2"), "it says where: {}", reply.text());
    for (body, field) in
        [(json!({ "argv": ["a", 7] }), "argv[1]"), (json!({ "shell": "a", "timeout_seconds": -1 }), "timeout_seconds")]
    {
        let reply = server.client.post(&session.path("/execs"), &body).expect(400);
        assert_eq!(reply.json()["field"], field, "{}", reply.text());
    }
    let large = format!("{{\"shell\":\"{}\"}}", "x".repeat(2 << 20));
    let reply = server.client.send("POST", &session.path("/execs"), &json_body, Some(large.as_bytes())).expect("an answer");
    assert_eq!(reply.expect(413).problem(), "too_large");
    let list = server.client.get(&session.path("/execs")).expect(200).json();
    assert_eq!(list["items"], json!([]), "nothing of it was run");
    undisturbed(&session);
    server.delete_all_and_check();
}

#[test]
fn an_unknown_field_is_refused_by_name() {
    let server = Server::start();
    let session = server.session();
    let posts = [
        ("/v1/sessions".to_owned(), json!({ "kee": "x" })),
        ("/v1/sessions".to_owned(), json!({ "resources": { "kee": 1 } })),
        (session.path("/execs"), json!({ "shell": "true", "kee": 1 })),
        (session.path("/terminals"), json!({ "cols": 80, "rows": 24, "kee": 1 })),
        (session.path("/hibernate"), json!({ "kee": 1 })),
        (session.path("/snapshots"), json!({ "kee": 1 })),
        (session.path("/fork"), json!({ "kee": 1 })),
        (session.path("/rollback"), json!({ "snapshot_id": NO_SUCH, "kee": 1 })),
        (session.path("/files/move"), json!({ "from": "/a", "to": "/b", "kee": 1 })),
    ];
    for (path, body) in posts {
        let reply = server.client.post(&path, &body).expect(400);
        assert_eq!((reply.problem().as_str(), &reply.json()["field"]), ("unknown_field", &json!("kee")), "{path} {body}");
    }
    for path in ["/v1/sessions?kee=1".to_owned(), session.path("/files?path=/etc/hostname&kee=1"), session.path("?kee=1")] {
        let reply = server.client.get(&path).expect(400);
        assert_eq!(reply.json()["field"], "kee", "{path}");
    }
    let patched = server.client.patch(&session.path(""), &json!({ "kee": 1 })).expect(400);
    assert_eq!(patched.json()["field"], "kee");
    assert_eq!(session.state(), "running", "the refused hibernate did nothing");
    let list = server.client.get("/v1/sessions").expect(200).json();
    assert_eq!(list["items"].as_array().map(Vec::len), Some(1), "no session was made by a refused request");
    server.delete_all_and_check();
}

#[test]
fn a_path_with_dots_or_a_nul_is_refused() {
    let server = Server::start();
    let session = server.session();
    let check = |session: &Session| {
        for bad in ["..", "/..", "/root/../etc/passwd", "/root/..", "a/../../b", "/a\0b", "\0", ""] {
            let bad = query(bad);
            for get in ["files?path=", "files/stat?path=", "files/list?path=", "archive?path=", "files/watch?path="] {
                let reply = session.client.get(&session.path(&format!("/{get}{bad}")));
                assert_eq!((reply.status, reply.problem().as_str()), (400, "bad_request"), "{get}{bad}: {}", reply.text());
                assert_eq!(reply.json()["field"], "path", "{get}{bad}");
            }
        }
    };
    check(&session);
    for bad in ["/root/../x", "/x\0y"] {
        assert_eq!(session.write_file(bad, b"x").expect(400).problem(), "bad_request");
        assert_eq!(
            session.client.put(&session.path(&format!("/archive?path={}", query(bad))), b"").expect(400).problem(),
            "bad_request"
        );
        assert_eq!(
            session.client.delete(&session.path(&format!("/files?path={}", query(bad)))).expect(400).problem(),
            "bad_request"
        );
        let mkdir = session.client.post(&session.path("/files/mkdir"), &json!({ "path": bad, "parents": true }));
        assert_eq!(mkdir.expect(400).problem(), "bad_request");
        for body in [json!({ "from": bad, "to": "/y" }), json!({ "from": "/etc/hostname", "to": bad })] {
            assert_eq!(session.client.post(&session.path("/files/move"), &body).expect(400).problem(), "bad_request");
        }
    }
    // Dots that are part of a name are a name.
    session.write_file("/root/..a..", b"dots").expect(204);
    assert_eq!(session.read_file("/root/..a..").expect(200).body, b"dots");
    session.hibernate();
    check(&session);
    assert_eq!(session.read_file("/root/..a..").expect(200).body, b"dots");
    assert_eq!(session.state(), "hibernated", "none of it woke the session");
    server.delete_all_and_check();
}

#[test]
fn a_link_out_of_the_root_leads_nowhere_running_or_asleep() {
    let server = Server::start();
    let session = server.session();
    let outside = tempfile::Builder::new().prefix("dormouse-outside-").tempdir().expect("a directory");
    let (secret, word) = (outside.path().join("secret"), "a secret of the host");
    std::fs::write(&secret, word).expect("a file of the host");
    let secret = secret.to_str().expect("a plain path");
    let up = "../".repeat(40);
    let token = server.data().join("admin.token");
    let token = token.to_str().expect("a plain path");
    let dir = outside.path().to_str().expect("a plain path");
    session.out(&format!(
        "mkdir /root/l; cd /root/l; ln -s {secret} absolute; ln -s {up}{secret} relative; ln -s {token} token
         ln -s {dir} dir; ln -s {up} up; ln -s / top; ln -s /proc/self/root{secret} magic; ln -s /proc/1/root/ magicdir
         ln -s loop loop; ln -s /dev/zero device; mkfifo fifo; echo inside > plain; ln -s /root/l/plain good; echo own > /etc/own"
    ));
    let check = |session: &Session| {
        let leads = [
            "absolute",
            "relative",
            "token",
            "magic",
            "dir/secret",
            &format!("up{secret}"),
            &format!("top{secret}"),
            &format!("magicdir{secret}"),
            &format!("up/up/{token}"),
        ]
        .map(|name| format!("/root/l/{name}"));
        for path in &leads {
            let reply = session.read_file(path);
            assert_eq!((reply.status, reply.problem().as_str()), (404, "not_found"), "{path}: {}", reply.text());
            let archive = session.client.get(&session.path(&format!("/archive?path={}", query(path))));
            assert!(!archive.text().contains(word), "{path}");
        }
        let list = session.client.get(&session.path("/files/list?path=/root/l/dir&depth=3"));
        assert!(list.status == 404 || list.status == 422, "{}", list.text());
        assert!(!session.client.get(&session.path("/archive?path=/root/l")).expect(200).text().contains(word));
        // Links are read in the session's own root.
        assert_eq!(session.read_file("/root/l/good").expect(200).text(), "inside\n");
        assert_eq!(session.read_file("/root/l/top/etc/own").expect(200).text(), "own\n");
        assert_eq!(session.read_file("/root/l/up/etc/own").expect(200).text(), "own\n");
        let looped = session.read_file("/root/l/loop");
        assert_eq!((looped.status, looped.problem().as_str()), (400, "bad_request"), "{}", looped.text());
        for odd in ["device", "fifo"] {
            let reply = session.read_file(&format!("/root/l/{odd}"));
            assert!(matches!(reply.status, 404 | 422), "{odd} is never read: {}", reply.text());
        }
        let stat = session.client.get(&session.path("/files/stat?path=/root/l/absolute")).expect(200).json();
        assert_eq!((&stat["type"], &stat["target"]), (&json!("symlink"), &json!(secret)), "the link itself can be seen");
    };
    check(&session);
    assert_eq!(session.write_file("/root/l/absolute", b"overwritten").expect(404).problem(), "not_found");
    session.hibernate();
    check(&session);
    assert_eq!(session.state(), "hibernated");
    assert_eq!(std::fs::read_to_string(secret).expect("it is still there"), word);
    server.delete_all_and_check();
}

#[test]
fn a_name_of_255_bytes_or_with_a_newline_is_a_name() {
    let server = Server::start();
    let session = server.session();
    let names = [
        "n".repeat(255),
        "é".repeat(127),
        "new\nline".to_owned(),
        " ".to_owned(),
        "-rf".to_owned(),
        "\u{1b}[31m'\"$(x)`%2e%".to_owned(),
    ];
    session.out("mkdir /root/n");
    for name in &names {
        let path = format!("/root/n/{name}");
        session.write_file(&path, name.as_bytes()).expect(204);
    }
    let check = |session: &Session| {
        for name in &names {
            let path = format!("/root/n/{name}");
            assert_eq!(session.read_file(&path).expect(200).body, name.as_bytes(), "{name:?}");
            let stat = session.client.get(&session.path(&format!("/files/stat?path={}", query(&path)))).expect(200).json();
            assert_eq!((&stat["path"], &stat["size_bytes"]), (&json!(path), &json!(name.len())));
        }
        let list = session.client.get(&session.path("/files/list?path=/root/n")).expect(200).json();
        let mut listed: Vec<String> = list["items"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|item| item["path"].as_str().expect("a path").to_owned())
            .collect();
        let mut expected: Vec<String> = names.iter().map(|name| format!("/root/n/{name}")).collect();
        listed.sort();
        expected.sort();
        assert_eq!(listed, expected);
        let long = session.read_file(&format!("/root/n/{}", "n".repeat(256)));
        assert!(matches!(long.status, 400 | 404), "{}", long.text());
    };
    check(&session);
    let long = session.write_file(&format!("/root/n/{}", "n".repeat(256)), b"x");
    assert_eq!(long.expect(400).problem(), "bad_request");
    let deep = session.write_file(&format!("/root/{}", "d/".repeat(3000)), b"x");
    assert_eq!(deep.expect(400).problem(), "bad_request");
    session.hibernate();
    check(&session);
    session.wake();
    for name in &names {
        session.client.delete(&session.path(&format!("/files?path={}", query(&format!("/root/n/{name}"))))).expect(204);
    }
    assert_eq!(session.out("ls -A /root/n | wc -l"), "0");
    server.delete_all_and_check();
}

/// Reads a stream to its end: how many bytes, the hash, and the last bytes.
fn drain(mut stream: impl Read) -> (u64, blake3::Hash, Vec<u8>) {
    let (mut hasher, mut total, mut last, mut buffer) = (blake3::Hasher::new(), 0_u64, Vec::new(), vec![0; 1 << 20]);
    loop {
        let read = stream.read(&mut buffer).expect("the stream goes on to its end");
        if read == 0 {
            return (total, hasher.finalize(), last);
        }
        hasher.update(&buffer[..read]);
        total += read as u64;
        last.extend_from_slice(&buffer[..read]);
        last.drain(..last.len().saturating_sub(16));
    }
}

/// Sends a PUT by hand: the announced length, `chunks` of bytes, and the answer's status line where one comes.
fn put_by_hand(session: &Session, path: &str, length: Option<u64>, chunks: impl Iterator<Item = Vec<u8>>, whole: bool) -> String {
    let host = session.client.base.trim_start_matches("http://");
    let mut link = TcpStream::connect(host).expect("the server listens");
    let encoding = length.map_or("transfer-encoding: chunked".to_owned(), |length| format!("content-length: {length}"));
    let target = session.path(&format!("/files?path={}", query(path)));
    let head = format!(
        "PUT {target} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {}\r\n{encoding}\r\nconnection: close\r\n\r\n",
        session.client.token
    );
    link.write_all(head.as_bytes()).expect("the head is taken");
    for chunk in chunks {
        let sent = match length {
            Some(_) => link.write_all(&chunk),
            None => link
                .write_all(format!("{:x}\r\n", chunk.len()).as_bytes())
                .and_then(|()| link.write_all(&chunk))
                .and_then(|()| link.write_all(b"\r\n")),
        };
        sent.expect("the body is taken");
    }
    if !whole {
        link.shutdown(Shutdown::Write).expect("half of the link is closed");
    }
    let mut answer = Vec::new();
    // A server may cut the link instead of an answer: that is one, too.
    let _ = link.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned()
}

#[test]
fn an_empty_file_and_a_huge_one_go_in_and_out_whole() {
    let server = Server::start();
    let session = server.session();
    session.write_file("/root/empty", b"").expect(204);
    assert_eq!(session.read_file("/root/empty").expect(200).body, b"");
    assert_eq!(session.out("stat -c %s /root/empty"), "0");
    let block: Vec<u8> = (0..1_u32 << 18).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let mebibytes: u64 = if dormouse_tests::long() { 2048 } else { 300 };
    let mut hasher = blake3::Hasher::new();
    for _ in 0..mebibytes {
        hasher.update(&block);
    }
    let hash = hasher.finalize();
    let size = mebibytes << 20;
    let answer = put_by_hand(&session, "/root/huge", Some(size), (0..mebibytes).map(|_| block.clone()), true);
    assert!(answer.contains(" 204"), "{answer}");
    let stat = session.client.get(&session.path("/files/stat?path=/root/huge")).expect(200).json();
    assert_eq!(stat["size_bytes"], size);
    let read = || drain(session.client.stream(&session.path("/files?path=/root/huge"), "*/*").expect("an answer"));
    let (total, read_hash, _) = read();
    assert_eq!((total, read_hash), (size, hash));
    // A hole of 2 GiB has a beginning, a middle and an end.
    session.out("truncate -s 2147483647 /root/sparse; printf end >> /root/sparse; rm -f /root/other");
    let sparse = || {
        let range = session.path("/files?path=/root/sparse&offset=2147483640");
        assert_eq!(session.client.get(&range).expect(200).body, b"\0\0\0\0\0\0\0end");
        let past = session.client.get(&session.path("/files?path=/root/sparse&offset=2147483650")).expect(200);
        assert_eq!(past.body, b"");
    };
    sparse();
    let (total, _, last) = drain(session.client.stream(&session.path("/files?path=/root/sparse"), "*/*").expect("an answer"));
    assert_eq!((total, &last[..]), (2_147_483_650, &b"\0\0\0\0\0\0\0\0\0\0\0\0\0end"[..]));
    session.hibernate();
    assert_eq!(session.read_file("/root/empty").expect(200).body, b"");
    let (total, read_hash, _) = read();
    assert_eq!((total, read_hash), (size, hash), "asleep it is the same");
    sparse();
    server.delete_all_and_check();
}

#[test]
fn a_body_cut_off_half_way_leaves_the_old_file() {
    let server = Server::start();
    let session = server.session();
    session.write_file("/root/kept", b"the old file").expect(204);
    let cut = |length: Option<u64>, path: &str| {
        let answer = put_by_hand(&session, path, length, (0..3).map(|_| vec![b'x'; 200_000]), false);
        assert!(!answer.contains(" 20"), "what came half is never taken: {answer}");
    };
    for length in [Some(10_000_000), None] {
        cut(length, "/root/kept");
        cut(length, "/root/new");
    }
    // A link that is simply gone, without a goodbye.
    let host = session.client.base.trim_start_matches("http://");
    let mut link = TcpStream::connect(host).expect("the server listens");
    let head = format!(
        "PUT {} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {}\r\ncontent-length: 9000000\r\n\r\n",
        session.path("/files?path=/root/kept"),
        session.client.token
    );
    link.write_all(head.as_bytes()).and_then(|()| link.write_all(&[b'y'; 100_000])).expect("the server reads");
    drop(link);
    eventually("the temporary files are gone", || {
        (session.out("ls -A /root") == session.out("ls -A /root | grep -v dormouse")).then_some(())
    });
    assert_eq!(session.read_file("/root/kept").expect(200).text(), "the old file");
    assert_eq!(session.read_file("/root/new").expect(404).problem(), "not_found");
    // Half an archive is no archive.
    session.out("mkdir /root/t; head -c 300000 /dev/urandom > /root/t/f");
    let tar = session.client.get(&session.path("/archive?path=/root/t")).expect(200).body;
    let reply = session.client.put(&session.path("/archive?path=/root/half"), &tar[..tar.len() / 2]);
    assert_eq!(reply.status / 100, 4, "{}", reply.text());
    undisturbed(&session);
    server.delete_all_and_check();
}

/// How an exec that couldn't be started ended: code, reason and what it says.
#[track_caller]
fn refusal(session: &Session, body: &Value) -> (Option<i64>, String, String) {
    let exec = session.exec_with(body);
    assert_eq!((&exec.json["state"], exec.stdout.as_str()), (&json!("exited"), ""), "{}", exec.json);
    assert!(!exec.json["ended_at"].is_null(), "{}", exec.json);
    (exec.code, exec.json["reason"].as_str().unwrap_or_default().to_owned(), exec.stderr)
}

#[test]
fn a_command_that_does_not_exist_is_127_and_one_that_cannot_run_126() {
    let server = Server::start();
    let session = server.session();
    session.out("printf '#!/no/such/interpreter\\n' > /root/script; chmod 755 /root/script; printf '\\177ELFgarbage' > /root/broken; chmod 755 /root/broken; touch /root/plain");
    for (program, code, reason) in [
        ("no-such-program", 127, "not_found"),
        ("/no/such/program", 127, "not_found"),
        ("/etc/hostname/x", 127, "not_found"),
        ("/root/script", 127, "not_found"),
        ("/root/plain", 126, "not_executable"),
        ("/etc", 126, "not_executable"),
    ] {
        let (got, why, message) = refusal(&session, &json!({ "argv": [program] }));
        assert_eq!((got, why.as_str()), (Some(code), reason), "{program}: {message}");
        assert!(message.contains(program), "it says which: {message}");
    }
    let (code, _, message) = refusal(&session, &json!({ "argv": ["/root/broken"] }));
    assert!(matches!(code, Some(126 | 127)) && !message.is_empty(), "{code:?} {message}");
    let (code, reason, message) = refusal(&session, &json!({ "argv": ["true"], "user": "nobody-like-that" }));
    assert_eq!((code, reason.as_str()), (Some(126), "unknown_user"));
    assert!(message.contains("nobody-like-that"), "{message}");
    let exec = session.sh("no-such-program");
    assert_eq!(exec.code, Some(127));
    assert!(exec.stderr.contains("no-such-program"), "{}", exec.stderr);
    // What was refused can be looked up like everything that ran.
    let detached = server.client.post(&session.path("/execs"), &json!({ "argv": ["no-such-program"] })).expect(201).json();
    let shown = session.ended(detached["id"].as_str().expect("an id"));
    assert_eq!((&shown["exit_code"], &shown["reason"]), (&json!(127), &json!("not_found")));
    // The command line tells it the same way.
    for (program, code) in [("no-such-program", 127), ("/root/plain", 126)] {
        let output = server.cli(&["exec", &session.id, "--", program]).output().expect("the command runs");
        assert_eq!(output.status.code(), Some(code));
        assert!(String::from_utf8_lossy(&output.stderr).contains(program), "{output:?}");
    }
    undisturbed(&session);
    server.delete_all_and_check();
}

#[test]
fn a_working_directory_that_does_not_exist_is_named() {
    let server = Server::start();
    let session = server.session();
    for cwd in ["/no/such/directory", "/etc/hostname", "relative"] {
        let (code, reason, message) = refusal(&session, &json!({ "argv": ["true"], "cwd": cwd }));
        assert_eq!((code, reason.as_str()), (Some(126), "bad_working_directory"), "{message}");
        assert!(message.contains(cwd), "{message}");
    }
    assert_eq!(session.exec_with(&json!({ "argv": ["pwd"], "cwd": "/usr/bin" })).stdout, "/usr/bin\n");
    server.delete_all_and_check();
}

#[test]
fn a_hundred_megabytes_without_a_newline_are_kept_and_delay_nobody() {
    let server = Server::start();
    let session = server.session();
    let huge = session.start_sh("head -c 100000000 /dev/zero | tr '\\0' x; printf end");
    undisturbed(&session);
    let exec = session.ended(&huge);
    assert_eq!((&exec["exit_code"], &exec["stdout_bytes"]), (&json!(0), &json!(100_000_003)), "{exec}");
    let path = session.path(&format!("/execs/{huge}/output?stream=stdout&from=0"));
    let mut expected = blake3::Hasher::new();
    for _ in 0..100 {
        expected.update(&[b'x'; 1_000_000]);
    }
    expected.update(b"end");
    let (total, hash, _) = drain(server.client.stream(&path, "application/octet-stream").expect("an answer"));
    assert_eq!((total, hash), (100_000_003, expected.finalize()));
    let waited = session.sh("head -c 3000000 /dev/zero | tr '\\0' x");
    assert_eq!((waited.stdout.len(), &waited.json["stdout_truncated"]), (1 << 20, &json!(true)));
    assert_eq!(waited.json["stdout_bytes"], 3_000_000);
    // A log has lines; one without an end comes in pieces, none of them endless.
    let logs = server.client.get(&session.path("/logs")).expect(200);
    let longest = logs.body.split(|byte| *byte == b'\n').map(<[u8]>::len).max();
    assert!(longest.is_some_and(|longest| longest < 8 << 20), "{longest:?}");
    undisturbed(&session);
    server.delete_all_and_check();
}

/// The bytes of one stream in NDJSON lines, which must follow each other.
#[track_caller]
fn joined(lines: &[Value], stream: &str) -> Vec<u8> {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let mut all = Vec::new();
    for line in lines.iter().filter(|line| line["stream"] == stream) {
        assert_eq!(line["offset"], all.len(), "{line}");
        all.extend(STANDARD.decode(line["data_b64"].as_str().expect("data")).expect("base64"));
    }
    all
}

#[test]
fn invalid_utf8_is_kept_byte_by_byte() {
    let server = Server::start();
    let session = server.session();
    let every: Vec<u8> = (0..=255).collect();
    session.write_file("/root/every", &every).expect(204);
    let exec = session.sh("cat /root/every; cat /root/every >&2");
    assert_eq!(exec.stdout, String::from_utf8_lossy(&every), "shown with U+FFFD in JSON");
    for stream in ["stdout", "stderr"] {
        assert_eq!(session.output(&exec.id, stream), every, "{stream}");
    }
    let reply = server.client.get(&session.path(&format!("/execs/{}/output", exec.id))).expect(200);
    let lines: Vec<Value> = reply.text().lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!((joined(&lines, "stdout"), joined(&lines, "stderr")), (every.clone(), every));
    let last = lines.last().expect("there are lines");
    assert_eq!((&last["stream"], &last["exit_code"]), (&json!("exit"), &json!(0)));
    server.client.get(&session.path("/logs")).expect(200);
    server.delete_all_and_check();
}

#[test]
fn output_split_inside_a_character_comes_together_again() {
    let server = Server::start();
    let session = server.session();
    let exec = session.start_sh("mkfifo /tmp/go; printf 'caf\\303'; cat /tmp/go > /dev/null; printf '\\251!'");
    eventually("the first half is there", || (session.output(&exec, "stdout") == b"caf\xc3").then_some(()));
    session.out("echo > /tmp/go");
    session.ended(&exec);
    assert_eq!(session.output(&exec, "stdout"), "café!".as_bytes());
    let line = eventually("it is in the log", || {
        let logs = server.client.get(&session.path("/logs")).expect(200).text();
        logs.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).find(|line| line["text"] == "café!")
    });
    assert_eq!(line["stream"], "stdout");
    // The first MiB of an answer ends before a character that doesn't fit, not in its middle.
    let long = session.sh("printf a; head -c 1000000 /dev/zero | sed 's/\\x0/é/g'");
    assert_eq!(long.json["stdout_truncated"], true);
    assert_eq!((long.stdout.len(), long.stdout.ends_with('é')), ((1 << 20) - 1, true));
    server.delete_all_and_check();
}

#[test]
fn cat_without_an_input_sees_its_end() {
    let server = Server::start();
    let session = server.session();
    let exec = session.exec_with(&json!({ "argv": ["cat"] }));
    assert_eq!((exec.code, exec.stdout.as_str(), exec.stderr.as_str()), (Some(0), "", ""));
    let given = session.exec_with(&json!({ "argv": ["cat"], "stdin": "given" }));
    assert_eq!((given.code, given.stdout.as_str()), (Some(0), "given"));
    let empty = session.exec_with(&json!({ "argv": ["cat"], "stdin": "" }));
    assert_eq!((empty.code, empty.stdout.as_str()), (Some(0), ""));
    let closed = session.exec_with(&json!({ "argv": ["cat"], "stdin": false }));
    assert_eq!((closed.code, closed.stdout.as_str()), (Some(0), ""));
    server.delete_all_and_check();
}

#[test]
fn of_two_execs_a_stuck_one_does_not_hold_the_other() {
    let server = Server::start();
    let session = server.session();
    let silent = session.start_sh("sleep infinity");
    let reader = server.client.post(&session.path("/execs"), &json!({ "argv": ["cat"], "stdin": true })).expect(201).json();
    let stopped = session.start_sh("kill -STOP $$; echo never");
    // Somebody waits for the stuck one, too.
    let (waiting, id) = (session.clone(), silent.clone());
    let waiter = std::thread::spawn(move || {
        let path = waiting.path(&format!("/execs/{id}/output?follow=true"));
        let mut text = String::new();
        waiting
            .client
            .stream(&path, "application/x-ndjson")
            .expect("an answer")
            .read_to_string(&mut text)
            .expect("a whole answer");
        text
    });
    assert_eq!(session.out("seq 1 3 | paste -sd+"), "1+2+3");
    undisturbed(&session);
    for id in [&silent, &stopped, &reader["id"].as_str().expect("an id").to_owned()] {
        assert_eq!(session.exec(id)["state"], "running");
        let path = session.path(&format!("/execs/{id}/signal"));
        server.client.post(&path, &json!({ "signal": "KILL" })).expect(200);
        let ended = session.ended(id);
        assert_eq!((&ended["state"], &ended["signal"]), (&json!("killed"), &json!(9)), "{ended}");
    }
    assert!(waiter.join().expect("the waiter ends").contains("\"killed\""));
    undisturbed(&session);
    server.delete_all_and_check();
}
