//! The engine as callers hold it: opening, closing, and sessions as a whole.

use crate::{
    Caller, Config, Counts, Created, Error, NewSession, OpenError, SessionPatch, SessionView, Transition, Transitioned, create,
    inner::{Inner, blocking},
    launch::ensure_private_dir,
    network::{self, Keyring},
    operation::deleted,
    parcels, policy, pool,
    programs::Programs,
    recover, reserve,
    session::Session,
    shelf::Shelf,
    snapshots, timers, tokens, webhooks,
};
use lifecycle::Command;
use model::{EventType, OperationId, SessionId, State, Timestamp};
use serde_json::json;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use store::{Cursor, NewEvent, OperationRow, Page, SessionChange, SessionFilter, SessionRow, Store};

/// The name under which the store keeps this server's own.
pub(crate) const INSTANCE: &str = "instance";
/// How long operations may go on once the engine closes, after requests have had their time.
const DRAIN_LIMIT: Duration = Duration::from_secs(3);
/// How long the sandboxes of the pool may take to end: no server goes on with them, so they are worth a wait.
const POOL_LIMIT: Duration = Duration::from_secs(5);
/// How long giving back the object store's lock may take.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);
/// Hosts of one session that are counted each by itself, and entries of all sessions together.
const TOP_HOSTS: usize = 10;
const COUNTED_HOSTS: usize = 5000;
/// Sessions that are hibernated at the same time when all are.
const HIBERNATE_AT_ONCE: usize = 4;

/// Carries sessions through their lives. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

impl Engine {
    /// Opens a data directory, which the caller has locked, and recovers what its last server left.
    ///
    /// # Errors
    /// The directory can't be written, or the store can't be read.
    pub async fn open(config: Config, store: Arc<dyn Store>) -> Result<Engine, OpenError> {
        let io = |path: &std::path::Path| {
            let path = path.to_owned();
            move |source| OpenError::Io { what: "make the directory", path, source }
        };
        for dir in [config.data_dir.clone(), config.data_dir.join("sessions")] {
            ensure_private_dir(&dir).map_err(io(&dir))?;
        }
        let instance = match store.meta(INSTANCE.to_owned()).await? {
            Some(instance) => instance,
            None => {
                let instance = format!("server-{}", uuid::Uuid::new_v4().as_simple());
                store.set_meta(INSTANCE.to_owned(), instance.clone()).await?;
                instance
            }
        };
        let (config_, instance_) = (config.clone(), instance.clone());
        let programs =
            blocking(move || Programs::open(&config_, instance_)).await.map_err(|e| OpenError::Other(e.to_string()))??;
        let data_dir = config.data_dir.clone();
        let shelf = blocking(move || Shelf::open(&data_dir)).await.map_err(|e| OpenError::Other(e.to_string()))??;
        let tokens = tokens::open(&config.data_dir, &store).await?;
        let keyring = open_keyring(&config, &store).await?;
        let inner = Inner::new(config, store, programs, shelf, tokens, keyring, instance);
        // Before anything happens that they may have to tell.
        webhooks::start(&inner).await?;
        recover::recover(&inner).await.map_err(|e| OpenError::Other(e.to_string()))?;
        inner.tasks.spawn(pool::keep(inner.clone()));
        inner.tasks.spawn(timers::run(inner.clone()));
        inner.tasks.spawn(snapshots::expire(inner.clone()));
        inner.tasks.spawn(reserve::keep(inner.clone()));
        inner.tasks.spawn(parcels::keeper::keep(inner.clone()));
        inner.tasks.spawn(parcels::collect::keep(inner.clone()));
        let inner_ = inner.clone();
        inner.tasks.spawn(async move {
            let _ = blocking(move || inner_.programs.verify_all()).await;
        });
        inner.tasks.spawn(tokens::note_use(inner.clone()));
        Ok(Engine { inner })
    }

