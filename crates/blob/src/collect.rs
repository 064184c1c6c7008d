//! Removing what nothing refers to any more: mark, then sweep.
//!
//! **Mark.** The caller goes through all that is to live (its manifests, and whatever else it holds) with a [`Mark`], which
//! walks the trees of streams itself. From the moment the mark begins, whatever a writer writes or finds there already
//! counts as live, too; so does what a writer that is older than the mark and still lives has touched. So a manifest that
//! is stored after the caller listed them loses nothing.
//!
//! **Sweep.** Under one lock the dead chunks of the packs that are to go leave the index: from then on a writer that has
//! such a chunk writes it anew. A pack without any live chunk goes; one that is mostly dead, and small ones where there
//! are many, go once their live chunks have been written into new packs. Then, in this order:
//!
//! 1. the new packs are in the store,
//! 2. index objects without the old packs are,
//! 3. the index objects that name old packs are removed,
//! 4. the old packs are removed.
//!
//! Whoever dies between two steps leaves packs that no index names. The next opening reads them by their trailers: garbage
//! again, but whole, and the next collection removes them. At no moment does an index object name a pack that isn't there;
//! should a power loss undo step 3 and not 4, opening passes over what is named and not there.
//!
//! A pack's name is its contents, so a writer may make a pack anew that is just being removed. Uploads and removals of
//! packs exclude each other, and a pack that came back is not removed.

use crate::{
    error::Error,
    id::{ChunkId, PackId},
    index::{Epoch, PackNo, Place},
    mark::Mark,
    pack::PACK,
    repository::{Inner, Repository, State},
};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// Packs below this are small.
const SMALL: u64 = PACK as u64 / 4;
/// So many small ones are put together.
const MANY_SMALL: usize = 8;
/// So much is moved at once.
const MOVE: u64 = 4 << 20;

/// What a collection did, or would do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    /// Packs with nothing live in them.
    pub packs_removed: u64,
    /// Packs whose live chunks were moved into new ones.
    pub packs_rewritten: u64,
    /// Chunks that nothing refers to, in these packs.
    pub chunks_removed: u64,
    /// How much smaller the store is. An estimate where nothing was done.
    pub bytes_freed: u64,
}

/// What a sweep is going to do.
#[derive(Default)]
struct Plan {
    dead: HashSet<PackNo>,
    /// The live chunks of packs that are rewritten.
    rewrite: HashMap<PackNo, Vec<(ChunkId, Place)>>,
    chunks_removed: u64,
    /// Bytes of dead packs, and of the dead part of the others.
    estimate: u64,
}

#[derive(Default, Clone, Copy)]
struct Tally {
    live_chunks: u64,
    /// What the live chunks take up as they are stored, about.
    live_bytes: u64,
}

impl Repository {
    /// Removes what `mark` didn't find, from packs where that is worth it. With `dry_run` it only tells what it would do.
    ///
    /// # Errors
    /// What the store says; [`Error::InUse`] where another server has taken the repository over. What was begun is finished
    /// by the next collection.
    pub async fn collect(&self, mark: Mark, dry_run: bool) -> Result<Collected, Error> {
        let inner = &self.inner;
        let _one = inner.collecting.lock().await;
        if !dry_run {
            inner.must_own().await?;
        }
        let (live, floor) = mark.into_parts();
        let planner = inner.clone();
        let plan = tokio::task::spawn_blocking(move || planner.plan(&live, floor, dry_run)).await;
        let plan = plan.map_err(|e| Error::Aborted(format!("collecting ({e})")))?;
        let mut done = Collected {
            packs_removed: plan.dead.len() as u64,
            packs_rewritten: plan.rewrite.len() as u64,
            chunks_removed: plan.chunks_removed,
            bytes_freed: plan.estimate,
        };
        if dry_run {
            return Ok(done);
        }
        faults::point("blob.collect.planned");
        let before = inner.pack_bytes();
        let (removed, rewritten) = inner.rewrite(plan).await?;
        faults::point("blob.collect.moved");
        inner.must_own().await?;
        inner.drop_packs(&removed).await?;
        done.packs_rewritten = rewritten;
        done.bytes_freed = before.saturating_sub(inner.pack_bytes());
        inner.remove_doomed().await?;
        Ok(done)
    }
}

impl Inner {
    fn pack_bytes(&self) -> u64 {
        self.state().index.packs().map(|(_, pack)| pack.size).sum()
    }

    /// Decides what goes; unless it's a rehearsal, dead chunks leave the index at the same moment. Blocks.
    fn plan(&self, live: &HashSet<ChunkId>, floor: Epoch, dry_run: bool) -> Plan {
        let mut state = self.state();
        let lives = |id: &ChunkId, place: &Place| place.touched >= floor || live.contains(id);
        let mut tallies: HashMap<PackNo, Tally> = HashMap::new();
        for (_, place) in state.index.chunks.iter().filter(|(id, place)| lives(id, place)) {
            let tally = tallies.entry(place.pack).or_default();
            tally.live_chunks += 1;
            tally.live_bytes += stored_share(&state, place);
        }
        let mut plan = Plan::default();
        let mut small = Vec::new();
        for (number, pack) in state.index.packs() {
            let tally = tallies.get(&number).copied().unwrap_or_default();
            if tally.live_chunks == 0 {
                plan.dead.insert(number);
                plan.estimate += pack.size;
            } else if tally.live_bytes < pack.size / 2 {
                plan.rewrite.insert(number, Vec::new());
                plan.estimate += pack.size - tally.live_bytes;
            } else if pack.size < SMALL {
                small.push(number);
            }
        }
        if small.len() >= MANY_SMALL {
            plan.rewrite.extend(small.into_iter().map(|number| (number, Vec::new())));
        }
        for (id, place) in &state.index.chunks {
            let is_live = lives(id, place);
            match plan.rewrite.get_mut(&place.pack) {
                Some(chunks) if is_live => chunks.push((*id, *place)),
                Some(_) => plan.chunks_removed += 1,
                None => plan.chunks_removed += u64::from(plan.dead.contains(&place.pack)),
            }
        }
        if !dry_run {
            let State { index, .. } = &mut *state;
            index.chunks.retain(|id, place| {
                lives(id, place) || !(plan.dead.contains(&place.pack) || plan.rewrite.contains_key(&place.pack))
            });
        }
        plan
    }

