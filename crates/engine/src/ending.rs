//! Telling living supervisors from dead ones, and clearing away what a dead one has left.

use crate::{Error, inner::blocking, session::Live, supervisor_client::CallError};
use model::{EndReason, Generation, Resources};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use runtime::{Sandbox, SandboxSpec};
use runtime_gvisor::{CgroupSupport, GvisorSandbox, Runsc};
use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, File},
    io,
    path::Path,
    time::Duration,
};
use wire::{
    control::{Answer, Phase, Request},
    layout::{SessionLayout, SupervisorMark},
};

/// How long a supervisor may take to end beyond the grace that its programs are given.
const END_LIMIT: Duration = Duration::from_secs(20);
/// How long something that was killed may take to be gone.
const KILL_LIMIT: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(5);

/// The mark of the session's latest supervisor, where it is readable.
pub(crate) fn mark(layout: &SessionLayout) -> Option<SupervisorMark> {
    serde_json::from_slice(&fs::read(layout.mark()).ok()?).ok()
}

/// True while a supervisor holds the session: it keeps the mark's file locked, and the kernel takes the lock from the
/// dead.
pub(crate) fn is_held(layout: &SessionLayout) -> bool {
    let Ok(file) = File::open(layout.mark()) else { return false };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => false,
        Err(error) => error == rustix::io::Errno::WOULDBLOCK,
    }
}

/// The computer's present start.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// True where the session's latest supervisor belonged to an earlier start of the computer.
pub(crate) fn was_rebooted(layout: &SessionLayout) -> bool {
    mark(layout).is_some_and(|mark| !mark.boot_id.is_empty() && mark.boot_id != boot_id())
}

/// Ends a session's sandbox: asks its supervisor, and where that doesn't help, kills it. Afterwards nothing of it is
/// left but the disk's files. No error where there was nothing. `runsc_state`: where the runtime keeps its sandboxes.
pub(crate) async fn end_sandbox(
    layout: &SessionLayout,
    runsc_state: &Path,
    reason: EndReason,
    grace: Duration,
) -> Result<(), Error> {
    if is_held(layout) {
        let live = Live::new(layout.clone(), Generation::FIRST);
        let request = Request::Shutdown { reason, grace_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX) };
        match live.supervisor.call_within(&request, grace + END_LIMIT).await {
            Ok(_) | Err(CallError::Unreachable(_) | CallError::Broken(_)) => {}
            Err(error) => tracing::warn!(dir = %layout.dir().display(), %error, "a supervisor doesn't end and is killed"),
        }
    }
    clear_the_way(layout, runsc_state).await
}

/// Makes room for another supervisor: what is alive of the old one and its sandbox is killed, its mounts are taken away.
/// The caller knows that nothing of it is wanted any more.
pub(crate) async fn clear_the_way(layout: &SessionLayout, runsc_state: &Path) -> Result<(), Error> {
    // After a restart of the computer its numbers are others', and everything of it is gone.
    if let Some(mark) = mark(layout).filter(|mark| mark.boot_id == boot_id()) {
        kill_supervisor(layout, &mark).await?;
        let id = layout.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
        for name in [mark.container, format!("dm-{id}-confirm")] {
            kill_container(layout, runsc_state, name).await?;
        }
    }
    let layout = layout.clone();
    blocking(move || unmount_all(&layout)).await?
}

async fn kill_supervisor(layout: &SessionLayout, mark: &SupervisorMark) -> Result<(), Error> {
    let mut waited = Duration::ZERO;
    while is_held(layout) {
        if started_ticks(mark.pid) == Some(mark.started_ticks) {
            let pid = i32::try_from(mark.pid).map_err(|_| Error::internal(format!("{} is no process id", mark.pid)))?;
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        if waited >= KILL_LIMIT {
            return Err(Error::internal(format!("the supervisor {} was killed and is still there", mark.pid)));
        }
        tokio::time::sleep(STEP).await;
        waited += STEP;
    }
    Ok(())
}

async fn kill_container(layout: &SessionLayout, runsc_state: &Path, name: String) -> Result<(), Error> {
    let runsc = Runsc { program: "runsc".into(), state_dir: runsc_state.to_owned(), platform: "systrap".to_owned() };
    let spec = SandboxSpec {
        name,
        root: layout.root(),
        bundle: layout.bundle(),
        log: layout.run().join("sandbox.log"),
        argv: Vec::new(),
        hostname: String::new(),
        resources: Resources::default(),
    };
    GvisorSandbox::new(runsc, spec, CgroupSupport::detect()).kill().await.map_err(Error::internal)
}

fn unmount_all(layout: &SessionLayout) -> Result<(), Error> {
    for at in snapshot::disk::mounts_below(layout.dir()).map_err(Error::internal)? {
        snapshot::disk::unmount(&at).map_err(Error::internal)?;
    }
    Ok(())
}

/// When a process started, in clock ticks since the computer's start (proc_pid_stat(5), field 22).
fn started_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split_whitespace().nth(19)?.parse().ok()
}

