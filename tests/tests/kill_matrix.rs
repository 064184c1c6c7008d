//! Every operation, broken at every step: the process dies there, or its file operation fails. Whatever happens, the
//! session's state is legal, disk and memory belong together, nothing acknowledged is lost, nothing is left without an
//! owner, and the same request repeated succeeds.
//!
//! A dry run counts the steps of an operation (`faults`); then each is broken in turn. The usual run takes a sample of
//! all cases by a seed that is printed; the long form takes all of them, and tells all that fail.

use dormouse_tests::{Options, PATIENCE, Server, Session, eventually, http::Reply, long};
use serde_json::{Value, json};
use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

/// Cases of a usual run, and which: the same each time, so that what it finds was changed by what is tested. Another seed
/// in `DORMOUSE_SEED` takes others.
const SAMPLE: usize = 16;
const USUAL_SEED: &str = "1";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Create,
    Exec,
    Put,
    Hibernate,
    Wake,
    Pause,
    Unpause,
    Stop,
    Start,
    Delete,
}

const OPERATIONS: [Operation; 10] = {
    use Operation::*;
    [Create, Exec, Put, Hibernate, Wake, Pause, Unpause, Stop, Start, Delete]
};

/// What is done at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blow {
    /// The process that is there dies.
    Kill,
    /// The sandbox's processes are killed while it waits there.
    KillSandbox,
    NoSpace,
    BadDisk,
    /// Half of a write.
    Short,
}

#[derive(Debug, Clone)]
struct Case {
    operation: Operation,
    role: String,
    number: usize,
    name: String,
    blow: Blow,
}

/// A server with faults, and a session with something to lose.
struct Scene {
    server: Server,
    faults: PathBuf,
    session: Session,
    /// Prints a line each time that it is asked; its memory is what must not be lost.
    shell: String,
    _dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Scene {
        let dir = tempfile::Builder::new().prefix("dormouse-faults-").tempdir().expect("a directory");
        let faults = dir.path().to_owned();
        let mut options = Options::default();
        options.env.push(("DORMOUSE_FAULTS".to_owned(), faults.to_string_lossy().into_owned()));
        // The restore is what is to be broken, not the thaw.
        options.args.push("--no-confirm".to_owned());
        let server = Server::with(options);
        let session = server.session_with(&json!({ "key": "the-one" }));
        session.write_file("/root/acknowledged", b"kept").expect(204);
        session.out("echo kept > /tmp/memory; echo kept > /root/by-program; sync");
        let shell = session.start_sh("n=0; while read line; do n=$((n+1)); echo $n; done; exec sleep 100000");
        Scene { server, faults, session, shell, _dir: dir }
    }

    /// Brings the session to where the operation begins.
    fn prepare(&self, operation: Operation) {
        match operation {
            Operation::Wake => drop(self.session.hibernate()),
            Operation::Unpause => drop(self.session.call("pause").expect(200)),
            Operation::Start => drop(self.session.call("stop").expect(200)),
            _ => {}
        }
        if operation == Operation::Wake {
            // Let go of: it has to be restored.
            let held = self.server.data().join("sessions").join(&self.session.id).join("run/supervisor.sock");
            eventually("its supervisor ends", || (!held.exists()).then_some(()));
        }
    }

    fn ask(&self, operation: Operation) -> Result<Reply, String> {
        let (client, path) = (&self.session.client, |rest: &str| self.session.path(rest));
        let post = |path: &str, body: Value| client.send("POST", path, JSON, Some(body.to_string().as_bytes()));
        let reply = match operation {
            Operation::Create => post("/v1/sessions", json!({ "key": "another" })),
            Operation::Exec => {
                post(&path("/execs?wait=true"), json!({ "shell": "echo once >> /root/ran; echo said", "key": "once" }))
            }
            Operation::Put => client.send("PUT", &path("/files?path=/root/put"), &[], Some(b"all of it")),
            Operation::Hibernate => post(&path("/hibernate"), json!({})),
            Operation::Wake => post(&path("/wake"), json!({})),
            Operation::Pause => post(&path("/pause"), json!({})),
            Operation::Unpause => post(&path("/unpause"), json!({})),
            Operation::Stop => post(&path("/stop"), json!({})),
            Operation::Start => post(&path("/start"), json!({})),
            Operation::Delete => client.send("DELETE", &path(""), &[], None),
        };
        reply.map_err(|error| error.to_string())
    }

    fn arm(&self) {
        fs::write(self.faults.join("armed"), "").expect("a file");
    }

    fn disarm(&self) {
        for name in ["armed", "plan", "paused"] {
            let _ = fs::remove_file(self.faults.join(name));
        }
    }

