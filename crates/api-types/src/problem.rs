//! Errors as they are answered: `application/problem+json` (RFC 9457) with a code that programs act on.

use model::{OperationId, SessionId, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The media type of a [`Problem`].
pub const PROBLEM_JSON: &str = "application/problem+json";

macro_rules! problem_codes {
    ($($(#[$doc:meta])* $name:ident => $text:literal),+ $(,)?) => {
        /// What went wrong, in a word. The list grows; a client takes an unknown word by its status.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
        pub enum ProblemCode {
            $($(#[$doc])* #[serde(rename = $text)] $name,)+
            /// A word that a newer server uses.
            #[serde(other, rename = "unknown")]
            Unknown,
        }

        impl ProblemCode {
            /// Every code that this build answers with.
            pub const ALL: &'static [ProblemCode] = &[$(ProblemCode::$name),+];

            /// The word in the JSON.
            pub fn as_str(self) -> &'static str {
                match self { $(ProblemCode::$name => $text,)+ ProblemCode::Unknown => "unknown" }
            }
        }
    };
}

problem_codes! {
    /// Malformed JSON, a value out of its range, a bad path.
    BadRequest => "bad_request",
    /// A field that no request of this kind has.
    UnknownField => "unknown_field",
    /// A field or value whose part of Dormouse isn't built yet.
    NotBuilt => "not_built",
    /// No token, or none that is valid.
    Unauthorized => "unauthorized",
    /// A valid token that doesn't reach this far.
    Forbidden => "forbidden",
    NotFound => "not_found",
    MethodNotAllowed => "method_not_allowed",
    /// It contradicts how things stand.
    Conflict => "conflict",
    /// The key belongs to a session with another template, runtime, source or snapshot.
    KeyConflict => "key_conflict",
    /// The session failed for good.
    Failed => "failed",
    /// A user paused the session.
    Paused => "paused",
    /// An idempotency key came again with another body.
    IdempotencyConflict => "idempotency_conflict",
    /// The session's time was over.
    Expired => "expired",
    Deleted => "deleted",
    TooLarge => "too_large",
    /// The session is stopped or has ended: it has no sandbox to do this in.
    NotRunning => "not_running",
    /// There is no memory to wake the session with.
    NoMemorySnapshot => "no_memory_snapshot",
    /// Something inside stands in the way of saving the memory; `detail` names process and file.
    Unsaveable => "unsaveable",
    /// An ephemeral session is never written to storage.
    Ephemeral => "ephemeral",
    /// A directory, FIFO, socket or device where a plain file was asked for, or the other way round.
    WrongFileType => "wrong_file_type",
    /// The exec, terminal or input has ended.
    Ended => "ended",
    /// An operation holds the session for a moment.
    Held => "held",
    TooManyRequests => "too_many_requests",
    /// A limit of the token that the session belongs to; `detail` has the numbers. Nothing was created.
    LimitExceeded => "limit_exceeded",
    /// Nothing was created: the machine has no room for it now.
    NoCapacity => "no_capacity",
    /// The server is going down; its successor will answer.
    ShuttingDown => "shutting_down",
    /// Storage is full. What was there before is intact.
    NoSpace => "no_space",
    /// The session is alive and didn't answer in time. What was asked may still happen.
    Unresponsive => "unresponsive",
    /// It was asked, and nobody knows whether it was done: the sandbox ended meanwhile, or gave no answer. `detail` has the
    /// cause. Look before you ask again.
    Lost => "lost",
    /// It was accepted, tried, and failed: `operation_id` and `detail` say how. The session stands as its state says.
    OperationFailed => "operation_failed",
    /// A memory that this machine can't go on with, or something that a newer version wrote. The disk can be used:
    /// `disk_only`.
    Unloadable => "unloadable",
    /// Stored bytes are damaged or gone; `detail` names the file. Nothing was begun with them. Where it is the memory, the
    /// disk can be used: `disk_only`.
    Damaged => "damaged",
    /// Nothing listens on that port of the session.
    PortClosed => "port_closed",
    /// What listens on that port gave no answer that can be passed on.
    BadGateway => "bad_gateway",
    /// The object store can't be reached, or refuses. Nothing was begun.
    ObjectStore => "object_store",
    Internal => "internal",
}

impl ProblemCode {
    /// The HTTP status it is answered with.
    pub fn status(self) -> u16 {
        use ProblemCode as P;
        match self {
            P::BadRequest | P::UnknownField | P::NotBuilt => 400,
            P::Unauthorized => 401,
            P::Forbidden => 403,
            P::NotFound => 404,
            P::MethodNotAllowed => 405,
            P::Conflict | P::KeyConflict | P::Failed | P::Paused | P::IdempotencyConflict => 409,
            P::Expired | P::Deleted => 410,
            P::TooLarge => 413,
            P::NotRunning | P::NoMemorySnapshot | P::Unsaveable | P::Ephemeral | P::WrongFileType | P::Ended => 422,
            P::Lost | P::OperationFailed | P::Unloadable | P::Damaged => 422,
            P::Held => 423,
            P::TooManyRequests | P::LimitExceeded => 429,
            P::Internal | P::Unknown => 500,
            P::PortClosed | P::BadGateway => 502,
            P::NoCapacity | P::ShuttingDown | P::ObjectStore => 503,
            P::Unresponsive => 504,
            P::NoSpace => 507,
        }
    }

    /// True where the same request can succeed later without anything being changed.
    pub fn is_retryable(self) -> bool {
        use ProblemCode as P;
        match self {
            P::Held | P::TooManyRequests | P::LimitExceeded | P::NoCapacity | P::ShuttingDown | P::Unresponsive => true,
            P::ObjectStore => true,
            P::BadRequest | P::UnknownField | P::NotBuilt | P::Unauthorized | P::Forbidden | P::NotFound => false,
            P::MethodNotAllowed | P::Conflict | P::KeyConflict | P::Failed | P::Paused | P::IdempotencyConflict => false,
            P::Expired | P::Deleted | P::TooLarge | P::NotRunning | P::NoMemorySnapshot | P::Unsaveable => false,
            P::Ephemeral | P::WrongFileType | P::Ended | P::NoSpace | P::Lost | P::OperationFailed => false,
            P::Internal | P::Unknown | P::Unloadable | P::Damaged | P::PortClosed | P::BadGateway => false,
        }
    }

    /// True where nothing was changed: the request can be sent again without being carried out twice.
    pub fn has_no_side_effects(self) -> bool {
        use ProblemCode as P;
        match self {
            P::Unresponsive | P::Lost | P::OperationFailed | P::NoSpace | P::Internal | P::Unknown => false,
            P::BadGateway => false,
            P::PortClosed => true,
            P::BadRequest | P::UnknownField | P::NotBuilt | P::Unauthorized | P::Forbidden | P::NotFound => true,
            P::MethodNotAllowed | P::Conflict | P::KeyConflict | P::Failed | P::Paused | P::IdempotencyConflict => true,
            P::Expired | P::Deleted | P::TooLarge | P::NotRunning | P::NoMemorySnapshot | P::Unsaveable => true,
            P::Ephemeral | P::WrongFileType | P::Ended | P::Held | P::TooManyRequests | P::NoCapacity | P::ShuttingDown => true,
            P::LimitExceeded | P::Unloadable | P::Damaged | P::ObjectStore => true,
        }
    }

    /// A short sentence for the code, the same each time.
    pub fn title(self) -> &'static str {
        use ProblemCode as P;
        match self {
            P::BadRequest => "The request can't be understood",
            P::UnknownField => "The request has a field that isn't known",
            P::NotBuilt => "This part of Dormouse isn't built yet",
            P::Unauthorized => "A valid token is needed",
            P::Forbidden => "The token doesn't allow this",
            P::NotFound => "There is no such thing",
            P::MethodNotAllowed => "This address doesn't take this method",
            P::Conflict => "It contradicts how things stand",
            P::KeyConflict => "The key belongs to a different session",
            P::Failed => "The session has failed",
            P::Paused => "The session is paused",
            P::IdempotencyConflict => "The idempotency key was used for another request",
            P::Expired => "The session's time was over",
            P::Deleted => "The session was deleted",
            P::TooLarge => "It is larger than allowed",
            P::NotRunning => "The session isn't running",
            P::NoMemorySnapshot => "There is no saved memory",
            P::Unsaveable => "The session's memory can't be saved as things stand",
            P::Ephemeral => "An ephemeral session is never stored",
            P::WrongFileType => "It is another type of file",
            P::Ended => "It has ended",
            P::Held => "An operation holds the session",
            P::TooManyRequests => "Too many requests",
            P::LimitExceeded => "A limit of the token stands in the way",
            P::NoCapacity => "There is no room for it now",
            P::ShuttingDown => "The server is going down",
            P::NoSpace => "Storage is full",
            P::Unresponsive => "The session didn't answer in time",
            P::Unloadable => "It can't be loaded here",
            P::Damaged => "What is stored is damaged",
            P::ObjectStore => "The object store can't be used",
            P::PortClosed => "Nothing listens on the port",
            P::BadGateway => "The program on the port gave no answer",
            P::Lost => "Nobody knows whether it was done",
            P::OperationFailed => "It was tried and failed",
            P::Internal | P::Unknown => "Something went wrong in the server",
        }
    }
}

/// An error, as it is answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Names the kind of problem: `urn:dormouse:problem:CODE`.
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    pub status: u16,
    pub code: ProblemCode,
    /// What happened, to which thing, and what to do next.
    pub detail: String,
    /// The same request can succeed later.
    pub retryable: bool,
    /// Nothing was changed by the request.
    pub no_side_effects: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = "uuid")]
    pub session_id: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = "uuid")]
    pub operation_id: Option<OperationId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_seconds: Option<u64>,
    /// For 409 `failed` and 410: why the session ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// For 410: when the session ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub at: Option<Timestamp>,
    /// For 400: the field that was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}

