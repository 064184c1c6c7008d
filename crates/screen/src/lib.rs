//! What a terminal shows, kept up to date from the bytes that its programs print.
//!
//! A [`Screen`] takes the output of a terminal and keeps screen, scrollback, title and modes. From these it makes
//! the bytes that redraw everything on another terminal, so that a viewer who joins late sees what one who was there
//! all the time sees. The bytes are the truth; a screen is a cache of them.
//!
//! This crate does no I/O and knows no offsets, processes or viewers: the caller feeds it and asks it. The emulation
//! itself is `alacritty_terminal`'s; none of its types are part of this interface.
//!
//! What a redraw can't bring back, because the emulator doesn't keep it: blinking text, the stack of saved titles,
//! double-width lines, pictures (sixel and the like), character sets other than ASCII and line drawing, and the
//! wrapped state of a line whose continuation is below the screen.

mod handler;
mod pen;
mod redraw;
mod split;
mod state;
mod terminal;
mod view;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use alacritty_terminal::grid::Dimensions;
use alacritty_terminal::index::Line;
use alacritty_terminal::vte::ansi::{Processor, Timeout};

use crate::redraw::Picture;
use crate::split::{Piece, Splitter};
use crate::terminal::{Size, Terminal};
pub use crate::view::{CursorView, Modes, View};

/// Lines of scrollback that a terminal keeps unless told otherwise.
///
/// A full scrollback of 80 columns takes about 20 MB, and more where lines are wider: a cell takes 24 bytes. Lines
/// are allocated as they are needed.
pub const DEFAULT_SCROLLBACK: usize = 10_000;

/// The longest side of a screen.
pub const LARGEST_SIDE: u16 = 1000;

/// Screen, scrollback and modes of one terminal.
pub struct Screen {
    terminal: Terminal,
    parser: Processor<NoWaiting>,
    splitter: Splitter,
    scrollback: usize,
    faults: u64,
}

/// Synchronised updates are drawn as they come: nobody watches this screen between two reads.
#[derive(Default)]
struct NoWaiting;

impl Timeout for NoWaiting {
    fn set_timeout(&mut self, _: Duration) {}
    fn clear_timeout(&mut self) {}
    fn pending_timeout(&self) -> bool {
        false
    }
}

impl Screen {
    /// An empty screen. Sides are brought into 1..=[`LARGEST_SIDE`]; one column becomes two, the least that the
    /// emulator can work with.
    pub fn new(cols: u16, rows: u16, scrollback_lines: usize) -> Self {
        Self {
            terminal: Terminal::new(size(cols, rows), scrollback_lines),
            parser: Processor::new(),
            splitter: Splitter::new(),
            scrollback: scrollback_lines,
            faults: 0,
        }
    }

