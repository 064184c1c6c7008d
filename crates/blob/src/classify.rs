//! What an error of the store means: wait, give up, ask for credentials, make room.

use crate::error::Error;
use object_store::client::{HttpError, HttpErrorKind};
use std::{error::Error as StdError, io, time::Duration};

/// What to make of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// No answer, or an answer that says: not now.
    Transient,
    Refused,
    NoSpace,
    Missing,
    /// The object ends before the part that was asked for.
    OutOfRange,
    /// The store doesn't know the operation.
    Unsupported,
    Other,
}

/// Looks through an error and all that caused it.
pub(crate) fn classify(error: &object_store::Error) -> Class {
    use object_store::Error as E;
    match error {
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => return Class::Refused,
        E::NotImplemented { .. } | E::NotSupported { .. } => return Class::Unsupported,
        // A bucket that isn't there is not found either, but nothing of ours is missing in it.
        E::NotFound { source, .. } if source.to_string().contains("NoSuchBucket") => return Class::Other,
        E::NotFound { .. } => return Class::Missing,
        _ => {}
    }
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(cause) = next {
        if let Some(class) = of_cause(cause) {
            return class;
        }
        next = cause.source();
    }
    let text = error.to_string();
    // The store's type with the status code is private to it; its message has it.
    match status(&text) {
        Some(507) => Class::NoSpace,
        Some(_) if text.contains("StorageFull") || text.contains("QuotaExceeded") => Class::NoSpace,
        Some(501) => Class::Unsupported,
        Some(429 | 408 | 500..=599) => Class::Transient,
        Some(401 | 403) => Class::Refused,
        Some(416) => Class::OutOfRange,
        _ if text.contains("SlowDown") || text.contains("InternalError") => Class::Transient,
        _ if text.contains("Out of range of file") || text.contains("range was invalid") => Class::OutOfRange,
        _ => Class::Other,
    }
}

fn of_cause(cause: &(dyn StdError + 'static)) -> Option<Class> {
    if let Some(http) = cause.downcast_ref::<HttpError>() {
        return Some(match http.kind() {
            HttpErrorKind::Connect | HttpErrorKind::Request | HttpErrorKind::Timeout | HttpErrorKind::Interrupted => {
                Class::Transient
            }
            // An answer that ends in its middle: the server went away.
            HttpErrorKind::Decode | HttpErrorKind::Unknown => Class::Transient,
            _ => Class::Other,
        });
    }
    let source = cause.downcast_ref::<io::Error>()?;
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => Some(Class::NoSpace),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Some(Class::Refused),
        // A network file system that is away for a while.
        io::ErrorKind::StaleNetworkFileHandle | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Some(Class::Transient),
        io::ErrorKind::UnexpectedEof => Some(Class::OutOfRange),
        _ => None,
    }
}

fn status(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

impl Class {
    pub(crate) fn is_transient(self) -> bool {
        self == Class::Transient
    }

    pub(crate) fn is_unsupported(self) -> bool {
        self == Class::Unsupported
    }

    /// The error as callers get it.
    pub(crate) fn into_error(self, store: &str, path: &str, error: &object_store::Error, tried: Duration) -> Error {
        let store = store.to_owned();
        let what = format!("{path}: {}", brief(error));
        match self {
            Class::Transient => Error::Unreachable { store, what, tried },
            Class::Refused => Error::Refused { store, what },
            Class::NoSpace => Error::NoSpace { store, what },
            Class::Missing => Error::Missing { what: format!("the object {path}"), chunk: None },
            Class::OutOfRange => Error::damaged(path, "it is shorter than what was written"),
            Class::Unsupported | Class::Other => Error::Store { store, what },
        }
    }
}

/// The innermost cause says what happened; what stands around it, and answers of many lines, say little more.
fn brief(error: &object_store::Error) -> String {
    let mut innermost: &(dyn StdError + 'static) = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let text = innermost.to_string();
    let text = match (between(&text, "<Code>", "</Code>"), between(&text, "<Message>", "</Message>")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        _ => text,
    };
    let short: String = text.chars().take(300).collect();
    short.replace('\n', " ")
}

fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(from)?;
    rest.split_once(to).map(|(inner, _)| inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(source: impl StdError + Send + Sync + 'static) -> object_store::Error {
        object_store::Error::Generic { store: "test", source: Box::new(source) }
    }

    #[test]
    fn errors_of_the_system_are_known_by_their_kind() {
        for (errno, class) in
            [(28, Class::NoSpace), (122, Class::NoSpace), (13, Class::Refused), (30, Class::Refused), (5, Class::Other)]
        {
            assert_eq!(classify(&generic(io::Error::from_raw_os_error(errno))), class, "errno {errno}");
        }
    }

    #[test]
    fn answers_of_a_server_are_known_by_their_number() {
        let cases = [
            ("503 Service Unavailable: <Code>SlowDown</Code>", Class::Transient),
            ("500 Internal Server Error: ", Class::Transient),
            ("507 Insufficient Storage: ", Class::NoSpace),
            ("400 Bad Request: <Code>XMinioStorageFull</Code>", Class::NoSpace),
            ("501 Not Implemented: ", Class::Unsupported),
            ("400 Bad Request: <Code>InvalidBucketName</Code>", Class::Other),
        ];
        for (answer, class) in cases {
            let error = generic(io::Error::other(format!("Server returned non-2xx status code: {answer}")));
            assert_eq!(classify(&error), class, "{answer}");
        }
    }

    #[test]
    fn long_answers_are_cut_to_what_they_say() {
        let text = "status code: 403: <Error><Code>InvalidAccessKeyId</Code><Message>no such\nkey</Message></Error>";
        assert_eq!(brief(&generic(io::Error::other(text))), "InvalidAccessKeyId: no such key");
    }
}
