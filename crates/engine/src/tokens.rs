//! Access tokens: made, listed, revoked, recognized.
//!
//! A token's secret is random and is told once; kept is only its hash. All tokens are in memory, so that a request costs
//! no read, and a revocation holds from the moment it is answered.

use crate::{
    Caller, Engine, Error, MadeToken, NewToken, OpenError, Scope,
    inner::{Inner, now},
    launch::write_private,
    limits,
};
use model::{Actor, Timestamp, TokenId, TokenLimits};
use rand::Rng;
use std::{
    collections::{HashMap, hash_map::Entry},
    fs, io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use store::{Store, TokenRow};

/// The file with the local administrator's token.
pub const ADMIN_FILE: &str = "admin.token";
const ADMIN: &str = "admin";
const PREFIX: &str = "dm_";
/// Characters of a secret behind its prefix: 43 × 6 bits are over 256 bits.
const LENGTH: usize = 43;
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
/// How often it is written down when tokens were last used.
const NOTE_USE: Duration = Duration::from_secs(30);

/// The tokens in memory, by the hash of their secret.
pub(crate) struct TokenCache {
    known: Mutex<HashMap<String, TokenRow>>,
    used: Mutex<HashMap<TokenId, Timestamp>>,
}

impl TokenCache {
    /// A token's name and its limits, where it has any. Those of a revoked token hold on: its sessions are still there.
    pub(crate) fn limits_of(&self, id: TokenId) -> Option<(TokenId, String, TokenLimits)> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let row = known.values().find(|row| row.id == id)?;
        (row.limits != TokenLimits::default()).then(|| (id, row.name.clone(), row.limits))
    }
}

/// Reads the tokens; makes the administrator's where there is none.
pub(crate) async fn open(data_dir: &Path, store: &Arc<dyn Store>) -> Result<TokenCache, OpenError> {
    let mut known: HashMap<String, TokenRow> =
        store.list_tokens().await?.into_iter().map(|row| (row.hash.clone(), row)).collect();
    let path = data_dir.join(ADMIN_FILE);
    let io = |what: &'static str| {
        let path = path.clone();
        move |source| OpenError::Io { what, path, source }
    };
    let secret = match fs::read_to_string(&path) {
        Ok(text) if is_secret(text.trim()) => text.trim().to_owned(),
        Ok(_) => new_secret(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => new_secret(),
        Err(e) => return Err(io("read the administrator's token in")(e)),
    };
    let hash = hash(&secret);
    if let Entry::Vacant(vacant) = known.entry(hash.clone()) {
        let row = TokenRow {
            id: TokenId::new(),
            name: ADMIN.to_owned(),
            hash,
            scopes: vec![Scope::Admin.as_str().to_owned(), Scope::Host.as_str().to_owned()],
            sessions: None,
            limits: TokenLimits::default(),
            created_at: now(),
            expires_at: None,
            revoked_at: None,
            last_used_at: None,
        };
        store.insert_token(row.clone()).await?;
        vacant.insert(row);
    }
    write_private(&path, format!("{secret}\n").as_bytes()).map_err(io("write the administrator's token into"))?;
    Ok(TokenCache { known: Mutex::new(known), used: Mutex::default() })
}

/// Writes down, now and then, when tokens were last used.
pub(crate) async fn note_use(inner: Arc<Inner>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(NOTE_USE) => {}
            () = inner.closing.cancelled() => return,
        }
        let used = std::mem::take(&mut *inner.tokens.used.lock().unwrap_or_else(PoisonError::into_inner));
        if !used.is_empty()
            && let Err(error) = inner.store.touch_tokens(used.into_iter().collect()).await
        {
            tracing::warn!(%error, "the use of tokens is not written down");
        }
    }
}

