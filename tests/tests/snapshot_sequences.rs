//! Random sequences of writes, snapshots, forks, rollbacks, sleeps and deletes, through the real binary, against a model
//! that keeps full copies of everything. The same with everything that sleeps in an object store, an S3 server that is
//! killed while it is written to.

use dormouse_tests::{Choices, Server, Session, eventually, long, place::Place, seed};
use serde_json::{Value, json};
use std::{collections::BTreeMap, thread, time::Duration};

/// Sequences, and operations of each.
const SEQUENCES: u64 = 30;
const SEQUENCES_LONG: u64 = 200;
/// The same where an S3 server is killed on the way, which takes its time to come back.
const SEQUENCES_S3: u64 = 30;
const SEQUENCES_S3_LONG: u64 = 100;
const OPERATIONS: u64 = 6;
/// Sessions of a sequence at most.
const MOST: usize = 4;

/// What is in a session: its files below `/root/w` and, as the memory that can be lost, below `/tmp/w`.
#[derive(Debug, Clone, Default, PartialEq)]
struct Content {
    disk: BTreeMap<String, String>,
    memory: BTreeMap<String, String>,
}

struct Known {
    session: Session,
    content: Content,
    /// It sleeps or is stopped until something needs it.
    stopped: bool,
}

struct Kept {
    id: String,
    of: String,
    content: Content,
    memory: bool,
}

struct World {
    server: Server,
    choices: Choices,
    sessions: Vec<Known>,
    snapshots: Vec<Kept>,
    told: Vec<String>,
    count: u64,
    /// What sleeps goes there.
    place: Option<Place>,
}

#[test]
fn what_was_kept_comes_back_and_nobody_sees_what_others_do() {
    World::new(seed(), Server::start(), None).go();
}

#[test]
fn what_was_packed_comes_back_though_the_s3_server_is_killed_in_mid_upload() {
    let place = Place::s3();
    let mut options = place.options();
    // As soon as it sleeps; nothing stays unpacked.
    let after = options.args.iter().position(|arg| arg == "1h").expect("when to pack");
    options.args[after] = "100ms".to_owned();
    World::new(seed(), Server::with(options), Some(place)).go();
}

impl World {
    fn go(mut self) {
        let sequences = match (self.place.is_some(), long()) {
            (false, false) => SEQUENCES,
            (false, true) => SEQUENCES_LONG,
            (true, false) => SEQUENCES_S3,
            (true, true) => SEQUENCES_S3_LONG,
        };
        for _ in 0..sequences {
            self.begin();
            for _ in 0..OPERATIONS {
                self.step();
            }
            self.end();
        }
        self.server.delete_all_and_check();
        if self.place.is_some() {
            self.server.client.post("/v1/storage/collect", &json!({})).expect(200);
            let left = self.server.client.get("/v1/storage").expect(200).json();
            assert_eq!(
                (&left["chunks"], &left["manifests"]),
                (&json!(0), &json!(0)),
                "nothing of them stays in the store: {left}"
            );
        }
    }

    fn new(seed: u64, server: Server, place: Option<Place>) -> World {
        let (sessions, snapshots, told) = (Vec::new(), Vec::new(), Vec::new());
        World { server, choices: Choices(seed), sessions, snapshots, told, count: 0, place }
    }

    fn begin(&mut self) {
        self.told.clear();
        let session = self.server.session();
        session.out("mkdir -p /root/w /tmp/w");
        self.sessions.push(Known { session, content: Content::default(), stopped: false });
        let first = 0;
        self.write(first);
    }

    /// Everything is checked once more, then goes.
    fn end(&mut self) {
        for n in 0..self.sessions.len() {
            self.check(n);
        }
        for known in self.sessions.drain(..) {
            known.session.delete();
        }
        for kept in self.snapshots.drain(..) {
            self.server.client.delete(&format!("/v1/snapshots/{}", kept.id)).expect(204);
        }
        // Those taken for forks and rollbacks are kept for a while; nothing else is.
        let kept = self.server.client.get("/v1/snapshots?limit=1000").expect(200).json();
        let kept: Vec<Value> = kept["items"].as_array().expect("a list").clone();
        for snapshot in &kept {
            self.server.client.delete(&format!("/v1/snapshots/{}", snapshot["id"].as_str().expect("an id"))).expect(204);
        }
        // Those that only deleted sessions needed go in the background.
        let layers = self.server.data().join("layers");
        eventually(&format!("no layer is left that nobody needs, after {:?}", self.told), || {
            (std::fs::read_dir(&layers).expect("a directory").count() == 0).then_some(())
        });
    }

