//! The server's side: the Unix socket and what can be asked on it ([`wire::control`]).

mod connection;
mod dial;

use crate::{activity::Kind, core::Core, files::FileAnswer, viewer};
use connection::Connection;
use std::sync::Arc;
use tokio::net::UnixListener;
use wire::{
    Code, Frame, WireError,
    control::{Answer, Phase, Request, Status},
    facts::Fact,
    guest::{Reply, Request as GuestRequest},
    layout::JournalName,
    terminal::ClientFrame,
};

/// Answers connections until the process ends.
pub async fn serve(core: Arc<Core>, listener: UnixListener) {
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted,
            () = core.quit.cancelled() => return linger(&core, &listener).await,
        };
        match stream {
            Ok((stream, _)) => drop(tokio::spawn(talk(core.clone(), Connection::new(stream)))),
            Err(error) => {
                tracing::warn!(%error, "a connection could not be taken");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
    }
}

/// Between the end and the exit: whoever asks learns how it ended.
async fn linger(core: &Arc<Core>, listener: &UnixListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(talk(core.clone(), Connection::new(stream)));
    }
}

async fn talk(core: Arc<Core>, mut connection: Connection) {
    loop {
        let request = match connection.request().await {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(error) => {
                let _ = connection.send(&Answer::Error { error }).await;
                return;
            }
        };
        let _using = core.using(&request);
        if asks_guest(&request) {
            core.moves_again().await;
        }
        let outcome = match request {
            Request::Attach(attach) => return attach_viewer(core, connection, attach).await,
            Request::Dial { port } => return dial::serve(&core, connection, port).await,
            Request::Watch { journal } => watch(&core, &mut connection, &journal).await,
            Request::File { request, actor } => file(&core, &mut connection, request, actor).await,
            Request::ExecStdin { id, eof } => stdin(&core, &mut connection, id, eof).await,
            request => {
                let answer = tokio::select! {
                    answer = answer(&core, request.clone()) => answer.unwrap_or_else(|error| Answer::Error { error }),
                    // Only what nothing but this connection waits for ends with it.
                    () = connection.closed(), if only_waits(&request) => return,
                };
                connection.send(&answer).await
            }
        };
        if outcome.is_err() {
            return;
        }
    }
}

/// Requests that the guest has to be awake for. One that comes while it stands still for a snapshot is in no hurry.
fn asks_guest(request: &Request) -> bool {
    use Request as R;
    matches!(
        request,
        R::Probe
            | R::StartExec { .. }
            | R::SignalExec { .. }
            | R::ExecStdin { .. }
            | R::OpenTerminal { .. }
            | R::CloseTerminal { .. }
            | R::File { .. }
            | R::Services
            | R::SetServices { .. }
            | R::Service { .. }
            | R::Stats
            | R::Processes
            | R::Unsaveable
            | R::Activity { .. }
            | R::Moment { .. }
            | R::Ports
            | R::Dial { .. }
    )
}

fn only_waits(request: &Request) -> bool {
    matches!(request, Request::AwaitExec { .. } | Request::AwaitReady | Request::Probe)
}

