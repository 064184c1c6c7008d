//! Wake and start: a sandbox for a session that has none.
//!
//! A memory image belongs to one state of the disk. It is spent by the commit that wakes the session; and it is spent,
//! too, where a wake failed after programs may have run on and changed the disk. Old memory is never restored over a
//! newer disk.

use crate::{
    Error, ending,
    inner::blocking,
    launch,
    moments::{self, Moment},
    network,
    operation::{Context, Failure},
    parcels::{self, fetch},
    rollback,
    session::{Live, Session},
    supervisor_client::CallError,
    watch,
};
use model::{EventType, Generation};
use serde_json::json;
use snapshot::{
    Hash,
    image::{DISK, ImageDescriptor, STARTED},
    template::Changed,
};
use std::{path::Path, sync::Arc, time::Duration};
use store::{SessionRow, WakeRecord};
use wire::{
    Code,
    control::{Phase, Request, Start, SuperviseSpec},
    layout::SessionLayout,
};

/// Changed files of a template that an event names.
const CHANGED_SHOWN: usize = 20;
/// How long the frozen original may take to run on.
const THAW_LIMIT: Duration = Duration::from_secs(60);

/// Wakes a hibernated session, with its memory.
pub(crate) async fn run(context: &Context) -> Result<(), Failure> {
    let session = &context.session;
    let row = session.view().row;
    if let Some(live) = session.live().filter(|live| live.generation() == row.generation) {
        let next = row.generation.next();
        // It may have been changed while the session slept. What isn't told now is told once it runs.
        if let Err(error) = network::tell(&context.inner, session, &live).await {
            tracing::warn!(session = %session.id, %error, "a session's network is not told before its thaw");
        }
        let request = Request::Thaw { generation: next, gap_ms: Some(gap_ms(context, &row)) };
        let thawed = live.supervisor.call_within(&request, THAW_LIMIT).await;
        if thawed.is_ok() || has_thawed(&live, next).await {
            live.set_generation(next);
            // A restored guest is told at its start; this one has those of before its sleep.
            let services = Request::SetServices { services: row.services.clone() };
            if let Err(error) = live.supervisor.call_soon(&services).await {
                tracing::warn!(session = %session.id, %error, "a thawed session may not have its changed services");
            }
            return woken(context, &live, &row, None).await;
        }
        match thawed {
            // It was just ending, or had ended: frozen to its end.
            Ok(_) | Err(CallError::Unreachable(_)) => {}
            Err(CallError::Refused(error)) if error.code == Code::Busy => {}
            // It may have run on before it failed.
            Err(error) => {
                tracing::warn!(session = %session.id, %error, "a frozen original could not be thawed");
                ending::clear_the_way(&session.layout, context.inner.programs.runsc_state()).await?;
                if let Some(image_of) = row.image_generation {
                    suspect(&session.layout, image_of).await?;
                    let failure = judge(&session.layout, image_of, session.call_error(error)).await;
                    if failure.memory_spent {
                        return Err(failure);
                    }
                }
            }
        }
    }
    restore(context, &row).await
}

/// How long the session has slept.
fn gap_ms(context: &Context, row: &SessionRow) -> u64 {
    let slept = context.inner.now().since(row.ended_at.unwrap_or(row.updated_at));
    u64::try_from(slept.as_millis()).unwrap_or(u64::MAX)
}

/// True where a thaw whose answer was lost has happened.
async fn has_thawed(live: &Live, generation: Generation) -> bool {
    let status = ending::phase(live).await.ok().flatten();
    status.is_some_and(|status| status.phase == Phase::Running && status.generation == generation)
}

/// Notes that programs may have run on from the image.
pub(crate) async fn suspect(layout: &SessionLayout, image_of: Generation) -> Result<(), Error> {
    let marker = layout.image(image_of).join(STARTED);
    let noted = blocking(move || std::fs::File::create(marker).and_then(|file| file.sync_all())).await?;
    noted.map_err(|e| launch::io_error(&e, "mark the memory image as used"))
}

