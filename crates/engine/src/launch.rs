//! Starting a supervisor and waiting until its sandbox answers.

use crate::{Error, ending, inner::Inner, network, session::Live, supervisor_client::CallError};
use model::{EndReason, SessionId};
use rand::Rng;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::Path,
    process::Stdio,
    sync::Arc,
    time::Duration,
};
use store::SessionRow;
use tokio::{
    io::AsyncReadExt,
    net::unix::pipe,
    process::Command,
    sync::{Semaphore, oneshot},
};
use wire::{
    control::{Request, Start, SuperviseSpec},
    guest::Identity,
    layout::SessionLayout,
};

/// How long a supervisor may take until it listens.
const LISTEN_LIMIT: Duration = Duration::from_secs(30);
/// How long a sandbox may take until its guest answers: a restore of many GiB on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(180);
/// The same where a sandbox is captured first: tens of GiB on a slow disk.
pub(crate) const TAKE_OVER_LIMIT: Duration = Duration::from_secs(15 * 60);
/// How much of a failed supervisor's log is told.
const LOG_TAIL: u64 = 2048;

/// Starts a supervisor for `spec`; answers once the guest inside has answered. What was begun is seen through even where
/// the caller goes away: then it is ended again. `launching` is held meanwhile.
pub(crate) async fn launch(inner: &Arc<Inner>, launching: &Arc<Semaphore>, spec: SuperviseSpec) -> Result<Arc<Live>, Error> {
    let permit = launching.clone().acquire_owned().await.map_err(|_| Error::ShuttingDown)?;
    let (tell, told) = oneshot::channel();
    let inner_ = inner.clone();
    inner.tasks.spawn(async move {
        let _permit = permit;
        let inner = inner_;
        let layout = SessionLayout::new(&spec.dir);
        let result = start(&inner, &layout, &spec).await;
        if let Err(Ok(_)) = tell.send(result)
            && !inner.closing.is_cancelled()
        {
            let state = inner.programs.runsc_state();
            if let Err(error) = ending::end_sandbox(&layout, state, EndReason::Asked, Duration::ZERO).await {
                tracing::error!(dir = %layout.dir().display(), %error, "a sandbox that nobody wants any more can't be ended");
            }
        }
    });
    told.await.unwrap_or(Err(Error::ShuttingDown))
}

async fn start(inner: &Arc<Inner>, layout: &SessionLayout, spec: &SuperviseSpec) -> Result<Arc<Live>, Error> {
    let runsc_state = inner.programs.runsc_state();
    let takes_over = match &spec.start {
        Start::Recapture { from, .. } => Some(from),
        Start::Boot | Start::Restore { .. } => None,
    };
    match takes_over {
        Some(from) => ending::clear_beside(layout, runsc_state, from).await?,
        None => ending::clear_the_way(layout, runsc_state).await?,
    }
    let io = |e: io::Error| io_error(&e, "prepare the sandbox");
    ensure_private_dir(&layout.run()).map_err(io)?;
    let text = serde_json::to_vec(spec).map_err(Error::internal)?;
    write_private(&layout.spec(), &text).map_err(io)?;
    faults::point("launch.prepared");
    let ready = spawn(inner, layout).map_err(|e| io_error(&e, "start the supervisor"))?;
    let live = Live::new(layout.clone(), spec.generation);
    let answered = async {
        listening(ready).await?;
        faults::point("launch.listening");
        if let (Some(session), Some(network)) = (spec.session, &spec.network) {
            network::begin(inner, session, &live, &network.policy).await?;
        }
        let limit = if takes_over.is_some() { TAKE_OVER_LIMIT } else { READY_LIMIT };
        live.supervisor.call_within(&Request::AwaitReady, limit).await.map_err(|error| match error {
            CallError::Refused(error) => error.message,
            other => other.to_string(),
        })
    };
    match answered.await {
        Ok(_) => Ok(live),
        Err(detail) => {
            let log = log_tail(&layout.supervisor_log());
            match takes_over {
                // Whether there is something left to take over is looked at anew.
                Some(_) => ending::end_failed(layout).await?,
                None => ending::end_sandbox(layout, runsc_state, EndReason::StartFailed, Duration::ZERO).await?,
            }
            tracing::warn!(dir = %layout.dir().display(), detail, log, "a sandbox did not start");
            Err(Error::Internal { detail: format!("the sandbox did not start: {detail}") })
        }
    }
}

