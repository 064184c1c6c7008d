//! Terminals: opening, reading and joining them. What is said in one is opaque here.

use crate::{
    Caller, Engine, Error, NewTerminal,
    ask::Asked,
    begin::{Begin, Work},
    facts::{self, terminal_of, terminal_row},
    inner::Inner,
    operation::{journal_tail, lose_terminal},
    session::Session,
    supervisor_client::{CallError, ConnReader, ConnWriter, PROMPT},
};
use bytes::Bytes;
use model::{Generation, Offset, SessionId, TerminalId, TerminalState, Timestamp};
use std::{sync::Arc, time::Duration};
use store::{MAX_PAGE, SessionChange};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use wire::{
    Code,
    control::{Answer, Attach, Request, ScreenAnswer, TerminalStart},
    layout::JournalName,
    records::TerminalRecord,
    terminal::MAX_SIDE,
};

/// Messages under way in each direction of an attachment: a slow viewer holds up nobody but itself.
const MESSAGES: usize = 16;

/// A terminal's two directions; each item is exactly one message of the terminal protocol.
pub struct Attachment {
    /// Closing it ends the attachment.
    pub input: mpsc::Sender<Bytes>,
    /// `None`: the link has ended; because the session was hibernated, for instance. Attach again to go on.
    pub output: mpsc::Receiver<Bytes>,
}

impl Engine {
    /// Opens a terminal. The session is woken for it.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Inside`]; why the session can't be used.
    pub async fn open_terminal(&self, caller: &Caller, id: SessionId, new: NewTerminal) -> Result<TerminalRecord, Error> {
        self.open_as(caller, id, None, new).await
    }

    /// A terminal that was asked for before, of an earlier server: it is opened where nobody has opened it yet.
    ///
    /// # Errors
    /// As [`Self::open_terminal`].
    pub async fn open_terminal_again(
        &self,
        caller: &Caller,
        id: SessionId,
        terminal: TerminalId,
        new: NewTerminal,
    ) -> Result<TerminalRecord, Error> {
        self.open_as(caller, id, Some(terminal), new).await
    }

    async fn open_as(
        &self,
        caller: &Caller,
        id: SessionId,
        terminal: Option<TerminalId>,
        new: NewTerminal,
    ) -> Result<TerminalRecord, Error> {
        for (field, side) in [("cols", new.cols), ("rows", new.rows)] {
            if side == 0 || side > MAX_SIDE {
                return Err(Error::invalid(field, format!("it must be from 1 to {MAX_SIDE}")));
            }
        }
        let mut program = new.program;
        if program.argv.is_empty() {
            // A login shell of whatever the template has.
            let find = "exec \"$(command -v bash || command -v sh)\" -l";
            program.argv = ["/bin/sh", "-c", find].map(str::to_owned).to_vec();
        }
        if program.argv.iter().any(|word| word.contains('\0')) {
            return Err(Error::invalid("argv", "it can't contain a NUL"));
        }
        let session = self.inner.present(id).await?;
        let known = match terminal {
            Some(terminal) => {
                let record = self.terminal(id, terminal).await?;
                if record.state == TerminalState::Ended || self.inner.awake(&session).is_none() {
                    return Ok(record);
                }
                true
            }
            None => false,
        };
        let start = TerminalStart {
            id: terminal.unwrap_or_else(TerminalId::new),
            name: new.name,
            program,
            cols: new.cols,
            rows: new.rows,
            actor: Some(caller.actor.to_string()),
        };
        let first = caller.request.is_some();
        Begin { inner: &self.inner, session: &session, caller, work: TerminalWork(start), start: new.start, first, known }
            .run()
            .await
    }

