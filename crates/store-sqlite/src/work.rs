//! Operations, execs and terminals: writing them inside a session's commit, and the queries.

use crate::{
    SqliteStore,
    error::{from_sqlx, is_unique_violation},
    rows,
};
use model::{ExecId, OperationId, SessionId, TerminalId};
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use std::{fmt, str::FromStr};
use store::{
    Cursor, CursorKind, ExecRow, Execs, Fut, MAX_PAGE, OperationRow, Operations, Page, StoreError, TerminalRow, Terminals,
};

pub(crate) async fn write_operation(conn: &mut SqliteConnection, session: &str, row: OperationRow) -> Result<(), StoreError> {
    let sql = "INSERT INTO operations (id, session_id, kind, state, started_at, ended_at, intent, error) \
               VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state, \
               ended_at = excluded.ended_at, intent = excluded.intent, error = excluded.error \
               WHERE session_id = excluded.session_id";
    let done = sqlx::query(sql)
        .bind(row.id.to_string())
        .bind(session)
        .bind(row.kind.as_str())
        .bind(row.state.as_str())
        .bind(row.started_at.0)
        .bind(row.ended_at.map(|at| at.0))
        .bind(row.intent.to_string())
        .bind(row.error.map(|error| error.to_string()))
        .execute(conn)
        .await
        .map_err(|e| from_sqlx(&e))?;
    if done.rows_affected() == 0 { Err(StoreError::ForeignOperation(row.id)) } else { Ok(()) }
}

pub(crate) async fn write_exec(conn: &mut SqliteConnection, session: &str, row: ExecRow) -> Result<(), StoreError> {
    let sql = "INSERT INTO execs (session_id, id, key, state, generation, started_at, ended_at, record) \
               VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session_id, id) DO UPDATE SET key = excluded.key, \
               state = excluded.state, generation = excluded.generation, started_at = excluded.started_at, \
               ended_at = excluded.ended_at, record = excluded.record";
    let written = sqlx::query(sql)
        .bind(session)
        .bind(row.id.to_string())
        .bind(&row.key)
        .bind(row.state.as_str())
        .bind(rows::int(row.generation.0))
        .bind(row.started_at.0)
        .bind(row.ended_at.map(|at| at.0))
        .bind(row.record)
        .execute(&mut *conn)
        .await;
    match written {
        Ok(_) => Ok(()),
        Err(error) if is_unique_violation(&error) => {
            let query = sqlx::query("SELECT id FROM execs WHERE session_id = ? AND key = ?").bind(session).bind(row.key);
            let holder = query.fetch_one(conn).await.map_err(|e| from_sqlx(&e))?;
            Err(StoreError::ExecKeyTaken { holder: rows::parsed(&holder, "id")? })
        }
        Err(error) => Err(from_sqlx(&error)),
    }
}

pub(crate) async fn write_terminal(conn: &mut SqliteConnection, session: &str, row: TerminalRow) -> Result<(), StoreError> {
    let sql = "INSERT INTO terminals (session_id, id, name, state, generation, started_at, ended_at, record) \
               VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session_id, id) DO UPDATE SET name = excluded.name, \
               state = excluded.state, generation = excluded.generation, started_at = excluded.started_at, \
               ended_at = excluded.ended_at, record = excluded.record";
    let insert = sqlx::query(sql)
        .bind(session)
        .bind(row.id.to_string())
        .bind(row.name)
        .bind(row.state.as_str())
        .bind(rows::int(row.generation.0))
        .bind(row.started_at.0)
        .bind(row.ended_at.map(|at| at.0))
        .bind(row.record);
    insert.execute(conn).await.map(drop).map_err(|e| from_sqlx(&e))
}

