//! Sessions: making them, reading them, changing them, coming back to them.

use crate::{
    Problem,
    patch::some,
    strict,
    work::{Exec, Service, Terminal},
};
use model::{
    Generation, HookName, IdlePolicy, Key, Memory, OnTimeout, OperationId, OperationKind, OperationState, Resources, Runtime,
    ServiceSpec, SessionId, SnapshotId, State, Timestamp, network::Policy,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// One page of a list. `next_cursor` asks for the page after it; `null` at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    pub items: Vec<T>,
    #[serde(default)]
    pub next_cursor: Option<String>,
}

impl<T> Page<T> {
    /// A list that fits on one page.
    pub fn whole(items: Vec<T>) -> Page<T> {
        Page { items, next_cursor: None }
    }
}

/// Where a session's first files come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Address of a git repository, `https://…`. Either this or `tar`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub git: Option<String>,
    /// Address of a tar archive, plain or gzipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tar: Option<String>,
    /// Branch, tag or commit; the default branch where missing.
    #[serde(default, rename = "ref", skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// How many commits of history; all where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
}

/// `POST /v1/sessions`. Everything is optional.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CreateSession {
    /// The same key gives the same session: 1–200 printable characters without `/` or blank.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, max_length = 200)]
    pub key: Option<Key>,
    /// Make a new session where the one of this key has expired or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replace: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// The task that this one is a part of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_task: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "gvisor")]
    pub runtime: Option<Runtime>,
    /// Not built yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub machine: Option<Value>,
    /// Environment of everything that is started in the session. It is never shown again.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Where execs and terminals start; made when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// Names and values to find the session by. Names that begin with `dialect.` are reserved.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// `{"cpus", "memory_bytes", "disk_bytes", "pids"}`, each optional. `disk_bytes` is what the session may write onto its
    /// disk, at least 1 MiB. Where the server's file system has project quota, programs inside get no more. Elsewhere the
    /// disk is watched: the events `disk.over_limit` and `disk.within_limit` tell of it, and while it is over its limit
    /// files are not taken (507 `no_space`), only read and deleted.
    #[serde(deserialize_with = "strict::resources", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub resources: Option<Resources>,
    /// `{"after_seconds", "action": "hibernate"|"stop"|"none", "when"?: "no_activity"|"no_clients"}`; none where missing.
    #[serde(deserialize_with = "strict::idle", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub idle: Option<IdlePolicy>,
    /// How long each sandbox may run, in awake time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "hibernate")]
    pub on_timeout: Option<OnTimeout>,
    /// How long the session exists, asleep or awake; then it is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// Never written to storage beyond its life.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ephemeral: Option<bool>,
    /// Make it from this snapshot: its disk, and its memory where it has any. It has its template and source, so neither
    /// can be given beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = "uuid")]
    pub snapshot_id: Option<SnapshotId>,
    /// `true`: the snapshot's memory is left alone, and the session boots afresh on its disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_only: Option<bool>,
    /// Programs that are kept running: `{"name", "argv", "env"?, "cwd"?, "restart"?: "always"|"on_failure"|"never"}`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub services: Vec<ServiceSpec>,
    /// Commands of the session that are run at `on_create`, `before_hibernate`, `before_stop`, `on_timeout` (30 s ahead)
    /// and `on_wake`, each a list of words or a line for `/bin/sh`. Each has 30 s; its output is kept as an exec.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = Object)]
    pub hooks: BTreeMap<HookName, Hook>,
    /// Not built yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub volumes: Option<Value>,
    /// What its programs may reach: `{"default": "allow"|"deny", "rules": [{"allow"|"deny": HOST | "*.HOST" | CIDR | "*",
    /// "ports"?: [N, "A-B"], "methods"?: […], "path"?: PREFIX, "inject"?: {"header", "value": "… {SECRET_NAME} …"}}],
    /// "name_ports"?: […], "log_requests"?: bool, "public_ports"?: […]}`. The first rule that matches decides, then
    /// `default`; everything where missing. A secret that has no hosts of its own needs a token of scope `admin` (403).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub network: Option<Policy>,
    /// Not built yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub confirm: Option<Value>,
}

