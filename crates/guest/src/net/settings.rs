//! What programs are told, so that they find their way out by themselves.

use std::{fs, io, path::Path};
use wire::network::{RESOLVER, SSH_CONFIG};

const SSH: &str = "Host * !localhost !127.* !::1\n    ProxyCommand /usr/lib/dormouse/dormouse-guest connect %h %p\n";
const ASK_HERE: &str = "nameserver 127.0.0.1\noptions timeout:5 attempts:2\n";

/// The files that are the same in every session. What can't be written is logged and left.
pub fn prepare() {
    for (path, text) in [(RESOLVER, ASK_HERE), (SSH_CONFIG, SSH)] {
        if let Err(error) = ensure_file(Path::new(path), text.as_bytes()) {
            log!("{path}: {error}");
        }
    }
}

/// Leaves a file alone that says it already, and replaces a link, which may lead nowhere here.
pub fn ensure_file(path: &Path, text: &[u8]) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file()) && fs::read(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    // By a name of its own, so that nobody reads half of it.
    let new = path.with_extension("dormouse-new");
    fs::write(&new, text)?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_says_it_already_is_left_alone_and_a_link_is_replaced() {
        let dir = std::env::temp_dir().join(format!("dormouse-settings-{}", std::process::id()));
        let path = dir.join("sub/resolv.conf");
        ensure_file(&path, b"one").unwrap();
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        ensure_file(&path, b"one").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("../nowhere/at/all", &path).unwrap();
        ensure_file(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        fs::remove_dir_all(&dir).unwrap();
    }
}
