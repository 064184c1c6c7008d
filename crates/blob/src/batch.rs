//! Packs under way: from new chunks to an object in the store.
//!
//! ```text
//! pieces ─ hash ─► known? in the index, or in a pack under way ──────────────────────► id
//!                  new:   claimed for the open batch ─ blocks ─ batch full ─ pack ─► upload ─► index
//! ```
//!
//! Batches belong to the repository, not to who writes: when two write the same chunk at once, the second depends on the
//! batch of the first, and the first may go away. A batch is sealed once it is full, or somebody wants it to be durable,
//! *and* nobody works on a block for it any more. When its upload fails for good its chunks are forgotten, and everybody
//! who depends on one of them is told; who writes them again claims them anew.

use crate::{
    block::{BLOCK, BlockBuilder, Member, StoredBlock},
    codec::len32,
    error::Error,
    id::ChunkId,
    pack::{self, PACK, PACK_CHUNKS, Sealed},
    repository::{Inner, State},
    store::Created,
};
use object_store::PutPayload;
use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::watch;

/// How many sealed packs may wait for the store, or be on their way to it.
pub(crate) const MAX_UPLOADS: usize = 3;
/// After so many packs the index is written.
const INDEX_EVERY: usize = 4;

/// How a batch ended.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    UnderWay,
    Durable,
    Failed(Error),
}

/// A pack that is being filled, sealed or uploaded.
#[derive(Debug)]
pub(crate) struct Batch {
    filling: Mutex<Filling>,
    outcome: watch::Sender<Outcome>,
}

#[derive(Debug, Default)]
struct Filling {
    /// The chunks that were claimed for it.
    claimed: Vec<ChunkId>,
    blocks: Vec<StoredBlock>,
    stored: usize,
    /// Small chunks for which there is no block yet.
    loose: BlockBuilder,
    /// How many work on blocks for it.
    jobs: usize,
    /// Takes no more claims.
    closed: bool,
    sealed: bool,
}

impl Filling {
    fn add(&mut self, blocks: Vec<StoredBlock>) {
        self.stored += blocks.iter().map(|block| block.bytes.len()).sum::<usize>();
        self.blocks.extend(blocks);
    }

    /// Takes what is to be sealed, once, when the time has come.
    fn take_ready(&mut self) -> Option<(Vec<StoredBlock>, BlockBuilder)> {
        if !self.closed || self.jobs > 0 || self.sealed {
            return None;
        }
        self.sealed = true;
        Some((mem::take(&mut self.blocks), mem::take(&mut self.loose)))
    }
}

impl Batch {
    fn new() -> Batch {
        Batch { filling: Mutex::default(), outcome: watch::Sender::new(Outcome::UnderWay) }
    }

    fn filling(&self) -> MutexGuard<'_, Filling> {
        self.filling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn outcome(&self) -> Outcome {
        self.outcome.borrow().clone()
    }

    /// Waits until its pack is in the store, or never will be.
    pub(crate) async fn wait(&self) -> Result<(), Error> {
        let mut outcome = self.outcome.subscribe();
        let ended = outcome.wait_for(|outcome| !matches!(outcome, Outcome::UnderWay)).await;
        match ended.as_deref() {
            Ok(Outcome::Durable) => Ok(()),
            Ok(Outcome::Failed(error)) => Err(error.clone()),
            Ok(Outcome::UnderWay) | Err(_) => Err(Error::Aborted("an upload".to_owned())),
        }
    }
}

/// What became of pieces that were stored.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    pub(crate) ids: Vec<ChunkId>,
    /// What has to become durable before anything may refer to them.
    pub(crate) batches: Vec<Arc<Batch>>,
    pub(crate) new_chunks: u64,
    pub(crate) new_bytes: u64,
}

/// Work on blocks for a batch. Whoever drops it unfinished has panicked: then the batch has failed.
struct Job<'a> {
    inner: &'a Arc<Inner>,
    batch: Arc<Batch>,
    finished: bool,
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.inner.settle(&self.batch, Outcome::Failed(Error::Aborted("packing".to_owned())));
        }
    }
}

impl Inner {
    /// Stores pieces: those that are new become part of a batch. Blocks; called on threads that may.
    /// `again`: also those that are known, so that they can be dropped where they lie now.
    pub(crate) fn store_pieces(self: &Arc<Self>, pieces: &[&[u8]], again: bool) -> Stored {
        let ids: Vec<ChunkId> = pieces.iter().map(|piece| self.cipher.chunk_id(piece)).collect();
        let (mut stored, fresh, batch) = self.claim(ids, again);
        let Some(batch) = batch else { return stored };
        let mut job = Job { inner: self, batch, finished: false };
        let (mut blocks, mut small) = (Vec::new(), BlockBuilder::default());
        for number in fresh {
            let (id, piece) = (stored.ids[number], pieces[number]);
            stored.new_chunks += 1;
            stored.new_bytes += piece.len() as u64;
            if piece.len() >= BLOCK {
                blocks.push(StoredBlock::encode(piece, vec![Member { id, len: len32(piece.len()) }], &self.cipher));
                continue;
            }
            small.push(id, piece);
            if small.is_full() {
                blocks.push(mem::take(&mut small).encode(&self.cipher));
            }
        }
        let full = {
            let mut filling = job.batch.filling();
            filling.add(blocks);
            filling.loose.append(small);
            filling.loose.is_full().then(|| mem::take(&mut filling.loose))
        };
        let more = full.map(|builder| builder.encode(&self.cipher));
        self.finish_job(&mut job, more);
        stored
    }

