//! Making a layer of an upper directory, in two passes: most of it while programs still write to it, the rest while they
//! stand still. See [`super`] for the plan.

mod walk;

use super::{
    Layer, LayerDescriptor, LayerError, LayerStore,
    content::Copier,
    dirs::{DirId, Dirs, Name, Opener, ROOT},
    io_error,
    print::{Calm, Print, SETTLE},
    prints::{self, Previous, Printed},
    staging::{Staging, TREE},
};
use model::{LayerId, SessionId, Timestamp};
use rustix::fs::{Mode, OFlags};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// A first pass that took longer than this has left time for many changes: another one is worth its while.
const WORTH_ANOTHER: Duration = Duration::from_secs(1);
/// So is one where more than this was changed so lately that it would have to be copied again.
const WORTH_A_WAIT: u64 = 4 << 20;
/// But not for ever: a program may write faster than anybody copies.
const PASSES_MAX: usize = 3;
/// More names than this no file in a layer gets by sharing: ext4 allows 65,000, the others more.
pub(super) const LINKS_MAX: u64 = 60_000;

/// A capture under way. Dropped before [`Capture::finish`] has succeeded, it leaves nothing.
#[derive(Debug)]
pub struct Capture {
    upper: PathBuf,
    source: Opener,
    previous: Option<Previous>,
    staging: Staging,
    /// What is in each directory of `staging.dirs`.
    contents: Vec<Contents>,
    copies: Vec<Copy>,
    /// The latest copy of each file of the upper directory, by device and inode.
    by_inode: HashMap<(u64, u64), CopyId>,
    copier: Copier,
    calm: Calm,
    pass: Pass,
    /// The copy is what the upper directory was at the last pass.
    is_exact: bool,
    /// How many copies were made since the last call began.
    copied: u64,
    links_max: u64,
}

/// One walk over the upper directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pass {
    number: u32,
    /// Nothing changes meanwhile.
    is_still: bool,
}

/// An index into [`Capture::copies`].
type CopyId = usize;

/// What the layer has of one file.
#[derive(Debug)]
struct Copy {
    print: Print,
    /// The print tells any later change.
    is_calm: bool,
    /// The pass that made it.
    pass: u32,
    /// One of its names.
    at: (DirId, Name),
}

#[derive(Debug, Default)]
struct Contents {
    /// The print of the original whose owner, mode, attributes and times the copy has, if it tells any later change.
    print: Option<Print>,
    entries: HashMap<Name, Entry>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    what: What,
    /// The last pass that found it.
    pass: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Directory(DirId),
    File(CopyId),
    Whiteout,
}

