//! What snapshots are called and how they stand.

use crate::{NameError, SnapshotId, names::check_printable, session::snake_enum};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

snake_enum! {
    /// Where a snapshot stands.
    SnapshotState {
        /// Its session is being captured.
        Taking => "taking",
        /// Whole, and never changed again.
        Ready => "ready",
        /// It did not come about; `reason` says why.
        Failed => "failed",
        Deleted => "deleted",
    }
}

/// A snapshot's name: 1–100 printable characters without `/` or blank, unique on the server among those that are there.
/// What reads as an id is no name: a word that means a snapshot has one meaning.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotName(String);

impl SnapshotName {
    /// The longest name, in characters.
    pub const MAX_CHARS: usize = 100;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for SnapshotName {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        const WHAT: &str = "snapshot's name";
        check_printable(WHAT, &text, Self::MAX_CHARS)?;
        match text.parse::<SnapshotId>() {
            Ok(_) => Err(NameError::LooksLikeId { what: WHAT }),
            Err(_) => Ok(Self(text)),
        }
    }
}

impl From<SnapshotName> for String {
    fn from(name: SnapshotName) -> String {
        name.0
    }
}

impl FromStr for SnapshotName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        text.to_owned().try_into()
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_printable_and_no_id() {
        for good in ["a", "before-upgrade:2", "日本語", "0198f0c2", &"x".repeat(100)] {
            assert_eq!(good.parse::<SnapshotName>().map(|name| name.to_string()).as_deref(), Ok(good));
        }
        let id = SnapshotId::new().to_string();
        for bad in ["", "a/b", "a b", "a\nb", "a\u{200B}b", &"x".repeat(101), &id, &id.to_uppercase()] {
            assert!(bad.parse::<SnapshotName>().is_err(), "{bad}");
            assert!(serde_json::from_value::<SnapshotName>(bad.into()).is_err(), "{bad}");
        }
    }
}
