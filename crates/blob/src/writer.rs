//! Writing: chunks and whole streams into a repository.

use crate::{
    batch::{Batch, Outcome, Stored},
    block::MAX_CHUNK,
    chunking::{Chunking, Cutter, Segment, is_zero},
    error::Error,
    id::ChunkId,
    manifest::check_name,
    repository::{Inner, Repository},
    stream::{Entry, ListBuilder, StreamRef},
};
use bytes::Bytes;
use futures_util::{StreamExt, stream::FuturesOrdered};
use std::{
    io::Read,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    task::JoinHandle,
};

/// List nodes are stored when there are so many.
const NODES_AT_ONCE: usize = 256;
/// Room for a stream before it is known to be longer.
const FIRST: usize = 64 << 10;

/// What a writer has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// All chunks that were given, and their bytes. Zeros in streams are no chunks.
    pub chunks: u64,
    pub bytes: u64,
    /// Those that the repository didn't have.
    pub new_chunks: u64,
    pub new_bytes: u64,
}

/// Writes into a repository. As long as it lives, no collection removes what it wrote or found there already: keep it until
/// the manifest is stored. Dropped without [`Writer::finish`], what it wrote is garbage that the next collection removes.
#[derive(Debug)]
pub struct Writer {
    repository: Repository,
    work: Arc<Work>,
}

/// What the jobs of a writer share.
struct Work {
    inner: Arc<Inner>,
    number: u64,
    /// The packs under way that it depends on.
    batches: Mutex<Vec<Arc<Batch>>>,
    chunks: AtomicU64,
    bytes: AtomicU64,
    new_chunks: AtomicU64,
    new_bytes: AtomicU64,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "writer {}", self.number)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.inner.state().writers.remove(&self.number);
    }
}

impl Repository {
    /// Begins to write.
    ///
    /// # Errors
    /// [`Error::ReadOnly`].
    pub fn writer(&self) -> Result<Writer, Error> {
        self.inner.must_write()?;
        let number = {
            let mut state = self.inner.state();
            state.epoch.0 += 1;
            let (number, epoch) = (state.next_writer, state.epoch);
            state.next_writer += 1;
            state.writers.insert(number, epoch);
            number
        };
        let work = Work {
            inner: self.inner.clone(),
            number,
            batches: Mutex::default(),
            chunks: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            new_chunks: AtomicU64::new(0),
            new_bytes: AtomicU64::new(0),
        };
        Ok(Writer { repository: self.clone(), work: Arc::new(work) })
    }
}

impl Work {
    /// Stores pieces. Blocks.
    fn store(&self, pieces: &[&[u8]]) -> Vec<ChunkId> {
        let stored = self.inner.store_pieces(pieces, false);
        self.count(pieces, &stored);
        let mut batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
        batches.retain(|batch| !matches!(batch.outcome(), Outcome::Durable));
        for batch in stored.batches {
            if !batches.iter().any(|known| Arc::ptr_eq(known, &batch)) {
                batches.push(batch);
            }
        }
        stored.ids
    }

    fn count(&self, pieces: &[&[u8]], stored: &Stored) {
        self.chunks.fetch_add(pieces.len() as u64, Ordering::Relaxed);
        self.bytes.fetch_add(pieces.iter().map(|piece| piece.len() as u64).sum(), Ordering::Relaxed);
        self.new_chunks.fetch_add(stored.new_chunks, Ordering::Relaxed);
        self.new_bytes.fetch_add(stored.new_bytes, Ordering::Relaxed);
    }

    /// Stores a segment of a stream; zeros in it are left out. Blocks.
    fn store_segment(&self, segment: &Segment) -> Vec<Entry> {
        let pieces = segment.pieces();
        let zeros: Vec<bool> = pieces.iter().map(|piece| is_zero(piece)).collect();
        let real: Vec<&[u8]> = pieces.iter().zip(&zeros).filter(|(_, zero)| !**zero).map(|(piece, _)| *piece).collect();
        let mut ids = if real.is_empty() { Vec::new() } else { self.store(&real) }.into_iter();
        let entries = pieces.iter().zip(zeros).map(|(piece, zero)| {
            let len = piece.len() as u64;
            match if zero { None } else { ids.next() } {
                Some(id) => Entry::Chunk { id, len },
                None => Entry::Zeros { len },
            }
        });
        entries.collect()
    }

