//! A disk that takes no more: what was accepted stays readable, and writing goes on when there is room.
#![allow(clippy::unwrap_used)]

use journal::{AppendError, Chunk, LineItem, LineWriter, Reader, Retention, Writer, read_lines};
use model::Offset;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const DIR: &str = "JOURNAL_TEST_FULL_DISK";

fn read_all(dir: &Path) -> Vec<u8> {
    let mut reader = Reader::open(dir);
    let mut all = Vec::new();
    while let Chunk::Data { bytes, .. } = reader.read(Offset(all.len() as u64), 100_000).unwrap() {
        all.extend(bytes);
    }
    all
}

/// Runs one test of this file in a process of its own, by a line of shell that limits it first.
fn run_limited(test: &str, dir: &Path, shell: &str) {
    let program = std::env::current_exe().unwrap();
    let output = Command::new("sh")
        .args(["-c", shell, "sh"])
        .arg(program)
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(DIR, dir)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_limit_on_file_size_cuts_an_append() {
    let root = tempfile::tempdir().unwrap();
    // Ignored, SIGXFSZ turns into an error of the write. The unit is 512 or 1024 bytes.
    for child in ["child_fills_up", "child_fills_up_with_lines"] {
        let dir = root.path().join(child);
        fs::create_dir(&dir).unwrap();
        run_limited(child, &dir, r#"trap "" XFSZ; ulimit -f 100; exec "$@""#);
    }
}

#[test]
fn a_full_file_system_cuts_an_append() {
    let root = tempfile::tempdir().unwrap();
    let mount = r#"mount -t tmpfs -o size=256k none "$JOURNAL_TEST_FULL_DISK""#;
    let may_mount = Command::new("unshare").args(["-rm", "sh", "-c", mount]).env(DIR, root.path()).status();
    if !may_mount.is_ok_and(|s| s.success()) {
        eprintln!("not shown: this user may not mount a small file system");
        return;
    }
    for child in ["child_fills_up", "child_fills_up_with_lines"] {
        run_limited(child, root.path(), &format!(r#"exec unshare -rm sh -c '{mount} && exec "$@"' sh "$@""#));
    }
}

#[test]
#[ignore = "run by the other tests, under a limit"]
fn child_fills_up() {
    let root = PathBuf::from(std::env::var(DIR).unwrap());
    let dir = root.join("bytes");
    let ballast = root.join("ballast");
    fs::write(&ballast, [0; 40_000]).unwrap();
    let one_segment = Retention { segment_bytes: 1 << 30, head_bytes: 0, ..Retention::default() };
    let mut writer = Writer::open(&dir, one_segment).unwrap();
    let block: Vec<u8> = (0..7001u32).map(|i| i as u8).collect();
    let mut want: Vec<u8> = Vec::new();
    let error = loop {
        match writer.append(&block) {
            Ok(tail) => {
                want.extend(&block);
                assert_eq!(tail, Offset(want.len() as u64));
                assert!(want.len() < 10 << 20, "no limit met");
            }
            Err(e) => break e,
        }
    };
    assert!(matches!(error, AppendError::NoRoom { .. }), "{error:?}");
    assert!(error.accepted() < block.len());
    want.extend(&block[..error.accepted()]);
    assert_eq!(error.tail(), Offset(want.len() as u64));
    assert_eq!(writer.tail(), error.tail());
    assert!(read_all(&dir) == want);
    assert_eq!(writer.append(&block[error.accepted()..]).unwrap_err().accepted(), 0, "still full");
    drop(writer);

    // Room: the disk has some again, or new segments stay below the limit on file sizes.
    fs::remove_file(&ballast).unwrap();
    let small = Retention { segment_bytes: 4096, ..one_segment };
    let mut writer = Writer::open(&dir, small).unwrap();
    writer.append(&block[error.accepted()..]).unwrap();
    want.extend(&block[error.accepted()..]);
    assert!(read_all(&dir) == want);
}

#[test]
#[ignore = "run by the other tests, under a limit"]
fn child_fills_up_with_lines() {
    let root = PathBuf::from(std::env::var(DIR).unwrap());
    let dir = root.join("lines");
    let ballast = root.join("ballast");
    fs::write(&ballast, [0; 40_000]).unwrap();
    let one_segment = Retention { segment_bytes: 1 << 30, head_bytes: 0, ..Retention::default() };
    let mut writer = LineWriter::open(&dir, one_segment).unwrap();
    let mut want = Vec::new();
    let mut append = |writer: &mut LineWriter| {
        let bytes = format!("{:0>3333}", want.len()).into_bytes();
        writer.append(&bytes).map(|at| want.push(LineItem::Line { at, bytes }))
    };
    let mut written = 0;
    while append(&mut writer).is_ok() {
        written += 1;
        assert!(written < 4000, "no limit met");
    }
    // Tried again and again while there is no room, then with room.
    for _ in 0..3 {
        let _ = append(&mut writer);
    }
    fs::remove_file(&ballast).unwrap();
    for _ in 0..3 {
        append(&mut writer).unwrap();
    }
    let found = read_lines(&mut Reader::open(&dir), Offset::ZERO, usize::MAX).unwrap();
    let lines: Vec<_> = found.items.iter().filter(|i| matches!(i, LineItem::Line { .. })).cloned().collect();
    assert!(lines == want, "each line that was accepted, once and whole");
    assert!(lines.len() < found.items.len(), "the cut line is a gap");
    assert_eq!(found.next, writer.tail());
}
