//! One process per sandbox: it owns the runtime's sandbox, the channel to the guest, the journals
//! and the terminals' screens, and answers the server over a Unix socket.
//!
//! It outlives the server: while no server runs, programs go on, their output is kept, and a new
//! server finds the socket and goes on. It must not know the store, HTTP or other sessions.
//!
//! ```text
//!  control ──► core ──► link ══ guest
//!  (socket)     │ │      (frames, windows)
//!               │ └──► lifecycle ──► runtime
//!               ├────► journals, facts, works, terminals
//!               └────► network ──► egress
//! ```
//!
//! Everything runs on one thread. State is behind plain mutexes that are never held across an
//! await; so there is no order of locks to get wrong and no byte is handled twice at once.

mod activity;
mod confirm;
mod control;
mod core;
mod death;
mod disk;
mod facts;
mod files;
mod journals;
mod lifecycle;
mod link;
mod mark;
mod memory;
mod network;
mod notes;
mod recapture;
mod saved;
mod snapshot;
mod start;
mod terminals;
mod viewer;
mod works;

use anyhow::Context;
use std::{os::fd::FromRawFd, path::Path, process::ExitCode};
use wire::control::SuperviseSpec;

/// Runs the supervisor that the file `spec` describes until its sandbox has ended.
///
/// `ready_fd`: gets `ok\n` once the socket listens.
///
/// # Errors
/// The specification can't be read, or another supervisor holds the session.
pub fn run(spec: &Path, ready_fd: Option<i32>) -> anyhow::Result<ExitCode> {
    let text = std::fs::read(spec).with_context(|| format!("read {}", spec.display()))?;
    let spec: SuperviseSpec = serde_json::from_slice(&text).with_context(|| format!("read {}", spec.display()))?;
    // SAFETY: the server passes a descriptor that it made for this process alone.
    let ready = ready_fd.map(|fd| unsafe { std::fs::File::from_raw_fd(fd) });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // For syncs, disk walks and the system's resolver; they are started when needed.
        .max_blocking_threads(32)
        .thread_stack_size(256 * 1024)
        .build()
        .context("start the event loop")?;
    runtime.block_on(start::supervise(spec, ready))
}
