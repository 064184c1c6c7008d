//! Pause, capture, thaw, claim, shut down: one step at a time, each undone where it fails.
//!
//! ```text
//!  starting ─► running ◄──unpause── paused (frozen)
//!                │ ▲ └────pause──────►
//!         capture│ │abort
//!                ▼ │
//!             captured ──commit──► confirming (frozen) ──ok──► ended
//!                ▲                    │ thaw (a wake, or the image did not restore)
//!                └── running ◄────────┘
//! ```

use crate::{core::Core, saved::Saved, start::blocking};
use model::{EndReason, Generation, SessionId};
use runtime::{RuntimeError, Sandbox};
use snapshot::{
    disk,
    image::{ImageDescriptor, ImageError, Needs},
};
use std::{path::Path, sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;
use wire::{
    Code, WireError,
    control::{Captured, NetworkSpec, Phase},
    facts::Fact,
    guest::{Identity, Reply, Request},
    records::Unsaveable,
};

/// How long what is under way may take before a capture goes ahead without it.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);
/// How long the guest may take to fall silent.
const QUIESCE_LIMIT: Duration = Duration::from_secs(15);

/// A refusal by the disk while an image is written, as it is told.
pub fn image_error(error: std::io::Error) -> WireError {
    WireError::new(Code::of_io(&error), format!("write the image: {error}"))
}

/// Makes an empty directory for an image; what an attempt that was cut short has left there goes.
pub async fn prepare_image(image: &Path) -> Result<(), WireError> {
    let dir = image.to_owned();
    let made = blocking(move || {
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir)
    });
    made.await?.map_err(image_error)
}

/// A runtime's failure, as it is told.
pub fn runtime_error(error: RuntimeError) -> WireError {
    let text = error.to_string();
    // All that the runtime tells of a full disk are the kernel's words for it.
    let code = if text.contains("no space left on device") { Code::NoSpace } else { Code::Internal };
    WireError::new(code, text)
}

/// A step that doesn't fit to how the sandbox stands.
pub fn wrong_phase(what: &str, phase: Phase) -> WireError {
    WireError::new(Code::Busy, format!("can't {what}: the sandbox is {phase:?}").to_lowercase())
}

/// The same for a step that only a sandbox can take that lives: where it has ended, trying again is no use.
pub fn not_now(what: &str, phase: Phase) -> WireError {
    let code = if phase == Phase::Ended { Code::SandboxGone } else { Code::Busy };
    WireError { code, ..wrong_phase(what, phase) }
}

impl Core {
    /// Freezes the sandbox in place.
    ///
    /// # Errors
    /// It isn't running, or the machine can't freeze it.
    pub async fn pause(&self) -> Result<(), WireError> {
        let _step = self.step.lock().await;
        match self.phase() {
            Phase::Paused => return Ok(()),
            Phase::Running => {}
            phase => return Err(not_now("pause", phase)),
        }
        self.sandbox.freeze().await.map_err(runtime_error)?;
        self.set_phase(Phase::Paused);
        Ok(())
    }

    /// Undoes [`Self::pause`].
    ///
    /// # Errors
    /// It isn't paused, or the machine can't thaw it.
    pub async fn unpause(&self) -> Result<(), WireError> {
        let _step = self.step.lock().await;
        match self.phase() {
            Phase::Running => return Ok(()),
            Phase::Paused => {}
            phase => return Err(not_now("unpause", phase)),
        }
        self.sandbox.thaw().await.map_err(runtime_error)?;
        self.set_phase(Phase::Running);
        self.tell_network_late().await;
        Ok(())
    }

    /// What the guest could not be told of its network while it stood still.
    pub async fn tell_network_late(&self) {
        if let Err(error) = self.tell_network().await {
            tracing::warn!(%error, "the guest does not know of a change of its network");
        }
    }

