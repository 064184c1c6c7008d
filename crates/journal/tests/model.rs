//! A journal through random lives, held against a plain list of bytes.
#![allow(clippy::unwrap_used)]

use journal::{Chunk, ReadError, Reader, Retention, Writer};
use model::Offset;
use proptest::prelude::*;
use std::{fs, path::Path};

#[derive(Debug, Clone)]
enum Step {
    Append(Vec<u8>),
    Skip(u64),
    Sync,
    Reopen,
    /// A power loss takes so many bytes off the end of the last segment.
    Truncate(u64),
    Read {
        from: prop::sample::Index,
        max: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => prop::collection::vec(any::<u8>(), 0..60).prop_map(Step::Append),
        1 => (0u64..40).prop_map(Step::Skip),
        1 => Just(Step::Sync),
        1 => Just(Step::Reopen),
        1 => (0u64..30).prop_map(Step::Truncate),
        4 => (any::<prop::sample::Index>(), 0usize..50).prop_map(|(from, max)| Step::Read { from, max }),
    ]
}

fn segments(dir: &Path) -> Vec<(u64, u64)> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut found: Vec<(u64, u64)> = entries
        .map(|e| e.unwrap())
        .map(|e| (e.file_name().to_str().unwrap()[..20].parse().unwrap(), e.metadata().unwrap().len()))
        .collect();
    found.sort_unstable();
    found
}

/// What the journal must hold: a byte, or `None` in a gap; and up to where bytes may have been dropped.
struct Expected {
    bytes: Vec<Option<u8>>,
    may_be_gone: u64,
    retention: Retention,
}

impl Expected {
    fn grown(&mut self) {
        self.may_be_gone = self.may_be_gone.max((self.bytes.len() as u64).saturating_sub(self.retention.tail_bytes));
    }

    /// Checks one answer and returns where it ends.
    fn check(&self, from: u64, max: usize, answer: Result<Chunk, ReadError>) -> Result<u64, TestCaseError> {
        let tail = self.bytes.len() as u64;
        match answer {
            Ok(Chunk::Data { offset, bytes }) => {
                prop_assert_eq!(offset.0, from);
                prop_assert!(!bytes.is_empty() && bytes.len() <= max.max(1));
                let want = self.bytes.get(from as usize..from as usize + bytes.len());
                let got: Vec<_> = bytes.into_iter().map(Some).collect();
                prop_assert_eq!(Some(&got[..]), want);
                Ok(from + got.len() as u64)
            }
            Ok(Chunk::Gap { from: start, to }) => {
                prop_assert_eq!(start.0, from);
                prop_assert!(from < to.0 && to.0 <= tail);
                for at in from..to.0 {
                    let gone = at >= self.retention.head_bytes && at < self.may_be_gone;
                    prop_assert!(gone || self.bytes[at as usize].is_none(), "byte {} must be there", at);
                }
                Ok(to.0)
            }
            Ok(Chunk::End) => {
                prop_assert_eq!(from, tail);
                Ok(from)
            }
            Err(ReadError::BeyondTail { tail: told, .. }) => {
                prop_assert!(from > tail);
                prop_assert_eq!(told.0, tail);
                Ok(tail)
            }
            Err(e) => Err(TestCaseError::fail(e.to_string())),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn a_journal_is_a_list_of_bytes(
        head_bytes in 0u64..40, tail_bytes in 0u64..120, segment_bytes in 0u64..30,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("journal");
        let retention = Retention { head_bytes, tail_bytes, segment_bytes };
        let mut expected = Expected { bytes: Vec::new(), may_be_gone: 0, retention };
        let mut writer = Some(Writer::open(&dir, retention).unwrap());
        let mut old_reader = Reader::open(&dir);
        for step in steps {
            let open = writer.as_mut().unwrap();
            match step {
                Step::Append(bytes) => {
                    let tail = open.append(&bytes).unwrap();
                    expected.bytes.extend(bytes.into_iter().map(Some));
                    prop_assert_eq!(tail.0, expected.bytes.len() as u64);
                }
                Step::Skip(by) => {
                    open.skip_to(open.tail().plus(by as usize)).unwrap();
                    expected.bytes.resize(expected.bytes.len() + by as usize, None);
                    prop_assert!(!open.is_dirty());
                }
                Step::Sync => {
                    open.sync().unwrap();
                    prop_assert!(!open.is_dirty());
                }
                Step::Reopen => {
                    drop(writer.take());
                    writer = Some(Writer::open(&dir, retention).unwrap());
                }
                Step::Truncate(by) => {
                    drop(writer.take());
                    if let Some(&(start, len)) = segments(&dir).last() {
                        let left = len.saturating_sub(by);
                        let path = dir.join(format!("{start:020}.seg"));
                        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(left).unwrap();
                        expected.bytes.truncate((start + left) as usize);
                    }
                    writer = Some(Writer::open(&dir, retention).unwrap());
                }
                Step::Read { from, max } => {
                    let from = from.index(expected.bytes.len() + 5) as u64;
                    expected.check(from, max, old_reader.read(Offset(from), max))?;
                }
            }
            expected.grown();
            prop_assert_eq!(writer.as_ref().unwrap().tail().0, expected.bytes.len() as u64);
        }
        // From the start to the end, by a reader that was there all along and by a new one.
        for mut reader in [old_reader, Reader::open(&dir)] {
            let mut at = 0;
            while at < expected.bytes.len() as u64 {
                let next = expected.check(at, 17, reader.read(Offset(at), 17))?;
                prop_assert!(next > at);
                at = next;
            }
            prop_assert_eq!(reader.range().unwrap().tail.0, at);
        }
        let kept: u64 = segments(&dir).iter().map(|s| s.1).sum();
        let bound = head_bytes + tail_bytes + 2 * segment_bytes.max(1);
        prop_assert!(kept <= bound, "{} bytes kept, at most {} asked for", kept, bound);
    }
}
