//! The journals of one session, open for writing: append, tell who waits, sync in the background.

use journal::{AppendError, Reader, Retention, Writer};
use model::{ByteSize, Offset, Timestamp};
use std::collections::{HashMap, HashSet};
use tokio::sync::watch;
use wire::{
    Code, WireError,
    layout::{JournalName, SessionLayout},
};

/// How far a journal has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    pub offset: Offset,
    /// Nothing will be appended any more.
    pub ended: bool,
}

struct Open {
    writer: Writer,
    tail: watch::Sender<Tail>,
}

/// All journals that this process has open.
pub struct Journals {
    layout: SessionLayout,
    retention: Retention,
    open: HashMap<JournalName, Open>,
    dirty: HashSet<JournalName>,
}

fn wire_error(error: &dyn std::error::Error) -> WireError {
    WireError::new(Code::Internal, error.to_string())
}

impl Journals {
    /// Journals below `layout`; none is opened yet. `keep`: how much of the latest bytes of each stays, where that is set.
    pub fn new(layout: SessionLayout, keep: Option<ByteSize>) -> Self {
        let retention =
            Retention { tail_bytes: keep.map_or(Retention::default().tail_bytes, |keep| keep.0), ..Retention::default() };
        Self { layout, retention, open: HashMap::new(), dirty: HashSet::new() }
    }

    fn opened(&mut self, name: &JournalName) -> Result<&mut Open, WireError> {
        if !self.open.contains_key(name) {
            let writer = Writer::open(self.layout.journal(name), self.retention).map_err(|e| wire_error(&e))?;
            let (tail, _) = watch::channel(Tail { offset: writer.tail(), ended: false });
            self.open.insert(name.clone(), Open { writer, tail });
        }
        Ok(self.open.get_mut(name).expect("it was just put there"))
    }

    /// Opens a journal for writing and tells its tail.
    ///
    /// # Errors
    /// The directory can't be read or another process writes there.
    pub fn ensure_open(&mut self, name: &JournalName) -> Result<Offset, WireError> {
        Ok(self.opened(name)?.writer.tail())
    }

    /// The tail of a journal that is open.
    pub fn tail(&self, name: &JournalName) -> Option<Offset> {
        self.open.get(name).map(|open| open.writer.tail())
    }

    /// The tails of all that something is still written to.
    pub fn tails(&self) -> Vec<(JournalName, Offset)> {
        let growing = self.open.iter().filter(|(_, open)| !open.tail.borrow().ended);
        growing.map(|(name, open)| (name.clone(), open.writer.tail())).collect()
    }

    /// Appends; returns how many bytes are in. Fewer than all: there is no room, try the rest later.
    ///
    /// # Errors
    /// The disk refuses for another reason than room.
    pub fn append(&mut self, name: &JournalName, bytes: &[u8], at: Timestamp) -> Result<usize, WireError> {
        let open = self.opened(name)?;
        let (accepted, result) = match open.writer.append_at(bytes, at) {
            Ok(_) => (bytes.len(), Ok(bytes.len())),
            Err(error @ AppendError::NoRoom { .. }) => (error.accepted(), Ok(error.accepted())),
            Err(error) => (error.accepted(), Err(wire_error(&error))),
        };
        if accepted > 0 {
            open.tail.send_replace(Tail { offset: open.writer.tail(), ended: false });
            self.dirty.insert(name.clone());
        }
        result
    }

    /// Marks the bytes from the tail to `to` as lost; returns where the gap begins.
    ///
    /// # Errors
    /// `to` lies before the tail, or the disk refuses.
    pub fn skip_to(&mut self, name: &JournalName, to: Offset) -> Result<Offset, WireError> {
        let open = self.opened(name)?;
        let from = open.writer.tail();
        open.writer.skip_to(to).map_err(|e| wire_error(&e))?;
        open.tail.send_replace(Tail { offset: to, ended: false });
        Ok(from)
    }

    /// Follows a journal's tail. One that isn't open has ended.
    ///
    /// # Errors
    /// It can't be read.
    pub fn watch(&mut self, name: &JournalName) -> Result<watch::Receiver<Tail>, WireError> {
        if let Some(open) = self.open.get(name) {
            return Ok(open.tail.subscribe());
        }
        let range = Reader::open(self.layout.journal(name)).range().map_err(|e| wire_error(&e))?;
        Ok(watch::channel(Tail { offset: range.tail, ended: true }).1)
    }

    /// Nothing more will come: tells who waits, and closes the journal at its next sync.
    pub fn end(&mut self, name: &JournalName) {
        if let Some(open) = self.open.get(name) {
            open.tail.send_modify(|tail| tail.ended = true);
            self.dirty.insert(name.clone());
        }
    }

    /// What waits to be synced, taken out so that the disk can be waited for elsewhere.
    pub fn take_unsynced(&mut self) -> Vec<(JournalName, journal::Unsynced)> {
        let mut work = Vec::new();
        for name in std::mem::take(&mut self.dirty) {
            let Some(open) = self.open.get_mut(&name) else { continue };
            if let Some(unsynced) = open.writer.take_unsynced() {
                work.push((name.clone(), unsynced));
            }
            if open.tail.borrow().ended {
                self.open.remove(&name);
            }
        }
        work
    }

    /// Gives back what could not be synced; it is tried again.
    pub fn put_back(&mut self, name: JournalName, work: journal::Unsynced) {
        if let Some(open) = self.open.get_mut(&name) {
            open.writer.put_back(work);
            self.dirty.insert(name);
        }
    }

    /// Syncs everything now, waiting for the disk.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn sync_all(&mut self) -> Result<(), WireError> {
        for (name, work) in self.take_unsynced() {
            if let Err(error) = work.sync() {
                self.put_back(name, work);
                return Err(wire_error(&error));
            }
        }
        Ok(())
    }
}
