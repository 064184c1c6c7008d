//! What was accepted is answered with what became of it: never with a failure of the server's, always the same to the same
//! request, also after a restart of the server. The sandbox, the supervisor and the server die in turn right after work was
//! accepted.

use dormouse_tests::{
    Options, Server, Session, eventually,
    faults::{self, Faults, kill_sandbox},
    http::Reply,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Notes in a file that it ran.
const ONCE: &str = "echo once >> /root/ran; sync";

/// Who dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Sandbox,
    Supervisor,
    Server,
}

/// How a request says that it is the same as one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sameness {
    /// It doesn't.
    None,
    Key,
    Header,
}

struct Scene {
    server: Server,
    faults: Faults,
}

/// A POST that can be sent again.
#[derive(Clone)]
struct Post {
    path: String,
    body: Value,
    header: Option<String>,
}

impl Post {
    /// Sends it; an error where the server died on the way.
    fn send(&self, session: &Session) -> Result<Reply, String> {
        let mut headers = vec![("content-type", "application/json")];
        headers.extend(self.header.as_deref().map(|key| ("idempotency-key", key)));
        let reply = session.client.send("POST", &session.path(&self.path), &headers, Some(self.body.to_string().as_bytes()));
        reply.map_err(|error| error.to_string())
    }
}

impl Scene {
    fn new() -> Scene {
        let (faults, mut options) = (Faults::new(), Options::default());
        faults.give_to(&mut options);
        // A wake is to be a restore.
        options.args.push("--no-confirm".to_owned());
        Scene { server: Server::with(options), faults }
    }

    /// Sends a request and has the victim die where `role` reaches `point`. The server is started again where it is the one.
    #[track_caller]
    fn strike(&mut self, session: &Session, post: &Post, victim: Victim, role: &str, point: &str) -> Result<Reply, String> {
        let action = if victim == Victim::Sandbox { "pause" } else { "kill" };
        self.faults.arm(&format!("{role} {point} {action}\n"));
        let answer = std::thread::scope(|scope| {
            let asking = scope.spawn(|| post.send(session));
            if victim == Victim::Sandbox {
                assert!(self.faults.paused(|| asking.is_finished()), "{point} is not reached");
                kill_sandbox(&self.server, session);
                self.faults.disarm();
            }
            asking.join().expect("the question doesn't panic")
        });
        assert!(self.faults.trace(role).contains(point), "{point} is not reached");
        self.faults.disarm();
        if victim == Victim::Server {
            assert!(answer.is_err(), "it died before it could answer: {answer:?}");
            self.server.kill();
            self.server.start_again();
        }
        answer
    }

    /// The same request again, before and after another restart of the server: it is answered the same.
    #[track_caller]
    fn same_again(&mut self, session: &Session, post: &Post, first: Option<&Value>) -> Value {
        let session = session.on(&self.server.client);
        let again = post.send(&session).expect("an answer").expect(201).json();
        self.server.crash();
        let session = session.on(&self.server.client);
        let restarted = post.send(&session).expect("an answer").expect(201).json();
        for other in first.into_iter().chain([&restarted]) {
            for field in ["id", "state", "exit_code", "reason"] {
                assert_eq!(other[field], again[field], "{field}: {other} {again}");
            }
        }
        again
    }
}

/// How often it ran. The session is started for that where it is stopped.
#[track_caller]
fn ran(session: &Session) -> String {
    session.exec_with(&json!({ "shell": "cat /root/ran 2>/dev/null", "start": true })).stdout.trim_end().to_owned()
}

fn exec_of(same: Sameness, wait: bool, shell: &str) -> Post {
    let mut body = json!({ "shell": shell });
    if same == Sameness::Key {
        body["key"] = json!("once");
    }
    let header = (same == Sameness::Header).then(|| "once".to_owned());
    Post { path: format!("/execs?wait={wait}"), body, header }
}

/// What an exec's record says, what is found under its id later, and what it did, agree.
#[track_caller]
fn agrees(session: &Session, exec: &Value, told: &str) {
    let shown = session.ended(exec["id"].as_str().expect("an exec has an id"));
    let ran = ran(session);
    match shown["state"].as_str() {
        Some("exited") => assert_eq!((ran.as_str(), &shown["exit_code"]), ("once", &json!(0)), "{told}: {shown}"),
        Some("lost") => {
            assert!(ran.is_empty() || ran == "once", "{told}: it ran '{ran}'");
            assert!(shown["exit_code"].is_null() && shown["reason"].is_string(), "{told}: {shown}");
        }
        _ => panic!("{told}: {shown}"),
    }
}

