//! A supervisor that dies under a living sandbox: noticed at once, and the sandbox taken over with all its memory.

use dormouse_tests::{
    Options, Server, Session, eventually, leftovers,
    terminal::{Viewer, output_of},
};
use model::{Offset, Timestamp};
use serde_json::{Value, json};
use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use wire::{
    layout::{SessionLayout, SupervisorMark},
    terminal::{ClientFrame, InputSeq, ServerFrame},
};

/// A loss that comes later than this was not noticed in time. [M] It takes some milliseconds.
const NOTICED_WITHIN: Duration = Duration::from_secs(2);

fn layout(server: &Server, session: &Session) -> SessionLayout {
    SessionLayout::new(server.data().join("sessions").join(&session.id))
}

fn mark(server: &Server, session: &Session) -> SupervisorMark {
    let path = layout(server, session).mark();
    eventually("a whole mark", || serde_json::from_slice(&fs::read(&path).ok()?).ok())
}

fn kill(pid: u32) {
    // SAFETY: kill takes two integers; the process belongs to a session of this test.
    unsafe { libc::kill(i32::try_from(pid).expect("a process id"), libc::SIGKILL) };
}

/// Kills the session's supervisor and nothing else; tells when.
fn kill_supervisor(server: &Server, session: &Session) -> Timestamp {
    let pid = mark(server, session).pid;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis();
    kill(pid);
    Timestamp(i64::try_from(now).expect("before the year 292 million"))
}

