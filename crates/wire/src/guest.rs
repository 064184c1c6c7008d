//! Supervisor and guest.
//!
//! ```text
//!  supervisor                              guest
//!     │ PREAMBLE, Hello ───────────────────► │   (boot, restore, thaw, after a quiesce)
//!     │ ◄──────────────── PREAMBLE, HelloReply   streams with their offsets, works, pending events
//!     │ Ready{acks} ───────────────────────► │   each side sends again from there
//!     │ ◄══════ Data, Ack, Event, Reply ═══► │
//!     │ Quiesce ───────────────────────────► │   before a capture
//!     │ ◄────────────────────────── Quiesced │   then silence until the next Hello
//! ```
//! When its channel breaks (end of file, EPIPE) the guest keeps everything unacknowledged, goes on
//! reading its standard input and waits for a preamble: a restore binds the channel anew.

use crate::{
    error::WireError,
    files::{FileReply, FileRequest},
    frame::StreamId,
    records::{ProcessRecord, Program, ServiceRecord, Stats, Unsaveable},
};
use model::{ExecId, Generation, Offset, ServiceName, ServiceSpec, SessionId, TerminalId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The protocol that this build speaks. Raised when a message changes so that the other side has
/// to know; each side goes by the lower of the two.
pub const PROTOCOL: u32 = 1;

/// Where the guest's program lies inside.
pub const GUEST_PATH: &str = "/usr/lib/dormouse/dormouse-guest";

/// Where the guest listens inside, on loopback, for HTTP and SOCKS clients: one port for both.
pub const PROXY_PORT: u16 = 7429;

/// First of the stream numbers that a guest gives to connections of its own; those that a supervisor chooses, and those of
/// services, are below.
pub const CONNECTION_STREAMS: u32 = 0xC000_0000;

/// Something that the guest started and answers for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    Exec(ExecId),
    Terminal(TerminalId),
    Service(ServiceName),
}

/// What a stream carries.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Stdin(Work),
    Stdout(Work),
    Stderr(Work),
    /// A file request's bytes: they end with their connection and are never resumed.
    Transfer,
    /// A network connection, one number for both directions. It goes on through a capture that its sandbox outlives, and
    /// ends with its generation.
    Connection,
}

/// Supervisor → guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum ToGuest {
    Hello(Hello),
    /// The supervisor has everything below these offsets; the guest sends from there.
    Ready {
        acks: Vec<StreamAt>,
    },
    /// Say `Quiesced` at a frame border, then nothing until the next Hello.
    Quiesce,
    /// Events up to this number are recorded and can be forgotten.
    AckEvents {
        seq: u64,
    },
    Request {
        id: u64,
        request: Request,
    },
    /// Where a connection that the guest asked for leads, `HOST:PORT`, once that is known.
    Connected {
        stream: StreamId,
        to: String,
    },
}

/// Guest → supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum FromGuest {
    HelloReply(HelloReply),
    Quiesced,
    Reply {
        id: u64,
        result: Result<Reply, WireError>,
    },
    /// A program inside wants to go out; the guest chooses the stream's number. Refused by a reset. Sent once, and never
    /// by a guest that was given no [`Network`].
    Dial {
        stream: StreamId,
        to: Dial,
    },
    /// Kept by the guest and sent again at each reconnection until acknowledged.
    Event {
        seq: u64,
        event: GuestEvent,
    },
    /// A message that a newer guest sends and this build doesn't know.
    #[serde(other)]
    Unknown,
}

/// What a program inside wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "d", rename_all = "snake_case")]
pub enum Dial {
    /// It speaks HTTP to a proxy, or SOCKS 5; its first byte says which.
    Proxy,
    /// It speaks to this port of a host, by name or address.
    To { host: String, port: u16 },
    /// It asks for a name. The stream gives a [`NameAnswer`] as JSON, then ends.
    Name { name: String },
}

/// What is said of a host's name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameAnswer {
    /// Whether the session may reach it at all. Nothing is resolved for that.
    pub allowed: bool,
    /// The ports on which programs may want to reach it.
    #[serde(default)]
    pub ports: Vec<u16>,
}

/// What the guest sets up so that programs reach the network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The certificate of the session's own authority as PEM, for the trust stores; `None`: TLS ends nowhere on the way.
    #[serde(default)]
    pub ca: Option<String>,
}

/// Opens a connection and tells the guest who it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    pub protocol: u32,
    /// `None` for a sandbox in the pool, which is nobody yet.
    #[serde(default)]
    pub session: Option<SessionId>,
    pub generation: Generation,
    #[serde(default)]
    pub identity: Option<Identity>,
    /// Where the output of services that this guest has not run yet goes on: their journals are older than it.
    #[serde(default)]
    pub service_offsets: BTreeMap<ServiceName, Offset>,
    /// With the Hello that ends a sleep: how long it was, where that is known.
    #[serde(default)]
    pub gap_ms: Option<u64>,
    /// Whoever sent the guest's input before is gone, with all of it that had not arrived: what the guest has of it is all
    /// there will be, and counts as acknowledged.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_input: bool,
}

