//! What each control function does: most are the library's, some are corrected or bounded here.
//!
//! Corrected, because other terminals agree with each other and not with the library: cursor movement stops at the
//! margins and knows origin mode; deleting characters doesn't reach left of the cursor; clearing above the second
//! line clears the first; a tab at the right edge stays there; SGR 21 is a double underline. Bounded, because a
//! program may be hostile: combining marks of a cell, hyperlinks, stacks, titles.

use alacritty_terminal::grid::Dimensions;
use alacritty_terminal::index::{Column, Line};
use alacritty_terminal::term::TermMode;
use alacritty_terminal::vte::ansi::{
    Attr, CharsetIndex, ClearMode, CursorShape, CursorStyle, Handler, Hyperlink, KeyboardModes, KeyboardModesApplyBehavior,
    LineClearMode, Mode, ModifyOtherKeys, NamedPrivateMode, PrivateMode, Rgb, StandardCharset, TabulationClearMode,
};

use crate::state::State;
use crate::terminal::Terminal;

/// Combining marks that a cell keeps. Emoji sequences of families need 6 marks and joiners.
const MOST_MARKS: usize = 16;
/// The longest address of a hyperlink, as in VTE's terminals.
const LONGEST_LINK: usize = 2083;
/// Hyperlinks in both grids together may take about this many bytes; later ones show as plain text.
const MOST_LINK_BYTES: usize = 8 * 1024 * 1024;

macro_rules! same_as_library {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {
        $(fn $name(&mut self, $($arg: $ty),*) {
            self.term.$name($($arg),*);
        })*
    };
}

impl Terminal {
    fn go(&mut self, line: usize, col: usize) {
        let cursor = &mut self.term.grid_mut().cursor;
        cursor.point.line = Line(line as i32);
        cursor.point.column = Column(col);
        cursor.input_needs_wrap = false;
    }

    fn place(&self) -> (usize, usize) {
        let point = self.term.grid().cursor.point;
        (point.line.0.max(0) as usize, point.column.0)
    }

    /// Up, no further than the top margin.
    fn line_above(&self, lines: usize) -> usize {
        let (line, _) = self.place();
        let top = if line >= self.state.region.start { self.state.region.start } else { 0 };
        line.saturating_sub(lines).max(top)
    }

    /// Down, no further than the bottom margin.
    fn line_below(&self, lines: usize) -> usize {
        let (line, _) = self.place();
        let bottom = if line < self.state.region.end { self.state.region.end } else { self.state.rows };
        (line + lines).min(bottom - 1)
    }

    /// Whether `bytes` more of hyperlinks fit. The grids are searched once in a while only.
    fn link_fits(&mut self, bytes: usize) -> bool {
        self.link_bytes += bytes;
        if self.link_bytes > MOST_LINK_BYTES {
            let (main, alternate) = self.grids();
            let mut total = 0;
            for grid in [Some(main), alternate].into_iter().flatten() {
                let mut last = None;
                for line in -(grid.history_size() as i32)..grid.screen_lines() as i32 {
                    for cell in &grid[Line(line)] {
                        let link = cell.hyperlink();
                        if link.is_some() && link != last {
                            total += link.as_ref().map_or(0, |link| link.uri().len() + link.id().len());
                        }
                        last = link;
                    }
                }
            }
            self.links_full = total > MOST_LINK_BYTES / 2;
            self.link_bytes = 0;
        }
        !self.links_full
    }
}

impl Handler for Terminal {
    same_as_library! {
        insert_blank(count: usize);
        carriage_return();
        backspace();
        bell();
        substitute();
        scroll_up(lines: usize);
        scroll_down(lines: usize);
        insert_blank_lines(lines: usize);
        delete_lines(lines: usize);
        erase_chars(count: usize);
        move_forward(cols: usize);
        move_backward(cols: usize);
        save_cursor_position();
        clear_line(mode: LineClearMode);
        reverse_index();
        set_mode(mode: Mode);
        unset_mode(mode: Mode);
        report_mode(mode: Mode);
        set_keypad_application_mode();
        unset_keypad_application_mode();
        configure_charset(index: CharsetIndex, charset: StandardCharset);
        set_color(index: usize, colour: Rgb);
        reset_color(index: usize);
        decaln();
        identify_terminal(intermediate: Option<char>);
        text_area_size_chars();
        goto(line: i32, col: usize);
    }

