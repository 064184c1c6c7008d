//! Records in a journal: one to a line, whole or not there at all.
//!
//! A line that a crash or a full disk has cut off is never delivered: the next line is written behind a
//! gap of one byte, and begins with a newline. A reader drops the rest of a line after every gap, since
//! it can't know whether the gap ended at a line's beginning.

use crate::{
    reader::{Chunk, ReadError, Reader},
    retention::Retention,
    unsynced::{SyncError, Unsynced},
    writer::{AppendError, OpenError, SkipError, Writer},
};
use model::Offset;

/// The longest line, in bytes, without its newline.
pub const MAX_LINE: usize = 1 << 20;
const READ: usize = 64 << 10;

/// Why a line wasn't appended. A line that failed is never delivered to readers; append it again.
#[derive(Debug, thiserror::Error)]
pub enum LineAppendError {
    /// Longer than [`MAX_LINE`].
    #[error("a line of {0} bytes is longer than the limit of {MAX_LINE}")]
    TooLong(usize),
    /// Empty, or with a newline in it.
    #[error("a line must have bytes and no newline in it")]
    NotALine,
    /// The journal didn't take it.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// The end of an earlier, cut line couldn't be marked.
    #[error(transparent)]
    Skip(#[from] SkipError),
}

/// Why a journal of lines couldn't be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum LineReadError {
    /// No newline within [`MAX_LINE`] bytes: this isn't a journal of lines, or it is damaged.
    #[error("the line at offset {at} is longer than the limit of {MAX_LINE} bytes")]
    TooLong {
        /// Where it begins.
        at: Offset,
    },
    /// The journal couldn't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// Appends lines to a journal.
#[derive(Debug)]
pub struct LineWriter {
    writer: Writer,
    /// The tail may not be the beginning of a line.
    cut: bool,
}

impl LineWriter {
    /// Opens the journal in `dir`, whatever state its last line is in.
    ///
    /// # Errors
    /// As [`Writer::open`].
    pub fn open(dir: impl Into<std::path::PathBuf>, retention: Retention) -> Result<LineWriter, OpenError> {
        let writer = Writer::open(dir, retention)?;
        let tail = writer.tail();
        let last = tail.0.checked_sub(1).map(|last| Reader::open(writer.dir()).read(Offset(last), 1));
        // Unreadable, gone or anything but a newline: begin anew behind it, which is always right.
        let cut = last.is_some_and(|read| !matches!(read, Ok(Chunk::Data { bytes, .. }) if bytes == b"\n"));
        Ok(LineWriter { writer, cut })
    }

    /// Appends one line and returns where it begins.
    ///
    /// # Errors
    /// What isn't a line, and what the journal refuses.
    pub fn append(&mut self, line: &[u8]) -> Result<Offset, LineAppendError> {
        if line.len() > MAX_LINE {
            return Err(LineAppendError::TooLong(line.len()));
        }
        if line.is_empty() || line.contains(&b'\n') {
            return Err(LineAppendError::NotALine);
        }
        let mut record = Vec::with_capacity(line.len() + 2);
        if self.cut {
            self.writer.skip_to(self.writer.tail().plus(1))?;
            record.push(b'\n');
        }
        let start = self.writer.tail().plus(record.len());
        record.extend_from_slice(line);
        record.push(b'\n');
        let result = self.writer.append(&record);
        self.cut = match &result {
            Ok(_) => false,
            Err(error) => self.cut || error.accepted() > 0,
        };
        result?;
        Ok(start)
    }

    /// Where the next line goes.
    pub fn tail(&self) -> Offset {
        self.writer.tail()
    }

    /// As [`Writer::sync`].
    ///
    /// # Errors
    /// The disk refused.
    pub fn sync(&mut self) -> Result<(), SyncError> {
        self.writer.sync()
    }

    /// As [`Writer::take_unsynced`].
    pub fn take_unsynced(&mut self) -> Option<Unsynced> {
        self.writer.take_unsynced()
    }

    /// As [`Writer::put_back`].
    pub fn put_back(&mut self, work: Unsynced) {
        self.writer.put_back(work);
    }

    /// As [`Writer::is_dirty`].
    pub fn is_dirty(&self) -> bool {
        self.writer.is_dirty()
    }
}

/// One thing found while reading lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LineItem {
    /// A complete line.
    Line {
        /// Where it begins.
        at: Offset,
        /// Its bytes, without the newline.
        bytes: Vec<u8>,
    },
    /// Lines are missing here, or one was cut off.
    Gap {
        /// The first byte that belongs to no delivered line.
        from: Offset,
        /// The beginning of the next line.
        to: Offset,
    },
}

/// What [`read_lines`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lines {
    /// Lines and gaps in order; none when there is nothing complete yet.
    pub items: Vec<LineItem>,
    /// From where to read on.
    pub next: Offset,
}

/// Reads complete lines from `from` on, which must be the beginning of a line: zero, or a `next` or the
/// offset of a line from an earlier call. Reads on until about `max_bytes` are read, but at least to the
/// first complete line. Empty lines are left out.
///
/// # Errors
/// A line over the limit (once all before it have been returned), and what [`Reader::read`] refuses.
pub fn read_lines(reader: &mut Reader, from: Offset, max_bytes: usize) -> Result<Lines, LineReadError> {
    let mut found = Lines { items: Vec::new(), next: from };
    // Bytes behind `found.next` (or behind the gap) that make no whole line yet.
    let mut partial: Vec<u8> = Vec::new();
    let mut at = from;
    // Set while looking for the first newline after a gap: how many bytes have been looked at.
    let mut after_gap: Option<usize> = None;
    loop {
        if at.since(from) >= max_bytes as u64 && !found.items.is_empty() {
            return Ok(found);
        }
        let bytes = match reader.read(at, READ) {
            Ok(Chunk::Data { bytes, .. }) => bytes,
            Ok(Chunk::Gap { to, .. }) => {
                partial.clear();
                after_gap = Some(0);
                at = to;
                continue;
            }
            Ok(Chunk::End) => return Ok(found),
            // What was found is given first; the next call meets the error again.
            Err(_) if !found.items.is_empty() => return Ok(found),
            Err(e) => return Err(e.into()),
        };
        at = at.plus(bytes.len());
        let mut rest = &bytes[..];
        while let Some(length) = rest.iter().position(|&b| b == b'\n') {
            let (line, behind) = (&rest[..length], &rest[length + 1..]);
            rest = behind;
            let end = Offset(at.0 - rest.len() as u64);
            if after_gap.take().is_some() {
                found.items.push(LineItem::Gap { from: found.next, to: end });
            } else {
                if partial.len() + line.len() > MAX_LINE {
                    return too_long(found);
                }
                partial.extend_from_slice(line);
                if !partial.is_empty() {
                    found.items.push(LineItem::Line { at: found.next, bytes: std::mem::take(&mut partial) });
                }
            }
            found.next = end;
        }
        let waiting = match &mut after_gap {
            Some(looked_at) => {
                *looked_at += rest.len();
                *looked_at
            }
            None => {
                partial.extend_from_slice(rest);
                partial.len()
            }
        };
        if waiting > MAX_LINE {
            return too_long(found);
        }
    }
}

/// Gives what was found first; the next call meets the long line again.
fn too_long(found: Lines) -> Result<Lines, LineReadError> {
    if found.items.is_empty() { Err(LineReadError::TooLong { at: found.next }) } else { Ok(found) }
}

#[cfg(test)]
mod tests;
