//! Telling supervisors what their sessions may reach, and with which credentials.
//!
//! Each living supervisor has been told something last. Where that is not what holds now, it is told again: at once by
//! whoever changed it, and by [`follow`] where that failed or was too early.

use super::{ca_pem, rules, secrets::hosts_of};
use crate::{
    Error,
    inner::Inner,
    session::{Live, Session},
    supervisor_client::CallError,
};
use model::{OperationKind, SessionId, network::Policy};
use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Duration,
};
use store::SessionRow;
use tokio::time::Instant;
use wire::{
    Code,
    control::{Credentials, NetworkSpec, Request},
    guest::{Network, ResetConnections},
};

/// How long after a failure a supervisor is told again: longer each time, up to the second.
const AGAIN: Duration = Duration::from_millis(500);
const AGAIN_AT_MOST: Duration = Duration::from_secs(60);
/// How long a policy that is set waits for a session that is just changing.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often it looks meanwhile, where nothing is told of the session.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// What a supervisor is to know, as far as it can change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    policy: Policy,
    withheld: bool,
    /// Counts the changes of secrets, where any matter.
    secrets: u64,
}

impl Wanted {
    fn of(inner: &Inner, row: &SessionRow) -> Wanted {
        let matter = row.network.reads_requests();
        Wanted {
            policy: row.network.clone(),
            withheld: row.secrets_withheld,
            secrets: if matter { inner.secrets_changed.load(Ordering::Relaxed) } else { 0 },
        }
    }
}

/// A policy with what holds for every session here. It has no secret, so it may lie in a file.
pub(crate) fn spec(inner: &Inner, policy: &Policy) -> NetworkSpec {
    NetworkSpec { policy: policy.clone(), closed: inner.config.closed.clone(), roots: inner.config.egress_roots.clone() }
}

/// What the guest sets up.
pub(crate) fn inside(inner: &Inner, row: &SessionRow) -> Network {
    let ca = row.network.reads_requests().then(|| ca_pem(&inner.keyring.ca_seed(row)));
    Network { ca: ca.flatten() }
}

/// What is added to the session's requests, unsealed: never to be written anywhere.
async fn credentials(inner: &Inner, row: &SessionRow) -> Result<Credentials, Error> {
    let mut credentials = Credentials { withheld: row.secrets_withheld, ..Credentials::default() };
    if !row.network.reads_requests() {
        return Ok(credentials);
    }
    credentials.ca = Some(inner.keyring.ca_seed(row));
    if row.secrets_withheld {
        return Ok(credentials);
    }
    let kept = inner.store.list_secrets().await?;
    let hosts = hosts_of(&kept);
    let mut values = BTreeMap::new();
    for name in rules::allowed(&row.network, &hosts) {
        let value = kept.iter().find(|secret| secret.name == *name).and_then(|secret| inner.keyring.unseal(secret));
        match value {
            Some(value) => drop(values.insert(name.clone(), value)),
            None => tracing::error!(session = %row.id, secret = %name, "a secret can't be opened and is left out"),
        }
    }
    credentials.secrets = values;
    Ok(credentials)
}

async fn request(inner: &Inner, row: &SessionRow) -> Result<Request, Error> {
    Ok(Request::SetNetwork {
        network: spec(inner, &row.network),
        credentials: credentials(inner, row).await?,
        inside: inside(inner, row),
    })
}

/// One of an earlier version, which has no network.
fn is_older(error: &CallError) -> bool {
    matches!(error, CallError::Refused(error) if error.code == Code::Unsupported)
}

