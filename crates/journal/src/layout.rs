//! Which files make up a journal, and what they are called.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The file that leads from time to offset.
pub(crate) const INDEX_NAME: &str = "index";
const SUFFIX: &str = ".seg";
const DIGITS: usize = 20;

/// Where the segment is that begins at `start`.
pub(crate) fn segment_path(dir: &Path, start: u64) -> PathBuf {
    dir.join(format!("{start:0DIGITS$}{SUFFIX}"))
}

/// The offset in a segment's name; `None` for every other file.
fn segment_start(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SUFFIX)?;
    (digits.len() == DIGITS && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// The starts of all segments, in order; none where the directory doesn't exist.
///
/// A listing that runs beside a writer can miss segments that appear or vanish meanwhile. It never
/// misses one that was there before it began and is there after it ended.
pub(crate) fn list(dir: &Path) -> io::Result<Vec<u64>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut starts = Vec::new();
    for entry in entries {
        if let Some(start) = entry?.file_name().to_str().and_then(segment_start) {
            starts.push(start);
        }
    }
    starts.sort_unstable();
    Ok(starts)
}

/// The bytes that one segment holds: from `start` up to, not including, `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub start: u64,
    pub end: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_names_are_segments() {
        let cases = [
            ("00000000000000000000.seg", Some(0)),
            ("00000000000001048576.seg", Some(1 << 20)),
            ("18446744073709551615.seg", Some(u64::MAX)),
            ("18446744073709551616.seg", None),
            ("0.seg", None),
            ("+0000000000000000001.seg", None),
            ("00000000000000000000.seg.tmp", None),
            ("index", None),
            ("", None),
        ];
        for (name, start) in cases {
            assert_eq!(segment_start(name), start, "{name}");
        }
        let path = segment_path(Path::new("/j"), 7);
        assert_eq!(segment_start(path.file_name().unwrap().to_str().unwrap()), Some(7));
    }

    #[test]
    fn a_missing_directory_is_an_empty_journal() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(list(&dir.path().join("none")).unwrap(), Vec::<u64>::new());
    }
}