/// Restores from the image, under a new supervisor.
async fn restore(context: &Context, row: &SessionRow) -> Result<(), Failure> {
    let session = &context.session;
    rollback::settle(session).await?;
    fetch::ensure_own(&context.inner, session).await?;
    let image_of = row.image_generation.ok_or_else(|| Error::internal("a hibernated session has no image"))?;
    let image = session.layout.image(image_of);
    let (inner, row_, image_) = (context.inner.clone(), row.clone(), image.clone());
    let (base, changed) = blocking(move || {
        let loadable = ImageDescriptor::read(&image_).and_then(|descriptor| descriptor.check_loadable());
        loadable.map_err(|e| parcels::image_error(Some(row_.id), e))?;
        let base = inner.programs.pinned(&row_)?.below(inner.shelf.lower(&row_.layers));
        let changed = inner.programs.changed_in_place(&base.pins.template);
        Ok::<_, Error>((base, changed))
    })
    .await
    .flatten()?;
    let spec = SuperviseSpec {
        dir: session.layout.dir().to_owned(),
        session: Some(session.id),
        generation: row.generation.next(),
        start: Start::Restore { image: image.clone() },
        gap_ms: Some(gap_ms(context, row)),
        lower: base.lower,
        runtime: base.runtime,
        resources: row.resources,
        keep_output_bytes: context.inner.config.keep_output,
        identity: Some(launch::identity(&context.inner, row)),
        pins: base.pins,
        network: Some(network::spec(&context.inner, &row.network)),
    };
    match launch::launch(&context.inner, &session.launching, spec).await {
        Ok(live) => {
            watch::attach(&context.inner, session, live.clone());
            woken(context, &live, row, Some(changed)).await
        }
        Err(error) => Err(judge(&session.layout, image_of, error).await),
    }
}

/// The session runs: commits that, and drops the image, whose memory is spent by it. `changed` are files of its template
/// that are not what they were; `None` where the frozen original was thawed.
async fn woken(context: &Context, live: &Arc<Live>, row: &SessionRow, changed: Option<Vec<Changed>>) -> Result<(), Failure> {
    let (generation, thawed) = (live.generation(), changed.is_none());
    let gap = Duration::from_millis(gap_ms(context, row));
    let reset = network::reset(live).await;
    let (connections_reset, reset_to) = (reset.count, reset.to);
    let wake = WakeRecord { at: context.inner.now(), gap_ms: gap_ms(context, row), generation, connections_reset, reset_to };
    let data = json!({
        "generation": generation, "memory": "restored", "gap_seconds": gap.as_secs_f64(), "thawed": thawed,
        "connections_reset": wake.connections_reset, "reset_to": wake.reset_to,
    });
    // A thawed sandbox has the supervisor that it had.
    context.session.set_idle_look_after(row, context.inner.now());
    moments::announce(&context.inner, &context.session, live, Moment::Woken { gap, generation }).await;
    let mut events = vec![context.event(EventType::WAKE_DONE, data)];
    if let Some(changed) = changed.filter(|changed| !changed.is_empty()) {
        let shown: Vec<_> = changed.iter().take(CHANGED_SHOWN).map(|changed| changed.path.to_string_lossy()).collect();
        let data = json!({ "template": row.template, "files": changed.len(), "paths": shown });
        events.push(context.event(EventType::TEMPLATE_CHANGED, data));
    }
    let change = move |change: &mut store::SessionChange| {
        change.session.generation = generation;
        change.session.image_generation = None;
        change.session.parcel = None;
        change.session.reason = None;
        change.session.last_wake = Some(wake.clone());
        change.events.extend(events.clone());
    };
    context.finish(Box::new(change)).await?;
    if let Some(spent) = row.image_generation {
        drop_image(&context.session, spent);
    }
    Ok(())
}

/// Removes a spent image, in the background.
pub(crate) fn drop_image(session: &Arc<Session>, image_of: Generation) {
    let session = session.clone();
    tokio::task::spawn_blocking(move || {
        if let Err(error) = ending::remove_tree(&session.layout.image(image_of)) {
            tracing::warn!(session = %session.id, %error, "a spent memory image stays");
        }
    });
}

/// After a wake that failed: whether the saved memory can still be used.
pub(crate) async fn judge(layout: &SessionLayout, image_of: Generation, error: Error) -> Failure {
    let (image, upper) = (layout.image(image_of), layout.upper());
    let spent = blocking(move || is_spent(&image, &upper)).await.unwrap_or(true);
    let reason = spent.then(|| format!("the wake failed after programs had run on ({error}); their memory is lost"));
    Failure { error, memory_spent: spent, reason }
}

/// True where programs may have run on from the image and the disk isn't the one that belongs to it any more. Where it
/// is, the image is made ready for another try.
pub(crate) fn is_spent(image: &Path, upper: &Path) -> bool {
    let marker = image.join(STARTED);
    if !marker.exists() {
        return false;
    }
    let before = std::fs::read_to_string(image.join(DISK)).ok().and_then(|text| text.parse::<Hash>().ok());
    let unchanged = before.is_some_and(|before| snapshot::disk::fingerprint(upper).is_ok_and(|now| now == before));
    // The marker goes only where the next wake may believe that nothing has run.
    !(unchanged && std::fs::remove_file(marker).is_ok())
}

