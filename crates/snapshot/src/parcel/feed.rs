//! From a stream that is read by an asynchronous task to a thread that blocks: whole blocks through a bounded channel.

use std::{
    io, mem,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::{io::AsyncWrite, sync::mpsc};
use tokio_util::sync::PollSender;

/// Bytes that are handed over at once.
const BLOCK: usize = 1 << 20;
/// Blocks that may wait.
const WAITING: usize = 4;

/// The two ends. Dropping the feed ends the source; dropping the source makes the feed fail.
pub(super) fn channel() -> (Feed, Source) {
    let (sender, blocks) = mpsc::channel(WAITING);
    (Feed { sender: PollSender::new(sender), block: Vec::new() }, Source { blocks, block: Vec::new(), at: 0, taken: 0 })
}

/// Takes bytes. What was written is handed over when a block is full, or at a flush.
pub(super) struct Feed {
    sender: PollSender<Vec<u8>>,
    block: Vec<u8>,
}

impl Feed {
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        ready!(self.sender.poll_reserve(context)).map_err(gone)?;
        Poll::Ready(self.sender.send_item(mem::take(&mut self.block)).map_err(gone))
    }
}

impl AsyncWrite for Feed {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let feed = self.get_mut();
        if feed.block.len() == BLOCK {
            ready!(feed.poll_send(context))?;
        }
        if feed.block.is_empty() {
            feed.block.reserve_exact(BLOCK);
        }
        let taken = bytes.len().min(BLOCK - feed.block.len());
        feed.block.extend_from_slice(&bytes[..taken]);
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let feed = self.get_mut();
        if feed.block.is_empty() { Poll::Ready(Ok(())) } else { feed.poll_send(context) }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(context)
    }
}

/// Gives bytes. Blocks. Everywhere `None` is the end, in the middle of what was asked for or before it.
#[derive(Debug)]
pub(super) struct Source {
    blocks: mpsc::Receiver<Vec<u8>>,
    block: Vec<u8>,
    at: usize,
    /// All bytes that it gave.
    pub(super) taken: u64,
}

impl Source {
    /// Some of the next bytes, at most so many and one at least.
    pub(super) fn some(&mut self, most: u64) -> Option<&[u8]> {
        while self.at == self.block.len() {
            (self.block, self.at) = (self.blocks.blocking_recv()?, 0);
        }
        let length = usize::try_from(most).unwrap_or(usize::MAX).min(self.block.len() - self.at);
        let from = self.at;
        self.at += length;
        self.taken += length as u64;
        Some(&self.block[from..from + length])
    }

    /// The next `length` bytes, put behind what `into` has. The caller has checked the length.
    pub(super) fn append(&mut self, into: &mut Vec<u8>, length: usize) -> Option<()> {
        let mut left = length;
        while left > 0 {
            let some = self.some(left as u64)?;
            into.extend_from_slice(some);
            left -= some.len();
        }
        Some(())
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (mut array, mut filled) = ([0; N], 0);
        while filled < N {
            let some = self.some((N - filled) as u64)?;
            array[filled..filled + some.len()].copy_from_slice(some);
            filled += some.len();
        }
        Some(array)
    }

    /// Waits for what comes next: true where that is nothing.
    pub(super) fn is_at_end(&mut self) -> bool {
        while self.at == self.block.len() {
            let Some(block) = self.blocks.blocking_recv() else { return true };
            (self.block, self.at) = (block, 0);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn bytes_come_out_as_they_went_in() {
        let (mut feed, mut source) = channel();
        let bytes: Vec<u8> = (0..10_000_000_u32).map(|n| (n % 251) as u8).collect();
        let expected = bytes.clone();
        let reader = tokio::task::spawn_blocking(move || {
            let mut read = source.array::<3>().unwrap().to_vec();
            source.append(&mut read, 5_000_000).unwrap();
            while let Some(some) = source.some(777_777) {
                read.extend_from_slice(some);
            }
            assert!(source.is_at_end() && source.array::<1>().is_none());
            (read, source.taken)
        });
        feed.write_all(&bytes[..5]).await.unwrap();
        feed.flush().await.unwrap();
        feed.write_all(&bytes[5..]).await.unwrap();
        feed.shutdown().await.unwrap();
        drop(feed);
        let (read, taken) = reader.await.unwrap();
        assert!(read == expected && taken == expected.len() as u64);
    }

    #[tokio::test]
    async fn nobody_writes_for_nobody() {
        let (mut feed, source) = channel();
        drop(source);
        feed.write_all(b"x").await.unwrap();
        assert_eq!(feed.flush().await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
