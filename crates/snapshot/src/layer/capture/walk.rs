//! One walk over an upper directory: makes the copy like it, directory by directory.

use super::{Capture, Contents, Copy, CopyId, Entry, What};
use crate::layer::{
    LayerError, TREE_DIR,
    content::{handle_at, is_whiteout, kind, set_times, stat_at},
    dirs::{DirId, Name, names},
    print::{Print, is_change_meanwhile},
    staging::TRASH,
    xattr::{self, Attribute},
};
use rustix::{
    fs::{FileType, Stat, fstat},
    io::Errno,
};
use std::{
    ffi::OsStr,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

/// A directory that is being walked.
struct Here<'a> {
    id: DirId,
    source: BorrowedFd<'a>,
    target: BorrowedFd<'a>,
    /// Something was added to the copy or taken from it, which changed its times.
    is_touched: bool,
    /// A whiteout stands for something that can't be kept.
    has_substitute: bool,
}

impl Capture {
    /// Makes the copy of one directory like the original, but for what is in its subdirectories: these are to be next.
    /// A directory's times can be set right away: what its subdirectories get later doesn't change them.
    pub(super) fn directory(&mut self, id: DirId, waiting: &mut Vec<DirId>) -> Result<(), LayerError> {
        let nameless = OsStr::new("");
        let opened = self.source.open(&self.staging.dirs, id);
        let Some(source) = self.seen(opened, "open", id, nameless)? else { return Ok(()) };
        let Some(stat) = self.seen(fstat(&source), "look at", id, nameless)? else { return Ok(()) };
        let Some(names) = self.seen(names(source.as_fd()), "list", id, nameless)? else { return Ok(()) };
        let target = self.staging.open(id)?;
        let (source, target) = (source.as_fd(), target.as_fd());
        let mut here = Here { id, source, target, is_touched: false, has_substitute: false };
        for name in names {
            self.entry(&mut here, &name, waiting)?;
        }
        self.forget_gone(&mut here)?;
        self.dress(&here, &stat)
    }

    /// What a look at the upper directory gave; `None` where it was changed meanwhile, which is an error only in a walk
    /// during which nothing changes.
    fn seen<T>(
        &self,
        result: rustix::io::Result<T>,
        what: &'static str,
        dir: DirId,
        name: &OsStr,
    ) -> Result<Option<T>, LayerError> {
        let error = match result {
            Ok(value) => return Ok(Some(value)),
            Err(error) if is_change_meanwhile(error) && !self.pass.is_still => return Ok(None),
            Err(error) => error,
        };
        let path = self.staging.dirs.path(dir, name);
        let path = self.upper.join(path.strip_prefix(TREE_DIR).unwrap_or(&path));
        Err(match is_change_meanwhile(error) {
            true => LayerError::Moved { path },
            false => LayerError::Io { what, path, source: error.into() },
        })
    }

    fn entry(&mut self, here: &mut Here<'_>, name: &OsStr, waiting: &mut Vec<DirId>) -> Result<(), LayerError> {
        let Some(stat) = self.seen(stat_at(here.source, name), "look at", here.id, name)? else { return Ok(()) };
        match kind(&stat) {
            FileType::Directory => self.subdirectory(here, name, waiting),
            FileType::RegularFile | FileType::Symlink => self.file(here, name, &stat),
            _ => {
                // FIFOs, sockets and devices never get onto a disk of ours. Leaving one out must not bring back what it
                // hides in the layers below.
                here.has_substitute |= !is_whiteout(&stat);
                self.whiteout(here, name)
            }
        }
    }

    fn subdirectory(&mut self, here: &mut Here<'_>, name: &OsStr, waiting: &mut Vec<DirId>) -> Result<(), LayerError> {
        let id = match self.known(here, name) {
            Some(What::Directory(id)) => id,
            _ => {
                self.discard(here, name)?;
                let name = Name::from(name);
                let id = self.staging.make_dir(here.target, here.id, &name)?;
                self.contents.push(Contents::default());
                self.note(here, name, What::Directory(id));
                id
            }
        };
        waiting.push(id);
        Ok(())
    }

    fn whiteout(&mut self, here: &mut Here<'_>, name: &OsStr) -> Result<(), LayerError> {
        if self.known(here, name) == Some(What::Whiteout) {
            return Ok(());
        }
        self.discard(here, name)?;
        self.staging.whiteout(here.target, here.id, name)?;
        self.note(here, Arc::from(name), What::Whiteout);
        Ok(())
    }

