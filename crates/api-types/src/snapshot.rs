//! Snapshots, forks and rollbacks.

use crate::{Problem, Session};
use model::{Generation, Runtime, SessionId, SnapshotId, SnapshotName, SnapshotState, Timestamp};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, str::FromStr};
use utoipa::ToSchema;

/// `POST …/snapshots`. Everything is optional.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NewSnapshot {
    /// 1–100 printable characters without `/` or blank, unique on the server. A name makes it stay until it is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, max_length = 100)]
    pub name: Option<SnapshotName>,
    /// How long it is kept. Where missing, until it is deleted; without a name, for 7 days after its session is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_seconds: Option<u64>,
    /// `false` leaves the memory out, so that it is a snapshot of the disk alone. True where missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
    /// Names and values of your own.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// An immutable copy of a session at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    #[schema(value_type = String, format = "uuid")]
    pub id: SnapshotId,
    /// What it was taken of. That session may be gone.
    #[schema(value_type = String, format = "uuid")]
    pub session_id: SessionId,
    pub name: Option<String>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// `taking`, `ready`, `failed` or `deleted`.
    #[schema(value_type = String, example = "ready")]
    pub state: SnapshotState,
    /// Why it failed or was deleted.
    #[serde(default)]
    pub reason: Option<String>,
    /// The session's generation when it was taken.
    #[schema(value_type = u64)]
    pub generation: Generation,
    /// True where it has memory: what is made from it goes on where it was. Without, it is booted afresh on its disk.
    pub memory: bool,
    /// All that a restore needs, the template left out.
    pub size_bytes: u64,
    /// What nothing else shared when it was taken.
    pub unique_bytes: u64,
    #[serde(default)]
    pub memory_bytes: u64,
    /// The snapshot before it: its session's latest, or the one that its session was made from or set back to.
    #[schema(value_type = Option<String>, format = "uuid")]
    pub parent_id: Option<SnapshotId>,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// When it is deleted; `null`: not by itself.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub keep_until: Option<Timestamp>,
    /// What it was taken for: `user`, or `fork` or `rollback`, which take one first.
    #[serde(default)]
    pub taken_by: String,
    pub requires: SnapshotRequires,
    /// How long its session stood still for it.
    #[serde(default)]
    pub paused_ms: u64,
    /// The blob store has it whole.
    #[serde(default)]
    pub packed: bool,
    /// A raw copy lies beside the sessions, so that it needs not be fetched first.
    #[serde(default)]
    pub local: bool,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub deleted_at: Option<Timestamp>,
}

/// What a machine needs to bring a snapshot back. Its disk needs the template alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotRequires {
    #[schema(value_type = String, example = "gvisor")]
    pub runtime: Runtime,
    /// Of `runsc`, where memory was captured.
    #[serde(default)]
    pub runtime_version: Option<String>,
    #[serde(default)]
    pub runtime_hash: Option<String>,
    pub template: String,
    #[serde(default)]
    pub template_hash: Option<String>,
    #[serde(default)]
    pub guest_hash: Option<String>,
    /// Features that the processor must have for its memory to go on.
    #[serde(default)]
    pub cpu_features: Vec<String>,
}

/// How many sessions a fork makes: 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ForkCount(u32);

impl ForkCount {
    /// The most.
    pub const MAX: u32 = 100;

    /// The number.
    pub fn get(self) -> u32 {
        self.0
    }

    fn refuse(found: impl std::fmt::Display) -> String {
        format!("a count is a whole number from 1 to {}, not {found}", Self::MAX)
    }
}

impl Default for ForkCount {
    fn default() -> ForkCount {
        ForkCount(1)
    }
}

impl TryFrom<u64> for ForkCount {
    type Error = String;
    fn try_from(count: u64) -> Result<ForkCount, String> {
        match u32::try_from(count) {
            Ok(count @ 1..=Self::MAX) => Ok(ForkCount(count)),
            _ => Err(Self::refuse(count)),
        }
    }
}

