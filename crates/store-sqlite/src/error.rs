//! What SQLite's failures mean to the callers of a store.

use std::{
    io,
    path::{Path, PathBuf},
};
use store::StoreError;

/// Why the file was not opened. It was left as it was, unless a migration says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "{} was written by a newer Dormouse (schema {found}, this one knows {known}): \
         start that version, or restore a copy made before its upgrade ({}.before-v…)",
        path.display(), path.display()
    )]
    Newer { path: PathBuf, found: u32, known: u32 },
    #[error("{} is damaged: {detail}. Restore it from a copy, or move it away to begin with an empty store", path.display())]
    Corrupt { path: PathBuf, detail: String },
    #[error("{} is not a store of Dormouse: move it away", path.display())]
    NotOurs { path: PathBuf },
    #[error("no space left to open {}: free some on its file system", path.display())]
    NoSpace { path: PathBuf },
    #[error("the copy {} that is made before a migration failed: {detail}. Nothing was changed", backup.display())]
    Backup { backup: PathBuf, detail: String },
    #[error("the migration of {} to schema {to} failed and was taken back: {detail}", path.display())]
    Migration { path: PathBuf, to: u32, detail: String },
    #[error("{} can't be used: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} can't be opened: {detail}", path.display())]
    Database { path: PathBuf, detail: String },
}

impl OpenError {
    pub(crate) fn database(path: &Path, error: &sqlx::Error) -> OpenError {
        let path = path.to_owned();
        match from_sqlx(error) {
            StoreError::Corrupt { detail, .. } => OpenError::Corrupt { path, detail },
            StoreError::NoSpace => OpenError::NoSpace { path },
            _ => OpenError::Database { path, detail: error.to_string() },
        }
    }
}

/// The primary result codes that matter here (<https://sqlite.org/rescode.html>).
mod code {
    pub const BUSY: i64 = 5;
    pub const LOCKED: i64 = 6;
    pub const CORRUPT: i64 = 11;
    pub const FULL: i64 = 13;
    pub const NOTADB: i64 = 26;
}

fn primary_code(error: &sqlx::Error) -> Option<i64> {
    let extended: i64 = error.as_database_error()?.code()?.parse().ok()?;
    Some(extended & 0xff)
}

/// What a failed statement means. Never an unknown outcome: that is for a failed COMMIT only.
pub(crate) fn from_sqlx(error: &sqlx::Error) -> StoreError {
    match error {
        sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => return StoreError::Closed,
        sqlx::Error::PoolTimedOut => return StoreError::Busy,
        sqlx::Error::ColumnDecode { index, source } => {
            return StoreError::Corrupt { what: format!("column {index}"), detail: source.to_string() };
        }
        _ => {}
    }
    match primary_code(error) {
        Some(code::BUSY | code::LOCKED) => StoreError::Busy,
        Some(code::FULL) => StoreError::NoSpace,
        Some(code::CORRUPT | code::NOTADB) => StoreError::Corrupt { what: "the file".to_owned(), detail: error.to_string() },
        _ => StoreError::Database(error.to_string()),
    }
}

/// True where a unique index refused the row.
pub(crate) fn is_unique_violation(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|e| e.is_unique_violation())
}
