//! One direction of one stream: what its sender must keep, and how far it may go ahead.
//!
//! ```text
//!        acked            sent             end of what was taken in
//!   ───────┼───────────────┼───────────────────────┤
//!    gone  │  kept: resent after a reconnection    │      room = WINDOW − (end − acked)
//! ```
//! The sender takes bytes in only while there is room; so a slow receiver blocks the program that
//! writes, and no byte is dropped.

use crate::frame::MAX_DATA;
use bytes::{Buf, Bytes, BytesMut};
use model::Offset;

/// Most bytes of one stream that are under way or kept for resending.
pub const WINDOW: usize = 1024 * 1024;

/// The same for a network connection, of which there can be many.
pub const CONNECTION_WINDOW: usize = 512 * 1024;

/// The sending side's memory of a stream.
#[derive(Debug)]
pub struct SendWindow {
    kept: BytesMut,
    limit: usize,
    acked: Offset,
    sent: Offset,
    /// The furthest that was ever sent: a receiver may have it although it is to be sent again.
    furthest: Offset,
    ended: bool,
    end_sent: bool,
}

/// What to say next on a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Outgoing {
    Data { offset: Offset, bytes: Bytes },
    End { offset: Offset },
}

/// An acknowledgement that can't be: beyond what was sent, or behind an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("acknowledged {acked}, but only {from} to {to} can be")]
pub struct BadAck {
    pub acked: Offset,
    pub from: Offset,
    pub to: Offset,
}

impl SendWindow {
    /// A stream whose first byte will have offset `start`.
    pub fn starting_at(start: Offset) -> Self {
        Self { kept: BytesMut::new(), limit: WINDOW, acked: start, sent: start, furthest: start, ended: false, end_sent: false }
    }

    /// One of a network connection.
    pub fn of_connection() -> Self {
        Self { limit: CONNECTION_WINDOW, ..Self::starting_at(Offset::ZERO) }
    }

    /// Whether it was made by [`Self::of_connection`].
    pub fn is_of_connection(&self) -> bool {
        self.limit == CONNECTION_WINDOW
    }

    /// How many bytes may be taken in now.
    pub fn room(&self) -> usize {
        self.limit.saturating_sub(self.kept.len())
    }

    /// Takes bytes in. The caller asked [`Self::room`] before.
    pub fn take_in(&mut self, bytes: &[u8]) {
        debug_assert!(!self.ended, "nothing follows the end");
        self.kept.extend_from_slice(bytes);
    }

    /// No more bytes will come.
    pub fn finish(&mut self) {
        self.ended = true;
    }

    /// Offset after the last byte taken in.
    pub fn end(&self) -> Offset {
        self.acked.plus(self.kept.len())
    }

    /// First offset that is still kept.
    pub fn acked(&self) -> Offset {
        self.acked
    }

    /// The bytes that are still kept, from [`Self::acked`] on.
    pub fn kept(&self) -> &[u8] {
        &self.kept
    }

    /// True when the end is acknowledged, too: the stream can be forgotten.
    pub fn is_done(&self) -> bool {
        self.ended && self.end_sent && self.kept.is_empty()
    }

    /// True once [`Self::finish`] was called.
    pub fn is_finished(&self) -> bool {
        self.ended
    }

    /// The next piece to send, at most one frame's worth.
    pub fn next_outgoing(&mut self) -> Option<Outgoing> {
        let skip = self.sent.since(self.acked) as usize;
        if skip < self.kept.len() {
            let take = (self.kept.len() - skip).min(MAX_DATA);
            let bytes = Bytes::copy_from_slice(&self.kept[skip..skip + take]);
            let offset = self.sent;
            self.sent = self.sent.plus(take);
            return Some(Outgoing::Data { offset, bytes });
        }
        if self.ended && !self.end_sent {
            self.end_sent = true;
            return Some(Outgoing::End { offset: self.sent });
        }
        None
    }

    /// True where [`Self::next_outgoing`] has something to say.
    pub fn has_outgoing(&self) -> bool {
        (self.sent.since(self.acked) as usize) < self.kept.len() || (self.ended && !self.end_sent)
    }

    /// The receiver has everything below `offset`.
    ///
    /// # Errors
    /// [`BadAck`] when that can't be; the receiver is broken or hostile.
    pub fn ack(&mut self, offset: Offset) -> Result<(), BadAck> {
        let furthest = self.furthest.max(self.sent);
        if offset < self.acked || offset > furthest {
            return Err(BadAck { acked: offset, from: self.acked, to: furthest });
        }
        self.kept.advance(offset.since(self.acked) as usize);
        self.acked = offset;
        self.sent = self.sent.max(offset);
        if self.kept.is_empty() {
            // Most connections are silent most of the time.
            self.kept = BytesMut::new();
        }
        Ok(())
    }

