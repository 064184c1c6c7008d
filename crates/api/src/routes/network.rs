//! The network of a session: its policy, what is open, what has gone over it.

use crate::{
    AppState,
    error::ApiError,
    extract::{self, NoQuery, Query, SessionPath},
};
use api_types::{HostTraffic, Network, OpenConnection, Problem};
use axum::{extract::State as Shared, response::Response};
use wire::{guest, network::environment};

/// Show a session's network. Never wakes it.
#[utoipa::path(get, path = "/v1/sessions/{id}/network", tag = "network", params(("id" = String, Path,)),
    responses((status = 200, body = Network), (status = "default", body = Problem)))]
pub(crate) async fn show(
    Shared(app): Shared<AppState>,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    let view = app.engine().network(id).await?;
    let open = view.open.into_iter().map(|open| OpenConnection {
        to: open.to,
        age_ms: open.age_ms,
        sent_bytes: open.sent_bytes,
        received_bytes: open.received_bytes,
        awaits_ms: open.awaits_ms,
    });
    let traffic = view.traffic.top(usize::MAX).into_iter().map(|(host, totals)| HostTraffic {
        host,
        connections: totals.connections,
        sent_bytes: totals.sent_bytes,
        received_bytes: totals.received_bytes,
    });
    // What the guest sets depends on whether there is a certificate, not on which.
    let inside = guest::Network { ca: view.policy.reads_requests().then(String::new) };
    let set = environment(&inside).into_iter().map(|(name, value)| (name.to_owned(), value));
    Ok(extract::ok(&Network {
        policy: view.policy,
        secrets_withheld: view.secrets_withheld,
        environment: set.collect(),
        open: open.collect(),
        open_count: view.open_count,
        traffic: traffic.collect(),
    }))
}
