//! The JSON of the HTTP interface, version 1, as types: what a client may send and what it is answered.
//!
//! The server, the command line and whoever else speaks the interface share them, so that a field has one name and
//! one meaning. Requests refuse fields that they don't know; answers ignore them, so that a client can be older than
//! its server. Times are RFC 3339 UTC with milliseconds, and a size or a time span names its unit.
//!
//! This crate knows no HTTP library, no store and no clock.

mod admin;
mod network;
mod output;
mod patch;
mod problem;
mod session;
mod signal;
mod snapshot;
mod storage;
mod strict;
mod work;

/// The messages of a terminal's WebSocket.
pub mod terminal {
    pub use wire::terminal::{
        ClientFrame, EndStatus, InputSeq, MAX_INPUT, MAX_REASON, MAX_SIDE, ServerFrame, TerminalFrameError,
    };
}

pub use admin::{
    CreateTemplate, CreateToken, Event, Scope, ServerInfo, Shutdown, ShutdownAnswer, ShutdownFailure, Template, TemplateKind,
    Token, TokenLimits,
};
pub use model::{FileMeta, FileType};
pub use network::{HostTraffic, LinkRequest, Network, OpenConnection, PreviewLink, PutSecret, Secret, SetSecret};
pub use output::{BadData, LogLine, OutputLine};
pub use patch::some;
pub use problem::{PROBLEM_JSON, Problem, ProblemCode};
pub use session::{
    ConnectAnswer, ConnectRequest, ConnectStatus, CreateSession, CreatedSession, Extend, Hibernate, Hook, Ignored, KeepsAwake,
    Lifecycle, Operation, OperationRef, Page, Parent, PatchSession, Replaced, RestoreOption, Session, SessionActivity, Source,
    Usage, WakeReport,
};
pub use signal::{BadSignal, Signal, signal_name};
pub use snapshot::{ForkAnswer, ForkCount, ForkRequest, NewSnapshot, RollbackRequest, Snapshot, SnapshotRequires};
pub use storage::{Backup, BackupRequest, RotateKey, Storage, StorageChecked, StorageCollected};
pub use wire::files::WatchEvent;
pub use work::{
    CreateExec, CreateTerminal, Exec, Mkdir, Move, Port, Process, Service, SignalExec, Stats, Stdin, StdinAnswer, Terminal,
};
