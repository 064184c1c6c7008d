//! The blob store's part in a session's life: what sleeps is packed into it, and fetched when it is needed again.
//!
//! ```text
//!            sleeps a while           cache is full                 is needed
//!   files ──────────────────► both ─────────────────► store alone ─────────────► both
//!     ▲                        │                                                   │
//!     └────────────────────────┴────── its disk may change: the parcel is given up ┘
//! ```
//! The row says which of these is true ([`store::Parcel`]). The manifest is stored before the row names it, and the row
//! says that the files are gone before they are removed; so whatever is cut off leaves too much, never too little. What a
//! row doesn't name any more is removed by the next collection.
//!
//! A session's parcel is of one sandbox's disk and memory. Nothing holds a sleeper while it is packed; whether it still
//! sleeps as it did is looked at when the parcel is committed, under the lock that every start of a sandbox takes.

mod archive;
pub(crate) mod backup;
mod carry;
pub(crate) mod collect;
pub(crate) mod evict;
pub(crate) mod fetch;
pub(crate) mod keeper;
mod pack;

use crate::{Error, ObjectStore, inner::Inner};
use blob::{Access, Options, Repository};
use model::{LayerId, SessionId, Timestamp};
use snapshot::{
    Hash,
    parcel::{GuestPart, LayerPart, Manifest, ParcelError, RunscPart, TemplatePart},
};
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use store::{Parcel, SessionRow};
use tokio::sync::{Notify, RwLock};
use tokio_util::sync::CancellationToken;

/// How long a store that doesn't answer is tried. Clients wait for that long, and packing begins again by itself.
const PATIENCE: Duration = Duration::from_secs(8);

/// The blob store of one server.
pub(crate) struct Depot {
    config: ObjectStore,
    /// What the store's lock calls this server.
    server: String,
    cancel: CancellationToken,
    /// Opened when it is first needed: a server starts without it.
    open: tokio::sync::Mutex<Option<Repository>>,
    /// Shared by who packs, held alone by who collects: no manifest may come to refer to what is just being removed.
    gate: RwLock<()>,
    turns: fetch::Turns,
    /// Held by who packs what is due and gives files up.
    passes: tokio::sync::Mutex<()>,
    known: Mutex<Known>,
    /// Why nothing can be packed at present.
    trouble: Mutex<Option<String>>,
    /// When the next thing is to be packed.
    due: Mutex<Option<Timestamp>>,
    changed: Notify,
}

/// Parts that are in the store: what many parcels share is read and hashed once.
#[derive(Default)]
struct Known {
    layers: HashMap<LayerId, LayerPart>,
    templates: HashMap<Hash, TemplatePart>,
    guests: HashMap<Hash, GuestPart>,
    runscs: HashMap<Hash, RunscPart>,
}

impl Known {
    fn learn(&mut self, manifest: &Manifest) {
        self.layers.extend(manifest.layers.iter().map(|part| (part.id, part.clone())));
        self.templates.extend(manifest.template.iter().map(|part| (part.hash, part.clone())));
        self.guests.extend(manifest.guest.iter().map(|part| (part.hash, part.clone())));
        self.runscs.extend(manifest.runsc.iter().map(|part| (part.hash, part.clone())));
    }
}

