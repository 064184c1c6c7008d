//! Running `runsc`: its settings, its messages, its time limits.

use crate::sandbox::Runsc;
use runtime::RuntimeError;
use std::{fs::File, os::fd::OwnedFd, process::Stdio, time::Duration};
use tokio::process::Command;

/// Longest that any step may take: an image of many GiB on a slow disk.
const STEP_LIMIT: Duration = Duration::from_secs(600);

/// A call of `runsc` with the settings that are part of the sandbox's nature.
pub fn runsc(runsc: &Runsc) -> Command {
    let mut command = Command::new(&runsc.program);
    command
        .arg("--root")
        .arg(&runsc.state_dir)
        .arg(format!("--platform={}", runsc.platform))
        .args(["--network=none", "--overlay2=none", "--host-uds=none", "--ignore-cgroups", "--log-format=json"])
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(false);
    command
}

/// Runs a call whose messages go to `log`, and waits for its end.
///
/// # Errors
/// [`RuntimeError::Refused`] with the last words that `runsc` wrote to the log.
pub async fn finish(mut command: Command, step: &'static str, log: File) -> Result<(), RuntimeError> {
    use std::io::{Read, Seek, SeekFrom};
    let io = |source| RuntimeError::Io { step, source };
    let from = log.metadata().map_err(io)?.len();
    let mut reader = log.try_clone().map_err(io)?;
    command.stderr(Stdio::from(log));
    let mut child = command.spawn().map_err(io)?;
    // The command owns copies of the channel's far ends: they must go, or the channel never ends.
    drop(command);
    let status = match tokio::time::timeout(STEP_LIMIT, child.wait()).await {
        Ok(status) => status.map_err(io)?,
        Err(_) => return Err(RuntimeError::TimedOut { step, seconds: STEP_LIMIT.as_secs() }),
    };
    if status.success() {
        return Ok(());
    }
    let mut text = String::new();
    let _ = reader.seek(SeekFrom::Start(from)).and_then(|_| reader.by_ref().take(64 * 1024).read_to_string(&mut text));
    Err(RuntimeError::Refused { step, message: last_words(&text).unwrap_or_else(|| status.to_string()) })
}

/// The part of runsc's messages that tells a person something: the last one before the stack of a panic, if there is one.
fn last_words(log: &str) -> Option<String> {
    let said = log.find("goroutine ").map_or(log, |stack| &log[..stack]);
    let line = said.lines().rev().find(|line| !line.trim().is_empty())?;
    let message = serde_json::from_str::<serde_json::Value>(line)
        .ok()
        .and_then(|v| v.get("msg").and_then(|m| m.as_str()).map(str::to_owned))
        .unwrap_or_else(|| line.trim().to_owned());
    Some(message.chars().take(600).collect())
}

/// A pipe whose ends close on exec; `runsc` gets its end as a standard descriptor.
pub fn pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // Room for a few frames, so that neither side waits for the other at each. Best effort: above
    // the machine's limit the default stays.
    let _ = rustix::pipe::fcntl_setpipe_size(&write, 1 << 20);
    Ok((read, write))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_from_json_lines() {
        let log = "{\"msg\":\"first\",\"level\":\"warning\"}\n{\"msg\":\"checkpoint failed: file is unlinked\",\"level\":\"fatal\"}\n\n";
        assert_eq!(last_words(log).as_deref(), Some("checkpoint failed: file is unlinked"));
        assert_eq!(last_words("plain words\n").as_deref(), Some("plain words"));
        let panic =
            "checkpoint failed: deleted and invalidated dentries can't be restored:\ngoroutine 44 [running]:\n\tstate.go:309\n";
        assert!(last_words(panic).unwrap().starts_with("checkpoint failed"), "{:?}", last_words(panic));
        assert_eq!(last_words(""), None);
    }
}
