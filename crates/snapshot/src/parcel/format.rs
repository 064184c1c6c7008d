//! A tree as a stream of bytes.
//!
//! ```text
//! magic, format u32
//! 1 directory   name                      all that follows lies in it, up to
//! 2 end         attributes                of the directory itself; that of the root is the last of all
//! 3 file        name, size u64, pieces, attributes
//! 4 symlink     name, target, attributes
//! 5 FIFO        name, attributes
//! 6 whiteout    name
//! 7 link        name, back u64            one more name of the back-th file, symlink or FIFO before it
//!
//! piece         hole u64, data u64, so many bytes        until holes and data are `size`
//! attributes    mode u32, owner u32, group u32, seconds i64, nanoseconds u32, count u16, each: name, length u32, value
//! name          length u8, bytes          target: length u16, bytes
//! ```
//! Numbers are little-endian. In a directory come first those that are no directories, then those that are, both by name.
//!
//! Nothing in it is counted from the beginning: whatever is added in one place leaves the bytes of all others as they were,
//! and so their chunks. Attributes come behind what they are of, since writing to a file takes its capabilities away, and
//! filling a directory changes its times; so neither side has to remember any.
//!
//! A whiteout is its name and nothing else. Whom it belongs to, and since when, nobody sees in a mounted disk, and two
//! captures of one disk give it different times.

use crate::layer::xattr::Attribute;
use rustix::fs::Stat;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

pub(super) const MAGIC: &[u8; 16] = b"dormouse-tree\n\0\0";
pub(super) const FORMAT: u32 = 1;

pub(super) const DIRECTORY: u8 = 1;
pub(super) const END: u8 = 2;
pub(super) const FILE: u8 = 3;
pub(super) const SYMLINK: u8 = 4;
pub(super) const FIFO: u8 = 5;
pub(super) const WHITEOUT: u8 = 6;
pub(super) const LINK: u8 = 7;

/// The kernel's limits: for a name (`NAME_MAX`), a symlink's target (`PATH_MAX`), an attribute's value (`XATTR_SIZE_MAX`).
pub(super) const TARGET_MAX: usize = 4095;
pub(super) const VALUE_MAX: usize = 64 << 10;
/// The names of all attributes of a file together are 64 KiB at most (`XATTR_LIST_MAX`), and none is shorter than this.
pub(super) const ATTRIBUTES_MAX: usize = (64 << 10) / 6;

pub(super) fn head(out: &mut Vec<u8>) {
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&FORMAT.to_le_bytes());
}

/// `None` for a name that no file system of ours has.
pub(super) fn name(out: &mut Vec<u8>, name: &OsStr) -> Option<()> {
    out.push(u8::try_from(name.len()).ok().filter(|length| *length > 0)?);
    out.extend_from_slice(name.as_bytes());
    Some(())
}

pub(super) fn target(out: &mut Vec<u8>, target: &[u8]) -> Option<()> {
    out.extend_from_slice(&u16::try_from(target.len()).ok()?.to_le_bytes());
    out.extend_from_slice(target);
    Some(())
}

/// Extended attributes in the order of their names: file systems list them as they like.
pub(super) fn attributes(out: &mut Vec<u8>, stat: &Stat, mut extended: Vec<Attribute>) -> Option<()> {
    let nanoseconds = u32::try_from(stat.st_mtime_nsec).ok()?;
    for number in [stat.st_mode & 0o7777, stat.st_uid, stat.st_gid] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out.extend_from_slice(&stat.st_mtime.to_le_bytes());
    out.extend_from_slice(&nanoseconds.to_le_bytes());
    out.extend_from_slice(&u16::try_from(extended.len()).ok()?.to_le_bytes());
    extended.sort_unstable();
    for (key, value) in extended {
        name(out, OsStr::from_bytes(key.to_bytes()))?;
        out.extend_from_slice(&u32::try_from(value.len()).ok()?.to_le_bytes());
        out.extend_from_slice(&value);
    }
    Some(())
}

pub(super) fn piece(out: &mut Vec<u8>, hole: u64, data: u64) {
    out.extend_from_slice(&hole.to_le_bytes());
    out.extend_from_slice(&data.to_le_bytes());
}