    fn file(&mut self, here: &mut Here<'_>, name: &OsStr, stat: &Stat) -> Result<(), LayerError> {
        let print = Print::of(stat);
        let (inode, is_calm) = ((print.device, print.inode), self.calm.covers(&print));
        let known = self.known(here, name);
        if let Some(&id) = self.by_inode.get(&inode) {
            let copy = &self.copies[id];
            if copy.print == print && (copy.is_calm || copy.pass == self.pass.number) {
                return if known == Some(What::File(id)) { Ok(()) } else { self.link(here, name, id) };
            }
        }
        if !is_calm && !self.pass.is_still {
            // It would have to be copied again. What the layer has of it is seen to in the walk that counts.
            return Ok(());
        }
        self.discard(here, name)?;
        if !self.share(here, name, stat) && !self.copy(here, name, &print)? {
            return Ok(());
        }
        let name = Name::from(name);
        self.by_inode.insert(inode, self.copies.len());
        let what = What::File(self.copies.len());
        self.copied += 1;
        self.copies.push(Copy { print, is_calm, pass: self.pass.number, at: (here.id, name.clone()) });
        self.note(here, name, what);
        Ok(())
    }

    /// A further name of a file that the layer has, maybe only in its trash.
    fn link(&mut self, here: &mut Here<'_>, name: &OsStr, id: CopyId) -> Result<(), LayerError> {
        self.discard(here, name)?;
        let (dir, old) = self.copies[id].at.clone();
        self.staging.link((dir, &old), here.target, (here.id, name))?;
        let name = Name::from(name);
        self.copies[id].at = (here.id, name.clone());
        self.note(here, name, What::File(id));
        Ok(())
    }

    fn share(&mut self, here: &Here<'_>, name: &OsStr, stat: &Stat) -> bool {
        let (print, most) = (Print::of(stat), self.links_max);
        self.previous.as_mut().is_some_and(|previous| previous.share(&print, stat.st_nlink, most, here.target, name))
    }

    /// False where the file was changed meanwhile.
    fn copy(&mut self, here: &Here<'_>, name: &OsStr, print: &Print) -> Result<bool, LayerError> {
        let Some(file) = self.seen(handle_at(here.source, name), "open", here.id, name)? else { return Ok(false) };
        let Some(stat) = self.seen(fstat(&file), "look at", here.id, name)? else { return Ok(false) };
        if Print::of(&stat) != *print {
            return Ok(self.seen::<()>(Err(Errno::STALE), "open", here.id, name)?.is_some());
        }
        let copied = self.copier.copy(file.as_fd(), &stat, here.target, name);
        Ok(self.seen(copied, "copy", here.id, name)?.is_some())
    }

    /// What the layer has by this name; it is not going to be forgotten.
    fn known(&mut self, here: &Here<'_>, name: &OsStr) -> Option<What> {
        let entry = self.contents[here.id.0 as usize].entries.get_mut(name)?;
        entry.pass = self.pass.number;
        Some(entry.what)
    }

    fn note(&mut self, here: &mut Here<'_>, name: Name, what: What) {
        here.is_touched = true;
        self.contents[here.id.0 as usize].entries.insert(name, Entry { what, pass: self.pass.number });
    }

    /// Takes out of the layer what has this name, if anything has.
    fn discard(&mut self, here: &mut Here<'_>, name: &OsStr) -> Result<(), LayerError> {
        let Some((name, entry)) = self.contents[here.id.0 as usize].entries.remove_entry(name) else { return Ok(()) };
        here.is_touched = true;
        let there = self.staging.discard(here.target, here.id, &name)?;
        match entry.what {
            What::Directory(id) => self.staging.dirs.moved(id, TRASH, there),
            What::File(id) if self.copies[id].at == (here.id, name) => self.copies[id].at = (TRASH, there),
            What::File(_) | What::Whiteout => {}
        }
        Ok(())
    }

    /// Takes out of the layer what this walk didn't find.
    fn forget_gone(&mut self, here: &mut Here<'_>) -> Result<(), LayerError> {
        let entries = &self.contents[here.id.0 as usize].entries;
        let gone: Vec<Name> =
            entries.iter().filter(|(_, entry)| entry.pass != self.pass.number).map(|(name, _)| name.clone()).collect();
        gone.iter().try_for_each(|name| self.discard(here, name))
    }

    /// Gives the copy of a directory the owner, mode, attributes and times of the original.
    fn dress(&mut self, here: &Here<'_>, stat: &Stat) -> Result<(), LayerError> {
        let print = Print::of(stat);
        let (nameless, is_calm) = (OsStr::new(""), self.calm.covers(&print));
        let contents = &mut self.contents[here.id.0 as usize];
        let is_dressed = contents.print == Some(print);
        if is_dressed && !here.is_touched {
            return Ok(());
        }
        contents.print = None;
        if !is_calm && !self.pass.is_still {
            return Ok(());
        }
        if !is_dressed {
            // The attribute lets a listing leave whiteouts out where there is nothing below: see `xattr`.
            let further: &[Attribute] = if here.has_substitute { &[(xattr::ORIGIN.to_owned(), Vec::new())] } else { &[] };
            let dressed = self.copier.directory(here.source, stat, here.target, xattr::of_directory, further);
            if self.seen(dressed, "copy", here.id, nameless)?.is_none() {
                return Ok(());
            }
        }
        set_times(here.target, OsStr::new("."), stat)
            .map_err(|e| self.staging.error("set the times of", here.id, nameless, e))?;
        self.contents[here.id.0 as usize].print = is_calm.then_some(print);
        Ok(())
    }
}
