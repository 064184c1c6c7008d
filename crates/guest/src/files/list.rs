//! Listing a directory, as lines of JSON.

use super::{absolute, single::describe, transfer::Sink};
use crate::guest::path_error;
use std::{
    collections::VecDeque,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};
use wire::{WireError, files::FileReply};

/// Sends a directory's entries, its own first, then those of its directories down to `depth`. Links aren't followed.
/// Entries that vanish meanwhile, and directories that can't be read, are left out.
pub fn list(path: &str, depth: u32, sink: &mut Sink) -> Result<(), WireError> {
    let path = absolute(path)?;
    let failed = |e: io::Error| path_error(&path, &e);
    let mut entries = fs::read_dir(&path).map_err(failed)?;
    sink.answer(FileReply::Streaming);
    let mut queue = VecDeque::from([(PathBuf::from(&path), depth.max(1))]);
    let mut is_first = true;
    while let Some((dir, depth)) = queue.pop_front() {
        if !is_first {
            let Ok(next) = fs::read_dir(&dir) else { continue };
            entries = next;
        }
        is_first = false;
        let mut names: Vec<_> = entries.by_ref().flatten().map(|e| e.file_name()).collect();
        names.sort();
        for name in names {
            let path = dir.join(name);
            if let Some(is_dir) = line(&path, sink).map_err(failed)?
                && is_dir
                && depth > 1
            {
                queue.push_back((path, depth - 1));
            }
        }
    }
    sink.flush().map_err(failed)
}

fn line(path: &Path, sink: &mut Sink) -> io::Result<Option<bool>> {
    let Ok(meta) = fs::symlink_metadata(path) else { return Ok(None) };
    serde_json::to_writer(&mut *sink, &describe(path, &meta))?;
    sink.write_all(b"\n")?;
    Ok(Some(meta.is_dir()))
}