impl Engine {
    /// Makes a token.
    ///
    /// # Errors
    /// [`Error::Invalid`]; [`Error::Forbidden`] for a caller that isn't an administrator.
    pub async fn token_new(&self, caller: &Caller, new: NewToken) -> Result<MadeToken, Error> {
        admin_only(caller)?;
        if new.name.is_empty() || new.name.len() > 100 || new.name.contains(char::is_control) {
            return Err(Error::invalid("name", "it has 1 to 100 characters, none of them a control character"));
        }
        if new.scopes.is_empty() {
            return Err(Error::invalid("scopes", "a token without a scope reaches nothing"));
        }
        if new.ttl_seconds == Some(0) {
            return Err(Error::invalid("ttl_seconds", "it must be at least 1"));
        }
        limits::sound(&new.limits)?;
        let secret = new_secret();
        let created_at = now();
        let row = TokenRow {
            id: TokenId::new(),
            name: new.name,
            hash: hash(&secret),
            scopes: new.scopes.iter().map(|scope| scope.as_str().to_owned()).collect(),
            sessions: new.sessions,
            limits: new.limits,
            created_at,
            expires_at: new.ttl_seconds.map(|seconds| created_at.plus(Duration::from_secs(seconds))),
            revoked_at: None,
            last_used_at: None,
        };
        self.inner.store.insert_token(row.clone()).await?;
        self.inner.tokens.known.lock().unwrap_or_else(PoisonError::into_inner).insert(row.hash.clone(), row.clone());
        Ok(MadeToken { row, secret })
    }

    /// All tokens, revoked ones too, oldest first.
    ///
    /// # Errors
    /// The store can't be read.
    pub async fn tokens(&self) -> Result<Vec<TokenRow>, Error> {
        let mut rows = self.inner.store.list_tokens().await?;
        let used = self.inner.tokens.used.lock().unwrap_or_else(PoisonError::into_inner);
        for row in &mut rows {
            row.last_used_at = used.get(&row.id).copied().or(row.last_used_at);
        }
        Ok(rows)
    }

    /// Revokes a token; from the answer on it opens nothing.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Forbidden`] for a caller that isn't an administrator.
    pub async fn token_revoke(&self, caller: &Caller, id: TokenId) -> Result<(), Error> {
        admin_only(caller)?;
        let at = now();
        {
            let mut known = self.inner.tokens.known.lock().unwrap_or_else(PoisonError::into_inner);
            for row in known.values_mut().filter(|row| row.id == id) {
                row.revoked_at.get_or_insert(at);
            }
        }
        if self.inner.store.revoke_token(id, at).await? { Ok(()) } else { Err(Error::not_found(format!("token {id}"))) }
    }

    /// The caller that a secret stands for; `None` for one that is unknown, revoked or expired.
    ///
    /// # Errors
    /// None at present; the store may be asked in the future.
    pub async fn authenticate(&self, secret: &str) -> Result<Option<Caller>, Error> {
        if !is_secret(secret) {
            return Ok(None);
        }
        let at = now();
        // Found by its hash: how long that takes tells nothing about the secret.
        let known = self.inner.tokens.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(row) = known.get(&hash(secret)) else { return Ok(None) };
        if row.revoked_at.is_some() || row.expires_at.is_some_and(|end| end <= at) {
            return Ok(None);
        }
        self.inner.tokens.used.lock().unwrap_or_else(PoisonError::into_inner).insert(row.id, at);
        Ok(Some(Caller {
            actor: Actor(format!("token:{}", row.name)),
            token: Some(row.id),
            scopes: row.scopes.iter().filter_map(|scope| scope.parse().ok()).collect(),
            sessions: row.sessions.clone(),
            local: false,
            request: None,
        }))
    }
}

/// Refuses callers that aren't administrators.
pub(crate) fn admin_only(caller: &Caller) -> Result<(), Error> {
    if caller.has(Scope::Admin) { Ok(()) } else { Err(Error::Forbidden { detail: "this needs the scope admin".to_owned() }) }
}

fn hash(secret: &str) -> String {
    blake3::hash(secret.as_bytes()).to_hex().to_string()
}

fn new_secret() -> String {
    let mut bytes = [0u8; LENGTH];
    rand::rng().fill_bytes(&mut bytes);
    let text = bytes.iter().map(|byte| char::from(ALPHABET[usize::from(byte & 63)]));
    PREFIX.chars().chain(text).collect()
}

fn is_secret(text: &str) -> bool {
    text.strip_prefix(PREFIX).is_some_and(|rest| rest.len() == LENGTH && rest.bytes().all(|b| ALPHABET.contains(&b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_long_random_and_fit_for_a_url() {
        let (a, b) = (new_secret(), new_secret());
        assert_ne!(a, b);
        assert!(is_secret(&a) && !a.contains('.') && a.len() == 46);
        for bad in ["", "dm_", &a[..45], &format!("{a}x"), &a.replace("dm_", "xx_"), &a.replacen(&a[5..6], ".", 1)] {
            assert!(!is_secret(bad), "{bad}");
        }
        assert_ne!(hash(&a), hash(&b));
    }
}
