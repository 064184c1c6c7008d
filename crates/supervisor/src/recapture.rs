//! Taking over a sandbox whose supervisor has died: its memory goes through an image into a sandbox with a new channel.
//!
//! ```text
//!   thaw ─► pause ─► capture ─► kill the old ─► mark the image as used ─► restore ─► greet
//!     ▲                 │ refused: let it run on for a while, then again
//!     └─────────────────┘
//! ```
//! The old sandbox can't be given another channel, so this is the only way. It is never let go on once an image of it is
//! whole: so a whole image that isn't marked is the session's memory, whoever dies in between. What a dead supervisor knew
//! and nobody else does is put together again: streams from what the guest holds and the journals have, screens from the
//! journals, what was typed from [`crate::notes`].

use crate::{
    core::{Core, State},
    facts::now,
    lifecycle::{explain, runtime_error},
    notes,
    saved::Saved,
    start::{blocking, gvisor},
    terminals::Terminal,
    works::Exec,
};
use journal::{Chunk, Reader};
use model::{ExecId, ExecState, Offset, TerminalId, TerminalState};
use runtime::Sandbox;
use runtime_gvisor::GvisorSandbox;
use screen::Screen;
use serde::{Deserialize, Serialize};
use snapshot::{
    disk,
    image::{DISK, ImageDescriptor, STARTED},
};
use std::{collections::HashMap, path::Path, time::Duration};
use tokio::{sync::watch, time::Instant};
use wire::{
    Code, StreamId, WireError,
    facts::Fact,
    guest::{HelloReply, PtySize, Reply, Request, Role, Work},
    layout::{JournalName, TakesOver},
    records::{ExecRecord, TerminalRecord},
    window::SendWindow,
};

/// How long a capture that is refused is tried again: what stands in its way, such as a deleted file that is still open, is
/// often gone a moment later, and without a capture the memory is lost.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the guest may take to say what runs.
const ASK_LIMIT: Duration = Duration::from_secs(10);
/// The first wait between two tries; each is twice as long as the one before.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// Output from which a screen is put together again.
const REPLAY: u64 = 4 << 20;
const CHUNK: usize = 64 * 1024;
/// How a work ended that nobody knows the end of.
const LOST: &str = "supervisor_lost";

/// What runs in a sandbox that is taken over, as the store knows it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TakenOver {
    #[serde(default)]
    pub execs: Vec<ExecRecord>,
    #[serde(default)]
    pub terminals: Vec<TerminalRecord>,
}

/// Moves the memory of the old sandbox into its image and ends it. Afterwards the image is whole and nothing of the old
/// sandbox lives.
///
/// # Errors
/// It can't be captured. It has been ended then, too: without a channel it is of no use to anybody.
pub async fn capture(core: &Core, from: &TakesOver, works: TakenOver) -> Result<(), WireError> {
    let old = gvisor(&core.spec, &core.layout, from.container.clone());
    let image = core.layout.image(from.generation);
    faults::point("recapture.begun");
    let captured = if old.is_alive() {
        capture_patiently(core, &old, from, &works, &image).await
    } else {
        // It was captured and ended, and then its taker died, too.
        let image = image.clone();
        blocking(move || is_unused(&image)).await.flatten()
    };
    faults::point("recapture.captured");
    old.kill().await.map_err(runtime_error)?;
    faults::point("recapture.ended");
    if !old.pids().is_empty() {
        return Err(WireError::new(Code::Internal, "the old sandbox does not end"));
    }
    captured?;
    let (image, upper) = (core.layout.image(from.generation), core.layout.upper());
    let noted = blocking(move || note_disk(&image, &upper)).await?;
    if let Err(error) = noted {
        tracing::warn!(%error, "a restore that fails will cost the memory");
    }
    Ok(())
}

