//! What sleeps goes into the object store and comes back whole: on a folder and on a real S3 server alike.

use dormouse_tests::{
    Server, Session, eventually,
    place::{Place, bytes_below, files_below, pack, put_away, put_snapshot_away},
};
use serde_json::{Value, json};
use std::fs;

/// Fills memory and disk with what a seed says, and answers later whether all of it is there. It holds 8 MiB.
const PROGRAM: &str = r#"
import hashlib, os, sys, time
seed = sys.argv[1].encode()
def block(n): return hashlib.shake_256(seed + b"%d" % n).digest(1 << 16)
held = [block(n) for n in range(128)]
for n in range(16):
    open("/root/block-%d" % n, "wb").write(block(n))
open("/root/ready", "w").write(str(os.getpid()))
while True:
    time.sleep(0.05)
    if os.path.exists("/tmp/ask"):
        os.unlink("/tmp/ask")
        whole = all(held[n] == block(n) for n in range(128)) and all(open("/root/block-%d" % n, "rb").read() == block(n) for n in range(16))
        open("/tmp/answer.new", "w").write("%d %s" % (os.getpid(), "whole" if whole else "broken"))
        os.rename("/tmp/answer.new", "/tmp/answer")
"#;

/// Starts it; answers its number.
fn fill(session: &Session, seed: &str) -> String {
    session.write_file("/root/fill.py", PROGRAM.as_bytes()).expect(204);
    session.start_sh(&format!("exec python3 /root/fill.py {seed}"));
    eventually("the pattern is there", || {
        let read = session.sh("cat /root/ready 2>/dev/null");
        Some(read.stdout).filter(|text| !text.is_empty())
    })
}

/// Asks it whether its memory and disk are what they were.
#[track_caller]
fn verify(session: &Session, pid: &str) {
    session.out("rm -f /tmp/answer; touch /tmp/ask");
    let answer = eventually("the pattern is verified", || {
        let read = session.sh("cat /tmp/answer 2>/dev/null");
        Some(read.stdout).filter(|text| !text.is_empty())
    });
    assert_eq!(answer, format!("{pid} whole"));
}

fn take(session: &Session, body: &Value) -> Value {
    session.client.post(&session.path("/snapshots"), body).expect(201).json()
}

#[track_caller]
fn fork(server: &Server, snapshot: &Value, body: &Value) -> Session {
    let path = format!("/v1/snapshots/{}/fork", snapshot["id"].as_str().expect("an id"));
    let answer = server.client.post(&path, body).expect(201).json();
    assert_eq!(answer["errors"], json!([]), "{answer}");
    Session::new(server.client.clone(), &answer["items"][0])
}

fn storage(server: &Server) -> Value {
    server.client.get("/v1/storage").expect(200).json()
}

fn wakes_whole(place: &Place) {
    let mut server = place.server();
    let session = server.session();
    let pid = fill(&session, "a session");
    session.out("echo printed; mkdir /root/d; ln -s block-1 /root/link; chmod 640 /root/block-2");
    session.hibernate();
    put_away(&server, &session);
    // What it printed is read without fetching anything, and its files by fetching them, without waking it.
    let execs = session.client.get(&session.path("/execs")).expect(200).json();
    assert!(execs["items"].as_array().is_some_and(|list| list.len() > 2), "{execs}");
    assert_eq!(session.show()["local"], false, "reading history fetches nothing");
    assert_eq!(session.read_file("/root/ready").expect(200).text(), pid);
    let shown = session.show();
    assert_eq!((&shown["state"], &shown["local"]), (&json!("hibernated"), &json!(true)), "{shown}");
    put_away(&server, &session);
    server.crash();
    let session = session.on(&server.client);
    let woken = session.wake();
    assert_eq!((&woken["memory"], &woken["packed"]), (&json!("live"), &json!(false)), "{woken}");
    assert_eq!(session.event("wake.done")["data"]["memory"], "restored");
    verify(&session, &pid);
    assert_eq!(session.out("readlink /root/link; stat -c %a /root/block-2; ls -d /root/d"), "block-1\n640\n/root/d");
    // Once more, on top of what has changed since; and stopped, where only the disk is left.
    session.out("echo later > /root/later");
    session.hibernate();
    put_away(&server, &session);
    session.wake();
    verify(&session, &pid);
    session.call("stop").expect(200);
    put_away(&server, &session);
    session.call("start").expect(200);
    assert_eq!(session.out("cat /root/later; ls /tmp/answer 2>&1 | grep -c 'No such'"), "later\n1");
    server.delete_all_and_check();
}

