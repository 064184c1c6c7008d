//! Sessions: the commit that all changes go through, and the queries.

use crate::{
    BoxFuture, SqliteStore,
    error::{from_sqlx, is_unique_violation},
    rows, snapshots, work,
};
use model::{EventSeq, SessionId, State, Timestamp};
use sqlx::{QueryBuilder, Row, Sqlite, sqlite::SqliteConnection};
use std::{collections::BTreeMap, fmt, str::FromStr};
use store::{
    Committed, Cursor, CursorKind, EventRow, Fut, GlobalSeq, MAX_PAGE, NewEvent, Page, RequestMark, Revision, SessionChange,
    SessionFilter, SessionRow, SessionScan, Sessions, StoreError, UnreadableSession,
};

/// How many deleted sessions are forgotten in one go: their events may be many, and others wait.
const PURGE_STEP: i64 = 20;

impl Sessions for SqliteStore {
    fn commit_all(&self, changes: Vec<SessionChange>) -> Fut<'_, Vec<Committed>> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let mut answers = Vec::with_capacity(changes.len());
                for change in changes {
                    answers.push(commit(conn, change).await?);
                }
                Ok(answers)
            })
        }))
    }

    fn session(&self, id: SessionId) -> Fut<'_, Option<SessionRow>> {
        Box::pin(async move {
            let sql = "SELECT id, revision, next_event_seq, doc FROM sessions WHERE id = ?";
            let row = sqlx::query(sql).bind(id.to_string()).fetch_optional(self.readers()).await;
            row.map_err(|e| from_sqlx(&e))?.as_ref().map(rows::session).transpose()
        })
    }

    fn session_by_key(&self, key: String) -> Fut<'_, Option<SessionRow>> {
        Box::pin(async move {
            let sql = "SELECT id, revision, next_event_seq, doc FROM sessions WHERE key = ? AND key_freed = 0";
            let row = sqlx::query(sql).bind(key).fetch_optional(self.readers()).await;
            row.map_err(|e| from_sqlx(&e))?.as_ref().map(rows::session).transpose()
        })
    }

    fn find_ids(&self, part: String) -> Fut<'_, Vec<SessionId>> {
        Box::pin(async move {
            let begins =
                "SELECT id FROM sessions WHERE id >= ?1 AND id < ?1 || 'g' AND (state = 'deleted') = ?2 ORDER BY id LIMIT 10";
            let ends = "SELECT id FROM sessions WHERE id GLOB '*' || ?1 AND (state = 'deleted') = ?2 ORDER BY id LIMIT 10";
            self.ids_by_ends(part, begins, ends).await
        })
    }

    fn list_sessions(&self, filter: SessionFilter, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<SessionRow>> {
        Box::pin(async move {
            let limit = limit.clamp(1, MAX_PAGE);
            let before = cursor.map(|c| c.id::<SessionId>(CursorKind::Sessions)).transpose()?;
            let mut query = list_query(&filter, before, limit + 1)?;
            let mut found = query.build().fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?;
            let more = found.len() > limit;
            found.truncate(limit);
            let next_cursor = match found.last() {
                Some(last) if more => Some(Cursor::after_id(CursorKind::Sessions, rows::parsed::<SessionId>(last, "id")?)),
                _ => None,
            };
            let read =
                |row| rows::session(row).inspect_err(|error| tracing::error!(%error, "a session is left out of a list")).ok();
            Ok(Page { items: found.iter().filter_map(read).collect(), next_cursor })
        })
    }

    fn scan_sessions(&self, limit: usize, cursor: Option<Cursor>) -> Fut<'_, SessionScan> {
        Box::pin(async move {
            let limit = limit.clamp(1, MAX_PAGE);
            let after = cursor.map(|c| c.id::<SessionId>(CursorKind::Sessions)).transpose()?;
            let sql =
                "SELECT id, revision, next_event_seq, doc FROM sessions WHERE id > ? AND state <> 'deleted' ORDER BY id LIMIT ?";
            let after = after.map(|id| id.to_string()).unwrap_or_default();
            let query = sqlx::query(sql).bind(after).bind(limit as i64);
            let found = query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?;
            let mut scan = SessionScan { sessions: Vec::with_capacity(found.len()), unreadable: Vec::new(), next_cursor: None };
            let mut last = None;
            for row in &found {
                let id: String = rows::get(row, "id")?;
                match rows::session(row) {
                    Ok(session) => scan.sessions.push(session),
                    Err(error) => scan.unreadable.push(UnreadableSession { id: id.clone(), detail: error.to_string() }),
                }
                last = id.parse::<SessionId>().ok().or(last);
            }
            if found.len() == limit {
                scan.next_cursor = last.map(|id| Cursor::after_id(CursorKind::Sessions, id));
            }
            Ok(scan)
        })
    }

    fn purge_deleted(&self, before: Timestamp) -> Fut<'_, Vec<SessionId>> {
        Box::pin(async move {
            let mut purged = Vec::new();
            loop {
                let step: Vec<SessionId> = self
                    .write(move |conn| -> BoxFuture<'_, _> {
                        Box::pin(async move {
                            let sql = "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions \
                                       WHERE deleted_at < ? AND state = 'deleted' LIMIT ?) RETURNING id";
                            let gone = sqlx::query(sql).bind(before.0).bind(PURGE_STEP).fetch_all(conn).await;
                            gone.map_err(|e| from_sqlx(&e))?.iter().map(|row| rows::parsed(row, "id")).collect()
                        })
                    })
                    .await?;
                if step.is_empty() {
                    return Ok(purged);
                }
                purged.extend(step);
            }
        })
    }
}

