//! The server's side of the conversation with a supervisor, over its Unix socket.
//!
//! One connection carries one request at a time; a few idle ones are kept, so that a small request costs no new one.

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use model::Offset;
use rustix::fs::{CWD, Mode, OFlags, openat};
use std::{io, os::fd::AsRawFd, path::Path, sync::Mutex, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
};
use wire::{
    Decoder, Frame, StreamId, WireError,
    control::{Answer, MAX_TERMINAL_MESSAGE, MORE_FOLLOWS, Request},
    frame::{MAX_DATA, PREAMBLE, parse_control},
    layout::SessionLayout,
};

use crate::ByteStream;

/// Connections that are kept open between requests.
const IDLE: usize = 4;
const READ: usize = 64 * 1024;
/// How long a request may take that is answered at once by a supervisor that is well.
pub(crate) const PROMPT: Duration = Duration::from_secs(15);
/// The longest path of a Unix socket that the kernel takes is 107 bytes.
const MAX_SOCKET_PATH: usize = 100;

/// Why a supervisor gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// Nothing was asked: nobody listens.
    #[error("its supervisor can't be reached: {0}")]
    Unreachable(io::Error),
    /// It was asked, and the connection ended before the answer.
    #[error("its supervisor ended before it answered: {0}")]
    Broken(String),
    #[error("its supervisor didn't answer within {0:?}")]
    TimedOut(Duration),
    /// It said no.
    #[error(transparent)]
    Refused(#[from] WireError),
}

/// A living supervisor.
#[derive(Debug)]
pub(crate) struct Supervisor {
    layout: SessionLayout,
    idle: Mutex<Vec<Conn>>,
}

impl Supervisor {
    pub(crate) fn new(layout: SessionLayout) -> Supervisor {
        Supervisor { layout, idle: Mutex::new(Vec::new()) }
    }

    /// A connection of the caller's own.
    pub(crate) async fn connect(&self) -> Result<Conn, CallError> {
        Conn::open(&self.layout.socket()).await.map_err(CallError::Unreachable)
    }

    /// Asks something that is answered with one message, and waits for it as long as it takes.
    pub(crate) async fn call(&self, request: &Request) -> Result<Answer, CallError> {
        let kept = self.idle.lock().expect("nothing panics while it holds the idle connections").pop();
        let mut conn = match kept {
            // One that was closed meanwhile is noticed before anything is asked.
            Some(conn) if conn.is_open() => conn,
            _ => self.connect().await?,
        };
        faults::point("ask.before");
        let answer = conn.ask(request).await;
        faults::point("ask.after");
        // A supervisor that doesn't know a request says so and closes the connection.
        let stays_open = match &answer {
            Ok(_) => true,
            Err(CallError::Refused(error)) => !matches!(error.code, wire::Code::Unsupported | wire::Code::Protocol),
            Err(_) => false,
        };
        if stays_open {
            let mut idle = self.idle.lock().expect("nothing panics while it holds the idle connections");
            if idle.len() < IDLE {
                idle.push(conn);
            }
        }
        answer
    }

    /// [`Self::call`] with a limit.
    pub(crate) async fn call_within(&self, request: &Request, limit: Duration) -> Result<Answer, CallError> {
        tokio::time::timeout(limit, self.call(request)).await.unwrap_or(Err(CallError::TimedOut(limit)))
    }

