//! What every database behind [`crate::Store`] must do: the same checks for each of them.
//!
//! Each check takes an empty store and panics where a promise is broken. [`conformance_tests!`](crate::conformance_tests)
//! makes one test of each.
#![allow(clippy::unwrap_used)] // A check fails by panicking.

mod access;
mod sessions;
mod snapshots;
mod work;

pub use access::*;
pub use sessions::*;
pub use snapshots::*;
pub use work::*;

use crate::{NewEvent, SessionChange, SessionRow, Store};
use model::{Actor, EventType, Runtime, SessionId, Timestamp};
use serde_json::json;
use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::Poll,
};

/// Makes a `#[tokio::test]` of each check. `$make` is an async function without arguments that
/// returns an empty store (`Arc<dyn Store>`) and something that is kept alive as long as the store.
#[macro_export]
macro_rules! conformance_tests {
    ($make:path) => {
        $crate::conformance_tests!(@each $make:
            sessions_read_back_as_written, unknown_things_are_none, a_key_leads_to_one_session,
            one_of_many_creators_wins, a_freed_key_goes_to_the_next_in_one_commit, a_stale_revision_is_refused_whole,
            commits_are_all_or_nothing, concurrent_commits_lose_nothing, lists_filter, lists_page_stably,
            bad_cursors_are_refused, ids_are_found_by_their_ends, scans_see_all_that_live, tombstones_are_purged,
            events_are_numbered_without_holes, events_of_all_have_one_order, operations_read_back,
            execs_read_back, exec_keys_are_unique_in_their_session, work_of_sessions_is_apart, terminals_read_back,
            snapshots_read_back_as_written, a_stale_snapshot_is_refused_whole, a_name_leads_to_one_snapshot,
            snapshots_are_listed_by_pages, snapshot_ids_are_found_by_their_ends, snapshots_outlive_their_session,
            snapshots_fall_due, snapshot_scans_see_all_that_are_there, snapshot_tombstones_are_purged,
            tokens_read_back, secrets_read_back, requests_are_answered_once, requests_of_a_dead_server_are_told_apart,
            audit_is_newest_first, meta_is_kept);
    };
    (@each $make:path: $($check:ident),+ $(,)?) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $check() {
            let (store, _kept) = $make().await;
            $crate::conformance::$check(store).await;
        }
    )+};
}

type Under = Arc<dyn Store>;

const NOW: Timestamp = Timestamp(1_700_000_000_000);

fn new_row() -> SessionRow {
    SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", NOW)
}

async fn insert(store: &Under, mut row: SessionRow) -> SessionRow {
    let committed = store.commit(SessionChange::new(row.clone())).await.unwrap();
    row.was_committed(&committed);
    row
}

fn note(text: &str) -> NewEvent {
    NewEvent { at: NOW, kind: EventType::NOTE, actor: Actor::system(), operation_id: None, data: json!({ "text": text }) }
}

/// Drives all futures at once, on whatever runtime the caller has.
async fn all_of<T>(futures: Vec<impl Future<Output = T>>) -> Vec<T> {
    let mut running: Vec<Pin<Box<_>>> = futures.into_iter().map(Box::pin).collect();
    let mut results: Vec<Option<T>> = running.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, result) in running.iter_mut().zip(&mut results) {
            if result.is_none()
                && let Poll::Ready(value) = future.as_mut().poll(cx)
            {
                *result = Some(value);
            }
        }
        if results.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    results.into_iter().flatten().collect()
}