impl Capture {
    /// Begins the layer `id` of the upper directory `upper`. What hasn't changed since the layer `previous` of the same
    /// directory is shared with it; where that is gone or has no prints, everything is copied.
    ///
    /// # Errors
    /// [`LayerError::Io`].
    pub fn begin(store: &LayerStore, id: LayerId, upper: &Path, previous: Option<LayerId>) -> Result<Capture, LayerError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::open(upper, flags, Mode::empty()).map_err(|e| io_error("open", upper)(e.into()))?;
        let previous = previous.and_then(|id| {
            let read = Previous::read(&store.place(id), &store.path(id));
            read.inspect_err(|error| tracing::info!(layer = %id, %error, "nothing is shared with an earlier layer")).ok()
        });
        let staging = Staging::create(store.dir(), id)?;
        let contents = (0..staging.dirs.len()).map(|_| Contents::default()).collect();
        Ok(Capture {
            upper: upper.to_owned(),
            source: Opener::new(TREE, root),
            previous,
            staging,
            contents,
            copies: Vec::new(),
            by_inode: HashMap::new(),
            copier: Copier::new(),
            calm: Calm::new(SETTLE),
            pass: Pass { number: 0, is_still: false },
            is_exact: false,
            copied: 0,
            links_max: LINKS_MAX,
        })
    }

    /// Other bounds than those of use, for tests: how long files must have been calm, how many names they may have.
    #[cfg(test)]
    pub(super) fn with_bounds(self, settle: Duration, links_max: u64) -> Capture {
        Capture { calm: Calm::new(settle), links_max, ..self }
    }

    /// How many files were read, or shared with an earlier layer, since the last call began.
    #[cfg(test)]
    pub(super) fn copied_at_last(&self) -> u64 {
        self.copied
    }

    /// Copies what there is while programs go on writing, again where that took long. What they change meanwhile is no
    /// error: [`Capture::freeze`] sees it.
    ///
    /// # Errors
    /// [`LayerError::Io`]: there is no room, or a disk fails.
    pub fn precopy(&mut self) -> Result<(), LayerError> {
        faults::point("layer.precopy");
        self.copied = 0;
        for _ in 0..PASSES_MAX {
            let begun = Instant::now();
            self.sync()?;
            // What would have to be copied again in any case is left for then.
            if self.calm.is_possible() {
                self.walk(false)?;
            }
            let restless = self.restless_bytes();
            if begun.elapsed() < WORTH_ANOTHER && restless < WORTH_A_WAIT {
                break;
            }
            // Once they have been calm for that long, they need not be copied again while all stand still.
            if restless >= WORTH_A_WAIT {
                std::thread::sleep(self.calm.settle());
            }
        }
        tracing::debug!(layer = %self.staging.id, files = self.copied, "copied ahead");
        Ok(())
    }

    /// Bytes of files that the last pass copied and that a later change could be missed of.
    fn restless_bytes(&self) -> u64 {
        let last = self.pass.number;
        self.copies.iter().filter(|copy| copy.pass == last && !copy.is_calm).map(|copy| copy.print.size).sum()
    }

    fn sync(&mut self) -> Result<(), LayerError> {
        self.calm.sync(self.source.root()).map_err(|e| io_error("sync", &self.upper)(e.into()))
    }

    /// Makes the copy exact. Nothing may write to the upper directory from before this until it has returned.
    ///
    /// # Errors
    /// [`LayerError::Moved`] where something did; [`LayerError::Io`].
    pub fn freeze(&mut self) -> Result<(), LayerError> {
        if !self.calm.was_synced() {
            // Nothing ran, so nothing waits for this. It lets the next capture share what has been calm for a while.
            self.sync()?;
        }
        faults::point("layer.freeze");
        self.copied = 0;
        self.walk(true)?;
        tracing::debug!(layer = %self.staging.id, files = self.copied, "copied while all stood still");
        Ok(())
    }

    /// Makes the layer durable and puts it in its place. The upper directory is not looked at any more.
    ///
    /// # Errors
    /// [`LayerError::Unfrozen`] where [`Capture::freeze`] was not the last thing that succeeded; [`LayerError::Io`].
    pub fn finish(self, session: SessionId, at: Timestamp) -> Result<Layer, LayerError> {
        if !self.is_exact {
            return Err(LayerError::Unfrozen(self.staging.id));
        }
        let (dirs, files) = self.printed();
        let staging = self.staging;
        let id = staging.id;
        prints::write(staging.path(), &dirs, files.iter()).map_err(io_error("describe", staging.path()))?;
        let descriptor = staging.publish(|tree| LayerDescriptor::measured(tree, session, at))?;
        Ok(Layer { id, descriptor })
    }

    fn walk(&mut self, is_still: bool) -> Result<(), LayerError> {
        self.is_exact = false;
        self.pass = Pass { number: self.pass.number + 1, is_still };
        let mut waiting = vec![TREE];
        while let Some(id) = waiting.pop() {
            self.directory(id, &mut waiting)?;
        }
        self.is_exact = is_still;
        Ok(())
    }

    /// The prints that tell any later change, and the directories that they lie in, without the trash.
    fn printed(&self) -> (Dirs, Vec<Printed>) {
        let mut dirs = Dirs::new();
        let mut number: Vec<Option<DirId>> = vec![None; self.staging.dirs.len()];
        number[TREE.0 as usize] = Some(ROOT);
        for id in (0..self.staging.dirs.len()).filter(|id| *id > TREE.0 as usize) {
            let (parent, name) = self.staging.dirs.place(DirId(id as u32));
            number[id] = number[parent.0 as usize].map(|parent| dirs.add(parent, name.clone()));
        }
        let printed = |copy: &Copy| {
            let (dir, name) = (number[copy.at.0.0 as usize]?, copy.at.1.clone());
            copy.is_calm.then_some(Printed { dir, name, print: copy.print })
        };
        (dirs, self.copies.iter().filter_map(printed).collect())
    }
}
