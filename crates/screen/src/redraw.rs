//! The bytes that make another terminal show what this one shows, and behave as it does.
//!
//! Order matters. Text comes first, printed as a program would print it, so that history scrolls into the viewer's
//! own scrollback and wrapped lines are known as wrapped. Then what text would disturb: tab stops, margins, saved
//! cursor. Then the cursor, which margins and origin mode move. Modes and the pen come last. The very end is the
//! incomplete sequence that the stream stopped in, if it did.

use std::io::Write;

use alacritty_terminal::grid::{Cursor, Dimensions, Grid, Row};
use alacritty_terminal::index::{Column, Line};
use alacritty_terminal::term::TermMode;
use alacritty_terminal::term::cell::{Cell, Flags};
use alacritty_terminal::term::color::Colors;
use alacritty_terminal::vte::ansi::{CharsetIndex, Color, CursorShape, NamedColor, StandardCharset};

use crate::pen::{LOOK, NO_BACKGROUND, Pen};
use crate::state::State;

/// Brings a terminal in any state to a known one: ends a sequence that was cut off and a synchronised update, then
/// keyboard protocol, screen, colours, character sets, margins, modes, saved cursor, content, scrollback.
const PRELUDE: &str = concat!(
    "\x1b\\\x1b[?2026l",
    "\x1b[<16u\x1b[=0u\x1b[?1049l\x1b[<16u\x1b[=0u\x1b[>4m",
    "\x1b[m\x1b]8;;\x1b\\\x1b]104\x1b\\\x1b]110\x1b\\\x1b]111\x1b\\\x1b]112\x1b\\",
    "\x1b(B\x1b)B\x1b*B\x1b+B\x0f",
    "\x1b[r\x1b[?6l\x1b[4l\x1b[20l\x1b[?7h\x1b[?5W\x1b[?1l\x1b>\x1b[?5l",
    "\x1b[?9l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1005l\x1b[?1006l\x1b[?1015l\x1b[?1016l",
    "\x1b[?1004l\x1b[?2004l\x1b[?2031l",
    "\x1b[?25h\x1b[0 q\x1b[H\x1b7\x1b[2J\x1b[3J",
);

/// Puts ASCII into all four character sets.
const ASCII: &str = "\x1b(B\x1b)B\x1b*B\x1b+B";

/// Modes that the library keeps, and how they are set.
const MODES: [(TermMode, &str); 10] = [
    (TermMode::INSERT, "4"),
    (TermMode::LINE_FEED_NEW_LINE, "20"),
    (TermMode::APP_CURSOR, "?1"),
    (TermMode::MOUSE_REPORT_CLICK, "?1000"),
    (TermMode::MOUSE_DRAG, "?1002"),
    (TermMode::MOUSE_MOTION, "?1003"),
    (TermMode::FOCUS_IN_OUT, "?1004"),
    (TermMode::UTF8_MOUSE, "?1005"),
    (TermMode::SGR_MOUSE, "?1006"),
    (TermMode::BRACKETED_PASTE, "?2004"),
];

/// Lines and cursor of one screen.
pub(crate) type CellGrid = Grid<Cell>;

/// Everything a redraw is made from.
pub(crate) struct Picture<'a> {
    pub(crate) main: &'a CellGrid,
    pub(crate) alternate: Option<&'a CellGrid>,
    pub(crate) state: &'a State,
    pub(crate) modes: TermMode,
    pub(crate) colours: &'a Colors,
    /// The sequence that the stream stopped in.
    pub(crate) incomplete: &'a [u8],
}

