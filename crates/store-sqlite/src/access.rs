//! Tokens, the list of accesses, and the server's own words.

use crate::{BoxFuture, SqliteStore, error::from_sqlx, rows};
use model::{Timestamp, TokenId, TokenLimits};
use sqlx::{Connection, sqlite::SqliteConnection};
use std::{fs::OpenOptions, os::unix::fs::OpenOptionsExt, path::PathBuf};
use store::{Audit, AuditRow, Cursor, CursorKind, Fut, MAX_PAGE, Meta, Page, StoreError, TokenRow, Tokens};

impl Tokens for SqliteStore {
    fn insert_token(&self, token: TokenRow) -> Fut<'_, ()> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let json = |text: serde_json::Result<String>| text.map_err(|e| StoreError::Database(e.to_string()));
                let sessions = token.sessions.as_ref().map(serde_json::to_string).map(json).transpose()?;
                let limits = (token.limits != TokenLimits::default()).then(|| serde_json::to_string(&token.limits));
                let sql = "INSERT INTO tokens \
                           (id, name, hash, scopes, sessions, limits, created_at, expires_at, revoked_at, last_used_at) \
                           VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
                let insert = sqlx::query(sql)
                    .bind(token.id.to_string())
                    .bind(token.name)
                    .bind(token.hash)
                    .bind(json(serde_json::to_string(&token.scopes))?)
                    .bind(sessions)
                    .bind(limits.map(json).transpose()?)
                    .bind(token.created_at.0)
                    .bind(token.expires_at.map(|at| at.0))
                    .bind(token.revoked_at.map(|at| at.0))
                    .bind(token.last_used_at.map(|at| at.0));
                insert.execute(conn).await.map(drop).map_err(|e| from_sqlx(&e))
            })
        }))
    }

    fn token_by_hash(&self, hash: String) -> Fut<'_, Option<TokenRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM tokens WHERE hash = ?").bind(hash);
            query.fetch_optional(self.readers()).await.map_err(|e| from_sqlx(&e))?.as_ref().map(rows::token).transpose()
        })
    }

    fn list_tokens(&self) -> Fut<'_, Vec<TokenRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM tokens ORDER BY id");
            query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?.iter().map(rows::token).collect()
        })
    }

    fn revoke_token(&self, id: TokenId, at: Timestamp) -> Fut<'_, bool> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let update = sqlx::query("UPDATE tokens SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?");
                let done = update.bind(at.0).bind(id.to_string()).execute(conn).await.map_err(|e| from_sqlx(&e))?;
                Ok(done.rows_affected() > 0)
            })
        }))
    }

    fn touch_tokens(&self, used: Vec<(TokenId, Timestamp)>) -> Fut<'_, ()> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                for (id, at) in used {
                    let sql = "UPDATE tokens SET last_used_at = max(coalesce(last_used_at, ?1), ?1) WHERE id = ?2";
                    let update = sqlx::query(sql).bind(at.0).bind(id.to_string());
                    update.execute(&mut *conn).await.map_err(|e| from_sqlx(&e))?;
                }
                Ok(())
            })
        }))
    }
}

impl Audit for SqliteStore {
    fn append_audit(&self, rows: Vec<AuditRow>) -> Fut<'_, ()> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                for row in rows {
                    let sql = "INSERT INTO audit (at, actor, method, path, status, session_id) VALUES (?, ?, ?, ?, ?, ?)";
                    let insert = sqlx::query(sql)
                        .bind(row.at.0)
                        .bind(row.actor)
                        .bind(row.method)
                        .bind(row.path)
                        .bind(i64::from(row.status))
                        .bind(row.session_id.map(|id| id.to_string()));
                    insert.execute(&mut *conn).await.map_err(|e| from_sqlx(&e))?;
                }
                Ok(())
            })
        }))
    }

    fn list_audit(&self, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<AuditRow>> {
        Box::pin(async move {
            let limit = limit.clamp(1, MAX_PAGE);
            let below = cursor.map(|cursor| cursor.number(CursorKind::Audit)).transpose()?.map_or(i64::MAX, rows::int);
            let query = sqlx::query("SELECT * FROM audit WHERE id < ? ORDER BY id DESC LIMIT ?");
            let query = query.bind(below).bind(limit as i64 + 1);
            let mut found = query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?;
            let more = found.len() > limit;
            found.truncate(limit);
            let next_cursor = match found.last() {
                Some(last) if more => Some(Cursor::after_number(CursorKind::Audit, rows::count(last, "id")?)),
                _ => None,
            };
            Ok(Page { items: found.iter().map(rows::audit).collect::<Result<_, _>>()?, next_cursor })
        })
    }

    fn purge_audit(&self, before: Timestamp) -> Fut<'_, u64> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let delete = sqlx::query("DELETE FROM audit WHERE at < ?").bind(before.0);
                Ok(delete.execute(conn).await.map_err(|e| from_sqlx(&e))?.rows_affected())
            })
        }))
    }
}

impl Meta for SqliteStore {
    fn meta(&self, name: String) -> Fut<'_, Option<String>> {
        Box::pin(async move {
            let query = sqlx::query_scalar("SELECT value FROM meta WHERE name = ?").bind(name);
            query.fetch_optional(self.readers()).await.map_err(|e| from_sqlx(&e))
        })
    }

    fn set_meta(&self, name: String, value: String) -> Fut<'_, ()> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let sql = "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value";
                sqlx::query(sql).bind(name).bind(value).execute(conn).await.map(drop).map_err(|e| from_sqlx(&e))
            })
        }))
    }

    fn copy_to(&self, path: PathBuf) -> Fut<'_, ()> {
        Box::pin(async move {
            let Some(path) = path.to_str() else { return Err(StoreError::Database("a path that is no text".to_owned())) };
            // It takes an empty file, and keeps its mode.
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            made.map_err(|e| StoreError::Database(format!("can't make {path}: {e}")))?;
            // SQLite makes the copy in one read transaction, and compact: lang_vacuum, "VACUUM with an INTO clause". A
            // connection that can't write refuses it.
            let options = (*self.readers().connect_options()).clone().pragma("query_only", "off");
            let mut conn = SqliteConnection::connect_with(&options).await.map_err(|e| from_sqlx(&e))?;
            let copied = sqlx::query("VACUUM INTO ?").bind(path.to_owned()).execute(&mut conn).await;
            let closed = conn.close().await;
            copied.map(drop).and(closed).map_err(|e| from_sqlx(&e))
        })
    }
}
