//! One attached viewer: output to it at its own pace, input from it in its own order.
//!
//! The writing half reads the journal from the viewer's own position, so a viewer that reads slowly
//! holds up nobody and costs no memory: it falls behind in a file. One that watches the screen and
//! has fallen far behind gets the screen again instead of what it missed.

use crate::{
    activity::Kind,
    core::Core,
    terminals::{View, Viewer, ViewerId},
};
use bytes::Bytes;
use journal::{Chunk, Reader};
use model::{Offset, TerminalId};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use wire::{
    Code, WireError,
    control::Attach,
    guest::PtySize,
    layout::JournalName,
    terminal::{ClientFrame, EndStatus, InputSeq, ServerFrame},
};

/// A screen viewer that is this far behind is redrawn.
const FAR_BEHIND: u64 = 4 << 20;
/// Bytes of output in one message.
const CHUNK: usize = 32 * 1024;
/// Bytes of one input: a large paste; longer ones come in several.
const MAX_INPUT: usize = 256 * 1024;

/// A viewer's two halves share this.
pub struct Attached {
    core: Arc<Core>,
    terminal: TerminalId,
    pub viewer: ViewerId,
    client: String,
    /// Answers that go out before output.
    answers: Mutex<VecDeque<ServerFrame>>,
    wake: Notify,
    /// The other half has ended.
    pub done: CancellationToken,
}

/// Where a viewer is in the output.
struct Position {
    /// `None`: the screen comes first.
    next: Option<Offset>,
    follows_screen: bool,
    told_size: Option<PtySize>,
    told_writing: Option<bool>,
    told_end: bool,
}

/// Lets a viewer in.
///
/// # Errors
/// The terminal isn't known here, the mode is no mode, or the offset lies beyond the output.
pub fn attach(core: &Arc<Core>, attach: &Attach) -> Result<(Arc<Attached>, Outgoing), WireError> {
    let (writes, take) = match attach.mode.as_str() {
        "write" => (true, false),
        "take" => (true, true),
        "observe" => (false, false),
        other => return Err(WireError::new(Code::Invalid, format!("'{other}' is no way to attach: write, observe or take"))),
    };
    let tail = core.state().terminals.get(attach.id)?.record.output_bytes;
    if let Some(from) = attach.from.filter(|from| *from > tail) {
        return Err(WireError::new(Code::Invalid, format!("the output ends at {tail}, there is nothing at {from}")));
    }
    let size = attach.cols.zip(attach.rows).map(|(cols, rows)| PtySize { cols, rows });
    let viewer = Viewer { client: attach.client.clone(), writes, size };
    let (viewer, view) = core.join(attach.id, viewer, take)?;
    let attached = Arc::new(Attached {
        core: core.clone(),
        terminal: attach.id,
        viewer,
        client: attach.client.clone(),
        answers: Mutex::default(),
        wake: Notify::new(),
        done: CancellationToken::new(),
    });
    let reader = Reader::open(core.layout.journal(&JournalName::Terminal(attach.id)));
    let position = Position {
        next: attach.from,
        follows_screen: attach.from.is_none(),
        told_size: None,
        told_writing: None,
        told_end: false,
    };
    Ok((attached.clone(), Outgoing { attached, reader, position, view }))
}

impl Attached {
    fn answer(&self, frame: ServerFrame) {
        self.answers.lock().expect("nothing panics with the answers").push_back(frame);
        self.wake.notify_one();
    }

    /// Handles one message from the viewer.
    pub async fn incoming(&self, frame: ClientFrame) {
        match frame {
            ClientFrame::Ping => self.answer(ServerFrame::Pong),
            ClientFrame::Resize { cols, rows } => self.core.resize(self.terminal, self.viewer, PtySize { cols, rows }),
            ClientFrame::Take => self.core.take_writing(self.terminal, self.viewer),
            ClientFrame::Input { seq, bytes } => {
                let Some(typed) = self.input(seq, &bytes).await else { return };
                self.answer(match typed {
                    Ok(()) => ServerFrame::InputTyped { seq },
                    Err(reason) => {
                        if let Ok(terminal) = self.core.state().terminals.get_mut(self.terminal) {
                            terminal.note_refused(&self.client, seq);
                        }
                        ServerFrame::InputRefused { seq, reason }
                    }
                });
            }
        }
    }

