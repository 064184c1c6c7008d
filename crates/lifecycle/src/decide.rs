//! Admission: what becomes of a command, given how a session stands and what is under way in it.

use model::{OperationKind, State};

/// All that a decision looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    pub state: State,
    /// What is under way.
    pub operation: Option<OperationKind>,
    /// Nothing of it is ever written to storage.
    pub ephemeral: bool,
    /// Idleness paused it, not a user: whoever needs it unpauses it.
    pub paused_by_idleness: bool,
}

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    Hibernate,
    Wake,
    Pause,
    Unpause,
    Stop,
    Start,
    /// Keep a copy of it as it is.
    Snapshot,
    /// Set it back to a snapshot.
    Rollback,
    Delete,
    /// Something that needs a running session: an exec, typing, a file written.
    Use {
        /// Boot it where it is stopped.
        start: bool,
    },
}

/// What becomes of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Carry out this operation. For [`Command::Use`]: then use it.
    Accept(OperationKind),
    /// It is so already.
    Already,
    /// What is under way is what was asked for: its end is the answer.
    Join,
    /// Something else is under way: decide again once it has ended.
    Wait,
    Deny(Reason),
}

/// Why a command is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    Deleted,
    Failed,
    /// A user paused it, and only a user unpauses it.
    Paused,
    /// There is no sandbox.
    NotRunning,
    /// There is no memory to go on with.
    NoMemorySnapshot,
    /// It has saved memory, which a boot would give up.
    Hibernated,
    Ephemeral,
    /// It is being created, and nobody is at it: a server has to recover it first.
    Creating,
}

/// What becomes of `command`.
pub fn decide(standing: Standing, command: Command) -> Decision {
    use Decision::{Accept, Already, Deny, Join, Wait};
    if standing.state == State::Deleted {
        return if command == Command::Delete { Already } else { Deny(Reason::Deleted) };
    }
    if let Some(pending) = standing.operation {
        return match (pending, command) {
            (OperationKind::Delete, Command::Delete) => Join,
            (OperationKind::Delete, _) => Deny(Reason::Deleted),
            // Delete wins over everything that is under way.
            (_, Command::Delete) => Accept(OperationKind::Delete),
            // A snapshot changes nothing: what is so is so while one is taken, and what can't be is refused at once.
            (OperationKind::Snapshot, _) => match at_rest(standing, command) {
                Accept(_) => Wait,
                answer => answer,
            },
            _ if brings(command) == Some(pending) => Join,
            (k, Command::Use { .. }) if super::goal(k, standing.state) == State::Running => Join,
            _ => Wait,
        };
    }
    at_rest(standing, command)
}

/// What becomes of `command` where nothing is under way.
fn at_rest(standing: Standing, command: Command) -> Decision {
    use Decision::{Accept, Already, Deny};
    match (standing.state, command) {
        (State::Deleted, _) => Deny(Reason::Deleted),
        (_, Command::Delete) => Accept(OperationKind::Delete),
        (State::Failed, _) => Deny(Reason::Failed),
        (State::Creating, _) => Deny(Reason::Creating),

        (_, Command::Snapshot | Command::Rollback) if standing.ephemeral => Deny(Reason::Ephemeral),
        (_, Command::Snapshot) => Accept(OperationKind::Snapshot),
        (_, Command::Rollback) => Accept(OperationKind::Rollback),

        (State::Running | State::Paused, Command::Hibernate) if standing.ephemeral => Deny(Reason::Ephemeral),
        (State::Running | State::Paused, Command::Hibernate) => Accept(OperationKind::Hibernate),
        (State::Running | State::Paused | State::Hibernated, Command::Stop) => Accept(OperationKind::Stop),

        (State::Running, Command::Pause) => Accept(OperationKind::Pause),
        (State::Running, Command::Wake | Command::Unpause | Command::Start | Command::Use { .. }) => Already,

        (State::Paused, Command::Pause) => Already,
        (State::Paused, Command::Unpause) => Accept(OperationKind::Unpause),
        (State::Paused, _) if standing.paused_by_idleness => Accept(OperationKind::Unpause),
        (State::Paused, Command::Wake | Command::Start | Command::Use { .. }) => Deny(Reason::Paused),

        (State::Hibernated, Command::Hibernate) => Already,
        (State::Hibernated, Command::Wake | Command::Use { .. }) => Accept(OperationKind::Wake),
        (State::Hibernated, Command::Start) => Deny(Reason::Hibernated),
        (State::Hibernated, Command::Pause | Command::Unpause) => Deny(Reason::NotRunning),

        (State::Stopped, Command::Stop) => Already,
        (State::Stopped, Command::Start | Command::Use { start: true }) => Accept(OperationKind::Start),
        (State::Stopped, Command::Wake) => Deny(Reason::NoMemorySnapshot),
        (State::Stopped, Command::Hibernate | Command::Pause | Command::Unpause | Command::Use { start: false }) => {
            Deny(Reason::NotRunning)
        }
    }
}

