//! Control groups, version 1 and 2: limits, freezing, counting, finding every process.
//!
//! `runsc` is told to leave cgroups alone and is started inside the sandbox's own, so that its
//! sentry, gofer and stubs are all in it, and the supervisor is not.

use model::{ByteSize, Resources};
use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

/// The kernel's folder of control groups.
const ROOT: &str = "/sys/fs/cgroup";
/// Our own folder in every hierarchy.
const OURS: &str = "dormouse";
/// The hierarchies of version 1 that we use.
const V1: [&str; 4] = ["memory", "cpu", "pids", "freezer"];

/// What a sandbox may take above its memory limit before the kernel ends all of it: room for the
/// guest to end the largest program first, and for the sentry itself.
fn hard_limit(limit: ByteSize) -> u64 {
    limit.0.saturating_add((limit.0 / 2).max(256 << 20))
}

/// Which kind of control groups this machine has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CgroupSupport {
    V1(Vec<&'static str>),
    V2,
    /// None, or no right to make one.
    Missing(String),
}

impl CgroupSupport {
    /// Looks at the machine, and tries whether groups can be made.
    pub fn detect() -> CgroupSupport {
        if Path::new(ROOT).join("cgroup.controllers").exists() {
            return match prepare_v2() {
                Ok(()) => CgroupSupport::V2,
                Err(error) => CgroupSupport::Missing(format!("cgroup v2 is here, but can't be used: {error}")),
            };
        }
        let usable: Vec<_> = V1.into_iter().filter(|c| fs::create_dir_all(Path::new(ROOT).join(c).join(OURS)).is_ok()).collect();
        if usable.is_empty() {
            CgroupSupport::Missing("no cgroup hierarchy can be written; limits need root".to_owned())
        } else {
            CgroupSupport::V1(usable)
        }
    }
}

fn prepare_v2() -> io::Result<()> {
    // A controller must be handed down before a child group can use it. Those that can't are left.
    for dir in [PathBuf::from(ROOT), Path::new(ROOT).join(OURS)] {
        fs::create_dir_all(&dir)?;
        for controller in ["+cpu", "+memory", "+pids"] {
            let _ = fs::write(dir.join("cgroup.subtree_control"), controller);
        }
    }
    Ok(())
}

/// The control groups of one sandbox.
#[derive(Debug, Clone)]
pub struct Cgroups {
    support: CgroupSupport,
    name: String,
}

impl Cgroups {
    /// The groups of the sandbox `name`; nothing is made yet.
    pub fn new(support: CgroupSupport, name: &str) -> Self {
        Self { support, name: name.to_owned() }
    }

    fn v1(&self, controller: &str) -> Option<PathBuf> {
        match &self.support {
            CgroupSupport::V1(usable) if usable.contains(&controller) => {
                Some(Path::new(ROOT).join(controller).join(OURS).join(&self.name))
            }
            _ => None,
        }
    }

    fn v2(&self) -> Option<PathBuf> {
        (self.support == CgroupSupport::V2).then(|| Path::new(ROOT).join(OURS).join(&self.name))
    }

    fn dirs(&self) -> Vec<PathBuf> {
        match &self.support {
            CgroupSupport::V1(usable) => usable.iter().filter_map(|c| self.v1(c)).collect(),
            CgroupSupport::V2 => self.v2().into_iter().collect(),
            CgroupSupport::Missing(_) => Vec::new(),
        }
    }

    /// Makes the groups with their limits. Limits that this machine doesn't know are left out;
    /// `doctor` says which.
    ///
    /// # Errors
    /// A group can't be made.
    pub fn create(&self, resources: &Resources) -> io::Result<()> {
        for dir in self.dirs() {
            fs::create_dir_all(&dir)?;
        }
        if let Some(limit) = resources.memory_bytes {
            if let Some(dir) = self.v1("memory") {
                let _ = fs::write(dir.join("memory.limit_in_bytes"), hard_limit(limit).to_string());
            }
            if let Some(dir) = self.v2() {
                let _ = fs::write(dir.join("memory.max"), hard_limit(limit).to_string());
                let _ = fs::write(dir.join("memory.swap.max"), "0");
            }
        }
        if let Some(cpus) = resources.cpus {
            let (period, quota) = (100_000_u64, (cpus * 100_000.0).max(1_000.0) as u64);
            if let Some(dir) = self.v1("cpu") {
                let _ = fs::write(dir.join("cpu.cfs_period_us"), period.to_string());
                let _ = fs::write(dir.join("cpu.cfs_quota_us"), quota.to_string());
            }
            if let Some(dir) = self.v2() {
                let _ = fs::write(dir.join("cpu.max"), format!("{quota} {period}"));
            }
        }
        Ok(())
    }

    /// The files that a process writes `0` into to enter the groups. Opened ahead, because between
    /// fork and exec nothing may allocate.
    ///
    /// # Errors
    /// A file can't be opened.
    pub fn entrances(&self) -> io::Result<Vec<fs::File>> {
        self.dirs().iter().map(|dir| fs::OpenOptions::new().write(true).open(dir.join("cgroup.procs"))).collect()
    }

