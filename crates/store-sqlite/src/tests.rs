//! What can only be shown from within: steps of the schema that don't exist yet, and a file that can't grow.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use crate::{
    BoxFuture, OpenError, SqliteStore,
    error::from_sqlx,
    migrate::{MIGRATIONS, Migration, backup_path},
    open,
};
use model::{Actor, EventSeq, EventType, Runtime, SessionId, Timestamp};
use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use std::{os::unix::fs::PermissionsExt, path::Path};
use store::{Events, Meta, NewEvent, SessionChange, SessionRow, Sessions, StoreError};

const ADDED: Migration = Migration("ALTER TABLE meta ADD COLUMN note TEXT; UPDATE meta SET note = 'new';");
const BROKEN: Migration = Migration("ALTER TABLE meta ADD COLUMN note TEXT; UPDATE nothing SET a = 1;");

fn steps(last: Migration) -> Vec<Migration> {
    MIGRATIONS.iter().map(|m| Migration(m.0)).chain([last]).collect()
}

async fn version(path: &Path) -> i64 {
    let mut conn = SqliteConnection::connect_with(&SqliteConnectOptions::new().filename(path)).await.unwrap();
    let version = sqlx::query_scalar("PRAGMA user_version").fetch_one(&mut conn).await.unwrap();
    conn.close().await.unwrap();
    version
}

#[tokio::test]
async fn a_migration_keeps_the_data_and_a_copy_of_what_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(SqliteStore::FILE_NAME);
    let store = SqliteStore::open(dir.path()).await.unwrap();
    store.set_meta("a".into(), "1".into()).await.unwrap();
    store.close().await;
    let (old, new) = (MIGRATIONS.len() as u32, MIGRATIONS.len() as u32 + 1);
    let backup = backup_path(&path, new);
    assert!(!backup.exists() && !backup_path(&path, 1).exists(), "a new file needs no copy");

    // A step that fails is taken back as a whole.
    let error = open::prepare(&path, &steps(BROKEN)).await.unwrap_err();
    assert!(matches!(&error, OpenError::Migration { to, .. } if *to == new), "{error:?}");
    assert_eq!(version(&path).await, i64::from(old));

    open::prepare(&path, &steps(ADDED)).await.unwrap();
    assert_eq!(version(&path).await, i64::from(new));
    let mut conn = SqliteConnection::connect_with(&SqliteConnectOptions::new().filename(&path)).await.unwrap();
    let kept: (String, String) = sqlx::query_as("SELECT value, note FROM meta").fetch_one(&mut conn).await.unwrap();
    assert_eq!(kept, ("1".to_owned(), "new".to_owned()));
    conn.close().await.unwrap();

    assert_eq!(backup.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(version(&backup).await, i64::from(old));
    let restored = tempfile::tempdir().unwrap();
    std::fs::copy(&backup, restored.path().join(SqliteStore::FILE_NAME)).unwrap();
    let store = SqliteStore::open(restored.path()).await.unwrap();
    assert_eq!(store.meta("a".into()).await.unwrap().as_deref(), Some("1"));

    let error = SqliteStore::open(dir.path()).await.err().unwrap();
    assert!(matches!(error, OpenError::Newer { .. }), "{error:?}");
}

async fn limit_pages(store: &SqliteStore, sql: &'static str) {
    let limited = store.write(move |conn| -> BoxFuture<'_, _> {
        Box::pin(async move { sqlx::raw_sql(sql).execute(conn).await.map(drop).map_err(|e| from_sqlx(&e)) })
    });
    limited.await.unwrap();
}

/// A file that can't grow is what a full disk is to SQLite.
#[tokio::test]
async fn a_full_disk_refuses_whole_and_goes_on_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(dir.path()).await.unwrap();
    let row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(0));
    let mut change = SessionChange::new(row.clone());
    change.events = vec![NewEvent {
        at: Timestamp(0),
        kind: EventType::NOTE,
        actor: Actor::system(),
        operation_id: None,
        data: "x".repeat(1 << 20).into(),
    }];
    // Less than there is counts as what there is.
    limit_pages(&store, "PRAGMA max_page_count = 1").await;
    let (big, small) = tokio::join!(store.commit(change.clone()), store.session(row.id));
    assert_eq!(big, Err(StoreError::NoSpace));
    assert_eq!(small, Ok(None));
    let error = StoreError::NoSpace;
    assert!(error.is_retryable() && error.has_no_side_effects());
    limit_pages(&store, "PRAGMA max_page_count = 1000000").await;
    store.commit(change).await.unwrap();
    assert_eq!(store.events(row.id, EventSeq(1), 10).await.unwrap().len(), 1);
}
