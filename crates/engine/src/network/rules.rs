//! Which rules may name which secrets. Pure.

use crate::Error;
use model::network::{Policy, Rule, SecretName, Target};
use std::collections::BTreeMap;

/// The hosts of every secret that is here; an empty list limits nothing.
pub(crate) type Hosts = BTreeMap<SecretName, Vec<String>>;

/// Most hosts of one secret.
const MOST_HOSTS: usize = 64;

/// Reads the hosts that a secret may be sent to, in the form in which they are kept.
///
/// # Errors
/// [`Error::Invalid`] for what is no host and no `*.HOST`.
pub(crate) fn hosts(texts: &[String]) -> Result<Vec<String>, Error> {
    if texts.len() > MOST_HOSTS {
        return Err(Error::invalid("hosts", format!("at most {MOST_HOSTS} can be given")));
    }
    let one = |text: &String| match text.parse::<Target>() {
        Ok(target @ (Target::Host(_) | Target::Below(_))) => Ok(target.to_string()),
        Ok(_) => Err(Error::invalid("hosts", format!("'{text}' is no host and no *.HOST"))),
        Err(error) => Err(Error::invalid("hosts", error)),
    };
    texts.iter().map(one).collect()
}

/// True where every host that the target means is one of these.
fn lies_within(to: &Target, hosts: &[String]) -> bool {
    hosts.iter().filter_map(|text| text.parse::<Target>().ok()).any(|limit| match (to, &limit) {
        (Target::Host(host), limit) => limit.matches_name(host),
        (Target::Below(parent), Target::Below(limit)) => {
            parent == limit || parent.strip_suffix(limit.as_str()).is_some_and(|rest| rest.ends_with('.'))
        }
        _ => false,
    })
}

/// True where the rule sends the secret only where it may be sent.
fn keeps_within(rule: &Rule, hosts: &[String]) -> bool {
    hosts.is_empty() || lies_within(&rule.to, hosts)
}

/// Checks the secrets that a policy names. Rules of the policy before are not looked at again.
///
/// # Errors
/// [`Error::Forbidden`]: a rule would send a secret where it may not be sent; or one that may be sent anywhere, or isn't
/// here yet, is named by somebody who isn't an administrator.
pub(crate) fn check(policy: &Policy, before: Option<&Policy>, secrets: &Hosts, is_admin: bool) -> Result<(), Error> {
    for (number, rule) in policy.rules.iter().enumerate() {
        let Some(inject) = &rule.inject else { continue };
        let known = before.is_some_and(|before| before.rules.contains(rule));
        for name in inject.secrets() {
            let refuse = |why: String| Err(Error::Forbidden { detail: format!("network.rules[{number}]: {why}") });
            match secrets.get(name) {
                Some(hosts) if !keeps_within(rule, hosts) => {
                    return refuse(format!("the secret '{name}' may be sent to {} only, not to {}", hosts.join(", "), rule.to));
                }
                Some(hosts) if hosts.is_empty() && !is_admin && !known => {
                    return refuse(format!(
                        "the secret '{name}' has no hosts that it may be sent to, so only an administrator's token may name it"
                    ));
                }
                None if !is_admin && !known => return refuse(format!("there is no secret '{name}'")),
                _ => {}
            }
        }
    }
    Ok(())
}

/// The secrets of a policy that can be given to it as things stand: those that no rule sends where they may not go. The
/// hosts of a secret can be others by now than when the policy was set.
pub(crate) fn allowed<'a>(policy: &'a Policy, secrets: &Hosts) -> Vec<&'a SecretName> {
    let within = |name: &SecretName| {
        let hosts = secrets.get(name)?;
        let naming = |rule: &&Rule| rule.inject.as_ref().is_some_and(|inject| inject.secrets().any(|named| named == name));
        policy.rules.iter().filter(naming).all(|rule| keeps_within(rule, hosts)).then_some(())
    };
    policy.secrets().into_iter().filter(|name| within(name).is_some()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn policy(rules: &[(&str, &str)]) -> Policy {
        let rules: Vec<_> = rules
            .iter()
            .map(|(to, name)| json!({ "allow": to, "inject": { "header": "authorization", "value": format!("Bearer {{{name}}}") } }))
            .collect();
        serde_json::from_value(json!({ "rules": rules })).unwrap()
    }

    fn secrets(list: &[(&str, &[&str])]) -> Hosts {
        list.iter().map(|(name, hosts)| (name.parse().unwrap(), hosts.iter().map(|host| (*host).to_owned()).collect())).collect()
    }

    #[test]
    fn a_secret_stays_within_its_hosts() {
        let known = secrets(&[("T", &["api.example.com", "*.example.org"])]);
        for (to, fits) in [
            ("api.example.com", true),
            ("API.example.com.", true),
            ("example.com", false),
            ("x.api.example.com", false),
            ("*.api.example.com", false),
            ("a.example.org", true),
            ("a.b.example.org", true),
            ("*.example.org", true),
            ("*.b.example.org", true),
            ("example.org", false),
            ("*.org", false),
            ("badexample.org", false),
            ("*.badexample.org", false),
        ] {
            for is_admin in [true, false] {
                assert_eq!(check(&policy(&[(to, "T")]), None, &known, is_admin).is_ok(), fits, "{to}");
            }
        }
    }

    #[test]
    fn only_an_administrator_names_what_may_be_sent_anywhere() {
        let known = secrets(&[("ANY", &[]), ("T", &["a.example"])]);
        let any = policy(&[("x.example", "ANY")]);
        assert!(check(&any, None, &known, true).is_ok());
        assert_eq!(check(&any, None, &known, false).unwrap_err().status(), 403);
        // A rule that an administrator has set can stay beside new ones.
        let both = policy(&[("x.example", "ANY"), ("a.example", "T")]);
        assert!(check(&both, Some(&any), &known, false).is_ok());
        let moved = policy(&[("y.example", "ANY")]);
        assert!(check(&moved, Some(&any), &known, false).is_err(), "to another host it is another rule");
        let unknown = policy(&[("x.example", "NONE")]);
        assert!(check(&unknown, None, &known, true).is_ok(), "it can be set later");
        assert!(check(&unknown, None, &known, false).unwrap_err().to_string().contains("rules[0]"));
    }

    #[test]
    fn a_secret_whose_hosts_have_changed_is_not_given_any_more() {
        let rules = policy(&[("a.example", "T"), ("b.example", "T"), ("b.example", "U")]);
        let names = |known: &Hosts| allowed(&rules, known).into_iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names(&secrets(&[("T", &["*.example"]), ("U", &[])])), ["T", "U"]);
        assert_eq!(names(&secrets(&[("T", &["a.example"]), ("U", &[])])), ["U"]);
        assert!(names(&secrets(&[])).is_empty());
    }

    #[test]
    fn hosts_of_a_secret_are_names() {
        assert_eq!(hosts(&["API.Example.com.".to_owned(), "*.x.y".to_owned()]).unwrap(), ["api.example.com", "*.x.y"]);
        for bad in ["*", "10.0.0.0/8", "1.2.3.4", "a b", ""] {
            assert!(hosts(&[bad.to_owned()]).is_err(), "{bad}");
        }
    }
}
