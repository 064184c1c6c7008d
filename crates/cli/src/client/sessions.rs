//! `ls`, `show`, `stats`, `wait`: looking at sessions.

use super::{
    Context, exec,
    failure::{Failure, Result},
    follow::{self, Progress, Sink, Source, Stream},
    http::{Call, encode},
    select,
    text::{Table, clip, local, safe, size, span},
};
use api_types::{Exec, Session, Stats};
use model::{ExecState, State};
use serde_json::{Value, json};
use std::{process::ExitCode, time::Duration};

/// A column of `ls`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Id,
    Key,
    Name,
    State,
    Reason,
    Generation,
    Runtime,
    Template,
    Active,
    Created,
    Task,
}

const ALL: [(Column, &str, &str); 11] = [
    (Column::Id, "id", "ID"),
    (Column::Key, "key", "KEY"),
    (Column::Name, "name", "NAME"),
    (Column::State, "state", "STATE"),
    (Column::Reason, "reason", "REASON"),
    (Column::Generation, "generation", "GEN"),
    (Column::Runtime, "runtime", "RUNTIME"),
    (Column::Template, "template", "TEMPLATE"),
    (Column::Active, "active", "ACTIVE"),
    (Column::Created, "created", "CREATED"),
    (Column::Task, "task", "TASK"),
];

const USUAL: &str = "id,key,state,generation,active,task";

/// Reads a list of columns.
fn columns(text: &str) -> Result<Vec<Column>> {
    if text == "wide" {
        return Ok(ALL.iter().map(|(column, ..)| *column).collect());
    }
    let one = |word: &str| {
        let found = ALL.iter().find(|(_, name, _)| *name == word.trim());
        found.map(|(column, ..)| *column).ok_or_else(|| {
            let names: Vec<&str> = ALL.iter().map(|(_, name, _)| *name).collect();
            Failure::usage(format!("'{word}' is not a column: use {}, or wide", names.join(", ")))
        })
    };
    text.split(',').map(one).collect()
}

fn cell(column: Column, session: &Session) -> String {
    let dash = |text: &Option<String>| text.clone().filter(|text| !text.is_empty()).unwrap_or_else(|| "-".to_owned());
    match column {
        Column::Id => session.id.to_string(),
        Column::Key => clip(&dash(&session.key), 30),
        Column::Name => clip(&dash(&session.name), 30),
        Column::State => match &session.operation {
            Some(operation) => format!("{} ({})", session.state, operation.kind),
            None => session.state.to_string(),
        },
        Column::Reason => dash(&session.reason),
        Column::Generation => session.generation.to_string(),
        Column::Runtime => session.runtime.to_string(),
        Column::Template => session.template.clone(),
        // By the server's clock on both sides: this machine's may be off.
        Column::Active => format!("{} ago", span(session.server_time.since(session.last_activity_at))),
        Column::Created => local(session.created_at),
        Column::Task => clip(&dash(&session.task), 50),
    }
}

/// `dormouse ls`.
///
/// # Errors
/// What the server refuses, and columns that aren't there.
pub async fn ls(ctx: &Context, state: Option<&str>, meta: &[(String, String)], all: bool, shown: Option<&str>) -> Result<()> {
    let shown = columns(shown.unwrap_or(USUAL))?;
    let mut path = "/v1/sessions?limit=1000".to_owned();
    if let Some(state) = state {
        state.parse::<State>().map_err(Failure::usage)?;
        path.push_str(&format!("&state={state}"));
    }
    for (name, value) in meta {
        path.push_str(&format!("&metadata.{}={}", encode(name), encode(value)));
    }
    if all {
        path.push_str("&include_deleted=true");
    }
    if ctx.json {
        // As the server says it, fields that this client doesn't know included.
        let values: Vec<Value> = ctx.client.list(&path).await?;
        return ctx.print_json(&json!({ "items": values }));
    }
    let sessions: Vec<Session> = ctx.client.list(&path).await?;
    if ctx.quiet {
        return ctx.print(&sessions.iter().map(|session| format!("{}\n", session.id)).collect::<String>());
    }
    let heading = |column: &Column| ALL.iter().find(|(known, ..)| known == column).map_or("", |(_, _, heading)| *heading);
    let mut table = Table::new(&shown.iter().map(heading).collect::<Vec<_>>());
    for session in &sessions {
        table.row(shown.iter().map(|column| cell(*column, session)));
    }
    ctx.print(&table.render())
}

