//! Packing: from the files beside the sessions into the store.

use super::{parcel_error, store_error};
use crate::{Error, inner::Inner, inner::blocking, shelf};
use blob::{Chunking, Repository, StreamRef, Writer};
use model::{Generation, LayerId, SessionId, SnapshotId};
use serde_json::Value;
use snapshot::{
    image::ImageDescriptor,
    parcel::{
        GuestPart, ImagePart, JournalPart, LayerPart, Manifest, ParcelKind, Requires, RunscPart, TemplatePart, TreeRef,
        pack_file, pack_files, pack_image, pack_tree,
    },
};
use std::{path::PathBuf, sync::Arc};
use store::{Parcel, SessionRow, SnapshotRow};
use wire::layout::SessionLayout;

/// What a fork has anew.
const RENEWED: [&str; 5] = ["session_id", "hostname", "machine_id", "kernel_randomness", "outside_connections"];

/// What is packed of a session or a snapshot.
pub(crate) struct Contents {
    pub kind: ParcelKind,
    /// Its place.
    pub layout: SessionLayout,
    pub generation: Generation,
    pub disk_epoch: u64,
    /// The upper directory goes, too.
    pub has_upper: bool,
    pub image: Option<Generation>,
    pub layers: Vec<LayerId>,
    pub template_hash: Option<String>,
    pub guest_hash: Option<String>,
    pub runsc_hash: Option<String>,
    pub row: Value,
    pub session: Option<Value>,
    pub history: Option<super::carry::History>,
    /// Where the journals of what had ended lie, where that is elsewhere.
    pub more_journals: Option<SessionLayout>,
}

impl Contents {
    /// Of a session that sleeps.
    pub(crate) fn of_session(inner: &Inner, row: &SessionRow) -> Contents {
        Contents {
            kind: ParcelKind::Session,
            layout: inner.layout(row.id),
            generation: row.generation,
            disk_epoch: row.disk_epoch,
            has_upper: true,
            image: row.image_generation,
            layers: row.layers.clone(),
            template_hash: row.template_hash.clone(),
            guest_hash: row.guest_hash.clone(),
            runsc_hash: row.runsc_hash.clone(),
            row: Value::Null,
            session: serde_json::to_value(row).ok(),
            history: None,
            more_journals: None,
        }
    }

    /// Of a snapshot.
    pub(crate) fn of_snapshot(inner: &Inner, row: &SnapshotRow) -> Contents {
        Contents {
            kind: ParcelKind::Snapshot,
            layout: inner.shelf.layout(row.id),
            generation: row.generation,
            disk_epoch: row.disk_epoch,
            has_upper: false,
            image: row.memory.then_some(row.generation),
            layers: row.layers.clone(),
            template_hash: row.template_hash.clone(),
            guest_hash: row.guest_hash.clone(),
            runsc_hash: row.runsc_hash.clone(),
            row: serde_json::to_value(row).unwrap_or(Value::Null),
            session: None,
            history: None,
            more_journals: None,
        }
    }
}

/// The manifest of a session's parcel. Each packing has one of its own: manifests never change.
pub(crate) fn session_manifest(id: SessionId, at: model::Timestamp) -> String {
    format!("session-{id}-{}", at.0)
}

/// The manifest of a snapshot's parcel.
pub(crate) fn snapshot_manifest(id: SnapshotId, at: model::Timestamp) -> String {
    format!("snapshot-{id}-{}", at.0)
}

/// Packs, and stores the manifest under this name. The caller holds the gate until a row names it.
pub(super) async fn pack(inner: &Arc<Inner>, name: &str, contents: &Contents) -> Result<Parcel, Error> {
    let repository = inner.depot.repository().await?;
    let (manifest, written, own_bytes) = pack_into(inner, &repository, name, contents).await?;
    inner.depot.known().learn(&manifest);
    Ok(Parcel {
        manifest: name.to_owned(),
        packed_at: manifest.made_at,
        generation: contents.generation,
        disk_epoch: contents.disk_epoch,
        plain_bytes: manifest.streams().map(|stream| stream.len).sum(),
        disk_bytes: manifest.upper.as_ref().map_or(0, |tree| tree.plain_bytes),
        own_bytes,
        new_bytes: written,
        is_away: false,
    })
}

