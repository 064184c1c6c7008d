//! One gVisor sandbox: boot, restore, pause, capture, freeze, kill.

use crate::{
    cgroup::{CgroupSupport, Cgroups},
    command, spec,
};
use model::ByteSize;
use runtime::{Channel, RuntimeError, Sandbox, SandboxSpec, Step, Usage};
use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
};

/// The program and where it keeps its state.
#[derive(Debug, Clone)]
pub struct Runsc {
    pub program: PathBuf,
    /// `runsc --root`.
    pub state_dir: PathBuf,
    /// `systrap` or `ptrace`.
    pub platform: String,
}

/// A sandbox made by `runsc`.
#[derive(Debug, Clone)]
pub struct GvisorSandbox {
    runsc: Runsc,
    spec: SandboxSpec,
    cgroups: Cgroups,
}

fn io_step(step: &'static str) -> impl Fn(io::Error) -> RuntimeError {
    move |source| RuntimeError::Io { step, source }
}

impl GvisorSandbox {
    /// The sandbox that `spec` describes; nothing is started yet.
    pub fn new(runsc: Runsc, spec: SandboxSpec, support: CgroupSupport) -> Self {
        let cgroups = Cgroups::new(support, &spec.name);
        Self { runsc, spec, cgroups }
    }

    fn log(&self) -> Result<fs::File, RuntimeError> {
        fs::OpenOptions::new()
            .create(true)
            .append(true)
            .read(true)
            .open(&self.spec.log)
            .map_err(io_step("open the sandbox's log"))
    }

    async fn call(&self, step: &'static str, args: &[&str]) -> Result<(), RuntimeError> {
        let mut call = command::runsc(&self.runsc);
        call.args(args).arg(&self.spec.name);
        command::finish(call, step, self.log()?).await
    }

    /// Starts `runsc run` or `runsc restore` with the channel on its standard descriptors.
    async fn start(&self, step: &'static str, args: &[&std::ffi::OsStr]) -> Result<Channel, RuntimeError> {
        let io = io_step(step);
        fs::create_dir_all(&self.spec.bundle).map_err(&io)?;
        fs::create_dir_all(&self.runsc.state_dir).map_err(&io)?;
        let config = serde_json::to_vec_pretty(&spec::config(&self.spec)).expect("a JSON value always has a text");
        fs::write(self.spec.bundle.join("config.json"), config).map_err(&io)?;
        self.cgroups.create(&self.spec.resources).map_err(&io)?;
        let entrances = self.cgroups.entrances().map_err(&io)?;

        let (guest_in, to_guest) = command::pipe().map_err(&io)?;
        let (from_guest, guest_out) = command::pipe().map_err(&io)?;
        let mut call = command::runsc(&self.runsc);
        call.args(args).arg("-detach").arg("-bundle").arg(&self.spec.bundle).arg(&self.spec.name);
        call.stdin(Stdio::from(guest_in)).stdout(Stdio::from(guest_out));
        // SAFETY: the closure runs between fork and exec and only writes to open descriptors.
        unsafe {
            call.pre_exec(move || {
                for file in &entrances {
                    rustix::io::write(file, b"0")?;
                }
                Ok(())
            });
        }
        match command::finish(call, step, self.log()?).await {
            Ok(()) => Ok(Channel { to_guest, from_guest }),
            Err(error) => {
                // What was half made must not stay.
                let _ = self.kill().await;
                Err(error)
            }
        }
    }

    async fn end(&self) -> Result<(), RuntimeError> {
        // A frozen task dies only once it is thawed, so: signal, thaw, and again for what forked.
        for _ in 0..100 {
            let pids = self.pids();
            if pids.is_empty() {
                break;
            }
            for pid in pids {
                if let Some(pid) = rustix::process::Pid::from_raw(pid.cast_signed()) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
            let _ = self.cgroups.set_frozen(false).await;
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        self.forget().await;
        self.cgroups.remove().await;
        Ok(())
    }

    /// Removes what `runsc` keeps of a sandbox whose processes are gone. By its own hand: `runsc
    /// delete` costs 30 ms and does no more.
    async fn forget(&self) {
        let Ok(entries) = fs::read_dir(&self.runsc.state_dir) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            // `NAME_sandbox:NAME.state`, `.lock`, and the control socket `runsc-NAME.sock`.
            if name.starts_with(&format!("{}_sandbox:", self.spec.name)) || name == format!("runsc-{}.sock", self.spec.name) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// What `runsc` keeps of it, where it keeps anything.
    fn kept_state(&self) -> Option<serde_json::Value> {
        let file = self.runsc.state_dir.join(format!("{0}_sandbox:{0}.state", self.spec.name));
        serde_json::from_slice(&fs::read(file).ok()?).ok()
    }

    /// True while its first process lives, whoever started it. No other process is taken for it, whatever its id.
    pub fn is_alive(&self) -> bool {
        let pid = self.kept_state().and_then(|state| u32::try_from(state["sandbox"]["pid"].as_u64()?).ok());
        pid.is_some_and(|pid| is_sandbox(pid, &self.spec.name))
    }

    /// True where `runsc` says that it is paused.
    pub fn is_paused(&self) -> bool {
        self.kept_state().is_some_and(|state| state["status"] == "paused")
    }

    /// Process ids as `runsc` itself knows them, where no cgroup tells.
    fn state_pids(&self) -> Vec<u32> {
        let Some(state) = self.kept_state() else { return Vec::new() };
        let pid = |v: &serde_json::Value| v.as_u64().and_then(|p| u32::try_from(p).ok()).filter(|p| *p > 1);
        let found = [&state["sandbox"]["pid"], &state["goferPid"]].into_iter().filter_map(pid);
        found.filter(|pid| is_runsc(*pid)).collect()
    }
}

/// True where the process is a part of a gVisor sandbox: a recycled id must never be killed.
fn is_runsc(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
        let name = line.split(|b| *b == 0).next().unwrap_or_default();
        name.starts_with(b"runsc")
    })
}

/// True where the process is the sandbox `name`: its command line ends with that name, which no two sandboxes share. That
/// of a process which has ended is empty.
fn is_sandbox(pid: u32, name: &str) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
        let mut words = line.split(|b| *b == 0).filter(|word| !word.is_empty());
        words.next().is_some_and(|first| first.starts_with(b"runsc")) && words.next_back() == Some(name.as_bytes())
    })
}

