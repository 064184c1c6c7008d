//! What goes on in a session, and for how long nothing has: the evidence for calling it idle.
//!
//! ```text
//!   starting ──run──► running ◄──run (quiet begins anew)── paused
//!                        │  └────────stop────────────────────►
//!                        └── while stopped nothing counts: all times here are awake time
//! ```
//! What the supervisor sees itself is noted as it happens; the guest is asked for the CPU of programs and for what they
//! have wished. Where it can't be asked the session counts as busy: nothing is put to sleep on a guess. Viewers alone,
//! services that run, and hooks are no activity.

use crate::core::{Core, State};
use model::ExecId;
use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard},
    time::Duration,
};
use tokio::time::Instant;
use wire::{
    Code, WireError,
    control::{Phase, Request},
    facts::Fact,
    guest::{GuestActivity, GuestEvent, Reply, Request as GuestRequest},
    records::{Activity, ExecRecord, KeepsAwake, LastActivity},
};

/// What is younger still goes on.
const RECENT: Duration = Duration::from_secs(5);
/// The same for CPU: the guest looks every five seconds, and a little late.
const RECENT_CPU: Duration = Duration::from_millis(5500);
/// How long the guest may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// From this share of a core on, in percent, a sandbox whose guest can't say it is busy. An idle one takes up to 3.5.
const BUSY_PERCENT: f64 = 5.0;
/// A shorter stretch says nothing about the CPU.
const SHORTEST: Duration = Duration::from_secs(1);
/// The longest wish of a program to be kept awake that is believed.
const LONGEST_AWAKE: Duration = Duration::from_secs(24 * 3600);
/// Running execs that are named.
const NAMED: usize = 20;
/// Bytes of words for people.
const WORDS: usize = 200;
/// Bytes of a text that a program inside wants written down.
const LONGEST_TEXT: usize = 8 * 1024;
/// Facts that wait for room on the disk before programs' words are given up.
const MOST_WAITING: usize = 1000;

/// Something that happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Exec,
    Asked,
    Cpu,
    Output,
    Typing,
    File,
    Note,
    Terminal,
    Traffic,
    /// Nothing yet: the sandbox has begun to run.
    Start,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Kind::Exec => "exec",
            Kind::Asked => "asked",
            Kind::Cpu => "cpu",
            Kind::Output => "output",
            Kind::Typing => "typing",
            Kind::File => "file",
            Kind::Note => "note",
            Kind::Terminal => "terminal",
            Kind::Traffic => "traffic",
            Kind::Start => "start",
        }
    }
}

/// When it happened last, in awake time, and in what words.
#[derive(Debug, Clone)]
struct Noted {
    at: Duration,
    what: String,
}

/// The awake time of a session and what has happened in it. Knows no clock: each call says what time it is.
pub struct Quiet {
    running: bool,
    /// Awake time up to `ticked`.
    awake: Duration,
    ticked: Instant,
    noted: BTreeMap<Kind, Noted>,
    /// Until when a program wishes to be kept awake.
    asked_until: Option<Duration>,
    /// Requests of clients under way, and when the last one ended.
    uses: u64,
    used: Duration,
    /// What the machine had counted for the sandbox at some moment; for guests that can't say it.
    counted: Option<(Duration, u64)>,
}

impl Quiet {
    /// Of a sandbox that doesn't run yet.
    pub fn new(at: Instant) -> Quiet {
        Quiet {
            running: false,
            awake: Duration::ZERO,
            ticked: at,
            noted: BTreeMap::new(),
            asked_until: None,
            uses: 0,
            used: Duration::ZERO,
            counted: None,
        }
    }

    fn awake(&mut self, at: Instant) -> Duration {
        if self.running {
            self.awake += at.saturating_duration_since(self.ticked);
        }
        self.ticked = at;
        self.awake
    }

    /// The sandbox runs, and quiet begins: it was started, woken or unpaused.
    pub fn run(&mut self, at: Instant) {
        let now = self.awake(at);
        self.running = true;
        self.used = now;
        self.counted = None;
        self.noted.insert(Kind::Start, Noted { at: now, what: String::new() });
    }

