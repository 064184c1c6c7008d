//! What a session is once an operation has ended, well or badly.

use model::{Memory, OperationKind, State};

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Failed {
        /// Programs had run on from the saved memory before it failed: the disk may have changed under it, and old
        /// memory is never restored over a newer disk.
        memory_spent: bool,
    },
}

/// State and memory after an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    pub state: State,
    pub memory: Memory,
}

/// The state that an operation leads to which began in `from`.
pub fn goal(kind: OperationKind, from: State) -> State {
    match kind {
        // The same programs go on as they were, or wait as they did.
        OperationKind::Recapture if from == State::Paused => State::Paused,
        OperationKind::Recapture => State::Running,
        OperationKind::Create | OperationKind::Wake | OperationKind::Start | OperationKind::Unpause => State::Running,
        OperationKind::Snapshot => from,
        OperationKind::Hibernate => State::Hibernated,
        // A rollback leaves a disk; what brings the memory along, where the snapshot has it, is its own commit.
        OperationKind::Stop | OperationKind::Rollback => State::Stopped,
        OperationKind::Pause => State::Paused,
        OperationKind::Delete => State::Deleted,
    }
}

/// Whether a session that is found in `after` shows that the operation `kind` was done which began in `from`. What makes a
/// copy, or another disk under the same state, is not seen in the state: its own commit says that it was done.
pub fn shows_done(kind: OperationKind, from: State, after: State) -> bool {
    !matches!(kind, OperationKind::Snapshot | OperationKind::Rollback) && goal(kind, from) == after
}

/// What the session is after the operation `kind` that began in `state` with `memory`.
pub fn settle(kind: OperationKind, state: State, memory: Memory, outcome: Outcome) -> Settled {
    match outcome {
        Outcome::Done if kind == OperationKind::Snapshot => Settled { state, memory },
        Outcome::Done => {
            let state = goal(kind, state);
            let memory = match state {
                State::Running | State::Paused => Memory::Live,
                State::Hibernated => Memory::Saved,
                State::Stopped => Memory::Lost,
                State::Creating | State::Failed | State::Deleted => Memory::None,
            };
            Settled { state, memory }
        }
        Outcome::Failed { memory_spent } => match kind {
            OperationKind::Create => Settled { state: State::Failed, memory: Memory::None },
            OperationKind::Wake if memory_spent => Settled { state: State::Stopped, memory: Memory::Lost },
            // Of a recapture or rollback, too: what ends its session is the end of the sandbox, which is told for itself.
            _ => Settled { state, memory },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_leaves_what_was_there() {
        use OperationKind as K;
        let kept = Outcome::Failed { memory_spent: false };
        let cases = [
            (K::Create, State::Creating, Memory::None, kept, State::Failed, Memory::None),
            (K::Hibernate, State::Running, Memory::Live, kept, State::Running, Memory::Live),
            (K::Wake, State::Hibernated, Memory::Saved, kept, State::Hibernated, Memory::Saved),
            (K::Wake, State::Hibernated, Memory::Saved, Outcome::Failed { memory_spent: true }, State::Stopped, Memory::Lost),
            (K::Start, State::Stopped, Memory::Lost, kept, State::Stopped, Memory::Lost),
            (K::Stop, State::Hibernated, Memory::Saved, Outcome::Done, State::Stopped, Memory::Lost),
            (K::Recapture, State::Running, Memory::Live, Outcome::Done, State::Running, Memory::Live),
            (K::Recapture, State::Paused, Memory::Live, Outcome::Done, State::Paused, Memory::Live),
            (K::Recapture, State::Paused, Memory::Live, kept, State::Paused, Memory::Live),
            (K::Snapshot, State::Running, Memory::Live, Outcome::Done, State::Running, Memory::Live),
            (K::Snapshot, State::Paused, Memory::Live, Outcome::Done, State::Paused, Memory::Live),
            (K::Snapshot, State::Hibernated, Memory::Saved, Outcome::Done, State::Hibernated, Memory::Saved),
            (K::Snapshot, State::Stopped, Memory::None, Outcome::Done, State::Stopped, Memory::None),
            (K::Snapshot, State::Hibernated, Memory::Saved, kept, State::Hibernated, Memory::Saved),
            (K::Rollback, State::Running, Memory::Live, Outcome::Done, State::Stopped, Memory::Lost),
            (K::Rollback, State::Hibernated, Memory::Saved, Outcome::Done, State::Stopped, Memory::Lost),
            (K::Rollback, State::Running, Memory::Live, kept, State::Running, Memory::Live),
            (K::Rollback, State::Hibernated, Memory::Saved, kept, State::Hibernated, Memory::Saved),
        ];
        for (kind, from, memory, outcome, state, after) in cases {
            assert_eq!(settle(kind, from, memory, outcome), Settled { state, memory: after }, "{kind} {outcome:?}");
        }
    }
    #[test]
    fn the_state_alone_shows_no_copy_and_no_way_back() {
        use OperationKind as K;
        assert!(shows_done(K::Pause, State::Running, State::Paused) && !shows_done(K::Pause, State::Running, State::Running));
        for state in State::ALL {
            assert!(!shows_done(K::Snapshot, *state, *state));
            assert!(!shows_done(K::Rollback, *state, State::Stopped));
        }
    }
}
