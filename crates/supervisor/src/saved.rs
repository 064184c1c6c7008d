//! What of a supervisor's own memory goes with a memory image: the next one goes on from it.

use crate::{core::Core, recapture::TakenOver, terminals::Terminal, works::Exec};
use base64::{Engine, prelude::BASE64_STANDARD};
use model::{ExecState, Offset, TerminalState};
use serde::{Deserialize, Serialize};
use std::{collections::HashMap, io::Write, path::Path};
use tokio::sync::watch;
use wire::{
    StreamId,
    guest::HelloReply,
    records::{ExecRecord, TerminalRecord},
    terminal::InputSeq,
    window::SendWindow,
};

/// The file's name in an image's directory.
pub const FILE: &str = "works.json";

/// Everything that runs, as it stood at the capture.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Saved {
    #[serde(default)]
    execs: Vec<SavedExec>,
    #[serde(default)]
    terminals: Vec<SavedTerminal>,
    /// What ran in a sandbox whose supervisor had died, as the store knew it: instead of the above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_over: Option<TakenOver>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedExec {
    record: ExecRecord,
    stdin: Option<SavedInput>,
    stdout: StreamId,
    stderr: StreamId,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedTerminal {
    record: TerminalRecord,
    input: SavedInput,
    output: StreamId,
    /// Bytes that redraw the screen as of the record's `output_bytes`.
    redraw_b64: String,
    typed: Vec<(String, u64)>,
}

/// A stream to the guest and what it has not taken yet.
#[derive(Debug, Serialize, Deserialize)]
struct SavedInput {
    stream: StreamId,
    from: Offset,
    bytes_b64: String,
    finished: bool,
}

impl Core {
    /// What runs now.
    pub fn save_works(&self) -> Saved {
        let state = self.state();
        let input = |stream: StreamId| {
            let (from, bytes, finished) = self.link.unacknowledged(stream)?;
            Some(SavedInput { stream, from, bytes_b64: BASE64_STANDARD.encode(bytes), finished })
        };
        let execs = state.works.running().map(|(_, exec)| SavedExec {
            record: exec.record.borrow().clone(),
            stdin: exec.stdin.and_then(input),
            stdout: exec.stdout,
            stderr: exec.stderr,
        });
        let running = state.terminals.all().filter(|t| t.record.state == TerminalState::Running);
        let terminals = running.map(|terminal| SavedTerminal {
            record: TerminalRecord { writer: None, ..terminal.record.clone() },
            input: input(terminal.input).unwrap_or(SavedInput {
                stream: terminal.input,
                from: Offset::ZERO,
                bytes_b64: String::new(),
                finished: true,
            }),
            output: terminal.output,
            redraw_b64: BASE64_STANDARD.encode(terminal.screen.redraw()),
            typed: terminal.typed.iter().map(|(client, seq)| (client.clone(), seq.0)).collect(),
        });
        Saved { execs: execs.collect(), terminals: terminals.collect(), taken_over: None }
    }

    /// Goes on from what was saved, given what the restored guest holds.
    pub fn load_works(&self, saved: Saved, reply: &HelloReply) {
        if let Some(taken_over) = saved.taken_over {
            return self.take_over(taken_over, reply);
        }
        let received: HashMap<StreamId, Offset> = reply.receiving.iter().map(|r| (r.stream, r.received)).collect();
        for exec in saved.execs {
            if let Some(input) = &exec.stdin {
                self.resume_input(input, &received);
            }
            let stdin = exec.stdin.map(|input| input.stream);
            let record = watch::channel(ExecRecord { state: ExecState::Running, ..exec.record }).0;
            self.state().works.insert(Exec { record, stdin, stdout: exec.stdout, stderr: exec.stderr, begins: false });
        }
        for saved in saved.terminals {
            self.resume_input(&saved.input, &received);
            let notes = self.layout.terminal_notes(saved.record.id);
            let mut terminal = Terminal::new(saved.record, saved.input.stream, saved.output, notes);
            terminal.screen.feed(&BASE64_STANDARD.decode(&saved.redraw_b64).unwrap_or_default());
            // Answered when they were first asked.
            terminal.screen.take_replies();
            terminal.typed = saved.typed.into_iter().map(|(client, seq)| (client, InputSeq(seq))).collect();
            let kept = self.link.unacknowledged(saved.input.stream);
            terminal.note_all(kept.map_or(Offset::ZERO, |(from, bytes, _)| from.plus(bytes.len())));
            self.state().terminals.insert(terminal);
        }
    }

    fn resume_input(&self, input: &SavedInput, received: &HashMap<StreamId, Offset>) {
        let Some(&received) = received.get(&input.stream) else { return };
        let bytes = BASE64_STANDARD.decode(&input.bytes_b64).unwrap_or_default();
        let known = usize::try_from(received.since(input.from)).unwrap_or(usize::MAX).min(bytes.len());
        let mut window = SendWindow::starting_at(received);
        window.take_in(&bytes[known..]);
        if input.finished {
            window.finish();
        }
        self.link.open_sending(input.stream, window);
    }
}

impl Saved {
    /// What ran in a sandbox whose supervisor had died.
    pub fn taken_over(works: TakenOver) -> Saved {
        Saved { taken_over: Some(works), ..Saved::default() }
    }

    /// Writes it into an image's directory, synced.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn write(&self, image: &Path) -> std::io::Result<()> {
        faults::file("works.write")?;
        let mut file = std::fs::File::create(image.join(FILE))?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()
    }

    /// Reads it from an image's directory.
    ///
    /// # Errors
    /// It is missing or damaged.
    pub fn read(image: &Path) -> std::io::Result<Saved> {
        Ok(serde_json::from_slice(&std::fs::read(image.join(FILE))?)?)
    }
}
