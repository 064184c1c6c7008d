//! The static guest as PID 1 of a real gVisor sandbox, put to sleep and woken in the middle of its work.
//!
//! Runs where `DORMOUSE_TEST_TREE` names a root file system and `DORMOUSE_TEST_GUEST` the static binary (else the one
//! built with the tests is taken, which must be static); needs root, overlayfs and `runsc`.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod support;

use std::{
    fs::{self, File},
    os::fd::OwnedFd,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};
use support::{Client, Scratch, identity, program, sh};
use wire::guest::{GUEST_PATH, Reply, Request};

/// A sandbox above a tree, with everything it leaves on the host.
struct Sandbox {
    dir: Scratch,
    name: String,
}

impl Sandbox {
    /// `None`: this machine isn't set up for it.
    fn new(test: &str) -> Option<Self> {
        let tree = std::env::var_os("DORMOUSE_TEST_TREE").map(PathBuf::from)?;
        let guest = std::env::var_os("DORMOUSE_TEST_GUEST")
            .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_dormouse-guest")), PathBuf::from);
        let dir = Scratch::new(test);
        for name in ["upper", "work", "root", "bundle", "state", "image"] {
            fs::create_dir(dir.path(name)).unwrap();
        }
        let options = format!("lowerdir={},upperdir={},workdir={}", tree.display(), dir.path("upper"), dir.path("work"));
        let root = dir.path("root");
        run(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options, &root]));
        let inside = PathBuf::from(root + GUEST_PATH);
        fs::create_dir_all(inside.parent().unwrap()).unwrap();
        fs::copy(guest, inside).unwrap();
        let sandbox = Self { name: format!("guest-{test}-{}", std::process::id()), dir };
        fs::write(sandbox.dir.path("bundle/config.json"), sandbox.spec().to_string()).unwrap();
        Some(sandbox)
    }

    fn spec(&self) -> serde_json::Value {
        let caps: Vec<String> =
            "CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP SYS_CHROOT MKNOD SYS_PTRACE SYS_ADMIN"
                .split(' ')
                .map(|c| format!("CAP_{c}"))
                .collect();
        let memory = |to: &str| serde_json::json!({"destination": to, "type": "tmpfs", "source": "tmpfs"});
        let namespaces = ["pid", "network", "ipc", "uts", "mount"].map(|kind| serde_json::json!({"type": kind}));
        serde_json::json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false, "user": {"uid": 0, "gid": 0}, "args": [GUEST_PATH], "env": [], "cwd": "/",
                "capabilities": {"bounding": caps, "effective": caps, "permitted": caps},
            },
            "root": {"path": self.dir.path("root"), "readonly": false},
            "hostname": "before",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/sys", "type": "sysfs", "source": "sysfs"},
                {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid"]},
                memory("/dev"), memory("/tmp"), memory("/run"),
            ],
            "linux": {"namespaces": namespaces},
        })
    }

    fn runsc(&self) -> Command {
        let mut command = Command::new("runsc");
        command.args(["--root", &self.dir.path("state"), "--platform=systrap", "--network=none", "--overlay2=none"]);
        command.args(["--host-uds=none", "--ignore-cgroups"]);
        command.stderr(File::options().create(true).append(true).open(self.dir.path("log")).unwrap());
        command
    }

    /// Starts or restores; gives the supervisor's ends of the channel.
    fn begin(&self, name: &str, how: &[&str]) -> (OwnedFd, OwnedFd) {
        let (to, their_in) = pipe();
        let (their_out, from) = pipe();
        let pid_file = self.dir.path(&format!("pid-{name}"));
        let mut command = self.runsc();
        command.args(how).args(["-detach", "-pid-file", &pid_file, "-bundle", &self.dir.path("bundle"), name]);
        run(command.stdin(Stdio::from(their_in)).stdout(Stdio::from(their_out)));
        (to, from)
    }

    fn end(&self, name: &str) {
        if let Ok(pid) = fs::read_to_string(self.dir.path(&format!("pid-{name}"))) {
            let _ = Command::new("kill").args(["-9", pid.trim()]).status();
        }
        let _ = self.runsc().args(["delete", "-force", name]).status();
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for name in [self.name.clone(), format!("{}-again", self.name)] {
            self.end(&name);
        }
        let _ = Command::new("umount").args(["-l", &self.dir.path("root")]).status();
    }
}

/// (writing end, reading end)
fn pipe() -> (OwnedFd, OwnedFd) {
    let (read, write) = std::io::pipe().unwrap();
    (write.into(), read.into())
}

fn run(command: &mut Command) {
    let status = command.status().unwrap();
    assert!(status.success(), "{command:?}: {status}");
}

fn output(client: &mut Client, script: &str) -> String {
    let exec = client.try_exec(sh(script), false, None).unwrap();
    client.wait(&exec);
    client.text(exec.stdout) + &client.text(exec.stderr)
}

