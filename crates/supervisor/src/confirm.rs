//! The proof that an image restores, while the original still lies frozen beside it.
//!
//! An image can be written and yet not restore. So it is restored once, on the side: above the
//! frozen disk, with a layer of its own that is thrown away, without network, until its guest has
//! answered. Nothing that its programs do in that moment leaves it.

use crate::{core::Core, death, lifecycle::runtime_error, start::blocking};
use model::Resources;
use runtime::{Sandbox, SandboxSpec};
use runtime_gvisor::{CgroupSupport, GvisorSandbox, Runsc};
use snapshot::disk::{self, DiskLayout};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;
use wire::{
    Code, StreamId, WireError,
    facts::Fact,
    frame::FrameError,
    guest::{GUEST_PATH, GuestEvent, Hello, PROTOCOL},
};

/// Memory that must stay free beside the second copy.
const SPARE_BYTES: u64 = 512 << 20;
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// Confirms the image of the present generation where `wanted` and where memory allows; then takes
/// the original away, or leaves it for a thaw where the image is bad.
pub async fn confirm(core: Arc<Core>, wanted: bool, interrupt: CancellationToken) {
    let confirming = core.confirming.lock().await;
    if interrupt.is_cancelled() {
        return;
    }
    let detail = match (wanted, room_for_second(&core)) {
        (false, _) => "not asked for".to_owned(),
        (true, Err(why)) => format!("not confirmed: {why}"),
        (true, Ok(())) => {
            let restored = tokio::select! {
                restored = restore_on_the_side(&core) => restored,
                () = interrupt.cancelled() => return clean_up(&core).await,
            };
            clean_up(&core).await;
            match restored {
                Ok(()) => "the image was restored on the side and answered".to_owned(),
                Err(error) => {
                    tracing::error!(%error, "the image does not restore");
                    return core.record(Fact::Confirmed { ok: false, detail: error.message });
                }
            }
        }
    };
    drop(confirming);
    core.end_hibernated(&detail).await;
}

fn room_for_second(core: &Core) -> Result<(), String> {
    let need = core.sandbox.usage().map_or(0, |usage| usage.memory_bytes) + SPARE_BYTES;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    match free {
        Some(kib) if kib * 1024 < need => Err(format!("{} MiB of memory are free, {} are needed", kib / 1024, need >> 20)),
        _ => Ok(()),
    }
}

fn side_disk(core: &Core) -> DiskLayout {
    DiskLayout::new(core.layout.run().join("confirm/disk"))
}

fn side_sandbox(core: &Core) -> GvisorSandbox {
    let dir = core.layout.run().join("confirm");
    let id = core.layout.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let spec = SandboxSpec {
        name: format!("dm-{id}-confirm"),
        root: dir.join("root"),
        bundle: dir.join("bundle"),
        log: dir.join("sandbox.log"),
        argv: vec![GUEST_PATH.to_owned()],
        hostname: core.state().identity.as_ref().map_or_else(|| "dormouse".to_owned(), |identity| identity.hostname.clone()),
        resources: Resources::default(),
    };
    let runtime = &core.spec.runtime;
    let runsc =
        Runsc { program: runtime.runsc.clone(), state_dir: runtime.state_dir.clone(), platform: runtime.platform.clone() };
    GvisorSandbox::new(runsc, spec, CgroupSupport::detect())
}

async fn restore_on_the_side(core: &Arc<Core>) -> Result<(), WireError> {
    let (disk, mut lower) = (side_disk(core), vec![core.layout.upper()]);
    lower.extend(core.spec.lower.iter().cloned());
    let root = core.layout.run().join("confirm/root");
    blocking(move || disk.mount(&lower, &root)).await?.map_err(|e| WireError::new(Code::Internal, e.to_string()))?;
    let generation = core.state().generation;
    let channel = side_sandbox(core).restore(&core.layout.image(generation)).await.map_err(runtime_error)?;
    let link = crate::link::Link::new();
    link.connect(channel, Arc::new(Deaf)).map_err(|e| WireError::new(Code::Internal, e.to_string()))?;
    let session = core.state().session;
    let hello = Hello {
        protocol: PROTOCOL,
        session,
        generation,
        identity: None,
        service_offsets: BTreeMap::new(),
        keep_input: false,
        gap_ms: None,
    };
    link.hello(hello, ANSWER_LIMIT).await.map(|_| ())
}

async fn clean_up(core: &Core) {
    let side = side_sandbox(core);
    let pids = side.pids();
    let _ = side.kill().await;
    death::collect(&pids);
    let dir = core.layout.run().join("confirm");
    let cleaned = blocking(move || {
        let _ = disk::unmount(&dir.join("root"));
        std::fs::remove_dir_all(dir)
    });
    if let Ok(Err(error)) = cleaned.await {
        tracing::warn!(%error, "the confirmation left something behind");
    }
}

/// Listens to nothing: the copy only has to say that it is there.
struct Deaf;

impl crate::link::Incoming for Deaf {
    fn data(&self, _: StreamId, _: model::Offset, _: bytes::Bytes) -> Result<(), FrameError> {
        Ok(())
    }
    fn end(&self, _: StreamId, _: model::Offset) -> Result<(), FrameError> {
        Ok(())
    }
    fn reset(&self, _: StreamId, _: &str) {}
    fn event(&self, _: u64, _: GuestEvent) {}
    fn dial(&self, _: StreamId, _: wire::guest::Dial) -> Result<(), FrameError> {
        Ok(())
    }
}
