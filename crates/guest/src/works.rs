//! Execs, terminals and services while they run: starting, reaping, draining, time limits, killing.
//!
//! ```text
//!   starting ──► running ──process reaped──► draining ──pipes read to their end so far──► ended (event)
//! ```
//! The children of an ended work are left alone; their group is kept until it is empty.

use crate::{
    child,
    guest::Guest,
    limits::Limits,
    program::{self, Setting},
    pump::{self, Drain, Output},
    ready::Watched,
    sys::{self, Status},
    tree::{self, Group, Groups},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    path::PathBuf,
    rc::Rc,
    time::Duration,
};
use tokio::sync::oneshot;
use wire::{
    Code, StreamId, WireError,
    guest::{GuestEvent, PtySize, Role, RunningWork, Spawn, StreamAt, Work},
    records::Program,
};

/// Between TERM and KILL when a time limit has passed.
const TERM_GRACE: Duration = Duration::from_secs(1);

/// Something that runs, from its start to the moment its output at exit has been read.
pub struct Run {
    pub work: Work,
    pub pid: u32,
    group: Option<Group>,
    ends: Vec<StreamAt>,
    undrained: usize,
    status: Option<Status>,
    reason: Option<String>,
    drain: Rc<Drain>,
    terminal: Option<Rc<Watched>>,
}

/// The group of an ended work in which children go on.
struct LeftBehind {
    run: u64,
    work: Work,
    group: Group,
}

/// All runs.
pub struct Works {
    pub groups: Groups,
    runs: BTreeMap<u64, Run>,
    by_pid: HashMap<u32, u64>,
    left_behind: Vec<LeftBehind>,
    pub limits: Limits,
    next_run: u64,
    /// Starts under way; a child of one of them may be reaped before it is known here.
    starting: usize,
    unclaimed: HashMap<u32, Status>,
    /// Programs that the guest started for a shim, which waits for their end.
    waited_for: HashMap<u32, oneshot::Sender<Status>>,
}

impl Works {
    pub fn new(is_init: bool) -> Self {
        Self {
            groups: Groups::new(is_init),
            runs: BTreeMap::new(),
            by_pid: HashMap::new(),
            left_behind: Vec::new(),
            limits: Limits::default(),
            next_run: 1,
            starting: 0,
            unclaimed: HashMap::new(),
            waited_for: HashMap::new(),
        }
    }

    /// What runs, for the handshake.
    pub fn running(&self) -> Vec<RunningWork> {
        self.runs.values().map(|r| RunningWork { work: r.work.clone(), pid: r.pid }).collect()
    }

    pub fn is_idle(&self) -> bool {
        self.runs.is_empty() && self.left_behind.is_empty() && self.starting == 0
    }

    /// The work that a process inside belongs to, and the entrance to its group. Where the kernel doesn't tell the
    /// caller's number its marker is believed: everything inside is one trust domain.
    pub fn of_caller(&self, pid: u32, marker: &str) -> (Option<Work>, Option<RawFd>) {
        let runs = self.runs.values().filter_map(|run| Some((&run.work, run.group.as_ref()?)));
        let all: Vec<(&Work, &Group)> = runs.chain(self.left_behind.iter().map(|l| (&l.work, &l.group))).collect();
        let by_pid = all.iter().find(|(_, group)| pid != 0 && group.members().contains(&pid));
        let found = by_pid.or_else(|| all.iter().find(|(work, _)| program::work_name(work) == marker));
        (found.map(|(work, _)| (*work).clone()), found.map(|(_, group)| group.entrance()))
    }

    /// Tells the end of a child that is no run.
    pub fn notify_end(&mut self, pid: u32) -> oneshot::Receiver<Status> {
        let (tell, told) = oneshot::channel();
        self.waited_for.insert(pid, tell);
        told
    }

    pub fn is_running(&self, run: u64) -> bool {
        self.runs.contains_key(&run)
    }

    fn find(&self, work: &Work) -> Option<(u64, &Run)> {
        self.runs.iter().rev().find(|(_, run)| run.work == *work).map(|(id, run)| (*id, run))
    }

    /// The terminals, with the names of their slave sides.
    pub fn terminals(&self) -> Vec<(PathBuf, Work)> {
        let terminals = self.runs.values().filter_map(|r| Some((r.terminal.as_ref()?, &r.work)));
        let named = |(terminal, work): (&Rc<Watched>, &Work)| {
            let name = rustix::pty::ptsname(terminal.get_ref(), Vec::new()).ok()?;
            Some((PathBuf::from(name.into_string().ok()?), work.clone()))
        };
        terminals.filter_map(named).collect()
    }

