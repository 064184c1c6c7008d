//! Checks of sessions and their events.

use super::*;
use crate::{Cursor, ExecRow, OperationRow, Revision, SessionFilter, StoreError};
use model::{
    ByteSize, EventSeq, ExecId, ExecState, Generation, IdleAction, IdlePolicy, IdleWhen, LayerId, Memory, Offset, OnTimeout,
    OperationId, OperationKind, Resources, ServiceRestart, ServiceSpec, SnapshotId, State,
};

fn full_row() -> SessionRow {
    let text = |s: &str| Some(s.to_owned());
    SessionRow {
        key: Some("user-42:日本".parse().unwrap()),
        name: text("née \"x\" 🦀 '; DROP TABLE sessions; --"),
        task: text("line\nline"),
        state: State::Hibernated,
        reason: text("idle"),
        runtime: Runtime::Host,
        template_hash: text("t"),
        guest_hash: text("g"),
        runsc_hash: text("r"),
        generation: Generation(7),
        ephemeral: true,
        metadata: [("a.b".to_owned(), "1\"'%_".to_owned()), ("".to_owned(), "".to_owned())].into(),
        env: [("PATH".to_owned(), "/bin".to_owned())].into(),
        workdir: text("/w"),
        updated_at: Timestamp(NOW.0 + 1),
        last_activity_at: Timestamp(-5),
        idle: Some(IdlePolicy { after_seconds: 60, action: IdleAction::Hibernate, when: IdleWhen::NoClients }),
        timeout_seconds: Some(u64::MAX),
        timeout_at: Some(Timestamp(i64::MAX)),
        on_timeout: OnTimeout::Stop,
        ttl_seconds: Some(0),
        expires_at: Some(NOW),
        wake_at: Some(NOW),
        memory: Memory::Saved,
        image_generation: Some(Generation(7)),
        parent_session: Some(SessionId::new()),
        parent_snapshot: Some(SnapshotId::new()),
        parent_task: text("p"),
        resources: Resources { cpus: Some(1.5), memory_bytes: Some(ByteSize(1 << 40)), disk_bytes: None, pids: Some(9) },
        services: vec![ServiceSpec {
            name: "web".parse().unwrap(),
            argv: vec!["a".into()],
            env: Default::default(),
            cwd: None,
            restart: ServiceRestart::OnFailure,
        }],
        hooks: json!({"on_wake": ["x"]}),
        source: Some(json!({"git": "u"})),
        extra: json!([1, null]),
        facts_offset: Offset(u64::MAX),
        owner_token: text("o"),
        ended_reason: text("oom"),
        ended_at: Some(NOW),
        layers: vec![LayerId::new(), LayerId::new()],
        disk_epoch: 3,
        latest_snapshot: Some(SnapshotId::new()),
        ..new_row()
    }
}

/// Every field survives, odd values too, and so does a change of it.
pub async fn sessions_read_back_as_written(store: Under) {
    let mut row = insert(&store, full_row()).await;
    assert_eq!(row.revision, Revision(1));
    assert_eq!(store.session(row.id).await.unwrap(), Some(row.clone()));
    row.name = None;
    row.metadata.clear();
    row.state = State::Running;
    let row = insert(&store, row).await;
    assert_eq!(row.revision, Revision(2));
    assert_eq!(store.session(row.id).await.unwrap(), Some(row));
}

/// What isn't there is `None` or empty, never an error; a change of it is one.
pub async fn unknown_things_are_none(store: Under) {
    let id = SessionId::new();
    assert_eq!(store.session(id).await.unwrap(), None);
    assert_eq!(store.session_by_key("k".into()).await.unwrap(), None);
    assert_eq!(store.operation(OperationId::new()).await.unwrap(), None);
    assert_eq!(store.exec(id, ExecId::new()).await.unwrap(), None);
    assert_eq!(store.events(id, EventSeq(1), 10).await.unwrap(), []);
    assert_eq!(store.list_execs(id, 10, None).await.unwrap().items, []);
    let gone = SessionRow { revision: Revision(3), ..new_row() };
    assert_eq!(store.commit(SessionChange::new(gone.clone())).await, Err(StoreError::NoSession(gone.id)));
}

fn keyed(key: &str) -> SessionRow {
    SessionRow { key: Some(key.parse().unwrap()), ..new_row() }
}

