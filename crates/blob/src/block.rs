//! Blocks: what is compressed, encrypted and checked as one.
//!
//! A chunk of its own is a bad unit of compression when it is a page of memory or a small file. So small chunks that are
//! written one after the other share a block of about 256 KiB; a large chunk has a block to itself. A stored block is the
//! compressed bytes (or the plain ones, where they don't shrink), encrypted where the repository is. Its CRC-32 stands in
//! the pack's trailer and is compared before anything else is done with it, so damage never reaches the decompressor.

use crate::{
    codec::{Cursor, len32},
    crypto::{Cipher, OVERHEAD},
    id::ChunkId,
};
use bytes::Bytes;
use std::cell::RefCell;

/// A block is closed once it has so many plain bytes.
pub(crate) const BLOCK: usize = 256 << 10;
/// Longest chunk.
pub const MAX_CHUNK: usize = 8 << 20;
/// Longest block, plain: almost a full one and a chunk that was just too small for a block to itself.
const MAX_PLAIN: usize = MAX_CHUNK + BLOCK;
/// zstd's fastest ordinary level: the store shall keep up with the disk.
const LEVEL: i32 = 1;
const COMPRESSED: u8 = 1;

/// A chunk's place within its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) id: ChunkId,
    pub(crate) len: u32,
}

/// A block as the trailer of its pack describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockInfo {
    pub(crate) stored: u32,
    pub(crate) plain: u32,
    pub(crate) flags: u8,
    pub(crate) crc: u32,
}

/// A block that is being filled.
#[derive(Debug, Default)]
pub(crate) struct BlockBuilder {
    plain: Vec<u8>,
    members: Vec<Member>,
}

impl BlockBuilder {
    pub(crate) fn push(&mut self, id: ChunkId, contents: &[u8]) {
        self.plain.extend_from_slice(contents);
        self.members.push(Member { id, len: len32(contents.len()) });
    }

    pub(crate) fn append(&mut self, other: BlockBuilder) {
        if self.members.is_empty() {
            *self = other;
        } else {
            self.plain.extend_from_slice(&other.plain);
            self.members.extend(other.members);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.plain.len() >= BLOCK
    }

    pub(crate) fn encode(self, cipher: &Cipher) -> StoredBlock {
        StoredBlock::encode(&self.plain, self.members, cipher)
    }
}

/// A block as it lies in a pack.
#[derive(Debug)]
pub(crate) struct StoredBlock {
    pub(crate) bytes: Bytes,
    pub(crate) info: BlockInfo,
    pub(crate) members: Vec<Member>,
}

impl StoredBlock {
    pub(crate) fn encode(plain: &[u8], members: Vec<Member>, cipher: &Cipher) -> StoredBlock {
        let (flags, body) = match compress(plain) {
            Some(smaller) => (COMPRESSED, smaller),
            None => (0, plain.to_vec()),
        };
        let bound = if cipher.is_keyed() { bound(len32(plain.len()), flags, &digest(&members)) } else { Vec::new() };
        let bytes = cipher.seal(&bound, body);
        let info = BlockInfo { stored: len32(bytes.len()), plain: len32(plain.len()), flags, crc: crc32fast::hash(&bytes) };
        StoredBlock { bytes: bytes.into(), info, members }
    }
}

thread_local! {
    /// A compressor's tables are large: one for each thread that compresses.
    static COMPRESSOR: RefCell<Option<zstd::bulk::Compressor<'static>>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

/// `None` where it doesn't get smaller by a thirty-second.
fn compress(plain: &[u8]) -> Option<Vec<u8>> {
    COMPRESSOR.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = zstd::bulk::Compressor::new(LEVEL).ok();
        }
        let packed = slot.as_mut()?.compress(plain).ok()?;
        (packed.len() < plain.len() - plain.len() / 32).then_some(packed)
    })
}

fn decompress(packed: &[u8], plain: usize) -> Option<Vec<u8>> {
    DECOMPRESSOR.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = zstd::bulk::Decompressor::new().ok();
        }
        let unpacked = slot.as_mut()?.decompress(packed, plain).ok()?;
        (unpacked.len() == plain).then_some(unpacked)
    })
}

