//! What becomes of files that are older, newer, damaged or somebody else's.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use model::{EventSeq, ExecId, SessionId, SnapshotId, SnapshotState, State, TokenLimits};
use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt, path::Path};
use store::{
    Audit, Events, Execs, Meta, Operations, Secrets, SessionFilter, Sessions, SnapshotFilter, Snapshots, Terminals, Tokens,
};
use store_sqlite::{OpenError, SCHEMA_VERSION, SqliteStore};

async fn raw(path: &Path) -> SqliteConnection {
    let options = SqliteConnectOptions::new().filename(path).create_if_missing(true);
    SqliteConnection::connect_with(&options).await.unwrap()
}

async fn run(path: &Path, sql: &'static str) {
    let mut conn = raw(path).await;
    sqlx::raw_sql(sql).execute(&mut conn).await.unwrap();
    conn.close().await.unwrap();
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

async fn refused(dir: &Path) -> OpenError {
    match SqliteStore::open(dir).await {
        Ok(_) => panic!("it was opened"),
        Err(error) => error,
    }
}

/// The file as version 1 wrote it, frozen. Every later version must read it.
#[tokio::test]
async fn a_store_of_version_1_reads() {
    let dir = tempfile::tempdir().unwrap();
    run(&dir.path().join("store.db"), include_str!("fixtures/version_1.sql")).await;
    let store = SqliteStore::open(dir.path()).await.unwrap();

    let id: SessionId = "01890000-0000-7000-8000-000000000001".parse().unwrap();
    let session = store.session(id).await.unwrap().unwrap();
    assert_eq!((session.state, session.revision.0, session.next_event_seq.0), (State::Hibernated, 3, 3));
    assert_eq!(session.key.as_ref().unwrap().as_str(), "user-1");
    let filter = SessionFilter { metadata: [("team".to_owned(), "x".to_owned())].into(), ..Default::default() };
    assert_eq!(store.list_sessions(filter, 10, None).await.unwrap().items, [session]);
    let events = store.events(id, EventSeq(1), 10).await.unwrap();
    assert_eq!(events.iter().map(|e| e.kind.to_string()).collect::<Vec<_>>(), ["session.created", "exec.started"]);
    let exec: ExecId = "01890000-0000-7000-8000-0000000000e1".parse().unwrap();
    assert_eq!(store.exec(id, exec).await.unwrap().unwrap().key.as_deref(), Some("build"));
    assert_eq!(store.running_terminals(id).await.unwrap().len(), 1);
    assert_eq!(store.running_operations().await.unwrap().len(), 1);
    let token = store.token_by_hash("abcd".into()).await.unwrap().unwrap();
    assert_eq!((token.scopes, token.limits), (vec!["read".to_owned(), "admin".to_owned()], TokenLimits::default()));
    assert_eq!(store.list_audit(10, None).await.unwrap().items.len(), 1);
    assert_eq!(store.meta("instance".into()).await.unwrap().as_deref(), Some("i-1"));
}

/// Sessions of version 1 are found by the token that made them, and a copy of the file as it was is kept.
#[tokio::test]
async fn sessions_of_version_1_have_their_owner() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.db");
    run(&path, include_str!("fixtures/version_1.sql")).await;
    run(&path, "UPDATE sessions SET doc = json_set(doc, '$.owner_token', 'b1')").await;
    let store = SqliteStore::open(dir.path()).await.unwrap();
    let of = |owner: &str| SessionFilter { owner_token: Some(owner.to_owned()), ..Default::default() };
    let found = store.list_sessions(of("b1"), 10, None).await.unwrap().items;
    assert_eq!(found.iter().map(|row| row.owner_token.as_deref()).collect::<Vec<_>>(), [Some("b1")]);
    assert_eq!(store.list_sessions(of("b2"), 10, None).await.unwrap().items, []);
    assert!(dir.path().join("store.db.before-v2").exists());
}

