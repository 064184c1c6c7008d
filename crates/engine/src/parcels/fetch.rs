//! Fetching: from the store back to files, before anything needs them.
//!
//! Everything is unpacked beside its place, put there by renames, synced, and only then does the row say that it is there.
//! Whoever was cut off on the way begins anew: what lies in the place of something that is away is a part of it at most.

use super::{Depot, image_error, is_away, parcel_error, present};
use crate::{
    Error, create, ending,
    inner::{Inner, blocking},
    launch::{ensure_private_dir, io_error, write_private},
    programs::template_error,
    session::Session,
    shelf,
};
use blob::Repository;
use model::{Generation, LayerId, SnapshotId};
use snapshot::{
    Hash,
    image::{DISK, ImageDescriptor},
    parcel::{self, Manifest, unpack_file, unpack_files, unpack_image, unpack_tree},
    template::Descriptor,
};
use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
};
use store::{SessionChange, SessionRow, SnapshotRow};
use wire::layout::SessionLayout;

/// Fetches the files of a session that sleeps, where they are away. Who needs them for a while holds `session.at_rest` from
/// before this on: they aren't given up meanwhile.
///
/// # Errors
/// What the store says, before anything was put in place: [`Error::ObjectStore`], [`Error::Damaged`] with the file.
pub(crate) async fn ensure_local(inner: &Arc<Inner>, session: &Arc<Session>) -> Result<(), Error> {
    if is_away(&session.view().row) { bring(inner, session, false).await } else { Ok(()) }
}

/// The same for what is going to change its disk: what the store has is the session's no longer.
///
/// # Errors
/// As [`ensure_local`].
pub(crate) async fn ensure_own(inner: &Arc<Inner>, session: &Arc<Session>) -> Result<(), Error> {
    // Whoever packed it and saw nothing under way has committed that by then; whoever looks later sees this operation.
    drop(session.launching.acquire().await.map_err(|_| Error::ShuttingDown)?);
    if session.view().row.parcel.is_some() { bring(inner, session, true).await } else { Ok(()) }
}

/// Seen through, whether or not the caller stays: a delete waits for it.
async fn bring(inner: &Arc<Inner>, session: &Arc<Session>, give_up: bool) -> Result<(), Error> {
    let (inner_, session_) = (inner.clone(), session.clone());
    let brought = inner.tasks.spawn(async move {
        let (inner, session) = (inner_, session_);
        let _alone = session.launching.acquire().await.map_err(|_| Error::ShuttingDown)?;
        let row = session.view().row;
        // Until the row says that they are here, its layers are ones that only sleepers need.
        let _held = inner.shelf.hold().await;
        let template = if is_away(&row) { fetch_session(&inner, &session, &row).await? } else { None };
        let change = move |row: &SessionRow| {
            let mut change = SessionChange::new(row.clone());
            let parcel = change.session.parcel.as_mut()?;
            parcel.is_away = false;
            if give_up {
                change.session.parcel = None;
            }
            if let Some(hash) = template {
                change.session.template_hash = Some(hash.to_string());
            }
            Some(change)
        };
        inner.change(&session, Box::new(change)).await?;
        // What the cache has no room for goes again, after a while.
        inner.expect_packing();
        Ok(())
    });
    brought.await.map_err(|_| Error::ShuttingDown)?
}

/// Answers the template's address where that is another one here. The caller holds the shelf.
async fn fetch_session(inner: &Arc<Inner>, session: &Arc<Session>, row: &SessionRow) -> Result<Option<Hash>, Error> {
    let Some(parcel) = present(row) else { return Ok(None) };
    tracing::info!(session = %session.id, manifest = parcel.manifest, "fetching what sleeps in the object store");
    let repository = inner.depot.repository().await?;
    let manifest = inner.depot.manifest(&repository, &parcel.manifest).await?;
    let template = fetch_base(inner, &repository, &manifest, &row.layers, row.image_generation.is_some()).await?;
    place_session(inner, &repository, &manifest, &session.layout, row.image_generation).await?;
    faults::point("fetch.placed");
    Ok(template)
}

