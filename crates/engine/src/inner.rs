//! What all parts of the engine share, and how a session is found.

use crate::{
    Config, Error, SessionView,
    driver::{self, Admitted, ChangeFn, Message},
    limits::Limits,
    network::Keyring,
    operation::Job,
    parcels::Depot,
    pool::Pool,
    programs::Programs,
    session::{Live, Session},
    shelf::Shelf,
    timers::Timers,
    tokens::TokenCache,
};
use lifecycle::Command;
use model::{Actor, EndReason, OperationKind, SessionId, State, Timestamp};
use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, Weak, atomic::AtomicU64},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use store::{EventRow, SessionRow, Store};
use tokio::sync::{broadcast, oneshot};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wire::layout::SessionLayout;

/// Events that a follower can be behind before it reads the store again.
const EVENTS: usize = 1024;
/// How long a caller waits for a sandbox whose supervisor isn't connected yet.
const LIVE_WAIT: Duration = Duration::from_secs(15);

/// The engine's shared part.
pub(crate) struct Inner {
    pub config: Config,
    pub store: Arc<dyn Store>,
    pub programs: Programs,
    pub shelf: Shelf,
    pub depot: Depot,
    pub pool: Pool,
    pub limits: Limits,
    pub timers: Timers,
    pub tokens: TokenCache,
    pub keyring: Keyring,
    /// Counts the changes of secrets.
    pub secrets_changed: AtomicU64,
    pub events: broadcast::Sender<Arc<EventRow>>,
    /// Every task that was spawned.
    pub tasks: TaskTracker,
    /// No new work is taken.
    pub draining: CancellationToken,
    /// Everything ends.
    pub closing: CancellationToken,
    sessions: Mutex<HashMap<SessionId, Weak<Session>>>,
}

impl Inner {
    pub(crate) fn new(
        config: Config,
        store: Arc<dyn Store>,
        programs: Programs,
        shelf: Shelf,
        tokens: TokenCache,
        keyring: Keyring,
        instance: String,
    ) -> Arc<Inner> {
        let closing = CancellationToken::new();
        Arc::new(Inner {
            depot: Depot::new(config.object_store.clone(), instance, closing.clone()),
            pool: Pool::default(),
            limits: Limits::default(),
            timers: Timers::default(),
            config,
            store,
            programs,
            shelf,
            tokens,
            keyring,
            secrets_changed: AtomicU64::new(0),
            events: broadcast::channel(EVENTS).0,
            tasks: TaskTracker::new(),
            draining: CancellationToken::new(),
            closing,
            sessions: Mutex::new(HashMap::new()),
        })
    }

    /// The present moment.
    pub(crate) fn now(&self) -> Timestamp {
        now()
    }

    /// Tells followers of events that were committed.
    pub(crate) fn announce(&self, events: Vec<EventRow>) {
        for event in events {
            // Nobody following is fine.
            let _ = self.events.send(Arc::new(event));
        }
    }

    /// Where sessions' directories are.
    pub(crate) fn sessions_dir(&self) -> PathBuf {
        self.config.data_dir.join("sessions")
    }

    pub(crate) fn layout(&self, id: SessionId) -> SessionLayout {
        SessionLayout::new(self.sessions_dir().join(id.to_string()))
    }

