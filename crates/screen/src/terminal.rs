//! The emulated terminal: the library's grid, plus two screens and the state that the library hides.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use alacritty_terminal::Term;
use alacritty_terminal::event::{Event, EventListener};
use alacritty_terminal::grid::{Dimensions, Grid};
use alacritty_terminal::index::{Column, Line};
use alacritty_terminal::term::cell::Cell;
use alacritty_terminal::term::{Config, Osc52, TermMode};
use alacritty_terminal::vte::ansi::Rgb;

use crate::state::State;

/// Answers to queries that nobody fetched are dropped beyond this many bytes.
const MOST_REPLIES: usize = 64 * 1024;

/// Columns and rows for the library.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) cols: usize,
    pub(crate) rows: usize,
}

impl Dimensions for Size {
    fn total_lines(&self) -> usize {
        self.rows
    }

    fn screen_lines(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.cols
    }
}

/// Makes the answer to a colour query.
type Answer = Arc<dyn Fn(Rgb) -> String + Sync + Send>;

/// What the library's terminal tells outside of its grid.
#[derive(Default)]
pub(crate) struct Outbox {
    pub(crate) replies: Vec<u8>,
    pub(crate) bells: u64,
    /// Colour queries wait for the handler, which knows the colours.
    questions: Vec<(usize, Answer)>,
}

impl Outbox {
    pub(crate) fn reply(&mut self, text: &str) {
        if self.replies.len() + text.len() <= MOST_REPLIES {
            self.replies.extend_from_slice(text.as_bytes());
        }
    }
}

/// The library calls its listener through a shared reference, so the outbox needs a lock; nobody contends for it.
#[derive(Clone, Default)]
pub(crate) struct Listener(Arc<Mutex<Outbox>>);

impl Listener {
    pub(crate) fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventListener for Listener {
    fn send_event(&self, event: Event) {
        match event {
            Event::PtyWrite(text) => self.outbox().reply(&text),
            Event::ColorRequest(index, answer) => self.outbox().questions.push((index, answer)),
            Event::Bell => self.outbox().bells += 1,
            _ => {}
        }
    }
}

/// The library's terminal always works on one grid; the main screen's grid is parked while the alternate one shows.
/// The library has an alternate screen of its own, but doesn't let the hidden grid be read.
pub(crate) struct Terminal {
    pub(crate) term: Term<Listener>,
    pub(crate) listener: Listener,
    pub(crate) state: State,
    pub(crate) parked: Option<Grid<Cell>>,
    /// Bytes of hyperlinks set since they were last counted in the grids.
    pub(crate) link_bytes: usize,
    /// No more hyperlinks until the next count.
    pub(crate) links_full: bool,
}

impl Terminal {
    pub(crate) fn new(size: Size, scrollback: usize) -> Self {
        let listener = Listener::default();
        let config = Config { scrolling_history: scrollback, osc52: Osc52::Disabled, ..Config::default() };
        Self {
            term: Term::new(config, &size, listener.clone()),
            listener,
            state: State::new(size.cols, size.rows),
            parked: None,
            link_bytes: 0,
            links_full: false,
        }
    }

    /// The main screen with its history, and the alternate screen when it is the one shown.
    pub(crate) fn grids(&self) -> (&Grid<Cell>, Option<&Grid<Cell>>) {
        match &self.parked {
            Some(main) => (main, Some(self.term.grid())),
            None => (self.term.grid(), None),
        }
    }

    pub(crate) fn in_alternate(&self) -> bool {
        self.parked.is_some()
    }

    pub(crate) fn mode(&self, mode: TermMode) -> bool {
        self.term.mode().contains(mode)
    }

