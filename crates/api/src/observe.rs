//! What happens around every request: it is timed, counted, written to the audit list, and a panic in it is an answer.

use crate::{AppState, auth::Principal, error::ApiError, idempotency::session_of, linger, listen::Peer, preview::Preview};
use api_types::ProblemCode;
use axum::{
    extract::{ConnectInfo, MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use std::{panic::AssertUnwindSafe, time::Instant};
use store::AuditRow;

/// Left on an answer by [`note_caller`], so that the audit list can name who asked.
#[derive(Clone)]
struct AskedBy(String);

/// The outermost layer.
pub(crate) async fn observe(State(app): State<AppState>, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let path = request.uri().path().to_owned();
    let peer = request.extensions().get::<ConnectInfo<Peer>>().map(|info| info.0);
    // A panic ends this request only; what a handler shares with others is behind locks that tolerate it.
    let response = match AssertUnwindSafe(next.run(linger::patient(request))).catch_unwind().await {
        Ok(response) => response,
        Err(_) => {
            tracing::error!(%method, path, "a request panicked");
            ApiError::new(ProblemCode::Internal, "the request failed in the server; its log says more").into_response()
        }
    };
    let status = response.status();
    let preview = response.extensions().get::<Preview>().copied();
    let route = match preview {
        Some(_) => "preview",
        None => route.as_ref().map_or("unknown", MatchedPath::as_str),
    };
    app.metrics().answered(&method, route, status.as_u16(), begun.elapsed());
    tracing::debug!(%method, path, status = status.as_u16(), took_us = begun.elapsed().as_micros(), "answered");
    let path = preview.map_or_else(|| path.clone(), |preview| preview.audited(&path));
    if path.starts_with("/v1/") || preview.is_some() {
        let actor = response.extensions().get::<AskedBy>().map_or_else(|| stranger(peer), |by| by.0.clone());
        let session_id = preview.map(|preview| preview.session).or_else(|| session_of(&path));
        let method = method.as_str().chars().take(32).collect();
        let path = path.chars().take(1024).collect();
        app.audit().push(AuditRow { at: crate::now(), actor, method, path, status: status.as_u16(), session_id }).await;
    }
    response
}

/// Notes who asked on an answer that is given before [`note_caller`] is reached.
pub(crate) fn asked_by(mut response: Response, who: &Principal) -> Response {
    response.extensions_mut().insert(AskedBy(who.actor.0.clone()));
    response
}

/// The same for somebody who has no token of ours.
pub(crate) fn asked_as(mut response: Response, actor: &model::Actor) -> Response {
    response.extensions_mut().insert(AskedBy(actor.0.clone()));
    response
}

/// Right behind authentication: tells the outermost layer who asked.
pub(crate) async fn note_caller(request: Request, next: Next) -> Response {
    let actor = request.extensions().get::<Principal>().map(|principal| AskedBy(principal.actor.0.clone()));
    let mut response = next.run(request).await;
    if let Some(actor) = actor {
        response.extensions_mut().insert(actor);
    }
    response
}

fn stranger(peer: Option<Peer>) -> String {
    match peer {
        Some(Peer::Unix { uid: Some(uid) }) => format!("uid:{uid}"),
        Some(Peer::Tcp(address)) => format!("unknown:{}", address.ip()),
        Some(Peer::Unix { uid: None } | Peer::Nobody) | None => "unknown".to_owned(),
    }
}
