//! `sudo`, `su`, `systemctl`, `dormouse-ctl` and `dormouse-guest connect`: small programs that ask the running guest.
//!
//! In a sandbox setuid bits are ignored and there is no systemd, but scripts rely on these names. Everything inside
//! is one trust domain: who is in may become anyone.

mod ask;
mod become_user;
mod connect;
mod ctl;
mod systemctl;

use std::process::ExitCode;

/// Runs the shim that the program was called as; `None` where it was called as itself.
pub fn run(mut args: impl Iterator<Item = String>) -> Option<ExitCode> {
    let called = args.next()?;
    let name = called.rsplit('/').next().unwrap_or(&called).to_owned();
    let args: Vec<String> = args.collect();
    match name.as_str() {
        "sudo" => Some(become_user::sudo(&args)),
        "su" => Some(become_user::su(&args)),
        "systemctl" => Some(systemctl::run(&args)),
        "dormouse-ctl" => Some(ctl::run(&args)),
        _ => match args.first().map(String::as_str) {
            Some("ctl") => Some(ctl::run(&args[1..])),
            Some("connect") => Some(connect::run(&args[1..])),
            _ => None,
        },
    }
}

fn print(line: &str) {
    use std::io::Write as _;
    // Nobody to tell when standard output is closed.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn fail(name: &str, message: &str, code: u8) -> ExitCode {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{name}: {message}");
    ExitCode::from(code)
}

pub use ask::{Answer, Question, SOCKET};
