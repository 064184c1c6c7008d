//! What a policy means for one connection or request. Pure: no network, no clock.
//!
//! A connection to a name has to be allowed twice. First by the rules that know names, before anything is resolved, so
//! that a denied name isn't leaked to a resolver, and so that no address rule alone allows a name. Then, for each address
//! that the name has, by all rules in their order. What is said for a connection can be "by its requests": some rule
//! reads them, and each is judged when it comes.
//!
//! Addresses of the host and of private networks need a third yes: the first address rule that matches has to allow them.

mod paths;
mod ranges;
#[cfg(test)]
mod tests;

pub use ranges::is_special;

use crate::{Grant, host::Destination, host::Host};
use model::network::{HOST_NAME, Inject, Policy, Rule, Target, USUAL_PORTS, Verdict};
use paths::Path;
use ranges::forms;
use std::{collections::BTreeSet, net::IpAddr};

/// Widest range of a rule's ports that is listened for inside.
const WIDEST_RANGE: u16 = 64;
/// Most ports that are listened for inside under one name.
const MOST_PORTS: usize = 256;

/// The answer for a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judgement {
    /// As a stream of bytes.
    Allow,
    /// Rules read its requests: each is judged.
    ByRequest,
    /// With the reason, for people.
    Deny(String),
}

/// What of a request is judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    pub method: String,
    /// Without the query.
    pub path: String,
}

/// A request that is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowed<'p> {
    /// The header to set.
    pub inject: Option<&'p Inject>,
    /// The path in the form that was judged, where that isn't what was written.
    pub path: Option<String>,
    /// The header may go over plain HTTP, too: to the host's own loopback, or where the rule names the port.
    pub goes_plain: bool,
}

/// A policy with what of the host it needs to know.
#[derive(Clone, Copy)]
pub struct Judge<'a> {
    pub grant: &'a Grant,
    /// Addresses of the host's interfaces.
    pub own: &'a [IpAddr],
}

