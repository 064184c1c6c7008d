//! Terminals: their screens, who watches and who writes, and what was typed.

use crate::{
    activity::Kind,
    core::{Core, State},
    facts::now,
    notes::Notes,
    works::{not_sent, shell_status},
};
use model::{Offset, TerminalId, TerminalState};
use screen::{DEFAULT_SCROLLBACK, Screen};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    path::PathBuf,
};
use tokio::sync::watch;
use wire::{
    Code, StreamId, WireError,
    control::{ScreenAnswer, TerminalStart},
    facts::Fact,
    guest::{PtySize, Reply, Request, Spawn, Work},
    layout::JournalName,
    records::TerminalRecord,
    terminal::InputSeq,
    window::SendWindow,
};

/// Clients whose input sequences are remembered for each terminal; the longest silent one goes first.
const REMEMBERED_CLIENTS: usize = 1000;

/// Refused inputs that are remembered for each terminal.
const REMEMBERED_REFUSALS: usize = 1000;

/// The terminals that this sandbox has.
#[derive(Default)]
pub struct Terminals {
    map: HashMap<TerminalId, Terminal>,
    next_viewer: u64,
}

/// One viewer, numbered in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ViewerId(u64);

pub struct Viewer {
    pub client: String,
    /// May type when its turn comes.
    pub writes: bool,
    pub size: Option<PtySize>,
}

/// What viewers watch: anything about the terminal has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    pub tail: Offset,
    pub size: PtySize,
    pub writer: Option<ViewerId>,
    pub ended: bool,
}

pub struct Terminal {
    pub record: TerminalRecord,
    pub screen: Screen,
    pub input: StreamId,
    pub output: StreamId,
    /// The last input of each client that was typed, newest clients last.
    pub typed: Vec<(String, InputSeq)>,
    /// Inputs that were refused, newest last: one is never acknowledged for a later one that was typed.
    refused: VecDeque<(String, InputSeq)>,
    pub viewers: BTreeMap<ViewerId, Viewer>,
    pub view: watch::Sender<View>,
    pub notes: Notes,
    /// Its beginning isn't written down yet: its end waits for that.
    pub begins: bool,
}

impl Terminal {
    /// A terminal as `record` describes it, with an empty screen. What is noted of it goes to `notes`.
    pub fn new(record: TerminalRecord, input: StreamId, output: StreamId, notes: PathBuf) -> Terminal {
        let size = PtySize { cols: record.cols, rows: record.rows };
        let view = View { tail: record.output_bytes, size, writer: None, ended: record.state == TerminalState::Ended };
        Terminal {
            screen: Screen::new(size.cols, size.rows, DEFAULT_SCROLLBACK),
            record,
            input,
            output,
            typed: Vec::new(),
            refused: VecDeque::new(),
            viewers: BTreeMap::new(),
            view: watch::channel(view).0,
            notes: Notes::begin(notes),
            begins: false,
        }
    }

    /// Notes anew all that is known, for the next supervisor. The program's input has come, or will come, up to `end`.
    pub fn note_all(&mut self, end: Offset) {
        for (client, seq) in &self.typed {
            self.notes.typed(client, *seq, end..end, end);
        }
        let size = PtySize { cols: self.record.cols, rows: self.record.rows };
        self.notes.size(size, self.record.output_bytes);
    }

    /// The last input of `client` that was typed; `None` for one that hasn't typed yet.
    pub fn last_typed(&self, client: &str) -> Option<InputSeq> {
        self.typed.iter().find(|(name, _)| name == client).map(|(_, seq)| *seq)
    }

    /// Remembers that `seq` of `client` was typed.
    pub fn note_typed(&mut self, client: &str, seq: InputSeq) {
        self.typed.retain(|(name, _)| name != client);
        self.typed.push((client.to_owned(), seq));
        if self.typed.len() > REMEMBERED_CLIENTS {
            self.typed.remove(0);
        }
        self.refused.retain(|(name, refused)| (name.as_str(), *refused) != (client, seq));
    }

    /// Remembers that `seq` of `client` was refused.
    pub fn note_refused(&mut self, client: &str, seq: InputSeq) {
        if self.was_refused(client, seq) {
            return;
        }
        self.refused.push_back((client.to_owned(), seq));
        if self.refused.len() > REMEMBERED_REFUSALS {
            self.refused.pop_front();
        }
    }

