//! What the server counts about itself, in the text form that Prometheus reads.

use engine::Counts;
use model::State;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Media type of [`Metrics::render`].
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: &'static str,
    route: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MethodLabels {
    method: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TrafficLabels {
    session: String,
    host: String,
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HostLabels {
    session: String,
    host: String,
}

/// Counters of one server.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    seconds: Family<MethodLabels, Histogram>,
    sessions: Family<StateLabels, Gauge>,
    network_bytes: Family<TrafficLabels, Gauge>,
    network_connections: Family<HostLabels, Gauge>,
    /// Taken while the families above are filled anew and written.
    writing: Mutex<()>,
    pooled: Gauge,
    operations: Gauge,
    pub(crate) execs_started: Counter,
    pub(crate) terminals_opened: Counter,
    pub(crate) sessions_created: Counter,
    pub(crate) output_bytes: Counter,
}

fn buckets() -> Histogram {
    Histogram::new([0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0])
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut registry = Registry::with_prefix("dormouse");
        let requests = Family::default();
        registry.register("http_requests", "Requests answered, by route and status", requests.clone());
        let seconds = Family::new_with_constructor(buckets as fn() -> Histogram);
        registry.register("http_request_duration_seconds", "Time until the head of the answer", seconds.clone());
        let sessions = Family::default();
        registry.register("sessions", "Sessions by state", sessions.clone());
        let network_bytes = Family::default();
        let help = "Bytes over the network of sessions that have a sandbox, by host; the largest of each";
        registry.register("session_network_bytes", help, network_bytes.clone());
        let network_connections = Family::default();
        registry.register("session_network_connections", "The same, connections", network_connections.clone());
        let mut gauge = |name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let pooled = gauge("pooled_sandboxes", "Booted sandboxes that wait for sessions");
        let operations = gauge("operations_running", "Lifecycle operations under way");
        let mut counter = |name: &str, help: &str| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let execs_started = counter("execs_started", "Execs started through the API");
        let terminals_opened = counter("terminals_opened", "Terminals opened through the API");
        let sessions_created = counter("sessions_created", "Sessions created through the API");
        let output_bytes = counter("output_bytes_sent", "Bytes of kept output sent to clients");
        Metrics {
            registry,
            requests,
            seconds,
            sessions,
            network_bytes,
            network_connections,
            writing: Mutex::new(()),
            pooled,
            operations,
            execs_started,
            terminals_opened,
            sessions_created,
            output_bytes,
        }
    }

    pub(crate) fn answered(&self, method: &http::Method, route: &str, status: u16, took: Duration) {
        let method = method_word(method);
        self.requests.get_or_create(&RequestLabels { method, route: route.to_owned(), status }).inc();
        self.seconds.get_or_create(&MethodLabels { method }).observe(took.as_secs_f64());
    }

    /// Everything counted so far.
    pub(crate) fn render(&self, counts: &Counts) -> String {
        let whole = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        for state in State::ALL.iter().filter(|state| **state != State::Deleted) {
            let count = counts.sessions.get(state.as_str()).copied().unwrap_or(0);
            self.sessions.get_or_create(&StateLabels { state: state.as_str() }).set(whole(count));
        }
        self.pooled.set(whole(counts.pooled));
        self.operations.set(whole(counts.operations));
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.network_bytes.clear();
        self.network_connections.clear();
        for (session, host, totals) in &counts.traffic {
            let session = session.to_string();
            for (direction, bytes) in [("sent", totals.sent_bytes), ("received", totals.received_bytes)] {
                let labels = TrafficLabels { session: session.clone(), host: host.clone(), direction };
                self.network_bytes.get_or_create(&labels).set(whole(bytes));
            }
            let labels = HostLabels { session, host: host.clone() };
            self.network_connections.get_or_create(&labels).set(whole(totals.connections));
        }
        let mut text = String::new();
        if prometheus_client::encoding::text::encode(&mut text, &self.registry).is_err() {
            tracing::error!("the metrics can't be written");
        }
        text
    }
}

/// A word from a closed list: a client's own invention must not become a label.
fn method_word(method: &http::Method) -> &'static str {
    use http::Method as M;
    match *method {
        M::GET => "GET",
        M::POST => "POST",
        M::PUT => "PUT",
        M::PATCH => "PATCH",
        M::DELETE => "DELETE",
        M::HEAD => "HEAD",
        M::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_sessions_are_counted() {
        let metrics = Metrics::new();
        metrics.answered(&http::Method::GET, "/v1/sessions/{id}", 404, Duration::from_millis(2));
        metrics.answered(&http::Method::from_bytes(b"BREW").unwrap(), "none", 405, Duration::ZERO);
        let session = model::SessionId::new();
        let totals = store::HostTotals { connections: 2, sent_bytes: 5, received_bytes: 7 };
        let traffic = vec![(session, "a.example".to_owned(), totals)];
        let counts = Counts { sessions: [("running", 3)].into(), pooled: 2, operations: 0, traffic };
        let text = metrics.render(&counts);
        for line in [
            "dormouse_http_requests_total{method=\"GET\",route=\"/v1/sessions/{id}\",status=\"404\"} 1",
            "dormouse_http_requests_total{method=\"other\",route=\"none\",status=\"405\"} 1",
            "dormouse_sessions{state=\"running\"} 3",
            "dormouse_sessions{state=\"paused\"} 0",
            "dormouse_pooled_sandboxes 2",
            &format!("dormouse_session_network_bytes{{session=\"{session}\",host=\"a.example\",direction=\"received\"}} 7"),
            &format!("dormouse_session_network_connections{{session=\"{session}\",host=\"a.example\"}} 2"),
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        let gone = metrics.render(&Counts::default());
        assert!(!gone.contains("a.example"), "a session without a sandbox isn't counted: {gone}");
    }
}
