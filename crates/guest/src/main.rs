//! The first program in a session's sandbox: it starts everything else there and answers the supervisor.
//!
//! As PID 1 it reaps orphans, keeps what programs print until the supervisor has it, and goes on where it was when a
//! sleeping session is restored under a new supervisor. On a host, without a sandbox, it does the same for the
//! programs of one session. Called as `sudo`, `su`, `systemctl` or `dormouse-ctl`
//! it asks the running guest (see [`shims`]).

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests may panic"))]

/// Writes a line to standard error, which is the sandbox's log file on the host.
macro_rules! log {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "dormouse-guest: {}", format_args!($($text)*));
    }};
}

mod activity;
mod boot;
mod channel;
mod child;
mod clock;
mod dialogue;
mod figures;
mod files;
mod guest;
mod hub;
mod identity;
mod inside;
mod limits;
mod listen;
mod moments;
mod net;
mod program;
mod pump;
mod ready;
mod services;
mod shims;
mod sys;
mod tree;
mod users;
mod works;

use guest::Guest;
use std::{os::fd::OwnedFd, process::ExitCode, rc::Rc};

fn main() -> ExitCode {
    if let Some(code) = shims::run(std::env::args_os().map(|a| a.to_string_lossy().into_owned())) {
        return code;
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> std::io::Result<()> {
    // Before any thread starts, so that all of them have the signal blocked.
    let children = sys::child_signals()?;
    sys::become_reaper();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(40)
        .thread_stack_size(512 * 1024)
        .build()?;
    let local = tokio::task::LocalSet::new();
    runtime.block_on(local.run_until(serve(children)))
}

async fn serve(children: OwnedFd) -> std::io::Result<()> {
    let guest = Rc::new(Guest::new()?);
    if guest.is_init {
        boot::prepare();
        net::prepare();
        tokio::task::spawn_local(inside::serve(guest.clone()));
        tokio::task::spawn_local(dialogue::serve(guest.clone()));
        tokio::task::spawn_local(activity::look_forever(guest.clone()));
        tokio::task::spawn_local(net::serve(guest.clone()));
        guest.works.borrow().limits.enforce()?;
    }
    let mut incoming = channel::start_reader()?;
    tokio::task::spawn_local(channel::write_forever(guest.clone()));
    tokio::task::spawn_local(reap_forever(guest.clone(), ready::Watched::new(children)?));
    tokio::task::spawn_local(guest.clone().enforce_timeouts());
    tokio::task::spawn_local(figures::watch_unsaveable(guest.clone()));
    while let Some(batch) = incoming.recv().await {
        for one in batch {
            guest.handle(one).await;
        }
    }
    Ok(())
}

/// Waits for children to end, for as long as the process lives.
async fn reap_forever(guest: Rc<Guest>, children: ready::Watched) {
    loop {
        children.ready(ready::For::Reading).await;
        let mut buffer = [0u8; 1024];
        let read = children.try_io(ready::For::Reading, |fd| sys::read(std::os::fd::AsRawFd::as_raw_fd(fd), &mut buffer));
        if read.is_ok() {
            guest.reap_all();
        }
    }
}