impl CreateSession {
    /// The fields of the request whose part of Dormouse isn't built yet. They are refused, never ignored.
    pub fn not_built(&self) -> Vec<&'static str> {
        let fields = [("machine", &self.machine), ("volumes", &self.volumes), ("confirm", &self.confirm)];
        fields.into_iter().filter(|(_, value)| value.is_some()).map(|(name, _)| name).collect()
    }
}

/// A hook's command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Hook {
    Shell(String),
    Argv(Vec<String>),
}

impl Hook {
    /// The command as a list of words.
    pub fn argv(self) -> Vec<String> {
        match self {
            Hook::Shell(line) => vec!["/bin/sh".to_owned(), "-c".to_owned(), line],
            Hook::Argv(argv) => argv,
        }
    }
}

/// `PATCH /v1/sessions/{id}`. What is missing stays as it is; `null` clears it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PatchSession {
    #[serde(deserialize_with = "some", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub name: Option<Option<String>>,
    #[serde(deserialize_with = "some", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub task: Option<Option<String>>,
    /// Merged into what is there (RFC 7396): a name with `null` is removed, the others are set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<BTreeMap<String, Option<String>>>,
    #[serde(deserialize_with = "strict::some_idle", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub idle: Option<Option<IdlePolicy>>,
    #[serde(deserialize_with = "some", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub timeout_seconds: Option<Option<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub on_timeout: Option<OnTimeout>,
    #[serde(deserialize_with = "some", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub ttl_seconds: Option<Option<u64>>,
    #[serde(deserialize_with = "some", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub wake_at: Option<Option<Timestamp>>,
    /// Replaces the policy; in force when it is answered. Connections that are denied now are cut. `null`: everything. A fork
    /// that was made without its parent's secrets has those that the policy names from then on.
    #[serde(deserialize_with = "some", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub network: Option<Option<Policy>>,
    /// Replaces the list of services.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub services: Option<Vec<ServiceSpec>>,
}

/// The session or snapshot that a session was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Parent {
    #[schema(value_type = String, format = "uuid")]
    pub session_id: SessionId,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = "uuid")]
    pub snapshot_id: Option<SnapshotId>,
}

/// The operation that is under way in a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OperationRef {
    #[schema(value_type = String, format = "uuid")]
    pub id: OperationId,
    #[schema(value_type = String, example = "hibernate")]
    pub kind: OperationKind,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
}

/// What a session uses, as last measured. `null`: not known.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// CPU time over all its sandboxes.
    #[serde(default)]
    pub cpu_ms: Option<u64>,
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// What the session has written onto its disk.
    #[serde(default)]
    pub disk_bytes: Option<u64>,
    /// The saved memory on storage.
    #[serde(default)]
    pub image_bytes: Option<u64>,
    /// Time with a sandbox, over all of them.
    #[serde(default)]
    pub awake_seconds: Option<u64>,
    /// When it was measured.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub at: Option<Timestamp>,
}

