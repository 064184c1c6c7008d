//! Sessions: making or finding them, reading, changing and deleting them.

use super::view;
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Json, NoQuery, PageQuery, Query, SessionPath},
    stream,
};
use api_types::{CreateSession, CreatedSession, Ignored, Page, PatchSession, Problem, Replaced, Session};
use axum::{extract::State as Shared, response::Response};
use engine::{CreateOutcome, Created, NewSession, SessionPatch, Source};
use http::{StatusCode, Uri};
use model::SessionId;
use store::SessionFilter;

/// Make a session, or find the one with this key.
///
/// 201 for a new one, 200 for the one that was there (`ignored` names the fields that differ and were not applied).
#[utoipa::path(post, path = "/v1/sessions", tag = "sessions", request_body = CreateSession,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key and body give the same answer for 24 h")),
    responses((status = 201, body = CreatedSession), (status = 200, body = CreatedSession), (status = "default", body = Problem)))]
pub(crate) async fn create(
    Shared(app): Shared<AppState>,
    who: Principal,
    _: Query<NoQuery>,
    Json(body): Json<CreateSession>,
) -> Result<Response, ApiError> {
    who.require_all_sessions()?;
    if let Some(field) = body.not_built().first() {
        return Err(engine::Error::NotBuilt { field: (*field).to_owned() }.into());
    }
    let new = wanted(body)?;
    let (engine, caller) = (app.engine().clone(), who.clone());
    let late = engine.clone();
    let waiting = async move {
        let created = engine.create(&caller, new).await?;
        if !matches!(created.outcome, CreateOutcome::Existing { .. }) {
            app.metrics().sessions_created.inc();
        }
        Ok(answer(&created, &caller))
    };
    let instead = move |error: ApiError| async move {
        let id = error.0.session_id.ok_or(error)?;
        let view = late.session_or_tombstone(id).await?;
        Ok(answer(&Created { view, outcome: CreateOutcome::New }, &who).1)
    };
    stream::padded(StatusCode::CREATED, waiting, instead).await
}

fn answer(created: &Created, who: &Principal) -> (StatusCode, CreatedSession) {
    let session = view::session(&created.view, who);
    match &created.outcome {
        CreateOutcome::New => (StatusCode::CREATED, CreatedSession { session, ignored: None, replaced: None }),
        CreateOutcome::Existing { ignored } => {
            let ignored = ignored.iter().cloned().map(Ignored).collect();
            (StatusCode::OK, CreatedSession { session, ignored: Some(ignored), replaced: None })
        }
        CreateOutcome::Replaced { session: session_id, reason } => {
            let replaced = Replaced { session_id: *session_id, reason: reason.clone() };
            (StatusCode::CREATED, CreatedSession { session, ignored: None, replaced: Some(replaced) })
        }
    }
}

fn wanted(body: CreateSession) -> Result<NewSession, ApiError> {
    Ok(NewSession {
        key: body.key,
        replace: body.replace.unwrap_or(false),
        name: body.name,
        task: body.task,
        parent_task: body.parent_task,
        template: body.template,
        runtime: body.runtime,
        env: body.env,
        workdir: body.workdir,
        metadata: body.metadata,
        source: body.source.map(source).transpose()?,
        resources: body.resources,
        idle: body.idle,
        timeout_seconds: body.timeout_seconds,
        on_timeout: body.on_timeout,
        ttl_seconds: body.ttl_seconds,
        ephemeral: body.ephemeral.unwrap_or(false),
        snapshot_id: body.snapshot_id,
        disk_only: body.disk_only.unwrap_or(false),
        services: body.services,
        hooks: body.hooks.into_iter().map(|(name, hook)| (name, hook.argv())).collect(),
        network: body.network,
        secrets: false,
    })
}

fn source(source: api_types::Source) -> Result<Source, ApiError> {
    match (source.git, source.tar) {
        (Some(url), None) => Ok(Source::Git { url, reference: source.reference, depth: source.depth }),
        (None, Some(url)) if source.reference.is_none() && source.depth.is_none() => Ok(Source::Tar { url }),
        (None, Some(_)) => Err(ApiError::bad_field("source", "'ref' and 'depth' go with 'git', not with 'tar'")),
        _ => Err(ApiError::bad_field("source", "a source has either 'git' or 'tar'")),
    }
}

/// What `POST /v1/sessions` answers where the server ended before it could.
pub(crate) async fn created_before(app: &AppState, who: &Principal, id: SessionId) -> Result<Response, ApiError> {
    let view = app.engine().session_or_tombstone(id).await?;
    let (status, body) = answer(&Created { view, outcome: CreateOutcome::New }, who);
    Ok(extract::json(status, &body))
}

/// List sessions, newest first.
///
/// Filters: `state=` (several separated by commas), `key=`, `metadata.NAME=VALUE`, `runtime=`, `parent=` (made from this
/// session or its snapshots), `include_deleted=true`. `find=` takes an id, a key, or a unique beginning or end of an id.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions",
    params(PageQuery, ("state" = Option<String>, Query,), ("key" = Option<String>, Query,), ("find" = Option<String>, Query,),
        ("runtime" = Option<String>, Query,), ("parent" = Option<String>, Query,), ("include_deleted" = Option<bool>, Query,),
        ("metadata.NAME" = Option<String>, Query, description = "Every pair must be there")),
    responses((status = 200, body = Page<Session>), (status = "default", body = Problem)))]
