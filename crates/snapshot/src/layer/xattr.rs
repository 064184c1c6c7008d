//! Extended attributes: which of them a copy of a file keeps.
//!
//! A copy keeps all that programs and the overlay rely on: `user.*`, `trusted.*`, `security.*` (capabilities above all) and
//! access control lists. Of the overlay's own attributes (`trusted.overlay.*`, `fs/overlayfs/overlayfs.h`) it keeps those
//! that say what the layer shows: `opaque`, `redirect`, `whiteout`, whatever is escaped (`trusted.overlay.overlay.*`, from an
//! overlay within the session), and all that this page doesn't name. Left out is what is true of one inode only:
//!
//! - `origin`: a file handle of the lower file that this one was copied up from. In a lower layer, where copies are used,
//!   nobody decodes it; in an upper layer it lends its inode number, which a copy of the layer on another disk would get
//!   wrong, or get EIO for where the handle has become one of another kind of file. But on a directory the *presence* of the
//!   attribute has a meaning: it may contain whiteouts, so they are to be left out when it is listed although it may have
//!   nothing below it (`ovl_get_inode`, `OVL_WHITEOUTS`). The kernel's own word for that is an empty value, "copied up but
//!   origin unknown" (`ovl_get_fh`), so directories keep the attribute with no value.
//! - `impure`: some entry of this directory has an `origin` whose number is to be shown. None has any more.
//! - `nlink`, `upper`: parts of the index, which our overlays are made without.
//! - `uuid`: the identity of one overlay mount. A fork is another.
//! - `security.selinux`, `security.SMACK64*`: labels that the machine's policy gives by place. `security.evm`: a checksum
//!   with the inode's number in it.
//!
//! Metadata-only copies (`metacopy`) are never made by our overlays; where one turns up it is kept, and the kernel goes on
//! refusing it.

use crate::inroot;
use rustix::{fs::XattrFlags, io::Errno};
use std::{
    ffi::{CStr, CString, OsStr},
    os::fd::BorrowedFd,
};

/// The overlay's own name space.
const OVERLAY: &[u8] = b"trusted.overlay.";
pub(super) const OPAQUE: &CStr = c"trusted.overlay.opaque";
pub(super) const REDIRECT: &CStr = c"trusted.overlay.redirect";
pub(super) const WHITEOUT: &CStr = c"trusted.overlay.whiteout";
pub(crate) const ORIGIN: &CStr = c"trusted.overlay.origin";

/// The kernel's limits for a value and for a list of names (xattr(7)).
const VALUE_MAX: usize = 64 << 10;
const NAMES_MAX: usize = 64 << 10;

/// A name and a value.
pub(crate) type Attribute = (CString, Vec<u8>);

/// What becomes of an attribute in a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    Whole,
    Empty,
    Not,
}

/// Decides by the name.
pub(crate) type Rule = fn(&[u8]) -> Kept;

/// Attributes of what is no directory.
pub(crate) fn of_file(name: &[u8]) -> Kept {
    match name.strip_prefix(OVERLAY) {
        Some(b"origin" | b"impure" | b"nlink" | b"upper" | b"uuid") => Kept::Not,
        Some(_) => Kept::Whole,
        None if matches!(name, b"security.selinux" | b"security.evm") || name.starts_with(b"security.SMACK64") => Kept::Not,
        None if [&b"user."[..], b"trusted.", b"security.", b"system.posix_acl_"].iter().any(|p| name.starts_with(p)) => {
            Kept::Whole
        }
        None => Kept::Not,
    }
}

/// Attributes of a directory.
pub(crate) fn of_directory(name: &[u8]) -> Kept {
    if name == ORIGIN.to_bytes() { Kept::Empty } else { of_file(name) }
}

/// Attributes of a directory whose place among layers is another than the original's: none of those that are about it.
pub(super) fn apart_from_layers(name: &[u8]) -> Kept {
    match name.strip_prefix(OVERLAY) {
        Some(own) if !own.starts_with(b"overlay.") => Kept::Not,
        _ => of_file(name),
    }
}

/// Reads and writes attributes, with room for the largest.
#[derive(Debug)]
pub(crate) struct Attributes {
    names: Vec<u8>,
    value: Vec<u8>,
}

impl Attributes {
    pub(crate) fn new() -> Attributes {
        Attributes { names: vec![0; NAMES_MAX], value: vec![0; VALUE_MAX] }
    }

