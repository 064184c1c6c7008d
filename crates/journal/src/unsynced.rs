//! What a power loss could still take: files and directories to be flushed, detached from the writer
//! so that a slow disk doesn't hold up the next append.

use std::{
    collections::BTreeSet,
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Written bytes and new names that are not yet safe from a power loss.
#[derive(Debug, Default)]
#[must_use = "nothing is flushed until sync() is called"]
pub struct Unsynced {
    files: Vec<(u64, PathBuf, Arc<File>)>,
    dirs: BTreeSet<PathBuf>,
}

/// The disk refused to flush: the bytes may or may not survive a power loss.
#[derive(Debug, thiserror::Error)]
#[error("can't flush {path}: {source}")]
pub struct SyncError {
    /// The file or directory.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

impl Unsynced {
    /// Flushes the data of all segments, then the directories that name them.
    ///
    /// # Errors
    /// The first refusal. Give the value back with [`Writer::put_back`](crate::Writer::put_back), so
    /// that the next flush tries again.
    pub fn sync(&self) -> Result<(), SyncError> {
        for (_, path, file) in &self.files {
            faults::file("journal.sync").map_err(|source| SyncError { path: path.clone(), source })?;
            file.sync_data().map_err(|source| SyncError { path: path.clone(), source })?;
        }
        for path in &self.dirs {
            File::open(path).and_then(|d| d.sync_all()).map_err(|source| SyncError { path: path.clone(), source })?;
        }
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty() && self.dirs.is_empty()
    }

    pub(crate) fn add_file(&mut self, start: u64, path: impl FnOnce() -> PathBuf, file: &Arc<File>) {
        // The segment being written is always the last one added.
        if self.files.last().is_none_or(|(last, ..)| *last != start) {
            self.files.push((start, path(), Arc::clone(file)));
        }
    }

    pub(crate) fn add_dir(&mut self, dir: &Path) {
        if !self.dirs.contains(dir) {
            self.dirs.insert(dir.to_owned());
        }
    }

    /// A dropped segment needs no flush.
    pub(crate) fn forget_file(&mut self, start: u64) {
        self.files.retain(|(s, ..)| *s != start);
    }

    /// How many segments wait, each with an open file.
    pub(crate) fn open_files(&self) -> usize {
        self.files.len()
    }

    /// Puts earlier work in front of what has come since.
    pub(crate) fn merge_earlier(&mut self, mut earlier: Unsynced) {
        earlier.files.retain(|(s, ..)| self.files.iter().all(|(mine, ..)| mine != s));
        earlier.files.append(&mut self.files);
        self.files = earlier.files;
        self.dirs.append(&mut earlier.dirs);
    }
}
