//! Following histories: from the store to its end, then as events are committed.

use crate::{Engine, Error, facts, inner::Inner};
use model::{EventSeq, SessionId, State};
use std::{collections::VecDeque, sync::Arc};
use store::{Cursor, EventRow, MAX_PAGE};
use tokio::sync::broadcast::{self, error::RecvError};

/// Events read at once.
const STRETCH: usize = 256;

/// What is followed, and the next event of it.
enum Place {
    Session { id: SessionId, next: EventSeq },
    All { after: Cursor },
}

/// Events in their order, each once.
pub struct EventFollower {
    inner: Arc<Inner>,
    place: Place,
    /// Read from the store and not yet given.
    waiting: VecDeque<EventRow>,
    /// Tells of commits. Events themselves come from the store: what is told may have holes.
    told: broadcast::Receiver<Arc<EventRow>>,
}

impl Engine {
    /// A session's events from number `from` on; of a deleted session, too.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn events(&self, id: SessionId, from: EventSeq, limit: usize) -> Result<Vec<EventRow>, Error> {
        let session = self.inner.find(id).await?;
        // What somebody was told of has its event, too.
        facts::drain(&self.inner, &session).await?;
        Ok(self.inner.store.events(id, from, limit.min(MAX_PAGE)).await?)
    }

    /// The events of all sessions after a place.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a cursor of another list.
    pub async fn events_of_all(&self, after: Option<Cursor>, limit: usize) -> Result<Vec<EventRow>, Error> {
        Ok(self.inner.store.events_of_all(after, limit.min(MAX_PAGE)).await?)
    }

    /// Follows a session's events from number `from` on, until it is deleted.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn follow_events(&self, id: SessionId, from: EventSeq) -> Result<EventFollower, Error> {
        self.inner.find(id).await?;
        Ok(self.follower(Place::Session { id, next: EventSeq(from.0.max(1)) }))
    }

    /// Follows the events of all sessions after a place; `None`: only what comes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a cursor of another list.
    pub async fn follow_events_of_all(&self, after: Option<Cursor>) -> Result<EventFollower, Error> {
        let after = match after {
            Some(after) => after,
            None => self.inner.store.latest_event().await?,
        };
        Ok(self.follower(Place::All { after }))
    }

    fn follower(&self, place: Place) -> EventFollower {
        let told = self.inner.events.subscribe();
        EventFollower { inner: self.inner.clone(), place, waiting: VecDeque::new(), told }
    }
}

impl EventFollower {
    /// Waits for the next event. `None` when there will be no more: the session is deleted, or the engine closes.
    ///
    /// # Errors
    /// The store can't be read.
    pub async fn next(&mut self) -> Result<Option<EventRow>, Error> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                self.passed(&event);
                return Ok(Some(event));
            }
            let over = self.is_over().await?;
            self.waiting = match &self.place {
                Place::Session { id, next } => self.inner.store.events(*id, *next, STRETCH).await?,
                Place::All { after } => self.inner.store.events_of_all(Some(after.clone()), STRETCH).await?,
            }
            .into();
            if self.waiting.is_empty() {
                if over {
                    return Ok(None);
                }
                tokio::select! {
                    more = news(&mut self.told, &self.place) => if !more { return Ok(None) },
                    () = self.inner.closing.cancelled() => return Ok(None),
                }
            }
        }
    }

    fn passed(&mut self, event: &EventRow) {
        match &mut self.place {
            Place::Session { next, .. } => *next = EventSeq(event.seq.0 + 1),
            Place::All { after } => *after = event.cursor(),
        }
    }

    /// True where nothing will be added any more to what the store has now.
    async fn is_over(&self) -> Result<bool, Error> {
        match &self.place {
            Place::All { .. } => Ok(false),
            Place::Session { id, .. } => match self.inner.store.session(*id).await? {
                Some(row) => Ok(row.state == State::Deleted),
                None => Ok(true),
            },
        }
    }
}

/// Waits until there may be an event of this place; false once there never will be.
async fn news(told: &mut broadcast::Receiver<Arc<EventRow>>, place: &Place) -> bool {
    loop {
        match (told.recv().await, place) {
            (Ok(event), Place::Session { id, next }) if event.session_id != *id || event.seq < *next => {}
            (Ok(_) | Err(RecvError::Lagged(_)), _) => return true,
            (Err(RecvError::Closed), _) => return false,
        }
    }
}
