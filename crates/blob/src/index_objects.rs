//! The index in the store: objects that tell what the trailers of many packs tell.
//!
//! They make opening quick, and hold nothing that the packs don't tell themselves. A pack that no index object names (its
//! server died before it wrote one) is read by its trailer at the next opening, so an upload that was cut off goes on
//! where it was. What an index object says of a pack that is not in the store any more is passed over. Many small objects
//! are merged into one: the new one is written before the old ones are removed.

use crate::{
    codec::{Cursor, len32},
    envelope::{self, Kind},
    error::Error,
    id::PackId,
    index::Epoch,
    pack::{FOOTER, Footer, Trailer},
    repository::{Inner, State},
    store::{Listed, missing},
};
use futures_util::{StreamExt, TryStreamExt, stream};
use std::collections::{HashMap, HashSet};

const BOUND: &[u8] = b"index";
/// Longest index object that is read.
const MAX: u64 = 512 << 20;
/// Objects of at most this size are merged …
const SMALL: u64 = 8 << 20;
/// … when there are so many.
const MANY: usize = 8;
/// How many objects are fetched at once.
const AT_ONCE: usize = 8;
/// So much of a pack's end is fetched in the hope that the trailer lies in it.
const GUESS: u64 = 256 << 10;

/// An index object in the store.
#[derive(Debug, Clone)]
pub(crate) struct IndexObject {
    pub(crate) path: String,
    pub(crate) size: u64,
    pub(crate) packs: Vec<PackId>,
}

/// A pack as an index object has it.
pub(crate) type Listing = (PackId, u64, Trailer);

fn encode(packs: &[Listing]) -> Vec<u8> {
    let mut out = len32(packs.len()).to_le_bytes().to_vec();
    for (id, size, trailer) in packs {
        let trailer = trailer.encode();
        out.extend_from_slice(&id.0);
        out.extend_from_slice(&size.to_le_bytes());
        out.extend_from_slice(&len32(trailer.len()).to_le_bytes());
        out.extend_from_slice(&trailer);
    }
    out
}

fn decode(bytes: &[u8]) -> Option<Vec<Listing>> {
    let mut cursor = Cursor::new(bytes);
    let count = cursor.u32()? as usize;
    if count > cursor.left() / 44 {
        return None;
    }
    let mut packs = Vec::with_capacity(count);
    for _ in 0..count {
        let (id, size, length) = (PackId(cursor.hash()?), cursor.u64()?, cursor.u32()?);
        packs.push((id, size, Trailer::decode(cursor.take(length as usize)?)?));
    }
    cursor.is_at_end().then_some(packs)
}

impl Inner {
    pub(crate) fn parse_index(&self, path: &str, object: &[u8]) -> Result<Vec<Listing>, Error> {
        let sealed = envelope::unwrap(path, Kind::INDEX, object)?;
        let plain = self.cipher.open(BOUND, sealed).map_err(|_| Error::damaged(path, "it is not what was encrypted"))?;
        decode(&plain).ok_or_else(|| Error::damaged(path, "its contents make no sense"))
    }

    pub(crate) async fn read_index(&self, path: &str) -> Result<Vec<Listing>, Error> {
        self.parse_index(path, &self.store.get(path, MAX).await?)
    }

    /// Loads all that the store tells of chunks.
    pub(crate) async fn load_index(&self) -> Result<(), Error> {
        // First the index, then the packs: what is added meanwhile is missed, what is there is not.
        let listed = self.store.list("index").await?;
        let read = stream::iter(listed).map(|object| async move {
            let read = self.read_index(&object.path).await;
            (object, read)
        });
        let objects: Vec<_> = read.buffer_unordered(AT_ONCE).collect().await;
        let packs = self.store.list("packs").await?;
        let sizes: HashMap<PackId, u64> =
            packs.iter().filter_map(|pack| Some((PackId::from_path(&pack.path)?, pack.size))).collect();
        for (object, read) in objects {
            match read {
                Ok(packs) => self.take_in(&object, packs, &sizes),
                Err(error) if error.is_loss() => {
                    tracing::warn!(store = self.store.name(), %error, "an index object can't be used; its packs are read instead");
                }
                Err(error) => return Err(error),
            }
        }
        let rest: Vec<(PackId, u64)> = {
            let state = self.state();
            sizes.into_iter().filter(|(id, _)| !state.index.has_pack(id)).collect()
        };
        self.adopt(rest).await
    }

    fn take_in(&self, object: &Listed, packs: Vec<Listing>, sizes: &HashMap<PackId, u64>) {
        let mut state = self.state();
        let ids = packs.iter().map(|(id, _, _)| *id).collect();
        for (id, size, trailer) in packs {
            // Gone, or not what it was: then its own trailer is asked.
            if sizes.get(&id) == Some(&size) {
                state.index.add(id, size, &trailer, self.cipher.is_keyed(), Epoch(0), false);
            }
        }
        state.objects.push(IndexObject { path: object.path.clone(), size: object.size, packs: ids });
    }

