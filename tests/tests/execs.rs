//! Execs over HTTP: how they start, what they print, what they are told, how they end.

use base64::{Engine, engine::general_purpose::STANDARD};
use dormouse_tests::{PATIENCE, Server, Session, eventually};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Read},
    sync::mpsc,
};

#[track_caller]
fn start(session: &Session, body: &Value) -> String {
    let exec = session.client.post(&session.path("/execs"), body).expect(201).json();
    exec["id"].as_str().expect("an exec has an id").to_owned()
}

#[track_caller]
fn signal(session: &Session, exec: &str, signal: Value) {
    session.client.post(&session.path(&format!("/execs/{exec}/signal")), &json!({ "signal": signal })).expect(200);
}

#[track_caller]
fn give(session: &Session, exec: &str, bytes: &[u8], eof: bool) -> dormouse_tests::Reply {
    let path = session.path(&format!("/execs/{exec}/stdin?eof={eof}"));
    session.client.send("POST", &path, &[], Some(bytes)).expect("an answer")
}

#[track_caller]
fn until_printed(session: &Session, exec: &str, text: &str) {
    eventually(&format!("the exec prints {text:?}"), || {
        String::from_utf8_lossy(&session.output(exec, "stdout")).contains(text).then_some(())
    });
}

/// Lines of a stream as they come, blank ones left out.
fn lines(stream: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok).filter(|line| !line.is_empty()) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

fn follow(session: &Session, exec: &str, query: &str) -> mpsc::Receiver<String> {
    let path = session.path(&format!("/execs/{exec}/output?{query}"));
    lines(session.client.stream(&path, "application/x-ndjson").expect("an answer"))
}

#[track_caller]
fn next(lines: &mpsc::Receiver<String>) -> Value {
    let line = lines.recv_timeout(PATIENCE).expect("the stream goes on");
    serde_json::from_str(&line).expect("a line is JSON")
}

/// How many processes inside are exactly this command.
fn alive(session: &Session, command: &str) -> usize {
    let reply = session.client.get(&session.path("/processes")).expect(200).json();
    let items = reply["items"].as_array().expect("a list").clone();
    items.iter().filter(|item| item["command"] == command).count()
}

#[test]
fn an_exec_that_is_waited_for_is_answered_with_how_it_ended() {
    let server = Server::start();
    let session = server.session();
    let exec = session.sh("echo out; echo err >&2; exit 7").json;
    let expected = json!({
        "state": "exited", "exit_code": 7, "signal": null, "reason": null, "key": null, "user": null, "cwd": null,
        "argv": ["/bin/sh", "-c", "echo out; echo err >&2; exit 7"], "stdout": "out\n", "stderr": "err\n",
        "stdout_bytes": 4, "stderr_bytes": 4, "stdout_truncated": false, "stderr_truncated": false,
    });
    for (name, value) in expected.as_object().expect("an object") {
        assert_eq!(exec[name], *value, "{name}: {exec}");
    }
    assert!(exec["pid"].is_u64() && exec["duration_ms"].is_u64(), "{exec}");
    assert!(exec["started_at"].as_str() <= exec["ended_at"].as_str(), "{exec}");
    let killed = session.sh("kill -SEGV $$").json;
    assert_eq!((&killed["state"], &killed["signal"], &killed["exit_code"]), (&json!("killed"), &json!(11), &Value::Null));
    // It can be looked up later, also by a new server.
    let id = exec["id"].as_str().expect("an id");
    assert_eq!(session.exec(id)["exit_code"], 7);
    let types: Vec<String> = session.events().iter().map(|event| event["type"].as_str().unwrap_or_default().to_owned()).collect();
    assert_eq!(types.iter().filter(|kind| *kind == "exec.started").count(), 2, "{types:?}");
    assert_eq!(types.iter().filter(|kind| *kind == "exec.ended").count(), 2, "{types:?}");
    server.delete_all_and_check();
}

