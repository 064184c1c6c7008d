//! Snapshots as callers ask for them: take, list, delete, fork, roll back.

use crate::{
    Caller, Engine, Error, ForkOf, Forked, NewForks, NewSession, NewSnapshot, SessionView, Transition, Transitioned, fork,
    inner::{Inner, blocking},
    launch::io_error,
    operation::Job,
    policy, shelf,
    take::Wanted,
};
use futures_util::StreamExt;
use lifecycle::Command;
use model::{Actor, EndReason, EventType, SessionId, SnapshotId, SnapshotState, State, Timestamp};
use serde_json::json;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use store::{Cursor, MAX_PAGE, NewEvent, Page, SessionChange, SessionRow, SnapshotFilter, SnapshotRow, StoreError};

/// Most forks of one request.
pub const MAX_FORKS: u32 = 100;
/// Forks that are restored at the same time.
const FORKS_AT_ONCE: usize = 8;
/// How long what was taken for a fork is kept: the forks have what they need of it.
const KEEP_FOR_FORK: Duration = Duration::from_secs(24 * 3600);
/// How long what was taken before a rollback is kept.
const KEEP_FOR_ROLLBACK: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long an unnamed snapshot outlives its session where nobody said anything else.
const KEEP_AFTER_DELETE: Duration = Duration::from_secs(7 * 24 * 3600);
/// How often is looked for snapshots whose time is over.
const LOOK: Duration = Duration::from_secs(30);

impl Engine {
    /// Keeps a session as it is now. A session that runs stands still only for the capture.
    ///
    /// # Errors
    /// [`Error::Unsaveable`] with process and file; [`Error::NameTaken`], [`Error::Ephemeral`], [`Error::NoSpace`].
    pub async fn snapshot(&self, caller: &Caller, session: SessionId, new: NewSnapshot) -> Result<SnapshotRow, Error> {
        check(&new)?;
        let keep = new.keep_seconds.map(Duration::from_secs);
        self.take(caller, session, new, keep, "user").await
    }

    pub(crate) async fn take(
        &self,
        caller: &Caller,
        session: SessionId,
        new: NewSnapshot,
        keep: Option<Duration>,
        taken_by: &'static str,
    ) -> Result<SnapshotRow, Error> {
        let session = self.inner.present(session).await?;
        self.inner.created(&session).await?;
        if let Some(name) = &new.name
            && let Some(holder) = self.inner.store.snapshot_by_name(name.to_string()).await?
        {
            return Err(Error::NameTaken { name: name.to_string(), snapshot: holder.id });
        }
        let wanted = Wanted {
            id: new.id,
            name: new.name,
            keep_until: keep.map(|keep| self.inner.now().plus(keep)),
            memory: new.memory,
            labels: new.labels,
            taken_by,
            request: if taken_by == "user" { caller.request.clone() } else { None },
        };
        let id = wanted.id;
        let job = Some(Box::new(Job::Snapshot(Box::new(wanted))));
        let admitted = self.inner.command_with(&session, Command::Snapshot, &caller.actor, EndReason::Asked, job).await?;
        admitted.wait_for_client().await?;
        self.snapshot_row(id).await
    }

    /// Snapshots, newest first.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a cursor of another list.
    pub async fn snapshots(
        &self,
        caller: &Caller,
        filter: SnapshotFilter,
        limit: usize,
        cursor: Option<Cursor>,
    ) -> Result<Page<SnapshotRow>, Error> {
        let filter = SnapshotFilter { sessions: caller.sessions.clone().or(filter.sessions), ..filter };
        Ok(self.inner.store.list_snapshots(filter, limit.min(MAX_PAGE), cursor).await?)
    }

    /// One snapshot.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::SnapshotDeleted`].
    pub async fn snapshot_row(&self, id: SnapshotId) -> Result<SnapshotRow, Error> {
        let row = self.snapshot_or_tombstone(id).await?;
        match row.deleted_at {
            Some(at) => Err(Error::SnapshotDeleted { snapshot: id, at }),
            None => Ok(row),
        }
    }