    /// A session that is in memory.
    pub(crate) fn known(&self, id: SessionId) -> Option<Arc<Session>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).get(&id)?.upgrade()
    }

    /// All sessions that are in memory.
    pub(crate) fn all_known(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).values().filter_map(Weak::upgrade).collect()
    }

    /// The one place in memory for a session, made from `row` where there is none.
    pub(crate) fn adopt(&self, row: SessionRow) -> Arc<Session> {
        let id = row.id;
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = sessions.get(&id).and_then(Weak::upgrade) {
            return known;
        }
        if sessions.len() == sessions.capacity() {
            sessions.retain(|_, session| session.strong_count() > 0);
        }
        let view = SessionView::new(Arc::new(row), None);
        let session = Session::new(view, self.layout(id));
        sessions.insert(id, Arc::downgrade(&session));
        session
    }

    /// A session, deleted ones too.
    pub(crate) async fn find(&self, id: SessionId) -> Result<Arc<Session>, Error> {
        if let Some(known) = self.known(id) {
            return Ok(known);
        }
        match self.store.session(id).await? {
            Some(row) => Ok(self.adopt(row)),
            None => Err(Error::not_found(format!("session {id}"))),
        }
    }

    /// A session that is there; deleted and expired ones are errors.
    pub(crate) async fn present(&self, id: SessionId) -> Result<Arc<Session>, Error> {
        let session = self.find(id).await?;
        let view = session.view();
        match view.row.state {
            State::Deleted => Err(crate::operation::deleted(&view.row, self.now())),
            _ => Ok(session),
        }
    }

    /// Puts a command to the session's driver, on somebody's behalf.
    pub(crate) async fn command(
        self: &Arc<Self>,
        session: &Arc<Session>,
        command: Command,
        actor: &Actor,
    ) -> Result<Admitted, Error> {
        self.command_for(session, command, actor, EndReason::Asked).await
    }

    /// Puts a command to the session's driver. `cause` stands as the session's reason afterwards.
    pub(crate) async fn command_for(
        self: &Arc<Self>,
        session: &Arc<Session>,
        command: Command,
        actor: &Actor,
        cause: EndReason,
    ) -> Result<Admitted, Error> {
        self.command_with(session, command, actor, cause, None).await
    }

    /// Puts a command to the session's driver that needs to be told what to do.
    pub(crate) async fn command_with(
        self: &Arc<Self>,
        session: &Arc<Session>,
        command: Command,
        actor: &Actor,
        cause: EndReason,
        job: Option<Box<Job>>,
    ) -> Result<Admitted, Error> {
        if self.draining.is_cancelled() {
            return Err(Error::ShuttingDown);
        }
        let (reply, answer) = oneshot::channel();
        driver::tell(self, session, Message::Command { command, actor: actor.clone(), cause, job, reply }).await?;
        answer.await.unwrap_or(Err(Error::ShuttingDown))
    }

    /// Has the driver make a change.
    pub(crate) async fn change(self: &Arc<Self>, session: &Arc<Session>, change: ChangeFn) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        driver::tell(self, session, Message::Change { change, reply }).await?;
        answer.await.unwrap_or(Err(Error::ShuttingDown))
    }

    /// The sandbox of a session that somebody needs: woken, unpaused or started where the rules allow it.
    pub(crate) async fn usable(self: &Arc<Self>, session: &Arc<Session>, actor: &Actor, start: bool) -> Result<Arc<Live>, Error> {
        let deadline = tokio::time::Instant::now() + LIVE_WAIT;
        let mut changes = session.changes();
        loop {
            changes.borrow_and_update();
            let view = session.view();
            // A snapshot under way is in nobody's way.
            let is_free = view.operation.as_ref().is_none_or(|operation| operation.kind == OperationKind::Snapshot);
            if view.row.state == State::Running && is_free {
                if let Some(live) = session.live().filter(|live| live.generation() == view.row.generation) {
                    return Ok(live);
                }
                // A supervisor that is being found again, or whose end is being written down.
                let changed = tokio::time::timeout_at(deadline, changes.changed()).await;
                if changed.is_err() {
                    return Err(Error::Unresponsive { session: session.id });
                }
                continue;
            }
            self.command(session, Command::Use { start }, actor).await?.wait_for_client().await?;
        }
    }

    /// Waits until a session that is being created is there, or has failed.
    pub(crate) async fn created(&self, session: &Session) -> Result<(), Error> {
        let mut changes = session.changes();
        loop {
            changes.borrow_and_update();
            if session.view().row.state != State::Creating {
                return Ok(());
            }
            tokio::select! {
                _ = changes.changed() => {}
                () = self.closing.cancelled() => return Err(Error::ShuttingDown),
            }
        }
    }

    /// The sandbox of a session as it is, without doing anything for it.
    pub(crate) fn awake(&self, session: &Session) -> Option<Arc<Live>> {
        let view = session.view();
        session.live().filter(|live| view.row.state.has_sandbox() && live.generation() == view.row.generation)
    }
}

/// The present moment. A clock before 1970 counts as 1970.
pub(crate) fn now() -> Timestamp {
    let ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    Timestamp(i64::try_from(ms).unwrap_or(i64::MAX))
}

/// Runs what blocks on a thread that may.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Error::internal(format!("a task ended: {error}")))
}
