//! Backup and restore of a whole data directory, while its server runs.
//!
//! ```text
//!  copy of the store of sessions ─► every session and snapshot packed ─► one manifest that names all of it
//!  the manifest ─► store of sessions ─► rows: all of it sleeps, and its files are away ─► fetched when needed
//! ```
//! The copy comes first: what is made afterwards isn't part of the backup, and what is deleted meanwhile is told as missing.
//! Sessions that run are kept by a snapshot each, and go on running; in the backup they sleep.

use super::{
    carry::{self, History},
    pack, parcel_error, present, store_error,
};
use crate::{Caller, Engine, Error, facts, inner::blocking, launch::io_error, scan, tokens::admin_only};
use blob::{Location, Options, Repository};
use model::{
    Actor, EventType, ExecState, Generation, Memory, OperationState, SessionId, SnapshotId, SnapshotState, State, TerminalState,
    Timestamp,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use snapshot::parcel::{Manifest, ParcelKind, Requires};
use std::{collections::BTreeMap, fs::File, path::Path, sync::Arc};
use store::{NewEvent, Parcel, SessionChange, SessionRow, SnapshotRow, Store};
use tokio::io::AsyncWriteExt;
use wire::records::{ExecRecord, TerminalRecord};

/// Names of backups begin so; a time follows, so that they are in order.
const PREFIX: &str = "backup-";

/// What a backup has, by the names of its manifests.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Backup {
    /// The backup's own name.
    #[serde(default)]
    pub name: String,
    /// Where it is.
    #[serde(default)]
    pub place: String,
    pub sessions: BTreeMap<SessionId, String>,
    pub snapshots: BTreeMap<SnapshotId, String>,
    /// What could not be kept, and why.
    #[serde(default)]
    pub failed: Vec<String>,
}

/// What a restore brought back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restored {
    pub sessions: u64,
    pub snapshots: u64,
    /// What the backup hasn't got.
    pub missing: Vec<String>,
}

impl Engine {
    /// Keeps everything that this server has, in its own object store or elsewhere. Sessions go on running.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::Invalid`] for a place that is none, [`Error::ObjectStore`], [`Error::NoSpace`]. What
    /// fails for single sessions is told in the answer.
    pub async fn backup(&self, caller: &Caller, to: Option<&str>) -> Result<Backup, Error> {
        admin_only(caller)?;
        let inner = &self.inner;
        // Nothing is collected before the backup names what it needs.
        let _gate = inner.depot.gate.read().await;
        let own = inner.depot.repository().await?;
        let repository = match to {
            None => own.clone(),
            Some(place) => self.open_elsewhere(place, &own).await?,
        };
        let is_own = repository.id() == own.id();
        let dir = carry::scratch(inner, "backup-").await?;
        let copy = dir.path().join("store.db");
        inner.store.copy_to(copy.clone()).await?;
        faults::point("backup.copied");
        let mut backup = Backup { place: repository.place(), ..Backup::default() };
        self.back_up_snapshots(&repository, is_own, &mut backup).await?;
        self.back_up_sessions(caller, &repository, is_own, &mut backup).await?;
        let writer = repository.writer().map_err(store_error)?;
        let file = blocking(move || File::open(copy)).await?.map_err(|e| io_error(&e, "read the copy of the store"))?;
        let database = writer.write_file(file, blob::Chunking::Content).await.map_err(store_error)?;
        backup.name = format!("{PREFIX}{}", inner.now().0);
        let manifest = Manifest { history: Some(database), ..empty(&backup, inner.now())? };
        let bytes = manifest.encode().map_err(parcel_error)?;
        writer.commit(&backup.name, &bytes).await.map_err(store_error)?;
        if !is_own {
            repository.release().await.map_err(store_error)?;
        }
        Ok(backup)
    }

    /// Names of the backups in the server's own object store, oldest first.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::ObjectStore`].
    pub async fn backups(&self, caller: &Caller) -> Result<Vec<String>, Error> {
        admin_only(caller)?;
        let mut names = self.inner.depot.repository().await?.manifests().await.map_err(store_error)?;
        names.retain(|name| name.starts_with(PREFIX));
        Ok(names)
    }

    /// Gives a backup in the server's own object store up. What nothing else needs of it is removed by the next collection.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::NotFound`], [`Error::ObjectStore`].
    pub async fn backup_remove(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        if !self.backups(caller).await?.iter().any(|known| known == name) {
            return Err(Error::not_found(format!("backup '{}'", name.chars().take(80).collect::<String>())));
        }
        self.inner.depot.repository().await?.delete_manifest(name).await.map_err(store_error)
    }