#[test]
fn an_exec_whose_sandbox_dies_is_lost_and_says_why() {
    let mut scene = Scene::new();
    // It can't have ended before its sandbox does.
    let long = format!("{ONCE}; sleep 1000");
    for same in [Sameness::None, Sameness::Key, Sameness::Header] {
        for (wait, point) in [(false, "spawn.before"), (true, "spawn.before"), (false, "spawn.after"), (true, "spawn.after")] {
            let told = format!("{same:?} wait={wait} {point}");
            let (session, post) = (scene.server.session(), exec_of(same, wait, &long));
            let answer = scene.strike(&session, &post, Victim::Sandbox, "supervise", point);
            let exec = answer.expect("the server lives").expect(201).json();
            if point == "spawn.before" || wait {
                assert_eq!((&exec["state"], &exec["reason"]), (&json!("lost"), &json!("killed")), "{told}: {exec}");
            }
            let shown = session.ended(exec["id"].as_str().expect("an id"));
            let stopped = eventually("it is stopped", || Some(session.show()).filter(|shown| shown["state"] == "stopped"));
            assert_eq!((&shown["state"], &shown["reason"]), (&json!("lost"), &stopped["reason"]), "{told}: {shown}");
            let history = session.events();
            let ends = history.iter().filter(|e| e["type"] == "exec.ended" && e["data"]["exec_id"] == exec["id"]).count();
            assert_eq!(ends, 1, "{told}: its end is told once: {history:?}");
            if same != Sameness::None {
                let first = (exec["state"] == "lost").then_some(&exec);
                scene.same_again(&session, &post, first);
            }
            agrees(&session.on(&scene.server.client), &exec, &told);
        }
    }
    scene.server.delete_all_and_check();
}

#[test]
fn an_exec_whose_supervisor_dies_has_run_or_is_lost_and_its_session_goes_on() {
    let mut scene = Scene::new();
    for same in [Sameness::None, Sameness::Key, Sameness::Header] {
        for (wait, point) in [(false, "spawn.before"), (true, "spawn.before"), (false, "spawn.after"), (true, "spawn.after")] {
            let told = format!("{same:?} wait={wait} {point}");
            let (session, post) = (scene.server.session(), exec_of(same, wait, ONCE));
            session.out("echo kept > /tmp/memory");
            let answer = scene.strike(&session, &post, Victim::Supervisor, "supervise", point);
            let exec = answer.expect("the server lives").expect(201).json();
            let shown = session.ended(exec["id"].as_str().expect("an id"));
            if point == "spawn.before" {
                let lost = (&json!("lost"), &json!("supervisor_lost"), &Value::Null);
                assert_eq!((&shown["state"], &shown["reason"], &shown["exit_code"]), lost, "{told}: {shown}");
                assert_eq!(ran(&session), "", "{told}: the guest never had it");
            }
            if same != Sameness::None {
                scene.same_again(&session, &post, None);
            }
            let session = session.on(&scene.server.client);
            agrees(&session, &exec, &told);
            assert_eq!(session.out("cat /tmp/memory"), "kept", "{told}: the session goes on");
        }
    }
    scene.server.delete_all_and_check();
}

#[test]
fn an_exec_whose_server_dies_has_run_once_when_it_is_asked_for_again() {
    let mut scene = Scene::new();
    for same in [Sameness::Key, Sameness::Header] {
        // Written down and not sent; sent and not answered.
        for (wait, point) in [(false, "ask.before"), (true, "ask.before"), (false, "ask.after"), (true, "ask.after")] {
            let told = format!("{same:?} wait={wait} {point}");
            let (session, post) = (scene.server.session(), exec_of(same, wait, ONCE));
            let _ = scene.strike(&session, &post, Victim::Server, "server", point);
            let session = session.on(&scene.server.client);
            let exec = post.send(&session).expect("an answer").expect(201).json();
            let shown = session.ended(exec["id"].as_str().expect("an id"));
            assert_eq!(shown["state"], "exited", "{told}: {shown}");
            scene.same_again(&session, &post, wait.then_some(&exec));
            let session = session.on(&scene.server.client);
            agrees(&session, &exec, &told);
            assert_eq!(ran(&session), "once", "{told}");
        }
    }
    scene.server.delete_all_and_check();
}

