//! Small JSON files that say what they are and whether they are whole: a magic word, a format, a checksum of the rest.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
};

/// One kind of such files.
pub(crate) struct Seal {
    /// First word of every file of the kind.
    pub(crate) magic: &'static str,
    /// The format that this build writes, and the newest that it reads.
    pub(crate) format: u32,
    /// The longest file that is read.
    pub(crate) max_bytes: u64,
    /// The points at which a test may fail the writing and the renaming.
    pub(crate) faults: [&'static str; 2],
}

/// Why a file can't be used.
#[derive(Debug)]
pub(crate) enum SealError {
    Missing,
    Damaged(String),
    Newer(u32),
    Io(io::Error),
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    magic: String,
    format: u32,
    /// BLAKE3 of `body`'s bytes.
    blake3: String,
    /// The value as JSON text, so that the checksum is over exact bytes.
    body: String,
}

impl Seal {
    /// Puts a value at `dir/name`, whole or not at all, durably.
    pub(crate) fn write<T: Serialize>(&self, dir: &Path, name: &str, value: &T) -> io::Result<()> {
        let body = serde_json::to_string(value)?;
        let blake3 = blake3::hash(body.as_bytes()).to_hex().to_string();
        let text = serde_json::to_vec(&Envelope { magic: self.magic.to_owned(), format: self.format, blake3, body })?;
        let temporary = dir.join(format!(".{name}"));
        let [write, rename] = self.faults;
        faults::file(write)?;
        let mut file = File::create(&temporary)?;
        file.write_all(&text)?;
        file.sync_all()?;
        faults::file(rename)?;
        fs::rename(&temporary, dir.join(name))?;
        File::open(dir)?.sync_all()
    }

    /// Reads what [`Seal::write`] wrote. Of a newer format only the number is read.
    pub(crate) fn read<T: DeserializeOwned>(&self, path: &Path) -> Result<T, SealError> {
        let damaged = |what: String| SealError::Damaged(what);
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(SealError::Missing),
            other => other.map_err(SealError::Io)?,
        };
        let mut text = Vec::new();
        file.take(self.max_bytes + 1).read_to_end(&mut text).map_err(SealError::Io)?;
        if text.len() as u64 > self.max_bytes {
            return Err(damaged(format!("its descriptor is longer than {} bytes", self.max_bytes)));
        }
        let head: serde_json::Value =
            serde_json::from_slice(&text).map_err(|e| damaged(format!("its descriptor is no JSON: {e}")))?;
        if head["magic"] != self.magic {
            return Err(damaged("its descriptor is none".to_owned()));
        }
        match head["format"].as_u64().and_then(|format| u32::try_from(format).ok()) {
            Some(found) if found > self.format => return Err(SealError::Newer(found)),
            Some(_) => {}
            None => return Err(damaged("its descriptor has no format".to_owned())),
        }
        let envelope: Envelope = serde_json::from_value(head).map_err(|e| damaged(format!("its descriptor: {e}")))?;
        if blake3::hash(envelope.body.as_bytes()).to_hex().as_str() != envelope.blake3 {
            return Err(damaged("the checksum of its descriptor is wrong".to_owned()));
        }
        serde_json::from_str(&envelope.body).map_err(|e| damaged(format!("its descriptor: {e}")))
    }
}
