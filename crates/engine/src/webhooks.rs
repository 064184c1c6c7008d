//! Webhooks: moments in the lives of sessions, told to other servers by HTTP.
//!
//! ```text
//!  log of all events ──► wanted? ──► POST, signed ──► 2xx: the place in the log is stored, on with the next
//!                                        ▲     │
//!                                        └─────┘ anything else: the same again, after a longer pause each time
//! ```
//! A webhook is a reader of the log that remembers its place, so each event that it wants is told at least once and in
//! order, through failures of the receiver and deaths of this server. Each webhook is a task of its own: while one is
//! stuck, nothing else waits. What waits for it waits in the store, not in memory.
//!
//! What is sent follows the Standard Webhooks specification (<https://www.standardwebhooks.com>), so its receivers'
//! libraries check it: `webhook-id`, the same for each try of one event; `webhook-timestamp`, of the try;
//! `webhook-signature`, HMAC-SHA256 over both and the body.

use crate::{Engine, Error, OpenError, inner::Inner};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use model::EventType;
use reqwest::{Client, Url, redirect::Policy};
use serde_json::{Value, json};
use sha2::Sha256;
use std::{fmt, sync::Arc, time::Duration};
use store::{Cursor, CursorKind, EventRow};

/// How long a receiver may take for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How much of an answer is read before the connection is given up. It says nothing that matters.
const MAX_ANSWER: usize = 64 * 1024;
/// The pause after a first failure; each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Events that nobody wanted are passed over this often before the place is stored.
const STORE_EVERY: u32 = 1000;
/// What a secret in the specification's own form begins with; base64 follows.
const SECRET_PREFIX: &str = "whsec_";

/// Somebody to be told.
#[derive(Clone, PartialEq, Eq)]
pub struct Webhook {
    url: Url,
    secret: Vec<u8>,
    events: Vec<String>,
}

impl Webhook {
    /// The kinds of events that are told where none are named.
    pub const DEFAULT_EVENTS: [&'static str; 11] = [
        "session.created",
        "session.deleted",
        "session.expired",
        "state.changed",
        "operation.started",
        "operation.failed",
        "timeout.near",
        "wake.done",
        "agent.waiting",
        "oom",
        "supervisor.lost",
    ];

    /// A webhook to `url`, signed with `secret`: plain text, or `whsec_` and base64. `events` are kinds such as
    /// `wake.done`, all of a family (`exec.*`), or all (`*`).
    ///
    /// # Errors
    /// What is wrong, in words that don't repeat the secret.
    pub fn new(url: &str, secret: &str, events: Option<Vec<String>>) -> Result<Webhook, String> {
        let url = Url::parse(url).map_err(|e| format!("a webhook's address is not right: {e}"))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err("a webhook's address begins with https:// or http://".to_owned());
        }
        let secret = match secret.strip_prefix(SECRET_PREFIX) {
            Some(encoded) => {
                let wrong = |_| format!("a webhook's secret that begins with {SECRET_PREFIX} goes on in base64");
                BASE64_STANDARD.decode(encoded).map_err(wrong)?
            }
            None => secret.as_bytes().to_vec(),
        };
        if secret.is_empty() {
            return Err("a webhook needs a secret, with which what it sends is signed".to_owned());
        }
        let events = events.unwrap_or_else(|| Self::DEFAULT_EVENTS.map(str::to_owned).to_vec());
        if events.is_empty() || events.iter().any(String::is_empty) {
            return Err("a webhook's list of events names at least one kind".to_owned());
        }
        Ok(Webhook { url, secret, events })
    }

    /// Where it leads.
    pub fn url(&self) -> &str {
        self.url.as_str()
    }

    fn wants(&self, kind: &EventType) -> bool {
        let kind = kind.0.as_ref();
        self.events.iter().any(|wanted| match wanted.strip_suffix('*') {
            Some("") => true,
            Some(family) => family.ends_with('.') && kind.starts_with(family),
            None => wanted == kind,
        })
    }

    /// Tells webhooks apart, by their address only: another secret or list of events leaves it where it is in the log.
    fn key(&self) -> String {
        blake3::hash(self.url.as_str().as_bytes()).to_hex()[..16].to_owned()
    }

    /// For logs: the rest of an address may be a secret, too.
    fn name(&self) -> String {
        let port = self.url.port().map(|port| format!(":{port}")).unwrap_or_default();
        format!("{}{port} ({})", self.url.host_str().unwrap_or_default(), &self.key()[..8])
    }

    /// The name under which the store keeps its place in the log.
    fn place(&self) -> String {
        format!("webhook.{}", self.key())
    }

    /// The same for each try of one event, and different for each event and webhook.
    fn message_id(&self, event: &EventRow) -> String {
        format!("evt_{}_{}_{}", event.session_id.0.as_simple(), event.seq.0, self.key())
    }

    /// The value of `webhook-signature`.
    fn sign(&self, id: &str, timestamp: &str, body: &[u8]) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.secret).expect("HMAC takes keys of any length");
        for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
            mac.update(part);
        }
        format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()))
    }
}

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Webhook").field("name", &self.name()).field("events", &self.events).finish_non_exhaustive()
    }
}

