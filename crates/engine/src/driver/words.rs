//! What a driver says of operations: in the session's history, and to whoever asked.

use crate::{Error, operation};
use lifecycle::Reason;
use model::{Actor, EventType, State};
use serde_json::json;
use store::{NewEvent, OperationRow, SessionRow};

/// A failure without a name of its own says at least of what.
pub(super) fn of_operation(error: Error, row: &OperationRow) -> Error {
    match error {
        Error::Internal { detail } => {
            Error::OperationFailed { session: row.session_id, operation: row.id, kind: row.kind, detail }
        }
        other => other,
    }
}

/// How the end of an operation that was accepted is told to the client that asked for it: whatever it met on its way, it was
/// tried, and failed.
pub(super) fn of_client(error: Error, operation: Option<&OperationRow>) -> Error {
    let is_servers = matches!(error.status(), 500 | 504) || matches!(error, Error::Lost { .. });
    match operation {
        Some(row) if is_servers && !matches!(error, Error::OperationFailed { .. }) => {
            Error::OperationFailed { session: row.session_id, operation: row.id, kind: row.kind, detail: error.to_string() }
        }
        _ => error,
    }
}

pub(super) fn started(operation: &OperationRow, actor: &Actor) -> NewEvent {
    NewEvent {
        at: operation.started_at,
        kind: EventType::OPERATION_STARTED,
        actor: actor.clone(),
        operation_id: Some(operation.id),
        data: json!({ "kind": operation.kind }),
    }
}

pub(super) fn failed(operation: &OperationRow, actor: &Actor, code: &str, detail: &str) -> NewEvent {
    NewEvent {
        at: operation.ended_at.unwrap_or(operation.started_at),
        kind: EventType::OPERATION_FAILED,
        actor: actor.clone(),
        operation_id: Some(operation.id),
        data: json!({ "kind": operation.kind, "code": code, "detail": detail }),
    }
}

pub(super) fn state_changed(row: &SessionRow, from: State, operation: &OperationRow, actor: &Actor) -> NewEvent {
    NewEvent {
        at: row.updated_at,
        kind: EventType::STATE_CHANGED,
        actor: actor.clone(),
        operation_id: Some(operation.id),
        data: json!({ "from": from, "to": row.state, "reason": row.reason }),
    }
}

/// The error that a refusal is told as.
pub(crate) fn denied(row: &SessionRow, reason: Reason) -> Error {
    let session = row.id;
    let why = row.reason.clone().unwrap_or_default();
    match reason {
        Reason::Deleted => operation::deleted(row, row.updated_at),
        Reason::Failed => Error::Failed { session, reason: why },
        Reason::Paused => Error::Paused { session },
        Reason::NotRunning if row.state == State::Hibernated => {
            Error::NotRunning { session, reason: "it is hibernated".to_owned() }
        }
        Reason::NotRunning => Error::NotRunning { session, reason: why },
        Reason::NoMemorySnapshot => Error::NoMemorySnapshot { session, reason: why },
        Reason::Hibernated => Error::Conflict {
            detail: format!("session {session} is hibernated; wake it, or stop it first to give up its memory"),
        },
        Reason::Ephemeral => Error::Ephemeral { session },
        Reason::Creating => Error::Conflict { detail: format!("session {session} is still being created") },
    }
}
