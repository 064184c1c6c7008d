//! Checks of operations, execs and terminals.

use super::*;
use crate::{ExecRow, OperationRow, StoreError, TerminalRow};
use model::{ExecId, ExecState, Generation, OperationKind, OperationState, TerminalId, TerminalState};

fn exec_of(session_id: SessionId, key: Option<&str>) -> ExecRow {
    ExecRow {
        session_id,
        id: ExecId::new(),
        key: key.map(str::to_owned),
        state: ExecState::Running,
        generation: Generation(2),
        started_at: NOW,
        ended_at: None,
        record: r#"{"argv":["sh"]}"#.to_owned(),
    }
}

async fn with_execs(store: &Under, row: SessionRow, execs: Vec<ExecRow>) -> Result<SessionRow, StoreError> {
    let mut change = SessionChange::new(row.clone());
    change.execs = execs;
    let committed = store.commit(change).await?;
    let mut row = row;
    row.was_committed(&committed);
    Ok(row)
}

/// An operation is found while it runs, and keeps its end; it stays with its session.
pub async fn operations_read_back(store: Under) {
    let mut row = new_row();
    let mut operation = OperationRow::begun(row.id, OperationKind::Hibernate, NOW, json!({"generation": 3}));
    let mut change = SessionChange::new(row.clone());
    change.operations.push(operation.clone());
    row.was_committed(&store.commit(change).await.unwrap());
    assert_eq!(store.running_operations().await.unwrap(), [operation.clone()]);

    operation.state = OperationState::Failed;
    operation.ended_at = Some(Timestamp(NOW.0 + 5));
    operation.error = Some(json!({"code": "x"}));
    operation.intent = json!({"generation": 3, "step": "killed"});
    let mut change = SessionChange::new(row);
    change.operations.push(operation.clone());
    store.commit(change).await.unwrap();
    assert_eq!(store.running_operations().await.unwrap(), []);
    assert_eq!(store.operation(operation.id).await.unwrap(), Some(operation.clone()));

    let mut foreign = SessionChange::new(new_row());
    foreign.operations.push(operation.clone());
    assert_eq!(store.commit(foreign).await, Err(StoreError::ForeignOperation(operation.id)));
}

/// An exec is found by id, by key and among those that run, page by page.
pub async fn execs_read_back(store: Under) {
    let row = new_row();
    let mut execs: Vec<_> = (0..5).map(|n| exec_of(row.id, (n == 2).then_some("k"))).collect();
    let row = with_execs(&store, row, execs.clone()).await.unwrap();
    assert_eq!(store.exec(row.id, execs[1].id).await.unwrap().as_ref(), Some(&execs[1]));
    assert_eq!(store.exec_by_key(row.id, "k".into()).await.unwrap().as_ref(), Some(&execs[2]));
    execs[4].state = ExecState::Exited;
    execs[4].ended_at = Some(NOW);
    execs[4].record = "{}".into();
    let row = with_execs(&store, row, vec![execs[4].clone()]).await.unwrap();
    assert_eq!(store.running_execs(row.id).await.unwrap(), execs[..4]);

    let (mut seen, mut cursor) = (Vec::new(), None);
    loop {
        let page = store.list_execs(row.id, 2, cursor).await.unwrap();
        seen.extend(page.items);
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    execs.reverse();
    assert_eq!(seen, execs);
}

/// The same key twice is refused with the holder's id, whole; in another session it is another key.
pub async fn exec_keys_are_unique_in_their_session(store: Under) {
    let row = new_row();
    let first = exec_of(row.id, Some("k"));
    let row = with_execs(&store, row, vec![first.clone()]).await.unwrap();
    let taken = with_execs(&store, row.clone(), vec![exec_of(row.id, None), exec_of(row.id, Some("k"))]).await;
    assert_eq!(taken, Err(StoreError::ExecKeyTaken { holder: first.id }));
    assert_eq!(store.list_execs(row.id, 9, None).await.unwrap().items, std::slice::from_ref(&first));
    // The holder itself may be written again.
    with_execs(&store, row, vec![first]).await.unwrap();
    let other = new_row();
    let execs = vec![exec_of(other.id, Some("k"))];
    with_execs(&store, other, execs).await.unwrap();
}

/// A session that reports another's exec id touches its own rows only.
pub async fn work_of_sessions_is_apart(store: Under) {
    let victim = new_row();
    let exec = exec_of(victim.id, None);
    let victim = with_execs(&store, victim, vec![exec.clone()]).await.unwrap();
    let hostile = new_row();
    let forged = ExecRow { session_id: victim.id, state: ExecState::Killed, ..exec.clone() };
    let hostile = with_execs(&store, hostile, vec![forged]).await.unwrap();
    assert_eq!(store.exec(victim.id, exec.id).await.unwrap(), Some(exec.clone()));
    assert_eq!(store.exec(hostile.id, exec.id).await.unwrap().unwrap().session_id, hostile.id);
}

/// A terminal is found by id, in the list and among those that run.
pub async fn terminals_read_back(store: Under) {
    let mut row = new_row();
    let terminal = |name: Option<&str>| TerminalRow {
        session_id: row.id,
        id: TerminalId::new(),
        name: name.map(str::to_owned),
        state: TerminalState::Running,
        generation: Generation(1),
        started_at: NOW,
        ended_at: None,
        record: "{}".into(),
    };
    let mut terminals = vec![terminal(Some("main")), terminal(None), terminal(Some("main"))];
    let mut change = SessionChange::new(row.clone());
    change.terminals = terminals.clone();
    row.was_committed(&store.commit(change).await.unwrap());
    assert_eq!(store.running_terminals(row.id).await.unwrap(), terminals);
    terminals[1].state = TerminalState::Ended;
    terminals[1].ended_at = Some(NOW);
    let mut change = SessionChange::new(row.clone());
    change.terminals = vec![terminals[1].clone()];
    store.commit(change).await.unwrap();
    assert_eq!(store.terminal(row.id, terminals[1].id).await.unwrap().as_ref(), Some(&terminals[1]));
    assert_eq!(store.running_terminals(row.id).await.unwrap().len(), 2);
    let page = store.list_terminals(row.id, 2, None).await.unwrap();
    assert_eq!(page.items, [terminals[2].clone(), terminals[1].clone()]);
    let rest = store.list_terminals(row.id, 2, page.next_cursor).await.unwrap();
    assert_eq!((rest.items, rest.next_cursor), (vec![terminals[0].clone()], None));
}