/// Puts the files of a session in their places: its own part of the disk, its memory where `image` says of which
/// generation, and the journals that aren't there.
pub(crate) async fn place_session(
    inner: &Arc<Inner>,
    repository: &Repository,
    manifest: &Manifest,
    layout: &SessionLayout,
    image: Option<Generation>,
) -> Result<(), Error> {
    let (staged, place) = (SessionLayout::new(layout.dir().join("fetch")), layout.clone());
    let (staged_, place_) = (staged.clone(), place.clone());
    blocking(move || {
        ensure_private_dir(place_.dir())?;
        ending::remove_tree(staged_.dir())?;
        ensure_private_dir(&staged_.disk())
    })
    .await?
    .map_err(|e| io_error(&e, "make room for what is fetched"))?;
    if let Some(upper) = &manifest.upper {
        unpack_tree(repository, upper, &staged.upper()).await.map_err(parcel_error)?;
    }
    if let Some(generation) = image {
        fetch_image(repository, manifest, &staged, generation).await?;
    }
    fetch_journals(repository, manifest, &staged, Some(&place)).await?;
    faults::point("fetch.staged");
    let has_upper = manifest.upper.is_some();
    let below = manifest.layers.first().map(|part| part.id);
    let shelf_inner = inner.clone();
    let placed = blocking(move || -> Result<(), Error> {
        let io = |e: io::Error| io_error(&e, "put in place what was fetched");
        ending::remove_tree(&place.disk()).map_err(io)?;
        create::make_dir(&place)?;
        if has_upper {
            ending::remove_tree(&place.upper()).map_err(io)?;
            fs::rename(staged.upper(), place.upper()).map_err(io)?;
        } else if let Some(below) = below {
            shelf_inner.shelf.layers.dress_root(below, &place.upper()).map_err(crate::take::layer_error)?;
        }
        ending::remove_tree(&place.images()).map_err(io)?;
        if let Some(generation) = image {
            fs::rename(staged.images(), place.images()).map_err(io)?;
            let print = snapshot::disk::fingerprint(&place.upper()).map_err(Error::internal)?;
            write_private(&place.image(generation).join(DISK), print.to_string().as_bytes()).map_err(io)?;
        }
        shelf::move_journals(&staged, &place).map_err(io)?;
        ending::remove_tree(staged.dir()).map_err(io)?;
        parcel::sync(place.dir()).map_err(parcel_error)
    });
    placed.await.flatten()
}

async fn fetch_image(
    repository: &Repository,
    manifest: &Manifest,
    into: &SessionLayout,
    generation: Generation,
) -> Result<(), Error> {
    let Some(part) = &manifest.image else {
        return Err(Error::Damaged { detail: "the object store has no memory of it".to_owned() });
    };
    let dir = into.image(generation);
    let parent = into.images();
    blocking(move || ensure_private_dir(&parent)).await?.map_err(|e| io_error(&e, "make the memory image's directory"))?;
    unpack_image(repository, &part.image, &dir).await.map_err(parcel_error)?;
    // Before anything is started: whether this machine can go on with it.
    let checked = blocking(move || ImageDescriptor::read(&dir).and_then(|descriptor| descriptor.check_loadable())).await?;
    checked.map_err(|e| image_error(None, e))
}

/// Those that are in `but` already are left out.
async fn fetch_journals(
    repository: &Repository,
    manifest: &Manifest,
    into: &SessionLayout,
    but: Option<&SessionLayout>,
) -> Result<(), Error> {
    for journal in &manifest.journals {
        if !shelf::is_journal(&journal.path) {
            let shown: String = journal.path.chars().take(80).collect();
            return Err(Error::Damaged { detail: format!("'{shown}' is no journal's place") });
        }
        if but.is_some_and(|place| place.dir().join(&journal.path).exists()) {
            continue;
        }
        let dir = into.dir().join(&journal.path);
        let parent = dir.parent().map(Path::to_owned).unwrap_or_default();
        blocking(move || ensure_private_dir(&parent)).await?.map_err(|e| io_error(&e, "make a journal's directory"))?;
        unpack_files(repository, &journal.segments, &dir).await.map_err(parcel_error)?;
    }
    Ok(())
}

