//! The `dormouse` program: the server, the process that looks after a sandbox, and the commands of the client.

mod args;
mod client;
mod doctor;
mod serve;
mod supervise;
mod template_make;

use args::{Cli, Command, TemplateCommand};
use clap::{CommandFactory, Parser};
use client::{Context, Failure};
use std::{io::Write, process::ExitCode};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.global.json;
    match cli.command {
        Command::Serve(mut args) => {
            args.log_level = cli.global.log_level;
            program(serve::run(args))
        }
        Command::Supervise { spec, ready_fd } => program(supervise::run(&spec, ready_fd)),
        Command::Doctor => doctor::command(json),
        Command::Completions { shell } => completions(shell),
        Command::Restore { place, backup, data, key_file } => {
            program(serve::restore::run(&place, backup.as_deref(), data, key_file, json))
        }
        Command::Template(TemplateCommand::Make { which, templates }) => {
            program(template_make::run(which, templates, json, cli.global.quiet))
        }
        command => {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(e) => return Failure::failed(format!("can't start: {e}")).report(json),
            };
            let done = match Context::new(&cli.global) {
                Ok(ctx) => runtime.block_on(client::run(&ctx, command)),
                Err(failure) => Err(failure),
            };
            // A thread may still wait for standard input, which nothing can end.
            runtime.shutdown_background();
            done.unwrap_or_else(|failure| failure.report(json))
        }
    }
}

/// The end of a part that isn't a client's command.
fn program(done: anyhow::Result<ExitCode>) -> ExitCode {
    done.unwrap_or_else(|error| {
        eprintln!("dormouse: {error:#}");
        ExitCode::FAILURE
    })
}

fn completions(shell: clap_complete::Shell) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "dormouse", &mut script);
    // A reader that has gone wants no more of it.
    let _ = std::io::stdout().write_all(&script);
    ExitCode::SUCCESS
}
