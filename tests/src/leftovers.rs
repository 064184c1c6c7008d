//! What a server may leave behind, and how it is found: processes, mounts, control groups, directories.

use crate::eventually;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Processes whose command line names the data directory, besides the server itself.
pub fn processes(data: &Path) -> Vec<(i32, String)> {
    let needle = data.to_string_lossy().into_owned();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_string_lossy().parse::<i32>().ok());
    let lines = pids.filter_map(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        // `serve` is the server; a test's own tools may name the directory, too, but none is ours.
        let ours = line.contains("supervise") || line.contains("runsc");
        (line.contains(&needle) && ours && !is_zombie(pid)).then_some((pid, line))
    });
    lines.collect()
}

fn is_zombie(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
}

/// Mounts below the data directory.
pub fn mounts(data: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = text.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(data)).collect()
}

/// Names of sessions that have a directory.
pub fn directories(data: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(data.join("sessions")) else { return Vec::new() };
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Control groups of the sessions `ids`.
pub fn cgroups(ids: &[String]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let roots = ["memory", "cpu", "pids", "freezer", ""].map(|c| Path::new("/sys/fs/cgroup").join(c).join("dormouse"));
    for entry in roots.iter().filter_map(|root| fs::read_dir(root).ok()).flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if ids.iter().any(|id| name.contains(id.as_str())) {
            found.push(entry.path());
        }
    }
    found
}

/// Waits until nothing is left of deleted sessions.
#[track_caller]
pub fn expect_none(data: &Path) {
    let ids = directories(data);
    eventually("nothing is left of the deleted sessions", || {
        let left = (processes(data), mounts(data), directories(data), cgroups(&ids));
        let none = left.0.is_empty() && left.1.is_empty() && left.2.is_empty() && left.3.is_empty();
        if !none {
            eprintln!("still there: {left:?}");
        }
        none.then_some(())
    });
}

/// Ends everything of a data directory, by process id, so that it can be removed.
pub fn end_everything(data: &Path) {
    let ids = directories(data);
    for _ in 0..50 {
        let living = processes(data);
        let members = cgroups(&ids).into_iter().flat_map(|dir| {
            let _ = fs::write(dir.join("freezer.state"), "THAWED");
            let _ = fs::write(dir.join("cgroup.freeze"), "0");
            let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            text.lines().filter_map(|line| line.parse::<i32>().ok()).collect::<Vec<_>>()
        });
        let pids: Vec<i32> = living.into_iter().map(|(pid, _)| pid).chain(members).filter(|pid| *pid > 1).collect();
        if pids.is_empty() {
            break;
        }
        for pid in pids {
            // SAFETY: kill takes two integers; the processes are those of this test's own data directory.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let mut mounts = mounts(data);
    mounts.reverse();
    for point in mounts {
        let _ = rustix::mount::unmount(&point, rustix::mount::UnmountFlags::DETACH);
    }
    for dir in cgroups(&ids) {
        let _ = fs::remove_dir(dir);
    }
}
