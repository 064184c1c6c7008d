//! The one process that adds bytes to a journal, and what happens when the disk doesn't take them.

use crate::{
    layout::{self, Span, segment_path},
    retention::Retention,
    time_index::IndexWriter,
    unsynced::{SyncError, Unsynced},
};
use model::{Offset, Timestamp};
use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

/// How many written segments may wait for a flush, each with an open file, before appending flushes
/// by itself.
const MAX_UNSYNCED_FILES: usize = 16;

/// Why a journal couldn't be opened for writing.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another writer has it: two would overwrite each other's bytes.
    #[error("the journal {0} is being written by another process")]
    Busy(PathBuf),
    /// The system refused.
    #[error("can't open the journal {path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Why not all bytes were appended. Those that were (`accepted`) stay and count; go on with the rest.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// No room: the disk, a quota or a limit on file sizes. May work again once there is.
    #[error("no room for the journal {dir} at offset {tail}: {source}")]
    NoRoom {
        /// The journal.
        dir: PathBuf,
        /// How many of the given bytes are in the journal.
        accepted: usize,
        /// The journal's tail after them.
        tail: Offset,
        /// What the system said.
        source: io::Error,
    },
    /// Anything else that the system refused.
    #[error("can't write to the journal {dir} at offset {tail}: {source}")]
    Io {
        /// The journal.
        dir: PathBuf,
        /// How many of the given bytes are in the journal.
        accepted: usize,
        /// The journal's tail after them.
        tail: Offset,
        /// What the system said.
        source: io::Error,
    },
}

impl AppendError {
    fn new(dir: &Path, accepted: usize, tail: u64, source: io::Error) -> AppendError {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let (dir, tail) = (dir.to_owned(), Offset(tail));
        match source.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => AppendError::NoRoom { dir, accepted, tail, source },
            _ => AppendError::Io { dir, accepted, tail, source },
        }
    }

    /// How many of the given bytes are in the journal; a retry gives the rest.
    pub fn accepted(&self) -> usize {
        match self {
            AppendError::NoRoom { accepted, .. } | AppendError::Io { accepted, .. } => *accepted,
        }
    }

    /// The journal's tail after the accepted bytes.
    pub fn tail(&self) -> Offset {
        match self {
            AppendError::NoRoom { tail, .. } | AppendError::Io { tail, .. } => *tail,
        }
    }
}