    /// The sandbox goes on after it stood still for a moment, as if nothing had been.
    pub fn go_on(&mut self, at: Instant) {
        self.awake(at);
        self.running = true;
    }

    /// The sandbox stands still.
    pub fn stop(&mut self, at: Instant) {
        self.awake(at);
        self.running = false;
        // What the machine counts goes on.
        self.counted = None;
    }

    /// Something happens.
    pub fn note(&mut self, kind: Kind, what: &str, at: Instant) {
        let noted = Noted { at: self.awake(at), what: what[..what.floor_char_boundary(WORDS)].to_owned() };
        self.noted.insert(kind, noted);
    }

    /// How long a program wishes the session to be kept awake from now on.
    pub fn asked(&mut self, left: Option<Duration>, at: Instant) {
        let now = self.awake(at);
        self.asked_until = match (left, self.asked_until) {
            (Some(left), _) => Some(now + left.min(LONGEST_AWAKE)),
            // It has ended, perhaps a little before its time.
            (None, until) => until.map(|until| until.min(now)),
        };
    }

    /// A client begins to use the session.
    pub fn enter(&mut self) {
        self.uses += 1;
    }

    /// It has done so.
    pub fn leave(&mut self, at: Instant) {
        self.uses = self.uses.saturating_sub(1);
        self.used = self.awake(at);
    }

    /// How long no client has used the session.
    pub fn unused(&mut self, at: Instant) -> Duration {
        let now = self.awake(at);
        if self.uses > 0 { Duration::ZERO } else { now.saturating_sub(self.used) }
    }

    /// The share of a core since the last count of long enough ago, and how long that is, from what the machine has
    /// counted up to now. Much of it is activity.
    pub fn count_cpu(&mut self, cpu_ms: u64, at: Instant) -> Option<(f64, Duration)> {
        let now = self.awake(at);
        let (then, before) = *self.counted.get_or_insert((now, cpu_ms));
        let since = now.saturating_sub(then);
        if since < SHORTEST {
            return None;
        }
        self.counted = Some((now, cpu_ms));
        let percent = cpu_ms.saturating_sub(before) as f64 / (since.as_secs_f64() * 10.0);
        if percent >= BUSY_PERCENT {
            self.note(Kind::Cpu, &format!("{percent:.0} % of a core"), at);
        }
        Some((percent, since))
    }

    /// Since when nothing has happened, by what is noted here.
    fn quiet(&mut self, at: Instant) -> Duration {
        let now = self.awake(at);
        let noted = self.noted.values().map(|noted| noted.at);
        let since = noted.chain(self.asked_until.map(|until| until.min(now))).max().unwrap_or_default();
        now.saturating_sub(since)
    }

