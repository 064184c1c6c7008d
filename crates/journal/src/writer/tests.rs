use super::*;
use crate::{Chunk, Range, Reader};

const SMALL: Retention = Retention { head_bytes: 4, tail_bytes: 16, segment_bytes: 8 };

fn files(dir: &Path) -> Vec<(u64, u64)> {
    let len = |start| fs::metadata(segment_path(dir, start)).unwrap().len();
    layout::list(dir).unwrap().into_iter().map(|start| (start, len(start))).collect()
}

#[test]
fn nothing_is_made_before_the_first_byte() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("a/b");
    let mut writer = Writer::open(&dir, SMALL).unwrap();
    writer.append(b"").unwrap();
    writer.skip_to(Offset(0)).unwrap();
    writer.sync().unwrap();
    assert!(!writer.is_dirty());
    assert!(!dir.exists());
    let mut reader = Reader::open(&dir);
    assert_eq!(reader.range().unwrap(), Range { first: Offset(0), tail: Offset(0) });
    assert_eq!(reader.read(Offset(0), 9).unwrap(), Chunk::End);

    assert_eq!(writer.append(b"x").unwrap(), Offset(1));
    assert!(writer.is_dirty());
    writer.sync().unwrap();
    assert!(!writer.is_dirty());
    assert_eq!(reader.read(Offset(0), 9).unwrap(), Chunk::Data { offset: Offset(0), bytes: b"x".to_vec() });
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(segment_path(&dir, 0)).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn segments_follow_the_head_and_the_size() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), SMALL).unwrap();
    writer.append(&[1; 14]).unwrap();
    assert_eq!(files(dir.path()), [(0, 4), (4, 8), (12, 2)]);
    writer.append(&[2; 30]).unwrap();
    assert_eq!(files(dir.path()), [(0, 4), (20, 8), (28, 8), (36, 8)], "dropped when the last one was made, at 36");
    let mut reader = Reader::open(dir.path());
    assert_eq!(reader.read(Offset(4), 9).unwrap(), Chunk::Gap { from: Offset(4), to: Offset(20) });
    assert_eq!(reader.range().unwrap(), Range { first: Offset(0), tail: Offset(44) });
}

#[test]
fn a_gap_lasts_without_a_byte_behind_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), Retention::default()).unwrap();
    writer.append(b"ab").unwrap();
    for to in [5, 7, 7] {
        writer.skip_to(Offset(to)).unwrap();
    }
    assert!(!writer.is_dirty());
    assert!(matches!(writer.skip_to(Offset(6)), Err(SkipError::Backwards { tail: Offset(7), .. })));
    drop(writer);
    assert_eq!(files(dir.path()), [(0, 2), (7, 0)], "the marker at 5 marks nothing");
    let mut writer = Writer::open(dir.path(), Retention::default()).unwrap();
    assert_eq!(writer.tail(), Offset(7));
    let mut reader = Reader::open(dir.path());
    assert_eq!(reader.read(Offset(2), 9).unwrap(), Chunk::Gap { from: Offset(2), to: Offset(7) });
    assert_eq!(reader.read(Offset(7), 9).unwrap(), Chunk::End);
    assert!(matches!(reader.read(Offset(8), 9), Err(crate::ReadError::BeyondTail { tail: Offset(7), .. })));
    writer.append(b"c").unwrap();
    assert_eq!(reader.read(Offset(7), 9).unwrap(), Chunk::Data { offset: Offset(7), bytes: b"c".to_vec() });
}

#[test]
fn one_writer_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("j");
    let mut first = Writer::open(&path, SMALL).unwrap();
    let mut second = Writer::open(&path, SMALL).unwrap();
    first.append(b"one").unwrap();
    assert!(matches!(Writer::open(&path, SMALL), Err(OpenError::Busy(_))));
    assert_eq!(second.append(b"two").unwrap_err().accepted(), 0, "the directory came to be locked meanwhile");
    drop(first);
    assert_eq!(second.append(b"two").unwrap_err().accepted(), 0, "its view is old");
    assert_eq!(Writer::open(&path, SMALL).unwrap().tail(), Offset(3));
}

#[test]
fn a_segment_in_the_way_is_an_error_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), SMALL).unwrap();
    writer.append(b"ab").unwrap();
    fs::write(segment_path(dir.path(), 4), "in the way").unwrap();
    let error = writer.append(b"cdef").unwrap_err();
    assert_eq!((error.accepted(), error.tail()), (2, Offset(4)));
    fs::remove_file(segment_path(dir.path(), 4)).unwrap();
    assert_eq!(writer.append(&b"cdef"[error.accepted()..]).unwrap(), Offset(6));
    let mut reader = Reader::open(dir.path());
    assert_eq!(reader.read(Offset(4), 9).unwrap(), Chunk::Data { offset: Offset(4), bytes: b"ef".to_vec() });
}

#[test]
fn offsets_end_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), SMALL).unwrap();
    writer.skip_to(Offset(u64::MAX - 1)).unwrap();
    let error = writer.append(b"ab").unwrap_err();
    assert_eq!((error.accepted(), error.tail()), (1, Offset(u64::MAX)));
}

#[test]
fn flushing_beside_appends_loses_no_work() {
    let dir = tempfile::tempdir().unwrap();
    let keep_all = Retention { tail_bytes: 1 << 20, ..SMALL };
    let mut writer = Writer::open(dir.path(), keep_all).unwrap();
    writer.append(&[0; 30]).unwrap();
    let work = writer.take_unsynced().unwrap();
    assert!(!writer.is_dirty());
    writer.append(&[0; 30]).unwrap();
    work.sync().unwrap();
    assert!(writer.is_dirty(), "what came meanwhile");
    writer.put_back(work);
    assert_eq!(writer.unsynced.open_files(), files(dir.path()).len());
    writer.append(&[0; 1000]).unwrap();
    assert!(writer.unsynced.open_files() <= MAX_UNSYNCED_FILES);
    writer.sync().unwrap();
    assert!(!writer.is_dirty());
}

#[test]
fn timed_appends_are_found_by_time_after_a_reopen() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), Retention::default()).unwrap();
    writer.append_at(b"old", Timestamp(1000)).unwrap();
    writer.sync().unwrap();
    let index = crate::TimeIndex::open(dir.path());
    assert_eq!(index.offset_at(Timestamp(60_000)).unwrap(), Offset(3), "all is old");
    drop(writer);
    let mut writer = Writer::open(dir.path(), Retention::default()).unwrap();
    writer.append_at(b"new", Timestamp(90_000)).unwrap();
    assert_eq!(index.offset_at(Timestamp(60_000)).unwrap(), Offset(3));
    assert_eq!(index.time_of(Offset(4)).unwrap(), Some(Timestamp(90_000)));
}
