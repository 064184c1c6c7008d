//! From time to offset: which part of a journal was written since ten minutes ago?
//!
//! The file `index` beside the segments holds entries of 16 bytes, big-endian: an `i64` of
//! milliseconds since the epoch and a `u64` offset. An entry says: *at this time the journal was this
//! long.* Bytes before the offset were written at that time or earlier, bytes from it on at that time or
//! later. Both columns never fall; a clock that steps back is held at the last time it showed.
//!
//! The index is a help, not a truth: it isn't flushed, it may lack entries anywhere, and every answer
//! stays right (only less exact) without them.

use crate::layout::INDEX_NAME;
use model::{Offset, Timestamp};
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

const ENTRY: u64 = 16;
const INTERVAL_MS: i64 = 200;
/// After each so many entries the interval doubles, which ends the growth of the file at about 16 MiB.
const DOUBLE_EVERY: u64 = 1 << 17;

/// How far apart in time entry number `count` must be from the one before it.
fn interval_ms(count: u64) -> i64 {
    INTERVAL_MS << (count / DOUBLE_EVERY).min(32)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    at: i64,
    offset: u64,
}

impl Entry {
    fn encode(self) -> [u8; ENTRY as usize] {
        ((self.at as u64 as u128) << 64 | u128::from(self.offset)).to_be_bytes()
    }

    fn decode(raw: [u8; ENTRY as usize]) -> Entry {
        let both = u128::from_be_bytes(raw);
        Entry { at: (both >> 64) as u64 as i64, offset: both as u64 }
    }

    fn read(file: &File, number: u64) -> io::Result<Entry> {
        let mut raw = [0; ENTRY as usize];
        file.read_exact_at(&mut raw, number * ENTRY)?;
        Ok(Entry::decode(raw))
    }
}

/// The writing half, owned by the journal's writer.
#[derive(Debug)]
pub(crate) struct IndexWriter {
    path: PathBuf,
    file: Option<File>,
    count: u64,
    last: Option<Entry>,
    /// The latest append: when it was, and where the journal ended after it.
    seen: Option<Entry>,
    /// Whether the last write failed, so that a full disk is logged once.
    failing: bool,
}

impl IndexWriter {
    /// Goes on with an index, without its torn last entry and without entries for bytes past `tail`
    /// or out of order, which a power loss can leave.
    pub(crate) fn open(dir: &Path, tail: u64) -> io::Result<IndexWriter> {
        let path = dir.join(INDEX_NAME);
        let mut index = IndexWriter { path, file: None, count: 0, last: None, seen: None, failing: false };
        let file = match OpenOptions::new().read(true).write(true).open(&index.path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(index),
            Err(e) => return Err(e),
        };
        let len = file.metadata()?.len();
        let mut count = len / ENTRY;
        while count > 0 {
            let entry = Entry::read(&file, count - 1)?;
            let before = if count > 1 { Some(Entry::read(&file, count - 2)?) } else { None };
            if entry.offset <= tail && before.is_none_or(|b| b != entry && b.at <= entry.at && b.offset <= entry.offset) {
                index.last = Some(entry);
                break;
            }
            count -= 1;
        }
        if len != count * ENTRY {
            file.set_len(count * ENTRY)?;
        }
        index.file = Some(file);
        index.count = count;
        Ok(index)
    }

    /// Bytes from `before` to `after` were appended at `at`.
    pub(crate) fn note(&mut self, before: u64, after: u64, at: Timestamp) {
        let at = [self.last, self.seen].into_iter().flatten().fold(at.0, |at, e| at.max(e.at));
        let interval = interval_ms(self.count);
        match self.last {
            Some(last) if at.saturating_sub(last.at) < interval => {}
            _ => {
                // After a silence, what came before it ends where it began: else the end of the old
                // output would count as new.
                if self.seen.is_some_and(|s| at.saturating_sub(s.at) >= interval) {
                    self.close();
                }
                self.push(Entry { at, offset: before });
            }
        }
        self.seen = Some(Entry { at, offset: after });
    }

    /// Records when the latest bytes came, so that a later question finds them to be old. A journal
    /// with very many entries does so at its interval only, to stay bounded.
    pub(crate) fn close(&mut self) {
        let Some(seen) = self.seen else { return };
        let new = self.last.is_none_or(|last| last.offset < seen.offset);
        let sparse = self.count < DOUBLE_EVERY || self.last.is_none_or(|l| seen.at - l.at >= interval_ms(self.count));
        if new && sparse {
            self.push(seen);
        }
    }

    fn push(&mut self, entry: Entry) {
        match self.write(entry) {
            Ok(()) => {
                self.count += 1;
                self.last = Some(entry);
                self.failing = false;
            }
            // The bytes are safe without it, and a torn entry is overwritten by the next.
            Err(error) if !self.failing => {
                tracing::warn!(path = %self.path.display(), %error, "can't write the time index of a journal");
                self.failing = true;
            }
            Err(_) => {}
        }
    }

    fn write(&mut self, entry: Entry) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let mut options = OpenOptions::new();
                options.read(true).write(true).create(true).truncate(true).mode(0o600);
                none.insert(options.open(&self.path)?)
            }
        };
        file.write_all_at(&entry.encode(), self.count * ENTRY)
    }
}

/// Why the index couldn't be asked.
#[derive(Debug, thiserror::Error)]
#[error("can't read the time index {path}: {source}")]
pub struct IndexError {
    /// The index.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// The reading half: answers for a journal that is perhaps being written.
#[derive(Debug)]
pub struct TimeIndex {
    path: PathBuf,
}

impl TimeIndex {
    /// The index of the journal in `dir`; a missing one knows nothing, which is no error.
    pub fn open(dir: impl AsRef<Path>) -> TimeIndex {
        TimeIndex { path: dir.as_ref().join(INDEX_NAME) }
    }

    /// From where to read so as to miss nothing that was written at `at` or later. May be earlier than
    /// the first such byte (by at most what was written in one interval, 200 ms at first), never later.
    ///
    /// # Errors
    /// When the index exists and can't be read.
    pub fn offset_at(&self, at: Timestamp) -> Result<Offset, IndexError> {
        // An entry of the very same millisecond doesn't count: bytes before its offset may be as young.
        let found = self.last_where(|e| e.at < at.0)?;
        Ok(found.map_or(Offset::ZERO, |e| Offset(e.offset)))
    }

    /// When the byte at `offset` was written, at the earliest; `None` before the first timed byte.
    ///
    /// # Errors
    /// When the index exists and can't be read.
    pub fn time_of(&self, offset: Offset) -> Result<Option<Timestamp>, IndexError> {
        Ok(self.last_where(|e| e.offset <= offset.0)?.map(|e| Timestamp(e.at)))
    }

    /// The last entry for which `holds` is true; it must be true for a first part and false after it.
    fn last_where(&self, holds: impl Fn(Entry) -> bool) -> Result<Option<Entry>, IndexError> {
        self.search(holds).map_err(|source| IndexError { path: self.path.clone(), source })
    }

    fn search(&self, holds: impl Fn(Entry) -> bool) -> io::Result<Option<Entry>> {
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let (mut low, mut high) = (0, file.metadata()?.len() / ENTRY);
        let mut found = None;
        while low < high {
            let middle = low + (high - low) / 2;
            match Entry::read(&file, middle) {
                Ok(entry) if holds(entry) => {
                    found = Some(entry);
                    low = middle + 1;
                }
                Ok(_) => high = middle,
                // A writer that recovers cuts a bad end off while we look.
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => high = middle,
                Err(e) => return Err(e),
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests;
