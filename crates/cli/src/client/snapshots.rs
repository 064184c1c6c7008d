//! `snapshot`, `snapshots`, `snapshot-rm`, `fork`, `rollback`: keeping sessions, and going on from what was kept.

use super::{
    Context,
    failure::{Failure, Result},
    http::{Call, Client, encode},
    select,
    text::{Table, clip, local, size, span},
};
use api_types::{ForkAnswer, ForkRequest, NewSnapshot, RollbackRequest, Session, Snapshot};
use model::{SessionId, SnapshotId, SnapshotName, SnapshotState, State};
use serde_json::{Value, json};
use std::{process::ExitCode, time::Duration};

/// What a snapshot is taken with.
#[derive(Debug)]
pub struct Wish {
    pub name: Option<SnapshotName>,
    pub keep: Option<Duration>,
    pub memory: bool,
    pub labels: Vec<(String, String)>,
}

/// `dormouse snapshot`: prints the id of what was kept.
///
/// # Errors
/// What the server refuses; a snapshot that did not come about.
pub async fn take(ctx: &Context, word: &str, wish: Wish) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let request = NewSnapshot {
        name: wish.name,
        keep_seconds: wish.keep.map(|keep| keep.as_secs()),
        memory: (!wish.memory).then_some(false),
        labels: wish.labels.into_iter().collect(),
    };
    let value: Value = ctx.client.json(Call::post(format!("/v1/sessions/{}/snapshots", session.id), &request)).await?;
    let snapshot: Snapshot = Context::read(&value)?;
    if snapshot.state == SnapshotState::Failed {
        let reason = snapshot.reason.unwrap_or_else(|| "the server doesn't say why".to_owned());
        return Err(Failure::failed(format!("no snapshot was taken of session {}: {reason}", session.id)));
    }
    if request.memory != Some(false) && !snapshot.memory {
        ctx.note(&format!("the session is {} and has no memory: only its disk was kept", session.state));
    }
    if ctx.json { ctx.print_json(&value) } else { ctx.print(&format!("{}\n", snapshot.id)) }
}

/// `dormouse snapshots`.
///
/// # Errors
/// What the server refuses.
pub async fn list(ctx: &Context, word: Option<&str>, all: bool) -> Result<()> {
    let mut path = "/v1/snapshots?limit=1000".to_owned();
    if let Some(word) = word {
        // Snapshots outlive their session, whose id is known here even where the server has forgotten it.
        let session = match word.parse::<SessionId>() {
            Ok(id) => id,
            Err(_) => select::session(&ctx.client, word).await?.id,
        };
        path.push_str(&format!("&session={session}"));
    }
    if all {
        path.push_str("&include_deleted=true");
    }
    let values: Vec<Value> = ctx.client.list(&path).await?;
    if ctx.json {
        return ctx.print_json(&json!({ "items": values }));
    }
    let snapshots: Vec<Snapshot> = values.iter().map(Context::read).collect::<Result<_>>()?;
    if ctx.quiet {
        return ctx.print(&snapshots.iter().map(|snapshot| format!("{}\n", snapshot.id)).collect::<String>());
    }
    ctx.print(&table(&snapshots))
}

fn table(snapshots: &[Snapshot]) -> String {
    let mut table = Table::new(&["ID", "NAME", "SESSION", "TAKEN", "STATE", "SIZE", "ITS OWN", "MEMORY", "KEPT UNTIL", "FOR"]);
    for snapshot in snapshots {
        table.row([
            snapshot.id.to_string(),
            snapshot.name.as_deref().map_or_else(|| "-".to_owned(), |name| clip(name, 30)),
            snapshot.session_id.to_string(),
            local(snapshot.created_at),
            snapshot.state.to_string(),
            size(snapshot.size_bytes),
            size(snapshot.unique_bytes),
            if snapshot.memory { size(snapshot.memory_bytes) } else { "-".to_owned() },
            snapshot.keep_until.map_or_else(|| "-".to_owned(), local),
            snapshot.taken_by.clone(),
        ]);
    }
    table.render()
}

