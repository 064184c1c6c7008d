//! The steps from each version of the schema to the next, each after a copy of the file.
//!
//! The version is `PRAGMA user_version`, which changes in the step's own transaction: a step that
//! was interrupted has not happened. Steps are only ever added.

use crate::{OpenError, open::APPLICATION_ID};
use sqlx::{AssertSqlSafe, sqlite::SqliteConnection};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// One step, as SQL.
pub(crate) struct Migration(pub &'static str);

/// Step N leads to version N, counted from 1.
pub(crate) const MIGRATIONS: &[Migration] = &[
    Migration(include_str!("../migrations/0001_first.sql")),
    Migration(include_str!("../migrations/0002_token_limits.sql")),
    Migration(include_str!("../migrations/0003_snapshots.sql")),
    Migration(include_str!("../migrations/0004_secrets.sql")),
];

/// The schema that this version writes.
pub const SCHEMA_VERSION: u32 = MIGRATIONS.len() as u32;

/// Runs the steps that the file lacks.
pub(crate) async fn run(conn: &mut SqliteConnection, path: &Path, migrations: &[Migration]) -> Result<(), OpenError> {
    let database_error = |e: sqlx::Error| OpenError::database(path, &e);
    let version: i64 = sqlx::query_scalar("PRAGMA user_version").fetch_one(&mut *conn).await.map_err(database_error)?;
    let version = u32::try_from(version).unwrap_or(u32::MAX);
    let application: i64 = sqlx::query_scalar("PRAGMA application_id").fetch_one(&mut *conn).await.map_err(database_error)?;
    let tables: i64 =
        sqlx::query_scalar("SELECT count(*) FROM sqlite_schema").fetch_one(&mut *conn).await.map_err(database_error)?;
    let is_new = version == 0 && tables == 0;
    if !is_new && application != i64::from(APPLICATION_ID) {
        return Err(OpenError::NotOurs { path: path.to_owned() });
    }
    if version > migrations.len() as u32 {
        return Err(OpenError::Newer { path: path.to_owned(), found: version, known: migrations.len() as u32 });
    }
    for (to, migration) in (1u32..).zip(migrations).skip(version as usize) {
        if !is_new {
            check(conn, path).await?;
            back_up(conn, path, to).await?;
        }
        step(conn, migration.0, to).await.map_err(|e| OpenError::Migration {
            path: path.to_owned(),
            to,
            detail: e.to_string(),
        })?;
        tracing::info!(path = %path.display(), to, "schema migrated");
    }
    Ok(())
}

/// A damaged file is not migrated: the copy would be damaged as well.
async fn check(conn: &mut SqliteConnection, path: &Path) -> Result<(), OpenError> {
    let verdict: String =
        sqlx::query_scalar("PRAGMA quick_check(1)").fetch_one(conn).await.map_err(|e| OpenError::database(path, &e))?;
    if verdict == "ok" { Ok(()) } else { Err(OpenError::Corrupt { path: path.to_owned(), detail: verdict }) }
}

async fn step(conn: &mut SqliteConnection, sql: &'static str, to: u32) -> Result<(), sqlx::Error> {
    sqlx::query("BEGIN IMMEDIATE").execute(&mut *conn).await?;
    let numbers = format!("PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {to};");
    let result = async {
        sqlx::raw_sql(sql).execute(&mut *conn).await?;
        sqlx::raw_sql(AssertSqlSafe(numbers)).execute(&mut *conn).await?;
        sqlx::query("COMMIT").execute(&mut *conn).await
    };
    match result.await {
        Ok(_) => Ok(()),
        Err(error) => {
            // Where SQLite has taken the transaction back by itself, there is nothing left to do.
            let _ = sqlx::query("ROLLBACK").execute(conn).await;
            Err(error)
        }
    }
}

/// Where the copy before the step to version `to` is.
pub(crate) fn backup_path(path: &Path, to: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".before-v{to}"));
    name.into()
}

/// A consistent copy, whole and on disk before the step begins. An earlier one of the same step is
/// replaced: that step did not happen, so the file is still what it was or newer.
async fn back_up(conn: &mut SqliteConnection, path: &Path, to: u32) -> Result<(), OpenError> {
    let backup = backup_path(path, to);
    let failed = |detail: String| OpenError::Backup { backup: backup.clone(), detail };
    let mut partial = backup.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let made = async {
        match fs::remove_file(&partial) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.to_string()),
            _ => {}
        }
        // VACUUM INTO takes an empty file and keeps its mode.
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial).map_err(|e| e.to_string())?;
        let name = partial.to_str().ok_or("the data directory's path is not UTF-8")?;
        sqlx::query("VACUUM INTO ?").bind(name).execute(conn).await.map_err(|e| e.to_string())?;
        let sync = || {
            File::open(&partial)?.sync_all()?;
            fs::rename(&partial, &backup)?;
            File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
        };
        sync().map_err(|e| e.to_string())
    };
    let result: Result<(), String> = made.await;
    if result.is_err() {
        let _ = fs::remove_file(&partial);
    }
    result.map_err(failed)
}