/// The file as version 3 wrote it, frozen: snapshots, and sessions that know what they were made from.
#[tokio::test]
async fn a_store_of_version_3_reads() {
    let dir = tempfile::tempdir().unwrap();
    run(&dir.path().join("store.db"), include_str!("fixtures/version_3.sql")).await;
    let store = SqliteStore::open(dir.path()).await.unwrap();
    let id: SessionId = "01890000-0000-7000-8000-000000000001".parse().unwrap();
    let [gone, kept]: [SnapshotId; 2] =
        ["c0", "c1"].map(|end| format!("01890000-0000-7000-8000-0000000000{end}").parse().unwrap());
    let row = store.snapshot(kept).await.unwrap().unwrap();
    assert_eq!((row.revision.0, row.state, row.memory, row.size_bytes), (2, SnapshotState::Ready, true, 4096));
    assert_eq!((row.session_id, row.parent_id, row.labels["step"].as_str()), (id, Some(gone), "3"));
    let was: store::SessionRow = serde_json::from_value(row.template_row.clone()).unwrap();
    assert_eq!((was.id, was.latest_snapshot), (id, Some(gone)));
    assert_eq!(store.snapshot_by_name("before-upgrade".into()).await.unwrap(), Some(row.clone()));
    assert_eq!(store.snapshots_due(row.keep_until.unwrap()).await.unwrap(), std::slice::from_ref(&row));
    assert_eq!(store.snapshots_of(id).await.unwrap(), std::slice::from_ref(&row));
    let all = SnapshotFilter { include_deleted: true, ..SnapshotFilter::default() };
    let all = store.list_snapshots(all, 10, None).await.unwrap().items;
    assert_eq!(all.iter().map(|row| row.id).collect::<Vec<_>>(), [kept, gone]);
    assert_eq!(store.snapshot_by_name("old".into()).await.unwrap(), None);
    let of = SessionFilter { parent: Some(id), ..Default::default() };
    let forks = store.list_sessions(of, 10, None).await.unwrap().items;
    assert_eq!(
        forks.iter().map(|fork| (fork.parent_snapshot, fork.layers.clone())).collect::<Vec<_>>(),
        [(Some(kept), row.layers)]
    );
}

/// A store of version 3 gets its place for secrets, and its sessions the policy that they had without one.
#[tokio::test]
async fn sessions_of_version_3_reach_everything_and_there_are_no_secrets() {
    let dir = tempfile::tempdir().unwrap();
    run(&dir.path().join("store.db"), include_str!("fixtures/version_3.sql")).await;
    let store = SqliteStore::open(dir.path()).await.unwrap();
    assert!(dir.path().join("store.db.before-v4").exists());
    assert_eq!(store.list_secrets().await.unwrap(), []);
    let id: SessionId = "01890000-0000-7000-8000-000000000001".parse().unwrap();
    let session = store.session(id).await.unwrap().unwrap();
    assert_eq!((session.network, session.secrets_withheld), (model::network::Policy::default(), false));
    assert!(session.traffic.is_empty());
}

/// Sessions of version 2 are found by the session that they were made from.
#[tokio::test]
async fn sessions_of_version_2_have_their_parent() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.db");
    run(&path, include_str!("fixtures/version_1.sql")).await;
    run(&path, include_str!("../migrations/0002_token_limits.sql")).await;
    run(&path, "UPDATE sessions SET doc = json_set(doc, '$.parent_session', '01890000-0000-7000-8000-000000000009')").await;
    run(&path, "PRAGMA user_version = 2").await;
    let store = SqliteStore::open(dir.path()).await.unwrap();
    for (end, count) in [("9", 1), ("8", 0)] {
        let parent = Some(format!("01890000-0000-7000-8000-00000000000{end}").parse().unwrap());
        let found = store.list_sessions(SessionFilter { parent, ..Default::default() }, 10, None).await.unwrap().items;
        assert_eq!(found.len(), count);
        assert!(found.iter().all(|row| row.layers.is_empty() && row.latest_snapshot.is_none()));
    }
    assert!(dir.path().join("store.db.before-v3").exists() && !dir.path().join("store.db.before-v2").exists());
}

