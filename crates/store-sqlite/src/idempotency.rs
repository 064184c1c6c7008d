//! Requests by their key.

use crate::{BoxFuture, SqliteStore, error::from_sqlx, rows};
use model::Timestamp;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use store::{Answer, Begun, Fut, Idempotency, RequestId, StoreError};

impl Idempotency for SqliteStore {
    fn begin_request(&self, id: RequestId, body_hash: String, instance: String, now: Timestamp) -> Fut<'_, Begun> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let sql = "SELECT * FROM requests WHERE owner = ? AND key = ? AND route = ?";
                let query = sqlx::query(sql).bind(&id.owner).bind(&id.key).bind(&id.route);
                if let Some(row) = query.fetch_optional(&mut *conn).await.map_err(|e| from_sqlx(&e))? {
                    let known = known(&row, &body_hash, &instance, now)?;
                    if known != Begun::Fresh {
                        return Ok(known);
                    }
                }
                begin(conn, id, body_hash, instance, now).await?;
                Ok(Begun::Fresh)
            })
        }))
    }

    fn finish_request(&self, id: RequestId, answer: Answer) -> Fut<'_, ()> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let sql = "UPDATE requests SET status = ?, body = ? WHERE owner = ? AND key = ? AND route = ? AND status IS NULL";
                let update = sqlx::query(sql).bind(i64::from(answer.status)).bind(answer.body);
                let update = update.bind(id.owner).bind(id.key).bind(id.route);
                update.execute(conn).await.map(drop).map_err(|e| from_sqlx(&e))
            })
        }))
    }

    fn abandon_request(&self, id: RequestId) -> Fut<'_, ()> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let sql = "DELETE FROM requests WHERE owner = ? AND key = ? AND route = ? AND status IS NULL AND made IS NULL";
                let delete = sqlx::query(sql).bind(id.owner).bind(id.key).bind(id.route);
                delete.execute(conn).await.map(drop).map_err(|e| from_sqlx(&e))
            })
        }))
    }

    fn purge_requests(&self, before: Timestamp) -> Fut<'_, u64> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let delete = sqlx::query("DELETE FROM requests WHERE begun_at < ?").bind(before.0);
                Ok(delete.execute(conn).await.map_err(|e| from_sqlx(&e))?.rows_affected())
            })
        }))
    }
}

/// What a stored request means to the same one coming in now; `Fresh` where it may begin again.
fn known(row: &SqliteRow, body_hash: &str, instance: &str, now: Timestamp) -> Result<Begun, StoreError> {
    if now.since(rows::time(row, "begun_at")?) >= RequestId::KEPT {
        return Ok(Begun::Fresh);
    }
    let first_hash: String = rows::get(row, "body_hash")?;
    if let Some(body) = rows::get(row, "body")? {
        return Ok(Begun::Done { body_hash: first_hash, answer: Answer { status: rows::status(row)?, body } });
    }
    if rows::get::<&str>(row, "instance")? == instance {
        return Ok(Begun::InProgress { body_hash: first_hash });
    }
    Ok(match rows::get::<Option<String>>(row, "made")? {
        Some(made) => Begun::Interrupted { body_hash: first_hash, made },
        None if first_hash == body_hash => Begun::Fresh,
        // Another body under the same key contradicts, whether or not the first one came to anything.
        None => Begun::InProgress { body_hash: first_hash },
    })
}

async fn begin(
    conn: &mut SqliteConnection,
    id: RequestId,
    body_hash: String,
    instance: String,
    now: Timestamp,
) -> Result<(), StoreError> {
    let sql = "INSERT INTO requests (owner, key, route, body_hash, instance, begun_at) VALUES (?, ?, ?, ?, ?, ?) \
               ON CONFLICT (owner, key, route) DO UPDATE SET body_hash = excluded.body_hash, instance = excluded.instance, \
               begun_at = excluded.begun_at, made = NULL, status = NULL, body = NULL";
    let insert = sqlx::query(sql).bind(id.owner).bind(id.key).bind(id.route).bind(body_hash).bind(instance).bind(now.0);
    insert.execute(conn).await.map(drop).map_err(|e| from_sqlx(&e))
}
