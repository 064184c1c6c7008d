//! The queue between a helper thread that reads or writes files and a stream of the channel.

use crate::{guest::Guest, hub::Next};
use bytes::{Buf, Bytes};
use std::{
    future::Future,
    io::{self, Read, Write},
    rc::Rc,
};
use tokio::sync::{mpsc, oneshot};
use wire::{StreamId, files::FileReply, frame::MAX_DATA};

const QUEUE: usize = 4;

/// Where a helper thread puts the bytes of a download; the answer comes before them.
pub struct Sink {
    answer: Option<oneshot::Sender<FileReply>>,
    queue: mpsc::Sender<Bytes>,
    buffer: Vec<u8>,
}

impl Sink {
    /// Answers the request. What fails after this resets the stream.
    pub fn answer(&mut self, reply: FileReply) {
        if let Some(answer) = self.answer.take() {
            let _ = answer.send(reply);
        }
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let take = bytes.len().min(MAX_DATA - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..take]);
        if self.buffer.len() >= MAX_DATA {
            self.flush()?;
        }
        Ok(take)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let bytes = std::mem::replace(&mut self.buffer, Vec::with_capacity(MAX_DATA)).into();
        self.queue.blocking_send(bytes).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// A sink, its answer, and the task that moves what it gets to the stream.
pub fn sink(guest: &Rc<Guest>, stream: StreamId) -> (Sink, oneshot::Receiver<FileReply>, impl Future<Output = ()> + use<>) {
    let (answer, answered) = oneshot::channel();
    let (queue, mut bytes) = mpsc::channel::<Bytes>(QUEUE);
    let guest = guest.clone();
    let drainer = async move {
        loop {
            let Some(mut piece) = bytes.recv().await else { return };
            while !piece.is_empty() {
                let room = guest.hub.borrow().room(stream);
                match room {
                    // Dropping the queue tells the thread.
                    None => return,
                    Some((0, bell)) => bell.notified().await,
                    Some((room, _)) => {
                        let take = room.min(piece.len());
                        guest.hub.borrow_mut().take_in(stream, &piece[..take]);
                        piece.advance(take);
                    }
                }
            }
        }
    };
    (Sink { answer: Some(answer), queue, buffer: Vec::with_capacity(MAX_DATA) }, answered, drainer)
}

/// Where a helper thread gets the bytes of an upload. A stream that is cut off is an error, not an end.
pub struct Source {
    queue: mpsc::Receiver<Option<Bytes>>,
    piece: Bytes,
    ended: bool,
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.queue.blocking_recv() {
                Some(Some(piece)) => self.piece = piece,
                Some(None) => self.ended = true,
                None => return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the transfer was cut off")),
            }
        }
        let take = buffer.len().min(self.piece.len());
        buffer[..take].copy_from_slice(&self.piece[..take]);
        self.piece.advance(take);
        Ok(take)
    }
}

/// A source, and the task that moves what the stream brings to it.
pub fn source(guest: &Rc<Guest>, stream: StreamId) -> (Source, impl Future<Output = ()> + use<>) {
    let (queue, pieces) = mpsc::channel(QUEUE);
    let guest = guest.clone();
    let feeder = async move {
        let Some(news) = guest.hub.borrow().news(stream) else { return };
        loop {
            let next = guest.hub.borrow_mut().next(stream);
            match next {
                Next::Bytes(piece) => {
                    let count = piece.len();
                    if queue.send(Some(piece)).await.is_err() {
                        return;
                    }
                    guest.hub.borrow_mut().consumed(stream, count);
                }
                Next::End => {
                    let _ = queue.send(None).await;
                    guest.hub.borrow_mut().close_receiving(stream);
                    return;
                }
                Next::Gone => return,
                Next::Nothing => {
                    tokio::select! {
                        () = news.notified() => {}
                        () = queue.closed() => return,
                    }
                }
            }
        }
    };
    (Source { queue: pieces, piece: Bytes::new(), ended: false }, feeder)
}