    /// Every process that belongs to a work.
    pub fn attributed(&self) -> HashMap<u32, Work> {
        let mut all = HashMap::new();
        for left in &self.left_behind {
            all.extend(left.group.members().into_iter().map(|pid| (pid, left.work.clone())));
        }
        for run in self.runs.values() {
            all.extend(run.members().into_iter().map(|pid| (pid, run.work.clone())));
        }
        all
    }

    /// Everything that a work has started and that still runs, its ended runs' children included.
    pub fn members(&self, work: &Work) -> Vec<u32> {
        let runs = self.runs.values().filter(|r| r.work == *work).flat_map(Run::members);
        let left = self.left_behind.iter().filter(|l| l.work == *work).flat_map(|l| l.group.members());
        let mut pids: Vec<u32> = runs.chain(left).collect();
        if pids.is_empty() && !self.groups.are_there() {
            pids = tree::by_descent(None, &program::work_name(work));
        }
        pids
    }

    fn close_door(&mut self, work: &Work) {
        let runs = self.runs.values_mut().filter(|r| r.work == *work).filter_map(|r| r.group.as_mut());
        let left = self.left_behind.iter_mut().filter(|l| l.work == *work).map(|l| &mut l.group);
        runs.chain(left).for_each(Group::close_door);
    }

    /// Everything that runs because of the guest, orphans of ended works included.
    fn everything(&self) -> Vec<u32> {
        let mut pids: BTreeSet<u32> = self.attributed().into_keys().collect();
        if !self.groups.are_there() {
            pids.extend(tree::below(std::process::id()));
        }
        pids.into_iter().collect()
    }

    fn sweep(&mut self) {
        for left in std::mem::take(&mut self.left_behind) {
            if left.group.members().is_empty() {
                self.limits.forget(left.run);
                self.groups.give_back(left.group);
            } else {
                self.left_behind.push(left);
            }
        }
    }
}

impl Run {
    fn members(&self) -> Vec<u32> {
        match &self.group {
            Some(group) => group.members(),
            None => tree::by_descent(Some(self.pid), &program::work_name(&self.work)),
        }
    }
}

/// How a program is connected.
pub struct Start {
    pub work: Work,
    pub program: Program,
    pub pty: Option<PtySize>,
    pub stdin: Option<StreamId>,
    pub stdout: StreamId,
    pub stderr: Option<StreamId>,
    pub timeout: Option<Duration>,
}

impl From<Spawn> for Start {
    fn from(spawn: Spawn) -> Self {
        Self {
            work: spawn.work,
            program: spawn.program,
            stderr: spawn.stderr.filter(|_| spawn.pty.is_none()),
            pty: spawn.pty,
            stdin: spawn.stdin,
            stdout: spawn.stdout,
            timeout: spawn.timeout_ms.map(Duration::from_millis),
        }
    }
}

/// The guest's ends and the program's ends of its standard streams.
struct Wiring {
    input: Option<Rc<Watched>>,
    outputs: Vec<(StreamId, Rc<Watched>)>,
    terminal: Option<Rc<Watched>>,
    theirs: Vec<OwnedFd>,
    stdio: [i32; 3],
}

impl Guest {
    /// Opens the streams of a spawn, at once, so that bytes which follow the request find them.
    ///
    /// # Errors
    /// [`Code::Invalid`] for a number that is in use.
    pub fn open_streams(&self, start: &Start) -> Result<(), WireError> {
        let mut hub = self.hub.borrow_mut();
        let work = &start.work;
        let mut ok = hub.open_sending(start.stdout, Role::Stdout(work.clone()));
        if let Some(id) = start.stderr {
            ok = ok && hub.open_sending(id, Role::Stderr(work.clone()));
        }
        if let Some(id) = start.stdin {
            ok = ok && hub.open_receiving(id, Role::Stdin(work.clone()));
        }
        if ok { Ok(()) } else { Err(WireError::new(Code::Invalid, "a stream number is in use already")) }
    }

    /// Starts a program whose streams are open.
    ///
    /// # Errors
    /// What stands in the way, naming program, directory or user.
    pub async fn start(self: &Rc<Self>, start: Start) -> Result<(u64, u32), WireError> {
        let result = self.start_inner(&start).await;
        if result.is_err() && !matches!(start.work, Work::Service(_)) {
            let mut hub = self.hub.borrow_mut();
            [Some(start.stdout), start.stdin, start.stderr].into_iter().flatten().for_each(|id| hub.forget(id));
        }
        result
    }