/// Packs into any repository. Answers the manifest, the bytes that the repository didn't have, and those of the files that
/// nothing else has: upper directory, memory, journals.
pub(crate) async fn pack_into(
    inner: &Arc<Inner>,
    repository: &Repository,
    name: &str,
    contents: &Contents,
) -> Result<(Manifest, u64, u64), Error> {
    let writer = repository.writer().map_err(store_error)?;
    let own = repository.id() == inner.depot.repository().await?.id();
    let packer = Packer { inner, writer: &writer, knows: own };
    let manifest = packer.manifest(contents).await?;
    faults::point("pack.written");
    let bytes = manifest.encode().map_err(parcel_error)?;
    let written = writer.commit(name, &bytes).await.map_err(store_error)?;
    faults::point("pack.stored");
    let upper = manifest.upper.iter().map(|tree| tree.plain_bytes);
    let files = manifest.image.iter().flat_map(|part| &part.image.files);
    let files = files.chain(manifest.journals.iter().flat_map(|part| &part.segments)).map(|(_, stream)| stream.len);
    let own_bytes = upper.chain(files).sum();
    Ok((manifest, written.new_bytes, own_bytes))
}

struct Packer<'a> {
    inner: &'a Arc<Inner>,
    writer: &'a Writer,
    /// True where what is known to be stored is stored in this repository.
    knows: bool,
}

