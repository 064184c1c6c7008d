use super::*;
use model::network::{Cidr, PortRange};
use proptest::{collection::vec, prelude::*, sample::select};
use serde_json::json;
use std::net::{IpAddr, SocketAddr};

const OWN: &str = "203.0.113.9";

fn grant(policy: serde_json::Value) -> Grant {
    Grant { policy: serde_json::from_value(policy).unwrap(), closed: vec!["0.0.0.0:7070".parse().unwrap()] }
}

fn own() -> Vec<IpAddr> {
    vec![OWN.parse().unwrap()]
}

fn to(text: &str) -> Destination {
    Destination::parse(text, None).unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// What is said of a literal address.
fn literal(grant: &Grant, text: &str) -> Judgement {
    let to = to(text);
    let Host::Address(address) = to.host else { panic!("{text} is no address") };
    Judge { grant, own: &own() }.address(&to, address)
}

fn denied(judgement: &Judgement) -> bool {
    matches!(judgement, Judgement::Deny(_))
}

#[test]
fn special_addresses_in_all_their_forms_are_denied_by_default() {
    let open = grant(json!({ "rules": [{ "allow": "*" }] }));
    for address in [
        "0.0.0.0",
        "0.1.2.3",
        "10.1.2.3",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "168.63.129.16",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.168.1.1",
        "198.18.0.1",
        "198.19.255.255",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        OWN,
        "[::]",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:10.0.0.1]",
        "[::10.0.0.1]",
        "[64:ff9b::10.0.0.1]",
        "[64:ff9b::a9fe:a9fe]",
        "[64:ff9b:1::1]",
        "[2002:a00:1::1]",
        "[2002:7f00:1::]",
        "[2001::1]",
        "[fc00::1]",
        "[fd00:ec2::254]",
        "[fe80::1]",
        "[febf::1]",
        "[fec0::1]",
        "[ff02::1]",
        "[::ffff:203.0.113.9]",
        "[64:ff9b::203.0.113.9]",
    ] {
        assert!(denied(&literal(&open, &format!("{address}:80"))), "{address}");
    }
    for address in [
        "1.1.1.1",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "172.15.0.1",
        "172.32.0.1",
        "192.0.1.1",
        "198.20.0.1",
        "223.255.255.255",
        "[2606:4700::1111]",
        "[64:ff9b::1.1.1.1]",
        "[2002:101:101::1]",
        "[::ffff:1.1.1.1]",
    ] {
        assert_eq!(literal(&open, &format!("{address}:80")), Judgement::Allow, "{address}");
    }
}

#[test]
fn address_rules_open_what_is_special_and_names_never_do() {
    let rules =
        json!([{ "allow": "10.0.0.0/8", "ports": [80] }, { "deny": "169.254.0.0/16" }, { "allow": "0.0.0.0/0", "ports": [81] }]);
    let grant = grant(json!({ "rules": rules }));
    assert_eq!(literal(&grant, "10.0.0.1:80"), Judgement::Allow);
    assert!(denied(&literal(&grant, "10.0.0.1:82")));
    assert_eq!(literal(&grant, "192.168.0.1:81"), Judgement::Allow);
    assert!(denied(&literal(&grant, "169.254.169.254:81")), "the first address rule decides");
    let name = Destination::parse("db.test:80", None).unwrap();
    let judge = Judge { grant: &grant, own: &own() };
    assert_eq!(judge.address(&name, ip("10.0.0.1")), Judgement::Allow);
    assert!(denied(&judge.address(&name, ip("192.168.0.1"))));
    let named = super::tests::grant(json!({ "rules": [{ "allow": "db.test" }, { "allow": "*" }] }));
    assert!(denied(&Judge { grant: &named, own: &own() }.address(&name, ip("10.0.0.1"))));
}

#[test]
fn a_name_is_never_allowed_by_an_address_rule_alone() {
    let grant = grant(json!({ "default": "deny", "rules": [{ "allow": "93.184.0.0/16" }] }));
    let judge = Judge { grant: &grant, own: &own() };
    assert!(denied(&judge.name("a.test", 80)));
    assert!(denied(&judge.address(&to("a.test:80"), ip("93.184.216.34"))));
    assert_eq!(literal(&grant, "93.184.216.34:80"), Judgement::Allow);
}