    /// One snapshot, also one that is deleted.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn snapshot_or_tombstone(&self, id: SnapshotId) -> Result<SnapshotRow, Error> {
        self.inner.store.snapshot(id).await?.ok_or_else(|| Error::not_found(format!("snapshot {id}")))
    }

    /// The snapshot that a text names: by its id, its name, or a unique beginning or end of its id, tried in this order.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::AmbiguousSnapshot`].
    pub async fn resolve_snapshot(&self, text: &str) -> Result<SnapshotId, Error> {
        if let Ok(id) = text.parse::<SnapshotId>() {
            return Ok(id);
        }
        if let Some(row) = self.inner.store.snapshot_by_name(text.to_owned()).await? {
            return Ok(row.id);
        }
        let shown: String = text.chars().take(200).collect();
        let unknown = Error::not_found(format!("snapshot '{shown}'"));
        if text.len() < 4 || !text.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-') {
            return Err(unknown);
        }
        let ids = self.inner.store.find_snapshot_ids(text.to_ascii_lowercase()).await?;
        match ids[..] {
            [] => Err(unknown),
            [id] => Ok(id),
            _ => Err(Error::AmbiguousSnapshot { text: shown, ids }),
        }
    }

    /// Deletes a snapshot. What others share with it stays.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::SnapshotDeleted`].
    pub async fn delete_snapshot(&self, caller: &Caller, id: SnapshotId) -> Result<(), Error> {
        self.snapshot_row(id).await?;
        delete(&self.inner, id, &caller.actor, "asked").await
    }

    /// Makes new sessions that begin as a snapshot is. They are running when it is answered.
    ///
    /// # Errors
    /// [`Error::Invalid`]; why the snapshot can't be taken or found; a limit, before any fork was made. What befalls a
    /// single fork is told with the answer.
    pub async fn fork(&self, caller: &Caller, of: ForkOf, new: NewForks) -> Result<Forked, Error> {
        check_forks(&new)?;
        if caller.sessions.is_some() {
            return Err(Error::Forbidden { detail: "this token is for certain sessions and can't create others".to_owned() });
        }
        let snapshot = match of {
            ForkOf::Snapshot(id) => self.snapshot_row(id).await?,
            ForkOf::Session(id) => self.take(caller, id, plain(true), Some(KEEP_FOR_FORK), "fork").await?,
        };
        // Seen through, whether or not the caller stays: sessions that are in the store and that nobody brings to life would
        // be nobody's.
        let (inner, caller) = (self.inner.clone(), caller.clone());
        let forked = self.inner.tasks.spawn(async move { make_forks(&inner, &caller, snapshot, new).await });
        forked.await.map_err(|_| Error::ShuttingDown)?
    }

    /// Sets a session back to a snapshot of it, or of what it was forked from. A snapshot of now is taken first. The
    /// session runs when it is answered. With `disk_only` it is booted afresh on the snapshot's disk.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a snapshot of another line; why a snapshot of now can't be taken; [`Error::NotFound`],
    /// [`Error::SnapshotDeleted`]. A rollback that is done and whose session doesn't come to life is told as that.
    pub async fn rollback(
        &self,
        caller: &Caller,
        session: SessionId,
        snapshot: SnapshotId,
        disk_only: bool,
    ) -> Result<Transitioned, Error> {
        let row = self.snapshot_row(snapshot).await?;
        let session = self.inner.present(session).await?;
        self.inner.created(&session).await?;
        self.check_line(&session.view().row, &row).await?;
        self.take_before_rollback(caller, session.id).await?;
        let job = Some(Box::new(Job::Rollback { to: row.id, disk_only }));
        let admitted = self.inner.command_with(&session, Command::Rollback, &caller.actor, EndReason::Asked, job).await?;
        let operation = admitted.operation.clone();
        admitted.wait_for_client().await?;
        let back = if row.memory && !disk_only { Transition::Wake } else { Transition::Start };
        let woken = self.transition(caller, session.id, back, true).await?;
        Ok(Transitioned { view: woken.view, operation })
    }

    /// A session can be set back to what it was, or to what one of its forebears was: all else belongs to others.
    async fn check_line(&self, row: &SessionRow, snapshot: &SnapshotRow) -> Result<(), Error> {
        if snapshot.session_id == row.id {
            return Ok(());
        }
        let mut at = row.parent_snapshot;
        while let Some(id) = at {
            if id == snapshot.id {
                return Ok(());
            }
            at = self.inner.store.snapshot(id).await?.and_then(|row| row.parent_id);
        }
        Err(Error::invalid("snapshot_id", "it is of another session; fork it instead"))
    }

    async fn take_before_rollback(&self, caller: &Caller, session: SessionId) -> Result<(), Error> {
        match self.take(caller, session, plain(true), Some(KEEP_FOR_ROLLBACK), "rollback").await {
            // Its memory is what went wrong, perhaps: the disk is kept.
            Err(Error::Unsaveable { .. }) => {
                self.take(caller, session, plain(false), Some(KEEP_FOR_ROLLBACK), "rollback").await.map(drop)
            }
            other => other.map(drop),
        }
    }
}

