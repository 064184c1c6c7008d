//! Telling changes of files by looking at them again and again.
//!
//! inotify(7) would tell sooner, but gVisor can be left by it with a directory that it can never save again, and then
//! no sleep works any more. So what is watched is looked at on a helper thread, and a look's differences from the one
//! before are told. What happens and is undone between two looks isn't seen.

use super::{
    absolute,
    look::{Look, differences},
};
use crate::guest::{Guest, blocking, path_error};
use std::{
    fs,
    path::PathBuf,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use wire::{Code, StreamId, WireError, files::WatchEvent, window::WINDOW};

/// Between two looks that cost next to nothing.
const LOOK: Duration = Duration::from_millis(250);
/// A look is followed by a rest this many times as long, so that looking takes no more than about 5 % of the time.
const REST: u32 = 20;
/// Most files and directories looked at by one watch; more would make a careless `/` expensive.
const MOST: usize = 20_000;
/// The longest time between two looks.
const LONGEST_REST: Duration = Duration::from_secs(30);

/// What is watched, and how it was found at the last look.
pub struct Watch {
    path: PathBuf,
    recursive: bool,
    last: Arc<Look>,
    rest: Duration,
}

/// What a look brought.
struct Seen {
    look: Look,
    differences: Vec<WatchEvent>,
}

impl Watch {
    /// Looks at a file, a directory, or a whole tree for the first time.
    ///
    /// # Errors
    /// What the kernel says about the path; [`Code::Ended`] where the stream went meanwhile.
    pub async fn start(guest: &Rc<Guest>, stream: StreamId, path: &str, recursive: bool) -> Result<Self, WireError> {
        let path = absolute(path)?;
        let looked_at = path.clone();
        let there = blocking(move || fs::symlink_metadata(&looked_at).map(drop)).await?;
        there.map_err(|e| path_error(&path, &e))?;
        let mut watch = Self { path: path.into(), recursive, last: Arc::default(), rest: LOOK };
        match watch.look(guest, stream).await {
            None => Err(WireError::new(Code::Ended, "nobody wants the watch any more")),
            Some(seen) => {
                watch.last = Arc::new(seen?.look);
                Ok(watch)
            }
        }
    }

    /// Sends events until the stream is gone.
    pub async fn run(mut self, guest: &Rc<Guest>, stream: StreamId) {
        // Told once: from then on only what fits is looked at.
        let mut told_cut = false;
        loop {
            let mut events = Vec::new();
            if self.last.is_cut() && !std::mem::replace(&mut told_cut, true) {
                events.push(overflow());
            }
            match self.next(guest, stream).await {
                None => return,
                Some(Err(error)) => {
                    // Another thread may be had later.
                    log!("watching {}: {error}", self.path.display());
                    continue;
                }
                Some(Ok(seen)) => {
                    events.extend(seen.differences);
                    self.last = Arc::new(seen.look);
                }
            }
            if !events.is_empty() && !send(guest, stream, &events).await {
                return;
            }
        }
    }

    /// Rests, then looks.
    async fn next(&mut self, guest: &Rc<Guest>, stream: StreamId) -> Option<Result<Seen, WireError>> {
        tokio::select! {
            () = tokio::time::sleep(self.rest) => {}
            () = gone(guest, stream) => return None,
        }
        self.look(guest, stream).await
    }

    /// One look. `None`: the stream is gone, and so is the thread: a capture must not find its open directories.
    async fn look(&mut self, guest: &Rc<Guest>, stream: StreamId) -> Option<Result<Seen, WireError>> {
        let stop = Arc::new(AtomicBool::new(false));
        let (path, recursive, last, stopped) = (self.path.clone(), self.recursive, self.last.clone(), stop.clone());
        let begun = Instant::now();
        let work = blocking(move || {
            let look = Look::take(&path, recursive, MOST, &stopped);
            let unwanted = stopped.load(Ordering::Relaxed);
            let differences = if unwanted { Vec::new() } else { differences(&last, &look) };
            Seen { look, differences }
        });
        tokio::pin!(work);
        let looked = tokio::select! {
            looked = &mut work => looked,
            () = gone(guest, stream) => {
                stop.store(true, Ordering::Relaxed);
                let _ = work.await;
                return None;
            }
        };
        // A pause in the middle of a look is no measure of it.
        self.rest = (begun.elapsed() * REST).clamp(LOOK, LONGEST_REST);
        Some(looked)
    }
}

/// Waits until nobody listens to the stream any more.
async fn gone(guest: &Rc<Guest>, stream: StreamId) {
    loop {
        let Some((_, bell)) = guest.hub.borrow().room(stream) else { return };
        bell.notified().await;
    }
}

fn overflow() -> WatchEvent {
    WatchEvent { kind: "overflow".into(), path: String::new(), is_dir: false }
}

/// Hands events to the stream once there is room for them; `false`: the stream is gone. While a watcher doesn't read,
/// nothing is looked at, so nothing piles up, and the next look tells it all.
async fn send(guest: &Rc<Guest>, stream: StreamId, events: &[WatchEvent]) -> bool {
    let mut lines = lines_of(events);
    if lines.len() > WINDOW {
        // More than any watcher can be behind: it has to look for itself.
        lines = lines_of(&[overflow()]);
    }
    loop {
        let Some((room, bell)) = guest.hub.borrow().room(stream) else { return false };
        if lines.len() <= room {
            guest.hub.borrow_mut().take_in(stream, &lines);
            return true;
        }
        bell.notified().await;
    }
}

fn lines_of(events: &[WatchEvent]) -> Vec<u8> {
    let mut lines = Vec::new();
    for event in events {
        // Text always has a JSON.
        lines.extend(serde_json::to_vec(event).unwrap_or_default());
        lines.push(b'\n');
    }
    lines
}
