//! The attachment itself: one loop that owns the user's terminal, the input's ledger and the present link.

use super::{
    Mode, Over, Target,
    keys::DetachWatch,
    ledger::Ledger,
    link::{self, LinkEvent, News},
    tty::{self, Tty},
};
use crate::client::{
    backoff::Backoff,
    failure::{Failure, Result},
    http::Client,
};
use api_types::terminal::{ClientFrame, ServerFrame};
use bytes::Bytes;
use model::{Offset, State};
use std::{ops::ControlFlow, time::Duration};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{Instant, sleep_until},
};

/// A link that is back within this time is not worth a word.
const QUIET: Duration = Duration::from_millis(400);

/// How long a message stays on the bottom line.
const MESSAGE: Duration = Duration::from_secs(3);

/// How often a session that rests is looked at.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How the link stands.
enum Link {
    /// No link; the next is opened at this time.
    Waiting {
        until: Instant,
    },
    Opening {
        send: mpsc::UnboundedSender<ClientFrame>,
        by_offset: bool,
    },
    Up {
        send: mpsc::UnboundedSender<ClientFrame>,
    },
}

/// An attachment.
pub struct View {
    client: Client,
    target: Target,
    tty: Tty,
    /// This client's name to the terminal: the same for all its links, so that input is never typed twice.
    me: uuid::Uuid,
    keys: DetachWatch,
    ledger: Ledger,
    /// What of the output is on the screen; `None` before the first redraw.
    shown: Option<Offset>,
    /// True while a line of our own is on the screen.
    marked: bool,
    link: Link,
    number: u64,
    backoff: Backoff,
    lost_at: Option<Instant>,
    message_until: Option<Instant>,
    message_text: String,
    writes: Option<bool>,
    /// Why there is no link, where the session rests.
    resting: Option<State>,
    /// True from the key that wakes the session until it is joined.
    wake: bool,
}

impl View {
    /// Takes the user's terminal over.
    ///
    /// # Errors
    /// There is none.
    pub fn open(client: Client, target: Target) -> Result<View> {
        Ok(View {
            client,
            tty: Tty::open()?,
            me: uuid::Uuid::new_v4(),
            keys: DetachWatch::new(&target.keys),
            target,
            ledger: Ledger::default(),
            shown: None,
            marked: false,
            link: Link::Waiting { until: Instant::now() },
            number: 0,
            backoff: Backoff::default(),
            lost_at: None,
            message_until: None,
            message_text: String::new(),
            writes: None,
            resting: None,
            wake: false,
        })
    }

    /// Shows and types until the user detaches or the program ends.
    ///
    /// # Errors
    /// What the server refuses for good; a terminal that is gone.
    pub async fn run(mut self) -> Result<Over> {
        let (tell, mut events) = mpsc::channel(64);
        let mut typed = tty::typed();
        let mut resized = signal(SignalKind::window_change())?;
        let mut ended = signal(SignalKind::terminate())?;
        let mut hung_up = signal(SignalKind::hangup())?;
        loop {
            let alarm = self.next_alarm();
            let step = tokio::select! {
                input = typed.recv() => match input {
                    Some(input) => self.on_input(&input)?,
                    None => ControlFlow::Break(Over::Detached),
                },
                Some(event) = events.recv() => self.on_link(event)?,
                Some(()) = resized.recv() => self.on_resize(),
                Some(()) = ended.recv() => ControlFlow::Break(Over::Detached),
                Some(()) = hung_up.recv() => ControlFlow::Break(Over::Detached),
                () = sleep_until(alarm) => self.on_alarm(&tell)?,
            };
            if let ControlFlow::Break(over) = step {
                self.tty.restore();
                return Ok(over);
            }
        }
    }

    /// When something is to be done though nothing happens.
    fn next_alarm(&self) -> Instant {
        let far = Instant::now() + Duration::from_secs(3600);
        let opening = match self.link {
            Link::Waiting { until } => until,
            _ => far,
        };
        let word = self.lost_at.filter(|_| !self.marked).map_or(far, |at| at + QUIET);
        opening.min(word).min(self.message_until.unwrap_or(far))
    }