/// A held key is refused to others, and the refusal names the holder.
pub async fn a_key_leads_to_one_session(store: Under) {
    let first = insert(&store, keyed("k")).await;
    let taken = store.commit(SessionChange::new(keyed("k"))).await;
    assert_eq!(taken, Err(StoreError::KeyTaken { holder: first.id }));
    insert(&store, keyed("K")).await;
    // Deletion alone doesn't free it: after an expiry the key still answers.
    let dead = insert(&store, SessionRow { state: State::Deleted, deleted_at: Some(NOW), ..first }).await;
    assert_eq!(store.session_by_key("k".into()).await.unwrap().unwrap().id, dead.id);
    let freed = insert(&store, SessionRow { key_freed: true, ..dead }).await;
    assert_eq!(store.session_by_key("k".into()).await.unwrap(), None);
    let second = insert(&store, keyed("k")).await;
    assert_eq!(store.session_by_key("k".into()).await.unwrap(), Some(second.clone()));
    let back = store.commit(SessionChange::new(SessionRow { key_freed: false, ..freed })).await;
    assert_eq!(back, Err(StoreError::KeyTaken { holder: second.id }));
}

/// A hundred creators of one key: one makes it, the others are told which.
pub async fn one_of_many_creators_wins(store: Under) {
    let rows: Vec<_> = (0..100).map(|_| keyed("same")).collect();
    let answers = all_of(rows.iter().map(|row| store.commit(SessionChange::new(row.clone()))).collect()).await;
    let winners: Vec<_> = rows.iter().zip(&answers).filter(|(_, a)| a.is_ok()).map(|(r, _)| r.id).collect();
    assert_eq!(winners.len(), 1);
    for answer in answers.into_iter().filter(Result::is_err) {
        assert_eq!(answer, Err(StoreError::KeyTaken { holder: winners[0] }));
    }
    assert_eq!(store.list_sessions(SessionFilter::default(), 1000, None).await.unwrap().items.len(), 1);
}

/// Replacing a session is one step: nobody sees the key free.
pub async fn a_freed_key_goes_to_the_next_in_one_commit(store: Under) {
    let old = insert(&store, keyed("k")).await;
    let next = keyed("k");
    let free = SessionChange::new(SessionRow { key_freed: true, ..old });
    let answers = store.commit_all(vec![free, SessionChange::new(next.clone())]).await.unwrap();
    assert_eq!(answers.iter().map(|a| a.revision).collect::<Vec<_>>(), [Revision(2), Revision(1)]);
    assert_eq!(store.session_by_key("k".into()).await.unwrap().unwrap().id, next.id);
}

/// A change onto another revision than the stored one leaves nothing at all.
pub async fn a_stale_revision_is_refused_whole(store: Under) {
    let row = insert(&store, new_row()).await;
    insert(&store, row.clone()).await;
    let mut stale = SessionChange::new(SessionRow { name: Some("stale".into()), ..row.clone() });
    stale.events.push(note("stale"));
    let conflict = StoreError::Conflict { session: row.id, expected: Revision(1), found: Revision(2) };
    assert_eq!(store.commit(stale).await, Err(conflict));
    let again = StoreError::Conflict { session: row.id, expected: Revision(0), found: Revision(2) };
    let twice = SessionChange::new(SessionRow { revision: Revision(0), ..row.clone() });
    assert_eq!(store.commit(twice).await, Err(again));
    assert_eq!(store.session(row.id).await.unwrap().unwrap().name, None);
    assert_eq!(store.events(row.id, EventSeq(1), 10).await.unwrap(), []);
}

/// One refused change takes back all of its call, rows of other tables included.
pub async fn commits_are_all_or_nothing(store: Under) {
    let held = insert(&store, keyed("held")).await;
    let mut good = SessionChange::new(new_row());
    let id = good.session.id;
    let operation = OperationRow::begun(id, OperationKind::Create, NOW, json!(null));
    good.events.push(note("x"));
    good.operations.push(operation.clone());
    let answer = store.commit_all(vec![good.clone(), SessionChange::new(keyed("held"))]).await;
    assert_eq!(answer, Err(StoreError::KeyTaken { holder: held.id }));
    assert_eq!(store.session(id).await.unwrap(), None);
    assert_eq!(store.operation(operation.id).await.unwrap(), None);
    assert_eq!(store.events(id, EventSeq(1), 10).await.unwrap(), []);
    let committed = store.commit(good).await.unwrap();
    assert_eq!(committed.events[0].seq, EventSeq(1));
    assert_eq!(store.operation(operation.id).await.unwrap(), Some(operation));
}

