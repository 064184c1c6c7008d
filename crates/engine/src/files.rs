//! Files of a session: through the guest while it runs, from its disk while it sleeps.

use crate::{
    ByteStream, Caller, Engine, Error, FileAnswer, begin::is_unknown, inner::blocking, parcels, session::Session,
    supervisor_client::CallError,
};
use bytes::Bytes;
use futures_util::StreamExt;
use model::{FileMeta, FileType, SessionId, State};
use snapshot::view::{DiskView, ViewError};
use std::{
    io::{self, Seek, SeekFrom, Write},
    sync::Arc,
    time::Duration,
};
use tokio::{io::AsyncReadExt, sync::mpsc};
use wire::{
    Code, WireError,
    control::{Answer, Request},
    files::{FileReply, FileRequest},
};

/// How often a request is tried that meets a session just changing.
const TRIES: usize = 100;
const AGAIN: Duration = Duration::from_millis(50);
const CHUNK: usize = 256 * 1024;
/// Pieces of an archive that wait for the reader.
const PIECES: usize = 8;

impl Engine {
    /// Reads or changes files. Changing wakes a hibernated session; reading reads its disk. `body` holds the bytes of a
    /// request that takes some; `start` boots a stopped session for a change.
    ///
    /// # Errors
    /// [`Error::Inside`] with the reason, [`Error::NoSpace`]; why the session can't be used.
    pub async fn file(
        &self,
        caller: &Caller,
        id: SessionId,
        request: FileRequest,
        mut body: Option<ByteStream>,
        start: bool,
    ) -> Result<FileAnswer, Error> {
        check(&request)?;
        if request.takes_bytes() != body.is_some() {
            return Err(Error::internal("a file request and its bytes don't fit together"));
        }
        let session = self.inner.present(id).await?;
        let writes = request.writes();
        for _ in 0..TRIES {
            let live = if writes {
                self.inner.usable(&session, &caller.actor, start).await?
            } else {
                match self.readable(&session) {
                    Ok(Some(live)) => live,
                    Ok(None) => return self.read_disk(&session, request).await,
                    // Its supervisor is being found again, or its end is being written down.
                    Err(Error::Unresponsive { .. }) => {
                        tokio::time::sleep(AGAIN).await;
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            };
            let asked = Request::File { request: request.clone(), actor: Some(caller.actor.to_string()) };
            let answered = async {
                let mut conn = live.supervisor.connect().await?;
                let answer = match &mut body {
                    Some(body) => conn.ask_with_bytes(&asked, body, true).await?,
                    None => conn.ask(&asked).await?,
                };
                Ok((conn, answer))
            };
            match answered.await {
                Ok((conn, Answer::File { reply })) => {
                    let bytes = request.gives_bytes().then(|| conn.into_bytes());
                    let is_watch = matches!(request, FileRequest::Watch { .. });
                    let bytes = if is_watch { bytes.map(|bytes| while_running(&session, bytes)) } else { bytes };
                    return Ok(FileAnswer { reply, bytes });
                }
                Ok((conn, Answer::Streaming)) if request.gives_bytes() => {
                    return Ok(FileAnswer { reply: FileReply::Streaming, bytes: Some(conn.into_bytes()) });
                }
                Ok(_) => return Err(Error::internal("the supervisor answered with something else")),
                // It is just going to sleep, or has just gone: nothing was done.
                Err(CallError::Unreachable(_)) => tokio::time::sleep(AGAIN).await,
                Err(CallError::Refused(error)) if error.code == Code::Busy => tokio::time::sleep(AGAIN).await,
                Err(CallError::Broken(_)) if !writes => tokio::time::sleep(AGAIN).await,
                // Its sandbox has just ended; what is only read is there without it.
                Err(CallError::Refused(error)) if !writes && error.code == Code::SandboxGone => tokio::time::sleep(AGAIN).await,
                Err(error) if writes && is_unknown(&error) => {
                    return Err(self.inner.unknown(&session, live.generation(), &error).await);
                }
                Err(error) => return Err(session.call_error(error)),
            }
        }
        Err(session.held())
    }

    /// Who can be asked about files that are only read; `None`: the disk itself.
    fn readable(&self, session: &Session) -> Result<Option<Arc<crate::session::Live>>, Error> {
        let view = session.view();
        match view.row.state {
            State::Running => match self.inner.awake(session) {
                Some(live) => Ok(Some(live)),
                None => Err(Error::Unresponsive { session: session.id }),
            },
            State::Paused | State::Hibernated | State::Stopped => Ok(None),
            State::Creating => Err(Error::Conflict { detail: format!("session {} is still being created", session.id) }),
            State::Failed | State::Deleted => {
                Err(Error::Failed { session: session.id, reason: view.row.reason.clone().unwrap_or_default() })
            }
        }
    }

    async fn read_disk(&self, session: &Arc<Session>, request: FileRequest) -> Result<FileAnswer, Error> {
        if matches!(request, FileRequest::Watch { .. }) {
            let reason = format!("it is {}", session.view().row.state);
            return Err(Error::NotRunning { session: session.id, reason });
        }
        let reading = session.at_rest.clone().read_owned().await;
        parcels::fetch::ensure_local(&self.inner, session).await?;
        let (inner, session) = (self.inner.clone(), session.clone());
        let answer = blocking(move || {
            let row = session.view().row;
            let layers = [inner.shelf.lower(&row.layers), inner.programs.layers(&row)?].concat();
            let view = DiskView::open(&layers, &session.layout.upper()).map_err(view_error)?;
            read(view, request)
        });
        let mut answer = answer.await.flatten()?;
        // A tree is read as it is sent.
        answer.bytes = answer.bytes.map(|bytes| -> ByteStream {
            Box::pin(bytes.inspect(move |_| {
                let _held = &reading;
            }))
        });
        Ok(answer)
    }
}

/// A watch ends with its sandbox, also where that is kept for a while after a hibernate.
fn while_running(session: &Arc<Session>, bytes: ByteStream) -> ByteStream {
    let session = session.clone();
    let generation = session.view().row.generation;
    let over = async move {
        let mut changes = session.changes();
        loop {
            changes.borrow_and_update();
            let row = session.view().row;
            let lives = matches!(row.state, State::Running | State::Paused) && row.generation == generation;
            if !lives || changes.changed().await.is_err() {
                return;
            }
        }
    };
    Box::pin(bytes.take_until(Box::pin(over)))
}

/// What every request is refused for, wherever it goes.
fn check(request: &FileRequest) -> Result<(), Error> {
    let mut paths = vec![request.path()];
    if let FileRequest::Move { from, .. } = request {
        paths.push(from);
    }
    for path in paths {
        if path.is_empty() {
            return Err(Error::invalid("path", "it is empty"));
        }
        if path.contains('\0') {
            return Err(Error::invalid("path", "it can't contain a NUL"));
        }
        if path.len() > 4095 {
            return Err(Error::invalid("path", "it is longer than 4095 bytes"));
        }
    }
    Ok(())
}

/// Carries out a reading request on a disk. Blocks.
fn read(view: DiskView, request: FileRequest) -> Result<FileAnswer, Error> {
    let streaming = |bytes: ByteStream| FileAnswer { reply: FileReply::Streaming, bytes: Some(bytes) };
    match request {
        FileRequest::Stat { path, follow } => {
            let meta = stat(&view, &path, follow)?;
            Ok(FileAnswer { reply: FileReply::Meta { meta }, bytes: None })
        }
        FileRequest::List { path, depth } => {
            let entries = view.list(&path, depth as usize).map_err(view_error)?;
            let mut lines = Vec::new();
            for entry in entries {
                serde_json::to_writer(&mut lines, &entry).map_err(Error::internal)?;
                lines.push(b'\n');
            }
            let lines = Bytes::from(lines);
            let pieces: Vec<_> = (0..lines.len()).step_by(CHUNK).map(|at| lines.slice(at..lines.len().min(at + CHUNK))).collect();
            Ok(streaming(Box::pin(futures_util::stream::iter(pieces.into_iter().map(Ok)))))
        }
        FileRequest::Read { path, offset, length } => {
            let (mut file, meta) = view.read(&path).map_err(view_error)?;
            file.seek(SeekFrom::Start(offset.0)).map_err(Error::internal)?;
            let file = tokio::fs::File::from_std(file).take(length.unwrap_or(u64::MAX));
            let bytes = tokio_util::io::ReaderStream::with_capacity(file, CHUNK);
            Ok(FileAnswer { reply: FileReply::Meta { meta }, bytes: Some(Box::pin(bytes)) })
        }
        FileRequest::Archive { path } => {
            // Errors that are known before the first byte are answers, not broken streams.
            stat(&view, &path, true)?;
            let (pieces, bytes) = mpsc::channel(PIECES);
            tokio::task::spawn_blocking(move || {
                let mut out = io::BufWriter::with_capacity(CHUNK, Pieces(pieces.clone()));
                let written = view.archive(&path, &mut out).map_err(|e| io::Error::other(e.to_string()));
                if let Err(error) = written.and_then(|_| out.flush()) {
                    // A reader that has left needs no reason.
                    let _ = pieces.blocking_send(Err(error));
                }
            });
            let bytes = futures_util::stream::unfold(bytes, |mut bytes| async move { Some((bytes.recv().await?, bytes)) });
            Ok(streaming(Box::pin(bytes)))
        }
        FileRequest::Watch { .. }
        | FileRequest::Write { .. }
        | FileRequest::Mkdir { .. }
        | FileRequest::Move { .. }
        | FileRequest::Remove { .. }
        | FileRequest::Unpack { .. } => Err(Error::internal("only a running session's files can be changed or watched")),
    }
}

fn stat(view: &DiskView, path: &str, follow: bool) -> Result<FileMeta, Error> {
    let meta = view.stat(path).map_err(view_error)?;
    if !follow || meta.kind != FileType::Symlink {
        return Ok(meta);
    }
    match view.read(path) {
        Ok((_, meta)) => Ok(meta),
        Err(ViewError::IsADirectory(_)) => {
            let meta = view.stat(&format!("{path}/")).map_err(view_error)?;
            Ok(FileMeta { path: path.to_owned(), ..meta })
        }
        // What it leads to is neither: the link itself says most.
        Err(ViewError::NotRegular { .. }) => Ok(meta),
        Err(error) => Err(view_error(error)),
    }
}

/// Turns what is written into pieces of a stream.
struct Pieces(mpsc::Sender<io::Result<Bytes>>);

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = Bytes::copy_from_slice(bytes);
        self.0.blocking_send(Ok(piece)).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn view_error(error: ViewError) -> Error {
    let code = match &error {
        ViewError::NotFound(_) => Code::NotFound,
        ViewError::NotADirectory(_) => Code::NotADirectory,
        ViewError::IsADirectory(_) => Code::IsADirectory,
        ViewError::NotRegular { .. } => Code::NotRegular,
        ViewError::Invalid { .. } | ViewError::TooMany(_) | ViewError::TooDeep(_) => Code::Invalid,
        ViewError::TooManyLinks(_) => Code::TooManyLinks,
        ViewError::NoRights | ViewError::Layers(_) | ViewError::Output(_) => Code::Internal,
        ViewError::Io { source, .. } => Code::of_io(source),
    };
    Error::Inside(WireError::new(code, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_nobody_can_mean_are_refused_everywhere() {
        for path in ["", "/a\0b", &"x".repeat(4096)] {
            let request = FileRequest::Remove { path: path.to_owned(), recursive: false };
            assert!(matches!(check(&request), Err(Error::Invalid { .. })));
        }
        let request = FileRequest::Move { from: "\0".into(), to: "/a".into() };
        assert!(check(&request).is_err());
        assert!(check(&FileRequest::Stat { path: "/a\nb/../c".into(), follow: true }).is_ok());
    }
}
