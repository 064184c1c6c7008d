//! Rollback: a session set back to a snapshot, with its id, its key and its history.
//!
//! ```text
//!  stage the snapshot's memory and an empty disk ─► end the sandbox ─► commit ─► put in place ─► (a wake or a start)
//! ```
//! The commit is the point of no return. It raises the session's disk epoch; what was staged carries that number. So
//! whoever finds a staged rollback knows what to do: put it in place where the store has the number, else drop it. All
//! moves are renames, and each can be repeated.

use crate::{
    Error, create, ending, facts,
    inner::{Inner, blocking},
    launch::{self, io_error},
    operation::{Context, Failure, lose_works},
    session::Session,
    shelf,
};
use model::{EndReason, EventType, ExecState, Generation, Memory, SnapshotId, State, TerminalState};
use serde_json::json;
use snapshot::disk::DiskLayout;
use std::{fs, io, path::PathBuf, sync::Arc, time::Duration};
use store::{SessionChange, SessionRow, SnapshotRow};
use wire::{
    layout::SessionLayout,
    records::{ExecRecord, TerminalRecord},
};

/// How long what a supervisor wrote at its end may take to be read.
const READ_LIMIT: Duration = Duration::from_secs(10);
/// Holds the number of the disk epoch that a staged rollback belongs to; written last.
const EPOCH: &str = "epoch";

/// Where a rollback is staged; laid out as a session's directory.
fn staged(layout: &SessionLayout) -> SessionLayout {
    SessionLayout::new(layout.dir().join("rollback"))
}

/// Sets the session back. Afterwards it sleeps with the snapshot's memory, or is stopped where that has none.
pub(crate) async fn run(context: &Context, snapshot: SnapshotId, disk_only: bool) -> Result<(), Failure> {
    let (inner, session) = (&context.inner, &context.session);
    let row = session.view().row;
    let epoch = row.disk_epoch + 1;
    // It may have been deleted since it was asked for; from here on it can't be, until the session has its layers.
    let origin = create::origin(inner, snapshot, disk_only).await?;
    let snapshot = origin.snapshot.clone();
    stage(inner, session, &snapshot, epoch).await?;
    faults::point("rollback.staged");
    let live = session.live();
    ending::end_sandbox(&session.layout, inner.programs.runsc_state(), EndReason::RolledBack, Duration::ZERO).await?;
    if let Some(live) = live {
        // It reads the last facts.
        let _ = tokio::time::timeout(READ_LIMIT, live.gone.cancelled()).await;
    }
    facts::drain(inner, session).await?;
    faults::point("rollback.ended");
    let mut works = SessionChange::new((*row).clone());
    lose_works(inner, session, EndReason::RolledBack.as_str(), &mut works).await?;
    run_again(&snapshot, row.generation, &mut works);
    let data = json!({ "snapshot_id": snapshot.id, "memory": snapshot.memory, "taken_at": snapshot.created_at.to_string(), "disk_only": disk_only });
    works.events.push(context.event(EventType::ROLLBACK_DONE, data));
    let set_back = snapshot.clone();
    let change = move |change: &mut SessionChange| {
        change.execs.extend(works.execs.iter().cloned());
        change.terminals.extend(works.terminals.iter().cloned());
        change.events.extend(works.events.iter().cloned());
        change_row(&mut change.session, &set_back, epoch);
    };
    context.finish(Box::new(change)).await?;
    drop(origin);
    faults::point("rollback.committed");
    // The next start, or whoever needs the session, tries it again.
    if let Err(error) = settle(session).await {
        tracing::error!(session = %session.id, %error, "a rollback is not in place yet");
    }
    Ok(())
}

fn change_row(row: &mut SessionRow, snapshot: &SnapshotRow, epoch: u64) {
    row.layers.clone_from(&snapshot.layers);
    row.disk_epoch = epoch;
    row.parcel = None;
    row.latest_snapshot = Some(snapshot.id);
    row.template_hash.clone_from(&snapshot.template_hash);
    row.guest_hash.clone_from(&snapshot.guest_hash);
    row.runsc_hash.clone_from(&snapshot.runsc_hash);
    row.reason = Some(EndReason::RolledBack.to_string());
    row.ended_reason = Some(EndReason::RolledBack.to_string());
    row.ended_detail = None;
    // Programs inside slept since then.
    row.ended_at = Some(snapshot.created_at);
    (row.state, row.memory, row.image_generation) = match snapshot.memory {
        true => (State::Hibernated, Memory::Saved, Some(row.generation)),
        false => (State::Stopped, Memory::Lost, None),
    };
}

/// What ran when the snapshot was taken will run again.
fn run_again(snapshot: &SnapshotRow, generation: Generation, change: &mut SessionChange) {
    let (execs, terminals) = works_of(snapshot);
    let again: Vec<_> = execs.iter().map(|exec| json!(exec.id)).chain(terminals.iter().map(|t| json!(t.id))).collect();
    let is_again = |data: &serde_json::Value| again.contains(&data["exec_id"]) || again.contains(&data["terminal_id"]);
    change.events.retain(|event| !is_again(&event.data));
    for exec in execs {
        change.execs.retain(|row| row.id != exec.id);
        change.execs.push(facts::exec_row(change.session.id, &ExecRecord { generation, ..exec }));
    }
    for terminal in terminals {
        change.terminals.retain(|row| row.id != terminal.id);
        change.terminals.push(facts::terminal_row(change.session.id, &terminal));
    }
}