/// Many sessions that write at once, some of them in conflict: each acknowledged change is there, once.
pub async fn concurrent_commits_lose_nothing(store: Under) {
    let rows = all_of((0..40).map(|_| insert(&store, new_row())).collect()).await;
    let writers = rows.iter().map(|row| {
        let store = &store;
        async move {
            let mut row = row.clone();
            for round in 0..5 {
                let mut change = SessionChange::new(row.clone());
                change.events = vec![note(&format!("{round}a")), note(&format!("{round}b"))];
                let stale = SessionChange::new(SessionRow { revision: Revision(row.revision.0 + 9), ..row.clone() });
                let answers = all_of(vec![store.commit(change), store.commit(stale)]).await;
                row.was_committed(answers[0].as_ref().unwrap());
                assert!(matches!(answers[1], Err(StoreError::Conflict { .. })));
            }
        }
    });
    all_of(writers.collect()).await;
    for row in rows {
        let events = store.events(row.id, EventSeq(1), 100).await.unwrap();
        assert_eq!(events.iter().map(|e| e.seq.0).collect::<Vec<_>>(), (1..=10).collect::<Vec<_>>());
        assert_eq!(store.session(row.id).await.unwrap().unwrap().next_event_seq, EventSeq(11));
    }
}

/// Each filter alone and together.
pub async fn lists_filter(store: Under) {
    let pairs = |list: &[(&str, &str)]| list.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let owned = |owner: &str| SessionRow { owner_token: Some(owner.to_owned()), ..keyed("a") };
    let a = insert(&store, SessionRow { metadata: pairs(&[("team", "x"), ("env", "p")]), ..owned("t") }).await;
    let b = insert(&store, SessionRow { metadata: pairs(&[("team", "x")]), state: State::Running, ..new_row() }).await;
    let c = SessionRow { metadata: pairs(&[("team", "y")]), runtime: Runtime::Host, ..new_row() };
    let c = insert(&store, SessionRow { parent_session: Some(a.id), ..c }).await;
    let gone = SessionRow { metadata: pairs(&[("team", "x")]), state: State::Deleted, deleted_at: Some(NOW), ..new_row() };
    let gone = SessionRow { owner_token: Some("t".to_owned()), ..gone };
    let d = insert(&store, gone).await;
    // Newest first.
    let none = SessionFilter::default;
    let cases = [
        (none(), vec![c.id, b.id, a.id]),
        (SessionFilter { include_deleted: true, ..none() }, vec![d.id, c.id, b.id, a.id]),
        (SessionFilter { states: vec![State::Deleted], ..none() }, vec![d.id]),
        (SessionFilter { states: vec![State::Running, State::Paused], ..none() }, vec![b.id]),
        (SessionFilter { metadata: pairs(&[("team", "x")]), ..none() }, vec![b.id, a.id]),
        (SessionFilter { metadata: pairs(&[("team", "x"), ("env", "p")]), ..none() }, vec![a.id]),
        (SessionFilter { metadata: pairs(&[("team", "x")]), include_deleted: true, ..none() }, vec![d.id, b.id, a.id]),
        (SessionFilter { metadata: pairs(&[("team", "%")]), ..none() }, vec![]),
        (SessionFilter { key: Some("a".into()), ..none() }, vec![a.id]),
        (SessionFilter { runtime: Some(Runtime::Host), ..none() }, vec![c.id]),
        (SessionFilter { ids: Some(vec![a.id, d.id]), ..none() }, vec![a.id]),
        (SessionFilter { ids: Some(vec![]), ..none() }, vec![]),
        (SessionFilter { owner_token: Some("t".into()), ..none() }, vec![a.id]),
        (SessionFilter { owner_token: Some("t".into()), include_deleted: true, ..none() }, vec![d.id, a.id]),
        (SessionFilter { owner_token: Some("T".into()), ..none() }, vec![]),
        (SessionFilter { parent: Some(a.id), ..none() }, vec![c.id]),
        (SessionFilter { parent: Some(b.id), ..none() }, vec![]),
        (SessionFilter { metadata: pairs(&[("team", "x")]), ids: Some(vec![b.id]), ..none() }, vec![b.id]),
    ];
    for (filter, expected) in cases {
        let page = store.list_sessions(filter.clone(), 10, None).await.unwrap();
        assert_eq!(page.items.iter().map(|s| s.id).collect::<Vec<_>>(), expected, "{filter:?}");
        assert_eq!(page.next_cursor, None);
    }
    // A changed value is found under the new one only.
    insert(&store, SessionRow { metadata: pairs(&[("team", "z")]), ..c }).await;
    for (value, count) in [("y", 0), ("z", 1)] {
        let filter = SessionFilter { metadata: pairs(&[("team", value)]), ..none() };
        assert_eq!(store.list_sessions(filter, 10, None).await.unwrap().items.len(), count, "{value}");
    }
}