    async fn open_elsewhere(&self, place: &str, own: &Repository) -> Result<Repository, Error> {
        let location = Location::parse(place).map_err(|e| Error::invalid("to", e))?;
        if let Location::Folder(path) = &location
            && !path.is_absolute()
        {
            return Err(Error::invalid("to", "it must be absolute: it is a folder of the server's machine"));
        }
        if location.to_string() == own.place() {
            return Ok(own.clone());
        }
        let depot = &self.inner.depot;
        let options = Options::new(depot.server.clone()).with_key(depot.config.key.clone()).with_cancel(depot.cancel.clone());
        Repository::open_or_create(&location, &options).await.map_err(store_error)
    }

    async fn back_up_snapshots(&self, repository: &Repository, is_own: bool, backup: &mut Backup) -> Result<(), Error> {
        let mut found = Vec::new();
        let ready = |row: SnapshotRow| {
            if row.state == SnapshotState::Ready {
                found.push((row.id, row.parcel.map(|parcel| parcel.manifest)));
            }
        };
        let unreadable = scan::snapshots(&*self.inner.store, ready).await?;
        backup.failed.extend(unreadable.iter().map(|row| format!("snapshot {}: {}", row.id, row.detail)));
        for (id, packed) in found {
            let name = match packed.filter(|_| is_own) {
                Some(name) => Ok(name),
                None => self.back_up_snapshot(repository, id).await,
            };
            match name {
                Ok(name) => drop(backup.snapshots.insert(id, name)),
                Err(error) => told(&mut backup.failed, "snapshot", id, error)?,
            }
        }
        Ok(())
    }

    async fn back_up_snapshot(&self, repository: &Repository, id: SnapshotId) -> Result<String, Error> {
        let inner = &self.inner;
        let _held = inner.shelf.hold().await;
        let row = super::fetch::ensure_snapshot(inner, self.snapshot_row(id).await?, true).await?;
        let name = pack::snapshot_manifest(row.id, inner.now());
        pack::pack_into(inner, repository, &name, &pack::Contents::of_snapshot(inner, &row)).await?;
        Ok(name)
    }

    async fn back_up_sessions(
        &self,
        caller: &Caller,
        repository: &Repository,
        is_own: bool,
        backup: &mut Backup,
    ) -> Result<(), Error> {
        let mut found = Vec::new();
        let kept = |row: SessionRow| {
            if !row.ephemeral && !matches!(row.state, State::Creating | State::Failed) {
                found.push((row.id, present(&row).map(|parcel| parcel.manifest.clone())));
            }
        };
        let unreadable = scan::sessions(&*self.inner.store, kept).await?;
        backup.failed.extend(unreadable.iter().map(|row| format!("session {}: {}", row.id, row.detail)));
        for (id, packed) in found {
            let name = match packed.filter(|_| is_own) {
                Some(name) => Ok(name),
                None => self.back_up_session(caller, repository, id).await,
            };
            match name {
                Ok(name) => drop(backup.sessions.insert(id, name)),
                Err(error) => told(&mut backup.failed, "session", id, error)?,
            }
        }
        Ok(())
    }

    async fn back_up_session(&self, caller: &Caller, repository: &Repository, id: SessionId) -> Result<String, Error> {
        let session = self.inner.present(id).await?;
        let name = pack::session_manifest(id, self.inner.now());
        self.pack_now(caller, &session, repository, &name, ParcelKind::Session).await?;
        Ok(name)
    }
}

/// What concerns one thing alone is told of it; what concerns all ends the backup.
fn told(failed: &mut Vec<String>, what: &str, id: impl std::fmt::Display, error: Error) -> Result<(), Error> {
    match error {
        Error::ObjectStore { .. } | Error::NoSpace { .. } | Error::ShuttingDown => Err(error),
        // Deleted meanwhile: it isn't wanted any more.
        Error::NotFound { .. } | Error::Deleted { .. } | Error::Expired { .. } | Error::SnapshotDeleted { .. } => Ok(()),
        error => {
            failed.push(format!("{what} {id}: {error}"));
            Ok(())
        }
    }
}

fn empty(backup: &Backup, now: Timestamp) -> Result<Manifest, Error> {
    Ok(Manifest {
        kind: ParcelKind::Backup,
        made_at: now,
        server_version: env!("CARGO_PKG_VERSION").to_owned(),
        row: serde_json::to_value(backup).map_err(Error::internal)?,
        session: None,
        upper: None,
        layers: Vec::new(),
        image: None,
        journals: Vec::new(),
        template: None,
        guest: None,
        runsc: None,
        requires: Requires::default(),
        renews: Vec::new(),
        history: None,
    })
}

