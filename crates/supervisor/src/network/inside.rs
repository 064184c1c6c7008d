//! One connection of a program inside, as a stream of bytes.

use crate::core::Core;
use bytes::{Bytes, BytesMut};
use model::Offset;
use std::{
    io,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use wire::StreamId;

/// Both directions. Dropped before what goes in was finished, it is reset.
pub struct Inside {
    from: Incoming,
    to: Outgoing,
}

/// What comes from inside.
pub struct Incoming {
    both: Arc<Both>,
    arrived: Arc<Arrived>,
    /// Everything below was taken.
    taken: Offset,
}

/// What goes in.
pub struct Outgoing {
    both: Arc<Both>,
}

struct Both {
    core: Arc<Core>,
    stream: StreamId,
    read: AtomicBool,
    written: AtomicBool,
}

impl Drop for Both {
    fn drop(&mut self) {
        match (self.read.load(Ordering::Relaxed), self.written.load(Ordering::Relaxed)) {
            (true, true) => {}
            // A refusal, say: the program shall see it before it sees the end.
            (false, true) => self.core.discard_connection(self.stream),
            (_, false) => {
                self.core.forget_stream(self.stream);
                self.core.link.reset(self.stream, "the connection was reset");
            }
        }
    }
}

impl Inside {
    /// The stream's two ends here; whoever calls opens the link's.
    pub fn new(core: Arc<Core>, stream: StreamId) -> Inside {
        let arrived = core.receive_connection(stream);
        let both = Arc::new(Both { core, stream, read: AtomicBool::new(false), written: AtomicBool::new(false) });
        Inside { from: Incoming { both: both.clone(), arrived, taken: Offset::ZERO }, to: Outgoing { both } }
    }

    pub fn split(self) -> (Incoming, Outgoing) {
        (self.from, self.to)
    }
}

impl Incoming {
    /// The next bytes; `None` at their end. The guest sends more once they were taken.
    ///
    /// # Errors
    /// The connection was reset.
    pub async fn next(&mut self) -> io::Result<Option<Bytes>> {
        let bytes = std::future::poll_fn(|cx| self.poll_take(cx, usize::MAX)).await?;
        Ok(Some(bytes).filter(|bytes| !bytes.is_empty()))
    }

    /// Of no use any more although what went in was finished: its program shall see a reset.
    pub fn abort(&self) {
        self.both.written.store(false, Ordering::Relaxed);
    }

    /// Ready with some bytes, or with none at their end.
    fn poll_take(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<io::Result<Bytes>> {
        let bytes = ready!(self.arrived.poll_take(cx, most))?;
        if bytes.is_empty() {
            self.both.read.store(true, Ordering::Relaxed);
        } else {
            self.taken = self.taken.plus(bytes.len());
            self.both.core.transfer_taken(self.both.stream, self.taken);
        }
        Poll::Ready(Ok(bytes))
    }
}

/// Bytes that have come from inside and wait to be taken: in one piece, however they came, so that they cost no more than
/// they are.
#[derive(Default)]
pub struct Arrived(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    bytes: BytesMut,
    ended: bool,
    failed: bool,
    waker: Option<Waker>,
}

impl Arrived {
    fn change(&self, change: impl FnOnce(&mut Waiting)) {
        let mut waiting = self.0.lock().expect("nothing panics while it holds what has arrived");
        change(&mut waiting);
        if let Some(waker) = waiting.waker.take() {
            waker.wake();
        }
    }

    pub fn push(&self, bytes: &[u8]) {
        self.change(|waiting| waiting.bytes.extend_from_slice(bytes));
    }

    /// Nothing more will come.
    pub fn end(&self) {
        self.change(|waiting| waiting.ended = true);
    }

    /// It was reset: what has come is of no use either.
    pub fn fail(&self) {
        self.change(|waiting| waiting.failed = true);
    }

    fn poll_take(&self, cx: &Context<'_>, most: usize) -> Poll<io::Result<Bytes>> {
        let mut waiting = self.0.lock().expect("nothing panics while it holds what has arrived");
        if waiting.failed {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if waiting.bytes.is_empty() && !waiting.ended {
            waiting.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let count = waiting.bytes.len().min(most);
        Poll::Ready(Ok(waiting.bytes.split_to(count).freeze()))
    }
}

impl Outgoing {
    /// Gives all of it, waiting for room. `false`: nobody takes it any more.
    pub async fn send(&self, bytes: &[u8]) -> bool {
        self.both.core.link.send_all(self.both.stream, bytes).await
    }

    /// Waits until nobody takes anything any more.
    pub async fn gone(&self) {
        while let Some(changed) = self.both.core.link.room_changed(self.both.stream) {
            let changed = changed.notified();
            if !self.both.core.link.is_sending(self.both.stream) {
                return;
            }
            changed.await;
        }
    }

    /// Nothing more will come.
    pub fn finish(&self) {
        self.both.written.store(true, Ordering::Relaxed);
        self.both.core.link.finish(self.both.stream);
    }
}

impl AsyncRead for Inside {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if into.remaining() > 0 {
            let bytes = ready!(self.from.poll_take(cx, into.remaining()))?;
            into.put_slice(&bytes);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Inside {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let both = &self.to.both;
        match ready!(both.core.link.poll_offer(cx, both.stream, bytes)) {
            Some(count) => Poll::Ready(Ok(count)),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.to.finish();
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_come_is_one_piece_then_the_end_and_a_reset_takes_it_back() {
        let cx = &Context::from_waker(Waker::noop());
        let arrived = Arrived::default();
        assert!(arrived.poll_take(cx, 10).is_pending());
        arrived.push(b"a");
        arrived.push(b"bcd");
        assert!(matches!(arrived.poll_take(cx, 3), Poll::Ready(Ok(bytes)) if &bytes[..] == b"abc"));
        arrived.end();
        assert!(matches!(arrived.poll_take(cx, 3), Poll::Ready(Ok(bytes)) if &bytes[..] == b"d"));
        assert!(matches!(arrived.poll_take(cx, 3), Poll::Ready(Ok(bytes)) if bytes.is_empty()));
        arrived.fail();
        assert!(matches!(arrived.poll_take(cx, 3), Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset));
    }
}
