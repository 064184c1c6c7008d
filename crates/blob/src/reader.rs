//! Reading: chunks and whole streams, each chunk verified at every read.
//!
//! A stream is read in windows of some MiB. For each window the places of all its chunks are looked up, the blocks that
//! they lie in are fetched, with ranges that lie close together as one, and unpacked and verified on a thread that may
//! block. Several windows are on their way at once, so the store's delay is paid once and all processors work; the memory
//! for that is bounded by the number of windows.

use crate::{
    error::Error,
    id::ChunkId,
    index::{BlockAt, PackInfo, PackNo, Place},
    repository::{Inner, Repository, threads},
    store::missing,
    stream::{Entry, StreamRef},
    walk::Walk,
};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    sync::Arc,
};
use tokio::io::{AsyncWrite, AsyncWriteExt};

/// So many bytes of a stream are one window.
const WINDOW: u64 = 4 << 20;
/// Blocks with at most so many unwanted bytes between them are fetched as one.
const GAP: u64 = 128 << 10;
/// … up to so many bytes.
const LONGEST_FETCH: u64 = 8 << 20;
/// How many packs are asked at once for one window.
const PACKS_AT_ONCE: usize = 4;

/// A piece of a stream's contents.
pub(crate) enum Part {
    Bytes(Bytes),
    Zeros(u64),
}

/// A block that has to be fetched, and the pack that it lies in.
struct Wanted {
    number: u32,
    block: BlockAt,
    /// The first chunk that is wanted of it, for messages.
    chunk: ChunkId,
}

impl Inner {
    fn places(&self, ids: &[ChunkId]) -> Result<Vec<Place>, Error> {
        let state = self.state();
        let place = |id: &ChunkId| {
            let absent = || Error::Missing { what: "it".to_owned(), chunk: Some(*id) };
            state.index.chunks.get(id).copied().ok_or_else(absent)
        };
        ids.iter().map(place).collect()
    }

    /// The contents of chunks, in order, verified.
    pub(crate) async fn fetch(self: &Arc<Self>, wants: Vec<(ChunkId, u64)>) -> Result<Vec<Bytes>, Error> {
        let ids: Vec<ChunkId> = wants.iter().map(|(id, _)| *id).collect();
        let mut places = self.places(&ids)?;
        let blocks = match self.blocks(&ids, &places).await {
            // A collection may have moved them, and removed the pack that they were in.
            Err(Error::Missing { what, chunk }) => {
                let now = self.places(&ids)?;
                if now.iter().zip(&places).all(|(now, before)| now.pack == before.pack) {
                    return Err(Error::Missing { what, chunk });
                }
                places = now;
                self.blocks(&ids, &places).await?
            }
            other => other?,
        };
        let inner = self.clone();
        let slot = self.slots.clone().acquire_owned().await.map_err(|e| Error::Aborted(e.to_string()))?;
        let verified = tokio::task::spawn_blocking(move || {
            let done = inner.verify(&wants, &places, blocks);
            drop(slot);
            done
        });
        verified.await.map_err(|e| Error::Aborted(format!("reading ({e})")))?
    }

    /// All blocks that hold chunks at these places: stored bytes, or plain ones where they are in the cache.
    async fn blocks(&self, ids: &[ChunkId], places: &[Place]) -> Result<Blocks, Error> {
        let mut blocks = Blocks::default();
        let mut wanted: BTreeMap<PackNo, (PackInfo, BTreeMap<u32, Wanted>)> = BTreeMap::new();
        {
            let state = self.state();
            for (id, place) in ids.iter().zip(places) {
                let key = (place.pack, place.block);
                if blocks.plain.contains_key(&key) {
                    continue;
                }
                if let Some(block) = self.cache.get(key) {
                    blocks.plain.insert(key, block);
                    continue;
                }
                let gone = || Error::Missing { what: "its pack".to_owned(), chunk: Some(*id) };
                let pack = state.index.pack(place.pack).ok_or_else(gone)?;
                let block = pack.blocks.get(place.block as usize).ok_or_else(gone)?;
                let (_, of_pack) = wanted.entry(place.pack).or_insert_with(|| (pack.clone(), BTreeMap::new()));
                of_pack.entry(place.block).or_insert_with(|| Wanted { number: place.block, block: block.clone(), chunk: *id });
            }
        }
        let fetches = wanted.into_iter().map(|(number, (pack, of_pack))| async move {
            let fetched = self.fetch_blocks(&pack, of_pack.into_values().collect()).await?;
            Ok::<_, Error>((number, pack, fetched))
        });
        let mut fetched = stream::iter(fetches).buffer_unordered(PACKS_AT_ONCE);
        while let Some((number, pack, of_pack)) = fetched.try_next().await? {
            for (wanted, bytes) in of_pack {
                blocks.stored.insert((number, wanted.number), (pack.clone(), wanted.block, bytes));
            }
        }
        Ok(blocks)
    }

