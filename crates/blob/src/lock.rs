//! The object that tells which server writes into a repository.
//!
//! It excludes nobody by force: it tells a second server, and its operator, that there is a first one. The lock stays
//! when a server ends; the same server takes it again.

use crate::{
    envelope::{self, Kind},
    error::Error,
    store::{Created, Store},
};
use model::Timestamp;
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) const PATH: &str = "lock";
const MAX: u64 = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    server: String,
    since: Timestamp,
}

/// Takes the lock for `server`.
pub(crate) async fn take(store: &Store, server: &str, take_over: bool) -> Result<(), Error> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let own = Holder { server: server.to_owned(), since: Timestamp(i64::try_from(since).unwrap_or(i64::MAX)) };
    let body = serde_json::to_vec(&own).expect("two plain fields become JSON");
    let object = envelope::wrap(Kind::LOCK, &body);
    if take_over {
        return store.replace(PATH, object.into()).await;
    }
    match store.create(PATH, object.into()).await? {
        Created::New => Ok(()),
        Created::WasThere => expect(store, server).await,
    }
}

/// Refuses where the lock is another server's.
pub(crate) async fn expect(store: &Store, server: &str) -> Result<(), Error> {
    let holder = match store.find(PATH, MAX).await? {
        Some(object) => parse(&object)?,
        None => return Err(Error::Missing { what: format!("the lock of {server}"), chunk: None }),
    };
    if holder.server == server {
        return Ok(());
    }
    Err(Error::InUse { store: store.name(), by: holder.server, since: holder.since })
}

pub(crate) async fn release(store: &Store) -> Result<(), Error> {
    store.delete(PATH).await
}

fn parse(object: &[u8]) -> Result<Holder, Error> {
    let body = envelope::unwrap(PATH, Kind::LOCK, object)?;
    serde_json::from_slice(body).map_err(|e| Error::damaged(PATH, e.to_string()))
}

/// Whether the object is a lock.
pub(crate) fn check(object: &[u8]) -> Result<(), Error> {
    parse(object).map(drop)
}
