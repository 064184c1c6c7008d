//! What goes on in sessions: operations, execs and terminals.
//!
//! Rows are written together with their session, by [`crate::Sessions::commit_all`]; a row with a
//! known id takes the place of the older one.

use crate::{Cursor, Fut, Page};
use model::{ExecId, ExecState, Generation, OperationId, OperationKind, OperationState, SessionId};
use model::{TerminalId, TerminalState, Timestamp};
use serde_json::Value;

/// One lifecycle change.
#[derive(Debug, Clone, PartialEq)]
pub struct OperationRow {
    pub id: OperationId,
    pub session_id: SessionId,
    pub kind: OperationKind,
    pub state: OperationState,
    pub started_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    /// What a server needs to know to finish or undo it after a crash.
    pub intent: Value,
    /// Why it failed.
    pub error: Option<Value>,
}

impl OperationRow {
    /// One that begins now, under an id of its own.
    #[must_use]
    pub fn begun(session: SessionId, kind: OperationKind, now: Timestamp, intent: Value) -> OperationRow {
        OperationRow {
            id: OperationId::new(),
            session_id: session,
            kind,
            state: OperationState::Running,
            started_at: now,
            ended_at: None,
            intent,
            error: None,
        }
    }
}

/// Reading operations.
pub trait Operations {
    /// One operation.
    fn operation(&self, id: OperationId) -> Fut<'_, Option<OperationRow>>;

    /// All that are under way, oldest first.
    fn running_operations(&self) -> Fut<'_, Vec<OperationRow>>;
}

/// One exec: the columns that are asked for, and its whole record as JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecRow {
    pub session_id: SessionId,
    pub id: ExecId,
    /// Unique in its session.
    pub key: Option<String>,
    pub state: ExecState,
    pub generation: Generation,
    pub started_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    pub record: String,
}

/// Reading execs.
pub trait Execs {
    /// One exec of a session.
    fn exec(&self, session: SessionId, id: ExecId) -> Fut<'_, Option<ExecRow>>;

    /// The exec with this key.
    fn exec_by_key(&self, session: SessionId, key: String) -> Fut<'_, Option<ExecRow>>;

    /// Newest first.
    fn list_execs(&self, session: SessionId, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<ExecRow>>;

    /// All that run, oldest first.
    fn running_execs(&self, session: SessionId) -> Fut<'_, Vec<ExecRow>>;
}

/// One terminal: the columns that are asked for, and its whole record as JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TerminalRow {
    pub session_id: SessionId,
    pub id: TerminalId,
    pub name: Option<String>,
    pub state: TerminalState,
    pub generation: Generation,
    pub started_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    pub record: String,
}

/// Reading terminals.
pub trait Terminals {
    /// One terminal of a session.
    fn terminal(&self, session: SessionId, id: TerminalId) -> Fut<'_, Option<TerminalRow>>;

    /// Newest first.
    fn list_terminals(&self, session: SessionId, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<TerminalRow>>;

    /// All that run, oldest first.
    fn running_terminals(&self, session: SessionId) -> Fut<'_, Vec<TerminalRow>>;
}