/// What makes one session's inside differ from another's. Applied when it differs from what the
/// guest has applied last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub hostname: String,
    /// 32 hexadecimal digits, for `/etc/machine-id`.
    pub machine_id: String,
    /// 64 bytes of fresh randomness in hexadecimal, mixed into the guest's own generator.
    pub seed: String,
    /// Environment of everything started in the session.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Where execs start; made when missing.
    #[serde(default)]
    pub workdir: Option<String>,
    /// Services to keep running.
    #[serde(default)]
    pub services: Vec<ServiceSpec>,
    /// Most processes and threads inside.
    #[serde(default)]
    pub pids: Option<u64>,
    /// `None`: by a supervisor that knows no network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
}

/// A stream and a position in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamAt {
    pub stream: StreamId,
    pub offset: Offset,
}

/// What the guest holds when a connection begins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HelloReply {
    pub protocol: u32,
    pub guest_version: String,
    /// Made anew at each boot of the guest, kept through restores.
    pub boot_id: String,
    /// Streams that the guest sends.
    pub sending: Vec<SendingStream>,
    /// Streams that the guest receives, and how far it has come.
    pub receiving: Vec<ReceivingStream>,
    pub works: Vec<RunningWork>,
    /// Largest stream number ever used; new ones are above it.
    pub max_stream: u32,
    /// The connections that ended with the generation before.
    #[serde(default)]
    pub reset: ResetConnections,
}

/// Connections that were open when a session fell asleep, and have been reset.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetConnections {
    pub count: u64,
    /// Where they led to, each once, `HOST:PORT`, [`Self::MOST`] at most. Those that had come in are `port N`.
    #[serde(default)]
    pub to: Vec<String>,
}

impl ResetConnections {
    /// How many are named.
    pub const MOST: usize = 50;
}

/// A port on which a program inside listens.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ListeningPort {
    pub port: u16,
    /// The address it listens on; several: the widest.
    pub address: String,
    #[serde(default)]
    pub pid: Option<u32>,
    #[serde(default)]
    pub program: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendingStream {
    pub stream: StreamId,
    pub role: Role,
    /// First offset that the guest still has.
    pub from: Offset,
    /// Offset after its last byte so far.
    pub to: Offset,
    pub ended: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceivingStream {
    pub stream: StreamId,
    pub role: Role,
    pub received: Offset,
    /// Its end has arrived, too, and is kept. Only told where [`Hello::keep_input`] asked for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ended: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningWork {
    pub work: Work,
    pub pid: u32,
}

/// Size of a terminal in cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    pub cols: u16,
    pub rows: u16,
}

/// Starts a program. The supervisor chooses the streams' numbers, above all earlier ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spawn {
    pub work: Work,
    pub program: Program,
    /// With a PTY: `stdin` and `stdout` are its input and output, `stderr` isn't used.
    #[serde(default)]
    pub pty: Option<PtySize>,
    /// `None`: standard input is at its end from the start.
    #[serde(default)]
    pub stdin: Option<StreamId>,
    pub stdout: StreamId,
    #[serde(default)]
    pub stderr: Option<StreamId>,
    /// After this time awake the whole process tree is killed, with reason `timeout`.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
}

/// What the supervisor asks of a guest. An unknown one is answered with `Unsupported`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Answered at once; spawns nothing.
    Ping,
    Spawn(Spawn),
    /// To the whole process tree where `tree`, else to the work's own process (for a terminal: its
    /// foreground process group).
    Signal {
        work: Work,
        signal: i32,
        tree: bool,
    },
    Resize {
        terminal: TerminalId,
        size: PtySize,
    },
    /// A file request; its bytes travel on `stream` where it has any.
    File {
        stream: Option<StreamId>,
        request: FileRequest,
    },
    /// Changes the set of services: new ones start, missing ones stop.
    SetServices {
        services: Vec<ServiceSpec>,
        /// As [`Hello::service_offsets`].
        #[serde(default)]
        offsets: BTreeMap<ServiceName, Offset>,
    },
    /// `action`: start, stop, restart.
    Service {
        name: ServiceName,
        action: String,
    },
    Services,
    Stats,
    Processes,
    /// What can't be saved as things stand.
    Unsaveable,
    /// How busy the inside was during the last `window_ms` of awake time.
    Activity {
        window_ms: u64,
    },
    /// Something is about to happen to the session, for the programs that listen: `before_hibernate`, `before_stop`, or
    /// `timeout_near` with the `seconds` that are left.
    Moment {
        moment: String,
        #[serde(default)]
        seconds: Option<u64>,
    },
    /// Connects to a port inside; `stream` carries both directions once it is answered.
    Dial {
        stream: StreamId,
        port: u16,
    },
    /// The ports on which programs listen.
    Ports,
    /// Sets the network up anew.
    SetNetwork {
        network: Network,
    },
    /// Flushes what programs have written to the disk.
    Sync,
    /// Ends the largest work by memory; asked when the session's memory is at its limit.
    KillLargest {
        reason: String,
    },
    /// TERM to everything, KILL after `grace_ms`; answered when only the guest is left.
    Shutdown {
        grace_ms: u64,
    },
}

