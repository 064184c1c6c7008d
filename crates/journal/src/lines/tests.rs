use super::*;
use std::{fs, path::Path};

fn small() -> Retention {
    Retention { head_bytes: 8, tail_bytes: 1 << 20, segment_bytes: 8 }
}

fn line(at: u64, text: &str) -> LineItem {
    LineItem::Line { at: Offset(at), bytes: text.as_bytes().to_vec() }
}

fn gap(from: u64, to: u64) -> LineItem {
    LineItem::Gap { from: Offset(from), to: Offset(to) }
}

fn all(dir: &Path) -> Lines {
    read_lines(&mut Reader::open(dir), Offset::ZERO, usize::MAX).unwrap()
}

#[test]
fn lines_cross_segments_and_come_whole() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = LineWriter::open(dir.path(), small()).unwrap();
    assert_eq!(writer.append(br#"{"a":1}"#).unwrap(), Offset(0));
    assert_eq!(writer.append(br#"{"long":"0123456789"}"#).unwrap(), Offset(8));
    let found = all(dir.path());
    assert_eq!(found.items, [line(0, r#"{"a":1}"#), line(8, r#"{"long":"0123456789"}"#)]);
    assert_eq!(found.next, writer.tail());
    let mut reader = Reader::open(dir.path());
    let first = read_lines(&mut reader, Offset::ZERO, 1).unwrap();
    assert_eq!((first.items.len(), first.next), (1, Offset(8)), "at least one line, however small the bound");
    assert_eq!(read_lines(&mut reader, first.next, 1).unwrap().items, found.items[1..]);
    assert_eq!(read_lines(&mut reader, found.next, 1).unwrap().items, []);
}

#[test]
fn a_cut_line_is_never_delivered() {
    // The cut is behind so many bytes of the two lines "one\n" and "two\n".
    let table: [(usize, Vec<LineItem>); 4] = [
        (8, vec![line(0, "one"), line(4, "two"), line(8, "new")]),
        (7, vec![line(0, "one"), gap(4, 9), line(9, "new")]),
        (5, vec![line(0, "one"), gap(4, 7), line(7, "new")]),
        (4, vec![line(0, "one"), line(4, "new")]),
    ];
    for (kept, want) in table {
        let dir = tempfile::tempdir().unwrap();
        let mut raw = Writer::open(dir.path(), small()).unwrap();
        raw.append(&b"one\ntwo\n"[..kept]).unwrap();
        drop(raw);
        let before = all(dir.path());
        let mut writer = LineWriter::open(dir.path(), small()).unwrap();
        let at = writer.append(b"new").unwrap();
        assert_eq!(all(dir.path()).items, want, "cut after {kept}");
        let rest = read_lines(&mut Reader::open(dir.path()), before.next, usize::MAX).unwrap();
        assert_eq!(rest.items.last(), Some(&LineItem::Line { at, bytes: b"new".to_vec() }), "a follower sees it, too");
    }
}

#[test]
fn a_crash_while_mending_is_mended() {
    let dir = tempfile::tempdir().unwrap();
    let mut raw = Writer::open(dir.path(), small()).unwrap();
    raw.append(b"one\ncut").unwrap();
    raw.skip_to(Offset(8)).unwrap();
    drop(raw);
    assert_eq!(all(dir.path()), Lines { items: vec![line(0, "one")], next: Offset(4) });
    let mut writer = LineWriter::open(dir.path(), small()).unwrap();
    writer.append(b"new").unwrap();
    let found = all(dir.path());
    assert_eq!(found.items, [line(0, "one"), gap(4, 10), line(10, "new")]);
    assert_eq!(found.next, writer.tail());
}

#[test]
fn after_retention_lines_begin_at_a_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = LineWriter::open(dir.path(), small()).unwrap();
    for text in ["aaaaaaa", "bbbbbb", "cccccccccccc", "dd"] {
        writer.append(text.as_bytes()).unwrap();
    }
    // Bytes 8 to 15 hold all of b and the beginning of c.
    fs::remove_file(crate::layout::segment_path(dir.path(), 8)).unwrap();
    assert_eq!(all(dir.path()).items, [line(0, "aaaaaaa"), gap(8, 28), line(28, "dd")]);
}

#[test]
fn what_is_no_line_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = LineWriter::open(dir.path(), Retention::default()).unwrap();
    assert!(matches!(writer.append(b""), Err(LineAppendError::NotALine)));
    assert!(matches!(writer.append(b"a\nb"), Err(LineAppendError::NotALine)));
    assert!(matches!(writer.append(&vec![b'a'; MAX_LINE + 1]), Err(LineAppendError::TooLong(_))));
    writer.append(&vec![b'a'; MAX_LINE]).unwrap();
    assert_eq!(all(dir.path()).items.len(), 1);
    let at = writer.tail();
    drop(writer);
    Writer::open(dir.path(), Retention::default()).unwrap().append(&vec![b'b'; MAX_LINE + 1]).unwrap();
    let found = all(dir.path());
    assert_eq!((found.items.len(), found.next), (1, at), "what is right comes first");
    let result = read_lines(&mut Reader::open(dir.path()), found.next, 1);
    assert!(matches!(result, Err(LineReadError::TooLong { at: a }) if a == at), "{result:?}");
}