/// How the session's supervisor stands; `None` where there is none, or one whose sandbox has ended.
pub(crate) async fn phase(live: &Live) -> Result<Option<wire::control::Status>, CallError> {
    match live.supervisor.call_soon(&Request::Status).await {
        Ok(Answer::Status(status)) if status.phase != Phase::Ended => Ok(Some(status)),
        Ok(_) | Err(CallError::Unreachable(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes a directory tree; fine where it is gone already.
pub(crate) fn remove_tree(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_mark(layout: &SessionLayout, mark: &SupervisorMark) {
        fs::create_dir_all(layout.run()).unwrap();
        fs::write(layout.mark(), serde_json::to_vec(mark).unwrap()).unwrap();
    }

    fn mark_of(pid: u32, started_ticks: u64, boot_id: String) -> SupervisorMark {
        let generation = Generation::FIRST;
        SupervisorMark { pid, started_ticks, boot_id, generation, container: "dm-test-1".into(), sandbox_pids: vec![] }
    }

    #[test]
    fn only_a_held_lock_means_a_living_supervisor() {
        let dir = tempfile::tempdir().unwrap();
        let layout = SessionLayout::new(dir.path());
        assert!(!is_held(&layout));
        write_mark(&layout, &mark_of(1, 0, boot_id()));
        assert!(!is_held(&layout));
        let lock = File::open(layout.mark()).unwrap();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(is_held(&layout));
        drop(lock);
        assert!(!is_held(&layout));
    }

    #[tokio::test]
    async fn a_process_that_got_a_dead_ones_number_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let layout = SessionLayout::new(dir.path());
        let mut bystander = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut mark = mark_of(bystander.id(), 1, boot_id());
        mark.sandbox_pids = vec![bystander.id()];
        write_mark(&layout, &mark);
        clear_the_way(&layout, &dir.path().join("runsc")).await.unwrap();
        assert_eq!(bystander.try_wait().unwrap(), None);
        bystander.kill().unwrap();
        bystander.wait().unwrap();
    }

    #[tokio::test]
    async fn a_supervisor_that_does_not_answer_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let layout = SessionLayout::new(dir.path());
        write_mark(&layout, &mark_of(0, 0, boot_id()));
        // A process that holds the lock, as a supervisor does, and listens to nobody.
        let mut hung = std::process::Command::new("flock").arg(layout.mark()).args(["sleep", "60"]).spawn().unwrap();
        while !is_held(&layout) {
            tokio::time::sleep(STEP).await;
        }
        write_mark(&layout, &mark_of(hung.id(), started_ticks(hung.id()).unwrap(), boot_id()));
        let id = hung.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        for child in children.split_whitespace() {
            // The lock is shared with what `flock` runs; a supervisor's isn't.
            kill(Pid::from_raw(child.parse().unwrap()), Signal::SIGSTOP).unwrap();
        }
        let ended = tokio::task::spawn_blocking(move || hung.wait().unwrap());
        let end = end_sandbox(&layout, &dir.path().join("runsc"), EndReason::Asked, Duration::ZERO);
        let killer = async {
            let status = ended.await.unwrap();
            for child in children.split_whitespace() {
                kill(Pid::from_raw(child.parse().unwrap()), Signal::SIGKILL).unwrap();
            }
            status
        };
        let (result, status) = tokio::join!(end, killer);
        result.unwrap();
        assert!(!status.success());
    }

    #[test]
    fn another_start_of_the_computer_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let layout = SessionLayout::new(dir.path());
        write_mark(&layout, &mark_of(1, 1, "another".into()));
        assert!(was_rebooted(&layout));
        write_mark(&layout, &mark_of(1, 1, boot_id()));
        assert!(!was_rebooted(&layout));
    }
}
