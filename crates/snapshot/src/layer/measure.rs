//! How much space layers take, and how much of it nobody else has.

use super::{
    content::{kind, stat_at},
    dirs::{Dirs, Opener, ROOT, names},
};
use rustix::fs::{FileType, Stat};
use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

/// What some trees of layers take.
#[derive(Debug, Default)]
pub(super) struct Measure {
    /// Names in the trees, without their roots.
    pub(super) entries: u64,
    /// Allocated blocks in bytes, each inode once.
    pub(super) size_bytes: u64,
    /// The same of what is in these trees alone.
    own_bytes: u64,
    /// Inodes with several names: how many of them were seen, of how many there are, and the bytes.
    linked: HashMap<(u64, u64), Linked>,
}

#[derive(Debug)]
struct Linked {
    seen: u64,
    names: u64,
    bytes: u64,
}

impl Measure {
    /// Adds the tree below the directory `root`, which nobody changes.
    pub(super) fn add(&mut self, root: OwnedFd) -> io::Result<()> {
        self.count(&rustix::fs::fstat(&root)?);
        let (mut dirs, mut opener) = (Dirs::new(), Opener::new(ROOT, root));
        let mut waiting = vec![ROOT];
        while let Some(id) = waiting.pop() {
            let dir = opener.open(&dirs, id)?;
            for name in names(dir.as_fd())? {
                let stat = stat_at(dir.as_fd(), &name)?;
                self.entries += 1;
                self.count(&stat);
                if kind(&stat) == FileType::Directory {
                    waiting.push(dirs.add(id, Arc::from(name)));
                }
            }
        }
        Ok(())
    }

    fn count(&mut self, stat: &Stat) {
        let bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
        if kind(stat) == FileType::Directory || stat.st_nlink == 1 {
            self.size_bytes += bytes;
            self.own_bytes += bytes;
            return;
        }
        let names = stat.st_nlink;
        let linked = self.linked.entry((stat.st_dev, stat.st_ino)).or_insert_with(|| {
            self.size_bytes += bytes;
            Linked { seen: 0, names, bytes }
        });
        linked.seen += 1;
    }

    /// What would be free if these trees were removed.
    pub(super) fn own_bytes(&self) -> u64 {
        self.own_bytes + self.linked.values().filter(|linked| linked.seen >= linked.names).map(|linked| linked.bytes).sum::<u64>()
    }
}
