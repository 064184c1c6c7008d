//! What a supervisor writes down for the server: one JSON object a line, in a journal of its own.
//!
//! The server reads facts at its leisure, applies each exactly once (it keeps the offset of the
//! next one in the store) and turns them into events. So nothing that happens while no server
//! runs is lost.

use crate::records::{ExecRecord, TerminalRecord, Unsaveable};
use model::{EndReason, Generation, Offset, ServiceName, TerminalId, Timestamp};
use serde::{Deserialize, Serialize};

/// One line of the facts journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FactLine {
    pub at: Timestamp,
    pub generation: Generation,
    #[serde(flatten)]
    pub fact: Fact,
}

/// Connections and bytes of one host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTraffic {
    pub host: String,
    pub connections: u64,
    pub sent_bytes: u64,
    pub received_bytes: u64,
}

/// Something that happened in a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "fact", rename_all = "snake_case")]
pub enum Fact {
    ExecStarted {
        exec: ExecRecord,
        #[serde(default)]
        actor: Option<String>,
    },
    ExecEnded {
        exec: ExecRecord,
    },
    TerminalOpened {
        terminal: TerminalRecord,
        #[serde(default)]
        actor: Option<String>,
    },
    TerminalEnded {
        terminal: TerminalRecord,
    },
    TerminalAttached {
        terminal: TerminalId,
        client: String,
        mode: String,
        #[serde(default)]
        actor: Option<String>,
    },
    TerminalDetached {
        terminal: TerminalId,
        client: String,
    },
    ServiceStarted {
        name: ServiceName,
        pid: u32,
        restarts: u64,
    },
    ServiceEnded {
        name: ServiceName,
        exit_code: Option<i32>,
        signal: Option<i32>,
        restart_in_ms: Option<u64>,
    },
    /// Bytes of a journal that could not be kept.
    Gap {
        stream: String,
        from: Offset,
        to: Offset,
    },
    Unsaveable {
        items: Vec<Unsaveable>,
    },
    /// A program's own words for the session's history.
    Note {
        text: String,
    },
    /// A program asked for the session to be kept awake for so long; 0: no longer.
    KeepAwake {
        seconds: u64,
    },
    /// A program said what it waits for, such as a `person`; `None`: for nothing any more.
    AgentWaiting {
        #[serde(default, rename = "for")]
        for_: Option<String>,
        #[serde(default)]
        text: Option<String>,
    },
    /// Memory ran out; `killed` names what was ended for it.
    Oom {
        limit_bytes: u64,
        used_bytes: u64,
        killed: Option<String>,
    },
    /// The session's disk has become larger than it may be. Told once, until it is within its limit again.
    DiskOver {
        limit_bytes: u64,
        used_bytes: u64,
    },
    /// The session's disk is within its limit again.
    DiskWithin {
        limit_bytes: u64,
        used_bytes: u64,
    },
    FilesWritten {
        path: String,
        op: String,
        #[serde(default)]
        actor: Option<String>,
    },
    /// A connection was refused; `repeated`: so many more of the same before it, not told by themselves.
    NetworkDenied {
        host: String,
        port: u16,
        reason: String,
        #[serde(default)]
        repeated: u64,
    },
    /// What has gone over the network since the last such fact.
    Traffic {
        items: Vec<HostTraffic>,
    },
    PortOpened {
        port: crate::guest::ListeningPort,
    },
    PortClosed {
        port: u16,
    },
    /// The image was restored on the side and answered (or not); the frozen original is dropped
    /// (or thawed).
    Confirmed {
        ok: bool,
        detail: String,
    },
    /// The sandbox has ended.
    SandboxEnded {
        reason: EndReason,
        detail: String,
    },
    #[serde(other)]
    Unknown,
}
