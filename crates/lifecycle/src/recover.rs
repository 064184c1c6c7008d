//! What a server that comes back does about each session, from what the store says and what it finds alive.
//!
//! Every operation that was under way is finished or undone. What is finished is what can't be undone without loss, and
//! what has had its effect already.

use model::{OperationKind, State};

/// A sandbox that is alive, as its supervisor tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sleeper {
    Starting,
    Running,
    Paused,
    /// Its memory is on storage; it waits to be told whether the store knows.
    Captured,
    /// The store knew; it is frozen until its image has been tried out.
    Confirming,
}

/// What was found of a session's sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Seen {
    /// Nothing is alive.
    Nothing,
    /// Its sandbox lives, and the supervisor that it belonged to doesn't.
    Orphan,
    /// Its supervisor answered.
    Alive {
        sleeper: Sleeper,
        /// It is of the generation that the store knows, not of the one that an operation was about to make.
        of_stored_generation: bool,
    },
}

/// What to do about a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plan {
    /// Nothing: it is as the store says.
    Keep,
    /// Go on with its sandbox, in this state; an operation that was under way is undone or done accordingly.
    Resume {
        state: State,
    },
    /// The sandbox that an operation was making is there: once it answers, the operation is done.
    FinishBoot,
    /// Its memory is on storage: say so in the store, then let the sandbox go.
    FinishHibernate,
    /// Hibernated, and its frozen original is still there: go on with its confirmation.
    ResumeGrace,
    /// End what is alive; then it is stopped, as was asked.
    FinishStop,
    FinishDelete,
    /// It never came to life.
    FailCreate,
    /// The wake failed: see whether its memory was spent.
    UndoWake,
    /// The start failed: it is stopped as before.
    UndoStart,
    /// Its sandbox lives, or was being taken over: another supervisor takes it over, memory and all. Another operation
    /// that was under way is undone first.
    Recapture,
    /// Its sandbox is gone without having been asked to.
    Lost,
    /// Something is alive that nobody answers for: end it. The session is as the store says.
    EndLeftover,
}