#[test]
fn what_sleeps_is_packed_given_up_and_wakes_whole() {
    wakes_whole(&Place::folder());
}

#[test]
fn what_sleeps_is_packed_given_up_and_wakes_whole_on_s3() {
    wakes_whole(&Place::s3());
}

fn snapshots_outlive(place: &Place) {
    let server = place.server();
    let session = server.session();
    let pid = fill(&session, "generation one");
    let first = take(&session, &json!({ "name": "first" }));
    session.out("echo two > /root/two; rm /root/block-3");
    let second = take(&session, &json!({ "name": "second", "memory": false }));
    put_snapshot_away(&server, &first);
    session.delete();
    pack(&server);
    assert_eq!(bytes_below(&server.data().join("layers")), 0, "layers that only packed snapshots need go with them");
    // Two at once of one that is away; each through four generations of forks and wakes.
    let forks = json!({ "count": 2 });
    let path = format!("/v1/snapshots/{}/fork", first["id"].as_str().expect("an id"));
    let made = server.client.post(&path, &forks).expect(201).json();
    assert_eq!(made["errors"], json!([]), "{made}");
    let mut twins: Vec<Session> =
        made["items"].as_array().expect("a list").iter().map(|fork| Session::new(server.client.clone(), fork)).collect();
    for twin in &twins {
        verify(twin, &pid);
    }
    let random = |session: &Session| session.out("head -c 16 /dev/urandom | base64");
    assert_ne!(random(&twins[0]), random(&twins[1]));
    let mut line = twins.remove(0);
    for generation in 2..=4 {
        line.hibernate();
        put_away(&server, &line);
        line.wake();
        verify(&line, &pid);
        let snapshot = take(&line, &json!({ "name": format!("generation-{generation}") }));
        put_snapshot_away(&server, &snapshot);
        line = fork(&server, &snapshot, &json!({}));
        verify(&line, &pid);
    }
    // The disk of the second alone, without the first in its way.
    server.client.delete(&format!("/v1/snapshots/{}", first["id"].as_str().expect("an id"))).expect(204);
    let collected = server.client.post("/v1/storage/collect", &json!({})).expect(200).json();
    assert!(collected["manifests_removed"].as_u64().is_some_and(|count| count >= 1), "{collected}");
    let disk = fork(&server, &second, &json!({}));
    assert_eq!(disk.out("cat /root/two; ls /root/block-3 2>&1 | grep -c 'No such'; ls /tmp | wc -l"), "two\n1\n0");
    let checked = server.client.post("/v1/storage/check", &json!({})).expect(200).json();
    assert_eq!((&checked["intact"], &checked["damages"]), (&json!(true), &json!([])), "{checked}");
    let report = storage(&server);
    assert!(report["whole_bytes"].as_u64() > report["shared_once_bytes"].as_u64(), "much is shared: {report}");
    assert!(report["stored_bytes"].as_u64() < report["shared_once_bytes"].as_u64(), "and compressed: {report}");
    server.delete_all_and_check();
}

#[test]
fn snapshots_are_forked_from_the_store_through_generations() {
    snapshots_outlive(&Place::folder());
}

#[test]
fn snapshots_are_forked_from_the_store_through_generations_on_s3() {
    snapshots_outlive(&Place::s3());
}

