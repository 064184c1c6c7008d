//! From a path to a file that is ours, of a schema we know, private and consistent.

use crate::{OpenError, migrate};
use sqlx::{
    ConnectOptions, Connection, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

/// In the file's header, so that `file` and we can tell it from others: "Dorm".
pub(crate) const APPLICATION_ID: u32 = 0x446f_726d;

const READERS: u32 = 4;
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
/// The log is cut back to this after a checkpoint, so that one burst doesn't hold its room for ever.
const LOG_LIMIT_BYTES: &str = "33554432";

fn base_options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new().filename(path).busy_timeout(BUSY_TIMEOUT).foreign_keys(true).disable_statement_logging()
}

pub(crate) fn writer_options(path: &Path) -> SqliteConnectOptions {
    base_options(path)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .pragma("journal_size_limit", LOG_LIMIT_BYTES)
        .thread_name(|_| "store-writer".to_owned())
}

/// Connections that can't write: not opened read-only, because the log's index needs writing even by readers.
pub(crate) fn readers(path: &Path) -> SqlitePool {
    let options = base_options(path).pragma("query_only", "on").thread_name(|n| format!("store-reader-{n}"));
    SqlitePoolOptions::new()
        .max_connections(READERS)
        .acquire_timeout(BUSY_TIMEOUT)
        // A ping before each use would cost as much as most of our reads.
        .test_before_acquire(false)
        .connect_lazy_with(options)
}

/// Brings the file into being or up to the newest of `migrations`, or says why not.
pub(crate) async fn prepare(path: &Path, migrations: &[migrate::Migration]) -> Result<(), OpenError> {
    let known = migrations.len() as u32;
    let io_error = |source| OpenError::Io { path: path.to_owned(), source };
    if let Some(found) = version_in_header(path)?
        && found > known
    {
        return Err(OpenError::Newer { path: path.to_owned(), found, known });
    }
    // After a crash the newest header may be in the log only.
    if log_of(path).metadata().is_ok_and(|m| m.len() > 0) {
        let found = version_through_log(path).await?;
        if found > known {
            return Err(OpenError::Newer { path: path.to_owned(), found, known });
        }
    }
    make_private(path).map_err(io_error)?;
    let mut conn = SqliteConnection::connect_with(&writer_options(path)).await.map_err(|e| OpenError::database(path, &e))?;
    let result = migrate::run(&mut conn, path, migrations).await;
    let closed = conn.close().await.map_err(|e| OpenError::database(path, &e));
    result.and(closed)
}

fn log_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

/// The schema version as the file's first 100 bytes tell it (<https://sqlite.org/fileformat2.html#the_database_header>);
/// `None` where there is no file or an empty one.
fn version_in_header(path: &Path) -> Result<Option<u32>, OpenError> {
    let mut header = Vec::with_capacity(100);
    match File::open(path).and_then(|file| file.take(100).read_to_end(&mut header)) {
        Ok(0) => return Ok(None),
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(OpenError::Io { path: path.to_owned(), source }),
    }
    if header.len() < 100 || !header.starts_with(b"SQLite format 3\0") {
        let detail = "it doesn't begin like an SQLite file".to_owned();
        return Err(OpenError::Corrupt { path: path.to_owned(), detail });
    }
    let number = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (version, application) = (number(60), number(68));
    // Zero: a crash between the file's first page and our first migration; that one decides.
    if application != APPLICATION_ID && application != 0 {
        return Err(OpenError::NotOurs { path: path.to_owned() });
    }
    Ok(Some(version))
}

/// The same through the log, on a read-only connection, which leaves file and log as they are.
async fn version_through_log(path: &Path) -> Result<u32, OpenError> {
    let read = async {
        let mut conn = SqliteConnection::connect_with(&base_options(path).read_only(true)).await?;
        let version: i64 = sqlx::query_scalar("PRAGMA user_version").fetch_one(&mut conn).await?;
        conn.close().await?;
        Ok(u32::try_from(version).unwrap_or(u32::MAX))
    };
    read.await.map_err(|e: sqlx::Error| OpenError::database(path, &e))
}

/// Creates the file 0600 before SQLite would create it by the umask; its log and index get the file's mode.
fn make_private(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if file.metadata()?.permissions().mode() & 0o777 != 0o600 {
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
    }
    Ok(())
}