/// For a supervisor that was just given the policy `has`, and before any program runs on: gives it the credentials, where
/// there can be any, and what was changed meanwhile.
///
/// # Errors
/// Why it doesn't have them, for people.
pub(crate) async fn begin(inner: &Inner, id: SessionId, live: &Live, has: &Policy) -> Result<(), String> {
    // It is in memory while something is done with it.
    let Some(session) = inner.known(id) else { return Ok(()) };
    let row = session.view().row;
    let wanted = Wanted::of(inner, &row);
    if row.network.reads_requests() || row.network != *has {
        let request = request(inner, &row).await.map_err(|e| e.to_string())?;
        match live.supervisor.call_soon(&request).await {
            Ok(_) => {}
            Err(error) if is_older(&error) => {
                tracing::warn!(session = %id, "its supervisor is of an earlier version, which knows no credentials");
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    set_told(live, wanted);
    Ok(())
}

fn set_told(live: &Live, wanted: Wanted) {
    *live.told.lock().unwrap_or_else(PoisonError::into_inner) = Some(wanted);
}

fn has_been_told(live: &Live, wanted: &Wanted) -> bool {
    live.told.lock().unwrap_or_else(PoisonError::into_inner).as_ref() == Some(wanted)
}

/// Tells the session's supervisor what holds now, unless it has been told.
///
/// # Errors
/// It may not know; [`follow`] tells it again.
pub(crate) async fn tell(inner: &Inner, session: &Session, live: &Live) -> Result<(), Error> {
    // One at a time: an older policy must not arrive after a newer one.
    let _one = live.telling.acquire().await.map_err(|_| Error::ShuttingDown)?;
    let row = session.view().row;
    let wanted = Wanted::of(inner, &row);
    if has_been_told(live, &wanted) {
        return Ok(());
    }
    match live.supervisor.call_soon(&request(inner, &row).await?).await {
        Ok(_) => {}
        Err(error) if is_older(&error) => {
            if row.network != Policy::default() {
                tracing::warn!(session = %session.id, "its supervisor is of an earlier version, which has no network");
            }
        }
        Err(error) => return Err(session.call_error(error)),
    }
    set_told(live, wanted);
    Ok(())
}

/// Has a policy that was just set in force: tells the supervisor, once it can be told. A session that is being put to sleep,
/// or brought to life, is waited for.
///
/// # Errors
/// It is set, and may not be in force yet; [`follow`] sees to that.
pub(crate) async fn enforce(inner: &Inner, session: &Session) -> Result<(), Error> {
    let until = Instant::now() + PATIENCE;
    let mut changes = session.changes();
    loop {
        changes.borrow_and_update();
        let view = session.view();
        let is_free = view.operation.as_ref().is_none_or(|operation| operation.kind == OperationKind::Snapshot);
        let told = match (view.operation.filter(|_| !is_free), inner.awake(session)) {
            (Some(held), _) => Err(Error::Held { session: session.id, operation: held.id, kind: held.kind }),
            (None, Some(live)) => tell(inner, session, &live).await,
            // Whoever brings it to life tells it.
            (None, None) => return Ok(()),
        };
        match told {
            Err(Error::Held { .. } | Error::Lost { .. }) if Instant::now() < until => {}
            Err(Error::Inside(error)) if error.code == Code::Busy && Instant::now() < until => {}
            told => return told,
        }
        let _ = tokio::time::timeout(LOOK_AGAIN, changes.changed()).await;
    }
}

/// Sees to it, for as long as the supervisor lives, that it is told.
pub(crate) fn follow(inner: &Arc<Inner>, session: &Arc<Session>, live: &Arc<Live>) {
    let (inner_, session, live) = (inner.clone(), session.clone(), live.clone());
    inner.tasks.spawn(async move {
        let mut changes = session.changes();
        let mut pause = AGAIN;
        loop {
            changes.borrow_and_update();
            let present = inner_.awake(&session).is_some_and(|present| Arc::ptr_eq(&present, &live));
            let failed = match present {
                true => tell(&inner_, &session, &live).await.err(),
                false => None,
            };
            pause = if failed.is_some() { (pause * 2).min(AGAIN_AT_MOST) } else { AGAIN };
            if let Some(error) = &failed {
                tracing::warn!(session = %session.id, %error, "a session's network is not as it should be yet");
            }
            tokio::select! {
                _ = changes.changed(), if failed.is_none() => {}
                () = tokio::time::sleep(pause), if failed.is_some() => {}
                () = live.gone.cancelled() => return,
                () = inner_.closing.cancelled() => return,
            }
        }
    });
}

/// The connections that ended when the present generation began.
pub(crate) async fn reset(live: &Live) -> ResetConnections {
    let status = crate::ending::phase(live).await.ok().flatten();
    status.map(|status| status.reset).unwrap_or_default()
}
