//! `template`, `token`, `down`, `version`: what concerns the server as a whole.

use super::{
    Context,
    failure::{FAILED, Failure, Result, UNREACHABLE},
    http::{Call, encode},
    select,
    text::{Table, local, size},
};
use crate::args::{LimitFlags, TemplateCommand, TokenCommand};
use api_types::{
    CreateTemplate, CreateToken, Scope, ServerInfo, Shutdown, ShutdownAnswer, Template, TemplateKind, Token, TokenLimits,
};
use serde_json::{Value, json};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// How long a server may take to end after it has said that it will.
const GOING_DOWN: Duration = Duration::from_secs(30);

/// `dormouse template`.
///
/// # Errors
/// What the server refuses.
pub async fn template(ctx: &Context, command: TemplateCommand) -> Result<()> {
    match command {
        TemplateCommand::Ls => {
            let values: Vec<Value> = ctx.client.list("/v1/templates").await?;
            if ctx.json {
                return ctx.print_json(&json!({ "items": values }));
            }
            let mut table = Table::new(&["NAME", "HASH", "SIZE", "MADE", ""]);
            for value in &values {
                let template: Template = Context::read(value)?;
                table.row([
                    template.name,
                    template.hash.chars().take(16).collect(),
                    template.size_bytes.map_or_else(|| "-".to_owned(), size),
                    template.created_at.map_or_else(|| "-".to_owned(), local),
                    if template.default { "default".to_owned() } else { String::new() },
                ]);
            }
            ctx.print(&table.render())
        }
        TemplateCommand::Add { name, dir, tar, oci_layout } => {
            let (kind, path) = match (dir, tar, oci_layout) {
                (Some(path), _, _) => (TemplateKind::Dir, path),
                (_, Some(path), _) => (TemplateKind::Tar, path),
                (_, _, Some(path)) => (TemplateKind::OciLayout, path),
                _ => return Err(Failure::usage("give --dir, --tar or --oci-layout")),
            };
            let path = absolute(&path)?;
            let value: Value = ctx.client.json(Call::post("/v1/templates", &CreateTemplate { name, kind, path })).await?;
            if ctx.json {
                return ctx.print_json(&value);
            }
            let template: Template = Context::read(&value)?;
            ctx.print(&format!("{}  {}\n", template.name, template.hash))
        }
        TemplateCommand::Make { .. } => Err(Failure::usage("this command doesn't talk to a server")),
        TemplateCommand::Rm { names } => {
            for name in names {
                ctx.client.send(Call::delete(format!("/v1/templates/{}", encode(&name)))).await?;
            }
            Ok(())
        }
    }
}

/// The path as the server sees it: it doesn't share our working directory.
fn absolute(path: &Path) -> Result<String> {
    let path = std::path::absolute(path).map_err(|e| Failure::usage(format!("{}: {e}", path.display())))?;
    path.into_os_string().into_string().map_err(|path| Failure::usage(format!("{} is not UTF-8", path.display())))
}

/// `dormouse token`.
///
/// # Errors
/// What the server refuses.
pub async fn token(ctx: &Context, command: TokenCommand) -> Result<()> {
    match command {
        TokenCommand::New { name, scope, session, ttl, limits } => {
            let mut sessions = Vec::new();
            for word in &session {
                sessions.push(select::session(&ctx.client, word).await?.id);
            }
            let request = CreateToken {
                name,
                scopes: Some(scope),
                sessions: (!sessions.is_empty()).then_some(sessions),
                ttl_seconds: ttl.map(|ttl| ttl.as_secs()),
                limits: limits_of(limits),
            };
            let value: Value = ctx.client.json(Call::post("/v1/tokens", &request)).await?;
            if ctx.json {
                return ctx.print_json(&value);
            }
            let made: Token = Context::read(&value)?;
            let secret = made.token.ok_or_else(|| Failure::failed("the server made a token and didn't say it"))?;
            ctx.note("this is the only time that the token is shown");
            ctx.print(&format!("{secret}\n"))
        }
        TokenCommand::Ls => {
            let values: Vec<Value> = ctx.client.list("/v1/tokens").await?;
            if ctx.json {
                return ctx.print_json(&json!({ "items": values }));
            }
            let mut table = Table::new(&["ID", "NAME", "SCOPES", "SESSIONS", "LIMITS", "MADE", "LAST USED", "STATE"]);
            for value in &values {
                let token: Token = Context::read(value)?;
                let when = |at: Option<model::Timestamp>| at.map_or_else(|| "-".to_owned(), local);
                table.row([
                    token.id.to_string(),
                    token.name.clone(),
                    token.scopes.iter().copied().map(Scope::as_str).collect::<Vec<_>>().join(","),
                    token.sessions.as_ref().map_or_else(|| "all".to_owned(), |sessions| sessions.len().to_string()),
                    token.limits.as_ref().map_or_else(|| "-".to_owned(), limits_text),
                    local(token.created_at),
                    when(token.last_used_at),
                    state_of(&token),
                ]);
            }
            ctx.print(&table.render())
        }
        TokenCommand::Revoke { tokens } => {
            let known: Vec<Token> = ctx.client.list("/v1/tokens").await?;
            for word in tokens {
                let id = pick(&known, &word)?.id;
                ctx.client.send(Call::delete(format!("/v1/tokens/{id}"))).await?;
            }
            Ok(())
        }
    }
}

