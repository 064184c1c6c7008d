//! `new` and `run`: getting or creating a session.

use super::{
    Context,
    attach::{self, DetachKeys, Mode, Over, Target, Tty},
    failure::{Failure, Result},
    http::Call,
    network, snapshots,
};
use crate::args::{NewOptions, OnIdle};
use api_types::{CreateSession, CreatedSession, Session, Source};
use model::{IdleAction, IdlePolicy, IdleWhen, Key, Resources, Runtime, State};
use serde_json::{Value, json};
use std::{process::ExitCode, time::Duration};

/// How long nothing happens in a session before it is hibernated, unless told otherwise.
const IDLE_AFTER: Duration = Duration::from_secs(30 * 60);

/// `dormouse new`.
///
/// # Errors
/// What the server refuses.
pub async fn new(ctx: &Context, key: Option<String>, options: NewOptions) -> Result<()> {
    let (session, value) = ensure_session(ctx, key, options).await?;
    if ctx.json { ctx.print_json(&value) } else { ctx.print(&format!("{}\n", session.id)) }
}

/// `dormouse run`.
///
/// # Errors
/// No terminal here, and what the server refuses.
pub async fn run(
    ctx: &Context,
    key: Option<String>,
    mut options: NewOptions,
    rm: bool,
    keys: DetachKeys,
    argv: Vec<String>,
) -> Result<ExitCode> {
    Tty::check()?;
    if options.runtime == Some(Runtime::Host) && options.workdir.is_none() {
        let here = std::env::current_dir().map_err(|e| Failure::failed(format!("the current directory is gone: {e}")))?;
        options.workdir = Some(here.to_string_lossy().into_owned());
    }
    let (session, _) = ensure_session(ctx, key, options).await?;
    if session.state != State::Running {
        attach::ensure_running(ctx, &session, true).await?;
    }
    let terminal = attach::open_terminal(ctx, &session, Some(argv)).await?;
    let id = session.id;
    let over = attach::attach(ctx, Target { session, terminal, mode: Mode::Write, keys }).await?;
    if rm {
        match over {
            Over::Ended { .. } => drop(ctx.client.send(Call::delete(format!("/v1/sessions/{id}"))).await?),
            Over::Detached => ctx.note(&format!("the command goes on; delete the session with 'dormouse rm {id}'")),
        }
    }
    Ok(attach::exit_code(&over))
}

/// Gets or creates a session, and says on standard error what isn't as it was asked for.
async fn ensure_session(ctx: &Context, key: Option<String>, options: NewOptions) -> Result<(Session, Value)> {
    let (from, disk_only) = (options.from.clone(), options.disk_only);
    let mut request = request(key, options)?;
    if let Some(word) = from {
        request.snapshot_id = Some(snapshots::find(&ctx.client, &word).await?.id);
        request.disk_only = disk_only.then_some(true);
    }
    let value: Value = ctx.client.json(Call::post("/v1/sessions", &request)).await?;
    let made: CreatedSession = Context::read(&value)?;
    if let Some(ignored) = made.ignored.filter(|fields| !fields.is_empty()) {
        let names: Vec<String> = ignored.into_iter().map(|field| field.0).collect();
        ctx.note(&format!("the session was there before; not applied: {}", names.join(", ")));
    }
    if let Some(replaced) = made.replaced {
        ctx.note(&format!("replaces session {} ({})", replaced.session_id, replaced.reason));
    }
    Ok((made.session, value))
}

