//! Breaking a server and its supervisors at named points: see the crate `faults`.

use crate::{Options, PATIENCE, Server, Session};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The directory through which processes are told where to break.
pub struct Faults {
    dir: tempfile::TempDir,
}

impl Faults {
    /// Nothing breaks yet.
    pub fn new() -> Faults {
        Faults { dir: tempfile::Builder::new().prefix("dormouse-faults-").tempdir().expect("a directory") }
    }

    /// Lets a server be broken through this directory.
    pub fn give_to(&self, options: &mut Options) {
        options.env.push(("DORMOUSE_FAULTS".to_owned(), self.dir.path().to_string_lossy().into_owned()));
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Counts points from here on, and breaks at those that `plan` names, one rule a line.
    pub fn arm(&self, plan: &str) {
        fs::write(self.file("plan"), plan).expect("a file");
        fs::write(self.file("armed"), "").expect("a file");
    }

    /// Nothing breaks any more, and what is paused goes on.
    pub fn disarm(&self) {
        for name in ["armed", "plan", "paused"] {
            let _ = fs::remove_file(self.file(name));
        }
    }

    /// The points that a role has reached, each a line.
    pub fn trace(&self, role: &str) -> String {
        fs::read_to_string(self.file(&format!("trace.{role}"))).unwrap_or_default()
    }

    /// What is paused goes on.
    pub fn go_on(&self) {
        let _ = fs::remove_file(self.file("paused"));
    }

    /// Waits until something pauses. False: `done` said that nothing will any more.
    #[track_caller]
    pub fn paused(&self, done: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while !self.file("paused").exists() {
            if done() {
                return self.file("paused").exists();
            }
            assert!(Instant::now() < deadline, "neither the point nor an answer comes");
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

impl Default for Faults {
    fn default() -> Faults {
        Faults::new()
    }
}

/// The mark of a session's supervisor, as it is on the disk.
pub fn mark(data: &Path, session: &Session) -> Value {
    let mark = data.join("sessions").join(&session.id).join("run/supervisor.json");
    fs::read(mark).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// Kills the processes of a session's sandbox, and nothing else.
pub fn kill_sandbox(server: &Server, session: &Session) {
    let mark = mark(server.data(), session);
    let pids = mark["sandbox_pids"].as_array().cloned().unwrap_or_default();
    for pid in pids.iter().filter_map(|pid| i32::try_from(pid.as_u64()?).ok()) {
        // SAFETY: kill takes two integers; the processes are those of this test's sandbox.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}
