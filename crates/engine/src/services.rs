//! Services, processes and resource figures of a session.

use crate::{Caller, Engine, Error, ask::Asked, begin::is_unknown, supervisor_client::CallError};
use model::{EventType, ServiceName, ServiceSpec, SessionId};
use serde_json::json;
use store::{NewEvent, SessionChange, SessionRow};
use wire::{
    Code,
    control::{Answer, Request},
    records::{ProcessRecord, ServiceRecord, Stats},
};

impl Engine {
    /// A session's services. Those of a session that isn't running are stopped.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Unresponsive`].
    pub async fn services(&self, id: SessionId) -> Result<Vec<ServiceRecord>, Error> {
        let session = self.inner.present(id).await?;
        let stopped = |spec: &ServiceSpec| ServiceRecord {
            name: spec.name.clone(),
            state: "stopped".to_owned(),
            pid: None,
            restarts: 0,
            exit_code: None,
            signal: None,
            output_bytes: model::Offset::ZERO,
        };
        let stopped = || session.view().row.services.iter().map(stopped).collect();
        let Some(live) = self.inner.awake(&session).filter(|_| session.view().row.state == model::State::Running) else {
            return Ok(stopped());
        };
        match live.supervisor.call_soon(&Request::Services).await {
            Ok(Answer::Services { items }) => Ok(items),
            Ok(_) => Err(Error::internal("the supervisor answered with something else")),
            // Its sandbox has just ended, and they with it.
            Err(CallError::Refused(error)) if error.code == Code::SandboxGone => Ok(stopped()),
            Err(error) => Err(session.call_error(error)),
        }
    }

    /// Sets a session's services: new ones start, missing ones stop. A session that doesn't run starts them when it
    /// does.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotFound`], [`Error::Unresponsive`].
    pub async fn set_services(
        &self,
        caller: &Caller,
        id: SessionId,
        services: Vec<ServiceSpec>,
    ) -> Result<Vec<ServiceRecord>, Error> {
        let mut names = std::collections::BTreeSet::new();
        for service in &services {
            if service.argv.first().is_none_or(String::is_empty) {
                return Err(Error::invalid("services", format!("the service '{}' has no command", service.name)));
            }
            if !names.insert(&service.name) {
                return Err(Error::invalid("services", format!("there are two services '{}'", service.name)));
            }
        }
        let session = self.inner.present(id).await?;
        let (now, actor, wanted) = (self.inner.now(), caller.actor.clone(), services.clone());
        let change = move |row: &SessionRow| {
            if row.services == wanted {
                return None;
            }
            let mut change = SessionChange::new(row.clone());
            change.session.services.clone_from(&wanted);
            change.session.updated_at = now;
            let (kind, data) = (EventType::SESSION_UPDATED, json!({ "fields": ["services"] }));
            change.events.push(NewEvent { at: now, kind, actor: actor.clone(), operation_id: None, data });
            Some(change)
        };
        self.inner.change(&session, Box::new(change)).await?;
        if let Some(live) = self.inner.awake(&session).filter(|_| session.view().row.state == model::State::Running) {
            match live.supervisor.call_soon(&Request::SetServices { services }).await {
                Ok(_) => {}
                Err(error @ CallError::Refused(_)) if !is_unknown(&error) => return Err(session.call_error(error)),
                // They are stored: a sandbox that comes next has them.
                Err(error) => tracing::warn!(session = %session.id, %error, "a sandbox may not have its changed services"),
            }
        }
        self.services(id).await
    }

    /// Starts, stops or restarts a service.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Invalid`]; why the session can't be used.
    pub async fn service(&self, caller: &Caller, id: SessionId, name: ServiceName, action: &str) -> Result<ServiceRecord, Error> {
        if !matches!(action, "start" | "stop" | "restart") {
            return Err(Error::invalid("action", "it is start, stop or restart"));
        }
        let session = self.inner.present(id).await?;
        let unknown = || Error::not_found(format!("service '{name}' in session {id}"));
        if !session.view().row.services.iter().any(|spec| spec.name == name) {
            return Err(unknown());
        }
        let request = Request::Service { name: name.clone(), action: action.to_owned() };
        match self.inner.ask(&session, &caller.actor, &request).await? {
            Asked::Done => {}
            Asked::Refused(error) => return Err(session.call_error(CallError::Refused(error))),
            Asked::Unknown(error) => return Err(error),
        }
        self.services(id).await?.into_iter().find(|service| service.name == name).ok_or_else(unknown)
    }

    /// What a running session uses now.
    ///
    /// # Errors
    /// [`Error::NotRunning`], [`Error::Paused`], [`Error::Unresponsive`].
    pub async fn stats(&self, id: SessionId) -> Result<Stats, Error> {
        let session = self.inner.present(id).await?;
        match self.running(&session)?.supervisor.call_soon(&Request::Stats).await {
            Ok(Answer::Stats { stats }) => Ok(stats),
            Ok(_) => Err(Error::internal("the supervisor answered with something else")),
            Err(error) => Err(session.call_error(error)),
        }
    }

    /// The processes inside a running session.
    ///
    /// # Errors
    /// As [`Self::stats`].
    pub async fn processes(&self, id: SessionId) -> Result<Vec<ProcessRecord>, Error> {
        let session = self.inner.present(id).await?;
        match self.running(&session)?.supervisor.call_soon(&Request::Processes).await {
            Ok(Answer::Processes { items }) => Ok(items),
            Ok(_) => Err(Error::internal("the supervisor answered with something else")),
            Err(error) => Err(session.call_error(error)),
        }
    }
}
