//! Checks of snapshots.

use super::*;
use crate::{Cursor, Parcel, Revision, SnapshotFilter, SnapshotRow, StoreError};
use model::{EventSeq, Generation, LayerId, SnapshotId, SnapshotState, State};

fn new_snapshot(session: SessionId) -> SnapshotRow {
    let row = SnapshotRow::new(SnapshotId::new(), session, Runtime::Gvisor, "debian", NOW);
    SnapshotRow { state: SnapshotState::Ready, ..row }
}

fn named(session: SessionId, name: &str) -> SnapshotRow {
    SnapshotRow { name: Some(name.parse().unwrap()), ..new_snapshot(session) }
}

fn full_snapshot(session: SessionId) -> SnapshotRow {
    let text = |s: &str| Some(s.to_owned());
    SnapshotRow {
        owner_token: text("o"),
        name: Some("before-upgrade:日本".parse().unwrap()),
        labels: [("step".to_owned(), "'; DROP TABLE snapshots; --".to_owned()), (String::new(), String::new())].into(),
        reason: text("r"),
        generation: Generation(7),
        memory: true,
        size_bytes: u64::MAX,
        unique_bytes: 1 << 40,
        memory_bytes: 3,
        parent_id: Some(SnapshotId::new()),
        created_at: Timestamp(-5),
        keep_until: Some(Timestamp(i64::MAX)),
        taken_by: "rollback".to_owned(),
        runtime: Runtime::Interpreter,
        template_hash: text("t"),
        guest_hash: text("g"),
        runsc_hash: text("r"),
        runsc_version: text("20240729"),
        cpu_features: vec!["avx2".to_owned()],
        layers: vec![LayerId::new(), LayerId::new()],
        disk_epoch: 4,
        parcel: Some(Parcel {
            manifest: "m".to_owned(),
            packed_at: Timestamp(4),
            generation: Generation(3),
            disk_epoch: 4,
            plain_bytes: 5,
            disk_bytes: 2,
            own_bytes: 4,
            new_bytes: 3,
            is_away: true,
        }),
        paused_ms: 12,
        template_row: json!({"env": {"A": "\u{0}b"}}),
        works: json!({"execs": []}),
        extra: json!([1, null]),
        ..new_snapshot(session)
    }
}

/// Writes a row by itself; it counts on as the store does.
async fn put(store: &Under, mut row: SnapshotRow) -> SnapshotRow {
    store.commit_snapshots(vec![row.clone()]).await.unwrap();
    row.was_committed();
    row
}

fn deleted(row: SnapshotRow, at: Timestamp) -> SnapshotRow {
    SnapshotRow { state: SnapshotState::Deleted, deleted_at: Some(at), ..row }
}

async fn listed(store: &Under, filter: SnapshotFilter) -> Vec<SnapshotId> {
    store.list_snapshots(filter, 100, None).await.unwrap().items.iter().map(|row| row.id).collect()
}

/// Every field survives, with a session's change and by itself, and so does a change of it.
pub async fn snapshots_read_back_as_written(store: Under) {
    let mut change = SessionChange::new(new_row());
    let mut row = full_snapshot(change.session.id);
    change.snapshots = vec![row.clone(), new_snapshot(change.session.id)];
    store.commit(change).await.unwrap();
    row.was_committed();
    assert_eq!(row.revision, Revision(1));
    assert_eq!(store.snapshot(row.id).await.unwrap(), Some(row.clone()));
    row.parcel = None;
    row.keep_until = None;
    let row = put(&store, row).await;
    assert_eq!((row.revision, store.snapshot(row.id).await.unwrap()), (Revision(2), Some(row.clone())));
    assert_eq!(store.snapshots_of(row.session_id).await.unwrap().len(), 2);

    let unknown = SnapshotId::new();
    assert_eq!(store.snapshot(unknown).await.unwrap(), None);
    assert_eq!(store.snapshot_by_name("nobody".into()).await.unwrap(), None);
    assert_eq!(store.snapshots_of(SessionId::new()).await.unwrap(), []);
    let gone = SnapshotRow { id: unknown, revision: Revision(3), ..row };
    assert_eq!(store.commit_snapshots(vec![gone]).await, Err(StoreError::NoSnapshot(unknown)));
}

/// A change onto another revision than the stored one leaves nothing, nor does anything that was to go with it.
pub async fn a_stale_snapshot_is_refused_whole(store: Under) {
    let session = insert(&store, new_row()).await;
    let old = put(&store, new_snapshot(session.id)).await;
    let new = put(&store, SnapshotRow { memory: true, ..old.clone() }).await;
    let conflict = StoreError::SnapshotConflict { snapshot: old.id, expected: Revision(1), found: Revision(2) };
    let stale = SnapshotRow { size_bytes: 1, ..old.clone() };
    assert_eq!(store.commit_snapshots(vec![new_snapshot(session.id), stale.clone()]).await, Err(conflict.clone()));
    let mut change = SessionChange::new(SessionRow { name: Some("x".into()), ..session.clone() });
    change.events.push(note("x"));
    change.snapshots = vec![stale];
    assert_eq!(store.commit(change).await, Err(conflict));
    assert_eq!(store.session(session.id).await.unwrap(), Some(session.clone()));
    assert_eq!(store.events(session.id, EventSeq(1), 9).await.unwrap(), []);
    assert_eq!(store.snapshots_of(session.id).await.unwrap(), [new]);
    let twice = SnapshotRow { revision: Revision(0), ..old.clone() };
    let again = StoreError::SnapshotConflict { snapshot: old.id, expected: Revision(0), found: Revision(2) };
    assert_eq!(store.commit_snapshots(vec![twice]).await, Err(again));
}