/// What the chunks of a block are, in one hash: the ids of all are bound into its encryption.
pub(crate) fn digest(members: &[Member]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for member in members {
        hasher.update(&member.id.0).update(&member.len.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

fn bound(plain: u32, flags: u8, digest: &[u8; 32]) -> Vec<u8> {
    [b"block", &plain.to_le_bytes()[..], &[flags], digest].concat()
}

/// Why a stored block was refused.
pub(crate) type BadBlock = &'static str;

impl BlockInfo {
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.stored.to_le_bytes());
        out.extend_from_slice(&self.plain.to_le_bytes());
        out.push(self.flags);
        out.extend_from_slice(&self.crc.to_le_bytes());
    }

    pub(crate) fn read(cursor: &mut Cursor<'_>) -> Option<BlockInfo> {
        let info = BlockInfo { stored: cursor.u32()?, plain: cursor.u32()?, flags: cursor.u8()?, crc: cursor.u32()? };
        let fits = info.flags <= COMPRESSED && info.plain as usize <= MAX_PLAIN;
        (fits && info.stored as usize <= MAX_PLAIN + OVERHEAD).then_some(info)
    }

    /// The plain bytes of a stored block. Its chunks' hashes are the caller's to compare.
    pub(crate) fn decode(&self, stored: &[u8], digest: &[u8; 32], cipher: &Cipher) -> Result<Bytes, BadBlock> {
        if stored.len() != self.stored as usize {
            return Err("its block is cut off");
        }
        if crc32fast::hash(stored) != self.crc {
            return Err("the checksum of its block is wrong");
        }
        let opened;
        let body = if cipher.is_keyed() {
            let bound = bound(self.plain, self.flags, digest);
            opened = cipher.open(&bound, stored).map_err(|_| "its block is not what was encrypted")?;
            opened.as_slice()
        } else {
            stored
        };
        if self.flags & COMPRESSED == 0 {
            let whole = body.len() == self.plain as usize;
            return if whole {
                Ok(Bytes::copy_from_slice(body))
            } else {
                Err("its block has another length than its index says")
            };
        }
        decompress(body, self.plain as usize).map(Bytes::from).ok_or("its block can't be unpacked")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::Keys;
    use proptest::prelude::*;

    fn ciphers() -> [Cipher; 2] {
        [Cipher::Plain, Cipher::Keyed(Box::new(Keys::derive(&[5; 32])))]
    }

    fn block(contents: &[Vec<u8>], cipher: &Cipher) -> StoredBlock {
        let mut builder = BlockBuilder::default();
        for one in contents {
            builder.push(cipher.chunk_id(one), one);
        }
        builder.encode(cipher)
    }

    proptest! {
        #[test]
        fn blocks_read_back(
            random in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 1..5), same in any::<u8>(), n in 0..9000_usize,
        ) {
            for cipher in ciphers() {
                let contents = [random.clone(), vec![vec![same; n]]].concat();
                let stored = block(&contents, &cipher);
                let plain = stored.info.decode(&stored.bytes, &digest(&stored.members), &cipher).unwrap();
                prop_assert_eq!(&plain[..], &contents.concat()[..]);
                prop_assert!(stored.bytes.len() <= plain.len() + OVERHEAD);
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        for cipher in ciphers() {
            for contents in [vec![b"some text ".repeat(20)], vec![vec![1], vec![2, 3], vec![]]] {
                let stored = block(&contents, &cipher);
                for bit in 0..stored.bytes.len() * 8 {
                    let mut bad = stored.bytes.to_vec();
                    bad[bit / 8] ^= 1 << (bit % 8);
                    assert!(stored.info.decode(&bad, &digest(&stored.members), &cipher).is_err(), "bit {bit}");
                }
                assert!(stored.info.decode(&stored.bytes[1..], &digest(&stored.members), &cipher).is_err());
            }
        }
    }

    #[test]
    fn an_encrypted_block_belongs_to_its_chunks() {
        let cipher = &ciphers()[1];
        let stored = block(&[vec![1; 100], vec![2; 100]], cipher);
        let mut others = stored.members.clone();
        others.swap(0, 1);
        assert!(stored.info.decode(&stored.bytes, &digest(&others), cipher).is_err());
    }

    #[test]
    fn a_block_that_claims_more_than_it_has_is_refused() {
        let stored = block(&[vec![9; 5000]], &Cipher::Plain);
        for plain in [0, 4999, 5001, len32(MAX_PLAIN)] {
            let info = BlockInfo { plain, ..stored.info.clone() };
            assert!(info.decode(&stored.bytes, &[0; 32], &Cipher::Plain).is_err(), "{plain}");
        }
    }
}