/// Starts telling all webhooks. One that is new begins with what comes from here on.
///
/// # Errors
/// The store can't be read or written; there is no HTTP client to be had.
pub(crate) async fn start(inner: &Arc<Inner>) -> Result<(), OpenError> {
    if inner.config.webhooks.is_empty() {
        return Ok(());
    }
    let version = concat!("dormouse/", env!("CARGO_PKG_VERSION"));
    let client = Client::builder().redirect(Policy::none()).timeout(ANSWER_LIMIT).user_agent(version).build();
    let client = client.map_err(|e| OpenError::Other(format!("webhooks can't be sent: {}", words(e))))?;
    let end = inner.store.latest_event().await?;
    for hook in inner.config.webhooks.clone() {
        let known = inner.store.meta(hook.place()).await?.map(Cursor);
        let after = match known.filter(|cursor| cursor.number(CursorKind::Events).is_ok()) {
            Some(after) => after,
            None => {
                inner.store.set_meta(hook.place(), end.0.clone()).await?;
                end.clone()
            }
        };
        let teller = Teller { inner: inner.clone(), client: client.clone(), hook, after, passed_over: 0 };
        inner.tasks.spawn(teller.run());
    }
    Ok(())
}

/// Tells one webhook.
struct Teller {
    inner: Arc<Inner>,
    client: Client,
    hook: Webhook,
    /// Everything up to here has been told.
    after: Cursor,
    /// Events since the place was stored.
    passed_over: u32,
}

impl Teller {
    async fn run(mut self) {
        let closing = self.inner.closing.clone();
        tokio::select! {
            // What is under way is broken off: the next server sends it again.
            () = closing.cancelled() => {}
            () = self.tell_all() => {}
        }
    }

    async fn tell_all(&mut self) {
        for attempt in 0u32.. {
            match self.follow().await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(webhook = self.hook.name(), %error, "the events for a webhook can't be read");
                    tokio::time::sleep(pause(attempt, rand::random())).await;
                }
            }
        }
    }

    async fn follow(&mut self) -> Result<(), Error> {
        let engine = Engine { inner: self.inner.clone() };
        let mut events = engine.follow_events_of_all(Some(self.after.clone())).await?;
        while let Some(event) = events.next().await? {
            let wanted = self.hook.wants(&event.kind);
            if wanted {
                self.tell(&event).await;
            }
            self.after = event.cursor();
            self.passed_over += 1;
            if wanted || self.passed_over >= STORE_EVERY {
                self.store_place().await;
            }
        }
        Ok(())
    }

    /// Where that fails, what was told since is told once more after a restart.
    async fn store_place(&mut self) {
        match self.inner.store.set_meta(self.hook.place(), self.after.0.clone()).await {
            Ok(()) => self.passed_over = 0,
            Err(error) => tracing::warn!(webhook = self.hook.name(), %error, "a webhook's place is not written down"),
        }
    }

    /// Tells one event, until it is taken.
    async fn tell(&self, event: &EventRow) {
        let id = self.hook.message_id(event);
        let body = Bytes::from(self.body(event).await.to_string());
        for attempt in 0u32.. {
            let Err(why) = self.send(&id, &body).await else { return };
            let pause = pause(attempt, rand::random());
            tracing::warn!(webhook = self.hook.name(), id, why, tries = attempt + 1, ?pause, "a webhook was not taken");
            tokio::time::sleep(pause).await;
        }
    }

    /// The event as the interface shows it, and of its session what a receiver needs to know which one it is.
    async fn body(&self, event: &EventRow) -> Value {
        let row = match self.inner.known(event.session_id) {
            Some(session) => Some(session.view().row),
            // Forgotten meanwhile, or damaged: its event is told all the same.
            None => self.inner.store.session(event.session_id).await.ok().flatten().map(Arc::new),
        };
        let key = row.as_ref().filter(|row| !row.key_freed).and_then(|row| row.key.clone());
        let mut body = json!({
            "seq": event.seq, "at": event.at, "session_id": event.session_id, "type": event.kind, "actor": event.actor,
            "data": event.data,
            "session": { "id": event.session_id, "key": key, "state": row.map(|row| row.state) },
        });
        if let Some(operation) = event.operation_id {
            body["operation_id"] = json!(operation);
        }
        body
    }

    /// Sends it once.
    async fn send(&self, id: &str, body: &Bytes) -> Result<(), String> {
        let timestamp = self.inner.now().0.div_euclid(1000).to_string();
        let request = self.client.post(self.hook.url.clone()).header("content-type", "application/json");
        let request = request.header("webhook-id", id).header("webhook-signature", self.hook.sign(id, &timestamp, body));
        let request = request.header("webhook-timestamp", timestamp).body(body.clone());
        let mut answer = request.send().await.map_err(words)?;
        let status = answer.status();
        // A connection whose answer was read can be used again.
        let mut read = 0;
        while let Ok(Some(piece)) = answer.chunk().await {
            read += piece.len();
            if read > MAX_ANSWER {
                break;
            }
        }
        if status.is_success() { Ok(()) } else { Err(format!("it answered {status}")) }
    }
}