#[test]
fn while_the_store_is_away_sessions_run_sleep_and_wake_and_packing_goes_on_afterwards() {
    let mut place = Place::s3();
    let mut options = place.options();
    options.args.extend(["--pack-after".to_owned(), "1s".to_owned()]);
    options.args.drain(0..2);
    let server = Server::with(options);
    let (away, awake) = (server.session(), server.session());
    away.out("echo kept > /root/kept");
    away.hibernate();
    eventually("it is given up", || (away.show()["local"] == json!(false)).then_some(()));
    place.s3.as_mut().expect("an S3 server").kill();
    assert_eq!(awake.out("echo it runs"), "it runs");
    let refused = away.call("wake").expect(503);
    let problem = refused.json();
    assert_eq!(
        (&problem["code"], &problem["retryable"], &problem["no_side_effects"]),
        (&json!("object_store"), &json!(true), &json!(true)),
        "{problem}"
    );
    assert_eq!(away.state(), "hibernated");
    awake.out("echo in memory > /tmp/here");
    awake.hibernate();
    eventually("the trouble is told", || server.log().contains("can't be packed now").then_some(()));
    assert_eq!(awake.show()["packed"], false);
    awake.wake();
    assert_eq!(awake.out("cat /tmp/here"), "in memory");
    awake.hibernate();
    place.s3.as_mut().expect("an S3 server").start_again();
    eventually("packing goes on by itself", || (awake.show()["local"] == json!(false)).then_some(()));
    assert_eq!(storage(&server)["trouble"], Value::Null);
    away.wake();
    awake.wake();
    assert_eq!((away.out("cat /root/kept"), awake.out("cat /tmp/here")), ("kept".to_owned(), "in memory".to_owned()));
    server.delete_all_and_check();
}

#[test]
fn a_flipped_bit_in_any_part_of_a_stored_snapshot_is_an_error_and_starts_nothing() {
    let mut server = Place::folder().server();
    let objects = server.data().join("objects");
    let session = server.session();
    // What all share is packed before: what is new then is the snapshot's own.
    let shared = take(&session, &json!({ "name": "shared" }));
    put_snapshot_away(&server, &shared);
    let before = files_below(&objects);
    let pid = fill(&session, "bits");
    let snapshot = take(&session, &json!({ "name": "kept" }));
    put_snapshot_away(&server, &snapshot);
    session.delete();
    // The config is everybody's, the lock is written anew at each start.
    let parts: Vec<_> =
        files_below(&objects).into_iter().filter(|path| !before.contains(path) || path.ends_with("config")).collect();
    for kind in ["/packs/", "/manifests/", "config"] {
        assert!(parts.iter().any(|path| path.to_string_lossy().contains(kind)), "{kind}: {parts:?}");
    }
    let path = format!("/v1/snapshots/{}/fork", snapshot["id"].as_str().expect("an id"));
    let (mut refused, mut whole) = (0, 0);
    for part in parts.iter().filter(|path| !path.ends_with("lock")) {
        let good = fs::read(part).expect("an object");
        for at in [0, good.len() / 5, good.len() / 2, good.len() * 4 / 5, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            fs::write(part, &bad).expect("a damaged object");
            // A server that runs holds the index; a fresh one reads all of it.
            assert_eq!(server.terminate(), Some(0));
            server.start_again();
            let answer = server.client.post(&path, &json!({}));
            if answer.status == 201 {
                // What was hit isn't needed for this, or is written twice: then all of it is right.
                whole += 1;
                let made = Session::new(server.client.clone(), &answer.json()["items"][0]);
                verify(&made, &pid);
                made.delete();
                put_snapshot_away(&server, &snapshot);
            } else {
                refused += 1;
                let text = answer.text();
                assert!(matches!(answer.status, 422 | 503), "{} at {at}: {text}", part.display());
                assert!(text.contains("damaged") || text.contains("missing"), "{} at {at}: {text}", part.display());
                let list = server.client.get("/v1/sessions").expect(200).json();
                assert_eq!(list["items"], json!([]), "nothing was started");
            }
            fs::write(part, &good).expect("the object as it was");
        }
    }
    assert!(refused > whole, "{refused} of the flipped bits were told, {whole} were not needed");
    assert_eq!(server.terminate(), Some(0));
    server.start_again();
    // Others were whole all the time; and this one is again.
    for (snapshot, is_own) in [(&shared, false), (&snapshot, true)] {
        let made = fork(&server, snapshot, &json!({}));
        if is_own {
            verify(&made, &pid);
        }
    }
    server.delete_all_and_check();
}

