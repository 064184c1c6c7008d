//! Files of a session over HTTP: everything while it runs, reading while it sleeps, which never wakes it.

use dormouse_tests::{Reply, Server, Session, eventually, http::query};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc,
};

#[track_caller]
fn get(session: &Session, what: &str, path: &str) -> Reply {
    session.client.get(&session.path(&format!("/{what}path={}", query(path))))
}

#[track_caller]
fn stat(session: &Session, path: &str) -> Value {
    get(session, "files/stat?", path).expect(200).json()
}

/// The paths below `path`, sorted.
#[track_caller]
fn list(session: &Session, path: &str, depth: u32) -> Vec<String> {
    let answer = get(session, &format!("files/list?depth={depth}&"), path).expect(200).json();
    assert_eq!(answer["next_cursor"], Value::Null);
    let items = answer["items"].as_array().expect("a list");
    let mut paths: Vec<String> = items.iter().map(|item| item["path"].as_str().expect("a path").to_owned()).collect();
    paths.sort();
    paths
}

#[track_caller]
fn post(session: &Session, what: &str, body: &Value) -> Reply {
    session.client.post(&session.path(&format!("/files/{what}")), body)
}

#[track_caller]
fn remove(session: &Session, path: &str, more: &str) -> Reply {
    session.client.delete(&session.path(&format!("/files?path={}{more}", query(path))))
}

#[test]
fn a_file_that_is_put_is_read_back_with_its_mode_and_ranges() {
    let server = Server::start();
    let session = server.session();
    session.write_file("/root/a", b"0123456789").expect(204);
    assert_eq!(session.out("cat /root/a; stat -c ' %a %U' /root/a"), "0123456789 644 root");
    let read = session.read_file("/root/a").expect(200);
    assert_eq!((read.body.as_slice(), read.content_type.as_str()), (&b"0123456789"[..], "application/octet-stream"));
    let header = |name: &str| read.header(name).unwrap_or_default().to_owned();
    assert_eq!((header("content-security-policy").as_str(), header("x-content-type-options").as_str()), ("sandbox", "nosniff"));
    assert!(header("content-disposition").starts_with("attachment"), "{:?}", read.headers);
    assert_eq!(get(&session, "files?offset=2&length=3&", "/root/a").expect(200).body, b"234");
    assert_eq!(get(&session, "files?offset=8&length=9&", "/root/a").expect(200).body, b"89");
    // A replaced file keeps its mode and owner; one that is asked for wins.
    session.out("chmod 750 /root/a; chown 65534:65534 /root/a");
    session.write_file("/root/a", b"new").expect(204);
    assert_eq!(session.out("cat /root/a; stat -c ' %a %u' /root/a"), "new 750 65534");
    session.client.put(&session.path("/files?path=/root/a&mode=600"), b"x").expect(204);
    assert_eq!(session.out("stat -c %a /root/a"), "600");
    assert_eq!(session.client.put(&session.path("/files?path=/root/a&mode=9"), b"x").expect(400).problem(), "bad_request");
    // Missing parents are made where that is asked for.
    assert_eq!(session.write_file("/root/p/q/r", b"x").expect(404).problem(), "not_found");
    session.client.put(&session.path("/files?path=/root/p/q/r&parents=true"), b"x").expect(204);
    assert_eq!(session.out("cat /root/p/q/r"), "x");
    // A relative path begins at the root.
    assert_eq!(session.read_file("root/p/q/r").expect(200).body, b"x");
    // A directory or device is no file.
    for (path, status) in [("/root", 422), ("/dev/null", 422), ("/root/p/q/r/s", 422), ("/none", 404)] {
        assert_eq!(session.read_file(path).status, status, "{path}");
        if path != "/none" {
            assert_eq!(session.write_file(path, b"x").status, status, "{path}");
        }
    }
    // Links are written through, also where nothing stands behind them yet.
    session.out("ln -s /root/target /root/link");
    session.write_file("/root/link", b"first").expect(204);
    session.write_file("/root/link", b"second").expect(204);
    assert_eq!(session.out("readlink /root/link; cat /root/target"), "/root/target\nsecond");
    let written = session.event("files.written");
    assert_eq!((&written["data"]["path"], &written["actor"]), (&json!("/root/link"), &json!("token:admin")), "{written}");
    server.delete_all_and_check();
}

