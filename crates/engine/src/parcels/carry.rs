//! Export and import: one session in one file, from one server to another.
//!
//! ```text
//!  session ─► (a snapshot of now, where it runs) ─► a repository of its own ─► tar ─► a file
//!  a file ─► unpacked beside the sessions ─► verified, placed ─► the store knows ─► a session that sleeps
//! ```
//! The file is a tar archive of a repository, so every chunk of it is verified when it is read. It isn't encrypted.
//! What an import makes known to the store is whole by then; what it leaves where it is cut off belongs to no session, and
//! the next start removes it.

use super::{archive, fetch, keeper, pack, parcel_error, store_error};
use crate::{
    ByteStream, Caller, Engine, Error, ImportOptions, NewSnapshot, SessionView, ending, facts,
    inner::{Inner, blocking},
    launch::{ensure_private_dir, io_error},
    parcels::image_error,
    programs::hash_of,
    reserve, rollback,
    session::Session,
    snapshots,
    tokens::admin_only,
};
use blob::{Location, Options, Repository};
use model::{EventSeq, EventType, ExecState, Generation, Memory, SessionId, SnapshotId, State, TerminalState};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use snapshot::parcel::{Manifest, ParcelKind};
use std::{path::Path, sync::Arc, time::Duration};
use store::{Cursor, EventRow, ExecRow, MAX_PAGE, NewEvent, SessionChange, SessionRow, StoreError, TerminalRow};
use wire::records::{ExecRecord, TerminalRecord};

/// The manifest's name in an exported repository.
const EXPORT: &str = "export";
/// How long what was taken for an export is kept, should the server end before it is removed.
const KEEP_FOR_EXPORT: Duration = Duration::from_secs(3600);
/// The longest history that is read back.
const MAX_HISTORY: u64 = 1 << 30;

/// What happened in a session, as it is written down for elsewhere.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct History {
    pub(super) execs: Vec<ExecRecord>,
    pub(super) terminals: Vec<TerminalRecord>,
    events: Vec<Told>,
}

/// An event, without what belongs to the server that it was told on.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    at: model::Timestamp,
    kind: EventType,
    actor: model::Actor,
    data: Value,
}

impl Engine {
    /// A session as one file: its disk, its memory where it has one that can be saved, what it printed and its history. One
    /// that runs goes on running.
    ///
    /// # Errors
    /// [`Error::Ephemeral`]; why a snapshot of it can't be taken; [`Error::NoSpace`].
    pub async fn export(&self, caller: &Caller, id: SessionId) -> Result<ByteStream, Error> {
        let session = self.inner.present(id).await?;
        self.inner.created(&session).await?;
        if session.view().row.ephemeral {
            return Err(Error::Ephemeral { session: id });
        }
        reserve::check_room(&self.inner.config.data_dir)?;
        let dir = scratch(&self.inner, "export-").await?;
        let place = dir.path().join("repository");
        let repository = local(&place, Options::new("export")).await?;
        self.pack_now(caller, &session, &repository, EXPORT, ParcelKind::Export).await?;
        repository.release().await.map_err(store_error)?;
        drop(repository);
        Ok(archive::pour(dir))
    }

    /// Packs a session as it is now into a repository, whatever it is doing.
    pub(super) async fn pack_now(
        &self,
        caller: &Caller,
        session: &Arc<Session>,
        repository: &Repository,
        name: &str,
        kind: ParcelKind,
    ) -> Result<Manifest, Error> {
        let inner = &self.inner;
        if !session.view().row.state.has_sandbox() {
            let _reading = session.at_rest.read().await;
            fetch::ensure_local(inner, session).await?;
            facts::drain(inner, session).await?;
            let row = session.view().row;
            if keeper::is_quiet(session) && !row.state.has_sandbox() {
                let mut contents = pack::Contents::of_session(inner, &row);
                contents.kind = kind;
                contents.history = Some(history(inner, &row).await?);
                let packed = pack::pack_into(inner, repository, name, &contents).await;
                if keeper::is_as(session, &row) {
                    return packed.map(|(manifest, _, _)| manifest);
                }
                // It was used meanwhile: what was read is of no moment.
                if packed.is_ok() {
                    repository.delete_manifest(name).await.map_err(store_error)?;
                }
            }
        }
        let snapshot = self.take_for(caller, session.id, KEEP_FOR_EXPORT).await?;
        let packed = self.pack_snapshot_of(session, snapshot, repository, name, kind).await;
        if let Err(error) = snapshots::delete(inner, snapshot, &model::Actor::system(), "exported").await {
            tracing::warn!(%snapshot, %error, "what was taken for an export stays until its time is over");
        }
        packed
    }