    /// [`Self::call`] for what is answered at once.
    pub(crate) async fn call_soon(&self, request: &Request) -> Result<Answer, CallError> {
        self.call_within(request, PROMPT).await
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Conn {
    reader: ConnReader,
    writer: ConnWriter,
}

/// The receiving half.
#[derive(Debug)]
pub(crate) struct ConnReader {
    half: OwnedReadHalf,
    decoder: Decoder,
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct ConnWriter {
    half: OwnedWriteHalf,
    buffer: BytesMut,
    sent: Offset,
}

impl Conn {
    async fn open(socket: &Path) -> io::Result<Conn> {
        let stream = connect(socket).await?;
        let (read, write) = stream.into_split();
        // The preamble goes out with the first request.
        let mut buffer = BytesMut::with_capacity(1024);
        buffer.extend_from_slice(&PREAMBLE);
        Ok(Conn {
            reader: ConnReader { half: read, decoder: Decoder::new() },
            writer: ConnWriter { half: write, buffer, sent: Offset::ZERO },
        })
    }

    /// False once the other side has closed it, or says something that nobody asked for.
    fn is_open(&self) -> bool {
        let mut byte = [0u8; 1];
        matches!(self.reader.half.try_read(&mut byte), Err(e) if e.kind() == io::ErrorKind::WouldBlock)
    }

    /// Sends a request.
    pub(crate) async fn send(&mut self, request: &Request) -> Result<(), CallError> {
        self.writer.request(request).await
    }

    /// The next message.
    pub(crate) async fn answer(&mut self) -> Result<Answer, CallError> {
        self.reader.answer().await
    }

    /// One request, one answer.
    pub(crate) async fn ask(&mut self, request: &Request) -> Result<Answer, CallError> {
        self.send(request).await?;
        self.answer().await
    }

    /// One request with a stream of bytes behind it. Where the other side has to agree first (`invited`), nothing is
    /// sent before it has. The answer can come before the bytes have all been sent: then the rest isn't.
    pub(crate) async fn ask_with_bytes(
        &mut self,
        request: &Request,
        bytes: &mut ByteStream,
        invited: bool,
    ) -> Result<Answer, CallError> {
        self.send(request).await?;
        if invited {
            match self.answer().await? {
                Answer::Streaming => {}
                answer => return Ok(answer),
            }
        }
        let Conn { reader, writer } = self;
        let send = writer.bytes(bytes);
        tokio::pin!(send);
        let answer = reader.answer();
        tokio::pin!(answer);
        tokio::select! {
            biased;
            answer = &mut answer => answer,
            sent = &mut send => match sent {
                Ok(()) => answer.await,
                // It may have said why it stopped listening.
                Err(CallError::Broken(why)) => {
                    let limit = Duration::from_secs(1);
                    match tokio::time::timeout(limit, answer).await {
                        Ok(Err(CallError::Refused(error))) => Err(CallError::Refused(error)),
                        _ => Err(CallError::Broken(why)),
                    }
                }
                Err(other) => Err(other),
            },
        }
    }

    /// The socket itself, for a connection that becomes something else's.
    pub(crate) fn into_halves(self) -> ((OwnedReadHalf, Decoder), OwnedWriteHalf) {
        ((self.reader.half, self.reader.decoder), self.writer.half)
    }

    pub(crate) fn split(self) -> (ConnReader, ConnWriter) {
        (self.reader, self.writer)
    }

    /// The bytes that follow an answer, until their end.
    pub(crate) fn into_bytes(self) -> ByteStream {
        Box::pin(futures_util::stream::unfold(Some(self), |conn| async move {
            let mut conn = conn?;
            match conn.reader.frame().await {
                Ok(Some(Frame::Data { bytes, .. })) => Some((Ok(bytes), Some(conn))),
                Ok(Some(Frame::End { .. })) => None,
                Ok(Some(Frame::Reset { reason, .. })) => Some((Err(io::Error::other(reason)), None)),
                Ok(Some(_)) => Some((Err(io::Error::other("the supervisor broke the protocol")), None)),
                Ok(None) => Some((Err(io::ErrorKind::UnexpectedEof.into()), None)),
                Err(error) => Some((Err(io::Error::other(error.to_string())), None)),
            }
        }))
    }
}

impl ConnReader {
    /// The next frame; `None` at the end of the connection.
    pub(crate) async fn frame(&mut self) -> Result<Option<Frame>, CallError> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|e| CallError::Broken(e.to_string()))? {
                return Ok(Some(frame));
            }
            let buffer = self.decoder.buffer_mut();
            buffer.reserve(READ);
            let count = self.half.read_buf(buffer).await.map_err(|e| CallError::Broken(e.to_string()))?;
            if count == 0 {
                return Ok(None);
            }
        }
    }