    /// A session's terminals, newest first; ended ones, too.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn terminals(&self, id: SessionId) -> Result<Vec<TerminalRecord>, Error> {
        let session = self.inner.present(id).await?;
        facts::drain(&self.inner, &session).await?;
        let page = self.inner.store.list_terminals(id, MAX_PAGE, None).await?;
        let mut items = page.items.iter().map(terminal_of).collect::<Result<Vec<_>, _>>()?;
        if let Some(live) = self.inner.awake(&session)
            && let Ok(Answer::Terminals { items: present }) = live.supervisor.call_soon(&Request::ListTerminals).await
        {
            for item in &mut items {
                if let Some(now) = present.iter().find(|now| now.id == item.id) {
                    *item = now.clone();
                }
            }
        } else {
            items = items.into_iter().map(|item| measured(&session, item)).collect();
        }
        Ok(items)
    }

    /// One terminal, as it stands.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn terminal(&self, id: SessionId, terminal: TerminalId) -> Result<TerminalRecord, Error> {
        let session = self.inner.present(id).await?;
        if let Some(live) = self.inner.awake(&session) {
            match live.supervisor.call_soon(&Request::GetTerminal { id: terminal }).await {
                Ok(Answer::Terminal { terminal }) => return Ok(terminal),
                Ok(_) | Err(_) => facts::drain(&self.inner, &session).await?,
            };
        }
        match self.inner.store.terminal(id, terminal).await? {
            Some(row) => Ok(measured(&session, terminal_of(&row)?)),
            None => Err(unknown(id, terminal)),
        }
    }

    /// Ends a terminal with everything that runs in it.
    ///
    /// # Errors
    /// [`Error::NotFound`]; why the session can't be used.
    pub async fn close_terminal(&self, caller: &Caller, id: SessionId, terminal: TerminalId) -> Result<(), Error> {
        let session = self.inner.present(id).await?;
        if self.terminal(id, terminal).await?.state == TerminalState::Ended {
            return Ok(());
        }
        match self.inner.ask(&session, &caller.actor, &Request::CloseTerminal { id: terminal }).await? {
            Asked::Done => Ok(()),
            Asked::Refused(error) if error.code == Code::Ended => Ok(()),
            Asked::Refused(error) => Err(session.call_error(CallError::Refused(error))),
            // With its sandbox it has ended, too.
            Asked::Unknown(_) if self.terminal(id, terminal).await?.state == TerminalState::Ended => Ok(()),
            Asked::Unknown(error) => Err(error),
        }
    }

    /// A terminal's screen, in every form. Only a living sandbox's supervisor has screens.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotRunning`].
    pub async fn screen(&self, id: SessionId, terminal: TerminalId) -> Result<ScreenAnswer, Error> {
        let session = self.inner.present(id).await?;
        self.terminal(id, terminal).await?;
        let Some(live) = self.inner.awake(&session) else {
            let reason = format!("it is {}", session.view().row.state);
            return Err(Error::NotRunning { session: id, reason });
        };
        match live.supervisor.call_soon(&Request::Screen { id: terminal }).await {
            Ok(Answer::Screen(screen)) => Ok(screen),
            Ok(_) => Err(Error::internal("the supervisor answered with something else")),
            Err(CallError::Refused(error)) if error.code == Code::NotFound => Err(unknown(id, terminal)),
            Err(error) => Err(session.call_error(error)),
        }
    }

    /// Joins a terminal. Who may type wakes a hibernated session, unless `wake` is false; an observer doesn't.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Inside`] for one that has ended; why the session can't be used.
    pub async fn attach(
        &self,
        caller: &Caller,
        id: SessionId,
        mut attach: Attach,
        wake: bool,
        start: bool,
    ) -> Result<Attachment, Error> {
        if !matches!(attach.mode.as_str(), "write" | "observe" | "take") {
            return Err(Error::invalid("mode", "it is write, observe or take"));
        }
        if attach.client.is_empty() || attach.client.len() > 200 {
            return Err(Error::invalid("client", "it has 1 to 200 characters"));
        }
        for (field, side) in [("cols", attach.cols), ("rows", attach.rows)] {
            if side.is_some_and(|side| side == 0 || side > MAX_SIDE) {
                return Err(Error::invalid(field, format!("it must be from 1 to {MAX_SIDE}")));
            }
        }
        let session = self.inner.present(id).await?;
        self.terminal(id, attach.id).await?;
        let live = match attach.mode.as_str() {
            "observe" => match self.inner.awake(&session) {
                Some(live) => live,
                None => self.running(&session)?,
            },
            _ if !wake => self.running(&session)?,
            _ => self.inner.usable(&session, &caller.actor, start).await?,
        };
        attach.actor = Some(caller.actor.to_string());
        let joined = async {
            let mut conn = live.supervisor.connect().await?;
            conn.ask(&Request::Attach(attach)).await?;
            Ok::<_, CallError>(conn)
        };
        let conn = joined.await.map_err(|error| session.call_error(error))?;
        let (reader, writer) = conn.split();
        Ok(self.pump(&session, reader, writer))
    }

    /// Carries messages until either side ends.
    fn pump(&self, session: &Arc<Session>, reader: ConnReader, writer: ConnWriter) -> Attachment {
        let (input, typed) = mpsc::channel(MESSAGES);
        let (shown, output) = mpsc::channel(MESSAGES);
        let over = CancellationToken::new();
        let closing = self.inner.closing.clone();
        let (id, over_) = (session.id, over.clone());
        self.inner.tasks.spawn(async move {
            tokio::select! {
                () = to_viewer(reader, shown) => {}
                () = over_.cancelled() => {}
                () = closing.cancelled() => {}
            }
            over_.cancel();
            tracing::debug!(session = %id, "a viewer's link has ended");
        });
        self.inner.tasks.spawn(async move {
            tokio::select! {
                () = from_viewer(typed, writer) => {}
                () = over.cancelled() => {}
            }
            over.cancel();
        });
        Attachment { input, output }
    }
}

