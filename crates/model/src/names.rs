//! Names that clients choose, checked once where they come in.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Why a name was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("a {what} has 1 to {max} characters, this one has {len}")]
    Length { what: &'static str, max: usize, len: usize },
    #[error("a {what} can't contain {bad:?}")]
    Character { what: &'static str, bad: char },
    #[error("a port is a number from 1 to 65535")]
    Port,
    #[error("a {what} can't look like an id")]
    LooksLikeId { what: &'static str },
}

/// The name by which a client gets or creates a session: 1–200 printable characters without
/// `/` or blank, unique on the server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Key(String);

impl Key {
    /// The longest key, in characters.
    pub const MAX_CHARS: usize = 200;

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A service's name: 1–64 of `A-Z a-z 0-9 . _ - @`, not beginning with a dot (it names a folder).
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ServiceName(String);

impl ServiceName {
    /// The longest name, in characters.
    pub const MAX_CHARS: usize = 64;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A TCP port: 1–65535.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct PortNumber(u16);

impl PortNumber {
    /// The number.
    pub fn get(self) -> u16 {
        self.0
    }
}

impl TryFrom<u32> for PortNumber {
    type Error = NameError;
    fn try_from(value: u32) -> Result<Self, NameError> {
        match u16::try_from(value) {
            Ok(port) if port > 0 => Ok(Self(port)),
            _ => Err(NameError::Port),
        }
    }
}

impl From<PortNumber> for u32 {
    fn from(port: PortNumber) -> u32 {
        port.0.into()
    }
}

pub(crate) fn check_length(what: &'static str, text: &str, max: usize) -> Result<(), NameError> {
    let len = text.chars().count();
    if len == 0 || len > max {
        return Err(NameError::Length { what, max, len });
    }
    Ok(())
}

/// Checks a name that people see: printable characters without `/` or blank.
pub(crate) fn check_printable(what: &'static str, text: &str, max: usize) -> Result<(), NameError> {
    check_length(what, text, max)?;
    match text.chars().find(|c| *c == '/' || c.is_whitespace() || c.is_control() || is_invisible(*c)) {
        Some(bad) => Err(NameError::Character { what, bad }),
        None => Ok(()),
    }
}

impl TryFrom<String> for Key {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        check_printable("key", &text, Self::MAX_CHARS)?;
        Ok(Self(text))
    }
}

impl TryFrom<String> for ServiceName {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        check_length("service name", &text, Self::MAX_CHARS)?;
        let first_dot = text.starts_with('.').then_some('.');
        let bad = first_dot.or_else(|| text.chars().find(|c| !(c.is_ascii_alphanumeric() || "._-@".contains(*c))));
        match bad {
            Some(bad) => Err(NameError::Character { what: "service name", bad }),
            None => Ok(Self(text)),
        }
    }
}

/// Characters that print as nothing or turn the direction of text: two keys that look the same
/// must be the same.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{00AD}' | '\u{061C}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{206F}' | '\u{FEFF}' | '\u{FFF9}'..='\u{FFFB}')
}

macro_rules! text_names {
    ($($name:ident),+) => {$(
        impl From<$name> for String {
            fn from(name: $name) -> String { name.0 }
        }
        impl FromStr for $name {
            type Err = NameError;
            fn from_str(text: &str) -> Result<Self, NameError> { text.to_owned().try_into() }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(&self.0) }
        }
    )+};
}
text_names!(Key, ServiceName);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_printable_and_unambiguous() {
        for good in ["a", "user-42:repo#7", "日本語", &"x".repeat(200)] {
            assert!(good.parse::<Key>().is_ok(), "{good}");
        }
        for bad in ["", "a/b", "a b", "a\nb", "a\u{200B}b", "\u{202E}gpj", &"x".repeat(201)] {
            assert!(bad.parse::<Key>().is_err(), "{bad}");
        }
    }

    #[test]
    fn service_names_can_be_folder_names() {
        assert!("web@1.service".parse::<ServiceName>().is_ok());
        for bad in ["..", ".x", "a/b", "a b", ""] {
            assert!(bad.parse::<ServiceName>().is_err(), "{bad}");
        }
    }
}