    fn on_alarm(&mut self, tell: &mpsc::Sender<LinkEvent>) -> Result<ControlFlow<Over>> {
        let now = Instant::now();
        if self.message_until.is_some_and(|until| until <= now) {
            self.message_until = None;
            if matches!(self.link, Link::Up { .. }) {
                // The message is wiped by a redraw, which a new link brings.
                self.link = Link::Waiting { until: now };
            }
        }
        if self.lost_at.is_some_and(|at| at + QUIET <= now) && !self.marked {
            self.show_waiting()?;
        }
        if matches!(self.link, Link::Waiting { until } if until <= now) {
            self.open_link(tell);
        }
        Ok(ControlFlow::Continue(()))
    }

    fn open_link(&mut self, tell: &mpsc::Sender<LinkEvent>) {
        self.number += 1;
        let (cols, rows) = Tty::size();
        let by_offset = !self.marked && self.shown.is_some();
        let from = match self.shown {
            Some(offset) if by_offset => offset.to_string(),
            _ => "screen".to_owned(),
        };
        // The role is taken once: a second time it would be taken from someone who has taken it since.
        let mode = if self.target.mode == Mode::Take && self.writes.is_some() { Mode::Write } else { self.target.mode };
        let path = format!(
            "/v1/sessions/{}/terminals/{}/attach?client={}&cols={cols}&rows={rows}&from={from}&mode={}&wake={}",
            self.target.session.id,
            self.target.terminal,
            self.me,
            mode.as_str(),
            self.wake,
        );
        let (send, outgoing) = mpsc::unbounded_channel();
        // Owned by the sender's end: it ends when that is dropped.
        let session = self.target.session.id;
        tokio::spawn(link::run(self.client.clone(), session, path, self.number, outgoing, tell.clone()));
        self.link = Link::Opening { send, by_offset };
    }

    fn show_waiting(&mut self) -> Result<()> {
        self.marked = true;
        self.tty.bottom_line(&format!(" reconnecting… (attempt {}) ", self.backoff.attempts().max(1)), false)
    }

    fn message(&mut self, text: &str) -> Result<()> {
        self.marked = true;
        self.message_until = Some(Instant::now() + MESSAGE);
        self.message_text = format!(" {text} ");
        self.tty.bottom_line(&self.message_text, true)
    }

    fn send(&self, frame: ClientFrame) {
        if let Link::Up { send } = &self.link {
            // A link that has just been lost: input is sent again by the next, and the rest is out of date.
            let _ = send.send(frame);
        }
    }

    fn on_resize(&mut self) -> ControlFlow<Over> {
        if self.target.mode != Mode::Observe {
            let (cols, rows) = Tty::size();
            self.send(ClientFrame::Resize { cols, rows });
        }
        ControlFlow::Continue(())
    }

    fn on_input(&mut self, input: &[u8]) -> Result<ControlFlow<Over>> {
        let typed = self.keys.feed(input);
        if self.resting == Some(State::Hibernated) && self.target.mode != Mode::Observe && !typed.detach {
            // Only wakes: nobody types into a session that can't be seen yet.
            self.resting = None;
            self.wake = true;
            self.link = Link::Waiting { until: Instant::now() };
            self.tty.bottom_line("[waking…]", false)?;
            return Ok(ControlFlow::Continue(()));
        }
        if !typed.input.is_empty() && self.target.mode != Mode::Observe {
            match self.ledger.typed(&typed.input) {
                Some(frames) => frames.into_iter().for_each(|frame| self.send(frame)),
                None => self.message("not typed: too much input waits for the session")?,
            }
        }
        Ok(if typed.detach { ControlFlow::Break(Over::Detached) } else { ControlFlow::Continue(()) })
    }

    fn on_link(&mut self, event: LinkEvent) -> Result<ControlFlow<Over>> {
        if event.number != self.number {
            return Ok(ControlFlow::Continue(()));
        }
        match event.news {
            News::Up => self.on_up(),
            News::Frame(frame) => return self.on_frame(frame),
            News::Resting(state) => self.on_resting(state)?,
            News::Down(failure) => self.on_down(failure)?,
        }
        Ok(ControlFlow::Continue(()))
    }