    /// Takes no more work, lets operations end, and lets go of the sandboxes, which run on under their supervisors.
    /// With `hibernate` they are hibernated first; those that can't be are named, and run on.
    pub async fn shutdown(&self, hibernate: bool) -> Vec<(SessionId, Error)> {
        let failed = if hibernate { self.hibernate_all(&Caller::system()).await.1 } else { Vec::new() };
        let inner = &self.inner;
        inner.draining.cancel();
        let quiet = async {
            for session in inner.all_known() {
                let mut changes = session.changes();
                while session.view().operation.is_some() {
                    if changes.changed().await.is_err() {
                        break;
                    }
                }
            }
        };
        let (quiet, emptied) = tokio::join!(
            tokio::time::timeout(DRAIN_LIMIT, quiet),
            tokio::time::timeout(POOL_LIMIT, inner.pool.emptied.cancelled())
        );
        if quiet.is_err() {
            tracing::warn!("operations are still under way; the next server goes on with them");
        }
        if emptied.is_err() {
            tracing::warn!("sandboxes of the pool are still being ended; the next server removes them");
        }
        if tokio::time::timeout(RELEASE_LIMIT, inner.depot.close()).await.is_err() {
            tracing::warn!("the lock of the object store stays: the store doesn't answer");
        }
        inner.closing.cancel();
        inner.tasks.close();
        failed
    }

    /// Hibernates every running session: those that were, and those that couldn't be.
    pub async fn hibernate_all(&self, caller: &Caller) -> (Vec<SessionId>, Vec<(SessionId, Error)>) {
        use futures_util::StreamExt;
        let mut awake = Vec::new();
        let filter = SessionFilter { states: vec![State::Running, State::Paused], ..SessionFilter::default() };
        let mut cursor = None;
        loop {
            let page = match self.inner.store.list_sessions(filter.clone(), store::MAX_PAGE, cursor).await {
                Ok(page) => page,
                Err(error) => {
                    tracing::error!(%error, "the sessions to be hibernated can't be read");
                    break;
                }
            };
            awake.extend(page.items.into_iter().map(|row| row.id));
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        let results: Vec<(SessionId, Result<Transitioned, Error>)> = futures_util::stream::iter(awake)
            .map(|id| async move { (id, self.transition(caller, id, Transition::Hibernate { until: None }, true).await) })
            .buffer_unordered(HIBERNATE_AT_ONCE)
            .collect()
            .await;
        let (mut done, mut failed) = (Vec::new(), Vec::new());
        for (id, result) in results {
            match result {
                Ok(_) => done.push(id),
                Err(error) => failed.push((id, error)),
            }
        }
        (done, failed)
    }

    /// The store that it works on.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.store
    }

    /// What it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// How many sessions there are in each state that has any, as far as they are in memory, and what waits.
    pub async fn counts(&self) -> Counts {
        let mut counts = Counts { pooled: self.inner.pool.len() as u64, ..Counts::default() };
        let mut cursor = None;
        while let Ok(scan) = self.inner.store.scan_sessions(store::MAX_PAGE, cursor).await {
            for row in scan.sessions {
                *counts.sessions.entry(row.state.as_str()).or_default() += 1;
                if row.state.has_sandbox() && counts.traffic.len() < COUNTED_HOSTS {
                    let hosts = row.traffic.top(TOP_HOSTS).into_iter();
                    counts.traffic.extend(hosts.map(|(host, totals)| (row.id, host, totals)));
                }
            }
            cursor = scan.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        let known = self.inner.all_known();
        counts.operations = known.iter().filter(|session| session.view().operation.is_some()).count() as u64;
        counts
    }

    /// Creates a session, or finds the one of its key. Answers once it is running.
    ///
    /// # Errors
    /// [`Error::NotBuilt`], [`Error::Invalid`], [`Error::KeyConflict`], [`Error::Failed`] and [`Error::Expired`] of the
    /// session that the key leads to, [`Error::NotFound`] for a template, [`Error::NoCapacity`].
    pub async fn create(&self, caller: &Caller, new: NewSession) -> Result<Created, Error> {
        create::create(&self.inner, caller, new).await
    }

    /// One session. Reading it changes nothing.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Deleted`], [`Error::Expired`].
    pub async fn session(&self, id: SessionId) -> Result<SessionView, Error> {
        Ok(self.inner.present(id).await?.view())
    }

    /// One session, also one that is deleted.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn session_or_tombstone(&self, id: SessionId) -> Result<SessionView, Error> {
        Ok(self.inner.find(id).await?.view())
    }

