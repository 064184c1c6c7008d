//! Signatures.
use crate::*;
use model::*;
use store::*;
use wire::control::{Attach, ScreenAnswer};
use wire::files::FileRequest;
use wire::layout::JournalName;
use wire::records::*;
use std::sync::Arc;

/// The engine; cheap to clone.
#[derive(Clone)]
pub struct Engine { }
pub struct OutputReader {}
impl OutputReader {
    /// Cancel safe: dropping the future loses no byte.
    pub async fn next(&mut self, _follow: bool) -> Result<OutputItem, Error> { todo!() }
    pub fn position(&self) -> Offset { todo!() }
}
pub struct LogReader {}
impl LogReader {
    /// `None`: no more lines now (without follow), or ever (with follow, once the session is deleted).
    pub async fn next(&mut self) -> Result<Option<LogLine>, Error> { todo!() }
}
/// Events in order, each once.
pub struct EventFollower {}
impl EventFollower {
    /// Waits for the next one. `None` once the engine is closed.
    pub async fn next(&mut self) -> Result<Option<EventRow>, Error> { todo!() }
}
/// A terminal's two directions; each `Bytes` is exactly one message of the terminal protocol.
pub struct Attachment {
    pub input: tokio::sync::mpsc::Sender<bytes::Bytes>,
    /// `None`: the link has ended (hibernated, terminal ended, supervisor gone); clients attach again.
    pub output: tokio::sync::mpsc::Receiver<bytes::Bytes>,
}

#[allow(unused_variables)]
impl Engine {
    pub async fn open(config: Config, store: Arc<dyn Store>) -> Result<Engine, OpenError> { todo!() }
    /// Sessions that could not be hibernated run on, and are named.
    pub async fn shutdown(&self, hibernate: bool) -> Vec<(SessionId, Error)> { todo!() }
    /// Hibernates every running session: (hibernated, failed).
    pub async fn hibernate_all(&self, caller: &Caller) -> (Vec<SessionId>, Vec<(SessionId, Error)>) { todo!() }
    pub fn store(&self) -> &Arc<dyn Store> { todo!() }
    pub fn config(&self) -> &Config { todo!() }
    pub async fn counts(&self) -> Counts { todo!() }

    pub async fn create(&self, caller: &Caller, new: NewSession) -> Result<Created, Error> { todo!() }
    /// Deleted and expired ones are `Error::Deleted`/`Expired`.
    pub async fn session(&self, id: SessionId) -> Result<SessionView, Error> { todo!() }
    /// Tombstones too.
    pub async fn session_or_tombstone(&self, id: SessionId) -> Result<SessionView, Error> { todo!() }
    /// An id, a key, or a unique beginning or end of an id.
    pub async fn resolve(&self, text: &str) -> Result<SessionId, Error> { todo!() }
    pub async fn list(&self, filter: SessionFilter, limit: usize, cursor: Option<Cursor>) -> Result<Page<SessionView>, Error> { todo!() }
    pub async fn patch(&self, caller: &Caller, id: SessionId, patch: SessionPatch) -> Result<SessionView, Error> { todo!() }
    pub async fn delete(&self, caller: &Caller, id: SessionId) -> Result<(), Error> { todo!() }
    pub async fn transition(&self, caller: &Caller, id: SessionId, to: Transition, wait: bool) -> Result<Transitioned, Error> { todo!() }
    pub async fn operation(&self, id: OperationId) -> Result<OperationRow, Error> { todo!() }
    pub async fn extend(&self, caller: &Caller, id: SessionId, seconds: u64) -> Result<SessionView, Error> { todo!() }
    /// Ok once the guest has answered.
    pub async fn probe(&self, id: SessionId) -> Result<(), Error> { todo!() }