/// Notes what the disk looks like that belongs to an image: where the restore fails before anything has run, that can be
/// seen, and it can be tried again.
fn note_disk(image: &Path, upper: &Path) -> anyhow::Result<()> {
    Ok(std::fs::write(image.join(DISK), disk::fingerprint(upper)?.to_string())?)
}

/// A whole image that no programs have run on from yet.
fn is_unused(image: &Path) -> Result<(), WireError> {
    let gone = |why: String| WireError::new(Code::SandboxGone, format!("the sandbox ended before it was taken over: {why}"));
    ImageDescriptor::read(image).map_err(|error| gone(error.to_string()))?;
    if image.join(STARTED).exists() { Err(gone("programs have run on from its image".to_owned())) } else { Ok(()) }
}

async fn capture_patiently(
    core: &Core,
    old: &GvisorSandbox,
    from: &TakesOver,
    works: &TakenOver,
    image: &Path,
) -> Result<(), WireError> {
    let (until, mut wait) = (Instant::now() + PATIENCE, FIRST_WAIT);
    loop {
        let Err(error) = capture_once(core, old, from, works, image).await else { return Ok(()) };
        if !old.is_alive() || Instant::now() + wait > until || core.quit.is_cancelled() {
            return Err(explain(error, &[]));
        }
        tracing::warn!(%error, "a sandbox can't be captured; trying again");
        // Nothing of this try may be taken for its memory once it runs on.
        remove(image).await?;
        if let Err(error) = old.resume().await {
            tracing::warn!(%error, "the old sandbox does not run on");
        }
        tokio::time::sleep(wait).await;
        wait *= 2;
    }
}

async fn capture_once(
    core: &Core,
    old: &GvisorSandbox,
    from: &TakesOver,
    works: &TakenOver,
    image: &Path,
) -> Result<(), WireError> {
    // Before it can run: an older image must not outlive that.
    remove(image).await?;
    old.thaw().await.map_err(runtime_error)?;
    if let Err(error) = old.pause().await
        && !old.is_paused()
    {
        return Err(runtime_error(error));
    }
    let works = Saved::taken_over(works.clone());
    core.write_image(old, from.generation, Some(works), image).await.map(|_| ())
}

