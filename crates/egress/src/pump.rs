//! Copies between two streams, both ways, each with its own end.
//!
//! A buffer is held only while there are bytes in it: hundreds of idle connections cost nothing here, and a busy one
//! reads up to [`BUFFER`] bytes at once.

use std::{
    cell::RefCell,
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that are read at once.
const BUFFER: usize = 128 * 1024;
/// Reads after which other connections of the thread get their turn.
const TURN: usize = 32;

thread_local! {
    /// One buffer of each thread, for the reads that find nothing.
    static SPARE: RefCell<Option<Box<[u8]>>> = const { RefCell::new(None) };
}

fn take_buffer() -> Box<[u8]> {
    SPARE.with_borrow_mut(Option::take).unwrap_or_else(|| vec![0; BUFFER].into_boxed_slice())
}

fn give_back(buffer: Box<[u8]>) {
    SPARE.with_borrow_mut(|spare| *spare = Some(buffer));
}

/// Copies until both directions have ended.
///
/// # Errors
/// Either side was reset or refuses bytes: the other is to be reset, too.
pub(crate) async fn pump<A, B>(mut inside: A, mut outside: B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (mut out, mut back) = (Way::default(), Way::default());
    poll_fn(|cx| {
        let first = out.poll(cx, &mut inside, &mut outside)?;
        let second = back.poll(cx, &mut outside, &mut inside)?;
        if first.is_ready() && second.is_ready() { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await
}

/// One direction.
#[derive(Default)]
struct Way {
    held: Option<Box<[u8]>>,
    from: usize,
    to: usize,
    /// Written, and perhaps not yet flushed.
    unflushed: bool,
    ended: bool,
    closed: bool,
}

impl Way {
    fn poll<R, W>(&mut self, cx: &mut Context<'_>, source: &mut R, sink: &mut W) -> Poll<io::Result<()>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        for _ in 0..TURN {
            if self.closed {
                return Poll::Ready(Ok(()));
            }
            if self.from < self.to {
                ready!(self.write(cx, sink))?;
            } else if self.ended {
                ready!(Pin::new(&mut *sink).poll_shutdown(cx))?;
                self.closed = true;
            } else if self.read(cx, source)?.is_pending() {
                if self.unflushed {
                    ready!(Pin::new(&mut *sink).poll_flush(cx))?;
                    self.unflushed = false;
                }
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn write<W: AsyncWrite + Unpin>(&mut self, cx: &mut Context<'_>, sink: &mut W) -> Poll<io::Result<()>> {
        let bytes = self.held.as_deref().map_or(&[][..], |buffer| &buffer[self.from..self.to]);
        let written = ready!(Pin::new(sink).poll_write(cx, bytes))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.from += written;
        self.unflushed = true;
        Poll::Ready(Ok(()))
    }

    fn read<R: AsyncRead + Unpin>(&mut self, cx: &mut Context<'_>, source: &mut R) -> io::Result<Poll<()>> {
        let mut buffer = self.held.take().unwrap_or_else(take_buffer);
        let mut read = ReadBuf::new(&mut buffer);
        let result = Pin::new(source).poll_read(cx, &mut read);
        let filled = read.filled().len();
        match result {
            Poll::Ready(Ok(())) if filled > 0 => {
                (self.held, self.from, self.to) = (Some(buffer), 0, filled);
                return Ok(Poll::Ready(()));
            }
            Poll::Ready(Ok(())) => self.ended = true,
            Poll::Ready(Err(error)) => return Err(error),
            Poll::Pending => {}
        }
        give_back(buffer);
        Ok(if self.ended { Poll::Ready(()) } else { Poll::Pending })
    }
}