#[test]
fn denied_addresses_are_denied_in_translated_forms() {
    let grant = grant(json!({ "rules": [{ "deny": "93.184.0.0/16" }] }));
    for address in ["93.184.216.34", "[::ffff:93.184.216.34]", "[64:ff9b::93.184.216.34]", "[2002:5db8:d822::1]"] {
        assert!(denied(&literal(&grant, &format!("{address}:80"))), "{address}");
    }
    let last = super::tests::grant(json!({ "rules": [{ "deny": "1.2.3.0/24" }, { "allow": "255.255.255.255/32" }] }));
    assert_eq!(literal(&last, "255.255.255.255:80"), Judgement::Allow);
    assert!(denied(&literal(&last, "1.2.3.255:80")));
}

#[test]
fn the_hosts_loopback_is_opened_by_its_own_name_only() {
    let says = |policy| {
        let grant = grant(policy);
        let judge = Judge { grant: &grant, own: &own() };
        let host = to("host.dormouse.internal:80");
        let both = (judge.name(HOST_NAME, 80), judge.address(&host, ip("127.0.0.1")));
        assert_eq!(both.0, both.1);
        both.0
    };
    let open = json!({ "allow": "host.dormouse.internal", "ports": [80] });
    assert_eq!(says(json!({ "rules": [open] })), Judgement::Allow);
    assert_eq!(says(json!({ "default": "deny", "rules": [open] })), Judgement::Allow);
    for rules in [
        json!([]),
        json!([{ "allow": "*" }]),
        json!([{ "allow": "*.internal" }, { "allow": "*.dormouse.internal" }]),
        json!([{ "allow": "127.0.0.0/8" }]),
        json!([{ "deny": "*" }, open]),
        json!([{ "deny": "*.internal" }, open]),
        json!([{ "allow": "host.dormouse.internal", "ports": [81] }]),
    ] {
        assert!(denied(&says(json!({ "rules": rules }))), "{rules}");
    }
    let closed = grant(json!({ "rules": [{ "allow": "host.dormouse.internal" }] }));
    let judge = Judge { grant: &closed, own: &own() };
    assert!(denied(&judge.address(&to("host.dormouse.internal:7070"), ip("127.0.0.1"))));
}

#[test]
fn the_servers_own_listeners_are_never_reached() {
    let rules = json!([{ "allow": "0.0.0.0/0" }, { "allow": "::/0" }]);
    let mut grant = grant(json!({ "rules": rules }));
    for address in ["127.0.0.1", "127.0.0.2", "0.0.0.0", OWN, "[::1]", "[::]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]"] {
        assert!(denied(&literal(&grant, &format!("{address}:7070"))), "{address}");
        assert_eq!(literal(&grant, &format!("{address}:7071")), Judgement::Allow, "{address}");
    }
    assert_eq!(literal(&grant, "10.0.0.1:7070"), Judgement::Allow, "another machine");
    grant.closed = vec!["10.9.9.9:1".parse::<SocketAddr>().unwrap(), "[::ffff:127.0.0.1]:2".parse().unwrap()];
    assert!(denied(&literal(&grant, "10.9.9.9:1")));
    assert!(denied(&literal(&grant, "127.0.0.1:2")));
    assert!(denied(&literal(&grant, "0.0.0.0:2")));
    assert_eq!(literal(&grant, "127.0.0.2:2"), Judgement::Allow);
}

#[test]
fn names_of_the_sandbox_itself_never_lead_out() {
    let grant = grant(json!({ "rules": [{ "allow": "localhost" }, { "allow": "*.localhost" }, { "allow": "127.0.0.0/8" }] }));
    let judge = Judge { grant: &grant, own: &own() };
    for name in ["localhost", "a.localhost"] {
        assert!(denied(&judge.name(name, 80)));
        assert_eq!(judge.ports(name), None);
    }
}

