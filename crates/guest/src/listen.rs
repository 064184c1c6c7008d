//! Unix sockets inside on which the guest listens: made for everyone, and made again where somebody has removed them.

use crate::ready::{For, Watched};
use std::{
    fs::{self, Permissions},
    io,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    time::Duration,
};

/// How often to see whether somebody has removed a socket.
const LOOK: Duration = Duration::from_secs(5);

/// Listens at `path` for as long as the process lives, with a task of `answer`'s for each caller.
pub async fn serve<F: Future<Output = ()> + 'static>(path: &str, answer: impl Fn(Watched<UnixStream>) -> F) {
    let mut told = false;
    loop {
        match listen(path) {
            Ok(listener) => {
                told = false;
                accept(path, &listener, &answer).await;
            }
            Err(error) if !told => {
                told = true;
                log!("{path}: {error}");
            }
            Err(_) => {}
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn listen(path: &str) -> io::Result<Watched<UnixListener>> {
    if let Some(dir) = Path::new(path).parent() {
        fs::create_dir_all(dir)?;
    }
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    listener.set_nonblocking(true)?;
    Watched::new(listener)
}

async fn accept<F: Future<Output = ()> + 'static>(
    path: &str,
    listener: &Watched<UnixListener>,
    answer: &impl Fn(Watched<UnixStream>) -> F,
) {
    loop {
        match tokio::time::timeout(LOOK, next_caller(listener)).await {
            Ok(Ok(stream)) => drop(tokio::task::spawn_local(answer(stream))),
            Ok(Err(error)) => {
                log!("{path}: {error}");
                return;
            }
            Err(_) if !Path::new(path).exists() => return,
            Err(_) => {}
        }
    }
}

/// Waits for the next connection.
async fn next_caller(listener: &Watched<UnixListener>) -> io::Result<Watched<UnixStream>> {
    loop {
        listener.ready(For::Reading).await;
        match listener.try_io(For::Reading, UnixListener::accept) {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                return Watched::new(stream);
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
}
