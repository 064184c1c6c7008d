//! Webhooks, seen from a receiver: signed, in order, sent again until they are taken, through deaths of the server.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use dormouse_tests::{Options, Server, Session, eventually};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

/// What a webhook tells where its list of events isn't set.
const USUAL: [&str; 11] = [
    "session.created",
    "session.deleted",
    "session.expired",
    "state.changed",
    "operation.started",
    "operation.failed",
    "timeout.near",
    "wake.done",
    "agent.waiting",
    "oom",
    "supervisor.lost",
];

/// A request as it came.
#[derive(Debug, Clone)]
struct Received {
    line: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
    /// What it was answered.
    status: u16,
}

impl Received {
    fn id(&self) -> &str {
        &self.headers["webhook-id"]
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("the body is JSON")
    }

    fn kind(&self) -> String {
        self.json()["type"].as_str().expect("an event has a type").to_owned()
    }

    /// Checks the signature as the specification says, and that it was made now.
    #[track_caller]
    fn check(&self, secret: &[u8]) {
        let timestamp = &self.headers["webhook-timestamp"];
        let signed = [self.id().as_bytes(), b".", timestamp.as_bytes(), b".", &self.body].concat();
        let expected = format!("v1,{}", BASE64_STANDARD.encode(hmac(secret, &signed)));
        assert_eq!(self.headers["webhook-signature"], expected);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs();
        let at: u64 = timestamp.parse().expect("seconds");
        assert!(at <= now && now - at < 300, "{at} is no time of this test");
        assert_eq!(self.headers["content-type"], "application/json");
    }
}

/// RFC 2104, with SHA-256.
fn hmac(secret: &[u8], message: &[u8]) -> Vec<u8> {
    let mut key = [0u8; 64];
    assert!(secret.len() <= key.len(), "the tests' secrets are short");
    key[..secret.len()].copy_from_slice(secret);
    let inner = Sha256::digest([&key.map(|b| b ^ 0x36)[..], message].concat());
    Sha256::digest([&key.map(|b| b ^ 0x5c)[..], &inner[..]].concat()).to_vec()
}