/// Removes an image, durably.
async fn remove(image: &Path) -> Result<(), WireError> {
    let image = image.to_owned();
    let removed = blocking(move || match std::fs::remove_dir_all(&image) {
        Ok(()) => image.parent().map_or(Ok(()), |parent| std::fs::File::open(parent)?.sync_all()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    });
    removed.await?.map_err(|error| WireError::new(Code::of_io(&error), format!("remove an older image: {error}")))
}

/// The guest's streams, by what they carry.
struct Streams {
    sending: HashMap<Role, StreamId>,
    receiving: HashMap<Work, (StreamId, Offset, bool)>,
}

impl Streams {
    fn of(reply: &HelloReply) -> Streams {
        let sending = reply.sending.iter().map(|sending| (sending.role.clone(), sending.stream)).collect();
        let receiving = reply.receiving.iter().filter_map(|receiving| match &receiving.role {
            Role::Stdin(work) => Some((work.clone(), (receiving.stream, receiving.received, receiving.ended))),
            _ => None,
        });
        Streams { sending, receiving: receiving.collect() }
    }
}

impl Core {
    /// Goes on with what runs in a sandbox that was taken over.
    pub fn take_over(&self, known: TakenOver, reply: &HelloReply) {
        let streams = Streams::of(reply);
        let runs: HashMap<&Work, u32> = reply.works.iter().map(|running| (&running.work, running.pid)).collect();
        for record in known.execs {
            let pid = runs.get(&Work::Exec(record.id)).copied();
            self.take_exec(record, pid, &streams);
        }
        for record in known.terminals {
            self.take_terminal(record, &streams);
        }
        // Started just before the end, so that nobody has written them down.
        for running in &reply.works {
            match &running.work {
                Work::Exec(id) if self.state().works.get(*id).is_err() => {
                    self.take_exec(self.unknown_exec(*id), Some(running.pid), &streams);
                }
                Work::Terminal(id) if self.state().terminals.get(*id).is_err() => {
                    self.take_terminal(self.unknown_terminal(*id), &streams);
                }
                _ => {}
            }
        }
    }

    fn unknown_exec(&self, id: ExecId) -> ExecRecord {
        ExecRecord {
            id,
            key: None,
            hook: None,
            generation: self.state().generation,
            state: ExecState::Running,
            exit_code: None,
            signal: None,
            reason: None,
            argv: Vec::new(),
            cwd: None,
            user: None,
            started_at: now(),
            ended_at: None,
            pid: None,
            stdout_bytes: Offset::ZERO,
            stderr_bytes: Offset::ZERO,
        }
    }

    fn unknown_terminal(&self, id: TerminalId) -> TerminalRecord {
        TerminalRecord {
            id,
            name: None,
            generation: self.state().generation,
            state: TerminalState::Running,
            argv: Vec::new(),
            cwd: None,
            pid: None,
            cols: 80,
            rows: 24,
            title: None,
            output_bytes: Offset::ZERO,
            exit_code: None,
            signal: None,
            reason: None,
            writer: None,
            started_at: now(),
            ended_at: None,
        }
    }

    fn take_exec(&self, mut record: ExecRecord, pid: Option<u32>, streams: &Streams) {
        let work = Work::Exec(record.id);
        // A record without a process: it was asked for, and that it began was not written down.
        let begins = record.pid.is_none();
        record.pid = record.pid.or(pid);
        record.state = ExecState::Running;
        let tail = |name: JournalName| Reader::open(self.layout.journal(&name)).range().map(|range| range.tail);
        record.stdout_bytes = tail(JournalName::Stdout(record.id)).unwrap_or(record.stdout_bytes);
        record.stderr_bytes = tail(JournalName::Stderr(record.id)).unwrap_or(record.stderr_bytes);
        let stream = |role: Role| streams.sending.get(&role).copied().unwrap_or_else(|| self.link.new_stream());
        let (stdout, stderr) = (stream(Role::Stdout(work.clone())), stream(Role::Stderr(work.clone())));
        let stdin = self.take_input(&work, streams);
        self.state().works.insert(Exec { record: watch::channel(record).0, stdin, stdout, stderr, begins });
    }

    /// What was on its way to the program is gone, and so is whether more was to come: its input stays open.
    fn take_input(&self, work: &Work, streams: &Streams) -> Option<StreamId> {
        let (stream, received, ended) = *streams.receiving.get(work)?;
        if !ended {
            self.link.open_sending(stream, SendWindow::starting_at(received));
        }
        Some(stream)
    }

    fn take_terminal(&self, mut record: TerminalRecord, streams: &Streams) {
        let work = Work::Terminal(record.id);
        let begins = record.pid.is_none();
        let received = streams.receiving.get(&work).map_or(Offset(u64::MAX), |(_, received, _)| *received);
        let notes_at = self.layout.terminal_notes(record.id);
        let noted = notes::read(&notes_at, received);
        let mut journal = Reader::open(self.layout.journal(&JournalName::Terminal(record.id)));
        let tail = journal.range().map(|range| range.tail).unwrap_or(record.output_bytes);
        let first_size = PtySize { cols: record.cols, rows: record.rows };
        let size = noted.sizes.last().map_or(first_size, |(_, size)| *size);
        (record.cols, record.rows, record.output_bytes, record.writer) = (size.cols, size.rows, tail, None);
        let input = self.take_input(&work, streams).unwrap_or_else(|| self.link.new_stream());
        let output = streams.sending.get(&Role::Stdout(work)).copied().unwrap_or_else(|| self.link.new_stream());
        let mut terminal = Terminal::new(record, input, output, notes_at);
        terminal.begins = begins;
        replay(&mut terminal.screen, &mut journal, tail, first_size, &noted.sizes);
        terminal.screen.resize(size.cols, size.rows);
        terminal.record.title = terminal.screen.title().map(str::to_owned);
        terminal.typed = noted.typed;
        if let Some((client, seq)) = noted.torn {
            terminal.note_refused(&client, seq);
        }
        let end = self.link.unacknowledged(input).map_or(Offset::ZERO, |(from, _, _)| from);
        terminal.note_all(end);
        self.state().terminals.insert(terminal);
    }

    /// Once the link is open: writes down what began unnoticed, and that what the guest knows nothing of is lost.
    pub async fn settle_taken_over(&self, reply: &HelloReply) {
        let begun: Vec<Work> = {
            let state = self.state();
            let execs = state.works.running().filter(|(_, exec)| exec.begins).map(|(id, _)| Work::Exec(*id));
            let terminals =
                state.terminals.all().filter(|terminal| terminal.begins).map(|terminal| Work::Terminal(terminal.record.id));
            execs.chain(terminals).collect()
        };
        // Every end that the guest had to tell comes before its answer to this.
        let asked = tokio::time::timeout(ASK_LIMIT, self.link.request(Request::Processes)).await;
        let silent = || Err(WireError::new(wire::Code::Unresponsive, "the guest doesn't say what runs"));
        let processes = match asked.unwrap_or_else(|_| silent()) {
            Ok(Reply::Processes { items }) => items,
            Ok(_) => Vec::new(),
            // Only names are missing then.
            Err(error) => {
                tracing::warn!(%error, "what runs in a sandbox that was taken over is not told");
                Vec::new()
            }
        };
        let pids: HashMap<&Work, u32> = reply.works.iter().map(|running| (&running.work, running.pid)).collect();
        let command = |pid: Option<u32>| processes.iter().find(|p| Some(p.pid) == pid).map(|p| p.command.clone());
        let mut state = self.state();
        for work in begun {
            let pid = pids.get(&work).copied();
            if pid.is_none() && !self.end_is_pending(&state, &work) {
                continue;
            }
            let argv = command(pid).unwrap_or_else(|| "unknown".to_owned());
            write_beginning(&mut state, &work, pid, argv);
        }
        self.settle(&mut state);
        let gone = |work: &Work| !pids.contains_key(work) && !self.end_is_pending(&state, work);
        let execs: Vec<ExecId> = state.works.running().map(|(id, _)| *id).filter(|id| gone(&Work::Exec(*id))).collect();
        let terminals = state.terminals.all().filter(|terminal| terminal.record.state == TerminalState::Running);
        let terminals: Vec<TerminalId> = terminals.map(|t| t.record.id).filter(|id| gone(&Work::Terminal(*id))).collect();
        for id in execs {
            self.lose_exec(&mut state, id, LOST);
        }
        for id in terminals {
            state.journals.end(&JournalName::Terminal(id));
            self.terminal_ended(&mut state, id, None, None, Some(LOST.to_owned()));
        }
    }
}

fn write_beginning(state: &mut State, work: &Work, pid: Option<u32>, command: String) {
    match work {
        Work::Exec(id) => {
            let Some(exec) = state.works.get_mut(*id) else { return };
            exec.begins = false;
            exec.record.send_modify(|record| {
                record.pid = record.pid.or(pid);
                if record.argv.is_empty() {
                    record.argv = vec![command];
                }
            });
            let record = exec.record.borrow().clone();
            state.facts.record(Fact::ExecStarted { exec: record, actor: None });
        }
        Work::Terminal(id) => {
            let Ok(terminal) = state.terminals.get_mut(*id) else { return };
            terminal.begins = false;
            terminal.record.pid = terminal.record.pid.or(pid);
            if terminal.record.argv.is_empty() {
                terminal.record.argv = vec![command];
            }
            let record = terminal.record.clone();
            state.facts.record(Fact::TerminalOpened { terminal: record, actor: None });
        }
        Work::Service(_) => {}
    }
}

/// Puts a screen together again from the end of its terminal's output.
fn replay(screen: &mut Screen, journal: &mut Reader, tail: Offset, first_size: PtySize, sizes: &[(Offset, PtySize)]) {
    let mut next = Offset(tail.0.saturating_sub(REPLAY));
    let mut size = sizes.iter().rev().find(|(at, _)| *at <= next).map_or(first_size, |(_, size)| *size);
    screen.resize(size.cols, size.rows);
    let from = next;
    let mut changes = sizes.iter().filter(|(at, _)| *at > from).peekable();
    while next < tail {
        while let Some((_, changed)) = changes.next_if(|(at, _)| *at <= next) {
            size = *changed;
            screen.resize(size.cols, size.rows);
        }
        let until = changes.peek().map_or(tail, |(at, _)| (*at).min(tail));
        let most = usize::try_from(until.since(next)).unwrap_or(CHUNK).clamp(1, CHUNK);
        match journal.read(next, most) {
            Ok(Chunk::Data { offset, bytes }) => {
                screen.feed(&bytes);
                next = offset.plus(bytes.len());
            }
            Ok(Chunk::Gap { to, .. }) => next = to,
            Ok(Chunk::End) => break,
            Err(error) => {
                tracing::warn!(%error, "a screen can't be put together again from its terminal's output");
                break;
            }
        }
    }
    // Answered when they were first asked.
    screen.take_replies();
}

#[cfg(test)]
mod tests {
    use super::*;
    use journal::{Retention, Writer};

    #[test]
    fn a_screen_is_put_together_again_from_output_and_sizes() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::open(dir.path().join("tty"), Retention::default()).unwrap();
        let (mut live, mut sizes) = (Screen::new(80, 24, 100), Vec::new());
        let mut print = |live: &mut Screen, text: &str| {
            live.feed(text.as_bytes());
            writer.append(text.as_bytes()).unwrap();
            writer.tail()
        };
        print(&mut live, &"a long line that is wrapped at the right side of the terminal \r\n".repeat(20));
        let at = print(&mut live, "\x1b]0;a title\x07$ vi\r\n\x1b[31mred\x1b[c");
        sizes.push((at, PtySize { cols: 40, rows: 10 }));
        live.resize(40, 10);
        let tail = print(&mut live, &"x".repeat(100));

        let mut again = Screen::new(40, 10, 100);
        let mut reader = Reader::open(dir.path().join("tty"));
        replay(&mut again, &mut reader, tail, PtySize { cols: 80, rows: 24 }, &sizes);
        assert_eq!(again.text(), live.text());
        assert_eq!((again.size(), again.title()), ((40, 10), Some("a title")));
        assert!(again.take_replies().is_empty(), "a query is not answered twice");
    }

    #[test]
    fn an_image_counts_only_while_it_is_whole_and_unused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(is_unused(dir.path()).unwrap_err().code, Code::SandboxGone, "there is none");
        std::fs::write(dir.path().join("checkpoint.img"), "memory").unwrap();
        assert_eq!(is_unused(dir.path()).unwrap_err().code, Code::SandboxGone, "half of one");
        let needs = snapshot::image::Needs { runsc_hash: "", runsc_version: "", guest_hash: "", template_hash: "" };
        let (session, generation) = (model::SessionId::new(), model::Generation::FIRST);
        ImageDescriptor::of(dir.path(), session, generation, now(), needs, Vec::new()).unwrap().write(dir.path()).unwrap();
        assert_eq!(is_unused(dir.path()), Ok(()));
        std::fs::write(dir.path().join(STARTED), "").unwrap();
        assert_eq!(is_unused(dir.path()).unwrap_err().code, Code::SandboxGone, "it was used");
    }
}