/// A terminal that is to be opened.
struct TerminalWork(TerminalStart);

impl Work for TerminalWork {
    type Record = TerminalRecord;

    fn start(&self) -> Request {
        Request::OpenTerminal { terminal: self.0.clone() }
    }

    fn look(&self) -> Request {
        Request::GetTerminal { id: self.0.id }
    }

    fn limit(&self) -> Option<Duration> {
        Some(PROMPT)
    }

    fn answered(answer: Answer) -> Option<TerminalRecord> {
        match answer {
            Answer::Terminal { terminal } => Some(terminal),
            _ => None,
        }
    }

    fn asked_for(&self, generation: Generation, now: Timestamp) -> TerminalRecord {
        let TerminalStart { id, name, program, cols, rows, .. } = self.0.clone();
        TerminalRecord {
            id,
            name,
            generation,
            state: TerminalState::Running,
            argv: program.argv,
            cwd: program.cwd,
            pid: None,
            cols,
            rows,
            title: None,
            output_bytes: Offset::ZERO,
            exit_code: None,
            signal: None,
            reason: None,
            writer: None,
            started_at: now,
            ended_at: None,
        }
    }

    fn is_running(record: &TerminalRecord) -> bool {
        record.state == TerminalState::Running
    }

    fn made(&self) -> String {
        self.0.id.to_string()
    }

    async fn stored(&self, inner: &Inner, session: &Session) -> Result<Option<TerminalRecord>, Error> {
        inner.store.terminal(session.id, self.0.id).await?.map(|row| terminal_of(&row)).transpose()
    }

    fn put(change: &mut SessionChange, record: &TerminalRecord) {
        change.terminals.push(terminal_row(change.session.id, record));
    }

    fn lose(
        session: &Session,
        change: &mut SessionChange,
        record: TerminalRecord,
        reason: &str,
        now: Timestamp,
    ) -> TerminalRecord {
        lose_terminal(session, change, record, reason, now)
    }
}

async fn to_viewer(mut reader: ConnReader, shown: mpsc::Sender<Bytes>) {
    while let Ok(Some(message)) = reader.message().await {
        if shown.send(message).await.is_err() {
            return;
        }
    }
}

async fn from_viewer(mut typed: mpsc::Receiver<Bytes>, mut writer: ConnWriter) {
    while let Some(message) = typed.recv().await {
        if writer.message(message).await.is_err() {
            return;
        }
    }
}

/// How far a terminal's output has come whose sandbox can't be asked: its record tells that only at its end.
fn measured(session: &Session, mut terminal: TerminalRecord) -> TerminalRecord {
    if terminal.state == TerminalState::Running {
        let journal = JournalName::Terminal(terminal.id);
        terminal.output_bytes = journal_tail(session, journal).unwrap_or(terminal.output_bytes);
    }
    terminal
}

fn unknown(id: SessionId, terminal: TerminalId) -> Error {
    Error::not_found(format!("terminal {terminal} in session {id}"))
}
