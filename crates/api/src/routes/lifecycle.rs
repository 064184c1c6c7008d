//! Hibernate and wake, stop and start, pause and unpause, and the operations that do it.

use super::{Nothing, view};
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Json, NoQuery, OperationPath, Query, SessionPath},
    stream,
};
use api_types::{Extend, Hibernate, Operation, Problem, Session};
use axum::{extract::State as Shared, response::Response};
use engine::Transition;
use http::StatusCode;
use model::{OperationId, SessionId};

/// What to wait for.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WaitQuery {
    /// `false`: answer 202 with the operation at once. True where missing.
    pub wait: Option<bool>,
    /// `true`: answer once the hooks that a wake or start has begun have ended, too.
    pub wait_for_hooks: Option<bool>,
}

async fn transition(app: AppState, who: Principal, id: SessionId, to: Transition, wait: WaitQuery) -> Result<Response, ApiError> {
    if wait.wait == Some(false) {
        let done = app.engine().transition(&who, id, to, false).await?;
        return Ok(match &done.operation {
            Some(operation) => extract::json(StatusCode::ACCEPTED, &view::operation(operation)),
            None => extract::ok(&view::session(&done.view, &who)),
        });
    }
    let (engine, caller) = (app.engine().clone(), who.clone());
    let waiting = async move {
        let done = engine.transition(&caller, id, to, true).await?;
        if wait.wait_for_hooks == Some(true) {
            engine.hooks_ended(id).await?;
        }
        Ok((StatusCode::OK, view::session(&done.view, &caller)))
    };
    stream::padded(StatusCode::OK, waiting, move |_| async move {
        let view = app.engine().session_or_tombstone(id).await?;
        Ok(view::session(&view, &who))
    })
    .await
}

/// What such a call answers where the server ended before it could.
pub(crate) async fn done_before(
    app: &AppState,
    who: &Principal,
    id: SessionId,
    operation: Option<OperationId>,
    query: &str,
) -> Result<Response, ApiError> {
    match operation {
        Some(operation) if query.split('&').any(|pair| pair == "wait=false") => {
            let row = app.engine().operation(operation).await?;
            Ok(extract::json(StatusCode::ACCEPTED, &view::operation(&row)))
        }
        _ => Ok(extract::ok(&view::session(&app.engine().session_or_tombstone(id).await?, who))),
    }
}

/// Memory and disk to storage, the sandbox gone. `until` wakes it by itself.
#[utoipa::path(post, path = "/v1/sessions/{id}/hibernate", tag = "lifecycle", params(("id" = String, Path,), WaitQuery),
    request_body = Hibernate, responses((status = 200, body = Session), (status = 202, body = Operation), (status = "default", body = Problem)))]
pub(crate) async fn hibernate(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(wait): Query<WaitQuery>,
    Json(body): Json<Hibernate>,
) -> Result<Response, ApiError> {
    transition(app, who, id, Transition::Hibernate { until: body.until }, wait).await
}

macro_rules! transitions {
    ($($(#[$doc:meta])* $name:ident = $to:expr, $path:literal);+ $(;)?) => {$(
        $(#[$doc])*
        #[utoipa::path(post, path = $path, tag = "lifecycle", params(("id" = String, Path,), WaitQuery), request_body = Nothing,
            responses((status = 200, body = Session), (status = 202, body = Operation), (status = "default", body = Problem)))]
        pub(crate) async fn $name(
            Shared(app): Shared<AppState>,
            who: Principal,
            SessionPath(id): SessionPath,
            Query(wait): Query<WaitQuery>,
            _: Json<Nothing>,
        ) -> Result<Response, ApiError> {
            transition(app, who, id, $to, wait).await
        }
    )+};
}

transitions! {
    /// Back again, memory as it was. Of a stopped session: 422 `no_memory_snapshot`.
    wake = Transition::Wake, "/v1/sessions/{id}/wake";
    /// Freeze in place: no CPU, memory kept live.
    pause = Transition::Pause, "/v1/sessions/{id}/pause";
    /// Go on after a pause.
    unpause = Transition::Unpause, "/v1/sessions/{id}/unpause";
    /// The sandbox gone without its memory. Of a hibernated session: gives up the saved memory.
    stop = Transition::Stop, "/v1/sessions/{id}/stop";
}

/// How to start.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StartQuery {
    /// `false`: answer 202 with the operation at once. True where missing.
    pub wait: Option<bool>,
    /// `true`: answer once the hooks that it has begun have ended, too.
    pub wait_for_hooks: Option<bool>,
    /// `true`: of a hibernated session, give up its memory first: for one whose memory is damaged or can't be loaded here.
    pub disk_only: Option<bool>,
}

/// A fresh boot on the same disk.
#[utoipa::path(post, path = "/v1/sessions/{id}/start", tag = "lifecycle", params(("id" = String, Path,), StartQuery),
    request_body = Nothing,
    responses((status = 200, body = Session), (status = 202, body = Operation), (status = "default", body = Problem)))]
pub(crate) async fn start(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<StartQuery>,
    _: Json<Nothing>,
) -> Result<Response, ApiError> {
    let to = if query.disk_only == Some(true) { Transition::StartDiskOnly } else { Transition::Start };
    let wait = WaitQuery { wait: query.wait, wait_for_hooks: query.wait_for_hooks };
    transition(app, who, id, to, wait).await
}

/// Let the present sandbox run longer: moves `timeout_at`.
#[utoipa::path(post, path = "/v1/sessions/{id}/extend", tag = "lifecycle", params(("id" = String, Path,)), request_body = Extend,
    responses((status = 200, body = Session), (status = "default", body = Problem)))]
pub(crate) async fn extend(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
    Json(body): Json<Extend>,
) -> Result<Response, ApiError> {
    Ok(extract::ok(&view::session(&app.engine().extend(&who, id, body.seconds).await?, &who)))
}

/// Show an operation.
#[utoipa::path(get, path = "/v1/operations/{operation}", tag = "lifecycle", params(("operation" = String, Path,)),
    responses((status = 200, body = Operation), (status = "default", body = Problem)))]
pub(crate) async fn operation(
    Shared(app): Shared<AppState>,
    who: Principal,
    OperationPath(id): OperationPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    let row = app.engine().operation(id).await?;
    who.require_session(row.session_id)?;
    Ok(extract::ok(&view::operation(&row)))
}
