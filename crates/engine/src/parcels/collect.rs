//! The store as a whole: what uses its space, whether it is intact, and removing what nobody needs.

use super::{backup, evict, store_error};
use crate::{Caller, Engine, Error, inner::Inner, parcels::present, scan, tokens::admin_only};
use blob::{Mark, Repository};
use model::{SessionId, SnapshotId};
use snapshot::parcel::{Manifest, ParcelKind};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// What a manifest is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    Session(SessionId),
    Snapshot(SnapshotId),
    /// A backup: kept until somebody removes it.
    Backup,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Owner::Session(id) => write!(f, "session {id}"),
            Owner::Snapshot(id) => write!(f, "snapshot {id}"),
            Owner::Backup => f.write_str("a backup"),
        }
    }
}

/// How storage stands. All sizes in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StorageReport {
    pub place: String,
    pub encrypted: bool,
    /// Why nothing can be packed at present.
    pub trouble: Option<String>,
    /// Sessions and snapshots that the store has, and those of them whose files aren't here.
    pub packed: u64,
    pub away: u64,
    pub cache_used: u64,
    pub cache_limit: u64,
    /// Everything in the store, as it lies there.
    pub stored: u64,
    /// Of all that is packed, as if each had its own copy, and with what they share counted once.
    pub whole: u64,
    pub shared_once: u64,
    pub chunks: u64,
    pub packs: u64,
    pub manifests: u64,
    /// What a collection would free, about.
    pub collectable: u64,
}

/// What a collection did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StorageCollected {
    pub manifests_removed: u64,
    pub chunks_removed: u64,
    pub packs_removed: u64,
    pub packs_rewritten: u64,
    pub bytes_freed: u64,
    /// Manifests of sessions that this server doesn't know: they stay.
    pub unknown_manifests: u64,
}

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StorageChecked {
    pub chunks: u64,
    pub bytes: u64,
    /// Objects that aren't as they were written, and what is wrong.
    pub damages: Vec<String>,
    /// What can't be restored whole any more, and why.
    pub affected: Vec<String>,
}

impl Engine {
    /// How storage stands, and what a collection would free: for that every manifest is read.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::ObjectStore`].
    pub async fn storage(&self, caller: &Caller) -> Result<StorageReport, Error> {
        admin_only(caller)?;
        let inner = &self.inner;
        let cache = evict::look(inner).await?;
        let repository = inner.depot.repository().await?;
        let usage = repository.usage().await.map_err(store_error)?;
        let plan = collect(inner, true).await?;
        Ok(StorageReport {
            place: inner.depot.place(),
            encrypted: inner.depot.is_encrypted(),
            trouble: inner.depot.trouble(),
            packed: cache.packed,
            away: cache.away,
            cache_used: cache.used_bytes,
            cache_limit: inner.config.cache_bytes,
            stored: usage.stored_bytes,
            whole: plan.whole,
            shared_once: usage.plain_bytes,
            chunks: usage.chunks,
            packs: usage.packs,
            manifests: usage.manifests,
            collectable: plan.done.bytes_freed,
        })
    }

    /// Removes from the store what nobody needs.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::ObjectStore`]; [`Error::Damaged`] where it can't be told what is needed: then nothing
    /// is removed.
    pub async fn storage_collect(&self, caller: &Caller) -> Result<StorageCollected, Error> {
        admin_only(caller)?;
        Ok(collect(&self.inner, false).await?.done)
    }

    /// Reads and verifies everything in the store.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::ObjectStore`].
    pub async fn storage_check(&self, caller: &Caller) -> Result<StorageChecked, Error> {
        admin_only(caller)?;
        check(&self.inner).await
    }

    /// Has the object store's key wrapped under the one in `key_file`, and under no other.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::Invalid`] where the store isn't encrypted, [`Error::ObjectStore`].
    pub async fn rotate_key(&self, caller: &Caller, key_file: &str) -> Result<(), Error> {
        admin_only(caller)?;
        let depot = &self.inner.depot;
        let Some(old) = &depot.config.key else {
            return Err(Error::invalid("key_file", "the object store isn't encrypted"));
        };
        if !std::path::Path::new(key_file).is_absolute() {
            return Err(Error::invalid("key_file", "it must be absolute: it is a file of the server's machine"));
        }
        let new = blob::KeySource::File(key_file.into());
        depot.repository().await?.rotate(old, &new).await.map_err(store_error)
    }

