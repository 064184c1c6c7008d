//! Resource figures, the list of processes, and what stands in the way of saving the memory.

use crate::{
    guest::Guest,
    tree::{ProcStat, all_pids},
    works::Works,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
    rc::Rc,
    time::Duration,
};
use wire::{
    guest::{GuestEvent, Work},
    records::{ProcessRecord, Stats, Unsaveable},
};

/// How often to look for what can't be saved, while anything runs.
const LOOK: Duration = Duration::from_secs(5);
/// `/proc` counts CPU time in these units; the kernel's interface fixes 100 Hz.
const MS_PER_TICK: u64 = 10;

/// Figures of the whole inside.
pub fn stats() -> Stats {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let (total, free) = (kib_of(&meminfo, "MemTotal:"), kib_of(&meminfo, "MemAvailable:"));
    Stats {
        cpu_ms: cpu_ms(),
        memory_bytes: total.saturating_sub(free) * 1024,
        memory_limit_bytes: (total > 0).then_some(total * 1024),
        processes: all_pids().len() as u64,
        ..Stats::default()
    }
}

/// CPU time of all programs, the guest's own left out.
pub fn programs_cpu_ms() -> u64 {
    let own = ProcStat::read(std::process::id()).map_or(0, |stat| stat.cpu_ticks * MS_PER_TICK);
    cpu_ms().saturating_sub(own)
}

fn cpu_ms() -> u64 {
    let nanoseconds = fs::read_to_string("/sys/fs/cgroup/cpuacct/cpuacct.usage").ok().and_then(|t| t.trim().parse::<u64>().ok());
    match nanoseconds {
        Some(ns) => ns / 1_000_000,
        None => all_pids().into_iter().filter_map(ProcStat::read).map(|s| s.cpu_ticks * MS_PER_TICK).sum(),
    }
}

fn kib_of(text: &str, field: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(field));
    line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Every process, with the work it belongs to.
///
/// `reads_terminal` is an approximation, since the sandbox's kernel tells neither what a process waits for nor a
/// terminal's foreground group: a process that sleeps, has the terminal as its standard input, and has no child that
/// has it, too.
pub fn processes(works: &Works) -> Vec<ProcessRecord> {
    let owners = works.attributed();
    let terminals: HashMap<PathBuf, Work> = works.terminals().into_iter().collect();
    let stats: BTreeMap<u32, ProcStat> = all_pids().into_iter().filter_map(|pid| Some((pid, ProcStat::read(pid)?))).collect();
    let input = |pid: &u32| terminals.get(&fs::read_link(format!("/proc/{pid}/fd/0")).ok()?);
    let inputs: HashMap<u32, &Work> = match terminals.is_empty() {
        true => HashMap::new(),
        false => stats.keys().filter_map(|pid| Some((*pid, input(pid)?))).collect(),
    };
    let busy: BTreeSet<u32> = stats.iter().filter(|(pid, _)| inputs.contains_key(pid)).map(|(_, s)| s.ppid).collect();
    let record = |(pid, stat): (&u32, &ProcStat)| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let terminal = inputs.get(pid).filter(|_| stat.state == 'S' && !busy.contains(pid));
        ProcessRecord {
            pid: *pid,
            ppid: stat.ppid,
            uid: kib_of(&status, "Uid:") as u32,
            state: stat.state.to_string(),
            cpu_ms: stat.cpu_ticks * MS_PER_TICK,
            rss_bytes: kib_of(&status, "VmRSS:") * 1024,
            command: command_line(*pid).unwrap_or_else(|| stat.command.clone()),
            work: owners.get(pid).cloned(),
            reads_terminal: terminal.and_then(|w| if let Work::Terminal(id) = w { Some(*id) } else { None }),
        }
    };
    stats.iter().map(record).collect()
}

fn command_line(pid: u32) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok().filter(|b| !b.is_empty())?;
    let words: Vec<_> = bytes.split(|b| *b == 0).filter(|w| !w.is_empty()).map(String::from_utf8_lossy).collect();
    let mut text = words.join(" ");
    text.truncate(text.floor_char_boundary(1000));
    Some(text)
}

/// The work that uses most memory.
pub fn largest(works: &Works) -> Option<Work> {
    let mut sums: HashMap<Work, u64> = HashMap::new();
    for (pid, work) in works.attributed() {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        *sums.entry(work).or_default() += kib_of(&status, "VmRSS:");
    }
    sums.into_iter().max_by_key(|(_, rss)| *rss).map(|(work, _)| work)
}

