//! Where a stream is cut into chunks.
//!
//! **Memory** is cut into fixed pages, of 4 KiB as the system has them: forks change pages here and there, and with chunks
//! of two pages twenty forks that each change 1 % would already take 1.4 times one image. Single pages make good chunks
//! since small chunks share blocks (see `block`). It also fits that images list their pages without gaps: a page
//! more or less moves all that follow by one page, and each is found again.
//!
//! **Files** are cut by content (FastCDC): 384 KiB at least, which are passed over without a look, 512 KiB on average, 2 MiB at
//! most. A small file is one chunk.
//! 100,000 small files need nothing else: each is a chunk of its own, found again as a whole, and a few hundred share a
//! block, so they cost what their compressed bytes cost and 36 bytes each in the pack's trailer.

use bytes::Bytes;
use fastcdc::v2020::FastCDC;

/// How a stream is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunking {
    /// Where the content says so: for files.
    Content,
    /// Every so many bytes: for memory. At most 1 MiB.
    Fixed(usize),
}

impl Chunking {
    /// For images of memory.
    pub const MEMORY: Chunking = Chunking::Fixed(4096);
}

const CDC_MIN: usize = 384 << 10;
const CDC_AVG: usize = 512 << 10;
const CDC_MAX: usize = 2 << 20;
/// How much is read before it is cut, or worked on as one.
pub(crate) const SEGMENT: usize = 1 << 20;
/// Cutting by content needs to see the longest chunk; what is left uncut is copied, so there is room for several.
const CDC_WINDOW: usize = 4 * CDC_MAX;

/// A part of a stream that is hashed and stored in one go.
#[derive(Debug)]
pub(crate) enum Segment {
    /// Pages, of which the last one may be shorter.
    Pages {
        bytes: Bytes,
        page: usize,
    },
    Chunk(Bytes),
}

impl Segment {
    /// The pieces, in order.
    pub(crate) fn pieces(&self) -> Vec<&[u8]> {
        match self {
            Segment::Pages { bytes, page } => bytes.chunks(*page).collect(),
            Segment::Chunk(chunk) => vec![&chunk[..]],
        }
    }
}

/// Cuts a stream as it comes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cutter {
    chunking: Chunking,
}

impl Cutter {
    /// Pages are of 1 byte to 1 MiB; other sizes are taken to the nearest of these.
    pub(crate) fn new(chunking: Chunking) -> Cutter {
        let chunking = match chunking {
            Chunking::Fixed(page) => Chunking::Fixed(page.clamp(1, SEGMENT)),
            Chunking::Content => Chunking::Content,
        };
        Cutter { chunking }
    }

    /// How many bytes to have before [`Cutter::cut`].
    pub(crate) fn window(&self) -> usize {
        match self.chunking {
            Chunking::Fixed(page) => SEGMENT / page * page,
            Chunking::Content => CDC_WINDOW,
        }
    }

    /// Takes what can be cut off the front of `buffer`: everything where it is the end.
    pub(crate) fn cut(&self, buffer: &mut Vec<u8>, is_end: bool) -> Vec<Segment> {
        let all = Bytes::from(std::mem::take(buffer));
        let (segments, cut) = match self.chunking {
            Chunking::Fixed(page) => {
                let whole = if is_end { all.len() } else { all.len() / page * page };
                let pages = Segment::Pages { bytes: all.slice(..whole), page };
                (if whole == 0 { Vec::new() } else { vec![pages] }, whole)
            }
            Chunking::Content => cut_by_content(&all, is_end),
        };
        buffer.extend_from_slice(&all[cut..]);
        segments
    }
}

fn cut_by_content(all: &Bytes, is_end: bool) -> (Vec<Segment>, usize) {
    let cdc = FastCDC::new(all, CDC_MIN, CDC_AVG, CDC_MAX);
    let (mut segments, mut at) = (Vec::new(), 0);
    // Short of the end, a chunk is certain only where the longest one would have been seen.
    while at < all.len() && (is_end || all.len() - at >= CDC_MAX) {
        let (_, end) = cdc.cut(at, all.len() - at);
        segments.push(Segment::Chunk(all.slice(at..end)));
        at = end;
    }
    (segments, at)
}

/// True where all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; 4096] = [0; 4096];
    bytes.chunks(ZEROS.len()).all(|part| part == &ZEROS[..part.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(length: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; length];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
        bytes
    }

    /// Cuts as a writer does, reading `step` bytes at a time.
    fn cut(bytes: &[u8], chunking: Chunking, step: usize) -> Vec<Vec<u8>> {
        let cutter = Cutter::new(chunking);
        let (mut buffer, mut pieces, mut rest) = (Vec::new(), Vec::new(), bytes);
        loop {
            while buffer.len() < cutter.window() && !rest.is_empty() {
                let (head, tail) = rest.split_at(step.min(rest.len()).min(cutter.window() - buffer.len()));
                buffer.extend_from_slice(head);
                rest = tail;
            }
            let is_end = rest.is_empty();
            for segment in cutter.cut(&mut buffer, is_end) {
                pieces.extend(segment.pieces().into_iter().map(<[u8]>::to_vec));
            }
            if is_end {
                assert!(buffer.is_empty());
                return pieces;
            }
        }
    }

    #[test]
    fn pieces_are_the_stream_however_it_is_read() {
        let bytes = random(11_000_000, 1);
        for chunking in [Chunking::Content, Chunking::MEMORY, Chunking::Fixed(777)] {
            let once = cut(&bytes, chunking, usize::MAX);
            assert_eq!(once.concat(), bytes);
            assert_eq!(cut(&bytes, chunking, 100_001), once);
        }
        assert!(cut(&[], Chunking::Content, 1).is_empty() && cut(&[], Chunking::MEMORY, 1).is_empty());
    }

    #[test]
    fn content_is_found_again_after_an_insertion() {
        let bytes = random(30_000_000, 2);
        let moved = [&random(1234, 3)[..], &bytes].concat();
        let (one, two) = (cut(&bytes, Chunking::Content, usize::MAX), cut(&moved, Chunking::Content, usize::MAX));
        let shared = two.iter().filter(|piece| one.contains(piece)).count();
        assert!(shared + 3 >= two.len(), "{shared} of {}", two.len());
        let sizes: Vec<usize> = one.iter().map(Vec::len).collect();
        assert!(sizes.iter().all(|size| *size <= CDC_MAX) && sizes[..sizes.len() - 1].iter().all(|size| *size >= CDC_MIN));
    }

    #[test]
    fn zeros_are_seen() {
        assert!(is_zero(&[]) && is_zero(&[0; 5000]));
        let mut almost = vec![0; 5000];
        almost[4999] = 1;
        assert!(!is_zero(&almost));
    }
}
