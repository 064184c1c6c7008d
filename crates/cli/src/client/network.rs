//! Policies on the command line: given to `new`, `run` and `set`, shown by `show --network`.

use super::{
    Context,
    failure::{Failure, Result},
    http::Call,
    select,
    text::{Table, safe, size, span},
};
use api_types::{Network, PatchSession};
use model::network::Policy;
use serde_json::Value;
use std::time::Duration;

/// Reads a policy: JSON, or `@FILE` with JSON in it.
///
/// # Errors
/// A usage failure that names the rule which is wrong.
pub fn policy(text: &str) -> Result<Policy> {
    let read;
    let json = match text.strip_prefix('@') {
        Some(file) => {
            read = std::fs::read_to_string(file).map_err(|e| Failure::usage(format!("can't read the policy {file}: {e}")))?;
            &read
        }
        None => text,
    };
    serde_json::from_str(json).map_err(|e| Failure::usage(format!("the network policy is not right: {e}")))
}

/// `dormouse show SESSION --network`.
///
/// # Errors
/// What the server refuses.
pub async fn show(ctx: &Context, word: &str) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let value: Value = ctx.client.json(Call::get(format!("/v1/sessions/{}/network", session.id))).await?;
    if ctx.json {
        return ctx.print_json(&value);
    }
    ctx.print(&describe(&Context::read(&value)?))
}

fn describe(network: &Network) -> String {
    let policy = serde_json::to_value(&network.policy).unwrap_or_default();
    let word = |name: &str| policy[name].as_str().unwrap_or_default().to_owned();
    let mut out = String::new();
    for rule in policy["rules"].as_array().into_iter().flatten() {
        out.push_str(&format!("rule:          {}\n", safe(&rule.to_string())));
    }
    out.push_str(&format!("otherwise:     {}\n", word("default")));
    let list = |ports: &[u16]| ports.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if !network.policy.public_ports.is_empty() {
        out.push_str(&format!("public ports:  {}\n", list(&network.policy.public_ports)));
    }
    if let Some(ports) = &network.policy.name_ports {
        out.push_str(&format!("ports of names: {}\n", list(ports)));
    }
    if network.policy.log_requests {
        out.push_str("requests:      are written down: dormouse logs SESSION requests\n");
    }
    if network.secrets_withheld {
        out.push_str("secrets:       withheld from this fork; dormouse set SESSION --network gives them\n");
    }
    for (name, value) in &network.environment {
        out.push_str(&format!("environment:   {}={}\n", safe(name), safe(value)));
    }
    out.push_str(&format!("open:          {}\n", network.open_count));
    if !network.open.is_empty() {
        let mut table = Table::new(&["TO", "SINCE", "SENT", "RECEIVED"]);
        for open in &network.open {
            let since = span(Duration::from_millis(open.age_ms));
            table.row([safe(&open.to), since, size(open.sent_bytes), size(open.received_bytes)]);
        }
        out.push_str(&table.render());
    }
    if !network.traffic.is_empty() {
        let mut table = Table::new(&["HOST", "CONNECTIONS", "SENT", "RECEIVED"]);
        for host in &network.traffic {
            table.row([safe(&host.host), host.connections.to_string(), size(host.sent_bytes), size(host.received_bytes)]);
        }
        out.push_str(&table.render());
    }
    out
}

/// `dormouse set SESSION --network`.
///
/// # Errors
/// A policy that isn't right; what the server refuses.
pub async fn set(ctx: &Context, word: &str, text: &str) -> Result<()> {
    let patch = PatchSession { network: Some(Some(policy(text)?)), ..PatchSession::default() };
    let session = select::session(&ctx.client, word).await?;
    let value: Value = ctx.client.json(Call::patch(format!("/v1/sessions/{}", session.id), &patch)).await?;
    if ctx.json { ctx.print_json(&value) } else { ctx.print(&format!("{}\n", session.id)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_policy_is_read_from_the_line_or_from_a_file() {
        let text = r#"{"default":"deny","rules":[{"allow":"a.example"}]}"#;
        let read = policy(text).unwrap();
        assert_eq!(read.rules.len(), 1);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("policy.json");
        std::fs::write(&file, text).unwrap();
        assert_eq!(policy(&format!("@{}", file.display())).unwrap(), read);
        for (bad, says) in [("{", "not right"), ("@/nonexistent", "/nonexistent"), (r#"{"rules":[{"allow":"a b"}]}"#, "rules[0]")]
        {
            let failure = policy(bad).unwrap_err();
            assert!(failure.status == 2 && failure.message.contains(says), "{}", failure.message);
        }
    }

    #[test]
    fn rules_stand_in_their_order_before_what_else_holds() {
        let network = json!({ "policy": { "default": "deny", "rules": [{ "allow": "a.example", "ports": [443] }], "public_ports": [80] },
            "open_count": 1, "open": [{ "to": "a.example:443", "age_ms": 5000, "sent_bytes": 1, "received_bytes": 2 }] });
        let text = describe(&serde_json::from_value(network).unwrap());
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part} in {text}"));
        assert!(at("a.example\"") < at("otherwise:     deny") && at("otherwise") < at("a.example:443"));
        at("public ports:  80");
    }
}
