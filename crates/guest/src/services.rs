//! Services: programs that are started at boot and again when they end.
//!
//! ```text
//!   stopped ──start──► running ──ends──► waiting (1 s, doubled up to 30 s) ──► running
//!      ▲                  │                 │
//!      └──────stop────────┴─────────────────┘        ends and the policy says no more: stopped
//!                                                     can't be started: failed, tried again likewise
//! ```

use crate::{guest::Guest, sys::Status, works::Start};
use model::{Offset, ServiceName, ServiceRestart, ServiceSpec};
use std::{
    collections::BTreeMap,
    rc::Rc,
    time::{Duration, Instant},
};
use wire::{
    Code, StreamId, WireError,
    guest::{GuestEvent, Role, Work},
    records::{Program, ServiceRecord},
};

const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// A service that was up this long starts over with the shortest wait.
const STABLE: Duration = Duration::from_secs(10);

/// The declared services.
#[derive(Debug, Default)]
pub struct Services {
    all: BTreeMap<ServiceName, Service>,
}

#[derive(Debug)]
struct Service {
    spec: ServiceSpec,
    stream: StreamId,
    state: State,
    wanted: bool,
    pid: Option<u32>,
    run: Option<u64>,
    started: Option<Instant>,
    restarts: u64,
    wait: Duration,
    last: Option<Status>,
    /// Raised at every change of what is wanted, so that a wait that is out of date does nothing.
    turn: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Stopped,
    Waiting,
    Failed,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Stopped => "stopped",
            State::Waiting => "waiting",
            State::Failed => "failed",
        }
    }
}

/// How long to wait before the next start, and the wait after that; `None`: it stays ended.
fn next_wait(policy: ServiceRestart, status: Option<Status>, up: Duration, wait: Duration) -> Option<(Duration, Duration)> {
    let succeeded = status.is_some_and(|s| s.exit_code == Some(0));
    let again = match policy {
        ServiceRestart::Always => true,
        ServiceRestart::OnFailure => !succeeded,
        ServiceRestart::Never => false,
    };
    let wait = if up >= STABLE { FIRST_WAIT } else { wait };
    again.then(|| (wait, (wait * 2).min(LONGEST_WAIT)))
}

impl Guest {
    /// Makes the set of services what is declared: new and changed ones start, missing ones stop. The output of a new one
    /// begins at its place in `offsets`.
    pub fn set_services(self: &Rc<Self>, specs: Vec<ServiceSpec>, offsets: &BTreeMap<ServiceName, Offset>) {
        let (mut begin, mut end) = (Vec::new(), Vec::new());
        {
            let mut services = self.services.borrow_mut();
            let gone: Vec<ServiceName> =
                services.all.keys().filter(|name| !specs.iter().any(|s| s.name == **name)).cloned().collect();
            for name in gone {
                if let Some(service) = services.all.remove(&name) {
                    end.push((name, service.stream));
                }
            }
            for spec in specs {
                let name = spec.name.clone();
                match services.all.get_mut(&name) {
                    Some(service) if service.spec == spec => {}
                    Some(service) => {
                        service.spec = spec;
                        begin.push((name, true));
                    }
                    None => {
                        let from = offsets.get(&name).copied().unwrap_or(Offset::ZERO);
                        let role = Role::Stdout(Work::Service(name.clone()));
                        let stream = self.hub.borrow_mut().open_service_stream(role, from);
                        services.all.insert(name.clone(), Service::new(spec, stream));
                        begin.push((name, false));
                    }
                }
            }
        }
        for (name, stream) in end {
            let guest = self.clone();
            tokio::task::spawn_local(async move {
                guest.end_work(&Work::Service(name), "stopped", true).await;
                guest.hub.borrow_mut().finish(stream);
            });
        }
        for (name, restart) in begin {
            let guest = self.clone();
            tokio::task::spawn_local(async move {
                let action = if restart { "restart" } else { "start" };
                if let Err(error) = guest.service_action(&name, action).await {
                    log!("service {name}: {error}");
                }
            });
        }
    }

    /// No service is started again; used before a shutdown.
    pub fn stop_services(&self) {
        for service in self.services.borrow_mut().all.values_mut() {
            service.wanted = false;
            service.turn += 1;
        }
    }

    /// Starts, stops or restarts a declared service; returns when that is done.
    ///
    /// # Errors
    /// [`Code::NotFound`] for a name that isn't declared, [`Code::Invalid`] for another action; else why the program
    /// can't be started.
    pub async fn service_action(self: &Rc<Self>, name: &ServiceName, action: &str) -> Result<(), WireError> {
        let wanted = match action {
            "start" | "restart" => true,
            "stop" => false,
            other => return Err(WireError::new(Code::Invalid, format!("unknown action {other:?}: start, stop or restart"))),
        };
        let running = {
            let mut services = self.services.borrow_mut();
            let service = services.get(name)?;
            service.turn += 1;
            service.wanted = wanted;
            service.wait = FIRST_WAIT;
            service.run.is_some()
        };
        if action == "start" && running {
            return Ok(());
        }
        if running {
            // While it ends nothing may start it again.
            self.services.borrow_mut().get(name)?.wanted = false;
            self.end_work(&Work::Service(name.clone()), "stopped", true).await;
            while self.services.borrow_mut().get(name)?.run.is_some() {
                self.changed.notified().await;
            }
        }
        {
            let mut services = self.services.borrow_mut();
            let service = services.get(name)?;
            service.wanted = wanted;
            if !wanted {
                service.state = State::Stopped;
                return Ok(());
            }
        }
        self.start_service(name).await
    }