#[test]
fn a_put_is_seen_whole_or_not_at_all() {
    let server = Server::start();
    let session = server.session();
    let (a, b) = (vec![b'a'; 3_000_000], vec![b'b'; 3_000_000]);
    session.write_file("/root/f", &a).expect(204);
    // Somebody inside reads it over and over, and says whenever it is anything but one of the two.
    let reader = session.start_sh(
        "echo ready; while [ ! -e /root/stop ]; do h=$(tr -d 'a' < /root/f | head -c1)$(tr -d 'b' < /root/f | head -c1); \
         s=$(stat -c %s /root/f); [ \"$s\" = 3000000 ] || echo \"size $s\"; \
         python3 -c \"d = open('/root/f', 'rb').read(); print('mixed') if len(set(d)) != 1 or len(d) != 3000000 else None\"; done; echo done",
    );
    eventually("the reader reads", || session.output(&reader, "stdout").starts_with(b"ready").then_some(()));
    for round in 0..10 {
        session.write_file("/root/f", if round % 2 == 0 { &b } else { &a }).expect(204);
        let read = session.read_file("/root/f").expect(200).body;
        assert!(read == a || read == b);
    }
    session.write_file("/root/stop", b"").expect(204);
    session.ended(&reader);
    assert_eq!(String::from_utf8_lossy(&session.output(&reader, "stdout")), "ready\ndone\n");
    assert_eq!(
        session.out("ls -A /root | sort | paste -sd' '").split(' ').filter(|name| name.starts_with(".dormouse")).count(),
        0
    );
    server.delete_all_and_check();
}