    /// The next message of a terminal, put together from its pieces; `None` at the end.
    pub(crate) async fn message(&mut self) -> Result<Option<Bytes>, CallError> {
        let mut pieces = BytesMut::new();
        loop {
            match self.frame().await? {
                Some(Frame::Data { stream, bytes, .. }) => {
                    let last = stream != MORE_FOLLOWS;
                    if last && pieces.is_empty() {
                        return Ok(Some(bytes));
                    }
                    if pieces.len() + bytes.len() > MAX_TERMINAL_MESSAGE {
                        return Err(CallError::Broken("a terminal message is too long".to_owned()));
                    }
                    pieces.extend_from_slice(&bytes);
                    if last {
                        return Ok(Some(pieces.freeze()));
                    }
                }
                None | Some(Frame::End { .. } | Frame::Reset { .. }) => return Ok(None),
                Some(_) => return Err(CallError::Broken("it broke the protocol".to_owned())),
            }
        }
    }

    pub(crate) async fn answer(&mut self) -> Result<Answer, CallError> {
        match self.frame().await? {
            Some(Frame::Control(json)) => match parse_control(&json).map_err(|e| CallError::Broken(e.to_string()))? {
                Answer::Error { error } => Err(CallError::Refused(error)),
                answer => Ok(answer),
            },
            Some(Frame::Reset { reason, .. }) => Err(CallError::Broken(reason)),
            Some(_) => Err(CallError::Broken("it broke the protocol".to_owned())),
            None => Err(CallError::Broken("the connection was closed".to_owned())),
        }
    }
}

impl ConnWriter {
    async fn flush(&mut self) -> Result<(), CallError> {
        let result = self.half.write_all(&self.buffer).await;
        self.buffer.clear();
        result.map_err(|e| CallError::Broken(e.to_string()))
    }

    async fn request(&mut self, request: &Request) -> Result<(), CallError> {
        let frame =
            Frame::control(request).map_err(|e| CallError::Refused(WireError::new(wire::Code::Invalid, e.to_string())))?;
        frame.encode(&mut self.buffer);
        self.sent = Offset::ZERO;
        self.flush().await
    }

    /// One message of a terminal; in pieces where it is longer than a frame.
    pub(crate) async fn message(&mut self, mut message: Bytes) -> Result<(), CallError> {
        while message.len() > MAX_DATA {
            let bytes = message.split_to(MAX_DATA);
            Frame::Data { stream: MORE_FOLLOWS, offset: Offset::ZERO, bytes }.encode(&mut self.buffer);
        }
        Frame::Data { stream: StreamId(0), offset: Offset::ZERO, bytes: message }.encode(&mut self.buffer);
        self.flush().await
    }

    async fn bytes(&mut self, bytes: &mut ByteStream) -> Result<(), CallError> {
        while let Some(piece) = bytes.next().await {
            let mut piece = match piece {
                Ok(piece) => piece,
                Err(error) => {
                    // The other side must not take what came so far for the whole.
                    Frame::Reset { stream: StreamId(0), reason: error.to_string() }.encode(&mut self.buffer);
                    self.flush().await?;
                    let text = format!("the request's bytes ended early: {error}");
                    return Err(CallError::Refused(WireError::new(wire::Code::Invalid, text)));
                }
            };
            while !piece.is_empty() {
                let bytes = piece.split_to(piece.len().min(MAX_DATA));
                let offset = self.sent;
                self.sent = offset.plus(bytes.len());
                Frame::Data { stream: StreamId(0), offset, bytes }.encode(&mut self.buffer);
                self.flush().await?;
            }
        }
        Frame::End { stream: StreamId(0), offset: self.sent }.encode(&mut self.buffer);
        self.flush().await
    }
}

