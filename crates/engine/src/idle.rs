//! Idleness: whether anything happens in a session, and putting to sleep those in which nothing does.
//!
//! ```text
//!  running ──nothing for the policy's window──► hibernate (or stop), cause `idle`
//!     ▲                                             │ can't be done
//!     │ needed by somebody                          ▼
//!     └──────────────────────────────── paused, reason `idle` ──tried again later──► hibernated
//! ```
//! The evidence is asked of the supervisor, which keeps it through restarts of the server. It is asked twice: when the
//! time has come, and again inside the operation, where nothing new can begin any more.

use crate::{
    Engine, Error,
    inner::Inner,
    operation::Context,
    session::{Live, Session},
    supervisor_client::CallError,
};
use lifecycle::{Command, Idleness, Quiet, idleness, try_again_after};
use model::{Actor, EndReason, EventType, IdleWhen, SessionId, State, Timestamp};
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};
use store::{NewEvent, SessionChange, SessionRow};
use wire::{
    control::{Answer, Request},
    records::Activity,
};

/// How long a supervisor may take to say what happens in its sandbox.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// The same where somebody only looks.
const LOOK_LIMIT: Duration = Duration::from_millis(500);
/// When a session that could not be asked is looked at again.
const AGAIN: Duration = Duration::from_secs(60);
/// What is looked at where there is no policy.
const USUAL_WINDOW: Duration = Duration::from_secs(600);

impl Engine {
    /// What happens in a running session now; `None` where nobody can tell. Asking changes nothing and is no activity.
    pub async fn activity(&self, id: SessionId) -> Option<Activity> {
        let session = self.inner.find(id).await.ok()?;
        let row = session.view().row;
        let live = self.inner.awake(&session).filter(|_| row.state == State::Running)?;
        let activity = ask(&live, &row, LOOK_LIMIT).await.ok()?;
        session.set_hibernate_after(hibernate_after(&row, &activity, self.inner.now()));
        Some(activity)
    }
}

async fn ask(live: &Live, row: &SessionRow, limit: Duration) -> Result<Activity, CallError> {
    let window = row.idle.map_or(USUAL_WINDOW, |idle| Duration::from_secs(idle.after_seconds));
    let window_ms = u64::try_from(window.as_millis()).unwrap_or(u64::MAX);
    match live.supervisor.call_within(&Request::Activity { window_ms }, limit).await? {
        Answer::Activity { activity } => Ok(activity),
        _ => Err(CallError::Broken("it answered with something else".to_owned())),
    }
}

fn quiet(activity: &Activity) -> Quiet {
    Quiet { nothing_for: Duration::from_millis(activity.quiet_ms), nobody_for: Duration::from_millis(activity.no_clients_ms) }
}

/// When idleness will have its way if nothing happens until then; `None` while something does.
fn hibernate_after(row: &SessionRow, activity: &Activity, now: Timestamp) -> Option<Timestamp> {
    let busy = match row.idle?.when {
        IdleWhen::NoActivity => activity.quiet_ms == 0,
        IdleWhen::NoClients => activity.no_clients_ms == 0,
    };
    match idleness(row.idle, quiet(activity)) {
        Idleness::LookAgainAfter(left) if !busy => Some(now.plus(left)),
        Idleness::Idle { .. } => Some(now),
        Idleness::LookAgainAfter(_) | Idleness::Never => None,
    }
}

/// Whether a running session has been idle for long enough; if so, it is put to sleep.
pub(crate) async fn look(inner: &Arc<Inner>, session: &Arc<Session>) -> Result<(), Error> {
    let row = session.view().row;
    let asked = match inner.awake(session) {
        Some(live) => ask(&live, &row, ASK_LIMIT).await,
        None => Err(CallError::Broken("its supervisor isn't there".to_owned())),
    };
    let now = inner.now();
    let activity = match asked {
        Ok(activity) => activity,
        Err(error) => {
            // Nothing is put to sleep on a guess.
            tracing::debug!(session = %session.id, %error, "whether a session is idle can't be told");
            session.set_idle_look(Some(now.plus(AGAIN)));
            return Ok(());
        }
    };
    session.set_hibernate_after(hibernate_after(&row, &activity, now));
    let action = match idleness(row.idle, quiet(&activity)) {
        Idleness::Never => {
            session.set_idle_look(None);
            return Ok(());
        }
        Idleness::LookAgainAfter(left) => {
            session.set_idle_look(Some(now.plus(left.max(Duration::from_millis(200)))));
            return Ok(());
        }
        Idleness::Idle { action, .. } => action,
    };
    session.set_idle_look(Some(now.plus(AGAIN)));
    let command = if action == model::IdleAction::Stop { Command::Stop } else { Command::Hibernate };
    put_to_sleep(inner, session, command, EndReason::Idle).await
}

/// Hibernates or stops a session because of idleness or the end of its running time. Where it can't be hibernated it is
/// paused instead.
pub(crate) async fn put_to_sleep(
    inner: &Arc<Inner>,
    session: &Arc<Session>,
    command: Command,
    cause: EndReason,
) -> Result<(), Error> {
    let _place = inner.timers.sleepers.acquire().await.map_err(|_| Error::ShuttingDown)?;
    let asleep = carry_out(inner, session, command, cause).await;
    match asleep {
        // Something has just begun.
        Err(Error::NotIdle { .. }) => look_soon(inner, session),
        // Whether it is idle can't be told: nothing is put to sleep on a guess.
        Err(Error::Unresponsive { .. }) if cause == EndReason::Idle => Ok(()),
        Err(error) if command == Command::Hibernate && is_hindrance(&error) => {
            note(inner, session, &error).await?;
            match carry_out(inner, session, Command::Pause, cause).await {
                Err(Error::NotIdle { .. }) => look_soon(inner, session),
                paused => {
                    paused?;
                    defer(inner, session, cause, &error).await
                }
            }
        }
        other => other,
    }
}

