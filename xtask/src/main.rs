//! What developers and CI do with this repository: set up, build, start, test, measure, check.

mod build;
mod check;
mod setup;
mod test;
mod up;

use anyhow::{Context, Result, bail};
use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

const HELP: &str = "\
cargo xtask up            install what is missing, build, start the server, open the first session
cargo xtask build         build the binary and the 'debian' template
cargo xtask test [--long] install what the tests need and run all of them
cargo xtask bench [--check] [ROW…]
                          run the benchmarks and print one table
cargo xtask check         layers, test index, formatting, lints";

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.split_first() {
        Some((&"up", [])) => up::up(),
        Some((&"build", [])) => build::build(build::Scope::Binary).map(|_| ()),
        Some((&"test", rest)) => test::test(rest),
        Some((&"bench", rest)) => test::bench(rest),
        Some((&"check", [])) => check::check(),
        _ => {
            eprintln!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The repository's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository").to_owned()
}

/// Cargo's target directory.
fn target_dir() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Runs a command in the repository's root and fails when it does.
fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.current_dir(root()).status().with_context(|| format!("run {name}"))?;
    if !status.success() {
        let args: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
        bail!("'{name} {}' failed: {status}", args.join(" "));
    }
    Ok(())
}

/// The cargo that runs us.
fn cargo() -> Command {
    Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// True where `program` is on PATH.
fn on_path(program: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}
