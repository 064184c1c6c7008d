//! What Dormouse remembers about sessions, and the one interface through which it is read and changed.
//!
//! A store is the only truth for identity and state. This crate says what is kept and what a store
//! promises; `store-sqlite` keeps it. It knows no SQL, no async runtime and reads no clock: every
//! time comes from the caller. Bytes of output, files and memory are never in a store.
//!
//! The promises, which [`conformance`] (feature `conformance`) holds a database against:
//! - A change that was answered with `Ok` survives a crash of the process and of the machine.
//! - A change is written as a whole or not at all, and only onto the revision that its author read.
//! - The events of a session are numbered from 1 without holes; all events have one order besides,
//!   in which nothing ever appears before something that a reader has already seen.
//! - A key leads to one session at most, a snapshot's name to one snapshot.
//! - A row that can't be read any more stops its own session and nothing else.
//! - Dropping a future of a change leaves open whether the change is made; it is never half made.

#[cfg(feature = "conformance")]
pub mod conformance;

mod access;
mod error;
mod event;
mod idempotency;
mod lock;
mod millis;
mod page;
mod parcel;
mod secret;
mod session;
mod snapshot;
mod traffic;
mod work;

pub use access::{Audit, AuditRow, Meta, TokenRow, Tokens};
pub use error::StoreError;
pub use event::{EventRow, Events, GlobalSeq, NewEvent};
pub use idempotency::{Answer, Begun, Idempotency, RequestId};
pub use lock::{DataLock, LockError};
pub use page::{Cursor, CursorKind, MAX_PAGE, Page};
pub use parcel::Parcel;
pub use secret::{SecretRow, Secrets};
pub use session::{
    Committed, RequestMark, Revision, SessionChange, SessionFilter, SessionRow, SessionScan, Sessions, UnreadableSession,
    WakeRecord,
};
pub use snapshot::{SnapshotFilter, SnapshotRow, SnapshotScan, Snapshots, UnreadableSnapshot};
pub use traffic::{HostTotals, Traffic};
pub use work::{ExecRow, Execs, OperationRow, Operations, TerminalRow, Terminals};

use std::{future::Future, pin::Pin};

/// The answer of a store, later. Boxed, so that a store can be used as `dyn Store`.
pub type Fut<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Everything that a server keeps. Holders use it as `Arc<dyn Store>`.
pub trait Store:
    Sessions
    + Operations
    + Execs
    + Terminals
    + Snapshots
    + Events
    + Tokens
    + Secrets
    + Idempotency
    + Audit
    + Meta
    + Send
    + Sync
    + 'static
{
}

impl<T> Store for T where
    T: Sessions
        + Operations
        + Execs
        + Terminals
        + Snapshots
        + Events
        + Tokens
        + Secrets
        + Idempotency
        + Audit
        + Meta
        + Send
        + Sync
        + 'static
{
}
