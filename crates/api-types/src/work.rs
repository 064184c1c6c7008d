//! What runs in a session: execs, terminals, services, processes, ports, figures.

use crate::signal::Signal;
use model::{ExecId, ExecState, Generation, Offset, TerminalId, TerminalState, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;
use wire::records::{ExecRecord, ProcessRecord, ServiceRecord, TerminalRecord};

/// `POST …/execs`. Either `argv` or `shell`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CreateExec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// Run by `/bin/sh -c`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// A name or `uid[:gid]`; root where missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// `true` leaves standard input open for `POST …/stdin`; text is given at once and then ended; missing: ended from
    /// the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub stdin: Option<Stdin>,
    /// After this time awake its whole process tree is killed. No limit where missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// The same key gives the same exec, once, in this session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Start a stopped session for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<bool>,
}

/// An exec's standard input at its start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Stdin {
    Open(bool),
    Text(String),
}

/// One command, run in a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Exec {
    #[schema(value_type = String, format = "uuid")]
    pub id: ExecId,
    #[serde(default)]
    pub key: Option<String>,
    /// The sandbox it ran in.
    #[schema(value_type = u64)]
    pub generation: Generation,
    #[schema(value_type = String, example = "exited")]
    pub state: ExecState,
    #[serde(default)]
    pub exit_code: Option<i32>,
    /// Number of the signal that ended it.
    #[serde(default)]
    pub signal: Option<i32>,
    /// `oom`, `timeout`, `not_found`, `not_executable`, `bad_working_directory` …
    #[serde(default)]
    pub reason: Option<String>,
    pub argv: Vec<String>,
    #[serde(default)]
    pub cwd: Option<String>,
    #[serde(default)]
    pub user: Option<String>,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub ended_at: Option<Timestamp>,
    #[serde(default)]
    pub duration_ms: Option<u64>,
    #[serde(default)]
    pub pid: Option<u32>,
    #[serde(default)]
    #[schema(value_type = u64)]
    pub stdout_bytes: Offset,
    #[serde(default)]
    #[schema(value_type = u64)]
    pub stderr_bytes: Offset,
    /// With `?wait=true`: the first 1 MiB as text; bytes that aren't UTF-8 are shown as U+FFFD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_truncated: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_truncated: Option<bool>,
}

impl From<ExecRecord> for Exec {
    fn from(record: ExecRecord) -> Exec {
        let duration = record.ended_at.map(|at| at.since(record.started_at));
        Exec {
            id: record.id,
            key: record.key,
            generation: record.generation,
            state: record.state,
            exit_code: record.exit_code,
            signal: record.signal,
            reason: record.reason,
            argv: record.argv,
            cwd: record.cwd,
            user: record.user,
            started_at: record.started_at,
            ended_at: record.ended_at,
            duration_ms: duration.map(|d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
            pid: record.pid,
            stdout_bytes: record.stdout_bytes,
            stderr_bytes: record.stderr_bytes,
            stdout: None,
            stderr: None,
            stdout_truncated: None,
            stderr_truncated: None,
        }
    }
}

/// `POST …/execs/{exec}/signal`: sent to the exec and what it started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalExec {
    pub signal: Signal,
}

/// The answer to `POST …/execs/{exec}/stdin`, whose body is the raw bytes; `?eof=true` ends the input after them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StdinAnswer {
    /// How many bytes of this body the exec has been given.
    pub written_bytes: u64,
}

/// `POST …/terminals`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateTerminal {
    /// A login shell where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    #[serde(default = "CreateTerminal::default_cols")]
    pub cols: u16,
    #[serde(default = "CreateTerminal::default_rows")]
    pub rows: u16,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl CreateTerminal {
    fn default_cols() -> u16 {
        80
    }

    fn default_rows() -> u16 {
        24
    }
}

impl Default for CreateTerminal {
    fn default() -> CreateTerminal {
        CreateTerminal {
            argv: None,
            cols: Self::default_cols(),
            rows: Self::default_rows(),
            env: BTreeMap::new(),
            cwd: None,
            name: None,
        }
    }
}

/// A PTY in a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Terminal {
    #[schema(value_type = String, format = "uuid")]
    pub id: TerminalId,
    #[serde(default)]
    pub name: Option<String>,
    #[schema(value_type = u64)]
    pub generation: Generation,
    pub argv: Vec<String>,
    #[serde(default)]
    pub cwd: Option<String>,
    #[schema(value_type = String, example = "running")]
    pub state: TerminalState,
    #[serde(default)]
    pub pid: Option<u32>,
    pub cols: u16,
    pub rows: u16,
    #[serde(default)]
    pub title: Option<String>,
    #[serde(default)]
    #[schema(value_type = u64)]
    pub output_bytes: Offset,
    #[serde(default)]
    pub exit_code: Option<i32>,
    #[serde(default)]
    pub signal: Option<i32>,
    #[serde(default)]
    pub reason: Option<String>,
    /// The client that writes now: its `client` UUID.
    #[serde(default)]
    pub writer: Option<String>,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub ended_at: Option<Timestamp>,
}

