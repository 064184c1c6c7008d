//! Sessions as they are kept, and the one way to change them.

use crate::{Cursor, EventRow, ExecRow, Fut, NewEvent, OperationRow, Page, Parcel, RequestId, SnapshotRow, TerminalRow, Traffic};
use model::{
    EventSeq, Generation, IdlePolicy, Key, LayerId, Memory, Offset, OnTimeout, Resources, Runtime, ServiceSpec, SessionId,
    SnapshotId, State, Timestamp, network::Policy,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, fmt};

/// Counts the changes of a session. Zero: not stored yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Everything that is kept of a session.
///
/// Its JSON form is what a database stores; a field that is added needs a default, so that older
/// rows can still be read. It is not the JSON of the API.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionRow {
    pub id: SessionId,
    /// As it was when this row was read; a change is refused where it isn't any more.
    #[serde(skip)]
    pub revision: Revision,
    /// The number that the next event will get. Kept by the store; what a change says is ignored.
    #[serde(skip, default = "first_seq")]
    pub next_event_seq: EventSeq,
    #[serde(default)]
    pub key: Option<Key>,
    /// True once the key may lead to another session.
    #[serde(default)]
    pub key_freed: bool,
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub task: Option<String>,
    pub state: State,
    /// Why it stands so: a word of [`model::EndReason`] or a sentence.
    #[serde(default)]
    pub reason: Option<String>,
    pub runtime: Runtime,
    pub template: String,
    #[serde(default)]
    pub template_hash: Option<String>,
    #[serde(default)]
    pub guest_hash: Option<String>,
    #[serde(default)]
    pub runsc_hash: Option<String>,
    /// The present or latest sandbox; the one to come while the first is made.
    pub generation: Generation,
    #[serde(default)]
    pub ephemeral: bool,
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub workdir: Option<String>,
    #[serde(with = "crate::millis")]
    pub created_at: Timestamp,
    #[serde(with = "crate::millis")]
    pub updated_at: Timestamp,
    #[serde(with = "crate::millis")]
    pub last_activity_at: Timestamp,
    #[serde(default)]
    pub idle: Option<IdlePolicy>,
    #[serde(default)]
    pub timeout_seconds: Option<u64>,
    #[serde(default, with = "crate::millis::option")]
    pub timeout_at: Option<Timestamp>,
    /// What was left of the running time when the session was paused, in milliseconds.
    #[serde(default)]
    pub timeout_left_ms: Option<u64>,
    /// Programs were told that the present running time is about to end.
    #[serde(default)]
    pub timeout_told: bool,
    pub on_timeout: OnTimeout,
    #[serde(default)]
    pub ttl_seconds: Option<u64>,
    #[serde(default, with = "crate::millis::option")]
    pub expires_at: Option<Timestamp>,
    #[serde(default, with = "crate::millis::option")]
    pub wake_at: Option<Timestamp>,
    /// When a hibernate that failed, so that the session was paused instead, is tried again, and how often it was tried.
    #[serde(default, with = "crate::millis::option")]
    pub try_again_at: Option<Timestamp>,
    #[serde(default)]
    pub tries: u32,
    pub memory: Memory,
    /// The generation whose memory image is valid now. Spent by the commit that wakes the session.
    #[serde(default)]
    pub image_generation: Option<Generation>,
    #[serde(default)]
    pub parent_session: Option<SessionId>,
    #[serde(default)]
    pub parent_snapshot: Option<SnapshotId>,
    #[serde(default)]
    pub parent_task: Option<String>,
    #[serde(default)]
    pub resources: Resources,
    #[serde(default)]
    pub services: Vec<ServiceSpec>,
    #[serde(default)]
    pub hooks: Value,
    #[serde(default)]
    pub source: Option<Value>,
    /// Room for parts that need no column of their own.
    #[serde(default)]
    pub extra: Value,
    /// The next line of the supervisor's facts to be applied.
    #[serde(default)]
    pub facts_offset: Offset,
    /// Which token made it.
    #[serde(default)]
    pub owner_token: Option<String>,
    /// How the latest sandbox ended, in a word and in a sentence, and when.
    #[serde(default)]
    pub ended_reason: Option<String>,
    #[serde(default)]
    pub ended_detail: Option<String>,
    #[serde(default, with = "crate::millis::option")]
    pub ended_at: Option<Timestamp>,
    #[serde(default, with = "crate::millis::option")]
    pub deleted_at: Option<Timestamp>,
    /// The latest wake.
    #[serde(default)]
    pub last_wake: Option<WakeRecord>,
    /// Layers of its disk below its own upper directory, top first; below them lie the guest's layer and the template.
    #[serde(default)]
    pub layers: Vec<LayerId>,
    /// Counts the upper directories that it has had: a rollback begins a fresh one.
    #[serde(default)]
    pub disk_epoch: u64,
    /// Where it stands among snapshots: the latest that was taken of it, or the one it was made from or set back to.
    #[serde(default)]
    pub latest_snapshot: Option<SnapshotId>,
    /// What the blob store has of it. Given up by whatever may change its disk, before it does.
    #[serde(default)]
    pub parcel: Option<Parcel>,
    /// What its programs may reach. Carried over by forks; a rollback leaves it as it is.
    #[serde(default)]
    pub network: Policy,
    /// Its policy is one that it was forked with, and its secrets were not given along.
    #[serde(default)]
    pub secrets_withheld: bool,
    /// What has gone over its network, over all its sandboxes.
    #[serde(default)]
    pub traffic: Traffic,
}