    pub async fn start_exec(&self, caller: &Caller, id: SessionId, exec: NewExec) -> Result<ExecRecord, Error> { todo!() }
    pub async fn exec(&self, id: SessionId, exec: ExecId) -> Result<ExecRecord, Error> { todo!() }
    pub async fn execs(&self, id: SessionId, limit: usize, cursor: Option<Cursor>) -> Result<Page<ExecRecord>, Error> { todo!() }
    pub async fn await_exec(&self, id: SessionId, exec: ExecId) -> Result<ExecRecord, Error> { todo!() }
    pub async fn signal_exec(&self, caller: &Caller, id: SessionId, exec: ExecId, signal: i32) -> Result<ExecRecord, Error> { todo!() }
    pub async fn exec_stdin(&self, caller: &Caller, id: SessionId, exec: ExecId, bytes: ByteStream, eof: bool) -> Result<(), Error> { todo!() }
    /// Checks that the session and the exec, terminal or service exist.
    pub async fn output(&self, id: SessionId, journal: JournalName, from: Offset) -> Result<OutputReader, Error> { todo!() }
    pub async fn logs(&self, id: SessionId, since: Option<Timestamp>, follow: bool) -> Result<LogReader, Error> { todo!() }

    pub async fn open_terminal(&self, caller: &Caller, id: SessionId, terminal: NewTerminal) -> Result<TerminalRecord, Error> { todo!() }
    pub async fn terminals(&self, id: SessionId) -> Result<Vec<TerminalRecord>, Error> { todo!() }
    pub async fn terminal(&self, id: SessionId, terminal: TerminalId) -> Result<TerminalRecord, Error> { todo!() }
    pub async fn close_terminal(&self, caller: &Caller, id: SessionId, terminal: TerminalId) -> Result<(), Error> { todo!() }
    pub async fn screen(&self, id: SessionId, terminal: TerminalId) -> Result<ScreenAnswer, Error> { todo!() }
    /// Mode `write` and `take` wake a hibernated session, `observe` doesn't.
    pub async fn attach(&self, caller: &Caller, id: SessionId, attach: Attach, start: bool) -> Result<Attachment, Error> { todo!() }

    pub async fn file(&self, caller: &Caller, id: SessionId, request: FileRequest, body: Option<ByteStream>, start: bool) -> Result<FileAnswer, Error> { todo!() }

    pub async fn services(&self, id: SessionId) -> Result<Vec<ServiceRecord>, Error> { todo!() }
    pub async fn set_services(&self, caller: &Caller, id: SessionId, services: Vec<ServiceSpec>) -> Result<Vec<ServiceRecord>, Error> { todo!() }
    /// `action`: start, stop, restart.
    pub async fn service(&self, caller: &Caller, id: SessionId, name: ServiceName, action: &str) -> Result<ServiceRecord, Error> { todo!() }
    pub async fn stats(&self, id: SessionId) -> Result<Stats, Error> { todo!() }
    pub async fn processes(&self, id: SessionId) -> Result<Vec<ProcessRecord>, Error> { todo!() }

    pub async fn events(&self, id: SessionId, from: EventSeq, limit: usize) -> Result<Vec<EventRow>, Error> { todo!() }
    pub async fn events_of_all(&self, after: Option<Cursor>, limit: usize) -> Result<Vec<EventRow>, Error> { todo!() }
    pub async fn follow_events(&self, id: SessionId, from: EventSeq) -> Result<EventFollower, Error> { todo!() }
    /// From `after`; `None`: only what comes.
    pub async fn follow_events_of_all(&self, after: Option<Cursor>) -> Result<EventFollower, Error> { todo!() }

    pub async fn token_new(&self, caller: &Caller, new: NewToken) -> Result<MadeToken, Error> { todo!() }
    pub async fn tokens(&self) -> Result<Vec<TokenRow>, Error> { todo!() }
    /// `NotFound` where there is none.
    pub async fn token_revoke(&self, caller: &Caller, id: TokenId) -> Result<(), Error> { todo!() }
    /// `None`: unknown, revoked or expired.
    pub async fn authenticate(&self, secret: &str) -> Result<Option<Caller>, Error> { todo!() }

    pub async fn templates(&self) -> Result<Vec<snapshot::template::Listed>, Error> { todo!() }
    pub async fn template_add(&self, caller: &Caller, name: &str, source: TemplateSource) -> Result<snapshot::template::TemplateRef, Error> { todo!() }
    pub async fn template_remove(&self, caller: &Caller, name: &str) -> Result<(), Error> { todo!() }
}