    pub fn was_refused(&self, client: &str, seq: InputSeq) -> bool {
        self.refused.iter().any(|(name, refused)| name == client && *refused == seq)
    }

    fn set_writer(&mut self, writer: Option<ViewerId>) {
        self.record.writer = writer.and_then(|id| self.viewers.get(&id)).map(|viewer| viewer.client.clone());
        self.view.send_modify(|view| view.writer = writer);
    }

    fn publish(&mut self) {
        let (tail, ended) = (self.record.output_bytes, self.record.state == TerminalState::Ended);
        self.view.send_modify(|view| {
            view.tail = tail;
            view.ended = ended;
        });
    }
}

impl Terminals {
    pub fn get(&self, id: TerminalId) -> Result<&Terminal, WireError> {
        self.map.get(&id).ok_or_else(|| no_terminal(id))
    }

    pub fn get_mut(&mut self, id: TerminalId) -> Result<&mut Terminal, WireError> {
        self.map.get_mut(&id).ok_or_else(|| no_terminal(id))
    }

    pub fn all(&self) -> impl Iterator<Item = &Terminal> {
        self.map.values()
    }

    /// True while the guest's answer to its spawn has not been handled.
    pub fn is_starting(&self, work: &Work) -> bool {
        let Work::Terminal(id) = work else { return false };
        self.map.get(id).is_some_and(|terminal| terminal.begins)
    }

    pub fn insert(&mut self, terminal: Terminal) {
        self.map.insert(terminal.record.id, terminal);
    }

    /// Bytes of a terminal have been stored; its output now reaches `tail`.
    pub fn output(&mut self, id: TerminalId, bytes: &[u8], tail: Offset) {
        let Some(terminal) = self.map.get_mut(&id) else { return };
        terminal.screen.feed(bytes);
        terminal.record.output_bytes = tail;
        let title = terminal.screen.title();
        if title != terminal.record.title.as_deref() {
            terminal.record.title = title.map(str::to_owned);
        }
        terminal.publish();
    }
}

fn no_terminal(id: TerminalId) -> WireError {
    WireError::new(Code::NotFound, format!("no terminal {id} in this sandbox"))
}

impl Core {
    /// Opens a terminal. A program that can't be started is a terminal that has ended, as an exec is.
    ///
    /// # Errors
    /// The guest can't be asked, or refuses for another reason than the program.
    pub async fn open_terminal(&self, start: TerminalStart) -> Result<TerminalRecord, WireError> {
        if let Ok(terminal) = self.state().terminals.get(start.id) {
            return Ok(terminal.record.clone());
        }
        let (input, output) = (self.link.new_stream(), self.link.new_stream());
        let record = TerminalRecord {
            id: start.id,
            name: start.name,
            generation: self.state().generation,
            state: TerminalState::Running,
            argv: start.program.argv.clone(),
            cwd: start.program.cwd.clone(),
            pid: None,
            cols: start.cols,
            rows: start.rows,
            title: None,
            output_bytes: Offset::ZERO,
            exit_code: None,
            signal: None,
            reason: None,
            writer: None,
            started_at: now(),
            ended_at: None,
        };
        self.receive_journal(output, JournalName::Terminal(start.id))?;
        let mut terminal = Terminal::new(record, input, output, self.layout.terminal_notes(start.id));
        terminal.note_all(Offset::ZERO);
        terminal.begins = true;
        self.state().terminals.insert(terminal);
        let spawn = Spawn {
            work: Work::Terminal(start.id),
            program: start.program,
            pty: Some(PtySize { cols: start.cols, rows: start.rows }),
            stdin: Some(input),
            stdout: output,
            stderr: None,
            timeout_ms: None,
        };
        faults::point("spawn.before");
        let answer = self.link.send_request(Request::Spawn(spawn));
        self.link.open_sending(input, SendWindow::starting_at(Offset::ZERO));
        let answer = match answer {
            Ok(answer) => answer.await.unwrap_or_else(|_| Err(WireError::new(Code::SandboxGone, "the sandbox has ended"))),
            Err(error) => Err(not_sent(error)),
        };
        faults::point("spawn.after");
        match answer {
            Ok(Reply::Spawned { pid }) => {
                let mut state = self.state();
                let terminal = state.terminals.get_mut(start.id)?;
                terminal.record.pid = Some(pid);
                terminal.begins = false;
                let record = terminal.record.clone();
                self.note_activity(Kind::Terminal, &format!("terminal {}", start.id));
                state.facts.record(Fact::TerminalOpened { terminal: record.clone(), actor: start.actor });
                self.settle(&mut state);
                Ok(record)
            }
            Ok(_) => {
                self.forget_terminal(start.id, input, output);
                Err(WireError::new(Code::Protocol, "the guest answered a spawn with something else"))
            }
            Err(error) => match shell_status(error.code) {
                Some((exit_code, reason)) => self.terminal_not_started(start.id, &error.message, exit_code, reason, start.actor),
                None => {
                    self.forget_terminal(start.id, input, output);
                    Err(error)
                }
            },
        }
    }

