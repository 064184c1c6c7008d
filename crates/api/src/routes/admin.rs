//! What concerns the server as a whole: tokens, templates, the list of accesses, its end.

use super::view;
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Json, NoQuery, PageQuery, Query, TokenPath, path_text},
    stream,
};
use api_types::{
    CreateTemplate, CreateToken, Page, Problem, ServerInfo, Shutdown, ShutdownAnswer, ShutdownFailure, Template, TemplateKind,
    Token,
};
use axum::{
    extract::{FromRequestParts, State as Shared},
    response::Response,
};
use engine::{NewToken, Scope, TemplateSource};
use http::{StatusCode, request::Parts};
use model::{SessionId, Timestamp};
use serde::Serialize;
use std::path::{Component, PathBuf};
use utoipa::ToSchema;

/// List tokens, without their secrets. Scope `admin`.
#[utoipa::path(get, path = "/v1/tokens", tag = "server", responses((status = 200, body = Page<Token>), (status = "default", body = Problem)))]
pub(crate) async fn tokens(Shared(app): Shared<AppState>, who: Principal, _: Query<NoQuery>) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let items: Vec<Token> = app.engine().tokens().await?.into_iter().map(|row| view::token(row, None)).collect();
    Ok(extract::ok(&Page::whole(items)))
}

/// Make a token. Its secret is in this answer and nowhere else. Scope `admin`.
#[utoipa::path(post, path = "/v1/tokens", tag = "server", request_body = CreateToken,
    responses((status = 201, body = Token), (status = "default", body = Problem)))]
pub(crate) async fn token_new(
    Shared(app): Shared<AppState>,
    who: Principal,
    _: Query<NoQuery>,
    Json(body): Json<CreateToken>,
) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let name = body.name.trim().to_owned();
    if name.is_empty() || name.chars().count() > 100 || name.chars().any(char::is_control) {
        return Err(ApiError::bad_field("name", "a token's name has 1 to 100 printable characters"));
    }
    let scopes = match body.scopes {
        None => vec![Scope::Read, Scope::Write],
        Some(scopes) if scopes.is_empty() => return Err(ApiError::bad_field("scopes", "a token has at least one scope")),
        Some(scopes) => scopes.into_iter().map(view::scope).collect(),
    };
    let limits = body.limits.map(Into::into).unwrap_or_default();
    let new = NewToken { name, scopes, sessions: body.sessions, ttl_seconds: body.ttl_seconds, limits };
    let made = app.engine().token_new(&who, new).await?;
    Ok(extract::json(StatusCode::CREATED, &view::token(made.row, Some(made.secret))))
}

/// Revoke a token, at once. Scope `admin`.
#[utoipa::path(delete, path = "/v1/tokens/{token}", tag = "server", params(("token" = String, Path,)),
    responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn token_revoke(
    Shared(app): Shared<AppState>,
    who: Principal,
    TokenPath(id): TokenPath,
    _: Query<NoQuery>,
) -> Result<StatusCode, ApiError> {
    who.require(Scope::Admin)?;
    app.engine().token_revoke(&who, id).await?;
    Ok(super::done())
}

/// List templates.
#[utoipa::path(get, path = "/v1/templates", tag = "server", responses((status = 200, body = Page<Template>), (status = "default", body = Problem)))]
pub(crate) async fn templates(Shared(app): Shared<AppState>, _: Query<NoQuery>) -> Result<Response, ApiError> {
    let default = app.engine().config().default_template.clone();
    let listed = app.engine().templates().await?.into_iter().map(|listed| {
        let details = (listed.descriptor.size_bytes, listed.descriptor.created_at);
        let is_default = listed.name == default;
        view::template(listed.name, listed.descriptor.hash.to_string(), Some(details), is_default)
    });
    Ok(extract::ok(&Page::whole(listed.collect::<Vec<Template>>())))
}

/// Make a template of a directory, a tar or an OCI layout on the server's machine. Scope `admin`.
#[utoipa::path(post, path = "/v1/templates", tag = "server", request_body = CreateTemplate,
    responses((status = 201, body = Template), (status = "default", body = Problem)))]
