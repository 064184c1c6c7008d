//! Why a command failed, as one sentence and an exit status.

use api_types::{Problem, ProblemCode};
use std::{fmt, process::ExitCode};

/// Exit statuses of every command but those that pass on another program's.
pub const FAILED: u8 = 1;
pub const USAGE: u8 = 2;
pub const NOT_FOUND: u8 = 3;
pub const REFUSED: u8 = 4;
pub const CONFLICT: u8 = 5;
/// `EX_UNAVAILABLE` of sysexits(3).
pub const UNREACHABLE: u8 = 69;

/// Exit status of `exec`, `run` and `attach` where they themselves failed, as Docker has it.
pub const OURS: u8 = 125;

/// A failed command.
#[derive(Debug)]
pub struct Failure {
    /// What the process exits with.
    pub status: u8,
    /// What happened, to which thing, and what to do next.
    pub message: String,
    /// What the server said, where it was the server.
    pub problem: Option<Box<Problem>>,
}

/// What commands answer.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// Something didn't work.
    pub fn failed(message: impl Into<String>) -> Failure {
        Failure { status: FAILED, message: message.into(), problem: None }
    }

    /// The command line asks for something that can't be.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { status: USAGE, message: message.into(), problem: None }
    }

    /// There is no such thing.
    pub fn not_found(message: impl Into<String>) -> Failure {
        Failure { status: NOT_FOUND, message: message.into(), problem: None }
    }

    /// It contradicts how things stand.
    pub fn conflict(message: impl Into<String>) -> Failure {
        Failure { status: CONFLICT, message: message.into(), problem: None }
    }

    /// Nobody answers at the server's address.
    pub fn unreachable(message: impl Into<String>) -> Failure {
        Failure { status: UNREACHABLE, message: message.into(), problem: None }
    }

    /// The server refused or failed.
    pub fn of_problem(problem: Problem) -> Failure {
        let hint = match problem.code {
            ProblemCode::Unauthorized => " — give a token with --token or DORMOUSE_TOKEN",
            _ => "",
        };
        Failure { status: status_of(&problem), message: format!("{}{hint}", problem.detail), problem: Some(Box::new(problem)) }
    }

    /// The same failure with the status of `exec`, `run` and `attach`.
    pub fn into_ours(mut self) -> Failure {
        self.status = OURS;
        self
    }

    /// True where trying again later can help.
    pub fn is_passing(&self) -> bool {
        self.status == UNREACHABLE || self.problem.as_ref().is_some_and(|p| p.retryable || p.status >= 500)
    }

    /// Writes the failure to standard error and gives the process its status.
    pub fn report(&self, json: bool) -> ExitCode {
        if json {
            let value = match &self.problem {
                Some(problem) => serde_json::to_value(problem).unwrap_or_default(),
                None => serde_json::json!({ "code": self.word(), "detail": self.message }),
            };
            eprintln!("{value}");
        } else {
            eprintln!("dormouse: {}", self.message);
        }
        ExitCode::from(self.status)
    }

    fn word(&self) -> &'static str {
        match self.status {
            USAGE => "usage",
            NOT_FOUND => "not_found",
            REFUSED => "refused",
            CONFLICT => "conflict",
            UNREACHABLE => "unreachable",
            _ => "failed",
        }
    }
}

fn status_of(problem: &Problem) -> u8 {
    match problem.status {
        400 => USAGE,
        401 | 403 => REFUSED,
        404 | 410 => NOT_FOUND,
        409 | 423 => CONFLICT,
        _ => FAILED,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Failure::failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_those_of_the_contract() {
        for (code, status) in [
            (ProblemCode::BadRequest, 2),
            (ProblemCode::NotBuilt, 2),
            (ProblemCode::Unauthorized, 4),
            (ProblemCode::Forbidden, 4),
            (ProblemCode::NotFound, 3),
            (ProblemCode::Deleted, 3),
            (ProblemCode::KeyConflict, 5),
            (ProblemCode::Held, 5),
            (ProblemCode::NotRunning, 1),
            (ProblemCode::NoSpace, 1),
        ] {
            assert_eq!(Failure::of_problem(Problem::new(code, "x")).status, status, "{code:?}");
        }
        assert_eq!(Failure::unreachable("x").status, 69);
        assert_eq!(Failure::not_found("x").into_ours().status, 125);
    }
}
