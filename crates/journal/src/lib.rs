//! Append-only byte logs on disk: what a program printed stays readable by offset, for anyone, at any time.
//!
//! One process writes a journal ([`Writer`]), any number of others read it at the same moment
//! ([`Reader`]), with nothing between them but the directory. A journal is a directory of *segments*,
//! files named after the offset of their first byte, which hold the bytes and nothing else:
//!
//! ```text
//! 00000000000000000000.seg   the head: bytes 0 to 1 MiB, kept for ever
//!                            a gap: bytes that retention dropped, or that were lost
//! 00000000000031457280.seg   bytes 30 MiB to 38 MiB
//! 00000000000039845888.seg   the last segment; its end is the tail of the journal
//! index                      optional: from time to offset ([`TimeIndex`])
//! ```
//!
//! Three rules make reading without a lock right: segments appear in the order of their offsets; once
//! a later segment exists, an earlier one never grows; bytes that are there never change.
//!
//! This crate starts no threads, reads no clock and knows neither tokio nor what the bytes mean.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod copy;
mod layout;
mod lines;
mod reader;
mod retention;
mod time_index;
mod unsynced;
mod writer;

pub use copy::copy;
pub use lines::{LineAppendError, LineItem, LineReadError, LineWriter, Lines, MAX_LINE, read_lines};
pub use reader::{Chunk, Range, ReadError, Reader};
pub use retention::Retention;
pub use time_index::{IndexError, TimeIndex};
pub use unsynced::{SyncError, Unsynced};
pub use writer::{AppendError, OpenError, SkipError, Writer};
