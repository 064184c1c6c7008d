//! Turns what supervisors wrote down into rows and events, each fact exactly once.
//!
//! The offset of the next fact is part of the session's row, and is committed together with what the facts say. So
//! reading again after a crash, or from two places at once, does no harm: what was applied is left out.

use crate::{
    Error,
    inner::{Inner, blocking},
    session::{SandboxEnd, Session},
};
use journal::{LineItem, LineReadError, ReadError, Reader, read_lines};
use model::{Actor, EventType, ExecId, ExecState, Offset, TerminalId, TerminalState, Timestamp};
use serde_json::{Value, json};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};
use store::{ExecRow, HostTotals, NewEvent, SessionChange, SessionRow, TerminalRow};
use wire::{
    facts::{Fact, FactLine, HostTraffic},
    layout::JournalName,
    records::{ExecRecord, TerminalRecord},
};

/// Bytes of facts in one commit.
const BATCH: usize = 256 * 1024;

/// A fact and where it stands.
#[derive(Debug, Clone)]
struct Found {
    at: Offset,
    line: FactLine,
}

/// What reading facts told that needs an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// An image turned out not to restore: the frozen original has to go on.
    pub confirm_failed: Option<String>,
}

/// Reads all facts there are and commits what they say.
pub(crate) async fn drain(inner: &Arc<Inner>, session: &Arc<Session>) -> Result<Told, Error> {
    let _one = session.reading_facts.acquire().await.map_err(|_| Error::ShuttingDown)?;
    let mut told = Told::default();
    let mut reader = Reader::open(session.layout.journal(&JournalName::Facts));
    loop {
        let from = session.view().row.facts_offset;
        let (back, read) = blocking(move || {
            let read = read_lines(&mut reader, from, BATCH);
            (reader, read)
        })
        .await?;
        reader = back;
        let lines = match read {
            Ok(lines) if lines.items.is_empty() => return Ok(told),
            Ok(lines) => lines,
            // It was just deleted.
            Err(_) if !session.layout.dir().exists() => return Ok(told),
            Err(LineReadError::Read(ReadError::BeyondTail { tail, .. })) => {
                // A loss of power took facts that were applied already: what follows is written from there on.
                tracing::warn!(session = %session.id, %from, %tail, "facts that were applied are gone");
                inner.change(session, Box::new(move |row| Some(reset(row, from, tail)))).await?;
                return Ok(told);
            }
            Err(error) => {
                // Damage stops this session's facts, and nothing else.
                tracing::error!(session = %session.id, %error, "the facts of a session can't be read");
                return Ok(told);
            }
        };
        let found = without_ended(inner, session, parse(lines.items)).await?;
        for Found { line, .. } in &found {
            match &line.fact {
                Fact::SandboxEnded { reason, detail } => {
                    session.sandbox_ended(SandboxEnd { generation: line.generation, reason: *reason, detail: detail.clone() })
                }
                Fact::Confirmed { ok: false, detail } if line.generation == session.view().row.generation => {
                    told.confirm_failed = Some(detail.clone());
                }
                _ => {}
            }
        }
        let next = lines.next;
        inner.change(session, Box::new(move |row| Some(apply(row, &found, next)))).await?;
    }
}

