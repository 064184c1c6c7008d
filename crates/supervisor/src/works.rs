//! Execs: started, waited for, signalled, recorded.

use crate::{
    core::{Core, State},
    facts::now,
    journals::Journals,
};
use model::{ExecId, ExecState, Offset};
use std::collections::{HashMap, VecDeque};
use tokio::sync::watch;
use wire::{
    Code, StreamId, WireError,
    control::ExecStart,
    facts::Fact,
    guest::{GuestEvent, Reply, Request, Spawn, Work},
    layout::JournalName,
    records::ExecRecord,
    window::SendWindow,
};

/// Ended execs that are kept in memory; older ones are in the store.
const KEPT: usize = 1000;

/// The execs that this sandbox has had.
#[derive(Default)]
pub struct Works {
    execs: HashMap<ExecId, Exec>,
    /// Ended ones, oldest first.
    ended: VecDeque<ExecId>,
}

pub struct Exec {
    pub record: watch::Sender<ExecRecord>,
    pub stdin: Option<StreamId>,
    pub stdout: StreamId,
    pub stderr: StreamId,
    /// Its beginning isn't written down yet: its end waits for that.
    pub begins: bool,
}

impl Exec {
    /// The record with what has been printed so far.
    pub fn as_it_stands(&self, journals: &Journals) -> ExecRecord {
        let mut record = self.record.borrow().clone();
        if record.state == ExecState::Running {
            let printed = |name: JournalName| journals.tail(&name).unwrap_or_default();
            record.stdout_bytes = printed(JournalName::Stdout(record.id));
            record.stderr_bytes = printed(JournalName::Stderr(record.id));
        }
        record
    }
}

impl Works {
    pub fn get(&self, id: ExecId) -> Result<&Exec, WireError> {
        self.execs.get(&id).ok_or_else(|| WireError::new(Code::NotFound, format!("no exec {id} in this sandbox")))
    }

    pub fn get_mut(&mut self, id: ExecId) -> Option<&mut Exec> {
        self.execs.get_mut(&id)
    }

    pub fn records(&self, journals: &Journals) -> Vec<ExecRecord> {
        self.execs.values().map(|exec| exec.as_it_stands(journals)).collect()
    }

    pub fn running(&self) -> impl Iterator<Item = (&ExecId, &Exec)> {
        self.execs.iter().filter(|(_, exec)| exec.record.borrow().state == ExecState::Running)
    }

    /// True while the guest's answer to its spawn has not been handled.
    pub fn is_starting(&self, work: &Work) -> bool {
        let Work::Exec(id) = work else { return false };
        self.execs.get(id).is_some_and(|exec| exec.begins)
    }

    pub fn insert(&mut self, exec: Exec) {
        let id = exec.record.borrow().id;
        self.execs.insert(id, exec);
    }

    fn mark_ended(&mut self, id: ExecId) {
        self.ended.push_back(id);
        while self.ended.len() > KEPT {
            if let Some(oldest) = self.ended.pop_front() {
                self.execs.remove(&oldest);
            }
        }
    }
}

/// How a shell would report a program that can't be started, and why; `None` where that isn't the program's fault.
pub fn shell_status(code: Code) -> Option<(i32, &'static str)> {
    match code {
        Code::NotFound => Some((127, "not_found")),
        Code::NotExecutable => Some((126, "not_executable")),
        Code::BadWorkingDirectory => Some((126, "bad_working_directory")),
        Code::UnknownUser => Some((126, "unknown_user")),
        Code::Invalid => Some((126, "invalid")),
        _ => None,
    }
}

/// A spawn that the guest certainly never had: whoever asked may ask again, of whatever sandbox there is then.
pub fn not_sent(error: WireError) -> WireError {
    match error.code {
        Code::SandboxGone => WireError::new(Code::Busy, "the sandbox has just ended; nothing was begun"),
        _ => error,
    }
}

