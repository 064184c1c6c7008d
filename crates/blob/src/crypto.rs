//! The keys of a repository, and what is done with them.
//!
//! All keys of an encrypted repository are derived from one random master key. Ids are keyed hashes, so that nobody
//! without the key can tell whether something known is stored. Everything else that lies in the store, but for the
//! config, the lock and the wrapped keys, is encrypted with XChaCha20-Poly1305; what it is and where it belongs is bound
//! in as associated data.
//!
//! Nonces are made from what is encrypted: a keyed BLAKE3 of the message and its associated data, cut to 24 bytes. The
//! same message in the same place gives the same bytes, so a repeated upload is the same object; two different messages
//! never share a nonce, whatever the compressor's version makes of a chunk.

use crate::id::ChunkId;
use chacha20poly1305::{KeyInit, Tag, XChaCha20Poly1305, XNonce, aead::AeadInOut};

pub(crate) const NONCE: usize = 24;
pub(crate) const TAG: usize = 16;
/// How many bytes encryption adds.
pub(crate) const OVERHEAD: usize = NONCE + TAG;

/// What stood where nothing but our own encryption could have been.
#[derive(Debug)]
pub(crate) struct NotAuthentic;

/// How a repository names and hides what it stores.
pub(crate) enum Cipher {
    Plain,
    Keyed(Box<Keys>),
}

pub(crate) struct Keys {
    id: [u8; 32],
    name: [u8; 32],
    nonce: [u8; 32],
    cipher: XChaCha20Poly1305,
}

impl Keys {
    /// The keys that belong to a master key.
    pub(crate) fn derive(master: &[u8; 32]) -> Keys {
        Keys {
            id: blake3::derive_key("dormouse blob 2026 chunk ids", master),
            name: blake3::derive_key("dormouse blob 2026 manifest names", master),
            nonce: blake3::derive_key("dormouse blob 2026 nonces", master),
            cipher: XChaCha20Poly1305::new(&blake3::derive_key("dormouse blob 2026 encryption", master).into()),
        }
    }

    fn nonce(&self, bound: &[u8], message: &[u8]) -> [u8; NONCE] {
        let mut hasher = blake3::Hasher::new_keyed(&self.nonce);
        hasher.update(&(bound.len() as u64).to_le_bytes()).update(bound).update(message);
        let mut nonce = [0; NONCE];
        hasher.finalize_xof().fill(&mut nonce);
        nonce
    }

    /// Nonce, ciphertext, tag.
    pub(crate) fn seal(&self, bound: &[u8], message: &[u8]) -> Vec<u8> {
        let nonce = self.nonce(bound, message);
        let mut out = Vec::with_capacity(message.len() + OVERHEAD);
        out.extend_from_slice(&nonce);
        out.extend_from_slice(message);
        let tag = self.cipher.encrypt_inout_detached(&XNonce::from(nonce), bound, (&mut out[NONCE..]).into());
        out.extend_from_slice(&tag.expect("the cipher takes messages of up to 256 GiB"));
        out
    }

    pub(crate) fn open(&self, bound: &[u8], sealed: &[u8]) -> Result<Vec<u8>, NotAuthentic> {
        let (nonce, rest) = sealed.split_first_chunk::<NONCE>().ok_or(NotAuthentic)?;
        let (message, tag) = rest.split_last_chunk::<TAG>().ok_or(NotAuthentic)?;
        let mut out = message.to_vec();
        let opened =
            self.cipher.decrypt_inout_detached(&XNonce::from(*nonce), bound, out.as_mut_slice().into(), &Tag::from(*tag));
        opened.map(|()| out).map_err(|_| NotAuthentic)
    }
}

impl Cipher {
    pub(crate) fn is_keyed(&self) -> bool {
        matches!(self, Cipher::Keyed(_))
    }

    /// The id of a chunk with these contents.
    pub(crate) fn chunk_id(&self, contents: &[u8]) -> ChunkId {
        let hash = match self {
            Cipher::Plain => blake3::hash(contents),
            Cipher::Keyed(keys) => blake3::keyed_hash(&keys.id, contents),
        };
        ChunkId(*hash.as_bytes())
    }

    /// What stands in the store for a manifest's name.
    pub(crate) fn manifest_object(&self, name: &str) -> String {
        match self {
            Cipher::Plain => name.to_owned(),
            Cipher::Keyed(keys) => blake3::keyed_hash(&keys.name, name.as_bytes()).to_hex().to_string(),
        }
    }

    /// The bytes to store for a message.
    pub(crate) fn seal(&self, bound: &[u8], message: Vec<u8>) -> Vec<u8> {
        match self {
            Cipher::Plain => message,
            Cipher::Keyed(keys) => keys.seal(bound, &message),
        }
    }

    /// The counterpart of [`Cipher::seal`].
    pub(crate) fn open(&self, bound: &[u8], stored: &[u8]) -> Result<Vec<u8>, NotAuthentic> {
        match self {
            Cipher::Plain => Ok(stored.to_vec()),
            Cipher::Keyed(keys) => keys.open(bound, stored),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_opens_only_as_it_was_and_where_it_was() {
        let keys = Keys::derive(&[7; 32]);
        let sealed = keys.seal(b"here", b"a message");
        assert_eq!(keys.open(b"here", &sealed).unwrap(), b"a message");
        assert!(keys.open(b"there", &sealed).is_err());
        assert!(Keys::derive(&[8; 32]).open(b"here", &sealed).is_err());
        for bit in 0..sealed.len() * 8 {
            let mut bad = sealed.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(keys.open(b"here", &bad).is_err(), "bit {bit}");
        }
        assert!(keys.open(b"here", &sealed[..OVERHEAD - 1]).is_err());
    }

    #[test]
    fn the_same_gives_the_same_and_other_messages_other_nonces() {
        let keys = Keys::derive(&[7; 32]);
        assert_eq!(keys.seal(b"x", b"abc"), keys.seal(b"x", b"abc"));
        assert_ne!(keys.seal(b"x", b"abc")[..NONCE], keys.seal(b"x", b"abd")[..NONCE]);
        assert_ne!(keys.seal(b"x", b"abc")[..NONCE], keys.seal(b"xa", b"bc")[..NONCE]);
    }

    #[test]
    fn ids_and_names_differ_by_key() {
        let (one, two) = (Cipher::Keyed(Box::new(Keys::derive(&[1; 32]))), Cipher::Keyed(Box::new(Keys::derive(&[2; 32]))));
        assert_ne!(one.chunk_id(b"x"), two.chunk_id(b"x"));
        assert_ne!(one.chunk_id(b"x"), Cipher::Plain.chunk_id(b"x"));
        assert_ne!(one.manifest_object("x"), two.manifest_object("x"));
    }
}
