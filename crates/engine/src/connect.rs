//! Coming back to a session: how it stands, whether it answers, and all that is needed to go on with it.
//!
//! Nothing is claimed that was not just seen: `connected` is said only after the guest has answered. An answer that
//! doesn't come in time is no death, and nothing is killed for it.

use crate::{Caller, Engine, Error, SessionView, session::Session, snapshots};
use lifecycle::Command;
use model::{SessionId, SnapshotId, State, Timestamp};
use std::{sync::Arc, time::Duration};
use wire::{
    control::Request,
    records::{ExecRecord, TerminalRecord},
};

/// How long a guest may take to answer before it counts as unresponsive.
const PROBE_LIMIT: Duration = Duration::from_secs(15);
/// Execs and terminals that are told, newest first.
const SHOWN: usize = 100;
/// Snapshots that are told, newest first.
const SHOWN_SNAPSHOTS: usize = 10;

/// How a session is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Its guest has just answered.
    Connected,
    /// It should be running and gave no answer in time.
    Unresponsive,
    Paused,
    Hibernated,
    Stopped,
    Failed,
    Expired,
    Deleted,
}

/// A way back to a session that doesn't run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WayBack {
    /// `wake`, `start`, or `rollback`.
    pub action: &'static str,
    /// Where it goes on from a snapshot.
    pub snapshot_id: Option<SnapshotId>,
    /// Of when that is which comes back.
    pub at: Option<Timestamp>,
    /// True where its memory comes back, too.
    pub memory: bool,
}

/// The answer to a client that comes back.
#[derive(Debug)]
pub struct Connected {
    pub found: Found,
    pub view: SessionView,
    /// This call woke, unpaused or started it.
    pub woken: bool,
    /// It had slept on storage before.
    pub slept: bool,
    pub ways_back: Vec<WayBack>,
    pub terminals: Vec<TerminalRecord>,
    pub execs: Vec<ExecRecord>,
    /// Why it could not be brought back, where that was tried.
    pub failure: Option<Error>,
}

impl Engine {
    /// Finds a session for a client that comes back. With `wake` it is woken, or unpaused where idleness paused it; with
    /// `start` it is booted where it is stopped. Without both nothing is started and nothing changes.
    ///
    /// # Errors
    /// [`Error::NotFound`]. Everything else is an answer.
    pub async fn connect(&self, caller: &Caller, id: SessionId, wake: bool, start: bool) -> Result<Connected, Error> {
        let session = self.inner.find(id).await?;
        let before = session.view().row;
        let brought = if wake { self.bring_back(caller, &session, start).await } else { self.inner.created(&session).await };
        let mut failure = brought.err();
        let mut found = found(&session);
        if found == Found::Connected && failure.is_none() {
            (found, failure) = self.see(&session).await;
        } else if found == Found::Connected {
            found = Found::Unresponsive;
        }
        let view = session.view();
        let woken = !before.state.has_sandbox() || before.state == State::Paused;
        let woken = woken && before.state != State::Creating && view.row.state == State::Running;
        let (mut terminals, mut execs) = (Vec::new(), Vec::new());
        if view.row.state != State::Deleted {
            terminals = self.terminals(id).await?;
            terminals.truncate(SHOWN);
            execs = self.execs(id, SHOWN, None).await?.items;
        }
        // What a state says by itself is no failure.
        let failure = failure.filter(|error| {
            !matches!(
                error,
                Error::Paused { .. }
                    | Error::NotRunning { .. }
                    | Error::Deleted { .. }
                    | Error::Expired { .. }
                    | Error::Failed { .. }
            )
        });
        let slept = before.state == State::Hibernated;
        let mut ways_back = ways_back(&view);
        let kept = snapshots::ways_back(&self.inner, &view.row, SHOWN_SNAPSHOTS).await?;
        ways_back.extend(kept.iter().map(|row| WayBack {
            action: "rollback",
            snapshot_id: Some(row.id),
            at: Some(row.created_at),
            memory: row.memory,
        }));
        Ok(Connected { found, ways_back, view, woken, slept, terminals, execs, failure })
    }

    async fn bring_back(&self, caller: &Caller, session: &Arc<Session>, start: bool) -> Result<(), Error> {
        if session.view().row.state == State::Deleted {
            return Ok(());
        }
        self.inner.created(session).await?;
        let admitted = self.inner.command(session, Command::Use { start }, &caller.actor).await?;
        admitted.wait_for_client().await
    }

    /// Asks the guest for a sign of life; through changes of the session's state, which are waited for.
    async fn see(&self, session: &Arc<Session>) -> (Found, Option<Error>) {
        let deadline = tokio::time::Instant::now() + PROBE_LIMIT;
        let mut changes = session.changes();
        loop {
            changes.borrow_and_update();
            let state = found(session);
            if state != Found::Connected {
                return (state, None);
            }
            let probe = async {
                let live = self.inner.awake(session)?;
                live.supervisor.call(&Request::Probe).await.ok().map(|_| live.generation())
            };
            match tokio::time::timeout_at(deadline, probe).await {
                Ok(Some(generation)) if generation == session.view().row.generation => {
                    return if found(session) == Found::Connected { (Found::Connected, None) } else { (found(session), None) };
                }
                Ok(_) => {
                    // It is just changing, or its end is being written down.
                    if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                        return (Found::Unresponsive, Some(Error::Unresponsive { session: session.id }));
                    }
                }
                Err(_) => return (Found::Unresponsive, Some(Error::Unresponsive { session: session.id })),
            }
        }
    }
}

/// What a session's state alone says.
fn found(session: &Session) -> Found {
    let row = session.view().row;
    match row.state {
        State::Creating | State::Running => Found::Connected,
        State::Paused => Found::Paused,
        State::Hibernated => Found::Hibernated,
        State::Stopped => Found::Stopped,
        State::Failed => Found::Failed,
        State::Deleted if row.reason.as_deref() == Some("expired") => Found::Expired,
        State::Deleted => Found::Deleted,
    }
}

fn ways_back(view: &SessionView) -> Vec<WayBack> {
    let at = view.row.ended_at;
    match view.row.state {
        State::Hibernated => vec![WayBack { action: "wake", snapshot_id: None, at, memory: true }],
        State::Stopped => vec![WayBack { action: "start", snapshot_id: None, at, memory: false }],
        _ => Vec::new(),
    }
}
