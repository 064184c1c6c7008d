//! The object store: what uses space, whether it is intact, what was removed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How storage stands. All sizes in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Storage {
    /// A folder, or `s3://bucket/prefix`.
    pub object_store: String,
    pub encrypted: bool,
    /// Why nothing can be packed at present; `null`: all is well.
    pub trouble: Option<String>,
    /// Sessions and snapshots that the object store has.
    pub packed: u64,
    /// Those of them whose files were given up on the server's machine.
    pub away: u64,
    /// Files on the server's machine of what the object store has, too; and how many there may be.
    pub cache_used_bytes: u64,
    pub cache_limit_bytes: u64,
    /// Everything in the object store, as it lies there: compressed.
    pub stored_bytes: u64,
    /// What is packed, as if each session and snapshot had its own copy, and with what they share counted once; both before
    /// compression.
    pub whole_bytes: u64,
    pub shared_once_bytes: u64,
    pub chunks: u64,
    pub packs: u64,
    pub manifests: u64,
    /// What a collection would free, about.
    pub collectable_bytes: u64,
}

/// What a collection removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StorageCollected {
    pub manifests_removed: u64,
    pub chunks_removed: u64,
    pub packs_removed: u64,
    pub packs_rewritten: u64,
    pub bytes_freed: u64,
    /// Manifests of sessions and snapshots that this server doesn't know: they stay.
    pub unknown_manifests: u64,
}

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StorageChecked {
    /// True where everything is as it was written.
    pub intact: bool,
    pub chunks: u64,
    pub plain_bytes: u64,
    /// Objects that aren't as they were written, and what is wrong.
    pub damages: Vec<String>,
    /// What can't be restored whole any more, and why.
    pub affected: Vec<String>,
}

/// `POST /v1/storage/backup`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BackupRequest {
    /// Where to: a folder of the server's machine, or `s3://bucket/prefix`. The server's own object store where missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// What a backup has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Backup {
    /// Its name, for `dormouse restore`.
    pub name: String,
    pub place: String,
    pub sessions: u64,
    pub snapshots: u64,
    /// What could not be kept, and why.
    #[serde(default)]
    pub failed: Vec<String>,
}

/// `POST /v1/storage/rotate-key`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RotateKey {
    /// The file on the server's machine with the new key: at least 32 random bytes.
    pub key_file: String,
}
