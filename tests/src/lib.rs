//! Black-box tests of the real `dormouse`: this is their harness.
//!
//! Each test starts servers of its own, on free ports and in data directories of its own, with the shared template
//! folder. When a [`Server`] is dropped, everything that belonged to its data directory is ended and removed, however
//! the test ended; and a test that passed has checked that nothing was left over.

pub mod faults;
pub mod http;
pub mod leftovers;
pub mod place;
pub mod s3;
pub mod server;
pub mod session;
pub mod terminal;
pub mod upstream;

pub use http::Reply;
pub use server::{Options, Server};
pub use session::{Exec, Session};

use std::time::{Duration, Instant};

/// How long a test waits for what must come: generous, the machines are busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `look` finds something. Panics with `what` when it doesn't within [`PATIENCE`].
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {} s in vain: {what}", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// True where the long forms of tests are asked for.
pub fn long() -> bool {
    std::env::var_os("DORMOUSE_LONG").is_some()
}

/// A seed for random choices: `DORMOUSE_SEED`, else from the clock. Printed, so that a failure can be repeated.
pub fn seed() -> u64 {
    let given = std::env::var("DORMOUSE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        since.as_nanos() as u64
    });
    println!("DORMOUSE_SEED={seed}");
    seed
}

/// A small generator of reproducible choices (splitmix64, public domain constants).
pub struct Choices(pub u64);

impl Choices {
    #[allow(clippy::should_implement_trait, reason = "a choice that never ends is no iterator's item")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}
