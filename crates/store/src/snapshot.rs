//! Snapshots as they are kept.
//!
//! A snapshot is written together with its session where it is made, by [`crate::Sessions::commit_all`], and by itself
//! from then on: it outlives its session. Each change is made onto the revision that its author read, as with sessions.

use crate::{Cursor, Fut, Page, Parcel, Revision};
use model::{Generation, LayerId, Runtime, SessionId, SnapshotId, SnapshotName, SnapshotState, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Everything that is kept of a snapshot.
///
/// Its JSON form is what a database stores; a field that is added needs a default, so that older rows can still be read.
/// It is not the JSON of the API.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotRow {
    pub id: SnapshotId,
    /// As it was when this row was read; a change is refused where it isn't any more. Zero: not stored yet.
    #[serde(skip)]
    pub revision: Revision,
    /// What it was taken of. That session may be gone.
    pub session_id: SessionId,
    /// The token that its session belongs to.
    #[serde(default)]
    pub owner_token: Option<String>,
    /// Leads to this snapshot while it is being taken or ready.
    #[serde(default)]
    pub name: Option<SnapshotName>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    pub state: SnapshotState,
    /// Why it failed or was deleted.
    #[serde(default)]
    pub reason: Option<String>,
    /// The session's generation when it was taken.
    pub generation: Generation,
    /// True where memory was captured, too.
    #[serde(default)]
    pub memory: bool,
    /// All that a restore needs: disk above the template, and memory.
    #[serde(default)]
    pub size_bytes: u64,
    /// What nothing else shared when it was taken.
    #[serde(default)]
    pub unique_bytes: u64,
    /// Of the memory image.
    #[serde(default)]
    pub memory_bytes: u64,
    /// The session's snapshot before it, or the one that its session was forked from or rolled back to.
    #[serde(default)]
    pub parent_id: Option<SnapshotId>,
    #[serde(with = "crate::millis")]
    pub created_at: Timestamp,
    /// It is deleted then; `None`: it stays until somebody deletes it.
    #[serde(default, with = "crate::millis::option")]
    pub keep_until: Option<Timestamp>,
    /// What it was taken for: `user`, `rollback`, `fork` …
    #[serde(default)]
    pub taken_by: String,
    pub runtime: Runtime,
    /// The template's name and the hashes of all that its memory was made with.
    pub template: String,
    #[serde(default)]
    pub template_hash: Option<String>,
    #[serde(default)]
    pub guest_hash: Option<String>,
    #[serde(default)]
    pub runsc_hash: Option<String>,
    #[serde(default)]
    pub runsc_version: Option<String>,
    /// What a processor must have for its memory to go on.
    #[serde(default)]
    pub cpu_features: Vec<String>,
    /// Its disk above the guest's layer and the template, top first: its own layer, then those that its session had.
    #[serde(default)]
    pub layers: Vec<LayerId>,
    /// Which of its session's upper directories its own layer was taken of; see [`SessionRow::disk_epoch`](crate::SessionRow).
    #[serde(default)]
    pub disk_epoch: u64,
    /// What the blob store has of it.
    #[serde(default)]
    pub parcel: Option<Parcel>,
    /// How long the session stood still for it.
    #[serde(default)]
    pub paused_ms: u64,
    /// The session's row as it was, whole: what a new session from it begins with.
    #[serde(default)]
    pub template_row: Value,
    /// The records of what ran in it, which goes on where its memory does.
    #[serde(default)]
    pub works: Value,
    #[serde(default, with = "crate::millis::option")]
    pub deleted_at: Option<Timestamp>,
    /// Room for parts that need no column of their own.
    #[serde(default)]
    pub extra: Value,
}

impl SnapshotRow {
    /// A snapshot about to be taken at `now`, with nothing set that isn't known of every one.
    pub fn new(id: SnapshotId, session: SessionId, runtime: Runtime, template: impl Into<String>, now: Timestamp) -> SnapshotRow {
        SnapshotRow {
            id,
            revision: Revision::default(),
            session_id: session,
            owner_token: None,
            name: None,
            labels: BTreeMap::new(),
            state: SnapshotState::Taking,
            reason: None,
            generation: Generation::FIRST,
            memory: false,
            size_bytes: 0,
            unique_bytes: 0,
            memory_bytes: 0,
            parent_id: None,
            created_at: now,
            keep_until: None,
            taken_by: String::new(),
            runtime,
            template: template.into(),
            template_hash: None,
            guest_hash: None,
            runsc_hash: None,
            runsc_version: None,
            cpu_features: Vec::new(),
            layers: Vec::new(),
            disk_epoch: 0,
            parcel: None,
            paused_ms: 0,
            template_row: Value::Null,
            works: Value::Null,
            deleted_at: None,
            extra: Value::Null,
        }
    }

