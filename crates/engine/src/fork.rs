//! Forks: new sessions that begin as a snapshot is.
//!
//! A fork's disk is the snapshot's chain of layers under a fresh layer of its own; its memory is the snapshot's, restored
//! under another name. What ran goes on in it, with the same ids; what had ended stays in its parent's history.

use crate::{
    Error, NewSession,
    create::{self, Intended, Origin},
    ending, facts,
    inner::{Inner, blocking},
    launch::io_error,
    moments::{self, Moment},
    operation::{self, Context},
    parcels,
    programs::Base,
    rollback,
    session::{Live, Session},
    shelf, take,
};
use model::{EventType, Generation};
use serde_json::json;
use std::sync::Arc;
use store::{SessionChange, SessionRow, SnapshotRow, WakeRecord};
use wire::{control::Start, records::ExecRecord};

/// The image that a fork is restored from has this number: its first sandbox is the next one.
const ORIGIN: Generation = Generation(0);

/// What a fork is like where nothing else is asked for.
pub(crate) fn inherit(new: NewSession, source: &SessionRow) -> NewSession {
    NewSession {
        env: if new.env.is_empty() { source.env.clone() } else { new.env },
        workdir: new.workdir.or_else(|| source.workdir.clone()),
        resources: new.resources.or(Some(source.resources)),
        services: if new.services.is_empty() { source.services.clone() } else { new.services },
        hooks: if new.hooks.is_empty() { serde_json::from_value(source.hooks.clone()).unwrap_or_default() } else { new.hooks },
        idle: new.idle.or(source.idle),
        timeout_seconds: new.timeout_seconds.or(source.timeout_seconds),
        on_timeout: new.on_timeout.or(Some(source.on_timeout)),
        ttl_seconds: new.ttl_seconds.or(source.ttl_seconds),
        ..new
    }
}

/// Brings a fork's first sandbox to life.
pub(crate) async fn bring_up(context: &Context, origin: Origin, base: Base) -> Result<Arc<Live>, Error> {
    let (inner, session) = (&context.inner, &context.session);
    let snapshot = &origin.snapshot;
    make_disk(inner, session, snapshot).await?;
    let (image, gap) = (session.layout.image(ORIGIN), inner.now().since(snapshot.created_at));
    if !snapshot.memory {
        // Nothing but the layers is needed of it, and those are the session's own by now.
        let live = create::boot(context, base, Start::Boot, None).await?;
        note(context, &origin).await?;
        return Ok(live);
    }
    check_loadable(inner, snapshot).await?;
    let (inner_, layout, image_, kept) = (inner.clone(), session.layout.clone(), image.clone(), snapshot.clone());
    let taken = blocking(move || {
        let from = inner_.shelf.layout(kept.id);
        shelf::copy_image(&from.image(kept.generation), &image_)
            .and_then(|()| shelf::copy_journals(&from, &layout))
            .map_err(|e| io_error(&e, "take over the snapshot"))
    });
    taken.await.flatten()?;
    note(context, &origin).await?;
    let parent = snapshot.session_id;
    // All that is needed of it is the session's own by now.
    drop(origin);
    faults::point("fork.taken");
    let gap_ms = u64::try_from(gap.as_millis()).unwrap_or(u64::MAX);
    let live = create::boot(context, base, Start::Restore { image }, Some(gap_ms)).await?;
    moments::announce(inner, session, &live, Moment::Forked { gap, of: parent }).await;
    let images = session.layout.images();
    let dropped = blocking(move || ending::remove_tree(&images)).await?;
    if let Err(error) = dropped {
        tracing::warn!(session = %session.id, %error, "a spent memory image stays");
    }
    Ok(live)
}

/// A fresh upper directory above the snapshot's chain.
async fn make_disk(inner: &Arc<Inner>, session: &Session, snapshot: &SnapshotRow) -> Result<(), Error> {
    let (inner, layout, below) = (inner.clone(), session.layout.clone(), snapshot.layers.first().copied());
    let made = blocking(move || {
        create::make_dir(&layout)?;
        below.map_or(Ok(()), |layer| inner.shelf.layers.dress_root(layer, &layout.upper())).map_err(take::layer_error)
    });
    made.await.flatten()
}

