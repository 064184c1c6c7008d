//! Signals by name or number, as `kill` takes them.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use utoipa::ToSchema;

/// A signal number of Linux, 1–64. In JSON a number, or a name with or without `SIG`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "Spelling", into = "i32")]
#[schema(value_type = String, example = "TERM")]
pub struct Signal(i32);

/// Text or a number that names no signal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a signal: use a name such as TERM or a number from 1 to 64")]
pub struct BadSignal(pub String);

#[derive(Deserialize)]
#[serde(untagged)]
enum Spelling {
    Number(i32),
    Name(String),
}

/// Names and numbers on x86-64 and arm64 Linux (signal(7)).
const NAMES: [(&str, i32); 31] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("PWR", 30),
    ("SYS", 31),
];

impl Signal {
    pub const INT: Signal = Signal(2);
    pub const KILL: Signal = Signal(9);
    pub const TERM: Signal = Signal(15);

    /// The number.
    pub fn number(self) -> i32 {
        self.0
    }
}

impl TryFrom<i32> for Signal {
    type Error = BadSignal;
    fn try_from(number: i32) -> Result<Signal, BadSignal> {
        if (1..=64).contains(&number) { Ok(Signal(number)) } else { Err(BadSignal(number.to_string())) }
    }
}

impl FromStr for Signal {
    type Err = BadSignal;
    fn from_str(text: &str) -> Result<Signal, BadSignal> {
        if let Ok(number) = text.parse::<i32>() {
            return number.try_into();
        }
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("SIG").unwrap_or(&upper);
        let known = NAMES.iter().find(|(known, _)| *known == name);
        known.map(|(_, number)| Signal(*number)).ok_or_else(|| BadSignal(text.chars().take(40).collect()))
    }
}

impl TryFrom<Spelling> for Signal {
    type Error = BadSignal;
    fn try_from(spelling: Spelling) -> Result<Signal, BadSignal> {
        match spelling {
            Spelling::Number(number) => number.try_into(),
            Spelling::Name(name) => name.parse(),
        }
    }
}

impl From<Signal> for i32 {
    fn from(signal: Signal) -> i32 {
        signal.0
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&signal_name(self.0))
    }
}

/// The signal's name, `SIGTERM`; one without a name is `signal 34`.
pub fn signal_name(number: i32) -> String {
    match NAMES.iter().find(|(_, known)| *known == number) {
        Some((name, _)) => format!("SIG{name}"),
        None => format!("signal {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_taken() {
        for (text, number) in [("TERM", 15), ("SIGKILL", 9), ("int", 2), ("9", 9), ("34", 34)] {
            assert_eq!(text.parse::<Signal>().map(Signal::number), Ok(number), "{text}");
        }
        for bad in ["", "SIG", "NOPE", "0", "-9", "65"] {
            assert!(bad.parse::<Signal>().is_err(), "{bad}");
        }
        assert_eq!(serde_json::from_str::<Signal>("\"HUP\"").unwrap().number(), 1);
        assert_eq!(serde_json::from_str::<Signal>("15").unwrap().to_string(), "SIGTERM");
        assert!(serde_json::from_str::<Signal>("0").is_err());
    }
}