impl SqliteStore {
    /// A page of a session's rows, newest first. `sql` takes the session, an id to stay below, and a limit.
    async fn page_of<T, I>(
        &self,
        sql: &'static str,
        session: SessionId,
        (limit, cursor): (usize, Option<Cursor>),
        kind: CursorKind,
        read: fn(&SqliteRow) -> Result<T, StoreError>,
    ) -> Result<Page<T>, StoreError>
    where
        I: FromStr<Err: fmt::Display> + fmt::Display,
    {
        let limit = limit.clamp(1, MAX_PAGE);
        // 'g' sorts after every id.
        let below = match cursor {
            Some(cursor) => cursor.id::<I>(kind)?.to_string(),
            None => "g".to_owned(),
        };
        let query = sqlx::query(sql).bind(session.to_string()).bind(below).bind(limit as i64 + 1);
        let mut found = query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?;
        let more = found.len() > limit;
        found.truncate(limit);
        let next_cursor = match found.last() {
            Some(last) if more => Some(Cursor::after_id(kind, rows::parsed::<I>(last, "id")?)),
            _ => None,
        };
        Ok(Page { items: found.iter().map(read).collect::<Result<_, _>>()?, next_cursor })
    }
}

impl Operations for SqliteStore {
    fn operation(&self, id: OperationId) -> Fut<'_, Option<OperationRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM operations WHERE id = ?").bind(id.to_string());
            query.fetch_optional(self.readers()).await.map_err(|e| from_sqlx(&e))?.as_ref().map(rows::operation).transpose()
        })
    }

    fn running_operations(&self) -> Fut<'_, Vec<OperationRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM operations WHERE state = 'running' ORDER BY id");
            query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?.iter().map(rows::operation).collect()
        })
    }
}

impl Execs for SqliteStore {
    fn exec(&self, session: SessionId, id: ExecId) -> Fut<'_, Option<ExecRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM execs WHERE session_id = ? AND id = ?");
            let query = query.bind(session.to_string()).bind(id.to_string());
            query.fetch_optional(self.readers()).await.map_err(|e| from_sqlx(&e))?.as_ref().map(rows::exec).transpose()
        })
    }

    fn exec_by_key(&self, session: SessionId, key: String) -> Fut<'_, Option<ExecRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM execs WHERE session_id = ? AND key = ?").bind(session.to_string()).bind(key);
            query.fetch_optional(self.readers()).await.map_err(|e| from_sqlx(&e))?.as_ref().map(rows::exec).transpose()
        })
    }

    fn list_execs(&self, session: SessionId, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<ExecRow>> {
        let sql = "SELECT * FROM execs WHERE session_id = ? AND id < ? ORDER BY id DESC LIMIT ?";
        Box::pin(self.page_of::<_, ExecId>(sql, session, (limit, cursor), CursorKind::Execs, rows::exec))
    }

    fn running_execs(&self, session: SessionId) -> Fut<'_, Vec<ExecRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM execs WHERE session_id = ? AND state = 'running' ORDER BY id");
            let found = query.bind(session.to_string()).fetch_all(self.readers()).await;
            found.map_err(|e| from_sqlx(&e))?.iter().map(rows::exec).collect()
        })
    }
}

impl Terminals for SqliteStore {
    fn terminal(&self, session: SessionId, id: TerminalId) -> Fut<'_, Option<TerminalRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM terminals WHERE session_id = ? AND id = ?");
            let query = query.bind(session.to_string()).bind(id.to_string());
            query.fetch_optional(self.readers()).await.map_err(|e| from_sqlx(&e))?.as_ref().map(rows::terminal).transpose()
        })
    }

    fn list_terminals(&self, session: SessionId, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<TerminalRow>> {
        let sql = "SELECT * FROM terminals WHERE session_id = ? AND id < ? ORDER BY id DESC LIMIT ?";
        Box::pin(self.page_of::<_, TerminalId>(sql, session, (limit, cursor), CursorKind::Terminals, rows::terminal))
    }

    fn running_terminals(&self, session: SessionId) -> Fut<'_, Vec<TerminalRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM terminals WHERE session_id = ? AND state = 'running' ORDER BY id");
            let found = query.bind(session.to_string()).fetch_all(self.readers()).await;
            found.map_err(|e| from_sqlx(&e))?.iter().map(rows::terminal).collect()
        })
    }
}
