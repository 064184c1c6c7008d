//! Where the server listens: a TCP address and a Unix socket.

use super::Settings;
use anyhow::{Context, bail};
use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixStream};

/// Longest path of a socket address (unix(7)), without the NUL at its end.
const MAX_SOCKET_PATH: usize = 107;

/// Connections that wait to be taken.
const BACKLOG: u32 = 1024;

/// Takes the TCP address, and answers nobody yet: what begins before the server is ready has to know it.
///
/// # Errors
/// An address that is taken or can't be had.
pub fn take(settings: &Settings) -> anyhow::Result<TcpSocket> {
    let address = settings.listen;
    let taken = || -> io::Result<TcpSocket> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // As TcpListener::bind does: connections of a server before this one don't keep the address.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(socket)
    };
    taken().with_context(|| format!("can't listen on {address}"))
}

/// Opens both.
///
/// # Errors
/// An address that is taken or can't be had.
pub async fn open(settings: &Settings, tcp: TcpSocket) -> anyhow::Result<(TcpListener, UnixListener)> {
    let tcp = tcp.listen(BACKLOG).with_context(|| format!("can't listen on {}", settings.listen))?;
    let unix = open_unix(&settings.socket, settings.socket_for_all).await?;
    Ok((tcp, unix))
}

async fn open_unix(path: &Path, for_all: bool) -> anyhow::Result<UnixListener> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        bail!("{} can't be a socket's path", path.display());
    };
    let mode = if for_all { 0o755 } else { 0o700 };
    let make = DirBuilder::new().recursive(true).mode(mode).create(parent);
    make.with_context(|| format!("can't make the directory {}", parent.display()))?;
    if for_all {
        // The mode above is cut down by the umask.
        fs::set_permissions(parent, Permissions::from_mode(mode))
            .with_context(|| format!("can't open {} to all", parent.display()))?;
    }
    let directory = File::open(parent).with_context(|| format!("can't open the directory {}", parent.display()))?;
    let short = if path.as_os_str().len() > MAX_SOCKET_PATH {
        PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())).join(name)
    } else {
        path.to_owned()
    };
    remove_leftover(path, &short).await?;
    let listener = UnixListener::bind(&short).with_context(|| format!("can't listen on {}", path.display()))?;
    let mode = if for_all { 0o666 } else { 0o600 };
    fs::set_permissions(path, Permissions::from_mode(mode))
        .with_context(|| format!("can't set the mode of {}", path.display()))?;
    Ok(listener)
}

/// A socket that nobody listens on was left by a server that was killed.
async fn remove_leftover(path: &Path, short: &Path) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("can't look at {}", path.display())),
        Ok(known) if !known.file_type().is_socket() => {
            bail!("{} is there and is no socket; give another --socket", path.display())
        }
        Ok(_) => {}
    }
    if UnixStream::connect(short).await.is_ok() {
        bail!("another server listens on {}; give this one another --socket", path.display());
    }
    fs::remove_file(path).with_context(|| format!("can't remove the old socket {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[tokio::test]
    async fn a_leftover_is_replaced_and_a_living_server_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/server.sock");
        let first = open_unix(&path, false).await.unwrap();
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert!(open_unix(&path, false).await.unwrap_err().to_string().contains("another server"));
        drop(first);
        let _second = open_unix(&path, true).await.unwrap();
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o666, 0o755));
    }

    #[tokio::test]
    async fn a_long_path_and_a_file_in_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("d".repeat(120)).join("dormouse.sock");
        let _listener = open_unix(&long, false).await.unwrap();
        assert!(fs::metadata(&long).unwrap().file_type().is_socket());
        let file = dir.path().join("file");
        fs::write(&file, "mine").unwrap();
        assert!(open_unix(&file, false).await.is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    }
}
