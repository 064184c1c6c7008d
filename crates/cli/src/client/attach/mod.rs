//! `attach`: a terminal of a session on the user's own, through every loss of the link between them.
//!
//! ```text
//!              opened                    lost
//!   Opening ───────────► Up ──────────────────────────► Waiting ──(pause)──► Opening
//!      │                  │                                │
//!      │ refused for good │ ended, detach keys             │ detach keys
//!      └──────────────────┴────────────► over ◄────────────┘
//! ```
//! Output has absolute offsets, input has sequence numbers: a new link goes on at the exact byte, and sends again what
//! was not acknowledged. Where a line of our own is on the screen, the new link begins with a redraw instead.
//! A link that was lost never wakes the session: one that was hibernated is said to be so, and a key wakes it.

mod keys;
mod ledger;
mod link;
mod modes;
mod tty;
mod view;

pub use keys::DetachKeys;
pub use tty::Tty;

use super::{
    Context,
    failure::{Failure, Result},
    http::Call,
    select,
};
use api_types::{CreateTerminal, Session, Terminal};
use model::{State, TerminalId, TerminalState};
use std::process::ExitCode;

/// Whether and how to type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Write,
    Observe,
    Take,
}

impl Mode {
    fn as_str(self) -> &'static str {
        match self {
            Mode::Write => "write",
            Mode::Observe => "observe",
            Mode::Take => "take",
        }
    }
}

/// How an attachment ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Over {
    Detached,
    /// The program has ended, with the status that a shell would show, and why.
    Ended {
        code: i32,
        reason: String,
    },
}

/// A terminal to attach to.
pub struct Target {
    pub session: Session,
    pub terminal: TerminalId,
    pub mode: Mode,
    pub keys: DetachKeys,
}

/// Attaches until the user detaches or the program ends, and says which.
///
/// # Errors
/// No terminal here, and what the server refuses for good.
pub async fn attach(ctx: &Context, target: Target) -> Result<Over> {
    let name = session_name(&target.session);
    let over = view::View::open(ctx.client.clone(), target)?.run().await?;
    if !ctx.quiet {
        match &over {
            Over::Detached => eprintln!("[detached from {name}]"),
            Over::Ended { code, reason } if reason.is_empty() => eprintln!("[ended: exit {code}]"),
            Over::Ended { code, reason } => eprintln!("[ended: exit {code}, {}]", super::text::safe(reason)),
        }
    }
    Ok(over)
}

/// The status that the process exits with.
pub fn exit_code(over: &Over) -> ExitCode {
    match over {
        Over::Detached => ExitCode::SUCCESS,
        Over::Ended { code, .. } => ExitCode::from(u8::try_from(*code & 0xFF).unwrap_or(super::failure::OURS)),
    }
}

fn session_name(session: &Session) -> String {
    session.key.clone().or_else(|| session.name.clone()).unwrap_or_else(|| session.id.to_string())
}

/// `dormouse attach`.
///
/// # Errors
/// As [`attach`], and a session that can't be brought to run.
pub async fn command(ctx: &Context, session: &str, terminal: Option<&str>, mode: Mode, keys: DetachKeys) -> Result<ExitCode> {
    Tty::check()?;
    let session = select::session(&ctx.client, session).await?;
    ensure_running(ctx, &session, mode != Mode::Observe).await?;
    let terminals = select::terminals(&ctx.client, &session).await?;
    let terminal = choose(ctx, &session, terminals, terminal, mode).await?;
    let over = attach(ctx, Target { session, terminal, mode, keys }).await?;
    Ok(exit_code(&over))
}

/// Wakes the session where it sleeps and `wake` says so, and says why where it can't be attached to.
///
/// # Errors
/// A session that doesn't run.
pub async fn ensure_running(ctx: &Context, session: &Session, wake: bool) -> Result<()> {
    let name = session_name(session);
    let reason = session.reason.as_deref().map(|reason| format!(" ({})", super::text::safe(reason))).unwrap_or_default();
    match session.state {
        State::Creating | State::Running => Ok(()),
        State::Hibernated if wake => {
            let call = Call::post(format!("/v1/sessions/{}/wake", session.id), &serde_json::json!({}));
            let after: Session = ctx.client.json(call).await?;
            if after.state == State::Running {
                return Ok(());
            }
            Err(Failure::failed(format!("session {name} is {} — 'dormouse events {name}' tells why", after.state)))
        }
        State::Hibernated => Err(Failure::conflict(format!("session {name} is hibernated — 'dormouse wake {name}'"))),
        State::Paused => Err(Failure::conflict(format!("session {name} is paused — 'dormouse unpause {name}'"))),
        State::Stopped => Err(Failure::conflict(format!("session {name} is stopped{reason} — 'dormouse start {name}'"))),
        State::Failed => Err(Failure::conflict(format!("session {name} has failed{reason} — 'dormouse show {name}'"))),
        State::Deleted => Err(Failure::not_found(format!("session {name} was deleted"))),
    }
}

/// The terminal that `word` names; without one the newest that runs, else a new login shell.
async fn choose(ctx: &Context, session: &Session, mut all: Vec<Terminal>, word: Option<&str>, mode: Mode) -> Result<TerminalId> {
    if let Some(word) = word {
        return Ok(select::pick(&all, word, "terminal")?.id);
    }
    all.retain(|terminal| terminal.state == TerminalState::Running);
    if let Some(newest) = all.iter().max_by_key(|terminal| terminal.started_at) {
        return Ok(newest.id);
    }
    if mode == Mode::Observe {
        let name = session_name(session);
        return Err(Failure::not_found(format!(
            "session {name} has no terminal to observe — 'dormouse attach {name}' opens one"
        )));
    }
    open_terminal(ctx, session, None).await
}

/// Opens a terminal as large as the user's.
///
/// # Errors
/// Those of asking the server.
pub async fn open_terminal(ctx: &Context, session: &Session, argv: Option<Vec<String>>) -> Result<TerminalId> {
    let (cols, rows) = Tty::size();
    let request = CreateTerminal { argv, cols, rows, ..CreateTerminal::default() };
    let terminal: Terminal = ctx.client.json(Call::post(format!("/v1/sessions/{}/terminals", session.id), &request)).await?;
    Ok(terminal.id)
}