/// Tries to hibernate a session that was paused because that had failed.
pub(crate) async fn try_again(inner: &Arc<Inner>, session: &Arc<Session>) -> Result<(), Error> {
    let _place = inner.timers.sleepers.acquire().await.map_err(|_| Error::ShuttingDown)?;
    let cause = session.view().row.reason.as_deref().and_then(|reason| reason.parse().ok()).unwrap_or(EndReason::Idle);
    match carry_out(inner, session, Command::Hibernate, cause).await {
        Err(error) if is_hindrance(&error) => {
            let now = inner.now();
            let later = move |row: &SessionRow| {
                let mut change = SessionChange::new(row.clone());
                put_off(&mut change.session, now);
                (row.state == State::Paused).then_some(change)
            };
            inner.change(session, Box::new(later)).await?;
            note(inner, session, &error).await?;
            defer(inner, session, cause, &error).await
        }
        other => other,
    }
}

/// The next try of a session that is paused instead of hibernated.
pub(crate) fn put_off(row: &mut SessionRow, now: Timestamp) {
    row.try_again_at = Some(now.plus(try_again_after(row.tries)));
    row.tries = row.tries.saturating_add(1);
}

async fn carry_out(inner: &Arc<Inner>, session: &Arc<Session>, command: Command, cause: EndReason) -> Result<(), Error> {
    inner.command_for(session, command, &Actor::system(), cause).await?.wait().await
}

fn look_soon(inner: &Inner, session: &Session) -> Result<(), Error> {
    session.set_idle_look(Some(inner.now().plus(Duration::from_secs(1))));
    Ok(())
}

/// True for what stands in the way of saving the memory, and not for what has overtaken the attempt.
fn is_hindrance(error: &Error) -> bool {
    !matches!(
        error,
        Error::ShuttingDown
            | Error::Deleted { .. }
            | Error::Expired { .. }
            | Error::NotRunning { .. }
            | Error::Paused { .. }
            | Error::Held { .. }
            | Error::Lost { .. }
            | Error::Conflict { .. }
            | Error::NotIdle { .. }
    )
}

/// What stood in the way, for the sentence that says how the session stands.
async fn note(inner: &Arc<Inner>, session: &Arc<Session>, error: &Error) -> Result<(), Error> {
    let because = error.to_string();
    let change = move |row: &SessionRow| {
        let mut change = SessionChange::new(row.clone());
        change.session.ended_detail = Some(because.clone());
        Some(change)
    };
    inner.change(session, Box::new(change)).await
}

/// Says in the history that the session is paused instead, and why.
async fn defer(inner: &Arc<Inner>, session: &Arc<Session>, cause: EndReason, error: &Error) -> Result<(), Error> {
    let (now, because) = (inner.now(), error.to_string());
    let change = move |row: &SessionRow| {
        let mut change = SessionChange::new(row.clone());
        let data = json!({ "cause": cause, "because": because, "try_again_at": row.try_again_at });
        let (kind, actor) = (EventType::HIBERNATE_DEFERRED, Actor::system());
        change.events.push(NewEvent { at: now, kind, actor, operation_id: None, data });
        Some(change)
    };
    inner.change(session, Box::new(change)).await
}

/// Inside an operation that idleness asked for: whether it still holds.
pub(crate) async fn check(context: &Context, live: &Live) -> Result<(Activity, Duration), Error> {
    let session = &context.session;
    let row = session.view().row;
    let activity = ask(live, &row, ASK_LIMIT).await.map_err(|error| session.call_error(error))?;
    match idleness(row.idle, quiet(&activity)) {
        Idleness::Idle { quiet, .. } => Ok((activity, quiet)),
        Idleness::LookAgainAfter(_) | Idleness::Never => Err(Error::NotIdle { session: session.id }),
    }
}

/// The same, and the evidence goes into the history.
pub(crate) async fn confirm(context: &Context, live: &Live) -> Result<(), Error> {
    let (inner, session) = (&context.inner, &context.session);
    let (activity, quiet) = check(context, live).await?;
    let row = session.view().row;
    let event = context.event(EventType::IDLE_DECIDED, evidence(&row, &activity, quiet));
    let change = move |row: &SessionRow| {
        let mut change = SessionChange::new(row.clone());
        change.session.ended_detail = event.data["sentence"].as_str().map(str::to_owned);
        change.events.push(event.clone());
        Some(change)
    };
    inner.change(session, Box::new(change)).await
}

fn evidence(row: &SessionRow, activity: &Activity, quiet: Duration) -> Value {
    let seconds = quiet.as_secs();
    let cpu = (activity.cpu_percent * 10.0).round() / 10.0;
    let sentence = match row.idle.map(|idle| idle.when) {
        Some(IdleWhen::NoClients) => format!("nobody for {seconds} s: no viewer and no request"),
        _ => format!("nothing for {seconds} s: no exec, no typing, no output, no traffic, CPU {cpu} %"),
    };
    json!({
        "sentence": sentence, "quiet_seconds": seconds, "cpu_percent": cpu, "window_seconds": activity.window_ms / 1000,
        "execs": activity.execs, "clients": activity.clients, "last": activity.last,
        "policy": row.idle,
    })
}