    fn input(&mut self, c: char) {
        self.term.input(c);
        if c < '\u{300}' {
            return;
        }
        let grid = self.term.grid_mut();
        let point = grid.cursor.point;
        // A mark went to the cell before the cursor; two to the left where that one is wide.
        for back in 0..=2 {
            let col = Column(point.column.0.saturating_sub(back));
            let cell = &mut grid[point.line][col];
            if cell.zerowidth().is_some_and(|marks| marks.len() > MOST_MARKS) {
                let marks = cell.zerowidth().unwrap_or_default()[..MOST_MARKS].to_vec();
                let (link, underline) = (cell.hyperlink(), cell.underline_color());
                cell.extra = None;
                cell.set_hyperlink(link);
                cell.set_underline_color(underline);
                marks.into_iter().for_each(|mark| cell.push_zerowidth(mark));
            }
        }
    }

    /// The parser calls this for LF, VT and FF, and doesn't know the mode in which they return to the first column.
    fn linefeed(&mut self) {
        self.term.linefeed();
        if self.mode(TermMode::LINE_FEED_NEW_LINE) {
            self.term.carriage_return();
        }
    }

    fn move_up(&mut self, lines: usize) {
        self.go(self.line_above(lines), self.place().1);
    }

    fn move_down(&mut self, lines: usize) {
        self.go(self.line_below(lines), self.place().1);
    }

    fn move_up_and_cr(&mut self, lines: usize) {
        self.go(self.line_above(lines), 0);
    }

    fn move_down_and_cr(&mut self, lines: usize) {
        self.go(self.line_below(lines), 0);
    }

    fn goto_line(&mut self, line: i32) {
        self.term.goto(line, self.place().1);
    }

    fn goto_col(&mut self, col: usize) {
        self.go(self.place().0, col.min(self.state.cols - 1));
    }

    fn delete_chars(&mut self, count: usize) {
        self.term.delete_chars(count.min(self.state.cols - self.place().1));
    }

    fn restore_cursor_position(&mut self) {
        self.term.restore_cursor_position();
        if self.mode(TermMode::ORIGIN) {
            let region = self.state.region.clone();
            let line = &mut self.term.grid_mut().cursor.point.line;
            *line = (*line).clamp(Line(region.start as i32), Line(region.end as i32 - 1));
        }
    }

    fn clear_screen(&mut self, mode: ClearMode) {
        match mode {
            ClearMode::All if self.in_alternate() => self.term.grid_mut().reset_region(..),
            ClearMode::Above if self.place().0 == 1 => {
                self.term.grid_mut().reset_region(..Line(1));
                self.term.clear_screen(mode);
            }
            _ => self.term.clear_screen(mode),
        }
    }

    fn put_tab(&mut self, count: u16) {
        self.move_forward_tabs(count);
    }

    fn move_forward_tabs(&mut self, count: u16) {
        let (line, mut col) = self.place();
        if self.term.grid().cursor.input_needs_wrap {
            return;
        }
        for _ in 0..count {
            if col + 1 >= self.state.cols {
                break;
            }
            col = (col + 1..self.state.cols).find(|&col| self.state.tabs[col]).unwrap_or(self.state.cols - 1);
        }
        self.go(line, col);
    }

    fn move_backward_tabs(&mut self, count: u16) {
        let (line, mut col) = self.place();
        for _ in 0..count {
            if col == 0 {
                break;
            }
            col = (0..col).rev().find(|&col| self.state.tabs[col]).unwrap_or(0);
        }
        self.go(line, col);
    }

