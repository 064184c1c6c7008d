//! Delete: everything of a session goes but a tombstone.

use crate::{
    ending, facts,
    inner::blocking,
    launch,
    operation::{Context, Failure, lose_works},
    shelf, snapshots,
};
use model::{EndReason, EventType};
use serde_json::json;
use std::time::Duration;
use store::SessionChange;

/// Deletes a session, whatever it is doing.
pub(crate) async fn run(context: &Context) -> Result<(), Failure> {
    let (inner, session) = (&context.inner, &context.session);
    // A supervisor that is just being started is seen through, then ended.
    let _permit = session.launching.acquire().await.map_err(|_| crate::Error::ShuttingDown)?;
    ending::end_sandbox(&session.layout, inner.programs.runsc_state(), context.cause(), Duration::ZERO).await?;
    // Its last facts are part of its history. Where they can't be read, it is deleted all the same.
    if let Err(error) = facts::drain(inner, session).await {
        tracing::warn!(session = %session.id, %error, "the last facts of a deleted session are not applied");
    }
    let mut lost = SessionChange::new((*session.view().row).clone());
    if let Err(error) = lose_works(inner, session, "deleted", &mut lost).await {
        tracing::warn!(session = %session.id, %error, "the works of a deleted session can't be read");
    }
    let layout = session.layout.clone();
    blocking(move || ending::remove_session(&layout)).await?.map_err(|e| launch::io_error(&e, "remove the session's files"))?;
    snapshots::outlive(inner, session.id).await;
    let (has_layers, now) = (!session.view().row.layers.is_empty(), inner.now());
    let cause = context.cause();
    let mut events = vec![context.event(EventType::SESSION_DELETED, json!({ "reason": cause }))];
    if cause == EndReason::Expired {
        events.insert(0, context.event(EventType::SESSION_EXPIRED, json!({ "expires_at": session.view().row.expires_at })));
    }
    let change = move |change: &mut SessionChange| {
        change.execs.extend(lost.execs.iter().cloned());
        change.terminals.extend(lost.terminals.iter().cloned());
        change.events.extend(lost.events.iter().cloned());
        let row = &mut change.session;
        // The key of one whose time was over still says so, until somebody replaces it.
        row.key_freed = cause != EndReason::Expired;
        row.deleted_at = Some(now);
        row.reason = Some(cause.to_string());
        row.image_generation = None;
        row.parcel = None;
        change.events.extend(events.iter().cloned());
    };
    context.finish(Box::new(change)).await?;
    if has_layers {
        let inner = inner.clone();
        context.inner.tasks.spawn(async move {
            if let Err(error) = shelf::collect_layers(&inner).await {
                tracing::warn!(%error, "disk layers that nobody needs stay");
            }
        });
    }
    Ok(())
}
