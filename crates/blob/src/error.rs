//! What can go wrong, told apart by what the caller can do about it.

use crate::id::ChunkId;
use std::{path::PathBuf, sync::Arc, time::Duration};

/// Why something in a repository couldn't be done. Cheap to copy: many may wait for one upload.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// Bytes in the store are not what was written. Nothing of them was given out.
    #[error("{}{object} is damaged: {what}", of_chunk(chunk))]
    Damaged {
        /// The object's path in the repository.
        object: String,
        /// The chunk that was being read.
        chunk: Option<ChunkId>,
        what: String,
    },
    /// Something that others refer to is not in the store.
    #[error("{}{what} is missing from the repository", of_chunk(chunk))]
    Missing { what: String, chunk: Option<ChunkId> },
    /// No wrapped key in the repository belongs to the key that was given.
    #[error("wrong key: it opens none of the {found} keys of the repository {store}")]
    WrongKey { store: String, found: usize },
    /// An encrypted repository was opened without a key.
    #[error("the repository {store} is encrypted: give its key")]
    KeyNeeded { store: String },
    /// A repository without encryption was opened with a key.
    #[error("the repository {store} is not encrypted, but a key was given: leave the key out, or make a new repository with it")]
    NotEncrypted { store: String },
    /// The key itself couldn't be had.
    #[error("no key from {from}: {what}")]
    KeySource { from: String, what: String },
    /// Written by a newer version of this software.
    #[error("{object} has format {found}, this version reads up to {known}: use a newer one")]
    Newer { object: String, found: u32, known: u32 },
    /// The store didn't answer for the whole time that was allowed. May work later.
    #[error("the store {store} can't be reached ({what}); tried for {} s", tried.as_secs())]
    Unreachable { store: String, what: String, tried: Duration },
    /// The store answers, and refuses: credentials or permissions.
    #[error("the store {store} refuses access: {what}; check its credentials and permissions")]
    Refused { store: String, what: String },
    /// The store is full.
    #[error("no space left in the store {store}: {what}")]
    NoSpace { store: String, what: String },
    /// The store failed in another way, which trying again doesn't mend.
    #[error("the store {store} failed: {what}")]
    Store { store: String, what: String },
    /// There is no repository at this place.
    #[error("there is no repository at {store}")]
    NoRepository { store: String },
    /// There is a repository at this place already.
    #[error("there is a repository at {store} already")]
    Exists { store: String },
    /// The place itself makes no sense.
    #[error("'{text}' is no place for a repository: {what}")]
    Location { text: String, what: String },
    /// Another server writes into this repository.
    #[error("the repository {store} is in use by the server {by} since {since}; if that one is gone for good, take it over")]
    InUse { store: String, by: String, since: model::Timestamp },
    /// Opened for reading only.
    #[error("the repository {store} was opened for reading only")]
    ReadOnly { store: String },
    /// A manifest of this name is there, with other contents. Manifests never change.
    #[error("there is a manifest '{name}' already, with other contents")]
    ManifestExists { name: String },
    /// A manifest's name has to be short and plain.
    #[error("'{name}' can't be a manifest's name: 1 to 200 letters, digits, '-', '_' or '.', no '.' in front")]
    ManifestName { name: String },
    /// More than the format allows.
    #[error("{what} has {bytes} bytes, the limit is {limit}")]
    TooLarge { what: String, bytes: u64, limit: u64 },
    /// The caller's own reader or writer failed.
    #[error("{what}: {source}")]
    Io { what: String, source: Arc<std::io::Error> },
    /// Asked for by the caller.
    #[error("cancelled")]
    Cancelled,
    /// A task of ours ended too early: a fault in this program, or the end of its runtime.
    #[error("{0} ended before its work was done")]
    Aborted(String),
}

fn of_chunk(chunk: &Option<ChunkId>) -> String {
    chunk.map(|id| format!("chunk {id}: ")).unwrap_or_default()
}

impl Error {
    pub(crate) fn damaged(object: impl Into<String>, what: impl Into<String>) -> Error {
        Error::Damaged { object: object.into(), chunk: None, what: what.into() }
    }

    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Error {
        Error::Io { what: what.into(), source: Arc::new(source) }
    }

    /// Puts the chunk's id to an error about the object that it lies in.
    pub(crate) fn for_chunk(self, id: ChunkId) -> Error {
        match self {
            Error::Damaged { object, what, .. } => Error::Damaged { object, what, chunk: Some(id) },
            Error::Missing { what, .. } => Error::Missing { what, chunk: Some(id) },
            other => other,
        }
    }

    /// True where the same call may succeed later without anybody changing anything.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Unreachable { .. } | Error::NoSpace { .. } | Error::Cancelled | Error::Aborted(_) => true,
            Error::Damaged { .. }
            | Error::Missing { .. }
            | Error::WrongKey { .. }
            | Error::KeyNeeded { .. }
            | Error::NotEncrypted { .. }
            | Error::KeySource { .. }
            | Error::Newer { .. }
            | Error::Refused { .. }
            | Error::Store { .. }
            | Error::NoRepository { .. }
            | Error::Exists { .. }
            | Error::Location { .. }
            | Error::InUse { .. }
            | Error::ReadOnly { .. }
            | Error::ManifestExists { .. }
            | Error::ManifestName { .. }
            | Error::TooLarge { .. }
            | Error::Io { .. } => false,
        }
    }

    /// True where what was stored is not there any more, or not as it was: trying again is of no use.
    pub fn is_loss(&self) -> bool {
        matches!(self, Error::Damaged { .. } | Error::Missing { .. })
    }
}

/// A key file or command that couldn't be read.
pub(crate) fn key_file(path: &std::path::Path, source: &std::io::Error) -> Error {
    Error::KeySource { from: PathBuf::from(path).display().to_string(), what: source.to_string() }
}