    /// Writes the live chunks of packs that are to go into new packs. Returns all packs that can go now, and how many of
    /// them were rewritten. A pack with a chunk that can't be read stays.
    async fn rewrite(self: &Arc<Self>, plan: Plan) -> Result<(HashSet<PackNo>, u64), Error> {
        let mut removed = plan.dead;
        let mut rewritten = 0;
        let mut batches = Vec::new();
        for (number, mut chunks) in plan.rewrite {
            chunks.sort_by_key(|(_, place)| (place.block, place.offset));
            match self.move_chunks(chunks).await {
                Ok(under_way) => {
                    batches.extend(under_way);
                    removed.insert(number);
                    rewritten += 1;
                }
                Err(error) if error.is_loss() => {
                    tracing::warn!(store = self.store.name(), %error, "a pack stays, since not all in it can be read");
                }
                Err(error) => return Err(error),
            }
        }
        let (inner, closing) = (self.clone(), batches.clone());
        let closed = tokio::task::spawn_blocking(move || closing.iter().for_each(|batch| inner.close(batch))).await;
        closed.map_err(|e| Error::Aborted(format!("collecting ({e})")))?;
        for batch in batches {
            batch.wait().await?;
        }
        Ok((removed, rewritten))
    }

    async fn move_chunks(self: &Arc<Self>, chunks: Vec<(ChunkId, Place)>) -> Result<Vec<Arc<crate::batch::Batch>>, Error> {
        let mut batches: Vec<Arc<crate::batch::Batch>> = Vec::new();
        let mut rest = chunks.into_iter().map(|(id, place)| (id, u64::from(place.len))).peekable();
        while rest.peek().is_some() {
            let (mut wants, mut bytes) = (Vec::new(), 0);
            while let Some(want) = rest.next_if(|_| bytes < MOVE) {
                bytes += want.1;
                wants.push(want);
            }
            let contents = self.fetch(wants).await?;
            self.room().await;
            let inner = self.clone();
            let stored = tokio::task::spawn_blocking(move || {
                inner.store_pieces(&contents.iter().map(|piece| &piece[..]).collect::<Vec<_>>(), true)
            });
            for batch in stored.await.map_err(|e| Error::Aborted(format!("collecting ({e})")))?.batches {
                if !batches.iter().any(|known| Arc::ptr_eq(known, &batch)) {
                    batches.push(batch);
                }
            }
        }
        Ok(batches)
    }

    /// Takes packs out of the index, here and in the store, unless a chunk is in them again.
    async fn drop_packs(self: &Arc<Self>, removed: &HashSet<PackNo>) -> Result<(), Error> {
        let _one = self.indexing.lock().await;
        let (named, mut listings) = {
            let mut state = self.state();
            let wanted: HashSet<PackNo> = state.index.chunks.values().map(|place| place.pack).collect();
            let gone: HashSet<PackNo> = removed.difference(&wanted).copied().collect();
            let ids: HashMap<PackId, u64> =
                gone.iter().filter_map(|number| state.index.pack(*number).map(|pack| (pack.id, pack.size))).collect();
            state.index.remove_packs(&gone);
            state.unlisted.retain(|(id, _, _)| !ids.contains_key(id));
            state.doomed.extend(ids.iter().map(|(id, size)| (*id, *size)));
            let doomed = &state.doomed;
            let named = state.objects.iter().filter(|object| object.packs.iter().any(|id| doomed.contains_key(id)));
            (named.cloned().collect::<Vec<_>>(), state.unlisted.clone())
        };
        listings.extend(self.read_all(&named).await?);
        self.replace_index(&named, listings).await
    }

    /// Removes packs that no index names any more.
    async fn remove_doomed(&self) -> Result<(), Error> {
        let doomed: Vec<PackId> = self.state().doomed.keys().copied().collect();
        for id in doomed {
            let _alone = self.removing.write().await;
            if !self.state().index.has_pack(&id) {
                faults::point("blob.pack.remove");
                self.store.delete(&id.path()).await?;
            }
            self.state().doomed.remove(&id);
        }
        Ok(())
    }
}

/// What a chunk takes up in the store: its share of its block.
fn stored_share(state: &State, place: &Place) -> u64 {
    let block = state.index.pack(place.pack).and_then(|pack| pack.blocks.get(place.block as usize));
    block.map_or(0, |block| {
        let plain = u64::from(block.info.plain).max(1);
        u64::from(place.len) * u64::from(block.info.stored) / plain
    })
}
