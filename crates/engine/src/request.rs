//! What callers ask of the engine and what they are answered.

use crate::{Error, Webhook};
use bytes::Bytes;
use futures_util::Stream;
use model::{
    Actor, ByteSize, ExecId, Hooks, IdlePolicy, Key, Offset, OnTimeout, Resources, Runtime, ServiceSpec, SessionId, SnapshotId,
    SnapshotName, Timestamp, TokenId, TokenLimits, network::Policy,
};
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, pin::Pin, sync::Arc, time::Duration};
use store::{HostTotals, OperationRow, RequestId, SessionRow};
use wire::{files::FileReply, records::Program};

/// Bytes that come one piece after the other.
pub type ByteStream = Pin<Box<dyn Stream<Item = std::io::Result<Bytes>> + Send>>;

/// What an engine is opened with.
#[derive(Debug, Clone)]
pub struct Config {
    /// Holds the sessions' directories; exists, and is locked by the caller.
    pub data_dir: PathBuf,
    /// Can be shared by several servers.
    pub templates_dir: PathBuf,
    /// The `runsc` to take a private copy of.
    pub runsc: PathBuf,
    /// `systrap` or `ptrace`.
    pub platform: String,
    /// The program that is started as `PROGRAM supervise --spec FILE --ready-fd N`.
    pub supervisor: PathBuf,
    /// The guest's program.
    pub guest: &'static [u8],
    /// How many booted sandboxes wait for sessions.
    pub pool_size: usize,
    /// The template of sessions that name none.
    pub default_template: String,
    /// Whether a memory image is tried out before the sandbox it was taken of is dropped.
    pub confirm: bool,
    /// How much of the latest output of each exec, terminal and service is kept; 1 GiB where missing.
    pub keep_output: Option<ByteSize>,
    /// Other servers that are told of events.
    pub webhooks: Vec<Webhook>,
    pub object_store: ObjectStore,
    /// What has slept for so long is packed into the object store, and snapshots of this age.
    pub pack_after: Duration,
    /// How many bytes of files may lie beside the sessions of what the object store has, too.
    pub cache_bytes: u64,
    /// The server's own listeners, which no session reaches. Without an address of their own: that port on each.
    pub closed: Vec<SocketAddr>,
    /// Certificates of authorities that sessions' upstream servers may be known by, beside the system's.
    pub egress_roots: Option<PathBuf>,
    /// The key of secrets; one in the data directory where missing.
    pub secrets_key: Option<blob::KeySource>,
    /// Secrets that the key doesn't open are removed.
    pub forget_secrets: bool,
}

/// Where what sleeps is packed.
#[derive(Debug, Clone)]
pub struct ObjectStore {
    pub location: blob::Location,
    /// With it everything is encrypted.
    pub key: Option<blob::KeySource>,
    /// Takes the store from another server, which is gone for good.
    pub take_over: bool,
}

impl ObjectStore {
    /// A folder of this machine, without encryption.
    pub fn folder(path: impl Into<PathBuf>) -> ObjectStore {
        ObjectStore { location: blob::Location::Folder(path.into()), key: None, take_over: false }
    }
}

/// How far a token reaches. `Write` includes `Read`, `Admin` includes all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    Read,
    Write,
    Host,
    Admin,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Scope; 4] = [Scope::Read, Scope::Write, Scope::Host, Scope::Admin];

    /// The word in the API and in the store.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Write => "write",
            Scope::Host => "host",
            Scope::Admin => "admin",
        }
    }
}

impl std::str::FromStr for Scope {
    type Err = String;
    fn from_str(text: &str) -> Result<Scope, String> {
        let known = Scope::ALL.into_iter().find(|scope| scope.as_str() == text);
        known.ok_or_else(|| format!("'{text}' is not one of: read, write, host, admin"))
    }
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// As events name it.
    pub actor: Actor,
    /// The token it came with.
    pub token: Option<TokenId>,
    pub scopes: Vec<Scope>,
    /// The only sessions it reaches; `None`: all.
    pub sessions: Option<Vec<SessionId>>,
    /// True for a peer on the server's Unix socket.
    pub local: bool,
    /// The idempotent request this is part of: what it makes is marked with it.
    pub request: Option<RequestId>,
}

impl Caller {
    /// Dormouse itself, which may do everything.
    pub fn system() -> Caller {
        Caller { actor: Actor::system(), token: None, scopes: vec![Scope::Admin], sessions: None, local: true, request: None }
    }