impl Picture<'_> {
    pub(crate) fn redraw(&self) -> Vec<u8> {
        let state = self.state;
        let mut painter = Painter { out: Vec::with_capacity(64 * self.main.total_lines() + 4096), pen: Pen::PLAIN };
        painter.text(PRELUDE);
        self.colours(&mut painter);
        painter.grid(self.main);
        let (main_keyboard, shown) = match self.alternate {
            None => (&state.keyboard, self.main),
            Some(alternate) => (&state.other_keyboard, alternate),
        };
        painter.keyboard(main_keyboard.base, &main_keyboard.pushed);
        if let Some(alternate) = self.alternate {
            // What leaving the alternate screen brings back.
            let both = self.main.saved_cursor == self.main.cursor;
            if !both {
                painter.cursor(self.main, &self.main.saved_cursor, 0, false);
                painter.text("\x1b7");
                painter.wrap_again(self.main, &self.main.saved_cursor);
                painter.text(ASCII);
            }
            painter.cursor(self.main, &self.main.cursor, 0, false);
            // The usual mode saves the main screen's cursor; a program can switch in a way that doesn't.
            painter.text(if both { "\x1b[?1049h" } else { "\x1b[?47h" });
            painter.text(ASCII);
            // Some terminals fill the alternate screen with the pen's background.
            painter.pen.reset(&mut painter.out);
            painter.text("\x1b[H\x1b[2J\x1b7");
            painter.grid(alternate);
            painter.keyboard(state.keyboard.base, &state.keyboard.pushed);
        }

        if let Some(title) = &state.title {
            painter.text(&format!("\x1b]2;{title}\x1b\\"));
        }
        painter.tabs(state);
        if shown.saved_cursor != Cursor::default() {
            painter.cursor(shown, &shown.saved_cursor, 0, false);
            painter.text("\x1b7");
            painter.wrap_again(shown, &shown.saved_cursor);
            if shown.saved_cursor.charsets != Default::default() {
                painter.text(ASCII);
            }
        }
        if state.region != (0..state.rows) {
            painter.text(&format!("\x1b[{};{}r", state.region.start + 1, state.region.end));
        }
        let origin = self.modes.contains(TermMode::ORIGIN);
        if origin {
            painter.text("\x1b[?6h");
        }
        painter.cursor(shown, &shown.cursor, if origin { state.region.start } else { 0 }, true);
        painter.text(if state.charset == CharsetIndex::G1 { "\x0e" } else { "" });
        self.modes(&mut painter);
        painter.out.extend_from_slice(self.incomplete);
        painter.out
    }

    fn colours(&self, painter: &mut Painter) {
        for index in 0..=258 {
            if let Some(rgb) = self.colours[index] {
                let number = if index < 256 { format!("4;{index}") } else { format!("{}", index - 246) };
                painter.text(&format!("\x1b]{number};rgb:{:02x}/{:02x}/{:02x}\x1b\\", rgb.r, rgb.g, rgb.b));
            }
        }
    }

    fn modes(&self, painter: &mut Painter) {
        for (mode, number) in MODES {
            if self.modes.contains(mode) {
                painter.text(&format!("\x1b[{number}h"));
            }
        }
        if !self.modes.contains(TermMode::LINE_WRAP) {
            painter.text("\x1b[?7l");
        }
        if self.modes.contains(TermMode::APP_KEYPAD) {
            painter.text("\x1b=");
        }
        for (mode, on) in self.state.viewer_modes() {
            painter.text(&format!("\x1b[?{mode}{}", if on { 'h' } else { 'l' }));
        }
        if self.state.other_keys > 0 {
            painter.text(&format!("\x1b[>4;{}m", self.state.other_keys));
        }
        if let Some(style) = self.state.cursor_style {
            let shape = match style.shape {
                CursorShape::Underline => 4,
                CursorShape::Beam => 6,
                _ => 2,
            };
            painter.text(&format!("\x1b[{} q", shape - u8::from(style.blinking)));
        }
        if !self.modes.contains(TermMode::SHOW_CURSOR) {
            painter.text("\x1b[?25l");
        }
    }
}

/// The screen alone as lines of text with colours, each line ending plain.
pub(crate) fn coloured_lines(grid: &CellGrid) -> Vec<u8> {
    let mut painter = Painter { out: Vec::new(), pen: Pen::PLAIN };
    for line in 0..grid.screen_lines() as i32 {
        let row = &grid[Line(line)];
        painter.cells(row, 0, filled(row));
        painter.pen.reset(&mut painter.out);
        painter.text("\n");
    }
    painter.out
}

struct Painter {
    out: Vec<u8>,
    pen: Pen,
}

impl Painter {
    fn text(&mut self, text: &str) {
        self.out.extend_from_slice(text.as_bytes());
    }

