//! The built guest on this machine, without a sandbox, spoken to over pipes.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod support;

use model::Offset;
use std::time::{Duration, Instant};
use support::{HostGuest, program, sh};
use wire::{Code, guest::Reply, guest::Request, records::Program, window::WINDOW};

fn ping(guest: &mut HostGuest) {
    assert_eq!(guest.client.request(Request::Ping), Ok(Reply::Pong));
}

#[test]
fn an_exec_gives_its_output_and_its_status() {
    let mut guest = HostGuest::start();
    let exec = guest.client.try_exec(sh("echo out; echo err >&2; exit 3"), false, None).unwrap();
    let ended = guest.client.wait(&exec);
    assert_eq!((ended.exit_code, ended.signal, ended.reason), (Some(3), None, None));
    assert_eq!((guest.client.text(exec.stdout), guest.client.text(exec.stderr)), ("out\n".into(), "err\n".into()));
    assert_eq!(ended.ends.iter().map(|e| e.offset).collect::<Vec<_>>(), [Offset(4), Offset(4)]);
    let exec = guest.client.try_exec(sh("kill -9 $$"), false, None).unwrap();
    assert_eq!(guest.client.wait(&exec).signal, Some(9));
}

#[test]
fn what_cannot_be_started_says_why() {
    let mut guest = HostGuest::start();
    let cases: [(Program, Code, &str); 7] = [
        (program(&["no-such-program"]), Code::NotFound, "no-such-program"),
        (program(&["/no/such/file"]), Code::NotFound, "/no/such/file"),
        (program(&["/etc/passwd"]), Code::NotExecutable, "/etc/passwd"),
        (program(&["/"]), Code::NotExecutable, "/"),
        (Program { cwd: Some("/no/dir".into()), ..program(&["true"]) }, Code::BadWorkingDirectory, "/no/dir"),
        (Program { user: Some("no-such-user".into()), ..program(&["true"]) }, Code::UnknownUser, "no-such-user"),
        (program(&[]), Code::Invalid, "argv"),
    ];
    for (program, code, names) in cases {
        let error = guest.client.try_exec(program.clone(), false, None).unwrap_err();
        assert_eq!(error.code, code, "{program:?}: {error}");
        assert!(error.message.contains(names), "{error}");
    }
    assert!(guest.client.hello(None).sending.is_empty(), "failed starts leave no streams");
}

#[test]
fn cat_without_input_ends_and_with_input_echoes() {
    let mut guest = HostGuest::start();
    let exec = guest.client.exec(&["cat"]);
    assert_eq!(guest.client.wait(&exec).exit_code, Some(0));
    let exec = guest.client.try_exec(program(&["cat"]), true, None).unwrap();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n ^ (n >> 8)) as u8).collect();
    guest.client.feed(exec.stdin.unwrap(), 0, &bytes, true);
    assert_eq!(guest.client.wait(&exec).exit_code, Some(0));
    assert!(guest.client.bytes(exec.stdout) == bytes, "the echo differs");
}

#[test]
fn input_that_nobody_reads_is_refused() {
    let mut guest = HostGuest::start();
    let exec = guest.client.try_exec(sh("exec <&-; sleep 0.2"), true, None).unwrap();
    let stdin = exec.stdin.unwrap();
    guest.client.wait(&exec);
    guest.client.until("a reset", |c| c.streams.get(&stdin).is_some_and(|s| s.reset.is_some()));
}

#[test]
fn a_hundred_megabytes_that_nobody_acknowledges_block_the_writer_and_nothing_else() {
    let mut guest = HostGuest::start();
    guest.client.acks = false;
    let total = 100_000_000u64;
    let script = format!("head -c {total} /dev/zero | tr '\\0' x");
    let exec = guest.client.try_exec(sh(&script), false, None).unwrap();
    guest.client.until("a full window", |c| c.bytes(exec.stdout).len() == WINDOW);
    // Two windows are two streams: another program's output is not behind it.
    let other = guest.client.exec(&["echo", "small"]);
    guest.client.wait(&other);
    ping(&mut guest);
    assert_eq!(guest.client.bytes(exec.stdout).len(), WINDOW, "no more than the window is under way");
    assert!(guest.client.ended(&exec.work).is_none());
    guest.client.acks = true;
    guest.client.hello(None);
    guest.client.wait(&exec);
    assert_eq!(guest.client.bytes(exec.stdout).len() as u64, total);
    assert!(guest.client.bytes(exec.stdout).iter().all(|b| *b == b'x'));
}

#[test]
fn a_connection_torn_again_and_again_brings_every_byte_once() {
    let mut guest = HostGuest::start();
    let exec = guest.client.exec(&["seq", "1", "400000"]);
    let mut mark = 0;
    for _ in 0..20 {
        mark += 100_000;
        guest.client.until("more output", |c| c.bytes(exec.stdout).len() >= mark);
        // Half a frame, then a new Hello: what the old connection still brings is skipped.
        guest.client.send_bytes(&[0, 0, 1, 0, 1, 0]);
        guest.client.hello(None);
    }
    guest.client.wait(&exec);
    let expected: String = (1..=400_000).map(|n| format!("{n}\n")).collect();
    assert!(guest.client.text(exec.stdout) == expected);
}

#[test]
fn events_come_again_until_they_are_acknowledged() {
    let mut guest = HostGuest::start();
    guest.client.ack_events = false;
    let exec = guest.client.exec(&["true"]);
    guest.client.wait(&exec);
    guest.client.events.clear();
    guest.client.hello(None);
    guest.client.ack_events = true;
    guest.client.wait(&exec);
    ping(&mut guest);
    guest.client.events.clear();
    guest.client.hello(None);
    ping(&mut guest);
    assert!(guest.client.events.is_empty());
}

