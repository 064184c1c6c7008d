//! The cache: files of what is packed stay beside the sessions as long as there is room for them.

use super::{keeper, present};
use crate::{
    Error, ending,
    inner::{Inner, blocking},
    launch::io_error,
    scan,
    session::Session,
};
use model::{LayerId, SessionId, SnapshotId, Timestamp};
use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use store::{SessionRow, SnapshotRow, StoreError};

/// What could be given up.
#[derive(Debug, Clone, Copy)]
enum Cached {
    Session(SessionId),
    Snapshot(SnapshotId),
}

/// Everything that is packed, and what of the layers others still need.
#[derive(Default)]
struct Census {
    /// With the bytes of its files and since when nobody has used it.
    cached: Vec<(Timestamp, u64, Cached)>,
    /// Layers that something needs whose files are here.
    needed: HashSet<LayerId>,
    /// Layers of what is packed, here or away.
    packed: HashSet<LayerId>,
    /// Those of it that something needs which isn't packed.
    in_use: HashSet<LayerId>,
    /// How many are in the store alone.
    away: u64,
}

/// Gives up files, those first that nobody has used for the longest time, until what is left fits into the cache.
pub(super) async fn fit(inner: &Arc<Inner>) -> Result<(), Error> {
    let limit = inner.config.cache_bytes;
    let mut census = take_census(inner).await?;
    let layers: Vec<LayerId> = census.packed.difference(&census.in_use).copied().collect();
    let mut used = layer_bytes(inner, layers).await? + census.cached.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
    census.cached.sort_by_key(|(since, _, _)| *since);
    for (_, bytes, cached) in census.cached {
        if used <= limit {
            break;
        }
        let is_gone = match cached {
            Cached::Session(id) => evict_session(inner, id).await?,
            Cached::Snapshot(id) => evict_snapshot(inner, id).await?,
        };
        if is_gone {
            used = used.saturating_sub(bytes);
            used = used.saturating_sub(evict_layers(inner).await?);
        }
    }
    evict_layers(inner).await.map(drop)
}

