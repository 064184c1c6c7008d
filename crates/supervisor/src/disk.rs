//! A session's disk limit: kept by the file system where it can, else watched and said so.
//!
//! Where it is watched, programs inside aren't stopped: crossings are told, and what comes in as files from outside is
//! refused until there is room again.

use crate::{core::Core, start::blocking};
use snapshot::disk::{self, DiskError, DiskLayout};
use std::{
    path::PathBuf,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use wire::{
    Code, WireError,
    control::{Phase, SuperviseSpec},
    facts::Fact,
    files::FileRequest,
    layout::SessionLayout,
};

/// Between two looks at a disk of few files.
const EVERY: Duration = Duration::from_secs(2);
/// A look is followed by a rest this many times as long, so that looking takes no more than 2 % of the time.
const REST: u32 = 50;

/// Where the disk stands against its limit.
#[derive(Debug)]
pub struct DiskLimit {
    limit: Option<u64>,
    /// The file system refuses what is too much: there is nothing to watch.
    kept: AtomicBool,
    /// What was used when it was found to be over the limit; `None` while it isn't.
    over: std::sync::Mutex<Option<u64>>,
    /// One look at a time. When the last one ended, and how long it took.
    last: tokio::sync::Mutex<Option<(Instant, Duration)>>,
    /// There while the disk is over its limit: a crossing is told once, over any number of sandboxes.
    told: PathBuf,
}

impl DiskLimit {
    /// The limit in `spec`, as the session's last supervisor left it.
    pub fn new(spec: &SuperviseSpec, layout: &SessionLayout) -> DiskLimit {
        let limit = spec.resources.disk_bytes.map(|limit| limit.0);
        let told = layout.disk_over();
        let used = std::fs::read_to_string(&told).ok().map(|text| text.trim().parse().unwrap_or(0));
        DiskLimit {
            limit,
            kept: AtomicBool::new(false),
            over: std::sync::Mutex::new(limit.and(used)),
            last: tokio::sync::Mutex::default(),
            told,
        }
    }

    fn over(&self) -> Option<u64> {
        *self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches the size of a disk that nobody keeps within its limit, until the process ends.
pub async fn watch(core: Arc<Core>) {
    if core.disk.limit.is_none() || core.disk.kept.load(Ordering::Relaxed) {
        return;
    }
    loop {
        // A disk that nothing runs on stays as it is.
        let took = if core.phase() == Phase::Running { core.look_at_disk().await } else { Duration::ZERO };
        tokio::select! {
            () = tokio::time::sleep(rest_after(took)) => {}
            () = core.quit.cancelled() => return,
        }
    }
}

fn rest_after(took: Duration) -> Duration {
    EVERY.max(took * REST)
}

impl Core {
    /// Has the file system keep the disk within its limit where it can; before the disk is mounted.
    pub async fn limit_disk(&self) {
        let Some(limit) = self.spec.resources.disk_bytes else { return };
        let disk = DiskLayout::new(self.layout.disk());
        let name = self.layout.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
        match blocking(move || disk::set_project_quota(&disk, &name, limit)).await {
            Ok(Ok(())) => self.disk.kept.store(true, Ordering::Relaxed),
            Ok(Err(DiskError::Unsupported { reason })) => tracing::info!(reason, "the size of the disk is watched"),
            Ok(Err(error)) => tracing::warn!(%error, "the size of the disk is watched only"),
            Err(error) => tracing::warn!(%error, "the size of the disk is watched only"),
        }
    }

    /// Refuses what would make a disk that is over its limit larger still. What makes room is let through.
    ///
    /// # Errors
    /// [`Code::NoSpace`] with the limit and the use.
    pub async fn check_room(&self, request: &FileRequest) -> Result<(), WireError> {
        use FileRequest as F;
        let Some(limit) = self.disk.limit else { return Ok(()) };
        let adds = matches!(request, F::Write { .. } | F::Mkdir { .. } | F::Unpack { .. });
        if !adds || self.disk.over().is_none() {
            return Ok(());
        }
        // Somebody may have made room since: that is found out now, unless looking costs too much.
        let rested = self.disk.last.lock().await.is_none_or(|(ended, took)| ended.elapsed() >= took * REST);
        if rested {
            self.look_at_disk().await;
        }
        match self.disk.over() {
            None => Ok(()),
            Some(used) => {
                let text = format!(
                    "{}: the disk is over its limit: {used} bytes are used, {limit} are allowed (resources.disk_bytes); \
                     delete something first",
                    request.path()
                );
                Err(WireError::new(Code::NoSpace, text))
            }
        }
    }

    /// Measures the disk and tells where it crossed its limit. Returns how long that took.
    async fn look_at_disk(&self) -> Duration {
        let Some(limit) = self.disk.limit else { return Duration::ZERO };
        let mut last = self.disk.last.lock().await;
        let begun = Instant::now();
        let upper = self.layout.upper();
        let measured = blocking(move || disk::usage_bytes(&upper)).await;
        let took = begun.elapsed();
        *last = Some((Instant::now(), took));
        let used = match measured {
            Ok(Ok(used)) => used,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the disk can't be measured");
                return took;
            }
            Err(error) => {
                tracing::warn!(%error, "the disk can't be measured");
                return took;
            }
        };
        let was_over = {
            let mut over = self.disk.over.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *over, (used > limit).then_some(used)).is_some()
        };
        match (was_over, used > limit) {
            (false, true) => self.tell_disk(Fact::DiskOver { limit_bytes: limit, used_bytes: used }, Some(used)).await,
            (true, false) => self.tell_disk(Fact::DiskWithin { limit_bytes: limit, used_bytes: used }, None).await,
            _ => {}
        }
        took
    }

    /// Tells a crossing, and leaves word of it for the session's next supervisor.
    async fn tell_disk(&self, fact: Fact, over: Option<u64>) {
        self.record(fact);
        let told = self.disk.told.clone();
        let noted = blocking(move || match over {
            Some(used) => std::fs::write(told, used.to_string()),
            None => std::fs::remove_file(told),
        });
        if let Ok(Err(error)) = noted.await {
            tracing::warn!(%error, "a crossing of the disk's limit may be told twice");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_takes_a_fiftieth_of_the_time_at_most() {
        assert_eq!(rest_after(Duration::from_millis(1)), EVERY);
        assert_eq!(rest_after(Duration::from_millis(200)), Duration::from_secs(10));
        assert_eq!(rest_after(Duration::from_secs(3)), Duration::from_secs(150));
    }
}
