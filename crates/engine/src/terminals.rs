//! Terminals: opening, reading and joining them. What is said in one is opaque here.

use crate::{
    Caller, Engine, Error, NewTerminal,
    facts::{self, terminal_of},
    operation::journal_tail,
    session::Session,
    supervisor_client::{CallError, ConnReader, ConnWriter},
};
use bytes::Bytes;
use model::{SessionId, TerminalId, TerminalState};
use std::sync::Arc;
use store::MAX_PAGE;
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
        let live = self.inner.usable(&session, &caller.actor, new.start).await?;
        let terminal = TerminalStart {
            id: TerminalId::new(),
            name: new.name,
            program,
            cols: new.cols,
            rows: new.rows,
            actor: Some(caller.actor.to_string()),
        };
        match live.supervisor.call_soon(&Request::OpenTerminal { terminal }).await {
            Ok(Answer::Terminal { terminal }) => Ok(terminal),
            Ok(_) => Err(Error::internal("the supervisor answered with something else")),
            Err(error) => Err(session.call_error(error)),
        }
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
        let live = self.inner.usable(&session, &caller.actor, false).await?;
        match live.supervisor.call_soon(&Request::CloseTerminal { id: terminal }).await {
            Ok(_) => Ok(()),
            Err(CallError::Refused(error)) if error.code == Code::Ended => Ok(()),
            Err(error) => Err(session.call_error(error)),
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