    /// The steps of an operation: role, number, kind, name.
    fn steps(operation: Operation) -> Vec<(String, usize, String, String)> {
        let scene = Scene::new();
        scene.prepare(operation);
        scene.arm();
        let reply = scene.ask(operation).expect("an answer");
        assert!(reply.status < 300, "{operation:?}: {} {}", reply.status, reply.text());
        scene.disarm();
        let mut steps = Vec::new();
        for role in ["server", "supervise"] {
            let trace = fs::read_to_string(scene.faults.join(format!("trace.{role}"))).unwrap_or_default();
            for line in trace.lines() {
                let words: Vec<&str> = line.split(' ').collect();
                let number = words[0].parse().expect("a number");
                // What a supervisor does by itself every second isn't a step of this.
                if words[2] != "journal.sync" {
                    steps.push((role.to_owned(), number, words[1].to_owned(), words[2].to_owned()));
                }
            }
        }
        steps
    }

    fn sandbox_pids(&self) -> Vec<u32> {
        let mark = self.server.data().join("sessions").join(&self.session.id).join("run/supervisor.json");
        let mark: Value = fs::read(mark).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
        let pids = mark["sandbox_pids"].as_array().cloned().unwrap_or_default();
        pids.iter().filter_map(|pid| u32::try_from(pid.as_u64()?).ok()).collect()
    }
}

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for operation in OPERATIONS {
        for (role, number, kind, name) in Scene::steps(operation) {
            let mut blows = vec![Blow::Kill];
            if !matches!(operation, Operation::Create | Operation::Wake | Operation::Start) {
                blows.push(Blow::KillSandbox);
            }
            if kind != "point" {
                blows.extend([Blow::NoSpace, Blow::BadDisk]);
            }
            if kind == "write" {
                blows.push(Blow::Short);
            }
            cases.extend(blows.into_iter().map(|blow| Case { operation, role: role.clone(), number, name: name.clone(), blow }));
        }
    }
    cases
}

#[test]
fn operations_broken_at_any_step_lose_nothing_and_can_be_repeated() {
    let mut cases = cases();
    let count = cases.len();
    if !long() {
        // By what a case is, not by its place: a step more or less elsewhere leaves the sample as it is.
        let salt = std::env::var("DORMOUSE_SEED").unwrap_or_else(|_| USUAL_SEED.to_owned());
        println!("DORMOUSE_SEED={salt}");
        cases.sort_by_key(|case| {
            let label = format!("{salt} {:?} {:?} {} {} {}", case.operation, case.blow, case.role, case.name, case.number);
            *blake3::hash(label.as_bytes()).as_bytes()
        });
        cases.truncate(SAMPLE);
    }
    println!("{} of {count} cases", cases.len());
    let mut failed = Vec::new();
    for case in cases {
        let label = format!("{:?} {:?} of {} at {} {}", case.operation, case.blow, case.role, case.number, case.name);
        println!("{label}");
        if std::panic::catch_unwind(|| run(&case)).is_err() {
            failed.push(label);
        }
    }
    assert!(failed.is_empty(), "{} cases failed:\n{}", failed.len(), failed.join("\n"));
}

fn run(case: &Case) {
    let mut scene = Scene::new();
    scene.prepare(case.operation);
    let before = scene.session.show();
    let word = match case.blow {
        Blow::Kill => "kill",
        Blow::KillSandbox => "pause",
        Blow::NoSpace => "enospc",
        Blow::BadDisk => "eio",
        Blow::Short => "short",
    };
    fs::write(scene.faults.join("plan"), format!("{} {} {word}\n", case.role, case.number)).expect("a plan");
    scene.arm();
    let answer = std::thread::scope(|scope| {
        let asking = scope.spawn(|| scene.ask(case.operation));
        if case.blow == Blow::KillSandbox {
            strike_sandbox(&scene, &asking);
        }
        asking.join().expect("the question doesn't panic")
    });
    scene.disarm();
    if case.blow == Blow::Kill && case.role == "server" {
        scene.server.kill();
        scene.server.start_again();
    }
    let session = scene.session.on(&scene.server.client);
    let lost_sandbox = case.blow == Blow::KillSandbox;
    check(&scene, &session, case, &answer, &before, lost_sandbox);
    scene.server.delete_all_and_check();
}

/// Waits for the pause, kills the sandbox there, and lets the process go on. The step may not come this time: then the
/// answer does.
fn strike_sandbox<T>(scene: &Scene, asking: &std::thread::ScopedJoinHandle<'_, T>) {
    let (paused, deadline) = (scene.faults.join("paused"), Instant::now() + PATIENCE);
    while !paused.exists() && !asking.is_finished() {
        assert!(Instant::now() < deadline, "neither the step nor an answer comes");
        std::thread::sleep(Duration::from_millis(5));
    }
    for pid in scene.sandbox_pids() {
        // SAFETY: kill takes two integers; the processes are those of this test's sandbox.
        unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
    }
    let _ = fs::remove_file(paused);
}

