//! The HTTP interface, version 1: routes, who may use them, and how the engine's answers are written.
//!
//! ```text
//! request -> observe (metrics, audit, panics) -> authenticate -> once (Idempotency-Key) -> a route -> the engine
//! ```
//! This crate decides nothing about sessions: it reads requests strictly, asks the engine, and writes down what it says.
//! Every error is a problem (RFC 9457) with a code that programs act on.

mod audit;
mod auth;
mod error;
mod extract;
mod idempotency;
mod linger;
mod listen;
mod metrics;
mod observe;
mod openapi;
mod preview;
mod proxy;
mod routes;
mod stream;
mod upkeep;

pub use error::ApiError;
pub use listen::{GRACE, Listeners, Peer, serve};

use axum::Router;
use engine::Engine;
use model::Timestamp;
use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};
use store::Store;
use tokio_util::sync::CancellationToken;

/// What all routes share. Cheap to clone.
#[derive(Clone)]
pub struct AppState(Arc<Inner>);

/// Where previews of sessions' pages are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Previews {
    /// Each is a host below this one; in lower case.
    pub domain: String,
    /// The port that they are reached at, for links that are asked for over the server's socket; `None`: the usual one.
    pub port: Option<u16>,
}

impl Default for Previews {
    fn default() -> Previews {
        Previews { domain: "localhost".to_owned(), port: None }
    }
}

struct Inner {
    engine: Engine,
    previews: Previews,
    store: Arc<dyn Store>,
    metrics: metrics::Metrics,
    audit: audit::AuditLog,
    in_flight: Arc<idempotency::InFlight>,
    /// Names this run of the server among all that hold the store one after the other.
    instance: String,
    server_uid: u32,
    started_at: Timestamp,
    /// Cancelled when the server is to end.
    stop: CancellationToken,
}

/// The parts of a server that go on for a moment after the last request.
pub struct Background {
    audit: tokio::task::JoinHandle<()>,
    upkeep: tokio::task::JoinHandle<()>,
    stop: CancellationToken,
}

impl Background {
    /// Writes what is still to be written. Call it after [`serve`] has returned, before the store is closed.
    pub async fn finish(self) {
        self.stop.cancel();
        for task in [self.audit, self.upkeep] {
            if let Err(error) = task.await {
                tracing::error!(%error, "a task beside the requests ended badly");
            }
        }
    }
}

impl AppState {
    /// The state of one run of a server. `stop` is cancelled from outside or by `POST /v1/server/shutdown`.
    pub fn new(engine: Engine, previews: Previews, stop: CancellationToken) -> (AppState, Background) {
        let store = engine.store().clone();
        let finish = CancellationToken::new();
        let (audit, writer) = audit::AuditLog::start(store.clone(), finish.clone());
        let started_at = now();
        let state = AppState(Arc::new(Inner {
            engine,
            previews,
            store,
            metrics: metrics::Metrics::new(),
            audit,
            in_flight: Arc::default(),
            instance: format!("{}-{}", std::process::id(), started_at.0),
            server_uid: nix::unistd::geteuid().as_raw(),
            started_at,
            stop,
        }));
        let upkeep = tokio::spawn(upkeep::forget_now_and_then(state.clone(), finish.clone()));
        (state, Background { audit: writer, upkeep, stop: finish })
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.0.engine
    }

    pub(crate) fn previews(&self) -> &Previews {
        &self.0.previews
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    pub(crate) fn metrics(&self) -> &metrics::Metrics {
        &self.0.metrics
    }

    pub(crate) fn audit(&self) -> &audit::AuditLog {
        &self.0.audit
    }

    pub(crate) fn in_flight(&self) -> &Arc<idempotency::InFlight> {
        &self.0.in_flight
    }

    pub(crate) fn instance(&self) -> &str {
        &self.0.instance
    }

    pub(crate) fn server_uid(&self) -> u32 {
        self.0.server_uid
    }

    pub(crate) fn started_at(&self) -> Timestamp {
        self.0.started_at
    }

    pub(crate) fn stop(&self) -> &CancellationToken {
        &self.0.stop
    }
}

/// All routes.
pub fn router(state: AppState) -> Router {
    routes::table().into_router(state)
}

/// The wall clock.
pub(crate) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}
