//! `dormouse restore`: a data directory made of a backup.

use super::data;
use crate::client::default_data_dir;
use anyhow::{Context, bail};
use model::Timestamp;
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};
use store::Store;
use store_sqlite::SqliteStore;

/// Makes the data directory. It must have no sessions yet; after a failure it has none.
///
/// # Errors
/// No backup there, a damaged one; a data directory that is in use.
pub fn run(
    place: &str,
    name: Option<&str>,
    dir: Option<PathBuf>,
    key_file: Option<PathBuf>,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    data::keep_private();
    let dir = std::path::absolute(dir.unwrap_or_else(default_data_dir)).context("the data directory has no absolute path")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("can't start")?;
    let location = blob::Location::parse(place)?;
    // Before anything is made.
    let restore = runtime.block_on(engine::Restore::open(&location, key_file.map(blob::KeySource::File), name))?;
    let lock = data::open(&dir)?;
    let database = dir.join(SqliteStore::FILE_NAME);
    if database.exists() {
        bail!("{} has sessions already: restore into a new directory", dir.display());
    }
    let done = runtime.block_on(write(&restore, &dir));
    if done.is_err() {
        for file in [database.clone(), database.with_extension("db-wal"), database.with_extension("db-shm")] {
            let _ = fs::remove_file(file);
        }
    }
    drop(lock);
    let (name, restored) = (&restore.backup().name, done?);
    if as_json {
        println!(
            "{}",
            json!({ "backup": name, "sessions": restored.sessions, "snapshots": restored.snapshots, "missing": restored.missing })
        );
    } else {
        println!("{name}");
        eprintln!("dormouse: {} sessions and {} snapshots, all asleep", restored.sessions, restored.snapshots);
        for missing in &restored.missing {
            eprintln!("dormouse: not in the backup: {missing}");
        }
        eprintln!("dormouse: start the server with --data {} --object-store {place}", dir.display());
    }
    Ok(ExitCode::SUCCESS)
}

async fn write(restore: &engine::Restore, dir: &Path) -> anyhow::Result<engine::Restored> {
    restore.write_store(&dir.join(SqliteStore::FILE_NAME)).await?;
    let store = Arc::new(SqliteStore::open(dir).await.context("the backup's store of sessions can't be opened")?);
    let ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let now = Timestamp(i64::try_from(ms).unwrap_or(i64::MAX));
    let as_store: Arc<dyn Store> = store.clone();
    let restored = restore.settle(&as_store, now).await;
    store.close().await;
    Ok(restored?)
}
