//! What a server forgets by and by: answers to old requests, and accesses of long ago.

use crate::AppState;
use std::time::Duration;
use store::RequestId;
use tokio_util::sync::CancellationToken;

/// How often it is done.
const EVERY: Duration = Duration::from_secs(60 * 60);
/// How long the list of accesses reaches back.
const ACCESSES_KEPT: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// How long a deleted session or snapshot says that it was, and why and when.
const TOMBSTONES_KEPT: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Forgets now and then, until `stop`.
pub(crate) async fn forget_now_and_then(app: AppState, stop: CancellationToken) {
    loop {
        let before = |kept: Duration| {
            let kept = i64::try_from(kept.as_millis()).unwrap_or(i64::MAX);
            model::Timestamp(crate::now().0.saturating_sub(kept))
        };
        let tombstones = app.store().purge_deleted(before(TOMBSTONES_KEPT)).await;
        let results = [
            app.store().purge_requests(before(RequestId::KEPT)).await.map(drop),
            app.store().purge_audit(before(ACCESSES_KEPT)).await.map(drop),
            tombstones.map(drop),
            app.store().purge_snapshots(before(TOMBSTONES_KEPT)).await.map(drop),
        ];
        for error in results.into_iter().filter_map(Result::err) {
            tracing::warn!(%error, "old entries of the store stay for now");
        }
        if tokio::time::timeout(EVERY, stop.cancelled()).await.is_ok() {
            return;
        }
    }
}