fn is_data(path: &std::path::Path) -> bool {
    let text = path.to_string_lossy();
    text.contains("/packs/") || text.contains("/manifests/")
}

fn key_file(server_dir: &std::path::Path, name: &str, byte: u8) -> String {
    let path = server_dir.join(name);
    fs::write(&path, [byte; 32]).expect("a key");
    path.to_string_lossy().into_owned()
}

/// True where the bytes stand anywhere in the objects, or in their names.
fn stands_in(objects: &std::path::Path, text: &str) -> bool {
    let bytes = text.as_bytes();
    files_below(objects).iter().any(|path| {
        let content = fs::read(path).unwrap_or_default();
        path.to_string_lossy().contains(text) || content.windows(bytes.len()).any(|window| window == bytes)
    })
}

#[test]
fn an_encrypted_store_tells_nothing_opens_with_its_key_alone_and_its_key_can_be_changed() {
    let keys = tempfile::tempdir().expect("a directory");
    let (one, two) = (key_file(keys.path(), "one", 1), key_file(keys.path(), "two", 2));
    let mut place = Place::folder();
    place.args = vec!["--object-store-key-file".to_owned(), one.clone()];
    let mut server = place.server();
    let session = server.session_with(&json!({ "name": "secret-name" }));
    // Too random to be compressed: it would stand there as it is.
    let marker = session.out("head -c 3000 /dev/urandom | base64 -w0 > /root/marker; cat /root/marker");
    session.hibernate();
    put_away(&server, &session);
    let objects = server.data().join("objects");
    for hidden in [&marker[..60], "secret-name", session.id.as_str(), "session-", "marker"] {
        assert!(!stands_in(&objects, hidden), "{hidden} can be read in the store");
    }
    assert_eq!(storage(&server)["encrypted"], true);
    // A wrong key, and none at all: one clear error each, and nothing is lost.
    let usual = place.options().args;
    let without: Vec<&str> = usual.iter().filter(|arg| !arg.contains("key") && **arg != one).map(String::as_str).collect();
    for (args, says) in [
        ([&without[..], &["--object-store-key-file", two.as_str()]].concat(), "wrong key"),
        (without.clone(), "is encrypted: give its key"),
    ] {
        assert_eq!(server.terminate(), Some(0));
        server.set_args(&args);
        server.start_again();
        let problem = session.on(&server.client).call("wake").expect(503).json();
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains(says)), "{problem}");
        assert_eq!(problem["retryable"], false);
        assert_eq!(session.on(&server.client).state(), "hibernated");
    }
    assert_eq!(server.terminate(), Some(0));
    server.set_args(&usual.iter().map(String::as_str).collect::<Vec<_>>());
    server.start_again();
    // Another key, without anything being encrypted anew.
    let packs =
        || files_below(&objects).into_iter().filter(|path| path.to_string_lossy().contains("/packs/")).collect::<Vec<_>>();
    let before = packs();
    let rotated = server.cli(&["storage", "rotate-key", &two]).output().expect("it runs");
    assert!(rotated.status.success(), "{rotated:?}");
    assert_eq!(packs(), before);
    assert_eq!(server.terminate(), Some(0));
    server.start_again();
    let problem = session.on(&server.client).call("wake").expect(503).json();
    assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains("wrong key")), "{problem}");
    assert_eq!(server.terminate(), Some(0));
    server.set_args(&[&without[..], &["--object-store-key-file", two.as_str()]].concat());
    server.start_again();
    let session = session.on(&server.client);
    session.wake();
    assert_eq!(session.out("cat /root/marker"), marker);
    let refused = server.client.post("/v1/storage/rotate-key", &json!({ "key_file": "relative" })).expect(400);
    assert!(refused.problem().contains("bad_request"), "{}", refused.text());
    server.delete_all_and_check();
}

