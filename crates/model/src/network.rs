//! What a session's programs may reach: rules, as a client writes them.
//!
//! Here they are read and checked. What they mean for a connection is decided in the crate `egress`.

mod cidr;
mod inject;

pub use cidr::{Cidr, embedded};
pub use inject::{Inject, Part, SecretName};

use serde::{Deserialize, Serialize, Serializer};
use std::{fmt, net::IpAddr};

/// The name by which a session reaches the loopback of its host. It counts as the address rule for it.
pub const HOST_NAME: &str = "host.dormouse.internal";

/// Ports on which names are listened for inside where no rule says others: what programs that know no proxy speak.
pub const USUAL_PORTS: &[u16] = &[22, 80, 443, 1433, 1521, 3306, 4222, 5432, 5672, 6379, 6380, 9042, 9092, 9418, 11211, 27017];

/// Most rules of one session.
const MOST_RULES: usize = 500;
/// Most ports and ranges of one rule, and most methods.
const MOST_PARTS: usize = 64;
/// Longest prefix of a path, in bytes.
const LONGEST_PATH: usize = 1024;

/// Allow or deny.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    #[default]
    Allow,
    Deny,
}

/// A session's network policy. The first rule that matches decides, then `default`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Map<String, serde_json::Value>")]
pub struct Policy {
    #[serde(default)]
    pub default: Verdict,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
    /// Ports on which names that no rule gives ports to are listened for inside; [`USUAL_PORTS`] where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_ports: Option<Vec<u16>>,
    /// Whether requests are written down: method, host, path, status, bytes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub log_requests: bool,
    /// Listeners inside whose previews need no token.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub public_ports: Vec<u16>,
}

/// One rule: a verdict on connections, or on requests where it has `methods` or `path`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RawRule")]
pub struct Rule {
    pub verdict: Verdict,
    pub to: Target,
    /// Empty: all.
    pub ports: Vec<PortRange>,
    /// In capitals; empty: all.
    pub methods: Vec<String>,
    /// The beginning of a request's path.
    pub path: Option<String>,
    pub inject: Option<Inject>,
}

/// Whom a rule is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// `*`: every host and address.
    Any,
    /// One host, in lower case without a final dot.
    Host(String),
    /// `*.HOST`: every name below that one, and not itself.
    Below(String),
    /// Addresses.
    Net(Cidr),
}

/// One port or a range of them, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    pub from: u16,
    pub to: u16,
}

/// Why a policy was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    #[error("{0:?} is no host, *.HOST or CIDR: {1}")]
    Target(String, String),
    #[error("{0:?} is no port or range of ports: a number from 1 to 65535, or \"FROM-TO\"")]
    Port(String),
    #[error("{0:?} is no HTTP method")]
    Method(String),
    #[error("{0:?} is no beginning of a path: it begins with '/', has no blank, and at most {LONGEST_PATH} bytes")]
    Path(String),
    #[error("{0}")]
    Inject(String),
    #[error("a rule has either 'allow' or 'deny'")]
    Verdict,
    #[error("'inject' needs a rule that allows one host or *.HOST")]
    InjectTarget,
    #[error("at most {most} {what} are allowed, these are {count}")]
    TooMany { what: &'static str, most: usize, count: usize },
}

impl Rule {
    /// Whether the rule is about requests, so that TLS to its host has to end at the proxy.
    pub fn reads_requests(&self) -> bool {
        self.inject.is_some() || !self.methods.is_empty() || self.path.is_some()
    }

    /// Whether the rule is about this port.
    pub fn has_port(&self, port: u16) -> bool {
        self.ports.is_empty() || self.ports.iter().any(|range| (range.from..=range.to).contains(&port))
    }
}

impl Policy {
    /// Whether any rule is about requests.
    pub fn reads_requests(&self) -> bool {
        self.rules.iter().any(Rule::reads_requests)
    }

    /// Takes out what opens something on the machine that a session runs on: address rules that allow, the host's loopback,
    /// previews that need no token. For policies that come from elsewhere.
    pub fn close_here(&mut self) {
        let opens = |rule: &Rule| match &rule.to {
            Target::Net(_) => true,
            Target::Host(host) => host == HOST_NAME,
            Target::Any | Target::Below(_) => false,
        };
        self.rules.retain(|rule| rule.verdict == Verdict::Deny || !opens(rule));
        self.public_ports.clear();
    }