    /// Makes a pooled sandbox the session's.
    ///
    /// # Errors
    /// It isn't a pooled one, or doesn't answer.
    pub async fn claim(&self, session: SessionId, identity: Identity, network: Option<NetworkSpec>) -> Result<(), WireError> {
        let _step = self.step.lock().await;
        if self.state().session == Some(session) && self.phase() == Phase::Running {
            return Ok(());
        }
        if self.state().session.is_some() || self.phase() != Phase::Paused {
            return Err(wrong_phase("claim", self.phase()));
        }
        self.sandbox.thaw().await.map_err(runtime_error)?;
        {
            let mut state = self.state();
            state.session = Some(session);
            state.identity = Some(identity.clone());
        }
        if let Some(network) = &network {
            self.apply_network(network);
        }
        self.greet(Some(identity), None).await?;
        self.set_phase(Phase::Running);
        self.tell_network_late().await;
        Ok(())
    }

    /// What can't be saved as things stand.
    ///
    /// # Errors
    /// The guest can't be asked.
    pub async fn unsaveable(&self) -> Result<Vec<Unsaveable>, WireError> {
        let asked = tokio::time::timeout(QUIESCE_LIMIT, self.link.request(Request::Unsaveable)).await;
        match asked.map_err(|_| WireError::new(Code::Unresponsive, "the guest doesn't say what can't be saved"))?? {
            Reply::Unsaveable { items } => Ok(items),
            _ => Err(WireError::new(Code::Protocol, "the guest answered with something else")),
        }
    }

    /// Writes memory and disk to storage; the sandbox stays paused. On any failure it runs on.
    ///
    /// # Errors
    /// `Unsaveable` with process and file, or what else went wrong.
    pub async fn capture(&self, image: &Path) -> Result<Captured, WireError> {
        let _step = self.step.lock().await;
        match self.phase() {
            Phase::Running => {}
            Phase::Paused => {
                self.sandbox.thaw().await.map_err(runtime_error)?;
                self.set_phase(Phase::Running);
            }
            phase => return Err(not_now("hibernate", phase)),
        }
        self.drain().await;
        if let Err(error) = self.link.quiesce(QUIESCE_LIMIT).await {
            self.go_on(false).await;
            return Err(error);
        }
        faults::point("capture.silent");
        let captured = async {
            self.sandbox.pause().await.map_err(runtime_error)?;
            faults::point("capture.paused");
            let generation = self.state().generation;
            self.write_image(self.sandbox.as_ref(), generation, None, image).await
        };
        match captured.await {
            Ok(captured) => {
                self.set_phase(Phase::Captured);
                faults::point("capture.done");
                Ok(captured)
            }
            Err(error) => {
                self.go_on(true).await;
                let image = image.to_owned();
                let _ = blocking(move || std::fs::remove_dir_all(image)).await;
                // Asked only now: a look at all that is open takes its time, and most captures succeed.
                let obstacles =
                    if error.code == Code::NoSpace { Vec::new() } else { self.unsaveable().await.unwrap_or_default() };
                Err(explain(error, &obstacles))
            }
        }
    }

