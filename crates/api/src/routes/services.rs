//! Services, figures, processes and the merged log of a session.

use super::{
    exec_output,
    terminals::{OutputQuery, from_offset, tell},
};
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, NoQuery, Query, SessionPath, path_text},
    stream::{self, Format, Gone},
};
use api_types::{LogLine, OutputLine, Page, Problem, Process, Service, Stats};
use axum::{
    extract::{FromRequestParts, State as Shared},
    response::Response,
};
use engine::{LogSource, SessionView};
use http::{HeaderMap, request::Parts};
use model::{ServiceName, SessionId, Timestamp};
use wire::{layout::JournalName, records::ServiceRecord};

/// A service of the path's session.
pub(crate) struct ServicePath(SessionId, ServiceName);

impl<S: Send + Sync> FromRequestParts<S> for ServicePath {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let SessionPath(id) = SessionPath::from_request_parts(parts, state).await?;
        let name = path_text(parts, state, "name").await?;
        let name = name.parse().map_err(|_| ApiError::not_found("there is no service with that name"))?;
        Ok(ServicePath(id, name))
    }
}

/// What is to be done with a service.
pub(crate) struct ActionPath(&'static str);

impl<S: Send + Sync> FromRequestParts<S> for ActionPath {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let action = path_text(parts, state, "action").await?;
        let known = ["start", "stop", "restart"].into_iter().find(|known| *known == action);
        known.map(ActionPath).ok_or_else(|| ApiError::not_found("a service can be: start, stop, restart"))
    }
}

/// A service as it runs, with the command line it was declared with.
fn joined(view: &SessionView, record: ServiceRecord) -> Service {
    let declared = view.row.services.iter().find(|spec| spec.name == record.name);
    let argv = declared.map(|spec| spec.argv.clone()).unwrap_or_default();
    Service { argv, ..Service::from(record) }
}

/// List services as they run.
#[utoipa::path(get, path = "/v1/sessions/{id}/services", tag = "services", params(("id" = String, Path,)),
    responses((status = 200, body = Page<Service>), (status = "default", body = Problem)))]
pub(crate) async fn list(
    Shared(app): Shared<AppState>,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    let view = app.engine().session(id).await?;
    let items: Vec<Service> = app.engine().services(id).await?.into_iter().map(|record| joined(&view, record)).collect();
    Ok(extract::ok(&Page::whole(items)))
}

/// Start, stop or restart a service.
#[utoipa::path(post, path = "/v1/sessions/{id}/services/{name}/{action}", tag = "services",
    params(("id" = String, Path,), ("name" = String, Path,), ("action" = String, Path, description = "`start`, `stop` or `restart`")),
    responses((status = 200, body = Service), (status = "default", body = Problem)))]
pub(crate) async fn act(
    Shared(app): Shared<AppState>,
    who: Principal,
    ServicePath(id, name): ServicePath,
    ActionPath(action): ActionPath,
    _: Query<NoQuery>,
    _: extract::Json<super::Nothing>,
) -> Result<Response, ApiError> {
    let record = app.engine().service(&who, id, name, action).await?;
    let view = app.engine().session(id).await?;
    Ok(extract::ok(&joined(&view, record)))
}

/// Output of a service, as for execs; standard output and error are one stream, called `stdout`.
#[utoipa::path(get, path = "/v1/sessions/{id}/services/{name}/output", tag = "services",
    params(("id" = String, Path,), ("name" = String, Path,), OutputQuery),
    responses((status = 200, body = OutputLine, content_type = "application/x-ndjson"), (status = "default", body = Problem)))]
pub(crate) async fn output(
    Shared(app): Shared<AppState>,
    ServicePath(id, name): ServicePath,
    Query(query): Query<OutputQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let follow = query.follow.unwrap_or(false);
    let from = from_offset(&query, &headers);
    let journal = JournalName::Service(name);
    if stream::accepts(&headers, "application/octet-stream") {
        return exec_output::raw(&app, id, journal, from, None, follow).await;
    }
    let mut reader = app.engine().output(id, journal, from).await?;
    let stop = app.stop().clone();
    Ok(stream::items(Format::of(&headers), move |items| async move {
        tokio::select! {
            told = tell(&mut reader, &items, follow, "stdout") => told,
            () = stop.cancelled() => Ok(()),
        }
    }))
}