async fn make_forks(inner: &Arc<Inner>, caller: &Caller, snapshot: SnapshotRow, new: NewForks) -> Result<Forked, Error> {
    let mut metadata = metadata_of(&snapshot);
    metadata.extend(new.metadata);
    let wanted = NewSession { name: new.name, metadata, secrets: new.secrets, ..NewSession::default() };
    let intended = fork::intend(inner, caller, &wanted, snapshot.id, new.count, new.disk_only).await?;
    let mut ended: Vec<(usize, Result<SessionView, Error>)> = futures_util::stream::iter(intended.into_iter().enumerate())
        .map(|(number, fork)| async move { (number, fork.carry_out(inner).await.map(|created| created.view)) })
        .buffer_unordered(FORKS_AT_ONCE)
        .collect()
        .await;
    ended.sort_by_key(|(number, _)| *number);
    let mut forked = Forked { items: Vec::new(), errors: Vec::new() };
    for (_, result) in ended {
        match result {
            Ok(view) => forked.items.push(view),
            Err(error) => forked.errors.push(error),
        }
    }
    Ok(forked)
}

/// Most labels, and the longest name and value of one, in bytes.
const MAX_LABELS: usize = 64;
const MAX_LABEL: usize = 1024;

fn check(new: &NewSnapshot) -> Result<(), Error> {
    policy::seconds("keep_seconds", new.keep_seconds)?;
    if new.labels.len() > MAX_LABELS {
        return Err(Error::invalid("labels", format!("at most {MAX_LABELS} can be given")));
    }
    match new.labels.iter().find(|(name, value)| name.is_empty() || name.len().max(value.len()) > MAX_LABEL) {
        Some(_) => {
            Err(Error::invalid("labels", format!("a name can't be empty, and neither part longer than {MAX_LABEL} bytes")))
        }
        None => Ok(()),
    }
}

fn check_forks(new: &NewForks) -> Result<(), Error> {
    if !(1..=MAX_FORKS).contains(&new.count) {
        return Err(Error::invalid("count", format!("it must be from 1 to {MAX_FORKS}")));
    }
    Ok(())
}

fn plain(memory: bool) -> NewSnapshot {
    NewSnapshot { id: SnapshotId::new(), name: None, keep_seconds: None, memory, labels: BTreeMap::new() }
}

fn metadata_of(snapshot: &SnapshotRow) -> BTreeMap<String, String> {
    serde_json::from_value(snapshot.template_row["metadata"].clone()).unwrap_or_default()
}

