//! `dormouse supervise`: looks after one sandbox, in a process of its own.

use std::{path::Path, process::ExitCode};
use tracing_subscriber::EnvFilter;

/// Supervises the sandbox that `spec` describes until it has ended.
///
/// # Errors
/// Whatever keeps the sandbox from being looked after.
pub fn run(spec: &Path, ready_fd: Option<i32>) -> anyhow::Result<ExitCode> {
    let filter = EnvFilter::try_from_env("DORMOUSE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    supervisor::run(spec, ready_fd)
}
