//! Parcels: what of a snapshot goes into the blob store, and back. It knows no sessions: what belongs together is the
//! caller's to say, in a [`Manifest`].
//!
//! ```text
//! a tree (a disk layer, a template, a guest's layer)   one stream: `format` has it       pack_tree    unpack_tree
//! a memory image                                       a stream for each of its files    pack_image   unpack_image
//! a program                                            a stream                          pack_file    unpack_file
//! a journal                                            a stream for each of its segments pack_files   unpack_files
//! ```
//! Many small files share a stream, and so chunks: a store of a million objects is slow everywhere. A tree's stream depends
//! on what is in the tree and on nothing else, so equal trees are stored once.
//!
//! What comes back may have been written by anybody, and may be damaged. A chunk is compared with its hash before a byte of
//! it is used; the rest of this module checks what the chunks say. Where a part is lost the error names the file that it
//! belongs to, and what had been unpacked is removed.
//!
//! Nothing of it is durable before [`sync`].

mod feed;
mod files;
mod format;
mod manifest;
mod pack;
mod pour;
mod unpack;

pub use files::{ImageRef, pack_file, pack_files, pack_image, unpack_file, unpack_files, unpack_image};
pub use manifest::{GuestPart, ImagePart, JournalPart, LayerPart, Manifest, ParcelKind, Requires, RunscPart, TemplatePart};
pub use pack::pack_tree;
pub use unpack::unpack_tree;

use crate::{Hash, image::ImageError, layer::clear};
use blob::StreamRef;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::{
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

/// A tree in a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRef {
    pub stream: StreamRef,
    /// Files, directories, links and whiteouts, without the root.
    pub entries: u64,
    /// Bytes of files, each file once, holes left out.
    pub plain_bytes: u64,
    /// Of the stream. In one repository, equal trees have equal digests, and other trees have others.
    pub digest: Hash,
}

impl TreeRef {
    fn digest_of(stream: &StreamRef) -> Hash {
        blake3::Hash::from_bytes(stream.digest()).into()
    }
}

/// Why something couldn't be packed or unpacked. What the store says of a part that is lost has the file that it belongs to.
#[derive(Debug, thiserror::Error)]
pub enum ParcelError {
    #[error("{} can't be restored, its bytes from {offset} on are lost: {source}", path.display())]
    File { path: PathBuf, offset: u64, source: blob::Error },
    /// Its name is lost as well.
    #[error("what comes after {} can't be restored: {source}", path.display())]
    After { path: PathBuf, source: blob::Error },
    #[error(transparent)]
    Store(blob::Error),
    #[error("{} was changed while it was packed", .0.display())]
    Changed(PathBuf),
    #[error("{} has no name that can be written down", .0.display())]
    Name(PathBuf),
    #[error("the stored tree can't be one: {what}, at {} (byte {offset} of its stream)", path.display())]
    Malformed { path: PathBuf, offset: u64, what: &'static str },
    #[error("{what} has format {found}, this version reads up to {newest}: use a newer one")]
    Newer { what: &'static str, found: u32, newest: u32 },
    #[error("the manifest is damaged: {0}")]
    Damaged(String),
    #[error("the manifest has {bytes} bytes, the limit is {limit}")]
    TooLarge { bytes: usize, limit: usize },
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("can't {what} {}: {source}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
}

impl ParcelError {
    /// What the store said, if it was the store.
    pub fn store(&self) -> Option<&blob::Error> {
        match self {
            ParcelError::File { source, .. } | ParcelError::After { source, .. } | ParcelError::Store(source) => Some(source),
            _ => None,
        }
    }

    /// True where stored bytes are damaged or gone: trying again is of no use.
    pub fn is_loss(&self) -> bool {
        match self {
            ParcelError::Malformed { .. } | ParcelError::Damaged(_) => true,
            ParcelError::Image(error) => matches!(error, ImageError::Damaged { .. } | ImageError::Missing(_)),
            other => other.store().is_some_and(blob::Error::is_loss),
        }
    }

    /// True where the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, ParcelError::Changed(_)) || self.store().is_some_and(blob::Error::is_retryable)
    }
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ParcelError + use<> {
    let path = path.to_owned();
    move |source| ParcelError::Io { what, path, source }
}

/// Makes everything durable that was unpacked on the file system of `dir`. Blocks.
///
/// # Errors
/// [`ParcelError::Io`].
pub fn sync(dir: &Path) -> Result<(), ParcelError> {
    let synced = faults::file("parcel.sync").and_then(|()| Ok(rustix::fs::syncfs(open_dir(dir)?)?));
    synced.map_err(io_error("sync", dir))
}

/// Removes an unpacked tree, however deep it is; fine if there is none. Blocks.
///
/// # Errors
/// [`ParcelError::Io`].
pub fn remove(dir: &Path) -> Result<(), ParcelError> {
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else {
        return Err(io_error("remove", dir)(io::ErrorKind::InvalidInput.into()));
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let removed = open_dir(parent).and_then(|parent| clear::remove(parent.as_fd(), name));
    match removed {
        Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(error) => Err(io_error("remove", dir)(error.into())),
    }
}

fn open_dir(dir: &Path) -> rustix::io::Result<std::os::fd::OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(dir, flags, Mode::empty())
}

/// Runs what blocks on a thread that may.
async fn blocking<T: Send + 'static>(
    what: &'static str,
    job: impl FnOnce() -> Result<T, ParcelError> + Send + 'static,
) -> Result<T, ParcelError> {
    match tokio::task::spawn_blocking(job).await {
        Ok(done) => done,
        Err(error) => Err(ParcelError::Store(blob::Error::Aborted(format!("{what} ({error})")))),
    }
}

#[cfg(test)]
mod tests;
