//! What sandboxes start from and what is left of them when they are gone: templates, disks, pinned binaries, memory images.
//!
//! Everything here is files and mounts on the server's own machine. This crate knows no session state, no store, no
//! async runtime: calls block, and callers put them on a thread that may. Only [`parcel`] is asynchronous, as the blob store
//! is. What stands *in* a template archive, a layer or a session's disk is written by strangers, so it is only ever read and
//! written beneath a root that the kernel enforces (`openat2`, `RESOLVE_IN_ROOT`).
//!
//! - [`template`]: immutable, content-addressed trees, shared by several servers.
//! - [`disk`]: a session's own layer above a template, and how it is mounted.
//! - [`layer`]: disks as they were at one moment, kept and shared.
//! - [`view`]: reading a disk whose session isn't running.
//! - [`extract`]: unpacking archives without trusting them.
//! - [`pin`]: private copies of the programs that a sleeping session needs to wake.
//! - [`image`]: the descriptor of a saved memory.
//! - [`parcel`]: all of these on their way into the blob store and back.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod disk;
pub mod extract;
mod fsutil;
mod hash;
pub mod image;
mod inroot;
pub mod layer;
mod overlay;
pub mod parcel;
pub mod pin;
mod sealed;
pub mod template;
mod tree;
pub mod view;

pub use hash::{Hash, HashError};
