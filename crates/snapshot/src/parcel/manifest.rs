//! Manifests: what belongs together in a repository, and what it needs. A small object, written last.
//!
//! ```text
//! magic, format u32, BLAKE3 of the body, body: JSON
//! ```
//! A newer format is refused by its number, before anything else of it is read. What is added to the body without a new
//! number is ignored by older versions.

use super::{ImageRef, ParcelError, TreeRef};
use crate::{Hash, image::ImageDescriptor, layer::LayerDescriptor};
use blob::{MAX_MANIFEST, StreamRef};
use model::{Generation, LayerId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

const MAGIC: &[u8; 16] = b"dormouse-parcel\n";
/// The format that this build writes, and the newest that it reads.
const FORMAT: u32 = 1;
const HASH_BYTES: usize = 32;

/// What a manifest is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParcelKind {
    Snapshot,
    /// A session that isn't running.
    Session,
    /// A session on its way to another server.
    Export,
    /// All that a server has; its row names the other manifests.
    Backup,
}

/// What belongs together. Rows are the caller's own, and kept as they are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub kind: ParcelKind,
    pub made_at: Timestamp,
    /// The version of the server that made it.
    pub server_version: String,
    /// The snapshot.
    #[serde(default)]
    pub row: Value,
    /// The session and what ran in it.
    #[serde(default)]
    pub session: Option<Value>,
    /// The session's own part of its disk, on top of all layers.
    #[serde(default)]
    pub upper: Option<TreeRef>,
    /// The disk above the guest's layer and the template, top first.
    #[serde(default)]
    pub layers: Vec<LayerPart>,
    #[serde(default)]
    pub image: Option<ImagePart>,
    #[serde(default)]
    pub journals: Vec<JournalPart>,
    #[serde(default)]
    pub template: Option<TemplatePart>,
    #[serde(default)]
    pub guest: Option<GuestPart>,
    #[serde(default)]
    pub runsc: Option<RunscPart>,
    #[serde(default)]
    pub requires: Requires,
    /// What a fork of it has anew, in words.
    #[serde(default)]
    pub renews: Vec<String>,
    /// What doesn't fit into rows, as the caller writes it.
    #[serde(default)]
    pub history: Option<StreamRef>,
}

/// A disk layer: see [`LayerStore::adopt`](crate::layer::LayerStore::adopt).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerPart {
    pub id: LayerId,
    pub descriptor: LayerDescriptor,
    pub tree: TreeRef,
}

/// A memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImagePart {
    pub generation: Generation,
    pub descriptor: ImageDescriptor,
    pub image: ImageRef,
}

/// A journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalPart {
    /// Of its directory, in the session's.
    pub path: String,
    /// Names and bytes.
    pub segments: Vec<(String, StreamRef)>,
}

/// A template: see [`TemplateStore::adopt`](crate::template::TemplateStore::adopt).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TemplatePart {
    pub hash: Hash,
    pub name: String,
    pub descriptor: Value,
    pub tree: TreeRef,
}

/// A guest, as the layer of a disk: a restore compares the times of files, so the program alone wouldn't do.
/// See [`BinaryStore::adopt_layer`](crate::pin::BinaryStore::adopt_layer).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestPart {
    pub hash: Hash,
    pub tree: TreeRef,
}

/// A runtime's program: see [`BinaryStore::adopt`](crate::pin::BinaryStore::adopt).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunscPart {
    pub hash: Hash,
    pub version: String,
    pub stream: StreamRef,
}

/// What a machine must have for the memory to go on. The disk needs nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requires {
    #[serde(default)]
    pub runtime: String,
    #[serde(default)]
    pub runtime_version: String,
    #[serde(default)]
    pub cpu_features: Vec<String>,
    #[serde(default)]
    pub memory_bytes: u64,
    #[serde(default)]
    pub generation: Option<Generation>,
}

impl Manifest {
    /// # Errors
    /// [`ParcelError::TooLarge`].
    pub fn encode(&self) -> Result<Vec<u8>, ParcelError> {
        let body = serde_json::to_vec(self).map_err(|e| ParcelError::Damaged(e.to_string()))?;
        let mut bytes = Vec::with_capacity(MAGIC.len() + 4 + HASH_BYTES + body.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&FORMAT.to_le_bytes());
        bytes.extend_from_slice(blake3::hash(&body).as_bytes());
        bytes.extend_from_slice(&body);
        check_length(&bytes)?;
        Ok(bytes)
    }

    /// # Errors
    /// [`ParcelError::Newer`], [`ParcelError::Damaged`], [`ParcelError::TooLarge`].
    pub fn decode(bytes: &[u8]) -> Result<Manifest, ParcelError> {
        let damaged = |what: &str| ParcelError::Damaged(what.to_owned());
        check_length(bytes)?;
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| damaged("it is none"))?;
        let (format, rest) = rest.split_first_chunk().ok_or_else(|| damaged("it is cut off"))?;
        match u32::from_le_bytes(*format) {
            0 => return Err(damaged("it has format 0")),
            found if found > FORMAT => return Err(ParcelError::Newer { what: "the manifest", found, newest: FORMAT }),
            _ => {}
        }
        let (hash, body) = rest.split_at_checked(HASH_BYTES).ok_or_else(|| damaged("it is cut off"))?;
        if blake3::hash(body).as_bytes() != hash {
            return Err(damaged("its checksum is wrong"));
        }
        serde_json::from_slice(body).map_err(|e| ParcelError::Damaged(e.to_string()))
    }

    /// All that it refers to: what a collection must leave alone.
    pub fn streams(&self) -> impl Iterator<Item = &StreamRef> {
        let trees = self.upper.iter().chain(self.layers.iter().map(|part| &part.tree));
        let trees = trees.chain(self.template.iter().map(|part| &part.tree)).chain(self.guest.iter().map(|part| &part.tree));
        let images = self.image.iter().flat_map(|part| &part.image.files);
        let files = images.chain(self.journals.iter().flat_map(|part| &part.segments)).map(|(_, stream)| stream);
        trees.map(|tree| &tree.stream).chain(files).chain(self.runsc.iter().map(|part| &part.stream)).chain(&self.history)
    }
}

fn check_length(bytes: &[u8]) -> Result<(), ParcelError> {
    match bytes.len() {
        length if length > MAX_MANIFEST => Err(ParcelError::TooLarge { bytes: length, limit: MAX_MANIFEST }),
        _ => Ok(()),
    }
}