#[test]
fn an_exec_that_is_detached_is_answered_at_once_and_runs_on() {
    let mut server = Server::start();
    let session = server.session();
    let body = json!({ "shell": "mkfifo /tmp/go; echo begun; cat /tmp/go; echo done" });
    let exec = session.client.post(&session.path("/execs"), &body).expect(201).json();
    assert_eq!((&exec["state"], &exec["exit_code"], &exec["ended_at"]), (&json!("running"), &Value::Null, &Value::Null));
    let id = exec["id"].as_str().expect("an id").to_owned();
    until_printed(&session, &id, "begun");
    let list = session.client.get(&session.path("/execs")).expect(200).json();
    assert_eq!((&list["items"][0]["id"], &list["items"][0]["state"]), (&json!(id), &json!("running")));
    server.crash();
    let session = session.on(&server.client);
    assert_eq!(session.exec(&id)["state"], "running");
    session.out("echo went > /tmp/go");
    assert_eq!(session.ended(&id)["exit_code"], 0);
    assert_eq!(session.output(&id, "stdout"), b"begun\nwent\ndone\n");
    // Newest first, page by page.
    let page = session.client.get(&session.path("/execs?limit=1")).expect(200).json();
    let cursor = page["next_cursor"].as_str().expect("there is more");
    let rest = session.client.get(&session.path(&format!("/execs?limit=9&cursor={cursor}"))).expect(200).json();
    assert_eq!((&rest["items"][0]["id"], &rest["next_cursor"]), (&json!(id), &Value::Null));
    server.delete_all_and_check();
}

#[test]
fn an_exec_ends_with_its_own_process_and_keeps_what_its_children_still_write() {
    let server = Server::start();
    let session = server.session();
    let exec = session.sh("mkfifo /tmp/go; (trap '' HUP; cat /tmp/go; echo late) & echo early");
    assert_eq!((exec.code, exec.stdout.as_str()), (Some(0), "early\n"));
    session.out("echo on > /tmp/go");
    until_printed(&session, &exec.id, "late");
    assert_eq!(session.output(&exec.id, "stdout"), b"early\non\nlate\n");
    server.delete_all_and_check();
}

#[test]
fn user_environment_and_directory_are_those_asked_for() {
    let server = Server::start();
    let session = server.session_with(&json!({ "env": { "A": "session", "B": "session" }, "workdir": "/srv/work" }));
    assert_eq!(session.out("pwd; id -un; echo $A $B $HOME $USER $LANG"), "/srv/work\nroot\nsession session /root root C.UTF-8");
    let body =
        json!({ "shell": "pwd; id -u; id -g; echo $A $B $HOME $USER", "cwd": "/usr", "user": "nobody", "env": { "A": "exec" } });
    let exec = session.exec_with(&body);
    assert_eq!(exec.stdout, "/usr\n65534\n65534\nexec session /nonexistent nobody\n", "{}", exec.stderr);
    assert_eq!((&exec.json["user"], &exec.json["cwd"]), (&json!("nobody"), &json!("/usr")));
    let numbers = session.exec_with(&json!({ "argv": ["id"], "user": "1234:5678" }));
    assert!(numbers.stdout.starts_with("uid=1234 gid=5678"), "{}", numbers.stdout);
    let forbidden = session.exec_with(&json!({ "shell": "echo x > /etc/mine", "user": "nobody" }));
    assert_ne!(forbidden.code, Some(0));
    // Arguments are given as they are, without a shell.
    let argv = session.exec_with(&json!({ "argv": ["printf", "%s|", "a b", "", "$HOME", "*", "'\"\n"] }));
    assert_eq!(argv.stdout, "a b||$HOME|*|'\"\n|");
    for (field, value) in [("env", json!({ "A=B": "x" })), ("env", json!({ "": "x" })), ("env", json!({ "A": "x\0" }))] {
        let mut body = json!({ "shell": "true" });
        body[field] = value;
        assert_eq!(session.client.post(&session.path("/execs"), &body).expect(400).problem(), "bad_request");
    }
    server.delete_all_and_check();
}