/// A guest that gives no answer in time has the exec all the same.
#[test]
fn an_exec_of_a_slow_guest_is_running() {
    let server = Server::start();
    let session = server.session();
    let mark = faults::mark(server.data(), &session);
    let signal = |signal: i32| {
        for pid in mark["sandbox_pids"].as_array().expect("a list").iter().filter_map(Value::as_u64) {
            // SAFETY: kill takes two integers; the processes are those of this test's sandbox.
            unsafe { libc::kill(i32::try_from(pid).expect("a process id"), signal) };
        }
    };
    signal(libc::SIGSTOP);
    let began = Instant::now();
    let answer = exec_of(Sameness::None, false, ONCE).send(&session).expect("an answer");
    signal(libc::SIGCONT);
    let exec = answer.expect(201).json();
    assert_eq!((&exec["state"], &exec["pid"]), (&json!("running"), &Value::Null), "{exec}");
    assert!(began.elapsed() < Duration::from_secs(30), "it is not waited for: {:?}", began.elapsed());
    agrees(&session, &exec, "slow");
    assert_eq!(ran(&session), "once");
    server.delete_all_and_check();
}

#[test]
fn a_terminal_is_there_or_has_ended_with_a_cause_whoever_dies() {
    let mut scene = Scene::new();
    let body = json!({ "argv": ["sh", "-c", format!("{ONCE}; exec sleep 1000")], "cols": 80, "rows": 24 });
    for header in [None, Some("once".to_owned())] {
        let post = Post { path: "/terminals".to_owned(), body: body.clone(), header };
        for (victim, role, point) in [
            (Victim::Sandbox, "supervise", "spawn.before"),
            (Victim::Sandbox, "supervise", "spawn.after"),
            (Victim::Supervisor, "supervise", "spawn.before"),
            (Victim::Supervisor, "supervise", "spawn.after"),
            (Victim::Server, "server", "ask.before"),
            (Victim::Server, "server", "ask.after"),
        ] {
            if victim == Victim::Server && post.header.is_none() {
                continue;
            }
            let told = format!("{victim:?} {point} {:?}", post.header);
            let session = scene.server.session();
            let answer = scene.strike(&session, &post, victim, role, point);
            let session = session.on(&scene.server.client);
            let opened = match victim {
                Victim::Server => post.send(&session).expect("an answer"),
                _ => answer.expect("the server lives"),
            };
            let opened = opened.expect(201).json();
            let path = session.path(&format!("/terminals/{}", opened["id"].as_str().expect("an id")));
            let reason = match (victim, point) {
                (Victim::Sandbox, _) => Some("killed"),
                (Victim::Supervisor, "spawn.before") => Some("supervisor_lost"),
                _ => None,
            };
            let shown = match reason {
                Some(_) => eventually("it has ended", || {
                    Some(session.client.get(&path).expect(200).json()).filter(|shown| shown["state"] == "ended")
                }),
                None => session.client.get(&path).expect(200).json(),
            };
            let state = if reason.is_some() { "ended" } else { "running" };
            assert_eq!((&shown["state"], &shown["exit_code"]), (&json!(state), &Value::Null), "{told}: {shown}");
            let listed = session.client.get(&session.path("/terminals")).expect(200).json();
            assert_eq!(listed["items"].as_array().expect("a list").len(), 1, "{told}: {listed}");
            if post.header.is_some() {
                scene.same_again(&session, &post, Some(&opened));
            }
            let session = session.on(&scene.server.client);
            let ran = ran(&session);
            match reason {
                None => assert_eq!(ran, "once", "{told}"),
                Some(_) => assert!(ran.is_empty() || ran == "once", "{told}: it ran '{ran}'"),
            }
        }
    }
    scene.server.delete_all_and_check();
}

/// A lifecycle call and how the session is brought to where it begins.
const TRANSITIONS: [(&str, Option<&str>, &str); 6] = [
    ("hibernate", None, "capture.paused"),
    ("wake", Some("hibernate"), "start.alive"),
    ("stop", None, "end.begun"),
    ("start", Some("stop"), "start.alive"),
    ("pause", None, "ask.before"),
    ("unpause", Some("pause"), "ask.before"),
];

