//! What a layer says of itself: `layer.json`.

use super::{LayerError, TREE_DIR, io_error, measure::Measure};
use crate::sealed::{Seal, SealError};
use model::{LayerId, SessionId, Timestamp};
use serde::{Deserialize, Serialize};
use std::{fs::File, io, path::Path};

const FILE: &str = "layer.json";
const SEAL: Seal = Seal { magic: "dormouse-layer", format: 1, max_bytes: 64 << 10, faults: ["layer.write", "layer.described"] };

/// What a layer is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerDescriptor {
    /// Whose disk it was made of.
    pub session: SessionId,
    /// The moment that it shows.
    pub created_at: Timestamp,
    /// All allocated blocks.
    pub size_bytes: u64,
    /// Those that no other layer had when this one was made.
    pub own_bytes: u64,
    /// Files, directories, links and whiteouts.
    pub entries: u64,
}

#[derive(Serialize, Deserialize)]
struct Body {
    layer: LayerId,
    #[serde(flatten)]
    descriptor: LayerDescriptor,
}

impl LayerDescriptor {
    /// Describes the tree `tree` as it stands.
    pub(super) fn measured(tree: &File, session: SessionId, created_at: Timestamp) -> io::Result<LayerDescriptor> {
        let mut measure = Measure::default();
        measure.add(tree.try_clone()?.into())?;
        let (size_bytes, own_bytes, entries) = (measure.size_bytes, measure.own_bytes(), measure.entries);
        Ok(LayerDescriptor { session, created_at, size_bytes, own_bytes, entries })
    }

    /// Writes it into the layer's directory, durably.
    pub(super) fn write(&self, id: LayerId, dir: &Path) -> io::Result<()> {
        SEAL.write(dir, FILE, &Body { layer: id, descriptor: self.clone() })
    }

    /// Reads the descriptor of the layer `id`, which lies in `dir`.
    pub(super) fn read(id: LayerId, dir: &Path) -> Result<LayerDescriptor, LayerError> {
        let damaged = |what: String| LayerError::Damaged { id, what };
        let body: Body = SEAL.read(&dir.join(FILE)).map_err(|error| match error {
            SealError::Missing => LayerError::Missing(id),
            SealError::Damaged(what) => damaged(what),
            SealError::Newer(found) => LayerError::Newer { id, found, newest: SEAL.format },
            SealError::Io(source) => io_error("read", dir)(source),
        })?;
        if body.layer != id {
            return Err(damaged(format!("it is the layer {}", body.layer)));
        }
        if !dir.join(TREE_DIR).is_dir() {
            return Err(damaged("its files are gone".to_owned()));
        }
        Ok(body.descriptor)
    }
}
