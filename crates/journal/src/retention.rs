//! How much of a journal is kept: its beginning and its latest part, while the middle may go.

use crate::layout::Span;
use std::ops::Range;

/// What a journal keeps. Counts are in bytes of offset, so that a gap counts like the bytes it replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Bytes before this offset are never dropped.
    pub head_bytes: u64,
    /// The last so many bytes before the tail are never dropped.
    pub tail_bytes: u64,
    /// The size of a segment, the unit in which bytes are dropped; at least 1.
    pub segment_bytes: u64,
}

impl Default for Retention {
    /// The first 1 MiB and the last 1 GiB, in segments of 8 MiB.
    fn default() -> Self {
        Retention { head_bytes: 1 << 20, tail_bytes: 1 << 30, segment_bytes: 8 << 20 }
    }
}

impl Retention {
    /// Where a segment that begins at `start` must end. A segment never crosses the end of the head,
    /// so that the head can stay while what follows it goes.
    pub(crate) fn segment_end(&self, start: u64) -> u64 {
        let end = start.saturating_add(self.segment_bytes.max(1));
        if start < self.head_bytes { end.min(self.head_bytes) } else { end }
    }

    /// Which of the segments (in order) may go: those that lie wholly behind the head and before the
    /// kept tail. Never the last one, since it marks where the tail is.
    pub(crate) fn droppable(&self, segments: &[Span], tail: u64) -> Range<usize> {
        let kept_from = tail.saturating_sub(self.tail_bytes);
        let older = segments.len().saturating_sub(1);
        let from = segments[..older].partition_point(|s| s.start < self.head_bytes);
        let to = segments[..older].partition_point(|s| s.end <= kept_from);
        from..to.max(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SMALL: Retention = Retention { head_bytes: 10, tail_bytes: 20, segment_bytes: 8 };

    #[test]
    fn segments_are_cut_at_the_end_of_the_head() {
        for (start, end) in [(0, 8), (8, 10), (9, 10), (10, 18), (11, 19), (u64::MAX - 1, u64::MAX)] {
            assert_eq!(SMALL.segment_end(start), end, "from {start}");
        }
        assert_eq!(Retention { segment_bytes: 0, ..SMALL }.segment_end(50), 51, "a segment holds at least a byte");
    }

    #[test]
    fn only_what_lies_between_head_and_tail_goes() {
        let spans = |list: &[(u64, u64)]| list.iter().map(|&(start, end)| Span { start, end }).collect::<Vec<_>>();
        let all = spans(&[(0, 8), (8, 10), (10, 18), (18, 26), (26, 30)]);
        for (tail, want) in [(30, 2..2), (37, 2..2), (38, 2..3), (45, 2..3), (46, 2..4), (1000, 2..4)] {
            assert_eq!(SMALL.droppable(&all, tail), want, "tail {tail}");
        }
        assert_eq!(SMALL.droppable(&[], 100), 0..0);
        assert_eq!(SMALL.droppable(&spans(&[(12, 15)]), 100), 0..0, "the last one marks the tail");
    }

    proptest! {
        #[test]
        fn nothing_kept_is_ever_dropped(
            head in 0u64..100, tail_bytes in 0u64..100, lens in prop::collection::vec((0u64..20, 0u64..20), 0..30), more in 0u64..50,
        ) {
            let retention = Retention { head_bytes: head, tail_bytes, segment_bytes: 16 };
            let mut at = 0;
            let mut segments = Vec::new();
            for (gap, len) in lens {
                segments.push(Span { start: at + gap, end: at + gap + len });
                at += gap + len;
            }
            let tail = at + more;
            let gone = retention.droppable(&segments, tail);
            for (i, s) in segments.iter().enumerate() {
                let may_go = s.start >= head && s.end + tail_bytes <= tail && i + 1 < segments.len();
                prop_assert_eq!(gone.contains(&i), may_go, "segment {} {:?}", i, s);
            }
        }
    }
}