/// Leaves out what would begin or end an exec or a terminal once more that has ended: a guest that was taken over is
/// believed what runs in it, and history is not its to write. One that counts as lost does not begin again; but how it ended
/// is believed to the supervisor that it ran under, where that wrote it down.
async fn without_ended(inner: &Arc<Inner>, session: &Session, found: Vec<Found>) -> Result<Vec<Found>, Error> {
    let mut known: HashMap<WorkId, Option<Ended>> = HashMap::new();
    for Found { line, .. } in &found {
        if let Some(work) = work_of(&line.fact)
            && let Entry::Vacant(entry) = known.entry(work)
        {
            entry.insert(Ended::of(inner, session, work).await?);
        }
    }
    let stands = |Found { line, .. }: &Found| {
        let ended = work_of(&line.fact).and_then(|work| known.get(&work).copied().flatten());
        let stands = ended.is_none_or(|ended| ended.is_corrected_by(line));
        if !stands {
            tracing::warn!(session = %session.id, fact = ?line.fact, "what is said of something that has ended is left out");
        }
        stands
    };
    Ok(found.into_iter().filter(stands).collect())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum WorkId {
    Exec(ExecId),
    Terminal(TerminalId),
}

/// What a fact begins or ends.
fn work_of(fact: &Fact) -> Option<WorkId> {
    match fact {
        Fact::ExecStarted { exec, .. } | Fact::ExecEnded { exec } => Some(WorkId::Exec(exec.id)),
        Fact::TerminalOpened { terminal, .. } | Fact::TerminalEnded { terminal } => Some(WorkId::Terminal(terminal.id)),
        _ => None,
    }
}

/// What the store has as ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ended {
    at: Timestamp,
    /// Nobody knew how.
    lost: bool,
}

impl Ended {
    async fn of(inner: &Inner, session: &Session, work: WorkId) -> Result<Option<Ended>, Error> {
        Ok(match work {
            WorkId::Exec(id) => {
                let row = inner.store.exec(session.id, id).await?.filter(|row| row.state != ExecState::Running);
                row.map(|row| Ended { at: row.ended_at.unwrap_or(Timestamp(i64::MIN)), lost: row.state == ExecState::Lost })
            }
            WorkId::Terminal(id) => {
                let row = inner.store.terminal(session.id, id).await?.filter(|row| row.state == TerminalState::Ended);
                let record = row.map(|row| terminal_of(&row)).transpose()?;
                record.map(|record| Ended { at: record.ended_at.unwrap_or(Timestamp(i64::MIN)), lost: !is_known(&record) })
            }
        })
    }

    /// True where the fact knows how it ended and this doesn't, and was written down before it was given up: what a later
    /// sandbox claims is no knowledge.
    fn is_corrected_by(self, line: &FactLine) -> bool {
        let knows = match &line.fact {
            Fact::ExecEnded { exec } => !matches!(exec.state, ExecState::Running | ExecState::Lost),
            Fact::TerminalEnded { terminal } => is_known(terminal),
            _ => false,
        };
        self.lost && knows && line.at <= self.at
    }
}

/// True where it is known how the terminal's program ended.
fn is_known(terminal: &TerminalRecord) -> bool {
    terminal.exit_code.is_some() || terminal.signal.is_some()
}

/// Reads on at `tail`, unless somebody has read on meanwhile.
fn reset(row: &SessionRow, from: Offset, tail: Offset) -> SessionChange {
    let mut change = SessionChange::new(row.clone());
    if row.facts_offset == from {
        change.session.facts_offset = tail;
    }
    change
}

fn parse(items: Vec<LineItem>) -> Vec<Found> {
    let mut found = Vec::with_capacity(items.len());
    for item in items {
        match item {
            LineItem::Line { at, bytes } => match serde_json::from_slice::<FactLine>(&bytes) {
                Ok(line) => found.push(Found { at, line }),
                Err(error) => tracing::warn!(%at, %error, "a fact can't be read and is left out"),
            },
            LineItem::Gap { from, to } => tracing::warn!(%from, %to, "facts are missing"),
        }
    }
    found
}

/// What the facts change in a session that has applied everything below its offset.
fn apply(row: &SessionRow, found: &[Found], next: Offset) -> SessionChange {
    let mut change = SessionChange::new(row.clone());
    if next <= row.facts_offset {
        return change;
    }
    change.session.facts_offset = next;
    for Found { at, line } in found {
        if *at >= row.facts_offset {
            apply_one(&mut change, line);
        }
    }
    change
}

