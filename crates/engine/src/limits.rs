//! Limits of tokens: what the sessions that a token made may take together.
//!
//! Whoever asks for something that is limited waits for the owner's turn, counts what is taken, and stores what it takes
//! before the turn passes on. So of many that come at once exactly as many get in as there is room for, and the others
//! are refused before anything of them exists. A turn is held over one look into the store and one commit, never while
//! something is made, measured or waited for.
//!
//! A wake or a start counts against the token that made the session, whoever asks for it.

use crate::{
    Error,
    inner::{Inner, blocking},
    parcels,
    request::{Caller, NewSession, SessionView},
};
use model::{Actor, ByteSize, EventType, OperationKind, Resources, SessionId, State, TokenId, TokenLimits};
use serde_json::json;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};
use store::{MAX_PAGE, NewEvent, SessionFilter, SessionRow, SnapshotFilter};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Room for sums of fractions, which are not exact.
const ROUNDING: f64 = 1e-6;

/// Whose turn it is, by token.
#[derive(Default)]
pub(crate) struct Limits {
    turns: Mutex<HashMap<TokenId, Weak<Semaphore>>>,
}

/// While it is held, nobody else takes anything of the same token's limits.
pub(crate) struct Turn {
    _permit: Option<OwnedSemaphorePermit>,
}

impl Turn {
    /// For what no limit holds.
    fn free() -> Turn {
        Turn { _permit: None }
    }
}

impl Limits {
    async fn turn(&self, owner: TokenId) -> Result<Turn, Error> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            match turns.get(&owner).and_then(Weak::upgrade) {
                Some(turn) => turn,
                None => {
                    turns.retain(|_, turn| turn.strong_count() > 0);
                    let turn = Arc::new(Semaphore::new(1));
                    turns.insert(owner, Arc::downgrade(&turn));
                    turn
                }
            }
        };
        let permit = turn.acquire_owned().await.map_err(|_| Error::ShuttingDown)?;
        Ok(Turn { _permit: Some(permit) })
    }
}

/// What sessions take, or what one asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Share {
    sessions: u64,
    running: u64,
    cpus: f64,
    memory: u64,
    /// `None`: nothing new is asked for.
    disk: Option<u64>,
}

impl Share {
    /// What a sandbox with these resources takes.
    fn of_sandbox(resources: &Resources) -> Share {
        let memory = resources.memory_bytes.map_or(0, |size| size.0);
        Share { running: 1, cpus: resources.cpus.unwrap_or(0.0), memory, ..Share::default() }
    }

    fn add(&mut self, other: &Share) {
        self.sessions += other.sessions;
        self.running += other.running;
        self.cpus += other.cpus;
        self.memory = self.memory.saturating_add(other.memory);
        self.disk = match (self.disk, other.disk) {
            (None, None) => None,
            (a, b) => Some(a.unwrap_or(0).saturating_add(b.unwrap_or(0))),
        };
    }
}

/// May the caller's token have another session like this? The turn is to be held until the session is stored.
///
/// # Errors
/// [`Error::LimitExceeded`], [`Error::DiskLimit`]; [`Error::Invalid`] for a session that doesn't say how much it takes of
/// something that is limited.
pub(crate) async fn admit_create(inner: &Inner, caller: &Caller, new: &NewSession) -> Result<Turn, Error> {
    let Some((owner, name, limits)) = caller.token.and_then(|id| inner.tokens.limits_of(id)) else { return Ok(Turn::free()) };
    let resources = new.resources.unwrap_or_default();
    stated(&limits, &resources)?;
    let measured = match limits.disk_bytes {
        Some(_) => measure(inner, owner).await?,
        None => HashMap::new(),
    };
    let turn = inner.limits.turn(owner).await?;
    let asked = Share { sessions: 1, disk: Some(size(resources.disk_bytes)), ..Share::of_sandbox(&resources) };
    check(&name, &limits, &taken(inner, owner, None, &measured).await?, &asked)?;
    Ok(turn)
}

