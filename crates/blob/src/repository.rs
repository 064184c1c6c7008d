//! A repository in use: making one, opening one, and what is shared by all who read and write.

use crate::{
    batch::Batch,
    cache::BlockCache,
    config::Config,
    crypto::{Cipher, Keys},
    error::Error,
    id::{ChunkId, PackId},
    index::{Epoch, Index},
    index_objects::IndexObject,
    key::KeySource,
    location::Location,
    lock,
    pack::Trailer,
    store::Store,
};
use rand::Rng;
use std::{
    collections::{BTreeMap, HashMap},
    num::NonZero,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::{Semaphore, watch};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};
use uuid::Uuid;

/// Whether a repository is opened to be changed, and by whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Reads only; takes no lock. What others remove meanwhile is missing.
    Read,
    /// Reads and writes. `server` is what the lock tells others; `take_over` takes the lock from another server that is
    /// gone for good.
    Write { server: String, take_over: bool },
}

/// How a repository is used.
#[derive(Debug, Clone)]
pub struct Options {
    /// The key of an encrypted one.
    pub key: Option<KeySource>,
    pub access: Access,
    /// How long a store that doesn't answer is tried, for each step.
    pub patience: Duration,
    /// Ends everything under way with [`Error::Cancelled`].
    pub cancel: CancellationToken,
}

impl Options {
    /// Reading and writing as `server`, without encryption, with five minutes of patience.
    pub fn new(server: impl Into<String>) -> Options {
        let access = Access::Write { server: server.into(), take_over: false };
        Options { key: None, access, patience: Duration::from_secs(300), cancel: CancellationToken::new() }
    }

    /// Reading only.
    pub fn reading() -> Options {
        Options { access: Access::Read, ..Options::new("") }
    }

    #[must_use]
    pub fn with_key(mut self, key: Option<KeySource>) -> Options {
        self.key = key;
        self
    }

    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Options {
        self.patience = patience;
        self
    }

    #[must_use]
    pub fn with_cancel(mut self, cancel: CancellationToken) -> Options {
        self.cancel = cancel;
        self
    }

    /// Takes the lock, whoever has it.
    #[must_use]
    pub fn taking_over(mut self) -> Options {
        if let Access::Write { take_over, .. } = &mut self.access {
            *take_over = true;
        }
        self
    }
}

/// What all handles of an open repository share.
pub(crate) struct Inner {
    pub(crate) store: Store,
    pub(crate) cipher: Cipher,
    pub(crate) config: Config,
    pub(crate) access: Access,
    state: Mutex<State>,
    /// How many sealed packs are not stored yet.
    pub(crate) uploads: watch::Sender<usize>,
    /// One writes index objects at a time.
    pub(crate) indexing: tokio::sync::Mutex<()>,
    /// Packs are uploaded by many at once, or removed by one.
    pub(crate) removing: tokio::sync::RwLock<()>,
    /// One collects at a time.
    pub(crate) collecting: tokio::sync::Mutex<()>,
    /// How many hash, compress and unpack at a time: as many as there are processors, and one that waits for memory.
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) cache: BlockCache,
    pub(crate) tasks: TaskTracker,
    pub(crate) runtime: tokio::runtime::Handle,
}

/// What changes.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) index: Index,
    /// Counts the beginnings of writers and marks.
    pub(crate) epoch: Epoch,
    /// The epoch in which each living writer began.
    pub(crate) writers: BTreeMap<u64, Epoch>,
    pub(crate) next_writer: u64,
    /// Chunks that are in no stored pack yet.
    pub(crate) pending: HashMap<ChunkId, Arc<Batch>>,
    /// The batch that takes new chunks.
    pub(crate) open: Option<Arc<Batch>>,
    /// The index objects in the store.
    pub(crate) objects: Vec<IndexObject>,
    /// Packs that no index object tells of yet.
    pub(crate) unlisted: Vec<(PackId, u64, Trailer)>,
    /// Packs that are to be removed from the store, and their sizes.
    pub(crate) doomed: HashMap<PackId, u64>,
}

/// A content-addressed repository of chunks. A handle: copies are the same repository. When the last one is dropped,
/// uploads under way are given up; nothing that was not finished is referred to by anything.
#[derive(Clone)]
pub struct Repository {
    pub(crate) inner: Arc<Inner>,
    _alive: Arc<DropGuard>,
}

impl std::fmt::Debug for Repository {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Repository({})", self.inner.store.name())
    }
}

impl Inner {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Every change under this lock is whole in itself; a panic elsewhere leaves it so.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn must_write(&self) -> Result<(), Error> {
        match self.access {
            Access::Read => Err(Error::ReadOnly { store: self.store.name() }),
            Access::Write { .. } => Ok(()),
        }
    }

    /// Refuses where another server has taken the repository over since.
    pub(crate) async fn must_own(&self) -> Result<(), Error> {
        self.must_write()?;
        let Access::Write { server, .. } = &self.access else { return Ok(()) };
        lock::expect(&self.store, server).await
    }
}

/// How many threads may compute at once.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, NonZero::get).clamp(2, 16)
}

