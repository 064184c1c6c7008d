//! A request's path, in the ways in which servers may read it.
//!
//! A rule's prefix must not be evaded by `%2e`, `..`, `//` or `%2f`. Where servers differ, both readings are kept: a rule
//! that allows has to match both, one that denies either. Where no reading is safe, there is none.

/// A path in its two readings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Path {
    /// As RFC 3986 (6.2.2) has it: dot segments resolved, letters, digits and `-._~` decoded, `%XX` in capitals.
    pub strict: String,
    /// As lenient servers do: all decoded once, `\` as `/`, several `/` as one.
    loose: Vec<u8>,
    /// Whether it had dot segments, so that what was judged isn't what was written.
    pub had_dots: bool,
}

/// How often a path is decoded to look for dot segments that a further decoding would bring out. What is encoded more
/// often than that wants to hide something.
const DECODINGS: usize = 5;

impl Path {
    /// Reads a path without its query; `None` where servers could read it in ways that can't be foreseen.
    pub fn read(raw: &str) -> Option<Path> {
        let rest = raw.strip_prefix('/')?;
        let (mut segments, mut had_dots): (Vec<String>, bool) = (Vec::new(), false);
        let mut ends_open = false;
        for raw in rest.split('/') {
            let segment = decode_unreserved(raw)?;
            ends_open = false;
            match segment.as_str() {
                "." => (had_dots, ends_open) = (true, true),
                ".." => {
                    // Above the root there is nothing that was meant.
                    segments.pop()?;
                    (had_dots, ends_open) = (true, true);
                }
                _ if hides_dots(&segment) => return None,
                _ => segments.push(segment),
            }
        }
        if ends_open {
            segments.push(String::new());
        }
        let strict = format!("/{}", segments.join("/"));
        let mut loose = Vec::with_capacity(strict.len());
        for byte in decode(strict.as_bytes()) {
            let byte = if byte == b'\\' { b'/' } else { byte };
            if byte != b'/' || loose.last() != Some(&b'/') {
                loose.push(byte);
            }
        }
        Some(Path { strict, loose, had_dots })
    }

    /// Whether the path begins with `prefix` in both readings (`all`), or in one of them.
    pub fn begins_with(&self, prefix: &Path, all: bool) -> bool {
        let strict = self.strict.starts_with(&prefix.strict);
        let loose = self.loose.starts_with(&prefix.loose);
        if all { strict && loose } else { strict || loose }
    }
}

/// Whether some server would find a dot segment, or the end of the text, in what is one segment to others.
fn hides_dots(segment: &str) -> bool {
    let mut bytes = segment.as_bytes().to_vec();
    for _ in 0..DECODINGS {
        let dots = bytes.split(|b| matches!(b, b'/' | b'\\')).any(|piece| {
            // Some servers take what stands behind ';' for parameters.
            let name = piece.split(|b| *b == b';').next().unwrap_or_default();
            name == b"." || name == b".."
        });
        if dots || bytes.iter().any(|b| *b < b' ' || *b == 0x7f) {
            return true;
        }
        let next = decode(&bytes);
        if next == bytes {
            return false;
        }
        bytes = next;
    }
    true
}

fn hex(pair: Option<&[u8]>) -> Option<u8> {
    let digit = |b: &u8| char::from(*b).to_digit(16);
    match pair? {
        [high, low] => u8::try_from(digit(high)? * 16 + digit(low)?).ok(),
        _ => None,
    }
}

/// Decodes every `%XX` once; what is malformed stays.
fn decode(text: &[u8]) -> Vec<u8> {
    let (mut out, mut at) = (Vec::with_capacity(text.len()), 0);
    while at < text.len() {
        match (text[at] == b'%').then(|| hex(text.get(at + 1..at + 3))).flatten() {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(text[at]);
                at += 1;
            }
        }
    }
    out
}

/// Decodes what needs no encoding; `None` for a malformed `%`.
fn decode_unreserved(segment: &str) -> Option<String> {
    let (bytes, mut out, mut at) = (segment.as_bytes(), Vec::with_capacity(segment.len()), 0);
    while at < bytes.len() {
        if bytes[at] != b'%' {
            out.push(bytes[at]);
            at += 1;
            continue;
        }
        let byte = hex(bytes.get(at + 1..at + 3))?;
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(byte);
        } else {
            out.extend(format!("%{byte:02X}").as_bytes());
        }
        at += 3;
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn paths_are_read_as_servers_do() {
        for (raw, strict) in [
            ("/", "/"),
            ("/v1/a", "/v1/a"),
            ("/v1/%2e%2E/admin", "/admin"),
            ("/v1/./%61", "/v1/a"),
            ("/v1/..", "/"),
            ("/v1/x/.", "/v1/x/"),
            ("/a%2fb", "/a%2Fb"),
            ("/a//b", "/a//b"),
        ] {
            assert_eq!(Path::read(raw).unwrap().strict, strict, "{raw}");
        }
    }

    #[test]
    fn what_can_be_read_in_unforeseen_ways_is_refused() {
        for raw in [
            "",
            "*",
            "v1",
            "/..",
            "/v1/../../x",
            "/v1/..%2fadmin",
            "/v1/%2e%2e%2fadmin",
            "/v1/%252e%252e%252fadmin",
            "/v1/..%5cadmin",
            "/v1/..\\admin",
            "/v1/..;/admin",
            "/v1/%zz",
            "/v1/%",
            "/v1/%2",
            "/v1/%00",
            "/v1/%0a",
            "/v1/%25252e%25252e",
        ] {
            assert_eq!(Path::read(raw), None, "{raw}");
        }
    }

    #[test]
    fn an_encoded_slash_matches_in_both_readings_or_one() {
        let read = |raw| Path::read(raw).unwrap();
        assert!(!read("/v1%2fadmin").begins_with(&read("/v1/"), true));
        assert!(read("/v1%2fadmin").begins_with(&read("/v1/"), false));
        assert!(read("/projects/a%2Fb/x").begins_with(&read("/projects/a%2fb"), true));
        assert!(read("//admin").begins_with(&read("/admin"), false));
        assert!(!read("//admin").begins_with(&read("/admin"), true));
    }

    proptest! {
        /// Whatever the spelling: decoded as often as one likes, what is allowed below a prefix stays below it.
        #[test]
        fn nothing_leaves_its_prefix(parts in proptest::collection::vec(
            proptest::sample::select(vec!["/", "a", ".", "..", "%2e", "%2f", "%252e", "%252f", "%5c", "\\", ";", "b", "v1"]), 0..12)
        ) {
            let raw = format!("/v1/{}", parts.concat());
            if let Some(path) = Path::read(&raw)
                && path.begins_with(&Path::read("/v1/").unwrap(), true)
            {
                let mut bytes = path.strict.into_bytes();
                for _ in 0..3 {
                    bytes = decode(&bytes);
                    let text = String::from_utf8_lossy(&bytes).replace('\\', "/");
                    let mut stack: Vec<&str> = Vec::new();
                    for part in text.split('/').filter(|part| !part.is_empty() && *part != ".") {
                        if part == ".." { stack.pop(); } else { stack.push(part); }
                    }
                    prop_assert_eq!(stack.first(), Some(&"v1"), "{}", raw);
                }
            }
        }
    }
}