    async fn start_inner(self: &Rc<Self>, start: &Start) -> Result<(u64, u32), WireError> {
        let user = program::user_of(&start.program)?;
        let owner = user.as_ref().map(|u| u.uid);
        let wiring = wire_up(start, self.null.as_raw_fd(), owner).map_err(|error| {
            WireError::new(Code::Internal, format!("no pipes or terminal for the program: {}", program::words(&error)))
        })?;
        let group = self.works.borrow_mut().groups.take();
        let plan = program::plan(
            &start.program,
            user.as_ref(),
            &Setting {
                identity: self.identity.borrow().as_ref(),
                is_init: self.is_init,
                work: &start.work,
                stdio: wiring.stdio,
                terminal: start.pty.is_some(),
                cgroup: group.as_ref().map(Group::entrance),
            },
        );
        let plan = match plan {
            Ok(plan) => plan,
            Err(error) => {
                group.into_iter().for_each(|g| self.works.borrow_mut().groups.give_back(g));
                return Err(error);
            }
        };
        self.works.borrow_mut().starting += 1;
        let theirs = wiring.theirs;
        let started = tokio::task::spawn_blocking(move || {
            let result = child::start(&plan);
            drop(theirs);
            (result, plan)
        })
        .await;
        let mut works = self.works.borrow_mut();
        works.starting -= 1;
        let result = match started {
            Ok((Ok(pid), _)) => Ok(pid),
            Ok((Err(failed), plan)) => Err(program::explain(&start.program, &failed, &plan)),
            Err(_) => Err(WireError::new(Code::Internal, "the thread that starts programs has ended")),
        };
        let pid = match result {
            Ok(pid) => pid,
            Err(error) => {
                // The failed child may not have left the group yet; the sweep gives it back.
                works.left_behind.extend(group.map(|group| LeftBehind { run: 0, work: start.work.clone(), group }));
                drop(works);
                self.reap_all();
                return Err(error);
            }
        };
        let run = works.next_run;
        works.next_run += 1;
        let drain = Rc::new(Drain::default());
        works.by_pid.insert(pid, run);
        if let Some((count, limit)) = group.as_ref().and_then(Group::count_and_limit) {
            works.limits.watch(run, pid, count, limit);
        }
        works.runs.insert(
            run,
            Run {
                work: start.work.clone(),
                pid,
                group,
                ends: Vec::new(),
                undrained: wiring.outputs.len(),
                status: None,
                reason: None,
                drain: drain.clone(),
                terminal: wiring.terminal.clone(),
            },
        );
        let already = works.unclaimed.remove(&pid);
        if works.starting == 0 {
            works.unclaimed.clear();
        }
        drop(works);
        let finish = !matches!(start.work, Work::Service(_));
        for (stream, fd) in wiring.outputs {
            let is_terminal = start.pty.is_some();
            let out = Output { fd, stream, run, drain: drain.clone(), is_terminal, finish };
            tokio::task::spawn_local(pump::output(self.clone(), out));
        }
        if let (Some(stream), Some(fd)) = (start.stdin, wiring.input) {
            tokio::task::spawn_local(pump::input(self.clone(), fd, stream, drain));
        }
        if let Some(timeout) = start.timeout {
            self.clock.set(run, timeout);
        }
        if let Some(status) = already {
            self.process_ended(pid, status);
        }
        Ok((run, pid))
    }

    /// Reaps every child that has ended, known or orphaned.
    pub fn reap_all(self: &Rc<Self>) {
        while let Some((pid, status)) = sys::reap() {
            self.process_ended(pid, status);
        }
        let mut works = self.works.borrow_mut();
        if !works.left_behind.is_empty() {
            works.sweep();
        }
        self.changed.notify_waiters();
    }

    fn process_ended(self: &Rc<Self>, pid: u32, status: Status) {
        let mut works = self.works.borrow_mut();
        if let Some(waiter) = works.waited_for.remove(&pid) {
            let _ = waiter.send(status);
            return;
        }
        let Some(run) = works.by_pid.remove(&pid) else {
            if works.starting > 0 {
                works.unclaimed.insert(pid, status);
            }
            return;
        };
        let Some(entry) = works.runs.get_mut(&run) else { return };
        entry.status = Some(status);
        entry.drain.ask();
        let finished = entry.undrained == 0;
        drop(works);
        self.clock.clear(run);
        if finished {
            self.run_ended(run);
        }
    }

    /// One of a run's outputs has been read as far as it had come when the process ended.
    pub fn drained(self: &Rc<Self>, run: u64, end: Option<StreamAt>) {
        let mut works = self.works.borrow_mut();
        let Some(entry) = works.runs.get_mut(&run) else { return };
        entry.undrained = entry.undrained.saturating_sub(1);
        entry.ends.extend(end);
        let finished = entry.undrained == 0 && entry.status.is_some();
        drop(works);
        if finished {
            self.run_ended(run);
        }
    }

