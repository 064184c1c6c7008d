//! Why the engine refused or failed, and what a caller may do about it.

use crate::ByteStream;
use model::{ExecId, OperationId, OperationKind, SessionId, SnapshotId, Timestamp};
use store::StoreError;
use wire::{Code, WireError, records::Unsaveable};

/// Why a request to the engine was not carried out, or not to its end.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("there is no {what}")]
    NotFound { what: String },
    #[error("'{text}' could be several sessions: {}", ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Ambiguous { text: String, ids: Vec<SessionId> },
    #[error("session {session} was deleted at {at}{}", because(reason))]
    Deleted { session: SessionId, at: Timestamp, reason: String },
    #[error("the time of session {session} was over at {at}")]
    Expired { session: SessionId, at: Timestamp, reason: String },
    #[error("session {session} is paused; unpause it first")]
    Paused { session: SessionId },
    /// Stopped, or on its way there.
    #[error("session {session} isn't running{}; start it, or ask with start=true", because(reason))]
    NotRunning { session: SessionId, reason: String },
    #[error("session {session} has no saved memory{}; start it to boot it afresh on its disk", because(reason))]
    NoMemorySnapshot { session: SessionId, reason: String },
    #[error("session {session} is ephemeral: its memory is never written to storage")]
    Ephemeral { session: SessionId },
    #[error("the key belongs to session {session}, which differs in: {}", fields.join(", "))]
    KeyConflict { session: SessionId, fields: Vec<String> },
    #[error("snapshot {snapshot} was deleted at {at}")]
    SnapshotDeleted { snapshot: SnapshotId, at: Timestamp },
    #[error("'{text}' could be several snapshots: {}", ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    AmbiguousSnapshot { text: String, ids: Vec<SnapshotId> },
    #[error("the name '{name}' belongs to snapshot {snapshot}")]
    NameTaken { name: String, snapshot: SnapshotId },
    /// A memory that this machine can't go on with. Its disk can be used: a fork or a rollback without memory.
    #[error("the memory can't be loaded here: {detail}")]
    Unloadable { session: Option<SessionId>, detail: String },
    /// Stored bytes are not what was written, or are gone. Nothing was begun with them.
    #[error("what is stored is damaged: {detail}")]
    Damaged { detail: String },
    /// The object store can't be used, or not now. Nothing was begun.
    #[error("{detail}")]
    ObjectStore { detail: String, retryable: bool },
    #[error("the exec key belongs to exec {exec}, which runs another command")]
    ExecKeyConflict { session: SessionId, exec: ExecId },
    /// The session failed for good.
    #[error("session {session} has failed: {reason}")]
    Failed { session: SessionId, reason: String },
    #[error("{detail}")]
    Conflict { detail: String },
    /// What idleness asked for is not done: something has just begun.
    #[error("session {session} isn't idle any more")]
    NotIdle { session: SessionId },
    /// Another operation holds the session. The same request can succeed soon.
    #[error("session {session} is held by an operation ({kind}); try again shortly")]
    Held { session: SessionId, operation: OperationId, kind: OperationKind },
    /// Alive, but without an answer in time; what was asked may still happen.
    #[error("session {session} didn't answer in time; it may still do what was asked")]
    Unresponsive { session: SessionId },
    #[error("the memory of session {session} can't be saved as things stand: {}", list(items, detail))]
    Unsaveable { session: SessionId, items: Vec<Unsaveable>, detail: String },
    /// It was asked, and nobody knows whether it did it: its sandbox or supervisor went, or gave no answer in time.
    #[error("session {session} gave no answer{}; what was asked may have been done", because(detail))]
    Lost { session: SessionId, detail: String },
    #[error("storage is full: {detail}")]
    NoSpace { detail: String },
    /// Nothing was created.
    #[error("there is no room for another sandbox now: {detail}")]
    NoCapacity { detail: String },
    /// A limit of the token that the session belongs to. Nothing was created.
    #[error("{detail}")]
    LimitExceeded { detail: String },
    /// The same for its limit of disk.
    #[error("{detail}")]
    DiskLimit { detail: String },
    #[error("the server is going down")]
    ShuttingDown,
    #[error("{field}: {detail}")]
    Invalid { field: String, detail: String },
    #[error("'{field}' isn't built yet")]
    NotBuilt { field: String },
    #[error("{detail}")]
    Forbidden { detail: String },
    /// Something in the session said no: a file that isn't there, a program that can't be run.
    #[error("{0}")]
    Inside(WireError),
    /// An operation was tried and failed; the session stands as its state says.
    #[error("nothing listens on port {port} of session {session}")]
    PortClosed { session: SessionId, port: u16 },
    #[error("{kind} of session {session} failed: {detail}")]
    OperationFailed { session: SessionId, operation: OperationId, kind: OperationKind, detail: String },
    #[error("{detail}")]
    Internal { detail: String },
}

