//! Reading a stream up to the very byte from which on it is lost.
//!
//! Chunks are fetched and verified many at once, so where one is lost, whole ones before it are not given out either. They
//! are read again then, in ever smaller parts: what was lost is to be named, not what came some megabytes before it.

use blob::{Repository, StreamRef};
use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncWrite, AsyncWriteExt};

/// The first part that is read again: the least size of most chunks.
const STEP: u64 = 256 << 10;

/// Where a stream broke off, and why.
#[derive(Debug)]
pub(super) struct Broken {
    pub(super) at: u64,
    pub(super) error: blob::Error,
}

/// Gives the whole stream to `sink`; where a part of it is lost, all that comes before.
pub(super) async fn pour(repository: &Repository, stream: &StreamRef, sink: impl AsyncWrite + Unpin) -> Result<(), Broken> {
    let mut sink = Counted { sink, bytes: 0 };
    match repository.read_stream(stream, &mut sink).await {
        Err(error) if error.is_loss() => {
            let at = sink.bytes;
            last_bytes(repository, stream, &mut sink, Broken { at, error }).await
        }
        other => other.map_err(|error| Broken { at: sink.bytes, error }),
    }
}

async fn last_bytes(
    repository: &Repository,
    stream: &StreamRef,
    sink: &mut (impl AsyncWrite + Unpin),
    mut broken: Broken,
) -> Result<(), Broken> {
    let (mut step, mut part) = (STEP, Vec::new());
    while broken.at < stream.len {
        let till = stream.len.min(broken.at + step);
        part.clear();
        match repository.read_range(stream, broken.at..till, &mut part).await {
            Ok(()) => {
                let written = sink.write_all(&part).await;
                written.map_err(|e| Broken { at: broken.at, error: io_error(e) })?;
                broken.at = till;
            }
            Err(error) if error.is_loss() && step > 1 => step /= 2,
            Err(error) => {
                broken.error = error;
                break;
            }
        }
    }
    sink.flush().await.map_err(|e| Broken { at: broken.at, error: io_error(e) })?;
    // It may have been the disk's or the memory's whim, and all of it is here now.
    if broken.at < stream.len { Err(broken) } else { Ok(()) }
}

fn io_error(error: io::Error) -> blob::Error {
    blob::Error::Io { what: "can't write what was read".to_owned(), source: error.into() }
}

/// The first byte of a stream that is lost, and why, as far as that can be told.
pub(super) async fn first_lost(repository: &Repository, stream: &StreamRef, error: blob::Error) -> Broken {
    match pour(repository, stream, tokio::io::sink()).await {
        Err(broken) => broken,
        Ok(()) => Broken { at: 0, error },
    }
}

struct Counted<W> {
    sink: W,
    bytes: u64,
}

impl<W: AsyncWrite + Unpin> AsyncWrite for Counted<W> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.sink).poll_write(context, bytes))?;
        this.bytes += written as u64;
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().sink).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().sink).poll_shutdown(context)
    }
}
