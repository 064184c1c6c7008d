//! The words of Dormouse as types: ids, states, offsets, sizes and names.
//!
//! This crate is the ground floor. It knows no runtime, no SQL, no HTTP and reads no clock;
//! everything here can be built from values and compared with values.

mod event;
mod file;
mod id;
mod limits;
mod names;
pub mod network;
mod quantity;
mod session;
mod snapshot;
mod work;

pub use event::{Actor, EventType};
pub use file::{FileMeta, FileType, link_stays_inside};
pub use id::{EventSeq, ExecId, Generation, IdError, LayerId, OperationId, SessionId, SnapshotId, TerminalId, TokenId};
pub use limits::TokenLimits;
pub use names::{Key, NameError, PortNumber, ServiceName};
pub use quantity::{ByteSize, DurationError, Offset, Timestamp, parse_bytes, parse_duration};
pub use session::{
    EndReason, HookName, Hooks, IdleAction, IdlePolicy, IdleWhen, Memory, OnTimeout, OperationKind, OperationState, Resources,
    Runtime, State,
};
pub use snapshot::{SnapshotName, SnapshotState};
pub use work::{ExecState, ServiceRestart, ServiceSpec, TerminalState};