fn because(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(" ({reason})") }
}

fn list(items: &[Unsaveable], detail: &str) -> String {
    if items.is_empty() {
        return detail.to_owned();
    }
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl Error {
    /// An error without a better name.
    pub fn internal(detail: impl std::fmt::Display) -> Error {
        Error::Internal { detail: detail.to_string() }
    }

    pub(crate) fn invalid(field: &str, detail: impl std::fmt::Display) -> Error {
        Error::Invalid { field: field.to_owned(), detail: detail.to_string() }
    }

    pub(crate) fn not_found(what: impl std::fmt::Display) -> Error {
        Error::NotFound { what: what.to_string() }
    }

    /// The word that programs act on.
    pub fn code(&self) -> &'static str {
        use Error as E;
        match self {
            E::NotFound { .. } => "not_found",
            E::Ambiguous { .. } | E::Conflict { .. } | E::ExecKeyConflict { .. } | E::NotIdle { .. } => "conflict",
            E::AmbiguousSnapshot { .. } | E::NameTaken { .. } => "conflict",
            E::Unloadable { .. } => "unloadable",
            E::Damaged { .. } => "damaged",
            E::ObjectStore { .. } => "object_store",
            E::Deleted { .. } | E::SnapshotDeleted { .. } => "deleted",
            E::Expired { .. } => "expired",
            E::Paused { .. } => "paused",
            E::NotRunning { .. } => "not_running",
            E::NoMemorySnapshot { .. } => "no_memory_snapshot",
            E::Ephemeral { .. } => "ephemeral",
            E::KeyConflict { .. } => "key_conflict",
            E::Failed { .. } => "failed",
            E::Held { .. } => "held",
            E::Unresponsive { .. } => "unresponsive",
            E::Unsaveable { .. } => "unsaveable",
            E::Lost { .. } => "lost",
            E::NoSpace { .. } | E::DiskLimit { .. } => "no_space",
            E::LimitExceeded { .. } => "limit_exceeded",
            E::NoCapacity { .. } => "no_capacity",
            E::ShuttingDown => "shutting_down",
            E::Invalid { .. } => "bad_request",
            E::NotBuilt { .. } => "not_built",
            E::Forbidden { .. } => "forbidden",
            E::Inside(error) => inside(error.code).0,
            E::PortClosed { .. } => "port_closed",
            E::OperationFailed { .. } => "operation_failed",
            E::Internal { .. } => "internal",
        }
    }

    /// The HTTP status that says the same.
    pub fn status(&self) -> u16 {
        use Error as E;
        match self {
            E::Invalid { .. } | E::NotBuilt { .. } => 400,
            E::Forbidden { .. } => 403,
            E::NotFound { .. } => 404,
            E::Ambiguous { .. } | E::Conflict { .. } | E::ExecKeyConflict { .. } | E::KeyConflict { .. } => 409,
            E::Paused { .. } | E::Failed { .. } | E::NotIdle { .. } => 409,
            E::AmbiguousSnapshot { .. } | E::NameTaken { .. } => 409,
            E::Unloadable { .. } | E::Damaged { .. } => 422,
            E::ObjectStore { .. } => 503,
            E::Deleted { .. } | E::Expired { .. } | E::SnapshotDeleted { .. } => 410,
            E::NotRunning { .. } | E::NoMemorySnapshot { .. } | E::Ephemeral { .. } | E::Unsaveable { .. } => 422,
            E::Held { .. } => 423,
            E::LimitExceeded { .. } => 429,
            // Accepted, so never one of the server's own statuses: those are sent again by clients and by proxies.
            E::OperationFailed { .. } | E::Lost { .. } => 422,
            E::Internal { .. } => 500,
            E::NoCapacity { .. } | E::ShuttingDown => 503,
            E::Unresponsive { .. } => 504,
            E::PortClosed { .. } => 502,
            E::NoSpace { .. } | E::DiskLimit { .. } => 507,
            E::Inside(error) => inside(error.code).1,
        }
    }

    /// True where the same request can succeed later without anything being changed.
    pub fn is_retryable(&self) -> bool {
        use Error as E;
        match self {
            E::Held { .. } | E::Unresponsive { .. } | E::NoCapacity { .. } | E::ShuttingDown => true,
            E::LimitExceeded { .. } => true,
            E::DiskLimit { .. } => false,
            E::AmbiguousSnapshot { .. } | E::NameTaken { .. } | E::Unloadable { .. } | E::Damaged { .. } => false,
            E::ObjectStore { retryable, .. } => *retryable,
            E::Inside(error) => matches!(error.code, Code::Busy | Code::Unresponsive),
            E::NotFound { .. } | E::Ambiguous { .. } | E::Deleted { .. } | E::Expired { .. } | E::Paused { .. } => false,
            E::NotIdle { .. } | E::SnapshotDeleted { .. } => false,
            E::NotRunning { .. } | E::NoMemorySnapshot { .. } | E::Ephemeral { .. } | E::KeyConflict { .. } => false,
            E::ExecKeyConflict { .. } | E::Failed { .. } | E::Conflict { .. } | E::Unsaveable { .. } | E::Lost { .. } => false,
            E::NoSpace { .. } | E::Invalid { .. } | E::NotBuilt { .. } | E::Forbidden { .. } => false,
            E::OperationFailed { .. } | E::PortClosed { .. } | E::Internal { .. } => false,
        }
    }

    /// True where nothing was changed: the request can be sent again without being carried out twice.
    pub fn has_no_side_effects(&self) -> bool {
        use Error as E;
        match self {
            E::Unresponsive { .. } | E::Lost { .. } | E::NoSpace { .. } => false,
            E::OperationFailed { .. } | E::Internal { .. } => false,
            E::Inside(error) => {
                !matches!(error.code, Code::Unresponsive | Code::NoSpace | Code::SandboxGone | Code::Protocol | Code::Internal)
            }
            E::NotFound { .. } | E::Ambiguous { .. } | E::Deleted { .. } | E::Expired { .. } | E::Paused { .. } => true,
            E::NotIdle { .. } | E::SnapshotDeleted { .. } => true,
            E::NotRunning { .. } | E::NoMemorySnapshot { .. } | E::Ephemeral { .. } | E::KeyConflict { .. } => true,
            E::ExecKeyConflict { .. } | E::Failed { .. } | E::Conflict { .. } | E::Unsaveable { .. } => true,
            E::Held { .. } | E::NoCapacity { .. } | E::ShuttingDown | E::Invalid { .. } => true,
            E::LimitExceeded { .. } | E::DiskLimit { .. } => true,
            E::AmbiguousSnapshot { .. } | E::NameTaken { .. } | E::Unloadable { .. } => true,
            E::Damaged { .. } | E::ObjectStore { .. } => true,
            E::NotBuilt { .. } | E::Forbidden { .. } | E::PortClosed { .. } => true,
        }
    }

    /// The session it is about, where it is about one.
    pub fn session(&self) -> Option<SessionId> {
        use Error as E;
        match self {
            E::Deleted { session, .. }
            | E::Expired { session, .. }
            | E::Paused { session }
            | E::NotRunning { session, .. }
            | E::NoMemorySnapshot { session, .. }
            | E::Ephemeral { session }
            | E::KeyConflict { session, .. }
            | E::ExecKeyConflict { session, .. }
            | E::Failed { session, .. }
            | E::Held { session, .. }
            | E::NotIdle { session }
            | E::Unresponsive { session }
            | E::Unsaveable { session, .. }
            | E::Lost { session, .. }
            | E::PortClosed { session, .. }
            | E::OperationFailed { session, .. } => Some(*session),
            E::Unloadable { session, .. } => *session,
            E::NotFound { .. }
            | E::Damaged { .. }
            | E::ObjectStore { .. }
            | E::Ambiguous { .. }
            | E::SnapshotDeleted { .. }
            | E::AmbiguousSnapshot { .. }
            | E::NameTaken { .. }
            | E::Conflict { .. }
            | E::NoSpace { .. }
            | E::NoCapacity { .. }
            | E::LimitExceeded { .. }
            | E::DiskLimit { .. }
            | E::ShuttingDown
            | E::Invalid { .. }
            | E::NotBuilt { .. }
            | E::Forbidden { .. }
            | E::Inside(_)
            | E::Internal { .. } => None,
        }
    }
}

