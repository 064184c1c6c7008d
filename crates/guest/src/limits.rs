//! Ends works that stay at their limit on processes.
//!
//! A fork bomb that is held at its limit still starts and loses processes as fast as it can; that slows the whole
//! sandbox until each system call of the guest takes a second. So the looking is done by a thread of its own that
//! needs two system calls a look and one to kill, and doesn't wait for its turn behind anything else.

use crate::sys;
use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Between looks, while some work has many processes, and else.
const BUSY: Duration = Duration::from_millis(50);
const CALM: Duration = Duration::from_millis(250);
/// So many processes of one work are many.
const MANY: u64 = 24;
/// Looks at the limit in a row that end a work.
const LOOKS: u32 = 6;

/// The works that are looked at, by run.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    watched: Arc<Mutex<BTreeMap<u64, Watched>>>,
}

#[derive(Debug)]
struct Watched {
    /// First process of the work, which leads its process group.
    leader: u32,
    /// The group's `pids.current`.
    count: File,
    limit: u64,
    looks: u32,
}

impl Watched {
    fn processes(&self) -> u64 {
        let mut text = [0; 24];
        let read = self.count.read_at(&mut text, 0).unwrap_or(0);
        std::str::from_utf8(&text[..read]).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0)
    }

    /// Looks, and kills when it is time. How many processes there are.
    fn look(&mut self) -> u64 {
        let processes = self.processes();
        if processes * 100 < self.limit * 95 {
            // What was killed stays marked: its end has yet to be told.
            if self.looks < LOOKS {
                self.looks = 0;
            }
            return processes;
        }
        self.looks += 1;
        if self.looks >= LOOKS {
            let _ = sys::kill(-(self.leader as i32), libc::SIGKILL);
        }
        processes
    }
}

impl Limits {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where there can't be another thread.
    pub fn enforce(&self) -> std::io::Result<()> {
        let limits = self.clone();
        std::thread::Builder::new().name("limits".into()).stack_size(128 * 1024).spawn(move || {
            loop {
                let most = limits.lock().values_mut().map(Watched::look).max().unwrap_or(0);
                std::thread::sleep(if most >= MANY { BUSY } else { CALM });
            }
        })?;
        Ok(())
    }

    pub fn watch(&self, run: u64, leader: u32, count: File, limit: u64) {
        self.lock().insert(run, Watched { leader, count, limit, looks: 0 });
    }

    /// Stops looking at a run.
    pub fn forget(&self, run: u64) {
        self.lock().remove(&run);
    }

    /// True where the work was ended for its processes.
    pub fn has_ended(&self, run: u64) -> bool {
        self.lock().get(&run).is_some_and(|w| w.looks >= LOOKS)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
