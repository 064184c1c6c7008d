//! Carries sessions through their lives: one driver for each session, its operations, and what callers see of it.
//!
//! The store says what is, `lifecycle` says what may happen, supervisors make it happen; the engine is what stands
//! between them. It knows no HTTP.

mod error;
mod request;
mod surface;

pub use error::{Error, OpenError};
pub use request::{
    ByteStream, Caller, Config, Counts, CreateOutcome, Created, FileAnswer, LogLine, LogSource, MadeToken, NewExec, NewSession,
    NewTerminal, NewToken, OutputItem, Scope, SessionPatch, SessionView, Source, TemplateSource, Transition, Transitioned,
};
pub use surface::{Attachment, Engine, EventFollower, LogReader, OutputReader};