/// What an error from inside a session is called and answered with outside.
fn inside(code: Code) -> (&'static str, u16) {
    match code {
        Code::NotFound => ("not_found", 404),
        Code::NotADirectory | Code::IsADirectory | Code::NotRegular => ("wrong_file_type", 422),
        Code::NotExecutable | Code::BadWorkingDirectory | Code::UnknownUser => ("bad_request", 400),
        Code::Invalid | Code::TooManyLinks => ("bad_request", 400),
        Code::NotEmpty | Code::Exists => ("conflict", 409),
        Code::PermissionDenied => ("forbidden", 403),
        Code::NoSpace => ("no_space", 507),
        Code::Ended => ("ended", 422),
        Code::Busy => ("held", 423),
        Code::Unresponsive => ("unresponsive", 504),
        Code::Unsaveable => ("unsaveable", 422),
        Code::SandboxGone => ("lost", 422),
        Code::Unsupported => ("not_built", 400),
        Code::Protocol | Code::Internal => ("internal", 500),
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Error {
        match error {
            StoreError::NoSession(id) => Error::not_found(format!("session {id}")),
            StoreError::NoSpace => Error::NoSpace { detail: error.to_string() },
            StoreError::BadCursor => Error::invalid("cursor", error),
            StoreError::Conflict { .. } | StoreError::SnapshotConflict { .. } | StoreError::SnapshotNameTaken { .. } => {
                Error::Conflict { detail: error.to_string() }
            }
            StoreError::NoSnapshot(id) => Error::not_found(format!("snapshot {id}")),
            StoreError::KeyTaken { holder } => Error::KeyConflict { session: holder, fields: vec!["key".into()] },
            other => Error::internal(other),
        }
    }
}

/// Why an engine couldn't be opened on a data directory.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("can't {what} {}: {source}", path.display())]
    Io { what: &'static str, path: std::path::PathBuf, source: std::io::Error },
    #[error("the store can't be read: {0}")]
    Store(#[from] StoreError),
    #[error("{0}")]
    Other(String),
}

impl std::fmt::Debug for crate::FileAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileAnswer").field("reply", &self.reply).field("bytes", &self.bytes.as_ref().map(stream_name)).finish()
    }
}

fn stream_name(_: &ByteStream) -> &'static str {
    "stream"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_never_promises_what_it_cant_keep() {
        let session = SessionId::new();
        let lost = Error::Lost { session, detail: String::new() };
        assert!(!lost.has_no_side_effects() && !lost.is_retryable() && lost.status() == 422);
        let (operation, detail) = (OperationId::new(), String::new());
        let failed = Error::OperationFailed { session, operation, kind: OperationKind::Wake, detail };
        assert!(!failed.has_no_side_effects() && !failed.is_retryable() && failed.status() == 422);
        let held = Error::Held { session, operation: OperationId::new(), kind: OperationKind::Wake };
        assert!(held.has_no_side_effects() && held.is_retryable() && held.status() == 423);
        let gone = Error::Inside(WireError::new(Code::SandboxGone, "x"));
        assert!(!gone.has_no_side_effects());
        assert_eq!((gone.code(), gone.status()), ("lost", 422));
    }
}
