//! The object store: how it stands, checking it, collecting it.

use super::{Nothing, view};
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Json, NoQuery, Query, SessionPath},
    stream,
};
use api_types::{Backup, BackupRequest, Page, Problem, RotateKey, Session, Storage, StorageChecked, StorageCollected};
use axum::{
    body::Body,
    extract::{Path, State as Shared},
    response::Response,
};
use engine::{ImportOptions, Scope};
use http::{HeaderValue, StatusCode, header};

/// How storage stands: what uses space, what is shared, what a collection would free. Scope `admin`.
#[utoipa::path(get, path = "/v1/storage", tag = "server",
    responses((status = 200, body = Storage), (status = "default", body = Problem)))]
pub(crate) async fn show(Shared(app): Shared<AppState>, who: Principal, _: Query<NoQuery>) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let report = app.engine().storage(&who).await?;
    Ok(extract::ok(&Storage {
        object_store: report.place,
        encrypted: report.encrypted,
        trouble: report.trouble,
        packed: report.packed,
        away: report.away,
        cache_used_bytes: report.cache_used,
        cache_limit_bytes: report.cache_limit,
        stored_bytes: report.stored,
        whole_bytes: report.whole,
        shared_once_bytes: report.shared_once,
        chunks: report.chunks,
        packs: report.packs,
        manifests: report.manifests,
        collectable_bytes: report.collectable,
    }))
}

/// Remove from the object store what nothing needs any more. Scope `admin`.
#[utoipa::path(post, path = "/v1/storage/collect", tag = "server", request_body = Nothing,
    responses((status = 200, body = StorageCollected), (status = "default", body = Problem)))]
pub(crate) async fn collect(
    Shared(app): Shared<AppState>,
    who: Principal,
    _: Query<NoQuery>,
    _: Json<Nothing>,
) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let waiting = async move {
        let done = app.engine().storage_collect(&who).await?;
        let answer = StorageCollected {
            manifests_removed: done.manifests_removed,
            chunks_removed: done.chunks_removed,
            packs_removed: done.packs_removed,
            packs_rewritten: done.packs_rewritten,
            bytes_freed: done.bytes_freed,
            unknown_manifests: done.unknown_manifests,
        };
        Ok((StatusCode::OK, answer))
    };
    stream::padded(StatusCode::OK, waiting, |error| async move { Err::<StorageCollected, _>(error) }).await
}

/// Read and verify everything in the object store. Scope `admin`.
///
/// Damage is in the answer, which is 200 all the same.
#[utoipa::path(post, path = "/v1/storage/check", tag = "server", request_body = Nothing,
    responses((status = 200, body = StorageChecked), (status = "default", body = Problem)))]
pub(crate) async fn check(
    Shared(app): Shared<AppState>,
    who: Principal,
    _: Query<NoQuery>,
    _: Json<Nothing>,
) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let waiting = async move {
        let done = app.engine().storage_check(&who).await?;
        let answer = StorageChecked {
            intact: done.damages.is_empty() && done.affected.is_empty(),
            chunks: done.chunks,
            plain_bytes: done.bytes,
            damages: done.damages,
            affected: done.affected,
        };
        Ok((StatusCode::OK, answer))
    };
    stream::padded(StatusCode::OK, waiting, |error| async move { Err::<StorageChecked, _>(error) }).await
}

/// Keep everything that this server has, in its own object store or elsewhere. Scope `admin`.
///
/// Sessions go on running; `failed` names those that could not be kept.
#[utoipa::path(post, path = "/v1/storage/backup", tag = "server", request_body = BackupRequest,
    responses((status = 200, body = Backup), (status = "default", body = Problem)))]
pub(crate) async fn backup(
    Shared(app): Shared<AppState>,
    who: Principal,
    _: Query<NoQuery>,
    Json(body): Json<BackupRequest>,
) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let waiting = async move {
        let made = app.engine().backup(&who, body.to.as_deref()).await?;
        let (sessions, snapshots) = (made.sessions.len() as u64, made.snapshots.len() as u64);
        Ok((StatusCode::OK, Backup { name: made.name, place: made.place, sessions, snapshots, failed: made.failed }))
    };
    stream::padded(StatusCode::OK, waiting, |error| async move { Err::<Backup, _>(error) }).await
}

