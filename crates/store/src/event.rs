//! The history of sessions.

use crate::{Cursor, CursorKind, Fut};
use model::{Actor, EventSeq, EventType, OperationId, SessionId, Timestamp};
use serde_json::Value;

/// The place of an event among the events of all sessions. Rises, with holes; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GlobalSeq(pub u64);

/// An event to be written; the store gives it its number.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    pub at: Timestamp,
    pub kind: EventType,
    pub actor: Actor,
    pub operation_id: Option<OperationId>,
    pub data: Value,
}

/// An event as it was written.
#[derive(Debug, Clone, PartialEq)]
pub struct EventRow {
    pub global: GlobalSeq,
    pub session_id: SessionId,
    pub seq: EventSeq,
    pub at: Timestamp,
    pub kind: EventType,
    pub actor: Actor,
    pub operation_id: Option<OperationId>,
    pub data: Value,
}

impl EventRow {
    /// The place right after this event, for [`Events::events_of_all`].
    pub fn cursor(&self) -> Cursor {
        Cursor::after_number(CursorKind::Events, self.global.0)
    }
}

/// Reading events. They are written by [`crate::Sessions::commit_all`] only.
pub trait Events {
    /// A session's events from number `from` on, in order. None for an unknown session.
    fn events(&self, session: SessionId, from: EventSeq, limit: usize) -> Fut<'_, Vec<EventRow>>;

    /// The events of all sessions after `after` (from the first one where it is `None`), in order.
    fn events_of_all(&self, after: Option<Cursor>, limit: usize) -> Fut<'_, Vec<EventRow>>;

    /// The place after the latest event there is: where somebody begins who wants only what comes.
    fn latest_event(&self) -> Fut<'_, Cursor>;
}