    /// The secrets that rules name, each once.
    pub fn secrets(&self) -> Vec<&SecretName> {
        let mut names: Vec<&SecretName> =
            self.rules.iter().filter_map(|rule| rule.inject.as_ref()).flat_map(Inject::secrets).collect();
        names.sort();
        names.dedup();
        names
    }
}

impl Target {
    /// Whether a host is meant by its name. `host` is in the form of [`host_name`].
    pub fn matches_name(&self, host: &str) -> bool {
        match self {
            Target::Any => true,
            Target::Host(own) => own == host,
            Target::Below(parent) => host.strip_suffix(parent.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.')),
            Target::Net(_) => false,
        }
    }
}

impl std::str::FromStr for Target {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Target, PolicyError> {
        let wrong = |why: String| PolicyError::Target(text.chars().take(300).collect(), why);
        if text == "*" {
            return Ok(Target::Any);
        }
        if text.contains('/') {
            return text.parse().map(Target::Net).map_err(wrong);
        }
        if let Ok(address) = text.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
            return Ok(Target::Net(Cidr::of(address)));
        }
        match text.strip_prefix("*.") {
            Some(parent) => host_name(parent).map(Target::Below).map_err(wrong),
            None => host_name(text).map(Target::Host).map_err(wrong),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Any => f.write_str("*"),
            Target::Host(host) => f.write_str(host),
            Target::Below(parent) => write!(f, "*.{parent}"),
            Target::Net(net) => net.fmt(f),
        }
    }
}

/// A host's name in the one form that is compared: lower case, without a final dot.
///
/// # Errors
/// What is wrong with it, for people. Names of other scripts are written in their ASCII form (`xn--…`). A number or what
/// some programs take for an address (`0x7f.1`, `127.1`) is no name.
pub fn host_name(text: &str) -> Result<String, String> {
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    if name.is_empty() || name.len() > 253 {
        return Err(format!("a host's name has 1 to 253 bytes, this one has {}", name.len()));
    }
    for label in name.split('.') {
        if label.is_empty() || label.len() > 63 {
            return Err("each part between dots has 1 to 63 bytes".into());
        }
        if let Some(bad) = label.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_'))) {
            return Err(format!("a host's name can't contain {bad:?}"));
        }
    }
    let last = name.rsplit('.').next().unwrap_or_default();
    if last.bytes().all(|b| b.is_ascii_digit()) || last.starts_with("0x") {
        return Err("this is no name, and not the usual form of an address".into());
    }
    Ok(name)
}

// ---- as JSON ----

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPolicy {
    #[serde(default)]
    default: Verdict,
    #[serde(default)]
    rules: Vec<serde_json::Value>,
    #[serde(default)]
    name_ports: Option<Vec<u32>>,
    #[serde(default)]
    log_requests: bool,
    #[serde(default)]
    public_ports: Vec<u32>,
}

impl TryFrom<serde_json::Map<String, serde_json::Value>> for Policy {
    type Error = String;

    /// By way of an object, so that a list is none: its fields would be taken by their order.
    fn try_from(raw: serde_json::Map<String, serde_json::Value>) -> Result<Policy, String> {
        serde_json::from_value::<RawPolicy>(raw.into()).map_err(|error| error.to_string())?.try_into()
    }
}

impl TryFrom<RawPolicy> for Policy {
    type Error = String;

