//! The few steps between clone and exec, in a child that borrows the guest's memory.
//!
//! `fork` copies the page tables of the whole guest, which costs 10–20 ms in gVisor; a child made with
//! `CLONE_VM | CLONE_VFORK` costs 5–8 ms, less than `posix_spawn` and less than children forked ahead (measured on
//! gVisor 20240729). The price: until exec the child must not allocate, lock or touch what the guest relies on. So
//! everything is prepared in a [`Plan`] before, and the child makes plain system calls only.

use std::{
    ffi::CString,
    io,
    os::fd::RawFd,
    ptr,
    sync::atomic::{AtomicI32, Ordering},
};

const STACK: usize = 64 * 1024;
const CAP_NET_ADMIN: libc::c_ulong = 12;
const CAP_SYS_ADMIN: libc::c_ulong = 21;

/// Everything the child needs, made ready.
#[derive(Debug)]
pub struct Plan {
    pub argv: Vec<CString>,
    pub envp: Vec<CString>,
    /// Files to try in turn, as a shell goes through `PATH`.
    pub candidates: Vec<CString>,
    pub cwd: CString,
    /// `None`: stay who we are.
    pub user: Option<Credentials>,
    /// Become standard input, output and error.
    pub stdio: [RawFd; 3],
    /// Standard input is a terminal that becomes the controlling one.
    pub terminal: bool,
    /// An open `cgroup.procs` to move into.
    pub cgroup: Option<RawFd>,
    /// Give up the capabilities that only the guest may have.
    pub drop_capabilities: bool,
}

#[derive(Debug, Clone)]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// Where starting a program failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Clone,
    Terminal,
    Stdio,
    User,
    Directory,
    Exec,
}

/// A program that could not be started.
#[derive(Debug)]
pub struct StartError {
    pub stage: Stage,
    pub error: io::Error,
}

struct Shared<'a> {
    plan: &'a Plan,
    argv: *const *const libc::c_char,
    envp: *const *const libc::c_char,
    /// `sh FILE ARGS…`, with the file's place to be filled in.
    script: *mut *const libc::c_char,
    stage: AtomicI32,
    errno: AtomicI32,
}

/// Starts a program; returns once it has begun (or failed) to run.
///
/// # Errors
/// [`StartError`] with the step that failed. The child of a failed start still has to be reaped.
pub fn start(plan: &Plan) -> Result<u32, StartError> {
    let pointers =
        |strings: &[CString]| -> Vec<*const libc::c_char> { strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect() };
    let (argv, envp) = (pointers(&plan.argv), pointers(&plan.envp));
    let mut script = vec![c"sh".as_ptr(), ptr::null()];
    script.extend_from_slice(&argv[1..]);
    let shared = Shared {
        plan,
        argv: argv.as_ptr(),
        envp: envp.as_ptr(),
        script: script.as_mut_ptr(),
        stage: AtomicI32::new(0),
        errno: AtomicI32::new(0),
    };
    let mut stack = vec![0u128; STACK / 16];
    let pid = {
        let _quiet = BlockedSignals::new();
        // SAFETY: CLONE_VFORK keeps this thread, and with it `shared` and `stack`, in place until the child has
        // called exec or has ended; the child runs on `stack` alone. All signals are blocked, so no handler of ours
        // runs in the child.
        unsafe {
            let top = stack.as_mut_ptr().add(stack.len());
            libc::clone(
                in_child,
                top.cast(),
                libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
                (&raw const shared).cast_mut().cast(),
            )
        }
    };
    if pid < 0 {
        return Err(StartError { stage: Stage::Clone, error: io::Error::last_os_error() });
    }
    match shared.errno.load(Ordering::Acquire) {
        0 => Ok(pid as u32),
        errno => {
            let stages = [Stage::Clone, Stage::Terminal, Stage::Stdio, Stage::User, Stage::Directory, Stage::Exec];
            let stage = stages[shared.stage.load(Ordering::Acquire) as usize % stages.len()];
            Err(StartError { stage, error: io::Error::from_raw_os_error(errno) })
        }
    }
}

