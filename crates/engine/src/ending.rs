//! Telling living supervisors from dead ones, and clearing away what a dead one has left.

use crate::{Error, inner::blocking, session::Live, supervisor_client::CallError};
use model::{EndReason, Generation, Resources};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use runtime::{Sandbox, SandboxSpec};
use runtime_gvisor::{CgroupSupport, GvisorSandbox, Runsc};
use snapshot::disk::{DiskLayout, lift_project_quota};
use std::{fs, io, path::Path, time::Duration};
use wire::{
    control::{Answer, Phase, Request},
    layout::{SessionLayout, SupervisorMark, TakesOver},
};

/// How long a supervisor may take to end beyond the grace that its programs are given.
const END_LIMIT: Duration = Duration::from_secs(20);
/// How long something that was killed may take to be gone.
const KILL_LIMIT: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(5);

/// The mark of the session's latest supervisor. It is rewritten in place: one that is met half-written is read again.
pub(crate) fn mark(layout: &SessionLayout) -> Option<SupervisorMark> {
    for _ in 0..20 {
        match serde_json::from_slice(&fs::read(layout.mark()).ok()?) {
            Ok(mark) => return Some(mark),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    None
}

/// True while the session's supervisor lives. Its lock on the mark isn't tried for that: the trial itself would be in the
/// way of a supervisor that is just starting.
pub(crate) fn is_held(layout: &SessionLayout) -> bool {
    mark(layout).is_some_and(|mark| mark.boot_id == boot_id() && started_ticks(mark.pid) == Some(mark.started_ticks))
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
        let taken_over = mark.takes_over.map(|taken_over| taken_over.container);
        for name in [mark.container, format!("dm-{id}-confirm")].into_iter().chain(taken_over) {
            kill_container(layout, runsc_state, name).await?;
        }
    }
    let layout = layout.clone();
    blocking(move || unmount_all(&layout)).await?
}

/// A sandbox that lives, and whose supervisor doesn't: which one it is, and of which generation at least.
pub(crate) fn orphan(layout: &SessionLayout, runsc_state: &Path) -> Option<TakesOver> {
    if is_held(layout) {
        return None;
    }
    let mark = mark(layout).filter(|mark| mark.boot_id == boot_id())?;
    let alive = |from: &TakesOver| sandbox_of(layout, runsc_state, from.container.clone()).is_alive();
    // The one that was being taken over lives as long as it is the session's.
    let own = TakesOver { container: mark.container, generation: mark.generation };
    mark.takes_over.into_iter().chain([own]).find(alive)
}

/// Makes room for another supervisor that takes `from` over: everything else of the session is ended. The disk stays
/// mounted, since `from` runs on it.
pub(crate) async fn clear_beside(layout: &SessionLayout, runsc_state: &Path, from: &TakesOver) -> Result<(), Error> {
    let Some(mark) = mark(layout).filter(|mark| mark.boot_id == boot_id()) else { return Ok(()) };
    kill_supervisor(layout, &mark).await?;
    let id = layout.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let taken_over = mark.takes_over.map(|taken_over| taken_over.container);
    for name in [mark.container, format!("dm-{id}-confirm")].into_iter().chain(taken_over) {
        if name != from.container {
            kill_container(layout, runsc_state, name).await?;
        }
    }
    Ok(())
}

/// Waits for the end of a supervisor whose start failed, and ends it where that takes long. What it was to take over is
/// left alone.
pub(crate) async fn end_failed(layout: &SessionLayout) -> Result<(), Error> {
    let mut waited = Duration::ZERO;
    while is_held(layout) && waited < END_LIMIT {
        tokio::time::sleep(STEP).await;
        waited += STEP;
    }
    match mark(layout).filter(|mark| mark.boot_id == boot_id()) {
        Some(mark) => kill_supervisor(layout, &mark).await,
        None => Ok(()),
    }
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
    sandbox_of(layout, runsc_state, name).kill().await.map_err(Error::internal)
}

/// A session's sandbox, for looking at it and for ending it.
fn sandbox_of(layout: &SessionLayout, runsc_state: &Path, name: String) -> GvisorSandbox {
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
    GvisorSandbox::new(runsc, spec, CgroupSupport::detect())
}

fn unmount_all(layout: &SessionLayout) -> Result<(), Error> {
    for at in snapshot::disk::mounts_below(layout.dir()).map_err(Error::internal)? {
        snapshot::disk::unmount(&at).map_err(Error::internal)?;
    }
    Ok(())
}

/// When a living process started, in clock ticks since the computer's start (proc_pid_stat(5), fields 3 and 22). One that
/// has ended and only waits to be collected is none.
fn started_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name can hold blanks and parentheses: count from its end.
    let mut fields = stat.rsplit_once(") ")?.1.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// How the session's supervisor stands; `None` where there is none, or one whose sandbox has ended.
pub(crate) async fn phase(live: &Live) -> Result<Option<wire::control::Status>, CallError> {
    standing(live.supervisor.call_soon(&Request::Status).await)
}

/// The same, once what the supervisor was asked for earlier has come to its end.
pub(crate) async fn settled(live: &Live, limit: Duration) -> Result<Option<wire::control::Status>, CallError> {
    // One that doesn't answer at all isn't waited for that long.
    if phase(live).await?.is_none() {
        return Ok(None);
    }
    match standing(live.supervisor.call_within(&Request::Settled, limit).await) {
        // One of an earlier version doesn't know the question.
        Err(CallError::Broken(_) | CallError::Refused(_)) => phase(live).await,
        settled => settled,
    }
}

fn standing(answer: Result<Answer, CallError>) -> Result<Option<wire::control::Status>, CallError> {
    match answer {
        Ok(Answer::Status(status)) if status.phase != Phase::Ended => Ok(Some(status)),
        Ok(_) | Err(CallError::Unreachable(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes a session's directory, and the limit that the file system keeps its disk within. Blocks.
pub(crate) fn remove_session(layout: &SessionLayout) -> io::Result<()> {
    let name = layout.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
    if let Err(error) = lift_project_quota(&DiskLayout::new(layout.disk()), &name) {
        tracing::warn!(session = name, %error, "the file system goes on counting the disk of a session that is gone");
    }
    remove_tree(layout.dir())
}

/// Removes a directory tree; fine where it is gone already.
pub(crate) fn remove_tree(dir: &Path) -> io::Result<()> {
    faults::file("tree.remove")?;
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
        SupervisorMark {
            pid,
            started_ticks,
            boot_id,
            generation,
            container: "dm-test-1".into(),
            sandbox_pids: vec![],
            takes_over: None,
        }
    }

    #[test]
    fn only_the_very_process_means_a_living_supervisor() {
        let dir = tempfile::tempdir().unwrap();
        let layout = SessionLayout::new(dir.path());
        assert!(!is_held(&layout));
        let (pid, ticks) = (std::process::id(), started_ticks(std::process::id()).unwrap());
        for (mark, expected) in [
            (mark_of(pid, ticks, boot_id()), true),
            (mark_of(pid, ticks + 1, boot_id()), false),
            (mark_of(pid, ticks, "another".into()), false),
            (mark_of(u32::MAX, ticks, boot_id()), false),
        ] {
            write_mark(&layout, &mark);
            assert_eq!(is_held(&layout), expected, "{mark:?}");
        }
        fs::write(layout.mark(), "{\"pid\":").unwrap();
        assert!(!is_held(&layout), "half a mark");
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
        // Alive, and listens to nobody.
        let mut hung = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        write_mark(&layout, &mark_of(hung.id(), started_ticks(hung.id()).unwrap(), boot_id()));
        let ended = tokio::task::spawn_blocking(move || hung.wait().unwrap());
        let runsc_state = dir.path().join("runsc");
        let end = end_sandbox(&layout, &runsc_state, EndReason::Asked, Duration::ZERO);
        let (result, status) = tokio::join!(end, ended);
        result.unwrap();
        assert!(!status.unwrap().success());
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