#[tokio::test]
async fn the_files_are_private() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.db");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let store = SqliteStore::open(dir.path()).await.unwrap();
    store.set_meta("a".into(), "b".into()).await.unwrap();
    let names: Vec<_> = files(dir.path()).into_keys().collect();
    assert_eq!(names, ["store.db", "store.db-shm", "store.db-wal"]);
    for name in names {
        let mode = fs::metadata(dir.path().join(&name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[tokio::test]
async fn a_newer_schema_is_refused_untouched() {
    let dir = tempfile::tempdir().unwrap();
    SqliteStore::open(dir.path()).await.unwrap().close().await;
    run(&dir.path().join("store.db"), "PRAGMA user_version = 77").await;
    let before = files(dir.path());
    let error = refused(dir.path()).await;
    assert!(matches!(error, OpenError::Newer { found: 77, known: SCHEMA_VERSION, .. }), "{error:?}");
    assert!(error.to_string().contains("newer Dormouse (schema 77, this one knows"), "{error}");
    assert_eq!(files(dir.path()), before);
}

/// After a crash the newer number may stand in the log only.
#[tokio::test]
async fn a_newer_schema_in_the_log_is_refused_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(dir.path()).await.unwrap();
    store.close().await;
    let path = dir.path().join("store.db");
    let mut conn = raw(&path).await;
    sqlx::raw_sql("PRAGMA user_version = 77").execute(&mut conn).await.unwrap();
    // As a kill leaves it: the log is there, and nobody has folded it in.
    let crashed = tempfile::tempdir().unwrap();
    for name in ["store.db", "store.db-wal"] {
        fs::copy(dir.path().join(name), crashed.path().join(name)).unwrap();
    }
    let before = files(crashed.path());
    let error = refused(crashed.path()).await;
    assert!(matches!(error, OpenError::Newer { found: 77, .. }), "{error:?}");
    let mut after = files(crashed.path());
    after.remove("store.db-shm");
    assert_eq!(after, before);
}

#[tokio::test]
async fn damaged_and_foreign_files_are_refused_untouched() {
    let header = "SQLite format 3\0".as_bytes();
    for bytes in [b"hello".to_vec(), vec![0xff; 8192], header.to_vec(), [header, &[0xff; 40]].concat()] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("store.db"), &bytes).unwrap();
        let error = refused(dir.path()).await;
        assert!(matches!(error, OpenError::Corrupt { .. }), "{error:?}");
        assert!(error.to_string().contains("store.db is damaged"), "{error}");
        assert_eq!(files(dir.path()), BTreeMap::from([("store.db".to_owned(), bytes)]));
    }
    for sql in ["PRAGMA application_id = 7; CREATE TABLE t (a)", "CREATE TABLE t (a)"] {
        let dir = tempfile::tempdir().unwrap();
        run(&dir.path().join("store.db"), sql).await;
        let error = refused(dir.path()).await;
        assert!(matches!(error, OpenError::NotOurs { .. }), "{error:?}");
    }
}

/// A snapshot that can't be read is told, and the others go on; nobody takes what it needs for unneeded.
#[tokio::test]
async fn a_damaged_snapshot_is_told_wherever_it_counts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.db");
    run(&path, include_str!("fixtures/version_3.sql")).await;
    run(
        &path,
        "INSERT INTO snapshots (id, revision, session_id, state, keep_until, doc) VALUES \
         ('01890000-0000-7000-8000-00000000dead', 1, '01890000-0000-7000-8000-000000000001', 'ready', 1, '{}')",
    )
    .await;
    let store = SqliteStore::open(dir.path()).await.unwrap();
    let scan = store.scan_snapshots(100, None).await.unwrap();
    assert_eq!((scan.snapshots.len(), scan.unreadable.len()), (1, 1));
    let dead = &scan.unreadable[0];
    assert_eq!(dead.id, "01890000-0000-7000-8000-00000000dead");
    assert_eq!(store.list_snapshots(SnapshotFilter::default(), 10, None).await.unwrap().items.len(), 1);
    assert_eq!(store.snapshots_due(model::Timestamp(i64::MAX)).await.unwrap().len(), 1);
    let session = "01890000-0000-7000-8000-000000000001".parse().unwrap();
    assert!(store.snapshots_of(session).await.unwrap_err().to_string().contains("is damaged"));
    let error = store.snapshot(dead.id.parse().unwrap()).await.unwrap_err();
    assert!(error.to_string().contains("snapshot 01890000-0000-7000-8000-00000000dead is damaged"), "{error}");
}

/// One unreadable row is told, and the others go on.
#[tokio::test]
async fn a_damaged_row_stops_its_own_session_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.db");
    run(&path, include_str!("fixtures/version_1.sql")).await;
    run(
        &path,
        "INSERT INTO sessions (id, revision, next_event_seq, key_freed, state, runtime, doc) \
         VALUES ('01890000-0000-7000-8000-00000000dead', 1, 1, 0, 'running', 'gvisor', '{\"id\":')",
    )
    .await;
    let store = SqliteStore::open(dir.path()).await.unwrap();
    let scan = store.scan_sessions(100, None).await.unwrap();
    assert_eq!(scan.sessions.len(), 1);
    assert_eq!(scan.unreadable[0].id, "01890000-0000-7000-8000-00000000dead");
    assert_eq!(store.list_sessions(SessionFilter::default(), 10, None).await.unwrap().items.len(), 1);
    let error = store.session(scan.unreadable[0].id.parse().unwrap()).await.unwrap_err();
    assert!(error.to_string().contains("session 01890000-0000-7000-8000-00000000dead is damaged"), "{error}");
}
