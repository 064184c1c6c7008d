//! Reading the history.

use crate::{SqliteStore, error::from_sqlx, rows};
use model::{EventSeq, SessionId};
use store::{Cursor, CursorKind, EventRow, Events, Fut, MAX_PAGE};

impl Events for SqliteStore {
    fn events(&self, session: SessionId, from: EventSeq, limit: usize) -> Fut<'_, Vec<EventRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM events WHERE session_id = ? AND seq >= ? ORDER BY seq LIMIT ?");
            let query = query.bind(session.to_string()).bind(rows::int(from.0)).bind(limit.clamp(1, MAX_PAGE) as i64);
            query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?.iter().map(rows::event).collect()
        })
    }

    fn events_of_all(&self, after: Option<Cursor>, limit: usize) -> Fut<'_, Vec<EventRow>> {
        Box::pin(async move {
            let after = after.map(|cursor| cursor.number(CursorKind::Events)).transpose()?.unwrap_or(0);
            // One writer commits one transaction after the other, so no smaller number appears later.
            let query = sqlx::query("SELECT * FROM events WHERE global > ? ORDER BY global LIMIT ?");
            let query = query.bind(rows::int(after)).bind(limit.clamp(1, MAX_PAGE) as i64);
            query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?.iter().map(rows::event).collect()
        })
    }

    fn latest_event(&self) -> Fut<'_, Cursor> {
        Box::pin(async move {
            let query = sqlx::query("SELECT coalesce(max(global), 0) AS global FROM events");
            let row = query.fetch_one(self.readers()).await.map_err(|e| from_sqlx(&e))?;
            Ok(Cursor::after_number(CursorKind::Events, rows::count(&row, "global")?))
        })
    }
}
