//! Who may come in, who came, and what the server knows of itself.

use crate::{Cursor, Fut, Page};
use model::{SessionId, Timestamp, TokenId, TokenLimits};
use std::path::PathBuf;

/// An access token. Its secret is never stored, only a hash of it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRow {
    pub id: TokenId,
    pub name: String,
    /// Hexadecimal, of the secret; which hash it is, the caller decides.
    pub hash: String,
    pub scopes: Vec<String>,
    /// The only sessions it is good for; `None`: all.
    pub sessions: Option<Vec<SessionId>>,
    /// What the sessions that it makes may take together.
    pub limits: TokenLimits,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
    pub last_used_at: Option<Timestamp>,
}

/// Access tokens.
pub trait Tokens {
    /// Adds one; a known id or hash is an error.
    fn insert_token(&self, token: TokenRow) -> Fut<'_, ()>;

    /// The token with this hash, revoked and expired ones too: the caller decides on them.
    fn token_by_hash(&self, hash: String) -> Fut<'_, Option<TokenRow>>;

    /// All tokens, oldest first.
    fn list_tokens(&self) -> Fut<'_, Vec<TokenRow>>;

    /// Revokes one; false where there is none. A time that is already written stays.
    fn revoke_token(&self, id: TokenId, at: Timestamp) -> Fut<'_, bool>;

    /// Writes down when tokens were last used. Meant to be called now and then, for many at once.
    fn touch_tokens(&self, used: Vec<(TokenId, Timestamp)>) -> Fut<'_, ()>;
}

/// One access.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditRow {
    pub at: Timestamp,
    pub actor: String,
    pub method: String,
    /// Without the query, which may hold a token.
    pub path: String,
    pub status: u16,
    pub session_id: Option<SessionId>,
}

/// The list of accesses.
pub trait Audit {
    /// Adds many at once.
    fn append_audit(&self, rows: Vec<AuditRow>) -> Fut<'_, ()>;

    /// Newest first.
    fn list_audit(&self, limit: usize, cursor: Option<Cursor>) -> Fut<'_, Page<AuditRow>>;

    /// Forgets what is older; tells how many.
    fn purge_audit(&self, before: Timestamp) -> Fut<'_, u64>;
}

/// A few words that belong to the whole data directory, such as the server's instance id.
pub trait Meta {
    /// The value of a name.
    fn meta(&self, name: String) -> Fut<'_, Option<String>>;

    /// Sets the value of a name.
    fn set_meta(&self, name: String, value: String) -> Fut<'_, ()>;

    /// Writes a copy of everything, as it is at one moment, to a file that isn't there yet: one with which such a store can
    /// be opened. Others go on reading and writing.
    fn copy_to(&self, path: PathBuf) -> Fut<'_, ()>;
}