#[test]
fn what_is_known_of_a_file_is_the_same_running_and_asleep() {
    let server = Server::start();
    let session = server.session();
    session.out(
        "mkdir -p /root/d/e/f; echo 12345 > /root/d/file; chown 7:8 /root/d/file; chmod 4711 /root/d/file; touch -d '2020-01-02 03:04:05.678 UTC' /root/d/file
         ln -s file /root/d/link; ln -s /nowhere /root/d/dangling; ln -s e /root/d/dirlink; echo x > /root/d/e/f/deep; rm -rf /var/backups; echo new > /etc/motd",
    );
    let look = |session: &Session| {
        let file = stat(session, "/root/d/file");
        let expected = json!({
            "path": "/root/d/file", "type": "file", "size_bytes": 6, "mode": 0o4711, "uid": 7, "gid": 8,
            "modified_at": "2020-01-02T03:04:05.678Z", "target": null,
        });
        assert_eq!(file, expected);
        let link = stat(session, "/root/d/link");
        assert_eq!((&link["type"], &link["target"]), (&json!("symlink"), &json!("file")));
        let followed = get(session, "files/stat?follow=true&", "/root/d/link").expect(200).json();
        assert_eq!((&followed["type"], &followed["size_bytes"], &followed["target"]), (&json!("file"), &json!(6), &Value::Null));
        assert_eq!(get(session, "files/stat?follow=true&", "/root/d/dangling").status, 404);
        assert_eq!(get(session, "files/stat?follow=true&", "/root/d/dirlink").expect(200).json()["type"], "dir");
        assert_eq!(stat(session, "/root/d")["type"], "dir");
        assert_eq!(stat(session, "/")["type"], "dir");
        assert_eq!(get(session, "files/stat?", "/none").expect(404).problem(), "not_found");
        assert_eq!(get(session, "files/stat?", "/root/d/file/x").expect(422).problem(), "wrong_file_type");
        let names = |names: &[&str]| names.iter().map(|name| format!("/root/d/{name}")).collect::<Vec<_>>();
        assert_eq!(list(session, "/root/d", 1), names(&["dangling", "dirlink", "e", "file", "link"]));
        assert_eq!(list(session, "/root/d", 2), names(&["dangling", "dirlink", "e", "e/f", "file", "link"]));
        assert_eq!(list(session, "/root/d", 9), names(&["dangling", "dirlink", "e", "e/f", "e/f/deep", "file", "link"]));
        assert_eq!(get(session, "files/list?depth=0&", "/root/d").expect(400).problem(), "bad_request");
        assert_eq!(get(session, "files/list?", "/root/d/file").expect(422).problem(), "wrong_file_type");
        assert_eq!(get(session, "files/list?", "/none").expect(404).problem(), "not_found");
        assert_eq!(session.read_file("/root/d/dirlink/f/deep").expect(200).text(), "x\n");
        assert_eq!(session.read_file("/etc/motd").expect(200).text(), "new\n", "changed in the session's own layer");
        assert_eq!(get(session, "files/stat?", "/var/backups").status, 404, "deleted from the template for this session");
        assert_eq!(stat(session, "/bin/sh")["path"], "/bin/sh", "a file of the template");
        session.read_file("/etc/passwd").expect(200)
    };
    let awake = look(&session);
    let before = session.show();
    session.hibernate();
    let asleep = look(&session);
    assert_eq!(awake.body, asleep.body);
    let after = session.show();
    assert_eq!((&after["state"], &after["generation"]), (&json!("hibernated"), &before["generation"]));
    // A watch needs a sandbox; reading elsewhere never starts one.
    assert_eq!(get(&session, "files/watch?", "/root").expect(422).problem(), "not_running");
    assert_eq!(session.state(), "hibernated");
    // A write wakes it.
    session.write_file("/root/d/file", b"woken").expect(204);
    assert_eq!(session.state(), "running");
    assert_eq!(session.out("cat /root/d/file"), "woken");
    // A stopped session is read the same way, and a write needs leave to start it.
    session.call("stop").expect(200);
    assert_eq!(session.read_file("/root/d/file").expect(200).text(), "woken");
    assert_eq!(session.write_file("/root/d/file", b"x").expect(422).problem(), "not_running");
    session.client.put(&session.path("/files?path=/root/d/file&start=true"), b"started").expect(204);
    assert_eq!((session.state().as_str(), session.out("cat /root/d/file").as_str()), ("running", "started"));
    server.delete_all_and_check();
}

