//! The interface described for programs: OpenAPI, made from the routes and types themselves.

use crate::routes as r;
use bytes::Bytes;
use std::sync::OnceLock;
use utoipa::{
    Modify, OpenApi,
    openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
};

#[derive(OpenApi)]
#[openapi(
    info(title = "Dormouse", description = "Durable sandbox sessions for AI agents, on your own machines.\n\nTimes are RFC 3339 UTC; lists are `{\"items\", \"next_cursor\"}` with `?limit=&cursor=`; errors are `application/problem+json` with a `code` to act on; an unknown field is refused by name. `Idempotency-Key` is honoured on every POST for 24 h. Event streams and WebSockets take the token as `?access_token=`, too."),
    modifiers(&Bearer),
    security(("token" = [])),
    tags(
        (name = "sessions", description = "The durable thing that a client holds"),
        (name = "lifecycle", description = "Hibernate and wake, stop and start, pause and unpause"),
        (name = "execs", description = "Commands run in a session"),
        (name = "terminals", description = "PTYs with a screen, scrollback and any number of viewers"),
        (name = "services", description = "Programs that a session keeps running"),
        (name = "snapshots", description = "Immutable copies of sessions, and sessions made from them"),
        (name = "files", description = "Files of a session, running or asleep"),
        (name = "network", description = "What a session reaches, its ports and previews, and secrets that it never holds"),
        (name = "events", description = "The history of sessions"),
        (name = "server", description = "The server itself")
    ),
    paths(
        r::sessions::create, r::sessions::list, r::sessions::show, r::sessions::patch, r::sessions::delete,
        r::lifecycle::hibernate, r::lifecycle::wake, r::lifecycle::pause, r::lifecycle::unpause, r::lifecycle::stop,
        r::lifecycle::start, r::lifecycle::extend, r::lifecycle::operation, r::connect::connect,
        r::execs::create, r::execs::list, r::execs::show, r::execs::signal, r::execs::stdin, r::exec_output::exec_output,
        r::terminals::create, r::terminals::list, r::terminals::show, r::terminals::close, r::terminals::screen,
        r::terminals::output, r::terminal_link::attach,
        r::services::list, r::services::act, r::services::output, r::services::stats, r::services::processes, r::services::logs,
        r::files::read, r::files::write, r::files::remove, r::files::stat, r::files::list, r::files::mkdir, r::files::rename,
        r::files::watch, r::files::pack, r::files::unpack,
        r::snapshots::create, r::snapshots::list, r::snapshots::show, r::snapshots::delete, r::snapshots::fork_session,
        r::snapshots::fork_snapshot, r::snapshots::rollback,
        r::network::show, r::ports::list, r::ports::pass, r::ports::link, r::ports::tcp, r::secrets::list, r::secrets::set,
        r::secrets::put, r::secrets::remove, r::storage::show, r::storage::collect, r::storage::check,
        r::storage::pack, r::storage::backup, r::storage::backups, r::storage::backup_remove, r::storage::rotate_key, r::storage::export, r::storage::import,
        r::events::of_session, r::events::of_all,
        r::admin::tokens, r::admin::token_new, r::admin::token_revoke, r::admin::templates, r::admin::template_add,
        r::admin::template_remove, r::admin::server, r::admin::shutdown, r::admin::audit,
        r::pages::healthz, r::pages::readyz, r::pages::metrics, r::pages::openapi, r::pages::docs
    )
)]
struct Document;

/// How a token is sent.
struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        document.components.get_or_insert_default().add_security_scheme("token", SecurityScheme::Http(scheme));
    }
}

/// The document as JSON; made once.
pub(crate) fn document() -> Bytes {
    static TEXT: OnceLock<Bytes> = OnceLock::new();
    TEXT.get_or_init(|| match Document::openapi().to_json() {
        Ok(text) => text.into(),
        Err(error) => {
            tracing::error!(%error, "the OpenAPI document can't be written");
            Bytes::new()
        }
    })
    .clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes;
    use std::collections::BTreeSet;

    #[test]
    fn every_address_is_described_and_nothing_else() {
        let document: serde_json::Value = serde_json::from_slice(&document()).unwrap();
        let mut described = BTreeSet::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap().iter().filter(|(name, _)| *name != "parameters") {
                assert!(operation["responses"].as_object().is_some_and(|all| !all.is_empty()), "{method} {path} has no answer");
                assert!(operation["summary"].is_string(), "{method} {path} has no words");
                described.insert((method.to_uppercase(), path.clone()));
            }
        }
        let later: BTreeSet<_> = routes::later::ADDRESSES.iter().collect();
        let served: BTreeSet<_> = routes::table()
            .entries
            .iter()
            .filter(|entry| !later.contains(entry))
            .map(|(method, path)| ((*method).to_owned(), (*path).to_owned()))
            .collect();
        assert_eq!(described, served);
    }

    #[test]
    fn types_are_described_too() {
        let document: serde_json::Value = serde_json::from_slice(&document()).unwrap();
        for name in ["Session", "CreateSession", "Exec", "Terminal", "Snapshot", "ForkAnswer", "Problem", "ProblemCode", "Event"]
        {
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
    }
}
