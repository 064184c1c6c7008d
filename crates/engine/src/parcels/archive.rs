//! A repository as one file, there and back: a tar archive, streamed.

use crate::{
    ByteStream, Error,
    launch::{ensure_private_dir, io_error},
};
use bytes::Bytes;
use futures_util::StreamExt;
use std::{
    fs::File,
    io::{self, Read},
    path::{Component, Path},
};
use tokio::sync::mpsc;

/// Pieces that wait for the reader, and the size of one.
const PIECES: usize = 8;
const PIECE: usize = 256 * 1024;

/// The directory as an archive, which goes with the last of it.
pub(super) fn pour(dir: tempfile::TempDir) -> ByteStream {
    let (tell, pieces) = mpsc::channel::<io::Result<Bytes>>(PIECES);
    tokio::task::spawn_blocking(move || {
        let sender = Sender { tell: tell.clone(), piece: Vec::with_capacity(PIECE) };
        let mut builder = tar::Builder::new(sender);
        builder.follow_symlinks(false);
        let written = builder.append_dir_all(".", dir.path().join("repository")).and_then(|()| builder.into_inner()?.done());
        if let Err(error) = written {
            let _ = tell.blocking_send(Err(error));
        }
    });
    Box::pin(futures_util::stream::unfold(pieces, |mut pieces| async move { Some((pieces.recv().await?, pieces)) }))
}

/// Writes into the channel, piece by piece.
struct Sender {
    tell: mpsc::Sender<io::Result<Bytes>>,
    piece: Vec<u8>,
}

impl Sender {
    fn send(&mut self) -> io::Result<()> {
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE));
        self.tell.blocking_send(Ok(piece.into())).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn done(mut self) -> io::Result<()> {
        if self.piece.is_empty() { Ok(()) } else { self.send() }
    }
}

impl io::Write for Sender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(PIECE - self.piece.len());
        self.piece.extend_from_slice(&bytes[..taken]);
        if self.piece.len() == PIECE {
            self.send()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Unpacks an archive of a repository, which may be anything: plain files and directories only, and none outside.
pub(super) async fn unpack(place: &Path, mut file: ByteStream) -> Result<(), Error> {
    let (tell, pieces) = mpsc::channel::<io::Result<Bytes>>(PIECES);
    let place = place.to_owned();
    let unpacking = tokio::task::spawn_blocking(move || unpack_all(&place, Receiver { pieces, piece: Bytes::new() }));
    while let Some(piece) = file.next().await {
        // Where it has ended it says why.
        if tell.send(piece).await.is_err() {
            break;
        }
    }
    drop(tell);
    unpacking.await.map_err(Error::internal)?
}

fn unpack_all(place: &Path, from: impl Read) -> Result<(), Error> {
    let wrong = |what: &str| Error::invalid("file", format!("it is no exported session: {what}"));
    let io = |e: io::Error| io_error(&e, "unpack the file");
    ensure_private_dir(place).map_err(io)?;
    let mut archive = tar::Archive::new(from);
    let entries = archive.entries().map_err(|_| wrong("it is no archive"))?;
    for entry in entries {
        let mut entry = entry.map_err(|_| wrong("it is no whole archive"))?;
        let path = entry.path().map_err(|_| wrong("a name in it can't be read"))?.into_owned();
        let plain = path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        let kind = entry.header().entry_type();
        if !plain || path.components().count() > 8 {
            return Err(wrong("a name in it leads elsewhere"));
        }
        let to = place.join(&path);
        if kind.is_dir() {
            ensure_private_dir(&to).map_err(io)?;
        } else if kind.is_file() {
            to.parent().map_or(Ok(()), ensure_private_dir).map_err(io)?;
            let mut made = File::create_new(&to).map_err(io)?;
            io::copy(&mut entry, &mut made).map_err(|e| match e.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => io(e),
                _ => wrong("it is cut off"),
            })?;
        } else {
            return Err(wrong("it has something other than files in it"));
        }
    }
    Ok(())
}

/// Reads what comes through the channel.
struct Receiver {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl Read for Receiver {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.pieces.blocking_recv() {
                Some(piece) => self.piece = piece?,
                None => return Ok(0),
            }
        }
        let taken = self.piece.len().min(into.len());
        into[..taken].copy_from_slice(&self.piece.split_to(taken));
        Ok(taken)
    }
}