    /// True where its scopes include `scope`.
    pub fn has(&self, scope: Scope) -> bool {
        self.scopes.iter().any(|held| *held == scope || *held == Scope::Admin || (*held == Scope::Write && scope == Scope::Read))
    }

    /// True where it reaches the session.
    pub fn reaches(&self, session: SessionId) -> bool {
        self.sessions.as_ref().is_none_or(|ids| ids.contains(&session))
    }
}

/// Where a session's first files come from.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A git repository's address, a branch, tag or commit, and how many commits of history.
    Git {
        url: String,
        #[serde(default)]
        reference: Option<String>,
        #[serde(default)]
        depth: Option<u32>,
    },
    /// A tar archive's address; it may be gzipped.
    Tar { url: String },
}

/// A session to be created, or found by its key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NewSession {
    pub key: Option<Key>,
    /// Make a new one where the key leads to one that has failed or expired.
    pub replace: bool,
    pub name: Option<String>,
    pub task: Option<String>,
    pub parent_task: Option<String>,
    /// A name or a hash; the server's default where missing.
    pub template: Option<String>,
    pub runtime: Option<Runtime>,
    pub env: BTreeMap<String, String>,
    pub workdir: Option<String>,
    pub metadata: BTreeMap<String, String>,
    pub source: Option<Source>,
    pub resources: Option<Resources>,
    pub idle: Option<IdlePolicy>,
    pub timeout_seconds: Option<u64>,
    pub on_timeout: Option<OnTimeout>,
    pub ttl_seconds: Option<u64>,
    pub ephemeral: bool,
    /// What it begins with, in place of a template and a source.
    pub snapshot_id: Option<SnapshotId>,
    /// The snapshot's memory is left alone: the session boots afresh on its disk.
    pub disk_only: bool,
    pub services: Vec<ServiceSpec>,
    pub hooks: Hooks,
    /// What its programs may reach; what it is made from says so where missing, else everything.
    pub network: Option<Policy>,
    /// With the policy of what it is made from the secrets go along that this names.
    pub secrets: bool,
}

/// A session and what is under way in it.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionView {
    pub row: Arc<SessionRow>,
    pub operation: Option<Arc<OperationRow>>,
    /// When idleness puts it to sleep if nothing happens until then, as last measured.
    pub hibernate_after: Option<Timestamp>,
}

impl SessionView {
    pub(crate) fn new(row: Arc<SessionRow>, operation: Option<Arc<OperationRow>>) -> SessionView {
        SessionView { row, operation, hibernate_after: None }
    }

    /// State and reason in one plain sentence.
    pub fn sentence(&self) -> String {
        crate::policy::sentence(&self.row)
    }

    /// The session's id.
    pub fn id(&self) -> SessionId {
        self.row.id
    }
}

/// How a create ended.
#[derive(Debug, Clone, PartialEq)]
pub enum CreateOutcome {
    New,
    /// The key led to this session; these fields of the request differ and were not applied.
    Existing {
        ignored: Vec<String>,
    },
    /// A new session stands in for one that had ended.
    Replaced {
        session: SessionId,
        reason: String,
    },
}

/// The answer to a create.
#[derive(Debug, Clone, PartialEq)]
pub struct Created {
    pub view: SessionView,
    pub outcome: CreateOutcome,
}

/// A change of what a client may change. `None` leaves alone, `Some(None)` clears.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SessionPatch {
    pub name: Option<Option<String>>,
    pub task: Option<Option<String>>,
    /// Merged: `None` removes a name.
    pub metadata: Option<BTreeMap<String, Option<String>>>,
    pub idle: Option<Option<IdlePolicy>>,
    pub timeout_seconds: Option<Option<u64>>,
    pub on_timeout: Option<OnTimeout>,
    pub ttl_seconds: Option<Option<u64>>,
    pub wake_at: Option<Option<Timestamp>>,
    /// Replaces the list; a running session's programs change at once.
    pub services: Option<Vec<ServiceSpec>>,
    /// Replaces the policy, in force when it is answered. Secrets that a fork wasn't given are given with it.
    pub network: Option<Policy>,
}

/// A lifecycle change that a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    Hibernate {
        /// When to wake by itself.
        until: Option<Timestamp>,
    },
    Wake,
    Pause,
    Unpause,
    Stop,
    Start,
    /// A start that gives up a saved memory first.
    StartDiskOnly,
}

/// The answer to a [`Transition`].
#[derive(Debug, Clone, PartialEq)]
pub struct Transitioned {
    pub view: SessionView,
    /// The operation that does it or did it; `None` where it was so already.
    pub operation: Option<OperationRow>,
}