/// Processes of the session's sandbox on this machine.
fn sandbox_pids(session: &Session) -> Vec<u32> {
    let groups = leftovers::cgroups(std::slice::from_ref(&session.id));
    let mut pids: Vec<u32> = groups
        .iter()
        .filter_map(|dir| fs::read_to_string(dir.join("cgroup.procs")).ok())
        .flat_map(|text| text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<_>>())
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// Waits until the session has been taken over `times` times and nothing is under way.
#[track_caller]
fn taken_over(session: &Session, times: usize) -> Value {
    eventually("the sandbox is taken over", || {
        let done = session.events().iter().filter(|event| event["type"] == "recapture.done").count();
        Some(session.show()).filter(|shown| done == times && shown["operation"].is_null())
    })
}

/// A number each 10 ms, and the shell's process id, until there is `/tmp/enough`; then it exits with 7.
const COUNT: &str =
    "i=0; while [ ! -e /tmp/enough ]; do i=$((i+1)); echo \"$i $$\"; sleep 0.01; done; echo \"end $$\" >&2; exit 7";

/// How far a count has come; every number so far must stand there exactly once, from one and the same shell.
#[track_caller]
fn counted(session: &Session, exec: &str) -> usize {
    let text = String::from_utf8(session.output(exec, "stdout")).expect("digits");
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let shell = whole.lines().next().and_then(|line| line.split_once(' ')).map(|(_, pid)| pid.to_owned()).unwrap_or_default();
    for (n, line) in whole.lines().enumerate() {
        assert_eq!(line, format!("{} {shell}", n + 1), "every number exactly once, from the same shell");
    }
    whole.lines().count()
}

#[track_caller]
fn counts_on(session: &Session, exec: &str) {
    let before = counted(session, exec);
    eventually("it counts on", || (counted(session, exec) > before + 3).then_some(()));
}

#[track_caller]
fn ends_well(session: &Session, exec: &str) {
    session.out("touch /tmp/enough");
    let ended = session.ended(exec);
    assert_eq!((&ended["state"], &ended["exit_code"]), (&json!("exited"), &json!(7)), "{ended}");
    assert_eq!(ended["stdout_bytes"].as_u64(), Some(session.output(exec, "stdout").len() as u64));
    counted(session, exec);
    let gaps: Vec<Value> = session.events().into_iter().filter(|event| event["type"] == "gap").collect();
    assert_eq!(gaps, [] as [Value; 0], "nothing of the output was lost");
}

/// Opens a terminal with a shell.
fn shell(session: &Session) -> String {
    let body = json!({ "argv": ["bash", "--norc"], "cols": 80, "rows": 24 });
    session.client.post(&session.path("/terminals"), &body).expect(201).json()["id"].as_str().expect("an id").to_owned()
}

fn attach(session: &Session, terminal: &str, client: &str, from: Offset) -> Viewer {
    let query = format!("client={client}&cols=100&rows=30&from={from}&mode=write");
    eventually("the terminal can be attached to", || Viewer::attach(session, terminal, &query).ok())
}

/// Types a line as input `seq` and waits until the terminal has printed `wanted`, which the line itself doesn't show;
/// returns where its output then is.
#[track_caller]
fn ask(viewer: &mut Viewer, from: Offset, seq: u64, line: &str, wanted: &str) -> Offset {
    assert!(viewer.type_text(seq, &format!("{line}\n")));
    let mut said = String::new();
    let (mut typed, mut next) = (false, from);
    let frames = viewer.until(wanted, |frame| {
        match frame {
            ServerFrame::Output { offset, bytes } => {
                said.push_str(&String::from_utf8_lossy(bytes));
                next = offset.plus(bytes.len());
            }
            ServerFrame::InputTyped { seq: done } => typed |= done.0 == seq,
            ServerFrame::InputRefused { reason, .. } => panic!("refused: {reason}"),
            _ => {}
        }
        typed && said.contains(wanted)
    });
    output_of(&frames, from);
    next
}

fn screen(session: &Session, terminal: &str) -> String {
    session.client.get(&session.path(&format!("/terminals/{terminal}/screen"))).expect(200).text()
}

#[test]
fn programs_terminals_and_requests_go_on_under_another_supervisor() {
    let server = Server::start();
    let session = server.session();
    let exec = session.start_sh(COUNT);
    counts_on(&session, &exec);
    let terminal = shell(&session);
    let client = uuid::Uuid::new_v4().to_string();
    let mut viewer = attach(&session, &terminal, &client, Offset::ZERO);
    let mut next = ask(&mut viewer, Offset::ZERO, 1, "colour=blue; echo \"on\"\"e-$$-\"", "one-");
    // Input that its program has not read yet, and the end of it.
    let body = json!({ "shell": "while [ ! -e /tmp/go ]; do sleep 0.02; done; cat", "stdin": "all of it" });
    let reader = session.client.post(&session.path("/execs"), &body).expect(201).json();
    let reader = reader["id"].as_str().expect("an id").to_owned();
    let waiting = session.clone();
    let waiting = thread::spawn(move || {
        let body = json!({ "shell": "while [ ! -e /tmp/enough ]; do sleep 0.02; done; echo done; exit 5" });
        waiting.client.post(&waiting.path("/execs?wait=true"), &body)
    });
    eventually("three execs run", || {
        let list = session.client.get(&session.path("/execs")).expect(200).json();
        let running = list["items"].as_array().expect("a list").iter().filter(|e| e["state"] == "running" && !e["pid"].is_null());
        (running.count() == 3).then_some(())
    });

    for round in 1..=2_u64 {
        let killed_at = kill_supervisor(&server, &session);
        let shown = taken_over(&session, usize::try_from(round).expect("small"));
        assert_eq!((&shown["state"], &shown["memory"]), (&json!("running"), &json!("live")), "{shown}");
        assert_eq!(shown["generation"], round + 1);
        let lost = session.event("supervisor.lost");
        let noticed_at: Timestamp = lost["at"].as_str().and_then(|at| at.parse().ok()).expect("a time");
        assert!(noticed_at.since(killed_at) < NOTICED_WITHIN, "killed at {killed_at}, noticed: {lost}");
        let done = session.event("recapture.done");
        assert_eq!((&done["data"]["memory"], &done["data"]["generation"]), (&json!("kept"), &json!(round + 1)));
        counts_on(&session, &exec);

        // The client comes back and asks again for what it may not know to be typed: it is not typed twice.
        let mut again = attach(&session, &terminal, &client, next);
        assert!(again.type_text(round, &format!("echo twice-{round}\n")));
        let frames = again.until("an answer", |frame| matches!(frame, ServerFrame::InputTyped { .. }));
        assert!(frames.iter().any(|frame| matches!(frame, ServerFrame::InputTyped { seq } if *seq == InputSeq(round))));
        assert!(frames.iter().any(|frame| matches!(frame, ServerFrame::Size { cols: 100, rows: 30 })), "{frames:?}");
        next = next.plus(output_of(&frames, next).len());
        let line = format!("echo \"ne\"\"xt-{round}-$colour-$$-\"");
        next = ask(&mut again, next, round + 1, &line, &format!("next-{round}-blue-"));
        let shown = screen(&session, &terminal);
        assert!(shown.contains("one-") && shown.contains(&format!("next-{round}-blue-")), "{shown}");
        assert!(!shown.contains("twice"), "{shown}");
        assert!(again.send(ClientFrame::Ping));
    }
    let pids: Vec<String> = screen(&session, &terminal)
        .lines()
        .filter(|line| line.starts_with("one-") || line.starts_with("next-"))
        .map(|line| line.trim_end_matches('-').rsplit('-').next().unwrap_or_default().to_owned())
        .collect();
    assert!(pids.len() == 3 && pids.iter().all(|pid| *pid == pids[0] && !pid.is_empty()), "the same shell: {pids:?}");

    session.out("touch /tmp/go");
    assert_eq!(session.ended(&reader)["exit_code"], 0);
    assert_eq!(session.output(&reader, "stdout"), b"all of it");
    // It sleeps and wakes as any other, with what was taken over.
    session.hibernate();
    session.wake();
    counts_on(&session, &exec);
    ends_well(&session, &exec);
    let reply = waiting.join().expect("an answer").expect(201).json();
    assert_eq!((&reply["state"], &reply["exit_code"], &reply["stdout"]), (&json!("exited"), &json!(5), &json!("done\n")));
    let images = layout(&server, &session).images();
    eventually("spent images are gone", || fs::read_dir(&images).map_or(Some(()), |mut all| all.next().is_none().then_some(())));
    server.delete_all_and_check();
}

#[test]
fn a_session_that_is_paused_comes_back_paused() {
    let server = Server::start();
    let session = server.session();
    let exec = session.start_sh(COUNT);
    counts_on(&session, &exec);
    session.call("pause").expect(200);
    kill_supervisor(&server, &session);
    let shown = taken_over(&session, 1);
    assert_eq!((&shown["state"], &shown["memory"], &shown["generation"]), (&json!("paused"), &json!("live"), &json!(2)));
    let refused = session.client.post(&session.path("/execs"), &json!({ "shell": "true" }));
    assert_eq!((refused.status, refused.problem().as_str()), (409, "paused"));
    let before = counted(&session, &exec);
    // Two looks at something that must not change.
    thread::sleep(Duration::from_millis(300));
    assert_eq!(counted(&session, &exec), before, "it is frozen");
    assert_eq!(session.call("unpause").expect(200).json()["state"], "running");
    counts_on(&session, &exec);
    ends_well(&session, &exec);
    server.delete_all_and_check();
}

#[test]
fn a_server_that_comes_back_finds_it_and_has_it_taken_over() {
    let mut server = Server::start();
    let sessions = [server.session(), server.session()];
    let execs = sessions.each_ref().map(|session| session.start_sh(COUNT));
    for (session, exec) in sessions.iter().zip(&execs) {
        counts_on(session, exec);
    }
    sessions[1].call("pause").expect(200);
    server.kill();
    for session in &sessions {
        kill_supervisor(&server, session);
    }
    server.start_again();
    let sessions = sessions.map(|session| session.on(&server.client));
    for (session, state) in sessions.iter().zip(["running", "paused"]) {
        let shown = taken_over(session, 1);
        assert_eq!((&shown["state"], &shown["memory"], &shown["generation"]), (&json!(state), &json!("live"), &json!(2)));
        assert!(session.events().iter().any(|event| event["type"] == "supervisor.lost"));
    }
    sessions[1].call("unpause").expect(200);
    for (session, exec) in sessions.iter().zip(&execs) {
        counts_on(session, exec);
        ends_well(session, exec);
    }
    server.delete_all_and_check();
}

#[test]
fn a_sandbox_that_dies_with_its_supervisor_leaves_a_stopped_session_that_says_so() {
    for server_is_there in [true, false] {
        let mut server = Server::start();
        let mut session = server.session();
        session.out("echo disk > /root/kept; sync");
        let exec = session.start_sh(COUNT);
        counts_on(&session, &exec);
        let pids = sandbox_pids(&session);
        assert!(!pids.is_empty());
        if !server_is_there {
            server.kill();
        }
        // The supervisor first: it must not live to tell of the sandbox's end.
        kill_supervisor(&server, &session);
        pids.into_iter().for_each(kill);
        if !server_is_there {
            server.start_again();
            session = session.on(&server.client);
        }
        let stopped = eventually("the session is stopped", || Some(session.show()).filter(|s| s["state"] == "stopped"));
        assert_eq!((&stopped["reason"], &stopped["memory"]), (&json!("supervisor_lost"), &json!("lost")));
        assert_eq!(session.exec(&exec)["state"], "lost");
        assert!(counted(&session, &exec) > 3, "what it printed is kept");
        session.call("start").expect(200);
        assert_eq!(session.out("cat /root/kept"), "disk");
        server.delete_all_and_check();
    }
}

/// Holds the next supervisor at a point of its way.
struct Hold {
    dir: tempfile::TempDir,
}

impl Hold {
    fn new() -> (Hold, Options) {
        let hold = Hold { dir: tempfile::Builder::new().prefix("dormouse-faults-").tempdir().expect("a directory") };
        let env = vec![("DORMOUSE_FAULTS".to_owned(), hold.dir.path().to_string_lossy().into_owned())];
        (hold, Options { env, ..Options::default() })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn at(&self, point: &str) {
        fs::write(self.file("plan"), format!("supervise {point} pause\n")).expect("a file");
        fs::write(self.file("armed"), "").expect("a file");
    }

    /// Waits until one is held there; from here on nobody else is.
    fn reached(&self) {
        eventually("the point is reached", || self.file("paused").exists().then_some(()));
        for name in ["armed", "plan"] {
            fs::remove_file(self.file(name)).expect("it was armed");
        }
    }
}

#[test]
fn one_that_dies_while_it_takes_over_is_followed_by_another() {
    let (hold, options) = Hold::new();
    let mut server = Server::with(options);
    for point in ["recapture.begun", "recapture.captured", "recapture.ended", "recapture.restored"] {
        for server_is_there in [true, false] {
            println!("{point}, the server {}", if server_is_there { "lives" } else { "dies, too" });
            let mut session = server.session();
            let exec = session.start_sh(COUNT);
            counts_on(&session, &exec);
            hold.at(point);
            kill_supervisor(&server, &session);
            hold.reached();
            if !server_is_there {
                server.kill();
            }
            kill_supervisor(&server, &session);
            let _ = fs::remove_file(hold.file("paused"));
            if !server_is_there {
                server.start_again();
                session = session.on(&server.client);
            }
            let shown = taken_over(&session, 1);
            assert_eq!((&shown["state"], &shown["memory"]), (&json!("running"), &json!("live")), "{point}: {shown}");
            counts_on(&session, &exec);
            ends_well(&session, &exec);
        }
    }
    server.delete_all_and_check();
}

#[test]
fn a_server_that_dies_meanwhile_finds_the_session_taken_over() {
    let (hold, options) = Hold::new();
    let mut server = Server::with(options);
    let mut session = server.session();
    let exec = session.start_sh(COUNT);
    counts_on(&session, &exec);
    hold.at("recapture.captured");
    kill_supervisor(&server, &session);
    hold.reached();
    server.kill();
    fs::remove_file(hold.file("paused")).expect("it is held");
    server.start_again();
    session = session.on(&server.client);
    let shown = taken_over(&session, 1);
    assert_eq!((&shown["state"], &shown["memory"], &shown["generation"]), (&json!("running"), &json!("live"), &json!(2)));
    counts_on(&session, &exec);
    ends_well(&session, &exec);
    server.delete_all_and_check();
}

#[test]
fn a_delete_in_the_middle_of_it_leaves_nothing() {
    let (hold, options) = Hold::new();
    let server = Server::with(options);
    let session = server.session();
    hold.at("recapture.captured");
    kill_supervisor(&server, &session);
    hold.reached();
    let deleted = session.clone();
    let deleting = thread::spawn(move || deleted.delete());
    fs::remove_file(hold.file("paused")).expect("it is held");
    deleting.join().expect("it is deleted");
    leftovers::expect_none(server.data());
}

#[test]
fn a_hibernate_that_loses_its_supervisor_fails_and_the_session_goes_on() {
    let (hold, options) = Hold::new();
    let server = Server::with(options);
    let session = server.session();
    let exec = session.start_sh(COUNT);
    counts_on(&session, &exec);
    // Its memory is in an image then, and it stands still.
    hold.at("capture.done");
    let asked = session.clone();
    let asked = thread::spawn(move || asked.call("hibernate"));
    hold.reached();
    kill_supervisor(&server, &session);
    let _ = fs::remove_file(hold.file("paused"));
    let reply = asked.join().expect("an answer");
    assert!(reply.status >= 400, "{} {}", reply.status, reply.text());
    let shown = taken_over(&session, 1);
    assert_eq!((&shown["state"], &shown["memory"]), (&json!("running"), &json!("live")), "{shown}");
    counts_on(&session, &exec);
    ends_well(&session, &exec);
    server.delete_all_and_check();
}

#[test]
fn the_frozen_original_of_a_hibernated_session_is_cleared_away_and_its_image_wakes() {
    let (hold, options) = Hold::new();
    let server = Server::with(options);
    let session = server.session();
    let exec = session.start_sh(COUNT);
    counts_on(&session, &exec);
    hold.at("hibernate.frozen");
    let asked = session.clone();
    let asked = thread::spawn(move || asked.call("hibernate"));
    hold.reached();
    kill_supervisor(&server, &session);
    let _ = fs::remove_file(hold.file("paused"));
    asked.join().expect("an answer").expect(200);
    assert_eq!(session.state(), "hibernated");
    eventually("its frozen original is gone", || sandbox_pids(&session).is_empty().then_some(()));
    assert_eq!(session.state(), "hibernated");
    session.wake();
    counts_on(&session, &exec);
    ends_well(&session, &exec);
    server.delete_all_and_check();
}
