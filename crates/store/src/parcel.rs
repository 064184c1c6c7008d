//! Where the blob store has what otherwise lies in files beside the sessions.

use model::{Generation, Timestamp};
use serde::{Deserialize, Serialize};

/// What the blob store has of a snapshot, or of a session that sleeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parcel {
    /// The name of its manifest there.
    pub manifest: String,
    #[serde(with = "crate::millis")]
    pub packed_at: Timestamp,
    /// Of a session: the sandbox whose disk and memory it has.
    pub generation: Generation,
    /// Of a session: the upper directory that it has; see [`SessionRow::disk_epoch`](crate::SessionRow).
    #[serde(default)]
    pub disk_epoch: u64,
    /// Bytes of all that it has, as they were read.
    #[serde(default)]
    pub plain_bytes: u64,
    /// Of a session: those of its own part of the disk.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Those of files that nothing else has: its own part of the disk, memory, journals.
    #[serde(default)]
    pub own_bytes: u64,
    /// Those that nothing else had in the store when it was packed, before compression.
    #[serde(default)]
    pub new_bytes: u64,
    /// The files beside the sessions were given up: they are fetched before anything needs them.
    #[serde(default)]
    pub is_away: bool,
}
