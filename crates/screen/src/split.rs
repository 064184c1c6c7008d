//! Cuts a terminal's byte stream where a character or an escape sequence is complete.
//!
//! Output is read from a terminal in chunks that end anywhere. The emulator gets whole sequences only; what is
//! incomplete waits here. That keeps two promises: the result doesn't depend on how the stream was cut, and a
//! redraw can end with the incomplete bytes, so that a viewer who goes on from exactly there understands the
//! rest of the sequence instead of printing it.

/// A string sequence (OSC, DCS, …) longer than this is skipped, so that a program can't make us keep it all.
pub(crate) const LONGEST_SEQUENCE: usize = 64 * 1024;

const ESCAPE: u8 = 0x1b;

/// What the stream is made of, in order.
pub(crate) enum Piece<'a> {
    /// Bytes for the emulator. They end between sequences, save where one outgrew [`LONGEST_SEQUENCE`].
    Bytes(&'a [u8]),
    /// `CSI Ps b`: repeat the last character. A count of 65535 in 8 bytes is too cheap an attack to pass on.
    Repeat(u32),
    /// `CSI > q`: what terminal is this (XTVERSION)? The emulator's parser doesn't know it.
    AskVersion,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ground,
    Escape,
    EscapeIntermediate,
    Control,
    /// OSC: ends with BEL too.
    Command,
    /// DCS, SOS, PM, APC: ends with ST only.
    Text,
}

/// What is known of the control sequence (CSI) being read.
#[derive(Clone, Copy, Debug, Default)]
struct Control {
    first: u32,
    /// A later parameter has begun.
    later: bool,
    private: Option<u8>,
    intermediate: bool,
}

/// The cutter. It holds the beginning of what is not complete yet.
#[derive(Debug)]
pub(crate) struct Splitter {
    state: State,
    /// The current string sequence is too long: its bytes are dropped until it ends.
    skipping: bool,
    control: Control,
    held: Vec<u8>,
}

impl Splitter {
    pub(crate) fn new() -> Self {
        Self { state: State::Ground, skipping: false, control: Control::default(), held: Vec::new() }
    }

    /// Bytes after which a terminal is where the stream is: within the same incomplete character or sequence.
    pub(crate) fn incomplete(&self) -> &[u8] {
        match (self.skipping, self.state) {
            // A command number that nobody knows, then a string that nobody reads: the rest is swallowed.
            (true, State::Command) => b"\x1b]7777;",
            (true, State::Text) => b"\x1b_",
            _ => &self.held,
        }
    }

    /// Takes the next chunk and hands on what is complete.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut out: impl FnMut(Piece<'_>)) {
        if self.state == State::Ground && !self.held.is_empty() {
            // The beginning of a character: look at it again together with what follows.
            let mut joined = std::mem::take(&mut self.held);
            joined.extend_from_slice(bytes);
            return self.scan(&joined, &mut out);
        }
        self.scan(bytes, &mut out);
    }

    fn scan(&mut self, bytes: &[u8], out: &mut impl FnMut(Piece<'_>)) {
        let mut rest = bytes;
        while let Some((&byte, after)) = rest.split_first() {
            if self.state == State::Ground {
                let run = rest.iter().position(|&byte| byte == ESCAPE).unwrap_or(rest.len());
                let (text, after) = rest.split_at(run);
                let complete = if after.is_empty() { text.len() - incomplete_character(text) } else { text.len() };
                if complete > 0 {
                    out(Piece::Bytes(&text[..complete]));
                }
                self.held.extend_from_slice(&text[complete..]);
                if !after.is_empty() {
                    self.held.push(ESCAPE);
                    self.state = State::Escape;
                }
                rest = after.get(1..).unwrap_or_default();
                continue;
            }
            rest = after;
            self.sequence_byte(byte, out);
        }
    }

    /// Takes one byte inside a sequence.
    fn sequence_byte(&mut self, byte: u8, out: &mut impl FnMut(Piece<'_>)) {
        let before = self.state;
        self.state = self.step(byte);
        if self.skipping {
            self.skipping = !matches!(self.state, State::Ground | State::Escape);
            if self.state == State::Escape {
                self.held.push(byte);
            }
            return;
        }
        self.held.push(byte);
        if self.state == State::Ground {
            match self.special(before, byte) {
                Some(special) => out(special),
                None => out(Piece::Bytes(&self.held)),
            }
            self.held.clear();
        } else if self.held.len() >= LONGEST_SEQUENCE {
            if matches!(self.state, State::Command | State::Text) {
                self.skipping = true;
            } else {
                // A control sequence of this length: the parser keeps no more than its first parameters.
                out(Piece::Bytes(&self.held));
            }
            self.held = Vec::new();
        }
    }

    /// The state after `byte`, as the emulator's parser has it (Paul Williams' "DEC-compatible parser").
    fn step(&mut self, byte: u8) -> State {
        match (byte, self.state) {
            (0x18 | 0x1a, _) => State::Ground,
            (ESCAPE, _) => State::Escape,
            (0x07, State::Command) => State::Ground,
            (_, State::Command) => State::Command,
            (_, State::Text) => State::Text,
            (b'[', State::Escape) => {
                self.control = Control::default();
                State::Control
            }
            (b']', State::Escape) => State::Command,
            (b'P' | b'X' | b'^' | b'_', State::Escape) => State::Text,
            (0x20..=0x2f, State::Escape | State::EscapeIntermediate) => State::EscapeIntermediate,
            (0x30..=0x7e, State::Escape | State::EscapeIntermediate) => State::Ground,
            (0x40..=0x7e, State::Control) => State::Ground,
            (_, State::Control) => {
                self.control.take(byte);
                State::Control
            }
            (_, state) => state,
        }
    }

    fn special(&self, before: State, last: u8) -> Option<Piece<'static>> {
        if before != State::Control || self.control.intermediate {
            return None;
        }
        match (last, self.control.private) {
            (b'b', None) => Some(Piece::Repeat(self.control.first.max(1))),
            (b'q', Some(b'>')) => Some(Piece::AskVersion),
            _ => None,
        }
    }
}