async fn check_loadable(inner: &Arc<Inner>, snapshot: &SnapshotRow) -> Result<(), Error> {
    let (session, image) = (snapshot.session_id, shelf::image_of(inner, snapshot.id, snapshot.generation));
    let checked =
        blocking(move || snapshot::image::ImageDescriptor::read(&image).and_then(|descriptor| descriptor.check_loadable()));
    checked.await?.map_err(|e| parcels::image_error(Some(session), e))
}

/// What ran in the snapshot runs in the fork: in its store before anything of it can end.
async fn note(context: &Context, origin: &Origin) -> Result<(), Error> {
    let (id, snapshot) = (context.session.id, &origin.snapshot);
    let (execs, terminals) = rollback::works_of(snapshot);
    let of_fork = |exec: ExecRecord| facts::exec_row(id, &ExecRecord { generation: Generation::FIRST, ..exec });
    let execs: Vec<_> = execs.into_iter().map(of_fork).collect();
    let terminals: Vec<_> = terminals.iter().map(|terminal| facts::terminal_row(id, terminal)).collect();
    let gap = context.inner.now().since(snapshot.created_at);
    let wake = WakeRecord {
        at: context.inner.now(),
        gap_ms: u64::try_from(gap.as_millis()).unwrap_or(u64::MAX),
        generation: Generation::FIRST,
        connections_reset: 0,
        reset_to: Vec::new(),
    };
    let data = json!({ "snapshot_id": snapshot.id, "parent": snapshot.session_id, "session_id": id, "memory": snapshot.memory, "disk_only": origin.disk_only });
    let event = context.event(EventType::FORK_MADE, data);
    let memory = snapshot.memory;
    let change = move |row: &SessionRow| {
        let mut change = SessionChange::new(row.clone());
        change.execs.clone_from(&execs);
        change.terminals.clone_from(&terminals);
        change.session.last_wake = memory.then(|| wake.clone());
        change.events.push(event.clone());
        Some(change)
    };
    context.inner.change(&context.session, Box::new(change)).await
}

/// A fork that did not come to life: what was to run in it is lost.
pub(crate) async fn lose_works(context: &Context) {
    let (inner, session) = (&context.inner, &context.session);
    let mut lost = SessionChange::new((*session.view().row).clone());
    let read = operation::lose_works(inner, session, model::EndReason::CreateFailed.as_str(), &mut lost).await;
    if read.is_ok() && lost.execs.is_empty() && lost.terminals.is_empty() {
        return;
    }
    let change = move |row: &SessionRow| Some(SessionChange { session: row.clone(), ..lost.clone() });
    if let Err(error) = read.and(inner.change(session, Box::new(change)).await) {
        tracing::warn!(session = %session.id, %error, "the works of a fork that was not made are not written down as lost");
    }
}

/// Forks that are to be made: in the store, so that they are found again whatever happens.
pub(crate) async fn intend(
    inner: &Arc<Inner>,
    caller: &crate::Caller,
    new: &NewSession,
    snapshot: model::SnapshotId,
    count: u32,
    disk_only: bool,
) -> Result<Vec<Intended>, Error> {
    let ids: Vec<model::SessionId> = (0..count).map(|_| model::SessionId::new()).collect();
    let made = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let mut intended = Vec::new();
    // Held once for all of them: one that waits to remove something would come in between.
    let origin = create::origin(inner, snapshot, disk_only).await?;
    let wanted = inherit(new.clone(), &origin.source);
    // The first one says which all of them are.
    let mut caller = caller.clone();
    for id in ids {
        let origin = Some(origin.clone());
        let intent = create::Intent { id: Some(id), origin, made: Some(made.clone()), ..create::Intent::default() };
        let error = match create::intend(inner, &caller, &wanted, intent).await {
            Ok(fork) => {
                intended.push(fork);
                caller.request = None;
                continue;
            }
            Err(create::Made::KeyTaken) => Error::internal("a fork has no key that could be taken"),
            Err(create::Made::Failed(error)) => error,
        };
        // Their number can't be reached: none of them is made.
        for fork in intended {
            fork.give_up(inner).await;
        }
        return Err(error);
    }
    Ok(intended)
}
