//! Hibernate: memory and disk to storage, then the sandbox goes.
//!
//! Capture, commit, let go, in this order: until the commit the sandbox only waits and any failure lets it run on; from
//! the commit on the image is the session's memory. The sandbox stays frozen until the image has been tried out.

use crate::{
    Error, ending, facts, idle,
    inner::blocking,
    moments::{self, Moment},
    operation::{Context, Failure},
    session::Live,
    supervisor_client::CallError,
    wake,
};
use model::{EndReason, State};
use std::{sync::Arc, time::Duration};
use wire::{
    Code,
    control::{Answer, Request},
};

/// The longest capture: tens of GiB on a slow disk.
const CAPTURE_LIMIT: Duration = Duration::from_secs(15 * 60);

/// Takes a session's memory to storage.
pub(crate) async fn run(context: &Context) -> Result<(), Failure> {
    let live = context.live()?;
    let session = &context.session;
    let was_paused = session.view().row.state == State::Paused;
    if !was_paused {
        if context.cause() == EndReason::Idle {
            idle::confirm(context, &live).await?;
        }
        moments::announce(&context.inner, session, &live, Moment::BeforeHibernate).await;
    }
    let image = session.layout.image(live.generation());
    let captured = live.supervisor.call_within(&Request::Capture { image }, CAPTURE_LIMIT).await;
    if let Err(error) = captured {
        let told = unsaveable(context, &live, error).await;
        undo(context, &live, was_paused).await;
        return Err(told.into());
    }
    commit(context, live).await
}

/// The memory is on storage: says so in the store, and lets the sandbox go.
pub(crate) async fn commit(context: &Context, live: Arc<Live>) -> Result<(), Failure> {
    let session = &context.session;
    let generation = live.generation();
    let was_paused = session.view().row.state == State::Paused;
    let committed = async {
        facts::drain(&context.inner, session).await?;
        let (now, cause) = (context.inner.now(), context.cause());
        let change = move |change: &mut store::SessionChange| {
            let row = &mut change.session;
            row.ended_at = Some(now);
            row.image_generation = Some(generation);
            row.reason = Some(cause.to_string());
            row.ended_reason.clone_from(&row.reason);
            if cause != EndReason::Idle {
                row.ended_detail = None;
            }
        };
        context.finish(Box::new(change)).await
    };
    if let Err(error) = committed.await {
        undo(context, &live, was_paused).await;
        return Err(error.into());
    }
    // From here on the session is hibernated, whatever becomes of the frozen original.
    let confirm = context.inner.config.confirm;
    match live.supervisor.call_soon(&Request::CommitHibernate { confirm }).await {
        // A wake can have been faster; a thaw then made it run again.
        Ok(_) | Err(CallError::Refused(_)) => {}
        Err(error) => tracing::warn!(session = %session.id, %error, "the frozen original of a hibernated session stays"),
    }
    wake::note_disk(session, generation);
    Ok(())
}

/// Lets the sandbox go on as it was.
async fn undo(context: &Context, live: &Arc<Live>, was_paused: bool) {
    let session = context.session.id;
    if let Err(error) = live.supervisor.call_soon(&Request::AbortHibernate).await {
        tracing::warn!(%session, %error, "a hibernate that failed is not taken back");
    }
    if was_paused && let Err(error) = live.supervisor.call_soon(&Request::Pause).await {
        tracing::warn!(%session, %error, "a session that was paused runs on");
    }
    let image = context.session.layout.image(live.generation());
    let removed = blocking(move || ending::remove_tree(&image)).await;
    if let Ok(Err(error)) = removed {
        tracing::warn!(%session, %error, "the rest of a memory image stays");
    }
}

/// What stands in the way of a capture, as exactly as can be told.
async fn unsaveable(context: &Context, live: &Arc<Live>, error: CallError) -> Error {
    match error {
        CallError::Refused(error) if error.code == Code::Unsaveable => {
            let items = match live.supervisor.call_soon(&Request::Unsaveable).await {
                Ok(Answer::Unsaveable { items }) => items,
                _ => Vec::new(),
            };
            Error::Unsaveable { session: context.session.id, items, detail: error.message }
        }
        error => context.session.call_error(error),
    }
}