    async fn start_service(self: &Rc<Self>, name: &ServiceName) -> Result<(), WireError> {
        let (start, stream) = {
            let mut services = self.services.borrow_mut();
            let service = services.get(name)?;
            let spec = &service.spec;
            let program = Program { argv: spec.argv.clone(), env: spec.env.clone(), cwd: spec.cwd.clone(), user: None };
            let work = Work::Service(name.clone());
            let (stdin, stderr, pty, timeout) = (None, None, None, None);
            (Start { work, program, pty, stdin, stdout: service.stream, stderr, timeout }, service.stream)
        };
        let result = self.start(start).await;
        let mut services = self.services.borrow_mut();
        let service = services.get(name)?;
        match result {
            Ok((run, pid)) => {
                service.state = State::Running;
                service.pid = Some(pid);
                service.run = self.works.borrow().is_running(run).then_some(run);
                service.started = Some(Instant::now());
                let restarts = service.restarts;
                let event = GuestEvent::ServiceStarted { name: name.clone(), pid, restarts, stream: Some(stream) };
                self.hub.borrow_mut().event(event);
                Ok(())
            }
            Err(error) => {
                service.state = State::Failed;
                let wait = next_wait(service.spec.restart, None, Duration::ZERO, service.wait);
                let turn = service.turn;
                if let Some((now, next)) = wait {
                    service.wait = next;
                    drop(services);
                    self.start_later(name.clone(), turn, now);
                }
                Err(error)
            }
        }
    }

    fn start_later(self: &Rc<Self>, name: ServiceName, turn: u64, after: Duration) {
        let guest = self.clone();
        tokio::task::spawn_local(async move {
            tokio::time::sleep(after).await;
            {
                let mut services = guest.services.borrow_mut();
                let Ok(service) = services.get(&name) else { return };
                if service.turn != turn || !service.wanted {
                    return;
                }
                service.restarts += 1;
            }
            if let Err(error) = guest.start_service(&name).await {
                log!("service {name}: {error}");
            }
        });
    }

    /// A service's own process has ended and its output is read.
    pub fn service_ended(self: &Rc<Self>, name: &ServiceName, run: u64, status: Status) {
        let mut restart = None;
        if let Ok(service) = self.services.borrow_mut().get(name)
            && service.run.is_none_or(|current| current == run)
        {
            service.run = None;
            service.pid = None;
            service.last = Some(status);
            let up = service.started.map_or(Duration::ZERO, |at| at.elapsed());
            let wait = if service.wanted { next_wait(service.spec.restart, Some(status), up, service.wait) } else { None };
            service.state = if wait.is_some() { State::Waiting } else { State::Stopped };
            if let Some((now, next)) = wait {
                service.wait = next;
                restart = Some((now, service.turn));
            }
        }
        self.hub.borrow_mut().event(GuestEvent::ServiceEnded {
            name: name.clone(),
            exit_code: status.exit_code,
            signal: status.signal,
            restart_in_ms: restart.map(|(wait, _)| wait.as_millis() as u64),
        });
        if let Some((wait, turn)) = restart {
            self.start_later(name.clone(), turn, wait);
        }
    }

    /// All services as they stand.
    pub fn service_records(&self) -> Vec<ServiceRecord> {
        let hub = self.hub.borrow();
        let services = self.services.borrow();
        let record = |(name, s): (&ServiceName, &Service)| ServiceRecord {
            name: name.clone(),
            state: s.state.word().into(),
            pid: s.pid,
            restarts: s.restarts,
            exit_code: s.last.and_then(|l| l.exit_code),
            signal: s.last.and_then(|l| l.signal),
            output_bytes: hub.end_of(s.stream).unwrap_or_default(),
        };
        services.all.iter().map(record).collect()
    }
}

impl Services {
    fn get(&mut self, name: &ServiceName) -> Result<&mut Service, WireError> {
        let missing = || WireError::new(Code::NotFound, format!("service {name} is not declared for this session"));
        self.all.get_mut(name).ok_or_else(missing)
    }
}

impl Service {
    fn new(spec: ServiceSpec, stream: StreamId) -> Self {
        Self {
            spec,
            stream,
            state: State::Stopped,
            wanted: true,
            pid: None,
            run: None,
            started: None,
            restarts: 0,
            wait: FIRST_WAIT,
            last: None,
            turn: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_decides_and_the_wait_grows() {
        let (good, bad) = (Status { exit_code: Some(0), signal: None }, Status { exit_code: None, signal: Some(9) });
        let s = Duration::from_secs;
        let cases = [
            (ServiceRestart::Always, good, s(0), s(1), Some((s(1), s(2)))),
            (ServiceRestart::Always, bad, s(0), s(16), Some((s(16), s(30)))),
            (ServiceRestart::Always, bad, s(0), s(30), Some((s(30), s(30)))),
            (ServiceRestart::Always, bad, s(11), s(30), Some((s(1), s(2)))),
            (ServiceRestart::OnFailure, good, s(0), s(1), None),
            (ServiceRestart::OnFailure, bad, s(0), s(1), Some((s(1), s(2)))),
            (ServiceRestart::Never, bad, s(0), s(1), None),
        ];
        for (policy, status, up, wait, expected) in cases {
            assert_eq!(next_wait(policy, Some(status), up, wait), expected, "{policy:?} {status:?} {up:?} {wait:?}");
        }
    }
}