    /// Everything that is known, with the execs that run.
    pub fn activity(&mut self, execs: Vec<String>, at: Instant) -> Activity {
        let now = self.awake(at);
        let left = self.asked_until.map(|until| until.saturating_sub(now)).filter(|left| !left.is_zero());
        if let Some(left) = left {
            self.note(Kind::Asked, &format!("{} s left", left.as_secs_f64().ceil()), at);
        }
        let running = execs.len() as u64;
        if let Some(newest) = execs.last() {
            self.note(Kind::Exec, newest, at);
        }
        let mut keeps_awake: Vec<KeepsAwake> =
            execs.into_iter().take(NAMED).map(|what| KeepsAwake { kind: Kind::Exec.as_str().to_owned(), what }).collect();
        for (kind, noted) in &self.noted {
            let recent = if *kind == Kind::Cpu { RECENT_CPU } else { RECENT };
            let ended = match kind {
                Kind::Start => true,
                Kind::Exec => running > 0,
                Kind::Asked => left.is_none(),
                _ => false,
            };
            if !ended && now.saturating_sub(noted.at) <= recent {
                keeps_awake.push(KeepsAwake { kind: kind.as_str().to_owned(), what: noted.what.clone() });
            }
        }
        // Of several at once the more telling one; the start is told where there is nothing else.
        let last = self.noted.iter().rev().max_by_key(|(_, noted)| noted.at).map(|(kind, noted)| LastActivity {
            kind: kind.as_str().to_owned(),
            ago_ms: millis(now.saturating_sub(noted.at)),
            what: noted.what.clone(),
        });
        Activity {
            quiet_ms: millis(self.quiet(at)),
            keeps_awake,
            last,
            execs: running,
            no_clients_ms: millis(self.unused(at)),
            ..Activity::default()
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// An exec in words for people.
fn exec_words(record: &ExecRecord) -> String {
    let mut words = format!("{} {}", record.id, record.argv.join(" "));
    words.truncate(words.floor_char_boundary(WORDS));
    words
}

/// What the guest says of itself.
enum Inside {
    Told(GuestActivity),
    /// It is older than the question.
    CannotSay,
    Unresponsive,
    /// It isn't running.
    StandsStill,
}

/// A client's request that uses the session, while it is under way.
pub struct Use(Arc<Core>);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.quiet().leave(Instant::now());
    }
}

impl Core {
    /// Held for moments only, and never while another lock is waited for.
    pub fn quiet(&self) -> MutexGuard<'_, Quiet> {
        self.quiet.lock().expect("no code panics while it holds the notes on activity")
    }

    /// Something happens now.
    pub fn note_activity(&self, kind: Kind, what: &str) {
        self.quiet().note(kind, what, Instant::now());
    }

    /// A new phase, for the awake time.
    pub fn phase_changes(&self, from: Phase, to: Phase) {
        let (mut quiet, now) = (self.quiet(), Instant::now());
        match (from, to) {
            (Phase::Running, Phase::Running) => {}
            // A capture that was taken back.
            (Phase::Captured, Phase::Running) => quiet.go_on(now),
            (_, Phase::Running) => quiet.run(now),
            _ => quiet.stop(now),
        }
    }

    /// Counts a client's request as use of the session while the answer is held; `None` for one that only looks on.
    pub fn using(self: &Arc<Self>, request: &Request) -> Option<Use> {
        let uses = match request {
            Request::StartExec { exec, .. } => exec.hook.is_none(),
            Request::AwaitExec { id } => !self.is_hook(*id),
            Request::ExecStdin { .. }
            | Request::SignalExec { .. }
            | Request::OpenTerminal { .. }
            | Request::CloseTerminal { .. }
            | Request::Attach(_)
            | Request::Dial { .. }
            | Request::File { .. } => true,
            _ => false,
        };
        uses.then(|| {
            self.quiet().enter();
            Use(self.clone())
        })
    }

    fn is_hook(&self, id: ExecId) -> bool {
        self.state().works.get(id).is_ok_and(|exec| exec.record.borrow().hook.is_some())
    }

    /// An exec begins or ends.
    pub fn note_exec(&self, record: &ExecRecord) {
        if record.hook.is_none() {
            self.note_activity(Kind::Exec, &exec_words(record));
        }
    }

    /// A program inside has said something: it is written down, within bounds.
    pub fn said_inside(&self, state: &mut State, said: GuestEvent) {
        if !state.said.may(Instant::now()) {
            // A session's history is kept for good, beside all others': nobody fills it up by talking.
            tracing::warn!("programs inside say more than is kept");
            return;
        }
        let clipped = |text: String, most: usize| text[..text.floor_char_boundary(most)].to_owned();
        let fact = match said {
            GuestEvent::Note { text } => {
                let text = clipped(text, LONGEST_TEXT);
                self.note_activity(Kind::Note, &text);
                Fact::Note { text }
            }
            GuestEvent::KeepAwake { seconds } => {
                let seconds = seconds.min(LONGEST_AWAKE.as_secs());
                self.quiet().asked(Some(Duration::from_secs(seconds)), Instant::now());
                Fact::KeepAwake { seconds }
            }
            GuestEvent::Waiting { for_, text } => Fact::AgentWaiting {
                for_: for_.map(|word| clipped(word, WORDS)),
                text: text.map(|text| clipped(text, LONGEST_TEXT)),
            },
            _ => return,
        };
        if state.facts.waiting() < MOST_WAITING {
            state.facts.record(fact);
        } else {
            tracing::warn!("the disk is full, and what programs say is not kept any more");
        }
    }

