//! `dormouse doctor`: what this machine can do, what is missing, and the command that mends it.
//!
//! It looks at the machine only and asks no server, so that it can help before there is one.

use crate::client::{default_data_dir, size};
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Releases of gVisor that this build was tested with begin here.
const RUNSC_SINCE: u32 = 20_240_729;

/// What has to be free for a template and a few sessions.
const ENOUGH_DISK: u64 = 5 << 30;

/// What a finding means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Ok,
    /// Dormouse works, with less.
    Limited,
    /// Sandboxes can't be run.
    Missing,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    what: &'static str,
    verdict: Verdict,
    detail: String,
    /// The command that mends it.
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

impl Finding {
    fn new(what: &'static str, verdict: Verdict, detail: impl Into<String>, mend: Option<&str>) -> Finding {
        Finding { what, verdict, detail: detail.into(), mend: mend.map(str::to_owned) }
    }
}

/// Looks, prints, and exits with 1 where something is missing.
pub fn command(json: bool) -> ExitCode {
    let findings = look();
    let missing = findings.iter().any(|finding| finding.verdict == Verdict::Missing);
    if json {
        println!("{}", serde_json::json!({ "ok": !missing, "findings": findings }));
    } else {
        print!("{}", render(&findings));
    }
    if missing { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn render(findings: &[Finding]) -> String {
    let mut out = String::new();
    for finding in findings {
        let word = match finding.verdict {
            Verdict::Ok => "ok",
            Verdict::Limited => "limited",
            Verdict::Missing => "missing",
        };
        out.push_str(&format!("{word:<8} {:<18} {}\n", finding.what, finding.detail));
        if let Some(mend) = &finding.mend {
            out.push_str(&format!("{:<8} {:<18} mend it with: {mend}\n", "", ""));
        }
    }
    out
}

fn look() -> Vec<Finding> {
    let data = default_data_dir();
    let mut findings = vec![kernel(), rights()];
    findings.extend(runsc());
    findings.extend([overlay(), cgroups(), disk(&data), quota(&data), secrets_key(&data), templates(&data)]);
    findings
}

fn kernel() -> Finding {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let arch = std::env::consts::ARCH;
    match kernel_version(release) {
        Some(version) if version >= (5, 6) => Finding::new("kernel", Verdict::Ok, format!("Linux {release}, {arch}"), None),
        _ => Finding::new(
            "kernel",
            Verdict::Missing,
            format!("Linux {release} is older than 5.6, which has openat2(2)"),
            Some("apt-get install linux-image-amd64, then reboot"),
        ),
    }
}

/// Major and minor number of a release such as `6.1.0-18-amd64`.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn rights() -> Finding {
    if rustix::process::geteuid().is_root() {
        return Finding::new("rights", Verdict::Ok, "root", None);
    }
    Finding::new(
        "rights",
        Verdict::Missing,
        "sandboxes need root here, for overlay mounts and cgroups",
        Some("sudo dormouse serve"),
    )
}

fn runsc() -> Vec<Finding> {
    const INSTALL: &str = "cargo xtask up   (or: apt-get install -t bookworm-backports runsc)";
    let Some(path) = on_path("runsc") else {
        return vec![Finding::new("runsc", Verdict::Missing, "gVisor isn't installed", Some(INSTALL))];
    };
    let output = Command::new(&path).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let first = text.lines().next().unwrap_or_default().trim().to_owned();
    let Some(date) = runsc_date(&first) else {
        let detail = format!("{} doesn't say its version", path.display());
        return vec![Finding::new("runsc", Verdict::Limited, detail, Some(INSTALL))];
    };
    if date < RUNSC_SINCE {
        let detail = format!("release {date} is older than {RUNSC_SINCE}");
        return vec![Finding::new("runsc", Verdict::Missing, detail, Some(INSTALL))];
    }
    // Saving deleted files that are still open came in March 2025.
    let saves = date >= 20_250_300;
    let memory = if saves {
        Finding::new("memory snapshots", Verdict::Ok, "deleted files that are still open can be saved", None)
    } else {
        let detail = "deleted files that are still open, on the disk, keep a session from being hibernated";
        Finding::new("memory snapshots", Verdict::Limited, detail, None)
    };
    vec![Finding::new("runsc", Verdict::Ok, format!("{} release {date}, platform systrap", path.display()), None), memory]
}

/// The date in `runsc version release-20240729.0`, or in Debian's `0.0~20240729.0`.
fn runsc_date(line: &str) -> Option<u32> {
    line.split(|c: char| !c.is_ascii_digit()).find(|digits| digits.len() == 8).and_then(|digits| digits.parse().ok())
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut folders = std::env::split_paths(&path).chain(system);
    folders.find_map(|folder| Some(folder.join(name)).filter(|file| file.is_file()))
}

fn overlay() -> Finding {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if known.lines().any(|line| line.trim().ends_with("overlay")) {
        return Finding::new("overlayfs", Verdict::Ok, "known to the kernel", None);
    }
    Finding::new("overlayfs", Verdict::Missing, "the kernel doesn't know it", Some("modprobe overlay"))
}

fn cgroups() -> Finding {
    let what = "cgroups";
    let v2 = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").ok();
    let v1 = |name: &str| Path::new("/sys/fs/cgroup").join(name).is_dir();
    let has = |name: &str| match &v2 {
        Some(controllers) => controllers.split_whitespace().any(|known| known == name),
        None => v1(name),
    };
    let version = if v2.is_some() { "v2" } else { "v1" };
    let lacking: Vec<&str> = ["memory", "cpu", "pids"].into_iter().filter(|name| !has(name)).collect();
    let root = if v2.is_some() { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" };
    let writable = rustix::fs::access(root, rustix::fs::Access::WRITE_OK).is_ok();
    match (lacking.as_slice(), writable) {
        (["memory", "cpu", "pids"], _) => {
            let mend = Some("mount -t cgroup2 none /sys/fs/cgroup");
            Finding::new(what, Verdict::Limited, "none: limits of CPU, memory and processes aren't enforced", mend)
        }
        ([], true) => Finding::new(what, Verdict::Ok, format!("{version}: memory, cpu and pids can be limited"), None),
        ([], false) => {
            Finding::new(what, Verdict::Limited, format!("{version}, not writable here: limits aren't enforced"), None)
        }
        (lacking, _) => {
            Finding::new(what, Verdict::Limited, format!("{version} without {}: not limited", lacking.join(", ")), None)
        }
    }
}

/// The nearest folder above that is there.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

fn disk(data: &Path) -> Finding {
    let folder = existing(data);
    let Ok(stat) = rustix::fs::statvfs(folder) else {
        return Finding::new("disk", Verdict::Limited, format!("{} can't be looked at", folder.display()), None);
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let detail = format!("{} free for {}", size(free), data.display());
    if free >= ENOUGH_DISK {
        return Finding::new("disk", Verdict::Ok, detail, None);
    }
    Finding::new("disk", Verdict::Limited, detail, Some("dormouse serve --data DIR   (a folder with more room)"))
}

fn quota(data: &Path) -> Finding {
    let what = "disk limits";
    let folder = existing(data);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let kind = mount_of(folder, &mounts).map_or_else(|| "a file system that isn't known".to_owned(), |(_, kind, _)| kind);
    if snapshot::disk::keeps_limits(folder).is_ok() {
        let detail = format!("{kind} with project quota: programs inside are told that the disk is full");
        return Finding::new(what, Verdict::Ok, detail, None);
    }
    let detail = format!(
        "{kind} without project quota: a disk over its limit is told as an event and takes no more files through the API; \
         programs inside aren't stopped"
    );
    let mend = match kind.as_str() {
        "ext4" => Some("umount it, tune2fs -O project,quota -Q prjquota DEVICE, then mount -o prjquota (Linux 5.14 or later)"),
        "xfs" => Some("mount the file system with -o prjquota (Linux 5.14 or later)"),
        _ => None,
    };
    Finding::new(what, Verdict::Limited, detail, mend)
}

/// Mount point, type and options of the file system that `path` is on.
fn mount_of(path: &Path, mounts: &str) -> Option<(String, String, String)> {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let lines = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1).map(str::to_owned);
        Some((words.next()?, words.next()?, words.next()?))
    });
    // Of two mounts on the same place the later one counts.
    lines.filter(|(point, ..)| path.starts_with(point)).max_by_key(|(point, ..)| point.len())
}