async fn answer(core: &Arc<Core>, request: Request) -> Result<Answer, WireError> {
    Ok(match request {
        Request::Status => Answer::Status(status(core)),
        Request::Settled => {
            let _step = if core.phase() == Phase::Starting { None } else { Some(core.step.lock().await) };
            Answer::Status(status(core))
        }
        Request::AwaitReady => {
            let mut now = core.now.subscribe();
            let settled = now.wait_for(|now| now.phase != Phase::Starting || now.failure.is_some()).await;
            if let Some(failure) = settled.ok().and_then(|now| now.failure.clone()) {
                return Err(failure);
            }
            Answer::Status(status(core))
        }
        Request::Probe => {
            core.link.request(GuestRequest::Ping).await?;
            Answer::Done
        }
        Request::Claim { session, identity, network } => done(core.claim(session, identity, network).await)?,
        Request::StartExec { exec, wait } => {
            let record = core.start_exec(exec).await?;
            Answer::Exec { exec: if wait { core.await_exec(record.id).await? } else { record } }
        }
        Request::GetExec { id } => {
            let state = core.state();
            Answer::Exec { exec: state.works.get(id)?.as_it_stands(&state.journals) }
        }
        Request::ListExecs => {
            let state = core.state();
            Answer::Execs { items: state.works.records(&state.journals) }
        }
        Request::AwaitExec { id } => Answer::Exec { exec: core.await_exec(id).await? },
        Request::SignalExec { id, signal } => done(core.signal_exec(id, signal).await)?,
        Request::OpenTerminal { terminal } => Answer::Terminal { terminal: core.open_terminal(terminal).await? },
        Request::ListTerminals => {
            Answer::Terminals { items: core.state().terminals.all().map(|terminal| terminal.record.clone()).collect() }
        }
        Request::GetTerminal { id } => Answer::Terminal { terminal: core.state().terminals.get(id)?.record.clone() },
        Request::CloseTerminal { id } => done(core.close_terminal(id).await)?,
        Request::Screen { id } => Answer::Screen(core.screen(id)?),
        Request::Services => match core.link.request(GuestRequest::Services).await? {
            Reply::Services { items } => Answer::Services { items: core.with_output(items) },
            _ => return Err(unexpected()),
        },
        Request::SetServices { services } => {
            let offsets = core.service_offsets(services.iter().map(|spec| &spec.name))?;
            done(core.link.request(GuestRequest::SetServices { services, offsets }).await)?
        }
        Request::Service { name, action } => done(core.link.request(GuestRequest::Service { name, action }).await)?,
        Request::Stats => match core.link.request(GuestRequest::Stats).await? {
            Reply::Stats { stats } => Answer::Stats { stats: core.complete_stats(stats).await },
            _ => return Err(unexpected()),
        },
        Request::Processes => match core.link.request(GuestRequest::Processes).await? {
            Reply::Processes { items } => Answer::Processes { items },
            _ => return Err(unexpected()),
        },
        Request::Unsaveable => Answer::Unsaveable { items: core.unsaveable().await? },
        Request::Activity { window_ms } => Answer::Activity { activity: core.activity(window_ms).await },
        Request::Moment { moment, seconds } => {
            core.tell_moment(moment, seconds).await;
            Answer::Done
        }
        Request::Pause => done(core.pause().await)?,
        Request::Unpause => done(core.unpause().await)?,
        Request::Capture { image } => Answer::Captured(core.capture(&image).await?),
        Request::Snapshot { snapshot } => Answer::Snapshotted(Box::new(core.snapshot(snapshot).await?)),
        Request::CommitHibernate { confirm } => done(core.commit_hibernate(confirm).await)?,
        Request::AbortHibernate => done(core.abort_hibernate().await)?,
        Request::Thaw { generation, gap_ms } => done(core.thaw(generation, gap_ms).await)?,
        Request::Shutdown { reason, grace_ms } => {
            core.shut_down(reason, grace_ms).await;
            Answer::Done
        }
        Request::SetNetwork { network, credentials, inside } => done(core.set_network(network, credentials, inside).await)?,
        Request::Network => {
            let (open, count) = core.open_connections();
            Answer::Network { open, count }
        }
        Request::Ports => Answer::Ports { items: core.ports().await? },
        Request::Attach(_) | Request::Watch { .. } | Request::File { .. } | Request::ExecStdin { .. } | Request::Dial { .. } => {
            return Err(WireError::new(Code::Protocol, "this request has a stream of its own"));
        }
    })
}

fn done<T>(result: Result<T, WireError>) -> Result<Answer, WireError> {
    result.map(|_| Answer::Done)
}

fn unexpected() -> WireError {
    WireError::new(Code::Protocol, "the guest answered with something else")
}

