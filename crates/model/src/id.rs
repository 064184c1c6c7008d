//! Identifiers. Each kind is a type of its own, so that one can't be passed as another.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use uuid::Uuid;

/// Text that is not an id of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an id: expected a UUID")]
pub struct IdError(pub String);

macro_rules! uuid_ids {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A fresh id: UUIDv7, so that ids sort by the time they were made (RFC 9562).
            #[allow(clippy::new_without_default)]
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.as_hyphenated().fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            /// Takes the hyphenated form only, in either case: other spellings would make two
            /// names for one thing.
            fn from_str(text: &str) -> Result<Self, IdError> {
                let bad = || IdError(text.chars().take(80).collect());
                if text.len() != 36 {
                    return Err(bad());
                }
                Uuid::try_parse(text).map(Self).map_err(|_| bad())
            }
        }
    )+};
}

uuid_ids! {
    /// The durable thing that a client holds.
    SessionId,
    /// One command run in a session.
    ExecId,
    /// One PTY in a session.
    TerminalId,
    /// One lifecycle change under way.
    OperationId,
    /// An immutable copy of a session at one moment.
    SnapshotId,
    /// An immutable layer of disks: what one session had changed up to one moment.
    LayerId,
    /// An access token; never the token's secret itself.
    TokenId,
}

/// Counts the sandboxes that a session has had, from 1. Every memory image, channel and lease
/// carries it, so that nothing of an older sandbox is taken for the present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl Generation {
    /// The generation of a session's first sandbox.
    pub const FIRST: Generation = Generation(1);

    /// The one after this.
    pub fn next(self) -> Generation {
        Generation(self.0 + 1)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of an event in its session's history: from 1, without holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventSeq(pub u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back_as_it_was_written() {
        let id = SessionId::new();
        assert_eq!(id.to_string().parse::<SessionId>(), Ok(id));
        assert_eq!(id.to_string().to_uppercase().parse::<SessionId>(), Ok(id));
    }

    #[test]
    fn other_spellings_are_refused() {
        for text in ["", "x", "0198f0c2a7b07cc38d6e5f4a3b2c1d00", "{0198f0c2-a7b0-7cc3-8d6e-5f4a3b2c1d00}"] {
            assert!(text.parse::<SessionId>().is_err(), "{text}");
        }
    }
}
