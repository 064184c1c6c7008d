//! A session's policies as they are asked for: what can be, and what a change of them does.

use crate::{Error, SessionPatch, inner::Inner, session::Session, timers};
use model::{EndReason, HookName, IdleAction, IdlePolicy, OnTimeout, State, Timestamp};
use std::{collections::BTreeMap, time::Duration};
use store::SessionRow;

/// The longest time that any limit can have: ten years. What is longer is a mistake.
const LONGEST: u64 = 10 * 366 * 24 * 3600;
/// Longest command of a hook, in bytes.
const MAX_HOOK: usize = 64 * 1024;

/// Checks a number of seconds.
pub(crate) fn seconds(field: &str, value: Option<u64>) -> Result<(), Error> {
    match value {
        Some(0) => Err(Error::invalid(field, "it must be at least 1")),
        Some(seconds) if seconds > LONGEST => Err(Error::invalid(field, format!("it can be {LONGEST} (ten years) at most"))),
        _ => Ok(()),
    }
}

/// Checks an idle policy.
pub(crate) fn idle(policy: Option<IdlePolicy>) -> Result<(), Error> {
    match policy {
        Some(policy) if policy.action != IdleAction::None => seconds("idle.after_seconds", Some(policy.after_seconds)),
        _ => Ok(()),
    }
}

/// Checks hooks.
pub(crate) fn hooks(hooks: &BTreeMap<HookName, Vec<String>>) -> Result<(), Error> {
    for (name, argv) in hooks {
        let field = format!("hooks.{name}");
        if argv.first().is_none_or(String::is_empty) {
            return Err(Error::invalid(&field, "there is no command"));
        }
        if argv.iter().any(|word| word.contains('\0')) {
            return Err(Error::invalid(&field, "it can't contain a NUL"));
        }
        if argv.iter().map(String::len).sum::<usize>() > MAX_HOOK {
            return Err(Error::invalid(&field, format!("it is longer than {MAX_HOOK} bytes")));
        }
    }
    Ok(())
}

/// Checks an instant to wake at.
pub(crate) fn moment(field: &str, at: Option<Timestamp>, now: Timestamp) -> Result<(), Error> {
    match at {
        Some(at) if at <= now => Err(Error::invalid(field, format!("{at} is past"))),
        Some(at) if at.since(now).as_secs() > LONGEST => Err(Error::invalid(field, format!("{at} is more than ten years off"))),
        _ => Ok(()),
    }
}

/// Checks what a patch asks of a session's clocks.
pub(crate) fn check(patch: &SessionPatch, row: &SessionRow, now: Timestamp) -> Result<(), Error> {
    seconds("timeout_seconds", patch.timeout_seconds.flatten())?;
    seconds("ttl_seconds", patch.ttl_seconds.flatten())?;
    idle(patch.idle.flatten())?;
    moment("wake_at", patch.wake_at.flatten(), now)?;
    match patch.ttl_seconds.flatten() {
        Some(ttl) if row.created_at.plus(Duration::from_secs(ttl)) <= now => {
            let detail = format!("it counts from {}, when the session was created: that is over", row.created_at);
            Err(Error::invalid("ttl_seconds", detail))
        }
        _ => Ok(()),
    }
}

/// Applies what a patch says of a session's clocks; tells which fields have changed. A running time that is changed
/// counts from now; a time to live from the session's creation.
pub(crate) fn apply(row: &mut SessionRow, patch: &SessionPatch, now: Timestamp) -> Vec<&'static str> {
    let mut fields = Vec::new();
    if let Some(timeout) = patch.timeout_seconds.filter(|timeout| *timeout != row.timeout_seconds) {
        row.timeout_seconds = timeout;
        let left = timeout.map(Duration::from_secs);
        let mut clocks = timers::clocks(row);
        clocks.timeout_told = false;
        clocks.timeout_at = left.filter(|_| row.state == State::Running).map(|left| now.plus(left));
        clocks.timeout_left = left.filter(|_| row.state == State::Paused);
        timers::put(row, &clocks);
        fields.push("timeout_seconds");
    }
    let mut set = |name, changes: bool| {
        if changes {
            fields.push(name);
        }
    };
    set("on_timeout", patch.on_timeout.is_some_and(|action: OnTimeout| action != row.on_timeout));
    set("ttl_seconds", patch.ttl_seconds.is_some_and(|ttl| ttl != row.ttl_seconds));
    set("wake_at", patch.wake_at.is_some_and(|at| at != row.wake_at));
    row.on_timeout = patch.on_timeout.unwrap_or(row.on_timeout);
    if let Some(ttl) = patch.ttl_seconds {
        row.ttl_seconds = ttl;
        row.expires_at = ttl.map(|ttl| row.created_at.plus(Duration::from_secs(ttl)));
    }
    row.wake_at = patch.wake_at.unwrap_or(row.wake_at);
    fields
}

/// Moves the end of the running time.
pub(crate) fn extend(row: &SessionRow, by: Duration, now: Timestamp) -> Result<SessionRow, Error> {
    let mut row = row.clone();
    let mut clocks = timers::clocks(&row);
    match (clocks.timeout_at, clocks.timeout_left) {
        (Some(at), _) => clocks.timeout_at = Some(at.plus(by)),
        (None, Some(left)) => clocks.timeout_left = Some(left.saturating_add(by)),
        (None, None) if !row.state.has_sandbox() => {
            let reason = row.reason.clone().unwrap_or_else(|| row.state.to_string());
            return Err(Error::NotRunning { session: row.id, reason });
        }
        (None, None) => {
            return Err(Error::Conflict { detail: format!("session {} has no time limit that could be moved", row.id) });
        }
    }
    clocks.timeout_told = false;
    timers::put(&mut row, &clocks);
    row.updated_at = now;
    Ok(row)
}