/// What stands in the way of saving the memory now: deleted files, programs and directories in use on the disk.
pub fn unsaveable() -> Vec<Unsaveable> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mount_points(&mounts);
    let own = std::process::id();
    let mut found = BTreeSet::new();
    for pid in all_pids().into_iter().filter(|pid| *pid != own) {
        let links = [("exe", "replaced_program"), ("cwd", "deleted_directory")];
        for (link, kind) in links {
            found.extend(deleted_target(format!("/proc/{pid}/{link}"), &mounts).map(|path| (pid, path, kind)));
        }
        let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for fd in fds.flatten() {
            let target = deleted_target(fd.path(), &mounts);
            found.extend(target.map(|path| (pid, path, "unlinked_file")));
        }
    }
    let item = |(pid, path, kind): (u32, String, &str)| {
        let process = ProcStat::read(pid).map(|s| s.command).unwrap_or_default();
        Unsaveable { pid, process, path, kind: kind.into() }
    };
    found.into_iter().map(item).collect()
}

fn deleted_target(link: impl AsRef<Path>, mounts: &[(String, bool)]) -> Option<String> {
    let target = fs::read_link(link).ok()?;
    let target = target.to_string_lossy();
    let path = target.strip_suffix(" (deleted)")?;
    (path.starts_with('/') && !path.starts_with("/memfd:") && is_on_disk(path, mounts)).then(|| path.to_owned())
}

/// Mount points with whether they are the disk, longest first; proc_pid_mountinfo(5).
fn mount_points(mountinfo: &str) -> Vec<(String, bool)> {
    const IN_MEMORY: [&str; 8] = ["tmpfs", "proc", "sysfs", "devpts", "cgroup", "devtmpfs", "mqueue", "cgroup2"];
    let mut points: Vec<(String, bool)> = mountinfo
        .lines()
        .filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let kind = right.split(' ').next()?;
            Some((left.split(' ').nth(4)?.to_owned(), !IN_MEMORY.contains(&kind)))
        })
        .collect();
    points.sort_by_key(|(point, _)| std::cmp::Reverse(point.len()));
    points
}

fn is_on_disk(path: &str, mounts: &[(String, bool)]) -> bool {
    let below =
        |point: &str| point == "/" || path.strip_prefix(point).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    mounts.iter().find(|(point, _)| below(point)).is_some_and(|(_, on_disk)| *on_disk)
}

/// Looks every few seconds, and tells a change that has lasted for two looks: short-lived temporary files are no news.
pub async fn watch_unsaveable(guest: Rc<Guest>) {
    let (mut told, mut before) = (Vec::new(), Vec::new());
    loop {
        tokio::time::sleep(LOOK).await;
        let nothing_runs = guest.works.borrow().is_idle();
        if !guest.is_init || (nothing_runs && told.is_empty()) {
            continue;
        }
        let Ok(now) = crate::guest::blocking(unsaveable).await else { continue };
        let lasting: Vec<Unsaveable> = now.iter().filter(|item| before.contains(*item)).cloned().collect();
        before = now;
        if lasting != told {
            told.clone_from(&lasting);
            guest.hub.borrow_mut().event(GuestEvent::Unsaveable { items: lasting });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "16 1 0:17 / / rw - 9p none rw\n18 16 0:18 / /dev rw - tmpfs none rw\n20 16 0:20 / /tmp rw - tmpfs none rw,size=1g\n30 16 0:9 / /tmp/vol rw - 9p none rw\n";

    #[test]
    fn only_the_disk_matters() {
        let mounts = mount_points(MOUNTS);
        let cases =
            [("/root/x", true), ("/tmp/x", false), ("/tmpx", true), ("/tmp/vol/x", true), ("/dev/shm/x", false), ("/", true)];
        for (path, expected) in cases {
            assert_eq!(is_on_disk(path, &mounts), expected, "{path}");
        }
    }

    #[test]
    fn fields_are_found() {
        assert_eq!(kib_of("Name:\tx\nUid:\t7\t7\t7\nVmRSS:\t  12 kB\n", "VmRSS:"), 12);
        assert_eq!(kib_of("Uid:\t7\t7\t7", "Uid:"), 7);
        assert_eq!(kib_of("", "Uid:"), 0);
    }
}
