//! The vocabulary of a session's history.

use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt};

/// What an event tells, as a dotted word such as `exec.started`. Open: kinds are added over time
/// and an unknown one is passed on as it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventType(pub Cow<'static, str>);

macro_rules! event_types {
    ($($name:ident => $text:literal),+ $(,)?) => {
        impl EventType {
            $(pub const $name: EventType = EventType(Cow::Borrowed($text));)+
        }
    };
}

event_types! {
    SESSION_CREATED => "session.created",
    SESSION_UPDATED => "session.updated",
    SESSION_DELETED => "session.deleted",
    SESSION_EXPIRED => "session.expired",
    STATE_CHANGED => "state.changed",
    OPERATION_STARTED => "operation.started",
    OPERATION_DONE => "operation.done",
    OPERATION_FAILED => "operation.failed",
    EXEC_STARTED => "exec.started",
    EXEC_ENDED => "exec.ended",
    TERMINAL_OPENED => "terminal.opened",
    TERMINAL_ATTACHED => "terminal.attached",
    TERMINAL_DETACHED => "terminal.detached",
    TERMINAL_CLOSED => "terminal.closed",
    SERVICE_STARTED => "service.started",
    SERVICE_ENDED => "service.ended",
    WAKE_DONE => "wake.done",
    SNAPSHOT_TAKEN => "snapshot.taken",
    SNAPSHOT_DELETED => "snapshot.deleted",
    FORK_MADE => "fork.made",
    ROLLBACK_DONE => "rollback.done",
    SESSION_IMPORTED => "session.imported",
    SESSION_RESTORED => "session.restored",
    IDLE_DECIDED => "idle.decided",
    HIBERNATE_DEFERRED => "hibernate.deferred",
    TIMEOUT_NEAR => "timeout.near",
    HOOK_ENDED => "hook.ended",
    CONFIRM_HELD => "confirm.held",
    CONFIRM_RELEASED => "confirm.released",
    CONFIRM_FAILED => "confirm.failed",
    FILES_WRITTEN => "files.written",
    MEMORY_UNSAVEABLE => "memory.unsaveable",
    MEMORY_SAVEABLE => "memory.saveable",
    TEMPLATE_CHANGED => "template.changed",
    SUPERVISOR_LOST => "supervisor.lost",
    RECAPTURE_DONE => "recapture.done",
    OOM => "oom",
    DISK_OVER_LIMIT => "disk.over_limit",
    DISK_WITHIN_LIMIT => "disk.within_limit",
    NETWORK_DENIED => "network.denied",
    PORT_OPENED => "port.opened",
    PORT_CLOSED => "port.closed",
    GAP => "gap",
    NOTE => "note",
    KEEP_AWAKE => "keep_awake",
    AGENT_WAITING => "agent.waiting",
}

impl fmt::Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Who brought an event about: `system`, `token:NAME`, `uid:N`, `inside`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Actor(pub String);

impl Actor {
    /// Dormouse itself.
    pub fn system() -> Actor {
        Actor("system".to_owned())
    }

    /// A program in the session.
    pub fn inside() -> Actor {
        Actor("inside".to_owned())
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