    /// After a reconnection: the receiver has everything below `offset`; the rest is sent again.
    ///
    /// # Errors
    /// [`BadAck`] when the offset was never sent or has been dropped.
    pub fn rewind(&mut self, offset: Offset) -> Result<(), BadAck> {
        if offset < self.acked || offset > self.end() {
            return Err(BadAck { acked: offset, from: self.acked, to: self.end() });
        }
        self.kept.advance(offset.since(self.acked) as usize);
        self.acked = offset;
        self.furthest = self.furthest.max(self.sent);
        self.sent = offset;
        self.end_sent = false;
        Ok(())
    }
}

/// What a receiver does with a data frame, given how far it has come.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Append these bytes (a part that was here already is cut off).
    Append(Bytes),
    /// All of it was here already.
    Duplicate,
}

/// Data that leaves a hole: the sender is broken or hostile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("data at {offset} leaves a hole after {expected}")]
pub struct Hole {
    pub offset: Offset,
    pub expected: Offset,
}

/// Fits a data frame to a receiver that has everything below `expected`.
///
/// # Errors
/// [`Hole`] when bytes between are missing.
pub fn arrive(expected: Offset, offset: Offset, mut bytes: Bytes) -> Result<Arrival, Hole> {
    if offset > expected {
        return Err(Hole { offset, expected });
    }
    let known = expected.since(offset);
    if known >= bytes.len() as u64 {
        return Ok(Arrival::Duplicate);
    }
    bytes.advance(known as usize);
    Ok(Arrival::Append(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Any mix of taking in, sending, acknowledging and reconnecting delivers exactly the bytes.
        #[test]
        fn every_byte_arrives_once(steps in proptest::collection::vec((0u8..4, any::<u16>()), 1..200)) {
            let mut window = SendWindow::starting_at(Offset(7));
            let (mut produced, mut received) = (Vec::new(), Vec::new());
            for (what, n) in steps {
                match what {
                    0 => {
                        let bytes: Vec<u8> = (0..n as usize % 5000).map(|i| (i as u8) ^ (n as u8)).collect();
                        let take = bytes.len().min(window.room());
                        window.take_in(&bytes[..take]);
                        produced.extend_from_slice(&bytes[..take]);
                    }
                    1 => {
                        if let Some(Outgoing::Data { offset, bytes }) = window.next_outgoing()
                            && let Arrival::Append(bytes) = arrive(Offset(7).plus(received.len()), offset, bytes).unwrap()
                        {
                            received.extend_from_slice(&bytes);
                        }
                    }
                    2 => {
                        let have = Offset(7).plus(received.len());
                        let back = Offset(have.0 - (n as u64 % (have.since(window.acked()) + 1)));
                        window.ack(back).unwrap();
                    }
                    _ => window.rewind(Offset(7).plus(received.len())).unwrap(),
                }
            }
            while let Some(Outgoing::Data { offset, bytes }) = window.next_outgoing() {
                if let Arrival::Append(bytes) = arrive(Offset(7).plus(received.len()), offset, bytes).unwrap() {
                    received.extend_from_slice(&bytes);
                }
            }
            prop_assert_eq!(produced, received);
        }
    }

    #[test]
    fn acknowledging_what_was_never_sent_is_refused() {
        let mut window = SendWindow::starting_at(Offset::ZERO);
        window.take_in(b"abc");
        assert!(window.ack(Offset(1)).is_err());
        window.next_outgoing();
        assert!(window.ack(Offset(3)).is_ok());
        assert!(window.ack(Offset(2)).is_err());
    }

    #[test]
    fn what_is_to_be_sent_again_can_be_acknowledged_before() {
        let mut window = SendWindow::starting_at(Offset::ZERO);
        window.take_in(b"abcdef");
        window.next_outgoing();
        window.rewind(Offset(2)).unwrap();
        window.ack(Offset(5)).unwrap();
        assert_eq!(window.next_outgoing(), Some(Outgoing::Data { offset: Offset(5), bytes: Bytes::from_static(b"f") }));
        window.take_in(b"g");
        assert!(window.ack(Offset(7)).is_err(), "that was never sent");
    }

    #[test]
    fn a_hole_is_refused() {
        assert!(arrive(Offset(5), Offset(6), Bytes::from_static(b"x")).is_err());
        assert_eq!(arrive(Offset(5), Offset(4), Bytes::from_static(b"ab")), Ok(Arrival::Append(Bytes::from_static(b"b"))));
        assert_eq!(arrive(Offset(5), Offset(3), Bytes::from_static(b"ab")), Ok(Arrival::Duplicate));
    }
}
