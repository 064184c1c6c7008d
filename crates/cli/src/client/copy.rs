//! `cp`: files and directories between a session and this machine.

use super::{
    Context,
    failure::{Failure, Result},
    files::{self, next_piece},
    http::{Body, Call},
    select,
    text::safe,
    unpack::{self, last_name},
};
use api_types::{FileMeta, FileType};
use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use model::SessionId;
use std::{
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tokio::{io::AsyncRead, io::AsyncReadExt, sync::mpsc};

/// How much is read and sent at a time.
const PIECE: usize = 256 * 1024;

/// One side of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Side {
    Here(PathBuf),
    Session { word: String, path: String },
    Stdio,
}

/// Reads a side. A session's begins with a word without `/` and then `:/`: keys may contain colons.
fn side(text: &str) -> Side {
    if text == "-" {
        return Side::Stdio;
    }
    match text.find(":/") {
        Some(at) if at > 0 && !text[..at].contains('/') => {
            Side::Session { word: text[..at].to_owned(), path: text[at + 1..].to_owned() }
        }
        _ => Side::Here(text.into()),
    }
}

/// `dormouse cp`.
///
/// # Errors
/// What the server refuses; files here that can't be read or written.
pub async fn command(ctx: &Context, source: &str, target: &str) -> Result<()> {
    match (side(source), side(target)) {
        (Side::Session { word, path }, Side::Here(here)) => {
            let session = select::session(&ctx.client, &word).await?.id;
            fetch(ctx, session, &path, &here).await
        }
        (Side::Session { word, path }, Side::Stdio) => {
            let session = select::session(&ctx.client, &word).await?.id;
            let meta = there(ctx, session, &path).await?;
            let body = if meta.kind == FileType::Dir {
                archive(ctx, session, &path).await?
            } else {
                files::read(ctx, session, &path).await?
            };
            files::to_stdout(body).await
        }
        (Side::Here(here), Side::Session { word, path }) => {
            let session = select::session(&ctx.client, &word).await?.id;
            send(ctx, session, &here, &path).await
        }
        (Side::Stdio, Side::Session { word, path }) => {
            let session = select::session(&ctx.client, &word).await?.id;
            let what = if path.ends_with('/') { "archive" } else { "files" };
            put(ctx, files::address(session, what, &path), streamed(tokio::io::stdin())).await
        }
        (Side::Session { .. }, Side::Session { .. }) => {
            Err(Failure::usage("both sides are sessions: copy through this machine, 'dormouse cp A:/x - | dormouse cp - B:/x'"))
        }
        _ => Err(Failure::usage("no side is a session: write one as SESSION:/path")),
    }
}

async fn there(ctx: &Context, session: SessionId, path: &str) -> Result<FileMeta> {
    let found = files::stat(ctx, session, path).await?;
    found.ok_or_else(|| Failure::not_found(format!("there is no {} in session {session}", safe(path))))
}

async fn archive(ctx: &Context, session: SessionId, path: &str) -> Result<Incoming> {
    Ok(ctx.client.send(Call::get(files::address(session, "archive", path))).await?.into_body())
}

async fn put(ctx: &Context, address: String, body: Body) -> Result<()> {
    let call = Call::put(address).header("content-type", "application/octet-stream");
    ctx.client.send_stream(call, body).await?;
    Ok(())
}

/// From a session to here.
async fn fetch(ctx: &Context, session: SessionId, path: &str, here: &Path) -> Result<()> {
    let meta = there(ctx, session, path).await?;
    let target = match (here.is_dir(), last_name(path)) {
        (true, Some(name)) => here.join(name),
        _ => here.to_owned(),
    };
    if meta.kind != FileType::Dir {
        let body = files::read(ctx, session, path).await?;
        return write_file(body, &target, meta.mode & 0o777).await;
    }
    if target.exists() && !target.is_dir() {
        return Err(Failure::failed(format!("{} is there and is no directory", target.display())));
    }
    let mut body = archive(ctx, session, path).await?;
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(4);
    let unpacking = tokio::task::spawn_blocking(move || unpack::unpack(Pieces::new(receiver), &target));
    loop {
        let piece = match next_piece(&mut body).await {
            Ok(Some(piece)) => Ok(piece),
            Ok(None) => break,
            Err(failure) => Err(io::Error::other(failure.message)),
        };
        let failed = piece.is_err();
        if sender.send(piece).await.is_err() || failed {
            break;
        }
    }
    drop(sender);
    let done = unpacking.await.map_err(|e| Failure::failed(format!("unpacking ended early: {e}")))?;
    let done = done.map_err(|e| Failure::failed(e.0))?;
    for line in &done.left_out {
        eprintln!("dormouse: left out {}", safe(line));
    }
    Ok(())
}

/// The new file is complete or the old one stays.
async fn write_file(mut body: Incoming, target: &Path, mode: u32) -> Result<()> {
    let failed = |e: io::Error| Failure::failed(format!("can't write {}: {e}", target.display()));
    let folder = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if target.is_dir() {
        return Err(Failure::failed(format!("{} is a directory", target.display())));
    }
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    while let Some(piece) = next_piece(&mut body).await? {
        file.write_all(&piece).map_err(failed)?;
    }
    file.as_file().set_permissions(std::fs::Permissions::from_mode(mode)).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    file.persist(target).map_err(|e| failed(e.error))?;
    Ok(())
}

