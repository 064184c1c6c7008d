//! Every operation, broken at every step: the process dies there, or its file operation fails. Whatever happens, the
//! session's state is legal, disk and memory belong together, nothing acknowledged is lost, nothing is left without an
//! owner, and the same request repeated succeeds.
//!
//! A dry run counts the steps of an operation (`faults`); then each is broken in turn. The usual run takes a sample of
//! all cases by a seed that is printed; the long form takes all of them, and tells all that fail.

use dormouse_tests::{
    Options, Server, Session, eventually,
    faults::{Faults, kill_sandbox},
    http::Reply,
    long, place,
};
use serde_json::{Value, json};

/// Cases of a usual run, and which: the same each time, so that what it finds was changed by what is tested. Another seed
/// in `DORMOUSE_SEED` takes others.
const SAMPLE: usize = 30;
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
    Snapshot,
    Fork,
    Rollback,
    DeleteSnapshot,
    /// Into the object store, and the files given up.
    Pack,
    /// A wake out of the object store.
    Fetch,
    Collect,
    Delete,
}

const OPERATIONS: [Operation; 17] = {
    use Operation::*;
    [
        Create,
        Exec,
        Put,
        Hibernate,
        Wake,
        Pause,
        Unpause,
        Stop,
        Start,
        Snapshot,
        Fork,
        Rollback,
        DeleteSnapshot,
        Pack,
        Fetch,
        Collect,
        Delete,
    ]
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
    faults: Faults,
    session: Session,
    /// Prints a line each time that it is asked; its memory is what must not be lost.
    shell: String,
}

impl Scene {
    fn new() -> Scene {
        let (faults, mut options) = (Faults::new(), Options::default());
        faults.give_to(&mut options);
        // The restore is what is to be broken, not the thaw.
        options.args.push("--no-confirm".to_owned());
        // Nothing is packed before somebody asks for it; then nothing stays unpacked.
        options.args.extend(["--pack-after", "1h", "--cache-size", "0"].map(str::to_owned));
        let server = Server::with(options);
        let session = server.session_with(&json!({ "key": "the-one" }));
        session.write_file("/root/acknowledged", b"kept").expect(204);
        session.out("echo kept > /tmp/memory; echo kept > /root/by-program; sync");
        let shell = session.start_sh("n=0; while read line; do n=$((n+1)); echo $n; done; exec sleep 100000");
        Scene { server, faults, session, shell }
    }

    /// Brings the session to where the operation begins.
    fn prepare(&self, operation: Operation) {
        match operation {
            Operation::Wake | Operation::Pack | Operation::Fetch => drop(self.session.hibernate()),
            Operation::Unpause => drop(self.session.call("pause").expect(200)),
            Operation::Start => drop(self.session.call("stop").expect(200)),
            Operation::Rollback | Operation::DeleteSnapshot => {
                self.session.client.post(&self.session.path("/snapshots"), &json!({ "name": KEPT })).expect(201);
            }
            Operation::Collect => {
                let body = json!({ "name": KEPT });
                let taken = self.session.client.post(&self.session.path("/snapshots"), &body).expect(201).json();
                place::put_snapshot_away(&self.server, &taken);
                delete_snapshots(&self.server);
            }
            _ => {}
        }
        if matches!(operation, Operation::Wake | Operation::Pack | Operation::Fetch) {
            // Let go of: it has to be restored.
            let held = self.server.data().join("sessions").join(&self.session.id).join("run/supervisor.sock");
            eventually("its supervisor ends", || (!held.exists()).then_some(()));
        }
        if operation == Operation::Fetch {
            place::put_away(&self.server, &self.session);
        }
    }

    fn ask(&self, operation: Operation) -> Result<Reply, String> {
        send(&self.session, operation).map_err(|error| error.to_string())
    }