impl From<TerminalRecord> for Terminal {
    fn from(record: TerminalRecord) -> Terminal {
        Terminal {
            id: record.id,
            name: record.name,
            generation: record.generation,
            argv: record.argv,
            cwd: record.cwd,
            state: record.state,
            pid: record.pid,
            cols: record.cols,
            rows: record.rows,
            title: record.title,
            output_bytes: record.output_bytes,
            exit_code: record.exit_code,
            signal: record.signal,
            reason: record.reason,
            writer: record.writer,
            started_at: record.started_at,
            ended_at: record.ended_at,
        }
    }
}

/// A program that the session keeps running.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Service {
    pub name: String,
    /// `running`, `stopped`, `waiting` or `failed`; `null` while the session has no sandbox.
    #[serde(default)]
    pub state: Option<String>,
    #[serde(default)]
    pub argv: Vec<String>,
    #[serde(default)]
    pub pid: Option<u32>,
    #[serde(default)]
    pub restarts: u64,
    #[serde(default)]
    pub exit_code: Option<i32>,
    #[serde(default)]
    pub signal: Option<i32>,
    #[serde(default)]
    #[schema(value_type = u64)]
    pub output_bytes: Offset,
}

impl From<ServiceRecord> for Service {
    fn from(record: ServiceRecord) -> Service {
        Service {
            name: record.name.into(),
            state: Some(record.state),
            argv: Vec::new(),
            pid: record.pid,
            restarts: record.restarts,
            exit_code: record.exit_code,
            signal: record.signal,
            output_bytes: record.output_bytes,
        }
    }
}

/// A process inside: `GET …/processes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Process {
    pub pid: u32,
    pub ppid: u32,
    pub uid: u32,
    /// As in `/proc/PID/stat`: R, S, D, T, Z.
    pub state: String,
    pub cpu_ms: u64,
    pub rss_bytes: u64,
    pub command: String,
    /// The terminal that it waits to read from.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = "uuid")]
    pub reads_terminal: Option<TerminalId>,
}

impl From<ProcessRecord> for Process {
    fn from(record: ProcessRecord) -> Process {
        Process {
            pid: record.pid,
            ppid: record.ppid,
            uid: record.uid,
            state: record.state,
            cpu_ms: record.cpu_ms,
            rss_bytes: record.rss_bytes,
            command: record.command,
            reads_terminal: record.reads_terminal,
        }
    }
}

/// A TCP port that a program inside listens on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Port {
    pub port: u16,
    #[serde(default)]
    pub address: Option<String>,
    #[serde(default)]
    pub pid: Option<u32>,
    #[serde(default)]
    pub program: Option<String>,
}

/// Resource figures of a session's sandbox: `GET …/stats`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// CPU time of everything inside, since the sandbox began.
    pub cpu_ms: u64,
    pub memory_bytes: u64,
    #[serde(default)]
    pub memory_limit_bytes: Option<u64>,
    pub processes: u64,
    pub disk_bytes: u64,
    /// Host memory of the process that looks after the sandbox.
    #[serde(default)]
    pub supervisor_rss_bytes: u64,
    /// Host memory of the sandbox, where the machine counts it.
    #[serde(default)]
    pub cgroup_memory_bytes: Option<u64>,
    #[serde(default)]
    pub oom_kills: u64,
}

impl From<wire::records::Stats> for Stats {
    fn from(stats: wire::records::Stats) -> Stats {
        Stats {
            cpu_ms: stats.cpu_ms,
            memory_bytes: stats.memory_bytes,
            memory_limit_bytes: stats.memory_limit_bytes,
            processes: stats.processes,
            disk_bytes: stats.disk_bytes,
            supervisor_rss_bytes: stats.supervisor_rss_bytes,
            cgroup_memory_bytes: stats.cgroup_memory_bytes,
            oom_kills: stats.oom_kills,
        }
    }
}

/// `POST …/files/mkdir`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Mkdir {
    pub path: String,
    /// Make missing parents, and take a directory that is there.
    #[serde(default)]
    pub parents: bool,
}

/// `POST …/files/move`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Move {
    pub from: String,
    pub to: String,
}