    /// Every process of the sandbox.
    pub fn pids(&self) -> Vec<u32> {
        let Some(dir) = self.v1("freezer").or_else(|| self.dirs().into_iter().next()) else { return Vec::new() };
        let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.trim().parse().ok()).collect()
    }

    /// Freezes or thaws. `false` where there is no freezer.
    ///
    /// # Errors
    /// The kernel refuses, or tasks don't stop within 10 s.
    pub async fn set_frozen(&self, frozen: bool) -> io::Result<bool> {
        if let Some(dir) = self.v1("freezer") {
            let (word, file) = (if frozen { "FROZEN" } else { "THAWED" }, dir.join("freezer.state"));
            for wait_ms in waits() {
                // Written again each time: a task that forks while freezing can hold the kernel up.
                fs::write(&file, word)?;
                if fs::read_to_string(&file)?.trim() == word {
                    return Ok(true);
                }
                tokio::time::sleep(Duration::from_millis(wait_ms)).await;
            }
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("the sandbox did not become {word} within 10 s")));
        }
        let Some(dir) = self.v2() else { return Ok(false) };
        fs::write(dir.join("cgroup.freeze"), if frozen { "1" } else { "0" })?;
        for wait_ms in waits() {
            let events = fs::read_to_string(dir.join("cgroup.events"))?;
            if events.lines().any(|l| l == format!("frozen {}", u8::from(frozen))) {
                return Ok(true);
            }
            tokio::time::sleep(Duration::from_millis(wait_ms)).await;
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "the sandbox did not freeze or thaw within 10 s"))
    }

    /// Counts of memory, CPU and ends for lack of memory. `None` without a memory controller.
    pub fn usage(&self) -> Option<runtime::Usage> {
        if let Some(dir) = self.v1("memory") {
            let stat = fs::read_to_string(dir.join("memory.stat")).ok()?;
            let oom = fs::read_to_string(dir.join("memory.oom_control")).unwrap_or_default();
            let cpu = self.v1("cpu").and_then(|d| fs::read_to_string(d.join("cpuacct.usage")).ok());
            return Some(runtime::Usage {
                memory_bytes: field(&stat, "rss") + field(&stat, "shmem"),
                cpu_ms: cpu.and_then(|t| t.trim().parse::<u64>().ok()).unwrap_or(0) / 1_000_000,
                oom_kills: field(&oom, "oom_kill"),
            });
        }
        let dir = self.v2()?;
        let stat = fs::read_to_string(dir.join("memory.stat")).ok()?;
        let events = fs::read_to_string(dir.join("memory.events")).unwrap_or_default();
        let cpu = fs::read_to_string(dir.join("cpu.stat")).unwrap_or_default();
        Some(runtime::Usage {
            memory_bytes: field(&stat, "anon") + field(&stat, "shmem"),
            cpu_ms: field(&cpu, "usage_usec") / 1000,
            oom_kills: field(&events, "oom_kill"),
        })
    }

    /// An event descriptor that the kernel signals when use crosses `threshold`
    /// (version 1: `cgroup.event_control`; version 2 has no such thing and polls by pressure, so
    /// the caller looks at [`Self::usage`] at intervals instead).
    pub fn memory_alarm(&self, threshold: ByteSize) -> Option<OwnedFd> {
        let dir = self.v1("memory")?;
        let usage = fs::File::open(dir.join("memory.usage_in_bytes")).ok()?;
        // SAFETY: eventfd takes two integers and returns a new descriptor or −1.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            return None;
        }
        // SAFETY: the descriptor was just made and nobody else owns it.
        let event = unsafe { OwnedFd::from_raw_fd(raw) };
        let line = format!("{} {} {}", event.as_raw_fd(), usage.as_fd().as_raw_fd(), threshold.0);
        fs::write(dir.join("cgroup.event_control"), line).ok()?;
        Some(event)
    }

    /// Removes the groups once they are empty.
    pub async fn remove(&self) {
        for dir in self.dirs() {
            for wait_ms in waits() {
                match fs::remove_dir(&dir) {
                    // Busy while the last process is still leaving.
                    Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                        tokio::time::sleep(Duration::from_millis(wait_ms)).await;
                    }
                    _ => break,
                }
            }
        }
    }
}

/// Waits that double from 1 ms to 200 ms, about 10 s in all.
fn waits() -> impl Iterator<Item = u64> {
    (0..60).map(|n| (1u64 << n.min(8)).min(200))
}

fn field(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_whole_words() {
        let stat = "rss_huge 5\nrss 7\nshmem 9\n";
        assert_eq!((field(stat, "rss"), field(stat, "shmem"), field(stat, "anon")), (7, 9, 0));
    }

    #[test]
    fn the_kernel_steps_in_well_above_the_limit() {
        assert_eq!(hard_limit(ByteSize(512 << 20)), 768 << 20);
        assert_eq!(hard_limit(ByteSize(4 << 30)), 6 << 30);
    }
}
