//! Failures as they travel: a code that programs act on and a sentence that people read.

use serde::{Deserialize, Serialize};

/// What went wrong, in a word. Unknown words from a newer peer read as [`Code::Internal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// A path, program, exec or terminal that isn't there.
    NotFound,
    /// A program that is there and can't be run (126).
    NotExecutable,
    /// A working directory that isn't there or is none.
    BadWorkingDirectory,
    /// A user that isn't known inside.
    UnknownUser,
    NotADirectory,
    IsADirectory,
    /// Not a regular file: a FIFO, socket or device.
    NotRegular,
    NotEmpty,
    Exists,
    PermissionDenied,
    NoSpace,
    /// Malformed: a NUL in a path, an empty argv, a name that is too long.
    Invalid,
    TooManyLinks,
    /// The exec, terminal or stream has ended.
    Ended,
    /// Someone else holds what was asked for: a writer's role, an operation.
    Busy,
    /// The guest or runtime did not answer in time; it may still do what was asked.
    Unresponsive,
    /// The memory can't be saved as things stand; the message names process and file.
    Unsaveable,
    /// The sandbox has ended.
    SandboxGone,
    /// The other side is older and doesn't know this request.
    Unsupported,
    /// The other side broke the protocol.
    Protocol,
    #[serde(other)]
    Internal,
}

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct WireError {
    pub code: Code,
    /// What happened, to which thing, and what to do next.
    pub message: String,
}

impl WireError {
    /// An error from its two parts.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl Code {
    /// The nearest code for an operating-system error on a file.
    pub fn of_io(error: &std::io::Error) -> Code {
        use std::io::ErrorKind as K;
        match error.kind() {
            K::NotFound => Code::NotFound,
            K::PermissionDenied => Code::PermissionDenied,
            K::AlreadyExists => Code::Exists,
            K::NotADirectory => Code::NotADirectory,
            K::IsADirectory => Code::IsADirectory,
            K::DirectoryNotEmpty => Code::NotEmpty,
            K::StorageFull | K::QuotaExceeded | K::FileTooLarge => Code::NoSpace,
            K::InvalidInput | K::InvalidFilename => Code::Invalid,
            _ => Code::Internal,
        }
    }
}
