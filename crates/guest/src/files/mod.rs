//! File requests.

use crate::guest::Guest;
use std::rc::Rc;
use wire::{Code, StreamId, WireError, files::FileRequest};

/// File requests under way.
#[derive(Debug, Default)]
pub struct Transfers {}

impl Transfers {
    /// Ends them all and waits for it.
    pub async fn stop(&self, _guest: &Rc<Guest>) {}
}

impl Guest {
    pub fn file_request(self: &Rc<Self>, epoch: u64, id: u64, _stream: Option<StreamId>, _request: FileRequest) {
        self.hub.borrow_mut().reply(epoch, id, Err(WireError::new(Code::Unsupported, "files come with the next version")));
    }
}
