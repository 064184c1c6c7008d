//! One layer that shows the same, above whatever lies below, as a chain of layers does.
//!
//! The chain is walked as the kernel would walk it (`fs/overlayfs/namei.c`, `ovl_lookup`). A directory of the result stands
//! for a *stack*, the directories of the chain that the overlay merges at that place, top-most first, and knows whether
//! something further down, below the chain, would be merged with it, too. For each name in any directory of the stack the
//! lookup ([`lookup`]) goes down the stack and tells what is there:
//!
//! | it meets first | the result gets |
//! |---|---|
//! | a file or symlink | a hard link to it |
//! | a whiteout | a whiteout; nothing where the directory itself hides all that is below the chain |
//! | a directory | a directory with the stack of all that are merged with it, dressed like the first of them |
//!
//! A directory ends its stack where it is opaque, or where a file or a whiteout lies below it. A redirected directory goes on
//! elsewhere: under another name in the same parents' stack, or at an absolute path in all layers further down. Where the
//! stack has ended within the chain the new directory is opaque. Where it goes on below the chain under another name or
//! path it is redirected to there: the same relative name, since its parent is merged with the same parents below the
//! chain, or the same absolute path. Where it goes on under its own name it has no mark. All this is independent of what is
//! below, so it holds above any bottom.
//!
//! Nothing below an opaque directory can show through, so there no whiteouts are needed; a merged directory with whiteouts
//! gets an empty `origin`, which keeps them out of listings where it happens to be merged with nothing (see `xattr`).
//! Names of one file within a layer stay names of one file, since all of them are linked.

mod lookup;

use super::{
    Layer, LayerDescriptor, LayerError, LayerStore,
    capture::LINKS_MAX,
    content::{Copier, handle_at, set_times},
    dirs::{DirId, Dirs, Name, Opener, ROOT, names},
    staging::{Staging, TREE},
    xattr::{self, Attribute},
};
use lookup::{Below, Found};
use model::LayerId;
use rustix::{
    fs::{AtFlags, Stat, fstat, linkat},
    io::Errno,
};
use std::{
    collections::{BTreeSet, HashMap},
    ffi::OsStr,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::PathBuf,
};

/// A layer of the chain.
struct LayerTree {
    id: LayerId,
    path: PathBuf,
    dirs: Dirs,
    opener: Opener,
}

impl LayerTree {
    fn error(&self, what: &'static str, dir: DirId, name: &OsStr, error: Errno) -> LayerError {
        LayerError::Io { what, path: self.path.join(self.dirs.path(dir, name)), source: error.into() }
    }
}

/// A directory of a layer of the chain.
#[derive(Debug, Clone, Copy)]
struct Source {
    layer: usize,
    dir: DirId,
}

/// A directory of the new layer that is still empty.
struct Merged {
    at: DirId,
    /// Never empty.
    stack: Vec<Source>,
    /// Whether it is merged with what is below the chain.
    goes_on: bool,
    /// The attributes that say so.
    marks: Vec<Attribute>,
}

struct Flattening {
    layers: Vec<LayerTree>,
    staging: Staging,
    copier: Copier,
    /// Files that couldn't be shared, by device and inode: where the first copy is.
    copies: HashMap<(u64, u64), (DirId, Name)>,
    links_max: u64,
}

/// Makes the layer `new` of a chain of layers, the top-most first. It stands for its top-most layer: the same session, the
/// same moment. Its files are shared with the chain's.
///
/// # Errors
/// [`LayerError::NoChain`]; [`LayerError::Missing`], [`LayerError::Damaged`] for a layer of the chain; [`LayerError::Io`].
pub fn flatten(store: &LayerStore, chain: &[LayerId], new: LayerId) -> Result<Layer, LayerError> {
    flatten_within(store, chain, new, LINKS_MAX)
}

/// The same with another bound for how many names a file may have, for tests.
pub(super) fn flatten_within(store: &LayerStore, chain: &[LayerId], new: LayerId, links_max: u64) -> Result<Layer, LayerError> {
    let top = store.read(*chain.first().ok_or(LayerError::NoChain)?)?.descriptor;
    let open = |id: &LayerId| {
        store.read(*id)?;
        let opener = Opener::new(ROOT, store.open_tree(*id)?);
        Ok(LayerTree { id: *id, path: store.path(*id), dirs: Dirs::new(), opener })
    };
    let layers = chain.iter().map(open).collect::<Result<Vec<_>, LayerError>>()?;
    let staging = Staging::create(store.dir(), new)?;
    let mut flattening = Flattening { layers, staging, copier: Copier::new(), copies: HashMap::new(), links_max };
    flattening.run()?;
    let descriptor = flattening.staging.publish(|tree| LayerDescriptor::measured(tree, top.session, top.created_at))?;
    Ok(Layer { id: new, descriptor })
}

