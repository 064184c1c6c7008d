//! Server and supervisor.
//!
//! The supervisor listens on a Unix socket. A connection carries the preamble, then requests one
//! after the other: a control frame with a [`Request`], a control frame with the answer, and where
//! the request says so a stream of Data frames ended by End (stream number 0 throughout). Closing
//! the connection cancels what only that connection waits for, and never what was started.
//!
//! Output isn't sent over it: journals are files, which the server reads itself. It only asks to be
//! told when they grow ([`Request::Watch`]).

use crate::{
    error::WireError,
    files::{FileReply, FileRequest},
    layout::{JournalName, TakesOver},
    records::{Activity, ExecRecord, ProcessRecord, Program, ServiceRecord, Stats, TerminalRecord, Unsaveable},
};
use model::{EndReason, ExecId, Generation, LayerId, Offset, Resources, ServiceName, ServiceSpec, SessionId, TerminalId};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

/// What a supervisor is started with: `dormouse supervise --spec FILE`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SuperviseSpec {
    /// The session's directory; `SessionLayout` says what lies where.
    pub dir: PathBuf,
    /// `None`: a sandbox for the pool, which [`Request::Claim`] makes a session's.
    pub session: Option<SessionId>,
    pub generation: Generation,
    pub start: Start,
    /// Lower layers of the disk, top-most first: guest layer, template.
    pub lower: Vec<PathBuf>,
    pub runtime: RuntimeSpec,
    #[serde(default)]
    pub resources: Resources,
    /// How much of the latest output of each journal is kept; the journal's own default where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_output_bytes: Option<model::ByteSize>,
    #[serde(default)]
    pub identity: Option<crate::guest::Identity>,
    /// What an image made by this sandbox needs to be loaded again.
    pub pins: Pins,
    /// With [`Start::Restore`]: how long the session slept; programs inside are told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap_ms: Option<u64>,
    /// What the session may reach; `None`: nothing, until somebody says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSpec>,
}

/// The way out of a session, without any secret: this lies in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSpec {
    pub policy: model::network::Policy,
    /// The server's own listeners, which no session reaches.
    #[serde(default)]
    pub closed: Vec<std::net::SocketAddr>,
    /// Certificates of authorities that upstream servers may be known by, beside the system's.
    #[serde(default)]
    pub roots: Option<PathBuf>,
}

/// What is added to requests at the edge. Lives in memory only.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    pub secrets: BTreeMap<model::network::SecretName, String>,
    /// What the session's own authority is made from, where TLS ends at the edge.
    #[serde(default)]
    pub ca: Option<CaSeed>,
    /// A fork that was given none of its parent's secrets.
    pub withheld: bool,
}

/// From what a session's own certificate authority is made, always the same from the same.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaSeed {
    /// 32 bytes in hexadecimal.
    pub seed: String,
    /// A part of its name that people see: the session's id.
    pub label: String,
    /// When its certificate begins to be valid.
    pub from: model::Timestamp,
}

impl CaSeed {
    /// The seed itself; `None` where it isn't 32 bytes in hexadecimal.
    pub fn bytes(&self) -> Option<[u8; 32]> {
        let digits = self.seed.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let mut bytes = [0; 32];
        for (n, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&self.seed[2 * n..2 * n + 2], 16).ok()?;
        }
        Some(bytes)
    }
}

impl std::fmt::Debug for CaSeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CaSeed").field("label", &self.label).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.secrets.keys().collect();
        f.debug_struct("Credentials").field("secrets", &names).field("withheld", &self.withheld).finish_non_exhaustive()
    }
}

/// How the sandbox comes to life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    Boot,
    /// From the memory image in this directory.
    Restore {
        image: PathBuf,
    },
    /// From a sandbox whose supervisor has died: it is captured, ended and restored, with a channel of its own.
    Recapture {
        /// Its memory goes by way of the image of that generation. Where the sandbox is gone and a whole image lies there
        /// that nothing has run on from, it goes on from that.
        from: TakesOver,
        /// It was paused, and is paused again.
        #[serde(default)]
        paused: bool,
        /// What runs in it, as the store knows.
        #[serde(default)]
        execs: Vec<ExecRecord>,
        #[serde(default)]
        terminals: Vec<TerminalRecord>,
    },
}

/// The runtime's program and settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeSpec {
    /// Path of the pinned `runsc`.
    pub runsc: PathBuf,
    /// Its state directory, shared by a server's sandboxes.
    pub state_dir: PathBuf,
    /// `systrap` or `ptrace`.
    pub platform: String,
}

