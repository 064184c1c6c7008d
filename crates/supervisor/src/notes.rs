//! What is noted of a terminal while it is used, so that another supervisor can take it over.
//!
//! A supervisor can be killed at any moment. Its terminals' output is in journals; what its memory alone would know is who
//! has typed what, and how large each terminal is. Each input is noted, with the stretch of the program's input that it
//! is, before the first byte of it is sent. The guest tells how far that input has come, so the next supervisor knows
//! exactly which inputs have arrived: those it never types again, those that have not it types when they are asked for
//! again, and one that has arrived in part it refuses.
//!
//! A note that can't be written is no reason to refuse the input: it only makes a repetition possible after a second
//! mishap.

use model::Offset;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    ops::Range,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use wire::{guest::PtySize, terminal::InputSeq};

/// A file of notes that is longer is written anew with what still counts.
const LONG: u64 = 64 * 1024;
/// Changes of size that are remembered.
const SIZES: usize = 100;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Note {
    /// An input of `client`, and the stretch of the program's input that it is.
    Typed { client: String, seq: u64, from: Offset, end: Offset },
    /// From the offset `at` of the output on, the terminal has this size.
    Size { cols: u16, rows: u16, at: Offset },
}

/// The notes of one terminal.
#[derive(Debug)]
pub struct Notes {
    path: PathBuf,
    file: Option<File>,
    length: u64,
    longest: u64,
    told: bool,
}

/// What notes say.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// The last input of each client that has arrived, clients in the order of theirs.
    pub typed: Vec<(String, InputSeq)>,
    /// The one that has arrived in part, where there is one; it is in `typed`, too.
    pub torn: Option<(String, InputSeq)>,
    /// Sizes, each from an offset of the output on.
    pub sizes: Vec<(Offset, PtySize)>,
}

impl Notes {
    /// Begins the notes of a terminal; what was noted there before is forgotten.
    pub fn begin(path: PathBuf) -> Notes {
        let mut notes = Notes { path, file: None, length: 0, longest: LONG, told: false };
        notes.rewrite(&[]);
        notes
    }

    /// Notes that input number `seq` of `client` is about to be sent, as this stretch. Everything below `acked` has arrived.
    pub fn typed(&mut self, client: &str, seq: InputSeq, stretch: Range<Offset>, acked: Offset) {
        self.append(&Note::Typed { client: client.to_owned(), seq: seq.0, from: stretch.start, end: stretch.end });
        if self.length > self.longest {
            let kept = still_counting(parse(&self.path), acked);
            self.rewrite(&kept);
            self.longest = LONG.max(2 * self.length);
        }
    }

    /// Notes a new size, as of the offset `at` of the output.
    pub fn size(&mut self, size: PtySize, at: Offset) {
        self.append(&Note::Size { cols: size.cols, rows: size.rows, at });
    }

    /// The terminal has ended.
    pub fn remove(&mut self) {
        self.file = None;
        let _ = fs::remove_file(&self.path);
    }

    fn append(&mut self, note: &Note) {
        let Some(file) = &mut self.file else { return };
        let line = line_of(note);
        let written = file.write_all(&line);
        self.length += line.len() as u64;
        self.look_at(written);
    }

    fn rewrite(&mut self, notes: &[Note]) {
        let text: Vec<u8> = notes.iter().flat_map(line_of).collect();
        let new = self.path.with_extension("new");
        let written = (|| {
            if let Some(dir) = self.path.parent() {
                fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            }
            let mut file = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(&text)?;
            fs::rename(&new, &self.path)?;
            self.length = text.len() as u64;
            // What follows goes to this very file, whose position is at its end.
            self.file = Some(file);
            Ok(())
        })();
        self.look_at(written);
    }

    fn look_at(&mut self, written: io::Result<()>) {
        if let Err(error) = written
            && !std::mem::replace(&mut self.told, true)
        {
            tracing::warn!(path = %self.path.display(), %error, "what is typed can't be noted");
        }
    }
}

fn line_of(note: &Note) -> Vec<u8> {
    let mut line = serde_json::to_vec(note).unwrap_or_default();
    line.push(b'\n');
    line
}