    fn set_horizontal_tabstop(&mut self) {
        let (_, col) = self.place();
        self.state.tabs[col] = true;
    }

    fn clear_tabs(&mut self, mode: TabulationClearMode) {
        match mode {
            TabulationClearMode::Current => {
                let (_, col) = self.place();
                self.state.tabs[col] = false;
            }
            TabulationClearMode::All => self.state.tabs.fill(false),
        }
    }

    fn set_tabs(&mut self, _every_eighth: u16) {
        self.state.reset_tabs();
    }

    fn set_scrolling_region(&mut self, top: usize, bottom: Option<usize>) {
        let bottom = bottom.unwrap_or(self.state.rows).min(self.state.rows);
        if top < bottom || (top == 1 && self.state.rows == 1) {
            self.state.region = top - 1..bottom;
            self.term.set_scrolling_region(top, Some(bottom));
        }
    }

    fn set_active_charset(&mut self, index: CharsetIndex) {
        self.state.charset = index;
        self.term.set_active_charset(index);
    }

    fn terminal_attribute(&mut self, attr: Attr) {
        self.term.terminal_attribute(if attr == Attr::CancelBold { Attr::DoubleUnderline } else { attr });
    }

    fn set_hyperlink(&mut self, link: Option<Hyperlink>) {
        let link = link.filter(|link| {
            let id = link.id.as_deref().unwrap_or_default();
            link.uri.len() <= LONGEST_LINK && id.len() <= 256 && !(link.uri.chars().chain(id.chars())).any(char::is_control)
        });
        let bytes = link.as_ref().map_or(0, |link| link.uri.len() + link.id.as_ref().map_or(0, String::len));
        let fits = bytes == 0 || self.link_fits(bytes);
        // The library would number links without an id, in one count for all terminals of the process.
        let link = link.filter(|_| fits).map(|link| Hyperlink { id: Some(link.id.unwrap_or_default()), uri: link.uri });
        self.term.set_hyperlink(link);
    }

    fn reset_state(&mut self) {
        self.leave_alternate(false);
        self.term.reset_state();
        (0..=258).for_each(|index| self.term.reset_color(index));
        self.state = State::new(self.state.cols, self.state.rows);
    }

    fn set_private_mode(&mut self, mode: PrivateMode) {
        match mode {
            PrivateMode::Named(NamedPrivateMode::SwapScreenAndSetRestoreCursor) => self.enter_alternate(true),
            PrivateMode::Named(NamedPrivateMode::AlternateScroll) => self.state.set_viewer_mode(1007, true),
            PrivateMode::Named(NamedPrivateMode::BlinkingCursor) => self.style().blinking = true,
            PrivateMode::Unknown(47 | 1047) => self.enter_alternate(false),
            PrivateMode::Unknown(1048) => self.save_cursor_position(),
            PrivateMode::Unknown(66) => self.set_keypad_application_mode(),
            PrivateMode::Unknown(mode) => self.state.set_viewer_mode(mode, true),
            named => self.term.set_private_mode(named),
        }
    }

    fn unset_private_mode(&mut self, mode: PrivateMode) {
        match mode {
            PrivateMode::Named(NamedPrivateMode::SwapScreenAndSetRestoreCursor) => self.leave_alternate(false),
            PrivateMode::Named(NamedPrivateMode::AlternateScroll) => self.state.set_viewer_mode(1007, false),
            PrivateMode::Named(NamedPrivateMode::BlinkingCursor) => self.style().blinking = false,
            PrivateMode::Named(NamedPrivateMode::Origin) => {
                self.term.unset_private_mode(mode);
                self.go(0, 0);
            }
            PrivateMode::Unknown(47 | 1047) => self.leave_alternate(true),
            PrivateMode::Unknown(1048) => self.restore_cursor_position(),
            PrivateMode::Unknown(66) => self.unset_keypad_application_mode(),
            PrivateMode::Unknown(mode) => self.state.set_viewer_mode(mode, false),
            named => self.term.unset_private_mode(named),
        }
    }

