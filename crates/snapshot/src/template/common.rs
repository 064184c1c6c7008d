//! What the built-in templates have in common, whatever machine they are made on.

use super::{TemplateError, io_error};
use crate::fsutil;
use std::{fs, os::unix::fs::PermissionsExt, path::Path};

/// Directories of a root tree with their modes; what is in them on a live machine belongs to that machine.
const SKELETON: &[(&str, u32)] = &[
    ("boot", 0o755),
    ("dev", 0o755),
    ("etc/default", 0o755),
    ("home", 0o755),
    ("media", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o755),
    ("root", 0o700),
    ("run", 0o755),
    ("srv", 0o755),
    ("sys", 0o755),
    ("tmp", 0o1777),
    ("var/backups", 0o755),
    ("var/cache/apt/archives/partial", 0o755),
    ("var/lib/apt/lists/partial", 0o755),
    ("var/lib/dpkg", 0o755),
    ("var/lib/misc", 0o755),
    ("var/local", 0o755),
    ("var/log/apt", 0o755),
    ("var/mail", 0o755),
    ("var/opt", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
];

const FILES: &[(&str, &str)] = &[
    // Empty: the guest gives each session its own.
    ("etc/machine-id", ""),
    ("etc/hostname", "dormouse\n"),
    ("etc/hosts", "127.0.0.1 localhost\n127.0.1.1 dormouse\n::1 localhost ip6-localhost ip6-loopback\n"),
    ("etc/default/locale", "LANG=C.UTF-8\n"),
    // The sandbox is the isolation that a virtual environment would be for.
    ("etc/pip.conf", "[global]\nbreak-system-packages = true\nroot-user-action = ignore\n"),
];

/// Makes the directories that every root tree has, and the files that are the same in every built-in template.
pub(super) fn write_common(root: &Path) -> Result<(), TemplateError> {
    for (name, mode) in SKELETON {
        let path = root.join(name);
        fsutil::ensure_dir(&path, 0o755)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(*mode)))
            .map_err(io_error("create", &path))?;
    }
    FILES.iter().try_for_each(|(name, content)| write(root, name, content))
}

/// Writes one file of the tree; what stood there is replaced, not followed.
pub(super) fn write(root: &Path, name: &str, content: &str) -> Result<(), TemplateError> {
    let path = root.join(name);
    fsutil::write_atomic(&path, content.as_bytes(), 0o644).map_err(io_error("write", &path))
}
