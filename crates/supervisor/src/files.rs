//! File requests: the server's bytes to the guest and back, each side at the other's pace.

use crate::core::{Core, Piece};
use model::Offset;
use tokio::sync::mpsc;
use wire::{
    Code, StreamId, WireError,
    files::{FileReply, FileRequest},
    guest::{Reply, Request},
    window::SendWindow,
};

/// A file request under way.
pub enum FileAnswer {
    /// Done, without bytes.
    Done(FileReply),
    /// Bytes follow.
    Giving { reply: FileReply, bytes: Giving },
    /// The guest waits for bytes.
    Taking(Taking),
}

/// Bytes from the guest.
pub struct Giving {
    stream: StreamId,
    pieces: mpsc::UnboundedReceiver<Piece>,
}

/// Bytes to the guest, and its answer once all have come.
pub struct Taking {
    stream: StreamId,
    answer: tokio::sync::oneshot::Receiver<Result<Reply, WireError>>,
}

impl Core {
    /// Passes a file request on.
    ///
    /// # Errors
    /// The guest's refusal, or it can't be asked.
    pub async fn file(&self, request: FileRequest) -> Result<FileAnswer, WireError> {
        if request.takes_bytes() {
            let stream = self.link.new_stream();
            let answer = self.link.send_request(Request::File { stream: Some(stream), request })?;
            self.link.open_sending(stream, SendWindow::starting_at(Offset::ZERO));
            return Ok(FileAnswer::Taking(Taking { stream, answer }));
        }
        if request.gives_bytes() {
            let stream = self.link.new_stream();
            let pieces = self.receive_transfer(stream);
            let answer = self.link.request(Request::File { stream: Some(stream), request }).await;
            return match file_reply(answer) {
                Ok(reply) => Ok(FileAnswer::Giving { reply, bytes: Giving { stream, pieces } }),
                Err(error) => {
                    self.forget_stream(stream);
                    Err(error)
                }
            };
        }
        file_reply(self.link.request(Request::File { stream: None, request }).await).map(FileAnswer::Done)
    }

    /// The next bytes; `None` at their end. The guest sends more once they were taken.
    ///
    /// # Errors
    /// The guest gave up, or the sandbox ended.
    pub async fn next_piece(&self, giving: &mut Giving) -> Result<Option<bytes::Bytes>, WireError> {
        match giving.pieces.recv().await {
            Some(Piece::Data { end, bytes }) => {
                self.transfer_taken(giving.stream, end);
                Ok(Some(bytes))
            }
            Some(Piece::End) => Ok(None),
            Some(Piece::Failed(reason)) => Err(WireError::new(Code::Internal, reason)),
            None => Err(WireError::new(Code::SandboxGone, "the sandbox has ended")),
        }
    }

    /// Nobody wants the rest.
    pub fn stop_giving(&self, giving: &Giving) {
        self.forget_stream(giving.stream);
        self.link.reset(giving.stream, "not wanted any more");
    }

    /// Gives bytes to the guest. `false`: it takes no more; its answer says why.
    pub async fn give(&self, taking: &Taking, bytes: &[u8]) -> bool {
        self.link.send_all(taking.stream, bytes).await
    }

    /// All bytes were given: the guest's answer.
    ///
    /// # Errors
    /// Its refusal, or the sandbox ended.
    pub async fn finish_giving(&self, taking: Taking) -> Result<FileReply, WireError> {
        self.link.finish(taking.stream);
        let answer = taking.answer.await.unwrap_or_else(|_| Err(WireError::new(Code::SandboxGone, "the sandbox has ended")));
        self.link.forget_sending(taking.stream);
        file_reply(answer)
    }

    /// The bytes broke off: the guest must leave things as they were.
    pub fn break_off(&self, taking: &Taking) {
        self.link.reset(taking.stream, "the upload broke off");
    }
}

fn file_reply(answer: Result<Reply, WireError>) -> Result<FileReply, WireError> {
    match answer? {
        Reply::File { reply } => Ok(reply),
        Reply::Done => Ok(FileReply::Done),
        _ => Err(WireError::new(Code::Protocol, "the guest answered a file request with something else")),
    }
}