fn apply_one(change: &mut SessionChange, line: &FactLine) {
    let session = change.session.id;
    let at = line.at;
    let event = |kind: EventType, actor: Actor, data: Value| NewEvent { at, kind, actor, operation_id: None, data };
    let by = |actor: &Option<String>| actor.clone().map_or_else(Actor::system, Actor);
    match &line.fact {
        Fact::ExecStarted { exec, actor } => {
            if exec.hook.is_none() {
                active(&mut change.session, at);
            }
            let data = json!({ "exec_id": exec.id, "argv": exec.argv, "pid": exec.pid });
            change.events.push(event(EventType::EXEC_STARTED, by(actor), data));
            put_exec(change, exec_row(session, exec));
        }
        Fact::ExecEnded { exec } => {
            if exec.hook.is_none() {
                active(&mut change.session, at);
            }
            change.events.push(event(EventType::EXEC_ENDED, Actor::inside(), exec_end(exec)));
            if let Some(hook) = &exec.hook {
                let mut data = exec_end(exec);
                data["hook"] = json!(hook);
                change.events.push(event(EventType::HOOK_ENDED, Actor::inside(), data));
            }
            put_exec(change, exec_row(session, exec));
        }
        Fact::TerminalOpened { terminal, actor } => {
            active(&mut change.session, at);
            let data = json!({ "terminal_id": terminal.id, "argv": terminal.argv, "name": terminal.name });
            change.events.push(event(EventType::TERMINAL_OPENED, by(actor), data));
            put_terminal(change, terminal_row(session, terminal));
        }
        Fact::TerminalEnded { terminal } => {
            change.events.push(event(EventType::TERMINAL_CLOSED, Actor::inside(), terminal_end(terminal)));
            put_terminal(change, terminal_row(session, terminal));
        }
        Fact::TerminalAttached { terminal, client, mode, actor } => {
            let data = json!({ "terminal_id": terminal, "client": client, "mode": mode });
            change.events.push(event(EventType::TERMINAL_ATTACHED, by(actor), data));
        }
        Fact::TerminalDetached { terminal, client } => {
            let data = json!({ "terminal_id": terminal, "client": client });
            change.events.push(event(EventType::TERMINAL_DETACHED, Actor::system(), data));
        }
        Fact::ServiceStarted { name, pid, restarts } => {
            let data = json!({ "name": name, "pid": pid, "restarts": restarts });
            change.events.push(event(EventType::SERVICE_STARTED, Actor::inside(), data));
        }
        Fact::ServiceEnded { name, exit_code, signal, restart_in_ms } => {
            let data = json!({ "name": name, "exit_code": exit_code, "signal": signal, "restart_in_ms": restart_in_ms });
            change.events.push(event(EventType::SERVICE_ENDED, Actor::inside(), data));
        }
        Fact::Gap { stream, from, to } => {
            let data = json!({ "stream": stream, "from": from, "to": to });
            change.events.push(event(EventType::GAP, Actor::system(), data));
        }
        Fact::Unsaveable { items } => {
            let (kind, data) = saveable(items);
            change.events.push(event(kind, Actor::inside(), data));
        }
        Fact::Note { text } => {
            active(&mut change.session, at);
            change.events.push(event(EventType::NOTE, Actor::inside(), json!({ "text": text })));
        }
        Fact::KeepAwake { seconds } => {
            active(&mut change.session, at);
            change.events.push(event(EventType::KEEP_AWAKE, Actor::inside(), json!({ "seconds": seconds })));
        }
        Fact::AgentWaiting { for_, text } => {
            let data = json!({ "for": for_, "text": text });
            change.events.push(event(EventType::AGENT_WAITING, Actor::inside(), data));
        }
        Fact::Oom { limit_bytes, used_bytes, killed } => {
            let data = json!({ "limit_bytes": limit_bytes, "used_bytes": used_bytes, "killed": killed });
            change.events.push(event(EventType::OOM, Actor::system(), data));
        }
        Fact::DiskOver { limit_bytes, used_bytes } => {
            let data = json!({ "limit_bytes": limit_bytes, "used_bytes": used_bytes });
            change.events.push(event(EventType::DISK_OVER_LIMIT, Actor::system(), data));
        }
        Fact::DiskWithin { limit_bytes, used_bytes } => {
            let data = json!({ "limit_bytes": limit_bytes, "used_bytes": used_bytes });
            change.events.push(event(EventType::DISK_WITHIN_LIMIT, Actor::system(), data));
        }
        Fact::FilesWritten { path, op, actor } => {
            active(&mut change.session, at);
            change.events.push(event(EventType::FILES_WRITTEN, by(actor), json!({ "path": path, "op": op })));
        }
        Fact::NetworkDenied { host, port, reason, repeated } => {
            let data = json!({ "host": host, "port": port, "reason": reason, "repeated": repeated });
            change.events.push(event(EventType::NETWORK_DENIED, Actor::inside(), data));
        }
        Fact::Traffic { items } => {
            active(&mut change.session, at);
            for HostTraffic { host, connections, sent_bytes, received_bytes } in items {
                let (connections, sent_bytes, received_bytes) = (*connections, *sent_bytes, *received_bytes);
                change.session.traffic.add(host, HostTotals { connections, sent_bytes, received_bytes });
            }
        }
        Fact::PortOpened { port } => {
            let data = json!({ "port": port.port, "address": port.address, "program": port.program });
            change.events.push(event(EventType::PORT_OPENED, Actor::inside(), data));
        }
        Fact::PortClosed { port } => {
            change.events.push(event(EventType::PORT_CLOSED, Actor::inside(), json!({ "port": port })));
        }
        Fact::Confirmed { ok: false, detail } => {
            change.events.push(event(EventType::CONFIRM_FAILED, Actor::system(), json!({ "detail": detail })));
        }
        // Told by the change of state that follows.
        Fact::Confirmed { ok: true, .. } | Fact::SandboxEnded { .. } | Fact::Unknown => {}
    }
}

