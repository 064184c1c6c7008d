//! Asking the guest over its socket inside: one line of JSON each way, descriptors beside it.

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, BufRead, BufReader, IoSlice, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
};
use wire::records::{Program, ServiceRecord};

/// Where the guest listens, on a tmpfs.
pub const SOCKET: &str = "/run/dormouse/guest.sock";

/// What a shim asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "q", rename_all = "snake_case")]
pub enum Question {
    Ping,
    /// Start a program on the asker's standard streams, which come beside the question.
    Run {
        program: Program,
    },
    /// To the program that this connection has started.
    Signal {
        signal: i32,
    },
    Service {
        action: String,
        name: String,
    },
    Services,
}

/// What the guest answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "a", rename_all = "snake_case")]
pub enum Answer {
    Done,
    Ended {
        exit_code: Option<i32>,
        signal: Option<i32>,
    },
    Services {
        items: Vec<ServiceRecord>,
    },
    /// `exit_code` is what a shell would give: 126, 127 or 1.
    Failed {
        message: String,
        exit_code: u8,
    },
}

/// Asks and waits for the answer.
///
/// # Errors
/// Where the guest can't be reached or hangs up.
pub fn question(question: &Question) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(SOCKET)?;
    send(&mut stream, question)?;
    answer(&mut BufReader::new(&stream))
}

fn send(stream: &mut UnixStream, question: &Question) -> io::Result<()> {
    let mut line = serde_json::to_vec(question)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn answer(reader: &mut impl BufRead) -> io::Result<Answer> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the guest hung up"));
    }
    Ok(serde_json::from_str(&line)?)
}

/// Has a program run on our standard streams, passes signals on, and waits for its end.
///
/// # Errors
/// As [`question`].
pub fn run(program: Program) -> io::Result<Answer> {
    let signals = caught_signals()?;
    let mut stream = UnixStream::connect(SOCKET)?;
    let mut line = serde_json::to_vec(&Question::Run { program })?;
    line.push(b'\n');
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let fds = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    beside.push(SendAncillaryMessage::ScmRights(&fds));
    let sent = rustix::net::sendmsg(&stream, &[IoSlice::new(&line)], &mut beside, SendFlags::empty())?;
    stream.write_all(&line[sent..])?;
    loop {
        let mut polls = [poll_in(signals.as_raw_fd()), poll_in(stream.as_raw_fd())];
        // SAFETY: two valid pollfds.
        unsafe { libc::poll(polls.as_mut_ptr(), 2, -1) };
        if polls[0].revents != 0 {
            let mut info = [0u8; std::mem::size_of::<libc::signalfd_siginfo>()];
            if crate::sys::read(signals.as_raw_fd(), &mut info).is_ok() {
                // The number is the structure's first field.
                let signal = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
                send(&mut stream, &Question::Signal { signal })?;
            }
        }
        if polls[1].revents != 0 {
            return answer(&mut BufReader::new(&stream));
        }
    }
}

fn poll_in(fd: i32) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

fn caught_signals() -> io::Result<OwnedFd> {
    let wanted = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH];
    // SAFETY: the set is initialised by sigemptyset before use; signalfd returns a fresh descriptor.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in wanted {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}
