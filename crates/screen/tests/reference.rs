//! The screen after each recording equals xterm.js's, cell by cell; and a redraw brings every cell to another screen.
//!
//! What xterm.js shows is kept beside the recordings (`reference.mjs` writes it): characters, colours and attributes
//! of all cells of the 80x24 screen, blank and erased ones too, the cursor and some modes. It knows no difference
//! between kinds of underline, and shows hyperlinks as underlined.

mod common;

use common::{Cell, RECORDINGS, cells, recording, screen};

/// Lines in the form of the reference: `{style}text` for each run of one style, padded to the width.
fn runs(line: Vec<Cell>, cols: usize, width: usize) -> String {
    let mut text = String::new();
    let mut last = None;
    let padding = std::iter::repeat_n((' ', Vec::new()), cols - width);
    for (c, style) in line.into_iter().chain(padding) {
        let mut style: Vec<String> = style
            .into_iter()
            .filter(|part| !part.starts_with("58"))
            .map(|part| if part.starts_with("4:") || part.starts_with("link") { "4".to_owned() } else { part })
            .collect();
        style.sort();
        style.dedup();
        let style = format!("{{{}}}", style.join(","));
        if is_mark(c) {
            text.push(c);
            continue;
        }
        if last.as_ref() != Some(&style) {
            text.push_str(&style);
        }
        text.push(c);
        last = Some(style);
    }
    text
}

fn is_mark(c: char) -> bool {
    ('\u{300}'..='\u{36f}').contains(&c)
}

/// Columns of the characters that occur in the recordings.
fn width(c: char) -> usize {
    match c {
        _ if is_mark(c) => 0,
        '\u{3000}'..='\u{9fff}' | '✅' => 2,
        _ => 1,
    }
}

#[test]
fn every_cell_is_as_in_xterm_js() {
    for name in RECORDINGS {
        let screen = screen(&recording(name));
        let path = format!("{}/tests/recordings/{name}.cells", env!("CARGO_MANIFEST_DIR"));
        let reference = std::fs::read_to_string(path).expect("a reference for each recording");
        let ours = cells(std::str::from_utf8(&screen.ansi()).expect("UTF-8"));
        let (cursor, modes) = (screen.cursor(), screen.modes());
        for (at, (line, theirs)) in ours.into_iter().zip(reference.lines()).enumerate() {
            let columns = line.iter().map(|(c, _)| width(*c)).sum();
            assert_eq!(runs(line, 80, columns), theirs, "{name}: line {at}");
        }
        let last = reference.lines().last().expect("a cursor");
        let kind = if screen.in_alt_screen() { "alternate" } else { "normal" };
        let ours = format!("cursor {},{} {kind} {} {}", cursor.col, cursor.row, modes.bracketed_paste, modes.application_cursor);
        assert!(last.starts_with(&ours), "{name}: {last}, not {ours}");
        assert_eq!(last.ends_with("none"), !modes.mouse, "{name}: mouse");
    }
}

#[test]
fn a_redraw_brings_every_cell() {
    for name in RECORDINGS {
        let first = screen(&recording(name));
        let second = screen(&first.redraw());
        assert_eq!(first.json(), second.json(), "{name}");
        assert_eq!(first.ansi().escape_ascii().to_string(), second.ansi().escape_ascii().to_string(), "{name}");
        assert_eq!(first.scrollback_text(), second.scrollback_text(), "{name}");
        let (first, second) = (first.redraw(), second.redraw());
        let differs = first.iter().zip(&second).position(|(one, other)| one != other);
        let around =
            differs.map(|at| (first[at - 20..].escape_ascii().to_string(), second[at - 20..].escape_ascii().to_string()));
        assert_eq!((differs, around, first.len()), (None, None, second.len()), "{name}: the redraw of a redraw");
    }
}

/// What nobody may see twice: a redraw asks the viewer's terminal nothing and rings no bell.
#[test]
fn a_redraw_asks_nothing() {
    for name in RECORDINGS {
        let mut second = screen(&screen(&recording(name)).redraw());
        assert_eq!((second.take_replies(), second.bell_count()), (Vec::new(), 0), "{name}");
    }
}

/// A viewer who joins in the middle of a program's output, even within a sequence or character, and reads on from
/// there, sees in the end what one sees who was there from the beginning.
#[test]
fn a_viewer_may_join_anywhere() {
    for name in RECORDINGS {
        let bytes = recording(name);
        let whole = screen(&bytes);
        let mut first = screen(b"");
        let mut fed = 0;
        for at in (0..bytes.len()).step_by(bytes.len() / 150 + 1) {
            first.feed(&bytes[fed..at]);
            fed = at;
            let mut viewer = screen(&first.redraw());
            viewer.feed(&bytes[at..]);
            assert_eq!(viewer.json(), whole.json(), "{name}, joined at {at}");
            let ansi = |screen: &screen::Screen| screen.ansi().escape_ascii().to_string();
            assert_eq!(ansi(&viewer), ansi(&whole), "{name}, joined at {at}");
            assert_eq!(viewer.scrollback_text(), whole.scrollback_text(), "{name}, joined at {at}");
        }
    }
}
