//! `ps`, `logs`, `kill`: what runs in a session and what it has written.

use super::{
    Context,
    exec::PassOn,
    failure::{Failure, NOT_FOUND, Result},
    follow::{self, Progress, Source},
    http::{Call, no_body},
    lines::Lines,
    select,
    text::{Table, clip, command, local, safe, size, span},
};
use api_types::{Exec, LogLine, Service, Session, Signal, SignalExec, Terminal, signal_name};
use model::{ExecState, Offset, TerminalState};
use serde_json::{Value, json};
use std::time::Duration;

/// The log of what went out over a session's network.
const REQUESTS: &str = "requests";

/// `dormouse ps`.
///
/// # Errors
/// What the server refuses.
pub async fn ps(ctx: &Context, word: &str, all: bool) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let path = format!("/v1/sessions/{}", session.id);
    let execs: Vec<Value> = ctx.client.list(&format!("{path}/execs?limit=1000")).await?;
    let terminals: Vec<Value> = ctx.client.list(&format!("{path}/terminals")).await?;
    let services = services(ctx, &session).await?;
    let runs = |value: &Value| all || value.get("state").and_then(Value::as_str) == Some("running");
    let (execs, terminals): (Vec<Value>, Vec<Value>) =
        (execs.into_iter().filter(runs).collect(), terminals.into_iter().filter(runs).collect());
    if ctx.json {
        return ctx.print_json(&json!({ "execs": execs, "terminals": terminals, "services": services }));
    }
    let now = session.server_time;
    let mut table = Table::new(&["KIND", "ID", "STATE", "PID", "SINCE", "OUTPUT", "COMMAND"]);
    let pid = |pid: Option<u32>| pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
    for value in &execs {
        let exec: Exec = Context::read(value)?;
        table.row([
            "exec".to_owned(),
            exec.id.to_string(),
            exec_state(&exec),
            pid(exec.pid),
            span(now.since(exec.started_at)),
            size(exec.stdout_bytes.0.saturating_add(exec.stderr_bytes.0)),
            clip(&command(&exec.argv), 60),
        ]);
    }
    for value in &terminals {
        let terminal: Terminal = Context::read(value)?;
        table.row([
            "terminal".to_owned(),
            terminal.id.to_string(),
            terminal_state(&terminal),
            pid(terminal.pid),
            span(now.since(terminal.started_at)),
            size(terminal.output_bytes.0),
            clip(&command(&terminal.argv), 60),
        ]);
    }
    for service in &services {
        table.row([
            "service".to_owned(),
            service.name.clone(),
            service.state.clone().unwrap_or_else(|| "-".to_owned()),
            pid(service.pid),
            "-".to_owned(),
            size(service.output_bytes.0),
            clip(&command(&service.argv), 60),
        ]);
    }
    ctx.print(&table.render())
}

/// Services as they run; as they were declared where nothing runs.
async fn services(ctx: &Context, session: &Session) -> Result<Vec<Service>> {
    if session.services.is_empty() || !session.state.has_sandbox() {
        return Ok(session.services.clone());
    }
    ctx.client.list(&format!("/v1/sessions/{}/services", session.id)).await
}

fn exec_state(exec: &Exec) -> String {
    match exec.state {
        ExecState::Exited => format!("exited {}", exec.exit_code.unwrap_or_default()),
        ExecState::Killed => exec.signal.map_or_else(|| "killed".to_owned(), |signal| format!("killed {}", signal_name(signal))),
        other => other.to_string(),
    }
}

fn terminal_state(terminal: &Terminal) -> String {
    match (terminal.state, terminal.exit_code) {
        (TerminalState::Ended, Some(code)) => format!("ended {code}"),
        (state, _) => state.to_string(),
    }
}