/// What a backup's manifest names.
pub(super) fn contents_of(manifest: &Manifest) -> Result<Backup, Error> {
    serde_json::from_value(manifest.row.clone()).map_err(|e| Error::Damaged { detail: format!("a backup's contents: {e}") })
}

/// A backup that is going to be restored.
pub struct Restore {
    repository: Repository,
    backup: Backup,
    manifest: Manifest,
}

impl Restore {
    /// Opens a place and finds a backup there: the latest where no name is given.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::ObjectStore`], [`Error::Damaged`], [`Error::Unloadable`] for a newer format.
    pub async fn open(location: &Location, key: Option<blob::KeySource>, name: Option<&str>) -> Result<Restore, Error> {
        let repository = Repository::open(location, &Options::reading().with_key(key)).await.map_err(store_error)?;
        let mut names = repository.manifests().await.map_err(store_error)?;
        names.retain(|name| name.starts_with(PREFIX));
        let name = match name {
            Some(name) if names.iter().any(|known| known == name) => name.to_owned(),
            Some(name) => return Err(Error::not_found(format!("backup '{name}'; there are: {}", names.join(", ")))),
            None => names.pop().ok_or_else(|| Error::not_found(format!("backup at {location}")))?,
        };
        let bytes = repository.manifest(&name).await.map_err(store_error)?;
        let manifest = Manifest::decode(&bytes.unwrap_or_default()).map_err(parcel_error)?;
        let backup = Backup { name, ..contents_of(&manifest)? };
        Ok(Restore { repository, backup, manifest })
    }

    /// What it has.
    pub fn backup(&self) -> &Backup {
        &self.backup
    }

