//! What the supervisor writes down for the server: see [`wire::facts`].

use journal::{LineWriter, Retention};
use model::{Generation, Offset, Timestamp};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use wire::facts::{Fact, FactLine};

/// The time now, as records carry it.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// Appends facts, keeping those that the disk has no room for until it has.
pub struct FactLog {
    writer: LineWriter,
    generation: Generation,
    waiting: std::collections::VecDeque<Vec<u8>>,
    tail: watch::Sender<crate::journals::Tail>,
}

impl FactLog {
    /// Opens the facts journal in `dir`.
    ///
    /// # Errors
    /// It can't be read or another process writes there.
    pub fn open(dir: std::path::PathBuf, generation: Generation) -> Result<FactLog, journal::OpenError> {
        // Facts are never dropped by age: the server reads them all.
        let keep_all = Retention { tail_bytes: u64::MAX, ..Retention::default() };
        let writer = LineWriter::open(dir, keep_all)?;
        let (tail, _) = watch::channel(crate::journals::Tail { offset: writer.tail(), ended: false });
        Ok(FactLog { writer, generation, waiting: Default::default(), tail })
    }

    /// From here on facts belong to `generation`.
    pub fn set_generation(&mut self, generation: Generation) {
        self.generation = generation;
    }

    /// Writes a fact down.
    pub fn record(&mut self, fact: Fact) {
        let line = FactLine { at: now(), generation: self.generation, fact };
        match serde_json::to_vec(&line) {
            Ok(line) => self.waiting.push_back(line),
            Err(error) => tracing::error!(%error, "a fact has no JSON"),
        }
        self.flush();
    }

    /// Writes what waited for room.
    pub fn flush(&mut self) {
        while let Some(line) = self.waiting.front() {
            if let Err(error) = self.writer.append(line) {
                tracing::warn!(%error, waiting = self.waiting.len(), "facts wait for the disk");
                break;
            }
            self.waiting.pop_front();
        }
        let offset: Offset = self.writer.tail();
        self.tail.send_if_modified(|tail| std::mem::replace(&mut tail.offset, offset) != offset);
    }

    /// How many facts wait for room.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Follows the tail.
    pub fn watch(&self) -> watch::Receiver<crate::journals::Tail> {
        self.tail.subscribe()
    }

    /// Nothing more will be written.
    pub fn end(&mut self) {
        self.tail.send_modify(|tail| tail.ended = true);
    }

    /// For syncing elsewhere.
    pub fn take_unsynced(&mut self) -> Option<journal::Unsynced> {
        self.writer.take_unsynced()
    }

    /// Gives back what could not be synced.
    pub fn put_back(&mut self, work: journal::Unsynced) {
        self.writer.put_back(work);
    }

    /// Syncs now, waiting for the disk.
    ///
    /// # Errors
    /// The disk refuses, or facts still wait for room.
    pub fn sync(&mut self) -> Result<(), String> {
        self.flush();
        if !self.waiting.is_empty() {
            return Err(format!("{} facts wait for room on the disk", self.waiting.len()));
        }
        self.writer.sync().map_err(|error| error.to_string())
    }
}