/// Fetches what lies below a session's own part of the disk, and what its memory was made with. What is here stays.
/// The caller holds the shelf.
pub(crate) async fn fetch_base(
    inner: &Arc<Inner>,
    repository: &Repository,
    manifest: &Manifest,
    layers: &[LayerId],
    with_programs: bool,
) -> Result<Option<Hash>, Error> {
    let scratch = Scratch::new(inner).await?;
    for id in layers {
        fetch_layer(inner, repository, manifest, *id, &scratch).await?;
    }
    let template = fetch_template(inner, repository, manifest, &scratch).await?;
    if with_programs {
        fetch_programs(inner, repository, manifest, &scratch).await?;
    }
    Ok(template)
}

async fn fetch_layer(
    inner: &Arc<Inner>,
    repository: &Repository,
    manifest: &Manifest,
    id: LayerId,
    scratch: &Scratch,
) -> Result<(), Error> {
    let inner_ = inner.clone();
    match blocking(move || inner_.shelf.layers.read(id)).await? {
        Ok(_) => return Ok(()),
        Err(snapshot::layer::LayerError::Missing(_)) => {}
        Err(error) => return Err(crate::take::layer_error(error)),
    }
    let part = manifest.layers.iter().find(|part| part.id == id).cloned();
    let part = part.ok_or_else(|| Error::Damaged { detail: format!("the object store has no disk layer {id}") })?;
    let unpacked = scratch.path(&id.to_string());
    unpack_tree(repository, &part.tree, &unpacked).await.map_err(parcel_error)?;
    let inner = inner.clone();
    let adopted = blocking(move || inner.shelf.layers.adopt(id, &part.descriptor, &unpacked)).await?;
    adopted.map(drop).map_err(crate::take::layer_error)
}

async fn fetch_template(
    inner: &Arc<Inner>,
    repository: &Repository,
    manifest: &Manifest,
    scratch: &Scratch,
) -> Result<Option<Hash>, Error> {
    let Some(part) = manifest.template.clone() else { return Ok(None) };
    let (inner_, hash) = (inner.clone(), part.hash);
    if blocking(move || inner_.programs.templates.resolve(&hash.to_string()).is_ok()).await? {
        return Ok(None);
    }
    let descriptor: Descriptor = serde_json::from_value(part.descriptor)
        .map_err(|e| Error::Damaged { detail: format!("what the object store says of the template {hash}: {e}") })?;
    let unpacked = scratch.path("template");
    unpack_tree(repository, &part.tree, &unpacked).await.map_err(parcel_error)?;
    let inner = inner.clone();
    let adopted = blocking(move || inner.programs.adopt_template(&descriptor, &unpacked)).await?;
    Ok(Some(adopted.map_err(template_error)?).filter(|adopted| *adopted != hash))
}

async fn fetch_programs(
    inner: &Arc<Inner>,
    repository: &Repository,
    manifest: &Manifest,
    scratch: &Scratch,
) -> Result<(), Error> {
    let binaries = &inner.programs.binaries;
    if let Some(part) = manifest.guest.clone().filter(|part| binaries.layer_of(part.hash).is_err()) {
        let unpacked = scratch.path("guest");
        unpack_tree(repository, &part.tree, &unpacked).await.map_err(parcel_error)?;
        let inner = inner.clone();
        let adopted = blocking(move || inner.programs.binaries.adopt_layer(part.hash, &unpacked)).await?;
        adopted.map_err(|e| Error::Damaged { detail: e.to_string() })?;
    }
    if let Some(part) = manifest.runsc.clone().filter(|part| binaries.get(part.hash).is_err()) {
        let unpacked = scratch.path("runsc");
        unpack_file(repository, &part.stream, &unpacked, 0o600).await.map_err(parcel_error)?;
        let inner = inner.clone();
        let adopted = blocking(move || inner.programs.binaries.adopt(part.hash, "runsc", &unpacked)).await?;
        adopted.map_err(|e| Error::Damaged { detail: e.to_string() })?;
    }
    Ok(())
}

