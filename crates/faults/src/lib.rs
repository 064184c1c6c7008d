//! Named points at which a test stops this process, kills it, or makes a file operation fail.
//!
//! Everything here is off, and costs one load of a pointer, unless the environment variable `DORMOUSE_FAULTS` names a
//! directory when the process starts. In that directory:
//!
//! - `armed`: only while this file exists are points counted, from 0 in each process.
//! - `plan`: one rule a line, `ROLE PLACE ACTION`. ROLE is `server` or `supervise`; PLACE is a number or the name of a
//!   point (its first time); ACTION is `kill`, `pause`, `enospc`, `eio`, `short`. The last three are for file operations:
//!   two fail it, the third writes half. At a point that is none they do nothing.
//! - `trace.ROLE`: each counted point as a line, `NUMBER KIND NAME`, where KIND is `point`, `file` or `write`.
//! - `paused`: appears when a point pauses, and names it; the process goes on once it is removed.
//!
//! The crate knows nothing of what the points mean.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// The variable that names the directory.
pub const VARIABLE: &str = "DORMOUSE_FAULTS";

/// How often a paused process looks whether it may go on.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Kill,
    Pause,
    Fail(i32),
    /// Half of a write.
    Short,
}

#[derive(Debug)]
struct Faults {
    dir: PathBuf,
    role: String,
    count: AtomicUsize,
}

/// A place in the code at which a process may die or be stopped.
pub fn point(name: &str) {
    if let Some(faults) = faults() {
        let _ = faults.reach("point", name);
    }
}

/// Comes before a file operation, which fails with what this returns.
///
/// # Errors
/// Only where a test has asked for it.
pub fn file(name: &str) -> io::Result<()> {
    match faults() {
        Some(faults) => faults.reach("file", name).map(drop),
        None => Ok(()),
    }
}

/// Comes before a write of so many bytes: how many of them to write.
///
/// # Errors
/// Only where a test has asked for it.
pub fn write(name: &str, bytes: usize) -> io::Result<usize> {
    match faults() {
        Some(faults) => faults.reach("write", name).map(|short| if short { bytes.div_ceil(2) } else { bytes }),
        None => Ok(bytes),
    }
}

fn faults() -> Option<&'static Faults> {
    static FAULTS: OnceLock<Option<Faults>> = OnceLock::new();
    let opened = FAULTS.get_or_init(|| {
        let dir = PathBuf::from(std::env::var_os(VARIABLE)?);
        let role = std::env::var("DORMOUSE_ROLE").unwrap_or_else(|_| "server".to_owned());
        Some(Faults { dir, role, count: AtomicUsize::new(0) })
    });
    opened.as_ref()
}

impl Faults {
    /// True where a write is to be short.
    fn reach(&self, kind: &str, name: &str) -> io::Result<bool> {
        if !self.dir.join("armed").exists() {
            return Ok(false);
        }
        let number = self.count.fetch_add(1, Ordering::SeqCst);
        self.trace(number, kind, name);
        match action(&fs::read_to_string(self.dir.join("plan")).unwrap_or_default(), &self.role, number, name) {
            Some(Action::Kill) => kill_self(),
            Some(Action::Pause) => self.pause(name),
            Some(Action::Fail(errno)) if kind != "point" => return Err(io::Error::from_raw_os_error(errno)),
            Some(Action::Short) if kind == "write" => return Ok(true),
            Some(Action::Fail(_) | Action::Short) | None => {}
        }
        Ok(false)
    }

    fn trace(&self, number: usize, kind: &str, name: &str) {
        let path = self.dir.join(format!("trace.{}", self.role));
        let file = OpenOptions::new().create(true).append(true).open(path);
        // One write, so that lines of several processes don't mix.
        let _ = file.and_then(|mut file| file.write_all(format!("{number} {kind} {name}\n").as_bytes()));
    }

    fn pause(&self, name: &str) {
        let paused = self.dir.join("paused");
        if fs::write(&paused, name).is_err() {
            return;
        }
        while paused.exists() {
            std::thread::sleep(LOOK);
        }
    }
}

/// What the plan says for a point. A name counts once for each process: its rule is the test's to remove.
fn action(plan: &str, role: &str, number: usize, name: &str) -> Option<Action> {
    plan.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let (of, place, action) = (words.next()?, words.next()?, words.next()?);
        let here = place.parse::<usize>().map_or(place == name, |place| place == number);
        if of != role || !here {
            return None;
        }
        match action {
            "kill" => Some(Action::Kill),
            "pause" => Some(Action::Pause),
            "enospc" => Some(Action::Fail(28)),
            "eio" => Some(Action::Fail(5)),
            "short" => Some(Action::Short),
            _ => None,
        }
    })
}

/// As if somebody had said `kill -9`: nothing is written, closed or said any more.
fn kill_self() {
    let own = Path::new("/proc/self").read_link().map(|pid| pid.to_string_lossy().into_owned()).unwrap_or_default();
    let _ = std::process::Command::new("kill").args(["-9", &own]).status();
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.
    use super::*;

    fn faults(dir: &Path) -> Faults {
        Faults { dir: dir.to_owned(), role: "server".to_owned(), count: AtomicUsize::new(0) }
    }

    #[test]
    fn a_rule_names_a_role_and_a_place() {
        let plan = "server 3 kill\nsupervise image.write enospc\nserver commit eio\nnonsense\n";
        assert_eq!(action(plan, "server", 3, "x"), Some(Action::Kill));
        assert_eq!(action(plan, "server", 2, "x"), None);
        assert_eq!(action(plan, "server", 9, "commit"), Some(Action::Fail(5)));
        assert_eq!(action(plan, "supervise", 3, "image.write"), Some(Action::Fail(28)));
        assert_eq!(action(plan, "server", 0, "image.write"), None);
    }

    #[test]
    fn points_are_counted_and_fail_only_while_armed() {
        let dir = tempfile::tempdir().unwrap();
        let faults = faults(dir.path());
        fs::write(dir.path().join("plan"), "server 1 enospc\n").unwrap();
        faults.reach("file", "before").unwrap();
        fs::write(dir.path().join("armed"), "").unwrap();
        faults.reach("file", "first").unwrap();
        assert_eq!(faults.reach("file", "second").unwrap_err().raw_os_error(), Some(28));
        faults.reach("file", "third").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("trace.server")).unwrap(), "0 file first\n1 file second\n2 file third\n");
    }

    #[test]
    fn a_write_is_cut_in_half_where_that_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("plan"), "server 0 short\nserver 1 short\n").unwrap();
        fs::write(dir.path().join("armed"), "").unwrap();
        let faults = faults(dir.path());
        assert!(faults.reach("write", "first").unwrap());
        assert!(!faults.reach("file", "no write").unwrap());
        assert!(!faults.reach("write", "third").unwrap());
    }

    #[test]
    fn a_pause_lasts_until_its_mark_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("plan"), "server here pause\n").unwrap();
        fs::write(dir.path().join("armed"), "").unwrap();
        let faults = faults(dir.path());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| faults.reach("point", "here"));
            let paused = dir.path().join("paused");
            while !paused.exists() {
                std::thread::yield_now();
            }
            assert!(!waits.is_finished());
            fs::remove_file(&paused).unwrap();
            assert!(!waits.join().unwrap().unwrap());
        });
    }
}