impl Control {
    fn take(&mut self, byte: u8) {
        match byte {
            b'0'..=b'9' if !self.later => {
                self.first = self.first.saturating_mul(10).saturating_add(u32::from(byte - b'0'));
            }
            b':' | b';' => self.later = true,
            b'<'..=b'?' => self.private = Some(byte),
            0x20..=0x2f => self.intermediate = true,
            _ => {}
        }
    }
}

/// How many bytes at the end of `text` begin a UTF-8 character that isn't complete.
fn incomplete_character(text: &[u8]) -> usize {
    for back in 1..=text.len().min(3) {
        let byte = text[text.len() - back];
        let needed = match byte {
            0x80..=0xbf => continue,
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            _ => return 0,
        };
        return if needed > back { back } else { 0 };
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(splitter: &mut Splitter, bytes: &[u8]) -> Vec<String> {
        let mut seen = Vec::new();
        splitter.feed(bytes, |piece| {
            seen.push(match piece {
                Piece::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                Piece::Repeat(count) => format!("repeat {count}"),
                Piece::AskVersion => "version?".to_owned(),
            })
        });
        seen
    }

    #[test]
    fn holds_what_is_incomplete() {
        for (bytes, incomplete) in [
            (&b"abc"[..], &b""[..]),
            (b"a\x1b", b"\x1b"),
            (b"a\x1b[1;3", b"\x1b[1;3"),
            (b"a\x1b[1;31m", b""),
            (b"a\x1b]0;title", b"\x1b]0;title"),
            (b"a\x1b]0;title\x1b", b"\x1b]0;title\x1b"),
            (b"a\x1b]0;title\x07", b""),
            (b"a\x1b]0;title\x1b\\", b""),
            (b"a\x1bPq#0", b"\x1bPq#0"),
            (b"a\x1b(", b"\x1b("),
            (b"a\x1b[12\x18b", b""),
            (b"\xe2\x82", b"\xe2\x82"),
            (b"\xe2\x82\xac", b""),
            (b"\xff\xff", b""),
        ] {
            let mut splitter = Splitter::new();
            splitter.feed(bytes, |_| {});
            assert_eq!(splitter.incomplete(), incomplete, "{:?}", bytes.escape_ascii().to_string());
        }
    }

    #[test]
    fn special_sequences_are_told_apart() {
        let mut splitter = Splitter::new();
        assert_eq!(pieces(&mut splitter, b"x\x1b[5"), ["x"]);
        assert_eq!(pieces(&mut splitter, b"00b\x1b[>0q\x1b[2 q"), ["repeat 500", "version?", "\x1b[2 q"]);
    }

    #[test]
    fn an_endless_string_is_skipped() {
        let mut splitter = Splitter::new();
        splitter.feed(b"\x1b]52;c;", |_| {});
        for _ in 0..100 {
            assert!(pieces(&mut splitter, &[b'x'; 4096]).is_empty());
        }
        assert!(splitter.held.capacity() <= 2 * LONGEST_SEQUENCE);
        assert_eq!(splitter.incomplete(), b"\x1b]7777;");
        assert_eq!(pieces(&mut splitter, b"x\x07after"), ["after"]);
        assert_eq!(splitter.incomplete(), b"");
    }
}
