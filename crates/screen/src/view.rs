//! What a terminal shows, for readers that are not terminals.

use alacritty_terminal::grid::Dimensions;
use alacritty_terminal::grid::{Grid, Row};
use alacritty_terminal::index::{Column, Line};
use alacritty_terminal::term::TermMode;
use alacritty_terminal::term::cell::Cell;
use serde::{Deserialize, Serialize};

use crate::redraw::{is_half, is_wide};
use crate::terminal::Terminal;

/// The visible screen and the state around it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Width in columns.
    pub cols: u16,
    /// Height in lines.
    pub rows: u16,
    /// Where the next character goes.
    pub cursor: CursorView,
    /// The title that the program set, without control characters, at most 256 characters.
    pub title: Option<String>,
    /// Whether the alternate screen is shown, as full-screen programs do.
    pub alt_screen: bool,
    /// How many lines scrolled off the top of the main screen and are kept.
    pub scrollback_lines: usize,
    /// What the program asked of the terminal.
    pub modes: Modes,
    /// The screen's lines as text, blanks at their ends left out; always `rows` of them.
    pub lines: Vec<String>,
}

/// The cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CursorView {
    /// Column, counted from 0.
    pub col: u16,
    /// Line of the screen, counted from 0.
    pub row: u16,
    /// Whether it is shown.
    pub visible: bool,
}

/// The modes that tell what a program expects of its terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Modes {
    /// A paste comes between marks (`?2004`).
    pub bracketed_paste: bool,
    /// Cursor keys send application sequences (`?1`).
    pub application_cursor: bool,
    /// The keypad sends application sequences.
    pub application_keypad: bool,
    /// The mouse is reported.
    pub mouse: bool,
    /// Mouse reports are in SGR form (`?1006`).
    pub mouse_sgr: bool,
    /// Focus changes are reported (`?1004`).
    pub focus: bool,
    /// Text wraps at the right edge (`?7`).
    pub autowrap: bool,
    /// Characters push others to the right.
    pub insert: bool,
    /// Lines are counted from the top margin (`?6`).
    pub origin: bool,
    /// Flags of the kitty keyboard protocol in force.
    pub keyboard: u8,
}

pub(crate) fn modes(terminal: &Terminal) -> Modes {
    Modes {
        bracketed_paste: terminal.mode(TermMode::BRACKETED_PASTE),
        application_cursor: terminal.mode(TermMode::APP_CURSOR),
        application_keypad: terminal.mode(TermMode::APP_KEYPAD),
        mouse: terminal.term.mode().intersects(TermMode::MOUSE_MODE),
        mouse_sgr: terminal.mode(TermMode::SGR_MOUSE),
        focus: terminal.mode(TermMode::FOCUS_IN_OUT),
        autowrap: terminal.mode(TermMode::LINE_WRAP),
        insert: terminal.mode(TermMode::INSERT),
        origin: terminal.mode(TermMode::ORIGIN),
        keyboard: terminal.state.keyboard.flags(),
    }
}

pub(crate) fn cursor(terminal: &Terminal) -> CursorView {
    let point = terminal.term.grid().cursor.point;
    CursorView { col: point.column.0 as u16, row: point.line.0.max(0) as u16, visible: terminal.mode(TermMode::SHOW_CURSOR) }
}

/// The lines of the visible screen.
pub(crate) fn lines(grid: &Grid<Cell>) -> Vec<String> {
    (0..grid.screen_lines() as i32).map(|line| line_text(&grid[Line(line)])).collect()
}

/// Text of one line, blanks at its end left out.
pub(crate) fn line_text(row: &Row<Cell>) -> String {
    let mut text = String::with_capacity(row.len());
    let mut col = 0;
    while col < row.len() {
        let cell = &row[Column(col)];
        let wide = is_wide(row, col);
        let half = is_half(row, col);
        text.push(if half || cell.c.is_control() { ' ' } else { cell.c });
        if !half {
            text.extend(cell.zerowidth().unwrap_or_default());
        }
        col += if wide { 2 } else { 1 };
    }
    text.truncate(text.trim_end_matches(' ').len());
    text
}