#[test]
fn output_is_followed_by_offset_to_the_exit_and_not_beyond() {
    let server = Server::start();
    let session = server.session();
    let exec = start(
        &session,
        &json!({ "shell": "while read line; do echo \"$line\"; echo \"e$line\" >&2; done; exit 3", "stdin": true }),
    );
    let stream = follow(&session, &exec, "follow=true");
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    for word in ["one\n", "two\n"] {
        give(&session, &exec, word.as_bytes(), false).expect(200);
        let expected = stderr.len() + word.len() + 1;
        while stderr.len() < expected {
            let line = next(&stream);
            let data = STANDARD.decode(line["data_b64"].as_str().expect("data")).expect("base64");
            let kept = if line["stream"] == "stdout" { &mut stdout } else { &mut stderr };
            assert_eq!(line["offset"], kept.len(), "{line}");
            kept.extend(data);
        }
    }
    // Without `follow` it is what is there, and no exit, since there is none.
    let now: Vec<String> = follow(&session, &exec, "stdout_from=4&stderr_from=10").iter().collect();
    assert_eq!(now.len(), 1, "{now:?}");
    let line: Value = serde_json::from_str(&now[0]).expect("JSON");
    assert_eq!(line, json!({ "stream": "stdout", "offset": 4, "data_b64": STANDARD.encode("two\n") }));
    let beyond = follow(&session, &exec, "stream=stdout&from=8&follow=true");
    give(&session, &exec, b"three\n", true).expect(200);
    let (one, last) = (next(&beyond), next(&beyond));
    assert_eq!((&one["offset"], &one["data_b64"]), (&json!(8), &json!(STANDARD.encode("three\n"))));
    assert_eq!(last, json!({ "stream": "exit", "state": "exited", "exit_code": 3, "signal": null, "reason": null }));
    assert!(beyond.recv_timeout(PATIENCE).is_err(), "the exit is last");
    let rest: Vec<Value> = stream.iter().map(|line| serde_json::from_str(&line).expect("JSON")).collect();
    assert_eq!(rest.last().expect("a line")["stream"], "exit");
    assert_eq!(rest.iter().filter(|line| line["stream"] == "exit").count(), 1);
    // An offset beyond the end is told, not invented.
    let past = session.client.get(&session.path(&format!("/execs/{exec}/output?stream=stdout&from=1000")));
    assert!(past.status == 400 || !past.text().contains("\"stdout\""), "{}", past.text());
    for bad in ["stream=tty", "from=3", "stdout_from=-1", "stdout_from=x"] {
        assert_eq!(session.client.get(&session.path(&format!("/execs/{exec}/output?{bad}"))).status, 400, "{bad}");
    }
    server.delete_all_and_check();
}