/// List the backups in the server's own object store, oldest first. Scope `admin`.
#[utoipa::path(get, path = "/v1/storage/backups", tag = "server",
    responses((status = 200, body = Page<String>), (status = "default", body = Problem)))]
pub(crate) async fn backups(Shared(app): Shared<AppState>, who: Principal, _: Query<NoQuery>) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    Ok(extract::ok(&Page::whole(app.engine().backups(&who).await?)))
}

/// Give up a backup in the server's own object store. Scope `admin`.
#[utoipa::path(delete, path = "/v1/storage/backups/{name}", tag = "server", params(("name" = String, Path,)),
    responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn backup_remove(
    Shared(app): Shared<AppState>,
    who: Principal,
    Path(name): Path<String>,
    _: Query<NoQuery>,
) -> Result<StatusCode, ApiError> {
    who.require(Scope::Admin)?;
    let engine = app.engine().clone();
    stream::begun(async move { Ok(engine.backup_remove(&who, &name).await?) }).await?;
    Ok(super::done())
}

/// Have the object store's key wrapped under another one. Scope `admin`.
///
/// Nothing is encrypted anew. From then on only the new key opens it: give it to the server for its next start.
#[utoipa::path(post, path = "/v1/storage/rotate-key", tag = "server", request_body = RotateKey,
    responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn rotate_key(
    Shared(app): Shared<AppState>,
    who: Principal,
    _: Query<NoQuery>,
    Json(body): Json<RotateKey>,
) -> Result<StatusCode, ApiError> {
    who.require(Scope::Admin)?;
    let engine = app.engine().clone();
    stream::begun(async move { Ok(engine.rotate_key(&who, &body.key_file).await?) }).await?;
    Ok(super::done())
}

/// A session as one file.
///
/// A tar archive with its disk, its memory where it has one that can be saved, what it printed and its history. It is not
/// encrypted. One that runs goes on running.
#[utoipa::path(get, path = "/v1/sessions/{id}/export", tag = "sessions", params(("id" = String, Path,)),
    responses((status = 200, content_type = "application/x-tar", body = Vec<u8>), (status = "default", body = Problem)))]
pub(crate) async fn export(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    // All of its memory is in it.
    who.require(Scope::Write)?;
    let engine = app.engine().clone();
    let bytes = stream::begun(async move { Ok(engine.export(&who, id).await?) }).await?;
    let mut response = Response::new(Body::from_stream(bytes));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    Ok(response)
}

/// How to import.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ImportQuery {
    /// `true`: under an id of its own. Else under the one it had, which must not be known here.
    pub new_id: Option<bool>,
    /// `true`: without its memory.
    pub disk_only: Option<bool>,
    /// `true`: its memory may bring the `runsc` that it was made with, where this server doesn't have it. That program runs
    /// outside of any sandbox: only for files that you trust.
    pub trust_runtime: Option<bool>,
}

/// Make a session of an exported file. It sleeps, or is stopped where it has no memory. Scope `admin`.
#[utoipa::path(put, path = "/v1/sessions/import", tag = "sessions", params(ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses((status = 201, body = Session), (status = "default", body = Problem)))]
pub(crate) async fn import(
    Shared(app): Shared<AppState>,
    who: Principal,
    Query(query): Query<ImportQuery>,
    body: Body,
) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let options = ImportOptions {
        new_id: query.new_id.unwrap_or(false),
        disk_only: query.disk_only.unwrap_or(false),
        trust_runtime: query.trust_runtime.unwrap_or(false),
    };
    let view = app.engine().import(&who, super::execs::bytes_of(body), options).await?;
    Ok(extract::json(StatusCode::CREATED, &view::session(&view, &who)))
}

/// Pack at once what sleeps, without waiting for its time, and give up what the cache has no room for. Scope `admin`.
#[utoipa::path(post, path = "/v1/storage/pack", tag = "server", request_body = Nothing,
    responses((status = 200, body = Storage), (status = "default", body = Problem)))]
pub(crate) async fn pack(
    app: Shared<AppState>,
    who: Principal,
    query: Query<NoQuery>,
    _: Json<Nothing>,
) -> Result<Response, ApiError> {
    who.require(Scope::Admin)?;
    let (engine, caller) = (app.engine().clone(), who.clone());
    stream::begun(async move { Ok(engine.storage_pack(&caller).await?) }).await?;
    show(app, who, query).await
}