/// What went wrong, without the address.
fn words(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// The pause after so many failures before, from half of it to the whole by `chance`, so that many webhooks that failed
/// together don't come back together.
fn pause(failures: u32, chance: f64) -> Duration {
    let whole = FIRST_PAUSE.saturating_mul(1 << failures.min(16)).min(LONGEST_PAUSE);
    whole / 2 + (whole / 2).mul_f64(chance.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{Actor, EventSeq, SessionId, Timestamp};
    use store::GlobalSeq;

    fn hook(secret: &str, events: Option<&[&str]>) -> Webhook {
        let events = events.map(|events| events.iter().map(|event| (*event).to_owned()).collect());
        Webhook::new("https://u:p@example.com:8443/hook?token=x", secret, events).unwrap()
    }

    /// The example that the libraries of the specification are tested with.
    #[test]
    fn a_signature_is_that_of_the_specification() {
        let hook = hook("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", None);
        let signed = hook.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", br#"{"test": 2432232314}"#);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn a_webhook_wants_what_it_names() {
        let wants = |events: Option<&[&str]>, kind: &'static str| hook("s", events).wants(&EventType(kind.into()));
        assert!(wants(None, "wake.done") && wants(None, "state.changed") && !wants(None, "exec.started"));
        assert!(wants(Some(&["exec.started"]), "exec.started") && !wants(Some(&["exec.started"]), "exec.ended"));
        assert!(wants(Some(&["exec.*"]), "exec.ended") && !wants(Some(&["exec.*"]), "wake.done"));
        assert!(!wants(Some(&["exec*"]), "exec.ended"), "a family ends with a dot");
        assert!(wants(Some(&["*"]), "from.the.future"));
    }

    #[test]
    fn mistakes_are_told_and_secrets_are_not() {
        for (url, secret, events) in [
            ("example.com", "s", None),
            ("ftp://example.com", "s", None),
            ("https://example.com", "", None),
            ("https://example.com", "whsec_!!!hidden", None),
            ("https://example.com", "whsec_", None),
            ("https://example.com", "s", Some(vec![])),
        ] {
            let error = Webhook::new(url, secret, events).unwrap_err();
            assert!(!error.contains("hidden"), "{error}");
        }
        let shown = format!("{:?}", hook("hidden", None));
        assert!(shown.contains("example.com:8443") && shown.contains("wake.done"), "{shown}");
        for secret in ["hidden", "token", "u:p", "104, 105"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }

    #[test]
    fn an_event_has_one_id_for_each_webhook() {
        let event = |seq| EventRow {
            global: GlobalSeq(seq + 90),
            session_id: SessionId(uuid::Uuid::from_u128(7)),
            seq: EventSeq(seq),
            at: Timestamp(1),
            kind: EventType::NOTE,
            actor: Actor::system(),
            operation_id: None,
            data: Value::Null,
        };
        let (a, b) = (hook("s", None), Webhook::new("https://example.com/other", "s", None).unwrap());
        assert_eq!(a.message_id(&event(1)), hook("another", Some(&["oom"])).message_id(&event(1)));
        assert_ne!(a.message_id(&event(1)), a.message_id(&event(2)));
        assert_ne!(a.message_id(&event(1)), b.message_id(&event(1)));
        assert_ne!(a.place(), b.place());
        assert!(!a.message_id(&event(1)).contains('.'), "a dot parts what is signed");
    }

    #[test]
    fn pauses_grow_from_a_second_to_five_minutes() {
        let whole: Vec<u64> = (0..10).map(|failures| pause(failures, 1.0).as_secs()).collect();
        assert_eq!(whole, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        assert_eq!(pause(0, 0.0), Duration::from_millis(500));
        assert_eq!(pause(u32::MAX, 1.0), LONGEST_PAUSE);
    }
}
