//! Every address of the interface, in one table that the OpenAPI text is held against.

pub(crate) mod admin;
pub(crate) mod connect;
pub(crate) mod events;
pub(crate) mod exec_output;
pub(crate) mod execs;
pub(crate) mod files;
pub(crate) mod later;
pub(crate) mod lifecycle;
pub(crate) mod network;
pub(crate) mod pages;
pub(crate) mod ports;
pub(crate) mod secrets;
pub(crate) mod services;
pub(crate) mod sessions;
pub(crate) mod snapshots;
pub(crate) mod storage;
pub(crate) mod terminal_link;
pub(crate) mod terminals;
pub(crate) mod view;

use crate::{
    AppState, auth,
    auth::Principal,
    error::ApiError,
    idempotency::{self, Interrupted},
    observe, preview,
};
use api_types::ProblemCode;
use axum::{
    Router,
    handler::Handler,
    middleware,
    response::Response,
    routing::{MethodFilter, any, on},
};
use http::{StatusCode, Uri};
use model::{ExecId, OperationId, SessionId, SnapshotId, TerminalId};
use std::str::FromStr;

/// What of a session's own addresses the OpenAPI text describes.
const INSIDE: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];
const INSIDE_PATH: &str = "/v1/sessions/{id}/ports/{port}/{path}";

/// Addresses and what answers them.
pub(crate) struct Table {
    guarded: Router<AppState>,
    /// The same without `Idempotency-Key`: that of a request that is passed on isn't ours, and nothing is kept of secrets.
    passed: Router<AppState>,
    open: Router<AppState>,
    /// Method and address of each, in the order of the table.
    pub(crate) entries: Vec<(&'static str, &'static str)>,
}

impl Table {
    fn new() -> Table {
        Table { guarded: Router::new(), passed: Router::new(), open: Router::new(), entries: Vec::new() }
    }

    /// An address that needs a token.
    fn add<H, T>(mut self, method: &'static str, path: &'static str, handler: H) -> Table
    where
        H: Handler<T, AppState>,
        T: 'static,
    {
        self.guarded = self.guarded.route(path, on(filter(method), handler));
        self.entries.push((method, path));
        self
    }

    /// An address that needs a token, and whose `Idempotency-Key` is not looked at.
    fn add_passed<H, T>(mut self, method: &'static str, path: &'static str, handler: H) -> Table
    where
        H: Handler<T, AppState>,
        T: 'static,
    {
        self.passed = self.passed.route(path, on(filter(method), handler));
        self.entries.push((method, path));
        self
    }

