//! From a specification to a running sandbox, and from there to the end of the process.

use crate::{
    core::{Core, Now},
    death, disk as disk_limit,
    link::{Gone, Incoming},
    mark::{self, MarkLock},
    memory,
    recapture::{self, TakenOver},
    saved::Saved,
};
use anyhow::Context;
use model::{EndReason, Generation};
use runtime::{Channel, SandboxSpec};
use runtime_gvisor::{CgroupSupport, GvisorSandbox, Runsc};
use snapshot::{
    disk::{self, DiskLayout},
    image::STARTED,
};
use std::{fs::File, io::Write, path::Path, process::ExitCode, sync::Arc, time::Duration};
use wire::{
    Code, WireError,
    control::{Phase, Start, SuperviseSpec},
    facts::Fact,
    guest::{GUEST_PATH, Hello, HelloReply, Identity, PROTOCOL, ResetConnections, StreamAt},
    layout::SessionLayout,
};

/// Longest wait for a guest's first word: a restore of many GiB on a busy machine.
const HELLO_LIMIT: Duration = Duration::from_secs(120);
/// After so many seconds what has gone over the network is written down.
const TRAFFIC_TICKS: u64 = 60;
/// How long the socket stays after the end, so that whoever asks gets an answer.
const LINGER: Duration = Duration::from_secs(2);

/// Runs one supervisor.
///
/// # Errors
/// The session can't be taken; nothing was started then.
pub async fn supervise(spec: SuperviseSpec, ready: Option<File>) -> anyhow::Result<ExitCode> {
    death::hear_of_it();
    let layout = SessionLayout::new(&spec.dir);
    let name = container_name(&layout, spec.generation);
    let takes_over = match &spec.start {
        Start::Recapture { from, .. } => Some(from.clone()),
        Start::Boot | Start::Restore { .. } => {
            // Of terminals that are gone.
            let _ = std::fs::remove_dir_all(layout.run().join("notes"));
            None
        }
    };
    let mark = MarkLock::take(&layout, spec.generation, name.clone(), takes_over).context("take the session")?;
    let sandbox = Arc::new(gvisor(&spec, &layout, name));
    let core = Core::new(spec, sandbox).context("open the facts journal")?;
    let listener = mark::listen(&layout).context("listen on the session's socket")?;
    if let Some(mut ready) = ready {
        // Whoever waited may be gone; the session is run all the same.
        let _ = ready.write_all(b"ok\n");
    }
    tokio::spawn(crate::control::serve(core.clone(), listener));
    tokio::spawn(sync_regularly(core.clone()));
    tokio::spawn(run(core.clone(), mark));
    core.quit.cancelled().await;
    tokio::time::sleep(LINGER).await;
    let _ = std::fs::remove_file(layout.socket());
    Ok(ExitCode::SUCCESS)
}

/// The runtime's name for a session's sandbox: from the directory, which is the session's id.
fn container_name(layout: &SessionLayout, generation: Generation) -> String {
    let id = layout.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
    format!("dm-{id}-{generation}")
}

/// The sandbox of this name, on the session's disk.
pub fn gvisor(spec: &SuperviseSpec, layout: &SessionLayout, name: String) -> GvisorSandbox {
    let runsc = Runsc {
        program: spec.runtime.runsc.clone(),
        state_dir: spec.runtime.state_dir.clone(),
        platform: spec.runtime.platform.clone(),
    };
    let sandbox_spec = SandboxSpec {
        name,
        root: layout.root(),
        bundle: layout.bundle(),
        log: layout.run().join("sandbox.log"),
        argv: vec![GUEST_PATH.to_owned()],
        hostname: spec.identity.as_ref().map_or("dormouse", |identity| &identity.hostname).to_owned(),
        resources: spec.resources,
    };
    GvisorSandbox::new(runsc, sandbox_spec, CgroupSupport::detect())
}

/// Starts the sandbox and stays with it until it ends.
async fn run(core: Arc<Core>, mut mark: MarkLock) {
    let step = core.step.lock().await;
    let started = start(&core).await;
    drop(step);
    if let Err(error) = started {
        tracing::error!(%error, "the sandbox did not start");
        core.now.send_modify(|now: &mut Now| now.failure = Some(error));
        return core.end(EndReason::StartFailed, "the sandbox did not start").await;
    }
    let pids = core.sandbox.pids();
    let _ = mark.note(core.spec.generation, pids.clone());
    if let Some(limit) = core.spec.resources.memory_bytes {
        tokio::spawn(memory::watch(core.clone(), limit));
    }
    tokio::spawn(disk_limit::watch(core.clone()));
    give_back_start_up_pages();
    let mut gone = core.link.watch_gone();
    let why = gone.wait_for(Option::is_some).await.map(|gone| gone.clone());
    let Ok(Some(why)) = why else { return };
    core.died(why, &pids).await;
}