/// Why a gap couldn't be made.
#[derive(Debug, thiserror::Error)]
pub enum SkipError {
    /// The offset lies before the tail: what is written is never taken back.
    #[error("can't skip back to offset {to}: the journal already reaches {tail}")]
    Backwards {
        /// The asked offset.
        to: Offset,
        /// The journal's tail.
        tail: Offset,
    },
    /// The segment that marks the gap couldn't be made; the tail is where it was.
    #[error(transparent)]
    Mark(#[from] AppendError),
    /// The gap is there, but perhaps not after a power loss; skip to the same offset to try again.
    #[error(transparent)]
    Sync(#[from] SyncError),
}

/// The segment that takes the next bytes.
#[derive(Debug)]
struct Current {
    start: u64,
    file: Arc<File>,
}

/// Appends to one journal. At most one exists for a directory, over all processes.
#[derive(Debug)]
pub struct Writer {
    dir: PathBuf,
    retention: Retention,
    /// All segments in order; the last one is `current`, its end is the tail.
    segments: Vec<Span>,
    current: Option<Current>,
    tail: u64,
    /// The directory, once it exists; carries the lock that keeps a second writer out.
    lock: Option<File>,
    index: IndexWriter,
    unsynced: Unsynced,
}

impl Writer {
    /// Opens the journal in `dir` and goes on at its tail. A directory that doesn't exist is an empty
    /// journal; it is made (with its parents, 0700) by the first append or skip.
    ///
    /// # Errors
    /// Another writer, or a refusal by the system.
    pub fn open(dir: impl Into<PathBuf>, retention: Retention) -> Result<Writer, OpenError> {
        let dir = dir.into();
        let io_error = |path: &Path, source| OpenError::Io { path: path.to_owned(), source };
        let lock = match File::open(&dir) {
            Ok(handle) => Some(handle),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(io_error(&dir, e)),
        };
        if let Some(handle) = &lock {
            lock_dir(handle).map_err(|e| match e.kind() {
                io::ErrorKind::WouldBlock => OpenError::Busy(dir.clone()),
                _ => io_error(&dir, e),
            })?;
        }
        let starts = layout::list(&dir).map_err(|e| io_error(&dir, e))?;
        let mut segments = Vec::with_capacity(starts.len());
        for (i, &start) in starts.iter().enumerate() {
            let path = segment_path(&dir, start);
            let len = fs::metadata(&path).map_err(|e| io_error(&path, e))?.len();
            let end = start.saturating_add(len).min(starts.get(i + 1).copied().unwrap_or(u64::MAX));
            segments.push(Span { start, end });
        }
        let current = match segments.last() {
            Some(&Span { start, .. }) => {
                let path = segment_path(&dir, start);
                let file = OpenOptions::new().write(true).open(&path).map_err(|e| io_error(&path, e))?;
                Some(Current { start, file: Arc::new(file) })
            }
            None => None,
        };
        let tail = segments.last().map_or(0, |s| s.end);
        let index = IndexWriter::open(&dir, tail).map_err(|e| io_error(&dir.join(layout::INDEX_NAME), e))?;
        let mut writer = Writer { dir, retention, segments, current, tail, lock, index, unsynced: Unsynced::default() };
        // What a writer before us wrote and didn't flush before it died is ours to flush.
        if let Some(current) = &writer.current {
            writer.unsynced.add_file(current.start, || segment_path(&writer.dir, current.start), &current.file);
            writer.unsynced.add_dir(&writer.dir);
        }
        writer.drop_old();
        Ok(writer)
    }

    /// Where the next byte goes: the number of bytes ever appended or skipped.
    pub fn tail(&self) -> Offset {
        Offset(self.tail)
    }

    /// The journal's directory; it need not exist yet.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Appends bytes and returns the new tail. Readers see them at once; they survive this process,
    /// and after [`sync`](Self::sync) a power loss.
    ///
    /// # Errors
    /// Some of the bytes, or none, were accepted: [`AppendError::accepted`] tells. The journal is whole
    /// up to its tail, and a later append goes on there.
    pub fn append(&mut self, bytes: &[u8]) -> Result<Offset, AppendError> {
        let mut accepted = 0;
        while accepted < bytes.len() {
            match self.append_some(&bytes[accepted..]) {
                Ok(n) => accepted += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(AppendError::new(&self.dir, accepted, self.tail, e)),
            }
        }
        Ok(Offset(self.tail))
    }

    /// As [`append`](Self::append), and notes in the time index when the bytes came. The index is a
    /// help: trouble with it is logged and never fails the append.
    ///
    /// # Errors
    /// As `append`.
    pub fn append_at(&mut self, bytes: &[u8], at: Timestamp) -> Result<Offset, AppendError> {
        let before = self.tail;
        let result = self.append(bytes);
        if self.tail > before {
            self.index.note(before, self.tail, at);
        }
        result
    }

    /// Declares the bytes from the tail to `to` lost: the next byte gets the offset `to`. On return the
    /// gap is safe from a power loss, also when no byte follows. Skipping to the tail itself is nothing
    /// but a [`sync`](Self::sync).
    ///
    /// # Errors
    /// An offset before the tail, and refusals by the system.
    pub fn skip_to(&mut self, to: Offset) -> Result<(), SkipError> {
        if to.0 < self.tail {
            return Err(SkipError::Backwards { to, tail: Offset(self.tail) });
        }
        if to.0 > self.tail {
            self.start_segment(to.0).map_err(|e| AppendError::new(&self.dir, 0, self.tail, e))?;
        }
        Ok(self.sync()?)
    }

    /// Makes everything appended so far safe from a power loss; free when nothing is new.
    ///
    /// # Errors
    /// The disk refused. What was to be flushed stays dirty.
    pub fn sync(&mut self) -> Result<(), SyncError> {
        let Some(work) = self.take_unsynced() else { return Ok(()) };
        let result = work.sync();
        if result.is_err() {
            self.put_back(work);
        }
        result
    }

    /// Takes the work of [`sync`](Self::sync) out, to be done in another thread while appending goes on.
    /// `None` when nothing is new. When the work fails, [`put_back`](Self::put_back) it.
    pub fn take_unsynced(&mut self) -> Option<Unsynced> {
        if self.unsynced.is_empty() {
            return None;
        }
        self.index.close();
        Some(std::mem::take(&mut self.unsynced))
    }

    /// Takes back work that failed, so that the next sync does it again.
    pub fn put_back(&mut self, work: Unsynced) {
        self.unsynced.merge_earlier(work);
    }

    /// Whether there is anything that a power loss could take.
    pub fn is_dirty(&self) -> bool {
        !self.unsynced.is_empty()
    }

    /// Writes what fits into the current segment; makes a new one first when it is full.
    fn append_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.current.as_ref().is_none_or(|c| self.tail >= self.retention.segment_end(c.start)) {
            if self.tail == u64::MAX {
                return Err(io::Error::other("offsets have come to their end"));
            }
            self.start_segment(self.tail)?;
        }
        // The segment was made above where there was none.
        let Some(current) = &self.current else { return Err(io::Error::other("no segment to write to")) };
        let room = self.retention.segment_end(current.start) - self.tail;
        let part = &bytes[..bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX))];
        let part = &part[..faults::write("journal.write", part.len())?];
        let n = current.file.write_at(part, self.tail - current.start)?;
        if n == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.tail += n as u64;
        if let Some(last) = self.segments.last_mut() {
            last.end = self.tail;
        }
        self.unsynced.add_file(current.start, || segment_path(&self.dir, current.start), &current.file);
        Ok(n)
    }

    /// Makes the segment that begins at `start`, the new tail.
    fn start_segment(&mut self, start: u64) -> io::Result<()> {
        self.ensure_dir()?;
        if self.unsynced.open_files() >= MAX_UNSYNCED_FILES {
            self.sync().map_err(|e| e.source)?;
        }
        faults::file("journal.segment")?;
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(segment_path(&self.dir, start))?;
        let file = Arc::new(file);
        self.unsynced.add_dir(&self.dir);
        self.unsynced.add_file(start, || segment_path(&self.dir, start), &file);
        self.current = Some(Current { start, file });
        self.tail = start;
        // An empty segment before this one marks nothing any more.
        if let Some(before) = self.segments.last().copied().filter(|s| s.start == s.end)
            && self.remove(before)
        {
            self.segments.pop();
        }
        self.segments.push(Span { start, end: start });
        self.drop_old();
        Ok(())
    }

    /// Deletes what retention no longer asks for, oldest first.
    fn drop_old(&mut self) {
        let range = self.retention.droppable(&self.segments, self.tail);
        let mut gone = 0;
        for i in range.clone() {
            // The rest stays for the next time, so that the kept segments have one hole, not many.
            if !self.remove(self.segments[i]) {
                break;
            }
            gone += 1;
        }
        self.segments.drain(range.start..range.start + gone);
    }

    fn remove(&mut self, span: Span) -> bool {
        let path = segment_path(&self.dir, span.start);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "can't delete an old segment of a journal");
                false
            }
            _ => {
                self.unsynced.forget_file(span.start);
                true
            }
        }
    }

    /// Makes the directory and takes its lock.
    fn ensure_dir(&mut self) -> io::Result<()> {
        if self.lock.is_some() {
            return Ok(());
        }
        for missing in self.dir.ancestors().take_while(|d| !d.as_os_str().is_empty() && !d.exists()) {
            if let Some(parent) = missing.parent() {
                self.unsynced.add_dir(if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
            }
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let handle = File::open(&self.dir)?;
        lock_dir(&handle)?;
        // Another writer may have made, filled and left it since we looked.
        if !layout::list(&self.dir)?.is_empty() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "another writer has used this journal meanwhile"));
        }
        self.lock = Some(handle);
        Ok(())
    }
}

/// Keeps other writers out until the handle is closed, by death at the latest.
fn lock_dir(handle: &File) -> io::Result<()> {
    Ok(flock(handle, FlockOperation::NonBlockingLockExclusive)?)
}

#[cfg(test)]
mod tests;