    /// Sets on the symlink `name` in `dir`, which has none yet, what a copy of `from` keeps.
    pub(super) fn copy_to_link(
        &mut self,
        from: BorrowedFd<'_>,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        rule: Rule,
    ) -> rustix::io::Result<()> {
        let path = inroot::handle_path(dir).join(name);
        let kept = self.read(from, rule)?;
        kept.iter().try_for_each(|(name, value)| rustix::fs::lsetxattr(&path, name, value, XattrFlags::empty()))
    }

    /// Gives the file `target` what a copy of `from` keeps and `further` ones, and takes away what else it has.
    pub(super) fn make_equal(
        &mut self,
        from: BorrowedFd<'_>,
        target: BorrowedFd<'_>,
        rule: Rule,
        further: &[Attribute],
    ) -> rustix::io::Result<()> {
        let mut wanted = self.read(from, rule)?;
        wanted.retain(|(name, _)| further.iter().all(|(other, _)| other != name));
        wanted.extend_from_slice(further);
        let present = self.read(target, of_directory)?;
        let path = inroot::handle_path(target);
        for (name, _) in present.iter().filter(|(name, _)| wanted.iter().all(|(other, _)| other != name)) {
            rustix::fs::removexattr(&path, name)?;
        }
        let mut missing = wanted.iter().filter(|attribute| !present.contains(attribute));
        missing.try_for_each(|(name, value)| rustix::fs::setxattr(&path, name, value, XattrFlags::empty()))
    }

    /// What a copy of a file keeps. The handle may be one that nothing was opened with, also of a symlink.
    pub(crate) fn read(&mut self, from: BorrowedFd<'_>, rule: Rule) -> rustix::io::Result<Vec<Attribute>> {
        // Through `/proc` a handle leads to exactly its file; a symlink that was reached like that is not followed.
        let path = inroot::handle_path(from);
        let length = match rustix::fs::listxattr(&path, self.names.as_mut_slice()) {
            Ok(length) => length,
            Err(Errno::OPNOTSUPP) => 0,
            Err(error) => return Err(error),
        };
        let mut found = Vec::new();
        for name in self.names[..length].split_inclusive(|b| *b == 0).filter_map(|n| CStr::from_bytes_with_nul(n).ok()) {
            let value = match rule(name.to_bytes()) {
                Kept::Whole => {
                    let length = rustix::fs::getxattr(&path, name, self.value.as_mut_slice())?;
                    self.value[..length].to_vec()
                }
                Kept::Empty => Vec::new(),
                Kept::Not => continue,
            };
            found.push((name.to_owned(), value));
        }
        Ok(found)
    }
}

/// One attribute of the file that has `name` in `dir`; `None` where it has none of that name.
pub(super) fn value(dir: BorrowedFd<'_>, name: &OsStr, attribute: &CStr) -> rustix::io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; VALUE_MAX];
    match rustix::fs::lgetxattr(inroot::handle_path(dir).join(name), attribute, value.as_mut_slice()) {
        Ok(length) => {
            value.truncate(length);
            Ok(Some(value))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_true_of_one_inode_only_stays_behind() {
        for name in ["trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.overlay.whiteout", "trusted.overlay.protattr"]
        {
            assert_eq!((of_file(name.as_bytes()), of_directory(name.as_bytes())), (Kept::Whole, Kept::Whole), "{name}");
            assert_eq!(apart_from_layers(name.as_bytes()), Kept::Not, "{name}");
        }
        for name in ["user.a", "trusted.a", "security.capability", "system.posix_acl_access", "trusted.overlay.overlay.opaque"] {
            for rule in [of_file, of_directory, apart_from_layers] {
                assert_eq!(rule(name.as_bytes()), Kept::Whole, "{name}");
            }
        }
        for name in ["trusted.overlay.impure", "trusted.overlay.uuid", "security.selinux", "security.evm", "system.nfs4_acl"] {
            for rule in [of_file, of_directory, apart_from_layers] {
                assert_eq!(rule(name.as_bytes()), Kept::Not, "{name}");
            }
        }
        let origin = ORIGIN.to_bytes();
        assert_eq!((of_file(origin), of_directory(origin), apart_from_layers(origin)), (Kept::Not, Kept::Empty, Kept::Not));
    }
}