    /// With its memory where that can be saved.
    async fn take_for(&self, caller: &Caller, session: SessionId, keep: Duration) -> Result<SnapshotId, Error> {
        let wanted =
            |memory| NewSnapshot { id: SnapshotId::new(), name: None, keep_seconds: None, memory, labels: Default::default() };
        match self.take(caller, session, wanted(true), Some(keep), "export").await {
            Err(Error::Unsaveable { .. }) => Ok(self.take(caller, session, wanted(false), Some(keep), "export").await?.id),
            taken => Ok(taken?.id),
        }
    }

    async fn pack_snapshot_of(
        &self,
        session: &Arc<Session>,
        snapshot: SnapshotId,
        repository: &Repository,
        name: &str,
        kind: ParcelKind,
    ) -> Result<Manifest, Error> {
        let inner = &self.inner;
        // Its files stay for as long as this is held.
        let _held = inner.shelf.hold().await;
        let snapshot = self.snapshot_row(snapshot).await?;
        let mut row: SessionRow = serde_json::from_value(snapshot.template_row.clone())
            .map_err(|e| Error::internal(format!("what snapshot {} says of its session can't be read: {e}", snapshot.id)))?;
        row.layers.clone_from(&snapshot.layers);
        row.generation = snapshot.generation;
        row.image_generation = snapshot.memory.then_some(snapshot.generation);
        row.state = if snapshot.memory { State::Hibernated } else { State::Stopped };
        row.ended_at = Some(snapshot.created_at);
        // Those that its supervisor writes down tell of what comes after this moment.
        row.facts_offset = model::Offset(0);
        let mut history = history(inner, &session.view().row).await?;
        let (execs, terminals) = rollback::works_of(&snapshot);
        history.run_again(execs, terminals);
        let mut contents = pack::Contents::of_snapshot(inner, &snapshot);
        contents.kind = kind;
        contents.session = serde_json::to_value(&row).ok();
        contents.history = Some(history);
        // What had ended by then is in the session's own directory.
        contents.more_journals = Some(inner.layout(session.id));
        Ok(pack::pack_into(inner, repository, name, &contents).await?.0)
    }

    /// Makes a session of an exported file. It sleeps as it did, or is stopped where it has no memory.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::Damaged`] with the file, [`Error::Invalid`] for what is no export,
    /// [`Error::Conflict`] where the session is here already, [`Error::Unloadable`] for a memory that this machine can't go
    /// on with. Nothing of it is left then.
    pub async fn import(&self, caller: &Caller, file: ByteStream, options: ImportOptions) -> Result<SessionView, Error> {
        admin_only(caller)?;
        reserve::check_room(&self.inner.config.data_dir)?;
        let dir = scratch(&self.inner, "import-").await?;
        let place = dir.path().join("repository");
        archive::unpack(&place, file).await?;
        let repository = Repository::open(&Location::Folder(place), &Options::reading().with_patience(Duration::ZERO)).await;
        let repository = repository.map_err(|e| match e {
            blob::Error::NoRepository { .. } => Error::invalid("file", "it is no exported session"),
            other => store_error(other),
        })?;
        let manifest = match repository.manifest(EXPORT).await.map_err(store_error)? {
            Some(bytes) => Manifest::decode(&bytes).map_err(parcel_error)?,
            None => return Err(Error::invalid("file", "it is no exported session")),
        };
        let inner = self.inner.clone();
        let caller = caller.clone();
        // Seen through, whether or not the caller stays.
        let made = self.inner.tasks.spawn(async move {
            let _dir = dir;
            adopt(&inner, &caller, &repository, &manifest, options).await
        });
        made.await.map_err(|_| Error::ShuttingDown)?
    }
}