impl Core {
    /// Starts an exec. A program that can't be started is an exec that has ended, as in a shell:
    /// 127 not found, 126 can't be run.
    ///
    /// # Errors
    /// The guest can't be asked, or refuses for another reason than the program.
    pub async fn start_exec(&self, start: ExecStart) -> Result<ExecRecord, WireError> {
        if let Ok(exec) = self.state().works.get(start.id) {
            return Ok(exec.record.borrow().clone());
        }
        let (stdout, stderr) = (self.link.new_stream(), self.link.new_stream());
        let stdin = (start.stdin.is_some() || start.stdin_open).then(|| self.link.new_stream());
        self.receive_journal(stdout, JournalName::Stdout(start.id))?;
        self.receive_journal(stderr, JournalName::Stderr(start.id))?;
        let record = ExecRecord {
            id: start.id,
            key: start.key,
            generation: self.state().generation,
            state: ExecState::Running,
            exit_code: None,
            signal: None,
            reason: None,
            argv: start.program.argv.clone(),
            cwd: start.program.cwd.clone(),
            user: start.program.user.clone(),
            started_at: now(),
            ended_at: None,
            pid: None,
            stdout_bytes: Offset::ZERO,
            stderr_bytes: Offset::ZERO,
            hook: start.hook,
        };
        self.note_exec(&record);
        let name = record.argv.first().cloned().unwrap_or_default();
        self.state().works.insert(Exec { record: watch::channel(record).0, stdin, stdout, stderr, begins: true });
        let spawn = Spawn {
            work: Work::Exec(start.id),
            program: start.program,
            pty: None,
            stdin,
            stdout,
            stderr: Some(stderr),
            timeout_ms: start.timeout_ms,
        };
        faults::point("spawn.before");
        let answer = self.link.send_request(Request::Spawn(spawn));
        if let Some(stream) = stdin {
            self.link.open_sending(stream, SendWindow::starting_at(Offset::ZERO));
        }
        let answer = match answer {
            Ok(answer) => answer.await.unwrap_or_else(|_| Err(WireError::new(Code::SandboxGone, "the sandbox has ended"))),
            Err(error) => Err(not_sent(error)),
        };
        faults::point("spawn.after");
        match answer {
            Ok(Reply::Spawned { pid }) => {
                let record = {
                    let mut state = self.state();
                    let record = {
                        if let Some(exec) = state.works.get_mut(start.id) {
                            exec.begins = false;
                        }
                        let exec = state.works.get(start.id)?;
                        exec.record.send_modify(|record| record.pid = Some(pid));
                        exec.record.borrow().clone()
                    };
                    state.facts.record(Fact::ExecStarted { exec: record.clone(), actor: start.actor });
                    // It may have ended before its beginning was written down.
                    self.settle(&mut state);
                    record
                };
                if let Some(stream) = stdin {
                    let bytes = start.stdin.unwrap_or_default();
                    if !bytes.is_empty() {
                        self.link.send_all(stream, &bytes).await;
                    }
                    if !start.stdin_open {
                        self.link.finish(stream);
                    }
                }
                Ok(record)
            }
            Ok(_) => Err(WireError::new(Code::Protocol, "the guest answered a spawn with something else")),
            Err(error) => self.not_started(start.id, &name, error, start.actor),
        }
    }

    fn not_started(&self, id: ExecId, name: &str, error: WireError, actor: Option<String>) -> Result<ExecRecord, WireError> {
        let mut state = self.state();
        let (stdin, streams) = {
            let exec = state.works.get(id)?;
            (exec.stdin, [exec.stdout, exec.stderr])
        };
        let Some((exit_code, reason)) = shell_status(error.code) else {
            state.works.execs.remove(&id);
            drop(state);
            streams.into_iter().for_each(|s| self.forget_stream(s));
            stdin.into_iter().for_each(|s| self.link.reset(s, "not started"));
            return Err(error);
        };
        let message = format!("dormouse: can't run '{name}': {}\n", error.message);
        let name = JournalName::Stderr(id);
        let written = state.journals.append(&name, message.as_bytes(), now()).unwrap_or(0);
        state.journals.end(&name);
        state.journals.end(&JournalName::Stdout(id));
        let record = {
            let exec = state.works.get(id)?;
            exec.record.send_modify(|record| {
                record.state = ExecState::Exited;
                record.exit_code = Some(exit_code);
                record.reason = Some(reason.to_owned());
                record.ended_at = Some(now());
                record.stderr_bytes = Offset(written as u64);
            });
            exec.record.borrow().clone()
        };
        state.facts.record(Fact::ExecStarted { exec: record.clone(), actor });
        state.facts.record(Fact::ExecEnded { exec: record.clone() });
        state.works.mark_ended(id);
        drop(state);
        streams.into_iter().for_each(|s| self.forget_stream(s));
        stdin.into_iter().for_each(|s| self.link.reset(s, "not started"));
        Ok(record)
    }

