//! Reading what was printed: from the journal on disk, then on as it grows.
//!
//! The bytes at their offsets are the truth, and they are files: a supervisor is asked for nothing but the word that
//! there is more. So a reader goes on through sleeps of the session and changes of supervisors, at exactly the next byte.

use crate::{Engine, Error, OutputItem, inner::Inner, session::Session, supervisor_client::Conn};
use bytes::Bytes;
use journal::{Chunk, ReadError, Reader};
use model::{ExecState, Offset, SessionId, State, TerminalState};
use std::{sync::Arc, time::Duration};
use tokio::task::JoinHandle;
use wire::{
    control::{Answer, Request},
    layout::JournalName,
};

/// Bytes of one read.
const CHUNK: usize = 512 * 1024;
/// How long a reader waits before it looks again where nobody tells it of growth.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

type Read = (Reader, Result<Chunk, ReadError>);

/// Reads one journal in order.
pub struct OutputReader {
    engine: Engine,
    session: Arc<Session>,
    name: JournalName,
    position: Offset,
    /// Not there while a read is under way.
    reader: Option<Reader>,
    /// The next piece, read ahead.
    ahead: Option<JoinHandle<Read>>,
    /// Tells of growth.
    told: Option<Conn>,
    /// What printed has ended, and everything it printed is in the journal.
    ended: bool,
}

impl Engine {
    /// A reader of what an exec, terminal or service printed, from `from` on.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Deleted`].
    pub async fn output(&self, id: SessionId, name: JournalName, from: Offset) -> Result<OutputReader, Error> {
        let session = self.inner.present(id).await?;
        match &name {
            JournalName::Stdout(exec) | JournalName::Stderr(exec) => drop(self.exec(id, *exec).await?),
            JournalName::Terminal(terminal) => drop(self.terminal(id, *terminal).await?),
            JournalName::Service(service) => {
                let declared = session.view().row.services.iter().any(|spec| spec.name == *service);
                if !declared && !session.layout.journal(&name).exists() {
                    return Err(Error::not_found(format!("service '{service}' in session {id}")));
                }
            }
            // There where the session's policy has requests written down.
            JournalName::Requests => {}
            JournalName::Facts => return Err(Error::not_found("such output")),
        }
        Ok(OutputReader::new(self.clone(), session, name, from))
    }
}

impl OutputReader {
    pub(crate) fn new(engine: Engine, session: Arc<Session>, name: JournalName, from: Offset) -> OutputReader {
        let reader = Some(Reader::open(session.layout.journal(&name)));
        OutputReader { engine, session, name, position: from, reader, ahead: None, told: None, ended: false }
    }

    /// The offset of the next byte.
    pub fn position(&self) -> Offset {
        self.position
    }

    /// The next piece. With `follow` it waits for more until the very end. Dropping the future loses nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an offset beyond the end, [`Error::Deleted`] once the session is.
    pub async fn next(&mut self, follow: bool) -> Result<OutputItem, Error> {
        loop {
            match self.read().await? {
                Chunk::Data { offset, bytes } => {
                    self.position = offset.plus(bytes.len());
                    if bytes.len() >= CHUNK / 4 {
                        self.read_ahead();
                    }
                    return Ok(OutputItem::Data { offset, bytes: Bytes::from(bytes) });
                }
                Chunk::Gap { from, to } => {
                    self.position = to;
                    return Ok(OutputItem::Gap { from, to });
                }
                Chunk::End if !follow => return Ok(OutputItem::End),
                Chunk::End => {
                    // Known before this read: all there will be was there.
                    if self.ended {
                        return Ok(OutputItem::End);
                    }
                    self.wait().await?;
                }
            }
        }
    }

    fn read_ahead(&mut self) {
        if self.ahead.is_none()
            && let Some(mut reader) = self.reader.take()
        {
            let from = self.position;
            self.ahead = Some(tokio::task::spawn_blocking(move || {
                let read = reader.read(from, CHUNK);
                (reader, read)
            }));
        }
    }

    async fn read(&mut self) -> Result<Chunk, Error> {
        self.read_ahead();
        let Some(ahead) = &mut self.ahead else { return Err(Error::internal("a reader lost its journal")) };
        let done = ahead.await;
        self.ahead = None;
        let (reader, read) = done.map_err(|error| {
            self.reader = Some(Reader::open(self.session.layout.journal(&self.name)));
            Error::internal(error)
        })?;
        self.reader = Some(reader);
        read.map_err(|error| match error {
            ReadError::BeyondTail { from, tail } => {
                Error::invalid("from", format!("offset {from} lies beyond the end of what was printed, {tail}"))
            }
            other => Error::internal(other),
        })
    }

    /// Waits until there may be more, or it is known where the end is.
    async fn wait(&mut self) -> Result<(), Error> {
        let mut changes = self.session.changes();
        changes.borrow_and_update();
        if has_ended(&self.engine, &self.session, &self.name).await? {
            self.ended = true;
            return Ok(());
        }
        if self.told.is_none() {
            self.told = watch(&self.engine.inner, &self.session, &self.name).await;
        }
        let position = self.position;
        let growth = async {
            loop {
                let Some(conn) = &mut self.told else {
                    tokio::time::sleep(LOOK_AGAIN).await;
                    return true;
                };
                match conn.answer().await {
                    Ok(Answer::Tail { tail, ended }) if tail > position || ended => return !ended,
                    Ok(Answer::Tail { .. }) => {}
                    Ok(_) | Err(_) => return false,
                }
            }
        };
        let goes_on = tokio::select! {
            goes_on = growth => goes_on,
            _ = changes.changed() => true,
            () = self.engine.inner.closing.cancelled() => return Err(Error::ShuttingDown),
        };
        if !goes_on {
            self.told = None;
            // The journal is complete or its supervisor is gone; what that means is known a moment later.
            let _ = tokio::time::timeout(Duration::from_millis(20), changes.changed()).await;
        }
        Ok(())
    }
}

/// A connection that tells of a journal's growth.
async fn watch(inner: &Inner, session: &Session, name: &JournalName) -> Option<Conn> {
    let live = inner.awake(session)?;
    let mut conn = live.supervisor.connect().await.ok()?;
    conn.send(&Request::Watch { journal: name.clone() }).await.ok()?;
    Some(conn)
}

/// True once what prints into a journal has ended. Its record says so only when the journal has everything.
async fn has_ended(engine: &Engine, session: &Session, name: &JournalName) -> Result<bool, Error> {
    Ok(match name {
        JournalName::Stdout(exec) | JournalName::Stderr(exec) => {
            engine.exec(session.id, *exec).await?.state != ExecState::Running
        }
        JournalName::Terminal(terminal) => engine.terminal(session.id, *terminal).await?.state == TerminalState::Ended,
        // A service can always print again while its session can run.
        JournalName::Service(_) | JournalName::Requests | JournalName::Facts => {
            matches!(engine.session(session.id).await?.row.state, State::Failed | State::Deleted)
        }
    })
}