/// From here to a session.
async fn send(ctx: &Context, session: SessionId, here: &Path, path: &str) -> Result<()> {
    let failed = |e: io::Error| Failure::failed(format!("can't read {}: {e}", here.display()));
    let meta = std::fs::metadata(here).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            Failure::not_found(format!("there is no {} here — a session's path is SESSION:/path", here.display()))
        }
        _ => failed(e),
    })?;
    let into_dir = path.ends_with('/') || files::stat(ctx, session, path).await?.is_some_and(|meta| meta.kind == FileType::Dir);
    let name = here.canonicalize().map_err(failed)?;
    let name = name.file_name().ok_or_else(|| Failure::usage("can't copy the root directory"))?.to_owned();
    let target = if into_dir { format!("{}/{}", path.trim_end_matches('/'), name.to_string_lossy()) } else { path.to_owned() };
    if meta.is_dir() {
        let body = packed(here.to_owned());
        return put(ctx, files::address(session, "archive", &target), body).await;
    }
    let file = tokio::fs::File::open(here).await.map_err(failed)?;
    let address = format!("{}&mode={:o}", files::address(session, "files", &target), meta.permissions().mode() & 0o777);
    put(ctx, address, streamed(file)).await
}

/// A body that is read as it is sent. An error in the middle breaks the request off, so that the old file stays.
fn streamed(reader: impl AsyncRead + Send + Unpin + 'static) -> Body {
    let pieces = stream::unfold(Some(reader), |reader| async {
        let mut reader = reader?;
        let mut buffer = vec![0; PIECE];
        match reader.read(&mut buffer).await {
            Ok(0) => None,
            Ok(n) => {
                buffer.truncate(n);
                Some((Ok(Frame::data(Bytes::from(buffer))), Some(reader)))
            }
            Err(e) => Some((Err(e), None)),
        }
    });
    BodyExt::boxed_unsync(StreamBody::new(pieces))
}

/// Packs a directory's contents as it is sent: names are relative to it, links stay links.
fn packed(directory: PathBuf) -> Body {
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(4);
    tokio::task::spawn_blocking(move || {
        let mut builder = tar::Builder::new(io::BufWriter::with_capacity(PIECE, ToPieces(sender.clone())));
        builder.follow_symlinks(false);
        let packing = builder.append_dir_all(".", &directory).and_then(|()| builder.into_inner()).and_then(|mut out| out.flush());
        if let Err(error) = packing {
            // A request that has ended needs no error.
            let _ = sender.blocking_send(Err(error));
        }
    });
    let pieces = stream::unfold(receiver, |mut receiver| async {
        let piece = receiver.recv().await?;
        Some((piece.map(Frame::data), receiver))
    });
    BodyExt::boxed_unsync(StreamBody::new(pieces))
}

/// Sends what is written.
struct ToPieces(mpsc::Sender<io::Result<Bytes>>);

impl Write for ToPieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let gone = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the request has ended");
        self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes))).map_err(gone)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads what is sent.
struct Pieces {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl Pieces {
    fn new(receiver: mpsc::Receiver<io::Result<Bytes>>) -> Pieces {
        Pieces { receiver, piece: Bytes::new() }
    }
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.receiver.blocking_recv() {
                Some(piece) => self.piece = piece?,
                None => return Ok(0),
            }
        }
        let n = self.piece.len().min(buffer.len());
        buffer[..n].copy_from_slice(&self.piece.split_to(n));
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides() {
        let session = |word: &str, path: &str| Side::Session { word: word.into(), path: path.into() };
        for (text, expected) in [
            ("-", Side::Stdio),
            ("web:/etc/motd", session("web", "/etc/motd")),
            ("user-42:repo#7:/x", session("user-42:repo#7", "/x")),
            ("web:/", session("web", "/")),
            ("web:/a:/b", session("web", "/a:/b")),
            ("./a:/b", Side::Here("./a:/b".into())),
            ("web:relative", Side::Here("web:relative".into())),
            (":/x", Side::Here(":/x".into())),
            ("/tmp/x", Side::Here("/tmp/x".into())),
        ] {
            assert_eq!(side(text), expected, "{text}");
        }
    }

    #[tokio::test]
    async fn a_directory_is_packed_with_its_links_and_unpacked_the_same() {
        let home = tempfile::tempdir().unwrap();
        let source = home.path().join("src");
        std::fs::create_dir_all(source.join("a/b")).unwrap();
        std::fs::write(source.join("a/b/f"), vec![7u8; PIECE * 2 + 1]).unwrap();
        std::os::unix::fs::symlink("a/b/f", source.join("l")).unwrap();
        let mut bytes = Vec::new();
        let mut body = packed(source);
        while let Some(frame) = body.frame().await {
            bytes.extend_from_slice(&frame.unwrap().into_data().unwrap());
        }
        let names: Vec<String> = tar::Archive::new(&bytes[..])
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().to_string_lossy().into_owned())
            .collect();
        assert!(names.iter().all(|name| !name.starts_with('/') && !name.contains("..")), "{names:?}");
        assert!(names.iter().any(|name| name.ends_with("a/b/f")) && names.iter().any(|name| name.ends_with('l')), "{names:?}");
    }
}
