//! How sandboxes are made: the trait that every runtime fulfils.
//!
//! A runtime knows how to bring one sandbox to life, freeze it, save its memory and end it. It
//! knows nothing of sessions, journals or the guest's protocol: it hands out the two ends of a byte
//! channel and that is all it has to do with what is said on it.
//!
//! ```text
//!           boot │ restore
//!                ▼
//!   ┌──────► running ──pause──► paused ──capture──► paused (its memory is also on storage)
//!   │           │ ▲               │ │                │
//!   │         freeze thaw      resume └──freeze──► frozen: no CPU at all
//!   └───────────┴─┴───────────────┘                  │
//!                                   any ── kill ──► gone
//! ```

use model::{ByteSize, Resources};
use std::{
    future::Future,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    pin::Pin,
};

/// What a sandbox is made of.
#[derive(Debug, Clone)]
pub struct SandboxSpec {
    /// The runtime's name for it: unique on the machine.
    pub name: String,
    /// The mounted root file system.
    pub root: PathBuf,
    /// A directory for the runtime's own description of the sandbox. Made when missing.
    pub bundle: PathBuf,
    /// Where the sandbox's standard error and the runtime's messages go. The sandbox keeps it open.
    pub log: PathBuf,
    /// The first program and its arguments.
    pub argv: Vec<String>,
    pub hostname: String,
    pub resources: Resources,
}

/// The sandbox's standard input and output.
#[derive(Debug)]
pub struct Channel {
    pub to_guest: OwnedFd,
    pub from_guest: OwnedFd,
}

/// What the machine counts for a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Memory that can't be reclaimed: anonymous and shared.
    pub memory_bytes: u64,
    pub cpu_ms: u64,
    /// How often the kernel ended something for lack of memory.
    pub oom_kills: u64,
}

/// Why a runtime's step failed. Each names the step, so that the message tells what was tried.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("can't {step}: {source}")]
    Io { step: &'static str, source: std::io::Error },
    /// The runtime's program said no.
    #[error("{step} failed: {message}")]
    Refused { step: &'static str, message: String },
    #[error("{step} took longer than {seconds} s; it may still be going on")]
    TimedOut { step: &'static str, seconds: u64 },
    /// This machine or runtime can't do it at all.
    #[error("{0}")]
    Unsupported(String),
}

/// A step's outcome, later.
pub type Step<'a, T> = Pin<Box<dyn Future<Output = Result<T, RuntimeError>> + Send + 'a>>;

/// One sandbox, living or to be.
pub trait Sandbox: Send + Sync {
    /// Starts it afresh.
    fn boot(&self) -> Step<'_, Channel>;

    /// Starts it from a memory image. Programs run on as soon as this returns, if not before.
    fn restore<'a>(&'a self, image: &'a Path) -> Step<'a, Channel>;

    /// Stops every program inside, the memory stays.
    fn pause(&self) -> Step<'_, ()>;

    /// Undoes [`Self::pause`].
    fn resume(&self) -> Step<'_, ()>;

    /// Writes the memory of a paused sandbox into the directory `image`; to be synced by the caller, who may let the sandbox
    /// go on before that. It stays paused.
    fn capture<'a>(&'a self, image: &'a Path) -> Step<'a, ByteSize>;

    /// Takes all CPU from it, runtime's own tasks included.
    fn freeze(&self) -> Step<'_, ()>;

    /// Undoes [`Self::freeze`].
    fn thaw(&self) -> Step<'_, ()>;

    /// Ends it and removes all that the runtime keeps of it. No error when it is gone already.
    fn kill(&self) -> Step<'_, ()>;

    /// Process ids on the host, for cleaning up after a supervisor that died.
    fn pids(&self) -> Vec<u32>;

    /// What the machine counts; `None` where it doesn't count for each sandbox.
    fn usage(&self) -> Option<Usage>;

    /// A descriptor that becomes readable when memory use may have reached `threshold`; `None`
    /// where the machine can't tell.
    fn memory_alarm(&self, threshold: ByteSize) -> Option<OwnedFd>;
}