/// `dormouse show`.
///
/// # Errors
/// What the server refuses.
pub async fn show(ctx: &Context, word: &str) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let value: Value = ctx.client.json(Call::get(format!("/v1/sessions/{}", session.id))).await?;
    if ctx.json {
        return ctx.print_json(&value);
    }
    ctx.print(&describe(&Context::read(&value)?))
}

fn describe(session: &Session) -> String {
    let mut lines: Vec<(&str, String)> = vec![("id", session.id.to_string())];
    let mut some = |name: &'static str, value: Option<String>| lines.extend(value.map(|value| (name, safe(&value))));
    some("key", session.key.clone());
    some("name", session.name.clone());
    some("task", session.task.clone());
    let reason = session.reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    some("state", Some(format!("{}{reason}", session.state)));
    some(
        "under way",
        session.operation.as_ref().map(|op| format!("{} since {} (operation {})", op.kind, local(op.started_at), op.id)),
    );
    some("in short", Some(session.sentence.clone()).filter(|sentence| !sentence.is_empty()));
    some("memory", Some(session.memory.to_string()));
    some("runtime", Some(session.runtime.to_string()));
    some("template", Some(session.template.clone()));
    some("generation", Some(session.generation.to_string()));
    some("ephemeral", session.ephemeral.then(|| "yes".to_owned()));
    some("workdir", session.workdir.clone());
    some("created", Some(local(session.created_at)));
    let ago = span(session.server_time.since(session.last_activity_at));
    some("last activity", Some(format!("{} ({ago} ago)", local(session.last_activity_at))));
    some(
        "when idle",
        session.idle.map(|idle| format!("{} after {}", idle.action, span(Duration::from_secs(idle.after_seconds)))),
    );
    some("idle until", session.hibernate_after.map(local));
    if let Some(activity) = &session.activity {
        for keeps in &activity.keeps_awake {
            let what = if keeps.what.is_empty() { String::new() } else { format!("  {}", keeps.what) };
            some("awake for", Some(format!("{}{what}", keeps.kind)));
        }
        let quiet = span(Duration::from_secs_f64(activity.quiet_seconds.max(0.0)));
        some("quiet for", activity.keeps_awake.is_empty().then(|| format!("{quiet}, CPU {} %", activity.cpu_percent)));
        some("output", activity.output_waits.then(|| "waits: the disk is full".to_owned()));
        let text = activity.waiting_text.as_deref().map(|text| format!(": {text}")).unwrap_or_default();
        some("waits for", activity.waiting_for.as_ref().map(|who| format!("{who}{text}")));
    }
    some("time limit", session.timeout_at.map(|at| format!("{} at {}", session.on_timeout, local(at))));
    some("expires", session.expires_at.map(local));
    some("wakes", session.wake_at.map(local));
    some(
        "made from",
        session.parent.as_ref().map(|parent| {
            let snapshot = parent.snapshot_id.map(|id| format!("snapshot {id} of ")).unwrap_or_default();
            format!("{snapshot}session {}", parent.session_id)
        }),
    );
    let kept = if session.local { "here and in the object store" } else { "in the object store alone; fetched when needed" };
    some("kept", session.packed.then(|| kept.to_owned()));
    some("snapshot", session.latest_snapshot_id.map(|id| id.to_string()));
    some("part of", session.parent_task.clone());
    for (name, value) in &session.metadata {
        some("metadata", Some(format!("{name}={value}")));
    }
    for service in &session.services {
        let state = service.state.as_deref().map(|state| format!(" ({state})")).unwrap_or_default();
        some("service", Some(format!("{}{state}  {}", service.name, super::text::command(&service.argv))));
    }
    some("disk written", session.usage.disk_bytes.map(size));
    some("saved memory", session.usage.image_bytes.map(size));
    lines.iter().map(|(name, value)| format!("{:<15}{value}\n", format!("{name}:"))).collect()
}