impl FromStr for ForkCount {
    type Err = String;
    fn from_str(text: &str) -> Result<ForkCount, String> {
        let count: u64 = text.parse().map_err(|_| Self::refuse(format_args!("'{text}'")))?;
        count.try_into()
    }
}

impl<'de> Deserialize<'de> for ForkCount {
    /// Takes any JSON first, so that whatever is refused is told the limit.
    fn deserialize<D: Deserializer<'de>>(field: D) -> Result<ForkCount, D::Error> {
        let value = Value::deserialize(field)?;
        let count = value.as_u64().ok_or_else(|| ForkCount::refuse(&value)).and_then(ForkCount::try_from);
        count.map_err(serde::de::Error::custom)
    }
}

/// `POST …/fork`. Everything is optional.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ForkRequest {
    /// How many sessions to make; 1 where missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 100)]
    pub count: Option<ForkCount>,
    /// Added to what the source has.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// The new sessions' name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Not built yet: the source's brokered credentials go along.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secrets: Option<bool>,
    /// `true`: its memory is left alone, and they boot afresh on its disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_only: Option<bool>,
}

/// The answer to a fork: the sessions that were made, and why there are fewer than were asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ForkAnswer {
    pub items: Vec<Session>,
    #[serde(default)]
    pub errors: Vec<Problem>,
}

/// `POST …/rollback`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RollbackRequest {
    #[schema(value_type = String, format = "uuid")]
    pub snapshot_id: SnapshotId,
    /// `true`: its memory is left alone, and the session boots afresh on its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_only: Option<bool>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_object_asks_for_the_defaults() {
        assert_eq!(serde_json::from_str::<NewSnapshot>("{}").unwrap(), NewSnapshot::default());
        assert_eq!(serde_json::from_str::<ForkRequest>("{}").unwrap(), ForkRequest::default());
        for text in [serde_json::to_string(&NewSnapshot::default()), serde_json::to_string(&ForkRequest::default())] {
            assert_eq!(text.unwrap(), "{}");
        }
        assert_eq!(ForkCount::default().get(), 1);
    }

    #[test]
    fn a_count_that_cant_be_is_told_the_limit() {
        for bad in ["0", "-1", "101", "1000000", "1e3", "1.5", "\"3\"", "null", "[]", "99999999999999999999"] {
            let read = serde_json::from_str::<ForkRequest>(&format!(r#"{{"count":{bad}}}"#));
            // A missing one and `null` are the same.
            if bad == "null" {
                assert_eq!(read.unwrap().count, None);
                continue;
            }
            let error = read.unwrap_err().to_string();
            assert!(error.contains("from 1 to 100"), "{bad}: {error}");
        }
        for good in [1, 7, ForkCount::MAX] {
            let read: ForkRequest = serde_json::from_str(&format!(r#"{{"count":{good}}}"#)).unwrap();
            assert_eq!(read.count.map(ForkCount::get), Some(good));
        }
        assert_eq!("12".parse().map(ForkCount::get), Ok(12));
        assert!("0".parse::<ForkCount>().is_err() && "-1".parse::<ForkCount>().is_err() && "x".parse::<ForkCount>().is_err());
    }

    #[test]
    fn what_is_not_known_or_cant_be_is_named() {
        for body in [r#"{"nam":"a"}"#, r#"{"keep":7}"#] {
            assert!(serde_json::from_str::<NewSnapshot>(body).unwrap_err().to_string().contains("unknown field"), "{body}");
        }
        for body in [r#"{"name":"a b"}"#, r#"{"name":""}"#, r#"{"keep_seconds":-1}"#, r#"{"labels":{"a":1}}"#] {
            assert!(serde_json::from_str::<NewSnapshot>(body).is_err(), "{body}");
        }
        for body in ["{}", r#"{"snapshot_id":"latest"}"#, r#"{"snapshot":"01890000-0000-7000-8000-000000000001"}"#] {
            assert!(serde_json::from_str::<RollbackRequest>(body).is_err(), "{body}");
        }
        assert!(serde_json::from_str::<ForkRequest>(r#"{"n":2}"#).unwrap_err().to_string().contains("unknown field `n`"));
    }
}