/// Connects to a socket however long its path is: where the path doesn't fit into an address, through the directory's
/// descriptor.
async fn connect(socket: &Path) -> io::Result<UnixStream> {
    if socket.as_os_str().len() <= MAX_SOCKET_PATH {
        return UnixStream::connect(socket).await;
    }
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let (dir, name) = (socket.parent().ok_or_else(invalid)?, socket.file_name().ok_or_else(invalid)?);
    let dir = openat(CWD, dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let short = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string()).join(name);
    UnixStream::connect(short).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::Generation;
    use wire::control::{Phase, Status};

    fn supervisor_in(dir: &Path) -> (Supervisor, tokio::net::UnixListener) {
        let layout = SessionLayout::new(dir);
        std::fs::create_dir_all(layout.run()).unwrap();
        // Bound by a relative path through the descriptor, as long as the real one may be.
        let run = std::fs::File::open(layout.run()).unwrap();
        let listener = tokio::net::UnixListener::bind(format!("/proc/self/fd/{}/supervisor.sock", run.as_raw_fd())).unwrap();
        (Supervisor::new(layout), listener)
    }

    async fn serve_one(stream: UnixStream, answers: Vec<Answer>) -> Vec<Request> {
        let (read, mut write) = stream.into_split();
        let mut reader = ConnReader { half: read, decoder: Decoder::new() };
        write.write_all(&PREAMBLE).await.unwrap();
        let mut seen = Vec::new();
        for answer in answers {
            let Some(Frame::Control(json)) = reader.frame().await.unwrap() else { panic!("no request") };
            seen.push(parse_control(&json).unwrap());
            let mut out = BytesMut::new();
            Frame::control(&answer).unwrap().encode(&mut out);
            write.write_all(&out).await.unwrap();
        }
        seen
    }

    fn status() -> Status {
        Status {
            session: None,
            generation: Generation::FIRST,
            phase: Phase::Running,
            supervisor_version: "1".into(),
            guest_version: None,
            pid: 1,
            detail: Default::default(),
            reset: Default::default(),
        }
    }

    #[tokio::test]
    async fn requests_share_a_connection_however_long_the_path_is() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("x".repeat(120));
        let (supervisor, listener) = supervisor_in(&deep);
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            serve_one(stream, vec![Answer::Status(status()), Answer::Done]).await
        });
        assert_eq!(supervisor.call(&Request::Status).await.unwrap(), Answer::Status(status()));
        assert_eq!(supervisor.call_soon(&Request::Pause).await.unwrap(), Answer::Done);
        assert_eq!(server.await.unwrap(), [Request::Status, Request::Pause]);
    }

    #[tokio::test]
    async fn a_connection_that_was_closed_meanwhile_is_not_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let (supervisor, listener) = supervisor_in(dir.path());
        let server = tokio::spawn(async move {
            for _ in 0..2 {
                let (stream, _) = listener.accept().await.unwrap();
                serve_one(stream, vec![Answer::Done]).await;
            }
        });
        supervisor.call(&Request::Pause).await.unwrap();
        // The first connection is closed by now, or its end is noticed by the probe for readability.
        tokio::time::timeout(Duration::from_secs(5), async {
            while supervisor.idle.lock().unwrap().iter().any(Conn::is_open) {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
        supervisor.call(&Request::Unpause).await.unwrap();
        server.await.unwrap();
    }

    #[tokio::test]
    async fn nobody_listening_is_told_apart_from_a_lost_answer() {
        let dir = tempfile::tempdir().unwrap();
        let (supervisor, listener) = supervisor_in(dir.path());
        let server = tokio::spawn(async move {
            drop(listener.accept().await.unwrap());
        });
        assert!(matches!(supervisor.call(&Request::Pause).await, Err(CallError::Broken(_))));
        server.await.unwrap();
        assert!(matches!(supervisor.call(&Request::Pause).await, Err(CallError::Unreachable(_))));
    }

    #[tokio::test]
    async fn bytes_that_end_early_are_not_taken_for_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let (supervisor, listener) = supervisor_in(dir.path());
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let (read, mut write) = stream.into_split();
            // The other side may have left by now.
            let _ = write.write_all(&PREAMBLE).await;
            let mut reader = ConnReader { half: read, decoder: Decoder::new() };
            let mut kinds = Vec::new();
            // A side that leaves without having read everything resets the connection.
            while let Ok(Some(frame)) = reader.frame().await {
                kinds.push(match frame {
                    Frame::Control(_) => 'c',
                    Frame::Data { .. } => 'd',
                    Frame::End { .. } => 'e',
                    Frame::Reset { .. } => 'r',
                    Frame::Ack { .. } => 'a',
                });
            }
            kinds
        });
        let mut body: ByteStream =
            Box::pin(futures_util::stream::iter([Ok(Bytes::from_static(b"half")), Err(io::Error::other("cut"))]));
        let mut conn = supervisor.connect().await.unwrap();
        let request = Request::ExecStdin { id: model::ExecId::new(), eof: true };
        assert!(matches!(conn.ask_with_bytes(&request, &mut body, false).await, Err(CallError::Refused(_))));
        drop(conn);
        assert_eq!(server.await.unwrap(), ['c', 'd', 'r']);
    }
}
