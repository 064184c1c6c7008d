//! Reading a journal by offset, also while it is written and while old segments vanish.
//!
//! How a reader stays right without a lock: whatever says "no bytes here" is believed only when two
//! listings of the directory in a row say the same. A single listing that runs while segments appear
//! can show a later one and miss an earlier one; the second begins after the later one was there, and so
//! sees both. And the length of a segment is taken after the listing that shows its successor, when
//! it no longer grows.

use crate::layout::{self, segment_path};
use model::Offset;
use rustix::{buffer::spare_capacity, io::pread};
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// How often a reader looks again when the journal changes under it.
const ATTEMPTS: usize = 1000;

/// What a journal holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The first byte that can be read; there may be gaps after it.
    pub first: Offset,
    /// Where the next byte will be appended.
    pub tail: Offset,
}

/// An answer to a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    /// Bytes; never empty. Go on behind them.
    Data {
        /// Where the first of the bytes stands: the asked offset.
        offset: Offset,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// These bytes are gone, or never were. Go on at `to`.
    Gap {
        /// The first missing byte: the asked offset.
        from: Offset,
        /// The first byte after the gap.
        to: Offset,
    },
    /// The asked offset is the tail: there is nothing yet.
    End,
}

/// Why nothing could be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The journal doesn't reach there (any more: a power loss can take bytes that were not flushed).
    #[error("offset {from} lies beyond the end of the journal, {tail}")]
    BeyondTail {
        /// The asked offset.
        from: Offset,
        /// Where the journal ends.
        tail: Offset,
    },
    /// The journal changed at every look. Reading again is safe.
    #[error("the journal {0} changes faster than it can be read; try again")]
    Unsettled(PathBuf),
    /// The system refused.
    #[error("can't read {path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

fn io_error(path: &Path, source: io::Error) -> ReadError {
    ReadError::Io { path: path.to_owned(), source }
}

/// An open segment.
#[derive(Debug)]
struct Segment {
    start: u64,
    /// Where the next segment begins, when there was one at the last look.
    limit: u64,
    file: File,
}

impl Segment {
    fn end(&self) -> io::Result<u64> {
        Ok(self.start.saturating_add(self.file.metadata()?.len()).min(self.limit))
    }

    /// Up to `max` bytes from `from` on; empty when the segment doesn't hold that byte.
    fn read(&self, from: u64, max: usize) -> io::Result<Vec<u8>> {
        let Some(position) = from.checked_sub(self.start) else { return Ok(Vec::new()) };
        // The length first: else a few new bytes would be returned in a buffer of `max`.
        let there = usize::try_from(self.end()?.saturating_sub(from)).unwrap_or(usize::MAX);
        let wanted = there.min(max.max(1));
        if wanted == 0 {
            return Ok(Vec::new());
        }
        let mut bytes = Vec::with_capacity(wanted);
        loop {
            match pread(&self.file, spare_capacity(&mut bytes), position) {
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
                Ok(_) => {
                    // The allocator may have given more room than was asked for.
                    bytes.truncate(wanted);
                    return Ok(bytes);
                }
            }
        }
    }
}

/// Where an offset was found to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In the segment that is open now.
    Here,
    Gap {
        to: u64,
    },
    End,
    Beyond {
        tail: u64,
    },
    /// A file that was listed is gone: look again.
    Moved,
}

/// Reads one journal; opens no file for longer than it needs it, except the segment it read last.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    current: Option<Segment>,
}

impl Reader {
    /// A reader for the journal in `dir`. A directory that doesn't exist (yet) is an empty journal.
    pub fn open(dir: impl Into<PathBuf>) -> Reader {
        Reader { dir: dir.into(), current: None }
    }

    /// What there is to read now. An empty journal has both ends at its tail.
    ///
    /// # Errors
    /// Refusals by the system.
    pub fn range(&self) -> Result<Range, ReadError> {
        let mut before = None;
        for _ in 0..ATTEMPTS {
            let starts = layout::list(&self.dir).map_err(|e| io_error(&self.dir, e))?;
            let (Some(&first), Some(&last)) = (starts.first(), starts.last()) else {
                return Ok(Range { first: Offset::ZERO, tail: Offset::ZERO });
            };
            // The last segment is only ever deleted after a later one was made.
            let Some(len) = self.len_of(last)? else { continue };
            let ends = (first, last);
            if before.replace(ends) == Some(ends) {
                return Ok(Range { first: Offset(first), tail: Offset(last.saturating_add(len)) });
            }
        }
        Err(ReadError::Unsettled(self.dir.clone()))
    }

