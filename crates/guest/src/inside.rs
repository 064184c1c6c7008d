//! The guest's socket inside the sandbox, for `sudo`, `su`, `systemctl`.

use crate::{
    child,
    guest::Guest,
    listen,
    program::{self, Setting},
    ready::{For, Shared, Watched},
    shims::{Answer, Question, SOCKET},
    sys::{self, Status},
};
use model::ServiceName;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    rc::Rc,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use wire::{Code, WireError, records::Program};

/// Longest question: a program with its environment.
const LONGEST: usize = 4 * 1024 * 1024;

/// Listens for as long as the process lives.
pub async fn serve(guest: Rc<Guest>) {
    let answer_one = |stream| {
        let guest = guest.clone();
        async move {
            // A caller that hangs up early isn't worth a line.
            let _ = answer(guest, stream).await;
        }
    };
    listen::serve(SOCKET, answer_one).await;
}

async fn answer(guest: Rc<Guest>, stream: Watched<UnixStream>) -> io::Result<()> {
    let caller = rustix::net::sockopt::socket_peercred(stream.get_ref())?.pid.as_raw_pid();
    let caller = u32::try_from(caller).ok();
    let (first, fds) = first_piece(&stream).await?;
    let stream = Rc::new(stream);
    let (read, mut write) = (Shared(stream.clone()), Shared(stream));
    let mut reader = BufReader::new(tokio::io::AsyncReadExt::chain(io::Cursor::new(first), read));
    let mut line = String::new();
    let mut limited = tokio::io::AsyncReadExt::take(&mut reader, LONGEST as u64);
    limited.read_line(&mut line).await?;
    let answer = match serde_json::from_str(&line)? {
        Question::Ping => Answer::Done,
        Question::Services => Answer::Services { items: guest.service_records() },
        Question::Service { action, name } => match service(&guest, &action, name).await {
            Ok(()) => Answer::Done,
            Err(error) => failed(&error),
        },
        Question::Run { program } => match run(&guest, program, fds, caller).await {
            Ok((pid, status)) => {
                let mut line = String::new();
                let mut status = std::pin::pin!(status);
                loop {
                    tokio::select! {
                        ended = &mut status => {
                            let status = ended.unwrap_or(Status { exit_code: None, signal: None });
                            break Answer::Ended { exit_code: status.exit_code, signal: status.signal };
                        }
                        more = reader.read_line(&mut line) => {
                            match (more, serde_json::from_str(&line)) {
                                (Ok(1..), Ok(Question::Signal { signal: signal @ 1..=64 })) => drop(sys::kill(-(pid as i32), signal)),
                                (Ok(1..), _) => {}
                                _ => {
                                    // The shim was killed: nobody waits for the program any more.
                                    let _ = sys::kill(-(pid as i32), libc::SIGHUP);
                                    return Ok(());
                                }
                            }
                            line.clear();
                        }
                    }
                }
            }
            Err(error) => failed(&error),
        },
        Question::Signal { .. } => failed(&WireError::new(Code::Invalid, "nothing was started on this connection")),
    };
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    write.write_all(&line).await
}

fn failed(error: &WireError) -> Answer {
    let exit_code = match error.code {
        Code::NotFound => 127,
        Code::NotExecutable => 126,
        _ => 1,
    };
    Answer::Failed { message: error.message.clone(), exit_code }
}

async fn service(guest: &Rc<Guest>, action: &str, name: String) -> Result<(), WireError> {
    let name = ServiceName::try_from(name).map_err(|e| WireError::new(Code::NotFound, e.to_string()))?;
    guest.service_action(&name, action).await
}

/// The first bytes of a question and the descriptors beside them.
async fn first_piece(stream: &Watched<UnixStream>) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    loop {
        stream.ready(For::Reading).await;
        let mut bytes = vec![0; 64 * 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let received = stream.try_io(For::Reading, |stream| {
            let mut pieces = [IoSliceMut::new(&mut bytes)];
            rustix::net::recvmsg(stream, &mut pieces, &mut beside, RecvFlags::CMSG_CLOEXEC).map_err(io::Error::from)
        });
        match received {
            Ok(message) => {
                bytes.truncate(message.bytes);
                let fds =
                    beside.drain().filter_map(|m| if let RecvAncillaryMessage::ScmRights(fds) = m { Some(fds) } else { None });
                return Ok((bytes, fds.flatten().collect()));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Starts a program on the caller's streams, in the caller's work.
async fn run(
    guest: &Rc<Guest>,
    program: Program,
    fds: Vec<OwnedFd>,
    caller: Option<u32>,
) -> Result<(u32, tokio::sync::oneshot::Receiver<Status>), WireError> {
    let [stdin, stdout, stderr] = fds.as_slice() else {
        return Err(WireError::new(Code::Invalid, "three descriptors must come with the question"));
    };
    let user = program::user_of(&program)?;
    let stdio = [stdin.as_raw_fd(), stdout.as_raw_fd(), stderr.as_raw_fd()];
    let marker = program.env.get(program::MARKER).map_or("", String::as_str);
    let (work, cgroup) = guest.works.borrow().of_caller(caller.unwrap_or(0), marker);
    let Some(work) = work else {
        return Err(WireError::new(Code::Invalid, "the caller belongs to nothing that the guest started"));
    };
    let plan = program::plan(
        &program,
        user.as_ref(),
        &Setting { identity: None, is_init: guest.is_init, work: &work, stdio, terminal: false, cgroup },
    )?;
    // On this thread: the cgroup's descriptor must stay what it is until the child is in.
    let started = child::start(&plan);
    match started {
        Ok(pid) => Ok((pid, guest.works.borrow_mut().notify_end(pid))),
        Err(failed) => Err(program::explain(&program, &failed, &plan)),
    }
}
