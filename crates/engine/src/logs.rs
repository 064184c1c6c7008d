//! A session's output as one log: the lines of all execs and services, in the order of time, each with its name.
//!
//! What is on disk is merged by the times that the journals keep. What comes after is passed on as it comes.

mod merge;

use crate::{Engine, Error, LogLine, LogSource, OutputItem, OutputReader, facts::exec_of};
use merge::{Merged, Stream};
use model::{EventSeq, EventType, ExecId, ExecState, Offset, ServiceName, SessionId, Timestamp};
use std::{collections::HashSet, sync::Arc};
use store::MAX_PAGE;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use wire::layout::JournalName;

/// Lines that wait for the reader.
const LINES: usize = 256;
/// A line that is longer is given in parts.
pub(crate) const MAX_LINE: usize = 64 * 1024;

/// Reads a session's log in order.
pub struct LogReader {
    lines: mpsc::Receiver<Result<LogLine, Error>>,
    /// Ends the tasks behind it.
    _over: DropGuard,
}

impl LogReader {
    /// The next line; `None` when there are no more, with follow once the session is deleted. Dropping the future loses
    /// nothing.
    ///
    /// # Errors
    /// Output that can't be read; the log ends with it.
    pub async fn next(&mut self) -> Result<Option<LogLine>, Error> {
        self.lines.recv().await.transpose()
    }
}

impl Engine {
    /// A session's log, from `since` on or from its beginning.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Deleted`].
    pub async fn logs(&self, id: SessionId, since: Option<Timestamp>, follow: bool) -> Result<LogReader, Error> {
        let session = self.inner.present(id).await?;
        // Before the list: what begins after this is told by an event.
        let from = session.view().row.next_event_seq;
        crate::facts::drain(&self.inner, &session).await?;
        let streams = self.streams(id).await?;
        Ok(self.read_log(id, streams, since, follow.then_some(from), false))
    }

    /// What went out over a session's network, where its policy has that written down: a JSON object a line.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Deleted`].
    pub async fn requests_log(&self, id: SessionId, since: Option<Timestamp>, follow: bool) -> Result<LogReader, Error> {
        let session = self.inner.present(id).await?;
        let row = session.view().row;
        let journal = JournalName::Requests;
        let dir = session.layout.journal(&journal);
        let stream = Stream { source: LogSource::Requests, name: "log", journal, dir, since: row.created_at, goes_on: true };
        Ok(self.read_log(id, vec![stream], since, follow.then_some(row.next_event_seq), true))
    }

    fn read_log(
        &self,
        id: SessionId,
        streams: Vec<Stream>,
        since: Option<Timestamp>,
        follow: Option<EventSeq>,
        alone: bool,
    ) -> LogReader {
        let (tell, lines) = mpsc::channel(LINES);
        let over = CancellationToken::new();
        let log = Log { engine: self.clone(), id, alone, tell, over: over.clone() };
        self.inner.tasks.spawn(async move { log.run(streams, since, follow).await });
        LogReader { lines, _over: over.drop_guard() }
    }

    /// Everything in a session that prints lines.
    async fn streams(&self, id: SessionId) -> Result<Vec<Stream>, Error> {
        let session = self.inner.present(id).await?;
        let mut streams = Vec::new();
        let mut stream = |source: LogSource, name: &'static str, journal: JournalName, since: Timestamp, goes_on: bool| {
            let dir = session.layout.journal(&journal);
            streams.push(Stream { source, name, journal, dir, since, goes_on });
        };
        let mut cursor = None;
        loop {
            let page = self.inner.store.list_execs(id, MAX_PAGE, cursor).await?;
            for row in &page.items {
                let exec = exec_of(row)?;
                let goes_on = exec.state == ExecState::Running;
                let source = LogSource::Exec(exec.id);
                stream(source.clone(), "stdout", JournalName::Stdout(exec.id), exec.started_at, goes_on);
                stream(source, "stderr", JournalName::Stderr(exec.id), exec.started_at, goes_on);
            }
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        let row = session.view().row;
        for service in &row.services {
            let name = service.name.clone();
            stream(LogSource::Service(name.clone()), "stdout", JournalName::Service(name), row.created_at, true);
        }
        Ok(streams)
    }
}

