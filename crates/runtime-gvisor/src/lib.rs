//! Sandboxes by gVisor's `runsc`: one process tree per sandbox, no KVM needed, memory snapshots.
//!
//! What was measured, and what follows from it, is in ARCHITECTURE.md under "gVisor". This crate
//! must not know sessions, journals or what is said on the channel.

mod cgroup;
mod command;
mod sandbox;
mod spec;

pub use cgroup::{CgroupSupport, Cgroups};
pub use sandbox::{GvisorSandbox, Runsc};

/// The `runsc` version as the program at `path` tells it.
///
/// # Errors
/// The program can't be run or says no version.
pub fn runsc_version(path: &std::path::Path) -> Result<String, runtime::RuntimeError> {
    let step = "ask runsc for its version";
    let output = std::process::Command::new(path)
        .arg("--version")
        .output()
        .map_err(|source| runtime::RuntimeError::Io { step, source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .find_map(|line| line.strip_prefix("runsc version "))
        .map(|version| version.trim().to_owned())
        .ok_or_else(|| runtime::RuntimeError::Refused { step, message: format!("unexpected answer: {}", text.trim()) })
}