/// `dormouse kill`.
///
/// # Errors
/// What the server refuses.
pub async fn kill(ctx: &Context, session: &str, exec: &str, signal: Signal) -> Result<()> {
    let session = select::session(&ctx.client, session).await?;
    let exec = select::exec(&ctx.client, &session, exec).await?;
    let path = format!("/v1/sessions/{}/execs/{}/signal", session.id, exec.id);
    ctx.client.send(Call::post(path, &SignalExec { signal })).await?;
    Ok(())
}

/// `dormouse logs`.
///
/// # Errors
/// What the server refuses.
pub async fn logs(
    ctx: &Context,
    session: &str,
    source: Option<&str>,
    follow: bool,
    from: Option<u64>,
    since: Option<Duration>,
) -> Result<()> {
    let session = select::session(&ctx.client, session).await?;
    let Some(word) = source else {
        if from.is_some() {
            return Err(Failure::usage("--from is a place in one exec's or terminal's output: name which"));
        }
        return merged(ctx, &session, None, follow, since).await;
    };
    if word == REQUESTS && from.is_none() && names_nothing(&find(ctx, &session, word).await) {
        return merged(ctx, &session, Some(REQUESTS), follow, since).await;
    }
    if since.is_some() {
        return Err(Failure::usage("--since goes by lines, which only 'logs SESSION' has; with one source use --from OFFSET"));
    }
    let source = find(ctx, &session, word).await?;
    let progress = Progress { out: Offset(from.unwrap_or(0)), err: Offset::ZERO };
    let mut sink = PassOn { quiet: ctx.quiet, told: false };
    follow::follow(ctx, session.id, &source, progress, follow, &mut sink).await?;
    Ok(())
}

fn names_nothing<T>(found: &Result<T>) -> bool {
    found.as_ref().err().is_some_and(|failure| failure.status == NOT_FOUND)
}

/// The exec, terminal or service that a word names, in that order.
async fn find(ctx: &Context, session: &Session, word: &str) -> Result<Source> {
    match select::exec(&ctx.client, session, word).await {
        Ok(exec) => return Ok(Source::Exec(exec.id)),
        Err(failure) if failure.status != NOT_FOUND => return Err(failure),
        Err(_) => {}
    }
    let terminals = select::terminals(&ctx.client, session).await?;
    match select::pick(&terminals, word, "terminal") {
        Ok(terminal) => return Ok(Source::Terminal(terminal.id)),
        Err(failure) if failure.status != NOT_FOUND => return Err(failure),
        Err(_) => {}
    }
    if session.services.iter().any(|service| service.name == word) {
        return Ok(Source::Service(word.to_owned()));
    }
    let next = format!("'dormouse ps --all {}' shows what there is", session.id);
    Err(Failure::not_found(format!("session {} has no exec, terminal or service '{word}' — {next}", session.id)))
}

/// All execs and services line by line. After a lost connection the lines go on from the last one that was shown.
async fn merged(ctx: &Context, session: &Session, source: Option<&str>, follow: bool, since: Option<Duration>) -> Result<()> {
    let mut since = since.map(|age| format!("{}s", age.as_secs()));
    let mut shown = Shown::default();
    let mut backoff = super::backoff::Backoff::default();
    loop {
        let mut path = format!("/v1/sessions/{}/logs?follow={follow}", session.id);
        if let Some(source) = source {
            path.push_str(&format!("&source={source}"));
        }
        if let Some(since) = &since {
            path.push_str(&format!("&since={}", super::http::encode(since)));
        }
        let failure = match ctx.client.send_stream(Call::get(path).header("accept", "application/x-ndjson"), no_body()).await {
            Ok(response) => match print_lines(ctx, Lines::new(response.into_body()), &mut shown, &mut backoff).await {
                Ok(()) if !follow => return Ok(()),
                Ok(()) => Failure::unreachable("the server closed the connection"),
                Err(failure) => failure,
            },
            Err(failure) => failure,
        };
        if !failure.is_passing() {
            return Err(failure);
        }
        tokio::time::sleep(backoff.next_pause()).await;
        if let Some(at) = shown.again() {
            since = Some(at);
        }
    }
}