    fn step(&mut self) {
        let n = usize::try_from(self.choices.below(self.sessions.len() as u64)).expect("small");
        // It takes its time to come back.
        if self.place.is_some() && self.choices.below(40) == 0 {
            self.strike_the_store();
        }
        match self.choices.below(if self.place.is_some() { 13 } else { 12 }) {
            0..=2 => self.write(n),
            3 | 4 => self.snapshot(n),
            5 | 6 => self.fork(n),
            7 | 8 => self.rollback(n),
            9 => self.sleep_or_stop(n),
            10 => self.delete_snapshot(),
            11 => self.delete(n),
            _ => self.collect(),
        }
        if let Some(last) = self.sessions.len().checked_sub(1) {
            self.check(n.min(last));
        }
    }

    fn tell(&mut self, what: String) {
        println!("{what}");
        self.told.push(what);
    }

    /// Changes files in several ways; the model does the same.
    fn write(&mut self, n: usize) {
        self.count += 1;
        let (word, name) = (format!("w{}", self.count), format!("f{}", self.choices.below(4)));
        let way = self.choices.below(6);
        self.tell(format!("write {way} {name} {word} in {n}"));
        let known = &mut self.sessions[n];
        // It is started for this, without what was in its memory.
        if std::mem::take(&mut known.stopped) {
            known.content.memory.clear();
        }
        let disk = &mut known.content.disk;
        let command = match way {
            0 | 1 => {
                disk.insert(name.clone(), word.clone());
                format!("rm -rf /root/w/{name}; echo {word} > /root/w/{name}")
            }
            2 => {
                disk.retain(|path, _| path != &name && !path.starts_with(&format!("{name}/")));
                format!("rm -rf /root/w/{name}")
            }
            3 => {
                disk.retain(|path, _| path != &name && !path.starts_with(&format!("{name}/")));
                disk.insert(format!("{name}/deep"), word.clone());
                format!("rm -rf /root/w/{name}; mkdir /root/w/{name}; echo {word} > /root/w/{name}/deep")
            }
            4 => {
                let moved: Vec<(String, String)> = disk.iter().filter(|(path, _)| under(path, &name)).map(own).collect();
                disk.retain(|path, _| !under(path, &name) && !under(path, "moved"));
                disk.extend(moved.into_iter().map(|(path, text)| (path.replacen(&name, "moved", 1), text)));
                format!("rm -rf /root/w/moved; [ ! -e /root/w/{name} ] || mv /root/w/{name} /root/w/moved")
            }
            _ => {
                known.content.memory.insert(name.clone(), word.clone());
                format!("mkdir -p /tmp/w; echo {word} > /tmp/w/{name}")
            }
        };
        if way != 5 {
            // A directory where a file was, and the other way round.
            disk.retain(|path, _| !(path.starts_with(&format!("{name}/")) && way < 2));
        }
        self.run(n, &command);
    }

    /// A command in a session, which is started for it.
    fn run(&mut self, n: usize, command: &str) -> String {
        let known = &mut self.sessions[n];
        if std::mem::take(&mut known.stopped) {
            known.content.memory.clear();
        }
        let exec = known.session.exec_with(&json!({ "shell": command, "start": true }));
        assert_eq!(exec.code, Some(0), "{command}: {}{} after {:?}", exec.stdout, exec.stderr, self.told);
        exec.stdout
    }

    fn snapshot(&mut self, n: usize) {
        let memory = self.choices.below(3) > 0;
        self.tell(format!("snapshot of {n}, memory {memory}"));
        let known = &self.sessions[n];
        let body = json!({ "memory": memory });
        let taken = known.session.client.post(&known.session.path("/snapshots"), &body).expect(201).json();
        assert_eq!(taken["memory"], json!(memory && !known.stopped), "{taken}");
        let id = taken["id"].as_str().expect("an id").to_owned();
        let kept = Kept { id, of: known.session.id.clone(), content: known.content.clone(), memory: memory && !known.stopped };
        self.snapshots.push(kept);
    }

    fn fork(&mut self, n: usize) {
        if self.sessions.len() >= MOST {
            return;
        }
        let pick = self.choices.below(self.snapshots.len() as u64 + 1);
        let (path, content) = match self.snapshots.get(usize::try_from(pick).expect("small")) {
            Some(kept) => (format!("/v1/snapshots/{}/fork", kept.id), restored(&kept.content, kept.memory)),
            None => {
                let known = &self.sessions[n];
                (known.session.path("/fork"), restored(&known.content, !known.stopped))
            }
        };
        self.tell(format!("fork {path}"));
        let forked = self.server.client.post(&path, &json!({})).expect(201).json();
        assert_eq!(forked["errors"], json!([]), "{:?}", self.told);
        let session = Session::new(self.server.client.clone(), &forked["items"][0]);
        self.sessions.push(Known { session, content, stopped: false });
    }

