//! States, policies and sizes of a session.

use crate::ByteSize;
use serde::{Deserialize, Serialize};

macro_rules! snake_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident => $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// Every value, in the order of the list.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The word used in JSON, in the store and on the command line.
            pub fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str(self.as_str()) }
        }

        impl std::str::FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok($name::$variant),)+
                    _ => Err(format!("'{text}' is not one of: {}", [$($text),+].join(", "))),
                }
            }
        }
    };
}
pub(crate) use snake_enum;

snake_enum! {
    /// Where a session stands. What is under way is an operation, never a state of its own.
    State {
        Creating => "creating",
        Running => "running",
        Paused => "paused",
        Hibernated => "hibernated",
        Stopped => "stopped",
        Failed => "failed",
        Deleted => "deleted",
    }
}

impl State {
    /// True where a sandbox is alive.
    pub fn has_sandbox(self) -> bool {
        matches!(self, State::Running | State::Paused)
    }

    /// True where nothing will ever happen to the session again.
    pub fn is_final(self) -> bool {
        matches!(self, State::Failed | State::Deleted)
    }
}

snake_enum! {
    /// What is known of a session's memory.
    Memory {
        /// In a running or paused sandbox.
        Live => "live",
        /// In an image on storage.
        Saved => "saved",
        /// It was there and is gone; `reason` says why.
        Lost => "lost",
        /// There never was any.
        None => "none",
    }
}

snake_enum! {
    /// How sandboxes are made.
    Runtime {
        Gvisor => "gvisor",
        Host => "host",
        Interpreter => "interpreter",
    }
}

snake_enum! {
    /// One kind of lifecycle change.
    OperationKind {
        Create => "create",
        Hibernate => "hibernate",
        Wake => "wake",
        Stop => "stop",
        Start => "start",
        Pause => "pause",
        Unpause => "unpause",
        Snapshot => "snapshot",
        Rollback => "rollback",
        /// The sandbox of a supervisor that died is taken over by another one, memory and all.
        Recapture => "recapture",
        Delete => "delete",
    }
}

snake_enum! {
    /// How far an operation has come.
    OperationState {
        Running => "running",
        Done => "done",
        Failed => "failed",
        /// A crash interrupted it, and its effects were taken back.
        Undone => "undone",
    }
}

snake_enum! {
    /// Why a session is not running, or how its last sandbox ended.
    EndReason {
        Asked => "asked",
        Idle => "idle",
        Timeout => "timeout",
        Oom => "oom",
        Killed => "killed",
        SandboxExited => "sandbox_exited",
        SupervisorLost => "supervisor_lost",
        HostRebooted => "host_rebooted",
        CreateFailed => "create_failed",
        StartFailed => "start_failed",
        Expired => "expired",
        /// It was set back to a snapshot.
        RolledBack => "rolled_back",
        ProtocolViolation => "protocol_violation",
    }
}

snake_enum! {
    /// What idleness leads to.
    IdleAction {
        Hibernate => "hibernate",
        Stop => "stop",
        None => "none",
    }
}

snake_enum! {
    /// What counts as idle.
    IdleWhen {
        /// Nothing is happening inside.
        NoActivity => "no_activity",
        /// Nobody is watching.
        NoClients => "no_clients",
    }
}

snake_enum! {
    /// What the end of the allowed running time leads to.
    OnTimeout {
        Hibernate => "hibernate",
        Stop => "stop",
    }
}

snake_enum! {
    /// Moments at which a session can have a command of its own run.
    HookName {
        OnCreate => "on_create",
        BeforeHibernate => "before_hibernate",
        BeforeStop => "before_stop",
        OnTimeout => "on_timeout",
        OnWake => "on_wake",
    }
}

/// A session's hooks: the argv of each.
pub type Hooks = std::collections::BTreeMap<HookName, Vec<String>>;

/// When and how idleness ends a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdlePolicy {
    /// Length of the window in which nothing happened, in seconds.
    pub after_seconds: u64,
    pub action: IdleAction,
    #[serde(default = "IdlePolicy::default_when")]
    pub when: IdleWhen,
}

impl IdlePolicy {
    fn default_when() -> IdleWhen {
        IdleWhen::NoActivity
    }
}

/// What a sandbox may use. `None`: no limit of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Resources {
    /// Cores, in fractions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<ByteSize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<ByteSize>,
    /// Processes and threads inside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_read_back() {
        for state in State::ALL {
            assert_eq!(state.as_str().parse::<State>(), Ok(*state));
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
        assert!("asleep".parse::<State>().is_err());
    }
}