    fn on_up(&mut self) {
        let Link::Opening { send, by_offset } = std::mem::replace(&mut self.link, Link::Waiting { until: Instant::now() }) else {
            return;
        };
        if by_offset && self.marked {
            // A line of ours came onto the screen meanwhile: only a redraw gets rid of it.
            return;
        }
        self.link = Link::Up { send };
        self.lost_at = None;
        self.resting = None;
        self.wake = false;
        for frame in self.ledger.unacknowledged() {
            self.send(frame);
        }
    }

    fn on_down(&mut self, failure: Failure) -> Result<()> {
        if !failure.is_passing() {
            self.tty.restore();
            return Err(failure);
        }
        self.message_until = None;
        self.resting = None;
        self.lost_at.get_or_insert_with(Instant::now);
        self.link = Link::Waiting { until: Instant::now() + self.backoff.next_pause() };
        if self.marked {
            self.show_waiting()?;
        }
        Ok(())
    }

    /// The session rests. It is looked at again and again: somebody else may end its rest.
    fn on_resting(&mut self, state: State) -> Result<()> {
        self.message_until = None;
        self.link = Link::Waiting { until: Instant::now() + LOOK_AGAIN };
        if self.resting.replace(state) == Some(state) {
            return Ok(());
        }
        self.marked = true;
        let text = match state {
            State::Paused => "[paused: 'dormouse unpause' lets it go on]",
            _ if self.target.mode == Mode::Observe => "[hibernated]",
            _ => "[hibernated: press a key to wake]",
        };
        self.tty.bottom_line(text, false)
    }

    fn on_frame(&mut self, frame: ServerFrame) -> Result<ControlFlow<Over>> {
        self.backoff.reset();
        match frame {
            ServerFrame::Screen { offset, bytes } => {
                self.tty.redraw(&bytes)?;
                self.shown = Some(offset);
                // A message outlives the redraw that comes right after it, as the first one does.
                self.marked = self.message_until.is_some_and(|until| until > Instant::now());
                if self.marked {
                    self.tty.bottom_line(&self.message_text, false)?;
                } else {
                    self.message_until = None;
                }
            }
            ServerFrame::Output { offset, bytes } => self.on_output(offset, bytes)?,
            ServerFrame::Gap { .. } => self.redraw_by_new_link(),
            ServerFrame::InputTyped { seq } => self.ledger.acknowledged(seq),
            ServerFrame::InputRefused { seq, reason } => {
                self.ledger.refused(seq);
                self.message(&format!("not typed: {reason}"))?;
            }
            ServerFrame::Writer { you } => self.on_writer(you)?,
            ServerFrame::Ended { status, reason } => {
                return Ok(ControlFlow::Break(Over::Ended { code: status.shell_code(), reason }));
            }
            ServerFrame::Size { .. } | ServerFrame::Pong => {}
        }
        Ok(ControlFlow::Continue(()))
    }

    fn on_output(&mut self, offset: Offset, bytes: Bytes) -> Result<()> {
        let Some(shown) = self.shown else {
            self.redraw_by_new_link();
            return Ok(());
        };
        if offset > shown {
            self.redraw_by_new_link();
            return Ok(());
        }
        let known = usize::try_from(shown.since(offset)).unwrap_or(usize::MAX);
        if known < bytes.len() {
            self.tty.output(&bytes[known..])?;
            self.shown = Some(offset.plus(bytes.len()));
        }
        Ok(())
    }

    /// Some output can't be had: only the screen as it is now makes sense.
    fn redraw_by_new_link(&mut self) {
        self.shown = None;
        self.link = Link::Waiting { until: Instant::now() + self.backoff.next_pause() };
    }

    fn on_writer(&mut self, you: bool) -> Result<()> {
        let before = self.writes.replace(you);
        if self.target.mode == Mode::Observe || before == Some(you) {
            return Ok(());
        }
        match (before, you) {
            (Some(true), false) => self.message("someone else types here now; attach with --take to type again"),
            (None, false) => self.message("someone else types here; attach with --take to type"),
            _ => Ok(()),
        }
    }
}
