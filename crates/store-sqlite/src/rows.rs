//! From rows of the database to the store's types. Every failure names what is damaged.

use crate::error::from_sqlx;
use model::{Actor, EventSeq, EventType, Generation, Timestamp};
use sqlx::{Decode, Row, Sqlite, Type, sqlite::SqliteRow};
use std::{borrow::Cow, fmt, str::FromStr};
use store::{
    AuditRow, EventRow, ExecRow, GlobalSeq, OperationRow, Revision, SessionRow, SnapshotRow, StoreError, TerminalRow, TokenRow,
};

type Result<T> = std::result::Result<T, StoreError>;

pub(crate) fn get<'r, T: Decode<'r, Sqlite> + Type<Sqlite>>(row: &'r SqliteRow, column: &str) -> Result<T> {
    row.try_get(column).map_err(|e| from_sqlx(&e))
}

/// A value that is stored as its text.
pub(crate) fn parsed<T: FromStr<Err: fmt::Display>>(row: &SqliteRow, column: &str) -> Result<T> {
    get::<&str>(row, column)?.parse().map_err(|e: T::Err| damaged(column, e))
}

fn parsed_option<T: FromStr<Err: fmt::Display>>(row: &SqliteRow, column: &str) -> Result<Option<T>> {
    get::<Option<&str>>(row, column)?.map(|text| text.parse().map_err(|e: T::Err| damaged(column, e))).transpose()
}

fn damaged(what: impl Into<String>, detail: impl fmt::Display) -> StoreError {
    StoreError::Corrupt { what: what.into(), detail: detail.to_string() }
}

pub(crate) fn time(row: &SqliteRow, column: &str) -> Result<Timestamp> {
    Ok(Timestamp(get(row, column)?))
}

fn time_option(row: &SqliteRow, column: &str) -> Result<Option<Timestamp>> {
    Ok(get::<Option<i64>>(row, column)?.map(Timestamp))
}

/// Counters are written from `u64` by [`int`]; a negative one was not written by us.
pub(crate) fn count(row: &SqliteRow, column: &str) -> Result<u64> {
    u64::try_from(get::<i64>(row, column)?).map_err(|e| damaged(column, e))
}

/// A count as SQLite keeps it. Counts that don't fit come only from outside and stay at the end of the range.
pub(crate) fn int(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// A row as it is stored.
pub(crate) fn json(text: serde_json::Result<String>) -> Result<String> {
    text.map_err(|e| StoreError::Database(format!("can't be written as JSON: {e}")))
}

/// From the columns `id, revision, next_event_seq, doc`.
pub(crate) fn session(row: &SqliteRow) -> Result<SessionRow> {
    let id: &str = get(row, "id")?;
    let mut session: SessionRow = serde_json::from_str(get(row, "doc")?).map_err(|e| damaged(format!("session {id}"), e))?;
    if session.id.to_string() != id {
        return Err(damaged(format!("session {id}"), "it says that it is another one"));
    }
    session.revision = Revision(count(row, "revision")?);
    session.next_event_seq = EventSeq(count(row, "next_event_seq")?);
    Ok(session)
}

/// From the columns `id, revision, doc`.
pub(crate) fn snapshot(row: &SqliteRow) -> Result<SnapshotRow> {
    let id: &str = get(row, "id")?;
    let mut snapshot: SnapshotRow = serde_json::from_str(get(row, "doc")?).map_err(|e| damaged(format!("snapshot {id}"), e))?;
    if snapshot.id.to_string() != id {
        return Err(damaged(format!("snapshot {id}"), "it says that it is another one"));
    }
    snapshot.revision = Revision(count(row, "revision")?);
    Ok(snapshot)
}

pub(crate) fn event(row: &SqliteRow) -> Result<EventRow> {
    Ok(EventRow {
        global: GlobalSeq(count(row, "global")?),
        session_id: parsed(row, "session_id")?,
        seq: EventSeq(count(row, "seq")?),
        at: time(row, "at")?,
        kind: EventType(Cow::Owned(get(row, "kind")?)),
        actor: Actor(get(row, "actor")?),
        operation_id: parsed_option(row, "operation_id")?,
        data: parsed(row, "data")?,
    })
}

pub(crate) fn operation(row: &SqliteRow) -> Result<OperationRow> {
    Ok(OperationRow {
        id: parsed(row, "id")?,
        session_id: parsed(row, "session_id")?,
        kind: parsed(row, "kind")?,
        state: parsed(row, "state")?,
        started_at: time(row, "started_at")?,
        ended_at: time_option(row, "ended_at")?,
        intent: parsed(row, "intent")?,
        error: parsed_option(row, "error")?,
    })
}

pub(crate) fn exec(row: &SqliteRow) -> Result<ExecRow> {
    Ok(ExecRow {
        session_id: parsed(row, "session_id")?,
        id: parsed(row, "id")?,
        key: get(row, "key")?,
        state: parsed(row, "state")?,
        generation: Generation(count(row, "generation")?),
        started_at: time(row, "started_at")?,
        ended_at: time_option(row, "ended_at")?,
        record: get(row, "record")?,
    })
}

pub(crate) fn terminal(row: &SqliteRow) -> Result<TerminalRow> {
    Ok(TerminalRow {
        session_id: parsed(row, "session_id")?,
        id: parsed(row, "id")?,
        name: get(row, "name")?,
        state: parsed(row, "state")?,
        generation: Generation(count(row, "generation")?),
        started_at: time(row, "started_at")?,
        ended_at: time_option(row, "ended_at")?,
        record: get(row, "record")?,
    })
}

pub(crate) fn token(row: &SqliteRow) -> Result<TokenRow> {
    let sessions: Option<&str> = get(row, "sessions")?;
    let limits: Option<&str> = get(row, "limits")?;
    let limits = limits.map(|text| serde_json::from_str(text).map_err(|e| damaged("a token's limits", e))).transpose()?;
    Ok(TokenRow {
        id: parsed(row, "id")?,
        name: get(row, "name")?,
        hash: get(row, "hash")?,
        scopes: serde_json::from_str(get(row, "scopes")?).map_err(|e| damaged("a token's scopes", e))?,
        sessions: sessions.map(|text| serde_json::from_str(text).map_err(|e| damaged("a token's sessions", e))).transpose()?,
        limits: limits.unwrap_or_default(),
        created_at: time(row, "created_at")?,
        expires_at: time_option(row, "expires_at")?,
        revoked_at: time_option(row, "revoked_at")?,
        last_used_at: time_option(row, "last_used_at")?,
    })
}

pub(crate) fn audit(row: &SqliteRow) -> Result<AuditRow> {
    Ok(AuditRow {
        at: time(row, "at")?,
        actor: get(row, "actor")?,
        method: get(row, "method")?,
        path: get(row, "path")?,
        status: status(row)?,
        session_id: parsed_option(row, "session_id")?,
    })
}

pub(crate) fn status(row: &SqliteRow) -> Result<u16> {
    u16::try_from(get::<i64>(row, "status")?).map_err(|e| damaged("status", e))
}
