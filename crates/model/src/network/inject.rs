//! A header that is added at the edge, with secrets in it.

use super::PolicyError;
use crate::{NameError, names::check_length};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Headers that decide how a message is read or where it goes: they can't be injected.
const NOT_THESE: &[&str] = &[
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "upgrade",
    "te",
    "trailer",
    "proxy-authorization",
    "proxy-connection",
    "keep-alive",
    "expect",
];

/// Longest value, before secrets are put in.
const LONGEST_VALUE: usize = 4096;

/// A secret's name: 1–64 of `A-Z a-z 0-9 _`, not beginning with a digit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SecretName(String);

impl SecretName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for SecretName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        check_length("secret's name", &text, 64)?;
        match text.char_indices().find(|(n, c)| !(c.is_ascii_alphabetic() || *c == '_' || *n > 0 && c.is_ascii_digit())) {
            Some((_, bad)) => Err(NameError::Character { what: "secret's name", bad }),
            None => Ok(Self(text)),
        }
    }
}

impl std::str::FromStr for SecretName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        text.to_owned().try_into()
    }
}

impl From<SecretName> for String {
    fn from(name: SecretName) -> String {
        name.0
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A header for every request to a host. In its value `{NAME}` stands for a secret, and `{basic:USER:NAME}` for the Base64
/// form of `USER:secret`, as `Authorization: Basic` wants it. `{{` and `}}` are the braces themselves.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RawInject")]
pub struct Inject {
    /// In lower case.
    pub header: String,
    parts: Vec<Part>,
}

/// A piece of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    Text(String),
    Secret(SecretName),
    Basic { user: String, secret: SecretName },
}

impl Inject {
    /// The pieces of the value.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The secrets that the value needs.
    pub fn secrets(&self) -> impl Iterator<Item = &SecretName> {
        self.parts.iter().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Secret(name) | Part::Basic { secret: name, .. } => Some(name),
        })
    }

    /// The value as it was written.
    pub fn value(&self) -> String {
        let escaped = |text: &str| text.replace('{', "{{").replace('}', "}}");
        let part = |part: &Part| match part {
            Part::Text(text) => escaped(text),
            Part::Secret(name) => format!("{{{name}}}"),
            Part::Basic { user, secret } => format!("{{basic:{user}:{secret}}}"),
        };
        self.parts.iter().map(part).collect()
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawInject {
    header: String,
    value: String,
}

impl Serialize for Inject {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        RawInject { header: self.header.clone(), value: self.value() }.serialize(serializer)
    }
}

impl TryFrom<RawInject> for Inject {
    type Error = PolicyError;

    fn try_from(raw: RawInject) -> Result<Inject, PolicyError> {
        let wrong = |why: String| PolicyError::Inject(format!("inject: {why}"));
        let header = raw.header.to_ascii_lowercase();
        let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        if header.is_empty() || header.len() > 100 || !header.bytes().all(token) {
            return Err(wrong(format!("{:?} is no name of a header", raw.header.chars().take(100).collect::<String>())));
        }
        if NOT_THESE.contains(&header.as_str()) {
            return Err(wrong(format!("the header '{header}' belongs to the connection and can't be set")));
        }
        if raw.value.len() > LONGEST_VALUE || raw.value.bytes().any(|b| b < b' ' && b != b'\t' || b >= 0x7f) {
            return Err(wrong(format!("a value is at most {LONGEST_VALUE} bytes of printable ASCII")));
        }
        Ok(Inject { header, parts: parts(&raw.value).map_err(wrong)? })
    }
}

fn parts(value: &str) -> Result<Vec<Part>, String> {
    let (mut parts, mut text) = (Vec::new(), String::new());
    let mut rest = value;
    while let Some(at) = rest.find(['{', '}']) {
        text.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            text.push_str(brace);
            rest = after;
            continue;
        }
        if brace == "}" {
            return Err("a '}' without its '{' (a brace itself is written twice)".into());
        }
        let (inner, after) = rest.split_once('}').ok_or("a '{' without its '}' (a brace itself is written twice)")?;
        rest = after;
        if !text.is_empty() {
            parts.push(Part::Text(std::mem::take(&mut text)));
        }
        parts.push(match inner.strip_prefix("basic:") {
            Some(both) => {
                let (user, name) = both.rsplit_once(':').ok_or("'{basic:…}' is written {basic:USER:NAME}")?;
                if user.contains([':', '{']) {
                    return Err("the user of '{basic:USER:NAME}' has no colon and no brace".into());
                }
                Part::Basic { user: user.to_owned(), secret: name.parse().map_err(|e: NameError| e.to_string())? }
            }
            None => Part::Secret(inner.parse().map_err(|e: NameError| e.to_string())?),
        });
    }
    text.push_str(rest);
    if !text.is_empty() {
        parts.push(Part::Text(text));
    }
    Ok(parts)
}
