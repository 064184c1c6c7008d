//! A snapshot of a session that lives: it stands still only for the capture.
//!
//! ```text
//!  runs: copy the disk ahead ─► still: memory, what changed on the disk since ─► runs: sync, describe
//! ```
//! What the snapshot holds lies in directories that nothing refers to before the server has committed it: a process that
//! dies on the way leaves only what the next start clears away.

use crate::{
    core::Core,
    lifecycle::{explain, image_error, not_now, prepare_image, runtime_error},
    saved::Saved,
    start::blocking,
};
use model::{ByteSize, Offset, TerminalState};
use snapshot::layer::{Capture, LayerError, LayerStore};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use wire::{
    Code, WireError,
    control::{Phase, SnapshotStart, Snapshotted},
    layout::{JournalName, SessionLayout},
    records::{ExecRecord, TerminalRecord},
};

/// How long the guest may take to fall silent.
const QUIESCE_LIMIT: Duration = Duration::from_secs(15);

/// What was taken while the sandbox stood still.
struct Taken {
    capture: Capture,
    memory: ByteSize,
    saved: Saved,
    execs: Vec<ExecRecord>,
    terminals: Vec<TerminalRecord>,
    journals: Vec<(JournalName, Offset)>,
}

/// While it lives, requests to the guest wait.
struct Still<'a>(&'a watch::Sender<bool>);

impl<'a> Still<'a> {
    fn begin(still: &'a watch::Sender<bool>) -> Still<'a> {
        still.send_replace(true);
        Still(still)
    }
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

impl Core {
    /// Waits until no snapshot holds the guest back.
    pub async fn moves_again(&self) {
        // The sender lives as long as this does.
        let _ = self.still.subscribe().wait_for(|still| !still).await;
    }

    /// Keeps memory and disk as they are at one moment; the sandbox goes on as it was, whatever becomes of it.
    ///
    /// # Errors
    /// Neither running nor paused; `Unsaveable` with process and file; what else went wrong. Nothing of it stays then.
    pub async fn snapshot(&self, wanted: SnapshotStart) -> Result<Snapshotted, WireError> {
        let _step = self.step.lock().await;
        let was_paused = match self.phase() {
            Phase::Running => false,
            Phase::Paused => true,
            phase => return Err(not_now("take a snapshot", phase)),
        };
        let capture = self.copy_ahead(&wanted).await?;
        faults::point("snapshot.ahead");
        if was_paused {
            // The guest has to be asked to fall silent.
            self.sandbox.thaw().await.map_err(runtime_error)?;
            self.set_phase(Phase::Running);
        }
        // What is asked from here on waits, so that what was asked before can end.
        let waits = Still::begin(&self.still);
        self.drain().await;
        let begun = Instant::now();
        let still = match self.link.quiesce(QUIESCE_LIMIT).await {
            Ok(()) => self.stand_still(&wanted, capture).await,
            Err(error) => {
                self.go_on(false).await;
                Err(error)
            }
        };
        drop(waits);
        let paused_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        if was_paused {
            self.sandbox.freeze().await.map_err(runtime_error)?;
            self.set_phase(Phase::Paused);
        }
        faults::point("snapshot.runs");
        let image = self.snapshot_image(&wanted);
        let kept = match still {
            Ok(still) => self.keep(&wanted, still, paused_ms).await,
            Err(error) if error.code == Code::NoSpace || was_paused || !wanted.memory => Err(error),
            // Asked only now: a look at all that is open takes its time, and most captures succeed.
            Err(error) => Err(explain(error, &self.unsaveable().await.unwrap_or_default())),
        };
        if kept.is_err() {
            let _ = blocking(move || std::fs::remove_dir_all(image)).await;
        }
        kept
    }

    fn snapshot_image(&self, wanted: &SnapshotStart) -> std::path::PathBuf {
        SessionLayout::new(&wanted.dir).image(self.state().generation)
    }

    /// Copies the disk while programs write to it; what changes meanwhile is copied again.
    async fn copy_ahead(&self, wanted: &SnapshotStart) -> Result<Capture, WireError> {
        let (wanted, upper) = (wanted.clone(), self.layout.upper());
        let ahead = blocking(move || {
            let store = LayerStore::open(&wanted.layers)?;
            let mut capture = Capture::begin(&store, wanted.layer, &upper, wanted.previous)?;
            capture.precopy()?;
            Ok(capture)
        });
        ahead.await?.map_err(layer_error)
    }

    /// Nothing runs: takes all that has to be of one moment, then lets it run on.
    async fn stand_still(&self, wanted: &SnapshotStart, capture: Capture) -> Result<Taken, WireError> {
        let taken = self.take(wanted, capture).await;
        self.go_on(true).await;
        taken
    }

    async fn take(&self, wanted: &SnapshotStart, mut capture: Capture) -> Result<Taken, WireError> {
        self.sandbox.pause().await.map_err(runtime_error)?;
        faults::point("snapshot.still");
        let image = self.snapshot_image(wanted);
        let memory = if wanted.memory {
            prepare_image(&image).await?;
            self.sandbox.capture(&image).await.map_err(runtime_error)?
        } else {
            ByteSize(0)
        };
        // After the memory: what the runtime still held of files is in them now.
        let capture = blocking(move || capture.freeze().map(|()| capture)).await?.map_err(layer_error)?;
        faults::point("snapshot.taken");
        let saved = self.save_works();
        let state = self.state();
        let execs = state.works.running().map(|(_, exec)| exec.as_it_stands(&state.journals)).collect();
        let running = state.terminals.all().filter(|terminal| terminal.record.state == TerminalState::Running);
        let terminals = running.map(|terminal| TerminalRecord { writer: None, ..terminal.record.clone() }).collect();
        let journals = state
            .journals
            .tails()
            .into_iter()
            .filter(|(name, _)| !matches!(name, JournalName::Facts | JournalName::Requests))
            .collect();
        drop(state);
        Ok(Taken { capture, memory, saved, execs, terminals, journals })
    }

    /// The sandbox runs again: makes what was taken whole, on the disk.
    async fn keep(&self, wanted: &SnapshotStart, still: Taken, paused_ms: u64) -> Result<Snapshotted, WireError> {
        let Taken { capture, memory, saved, execs, terminals, journals } = still;
        let generation = self.state().generation;
        let (from, into) = (self.layout.clone(), SessionLayout::new(&wanted.dir));
        let copied = blocking(move || {
            std::fs::create_dir_all(into.dir())?;
            journals.iter().try_for_each(|(name, tail)| journal::copy(&from.journal(name), &into.journal(name), *tail))
        });
        copied.await?.map_err(image_error)?;
        let image_bytes = match wanted.memory {
            true => self.describe_image(generation, saved, &self.snapshot_image(wanted)).await?,
            false => 0,
        };
        let session = self.state().session;
        let session = session.ok_or_else(|| WireError::new(Code::Invalid, "a sandbox of nobody's has no snapshots"))?;
        let at = crate::facts::now();
        let layer = blocking(move || capture.finish(session, at)).await?.map_err(layer_error)?.descriptor;
        faults::point("snapshot.kept");
        Ok(Snapshotted {
            generation,
            paused_ms,
            memory_bytes: memory.0,
            image_bytes,
            disk_bytes: layer.size_bytes,
            own_bytes: layer.own_bytes,
            execs,
            terminals,
        })
    }
}

fn layer_error(error: LayerError) -> WireError {
    let code = error.io().map_or(Code::Internal, Code::of_io);
    WireError::new(code, format!("keep the disk: {error}"))
}