    fn run_ended(self: &Rc<Self>, run: u64) {
        let mut works = self.works.borrow_mut();
        let Some(entry) = works.runs.remove(&run) else { return };
        let too_many = works.limits.has_ended(run);
        if let Some(group) = entry.group {
            works.left_behind.push(LeftBehind { run, work: entry.work.clone(), group });
            works.sweep();
        }
        drop(works);
        let status = entry.status.unwrap_or(Status { exit_code: None, signal: None });
        if let Work::Service(name) = &entry.work {
            self.service_ended(name, run, status);
        } else {
            let mut ends = entry.ends;
            ends.sort_by_key(|at| at.stream);
            let (exit_code, signal) = (status.exit_code, status.signal);
            let reason = entry.reason.or(too_many.then(|| "pids".into()));
            self.hub.borrow_mut().event(GuestEvent::Ended { work: entry.work, exit_code, signal, reason, ends });
        }
        self.changed.notify_waiters();
    }

    /// Sends a signal to a work: to its whole tree, to its own process, or to a terminal's foreground.
    ///
    /// # Errors
    /// [`Code::Ended`] where nothing of the work runs any more; [`Code::Invalid`] for a signal that isn't one.
    pub async fn signal(self: &Rc<Self>, work: &Work, signal: i32, tree: bool) -> Result<(), WireError> {
        if !(1..=64).contains(&signal) {
            return Err(WireError::new(Code::Invalid, format!("{signal} is no signal")));
        }
        let own = self.works.borrow().find(work).map(|(_, run)| (run.pid, run.terminal.clone(), run.status.is_none()));
        if tree {
            let members = self.works.borrow().members(work);
            if members.is_empty() && own.is_none() {
                return Err(WireError::new(Code::Ended, format!("{} has ended", program::work_name(work))));
            }
            if signal == libc::SIGKILL {
                self.kill_tree(work).await;
            } else {
                members.iter().for_each(|pid| drop(sys::kill(*pid as i32, signal)));
            }
            return Ok(());
        }
        let Some((pid, terminal, true)) = own else {
            return Err(WireError::new(Code::Ended, format!("{} has ended", program::work_name(work))));
        };
        let foreground = terminal.and_then(|t| sys::foreground_group(t.get_ref().as_fd()));
        // gVisor tells the foreground only to a terminal's own session; there the leader gets the signal.
        let target = foreground.map_or(pid as i32, |group| -group);
        sys::kill(target, signal).map_err(|e| WireError::new(Code::of_io(&e), format!("signal {signal}: {}", program::words(&e))))
    }

    /// Kills all of a work's processes, again until none is left.
    pub async fn kill_tree(self: &Rc<Self>, work: &Work) {
        self.kill_session(work);
        self.works.borrow_mut().close_door(work);
        for attempt in 0..200u64 {
            let members = self.works.borrow().members(work);
            if members.is_empty() {
                break;
            }
            for pid in members {
                let _ = sys::kill(pid as i32, libc::SIGKILL);
            }
            tokio::time::sleep(Duration::from_millis((attempt + 1).min(20))).await;
            self.reap_all();
        }
    }

    /// Kills the session of a work's own process in one call: a fork bomb can make each of ours take a second.
    fn kill_session(&self, work: &Work) {
        for run in self.works.borrow().runs.values().filter(|r| r.work == *work && r.status.is_none()) {
            let _ = sys::kill(-(run.pid as i32), libc::SIGKILL);
        }
    }

    /// Ends a work with a reason that its `Ended` event carries.
    pub async fn end_work(self: &Rc<Self>, work: &Work, reason: &str, gently: bool) {
        if let Some(run) = self.works.borrow_mut().runs.values_mut().find(|r| r.work == *work && r.status.is_none()) {
            run.reason.get_or_insert(reason.to_owned());
        }
        if gently {
            for pid in self.works.borrow().members(work) {
                let _ = sys::kill(pid as i32, libc::SIGTERM);
            }
            let _ = tokio::time::timeout(TERM_GRACE, self.tree_gone(work)).await;
        }
        self.kill_tree(work).await;
    }

    async fn tree_gone(&self, work: &Work) {
        loop {
            let changed = self.changed.notified();
            if self.works.borrow().members(work).is_empty() {
                return;
            }
            changed.await;
        }
    }

