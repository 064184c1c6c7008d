//! Kernel calls that the standard library doesn't offer, each wrapped once.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};
use tokio::io::unix::AsyncFd;

/// Reads from a raw descriptor.
pub fn read(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the buffer is valid for its length and exclusively borrowed.
    check(unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) })
}

/// Writes to a raw descriptor.
pub fn write(fd: RawFd, buffer: &[u8]) -> io::Result<usize> {
    // SAFETY: the buffer is valid for its length.
    check(unsafe { libc::write(fd, buffer.as_ptr().cast(), buffer.len()) })
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Waits until the descriptor can be read, or is broken.
pub fn wait_readable(fd: RawFd) {
    wait(fd, libc::POLLIN);
}

/// Waits until the descriptor can be written, or is broken.
pub fn wait_writable(fd: RawFd) {
    wait(fd, libc::POLLOUT);
}

fn wait(fd: RawFd, events: i16) {
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one valid pollfd. The bound makes a wake-up that a restore lost harmless.
    unsafe { libc::poll(&raw mut poll, 1, 1000) };
}

/// True where the descriptor is ready now, or broken.
pub fn poll_now(fd: RawFd, events: i16) -> bool {
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one valid pollfd, no waiting.
    unsafe { libc::poll(&raw mut poll, 1, 0) > 0 }
}

/// Makes reads and writes on the descriptor return instead of waiting.
pub fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: plain fcntl on a number; a bad one gives EBADF.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    if unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Registers a descriptor with the runtime, for good: what comes and goes is for [`crate::ready`].
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned, so it stays the same and open until the registration is dropped.
    Ok(unsafe { AsyncFd::register(fd)? })
}

/// A pipe: (reading end, writing end), both closed at exec.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

/// A descriptor that is readable while a child waits to be reaped. Blocks SIGCHLD in the calling thread and in those
/// that it starts; programs get a clean mask again.
pub fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset before use; signalfd returns a fresh descriptor.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

/// How a process ended: an exit code or a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
}

/// The next child that has ended, if there is one.
pub fn reap() -> Option<(u32, Status)> {
    let mut status = 0;
    // SAFETY: status is a valid place for one int.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    let pid = u32::try_from(pid).ok().filter(|pid| *pid > 0)?;
    let exit_code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
    let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
    Some((pid, Status { exit_code, signal }))
}

/// Sends a signal to a process, or to a group where `pid` is negative. A process that is gone is no error.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: a plain call without pointers.
    if unsafe { libc::kill(pid, signal) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) }
}

/// The terminal's size is set; the kernel tells the programs.
pub fn set_window(terminal: BorrowedFd<'_>, cols: u16, rows: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one winsize.
    if unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The process group in the terminal's foreground, asked at its master side.
pub fn foreground_group(terminal: BorrowedFd<'_>) -> Option<i32> {
    let mut group: libc::pid_t = 0;
    // SAFETY: TIOCGPGRP writes one pid.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCGPGRP, &raw mut group) };
    (result == 0 && group > 0).then_some(group)
}

/// Orphans of our children become our children, where we aren't PID 1 anyway.
pub fn become_reaper() {
    if std::process::id() != 1 {
        // SAFETY: a plain call without pointers.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
    }
}