impl Repository {
    /// Makes a repository at a place that has none, and opens it.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::KeySource`], and what the store says.
    pub async fn create(location: &Location, options: &Options) -> Result<Repository, Error> {
        let cancel = options.cancel.child_token();
        location.ensure()?;
        let store = Store::new(location, options.patience, cancel)?;
        if Config::find(&store).await?.is_some() {
            return Err(Error::Exists { store: store.name() });
        }
        let config = Config { repository: Uuid::new_v4(), encrypted: options.key.is_some() };
        if let Some(key) = &options.key {
            let mut master = [0_u8; 32];
            rand::rng().fill_bytes(&mut master);
            key.wrapper(config.repository.into_bytes()).await?.store(&store, &master).await?;
        }
        faults::point("blob.create.config");
        // The config makes it a repository, so it comes last.
        config.store(&store).await?;
        drop(store);
        Repository::open(location, options).await
    }

    /// Opens the repository at a place, or makes one where there is none.
    ///
    /// # Errors
    /// As [`Repository::open`] and [`Repository::create`].
    pub async fn open_or_create(location: &Location, options: &Options) -> Result<Repository, Error> {
        match Repository::open(location, options).await {
            Err(Error::NoRepository { .. }) => match Repository::create(location, options).await {
                // Somebody else made it in this very moment.
                Err(Error::Exists { .. }) => Repository::open(location, options).await,
                made => made,
            },
            opened => opened,
        }
    }

    /// Opens a repository: reads its config, opens its key, takes its lock, loads its index.
    ///
    /// # Errors
    /// [`Error::NoRepository`], [`Error::KeyNeeded`], [`Error::NotEncrypted`], [`Error::WrongKey`], [`Error::InUse`],
    /// [`Error::Newer`], [`Error::Damaged`] of its config or key, and what the store says.
    pub async fn open(location: &Location, options: &Options) -> Result<Repository, Error> {
        let cancel = options.cancel.child_token();
        let store = Store::new(location, options.patience, cancel.clone())?;
        let Some(config) = Config::find(&store).await? else { return Err(Error::NoRepository { store: store.name() }) };
        let cipher = match (&options.key, config.encrypted) {
            (None, false) => Cipher::Plain,
            (None, true) => return Err(Error::KeyNeeded { store: store.name() }),
            (Some(_), false) => return Err(Error::NotEncrypted { store: store.name() }),
            (Some(key), true) => {
                let master = key.wrapper(config.repository.into_bytes()).await?.unwrap(&store).await?;
                Cipher::Keyed(Box::new(Keys::derive(&master)))
            }
        };
        if let Access::Write { server, take_over } = &options.access {
            lock::take(&store, server, *take_over).await?;
            let place = location.clone();
            let swept = tokio::task::spawn_blocking(move || place.sweep_leftovers()).await;
            swept.map_err(|e| Error::Aborted(e.to_string()))?;
        }
        let inner = Arc::new(Inner {
            store,
            cipher,
            config,
            access: options.access.clone(),
            // Epoch 0 is that of everything that was there before.
            state: Mutex::new(State { epoch: Epoch(1), ..State::default() }),
            uploads: watch::Sender::new(0),
            indexing: tokio::sync::Mutex::new(()),
            removing: tokio::sync::RwLock::new(()),
            collecting: tokio::sync::Mutex::new(()),
            slots: Arc::new(Semaphore::new(threads() + 1)),
            cache: BlockCache::default(),
            tasks: TaskTracker::new(),
            runtime: tokio::runtime::Handle::current(),
        });
        inner.load_index().await?;
        Ok(Repository { inner, _alive: Arc::new(cancel.drop_guard()) })
    }

    /// The repository's own id, which never changes.
    pub fn id(&self) -> Uuid {
        self.inner.config.repository
    }

    pub fn is_encrypted(&self) -> bool {
        self.inner.config.encrypted
    }

    /// Its place, for messages.
    pub fn place(&self) -> String {
        self.inner.store.name()
    }

    /// Has the master key wrapped under `new`, and under no other key any more. Chunks are not rewritten, and this handle
    /// goes on. May be repeated after a crash: whatever happened, the repository opens with one of the two.
    ///
    /// # Errors
    /// [`Error::NotEncrypted`]; [`Error::WrongKey`] where neither `old` nor `new` opens it.
    pub async fn rotate(&self, old: &KeySource, new: &KeySource) -> Result<(), Error> {
        self.inner.must_own().await?;
        let store = &self.inner.store;
        if !self.inner.config.encrypted {
            return Err(Error::NotEncrypted { store: store.name() });
        }
        let repository = self.inner.config.repository.into_bytes();
        let (old, new) = (old.wrapper(repository).await?, new.wrapper(repository).await?);
        match old.load(store).await? {
            Some(master) => {
                new.store(store, &master).await?;
                faults::point("blob.key.stored");
            }
            None if new.load(store).await?.is_some() => {}
            None => old.unwrap(store).await.map(drop)?,
        }
        new.retire_others(store).await
    }

    /// Gives the lock back, so that another server may write here. This handle must write nothing after it.
    ///
    /// # Errors
    /// What the store says.
    pub async fn release(&self) -> Result<(), Error> {
        self.inner.must_own().await?;
        lock::release(&self.inner.store).await
    }
}