/// Everything that the store of sessions has of one.
async fn history(inner: &Inner, row: &SessionRow) -> Result<History, Error> {
    let mut history = History::default();
    let mut cursor: Option<Cursor> = None;
    loop {
        let page = inner.store.list_execs(row.id, MAX_PAGE, cursor).await?;
        for exec in &page.items {
            history.execs.push(facts::exec_of(exec)?);
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    loop {
        let page = inner.store.list_terminals(row.id, MAX_PAGE, cursor).await?;
        for terminal in &page.items {
            history.terminals.push(facts::terminal_of(terminal)?);
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    let mut from = EventSeq(1);
    loop {
        let events: Vec<EventRow> = inner.store.events(row.id, from, MAX_PAGE).await?;
        let Some(last) = events.last() else { break };
        from = EventSeq(last.seq.0 + 1);
        let told = |event: EventRow| Told { at: event.at, kind: event.kind, actor: event.actor, data: event.data };
        history.events.extend(events.into_iter().map(told));
    }
    Ok(history)
}

impl History {
    pub(super) fn encode(&self) -> Result<Vec<u8>, Error> {
        serde_json::to_vec(self).map_err(Error::internal)
    }

    /// These run in the memory that goes along; whatever else ran by now doesn't.
    fn run_again(&mut self, execs: Vec<ExecRecord>, terminals: Vec<TerminalRecord>) {
        for exec in execs {
            self.execs.retain(|other| other.id != exec.id);
            self.execs.push(exec);
        }
        for terminal in terminals {
            self.terminals.retain(|other| other.id != terminal.id);
            self.terminals.push(terminal);
        }
    }
}

/// A directory for one export or import.
pub(super) async fn scratch(inner: &Inner, prefix: &'static str) -> Result<tempfile::TempDir, Error> {
    let tmp = inner.config.data_dir.join("tmp");
    let made = blocking(move || {
        ensure_private_dir(&tmp)?;
        tempfile::Builder::new().prefix(prefix).tempdir_in(&tmp)
    });
    made.await?.map_err(|e| io_error(&e, "make room for a file"))
}

async fn local(place: &Path, options: Options) -> Result<Repository, Error> {
    Repository::create(&Location::Folder(place.to_owned()), &options).await.map_err(store_error)
}

/// Makes a session of what was exported.
async fn adopt(
    inner: &Arc<Inner>,
    caller: &Caller,
    repository: &Repository,
    manifest: &Manifest,
    options: ImportOptions,
) -> Result<SessionView, Error> {
    let told = manifest.session.clone().ok_or_else(|| Error::invalid("file", "it says nothing of a session"))?;
    let mut row: SessionRow = serde_json::from_value(told)
        .map_err(|e| Error::Unloadable { session: None, detail: format!("what the file says of its session: {e}") })?;
    let original = row.id;
    if options.new_id {
        row.id = SessionId::new();
    } else if inner.store.session(row.id).await?.is_some() {
        let detail = format!("session {original} is here already, or was; import it under a new id");
        return Err(Error::Conflict { detail });
    }
    let memory = manifest.image.as_ref().filter(|_| !options.disk_only);
    if let Some(part) = memory {
        part.descriptor.check_loadable().map_err(|e| image_error(None, e))?;
        let here = hash_of(row.runsc_hash.as_deref()).is_some_and(|hash| inner.programs.binaries.get(hash).is_ok());
        if !here && !options.trust_runtime {
            let version = &part.descriptor.runsc_version;
            let detail = format!(
                "its memory needs a runsc that this server doesn't have ({version}), and which would run outside of any sandbox: \
                 trust the file's own with trust_runtime, or leave the memory with disk_only"
            );
            return Err(Error::Unloadable { session: None, detail });
        }
    }
    let generation = memory.map(|part| part.generation);
    let history = match &manifest.history {
        Some(stream) => read_history(repository, stream).await?,
        None => History::default(),
    };
    let layout = inner.layout(row.id);
    // Nothing of it is cleared away before the store knows it.
    let _held = inner.shelf.hold().await;
    let placed = async {
        let layers: Vec<_> = manifest.layers.iter().map(|part| part.id).collect();
        let template = fetch::fetch_base(inner, repository, manifest, &layers, memory.is_some()).await?;
        fetch::place_session(inner, repository, manifest, &layout, generation).await?;
        Ok::<_, Error>((layers, template))
    };
    let made = match placed.await {
        Ok((layers, template)) => {
            row.layers = layers;
            if let Some(hash) = template {
                row.template_hash = Some(hash.to_string());
            }
            settle(&mut row, inner, caller, generation);
            // The file may be anybody's: what it would open here has to be set here.
            row.secrets_withheld |= !row.network.secrets().is_empty();
            row.network.close_here();
            commit(inner, caller, row, original, history).await
        }
        Err(error) => Err(error),
    };
    match made {
        Ok(session) => {
            inner.expect_packing();
            Ok(session.view())
        }
        Err(error) => {
            let removed = blocking(move || ending::remove_session(&layout)).await?;
            if let Err(error) = removed {
                tracing::warn!(%error, "the rest of an import stays until the next start");
            }
            Err(error)
        }
    }
}

/// What belongs to the server that it comes from stays there.
fn settle(row: &mut SessionRow, inner: &Inner, caller: &Caller, image: Option<Generation>) {
    let now = inner.now();
    (row.revision, row.next_event_seq) = (store::Revision::default(), EventSeq(1));
    row.owner_token = caller.token.map(|token| token.to_string());
    (row.parcel, row.parent_snapshot, row.latest_snapshot) = (None, None, None);
    (row.timeout_at, row.timeout_left_ms, row.timeout_told, row.wake_at) = (None, None, false, None);
    (row.try_again_at, row.tries, row.deleted_at, row.key_freed) = (None, 0, None, false);
    row.expires_at = row.expires_at.filter(|at| *at > now);
    row.image_generation = image;
    row.ephemeral = false;
    (row.state, row.memory) = match image {
        Some(generation) => {
            row.generation = generation;
            (State::Hibernated, Memory::Saved)
        }
        None => (State::Stopped, Memory::Lost),
    };
    row.reason = Some("imported".to_owned());
    row.ended_at.get_or_insert(now);
    row.updated_at = now;
}

pub(super) async fn read_history(repository: &Repository, stream: &blob::StreamRef) -> Result<History, Error> {
    if stream.len > MAX_HISTORY {
        return Err(Error::invalid("file", "its history is longer than any"));
    }
    let mut bytes = Vec::new();
    repository.read_stream(stream, &mut bytes).await.map_err(store_error)?;
    serde_json::from_slice(&bytes).map_err(|e| Error::Unloadable { session: None, detail: format!("its history: {e}") })
}

/// The session with all its history, in one step.
async fn commit(
    inner: &Arc<Inner>,
    caller: &Caller,
    mut row: SessionRow,
    original: SessionId,
    history: History,
) -> Result<Arc<Session>, Error> {
    let (now, id, is_awake) = (inner.now(), row.id, row.state == State::Hibernated);
    let mut change = SessionChange::new(row.clone());
    let lost = |exec: ExecRecord| match exec.state {
        ExecState::Running if !is_awake => {
            ExecRecord { state: ExecState::Lost, ended_at: Some(now), reason: Some("imported".to_owned()), ..exec }
        }
        _ => exec,
    };
    let ended = |terminal: TerminalRecord| match terminal.state {
        TerminalState::Running if !is_awake => TerminalRecord {
            state: TerminalState::Ended,
            ended_at: Some(now),
            reason: Some("imported".to_owned()),
            writer: None,
            ..terminal
        },
        _ => terminal,
    };
    let execs: Vec<ExecRow> = history.execs.into_iter().map(lost).map(|exec| facts::exec_row(id, &exec)).collect();
    let terminals: Vec<TerminalRow> =
        history.terminals.into_iter().map(ended).map(|terminal| facts::terminal_row(id, &terminal)).collect();
    (change.execs, change.terminals) = (execs, terminals);
    let past = history.events.into_iter().map(|told| NewEvent {
        at: told.at,
        kind: told.kind,
        actor: told.actor,
        operation_id: None,
        data: told.data,
    });
    change.events.extend(past);
    change.events.push(NewEvent {
        at: now,
        kind: EventType::SESSION_IMPORTED,
        actor: caller.actor.clone(),
        operation_id: None,
        data: json!({ "from": original, "state": row.state, "memory": is_awake }),
    });
    let mut committed = inner.store.commit(change.clone()).await;
    if let Err(StoreError::KeyTaken { .. }) = committed {
        // Somebody here has it by now.
        row.key = None;
        change.session = row.clone();
        committed = inner.store.commit(change).await;
    }
    let committed = committed?;
    row.was_committed(&committed);
    inner.announce(committed.events);
    Ok(inner.adopt(row))
}