/// A name is one snapshot's while that is being taken or is there; then it is free.
pub async fn a_name_leads_to_one_snapshot(store: Under) {
    let session = SessionId::new();
    let taking = SnapshotRow { state: SnapshotState::Taking, ..named(session, "n") };
    let first = put(&store, taking).await;
    let taken = StoreError::SnapshotNameTaken { holder: first.id };
    assert_eq!(store.commit_snapshots(vec![named(SessionId::new(), "n")]).await, Err(taken.clone()));
    let first = put(&store, SnapshotRow { state: SnapshotState::Ready, ..first }).await;
    assert_eq!(store.snapshot_by_name("n".into()).await.unwrap(), Some(first.clone()));
    assert_eq!(store.snapshot_by_name("N".into()).await.unwrap(), None);
    let mut change = SessionChange::new(new_row());
    change.snapshots.push(named(change.session.id, "n"));
    assert_eq!(store.commit(change.clone()).await, Err(taken));
    assert_eq!(store.session(change.session.id).await.unwrap(), None, "nothing of the change is there");
    // Many at once: one gets it.
    let rows: Vec<_> = (0..20).map(|_| named(session, "same")).collect();
    let answers = all_of(rows.iter().map(|row| store.commit_snapshots(vec![row.clone()])).collect()).await;
    let winners: Vec<_> = rows.iter().zip(&answers).filter(|(_, answer)| answer.is_ok()).map(|(row, _)| row.id).collect();
    assert_eq!(winners.len(), 1);
    for answer in answers.into_iter().filter(Result::is_err) {
        assert_eq!(answer, Err(StoreError::SnapshotNameTaken { holder: winners[0] }));
    }
    // One that is deleted or came to nothing has no name any more.
    put(&store, deleted(first, NOW)).await;
    assert_eq!(store.snapshot_by_name("n".into()).await.unwrap(), None);
    let second = put(&store, named(session, "n")).await;
    put(&store, SnapshotRow { state: SnapshotState::Failed, ..second }).await;
    let third = put(&store, named(session, "n")).await;
    assert_eq!(store.snapshot_by_name("n".into()).await.unwrap().unwrap().id, third.id);
}

/// Each filter alone and together, newest first, and pages that nothing made meanwhile disturbs.
pub async fn snapshots_are_listed_by_pages(store: Under) {
    let (a, b) = (SessionId::new(), SessionId::new());
    let mut ids = Vec::new();
    for n in 0..6 {
        let row = SnapshotRow { owner_token: (n < 2).then(|| "t".to_owned()), ..new_snapshot(if n % 2 == 0 { a } else { b }) };
        ids.push(put(&store, row).await.id);
    }
    let gone = store.snapshot(ids[4]).await.unwrap().unwrap();
    put(&store, deleted(gone, NOW)).await;
    let none = SnapshotFilter::default;
    let of = |indices: &[usize]| indices.iter().map(|n| ids[*n]).collect::<Vec<_>>();
    let cases: [(SnapshotFilter, &[usize]); 7] = [
        (none(), &[5, 3, 2, 1, 0]),
        (SnapshotFilter { include_deleted: true, ..none() }, &[5, 4, 3, 2, 1, 0]),
        (SnapshotFilter { session: Some(a), ..none() }, &[2, 0]),
        (SnapshotFilter { session: Some(a), include_deleted: true, ..none() }, &[4, 2, 0]),
        (SnapshotFilter { sessions: Some(vec![b]), ..none() }, &[5, 3, 1]),
        (SnapshotFilter { sessions: Some(vec![]), ..none() }, &[]),
        (SnapshotFilter { owner_token: Some("t".into()), session: Some(a), ..none() }, &[0]),
    ];
    for (filter, expected) in cases {
        assert_eq!(listed(&store, filter.clone()).await, of(expected), "{filter:?}");
    }
    let (mut seen, mut cursor) = (Vec::new(), None);
    loop {
        let page = store.list_snapshots(none(), 2, cursor).await.unwrap();
        seen.extend(page.items.iter().map(|row| row.id).filter(|id| ids.contains(id)));
        put(&store, new_snapshot(a)).await;
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, of(&[5, 3, 2, 1, 0]));
    for bad in ["", "s0123456789abcdef0123456789abcdef", "n'"] {
        let cursor = Some(Cursor(bad.to_owned()));
        assert_eq!(store.list_snapshots(none(), 1, cursor.clone()).await.unwrap_err(), StoreError::BadCursor, "{bad}");
        assert_eq!(store.scan_snapshots(1, cursor).await.unwrap_err(), StoreError::BadCursor, "{bad}");
    }
}

