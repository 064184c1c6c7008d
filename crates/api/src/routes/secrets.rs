//! Secrets: set, listed by name, given up. A value is never answered. Scope `admin`.

use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Json, NoQuery, Query, path_text},
    stream,
};
use api_types::{Page, Problem, PutSecret, Secret, SetSecret};
use axum::{
    extract::{FromRequestParts, State as Shared},
    response::Response,
};
use engine::Scope;
use http::{StatusCode, request::Parts};
use model::network::SecretName;

/// The secret of the path.
pub(crate) struct SecretPath(SecretName);

impl<S: Send + Sync> FromRequestParts<S> for SecretPath {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = path_text(parts, state, "name").await?;
        name.parse().map(SecretPath).map_err(|error: model::NameError| ApiError::bad_field("name", error.to_string()))
    }
}

fn shown(secret: engine::Secret) -> Secret {
    Secret { name: secret.name, hosts: secret.hosts, created_at: secret.created_at, updated_at: secret.updated_at }
}

/// List secrets: names, hosts and times.
#[utoipa::path(get, path = "/v1/secrets", tag = "network",
    responses((status = 200, body = Page<Secret>), (status = "default", body = Problem)))]
pub(crate) async fn list(Shared(app): Shared<AppState>, who: Principal, _: Query<NoQuery>) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    Ok(extract::ok(&Page::whole(app.engine().secrets(&who).await?.into_iter().map(shown).collect::<Vec<_>>())))
}

/// Set a secret. Sessions whose policy names it have the new value when this is answered.
///
/// It is added to requests by a rule with `inject`, at the edge: no program inside ever has it. With `hosts` it goes to no
/// other ones, whoever writes the rule; without, only rules that an administrator sets may name it.
#[utoipa::path(put, path = "/v1/secrets/{name}", tag = "network", params(("name" = String, Path,)), request_body = PutSecret,
    responses((status = 200, body = Secret), (status = "default", body = Problem)))]
pub(crate) async fn put(
    Shared(app): Shared<AppState>,
    who: Principal,
    SecretPath(name): SecretPath,
    _: Query<NoQuery>,
    Json(body): Json<PutSecret>,
) -> Result<Response, ApiError> {
    keep(app, who, SetSecret { name, value: body.value, hosts: body.hosts }).await
}

/// Set a secret, by its name in the body. The same as PUT, so an `Idempotency-Key` isn't needed, and nothing is kept of it.
#[utoipa::path(post, path = "/v1/secrets", tag = "network", request_body = SetSecret,
    responses((status = 200, body = Secret), (status = "default", body = Problem)))]
pub(crate) async fn set(
    Shared(app): Shared<AppState>,
    who: Principal,
    _: Query<NoQuery>,
    Json(body): Json<SetSecret>,
) -> Result<Response, ApiError> {
    keep(app, who, body).await
}

async fn keep(app: AppState, who: Principal, body: SetSecret) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let engine = app.engine().clone();
    let kept = stream::begun(async move { Ok(engine.set_secret(&who, body.name, &body.value, body.hosts).await?) });
    Ok(extract::ok(&shown(kept.await?)))
}

/// Give a secret up. Requests of sessions that use it go without it from then on.
#[utoipa::path(delete, path = "/v1/secrets/{name}", tag = "network", params(("name" = String, Path,)),
    responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn remove(
    Shared(app): Shared<AppState>,
    who: Principal,
    SecretPath(name): SecretPath,
    _: Query<NoQuery>,
) -> Result<StatusCode, ApiError> {
    who.require(Scope::Admin)?;
    let engine = app.engine().clone();
    stream::begun(async move { Ok(engine.remove_secret(&who, name).await?) }).await?;
    Ok(super::done())
}
