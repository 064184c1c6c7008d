//! `systemctl` for the session's declared services, in short.

use super::{
    ask::{self, Answer, Question},
    fail, print,
};
use std::process::ExitCode;
use wire::records::ServiceRecord;

/// Exit status of `status` and `is-active` for a service that doesn't run; systemctl(1).
const INACTIVE: u8 = 3;
/// The same for one that isn't known.
const UNKNOWN: u8 = 4;

/// Called as `systemctl`.
pub fn run(args: &[String]) -> ExitCode {
    let words: Vec<&str> = args.iter().map(String::as_str).filter(|a| !a.starts_with('-')).collect();
    let quiet = args.iter().any(|a| a == "-q" || a == "--quiet");
    match words.as_slice() {
        [] | ["list-units" | "list-unit-files", ..] => with_services(|items| {
            for item in items {
                print(&format!("{:<32} loaded {:<9} {}", unit(item), active(item), item.state));
            }
            ExitCode::SUCCESS
        }),
        ["start" | "stop" | "restart", names @ ..] if !names.is_empty() => {
            let mut code = ExitCode::SUCCESS;
            for name in names {
                let question = Question::Service { action: words[0].into(), name: plain(name).into() };
                match ask::question(&question) {
                    Ok(Answer::Failed { message, .. }) => code = fail("systemctl", &message, 5),
                    Ok(_) => {}
                    Err(error) => return fail("systemctl", &format!("the guest can't be asked: {error}"), 1),
                }
            }
            code
        }
        ["status", name] => with_services(|items| match find(items, name) {
            Some(item) => {
                print(&format!("{} - {}", unit(item), item.state));
                print(&format!("     Active: {} ({}), restarts {}", active(item), item.state, item.restarts));
                if let Some(pid) = item.pid {
                    print(&format!("   Main PID: {pid}"));
                }
                ExitCode::from(if item.pid.is_some() { 0 } else { INACTIVE })
            }
            None => fail("systemctl", &format!("Unit {} could not be found.", plain(name)), UNKNOWN),
        }),
        ["is-active", name] => with_services(|items| {
            let item = find(items, name);
            if !quiet {
                print(item.map_or("inactive", active));
            }
            ExitCode::from(if item.is_some_and(|i| i.pid.is_some()) { 0 } else { INACTIVE })
        }),
        // Scripts call these after installing something; there is nothing to do.
        ["daemon-reload" | "daemon-reexec", ..] => ExitCode::SUCCESS,
        [word, ..] => fail(
            "systemctl",
            &format!("{word} is not known here: start, stop, restart, status, is-active, list-units for the session's services"),
            1,
        ),
    }
}

fn with_services(show: impl FnOnce(&[ServiceRecord]) -> ExitCode) -> ExitCode {
    match ask::question(&Question::Services) {
        Ok(Answer::Services { items }) => show(&items),
        Ok(_) => fail("systemctl", "the guest gave an answer that doesn't fit", 1),
        Err(error) => fail("systemctl", &format!("the guest can't be asked: {error}"), 1),
    }
}

fn plain(name: &str) -> &str {
    name.strip_suffix(".service").unwrap_or(name)
}

fn unit(item: &ServiceRecord) -> String {
    format!("{}.service", item.name)
}

fn active(item: &ServiceRecord) -> &'static str {
    match item.state.as_str() {
        "running" => "active",
        "failed" => "failed",
        "waiting" => "activating",
        _ => "inactive",
    }
}

fn find<'a>(items: &'a [ServiceRecord], name: &str) -> Option<&'a ServiceRecord> {
    items.iter().find(|i| i.name.as_str() == plain(name))
}
