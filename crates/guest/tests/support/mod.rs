//! A small supervisor for tests: speaks the wire protocol with a guest over two pipes.

#![allow(dead_code, clippy::unwrap_used, reason = "shared by several test binaries; tests may panic")]

use bytes::{Bytes, BytesMut};
use model::{ExecId, Generation, Offset, TerminalId};
use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};
use wire::{
    Decoder, Frame, StreamId, WireError,
    files::{FileReply, FileRequest},
    frame::{MAX_DATA, PREAMBLE, parse_control},
    guest::{
        FromGuest, GuestEvent, Hello, HelloReply, Identity, PROTOCOL, PtySize, Reply, Request, Spawn, StreamAt, ToGuest, Work,
    },
    records::Program,
    window::{Arrival, arrive},
};

pub const PATIENCE: Duration = Duration::from_secs(30);

/// What has come on one stream.
#[derive(Debug, Default)]
pub struct Received {
    pub bytes: Vec<u8>,
    pub end: Option<Offset>,
    pub reset: Option<String>,
}

/// How a work ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub reason: Option<String>,
    pub ends: Vec<StreamAt>,
}

/// The supervisor's side of a channel.
pub struct Client {
    to: Option<File>,
    from: mpsc::Receiver<Vec<u8>>,
    decoder: Decoder,
    pub raw_bytes: u64,
    pub hello_reply: Option<HelloReply>,
    pub quiesced: bool,
    pub streams: HashMap<StreamId, Received>,
    pub replies: HashMap<u64, Result<Reply, WireError>>,
    pub events: BTreeMap<u64, GuestEvent>,
    pub acked_by_guest: HashMap<StreamId, Offset>,
    /// False: nothing is acknowledged.
    pub acks: bool,
    pub ack_events: bool,
    next_request: u64,
    next_stream: u32,
}

/// A guest that runs on this machine, as a program among others.
pub struct HostGuest {
    pub client: Client,
    child: Child,
}

