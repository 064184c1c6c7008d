//! What lies where in a session's directory. Supervisor and server both go by this page.
//!
//! ```text
//! DATA/sessions/ID/
//!   disk/upper  disk/work       the session's own layer
//!   disk/over                   there while that is larger than it may be
//!   root/                       where the overlay is mounted while there is a sandbox
//!   execs/EXEC.stdout/ …        journals
//!   terminals/TERM.tty/
//!   services/NAME.log/
//!   facts/                      what the supervisor wrote down for the server
//!   image/N/                    memory image of generation N
//!   run/                        socket, pid file, bundle and logs of the present supervisor
//!     notes/TERM                what was typed by whom and how large the terminal is: see `terminal_notes`
//! ```

use model::{ExecId, Generation, ServiceName, TerminalId};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The paths of one session's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionLayout {
    dir: PathBuf,
}

/// One journal of a session.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JournalName {
    Stdout(ExecId),
    Stderr(ExecId),
    Terminal(TerminalId),
    Service(ServiceName),
    /// What went out, a JSON object a line.
    Requests,
    Facts,
}

impl std::fmt::Display for JournalName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            JournalName::Stdout(exec) => write!(f, "exec {exec} stdout"),
            JournalName::Stderr(exec) => write!(f, "exec {exec} stderr"),
            JournalName::Terminal(terminal) => write!(f, "terminal {terminal}"),
            JournalName::Service(name) => write!(f, "service {name}"),
            JournalName::Requests => f.write_str("requests"),
            JournalName::Facts => f.write_str("facts"),
        }
    }
}

impl SessionLayout {
    /// The layout of the directory `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn disk(&self) -> PathBuf {
        self.dir.join("disk")
    }

    pub fn upper(&self) -> PathBuf {
        self.dir.join("disk/upper")
    }

    pub fn work(&self) -> PathBuf {
        self.dir.join("disk/work")
    }

    /// There while the disk is over its limit and that was told; holds how much was used.
    pub fn disk_over(&self) -> PathBuf {
        self.dir.join("disk/over")
    }

    pub fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    pub fn image(&self, generation: Generation) -> PathBuf {
        self.dir.join(format!("image/{generation}"))
    }

    pub fn images(&self) -> PathBuf {
        self.dir.join("image")
    }

    pub fn run(&self) -> PathBuf {
        self.dir.join("run")
    }

    /// The supervisor's socket. Reach it through the directory's descriptor where the path is too
    /// long for a socket address (108 bytes).
    pub fn socket(&self) -> PathBuf {
        self.dir.join("run/supervisor.sock")
    }

    /// Held locked (flock) by the living supervisor; holds its [`SupervisorMark`].
    pub fn mark(&self) -> PathBuf {
        self.dir.join("run/supervisor.json")
    }

    pub fn spec(&self) -> PathBuf {
        self.dir.join("run/spec.json")
    }

    pub fn supervisor_log(&self) -> PathBuf {
        self.dir.join("run/supervisor.log")
    }

    pub fn bundle(&self) -> PathBuf {
        self.dir.join("run/bundle")
    }

    /// What the supervisor notes about a terminal while it is used, for one that may have to take it over.
    pub fn terminal_notes(&self, terminal: TerminalId) -> PathBuf {
        self.dir.join(format!("run/notes/{terminal}"))
    }

    pub fn journal(&self, name: &JournalName) -> PathBuf {
        match name {
            JournalName::Stdout(exec) => self.dir.join(format!("execs/{exec}.stdout")),
            JournalName::Stderr(exec) => self.dir.join(format!("execs/{exec}.stderr")),
            JournalName::Terminal(terminal) => self.dir.join(format!("terminals/{terminal}.tty")),
            JournalName::Service(name) => self.dir.join(format!("services/{name}.log")),
            JournalName::Requests => self.dir.join("requests"),
            JournalName::Facts => self.dir.join("facts"),
        }
    }
}

/// Who supervises a session: enough to tell the living from the dead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SupervisorMark {
    pub pid: u32,
    /// Start time in clock ticks since boot, from `/proc/PID/stat`.
    pub started_ticks: u64,
    pub boot_id: String,
    pub generation: Generation,
    /// The runtime's name for the sandbox.
    pub container: String,
    /// Process ids of the sandbox, for cleaning up after a dead supervisor.
    #[serde(default)]
    pub sandbox_pids: Vec<u32>,
    /// The sandbox of a dead supervisor that this one takes over. As long as that lives it, and not [`Self::container`],
    /// is the session's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takes_over: Option<TakesOver>,
}

/// A sandbox whose supervisor has died.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakesOver {
    /// The runtime's name for it.
    pub container: String,
    /// Its generation. The image of that number is its memory, once it is whole.
    pub generation: Generation,
}