    /// Shows an empty alternate screen. The cursor stays where it is.
    pub(crate) fn enter_alternate(&mut self, save_cursor: bool) {
        if self.in_alternate() {
            return;
        }
        let main = self.term.grid_mut();
        if save_cursor {
            main.saved_cursor = main.cursor.clone();
        }
        let mut alternate = Grid::new(self.state.rows, self.state.cols, 0);
        alternate.cursor = main.cursor.clone();
        alternate.reset_region(..);
        self.parked = Some(mem::replace(main, alternate));
        mem::swap(&mut self.state.keyboard, &mut self.state.other_keyboard);
    }

    /// Shows the main screen again, with its own cursor or the alternate screen's.
    pub(crate) fn leave_alternate(&mut self, keep_cursor: bool) {
        let Some(main) = self.parked.take() else { return };
        let alternate = mem::replace(self.term.grid_mut(), main);
        if keep_cursor {
            self.term.grid_mut().cursor = alternate.cursor;
        }
        mem::swap(&mut self.state.keyboard, &mut self.state.other_keyboard);
    }

    /// The main screen reflows, the alternate one is cut or padded, as terminals do.
    pub(crate) fn resize(&mut self, size: Size) {
        if (size.cols, size.rows) == (self.state.cols, self.state.rows) {
            return;
        }
        let alternate = self.parked.take().map(|main| mem::replace(self.term.grid_mut(), main));
        self.term.resize(size);
        tidy_cursors(self.term.grid_mut());
        if let Some(mut alternate) = alternate {
            resize_grid(&mut alternate, false, size);
            self.parked = Some(mem::replace(self.term.grid_mut(), alternate));
        }
        self.state.resize(size.cols, size.rows);
    }

    pub(crate) fn answer_colour_questions(&mut self) {
        let mut outbox = self.listener.outbox();
        for (index, answer) in mem::take(&mut outbox.questions) {
            let colour = self.term.colors()[index].unwrap_or_else(|| default_colour(index));
            outbox.reply(&answer(colour));
        }
    }
}

/// Resizes a grid outside of a terminal.
pub(crate) fn resize_grid(grid: &mut Grid<Cell>, reflow: bool, size: Size) {
    grid.resize(reflow, size.rows, size.cols);
    tidy_cursors(grid);
}

/// After a resize the library can leave cursors outside of the grid, or waiting to wrap in the middle of a line.
fn tidy_cursors(grid: &mut Grid<Cell>) {
    let (bottom, right) = (grid.screen_lines() as i32 - 1, grid.columns() - 1);
    for cursor in [&mut grid.cursor, &mut grid.saved_cursor] {
        cursor.point.line = cursor.point.line.clamp(Line(0), Line(bottom));
        cursor.point.column = cursor.point.column.min(Column(right));
        cursor.input_needs_wrap &= cursor.point.column == Column(right);
    }
}

/// xterm's palette: what a program is told when it asks for a colour that it hasn't set.
fn default_colour(index: usize) -> Rgb {
    const NAMED: [u32; 16] = [
        0x000000, 0xcd0000, 0x00cd00, 0xcdcd00, 0x0000ee, 0xcd00cd, 0x00cdcd, 0xe5e5e5, 0x7f7f7f, 0xff0000, 0x00ff00, 0xffff00,
        0x5c5cff, 0xff00ff, 0x00ffff, 0xffffff,
    ];
    let level = |step: usize| if step == 0 { 0 } else { (55 + 40 * step) as u8 };
    match index {
        0..=15 => {
            let [_, r, g, b] = NAMED[index].to_be_bytes();
            Rgb { r, g, b }
        }
        16..=231 => {
            let cube = index - 16;
            Rgb { r: level(cube / 36), g: level(cube / 6 % 6), b: level(cube % 6) }
        }
        232..=255 => {
            let grey = (8 + 10 * (index - 232)) as u8;
            Rgb { r: grey, g: grey, b: grey }
        }
        257 => Rgb { r: 0, g: 0, b: 0 },
        _ => Rgb { r: 0xe5, g: 0xe5, b: 0xe5 },
    }
}
