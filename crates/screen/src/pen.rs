//! Writes the colours and attributes of cells, as few bytes as the change from the last cell needs.

use std::io::Write;

use alacritty_terminal::term::cell::{Cell, Flags, Hyperlink};
use alacritty_terminal::vte::ansi::{Color, NamedColor};

/// The flags that say how a cell looks, without those about its place in the grid.
pub(crate) const LOOK: Flags = Flags::INVERSE
    .union(Flags::BOLD)
    .union(Flags::ITALIC)
    .union(Flags::DIM)
    .union(Flags::HIDDEN)
    .union(Flags::STRIKEOUT)
    .union(Flags::ALL_UNDERLINES);

pub(crate) const NO_FOREGROUND: Color = Color::Named(NamedColor::Foreground);
pub(crate) const NO_BACKGROUND: Color = Color::Named(NamedColor::Background);

/// SGR parameters that switch on each flag.
const ATTRIBUTES: [(Flags, &str); 11] = [
    (Flags::BOLD, "1"),
    (Flags::DIM, "2"),
    (Flags::ITALIC, "3"),
    (Flags::UNDERLINE, "4"),
    (Flags::DOUBLE_UNDERLINE, "4:2"),
    (Flags::UNDERCURL, "4:3"),
    (Flags::DOTTED_UNDERLINE, "4:4"),
    (Flags::DASHED_UNDERLINE, "4:5"),
    (Flags::INVERSE, "7"),
    (Flags::HIDDEN, "8"),
    (Flags::STRIKEOUT, "9"),
];

/// How the next character would look on the terminal that is written to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pen {
    fg: Color,
    bg: Color,
    flags: Flags,
    underline: Option<Color>,
    link: Option<Hyperlink>,
}

impl Pen {
    pub(crate) const PLAIN: Pen =
        Pen { fg: NO_FOREGROUND, bg: NO_BACKGROUND, flags: Flags::empty(), underline: None, link: None };

    pub(crate) fn has_background(&self) -> bool {
        self.bg != NO_BACKGROUND
    }

    /// Makes the pen plain, hyperlink included.
    pub(crate) fn reset(&mut self, out: &mut Vec<u8>) {
        if *self != Self::PLAIN {
            self.change(&Cell::default(), out);
        }
    }

    /// Makes the pen look like `cell`.
    #[inline(always)]
    pub(crate) fn take(&mut self, cell: &Cell, out: &mut Vec<u8>) {
        let same = self.fg == cell.fg && self.bg == cell.bg && self.flags == cell.flags & LOOK;
        if !same || cell.extra.is_some() || self.underline.is_some() || self.link.is_some() {
            self.change(cell, out);
        }
    }

    /// Erases to the end of the line with the background of `cell`, which must be plain otherwise.
    pub(crate) fn erase(&mut self, cell: &Cell, out: &mut Vec<u8>) {
        self.change(&Cell::from(cell.bg), out);
        out.extend_from_slice(b"\x1b[K");
    }

    #[inline(never)]
    fn change(&mut self, cell: &Cell, out: &mut Vec<u8>) {
        let link = cell.hyperlink();
        if link != self.link {
            match &link {
                Some(link) => {
                    out.extend_from_slice(if link.id().is_empty() { b"\x1b]8;" } else { b"\x1b]8;id=" });
                    out.extend_from_slice(link.id().as_bytes());
                    out.push(b';');
                    out.extend_from_slice(link.uri().as_bytes());
                }
                None => out.extend_from_slice(b"\x1b]8;;"),
            }
            out.extend_from_slice(b"\x1b\\");
            self.link = link;
        }

        let (flags, underline) = (cell.flags & LOOK, cell.underline_color());
        if (self.fg, self.bg, self.flags, self.underline) == (cell.fg, cell.bg, flags, underline) {
            return;
        }
        let mut sgr = Sgr { out, first: true };
        if !flags.contains(self.flags) {
            // Attributes have no separate "off" that all terminals agree on; starting over is short too.
            sgr.add(format_args!("0"));
            (self.fg, self.bg, self.flags, self.underline) = (NO_FOREGROUND, NO_BACKGROUND, Flags::empty(), None);
        }
        for (flag, code) in ATTRIBUTES {
            if flags.contains(flag) && !self.flags.contains(flag) {
                sgr.add(format_args!("{code}"));
            }
        }
        if self.fg != cell.fg {
            sgr.colour(cell.fg, 30);
        }
        if self.bg != cell.bg {
            sgr.colour(cell.bg, 40);
        }
        if self.underline != underline {
            sgr.underline(underline);
        }
        sgr.end();
        (self.fg, self.bg, self.flags, self.underline) = (cell.fg, cell.bg, flags, underline);
    }
}

/// One SGR sequence being written. Writing to a vector can't fail, so results are not looked at.
struct Sgr<'a> {
    out: &'a mut Vec<u8>,
    first: bool,
}

impl Sgr<'_> {
    fn add(&mut self, parameter: std::fmt::Arguments<'_>) {
        self.out.extend_from_slice(if self.first { b"\x1b[" } else { b";" });
        self.first = false;
        let _ = self.out.write_fmt(parameter);
    }

    /// `base` is 30 for the foreground, 40 for the background.
    fn colour(&mut self, colour: Color, base: usize) {
        match colour {
            Color::Named(name) => match name as usize {
                index @ 0..8 => self.add(format_args!("{}", base + index)),
                index @ 8..16 => self.add(format_args!("{}", base + 52 + index)),
                _ => self.add(format_args!("{}", base + 9)),
            },
            Color::Indexed(index) => self.add(format_args!("{};5;{index}", base + 8)),
            Color::Spec(rgb) => self.add(format_args!("{};2;{};{};{}", base + 8, rgb.r, rgb.g, rgb.b)),
        }
    }

    /// With colons: a terminal that doesn't know underline colours skips the whole parameter.
    fn underline(&mut self, colour: Option<Color>) {
        match colour {
            Some(Color::Indexed(index)) => self.add(format_args!("58:5:{index}")),
            Some(Color::Spec(rgb)) => self.add(format_args!("58:2::{}:{}:{}", rgb.r, rgb.g, rgb.b)),
            Some(Color::Named(_)) | None => self.add(format_args!("59")),
        }
    }

    fn end(self) {
        if !self.first {
            self.out.push(b'm');
        }
    }
}