/// Marks a snapshot as deleted, then removes it. One that is being forked is waited for.
pub(crate) async fn delete(inner: &Arc<Inner>, id: SnapshotId, actor: &Actor, reason: &str) -> Result<(), Error> {
    let now = inner.now();
    {
        // Nobody takes anything of it from here on.
        let _alone = inner.shelf.alone().await;
        let row = loop {
            let Some(mut row) = inner.store.snapshot(id).await?.filter(|row| row.deleted_at.is_none()) else { return Ok(()) };
            (row.state, row.deleted_at, row.reason) = (SnapshotState::Deleted, Some(now), Some(reason.to_owned()));
            row.parcel = None;
            match inner.store.commit_snapshots(vec![row.clone()]).await {
                Ok(()) => break row,
                // It was packed, or fetched, in this very moment.
                Err(StoreError::SnapshotConflict { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        };
        tell(inner, &row, actor, reason, now).await;
    }
    let inner_ = inner.clone();
    let removed = blocking(move || inner_.shelf.remove(id)).await?;
    removed.map_err(|e| io_error(&e, "remove the snapshot's files"))?;
    shelf::collect_layers(inner).await
}

/// An entry in the history of its session, where that is still there.
async fn tell(inner: &Arc<Inner>, row: &SnapshotRow, actor: &Actor, reason: &str, now: Timestamp) {
    let Ok(session) = inner.present(row.session_id).await else { return };
    let data = json!({ "snapshot_id": row.id, "name": row.name, "reason": reason });
    let (kind, actor) = (EventType::SNAPSHOT_DELETED, actor.clone());
    let change = move |session: &SessionRow| {
        let mut change = SessionChange::new(session.clone());
        change.events.push(NewEvent {
            at: now,
            kind: kind.clone(),
            actor: actor.clone(),
            operation_id: None,
            data: data.clone(),
        });
        Some(change)
    };
    if let Err(error) = inner.change(&session, Box::new(change)).await {
        tracing::warn!(session = %session.id, snapshot = %row.id, %error, "that a snapshot was deleted is not in the history");
    }
}

/// How often an end is given to a snapshot that changes meanwhile.
const TRIES: usize = 3;

/// Gives the snapshots of a session that is being deleted an end, but for those that have a name or an end already. What
/// stands in the way doesn't keep the session from being deleted.
pub(crate) async fn outlive(inner: &Inner, session: SessionId) {
    let until = inner.now().plus(KEEP_AFTER_DELETE);
    for _ in 0..TRIES {
        let given = async {
            let left = inner.store.snapshots_of(session).await?;
            let endless = left.into_iter().filter(|row| row.name.is_none() && row.keep_until.is_none());
            let rows = endless.map(|row| SnapshotRow { keep_until: Some(until), ..row }).collect();
            inner.store.commit_snapshots(rows).await
        };
        match given.await {
            Ok(()) => return,
            Err(StoreError::SnapshotConflict { .. }) => {}
            Err(error) => {
                tracing::warn!(%session, %error, "the snapshots of a deleted session stay until somebody deletes them");
                return;
            }
        }
    }
}

/// Deletes snapshots whose time is over.
pub(crate) async fn expire(inner: Arc<Inner>) {
    loop {
        match inner.store.snapshots_due(inner.now()).await {
            Ok(due) => {
                for row in due {
                    if let Err(error) = delete(&inner, row.id, &Actor::system(), "expired").await {
                        tracing::warn!(snapshot = %row.id, %error, "a snapshot whose time is over stays");
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "snapshots whose time is over can't be read"),
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = inner.closing.cancelled() => return,
        }
    }
}

/// Where a session can be set back to, newest first.
pub(crate) async fn ways_back(inner: &Inner, row: &SessionRow, most: usize) -> Result<Vec<SnapshotRow>, Error> {
    if row.state == State::Deleted {
        return Ok(Vec::new());
    }
    let filter = SnapshotFilter { session: Some(row.id), ..SnapshotFilter::default() };
    Ok(inner.store.list_snapshots(filter, most, None).await?.items)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_labels_beyond_all_bounds_are_refused_by_name() {
        let forks = |count| check_forks(&NewForks { count, ..NewForks::default() }).map_err(|error| error.to_string());
        assert_eq!((forks(1), forks(MAX_FORKS)), (Ok(()), Ok(())));
        for count in [0, MAX_FORKS + 1, 1_000_000] {
            assert!(forks(count).is_err_and(|text| text.starts_with("count:")), "{count}");
        }
        let labelled =
            |name: &str, value: &str| NewSnapshot { labels: [(name.to_owned(), value.to_owned())].into(), ..plain(true) };
        check(&labelled("a", "")).unwrap();
        for bad in [labelled("", "x"), labelled("a", &"x".repeat(MAX_LABEL + 1))] {
            assert!(check(&bad).is_err_and(|error| error.to_string().starts_with("labels:")));
        }
        assert!(check(&NewSnapshot { keep_seconds: Some(0), ..plain(true) }).is_err());
    }
}