    /// What goes on in the session, and since when nothing does.
    pub async fn activity(&self, window_ms: u64) -> Activity {
        let inside = self.ask_inside(window_ms).await;
        self.note_awaited();
        let (mut execs, clients): (Vec<ExecRecord>, usize) = {
            let state = self.state();
            let running = state.works.running().map(|(_, exec)| exec.record.borrow().clone());
            let viewers = state.terminals.all().map(|terminal| terminal.viewers.len()).sum();
            (running.filter(|record| record.hook.is_none()).collect(), viewers)
        };
        execs.sort_by_key(|record| record.started_at);
        let execs = execs.iter().map(exec_words).collect();
        let output_waits = self.is_stalled();
        let usage = matches!(inside, Inside::CannotSay).then(|| self.sandbox.usage()).flatten();
        let (mut quiet, now) = (self.quiet(), Instant::now());
        let counted = usage.and_then(|usage| quiet.count_cpu(usage.cpu_ms, now));
        if let Inside::Told(told) = &inside {
            quiet.asked(told.keep_awake_ms.map(Duration::from_millis), now);
        }
        let mut activity = quiet.activity(execs, now);
        drop(quiet);
        (activity.clients, activity.output_waits) = (clients as u64, output_waits);
        match inside {
            Inside::Told(told) => add_told(&mut activity, told),
            Inside::CannotSay => {
                let (percent, window) = counted.unwrap_or_default();
                (activity.cpu_percent, activity.window_ms) = (percent, millis(window));
            }
            Inside::Unresponsive => {
                activity.quiet_ms = 0;
                let what = "the guest does not say what its programs do".to_owned();
                activity.keeps_awake.push(KeepsAwake { kind: "unresponsive".to_owned(), what });
            }
            Inside::StandsStill => {}
        }
        activity
    }

    async fn ask_inside(&self, window_ms: u64) -> Inside {
        if self.phase() != Phase::Running {
            return Inside::StandsStill;
        }
        let asked = self.link.request(GuestRequest::Activity { window_ms });
        match tokio::time::timeout(ANSWER_LIMIT, asked).await {
            Ok(Ok(Reply::Activity { activity })) => Inside::Told(activity),
            Ok(Err(WireError { code: Code::Unsupported, .. })) => Inside::CannotSay,
            _ => Inside::Unresponsive,
        }
    }

    /// Has the guest tell programs that something is about to happen. Nobody waits for one that doesn't.
    pub async fn tell_moment(&self, moment: String, seconds: Option<u64>) {
        if self.phase() != Phase::Running {
            return;
        }
        let told = tokio::time::timeout(ANSWER_LIMIT, self.link.request(GuestRequest::Moment { moment, seconds })).await;
        if !matches!(told, Ok(Ok(_))) {
            tracing::debug!(?told, "programs inside are not told of a moment");
        }
    }
}

/// Adds what the guest has told; it may tell anything.
fn add_told(activity: &mut Activity, told: GuestActivity) {
    activity.cpu_percent = if told.cpu_percent.is_finite() { told.cpu_percent.max(0.0) } else { 0.0 };
    activity.window_ms = told.known_ms;
    activity.waiting = told.waiting;
    let Some(ago_ms) = told.busy_ago_ms else { return };
    let what = format!("{:.0} % of a core over the last {} s", activity.cpu_percent, told.known_ms / 1000);
    if Duration::from_millis(ago_ms) <= RECENT_CPU {
        // Between two looks programs that work are not quiet.
        activity.quiet_ms = 0;
        activity.keeps_awake.push(KeepsAwake { kind: Kind::Cpu.as_str().to_owned(), what: what.clone() });
    }
    activity.quiet_ms = activity.quiet_ms.min(ago_ms);
    if activity.last.as_ref().is_none_or(|last| ago_ms < last.ago_ms) {
        activity.last = Some(LastActivity { kind: Kind::Cpu.as_str().to_owned(), ago_ms, what });
    }
}