    fn forget_terminal(&self, id: TerminalId, input: StreamId, output: StreamId) {
        if let Some(mut terminal) = self.state().terminals.map.remove(&id) {
            terminal.notes.remove();
        }
        self.forget_stream(output);
        self.link.forget_sending(input);
    }

    fn terminal_not_started(
        &self,
        id: TerminalId,
        why: &str,
        exit_code: i32,
        reason: &str,
        actor: Option<String>,
    ) -> Result<TerminalRecord, WireError> {
        let mut state = self.state();
        let program = state.terminals.get(id)?.record.argv.first().cloned().unwrap_or_default();
        let message = format!("dormouse: can't run '{program}': {why}\r\n");
        let name = JournalName::Terminal(id);
        let written = state.journals.append(&name, message.as_bytes(), now()).unwrap_or(0);
        state.terminals.output(id, &message.as_bytes()[..written], Offset(written as u64));
        state.journals.end(&name);
        let output = state.terminals.get(id)?.output;
        let opened = state.terminals.get(id)?.record.clone();
        state.facts.record(Fact::TerminalOpened { terminal: opened, actor });
        self.terminal_ended(&mut state, id, Some(exit_code), None, Some(reason.to_owned()));
        let record = state.terminals.get(id)?.record.clone();
        drop(state);
        self.forget_stream(output);
        Ok(record)
    }

    /// A terminal's program has ended.
    pub fn terminal_ended(
        &self,
        state: &mut State,
        id: TerminalId,
        exit_code: Option<i32>,
        signal: Option<i32>,
        reason: Option<String>,
    ) {
        let Ok(terminal) = state.terminals.get_mut(id) else { return };
        if terminal.record.state == TerminalState::Ended {
            return;
        }
        let record = &mut terminal.record;
        (record.state, record.ended_at) = (TerminalState::Ended, Some(now()));
        (record.exit_code, record.signal, record.reason) = (exit_code, signal, reason);
        terminal.publish();
        terminal.notes.remove();
        let (record, input) = (terminal.record.clone(), terminal.input);
        state.facts.record(Fact::TerminalEnded { terminal: record });
        self.link.forget_sending(input);
    }

    /// The terminals have gone with their sandbox.
    pub fn lose_terminals(&self, reason: &str) {
        let mut state = self.state();
        let running: Vec<TerminalId> = {
            let all = state.terminals.all();
            all.filter(|t| t.record.state == TerminalState::Running).map(|t| t.record.id).collect()
        };
        for id in running {
            state.journals.end(&JournalName::Terminal(id));
            self.terminal_ended(&mut state, id, None, None, Some(reason.to_owned()));
        }
    }

    /// Hangs a terminal up: its whole process tree ends.
    ///
    /// # Errors
    /// It isn't known here, or the guest can't be asked.
    pub async fn close_terminal(&self, id: TerminalId) -> Result<(), WireError> {
        if self.state().terminals.get(id)?.record.state == TerminalState::Ended {
            return Ok(());
        }
        // Hang-up first, as when a real terminal goes away; what ignores it is killed.
        let work = Work::Terminal(id);
        self.link.request(Request::Signal { work: work.clone(), signal: libc::SIGHUP, tree: true }).await?;
        let mut view = self.state().terminals.get(id)?.view.subscribe();
        let grace = std::time::Duration::from_secs(2);
        let ignored = tokio::time::timeout(grace, view.wait_for(|view| view.ended)).await.is_err();
        if ignored {
            self.link.request(Request::Signal { work, signal: libc::SIGKILL, tree: true }).await?;
        }
        Ok(())
    }