/// The limits that were given; `None` where none was.
fn limits_of(flags: LimitFlags) -> Option<TokenLimits> {
    let limits = TokenLimits {
        sessions: flags.max_sessions,
        running_sessions: flags.max_running,
        cpus: flags.max_cpus,
        memory_bytes: flags.max_memory,
        disk_bytes: flags.max_disk,
        snapshot_bytes: flags.max_snapshots,
    };
    (limits != TokenLimits::default()).then_some(limits)
}

fn limits_text(limits: &TokenLimits) -> String {
    let parts = [
        limits.sessions.map(|count| format!("{count} sessions")),
        limits.running_sessions.map(|count| format!("{count} running")),
        limits.cpus.map(|cpus| format!("{cpus} cpus")),
        limits.memory_bytes.map(|bytes| format!("{} memory", size(bytes.0))),
        limits.disk_bytes.map(|bytes| format!("{} disk", size(bytes.0))),
        limits.snapshot_bytes.map(|bytes| format!("{} of snapshots", size(bytes.0))),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn state_of(token: &Token) -> String {
    match (token.revoked_at, token.expires_at) {
        (Some(at), _) => format!("revoked {}", local(at)),
        (None, Some(at)) => format!("until {}", local(at)),
        (None, None) => "valid".to_owned(),
    }
}

/// Tokens are named by id, or by a name that only one valid token has.
fn pick<'a>(known: &'a [Token], word: &str) -> Result<&'a Token> {
    if let Some(token) = known.iter().find(|token| token.id.to_string() == word) {
        return Ok(token);
    }
    let named: Vec<&Token> = known.iter().filter(|token| token.name == word && token.revoked_at.is_none()).collect();
    match named.as_slice() {
        [one] => Ok(one),
        [] => Err(Failure::not_found(format!("no token '{word}' — 'dormouse token ls' shows them"))),
        several => {
            let ids: Vec<String> = several.iter().map(|token| token.id.to_string()).collect();
            Err(Failure::conflict(format!("{} tokens are called '{word}' — give the id: {}", ids.len(), ids.join(", "))))
        }
    }
}

/// `dormouse down`: asks the server to end and waits until it has.
///
/// # Errors
/// What the server refuses; a server that doesn't end.
pub async fn down(ctx: &Context, hibernate: bool) -> Result<()> {
    let answer: ShutdownAnswer = ctx.client.json(Call::post("/v1/server/shutdown", &Shutdown { hibernate })).await?;
    let begun = Instant::now();
    while still_there(ctx, answer.pid).await {
        if begun.elapsed() > GOING_DOWN {
            return Err(Failure::failed(format!("the server (pid {}) said that it would end and still answers", answer.pid)));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    if ctx.json {
        ctx.print_json(&json!({ "pid": answer.pid, "hibernated": answer.hibernated, "failed": answer.failed }))?;
    } else {
        if hibernate {
            ctx.note(&format!("{} sessions hibernated", answer.hibernated.len()));
        }
        for failure in &answer.failed {
            eprintln!("dormouse: session {} runs on: {}", failure.session_id, failure.detail);
        }
    }
    match answer.failed.len() {
        0 => Ok(()),
        n => Err(Failure { status: FAILED, message: format!("{n} sessions could not be hibernated"), problem: None }),
    }
}

/// True while somebody takes connections there and the process, where it is this machine's, lives.
async fn still_there(ctx: &Context, pid: u32) -> bool {
    if ctx.client.connect().await.is_ok() {
        return true;
    }
    // Only a process that we could see at all says anything by being there.
    ctx.client.address().is_local() && is_dormouse(pid)
}

/// True for a server that runs; one that has ended and that its parent hasn't noticed yet (a zombie) doesn't.
fn is_dormouse(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.split_once("(dormouse) ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

/// `dormouse version`.
///
/// # Errors
/// Standard output can't be written.
pub async fn version(ctx: &Context) -> Result<()> {
    let own = env!("CARGO_PKG_VERSION");
    let asked: Result<ServerInfo> = ctx.client.json(Call::get("/v1/server").once()).await;
    if ctx.json {
        let server =
            asked.as_ref().ok().map(|info| json!({ "version": info.version, "pid": info.pid, "started_at": info.started_at }));
        return ctx.print_json(&json!({ "client": { "version": own }, "server": server }));
    }
    let server = match asked {
        Ok(info) => format!("{} (pid {}, since {})", info.version, info.pid, local(info.started_at)),
        Err(failure) if failure.status == UNREACHABLE => "not running".to_owned(),
        Err(failure) => format!("not known: {failure}"),
    };
    ctx.print(&format!("dormouse {own}\nserver   {server}\n"))
}