impl Problem {
    /// A problem with what its code says of it; `detail` is for this one case.
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Problem {
        Problem {
            kind: format!("urn:dormouse:problem:{}", code.as_str()),
            title: code.title().to_owned(),
            status: code.status(),
            code,
            detail: detail.into(),
            retryable: code.is_retryable(),
            no_side_effects: code.has_no_side_effects(),
            session_id: None,
            operation_id: None,
            retry_after_seconds: None,
            reason: None,
            at: None,
            field: None,
        }
    }

    /// The same, naming the session it is about.
    pub fn of_session(mut self, session: SessionId) -> Problem {
        self.session_id = Some(session);
        self
    }

    /// The same, naming the operation it is about.
    pub fn of_operation(mut self, operation: OperationId) -> Problem {
        self.operation_id = Some(operation);
        self
    }

    /// The same, naming the field that was refused.
    pub fn of_field(mut self, field: impl Into<String>) -> Problem {
        self.field = Some(field.into());
        self
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_words_that_read_back() {
        for code in ProblemCode::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
            assert_eq!(serde_json::from_value::<ProblemCode>(code.as_str().into()).unwrap(), *code);
        }
        assert_eq!(serde_json::from_str::<ProblemCode>("\"from_the_future\"").unwrap(), ProblemCode::Unknown);
    }

    #[test]
    fn what_the_contract_says_of_the_codes_holds() {
        for (code, status, retryable, clean) in [
            (ProblemCode::NotBuilt, 400, false, true),
            (ProblemCode::KeyConflict, 409, false, true),
            (ProblemCode::Expired, 410, false, true),
            (ProblemCode::NotRunning, 422, false, true),
            (ProblemCode::Held, 423, true, true),
            (ProblemCode::NoCapacity, 503, true, true),
            (ProblemCode::NoSpace, 507, false, false),
            (ProblemCode::Unresponsive, 504, true, false),
            (ProblemCode::Lost, 422, false, false),
            (ProblemCode::OperationFailed, 422, false, false),
        ] {
            let problem = Problem::new(code, "x");
            assert_eq!((problem.status, problem.retryable, problem.no_side_effects), (status, retryable, clean), "{code:?}");
        }
    }

    #[test]
    fn an_error_shows_only_what_applies() {
        let json = serde_json::to_value(Problem::new(ProblemCode::NotFound, "no session 'x'")).unwrap();
        let mut names: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["code", "detail", "no_side_effects", "retryable", "status", "title", "type"]);
    }
}
