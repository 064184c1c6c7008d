//! Names made of hashes: of chunks and of packs.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{fmt, str::FromStr};

/// Text that is not a hash in hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no id: expected 64 hexadecimal digits")]
pub struct HashIdError(String);

macro_rules! hash_ids {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub [u8; 32]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = HashIdError;
            fn from_str(text: &str) -> Result<Self, HashIdError> {
                let hash = blake3::Hash::from_hex(text).map_err(|_| HashIdError(text.chars().take(80).collect()))?;
                Ok($name(*hash.as_bytes()))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(&blake3::Hash::from_bytes(self.0).to_hex())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}

hash_ids! {
    /// A chunk, by its plain contents: their BLAKE3, keyed where the repository is encrypted.
    ChunkId,
    /// A pack, by its trailer, which names all its chunks.
    PackId,
}

impl PackId {
    /// Where the pack lies in the repository. Spread over 256 folders, for the sake of file systems.
    pub(crate) fn path(&self) -> String {
        let hex = self.to_string();
        format!("packs/{}/{hex}", &hex[..2])
    }

    /// The pack that an object's path names.
    pub(crate) fn from_path(path: &str) -> Option<PackId> {
        let (folder, hex) = path.strip_prefix("packs/")?.split_once('/')?;
        let id: PackId = hex.parse().ok()?;
        (hex.starts_with(folder) && folder.len() == 2 && id.to_string() == hex).then_some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_read_back_as_they_were_written() {
        let id = ChunkId([0xa7; 32]);
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(serde_json::from_str::<ChunkId>(&serde_json::to_string(&id).unwrap()).unwrap(), id);
        assert!("a7".parse::<ChunkId>().is_err() && "g".repeat(64).parse::<ChunkId>().is_err());
    }

    #[test]
    fn a_pack_s_path_names_it() {
        let id = PackId([0x3c; 32]);
        assert_eq!(PackId::from_path(&id.path()), Some(id));
        for wrong in ["packs/3c", "packs/3c/x", "packs/3d/3c", &format!("packs/3d/{id}"), &format!("index/{id}")] {
            assert_eq!(PackId::from_path(wrong), None, "{wrong}");
        }
    }
}
