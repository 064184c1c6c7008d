//! Numbers and names in binary formats: written in little-endian, read with every length checked.

use crate::id::ChunkId;

/// Reads a slice from its beginning. Every read tells whether there was enough.
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { rest: bytes }
    }

    pub(crate) fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(bytes)?;
        self.rest = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn hash(&mut self) -> Option<[u8; 32]> {
        self.array()
    }

    pub(crate) fn id(&mut self) -> Option<ChunkId> {
        self.hash().map(ChunkId)
    }

    /// A number in as few bytes as it needs, seven bits in each. Only its shortest form is accepted.
    pub(crate) fn varint(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return None;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return (byte != 0 || shift == 0).then_some(value);
            }
        }
        None
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn left(&self) -> usize {
        self.rest.len()
    }
}

/// The counterpart of [`Cursor::varint`].
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A length that the formats hold in 32 bits.
pub(crate) fn len32(length: usize) -> u32 {
    u32::try_from(length).expect("chunks, blocks and trailers are far shorter than 4 GiB")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_read_back(value in prop_oneof![any::<u64>(), 0..300_u64]) {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            let mut cursor = Cursor::new(&bytes);
            prop_assert_eq!(cursor.varint(), Some(value));
            prop_assert!(cursor.is_at_end());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            let mut cursor = Cursor::new(&bytes);
            while cursor.varint().is_some() {}
        }
    }

    #[test]
    fn other_spellings_of_a_number_are_refused() {
        assert_eq!(Cursor::new(&[0x80, 0x00]).varint(), None);
        assert_eq!(Cursor::new(&[0xff; 10]).varint(), None);
        assert_eq!(Cursor::new(&[1, 2, 3]).u32(), None);
    }
}
