//! Random operations from several clients on a few sessions, compared with a model of what each client may rely on.
//!
//! Each client owns files, keys and markers of its own in every session, so what it must find is known exactly, whatever
//! the others do meanwhile: a file that was acknowledged is there with its last content, an exec with a key has run once,
//! and a marker in memory is there unless the session was stopped since. The server is killed now and then.

use dormouse_tests::{Choices, Server, Session, http::Reply, long, seed};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    sync::{
        Arc, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

const CLIENTS: u64 = 4;
const SESSIONS: usize = 3;
/// Operations of all clients together.
const OPERATIONS: u64 = 500;
const OPERATIONS_LONG: u64 = 5000;

/// What all clients share of a session.
struct Shared {
    session: RwLock<Session>,
    /// How often a stop was asked for; counted before it is asked.
    stops: AtomicU64,
}

/// What one client knows of one session.
#[derive(Default)]
struct Known {
    files: HashMap<String, String>,
    keys: u64,
    /// A marker in memory, and how often the session had been stopped when it was written.
    marker: Option<(String, u64)>,
}

struct Client {
    number: u64,
    choices: Choices,
    known: Vec<Known>,
    count: u64,
}

#[test]
fn what_a_client_was_told_holds_whatever_others_do() {
    let seed = seed();
    let mut server = Server::start();
    let shared: Arc<Vec<Shared>> = Arc::new(
        (0..SESSIONS)
            .map(|n| Shared {
                session: RwLock::new(server.session_with(&json!({ "key": format!("session-{n}") }))),
                stops: AtomicU64::new(0),
            })
            .collect(),
    );
    let total = if long() { OPERATIONS_LONG } else { OPERATIONS };
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let shared = shared.clone();
            std::thread::spawn(move || {
                let known = (0..SESSIONS).map(|_| Known::default()).collect();
                let mut client = Client { number, choices: Choices(seed.wrapping_add(number)), known, count: 0 };
                for _ in 0..total / CLIENTS {
                    client.step(&shared);
                }
                for n in 0..SESSIONS {
                    client.check(n, &shared[n]);
                }
            })
        })
        .collect();
    // The server dies under them, at moments of the seed's.
    let mut choices = Choices(seed ^ 0xdead);
    while clients.iter().any(|client| !client.is_finished()) {
        let until = Instant::now() + Duration::from_millis(1500 + choices.below(4000));
        while Instant::now() < until && clients.iter().any(|client| !client.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        server.crash();
    }
    for client in clients {
        client.join().expect("no client was told anything that didn't hold");
    }
    for one in shared.iter() {
        let session = one.session.read().expect("no client panicked");
        let events = session.events();
        for (n, event) in events.iter().enumerate() {
            assert_eq!(event["seq"], n + 1, "a history has no holes");
        }
    }
    server.delete_all_and_check();
}

impl Client {
    fn step(&mut self, shared: &[Shared]) {
        let n = usize::try_from(self.choices.below(SESSIONS as u64)).expect("small");
        let one = &shared[n];
        let session = one.session.read().expect("no client panicked").clone();
        self.count += 1;
        match self.choices.below(20) {
            0..=3 => self.write(n, &session),
            4..=6 => self.run_once(n, &session),
            7..=8 => self.mark(n, one, &session),
            9..=11 => self.check(n, one),
            12..=13 => settle(&session, "hibernate", &[200, 422]),
            14..=15 => settle(&session, "wake", &[200, 409, 422]),
            16 => settle(&session, "pause", &[200, 422]),
            17 => settle(&session, "unpause", &[200, 422]),
            18 => {
                one.stops.fetch_add(1, Ordering::SeqCst);
                settle(&session, "stop", &[200]);
            }
            _ => {
                let answer = ask(&session, "POST", "/connect", Some(json!({ "wake": false }))).json();
                let state = answer["lifecycle"]["state"].as_str().expect("a state").to_owned();
                assert!(["running", "paused", "hibernated", "stopped"].contains(&state.as_str()), "{answer}");
            }
        }
    }

