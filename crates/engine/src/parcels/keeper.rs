//! The task that packs what has slept for a while, and gives up files where the cache is too large.

use super::{Depot, evict, pack, present};
use crate::{Error, inner::Inner, scan, session::Session};
use model::{SessionId, SnapshotId, SnapshotState, Timestamp};
use std::{sync::Arc, sync::PoisonError, time::Duration};
use store::{Parcel, SessionChange, SessionRow, StoreError};

/// The shortest and longest time after which something that could not be packed is tried again.
const AGAIN: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// The same for one thing that stands in its own way.
const LATER: Duration = Duration::from_secs(3600);

/// Packs what is due until the engine closes. The store of sessions is read at the start and when something was expected.
pub(crate) async fn keep(inner: Arc<Inner>) {
    inner.expect_packing();
    let mut failures = 0;
    loop {
        let due = inner.depot.taken_due(inner.now());
        let wait = match due {
            Ok(()) => {
                let passed = tokio::select! {
                    passed = pass(&inner, false) => passed,
                    () = inner.closing.cancelled() => return,
                };
                match passed {
                    Ok(next) => {
                        failures = 0;
                        inner.depot.set_trouble(None);
                        if let Some(at) = next {
                            inner.depot.expect(at);
                        }
                        continue;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "what sleeps can't be packed now; it is tried again");
                        inner.depot.set_trouble(Some(error.to_string()));
                        let again = AGAIN.0.saturating_mul(1 << failures.min(10)).min(AGAIN.1);
                        failures += 1;
                        inner.depot.expect(inner.now().plus(again));
                        continue;
                    }
                }
            }
            Err(wait) => wait,
        };
        tokio::select! {
            () = inner.depot.changed.notified() => {}
            () = sleep(wait) => {}
            () = inner.closing.cancelled() => return,
        }
    }
}

async fn sleep(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}

impl Depot {
    /// Takes the expectation where it is due; else tells how long there is to wait for it.
    fn taken_due(&self, now: Timestamp) -> Result<(), Option<Duration>> {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        match *due {
            Some(at) if at <= now => {
                *due = None;
                Ok(())
            }
            Some(at) => Err(Some(at.since(now))),
            None => Err(None),
        }
    }
}