    /// Types `bytes` unless that has been done before. `None`: the viewer has left meanwhile, and will ask again.
    async fn input(&self, seq: InputSeq, bytes: &Bytes) -> Option<Result<(), String>> {
        if bytes.len() > MAX_INPUT {
            return Some(Err(format!("an input has {MAX_INPUT} bytes at most")));
        }
        loop {
            let changed = {
                let mut state = self.core.state();
                let terminal = match state.terminals.get_mut(self.terminal) {
                    Ok(terminal) => terminal,
                    Err(error) => return Some(Err(error.message)),
                };
                let view = *terminal.view.borrow();
                // Numbers may be missing: of inputs that were refused, and that the client gave up.
                if terminal.last_typed(&self.client).is_some_and(|last| seq <= last) {
                    let refused = terminal.was_refused(&self.client, seq);
                    return Some(if refused { Err("it was refused before".to_owned()) } else { Ok(()) });
                }
                if view.ended {
                    return Some(Err("the program has ended".to_owned()));
                }
                if view.writer != Some(self.viewer) {
                    return Some(Err("someone else is writing; take the writer's role first".to_owned()));
                }
                let notes = &mut terminal.notes;
                let note = |stretch, acked| notes.typed(&self.client, seq, stretch, acked);
                match self.core.link.offer_whole(terminal.input, bytes, note) {
                    // Noted together with the typing: a repeated one is never typed again.
                    Ok(true) => {
                        terminal.note_typed(&self.client, seq);
                        self.core.note_activity(Kind::Typing, &format!("terminal {}", self.terminal));
                        return Some(Ok(()));
                    }
                    Ok(false) => self.core.link.room_changed(terminal.input),
                    Err(error) => return Some(Err(error.message)),
                }
            };
            // The program doesn't read its input now: wait, nothing is lost.
            let Some(changed) = changed else { return Some(Err("the program has ended".to_owned())) };
            tokio::select! {
                () = changed.notified() => {}
                () = self.done.cancelled() => return None,
            }
        }
    }

    /// The viewer has gone.
    pub fn leave(&self) {
        self.done.cancel();
        self.core.leave(self.terminal, self.viewer);
    }
}

/// The sending half of a viewer.
pub struct Outgoing {
    attached: Arc<Attached>,
    reader: Reader,
    position: Position,
    view: watch::Receiver<View>,
}

impl Outgoing {
    /// The next message for the viewer; `None` when nothing will follow.
    ///
    /// # Errors
    /// The journal can't be read.
    pub async fn next(&mut self) -> Result<Option<ServerFrame>, WireError> {
        loop {
            let answer = self.attached.answers.lock().expect("nothing panics with the answers").pop_front();
            if answer.is_some() {
                return Ok(answer);
            }
            let view = *self.view.borrow_and_update();
            if let Some(frame) = self.what_changed(view) {
                return Ok(Some(frame));
            }
            if let Some(frame) = self.output(view)? {
                return Ok(Some(frame));
            }
            if view.ended {
                return Ok(if std::mem::replace(&mut self.position.told_end, true) { None } else { self.end() });
            }
            tokio::select! {
                changed = self.view.changed() => if changed.is_err() { return Ok(None) },
                () = self.attached.wake.notified() => {}
                () = self.attached.done.cancelled() => return Ok(None),
            }
        }
    }

    /// Size and writer, when they differ from what the viewer knows.
    fn what_changed(&mut self, view: View) -> Option<ServerFrame> {
        if self.position.told_size != Some(view.size) {
            self.position.told_size = Some(view.size);
            return Some(ServerFrame::Size { cols: view.size.cols, rows: view.size.rows });
        }
        let you = view.writer == Some(self.attached.viewer);
        (self.position.told_writing.replace(you) != Some(you)).then_some(ServerFrame::Writer { you })
    }

    fn output(&mut self, view: View) -> Result<Option<ServerFrame>, WireError> {
        let far_behind = |next: Offset| self.position.follows_screen && view.tail.since(next) > FAR_BEHIND;
        let Some(next) = self.position.next.filter(|next| !far_behind(*next)) else {
            let state = self.attached.core.state();
            let terminal = state.terminals.get(self.attached.terminal)?;
            let offset = terminal.record.output_bytes;
            self.position.next = Some(offset);
            return Ok(Some(ServerFrame::Screen { offset, bytes: terminal.screen.redraw().into() }));
        };
        if next >= view.tail {
            return Ok(None);
        }
        let max = CHUNK.min(usize::try_from(view.tail.since(next)).unwrap_or(CHUNK));
        let chunk = self.reader.read(next, max).map_err(|e| WireError::new(Code::Internal, e.to_string()))?;
        Ok(match chunk {
            Chunk::Data { offset, bytes } => {
                self.position.next = Some(offset.plus(bytes.len()));
                Some(ServerFrame::Output { offset, bytes: bytes.into() })
            }
            Chunk::Gap { from, to } => {
                self.position.next = Some(to);
                Some(ServerFrame::Gap { from, to })
            }
            Chunk::End => None,
        })
    }

    fn end(&self) -> Option<ServerFrame> {
        let state = self.attached.core.state();
        let record = &state.terminals.get(self.attached.terminal).ok()?.record;
        let reason = record.reason.clone().unwrap_or_default();
        Some(ServerFrame::Ended { status: EndStatus::of(record.exit_code, record.signal), reason })
    }
}
