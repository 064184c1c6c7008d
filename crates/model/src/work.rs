//! What runs in a session: execs, terminals and services.

use crate::{ServiceName, session::snake_enum};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

snake_enum! {
    /// How an exec stands.
    ExecState {
        Running => "running",
        Exited => "exited",
        Killed => "killed",
        TimedOut => "timed_out",
        /// Its sandbox ended before it did: nobody knows how it would have ended.
        Lost => "lost",
    }
}

snake_enum! {
    /// How a terminal stands.
    TerminalState {
        Running => "running",
        Ended => "ended",
    }
}

snake_enum! {
    /// When a service is started again after it ended.
    ServiceRestart {
        Always => "always",
        OnFailure => "on_failure",
        Never => "never",
    }
}

/// A program that the guest keeps running and starts again at every boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceSpec {
    pub name: ServiceName,
    pub argv: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default = "ServiceSpec::default_restart")]
    pub restart: ServiceRestart,
}

impl ServiceSpec {
    fn default_restart() -> ServiceRestart {
        ServiceRestart::Always
    }
}
