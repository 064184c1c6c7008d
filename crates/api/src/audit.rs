//! The list of accesses: who did what, when, with which outcome. Written in batches, so that no request waits for it.

use std::{sync::Arc, time::Duration};
use store::{AuditRow, Store};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Rows that may wait; beyond it requests wait for the store, so that no access goes unwritten.
const WAITING: usize = 8192;
/// Rows of one transaction.
const BATCH: usize = 512;
/// How long a row waits for company.
const DELAY: Duration = Duration::from_millis(500);

/// Takes rows; a task of its own writes them.
#[derive(Clone)]
pub(crate) struct AuditLog(mpsc::Sender<AuditRow>);

impl AuditLog {
    /// Starts the writer, which ends once every row is written after `stop`.
    pub(crate) fn start(store: Arc<dyn Store>, stop: CancellationToken) -> (AuditLog, tokio::task::JoinHandle<()>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (AuditLog(sender), tokio::spawn(write_rows(store, receiver, stop)))
    }

    pub(crate) async fn push(&self, row: AuditRow) {
        // The writer is gone only once the server has ended.
        let _ = self.0.send(row).await;
    }
}

async fn write_rows(store: Arc<dyn Store>, mut rows: mpsc::Receiver<AuditRow>, stop: CancellationToken) {
    loop {
        let mut batch = Vec::new();
        let stopped = tokio::select! {
            count = rows.recv_many(&mut batch, BATCH) => count == 0,
            () = stop.cancelled() => true,
        };
        if !stopped && batch.len() < BATCH {
            let _ = tokio::time::timeout(DELAY, stop.cancelled()).await;
        }
        while let Ok(row) = rows.try_recv() {
            batch.push(row);
        }
        if !batch.is_empty()
            && let Err(error) = store.append_audit(batch).await
        {
            tracing::error!(%error, "accesses could not be written to the audit list");
        }
        if stopped {
            return;
        }
    }
}
