//! Sessions at their limits, and memory that can't be saved: the one that does it ends or is named, the others live.

use dormouse_tests::{Options, Reply, Server, Session, eventually};
use serde_json::{Value, json};
use std::{path::Path, process::Command};

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

/// What the session's history tells of its disk's limit.
fn crossings(session: &Session) -> Vec<String> {
    let kinds = session.events().into_iter().map(|event| event["type"].as_str().unwrap_or_default().to_owned());
    kinds.filter(|kind| kind.starts_with("disk.")).collect()
}

/// Adding a file, a directory, an archive: each way in from outside.
fn additions(session: &Session) -> [Reply; 3] {
    let directory = session.client.post(&session.path("/files/mkdir"), &json!({ "path": "/root/more", "parents": true }));
    let archive = session.client.put(&session.path("/archive?path=/root/unpacked"), &[0; 1024]);
    [session.write_file("/root/file", b"more"), directory, archive]
}

#[test]
fn a_disk_over_its_limit_is_told_and_takes_no_more_files_until_there_is_room() {
    const LIMIT: u64 = 8 << 20;
    let server = Server::start();
    let tiny = server.client.post("/v1/sessions", &json!({ "resources": { "disk_bytes": (1 << 20) - 1 } })).expect(400);
    assert_eq!(tiny.problem(), "bad_request");
    assert!(tiny.text().contains("resources.disk_bytes"), "{}", tiny.text());

    let session = server.session_with(&json!({ "resources": { "disk_bytes": LIMIT } }));
    session.write_file("/root/kept", b"kept").expect(204);
    session.out(&format!("head -c {} /dev/zero > /root/big", LIMIT + (4 << 20)));
    let told = session.event("disk.over_limit");
    assert_eq!(told["data"]["limit_bytes"], LIMIT, "{told}");
    let used = told["data"]["used_bytes"].as_u64().expect("a number");
    assert!(used > LIMIT, "{told}");
    let refused = |session: &Session| {
        for refused in additions(session) {
            let text = refused.text();
            assert_eq!(refused.expect(507).problem(), "no_space");
            assert!(text.contains(&format!("{LIMIT} are allowed")) && text.contains(" bytes are used"), "{text}");
        }
    };
    refused(&session);
    assert_eq!(session.read_file("/root/kept").expect(200).body, b"kept");
    session.client.delete(&session.path("/files?path=/root/kept")).expect(204);
    assert_eq!(session.out("echo programs run on > /root/note; cat /root/note"), "programs run on");
    // A sleep, a stop and another server change nothing, and what was told isn't told again.
    session.hibernate();
    session.wake();
    refused(&session);
    session.call("stop").expect(200);
    session.call("start").expect(200);
    refused(&session);
    assert_eq!(crossings(&session), ["disk.over_limit"]);

    session.client.delete(&session.path("/files?path=/root/big")).expect(204);
    eventually("there is room again", || (session.write_file("/root/file", b"more").status == 204).then_some(()));
    let told = session.event("disk.within_limit");
    assert_eq!(told["data"]["limit_bytes"], LIMIT, "{told}");
    assert!(told["data"]["used_bytes"].as_u64().is_some_and(|used| used <= LIMIT), "{told}");
    session.out(&format!("head -c {LIMIT} /dev/zero > /root/big"));
    eventually("the next crossing", || {
        (crossings(&session) == ["disk.over_limit", "disk.within_limit", "disk.over_limit"]).then_some(())
    });
    refused(&session);
    server.delete_all_and_check();
}

/// An ext4 file system in a file, mounted; unmounted with this value.
struct Mounted(std::path::PathBuf);

