//! The raw tool: `runsc` by hand, with the flags that Dormouse gives it, on the same template, without a guest.

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::json;
use std::{
    ffi::CString,
    fs::{self, File},
    io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A sandbox that runs one shell script, whose standard input and output are pipes to the bench.
pub struct Raw {
    dir: tempfile::TempDir,
    root: PathBuf,
    script: String,
    to: Option<PipeWriter>,
    from: Option<BufReader<PipeReader>>,
    /// Every start has a name and an image of its own.
    generation: u32,
    alive: bool,
}

/// The version of `runsc`, in a line.
pub fn version() -> String {
    let output = Command::new("runsc").arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or("no runsc").to_owned()
}

/// The tree of the default template.
fn template() -> Result<PathBuf> {
    let templates = dormouse_tests::server::templates();
    let name = templates.join("names/debian");
    let hash = fs::read_to_string(&name).with_context(|| format!("read {}", name.display()))?;
    Ok(templates.join("trees").join(hash.trim()))
}

impl Raw {
    /// A sandbox that is not started. Directories are made here, so that a start is timed without them.
    pub fn new(script: &str) -> Result<Raw> {
        let dir = tempfile::Builder::new().prefix("dormouse-bench-").tempdir()?;
        for name in ["upper", "work", "root", "bundle", "state", "images"] {
            fs::create_dir(dir.path().join(name))?;
        }
        let root = dir.path().join("root");
        Ok(Raw { dir, root, script: script.to_owned(), to: None, from: None, generation: 0, alive: false })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn name(&self) -> String {
        let dir = self.dir.path().file_name().unwrap_or_default().to_string_lossy().replace('.', "");
        format!("{dir}-{}", self.generation)
    }

    fn image(&self) -> PathBuf {
        self.path("images").join(self.generation.to_string())
    }

    /// `runsc` with the settings of crates/runtime-gvisor/src/command.rs.
    fn runsc(&self) -> Result<Command> {
        let log = File::options().create(true).append(true).open(self.path("log"))?;
        let mut command = Command::new("runsc");
        command.arg("--root").arg(self.path("state")).arg("--platform=systrap");
        command.args(["--network=none", "--overlay2=none", "--host-uds=none", "--ignore-cgroups", "--log-format=json"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Ok(command)
    }

    fn finish(&self, mut command: Command) -> Result<()> {
        let status = command.status().context("start runsc")?;
        let log = || fs::read_to_string(self.path("log")).unwrap_or_default();
        ensure!(status.success(), "{command:?}: {status}: {}", log());
        Ok(())
    }

    fn mount(&self) -> Result<()> {
        let mut options = b"redirect_dir=on,metacopy=off,index=off".to_vec();
        for (name, path) in [("lowerdir", template()?), ("upperdir", self.path("upper")), ("workdir", self.path("work"))] {
            options.extend_from_slice(format!(",{name}=").as_bytes());
            options.extend(path.into_os_string().into_vec());
        }
        let options = CString::new(options)?;
        mount("dormouse-bench", &self.root, "overlay", MountFlags::NOSUID | MountFlags::NODEV, options.as_c_str())
            .context("mount the raw sandbox's disk")
    }

    fn unmount(&self) {
        let _ = unmount(&self.root, UnmountFlags::DETACH);
    }

    fn start(&mut self, restore: Option<&Path>) -> Result<()> {
        self.mount()?;
        self.generation += 1;
        fs::write(self.path("bundle/config.json"), config(&self.script, &self.root).to_string())?;
        let (stdin, to) = std::io::pipe()?;
        let (from, stdout) = std::io::pipe()?;
        for pipe in [rustix::pipe::fcntl_setpipe_size(&to, 1 << 20), rustix::pipe::fcntl_setpipe_size(&stdout, 1 << 20)] {
            pipe.context("widen a pipe")?;
        }
        let mut command = self.runsc()?;
        match restore {
            Some(image) => command.arg("restore").arg("-image-path").arg(image),
            None => command.arg("run"),
        };
        command.arg("-detach").arg("-bundle").arg(self.path("bundle")).arg(self.name()).stdin(stdin).stdout(stdout);
        self.alive = true;
        (self.to, self.from) = (Some(to), Some(BufReader::with_capacity(1 << 20, from)));
        self.finish(command)
    }

    /// Overlay mount and `runsc run`.
    pub fn run(&mut self) -> Result<()> {
        self.start(None)
    }

    /// Overlay mount and `runsc restore` of the latest image.
    pub fn restore(&mut self) -> Result<()> {
        let image = self.image();
        self.start(Some(&image))
    }

    /// `runsc checkpoint` with what is fastest, and its files synced.
    pub fn checkpoint(&mut self) -> Result<()> {
        self.checkpoint_unsynced()?;
        let image = self.image();
        for entry in fs::read_dir(&image)? {
            File::open(entry?.path())?.sync_all()?;
        }
        Ok(File::open(&image)?.sync_all()?)
    }

    /// `runsc checkpoint` with what is fastest.
    pub fn checkpoint_unsynced(&mut self) -> Result<()> {
        let image = self.image();
        // One of the same start is taken anew.
        let _ = fs::remove_dir_all(&image);
        fs::create_dir_all(&image)?;
        let mut command = self.runsc()?;
        command.args(["checkpoint", "-leave-running", "-compression=none", "-image-path"]).arg(&image).arg(self.name());
        self.finish(command)
    }

    pub fn pause(&self) -> Result<()> {
        self.call(&["pause"], &[])
    }

    pub fn resume(&self) -> Result<()> {
        self.call(&["resume"], &[])
    }

    /// `runsc exec`.
    pub fn exec(&self, argv: &[&str]) -> Result<()> {
        self.call(&["exec"], argv)
    }

    fn call(&self, what: &[&str], argv: &[&str]) -> Result<()> {
        let mut command = self.runsc()?;
        command.args(what).arg(self.name()).args(argv);
        self.finish(command)
    }

    /// Ends the sandbox; its disk and images stay.
    pub fn kill(&mut self) -> Result<()> {
        self.call(&["delete", "-force"], &[])?;
        self.alive = false;
        self.unmount();
        Ok(())
    }

    /// Removes all images but the latest.
    pub fn forget_images(&self) -> Result<()> {
        for entry in fs::read_dir(self.path("images"))? {
            let path = entry?.path();
            if path != self.image() {
                fs::remove_dir_all(path)?;
            }
        }
        Ok(())
    }

    pub fn send(&mut self, line: &str) -> Result<()> {
        let to = self.to.as_mut().context("the sandbox is not started")?;
        Ok(to.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Sends so many zeros.
    pub fn feed(&mut self, bytes: usize) -> Result<()> {
        let to = self.to.as_mut().context("the sandbox is not started")?;
        let piece = vec![0; 256 * 1024];
        let mut left = bytes;
        while left > 0 {
            let count = left.min(piece.len());
            to.write_all(&piece[..count])?;
            left -= count;
        }
        Ok(())
    }

    /// The next line that it writes.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.from.as_mut().context("the sandbox is not started")?.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the raw sandbox has ended: {}", fs::read_to_string(self.path("log")).unwrap_or_default());
        Ok(line.trim_end().to_owned())
    }

    /// Sends a line to a script that echoes, and waits for it.
    pub fn echo(&mut self, line: &str) -> Result<()> {
        self.send(line)?;
        let back = self.line()?;
        ensure!(back == line, "'{back}' came back for '{line}'");
        Ok(())
    }

    /// Reads `bytes` bytes of its output.
    pub fn read(&mut self, bytes: usize) -> Result<()> {
        let from = self.from.as_mut().context("the sandbox is not started")?;
        let read = std::io::copy(&mut from.take(bytes as u64), &mut std::io::sink())?;
        ensure!(read == bytes as u64, "{read} bytes instead of {bytes}");
        Ok(())
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if self.alive {
            let _ = self.kill();
        }
        self.unmount();
    }
}

/// The same description as crates/runtime-gvisor/src/spec.rs makes, for a shell instead of the guest.
fn config(script: &str, root: &Path) -> serde_json::Value {
    let capabilities: Vec<String> =
        "AUDIT_WRITE CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL LEASE MKNOD NET_BIND_SERVICE \
         SETFCAP SETGID SETPCAP SETUID SYS_ADMIN SYS_CHROOT SYS_PTRACE"
            .split_whitespace()
            .map(|name| format!("CAP_{name}"))
            .collect();
    let tmpfs = |at: &str, mode: &str| {
        json!({"destination": at, "type": "tmpfs", "source": "tmpfs",
               "options": ["nosuid", "nodev", format!("mode={mode}"), "size=1073741824"]})
    };
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sh", "-c", script],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 65_536, "hard": 1_048_576}],
            "noNewPrivileges": true,
        },
        "root": {"path": root, "readonly": false},
        "hostname": "raw",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid", "noexec", "nodev"]},
            tmpfs("/tmp", "1777"),
            tmpfs("/run", "755"),
            tmpfs("/dev/shm", "1777"),
        ],
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}],
        },
    })
}
