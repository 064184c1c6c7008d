//! How a sandbox ended that nobody asked to end.

use model::{ByteSize, EndReason};
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, set_child_subreaper, waitid};
use std::time::Duration;

/// How long the kernel may take to say how a process ended whose pipe is closed already.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(10);

/// Makes this process the one that is told how the sandbox's processes ended: `runsc` starts them and goes
/// (`PR_SET_CHILD_SUBREAPER`, prctl(2)).
pub fn hear_of_it() {
    if let Err(error) = set_child_subreaper(Some(rustix::process::getpid())) {
        tracing::warn!(%error, "how a sandbox ends can't be told in full");
    }
}

/// Collects processes that have ended: while this process goes on, nobody else does.
pub fn collect(pids: &[u32]) {
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(pid.cast_signed())) {
        let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    }
}

/// Why the kernel ended a sandbox for lack of memory: its own limit, or the machine's.
pub fn of_memory(limit: Option<ByteSize>, used: u64) -> String {
    let mib = |bytes: u64| bytes >> 20;
    match limit {
        // The kernel's own limit lies a little above the session's.
        Some(limit) if used >= limit.0 / 2 => {
            format!("its own limit of {} MiB was reached, with {} MiB in use", mib(limit.0), mib(used))
        }
        _ => format!("the machine ran out of memory; the session used {} MiB", mib(used)),
    }
}

/// What the kernel says of the processes of a sandbox that is gone.
pub async fn of_processes(pids: &[u32]) -> (EndReason, String) {
    let unknown = (EndReason::SandboxExited, "the sandbox ended by itself".to_owned());
    let mut waited = Duration::ZERO;
    loop {
        let (mut ended, mut left) = (Vec::new(), false);
        for pid in pids.iter().filter_map(|pid| Pid::from_raw(pid.cast_signed())) {
            match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT) {
                Ok(Some(status)) => ended.push(status),
                Ok(None) => left = true,
                // Not ours: another supervisor's child, or collected already.
                Err(_) => {}
            }
        }
        // The one that was killed first takes the others with it: a signal says more than an exit.
        if let Some(cause) =
            ended.iter().find_map(by_signal).or_else(|| (!left).then(|| ended.iter().find_map(by_exit)).flatten())
        {
            return cause;
        }
        if !left || waited >= TOLD_WITHIN {
            return unknown;
        }
        tokio::time::sleep(LOOK).await;
        waited += LOOK;
    }
}

fn by_signal(status: &WaitIdStatus) -> Option<(EndReason, String)> {
    let signal = status.terminating_signal()?;
    Some((EndReason::Killed, format!("by signal {signal} from outside")))
}

fn by_exit(status: &WaitIdStatus) -> Option<(EndReason, String)> {
    let code = status.exit_status()?;
    Some((EndReason::SandboxExited, format!("with status {code}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[tokio::test]
    async fn a_signal_is_told_from_an_exit() {
        let run = |script: &str| Command::new("sh").args(["-c", script]).spawn().unwrap();
        let (mut killed, mut left) = (run("kill -9 $$"), run("exit 3"));
        let (reason, detail) = of_processes(&[left.id(), killed.id()]).await;
        assert_eq!((reason, detail.as_str()), (EndReason::Killed, "by signal 9 from outside"));
        killed.wait().unwrap();
        let (reason, detail) = of_processes(&[left.id()]).await;
        assert_eq!((reason, detail.as_str()), (EndReason::SandboxExited, "with status 3"));
        left.wait().unwrap();
        assert_eq!(of_processes(&[left.id()]).await.0, EndReason::SandboxExited, "nobody knows");
    }

    #[test]
    fn whose_limit_it_was_is_said() {
        let limit = Some(ByteSize(512 << 20));
        assert!(of_memory(limit, 520 << 20).contains("its own limit of 512 MiB"));
        assert!(of_memory(None, 520 << 20).contains("the machine"));
        assert!(of_memory(limit, 20 << 20).contains("the machine"));
    }
}