    /// Waits for an exec's end.
    ///
    /// # Errors
    /// It isn't known here.
    pub async fn await_exec(&self, id: ExecId) -> Result<ExecRecord, WireError> {
        let mut record = self.state().works.get(id)?.record.subscribe();
        let ended = record.wait_for(|record| record.state != ExecState::Running).await;
        ended.map(|record| record.clone()).map_err(|_| WireError::new(Code::SandboxGone, "the sandbox has ended"))
    }

    /// Sends a signal to an exec's whole process tree.
    ///
    /// # Errors
    /// It isn't known here, has ended, or the guest refuses.
    pub async fn signal_exec(&self, id: ExecId, signal: i32) -> Result<(), WireError> {
        if self.state().works.get(id)?.record.borrow().state != ExecState::Running {
            return Err(WireError::new(Code::Ended, format!("exec {id} has ended")));
        }
        self.link.request(Request::Signal { work: Work::Exec(id), signal, tree: true }).await.map(|_| ())
    }

    /// A work's own process has ended and its output is here.
    pub fn work_ended(&self, state: &mut State, event: GuestEvent) {
        let GuestEvent::Ended { work, exit_code, signal, reason, ends } = event else { return };
        match work {
            Work::Exec(id) => self.exec_ended(state, id, exit_code, signal, reason, &ends),
            Work::Terminal(id) => self.terminal_ended(state, id, exit_code, signal, reason),
            Work::Service(_) => {}
        }
    }

    fn exec_ended(
        &self,
        state: &mut State,
        id: ExecId,
        exit_code: Option<i32>,
        signal: Option<i32>,
        reason: Option<String>,
        ends: &[wire::guest::StreamAt],
    ) {
        let Ok(exec) = state.works.get(id) else { return };
        // The same end, told again after a reconnection.
        if exec.record.borrow().state != ExecState::Running {
            return;
        }
        let end_of = |stream| ends.iter().find(|end| end.stream == stream).map(|end| end.offset);
        let (out, err) = (end_of(exec.stdout), end_of(exec.stderr));
        exec.record.send_modify(|record| {
            record.state = match (reason.as_deref(), signal) {
                (Some("timeout"), _) => ExecState::TimedOut,
                (_, Some(_)) => ExecState::Killed,
                _ => ExecState::Exited,
            };
            record.exit_code = exit_code;
            record.signal = signal;
            record.reason = reason;
            record.ended_at = Some(now());
            record.stdout_bytes = out.unwrap_or(record.stdout_bytes);
            record.stderr_bytes = err.unwrap_or(record.stderr_bytes);
        });
        let (record, stdin) = (exec.record.borrow().clone(), exec.stdin);
        self.note_exec(&record);
        state.facts.record(Fact::ExecEnded { exec: record });
        state.works.mark_ended(id);
        if let Some(stream) = stdin {
            self.link.forget_sending(stream);
        }
    }

    /// Everything that runs has gone with its sandbox.
    pub fn lose_works(&self, reason: &str) {
        let mut state = self.state();
        let running: Vec<ExecId> = state.works.running().map(|(id, _)| *id).collect();
        for id in running {
            self.lose_exec(&mut state, id, reason);
        }
        drop(state);
        self.lose_terminals(reason);
    }

    /// An exec has gone, and how it ended nobody knows.
    pub fn lose_exec(&self, state: &mut State, id: ExecId, reason: &str) {
        let (out, err) = (JournalName::Stdout(id), JournalName::Stderr(id));
        let out_bytes = state.journals.ensure_open(&out).unwrap_or_default();
        let err_bytes = state.journals.ensure_open(&err).unwrap_or_default();
        state.journals.end(&out);
        state.journals.end(&err);
        let Ok(exec) = state.works.get(id) else { return };
        exec.record.send_modify(|record| {
            record.state = ExecState::Lost;
            record.reason = Some(reason.to_owned());
            record.ended_at = Some(now());
            record.stdout_bytes = out_bytes;
            record.stderr_bytes = err_bytes;
        });
        let record = exec.record.borrow().clone();
        state.facts.record(Fact::ExecEnded { exec: record });
    }
}