#[test]
fn work_goes_on_after_sleep_with_every_byte_once() {
    let Some(sandbox) = Sandbox::new("sleep") else { return };
    let name = &sandbox.name;
    let (to, from) = sandbox.begin(name, &["run"]);
    let mut client = Client::over(to, from);
    client.hello(Some(identity("asleep")));
    assert_eq!(output(&mut client, "hostname; cat /etc/machine-id"), "asleep\n0123456789abcdef0123456789abcdef\n");
    let numbers = client.try_exec(sh("i=0; while :; do i=$((i+1)); echo $i; done"), false, None).unwrap();
    let (_, shell) = client.terminal(&["/bin/bash"], 80, 24);
    let (stdin, first) = (shell.stdin.unwrap(), b"X=42\n");
    client.feed(stdin, 0, first, false);
    client.until("output", |c| c.bytes(numbers.stdout).len() > 10_000 && c.text(shell.stdout).contains("X=42"));
    client.acks = false;
    client.until("unacknowledged output", |c| c.bytes(numbers.stdout).len() > 100_000);
    client.quiesce();
    run(sandbox.runsc().args(["pause", name]));
    let image = sandbox.dir.path("image");
    run(sandbox.runsc().args(["checkpoint", "-image-path", &image, "-compression", "none", "-leave-running", name]));
    client.hang_up();
    sandbox.end(name);

    let again = format!("{name}-again");
    let (to, from) = sandbox.begin(&again, &["restore", "-image-path", &image]);
    client.rebind(to, from);
    client.acks = true;
    let reply = client.hello(Some(identity("awake")));
    assert_eq!(reply.works.len(), 2);
    let seen = client.bytes(numbers.stdout).len();
    client.until("the numbers go on", |c| c.bytes(numbers.stdout).len() > seen + 3_000_000);
    let text = client.text(numbers.stdout);
    let lines = text.rsplit_once('\n').unwrap().0.lines();
    for (at, line) in lines.enumerate() {
        assert_eq!(line, (at + 1).to_string());
    }
    let second = b"echo X=$X pid=$$; exit 3\n";
    client.feed(stdin, first.len() as u64, second, false);
    assert_eq!(client.wait(&shell).exit_code, Some(3));
    assert!(client.text(shell.stdout).contains(&format!("X=42 pid={}", shell.pid)));
    let kill = Request::Signal { work: numbers.work.clone(), signal: 9, tree: true };
    client.request(kill).unwrap();
    assert_eq!(client.wait(&numbers).signal, Some(9));
    assert_eq!(output(&mut client, "hostname"), "awake\n");
}

#[test]
fn a_sandbox_is_a_usable_machine() {
    let Some(sandbox) = Sandbox::new("machine") else { return };
    let (to, from) = sandbox.begin(&sandbox.name, &["run"]);
    let mut client = Client::over(to, from);
    let mut who = identity("machine");
    who.pids = Some(40);
    client.hello(Some(who));
    // Capabilities that only the guest has, with the bits of CAP_NET_ADMIN and CAP_SYS_ADMIN.
    let bounding = output(&mut client, "grep CapBnd /proc/self/status");
    let bits = u64::from_str_radix(bounding.trim().rsplit('\t').next().unwrap(), 16).unwrap();
    assert_eq!(bits & ((1 << 12) | (1 << 21)), 0, "{bounding}");
    output(&mut client, &format!("ln -s {GUEST_PATH} /usr/local/bin/sudo"));
    assert_eq!(output(&mut client, "sudo -u nobody sudo id -u; sudo -u nobody sh -c 'sudo false'; echo $?"), "0\n1\n");
    // A grandchild in a session of its own doesn't get away.
    let script = "setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 1; done' & sleep 1000";
    let exec = client.try_exec(sh(script), false, None).unwrap();
    client.until("the grandchild", |c| c.text(exec.stdout).ends_with('\n'));
    let pid: u32 = client.text(exec.stdout).trim().parse().unwrap();
    client.request(Request::Signal { work: exec.work.clone(), signal: 9, tree: true }).unwrap();
    let Reply::Processes { items } = client.request(Request::Processes).unwrap() else { panic!() };
    assert!(items.iter().all(|p| p.pid != pid || p.state == "Z"), "{items:?}");
    // What can't be saved is named.
    let script = "exec 3> /var/tmp/gone; rm /var/tmp/gone; echo ok; exec sleep 1000";
    let exec = client.try_exec(sh(script), false, None).unwrap();
    client.until("the file to be gone", |c| c.text(exec.stdout) == "ok\n");
    let Reply::Unsaveable { items } = client.request(Request::Unsaveable).unwrap() else { panic!() };
    assert_eq!((items[0].pid, items[0].path.as_str(), items[0].kind.as_str()), (exec.pid, "/var/tmp/gone", "unlinked_file"));
    client.request(Request::Signal { work: exec.work, signal: 9, tree: true }).unwrap();
    // Too many processes fail inside, or are ended where they hold on; and the others live.
    let exec = client.try_exec(sh("for i in $(seq 100); do sleep 5 & done"), false, None).unwrap();
    let ended = client.wait(&exec);
    assert!(ended.exit_code == Some(2) || ended.reason.as_deref() == Some("pids"), "{ended:?}");
    assert_eq!(output(&mut client, "echo lives"), "lives\n");
    client.request(Request::Shutdown { grace_ms: 100 }).unwrap();
    let Reply::Processes { items } = client.request(Request::Processes).unwrap() else { panic!() };
    assert_eq!(items.iter().filter(|p| p.state != "Z").count(), 1, "{items:?}");
}

#[test]
#[ignore = "measures; run by hand"]
fn speed() {
    let Some(sandbox) = Sandbox::new("speed") else { return };
    let (to, from) = sandbox.begin(&sandbox.name, &["run"]);
    let mut client = Client::over(to, from);
    client.hello(None);
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2]
    };
    let mut pings = Vec::new();
    let mut trues = Vec::new();
    for _ in 0..200 {
        let began = std::time::Instant::now();
        client.request(Request::Ping).unwrap();
        pings.push(began.elapsed());
        let began = std::time::Instant::now();
        let exec = client.try_exec(program(&["/bin/true"]), false, None).unwrap();
        client.wait(&exec);
        trues.push(began.elapsed());
    }
    let began = std::time::Instant::now();
    let exec = client.exec(&["dd", "if=/dev/zero", "bs=64k", "count=8000"]);
    client.wait(&exec);
    let rate = 8000.0 / 16.0 / began.elapsed().as_secs_f64();
    println!("ping {:?}, true {:?}, output {rate:.0} MiB/s", median(pings), median(trues));
}
