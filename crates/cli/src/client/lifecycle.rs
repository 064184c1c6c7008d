//! `hibernate`, `wake`, `pause`, `unpause`, `stop`, `start`, `rm`, `extend`: for one session or many.

use super::{
    Context,
    failure::{Failure, Result},
    http::{Call, encode},
    select,
};
use crate::args::Which;
use api_types::{Extend, Session};
use futures_util::{StreamExt, stream};
use model::State;
use serde::Serialize;
use serde_json::{Value, json};
use std::{process::ExitCode, time::Duration};

/// How many sessions are changed at a time.
const AT_ONCE: usize = 8;

/// A body without fields.
#[derive(Serialize)]
pub struct Nothing {}

/// What is done to sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Hibernate,
    Wake,
    Pause,
    Unpause,
    Stop,
    Start,
    /// A start that gives up a saved memory.
    StartDiskOnly,
    Rm,
}

impl Verb {
    fn call(self, session: &Session, body: &impl Serialize) -> Call {
        let path = format!("/v1/sessions/{}", session.id);
        let word = match self {
            Verb::Rm => return Call::delete(path),
            Verb::Hibernate => "hibernate",
            Verb::Wake => "wake",
            Verb::Pause => "pause",
            Verb::Unpause => "unpause",
            Verb::Stop => "stop",
            Verb::Start => "start",
            Verb::StartDiskOnly => "start?disk_only=true",
        };
        Call::post(format!("{path}/{word}"), body)
    }

    /// How a session stands once it is done.
    fn target(self) -> State {
        match self {
            Verb::Hibernate => State::Hibernated,
            Verb::Wake | Verb::Unpause | Verb::Start | Verb::StartDiskOnly => State::Running,
            Verb::Pause => State::Paused,
            Verb::Stop => State::Stopped,
            Verb::Rm => State::Deleted,
        }
    }

    /// Whether `--all` and `--meta` mean a session in this state. `stop` leaves hibernated sessions alone: it would give up
    /// their memory, which nobody asked for by name.
    fn is_for(self, state: State) -> bool {
        use State as S;
        match self {
            Verb::Hibernate | Verb::Stop => matches!(state, S::Running | S::Paused),
            Verb::Wake => state == S::Hibernated,
            Verb::Pause => state == S::Running,
            Verb::Unpause => state == S::Paused,
            // Of those whose memory is saved it means only those that are named.
            Verb::Start | Verb::StartDiskOnly => state == S::Stopped,
            Verb::Rm => state != S::Deleted,
        }
    }
}

/// Does `verb` to each session, prints the ids of those that it was done to, and reports each failure.
///
/// # Errors
/// Sessions can't be listed. What fails for single ones is told and gives the status of the first.
pub async fn each(ctx: &Context, verb: Verb, which: &Which, body: &impl Serialize) -> Result<ExitCode> {
    let found = find(ctx, verb, which).await?;
    let many = found.len() > 1;
    let mut first: Option<ExitCode> = None;
    let mut done =
        stream::iter(found).map(|(word, session)| async { (word, one(ctx, verb, session, body).await) }).buffered(AT_ONCE);
    while let Some((word, result)) = done.next().await {
        match result {
            Ok(value) if ctx.json => ctx.print_json(&value)?,
            Ok(value) => ctx.print(&format!("{}\n", value.get("id").and_then(Value::as_str).unwrap_or_default()))?,
            Err(mut failure) => {
                if many {
                    failure.message = format!("{word}: {}", failure.message);
                }
                let status = failure.report(ctx.json);
                first.get_or_insert(status);
            }
        }
    }
    Ok(first.unwrap_or(ExitCode::SUCCESS))
}

/// Does it to one session and answers the session as it is then.
async fn one(ctx: &Context, verb: Verb, session: Result<Session>, body: &impl Serialize) -> Result<Value> {
    let session = session?;
    let call = verb.call(&session, body);
    if verb == Verb::Rm {
        ctx.client.send(call).await?;
        return Ok(json!({ "id": session.id, "state": State::Deleted }));
    }
    let value: Value = ctx.client.json(call).await?;
    let after: Session = Context::read(&value)?;
    if after.state == verb.target() {
        return Ok(value);
    }
    // It failed after the answer had begun: then the session itself says how it stands.
    let reason = after.reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    let id = session.id;
    Err(Failure::failed(format!(
        "session {id} is {}{reason}, not {} — 'dormouse events {id}' tells why",
        after.state,
        verb.target()
    )))
}

/// The sessions that are meant, each with the word that named it.
async fn find(ctx: &Context, verb: Verb, which: &Which) -> Result<Vec<(String, Result<Session>)>> {
    if which.sessions.is_empty() {
        let mut path = "/v1/sessions?limit=1000".to_owned();
        for (name, value) in &which.meta {
            path.push_str(&format!("&metadata.{}={}", encode(name), encode(value)));
        }
        let all: Vec<Session> = ctx.client.list(&path).await?;
        let meant = all.into_iter().filter(|session| verb.is_for(session.state));
        return Ok(meant.map(|session| (session.id.to_string(), Ok(session))).collect());
    }
    let mut found = Vec::new();
    for word in &which.sessions {
        match select::session(&ctx.client, word).await {
            Err(failure) if failure.status == super::failure::UNREACHABLE => return Err(failure),
            session => found.push((word.clone(), session)),
        }
    }
    Ok(found)
}

/// `dormouse extend`.
///
/// # Errors
/// What the server refuses.
pub async fn extend(ctx: &Context, word: &str, by: Duration) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let body = Extend { seconds: by.as_secs() };
    let value: Value = ctx.client.json(Call::post(format!("/v1/sessions/{}/extend", session.id), &body)).await?;
    if ctx.json {
        return ctx.print_json(&value);
    }
    let session: Session = Context::read(&value)?;
    match session.timeout_at {
        Some(at) => ctx.print(&format!("{} runs until {}\n", session.id, super::text::local(at))),
        None => ctx.print(&format!("{} has no time limit\n", session.id)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_never_gives_up_a_sleeping_sessions_memory() {
        assert!(!Verb::Stop.is_for(State::Hibernated));
        assert!(Verb::Stop.is_for(State::Paused));
        assert!(!Verb::Hibernate.is_for(State::Stopped));
        assert!(State::ALL.iter().filter(|state| Verb::Rm.is_for(**state)).count() == State::ALL.len() - 1);
    }
}
