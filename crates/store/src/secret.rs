//! Secrets that requests are given at the edge: kept only as they were encrypted elsewhere.

use crate::Fut;
use model::{Timestamp, network::SecretName};

/// A secret, sealed. The key is not in the store.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretRow {
    pub name: SecretName,
    /// What the caller encrypted; the store doesn't look at it.
    pub sealed: Vec<u8>,
    /// The only hosts that it may be sent to, as rules name them; empty: none is named.
    pub hosts: Vec<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

impl std::fmt::Debug for SecretRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SecretRow { name, hosts, updated_at, .. } = self;
        f.debug_struct("SecretRow")
            .field("name", name)
            .field("hosts", hosts)
            .field("updated_at", updated_at)
            .finish_non_exhaustive()
    }
}

/// Secrets.
pub trait Secrets {
    /// Adds one, or changes the one of its name: that keeps the time at which it was first made.
    fn put_secret(&self, secret: SecretRow) -> Fut<'_, ()>;

    /// The secret of a name.
    fn secret(&self, name: SecretName) -> Fut<'_, Option<SecretRow>>;

    /// All, by name.
    fn list_secrets(&self) -> Fut<'_, Vec<SecretRow>>;

    /// Forgets one; false where there is none.
    fn remove_secret(&self, name: SecretName) -> Fut<'_, bool>;
}
