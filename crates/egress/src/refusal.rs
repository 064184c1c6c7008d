//! Why a connection or request doesn't get through, in the forms in which each protocol says so.

use http::StatusCode;
use std::io;

/// A reason and what kind of reason it is. The text is a part of a sentence, and never holds a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct Refusal {
    pub kind: Kind,
    pub reason: String,
}

/// The kinds of refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The policy says no.
    Denied,
    /// What was asked can't be read.
    Malformed,
    /// The request is for another host than its connection.
    Misdirected,
    /// No policy, or no credentials, are known yet.
    NotReady,
    /// The name has no address, or there is no way to it.
    Unreachable,
    /// The other side says no.
    Refused,
    /// The other side says nothing.
    TimedOut,
    /// The other side's certificate, or what it speaks, isn't right.
    Broken,
}

impl Refusal {
    pub fn new(kind: Kind, reason: impl Into<String>) -> Refusal {
        Refusal { kind, reason: reason.into() }
    }

    pub fn denied(reason: impl Into<String>) -> Refusal {
        Refusal::new(Kind::Denied, reason)
    }

    /// What an attempt to connect ended with.
    pub fn connect(error: &io::Error) -> Refusal {
        let kind = match error.kind() {
            io::ErrorKind::ConnectionRefused => Kind::Refused,
            io::ErrorKind::TimedOut => Kind::TimedOut,
            _ => Kind::Unreachable,
        };
        Refusal::new(kind, format!("connecting failed: {error}"))
    }

    /// The status of the HTTP answer.
    pub fn status(&self) -> StatusCode {
        match self.kind {
            Kind::Denied => StatusCode::FORBIDDEN,
            Kind::Malformed => StatusCode::BAD_REQUEST,
            Kind::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Kind::NotReady => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Unreachable | Kind::Refused | Kind::Broken => StatusCode::BAD_GATEWAY,
            Kind::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    /// The reply field of SOCKS5 (RFC 1928, 6).
    pub fn socks(&self) -> u8 {
        match self.kind {
            Kind::Denied | Kind::NotReady | Kind::Misdirected => 0x02,
            Kind::Malformed | Kind::Broken => 0x01,
            Kind::Unreachable => 0x04,
            Kind::Refused => 0x05,
            Kind::TimedOut => 0x06,
        }
    }

    /// One sentence for the program inside and who reads its output.
    pub fn sentence(&self, to: &str) -> String {
        let what = match self.kind {
            Kind::Denied => "is denied by this session's network policy",
            Kind::Malformed => "can't be made as it was asked for",
            Kind::Misdirected => "doesn't carry this request",
            Kind::NotReady => "can't be made yet",
            Kind::Unreachable | Kind::Refused | Kind::TimedOut | Kind::Broken => "failed",
        };
        format!("dormouse: the connection to {to} {what}: {}.\n", self.reason)
    }

    /// The reason in the form of a header's value.
    pub fn header(&self) -> String {
        self.reason.chars().take(300).map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).collect()
    }
}