/// What a wake did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WakeRecord {
    #[serde(with = "crate::millis")]
    pub at: Timestamp,
    /// How long the session slept.
    pub gap_ms: u64,
    pub generation: Generation,
    /// Connections to the outside that were ended by it.
    #[serde(default)]
    pub connections_reset: u64,
    /// Where they led to, `HOST:PORT`; not all of them where there were many.
    #[serde(default)]
    pub reset_to: Vec<String>,
}

fn first_seq() -> EventSeq {
    EventSeq(1)
}

impl SessionRow {
    /// A session about to be created, with nothing set that wasn't asked for.
    pub fn new(id: SessionId, runtime: Runtime, template: impl Into<String>, now: Timestamp) -> SessionRow {
        SessionRow {
            id,
            revision: Revision::default(),
            next_event_seq: first_seq(),
            key: None,
            key_freed: false,
            name: None,
            task: None,
            state: State::Creating,
            reason: None,
            runtime,
            template: template.into(),
            template_hash: None,
            guest_hash: None,
            runsc_hash: None,
            generation: Generation::FIRST,
            ephemeral: false,
            metadata: BTreeMap::new(),
            env: BTreeMap::new(),
            workdir: None,
            created_at: now,
            updated_at: now,
            last_activity_at: now,
            idle: None,
            timeout_seconds: None,
            timeout_at: None,
            timeout_left_ms: None,
            timeout_told: false,
            on_timeout: OnTimeout::Hibernate,
            ttl_seconds: None,
            expires_at: None,
            wake_at: None,
            try_again_at: None,
            tries: 0,
            memory: Memory::None,
            image_generation: None,
            parent_session: None,
            parent_snapshot: None,
            parent_task: None,
            resources: Resources::default(),
            services: Vec::new(),
            hooks: Value::Null,
            source: None,
            extra: Value::Null,
            facts_offset: Offset::ZERO,
            owner_token: None,
            ended_reason: None,
            ended_detail: None,
            ended_at: None,
            deleted_at: None,
            last_wake: None,
            layers: Vec::new(),
            disk_epoch: 0,
            latest_snapshot: None,
            parcel: None,
            network: Policy::default(),
            secrets_withheld: false,
            traffic: Traffic::default(),
        }
    }

    /// Takes over what the store counted when it kept this row.
    pub fn was_committed(&mut self, committed: &Committed) {
        self.revision = committed.revision;
        self.next_event_seq = committed.next_event_seq;
    }
}

/// Says which request made something, in the transaction that makes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestMark {
    pub id: RequestId,
    /// What was made, as the caller will want to find it again: an id, for instance.
    pub made: String,
}

/// One change of a session with all that belongs to it.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionChange {
    /// The whole new row. Its `revision` is the one that was read; zero creates the session.
    pub session: SessionRow,
    /// In their order.
    pub events: Vec<NewEvent>,
    pub operations: Vec<OperationRow>,
    pub execs: Vec<ExecRow>,
    pub terminals: Vec<TerminalRow>,
    /// As [`crate::Snapshots::commit_snapshots`] writes them.
    pub snapshots: Vec<SnapshotRow>,
    pub request: Option<RequestMark>,
}

impl SessionChange {
    /// A change of the row alone; add the rest.
    pub fn new(session: SessionRow) -> SessionChange {
        SessionChange {
            session,
            events: Vec::new(),
            operations: Vec::new(),
            execs: Vec::new(),
            terminals: Vec::new(),
            snapshots: Vec::new(),
            request: None,
        }
    }
}

