//! Idleness by activity: what keeps a session awake, what doesn't, and what becomes of one that can't be saved.

use dormouse_tests::{Server, Session, eventually};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn idle_after(server: &Server, seconds: u64) -> Session {
    server.session_with(&json!({ "idle": { "after_seconds": seconds, "action": "hibernate" } }))
}

#[track_caller]
fn sleeps(session: &Session) -> Value {
    eventually("it sleeps", || Some(session.show()).filter(|session| session["state"] == "hibernated"))
}

/// True where the session is still running after `seconds`; ends early where it isn't.
fn stays_awake(session: &Session, seconds: u64) -> bool {
    let until = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < until {
        if session.state() != "running" {
            return false;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    true
}

#[test]
fn a_session_in_which_nothing_happens_sleeps_and_its_history_says_why() {
    let server = Server::start();
    let session = server.session_with(&json!({
        "idle": { "after_seconds": 3, "action": "hibernate" },
        // A service that only listens is no work.
        "services": [{ "name": "listens", "argv": ["python3", "-c",
            "import socket; s = socket.socket(); s.bind(('127.0.0.1', 9)); s.listen(); s.accept()"] }],
    }));
    // Neither is a shell at its prompt that nobody types into.
    session.client.post(&session.path("/terminals"), &json!({})).expect(201);
    let slept = sleeps(&session);
    assert_eq!(slept["reason"], "idle", "{slept}");
    assert!(slept["sentence"].as_str().is_some_and(|text| text.contains("nothing for")), "{slept}");
    let decided = session.event("idle.decided");
    let sentence = decided["data"]["sentence"].as_str().expect("a sentence").to_owned();
    assert!(sentence.contains("no exec, no typing, no output, no traffic, CPU"), "{sentence}");
    assert!(decided["data"]["quiet_seconds"].as_u64().is_some_and(|quiet| quiet >= 3), "{decided}");
    assert!(decided["operation_id"].is_string(), "{decided}");
    // It is woken by who needs it, and sleeps again afterwards.
    assert_eq!(session.out("echo back"), "back");
    sleeps(&session);
    server.delete_all_and_check();
}

#[test]
fn work_keeps_a_session_awake_without_any_viewer() {
    let server = Server::start();
    let silent = idle_after(&server, 3);
    silent.start_sh("sleep 1000");
    let busy = idle_after(&server, 3);
    // Detached from every exec: only its use of the CPU shows.
    let spins = busy.out("(while :; do :; done) >/dev/null 2>&1 & echo $!");
    let asked = idle_after(&server, 3);
    asked.out("/usr/lib/dormouse/dormouse-guest ctl keep-awake 1000");
    let printing = idle_after(&server, 3);
    let program = json!({ "argv": ["sh", "-c", "while :; do echo still here; sleep 1; done"] });
    printing.client.post(&printing.path("/terminals"), &program).expect(201);
    let all = [(&silent, "exec"), (&busy, "cpu"), (&asked, "asked"), (&printing, "output")];
    assert!(stays_awake(&silent, 12));
    for (session, kind) in all {
        let shown = eventually(kind, || {
            let shown = session.show();
            let keeps = shown["activity"]["keeps_awake"].as_array()?.clone();
            keeps.iter().any(|keeps| keeps["kind"] == kind).then_some(shown)
        });
        assert_eq!(shown["state"], "running", "{kind}: {shown}");
        // What prints is quiet between two lines.
        assert!(kind == "output" || shown["hibernate_after"].is_null(), "{kind}: {shown}");
    }
    // Once the work is over, they sleep.
    asked.out("/usr/lib/dormouse/dormouse-guest ctl keep-awake 0");
    sleeps(&asked);
    busy.out(&format!("kill {spins}"));
    sleeps(&busy);
    server.delete_all_and_check();
}

#[test]
fn how_long_it_has_been_quiet_is_kept_through_a_restart_and_an_overdue_sleep_comes_once() {
    let mut server = Server::start();
    let session = idle_after(&server, 6);
    eventually("it is quiet", || session.show()["hibernate_after"].is_string().then_some(()));
    std::thread::sleep(Duration::from_secs(2));
    server.kill();
    std::thread::sleep(Duration::from_secs(5));
    let restarted = Instant::now();
    server.start_again();
    let session = session.on(&server.client);
    sleeps(&session);
    assert!(restarted.elapsed() < Duration::from_secs(5), "it does not begin to count anew: {:?}", restarted.elapsed());
    let decided = session.events().iter().filter(|event| event["type"] == "idle.decided").count();
    assert_eq!(decided, 1);
    server.delete_all_and_check();
}

#[test]
fn a_policy_can_be_changed_and_can_go_by_viewers() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.show()["hibernate_after"], Value::Null, "the interface has no policy unless asked");
    session.start_sh("sleep 1000");
    let by_clients = json!({ "idle": { "after_seconds": 2, "action": "stop", "when": "no_clients" } });
    session.client.patch(&session.path(""), &by_clients).expect(200);
    let stopped = eventually("it stops", || Some(session.show()).filter(|session| session["state"] == "stopped"));
    assert_eq!(stopped["reason"], "idle", "its work doesn't count where the policy goes by viewers: {stopped}");
    server.delete_all_and_check();
}

/// What can't be saved is frozen instead, costs nothing, and is there as soon as somebody needs it.
#[test]
fn a_session_that_can_not_be_saved_is_paused_and_goes_on_when_needed() {
    let server = Server::start();
    let session = idle_after(&server, 3);
    // A deleted file that is still open can't be saved. The process belongs to no exec.
    session.out("cd /root; setsid sh -c 'exec 3>gone; rm gone; sleep 100000' >/dev/null 2>&1 & echo started");
    let paused = eventually("it is frozen", || Some(session.show()).filter(|session| session["state"] == "paused"));
    assert_eq!(paused["reason"], "idle", "{paused}");
    assert!(paused["sentence"].as_str().is_some_and(|text| text.contains("/root/gone")), "{paused}");
    let deferred = session.event("hibernate.deferred");
    assert!(deferred["data"]["try_again_at"].is_string(), "{deferred}");
    // Needed, and with what hindered it gone: it sleeps at the next time.
    assert_eq!(session.out("pkill sleep; echo back"), "back");
    assert_eq!(session.show()["state"], "running");
    assert_eq!(sleeps(&session)["reason"], "idle");
    server.delete_all_and_check();
}
