//! The socket inside a session: notes, wakes, wishes, and what is refused. And what a supervisor says of its activity.

use dormouse_tests::{Server, Session, eventually, leftovers};
use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};
use wire::{
    Decoder, Frame,
    control::{Answer, Request},
    frame::{PREAMBLE, parse_control},
    layout::SessionLayout,
    records::Activity,
};

/// Sends each argument as a line and prints each answer.
const TALK: &str = r#"
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect("/run/dormouse.sock")
lines = s.makefile("rb")
for line in sys.argv[1:]:
    s.sendall(line.encode() + b"\n")
    sys.stdout.buffer.write(lines.readline())
    sys.stdout.flush()
"#;

/// Has a program inside say these lines on one connection; its answers.
#[track_caller]
fn talk_as(session: &Session, user: &str, lines: &[&str]) -> Vec<Value> {
    let argv: Vec<&str> = ["python3", "-c", TALK].into_iter().chain(lines.iter().copied()).collect();
    let exec = session.exec_with(&json!({ "argv": argv, "user": user }));
    assert_eq!(exec.code, Some(0), "{}{}", exec.stdout, exec.stderr);
    exec.stdout.lines().map(|line| serde_json::from_str(line).expect("an answer is JSON")).collect()
}

#[track_caller]
fn talk(session: &Session, lines: &[&str]) -> Vec<Value> {
    talk_as(session, "root", lines)
}

fn generation(session: &Session) -> u64 {
    session.show()["generation"].as_u64().expect("a generation")
}