    /// The screen in every form.
    ///
    /// # Errors
    /// The terminal isn't known here.
    pub fn screen(&self, id: TerminalId) -> Result<ScreenAnswer, WireError> {
        let state = self.state();
        let terminal = state.terminals.get(id)?;
        Ok(ScreenAnswer {
            offset: terminal.record.output_bytes,
            text: terminal.screen.text(),
            ansi: String::from_utf8_lossy(&terminal.screen.ansi()).into_owned(),
            json: serde_json::to_value(terminal.screen.json()).unwrap_or_default(),
        })
    }

    /// Answers what programs asked of their terminals where nobody's real terminal does.
    pub fn answer_queries(&self, state: &mut State) {
        for terminal in state.terminals.map.values_mut() {
            let replies = terminal.screen.take_replies();
            if !replies.is_empty() && !terminal.viewers.values().any(|viewer| viewer.writes) {
                self.link.offer(terminal.input, &replies);
            }
        }
    }

    /// Adds a viewer. The first that may write becomes the writer; one that takes does so at once, and so does a client
    /// that comes back while its old link, which it has lost, still counts as the writer.
    ///
    /// # Errors
    /// The terminal isn't known here.
    pub fn join(&self, id: TerminalId, viewer: Viewer, take: bool) -> Result<(ViewerId, watch::Receiver<View>), WireError> {
        let mut state = self.state();
        state.terminals.next_viewer += 1;
        let viewer_id = ViewerId(state.terminals.next_viewer);
        let terminal = state.terminals.get_mut(id)?;
        let (writes, size) = (viewer.writes, viewer.size);
        let writer = terminal.view.borrow().writer;
        let free = writer.and_then(|id| terminal.viewers.get(&id)).is_none_or(|writer| writer.client == viewer.client);
        terminal.viewers.insert(viewer_id, viewer);
        let becomes_writer = writes && (take || free);
        if becomes_writer {
            terminal.set_writer(Some(viewer_id));
        }
        let view = terminal.view.subscribe();
        drop(state);
        if let (true, Some(size)) = (becomes_writer, size) {
            self.resize(id, viewer_id, size);
        }
        Ok((viewer_id, view))
    }

    /// Removes a viewer; the longest waiting one that may write follows a writer.
    pub fn leave(&self, id: TerminalId, viewer: ViewerId) {
        let mut state = self.state();
        let Ok(terminal) = state.terminals.get_mut(id) else { return };
        terminal.viewers.remove(&viewer);
        if terminal.view.borrow().writer != Some(viewer) {
            return;
        }
        let next = terminal.viewers.iter().find(|(_, v)| v.writes).map(|(id, v)| (*id, v.size));
        terminal.set_writer(next.map(|(id, _)| id));
        drop(state);
        if let Some((next, Some(size))) = next {
            self.resize(id, next, size);
        }
    }

    /// Makes a viewer the writer.
    pub fn take_writing(&self, id: TerminalId, viewer: ViewerId) {
        let mut state = self.state();
        let Ok(terminal) = state.terminals.get_mut(id) else { return };
        let Some(size) = terminal.viewers.get(&viewer).filter(|v| v.writes).map(|v| v.size) else { return };
        terminal.set_writer(Some(viewer));
        drop(state);
        if let Some(size) = size {
            self.resize(id, viewer, size);
        }
    }

    /// Notes a viewer's size; the writer's counts for the terminal.
    pub fn resize(&self, id: TerminalId, viewer: ViewerId, size: PtySize) {
        let size = PtySize { cols: size.cols.clamp(2, screen::LARGEST_SIDE), rows: size.rows.clamp(1, screen::LARGEST_SIDE) };
        let mut state = self.state();
        let Ok(terminal) = state.terminals.get_mut(id) else { return };
        if let Some(viewer) = terminal.viewers.get_mut(&viewer) {
            viewer.size = Some(size);
        }
        let view = *terminal.view.borrow();
        if view.writer != Some(viewer) || view.size == size || view.ended {
            return;
        }
        terminal.screen.resize(size.cols, size.rows);
        (terminal.record.cols, terminal.record.rows) = (size.cols, size.rows);
        terminal.notes.size(size, terminal.record.output_bytes);
        terminal.view.send_modify(|view| view.size = size);
        drop(state);
        // Without waiting: an answer would tell nothing more.
        let _ = self.link.send_request(Request::Resize { terminal: id, size });
    }
}
