//! What the emulator library keeps to itself or doesn't know, and a redraw needs.

use std::collections::BTreeMap;
use std::ops::Range;

use alacritty_terminal::vte::ansi::{CharsetIndex, CursorStyle};

/// Distance of the tab stops that a terminal starts with.
const TAB_WIDTH: usize = 8;
/// As many entries as a terminal keeps in a stack that programs push to.
const DEEPEST_STACK: usize = 16;
/// A title is cut after this many characters.
const LONGEST_TITLE: usize = 256;

/// Private modes (DECSET) that concern the viewer's keyboard, mouse or colours and that the emulator ignores:
/// reverse video, X10 mouse, alternate scroll, urxvt and pixel mouse, meta and modifier keys, colour scheme reports.
const VIEWER_MODES: [u16; 10] = [5, 9, 1007, 1015, 1016, 1034, 1035, 1036, 1039, 2031];
/// Those of them that are off to begin with in every terminal. The others are a matter of the viewer's taste, until a
/// program says on or off.
const OFF_AT_FIRST: [u16; 5] = [5, 9, 1015, 1016, 2031];

/// State beside the two grids.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct State {
    pub(crate) cols: usize,
    pub(crate) rows: usize,
    /// Lines that scroll, counted from 0.
    pub(crate) region: Range<usize>,
    pub(crate) tabs: Vec<bool>,
    pub(crate) charset: CharsetIndex,
    pub(crate) cursor_style: Option<CursorStyle>,
    pub(crate) title: Option<String>,
    titles: Vec<Option<String>>,
    pub(crate) keyboard: Keyboard,
    /// The keyboard of the screen (main or alternate) that isn't shown.
    pub(crate) other_keyboard: Keyboard,
    /// XTMODKEYS modifyOtherKeys: 0, 1 or 2.
    pub(crate) other_keys: u8,
    /// What programs said about [`VIEWER_MODES`].
    viewer_modes: BTreeMap<u16, bool>,
}

impl State {
    pub(crate) fn new(cols: usize, rows: usize) -> Self {
        Self {
            cols,
            rows,
            region: 0..rows,
            tabs: default_tabs(cols),
            charset: CharsetIndex::G0,
            cursor_style: None,
            title: None,
            titles: Vec::new(),
            keyboard: Keyboard::default(),
            other_keyboard: Keyboard::default(),
            other_keys: 0,
            viewer_modes: BTreeMap::new(),
        }
    }

    /// A terminal that changes size forgets its scroll region; new columns have the usual tab stops.
    pub(crate) fn resize(&mut self, cols: usize, rows: usize) {
        let old = self.tabs.len();
        self.tabs.resize(cols, false);
        for col in old..cols {
            self.tabs[col] = col % TAB_WIDTH == 0;
        }
        (self.cols, self.rows, self.region) = (cols, rows, 0..rows);
    }

    pub(crate) fn has_default_tabs(&self) -> bool {
        self.tabs == default_tabs(self.cols)
    }

    pub(crate) fn reset_tabs(&mut self) {
        self.tabs = default_tabs(self.cols);
    }

    /// Takes note of a private mode, if it is one of the viewer's.
    pub(crate) fn set_viewer_mode(&mut self, mode: u16, on: bool) {
        if !on && OFF_AT_FIRST.contains(&mode) {
            self.viewer_modes.remove(&mode);
        } else if VIEWER_MODES.contains(&mode) {
            self.viewer_modes.insert(mode, on);
        }
    }

    /// What programs said about the viewer's modes.
    pub(crate) fn viewer_modes(&self) -> impl Iterator<Item = (u16, bool)> {
        self.viewer_modes.iter().map(|(mode, on)| (*mode, *on))
    }

    /// Whether a viewer's mode is on, if the mode is known.
    pub(crate) fn viewer_mode(&self, mode: u16) -> Option<bool> {
        VIEWER_MODES.contains(&mode).then(|| self.viewer_modes.get(&mode) == Some(&true))
    }

    pub(crate) fn set_title(&mut self, title: Option<String>) {
        self.title = title.map(|title| title.chars().filter(|c| !is_unsafe(*c)).take(LONGEST_TITLE).collect());
    }

    pub(crate) fn push_title(&mut self) {
        push_bounded(&mut self.titles, self.title.clone());
    }

    pub(crate) fn pop_title(&mut self) {
        if let Some(title) = self.titles.pop() {
            self.title = title;
        }
    }
}

/// Control characters, and those that reorder the text around a title.
fn is_unsafe(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
}

fn default_tabs(cols: usize) -> Vec<bool> {
    (0..cols).map(|col| col % TAB_WIDTH == 0).collect()
}

fn push_bounded<T>(stack: &mut Vec<T>, entry: T) {
    if stack.len() >= DEEPEST_STACK {
        stack.remove(0);
    }
    stack.push(entry);
}

/// Flags of the kitty keyboard protocol, one stack for each screen.
/// <https://sw.kovidgoyal.net/kitty/keyboard-protocol/>
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Keyboard {
    /// Flags in force below all pushed ones.
    pub(crate) base: u8,
    pub(crate) pushed: Vec<u8>,
}

impl Keyboard {
    pub(crate) fn flags(&self) -> u8 {
        self.pushed.last().copied().unwrap_or(self.base)
    }

    pub(crate) fn set(&mut self, flags: u8) {
        *self.pushed.last_mut().unwrap_or(&mut self.base) = flags;
    }

    pub(crate) fn push(&mut self, flags: u8) {
        push_bounded(&mut self.pushed, flags);
    }

    /// Popping more than there is resets all flags.
    pub(crate) fn pop(&mut self, count: usize) {
        if count > self.pushed.len() {
            self.base = 0;
        }
        self.pushed.truncate(self.pushed.len().saturating_sub(count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_are_cleaned_and_cut() {
        let mut state = State::new(80, 24);
        state.set_title(Some(format!("a\u{1b}[31m\n\u{9b}\u{202e}b{}", "x".repeat(1000))));
        let title = state.title.expect("a title was set");
        assert!(title.starts_with("a[31mbxx"), "{title}");
        assert_eq!(title.chars().count(), LONGEST_TITLE);
    }

    #[test]
    fn keyboard_stack_is_bounded() {
        let mut keyboard = Keyboard::default();
        keyboard.set(1);
        (0..10_000).for_each(|_| keyboard.push(5));
        assert_eq!((keyboard.pushed.len(), keyboard.flags()), (DEEPEST_STACK, 5));
        keyboard.pop(DEEPEST_STACK);
        assert_eq!(keyboard.flags(), 1);
        keyboard.pop(1);
        assert_eq!(keyboard.flags(), 0);
    }
}