    /// Ends the runs whose time is up, for as long as the process lives.
    pub async fn enforce_timeouts(self: Rc<Self>) {
        loop {
            let run = self.clock.next_due().await;
            let work = self.works.borrow().runs.get(&run).map(|r| r.work.clone());
            if let Some(work) = work {
                let guest = self.clone();
                tokio::task::spawn_local(async move { guest.end_work(&work, "timeout", true).await });
            }
        }
    }

    /// TERM to everything, KILL after the grace; returns when only the guest is left.
    pub async fn shut_down(self: &Rc<Self>, grace: Duration) {
        let all = self.works.borrow().everything();
        for pid in all {
            let _ = sys::kill(pid as i32, libc::SIGTERM);
        }
        // A shell at its prompt ignores TERM; a terminal that goes away says HUP.
        for run in self.works.borrow().runs.values().filter(|run| matches!(run.work, Work::Terminal(_))) {
            let _ = sys::kill(run.pid as i32, libc::SIGHUP);
        }
        let _ = tokio::time::timeout(grace, async {
            loop {
                let changed = self.changed.notified();
                if self.works.borrow().everything().is_empty() {
                    return;
                }
                changed.await;
            }
        })
        .await;
        for attempt in 0..200u64 {
            if self.is_init {
                // Everything but the caller itself.
                let _ = sys::kill(-1, libc::SIGKILL);
            }
            let left = self.works.borrow().everything();
            if left.is_empty() {
                break;
            }
            left.iter().for_each(|pid| drop(sys::kill(*pid as i32, libc::SIGKILL)));
            tokio::time::sleep(Duration::from_millis((attempt + 1).min(20))).await;
            self.reap_all();
        }
    }

    /// Sets a terminal's size.
    ///
    /// # Errors
    /// [`Code::Ended`] where it isn't there.
    pub fn resize(&self, work: &Work, size: PtySize) -> Result<(), WireError> {
        let works = self.works.borrow();
        let terminal = works.find(work).and_then(|(_, run)| run.terminal.clone());
        let Some(terminal) = terminal else { return Err(WireError::new(Code::Ended, "the terminal has ended")) };
        sys::set_window(terminal.get_ref().as_fd(), size.cols, size.rows)
            .map_err(|e| WireError::new(Code::Internal, format!("the terminal's size: {}", program::words(&e))))
    }
}

fn wire_up(start: &Start, null: i32, owner: Option<u32>) -> std::io::Result<Wiring> {
    let own_end = |fd: OwnedFd| -> std::io::Result<Rc<Watched>> {
        sys::set_nonblocking(fd.as_raw_fd())?;
        Ok(Rc::new(Watched::new(fd)?))
    };
    if let Some(size) = start.pty {
        let (master, slave) = open_terminal(size, owner)?;
        let master = own_end(master)?;
        let fd = slave.as_raw_fd();
        return Ok(Wiring {
            input: start.stdin.map(|_| master.clone()),
            outputs: vec![(start.stdout, master.clone())],
            terminal: Some(master),
            theirs: vec![slave],
            stdio: [fd; 3],
        });
    }
    let mut wiring = Wiring { input: None, outputs: vec![], terminal: None, theirs: vec![], stdio: [null; 3] };
    if start.stdin.is_some() {
        let (read, write) = sys::pipe()?;
        wiring.stdio[0] = read.as_raw_fd();
        wiring.theirs.push(read);
        wiring.input = Some(own_end(write)?);
    }
    let (read, write) = sys::pipe()?;
    wiring.stdio[1] = write.as_raw_fd();
    wiring.stdio[2] = write.as_raw_fd();
    wiring.theirs.push(write);
    wiring.outputs.push((start.stdout, own_end(read)?));
    if let Some(stderr) = start.stderr {
        let (read, write) = sys::pipe()?;
        wiring.stdio[2] = write.as_raw_fd();
        wiring.theirs.push(write);
        wiring.outputs.push((stderr, own_end(read)?));
    }
    Ok(wiring)
}

fn open_terminal(size: PtySize, owner: Option<u32>) -> std::io::Result<(OwnedFd, OwnedFd)> {
    use rustix::{fs, pty};
    let master = pty::openpt(pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY | pty::OpenptFlags::CLOEXEC)?;
    pty::grantpt(&master)?;
    pty::unlockpt(&master)?;
    let name = pty::ptsname(&master, Vec::new())?;
    let flags = fs::OFlags::RDWR | fs::OFlags::NOCTTY | fs::OFlags::CLOEXEC;
    let slave = fs::open(name.as_c_str(), flags, fs::Mode::empty())?;
    sys::set_window(master.as_fd(), size.cols, size.rows)?;
    if let Some(owner) = owner {
        fs::fchown(&slave, Some(fs::Uid::from_raw(owner)), None)?;
    }
    Ok((master, slave))
}
