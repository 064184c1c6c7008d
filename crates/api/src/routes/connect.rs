//! Coming back to a session: one call that says how it stands and gives all that is needed to go on with it.

use super::view;
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{Json, Query, SessionPath},
    stream,
};
use api_types::{ConnectAnswer, ConnectRequest, ConnectStatus, Lifecycle, Problem, RestoreOption, WakeReport};
use axum::{extract::State as Shared, response::Response};
use engine::{Connected, Engine, Found, SessionView, WayBack};
use http::StatusCode;

/// What else to do for it.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ConnectQuery {
    /// Start a stopped session.
    pub start: Option<bool>,
    /// `true`: answer once the hooks that the wake has begun have ended, too.
    pub wait_for_hooks: Option<bool>,
}

/// Come back to a session.
///
/// Always 200 for a session that is known, also where it is gone: `status` says how it was found. `connected` means that
/// its guest has just answered. `{"wake": false}` never starts anything and changes nothing.
#[utoipa::path(post, path = "/v1/sessions/{id}/connect", tag = "lifecycle", params(("id" = String, Path,), ConnectQuery),
    request_body = ConnectRequest, responses((status = 200, body = ConnectAnswer), (status = "default", body = Problem)))]
pub(crate) async fn connect(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<ConnectQuery>,
    Json(body): Json<ConnectRequest>,
) -> Result<Response, ApiError> {
    let wake = body.wake.unwrap_or(true);
    let start = query.start == Some(true);
    if start && !wake {
        return Err(ApiError::bad_field("start", "'start=true' contradicts 'wake': false, which starts nothing"));
    }
    let (engine, caller) = (app.engine().clone(), who.clone());
    let waiting = async move {
        let connected = engine.connect(&caller, id, wake, start).await?;
        if query.wait_for_hooks == Some(true) && connected.found == Found::Connected {
            engine.hooks_ended(id).await?;
        }
        Ok((StatusCode::OK, answer(&engine, connected, &caller).await))
    };
    stream::padded(StatusCode::OK, waiting, move |_| async move {
        let connected = app.engine().connect(&who, id, false, false).await?;
        Ok(answer(app.engine(), connected, &who).await)
    })
    .await
}

async fn answer(engine: &Engine, connected: Connected, who: &Principal) -> ConnectAnswer {
    // What goes on is asked before the session is shown: the answer tells when idleness would end it.
    let activity = engine.activity(connected.view.id()).await;
    let fresh = engine.session_or_tombstone(connected.view.id()).await;
    let hibernate_after = fresh.ok().and_then(|view| view.hibernate_after).or(connected.view.hibernate_after);
    let shown = SessionView { hibernate_after, ..connected.view };
    let row = shown.row.clone();
    let mut session = view::session(&shown, who);
    session.activity = activity.map(view::activity);
    let lifecycle = Lifecycle {
        server_time: session.server_time,
        state: session.state,
        last_activity_at: session.last_activity_at,
        hibernate_after: session.hibernate_after,
        timeout_at: session.timeout_at,
        expires_at: session.expires_at,
    };
    let wake =
        row.last_wake.as_ref().filter(|_| connected.woken && connected.slept).filter(|wake| wake.generation == row.generation);
    ConnectAnswer {
        status: status(connected.found),
        lifecycle,
        woken: connected.woken,
        wake: wake.map(|wake| WakeReport {
            gap_seconds: wake.gap_ms as f64 / 1000.0,
            memory: "restored".to_owned(),
            generation: wake.generation,
            connections_reset: wake.connections_reset,
            reset_to: wake.reset_to.clone(),
        }),
        has_snapshot: connected.ways_back.iter().any(|way| way.memory || way.snapshot_id.is_some()),
        restore_options: connected.ways_back.iter().map(restore_option).collect(),
        terminals: connected.terminals.into_iter().map(Into::into).collect(),
        execs: connected.execs.into_iter().map(Into::into).collect(),
        problem: connected.failure.map(|error| *ApiError::from(error).0),
        session,
    }
}

fn restore_option(way: &WayBack) -> RestoreOption {
    RestoreOption { action: way.action.to_owned(), snapshot_id: way.snapshot_id, at: way.at, memory: way.memory }
}

fn status(found: Found) -> ConnectStatus {
    match found {
        Found::Connected => ConnectStatus::Connected,
        Found::Unresponsive => ConnectStatus::Unresponsive,
        Found::Paused => ConnectStatus::Paused,
        Found::Hibernated => ConnectStatus::Hibernated,
        Found::Stopped => ConnectStatus::Stopped,
        Found::Failed => ConnectStatus::Failed,
        Found::Expired => ConnectStatus::Expired,
        Found::Deleted => ConnectStatus::Deleted,
    }
}
