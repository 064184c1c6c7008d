//! Packs: objects of about 16 to 32 MiB in which blocks lie one after the other.
//!
//! ```text
//! header (envelope) | block | block | … | trailer | length of the trailer u32 | its CRC-32 u32 | "PACK END" | CRC-32 of these 16
//! ```
//!
//! The trailer tells each block's lengths, checksum and chunks, and with that where everything lies; it is encrypted where
//! the repository is. A pack's name is the BLAKE3 of its header and its stored trailer. As chunks are named by their
//! contents, the same name means the same chunks in the same blocks: a pack that is written again is the same object.

use crate::{
    block::{BlockInfo, Member, StoredBlock, digest},
    codec::{Cursor, len32},
    crypto::Cipher,
    envelope::{self, HEADER, Kind},
    error::Error,
    id::PackId,
};
use bytes::Bytes;

/// A pack is closed once its blocks have so many bytes.
pub(crate) const PACK: usize = 16 << 20;
/// … or so many chunks, so that trailers stay small.
pub(crate) const PACK_CHUNKS: usize = 100_000;
/// Bytes after the trailer.
pub(crate) const FOOTER: usize = 20;
/// Longest pack that is read whole.
pub(crate) const MAX_PACK: u64 = 128 << 20;
/// Longest trailer.
const MAX_TRAILER: u32 = 32 << 20;
const END: &[u8; 8] = b"PACK END";
const BOUND: &[u8] = b"pack trailer";

/// What a pack's trailer tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Trailer {
    pub(crate) blocks: Vec<(BlockInfo, Vec<Member>)>,
}

/// A whole pack, ready to be stored.
pub(crate) struct Sealed {
    pub(crate) id: PackId,
    pub(crate) size: u64,
    pub(crate) trailer: Trailer,
    pub(crate) parts: Vec<Bytes>,
}

/// Makes a pack of blocks.
pub(crate) fn seal(blocks: Vec<StoredBlock>, cipher: &Cipher) -> Sealed {
    let length = blocks.iter().map(|block| block.bytes.len() as u64).sum::<u64>();
    let header = envelope::header(Kind::PACK, length);
    let mut parts = vec![Bytes::copy_from_slice(&header)];
    let mut trailer = Trailer::default();
    for block in blocks {
        parts.push(block.bytes);
        trailer.blocks.push((block.info, block.members));
    }
    let stored = cipher.seal(BOUND, trailer.encode());
    let mut end = stored.clone();
    end.extend_from_slice(&len32(stored.len()).to_le_bytes());
    end.extend_from_slice(&crc32fast::hash(&stored).to_le_bytes());
    end.extend_from_slice(END);
    let sum = crc32fast::hash(&end[stored.len()..]);
    end.extend_from_slice(&sum.to_le_bytes());
    parts.push(end.into());
    let size = parts.iter().map(|part| part.len() as u64).sum();
    Sealed { id: id_of(&header, &stored), size, trailer, parts }
}

fn id_of(header: &[u8], stored_trailer: &[u8]) -> PackId {
    let mut hasher = blake3::Hasher::new();
    hasher.update(header).update(stored_trailer);
    PackId(*hasher.finalize().as_bytes())
}

impl Trailer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let chunks: usize = self.blocks.iter().map(|(_, members)| members.len()).sum();
        let mut out = Vec::with_capacity(4 + self.blocks.len() * 17 + chunks * 36);
        out.extend_from_slice(&len32(self.blocks.len()).to_le_bytes());
        for (info, members) in &self.blocks {
            info.write(&mut out);
            out.extend_from_slice(&len32(members.len()).to_le_bytes());
            for member in members {
                out.extend_from_slice(&member.id.0);
                out.extend_from_slice(&member.len.to_le_bytes());
            }
        }
        out
    }

    /// Reads an encoded trailer; the lengths in it have to agree with each other.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Trailer> {
        let mut cursor = Cursor::new(bytes);
        let blocks = cursor.u32()? as usize;
        if blocks > cursor.left() / 17 {
            return None;
        }
        let mut trailer = Trailer { blocks: Vec::with_capacity(blocks) };
        for _ in 0..blocks {
            let info = BlockInfo::read(&mut cursor)?;
            let count = cursor.u32()? as usize;
            if count > cursor.left() / 36 {
                return None;
            }
            let mut members = Vec::with_capacity(count);
            let mut plain = 0_u64;
            for _ in 0..count {
                let member = Member { id: cursor.id()?, len: cursor.u32()? };
                plain += u64::from(member.len);
                members.push(member);
            }
            if plain != u64::from(info.plain) {
                return None;
            }
            trailer.blocks.push((info, members));
        }
        cursor.is_at_end().then_some(trailer)
    }

    /// Bytes of all blocks.
    pub(crate) fn stored(&self) -> u64 {
        self.blocks.iter().map(|(info, _)| u64::from(info.stored)).sum()
    }
}

/// The lengths and the checksum at a pack's very end.
pub(crate) struct Footer {
    /// Length of the stored trailer.
    pub(crate) trailer: u32,
    crc: u32,
}