/// `dormouse stats`.
///
/// # Errors
/// What the server refuses.
pub async fn stats(ctx: &Context, word: Option<&str>) -> Result<()> {
    let sessions = match word {
        Some(word) => vec![select::session(&ctx.client, word).await?],
        None => ctx.client.list("/v1/sessions?limit=1000&state=running").await?,
    };
    let mut table = Table::new(&["ID", "KEY", "CPU", "MEMORY", "LIMIT", "PROCESSES", "DISK", "SUPERVISOR"]);
    let mut values = Vec::new();
    for session in &sessions {
        let answer = ctx.client.json::<Value>(Call::get(format!("/v1/sessions/{}/stats", session.id))).await;
        let mut value = match answer {
            // One that has ended meanwhile is no failure of a look at all.
            Err(_) if word.is_none() => continue,
            answer => answer?,
        };
        let stats: Stats = Context::read(&value)?;
        if let Some(fields) = value.as_object_mut() {
            fields.insert("session_id".to_owned(), json!(session.id));
        }
        values.push(value);
        table.row([
            session.id.to_string(),
            session.key.clone().unwrap_or_else(|| "-".to_owned()),
            format!("{:.1} s", stats.cpu_ms as f64 / 1000.0),
            size(stats.memory_bytes),
            stats.memory_limit_bytes.map_or_else(|| "-".to_owned(), size),
            stats.processes.to_string(),
            size(stats.disk_bytes),
            size(stats.supervisor_rss_bytes),
        ]);
    }
    match (ctx.json, word, values.as_slice()) {
        (true, Some(_), [one]) => ctx.print_json(one),
        (true, ..) => ctx.print_json(&json!({ "items": values })),
        _ => ctx.print(&table.render()),
    }
}

/// Output that nobody asked for.
struct Unread;

impl Sink for Unread {
    fn bytes(&mut self, _: Stream, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn gap(&mut self, _: &str, _: u64) {}
}

/// `dormouse wait`: for an exec's end, with its status; or until the session has no sandbox, printing its state.
///
/// # Errors
/// What the server refuses.
pub async fn wait(ctx: &Context, word: &str, exec: Option<&str>) -> Result<ExitCode> {
    let session = select::session(&ctx.client, word).await?;
    if let Some(word) = exec {
        let exec = select::exec(&ctx.client, &session, word).await?;
        return wait_for_exec(ctx, &session, exec).await;
    }
    let path = format!("/v1/sessions/{}", session.id);
    let mut pause = Duration::from_millis(100);
    loop {
        let value: Value = match ctx.client.json(Call::get(&path)).await {
            Err(failure) if failure.problem.as_ref().is_some_and(|p| p.status == 410) => json!({ "state": "deleted" }),
            answer => answer?,
        };
        let state: State = value.get("state").map(Context::read).transpose()?.unwrap_or(State::Deleted);
        if !state.has_sandbox() && state != State::Creating {
            if ctx.json {
                ctx.print_json(&value)?
            } else {
                ctx.print(&format!("{state}\n"))?
            }
            return Ok(ExitCode::SUCCESS);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

async fn wait_for_exec(ctx: &Context, session: &Session, exec: Exec) -> Result<ExitCode> {
    if exec.state == ExecState::Running {
        let progress = Progress { out: exec.stdout_bytes, err: exec.stderr_bytes };
        follow::follow(ctx, session.id, &Source::Exec(exec.id), progress, true, &mut Unread).await?;
    }
    let value: Value = ctx.client.json(Call::get(format!("/v1/sessions/{}/execs/{}", session.id, exec.id))).await?;
    if ctx.json {
        ctx.print_json(&value)?;
    }
    Ok(ExitCode::from(exec::finish(&Context::read(&value)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_named_by_words() {
        assert_eq!(columns("id, task").unwrap(), [Column::Id, Column::Task]);
        assert_eq!(columns("wide").unwrap().len(), ALL.len());
        assert_eq!(columns(USUAL).unwrap().len(), 6);
        let failure = columns("id,size").unwrap_err();
        assert_eq!((failure.status, failure.message.contains("'size'")), (2, true));
    }
}