/// All whole notes; a torn one at the end is of an input that was never sent.
fn parse(path: &Path) -> Vec<Note> {
    let text = fs::read(path).unwrap_or_default();
    text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// Of each client the last input that has arrived and all later ones; the latest sizes.
fn still_counting(notes: Vec<Note>, arrived: Offset) -> Vec<Note> {
    let mut kept: Vec<Note> = Vec::new();
    for note in notes {
        if let Note::Typed { client, end, .. } = &note
            && *end <= arrived
        {
            kept.retain(|known| !matches!(known, Note::Typed { client: other, .. } if other == client));
        }
        kept.push(note);
    }
    let sizes = kept.iter().filter(|note| matches!(note, Note::Size { .. })).count();
    let mut old = sizes.saturating_sub(SIZES);
    kept.retain(|note| {
        let drop = matches!(note, Note::Size { .. }) && old > 0;
        old -= usize::from(drop);
        !drop
    });
    kept
}

/// What the notes at `path` say, given that the program's input has arrived up to `arrived`.
pub fn read(path: &Path, arrived: Offset) -> Noted {
    let mut noted = Noted::default();
    for note in parse(path) {
        match note {
            Note::Typed { client, seq, from, end } => {
                let whole = end <= arrived;
                if !whole && from >= arrived {
                    continue;
                }
                noted.typed.retain(|(known, _)| *known != client);
                noted.typed.push((client.clone(), InputSeq(seq)));
                if !whole {
                    noted.torn = Some((client, InputSeq(seq)));
                }
            }
            Note::Size { cols, rows, at } => noted.sizes.push((at, PtySize { cols, rows })),
        }
    }
    noted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(dir: &Path) -> (Notes, PathBuf) {
        let path = dir.join("notes/terminal");
        (Notes::begin(path.clone()), path)
    }

    fn input(notes: &mut Notes, client: &str, seq: u64, from: u64, end: u64) {
        notes.typed(client, InputSeq(seq), Offset(from)..Offset(end), Offset(from.saturating_sub(1000)));
    }

    fn last(noted: &Noted, client: &str) -> Option<u64> {
        noted.typed.iter().find(|(name, _)| name == client).map(|(_, seq)| seq.0)
    }

    #[test]
    fn what_has_arrived_is_typed_and_what_has_not_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (mut notes, path) = notes(dir.path());
        input(&mut notes, "a", 1, 0, 5);
        input(&mut notes, "b", 7, 5, 6);
        input(&mut notes, "a", 2, 6, 20);
        notes.size(PtySize { cols: 100, rows: 30 }, Offset(17));
        let cases = [(0, None, None, None), (5, Some(1), None, None), (6, Some(1), Some(7), None), (20, Some(2), Some(7), None)];
        for (arrived, a, b, torn) in cases {
            let noted = read(&path, Offset(arrived));
            assert_eq!((last(&noted, "a"), last(&noted, "b"), noted.torn.clone()), (a, b, torn), "arrived {arrived}");
            assert_eq!(noted.sizes, [(Offset(17), PtySize { cols: 100, rows: 30 })]);
        }
        let torn = read(&path, Offset(9));
        assert_eq!((last(&torn, "a"), torn.torn), (Some(2), Some(("a".to_owned(), InputSeq(2)))));

        // Killed in the middle of a note: its input was never sent.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(br#"{"typed":{"client":"a","seq":3,"fr"#).unwrap();
        assert_eq!(last(&read(&path, Offset(100)), "a"), Some(2));
    }

    #[test]
    fn long_use_leaves_short_notes_that_say_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let (mut notes, path) = notes(dir.path());
        input(&mut notes, "gone", 3, 0, 1);
        for n in 1..5000 {
            input(&mut notes, "a", n, n, n + 1);
            notes.size(PtySize { cols: 80, rows: 24 }, Offset(n));
        }
        assert!(fs::metadata(&path).unwrap().len() < 2 * LONG);
        for arrived in [4500, 5000] {
            let noted = read(&path, Offset(arrived));
            assert_eq!((last(&noted, "a"), last(&noted, "gone")), (Some(arrived - 1), Some(3)), "arrived {arrived}");
        }
        assert_eq!(read(&path, Offset(5000)).sizes.last().map(|(at, _)| *at), Some(Offset(4999)));
        notes.remove();
        assert_eq!(read(&path, Offset(5000)), Noted::default());
    }
}