impl Footer {
    /// Reads the last [`FOOTER`] bytes of a pack of `size` bytes.
    pub(crate) fn parse(path: &str, size: u64, bytes: &[u8]) -> Result<Footer, Error> {
        let damaged = |what: &str| Error::damaged(path, what);
        let mut cursor = Cursor::new(bytes);
        let read = (cursor.u32(), cursor.u32(), cursor.take(8), cursor.u32());
        let (Some(trailer), Some(crc), Some(end), Some(sum)) = read else { return Err(damaged("it is cut off")) };
        if end != END || crc32fast::hash(&bytes[..16]) != sum {
            return Err(damaged("it does not end as a pack does"));
        }
        if trailer > MAX_TRAILER || u64::from(trailer) + (HEADER + FOOTER) as u64 > size {
            return Err(damaged("its trailer can't be as long as it says"));
        }
        Ok(Footer { trailer, crc })
    }

    /// Opens the stored trailer of the pack `id`.
    pub(crate) fn open(&self, path: &str, id: PackId, size: u64, stored: &[u8], cipher: &Cipher) -> Result<Trailer, Error> {
        let damaged = |what: &str| Error::damaged(path, what);
        if stored.len() != self.trailer as usize || crc32fast::hash(stored) != self.crc {
            return Err(damaged("the checksum of its trailer is wrong"));
        }
        let Some(length) = size.checked_sub((HEADER + FOOTER) as u64 + u64::from(self.trailer)) else {
            return Err(damaged("it is cut off"));
        };
        if id_of(&envelope::header(Kind::PACK, length), stored) != id {
            return Err(damaged("its contents are not those that its name tells"));
        }
        let plain = cipher.open(BOUND, stored).map_err(|_| damaged("its trailer is not what was encrypted"))?;
        let trailer = Trailer::decode(&plain).ok_or_else(|| damaged("its trailer makes no sense"))?;
        if trailer.stored() != length {
            return Err(damaged("its blocks have another length than its trailer says"));
        }
        Ok(trailer)
    }
}

/// Verifies a whole pack: name, header, trailer, every block, every chunk. The first thing that is wrong is told.
pub(crate) fn verify(path: &str, id: PackId, bytes: &[u8], cipher: &Cipher) -> Result<Trailer, Error> {
    let damaged = |what: String| Error::damaged(path, what);
    let size = bytes.len() as u64;
    let (rest, footer_bytes) =
        bytes.split_at_checked(bytes.len().saturating_sub(FOOTER)).ok_or_else(|| damaged("it is cut off".to_owned()))?;
    let length = envelope::parse_header(path, Kind::PACK, bytes)?;
    let footer = Footer::parse(path, size, footer_bytes)?;
    let (blocks, stored) = rest.split_at(rest.len() - footer.trailer as usize);
    if length != (blocks.len() - HEADER) as u64 {
        return Err(damaged("its header tells another length".to_owned()));
    }
    let trailer = footer.open(path, id, size, stored, cipher)?;
    let mut at = HEADER;
    for (info, members) in &trailer.blocks {
        let block = &blocks[at..at + info.stored as usize];
        at += info.stored as usize;
        let first = members.first().map(|member| member.id);
        let plain = info.decode(block, &digest(members), cipher).map_err(|what| Error::Damaged {
            object: path.to_owned(),
            chunk: first,
            what: format!("{what} ({} chunks are in it)", members.len()),
        })?;
        let mut offset = 0;
        for member in members {
            let contents = &plain[offset..offset + member.len as usize];
            offset += member.len as usize;
            if cipher.chunk_id(contents) != member.id {
                return Err(damaged("its contents have another hash".to_owned()).for_chunk(member.id));
            }
        }
    }
    Ok(trailer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{block::BlockBuilder, crypto::Keys};
    use proptest::prelude::*;

    fn pack(cipher: &Cipher) -> (PackId, Vec<u8>) {
        let blocks = (0..3_u8).map(|n| {
            let mut builder = BlockBuilder::default();
            for contents in [vec![n; 40], vec![n + 10, 1], Vec::new()] {
                builder.push(cipher.chunk_id(&contents), &contents);
            }
            builder.encode(cipher)
        });
        let sealed = seal(blocks.collect(), cipher);
        let bytes = sealed.parts.concat();
        assert_eq!(bytes.len() as u64, sealed.size);
        (sealed.id, bytes)
    }

    #[test]
    fn a_pack_is_whole_and_every_flipped_bit_is_noticed() {
        for cipher in [Cipher::Plain, Cipher::Keyed(Box::new(Keys::derive(&[5; 32])))] {
            let (id, bytes) = pack(&cipher);
            assert_eq!(pack(&cipher), (id, bytes.clone()), "the same again is the same object");
            let trailer = verify("pack", id, &bytes, &cipher).unwrap();
            assert_eq!(trailer.blocks.iter().map(|(_, members)| members.len()).sum::<usize>(), 9);
            for bit in 0..bytes.len() * 8 {
                let mut bad = bytes.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(verify("pack", id, &bad, &cipher).is_err(), "bit {bit}");
            }
            for cut in 0..bytes.len() {
                assert!(verify("pack", id, &bytes[..cut], &cipher).is_err(), "cut at {cut}");
            }
            assert!(verify("pack", PackId([0; 32]), &bytes, &cipher).is_err());
        }
    }

    #[test]
    fn a_newer_pack_is_told_by_its_number() {
        let (id, mut bytes) = pack(&Cipher::Plain);
        envelope::make_newer(Kind::PACK, &mut bytes);
        assert!(matches!(verify("pack", id, &bytes, &Cipher::Plain), Err(Error::Newer { .. })));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_of_trailers_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Trailer::decode(&bytes);
        }
    }
}
