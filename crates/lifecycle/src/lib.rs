//! What may happen to a session, and when: the rules of its life as pure functions.
//!
//! ```text
//! creating -> running <-> paused          running, paused -> hibernated -> running
//!    |        running, paused -> stopped (asked, or its sandbox ended) -> running (memory: lost)
//!    v        hibernated -> stopped (memory given up, by explicit choice only)
//!  failed     any -> deleted
//!            running, paused, hibernated, stopped -> stopped, or hibernated with a snapshot's memory (rollback)
//! ```
//! A change that is under way is an operation, never a state: while one runs, the state is still the one before it.
//!
//! [`decide`] says what becomes of a command, [`settle`] what a session is once an operation has ended, and [`recover`]
//! what a server that comes back does about what it finds. None of them reads a clock, a file or a database; this crate
//! knows no async runtime and no supervisor. [`Clocks`] say what is due when, [`idleness`] whether nothing happens.

mod clock;
mod decide;
mod idle;
mod recover;
mod settle;

pub use clock::{Alarm, Clocks, TIMEOUT_NOTICE, try_again_after};
pub use decide::{Command, Decision, Reason, Standing, decide};
pub use idle::{Idleness, Quiet, idleness};
pub use recover::{Plan, Seen, Sleeper, recover};
pub use settle::{Outcome, Settled, goal, settle, shows_done};