impl SqliteStore {
    /// Ids by their beginnings, else by their ends, those of things that are there before those of deleted ones. Both
    /// queries take a piece of an id, and whether it is of what is deleted.
    pub(crate) async fn ids_by_ends<I>(
        &self,
        part: String,
        begins: &'static str,
        ends: &'static str,
    ) -> Result<Vec<I>, StoreError>
    where
        I: FromStr<Err: fmt::Display>,
    {
        let part = part.to_ascii_lowercase();
        // Also keeps the wildcards of GLOB out.
        if part.is_empty() || !part.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-') {
            return Ok(Vec::new());
        }
        // The beginning is a range of the primary key; 'g' sorts right after every hexadecimal digit and '-'.
        for (sql, deleted) in [(begins, false), (ends, false), (begins, true), (ends, true)] {
            let query = sqlx::query(sql).bind(&part).bind(deleted);
            let found = query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?;
            if !found.is_empty() {
                return found.iter().map(|row| rows::parsed(row, "id")).collect();
            }
        }
        Ok(Vec::new())
    }
}

/// The list's query. Where metadata is asked for, the first pair leads: its index has the sessions in order.
fn list_query(filter: &SessionFilter, before: Option<SessionId>, limit: usize) -> Result<QueryBuilder<Sqlite>, StoreError> {
    let mut pairs = filter.metadata.iter();
    let mut q: QueryBuilder<Sqlite> = QueryBuilder::new("SELECT s.id, s.revision, s.next_event_seq, s.doc FROM ");
    let order = match pairs.next() {
        Some((k, v)) => {
            // CROSS JOIN: SQLite keeps this order of the tables.
            q.push("session_metadata m CROSS JOIN sessions s ON s.id = m.session_id WHERE m.k = ");
            q.push_bind(k.clone()).push(" AND m.v = ").push_bind(v.clone());
            "m.session_id"
        }
        None => {
            q.push("sessions s WHERE 1");
            "s.id"
        }
    };
    for (k, v) in pairs {
        q.push(" AND EXISTS (SELECT 1 FROM session_metadata x WHERE x.session_id = s.id AND x.k = ").push_bind(k.clone());
        q.push(" AND x.v = ").push_bind(v.clone()).push(")");
    }
    if let Some(before) = before {
        q.push(" AND ").push(order).push(" < ").push_bind(before.to_string());
    }
    if !filter.states.is_empty() {
        let mut states = q.push(" AND s.state IN (").separated(", ");
        filter.states.iter().for_each(|state| {
            states.push_bind(state.as_str());
        });
        q.push(")");
    } else if !filter.include_deleted {
        q.push(" AND s.state <> 'deleted'");
    }
    if let Some(key) = &filter.key {
        q.push(" AND s.key = ").push_bind(key.clone());
    }
    if let Some(runtime) = filter.runtime {
        q.push(" AND s.runtime = ").push_bind(runtime.as_str());
    }
    if let Some(owner) = &filter.owner_token {
        q.push(" AND s.owner_token = ").push_bind(owner.clone());
    }
    if let Some(parent) = filter.parent {
        q.push(" AND s.parent_session = ").push_bind(parent.to_string());
    }
    if let Some(ids) = &filter.ids {
        let ids = rows::json(serde_json::to_string(ids))?;
        q.push(" AND s.id IN (SELECT value FROM json_each(").push_bind(ids).push("))");
    }
    q.push(" ORDER BY ").push(order).push(" DESC LIMIT ").push_bind(limit as i64);
    Ok(q)
}

