//! Quantities with units: offsets, sizes, instants, durations as people write them.

use serde::{Deserialize, Serialize};
use std::{fmt, time::Duration};

/// A position in a byte stream, counted from its first byte ever. Offsets never start again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Offset(pub u64);

impl Offset {
    /// The beginning of every stream.
    pub const ZERO: Offset = Offset(0);

    /// The position `bytes` further on. Saturates: an offset from outside can't overflow.
    pub fn plus(self, bytes: usize) -> Offset {
        Offset(self.0.saturating_add(bytes as u64))
    }

    /// How many bytes lie from `earlier` to here; zero where `earlier` is later.
    pub fn since(self, earlier: Offset) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

/// An instant, in milliseconds since the Unix epoch, UTC. Written as RFC 3339 with milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// The instant `duration` later; saturates.
    pub fn plus(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_add(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)))
    }

    /// How long from `earlier` until this; zero where `earlier` is later.
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(at) => write!(f, "{at:.3}"),
            Err(_) => write!(f, "{}ms", self.0),
        }
    }
}

impl std::str::FromStr for Timestamp {
    type Err = String;
    /// Reads RFC 3339.
    fn from_str(text: &str) -> Result<Self, String> {
        let at: jiff::Timestamp = text.parse().map_err(|e| format!("'{text}' is not an RFC 3339 time: {e}"))?;
        Ok(Timestamp(at.as_millisecond()))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Why a duration or size was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a {what}: write it like {example}")]
pub struct DurationError {
    what: &'static str,
    example: &'static str,
    text: String,
}

/// Reads a duration as people write it: `90`, `90s`, `30m`, `1h30m`, `7d`, `250ms`. A bare number
/// is seconds.
///
/// # Errors
/// Anything else, a negative number, and what doesn't fit into 64-bit milliseconds.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let error = || DurationError { what: "duration", example: "90s, 30m, 1h30m or 7d", text: text.to_owned() };
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(error());
    }
    let mut total_ms: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number: u64 = rest[..digits].parse().map_err(|_| error())?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let unit_ms: u64 = match &rest[..letters] {
            "ms" => 1,
            "" | "s" => 1_000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            "w" => 604_800_000,
            _ => return Err(error()),
        };
        rest = &rest[letters..];
        let part = number.checked_mul(unit_ms).ok_or_else(error)?;
        total_ms = total_ms.checked_add(part).ok_or_else(error)?;
    }
    Ok(Duration::from_millis(total_ms))
}

/// Reads a size as people write it: `512m`, `2g`, `64KiB`, `1000`. Units are powers of 1024.
///
/// # Errors
/// Anything else, and what doesn't fit into 64 bits.
pub fn parse_bytes(text: &str) -> Result<ByteSize, DurationError> {
    let error = || DurationError { what: "size", example: "512m or 2g", text: text.to_owned() };
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let number: u64 = trimmed[..digits].parse().map_err(|_| error())?;
    let shift = match trimmed[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(error()),
    };
    number.checked_mul(1u64 << shift).map(ByteSize).ok_or_else(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_as_people_write_them() {
        let cases =
            [("90", 90_000), ("90s", 90_000), ("30m", 1_800_000), ("1h30m", 5_400_000), ("7d", 604_800_000), ("250ms", 250)];
        for (text, ms) in cases {
            assert_eq!(parse_duration(text).unwrap().as_millis(), ms, "{text}");
        }
        for bad in ["", "-1", "1x", "m", "1.5h", "99999999999999999999", "99999999999999d"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_as_people_write_them() {
        assert_eq!(parse_bytes("512m").unwrap(), ByteSize(512 << 20));
        assert_eq!(parse_bytes("2 GiB").unwrap(), ByteSize(2 << 30));
        assert!(parse_bytes("99999999999t").is_err());
        assert!(parse_bytes("m").is_err());
    }

    #[test]
    fn times_are_rfc_3339_with_milliseconds() {
        let at = Timestamp(1_700_000_000_123);
        assert_eq!(at.to_string(), "2023-11-14T22:13:20.123Z");
        assert_eq!(at.to_string().parse(), Ok(at));
    }
}
