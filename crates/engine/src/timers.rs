//! The engine's alarm clock: one task that knows when something is next due in any session.
//!
//! ```text
//!  every commit ──► set(session, next) ──► wait for the earliest ──► what is due by the stored row? ──► act
//!                        ▲                                                                    │
//!                        └────────────────────────────────────────────────────────────────────┘
//! ```
//! Instants are stored with the sessions, so a server that comes back finds what became due meanwhile, and does it once:
//! what an alarm does either moves its instant on or ends the state in which it counts.

use crate::{
    Error, idle,
    inner::Inner,
    moments::{self, Moment},
    session::Session,
};
use lifecycle::{Alarm, Clocks, Command};
use model::{Actor, EndReason, EventType, OnTimeout, SessionId, State, Timestamp};
use serde_json::json;
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use store::{NewEvent, SessionChange, SessionRow};
use tokio::sync::{Notify, Semaphore};

/// The longest wait: the computer's clock can be set meanwhile.
const LONGEST: Duration = Duration::from_secs(30);
/// Sessions that are put to sleep at the same time.
const SLEEPERS: usize = 8;
/// When an alarm that could not be acted on goes off again.
const AGAIN: Duration = Duration::from_secs(30);

/// When something is next due, by session.
pub(crate) struct Timers {
    set: Mutex<Set>,
    changed: Notify,
    /// Held while a session is put to sleep; no other alarm waits for that.
    pub sleepers: Semaphore,
}

impl Default for Timers {
    fn default() -> Timers {
        Timers { set: Mutex::default(), changed: Notify::new(), sleepers: Semaphore::new(SLEEPERS) }
    }
}

#[derive(Default)]
struct Set {
    by_time: BTreeSet<(Timestamp, SessionId)>,
    by_session: HashMap<SessionId, Timestamp>,
    /// An alarm of these is being acted on: each commit on the way sets the next one, which counts once it is done.
    busy: HashSet<SessionId>,
    /// What could not be done isn't tried again before this time.
    not_before: HashMap<SessionId, Timestamp>,
}

impl Set {
    fn put(&mut self, id: SessionId, at: Option<Timestamp>) {
        if let Some(old) = self.by_session.remove(&id) {
            self.by_time.remove(&(old, id));
        }
        let Some(at) = at else {
            self.not_before.remove(&id);
            return;
        };
        let at = self.not_before.get(&id).map_or(at, |earliest| at.max(*earliest));
        self.by_time.insert((at, id));
        self.by_session.insert(id, at);
    }
}

impl Timers {
    /// Something is due in the session at this time; `None`: nothing is.
    pub(crate) fn set(&self, id: SessionId, at: Option<Timestamp>) {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        if set.by_session.get(&id).copied() == at || set.busy.contains(&id) {
            return;
        }
        set.put(id, at);
        if at.is_some() {
            self.changed.notify_one();
        }
    }

    /// The alarm of a session has been acted on. `at`: when the next one goes off; `not_before`: where this one could not
    /// be done, when it may be tried again.
    fn acted(&self, id: SessionId, at: Option<Timestamp>, not_before: Option<Timestamp>) {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        set.busy.remove(&id);
        match not_before {
            Some(earliest) => set.not_before.insert(id, earliest),
            None => set.not_before.remove(&id),
        };
        set.put(id, at);
        self.changed.notify_one();
    }

    /// Takes a session whose time has come, until it is [`Self::acted`] on; else tells how long to wait for the next.
    fn take_due(&self, now: Timestamp) -> Result<SessionId, Duration> {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        match set.by_time.first().copied() {
            Some((at, id)) if at <= now => {
                set.by_time.remove(&(at, id));
                set.by_session.remove(&id);
                set.busy.insert(id);
                Ok(id)
            }
            Some((at, _)) => Err(at.since(now).min(LONGEST)),
            None => Err(LONGEST),
        }
    }
}

/// The clocks in a session's row.
pub(crate) fn clocks(row: &SessionRow) -> Clocks {
    Clocks {
        timeout: row.timeout_seconds.map(Duration::from_secs),
        timeout_at: row.timeout_at,
        timeout_left: row.timeout_left_ms.map(Duration::from_millis),
        timeout_told: row.timeout_told,
        expires_at: row.expires_at,
        wake_at: row.wake_at,
        try_again_at: row.try_again_at,
    }
}

/// Writes clocks into a row.
pub(crate) fn put(row: &mut SessionRow, clocks: &Clocks) {
    row.timeout_at = clocks.timeout_at;
    row.timeout_left_ms = clocks.timeout_left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
    row.timeout_told = clocks.timeout_told;
    row.expires_at = clocks.expires_at;
    row.wake_at = clocks.wake_at;
    row.try_again_at = clocks.try_again_at;
}

/// True unless the instant that an alarm went off for has been moved meanwhile.
pub(crate) fn still_holds(row: &SessionRow, cause: EndReason, now: Timestamp) -> bool {
    match cause {
        EndReason::Expired => row.expires_at.is_some_and(|at| at <= now),
        EndReason::Timeout if row.state == State::Running => row.timeout_at.is_some_and(|at| at <= now),
        _ => true,
    }
}

/// Sets the session's alarm by its row.
pub(crate) fn arm(inner: &Inner, session: &Session) {
    let row = session.view().row;
    inner.timers.set(row.id, clocks(&row).next(row.state, session.idle_look_at()));
}

/// Waits for what is due and acts on it, until the server goes down.
pub(crate) async fn run(inner: Arc<Inner>) {
    loop {
        let changed = inner.timers.changed.notified();
        match inner.timers.take_due(inner.now()) {
            Ok(id) => {
                let inner_ = inner.clone();
                inner.tasks.spawn(async move { go_off(&inner_, id).await });
            }
            Err(wait) => tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = changed => {}
                () = inner.draining.cancelled() => return,
            },
        }
    }
}

