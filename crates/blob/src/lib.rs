//! A content-addressed repository of chunks, in a local folder or in any S3-compatible store.
//!
//! Chunks are named by the hash of their contents, stored once however often they are written, compressed, encrypted where
//! that is wanted, and verified at every read. Manifests are small objects with names that tell what belongs together;
//! chunks that no manifest needs any more are collected. This crate knows no sessions, and not what a manifest says.
//!
//! ```text
//! config           what the repository is: its id, whether it is encrypted
//! lock             which server writes here
//! keys/ID          the master key, wrapped under a key of the owner
//! packs/xx/PACK    chunks, many in one object, and a trailer that names them
//! index/ID         the trailers of many packs, to open quickly
//! manifests/NAME   what callers begin to read from
//! ```
//!
//! Every object is written whole and never changed, but for the lock. Packs come first, then manifests, so nothing refers
//! to what isn't there; `collect` has the order for the other direction. Whatever is cut off leaves packs that nothing
//! refers to: the next upload finds their chunks and goes on, or the next collection removes them.
//!
//! - [`Repository`]: open, [`Repository::get`], [`Repository::read_stream`], [`Repository::check`], [`Repository::usage`].
//! - [`Writer`]: chunks and streams in, [`Writer::commit`] at the end.
//! - [`Mark`] and [`Repository::collect`]: garbage out.
//! - [`Chunking`]: where streams are cut, and why there.
//!
//! Every promise is held against folders and a real S3 server alike by `conformance` (a feature, for tests).
#![cfg_attr(test, allow(clippy::unwrap_used))]

#[cfg(feature = "conformance")]
pub mod conformance;

mod batch;
mod block;
mod cache;
mod check;
mod chunking;
mod classify;
mod codec;
mod collect;
mod config;
mod crypto;
mod envelope;
mod error;
mod id;
mod index;
mod index_objects;
mod key;
mod location;
mod lock;
mod manifest;
mod mark;
mod pack;
mod reader;
mod repository;
mod store;
mod stream;
mod walk;
mod writer;

pub use block::MAX_CHUNK;
pub use check::{Damage, Progress, Usage};
pub use chunking::Chunking;
pub use collect::Collected;
pub use error::Error;
pub use id::{ChunkId, HashIdError};
pub use key::KeySource;
pub use location::{Location, S3};
pub use manifest::MAX_MANIFEST;
pub use mark::Mark;
pub use repository::{Access, Options, Repository};
pub use stream::{Entry, Root, StreamRef};
pub use writer::{Writer, Written};