#[test]
fn raw_bytes_and_events_tell_the_same_as_lines() {
    let server = Server::start();
    let session = server.session();
    let exec = session.sh("seq 1 50000; echo problem >&2; exit 1");
    let whole = session.output(&exec.id, "stdout");
    assert_eq!(whole, (1..=50_000).map(|n| format!("{n}\n")).collect::<String>().into_bytes());
    let raw = |query: &str| {
        let path = session.path(&format!("/execs/{}/output?{query}", exec.id));
        session.client.send("GET", &path, &[("accept", "application/octet-stream")], None).expect("an answer")
    };
    let part = raw("stream=stdout&from=1000").expect(200);
    assert_eq!((part.content_type.as_str(), &part.body[..]), ("application/octet-stream", &whole[1000..]));
    assert_eq!(part.header("dormouse-offset"), Some("1000"));
    assert_eq!(raw("stream=stderr&from=0&follow=true").expect(200).body, b"problem\n");
    assert_eq!(raw("").expect(400).problem(), "bad_request");
    // Server-sent events, cut after some and gone on with the id of the last one.
    let path = session.path(&format!("/execs/{}/output?follow=true", exec.id));
    let mut seen = Vec::new();
    let mut last_id = None::<String>;
    let mut exit = Value::Null;
    for _ in 0..100 {
        let mut headers = vec![("accept", "text/event-stream")];
        if let Some(id) = &last_id {
            headers.push(("last-event-id", id));
        }
        let reply = session.client.send("GET", &path, &headers, None).expect("an answer").expect(200);
        assert_eq!(reply.content_type, "text/event-stream");
        let text = reply.text();
        // Only the first two events are taken from each answer.
        for block in text.split("\n\n").filter(|block| !block.trim().is_empty()).take(2) {
            let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).map(str::to_owned);
            last_id = field("id:");
            assert!(last_id.is_some(), "every event has an id: {block}");
            let data: Value = serde_json::from_str(&field("data:").expect("data")).expect("JSON");
            match data["stream"].as_str() {
                Some("stdout") => {
                    assert_eq!(data["offset"], seen.len());
                    seen.extend(STANDARD.decode(data["data_b64"].as_str().expect("data")).expect("base64"));
                }
                Some("exit") => exit = data,
                _ => {}
            }
        }
        if !exit.is_null() {
            break;
        }
    }
    assert_eq!((seen == whole, &exit["exit_code"]), (true, &json!(1)));
    server.delete_all_and_check();
}

#[test]
fn what_retention_has_dropped_is_a_gap_with_offsets() {
    let server =
        Server::with(dormouse_tests::Options { args: vec!["--keep-output".into(), "16MiB".into()], ..Default::default() });
    let session = server.session();
    let total = 64_000_000_usize;
    let exec = session.sh("python3 -c \"import sys\nfor i in range(8000000): sys.stdout.write('%07d\\n' % i)\"");
    assert_eq!((exec.code, &exec.json["stdout_bytes"]), (Some(0), &json!(total)), "{}", exec.stderr);
    assert!(exec.stdout.starts_with("0000000\n0000001\n"), "the beginning is kept");
    let check = |session: &Session| {
        let (mut at, mut gaps, mut exits) = (0, Vec::new(), 0);
        for line in follow(session, &exec.id, "follow=true") {
            let line: Value = serde_json::from_str(&line).expect("JSON");
            match line["stream"].as_str() {
                Some("stdout") => {
                    assert_eq!(line["offset"], at, "no hole without a gap");
                    let data = STANDARD.decode(line["data_b64"].as_str().expect("data")).expect("base64");
                    let first = data.iter().position(|byte| *byte == b'\n').expect("a line") + 1;
                    let number: usize = data
                        .get(first..first + 7)
                        .map_or(0, |d| std::str::from_utf8(d).expect("digits").parse().expect("a number"));
                    assert!(data.len() < first + 7 || number * 8 == at + first, "the bytes are those of their offset");
                    at += data.len();
                }
                Some("gap") => {
                    assert_eq!((&line["of"], &line["from"]), (&json!("stdout"), &json!(at)));
                    gaps.push(line["to"].as_u64().expect("a number") - at as u64);
                    at = usize::try_from(line["to"].as_u64().expect("a number")).expect("small");
                }
                Some("exit") => exits += 1,
                _ => panic!("{line}"),
            }
        }
        assert_eq!((at, gaps.len(), exits), (total, 1, 1), "{gaps:?}");
        assert!(gaps[0] > 20_000_000, "the middle is gone: {gaps:?}");
    };
    check(&session);
    session.hibernate();
    check(&session);
    // Raw bytes end at the gap; from within it they begin behind it, and say where.
    let raw = |from: u64| {
        let path = session.path(&format!("/execs/{}/output?stream=stdout&from={from}", exec.id));
        session.client.send("GET", &path, &[("accept", "application/octet-stream")], None).expect("an answer").expect(200)
    };
    let beginning = raw(0);
    assert!(beginning.body.len() >= 1 << 20 && beginning.body.len() < total / 2, "{}", beginning.body.len());
    let end = raw(20_000_000);
    let offset: usize = end.header("dormouse-offset").and_then(|text| text.parse().ok()).expect("it says where");
    assert_eq!(offset + end.body.len(), total);
    assert!(end.body.len() >= 16 << 20, "the last part is kept whole");
    server.delete_all_and_check();
}

