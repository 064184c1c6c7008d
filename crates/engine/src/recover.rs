//! A server comes back: what its predecessor left is finished, undone or gone on with.

use crate::{
    Error, create,
    driver::{Message, tell},
    ending, facts,
    inner::{Inner, blocking},
    operation::{Failure, Job, cause_of, paused},
    policy, pool, recapture, rollback,
    session::{Live, SandboxEnd, Session},
    shelf, timers, wake, watch,
};
use futures_util::StreamExt;
use lifecycle::{Plan, Seen, Sleeper};
use model::{Actor, EndReason, EventType, OperationKind, OperationState, SessionId, State};
use serde_json::json;
use std::{
    collections::{HashMap, HashSet},
    fs,
    sync::Arc,
    time::Duration,
};
use store::{NewEvent, OperationRow, SessionChange, SessionRow};
use wire::control::{Phase, Request};

/// Sessions that are recovered at the same time.
const AT_ONCE: usize = 32;
/// The longest that a capture or a thaw can go on after its server.
const STEP_LIMIT: Duration = Duration::from_secs(15 * 60);
/// Sessions read at once.
const STRETCH: usize = 1000;

/// Recovers every session; answers once all are as the store says, or on their way.
pub(crate) async fn recover(inner: &Arc<Inner>) -> Result<(), Error> {
    let mut operations: HashMap<SessionId, OperationRow> = HashMap::new();
    for operation in inner.store.running_operations().await? {
        operations.insert(operation.session_id, operation);
    }
    let (mut known, mut hashes, mut unclear) = (HashSet::new(), HashSet::new(), Vec::new());
    let mut cursor = None;
    loop {
        let scan = inner.store.scan_sessions(STRETCH, cursor).await?;
        for damaged in scan.unreadable {
            tracing::error!(id = damaged.id, detail = damaged.detail, "a session's record is damaged; it is left alone");
            known.extend(damaged.id.parse::<SessionId>());
        }
        for row in scan.sessions {
            known.insert(row.id);
            hashes.extend([&row.template_hash, &row.guest_hash, &row.runsc_hash].into_iter().flatten().cloned());
            inner.timers.set(row.id, timers::clocks(&row).next(row.state, None));
            let operation = operations.remove(&row.id);
            if operation.is_some() || !is_at_rest(inner, &row) {
                unclear.push((row, operation));
            }
        }
        cursor = scan.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    loop {
        let scan = inner.store.scan_snapshots(STRETCH, cursor).await?;
        for row in scan.snapshots {
            hashes.extend([row.template_hash, row.guest_hash, row.runsc_hash].into_iter().flatten());
        }
        cursor = scan.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    // An operation of a session that is deleted has nothing left to do.
    let inner_ = inner.clone();
    blocking(move || {
        inner_.programs.collect(&hashes);
        // What was being fetched for sessions that were never created.
        let _ = ending::remove_tree(&inner_.config.data_dir.join("tmp"));
    })
    .await?;
    futures_util::stream::iter(unclear)
        .for_each_concurrent(AT_ONCE, |(row, operation)| async move {
            let id = row.id;
            if let Err(error) = one(inner, row, operation).await {
                tracing::error!(session = %id, %error, "a session can't be recovered; it is left as it is");
            }
        })
        .await;
    remove_leftovers(inner, known);
    // Only now: what a supervisor was still taking has come to its end.
    if let Err(error) = shelf::clear_leftovers(inner).await {
        tracing::warn!(%error, "what was left of snapshots stays");
    }
    Ok(())
}

/// True where nothing is alive that could need anything: almost every sleeping session.
fn is_at_rest(inner: &Inner, row: &SessionRow) -> bool {
    let layout = inner.layout(row.id);
    matches!(row.state, State::Hibernated | State::Stopped | State::Failed)
        && !rollback::is_staged(&layout)
        && !ending::is_held(&layout)
        && ending::orphan(&layout, inner.programs.runsc_state()).is_none()
}

async fn one(inner: &Arc<Inner>, row: SessionRow, operation: Option<OperationRow>) -> Result<(), Error> {
    let (state, kind) = (row.state, operation.as_ref().map(|operation| operation.kind));
    let session = inner.adopt(row);
    rollback::settle(&session).await?;
    let (live, seen) = look(inner, &session).await;
    let plan = lifecycle::recover(state, kind, seen);
    tracing::info!(session = %session.id, %state, ?kind, ?seen, ?plan, "recovering");
    let runsc_state = inner.programs.runsc_state();
    let end = |reason| ending::end_sandbox(&session.layout, runsc_state, reason, Duration::ZERO);
    match (plan, live) {
        (Plan::Keep, _) => close(inner, &session, operation, None).await,
        (Plan::Resume { state }, Some(live)) => {
            if matches!(seen, Seen::Alive { sleeper: Sleeper::Captured, .. }) {
                // Captured, and the store knows of no hibernate: it goes on.
                live.supervisor.call_soon(&Request::AbortHibernate).await.map_err(|error| session.call_error(error))?;
            }
            watch::attach(inner, &session, live);
            close(inner, &session, operation, Some(state)).await?;
            // How long nothing has happened, its supervisor knows.
            policy::look_soon(inner, &session);
            Ok(())
        }
        (Plan::FinishBoot, Some(live)) => {
            let operation = operation.unwrap_or_else(|| made_up(inner, &session, OperationKind::Create));
            if operation.kind == OperationKind::Create && operation.intent.get("source").is_some_and(|source| !source.is_null()) {
                // Whether its files were all put in, nobody knows.
                return fail_create(inner, &session, Some(operation)).await;
            }
            watch::attach(inner, &session, live.clone());
            run(inner, &session, operation, Job::FinishBoot(live)).await
        }
        (Plan::FinishHibernate, Some(live)) => {
            watch::attach(inner, &session, live.clone());
            let operation = operation.unwrap_or_else(|| made_up(inner, &session, OperationKind::Hibernate));
            run(inner, &session, operation, Job::FinishHibernate(live)).await
        }
        (Plan::ResumeGrace, Some(live)) => {
            watch::attach(inner, &session, live.clone());
            close(inner, &session, operation, None).await?;
            let confirm = inner.config.confirm;
            let request = Request::CommitHibernate { confirm };
            live.supervisor.call_soon(&request).await.map_err(|error| session.call_error(error))?;
            Ok(())
        }
        (Plan::FinishStop | Plan::FinishDelete, _) => {
            let (kind, job) =
                if plan == Plan::FinishStop { (OperationKind::Stop, Job::Stop) } else { (OperationKind::Delete, Job::Delete) };
            let operation = operation.unwrap_or_else(|| made_up(inner, &session, kind));
            run(inner, &session, operation, job).await
        }
        (Plan::FailCreate, _) => fail_create(inner, &session, operation).await,
        (Plan::UndoWake, _) => {
            end(EndReason::StartFailed).await?;
            let error = Error::internal("the server ended while it woke the session");
            let failure = match session.view().row.image_generation {
                Some(image_of) => {
                    if seen != Seen::Nothing {
                        // What was alive may have been running on.
                        wake::suspect(&session.layout, image_of).await?;
                    }
                    wake::judge(&session.layout, image_of, error).await
                }
                None => Failure::plain(error),
            };
            let operation = operation.unwrap_or_else(|| made_up(inner, &session, OperationKind::Wake));
            run(inner, &session, operation, Job::Undo(failure)).await
        }
        (Plan::UndoStart, _) => {
            end(EndReason::StartFailed).await?;
            let failure = Failure::plain(Error::internal("the server ended while it started the session"));
            let operation = operation.unwrap_or_else(|| made_up(inner, &session, OperationKind::Start));
            run(inner, &session, operation, Job::Undo(failure)).await
        }
        (Plan::EndLeftover, _) => {
            end(EndReason::Asked).await?;
            close(inner, &session, operation, None).await
        }
        (Plan::Recapture, _) => {
            let operation = match operation {
                Some(operation) if operation.kind == OperationKind::Recapture => operation,
                other => {
                    close(inner, &session, other, None).await?;
                    if seen == Seen::Orphan {
                        recapture::note_loss(inner, &session, ending::mark(&session.layout).map(|mark| mark.pid)).await;
                    }
                    recapture::store_intent(inner, &session).await?
                }
            };
            run(inner, &session, operation, Job::Recapture).await
        }
        (Plan::Lost, _) => lost(inner, &session, operation).await,
        // Told alive and gone again since.
        (Plan::Resume { .. } | Plan::FinishBoot | Plan::FinishHibernate | Plan::ResumeGrace, None) => {
            lost(inner, &session, operation).await
        }
    }
}

/// What is alive of a session.
async fn look(inner: &Inner, session: &Arc<Session>) -> (Option<Arc<Live>>, Seen) {
    let without_supervisor = || match ending::orphan(&session.layout, inner.programs.runsc_state()) {
        Some(_) => Seen::Orphan,
        None => Seen::Nothing,
    };
    if !ending::is_held(&session.layout) {
        return (None, without_supervisor());
    }
    let stored = session.view().row.generation;
    let live = Live::new(session.layout.clone(), stored);
    match ending::settled(&live, STEP_LIMIT).await {
        Ok(Some(status)) => {
            live.set_generation(status.generation);
            let sleeper = match status.phase {
                Phase::Starting => Sleeper::Starting,
                Phase::Running => Sleeper::Running,
                Phase::Paused => Sleeper::Paused,
                Phase::Captured => Sleeper::Captured,
                Phase::Confirming => Sleeper::Confirming,
                Phase::Ended => return (None, Seen::Nothing),
            };
            (Some(live), Seen::Alive { sleeper, of_stored_generation: status.generation == stored })
        }
        Ok(None) => (None, without_supervisor()),
        Err(error) => {
            // Alive, and slow to answer: that is not "dead", and nothing is killed for it.
            tracing::warn!(session = %session.id, %error, "a supervisor gives no answer yet");
            let sleeper = if session.view().row.state == State::Paused { Sleeper::Paused } else { Sleeper::Running };
            (Some(live), Seen::Alive { sleeper, of_stored_generation: true })
        }
    }
}

async fn run(inner: &Arc<Inner>, session: &Arc<Session>, operation: OperationRow, job: Job) -> Result<(), Error> {
    create::run_stored(inner, session, operation, job, Actor::system()).await?;
    Ok(())
}

async fn fail_create(inner: &Arc<Inner>, session: &Arc<Session>, operation: Option<OperationRow>) -> Result<(), Error> {
    create::clean_up(inner, session).await;
    let operation = operation.unwrap_or_else(|| made_up(inner, session, OperationKind::Create));
    let error = Error::internal("the server ended while it created the session");
    let reason = Some(format!("{}: {error}", EndReason::CreateFailed));
    run(inner, session, operation, Job::Undo(Failure { error, memory_spent: false, reason })).await
}

/// A sandbox that went while no server ran.
async fn lost(inner: &Arc<Inner>, session: &Arc<Session>, operation: Option<OperationRow>) -> Result<(), Error> {
    close(inner, session, operation, None).await?;
    facts::drain(inner, session).await?;
    let rebooted = ending::was_rebooted(&session.layout);
    ending::clear_the_way(&session.layout, inner.programs.runsc_state()).await?;
    let generation = session.view().row.generation;
    let end = session.end_of(generation).unwrap_or_else(|| {
        let (reason, detail) = if rebooted {
            (EndReason::HostRebooted, "the computer was restarted")
        } else {
            (EndReason::SupervisorLost, "its supervisor ended without a word")
        };
        SandboxEnd { generation, reason, detail: detail.to_owned() }
    });
    tell(inner, session, Message::SandboxEnded(end)).await
}

/// Ends an operation that needs nothing more: it is done where the session is where it leads, else it is undone.
async fn close(
    inner: &Arc<Inner>,
    session: &Arc<Session>,
    operation: Option<OperationRow>,
    state: Option<State>,
) -> Result<(), Error> {
    let before = session.view().row.state;
    let after = state.unwrap_or(before);
    if operation.is_none() && after == before {
        return Ok(());
    }
    let now = inner.now();
    let change = move |row: &SessionRow| {
        let mut change = SessionChange::new(row.clone());
        let event = |kind, operation_id, data| NewEvent { at: now, kind, actor: Actor::system(), operation_id, data };
        if after != row.state {
            change.session.state = after;
            change.session.updated_at = now;
            change.session.reason = None;
            let kind = if after == State::Paused { OperationKind::Pause } else { OperationKind::Unpause };
            let clocks = timers::clocks(row).after(kind, after, now);
            timers::put(&mut change.session, &clocks);
            if after == State::Paused {
                paused(&mut change.session, operation.as_ref().map_or(EndReason::Asked, cause_of), now);
            }
            let data = json!({ "from": row.state, "to": after, "reason": change.session.reason });
            change.events.push(event(EventType::STATE_CHANGED, operation.as_ref().map(|operation| operation.id), data));
        }
        if let Some(mut operation) = operation.clone() {
            let done = lifecycle::shows_done(operation.kind, row.state, after);
            operation.state = if done { OperationState::Done } else { OperationState::Undone };
            operation.ended_at = Some(now);
            let data = json!({ "kind": operation.kind, "detail": "the server ended meanwhile" });
            let kind = if done { EventType::OPERATION_DONE } else { EventType::OPERATION_FAILED };
            change.events.push(event(kind, Some(operation.id), data.clone()));
            if !done {
                operation.error = Some(json!({ "code": "internal", "detail": "the server ended meanwhile" }));
            }
            change.operations.push(operation);
        }
        Some(change)
    };
    inner.change(session, Box::new(change)).await
}

/// An operation for what has to be done without one in the store.
fn made_up(inner: &Inner, session: &Session, kind: OperationKind) -> OperationRow {
    OperationRow::begun(session.id, kind, inner.now(), json!({ "actor": Actor::system() }))
}

/// Removes, in the background, directories that no session owns: pooled sandboxes of the last server.
fn remove_leftovers(inner: &Arc<Inner>, known: HashSet<SessionId>) {
    let Ok(entries) = fs::read_dir(inner.sessions_dir()) else { return };
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<SessionId>().ok());
    let leftovers: Vec<SessionId> = ids.filter(|id| !known.contains(id)).collect();
    let inner_ = inner.clone();
    inner.tasks.spawn(async move {
        let inner = &inner_;
        futures_util::stream::iter(leftovers)
            .for_each_concurrent(AT_ONCE, |id| async move {
                // A session that was created meanwhile has one, too.
                if matches!(inner.store.session(id).await, Ok(None)) && inner.known(id).is_none() {
                    pool::discard(inner, id).await;
                }
            })
            .await;
    });
}