async fn go_off(inner: &Arc<Inner>, id: SessionId) {
    let session = match inner.find(id).await {
        Ok(session) => session,
        Err(Error::NotFound { .. }) => return inner.timers.acted(id, None, None),
        Err(error) => {
            tracing::warn!(session = %id, %error, "what is due can't be looked up");
            return inner.timers.acted(id, Some(inner.now().plus(AGAIN)), None);
        }
    };
    let row = session.view().row;
    let due = clocks(&row).due(row.state, session.idle_look_at(), inner.now());
    let acted = match due {
        None => Ok(()),
        Some(alarm) => act(inner, &session, &row, alarm).await,
    };
    if let (Some(alarm), Err(error)) = (due, &acted)
        && !matches!(error, Error::Deleted { .. } | Error::Expired { .. })
    {
        tracing::warn!(session = %id, ?alarm, %error, "what is due is not done");
    }
    let (row, look_at, now) = (session.view().row, session.idle_look_at(), inner.now());
    // Still due: it could not be done, and is not tried without a pause.
    let still_due = clocks(&row).due(row.state, look_at, now).is_some();
    inner.timers.acted(id, clocks(&row).next(row.state, look_at), still_due.then(|| now.plus(AGAIN)));
}

async fn act(inner: &Arc<Inner>, session: &Arc<Session>, row: &SessionRow, alarm: Alarm) -> Result<(), Error> {
    let actor = Actor::system();
    match alarm {
        Alarm::Expire => inner.command_for(session, Command::Delete, &actor, EndReason::Expired).await?.wait().await,
        Alarm::TimeoutNear => tell_of_timeout(inner, session).await,
        Alarm::Timeout => {
            let command = if row.on_timeout == OnTimeout::Stop { Command::Stop } else { Command::Hibernate };
            idle::put_to_sleep(inner, session, command, EndReason::Timeout).await
        }
        Alarm::Wake => wake(inner, session).await,
        Alarm::LookForIdleness => idle::look(inner, session).await,
        Alarm::TryAgain => idle::try_again(inner, session).await,
    }
}

/// The running time ends soon: programs and history are told.
async fn tell_of_timeout(inner: &Arc<Inner>, session: &Arc<Session>) -> Result<(), Error> {
    let now = inner.now();
    let mut told = None;
    let (tell, mut heard) = tokio::sync::mpsc::unbounded_channel();
    inner
        .change(
            session,
            Box::new(move |row| {
                let at = row.timeout_at.filter(|_| !row.timeout_told && row.state == State::Running)?;
                let mut change = SessionChange::new(row.clone());
                change.session.timeout_told = true;
                let data = json!({ "timeout_at": at, "seconds": at.since(now).as_secs(), "on_timeout": row.on_timeout });
                let (kind, actor) = (EventType::TIMEOUT_NEAR, Actor::system());
                change.events.push(NewEvent { at: now, kind, actor, operation_id: None, data });
                let _ = tell.send(at.since(now));
                Some(change)
            }),
        )
        .await?;
    while let Ok(left) = heard.try_recv() {
        told = Some(left);
    }
    if let (Some(left), Some(live)) = (told, inner.awake(session)) {
        moments::announce(inner, session, &live, Moment::TimeoutNear { left }).await;
    }
    Ok(())
}

/// The time to wake has come. It is over with this try, however that ends.
async fn wake(inner: &Arc<Inner>, session: &Arc<Session>) -> Result<(), Error> {
    let actor = Actor::system();
    let woken = match inner.command(session, Command::Wake, &actor).await {
        Ok(admitted) => admitted.wait().await,
        Err(error) => Err(error),
    };
    if matches!(woken, Err(Error::ShuttingDown)) {
        return woken;
    }
    let over = |row: &SessionRow| {
        row.wake_at?;
        let mut change = SessionChange::new(row.clone());
        change.session.wake_at = None;
        Some(change)
    };
    inner.change(session, Box::new(over)).await?;
    woken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_one_alarm_and_the_earliest_comes_first() {
        let timers = Timers::default();
        let (a, b) = (SessionId::new(), SessionId::new());
        timers.set(a, Some(Timestamp(500)));
        timers.set(b, Some(Timestamp(300)));
        timers.set(b, Some(Timestamp(700)));
        assert_eq!(timers.take_due(Timestamp(400)), Err(Duration::from_millis(100)));
        assert_eq!(timers.take_due(Timestamp(800)), Ok(a));
        timers.acted(a, Some(Timestamp(100)), None);
        timers.set(a, None);
        assert_eq!(timers.take_due(Timestamp(800)), Ok(b));
        assert_eq!(timers.take_due(Timestamp(800)), Err(LONGEST));
    }

    #[test]
    fn an_alarm_is_acted_on_once_and_what_could_not_be_done_waits() {
        let timers = Timers::default();
        let id = SessionId::new();
        timers.set(id, Some(Timestamp(100)));
        assert_eq!(timers.take_due(Timestamp(200)), Ok(id));
        // Commits on the way.
        timers.set(id, Some(Timestamp(100)));
        assert_eq!(timers.take_due(Timestamp(200)), Err(LONGEST));
        timers.acted(id, Some(Timestamp(100)), Some(Timestamp(1000)));
        timers.set(id, Some(Timestamp(100)));
        assert_eq!(timers.take_due(Timestamp(200)), Err(Duration::from_millis(800)));
        assert_eq!(timers.take_due(Timestamp(1000)), Ok(id));
        timers.acted(id, Some(Timestamp(100)), None);
        assert_eq!(timers.take_due(Timestamp(1000)), Ok(id), "done: what is due next doesn't wait");
    }
}
