//! The history of sessions: in pages, or followed as it happens.

use super::view;
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Query, SessionPath, page_limit},
    stream::{self, Format, Gone},
};
use api_types::{Event, Page, Problem};
use axum::{extract::State as Shared, response::Response};
use engine::EventFollower;
use http::HeaderMap;
use model::EventSeq;
use store::{Cursor, EventRow};
use tokio_util::sync::CancellationToken;

/// Which events of a session.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SessionEventsQuery {
    /// The first number; 1 where missing.
    pub from: Option<u64>,
    /// Go on with what comes.
    pub follow: Option<bool>,
    pub limit: Option<usize>,
    /// The `next_cursor` of the page before.
    pub cursor: Option<String>,
}

/// Which events of all sessions.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventsQuery {
    /// After this place; with `follow` and without it: only what comes.
    pub cursor: Option<String>,
    pub follow: Option<bool>,
    pub limit: Option<usize>,
}

/// True where the answer goes on: asked for, or taken for granted by who wants an event stream.
fn follows(follow: Option<bool>, headers: &HeaderMap) -> bool {
    follow.unwrap_or_else(|| stream::accepts(headers, "text/event-stream"))
}

fn last_event_id(headers: &HeaderMap) -> Option<&str> {
    headers.get("last-event-id")?.to_str().ok().filter(|id| !id.is_empty())
}

/// Events of a session, from `from` on.
///
/// A page of JSON; with `follow=true` JSON lines, or server-sent events with `Accept: text/event-stream` whose id is the
/// event's number.
#[utoipa::path(get, path = "/v1/sessions/{id}/events", tag = "events", params(("id" = String, Path,), SessionEventsQuery,
        ("Last-Event-ID" = Option<String>, Header,)),
    responses((status = 200, body = Page<Event>), (status = "default", body = Problem)))]
pub(crate) async fn of_session(
    Shared(app): Shared<AppState>,
    SessionPath(id): SessionPath,
    Query(query): Query<SessionEventsQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let limit = page_limit(query.limit)?;
    let cursor = query.cursor.as_deref().map(|text| number("cursor", text)).transpose()?;
    let last = last_event_id(&headers).map(|text| number("Last-Event-ID", text)).transpose()?;
    let from = last.map(|seq| seq.saturating_add(1)).or(cursor).or(query.from).unwrap_or(1).max(1);
    if !follows(query.follow, &headers) {
        let rows = app.engine().events(id, EventSeq(from), limit).await?;
        let next_cursor = rows.last().filter(|_| rows.len() == limit).map(|row| (row.seq.0 + 1).to_string());
        return Ok(extract::ok(&Page { items: rows.into_iter().map(view::event).collect(), next_cursor }));
    }
    let follower = app.engine().follow_events(id, EventSeq(from)).await?;
    Ok(tell(follower, &headers, app.stop().clone(), |row| row.seq.0.to_string(), |_| true))
}

fn number(field: &str, text: &str) -> Result<u64, ApiError> {
    text.parse().map_err(|_| ApiError::bad_field(field, format!("'{field}' is the number of an event")))
}

/// Events of all sessions that the token reaches, in one order.
#[utoipa::path(get, path = "/v1/events", tag = "events", params(EventsQuery, ("Last-Event-ID" = Option<String>, Header,)),
    responses((status = 200, body = Page<Event>), (status = "default", body = Problem)))]
pub(crate) async fn of_all(
    Shared(app): Shared<AppState>,
    who: Principal,
    Query(query): Query<EventsQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let limit = page_limit(query.limit)?;
    let after = last_event_id(&headers).map(str::to_owned).or(query.cursor).map(Cursor);
    if !follows(query.follow, &headers) {
        let rows = app.engine().events_of_all(after, limit).await?;
        let next_cursor = rows.last().filter(|_| rows.len() == limit).map(|row| row.cursor().0);
        let reached = rows.into_iter().filter(|row| who.reaches(row.session_id));
        return Ok(extract::ok(&Page { items: reached.map(view::event).collect(), next_cursor }));
    }
    let follower = app.engine().follow_events_of_all(after).await?;
    Ok(tell(follower, &headers, app.stop().clone(), |row| row.cursor().0, move |row| who.reaches(row.session_id)))
}

fn tell(
    mut follower: EventFollower,
    headers: &HeaderMap,
    stop: CancellationToken,
    id: impl Fn(&EventRow) -> String + Send + 'static,
    shown: impl Fn(&EventRow) -> bool + Send + 'static,
) -> Response {
    stream::items(Format::of(headers), move |items| async move {
        loop {
            let row = tokio::select! {
                row = follower.next() => row.map_err(|_| Gone)?,
                () = stop.cancelled() => None,
            };
            let Some(row) = row else { return Ok(()) };
            if shown(&row) {
                let (id, kind) = (id(&row), row.kind.to_string());
                items.send(&id, Some(&kind), &view::event(row)).await?;
            }
        }
    })
}
