//! Health, metrics, and the description of the interface.

use crate::{AppState, auth::Principal, error::ApiError, extract, metrics, openapi};
use api_types::{Problem, ProblemCode};
use axum::{
    extract::State as Shared,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, header};
use serde_json::json;

/// The server answers.
#[utoipa::path(get, path = "/healthz", tag = "server", security(()), responses((status = 200)))]
pub(crate) async fn healthz() -> Response {
    extract::ok(&json!({ "status": "ok" }))
}

/// The server can do its work: its store answers, and it isn't ending.
#[utoipa::path(get, path = "/readyz", tag = "server", security(()), responses((status = 200), (status = 503, body = Problem)))]
pub(crate) async fn readyz(Shared(app): Shared<AppState>) -> Result<Response, ApiError> {
    if app.stop().is_cancelled() {
        return Err(ApiError::new(ProblemCode::ShuttingDown, "the server is going down"));
    }
    if let Err(error) = app.store().latest_event().await {
        tracing::error!(%error, "the store doesn't answer");
        return Err(ApiError::new(ProblemCode::NoCapacity, "the store doesn't answer"));
    }
    Ok(extract::ok(&json!({ "status": "ready" })))
}

/// Figures for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "server",
    responses((status = 200, body = String, content_type = "application/openmetrics-text"), (status = "default", body = Problem)))]
pub(crate) async fn metrics(Shared(app): Shared<AppState>, who: Principal) -> Response {
    let mut counts = app.engine().counts().await;
    // Whom a session talks to is for those whom it concerns.
    counts.traffic.retain(|(session, _, _)| who.reaches(*session));
    let text = app.metrics().render(&counts);
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
}

/// This interface as OpenAPI.
#[utoipa::path(get, path = "/openapi.json", tag = "server", security(()), responses((status = 200)))]
pub(crate) async fn openapi() -> Response {
    let mut response = openapi::document().into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The same for people.
#[utoipa::path(get, path = "/docs", tag = "server", security(()), responses((status = 200, content_type = "text/html")))]
pub(crate) async fn docs() -> Response {
    let mut response = axum::response::Html(include_str!("../../docs.html")).into_response();
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    response
}