impl Sandbox for GvisorSandbox {
    fn boot(&self) -> Step<'_, Channel> {
        Box::pin(async move { self.start("start the sandbox", &["run".as_ref()]).await })
    }

    fn restore<'a>(&'a self, image: &'a Path) -> Step<'a, Channel> {
        Box::pin(async move {
            self.start("restore the sandbox", &["restore".as_ref(), "-image-path".as_ref(), image.as_os_str()]).await
        })
    }

    fn pause(&self) -> Step<'_, ()> {
        Box::pin(self.call("pause the sandbox", &["pause"]))
    }

    fn resume(&self) -> Step<'_, ()> {
        Box::pin(self.call("resume the sandbox", &["resume"]))
    }

    fn capture<'a>(&'a self, image: &'a Path) -> Step<'a, ByteSize> {
        Box::pin(async move {
            let step = "save the memory";
            let io = io_step(step);
            fs::create_dir_all(image).map_err(&io)?;
            let mut call = command::runsc(&self.runsc);
            // Without -leave-running a checkpoint that fails kills the sandbox.
            call.args(["checkpoint", "-leave-running", "-compression=none", "-image-path"]).arg(image).arg(&self.spec.name);
            command::finish(call, step, self.log()?).await?;
            size_of(image).map_err(&io)
        })
    }

    fn freeze(&self) -> Step<'_, ()> {
        Box::pin(async move {
            let frozen = self.cgroups.set_frozen(true).await.map_err(io_step("freeze the sandbox"))?;
            if !frozen {
                signal_all(&self.pids(), rustix::process::Signal::STOP);
            }
            Ok(())
        })
    }

    fn thaw(&self) -> Step<'_, ()> {
        Box::pin(async move {
            let thawed = self.cgroups.set_frozen(false).await.map_err(io_step("thaw the sandbox"))?;
            if !thawed {
                signal_all(&self.pids(), rustix::process::Signal::CONT);
            }
            Ok(())
        })
    }

    fn kill(&self) -> Step<'_, ()> {
        Box::pin(self.end())
    }

    fn pids(&self) -> Vec<u32> {
        let pids = self.cgroups.pids();
        if pids.is_empty() { self.state_pids() } else { pids }
    }

    fn usage(&self) -> Option<Usage> {
        self.cgroups.usage()
    }

    fn memory_alarm(&self, threshold: ByteSize) -> Option<OwnedFd> {
        self.cgroups.memory_alarm(threshold)
    }
}

fn signal_all(pids: &[u32], signal: rustix::process::Signal) {
    for pid in pids.iter().filter_map(|pid| rustix::process::Pid::from_raw(pid.cast_signed())) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Syncs every file of a directory and the directory; returns their bytes.
fn size_of(dir: &Path) -> io::Result<ByteSize> {
    let mut total = 0;
    for entry in fs::read_dir(dir)? {
        total += entry?.metadata()?.len();
    }
    Ok(ByteSize(total))
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::Resources;

    fn sandbox(dir: &Path, name: &str) -> GvisorSandbox {
        let runsc = Runsc { program: "runsc".into(), state_dir: dir.to_owned(), platform: "systrap".into() };
        let spec = SandboxSpec {
            name: name.into(),
            root: dir.join("root"),
            bundle: dir.join("bundle"),
            log: dir.join("log"),
            argv: Vec::new(),
            hostname: String::new(),
            resources: Resources::default(),
        };
        GvisorSandbox::new(runsc, spec, CgroupSupport::Missing("a test".into()))
    }

    #[test]
    fn a_process_that_got_a_dead_sandboxs_number_is_not_taken_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let ours = sandbox(dir.path(), "dm-a-1");
        assert!(!ours.is_alive(), "nothing is kept of it");
        let note = |pid: u32| {
            let state = serde_json::json!({ "status": "paused", "sandbox": { "pid": pid } });
            fs::write(dir.path().join("dm-a-1_sandbox:dm-a-1.state"), state.to_string()).unwrap();
        };
        note(std::process::id());
        assert!(!ours.is_alive(), "some other program");
        assert!(ours.is_paused());
        // What `runsc` calls its processes, by their first word.
        let stand_in = |name: &str| {
            use std::os::unix::process::CommandExt;
            let mut command = std::process::Command::new("sh");
            // The shell stays, with the sandbox's name as its last word.
            command.arg0("runsc-sandbox").args(["-c", "read line", "boot", name]).stdin(Stdio::piped());
            command.spawn().unwrap()
        };
        let (mut other, mut same) = (stand_in("dm-a-2"), stand_in("dm-a-1"));
        note(other.id());
        let of_another = ours.is_alive();
        note(same.id());
        let of_this = ours.is_alive();
        for child in [&mut other, &mut same] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(!of_another, "another sandbox");
        assert!(of_this);
        assert!(!ours.is_alive(), "it has ended");
    }
}