    fn report_private_mode(&mut self, mode: PrivateMode) {
        let answer = |set| if set { 1 } else { 2 };
        let state = match mode {
            PrivateMode::Named(NamedPrivateMode::SwapScreenAndSetRestoreCursor) | PrivateMode::Unknown(47 | 1047) => {
                answer(self.in_alternate())
            }
            PrivateMode::Named(NamedPrivateMode::BlinkingCursor) => {
                answer(self.state.cursor_style.is_some_and(|style| style.blinking))
            }
            // Programs use synchronised updates where the answer is "known, off".
            PrivateMode::Named(NamedPrivateMode::SyncUpdate) => 2,
            PrivateMode::Named(NamedPrivateMode::AlternateScroll) => answer(self.state.viewer_mode(1007) == Some(true)),
            PrivateMode::Unknown(number) => self.state.viewer_mode(number).map_or(0, answer),
            other => return self.term.report_private_mode(other),
        };
        self.listener.outbox().reply(&format!("\x1b[?{};{state}$y", mode.raw()));
    }

    fn device_status(&mut self, what: usize) {
        match what {
            5 => self.listener.outbox().reply("\x1b[0n"),
            6 => {
                let (line, col) = self.place();
                let top = if self.mode(TermMode::ORIGIN) { self.state.region.start } else { 0 };
                self.listener.outbox().reply(&format!("\x1b[{};{}R", line.saturating_sub(top) + 1, col + 1));
            }
            _ => {}
        }
    }

    fn dynamic_color_sequence(&mut self, prefix: String, index: usize, terminator: &str) {
        self.term.dynamic_color_sequence(prefix, index, terminator);
        self.answer_colour_questions();
    }

    fn set_cursor_style(&mut self, style: Option<CursorStyle>) {
        self.state.cursor_style = style;
    }

    fn set_cursor_shape(&mut self, shape: CursorShape) {
        self.style().shape = shape;
    }

    fn set_title(&mut self, title: Option<String>) {
        self.state.set_title(title);
    }

    fn push_title(&mut self) {
        self.state.push_title();
    }

    fn pop_title(&mut self) {
        self.state.pop_title();
    }

    fn report_keyboard_mode(&mut self) {
        let flags = self.state.keyboard.flags();
        self.listener.outbox().reply(&format!("\x1b[?{flags}u"));
    }

    fn push_keyboard_mode(&mut self, mode: KeyboardModes) {
        self.state.keyboard.push(mode.bits());
    }

    fn pop_keyboard_modes(&mut self, count: u16) {
        self.state.keyboard.pop(usize::from(count));
    }

    fn set_keyboard_mode(&mut self, mode: KeyboardModes, behaviour: KeyboardModesApplyBehavior) {
        let now = self.state.keyboard.flags();
        self.state.keyboard.set(match behaviour {
            KeyboardModesApplyBehavior::Replace => mode.bits(),
            KeyboardModesApplyBehavior::Union => now | mode.bits(),
            KeyboardModesApplyBehavior::Difference => now & !mode.bits(),
        });
    }

    fn set_modify_other_keys(&mut self, mode: ModifyOtherKeys) {
        self.state.other_keys = match mode {
            ModifyOtherKeys::Reset => 0,
            ModifyOtherKeys::EnableExceptWellDefined => 1,
            ModifyOtherKeys::EnableAll => 2,
        };
    }

    fn report_modify_other_keys(&mut self) {
        let mode = self.state.other_keys;
        self.listener.outbox().reply(&format!("\x1b[>4;{mode}m"));
    }
}

impl Terminal {
    fn style(&mut self) -> &mut CursorStyle {
        self.state.cursor_style.get_or_insert_default()
    }
}