    fn write(&mut self, n: usize, session: &Session) {
        let name = format!("/root/{}-{}", self.number, self.choices.below(3));
        let content = format!("{} of {}", self.count, self.number);
        awake(session);
        let path = session.path(&format!("/files?path={name}"));
        let reply = again(|| session.client.send("PUT", &path, &[], Some(content.as_bytes())).ok());
        if reply.status == 204 {
            self.known[n].files.insert(name, content);
        } else {
            // Refused: which of both it holds is not known.
            self.known[n].files.remove(&name);
        }
    }

    fn run_once(&mut self, n: usize, session: &Session) {
        let key = format!("{}-{}", self.number, self.known[n].keys);
        awake(session);
        let body = json!({ "shell": format!("echo {key} >> /root/ran-{}; sync", self.number), "key": key });
        let reply = ask(session, "POST", "/execs?wait=true&start=true", Some(body));
        let state = reply.json()["state"].clone();
        if reply.status == 201 && state == "exited" {
            self.known[n].keys += 1;
        } else {
            // Lost with its sandbox, or refused: it may have run. The next key is another.
            self.known[n].keys += 1;
            self.known[n].files.remove("ran");
        }
    }

    fn mark(&mut self, n: usize, one: &Shared, session: &Session) {
        let stops = one.stops.load(Ordering::SeqCst);
        let content = format!("{}-{}", self.number, self.count);
        awake(session);
        let body = json!({ "shell": format!("echo {content} > /tmp/mark-{}", self.number) });
        let reply = ask(session, "POST", "/execs?wait=true&start=true", Some(body));
        let done = reply.status == 201 && reply.json()["exit_code"] == 0;
        self.known[n].marker = done.then_some((content, stops));
    }

    /// Everything that this client was told must hold.
    fn check(&mut self, n: usize, one: &Shared) {
        let session = one.session.read().expect("no client panicked").clone();
        let known = &self.known[n];
        for (name, content) in &known.files {
            let reply = again(|| session.client.send("GET", &session.path(&format!("/files?path={name}")), &[], None).ok());
            assert_eq!((reply.status, reply.text()), (200, content.clone()), "{name} was acknowledged");
        }
        awake(&session);
        let body =
            json!({ "shell": format!("sort /root/ran-{0} 2>/dev/null | uniq -d; cat /tmp/mark-{0} 2>/dev/null", self.number) });
        let reply = ask(&session, "POST", "/execs?wait=true&start=true", Some(body)).json();
        if reply["exit_code"].is_null() {
            return;
        }
        let stdout = reply["stdout"].as_str().expect("text").trim().to_owned();
        if let Some((content, stops)) = &known.marker
            && one.stops.load(Ordering::SeqCst) == *stops
        {
            assert_eq!(&stdout, content, "memory is kept, and what has a key has run once");
        } else {
            assert!(!stdout.contains('\n') || known.marker.is_none(), "something with a key has run twice: {stdout}");
        }
    }
}

/// A user's pause is in everybody's way: whoever needs the session takes it back.
fn awake(session: &Session) {
    settle(session, "unpause", &[200, 422]);
}

fn settle(session: &Session, what: &str, expected: &[u16]) {
    let reply = ask(session, "POST", &format!("/{what}"), Some(json!({})));
    assert!(expected.contains(&reply.status), "{what}: {} {}", reply.status, reply.text());
}

fn ask(session: &Session, method: &str, rest: &str, body: Option<Value>) -> Reply {
    let body = body.map(|body| body.to_string());
    let headers = [("content-type", "application/json")];
    again(|| session.client.send(method, &session.path(rest), &headers, body.as_deref().map(str::as_bytes)).ok())
}

/// Asks again where nobody answered or the answer says that it can be asked again.
fn again(mut ask: impl FnMut() -> Option<Reply>) -> Reply {
    let deadline = Instant::now() + dormouse_tests::PATIENCE;
    loop {
        if let Some(reply) = ask() {
            let retryable = reply.status >= 400 && reply.status != 404 && reply.json()["retryable"] == true;
            // What was accepted has an object or a refusal for its answer, never a failure of the server's.
            assert!(retryable || reply.status < 500, "{} {}", reply.status, reply.text());
            if !retryable {
                return reply;
            }
        }
        assert!(Instant::now() < deadline, "nobody answers");
        std::thread::sleep(Duration::from_millis(50));
    }
}