/// What to do about a session in `state` with `operation` under way when the server died.
pub fn recover(state: State, operation: Option<OperationKind>, seen: Seen) -> Plan {
    use OperationKind as K;
    use Sleeper as S;
    if state == State::Deleted {
        return if seen == Seen::Nothing { Plan::Keep } else { Plan::EndLeftover };
    }
    match operation {
        Some(K::Delete) => return Plan::FinishDelete,
        Some(K::Stop) => return Plan::FinishStop,
        // Whatever is there of it: how far the taking over had come, its own look tells.
        Some(K::Recapture) if state.has_sandbox() => return Plan::Recapture,
        _ => {}
    }
    let Seen::Alive { sleeper, of_stored_generation } = seen else {
        return match (operation, state) {
            (Some(K::Create), _) | (_, State::Creating) => Plan::FailCreate,
            (Some(K::Wake), _) => Plan::UndoWake,
            (Some(K::Start), _) => Plan::UndoStart,
            (_, State::Running | State::Paused) if seen == Seen::Orphan => Plan::Recapture,
            (_, State::Running | State::Paused) => Plan::Lost,
            // Of a hibernated session the image is the memory, and this its frozen original.
            _ if seen == Seen::Orphan => Plan::EndLeftover,
            (_, State::Hibernated | State::Stopped | State::Failed | State::Deleted) => Plan::Keep,
        };
    };
    match (state, operation, sleeper) {
        (State::Creating, _, S::Starting | S::Running) => Plan::FinishBoot,
        (State::Creating, ..) => Plan::FailCreate,

        (State::Running | State::Paused, Some(K::Hibernate), S::Captured | S::Confirming) => Plan::FinishHibernate,
        // Taken over, and the store wasn't told.
        (State::Running | State::Paused, _, S::Starting | S::Running | S::Paused) if !of_stored_generation => Plan::Recapture,
        (State::Running | State::Paused, _, S::Paused) => Plan::Resume { state: State::Paused },
        (State::Running | State::Paused, ..) => Plan::Resume { state: State::Running },

        // A thaw or a restore that the server didn't live to hear of.
        (State::Hibernated, Some(K::Wake), S::Starting | S::Running) if !of_stored_generation => Plan::FinishBoot,
        (State::Hibernated, _, S::Captured | S::Confirming) if of_stored_generation => Plan::ResumeGrace,
        (State::Hibernated, Some(K::Wake), _) => Plan::UndoWake,
        (State::Hibernated, ..) => Plan::EndLeftover,

        (State::Stopped, Some(K::Start), S::Starting | S::Running) if !of_stored_generation => Plan::FinishBoot,
        (State::Stopped, Some(K::Start), _) => Plan::UndoStart,
        (State::Stopped | State::Failed | State::Deleted, ..) => Plan::EndLeftover,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{prelude::*, sample::select};

    fn alive(sleeper: Sleeper, of_stored_generation: bool) -> Seen {
        Seen::Alive { sleeper, of_stored_generation }
    }

    #[test]
    fn what_a_dead_server_left_is_finished_or_undone() {
        use OperationKind as K;
        use Sleeper as S;
        let cases = [
            (State::Running, None, alive(S::Running, true), Plan::Resume { state: State::Running }),
            (State::Running, None, Seen::Nothing, Plan::Lost),
            (State::Paused, None, alive(S::Paused, true), Plan::Resume { state: State::Paused }),
            (State::Running, Some(K::Pause), alive(S::Paused, true), Plan::Resume { state: State::Paused }),
            (State::Running, Some(K::Pause), alive(S::Running, true), Plan::Resume { state: State::Running }),
            (State::Running, Some(K::Hibernate), alive(S::Running, true), Plan::Resume { state: State::Running }),
            (State::Running, Some(K::Hibernate), alive(S::Captured, true), Plan::FinishHibernate),
            (State::Running, Some(K::Hibernate), Seen::Nothing, Plan::Lost),
            (State::Hibernated, None, Seen::Nothing, Plan::Keep),
            (State::Hibernated, None, alive(S::Captured, true), Plan::ResumeGrace),
            (State::Hibernated, None, alive(S::Confirming, true), Plan::ResumeGrace),
            (State::Hibernated, Some(K::Wake), alive(S::Running, false), Plan::FinishBoot),
            (State::Hibernated, Some(K::Wake), alive(S::Confirming, true), Plan::ResumeGrace),
            (State::Hibernated, Some(K::Wake), Seen::Nothing, Plan::UndoWake),
            (State::Hibernated, Some(K::Stop), Seen::Nothing, Plan::FinishStop),
            (State::Stopped, Some(K::Start), alive(S::Starting, false), Plan::FinishBoot),
            (State::Stopped, Some(K::Start), Seen::Nothing, Plan::UndoStart),
            (State::Stopped, None, alive(S::Running, true), Plan::EndLeftover),
            (State::Creating, Some(K::Create), alive(S::Running, true), Plan::FinishBoot),
            (State::Creating, Some(K::Create), Seen::Nothing, Plan::FailCreate),
            (State::Creating, None, Seen::Nothing, Plan::FailCreate),
            (State::Running, Some(K::Delete), alive(S::Running, true), Plan::FinishDelete),
            (State::Running, None, Seen::Orphan, Plan::Recapture),
            (State::Paused, None, Seen::Orphan, Plan::Recapture),
            (State::Running, Some(K::Hibernate), Seen::Orphan, Plan::Recapture),
            (State::Running, Some(K::Recapture), Seen::Orphan, Plan::Recapture),
            // Between the end of the old sandbox and the beginning of the new one nothing is alive.
            (State::Running, Some(K::Recapture), Seen::Nothing, Plan::Recapture),
            (State::Paused, Some(K::Recapture), alive(S::Paused, false), Plan::Recapture),
            (State::Running, Some(K::Recapture), alive(S::Starting, false), Plan::Recapture),
            (State::Running, None, alive(S::Running, false), Plan::Recapture),
            (State::Running, Some(K::Stop), Seen::Orphan, Plan::FinishStop),
            (State::Running, Some(K::Delete), Seen::Orphan, Plan::FinishDelete),
            // A copy that was being made is undone; what it was made of goes on.
            (State::Running, Some(K::Snapshot), alive(S::Running, true), Plan::Resume { state: State::Running }),
            (State::Running, Some(K::Snapshot), alive(S::Captured, true), Plan::Resume { state: State::Running }),
            (State::Paused, Some(K::Snapshot), alive(S::Paused, true), Plan::Resume { state: State::Paused }),
            (State::Running, Some(K::Snapshot), Seen::Nothing, Plan::Lost),
            (State::Running, Some(K::Snapshot), Seen::Orphan, Plan::Recapture),
            (State::Hibernated, Some(K::Snapshot), Seen::Nothing, Plan::Keep),
            (State::Hibernated, Some(K::Snapshot), alive(S::Confirming, true), Plan::ResumeGrace),
            (State::Stopped, Some(K::Snapshot), Seen::Nothing, Plan::Keep),
            // So is a way back: its commit, which ends it in the store, is the point of no return.
            (State::Running, Some(K::Rollback), alive(S::Running, true), Plan::Resume { state: State::Running }),
            (State::Running, Some(K::Rollback), alive(S::Captured, true), Plan::Resume { state: State::Running }),
            (State::Paused, Some(K::Rollback), alive(S::Paused, true), Plan::Resume { state: State::Paused }),
            (State::Running, Some(K::Rollback), Seen::Nothing, Plan::Lost),
            (State::Running, Some(K::Rollback), Seen::Orphan, Plan::Recapture),
            (State::Hibernated, Some(K::Rollback), Seen::Nothing, Plan::Keep),
            (State::Hibernated, Some(K::Rollback), alive(S::Captured, true), Plan::ResumeGrace),
            (State::Stopped, Some(K::Rollback), Seen::Nothing, Plan::Keep),
            // Ended, and not yet gone, when the way back was committed: the store says where it leads.
            (State::Hibernated, None, alive(S::Running, true), Plan::EndLeftover),
            (State::Stopped, None, Seen::Orphan, Plan::EndLeftover),
            (State::Hibernated, None, Seen::Orphan, Plan::EndLeftover),
            (State::Hibernated, Some(K::Wake), Seen::Orphan, Plan::UndoWake),
            (State::Stopped, Some(K::Start), Seen::Orphan, Plan::UndoStart),
            (State::Creating, Some(K::Create), Seen::Orphan, Plan::FailCreate),
            (State::Deleted, None, Seen::Orphan, Plan::EndLeftover),
        ];
        for (state, operation, seen, plan) in cases {
            assert_eq!(recover(state, operation, seen), plan, "{state} {operation:?} {seen:?}");
        }
    }

    fn seen() -> impl Strategy<Value = Seen> {
        let sleeper = select(&[Sleeper::Starting, Sleeper::Running, Sleeper::Paused, Sleeper::Captured, Sleeper::Confirming][..]);
        prop_oneof![
            Just(Seen::Nothing),
            Just(Seen::Orphan),
            (sleeper, any::<bool>()).prop_map(|(sleeper, of_stored_generation)| Seen::Alive { sleeper, of_stored_generation }),
        ]
    }

    proptest! {
        /// No sandbox is claimed that isn't there, none is left without an owner, and no operation is left as it was.
        #[test]
        fn nothing_is_claimed_and_nothing_is_left(
            state in select(State::ALL),
            operation in proptest::option::of(select(OperationKind::ALL)),
            seen in seen(),
        ) {
            let plan = recover(state, operation, seen);
            match plan {
                Plan::Resume { .. } | Plan::FinishBoot | Plan::FinishHibernate | Plan::ResumeGrace => {
                    let is_alive = matches!(seen, Seen::Alive { .. });
                    prop_assert!(is_alive);
                }
                Plan::Recapture => prop_assert!(state.has_sandbox()),
                // Memory that is there is never given up without having been asked to.
                Plan::Lost => prop_assert_eq!(seen, Seen::Nothing),
                Plan::Keep => prop_assert!(seen == Seen::Nothing && !state.has_sandbox() && state != State::Creating),
                _ => {}
            }
            if state.has_sandbox() && matches!(operation, Some(OperationKind::Snapshot | OperationKind::Rollback)) {
                // Neither has happened: a sandbox that is there goes on, one that isn't is told as lost.
                let goes_on = matches!(plan, Plan::Resume { .. } | Plan::Recapture | Plan::Lost);
                prop_assert!(goes_on);
            }
            if state == State::Hibernated && !matches!(operation, Some(OperationKind::Stop | OperationKind::Delete)) {
                // Saved memory is never declared lost without a look at it.
                prop_assert!(!matches!(plan, Plan::Lost | Plan::FinishStop | Plan::FinishDelete));
            }
        }
    }
}
