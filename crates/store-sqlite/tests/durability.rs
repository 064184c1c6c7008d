//! What was acknowledged survives a kill at any moment, and speed that thousands of sessions need.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use model::{Actor, EventSeq, EventType, Runtime, SessionId, State, Timestamp};
use std::{
    collections::HashMap,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};
use store::{NewEvent, SessionChange, SessionFilter, SessionRow, Sessions, Store};
use store_sqlite::SqliteStore;

const NOW: Timestamp = Timestamp(1_700_000_000_000);
const CHILD_DIR: &str = "STORE_TEST_CHILD_DIR";

fn row() -> SessionRow {
    SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", NOW)
}

fn note() -> NewEvent {
    NewEvent { at: NOW, kind: EventType::NOTE, actor: Actor::system(), operation_id: None, data: serde_json::json!({}) }
}

/// Not a test: the process that is killed. Tells each acknowledged commit on a line of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by another test as its child"]
async fn child_that_writes_until_it_is_killed() {
    let Some(dir) = std::env::var_os(CHILD_DIR) else { return };
    let store = Arc::new(SqliteStore::open(Path::new(&dir)).await.unwrap());
    let writers = (0..16).map(|_| {
        let store = store.clone();
        tokio::spawn(async move {
            let mut row = row();
            // More than will ever be done before the kill.
            for _ in 0..1_000_000 {
                let mut change = SessionChange::new(row.clone());
                change.events = vec![note(), note()];
                row.was_committed(&store.commit(change).await.unwrap());
                println!("acknowledged {} {} {}", row.id, row.revision, row.next_event_seq.0);
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
}

#[tokio::test]
async fn a_kill_during_commits_loses_nothing_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged: HashMap<SessionId, (u64, u64)> = HashMap::new();
    for kill_after in [1, 17, 200, 555] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_writes_until_it_is_killed", "--ignored", "--nocapture"])
            .env(CHILD_DIR, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut seen = 0;
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            // The test harness's own words may stand before the first one.
            let Some((_, told)) = line.split_once("acknowledged ") else { continue };
            let [id, revision, seq]: [&str; 3] = told.split(' ').collect::<Vec<_>>().try_into().unwrap();
            acknowledged.insert(id.parse().unwrap(), (revision.parse().unwrap(), seq.parse().unwrap()));
            seen += 1;
            if seen == kill_after {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(seen >= kill_after);

        let store = SqliteStore::open(dir.path()).await.unwrap();
        for (id, (revision, next_seq)) in &acknowledged {
            let kept = store.session(*id).await.unwrap().expect("an acknowledged session is there");
            assert!(kept.revision.0 >= *revision && kept.next_event_seq.0 >= *next_seq, "{kept:?}");
            let events = all_events(&store, *id).await;
            assert_eq!(events, (1..kept.next_event_seq.0).collect::<Vec<_>>(), "no hole, nothing half");
        }
        store.close().await;
    }
}

async fn all_events(store: &dyn Store, id: SessionId) -> Vec<u64> {
    let mut numbers = Vec::new();
    loop {
        let from = EventSeq(numbers.len() as u64 + 1);
        let page = store.events(id, from, 1000).await.unwrap();
        if page.is_empty() {
            return numbers;
        }
        numbers.extend(page.iter().map(|e| e.seq.0));
    }
}

#[tokio::test]
async fn what_is_queued_is_written_before_a_close_ends() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(SqliteStore::open(dir.path()).await.unwrap());
    let change = SessionChange::new(row());
    let id = change.session.id;
    // The first poll puts the change into the queue; the close comes behind it.
    let commit = store.commit(change);
    let (committed, ()) = tokio::join!(biased; commit, store.close());
    committed.unwrap();
    assert_eq!(store.commit(SessionChange::new(row())).await, Err(store::StoreError::Closed));
    assert_eq!(store.session(id).await, Err(store::StoreError::Closed));
    let again = SqliteStore::open(dir.path()).await.unwrap();
    assert!(again.session(id).await.unwrap().is_some());
}

/// Ten thousand sleeping sessions: lists by metadata and the read at a server's start are whole. What they
/// take is printed; targets are the benchmark's matter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_sessions_are_listed_and_scanned_whole() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(dir.path()).await.unwrap();
    let sleeping = |n: usize| SessionRow {
        state: State::Hibernated,
        metadata: [("team".to_owned(), format!("{}", n % 10)), ("all".to_owned(), "1".to_owned())].into(),
        env: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        task: Some("a task of the usual length, in one sentence".to_owned()),
        ..row()
    };
    for step in 0..10 {
        let changes = (0..1000).map(|n| SessionChange::new(sleeping(step * 1000 + n)));
        store.commit_all(changes.collect()).await.unwrap();
    }
    let filters = [[("team".to_owned(), "3".to_owned())].into(), [("all".to_owned(), "1".to_owned())].into()];
    for metadata in filters {
        let filter = SessionFilter { metadata, states: vec![State::Hibernated], ..Default::default() };
        best_of_three(async || {
            assert_eq!(store.list_sessions(filter.clone(), 100, None).await.unwrap().items.len(), 100);
        })
        .await;
    }
    best_of_three(async || {
        let (mut count, mut cursor) = (0, None);
        loop {
            let scan = store.scan_sessions(1000, cursor).await.unwrap();
            count += scan.sessions.len();
            cursor = scan.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(count, 10_000);
    })
    .await;
}

async fn best_of_three(run: impl AsyncFn()) {
    let mut best = Duration::MAX;
    for _ in 0..3 {
        let begun = Instant::now();
        run().await;
        best = best.min(begun.elapsed());
    }
    println!("best of three: {best:?}");
}