/// Fetches what a snapshot needs to be used: its layers, and with `memory` its memory and journals. The caller holds the
/// shelf. Answers the row as it is then.
///
/// # Errors
/// As [`ensure_local`].
pub(crate) async fn ensure_snapshot(inner: &Arc<Inner>, row: SnapshotRow, memory: bool) -> Result<SnapshotRow, Error> {
    let Some(parcel) = row.parcel.clone().filter(|parcel| parcel.is_away) else { return Ok(row) };
    // One at a time: two forks of one snapshot need the same.
    let turn = inner.depot.turn(row.id);
    let _turn = turn.lock().await;
    let row = inner.store.snapshot(row.id).await?.unwrap_or(row);
    if row.parcel.as_ref().is_none_or(|parcel| !parcel.is_away) {
        return Ok(row);
    }
    tracing::info!(snapshot = %row.id, manifest = parcel.manifest, "fetching a snapshot from the object store");
    let repository = inner.depot.repository().await?;
    let manifest = inner.depot.manifest(&repository, &parcel.manifest).await?;
    let template = fetch_base(inner, &repository, &manifest, &row.layers, memory && row.memory).await?;
    if memory && row.memory {
        let place = inner.shelf.layout(row.id);
        let staged = SessionLayout::new(place.dir().with_extension("fetch"));
        let staged_ = staged.clone();
        blocking(move || ending::remove_tree(staged_.dir()).and_then(|()| ensure_private_dir(staged_.dir())))
            .await?
            .map_err(|e| io_error(&e, "make room for what is fetched"))?;
        let fetched = async {
            fetch_image(&repository, &manifest, &staged, row.generation).await?;
            fetch_journals(&repository, &manifest, &staged, None).await
        };
        let fetched = fetched.await;
        let failed = fetched.is_err();
        let put = blocking(move || -> io::Result<()> {
            if failed {
                return ending::remove_tree(staged.dir());
            }
            ending::remove_tree(place.dir())?;
            fs::rename(staged.dir(), place.dir())?;
            let parent = place.dir().parent().map(Path::to_owned).unwrap_or_default();
            rustix::fs::syncfs(File::open(parent)?)?;
            Ok(())
        });
        put.await?.map_err(|e| io_error(&e, "put in place what was fetched"))?;
        fetched?;
    }
    note_snapshot(inner, row, memory, template).await
}

/// The row says that its files are there, where all of them are.
async fn note_snapshot(inner: &Inner, row: SnapshotRow, whole: bool, template: Option<Hash>) -> Result<SnapshotRow, Error> {
    let mut row = row;
    loop {
        let Some(parcel) = &mut row.parcel else { return Ok(row) };
        parcel.is_away = row.memory && !whole;
        if let Some(hash) = template {
            row.template_hash = Some(hash.to_string());
        }
        match inner.store.commit_snapshots(vec![row.clone()]).await {
            Ok(()) => {
                // What the cache has no room for goes again, after a while.
                inner.expect_packing();
                return inner.store.snapshot(row.id).await?.ok_or_else(|| Error::not_found("such snapshot"));
            }
            Err(store::StoreError::SnapshotConflict { .. }) => {
                let now = inner.store.snapshot(row.id).await?;
                row = now.ok_or_else(|| Error::not_found(format!("snapshot {}", row.id)))?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// A place for what is being unpacked, on the file system of the layers; gone when it is dropped.
struct Scratch(tempfile::TempDir);

impl Scratch {
    async fn new(inner: &Inner) -> Result<Scratch, Error> {
        let tmp = inner.config.data_dir.join("tmp");
        let made = blocking(move || {
            ensure_private_dir(&tmp)?;
            tempfile::Builder::new().prefix("fetch-").tempdir_in(&tmp)
        });
        made.await?.map(Scratch).map_err(|e| io_error(&e, "make room for what is fetched"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Who is fetching which snapshot.
pub(super) type Turns = Mutex<HashMap<SnapshotId, Weak<tokio::sync::Mutex<()>>>>;

impl Depot {
    fn turn(&self, id: SnapshotId) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turn) = turns.get(&id).and_then(Weak::upgrade) {
            return turn;
        }
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::<tokio::sync::Mutex<()>>::default();
        turns.insert(id, Arc::downgrade(&turn));
        turn
    }
}
