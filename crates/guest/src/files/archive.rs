//! A file or directory as a tar stream.

use super::{absolute, single::open_regular, transfer::Sink};
use crate::guest::path_error;
use model::link_stays_inside;
use std::{
    collections::HashMap,
    fs::{self, Metadata},
    io::{self, Read, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use tar::{Builder, EntryType, Header};
use wire::{Code, WireError, files::FileReply};

/// Sends the tar, for a user's own computer. Links that stay inside stay links, a second name of a file is a hard link;
/// links that lead out, setuid bits, FIFOs, sockets and devices, other file systems and files that vanish meanwhile are
/// left out.
pub fn archive(path: &str, sink: &mut Sink) -> Result<(), WireError> {
    let path = absolute(path)?;
    let failed = |e: io::Error| path_error(&path, &e);
    let top = Path::new(&path);
    let meta = fs::symlink_metadata(top).map_err(failed)?;
    if !(meta.is_dir() || meta.is_file() || meta.is_symlink()) {
        return Err(WireError::new(Code::NotRegular, format!("{path}: not a file or directory")));
    }
    if meta.is_dir() {
        fs::read_dir(top).map_err(failed)?;
    } else if meta.is_file() {
        open_regular(&path)?;
    }
    sink.answer(FileReply::Streaming);
    let name = top.file_name().map_or_else(|| PathBuf::from("."), PathBuf::from);
    let mut archive = Archive { builder: Builder::new(&mut *sink), device: meta.dev(), names: HashMap::new() };
    archive.add(top, &name, &meta).and_then(|()| archive.builder.finish()).map_err(failed)?;
    drop(archive);
    sink.flush().map_err(failed)
}

struct Archive<'a> {
    builder: Builder<&'a mut Sink>,
    device: u64,
    /// First name of each file that has several, by inode.
    names: HashMap<u64, PathBuf>,
}

impl Archive<'_> {
    fn add(&mut self, top: &Path, name: &Path, meta: &Metadata) -> io::Result<()> {
        // The name of what is archived is one part of every name: what is right below it is at depth 0.
        // A list of its own instead of recursion: depth is the archive's owner's choice.
        let mut queue = vec![(top.to_owned(), name.to_owned(), meta.clone())];
        while let Some((path, name, meta)) = queue.pop() {
            let mut header = Header::new_gnu();
            header.set_metadata(&meta);
            header.set_mode(meta.mode() & 0o777);
            if meta.is_dir() {
                self.builder.append_data(&mut header, &name, io::empty())?;
                if meta.dev() == self.device {
                    queue.extend(children(&path, &name));
                }
            } else if meta.is_symlink() {
                let depth = name.components().count().saturating_sub(2);
                let Some(target) = fs::read_link(&path).ok().filter(|target| link_stays_inside(depth, target)) else { continue };
                header.set_size(0);
                self.builder.append_link(&mut header, &name, target)?;
            } else if meta.is_file() {
                self.add_file(&path, name, &meta, header)?;
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: &Path, name: PathBuf, meta: &Metadata, mut header: Header) -> io::Result<()> {
        if meta.nlink() > 1 {
            if let Some(first) = self.names.get(&meta.ino()) {
                header.set_entry_type(EntryType::Link);
                header.set_size(0);
                return self.builder.append_link(&mut header, &name, first);
            }
            self.names.insert(meta.ino(), name.clone());
        }
        let Some(text) = path.to_str() else { return self.add_bytes(fs::File::open(path), &name, meta, header) };
        let opened = open_regular(text).map(|(file, _)| file).map_err(|e| io::Error::other(e.message));
        self.add_bytes(opened, &name, meta, header)
    }

    /// The size was promised in the header: a file that shrinks is filled up, one that grows is cut.
    fn add_bytes(&mut self, file: io::Result<fs::File>, name: &Path, meta: &Metadata, mut header: Header) -> io::Result<()> {
        let Ok(file) = file else { return Ok(()) };
        let bytes = file.take(meta.len()).chain(io::repeat(0)).take(meta.len());
        self.builder.append_data(&mut header, name, bytes)
    }
}

fn children(path: &Path, name: &Path) -> Vec<(PathBuf, PathBuf, Metadata)> {
    let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
    let mut names: Vec<_> = entries.flatten().map(|e| e.file_name()).collect();
    // Taken from the end of the list, so the last comes first.
    names.sort_by(|a, b| b.cmp(a));
    let child = |child: std::ffi::OsString| {
        let meta = fs::symlink_metadata(path.join(&child)).ok()?;
        Some((path.join(&child), name.join(&child), meta))
    };
    names.into_iter().filter_map(child).collect()
}
