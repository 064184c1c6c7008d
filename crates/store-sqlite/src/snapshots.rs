//! Snapshots: writing them, beside a session's change or by themselves, and the queries.

use crate::{
    BoxFuture, SqliteStore,
    error::{from_sqlx, is_unique_violation},
    rows,
};
use model::{SessionId, SnapshotId, SnapshotState, Timestamp};
use sqlx::{
    QueryBuilder, Sqlite,
    sqlite::{SqliteConnection, SqliteRow},
};
use store::{
    Cursor, CursorKind, Fut, MAX_PAGE, Page, Revision, SnapshotFilter, SnapshotRow, SnapshotScan, Snapshots, StoreError,
    UnreadableSnapshot,
};

impl Snapshots for SqliteStore {
    fn commit_snapshots(&self, rows: Vec<SnapshotRow>) -> Fut<'_, ()> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> { Box::pin(async move { write_snapshots(conn, rows).await }) }))
    }

    fn snapshot(&self, id: SnapshotId) -> Fut<'_, Option<SnapshotRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT id, revision, doc FROM snapshots WHERE id = ?").bind(id.to_string());
            query.fetch_optional(self.readers()).await.map_err(|e| from_sqlx(&e))?.as_ref().map(rows::snapshot).transpose()
        })
    }

    fn snapshot_by_name(&self, name: String) -> Fut<'_, Option<SnapshotRow>> {
        Box::pin(async move {
            let sql = "SELECT id, revision, doc FROM snapshots WHERE name = ? AND state IN ('taking', 'ready')";
            let found = sqlx::query(sql).bind(name).fetch_optional(self.readers()).await;
            found.map_err(|e| from_sqlx(&e))?.as_ref().map(rows::snapshot).transpose()
        })
    }

    fn find_snapshot_ids(&self, part: String) -> Fut<'_, Vec<SnapshotId>> {
        Box::pin(async move {
            let begins =
                "SELECT id FROM snapshots WHERE id >= ?1 AND id < ?1 || 'g' AND (state = 'deleted') = ?2 ORDER BY id LIMIT 10";
            let ends = "SELECT id FROM snapshots WHERE id GLOB '*' || ?1 AND (state = 'deleted') = ?2 ORDER BY id LIMIT 10";
            self.ids_by_ends(part, begins, ends).await
        })
    }

    fn list_snapshots(&self, filter: SnapshotFilter, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<SnapshotRow>> {
        Box::pin(async move {
            let limit = limit.clamp(1, MAX_PAGE);
            let before = cursor.map(|c| c.id::<SnapshotId>(CursorKind::Snapshots)).transpose()?;
            let mut query = list_query(&filter, before, limit + 1)?;
            let mut found = query.build().fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?;
            let more = found.len() > limit;
            found.truncate(limit);
            let next_cursor = match found.last() {
                Some(last) if more => Some(Cursor::after_id(CursorKind::Snapshots, rows::parsed::<SnapshotId>(last, "id")?)),
                _ => None,
            };
            Ok(Page { items: readable(&found), next_cursor })
        })
    }

    fn snapshots_of(&self, session: SessionId) -> Fut<'_, Vec<SnapshotRow>> {
        Box::pin(async move {
            let sql = "SELECT id, revision, doc FROM snapshots WHERE session_id = ? AND state <> 'deleted' ORDER BY id";
            let found = sqlx::query(sql).bind(session.to_string()).fetch_all(self.readers()).await;
            found.map_err(|e| from_sqlx(&e))?.iter().map(rows::snapshot).collect()
        })
    }

    fn snapshots_due(&self, now: Timestamp) -> Fut<'_, Vec<SnapshotRow>> {
        Box::pin(async move {
            let sql = "SELECT id, revision, doc FROM snapshots \
                       WHERE keep_until <= ? AND state IN ('ready', 'failed') ORDER BY keep_until LIMIT ?";
            let found = sqlx::query(sql).bind(now.0).bind(MAX_PAGE as i64).fetch_all(self.readers()).await;
            Ok(readable(&found.map_err(|e| from_sqlx(&e))?))
        })
    }

    fn scan_snapshots(&self, limit: usize, cursor: Option<Cursor>) -> Fut<'_, SnapshotScan> {
        Box::pin(async move {
            let limit = limit.clamp(1, MAX_PAGE);
            let after = cursor.map(|c| c.id::<SnapshotId>(CursorKind::Snapshots)).transpose()?;
            let after = after.map(|id| id.to_string()).unwrap_or_default();
            let sql = "SELECT id, revision, doc FROM snapshots WHERE id > ? AND state <> 'deleted' ORDER BY id LIMIT ?";
            let query = sqlx::query(sql).bind(after).bind(limit as i64);
            let found = query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?;
            let (mut snapshots, mut unreadable, mut last) = (Vec::with_capacity(found.len()), Vec::new(), None);
            for row in &found {
                let id: String = rows::get(row, "id")?;
                last = id.parse::<SnapshotId>().ok().or(last);
                match rows::snapshot(row) {
                    Ok(snapshot) => snapshots.push(snapshot),
                    Err(error) => unreadable.push(UnreadableSnapshot { id, detail: error.to_string() }),
                }
            }
            let next_cursor = last.filter(|_| found.len() == limit).map(|id| Cursor::after_id(CursorKind::Snapshots, id));
            Ok(SnapshotScan { snapshots, unreadable, next_cursor })
        })
    }

    fn purge_snapshots(&self, before: Timestamp) -> Fut<'_, Vec<SnapshotId>> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let sql = "DELETE FROM snapshots WHERE gone_at < ? RETURNING id";
                let gone = sqlx::query(sql).bind(before.0).fetch_all(conn).await.map_err(|e| from_sqlx(&e))?;
                gone.iter().map(|row| rows::parsed(row, "id")).collect()
            })
        }))
    }
}