    fn batches(&self) -> Vec<Arc<Batch>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Fails where something that was written is lost already.
    fn check(&self) -> Result<(), Error> {
        let failed = self.batches().iter().find_map(|batch| match batch.outcome() {
            Outcome::Failed(error) => Some(error),
            Outcome::UnderWay | Outcome::Durable => None,
        });
        failed.map_or(Ok(()), Err)
    }
}

/// What of a stream was read and isn't cut yet.
#[derive(Debug, Default)]
struct Feed {
    buffer: Vec<u8>,
    is_end: bool,
}

/// How much is to be read before the next cut; short streams are known to be short before much room is made for them.
fn steps(cutter: Cutter) -> [usize; 2] {
    [FIRST.min(cutter.window()), cutter.window()]
}

impl Feed {
    /// How much more is wanted of a buffer that is to hold `size`.
    fn wanted(&mut self, size: usize) -> usize {
        let wanted = size.saturating_sub(self.buffer.len());
        self.buffer.reserve_exact(wanted);
        wanted
    }

    /// Reads on and takes what can be cut. Blocks.
    fn read(&mut self, reader: &mut dyn Read, cutter: Cutter) -> std::io::Result<Vec<Segment>> {
        for size in steps(cutter) {
            if self.is_end {
                break;
            }
            let wanted = self.wanted(size);
            if wanted > 0 {
                reader.take(wanted as u64).read_to_end(&mut self.buffer)?;
                self.is_end = self.buffer.len() < size;
            }
        }
        Ok(cutter.cut(&mut self.buffer, self.is_end))
    }

    /// The same of one that doesn't block.
    async fn read_async(&mut self, reader: &mut (dyn AsyncRead + Unpin + Send), cutter: Cutter) -> std::io::Result<Vec<Segment>> {
        for size in steps(cutter) {
            if self.is_end {
                break;
            }
            let wanted = self.wanted(size);
            if wanted > 0 {
                (&mut *reader).take(wanted as u64).read_to_end(&mut self.buffer).await?;
                self.is_end = self.buffer.len() < size;
            }
        }
        Ok(cutter.cut(&mut self.buffer, self.is_end))
    }
}

fn unreadable(error: std::io::Error) -> Error {
    Error::io("can't read what is to be stored", error)
}

fn aborted(error: tokio::task::JoinError) -> Error {
    Error::Aborted(format!("a task of the repository ({error})"))
}

/// A stream on its way into the repository.
struct Pouring<'a> {
    writer: &'a Writer,
    list: ListBuilder,
    jobs: Jobs,
}

