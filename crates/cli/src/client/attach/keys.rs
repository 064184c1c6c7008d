//! The keys that detach from a terminal.

use std::{fmt, str::FromStr};

/// Keys that detach when they are pressed one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetachKeys {
    bytes: Vec<u8>,
    text: String,
}

/// A list of keys that can't be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadKeys(String);

impl fmt::Display for BadKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is not a key: use a letter, or ctrl- and one of a to z, @, [, \\, ], ^, _", self.0)
    }
}

impl std::error::Error for BadKeys {}

impl FromStr for DetachKeys {
    type Err = BadKeys;
    /// Reads keys with commas between them, as Docker does: `ctrl-p,ctrl-q`, `ctrl-\,d`.
    fn from_str(text: &str) -> Result<DetachKeys, BadKeys> {
        let key = |word: &str| match word.strip_prefix("ctrl-").map(str::as_bytes) {
            Some(&[letter @ b'a'..=b'z']) => Ok(letter - b'a' + 1),
            Some(&[letter @ b'A'..=b'Z']) => Ok(letter - b'A' + 1),
            Some(&[sign @ (b'@' | b'[' | b'\\' | b']' | b'^' | b'_')]) => Ok(sign - b'@'),
            None if word.len() == 1 && word.is_ascii() => Ok(word.as_bytes()[0]),
            _ => Err(BadKeys(word.to_owned())),
        };
        let bytes = text.split(',').map(key).collect::<Result<_, _>>()?;
        Ok(DetachKeys { bytes, text: text.to_owned() })
    }
}

impl fmt::Display for DetachKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Looks for the keys in what is typed. Keys that may be the beginning are held back until the next one decides.
#[derive(Debug)]
pub struct DetachWatch {
    keys: Vec<u8>,
    held: usize,
}

/// What was typed, apart from the keys that detach.
#[derive(Debug, PartialEq, Eq)]
pub struct Typed {
    pub input: Vec<u8>,
    pub detach: bool,
}

impl DetachWatch {
    /// A watch for `keys`.
    pub fn new(keys: &DetachKeys) -> DetachWatch {
        DetachWatch { keys: keys.bytes.clone(), held: 0 }
    }

    /// More input. What comes after the detaching keys is dropped.
    pub fn feed(&mut self, typed: &[u8]) -> Typed {
        let mut input = Vec::with_capacity(typed.len());
        for byte in typed {
            while self.held > 0 && self.keys[self.held] != *byte {
                self.fall_back(&mut input);
            }
            if self.keys[self.held] == *byte {
                self.held += 1;
                if self.held == self.keys.len() {
                    self.held = 0;
                    return Typed { input, detach: true };
                }
            } else {
                input.push(*byte);
            }
        }
        Typed { input, detach: false }
    }

    /// Lets go of the fewest held keys so that the rest is a beginning again.
    fn fall_back(&mut self, input: &mut Vec<u8>) {
        let held = &self.keys[..self.held];
        let released = (1..=held.len()).find(|n| self.keys.starts_with(&held[*n..])).unwrap_or(held.len());
        input.extend_from_slice(&held[..released]);
        self.held -= released;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_written_like_dockers() {
        for (text, bytes) in [
            (r"ctrl-\,d", &b"\x1cd"[..]),
            ("ctrl-p,ctrl-q", b"\x10\x11"),
            ("ctrl-A", b"\x01"),
            ("ctrl-@,x", b"\0x"),
            ("ctrl-_", b"\x1f"),
            ("~,.", b"~."),
        ] {
            assert_eq!(text.parse::<DetachKeys>().unwrap().bytes, bytes, "{text}");
        }
        for bad in ["", "ctrl-", "ctrl-1", "ab", "a,,b", "é"] {
            assert!(bad.parse::<DetachKeys>().is_err(), "{bad}");
        }
    }

    #[test]
    fn everything_but_the_keys_is_input() {
        let keys = |text: &str| DetachWatch::new(&text.parse().unwrap());
        let mut watch = keys(r"ctrl-\,d");
        assert_eq!(watch.feed(b"ls\x1c"), Typed { input: b"ls".to_vec(), detach: false });
        assert_eq!(watch.feed(b"x"), Typed { input: b"\x1cx".to_vec(), detach: false });
        assert_eq!(watch.feed(b"\x1c\x1c"), Typed { input: b"\x1c".to_vec(), detach: false });
        assert_eq!(watch.feed(b"d rest"), Typed { input: Vec::new(), detach: true });
        let mut watch = keys("a,a,b");
        assert_eq!(watch.feed(b"aaacaab"), Typed { input: b"aaac".to_vec(), detach: true });
        let mut watch = keys("a,b,a,c");
        assert_eq!(watch.feed(b"ababac"), Typed { input: b"ab".to_vec(), detach: true });
    }
}