async fn start(core: &Arc<Core>) -> Result<(), WireError> {
    core.limit_disk().await;
    if let Start::Recapture { from, execs, terminals, .. } = &core.spec.start {
        recapture::capture(core, from, TakenOver { execs: execs.clone(), terminals: terminals.clone() }).await?;
    }
    let disk = DiskLayout::new(core.layout.disk());
    let (lower, root) = (core.spec.lower.clone(), core.layout.root());
    // That of a dead supervisor is still there, and is the same.
    let keep = matches!(core.spec.start, Start::Recapture { .. });
    blocking(move || if keep && disk::is_mounted(&root)? { Ok(()) } else { disk.mount(&lower, &root) })
        .await?
        .map_err(|e: disk::DiskError| WireError::new(Code::Internal, e.to_string()))?;
    faults::point("start.mounted");
    let runtime = |e: runtime::RuntimeError| WireError::new(Code::Internal, e.to_string());
    let image = match &core.spec.start {
        Start::Boot => None,
        Start::Restore { image } => Some(image.clone()),
        Start::Recapture { from, .. } => Some(core.layout.image(from.generation)),
    };
    let (channel, saved) = match &image {
        None => (core.sandbox.boot().await.map_err(runtime)?, None),
        Some(image) => {
            let saved = Saved::read(image).map_err(|e| WireError::new(Code::Internal, format!("read the image's works: {e}")))?;
            mark_started(image).map_err(|e| WireError::new(Code::Internal, format!("mark the image as used: {e}")))?;
            (core.sandbox.restore(image).await.map_err(runtime)?, Some(saved))
        }
    };
    faults::point("start.alive");
    if keep {
        faults::point("recapture.restored");
    }
    connect(core, channel)?;
    let identity = core.state().identity.clone();
    core.greet(identity, saved).await?;
    faults::point("start.greeted");
    // One that waits for a session, or was paused when it was taken over.
    if core.spec.session.is_none() || matches!(core.spec.start, Start::Recapture { paused: true, .. }) {
        core.sandbox.freeze().await.map_err(runtime)?;
        core.set_phase(Phase::Paused);
    } else {
        core.set_phase(Phase::Running);
        core.tell_network_late().await;
    }
    Ok(())
}

fn connect(core: &Arc<Core>, channel: Channel) -> Result<(), WireError> {
    let incoming: Arc<dyn Incoming> = core.clone();
    core.link.connect(channel, incoming).map_err(|e| WireError::new(Code::Internal, format!("use the channel: {e}")))
}

/// Leaves a durable word in the image that its programs may have run on: from here on the disk can
/// be newer than the memory.
fn mark_started(image: &Path) -> std::io::Result<()> {
    faults::file("started.mark")?;
    File::create(image.join(STARTED))?.sync_all()?;
    File::open(image)?.sync_all()
}

impl Core {
    /// Greets the guest and goes on with everything that it holds.
    ///
    /// # Errors
    /// It doesn't answer, or what it holds doesn't fit to the journals.
    pub async fn greet(&self, identity: Option<Identity>, saved: Option<Saved>) -> Result<HelloReply, WireError> {
        let (session, generation, gap_ms) = {
            let mut state = self.state();
            (state.session, state.generation, state.gap_ms.take())
        };
        self.forget_streams();
        let keep_input = saved.as_ref().is_some_and(|saved| saved.taken_over.is_some());
        let services = identity.iter().flat_map(|identity| &identity.services);
        let service_offsets = self.service_offsets(services.map(|spec| &spec.name))?;
        if let Some(identity) = &identity {
            self.state().network_told = identity.network.clone();
        }
        let hello = Hello { protocol: PROTOCOL, session, generation, identity, service_offsets, gap_ms, keep_input };
        let reply = self.link.hello(hello, HELLO_LIMIT).await?;
        {
            let mut state = self.state();
            state.guest_version = Some(reply.guest_version.clone());
            if reply.reset.count > 0 {
                state.reset = bounded(&reply.reset);
            }
        }
        if let Some(saved) = saved {
            self.load_works(saved, &reply);
        }
        let mut acks = self.rejoin_connections(&reply);
        for sending in &reply.sending {
            let Some(name) = crate::core::journal_of(&sending.role) else { continue };
            let offset = self.rejoin_journal(sending.stream, name, sending.from, sending.to)?;
            acks.push(StreamAt { stream: sending.stream, offset });
        }
        self.link.ready(acks, &reply)?;
        self.reset_strays(&reply);
        if keep_input {
            self.settle_taken_over(&reply).await;
        }
        Ok(reply)
    }

