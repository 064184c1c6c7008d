//! How things look on a terminal: tables, times, sizes, and text that nobody vouches for.

use jiff::tz::TimeZone;
use model::Timestamp;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Rows of text under headings, each column as wide as its widest cell.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(headings: &[&str]) -> Table {
        Table { rows: vec![headings.iter().map(|heading| (*heading).to_owned()).collect()] }
    }

    /// One more row. Its cells are shown without control characters.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| safe(&cell)).collect());
    }

    /// The table as text, with a line end after each row.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| self.rows.iter().filter_map(|row| row.get(column)).map(|c| cells(c)).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(cell);
                line.extend(std::iter::repeat_n(' ', width - cells(cell) + 2));
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

/// Cells that a text takes on a terminal: two for East Asian wide characters and pictures, none for what combines.
fn cells(text: &str) -> usize {
    text.chars()
        .map(|c| match u32::from(c) {
            0x0300..=0x036F | 0x200B..=0x200F | 0xFE00..=0xFE0F => 0,
            0x1100..=0x115F | 0x2E80..=0xA4CF | 0xAC00..=0xD7A3 | 0xF900..=0xFAFF | 0xFE30..=0xFE6F => 2,
            0xFF00..=0xFF60 | 0xFFE0..=0xFFE6 | 0x1F300..=0x1FAFF | 0x20000..=0x3FFFD => 2,
            _ => 1,
        })
        .sum()
}

/// A text from a session, which can't move the cursor or turn the writing's direction.
pub fn safe(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\t' | '\r' => ' ',
            c if c.is_control() || matches!(u32::from(c), 0x202A..=0x202E | 0x2066..=0x2069) => '\u{FFFD}',
            c => c,
        })
        .collect()
}

/// The beginning of a text, `width` characters at most.
pub fn clip(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{}…", kept.trim_end())
}

/// The present, by this machine's clock.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    Timestamp(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// An instant in local time: `2026-03-01 14:05:09`.
pub fn local(at: Timestamp) -> String {
    in_zone(at, &TimeZone::system())
}

fn in_zone(at: Timestamp, zone: &TimeZone) -> String {
    match jiff::Timestamp::from_millisecond(at.0) {
        Ok(instant) => instant.to_zoned_datetime(zone.clone()).strftime("%Y-%m-%d %H:%M:%S").to_string(),
        Err(_) => at.to_string(),
    }
}

/// A span in its largest unit: `12s`, `5m`, `3h`, `9d`.
pub fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m", seconds / 60),
        3_600..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// A size in binary units: `512 B`, `1.5 MiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A command as it could be typed.
pub fn command(argv: &[String]) -> String {
    let plain = |word: &String| !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "_-./=:,@%+".contains(c));
    let quoted = |word: &String| {
        if plain(word) { word.clone() } else { format!("'{}'", word.replace('\'', r"'\''")) }
    };
    argv.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_by_cells() {
        let mut table = Table::new(&["ID", "TASK"]);
        table.row(["日本".into(), "x\u{1b}[2Jy\nz".into()]);
        table.row(["a".into(), String::new()]);
        assert_eq!(table.render(), "ID    TASK\n日本  x\u{FFFD}[2Jy z\na\n");
    }

    #[test]
    fn quantities_read_well() {
        for (seconds, text) in [(0, "0s"), (59, "59s"), (60, "1m"), (7_200, "2h"), (86_400, "24h"), (172_800, "2d")] {
            assert_eq!(span(Duration::from_secs(seconds)), text);
        }
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), ((1 << 20) - 1, "1.0 MiB"), (u64::MAX, "16384.0 PiB")]
        {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(clip("abcdef", 4), "abc…");
        assert_eq!(in_zone(Timestamp(1_700_000_000_123), &TimeZone::UTC), "2023-11-14 22:13:20");
        assert_eq!(command(&["sh".into(), "-c".into(), "echo it's".into()]), r"sh -c 'echo it'\''s'");
    }
}