/// Packs all that is due, or with `at_once` all that will be, then looks after the cache. Answers when the next is due. What
/// fails by itself is told and passed over, to be tried at the next pass; a store that can't be used ends the pass.
pub(crate) async fn pass(inner: &Arc<Inner>, at_once: bool) -> Result<Option<Timestamp>, Error> {
    // One at a time: what one gives up the other may be reading.
    let _turn = inner.depot.passes.lock().await;
    let mut next: Option<Timestamp> = None;
    let mut later = |at: Timestamp| next = Some(next.map_or(at, |next| next.min(at)));
    let now = inner.now();
    let is_due = |since: Timestamp| at_once || since.plus(inner.config.pack_after) <= now;
    let (mut snapshots, mut sessions, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    scan::snapshots(&*inner.store, |row| match row.created_at {
        _ if row.state != SnapshotState::Ready || row.parcel.is_some() => {}
        since if is_due(since) => snapshots.push(row.id),
        since => waiting.push(since),
    })
    .await?;
    scan::sessions(&*inner.store, |row| match row.ended_at.unwrap_or(row.updated_at) {
        _ if !is_packable(&row) => {}
        since if is_due(since) => sessions.push(row.id),
        since => waiting.push(since),
    })
    .await?;
    waiting.into_iter().for_each(|since| later(since.plus(inner.config.pack_after)));
    for id in snapshots {
        passed_over(pack_snapshot(inner, id).await, "snapshot", id, &mut later, now)?;
    }
    for id in sessions {
        passed_over(pack_session(inner, id).await, "session", id, &mut later, now)?;
    }
    evict::fit(inner).await?;
    Ok(next)
}

fn is_packable(row: &SessionRow) -> bool {
    use model::State as S;
    matches!(row.state, S::Hibernated | S::Stopped) && !row.ephemeral && present(row).is_none()
}

/// A fault of one thing doesn't keep the others from being packed.
fn passed_over(
    packed: Result<bool, Error>,
    what: &str,
    id: impl std::fmt::Display,
    later: &mut impl FnMut(Timestamp),
    now: Timestamp,
) -> Result<(), Error> {
    match packed {
        Ok(true) => Ok(()),
        // It is being used, or just going.
        Ok(false) => {
            later(now.plus(AGAIN.0));
            Ok(())
        }
        Err(error @ (Error::ObjectStore { .. } | Error::NoSpace { .. } | Error::ShuttingDown)) => Err(error),
        Err(error) => {
            tracing::warn!(%id, %error, "a {what} can't be packed");
            later(now.plus(LATER));
            Ok(())
        }
    }
}

/// Packs a snapshot. One that goes meanwhile needs no packing.
async fn pack_snapshot(inner: &Arc<Inner>, id: SnapshotId) -> Result<bool, Error> {
    let present = async || Ok::<_, Error>(inner.store.snapshot(id).await?.filter(|row| row.deleted_at.is_none()));
    let Some(row) = present().await? else { return Ok(true) };
    let _gate = inner.depot.gate.read().await;
    let contents = pack::Contents::of_snapshot(inner, &row);
    let packed = pack::pack(inner, &pack::snapshot_manifest(id, inner.now()), &contents).await;
    let Some(mut row) = present().await? else { return Ok(true) };
    let parcel = packed?;
    loop {
        row.parcel = Some(parcel.clone());
        match inner.store.commit_snapshots(vec![row.clone()]).await {
            Ok(()) => return Ok(true),
            Err(StoreError::SnapshotConflict { .. }) => {
                let Some(now) = present().await? else { return Ok(true) };
                row = now;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Packs a session that sleeps; false where it is being used.
async fn pack_session(inner: &Arc<Inner>, id: SessionId) -> Result<bool, Error> {
    let session = inner.present(id).await?;
    let row = session.view().row;
    if !is_packable(&row) {
        return Ok(present(&row).is_some());
    }
    if !is_quiet(&session) {
        return Ok(false);
    }
    crate::facts::drain(inner, &session).await?;
    let _reading = session.at_rest.read().await;
    let _gate = inner.depot.gate.read().await;
    let row = session.view().row;
    let contents = pack::Contents::of_session(inner, &row);
    let parcel = match pack::pack(inner, &pack::session_manifest(id, inner.now()), &contents).await {
        Ok(parcel) => parcel,
        // What was read was changing under our eyes, since it is used again.
        Err(error) => return if is_as(&session, &row) { Err(error) } else { Ok(false) },
    };
    // Whoever starts a sandbox has to wait for this, or has begun and is seen here.
    let _alone = session.launching.acquire().await.map_err(|_| Error::ShuttingDown)?;
    if !is_as(&session, &row) {
        return Ok(false);
    }
    commit(inner, &session, parcel).await?;
    Ok(present(&session.view().row).is_some())
}

/// Nothing is under way, and nothing of its sandbox is left.
pub(super) fn is_quiet(session: &Session) -> bool {
    session.view().operation.is_none() && session.live().is_none() && !crate::rollback::is_staged(&session.layout)
}

pub(super) fn is_as(session: &Session, row: &SessionRow) -> bool {
    let now = session.view().row;
    let same = (now.generation, now.disk_epoch, now.image_generation, now.state)
        == (row.generation, row.disk_epoch, row.image_generation, row.state);
    same && is_quiet(session)
}

pub(super) async fn commit(inner: &Arc<Inner>, session: &Arc<Session>, parcel: Parcel) -> Result<(), Error> {
    let change = move |row: &SessionRow| {
        let fits = !row.state.has_sandbox() && (row.generation, row.disk_epoch) == (parcel.generation, parcel.disk_epoch);
        let mut change = SessionChange::new(row.clone());
        change.session.parcel = Some(parcel.clone());
        fits.then_some(change)
    };
    inner.change(session, Box::new(change)).await
}