    /// The session that a text names: by its id, its key, or a unique beginning or end of its id, tried in this order.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Ambiguous`].
    pub async fn resolve(&self, text: &str) -> Result<SessionId, Error> {
        if let Ok(id) = text.parse::<SessionId>() {
            return Ok(id);
        }
        if let Some(row) = self.inner.store.session_by_key(text.to_owned()).await? {
            return Ok(row.id);
        }
        let shown: String = text.chars().take(200).collect();
        let unknown = Error::not_found(format!("session '{shown}'"));
        // Fewer characters than this name a moment, not a session.
        if text.len() < 4 || !text.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-') {
            return Err(unknown);
        }
        let ids = self.inner.store.find_ids(text.to_ascii_lowercase()).await?;
        match ids[..] {
            [] => Err(unknown),
            [id] => Ok(id),
            _ => Err(Error::Ambiguous { text: shown, ids }),
        }
    }

    /// Sessions, newest first.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a cursor of another list.
    pub async fn list(&self, filter: SessionFilter, limit: usize, cursor: Option<Cursor>) -> Result<Page<SessionView>, Error> {
        let page = self.inner.store.list_sessions(filter, limit, cursor).await?;
        let view = |row: SessionRow| {
            let known = self.inner.known(row.id).map(|session| session.view());
            let (operation, hibernate_after) = known.map(|view| (view.operation, view.hibernate_after)).unwrap_or_default();
            SessionView { row: Arc::new(row), operation, hibernate_after }
        };
        Ok(Page { items: page.items.into_iter().map(view).collect(), next_cursor: page.next_cursor })
    }

    /// Changes what a client may change.
    ///
    /// # Errors
    /// [`Error::NotBuilt`], [`Error::NotFound`], [`Error::Deleted`], [`Error::Failed`]; [`Error::Forbidden`] for a secret.
    /// [`Error::Held`], [`Error::Lost`] and [`Error::Unresponsive`] for a policy that is set and may not be in force yet.
    pub async fn patch(&self, caller: &Caller, id: SessionId, patch: SessionPatch) -> Result<SessionView, Error> {
        let session = self.inner.present(id).await?;
        policy::check(&patch, &session.view().row, self.inner.now())?;
        let agreed = session.view().row;
        if let Some(policy) = &patch.network {
            // Rules of a policy that its secrets were withheld from have been agreed to by nobody here.
            let before = Some(&agreed.network).filter(|_| !agreed.secrets_withheld);
            network::authorize(&self.inner, caller, policy, before).await?;
        }
        let network_changes = patch.network.is_some();
        let idle_changes = patch.idle.is_some();
        if let Some(services) = patch.services.clone() {
            self.set_services(caller, id, services).await?;
        }
        let (now, actor) = (self.inner.now(), caller.actor.clone());
        let overtaken = Arc::new(AtomicBool::new(false));
        let is_overtaken = overtaken.clone();
        let change = move |row: &SessionRow| {
            // What was agreed to is what was in force then.
            if network_changes && (row.network != agreed.network || row.secrets_withheld != agreed.secrets_withheld) {
                is_overtaken.store(true, Ordering::Relaxed);
                return None;
            }
            let mut change = SessionChange::new(row.clone());
            let fields = apply(&mut change.session, &patch, now);
            if fields.is_empty() {
                return None;
            }
            change.session.updated_at = now;
            let (kind, data) = (EventType::SESSION_UPDATED, json!({ "fields": fields }));
            change.events.push(NewEvent { at: now, kind, actor: actor.clone(), operation_id: None, data });
            Some(change)
        };
        self.inner.change(&session, Box::new(change)).await?;
        if overtaken.load(Ordering::Relaxed) {
            let detail = "its network was changed by somebody else in the same moment: look at it, and try again".to_owned();
            return Err(Error::Conflict { detail });
        }
        if idle_changes {
            policy::look_soon(&self.inner, &session);
        }
        if network_changes {
            network::enforce(&self.inner, &session).await?;
        }
        Ok(session.view())
    }

    /// Deletes a session, whatever it is doing; answers once nothing of it is left. Deleting again is no error.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::OperationFailed`] where something of it can't be removed.
    pub async fn delete(&self, caller: &Caller, id: SessionId) -> Result<(), Error> {
        let session = self.inner.find(id).await?;
        self.inner.command(&session, Command::Delete, &caller.actor).await?.wait_for_client().await
    }

    /// Carries out a lifecycle change; answers when it is done, or with `wait` false once its intent is stored.
    ///
    /// # Errors
    /// Why it is refused, or how it failed; the session stands as its state says.
    pub async fn transition(&self, caller: &Caller, id: SessionId, to: Transition, wait: bool) -> Result<Transitioned, Error> {
        let command = match to {
            Transition::Hibernate { .. } => Command::Hibernate,
            Transition::Wake => Command::Wake,
            Transition::Pause => Command::Pause,
            Transition::Unpause => Command::Unpause,
            Transition::Stop => Command::Stop,
            Transition::Start | Transition::StartDiskOnly => Command::Start,
        };
        let session = self.inner.present(id).await?;
        if to == Transition::StartDiskOnly && session.view().row.state == State::Hibernated {
            self.inner.command(&session, Command::Stop, &caller.actor).await?.wait_for_client().await?;
        }
        if let Transition::Hibernate { until: Some(until) } = to {
            policy::moment("until", Some(until), self.inner.now())?;
            let set = move |row: &SessionRow| {
                let mut change = SessionChange::new(row.clone());
                change.session.wake_at = Some(until);
                Some(change)
            };
            self.inner.change(&session, Box::new(set)).await?;
        }
        let until = match to {
            Transition::Hibernate { until } => until,
            _ => None,
        };
        let admitted = match self.inner.command(&session, command, &caller.actor).await {
            Ok(admitted) => admitted,
            Err(error) => return Err(self.not_until(&session, until, error).await),
        };
        let mut operation = admitted.operation.clone();
        if wait {
            if let Err(error) = admitted.wait_for_client().await {
                return Err(self.not_until(&session, until, error).await);
            }
            if let Some(begun) = &operation {
                operation = self.inner.store.operation(begun.id).await?;
            }
        }
        Ok(Transitioned { view: session.view(), operation })
    }

    /// The sleep that was to end at `until` didn't come about: nothing of it stays.
    async fn not_until(&self, session: &Arc<Session>, until: Option<Timestamp>, error: Error) -> Error {
        if until.is_some() {
            let back = move |row: &SessionRow| {
                let mut change = SessionChange::new(row.clone());
                change.session.wake_at = None;
                (row.wake_at == until).then_some(change)
            };
            if let Err(error) = self.inner.change(session, Box::new(back)).await {
                tracing::warn!(session = %session.id, %error, "a time to wake stays that belongs to no sleep");
            }
        }
        error
    }

    /// One operation.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn operation(&self, id: OperationId) -> Result<OperationRow, Error> {
        let found = self.inner.store.operation(id).await?;
        found.ok_or_else(|| Error::not_found(format!("operation {id}")))
    }

    /// Moves the end of the allowed running time.
    ///
    /// # Errors
    /// [`Error::Invalid`]; [`Error::Conflict`] where there is no limit, [`Error::NotRunning`] where nothing runs.
    pub async fn extend(&self, caller: &Caller, id: SessionId, seconds: u64) -> Result<SessionView, Error> {
        policy::seconds("seconds", Some(seconds))?;
        let session = self.inner.present(id).await?;
        let (by, now, actor) = (Duration::from_secs(seconds), self.inner.now(), caller.actor.clone());
        policy::extend(&session.view().row, by, now)?;
        let change = move |row: &SessionRow| {
            let mut change = SessionChange::new(policy::extend(row, by, now).ok()?);
            let data = json!({ "fields": ["timeout_at"], "timeout_at": change.session.timeout_at });
            let (kind, actor) = (EventType::SESSION_UPDATED, actor.clone());
            change.events.push(NewEvent { at: now, kind, actor, operation_id: None, data });
            Some(change)
        };
        self.inner.change(&session, Box::new(change)).await?;
        Ok(session.view())
    }

    /// The sandbox of a session that runs now; nothing is done for it.
    pub(crate) fn running(&self, session: &Session) -> Result<Arc<crate::session::Live>, Error> {
        let view = session.view();
        match view.row.state {
            State::Running => {}
            State::Paused => return Err(Error::Paused { session: session.id }),
            State::Failed => {
                return Err(Error::Failed { session: session.id, reason: view.row.reason.clone().unwrap_or_default() });
            }
            State::Deleted => return Err(deleted(&view.row, self.inner.now())),
            state => return Err(Error::NotRunning { session: session.id, reason: format!("it is {state}") }),
        }
        self.inner.awake(session).ok_or(Error::Unresponsive { session: session.id })
    }
}