    /// Which of the pieces are new; these are the caller's to encode for the batch that comes with them.
    fn claim(&self, ids: Vec<ChunkId>, again: bool) -> (Stored, Vec<usize>, Option<Arc<Batch>>) {
        let mut state = self.state();
        let epoch = state.epoch;
        let (mut stored, mut fresh, mut own) = (Stored::default(), Vec::new(), None::<Arc<Batch>>);
        let depend = |stored: &mut Stored, batch: &Arc<Batch>| {
            if !stored.batches.iter().any(|known| Arc::ptr_eq(known, batch)) {
                stored.batches.push(batch.clone());
            }
        };
        for (number, id) in ids.iter().enumerate() {
            if !again && let Some(place) = state.index.chunks.get_mut(id) {
                place.touched = epoch;
                continue;
            }
            if let Some(batch) = state.pending.get(id) {
                depend(&mut stored, batch);
                continue;
            }
            let batch = own.get_or_insert_with(|| {
                let batch = state.open.get_or_insert_with(|| Arc::new(Batch::new())).clone();
                batch.filling().jobs += 1;
                batch
            });
            state.pending.insert(*id, batch.clone());
            batch.filling().claimed.push(*id);
            depend(&mut stored, batch);
            fresh.push(number);
        }
        stored.ids = ids;
        (stored, fresh, own)
    }

    fn finish_job(self: &Arc<Self>, job: &mut Job<'_>, block: Option<StoredBlock>) {
        let ready = {
            let mut state = self.state();
            let mut filling = job.batch.filling();
            filling.add(block.into_iter().collect());
            filling.jobs -= 1;
            job.finished = true;
            if filling.stored >= PACK || filling.claimed.len() >= PACK_CHUNKS {
                filling.closed = true;
                state.open.take_if(|open| Arc::ptr_eq(open, &job.batch));
            }
            filling.take_ready()
        };
        self.seal(&job.batch, ready);
    }

    /// Lets a batch take no more, so that it is stored soon. Blocks a little.
    pub(crate) fn close(self: &Arc<Self>, batch: &Arc<Batch>) {
        let ready = {
            let mut state = self.state();
            let mut filling = batch.filling();
            filling.closed = true;
            state.open.take_if(|open| Arc::ptr_eq(open, batch));
            filling.take_ready()
        };
        self.seal(batch, ready);
    }

    fn seal(self: &Arc<Self>, batch: &Arc<Batch>, ready: Option<(Vec<StoredBlock>, BlockBuilder)>) {
        let Some((mut blocks, loose)) = ready else { return };
        if !loose.is_empty() {
            blocks.push(loose.encode(&self.cipher));
        }
        let sealed = pack::seal(blocks, &self.cipher);
        self.uploads.send_modify(|count| *count += 1);
        let upload = Upload { inner: self.clone(), batch: batch.clone() };
        self.tasks.spawn_on(upload.run(sealed), &self.runtime);
    }

    /// Tells everybody how a batch ended, and forgets what was pending on it.
    fn settle(&self, batch: &Arc<Batch>, outcome: Outcome) {
        {
            let mut state = self.state();
            state.open.take_if(|open| Arc::ptr_eq(open, batch));
            let claimed = mem::take(&mut batch.filling().claimed);
            for id in claimed {
                if state.pending.get(&id).is_some_and(|pending| Arc::ptr_eq(pending, batch)) {
                    state.pending.remove(&id);
                }
            }
        }
        batch.outcome.send_if_modified(|now| {
            let first = matches!(now, Outcome::UnderWay);
            if first {
                *now = outcome;
            }
            first
        });
    }

    /// Waits until there is room for more packs.
    pub(crate) async fn room(&self) {
        // The sender lives in `self`, so this can't fail.
        let _ = self.uploads.subscribe().wait_for(|count| *count < MAX_UPLOADS).await;
    }

    async fn put_pack(&self, sealed: &Sealed) -> Result<(), Error> {
        faults::point("blob.pack.put");
        let path = sealed.id.path();
        let payload: PutPayload = sealed.parts.iter().cloned().collect();
        let created = self.store.create(&path, payload.clone()).await?;
        // By its name it is the same, unless it was damaged since.
        if created == Created::WasThere && self.store.size(&path).await? != Some(sealed.size) {
            self.store.replace(&path, payload).await?;
        }
        faults::point("blob.pack.stored");
        Ok(())
    }
}

/// One pack on its way. Dropped before it has ended, it has failed.
struct Upload {
    inner: Arc<Inner>,
    batch: Arc<Batch>,
}

impl Upload {
    async fn run(self, sealed: Sealed) {
        let uploading = self.inner.removing.read().await;
        let stored = self.inner.put_pack(&sealed).await;
        let outcome = match stored {
            Ok(()) => {
                let mut state = self.inner.state();
                let State { index, epoch, unlisted, .. } = &mut *state;
                index.add(sealed.id, sealed.size, &sealed.trailer, self.inner.cipher.is_keyed(), *epoch, true);
                unlisted.push((sealed.id, sealed.size, sealed.trailer));
                Outcome::Durable
            }
            Err(error) => Outcome::Failed(error),
        };
        drop(uploading);
        self.inner.settle(&self.batch, outcome);
        let many = self.inner.state().unlisted.len() >= INDEX_EVERY;
        let inner = self.inner.clone();
        drop(self);
        if many && let Err(error) = inner.flush_index().await {
            // The packs tell the same; the next one tries again.
            tracing::warn!(store = inner.store.name(), %error, "the index was not written");
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.inner.settle(&self.batch, Outcome::Failed(Error::Aborted("an upload".to_owned())));
        self.inner.uploads.send_modify(|count| *count -= 1);
    }
}