    /// Takes the next bytes of the terminal's output. How the output is cut into chunks makes no difference.
    ///
    /// Never panics: if the emulator does, the screen starts again empty and [`faults`](Self::faults) counts it.
    pub fn feed(&mut self, bytes: &[u8]) {
        let Self { terminal, parser, splitter, .. } = self;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            splitter.feed(bytes, |piece| match piece {
                Piece::Bytes(bytes) => parser.advance(terminal, bytes),
                Piece::Repeat(count) => {
                    let count = count.min(terminal.state.cols as u32);
                    parser.advance(terminal, format!("\x1b[{count}b").as_bytes());
                }
                Piece::AskVersion => {
                    let version = concat!("\x1bP>|dormouse ", env!("CARGO_PKG_VERSION"), "\x1b\\");
                    terminal.listener.outbox().reply(version);
                }
            })
        }));
        if outcome.is_err() {
            self.start_again(Size { cols: self.terminal.state.cols, rows: self.terminal.state.rows });
        }
    }

    /// Changes the size, brought into bounds as in [`new`](Self::new). The main screen reflows wrapped lines, the
    /// alternate one is cut or padded.
    pub fn resize(&mut self, cols: u16, rows: u16) {
        let size = size(cols, rows);
        let terminal = &mut self.terminal;
        if catch_unwind(AssertUnwindSafe(|| terminal.resize(size))).is_err() {
            self.start_again(size);
        }
    }

    fn start_again(&mut self, size: Size) {
        self.terminal = Terminal::new(size, self.scrollback);
        self.parser = Processor::new();
        self.splitter = Splitter::new();
        self.faults += 1;
    }

    /// How often the emulator failed on its input and the screen had to start again.
    pub fn faults(&self) -> u64 {
        self.faults
    }

    /// Answers to queries in the output since the last call (cursor position, colours, version …), to be typed back
    /// to the program. Drop them where somebody else answers: the terminal of a viewer, or, when output is read
    /// again from a journal, whoever answered the first time. At most 64 KiB wait; what exceeds that is dropped.
    pub fn take_replies(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.terminal.listener.outbox().replies)
    }

    /// Width in columns and height in lines.
    pub fn size(&self) -> (u16, u16) {
        (self.terminal.state.cols as u16, self.terminal.state.rows as u16)
    }

    /// The title that the program set: no control characters, at most 256 characters.
    pub fn title(&self) -> Option<&str> {
        self.terminal.state.title.as_deref()
    }

    /// How often the bell rang.
    pub fn bell_count(&self) -> u64 {
        self.terminal.listener.outbox().bells
    }

    /// The cursor of the screen that is shown.
    pub fn cursor(&self) -> CursorView {
        view::cursor(&self.terminal)
    }

    /// What the program asked of the terminal.
    pub fn modes(&self) -> Modes {
        view::modes(&self.terminal)
    }

    /// Whether the alternate screen is shown.
    pub fn in_alt_screen(&self) -> bool {
        self.terminal.in_alternate()
    }

    /// Lines that scrolled off the main screen and are kept.
    pub fn scrollback_lines(&self) -> usize {
        self.terminal.grids().0.history_size()
    }

    /// Bytes that make an xterm-compatible terminal of the same size show and do what this one does, from whatever
    /// state it is in: scrollback, main screen, alternate screen, cursor, title, colours and modes. If the output
    /// ends within a character or sequence, so do these bytes: the viewer goes on with the very next byte.
    pub fn redraw(&self) -> Vec<u8> {
        let (main, alternate) = self.terminal.grids();
        self.picture(main, alternate, &self.terminal.state)
    }

    /// As [`redraw`](Self::redraw), for a viewer of another size. This screen stays as it is.
    pub fn redraw_for(&self, cols: u16, rows: u16) -> Vec<u8> {
        let size = size(cols, rows);
        let (main, alternate) = self.terminal.grids();
        let mut state = self.terminal.state.clone();
        if (size.cols, size.rows) == (state.cols, state.rows) {
            return self.redraw();
        }
        let (mut main, mut alternate) = (main.clone(), alternate.cloned());
        let resized = catch_unwind(AssertUnwindSafe(|| {
            terminal::resize_grid(&mut main, true, size);
            if let Some(alternate) = &mut alternate {
                terminal::resize_grid(alternate, false, size);
            }
        }));
        if resized.is_err() {
            return Screen::new(cols, rows, 0).redraw();
        }
        state.resize(size.cols, size.rows);
        self.picture(&main, alternate.as_ref(), &state)
    }

    fn picture(&self, main: &redraw::CellGrid, alternate: Option<&redraw::CellGrid>, state: &state::State) -> Vec<u8> {
        let term = &self.terminal.term;
        let incomplete = self.splitter.incomplete();
        Picture { main, alternate, state, modes: *term.mode(), colours: term.colors(), incomplete }.redraw()
    }

    /// The visible screen as text: one line for each, blanks at their ends and empty lines at the bottom left out.
    pub fn text(&self) -> String {
        let lines = view::lines(self.terminal.term.grid());
        let filled = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |at| at + 1);
        lines[..filled].iter().flat_map(|line| [line, "\n"]).collect()
    }

    /// The scrollback as lines of text, oldest first.
    pub fn scrollback_text(&self) -> Vec<String> {
        let (main, _) = self.terminal.grids();
        (-(main.history_size() as i32)..0).map(|line| view::line_text(&main[Line(line)])).collect()
    }

    /// The visible screen as text with colours and attributes, every line with its newline; no cursor movement.
    pub fn ansi(&self) -> Vec<u8> {
        redraw::coloured_lines(self.terminal.term.grid())
    }

    /// The visible screen and the state around it, for programs.
    pub fn json(&self) -> View {
        let (cols, rows) = self.size();
        View {
            cols,
            rows,
            cursor: self.cursor(),
            title: self.title().map(str::to_owned),
            alt_screen: self.in_alt_screen(),
            scrollback_lines: self.scrollback_lines(),
            modes: self.modes(),
            lines: view::lines(self.terminal.term.grid()),
        }
    }
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen").field("size", &self.size()).field("title", &self.title()).finish_non_exhaustive()
    }
}

fn size(cols: u16, rows: u16) -> Size {
    Size { cols: usize::from(cols.clamp(2, LARGEST_SIDE)), rows: usize::from(rows.clamp(1, LARGEST_SIDE)) }
}
