//! `secret`: values that are added to requests outside of sessions, and never shown again.

use super::{
    Context,
    failure::{Failure, Result},
    http::{Call, encode},
    text::{Table, local},
};
use crate::args::SecretCommand;
use api_types::{PutSecret, Secret};
use model::network::SecretName;
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal, Read, Write};

/// The longest value that is read; the server takes less.
const LONGEST: u64 = 1 << 20;

/// `dormouse secret`.
///
/// # Errors
/// What the server refuses.
pub async fn command(ctx: &Context, command: SecretCommand) -> Result<()> {
    match command {
        SecretCommand::Set { name, hosts, any_host } => {
            let value = tokio::task::spawn_blocking({
                let name = name.clone();
                move || read_value(&name)
            });
            let value = value.await.map_err(|e| Failure::failed(e.to_string()))??;
            let hosts = (any_host || !hosts.is_empty()).then_some(hosts);
            let body = serde_json::to_vec(&PutSecret { value, hosts }).map_err(|e| Failure::failed(e.to_string()))?;
            let call = Call::put_bytes(format!("/v1/secrets/{}", encode(name.as_str())), body.into());
            let kept: Value = ctx.client.json(call).await?;
            if ctx.json { ctx.print_json(&kept) } else { Ok(()) }
        }
        SecretCommand::Ls => {
            let values: Vec<Value> = ctx.client.list("/v1/secrets").await?;
            if ctx.json {
                return ctx.print_json(&json!({ "items": values }));
            }
            let mut table = Table::new(&["NAME", "HOSTS", "MADE", "CHANGED"]);
            for value in &values {
                let secret: Secret = Context::read(value)?;
                let hosts = if secret.hosts.is_empty() { "-".to_owned() } else { secret.hosts.join(",") };
                table.row([secret.name.to_string(), hosts, local(secret.created_at), local(secret.updated_at)]);
            }
            ctx.print(&table.render())
        }
        SecretCommand::Rm { names } => {
            for name in names {
                ctx.client.send(Call::delete(format!("/v1/secrets/{}", encode(name.as_str())))).await?;
            }
            Ok(())
        }
    }
}

/// Reads a value from standard input, without showing it: an argument would be in the list of processes. Blocks.
fn read_value(name: &SecretName) -> Result<String> {
    let unread = |e: std::io::Error| Failure::failed(format!("can't read the value: {e}"));
    let mut text = String::new();
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        eprint!("value of {name}: ");
        let _ = std::io::stderr().flush();
        let shown = tcgetattr(&stdin).map_err(|e| unread(e.into()))?;
        let mut hidden = shown.clone();
        hidden.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&stdin, OptionalActions::Flush, &hidden).map_err(|e| unread(e.into()))?;
        let read = stdin.lock().read_line(&mut text);
        let back = tcsetattr(&stdin, OptionalActions::Now, &shown);
        eprintln!();
        read.map_err(unread)?;
        back.map_err(|e| unread(e.into()))?;
    } else {
        stdin.lock().take(LONGEST).read_to_string(&mut text).map_err(unread)?;
    }
    Ok(without_line_end(&text).to_owned())
}

/// One line end at the end is the shell's or the editor's.
fn without_line_end(text: &str) -> &str {
    let text = text.strip_suffix('\n').unwrap_or(text);
    text.strip_suffix('\r').unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_not_part_of_a_value() {
        for (text, value) in [("a\n", "a"), ("a\r\n", "a"), ("a", "a"), ("a\n\n", "a\n"), ("", "")] {
            assert_eq!(without_line_end(text), value, "{text:?}");
        }
    }
}