/// A session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    #[schema(value_type = String, format = "uuid")]
    pub id: SessionId,
    pub key: Option<String>,
    pub name: Option<String>,
    pub task: Option<String>,
    #[schema(value_type = String, example = "running")]
    pub state: State,
    /// Why it is in this state, where the state alone doesn't say it: `asked`, `idle`, `oom`, `killed` …
    pub reason: Option<String>,
    /// State and reason in one plain sentence.
    #[serde(default)]
    pub sentence: String,
    #[schema(value_type = String, example = "gvisor")]
    pub runtime: Runtime,
    pub template: String,
    /// Counts the sandboxes that the session has had.
    #[schema(value_type = u64)]
    pub generation: Generation,
    #[serde(default)]
    pub ephemeral: bool,
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    #[serde(default)]
    pub workdir: Option<String>,
    #[serde(default)]
    #[schema(value_type = Object)]
    pub resources: Resources,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Timestamp,
    #[schema(value_type = String, format = DateTime)]
    pub last_activity_at: Timestamp,
    #[schema(value_type = Option<Object>)]
    pub idle: Option<IdlePolicy>,
    /// When idleness will end the sandbox if nothing happens until then.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub hibernate_after: Option<Timestamp>,
    pub timeout_seconds: Option<u64>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub timeout_at: Option<Timestamp>,
    #[schema(value_type = String, example = "hibernate")]
    pub on_timeout: OnTimeout,
    pub ttl_seconds: Option<u64>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub expires_at: Option<Timestamp>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub wake_at: Option<Timestamp>,
    #[schema(value_type = String, example = "live")]
    pub memory: Memory,
    pub parent: Option<Parent>,
    /// Where it stands among snapshots: the latest that was taken of it, or the one it was made from or set back to.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = "uuid")]
    pub latest_snapshot_id: Option<SnapshotId>,
    /// The object store has it, as it sleeps.
    #[serde(default)]
    pub packed: bool,
    /// Its disk and memory lie on the server's machine, so that they need not be fetched first.
    #[serde(default = "yes")]
    pub local: bool,
    pub parent_task: Option<String>,
    pub machine: Option<String>,
    #[serde(default)]
    pub services: Vec<Service>,
    #[serde(default)]
    #[schema(value_type = Vec<Object>)]
    pub volumes: Vec<Value>,
    /// What its programs may reach.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub network: Policy,
    /// It was forked without the secrets that its policy names.
    #[serde(default)]
    pub secrets_withheld: bool,
    pub operation: Option<OperationRef>,
    /// The furthest that the caller's token reaches here: `read`, `write`, `host` or `admin`.
    #[serde(default)]
    pub access: Option<String>,
    #[serde(default)]
    pub usage: Usage,
    /// What goes on in it now; only where one running session is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity: Option<SessionActivity>,
    #[schema(value_type = String, format = DateTime)]
    pub server_time: Timestamp,
}

/// What goes on in a running session.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionActivity {
    /// For how long nothing has happened, in awake time: no exec, no typing, no output, no traffic, next to no CPU.
    pub quiet_seconds: f64,
    /// What keeps it from being idle now.
    #[serde(default)]
    pub keeps_awake: Vec<KeepsAwake>,
    /// The latest that happened: its kind, and how long ago.
    #[serde(default)]
    pub last_kind: Option<String>,
    #[serde(default)]
    pub last_seconds_ago: Option<f64>,
    /// Mean CPU of its programs over the idle window, in percent of one core.
    #[serde(default)]
    pub cpu_percent: f64,
    #[serde(default)]
    pub execs: u64,
    /// Viewers of its terminals.
    #[serde(default)]
    pub clients: u64,
    /// The disk is full: what programs print is held back until there is room, and they may stand still.
    #[serde(default)]
    pub output_waits: bool,
    /// Whom a program inside says it waits for.
    #[serde(default)]
    pub waiting_for: Option<String>,
    #[serde(default)]
    pub waiting_text: Option<String>,
}

/// Something that keeps a session from being idle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeepsAwake {
    /// `exec`, `asked`, `cpu`, `output`, `typing`, `file` …
    pub kind: String,
    pub what: String,
}

/// A field of a POST that differs from the session that is there, and was not applied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct Ignored(pub String);

/// The session that a new one stands in for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Replaced {
    #[schema(value_type = String, format = "uuid")]
    pub session_id: SessionId,
    pub reason: String,
}

/// The answer to `POST /v1/sessions`: 201 for a new session, 200 for the one that was there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CreatedSession {
    #[serde(flatten)]
    pub session: Session,
    /// Only where the session was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ignored: Option<Vec<Ignored>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Replaced>,
}

/// `POST …/hibernate`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Hibernate {
    /// Wake by itself at this time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub until: Option<Timestamp>,
}

