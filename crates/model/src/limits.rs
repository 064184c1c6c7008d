//! How much the sessions of one access token may take together.

use crate::ByteSize;
use serde::{Deserialize, Serialize};

/// Limits of a token, over all the sessions that it made. `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenLimits {
    /// Sessions that are there, asleep ones too; those that failed don't count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<u64>,
    /// Sessions with a sandbox, or on their way to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_sessions: Option<u64>,
    /// Cores of the sessions that run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Memory of the sessions that run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<ByteSize>,
    /// Disk of the sessions that are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<ByteSize>,
    /// What its sessions' snapshots take that nothing else shared when they were taken, also after their sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_bytes: Option<ByteSize>,
}
