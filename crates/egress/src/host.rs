//! Where a connection wants to go, as a program inside wrote it, read in exactly one way.

use model::network::host_name;
use std::{fmt, net::IpAddr};

/// A host: a name in the form of [`host_name`], or an address with mapped forms resolved.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Host {
    Name(String),
    Address(IpAddr),
}

/// A host and a port that isn't 0.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Destination {
    pub host: Host,
    pub port: u16,
}

impl Host {
    /// Reads a host. Other spellings of addresses (octal, decimal, hexadecimal, short) are neither name nor address:
    /// some resolvers would take them for addresses that no rule has seen.
    pub fn parse(text: &str) -> Result<Host, String> {
        let inner = match text.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').ok_or("a '[' without its ']'")?,
            None => text,
        };
        if let Ok(address) = inner.parse::<IpAddr>() {
            return Ok(Host::Address(address.to_canonical()));
        }
        if inner.len() != text.len() {
            return Err("what stands between '[' and ']' is no address".into());
        }
        host_name(text).map(Host::Name)
    }

    /// The name, where it is one.
    pub fn name(&self) -> Option<&str> {
        match self {
            Host::Name(name) => Some(name),
            Host::Address(_) => None,
        }
    }
}

impl Destination {
    /// A host and port from a protocol that has them apart.
    pub fn new(host: &str, port: u16) -> Result<Destination, String> {
        if port == 0 {
            return Err("a port is a number from 1 to 65535".into());
        }
        Ok(Destination { host: Host::parse(host)?, port })
    }

    /// Reads `HOST:PORT`; without a port `default` counts.
    pub fn parse(text: &str, default: Option<u16>) -> Result<Destination, String> {
        if text.contains('@') {
            return Err("a user in front of '@' has no place here".into());
        }
        // An IPv6 address has colons of its own, and stands in brackets.
        let at = text.rfind(':').filter(|at| !text[*at..].contains(']'));
        let (host, port) = match (at, default) {
            (Some(at), _) => (&text[..at], read_port(&text[at + 1..])?),
            (None, Some(port)) => (text, port),
            (None, None) => return Err("it is written HOST:PORT".into()),
        };
        Destination::new(host, port)
    }
}

fn read_port(text: &str) -> Result<u16, String> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten().ok_or_else(|| "a port is a number from 1 to 65535".into())
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Name(name) => f.write_str(name),
            Host::Address(address) => address.fmt(f),
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host {
            Host::Address(IpAddr::V6(address)) => write!(f, "[{address}]:{}", self.port),
            _ => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_read_in_one_way() {
        for (text, shown) in [
            ("Example.COM.:443", "example.com:443"),
            ("10.0.0.1:80", "10.0.0.1:80"),
            ("[::1]:80", "[::1]:80"),
            ("[::ffff:10.0.0.1]:80", "10.0.0.1:80"),
            ("example.com", "example.com:8"),
            ("[2001:db8::1]", "[2001:db8::1]:8"),
        ] {
            assert_eq!(Destination::parse(text, Some(8)).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn what_is_no_destination_is_refused() {
        let long = format!("{}:80", "a".repeat(300));
        for text in [
            "",
            ":",
            ":80",
            "a:",
            "a:0",
            "a:99999",
            "a:+80",
            "a:80:90",
            "0x7f.1:80",
            "2130706433:80",
            "0177.0.0.1:80",
            "127.1:80",
            "[::1:80",
            "[a]:80",
            "::1]:80",
            "[fe80::1%eth0]:80",
            "user@a:80",
            "a b:80",
            "a/b:80",
            "a%2e:80",
            "ä:80",
            &long,
        ] {
            assert!(Destination::parse(text, None).is_err(), "{text}");
        }
        assert!(Destination::parse("a", None).is_err());
    }
}