/// How much programs inside may say: a burst, then so much a second.
#[derive(Debug)]
pub struct Allowance {
    left: f64,
    at: Instant,
}

impl Allowance {
    const BURST: f64 = 200.0;
    const PER_SECOND: f64 = 2.0;

    pub fn new(now: Instant) -> Allowance {
        Allowance { left: Self::BURST, at: now }
    }

    pub fn may(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.at).as_secs_f64() * Self::PER_SECOND;
        (self.left, self.at) = ((self.left + earned).min(Self::BURST), now);
        let may = self.left >= 1.0;
        if may {
            self.left -= 1.0;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A sandbox that has just begun to run, and a clock.
    fn running() -> (Quiet, Instant) {
        let at = Instant::now();
        let mut quiet = Quiet::new(at);
        quiet.run(at);
        (quiet, at)
    }

    fn kinds(activity: &Activity) -> Vec<&str> {
        activity.keeps_awake.iter().map(|one| one.kind.as_str()).collect()
    }

    #[test]
    fn quiet_counts_from_the_latest_that_happened() {
        let (mut quiet, mut at) = running();
        at += 100 * SECOND;
        let activity = quiet.activity(vec![], at);
        assert_eq!((activity.quiet_ms, activity.last.unwrap().kind.as_str()), (100_000, "start"));
        for kind in [Kind::Exec, Kind::Output, Kind::Typing, Kind::File, Kind::Note, Kind::Terminal, Kind::Cpu] {
            quiet.note(kind, "it", at);
            at += 4 * SECOND;
            let activity = quiet.activity(vec![], at);
            assert_eq!(activity.quiet_ms, 4000, "{kind:?}");
            assert_eq!(activity.last, Some(LastActivity { kind: kind.as_str().into(), ago_ms: 4000, what: "it".into() }));
            assert_eq!(kinds(&activity), [kind.as_str()]);
            at += 2 * SECOND;
            assert!(quiet.activity(vec![], at).keeps_awake.is_empty(), "{kind:?} is over");
        }
    }

    #[test]
    fn an_exec_that_runs_is_no_quiet_and_its_end_begins_it() {
        let (mut quiet, mut at) = running();
        at += 1000 * SECOND;
        let activity = quiet.activity(vec!["1 sleep".into(), "2 make".into()], at);
        assert_eq!((activity.quiet_ms, activity.execs, kinds(&activity)), (0, 2, vec!["exec", "exec"]));
        at += 10 * SECOND;
        assert_eq!(quiet.activity(vec![], at).quiet_ms, 10_000);
        let many = quiet.activity((0..1000).map(|n| format!("{n} x")).collect(), at);
        assert_eq!((many.keeps_awake.len(), many.execs), (NAMED, 1000));
    }

    #[test]
    fn a_wish_to_be_kept_awake_holds_as_long_as_it_lasts() {
        let (mut quiet, mut at) = running();
        quiet.asked(Some(60 * SECOND), at);
        at += 59 * SECOND;
        let activity = quiet.activity(vec![], at);
        assert_eq!((activity.quiet_ms, kinds(&activity)), (0, vec!["asked"]));
        assert_eq!(activity.keeps_awake[0].what, "1 s left");
        at += 11 * SECOND;
        let activity = quiet.activity(vec![], at);
        assert_eq!((activity.quiet_ms, kinds(&activity)), (10_000, vec![]), "quiet begins at its end");
        quiet.asked(Some(60 * SECOND), at);
        at += 5 * SECOND;
        quiet.asked(None, at);
        at += 3 * SECOND;
        assert_eq!(quiet.activity(vec![], at).quiet_ms, 3000, "taken back");
        // Whatever a guest claims.
        quiet.asked(Some(Duration::from_millis(u64::MAX)), at);
        at += LONGEST_AWAKE + SECOND;
        assert_eq!(quiet.activity(vec![], at).quiet_ms, 1000);
    }

    #[test]
    fn what_is_paused_gets_no_quieter_and_begins_anew_when_it_runs_again() {
        let (mut quiet, mut at) = running();
        at += 30 * SECOND;
        quiet.stop(at);
        at += 5000 * SECOND;
        let activity = quiet.activity(vec![], at);
        assert_eq!((activity.quiet_ms, activity.no_clients_ms), (30_000, 30_000));
        quiet.run(at);
        at += 2 * SECOND;
        let activity = quiet.activity(vec![], at);
        assert_eq!((activity.quiet_ms, activity.no_clients_ms), (2000, 2000));
        // A capture that was taken back changes nothing, and its time isn't counted.
        quiet.stop(at);
        at += 9 * SECOND;
        quiet.go_on(at);
        at += SECOND;
        assert_eq!(quiet.activity(vec![], at).quiet_ms, 3000);
    }

    #[test]
    fn clients_are_there_while_one_of_their_requests_is() {
        let (mut quiet, mut at) = running();
        at += 10 * SECOND;
        quiet.enter();
        quiet.enter();
        at += 10 * SECOND;
        assert_eq!(quiet.unused(at), Duration::ZERO);
        quiet.leave(at);
        at += 10 * SECOND;
        assert_eq!(quiet.unused(at), Duration::ZERO);
        quiet.leave(at);
        at += 10 * SECOND;
        assert_eq!(quiet.unused(at), 10 * SECOND);
        assert_eq!(quiet.activity(vec![], at).quiet_ms, 40_000, "to be used is not to be active");
    }

    #[test]
    fn the_machines_count_stands_in_for_a_guest_that_cannot_say_it() {
        let (mut quiet, mut at) = running();
        at += 100 * SECOND;
        assert_eq!(quiet.count_cpu(5000, at), None, "one figure is no rate");
        at += 100 * SECOND;
        assert_eq!(quiet.count_cpu(8500, at), Some((3.5, 100 * SECOND)));
        assert_eq!(quiet.activity(vec![], at).quiet_ms, 200_000, "an idle sandbox");
        at += 10 * SECOND;
        assert_eq!(quiet.count_cpu(13_500, at), Some((50.0, 10 * SECOND)));
        let activity = quiet.activity(vec![], at);
        assert_eq!((activity.quiet_ms, kinds(&activity)), (0, vec!["cpu"]));
    }

    #[test]
    fn what_the_guest_tells_of_cpu_is_activity() {
        let told = |busy_ago_ms| GuestActivity { cpu_percent: 12.0, known_ms: 60_000, busy_ago_ms, ..GuestActivity::default() };
        let (mut quiet, mut at) = running();
        at += 300 * SECOND;
        let with = |quiet: &mut Quiet, busy| {
            let mut activity = quiet.activity(vec![], at);
            add_told(&mut activity, told(busy));
            activity
        };
        let idle = with(&mut quiet, None);
        assert_eq!((idle.quiet_ms, idle.cpu_percent, idle.window_ms), (300_000, 12.0, 60_000));
        let before = with(&mut quiet, Some(200_000));
        assert_eq!((before.quiet_ms, kinds(&before)), (200_000, vec![]));
        assert_eq!(before.last.unwrap().kind, "cpu");
        let now = with(&mut quiet, Some(4000));
        assert_eq!((now.quiet_ms, kinds(&now)), (0, vec!["cpu"]));
        let absurd = with(&mut quiet, Some(u64::MAX));
        assert_eq!((absurd.quiet_ms, absurd.last.unwrap().kind.as_str()), (300_000, "start"));
    }

    #[test]
    fn who_talks_without_end_is_heard_now_and_then() {
        let start = Instant::now();
        let mut said = Allowance::new(start);
        let heard = (0..10_000).filter(|_| said.may(start)).count();
        assert_eq!(heard, 200);
        let later = start + Duration::from_secs(10);
        assert_eq!((0..10_000).filter(|_| said.may(later)).count(), 20);
    }
}