pub(crate) async fn template_add(
    Shared(app): Shared<AppState>,
    who: Principal,
    _: Query<NoQuery>,
    Json(body): Json<CreateTemplate>,
) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let path = PathBuf::from(&body.path);
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) || body.path.contains('\0') {
        return Err(ApiError::bad_field("path", "the path is absolute, on the server's machine, and without '..'"));
    }
    let source = match body.kind {
        TemplateKind::Dir => TemplateSource::Dir(path),
        TemplateKind::Tar => TemplateSource::Tar(path),
        TemplateKind::OciLayout => TemplateSource::OciLayout { dir: path, reference: None },
    };
    let engine = app.engine().clone();
    let waiting = async move {
        let made = engine.template_add(&who, &body.name, source).await?;
        let default = engine.config().default_template == made.name;
        Ok((StatusCode::CREATED, view::template(made.name, made.hash.to_string(), None, default)))
    };
    stream::padded(StatusCode::CREATED, waiting, |error| async move { Err(error) }).await
}

/// A template's name in the path.
pub(crate) struct TemplatePath(String);

impl<S: Send + Sync> FromRequestParts<S> for TemplatePath {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        path_text(parts, state, "name").await.map(TemplatePath)
    }
}

/// Forget a template's name. What sleeping sessions need of it is kept. Scope `admin`.
#[utoipa::path(delete, path = "/v1/templates/{name}", tag = "server", params(("name" = String, Path,)),
    responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn template_remove(
    Shared(app): Shared<AppState>,
    who: Principal,
    TemplatePath(name): TemplatePath,
    _: Query<NoQuery>,
) -> Result<StatusCode, ApiError> {
    who.require(Scope::Admin)?;
    app.engine().template_remove(&who, &name).await?;
    Ok(super::done())
}

/// The server itself.
#[utoipa::path(get, path = "/v1/server", tag = "server", responses((status = 200, body = ServerInfo), (status = "default", body = Problem)))]
pub(crate) async fn server(Shared(app): Shared<AppState>, _: Query<NoQuery>) -> Result<Response, ApiError> {
    let info =
        ServerInfo { version: env!("CARGO_PKG_VERSION").to_owned(), pid: std::process::id(), started_at: app.started_at() };
    Ok(extract::ok(&info))
}

/// End the server. Sessions run on without it, unless `hibernate`. Scope `admin`.
#[utoipa::path(post, path = "/v1/server/shutdown", tag = "server", request_body = Shutdown,
    responses((status = 200, body = ShutdownAnswer), (status = "default", body = Problem)))]
pub(crate) async fn shutdown(
    Shared(app): Shared<AppState>,
    who: Principal,
    _: Query<NoQuery>,
    Json(body): Json<Shutdown>,
) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let waiting = async move {
        let mut answer = ShutdownAnswer { pid: std::process::id(), hibernated: Vec::new(), failed: Vec::new() };
        if body.hibernate {
            let (hibernated, failed) = app.engine().hibernate_all(&who).await;
            answer.hibernated = hibernated;
            answer.failed =
                failed.into_iter().map(|(session_id, error)| ShutdownFailure { session_id, detail: error.to_string() }).collect();
        }
        tracing::info!(actor = %who.actor, hibernate = body.hibernate, "the server was asked to end");
        // This answer is under way already, so it is still sent.
        app.stop().cancel();
        Ok((StatusCode::OK, answer))
    };
    stream::padded(StatusCode::OK, waiting, |error| async move { Err(error) }).await
}

/// One access.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Access {
    #[schema(value_type = String, format = DateTime)]
    at: Timestamp,
    /// `token:NAME`, `uid:N`, or `unknown:ADDRESS`.
    actor: String,
    method: String,
    /// Without the query.
    path: String,
    status: u16,
    #[schema(value_type = Option<String>)]
    session_id: Option<SessionId>,
}

/// Who did what, newest first. Scope `admin`.
#[utoipa::path(get, path = "/v1/audit", tag = "server", params(PageQuery),
    responses((status = 200, body = Page<Access>), (status = "default", body = Problem)))]
pub(crate) async fn audit(
    Shared(app): Shared<AppState>,
    who: Principal,
    Query(page): Query<PageQuery>,
) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let found = app.store().list_audit(page.limit()?, page.cursor()).await?;
    let items: Vec<Access> = found
        .items
        .into_iter()
        .map(|row| Access {
            at: row.at,
            actor: row.actor,
            method: row.method,
            path: row.path,
            status: row.status,
            session_id: row.session_id,
        })
        .collect();
    Ok(extract::ok(&Page { items, next_cursor: found.next_cursor.map(|cursor| cursor.0) }))
}