/// Beginnings go before ends, those that are there before deleted ones.
pub async fn snapshot_ids_are_found_by_their_ends(store: Under) {
    let with = |text: &str| SnapshotRow { id: text.parse().unwrap(), ..new_snapshot(SessionId::new()) };
    let a = put(&store, with("aaaa0000-0000-7000-8000-00000000bbbb")).await.id;
    let b = put(&store, with("bbbb0000-0000-7000-8000-00000000cccc")).await.id;
    let c = put(&store, deleted(with("cccc0000-0000-7000-8000-00000000aaaa"), NOW)).await.id;
    let cases: [(&str, &[SnapshotId]); 7] =
        [("bbbb", &[b]), ("BBBB0", &[b]), ("cccc", &[b]), ("0000aaaa", &[c]), ("-00000000bbbb", &[a]), ("", &[]), ("a*", &[])];
    for (part, expected) in cases {
        assert_eq!(store.find_snapshot_ids(part.to_owned()).await.unwrap(), expected, "{part}");
    }
}

/// What a session leaves behind is there after it is forgotten, and can still be changed.
pub async fn snapshots_outlive_their_session(store: Under) {
    let mut change = SessionChange::new(new_row());
    change.session.state = State::Deleted;
    change.session.deleted_at = Some(Timestamp(1));
    let session = change.session.id;
    change.snapshots = vec![new_snapshot(session), named(session, "kept")];
    let mut kept = change.snapshots[1].clone();
    store.commit(change).await.unwrap();
    kept.was_committed();
    assert_eq!(store.purge_deleted(Timestamp(2)).await.unwrap(), [session]);
    assert_eq!(store.session(session).await.unwrap(), None);
    assert_eq!(store.snapshots_of(session).await.unwrap().len(), 2);
    let kept = put(&store, SnapshotRow { size_bytes: 1, ..kept }).await;
    assert_eq!(store.snapshot_by_name("kept".into()).await.unwrap(), Some(kept));
}

/// What is overdue is told, the longest overdue first, but not while it is being taken or once it is gone.
pub async fn snapshots_fall_due(store: Under) {
    let session = SessionId::new();
    let until = |at: i64| SnapshotRow { keep_until: Some(Timestamp(at)), ..new_snapshot(session) };
    let late = put(&store, until(20)).await;
    let early = put(&store, SnapshotRow { state: SnapshotState::Failed, ..until(10) }).await;
    put(&store, SnapshotRow { state: SnapshotState::Taking, ..until(5) }).await;
    put(&store, deleted(until(6), NOW)).await;
    put(&store, new_snapshot(session)).await;
    assert_eq!(store.snapshots_due(Timestamp(9)).await.unwrap(), []);
    assert_eq!(store.snapshots_due(Timestamp(19)).await.unwrap(), std::slice::from_ref(&early));
    assert_eq!(store.snapshots_due(Timestamp(i64::MAX)).await.unwrap(), [early, late]);
}

/// Every snapshot that isn't deleted is seen, once, oldest first.
pub async fn snapshot_scans_see_all_that_are_there(store: Under) {
    let session = SessionId::new();
    let mut expected = Vec::new();
    for n in 0..7 {
        let row = put(&store, new_snapshot(session)).await;
        if n == 3 {
            put(&store, deleted(row, NOW)).await;
        } else {
            expected.push(row);
        }
    }
    for limit in [1, 2, 3, 6, 100] {
        let (mut seen, mut cursor) = (Vec::new(), None);
        loop {
            let scan = store.scan_snapshots(limit, cursor).await.unwrap();
            assert_eq!(scan.unreadable, []);
            seen.extend(scan.snapshots);
            cursor = scan.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(seen, expected, "{limit}");
    }
    assert_eq!(store.snapshots_of(session).await.unwrap(), expected);
}

/// Tombstones stay for their time and then go; so does what never came about. What is there stays.
pub async fn snapshot_tombstones_are_purged(store: Under) {
    let session = SessionId::new();
    let old = put(&store, deleted(new_snapshot(session), Timestamp(NOW.0 + 10))).await;
    let young = put(&store, deleted(new_snapshot(session), Timestamp(NOW.0 + 50))).await;
    let failed = put(&store, SnapshotRow { state: SnapshotState::Failed, ..new_snapshot(session) }).await;
    let there = put(&store, new_snapshot(session)).await;
    let taking = put(&store, SnapshotRow { state: SnapshotState::Taking, ..new_snapshot(session) }).await;
    assert_eq!(store.purge_snapshots(NOW).await.unwrap(), []);
    let mut purged = store.purge_snapshots(Timestamp(NOW.0 + 20)).await.unwrap();
    purged.sort();
    assert_eq!(purged, [old.id, failed.id]);
    let all = listed(&store, SnapshotFilter { include_deleted: true, ..SnapshotFilter::default() }).await;
    assert_eq!(all, [taking.id, there.id, young.id]);
}