fn alive(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).is_ok_and(|s| !s.contains(") Z "))
}

/// A tree that a TERM doesn't end: a shell that ignores it and a grandchild in a session of its own.
const STUBBORN: &str =
    "trap '' TERM; setsid sh -c 'trap \"\" TERM; (echo $$; exec sleep 1000)' & trap '' TERM; sleep 0.1; wait; sleep 1000";

#[test]
fn a_kill_reaches_the_whole_tree() {
    let mut guest = HostGuest::start();
    let exec = guest.client.try_exec(sh(STUBBORN), false, None).unwrap();
    guest.client.until("the grandchild", |c| c.text(exec.stdout).ends_with('\n'));
    let grandchild = guest.client.text(exec.stdout);
    assert!(alive(&grandchild));
    let kill = Request::Signal { work: exec.work.clone(), signal: 9, tree: true };
    assert_eq!(guest.client.request(kill), Ok(Reply::Done));
    assert_eq!(guest.client.wait(&exec).signal, Some(9));
    assert!(!alive(&grandchild), "the grandchild lives");
}

#[test]
fn a_time_limit_ends_the_whole_tree() {
    let mut guest = HostGuest::start();
    let began = Instant::now();
    let exec = guest.client.try_exec(sh(STUBBORN), false, Some(500)).unwrap();
    let ended = guest.client.wait(&exec);
    assert_eq!((ended.signal, ended.reason.as_deref()), (Some(9), Some("timeout")));
    assert!(began.elapsed() > Duration::from_millis(500));
    let grandchild = guest.client.text(exec.stdout);
    guest.client.until("the tree to be gone", |_| !alive(&grandchild));
}

#[test]
fn a_child_that_holds_the_pipe_goes_on_after_the_end() {
    let mut guest = HostGuest::start();
    let exec = guest.client.try_exec(sh("echo first; (sleep 0.5; echo later) & exit 0"), false, None).unwrap();
    let ended = guest.client.wait(&exec);
    assert_eq!(ended.ends[0].offset, Offset(6));
    guest.client.until("the end of the stream", |c| c.streams.get(&exec.stdout).is_some_and(|s| s.end.is_some()));
    assert_eq!(guest.client.text(exec.stdout), "first\nlater\n");
}

#[test]
fn a_terminal_is_one() {
    let mut guest = HostGuest::start();
    let (id, shell) = guest.client.terminal(&["/bin/sh"], 91, 17);
    let stdin = shell.stdin.unwrap();
    let first = b"stty size; tty; echo pid-$$\n";
    guest.client.feed(stdin, 0, first, false);
    guest.client.until("the answers", |c| c.text(shell.stdout).contains(&format!("pid-{}", shell.pid)));
    assert!(guest.client.text(shell.stdout).contains("17 91"));
    assert!(guest.client.text(shell.stdout).contains("/dev/pts/"));
    let size = wire::guest::PtySize { cols: 40, rows: 10 };
    guest.client.request(Request::Resize { terminal: id, size }).unwrap();
    // It says itself that it runs: then it is in the foreground.
    let second = b"stty size; sh -c \"echo wait''ing; exec sleep 1000\"\n";
    guest.client.feed(stdin, first.len() as u64, second, false);
    guest.client.until("the new size", |c| c.text(shell.stdout).contains("waiting"));
    assert!(guest.client.text(shell.stdout).contains("10 40"));
    // ^C reaches the foreground program, not the shell.
    let mut at = (first.len() + second.len()) as u64;
    guest.client.feed(stdin, at, b"\x03", false);
    at += 1;
    let prompt = |text: String| text.split_once("^C").is_some_and(|(_, after)| after.contains("# ") || after.contains("$ "));
    guest.client.until("the prompt after ^C", |c| prompt(c.text(shell.stdout)));
    guest.client.feed(stdin, at, b"echo still-$((40+2)); exit 5\n", false);
    let ended = guest.client.wait(&shell);
    assert_eq!(ended.exit_code, Some(5));
    assert!(guest.client.text(shell.stdout).contains("still-42"));
    guest.client.until("the end of the output", |c| c.streams[&shell.stdout].end.is_some());
}

#[test]
fn after_quiesced_no_byte_comes_until_the_next_hello() {
    let mut guest = HostGuest::start();
    let exec = guest.client.try_exec(sh("while :; do echo line; sleep 0.01; done"), false, None).unwrap();
    guest.client.until("output", |c| c.bytes(exec.stdout).len() > 50);
    guest.client.quiesce();
    let before = guest.client.raw_bytes;
    assert!(!guest.client.step(Duration::from_millis(300)), "something came");
    assert_eq!(guest.client.raw_bytes, before);
    let seen = guest.client.bytes(exec.stdout).len();
    let reply = guest.client.hello(None);
    assert!(reply.sending.iter().any(|s| s.stream == exec.stdout && s.to.0 > seen as u64), "output was read meanwhile");
    guest.client.until("output goes on", |c| c.bytes(exec.stdout).len() > seen + 50);
}

#[test]
fn an_unknown_request_is_answered_and_noise_is_survived() {
    let mut guest = HostGuest::start();
    let json = r#"{"t":"request","id":77,"request":{"op":"levitate"}}"#;
    guest.client.send(&[wire::Frame::Control(json.to_owned().into())]);
    guest.client.until("an answer", |c| c.replies.contains_key(&77));
    assert_eq!(guest.client.replies.remove(&77).unwrap().unwrap_err().code, Code::Unsupported);
    guest.client.send_bytes(&[0xff; 100]);
    guest.client.hello(None);
    ping(&mut guest);
}