/// Content hashes of what a memory image depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins {
    pub template: String,
    pub guest: String,
    pub runsc: String,
    #[serde(default)]
    pub runsc_version: String,
}

/// Stream number of a piece of a terminal message whose rest follows; the last or only piece has
/// number 0.
pub const MORE_FOLLOWS: crate::StreamId = crate::StreamId(1);

/// Longest terminal message that is put together from pieces.
pub const MAX_TERMINAL_MESSAGE: usize = 64 * 1024 * 1024;

/// Server → supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Answered at once, whatever the guest does.
    Status,
    /// The same, once no step (a capture, a pause, a thaw …) is under way: what is answered stays so until somebody asks
    /// for another. A start isn't waited for.
    Settled,
    /// Answered when the sandbox runs and its guest has answered, or has failed to start.
    AwaitReady,
    /// Answered when the guest has answered.
    Probe,
    /// Turns a pooled sandbox into a session's. Its directory already has the session's name.
    Claim {
        session: SessionId,
        identity: crate::guest::Identity,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        network: Option<NetworkSpec>,
    },
    /// Changes what the session may reach, and with which credentials; connections that are denied now are cut.
    SetNetwork {
        network: NetworkSpec,
        credentials: Credentials,
        /// What the guest shall set up.
        inside: crate::guest::Network,
    },
    /// What is open and what has gone over the network. Answers [`Answer::Network`].
    Network,
    /// The ports on which programs inside listen.
    Ports,
    /// Connects to a port inside. Answers [`Answer::Streaming`]; from there on the connection is that one's: Data frames in
    /// both directions, each ended by End, or cut off by Reset.
    Dial {
        port: u16,
    },

    StartExec {
        exec: ExecStart,
        wait: bool,
    },
    GetExec {
        id: ExecId,
    },
    ListExecs,
    /// Answered when the exec has ended.
    AwaitExec {
        id: ExecId,
    },
    SignalExec {
        id: ExecId,
        signal: i32,
    },
    /// Followed by Data frames and End. Answered when the guest has it all. `eof`: nothing more will
    /// ever come, the program sees the end of its input.
    ExecStdin {
        id: ExecId,
        eof: bool,
    },

    OpenTerminal {
        terminal: TerminalStart,
    },
    ListTerminals,
    GetTerminal {
        id: TerminalId,
    },
    CloseTerminal {
        id: TerminalId,
    },
    Screen {
        id: TerminalId,
    },
    /// Turns the connection into a terminal's: from here on Data frames in both directions, each
    /// holding one message of the terminal protocol. A message longer than a frame goes in several:
    /// all but the last on stream [`MORE_FOLLOWS`].
    Attach(Attach),

    /// Pushes [`Answer::Tail`] at once, at every growth, and at the end; until the connection
    /// closes.
    Watch {
        journal: JournalName,
    },

    /// Followed by the stream of bytes that the request takes or gives. Where it takes bytes, they are
    /// sent once [`Answer::Streaming`] has come, and the answer proper follows their end.
    File {
        request: FileRequest,
        #[serde(default)]
        actor: Option<String>,
    },

    Services,
    SetServices {
        services: Vec<ServiceSpec>,
    },
    Service {
        name: ServiceName,
        action: String,
    },
    Stats,
    Processes,
    Unsaveable,
    /// What goes on in the session, and since when nothing does. `window_ms`: over which to take the mean of the CPU.
    Activity {
        window_ms: u64,
    },
    /// Tells programs inside that listen what is about to happen: [`crate::guest::Request::Moment`]. Also answered where
    /// nobody can be told.
    Moment {
        moment: String,
        #[serde(default)]
        seconds: Option<u64>,
    },

    /// Frozen in place. Repeating it is no error.
    Pause,
    Unpause,
    /// First half of a hibernate: memory and disk to storage, the sandbox stays paused. Answers
    /// [`Answer::Captured`].
    Capture {
        image: PathBuf,
    },
    /// Second half: the store says `hibernated`. The sandbox is frozen, its image confirmed where
    /// `confirm`, then both it and the supervisor end.
    CommitHibernate {
        confirm: bool,
    },
    /// The other second half: go on as if nothing had been. Also answers when nothing was captured.
    AbortHibernate,
    /// Keeps the session as it is at one moment, and lets it go on. Answers [`Answer::Snapshotted`].
    Snapshot {
        snapshot: SnapshotStart,
    },
    /// A wake within the grace period.
    Thaw {
        generation: Generation,
        /// How long the session slept; programs inside are told.
        #[serde(default)]
        gap_ms: Option<u64>,
    },
    /// Ends the sandbox and the supervisor; programs get TERM and `grace_ms` first.
    Shutdown {
        reason: EndReason,
        grace_ms: u64,
    },
}

