//! Execs, terminals and services as they are recorded: in facts, in answers, in the store.

use model::{ExecId, ExecState, Generation, Offset, ServiceName, TerminalId, TerminalState, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How to start a program inside.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    pub argv: Vec<String>,
    /// Added to the session's environment.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Where missing: the session's `workdir`, else the user's home.
    #[serde(default)]
    pub cwd: Option<String>,
    /// A name or `uid[:gid]`; root where missing.
    #[serde(default)]
    pub user: Option<String>,
}

/// One exec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecRecord {
    pub id: ExecId,
    #[serde(default)]
    pub key: Option<String>,
    pub generation: Generation,
    pub state: ExecState,
    #[serde(default)]
    pub exit_code: Option<i32>,
    /// The signal's number when one ended it.
    #[serde(default)]
    pub signal: Option<i32>,
    /// A word for how it ended where exit code and signal don't say it all: `oom`, `pids`,
    /// `timeout`, `not_found`, `not_executable`, `bad_working_directory`, `sandbox_gone` …
    #[serde(default)]
    pub reason: Option<String>,
    pub argv: Vec<String>,
    #[serde(default)]
    pub cwd: Option<String>,
    #[serde(default)]
    pub user: Option<String>,
    pub started_at: Timestamp,
    #[serde(default)]
    pub ended_at: Option<Timestamp>,
    /// The process id inside.
    #[serde(default)]
    pub pid: Option<u32>,
    #[serde(default)]
    pub stdout_bytes: Offset,
    #[serde(default)]
    pub stderr_bytes: Offset,
    /// The hook that it is, such as `on_wake`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hook: Option<String>,
}

/// One terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalRecord {
    pub id: TerminalId,
    #[serde(default)]
    pub name: Option<String>,
    pub generation: Generation,
    pub state: TerminalState,
    pub argv: Vec<String>,
    #[serde(default)]
    pub cwd: Option<String>,
    #[serde(default)]
    pub pid: Option<u32>,
    pub cols: u16,
    pub rows: u16,
    #[serde(default)]
    pub title: Option<String>,
    #[serde(default)]
    pub output_bytes: Offset,
    #[serde(default)]
    pub exit_code: Option<i32>,
    #[serde(default)]
    pub signal: Option<i32>,
    #[serde(default)]
    pub reason: Option<String>,
    /// The client that writes now.
    #[serde(default)]
    pub writer: Option<String>,
    pub started_at: Timestamp,
    #[serde(default)]
    pub ended_at: Option<Timestamp>,
}

/// One service, as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceRecord {
    pub name: ServiceName,
    /// `running`, `stopped`, `waiting` (for its restart) or `failed` (can't be started).
    pub state: String,
    #[serde(default)]
    pub pid: Option<u32>,
    #[serde(default)]
    pub restarts: u64,
    #[serde(default)]
    pub exit_code: Option<i32>,
    #[serde(default)]
    pub signal: Option<i32>,
    #[serde(default)]
    pub output_bytes: Offset,
}

/// A process inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    pub pid: u32,
    pub ppid: u32,
    pub uid: u32,
    /// As in `/proc/PID/stat`: R, S, D, T, Z.
    pub state: String,
    pub cpu_ms: u64,
    pub rss_bytes: u64,
    pub command: String,
    /// The exec, terminal or service it belongs to, where known.
    #[serde(default)]
    pub work: Option<crate::guest::Work>,
    /// The terminal it waits to read from.
    #[serde(default)]
    pub reads_terminal: Option<TerminalId>,
}

/// Something that stands in the way of saving the memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Unsaveable {
    pub pid: u32,
    pub process: String,
    pub path: String,
    /// `unlinked_file`, `replaced_program` or `deleted_directory`.
    pub kind: String,
}

impl std::fmt::Display for Unsaveable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match self.kind.as_str() {
            "unlinked_file" => "holds open the deleted file",
            "replaced_program" => "still runs the replaced program",
            _ => "works in the deleted directory",
        };
        write!(f, "process {} ({}) {what} {}", self.pid, self.process, self.path)
    }
}

/// Resource figures of a sandbox at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// CPU time of everything inside, since the sandbox began.
    #[serde(default)]
    pub cpu_ms: u64,
    #[serde(default)]
    pub memory_bytes: u64,
    #[serde(default)]
    pub memory_limit_bytes: Option<u64>,
    #[serde(default)]
    pub processes: u64,
    #[serde(default)]
    pub disk_bytes: u64,
    /// Resident size of the supervisor, on the host.
    #[serde(default)]
    pub supervisor_rss_bytes: u64,
    /// Host memory of the sandbox as its cgroup counts it, where there is one.
    #[serde(default)]
    pub cgroup_memory_bytes: Option<u64>,
    #[serde(default)]
    pub oom_kills: u64,
}

/// What goes on in a session. All times are awake time: pauses and sleep aren't counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Activity {
    /// For how long nothing has happened: no exec ran, nobody typed, no terminal printed, no file was written from
    /// outside, nothing went over the network and nobody waited for an answer from there, programs used next to no CPU, and none had asked to be kept awake. 0 while something of that goes on.
    pub quiet_ms: u64,
    /// What goes on now or did within the last five seconds.
    #[serde(default)]
    pub keeps_awake: Vec<KeepsAwake>,
    /// The latest that happened.
    #[serde(default)]
    pub last: Option<LastActivity>,
    /// Mean CPU of the programs inside over `window_ms`, in percent of one core.
    #[serde(default)]
    pub cpu_percent: f64,
    /// How much of the window that was asked for is known.
    #[serde(default)]
    pub window_ms: u64,
    /// Execs that run, hooks left out.
    #[serde(default)]
    pub execs: u64,
    /// Viewers of terminals, those that only watch included.
    #[serde(default)]
    pub clients: u64,
    /// Since the last viewer, exec or file request of a client; 0 while there is one.
    #[serde(default)]
    pub no_clients_ms: u64,
    /// Output waits for room on the disk: programs may stand still for it.
    #[serde(default)]
    pub output_waits: bool,
    /// What a program inside says that it waits for.
    #[serde(default)]
    pub waiting: Option<crate::guest::Waiting>,
}

/// Something that keeps a session from being idle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepsAwake {
    /// `exec`, `asked` (by a program inside), `cpu`, `output`, `typing`, `file`, `note`, `terminal` (opened), `traffic` or
    /// `unresponsive`: the guest doesn't say what it does.
    pub kind: String,
    /// In words for people.
    #[serde(default)]
    pub what: String,
}

/// The latest thing that happened in a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastActivity {
    /// As in [`KeepsAwake`], or `start` where nothing has happened since the sandbox began to run.
    pub kind: String,
    pub ago_ms: u64,
    #[serde(default)]
    pub what: String,
}
