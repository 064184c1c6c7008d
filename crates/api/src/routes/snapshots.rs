//! Snapshots: taking, listing, showing and deleting them; sessions made from them, and sessions set back to them.

use super::view;
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Json, NoQuery, Query, SessionPath, SnapshotPath},
    stream,
};
use api_types::{ForkAnswer, ForkRequest, NewSnapshot, Page, Problem, ProblemCode, RollbackRequest, Session, Snapshot};
use axum::{extract::State as Shared, response::Response};
use engine::{ForkOf, Forked, NewForks};
use http::StatusCode;
use model::{SessionId, SnapshotId};
use store::{Cursor, SnapshotFilter, SnapshotRow};

/// Keep a session as it is now.
///
/// A running session stands still only while it is captured. `memory: false` keeps its disk alone. Of a session without
/// memory it is a snapshot of the disk in any case.
#[utoipa::path(post, path = "/v1/sessions/{id}/snapshots", tag = "snapshots", params(("id" = String, Path,)),
    request_body = NewSnapshot, responses((status = 201, body = Snapshot), (status = "default", body = Problem)))]
pub(crate) async fn create(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(session): SessionPath,
    _: Query<NoQuery>,
    Json(body): Json<NewSnapshot>,
) -> Result<Response, ApiError> {
    let id = SnapshotId::new();
    let new = engine::NewSnapshot {
        id,
        name: body.name,
        keep_seconds: body.keep_seconds,
        memory: body.memory.unwrap_or(true),
        labels: body.labels,
    };
    let engine = app.engine().clone();
    let waiting = async move {
        let row = engine.snapshot(&who, session, new).await?;
        Ok((StatusCode::CREATED, view::snapshot(row)))
    };
    let instead = move |error: ApiError| async move {
        // One that failed may say so itself.
        app.engine().snapshot_or_tombstone(id).await.map(view::snapshot).map_err(|_| error)
    };
    stream::padded(StatusCode::CREATED, waiting, instead).await
}

/// What taking a snapshot answers where the server ended before it could.
pub(crate) async fn taken_before(app: &AppState, id: SnapshotId) -> Result<Response, ApiError> {
    Ok(extract::json(StatusCode::CREATED, &view::snapshot(app.engine().snapshot_or_tombstone(id).await?)))
}

/// Which snapshots to list.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Only those of this session, which may be gone.
    #[param(value_type = Option<String>)]
    pub session: Option<SessionId>,
    /// The one that this names: an id, a name, or a unique beginning or end of an id.
    pub find: Option<String>,
    /// Those that were deleted, too.
    pub include_deleted: Option<bool>,
    /// 1 to 1,000; 100 where missing.
    pub limit: Option<usize>,
    /// The `next_cursor` of the page before.
    pub cursor: Option<String>,
}

/// List snapshots, newest first.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots", params(ListQuery),
    responses((status = 200, body = Page<Snapshot>), (status = "default", body = Problem)))]
pub(crate) async fn list(
    Shared(app): Shared<AppState>,
    who: Principal,
    Query(query): Query<ListQuery>,
) -> Result<Response, ApiError> {
    let limit = extract::page_limit(query.limit)?;
    if let Some(text) = &query.find {
        let id = app.engine().resolve_snapshot(text).await?;
        let row = reached(&who, app.engine().snapshot_or_tombstone(id).await?)?;
        return Ok(extract::ok(&Page::whole(vec![view::snapshot(row)])));
    }
    if let Some(session) = query.session {
        who.require_session(session)?;
    }
    let include_deleted = query.include_deleted.unwrap_or(false);
    let filter = SnapshotFilter { session: query.session, include_deleted, ..SnapshotFilter::default() };
    let page = app.engine().snapshots(&who, filter, limit, query.cursor.map(Cursor)).await?;
    let items: Vec<Snapshot> = page.items.into_iter().map(view::snapshot).collect();
    Ok(extract::ok(&Page { items, next_cursor: page.next_cursor.map(|cursor| cursor.0) }))
}

/// Show a snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{snapshot}", tag = "snapshots", params(("snapshot" = String, Path,)),
    responses((status = 200, body = Snapshot), (status = 410, body = Problem), (status = "default", body = Problem)))]
pub(crate) async fn show(
    Shared(app): Shared<AppState>,
    who: Principal,
    SnapshotPath(id): SnapshotPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    Ok(extract::ok(&view::snapshot(present(&app, &who, id).await?)))
}

/// Delete a snapshot. Other snapshots, and sessions that were made from it, are left as they are.
#[utoipa::path(delete, path = "/v1/snapshots/{snapshot}", tag = "snapshots", params(("snapshot" = String, Path,)),
    responses((status = 204), (status = 410, body = Problem), (status = "default", body = Problem)))]
pub(crate) async fn delete(
    Shared(app): Shared<AppState>,
    who: Principal,
    SnapshotPath(id): SnapshotPath,
    _: Query<NoQuery>,
) -> Result<StatusCode, ApiError> {
    present(&app, &who, id).await?;
    let engine = app.engine().clone();
    stream::begun(async move { Ok(engine.delete_snapshot(&who, id).await?) }).await?;
    Ok(super::done())
}