/// What stands in the way of saving the memory: the first of it at the top, all in `items`. With nothing left of it the
/// memory can be saved again.
fn saveable(items: &[wire::records::Unsaveable]) -> (EventType, Value) {
    let Some(first) = items.first() else { return (EventType::MEMORY_SAVEABLE, json!({})) };
    let mut data = unsaveable(first);
    data["items"] = items.iter().map(unsaveable).collect();
    (EventType::MEMORY_UNSAVEABLE, data)
}

fn unsaveable(item: &wire::records::Unsaveable) -> Value {
    json!({ "pid": item.pid, "process": item.process, "file": item.path, "kind": item.kind, "detail": item.to_string() })
}

fn active(row: &mut SessionRow, at: Timestamp) {
    row.last_activity_at = row.last_activity_at.max(at);
}

/// What an ended exec's event tells.
pub(crate) fn exec_end(exec: &ExecRecord) -> Value {
    json!({
        "exec_id": exec.id, "state": exec.state, "exit_code": exec.exit_code, "signal": exec.signal, "reason": exec.reason,
        "stdout_bytes": exec.stdout_bytes, "stderr_bytes": exec.stderr_bytes,
    })
}

/// What an ended terminal's event tells.
pub(crate) fn terminal_end(terminal: &TerminalRecord) -> Value {
    json!({
        "terminal_id": terminal.id, "exit_code": terminal.exit_code, "signal": terminal.signal, "reason": terminal.reason,
    })
}

/// The later record of one exec stands.
fn put_exec(change: &mut SessionChange, row: ExecRow) {
    match change.execs.iter_mut().find(|known| known.id == row.id) {
        Some(known) => *known = row,
        None => change.execs.push(row),
    }
}

fn put_terminal(change: &mut SessionChange, row: TerminalRow) {
    match change.terminals.iter_mut().find(|known| known.id == row.id) {
        Some(known) => *known = row,
        None => change.terminals.push(row),
    }
}

/// An exec's record as the store keeps it.
pub(crate) fn exec_row(session: model::SessionId, exec: &ExecRecord) -> ExecRow {
    ExecRow {
        session_id: session,
        id: exec.id,
        key: exec.key.clone(),
        state: exec.state,
        generation: exec.generation,
        started_at: exec.started_at,
        ended_at: exec.ended_at,
        record: serde_json::to_string(exec).unwrap_or_default(),
    }
}

