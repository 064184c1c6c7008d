//! Sessions at their limits, and memory that can't be saved: the one that does it ends or is named, the others live.

use dormouse_tests::{Server, Session, eventually};
use serde_json::{Value, json};

/// Work that must not notice what goes on beside it: a program that answers on its input.
struct Bystander {
    session: Session,
    exec: String,
    lines: usize,
}

impl Bystander {
    fn start(session: &Session) -> Bystander {
        let body = json!({ "shell": "echo $$; while read line; do echo \"$line $$\"; done", "stdin": true });
        let exec = session.client.post(&session.path("/execs"), &body).expect(201).json();
        let exec = exec["id"].as_str().expect("an id").to_owned();
        let mut bystander = Bystander { session: session.clone(), exec, lines: 0 };
        bystander.next_line();
        bystander
    }

    fn next_line(&mut self) -> String {
        let count = self.lines + 1;
        let text = eventually("the bystander says something", || {
            let text = String::from_utf8(self.session.output(&self.exec, "stdout")).expect("text");
            (text.lines().count() >= count).then_some(text)
        });
        self.lines = count;
        text.lines().last().expect("a line").to_owned()
    }

    #[track_caller]
    fn answers(&mut self) {
        let path = self.session.path(&format!("/execs/{}/stdin", self.exec));
        self.session.client.send("POST", &path, &[], Some(b"still here\n")).expect("an answer").expect(200);
        assert!(self.next_line().starts_with("still here "));
        assert_eq!(self.session.exec(&self.exec)["state"], "running");
    }
}

/// That the sandbox is the one that it was, and works.
#[track_caller]
fn same_sandbox(session: &Session) {
    let show = session.show();
    assert_eq!((&show["state"], &show["generation"], &show["memory"]), (&json!("running"), &json!(1), &json!("live")), "{show}");
    assert_eq!(session.out("echo well"), "well");
}

/// Runs a hog of memory under 512 MiB and shows that it alone ends.
fn hog_is_ended(program: &str) {
    let server = Server::start();
    let session = server.session_with(&json!({ "resources": { "memory_bytes": 512 << 20 } }));
    let mut bystander = Bystander::start(&session);
    let small = session.start_sh("python3 -c 'import time; x = b\"y\" * (40 << 20); time.sleep(1e6)'");
    let hog = session.exec_with(&json!({ "argv": ["python3", "-c", program] }));
    let seen = (&hog.json["state"], &hog.json["reason"], &hog.json["signal"], hog.code);
    assert_eq!(seen, (&json!("killed"), &json!("oom"), &json!(9), None), "{}", hog.json);
    bystander.answers();
    assert_eq!(session.exec(&small)["state"], "running", "a smaller program is left alone");
    same_sandbox(&session);
    let event = session.event("oom");
    assert_eq!(event["data"]["limit_bytes"], 512 << 20, "{event}");
    assert!(event["data"]["killed"].as_str().is_some_and(|killed| killed.contains(&hog.id)), "{event}");
    assert_eq!(
        session.events().iter().filter(|event| event["type"] == "state.changed" && event["data"]["to"] != "running").count(),
        0
    );
    // What it held is free again.
    assert_eq!(session.out("python3 -c 'print(len(b\"z\" * (200 << 20)))'"), (200 << 20).to_string());
    server.delete_all_and_check();
}

#[test]
fn a_hog_of_4_gib_under_512_mib_ends_as_oom_and_the_others_live() {
    hog_is_ended("x = []\nfor i in range(4096): x.append(b'x' * (1 << 20))");
}

#[test]
fn a_hog_that_takes_4_gib_at_once_ends_as_oom_and_the_others_live() {
    hog_is_ended("x = b'x' * (4 << 30)");
}

#[test]
fn memory_file_systems_end_before_the_session_does() {
    let server = Server::start();
    let session = server.session_with(&json!({ "resources": { "memory_bytes": 512 << 20 } }));
    let mut bystander = Bystander::start(&session);
    let full = session.sh("head -c 4294967296 /dev/zero > /dev/shm/full");
    assert_eq!((full.code, full.stderr.contains("No space left")), (Some(1), true), "{}", full.json);
    session.out("rm /dev/shm/full; echo more > /dev/shm/more");
    bystander.answers();
    same_sandbox(&session);
    server.delete_all_and_check();
}

#[test]
fn a_fork_bomb_is_held_and_ended_and_the_others_live() {
    let server = Server::start();
    let session = server.session_with(&json!({ "resources": { "pids": 64 } }));
    let mut bystander = Bystander::start(&session);
    let bomb = session.start_sh("bash -c ':(){ :|:& };:; wait; sleep infinity'");
    bystander.answers();
    assert_eq!(session.out("echo beside"), "beside");
    let ended = session.ended(&bomb);
    assert_eq!((&ended["state"], &ended["reason"]), (&json!("killed"), &json!("pids")), "{ended}");
    let threads = session.sh("python3 -c 'import subprocess\nx = [subprocess.Popen([\"sleep\", \"1000\"]) for i in range(200)]'");
    assert!(threads.code != Some(0), "the limit is one: {}", threads.json);
    bystander.answers();
    eventually("its processes are gone", || {
        let count: u64 = session.out("ls -d /proc/[0-9]* | wc -l").parse().expect("a number");
        (count < 80).then_some(())
    });
    same_sandbox(&session);
    server.delete_all_and_check();
}

