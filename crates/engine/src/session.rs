//! A session in the server's memory: what readers see of it, its mailbox, and the sandbox that it has now.
//!
//! Readers look at the last committed row and never wait for the driver. A session that nobody needs is dropped, and
//! read from the store again when somebody does.

use crate::{
    Error, SessionView,
    driver::Message,
    network,
    supervisor_client::{CallError, Supervisor},
};
use model::{EndReason, Generation, IdleAction, SessionId, State, Timestamp};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::Duration,
};
use store::SessionRow;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;
use wire::layout::SessionLayout;

/// One session.
pub(crate) struct Session {
    pub id: SessionId,
    pub layout: SessionLayout,
    shown: RwLock<SessionView>,
    /// Counts what readers may want to look at again: commits, sandboxes that come and go.
    changed: watch::Sender<u64>,
    pub mailbox: Mutex<Option<mpsc::Sender<Message>>>,
    live: Mutex<Option<Arc<Live>>>,
    /// How the latest sandbox ended, as its supervisor wrote it down.
    end: Mutex<Option<SandboxEnd>>,
    idle: Mutex<IdleWatch>,
    /// Held while a supervisor is being started: what was begun is seen through, even where nobody waits any more.
    pub launching: Arc<Semaphore>,
    /// Shared by who reads the disk of a session that sleeps; it isn't given up meanwhile.
    pub at_rest: Arc<tokio::sync::RwLock<()>>,
    /// Held while facts are read, so that they are read once.
    pub reading_facts: Semaphore,
}

/// What is known of a running session's idleness. It is asked of its supervisor anew after a restart.
#[derive(Default)]
struct IdleWatch {
    look_at: Option<Timestamp>,
    hibernate_after: Option<Timestamp>,
}

/// How a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SandboxEnd {
    pub generation: Generation,
    pub reason: EndReason,
    pub detail: String,
}

/// A session's supervisor, and whether it is still there.
pub(crate) struct Live {
    pub supervisor: Supervisor,
    generation: Mutex<Generation>,
    /// What it was told last of its session's network, and the turn to tell it.
    pub told: Mutex<Option<network::Wanted>>,
    pub telling: Semaphore,
    /// Cancelled once the supervisor is gone and everything it wrote down is read.
    pub gone: CancellationToken,
}

impl Live {
    pub(crate) fn new(layout: SessionLayout, generation: Generation) -> Arc<Live> {
        Arc::new(Live {
            supervisor: Supervisor::new(layout),
            generation: Mutex::new(generation),
            told: Mutex::new(None),
            telling: Semaphore::new(1),
            gone: CancellationToken::new(),
        })
    }

    /// The generation of its sandbox; a thaw raises it.
    pub(crate) fn generation(&self) -> Generation {
        *self.generation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_generation(&self, generation: Generation) {
        *self.generation.lock().unwrap_or_else(PoisonError::into_inner) = generation;
    }
}

impl Session {
    pub(crate) fn new(view: SessionView, layout: SessionLayout) -> Arc<Session> {
        Arc::new(Session {
            id: view.row.id,
            layout,
            shown: RwLock::new(view),
            changed: watch::channel(0).0,
            mailbox: Mutex::new(None),
            live: Mutex::new(None),
            end: Mutex::new(None),
            idle: Mutex::default(),
            launching: Arc::new(Semaphore::new(1)),
            at_rest: Arc::default(),
            reading_facts: Semaphore::new(1),
        })
    }

    /// The session as it was last committed.
    pub(crate) fn view(&self) -> SessionView {
        let mut view = self.shown.read().unwrap_or_else(PoisonError::into_inner).clone();
        if view.row.state == State::Running {
            view.hibernate_after = self.idle_watch().hibernate_after;
        }
        view
    }

    fn idle_watch(&self) -> MutexGuard<'_, IdleWatch> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When to look whether the session is idle.
    pub(crate) fn idle_look_at(&self) -> Option<Timestamp> {
        self.idle_watch().look_at
    }

    pub(crate) fn set_idle_look(&self, at: Option<Timestamp>) {
        self.idle_watch().look_at = at;
    }

    /// Its sandbox has just begun to run: it can't have been idle for the policy's time before that time has passed.
    pub(crate) fn set_idle_look_after(&self, row: &SessionRow, now: Timestamp) {
        let policy = row.idle.filter(|idle| idle.action != IdleAction::None);
        let at = policy.map(|idle| now.plus(Duration::from_secs(idle.after_seconds)));
        *self.idle_watch() = IdleWatch { look_at: at, hibernate_after: at };
    }

    pub(crate) fn set_hibernate_after(&self, at: Option<Timestamp>) {
        self.idle_watch().hibernate_after = at;
    }

    pub(crate) fn show(&self, view: SessionView) {
        *self.shown.write().unwrap_or_else(PoisonError::into_inner) = view;
        self.touch();
    }

    /// Lets everybody look again who waits for a change.
    pub(crate) fn touch(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// Tells when the session has changed. What changed before the call isn't told.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The supervisor, where there is one: also that of a sandbox that is kept for a while after a hibernate.
    pub(crate) fn live(&self) -> Option<Arc<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_live(&self, live: Option<Arc<Live>>) {
        *self.live.lock().unwrap_or_else(PoisonError::into_inner) = live;
        self.touch();
    }

    /// Takes a supervisor away that is gone, unless another has come meanwhile.
    pub(crate) fn drop_live(&self, gone: &Arc<Live>) {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).take_if(|live| Arc::ptr_eq(live, gone));
        self.touch();
    }

    pub(crate) fn sandbox_ended(&self, end: SandboxEnd) {
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
    }

    /// How the sandbox of this generation ended, where that is known.
    pub(crate) fn end_of(&self, generation: Generation) -> Option<SandboxEnd> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).clone().filter(|end| end.generation == generation)
    }

    /// What a caller is told who met the session changing at every try.
    pub(crate) fn held(&self) -> Error {
        let session = self.id;
        match self.view().operation {
            Some(operation) => Error::Held { session, operation: operation.id, kind: operation.kind },
            None => Error::Unresponsive { session },
        }
    }

    /// What a caller is told whose request got no answer.
    pub(crate) fn call_error(&self, error: CallError) -> Error {
        let session = self.id;
        match error {
            CallError::Unreachable(_) | CallError::Broken(_) => Error::Lost { session, detail: error.to_string() },
            CallError::TimedOut(_) => Error::Unresponsive { session },
            CallError::Refused(error) => match error.code {
                wire::Code::Unresponsive => Error::Unresponsive { session },
                wire::Code::Unsaveable => Error::Unsaveable { session, items: Vec::new(), detail: error.message },
                wire::Code::SandboxGone => Error::Lost { session, detail: error.message },
                _ => Error::Inside(error),
            },
        }
    }
}