impl Flattening {
    fn run(&mut self) -> Result<(), LayerError> {
        // Roots are always merged, whatever their attributes say (`ovl_get_root`).
        let stack = (0..self.layers.len()).map(|layer| Source { layer, dir: ROOT }).collect();
        let mut waiting = vec![Merged { at: TREE, stack, goes_on: true, marks: Vec::new() }];
        while let Some(merged) = waiting.pop() {
            self.directory(merged, &mut waiting)?;
        }
        Ok(())
    }

    fn directory(&mut self, merged: Merged, waiting: &mut Vec<Merged>) -> Result<(), LayerError> {
        let Merged { at, stack, goes_on, mut marks } = merged;
        let mut opened = Vec::with_capacity(stack.len());
        let mut all = BTreeSet::new();
        for source in stack {
            let layer = &mut self.layers[source.layer];
            let read = layer.opener.open(&layer.dirs, source.dir).and_then(|dir| Ok((names(dir.as_fd())?, dir)));
            let (names, dir) = read.map_err(|e| layer.error("read", source.dir, OsStr::new(""), e))?;
            all.extend(names);
            opened.push((source, dir));
        }
        let target = self.staging.open(at)?;
        let mut has_whiteouts = false;
        for name in all {
            match lookup::look_up(&mut self.layers, &opened, &name)? {
                Found::File { source, stat } => self.file(&opened[source], &stat, target.as_fd(), (at, &name))?,
                Found::Directory { stack, below } => {
                    let name = Name::from(name);
                    let id = self.staging.make_dir(target.as_fd(), at, &name)?;
                    waiting.push(mark(id, &name, stack, below, goes_on));
                }
                Found::Whiteout if goes_on => {
                    self.staging.whiteout(target.as_fd(), at, &name)?;
                    has_whiteouts = true;
                }
                Found::Whiteout | Found::Nothing => {}
            }
        }
        if has_whiteouts {
            marks.push((xattr::ORIGIN.to_owned(), Vec::new()));
        }
        let (_, first) = &opened[0];
        let dressed = fstat(first).and_then(|stat| {
            self.copier.directory(first.as_fd(), &stat, target.as_fd(), xattr::apart_from_layers, &marks)?;
            set_times(target.as_fd(), OsStr::new("."), &stat)
        });
        dressed.map_err(|e| self.staging.error("dress", at, OsStr::new(""), e))
    }

    /// Gives the new layer a file of the chain.
    fn file(
        &mut self,
        (source, dir): &(Source, OwnedFd),
        stat: &Stat,
        target: BorrowedFd<'_>,
        (at, name): (DirId, &OsStr),
    ) -> Result<(), LayerError> {
        let inode = (stat.st_dev, stat.st_ino);
        if let Some((first, old)) = self.copies.get(&inode).cloned() {
            return self.staging.link((first, &old), target, (at, name));
        }
        // Of a file with several names either all are shared or none: it could get as many as it has.
        if stat.st_nlink == 1 || stat.st_nlink * 2 <= self.links_max {
            match linkat(dir, name, target, name, AtFlags::empty()) {
                Err(Errno::MLINK | Errno::XDEV) => {}
                other => return other.map_err(|e| self.layers[source.layer].error("link", source.dir, name, e)),
            }
        }
        let copied = handle_at(dir.as_fd(), name).and_then(|file| self.copier.copy(file.as_fd(), stat, target, name));
        copied.map_err(|e| self.layers[source.layer].error("copy", source.dir, name, e))?;
        self.copies.insert(inode, (at, Name::from(name)));
        Ok(())
    }
}

/// The new directory `id`, called `name`, of which the chain has `stack`.
fn mark(id: DirId, name: &OsStr, stack: Vec<Source>, below: Below, parent_goes_on: bool) -> Merged {
    let at_a_path = matches!(&below, Below::Elsewhere(path) if path.starts_with(b"/"));
    let goes_on = matches!(below, Below::Elsewhere(_)) && (parent_goes_on || at_a_path);
    let marks = match below {
        Below::Elsewhere(other) if goes_on && other != name.as_bytes() => vec![(xattr::REDIRECT.to_owned(), other)],
        // In a directory that hides everything there is nothing to hide.
        Below::Nothing if parent_goes_on => vec![(xattr::OPAQUE.to_owned(), b"y".to_vec())],
        Below::Elsewhere(_) | Below::Nothing => Vec::new(),
    };
    Merged { at: id, stack, goes_on, marks }
}
