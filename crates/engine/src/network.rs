//! The network of sessions: what each may reach, who is told of it, secrets, and the way in.
//!
//! ```text
//!  row: policy ─┬─► NetworkSpec: in the spec of each sandbox, in force from its first packet
//!  store: secrets, sealed ─► Credentials ─► SetNetwork: to a living supervisor's memory, and nowhere else
//! ```
//! A policy is carried out by the supervisor. Here it is kept, checked, and told again whenever it or a secret that it
//! names has changed.

mod dial;
mod keys;
mod links;
mod rules;
mod secrets;
mod tell;

pub use dial::{Connection, NetworkView};
pub(crate) use keys::Keyring;
pub use secrets::Secret;
pub(crate) use secrets::authorize;
pub(crate) use tell::{Wanted, begin, enforce, follow, inside, reset, spec, tell};

use model::Timestamp;
use wire::control::CaSeed;

/// The certificate of a session's own authority, as PEM; `None` where it can't be made.
pub(crate) fn ca_pem(seed: &CaSeed) -> Option<String> {
    let not_before = seed.from.since(Timestamp(0)).as_secs();
    let key = egress::CaKey { seed: seed.bytes()?, label: seed.label.clone(), not_before };
    Some(egress::ca_certificate(&key)).filter(|pem| !pem.is_empty())
}
