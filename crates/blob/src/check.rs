//! Looking at everything that is stored, and what it amounts to.

use crate::{
    config::{self, Config},
    error::Error,
    id::{ChunkId, PackId},
    index_objects::Listing,
    key, lock,
    pack::{self, MAX_PACK, Trailer},
    repository::{Inner, Repository, threads},
    store::{Listed, missing},
};
use futures_util::{StreamExt, stream};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// Something that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The object's path in the repository.
    pub object: String,
    /// The first chunk that it hits, where it hits one alone.
    pub chunk: Option<ChunkId>,
    pub what: String,
}

/// How far a check is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    pub packs: u64,
    pub packs_done: u64,
    pub bytes: u64,
    pub bytes_done: u64,
}

/// What a repository holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of everything in the store.
    pub stored_bytes: u64,
    pub packs: u64,
    pub pack_bytes: u64,
    pub chunks: u64,
    /// Bytes of all chunks, each once, as they were given.
    pub plain_bytes: u64,
    pub manifests: u64,
    pub manifest_bytes: u64,
}

impl Repository {
    /// What is stored, by what the store lists.
    ///
    /// # Errors
    /// What the store says.
    pub async fn usage(&self) -> Result<Usage, Error> {
        let listed = self.inner.store.list("").await?;
        let mut usage = Usage::default();
        for object in &listed {
            usage.stored_bytes += object.size;
            if object.path.starts_with("packs/") {
                usage.packs += 1;
                usage.pack_bytes += object.size;
            } else if object.path.starts_with("manifests/") {
                usage.manifests += 1;
                usage.manifest_bytes += object.size;
            }
        }
        let state = self.inner.state();
        usage.chunks = state.index.chunks.len() as u64;
        usage.plain_bytes = state.index.chunks.values().map(|place| u64::from(place.len)).sum();
        Ok(usage)
    }

    /// Reads every object and verifies every chunk, and that index, packs and manifests agree. Whether all chunks are there
    /// that manifests refer to is what [`crate::Mark::absent`] tells. No collection runs meanwhile.
    ///
    /// # Errors
    /// What keeps it from looking at all: an object that can't be fetched, a newer format.
    pub async fn check(&self, mut progress: impl FnMut(Progress)) -> Result<Vec<Damage>, Error> {
        let inner = &self.inner;
        let _still = inner.collecting.lock().await;
        let mut found = Vec::new();
        let listed = inner.store.list("").await?;
        let in_folder =
            |folder: &str| listed.iter().filter(|object| object.path.starts_with(folder)).cloned().collect::<Vec<_>>();
        for object in listed.iter().filter(|object| !is_known(&object.path)) {
            found.push(Damage { object: object.path.clone(), chunk: None, what: "it is no object of a repository".to_owned() });
        }
        for object in listed.iter().filter(|object| !object.path.starts_with("packs/")) {
            note(&mut found, inner.check_small(object).await)?;
        }
        let named = inner.check_index(&in_folder("index/"), &mut found).await?;
        let packs = in_folder("packs/");
        let there: HashSet<PackId> = packs.iter().filter_map(|pack| PackId::from_path(&pack.path)).collect();
        for id in named.keys().filter(|id| !there.contains(id)) {
            note(&mut found, Err(missing(&id.path())))?;
        }
        let mut state =
            Progress { packs: packs.len() as u64, bytes: packs.iter().map(|pack| pack.size).sum(), ..Progress::default() };
        progress(state);
        let mut checks = stream::iter(packs).map(|object| inner.check_pack(object, &named)).buffer_unordered(threads());
        while let Some((size, checked)) = checks.next().await {
            note(&mut found, checked)?;
            state.packs_done += 1;
            state.bytes_done += size;
            progress(state);
        }
        found.sort_by(|a, b| a.object.cmp(&b.object));
        Ok(found)
    }
}

/// Damage is what was looked for; anything else ends the check.
fn note(found: &mut Vec<Damage>, checked: Result<(), Error>) -> Result<(), Error> {
    match checked {
        Err(Error::Damaged { object, chunk, what }) => found.push(Damage { object, chunk, what }),
        Err(Error::Missing { what, chunk }) => found.push(Damage { object: what, chunk, what: "it is missing".to_owned() }),
        other => return other,
    }
    Ok(())
}

fn is_known(path: &str) -> bool {
    let folders = ["keys/", "index/", "manifests/"];
    path == config::PATH
        || path == lock::PATH
        || folders.iter().any(|folder| path.starts_with(folder))
        || PackId::from_path(path).is_some()
}

impl Inner {
    /// Config, lock, keys, manifests.
    async fn check_small(&self, object: &Listed) -> Result<(), Error> {
        let path = object.path.as_str();
        if path.starts_with("manifests/") {
            return match self.read_manifest(path).await {
                // Deleted since it was listed.
                Err(Error::Missing { .. }) => Ok(()),
                other => other.map(drop),
            };
        }
        if path != config::PATH && path != lock::PATH && !path.starts_with("keys/") {
            return Ok(());
        }
        let Some(bytes) = self.store.find(path, 64 << 10).await? else { return Ok(()) };
        match path {
            config::PATH => match Config::parse(&bytes)? {
                there if there == self.config => Ok(()),
                _ => Err(Error::damaged(path, "it is the config of another repository")),
            },
            lock::PATH => lock::check(&bytes),
            _ => key::check(path, &bytes),
        }
    }

    /// All that index objects tell, by pack.
    async fn check_index(&self, objects: &[Listed], found: &mut Vec<Damage>) -> Result<HashMap<PackId, (u64, Trailer)>, Error> {
        let mut named: HashMap<PackId, (u64, Trailer)> = HashMap::new();
        for object in objects {
            let listings: Vec<Listing> = match self.read_index(&object.path).await {
                Ok(listings) => listings,
                // Merged since it was listed.
                Err(Error::Missing { .. }) => continue,
                Err(error) => {
                    note(found, Err(error))?;
                    continue;
                }
            };
            for (id, size, trailer) in listings {
                match named.get(&id) {
                    Some(other) if *other != (size, trailer.clone()) => {
                        note(
                            found,
                            Err(Error::damaged(&object.path, format!("it contradicts another index about the pack {id}"))),
                        )?;
                    }
                    _ => drop(named.insert(id, (size, trailer))),
                }
            }
        }
        Ok(named)
    }

    async fn check_pack(self: &Arc<Self>, object: Listed, named: &HashMap<PackId, (u64, Trailer)>) -> (u64, Result<(), Error>) {
        let Some(id) = PackId::from_path(&object.path) else { return (object.size, Ok(())) };
        (object.size, self.check_pack_contents(&object.path, id, named).await)
    }

    async fn check_pack_contents(
        self: &Arc<Self>,
        path: &str,
        id: PackId,
        named: &HashMap<PackId, (u64, Trailer)>,
    ) -> Result<(), Error> {
        let bytes = self.store.get(path, MAX_PACK).await?;
        let (inner, object, size) = (self.clone(), path.to_owned(), bytes.len() as u64);
        let verified = tokio::task::spawn_blocking(move || pack::verify(&object, id, &bytes, &inner.cipher)).await;
        let trailer = verified.map_err(|e| Error::Aborted(format!("checking ({e})")))??;
        match named.get(&id) {
            Some(listing) if *listing != (size, trailer) => Err(Error::damaged(path, "its index tells something else of it")),
            _ => Ok(()),
        }
    }
}