    /// The steps of an operation: role, number, kind, name.
    fn steps(operation: Operation) -> Vec<(String, usize, String, String)> {
        let scene = Scene::new();
        scene.prepare(operation);
        scene.faults.arm("");
        let reply = scene.ask(operation).expect("an answer");
        assert!(reply.status < 300, "{operation:?}: {} {}", reply.status, reply.text());
        scene.faults.disarm();
        let mut steps = Vec::new();
        for role in ["server", "supervise"] {
            for line in scene.faults.trace(role).lines() {
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
}

/// The name of the snapshot that is set back to or deleted.
const KEPT: &str = "kept";

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for operation in OPERATIONS {
        for (role, number, kind, name) in Scene::steps(operation) {
            let mut blows = vec![Blow::Kill];
            use Operation::{Collect, Create, Fetch, Pack, Start, Wake};
            if !matches!(operation, Create | Wake | Start | Pack | Fetch | Collect) {
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
    scene.faults.arm(&format!("{} {} {word}\n", case.role, case.number));
    let answer = std::thread::scope(|scope| {
        let asking = scope.spawn(|| scene.ask(case.operation));
        if case.blow == Blow::KillSandbox {
            strike_sandbox(&scene, &asking);
        }
        asking.join().expect("the question doesn't panic")
    });
    scene.faults.disarm();
    if case.blow == Blow::Kill && case.role == "server" {
        scene.server.kill();
        scene.server.start_again();
    }
    let session = scene.session.on(&scene.server.client);
    let lost_sandbox = case.blow == Blow::KillSandbox;
    check(&scene, &session, case, &answer, &before, lost_sandbox);
    if matches!(case.operation, Operation::Snapshot | Operation::Fork | Operation::Rollback | Operation::DeleteSnapshot) {
        // What processes that died had begun to write, the next start clears away.
        scene.server.kill();
        scene.server.start_again();
        delete_snapshots(&scene.server);
    }
    scene.server.delete_all_and_check();
    let names = |dir: &str| std::fs::read_dir(scene.server.data().join(dir)).into_iter().flatten().flatten().map(|e| e.path());
    eventually(&format!("{case:?}: no layer and no snapshot is left"), || {
        names("layers").chain(names("snapshots")).next().is_none().then_some(())
    });
}

fn delete_snapshots(server: &Server) {
    let kept = server.client.get("/v1/snapshots?limit=1000").expect(200).json();
    for snapshot in kept["items"].as_array().into_iter().flatten() {
        server.client.delete(&format!("/v1/snapshots/{}", snapshot["id"].as_str().expect("an id"))).expect(204);
    }
}

/// Waits for the pause, kills the sandbox there, and lets the process go on. The step may not come this time: then the
/// answer does.
fn strike_sandbox<T>(scene: &Scene, asking: &std::thread::ScopedJoinHandle<'_, T>) {
    scene.faults.paused(|| asking.is_finished());
    kill_sandbox(&scene.server, &scene.session);
    scene.faults.go_on();
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
    if let Ok(reply) = answer {
        let before_anything = matches!(reply.status, 503 | 507);
        assert!(reply.status < 500 || before_anything, "{}", told("a failure of the server's", &reply.text()));
    }
    // The same request again succeeds.
    let again = eventually(&told("the same again succeeds", &before), || {
        let reply = repeat(session, case.operation)?;
        let whole = case.operation != Operation::Fork || reply.json()["errors"] == json!([]);
        (reply.status < 300 && whole).then_some(reply)
    });
    if case.operation == Operation::Delete {
        session.client.get(&session.path("")).expect(410);
        return;
    }
    // What was acknowledged is there, whatever became of the sandbox.
    let shown = session.show();
    if shown["state"] == "paused" {
        // Its sandbox may be gone, and the server not told yet: then there is nothing to unpause a moment later.
        eventually(&told("it is unpaused", &shown), || {
            let unpaused = session.call("unpause").status == 200;
            (unpaused || session.state() == "stopped").then_some(())
        });
    }
    // One that is asked for while its sandbox dies is lost with it, which is an answer: this one only reads, and is asked again.
    let exec = eventually(&told("an exec", &shown), || {
        let exec = session.exec_with(&json!({ "shell": "cat /root/acknowledged /root/by-program", "start": true }));
        (exec.json["state"] != "lost").then_some(exec)
    });
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
        Operation::Exec => check_exec(session, case, answer, &again.json()),
        Operation::Put => assert_eq!(session.read_file("/root/put").expect(200).body, b"all of it"),
        _ => {}
    }
}

/// What ran at most once, and what its record says, agree: a record that it has ended well is no guess, and one that it is
/// lost, which names the cause, leaves open how far it came.
fn check_exec(session: &Session, case: &Case, answer: &Result<Reply, String>, again: &Value) {
    let ran = session.out("cat /root/ran 2>/dev/null || true");
    let told = format!("{case:?}: it ran '{ran}' (answered {answer:?}, then {again})");
    let shown = session.exec(again["id"].as_str().expect("an exec has an id"));
    assert_eq!((&shown["state"], &shown["reason"]), (&again["state"], &again["reason"]), "{told}: {shown}");
    match again["state"].as_str() {
        Some("exited") => assert_eq!((ran.as_str(), &again["exit_code"]), ("once", &json!(0)), "{told}"),
        Some("lost") => {
            assert!(ran.is_empty() || ran == "once", "{told}");
            assert!(again["exit_code"].is_null() && again["reason"].is_string(), "{told}");
        }
        _ => panic!("{told}"),
    }
    if let Some(first) = answer.as_ref().ok().filter(|first| first.status == 201) {
        let first = first.json();
        assert_eq!((&first["id"], &first["state"]), (&again["id"], &again["state"]), "{told}");
    }
}

/// True where the history names a cause for the loss of a sandbox.
fn was_told(events: &[Value]) -> bool {
    let stopped = events.iter().rev().find(|event| event["type"] == "state.changed" && event["data"]["to"] == "stopped");
    stopped.is_some_and(|event| event["data"]["reason"].as_str().is_some_and(|reason| !reason.is_empty()))
}

/// Asks for the operation, always in the same words.
fn send(session: &Session, operation: Operation) -> Result<Reply, ureq::Error> {
    let (client, path) = (&session.client, |rest: &str| session.path(rest));
    let post = |path: &str, body: Value| client.send("POST", path, JSON, Some(body.to_string().as_bytes()));
    match operation {
        Operation::Create => post("/v1/sessions", json!({ "key": "another" })),
        Operation::Exec => {
            post(&path("/execs?wait=true&start=true"), json!({ "shell": "echo once >> /root/ran; echo said", "key": "once" }))
        }
        Operation::Put => client.send("PUT", &path("/files?path=/root/put&start=true"), &[], Some(b"all of it")),
        Operation::Hibernate => post(&path("/hibernate"), json!({})),
        Operation::Wake => post(&path("/wake"), json!({})),
        Operation::Pause => post(&path("/pause"), json!({})),
        Operation::Unpause => post(&path("/unpause"), json!({})),
        Operation::Stop => post(&path("/stop"), json!({})),
        Operation::Start => post(&path("/start"), json!({})),
        Operation::Snapshot => post(&path("/snapshots"), json!({})),
        Operation::Fork => post(&path("/fork"), json!({ "count": 2 })),
        Operation::Rollback => post(&path("/rollback"), json!({ "snapshot_id": kept(session) })),
        Operation::DeleteSnapshot => client.send("DELETE", &format!("/v1/snapshots/{}", kept(session)), &[], None),
        Operation::Pack => post("/v1/storage/pack", json!({})),
        Operation::Fetch => post(&path("/wake"), json!({})),
        Operation::Collect => post("/v1/storage/collect", json!({})),
        Operation::Delete => client.send("DELETE", &path(""), &[], None),
    }
}

/// The id of the snapshot that was kept; of one that is gone, an id of nobody's.
fn kept(session: &Session) -> String {
    let list = session.client.get("/v1/snapshots").expect(200).json();
    let found = list["items"].as_array().into_iter().flatten().find(|snapshot| snapshot["name"] == KEPT);
    let id = found.and_then(|snapshot| snapshot["id"].as_str());
    id.unwrap_or("01890000-0000-7000-8000-000000000000").to_owned()
}

/// The same once more, or what there is instead where the sandbox has died.
fn repeat(session: &Session, operation: Operation) -> Option<Reply> {
    let stopped = session.client.get(&session.path("")).json()["state"] == "stopped";
    match operation {
        // One that failed for good says so, and gives way to another where that is wanted.
        Operation::Create => {
            let reply = send(session, operation).ok()?;
            let anew = || session.client.post("/v1/sessions", &json!({ "key": "another", "replace": true }));
            Some(if reply.status == 409 { anew() } else { reply })
        }
        // Its name went with it.
        Operation::DeleteSnapshot => {
            let reply = send(session, operation).ok()?;
            Some(Reply { status: if matches!(reply.status, 404 | 410) { 204 } else { reply.status }, ..reply })
        }
        // What can only be done to a sandbox went with it: the way back is a start.
        Operation::Hibernate | Operation::Pause | Operation::Unpause | Operation::Wake | Operation::Fetch if stopped => {
            send(session, Operation::Start).ok()
        }
        _ => send(session, operation).ok(),
    }
}
