//! Taking a snapshot: a session as it is at one moment, kept.
//!
//! ```text
//!  runs or paused: its supervisor captures it ─┐
//!  sleeps or stopped: its files are copied ────┴─► chain kept short ─► the store knows ─► told
//! ```
//! Until the store knows, nothing refers to what was written, and a failure removes it.

use crate::{
    Error, facts,
    inner::{Inner, blocking},
    launch::io_error,
    limits,
    operation::{Context, Failure},
    parcels::fetch,
    reserve,
    session::Session,
    shelf::{self, Making},
};
use model::{EventType, LayerId, SnapshotId, SnapshotName, SnapshotState, State, Timestamp};
use serde_json::{Value, json};
use snapshot::layer::{Capture, LayerError, flatten};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use store::{RequestId, RequestMark, SessionChange, SessionRow, SnapshotRow};
use wire::{
    Code,
    control::{Answer, Request, SnapshotStart, Snapshotted},
};

/// The longest capture: tens of GiB on a slow disk.
const CAPTURE_LIMIT: Duration = Duration::from_secs(15 * 60);
/// Longest chain of layers. Above it lie two more: the guest's programs and the template.
pub(crate) const LONGEST_CHAIN: usize = 16;

/// A snapshot that is wanted.
pub(crate) struct Wanted {
    pub id: SnapshotId,
    pub name: Option<SnapshotName>,
    pub keep_until: Option<Timestamp>,
    pub memory: bool,
    pub labels: BTreeMap<String, String>,
    /// `user`, or what it was needed for: `fork`, `rollback`.
    pub taken_by: &'static str,
    pub request: Option<RequestId>,
}

/// Takes it.
pub(crate) async fn run(context: &Context, wanted: Wanted) -> Result<(), Failure> {
    reserve::check_room(&context.inner.config.data_dir)?;
    drop(limits::admit_snapshot(&context.inner, &context.session.view().row, 0).await?);
    let making = context.inner.shelf.make();
    let id = wanted.id;
    match take(context, wanted, &making).await {
        Ok(()) => Ok(()),
        Err(error) => {
            discard(&context.inner, id, &[making.id]).await;
            Err(error.into())
        }
    }
}

async fn take(context: &Context, wanted: Wanted, making: &Making) -> Result<(), Error> {
    let (inner, session, id) = (&context.inner, &context.session, wanted.id);
    let row = session.view().row;
    let previous = match row.latest_snapshot {
        Some(id) => inner.store.snapshot(id).await?.filter(|row| row.deleted_at.is_none()),
        None => None,
    };
    let own = previous.as_ref().filter(|previous| previous.session_id == row.id && previous.disk_epoch == row.disk_epoch);
    let below = own.and_then(|previous| previous.layers.first().copied());
    let taken = if row.state.has_sandbox() {
        live(context, &wanted, making.id, below).await?
    } else {
        at_rest(inner, session, &row, &wanted, making.id, below).await?
    };
    faults::point("take.captured");
    let flat = short_chain(inner, &row.layers).await?;
    let layers = match &flat {
        Some(flat) => vec![making.id, flat.id],
        None => [&[making.id], &row.layers[..]].concat(),
    };
    let snapshot = describe(context, &row, &wanted, &taken, layers, previous.map(|row| row.id));
    let committed = match limits::admit_snapshot(inner, &row, snapshot.unique_bytes).await {
        Ok(_turn) => commit(context, snapshot, wanted.request).await,
        Err(error) => Err(error),
    };
    if committed.is_err()
        && let Some(flat) = flat
    {
        discard(inner, id, &[flat.id]).await;
    }
    committed
}

async fn live(context: &Context, wanted: &Wanted, layer: LayerId, previous: Option<LayerId>) -> Result<Snapshotted, Error> {
    let (inner, session, live) = (&context.inner, &context.session, context.live()?);
    let snapshot = SnapshotStart {
        layers: inner.shelf.layers_dir().to_owned(),
        layer,
        previous,
        dir: inner.shelf.layout(wanted.id).dir().to_owned(),
        memory: wanted.memory,
    };
    match live.supervisor.call_within(&Request::Snapshot { snapshot }, CAPTURE_LIMIT).await {
        Ok(Answer::Snapshotted(taken)) => Ok(*taken),
        Ok(_) => Err(Error::internal("the supervisor answered with something else")),
        Err(crate::supervisor_client::CallError::Refused(error)) if error.code == Code::NoSpace => {
            Err(Error::NoSpace { detail: error.message })
        }
        Err(crate::supervisor_client::CallError::Refused(error)) if error.code == Code::Unsupported => {
            let detail = "its supervisor is of an older version; hibernate and wake the session once";
            Err(Error::Conflict { detail: detail.to_owned() })
        }
        Err(error) => Err(session.call_error(error)),
    }
}

