//! Secrets: set, listed by name, given up; and who may name them.

use super::{
    rules::{self, Hosts},
    tell,
};
use crate::{Caller, Engine, Error, Scope, inner::Inner, session::Session, tokens::admin_only};
use model::{
    Timestamp,
    network::{Policy, SecretName},
};
use std::sync::{Arc, atomic::Ordering};
use store::SecretRow;

/// Longest value, in bytes: it has to fit into a header.
const LONGEST: usize = 16 * 1024;

/// A secret without its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secret {
    pub name: SecretName,
    /// The only hosts that it may be sent to; empty: an administrator's rule names them.
    pub hosts: Vec<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

impl From<SecretRow> for Secret {
    fn from(row: SecretRow) -> Secret {
        Secret { name: row.name, hosts: row.hosts, created_at: row.created_at, updated_at: row.updated_at }
    }
}

impl Engine {
    /// Every secret, by name, without its value.
    ///
    /// # Errors
    /// [`Error::Forbidden`] for a caller that isn't an administrator.
    pub async fn secrets(&self, caller: &Caller) -> Result<Vec<Secret>, Error> {
        admin_only(caller)?;
        Ok(self.inner.store.list_secrets().await?.into_iter().map(Secret::from).collect())
    }

    /// Sets a secret. Sessions that use it have the new value when this is answered. Without `hosts` one that is there keeps
    /// those that it has.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::Invalid`].
    pub async fn set_secret(
        &self,
        caller: &Caller,
        name: SecretName,
        value: &str,
        hosts: Option<Vec<String>>,
    ) -> Result<Secret, Error> {
        admin_only(caller)?;
        check_value(value)?;
        let before = self.inner.store.secret(name.clone()).await?;
        let hosts = match (hosts, &before) {
            (Some(hosts), _) => rules::hosts(&hosts)?,
            (None, Some(before)) => before.hosts.clone(),
            (None, None) => Vec::new(),
        };
        let now = self.inner.now();
        let sealed = self.inner.keyring.seal(&name, value);
        let created_at = before.map_or(now, |before| before.created_at);
        let row = SecretRow { name, sealed, hosts, created_at, updated_at: now };
        self.inner.store.put_secret(row.clone()).await?;
        secret_changed(&self.inner, &row.name).await;
        Ok(row.into())
    }

    /// Gives a secret up. Requests of sessions that use it go without it from then on.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::NotFound`].
    pub async fn remove_secret(&self, caller: &Caller, name: SecretName) -> Result<(), Error> {
        admin_only(caller)?;
        if !self.inner.store.remove_secret(name.clone()).await? {
            return Err(Error::not_found(format!("secret '{name}'")));
        }
        secret_changed(&self.inner, &name).await;
        Ok(())
    }

    /// True where the key of the secrets lies in the data directory, beside what it encrypts.
    pub fn key_lies_beside(&self) -> bool {
        self.inner.keyring.lies_beside()
    }
}

/// A value goes into a header: a line end in it would begin another one.
fn check_value(value: &str) -> Result<(), Error> {
    if value.is_empty() || value.len() > LONGEST {
        return Err(Error::invalid("value", format!("it has 1 to {LONGEST} bytes")));
    }
    if value.contains(|c: char| c.is_control()) {
        return Err(Error::invalid("value", "it can't contain a line end or another control character"));
    }
    Ok(())
}

/// Tells every living session that names it. What isn't told now, [`super::follow`] tells later.
async fn secret_changed(inner: &Arc<Inner>, name: &SecretName) {
    inner.secrets_changed.fetch_add(1, Ordering::Relaxed);
    let uses = |session: &Arc<Session>| session.view().row.network.secrets().contains(&name);
    let telling = inner.all_known().into_iter().filter(uses).map(|session| async move {
        let Some(live) = inner.awake(&session) else { return };
        if let Err(error) = tell(inner, &session, &live).await {
            tracing::warn!(session = %session.id, %error, "a session doesn't have a changed secret yet");
            session.touch();
        }
    });
    futures_util::future::join_all(telling).await;
}

/// The hosts of every secret that is here.
pub(super) fn hosts_of(rows: &[SecretRow]) -> Hosts {
    rows.iter().map(|row| (row.name.clone(), row.hosts.clone())).collect()
}

/// Checks that a caller may set this policy where `before` was in force.
///
/// # Errors
/// [`Error::Forbidden`] with the rule and the secret.
pub(crate) async fn authorize(inner: &Inner, caller: &Caller, policy: &Policy, before: Option<&Policy>) -> Result<(), Error> {
    if policy.secrets().is_empty() {
        return Ok(());
    }
    let known = hosts_of(&inner.store.list_secrets().await?);
    rules::check(policy, before, &known, caller.has(Scope::Admin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_fits_into_a_header() {
        assert!(check_value("sk-ant-\u{e4} {x}").is_ok());
        for bad in ["", "a\nb", "a\r", "\0", "a\tb"] {
            assert!(check_value(bad).is_err(), "{bad:?}");
        }
        assert!(check_value(&"x".repeat(LONGEST + 1)).is_err());
    }
}
