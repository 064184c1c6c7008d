//! Which processes belong to a work, also when they have left its session and their parents are gone.
//!
//! In a sandbox each work has a cgroup of the sandbox's own kernel: no process gets out of it, and it carries the
//! limit on processes, so that a fork bomb in one work leaves the others and the guest alone. Where there are no
//! such cgroups (on a host) processes are known by descent and by a variable in their environment.

use crate::program::MARKER;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, OpenOptions},
    os::fd::{AsRawFd, RawFd},
    path::{Path, PathBuf},
};

const CGROUPS: &str = "/sys/fs/cgroup/pids";

/// One work's cgroup, used again for another work when it is empty.
#[derive(Debug)]
pub struct Group {
    dir: PathBuf,
    procs: File,
    limit: Option<u64>,
}

/// Makes and keeps groups.
#[derive(Debug)]
pub struct Groups {
    base: Option<PathBuf>,
    free: Vec<Group>,
    next: u32,
    limit: Option<u64>,
}

impl Groups {
    /// Uses cgroups where the guest is init and they are there.
    pub fn new(is_init: bool) -> Self {
        let base = PathBuf::from(CGROUPS);
        let usable = is_init && base.join("cgroup.procs").exists();
        Self { base: usable.then_some(base), free: Vec::new(), next: 1, limit: None }
    }

    /// True where works are told apart by cgroups.
    pub fn are_there(&self) -> bool {
        self.base.is_some()
    }

    /// Most processes in each work that starts from now on.
    pub fn set_limit(&mut self, limit: Option<u64>) {
        self.limit = limit;
    }

    /// A group for a new work; `None` where there are no cgroups.
    pub fn take(&mut self) -> Option<Group> {
        let base = self.base.as_ref()?;
        let mut group = match self.free.pop() {
            Some(group) => group,
            None => {
                let dir = base.join(format!("dm-{}", self.next));
                self.next += 1;
                if let Err(error) = fs::create_dir(&dir)
                    && error.kind() != std::io::ErrorKind::AlreadyExists
                {
                    log!("no cgroup {}: {error}", dir.display());
                    return None;
                }
                let procs = OpenOptions::new().write(true).open(dir.join("cgroup.procs"));
                Group { procs: procs.inspect_err(|e| log!("no cgroup {}: {e}", dir.display())).ok()?, dir, limit: None }
            }
        };
        if group.limit != self.limit {
            group.set_limit(self.limit);
        }
        Some(group)
    }

    /// Takes a group back; it must be empty.
    pub fn give_back(&mut self, group: Group) {
        if self.free.len() < 8 {
            self.free.push(group);
        } else {
            let _ = fs::remove_dir(&group.dir);
        }
    }
}

impl Group {
    /// The open `cgroup.procs`, to write a process id to.
    pub fn entrance(&self) -> RawFd {
        self.procs.as_raw_fd()
    }

    /// Processes in the group.
    pub fn members(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        let members: BTreeSet<u32> = text.lines().filter_map(|l| l.trim().parse().ok()).collect();
        members.into_iter().collect()
    }

    /// The open count of processes, and how many there may be.
    pub fn count_and_limit(&self) -> Option<(File, u64)> {
        let limit = self.limit?;
        File::open(self.dir.join("pids.current")).ok().map(|count| (count, limit))
    }

    fn set_limit(&mut self, limit: Option<u64>) {
        /// As many as a kernel can have; the sandbox's refuses `max`.
        const ANY: u64 = 4_194_304;
        let text = limit.unwrap_or(ANY).to_string();
        match fs::write(self.dir.join("pids.max"), text) {
            Ok(()) => self.limit = limit,
            Err(error) => log!("no limit on processes in {}: {error}", self.dir.display()),
        }
    }

    /// While a tree is being killed nothing in it may start more.
    pub fn close_door(&mut self) {
        self.set_limit(Some(1));
    }
}

/// The processes of the work whose first process is `root` (while it lives), found by descent and by `marker`.
pub fn by_descent(root: Option<u32>, marker: &str) -> Vec<u32> {
    let wanted = format!("{MARKER}={marker}");
    descendants(|pid| Some(pid) == root || has_variable(pid, &wanted))
}

/// The living descendants of a process.
pub fn below(ancestor: u32) -> Vec<u32> {
    descendants(|pid| parent_of(pid) == Some(ancestor))
}

fn descendants(is_first: impl Fn(u32) -> bool) -> Vec<u32> {
    let own = std::process::id();
    let parents: BTreeMap<u32, u32> = all_pids().into_iter().filter_map(|pid| Some((pid, parent_of(pid)?))).collect();
    let mut tree: BTreeSet<u32> = parents.keys().copied().filter(|pid| *pid != own && is_first(*pid)).collect();
    loop {
        let more = parents.iter().filter(|(pid, parent)| tree.contains(parent) && !tree.contains(pid) && **pid != own);
        let more: Vec<u32> = more.map(|(pid, _)| *pid).collect();
        if more.is_empty() {
            return tree.into_iter().collect();
        }
        tree.extend(more);
    }
}

/// All process ids in `/proc`.
pub fn all_pids() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = ProcStat::read(pid)?;
    (stat.state != 'Z').then_some(stat.ppid)
}

fn has_variable(pid: u32, wanted: &str) -> bool {
    fs::read(format!("/proc/{pid}/environ")).is_ok_and(|env| env.split(|b| *b == 0).any(|v| v == wanted.as_bytes()))
}

/// The fields of `/proc/PID/stat` that are used here; proc_pid_stat(5).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcStat {
    pub command: String,
    pub state: char,
    pub ppid: u32,
    pub cpu_ticks: u64,
}

impl ProcStat {
    pub fn read(pid: u32) -> Option<Self> {
        let bytes = fs::read(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
        Self::parse(&String::from_utf8_lossy(&bytes))
    }

    fn parse(text: &str) -> Option<Self> {
        // The command is in parentheses and may itself hold parentheses and blanks.
        let (open, close) = (text.find('(')?, text.rfind(')')?);
        let fields: Vec<&str> = text.get(close + 1..)?.split_whitespace().collect();
        Some(Self {
            command: text.get(open + 1..close)?.to_owned(),
            state: fields.first()?.chars().next()?,
            ppid: fields.get(1)?.parse().ok()?,
            cpu_ticks: fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_parentheses_does_not_confuse_the_reader() {
        let stat = ProcStat::parse("10 (a) b (c)) S 9 7 1 0 0 0 0 0 0 0 3 4 0 0 20 0 1 0 27 11198464\n").unwrap();
        let expected = ProcStat { command: "a) b (c)".into(), state: 'S', ppid: 9, cpu_ticks: 7 };
        assert_eq!(stat, expected);
        assert_eq!(ProcStat::parse("10 (sh"), None);
    }
}
