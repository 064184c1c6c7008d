//! Requests that a client may send again without their effect happening again.
//!
//! ```text
//!            begin                    finish
//!   (none) --------> in progress -----------> done --(24 h)--> (none)
//!      ^                 |   | the server died
//!      |    abandon      |   +-- nothing was made: the next begin takes it over
//!      +-----------------+   +-- something was made: interrupted, and the thing is named
//! ```
//! What a request makes is marked in the very transaction that makes it ([`crate::SessionChange::request`]),
//! so that there is no moment at which the thing exists and the request doesn't know it.

use crate::Fut;
use model::Timestamp;
use std::time::Duration;

/// Names a request. The same key on another path is another request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestId {
    /// Whose key it is: a token's id or a peer.
    pub owner: String,
    /// What the client sent as `Idempotency-Key`.
    pub key: String,
    /// Method and path.
    pub route: String,
}

impl RequestId {
    /// How long an answer is kept.
    pub const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
}

/// What is answered, and answered again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

/// How a request stands when it comes in.
///
/// Where a hash of the first body is given, a request with another body contradicts the first one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Begun {
    /// New: go on, then finish or abandon it.
    Fresh,
    /// The same request is being carried out.
    InProgress { body_hash: String },
    /// A server that is gone was carrying it out, and `made` exists: answer from that.
    Interrupted { body_hash: String, made: String },
    /// It was answered.
    Done { body_hash: String, answer: Answer },
}

/// Requests by their key.
pub trait Idempotency {
    /// Begins a request, unless it is known. `instance` names the running server: one server at a
    /// time holds a store, so what another instance began is not under way any more.
    fn begin_request(&self, id: RequestId, body_hash: String, instance: String, now: Timestamp) -> Fut<'_, Begun>;

    /// Keeps the answer. Does nothing where the request isn't known (any more).
    fn finish_request(&self, id: RequestId, answer: Answer) -> Fut<'_, ()>;

    /// Forgets a request that had no effect. What made something or was answered stays.
    fn abandon_request(&self, id: RequestId) -> Fut<'_, ()>;

    /// Forgets what began earlier; tells how many. What isn't done is forgotten as well.
    fn purge_requests(&self, before: Timestamp) -> Fut<'_, u64>;
}
