//! Carries sessions through their lives: one driver for each session, its operations, and what callers see of it.
//!
//! The store says what is, `lifecycle` says what may happen, supervisors make it happen; the engine is what stands
//! between them. It serves no HTTP; as a client it fetches sources and sends webhooks.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod ask;
mod begin;
mod connect;
mod create;
mod delete;
mod driver;
mod ending;
mod engine;
mod error;
mod events;
mod execs;
mod facts;
mod files;
mod fork;
mod hibernate;
mod idle;
mod inner;
mod launch;
mod limits;
mod logs;
mod moments;
mod network;
mod operation;
mod output;
mod parcels;
mod policy;
mod pool;
mod programs;
mod recapture;
mod recover;
mod request;
mod reserve;
mod rollback;
mod scan;
mod services;
mod session;
mod shelf;
mod snapshots;
mod source;
mod stop;
mod supervisor_client;
mod take;
mod templates;
mod terminals;
mod timers;
mod tokens;
mod wake;
mod watch;
mod webhooks;

pub use connect::{Connected, Found, WayBack};
pub use engine::Engine;
pub use error::{Error, OpenError};
pub use events::EventFollower;
pub use logs::LogReader;
pub use network::{Connection, NetworkView, Secret};
pub use output::OutputReader;
pub use parcels::backup::{Backup, Restore, Restored};
pub use parcels::collect::{StorageChecked, StorageCollected, StorageReport};
pub use request::{
    ByteStream, Caller, Config, Counts, CreateOutcome, Created, FileAnswer, ForkOf, Forked, ImportOptions, LogLine, LogSource,
    MadeToken, NewExec, NewForks, NewSession, NewSnapshot, NewTerminal, NewToken, ObjectStore, OutputItem, Scope, SessionPatch,
    SessionView, Source, TemplateSource, Transition, Transitioned,
};
pub use snapshots::MAX_FORKS;
pub use terminals::Attachment;
pub use tokens::ADMIN_FILE;
pub use webhooks::Webhook;