    /// The sandbox has ended by itself: finds out why, and ends.
    async fn died(&self, why: Gone, pids: &[u32]) {
        let _step = self.step.lock().await;
        if self.phase() == Phase::Ended {
            return;
        }
        let expected = self.state().expected_end.take();
        let usage = self.sandbox.usage().unwrap_or_default();
        let (reason, detail) = match (expected, why) {
            (Some((reason, detail)), _) => (reason, detail),
            (None, Gone::Violation(text)) => (EndReason::ProtocolViolation, format!("the guest broke the protocol: {text}")),
            (None, Gone::Closed) if usage.oom_kills > 0 => {
                let (limit, used) = (self.spec.resources.memory_bytes, usage.memory_bytes);
                let killed = Some("the sandbox".to_owned());
                self.record(Fact::Oom { limit_bytes: limit.map_or(0, |limit| limit.0), used_bytes: used, killed });
                (EndReason::Oom, death::of_memory(limit, used))
            }
            (None, Gone::Closed) => death::of_processes(pids).await,
        };
        tracing::warn!(%reason, detail, "the sandbox has ended");
        self.end(reason, &detail).await;
    }

    /// Ends the sandbox, if it still lives, takes everything away that belongs to it, and lets the
    /// process end.
    pub async fn end(&self, reason: EndReason, detail: &str) {
        self.lose_works(reason.as_str());
        self.record(Fact::SandboxEnded { reason, detail: detail.to_owned() });
        self.take_away().await;
    }

    /// Kills what lives, unmounts the disk, syncs the journals, and lets the process end.
    pub async fn take_away(&self) {
        faults::point("end.begun");
        self.record_traffic();
        self.end_connections();
        if let Err(error) = self.sandbox.kill().await {
            tracing::error!(%error, "the sandbox may still live");
        }
        faults::point("end.killed");
        let root = self.layout.root();
        match blocking(move || disk::unmount(&root)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::error!(%error, "the session's disk may still be mounted"),
            Err(error) => tracing::error!(%error, "the session's disk may still be mounted"),
        }
        {
            let mut state = self.state();
            if let Err(error) = state.journals.sync_all() {
                tracing::error!(%error, "output may be lost at a power loss");
            }
            if let Err(error) = state.facts.sync() {
                tracing::error!(error, "facts may be lost at a power loss");
            }
            state.facts.end();
        }
        self.set_phase(Phase::Ended);
        self.quit.cancel();
    }
}

/// What a guest says of its connections, which is hostile.
fn bounded(told: &ResetConnections) -> ResetConnections {
    let clip = |to: &String| to.chars().filter(|c| !c.is_control()).take(300).collect();
    ResetConnections { count: told.count.min(1_000_000), to: told.to.iter().take(ResetConnections::MOST).map(clip).collect() }
}

/// Gives back the pages of the program that only its start needed: this process shares its binary
/// with the server, and most of it is never used here. What is used again comes from the page cache.
fn give_back_start_up_pages() {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return };
    // Only code: it is never written to, so nothing can be lost.
    for line in maps.lines().filter(|line| line.contains(" r-xp ") && line.contains('/')) {
        let Some((from, to)) = line.split(' ').next().and_then(|range| range.split_once('-')) else { continue };
        let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16)) else { continue };
        // SAFETY: the range is a mapping of unmodified file pages, which the kernel reads again when needed.
        let _ = unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_DONTNEED) };
    }
}

/// Runs what blocks on a thread of its own.
///
/// # Errors
/// It panicked.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, WireError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| WireError::new(Code::Internal, e.to_string()))
}

/// Every second: what was written goes to the disk, what waits for room is tried again.
async fn sync_regularly(core: Arc<Core>) {
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut ticks = 0_u64;
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = core.quit.cancelled() => return,
        }
        core.retry_stalled();
        ticks += 1;
        if ticks % TRAFFIC_TICKS == 0 {
            core.record_traffic();
        }
        let (journals, facts) = {
            let mut state = core.state();
            (state.journals.take_unsynced(), state.facts.take_unsynced())
        };
        if journals.is_empty() && facts.is_none() {
            continue;
        }
        // The disk is waited for elsewhere: keystrokes don't wait for it.
        let synced = blocking(move || {
            let facts = facts.and_then(|work| work.sync().is_err().then_some(work));
            let journals: Vec<_> = journals.into_iter().filter(|(_, work)| work.sync().is_err()).collect();
            (journals, facts)
        });
        let Ok((journals, facts)) = synced.await else { continue };
        let mut state = core.state();
        for (name, work) in journals {
            tracing::warn!(journal = %name, "output is not on the disk yet; trying again");
            state.journals.put_back(name, work);
        }
        if let Some(work) = facts {
            state.facts.put_back(work);
        }
    }
}