    /// Lets what is under way come to its end.
    pub async fn drain(&self) {
        let quiet = async {
            while self.link.requests_under_way() > 0 || self.link.bytes_under_way() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let _ = tokio::time::timeout(DRAIN_LIMIT, quiet).await;
    }

    /// After a capture that failed or was taken back.
    pub async fn go_on(&self, paused: bool) {
        if paused && let Err(error) = self.sandbox.resume().await {
            tracing::error!(%error, "the sandbox can't be resumed");
        }
        if let Err(error) = self.greet(None, None).await {
            tracing::error!(%error, "the guest does not answer after a capture that failed");
        }
        self.set_phase(Phase::Running);
        self.tell_network_late().await;
    }

    /// Writes the memory of a paused sandbox, which is that of `generation`, as a whole image. `works` says what runs in
    /// it, where this supervisor doesn't.
    pub async fn write_image(
        &self,
        sandbox: &dyn Sandbox,
        generation: Generation,
        works: Option<Saved>,
        image: &Path,
    ) -> Result<Captured, WireError> {
        prepare_image(image).await?;
        let upper = self.layout.upper();
        let (memory, synced) = tokio::join!(sandbox.capture(image), blocking(move || disk::sync(&upper)));
        faults::file("image.memory").map_err(image_error)?;
        let memory = memory.map_err(runtime_error)?;
        synced?.map_err(|e| WireError::new(Code::Internal, e.to_string()))?;

        let saved = works.unwrap_or_else(|| self.save_works());
        self.record_traffic();
        {
            let mut state = self.state();
            state.journals.sync_all()?;
            state.facts.sync().map_err(|e| WireError::new(Code::Internal, format!("sync the facts: {e}")))?;
        }
        let image_bytes = self.describe_image(generation, saved, image).await?;
        Ok(Captured { generation, memory_bytes: memory.0, image_bytes })
    }

    /// Makes a memory that was written a whole image, on the disk: what runs in it, and what it is. Returns its size.
    pub async fn describe_image(&self, generation: Generation, saved: Saved, image: &Path) -> Result<u64, WireError> {
        let session = self.state().session;
        let (pins, lower, dir) = (self.spec.pins.clone(), self.spec.lower.clone(), image.to_owned());
        let written = blocking(move || -> Result<u64, WireError> {
            let described = |e: ImageError| match e {
                ImageError::Io { source, .. } => image_error(source),
                other => WireError::new(Code::Internal, other.to_string()),
            };
            saved.write(&dir).map_err(image_error)?;
            let needs = Needs {
                runsc_hash: &pins.runsc,
                runsc_version: &pins.runsc_version,
                guest_hash: &pins.guest,
                template_hash: &pins.template,
            };
            let session = session.ok_or_else(|| WireError::new(Code::Invalid, "a sandbox of nobody's can't be hibernated"))?;
            let descriptor =
                ImageDescriptor::of(&dir, session, generation, crate::facts::now(), needs, lower).map_err(described)?;
            descriptor.write(&dir).map_err(described)?;
            sync_parents(&dir).map_err(image_error)?;
            Ok(descriptor.size_bytes())
        });
        written.await?
    }

    /// The store knows that the session sleeps. What follows happens in the background.
    ///
    /// # Errors
    /// Nothing was captured, or the sandbox can't be frozen.
    pub async fn commit_hibernate(self: &Arc<Self>, confirm: bool) -> Result<(), WireError> {
        let _step = self.step.lock().await;
        match self.phase() {
            Phase::Captured => {}
            Phase::Confirming => return Ok(()),
            phase => return Err(wrong_phase("commit", phase)),
        }
        self.sandbox.freeze().await.map_err(runtime_error)?;
        // Nobody outside waits for one that sleeps.
        self.end_connections();
        self.set_phase(Phase::Confirming);
        faults::point("hibernate.frozen");
        let interrupt = CancellationToken::new();
        *self.interrupt_confirm.lock().expect("nothing panics with the token") = interrupt.clone();
        tokio::spawn(crate::confirm::confirm(self.clone(), confirm, interrupt));
        Ok(())
    }

    /// Goes on as if nothing had been captured.
    ///
    /// # Errors
    /// The store already knows: then only a thaw brings it back.
    pub async fn abort_hibernate(&self) -> Result<(), WireError> {
        let _step = self.step.lock().await;
        match self.phase() {
            Phase::Running => Ok(()),
            Phase::Captured => {
                self.go_on(true).await;
                Ok(())
            }
            phase => Err(wrong_phase("abort", phase)),
        }
    }

    /// A wake of a sandbox that still lies frozen.
    ///
    /// # Errors
    /// It is gone, or doesn't answer.
    pub async fn thaw(&self, generation: Generation, gap_ms: Option<u64>) -> Result<(), WireError> {
        self.interrupt_confirm.lock().expect("nothing panics with the token").cancel();
        let _step = self.step.lock().await;
        match self.phase() {
            Phase::Confirming => self.sandbox.thaw().await.map_err(runtime_error)?,
            Phase::Captured => {}
            Phase::Running if self.state().generation == generation => return Ok(()),
            phase => return Err(wrong_phase("thaw", phase)),
        }
        if let Err(error) = self.sandbox.resume().await {
            let mut told = runtime_error(error);
            if told.message.contains("connection refused") {
                // It was killed where it lay, before anybody could ask it to run on. As one that was just ending, it is to
                // be restored; `SandboxGone` would not tell this from an end after programs had run.
                told.code = Code::Busy;
            }
            return Err(told);
        }
        {
            let mut state = self.state();
            state.generation = generation;
            state.gap_ms = gap_ms;
            state.facts.set_generation(generation);
            state.reset = Default::default();
        }
        self.end_connections();
        self.greet(None, None).await?;
        self.set_phase(Phase::Running);
        self.tell_network_late().await;
        // A wake, also of one that was not frozen yet.
        self.quiet().run(tokio::time::Instant::now());
        Ok(())
    }

    /// Ends the sandbox by intent.
    pub async fn shut_down(&self, reason: EndReason, grace_ms: u64) {
        self.interrupt_confirm.lock().expect("nothing panics with the token").cancel();
        let _step = self.step.lock().await;
        let phase = self.phase();
        if phase == Phase::Ended {
            return;
        }
        self.state().expected_end = Some((reason, "asked for".to_owned()));
        if phase == Phase::Running && grace_ms > 0 {
            let limit = Duration::from_millis(grace_ms) + Duration::from_secs(5);
            let asked = tokio::time::timeout(limit, self.link.request(Request::Shutdown { grace_ms })).await;
            if !matches!(asked, Ok(Ok(_))) {
                tracing::warn!("the guest did not end its programs in time; the sandbox is killed");
            }
        }
        self.end(reason, "asked for").await;
    }

    /// The session sleeps on storage: takes the sandbox away, keeping what ran for the next one.
    pub async fn end_hibernated(&self, detail: &str) {
        let _step = self.step.lock().await;
        // A thaw was faster.
        if self.phase() != Phase::Confirming {
            return;
        }
        self.state().expected_end = Some((EndReason::Asked, "hibernated".to_owned()));
        self.record(Fact::Confirmed { ok: true, detail: detail.to_owned() });
        self.take_away().await;
    }
}

/// Where the memory can't be saved because of what programs hold, says so.
pub fn explain(error: WireError, obstacles: &[Unsaveable]) -> WireError {
    if !obstacles.is_empty() {
        let list: Vec<String> = obstacles.iter().map(ToString::to_string).collect();
        return WireError::new(Code::Unsaveable, format!("the memory can't be saved while {}", list.join("; ")));
    }
    // [M] gVisor 20240729 can be left with a directory that was watched (inotify) and that it can't save ever after.
    let deleted = error.message.split_once("gofer.dentry(\"").and_then(|(_, rest)| rest.split_once("\").beforeSave: deleted"));
    match deleted {
        Some((path, _)) => {
            let text =
                format!("the memory can't be saved: a program watched /{path} (inotify), and gVisor can't save it any more");
            WireError::new(Code::Unsaveable, text)
        }
        None => error,
    }
}

fn sync_parents(dir: &Path) -> std::io::Result<()> {
    for dir in dir.ancestors().take(3) {
        std::fs::File::open(dir)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_was_watched_and_can_not_be_saved_is_named() {
        let said =
            "save the memory failed: encoding error: gofer.dentry(\"root/a/b\").beforeSave: deleted and invalidated dentries";
        let told = explain(WireError::new(Code::Internal, said), &[]);
        assert_eq!(told.code, Code::Unsaveable);
        assert!(told.message.contains("/root/a/b"), "{told}");
        let other = WireError::new(Code::Internal, "no space");
        assert_eq!(explain(other.clone(), &[]), other);
    }
}
