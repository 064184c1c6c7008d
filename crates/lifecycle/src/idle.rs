//! Idleness: nothing is happening, which is not the same as nobody watching.

use model::{IdleAction, IdlePolicy, IdleWhen};
use std::time::Duration;

/// What is known of a running session's quiet. All times are awake time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quiet {
    /// Since when nothing has happened; zero while something does.
    pub nothing_for: Duration,
    /// Since when nobody has looked or asked; zero while somebody does.
    pub nobody_for: Duration,
}

/// What follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idleness {
    /// Idle for as long as the policy says: `action` is due.
    Idle { quiet: Duration, action: IdleAction },
    /// Not before this time has passed, and then only if nothing happens.
    LookAgainAfter(Duration),
    /// Idleness leads to nothing here.
    Never,
}

/// Whether a session is idle by its policy.
pub fn idleness(policy: Option<IdlePolicy>, quiet: Quiet) -> Idleness {
    let Some(policy) = policy.filter(|policy| policy.action != IdleAction::None) else { return Idleness::Never };
    let window = Duration::from_secs(policy.after_seconds);
    let quiet = match policy.when {
        IdleWhen::NoActivity => quiet.nothing_for,
        IdleWhen::NoClients => quiet.nobody_for,
    };
    match window.checked_sub(quiet) {
        None | Some(Duration::ZERO) => Idleness::Idle { quiet, action: policy.action },
        Some(left) => Idleness::LookAgainAfter(left),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_window_counts_and_only_what_the_policy_looks_at() {
        let policy = |action, when| Some(IdlePolicy { after_seconds: 600, action, when });
        let quiet =
            |nothing, nobody| Quiet { nothing_for: Duration::from_secs(nothing), nobody_for: Duration::from_secs(nobody) };
        let idle = |seconds, action| Idleness::Idle { quiet: Duration::from_secs(seconds), action };
        let again = |seconds| Idleness::LookAgainAfter(Duration::from_secs(seconds));
        let cases = [
            (None, quiet(9999, 9999), Idleness::Never),
            (policy(IdleAction::None, IdleWhen::NoActivity), quiet(9999, 9999), Idleness::Never),
            (policy(IdleAction::Hibernate, IdleWhen::NoActivity), quiet(600, 0), idle(600, IdleAction::Hibernate)),
            (policy(IdleAction::Hibernate, IdleWhen::NoActivity), quiet(599, 9999), again(1)),
            (policy(IdleAction::Stop, IdleWhen::NoActivity), quiet(0, 9999), again(600)),
            (policy(IdleAction::Stop, IdleWhen::NoClients), quiet(0, 700), idle(700, IdleAction::Stop)),
            (policy(IdleAction::Stop, IdleWhen::NoClients), quiet(9999, 100), again(500)),
        ];
        for (policy, quiet, expected) in cases {
            assert_eq!(idleness(policy, quiet), expected, "{policy:?} {quiet:?}");
        }
    }
}