impl HostGuest {
    pub fn start() -> Self {
        let mut child =
            Command::new(env!("CARGO_BIN_EXE_dormouse-guest")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let to = OwnedFd::from(child.stdin.take().unwrap());
        let from = OwnedFd::from(child.stdout.take().unwrap());
        let mut client = Client::over(to, from);
        client.hello(None);
        Self { client, child }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for HostGuest {
    fn drop(&mut self) {
        let id = self.client.send_request(Request::Shutdown { grace_ms: 0 });
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.client.replies.contains_key(&id) && Instant::now() < deadline {
            self.client.step(Duration::from_millis(50));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Client {
    pub fn over(to: OwnedFd, from: OwnedFd) -> Self {
        let mut client = Self {
            to: None,
            from: mpsc::channel().1,
            decoder: Decoder::new(),
            raw_bytes: 0,
            hello_reply: None,
            quiesced: false,
            streams: HashMap::new(),
            replies: HashMap::new(),
            events: BTreeMap::new(),
            acked_by_guest: HashMap::new(),
            acks: true,
            ack_events: true,
            next_request: 1,
            next_stream: 1,
        };
        client.rebind(to, from);
        client
    }

    /// A new pair of pipes, as after a restore.
    pub fn rebind(&mut self, to: OwnedFd, from: OwnedFd) {
        let (send, receive) = mpsc::sync_channel(4);
        let mut from = File::from(from);
        std::thread::spawn(move || {
            let mut buffer = vec![0; 256 * 1024];
            while let Ok(count) = from.read(&mut buffer) {
                if count == 0 || send.send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        self.to = Some(File::from(to));
        self.from = receive;
        self.decoder = Decoder::new();
    }

    /// Closes the supervisor's ends.
    pub fn hang_up(&mut self) {
        self.to = None;
        self.from = mpsc::channel().1;
    }

    pub fn send(&mut self, frames: &[Frame]) {
        let mut bytes = BytesMut::new();
        frames.iter().for_each(|f| f.encode(&mut bytes));
        self.send_bytes(&bytes);
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.to.as_mut().unwrap().write_all(bytes).unwrap();
    }

    fn message(&mut self, message: &ToGuest) {
        let frame = Frame::control(message).unwrap();
        self.send(&[frame]);
    }

    /// Shakes hands; everything on the streams that were known goes on where it was.
    pub fn hello(&mut self, identity: Option<Identity>) -> HelloReply {
        self.decoder.reset();
        self.hello_reply = None;
        self.quiesced = false;
        let hello = ToGuest::Hello(Hello {
            protocol: PROTOCOL,
            session: None,
            generation: Generation::FIRST,
            identity,
            service_offsets: Default::default(),
            keep_input: false,
            gap_ms: None,
        });
        let mut bytes = BytesMut::from(&PREAMBLE[..]);
        Frame::control(&hello).unwrap().encode(&mut bytes);
        let deadline = Instant::now() + PATIENCE;
        while self.hello_reply.is_none() {
            assert!(Instant::now() < deadline, "waited in vain for the answer to a Hello");
            // A guest that waits for the rest of a torn frame takes the next Hello, which stands at the front of a read.
            self.send_bytes(&bytes);
            let patience = Instant::now() + Duration::from_secs(1);
            while self.hello_reply.is_none() && Instant::now() < patience {
                self.step(Duration::from_millis(100));
            }
        }
        let reply = self.hello_reply.clone().unwrap();
        let acks = reply
            .sending
            .iter()
            .map(|s| StreamAt {
                stream: s.stream,
                offset: Offset(self.streams.get(&s.stream).map_or(0, |r| r.bytes.len() as u64)),
            })
            .collect();
        self.message(&ToGuest::Ready { acks });
        reply
    }

    /// Handles what comes within `wait`; false when nothing did.
    pub fn step(&mut self, wait: Duration) -> bool {
        let Ok(bytes) = self.from.recv_timeout(wait) else { return false };
        self.raw_bytes += bytes.len() as u64;
        self.decoder.push(&bytes);
        let mut acks = BTreeMap::new();
        let mut seq = None;
        while let Some(frame) = self.decoder.next_frame().unwrap() {
            match frame {
                Frame::Control(json) => match parse_control::<FromGuest>(&json).unwrap() {
                    FromGuest::HelloReply(reply) => self.hello_reply = Some(reply),
                    FromGuest::Quiesced => self.quiesced = true,
                    FromGuest::Reply { id, result } => assert!(self.replies.insert(id, result).is_none(), "two answers to {id}"),
                    FromGuest::Event { seq: at, event } => {
                        if let Some(old) = self.events.insert(at, event.clone()) {
                            assert_eq!(old, event, "an event changed");
                        }
                        seq = Some(at);
                    }
                    FromGuest::Dial { .. } | FromGuest::Unknown => panic!("unknown message {json:?}"),
                },
                Frame::Data { stream, offset, bytes } => {
                    let received = self.streams.entry(stream).or_default();
                    match arrive(Offset(received.bytes.len() as u64), offset, bytes).unwrap() {
                        Arrival::Append(bytes) => received.bytes.extend_from_slice(&bytes),
                        Arrival::Duplicate => panic!("bytes came twice"),
                    }
                    acks.insert(stream, received.bytes.len());
                }
                Frame::End { stream, offset } => {
                    let received = self.streams.entry(stream).or_default();
                    assert_eq!(offset.0, received.bytes.len() as u64, "the end doesn't follow the bytes");
                    received.end = Some(offset);
                }
                Frame::Ack { stream, offset } => drop(self.acked_by_guest.insert(stream, offset)),
                Frame::Reset { stream, reason } => self.streams.entry(stream).or_default().reset = Some(reason),
            }
        }
        if self.acks && !acks.is_empty() {
            let frames: Vec<Frame> =
                acks.into_iter().map(|(stream, end)| Frame::Ack { stream, offset: Offset(end as u64) }).collect();
            self.send(&frames);
        }
        if let Some(seq) = seq
            && self.ack_events
        {
            self.message(&ToGuest::AckEvents { seq });
        }
        true
    }

    pub fn until(&mut self, what: &str, done: impl Fn(&Client) -> bool) {
        self.until_within(PATIENCE, what, done);
    }

    pub fn until_within(&mut self, patience: Duration, what: &str, done: impl Fn(&Client) -> bool) {
        let deadline = Instant::now() + patience;
        while !done(self) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "waited in vain for {what}");
            self.step(left.min(Duration::from_millis(100)));
        }
    }

    pub fn send_request(&mut self, request: Request) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        self.message(&ToGuest::Request { id, request });
        id
    }

    pub fn request(&mut self, request: Request) -> Result<Reply, WireError> {
        let what = format!("the answer to {request:?}");
        let id = self.send_request(request);
        self.until(&what, |c| c.replies.contains_key(&id));
        self.replies.remove(&id).unwrap()
    }

    pub fn stream(&mut self) -> StreamId {
        self.next_stream += 1;
        StreamId(self.next_stream - 1)
    }

    pub fn exec(&mut self, argv: &[&str]) -> Exec {
        self.try_exec(program(argv), false, None).unwrap()
    }

    pub fn try_exec(&mut self, program: Program, stdin: bool, timeout_ms: Option<u64>) -> Result<Exec, WireError> {
        let work = Work::Exec(ExecId::new());
        let stdin = stdin.then(|| self.stream());
        let (stdout, stderr) = (self.stream(), self.stream());
        let spawn = Spawn { work: work.clone(), program, pty: None, stdin, stdout, stderr: Some(stderr), timeout_ms };
        match self.request(Request::Spawn(spawn))? {
            Reply::Spawned { pid } => Ok(Exec { work, pid, stdin, stdout, stderr }),
            other => panic!("{other:?}"),
        }
    }

    pub fn terminal(&mut self, argv: &[&str], cols: u16, rows: u16) -> (TerminalId, Exec) {
        let id = TerminalId::new();
        let work = Work::Terminal(id);
        let (stdin, stdout) = (Some(self.stream()), self.stream());
        let pty = Some(PtySize { cols, rows });
        let spawn = Spawn { work: work.clone(), program: program(argv), pty, stdin, stdout, stderr: None, timeout_ms: None };
        match self.request(Request::Spawn(spawn)).unwrap() {
            Reply::Spawned { pid } => (id, Exec { work, pid, stdin, stdout, stderr: stdout }),
            other => panic!("{other:?}"),
        }
    }

    pub fn ended(&self, work: &Work) -> Option<Ended> {
        self.events.values().find_map(|event| match event {
            GuestEvent::Ended { work: w, exit_code, signal, reason, ends } if w == work => {
                Some(Ended { exit_code: *exit_code, signal: *signal, reason: reason.clone(), ends: ends.clone() })
            }
            _ => None,
        })
    }

    /// Waits until the work has ended and everything up to its ends is here.
    pub fn wait(&mut self, exec: &Exec) -> Ended {
        self.until("an end", |c| {
            c.ended(&exec.work).is_some_and(|e| e.ends.iter().all(|at| c.bytes(at.stream).len() as u64 >= at.offset.0))
        });
        self.ended(&exec.work).unwrap()
    }

    pub fn bytes(&self, stream: StreamId) -> &[u8] {
        self.streams.get(&stream).map_or(&[], |r| &r.bytes)
    }

    pub fn text(&self, stream: StreamId) -> String {
        String::from_utf8_lossy(self.bytes(stream)).into_owned()
    }

    /// Sends bytes on a stream from `offset`, as fast as the guest's window allows.
    pub fn feed(&mut self, stream: StreamId, offset: u64, bytes: &[u8], end: bool) {
        let mut at = 0;
        while at < bytes.len() {
            let acked = self.acked_by_guest.get(&stream).map_or(0, |o| o.0);
            if offset + at as u64 - acked.min(offset + at as u64) >= wire::window::WINDOW as u64 - MAX_DATA as u64 {
                if self.streams.get(&stream).is_some_and(|s| s.reset.is_some()) {
                    return;
                }
                self.step(Duration::from_millis(100));
                continue;
            }
            let take = (bytes.len() - at).min(MAX_DATA);
            let piece = Bytes::copy_from_slice(&bytes[at..at + take]);
            self.send(&[Frame::Data { stream, offset: Offset(offset + at as u64), bytes: piece }]);
            at += take;
        }
        if end {
            self.send(&[Frame::End { stream, offset: Offset(offset + bytes.len() as u64) }]);
        }
    }

    pub fn quiesce(&mut self) {
        self.message(&ToGuest::Quiesce);
        self.until("Quiesced", |c| c.quiesced);
    }

    pub fn file(&mut self, request: FileRequest) -> Result<FileReply, WireError> {
        match self.request(Request::File { stream: None, request })? {
            Reply::File { reply } => Ok(reply),
            other => panic!("{other:?}"),
        }
    }

    pub fn download(&mut self, request: FileRequest) -> Result<Vec<u8>, WireError> {
        let stream = self.stream();
        self.request(Request::File { stream: Some(stream), request })?;
        self.until("the end of a download", |c| c.streams.get(&stream).is_some_and(|s| s.end.is_some() || s.reset.is_some()));
        let received = self.streams.remove(&stream).unwrap();
        match received.reset {
            None => Ok(received.bytes),
            Some(reason) => Err(WireError::new(wire::Code::Internal, reason)),
        }
    }

    pub fn upload(&mut self, request: FileRequest, bytes: &[u8]) -> Result<FileReply, WireError> {
        let stream = self.stream();
        let id = self.send_request(Request::File { stream: Some(stream), request });
        self.feed(stream, 0, bytes, true);
        self.until("the answer to an upload", |c| c.replies.contains_key(&id));
        match self.replies.remove(&id).unwrap()? {
            Reply::File { reply } => Ok(reply),
            other => panic!("{other:?}"),
        }
    }
}

/// A program that was started.
#[derive(Debug, Clone)]
pub struct Exec {
    pub work: Work,
    pub pid: u32,
    pub stdin: Option<StreamId>,
    pub stdout: StreamId,
    pub stderr: StreamId,
}

pub fn program(argv: &[&str]) -> Program {
    Program { argv: argv.iter().map(|a| (*a).to_owned()).collect(), ..Program::default() }
}

pub fn sh(script: &str) -> Program {
    program(&["/bin/sh", "-c", script])
}

pub fn identity(hostname: &str) -> Identity {
    Identity {
        hostname: hostname.into(),
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        seed: "ab".repeat(64),
        env: BTreeMap::new(),
        workdir: None,
        services: vec![],
        pids: None,
        network: None,
    }
}

/// A directory that is gone after the test.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("dormouse-guest-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