/// Make sessions from a session as it is now: a snapshot of it is taken first.
///
/// They run when this is answered. What fails for some of them is in `errors`.
#[utoipa::path(post, path = "/v1/sessions/{id}/fork", tag = "snapshots", params(("id" = String, Path,)),
    request_body = ForkRequest, responses((status = 201, body = ForkAnswer), (status = "default", body = Problem)))]
pub(crate) async fn fork_session(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(session): SessionPath,
    _: Query<NoQuery>,
    Json(body): Json<ForkRequest>,
) -> Result<Response, ApiError> {
    fork(app, who, ForkOf::Session(session), body).await
}

/// Make sessions from a snapshot.
///
/// They run when this is answered: their memory restored, or booted afresh where the snapshot has none. What fails for
/// some of them is in `errors`.
#[utoipa::path(post, path = "/v1/snapshots/{snapshot}/fork", tag = "snapshots", params(("snapshot" = String, Path,)),
    request_body = ForkRequest, responses((status = 201, body = ForkAnswer), (status = "default", body = Problem)))]
pub(crate) async fn fork_snapshot(
    Shared(app): Shared<AppState>,
    who: Principal,
    SnapshotPath(snapshot): SnapshotPath,
    _: Query<NoQuery>,
    Json(body): Json<ForkRequest>,
) -> Result<Response, ApiError> {
    present(&app, &who, snapshot).await?;
    fork(app, who, ForkOf::Snapshot(snapshot), body).await
}

async fn fork(app: AppState, who: Principal, from: ForkOf, body: ForkRequest) -> Result<Response, ApiError> {
    who.require_all_sessions()?;
    let new = NewForks {
        count: body.count.unwrap_or_default().get(),
        metadata: body.metadata,
        name: body.name,
        secrets: body.secrets.unwrap_or(false),
        disk_only: body.disk_only.unwrap_or(false),
    };
    let waiting = async move {
        let forked = app.engine().fork(&who, from, new).await?;
        app.metrics().sessions_created.inc_by(forked.items.len() as u64);
        Ok((StatusCode::CREATED, answer(forked, &who)))
    };
    // What fails late as a whole is told where the single failures are.
    let instead = |error: ApiError| async move { Ok(ForkAnswer { items: Vec::new(), errors: vec![*error.0] }) };
    stream::padded(StatusCode::CREATED, waiting, instead).await
}

fn answer(forked: Forked, who: &Principal) -> ForkAnswer {
    ForkAnswer {
        items: forked.items.iter().map(|view| view::session(view, who)).collect(),
        errors: forked.errors.into_iter().map(|error| *ApiError::from(error).0).collect(),
    }
}

/// What a fork answers where the server ended before it could: the sessions that it had made, as they are now.
pub(crate) async fn forked_before(app: &AppState, who: &Principal, made: &str) -> Result<Response, ApiError> {
    let mut answer = ForkAnswer { items: Vec::new(), errors: Vec::new() };
    for id in made.split(' ') {
        let view = match id.parse::<SessionId>() {
            Ok(id) => app.engine().session_or_tombstone(id).await.map_err(ApiError::from),
            Err(_) => Err(ApiError::new(ProblemCode::Lost, "the server ended while it forked; see which sessions are there")),
        };
        match view {
            Ok(view) => answer.items.push(view::session(&view, who)),
            Err(error) => answer.errors.push(*error.0),
        }
    }
    Ok(extract::json(StatusCode::CREATED, &answer))
}

/// Set a session back to a snapshot.
///
/// It keeps its id, its key and its history. A snapshot of now is taken first, so that this can be taken back, too. The
/// session runs when this is answered: its memory restored, or booted afresh where the snapshot has none.
#[utoipa::path(post, path = "/v1/sessions/{id}/rollback", tag = "snapshots", params(("id" = String, Path,)),
    request_body = RollbackRequest, responses((status = 200, body = Session), (status = "default", body = Problem)))]
pub(crate) async fn rollback(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(session): SessionPath,
    _: Query<NoQuery>,
    Json(body): Json<RollbackRequest>,
) -> Result<Response, ApiError> {
    // An id that names nothing is an error of the session first, then of the snapshot.
    app.engine().session(session).await?;
    present(&app, &who, body.snapshot_id).await?;
    let (engine, caller) = (app.engine().clone(), who.clone());
    let waiting = async move {
        let done = engine.rollback(&caller, session, body.snapshot_id, body.disk_only.unwrap_or(false)).await?;
        Ok((StatusCode::OK, view::session(&done.view, &caller)))
    };
    stream::padded(StatusCode::OK, waiting, move |_| async move {
        let view = app.engine().session_or_tombstone(session).await?;
        Ok(view::session(&view, &who))
    })
    .await
}

/// A snapshot that is there and that the caller reaches.
async fn present(app: &AppState, who: &Principal, id: SnapshotId) -> Result<SnapshotRow, ApiError> {
    reached(who, app.engine().snapshot_or_tombstone(id).await?)?;
    Ok(app.engine().snapshot_row(id).await?)
}

/// A token for certain sessions reaches the snapshots of these.
fn reached(who: &Principal, row: SnapshotRow) -> Result<SnapshotRow, ApiError> {
    if who.reaches(row.session_id) {
        return Ok(row);
    }
    Err(ApiError::forbidden(format!("the token doesn't reach snapshot {}", row.id)))
}