#[test]
fn input_that_is_left_open_takes_chunks_until_its_end() {
    let server = Server::start();
    let session = server.session();
    let exec = start(&session, &json!({ "argv": ["cat"], "stdin": true }));
    assert_eq!(give(&session, &exec, b"one ", false).expect(200).json()["written_bytes"], 4);
    until_printed(&session, &exec, "one ");
    give(&session, &exec, b"", false).expect(200);
    session.hibernate();
    session.wake();
    give(&session, &exec, b"two", true).expect(200);
    let ended = session.ended(&exec);
    assert_eq!((&ended["exit_code"], &ended["stdout_bytes"]), (&json!(0), &json!(7)));
    assert_eq!(session.output(&exec, "stdout"), b"one two");
    assert_eq!(give(&session, &exec, b"more", false).expect(422).problem(), "ended");
    // Input given at once, and input that is larger than every buffer on the way.
    assert_eq!(session.exec_with(&json!({ "argv": ["wc", "-c"], "stdin": "12345" })).stdout.trim(), "5");
    let big: Vec<u8> = (0..20_000_000_u32).map(|n| (n.wrapping_mul(31) >> 3) as u8).collect();
    let sum = start(&session, &json!({ "argv": ["cat"], "stdin": true }));
    assert_eq!(give(&session, &sum, &big, true).expect(200).json()["written_bytes"], 20_000_000);
    session.ended(&sum);
    assert!(session.output(&sum, "stdout") == big, "every byte in order");
    // After its end nothing more can be given; an exec without input takes none.
    let closed = start(&session, &json!({ "shell": "cat > /dev/null; sleep infinity", "stdin": true }));
    give(&session, &closed, b"", true).expect(200);
    assert_eq!(give(&session, &closed, b"x", false).status / 100, 4);
    let without = session.start_sh("sleep infinity");
    assert_eq!(give(&session, &without, b"x", false).status / 100, 4);
    // A program that doesn't read, or reads a little and goes, hangs nobody.
    let deaf = start(&session, &json!({ "shell": "head -c 3; exit 4", "stdin": true }));
    let reply = give(&session, &deaf, &big, true);
    assert!(matches!(reply.status, 200 | 422), "{}", reply.text());
    assert_eq!((&session.ended(&deaf)["exit_code"], session.output(&deaf, "stdout").len()), (&json!(4), 3));
    server.delete_all_and_check();
}

/// A tree of processes that doesn't want to go: a child that ignores TERM, a grandchild in a session of its own, and one
/// whose parents are gone.
fn stubborn(mark: &str) -> String {
    format!(
        "trap '' TERM; (trap '' TERM; exec sleep 100{mark}) & setsid sh -c \"trap '' TERM; sleep 200{mark} & echo; wait\" & \
         (setsid nohup sleep 300{mark} > /dev/null 2>&1 &) ; echo planted; wait; wait; wait"
    )
}

/// Whether each of the three of a stubborn tree is there so many times.
fn trees(session: &Session, mark: &str, count: usize) -> bool {
    ["100", "200", "300"].iter().all(|sleep| alive(session, &format!("sleep {sleep}{mark}")) == count)
}