/// Writes an image's descriptor anew, with a right checksum.
fn change_descriptor(image: &std::path::Path, change: impl FnOnce(&mut Value, &mut Value)) {
    let file = image.join("image.json");
    let mut envelope: Value = serde_json::from_slice(&fs::read(&file).expect("a descriptor")).expect("JSON");
    let mut body: Value = serde_json::from_str(envelope["body"].as_str().expect("a body")).expect("JSON");
    change(&mut envelope, &mut body);
    let text = body.to_string();
    envelope["blake3"] = json!(blake3::hash(text.as_bytes()).to_hex().to_string());
    envelope["body"] = json!(text);
    fs::write(file, envelope.to_string()).expect("a descriptor");
}

fn image_of(server: &Server, snapshot: &Value) -> std::path::PathBuf {
    let dir = server.data().join("snapshots").join(snapshot["id"].as_str().expect("an id")).join("image");
    let image = fs::read_dir(dir).expect("images").next().expect("an image").expect("an entry");
    image.path()
}

#[test]
fn a_memory_that_cant_be_loaded_here_says_why_and_its_disk_can_be_used() {
    let server = Place::folder().server();
    let session = server.session();
    session.out("echo disk > /root/disk; echo memory > /tmp/memory");
    let newer = take(&session, &json!({ "name": "newer" }));
    change_descriptor(&image_of(&server, &newer), |envelope, _| envelope["format"] = json!(99));
    let foreign = take(&session, &json!({ "name": "foreign" }));
    change_descriptor(&image_of(&server, &foreign), |_, body| {
        body["cpu_features"].as_array_mut().expect("a list").push(json!("antigravity"));
    });
    let broken = take(&session, &json!({ "name": "broken" }));
    fs::write(image_of(&server, &broken).join("image.json"), "{").expect("a damaged descriptor");
    // One that can't be packed keeps none of the others from it.
    put_snapshot_away(&server, &foreign);
    for (snapshot, code, says) in
        [(&newer, "unloadable", "format 99"), (&foreign, "unloadable", "antigravity"), (&broken, "damaged", "damaged")]
    {
        let path = format!("/v1/snapshots/{}/fork", snapshot["id"].as_str().expect("an id"));
        let answer = server.client.post(&path, &json!({}));
        // Told before anything is made, or for the one fork that it is.
        let problem = if answer.status == 422 { answer.json() } else { answer.expect(201).json()["errors"][0].clone() };
        assert_eq!(problem["code"], code, "{problem}");
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains(says)), "{problem}");
        let made = fork(&server, snapshot, &json!({ "disk_only": true }));
        assert_eq!(made.out("cat /root/disk; ls /tmp | wc -l"), "disk\n0");
        let event = made.event("fork.made");
        assert_eq!((&event["data"]["disk_only"], &event["data"]["memory"]), (&json!(true), &json!(false)), "{event}");
    }
    // The same of a session: its own memory, and a rollback.
    session.hibernate();
    put_away(&server, &session);
    session.wake();
    session.hibernate();
    eventually("its frozen original is gone", || {
        pack(&server);
        (session.show()["packed"] == json!(true)).then_some(())
    });
    let body = json!({ "snapshot_id": broken["id"], "disk_only": true });
    let back = session.client.post(&session.path("/rollback"), &body).expect(200).json();
    assert_eq!((&back["state"], session.out("cat /root/disk; ls /tmp | wc -l").as_str()), (&json!("running"), "disk\n0"));
    assert_eq!(session.event("rollback.done")["data"]["disk_only"], true);
    session.out("echo more > /root/more");
    session.hibernate();
    let started = server.client.post(&session.path("/start?disk_only=true"), &json!({})).expect(200).json();
    assert_eq!((&started["state"], session.out("cat /root/more").as_str()), (&json!("running"), "more"));
    server.delete_all_and_check();
}