/// Which rules are looked at: those that know the name, or all.
#[derive(Clone, Copy)]
enum View<'v> {
    Name(&'v str),
    All(Option<&'v str>, IpAddr),
    /// Address rules only, which open what is special.
    Nets(IpAddr),
}

/// How a walk through the rules ended.
struct Outcome<'p> {
    verdict: Verdict,
    /// Some rule up to the one that decides reads requests.
    reads: bool,
    /// Some rule before that one may allow a request.
    may_allow: bool,
    /// The rule that decides and its number.
    rule: Option<(usize, &'p Rule)>,
    /// A rule about paths was met.
    saw_path: bool,
    /// A rule about paths was met, and the path can't be read.
    unclear: bool,
}

impl<'a> Judge<'a> {
    /// Before anything is resolved: may some connection to this name and port be allowed?
    pub fn name(&self, name: &str, port: u16) -> Judgement {
        if is_loopback_name(name) {
            return Judgement::Deny("this name means the sandbox itself, and doesn't lead out".into());
        }
        self.walk(View::Name(name), port, None).judgement()
    }

    /// May this address be connected to? `to` is what was asked for; `address` one that it has.
    pub fn address(&self, to: &Destination, address: IpAddr) -> Judgement {
        let mut by_request = false;
        if let Some(name) = to.host.name() {
            match self.name(name, to.port) {
                Judgement::Allow => {}
                Judgement::ByRequest => by_request = true,
                denied => return denied,
            }
        }
        if self.is_closed(address, to.port) {
            return Judgement::Deny("this is a listener of Dormouse itself".into());
        }
        for view in self.views(to, address) {
            match self.walk(view, to.port, None).judgement() {
                Judgement::Allow => {}
                Judgement::ByRequest => by_request = true,
                Judgement::Deny(_) if matches!(view, View::Nets(_)) => return Judgement::Deny(not_opened(address)),
                denied => return denied,
            }
        }
        if by_request { Judgement::ByRequest } else { Judgement::Allow }
    }

    /// May this request be sent? Without an address: as far as names tell.
    ///
    /// # Errors
    /// The reason, for people.
    pub fn request(&self, to: &Destination, address: Option<IpAddr>, asked: &Asked) -> Result<Allowed<'a>, String> {
        let mut allowed = Allowed { inject: None, path: None, goes_plain: false };
        let mut saw_path = false;
        let mut pass = |outcome: Outcome<'a>| {
            saw_path |= outcome.saw_path;
            match outcome.judgement() {
                Judgement::Deny(reason) if outcome.unclear => Err(format!("its path can be read in several ways, and {reason}")),
                Judgement::Deny(reason) => Err(format!("{} {}: {reason}", asked.method, asked.path)),
                _ => Ok(outcome.rule.map(|(_, rule)| rule)),
            }
        };
        if let Some(name) = to.host.name() {
            if is_loopback_name(name) {
                return Err("this name means the sandbox itself".into());
            }
            // Rules with a header are about names, and name rules decide about names.
            let rule = pass(self.walk(View::Name(name), to.port, Some(asked)))?;
            allowed.inject = rule.and_then(|rule| rule.inject.as_ref());
            allowed.goes_plain = name == HOST_NAME || rule.is_some_and(|rule| !rule.ports.is_empty());
        }
        let literal = if let Host::Address(address) = to.host { Some(address) } else { None };
        if let Some(address) = address.or(literal) {
            if self.is_closed(address, to.port) {
                return Err("this is a listener of Dormouse itself".into());
            }
            for view in self.views(to, address) {
                let outcome = pass(self.walk(view, to.port, Some(asked)));
                if matches!(view, View::Nets(_)) {
                    outcome.map_err(|_| not_opened(address))?
                } else {
                    outcome?
                };
            }
        }
        if saw_path {
            allowed.path = Path::read(&asked.path).filter(|path| path.had_dots).map(|path| path.strict);
        }
        Ok(allowed)
    }

    /// The ports on which a name is to be listened for inside; `None` where it can't be reached.
    pub fn ports(&self, name: &str) -> Option<Vec<u16>> {
        if is_loopback_name(name) {
            return None;
        }
        let policy = &self.grant.policy;
        let view = View::Name(name);
        let mut ports = BTreeSet::new();
        let mut usual = policy.default == Verdict::Allow;
        for rule in policy.rules.iter().filter(|rule| rule.verdict == Verdict::Allow && self.is_about(view, rule)) {
            usual |= rule.ports.is_empty();
            for range in &rule.ports {
                if range.to - range.from < WIDEST_RANGE {
                    ports.extend(range.from..=range.to);
                } else {
                    usual = true;
                }
            }
        }
        if usual {
            ports.extend(policy.name_ports.as_deref().unwrap_or(USUAL_PORTS));
        }
        let open = |port: &u16| !matches!(self.name(name, *port), Judgement::Deny(_));
        let ports: Vec<u16> = ports.into_iter().filter(open).take(MOST_PORTS).collect();
        // The verdict changes at the ends of ranges only: these ports tell whether there is any.
        let ends = policy
            .rules
            .iter()
            .flat_map(|rule| &rule.ports)
            .flat_map(|range| [range.from, range.to, range.from.saturating_sub(1).max(1), range.to.saturating_add(1)]);
        (!ports.is_empty() || std::iter::once(1).chain(ends).any(|port| open(&port))).then_some(ports)
    }

    /// The walks that an address has to pass.
    fn views<'v>(&self, to: &'v Destination, address: IpAddr) -> impl Iterator<Item = View<'v>> {
        let name = to.host.name();
        // The host's own name counts as the address rule for its loopback.
        let special = name != Some(HOST_NAME) && is_special(address, self.own);
        std::iter::once(View::All(name, address)).chain(special.then_some(View::Nets(address)))
    }

    /// The first rule that matches decides; rules about requests do so only once there is one.
    fn walk(&self, view: View<'_>, port: u16, asked: Option<&Asked>) -> Outcome<'a> {
        let policy: &'a Policy = &self.grant.policy;
        let mut end =
            Outcome { verdict: Verdict::Deny, reads: false, may_allow: false, rule: None, saw_path: false, unclear: false };
        for (number, rule) in policy.rules.iter().enumerate() {
            if !rule.has_port(port) || !self.is_about(view, rule) {
                continue;
            }
            end.reads |= rule.reads_requests();
            end.saw_path |= rule.path.is_some();
            match asked {
                None if rule.methods.is_empty() && rule.path.is_none() => {}
                None => {
                    end.may_allow |= rule.verdict == Verdict::Allow;
                    continue;
                }
                Some(asked) => match fits(rule, asked) {
                    Some(true) => {}
                    Some(false) => continue,
                    None => {
                        end.unclear = true;
                        end.rule = Some((number, rule));
                        return end;
                    }
                },
            }
            (end.verdict, end.rule) = (rule.verdict, Some((number, rule)));
            return end;
        }
        let has_default = match view {
            View::Nets(_) => false,
            View::Name(name) | View::All(Some(name), _) => name != HOST_NAME,
            View::All(None, _) => true,
        };
        if has_default {
            end.verdict = policy.default;
        }
        end
    }

    fn is_about(&self, view: View<'_>, rule: &Rule) -> bool {
        let by_name = |name: &str| {
            // The host's loopback is opened by its own name only, and closed by any rule that means it.
            let opens_too_much = name == HOST_NAME && rule.verdict == Verdict::Allow && rule.to != Target::Host(HOST_NAME.into());
            rule.to.matches_name(name) && !opens_too_much
        };
        let by_address = |address: IpAddr| match (&rule.to, rule.verdict) {
            (Target::Net(net), Verdict::Allow) => net.contains(address),
            // What is denied is denied in its translated forms, too.
            (Target::Net(net), Verdict::Deny) => forms(address).any(|form| net.contains(form)),
            _ => false,
        };
        match view {
            View::Name(name) => by_name(name),
            View::All(Some(name), address) => by_name(name) || by_address(address),
            View::All(None, address) => rule.to == Target::Any || by_address(address),
            View::Nets(address) => by_address(address),
        }
    }

    /// Whether one of the server's own listeners would answer there.
    fn is_closed(&self, address: IpAddr, port: u16) -> bool {
        let local = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified() || self.own.contains(&ip);
        forms(address).any(|form| {
            self.grant.closed.iter().filter(|closed| closed.port() == port).any(|closed| {
                let ip = closed.ip().to_canonical();
                // To connect to the unspecified address is to connect to the own host.
                ip == form || ip.is_unspecified() && local(form) || form.is_unspecified() && local(ip)
            })
        })
    }
}