fn status(core: &Core) -> Status {
    let state = core.state();
    let mut detail = std::collections::BTreeMap::new();
    if let Some(failure) = &core.now.borrow().failure {
        detail.insert("failure".to_owned(), failure.message.clone());
    }
    let (session, generation, guest_version) = (state.session, state.generation, state.guest_version.clone());
    let reset = state.reset.clone();
    drop(state);
    if core.is_stalled() {
        detail.insert("output".to_owned(), "waits for room on the disk".to_owned());
    }
    let supervisor_version = env!("CARGO_PKG_VERSION").to_owned();
    Status { session, generation, phase: core.phase(), supervisor_version, guest_version, pid: std::process::id(), detail, reset }
}

/// Tells how far a journal has come, each time it changes.
async fn watch(core: &Core, connection: &mut Connection, name: &JournalName) -> Result<(), WireError> {
    let watched = match name {
        JournalName::Facts => Ok(core.state().facts.watch()),
        name => core.state().journals.watch(name),
    };
    let mut tail = match watched {
        Ok(tail) => tail,
        Err(error) => return connection.send(&Answer::Error { error }).await,
    };
    loop {
        let now = *tail.borrow_and_update();
        connection.send(&Answer::Tail { tail: now.offset, ended: now.ended }).await?;
        if now.ended {
            return Ok(());
        }
        tokio::select! {
            // The journal was closed: its last word was the end.
            changed = tail.changed() => if changed.is_err() {
                let last = *tail.borrow();
                return connection.send(&Answer::Tail { tail: last.offset, ended: true }).await;
            },
            () = connection.closed() => return Err(WireError::new(Code::Ended, "the watcher has left")),
        }
    }
}

async fn file(
    core: &Core,
    connection: &mut Connection,
    request: wire::files::FileRequest,
    actor: Option<String>,
) -> Result<(), WireError> {
    let written =
        request.writes().then(|| Fact::FilesWritten { path: request.path().to_owned(), op: request.name().to_owned(), actor });
    if let Err(error) = core.check_room(&request).await {
        return connection.send(&Answer::Error { error }).await;
    }
    let reply = match core.file(request).await {
        Err(error) => return connection.send(&Answer::Error { error }).await,
        Ok(FileAnswer::Done(reply)) => Ok(reply),
        Ok(FileAnswer::Giving { reply, mut bytes }) => {
            connection.send(&Answer::File { reply }).await?;
            let given = loop {
                let piece = tokio::select! {
                    piece = core.next_piece(&mut bytes) => piece,
                    () = connection.closed() => break Err(WireError::new(Code::Ended, "the reader has left")),
                };
                match piece {
                    Ok(Some(piece)) => {
                        if let Err(error) = connection.send_data(piece).await {
                            break Err(error);
                        }
                    }
                    Ok(None) => return connection.send_end().await,
                    Err(error) => break connection.send_reset(&error.message).await,
                }
            };
            core.stop_giving(&bytes);
            return given;
        }
        Ok(FileAnswer::Taking(taking)) => {
            connection.send(&Answer::Streaming).await?;
            loop {
                match connection.frame().await {
                    // What the guest does not take any more is read to its end all the same.
                    Ok(Some(Frame::Data { bytes, .. })) => {
                        if let Some(Fact::FilesWritten { path, .. }) = &written {
                            core.note_activity(Kind::File, path);
                        }
                        core.give(&taking, &bytes).await;
                    }
                    Ok(Some(Frame::End { .. })) => break core.finish_giving(taking).await,
                    Ok(_) | Err(_) => {
                        core.break_off(&taking);
                        return Err(WireError::new(Code::Ended, "the upload broke off"));
                    }
                }
            }
        }
    };
    if let (Ok(_), Some(fact)) = (&reply, written) {
        if let Fact::FilesWritten { path, .. } = &fact {
            core.note_activity(Kind::File, path);
        }
        core.record(fact);
    }
    let answer = reply.map_or_else(|error| Answer::Error { error }, |reply| Answer::File { reply });
    connection.send(&answer).await
}