/// The lines that an exec has printed so far.
fn printed(session: &Session, exec: &str) -> Vec<Value> {
    let text = String::from_utf8_lossy(&session.output(exec, "stdout")).into_owned();
    // A line may be half there.
    text.lines().map_while(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn what_a_program_says_is_in_the_sessions_history() {
    let server = Server::start();
    let session = server.session();
    let said = talk_as(
        &session,
        "nobody",
        &[
            r#"{"op":"note","text":"tests pass ✓"}"#,
            r#"{"op":"keep_awake","seconds":90}"#,
            r#"{"op":"waiting","for":"person","text":"may I push?"}"#,
            r#"{"op":"status"}"#,
        ],
    );
    let ok = json!({ "ok": true });
    assert_eq!(said[..3], [ok.clone(), ok.clone(), ok]);
    assert_eq!((&said[3]["session"], said[3]["generation"].as_u64()), (&json!(session.id), Some(generation(&session))));
    assert_eq!(said[3]["waiting"], json!({ "for": "person", "text": "may I push?" }));
    assert!((1..=90).contains(&said[3]["keep_awake_seconds"].as_u64().expect("a number")), "{}", said[3]);
    for (kind, data) in [
        ("note", json!({ "text": "tests pass ✓" })),
        ("keep_awake", json!({ "seconds": 90 })),
        ("agent.waiting", json!({ "for": "person", "text": "may I push?" })),
    ] {
        let event = session.event(kind);
        assert_eq!((&event["data"], &event["actor"]), (&data, &json!("inside")), "{event}");
    }

    // The same on the command line, by its exit status.
    session.out("dormouse-ctl note one more word && dormouse-ctl waiting --over && dormouse-guest ctl keep-awake 0");
    eventually("the second note", || {
        let notes = session.events().into_iter().filter(|event| event["type"] == "note");
        notes.map(|note| note["data"]["text"].clone()).eq(["tests pass ✓", "one more word"]).then_some(())
    });
    let status: Value = serde_json::from_str(&session.out("dormouse-ctl status")).expect("JSON");
    assert_eq!((&status["waiting"], &status["keep_awake_seconds"]), (&Value::Null, &json!(0)));
    let refused = session.sh("dormouse-ctl keep-awake 86401");
    assert!(refused.code == Some(1) && refused.stderr.contains("86400"), "{refused:?}");
    assert_eq!(session.sh("dormouse-ctl levitate").code, Some(2));
    server.delete_all_and_check();
}

#[test]
fn what_is_malformed_is_refused_and_the_connection_goes_on() {
    let server = Server::start();
    let session = server.session();
    let long = json!({ "op": "note", "text": "n".repeat(8 * 1024 + 1) }).to_string();
    let longer = "x".repeat(100_000);
    let fits = json!({ "op": "note", "text": "n".repeat(8 * 1024) }).to_string();
    let answers = talk(
        &session,
        &["hello", "[1]", r#"{"op":"levitate"}"#, r#"{"op":"note"}"#, &long, &longer, r#"{"op":"waiting"}"#, &fits],
    );
    let (refused, last) = answers.split_at(7);
    for answer in refused {
        assert!(answer["ok"] == false && answer["error"].is_string(), "{answer}");
    }
    assert_eq!(last, [json!({ "ok": true })]);
    assert_eq!(session.event("note")["data"]["text"].as_str().map(str::len), Some(8 * 1024));

    // Nobody gets more places than there are, and they are free again afterwards.
    let many = r#"
import socket
def ask():
    s = socket.socket(socket.AF_UNIX)
    s.connect("/run/dormouse.sock")
    try:
        s.sendall(b'{"op":"status"}\n')
        return s, b'"ok":true' in s.makefile("rb").readline()
    except OSError:
        return s, False
held = [ask() for _ in range(100)]
print(sum(ok for _, ok in held))
for s, _ in held: s.close()
while not ask()[1]: pass
print("free")
"#;
    let exec = session.exec_with(&json!({ "argv": ["python3", "-c", many], "timeout_seconds": 60 }));
    assert_eq!(exec.stdout, "64\nfree\n", "{}", exec.stderr);
    // Gone with its file, and made again.
    session.out("rm /run/dormouse.sock");
    eventually("the socket is made again", || (session.sh("dormouse-ctl status").code == Some(0)).then_some(()));
    assert_eq!(session.out("stat -c %a /run/dormouse.sock"), "666");
    server.delete_all_and_check();
}

#[test]
fn who_waits_for_a_wake_sleeps_through_it_and_is_told() {
    let server = Server::start();
    let session = server.session();
    let first = generation(&session);
    let waits = session.start_sh(&format!("dormouse-ctl wait-wake --since {first}"));
    // One that is known to listen when the session goes to sleep.
    let script = r#"import socket, sys, time
s = socket.socket(socket.AF_UNIX); s.connect("/run/dormouse.sock"); lines = s.makefile("rb")
s.sendall(b'{"op":"watch"}\n{"op":"wait_wake"}\n')
print(lines.readline().decode(), end="", flush=True)
for _ in range(3): print(lines.readline().decode(), end="", flush=True)
s.sendall(b'{"op":"status"}\n'); print(lines.readline().decode(), end="", flush=True)"#;
    let both = session.client.post(&session.path("/execs"), &json!({ "argv": ["python3", "-c", script] })).expect(201).json();
    let both = both["id"].as_str().expect("an id").to_owned();
    eventually("it listens", || (!printed(&session, &both).is_empty()).then_some(()));
    session.hibernate();
    // Until only the image is left: the wake is a restore.
    eventually("every process of the sleeping session goes", || {
        let processes = leftovers::processes(server.data());
        (!processes.iter().any(|(_, line)| line.contains(&session.id))).then_some(())
    });
    session.wake();
    let second = generation(&session);
    assert!(second > first);
    let is_wake = |told: &Value| {
        assert_eq!((&told["event"], told["generation"].as_u64()), (&json!("wake"), Some(second)), "{told}");
        assert!(told["gap_seconds"].as_f64().is_some_and(|gap| gap > 0.0 && gap < 600.0), "{told}");
    };
    assert_eq!(session.ended(&waits)["exit_code"], 0);
    let told = printed(&session, &waits);
    assert_eq!((told.len(), &told[0]["ok"]), (1, &json!(true)));
    is_wake(&told[0]);
    assert_eq!(session.ended(&both)["exit_code"], 0);
    let told = printed(&session, &both);
    assert_eq!((told.len(), &told[1]), (5, &json!({ "event": "before_hibernate" })), "{told:?}");
    is_wake(&told[2]);
    is_wake(&told[3]);
    assert_eq!(told[4]["session"], json!(session.id));

    // One that comes late is told at once, one that has seen it is told of the next, here of a frozen original's.
    let late = talk(&session, &[&format!(r#"{{"op":"wait_wake","generation":{first}}}"#)]);
    is_wake(&late[0]);
    let next = session.start_sh(&format!("dormouse-ctl wait-wake --since {second}"));
    session.hibernate();
    session.wake();
    session.ended(&next);
    assert_eq!(printed(&session, &next)[0]["generation"].as_u64(), Some(second + 1));
    server.delete_all_and_check();
}

/// Asks a session's supervisor, as the server does.
fn ask_supervisor(server: &Server, session: &Session, request: &Request) -> Answer {
    let socket = SessionLayout::new(server.data().join("sessions").join(&session.id)).socket();
    let mut stream = UnixStream::connect(socket).expect("the supervisor listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    let mut bytes = PREAMBLE.to_vec().as_slice().into();
    Frame::control(request).expect("a request").encode(&mut bytes);
    stream.write_all(&bytes).expect("it takes the request");
    let (mut decoder, mut buffer) = (Decoder::new(), [0; 4096]);
    loop {
        if let Some(Frame::Control(json)) = decoder.next_frame().expect("frames") {
            return parse_control(&json).expect("an answer");
        }
        let count = stream.read(&mut buffer).expect("an answer");
        assert_ne!(count, 0, "the supervisor hung up");
        decoder.push(&buffer[..count]);
    }
}

fn activity(server: &Server, session: &Session) -> Activity {
    match ask_supervisor(server, session, &Request::Activity { window_ms: 60_000 }) {
        Answer::Activity { activity } => activity,
        other => panic!("no activity: {other:?}"),
    }
}

fn keeps_awake(activity: &Activity, kind: &str) -> bool {
    activity.keeps_awake.iter().any(|one| one.kind == kind)
}

#[test]
fn a_supervisor_tells_what_keeps_its_session_awake() {
    let server = Server::start();
    let session = server.session();
    let exec = session.start_sh("echo begun; sleep 1000");
    let busy = activity(&server, &session);
    assert!(busy.quiet_ms == 0 && busy.execs == 1 && keeps_awake(&busy, "exec"), "{busy:?}");
    session.client.post(&session.path(&format!("/execs/{exec}/signal")), &json!({ "signal": "KILL" })).expect(200);
    session.ended(&exec);
    // Nothing goes on once what was is a few seconds old, though a service runs.
    let body = json!({ "services": [{ "name": "rests", "argv": ["sleep", "1000"] }] });
    session.client.patch(&session.path(""), &body).expect(200);
    let quiet = eventually("quiet", || Some(activity(&server, &session)).filter(|a| a.keeps_awake.is_empty()));
    assert!(quiet.quiet_ms > 0 && quiet.execs == 0 && !quiet.output_waits, "{quiet:?}");
    assert!(quiet.last.is_some_and(|last| last.ago_ms >= quiet.quiet_ms));

    // CPU of something that no exec waits for.
    session.out("setsid sh -c 'while :; do :; done' >/dev/null 2>&1 </dev/null & echo $! > /tmp/busy");
    let busy = eventually("CPU", || Some(activity(&server, &session)).filter(|a| keeps_awake(a, "cpu")));
    assert!(busy.quiet_ms == 0 && busy.cpu_percent > 0.0 && busy.window_ms > 0, "{busy:?}");
    session.out("kill -9 $(cat /tmp/busy)");
    eventually("the CPU rests", || (!keeps_awake(&activity(&server, &session), "cpu")).then_some(()));

    session.out("dormouse-ctl keep-awake 600");
    let asked = eventually("the wish", || Some(activity(&server, &session)).filter(|a| keeps_awake(a, "asked")));
    assert_eq!(asked.quiet_ms, 0);
    session.out("dormouse-ctl keep-awake 0; dormouse-ctl waiting for an answer");
    let waits = eventually("it is taken back", || Some(activity(&server, &session)).filter(|a| !keeps_awake(a, "asked")));
    assert_eq!(waits.waiting.and_then(|waiting| waiting.text).as_deref(), Some("for an answer"));

    // Programs are told of a moment, whatever it is called.
    let watches = session.start_sh("dormouse-ctl watch");
    let told = eventually("the watcher is told", || {
        let moment = Request::Moment { moment: "timeout_near".to_owned(), seconds: Some(30) };
        assert_eq!(ask_supervisor(&server, &session, &moment), Answer::Done);
        printed(&session, &watches).into_iter().next()
    });
    assert_eq!(told, json!({ "event": "timeout_near", "seconds": 30 }));

    // While it is paused nothing counts, and nobody waits for an answer of it.
    session.call("pause").expect(200);
    let paused = activity(&server, &session);
    assert!(!keeps_awake(&paused, "unresponsive"), "{paused:?}");
    assert_eq!(ask_supervisor(&server, &session, &Request::Moment { moment: "x".to_owned(), seconds: None }), Answer::Done);
    server.delete_all_and_check();
}