    fn rollback(&mut self, n: usize) {
        let of = self.sessions[n].session.id.clone();
        let own: Vec<usize> = (0..self.snapshots.len()).filter(|s| self.snapshots[*s].of == of).collect();
        let Some(pick) = own.get(usize::try_from(self.choices.below(own.len() as u64)).expect("small")) else { return };
        self.tell(format!("rollback of {n} to {pick}"));
        let (kept, known) = (&self.snapshots[*pick], &mut self.sessions[n]);
        let body = json!({ "snapshot_id": kept.id });
        let back = known.session.client.post(&known.session.path("/rollback"), &body).expect(200).json();
        assert_eq!(back["state"], "running", "{back}");
        known.content = restored(&kept.content, kept.memory);
        known.stopped = false;
    }

    fn sleep_or_stop(&mut self, n: usize) {
        let stop = self.choices.below(3) == 0;
        self.tell(format!("{} of {n}", if stop { "stop" } else { "hibernate" }));
        let known = &mut self.sessions[n];
        if stop {
            known.session.call("stop").expect(200);
            known.stopped = true;
        } else if !known.stopped {
            known.session.hibernate();
        }
    }

    fn delete_snapshot(&mut self) {
        if self.snapshots.is_empty() {
            return;
        }
        let pick = usize::try_from(self.choices.below(self.snapshots.len() as u64)).expect("small");
        self.tell(format!("delete snapshot {pick}"));
        let kept = self.snapshots.remove(pick);
        self.server.client.delete(&format!("/v1/snapshots/{}", kept.id)).expect(204);
    }

    /// Kills the object store at some moment of an upload, and starts it again.
    fn strike_the_store(&mut self) {
        let after = Duration::from_millis(self.choices.below(400));
        self.tell(format!("the store is killed {after:?} after packing began"));
        let (client, s3) = (self.server.client.clone(), self.place.as_mut().and_then(|place| place.s3.as_mut()));
        let s3 = s3.expect("an S3 server");
        thread::scope(|scope| {
            let packing = scope.spawn(|| client.post("/v1/storage/pack", &json!({})));
            // No moment is better than another.
            thread::sleep(after);
            s3.kill();
            s3.start_again();
            let answer = packing.join().expect("an answer");
            assert!(matches!(answer.status, 200 | 503), "{} {}", answer.status, answer.text());
        });
    }

    fn collect(&mut self) {
        self.tell("collect".to_owned());
        self.server.client.post("/v1/storage/collect", &json!({})).expect(200);
    }

    fn delete(&mut self, n: usize) {
        if self.sessions.len() < 2 {
            return;
        }
        self.tell(format!("delete {n}"));
        self.sessions.remove(n).session.delete();
    }

    /// The session has what the model has. Half of the time it is read where it is, without waking it.
    fn check(&mut self, n: usize) {
        if self.choices.below(2) == 0 {
            let known = &self.sessions[n];
            for (path, text) in &known.content.disk {
                let read = known.session.read_file(&format!("/root/w/{path}")).expect(200).text();
                assert_eq!(read.trim_end(), text, "{path} of {n} after {:?}", self.told);
            }
            return;
        }
        let list =
            |dir: &str| format!("mkdir -p {dir}; cd {dir}; find . -type f | sort | while read f; do echo \"$f=$(cat $f)\"; done");
        let (disk, memory) = (self.run(n, &list("/root/w")), self.run(n, &list("/tmp/w")));
        let found = Content { disk: parse(&disk), memory: parse(&memory) };
        assert_eq!(found, self.sessions[n].content, "session {n} after {:?}", self.told);
    }
}

fn under(path: &str, name: &str) -> bool {
    path == name || path.starts_with(&format!("{name}/"))
}

fn own((path, text): (&String, &String)) -> (String, String) {
    (path.clone(), text.clone())
}

/// What a session has that begins as a snapshot is.
fn restored(content: &Content, memory: bool) -> Content {
    Content { disk: content.disk.clone(), memory: if memory { content.memory.clone() } else { BTreeMap::new() } }
}

fn parse(listing: &str) -> BTreeMap<String, String> {
    let pairs = listing.lines().filter_map(|line| line.strip_prefix("./")?.split_once('='));
    pairs.map(|(path, text)| (path.to_owned(), text.to_owned())).collect()
}
