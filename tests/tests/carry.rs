//! Sessions that go elsewhere: in one file to another server, and all of them in a backup to another data directory.

use dormouse_tests::{
    Options, Server, Session, eventually,
    place::{Place, put_away, put_snapshot_away},
};
use serde_json::{Value, json};
use std::{fs, path::Path, process::Output};

/// A server that knows no template: what a session needs has to come with it.
fn bare() -> Server {
    let dir = tempfile::tempdir().expect("a directory").keep();
    Server::with(Options { templates: Some(dir), ..Options::default() })
}

#[track_caller]
fn cli(server: &Server, args: &[&str]) -> Output {
    let output = server.cli(args).output().expect("it runs");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn here(client: &dormouse_tests::http::Client, id: &str) -> Session {
    Session::new(client.clone(), &client.get(&format!("/v1/sessions/{id}")).expect(200).json())
}

/// Marks on the disk and in memory, and a process that goes on; answers its number.
fn mark(session: &Session, text: &str) -> String {
    session.out(&format!("echo {text} > /root/disk; echo {text} > /tmp/memory; sleep 10000 >/dev/null 2>&1 & echo $!"))
}

#[track_caller]
fn is_marked(session: &Session, text: &str, pid: &str) {
    assert_eq!(session.out("cat /root/disk /tmp/memory"), format!("{text}\n{text}"));
    assert_eq!(session.out(&format!("tr '\\0' ' ' < /proc/{pid}/cmdline")), "sleep 10000");
}

#[test]
fn a_session_goes_to_another_server_in_one_file_with_memory_output_and_history() {
    let server = Server::start();
    let session = server.session_with(&json!({ "key": "carried", "metadata": { "a": "b" } }));
    let pid = mark(&session, "carried");
    let said = session.sh("echo what it said");
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    // While it runs, and asleep.
    cli(&server, &["export", "carried", &file("running")]);
    assert_eq!(session.out("echo it goes on"), "it goes on");
    session.hibernate();
    cli(&server, &["export", "carried", &file("asleep")]);
    assert_eq!(session.state(), "hibernated");
    let again = server.cli(&["export", "carried", &file("asleep")]).output().expect("it runs");
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("is there already"));

    for name in ["running", "asleep"] {
        let other = bare();
        let output = cli(&other, &["import", &file(name)]);
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), session.id, "it keeps its id");
        let there = here(&other.client, &session.id);
        let shown = there.show();
        assert_eq!(
            (&shown["state"], &shown["key"], &shown["metadata"]["a"]),
            (&json!("hibernated"), &json!("carried"), &json!("b")),
            "{shown}"
        );
        let exec = there.exec(&said.id);
        assert_eq!((&exec["state"], exec["stdout_bytes"].as_u64()), (&json!("exited"), Some(13)), "{exec}");
        assert_eq!(there.output(&said.id, "stdout"), b"what it said\n");
        assert_eq!(there.event("session.imported")["data"]["from"], session.id.as_str());
        assert!(there.events().iter().any(|event| event["type"] == "exec.ended"), "its history came along");
        there.wake();
        is_marked(&there, "carried", &pid);
        // Under its own id once only; under another one any number of times.
        let twice = other.cli(&["import", &file(name)]).output().expect("it runs");
        assert_eq!(twice.status.code(), Some(5), "{}", String::from_utf8_lossy(&twice.stderr));
        let output = cli(&other, &["import", "--new-id", "--disk-only", &file(name)]);
        let copy = here(&other.client, String::from_utf8_lossy(&output.stdout).trim());
        assert_ne!(copy.id, session.id);
        assert_eq!((copy.show()["state"].clone(), copy.show()["key"].clone()), (json!("stopped"), Value::Null));
        copy.call("start").expect(200);
        assert_eq!(copy.out("cat /root/disk; ls /tmp | wc -l"), "carried\n0");
        other.delete_all_and_check();
    }
    server.delete_all_and_check();
}