    async fn fetch_blocks(&self, pack: &PackInfo, wanted: Vec<Wanted>) -> Result<Vec<(Wanted, Bytes)>, Error> {
        let path = pack.id.path();
        let ranges = coalesce(wanted.iter().map(|one| one.block.at..one.block.at + u64::from(one.block.info.stored)));
        let first = wanted.first().map(|one| one.chunk);
        let parts = self.store.ranges(&path, &ranges).await;
        let parts = parts.map_err(|e| match first {
            Some(chunk) => e.for_chunk(chunk),
            None => e,
        })?;
        let mut found = Vec::with_capacity(wanted.len());
        for one in wanted {
            let (from, till) = (one.block.at, one.block.at + u64::from(one.block.info.stored));
            let part = ranges.iter().zip(&parts).find(|(range, _)| range.start <= from && till <= range.end);
            let (range, part) = part.ok_or_else(|| missing(&path))?;
            let (from, till) = ((from - range.start) as usize, (till - range.start) as usize);
            if till > part.len() {
                return Err(Error::damaged(path, "it is shorter than it was").for_chunk(one.chunk));
            }
            found.push((one, part.slice(from..till)));
        }
        Ok(found)
    }

    /// Unpacks blocks and compares every wanted chunk with its id. Blocks.
    fn verify(&self, wants: &[(ChunkId, u64)], places: &[Place], blocks: Blocks) -> Result<Vec<Bytes>, Error> {
        let mut plain = blocks.plain;
        let mut out = Vec::with_capacity(wants.len());
        for ((id, len), place) in wants.iter().zip(places) {
            let key = (place.pack, place.block);
            let damaged = |what: &str| {
                let pack = blocks.stored.get(&key).map(|(pack, _, _)| pack.id.path());
                Error::damaged(pack.unwrap_or_else(|| "its pack".to_owned()), what).for_chunk(*id)
            };
            let block = match plain.get(&key) {
                Some(block) => block.clone(),
                None => {
                    let (_, block, bytes) = blocks.stored.get(&key).ok_or_else(|| damaged("its block was not fetched"))?;
                    let unpacked = block.info.decode(bytes, &block.digest, &self.cipher).map_err(damaged)?;
                    if block.chunks > 1 {
                        self.cache.put(key, unpacked.clone());
                    }
                    plain.insert(key, unpacked.clone());
                    unpacked
                }
            };
            if u64::from(place.len) != *len {
                return Err(damaged(&format!("it has {} bytes, not {len} as its list says", place.len)));
            }
            let (from, till) = (place.offset as usize, place.offset as usize + place.len as usize);
            if till > block.len() {
                return Err(damaged("it lies outside of its block"));
            }
            let contents = block.slice(from..till);
            if self.cipher.chunk_id(&contents) != *id {
                return Err(damaged("its contents have another hash"));
            }
            out.push(contents);
        }
        Ok(out)
    }

    /// The contents of some entries.
    async fn window(self: &Arc<Self>, entries: Vec<Entry>) -> Result<Vec<Part>, Error> {
        let wants = entries.iter().filter_map(|entry| match entry {
            Entry::Chunk { id, len } => Some((*id, *len)),
            Entry::Zeros { .. } => None,
        });
        let mut contents = self.fetch(wants.collect()).await?.into_iter();
        let part = |entry: &Entry| match entry {
            Entry::Zeros { len } => Some(Part::Zeros(*len)),
            Entry::Chunk { .. } => contents.next().map(Part::Bytes),
        };
        Ok(entries.iter().filter_map(part).collect())
    }
}

#[derive(Default)]
struct Blocks {
    plain: HashMap<(PackNo, u32), Bytes>,
    stored: HashMap<(PackNo, u32), (PackInfo, BlockAt, Bytes)>,
}

/// Joins ranges, given in order, that lie close together.
fn coalesce(ranges: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end + GAP && range.end - last.start <= LONGEST_FETCH => {
                last.end = last.end.max(range.end);
            }
            _ => joined.push(range),
        }
    }
    joined
}

impl Repository {
    /// True where the chunk is stored.
    pub fn has(&self, id: ChunkId) -> bool {
        self.inner.state().index.chunks.contains_key(&id)
    }