impl Packer<'_> {
    async fn manifest(&self, contents: &Contents) -> Result<Manifest, Error> {
        let layout = &contents.layout;
        let image = match contents.image {
            Some(generation) => Some(self.image(layout, generation).await?),
            None => None,
        };
        let upper = match contents.has_upper {
            true => Some(self.tree(layout.upper()).await?),
            false => None,
        };
        let mut layers = Vec::with_capacity(contents.layers.len());
        for id in &contents.layers {
            layers.push(self.layer(*id).await?);
        }
        let requires = image.as_ref().map(requires).unwrap_or_default();
        let (guest, runsc) = match contents.image {
            Some(_) => (self.guest(contents).await?, self.runsc(contents).await?),
            // A disk is booted with what is there then.
            None => (None, None),
        };
        Ok(Manifest {
            kind: contents.kind,
            made_at: self.inner.now(),
            server_version: env!("CARGO_PKG_VERSION").to_owned(),
            row: contents.row.clone(),
            session: contents.session.clone(),
            upper,
            layers,
            image,
            journals: self.journals(contents).await?,
            template: self.template(contents).await?,
            guest,
            runsc,
            requires,
            renews: RENEWED.map(str::to_owned).to_vec(),
            history: self.history(contents).await?,
        })
    }

    async fn tree(&self, dir: PathBuf) -> Result<TreeRef, Error> {
        pack_tree(&dir, self.writer).await.map_err(parcel_error)
    }

    async fn image(&self, layout: &SessionLayout, generation: Generation) -> Result<ImagePart, Error> {
        let dir = layout.image(generation);
        let read = dir.clone();
        let descriptor = blocking(move || ImageDescriptor::read(&read)).await?.map_err(|e| super::image_error(None, e))?;
        let image = pack_image(&dir, self.writer).await.map_err(parcel_error)?;
        Ok(ImagePart { generation, descriptor, image })
    }

    async fn layer(&self, id: LayerId) -> Result<LayerPart, Error> {
        if let Some(part) = self.known(|known| known.layers.get(&id).cloned()) {
            return Ok(part);
        }
        let inner = self.inner.clone();
        let read = blocking(move || inner.shelf.layers.read(id)).await?;
        let descriptor = read.map_err(crate::take::layer_error)?.descriptor;
        Ok(LayerPart { id, descriptor, tree: self.tree(self.inner.shelf.layers.path(id)).await? })
    }

    async fn journals(&self, contents: &Contents) -> Result<Vec<JournalPart>, Error> {
        let mut parts: Vec<JournalPart> = Vec::new();
        for layout in [Some(&contents.layout), contents.more_journals.as_ref()].into_iter().flatten() {
            let dir = layout.dir().to_owned();
            let paths = blocking(move || shelf::journals_of(&dir)).await?;
            for path in paths.map_err(|e| crate::launch::io_error(&e, "read the journals"))? {
                // The facts of a session that goes on tell of what comes after this moment.
                let is_later = path == shelf::FACTS && contents.more_journals.is_some();
                if is_later || parts.iter().any(|part| part.path == path) {
                    continue;
                }
                let segments = pack_files(&layout.dir().join(&path), |_| true, self.writer).await.map_err(parcel_error)?;
                parts.push(JournalPart { path, segments });
            }
        }
        Ok(parts)
    }

    async fn history(&self, contents: &Contents) -> Result<Option<StreamRef>, Error> {
        let Some(history) = &contents.history else { return Ok(None) };
        let text = history.encode()?;
        let stream = self.writer.write_stream(&text[..], Chunking::Content).await.map_err(store_error)?;
        Ok(Some(stream))
    }

    async fn template(&self, contents: &Contents) -> Result<Option<TemplatePart>, Error> {
        let Some(hash) = contents.template_hash.clone() else { return Ok(None) };
        if let Some(part) = self.known(|known| known.templates.get(&hash.parse().ok()?).cloned()) {
            return Ok(Some(part));
        }
        let inner = self.inner.clone();
        let found = blocking(move || {
            let found = inner.programs.templates.resolve(&hash)?;
            let descriptor = inner.programs.templates.descriptor(found.hash)?;
            Ok((found, descriptor))
        });
        let (found, descriptor) = found.await?.map_err(crate::programs::template_error)?;
        let tree = self.tree(found.root_path).await?;
        let descriptor = serde_json::to_value(&descriptor).map_err(Error::internal)?;
        Ok(Some(TemplatePart { hash: found.hash, name: found.name, descriptor, tree }))
    }

    async fn guest(&self, contents: &Contents) -> Result<Option<GuestPart>, Error> {
        let Some(hash) = contents.guest_hash.as_deref().and_then(|hash| hash.parse().ok()) else { return Ok(None) };
        if let Some(part) = self.known(|known| known.guests.get(&hash).cloned()) {
            return Ok(Some(part));
        }
        let layer = self.inner.programs.binaries.layer_of(hash).map_err(Error::internal)?;
        Ok(Some(GuestPart { hash, tree: self.tree(layer).await? }))
    }

    async fn runsc(&self, contents: &Contents) -> Result<Option<RunscPart>, Error> {
        let Some(hash) = contents.runsc_hash.as_deref().and_then(|hash| hash.parse().ok()) else { return Ok(None) };
        if let Some(part) = self.known(|known| known.runscs.get(&hash).cloned()) {
            return Ok(Some(part));
        }
        let program = self.inner.programs.binaries.get(hash).map_err(Error::internal)?.path;
        let stream = pack_file(&program, self.writer).await.map_err(parcel_error)?;
        let version = blocking(move || runtime_gvisor::runsc_version(&program).unwrap_or_default()).await?;
        Ok(Some(RunscPart { hash, version, stream }))
    }

    fn known<T>(&self, look: impl FnOnce(&super::Known) -> Option<T>) -> Option<T> {
        if self.knows { look(&self.inner.depot.known()) } else { None }
    }
}

fn requires(part: &ImagePart) -> Requires {
    Requires {
        runtime: part.descriptor.runtime.clone(),
        runtime_version: part.descriptor.runsc_version.clone(),
        cpu_features: part.descriptor.cpu_features.iter().cloned().collect(),
        memory_bytes: part.descriptor.size_bytes(),
        generation: Some(part.generation),
    }
}
