//! Going through all sessions and snapshots that are not deleted, a page at a time.

use crate::Error;
use store::{MAX_PAGE, SessionRow, SnapshotRow, Store, UnreadableSession, UnreadableSnapshot};

/// Every session; answers those whose rows can't be read.
pub(crate) async fn sessions(store: &dyn Store, mut each: impl FnMut(SessionRow)) -> Result<Vec<UnreadableSession>, Error> {
    let (mut unreadable, mut cursor) = (Vec::new(), None);
    loop {
        let scan = store.scan_sessions(MAX_PAGE, cursor).await?;
        scan.sessions.into_iter().for_each(&mut each);
        unreadable.extend(scan.unreadable);
        cursor = scan.next_cursor;
        if cursor.is_none() {
            return Ok(unreadable);
        }
    }
}

/// Every snapshot; answers those whose rows can't be read.
pub(crate) async fn snapshots(store: &dyn Store, mut each: impl FnMut(SnapshotRow)) -> Result<Vec<UnreadableSnapshot>, Error> {
    let (mut unreadable, mut cursor) = (Vec::new(), None);
    loop {
        let scan = store.scan_snapshots(MAX_PAGE, cursor).await?;
        scan.snapshots.into_iter().for_each(&mut each);
        unreadable.extend(scan.unreadable);
        cursor = scan.next_cursor;
        if cursor.is_none() {
            return Ok(unreadable);
        }
    }
}

/// Both, for who is going to remove what none of them needs.
///
/// # Errors
/// A row that can't be read: what it needs isn't known.
pub(crate) async fn all(
    store: &dyn Store,
    of_snapshot: impl FnMut(SnapshotRow),
    of_session: impl FnMut(SessionRow),
) -> Result<(), Error> {
    let unknown =
        |what: &str, id: &str| Error::internal(format!("{what} {id} can't be read, and may need what is to be removed"));
    if let Some(damaged) = snapshots(store, of_snapshot).await?.first() {
        return Err(unknown("snapshot", &damaged.id));
    }
    match sessions(store, of_session).await?.first() {
        Some(damaged) => Err(unknown("session", &damaged.id)),
        None => Ok(()),
    }
}
