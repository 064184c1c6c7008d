//! Booted, frozen sandboxes that wait for a session: what makes a create quick.
//!
//! Each already lies in the directory of a session to be, under that session's id, so that a claim moves nothing. None
//! of them is in the store; a directory that no session owns is therefore the rest of a pool, and is removed at the next
//! start.

use crate::{
    create, ending,
    inner::{Inner, blocking},
    launch, network,
    programs::Base,
    session::Live,
};
use model::{
    EndReason, Generation, Resources, SessionId,
    network::{Policy, Verdict},
};
use std::{
    fs,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    sync::{Notify, Semaphore},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use wire::control::{Start, SuperviseSpec};

/// The pool is filled again this long after the latest create, so as not to compete with a burst of them.
const CALM: Duration = Duration::from_millis(300);
/// How long after a failure the next sandbox is tried.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// How often a boot that is to be broken off is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Below this much free memory there is no pool.
const MIN_FREE_BYTES: u64 = 1 << 30;

/// A sandbox that is nobody's yet.
pub(crate) struct Pooled {
    pub id: SessionId,
    pub live: Arc<Live>,
    /// What it was booted from.
    made_of: wire::control::Pins,
}

/// The pool.
#[derive(Default)]
pub(crate) struct Pool {
    ready: Mutex<Vec<Pooled>>,
    /// When a session was last created.
    latest: Mutex<Option<Instant>>,
    changed: Notify,
    /// Cancelled once every sandbox of it has ended.
    pub emptied: CancellationToken,
}

impl Pool {
    /// Notes that a session is being created.
    pub(crate) fn created(&self) {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.changed.notify_one();
    }

    /// A sandbox made of exactly this.
    pub(crate) fn take(&self, base: &Base) -> Option<Pooled> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let at = ready.iter().position(|pooled| pooled.made_of == base.pins)?;
        Some(ready.remove(at))
    }

    /// Puts one back that was taken for nothing.
    pub(crate) fn give_back(&self, pooled: Option<Pooled>) {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).extend(pooled);
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn take_all(&self) -> Vec<Pooled> {
        std::mem::take(&mut *self.ready.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn calm_at(&self) -> Option<Instant> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).map(|latest| latest + CALM)
    }
}

/// Keeps the pool filled until the engine closes, then ends what is in it.
pub(crate) async fn keep(inner: Arc<Inner>) {
    fill(&inner).await;
    let all = inner.pool.take_all().into_iter().map(|pooled| discard(&inner, pooled.id));
    futures_util::future::join_all(all).await;
    inner.pool.emptied.cancel();
}

/// Fills it, until no new work is taken. What is being booted then is ended.
async fn fill(inner: &Arc<Inner>) {
    while !inner.draining.is_cancelled() {
        let wanted = if has_room() { inner.config.pool_size } else { 0 };
        if inner.pool.len() >= wanted {
            tokio::select! {
                () = inner.pool.changed.notified() => {}
                () = inner.draining.cancelled() => return,
            }
        }
        if let Some(calm) = inner.pool.calm_at().filter(|calm| *calm > Instant::now()) {
            tokio::select! {
                () = tokio::time::sleep_until(calm) => {}
                () = inner.draining.cancelled() => return,
            }
            continue;
        }
        if inner.pool.len() < wanted
            && let Err(error) = boot(inner).await
        {
            tracing::warn!(%error, "no sandbox for the pool");
            tokio::select! {
                () = tokio::time::sleep(AFTER_FAILURE) => {}
                () = inner.pool.changed.notified() => {}
                () = inner.draining.cancelled() => return,
            }
        }
    }
}

async fn boot(inner: &Arc<Inner>) -> Result<(), crate::Error> {
    let id = SessionId::new();
    let layout = inner.layout(id);
    let (inner_, layout_) = (inner.clone(), layout.clone());
    let base = blocking(move || {
        let base = inner_.programs.present(&inner_.config.default_template)?;
        create::make_dir(&layout_)?;
        Ok::<_, crate::Error>(base)
    })
    .await
    .flatten()?;
    // Those of an older template, guest or runtime wait for nobody.
    let stale: Vec<Pooled> = {
        let mut ready = inner.pool.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let (fresh, stale) = std::mem::take(&mut *ready).into_iter().partition(|pooled| pooled.made_of == base.pins);
        *ready = fresh;
        stale
    };
    for pooled in stale {
        discard(inner, pooled.id).await;
    }
    let made_of = base.pins.clone();
    let spec = SuperviseSpec {
        dir: layout.dir().to_owned(),
        session: None,
        generation: Generation::FIRST,
        start: Start::Boot,
        gap_ms: None,
        lower: base.lower,
        runtime: base.runtime,
        resources: Resources::default(),
        keep_output_bytes: inner.config.keep_output,
        identity: Some(launch::blank_identity(id)),
        pins: base.pins,
        // Nobody's programs run in it, and nothing is reached before it is somebody's.
        network: Some(network::spec(inner, &Policy { default: Verdict::Deny, ..Policy::default() })),
    };
    let launched = {
        let alone = Arc::new(Semaphore::new(1));
        let mut launching = std::pin::pin!(launch::launch(inner, &alone, spec));
        loop {
            tokio::select! {
                launched = &mut launching => break launched,
                () = inner.draining.cancelled() => {}
            }
            // Nobody waits for it any more: it need not come to life first. What begins only now is ended at the next look.
            if let Err(error) = ending::clear_the_way(&layout, inner.programs.runsc_state()).await {
                tracing::warn!(%id, %error, "a sandbox that is being booted for the pool can't be ended yet");
            }
            tokio::select! {
                launched = &mut launching => break launched,
                () = tokio::time::sleep(LOOK_AGAIN) => {}
            }
        }
    };
    match launched {
        Ok(live) => {
            inner.pool.give_back(Some(Pooled { id, live, made_of }));
            Ok(())
        }
        Err(error) => {
            discard(inner, id).await;
            Err(error)
        }
    }
}

/// Ends a sandbox that no session owns, and removes its directory.
pub(crate) async fn discard(inner: &Arc<Inner>, id: SessionId) {
    let layout = inner.layout(id);
    let ended = ending::end_sandbox(&layout, inner.programs.runsc_state(), EndReason::Asked, Duration::ZERO).await;
    let removed = match ended {
        Ok(()) => blocking(move || ending::remove_session(&layout).map_err(crate::Error::internal)).await.flatten(),
        Err(error) => Err(error),
    };
    if let Err(error) = removed {
        tracing::warn!(%id, %error, "the rest of a pooled sandbox stays");
    }
}

/// False where memory is short.
fn has_room() -> bool {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.is_none_or(|kib| kib.saturating_mul(1024) >= MIN_FREE_BYTES)
}