/// How a session is imported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// Under an id of its own, where the session may be here already.
    pub new_id: bool,
    /// Without its memory.
    pub disk_only: bool,
    /// Its memory may bring its own `runsc`, which runs outside of any sandbox.
    pub trust_runtime: bool,
}

/// A snapshot to be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSnapshot {
    /// Chosen ahead, so that whoever waits can look it up.
    pub id: SnapshotId,
    pub name: Option<SnapshotName>,
    /// How long it is kept; until somebody deletes it where missing.
    pub keep_seconds: Option<u64>,
    /// With the memory, where the session has any.
    pub memory: bool,
    pub labels: BTreeMap<String, String>,
}

/// What is forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForkOf {
    /// A session as it is now: a snapshot is taken of it first.
    Session(SessionId),
    Snapshot(SnapshotId),
}

/// Sessions to be made from a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewForks {
    pub count: u32,
    /// Added to what the source has.
    pub metadata: BTreeMap<String, String>,
    pub name: Option<String>,
    /// Brokered credentials of the source go along.
    pub secrets: bool,
    /// Its memory is left alone: they boot afresh on its disk.
    pub disk_only: bool,
}

/// The answer to a fork.
#[derive(Debug, Clone, PartialEq)]
pub struct Forked {
    pub items: Vec<SessionView>,
    /// Why there are fewer than were asked for.
    pub errors: Vec<Error>,
}

/// A command to be run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NewExec {
    /// The same key gives the same exec.
    pub key: Option<String>,
    pub program: Program,
    /// Given at once.
    pub stdin: Option<Vec<u8>>,
    /// More standard input can follow.
    pub stdin_open: bool,
    pub timeout_seconds: Option<u64>,
    /// Answered when it has ended, not when it has begun.
    pub wait: bool,
    /// Boot the session where it is stopped.
    pub start: bool,
}

/// A terminal to be opened.
#[derive(Debug, Clone, PartialEq)]
pub struct NewTerminal {
    pub name: Option<String>,
    /// An empty argv: the session's login shell.
    pub program: Program,
    pub cols: u16,
    pub rows: u16,
    /// Boot the session where it is stopped.
    pub start: bool,
}

/// The answer to a file request.
pub struct FileAnswer {
    pub reply: FileReply,
    /// Where the request gives bytes.
    pub bytes: Option<ByteStream>,
}

/// One thing that a reader of output meets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputItem {
    Data {
        offset: Offset,
        bytes: Bytes,
    },
    /// These bytes are gone.
    Gap {
        from: Offset,
        to: Offset,
    },
    /// Without follow: nothing more now. With follow: nothing more, ever.
    End,
}

/// A line of a session's merged output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    pub at: Timestamp,
    /// `exec ID`, or `service NAME`; what printed it.
    pub source: LogSource,
    /// `stdout`, `stderr` or `log`.
    pub stream: &'static str,
    /// Without its newline; bytes that aren't UTF-8 are shown as U+FFFD.
    pub text: String,
}

/// What printed a line.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LogSource {
    Exec(ExecId),
    Service(model::ServiceName),
    /// The list of requests to the outside: each line is a JSON object.
    Requests,
}

impl std::fmt::Display for LogSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LogSource::Exec(id) => write!(f, "exec {id}"),
            LogSource::Service(name) => write!(f, "service {name}"),
            LogSource::Requests => f.write_str("requests"),
        }
    }
}

/// A token to be made.
#[derive(Debug, Clone, PartialEq)]
pub struct NewToken {
    pub name: String,
    pub scopes: Vec<Scope>,
    pub sessions: Option<Vec<SessionId>>,
    pub ttl_seconds: Option<u64>,
    /// What the sessions that it makes may take together.
    pub limits: TokenLimits,
}

/// A token that was made, and its secret, which is told this once.
#[derive(Debug, Clone, PartialEq)]
pub struct MadeToken {
    pub row: store::TokenRow,
    pub secret: String,
}

/// Where a new template's files come from; paths are on the server's machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateSource {
    Dir(PathBuf),
    Tar(PathBuf),
    OciLayout { dir: PathBuf, reference: Option<String> },
}

/// How many sessions there are, for metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub sessions: BTreeMap<&'static str, u64>,
    /// Booted sandboxes that wait for sessions.
    pub pooled: u64,
    /// Operations under way.
    pub operations: u64,
    /// What has gone over the network of sessions that have a sandbox, by host.
    pub traffic: Vec<(SessionId, String, HostTotals)>,
}