#[test]
fn rules_about_requests_are_decided_by_request() {
    let rules = json!([
        { "allow": "api.test", "methods": ["GET"], "path": "/v1/", "inject": { "header": "authorization", "value": "{KEY}" } },
        { "deny": "api.test", "methods": ["DELETE"] },
        { "allow": "api.test", "ports": [8443] },
        { "allow": "plain.test" }, { "allow": "key.test", "inject": { "header": "x-key", "value": "{KEY}" } }
    ]);
    let grant = grant(json!({ "default": "deny", "rules": rules }));
    let judge = Judge { grant: &grant, own: &own() };
    assert_eq!(judge.name("api.test", 443), Judgement::ByRequest);
    assert_eq!(judge.name("plain.test", 443), Judgement::Allow);
    assert_eq!(judge.name("key.test", 443), Judgement::ByRequest);
    let ask = |host: &str, method: &str, path: &str| {
        judge
            .request(&to(host), Some(ip("1.1.1.1")), &Asked { method: method.into(), path: path.into() })
            .map(|allowed| (allowed.inject.is_some(), allowed.path))
    };
    assert_eq!(ask("api.test:443", "GET", "/v1/x"), Ok((true, None)));
    assert_eq!(ask("api.test:443", "GET", "/x/%2e./v1/x"), Ok((true, Some("/v1/x".into()))));
    assert!(ask("api.test:443", "GET", "/v1/../admin").is_err());
    assert!(ask("api.test:443", "GET", "/v1/..%2fadmin").unwrap_err().contains("several ways"));
    assert!(ask("api.test:443", "get", "/v1/x").is_err());
    assert!(ask("api.test:8443", "delete", "/").is_err(), "denied in any case");
    assert_eq!(ask("api.test:8443", "POST", "/"), Ok((false, None)));
    assert_eq!(ask("key.test:443", "POST", "/%zz"), Ok((true, None)), "its rule isn't about paths");
}

#[test]
fn names_tell_the_ports_to_listen_on() {
    let ports = |policy, name: &str| {
        let grant = grant(policy);
        Judge { grant: &grant, own: &[] }.ports(name)
    };
    let rules = json!([{ "allow": "pg.test", "ports": [5433, "6000-6003"] }, { "allow": "web.test" }, { "allow": "wide.test", "ports": ["1-60000"] },
        { "deny": "no.test" }, { "allow": "odd.test", "ports": ["40000-50000"] }, { "allow": "10.0.0.0/8" }]);
    let closed = json!({ "default": "deny", "rules": rules, "name_ports": [443, 65000] });
    assert_eq!(ports(closed.clone(), "pg.test"), Some(vec![5433, 6000, 6001, 6002, 6003]));
    assert_eq!(ports(closed.clone(), "web.test"), Some(vec![443, 65000]));
    assert_eq!(ports(closed.clone(), "wide.test"), Some(vec![443]));
    assert_eq!(ports(closed.clone(), "odd.test"), Some(vec![]));
    assert_eq!(ports(closed.clone(), "no.test"), None);
    assert_eq!(ports(closed.clone(), "other.test"), None);
    assert_eq!(ports(closed, HOST_NAME), None);
    assert_eq!(ports(json!({}), "other.test"), Some(USUAL_PORTS.to_vec()));
    assert_eq!(ports(json!({ "name_ports": [] }), "other.test"), Some(vec![]));
    assert_eq!(ports(json!({ "rules": [{ "deny": "*" }] }), "other.test"), None);
}

// ---- a plain model ----

const NAMES: &[&str] = &["a.test", "x.a.test", "b.test", "host.dormouse.internal", "localhost"];
const ADDRESSES: &[&str] =
    &["10.0.0.1", "93.184.216.34", "127.0.0.1", "2606:4700::1", "64:ff9b::a00:1", "64:ff9b::5db8:d822", "169.254.169.254", OWN];
const NETS: &[&str] =
    &["10.0.0.0/8", "93.184.0.0/16", "0.0.0.0/0", "127.0.0.0/8", "::/0", "64:ff9b::/96", "203.0.113.0/24", "169.254.0.0/16"];
const METHODS: &[&str] = &["GET", "POST", "PUT"];
const PATHS: &[&str] = &["/", "/a", "/a/b", "/c"];

fn any_rule() -> impl Strategy<Value = Rule> {
    let target = prop_oneof![Just("*"), Just("*.test"), Just("*.a.test"), Just("*.internal"), select(NAMES), select(NETS)];
    let ports = select(vec![vec![], vec![PortRange { from: 80, to: 80 }], vec![PortRange { from: 80, to: 443 }]]);
    let methods = select(vec![vec![], vec![], vec!["GET".to_owned()], vec!["POST".to_owned(), "PUT".to_owned()]]);
    let path = select(vec![None, None, Some("/a".to_owned()), Some("/a/".to_owned())]);
    (any::<bool>(), target, ports, methods, path).prop_map(|(allow, to, ports, methods, path)| Rule {
        verdict: if allow { Verdict::Allow } else { Verdict::Deny },
        to: to.parse().unwrap(),
        ports,
        methods,
        path,
        inject: None,
    })
}

