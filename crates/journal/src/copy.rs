//! A journal as it stood at one offset, in another place.

use crate::layout::{self, segment_path};
use model::Offset;
use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::DirBuilderExt,
    path::Path,
};

/// Copies what the journal in `from` holds below `tail` into the directory `into`, which is made (0700) and must not hold
/// one already. What can't grow any more is shared with the original by hard link, where both lie on one file system; the
/// rest is copied. The index of times stays behind. The original may be written to meanwhile, and its middle may be
/// dropped: that is a gap in the copy, too. Synced. A journal that isn't there is an empty one.
///
/// # Errors
/// The system refuses.
pub fn copy(from: &Path, into: &Path, tail: Offset) -> io::Result<()> {
    let starts: Vec<u64> = layout::list(from)?.into_iter().filter(|start| *start <= tail.0).collect();
    let Some((&last, whole)) = starts.split_last() else { return Ok(()) };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(into)?;
    for &start in whole {
        match share(&segment_path(from, start), &segment_path(into, start)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    let mut rest = File::open(segment_path(from, last))?.take(tail.0 - last);
    let mut copied = File::options().write(true).create_new(true).open(segment_path(into, last))?;
    io::copy(&mut rest, &mut copied)?;
    copied.sync_all()?;
    File::open(into)?.sync_all()
}

fn share(from: &Path, into: &Path) -> io::Result<()> {
    match fs::hard_link(from, into) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            fs::copy(from, into)?;
            File::open(into)?.sync_all()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Retention, Writer};

    const SMALL: Retention = Retention { head_bytes: 8, tail_bytes: 1 << 20, segment_bytes: 8 };

    fn bytes(dir: &Path) -> Vec<u8> {
        let starts = layout::list(dir).unwrap();
        starts.into_iter().flat_map(|start| fs::read(segment_path(dir, start)).unwrap()).collect()
    }

    #[test]
    fn a_copy_ends_where_it_should_and_goes_on_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let mut writer = Writer::open(&a, SMALL).unwrap();
        writer.append(b"0123456789abcdefghij").unwrap();
        for tail in [0u64, 1, 8, 15, 16, 17, 20] {
            let _ = fs::remove_dir_all(&b);
            copy(&a, &b, Offset(tail)).unwrap();
            assert_eq!(Writer::open(&b, SMALL).unwrap().tail(), Offset(tail), "{tail}");
            assert_eq!(bytes(&b), &b"0123456789abcdefghij"[..usize::try_from(tail).unwrap()]);
        }
        let mut copied = Writer::open(&b, SMALL).unwrap();
        copied.append(b"other").unwrap();
        writer.append(b"klmno").unwrap();
        assert_eq!(bytes(&a), b"0123456789abcdefghijklmno");
        assert_eq!(bytes(&b), b"0123456789abcdefghijother");
    }

    #[test]
    fn gaps_are_kept_and_what_is_not_there_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        copy(&a, &b, Offset(5)).unwrap();
        assert!(!b.exists());
        let mut writer = Writer::open(&a, SMALL).unwrap();
        writer.append(b"abc").unwrap();
        writer.skip_to(Offset(100)).unwrap();
        copy(&a, &b, Offset(100)).unwrap();
        assert_eq!(Writer::open(&b, SMALL).unwrap().tail(), Offset(100));
        assert_eq!(bytes(&b), b"abc");
    }
}
