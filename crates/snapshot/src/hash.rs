//! Content addresses: what a tree, a program or a layer is called everywhere.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A BLAKE3 hash, written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Hash([u8; 32]);

/// Text that is not a content address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a content address: expected 64 lower-case hexadecimal digits")]
pub struct HashError(String);

impl Hash {
    /// The address of some bytes.
    pub fn of(bytes: &[u8]) -> Hash {
        blake3::hash(bytes).into()
    }
}

impl From<blake3::Hash> for Hash {
    fn from(hash: blake3::Hash) -> Self {
        Hash(*hash.as_bytes())
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hash({self})")
    }
}

impl FromStr for Hash {
    type Err = HashError;
    /// Takes the one spelling only: an address is a file name, and there must not be two for one thing.
    fn from_str(text: &str) -> Result<Self, HashError> {
        let bad = || HashError(text.chars().take(80).collect());
        if text.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(bad());
        }
        blake3::Hash::from_hex(text).map(Into::into).map_err(|_| bad())
    }
}

impl TryFrom<String> for Hash {
    type Error = HashError;
    fn try_from(text: String) -> Result<Self, HashError> {
        text.parse()
    }
}

impl From<Hash> for String {
    fn from(hash: Hash) -> String {
        hash.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_spelling_is_an_address() {
        let hash = Hash::of(b"x");
        let text = hash.to_string();
        assert_eq!(text.parse(), Ok(hash));
        for bad in ["", "..", &text.to_uppercase(), &text[1..], &format!("{text}0"), &format!("{}/", &text[1..])] {
            assert!(bad.parse::<Hash>().is_err(), "{bad}");
        }
    }
}