impl Mounted {
    /// What mount(8) says where the kernel can't mount such a file system.
    fn new(folder: &Path, name: &str, features: &[&str], options: &str) -> Result<Mounted, String> {
        let (image, at) = (folder.join(format!("{name}.img")), folder.join(name));
        std::fs::File::create(&image).and_then(|file| file.set_len(4 << 30)).expect("a file");
        std::fs::create_dir(&at).expect("a directory");
        let made = Command::new("mkfs.ext4").arg("-q").args(features).arg(&image).output().expect("mkfs.ext4 is there");
        assert!(made.status.success(), "{made:?}");
        let mounted = Command::new("mount").args(["-o", options]).arg(&image).arg(&at).output().expect("mount is there");
        if mounted.status.success() { Ok(Mounted(at)) } else { Err(String::from_utf8_lossy(&mounted.stderr).into_owned()) }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// What `doctor` finds of disk limits in `data`.
fn doctor(server: &Server, data: &Path) -> Value {
    let output = server.cli(&["doctor", "--json"]).env("DORMOUSE_DATA", data).output().expect("it runs");
    let findings: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let findings = findings["findings"].as_array().expect("a list");
    findings.iter().find(|finding| finding["what"] == "disk limits").expect("it looks at disk limits").clone()
}

#[test]
fn a_disk_on_a_file_system_with_project_quota_is_kept_within_its_limit() {
    const LIMIT: u64 = 16 << 20;
    let folder = tempfile::tempdir().expect("a directory");
    let quota = ["-O", "quota,project", "-E", "quotatype=prjquota"];
    let mounted = match Mounted::new(folder.path(), "limited", &quota, "loop,prjquota") {
        Ok(mounted) => mounted,
        Err(why) => {
            // Not for lack of loop mounts or of ext4: the same without quota works.
            let plain = Mounted::new(folder.path(), "plain", &[], "loop").expect("ext4 can be mounted from a file");
            println!("this kernel has no project quota for ext4 (CONFIG_QUOTA, CONFIG_QFMT_V2), so it can't be tested: {why}");
            let server = Server::with(Options { dir: Some(plain.0.clone()), ..Options::default() });
            let finding = doctor(&server, &plain.0);
            assert_eq!(finding["verdict"], "limited", "{finding}");
            assert!(finding["detail"].as_str().is_some_and(|detail| detail.contains("programs inside aren't stopped")));
            // What `doctor` says is so.
            let session = server.session_with(&json!({ "resources": { "disk_bytes": 1 << 20 } }));
            session.out("head -c 2M /dev/zero > /root/big");
            session.event("disk.over_limit");
            server.delete_all_and_check();
            return;
        }
    };
    let server = Server::with(Options { dir: Some(mounted.0.clone()), ..Options::default() });
    let finding = doctor(&server, server.data());
    assert_eq!(finding["verdict"], "ok", "{finding}");
    let limited = json!({ "resources": { "disk_bytes": LIMIT } });
    let (session, other) = (server.session_with(&limited), server.session_with(&limited));
    let is_limited = || {
        let full = session.sh("head -c 64M /dev/zero > /root/big");
        assert_ne!(full.code, Some(0), "{}", full.json);
        let told = ["No space left", "quota exceeded"].iter().any(|words| full.stderr.contains(words));
        assert!(told, "{}", full.json);
        let size: u64 = session.out("stat -c %s /root/big").parse().expect("a number");
        assert!(size <= LIMIT, "{size}");
        let refused = session.write_file("/root/file", &vec![7; 1 << 20]);
        assert_eq!(refused.expect(507).problem(), "no_space");
        session.client.delete(&session.path("/files?path=/root/big")).expect(204);
        session.write_file("/root/file", &vec![7; 1 << 20]).expect(204);
    };
    is_limited();
    session.hibernate();
    session.wake();
    is_limited();
    session.call("stop").expect(200);
    session.call("start").expect(200);
    is_limited();
    // Each session has a limit of its own, and one without has none.
    other.out("head -c 12M /dev/zero > /root/big");
    server.session().out("head -c 32M /dev/zero > /root/big");
    assert!(crossings(&session).is_empty(), "there is nothing to watch");
    server.delete_all_and_check();
}
