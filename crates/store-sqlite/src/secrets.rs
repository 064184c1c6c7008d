//! Secrets: the bytes as they were sealed.

use crate::{BoxFuture, SqliteStore, error::from_sqlx, rows};
use model::network::SecretName;
use sqlx::sqlite::SqliteRow;
use store::{Fut, SecretRow, Secrets, StoreError};

impl Secrets for SqliteStore {
    fn put_secret(&self, secret: SecretRow) -> Fut<'_, ()> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let sql = "INSERT INTO secrets (name, sealed, hosts, created_at, updated_at) VALUES (?, ?, ?, ?, ?) \
                           ON CONFLICT (name) DO UPDATE SET sealed = excluded.sealed, hosts = excluded.hosts, \
                           updated_at = excluded.updated_at";
                let insert = sqlx::query(sql)
                    .bind(secret.name.to_string())
                    .bind(secret.sealed)
                    .bind(rows::json(serde_json::to_string(&secret.hosts))?)
                    .bind(secret.created_at.0)
                    .bind(secret.updated_at.0);
                insert.execute(conn).await.map(drop).map_err(|e| from_sqlx(&e))
            })
        }))
    }

    fn secret(&self, name: SecretName) -> Fut<'_, Option<SecretRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM secrets WHERE name = ?").bind(name.to_string());
            query.fetch_optional(self.readers()).await.map_err(|e| from_sqlx(&e))?.as_ref().map(secret).transpose()
        })
    }

    fn list_secrets(&self) -> Fut<'_, Vec<SecretRow>> {
        Box::pin(async move {
            let query = sqlx::query("SELECT * FROM secrets ORDER BY name");
            query.fetch_all(self.readers()).await.map_err(|e| from_sqlx(&e))?.iter().map(secret).collect()
        })
    }

    fn remove_secret(&self, name: SecretName) -> Fut<'_, bool> {
        Box::pin(self.write(move |conn| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let delete = sqlx::query("DELETE FROM secrets WHERE name = ?").bind(name.to_string());
                Ok(delete.execute(conn).await.map_err(|e| from_sqlx(&e))?.rows_affected() > 0)
            })
        }))
    }
}

fn secret(row: &SqliteRow) -> Result<SecretRow, StoreError> {
    let hosts = serde_json::from_str(rows::get(row, "hosts")?);
    Ok(SecretRow {
        name: rows::parsed(row, "name")?,
        sealed: rows::get(row, "sealed")?,
        hosts: hosts.map_err(|e| StoreError::Corrupt { what: "a secret".to_owned(), detail: e.to_string() })?,
        created_at: rows::time(row, "created_at")?,
        updated_at: rows::time(row, "updated_at")?,
    })
}