impl Outcome<'_> {
    fn judgement(&self) -> Judgement {
        match self.verdict {
            Verdict::Allow if self.reads => Judgement::ByRequest,
            Verdict::Allow => Judgement::Allow,
            Verdict::Deny if self.may_allow => Judgement::ByRequest,
            Verdict::Deny => Judgement::Deny(match self.rule {
                Some((number, rule)) if self.unclear => format!("rule {} (for {}) is about paths", number + 1, rule.to),
                Some((number, rule)) => format!("rule {} (deny {}) says so", number + 1, rule.to),
                None => "no rule allows it".into(),
            }),
        }
    }
}

/// Whether a rule is about this request; `None` where its path can't be read.
fn fits(rule: &Rule, asked: &Asked) -> Option<bool> {
    let allows = rule.verdict == Verdict::Allow;
    // Methods are case-sensitive (RFC 9110, 9.1), but not to every server: what is denied is denied in any case.
    let is_method = |own: &String| if allows { *own == asked.method } else { own.eq_ignore_ascii_case(&asked.method) };
    if !rule.methods.is_empty() && !rule.methods.iter().any(is_method) {
        return Some(false);
    }
    let Some(prefix) = &rule.path else { return Some(true) };
    match (Path::read(&asked.path), Path::read(prefix)) {
        (Some(path), Some(prefix)) => Some(path.begins_with(&prefix, allows)),
        _ => None,
    }
}

fn is_loopback_name(name: &str) -> bool {
    name == "localhost" || name.ends_with(".localhost")
}

fn not_opened(address: IpAddr) -> String {
    format!("{address} is an address of this host, a private network or special use, and no rule for addresses opens it")
}