#[test]
fn directories_are_made_moved_and_deleted() {
    let server = Server::start();
    let session = server.session();
    post(&session, "mkdir", &json!({ "path": "/root/a" })).expect(204);
    assert_eq!(post(&session, "mkdir", &json!({ "path": "/root/a" })).expect(409).problem(), "conflict");
    assert_eq!(post(&session, "mkdir", &json!({ "path": "/root/x/y" })).expect(404).problem(), "not_found");
    for _ in 0..2 {
        post(&session, "mkdir", &json!({ "path": "/root/x/y", "parents": true })).expect(204);
    }
    session.write_file("/root/x/y/f", b"f").expect(204);
    assert_eq!(
        post(&session, "mkdir", &json!({ "path": "/root/x/y/f", "parents": true })).expect(422).problem(),
        "wrong_file_type"
    );
    post(&session, "move", &json!({ "from": "/root/x", "to": "/root/a/z" })).expect(204);
    assert_eq!(session.out("cat /root/a/z/y/f; ls /root | paste -sd' '"), "fa");
    session.write_file("/root/g", b"g").expect(204);
    post(&session, "move", &json!({ "from": "/root/g", "to": "/root/a/z/y/f" })).expect(204);
    assert_eq!(session.read_file("/root/a/z/y/f").expect(200).body, b"g", "a move replaces a file");
    assert_eq!(post(&session, "move", &json!({ "from": "/root/none", "to": "/root/n" })).expect(404).problem(), "not_found");
    let into_itself = post(&session, "move", &json!({ "from": "/root/a", "to": "/root/a/z/b" }));
    assert_eq!(into_itself.expect(400).problem(), "bad_request");
    let far = post(&session, "move", &json!({ "from": "/root/a", "to": "/tmp/a" }));
    assert_eq!(far.status / 100, 4, "another file system inside: {}", far.text());
    // A directory of the template can be renamed, too.
    let before =
        session.out("find /usr/share/doc -type f | sort | head -n 20 | xargs cat | sha256sum; find /usr/share/doc | wc -l");
    post(&session, "move", &json!({ "from": "/usr/share/doc", "to": "/usr/share/docs" })).expect(204);
    session.hibernate();
    assert_eq!(get(&session, "files/stat?", "/usr/share/doc").status, 404);
    assert_eq!(stat(&session, "/usr/share/docs")["type"], "dir");
    assert!(!list(&session, "/usr/share/docs", 1).is_empty(), "a renamed directory is read from its origin while asleep");
    session.wake();
    assert_eq!(
        session.out("find /usr/share/docs -type f | sort | head -n 20 | xargs cat | sha256sum; find /usr/share/docs | wc -l"),
        before
    );
    assert_eq!(remove(&session, "/root/a", "").expect(409).problem(), "conflict");
    remove(&session, "/root/a", "&recursive=true").expect(204);
    assert_eq!(remove(&session, "/root/a", "&recursive=true").expect(404).problem(), "not_found");
    session.out("echo kept > /root/kept; ln -s /root/kept /root/l; mkdir /root/d; ln -s /etc /root/d/etc");
    remove(&session, "/root/l", "").expect(204);
    remove(&session, "/root/d", "&recursive=true").expect(204);
    assert_eq!(
        session.out("cat /root/kept; test -e /etc/passwd && echo yes"),
        "kept\nyes",
        "links are deleted, not what they lead to"
    );
    server.delete_all_and_check();
}

/// One server-sent event's fields.
#[derive(Debug, Default)]
struct Event {
    name: String,
    data: Value,
}

/// The events of a stream, read by a thread until the stream ends.
fn events(stream: impl std::io::Read + Send + 'static) -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut event = Event::default();
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if let Some(name) = line.strip_prefix("event: ") {
                event.name = name.to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                event.data = serde_json::from_str(data).expect("JSON");
            } else if line.is_empty() && !event.data.is_null() && sender.send(std::mem::take(&mut event)).is_err() {
                return;
            }
        }
    });
    receiver
}

#[test]
fn a_watch_tells_changes_as_they_happen() {
    let server = Server::start();
    let session = server.session();
    session.out("mkdir -p /root/w/sub; echo x > /root/w/old");
    let watch = |more: &str| {
        let stream = session.client.stream(&session.path(&format!("/files/watch?path=/root/w{more}")), "text/event-stream");
        events(stream.expect("an answer"))
    };
    let (flat, deep) = (watch(""), watch("&recursive=true"));
    let next = |events: &mpsc::Receiver<Event>, kind: &str, path: &str| loop {
        let event = events.recv_timeout(dormouse_tests::PATIENCE).unwrap_or_else(|e| panic!("{kind} {path}: {e}"));
        assert_eq!(event.data["kind"], event.name, "{event:?}");
        if event.data["kind"] == kind && event.data["path"] == path {
            return event;
        }
    };
    session.out("echo new > /root/w/new");
    next(&flat, "created", "/root/w/new");
    next(&deep, "created", "/root/w/new");
    session.write_file("/root/w/old", b"changed by the API").expect(204);
    next(&flat, "modified", "/root/w/old");
    session.out("echo more >> /root/w/old");
    next(&flat, "modified", "/root/w/old");
    session.out("mv /root/w/new /root/w/newer");
    for (kind, path) in [("moved_from", "/root/w/new"), ("moved_to", "/root/w/newer")] {
        next(&flat, kind, path);
        next(&deep, kind, path);
    }
    session.out("rm /root/w/newer");
    next(&flat, "removed", "/root/w/newer");
    next(&deep, "removed", "/root/w/newer");
    session.out("mkdir -p /root/w/sub/made/deeper; echo x > /root/w/sub/made/deeper/file");
    let made = next(&deep, "created", "/root/w/sub/made");
    assert_eq!(made.data["is_dir"], true);
    session.out(
        "echo y > \"/root/w/sub/made/deeper/a
b\"",
    );
    next(&deep, "created", "/root/w/sub/made/deeper/a\nb");
    assert_eq!(get(&session, "files/watch?", "/none").expect(404).problem(), "not_found");
    // What is watched goes, is looked for, and is found again.
    session.out("rm -r /root/w/sub");
    for path in ["/root/w/sub/made", "/root/w/sub"] {
        next(&deep, "removed", path);
    }
    session.out("rm -r /root/w");
    next(&flat, "removed", "/root/w");
    session.out("mkdir /root/w; echo back > /root/w/again");
    next(&flat, "created", "/root/w");
    next(&flat, "created", "/root/w/again");
    session.out("rm -r /root/w");
    next(&flat, "removed", "/root/w");
    // A watch stands in the way of no sleep, whatever became of its directories. The sleep ends it.
    session.hibernate();
    for watch in [flat, deep] {
        loop {
            match watch.recv_timeout(dormouse_tests::PATIENCE) {
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(error) => panic!("the watch of a session that sleeps goes on: {error}"),
            }
        }
    }
    session.wake();
    assert_eq!(session.out("ls -d /root/w || echo none"), "none");
    server.delete_all_and_check();
}

