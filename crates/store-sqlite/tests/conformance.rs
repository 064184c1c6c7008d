//! SQLite held against what every store promises.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::sync::Arc;
use store::Store;
use store_sqlite::SqliteStore;
use tempfile::TempDir;

async fn empty_store() -> (Arc<dyn Store>, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (Arc::new(SqliteStore::open(dir.path()).await.unwrap()), dir)
}

store::conformance_tests!(empty_store);
