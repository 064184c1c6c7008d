//! Instants as whole milliseconds in stored documents.
//!
//! The text form of an instant ends with the year 9999, while arithmetic on limits saturates far
//! beyond: written as text, such a row could not be read again.

use model::Timestamp;
use serde::{Deserialize, Deserializer, Serializer};

pub(crate) fn serialize<S: Serializer>(at: &Timestamp, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_i64(at.0)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Timestamp, D::Error> {
    i64::deserialize(d).map(Timestamp)
}

/// The same where there may be none.
pub(crate) mod option {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(at: &Option<Timestamp>, s: S) -> Result<S::Ok, S::Error> {
        match at {
            Some(at) => s.serialize_some(&at.0),
            None => s.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Timestamp>, D::Error> {
        Ok(Option::<i64>::deserialize(d)?.map(Timestamp))
    }
}