    /// Reads up to `max` bytes (at least 1) from `from` on, from one segment: less than `max` doesn't
    /// mean that there is no more.
    ///
    /// # Errors
    /// An offset beyond the tail, and refusals by the system.
    pub fn read(&mut self, from: Offset, max: usize) -> Result<Chunk, ReadError> {
        let at = from.0;
        let mut before = None;
        for attempt in 0..ATTEMPTS {
            let place = if attempt == 0 { Place::Here } else { self.locate(at)? };
            if place == Place::Here
                && let Some(segment) = &self.current
            {
                let bytes = segment.read(at, max).map_err(|e| io_error(&segment_path(&self.dir, segment.start), e))?;
                if !bytes.is_empty() {
                    return Ok(Chunk::Data { offset: from, bytes });
                }
            }
            if before.replace(place) != Some(place) {
                continue;
            }
            match place {
                Place::Gap { to } => return Ok(Chunk::Gap { from, to: Offset(to) }),
                Place::End => return Ok(Chunk::End),
                Place::Beyond { tail } => return Err(ReadError::BeyondTail { from, tail: Offset(tail) }),
                Place::Here | Place::Moved => {}
            }
        }
        Err(ReadError::Unsettled(self.dir.clone()))
    }

    /// Looks the offset up in a fresh listing, and opens the segment that holds it.
    fn locate(&mut self, from: u64) -> Result<Place, ReadError> {
        let starts = layout::list(&self.dir).map_err(|e| io_error(&self.dir, e))?;
        let later = starts.partition_point(|&start| start <= from);
        let mut tail = 0;
        if let Some(&start) = later.checked_sub(1).and_then(|i| starts.get(i)) {
            let limit = starts.get(later).copied().unwrap_or(u64::MAX);
            let Some(segment) = self.open_segment(start, limit)? else { return Ok(Place::Moved) };
            tail = segment.end().map_err(|e| io_error(&segment_path(&self.dir, start), e))?;
            let here = from < tail;
            self.current = Some(segment);
            if here {
                return Ok(Place::Here);
            }
        }
        let Some((&last, between)) = starts[later..].split_last() else {
            return Ok(if from == tail { Place::End } else { Place::Beyond { tail } });
        };
        // The gap reaches over empty segments; the last one ends it in any case.
        for &start in between {
            match self.len_of(start)? {
                None => return Ok(Place::Moved),
                Some(0) => {}
                Some(_) => return Ok(Place::Gap { to: start }),
            }
        }
        Ok(Place::Gap { to: last })
    }

    /// The segment, from the one that is open already where it is the same; `None` when it is gone.
    fn open_segment(&mut self, start: u64, limit: u64) -> Result<Option<Segment>, ReadError> {
        if let Some(open) = self.current.take_if(|s| s.start == start) {
            return Ok(Some(Segment { limit, ..open }));
        }
        let path = segment_path(&self.dir, start);
        match File::open(&path) {
            Ok(file) => Ok(Some(Segment { start, limit, file })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io_error(&path, e)),
        }
    }

    /// The length of a segment; `None` when it is gone.
    fn len_of(&self, start: u64) -> Result<Option<u64>, ReadError> {
        let path = segment_path(&self.dir, start);
        match fs::metadata(&path) {
            Ok(data) => Ok(Some(data.len())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io_error(&path, e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_segment_wins_where_two_overlap() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(segment_path(dir.path(), 0), b"0123456789").unwrap();
        fs::write(segment_path(dir.path(), 5), b"abc").unwrap();
        fs::write(dir.path().join("note.txt"), b"not a segment").unwrap();
        let mut reader = Reader::open(dir.path());
        assert_eq!(reader.range().unwrap(), Range { first: Offset(0), tail: Offset(8) });
        for (from, want) in [(0, &b"01234"[..]), (4, b"4"), (5, b"abc"), (7, b"c")] {
            assert_eq!(
                reader.read(Offset(from), 100).unwrap(),
                Chunk::Data { offset: Offset(from), bytes: want.to_vec() },
                "from {from}"
            );
        }
    }
}