    /// An address below which everything, by whatever method, is a session's own.
    fn add_inside<H, T>(mut self, path: &'static str, handler: H) -> Table
    where
        H: Handler<T, AppState>,
        T: 'static,
    {
        self.passed = self
            .passed
            .route(path, any(handler.clone()))
            .route(&format!("{path}/"), any(handler.clone()))
            .route(&format!("{path}/{{*path}}"), any(handler));
        self.entries.extend(INSIDE.map(|method| (method, INSIDE_PATH)));
        self
    }

    /// An address that anyone may read.
    fn add_open<H, T>(mut self, method: &'static str, path: &'static str, handler: H) -> Table
    where
        H: Handler<T, AppState>,
        T: 'static,
    {
        self.open = self.open.route(path, on(filter(method), handler));
        self.entries.push((method, path));
        self
    }

    pub(crate) fn into_router(self, state: AppState) -> Router {
        self.guarded
            .layer(middleware::from_fn_with_state(state.clone(), idempotency::once))
            .merge(self.passed)
            .layer(middleware::from_fn(observe::note_caller))
            .layer(middleware::from_fn_with_state(state.clone(), auth::authenticate))
            .merge(self.open)
            .fallback(unknown_address)
            .method_not_allowed_fallback(wrong_method)
            .layer(middleware::from_fn_with_state(state.clone(), preview::divert))
            .layer(middleware::from_fn_with_state(state.clone(), observe::observe))
            .with_state(state)
    }
}

fn filter(method: &str) -> MethodFilter {
    match method {
        "GET" => MethodFilter::GET,
        "POST" => MethodFilter::POST,
        "PUT" => MethodFilter::PUT,
        "PATCH" => MethodFilter::PATCH,
        "DELETE" => MethodFilter::DELETE,
        other => unreachable!("the table has no method {other}"),
    }
}

async fn unknown_address(uri: Uri) -> ApiError {
    ApiError::not_found(format!("there is no address {}; /docs lists them", uri.path()))
}

async fn wrong_method(uri: Uri) -> ApiError {
    ApiError::new(ProblemCode::MethodNotAllowed, format!("{} doesn't take this method; /docs lists what it takes", uri.path()))
}

/// The whole interface.
pub(crate) fn table() -> Table {
    let table = Table::new()
        .add_open("GET", "/healthz", pages::healthz)
        .add_open("GET", "/readyz", pages::readyz)
        .add_open("GET", "/docs", pages::docs)
        .add_open("GET", "/openapi.json", pages::openapi)
        .add("GET", "/metrics", pages::metrics)
        .add("POST", "/v1/sessions", sessions::create)
        .add("GET", "/v1/sessions", sessions::list)
        .add("GET", "/v1/sessions/{id}", sessions::show)
        .add("PATCH", "/v1/sessions/{id}", sessions::patch)
        .add("DELETE", "/v1/sessions/{id}", sessions::delete)
        .add("POST", "/v1/sessions/{id}/hibernate", lifecycle::hibernate)
        .add("POST", "/v1/sessions/{id}/wake", lifecycle::wake)
        .add("POST", "/v1/sessions/{id}/pause", lifecycle::pause)
        .add("POST", "/v1/sessions/{id}/unpause", lifecycle::unpause)
        .add("POST", "/v1/sessions/{id}/stop", lifecycle::stop)
        .add("POST", "/v1/sessions/{id}/start", lifecycle::start)
        .add("POST", "/v1/sessions/{id}/extend", lifecycle::extend)
        .add("POST", "/v1/sessions/{id}/connect", connect::connect)
        .add("GET", "/v1/operations/{operation}", lifecycle::operation)
        .add("POST", "/v1/sessions/{id}/execs", execs::create)
        .add("GET", "/v1/sessions/{id}/execs", execs::list)
        .add("GET", "/v1/sessions/{id}/execs/{exec}", execs::show)
        .add("POST", "/v1/sessions/{id}/execs/{exec}/signal", execs::signal)
        .add("POST", "/v1/sessions/{id}/execs/{exec}/stdin", execs::stdin)
        .add("GET", "/v1/sessions/{id}/execs/{exec}/output", exec_output::exec_output)
        .add("POST", "/v1/sessions/{id}/terminals", terminals::create)
        .add("GET", "/v1/sessions/{id}/terminals", terminals::list)
        .add("GET", "/v1/sessions/{id}/terminals/{terminal}", terminals::show)
        .add("DELETE", "/v1/sessions/{id}/terminals/{terminal}", terminals::close)
        .add("GET", "/v1/sessions/{id}/terminals/{terminal}/screen", terminals::screen)
        .add("GET", "/v1/sessions/{id}/terminals/{terminal}/output", terminals::output)
        .add("GET", "/v1/sessions/{id}/terminals/{terminal}/attach", terminal_link::attach);
    let table = table
        .add("GET", "/v1/sessions/{id}/services", services::list)
        .add("GET", "/v1/sessions/{id}/services/{name}/output", services::output)
        .add("POST", "/v1/sessions/{id}/services/{name}/{action}", services::act)
        .add("GET", "/v1/sessions/{id}/stats", services::stats)
        .add("GET", "/v1/sessions/{id}/processes", services::processes)
        .add("GET", "/v1/sessions/{id}/logs", services::logs)
        .add("GET", "/v1/sessions/{id}/files", files::read)
        .add("PUT", "/v1/sessions/{id}/files", files::write)
        .add("DELETE", "/v1/sessions/{id}/files", files::remove)
        .add("GET", "/v1/sessions/{id}/files/stat", files::stat)
        .add("GET", "/v1/sessions/{id}/files/list", files::list)
        .add("POST", "/v1/sessions/{id}/files/mkdir", files::mkdir)
        .add("POST", "/v1/sessions/{id}/files/move", files::rename)
        .add("GET", "/v1/sessions/{id}/files/watch", files::watch)
        .add("GET", "/v1/sessions/{id}/archive", files::pack)
        .add("PUT", "/v1/sessions/{id}/archive", files::unpack)
        .add("POST", "/v1/sessions/{id}/snapshots", snapshots::create)
        .add("POST", "/v1/sessions/{id}/fork", snapshots::fork_session)
        .add("POST", "/v1/sessions/{id}/rollback", snapshots::rollback)
        .add("GET", "/v1/snapshots", snapshots::list)
        .add("GET", "/v1/snapshots/{snapshot}", snapshots::show)
        .add("DELETE", "/v1/snapshots/{snapshot}", snapshots::delete)
        .add("POST", "/v1/snapshots/{snapshot}/fork", snapshots::fork_snapshot)
        .add("GET", "/v1/sessions/{id}/events", events::of_session)
        .add("GET", "/v1/events", events::of_all)
        .add("GET", "/v1/storage", storage::show)
        .add("POST", "/v1/storage/collect", storage::collect)
        .add("POST", "/v1/storage/check", storage::check)
        .add("POST", "/v1/storage/pack", storage::pack)
        .add("POST", "/v1/storage/backup", storage::backup)
        .add("GET", "/v1/storage/backups", storage::backups)
        .add("DELETE", "/v1/storage/backups/{name}", storage::backup_remove)
        .add("POST", "/v1/storage/rotate-key", storage::rotate_key)
        .add("GET", "/v1/sessions/{id}/export", storage::export)
        .add("PUT", "/v1/sessions/import", storage::import)
        .add("GET", "/v1/sessions/{id}/network", network::show)
        .add("GET", "/v1/sessions/{id}/ports", ports::list)
        .add("POST", "/v1/sessions/{id}/links/{port}", ports::link)
        .add_inside("/v1/sessions/{id}/ports/{port}", ports::pass)
        .add("GET", "/v1/sessions/{id}/tcp/{port}", ports::tcp)
        .add("GET", "/v1/secrets", secrets::list)
        .add_passed("POST", "/v1/secrets", secrets::set)
        .add("PUT", "/v1/secrets/{name}", secrets::put)
        .add("DELETE", "/v1/secrets/{name}", secrets::remove)
        .add("GET", "/v1/tokens", admin::tokens)
        .add("POST", "/v1/tokens", admin::token_new)
        .add("DELETE", "/v1/tokens/{token}", admin::token_revoke)
        .add("GET", "/v1/templates", admin::templates)
        .add("POST", "/v1/templates", admin::template_add)
        .add("DELETE", "/v1/templates/{name}", admin::template_remove)
        .add("GET", "/v1/server", admin::server)
        .add("POST", "/v1/server/shutdown", admin::shutdown)
        .add("GET", "/v1/audit", admin::audit);
    later::add(table)
}

/// The answer to a request whose server ended before it could answer.
pub(crate) async fn answer_from(app: &AppState, who: &Principal, cut: Interrupted<'_>) -> Result<Response, ApiError> {
    let Interrupted { made, uri, body } = cut;
    let id = made.rsplit([':', ' ', '/']).next().unwrap_or(made);
    let parts: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
    match parts.as_slice() {
        ["v1", "sessions"] => sessions::created_before(app, who, parse(id)?).await,
        ["v1", "sessions", session, "execs"] => {
            execs::started_before(app, who, parse(session)?, parse::<ExecId>(id)?, uri, body).await
        }
        ["v1", "sessions", session, "terminals"] => {
            terminals::opened_before(app, who, parse(session)?, parse::<TerminalId>(id)?, uri, body).await
        }
        ["v1", "sessions", _, "snapshots"] => snapshots::taken_before(app, parse::<SnapshotId>(id)?).await,
        ["v1", "sessions" | "snapshots", _, "fork"] => snapshots::forked_before(app, who, made).await,
        ["v1", "sessions", session, _] => {
            let session: SessionId = parse(session)?;
            lifecycle::done_before(app, who, session, parse::<OperationId>(id).ok(), uri.query().unwrap_or_default()).await
        }
        _ => Err(ApiError::new(
            ProblemCode::Lost,
            format!("the server ended while it answered this request; it had made {made}. Look at it before you ask again"),
        )),
    }
}

fn parse<T: FromStr>(id: &str) -> Result<T, ApiError> {
    id.parse().map_err(|_| ApiError::new(ProblemCode::Lost, format!("the server ended while it answered; it had made {id}")))
}

/// A body that has no fields.
#[derive(Debug, Default, serde::Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

/// An answer without a body.
pub(crate) fn done() -> StatusCode {
    StatusCode::NO_CONTENT
}
