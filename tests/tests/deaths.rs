//! Causes of death: state, reason, event and sentence agree, and what a wake that fails leaves behind.

use dormouse_tests::{Server, Session, eventually, leftovers};
use serde_json::{Value, json};
use std::{fs, path::PathBuf};

fn dir(server: &Server, session: &Session) -> PathBuf {
    server.data().join("sessions").join(&session.id)
}

fn mark(server: &Server, session: &Session) -> Value {
    let text = fs::read(dir(server, session).join("run/supervisor.json")).expect("the supervisor's mark");
    serde_json::from_slice(&text).expect("JSON")
}

fn kill(pids: &[u64]) {
    for pid in pids {
        // SAFETY: kill takes two integers; the processes are those of this test's session.
        unsafe { libc::kill(i32::try_from(*pid).expect("a process id"), libc::SIGKILL) };
    }
}

fn sandbox(mark: &Value) -> Vec<u64> {
    mark["sandbox_pids"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
}

/// State, reason, event and sentence of a session that stopped by itself.
#[track_caller]
fn stopped(session: &Session, reason: &str, says: &str) -> Value {
    let shown = eventually("it is stopped", || Some(session.show()).filter(|shown| shown["state"] == "stopped"));
    assert_eq!((&shown["reason"], &shown["memory"]), (&json!(reason), &json!("lost")), "{shown}");
    let events = session.events();
    let changed = events.iter().rev().find(|event| event["type"] == "state.changed").expect("an event");
    assert_eq!((&changed["data"]["to"], &changed["data"]["reason"]), (&json!("stopped"), &json!(reason)), "{changed}");
    let sentence = shown["sentence"].as_str().expect("a sentence");
    assert!(sentence.contains(says), "{sentence}");
    shown
}

#[test]
fn a_sandbox_that_is_killed_says_by_which_signal() {
    let server = Server::start();
    let session = server.session();
    let exec = session.start_sh("sleep 1000");
    kill(&sandbox(&mark(&server, &session)));
    stopped(&session, "killed", "its sandbox was killed (by signal 9 from outside)");
    let lost = session.ended(&exec);
    assert_eq!((&lost["state"], &lost["reason"], &lost["exit_code"]), (&json!("lost"), &json!("killed"), &Value::Null), "{lost}");
    let shown = server.cli(&["show", &session.id]).output().expect("it runs");
    assert!(String::from_utf8_lossy(&shown.stdout).contains("by signal 9 from outside"), "`show` prints it");
    server.delete_all_and_check();
}

/// A restart of the computer, as its traces look: nothing of it is alive, and its marks are of another boot.
#[test]
fn a_restart_of_the_computer_is_told_and_what_slept_is_kept() {
    let mut server = Server::start();
    let (awake, asleep) = (server.session(), server.session());
    awake.out("echo kept > /root/file; sync");
    let exec = awake.start_sh("sleep 1000");
    asleep.out("echo kept > /tmp/memory");
    asleep.hibernate();
    eventually("the confirmation ends", || (!dir(&server, &asleep).join("run/supervisor.sock").exists()).then_some(()));
    server.kill();
    let mark = mark(&server, &awake);
    kill(&[mark["pid"].as_u64().expect("a process id")]);
    kill(&sandbox(&mark));
    leftovers::end_everything(server.data());
    let path = dir(&server, &awake).join("run/supervisor.json");
    let other = json!("00000000-0000-4000-8000-000000000000");
    let mut before = mark;
    before["boot_id"] = other;
    fs::write(path, before.to_string()).expect("it can be written");
    server.start_again();
    let (awake, asleep) = (awake.on(&server.client), asleep.on(&server.client));
    stopped(&awake, "host_rebooted", "the computer was restarted");
    assert_eq!(awake.ended(&exec)["reason"], "host_rebooted");
    awake.call("start").expect(200);
    assert_eq!(awake.out("cat /root/file"), "kept");
    assert_eq!(asleep.out("cat /tmp/memory"), "kept", "what slept is woken with its memory");
    server.delete_all_and_check();
}

/// A wake that fails leaves the session hibernated, says why, and gives up nothing.
#[test]
fn a_wake_that_fails_names_the_cause_and_keeps_the_image() {
    let server = Server::start();
    let session = server.session();
    session.out("echo kept > /tmp/memory");
    session.hibernate();
    eventually("the confirmation ends", || (!dir(&server, &session).join("run/supervisor.sock").exists()).then_some(()));
    let descriptor = fs::read_dir(dir(&server, &session).join("image"))
        .expect("a directory")
        .flatten()
        .find_map(|image| Some(image.path().join("image.json")).filter(|path| path.exists()))
        .expect("an image");
    let hidden = descriptor.with_extension("hidden");
    fs::rename(&descriptor, &hidden).expect("it can be renamed");

    let failed = session.call("wake");
    assert_eq!((failed.status, failed.problem().as_str()), (422, "damaged"), "{}", failed.text());
    assert!(failed.json()["detail"].as_str().is_some_and(|detail| detail.contains("image")), "{}", failed.text());
    let exec = session.client.post(&session.path("/execs?wait=true"), &json!({ "shell": "true" }));
    assert_eq!((exec.status, exec.problem().as_str()), (422, "damaged"), "{}", exec.text());
    let answer = session.client.post(&session.path("/connect"), &json!({})).expect(200).json();
    assert_eq!((&answer["status"], &answer["woken"]), (&json!("hibernated"), &json!(false)), "{answer}");
    assert!(answer["problem"]["detail"].as_str().is_some_and(|detail| detail.contains("image")), "{answer}");
    let shown = session.show();
    assert_eq!((&shown["state"], &shown["memory"]), (&json!("hibernated"), &json!("saved")), "{shown}");
    // Only an explicit choice gives up the memory.
    session.client.post(&session.path("/start"), &json!({})).expect(409);

    fs::rename(&hidden, &descriptor).expect("it can be renamed");
    assert_eq!(session.out("cat /tmp/memory"), "kept");
    server.delete_all_and_check();
}