/// The last lines that were shown: those of the newest instant, which a new connection tells again.
#[derive(Debug, Default)]
struct Shown {
    newest: Vec<LogLine>,
    /// Lines of that instant that the present connection has yet to tell again.
    repeated: Vec<LogLine>,
}

impl Shown {
    /// A new connection: where to begin.
    fn again(&mut self) -> Option<String> {
        self.repeated = self.newest.clone();
        self.newest.first().map(|line| line.at.to_string())
    }

    /// True where the line hasn't been shown yet.
    fn is_new(&mut self, line: &LogLine) -> bool {
        if let Some(at) = self.repeated.iter().position(|known| known == line) {
            self.repeated.remove(at);
            return false;
        }
        if self.newest.first().is_some_and(|newest| newest.at < line.at) {
            self.newest.clear();
        }
        self.newest.push(line.clone());
        true
    }
}

async fn print_lines(ctx: &Context, mut lines: Lines, shown: &mut Shown, backoff: &mut super::backoff::Backoff) -> Result<()> {
    while let Some(line) = lines.next().await? {
        backoff.reset();
        if line.is_empty() {
            continue;
        }
        let value: Value =
            serde_json::from_slice(&line).map_err(|e| Failure::failed(format!("can't read a line of the log: {e}")))?;
        let line: LogLine = Context::read(&value)?;
        if !shown.is_new(&line) {
            continue;
        }
        if line.source == REQUESTS {
            let text = if ctx.json { line.text.clone() } else { format!("{}  {}", local(line.at), request(&line.text)) };
            ctx.print(&format!("{text}\n"))?;
        } else if ctx.json {
            ctx.print_json(&value)?;
        } else {
            // An id's end tells execs apart; its beginning is the time.
            let source = match line.source.split_once(':') {
                Some(("exec", id)) => format!("exec:{}", id.get(id.len().saturating_sub(6)..).unwrap_or(id)),
                _ => line.source.clone(),
            };
            let mark = if line.stream == "stderr" { "!" } else { " " };
            ctx.print(&format!("{}  {:<16}{mark} {}\n", local(line.at), safe(&source), safe(&line.text)))?;
        }
    }
    Ok(())
}

/// A request to the outside, for people.
fn request(text: &str) -> String {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return safe(text) };
    let word = |name: &str| match &value[name] {
        Value::String(text) => safe(text),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    };
    let bytes = |name: &str| value[name].as_u64().map_or_else(|| "-".to_owned(), size);
    let (method, host, path, status) = (word("method"), word("host"), word("path"), word("status"));
    let (sent, received, took) = (bytes("sent_bytes"), bytes("received_bytes"), word("duration_ms"));
    format!("{status:<4} {method:<7} {host} {path}  {sent} sent, {received} received, {took} ms")
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::Timestamp;

    #[test]
    fn a_request_is_one_line() {
        let line = request(r#"{"method":"GET","host":"a.example","path":"/x","status":200,"sent_bytes":1,"duration_ms":5}"#);
        assert!(line.starts_with("200  GET     a.example /x") && line.ends_with("- received, 5 ms"), "{line}");
        assert_eq!(request("no JSON"), "no JSON");
    }

    #[test]
    fn a_line_is_shown_once_though_a_new_connection_tells_it_again() {
        let line = |at: i64, text: &str| LogLine {
            at: Timestamp(at),
            source: "exec:x".into(),
            stream: "stdout".into(),
            text: text.into(),
        };
        let mut shown = Shown::default();
        assert!(shown.is_new(&line(1, "a")));
        assert!(shown.is_new(&line(2, "b")));
        assert!(shown.is_new(&line(2, "b")), "two equal lines are two lines");
        assert_eq!(shown.again().as_deref(), Some("1970-01-01T00:00:00.002Z"));
        assert!(!shown.is_new(&line(2, "b")));
        assert!(!shown.is_new(&line(2, "b")));
        assert!(shown.is_new(&line(2, "c")));
        assert!(shown.is_new(&line(3, "d")));
    }
}