/// Nothing of the session runs, and nothing can begin to before this has ended.
async fn at_rest(
    inner: &Arc<Inner>,
    session: &Arc<Session>,
    row: &Arc<SessionRow>,
    wanted: &Wanted,
    layer: LayerId,
    previous: Option<LayerId>,
) -> Result<Snapshotted, Error> {
    let _reading = session.at_rest.read().await;
    fetch::ensure_local(inner, session).await?;
    let image = row.image_generation.filter(|_| wanted.memory && row.state == State::Hibernated);
    let (mut execs, mut terminals) = (Vec::new(), Vec::new());
    if image.is_some() {
        facts::drain(inner, session).await?;
        execs = inner.store.running_execs(row.id).await?.iter().map(facts::exec_of).collect::<Result<Vec<_>, _>>()?;
        terminals = inner.store.running_terminals(row.id).await?.iter().map(facts::terminal_of).collect::<Result<Vec<_>, _>>()?;
    }
    let services: Vec<_> = row.services.iter().map(|service| service.name.clone()).collect();
    let streams: Vec<_> = shelf::streams(&execs, &terminals, services);
    let (inner, layout, id, now) = (inner.clone(), session.layout.clone(), wanted.id, inner.now());
    let (session_id, generation) = (row.id, image.unwrap_or(row.generation));
    let kept = blocking(move || {
        let mut capture = Capture::begin(&inner.shelf.layers, layer, &layout.upper(), previous).map_err(layer_error)?;
        capture.freeze().map_err(layer_error)?;
        let kept = inner.shelf.layout(id);
        let mut image_bytes = 0;
        if let Some(generation) = image {
            let io = |e: std::io::Error| io_error(&e, "keep the memory image");
            shelf::copy_image(&layout.image(generation), &kept.image(generation)).map_err(io)?;
            image_bytes = snapshot::image::ImageDescriptor::read(&kept.image(generation)).map_err(Error::internal)?.size_bytes();
            let every = model::Offset(u64::MAX);
            streams.iter().try_for_each(|name| journal::copy(&layout.journal(name), &kept.journal(name), every)).map_err(io)?;
        }
        let disk = capture.finish(session_id, now).map_err(layer_error)?.descriptor;
        Ok::<_, Error>((disk, image_bytes))
    });
    let (disk, image_bytes) = kept.await.flatten()?;
    Ok(Snapshotted {
        generation,
        paused_ms: 0,
        memory_bytes: image_bytes,
        image_bytes,
        disk_bytes: disk.size_bytes,
        own_bytes: disk.own_bytes,
        execs,
        terminals,
    })
}

/// Below a snapshot's own layer lies what the session has below its own. Of a chain that has grown too long that is made
/// one layer; `None` where it is short.
async fn short_chain(inner: &Arc<Inner>, below: &[LayerId]) -> Result<Option<Making>, Error> {
    if below.len() < LONGEST_CHAIN {
        return Ok(None);
    }
    let flat = inner.shelf.make();
    let (inner, below, id) = (inner.clone(), below.to_vec(), flat.id);
    blocking(move || flatten(&inner.shelf.layers, &below, id).map(drop).map_err(layer_error)).await.flatten()?;
    Ok(Some(flat))
}

fn describe(
    context: &Context,
    row: &SessionRow,
    wanted: &Wanted,
    taken: &Snapshotted,
    layers: Vec<LayerId>,
    parent: Option<SnapshotId>,
) -> SnapshotRow {
    let memory = taken.image_bytes > 0;
    let image = shelf::image_of(&context.inner, wanted.id, taken.generation);
    let descriptor = memory.then(|| snapshot::image::ImageDescriptor::read(&image).ok()).flatten();
    SnapshotRow {
        name: wanted.name.clone(),
        labels: wanted.labels.clone(),
        owner_token: row.owner_token.clone(),
        state: SnapshotState::Ready,
        generation: taken.generation,
        memory,
        memory_bytes: taken.memory_bytes,
        size_bytes: taken.disk_bytes + taken.image_bytes,
        unique_bytes: taken.own_bytes + taken.image_bytes,
        parent_id: parent,
        keep_until: wanted.keep_until,
        taken_by: wanted.taken_by.to_owned(),
        template_hash: row.template_hash.clone(),
        guest_hash: row.guest_hash.clone(),
        runsc_hash: row.runsc_hash.clone(),
        runsc_version: descriptor.as_ref().map(|image| image.runsc_version.clone()),
        cpu_features: descriptor.map(|image| image.cpu_features.into_iter().collect()).unwrap_or_default(),
        layers,
        disk_epoch: row.disk_epoch,
        paused_ms: taken.paused_ms,
        template_row: serde_json::to_value(row).unwrap_or(Value::Null),
        works: json!({ "execs": taken.execs, "terminals": taken.terminals }),
        ..SnapshotRow::new(wanted.id, row.id, row.runtime, row.template.clone(), context.inner.now())
    }
}

async fn commit(context: &Context, snapshot: SnapshotRow, request: Option<RequestId>) -> Result<(), Error> {
    let data = json!({
        "snapshot_id": snapshot.id, "name": snapshot.name, "memory": snapshot.memory, "size_bytes": snapshot.size_bytes,
        "paused_ms": snapshot.paused_ms, "taken_by": snapshot.taken_by,
    });
    let event = context.event(EventType::SNAPSHOT_TAKEN, data);
    let mark = request.map(|id| RequestMark { id, made: snapshot.id.to_string() });
    let change = move |change: &mut SessionChange| {
        change.session.latest_snapshot = Some(snapshot.id);
        change.snapshots.push(snapshot.clone());
        change.events.push(event.clone());
        change.request.clone_from(&mark);
    };
    context.finish(Box::new(change)).await?;
    context.inner.expect_packing();
    Ok(())
}

/// Removes what nothing refers to.
async fn discard(inner: &Arc<Inner>, id: SnapshotId, layers: &[LayerId]) {
    let (inner_, layers) = (inner.clone(), layers.to_vec());
    let removed = blocking(move || {
        for layer in layers {
            inner_.shelf.layers.remove(layer).map_err(layer_error)?;
        }
        inner_.shelf.remove(id).map_err(|e| io_error(&e, "remove the rest of a snapshot"))
    });
    if let Err(error) = removed.await.flatten() {
        tracing::warn!(snapshot = %id, %error, "the rest of a snapshot that failed stays until the next start");
    }
}

/// A layer's failure, as callers are told.
pub(crate) fn layer_error(error: LayerError) -> Error {
    match error.io() {
        Some(io) => io_error(io, "keep the disk"),
        None => Error::internal(error),
    }
}
