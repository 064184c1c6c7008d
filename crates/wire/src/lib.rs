//! What guest, supervisor and server say to each other, and how it is framed.
//!
//! Two hops, one frame format ([`frame`]):
//! - [`guest`]: supervisor and guest, multiplexed over the sandbox's standard input and output.
//!   Bytes travel as (stream, offset) and are kept by their sender until acknowledged ([`window`]).
//! - [`control`]: server and supervisor, over a Unix socket, one request at a time per connection.
//!
//! Beside them, [`terminal`]: what a terminal and its viewers say, passed on from the supervisor to the client as it is.
//!
//! Evolution: control messages are JSON objects. A reader ignores fields that it doesn't know and
//! fills those that are missing with defaults, so that a supervisor can talk to every older guest
//! and a server to every older supervisor. A field never changes its meaning.
//!
//! This crate does no I/O and knows no clock.

pub mod control;
pub mod error;
pub mod facts;
pub mod files;
pub mod frame;
pub mod guest;
pub mod layout;
pub mod network;
pub mod records;
pub mod terminal;
pub mod window;

pub use error::{Code, WireError};
pub use frame::{Decoder, Frame, FrameError, StreamId};