/// Resource figures of the sandbox.
#[utoipa::path(get, path = "/v1/sessions/{id}/stats", tag = "sessions", params(("id" = String, Path,)),
    responses((status = 200, body = Stats), (status = 422, body = Problem), (status = "default", body = Problem)))]
pub(crate) async fn stats(
    Shared(app): Shared<AppState>,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    Ok(extract::ok(&Stats::from(app.engine().stats(id).await?)))
}

/// Processes inside.
#[utoipa::path(get, path = "/v1/sessions/{id}/processes", tag = "sessions", params(("id" = String, Path,)),
    responses((status = 200, body = Page<Process>), (status = 422, body = Problem), (status = "default", body = Problem)))]
pub(crate) async fn processes(
    Shared(app): Shared<AppState>,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    let items: Vec<Process> = app.engine().processes(id).await?.into_iter().map(Process::from).collect();
    Ok(extract::ok(&Page::whole(items)))
}

/// Which lines of the log.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogsQuery {
    /// Go on with what comes.
    pub follow: Option<bool>,
    /// A time (RFC 3339), or how long ago (`10m`).
    pub since: Option<String>,
    /// `requests`: what went out over its network instead, where the policy has `log_requests`; each `text` is a JSON object
    /// of `at`, `method`, `host`, `path`, `status`, `sent_bytes`, `received_bytes`, `duration_ms`.
    pub source: Option<String>,
}

/// All execs and services line by line, in the order of time.
#[utoipa::path(get, path = "/v1/sessions/{id}/logs", tag = "sessions", params(("id" = String, Path,), LogsQuery),
    responses((status = 200, body = LogLine, content_type = "application/x-ndjson"), (status = "default", body = Problem)))]
pub(crate) async fn logs(
    Shared(app): Shared<AppState>,
    SessionPath(id): SessionPath,
    Query(query): Query<LogsQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let since = query.since.as_deref().map(|text| since(text, crate::now())).transpose()?;
    let follow = query.follow.unwrap_or(false);
    let mut reader = match query.source.as_deref() {
        None => app.engine().logs(id, since, follow).await?,
        Some("requests") => app.engine().requests_log(id, since, follow).await?,
        Some(_) => return Err(ApiError::bad_field("source", "'source' is 'requests', or left out for execs and services")),
    };
    let stop = app.stop().clone();
    Ok(stream::items(Format::of(&headers), move |items| async move {
        loop {
            let line = tokio::select! {
                line = reader.next() => line.map_err(|_| Gone)?,
                () = stop.cancelled() => None,
            };
            let Some(line) = line else { return Ok(()) };
            let source = match line.source {
                LogSource::Exec(exec) => format!("exec:{exec}"),
                LogSource::Service(name) => format!("service:{name}"),
                LogSource::Requests => "requests".to_owned(),
            };
            let line = LogLine { at: line.at, source, stream: line.stream.to_owned(), text: line.text };
            items.send("", None, &line).await?;
        }
    }))
}

/// An instant, or a span of time before now.
fn since(text: &str, now: Timestamp) -> Result<Timestamp, ApiError> {
    if let Ok(at) = text.parse() {
        return Ok(at);
    }
    match model::parse_duration(text) {
        Ok(span) => Ok(Timestamp(now.0.saturating_sub(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))),
        Err(_) => {
            Err(ApiError::bad_field("since", "'since' is a time such as 2026-01-31T12:00:00Z, or how long ago, such as 10m"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_is_a_time_or_a_span() {
        let now = Timestamp(1_700_000_000_000);
        assert_eq!(since("10m", now).unwrap(), Timestamp(1_699_999_400_000));
        assert_eq!(since("2023-11-14T22:13:20.000Z", Timestamp(0)).unwrap(), now);
        for bad in ["yesterday", "", "-5m"] {
            assert!(since(bad, now).is_err(), "{bad}");
        }
    }
}
