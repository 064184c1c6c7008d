//! The objects of one repository: put, get, list, delete, tried again for as long as the caller has patience.

use crate::{classify::classify, error::Error, location::Location};
use backon::{BackoffBuilder, ExponentialBuilder};
use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, path::Path};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

/// Longest pause between two tries.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// What became of a conditional put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Created {
    New,
    /// An object of this name was there; it is as it was.
    WasThere,
}

/// One object of a listing.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    /// Below the repository's prefix.
    pub(crate) path: String,
    pub(crate) size: u64,
}

/// A repository's objects.
#[derive(Debug)]
pub(crate) struct Store {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    name: String,
    /// How long a store that doesn't answer is tried.
    patience: Duration,
    cancel: CancellationToken,
    /// Whether the store has conditional puts, as far as is known.
    conditional: AtomicBool,
}

impl Store {
    pub(crate) fn new(location: &Location, patience: Duration, cancel: CancellationToken) -> Result<Store, Error> {
        Ok(Store {
            objects: location.connect()?,
            prefix: Path::from(location.prefix()),
            name: location.to_string(),
            patience,
            cancel,
            conditional: AtomicBool::new(true),
        })
    }

    /// The repository's place, for messages.
    pub(crate) fn name(&self) -> String {
        self.name.clone()
    }

    pub(crate) fn cancel(&self) -> &CancellationToken {
        &self.cancel
    }

    fn path(&self, path: &str) -> Path {
        self.prefix.parts().chain(Path::from(path).parts()).collect()
    }

    /// Does `step` until it is done, refused for good, out of time, or cancelled.
    async fn persist<T, F>(&self, path: &str, step: impl Fn() -> F) -> Result<T, object_store::Error>
    where
        F: Future<Output = Result<T, object_store::Error>>,
    {
        let begun = Instant::now();
        let mut pauses = pauses();
        loop {
            let error = match step().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let left = self.patience.saturating_sub(begun.elapsed());
            if !classify(&error).is_transient() || left.is_zero() {
                return Err(error);
            }
            let pause = pauses.next().unwrap_or(MAX_PAUSE).min(left);
            tracing::warn!(store = self.name, path, error = %error, pause_ms = pause.as_millis(), "the store failed; trying again");
            tokio::time::sleep(pause).await;
        }
    }

    /// The same, cancellable, with an error of ours.
    async fn run<T, F>(&self, path: &str, step: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, object_store::Error>>,
    {
        let begun = Instant::now();
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(Error::Cancelled),
            done = self.persist(path, step) => done.map_err(|e| classify(&e).into_error(&self.name, path, &e, begun.elapsed())),
        }
    }

    /// An object of at most `limit` bytes; `None` where there is none.
    pub(crate) async fn find(&self, path: &str, limit: u64) -> Result<Option<Bytes>, Error> {
        let at = self.path(path);
        let found = self
            .run(path, async || {
                faults::file("blob.get").map_err(injected)?;
                let got = match self.objects.get_opts(&at, GetOptions::default()).await {
                    Err(object_store::Error::NotFound { .. }) => return Ok(None),
                    other => other?,
                };
                let size = got.meta.size;
                if size > limit { Ok(Some(Err(size))) } else { got.bytes().await.map(|bytes| Some(Ok(bytes))) }
            })
            .await?;
        match found {
            None => Ok(None),
            Some(Ok(bytes)) => Ok(Some(bytes)),
            Some(Err(size)) => Err(Error::damaged(path, format!("it has {size} bytes, more than the limit of {limit}"))),
        }
    }

    /// The same for an object that has to be there.
    pub(crate) async fn get(&self, path: &str, limit: u64) -> Result<Bytes, Error> {
        self.find(path, limit).await?.ok_or_else(|| missing(path))
    }

    /// Parts of an object, in the order asked for. A part that reaches past the end comes shorter, or fails as damage.
    pub(crate) async fn ranges(&self, path: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, Error> {
        // Nothing is no range to a server of HTTP: it refuses to be asked for it.
        let wanted: Vec<Range<u64>> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
        let at = self.path(path);
        let parts = self
            .run(path, async || {
                faults::file("blob.get").map_err(injected)?;
                self.objects.get_ranges(&at, &wanted).await
            })
            .await?;
        let mut parts = parts.into_iter();
        let part = |range: &Range<u64>| if range.is_empty() { Bytes::new() } else { parts.next().unwrap_or_default() };
        Ok(ranges.iter().map(part).collect())
    }

    /// Puts an object unless one of its name is there. Where the store can't do that in one step, it asks first.
    pub(crate) async fn create(&self, path: &str, payload: PutPayload) -> Result<Created, Error> {
        let at = self.path(path);
        if self.conditional.load(Ordering::Relaxed) {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            let done = self
                .run(path, async || {
                    faults::file("blob.put").map_err(injected)?;
                    match self.objects.put_opts(&at, payload.clone(), options.clone()).await {
                        Ok(_) => Ok(Some(Created::New)),
                        Err(object_store::Error::AlreadyExists { .. }) => Ok(Some(Created::WasThere)),
                        Err(error) if classify(&error).is_unsupported() => Ok(None),
                        Err(error) => Err(error),
                    }
                })
                .await?;
            if let Some(created) = done {
                return Ok(created);
            }
            tracing::info!(store = self.name, "the store has no conditional writes: it is asked before each write instead");
            self.conditional.store(false, Ordering::Relaxed);
        }
        if self.size(path).await?.is_some() {
            return Ok(Created::WasThere);
        }
        self.replace(path, payload).await.map(|()| Created::New)
    }

    /// Puts an object in place of any that is there.
    pub(crate) async fn replace(&self, path: &str, payload: PutPayload) -> Result<(), Error> {
        let at = self.path(path);
        self.run(path, async || {
            faults::file("blob.put").map_err(injected)?;
            self.objects.put(&at, payload.clone()).await.map(drop)
        })
        .await
    }

    /// Removes an object; fine where it is gone already.
    pub(crate) async fn delete(&self, path: &str) -> Result<(), Error> {
        let at = self.path(path);
        self.run(path, async || {
            faults::file("blob.delete").map_err(injected)?;
            match self.objects.delete(&at).await {
                Err(object_store::Error::NotFound { .. }) => Ok(()),
                other => other,
            }
        })
        .await
    }

    /// An object's size; `None` where there is none.
    pub(crate) async fn size(&self, path: &str) -> Result<Option<u64>, Error> {
        let at = self.path(path);
        self.run(path, async || match self.objects.head(&at).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        })
        .await
    }

    /// All objects below a folder.
    pub(crate) async fn list(&self, folder: &str) -> Result<Vec<Listed>, Error> {
        let at = self.path(folder);
        let depth = self.prefix.parts().count();
        let objects = self.run(folder, async || self.objects.list(Some(&at)).try_collect::<Vec<_>>().await).await?;
        let listed = objects.into_iter().map(|meta| {
            let parts: Vec<String> = meta.location.parts().skip(depth).map(|part| part.as_ref().to_owned()).collect();
            Listed { path: parts.join("/"), size: meta.size }
        });
        Ok(listed.collect())
    }
}

pub(crate) fn missing(path: &str) -> Error {
    Error::Missing { what: format!("the object {path}"), chunk: None }
}

fn pauses() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::new()
        .with_jitter()
        .with_min_delay(Duration::from_millis(100))
        .with_max_delay(MAX_PAUSE)
        .without_max_times()
        .build()
}

fn injected(source: std::io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "fault", source: Box::new(source) }
}
