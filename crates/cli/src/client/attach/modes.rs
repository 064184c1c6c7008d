//! Which modes a session's output has switched on in the user's terminal, so that they can be switched off again.

use std::collections::BTreeSet;

/// Private modes (DECSET, `CSI ? … h`) that change what the user's terminal does after we are gone: cursor keys, mouse,
/// focus, alternate screens, bracketed paste, synchronized output.
const WATCHED: [u16; 16] = [1, 6, 47, 66, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004, 2026];

/// Longest parameter list that is followed.
const MAX_PARAMETERS: usize = 64;

#[derive(Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Ground,
    Escape,
    Csi,
    /// Inside `CSI ?`.
    Private,
}

/// Follows output across any cutting.
#[derive(Debug, Default)]
pub struct Modes {
    place: Place,
    parameters: String,
    on: BTreeSet<u16>,
    keypad: bool,
    kitty: bool,
}

impl Modes {
    /// More output, as it is written to the terminal.
    pub fn feed(&mut self, output: &[u8]) {
        for byte in output {
            self.step(*byte);
        }
    }

    fn step(&mut self, byte: u8) {
        let place = std::mem::take(&mut self.place);
        self.place = match (place, byte) {
            (_, 0x1B) => Place::Escape,
            (Place::Escape, b'[') => {
                self.parameters.clear();
                Place::Csi
            }
            (Place::Escape, b'=' | b'>') => {
                self.keypad = byte == b'=';
                Place::Ground
            }
            // RIS: everything is as it was at the start.
            (Place::Escape, b'c') => {
                *self = Modes::default();
                Place::Ground
            }
            (Place::Csi, b'?') if self.parameters.is_empty() => Place::Private,
            // Kitty's keyboard modes: `CSI > flags u` pushes, `CSI < u` pops.
            (Place::Csi, b'0'..=b'9' | b';' | b'<' | b'=' | b'>') if self.parameters.len() < MAX_PARAMETERS => {
                self.parameters.push(char::from(byte));
                Place::Csi
            }
            (Place::Csi, b'u') => {
                match self.parameters.chars().next() {
                    Some('>' | '=') => self.kitty = true,
                    Some('<') => self.kitty = false,
                    _ => {}
                }
                Place::Ground
            }
            (Place::Private, b'0'..=b'9' | b';') if self.parameters.len() < MAX_PARAMETERS => {
                self.parameters.push(char::from(byte));
                Place::Private
            }
            (Place::Private, b'h' | b'l') => {
                for mode in self.parameters.split(';').filter_map(|p| p.parse().ok()).filter(|mode| WATCHED.contains(mode)) {
                    if byte == b'h' {
                        self.on.insert(mode)
                    } else {
                        self.on.remove(&mode)
                    };
                }
                Place::Ground
            }
            _ => Place::Ground,
        };
    }

    /// What switches off all that is on, and forgets it. The alternate screen comes first: leaving it brings back the
    /// cursor that was saved on entering it.
    pub fn switch_off(&mut self) -> Vec<u8> {
        // CAN ends a sequence that was cut off in its middle.
        let mut out = vec![0x18];
        for mode in self.on.iter().rev() {
            out.extend_from_slice(format!("\x1b[?{mode}l").as_bytes());
        }
        if self.keypad {
            out.extend_from_slice(b"\x1b>");
        }
        if self.kitty {
            out.extend_from_slice(b"\x1b[<u");
        }
        // Soft defaults: colours, scrolling region, character set, insert mode, wrapping; a visible cursor of any shape.
        // Setting the region moves the cursor, so it is saved around that.
        out.extend_from_slice(b"\x1b7\x1b[r\x1b8\x1b[0m\x1b(B\x0f\x1b[4l\x1b[?7h\x1b[?25h\x1b[0 q");
        *self = Modes::default();
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn off(modes: &mut Modes) -> String {
        String::from_utf8(modes.switch_off()).unwrap()
    }

    #[test]
    fn only_what_is_on_is_switched_off() {
        let output = b"a\x1b[?1049h\x1b[?1000;1006h\x1b[31mred\x1b[?2004h\x1b[?1000l\x1b[?25l\x1b=\x1b[>1u";
        for size in 1..output.len() {
            let mut modes = Modes::default();
            output.chunks(size).for_each(|piece| modes.feed(piece));
            let text = off(&mut modes);
            for on in ["\x1b[?1049l", "\x1b[?1006l", "\x1b[?2004l", "\x1b>", "\x1b[<u", "\x1b[?25h"] {
                assert!(text.contains(on), "{on:?} of {text:?}, pieces of {size}");
            }
            assert!(!text.contains("\x1b[?1000l") && !text.contains("\x1b[?1004l"), "{text:?}");
            assert!(!off(&mut modes).contains("1049"), "it is forgotten");
        }
    }

    #[test]
    fn hostile_parameters_are_not_followed_for_ever() {
        let mut modes = Modes::default();
        modes.feed(b"\x1b[?");
        modes.feed(&[b'1'; 10_000]);
        modes.feed(b"h\x1b[?1049h");
        assert!(modes.parameters.len() <= MAX_PARAMETERS);
        assert!(off(&mut modes).contains("\x1b[?1049l"));
    }
}