#[test]
fn one_sessions_bomb_and_hog_leave_other_sessions_alone() {
    let server = Server::start();
    let limited = json!({ "resources": { "memory_bytes": 256 << 20, "pids": 64 } });
    let (bad, good) = (server.session_with(&limited), server.session());
    let mut bystander = Bystander::start(&good);
    let bomb = bad.start_sh("bash -c ':(){ :|:& };:; wait; sleep infinity'");
    let hog = bad.start_sh("python3 -c 'x = [b\"x\" * (1 << 20) for i in range(4096)]'");
    bystander.answers();
    assert_eq!(good.out("echo fine"), "fine");
    for exec in [bomb, hog] {
        let ended = bad.ended(&exec);
        assert_ne!(ended["exit_code"], 0, "{ended}");
    }
    bystander.answers();
    same_sandbox(&good);
    same_sandbox(&bad);
    server.delete_all_and_check();
}

/// Puts something in the way of saving the memory, and shows that it is named before anyone asks, that hibernate is
/// refused with its name, that the session runs on, and that it sleeps once the obstacle is gone.
fn unsaveable(prepare: &str, kind: &str, process: &str, file: &str) {
    let server = Server::start();
    let session = server.session();
    let mut bystander = Bystander::start(&session);
    let culprit = session.start_sh(prepare);
    let event = session.event("memory.unsaveable");
    let data = &event["data"];
    assert_eq!((&data["process"], &data["file"], &data["kind"]), (&json!(process), &json!(file), &json!(kind)), "{event}");
    assert!(data["pid"].is_u64(), "{event}");
    let refused = session.call("hibernate").expect(422);
    assert_eq!(refused.problem(), "unsaveable");
    let problem = refused.json();
    let detail = problem["detail"].as_str().expect("a problem says what happened");
    assert!(detail.contains(process) && detail.contains(file), "{detail}");
    assert_eq!(problem["session_id"], json!(session.id));
    same_sandbox(&session);
    bystander.answers();
    assert_eq!(session.exec(&culprit)["state"], "running");
    session.client.post(&session.path(&format!("/execs/{culprit}/signal")), &json!({ "signal": "KILL" })).expect(200);
    session.ended(&culprit);
    session.hibernate();
    session.wake();
    bystander.answers();
    server.delete_all_and_check();
}

#[test]
fn an_unlinked_open_file_is_named_before_and_at_hibernate() {
    unsaveable(
        "exec 7> /root/scratch; echo x >&7; rm /root/scratch; exec sleep infinity",
        "unlinked_file",
        "sleep",
        "/root/scratch",
    );
}

#[test]
fn a_replaced_running_program_is_named_before_and_at_hibernate() {
    let prepare = "cp /bin/sleep /root/agent; /root/agent infinity & cp /bin/sleep /root/new; mv /root/new /root/agent; wait";
    unsaveable(prepare, "replaced_program", "agent", "/root/agent");
}

#[test]
fn a_deleted_working_directory_is_named_before_and_at_hibernate() {
    unsaveable(
        "mkdir /root/gone; cd /root/gone; rmdir /root/gone; exec sleep infinity",
        "deleted_directory",
        "sleep",
        "/root/gone",
    );
}

#[test]
fn what_is_deleted_in_memory_file_systems_is_saved() {
    let server = Server::start();
    let session = server.session();
    let body = json!({
        "shell": "exec 7<> /tmp/scratch; echo kept >&7; rm /tmp/scratch; mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone; \
                  echo ready; read line; cat < /proc/self/fd/7 || head -n1 /dev/fd/7; echo \"$line\"",
        "stdin": true,
    });
    let exec = server.client.post(&session.path("/execs"), &body).expect(201).json();
    let exec = exec["id"].as_str().expect("an id");
    eventually("it is ready", || (session.output(exec, "stdout") == b"ready\n").then_some(()));
    session.hibernate();
    session.wake();
    let stdin = session.path(&format!("/execs/{exec}/stdin?eof=true"));
    server.client.send("POST", &stdin, &[], Some(b"go on\n")).expect("an answer").expect(200);
    session.ended(exec);
    let text = String::from_utf8(session.output(exec, "stdout")).expect("text");
    assert!(text.ends_with("go on\n"), "{text}");
    let named: Vec<Value> = session.events().into_iter().filter(|event| event["type"] == "memory.unsaveable").collect();
    assert!(named.is_empty(), "{named:?}");
    server.delete_all_and_check();
}
