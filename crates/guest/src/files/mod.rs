//! File requests: what is asked of paths inside, and the streams of bytes that go with it.
//!
//! The work is done by ordinary file calls on helper threads; a bounded queue each way joins them to the streams, so
//! a slow reader holds up its own transfer only. A transfer ends with its connection: its stream is gone, the thread
//! sees a broken pipe and cleans up.

mod archive;
mod list;
mod look;
mod root;
mod single;
mod transfer;
mod unpack;
mod watch;

use crate::guest::{Guest, blocking};
use std::{cell::Cell, rc::Rc, time::Duration};
use tokio::sync::Notify;
use transfer::{Sink, Source};
use wire::{
    Code, StreamId, WireError,
    files::{FileReply, FileRequest},
    guest::{Reply, Role},
};

/// Most transfers at a time. Each holds a thread, and threads are needed for other things, too.
const MOST: usize = 24;
/// How long to wait for transfers to clean up before a capture or a new connection.
const CLEAN_UP: Duration = Duration::from_secs(2);

/// Counts the transfers under way.
#[derive(Debug, Default)]
pub struct Transfers {
    count: Cell<usize>,
    fewer: Notify,
}

impl Transfers {
    /// Ends all transfers and waits until their temporary files are gone.
    pub async fn stop(&self, guest: &Rc<Guest>) {
        guest.hub.borrow_mut().drop_transfers();
        let _ = tokio::time::timeout(CLEAN_UP, async {
            while self.count.get() > 0 {
                self.fewer.notified().await;
            }
        })
        .await;
    }
}

struct Counted(Rc<Guest>);

impl Counted {
    fn new(guest: &Rc<Guest>) -> Option<Self> {
        let count = &guest.transfers.count;
        if count.get() >= MOST {
            return None;
        }
        count.set(count.get() + 1);
        Some(Self(guest.clone()))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let transfers = &self.0.transfers;
        transfers.count.set(transfers.count.get() - 1);
        transfers.fewer.notify_one();
    }
}

impl Guest {
    /// Begins a file request; the answer and the bytes follow from a task of its own.
    pub fn file_request(self: &Rc<Self>, epoch: u64, id: u64, stream: Option<StreamId>, request: FileRequest) {
        let guest = self.clone();
        let opened = self.open_transfer(stream, &request);
        tokio::task::spawn_local(async move {
            let result = match opened {
                Ok(stream) => guest.run_file_request(epoch, id, stream, request).await,
                Err(error) => Some(Err(error)),
            };
            if let Some(result) = result {
                guest.hub.borrow_mut().reply(epoch, id, result.map(|reply| Reply::File { reply }));
            }
        });
    }

    /// Opens the stream at once, so that bytes which follow the request find it.
    fn open_transfer(&self, stream: Option<StreamId>, request: &FileRequest) -> Result<Option<StreamId>, WireError> {
        if !request.takes_bytes() && !request.gives_bytes() {
            return Ok(None);
        }
        let Some(stream) = stream else {
            return Err(WireError::new(Code::Invalid, format!("{} needs a stream for its bytes", request.name())));
        };
        let mut hub = self.hub.borrow_mut();
        let opened = if request.takes_bytes() {
            hub.open_receiving(stream, Role::Transfer)
        } else {
            hub.open_sending(stream, Role::Transfer)
        };
        if opened { Ok(Some(stream)) } else { Err(WireError::new(Code::Invalid, "the stream number is in use already")) }
    }

    /// `None`: the answer has been given already.
    async fn run_file_request(
        self: &Rc<Self>,
        epoch: u64,
        id: u64,
        stream: Option<StreamId>,
        request: FileRequest,
    ) -> Option<Result<FileReply, WireError>> {
        let Some(stream) = stream else {
            return Some(blocking(move || single::run(request)).await.and_then(|result| result));
        };
        let Some(counted) = Counted::new(self) else {
            self.hub.borrow_mut().reset(stream, "too many transfers at once");
            return Some(Err(WireError::new(Code::Busy, format!("{MOST} file transfers are under way; try again later"))));
        };
        let result = if request.takes_bytes() {
            let (source, feeder) = transfer::source(self, stream);
            let work = blocking(move || receive(request, source));
            let (result, ()) = tokio::join!(work, feeder);
            let result = result.and_then(|result| result);
            if let Err(error) = &result {
                self.hub.borrow_mut().reset(stream, &error.message);
            }
            Some(result)
        } else {
            self.send(epoch, id, stream, request).await
        };
        drop(counted);
        result
    }

    async fn send(
        self: &Rc<Self>,
        epoch: u64,
        id: u64,
        stream: StreamId,
        request: FileRequest,
    ) -> Option<Result<FileReply, WireError>> {
        if let FileRequest::Watch { path, recursive } = &request {
            let watch = match watch::Watch::start(self, stream, path, *recursive).await {
                Ok(watch) => watch,
                Err(error) => {
                    self.hub.borrow_mut().forget(stream);
                    return Some(Err(error));
                }
            };
            self.hub.borrow_mut().reply(epoch, id, Ok(Reply::File { reply: FileReply::Streaming }));
            watch.run(self, stream).await;
            return None;
        }
        let (sink, answer, drainer) = transfer::sink(self, stream);
        let work = blocking(move || give(request, sink));
        let answered = async {
            if let Ok(reply) = answer.await {
                self.hub.borrow_mut().reply(epoch, id, Ok(Reply::File { reply }));
                true
            } else {
                false
            }
        };
        let (result, answered, ()) = tokio::join!(work, answered, drainer);
        let result = result.and_then(|result| result);
        let mut hub = self.hub.borrow_mut();
        match result {
            Ok(()) => {
                hub.finish(stream);
                None
            }
            Err(error) if answered => {
                hub.reset(stream, &error.message);
                None
            }
            Err(error) => {
                hub.forget(stream);
                Some(Err(error))
            }
        }
    }
}

fn receive(request: FileRequest, source: Source) -> Result<FileReply, WireError> {
    match request {
        FileRequest::Write { path, mode, parents } => single::write(&path, mode, parents, source),
        FileRequest::Unpack { path } => unpack::unpack(&path, source),
        _ => Err(WireError::new(Code::Internal, "this request takes no bytes")),
    }
}

fn give(request: FileRequest, mut sink: Sink) -> Result<(), WireError> {
    match request {
        FileRequest::List { path, depth } => list::list(&path, depth, &mut sink),
        FileRequest::Read { path, offset, length } => single::read(&path, offset.0, length, &mut sink),
        FileRequest::Archive { path } => archive::archive(&path, &mut sink),
        _ => Err(WireError::new(Code::Internal, "this request gives no bytes")),
    }
}

/// The path as the kernel is asked for it: absolute, without NUL.
///
/// # Errors
/// [`Code::Invalid`].
fn absolute(path: &str) -> Result<String, WireError> {
    if path.is_empty() {
        return Err(WireError::new(Code::Invalid, "the path is empty"));
    }
    if path.contains('\0') {
        return Err(WireError::new(Code::Invalid, format!("a NUL byte in the path {path:?}")));
    }
    Ok(if path.starts_with('/') { path.to_owned() } else { format!("/{path}") })
}