#[test]
fn a_lifecycle_call_is_answered_with_the_session_or_with_its_operation_whoever_dies() {
    let mut scene = Scene::new();
    for (call, first, point) in TRANSITIONS {
        for victim in [Victim::Sandbox, Victim::Supervisor, Victim::Server] {
            let told = format!("{call} {victim:?}");
            let role = if point == "ask.before" { "server" } else { "supervise" };
            let (role, at) = match victim {
                // With the intent stored.
                Victim::Server => ("server", "commit.after"),
                Victim::Supervisor if role == "server" => continue,
                _ => (role, point),
            };
            let session = scene.server.session();
            session.out("echo kept > /root/file; sync");
            if let Some(first) = first {
                session.call(first).expect(200);
            }
            if call == "wake" {
                let dir = scene.server.data().join("sessions").join(&session.id);
                eventually("its supervisor ends", || (!dir.join("run/supervisor.sock").exists()).then_some(()));
            }
            let post = Post { path: format!("/{call}"), body: json!({}), header: Some(format!("once-{call}")) };
            let answer = scene.strike(&session, &post, victim, role, at);
            let session = session.on(&scene.server.client);
            let shown = eventually("it comes to rest", || Some(session.show()).filter(|shown| shown["operation"].is_null()));
            if let Ok(reply) = &answer {
                tells_what_happened(&session, reply, &shown, &told);
            }
            let again = post.send(&session).expect("an answer");
            assert!(again.status < 500, "{told}: {} {}", again.status, again.text());
            if let Ok(reply) = &answer {
                assert_eq!((reply.status, reply.text()), (again.status, again.text()), "{told}: the same again");
            }
            scene.server.crash();
            let session = session.on(&scene.server.client);
            let restarted = post.send(&session).expect("an answer");
            assert_eq!((restarted.status, restarted.text()), (again.status, again.text()), "{told}: after a restart");
            eventually("the session can be used", || {
                let state = session.state();
                let body = json!({ "shell": "cat /root/file", "start": true });
                if state == "paused" {
                    session.call("unpause").expect(200);
                }
                let exec = session.client.post(&session.path("/execs?wait=true"), &body);
                (exec.status == 201 && exec.json()["stdout"] == "kept\n").then_some(())
            });
        }
    }
    scene.server.delete_all_and_check();
}

/// The session as it is, or which operation failed and why.
#[track_caller]
fn tells_what_happened(session: &Session, reply: &Reply, shown: &Value, told: &str) {
    match reply.status {
        200 => assert_eq!(reply.json()["id"], shown["id"], "{told}"),
        422 => {
            assert_eq!(reply.problem(), "operation_failed", "{told}: {}", reply.text());
            let problem = reply.json();
            let operation = problem["operation_id"].as_str().expect("an operation's id");
            let operation = session.client.get(&format!("/v1/operations/{operation}")).expect(200).json();
            assert_eq!((&operation["state"], &operation["session_id"]), (&json!("failed"), &shown["id"]), "{told}: {operation}");
            assert!(problem["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{told}: {problem}");
        }
        _ => panic!("{told}: {} {}", reply.status, reply.text()),
    }
}

#[test]
fn a_server_that_is_asked_to_end_while_a_session_falls_asleep_leaves_that_to_the_next() {
    let Scene { mut server, faults } = Scene::new();
    let session = server.session();
    session.out("echo kept > /tmp/memory");
    faults.arm("supervise capture.paused pause\n");
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| session.client.send("POST", &session.path("/hibernate"), &[], None));
        assert!(faults.paused(|| asking.is_finished()), "the capture is not reached");
        let asked = Instant::now();
        assert_eq!(server.terminate(), Some(0));
        assert!(asked.elapsed() < Duration::from_secs(10), "it takes its time: {:?}", asked.elapsed());
        // What the client is told, if anything, claims nothing.
        let answer = asking.join().expect("the question doesn't panic");
        assert!(answer.is_err() || answer.is_ok_and(|reply| reply.status != 200 || reply.json()["state"] != "hibernated"));
    });
    faults.disarm();
    server.start_again();
    let session = session.on(&server.client);
    let shown = eventually("it comes to rest", || Some(session.show()).filter(|shown| shown["operation"].is_null()));
    assert!(["running", "hibernated"].contains(&shown["state"].as_str().expect("a state")), "{shown}");
    assert_eq!(session.out("cat /tmp/memory"), "kept");
    session.hibernate();
    assert_eq!(session.out("cat /tmp/memory"), "kept");
    server.delete_all_and_check();
}

#[test]
fn a_sync_that_fails_is_tried_again_and_loses_nothing() {
    let Scene { server, faults } = Scene::new();
    let session = server.session();
    faults.arm("supervise journal.sync eio\n");
    let exec = session.start_sh("for i in $(seq 1000); do echo $i; done; exec sleep 100000");
    eventually("it is synced", || faults.trace("supervise").contains("journal.sync").then_some(()));
    faults.disarm();
    let whole: String = (1..=1000).map(|n| format!("{n}\n")).collect();
    eventually("all of it is there", || (session.output(&exec, "stdout") == whole.as_bytes()).then_some(()));
    session.hibernate();
    assert_eq!(String::from_utf8(session.output(&exec, "stdout")).expect("text"), whole);
    session.wake();
    assert_eq!(session.exec(&exec)["state"], "running");
    server.delete_all_and_check();
}