    /// Prints history and screen from the top left of an empty screen. Leaves a plain pen.
    fn grid(&mut self, grid: &CellGrid) {
        let history = grid.history_size() as i32;
        let bottom = grid.screen_lines() as i32 - 1;
        let mut wrapped = false;
        for line in -history..=bottom {
            let row = &grid[Line(line)];
            let next = (line < bottom).then(|| &grid[Line(line + 1)]);
            wrapped = self.row(row, next, wrapped);
            if next.is_some() && !wrapped {
                if self.pen.has_background() {
                    // A line that scrolls in takes the pen's background.
                    self.pen.reset(&mut self.out);
                }
                self.text("\r\n");
            }
        }
        self.pen.reset(&mut self.out);
    }

    /// Prints a row. `continued`: the cursor still waits at the end of the row before, and the first character wraps
    /// it to here. Returns whether the next row is to be reached in this way.
    fn row(&mut self, row: &Row<Cell>, next: Option<&Row<Cell>>, continued: bool) -> bool {
        let cols = row.len();
        let last = &row[Column(cols - 1)];
        if let Some(next) = next.filter(|_| last.flags.contains(Flags::WRAPLINE)) {
            // A wide character that doesn't fit into the last column wraps by itself.
            let skipped = last.flags.contains(Flags::LEADING_WIDE_CHAR_SPACER) && is_wide(next, 0) && cols > 2;
            self.cells(row, 0, if skipped { cols - 1 } else { cols });
            return true;
        }
        let least = usize::from(continued);
        if last.bg != NO_BACKGROUND {
            let erased = erased_from(row).max(least);
            if erased < cols {
                self.cells(row, 0, erased);
                self.pen.erase(last, &mut self.out);
                return false;
            }
        }
        let end = filled(row).max(least);
        self.cells(row, 0, end);
        if continued && end < cols && row[Column(0)].bg != NO_BACKGROUND {
            // The line scrolled in while the pen had a background.
            self.pen.reset(&mut self.out);
            self.text("\x1b[K");
        }
        false
    }

    fn cells(&mut self, row: &Row<Cell>, from: usize, to: usize) {
        let mut cells = row[Column(from)..Column(to)].iter().enumerate();
        while let Some((ahead, cell)) = cells.next() {
            self.pen.take(cell, &mut self.out);
            if cell.c.is_ascii_graphic() || cell.c == ' ' && cell.extra.is_none() {
                self.out.push(cell.c as u8);
                if cell.extra.is_none() {
                    continue;
                }
            } else if cell.c.is_control() || is_half(row, from + ahead) {
                self.out.push(b' ');
                continue;
            } else {
                self.out.extend_from_slice(cell.c.encode_utf8(&mut [0; 4]).as_bytes());
            }
            for mark in cell.zerowidth().unwrap_or_default() {
                self.out.extend_from_slice(mark.encode_utf8(&mut [0; 4]).as_bytes());
            }
            if is_wide(row, from + ahead) {
                cells.next();
            }
        }
    }

    /// Places the cursor, with its pen and character sets. `top` is the line that rows are counted from.
    fn cursor(&mut self, grid: &CellGrid, cursor: &Cursor<Cell>, top: usize, repeat_last: bool) {
        let line = (cursor.point.line.0.max(0) as usize).saturating_sub(top) + 1;
        let (col, cols) = (cursor.point.column.0, grid.columns());
        if cursor.input_needs_wrap && col == cols - 1 {
            // Only printing in the last column makes a terminal wait to wrap: print again what is there.
            let row = &grid[cursor.point.line];
            let from = if cols >= 2 && is_wide(row, cols - 2) { cols - 2 } else { cols - 1 };
            let _ = write!(self.out, "\x1b[{line};{}H", from + 1);
            self.cells(row, from, cols);
        } else if let Some(from) = repeatable(grid, cursor).filter(|_| repeat_last) {
            // The stream may go on with "repeat the last character" (REP): make it the last one here too.
            let row = &grid[cursor.point.line];
            let _ = write!(self.out, "\x1b[{line};{}H", from + 1);
            self.cells(row, from, col);
        } else {
            let _ = write!(self.out, "\x1b[{line};{}H", col + 1);
        }
        self.pen.take(&cursor.template, &mut self.out);
        let sets = [(CharsetIndex::G0, '('), (CharsetIndex::G1, ')'), (CharsetIndex::G2, '*'), (CharsetIndex::G3, '+')];
        for (index, designator) in sets {
            if cursor.charsets[index] == StandardCharset::SpecialCharacterAndLineDrawing {
                let _ = write!(self.out, "\x1b{designator}0");
            }
        }
    }