    /// Packs at once what would be packed at some time.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::ObjectStore`].
    pub async fn storage_pack(&self, caller: &Caller) -> Result<(), Error> {
        admin_only(caller)?;
        match super::keeper::pass(&self.inner, true).await {
            Err(error @ (Error::ObjectStore { .. } | Error::NoSpace { .. } | Error::ShuttingDown)) => Err(error),
            // Part of it may be done.
            Err(error) => {
                self.inner.depot.set_trouble(Some(error.to_string()));
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }
}

/// Whose a manifest is, by its name; `None`: nobody's that is known here.
fn owner_of(name: &str) -> Option<Owner> {
    let (kind, rest) = name.split_once('-')?;
    let id = rest.get(..36);
    match kind {
        "session" => Some(Owner::Session(id?.parse().ok()?)),
        "snapshot" => Some(Owner::Snapshot(id?.parse().ok()?)),
        "backup" => Some(Owner::Backup),
        _ => None,
    }
}

/// Manifests that something needs, and those that nothing needs any more.
struct Sorted {
    needed: Vec<(String, Owner)>,
    orphans: Vec<String>,
    unknown: u64,
}

async fn sort(inner: &Inner, repository: &Repository) -> Result<Sorted, Error> {
    let named = named(inner).await?;
    let mut sorted = Sorted { needed: Vec::new(), orphans: Vec::new(), unknown: 0 };
    for name in repository.manifests().await.map_err(store_error)? {
        if let Some(owner) = named.get(&name) {
            sorted.needed.push((name, *owner));
            continue;
        }
        let is_ours = match owner_of(&name) {
            Some(Owner::Session(id)) => inner.store.session(id).await?.is_some(),
            Some(Owner::Snapshot(id)) => inner.store.snapshot(id).await?.is_some(),
            Some(Owner::Backup) => {
                sorted.needed.push((name, Owner::Backup));
                continue;
            }
            None => false,
        };
        match is_ours {
            true => sorted.orphans.push(name),
            false => sorted.unknown += 1,
        }
    }
    Ok(sorted)
}

/// All manifests that rows name.
async fn named(inner: &Inner) -> Result<HashMap<String, Owner>, Error> {
    let (mut of_snapshots, mut of_sessions) = (HashMap::new(), HashMap::new());
    let of_snapshot = |row: store::SnapshotRow| {
        of_snapshots.extend(row.parcel.map(|parcel| (parcel.manifest, Owner::Snapshot(row.id))));
    };
    let of_session = |row: store::SessionRow| {
        of_sessions.extend(present(&row).map(|parcel| (parcel.manifest.clone(), Owner::Session(row.id))));
    };
    scan::all(&*inner.store, of_snapshot, of_session).await?;
    of_snapshots.extend(of_sessions);
    Ok(of_snapshots)
}

/// What a collection found and did.
#[derive(Default)]
pub(crate) struct Outcome {
    pub done: StorageCollected,
    /// Bytes of everything that is needed, as if nothing was shared.
    pub whole: u64,
}

/// Removes what nobody needs; nothing is packed meanwhile. With `dry_run` it only tells what it would do.
pub(crate) async fn collect(inner: &Arc<Inner>, dry_run: bool) -> Result<Outcome, Error> {
    // Who only looks is in nobody's way.
    let _gate = match dry_run {
        true => (Some(inner.depot.gate.read().await), None),
        false => (None, Some(inner.depot.gate.write().await)),
    };
    let repository = inner.depot.repository().await?;
    let mut mark = repository.mark();
    let sorted = sort(inner, &repository).await?;
    if !dry_run {
        // What is still needed is learned anew below.
        *inner.depot.known() = super::Known::default();
    }
    let mut outcome = Outcome::default();
    outcome.done.unknown_manifests = sorted.unknown;
    let mut foreign = Vec::new();
    if sorted.unknown > 0 {
        let names = repository.manifests().await.map_err(store_error)?;
        let is_known = |name: &String| sorted.orphans.contains(name) || sorted.needed.iter().any(|(needed, _)| needed == name);
        foreign.extend(names.into_iter().filter(|name| !is_known(name)));
    }
    let needed = sorted.needed.iter().map(|(name, _)| name).chain(&foreign);
    let mut kept: HashSet<String> = HashSet::new();
    for name in needed {
        let manifest = inner.depot.manifest(&repository, name).await?;
        if manifest.kind == ParcelKind::Backup {
            let backup = backup::contents_of(&manifest)?;
            kept.extend(backup.sessions.into_values().chain(backup.snapshots.into_values()));
        }
        for stream in manifest.streams() {
            outcome.whole += stream.len;
            mark.stream(stream).await.map_err(store_error)?;
        }
        inner.depot.known().learn(&manifest);
    }
    // Those of backups: sessions that have gone on since.
    let (of_backups, orphans): (Vec<String>, Vec<String>) = sorted.orphans.into_iter().partition(|name| kept.contains(name));
    for name in &of_backups {
        let manifest = inner.depot.manifest(&repository, name).await?;
        for stream in manifest.streams() {
            mark.stream(stream).await.map_err(store_error)?;
        }
    }
    faults::point("collect.marked");
    outcome.done.manifests_removed = orphans.len() as u64;
    if !dry_run {
        for name in &orphans {
            repository.delete_manifest(name).await.map_err(store_error)?;
        }
    }
    let collected = repository.collect(mark, dry_run).await.map_err(store_error)?;
    outcome.done.chunks_removed = collected.chunks_removed;
    outcome.done.packs_removed = collected.packs_removed;
    outcome.done.packs_rewritten = collected.packs_rewritten;
    outcome.done.bytes_freed = collected.bytes_freed;
    Ok(outcome)
}

async fn check(inner: &Arc<Inner>) -> Result<StorageChecked, Error> {
    let repository = inner.depot.repository().await?;
    let usage = repository.usage().await.map_err(store_error)?;
    let damages = repository.check(|_| {}).await.map_err(store_error)?;
    let mut checked = StorageChecked { chunks: usage.chunks, bytes: usage.plain_bytes, ..StorageChecked::default() };
    for (name, owner) in sort(inner, &repository).await?.needed {
        if let Err(why) = is_whole(inner, &repository, &name, &damages).await {
            checked.affected.push(format!("{owner}: {why}"));
        }
    }
    // What rows name has to be there.
    let there = repository.manifests().await.map_err(store_error)?;
    let lost = named(inner).await?.into_iter().filter(|(name, _)| !there.contains(name));
    checked.affected.extend(lost.map(|(name, owner)| format!("{owner}: its manifest {name} is missing")));
    checked.damages = damages.iter().map(|damage| format!("{}: {}", damage.object, damage.what)).collect();
    Ok(checked)
}

async fn is_whole(inner: &Arc<Inner>, repository: &Repository, name: &str, damages: &[blob::Damage]) -> Result<(), Error> {
    let manifest: Manifest = inner.depot.manifest(repository, name).await?;
    let mut mark: Mark = repository.mark();
    for stream in manifest.streams() {
        mark.stream(stream).await.map_err(store_error)?;
    }
    let damaged = damages.iter().filter_map(|damage| damage.chunk).filter(|chunk| mark.contains(*chunk)).count();
    match (mark.absent().len(), damaged) {
        (0, 0) => Ok(()),
        (absent, damaged) => Err(Error::Damaged { detail: format!("{absent} chunks are missing and {damaged} are damaged") }),
    }
}

/// Collects now and then what deleted sessions and snapshots leave in the store.
pub(crate) async fn keep(inner: Arc<Inner>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            () = inner.closing.cancelled() => return,
        }
        let collected = tokio::select! {
            collected = collect(&inner, false) => collected,
            () = inner.closing.cancelled() => return,
        };
        match collected {
            Ok(outcome) => tracing::info!(freed = outcome.done.bytes_freed, "the object store was collected"),
            Err(error) => tracing::warn!(%error, "the object store can't be collected now"),
        }
    }
}

/// How often the store is collected.
const EVERY: std::time::Duration = std::time::Duration::from_secs(6 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifests_name_says_whose_it_is() {
        let (session, snapshot) = (SessionId::new(), SnapshotId::new());
        let at = model::Timestamp(1_700_000_000_000);
        assert_eq!(owner_of(&super::super::pack::session_manifest(session, at)), Some(Owner::Session(session)));
        assert_eq!(owner_of(&super::super::pack::snapshot_manifest(snapshot, at)), Some(Owner::Snapshot(snapshot)));
        assert_eq!(owner_of("backup-1"), Some(Owner::Backup));
        for other in ["", "session", "session-1", "export", "thing-0"] {
            assert_eq!(owner_of(other), None, "{other}");
        }
    }
}
