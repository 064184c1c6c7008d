//! Recapture: a sandbox whose supervisor has died is taken over by another one, memory and all.
//!
//! ```text
//!   orphaned ──► captured ──────► let go ───────► used ─────────► running
//!   old alive    old paused,      old gone,       image marked,   new alive and greeted;
//!                image whole      image whole     new alive       the store knows, image gone
//!      ▲            │
//!      └── again ◄──┘
//! ```
//! The new supervisor does the steps (its own `recapture` module), and the mark that it writes first, `takes_over`, says
//! which sandbox it takes over. Server and supervisor can die at any point. What is right then follows from what is there,
//! looked at in this order, and nothing else decides:
//!
//! 1. A supervisor lives: it is seen through.
//! 2. The old sandbox lives: it is the session, and is captured anew. What there is of an image is removed before it can
//!    run, so no image ever outlives a step that its programs take.
//! 3. The new sandbox lives: its programs have gone on from the image, so it is the session, and it is taken over in turn.
//! 4. Neither lives, and the image is whole and not marked as used, or the disk is still the one that belongs to it: the old
//!    sandbox stood still from the capture to its end and nothing has run since. The image is the session.
//! 5. Else the memory is lost, and the session says so.
//!
//! So old memory is never put above a newer disk, and a sandbox that can be kept is never given up.
//!
//! Whoever made the image and marked it as used, the commit that ends the operation raises the generation; the image is
//! removed afterwards, and would not be looked at again: rule 4 is only for a mark with `takes_over`, which the new
//! supervisor takes back once its sandbox has answered.

use crate::{
    Error,
    driver::{Message, tell},
    ending, facts,
    inner::{Inner, blocking},
    launch, network,
    operation::{Context, Failure},
    session::{Live, SandboxEnd, Session},
    wake, watch,
};
use model::{Actor, EndReason, EventType, Generation, OperationKind, State};
use serde_json::json;
use snapshot::image::ImageDescriptor;
use std::{fs::File, io, path::Path, sync::Arc, time::Duration};
use store::{NewEvent, OperationRow, SessionChange, SessionRow};
use wire::{
    control::{Request, Start, SuperviseSpec},
    layout::{SessionLayout, TakesOver},
};

/// How many supervisors are tried.
const TRIES: u32 = 3;
/// Between two tries to write its end down.
const AGAIN: Duration = Duration::from_secs(1);

/// What there is of a session whose supervisor has died.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    supervisor_lives: bool,
    /// The sandbox that lives.
    orphan: Option<TakesOver>,
    /// What was being taken over, where its image is whole and unused.
    image: Option<TakesOver>,
    /// The generation that was marked last, and the one in the store.
    marked: Generation,
    stored: Generation,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Next {
    SeeThrough,
    /// By a supervisor of the generation `to`, which no sandbox has had. `capture`: not from the image that is there.
    TakeOver {
        from: TakesOver,
        to: Generation,
        capture: bool,
    },
    Lost,
}

fn next(found: &Found) -> Next {
    if found.supervisor_lives {
        return Next::SeeThrough;
    }
    let to = found.marked.max(found.stored).next();
    if let Some(orphan) = &found.orphan {
        // A thaw raises the generation in the store and not in the mark.
        let latest = if orphan.generation == found.marked { found.stored.max(orphan.generation) } else { orphan.generation };
        return Next::TakeOver { from: TakesOver { generation: latest, ..orphan.clone() }, to, capture: true };
    }
    match &found.image {
        Some(from) => Next::TakeOver { from: from.clone(), to, capture: false },
        None => Next::Lost,
    }
}

fn look(layout: &SessionLayout, runsc_state: &Path, stored: Generation) -> Found {
    let mark = ending::mark(layout);
    let image = mark.as_ref().and_then(|mark| mark.takes_over.clone()).filter(|from| {
        let image = layout.image(from.generation);
        // Marked as used, but the disk is still its own: the restore failed before anything had run.
        ImageDescriptor::read(&image).is_ok() && !wake::is_spent(&image, &layout.upper())
    });
    Found {
        supervisor_lives: ending::is_held(layout),
        orphan: ending::orphan(layout, runsc_state),
        image,
        marked: mark.map_or(stored, |mark| mark.generation),
        stored,
    }
}

/// Takes a session's sandbox over.
pub(crate) async fn run(context: &Context) -> Result<(), Failure> {
    let session = &context.session;
    let rebooted = ending::was_rebooted(&session.layout);
    let error = match take_over(context).await {
        Ok(live) => return done(context, &live).await,
        // The next server goes on with it; nothing is lost yet.
        Err(Error::ShuttingDown) => return std::future::pending().await,
        Err(error) => error,
    };
    tracing::error!(session = %session.id, %error, "a sandbox whose supervisor died can't be taken over");
    // Whatever can't be done here: that the sandbox is gone must be told.
    if let Err(error) = ending::clear_the_way(&session.layout, context.inner.programs.runsc_state()).await {
        tracing::error!(session = %session.id, %error, "what a lost supervisor left can't be cleared away");
    }
    if let Err(error) = facts::drain(&context.inner, session).await {
        tracing::warn!(session = %session.id, %error, "the last facts of a lost sandbox are not applied");
    }
    let reason = if rebooted { EndReason::HostRebooted } else { EndReason::SupervisorLost };
    let detail = format!("its supervisor ended without a word, and the sandbox could not be taken over: {error}");
    let end = SandboxEnd { generation: session.view().row.generation, reason, detail: detail.clone() };
    // It is settled once this operation has failed.
    tell(&context.inner, session, Message::SandboxEnded(end)).await?;
    Err(Failure::plain(Error::Lost { session: session.id, detail }))
}