/// A damaged memory in the store: the disk comes back without it, and nothing is started with it.
#[test]
fn of_a_session_whose_stored_memory_is_damaged_the_disk_comes_back() {
    let mut server = Place::folder().server();
    // What all share is packed before, so that the last pack is the session's own.
    let other = server.session();
    other.hibernate();
    put_away(&server, &other);
    let session = server.session();
    session.out("head -c 3000000 /dev/urandom > /tmp/memory; echo disk > /root/disk");
    session.hibernate();
    put_away(&server, &session);
    let packs: Vec<_> = files_below(&server.data().join("objects")).into_iter().filter(|path| is_data(path)).collect();
    let newest = packs
        .iter()
        .filter(|path| path.to_string_lossy().contains("/packs/"))
        .max_by_key(|path| fs::metadata(path).and_then(|meta| meta.modified()).expect("a time"));
    let newest = newest.expect("a pack").clone();
    let good = fs::read(&newest).expect("a pack");
    // Most of it is memory.
    let mut told = None;
    for part in 1..20 {
        let mut bad = good.clone();
        bad[good.len() * part / 20] ^= 1;
        fs::write(&newest, &bad).expect("a damaged pack");
        assert_eq!(server.terminate(), Some(0));
        server.start_again();
        let answer = session.on(&server.client).call("wake");
        if answer.status == 422 && answer.text().contains("pages.img") {
            told = Some(answer.json());
            break;
        }
        if answer.status == 200 {
            session.on(&server.client).hibernate();
            put_away(&server, &session.on(&server.client));
        }
        fs::write(&newest, &good).expect("the pack as it was");
    }
    let told = told.expect("one of the places was in the memory");
    assert_eq!(told["code"], "damaged", "{told}");
    let session = session.on(&server.client);
    assert_eq!(session.state(), "hibernated");
    let checked = server.client.post("/v1/storage/check", &json!({})).expect(200).json();
    let affected = checked["affected"].to_string();
    assert!(checked["intact"] == json!(false) && affected.contains(&session.id), "{checked}");
    server.client.post(&session.path("/start?disk_only=true"), &json!({})).expect(200);
    assert_eq!(session.out("cat /root/disk; ls /tmp | wc -l"), "disk\n0");
    server.delete_all_and_check();
}

/// Says that it is over, however that came about.
struct Over<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

#[test]
fn collections_take_nothing_from_what_is_packed_meanwhile() {
    let server = Place::folder().server();
    let session = server.session();
    let over = std::sync::atomic::AtomicBool::new(false);
    let kept: Vec<Value> = std::thread::scope(|scope| {
        let collecting = scope.spawn(|| {
            let mut count = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                server.client.post("/v1/storage/collect", &json!({})).expect(200);
                count += 1;
            }
            count
        });
        let _over = Over(&over);
        let mut kept: Vec<Value> = Vec::new();
        for n in 0..8 {
            session.out(&format!("echo {n} > /root/number; head -c 400000 /dev/urandom > /root/noise-{n}"));
            kept.push(take(&session, &json!({ "name": format!("number-{n}"), "memory": n % 2 == 0 })));
            pack(&server);
            if n % 3 == 2 {
                let gone = kept.remove(0);
                server.client.delete(&format!("/v1/snapshots/{}", gone["id"].as_str().expect("an id"))).expect(204);
            }
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(collecting.join().expect("it collects") > 1);
        kept
    });
    let checked = server.client.post("/v1/storage/check", &json!({})).expect(200).json();
    assert_eq!(checked["intact"], true, "{checked}");
    for snapshot in &kept {
        put_snapshot_away(&server, snapshot);
        let made = fork(&server, snapshot, &json!({}));
        let name = snapshot["name"].as_str().expect("a name");
        assert_eq!(format!("number-{}", made.out("cat /root/number")), name);
        made.delete();
    }
    session.delete();
    for snapshot in &kept {
        server.client.delete(&format!("/v1/snapshots/{}", snapshot["id"].as_str().expect("an id"))).expect(204);
    }
    let told = server.cli(&["storage", "collect"]).output().expect("it runs");
    assert!(String::from_utf8_lossy(&told.stdout).starts_with("freed "), "{told:?}");
    let report = storage(&server);
    assert_eq!(
        (&report["chunks"], &report["manifests"], &report["collectable_bytes"]),
        (&json!(0), &json!(0), &json!(0)),
        "{report}"
    );
    server.delete_all_and_check();
}