/// What ran when a snapshot with memory was taken.
pub(crate) fn works_of(snapshot: &SnapshotRow) -> (Vec<ExecRecord>, Vec<TerminalRecord>) {
    if !snapshot.memory {
        return Default::default();
    }
    let execs: Vec<ExecRecord> = serde_json::from_value(snapshot.works["execs"].clone()).unwrap_or_default();
    let terminals: Vec<TerminalRecord> = serde_json::from_value(snapshot.works["terminals"].clone()).unwrap_or_default();
    let execs = execs.into_iter().filter(|exec| exec.state == ExecState::Running).collect();
    (execs, terminals.into_iter().filter(|terminal| terminal.state == TerminalState::Running).collect())
}

async fn stage(inner: &Arc<Inner>, session: &Arc<Session>, snapshot: &SnapshotRow, epoch: u64) -> Result<(), Error> {
    let (inner, layout, snapshot) = (inner.clone(), session.layout.clone(), snapshot.clone());
    let generation = session.view().row.generation;
    let staged = blocking(move || -> io::Result<()> {
        let staged = staged(&layout);
        ending::remove_tree(staged.dir())?;
        launch::ensure_private_dir(staged.dir())?;
        DiskLayout::new(staged.disk()).create().map_err(io::Error::other)?;
        if let Some(below) = snapshot.layers.first() {
            inner.shelf.layers.dress_root(*below, &staged.upper()).map_err(io::Error::other)?;
        }
        if snapshot.memory {
            let kept = inner.shelf.layout(snapshot.id);
            shelf::copy_image(&kept.image(snapshot.generation), &staged.image(generation))?;
            shelf::copy_journals(&kept, &staged)?;
        }
        fs::write(staged.dir().join(EPOCH), epoch.to_string())?;
        fs::File::open(staged.dir().join(EPOCH))?.sync_all()?;
        fs::File::open(staged.dir())?.sync_all()
    });
    staged.await?.map_err(|e| io_error(&e, "stage the rollback"))
}

/// Puts a rollback in place that the store has, and drops one that it hasn't. Nothing runs in the session.
///
/// # Errors
/// The disk refuses; it can be tried again.
pub(crate) async fn settle(session: &Arc<Session>) -> Result<(), Error> {
    // The rollback itself and a wake that comes right after its commit.
    let _alone = session.launching.acquire().await.map_err(|_| Error::ShuttingDown)?;
    let (layout, epoch) = (session.layout.clone(), session.view().row.disk_epoch);
    blocking(move || apply(&layout, epoch)).await?.map_err(|e| io_error(&e, "put the rollback in place"))
}

/// True where a rollback waits to be put in place or dropped.
pub(crate) fn is_staged(layout: &SessionLayout) -> bool {
    staged(layout).dir().exists()
}

fn apply(layout: &SessionLayout, epoch: u64) -> io::Result<()> {
    let staged = staged(layout);
    if !staged.dir().exists() {
        return Ok(());
    }
    let number = fs::read_to_string(staged.dir().join(EPOCH)).ok().and_then(|text| text.trim().parse::<u64>().ok());
    if number != Some(epoch) {
        return ending::remove_tree(staged.dir());
    }
    let before: PathBuf = staged.dir().join("before");
    if staged.disk().exists() {
        if layout.disk().exists() && !before.exists() {
            fs::rename(layout.disk(), &before)?;
        }
        fs::rename(staged.disk(), layout.disk())?;
    }
    if staged.images().exists() {
        // What was the session's memory before lies in the snapshot that was taken first.
        ending::remove_tree(&layout.images())?;
        fs::rename(staged.images(), layout.images())?;
    }
    shelf::move_journals(&staged, layout)?;
    fs::File::open(layout.dir())?.sync_all()?;
    ending::remove_tree(staged.dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(dir: &std::path::Path, epoch: u64) -> SessionLayout {
        let layout = SessionLayout::new(dir.join("s"));
        let staged = staged(&layout);
        let put = |path: PathBuf, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put(layout.upper().join("file"), "now");
        put(layout.image(Generation(3)).join("pages"), "now");
        put(staged.upper().join("file"), "then");
        put(staged.image(Generation(3)).join("pages"), "then");
        put(staged.dir().join("execs/x.stdout/00000000000000000000.seg"), "then");
        put(staged.dir().join(EPOCH), &epoch.to_string());
        layout
    }

    fn content(layout: &SessionLayout) -> (String, String, bool) {
        let read = |path: PathBuf| fs::read_to_string(path).unwrap();
        let (file, pages) = (read(layout.upper().join("file")), read(layout.image(Generation(3)).join("pages")));
        (file, pages, layout.dir().join("execs/x.stdout").exists())
    }

    #[test]
    fn what_was_committed_is_put_in_place_and_what_was_not_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let layout = made(dir.path(), 5);
        apply(&layout, 4).unwrap();
        assert_eq!(content(&layout), ("now".into(), "now".into(), false));
        assert!(!is_staged(&layout));
        let layout = made(dir.path(), 5);
        apply(&layout, 5).unwrap();
        assert_eq!(content(&layout), ("then".into(), "then".into(), true));
        assert!(!is_staged(&layout));
        apply(&layout, 5).unwrap();
        assert_eq!(content(&layout), ("then".into(), "then".into(), true));
    }

    #[test]
    fn a_rollback_cut_off_between_its_moves_is_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let layout = made(dir.path(), 5);
        let staged = staged(&layout);
        fs::rename(layout.disk(), staged.dir().join("before")).unwrap();
        apply(&layout, 5).unwrap();
        assert_eq!(content(&layout), ("then".into(), "then".into(), true));
        let layout = made(dir.path(), 6);
        fs::rename(layout.disk(), staged.dir().join("before")).unwrap();
        fs::rename(staged.disk(), layout.disk()).unwrap();
        ending::remove_tree(&layout.images()).unwrap();
        apply(&layout, 6).unwrap();
        assert_eq!(content(&layout), ("then".into(), "then".into(), true));
    }
}