    fn try_from(raw: RawPolicy) -> Result<Policy, String> {
        at_most("rules", MOST_RULES, raw.rules.len()).map_err(|e| e.to_string())?;
        let rules = raw.rules.into_iter().enumerate().map(|(n, rule)| {
            // By hand, so that the error names the rule.
            serde_json::from_value::<Rule>(rule).map_err(|error| format!("rules[{n}]: {error}"))
        });
        let ports = |what, ports: Vec<u32>| -> Result<Vec<u16>, String> {
            at_most(what, MOST_PARTS, ports.len()).map_err(|e| e.to_string())?;
            ports.into_iter().map(|port| single_port(port).map_err(|e| e.to_string())).collect()
        };
        Ok(Policy {
            default: raw.default,
            rules: rules.collect::<Result<_, _>>()?,
            name_ports: raw.name_ports.map(|list| ports("name_ports", list)).transpose()?,
            log_requests: raw.log_requests,
            public_ports: ports("public_ports", raw.public_ports)?,
        })
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawPort {
    Number(u32),
    Text(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    #[serde(default)]
    allow: Option<String>,
    #[serde(default)]
    deny: Option<String>,
    #[serde(default)]
    ports: Vec<RawPort>,
    #[serde(default)]
    methods: Vec<String>,
    #[serde(default)]
    path: Option<String>,
    #[serde(default)]
    inject: Option<Inject>,
}

impl TryFrom<RawRule> for Rule {
    type Error = PolicyError;

    fn try_from(raw: RawRule) -> Result<Rule, PolicyError> {
        let (verdict, to) = match (raw.allow, raw.deny) {
            (Some(to), None) => (Verdict::Allow, to),
            (None, Some(to)) => (Verdict::Deny, to),
            _ => return Err(PolicyError::Verdict),
        };
        let to: Target = to.parse()?;
        at_most("ports", MOST_PARTS, raw.ports.len())?;
        at_most("methods", MOST_PARTS, raw.methods.len())?;
        let ports = raw.ports.into_iter().map(PortRange::try_from).collect::<Result<_, _>>()?;
        for method in &raw.methods {
            if method.is_empty() || method.len() > 32 || !method.bytes().all(|b| b.is_ascii_alphabetic() || b == b'-') {
                return Err(PolicyError::Method(method.chars().take(64).collect()));
            }
        }
        if let Some(path) = &raw.path
            && (!path.starts_with('/') || path.len() > LONGEST_PATH || path.bytes().any(|b| b <= b' ' || b == 0x7f))
        {
            return Err(PolicyError::Path(path.chars().take(100).collect()));
        }
        if raw.inject.is_some() && (verdict == Verdict::Deny || !matches!(to, Target::Host(_) | Target::Below(_))) {
            return Err(PolicyError::InjectTarget);
        }
        let methods = raw.methods.iter().map(|method| method.to_ascii_uppercase()).collect();
        Ok(Rule { verdict, to, ports, methods, path: raw.path, inject: raw.inject })
    }
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(if self.verdict == Verdict::Allow { "allow" } else { "deny" }, &self.to.to_string())?;
        if !self.ports.is_empty() {
            map.serialize_entry("ports", &self.ports)?;
        }
        if !self.methods.is_empty() {
            map.serialize_entry("methods", &self.methods)?;
        }
        if let Some(path) = &self.path {
            map.serialize_entry("path", path)?;
        }
        if let Some(inject) = &self.inject {
            map.serialize_entry("inject", inject)?;
        }
        map.end()
    }
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.from == self.to {
            self.from.serialize(serializer)
        } else {
            format!("{}-{}", self.from, self.to).serialize(serializer)
        }
    }
}

impl TryFrom<RawPort> for PortRange {
    type Error = PolicyError;

    fn try_from(raw: RawPort) -> Result<PortRange, PolicyError> {
        match raw {
            RawPort::Number(number) => single_port(number).map(|port| PortRange { from: port, to: port }),
            RawPort::Text(text) => {
                let wrong = || PolicyError::Port(text.chars().take(40).collect());
                let (from, to) = text.split_once('-').unwrap_or((&text, &text));
                let number = |part: &str| part.trim().parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong);
                let range = PortRange { from: number(from)?, to: number(to)? };
                if range.from > range.to { Err(wrong()) } else { Ok(range) }
            }
        }
    }
}

fn single_port(number: u32) -> Result<u16, PolicyError> {
    u16::try_from(number).ok().filter(|port| *port > 0).ok_or_else(|| PolicyError::Port(number.to_string()))
}

fn at_most(what: &'static str, most: usize, count: usize) -> Result<(), PolicyError> {
    if count > most { Err(PolicyError::TooMany { what, most, count }) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