impl Depot {
    pub(crate) fn new(config: ObjectStore, server: String, cancel: CancellationToken) -> Depot {
        Depot {
            config,
            server,
            cancel,
            open: tokio::sync::Mutex::default(),
            gate: RwLock::default(),
            turns: Default::default(),
            passes: Default::default(),
            known: Mutex::default(),
            trouble: Mutex::default(),
            due: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// The repository; made where there is none.
    ///
    /// # Errors
    /// [`Error::ObjectStore`].
    pub(crate) async fn repository(&self) -> Result<Repository, Error> {
        let mut open = self.open.lock().await;
        if let Some(repository) = &*open {
            return Ok(repository.clone());
        }
        let access = Access::Write { server: self.server.clone(), take_over: self.config.take_over };
        let options = Options { key: self.config.key.clone(), access, patience: PATIENCE, cancel: self.cancel.clone() };
        let repository = Repository::open_or_create(&self.config.location, &options).await.map_err(store_error)?;
        *open = Some(repository.clone());
        Ok(repository)
    }

    /// Gives the store's lock back, where it was taken.
    pub(crate) async fn close(&self) {
        let Some(repository) = self.open.lock().await.take() else { return };
        if let Err(error) = repository.release().await {
            tracing::warn!(%error, "the lock of the object store stays");
        }
    }

    /// What belongs together under this name.
    ///
    /// # Errors
    /// [`Error::ObjectStore`], [`Error::Damaged`], [`Error::Unloadable`] for a newer format.
    pub(crate) async fn manifest(&self, repository: &Repository, name: &str) -> Result<Manifest, Error> {
        let found = repository.manifest(name).await.map_err(store_error)?;
        let bytes = found.ok_or_else(|| Error::Damaged { detail: format!("{name} is missing from the object store") })?;
        Manifest::decode(&bytes).map_err(parcel_error)
    }

    /// Something begins to sleep, or was kept, and is to be packed at this time.
    pub(crate) fn expect(&self, at: Timestamp) {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        if due.is_none_or(|due| at < due) {
            *due = Some(at);
            self.changed.notify_one();
        }
    }

    /// Why nothing can be packed at present.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_trouble(&self, trouble: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// Where it is, for people.
    pub(crate) fn place(&self) -> String {
        self.config.location.to_string()
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.config.key.is_some()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the store has of a session as it is now.
pub(crate) fn present(row: &SessionRow) -> Option<&Parcel> {
    let parcel = row.parcel.as_ref()?;
    let fits = !row.state.has_sandbox() && parcel.generation == row.generation && parcel.disk_epoch == row.disk_epoch;
    fits.then_some(parcel)
}

/// True where a session's files are in the store alone.
pub(crate) fn is_away(row: &SessionRow) -> bool {
    present(row).is_some_and(|parcel| parcel.is_away)
}

impl Inner {
    /// Notes that a session sleeps as of now.
    pub(crate) fn expect_packing(&self) {
        self.depot.expect(self.now().plus(self.config.pack_after));
    }
}

/// The store's refusal, as callers are told.
pub(crate) fn store_error(error: blob::Error) -> Error {
    let detail = error.to_string();
    match error {
        blob::Error::Damaged { .. } | blob::Error::Missing { .. } => Error::Damaged { detail },
        blob::Error::NoSpace { .. } => Error::NoSpace { detail },
        blob::Error::Newer { .. } => Error::Unloadable { session: None, detail },
        other => Error::ObjectStore { detail, retryable: other.is_retryable() },
    }
}

/// What could not be packed or fetched, as callers are told.
pub(crate) fn parcel_error(error: ParcelError) -> Error {
    let detail = error.to_string();
    match error {
        _ if error.is_loss() => Error::Damaged { detail },
        ParcelError::Store(source) | ParcelError::File { source, .. } | ParcelError::After { source, .. } => store_error(source),
        ParcelError::Newer { .. } => Error::Unloadable { session: None, detail },
        ParcelError::Image(error) => image_error(None, error),
        ParcelError::Io { ref source, what, ref path } => crate::launch::io_error(source, &format!("{what} {}", path.display())),
        ParcelError::Changed(_) | ParcelError::Name(_) | ParcelError::TooLarge { .. } => Error::internal(detail),
        ParcelError::Malformed { .. } | ParcelError::Damaged(_) => Error::Damaged { detail },
    }
}

/// Why a memory can't be used.
pub(crate) fn image_error(session: Option<SessionId>, error: snapshot::image::ImageError) -> Error {
    use snapshot::image::ImageError as E;
    let detail = error.to_string();
    match error {
        E::Missing(_) | E::Damaged { .. } => Error::Damaged { detail },
        E::Newer { .. } | E::Processor(_) => Error::Unloadable { session, detail },
        E::Io { source, .. } => crate::launch::io_error(&source, "read the memory image"),
    }
}