/// What is created between two pages neither doubles nor hides anything, with and without a filter.
pub async fn lists_page_stably(store: Under) {
    let tagged = || SessionRow { metadata: [("t".to_owned(), "1".to_owned())].into(), ..new_row() };
    let mut expected = Vec::new();
    for _ in 0..10 {
        expected.insert(0, insert(&store, tagged()).await.id);
    }
    for metadata in [Default::default(), tagged().metadata] {
        let (mut seen, mut cursor) = (Vec::new(), None);
        loop {
            let filter = SessionFilter { metadata: Clone::clone(&metadata), ..Default::default() };
            let page = store.list_sessions(filter, 3, cursor).await.unwrap();
            seen.extend(page.items.iter().map(|s| s.id).filter(|id| expected.contains(id)));
            insert(&store, tagged()).await;
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(seen, expected);
    }
}

/// Text that no list gave out is the caller's mistake, not the database's.
pub async fn bad_cursors_are_refused(store: Under) {
    for bad in ["", "x", "s' OR 1=1 --", "e99999999999999999999999"] {
        let cursor = Some(Cursor(bad.to_owned()));
        let id = SessionId::new();
        let filter = SessionFilter::default();
        assert_eq!(store.list_sessions(filter, 1, cursor.clone()).await.unwrap_err(), StoreError::BadCursor, "{bad}");
        assert_eq!(store.scan_sessions(1, cursor.clone()).await.unwrap_err(), StoreError::BadCursor, "{bad}");
        assert_eq!(store.list_execs(id, 1, cursor.clone()).await.unwrap_err(), StoreError::BadCursor, "{bad}");
        assert_eq!(store.list_terminals(id, 1, cursor.clone()).await.unwrap_err(), StoreError::BadCursor, "{bad}");
        assert_eq!(store.events_of_all(cursor.clone(), 1).await.unwrap_err(), StoreError::BadCursor, "{bad}");
        assert_eq!(store.list_audit(1, cursor).await.unwrap_err(), StoreError::BadCursor, "{bad}");
    }
}

/// Beginnings go before ends, live sessions before deleted ones.
pub async fn ids_are_found_by_their_ends(store: Under) {
    let with = |text: &str, state| SessionRow { id: text.parse().unwrap(), state, ..new_row() };
    let a = insert(&store, with("aaaa0000-0000-7000-8000-00000000bbbb", State::Running)).await.id;
    let b = insert(&store, with("bbbb0000-0000-7000-8000-00000000cccc", State::Running)).await.id;
    let c = insert(&store, with("cccc0000-0000-7000-8000-00000000aaaa", State::Deleted)).await.id;
    let all = a.to_string();
    let cases: [(&str, &[SessionId]); 10] = [
        ("bbbb", &[b]),
        ("BBBB0", &[b]),
        ("cccc", &[b]),
        ("cccc0", &[c]),
        ("0000aaaa", &[c]),
        ("-00000000bbbb", &[a]),
        (&all, &[a]),
        ("", &[]),
        ("*", &[]),
        ("aaaa%", &[]),
    ];
    for (part, expected) in cases {
        assert_eq!(store.find_ids(part.to_owned()).await.unwrap(), expected, "{part}");
    }
}

/// A server's start sees every session that isn't deleted, once, oldest first.
pub async fn scans_see_all_that_live(store: Under) {
    let mut expected = Vec::new();
    for n in 0..7 {
        let row = insert(&store, new_row()).await;
        if n == 3 {
            insert(&store, SessionRow { state: State::Deleted, ..row }).await;
        } else {
            expected.push(row);
        }
    }
    for limit in [1, 2, 3, 6, 100] {
        let (mut seen, mut cursor) = (Vec::new(), None);
        loop {
            let scan = store.scan_sessions(limit, cursor).await.unwrap();
            assert_eq!(scan.unreadable, []);
            seen.extend(scan.sessions);
            cursor = scan.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(seen, expected, "{limit}");
    }
}

/// A tombstone stays for its time and then goes with all that belongs to it.
pub async fn tombstones_are_purged(store: Under) {
    let deleted = |at| SessionRow { state: State::Deleted, deleted_at: Some(Timestamp(at)), ..keyed(&format!("k{at}")) };
    let mut ids = Vec::new();
    for at in 0..50 {
        let mut change = SessionChange::new(deleted(at));
        change.events.push(note("x"));
        change.execs.push(ExecRow {
            session_id: change.session.id,
            id: ExecId::new(),
            key: None,
            state: ExecState::Lost,
            generation: Generation(1),
            started_at: NOW,
            ended_at: None,
            record: "{}".into(),
        });
        ids.push(change.session.id);
        store.commit(change).await.unwrap();
    }
    let live = insert(&store, new_row()).await;
    let mut purged = store.purge_deleted(Timestamp(45)).await.unwrap();
    purged.sort();
    assert_eq!(purged, ids[..45]);
    assert_eq!(store.events(ids[0], EventSeq(1), 9).await.unwrap(), []);
    assert_eq!(store.list_execs(ids[0], 9, None).await.unwrap().items, []);
    assert_eq!(store.session_by_key("k0".into()).await.unwrap(), None);
    assert!(store.session(ids[45]).await.unwrap().is_some());
    assert!(store.session(live.id).await.unwrap().is_some());
    assert_eq!(store.purge_deleted(Timestamp(45)).await.unwrap(), []);
}

/// From 1, in order, over several commits; a page begins where it was asked to.
pub async fn events_are_numbered_without_holes(store: Under) {
    let mut row = new_row();
    for texts in [vec!["1", "2"], vec![], vec!["3"]] {
        let mut change = SessionChange::new(row.clone());
        change.events = texts.iter().map(|text| note(text)).collect();
        let committed = store.commit(change).await.unwrap();
        assert_eq!(committed.events.len(), texts.len());
        row.was_committed(&committed);
    }
    assert_eq!(row.next_event_seq, EventSeq(4));
    let events = store.events(row.id, EventSeq(2), 10).await.unwrap();
    assert_eq!(events.iter().map(|e| (e.seq.0, e.data["text"].as_str().unwrap())).collect::<Vec<_>>(), [(2, "2"), (3, "3")]);
    assert_eq!(store.events(row.id, EventSeq(0), 2).await.unwrap().len(), 2);
    assert_eq!(store.events(row.id, EventSeq(u64::MAX), 2).await.unwrap(), []);
}

/// What a commit answers is what readers see, in one order for all sessions, from any place on.
pub async fn events_of_all_have_one_order(store: Under) {
    assert_eq!(store.events_of_all(Some(store.latest_event().await.unwrap()), 10).await.unwrap(), []);
    let mut told = Vec::new();
    for n in 0..6 {
        let mut change = SessionChange::new(new_row());
        change.events = vec![note(&format!("{n}")), NewEvent { operation_id: Some(OperationId::new()), ..note("") }];
        told.extend(store.commit(change).await.unwrap().events);
    }
    assert_eq!(store.events_of_all(None, 100).await.unwrap(), told);
    let (mut seen, mut cursor) = (Vec::new(), None);
    loop {
        let page = store.events_of_all(cursor.clone(), 5).await.unwrap();
        let Some(last) = page.last() else { break };
        cursor = Some(last.cursor());
        seen.extend(page);
    }
    assert_eq!(seen, told);
    assert_eq!(store.latest_event().await.unwrap(), told[11].cursor());
    assert!(told.windows(2).all(|pair| pair[0].global < pair[1].global));
}