async fn take_census(inner: &Inner) -> Result<Census, Error> {
    let census = Mutex::new(Census::default());
    let of_snapshot = |row: SnapshotRow| {
        let what = || (row.created_at, Cached::Snapshot(row.id));
        locked(&census).count(row.parcel.as_ref(), &row.layers, what);
    };
    let of_session = |row: SessionRow| {
        let what = || (row.ended_at.unwrap_or(row.updated_at), Cached::Session(row.id));
        locked(&census).count(present(&row), &row.layers, what);
    };
    scan::all(&*inner.store, of_snapshot, of_session).await?;
    Ok(census.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn locked(census: &Mutex<Census>) -> MutexGuard<'_, Census> {
    census.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Census {
    fn count(&mut self, parcel: Option<&store::Parcel>, layers: &[LayerId], what: impl Fn() -> (Timestamp, Cached)) {
        match parcel {
            None => self.in_use.extend(layers),
            Some(_) => self.packed.extend(layers),
        }
        if parcel.is_none_or(|parcel| !parcel.is_away) {
            self.needed.extend(layers);
        }
        match parcel {
            Some(parcel) if parcel.is_away => self.away += 1,
            Some(parcel) => {
                let (since, cached) = what();
                self.cached.push((since, parcel.own_bytes, cached));
            }
            None => {}
        }
    }
}

async fn layer_bytes(inner: &Arc<Inner>, layers: Vec<LayerId>) -> Result<u64, Error> {
    let inner = inner.clone();
    let sum = move || {
        layers.into_iter().filter_map(|id| inner.shelf.layers.read(id).ok()).map(|layer| layer.descriptor.own_bytes).sum()
    };
    blocking(sum).await
}

/// False where it is being used.
async fn evict_session(inner: &Arc<Inner>, id: SessionId) -> Result<bool, Error> {
    let session = match inner.present(id).await {
        Ok(session) => session,
        Err(_) => return Ok(false),
    };
    // Nobody starts a sandbox meanwhile; who waits for that finds it away, and fetches it.
    let _alone = session.launching.acquire().await.map_err(|_| Error::ShuttingDown)?;
    let row = session.view().row;
    let Some(parcel) = present(&row).filter(|parcel| !parcel.is_away).cloned() else { return Ok(false) };
    let Ok(_unread) = session.at_rest.try_write() else { return Ok(false) };
    if !keeper::is_quiet(&session) {
        return Ok(false);
    }
    keeper::commit(inner, &session, store::Parcel { is_away: true, ..parcel }).await?;
    faults::point("evict.noted");
    if !present(&session.view().row).is_some_and(|parcel| parcel.is_away) {
        return Ok(false);
    }
    remove_files(&session).await.map(|()| true)
}

/// Journals stay: they are the session's history, and reading that fetches nothing.
async fn remove_files(session: &Session) -> Result<(), Error> {
    let layout = session.layout.clone();
    let removed = blocking(move || {
        snapshot::parcel::remove(&layout.disk()).map_err(super::parcel_error)?;
        ending::remove_tree(&layout.images()).map_err(|e| io_error(&e, "give up the memory image"))
    });
    removed.await.flatten()
}

/// Removes, at the start, files of what is away: whoever said that it is died before it had removed them, and nobody counts
/// them any more.
pub(crate) async fn clear_away(inner: &Arc<Inner>) -> Result<(), Error> {
    let (mut sessions, mut snapshots) = (Vec::new(), Vec::new());
    let away = |parcel: &Option<store::Parcel>| parcel.as_ref().is_some_and(|parcel| parcel.is_away);
    scan::sessions(&*inner.store, |row| sessions.extend(super::is_away(&row).then_some(row.id))).await?;
    scan::snapshots(&*inner.store, |row| snapshots.extend(away(&row.parcel).then_some(row.id))).await?;
    for id in sessions {
        let layout = inner.layout(id);
        if !layout.disk().exists() && !layout.images().exists() {
            continue;
        }
        let session = inner.present(id).await?;
        let _alone = session.launching.acquire().await.map_err(|_| Error::ShuttingDown)?;
        // Somebody may be fetching it, or has.
        if let Ok(_unread) = session.at_rest.try_write()
            && super::is_away(&session.view().row)
            && keeper::is_quiet(&session)
        {
            remove_files(&session).await?;
        }
    }
    for id in snapshots {
        let _alone = inner.shelf.alone().await;
        let row = inner.store.snapshot(id).await?.filter(|row| row.deleted_at.is_none());
        if inner.shelf.layout(id).dir().exists() && row.is_some_and(|row| away(&row.parcel)) {
            let inner = inner.clone();
            let removed = blocking(move || inner.shelf.remove(id)).await?;
            removed.map_err(|e| io_error(&e, "give up a snapshot's files"))?;
        }
    }
    Ok(())
}

async fn evict_snapshot(inner: &Arc<Inner>, id: SnapshotId) -> Result<bool, Error> {
    let _alone = inner.shelf.alone().await;
    let Some(row) = inner.store.snapshot(id).await?.filter(|row| row.deleted_at.is_none()) else { return Ok(false) };
    let Some(parcel) = row.parcel.clone().filter(|parcel| !parcel.is_away) else { return Ok(false) };
    let row = SnapshotRow { parcel: Some(store::Parcel { is_away: true, ..parcel }), ..row };
    match inner.store.commit_snapshots(vec![row]).await {
        Ok(()) => {}
        Err(StoreError::SnapshotConflict { .. }) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    faults::point("evict.noted");
    let inner = inner.clone();
    let removed = blocking(move || inner.shelf.remove(id)).await?;
    removed.map_err(|e| io_error(&e, "give up a snapshot's files"))?;
    Ok(true)
}

/// Removes the layers that only what is away needs; answers their bytes.
async fn evict_layers(inner: &Arc<Inner>) -> Result<u64, Error> {
    let _alone = inner.shelf.alone().await;
    let census = take_census(inner).await?;
    let unneeded: Vec<LayerId> = census.packed.difference(&census.needed).copied().collect();
    let inner = inner.clone();
    let removed = blocking(move || {
        let mut bytes = 0;
        for layer in unneeded {
            let Ok(found) = inner.shelf.layers.read(layer) else { continue };
            match inner.shelf.layers.remove(layer) {
                Ok(()) => bytes += found.descriptor.own_bytes,
                Err(error) => tracing::warn!(%layer, %error, "a disk layer that is packed stays"),
            }
        }
        bytes
    });
    removed.await
}

/// What the cache holds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cache {
    pub used_bytes: u64,
    pub away: u64,
    pub packed: u64,
}

/// How the cache stands, for people.
pub(super) async fn look(inner: &Arc<Inner>) -> Result<Cache, Error> {
    let census = take_census(inner).await?;
    let layers: Vec<LayerId> = census.packed.difference(&census.in_use).copied().collect();
    let layers = layer_bytes(inner, layers).await?;
    let used_bytes = layers + census.cached.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
    Ok(Cache { used_bytes, away: census.away, packed: census.away + census.cached.len() as u64 })
}
