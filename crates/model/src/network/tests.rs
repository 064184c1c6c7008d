use super::*;
use proptest::prelude::*;
use serde_json::json;

fn policy(value: serde_json::Value) -> Result<Policy, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

#[test]
fn a_policy_is_read_and_written_as_it_was() {
    let value = json!({
        "default": "deny",
        "rules": [
            { "allow": "*.example.com", "ports": [443, "8000-8100"], "methods": ["GET", "HEAD"], "path": "/v1/" },
            { "allow": "api.example.com", "inject": { "header": "authorization", "value": "Bearer {API_KEY} {{x}}" } },
            { "allow": "git.example.com", "inject": { "header": "authorization", "value": "Basic {basic:x-access-token:GIT}" } },
            { "deny": "255.255.255.255/32" }, { "allow": "10.0.0.0/8" }, { "allow": "fd00::/8" }, { "allow": "*" }
        ],
        "log_requests": true, "public_ports": [3000]
    });
    let read = policy(value.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), value);
    assert_eq!(read.secrets().iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["API_KEY", "GIT"]);
    assert_eq!(policy(json!({})).unwrap(), Policy::default());
}

#[test]
fn what_is_malformed_is_named_with_its_rule() {
    let long = "h".repeat(300);
    let cases = [
        (json!([{ "allow": "ok" }, { "allow": "ex ample" }]), "rules[1]: \"ex ample\""),
        (json!([{ "allow": "a.*.b" }]), "\"a.*.b\""),
        (json!([{ "allow": "" }]), "1 to 253"),
        (json!([{ "allow": long }]), "300"),
        (json!([{ "allow": "a..b" }]), "between dots"),
        (json!([{ "allow": "10.0.0.0/33" }]), "0 to 32"),
        (json!([{ "allow": "10.0.0.1/8" }]), "10.0.0.0/8 is meant"),
        (json!([{ "allow": "10.0.0/8" }]), "no address"),
        (json!([{ "allow": "10.0.0.0/+8" }]), "0 to 32"),
        (json!([{ "allow": "0x7f.0.0.1" }]), "no name"),
        (json!([{ "allow": "127.1" }]), "no name"),
        (json!([{ "allow": "ok", "deny": "ok" }]), "either"),
        (json!([{}]), "either"),
        (json!([{ "allow": "ok", "ports": [0] }]), "\"0\""),
        (json!([{ "allow": "ok", "ports": [99999] }]), "\"99999\""),
        (json!([{ "allow": "ok", "ports": ["9-1"] }]), "\"9-1\""),
        (json!([{ "allow": "ok", "methods": ["G T"] }]), "\"G T\""),
        (json!([{ "allow": "ok", "path": "v1" }]), "\"v1\""),
        (json!([{ "allow": "ok", "sing": 1 }]), "sing"),
        (json!([{ "deny": "ok", "inject": { "header": "a", "value": "b" } }]), "'inject' needs"),
        (json!([{ "allow": "10.0.0.0/8", "inject": { "header": "a", "value": "b" } }]), "'inject' needs"),
        (json!([{ "allow": "ok", "inject": { "header": "Host", "value": "b" } }]), "belongs to the connection"),
        (json!([{ "allow": "ok", "inject": { "header": "a b", "value": "b" } }]), "no name of a header"),
        (json!([{ "allow": "ok", "inject": { "header": "a", "value": "{9A}" } }]), "can't contain"),
        (json!([{ "allow": "ok", "inject": { "header": "a", "value": "{A" } }]), "without its"),
        (json!([{ "allow": "ok", "inject": { "header": "a", "value": "a\r\nb: c" } }]), "printable"),
    ];
    for (rules, expected) in cases {
        let error = policy(json!({ "rules": rules })).unwrap_err();
        assert!(error.contains(expected) && error.contains("rules["), "{rules}: {error}");
    }
    assert!(policy(json!({ "default": "maybe" })).unwrap_err().contains("maybe"));
    assert!(policy(json!({ "sing": true })).unwrap_err().contains("sing"));
    assert!(policy(json!(["deny"])).is_err() && policy(json!([])).is_err());
    assert!(policy(json!({ "public_ports": [70000] })).unwrap_err().contains("70000"));
}

#[test]
fn what_comes_from_elsewhere_opens_nothing_here() {
    let mut read = policy(json!({ "rules": [
        { "allow": "a.example" }, { "allow": "10.0.0.0/8" }, { "deny": "11.0.0.0/8" }, { "allow": "host.dormouse.internal" }
    ], "public_ports": [80] }))
    .unwrap();
    read.close_here();
    assert_eq!(read, policy(json!({ "rules": [{ "allow": "a.example" }, { "deny": "11.0.0.0/8" }] })).unwrap());
}

#[test]
fn names_match_whole_and_below() {
    let target = |text: &str| text.parse::<Target>().unwrap();
    assert!(target("Example.COM.").matches_name("example.com"));
    assert!(target("*.example.com").matches_name("a.b.example.com"));
    for host in ["example.com", "badexample.com", ".example.com", "example.com.evil.org"] {
        assert!(!target("*.example.com").matches_name(host), "{host}");
    }
    assert_eq!(target("::ffff:10.0.0.1"), target("10.0.0.1/32"));
    assert_eq!(target("[::1]").to_string(), "::1/128");
}

proptest! {
    /// A block contains exactly the addresses whose first bits are its own, up to the last address.
    #[test]
    fn a_block_contains_what_begins_as_it_does(base in any::<u32>(), other in any::<u32>(), bits in 0u8..=32) {
        let mask = if bits == 0 { 0 } else { u32::MAX << (32 - bits) };
        let block: Cidr = format!("{}/{bits}", std::net::Ipv4Addr::from(base & mask)).parse().unwrap();
        let address = std::net::Ipv4Addr::from(other);
        prop_assert_eq!(block.contains(address.into()), base & mask == other & mask);
        prop_assert!(block.contains(std::net::Ipv4Addr::from(base | !mask).to_ipv6_mapped().into()));
        prop_assert_eq!(block.to_string().parse::<Cidr>().unwrap(), block);
    }

    /// Hostile text is refused or read, never a panic.
    #[test]
    fn hostile_targets_are_refused(text in "[a-z0-9*./:\\[\\]\\- ]{0,40}") {
        if let Ok(target) = text.parse::<Target>() {
            prop_assert_eq!(target.to_string().parse::<Target>().unwrap(), target);
        }
    }
}