/// The first rule that matches, said as plainly as it can be. `None`: no rule.
fn plain_first(policy: &Policy, port: u16, asked: (&str, &str), about: impl Fn(&Rule) -> bool) -> Option<Verdict> {
    for rule in &policy.rules {
        let port_fits = rule.ports.is_empty() || rule.ports.iter().any(|r| r.from <= port && port <= r.to);
        let method_fits = rule.methods.is_empty() || rule.methods.contains(&asked.0.to_owned());
        let path_fits = rule.path.as_ref().is_none_or(|prefix| asked.1.starts_with(prefix));
        if port_fits && method_fits && path_fits && about(rule) {
            return Some(rule.verdict);
        }
    }
    None
}

fn plain_name(rule: &Rule, name: &str) -> bool {
    let text = rule.to.to_string();
    if name == "host.dormouse.internal" && rule.verdict == Verdict::Allow {
        return text == name;
    }
    text == "*" || text == name || text.starts_with("*.") && name.ends_with(&text[1..])
}

fn plain_address(rule: &Rule, address: IpAddr) -> bool {
    let Ok(net) = rule.to.to_string().parse::<Cidr>() else { return false };
    let inside = match address.to_string().as_str() {
        "64:ff9b::a00:1" => Some(ip("10.0.0.1")),
        "64:ff9b::5db8:d822" => Some(ip("93.184.216.34")),
        _ => None,
    };
    net.contains(address) || rule.verdict == Verdict::Deny && inside.is_some_and(|inside| net.contains(inside))
}

fn plain_allows(policy: &Policy, name: Option<&str>, address: IpAddr, port: u16, asked: (&str, &str)) -> bool {
    let default = if name == Some("host.dormouse.internal") { Verdict::Deny } else { policy.default };
    let named = |name: &str| plain_first(policy, port, asked, |rule| plain_name(rule, name)).unwrap_or(default);
    if name.is_some_and(|name| name == "localhost" || named(name) == Verdict::Deny) {
        return false;
    }
    let by_any =
        |rule: &Rule| name.map_or(rule.to.to_string() == "*", |name| plain_name(rule, name)) || plain_address(rule, address);
    if plain_first(policy, port, asked, by_any).unwrap_or(default) == Verdict::Deny {
        return false;
    }
    let public = ["93.184.216.34", "2606:4700::1", "64:ff9b::5db8:d822"].contains(&address.to_string().as_str());
    public
        || name == Some("host.dormouse.internal")
        || plain_first(policy, port, asked, |rule| plain_address(rule, address)) == Some(Verdict::Allow)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Requests are judged as the plain model does, and connections so that no allowed request is lost and none slips through.
    #[test]
    fn the_policy_is_what_the_plain_model_says(
        rules in vec(any_rule(), 0..7),
        allow in any::<bool>(),
        name in proptest::option::of(select(NAMES)),
        address in select(ADDRESSES),
        port in select(vec![80u16, 443, 8080]),
    ) {
        let default = if allow { Verdict::Allow } else { Verdict::Deny };
        let grant = Grant { policy: Policy { default, rules, ..Policy::default() }, closed: Vec::new() };
        let own = own();
        let judge = Judge { grant: &grant, own: &own };
        let address = ip(address);
        let host = name.map_or(Host::Address(address), |name| Host::Name(name.into()));
        let to = Destination { host, port };
        let connection = judge.address(&to, address);
        for method in METHODS {
            for path in PATHS {
                let asked = Asked { method: (*method).into(), path: (*path).into() };
                let expected = plain_allows(&grant.policy, name, address, port, (method, path));
                prop_assert_eq!(judge.request(&to, Some(address), &asked).is_ok(), expected, "{} {}", method, path);
                match connection {
                    Judgement::Allow => prop_assert!(expected),
                    Judgement::Deny(_) => prop_assert!(!expected),
                    Judgement::ByRequest => {}
                }
                if let Some(name) = name && expected {
                    prop_assert!(judge.request(&to, None, &asked).is_ok());
                    prop_assert!(!denied(&judge.name(name, port)));
                }
            }
        }
        if !grant.policy.reads_requests() {
            prop_assert_ne!(connection, Judgement::ByRequest);
        }
    }
}