/// A terminal's record as the store keeps it.
pub(crate) fn terminal_row(session: model::SessionId, terminal: &TerminalRecord) -> TerminalRow {
    TerminalRow {
        session_id: session,
        id: terminal.id,
        name: terminal.name.clone(),
        state: terminal.state,
        generation: terminal.generation,
        started_at: terminal.started_at,
        ended_at: terminal.ended_at,
        record: serde_json::to_string(terminal).unwrap_or_default(),
    }
}

/// The record in a row of the store.
pub(crate) fn exec_of(row: &ExecRow) -> Result<ExecRecord, Error> {
    serde_json::from_str(&row.record).map_err(|e| Error::internal(format!("the record of exec {} is damaged: {e}", row.id)))
}

/// The record in a row of the store.
pub(crate) fn terminal_of(row: &TerminalRow) -> Result<TerminalRecord, Error> {
    let damaged = |e| Error::internal(format!("the record of terminal {} is damaged: {e}", row.id));
    serde_json::from_str(&row.record).map_err(damaged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{EndReason, ExecId, ExecState, Generation, Runtime, SessionId};

    fn line(fact: Fact) -> FactLine {
        FactLine { at: Timestamp(50), generation: Generation::FIRST, fact }
    }

    fn exec(state: ExecState) -> ExecRecord {
        ExecRecord {
            id: ExecId(uuid::Uuid::from_u128(7)),
            key: None,
            generation: Generation::FIRST,
            state,
            exit_code: None,
            signal: None,
            reason: None,
            argv: vec!["true".into()],
            cwd: None,
            user: None,
            started_at: Timestamp(40),
            ended_at: None,
            pid: Some(2),
            stdout_bytes: Offset::ZERO,
            stderr_bytes: Offset::ZERO,
            hook: None,
        }
    }

    fn found() -> Vec<Found> {
        let started = Fact::ExecStarted { exec: exec(ExecState::Running), actor: Some("token:a".into()) };
        let ended = Fact::ExecEnded { exec: exec(ExecState::Exited) };
        let gone = Fact::SandboxEnded { reason: EndReason::Killed, detail: String::new() };
        [(0, started), (100, ended), (200, gone)].map(|(at, fact)| Found { at: Offset(at), line: line(fact) }).into()
    }

    #[test]
    fn a_fact_is_applied_once_however_often_it_is_read() {
        let mut row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(1));
        let all = apply(&row, &found(), Offset(300));
        assert_eq!(all.session.facts_offset, Offset(300));
        assert_eq!(all.session.last_activity_at, Timestamp(50));
        assert_eq!(all.events.iter().map(|e| e.kind.0.as_ref()).collect::<Vec<_>>(), ["exec.started", "exec.ended"]);
        assert_eq!(all.events[0].actor, Actor("token:a".into()));
        assert_eq!(all.execs.len(), 1, "one row for one exec");
        assert_eq!(all.execs[0].state, ExecState::Exited);

        row.facts_offset = Offset(100);
        let rest = apply(&row, &found(), Offset(300));
        assert_eq!(rest.events.len(), 1);
        row.facts_offset = Offset(300);
        assert!(apply(&row, &found(), Offset(300)).events.is_empty());
    }

    #[test]
    fn what_is_lost_is_corrected_by_older_knowledge_and_never_begins_again() {
        let lost = Ended { at: Timestamp(50), lost: true };
        let ended = |state| line(Fact::ExecEnded { exec: exec(state) });
        assert!(lost.is_corrected_by(&ended(ExecState::Exited)), "its supervisor knew");
        for state in [ExecState::Running, ExecState::Lost] {
            assert!(!lost.is_corrected_by(&ended(state)), "{state:?} is no knowledge");
        }
        let began = line(Fact::ExecStarted { exec: exec(ExecState::Running), actor: None });
        assert!(!lost.is_corrected_by(&began), "it does not begin again");
        assert!(!Ended { lost: false, ..lost }.is_corrected_by(&ended(ExecState::Killed)), "what is known stands");
        assert!(!Ended { at: Timestamp(49), ..lost }.is_corrected_by(&ended(ExecState::Exited)), "said by a later sandbox");
    }

    #[test]
    fn traffic_is_counted_once_however_often_it_is_read() {
        let mut row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(1));
        let went = |sent_bytes| {
            let host = "a.example".to_owned();
            Fact::Traffic { items: vec![HostTraffic { host, connections: 1, sent_bytes, received_bytes: 2 }] }
        };
        let found = [(0, went(10)), (100, went(5))].map(|(at, fact)| Found { at: Offset(at), line: line(fact) });
        row = apply(&row, &found, Offset(200)).session;
        let totals = HostTotals { connections: 2, sent_bytes: 15, received_bytes: 4 };
        assert_eq!(row.traffic.iter().collect::<Vec<_>>(), [("a.example", &totals)]);
        assert_eq!(row.last_activity_at, Timestamp(50), "it is activity");
        assert_eq!(apply(&row, &found, Offset(200)).session, row, "and is not counted again");
    }

    #[test]
    fn what_happens_on_the_network_is_told() {
        let port =
            wire::guest::ListeningPort { port: 80, address: "0.0.0.0".into(), pid: Some(7), program: Some("nginx".into()) };
        let denied = Fact::NetworkDenied { host: "a".into(), port: 22, reason: "a rule".into(), repeated: 3 };
        let facts = [denied, Fact::PortOpened { port }, Fact::PortClosed { port: 80 }];
        let mut change = SessionChange::new(SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(1)));
        facts.into_iter().for_each(|fact| apply_one(&mut change, &line(fact)));
        let told: Vec<_> = change.events.into_iter().map(|event| (event.kind.0.into_owned(), event.data)).collect();
        assert_eq!(
            told,
            [
                ("network.denied".to_owned(), json!({ "host": "a", "port": 22, "reason": "a rule", "repeated": 3 })),
                ("port.opened".to_owned(), json!({ "port": 80, "address": "0.0.0.0", "program": "nginx" })),
                ("port.closed".to_owned(), json!({ "port": 80 })),
            ]
        );
        assert_eq!(change.session.last_activity_at, Timestamp(1), "none of it is activity");
    }

    #[test]
    fn what_programs_inside_say_are_events_of_theirs() {
        let said = [
            Fact::Note { text: "done".into() },
            Fact::KeepAwake { seconds: 60 },
            Fact::AgentWaiting { for_: Some("person".into()), text: None },
            Fact::AgentWaiting { for_: None, text: None },
        ];
        let expected = [
            ("note", json!({ "text": "done" })),
            ("keep_awake", json!({ "seconds": 60 })),
            ("agent.waiting", json!({ "for": "person", "text": null })),
            ("agent.waiting", json!({ "for": null, "text": null })),
        ];
        for (fact, (kind, data)) in said.into_iter().zip(expected) {
            let waits = kind == "agent.waiting";
            let row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(1));
            // As it comes out of the journal.
            let read: FactLine = serde_json::from_slice(&serde_json::to_vec(&line(fact)).unwrap()).unwrap();
            let change = apply(&row, &[Found { at: Offset(0), line: read }], Offset(10));
            assert_eq!(change.events.len(), 1, "{kind}");
            let event = &change.events[0];
            assert_eq!((event.kind.0.as_ref(), &event.actor, &event.data), (kind, &Actor::inside(), &data));
            assert_eq!(change.session.last_activity_at == Timestamp(50), !waits, "{kind}: who waits does nothing");
        }
    }

    #[test]
    fn a_line_that_is_no_fact_is_left_out() {
        let line = LineItem::Line { at: Offset(3), bytes: b"{\"fact\":1}".to_vec() };
        assert!(parse(vec![line, LineItem::Gap { from: Offset(5), to: Offset(6) }]).is_empty());
        let newer = br#"{"at":"2026-01-01T00:00:00.000Z","generation":1,"fact":"from_the_future"}"#;
        assert_eq!(parse(vec![LineItem::Line { at: Offset(0), bytes: newer.to_vec() }]).len(), 1);
    }
}