    /// One chunk.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Damaged`], and what the store says.
    pub async fn get(&self, id: ChunkId) -> Result<Bytes, Error> {
        let len = u64::from(self.inner.places(&[id])?[0].len);
        let mut contents = self.inner.fetch(vec![(id, len)]).await?;
        contents.pop().ok_or_else(|| Error::Missing { what: "it".to_owned(), chunk: Some(id) })
    }

    /// Windows of a stream from `from` to `till`, on their way several at once, in order.
    fn windows(
        &self,
        stream: &StreamRef,
        range: Range<u64>,
    ) -> impl futures_util::Stream<Item = Result<(u64, Vec<Part>), Error>> {
        let walk = Walk::new(self.inner.clone(), stream, range);
        let inner = self.inner.clone();
        let windows = stream::try_unfold(walk, async |mut walk| Ok(walk.next(WINDOW).await?.map(|window| (window, walk))));
        windows
            .map_ok(move |(at, entries)| {
                let inner = inner.clone();
                async move { Ok((at, inner.window(entries).await?)) }
            })
            .try_buffered(threads() + 1)
    }

    /// Writes a whole stream to `writer`.
    ///
    /// # Errors
    /// [`Error::Missing`] and [`Error::Damaged`] with the chunk; [`Error::Io`] of the writer. What was written until then is
    /// right, as far as it goes.
    pub async fn read_stream(&self, stream: &StreamRef, mut writer: impl AsyncWrite + Unpin) -> Result<(), Error> {
        self.read_range(stream, 0..stream.len, &mut writer).await
    }

    /// Writes a part of a stream to `writer`; the range is cut to the stream's length.
    ///
    /// # Errors
    /// As [`Repository::read_stream`].
    pub async fn read_range(
        &self,
        stream: &StreamRef,
        range: Range<u64>,
        writer: &mut (impl AsyncWrite + Unpin),
    ) -> Result<(), Error> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let failed = |e| Error::io("can't write what was read", e);
        let mut windows = Box::pin(self.windows(stream, range.clone()));
        while let Some((mut at, parts)) = windows.try_next().await? {
            for part in parts {
                let len = part.len();
                // The part's own bytes that lie in the range.
                let from = range.start.saturating_sub(at).min(len);
                let till = range.end.saturating_sub(at).min(len);
                at += len;
                match part {
                    Part::Bytes(bytes) => writer.write_all(&bytes[from as usize..till as usize]).await.map_err(failed)?,
                    Part::Zeros(_) => {
                        let mut left = till - from;
                        while left > 0 {
                            let some = left.min(ZEROS.len() as u64);
                            writer.write_all(&ZEROS[..some as usize]).await.map_err(failed)?;
                            left -= some;
                        }
                    }
                }
            }
        }
        writer.flush().await.map_err(failed)
    }

    /// Writes a whole stream into a new, empty file, from several threads at once; zeros become holes.
    ///
    /// # Errors
    /// As [`Repository::read_stream`].
    pub async fn read_to_file(&self, stream: &StreamRef, file: File) -> Result<(), Error> {
        let failed = |e| Error::io("can't write what was read", e);
        file.set_len(stream.len).map_err(failed)?;
        let file = Arc::new(file);
        let windows = self.windows(stream, 0..stream.len).map_ok(|(at, parts)| {
            let file = file.clone();
            async move {
                let written = tokio::task::spawn_blocking(move || write_at(&file, at, &parts));
                written.await.map_err(|e| Error::Aborted(format!("writing ({e})")))?.map_err(failed)
            }
        });
        windows.try_buffer_unordered(threads()).try_collect::<()>().await
    }
}

impl Part {
    fn len(&self) -> u64 {
        match self {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Zeros(len) => *len,
        }
    }
}

fn write_at(file: &File, mut at: u64, parts: &[Part]) -> std::io::Result<()> {
    for part in parts {
        if let Part::Bytes(bytes) = part {
            file.write_all_at(bytes, at)?;
        }
        at += part.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_lie_close_together_are_one() {
        let near = |list: &[Range<u64>]| coalesce(list.iter().cloned());
        assert_eq!(near(&[0..10, 10..20, 20 + GAP..30 + GAP]), vec![0..30 + GAP]);
        assert_eq!(near(&[0..10, 11 + GAP..20 + GAP]), vec![0..10, 11 + GAP..20 + GAP]);
        assert_eq!(near(&[0..LONGEST_FETCH, LONGEST_FETCH..LONGEST_FETCH + 1]).len(), 2);
        assert!(near(&[]).is_empty());
    }
}
