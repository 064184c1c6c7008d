//! Input that was typed and not yet acknowledged: kept so that a lost link loses nothing and doubles nothing.

use api_types::terminal::{ClientFrame, InputSeq, MAX_INPUT};
use bytes::Bytes;
use std::collections::VecDeque;

/// Most unacknowledged input. What is typed beyond it is refused, visibly.
const MAX_PENDING: usize = 256 * 1024;

/// Numbers input and keeps it until the terminal has it.
#[derive(Debug)]
pub struct Ledger {
    next: InputSeq,
    pending: VecDeque<(InputSeq, Bytes)>,
    pending_bytes: usize,
}

impl Default for Ledger {
    fn default() -> Ledger {
        Ledger { next: InputSeq::FIRST, pending: VecDeque::new(), pending_bytes: 0 }
    }
}

impl Ledger {
    /// Takes new input; the messages to send. `None` where too much is unacknowledged: then nothing of it was taken.
    pub fn typed(&mut self, input: &[u8]) -> Option<Vec<ClientFrame>> {
        if self.pending_bytes + input.len() > MAX_PENDING {
            return None;
        }
        let mut frames = Vec::new();
        for piece in input.chunks(MAX_INPUT) {
            let bytes = Bytes::copy_from_slice(piece);
            self.pending.push_back((self.next, bytes.clone()));
            self.pending_bytes += piece.len();
            frames.push(ClientFrame::Input { seq: self.next, bytes });
            self.next = self.next.next();
        }
        Some(frames)
    }

    /// The terminal has everything up to `seq`.
    pub fn acknowledged(&mut self, seq: InputSeq) {
        while let Some((first, _)) = self.pending.front()
            && *first <= seq
        {
            self.drop_at(0);
        }
    }

    /// The terminal won't take `seq`.
    pub fn refused(&mut self, seq: InputSeq) {
        if let Some(at) = self.pending.iter().position(|(number, _)| *number == seq) {
            self.drop_at(at);
        }
    }

    fn drop_at(&mut self, at: usize) {
        if let Some((_, bytes)) = self.pending.remove(at) {
            self.pending_bytes -= bytes.len();
        }
    }

    /// What to send again on a new link, under the same numbers.
    pub fn unacknowledged(&self) -> impl Iterator<Item = ClientFrame> + '_ {
        self.pending.iter().map(|(seq, bytes)| ClientFrame::Input { seq: *seq, bytes: bytes.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(ledger: &Ledger) -> Vec<u64> {
        ledger
            .unacknowledged()
            .map(|frame| match frame {
                ClientFrame::Input { seq, .. } => seq.0,
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn a_new_link_gets_what_is_unacknowledged_under_the_same_numbers() {
        let mut ledger = Ledger::default();
        for word in ["a", "b", "c", "d"] {
            assert_eq!(ledger.typed(word.as_bytes()).unwrap().len(), 1);
        }
        ledger.acknowledged(InputSeq(2));
        ledger.refused(InputSeq(4));
        assert_eq!(numbers(&ledger), [3]);
        ledger.acknowledged(InputSeq(3));
        assert!(numbers(&ledger).is_empty());
        ledger.typed(b"e").unwrap();
        assert_eq!(numbers(&ledger), [5]);
    }

    #[test]
    fn a_large_paste_is_split_and_too_much_is_refused_whole() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.typed(&vec![b'x'; MAX_INPUT * 2 + 1]).unwrap().len(), 3);
        assert!(ledger.typed(&vec![b'x'; MAX_PENDING]).is_none());
        assert_eq!(numbers(&ledger), [1, 2, 3]);
        ledger.acknowledged(InputSeq(3));
        assert!(ledger.typed(&vec![b'x'; MAX_PENDING]).is_some());
    }
}