async fn commit(conn: &mut SqliteConnection, change: SessionChange) -> Result<Committed, StoreError> {
    let SessionChange { session, events, operations, execs, terminals, snapshots, request } = change;
    let id = session.id.to_string();
    let sql = "SELECT revision, next_event_seq, json_extract(doc, '$.metadata') AS metadata FROM sessions WHERE id = ?";
    let stored = sqlx::query(sql).bind(&id).fetch_optional(&mut *conn).await.map_err(|e| from_sqlx(&e))?;
    let (found, first_seq, old_metadata) = match &stored {
        Some(row) => (rows::count(row, "revision")?, rows::count(row, "next_event_seq")?, row.try_get("metadata").ok()),
        None => (0, 1, None::<String>),
    };
    if found != session.revision.0 {
        return Err(match found {
            0 => StoreError::NoSession(session.id),
            found => StoreError::Conflict { session: session.id, expected: session.revision, found: Revision(found) },
        });
    }
    let (revision, next_seq) = (found + 1, first_seq + events.len() as u64);
    write_session(conn, &id, &session, revision, next_seq).await?;
    let metadata = rows::json(serde_json::to_string(&session.metadata))?;
    if old_metadata.as_deref().unwrap_or("{}") != metadata {
        write_metadata(conn, &id, &session.metadata).await?;
    }
    let mut written = Vec::with_capacity(events.len());
    for (seq, event) in (first_seq..).zip(events) {
        written.push(write_event(conn, session.id, &id, EventSeq(seq), event).await?);
    }
    for operation in operations {
        work::write_operation(conn, &id, operation).await?;
    }
    for exec in execs {
        work::write_exec(conn, &id, exec).await?;
    }
    for terminal in terminals {
        work::write_terminal(conn, &id, terminal).await?;
    }
    snapshots::write_snapshots(conn, snapshots).await?;
    if let Some(mark) = request {
        mark_request(conn, mark).await?;
    }
    Ok(Committed { revision: Revision(revision), next_event_seq: EventSeq(next_seq), events: written })
}

async fn write_session(
    conn: &mut SqliteConnection,
    id: &str,
    session: &SessionRow,
    revision: u64,
    next_seq: u64,
) -> Result<(), StoreError> {
    let sql = "INSERT INTO sessions (id, revision, next_event_seq, key, key_freed, state, runtime, deleted_at, owner_token, \
               parent_session, doc) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET \
               revision = excluded.revision, next_event_seq = excluded.next_event_seq, key = excluded.key, \
               key_freed = excluded.key_freed, state = excluded.state, runtime = excluded.runtime, \
               deleted_at = excluded.deleted_at, owner_token = excluded.owner_token, \
               parent_session = excluded.parent_session, doc = excluded.doc";
    // A tombstone without its time would never be forgotten.
    let deleted_at = session.deleted_at.or((session.state == State::Deleted).then_some(session.updated_at));
    let key = session.key.as_ref().map(|key| key.as_str());
    let written = sqlx::query(sql)
        .bind(id)
        .bind(rows::int(revision))
        .bind(rows::int(next_seq))
        .bind(key)
        .bind(session.key_freed)
        .bind(session.state.as_str())
        .bind(session.runtime.as_str())
        .bind(deleted_at.map(|at| at.0))
        .bind(&session.owner_token)
        .bind(session.parent_session.map(|id| id.to_string()))
        .bind(rows::json(serde_json::to_string(session))?)
        .execute(&mut *conn)
        .await;
    match written {
        Ok(_) => Ok(()),
        Err(error) if is_unique_violation(&error) => {
            let sql = "SELECT id FROM sessions WHERE key = ? AND key_freed = 0";
            let holder = sqlx::query(sql).bind(key).fetch_one(conn).await.map_err(|e| from_sqlx(&e))?;
            Err(StoreError::KeyTaken { holder: rows::parsed(&holder, "id")? })
        }
        Err(error) => Err(from_sqlx(&error)),
    }
}

async fn write_metadata(conn: &mut SqliteConnection, id: &str, metadata: &BTreeMap<String, String>) -> Result<(), StoreError> {
    let clear = sqlx::query("DELETE FROM session_metadata WHERE session_id = ?").bind(id);
    clear.execute(&mut *conn).await.map_err(|e| from_sqlx(&e))?;
    for (k, v) in metadata {
        let insert = sqlx::query("INSERT INTO session_metadata (k, v, session_id) VALUES (?, ?, ?)").bind(k).bind(v).bind(id);
        insert.execute(&mut *conn).await.map_err(|e| from_sqlx(&e))?;
    }
    Ok(())
}

async fn write_event(
    conn: &mut SqliteConnection,
    session_id: SessionId,
    id: &str,
    seq: EventSeq,
    event: NewEvent,
) -> Result<EventRow, StoreError> {
    let NewEvent { at, kind, actor, operation_id, data } = event;
    let sql = "INSERT INTO events (session_id, seq, at, kind, actor, operation_id, data) VALUES (?, ?, ?, ?, ?, ?, ?)";
    let insert = sqlx::query(sql)
        .bind(id)
        .bind(rows::int(seq.0))
        .bind(at.0)
        .bind(&*kind.0)
        .bind(&actor.0)
        .bind(operation_id.map(|id| id.to_string()))
        .bind(data.to_string());
    let done = insert.execute(conn).await.map_err(|e| from_sqlx(&e))?;
    let global = GlobalSeq(done.last_insert_rowid().unsigned_abs());
    Ok(EventRow { global, session_id, seq, at, kind, actor, operation_id, data })
}

async fn mark_request(conn: &mut SqliteConnection, mark: RequestMark) -> Result<(), StoreError> {
    let RequestMark { id, made } = mark;
    let sql = "UPDATE requests SET made = ? WHERE owner = ? AND key = ? AND route = ?";
    let update = sqlx::query(sql).bind(made).bind(id.owner).bind(id.key).bind(id.route);
    update.execute(conn).await.map(drop).map_err(|e| from_sqlx(&e))
}