/// The rows that can be read; the others are told in the log.
fn readable(found: &[SqliteRow]) -> Vec<SnapshotRow> {
    let read = |row| rows::snapshot(row).inspect_err(|error| tracing::error!(%error, "a snapshot is left out of a list")).ok();
    found.iter().filter_map(read).collect()
}

fn list_query(filter: &SnapshotFilter, before: Option<SnapshotId>, limit: usize) -> Result<QueryBuilder<Sqlite>, StoreError> {
    let mut q: QueryBuilder<Sqlite> = QueryBuilder::new("SELECT id, revision, doc FROM snapshots WHERE 1");
    if let Some(before) = before {
        q.push(" AND id < ").push_bind(before.to_string());
    }
    if !filter.include_deleted {
        q.push(" AND state <> 'deleted'");
    }
    if let Some(session) = filter.session {
        q.push(" AND session_id = ").push_bind(session.to_string());
    }
    if let Some(owner) = &filter.owner_token {
        q.push(" AND owner_token = ").push_bind(owner.clone());
    }
    if let Some(sessions) = &filter.sessions {
        let sessions = rows::json(serde_json::to_string(sessions))?;
        q.push(" AND session_id IN (SELECT value FROM json_each(").push_bind(sessions).push("))");
    }
    q.push(" ORDER BY id DESC LIMIT ").push_bind(limit as i64);
    Ok(q)
}

/// Writes rows, each onto the revision that its author read.
pub(crate) async fn write_snapshots(conn: &mut SqliteConnection, rows: Vec<SnapshotRow>) -> Result<(), StoreError> {
    for row in rows {
        write_snapshot(conn, row).await?;
    }
    Ok(())
}

async fn write_snapshot(conn: &mut SqliteConnection, row: SnapshotRow) -> Result<(), StoreError> {
    let id = row.id.to_string();
    let query = sqlx::query("SELECT revision FROM snapshots WHERE id = ?").bind(&id);
    let stored = query.fetch_optional(&mut *conn).await.map_err(|e| from_sqlx(&e))?;
    let found = stored.as_ref().map(|row| rows::count(row, "revision")).transpose()?.unwrap_or(0);
    if found != row.revision.0 {
        return Err(match found {
            0 => StoreError::NoSnapshot(row.id),
            found => StoreError::SnapshotConflict { snapshot: row.id, expected: row.revision, found: Revision(found) },
        });
    }
    let gone_at = match row.state {
        // A tombstone without its time would never be forgotten.
        SnapshotState::Deleted => Some(row.deleted_at.unwrap_or(row.created_at)),
        SnapshotState::Failed => Some(row.created_at),
        SnapshotState::Taking | SnapshotState::Ready => None,
    };
    let sql = "INSERT INTO snapshots (id, revision, session_id, owner_token, name, state, keep_until, gone_at, doc) \
               VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET revision = excluded.revision, \
               session_id = excluded.session_id, owner_token = excluded.owner_token, name = excluded.name, \
               state = excluded.state, keep_until = excluded.keep_until, gone_at = excluded.gone_at, doc = excluded.doc";
    let name = row.name.as_ref().map(|name| name.as_str());
    let written = sqlx::query(sql)
        .bind(&id)
        .bind(rows::int(found + 1))
        .bind(row.session_id.to_string())
        .bind(&row.owner_token)
        .bind(name)
        .bind(row.state.as_str())
        .bind(row.keep_until.map(|at| at.0))
        .bind(gone_at.map(|at| at.0))
        .bind(rows::json(serde_json::to_string(&row))?)
        .execute(&mut *conn)
        .await;
    match written {
        Ok(_) => Ok(()),
        Err(error) if is_unique_violation(&error) => {
            let sql = "SELECT id FROM snapshots WHERE name = ? AND state IN ('taking', 'ready')";
            let holder = sqlx::query(sql).bind(name).fetch_one(conn).await.map_err(|e| from_sqlx(&e))?;
            Err(StoreError::SnapshotNameTaken { holder: rows::parsed(&holder, "id")? })
        }
        Err(error) => Err(from_sqlx(&error)),
    }
}