#[test]
fn a_signal_reaches_the_whole_tree() {
    let server = Server::start();
    let session = server.session();
    let other = session.start_sh("sleep 4007");
    let exec = session.start_sh(&stubborn("7"));
    eventually("the tree stands", || trees(&session, "7", 1).then_some(()));
    signal(&session, &exec, json!("KILL"));
    let ended = session.ended(&exec);
    assert_eq!((&ended["state"], &ended["signal"]), (&json!("killed"), &json!(9)), "{ended}");
    eventually("the whole tree is gone", || trees(&session, "7", 0).then_some(()));
    assert_eq!(session.exec(&other)["state"], "running", "nothing else got it");
    // A signal that is caught is caught; names and numbers mean the same.
    let exec = session.start_sh("trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.1; done");
    until_printed(&session, &exec, "ready");
    signal(&session, &exec, json!("SIGUSR1"));
    let ended = session.ended(&exec);
    assert_eq!((&ended["state"], &ended["exit_code"]), (&json!("exited"), &json!(9)));
    let exec = session.start_sh("sleep infinity");
    signal(&session, &exec, json!(15));
    let ended = session.ended(&exec);
    assert_eq!((&ended["state"], &ended["signal"], &ended["exit_code"]), (&json!("killed"), &json!(15), &Value::Null));
    signal(&session, &exec, json!("TERM"));
    for bad in [json!("NOPE"), json!(0), json!(65), json!(null), json!(1.5)] {
        let path = session.path(&format!("/execs/{other}/signal"));
        assert_eq!(session.client.post(&path, &json!({ "signal": bad })).expect(400).problem(), "bad_request");
    }
    assert_eq!(session.exec(&other)["state"], "running");
    server.delete_all_and_check();
}

#[test]
fn a_time_limit_ends_the_whole_tree() {
    let server = Server::start();
    let session = server.session();
    let exec = session.exec_with(&json!({ "shell": stubborn("8"), "timeout_seconds": 2 }));
    assert_eq!(
        (&exec.json["state"], &exec.json["reason"], exec.code),
        (&json!("timed_out"), &json!("timeout"), None),
        "{}",
        exec.json
    );
    assert!(exec.stdout.contains("planted"), "what it printed is kept: {}", exec.stdout);
    eventually("the whole tree is gone", || trees(&session, "8", 0).then_some(()));
    // One that ends in time is none the worse for it; one that goes at TERM has timed out, too.
    let quick = session.exec_with(&json!({ "shell": "echo quick", "timeout_seconds": 60 }));
    assert_eq!((&quick.json["state"], quick.code), (&json!("exited"), Some(0)));
    let polite = session.exec_with(&json!({ "shell": "trap 'exit 0' TERM; sleep 1000 & wait", "timeout_seconds": 1 }));
    assert_eq!((&polite.json["state"], &polite.json["reason"]), (&json!("timed_out"), &json!("timeout")), "{}", polite.json);
    let zero = session.client.post(&session.path("/execs"), &json!({ "shell": "true", "timeout_seconds": 0 }));
    assert_eq!(zero.expect(400).problem(), "bad_request");
    server.delete_all_and_check();
}

#[test]
fn the_same_key_gives_the_same_exec_once() {
    let mut server = Server::start();
    let session = server.session();
    let body = json!({ "shell": "echo x >> /root/count; cat /root/count | wc -l", "key": "build-1" });
    let first = session.exec_with(&body);
    let second = session.exec_with(&body);
    assert_eq!((first.id.as_str(), first.stdout.as_str()), (second.id.as_str(), "1\n"));
    assert_eq!(second.json["key"], "build-1");
    server.crash();
    let session = session.on(&server.client);
    assert_eq!(session.exec_with(&body).id, first.id);
    session.hibernate();
    assert_eq!(session.exec_with(&body).id, first.id, "an answer that is there needs no sandbox");
    let other = session.client.post(&session.path("/execs"), &json!({ "shell": "echo other", "key": "build-1" })).expect(409);
    assert!(other.text().contains(&first.id), "it names the exec that has the key: {}", other.text());
    // Many at once are one.
    let body = json!({ "shell": "echo y >> /root/many; wc -l < /root/many", "key": "build-2" });
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (session, body) = (session.clone(), body.clone());
            std::thread::spawn(move || session.exec_with(&body).id)
        })
        .collect();
    let mut ids: Vec<String> = threads.into_iter().map(|thread| thread.join().expect("an answer")).collect();
    ids.dedup();
    assert_eq!(ids.len(), 1, "{ids:?}");
    assert_eq!(session.out("wc -l < /root/many"), "1");
    // Another session's keys are its own.
    let elsewhere = server.session();
    assert_ne!(elsewhere.exec_with(&json!({ "shell": "echo other", "key": "build-1" })).id, first.id);
    server.delete_all_and_check();
}