    /// Writes the store of sessions, as it was, to `path`, where nothing may be.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::ObjectStore`], [`Error::NoSpace`].
    pub async fn write_store(&self, path: &Path) -> Result<(), Error> {
        let Some(stream) = &self.manifest.history else {
            return Err(Error::Damaged { detail: "the backup has no store of sessions".to_owned() });
        };
        let io = |e: std::io::Error| io_error(&e, "write the store of sessions");
        let mut file = tokio::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).await.map_err(io)?;
        self.repository.read_stream(stream, &mut file).await.map_err(store_error)?;
        file.flush().await.map_err(io)?;
        file.sync_all().await.map_err(io)
    }

    /// Makes the rows say where everything is: all sessions sleep, and their files are in the object store.
    ///
    /// # Errors
    /// [`Error::Damaged`] where a session's manifest can't be read; what the store of sessions says.
    pub async fn settle(&self, store: &Arc<dyn Store>, now: Timestamp) -> Result<Restored, Error> {
        let mut restored = Restored::default();
        // Two servers on one object store must be told apart.
        store.set_meta(crate::engine::INSTANCE.to_owned(), uuid::Uuid::new_v4().to_string()).await?;
        let (mut snapshots, mut sessions) = (Vec::new(), Vec::new());
        scan::snapshots(&**store, |row| snapshots.push(row)).await?;
        scan::sessions(&**store, |row| sessions.push(row)).await?;
        for row in snapshots {
            let row = match self.backup.snapshots.get(&row.id) {
                Some(name) => {
                    restored.snapshots += 1;
                    let parcel = self.parcel(name, row.generation, row.disk_epoch).await?.0;
                    SnapshotRow { parcel: Some(parcel), ..row }
                }
                None => {
                    restored.missing.push(format!("snapshot {}", row.id));
                    let (state, reason) = (SnapshotState::Deleted, Some("it is not in the backup".to_owned()));
                    SnapshotRow { state, reason, deleted_at: Some(now), parcel: None, ..row }
                }
            };
            store.commit_snapshots(vec![row]).await?;
        }
        for row in sessions {
            let id = row.id;
            let mut change = match self.backup.sessions.get(&id) {
                Some(name) => {
                    restored.sessions += 1;
                    self.sleeping(row, name, now).await?
                }
                None => {
                    restored.missing.push(format!("session {id}"));
                    missing(row, now)
                }
            };
            self.end_works(store, id, &mut change, now).await?;
            store.commit(change).await?;
        }
        Ok(restored)
    }

    async fn parcel(&self, name: &str, generation: Generation, disk_epoch: u64) -> Result<(Parcel, Manifest), Error> {
        let bytes = self.repository.manifest(name).await.map_err(store_error)?;
        let bytes = bytes.ok_or_else(|| Error::Damaged { detail: format!("the manifest {name} is missing") })?;
        let manifest = Manifest::decode(&bytes).map_err(parcel_error)?;
        let parcel = Parcel {
            manifest: name.to_owned(),
            packed_at: manifest.made_at,
            generation,
            disk_epoch,
            plain_bytes: manifest.streams().map(|stream| stream.len).sum(),
            disk_bytes: manifest.upper.as_ref().map_or(0, |tree| tree.plain_bytes),
            own_bytes: 0,
            new_bytes: 0,
            is_away: true,
        };
        Ok((parcel, manifest))
    }

    /// A session as it was packed, which can be later than the store of sessions was copied.
    async fn sleeping(&self, before: SessionRow, name: &str, now: Timestamp) -> Result<SessionChange, Error> {
        let (mut parcel, manifest) = self.parcel(name, before.generation, before.disk_epoch).await?;
        let told = manifest.session.clone().unwrap_or_default();
        let packed: SessionRow = serde_json::from_value(told)
            .map_err(|e| Error::Damaged { detail: format!("what {name} says of its session can't be read: {e}") })?;
        let mut row = SessionRow {
            revision: before.revision,
            next_event_seq: before.next_event_seq,
            latest_snapshot: before.latest_snapshot,
            key: before.key,
            key_freed: before.key_freed,
            ..packed
        };
        row.image_generation = manifest.image.as_ref().map(|part| part.generation);
        (row.state, row.memory) = match row.image_generation {
            Some(_) => (State::Hibernated, Memory::Saved),
            None => (State::Stopped, Memory::Lost),
        };
        (parcel.generation, parcel.disk_epoch) = (row.generation, row.disk_epoch);
        row.layers = manifest.layers.iter().map(|part| part.id).collect();
        (row.timeout_at, row.timeout_left_ms, row.try_again_at) = (None, None, None);
        row.reason = Some("restored from a backup".to_owned());
        row.updated_at = now;
        row.ended_at.get_or_insert(manifest.made_at);
        row.parcel = Some(parcel);
        let mut change = SessionChange::new(row);
        let history = match &manifest.history {
            Some(stream) => carry::read_history(&self.repository, stream).await?,
            None => History::default(),
        };
        let id = change.session.id;
        change.execs = history.execs.iter().map(|exec| facts::exec_row(id, exec)).collect();
        change.terminals = history.terminals.iter().map(|terminal| facts::terminal_row(id, terminal)).collect();
        change.events.push(event(now, &self.backup.name, change.session.state));
        Ok(change)
    }

    /// What runs in no memory that was kept is lost, and no operation is under way.
    async fn end_works(
        &self,
        store: &Arc<dyn Store>,
        id: SessionId,
        change: &mut SessionChange,
        now: Timestamp,
    ) -> Result<(), Error> {
        for mut operation in store.running_operations().await?.into_iter().filter(|operation| operation.session_id == id) {
            (operation.state, operation.ended_at) = (OperationState::Failed, Some(now));
            operation.error = Some(json!({ "code": "lost", "detail": "the session was restored from a backup" }));
            change.operations.push(operation);
        }
        if change.session.state == State::Hibernated {
            return Ok(());
        }
        let reason = Some("restored".to_owned());
        for row in store.running_execs(id).await? {
            let exec = facts::exec_of(&row)?;
            change.execs.retain(|other| other.id != exec.id);
            let exec = ExecRecord { state: ExecState::Lost, ended_at: Some(now), reason: reason.clone(), ..exec };
            change.execs.push(facts::exec_row(id, &exec));
        }
        for row in store.running_terminals(id).await? {
            let terminal = facts::terminal_of(&row)?;
            change.terminals.retain(|other| other.id != terminal.id);
            let reason = reason.clone();
            let terminal = TerminalRecord { state: TerminalState::Ended, ended_at: Some(now), reason, writer: None, ..terminal };
            change.terminals.push(facts::terminal_row(id, &terminal));
        }
        Ok(())
    }
}

fn event(now: Timestamp, backup: &str, state: State) -> NewEvent {
    NewEvent {
        at: now,
        kind: EventType::SESSION_RESTORED,
        actor: Actor::system(),
        operation_id: None,
        data: json!({ "backup": backup, "state": state }),
    }
}

fn missing(row: SessionRow, now: Timestamp) -> SessionChange {
    let mut row = row;
    (row.state, row.memory, row.image_generation, row.parcel) = (State::Failed, Memory::None, None, None);
    row.reason = Some("it is not in the backup".to_owned());
    row.updated_at = now;
    (row.timeout_at, row.wake_at, row.try_again_at) = (None, None, None);
    SessionChange::new(row)
}