/// After a change of the idle policy: whether the session is idle is looked at soon.
pub(crate) fn look_soon(inner: &Inner, session: &Session) {
    let row = session.view().row;
    let looked_for = row.idle.is_some_and(|idle| idle.action != IdleAction::None) && row.state == State::Running;
    session.set_hibernate_after(None);
    session.set_idle_look(looked_for.then(|| inner.now()));
    timers::arm(inner, session);
}

/// One plain sentence on how a session stands.
pub(crate) fn sentence(row: &SessionRow) -> String {
    let at = |at: Option<Timestamp>| at.map(|at| format!(" at {at}")).unwrap_or_default();
    let detail = row.ended_detail.as_deref().filter(|detail| !detail.is_empty());
    let because = |otherwise: &str| detail.map_or_else(|| otherwise.to_owned(), str::to_owned);
    let cause = row.reason.as_deref().and_then(|reason| reason.parse::<EndReason>().ok());
    let when = at(row.ended_at);
    match row.state {
        State::Creating => "It is being created.".to_owned(),
        State::Running => "It is running.".to_owned(),
        State::Paused => match cause {
            Some(EndReason::Idle) => {
                format!("It was idle and could not be hibernated, so it is frozen: {}.", because("unknown why"))
            }
            Some(EndReason::Timeout) => {
                format!("Its running time was over and it could not be hibernated, so it is frozen: {}.", because("unknown why"))
            }
            _ => "A user paused it; it goes on where it was when unpaused.".to_owned(),
        },
        State::Hibernated => match cause {
            Some(EndReason::Idle) => format!("It was hibernated{when} because it was idle: {}.", because("nothing happened")),
            Some(EndReason::Timeout) => format!("It was hibernated{when} because its running time was over."),
            _ => format!("It was hibernated{when} because somebody asked for it; its memory is saved."),
        },
        State::Stopped => {
            let why = match cause {
                Some(EndReason::Asked) => "somebody stopped it".to_owned(),
                Some(EndReason::Idle) => format!("it was idle ({})", because("nothing happened")),
                Some(EndReason::Timeout) => "its running time was over".to_owned(),
                Some(EndReason::Oom) => format!("it ran out of memory ({})", because("its limit was reached")),
                Some(EndReason::Killed) => format!("its sandbox was killed ({})", because("by a signal from outside")),
                Some(EndReason::SandboxExited) => format!("its sandbox ended by itself ({})", because("no cause is known")),
                Some(EndReason::SupervisorLost) => format!("its supervisor was lost ({})", because("it ended without a word")),
                Some(EndReason::RolledBack) => "it was set back to a snapshot without memory".to_owned(),
                Some(EndReason::HostRebooted) => "the computer was restarted".to_owned(),
                Some(EndReason::ProtocolViolation) => format!("its sandbox broke the protocol ({})", because("no more is known")),
                _ => row.reason.clone().unwrap_or_else(|| "of an unknown cause".to_owned()),
            };
            format!("It stopped{when}: {why}. Its disk is kept, its memory is gone; start it to boot it afresh.")
        }
        State::Failed => format!("It failed for good: {}.", row.reason.as_deref().unwrap_or("unknown why")),
        State::Deleted => match cause {
            Some(EndReason::Expired) => format!("Its time was over{}.", at(row.deleted_at)),
            _ => format!("It was deleted{}.", at(row.deleted_at)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{Runtime, SessionId};

    const NOW: Timestamp = Timestamp(1_000_000);

    fn running() -> SessionRow {
        let mut row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", NOW);
        row.state = State::Running;
        row
    }

    #[test]
    fn absurd_times_are_refused() {
        for bad in [0, u64::MAX, LONGEST + 1] {
            assert!(seconds("x", Some(bad)).is_err(), "{bad}");
        }
        assert!(seconds("x", Some(1)).is_ok() && seconds("x", Some(LONGEST)).is_ok() && seconds("x", None).is_ok());
        for bad in [Timestamp(-1), NOW, Timestamp(i64::MAX)] {
            assert!(moment("x", Some(bad), NOW).is_err(), "{bad}");
        }
        assert!(moment("x", Some(Timestamp(NOW.0 + 1)), NOW).is_ok());
    }

    #[test]
    fn a_running_time_that_is_changed_counts_from_now() {
        let mut row = running();
        let patch = SessionPatch { timeout_seconds: Some(Some(10)), ..SessionPatch::default() };
        assert_eq!(apply(&mut row, &patch, NOW), ["timeout_seconds"]);
        assert_eq!(row.timeout_at, Some(Timestamp(NOW.0 + 10_000)));
        assert!(apply(&mut row, &patch, NOW).is_empty(), "nothing changes");
        let longer = extend(&row, Duration::from_secs(5), NOW).unwrap();
        assert_eq!(longer.timeout_at, Some(Timestamp(NOW.0 + 15_000)));
        let none = SessionPatch { timeout_seconds: Some(None), ..SessionPatch::default() };
        apply(&mut row, &none, NOW);
        assert!(row.timeout_at.is_none() && extend(&row, Duration::from_secs(5), NOW).is_err());
    }

    #[test]
    fn every_state_has_a_sentence() {
        for state in State::ALL {
            for reason in EndReason::ALL {
                let row = SessionRow { state: *state, reason: Some(reason.to_string()), ..running() };
                let text = sentence(&row);
                assert!(text.ends_with('.') && !text.contains(".."), "{text}");
            }
        }
    }
}