/// Runs the machine's tar with `input`.
fn tar(arguments: &[&str], dir: &Path, input: &[u8]) -> Vec<u8> {
    let mut command = Command::new("tar");
    command.args(arguments).current_dir(dir).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("tar is there");
    let (mut stdin, input) = (child.stdin.take().expect("a pipe"), input.to_vec());
    let writer = std::thread::spawn(move || {
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().expect("tar ends");
    writer.join().expect("the writer ends");
    assert!(output.status.success(), "{arguments:?}");
    output.stdout
}

#[test]
fn an_archive_goes_in_and_comes_out_running_and_asleep() {
    let server = Server::start();
    let session = server.session();
    let here = tempfile::tempdir().expect("a directory");
    let top = here.path().join("top");
    std::fs::create_dir_all(top.join("dir/empty")).expect("directories");
    std::fs::write(top.join("dir/file"), vec![7; 1_000_000]).expect("a file");
    std::fs::write(top.join("x".repeat(200)), "long").expect("a file");
    std::os::unix::fs::symlink("dir/file", top.join("link")).expect("a link");
    std::os::unix::fs::symlink("/etc/shadow", top.join("outward")).expect("a link");
    let packed = tar(&["-cf", "-", "."], &top, b"");
    session.client.put(&session.path("/archive?path=/root/in/here"), &packed).expect(204);
    let sum = "cd /root/in/here && find . | sort | sha256sum && sha256sum dir/file && readlink link && stat -c %s dir/file";
    assert!(session.out(sum).ends_with("dir/file\n1000000"), "{}", session.out(sum));
    session.out("chmod 4755 /root/in/here/dir/file; mkfifo /root/in/here/fifo");
    let check = |session: &Session| {
        let bytes = get(session, "archive?", "/root/in/here").expect(200);
        assert_eq!(bytes.content_type, "application/x-tar");
        let out = tempfile::tempdir().expect("a directory");
        tar(&["-xpf", "-"], out.path(), &bytes.body);
        let names = String::from_utf8(tar(&["-tvf", "-"], out.path(), &bytes.body)).expect("text");
        assert!(!names.contains(".."), "{names}");
        // The name of what was asked for comes first, running and asleep.
        let file = out.path().join("here/dir/file");
        assert_eq!(std::fs::read(&file).expect("the file"), vec![7; 1_000_000]);
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file).expect("the file"));
        assert_eq!(mode & 0o6000, 0, "no setuid bit leaves a session");
        assert!(out.path().join("here").join("x".repeat(200)).exists(), "{names}");
        assert!(!names.contains("fifo") && !names.contains("shadow"), "no device and no outward link leaves a session: {names}");
        assert!(names.contains("here/link -> dir/file"), "{names}");
        let one = get(session, "archive?", "/root/in/here/dir/file").expect(200);
        assert!(one.body.len() > 1_000_000);
        assert_eq!(get(session, "archive?", "/none").expect(404).problem(), "not_found");
    };
    check(&session);
    session.hibernate();
    check(&session);
    assert_eq!(session.state(), "hibernated");
    // Unpacking writes, so it wakes.
    session.client.put(&session.path("/archive?path=/root/second"), &packed).expect(204);
    assert_eq!(session.state(), "running");
    assert_eq!(session.out("cmp /root/second/dir/file /root/in/here/dir/file && echo same"), "same");
    server.delete_all_and_check();
}