/// What the options ask for, but for the snapshot, which has to be found first. Nothing that was given is left out: what
/// isn't built yet, the server refuses.
fn request(key: Option<String>, options: NewOptions) -> Result<CreateSession> {
    let key: Option<Key> = key.map(|key| key.parse()).transpose().map_err(|e: model::NameError| Failure::usage(e.to_string()))?;
    let idle_action = match options.on_idle.unwrap_or_default() {
        OnIdle::Hibernate if options.ephemeral => None,
        OnIdle::Hibernate => Some(IdleAction::Hibernate),
        OnIdle::Stop => Some(IdleAction::Stop),
        OnIdle::None => None,
    };
    let after = options.idle.unwrap_or(IDLE_AFTER);
    let idle = idle_action.map(|action| IdlePolicy { after_seconds: after.as_secs(), action, when: IdleWhen::NoActivity });
    let resources = Resources { cpus: options.cpus, memory_bytes: options.memory, disk_bytes: options.disk, pids: options.pids };
    Ok(CreateSession {
        key,
        replace: options.replace.then_some(true),
        name: options.name,
        task: options.task,
        template: options.template,
        runtime: options.runtime,
        machine: options.machine.map(Value::from),
        env: options.env.into_iter().collect(),
        workdir: options.workdir,
        metadata: options.meta.into_iter().collect(),
        source: options.source.as_deref().map(source),
        resources: (resources != Resources::default()).then_some(resources),
        idle,
        timeout_seconds: options.timeout.map(|limit| limit.as_secs()),
        ttl_seconds: options.ttl.map(|limit| limit.as_secs()),
        ephemeral: options.ephemeral.then_some(true),
        volumes: if options.volume.is_empty() {
            None
        } else {
            Some(options.volume.iter().map(|text| volume(text)).collect::<Result<_>>()?)
        },
        network: options.network.as_deref().map(network::policy).transpose()?,
        ..CreateSession::default()
    })
}

/// Reads `URL[#REF]`. A tar archive is told by its name; everything else is a git repository.
fn source(text: &str) -> Source {
    let (url, reference) = match text.split_once('#') {
        Some((url, reference)) => (url, Some(reference.to_owned()).filter(|reference| !reference.is_empty())),
        None => (text, None),
    };
    let path = url.split('?').next().unwrap_or(url).to_ascii_lowercase();
    let is_tar = [".tar", ".tar.gz", ".tgz"].iter().any(|end| path.ends_with(end));
    let (git, tar) = if is_tar { (None, Some(url.to_owned())) } else { (Some(url.to_owned()), None) };
    Source { git, tar, reference, depth: None }
}

/// Reads `NAME:/path[:ro]`.
fn volume(text: &str) -> Result<Value> {
    let bad = || Failure::usage(format!("'{text}' is not a volume: write NAME:/path, or NAME:/path:ro"));
    let mut parts = text.split(':');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(name), Some(path), mode @ (None | Some("ro")), None) if !name.is_empty() && path.starts_with('/') => {
            Ok(json!({ "name": name, "path": path, "read_only": mode.is_some() }))
        }
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn asked(line: &str) -> Result<CreateSession> {
        let cli = Cli::try_parse_from(["dormouse", "new"].into_iter().chain(line.split_whitespace())).unwrap();
        match cli.command {
            Command::New { key, options } => request(key, options),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn half_an_hour_without_activity_hibernates_unless_told_otherwise() {
        let idle = |line: &str| asked(line).unwrap().idle.map(|idle| (idle.after_seconds, idle.action));
        assert_eq!(idle(""), Some((1800, IdleAction::Hibernate)));
        assert_eq!(idle("--idle 1h --on-idle stop"), Some((3600, IdleAction::Stop)));
        assert_eq!(idle("--on-idle none"), None);
        assert_eq!(idle("--ephemeral"), None);
    }

    #[test]
    fn options_become_fields() {
        let request =
            asked("k --meta a=b --env X=1 --source https://h/r#dev --memory 2g --volume data:/data:ro --ttl 7d").unwrap();
        assert_eq!(
            serde_json::to_value(request).unwrap(),
            json!({
                "key": "k", "metadata": { "a": "b" }, "env": { "X": "1" },
                "source": { "git": "https://h/r", "ref": "dev" },
                "resources": { "memory_bytes": 2147483648u64 },
                "idle": { "after_seconds": 1800, "action": "hibernate", "when": "no_activity" },
                "volumes": [{ "name": "data", "path": "/data", "read_only": true }],
                "ttl_seconds": 604800,
            })
        );
        assert_eq!(asked("--source https://h/x.tar.gz").unwrap().source.unwrap().tar.as_deref(), Some("https://h/x.tar.gz"));
    }

    #[test]
    fn mistakes_are_usage() {
        for line in ["a/b", "--volume data", "--volume data:rel", "--volume data:/x:rw"] {
            assert_eq!(asked(line).unwrap_err().status, 2, "{line}");
        }
    }
}