/// The task behind a reader.
#[derive(Clone)]
struct Log {
    engine: Engine,
    id: SessionId,
    /// Nothing is added to what it began with.
    alone: bool,
    tell: mpsc::Sender<Result<LogLine, Error>>,
    over: CancellationToken,
}

impl Log {
    async fn run(self, streams: Vec<Stream>, since: Option<Timestamp>, follow: Option<EventSeq>) {
        let tell = self.tell.clone();
        let merged = tokio::task::spawn_blocking(move || merge::merge(streams, since, |line| tell.blocking_send(line).is_ok()));
        let Ok(Some(ends)) = merged.await else { return };
        if let Some(from) = follow {
            let over = self.over.clone();
            let tell = self.tell.clone();
            tokio::select! {
                result = self.follow(ends, from) => if let Err(error) = result {
                    let _ = tell.send(Err(error)).await;
                },
                () = over.cancelled() => {}
            }
        }
    }

    async fn follow(self, ends: Vec<Merged>, from: EventSeq) -> Result<(), Error> {
        let mut execs: HashSet<ExecId> = HashSet::new();
        let mut services: HashSet<ServiceName> = HashSet::new();
        for end in ends {
            match &end.source {
                LogSource::Exec(id) => drop(execs.insert(*id)),
                LogSource::Service(name) => drop(services.insert(name.clone())),
                LogSource::Requests => {}
            }
            if end.goes_on {
                self.pass_on(end.source, end.name, end.journal, end.position, end.partial);
            }
        }
        let mut events = self.engine.follow_events(self.id, from).await?;
        while let Some(event) = events.next().await? {
            if self.alone {
                continue;
            }
            if event.kind == EventType::EXEC_STARTED
                && let Some(id) = event.data["exec_id"].as_str().and_then(|id| id.parse::<ExecId>().ok())
                && execs.insert(id)
            {
                let source = LogSource::Exec(id);
                self.pass_on(source.clone(), "stdout", JournalName::Stdout(id), Offset::ZERO, Vec::new());
                self.pass_on(source, "stderr", JournalName::Stderr(id), Offset::ZERO, Vec::new());
            }
            if event.kind == EventType::SERVICE_STARTED
                && let Some(name) = event.data["name"].as_str().and_then(|name| name.parse::<ServiceName>().ok())
                && services.insert(name.clone())
            {
                let journal = JournalName::Service(name.clone());
                self.pass_on(LogSource::Service(name), "stdout", journal, Offset::ZERO, Vec::new());
            }
        }
        Ok(())
    }

    /// Passes a stream's lines on as they come.
    fn pass_on(&self, source: LogSource, name: &'static str, journal: JournalName, from: Offset, partial: Vec<u8>) {
        let log = self.clone();
        self.engine.inner.tasks.spawn(async move {
            let over = log.over.clone();
            tokio::select! {
                result = log.lines(source, name, journal, from, partial) => if let Err(error) = result {
                    tracing::debug!(session = %log.id, %error, "a stream of a log has ended");
                },
                () = over.cancelled() => {}
            }
        });
    }

    async fn lines(
        &self,
        source: LogSource,
        stream: &'static str,
        journal: JournalName,
        from: Offset,
        mut partial: Vec<u8>,
    ) -> Result<(), Error> {
        let session = self.engine.inner.present(self.id).await?;
        let mut reader = OutputReader::new(self.engine.clone(), Arc::clone(&session), journal, from);
        loop {
            let item = reader.next(true).await?;
            let at = self.engine.inner.now();
            let line = |bytes: &[u8]| {
                let text = String::from_utf8_lossy(bytes).into_owned();
                Ok(LogLine { at, source: source.clone(), stream, text })
            };
            match item {
                OutputItem::Data { bytes, .. } => {
                    for part in bytes.split_inclusive(|b| *b == b'\n') {
                        partial.extend_from_slice(part);
                        let whole = partial.last() == Some(&b'\n');
                        if whole {
                            partial.pop();
                        }
                        if (whole || partial.len() >= MAX_LINE)
                            && self.tell.send(line(&std::mem::take(&mut partial))).await.is_err()
                        {
                            return Ok(());
                        }
                    }
                }
                OutputItem::Gap { .. } => partial.clear(),
                OutputItem::End => {
                    if !partial.is_empty() {
                        let _ = self.tell.send(line(&partial)).await;
                    }
                    return Ok(());
                }
            }
        }
    }
}
