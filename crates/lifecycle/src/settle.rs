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
        // Both leave the session running, whatever they did on the way.
        OperationKind::Snapshot | OperationKind::Rollback => State::Running,
        OperationKind::Hibernate => State::Hibernated,
        OperationKind::Stop => State::Stopped,
        OperationKind::Pause => State::Paused,
        OperationKind::Delete => State::Deleted,
    }
}

/// What the session is after the operation `kind` that began in `state` with `memory`.
pub fn settle(kind: OperationKind, state: State, memory: Memory, outcome: Outcome) -> Settled {
    match outcome {
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
            // Of a recapture, too: what ends its session is the end of the sandbox, which is told for itself.
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
        ];
        for (kind, from, memory, outcome, state, after) in cases {
            assert_eq!(settle(kind, from, memory, outcome), Settled { state, memory: after }, "{kind} {outcome:?}");
        }
    }
}