async fn stdin(core: &Core, connection: &mut Connection, id: model::ExecId, eof: bool) -> Result<(), WireError> {
    let stream = {
        let state = core.state();
        state.works.get(id).map(|exec| exec.stdin)
    };
    let mut outcome = match stream {
        Ok(Some(stream)) => Ok(stream),
        Ok(None) => Err(WireError::new(Code::Invalid, format!("exec {id} was started without an open standard input"))),
        Err(error) => Err(error),
    };
    loop {
        match connection.frame().await? {
            Some(Frame::Data { bytes, .. }) => {
                if let Ok(stream) = outcome
                    && !core.link.send_all(stream, &bytes).await
                {
                    outcome = Err(WireError::new(Code::Ended, format!("exec {id} reads no more input")));
                }
            }
            Some(Frame::End { .. }) => break,
            _ => return Err(WireError::new(Code::Ended, "the input broke off")),
        }
    }
    let answer = match outcome {
        Ok(stream) if eof => {
            core.link.finish(stream);
            Answer::Done
        }
        Ok(_) => Answer::Done,
        Err(error) => Answer::Error { error },
    };
    connection.send(&answer).await
}

async fn attach_viewer(core: Arc<Core>, mut connection: Connection, attach: wire::control::Attach) {
    let (attached, mut outgoing) = match viewer::attach(&core, &attach) {
        Ok(halves) => halves,
        Err(error) => {
            let _ = connection.send(&Answer::Error { error }).await;
            return;
        }
    };
    core.record(Fact::TerminalAttached {
        terminal: attach.id,
        client: attach.client.clone(),
        mode: attach.mode.clone(),
        actor: attach.actor.clone(),
    });
    if connection.send(&Answer::Streaming).await.is_ok() {
        let (mut from, mut to) = connection.split();
        let incoming = async {
            while let Ok(Some(message)) = from.message().await {
                match ClientFrame::decode(message) {
                    Ok(frame) => attached.incoming(frame).await,
                    Err(error) => return tracing::info!(%error, "a viewer sent no terminal message"),
                }
            }
        };
        let sending = async {
            while let Ok(Some(frame)) = outgoing.next().await {
                if to.send_message(frame.encode()).await.is_err() {
                    return;
                }
            }
            let _ = to.send_end().await;
        };
        tokio::select! {
            () = incoming => {}
            () = sending => {}
            () = core.link_silenced() => {}
        }
    }
    attached.leave();
    core.record(Fact::TerminalDetached { terminal: attach.id, client: attach.client });
}

impl Core {
    /// Fills in what only the supervisor knows of services.
    fn with_output(&self, mut items: Vec<wire::records::ServiceRecord>) -> Vec<wire::records::ServiceRecord> {
        let mut state = self.state();
        for item in &mut items {
            let journal = JournalName::Service(item.name.clone());
            item.output_bytes = state.journals.ensure_open(&journal).unwrap_or_default();
        }
        items
    }

    /// Fills in what the machine knows of the sandbox.
    async fn complete_stats(&self, mut stats: wire::records::Stats) -> wire::records::Stats {
        let upper = self.layout.upper();
        let disk = crate::start::blocking(move || snapshot::disk::usage_bytes(&upper)).await;
        stats.disk_bytes = disk.ok().and_then(Result::ok).unwrap_or(stats.disk_bytes);
        stats.memory_limit_bytes = self.spec.resources.memory_bytes.map(|limit| limit.0);
        if let Some(usage) = self.sandbox.usage() {
            stats.cgroup_memory_bytes = Some(usage.memory_bytes);
            stats.oom_kills = usage.oom_kills;
        }
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
        stats.supervisor_rss_bytes = pages * rustix::param::page_size() as u64;
        stats
    }

    /// Waits until the sandbox is no longer there to be watched: viewers come back after the wake.
    async fn link_silenced(&self) {
        let mut now = self.now.subscribe();
        let _ = now.wait_for(|now| matches!(now.phase, Phase::Captured | Phase::Confirming)).await;
    }
}
