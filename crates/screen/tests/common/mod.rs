//! Recordings, and reading text with colours.

// Each test program uses a part of this.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use screen::{DEFAULT_SCROLLBACK, Screen};

pub const RECORDINGS: [&str; 6] = ["vim", "htop", "less", "agent-full", "agent-inline", "shell"];

pub fn recording(name: &str) -> Vec<u8> {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings").join(format!("{name}.bin"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A screen of the recordings' size that was fed `bytes`.
pub fn screen(bytes: &[u8]) -> Screen {
    let mut screen = Screen::new(80, 24, DEFAULT_SCROLLBACK);
    screen.feed(bytes);
    screen
}

/// A character and the SGR parameters in force, e.g. `["1", "fg 5;208"]`.
pub type Cell = (char, Vec<String>);

/// Reads lines of text with SGR sequences and hyperlinks. A blank's foreground is left out: it shows nothing.
pub fn cells(captured: &str) -> Vec<Vec<Cell>> {
    let mut style: Vec<String> = Vec::new();
    let mut lines = Vec::new();
    for line in captured.lines() {
        let mut cells: Vec<Cell> = Vec::new();
        let mut rest = line;
        while let Some(c) = rest.chars().next() {
            if let Some(sgr) = rest.strip_prefix("\x1b[") {
                let end = sgr.find('m').expect("an SGR sequence");
                apply(&mut style, &sgr[..end]);
                rest = &sgr[end + 1..];
                continue;
            }
            if let Some(link) = rest.strip_prefix("\x1b]8;") {
                let end = link.find("\x1b\\").expect("a hyperlink");
                let target = link[..end].split_once(';').expect("parameters").1;
                set(&mut style, "link", (!target.is_empty()).then(|| format!("link {target}")));
                rest = &link[end + 2..];
                continue;
            }
            let shown = |part: &&String| c != ' ' || !is_foreground(part);
            cells.push((c, style.iter().filter(shown).cloned().collect()));
            rest = &rest[c.len_utf8()..];
        }
        lines.push(cells);
    }
    lines
}

fn is_foreground(part: &str) -> bool {
    part.starts_with("fg ") || ["1", "2", "3", "58"].iter().any(|code| part.split([';', ':']).next() == Some(code))
}

fn set(style: &mut Vec<String>, kind: &str, value: Option<String>) {
    style.retain(|part| !part.starts_with(kind));
    style.extend(value);
    style.sort();
}

fn apply(style: &mut Vec<String>, sgr: &str) {
    let mut codes = sgr.split(';');
    while let Some(code) = codes.next() {
        let mut extended = || {
            let mode = codes.next().unwrap_or_default();
            let values: Vec<&str> = codes.by_ref().take(if mode == "5" { 1 } else { 3 }).collect();
            format!("{mode};{}", values.join(";"))
        };
        match code {
            "" | "0" => style.retain(|part| part.starts_with("link")),
            "39" => set(style, "fg ", None),
            "49" => set(style, "bg ", None),
            "59" => set(style, "58", None),
            "38" => set(style, "fg ", Some(format!("fg {}", extended()))),
            "48" => set(style, "bg ", Some(format!("bg {}", extended()))),
            code if code.starts_with("58") => set(style, "58", Some(code.to_owned())),
            code => match code.parse() {
                Ok(n @ 30..=37) => set(style, "fg ", Some(format!("fg 5;{}", n - 30))),
                Ok(n @ 90..=97) => set(style, "fg ", Some(format!("fg 5;{}", n - 82))),
                Ok(n @ 40..=47) => set(style, "bg ", Some(format!("bg 5;{}", n - 40))),
                Ok(n @ 100..=107) => set(style, "bg ", Some(format!("bg 5;{}", n - 92))),
                _ => set(style, code, Some(code.to_owned())),
            },
        }
    }
}