/// May the session's owner have its sandbox? Asked for what can make one; all else takes nothing that is limited.
/// A full disk keeps nobody from waking, since that is how it is cleaned up. The turn is to be held until the operation
/// is stored.
///
/// # Errors
/// [`Error::LimitExceeded`].
pub(crate) async fn admit(inner: &Inner, row: &SessionRow, kind: OperationKind) -> Result<Turn, Error> {
    if !matches!(kind, OperationKind::Wake | OperationKind::Start | OperationKind::Rollback) {
        return Ok(Turn::free());
    }
    let owner = row.owner_token.as_deref().and_then(|text| text.parse::<TokenId>().ok());
    let Some((owner, name, limits)) = owner.and_then(|id| inner.tokens.limits_of(id)) else { return Ok(Turn::free()) };
    let turn = inner.limits.turn(owner).await?;
    let taken = taken(inner, owner, Some(row.id), &HashMap::new()).await?;
    check(&name, &limits, &taken, &Share::of_sandbox(&row.resources))?;
    Ok(turn)
}

/// May a snapshot that takes `asked` bytes of its own be kept? The turn is to be held until it is stored.
///
/// # Errors
/// [`Error::DiskLimit`].
pub(crate) async fn admit_snapshot(inner: &Inner, row: &SessionRow, asked: u64) -> Result<Turn, Error> {
    let owner = row.owner_token.as_deref().and_then(|text| text.parse::<TokenId>().ok());
    let Some((owner, name, limits)) = owner.and_then(|id| inner.tokens.limits_of(id)) else { return Ok(Turn::free()) };
    let Some(limit) = limits.snapshot_bytes.map(|size| size.0) else { return Ok(Turn::free()) };
    let turn = inner.limits.turn(owner).await?;
    let filter = SnapshotFilter { owner_token: Some(owner.to_string()), ..SnapshotFilter::default() };
    let (mut used, mut cursor) = (0u64, None);
    loop {
        let page = inner.store.list_snapshots(filter.clone(), MAX_PAGE, cursor).await?;
        used = page.items.iter().fold(used, |used, row| used.saturating_add(row.unique_bytes));
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    // One that isn't measured yet takes something all the same.
    if used >= limit || used.saturating_add(asked) > limit {
        let text = format!("the token '{name}' has a limit of {limit} bytes of snapshots (used: {used}, asked: {asked})");
        return Err(Error::DiskLimit { detail: format!("{text}; delete a snapshot first") });
    }
    Ok(turn)
}

/// The entry in a session's history for a refusal that no caller is told: one of a wake that Dormouse itself asked for.
pub(crate) fn untold(inner: &Inner, row: &SessionRow, kind: OperationKind, actor: &Actor, error: &Error) -> Option<NewEvent> {
    if *actor != Actor::system() || !matches!(error, Error::LimitExceeded { .. }) {
        return None;
    }
    tracing::warn!(session = %row.id, %kind, %error, "a limit of the session's token stands in the way");
    let data = json!({ "kind": kind, "code": error.code(), "detail": error.to_string() });
    let (at, kind, actor) = (inner.now(), EventType::OPERATION_FAILED, actor.clone());
    Some(NewEvent { at, kind, actor, operation_id: None, data })
}

/// What is limited must be stated, else it couldn't be counted.
fn stated(limits: &TokenLimits, resources: &Resources) -> Result<(), Error> {
    let missing = |field| Err(Error::invalid(field, "this token's limit needs it: say how much the session takes"));
    if limits.cpus.is_some() && resources.cpus.is_none() {
        return missing("resources.cpus");
    }
    if limits.memory_bytes.is_some() && resources.memory_bytes.is_none() {
        return missing("resources.memory_bytes");
    }
    Ok(())
}

/// What the sessions of a token take now, but for the one that asks. A disk counts as large as it may get; where that
/// isn't said, as large as it was measured.
async fn taken(
    inner: &Inner,
    owner: TokenId,
    asks: Option<SessionId>,
    measured: &HashMap<SessionId, u64>,
) -> Result<Share, Error> {
    let mut taken = Share::default();
    for view in sessions_of(inner, owner).await?.into_iter().filter(|view| Some(view.row.id) != asks) {
        taken.add(&share_of(&view, measured));
    }
    Ok(taken)
}

fn share_of(view: &SessionView, measured: &HashMap<SessionId, u64>) -> Share {
    let row = &view.row;
    if matches!(row.state, State::Failed | State::Deleted) {
        return Share::default();
    }
    let coming = view.operation.as_ref().is_some_and(|operation| lifecycle::goal(operation.kind, row.state) == State::Running);
    let mut share = match row.state {
        State::Running | State::Paused | State::Creating => Share::of_sandbox(&row.resources),
        _ if coming => Share::of_sandbox(&row.resources),
        _ => Share::default(),
    };
    share.sessions = 1;
    let stated = row.resources.disk_bytes.map(|size| size.0);
    share.disk = Some(stated.or_else(|| measured.get(&row.id).copied()).unwrap_or(0));
    share
}

/// A token's sessions, as their drivers show them where they have one: those know what is under way, too.
async fn sessions_of(inner: &Inner, owner: TokenId) -> Result<Vec<SessionView>, Error> {
    let filter = SessionFilter { owner_token: Some(owner.to_string()), ..SessionFilter::default() };
    let (mut views, mut cursor) = (Vec::new(), None);
    loop {
        let page = inner.store.list_sessions(filter.clone(), MAX_PAGE, cursor).await?;
        views.extend(page.items.into_iter().map(|row| match inner.known(row.id) {
            Some(session) => session.view(),
            None => SessionView::new(Arc::new(row), None),
        }));
        cursor = page.next_cursor;
        if cursor.is_none() {
            return Ok(views);
        }
    }
}

/// The disks of a token's sessions that don't say how large they may get. Before the turn: it can take a while.
async fn measure(inner: &Inner, owner: TokenId) -> Result<HashMap<SessionId, u64>, Error> {
    let views = sessions_of(inner, owner).await?;
    let unstated = views.into_iter().filter(|view| view.row.resources.disk_bytes.is_none());
    let disks: Vec<_> = unstated.map(|view| (view.row.clone(), inner.layout(view.row.id).upper())).collect();
    blocking(move || {
        let one = |(row, upper): (Arc<SessionRow>, std::path::PathBuf)| match snapshot::disk::usage_bytes(&upper) {
            // What the object store alone has was measured when it was packed.
            _ if parcels::is_away(&row) => Ok((row.id, row.parcel.as_ref().map_or(0, |parcel| parcel.disk_bytes))),
            Ok(bytes) => Ok((row.id, bytes)),
            // What can't be measured is not taken for nothing: whoever works inside could bring that about.
            Err(error) => Err(Error::internal(format!("the disk of session {} can't be measured: {error}", row.id))),
        };
        disks.into_iter().map(one).collect()
    })
    .await
    .flatten()
}

fn size(bytes: Option<ByteSize>) -> u64 {
    bytes.map_or(0, |size| size.0)
}

/// Is there room for `asked` beside what is `taken`?
fn check(token: &str, limits: &TokenLimits, taken: &Share, asked: &Share) -> Result<(), Error> {
    let refuse = |limit: &dyn std::fmt::Display, what: &str, used: &dyn std::fmt::Display, asked: &dyn std::fmt::Display| {
        format!("the token '{token}' has a limit of {limit} {what} (used: {used}, asked: {asked})")
    };
    let counts = [
        (limits.sessions, "sessions", taken.sessions, asked.sessions, "delete a session first"),
        (limits.running_sessions, "running sessions", taken.running, asked.running, "hibernate, stop or delete one first"),
        (
            limits.memory_bytes.map(|size| size.0),
            "bytes of memory for its running sessions",
            taken.memory,
            asked.memory,
            "hibernate, stop or delete a session first",
        ),
    ];
    for (limit, what, used, asked, hint) in counts {
        if let Some(limit) = limit.filter(|limit| asked > 0 && used.saturating_add(asked) > *limit) {
            return Err(Error::LimitExceeded { detail: format!("{}; {hint}", refuse(&limit, what, &used, &asked)) });
        }
    }
    if let Some(limit) = limits.cpus.filter(|limit| asked.cpus > 0.0 && taken.cpus + asked.cpus > *limit + ROUNDING) {
        let text = refuse(&limit, "CPUs for its running sessions", &taken.cpus, &asked.cpus);
        return Err(Error::LimitExceeded { detail: format!("{text}; hibernate, stop or delete a session first") });
    }
    if let (Some(limit), Some(asked)) = (size_limit(limits), asked.disk) {
        let used = taken.disk.unwrap_or(0);
        // A session that asks for no certain size takes some all the same.
        if used >= limit || used.saturating_add(asked) > limit {
            let text = refuse(&limit, "bytes of disk", &used, &asked);
            return Err(Error::DiskLimit { detail: format!("{text}; delete a session or some of its files first") });
        }
    }
    Ok(())
}

fn size_limit(limits: &TokenLimits) -> Option<u64> {
    limits.disk_bytes.map(|size| size.0)
}

/// Why limits can't be a token's.
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub(crate) fn sound(limits: &TokenLimits) -> Result<(), Error> {
    let at_least_one = |field, value: Option<u64>| match value {
        Some(0) => Err(Error::invalid(field, "it must be at least 1")),
        _ => Ok(()),
    };
    at_least_one("limits.sessions", limits.sessions)?;
    at_least_one("limits.running_sessions", limits.running_sessions)?;
    at_least_one("limits.memory_bytes", limits.memory_bytes.map(|size| size.0))?;
    at_least_one("limits.disk_bytes", size_limit(limits))?;
    at_least_one("limits.snapshot_bytes", limits.snapshot_bytes.map(|size| size.0))?;
    match limits.cpus {
        Some(cpus) if !(cpus.is_finite() && cpus > 0.0) => Err(Error::invalid("limits.cpus", "it must be above zero")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{Runtime, Timestamp};

    fn limits() -> TokenLimits {
        let size = |bytes| Some(ByteSize(bytes));
        TokenLimits {
            sessions: Some(3),
            running_sessions: Some(2),
            cpus: Some(1.5),
            memory_bytes: size(100),
            disk_bytes: size(50),
            snapshot_bytes: None,
        }
    }

    #[test]
    fn what_fits_is_let_in_and_what_doesnt_is_told_in_numbers() {
        let sandbox = |cpus, memory| Share { running: 1, cpus, memory, ..Share::default() };
        let create = |cpus, memory, disk| Share { sessions: 1, disk: Some(disk), ..sandbox(cpus, memory) };
        let taken = Share { sessions: 2, running: 1, cpus: 1.0, memory: 40, disk: Some(20) };
        let cases: [(Share, Option<&str>); 8] = [
            (create(0.5, 60, 30), None),
            (sandbox(0.5, 60), None),
            (create(0.6, 60, 30), Some("1.5 CPUs for its running sessions (used: 1, asked: 0.6)")),
            (create(0.5, 61, 30), Some("100 bytes of memory for its running sessions (used: 40, asked: 61)")),
            (create(0.5, 60, 31), Some("50 bytes of disk (used: 20, asked: 31)")),
            (Share { running: 2, ..Share::default() }, Some("2 running sessions (used: 1, asked: 2)")),
            (Share { sessions: 2, ..Share::default() }, Some("3 sessions (used: 2, asked: 2)")),
            (Share { sessions: u64::MAX, ..Share::default() }, Some("3 sessions (used: 2, asked: 18446744073709551615)")),
        ];
        for (asked, refused) in cases {
            let found = check("t", &limits(), &taken, &asked).map_err(|error| error.to_string());
            match refused {
                None => assert_eq!(found, Ok(()), "{asked:?}"),
                Some(text) => assert!(found.as_ref().is_err_and(|detail| detail.contains(text)), "{asked:?}: {found:?}"),
            }
            assert_eq!(check("t", &TokenLimits::default(), &taken, &asked), Ok(()), "no limit, no refusal");
        }
        let full = Share { disk: Some(50), ..Share::default() };
        let disk = check("t", &limits(), &full, &create(0.0, 0, 0)).unwrap_err();
        assert_eq!((disk.code(), disk.status(), disk.has_no_side_effects()), ("no_space", 507, true));
        assert_eq!(check("t", &limits(), &full, &sandbox(0.1, 1)), Ok(()), "a full disk keeps nobody from waking");
        let tenths = Share { cpus: 0.1 + 0.2 + 0.7, ..Share::default() };
        assert_eq!(check("t", &limits(), &tenths, &sandbox(0.5, 1)), Ok(()), "fractions add up to what they say");
    }

    #[test]
    fn sessions_count_by_how_they_stand() {
        let resources = Resources { cpus: Some(0.5), memory_bytes: Some(ByteSize(7)), ..Resources::default() };
        let mut row = SessionRow::new(SessionId::new(), Runtime::Gvisor, "debian", Timestamp(1));
        row.resources = resources;
        let measured = HashMap::from([(row.id, 9)]);
        let of = |state, disk: Option<u64>| {
            let resources = Resources { disk_bytes: disk.map(ByteSize), ..resources };
            let row = SessionRow { state, resources, ..row.clone() };
            share_of(&SessionView::new(Arc::new(row), None), &measured)
        };
        let asleep = Share { sessions: 1, disk: Some(9), ..Share::default() };
        let awake = Share { running: 1, cpus: 0.5, memory: 7, ..asleep };
        for state in [State::Creating, State::Running, State::Paused] {
            assert_eq!(of(state, None), awake, "{state}");
        }
        for state in [State::Hibernated, State::Stopped] {
            assert_eq!(of(state, None), asleep, "{state}");
        }
        for state in [State::Failed, State::Deleted] {
            assert_eq!(of(state, None), Share::default(), "{state}");
        }
        assert_eq!(of(State::Stopped, Some(100)).disk, Some(100), "what is stated counts before what is measured");
    }

    #[test]
    fn limits_of_nothing_are_refused_by_name() {
        assert_eq!(sound(&limits()), Ok(()));
        for (limits, field) in [
            (TokenLimits { sessions: Some(0), ..limits() }, "limits.sessions"),
            (TokenLimits { cpus: Some(f64::NAN), ..limits() }, "limits.cpus"),
            (TokenLimits { memory_bytes: Some(ByteSize(0)), ..limits() }, "limits.memory_bytes"),
        ] {
            assert!(matches!(sound(&limits), Err(Error::Invalid { field: found, .. }) if found == field), "{field}");
        }
    }

    #[tokio::test]
    async fn turns_come_one_after_the_other_and_are_forgotten() {
        let (limits, owner) = (Limits::default(), TokenId::new());
        let first = limits.turn(owner).await.unwrap();
        let other = limits.turn(TokenId::new()).await.unwrap();
        let mut second = Box::pin(limits.turn(owner));
        assert!(futures_util::poll!(&mut second).is_pending(), "the first still has it");
        drop(first);
        drop(second.await.unwrap());
        drop(other);
        drop(limits.turn(TokenId::new()).await.unwrap());
        assert_eq!(limits.turns.lock().unwrap().len(), 1, "only the latest is left to be forgotten");
    }
}
