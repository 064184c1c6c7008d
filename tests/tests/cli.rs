//! The command line against a real server: what it prints, how it exits, and attaching through every loss.

mod tmux;

use dormouse_tests::{
    Server, Session, eventually,
    server::{Options, binary, templates},
};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, Command, Stdio},
};
use tmux::Tmux;

/// How a command ended.
#[derive(Debug)]
struct Done {
    code: i32,
    out: String,
    err: String,
}

fn finish(command: &mut Command) -> Done {
    done(command.output().expect("it runs"))
}

fn done(output: std::process::Output) -> Done {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Done { code: output.status.code().expect("an exit status"), out: text(output.stdout), err: text(output.stderr) }
}

/// Runs the binary to its end.
fn run(server: &Server, args: &[&str]) -> Done {
    finish(&mut server.cli(args))
}

/// Runs it with standard input.
fn feed(server: &Server, args: &[&str], input: &[u8]) -> Done {
    let mut command = server.cli(args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    child.stdin.take().expect("a pipe").write_all(input).expect("it reads its input");
    done(child.wait_with_output().expect("it ends"))
}

/// What it prints; it must succeed.
#[track_caller]
fn out(server: &Server, args: &[&str]) -> String {
    let done = run(server, args);
    assert_eq!(done.code, 0, "{args:?}: {done:?}");
    done.out.trim_end().to_owned()
}

#[track_caller]
fn json(server: &Server, args: &[&str]) -> Value {
    let text = out(server, args);
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{args:?}: {e}: {text}"))
}

/// It must fail with a status and say `what`.
#[track_caller]
fn fails(server: &Server, args: &[&str], code: i32, what: &str) {
    let done = run(server, args);
    assert_eq!(done.code, code, "{args:?}: {done:?}");
    assert!(done.err.contains(what), "{args:?} says '{what}': {}", done.err);
}

fn session(server: &Server, id: &str) -> Session {
    Session { client: server.client.clone(), id: id.to_owned() }
}

/// A command that goes on, with its lines of standard output. Ended with this value.
struct Going {
    child: Child,
    lines: std::sync::mpsc::Receiver<String>,
}

impl Going {
    fn start(server: &Server, args: &[&str]) -> Going {
        let mut child = server.cli(args).stdout(Stdio::piped()).spawn().expect("it runs");
        let reader = BufReader::new(child.stdout.take().expect("a pipe"));
        let (tell, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || reader.lines().map_while(Result::ok).for_each(|line| drop(tell.send(line))));
        Going { child, lines }
    }

    #[track_caller]
    fn line(&self, what: &str, good: impl Fn(&str) -> bool) -> String {
        eventually(what, || self.lines.try_iter().find(|line| good(line)))
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn sessions_are_made_listed_and_named() {
    let server = Server::start();
    let id = out(&server, &["new", "demo", "--task", "try it", "--meta", "team=a", "--env", "COLOUR=red"]);
    assert!(id.parse::<uuid::Uuid>().is_ok(), "{id}");
    assert_eq!(out(&server, &["new", "demo"]), id, "get or create");
    assert_eq!(out(&server, &["exec", "demo", "--", "sh", "-c", "echo $COLOUR"]), "red");
    let other = out(&server, &["new"]);
    assert_ne!(other, id);
    // By id, key, beginning and end.
    let first_difference = id.bytes().zip(other.bytes()).position(|(a, b)| a != b).expect("ids differ");
    for word in [id.as_str(), "demo", &id[..=first_difference], &id[id.len() - 8..]] {
        assert_eq!(json(&server, &["--json", "show", word])["id"], id, "{word}");
    }
    fails(&server, &["show", &id[..first_difference]], 5, &id);
    fails(&server, &["show", "nosuch"], 3, "nosuch");
    let table = out(&server, &["ls"]);
    assert!(table.starts_with("ID") && table.contains("demo") && table.contains("try it"), "{table}");
    assert_eq!(out(&server, &["ls", "-q", "--meta", "team=a"]), id);
    assert_eq!(json(&server, &["ls", "--json"])["items"].as_array().map(Vec::len), Some(2));
    assert_eq!(out(&server, &["ls", "-q", "--state", "hibernated"]), "");
    assert_eq!(
        out(&server, &["ls", "-o", "key,state", "--meta", "team=a"]).lines().nth(1).map(str::trim_end),
        Some("demo  running")
    );
    let shown = out(&server, &["show", "demo"]);
    for part in ["id: ", "key: ", "state: ", "last activity: ", "team=a"] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert!(out(&server, &["stats", "demo"]).contains("demo"));
    // Its clocks, and how they are moved; and flags of parts that aren't there are refused, never ignored.
    let limited = out(&server, &["new", "limited", "--ttl", "1h", "--timeout", "10m", "--idle", "20m"]);
    let shown = out(&server, &["show", "limited"]);
    for part in ["expires: ", "time limit: ", "hibernate after 20m", "in short: ", "It is running."] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert!(out(&server, &["extend", "limited", "1h"]).contains("runs until"));
    assert_eq!(out(&server, &["hibernate", "limited", "--until", "2h"]), limited);
    assert!(out(&server, &["show", "limited"]).contains("wakes: "));
    assert_eq!(out(&server, &["rm", "limited"]), limited);
    assert!(run(&server, &["new", "elsewhere", "--machine", "m"]).err.contains("machine"));
    // Each call in turn, and what it leads to.
    for (verb, state) in [
        ("pause", "paused"),
        ("unpause", "running"),
        ("hibernate", "hibernated"),
        ("wake", "running"),
        ("stop", "stopped"),
        ("start", "running"),
    ] {
        assert_eq!(out(&server, &[verb, "demo"]), id, "{verb}");
        assert_eq!(json(&server, &["show", "demo", "--json"])["state"], state, "{verb}");
        assert_eq!(out(&server, &[verb, "demo"]), id, "{verb} again");
    }
    let waiting = Going::start(&server, &["wait", "demo"]);
    assert_eq!(out(&server, &["hibernate", "--meta", "team=a"]), id);
    assert_eq!(waiting.line("wait tells the state", |_| true), "hibernated");
    fails(&server, &["start", "demo"], 5, "hibernated");
    fails(&server, &["hibernate", "demo", "nosuch"], 3, "nosuch");
    assert_eq!(out(&server, &["stop", "demo"]), id);
    fails(&server, &["wake", "demo"], 1, "");
    fails(&server, &["exec", "demo", "--", "true"], 125, "start");
    assert_eq!(out(&server, &["exec", "demo", "--start", "--", "echo", "on"]), "on");
    let mut removed: Vec<String> = out(&server, &["rm", "--all"]).lines().map(str::to_owned).collect();
    removed.sort();
    let mut both = vec![id.clone(), other];
    both.sort();
    assert_eq!(removed, both);
    fails(&server, &["show", &id], 3, "delete");
    assert!(out(&server, &["ls", "--all"]).contains("deleted"));
    server.delete_all_and_check();
}

#[test]
fn exec_exits_as_its_command_does() {
    let server = Server::start();
    let id = out(&server, &["new", "demo"]);
    for (command, code) in [
        (&["true"][..], 0),
        (&["false"], 1),
        (&["sh", "-c", "exit 41"], 41),
        (&["nosuch"], 127),
        (&["/etc"], 126),
        (&["/etc/passwd"], 126),
        (&["sh", "-c", "kill -TERM $$"], 143),
        (&["sh", "-c", "kill -9 $$"], 137),
    ] {
        let done = run(&server, &[&["exec", "demo", "--"], command].concat());
        assert_eq!(done.code, code, "{command:?}: {done:?}");
        assert_eq!(done.err.is_empty(), code != 126 && code != 127, "{command:?}: {done:?}");
    }
    fails(&server, &["exec", "nosuch", "--", "true"], 125, "nosuch");
    fails(&server, &["exec", "demo"], 2, "CMD");
    let both = run(&server, &["exec", "demo", "--cwd", "/tmp", "--env", "A=b c", "--", "sh", "-c", "pwd; echo $A >&2"]);
    assert_eq!((both.out.as_str(), both.err.as_str()), ("/tmp\n", "b c\n"));
    assert_eq!(feed(&server, &["exec", "demo", "--stdin", "--", "wc", "-c"], &vec![b'x'; 300_000]).out.trim(), "300000");
    assert_eq!(out(&server, &["exec", "demo", "--", "cat"]), "", "without --stdin it is at its end");
    let late = run(&server, &["exec", "demo", "--timeout", "1s", "--", "sleep", "100"]);
    assert_eq!(late.code, 143, "{late:?}");
    assert!(late.err.contains("ran out of time"), "{late:?}");
    let value = json(&server, &["exec", "demo", "--json", "--", "echo", "hello"]);
    assert_eq!(
        (&value["state"], &value["exit_code"], &value["stdout"]),
        (&"exited".into(), &0.into(), &"hello\n".into()),
        "{value}"
    );

    // Detached: its id, its logs, its end.
    let exec = out(
        &server,
        &["exec", "demo", "--detach", "--key", "k", "--", "sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.3; done; exit 9"],
    );
    assert_eq!(
        out(
            &server,
            &[
                "exec",
                "demo",
                "--detach",
                "--key",
                "k",
                "--",
                "sh",
                "-c",
                "for i in 1 2 3; do echo line $i; sleep 0.3; done; exit 9"
            ]
        ),
        exec,
        "once"
    );
    let logs = Going::start(&server, &["logs", "-f", "demo", &exec]);
    logs.line("the last line", |line| line == "line 3");
    assert_eq!(run(&server, &["wait", "demo", &exec]).code, 9);
    assert_eq!(out(&server, &["logs", "demo", "k"]), "line 1\nline 2\nline 3");
    assert_eq!(out(&server, &["logs", "demo", &exec, "--from", "7"]), "line 2\nline 3");
    let all = out(&server, &["logs", "demo"]);
    assert!(all.contains("line 3") && all.contains("hello") && all.contains("! b c"), "{all}");
    fails(&server, &["logs", "demo", "nosuch"], 3, "nosuch");
    // What runs, and its end by a signal.
    let sleeper = out(&server, &["exec", "demo", "-d", "--", "sleep", "1000"]);
    let listed = out(&server, &["ps", "demo"]);
    assert!(listed.contains(&sleeper) && !listed.contains(&exec), "{listed}");
    assert_eq!(out(&server, &["kill", "demo", &sleeper, "KILL"]), "");
    assert_eq!(run(&server, &["wait", "demo", &sleeper]).code, 137);
    let listed = out(&server, &["ps", "-a", "demo"]);
    assert!(listed.contains("killed SIGKILL") && listed.contains("exited 9"), "{listed}");
    fails(&server, &["kill", "demo", &sleeper, "NOPE"], 2, "NOPE");
    let events = out(&server, &["events", "demo"]);
    assert!(events.contains("session.created") && events.contains("exec.ended"), "{events}");
    let following = Going::start(&server, &["events", "-f", "--json"]);
    out(&server, &["exec", "demo", "--", "true"]);
    following.line("the event", |line| line.contains("exec.ended") && line.contains(&id));
    server.delete_all_and_check();
}

/// An exec's output and a log's go on when the server is killed in their middle; each byte comes once.
#[test]
fn exec_and_logs_go_on_through_a_servers_death() {
    let mut server = Server::start();
    out(&server, &["new", "demo"]);
    let script = "i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo n$i; sleep 0.05; done; exit 5";
    let exec = server
        .cli(&["exec", "demo", "--key", "count", "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    eventually("it counts", || (run(&server, &["logs", "demo", "count"]).out.contains("n5")).then_some(()));
    let logs = Going::start(&server, &["logs", "-f", "demo", "count"]);
    logs.line("the log follows", |line| line == "n5");
    server.crash();
    let expected: String = (1..=60).map(|n| format!("n{n}\n")).collect();
    let exec = done(exec.wait_with_output().expect("it ends"));
    assert_eq!((exec.code, exec.out.as_str()), (5, expected.as_str()), "{}", exec.err);
    for n in 6..=60 {
        assert_eq!(logs.line("the log goes on", |_| true), format!("n{n}"));
    }
    server.delete_all_and_check();
}

#[test]
fn files_are_copied_both_ways() {
    let server = Server::start();
    out(&server, &["new", "demo"]);
    let folder = tempfile::tempdir().expect("a folder");
    let here = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    std::fs::write(here("data"), &bytes).expect("a file");
    out(&server, &["cp", &here("data"), "demo:/root/"]);
    out(&server, &["cp", "demo:/root/data", &here("back")]);
    assert!(std::fs::read(here("back")).expect("it came") == bytes);
    assert_eq!(feed(&server, &["cp", "-", "demo:/root/from-stdin"], b"by stdin\n").code, 0);
    assert_eq!(out(&server, &["cp", "demo:/root/from-stdin", "-"]), "by stdin");
    assert_eq!(out(&server, &["files", "cat", "demo", "/root/from-stdin"]), "by stdin");

    std::fs::create_dir_all(folder.path().join("tree/deep")).expect("a directory");
    std::fs::write(folder.path().join("tree/deep/file"), "deep\n").expect("a file");
    std::fs::write(folder.path().join("tree/run.sh"), "#!/bin/sh\necho ran\n").expect("a file");
    std::os::unix::fs::symlink("deep/file", folder.path().join("tree/link")).expect("a link");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder.path().join("tree/run.sh"), std::fs::Permissions::from_mode(0o755)).expect("a mode");
    out(&server, &["cp", &here("tree"), "demo:/root/new-name"]);
    assert_eq!(out(&server, &["exec", "demo", "--", "sh", "-c", "cd /root/new-name; cat link; ./run.sh"]), "deep\nran");
    out(&server, &["cp", &here("tree"), "demo:/root"]);
    assert_eq!(
        out(&server, &["exec", "demo", "--", "cat", "/root/tree/deep/file"]),
        "deep",
        "an existing directory gets it under its name"
    );
    out(&server, &["cp", "demo:/root/tree", &here("out")]);
    assert_eq!(std::fs::read_to_string(folder.path().join("out/link")).expect("it came"), "deep\n");
    assert_eq!(std::fs::metadata(folder.path().join("out/run.sh")).expect("it came").permissions().mode() & 0o777, 0o755);
    // A directory to standard output is an archive, and one on standard input is unpacked.
    let archive = server.cli(&["cp", "demo:/root/tree", "-"]).output().expect("it runs");
    assert!(archive.status.success());
    assert_eq!(feed(&server, &["cp", "-", "demo:/root/unpacked/"], &archive.stdout).code, 0);
    assert_eq!(out(&server, &["exec", "demo", "--", "sh", "-c", "cat $(find /root/unpacked -name file)"]), "deep");
    fails(&server, &["cp", "demo:/root/nosuch", &here("x")], 3, "nosuch");
    assert!(!Path::new(&here("x")).exists());
    fails(&server, &["cp", &here("nosuch"), "demo:/root/"], 3, "nosuch");
    fails(&server, &["cp", &here("data"), &here("other")], 2, "SESSION:");

    assert_eq!(out(&server, &["files", "mkdir", "-p", "demo", "/root/a/b"]), "");
    let listed = out(&server, &["files", "ls", "demo", "/root"]);
    assert!(listed.contains("/root/a") && listed.contains("3000000") && listed.contains("-rw-"), "{listed}");
    assert!(json(&server, &["files", "ls", "demo", "/root", "--json"])["items"].as_array().is_some_and(|items| items.len() > 4));
    out(&server, &["files", "mkdir", "-p", "demo", "/root/c/d"]);
    out(&server, &["files", "rm", "demo", "/root/c"]);
    fails(&server, &["files", "cat", "demo", "/root/c/d"], 3, "no such file");
    let mut watching = Going::start(&server, &["files", "watch", "demo", "/root/a", "-r"]);
    eventually("the watch tells", || {
        out(&server, &["exec", "demo", "--", "sh", "-c", "echo x > /root/a/b/changed"]);
        watching.lines.try_iter().any(|line| line.contains("/root/a/b/changed")).then_some(())
    });
    out(&server, &["files", "rm", "demo", "/root/a/b"]);
    watching.line("what was watched is deleted", |line| line.starts_with("removed") && line.ends_with(" /root/a/b/"));
    // Asleep, files are read all the same, and nobody is woken.
    out(&server, &["hibernate", "demo"]);
    let ended = eventually("the watch ends with the sandbox", || watching.child.try_wait().expect("it is ours"));
    assert_eq!(ended.code(), Some(1));
    assert_eq!(out(&server, &["files", "cat", "demo", "/root/from-stdin"]), "by stdin");
    assert_eq!(json(&server, &["show", "demo", "--json"])["state"], "hibernated");
    server.delete_all_and_check();
}

#[test]
fn tokens_templates_and_the_rest_of_the_house() {
    let server = Server::start();
    let id = out(&server, &["new", "demo"]);
    let secret = out(&server, &["token", "new", "reader", "--scope", "read", "-q"]);
    let with = |token: &str, args: &[&str]| finish(server.cli(args).env("DORMOUSE_TOKEN", token));
    assert_eq!(with(&secret, &["ls", "-q"]).out.trim(), id);
    assert_eq!(with(&secret, &["rm", "demo"]).code, 4);
    assert_eq!(with(&secret, &["exec", "demo", "--", "true"]).code, 125);
    let wrong = with("wrong", &["ls"]);
    assert!(wrong.code == 4 && wrong.err.contains("--token"), "{wrong:?}");
    let listed = out(&server, &["token", "ls"]);
    assert!(listed.contains("reader") && !listed.contains(&secret), "{listed}");
    out(&server, &["token", "revoke", "reader"]);
    assert_eq!(with(&secret, &["ls"]).code, 4);
    fails(&server, &["token", "revoke", "nosuch"], 3, "nosuch");
    // Without a token the local server's own file is read.
    let found = finish(server.cli(&["ls", "-q"]).env_remove("DORMOUSE_TOKEN").env("DORMOUSE_DATA", server.data()));
    assert_eq!(found.out.trim(), id, "{found:?}");
    let socket = format!("unix:{}", server.data().join("dormouse.sock").display());
    assert_eq!(out(&server, &["--url", &socket, "ls", "-q"]), id);

    assert!(out(&server, &["template", "ls"]).contains("debian"));
    let version = out(&server, &["version"]);
    assert!(version.contains("server") && version.contains(&server.pid().to_string()), "{version}");
    let doctor = finish(server.cli(&["doctor"]).env("DORMOUSE_TEMPLATES", templates()));
    assert!(doctor.out.contains("runsc") && doctor.out.contains("memory snapshots"), "{doctor:?}");
    let script = out(&server, &["completions", "bash"]);
    assert!(script.contains("_dormouse") && script.contains("hibernate"), "{script}");
    // By a file: it is longer than an argument may be.
    let file = server.data().join("completions.bash");
    std::fs::write(&file, &script).expect("a file");
    assert!(finish(Command::new("bash").arg("-n").arg(&file)).code == 0, "bash can read it");
    fails(&server, &["completions", "tcl"], 2, "tcl");
    fails(&server, &["frobnicate"], 2, "frobnicate");
    fails(&server, &["new", "a/b"], 2, "'/'");
    assert_eq!(run(&server, &["--help"]).code, 0);
    let nobody = finish(server.cli(&["ls"]).env("DORMOUSE_URL", "http://127.0.0.1:1"));
    assert!(nobody.code == 69 && nobody.err.contains("127.0.0.1:1"), "{nobody:?}");
    let nobody = finish(server.cli(&["exec", "x", "--", "true"]).env("DORMOUSE_URL", "http://127.0.0.1:1"));
    assert_eq!(nobody.code, 125, "{nobody:?}");
    // A problem is told as JSON where JSON is asked for.
    let problem = run(&server, &["show", "nosuch", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(problem.err.trim()).expect("JSON")["code"], "not_found");
    // Without a terminal attach says so.
    fails(&server, &["attach", "demo"], 125, "terminal");
    server.delete_all_and_check();
}

/// A flag counts before a variable, a variable before the file; a second server is refused; `down` ends it.
#[test]
fn a_server_is_set_up_by_flags_variables_and_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data");
    let config = folder.path().join("dormouse.toml");
    let text =
        format!("listen = \"127.0.0.1:1\"\ndata = \"{}\"\npool = 0\ntemplates = \"{}\"\n", data.display(), templates().display());
    std::fs::write(&config, &text).expect("a file");
    let serve = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = Command::new(binary());
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("DORMOUSE_")) {
            command.env_remove(name);
        }
        command.arg("serve").args(args).envs(variables.iter().copied()).stdin(Stdio::null());
        command
    };
    let file = config.to_str().expect("UTF-8");
    // The variable counts before the file (which names a port that nobody may have here), the flag before the variable.
    let mut command = serve(
        &["--config", file, "--listen", "127.0.0.1:0"],
        &[("DORMOUSE_LISTEN", "127.0.0.1:2"), ("DORMOUSE_LOG_LEVEL", "error")],
    );
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it runs");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let address = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("listening on ").map(str::to_owned))
        .expect("it listens");
    let token = std::fs::read_to_string(data.join("admin.token")).expect("the file's data directory");
    let ask = |args: &[&str]| {
        finish(Command::new(binary()).args(args).env("DORMOUSE_URL", &address).env("DORMOUSE_TOKEN", token.trim()))
    };
    assert_eq!(ask(&["ls", "-q"]).code, 0);

    let second = finish(&mut serve(&["--config", file], &[("DORMOUSE_LISTEN", "127.0.0.1:0")]));
    assert_ne!(second.code, 0);
    assert!(second.err.contains(&child.id().to_string()), "it names the first's pid: {second:?}");

    std::fs::write(&config, format!("{text}colour = \"red\"\n")).expect("a file");
    let unknown = finish(&mut serve(&["--config", file], &[]));
    assert!(unknown.code != 0 && unknown.err.contains("colour"), "{unknown:?}");
    let missing = finish(&mut serve(&["--config", "/nosuch.toml"], &[]));
    assert!(missing.code != 0 && missing.err.contains("/nosuch.toml"), "{missing:?}");
    let nowhere = finish(&mut serve(&["--listen", "nowhere", "--data", data.to_str().expect("UTF-8")], &[]));
    assert!(nowhere.code != 0 && nowhere.err.contains("nowhere"), "{nowhere:?}");

    let down = ask(&["down"]);
    assert_eq!(down.code, 0, "{down:?}");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    assert_eq!(ask(&["down"]).code, 69);
}

/// `down` leaves sessions running, `down --hibernate` puts them to sleep first.
#[test]
fn down_leaves_sessions_as_asked() {
    let mut server = Server::with(Options::default());
    let id = out(&server, &["new", "demo"]);
    assert_eq!(run(&server, &["down"]).code, 0);
    assert_eq!(server.terminate(), Some(0));
    server.start_again();
    let demo = session(&server, &id);
    assert_eq!((demo.state().as_str(), demo.show()["generation"].as_u64()), ("running", Some(1)));
    assert_eq!(run(&server, &["down", "--hibernate"]).code, 0);
    server.terminate();
    server.start_again();
    assert_eq!(session(&server, &id).state(), "hibernated");
    server.delete_all_and_check();
}

#[test]
fn run_attaches_and_exits_as_its_command_does() {
    let server = Server::start();
    let tmux = Tmux::start();
    let pane = tmux.dormouse(&server, "run demo -- sh -c 'echo ready; read line; echo got \"$line\"; exit 7'", (80, 24));
    pane.shows_line("ready");
    pane.line("something");
    pane.shows_line("got something");
    pane.shows("[ended: exit 7]");
    pane.shows_line("status=7");
    let killed = tmux.dormouse(&server, "run demo -- sh -c 'kill -9 $$'", (80, 24));
    killed.shows_line("status=137");
    let missing = tmux.dormouse(&server, "run demo -- nosuch", (80, 24));
    missing.shows_line("status=127");
    let removed = tmux.dormouse(&server, "run gone --rm -- sh -c 'echo bye'", (80, 24));
    removed.shows_line("status=0");
    fails(&server, &["show", "gone"], 3, "gone");
    // The size is the user's, and follows it.
    let sized = tmux.dormouse(&server, "run demo -- sh -c 'while :; do read x; echo \"size $(stty size).\"; done'", (70, 20));
    sized.until("the terminal", |_| out(&server, &["ps", "demo"]).contains("terminal"));
    sized.line("");
    sized.shows("size 20 70.");
    sized.resize((101, 31));
    sized.until("the new size", |screen| {
        let shown = screen.contains("size 31 101.");
        if !shown {
            sized.press(&["Enter"]);
        }
        shown
    });
    server.delete_all_and_check();
}

#[test]
fn keys_detach_and_the_screen_is_there_again() {
    let server = Server::start();
    let tmux = Tmux::start();
    let first = tmux.dormouse(&server, "run demo -- env PS1='% ' bash --norc --noprofile", (80, 24));
    first.shows("%");
    first.line("x=41; echo marker $((x+1))");
    first.shows_line("marker 42");
    first.press(&["C-\\", "d"]);
    first.shows("[detached from demo]");
    first.shows_line("status=0");
    let again = tmux.dormouse(&server, "attach demo --detach-keys ctrl-p,ctrl-q", (80, 24));
    again.shows_line("marker 42");
    again.line("echo still $x");
    again.shows_line("still 41");
    // The usual keys are the program's now; half of the new ones is, too, when something else follows.
    again.press(&["C-\\"]);
    again.text("d");
    again.press(&["C-u"]);
    again.line("echo here");
    again.shows_line("here");
    // A second client watches, and may not type.
    let watcher = tmux.dormouse(&server, "attach demo --observe", (80, 24));
    watcher.shows_line("still 41");
    watcher.line("echo from the watcher");
    again.line("echo seen by both");
    watcher.shows_line("seen by both");
    assert!(!again.screen().contains("from the watcher"));
    // A third wants to type: it is told that it can't, until it takes the role.
    let third = tmux.dormouse(&server, "attach demo", (80, 24));
    third.shows("someone else types here");
    let taker = tmux.dormouse(&server, "attach demo --take", (80, 24));
    taker.shows_line("seen by both");
    taker.line("echo taken over");
    taker.shows_line("taken over");
    again.shows("someone else types here now");
    again.press(&["C-p", "C-q"]);
    again.shows_line("status=0");
    server.delete_all_and_check();
}

/// The server dies under an attached client: it says that it is reconnecting, then the screen is right, and what was
/// typed meanwhile has arrived once.
#[test]
fn attach_reconnects_by_itself() {
    let mut server = Server::start();
    let tmux = Tmux::start();
    let pane = tmux.dormouse(&server, "run demo -- env PS1='% ' bash --norc --noprofile", (80, 24));
    pane.shows("%");
    pane.line("x=41; echo marker $((x+1))");
    pane.shows_line("marker 42");
    let before = pane.screen();
    server.kill();
    pane.shows("reconnecting");
    pane.line("echo typed $((x+2)) meanwhile");
    server.start_again();
    let after = pane.shows_line("typed 43 meanwhile");
    assert!(!after.contains("reconnecting") && after.starts_with(before.trim_end()), "before\n{before}\nafter\n{after}");
    assert_eq!(after.matches("typed 43 meanwhile").count(), 1, "{after}");
    // Twice in a row, and detaching while there is no server.
    server.crash();
    pane.line("echo again $((x+3))");
    pane.shows_line("again 44");
    server.kill();
    pane.shows("reconnecting");
    pane.press(&["C-\\", "d"]);
    pane.shows_line("status=0");
    server.start_again();
    server.delete_all_and_check();
}

/// A session that is hibernated while someone is attached stays asleep until a key is pressed, and the screen is right.
#[test]
fn attach_shows_a_sleep_and_a_key_ends_it() {
    let server = Server::start();
    let tmux = Tmux::start();
    let pane = tmux.dormouse(&server, "run demo -- env PS1='% ' bash --norc --noprofile", (80, 24));
    pane.shows("%");
    pane.line("x=41; echo marker $((x+1))");
    pane.shows_line("marker 42");
    let before = pane.screen();
    let watcher = tmux.dormouse(&server, "attach demo --observe", (80, 24));
    watcher.shows_line("marker 42");
    out(&server, &["hibernate", "demo"]);
    pane.shows("[hibernated: press a key to wake]");
    watcher.shows("[hibernated]");
    assert_eq!(json(&server, &["show", "demo", "--json"])["state"], "hibernated", "nobody woke it by being there");
    pane.press(&["q"]);
    pane.until("the screen as it was", |screen| screen == before);
    assert_eq!(json(&server, &["show", "demo", "--json"])["generation"], 2);
    pane.line("echo awake $x");
    pane.shows_line("awake 41");
    watcher.shows_line("awake 41");
    // Somebody else may wake it, too, and one can detach from a session that sleeps.
    out(&server, &["hibernate", "demo"]);
    pane.shows("[hibernated: press a key to wake]");
    out(&server, &["wake", "demo"]);
    pane.until("it is back", |screen| !screen.contains("hibernated"));
    out(&server, &["hibernate", "demo"]);
    pane.shows("[hibernated: press a key to wake]");
    pane.press(&["C-\\", "d"]);
    pane.shows_line("status=0");
    assert_eq!(json(&server, &["show", "demo", "--json"])["state"], "hibernated");
    // Attaching wakes, observing doesn't.
    let observer = tmux.dormouse(&server, "attach demo --observe", (80, 24));
    observer.shows_line("status=125");
    let back = tmux.dormouse(&server, "attach demo", (80, 24));
    back.shows_line("awake 41");
    out(&server, &["stop", "demo"]);
    back.until("it ends", |screen| screen.contains("status=") && screen.contains("ended"));
    server.delete_all_and_check();
}
