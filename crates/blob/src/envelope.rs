//! How every object begins and, but for packs, ends.
//!
//! ```text
//! "DORMBLOB" | kind (4) | version u32 | length of the body u64 | CRC-32 of these 24 bytes | body | BLAKE3 of all before
//! ```
//!
//! The first 28 bytes stay as they are in all versions to come, with a checksum of their own: so a newer format is told
//! from a damaged one, and refused by its number before anything else of it is read.

use crate::{codec::Cursor, error::Error};

/// Bytes before the body.
pub(crate) const HEADER: usize = 28;
const MAGIC: &[u8; 8] = b"DORMBLOB";
const CHECKSUM: usize = 32;

/// What an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    tag: [u8; 4],
    /// The version that this build writes, and the newest that it reads.
    version: u32,
}

impl Kind {
    pub(crate) const CONFIG: Kind = Kind { tag: *b"conf", version: 1 };
    pub(crate) const KEY: Kind = Kind { tag: *b"wkey", version: 1 };
    pub(crate) const LOCK: Kind = Kind { tag: *b"lock", version: 1 };
    pub(crate) const PACK: Kind = Kind { tag: *b"pack", version: 1 };
    pub(crate) const INDEX: Kind = Kind { tag: *b"indx", version: 1 };
    pub(crate) const MANIFEST: Kind = Kind { tag: *b"mani", version: 1 };
}

/// The header of an object whose body has so many bytes.
pub(crate) fn header(kind: Kind, body: u64) -> [u8; HEADER] {
    header_of_version(kind, kind.version, body)
}

fn header_of_version(kind: Kind, version: u32, body: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&kind.tag);
    header[12..16].copy_from_slice(&version.to_le_bytes());
    header[16..24].copy_from_slice(&body.to_le_bytes());
    let sum = crc32fast::hash(&header[..24]);
    header[24..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Reads a header; returns the length of the body.
pub(crate) fn parse_header(object: &str, kind: Kind, bytes: &[u8]) -> Result<u64, Error> {
    let damaged = |what: &str| Error::damaged(object, what);
    let header = bytes.get(..HEADER).ok_or_else(|| damaged("it is cut off within its header"))?;
    let mut cursor = Cursor::new(header);
    let magic = cursor.take(8).expect("the header has 28 bytes");
    let tag = cursor.take(4).expect("the header has 28 bytes");
    let version = cursor.u32().expect("the header has 28 bytes");
    let body = cursor.u64().expect("the header has 28 bytes");
    let sum = cursor.u32().expect("the header has 28 bytes");
    if magic != MAGIC {
        return Err(damaged("it does not begin as an object of a repository does"));
    }
    if crc32fast::hash(&header[..24]) != sum {
        return Err(damaged("the checksum of its header is wrong"));
    }
    if tag != kind.tag {
        return Err(damaged(&format!("it is of another kind: '{}'", String::from_utf8_lossy(tag).escape_default())));
    }
    if version > kind.version {
        return Err(Error::Newer { object: object.to_owned(), found: version, known: kind.version });
    }
    if version == 0 {
        return Err(damaged("it has version 0"));
    }
    Ok(body)
}

/// Puts a body into its envelope.
pub(crate) fn wrap(kind: Kind, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + body.len() + CHECKSUM);
    bytes.extend_from_slice(&header(kind, body.len() as u64));
    bytes.extend_from_slice(body);
    let sum = blake3::hash(&bytes);
    bytes.extend_from_slice(sum.as_bytes());
    bytes
}

/// Takes a body out of its envelope.
pub(crate) fn unwrap<'a>(object: &str, kind: Kind, bytes: &'a [u8]) -> Result<&'a [u8], Error> {
    let length = parse_header(object, kind, bytes)?;
    let expected = length.checked_add((HEADER + CHECKSUM) as u64);
    if expected != Some(bytes.len() as u64) {
        return Err(Error::damaged(object, format!("it has {} bytes, its header tells of a body of {length}", bytes.len())));
    }
    let (content, sum) = bytes.split_at(bytes.len() - CHECKSUM);
    if blake3::hash(content).as_bytes() != sum {
        return Err(Error::damaged(object, "its checksum is wrong"));
    }
    Ok(&content[HEADER..])
}

#[cfg(any(test, feature = "conformance"))]
#[allow(clippy::unwrap_used)] // For tests.
pub(crate) fn make_newer(kind: Kind, bytes: &mut [u8]) {
    let body = parse_header("test", kind, bytes).unwrap();
    bytes[..HEADER].copy_from_slice(&header_of_version(kind, kind.version + 1, body));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let good = wrap(Kind::LOCK, b"a body");
        assert_eq!(unwrap("lock", Kind::LOCK, &good).unwrap(), b"a body");
        for at in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(matches!(unwrap("lock", Kind::LOCK, &bad), Err(Error::Damaged { .. })), "bit {at}");
        }
        for length in 0..good.len() {
            assert!(unwrap("lock", Kind::LOCK, &good[..length]).is_err(), "cut at {length}");
        }
    }

    #[test]
    fn a_newer_one_is_told_by_its_number() {
        let mut newer = wrap(Kind::CONFIG, b"who knows");
        make_newer(Kind::CONFIG, &mut newer);
        assert!(matches!(unwrap("config", Kind::CONFIG, &newer), Err(Error::Newer { found: 2, known: 1, .. })));
        assert!(matches!(unwrap("config", Kind::LOCK, &wrap(Kind::CONFIG, b"")), Err(Error::Damaged { .. })));
    }
}
