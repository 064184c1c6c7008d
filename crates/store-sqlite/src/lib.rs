//! Dormouse's store in one SQLite file beside the server.
//!
//! ```text
//!  readers: a few connections, each sees the last commit      write-ahead log, fsync at each commit
//!  writer: one connection, owned by one task  <- queue <- many callers
//! ```
//! Each commit costs an fsync, so the writer takes whatever is queued, up to a limit, into one
//! transaction with a savepoint for each caller: a hundred sessions that write at once pay for one.
//! SQLite knows nothing of sandboxes; this crate knows nothing of what the rows are for.

mod access;
mod error;
mod events;
mod idempotency;
mod migrate;
mod open;
mod rows;
mod secrets;
mod sessions;
mod snapshots;
mod work;
mod writer;

pub use error::OpenError;
pub use migrate::SCHEMA_VERSION;

use sqlx::{SqlitePool, sqlite::SqliteConnection};
use std::{future::Future, path::Path, pin::Pin};
use store::StoreError;

/// A future that borrows the connection it works on.
pub(crate) type BoxFuture<'c, T> = Pin<Box<dyn Future<Output = T> + Send + 'c>>;

/// The store in a file. Implements [`store::Store`].
pub struct SqliteStore {
    readers: SqlitePool,
    writer: writer::Writer,
}

impl SqliteStore {
    /// The file's name in the data directory.
    pub const FILE_NAME: &'static str = "store.db";

    /// Opens the store in `dir`, creates it where there is none, and brings an older one to the
    /// present schema after copying it to `store.db.before-vN`.
    ///
    /// The caller holds the directory's [`store::DataLock`].
    ///
    /// # Errors
    /// Where the file is newer, damaged or somebody else's it is left as it was.
    pub async fn open(dir: &Path) -> Result<SqliteStore, OpenError> {
        let path = dir.join(Self::FILE_NAME);
        open::prepare(&path, migrate::MIGRATIONS).await?;
        let writer = writer::Writer::start(open::writer_options(&path)).await.map_err(|e| OpenError::database(&path, &e))?;
        let readers = open::readers(&path);
        Ok(SqliteStore { readers, writer })
    }

    /// Writes what is queued and closes the file. Later calls answer [`StoreError::Closed`].
    pub async fn close(&self) {
        self.writer.close().await;
        self.readers.close().await;
    }

    /// Runs `work` in the writer's next transaction; what it did is undone where it fails.
    pub(crate) async fn write<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, StoreError>> + Send + 'static,
    {
        self.writer.write(work).await
    }

    pub(crate) fn readers(&self) -> &SqlitePool {
        &self.readers
    }
}

#[cfg(test)]
mod tests;