/// Where the key of secrets is, as far as it can be told without the server's flags.
fn secrets_key(data: &Path) -> Finding {
    let what = "key of secrets";
    let given = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let beside = data.join("secrets.key");
    if given("DORMOUSE_KEY_FILE") || given("DORMOUSE_KEY_COMMAND") || crate::serve::credential().is_some() {
        return Finding::new(what, Verdict::Ok, "not kept beside what it encrypts", None);
    }
    if !beside.exists() {
        return Finding::new(what, Verdict::Ok, "none is kept here", None);
    }
    let detail = format!("{} lies beside what it encrypts: who has the one has the other", beside.display());
    let mend = "move it elsewhere, then dormouse serve --key-file FILE   (or --key-command, or systemd's LoadCredential=dormouse-key:FILE)";
    Finding::new(what, Verdict::Limited, detail, Some(mend))
}

fn templates(data: &Path) -> Finding {
    let folder = match std::env::var_os("DORMOUSE_TEMPLATES") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder),
        _ => data.join("templates"),
    };
    let holds_any = fs::read_dir(&folder).is_ok_and(|mut entries| entries.next().is_some());
    if holds_any {
        return Finding::new("templates", Verdict::Ok, folder.display().to_string(), None);
    }
    Finding::new("templates", Verdict::Limited, format!("none in {}", folder.display()), Some("cargo xtask build"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(runsc_date("runsc version release-20240729.0"), Some(20_240_729));
        assert_eq!(runsc_date("runsc version 0.0~20240729.0"), Some(20_240_729));
        assert_eq!(runsc_date("runsc version VERSION_MISSING"), None);
        assert_eq!(kernel_version("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(kernel_version("4.4.0"), Some((4, 4)));
        assert_eq!(kernel_version("x"), None);
    }

    #[test]
    fn the_nearest_and_latest_mount_counts() {
        let mounts = "a / ext4 rw 0 0\nb /var xfs rw,prjquota 0 0\nc /var/lib/x tmpfs rw 0 0\nd / overlay rw 0 0\n";
        let of = |path: &str| mount_of(Path::new(path), mounts).unwrap().1;
        assert_eq!(of("/nowhere/at/all"), "overlay");
        assert_eq!(of("/var/lib/dormouse-none"), "xfs");
        assert_eq!(of("/var/lib/x/y"), "tmpfs");
    }

    #[test]
    fn each_finding_is_a_line_and_what_mends_it_another() {
        let text =
            render(&[Finding::new("a", Verdict::Ok, "fine", None), Finding::new("b", Verdict::Missing, "gone", Some("get it"))]);
        assert_eq!(text.lines().count(), 3);
        assert!(text.contains("missing  b") && text.contains("mend it with: get it"));
    }
}