/// Reads the key of secrets, and sees whether it is theirs.
async fn open_keyring(config: &Config, store: &Arc<dyn Store>) -> Result<Keyring, OpenError> {
    let mut kept = store.list_secrets().await?;
    let (source, data_dir, forget) = (config.secrets_key.clone(), config.data_dir.clone(), config.forget_secrets);
    let known = if forget { Vec::new() } else { kept.clone() };
    let opened = blocking(move || Keyring::open(source.as_ref(), &data_dir, &known)).await;
    let keyring = opened.map_err(|e| OpenError::Other(e.to_string()))??;
    if forget {
        for row in kept.extract_if(.., |row| keyring.unseal(row).is_none()) {
            tracing::warn!(secret = %row.name, "a secret that the key doesn't open is given up");
            store.remove_secret(row.name).await?;
        }
    }
    for row in keyring.unreadable(&kept)? {
        tracing::error!(secret = %row.name, "a secret is damaged: set it anew");
    }
    if keyring.lies_beside() {
        tracing::warn!("the key of secrets lies beside what it encrypts: keep it elsewhere with --key-file or --key-command");
    }
    Ok(keyring)
}

/// Applies a patch; tells which fields it changed.
fn apply(row: &mut SessionRow, patch: &SessionPatch, now: Timestamp) -> Vec<&'static str> {
    fn set<T: Clone + PartialEq>(field: &mut T, wanted: &Option<T>) -> bool {
        match wanted {
            Some(wanted) if wanted != field => {
                field.clone_from(wanted);
                true
            }
            _ => false,
        }
    }
    let mut metadata = row.metadata.clone();
    for (name, value) in patch.metadata.iter().flatten() {
        match value {
            Some(value) => metadata.insert(name.clone(), value.clone()),
            None => metadata.remove(name),
        };
    }
    let changed = [
        ("name", set(&mut row.name, &patch.name)),
        ("task", set(&mut row.task, &patch.task)),
        ("metadata", set(&mut row.metadata, &Some(metadata))),
        ("idle", set(&mut row.idle, &patch.idle)),
        ("services", set(&mut row.services, &patch.services)),
        ("network", set(&mut row.network, &patch.network) | (patch.network.is_some() && row.secrets_withheld)),
    ];
    row.secrets_withheld &= patch.network.is_none();
    let clocks = policy::apply(row, patch, now);
    changed.into_iter().filter(|(_, changed)| *changed).map(|(name, _)| name).chain(clocks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::Runtime;

    #[test]
    fn a_policy_that_is_set_gives_a_fork_its_secrets() {
        let mut row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(1));
        row.secrets_withheld = true;
        let other = SessionPatch { name: Some(Some("x".into())), ..SessionPatch::default() };
        assert_eq!(apply(&mut row, &other, Timestamp(2)), ["name"]);
        assert!(row.secrets_withheld);
        let same = SessionPatch { network: Some(row.network.clone()), ..SessionPatch::default() };
        assert_eq!(apply(&mut row, &same, Timestamp(2)), ["network"]);
        assert!(!row.secrets_withheld);
        assert!(apply(&mut row, &same, Timestamp(3)).is_empty(), "again it changes nothing");
    }

    #[test]
    fn a_patch_changes_what_it_names_and_nothing_else() {
        let mut row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(1));
        row.metadata = [("a", "1"), ("b", "2")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        row.task = Some("old".into());
        let patch = SessionPatch {
            name: Some(Some("new".into())),
            task: Some(None),
            metadata: Some([("a".to_owned(), None), ("c".to_owned(), Some("3".to_owned()))].into()),
            ..SessionPatch::default()
        };
        assert_eq!(apply(&mut row, &patch, Timestamp(2)), ["name", "task", "metadata"]);
        assert_eq!((row.name.as_deref(), row.task.as_deref()), (Some("new"), None));
        assert_eq!(row.metadata.keys().collect::<Vec<_>>(), ["b", "c"]);
        assert!(apply(&mut row, &patch, Timestamp(3)).is_empty(), "again it changes nothing");
    }
}
