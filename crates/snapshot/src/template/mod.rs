//! Templates: immutable trees of files that sandboxes start from, found by name, kept by content address.
//!
//! ```text
//! TEMPLATES/trees/HASH/         a root tree; never changed after it has its name
//! TEMPLATES/trees/HASH.json     what it is; written before the tree gets its name
//! TEMPLATES/names/NAME          the hash that the name means now
//! TEMPLATES/pins/HASH/WHO       somebody needs this tree
//! TEMPLATES/tmp/                trees being built or removed, each with the lock of who does it
//! TEMPLATES/.lock-NAME          held while NAME is built in
//! TEMPLATES/.lock               held while trees, names and pins change
//! ```
//! Several servers may share a folder. A process that dies at any point leaves either the old state or the new, and
//! rubbish in `tmp` that the next one removes.

mod common;
mod debian;
mod host;
mod store;
mod workspace;

pub use host::{Change, Changed};
pub use store::{Collected, TemplateStore};

use crate::{Hash, extract::ExtractError, tree::TreeError};
use model::Timestamp;
use serde::{Deserialize, Serialize};
use std::{
    io,
    path::{Path, PathBuf},
};

/// The version of the descriptor and of the folder's layout.
const FORMAT_VERSION: u32 = 1;

/// Why a template couldn't be made, found, pinned or removed.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error("there is no template '{0}'")]
    NotFound(String),
    #[error("'{0}' can't name a template: use 1 to 64 of a-z 0-9 . _ -, beginning with a letter or digit, and not a hash")]
    BadName(String),
    #[error("'{0}' can't be the owner of a pin: use 1 to 128 of A-Z a-z 0-9 . _ -, not beginning with a dot")]
    BadPin(String),
    #[error("the template {hash} was made by a newer version of this software (format {version})")]
    Newer { hash: Hash, version: u32 },
    #[error("the template {hash} is damaged: {what}")]
    Damaged { hash: Hash, what: String },
    #[error("{program} is missing: install it with `apt-get install {package}`")]
    Missing { program: &'static str, package: &'static str },
    #[error("building the template failed: {reason}\n{output}")]
    Build { reason: String, output: String },
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error(transparent)]
    Extract(#[from] ExtractError),
    #[error("can't {what} {}: {source}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
}

pub(crate) fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TemplateError {
    let path = path.to_owned();
    move |source| TemplateError::Io { what, path, source }
}

/// How a template was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateKind {
    Debian,
    Host,
    Dir,
    Tar,
    OciLayout,
}

/// What is written beside a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    pub format_version: u32,
    /// The content address of the tree, and its folder's name.
    pub hash: Hash,
    /// The name it was first made under; names may have moved on since.
    pub made_as: String,
    pub kind: TemplateKind,
    pub created_at: Timestamp,
    /// Bytes of content, hard links once; what `host` only links from the machine isn't counted.
    pub size_bytes: u64,
    /// Entries of any type.
    pub files: u64,
}

/// A template that was found: what to mount, and what to pin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateRef {
    pub hash: Hash,
    /// The name it was asked for by; the name it was made under where it was asked for by hash.
    pub name: String,
    pub root_path: PathBuf,
}

/// One line of [`TemplateStore::list`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub name: String,
    pub descriptor: Descriptor,
    pub pins: usize,
}