async fn take_over(context: &Context) -> Result<Arc<Live>, Error> {
    let (inner, session) = (&context.inner, &context.session);
    let row = session.view().row;
    let lost = |detail: &str| Error::Lost { session: session.id, detail: detail.to_owned() };
    if row.ephemeral {
        return Err(lost("nothing of an ephemeral session is ever written to storage"));
    }
    let mut last = lost("its sandbox has ended, too");
    for _ in 0..TRIES {
        let (layout, state, stored) = (session.layout.clone(), inner.programs.runsc_state().to_owned(), row.generation);
        let found = blocking(move || look(&layout, &state, stored)).await?;
        let next = next(&found);
        tracing::info!(session = %session.id, ?found, ?next, "taking a sandbox over");
        let tried = match next {
            Next::Lost => return Err(last),
            Next::SeeThrough => see_through(session, row.generation).await,
            Next::TakeOver { from, to, capture } => {
                if capture {
                    let image = session.layout.image(from.generation);
                    let removed = blocking(move || remove_durably(&image)).await?;
                    removed.map_err(|e| launch::io_error(&e, "remove an older memory image"))?;
                }
                let spec = spec(inner, session, &row, from, to).await?;
                launch::launch(inner, &session.launching, spec).await
            }
        };
        match tried {
            Ok(live) => return Ok(live),
            Err(Error::ShuttingDown) => return Err(Error::ShuttingDown),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A supervisor that lives, whoever started it: waits until its sandbox answers.
async fn see_through(session: &Session, stored: Generation) -> Result<Arc<Live>, Error> {
    let live = Live::new(session.layout.clone(), stored);
    let ready = live.supervisor.call_within(&Request::AwaitReady, launch::TAKE_OVER_LIMIT).await;
    let status = match ready {
        Ok(_) => ending::phase(&live).await,
        Err(error) => Err(error),
    };
    match status {
        Ok(Some(status)) => {
            live.set_generation(status.generation);
            Ok(live)
        }
        Ok(None) => Err(Error::Lost { session: session.id, detail: "its supervisor has ended".to_owned() }),
        Err(error) => {
            ending::end_failed(&session.layout).await?;
            Err(session.call_error(error))
        }
    }
}

async fn spec(
    inner: &Arc<Inner>,
    session: &Arc<Session>,
    row: &Arc<SessionRow>,
    from: TakesOver,
    to: Generation,
) -> Result<SuperviseSpec, Error> {
    // What the dead one wrote down belongs to what runs.
    facts::drain(inner, session).await?;
    let execs = inner.store.running_execs(session.id).await?;
    let terminals = inner.store.running_terminals(session.id).await?;
    let (inner_, row_) = (inner.clone(), row.clone());
    let base = blocking(move || Ok::<_, Error>(inner_.programs.pinned(&row_)?.below(inner_.shelf.lower(&row_.layers))))
        .await
        .flatten()?;
    Ok(SuperviseSpec {
        dir: session.layout.dir().to_owned(),
        session: Some(session.id),
        generation: to,
        start: Start::Recapture {
            from,
            paused: row.state == State::Paused,
            execs: execs.iter().map(facts::exec_of).collect::<Result<_, _>>()?,
            terminals: terminals.iter().map(facts::terminal_of).collect::<Result<_, _>>()?,
        },
        lower: base.lower,
        runtime: base.runtime,
        resources: row.resources,
        keep_output_bytes: inner.config.keep_output,
        identity: Some(launch::identity(inner, row)),
        pins: base.pins,
        gap_ms: None,
        network: Some(network::spec(inner, &row.network)),
    })
}

/// The sandbox answers, under its new supervisor: says so in the store.
async fn done(context: &Context, live: &Arc<Live>) -> Result<(), Failure> {
    let session = &context.session;
    let row = session.view().row;
    if row.state == State::Paused
        && let Err(error) = live.supervisor.call_soon(&Request::Pause).await
    {
        tracing::warn!(session = %session.id, %error, "a session that was paused runs on");
    }
    watch::attach(&context.inner, session, live.clone());
    let generation = live.generation();
    let away = context.inner.now().since(context.operation.started_at);
    let reset = network::reset(live).await;
    let data = json!({
        "generation": generation, "memory": "kept", "gap_seconds": away.as_secs_f64(), "connections_reset": reset.count,
        "reset_to": reset.to,
    });
    let event = context.event(EventType::RECAPTURE_DONE, data);
    loop {
        let event = event.clone();
        let change = move |change: &mut SessionChange| {
            change.session.generation = generation;
            change.events.push(event.clone());
        };
        match context.finish(Box::new(change)).await {
            Ok(()) => break,
            // It runs, and is not given up because the store has no room.
            Err(error @ (Error::NoSpace { .. } | Error::Internal { .. })) => {
                tracing::error!(session = %session.id, %error, "that a sandbox was taken over is not written down yet");
                tokio::time::sleep(AGAIN).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    for spent in row.generation.0..generation.0 {
        wake::drop_image(session, Generation(spent));
    }
    Ok(())
}

/// A supervisor is gone without a word.
pub(crate) async fn note_loss(inner: &Arc<Inner>, session: &Arc<Session>, pid: Option<u32>) {
    let now = inner.now();
    let noted = inner.change(
        session,
        Box::new(move |row| {
            let mut change = SessionChange::new(row.clone());
            let (kind, actor) = (EventType::SUPERVISOR_LOST, Actor::system());
            change.events.push(NewEvent { at: now, kind, actor, operation_id: None, data: json!({ "pid": pid }) });
            Some(change)
        }),
    );
    if let Err(error) = noted.await {
        tracing::warn!(session = %session.id, %error, "the loss of a supervisor is not written down");
    }
}

/// Stores the intent of a recapture that nobody has begun yet, for a server that comes back.
pub(crate) async fn store_intent(inner: &Arc<Inner>, session: &Arc<Session>) -> Result<OperationRow, Error> {
    let row = session.view().row;
    let intent = json!({ "actor": Actor::system(), "generation": row.generation });
    let operation = OperationRow::begun(session.id, OperationKind::Recapture, inner.now(), intent);
    let stored = operation.clone();
    let change = move |row: &SessionRow| {
        let mut change = SessionChange::new(row.clone());
        change.events.push(NewEvent {
            at: stored.started_at,
            kind: EventType::OPERATION_STARTED,
            actor: Actor::system(),
            operation_id: Some(stored.id),
            data: json!({ "kind": stored.kind }),
        });
        change.operations.push(stored.clone());
        Some(change)
    };
    inner.change(session, Box::new(change)).await?;
    Ok(operation)
}

/// Clears away, in the background, the frozen original of a session that is hibernated: the supervisor that it waited with
/// has died, and the image is the memory.
pub(crate) fn clear_original(inner: &Arc<Inner>, session: &Arc<Session>) {
    let (inner_, session) = (inner.clone(), session.clone());
    inner.tasks.spawn(async move {
        let Ok(_permit) = session.launching.acquire().await else { return };
        // A wake was faster: it has cleared the way itself.
        if ending::is_held(&session.layout) || session.view().row.state.has_sandbox() {
            return;
        }
        if let Err(error) = ending::clear_the_way(&session.layout, inner_.programs.runsc_state()).await {
            tracing::error!(session = %session.id, %error, "what a lost supervisor left can't be cleared away");
        }
    });
}

/// Removes an image so that it stays removed, whatever happens.
fn remove_durably(image: &Path) -> io::Result<()> {
    ending::remove_tree(image)?;
    match image.parent().map(File::open) {
        Some(Ok(parent)) => parent.sync_all(),
        Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(generation: u64) -> TakesOver {
        TakesOver { container: format!("dm-x-{generation}"), generation: Generation(generation) }
    }

    fn found() -> Found {
        Found { supervisor_lives: false, orphan: None, image: None, marked: Generation(3), stored: Generation(3) }
    }

    #[test]
    fn what_is_there_decides_and_nothing_else() {
        let take = |from, to, capture| Next::TakeOver { from, to: Generation(to), capture };
        let marked = Generation(4);
        let cases = [
            ("nothing is left", found(), Next::Lost),
            ("orphaned", Found { orphan: Some(sandbox(3)), ..found() }, take(sandbox(3), 4, true)),
            ("a taker is at it", Found { supervisor_lives: true, orphan: Some(sandbox(3)), marked, ..found() }, Next::SeeThrough),
            ("the taker died early", Found { orphan: Some(sandbox(3)), marked, ..found() }, take(sandbox(3), 5, true)),
            (
                "the taker died with the image whole and the old sandbox paused",
                Found { orphan: Some(sandbox(3)), image: Some(sandbox(3)), marked, ..found() },
                take(sandbox(3), 5, true),
            ),
            (
                "the taker died with the image whole and the old sandbox gone",
                Found { image: Some(sandbox(3)), marked, ..found() },
                take(sandbox(3), 5, false),
            ),
            (
                "the taker died after the restore",
                Found { orphan: Some(sandbox(4)), marked, ..found() },
                take(sandbox(4), 5, true),
            ),
            ("the image was used and its sandbox is gone", Found { marked, ..found() }, Next::Lost),
        ];
        for (what, found, expected) in cases {
            assert_eq!(next(&found), expected, "{what}");
        }
        let thawed = Found { orphan: Some(sandbox(2)), marked: Generation(2), ..found() };
        let from = TakesOver { container: "dm-x-2".into(), generation: Generation(3) };
        assert_eq!(next(&thawed), take(from, 4, true), "a thaw is a generation of its own");
    }
}
