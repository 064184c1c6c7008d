//! What a fresh sandbox lacks to look like a machine.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

/// Lays out `/dev`, `/run` and the places that programs take for granted. What can't be made is logged and left.
pub fn prepare() {
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        if fs::symlink_metadata(link).is_err()
            && let Err(error) = symlink(target, link)
        {
            log!("{link}: {error}");
        }
    }
    for (dir, mode) in [
        ("/run", 0o755),
        ("/run/lock", 0o1777),
        ("/run/dormouse", 0o755),
        ("/tmp", 0o1777),
        ("/var/tmp", 0o1777),
        ("/dev/shm", 0o1777),
    ] {
        ensure_dir(Path::new(dir), mode);
    }
}

fn ensure_dir(dir: &Path, mode: u32) {
    let made = fs::create_dir_all(dir).and_then(|()| fs::set_permissions(dir, Permissions::from_mode(mode)));
    if let Err(error) = made {
        log!("{}: {error}", dir.display());
    }
}