/// The operation that a command asks for by name. Each snapshot is one of its own, and so is each way back: neither joins.
fn brings(command: Command) -> Option<OperationKind> {
    Some(match command {
        Command::Hibernate => OperationKind::Hibernate,
        Command::Wake => OperationKind::Wake,
        Command::Pause => OperationKind::Pause,
        Command::Unpause => OperationKind::Unpause,
        Command::Stop => OperationKind::Stop,
        Command::Start => OperationKind::Start,
        Command::Delete => OperationKind::Delete,
        Command::Snapshot | Command::Rollback | Command::Use { .. } => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Outcome, goal, settle};
    use model::Memory;
    use proptest::{prelude::*, sample::select};

    const COMMANDS: [Command; 11] = [
        Command::Hibernate,
        Command::Wake,
        Command::Pause,
        Command::Unpause,
        Command::Stop,
        Command::Start,
        Command::Delete,
        Command::Use { start: false },
        Command::Use { start: true },
        Command::Snapshot,
        Command::Rollback,
    ];

    fn at(state: State, operation: Option<OperationKind>) -> Standing {
        Standing { state, operation, ephemeral: false, paused_by_idleness: false }
    }

    #[test]
    fn every_command_in_every_state() {
        use Decision::{Accept as A, Already as Y, Deny as D};
        use OperationKind as K;
        use Reason as R;
        // In the order of COMMANDS.
        let (s, r) = (A(K::Snapshot), A(K::Rollback));
        let table: [(State, [Decision; 11]); 7] = [
            (State::Creating, {
                let d = D(R::Creating);
                [d, d, d, d, d, d, A(K::Delete), d, d, d, d]
            }),
            (State::Running, [A(K::Hibernate), Y, A(K::Pause), Y, A(K::Stop), Y, A(K::Delete), Y, Y, s, r]),
            (State::Paused, {
                let p = D(R::Paused);
                [A(K::Hibernate), p, Y, A(K::Unpause), A(K::Stop), p, A(K::Delete), p, p, s, r]
            }),
            (State::Hibernated, {
                let n = D(R::NotRunning);
                [Y, A(K::Wake), n, n, A(K::Stop), D(R::Hibernated), A(K::Delete), A(K::Wake), A(K::Wake), s, r]
            }),
            (State::Stopped, {
                let n = D(R::NotRunning);
                [n, D(R::NoMemorySnapshot), n, n, Y, A(K::Start), A(K::Delete), n, A(K::Start), s, r]
            }),
            (State::Failed, {
                let f = D(R::Failed);
                [f, f, f, f, f, f, A(K::Delete), f, f, f, f]
            }),
            (State::Deleted, {
                let d = D(R::Deleted);
                [d, d, d, d, d, d, Y, d, d, d, d]
            }),
        ];
        for (state, row) in table {
            for (command, expected) in COMMANDS.into_iter().zip(row) {
                assert_eq!(decide(at(state, None), command), expected, "{command:?} in {state}");
            }
        }
    }

    #[test]
    fn what_is_under_way_is_joined_waited_for_or_overruled() {
        use Decision::{Accept, Already, Deny, Join, Wait};
        use OperationKind as K;
        let cases = [
            (State::Hibernated, K::Wake, Command::Wake, Join),
            (State::Hibernated, K::Wake, Command::Use { start: false }, Join),
            (State::Hibernated, K::Wake, Command::Hibernate, Wait),
            (State::Running, K::Hibernate, Command::Hibernate, Join),
            (State::Running, K::Hibernate, Command::Use { start: false }, Wait),
            (State::Running, K::Hibernate, Command::Wake, Wait),
            (State::Running, K::Stop, Command::Use { start: false }, Wait),
            (State::Creating, K::Create, Command::Use { start: false }, Join),
            (State::Creating, K::Create, Command::Delete, Accept(K::Delete)),
            (State::Running, K::Recapture, Command::Use { start: false }, Join),
            (State::Running, K::Recapture, Command::Wake, Wait),
            (State::Running, K::Recapture, Command::Unpause, Wait),
            (State::Running, K::Recapture, Command::Start, Wait),
            (State::Running, K::Recapture, Command::Hibernate, Wait),
            (State::Running, K::Recapture, Command::Stop, Wait),
            (State::Running, K::Recapture, Command::Delete, Accept(K::Delete)),
            // It stays paused, and whether that is in the way is decided then.
            (State::Paused, K::Recapture, Command::Use { start: false }, Wait),
            (State::Paused, K::Recapture, Command::Unpause, Wait),
            // A snapshot is in nobody's way: only what would change the session waits for its end.
            (State::Running, K::Snapshot, Command::Use { start: false }, Already),
            (State::Running, K::Snapshot, Command::Wake, Already),
            (State::Running, K::Snapshot, Command::Snapshot, Wait),
            (State::Running, K::Snapshot, Command::Rollback, Wait),
            (State::Running, K::Snapshot, Command::Hibernate, Wait),
            (State::Running, K::Snapshot, Command::Pause, Wait),
            (State::Running, K::Snapshot, Command::Delete, Accept(K::Delete)),
            (State::Paused, K::Snapshot, Command::Use { start: false }, Deny(Reason::Paused)),
            (State::Paused, K::Snapshot, Command::Unpause, Wait),
            (State::Hibernated, K::Snapshot, Command::Use { start: false }, Wait),
            (State::Hibernated, K::Snapshot, Command::Hibernate, Already),
            (State::Stopped, K::Snapshot, Command::Wake, Deny(Reason::NoMemorySnapshot)),
            (State::Stopped, K::Snapshot, Command::Start, Wait),
            (State::Running, K::Hibernate, Command::Snapshot, Wait),
            (State::Running, K::Rollback, Command::Rollback, Wait),
            (State::Running, K::Rollback, Command::Snapshot, Wait),
            (State::Running, K::Rollback, Command::Use { start: false }, Wait),
            (State::Running, K::Rollback, Command::Stop, Wait),
            (State::Stopped, K::Rollback, Command::Wake, Wait),
            (State::Running, K::Rollback, Command::Delete, Accept(K::Delete)),
            (State::Running, K::Delete, Command::Snapshot, Deny(Reason::Deleted)),
            (State::Running, K::Delete, Command::Delete, Join),
            (State::Running, K::Delete, Command::Use { start: true }, Deny(Reason::Deleted)),
        ];
        for (state, pending, command, expected) in cases {
            assert_eq!(decide(at(state, Some(pending)), command), expected, "{command:?} during {pending} in {state}");
        }
    }

    #[test]
    fn what_is_ephemeral_is_never_stored_and_what_idleness_paused_is_no_hindrance() {
        let ephemeral = Standing { ephemeral: true, ..at(State::Running, None) };
        for command in [Command::Hibernate, Command::Snapshot, Command::Rollback] {
            assert_eq!(decide(ephemeral, command), Decision::Deny(Reason::Ephemeral));
        }
        let idle = Standing { paused_by_idleness: true, ..at(State::Paused, None) };
        for command in [Command::Use { start: false }, Command::Wake, Command::Start] {
            assert_eq!(decide(idle, command), Decision::Accept(OperationKind::Unpause));
        }
        for (command, kind) in [
            (Command::Hibernate, OperationKind::Hibernate),
            (Command::Snapshot, OperationKind::Snapshot),
            (Command::Rollback, OperationKind::Rollback),
        ] {
            assert_eq!(decide(idle, command), Decision::Accept(kind));
        }
        let during_snapshot = Standing { operation: Some(OperationKind::Snapshot), ..idle };
        assert_eq!(decide(during_snapshot, Command::Use { start: false }), Decision::Wait);
    }

    fn command() -> impl Strategy<Value = Command> {
        select(&COMMANDS[..])
    }

    proptest! {
        /// Whatever is asked in whatever order, with operations ending well or badly: a session is never used without a
        /// sandbox, memory is never claimed that isn't there, and a final state is final.
        #[test]
        fn a_life_is_legal(
            steps in prop::collection::vec((command(), any::<bool>(), any::<bool>(), prop::option::of(any::<bool>())), 1..60),
        ) {
            let (mut state, mut memory) = (State::Running, Memory::Live);
            for (command, well, spent, supervisor_dies) in steps {
                if let Some(taken_over) = supervisor_dies.filter(|_| state.has_sandbox()) {
                    let outcome = if taken_over { Outcome::Done } else { Outcome::Failed { memory_spent: spent } };
                    let after = settle(OperationKind::Recapture, state, memory, outcome);
                    prop_assert_eq!((after.state, after.memory), (state, memory), "it goes on, or its end is told for itself");
                    if !taken_over {
                        (state, memory) = (State::Stopped, Memory::Lost);
                    }
                }
                let before = state;
                match decide(at(state, None), command) {
                    Decision::Accept(kind) => {
                        let outcome = if well { Outcome::Done } else { Outcome::Failed { memory_spent: spent } };
                        let settled = settle(kind, state, memory, outcome);
                        (state, memory) = (settled.state, settled.memory);
                        if well {
                            prop_assert_eq!(state, goal(kind, before));
                        }
                        if kind == OperationKind::Rollback && well && spent {
                            // The snapshot has memory, and the session gets it in the same commit.
                            (state, memory) = (State::Hibernated, Memory::Saved);
                        }
                    }
                    Decision::Already => {
                        if matches!(command, Command::Use { .. } | Command::Wake) {
                            prop_assert_eq!(state, State::Running);
                        }
                    }
                    Decision::Deny(_) => {}
                    Decision::Join | Decision::Wait => prop_assert!(false, "nothing is under way"),
                }
                prop_assert_eq!(state.has_sandbox(), memory == Memory::Live);
                prop_assert_eq!(state == State::Hibernated, memory == Memory::Saved);
                if before == State::Deleted {
                    prop_assert_eq!(state, State::Deleted);
                }
            }
        }

        /// A command that was carried out well is so already, or joins nothing, when it comes again.
        #[test]
        fn a_command_can_be_repeated(state in select(State::ALL), command in command()) {
            let memory = match state {
                s if s.has_sandbox() => Memory::Live,
                State::Hibernated => Memory::Saved,
                _ => Memory::None,
            };
            if let Decision::Accept(kind) = decide(at(state, None), command) {
                prop_assert_eq!(decide(at(state, Some(kind)), Command::Delete) == Decision::Join, kind == OperationKind::Delete);
                let after = settle(kind, state, memory, Outcome::Done);
                // Each snapshot and each way back is a new one.
                let again = if matches!(command, Command::Snapshot | Command::Rollback) {
                    Decision::Accept(kind)
                } else {
                    Decision::Already
                };
                prop_assert_eq!(decide(at(after.state, None), command), again);
            }
        }

        /// A snapshot under way answers like a session at rest, but for what would change the session under it.
        #[test]
        fn a_snapshot_is_in_the_way_of_changes_only(state in select(State::ALL), command in command(), idle in any::<bool>()) {
            let standing = Standing { paused_by_idleness: idle && state == State::Paused, ..at(state, None) };
            let during = decide(Standing { operation: Some(OperationKind::Snapshot), ..standing }, command);
            match decide(standing, command) {
                Decision::Accept(OperationKind::Delete) => prop_assert_eq!(during, Decision::Accept(OperationKind::Delete)),
                Decision::Accept(_) => prop_assert_eq!(during, Decision::Wait),
                answer => prop_assert_eq!(during, answer),
            }
        }
    }
}