#[test]
fn what_is_away_still_counts_for_its_tokens_limits() {
    let server = Place::folder().server();
    let body = json!({ "name": "little", "limits": { "disk_bytes": 8 << 20 } });
    let token = server.client.post("/v1/tokens", &body).expect(201).json();
    let client = server.client.with_token(token["secret"].as_str().or(token["token"].as_str()).expect("a secret"));
    let made = client.post("/v1/sessions", &json!({})).expect(201).json();
    let session = Session::new(server.client.clone(), &made);
    session.out("head -c 9000000 /dev/urandom > /root/large; sync");
    session.hibernate();
    put_away(&server, &session);
    let refused = client.post("/v1/sessions", &json!({})).expect(507).json();
    assert!(refused["detail"].as_str().is_some_and(|detail| detail.contains("bytes of disk (used: 9")), "{refused}");
    assert_eq!(session.show()["local"], false, "it was not fetched for that");
    session.delete();
    let made = client.post("/v1/sessions", &json!({})).expect(201).json();
    Session::new(client, &made).delete();
    server.delete_all_and_check();
}

#[test]
fn places_and_sizes_that_make_no_sense_are_named_at_the_start() {
    for (args, says) in [
        (&["--object-store", "ftp://x"][..], "only s3:// and folders are known"),
        (&["--object-store", "s3://"], "it names no bucket"),
        (&["--cache-size", "many"], "cache_size"),
        (&["--pack-after", "soon"], "pack_after"),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut command = std::process::Command::new(dormouse_tests::server::binary());
        command.arg("serve").args(["--listen", "127.0.0.1:0", "--pool", "0"]).arg("--data").arg(dir.path()).args(args);
        let output = command.output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(says), "{args:?}: {text}");
    }
}

#[test]
fn one_store_belongs_to_one_server_until_it_is_given_back_or_taken() {
    let shared = tempfile::tempdir().expect("a directory");
    let mut place = Place::folder();
    place.args = vec!["--object-store".to_owned(), shared.path().join("objects").to_string_lossy().into_owned()];
    let mut first = place.server();
    let session = first.session();
    session.out("echo first > /root/first");
    session.hibernate();
    put_away(&first, &session);
    let mut second = place.server();
    let problem = second.client.post("/v1/storage/pack", &json!({}));
    let other = second.session();
    other.hibernate();
    let refused = eventually("it is refused", || {
        let reply = second.client.post("/v1/storage/pack", &json!({}));
        (reply.status == 503).then_some(reply)
    });
    assert!(refused.text().contains("is in use by the server"), "{} {}", refused.text(), problem.text());
    assert_eq!(storage_status(&second), 503);
    // An orderly end gives it back.
    assert_eq!(first.terminate(), Some(0));
    put_away(&second, &other);
    first.start_again();
    assert_eq!(session.on(&first.client).call("wake").expect(503).json()["retryable"], false);
    // What the second one doesn't know it leaves alone.
    second.client.post("/v1/storage/collect", &json!({})).expect(200);
    second.kill();
    assert_eq!(first.terminate(), Some(0));
    let mut args = place.options().args;
    args.push("--object-store-take-over".to_owned());
    first.set_args(&args.iter().map(String::as_str).collect::<Vec<_>>());
    first.start_again();
    let session = session.on(&first.client);
    session.wake();
    assert_eq!(session.out("cat /root/first"), "first");
    first.delete_all_and_check();
}

fn storage_status(server: &Server) -> u16 {
    server.client.get("/v1/storage").status
}