    /// Printing the last cell of a line again made the terminal forget that the line goes on below.
    fn wrap_again(&mut self, grid: &CellGrid, cursor: &Cursor<Cell>) {
        let line = cursor.point.line;
        let last = &grid[line][grid.last_column()];
        if cursor.input_needs_wrap && last.flags.contains(Flags::WRAPLINE) && line < grid.bottommost_line() {
            self.text(ASCII);
            self.text("\x0f");
            self.cells(&grid[line + 1_i32], 0, if is_wide(&grid[line + 1_i32], 0) { 2 } else { 1 });
        }
    }

    fn keyboard(&mut self, base: u8, pushed: &[u8]) {
        if base != 0 {
            self.text(&format!("\x1b[={base};1u"));
        }
        for flags in pushed {
            self.text(&format!("\x1b[>{flags}u"));
        }
    }

    fn tabs(&mut self, state: &State) {
        if state.has_default_tabs() {
            return;
        }
        self.text("\x1b[3g");
        for (col, _) in state.tabs.iter().enumerate().filter(|(_, set)| **set) {
            self.text(&format!("\x1b[{}G\x1bH", col + 1));
        }
    }
}

/// Where the character left of the cursor begins, if printing it again changes nothing.
fn repeatable(grid: &CellGrid, cursor: &Cursor<Cell>) -> Option<usize> {
    let (line, col) = (cursor.point.line, cursor.point.column.0);
    let row = &grid[line];
    if col == 0 || is_wide(row, col - 1) {
        return None;
    }
    if col < 2 || !is_wide(row, col - 2) {
        return Some(col - 1);
    }
    // A wide character that didn't fit into the line above is known by a mark there, which would go.
    let moved = col == 2 && line > grid.topmost_line() && {
        let above = &grid[line - 1_i32];
        above[grid.last_column()].flags.contains(Flags::LEADING_WIDE_CHAR_SPACER)
    };
    (!moved).then_some(col - 2)
}

/// Half a wide character, left by a program that overwrote the other half: it shows as a blank.
pub(crate) fn is_half(row: &Row<Cell>, col: usize) -> bool {
    let flags = row[Column(col)].flags;
    flags.contains(Flags::WIDE_CHAR) && !is_wide(row, col)
        || flags.contains(Flags::WIDE_CHAR_SPACER) && (col == 0 || !is_wide(row, col - 1))
}

pub(crate) fn is_wide(row: &Row<Cell>, col: usize) -> bool {
    row[Column(col)].flags.contains(Flags::WIDE_CHAR)
        && col + 1 < row.len()
        && row[Column(col + 1)].flags.contains(Flags::WIDE_CHAR_SPACER)
}

/// Where the blanks at the end of the row begin that show nothing at all.
fn filled(row: &Row<Cell>) -> usize {
    let shows = |(col, cell): (usize, &Cell)| {
        let blank = cell.c == ' ' && cell.extra.is_none() || is_half(row, col) && cell.hyperlink().is_none();
        !blank || !matches!(cell.bg, Color::Named(NamedColor::Background)) || !is_plain(cell)
    };
    row[..].iter().enumerate().rev().find(|cell| shows(*cell)).map_or(0, |(col, _)| col + 1)
}

/// Where the cells at the end of the row begin that are as erasing with one background leaves them.
fn erased_from(row: &Row<Cell>) -> usize {
    let bg = row[Column(row.len() - 1)].bg;
    row[..]
        .iter()
        .rposition(|cell| cell.c != ' ' || cell.extra.is_some() || cell.bg != bg || !is_plain(cell))
        .map_or(0, |at| at + 1)
}

/// Whether a blank here shows nothing but a background. Notes on a cell's place in the grid don't show.
#[inline]
fn is_plain(cell: &Cell) -> bool {
    matches!(cell.fg, Color::Named(NamedColor::Foreground)) && !cell.flags.intersects(LOOK)
}