/// A small server that keeps what it is told.
struct Receiver {
    address: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
    /// Answers to come, before `usual`.
    answers: Arc<Mutex<VecDeque<u16>>>,
    usual: Arc<AtomicU16>,
    ended: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Receiver {
    /// Redirects, where it is told to answer so, lead to `elsewhere`.
    fn start(elsewhere: &str) -> Receiver {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let received: Arc<Mutex<Vec<Received>>> = Arc::default();
        let answers: Arc<Mutex<VecDeque<u16>>> = Arc::default();
        let (usual, ended) = (Arc::new(AtomicU16::new(200)), Arc::new(AtomicBool::new(false)));
        let (received_, answers_, usual_, ended_) = (received.clone(), answers.clone(), usual.clone(), ended.clone());
        let elsewhere = elsewhere.to_owned();
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if ended_.load(Ordering::SeqCst) {
                    return;
                }
                let Some((stream, mut request)) = stream.ok().and_then(read) else { continue };
                request.status = match answers_.lock().expect("a lock").pop_front() {
                    Some(status) => status,
                    None => usual_.load(Ordering::SeqCst),
                };
                let status = request.status;
                received_.lock().expect("a lock").push(request);
                answer(stream, status, &elsewhere);
            }
        });
        Receiver { address, received, answers, usual, ended, thread: Some(thread) }
    }

    fn url(&self) -> String {
        format!("http://{}/hook/a?b=c", self.address)
    }

    fn received(&self) -> Vec<Received> {
        self.received.lock().expect("a lock").clone()
    }

    /// What it has taken, each once.
    fn taken(&self) -> Vec<Received> {
        let mut seen = HashSet::new();
        let taken = self.received().into_iter().filter(|request| (200..300).contains(&request.status));
        taken.filter(|request| seen.insert(request.id().to_owned())).collect()
    }

    /// Waits until it has taken the event of this kind and session.
    #[track_caller]
    fn wait_for(&self, session: &Session, kind: &str) {
        eventually(&format!("the webhook {kind}"), || {
            let taken = self.taken();
            taken.iter().any(|request| request.kind() == kind && request.json()["session_id"] == *session.id).then_some(())
        });
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // So that it looks.
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read(stream: TcpStream) -> Option<(TcpStream, Received)> {
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let headers: HashMap<String, String> = lines
        .iter()
        .skip(1)
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let mut body = vec![0; headers.get("content-length")?.parse().ok()?];
    reader.read_exact(&mut body).ok()?;
    Some((reader.into_inner(), Received { line: lines.first()?.clone(), headers, body, status: 0 }))
}

fn answer(mut stream: TcpStream, status: u16, elsewhere: &str) {
    let head = format!("HTTP/1.1 {status} Some\r\nlocation: {elsewhere}\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
    // Whoever asked may be gone.
    let _ = stream.write_all(head.as_bytes());
}

/// The events of a session that a usual webhook tells.
fn usual_events(session: &Session) -> Vec<Value> {
    session.events().into_iter().filter(|event| USUAL.iter().any(|kind| event["type"] == *kind)).collect()
}

/// What a webhook told of a session, as the interface would show it.
fn told(receiver: &Receiver, session: &Session) -> Vec<Value> {
    let all = receiver.taken().into_iter().map(|request| request.json());
    all.filter(|event| event["session_id"] == *session.id)
        .map(|mut event| {
            let about = event.as_object_mut().expect("an object").remove("session").expect("it tells of the session");
            assert_eq!(about["id"], *session.id);
            event
        })
        .collect()
}

/// Waits until everything of a session is told, and checks that it is that, in this order, and nothing else.
#[track_caller]
fn all_told(receiver: &Receiver, session: &Session) {
    let expected = usual_events(session);
    eventually("all is told", || (told(receiver, session).len() >= expected.len()).then_some(()));
    assert_eq!(told(receiver, session), expected);
}

#[test]
fn events_are_told_signed_and_in_order_while_another_webhook_is_stuck() {
    let receiver = Receiver::start("");
    // It takes connections, as far as the kernel does so by itself, and never answers.
    let stuck = TcpListener::bind("127.0.0.1:0").expect("a port");
    let stuck_at = stuck.local_addr().expect("an address");
    let dir = tempfile::tempdir().expect("a directory");
    let config = dir.path().join("server.toml");
    let text = format!(
        "[[webhook]]\nurl = \"http://{stuck_at}/\"\nsecret = \"x\"\nevents = [\"*\"]\n\n\
         [[webhook]]\nurl = \"{}\"\nsecret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\n",
        receiver.url()
    );
    std::fs::write(&config, text).expect("a file");
    let args = ["--config", config.to_str().expect("UTF-8")].map(str::to_owned).to_vec();
    let server = Server::with(Options { args, ..Options::default() });
    let session = server.session_with(&serde_json::json!({ "key": "told" }));
    session.hibernate();
    session.wake();
    session.delete();
    receiver.wait_for(&session, "session.deleted");
    all_told(&receiver, &session);

    let secret = BASE64_STANDARD.decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").expect("base64");
    let received = receiver.received();
    for request in &received {
        request.check(&secret);
        assert_eq!(request.line, "POST /hook/a?b=c HTTP/1.1");
    }
    assert_eq!(received[0].json()["session"]["key"], "told");
    assert_eq!(received[0].kind(), "session.created");
    let ids: HashSet<&str> = received.iter().map(Received::id).collect();
    assert_eq!(ids.len(), received.len(), "each has an id of its own, and none was sent twice");
    assert!(!server.log().contains("b=c"), "an address can hold a secret, and isn't logged");
    drop(stuck);
    server.delete_all_and_check();
}

#[test]
fn what_is_not_taken_is_sent_again_the_same_before_anything_else() {
    let elsewhere = Receiver::start("");
    let receiver = Receiver::start(&elsewhere.url());
    receiver.answers.lock().expect("a lock").extend([500, 302]);
    let args = ["--webhook", &receiver.url(), "--webhook-secret", "plain words"].map(str::to_owned).to_vec();
    let server = Server::with(Options { args, ..Options::default() });
    let session = server.session();
    session.delete();
    receiver.wait_for(&session, "session.deleted");
    let received = receiver.received();
    assert_eq!(received.iter().take(3).map(|request| request.status).collect::<Vec<_>>(), [500, 302, 200]);
    for request in &received {
        request.check(b"plain words");
    }
    for again in &received[1..3] {
        assert_eq!((again.id(), &again.body), (received[0].id(), &received[0].body));
    }
    assert_ne!(received[3].id(), received[0].id());
    all_told(&receiver, &session);
    assert_eq!(elsewhere.received().len(), 0, "a redirect isn't followed");
    server.delete_all_and_check();
}

#[test]
fn a_killed_server_tells_what_it_had_not_told_and_nothing_from_before_the_webhook() {
    let receiver = Receiver::start("");
    let mut server = Server::start();
    let before = server.session();
    before.delete();
    server.terminate();
    let url = receiver.url();
    server.set_args(&["--webhook", &url, "--webhook-secret", "s"]);
    server.start_again();

    receiver.usual.store(500, Ordering::SeqCst);
    let session = server.session();
    eventually("it is tried", || (!receiver.received().is_empty()).then_some(()));
    server.kill();
    let tried = receiver.received()[0].clone();
    assert_eq!(receiver.taken().len(), 0);
    receiver.usual.store(200, Ordering::SeqCst);
    server.start_again();
    let session = session.on(&server.client);
    session.delete();
    receiver.wait_for(&session, "session.deleted");
    all_told(&receiver, &session);
    let taken = receiver.taken();
    assert_eq!(taken[0].id(), tried.id(), "the same event has the same id in the next server");
    assert_eq!(told(&receiver, &before), Vec::<Value>::new(), "it begins where it was set up");

    // A server that was killed again goes on from its place: at most the last one comes twice.
    let so_far = receiver.received().len();
    let last = taken.last().expect("some were told").id().to_owned();
    server.crash();
    let next = server.session();
    receiver.wait_for(&next, "session.created");
    let since = &receiver.received()[so_far..];
    let old: Vec<&Received> = since.iter().filter(|request| request.json()["session_id"] != *next.id).collect();
    assert!(old.iter().all(|request| request.id() == last) && old.len() <= 1, "{old:?}");
    server.delete_all_and_check();
}