/// Notes, for [`judge`], what the disk of a session that has just been hibernated looks like; in the background, since a
/// large disk takes a while.
pub(crate) fn note_disk(session: &Arc<Session>, image_of: Generation) {
    let session = session.clone();
    tokio::task::spawn_blocking(move || {
        let before = session.view();
        let Ok(print) = snapshot::disk::fingerprint(&session.layout.upper()) else { return };
        let after = session.view();
        // Anything that began meanwhile may have changed the disk under our eyes: then nothing is known about it.
        let untouched = before.row.revision == after.row.revision && before.operation.is_none() && after.operation.is_none();
        if untouched && before.row.image_generation == Some(image_of) {
            let path = session.layout.image(image_of).join(DISK);
            if let Err(error) = launch::write_private(&path, print.to_string().as_bytes()) {
                tracing::warn!(session = %session.id, %error, "a sleeping disk is not noted");
            }
        }
    });
}

/// Boots a stopped session afresh on its disk.
pub(crate) async fn start(context: &Context) -> Result<(), Failure> {
    let session = &context.session;
    rollback::settle(session).await?;
    fetch::ensure_own(&context.inner, session).await?;
    let row = session.view().row;
    let inner = context.inner.clone();
    let template = row.template_hash.clone().unwrap_or_else(|| row.template.clone());
    let layers = row.layers.clone();
    let base =
        blocking(move || Ok::<_, Error>(inner.programs.present(&template)?.below(inner.shelf.lower(&layers)))).await.flatten()?;
    let spec = SuperviseSpec {
        dir: session.layout.dir().to_owned(),
        session: Some(session.id),
        generation: row.generation.next(),
        start: Start::Boot,
        gap_ms: None,
        lower: base.lower,
        runtime: base.runtime,
        resources: row.resources,
        keep_output_bytes: context.inner.config.keep_output,
        identity: Some(launch::identity(&context.inner, &row)),
        pins: base.pins.clone(),
        network: Some(network::spec(&context.inner, &row.network)),
    };
    let live = launch::launch(&context.inner, &session.launching, spec).await?;
    watch::attach(&context.inner, session, live.clone());
    started(context, live.generation(), Some(base.pins)).await
}

async fn started(context: &Context, generation: Generation, pins: Option<wire::control::Pins>) -> Result<(), Failure> {
    let change = move |change: &mut store::SessionChange| {
        let row = &mut change.session;
        row.generation = generation;
        row.image_generation = None;
        row.parcel = None;
        if let Some(pins) = &pins {
            row.template_hash = Some(pins.template.clone());
            row.guest_hash = Some(pins.guest.clone());
            row.runsc_hash = Some(pins.runsc.clone());
        }
    };
    context.finish(Box::new(change)).await?;
    Ok(())
}

/// The sandbox that a server was making when it died is there.
pub(crate) async fn finish_boot(context: &Context, live: Arc<Live>) -> Result<(), Failure> {
    let session = &context.session;
    let row = session.view().row;
    let ready = live.supervisor.call_within(&Request::AwaitReady, THAW_LIMIT).await;
    let kind = context.operation.kind;
    if let Err(error) = ready {
        let error = session.call_error(error);
        ending::end_sandbox(&session.layout, context.inner.programs.runsc_state(), model::EndReason::StartFailed, Duration::ZERO)
            .await?;
        return Err(match row.image_generation {
            Some(image_of) => judge(&session.layout, image_of, error).await,
            None => error.into(),
        });
    }
    match kind {
        model::OperationKind::Wake => woken(context, &live, &row, Some(Vec::new())).await,
        _ => {
            let pins = pins_of(session).await;
            started(context, live.generation(), pins).await
        }
    }
}

/// What the present supervisor was started with.
async fn pins_of(session: &Arc<Session>) -> Option<wire::control::Pins> {
    let path = session.layout.spec();
    let spec = blocking(move || std::fs::read(path)).await.ok()?.ok()?;
    serde_json::from_slice::<SuperviseSpec>(&spec).ok().map(|spec| spec.pins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_only_where_the_disk_is_known_to_be_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let layout = SessionLayout::new(dir.path());
        let (image, upper) = (layout.image(Generation::FIRST), layout.upper());
        std::fs::create_dir_all(&image).unwrap();
        std::fs::create_dir_all(&upper).unwrap();
        let print = || std::fs::write(image.join(DISK), snapshot::disk::fingerprint(&upper).unwrap().to_string()).unwrap();
        let run_on = || std::fs::write(image.join(STARTED), "").unwrap();

        assert!(!is_spent(&image, &upper), "nothing has run");
        run_on();
        assert!(is_spent(&image, &upper), "nothing is known about the disk");
        print();
        assert!(!is_spent(&image, &upper), "it ran on and changed nothing");
        assert!(!image.join(STARTED).exists(), "the next wake starts clean");
        run_on();
        std::fs::write(upper.join("new"), "x").unwrap();
        assert!(is_spent(&image, &upper), "it changed the disk");
    }
}
