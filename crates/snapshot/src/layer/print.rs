//! What a file looks like from outside, and when that says enough about what is in it.
//!
//! Every change of a file's content or attributes sets its change time, which no program can choose. So a file whose
//! [`Print`] is as it was has the content that it had, but for two holes, which [`Calm`] closes:
//!
//! - The kernel's clock for change times ticks (jiffies, up to 10 ms). Of two changes within a tick the second can't be
//!   seen. A change time that is [`SETTLE`] old when the file is looked at can't be one that a later change gets.
//! - A store into a shared mapping sets the change time only when it makes a clean page dirty. Stores into a page that is
//!   dirty already leave no trace. `syncfs` cleans all pages, so after it the next store into each page does.
//!
//! Hence: a print tells any later change if its change time is [`SETTLE`] older than the beginning of the last `syncfs`
//! before it was taken. Git calls an index entry without that property "racy" (`Documentation/technical/racy-git.txt`).
//! Kernel sources: `file_update_time`, `folio_mkclean`, `*_page_mkwrite`.

use rustix::{
    fs::{FsWord, Stat},
    io::Errno,
};
use std::{
    os::fd::BorrowedFd,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Far more than a tick of any kernel.
pub(super) const SETTLE: Duration = Duration::from_millis(100);
/// For file systems that keep only seconds: ext4 with inodes of 128 bytes.
const SETTLE_OF_SECONDS: Duration = Duration::from_secs(2);

/// A file as fstat(2) tells of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Print {
    pub(super) device: u64,
    pub(super) inode: u64,
    /// Change time: seconds and nanoseconds.
    pub(super) changed: (i64, u32),
    pub(super) size: u64,
    pub(super) mode: u32,
}

impl Print {
    pub(super) fn of(stat: &Stat) -> Print {
        Print {
            device: stat.st_dev,
            inode: stat.st_ino,
            changed: (stat.st_ctime, u32::try_from(stat.st_ctime_nsec).unwrap_or(0)),
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mode: stat.st_mode,
        }
    }

    fn changed_ns(&self) -> i128 {
        i128::from(self.changed.0) * 1_000_000_000 + i128::from(self.changed.1)
    }
}

/// Which prints tell any later change.
#[derive(Debug, Clone, Copy)]
pub(super) struct Calm {
    settle: Duration,
    synced: Synced,
}

#[derive(Debug, Clone, Copy)]
enum Synced {
    Never,
    /// The last `syncfs` began then: nanoseconds since the Unix epoch.
    Since(i128),
    /// Here prints tell nothing.
    InVain,
}

impl Calm {
    pub(super) fn new(settle: Duration) -> Calm {
        Calm { settle, synced: Synced::Never }
    }

    /// Makes the pages of all files clean. Those that were changed [`SETTLE`] ago or earlier are calm from now on.
    pub(super) fn sync(&mut self, dir: BorrowedFd<'_>) -> rustix::io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        rustix::fs::syncfs(dir)?;
        self.synced = match tells_changes(dir)? {
            true => Synced::Since(i128::try_from(now.as_nanos()).unwrap_or(0)),
            false => Synced::InVain,
        };
        Ok(())
    }

    /// How long a file must have been calm.
    pub(super) fn settle(&self) -> Duration {
        self.settle
    }

    pub(super) fn was_synced(&self) -> bool {
        !matches!(self.synced, Synced::Never)
    }

    /// Whether there can be prints that tell any later change.
    pub(super) fn is_possible(&self) -> bool {
        !matches!(self.synced, Synced::InVain)
    }

    pub(super) fn covers(&self, print: &Print) -> bool {
        let settle = if print.changed.1 == 0 { self.settle.max(SETTLE_OF_SECONDS) } else { self.settle };
        let settle = i128::try_from(settle.as_nanos()).unwrap_or(i128::MAX);
        matches!(self.synced, Synced::Since(synced) if print.changed_ns().saturating_add(settle) <= synced)
    }
}

/// Whether the file system sets change times for stores into mappings. tmpfs doesn't, ZFS does so late; of those that
/// nobody has looked at nothing is assumed. Numbers: `linux/magic.h`, statfs(2).
fn tells_changes(dir: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    const EXT4: FsWord = 0xEF53;
    const XFS: FsWord = 0x5846_5342;
    const BTRFS: FsWord = 0x9123_683E;
    const F2FS: FsWord = 0xF2F5_2010;
    Ok(matches!(rustix::fs::fstatfs(dir)?.f_type, EXT4 | XFS | BTRFS | F2FS))
}

/// True for what happens to whoever reads a tree that others change at the same time.
pub(super) fn is_change_meanwhile(error: Errno) -> bool {
    // ENODATA: an attribute is gone. ELOOP, ENOTDIR: something else has that name now.
    matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE | Errno::AGAIN | Errno::NODATA)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_changed_well_before_the_sync_is_calm() {
        let print = |sec, ns| Print { device: 1, inode: 1, changed: (sec, ns), size: 0, mode: 0 };
        let at = |synced| Calm { settle: SETTLE, synced };
        let ten = Synced::Since(10_000_000_000);
        assert!(!at(Synced::Never).covers(&print(0, 1)), "without a sync nothing is known");
        assert!(!at(Synced::InVain).covers(&print(0, 1)));
        assert!(at(ten).covers(&print(9, 900_000_000)));
        assert!(!at(ten).covers(&print(9, 900_000_001)));
        assert!(!at(ten).covers(&print(11, 1)), "a clock that was set back");
        assert!(!at(ten).covers(&print(9, 0)) && at(ten).covers(&print(8, 0)), "a file system that keeps seconds");
    }
}
