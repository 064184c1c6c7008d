//! Why a store refused or failed, and what a caller may do about it.

use crate::Revision;
use model::{ExecId, OperationId, SessionId, SnapshotId};

/// Why something was not read or not written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("there is no session {0}")]
    NoSession(SessionId),
    /// Somebody else changed the session since it was read: read it again and decide anew.
    #[error("session {session} was changed meanwhile: revision {found}, not {expected}")]
    Conflict { session: SessionId, expected: Revision, found: Revision },
    #[error("the key belongs to session {holder}")]
    KeyTaken { holder: SessionId },
    #[error("the key belongs to exec {holder} of the same session")]
    ExecKeyTaken { holder: ExecId },
    #[error("operation {0} belongs to another session")]
    ForeignOperation(OperationId),
    #[error("there is no snapshot {0}")]
    NoSnapshot(SnapshotId),
    /// Somebody else changed the snapshot since it was read: read it again and decide anew.
    #[error("snapshot {snapshot} was changed meanwhile: revision {found}, not {expected}")]
    SnapshotConflict { snapshot: SnapshotId, expected: Revision, found: Revision },
    #[error("the name belongs to snapshot {holder}")]
    SnapshotNameTaken { holder: SnapshotId },
    #[error("this is not a cursor that a list has given out")]
    BadCursor,
    /// Nothing was written. The same call can succeed once there is room.
    #[error("no space left for the store: free some on the data directory's file system")]
    NoSpace,
    /// Nothing was written or read. The same call can succeed later.
    #[error("the store is too busy to answer")]
    Busy,
    /// The record is unreadable; others may well be readable.
    #[error("the store's record of {what} is damaged: {detail}")]
    Corrupt { what: String, detail: String },
    /// The change may have been written or not: read before doing it again.
    #[error("nobody knows whether the store kept the change: {0}")]
    OutcomeUnknown(String),
    #[error("the store is closed")]
    Closed,
    /// Nothing was written.
    #[error("the database failed: {0}")]
    Database(String),
}

impl StoreError {
    /// True where the same call, unchanged, can succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            StoreError::NoSpace | StoreError::Busy => true,
            StoreError::NoSession(_)
            | StoreError::Conflict { .. }
            | StoreError::KeyTaken { .. }
            | StoreError::ExecKeyTaken { .. }
            | StoreError::ForeignOperation(_)
            | StoreError::NoSnapshot(_)
            | StoreError::SnapshotConflict { .. }
            | StoreError::SnapshotNameTaken { .. }
            | StoreError::BadCursor
            | StoreError::Corrupt { .. }
            | StoreError::OutcomeUnknown(_)
            | StoreError::Closed
            | StoreError::Database(_) => false,
        }
    }

    /// True where the call certainly changed nothing.
    pub fn has_no_side_effects(&self) -> bool {
        match self {
            // A closing store may have taken a change and have had no time to answer.
            StoreError::OutcomeUnknown(_) | StoreError::Closed => false,
            StoreError::NoSpace
            | StoreError::Busy
            | StoreError::NoSession(_)
            | StoreError::Conflict { .. }
            | StoreError::KeyTaken { .. }
            | StoreError::ExecKeyTaken { .. }
            | StoreError::ForeignOperation(_)
            | StoreError::NoSnapshot(_)
            | StoreError::SnapshotConflict { .. }
            | StoreError::SnapshotNameTaken { .. }
            | StoreError::BadCursor
            | StoreError::Corrupt { .. }
            | StoreError::Database(_) => true,
        }
    }
}