/// The answer to a [`Request`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "r", rename_all = "snake_case")]
pub enum Reply {
    Done,
    Pong,
    Spawned {
        pid: u32,
    },
    File {
        reply: FileReply,
    },
    Services {
        items: Vec<ServiceRecord>,
    },
    Stats {
        stats: Stats,
    },
    Processes {
        items: Vec<ProcessRecord>,
    },
    Unsaveable {
        items: Vec<Unsaveable>,
    },
    Activity {
        activity: GuestActivity,
    },
    Ports {
        items: Vec<ListeningPort>,
    },
    /// What was killed, if there was anything.
    Killed {
        work: Option<Work>,
    },
}

/// How busy the inside is. All times are awake time: what was slept through isn't counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestActivity {
    /// Mean CPU of all programs over `known_ms`, in percent of one core; the guest's own isn't counted.
    #[serde(default)]
    pub cpu_percent: f64,
    /// How much of the window that was asked for has been looked at. Looking begins anew with each wake.
    #[serde(default)]
    pub known_ms: u64,
    /// Since the last few seconds in which programs used more CPU than idle ones do; `None`: not since looking began.
    #[serde(default)]
    pub busy_ago_ms: Option<u64>,
    /// How long a program has asked for the session to be kept awake yet.
    #[serde(default)]
    pub keep_awake_ms: Option<u64>,
    #[serde(default)]
    pub waiting: Option<Waiting>,
}

/// What a program inside has said that it waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// A word; `person` for somebody's answer.
    #[serde(rename = "for")]
    pub for_: String,
    #[serde(default)]
    pub text: Option<String>,
}

/// What the guest tells unasked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "e", rename_all = "snake_case")]
pub enum GuestEvent {
    /// A work's own process has ended. `ends`: how far its streams had come when what was in
    /// its pipes had been read; children that hold them open may go on writing.
    Ended {
        work: Work,
        exit_code: Option<i32>,
        signal: Option<i32>,
        reason: Option<String>,
        ends: Vec<StreamAt>,
    },
    /// `stream`: the service's output, the same through all its starts; numbered by the guest.
    ServiceStarted {
        name: ServiceName,
        pid: u32,
        restarts: u64,
        #[serde(default)]
        stream: Option<StreamId>,
    },
    ServiceEnded {
        name: ServiceName,
        exit_code: Option<i32>,
        signal: Option<i32>,
        restart_in_ms: Option<u64>,
    },
    /// The set of things in the way of a capture has changed; empty when nothing is any more.
    Unsaveable {
        items: Vec<Unsaveable>,
    },
    /// A program has begun to listen.
    PortOpened {
        port: ListeningPort,
    },
    /// Nobody listens on a port any more.
    PortClosed {
        port: u16,
    },
    /// A program's own words for the session's history.
    Note {
        text: String,
    },
    /// A program asks for the session to be kept awake for so long from now; 0: no longer.
    KeepAwake {
        seconds: u64,
    },
    /// A program says what it waits for; `None`: for nothing any more.
    Waiting {
        #[serde(default, rename = "for")]
        for_: Option<String>,
        #[serde(default)]
        text: Option<String>,
    },
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_newer_guest_tells_is_an_event_that_can_be_acknowledged() {
        let newer = r#"{"t":"event","seq":4,"event":{"e":"levitated","height":{"m":3},"tags":["a"]}}"#;
        let message: FromGuest = serde_json::from_str(newer).unwrap();
        assert_eq!(message, FromGuest::Event { seq: 4, event: GuestEvent::Unknown });
    }

    #[test]
    fn an_older_supervisors_hello_says_nothing_of_a_gap() {
        let hello: Hello = serde_json::from_str(r#"{"protocol":1,"session":null,"generation":2}"#).unwrap();
        assert_eq!((hello.generation, hello.gap_ms), (Generation(2), None));
    }

    #[test]
    fn what_is_waited_for_is_called_for() {
        let event = GuestEvent::Waiting { for_: Some("person".into()), text: None };
        assert_eq!(serde_json::to_string(&event).unwrap(), r#"{"e":"waiting","for":"person","text":null}"#);
    }
}