    /// Takes packs in by their trailers.
    async fn adopt(&self, packs: Vec<(PackId, u64)>) -> Result<(), Error> {
        let mut read = stream::iter(packs)
            .map(|(id, size)| async move { (id, size, self.read_trailer(id, size).await) })
            .buffer_unordered(AT_ONCE);
        while let Some((id, size, trailer)) = read.next().await {
            match trailer {
                Ok(trailer) => {
                    let State { index, unlisted, .. } = &mut *self.state();
                    index.add(id, size, &trailer, self.cipher.is_keyed(), Epoch(0), false);
                    unlisted.push((id, size, trailer));
                }
                Err(error) if error.is_loss() => {
                    tracing::warn!(store = self.store.name(), %error, "a pack can't be used");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(crate) async fn read_trailer(&self, id: PackId, size: u64) -> Result<Trailer, Error> {
        let path = id.path();
        if size < FOOTER as u64 {
            return Err(Error::damaged(path, "it is cut off"));
        }
        let end = self.part(&path, size - size.min(GUESS)..size).await?;
        let (rest, footer) = end.split_at(end.len() - FOOTER);
        let footer = Footer::parse(&path, size, footer)?;
        let wanted = footer.trailer as usize;
        if let Some(from) = rest.len().checked_sub(wanted) {
            return footer.open(&path, id, size, &rest[from..], &self.cipher);
        }
        let till = size - FOOTER as u64;
        let stored = self.part(&path, till - wanted as u64..till).await?;
        footer.open(&path, id, size, &stored, &self.cipher)
    }

    async fn part(&self, path: &str, range: std::ops::Range<u64>) -> Result<bytes::Bytes, Error> {
        let length = range.end - range.start;
        let parts = self.store.ranges(path, &[range]).await?;
        let part = parts.into_iter().next().ok_or_else(|| missing(path))?;
        if part.len() as u64 != length {
            return Err(Error::damaged(path, "it is shorter than it was"));
        }
        Ok(part)
    }

    /// Writes an index object for the packs that none tells of, and merges small ones where there are many.
    pub(crate) async fn flush_index(&self) -> Result<(), Error> {
        let _one = self.indexing.lock().await;
        let (mut packs, small) = {
            let state = self.state();
            let small: Vec<IndexObject> = state.objects.iter().filter(|object| object.size <= SMALL).cloned().collect();
            (state.unlisted.clone(), small)
        };
        if packs.is_empty() {
            return Ok(());
        }
        let merged = if small.len() >= MANY { small } else { Vec::new() };
        packs.extend(self.read_all(&merged).await?);
        self.replace_index(&merged, packs).await
    }

    /// What several objects tell, but for those that can't be read.
    pub(crate) async fn read_all(&self, objects: &[IndexObject]) -> Result<Vec<Listing>, Error> {
        let paths: Vec<String> = objects.iter().map(|object| object.path.clone()).collect();
        let read = stream::iter(paths).map(|path| async move {
            match self.read_index(&path).await {
                Err(error) if error.is_loss() => Ok(Vec::new()),
                other => other,
            }
        });
        let all: Vec<Vec<Listing>> = read.buffered(AT_ONCE).try_collect().await?;
        Ok(all.into_iter().flatten().collect())
    }

    /// Writes one object for `packs` (those that still exist), then removes `old` ones. The caller holds `indexing`.
    pub(crate) async fn replace_index(&self, old: &[IndexObject], mut packs: Vec<Listing>) -> Result<(), Error> {
        {
            let state = self.state();
            let mut seen = HashSet::new();
            packs.retain(|(id, _, _)| state.index.has_pack(id) && seen.insert(*id));
        }
        let written = if packs.is_empty() { None } else { Some(self.write_index(&packs).await?) };
        faults::point("blob.index.written");
        let kept = written.as_ref().map(|object| object.path.clone());
        {
            let mut state = self.state();
            let ids: HashSet<PackId> = packs.iter().map(|(id, _, _)| *id).collect();
            state.unlisted.retain(|(id, _, _)| !ids.contains(id));
            state.objects.retain(|object| !old.iter().any(|o| o.path == object.path) && Some(&object.path) != kept.as_ref());
            state.objects.extend(written);
        }
        for object in old.iter().filter(|object| Some(&object.path) != kept.as_ref()) {
            faults::point("blob.index.remove");
            self.store.delete(&object.path).await?;
        }
        Ok(())
    }

    async fn write_index(&self, packs: &[Listing]) -> Result<IndexObject, Error> {
        let object = envelope::wrap(Kind::INDEX, &self.cipher.seal(BOUND, encode(packs)));
        let path = format!("index/{}", blake3::hash(&object).to_hex());
        let size = object.len() as u64;
        faults::point("blob.index.put");
        self.store.create(&path, object.into()).await?;
        Ok(IndexObject { path, size, packs: packs.iter().map(|(id, _, _)| *id).collect() })
    }
}