/// `POST …/extend`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Extend {
    /// How far `timeout_at` moves.
    pub seconds: u64,
}

/// A lifecycle change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Operation {
    #[schema(value_type = String, format = "uuid")]
    pub id: OperationId,
    #[schema(value_type = String, format = "uuid")]
    pub session_id: SessionId,
    #[schema(value_type = String, example = "hibernate")]
    pub kind: OperationKind,
    #[schema(value_type = String, example = "running")]
    pub state: OperationState,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub ended_at: Option<Timestamp>,
    /// What went wrong, where it `failed` or was `undone`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// `POST …/connect`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ConnectRequest {
    /// `false` never starts anything. True where missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake: Option<bool>,
}

/// How a client finds the session that it comes back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConnectStatus {
    /// Its guest has just answered.
    Connected,
    /// Alive without an answer. Nothing is killed for it; ask again.
    Unresponsive,
    Paused,
    Hibernated,
    Stopped,
    Failed,
    Expired,
    Deleted,
}

/// The times of a session's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Lifecycle {
    #[schema(value_type = String, format = DateTime)]
    pub server_time: Timestamp,
    #[schema(value_type = String)]
    pub state: State,
    #[schema(value_type = String, format = DateTime)]
    pub last_activity_at: Timestamp,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub hibernate_after: Option<Timestamp>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub timeout_at: Option<Timestamp>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub expires_at: Option<Timestamp>,
}

/// What a wake did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WakeReport {
    /// How long the session slept.
    pub gap_seconds: f64,
    /// `restored` or `lost`.
    pub memory: String,
    #[schema(value_type = u64)]
    pub generation: Generation,
    pub connections_reset: u64,
    /// Where they led to, `HOST:PORT`; not all of them where there were many.
    #[serde(default)]
    pub reset_to: Vec<String>,
}

/// A way back to a session that can't be connected to, or to how it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestoreOption {
    /// `wake`, `start`, `rollback` or `fork`.
    pub action: String,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = "uuid")]
    pub snapshot_id: Option<SnapshotId>,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub at: Option<Timestamp>,
    /// True where memory comes back with it.
    pub memory: bool,
}

/// The answer to `POST …/connect`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConnectAnswer {
    pub status: ConnectStatus,
    pub session: Session,
    pub lifecycle: Lifecycle,
    /// True where this call woke, unpaused or started it.
    pub woken: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake: Option<WakeReport>,
    pub has_snapshot: bool,
    #[serde(default)]
    pub restore_options: Vec<RestoreOption>,
    #[serde(default)]
    pub terminals: Vec<Terminal>,
    #[serde(default)]
    pub execs: Vec<Exec>,
    /// Why it could not be brought back, where that was tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_is_not_known_is_named() {
        let error = serde_json::from_str::<CreateSession>(r#"{"kee":"a"}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `kee`"), "{error}");
    }

    #[test]
    fn fields_whose_part_is_not_built_are_known_and_told() {
        let body: CreateSession =
            serde_json::from_str(r#"{"key":"a","hooks":{"on_create":["x"]},"volumes":[],"network":null}"#).unwrap();
        assert_eq!(body.not_built(), ["volumes"]);
    }

    #[test]
    fn an_empty_object_asks_for_the_defaults() {
        assert_eq!(serde_json::from_str::<CreateSession>("{}").unwrap(), CreateSession::default());
        assert_eq!(serde_json::to_string(&CreateSession::default()).unwrap(), "{}");
    }

    #[test]
    fn a_patch_tells_missing_from_null() {
        let patch: PatchSession = serde_json::from_str(r#"{"task":null,"ttl_seconds":60}"#).unwrap();
        assert_eq!((patch.task.clone(), patch.ttl_seconds, patch.name.clone()), (Some(None), Some(Some(60)), None));
        assert_eq!(serde_json::to_string(&patch).unwrap(), r#"{"task":null,"ttl_seconds":60}"#);
    }
}
