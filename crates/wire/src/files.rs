//! Requests on files, the same on both hops and for disks that no sandbox has mounted.

use model::Offset;
use serde::{Deserialize, Serialize};

/// What to do with a file. Paths are absolute or relative to `/`, UTF-8, without NUL; links in
/// them are followed inside the session's root only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum FileRequest {
    /// Answers [`FileReply::Meta`]. A link itself where `follow` is false.
    Stat {
        path: String,
        follow: bool,
    },
    /// Streams JSON lines, one `FileMeta` each, the directory's own entries first. `depth` 1 is
    /// the directory's entries.
    List {
        path: String,
        depth: u32,
    },
    /// Answers [`FileReply::Meta`], then streams the bytes from `offset`, `length` at most.
    Read {
        path: String,
        offset: Offset,
        length: Option<u64>,
    },
    /// Takes a stream of bytes; the file is replaced by rename once all have come and are synced.
    /// A stream that is reset leaves the old file. Answers [`FileReply::Done`] after the end.
    Write {
        path: String,
        mode: Option<u32>,
        parents: bool,
    },
    Mkdir {
        path: String,
        parents: bool,
    },
    Move {
        from: String,
        to: String,
    },
    Remove {
        path: String,
        recursive: bool,
    },
    /// Streams a tar of a file or directory; names inside begin with its last component.
    Archive {
        path: String,
    },
    /// Takes a stream that is a tar and unpacks it into the directory `path`, made where missing.
    Unpack {
        path: String,
    },
    /// Streams JSON lines [`WatchEvent`] until the stream is reset.
    Watch {
        path: String,
        recursive: bool,
    },
}

impl FileRequest {
    /// True where the requester sends a stream of bytes.
    pub fn takes_bytes(&self) -> bool {
        matches!(self, FileRequest::Write { .. } | FileRequest::Unpack { .. })
    }

    /// True where the answer is followed by a stream of bytes.
    pub fn gives_bytes(&self) -> bool {
        use FileRequest as F;
        matches!(self, F::List { .. } | F::Read { .. } | F::Archive { .. } | F::Watch { .. })
    }

    /// The path that is changed, read or watched; for a move the new one.
    pub fn path(&self) -> &str {
        use FileRequest as F;
        match self {
            F::Stat { path, .. } | F::List { path, .. } | F::Read { path, .. } | F::Write { path, .. } => path,
            F::Mkdir { path, .. } | F::Remove { path, .. } | F::Archive { path } | F::Unpack { path } => path,
            F::Watch { path, .. } => path,
            F::Move { to, .. } => to,
        }
    }

    /// What is done, in a word.
    pub fn name(&self) -> &'static str {
        use FileRequest as F;
        match self {
            F::Stat { .. } => "stat",
            F::List { .. } => "list",
            F::Read { .. } => "read",
            F::Write { .. } => "write",
            F::Mkdir { .. } => "mkdir",
            F::Move { .. } => "move",
            F::Remove { .. } => "remove",
            F::Archive { .. } => "archive",
            F::Unpack { .. } => "unpack",
            F::Watch { .. } => "watch",
        }
    }

    /// True where the disk is changed.
    pub fn writes(&self) -> bool {
        use FileRequest as F;
        matches!(self, F::Write { .. } | F::Mkdir { .. } | F::Move { .. } | F::Remove { .. } | F::Unpack { .. })
    }
}

/// The answer to a [`FileRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "r", rename_all = "snake_case")]
pub enum FileReply {
    Done,
    Meta {
        meta: model::FileMeta,
    },
    /// The stream of bytes follows.
    Streaming,
}

/// A change seen by a watch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    /// `created`, `modified`, `removed`, `moved_from`, `moved_to`, or `overflow` (events were lost:
    /// look again).
    pub kind: String,
    pub path: String,
    pub is_dir: bool,
}
