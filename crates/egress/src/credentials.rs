//! Secrets, and the header values that are made of them.

use crate::{
    CaKey,
    ca::Authority,
    refusal::{Kind, Refusal},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use http::HeaderValue;
use model::network::{Inject, Part, SecretName};
use std::{collections::BTreeMap, fmt};
use zeroize::{Zeroize, Zeroizing};

/// What the edge knows and the sandbox must not.
#[derive(Default)]
pub struct Credentials {
    pub secrets: BTreeMap<SecretName, String>,
    /// The key of the session's CA, which ends TLS where rules read requests.
    pub ca: Option<CaKey>,
    /// A fork that was given no secrets: rules with a header refuse.
    pub withheld: bool,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.secrets.keys().map(SecretName::as_str).collect();
        f.debug_struct("Credentials").field("secrets", &names).field("ca", &self.ca).field("withheld", &self.withheld).finish()
    }
}

impl Drop for Credentials {
    fn drop(&mut self) {
        self.secrets.values_mut().for_each(Zeroize::zeroize);
    }
}

/// Credentials in use: the CA is made, once.
pub(crate) struct Ready {
    credentials: Credentials,
    pub authority: Option<Authority>,
}

impl Ready {
    pub fn new(credentials: Credentials) -> Ready {
        let authority = credentials.ca.as_ref().and_then(|key| {
            Authority::new(key).inspect_err(|error| tracing::error!(%error, "the session's CA can't be made")).ok()
        });
        Ready { credentials, authority }
    }

    /// The value of a header. It is marked as sensitive, so that no log and no header table keeps it.
    ///
    /// # Errors
    /// A secret is missing, was withheld, or can't stand in a header. Its name is said, never its value.
    pub fn value(&self, inject: &Inject) -> Result<HeaderValue, Refusal> {
        let secret = |name: &SecretName| match self.credentials.secrets.get(name) {
            _ if self.credentials.withheld => {
                Err(Refusal::denied(format!("its rule adds the secret {name}, and this fork was given no secrets")))
            }
            None => Err(Refusal::denied(format!("its rule adds the secret {name}, which isn't set"))),
            Some(value) => Ok(value),
        };
        let mut text = Zeroizing::new(String::new());
        for part in inject.parts() {
            match part {
                Part::Text(own) => text.push_str(own),
                Part::Secret(name) => text.push_str(secret(name)?),
                Part::Basic { user, secret: name } => {
                    let both = Zeroizing::new(format!("{user}:{}", secret(name)?));
                    text.push_str(&Zeroizing::new(STANDARD.encode(both.as_bytes())));
                }
            }
        }
        let mut value = HeaderValue::from_bytes(text.as_bytes()).map_err(|_| {
            let names: Vec<&str> = inject.secrets().map(SecretName::as_str).collect();
            Refusal::new(Kind::Denied, format!("the secret {} holds characters that no header can carry", names.join(" or ")))
        })?;
        value.set_sensitive(true);
        Ok(value)
    }
}