    /// The store has kept this row: the next change is made onto that.
    pub fn was_committed(&mut self) {
        self.revision = Revision(self.revision.0 + 1);
    }
}

/// Which snapshots a list shows. Everything that is set must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotFilter {
    /// Only those of this session.
    pub session: Option<SessionId>,
    /// None but those of these sessions, such as those that a token is good for.
    pub sessions: Option<Vec<SessionId>>,
    /// Only those of sessions that this token made.
    pub owner_token: Option<String>,
    /// Deleted ones, too.
    pub include_deleted: bool,
}

/// A snapshot whose record is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreadableSnapshot {
    /// As it is stored: even this may not be an id any more.
    pub id: String,
    pub detail: String,
}

/// A stretch of all snapshots that are not deleted. What an unreadable one needs, nobody knows.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotScan {
    pub snapshots: Vec<SnapshotRow>,
    pub unreadable: Vec<UnreadableSnapshot>,
    /// Where to go on; `None` at the end.
    pub next_cursor: Option<Cursor>,
}

/// Snapshots.
pub trait Snapshots {
    /// Writes rows of their own, without a change of a session, in one transaction: all or none.
    ///
    /// # Errors
    /// [`SnapshotConflict`](crate::StoreError::SnapshotConflict) where one isn't at the revision of its row,
    /// [`NoSnapshot`](crate::StoreError::NoSnapshot) where it isn't there,
    /// [`SnapshotNameTaken`](crate::StoreError::SnapshotNameTaken).
    fn commit_snapshots(&self, rows: Vec<SnapshotRow>) -> Fut<'_, ()>;

    /// One snapshot, deleted ones too.
    fn snapshot(&self, id: SnapshotId) -> Fut<'_, Option<SnapshotRow>>;

    /// The snapshot that a name leads to.
    fn snapshot_by_name(&self, name: String) -> Fut<'_, Option<SnapshotRow>>;

    /// The ids that begin with `part`; where none does, those that end with it. As with [`crate::Sessions::find_ids`].
    fn find_snapshot_ids(&self, part: String) -> Fut<'_, Vec<SnapshotId>>;

    /// Newest first. One that is made meanwhile moves nothing on later pages. Damaged rows are left out.
    fn list_snapshots(&self, filter: SnapshotFilter, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<SnapshotRow>>;

    /// All of a session that are not deleted, oldest first.
    ///
    /// # Errors
    /// A damaged row among them: what it needs must not be taken for unneeded.
    fn snapshots_of(&self, session: SessionId) -> Fut<'_, Vec<SnapshotRow>>;

    /// Those whose time to be kept was over at `now`, the longest overdue first: at most a page. One that is being taken
    /// isn't among them.
    fn snapshots_due(&self, now: Timestamp) -> Fut<'_, Vec<SnapshotRow>>;

    /// All that are not deleted, oldest first, in stretches: what says which layers are in use.
    fn scan_snapshots(&self, limit: usize, cursor: Option<Cursor>) -> Fut<'_, SnapshotScan>;

    /// Forgets those that were deleted before this time, and those begun before it that failed; tells which.
    fn purge_snapshots(&self, before: Timestamp) -> Fut<'_, Vec<SnapshotId>>;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.
    use super::*;

    #[test]
    fn a_row_with_only_what_its_first_version_had_to_have_reads() {
        let (id, session) = (SnapshotId::new(), SessionId::new());
        let text = format!(
            r#"{{"id":"{id}","session_id":"{session}","state":"ready","generation":1,"created_at":1,"runtime":"gvisor",
                "template":"debian"}}"#
        );
        let row: SnapshotRow = serde_json::from_str(&text).unwrap();
        let new = SnapshotRow::new(id, session, Runtime::Gvisor, "debian", Timestamp(1));
        assert_eq!(row, SnapshotRow { state: SnapshotState::Ready, ..new });
    }
}