#[test]
fn what_is_no_exported_session_is_refused_and_leaves_nothing() {
    let server = Server::start();
    let session = server.session();
    session.out("head -c 2000000 /dev/urandom > /root/noise");
    let good = server.client.get(&session.path("/export")).expect(200).body;
    server.delete_all_and_check();
    // There nothing of it is known, so all of it is read.
    let server = bare();
    let import = |bytes: &[u8]| {
        server
            .client
            .send("PUT", "/v1/sessions/import?new_id=true", &[("content-type", "application/x-tar")], Some(bytes))
            .expect("an answer")
    };
    let cut = &good[..good.len() / 2];
    let mut flipped = good.clone();
    // In several places: what this server has by itself isn't read.
    for tenth in 1..10 {
        let at = flipped.len() * tenth / 10;
        flipped[at] ^= 1;
    }
    let outside = {
        let mut header = vec![0; 1024];
        header[..12].copy_from_slice(b"../../escape");
        header[100..107].copy_from_slice(b"0000644");
        header[124..135].copy_from_slice(b"00000000000");
        header[156] = b'0';
        header[257..265].copy_from_slice(b"ustar\x0000");
        header[148..156].fill(b' ');
        let sum: u32 = header[..512].iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        [header, vec![0; 1024]].concat()
    };
    for (what, bytes) in [
        ("nothing", &b""[..]),
        ("text", b"no archive at all"),
        ("half", cut),
        ("a flipped bit", &flipped),
        ("a way out", &outside),
    ] {
        let answer = import(bytes);
        assert!(matches!(answer.status, 400 | 422), "{what}: {} {}", answer.status, answer.text());
    }
    let list = server.client.get("/v1/sessions").expect(200).json();
    assert_eq!(list["items"], json!([]));
    assert!(!server.data().join("escape").exists() && !server.data().join("tmp/escape").exists());
    eventually("nothing of them stays", || {
        let left = fs::read_dir(server.data().join("tmp")).map(|dir| dir.count()).unwrap_or_default();
        (left == 0).then_some(())
    });
    import(&good).expect(201);
    server.delete_all_and_check();
}

/// A restored data directory and the server on it, with the templates of nobody.
fn restore(place: &str, from: &Server, settings: &[(String, String)], more: &[&str]) -> Server {
    // The directory is made by the restore; the harness makes one, too.
    let templates = tempfile::tempdir().expect("a directory").keep();
    let mut args = vec!["--object-store".to_owned(), place.to_owned(), "--object-store-take-over".to_owned()];
    args.extend(more.iter().map(|arg| (*arg).to_owned()));
    let env = settings.to_vec();
    Server::prepared(Options { templates: Some(templates), args, env, ..Options::default() }, |data: &Path| {
        let mut command = from.cli(&["restore", place, "--data", &data.to_string_lossy()]);
        let output = command.envs(settings.iter().cloned()).output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    })
}