#[test]
fn an_archive_that_leads_out_of_its_directory_is_refused() {
    let server = Server::start();
    let session = server.session();
    let here = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(here.path().join("sub")).expect("a directory");
    std::fs::write(here.path().join("evil"), "evil").expect("a file");
    std::fs::write(here.path().join("sub/evil"), "evil").expect("a file");
    let up = tar(&["-P", "-cf", "-", "../evil"], &here.path().join("sub"), b"");
    let absolute = tar(&["-P", "--transform", "s,^evil,/etc/evil,", "-cf", "-", "evil"], here.path(), b"");
    // First a link to /etc, then a file through it.
    std::os::unix::fs::symlink("/etc", here.path().join("door")).expect("a link");
    let mut through = tar(&["-cf", "-", "door"], here.path(), b"");
    through.truncate(512);
    through.extend(tar(&["--transform", "s,^evil,door/evil,", "-cf", "-", "evil"], here.path(), b""));
    for (name, archive) in [("up", &up), ("absolute", &absolute), ("through", &through)] {
        let reply = session.client.put(&session.path("/archive?path=/root/target"), archive);
        let code = session.sh("ls /root/evil /etc/evil").stdout;
        assert_eq!(code, "", "{name} wrote outside of its directory: {}", reply.text());
        if name == "up" {
            assert_eq!(reply.expect(400).problem(), "bad_request");
        }
    }
    // What was to go through the link is in the directory that stands for the root.
    assert_eq!(session.out("cat /root/target/etc/evil"), "evil");
    let nonsense = session.client.put(&session.path("/archive?path=/root/target"), &[b'x'; 4096]);
    assert_eq!(nonsense.expect(400).problem(), "bad_request");
    session.client.put(&session.path("/archive?path=/root/target"), b"").expect(204);
    server.delete_all_and_check();
}

#[test]
fn cp_takes_files_and_directories_both_ways() {
    let server = Server::start();
    let session = server.session();
    let here = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(here.path().join("d")).expect("a directory");
    std::fs::write(here.path().join("d/f"), "in a directory").expect("a file");
    std::fs::write(here.path().join("one"), "one file").expect("a file");
    let cp = |from: &str, to: &str| {
        let output = server.cli(&["cp", from, to]).current_dir(here.path()).output().expect("the command runs");
        assert!(output.status.success(), "cp {from} {to}: {output:?}");
        output.stdout
    };
    let inside = |path: &str| format!("{}:{path}", session.id);
    cp("one", &inside("/root/one"));
    cp("d", &inside("/root/d"));
    assert_eq!(session.out("cat /root/one /root/d/f"), "one filein a directory");
    session.out("echo back > /root/d/g");
    session.hibernate();
    cp(&inside("/root/d"), "out");
    assert_eq!(std::fs::read_to_string(here.path().join("out/g")).expect("it came"), "back\n");
    assert_eq!(cp(&inside("/root/one"), "-"), b"one file");
    assert_eq!(session.state(), "hibernated", "copying out of a sleeping session leaves it asleep");
    let missing = server.cli(&["cp", &inside("/none"), "x"]).current_dir(here.path()).output().expect("the command runs");
    assert_eq!(missing.status.code(), Some(3), "{missing:?}");
    server.delete_all_and_check();
}