pub(crate) async fn list(Shared(app): Shared<AppState>, who: Principal, uri: Uri) -> Result<Response, ApiError> {
    let pairs: Vec<(String, String)> = extract::parse_query(&uri)?;
    let asked = Asked::read(pairs)?;
    let limit = asked.page.limit()?;
    if let Some(text) = &asked.find {
        let id = app.engine().resolve(text).await?;
        who.require_session(id)?;
        let view = app.engine().session_or_tombstone(id).await?;
        return Ok(extract::ok(&Page::whole(vec![view::session(&view, &who)])));
    }
    let filter = SessionFilter { ids: who.sessions.clone(), ..asked.filter };
    let page = app.engine().list(filter, limit, asked.page.cursor()).await?;
    let items: Vec<Session> = page.items.iter().map(|view| view::session(view, &who)).collect();
    Ok(extract::ok(&Page { items, next_cursor: page.next_cursor.map(|cursor| cursor.0) }))
}

/// What a list was asked for.
#[derive(Default)]
struct Asked {
    filter: SessionFilter,
    page: PageQuery,
    find: Option<String>,
}

impl Asked {
    fn read(pairs: Vec<(String, String)>) -> Result<Asked, ApiError> {
        let mut asked = Asked::default();
        for (name, value) in pairs {
            let bad = |detail: String| ApiError::bad_field(&name, format!("{name}: {detail}"));
            match name.as_str() {
                "state" => {
                    for word in value.split(',') {
                        asked.filter.states.push(word.parse().map_err(bad)?);
                    }
                }
                "key" => asked.filter.key = Some(value),
                "find" => asked.find = Some(value),
                "runtime" => asked.filter.runtime = Some(value.parse().map_err(bad)?),
                "parent" => asked.filter.parent = Some(value.parse().map_err(|e: model::IdError| bad(e.to_string()))?),
                "include_deleted" => asked.filter.include_deleted = boolean(&value).ok_or_else(|| bad(NOT_BOOLEAN.into()))?,
                "limit" => asked.page.limit = Some(value.parse().map_err(|_| bad(format!("'{value}' is not a number")))?),
                "cursor" => asked.page.cursor = Some(value),
                "machine" => return Err(ApiError::not_built("machine")),
                _ => match name.strip_prefix("metadata.").filter(|key| !key.is_empty()) {
                    Some(key) => {
                        asked.filter.metadata.insert(key.to_owned(), value);
                    }
                    None => {
                        let detail = format!("the query has a parameter that isn't known here: '{name}'");
                        return Err(ApiError::unknown_field(&name, detail));
                    }
                },
            }
        }
        Ok(asked)
    }
}

const NOT_BOOLEAN: &str = "expected true or false";

fn boolean(text: &str) -> Option<bool> {
    match text {
        "true" | "1" | "" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

/// Show a session. Never wakes it.
#[utoipa::path(get, path = "/v1/sessions/{id}", tag = "sessions", params(("id" = String, Path,)),
    responses((status = 200, body = Session), (status = 410, body = Problem), (status = "default", body = Problem)))]
pub(crate) async fn show(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    app.engine().session(id).await?;
    let activity = app.engine().activity(id).await.map(view::activity);
    let view = app.engine().session(id).await?;
    Ok(extract::ok(&Session { activity, ..view::session(&view, &who) }))
}

/// Change a session. What is missing stays; `null` clears.
#[utoipa::path(patch, path = "/v1/sessions/{id}", tag = "sessions", params(("id" = String, Path,)), request_body = PatchSession,
    responses((status = 200, body = Session), (status = "default", body = Problem)))]
pub(crate) async fn patch(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
    Json(body): Json<PatchSession>,
) -> Result<Response, ApiError> {
    let patch = SessionPatch {
        name: body.name,
        task: body.task,
        metadata: body.metadata,
        idle: body.idle,
        timeout_seconds: body.timeout_seconds,
        on_timeout: body.on_timeout,
        ttl_seconds: body.ttl_seconds,
        wake_at: body.wake_at,
        services: body.services,
        network: body.network.map(Option::unwrap_or_default),
    };
    let view = app.engine().patch(&who, id, patch).await?;
    Ok(extract::ok(&view::session(&view, &who)))
}

/// Delete a session for good, whatever goes on in it. Deleting it again is no error.
#[utoipa::path(delete, path = "/v1/sessions/{id}", tag = "sessions", params(("id" = String, Path,)),
    responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn delete(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
) -> Result<StatusCode, ApiError> {
    app.engine().delete(&who, id).await?;
    Ok(super::done())
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::State;

    fn read(pairs: &[(&str, &str)]) -> Result<Asked, ApiError> {
        Asked::read(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn filters_of_a_list() {
        let asked = read(&[("state", "running,paused"), ("metadata.team", "a"), ("include_deleted", "true")]).unwrap();
        assert_eq!(asked.filter.states, [State::Running, State::Paused]);
        assert_eq!(asked.filter.metadata["team"], "a");
        assert!(asked.filter.include_deleted);
        let parent = SessionId::new();
        assert_eq!(read(&[("parent", &parent.to_string())]).unwrap().filter.parent, Some(parent));
        for bad in [
            ("state", "asleep"),
            ("parent", "x"),
            ("metadata.", "x"),
            ("limit", "many"),
            ("stat", "x"),
            ("include_deleted", "maybe"),
        ] {
            assert_eq!(read(&[bad]).err().unwrap().0.status, 400, "{bad:?}");
        }
        assert_eq!(read(&[("machine", "m")]).err().unwrap().0.code, api_types::ProblemCode::NotBuilt);
    }

    #[test]
    fn a_source_is_one_thing() {
        let from = |json: &str| source(serde_json::from_str(json).unwrap());
        assert!(from(r#"{"git":"https://x/y","ref":"main","depth":1}"#).is_ok());
        assert!(from(r#"{"tar":"https://x/y.tar"}"#).is_ok());
        for bad in ["{}", r#"{"git":"a","tar":"b"}"#, r#"{"tar":"a","ref":"main"}"#] {
            assert!(from(bad).is_err(), "{bad}");
        }
    }
}