fn comes_back(place: &Place, elsewhere: Option<&str>) {
    let mut server = place.server();
    let (running, asleep, stopped, later) = (server.session(), server.session(), server.session(), server.session());
    let pids = [mark(&running, "running"), mark(&asleep, "asleep"), mark(&stopped, "stopped")];
    let said = running.sh("echo what it said");
    let kept = running.client.post(&running.path("/snapshots"), &json!({ "name": "kept" })).expect(201).json();
    put_snapshot_away(&server, &kept);
    running.out("echo after > /root/after");
    asleep.hibernate();
    stopped.call("stop").expect(200);
    put_away(&server, &stopped);
    later.delete();
    let args: Vec<&str> = ["backup"].into_iter().chain(elsewhere).collect();
    let backed_up = cli(&server, &args);
    let name = String::from_utf8_lossy(&backed_up.stdout).trim().to_owned();
    assert!(name.starts_with("backup-"), "{name}");
    let listed = String::from_utf8_lossy(&cli(&server, &["backup", "--list"]).stdout).trim().to_owned();
    assert_eq!(listed, if elsewhere.is_some() { String::new() } else { name.clone() });
    assert_eq!(running.out("echo it goes on"), "it goes on");
    // What comes after it isn't in it; and nothing that it needs is collected.
    running.out("echo later > /root/after");
    asleep.wake();
    asleep.out("rm /root/disk");
    server.client.delete(&format!("/v1/snapshots/{}", kept["id"].as_str().expect("an id"))).expect(204);
    server.client.post("/v1/storage/collect", &json!({})).expect(200);
    // The first one is gone for good.
    let at = match (elsewhere, &place.s3) {
        (Some(at), _) => at.to_owned(),
        (None, Some(s3)) => s3.url("objects"),
        (None, None) => server.data().join("objects").to_string_lossy().into_owned(),
    };
    server.kill();
    let settings = place.s3.as_ref().map(|s3| s3.settings()).unwrap_or_default();
    let back = restore(&at, &server, &settings, &["--cache-size", "0"]);
    let (running, asleep, stopped) = (running.on(&back.client), asleep.on(&back.client), stopped.on(&back.client));
    for (session, state) in [(&running, "hibernated"), (&asleep, "hibernated"), (&stopped, "stopped")] {
        let shown = session.show();
        assert_eq!((shown["state"].as_str(), &shown["local"]), (Some(state), &json!(false)), "{shown}");
        assert_eq!(session.event("session.restored")["data"]["backup"], name.as_str());
    }
    back.client.get(&later.path("")).expect(410);
    running.wake();
    is_marked(&running, "running", &pids[0]);
    assert_eq!(running.out("cat /root/after"), "after");
    assert_eq!(running.output(&said.id, "stdout"), b"what it said\n");
    asleep.wake();
    is_marked(&asleep, "asleep", &pids[1]);
    stopped.call("start").expect(200);
    assert_eq!(stopped.out("cat /root/disk; ls /tmp | wc -l"), "stopped\n0");
    let path = format!("/v1/snapshots/{}/fork", kept["id"].as_str().expect("an id"));
    let made = back.client.post(&path, &json!({})).expect(201).json();
    let fork = Session::new(back.client.clone(), &made["items"][0]);
    is_marked(&fork, "running", &pids[0]);
    back.delete_all_and_check();
}

#[test]
fn a_backup_brings_everything_back_on_another_data_directory() {
    comes_back(&Place::folder(), None);
}

#[test]
fn a_backup_on_s3_brings_everything_back_on_another_data_directory() {
    comes_back(&Place::s3(), None);
}

#[test]
fn a_backup_can_lie_elsewhere() {
    let elsewhere = tempfile::tempdir().expect("a directory");
    comes_back(&Place::folder(), Some(&elsewhere.path().join("backups").to_string_lossy()));
}

#[test]
fn a_restore_never_touches_sessions_that_are_there() {
    let server = Place::folder().server();
    let session = server.session();
    let place = server.data().join("objects").to_string_lossy().into_owned();
    let fresh = tempfile::tempdir().expect("a directory");
    let data = fresh.path().join("data");
    let nothing = server.cli(&["restore", &place, "--data", &data.to_string_lossy()]).output().expect("it runs");
    assert!(!nothing.status.success() && !data.exists(), "there is no backup yet, and nothing is made");
    cli(&server, &["backup"]);
    let used = tempfile::tempdir().expect("a directory");
    fs::write(used.path().join("store.db"), "something").expect("a file");
    let refused = server.cli(&["restore", &place, "--data", &used.path().to_string_lossy()]).output().expect("it runs");
    let says = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && says.contains("restore into a new directory"), "{says}");
    assert_eq!(fs::read(used.path().join("store.db")).expect("it is there"), b"something");
    let busy = server.cli(&["restore", &place, "--data", &server.data().to_string_lossy()]).output().expect("it runs");
    let says = String::from_utf8_lossy(&busy.stderr).into_owned();
    assert!(!busy.status.success() && says.contains(&server.pid().to_string()), "{says}");
    assert_eq!(session.out("echo fine"), "fine");
    let name = String::from_utf8_lossy(&cli(&server, &["backup", "--list"]).stdout).trim().to_owned();
    cli(&server, &["backup", "--rm", &name]);
    assert_eq!(server.cli(&["backup", "--rm", &name]).output().expect("it runs").status.code(), Some(3));
    for to in ["relative", "ftp://x", ""] {
        server.client.post("/v1/storage/backup", &json!({ "to": to })).expect(400);
    }
    server.delete_all_and_check();
}
