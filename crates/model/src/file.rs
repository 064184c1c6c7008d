//! What is known about one file of a session, the same from the guest, from a sleeping disk and in the API.

use crate::{Timestamp, session::snake_enum};
use serde::{Deserialize, Serialize};
use std::path::{Component, Path};

snake_enum! {
    /// What stands at a path. Only `File` can be read as bytes.
    FileType {
        File => "file",
        Dir => "dir",
        Symlink => "symlink",
        Fifo => "fifo",
        Socket => "socket",
        Char => "char",
        Block => "block",
    }
}

impl FileType {
    /// The type in the upper bits of a `st_mode` (inode(7)). Bits that no Linux file has count as a plain file.
    pub fn from_mode(st_mode: u32) -> FileType {
        match st_mode & 0o170_000 {
            0o040_000 => FileType::Dir,
            0o120_000 => FileType::Symlink,
            0o010_000 => FileType::Fifo,
            0o140_000 => FileType::Socket,
            0o020_000 => FileType::Char,
            0o060_000 => FileType::Block,
            _ => FileType::File,
        }
    }
}

/// Whether a symlink in a directory `depth` levels below the top of an archive stays inside, wherever its parts lead:
/// `..` only at the beginning, where it climbs real directories, and no further up than the top. Behind a name, which
/// may be a symlink itself, `..` could lead anywhere.
pub fn link_stays_inside(depth: usize, target: &Path) -> bool {
    if target.as_os_str().is_empty() || target.as_os_str().as_encoded_bytes().contains(&0) {
        return false;
    }
    let mut climbed = 0;
    let mut named = false;
    target.components().all(|part| match part {
        Component::CurDir => true,
        Component::Normal(_) => {
            named = true;
            true
        }
        Component::ParentDir => {
            climbed += 1;
            !named && climbed <= depth
        }
        Component::RootDir | Component::Prefix(_) => false,
    })
}

/// One file, as `stat` tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMeta {
    /// The path in the session's root. Bytes that aren't UTF-8 are shown as U+FFFD.
    pub path: String,
    #[serde(rename = "type")]
    pub kind: FileType,
    pub size_bytes: u64,
    /// The permission bits, with setuid, setgid and sticky: 12 bits, no type.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub modified_at: Timestamp,
    /// Where a symlink points, as it is written; `null` for everything else.
    pub target: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_file_is_told_apart() {
        let cases = [
            (0o100_644, FileType::File),
            (0o040_755, FileType::Dir),
            (0o120_777, FileType::Symlink),
            (0o010_600, FileType::Fifo),
            (0o140_755, FileType::Socket),
            (0o020_666, FileType::Char),
            (0o060_660, FileType::Block),
        ];
        for (mode, kind) in cases {
            assert_eq!(FileType::from_mode(mode), kind, "{mode:o}");
        }
    }

    #[test]
    fn only_links_that_can_not_lead_out_are_kept() {
        let cases = [
            (0, "a", true),
            (0, "./a/b", true),
            (0, "..", false),
            (0, "/etc", false),
            (0, "", false),
            (1, "../a", true),
            (1, "../../a", false),
            (2, "../..", true),
            (2, "a/../b", false),
            (2, "./../../..", false),
        ];
        for (depth, target, inside) in cases {
            assert_eq!(link_stays_inside(depth, Path::new(target)), inside, "{depth} {target}");
        }
    }

    #[test]
    fn the_json_has_the_fields_that_clients_rely_on() {
        let meta = FileMeta {
            path: "/etc/motd".into(),
            kind: FileType::File,
            size_bytes: 3,
            mode: 0o644,
            uid: 0,
            gid: 0,
            modified_at: Timestamp(0),
            target: None,
        };
        let json = r#"{"path":"/etc/motd","type":"file","size_bytes":3,"mode":420,"uid":0,"gid":0,"modified_at":"1970-01-01T00:00:00.000Z","target":null}"#;
        assert_eq!(serde_json::to_string(&meta).unwrap(), json);
        assert_eq!(serde_json::from_str::<FileMeta>(json).unwrap(), meta);
    }
}
