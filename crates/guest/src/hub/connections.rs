//! Network connections: one number for both directions, which end together with their generation.

use super::{Hub, Mode, Receiving, Sending};
use bytes::BytesMut;
use std::rc::Rc;
use tokio::sync::Notify;
use wire::{
    Frame, StreamId,
    guest::{CONNECTION_STREAMS, Dial, FromGuest, Role},
    window::SendWindow,
};

impl Hub {
    /// Asks the supervisor for a connection. It is said at once, or when somebody listens again.
    pub fn dial(&mut self, to: Dial) -> StreamId {
        let mut id = StreamId(self.next_connection);
        while self.sending.contains_key(&id) || self.receiving.contains_key(&id) {
            id = following(id);
        }
        self.next_connection = following(id).0;
        self.insert_connection(id);
        self.dials.push_back((id, to));
        self.writer.notify_one();
        id
    }

    /// Opens a connection that the supervisor has asked for. A number that is in use gives `false`.
    #[must_use]
    pub fn open_connection(&mut self, id: StreamId) -> bool {
        if self.sending.contains_key(&id) || self.receiving.contains_key(&id) {
            return false;
        }
        self.note_number(id);
        self.insert_connection(id);
        true
    }

    fn insert_connection(&mut self, id: StreamId) {
        let window = SendWindow::of_connection();
        self.sending.insert(id, Sending { window, role: Role::Connection, queued: false, room: Rc::new(Notify::new()) });
        self.receiving.insert(id, Receiving::new(Role::Connection));
    }

    /// Ends all of them; those who wait on one find it gone.
    pub(super) fn drop_connections(&mut self) {
        self.dials.clear();
        self.drop_streams(&Role::Connection);
    }

    /// True where the connection was only wished for yet: the supervisor never hears of it.
    pub(super) fn undial(&mut self, id: StreamId) -> bool {
        let before = self.dials.len();
        self.dials.retain(|(dialed, _)| *dialed != id);
        self.dials.len() < before
    }

    pub(super) fn fill_dials(&mut self, out: &mut BytesMut) {
        debug_assert!(matches!(self.mode, Mode::Open | Mode::Quiescing), "somebody listens");
        for (stream, to) in self.dials.drain(..) {
            match Frame::control(&FromGuest::Dial { stream, to }) {
                Ok(frame) => frame.encode(out),
                Err(error) => log!("a connection can't be asked for: {error}"),
            }
        }
    }
}

fn following(id: StreamId) -> StreamId {
    StreamId(id.0.checked_add(1).unwrap_or(CONNECTION_STREAMS))
}