/// Waits for the supervisor's word that it listens.
async fn listening(ready: OwnedFd) -> Result<(), String> {
    let mut ready = pipe::Receiver::from_owned_fd(ready).map_err(|e| e.to_string())?;
    let mut word = [0u8; 8];
    match tokio::time::timeout(LISTEN_LIMIT, ready.read(&mut word)).await {
        Ok(Ok(count)) if count > 0 => Ok(()),
        Ok(Ok(_)) => Err("its supervisor ended at once".to_owned()),
        Ok(Err(error)) => Err(format!("its supervisor gave no sign: {error}")),
        Err(_) => Err(format!("its supervisor did not listen within {} s", LISTEN_LIMIT.as_secs())),
    }
}

/// Starts the process, as the leader of a process session of its own: neither a logout nor the end of the server reaches
/// it. Returns the pipe on which it says that it listens.
fn spawn(inner: &Arc<Inner>, layout: &SessionLayout) -> io::Result<OwnedFd> {
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(layout.supervisor_log())?;
    let (ready, says_ready) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let inherited = says_ready.as_raw_fd();
    let mut command = Command::new(&inner.config.supervisor);
    command.arg("supervise").arg("--spec").arg(layout.spec()).arg("--ready-fd").arg(inherited.to_string());
    // Nothing of the server's environment goes along: it may hold a token.
    command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("DORMOUSE_ROLE", "supervise").current_dir("/");
    for name in ["DORMOUSE_LOG", faults::VARIABLE] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // SAFETY: between fork and exec only setsid(2), close_range(2) and fcntl(2) are called, which are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            // What the server was started with, a lock for instance, must not be held by what outlives it. A kernel
            // without the call (before 5.11) leaves it open.
            let _ = libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC.cast_signed());
            let says_ready = std::os::fd::BorrowedFd::borrow_raw(inherited);
            rustix::io::fcntl_setfd(says_ready, rustix::io::FdFlags::empty())?;
            Ok(())
        });
    }
    let mut child = command.spawn()?;
    drop(says_ready);
    // Nobody waits for it; but while this server lives, its end has to be collected.
    inner.tasks.spawn(async move {
        let _ = child.wait().await;
    });
    Ok(ready)
}

fn log_tail(path: &Path) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL)))?;
        let mut bytes = Vec::new();
        file.take(LOG_TAIL).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

/// Makes a directory that only the server's user can enter.
pub(crate) fn ensure_private_dir(dir: &Path) -> io::Result<()> {
    faults::file("dir.make")?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Writes a file that only the server's user can read; a crash leaves the old one or the new one.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    faults::file("private.write")?;
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    faults::file("private.rename")?;
    fs::rename(new, path)
}

/// A refusal by the file system, as callers are told.
pub(crate) fn io_error(error: &io::Error, what: &str) -> Error {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::NoSpace { detail: format!("can't {what}: {error}") },
        _ => Error::internal(format!("can't {what}: {error}")),
    }
}

/// What makes the inside of this session differ from every other's.
pub(crate) fn identity(inner: &Inner, row: &SessionRow) -> Identity {
    Identity {
        env: row.env.clone(),
        workdir: row.workdir.clone(),
        services: row.services.clone(),
        pids: row.resources.pids,
        network: Some(network::inside(inner, row)),
        ..blank_identity(row.id)
    }
}

/// The identity of a session of which only the id is known.
pub(crate) fn blank_identity(id: SessionId) -> Identity {
    let hex = id.0.as_simple().to_string();
    let mut seed = [0u8; 64];
    rand::rng().fill_bytes(&mut seed);
    Identity {
        // The id's end: its beginning is a time, which sessions of one moment share.
        hostname: format!("dm-{}", &hex[hex.len() - 12..]),
        machine_id: hex,
        seed: seed.iter().map(|byte| format!("{byte:02x}")).collect(),
        env: Default::default(),
        workdir: None,
        services: Vec::new(),
        pids: None,
        network: Some(Default::default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_have_nothing_in_common() {
        let (a, b) = (blank_identity(SessionId::new()), blank_identity(SessionId::new()));
        assert_ne!(a.hostname, b.hostname);
        assert_ne!(a.machine_id, b.machine_id);
        assert_ne!(a.seed, b.seed);
        assert_eq!((a.machine_id.len(), a.seed.len()), (32, 128));
        assert!(a.hostname.len() <= 63);
    }
}