fn check(scene: &Scene, session: &Session, case: &Case, answer: &Result<Reply, String>, before: &Value, lost_sandbox: bool) {
    let told = |what: &str, value: &dyn std::fmt::Debug| format!("{case:?}: {what}: {value:?} (answered {answer:?})");
    if case.operation != Operation::Delete {
        // It comes to rest in a state that is legal, and says so.
        let shown = eventually(&told("it comes to rest", &before), || {
            let shown = session.client.get(&session.path("")).expect(200).json();
            shown["operation"].is_null().then_some(shown)
        });
        let state = shown["state"].as_str().expect("a state");
        assert!(["running", "paused", "hibernated", "stopped"].contains(&state), "{}", told("state", &shown));
    }
    // The same request again succeeds.
    let again = eventually(&told("the same again succeeds", &before), || {
        let reply = repeat(session, case.operation)?;
        (reply.status < 300).then_some(reply)
    });
    if case.operation == Operation::Delete {
        session.client.get(&session.path("")).expect(410);
        return;
    }
    // What was acknowledged is there, whatever became of the sandbox.
    let shown = session.show();
    if shown["state"] == "paused" {
        session.call("unpause").expect(200);
    }
    let exec = session.exec_with(&json!({ "shell": "cat /root/acknowledged /root/by-program", "start": true }));
    assert_eq!(exec.stdout, "keptkept\n", "{}", told("files", &exec));
    let stopped = matches!(case.operation, Operation::Stop | Operation::Start);
    let events = session.events();
    let lost = events.iter().any(|event| event["type"] == "state.changed" && event["data"]["to"] == "stopped");
    if lost {
        assert!(stopped || lost_sandbox || was_told(&events), "{}", told("memory is lost without a word", &events));
    } else {
        // Memory that was not said to be lost is there: files in it, and the very process.
        assert_eq!(session.out("cat /tmp/memory"), "kept", "{}", told("memory", &shown));
        assert_eq!(session.exec(&scene.shell)["state"], "running", "{}", told("the program", &shown));
    }
    match case.operation {
        Operation::Exec => {
            let ran = session.out("cat /root/ran");
            if !lost {
                assert_eq!(ran, "once", "{}", told("it ran once", &again.json()));
            }
        }
        Operation::Put => assert_eq!(session.read_file("/root/put").expect(200).body, b"all of it"),
        _ => {}
    }
}

/// True where the history names a cause for the loss of a sandbox.
fn was_told(events: &[Value]) -> bool {
    let stopped = events.iter().rev().find(|event| event["type"] == "state.changed" && event["data"]["to"] == "stopped");
    stopped.is_some_and(|event| event["data"]["reason"].as_str().is_some_and(|reason| !reason.is_empty()))
}

fn repeat(session: &Session, operation: Operation) -> Option<Reply> {
    let (client, path) = (&session.client, |rest: &str| session.path(rest));
    let post = |path: &str, body: Value| client.send("POST", path, JSON, Some(body.to_string().as_bytes())).ok();
    let state = client.get(&path("")).json()["state"].as_str().map(str::to_owned);
    match (operation, state.as_deref()) {
        (Operation::Create, _) => {
            let reply = post("/v1/sessions", json!({ "key": "another" }))?;
            // One that failed for good says so, and gives way to another where that is wanted.
            if reply.status == 409 { post("/v1/sessions", json!({ "key": "another", "replace": true })) } else { Some(reply) }
        }
        (Operation::Exec, _) => {
            post(&path("/execs?wait=true&start=true"), json!({ "shell": "echo once >> /root/ran; echo said", "key": "once" }))
        }
        (Operation::Put, Some("stopped")) => {
            post(&path("/start"), json!({}))?;
            client.send("PUT", &path("/files?path=/root/put"), &[], Some(b"all of it")).ok()
        }
        (Operation::Put, _) => client.send("PUT", &path("/files?path=/root/put"), &[], Some(b"all of it")).ok(),
        // A sandbox that died takes what can only be done to a sandbox with it: the way back is a start.
        (Operation::Hibernate | Operation::Pause | Operation::Unpause | Operation::Wake, Some("stopped")) => {
            post(&path("/start"), json!({}))
        }
        (Operation::Hibernate, _) => post(&path("/hibernate"), json!({})),
        (Operation::Wake, _) => post(&path("/wake"), json!({})),
        (Operation::Pause, _) => post(&path("/pause"), json!({})),
        (Operation::Unpause, _) => post(&path("/unpause"), json!({})),
        (Operation::Stop, _) => post(&path("/stop"), json!({})),
        (Operation::Start, _) => post(&path("/start"), json!({})),
        (Operation::Delete, _) => client.send("DELETE", &path(""), &[], None).ok(),
    }
}