/// Blocks every signal in this thread while it lives.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn new() -> Self {
        // SAFETY: both sets are initialised before they are read.
        unsafe {
            let (mut all, mut old): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
            Self(old)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set was filled in by `new`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

extern "C" fn in_child(argument: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `argument` is the `Shared` of the suspended parent; see `start`.
    unsafe {
        let shared = &*argument.cast::<Shared<'_>>();
        let (stage, errno) = become_program(shared);
        shared.stage.store(stage as i32, Ordering::Release);
        shared.errno.store(if errno == 0 { libc::EIO } else { errno }, Ordering::Release);
        libc::_exit(127)
    }
}

/// Returns only when a step fails.
///
/// # Safety
/// Only in a child made by [`start`].
unsafe fn become_program(shared: &Shared<'_>) -> (Stage, i32) {
    let plan = shared.plan;
    // SAFETY: system calls on numbers, and on pointers into the plan, which outlives the child's use of it. The raw
    // set*id calls are on purpose: the C library's would change every thread of the guest.
    unsafe {
        libc::setsid();
        if let Some(cgroup) = plan.cgroup {
            // "0" is the writer itself. Not being counted is no reason not to run.
            libc::write(cgroup, c"0".as_ptr().cast(), 1);
        }
        if plan.terminal && libc::ioctl(plan.stdio[0], libc::TIOCSCTTY, 0) < 0 {
            return (Stage::Terminal, errno());
        }
        for (target, source) in plan.stdio.iter().enumerate() {
            if libc::dup2(*source, target as i32) < 0 {
                return (Stage::Stdio, errno());
            }
        }
        default_signals();
        if plan.drop_capabilities {
            libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0);
            libc::prctl(libc::PR_CAPBSET_DROP, CAP_NET_ADMIN, 0, 0, 0);
        }
        if let Some(user) = &plan.user
            && (libc::syscall(libc::SYS_setgroups, user.groups.len(), user.groups.as_ptr()) < 0
                || libc::syscall(libc::SYS_setresgid, user.gid, user.gid, user.gid) < 0
                || libc::syscall(libc::SYS_setresuid, user.uid, user.uid, user.uid) < 0)
        {
            return (Stage::User, errno());
        }
        if libc::chdir(plan.cwd.as_ptr()) < 0 {
            return (Stage::Directory, errno());
        }
        (Stage::Exec, try_candidates(shared))
    }
}

/// # Safety
/// As [`become_program`].
unsafe fn try_candidates(shared: &Shared<'_>) -> i32 {
    let mut worst = libc::ENOENT;
    for file in &shared.plan.candidates {
        // SAFETY: null-terminated arrays of strings that live in the suspended parent.
        unsafe {
            libc::execve(file.as_ptr(), shared.argv, shared.envp);
            let mut error = errno();
            if error == libc::ENOEXEC {
                *shared.script.add(1) = file.as_ptr();
                libc::execve(c"/bin/sh".as_ptr(), shared.script, shared.envp);
                error = libc::ENOEXEC;
            }
            match error {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => worst = error,
                other => return other,
            }
        }
    }
    worst
}

/// Signals that can be ignored when a program begins: the guest ignores SIGPIPE, and a guest on a host inherits what its
/// caller ignored (a shell's background job ignores ^C).
const RESET: [libc::c_int; 10] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGPIPE,
    libc::SIGALRM,
    libc::SIGTERM,
    libc::SIGCHLD,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// Programs begin as from a login: nothing is ignored, nothing is blocked.
///
/// # Safety
/// Only in the child: dispositions are the child's own there.
unsafe fn default_signals() {
    // SAFETY: sigaction and sigset are initialised before use.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        for signal in RESET {
            libc::sigaction(signal, &raw const action, ptr::null_mut());
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

fn errno() -> i32 {
    // SAFETY: the location is always valid; parent and child share it, and the parent is suspended.
    unsafe { *libc::__errno_location() }
}
