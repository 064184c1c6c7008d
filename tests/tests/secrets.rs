//! What a session can't see of the host and of others, and who can read the data directory.

use dormouse_tests::{Server, Session, eventually, leftovers};
use serde_json::json;
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
};

/// A file of the host with words that stand nowhere else; it goes with the test.
struct Canary {
    path: PathBuf,
    words: String,
}

impl Canary {
    fn plant(dir: impl AsRef<Path>) -> Canary {
        let words = format!("canary-{}", uuid::Uuid::new_v4());
        let path = dir.as_ref().join(format!("dormouse-test-{}", uuid::Uuid::new_v4()));
        fs::write(&path, &words).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        // As open as it gets: only where the session is may keep it from reading.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("its mode can be set");
        Canary { path, words }
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Password hashes of the host's users.
fn host_hashes() -> Vec<String> {
    let shadow = fs::read_to_string("/etc/shadow").unwrap_or_default();
    let fields = shadow.lines().filter_map(|line| line.split(':').nth(1)).filter(|field| field.starts_with('$'));
    fields.map(str::to_owned).collect()
}

/// Files inside in which one of `words` stands, every file system and every process looked at.
fn files_with(session: &Session, words: &[&str]) -> Vec<String> {
    // The words go in by a file that isn't searched, so that the search doesn't find itself.
    session.write_file("/dev/shm/words", words.join("\n").as_bytes()).expect(204);
    let found = session.sh(
        "grep -rlaFs -f /dev/shm/words --exclude-dir=proc --exclude-dir=sys --exclude-dir=shm / 2>/dev/null
         grep -laFs -f /dev/shm/words /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/mountinfo /proc/[0-9]*/maps /proc/mounts
         true",
    );
    found.stdout.lines().map(str::to_owned).collect()
}

#[test]
fn from_inside_nothing_of_the_host_the_data_directory_or_another_session_can_be_read() {
    let server = Server::start();
    let (session, other) = (server.session(), server.session());
    let planted = ["/root", "/home", "/etc"].map(Canary::plant);
    let in_data = Canary::plant(server.data());
    let others = Canary::plant(server.data().join("sessions").join(&other.id));
    let words_of_other = format!("canary-{}", uuid::Uuid::new_v4());
    other.write_file("/root/private", words_of_other.as_bytes()).expect(204);
    other.write_file("/tmp/private", words_of_other.as_bytes()).expect(204);

    let data = server.data().to_string_lossy().into_owned();
    let token = server.client.token.clone();
    let hashes = host_hashes();
    let mut words: Vec<&str> = planted.iter().chain([&in_data, &others]).map(|canary| canary.words.as_str()).collect();
    words.extend([words_of_other.as_str(), token.as_str(), data.as_str(), other.id.as_str()]);
    words.extend(hashes.iter().map(String::as_str));
    // The search itself must be able to find: an own file, and an own process's environment.
    let own = format!("canary-{}", uuid::Uuid::new_v4());
    session.write_file("/var/own", own.as_bytes()).expect(204);
    let sleeper = session.client.post(&session.path("/execs"), &json!({ "argv": ["sleep", "1000"], "env": { "OWN": own } }));
    let pid = sleeper.expect(201).json()["pid"].as_u64().expect("a pid");
    assert_eq!(files_with(&session, &[own.as_str()]), ["/var/own".to_owned(), format!("/proc/{pid}/environ")]);
    assert_eq!(files_with(&session, &words), [] as [&str; 0]);

    // By name, and by every way that leads up and out.
    let mut paths: Vec<String> =
        planted.iter().chain([&in_data, &others]).map(|c| c.path.to_string_lossy().into_owned()).collect();
    paths.extend([format!("{data}/admin.token"), format!("{data}/sessions"), format!("{data}/store.db"), data.clone()]);
    for path in &paths {
        for root in ["", "/..", "/proc/1/root", "/proc/1/root/..", "/proc/self/root/../..", "/proc/1/cwd/.."] {
            let looked = session.sh(&format!("ls '{root}{path}'"));
            assert_ne!(looked.code, Some(0), "{root}{path} can be seen: {}", looked.stdout);
        }
        // Through the API, by a link that leads out.
        session.out(&format!("ln -sfn '{path}' /root/out; ln -sfn '../../../../../../../../..{path}' /root/far"));
        for link in ["/root/out", "/root/far"] {
            assert_eq!(session.read_file(link).status, 404, "{link} → {path}");
        }
    }
    session.hibernate();
    for link in ["/root/out", "/root/far"] {
        assert_eq!(session.read_file(link).status, 404, "{link} while it sleeps");
    }
    server.delete_all_and_check();
}

#[test]
fn a_session_of_the_hosts_tools_has_none_of_its_people() {
    let server = Server::start();
    if !dormouse_tests::server::templates().join("names/host").exists() {
        println!("skipped: no template 'host' here");
        return;
    }
    let session = server.session_with(&json!({ "template": "host" }));
    // What stands in home directories inside was made for them, never taken: no name of the host's is there.
    let skeleton = |name: &str| {
        name.is_empty() || [".bashrc", ".profile", ".bash_logout", ".cache", ".config", ".local", ".ssh"].contains(&name)
    };
    for dir in ["/root", "/home"] {
        let inside = session.out(&format!("ls -A {dir}"));
        let taken: Vec<&str> = inside.lines().filter(|name| !skeleton(name) && Path::new(dir).join(name).exists()).collect();
        assert_eq!(taken, [] as [&str; 0], "{dir} inside");
    }
    let shadow = session.sh("cat /etc/shadow").stdout;
    for hash in host_hashes() {
        assert!(!shadow.contains(&hash), "a password of the host's");
    }
    let keys = session.out("find /etc/ssh /etc/ssl/private /var/lib/dormouse /run -type f 2>/dev/null | grep -v '^/run/dormouse/' | xargs -r grep -l 'PRIVATE KEY' | wc -l");
    assert_eq!(keys, "0", "private keys of the host's");
    server.delete_all_and_check();
}

/// Everything below `dir` that others than its owner may touch, but for what belongs to a disk.
fn open_to_others(dir: &Path, data: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())).flatten() {
        let path = entry.path();
        let known = path.symlink_metadata().expect("it is there");
        let name = path.strip_prefix(data).expect("it is below");
        let parts: Vec<_> = name.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        // The files of a session have the modes that the session gave them; so have the layers that programs come in. The
        // folders that they lie in are closed.
        // The log is the test's own. The runtime runs its program as nobody, too.
        if matches!(
            parts[..],
            ["server.log"]
                | ["programs", _, "runsc"]
                | ["sessions", _, "root"]
                | ["sessions", _, "disk", "upper" | "work"]
                | ["programs", "layers", _]
        ) {
            continue;
        }
        if !known.is_symlink() && (known.mode() & 0o077 != 0 || known.uid() != rustix::process::geteuid().as_raw()) {
            found.push(format!("{:o} {}", known.mode() & 0o7777, name.display()));
        }
        if known.is_dir() {
            open_to_others(&path, data, found);
        }
    }
}