impl<'a> Pouring<'a> {
    fn new(writer: &'a Writer) -> Pouring<'a> {
        Pouring { writer, list: ListBuilder::default(), jobs: Jobs::new() }
    }

    async fn push(&mut self, segments: Vec<Segment>) -> Result<(), Error> {
        let cipher = &self.writer.repository.inner.cipher;
        for segment in segments {
            self.jobs.push_back(self.writer.spawn(move |work| work.store_segment(&segment)).await?);
            while self.jobs.len() > crate::repository::threads() + 1 {
                next(&mut self.jobs, &mut self.list, cipher).await?;
            }
        }
        if self.list.nodes.len() >= NODES_AT_ONCE {
            self.writer.store_nodes(std::mem::take(&mut self.list.nodes)).await?;
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<StreamRef, Error> {
        let cipher = &self.writer.repository.inner.cipher;
        while !self.jobs.is_empty() {
            next(&mut self.jobs, &mut self.list, cipher).await?;
        }
        let (stream, nodes) = self.list.finish(cipher);
        if !nodes.is_empty() {
            self.writer.store_nodes(nodes).await?;
        }
        Ok(stream)
    }
}

impl Writer {
    /// Runs `job` on a thread that may block, as soon as one is free and there is room for what it makes.
    async fn spawn<T: Send + 'static>(&self, job: impl FnOnce(&Work) -> T + Send + 'static) -> Result<JoinHandle<T>, Error> {
        let inner = &self.repository.inner;
        tokio::select! {
            biased;
            () = inner.store.cancel().cancelled() => return Err(Error::Cancelled),
            () = inner.room() => {}
        }
        self.work.check()?;
        let slot = inner.slots.clone().acquire_owned().await.map_err(|e| Error::Aborted(e.to_string()))?;
        let work = self.work.clone();
        Ok(tokio::task::spawn_blocking(move || {
            let done = job(&work);
            drop(slot);
            done
        }))
    }

    /// Adds one chunk, unless it is there already.
    ///
    /// # Errors
    /// [`Error::TooLarge`] over 8 MiB; what went wrong with earlier uploads.
    pub async fn add(&self, bytes: impl Into<Bytes>) -> Result<ChunkId, Error> {
        let ids = self.add_all(vec![bytes.into()]).await?;
        ids.into_iter().next().ok_or_else(|| Error::Aborted("packing".to_owned()))
    }

    /// Adds many chunks, such as small files: one call for some hundreds of them costs less than one for each.
    ///
    /// # Errors
    /// As [`Writer::add`].
    pub async fn add_all(&self, chunks: Vec<Bytes>) -> Result<Vec<ChunkId>, Error> {
        if let Some(chunk) = chunks.iter().find(|chunk| chunk.len() > MAX_CHUNK) {
            let bytes = chunk.len() as u64;
            return Err(Error::TooLarge { what: "a chunk".to_owned(), bytes, limit: MAX_CHUNK as u64 });
        }
        let job = self.spawn(move |work| work.store(&chunks.iter().map(|chunk| &chunk[..]).collect::<Vec<_>>()));
        job.await?.await.map_err(aborted)
    }

    /// Stores everything that `reader` gives.
    ///
    /// # Errors
    /// [`Error::Io`] of the reader; what went wrong with earlier uploads.
    pub async fn write_stream(&self, mut reader: impl AsyncRead + Unpin + Send, chunking: Chunking) -> Result<StreamRef, Error> {
        let (cutter, mut feed, mut pouring) = (Cutter::new(chunking), Feed::default(), Pouring::new(self));
        while !feed.is_end {
            let segments = feed.read_async(&mut reader, cutter).await.map_err(unreadable)?;
            pouring.push(segments).await?;
        }
        pouring.finish().await
    }

    /// The same for a reader that blocks, such as a file. It is read and cut ahead while what came before is stored.
    ///
    /// # Errors
    /// As [`Writer::write_stream`].
    pub async fn write_file(&self, reader: impl Read + Send + 'static, chunking: Chunking) -> Result<StreamRef, Error> {
        let (cutter, mut pouring) = (Cutter::new(chunking), Pouring::new(self));
        let read = move |mut reader: Box<dyn Read + Send>, mut feed: Feed| {
            tokio::task::spawn_blocking(move || {
                let segments = feed.read(&mut *reader, cutter);
                (reader, feed, segments)
            })
        };
        let mut reading = read(Box::new(reader), Feed::default());
        loop {
            let (reader, feed, segments) = reading.await.map_err(aborted)?;
            let segments = segments.map_err(unreadable)?;
            if feed.is_end {
                pouring.push(segments).await?;
                return pouring.finish().await;
            }
            reading = read(reader, feed);
            pouring.push(segments).await?;
        }
    }

    async fn store_nodes(&self, nodes: Vec<Bytes>) -> Result<(), Error> {
        self.add_all(nodes).await.map(drop)
    }

    /// Waits until everything that was written is in the store for good. More may be written after it.
    ///
    /// # Errors
    /// What went wrong with an upload. Then write again with a new writer: what arrived is found there.
    pub async fn finish(&self) -> Result<Written, Error> {
        let batches = self.work.batches();
        let closing = batches.clone();
        let inner = self.repository.inner.clone();
        let closed = tokio::task::spawn_blocking(move || closing.iter().for_each(|batch| inner.close(batch)));
        closed.await.map_err(aborted)?;
        for batch in &batches {
            batch.wait().await?;
        }
        self.repository.inner.flush_index().await?;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Ok(Written {
            chunks: count(&self.work.chunks),
            bytes: count(&self.work.bytes),
            new_chunks: count(&self.work.new_chunks),
            new_bytes: count(&self.work.new_bytes),
        })
    }

    /// [`Writer::finish`], then the manifest that refers to what was written, and only then gives up its protection.
    ///
    /// # Errors
    /// As [`Writer::finish`] and [`Repository::put_manifest`].
    pub async fn commit(self, name: &str, manifest: &[u8]) -> Result<Written, Error> {
        check_name(name)?;
        let written = self.finish().await?;
        self.repository.put_manifest(name, manifest).await?;
        Ok(written)
    }
}

type Jobs = FuturesOrdered<JoinHandle<Vec<Entry>>>;

async fn next(jobs: &mut Jobs, list: &mut ListBuilder, cipher: &crate::crypto::Cipher) -> Result<(), Error> {
    if let Some(entries) = jobs.next().await {
        for entry in entries.map_err(aborted)? {
            list.push(entry, cipher);
        }
    }
    Ok(())
}
