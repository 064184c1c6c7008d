//! The object that makes a place a repository.

use crate::{
    envelope::{self, Kind},
    error::Error,
    store::{Created, Store},
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub(crate) const PATH: &str = "config";
const MAX: u64 = 64 << 10;

/// What a repository is. Never changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) repository: Uuid,
    pub(crate) encrypted: bool,
}

impl Config {
    pub(crate) async fn find(store: &Store) -> Result<Option<Config>, Error> {
        let found = store.find(PATH, MAX).await?;
        found.map(|object| Config::parse(&object)).transpose()
    }

    pub(crate) fn parse(object: &[u8]) -> Result<Config, Error> {
        let body = envelope::unwrap(PATH, Kind::CONFIG, object)?;
        serde_json::from_slice(body).map_err(|e| Error::damaged(PATH, e.to_string()))
    }

    pub(crate) async fn store(&self, store: &Store) -> Result<(), Error> {
        let body = serde_json::to_vec(self).expect("two plain fields become JSON");
        match store.create(PATH, envelope::wrap(Kind::CONFIG, &body).into()).await? {
            Created::New => Ok(()),
            Created::WasThere => Err(Error::Exists { store: store.name() }),
        }
    }
}