/// A new exec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecStart {
    pub id: ExecId,
    #[serde(default)]
    pub key: Option<String>,
    pub program: Program,
    /// Bytes for standard input, given at once; with `stdin_open` more can follow.
    #[serde(default)]
    pub stdin: Option<Vec<u8>>,
    #[serde(default)]
    pub stdin_open: bool,
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    #[serde(default)]
    pub actor: Option<String>,
    /// The hook that this is; hooks aren't activity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hook: Option<String>,
}

/// A snapshot to be taken of a sandbox that lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotStart {
    /// Where disk layers are kept.
    pub layers: PathBuf,
    /// The layer to be made.
    pub layer: LayerId,
    /// The session's latest layer: what has not changed since is shared with it.
    #[serde(default)]
    pub previous: Option<LayerId>,
    /// Where the rest goes, laid out as a session's directory: the image of the present generation, and the journals of
    /// what runs.
    pub dir: PathBuf,
    /// With the memory.
    pub memory: bool,
}

/// A new terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalStart {
    pub id: TerminalId,
    #[serde(default)]
    pub name: Option<String>,
    pub program: Program,
    pub cols: u16,
    pub rows: u16,
    #[serde(default)]
    pub actor: Option<String>,
}

/// Joining a terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    pub id: TerminalId,
    /// The client's own id; input sequences count per terminal and client.
    pub client: String,
    #[serde(default)]
    pub cols: Option<u16>,
    #[serde(default)]
    pub rows: Option<u16>,
    /// `None`: the screen first. Else bytes from this offset.
    #[serde(default)]
    pub from: Option<Offset>,
    /// `write`, `observe` or `take`.
    pub mode: String,
    #[serde(default)]
    pub actor: Option<String>,
}

/// A supervisor's answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "r", rename_all = "snake_case")]
pub enum Answer {
    Done,
    Status(Status),
    Exec {
        exec: ExecRecord,
    },
    Execs {
        items: Vec<ExecRecord>,
    },
    Terminal {
        terminal: TerminalRecord,
    },
    Terminals {
        items: Vec<TerminalRecord>,
    },
    Screen(ScreenAnswer),
    Tail {
        tail: Offset,
        ended: bool,
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
        activity: Activity,
    },
    Ports {
        items: Vec<crate::guest::ListeningPort>,
    },
    Network {
        open: Vec<OpenConnection>,
        /// How many there are where not all are listed.
        count: u64,
    },
    Captured(Captured),
    Snapshotted(Box<Snapshotted>),
    /// The request's stream of bytes follows.
    Streaming,
    Error {
        error: WireError,
    },
}

/// A connection to the outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenConnection {
    /// `HOST:PORT`.
    pub to: String,
    pub age_ms: u64,
    pub sent_bytes: u64,
    pub received_bytes: u64,
    /// Since the last bytes went out to which no answer has come.
    #[serde(default)]
    pub awaits_ms: Option<u64>,
}

/// How a supervisor and its sandbox stand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub session: Option<SessionId>,
    pub generation: Generation,
    pub phase: Phase,
    pub supervisor_version: String,
    #[serde(default)]
    pub guest_version: Option<String>,
    pub pid: u32,
    /// Words for people: what it waits for, what failed.
    #[serde(default)]
    pub detail: BTreeMap<String, String>,
    /// The connections that were reset when this generation began.
    #[serde(default)]
    pub reset: crate::guest::ResetConnections,
}

/// Where a supervisor stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Starting,
    Running,
    Paused,
    /// Captured, and waits to be told whether the store knows.
    Captured,
    /// The store says hibernated; frozen until the image is confirmed.
    Confirming,
    Ended,
}

/// A terminal's screen in every form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScreenAnswer {
    /// The offset it is true for.
    pub offset: Offset,
    pub text: String,
    pub ansi: String,
    pub json: serde_json::Value,
}

/// A capture that is on storage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Captured {
    pub generation: Generation,
    pub memory_bytes: u64,
    pub image_bytes: u64,
}

/// A snapshot that is on storage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshotted {
    pub generation: Generation,
    /// How long nothing ran.
    pub paused_ms: u64,
    /// Zero without memory.
    pub memory_bytes: u64,
    pub image_bytes: u64,
    /// What the layer takes, and how much of that no other layer has.
    pub disk_bytes: u64,
    pub own_bytes: u64,
    /// What ran.
    #[serde(default)]
    pub execs: Vec<ExecRecord>,
    #[serde(default)]
    pub terminals: Vec<TerminalRecord>,
}