/// `dormouse snapshot-rm`: prints the ids of those that were deleted, and reports each failure.
///
/// # Errors
/// The server can't be reached. What fails for single ones gives the status of the first.
pub async fn remove(ctx: &Context, words: &[String]) -> Result<ExitCode> {
    let many = words.len() > 1;
    let mut first: Option<ExitCode> = None;
    for word in words {
        match remove_one(ctx, word).await {
            Ok(id) if ctx.json => ctx.print_json(&json!({ "id": id, "state": SnapshotState::Deleted }))?,
            Ok(id) => ctx.print(&format!("{id}\n"))?,
            Err(failure) if failure.status == super::failure::UNREACHABLE => return Err(failure),
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

async fn remove_one(ctx: &Context, word: &str) -> Result<SnapshotId> {
    let snapshot = find(&ctx.client, word).await?;
    ctx.client.send(Call::delete(format!("/v1/snapshots/{}", snapshot.id))).await?;
    Ok(snapshot.id)
}

/// The snapshot that `word` names: an id, a name, or a unique beginning or end of an id.
///
/// # Errors
/// Not found; a conflict that lists the candidates where several fit.
pub async fn find(client: &Client, word: &str) -> Result<Snapshot> {
    if let Ok(id) = word.parse::<SnapshotId>() {
        return client.json(Call::get(format!("/v1/snapshots/{id}"))).await;
    }
    let found: Result<Vec<Snapshot>> = client.list(&format!("/v1/snapshots?find={}", encode(word))).await;
    match found {
        Ok(mut found) if found.len() == 1 => Ok(found.remove(0)),
        Ok(_) => Err(Failure::not_found(format!("there is no snapshot '{word}'"))),
        Err(mut failure) => {
            if failure.status == super::failure::NOT_FOUND {
                failure.message.push_str(" — 'dormouse snapshots' shows those that are there");
            }
            Err(failure)
        }
    }
}

/// What is forked.
#[derive(Debug)]
enum Origin {
    Session(SessionId),
    Snapshot(SnapshotId),
}

/// The session or the snapshot that `word` names.
async fn origin(client: &Client, word: &str) -> Result<Origin> {
    let snapshot = find(client, word).await;
    if word.parse::<SnapshotId>().is_ok() && snapshot.is_ok() {
        return choose(word, Err(Failure::not_found(String::new())), snapshot);
    }
    choose(word, select::session(client, word).await, snapshot)
}

/// One of both. Where both are found, a key or a name goes before a piece of an id.
fn choose(word: &str, session: Result<Session>, snapshot: Result<Snapshot>) -> Result<Origin> {
    let unknown = |failure: &Failure| failure.problem.as_ref().map_or(3, |problem| problem.status) != 410 && failure.status == 3;
    match (session, snapshot) {
        (Ok(session), Ok(snapshot)) => {
            let by_key = session.key.as_deref() == Some(word);
            let by_name = snapshot.name.as_deref() == Some(word);
            match (by_key, by_name) {
                (true, false) => Ok(Origin::Session(session.id)),
                (false, true) => Ok(Origin::Snapshot(snapshot.id)),
                _ => Err(Failure::conflict(format!(
                    "'{word}' is session {} and snapshot {} — give the id of one",
                    session.id, snapshot.id
                ))),
            }
        }
        (Ok(session), Err(failure)) if unknown(&failure) => Ok(Origin::Session(session.id)),
        (Err(failure), Ok(snapshot)) if unknown(&failure) => Ok(Origin::Snapshot(snapshot.id)),
        (Err(session), Err(snapshot)) if unknown(&session) && unknown(&snapshot) => Err(Failure::not_found(format!(
            "no session or snapshot '{word}' — 'dormouse ls' and 'dormouse snapshots' show those that are there"
        ))),
        // Several fit, or it was deleted: that is what is said.
        (Err(failure), _) if !unknown(&failure) => Err(failure),
        (_, Err(failure)) => Err(failure),
        (Err(failure), Ok(_)) => Err(failure),
    }
}

/// `dormouse fork`: prints the new sessions' ids, and reports why there are fewer than were asked for.
///
/// # Errors
/// What the server refuses. What fails for single ones gives the status of the first.
pub async fn fork(ctx: &Context, word: &str, request: ForkRequest) -> Result<ExitCode> {
    let path = match origin(&ctx.client, word).await? {
        Origin::Session(id) => format!("/v1/sessions/{id}/fork"),
        Origin::Snapshot(id) => format!("/v1/snapshots/{id}/fork"),
    };
    let value: Value = ctx.client.json(Call::post(path, &request)).await?;
    let answer: ForkAnswer = Context::read(&value)?;
    if ctx.json {
        ctx.print_json(&value)?;
    } else {
        ctx.print(&answer.items.iter().map(|session| format!("{}\n", session.id)).collect::<String>())?;
    }
    let mut first: Option<ExitCode> = None;
    for problem in answer.errors {
        let status = Failure::of_problem(problem).report(ctx.json);
        first.get_or_insert(status);
    }
    Ok(first.unwrap_or(ExitCode::SUCCESS))
}

/// `dormouse rollback`: prints the session's id.
///
/// # Errors
/// What the server refuses; a session that doesn't run afterwards.
pub async fn rollback(ctx: &Context, word: &str, snapshot: &str, disk_only: bool) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let snapshot = find(&ctx.client, snapshot).await?;
    let request = RollbackRequest { snapshot_id: snapshot.id, disk_only: disk_only.then_some(true) };
    let value: Value = ctx.client.json(Call::post(format!("/v1/sessions/{}/rollback", session.id), &request)).await?;
    let after: Session = Context::read(&value)?;
    let id = session.id;
    if after.state != State::Running {
        let reason = after.reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
        let detail = format!("session {id} is {}{reason}, not running — 'dormouse events {id}' tells why", after.state);
        return Err(Failure::failed(detail));
    }
    let age = span(after.server_time.since(snapshot.created_at));
    ctx.note(&format!("set back by {age}; 'dormouse history {id}' shows the snapshot that was taken before"));
    if ctx.json { ctx.print_json(&value) } else { ctx.print(&format!("{id}\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api_types::{Problem, ProblemCode};

    pub(crate) fn session(key: Option<&str>) -> Session {
        let id = SessionId::new();
        let value = json!({
            "id": id, "key": key, "name": null, "task": null, "state": "running", "reason": null, "runtime": "gvisor",
            "template": "debian", "generation": 1, "created_at": "2026-03-01T08:00:00Z", "updated_at": "2026-03-01T08:00:00Z",
            "last_activity_at": "2026-03-01T08:00:00Z", "idle": null, "hibernate_after": null, "timeout_seconds": null,
            "timeout_at": null, "on_timeout": "hibernate", "ttl_seconds": null, "expires_at": null, "wake_at": null,
            "memory": "live", "parent": null, "parent_task": null, "machine": null, "operation": null,
            "server_time": "2026-03-01T08:00:00Z",
        });
        serde_json::from_value(value).unwrap()
    }

    fn snapshot(name: Option<&str>) -> Snapshot {
        let value = json!({
            "id": SnapshotId::new(), "session_id": SessionId::new(), "name": name, "state": "ready", "generation": 1,
            "memory": true, "size_bytes": 1536, "unique_bytes": 512, "memory_bytes": 1024, "parent_id": null,
            "created_at": "2026-03-01T08:00:00Z", "keep_until": null,
            "requires": { "runtime": "gvisor", "template": "debian" },
        });
        serde_json::from_value(value).unwrap()
    }

    fn unknown<T>() -> Result<T> {
        Err(Failure::of_problem(Problem::new(ProblemCode::NotFound, "there is no such thing")))
    }

    #[test]
    fn a_key_or_a_name_goes_before_a_piece_of_an_id() {
        let is_session = |origin: Result<Origin>| matches!(origin, Ok(Origin::Session(_)));
        let is_snapshot = |origin: Result<Origin>| matches!(origin, Ok(Origin::Snapshot(_)));
        assert!(is_session(choose("w", Ok(session(None)), unknown())));
        assert!(is_snapshot(choose("w", unknown(), Ok(snapshot(None)))));
        assert!(is_session(choose("w", Ok(session(Some("w"))), Ok(snapshot(None)))));
        assert!(is_snapshot(choose("w", Ok(session(Some("x"))), Ok(snapshot(Some("w"))))));
        for (key, name) in [(None, None), (Some("w"), Some("w"))] {
            assert_eq!(choose("w", Ok(session(key)), Ok(snapshot(name))).unwrap_err().status, 5);
        }
    }

    #[test]
    fn what_is_neither_is_not_found_and_what_is_deleted_says_so() {
        let failure = choose("w", unknown(), unknown()).unwrap_err();
        assert_eq!((failure.status, failure.message.contains("no session or snapshot 'w'")), (3, true));
        let gone = || Failure::of_problem(Problem::new(ProblemCode::Deleted, "it was deleted yesterday"));
        assert!(choose("w", unknown(), Err(gone())).unwrap_err().message.contains("yesterday"));
        assert!(choose("w", Err(gone()), unknown()).unwrap_err().message.contains("yesterday"));
        let several = Failure::conflict("'w' could be several");
        assert_eq!(choose("w", unknown(), Err(several)).unwrap_err().status, 5);
        assert_eq!(choose("w", Ok(session(None)), Err(Failure::conflict("several"))).unwrap_err().status, 5);
    }

    #[test]
    fn a_table_has_a_row_for_each() {
        let text = table(&[snapshot(Some("base")), Snapshot { memory: false, ..snapshot(None) }]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[1].contains("base") && lines[1].contains("1.5 KiB") && lines[1].contains("1.0 KiB"), "{text}");
        assert!(!lines[2].contains("1.0 KiB"), "{text}");
    }
}