/// What became of a change.
#[derive(Debug, Clone, PartialEq)]
pub struct Committed {
    pub revision: Revision,
    pub next_event_seq: EventSeq,
    /// The change's events with their numbers, ready to be told to followers.
    pub events: Vec<EventRow>,
}

/// Which sessions a list shows. Everything that is set must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionFilter {
    /// Any of these; empty: any.
    pub states: Vec<State>,
    pub key: Option<String>,
    /// Every pair must be there.
    pub metadata: BTreeMap<String, String>,
    pub runtime: Option<Runtime>,
    /// None but these, such as those that a token is good for.
    pub ids: Option<Vec<SessionId>>,
    /// Only those that this token made.
    pub owner_token: Option<String>,
    /// Only those that were made from this session or its snapshots.
    pub parent: Option<SessionId>,
    /// Deleted ones, too; asking for the state `deleted` shows them in any case.
    pub include_deleted: bool,
}

/// A session whose record is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreadableSession {
    /// As it is stored: even this may not be an id any more.
    pub id: String,
    pub detail: String,
}

/// A stretch of all sessions that are not deleted.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionScan {
    pub sessions: Vec<SessionRow>,
    pub unreadable: Vec<UnreadableSession>,
    /// Where to go on; `None` at the end.
    pub next_cursor: Option<Cursor>,
}

/// Sessions.
pub trait Sessions {
    /// Writes changes in one transaction: all or none. The answer is in the order of the changes.
    /// A change sees those before it, so that one can free a key that the next one takes.
    ///
    /// # Errors
    /// [`Conflict`](crate::StoreError::Conflict) where a session isn't at the revision of its row,
    /// [`NoSession`](crate::StoreError::NoSession) where it isn't there,
    /// [`KeyTaken`](crate::StoreError::KeyTaken) and [`ExecKeyTaken`](crate::StoreError::ExecKeyTaken); and those of
    /// [`crate::Snapshots::commit_snapshots`].
    fn commit_all(&self, changes: Vec<SessionChange>) -> Fut<'_, Vec<Committed>>;

    /// Writes one change; see [`Sessions::commit_all`].
    fn commit(&self, change: SessionChange) -> Fut<'_, Committed> {
        let answer = self.commit_all(vec![change]);
        Box::pin(
            async move { answer.await?.pop().ok_or_else(|| crate::StoreError::Database("a change was not answered".to_owned())) },
        )
    }

    /// One session, deleted ones too.
    fn session(&self, id: SessionId) -> Fut<'_, Option<SessionRow>>;

    /// The session that a key leads to: the one that holds it and hasn't freed it.
    fn session_by_key(&self, key: String) -> Fut<'_, Option<SessionRow>>;

    /// The ids that begin with `part`; where none does, those that end with it. Sessions that are
    /// not deleted go before deleted ones in the same way. At most 10, so more than one is ambiguous.
    fn find_ids(&self, part: String) -> Fut<'_, Vec<SessionId>>;

    /// Newest first. A session that is made meanwhile moves nothing on later pages. Damaged rows are left out.
    fn list_sessions(&self, filter: SessionFilter, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<SessionRow>>;

    /// All sessions that are not deleted, oldest first, in stretches: what a server reads at its start.
    fn scan_sessions(&self, limit: usize, cursor: Option<Cursor>) -> Fut<'_, SessionScan>;

    /// Forgets sessions deleted before this time, with all that belongs to them; tells which.
    fn purge_deleted(&self, before: Timestamp) -> Fut<'_, Vec<SessionId>>;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.
    use super::*;

    #[test]
    fn instants_beyond_the_calendar_read_back() {
        let mut row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(1));
        row.expires_at = Some(Timestamp(i64::MAX));
        let read: SessionRow = serde_json::from_str(&serde_json::to_string(&row).unwrap()).unwrap();
        assert_eq!(read, row);
    }

    #[test]
    fn a_row_with_only_what_version_1_had_to_have_reads() {
        let id = SessionId::new();
        let text = format!(
            r#"{{"id":"{id}","state":"running","runtime":"gvisor","template":"debian","generation":1,
                "created_at":1,"updated_at":1,"last_activity_at":1,"on_timeout":"hibernate","memory":"live"}}"#
        );
        let row: SessionRow = serde_json::from_str(&text).unwrap();
        assert_eq!((row.id, row.next_event_seq), (id, EventSeq(1)));
    }
}
