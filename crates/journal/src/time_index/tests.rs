use super::*;
use proptest::prelude::*;

fn index_of(notes: &[(i64, u64)], closed: bool) -> (tempfile::TempDir, TimeIndex, u64) {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = IndexWriter::open(dir.path(), 0).unwrap();
    let mut tail = 0;
    for &(at, len) in notes {
        writer.note(tail, tail + len, Timestamp(at));
        tail += len;
    }
    if closed {
        writer.close();
    }
    let index = TimeIndex::open(dir.path());
    (dir, index, tail)
}

#[test]
fn entries_are_big_endian_time_then_offset() {
    let entry = Entry { at: -2, offset: 0x0102 };
    let raw = entry.encode();
    assert_eq!(raw, [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, 0, 0, 0, 0, 0, 0, 1, 2]);
    assert_eq!(Entry::decode(raw), entry);
}

#[test]
fn silence_separates_old_from_new() {
    let (_dir, index, _) = index_of(&[(1000, 10), (1050, 10), (9000, 5), (9100, 5)], true);
    let cases = [(0, 0), (1000, 0), (1001, 0), (1051, 20), (5000, 20), (9000, 20), (9001, 20), (9101, 30), (99999, 30)];
    for (at, offset) in cases {
        assert_eq!(index.offset_at(Timestamp(at)).unwrap(), Offset(offset), "at {at}");
    }
    for (offset, at) in [(0, 1000), (19, 1000), (20, 9000), (29, 9000), (30, 9100)] {
        assert_eq!(index.time_of(Offset(offset)).unwrap(), Some(Timestamp(at)), "offset {offset}");
    }
}

#[test]
fn bytes_of_the_same_millisecond_stay_together() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = IndexWriter::open(dir.path(), 0).unwrap();
    writer.note(0, 10, Timestamp(1000));
    writer.close();
    writer.note(10, 20, Timestamp(1000));
    assert_eq!(TimeIndex::open(dir.path()).offset_at(Timestamp(1000)).unwrap(), Offset::ZERO);
}

#[test]
fn a_missing_index_sends_to_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let index = TimeIndex::open(dir.path());
    assert_eq!(index.offset_at(Timestamp(5)).unwrap(), Offset::ZERO);
    assert_eq!(index.time_of(Offset(5)).unwrap(), None);
}

#[test]
fn what_a_power_loss_leaves_is_cut_off() {
    let (dir, index, _) = index_of(&[(1000, 10), (2000, 10), (3000, 10)], false);
    let path = dir.path().join(INDEX_NAME);
    let good = std::fs::read(&path).unwrap();
    let whole = good.len() as u64;
    for bad in [&[7u8; 5][..], &[0u8; 32][..], &Entry { at: 5000, offset: 999 }.encode()[..]] {
        std::fs::write(&path, [&good[..], bad].concat()).unwrap();
        IndexWriter::open(dir.path(), 30).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), whole, "after {bad:?}");
    }
    std::fs::write(&path, [&good[..], &[1; 5]].concat()).unwrap();
    assert_eq!(index.offset_at(Timestamp(2500)).unwrap(), Offset(20), "a torn entry is no entry to a reader either");
    // Bytes after offset 15 are gone: an entry that speaks of them is, too.
    let writer = IndexWriter::open(dir.path(), 15).unwrap();
    assert_eq!(writer.last, Some(Entry { at: 2000, offset: 10 }));
}

#[test]
fn growth_slows_down() {
    let a_week_of_syncs = 7 * 86_400 * 5;
    let mut count = 0;
    let (mut now, mut last) = (0i64, i64::MIN / 2);
    // The rule of `note` and `close` without the file: a note and a sync every 200 ms.
    for _ in 0..a_week_of_syncs {
        if count < DOUBLE_EVERY || now - last >= interval_ms(count) {
            count += 1;
            last = now;
        }
        now += 200;
    }
    assert!(count < 1 << 20, "{count} entries");
    assert!(interval_ms(u64::MAX) > 0, "no overflow");
}

proptest! {
    #[test]
    fn answers_are_never_too_late(
        steps in prop::collection::vec((-300i64..700, 1u64..50), 1..60), closed: bool, ask in -1000i64..40_000,
    ) {
        let mut now = 1000;
        let notes: Vec<(i64, u64)> = steps.iter().map(|&(step, len)| { now += step; (now, len) }).collect();
        let (_dir, index, tail) = index_of(&notes, closed);
        let mut offset = 0;
        let mut right = tail;
        for &(at, len) in &notes {
            if at >= ask { right = offset; break; }
            offset += len;
        }
        let got = index.offset_at(Timestamp(ask)).unwrap().0;
        prop_assert!(got <= right, "{} is after {}", got, right);
        let steady = steps.iter().all(|s| s.0 >= 0);
        if steady && closed {
            // What is read too much was written within one interval before the asked time.
            let mut end = 0;
            for &(at, len) in &notes {
                end += len;
                if end > got && end <= right {
                    prop_assert!(at >= ask - INTERVAL_MS, "byte {} of {} for {}", end, at, ask);
                }
            }
        }
    }
}
