//! The mark of a living supervisor: a locked file that names it, and the socket's address.

use model::Generation;
use std::{
    fs::{self, File},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    },
};
use wire::layout::{SessionLayout, SupervisorMark, TakesOver};

/// Holds the session for this process; gone with it, whatever way it ends.
pub struct MarkLock {
    file: File,
    mark: SupervisorMark,
}

impl MarkLock {
    /// Takes the session, or says who has it.
    ///
    /// # Errors
    /// Another supervisor lives, or the files can't be written.
    pub fn take(
        layout: &SessionLayout,
        generation: Generation,
        container: String,
        takes_over: Option<TakesOver>,
    ) -> io::Result<MarkLock> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(layout.run())?;
        let file = File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(layout.mark())?;
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            let holder = fs::read_to_string(layout.mark()).unwrap_or_default();
            return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("another supervisor holds this session: {holder}")));
        }
        let mark = SupervisorMark {
            pid: std::process::id(),
            started_ticks: started_ticks(std::process::id()).unwrap_or(0),
            boot_id: boot_id(),
            generation,
            container,
            sandbox_pids: Vec::new(),
            takes_over,
        };
        let mut lock = MarkLock { file, mark };
        lock.write()?;
        Ok(lock)
    }

    /// Notes the sandbox's processes, for cleaning up after this process should it be killed. It is the session's now.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn note(&mut self, generation: Generation, sandbox_pids: Vec<u32>) -> io::Result<()> {
        (self.mark.generation, self.mark.sandbox_pids, self.mark.takes_over) = (generation, sandbox_pids, None);
        self.write()
    }

    fn write(&mut self) -> io::Result<()> {
        use std::io::Seek;
        let text = serde_json::to_vec(&self.mark)?;
        // In place: the lock is on this very file. A reader that meets half of it reads again.
        self.file.seek(io::SeekFrom::Start(0))?;
        self.file.write_all(&text)?;
        self.file.set_len(text.len() as u64)
    }
}

/// Listens on the session's socket, at whatever depth its directory lies.
///
/// # Errors
/// The socket can't be made.
pub fn listen(layout: &SessionLayout) -> io::Result<tokio::net::UnixListener> {
    // A socket's address has 108 bytes at most; by way of the directory's descriptor it is short.
    let dir = File::open(layout.run())?;
    let name = layout.socket();
    let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let address = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
    match fs::remove_file(layout.socket()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = std::os::unix::net::UnixListener::bind(address)?;
    fs::set_permissions(layout.socket(), fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}

/// When a process started, in clock ticks since boot (proc(5), field 22 of `stat`).
fn started_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name can hold blanks and parentheses: count from its end.
    stat.rsplit_once(") ")?.1.split_whitespace().nth(19)?.parse().ok()
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}
