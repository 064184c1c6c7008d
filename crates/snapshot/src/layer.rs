//! Disk layers: what a session had changed on its disk up to a moment, kept for ever as it was.
//!
//! A session's disk is an overlay: its own *upper* directory above layers that nobody writes to. A snapshot copies the upper
//! directory into a layer; forks go on above that layer with an upper directory of their own, the source keeps its own.
//!
//! ```text
//! LAYERS/ID/tree/        the layer, for an overlay's `lowerdir`: exactly what the upper directory was, with its whiteouts,
//!                        opaque and redirected directories, hard links, holes, owners, modes, attributes and times
//! LAYERS/ID/prints       what the files of the upper directory looked like, so that the next layer shares unchanged ones
//! LAYERS/ID/layer.json   the descriptor, written last
//! LAYERS/.new-ID/        a layer that is being made;  LAYERS/.gone-ID/  one that is being removed
//! ```
//!
//! # Capture
//!
//! ```text
//! Capture::begin ─► precopy (programs run) ─► … they are stopped … ─► freeze ─► … they run again … ─► finish
//! ```
//! [`Capture::precopy`] copies what has been calm for a moment, [`Capture::freeze`] walks again and copies what has changed
//! since or may have: it looks at each file once, and reads only those. What a file looks like is its [`print`]: that page
//! says why that is enough.
//!
//! A file that looks as it did in the session's previous layer is a hard link to the file there: both are immutable. Never
//! is one made to a file of the upper directory. Else blocks are shared where the file system can (reflinks), else copied.
//!
//! What is read was made by strangers, and is changed by them while it is read. Nothing is followed, everything is reached
//! by descriptors of its directory, and only what is known to be a regular file is opened. [`dirs`] is about trees that are
//! deeper than any path, [`xattr`] about the attributes that a copy keeps. Of what a disk never has, FIFOs, sockets and
//! devices, the layer has a whiteout: it shows nothing there, and nothing that the thing hid.
//!
//! # What forks see
//!
//! The same as the source, in all that stat(2) tells but two things: a file that layers share tells a link count that
//! includes theirs, and of several names of one file a write through one is not seen through the others, since the overlay
//! copies up one name at a time (`index=off`: see `overlay.rs`). The root directory's own owner and mode are the upper
//! directory's: [`LayerStore::dress_root`] hands them on.
//!
//! [`flatten`] makes one layer of many.

mod capture;
pub(crate) mod clear;
pub(crate) mod content;
mod descriptor;
pub(crate) mod dirs;
mod flatten;
mod measure;
mod print;
mod prints;
mod staging;
mod store;
pub(crate) mod xattr;

pub use capture::Capture;
pub use descriptor::LayerDescriptor;
pub use flatten::flatten;
pub use store::LayerStore;

use model::LayerId;
use std::{
    io,
    path::{Path, PathBuf},
};

/// A layer's tree in its directory.
const TREE_DIR: &str = "tree";
/// Beside it while the layer is made: see [`staging`].
const TRASH_DIR: &str = "trash";
/// What the name of a layer's directory begins with while it is made, and while it is removed.
const STAGED: &str = ".new-";
const GONE: &str = ".gone-";

/// A whole layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    pub id: LayerId,
    pub descriptor: LayerDescriptor,
}

/// Why a layer couldn't be made, read or removed.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("there is no disk layer {0}")]
    Missing(LayerId),
    #[error("the disk layer {id} is damaged: {what}")]
    Damaged { id: LayerId, what: String },
    #[error("the disk layer {id} has format {found}, this version reads up to {newest}: use a newer one")]
    Newer { id: LayerId, found: u32, newest: u32 },
    #[error("{} was changed while the session stood still: something else writes to its disk", path.display())]
    Moved { path: PathBuf },
    #[error("the disk layer {0} was never frozen, so it is of no single moment")]
    Unfrozen(LayerId),
    #[error("there is nothing to make a layer of: the chain is empty")]
    NoChain,
    #[error("can't {what} {}: {source}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
}

impl LayerError {
    /// The file operation that failed, if that is what went wrong.
    pub fn io(&self) -> Option<&io::Error> {
        match self {
            LayerError::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LayerError + use<> {
    let path = path.to_owned();
    move |source| LayerError::Io { what, path, source }
}

#[cfg(test)]
mod tests;