#[test]
fn one_huge_output_does_not_hold_another_execs_small_one() {
    let server = Server::start();
    let session = server.session();
    let flood = session.start_sh("yes a-line-that-is-printed-over-and-over-again");
    eventually("it floods", || (session.exec(&flood)["stdout_bytes"].as_u64() > Some(20 << 20)).then_some(()));
    // Its slow reader holds back nobody, either.
    let path = session.path(&format!("/execs/{flood}/output?follow=true"));
    let mut slow = session.client.stream(&path, "application/x-ndjson").expect("an answer");
    slow.read_exact(&mut [0; 10]).expect("some bytes");
    for n in 0..20 {
        assert_eq!(session.out(&format!("echo {n}")), n.to_string());
    }
    let echo = start(&session, &json!({ "argv": ["cat"], "stdin": true }));
    let answers = follow(&session, &echo, "follow=true");
    for n in 0..10 {
        let word = format!("{n}\n");
        give(&session, &echo, word.as_bytes(), false).expect(200);
        assert_eq!(next(&answers)["data_b64"], STANDARD.encode(&word));
    }
    assert_eq!(session.exec(&flood)["state"], "running");
    signal(&session, &flood, json!("KILL"));
    assert_eq!(session.ended(&flood)["state"], "killed");
    drop(slow);
    server.delete_all_and_check();
}

#[test]
fn the_command_line_runs_streams_detaches_and_kills() {
    let server = Server::start();
    let session = server.session();
    let exec = |args: &[&str]| {
        let mut all = vec!["exec", session.id.as_str()];
        all.extend(args);
        server.cli(&all).output().expect("the command runs")
    };
    let output = exec(&["--env", "X=y", "--cwd", "/usr", "--", "sh", "-c", "pwd; echo $X; echo e >&2; exit 5"]);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(
        (output.status.code(), text(&output.stdout).as_str(), text(&output.stderr).as_str()),
        (Some(5), "/usr\ny\n", "e\n")
    );
    assert_eq!(exec(&["--", "sh", "-c", "kill -TERM $$"]).status.code(), Some(143));
    let detached = exec(&["--detach", "--", "sh", "-c", "echo bg; sleep infinity"]);
    let id = text(&detached.stdout).trim().to_owned();
    until_printed(&session, &id, "bg");
    let logs = server.cli(&["logs", &session.id, &id]).output().expect("the command runs");
    assert_eq!(text(&logs.stdout), "bg\n");
    let killed = server.cli(&["kill", &session.id, &id, "INT"]).output().expect("the command runs");
    assert!(killed.status.success(), "{killed:?}");
    let ended = session.ended(&id);
    assert_eq!(ended["state"], "killed", "{ended}");
    let mut child = {
        let mut command = server.cli(&["exec", &session.id, "--stdin", "--", "tr", "a-z", "A-Z"]);
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().expect("the command runs")
    };
    std::io::Write::write_all(&mut child.stdin.take().expect("a pipe"), b"shout").expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "SHOUT"));
    server.delete_all_and_check();
}
