//! What is measured. Rows that share their set-up are measured together.

mod create;
mod exec;
mod lifecycle;
mod network;
mod output;
mod size;
mod sleep;
mod snapshots;
mod storage;
mod terminal;

use crate::report::Row;
use anyhow::Result;

/// Rows that are measured in one go.
pub struct Group {
    pub ids: &'static [&'static str],
    pub run: fn() -> Result<Vec<Row>>,
}

/// All rows, in the order of the table.
pub const GROUPS: &[Group] = &[
    Group { ids: &["create-pooled", "create-pooled-p99", "create-unpooled"], run: create::create },
    Group { ids: &["exec-true", "probe"], run: exec::exec },
    Group { ids: &["hibernate-python", "wake-python"], run: sleep::python },
    Group { ids: &["hibernate-random", "wake-random"], run: sleep::random },
    Group { ids: &["wake-in-grace"], run: sleep::in_grace },
    Group { ids: &["output-raw", "output-live"], run: output::output },
    Group { ids: &["attach-10k"], run: terminal::attach },
    Group { ids: &["supervisor-rss"], run: size::supervisor },
    Group { ids: &["server-1000-rss", "server-1000-ls"], run: size::server },
    Group { ids: &["template-host-time", "template-host-disk"], run: size::template_host },
    Group { ids: &["exec-100-hibernated"], run: lifecycle::shared_wake },
    Group { ids: &["server-10k-start", "server-10k-rss", "server-10k-list", "server-10k-idle"], run: lifecycle::ten_thousand },
    Group { ids: &["idle-50", "restart-50"], run: lifecycle::fifty_running },
    Group { ids: &["snapshot-paused", "snapshot-paused-1g"], run: snapshots::live },
    Group { ids: &["fork-10", "fork-10-disk"], run: snapshots::forks },
    Group { ids: &["pack", "unpack"], run: storage::streams },
    Group { ids: &["store-20-forks"], run: storage::twenty_forks },
    Group { ids: &["pack-vs-restic", "restore-vs-restic", "size-vs-restic"], run: storage::restic },
    Group { ids: &["pack-vs-borg", "restore-vs-borg", "size-vs-borg"], run: storage::borg },
    Group { ids: &["cache-after-a-day"], run: storage::cache },
    Group { ids: &["egress-download", "egress-download-8", "egress-download-tls"], run: network::downloads },
    Group { ids: &["egress-connect"], run: network::connections },
    Group { ids: &["egress-500-idle"], run: network::idle },
    Group { ids: &["preview-request"], run: network::previews },
];