#[test]
fn the_data_directory_is_closed_and_the_token_stands_in_one_file_only() {
    let server = Server::start();
    let session = server.session();
    let token = server.client.token.clone();
    // Work of every kind: execs, a terminal, a file, a service, a sleep.
    session.out("echo output; echo error >&2");
    session.client.post(&session.path("/terminals"), &json!({ "cols": 80, "rows": 24 })).expect(201);
    session.write_file("/root/file", b"content").expect(204);
    let closed = |moment: &str| {
        let data = server.data();
        assert_eq!(fs::metadata(data).expect("it is there").mode() & 0o7777, 0o700);
        let mut found = Vec::new();
        open_to_others(data, data, &mut found);
        assert_eq!(found, [] as [&str; 0], "{moment}: open to others");
        for file in ["admin.token", "store.db", "lock"] {
            assert_eq!(fs::metadata(data.join(file)).expect("it is there").mode() & 0o7777, 0o600, "{file}");
        }
    };
    closed("running");
    session.hibernate();
    // Its mount goes with its processes, and must not go in the middle of a search.
    eventually("the session sleeps for good", || leftovers::processes(server.data()).is_empty().then_some(()));
    // By NUL-ended pieces: an image can be one line of many megabytes.
    let mut search = Command::new("grep");
    search.args(["-rlazF", "-D", "skip", "--", &token]).arg(server.data()).env("LC_ALL", "C");
    let searched = search.output().expect("grep");
    let found = String::from_utf8_lossy(&searched.stdout).into_owned();
    assert_eq!(
        found.trim(),
        server.data().join("admin.token").to_string_lossy(),
        "no disk, journal, image, log or database has it; grep: {}",
        String::from_utf8_lossy(&searched.stderr)
    );
    closed("hibernated");
    // On no command line, where every user of the host could read it.
    for (pid, line) in leftovers::processes(server.data()) {
        assert!(!line.contains(&token), "process {pid} has the token on its command line");
    }
    let own = fs::read(format!("/proc/{}/cmdline", server.pid())).expect("the server runs");
    assert!(!String::from_utf8_lossy(&own).contains(&token));
    session.wake();
    session.out("true");
    closed("woken");
    server.delete_all_and_check();
}
