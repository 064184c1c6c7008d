//! The commands that talk to a server. They know its HTTP interface and nothing of how it is built.

mod address;
mod admin;
mod attach;
mod backoff;
mod carry;
mod copy;
mod events;
mod exec;
mod failure;
mod files;
mod follow;
mod history;
mod http;
mod lifecycle;
mod lines;
mod logs;
mod network;
mod new;
mod ports;
mod secrets;
mod select;
mod sessions;
mod snapshots;
mod storage;
mod text;
mod unpack;
mod websocket;

pub use address::default_data_dir;
pub use attach::DetachKeys;
pub use failure::Failure;
pub use text::{now, size};

use crate::args::{Command, Global};
use attach::Mode;
use failure::Result;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::{io::Write, process::ExitCode};

/// What every command has at hand.
#[derive(Debug, Clone)]
pub struct Context {
    pub client: http::Client,
    pub json: bool,
    pub quiet: bool,
}

impl Context {
    /// Finds the server.
    ///
    /// # Errors
    /// An address that is none.
    pub fn new(global: &Global) -> Result<Context> {
        let (address, token) = address::locate(global.url.as_deref(), global.token.as_deref())?;
        Ok(Context { client: http::Client::new(address, token), json: global.json, quiet: global.quiet })
    }

    /// Writes to standard output. A reader that has gone (`| head`) ends the command without a word.
    ///
    /// # Errors
    /// Standard output can't be written for another reason.
    pub fn print(&self, text: &str) -> Result<()> {
        let mut out = std::io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
            done => done.map_err(|e| Failure::failed(format!("can't write to standard output: {e}"))),
        }
    }

    /// Writes a value as one line of JSON.
    ///
    /// # Errors
    /// As [`Context::print`].
    pub fn print_json(&self, value: &Value) -> Result<()> {
        self.print(&format!("{value}\n"))
    }

    /// Says something about the command's work on standard error, unless `-q`.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            eprintln!("dormouse: {text}");
        }
    }

    /// Reads an answer that is also passed on as it is.
    ///
    /// # Errors
    /// It isn't what was asked for.
    pub fn read<T: DeserializeOwned>(value: &Value) -> Result<T> {
        T::deserialize(value)
            .map_err(|e| Failure::failed(format!("can't read the server's answer: {e} — compare 'dormouse version'")))
    }
}

/// Carries a client's command out.
///
/// # Errors
/// Why it failed, with its exit status.
pub async fn run(ctx: &Context, command: Command) -> Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        Command::New { key, options } => new::new(ctx, key, options).await.map(done),
        Command::Run { key, options, rm, keys, argv } => {
            new::run(ctx, key, options, rm, keys.detach_keys, argv).await.map_err(Failure::into_ours)
        }
        Command::Ls { state, meta, all, columns } => {
            sessions::ls(ctx, state.as_deref(), &meta, all, columns.as_deref()).await.map(done)
        }
        Command::Show { session, network: true } => network::show(ctx, &session).await.map(done),
        Command::Show { session, network: false } => sessions::show(ctx, &session).await.map(done),
        Command::Set { session, network } => network::set(ctx, &session, &network).await.map(done),
        Command::Stats { session } => sessions::stats(ctx, session.as_deref()).await.map(done),
        Command::Wait { session, exec } => sessions::wait(ctx, &session, exec.as_deref()).await,
        Command::Attach { session, terminal, observe, take, keys } => {
            let mode = match (observe, take) {
                (true, _) => Mode::Observe,
                (_, true) => Mode::Take,
                _ => Mode::Write,
            };
            let attached = attach::command(ctx, &session, terminal.as_deref(), mode, keys.detach_keys).await;
            attached.map_err(Failure::into_ours)
        }
        Command::Exec(args) => exec::command(ctx, args).await.map_err(Failure::into_ours),
        Command::Ps { session, all } => logs::ps(ctx, &session, all).await.map(done),
        Command::Logs { session, source, follow, from, since } => {
            logs::logs(ctx, &session, source.as_deref(), follow, from, since).await.map(done)
        }
        Command::Kill { session, exec, signal } => logs::kill(ctx, &session, &exec, signal).await.map(done),
        Command::Hibernate { which, until } => {
            let body = api_types::Hibernate { until };
            lifecycle::each(ctx, lifecycle::Verb::Hibernate, &which, &body).await
        }
        Command::Wake(which) => lifecycle::each(ctx, lifecycle::Verb::Wake, &which, &lifecycle::Nothing {}).await,
        Command::Pause(which) => lifecycle::each(ctx, lifecycle::Verb::Pause, &which, &lifecycle::Nothing {}).await,
        Command::Unpause(which) => lifecycle::each(ctx, lifecycle::Verb::Unpause, &which, &lifecycle::Nothing {}).await,
        Command::Stop(which) => lifecycle::each(ctx, lifecycle::Verb::Stop, &which, &lifecycle::Nothing {}).await,
        Command::Start { which, disk_only } => {
            let verb = if disk_only { lifecycle::Verb::StartDiskOnly } else { lifecycle::Verb::Start };
            lifecycle::each(ctx, verb, &which, &lifecycle::Nothing {}).await
        }
        Command::Rm(which) => lifecycle::each(ctx, lifecycle::Verb::Rm, &which, &lifecycle::Nothing {}).await,
        Command::Extend { session, by } => lifecycle::extend(ctx, &session, by).await.map(done),
        Command::Snapshot { session, name, keep, no_memory, label } => {
            let wish = snapshots::Wish { name, keep, memory: !no_memory, labels: label };
            snapshots::take(ctx, &session, wish).await.map(done)
        }
        Command::Snapshots { session, all } => snapshots::list(ctx, session.as_deref(), all).await.map(done),
        Command::Fork { from, count, name, meta, disk_only, secrets } => {
            let (metadata, yes) = (meta.into_iter().collect(), |flag: bool| flag.then_some(true));
            let request =
                api_types::ForkRequest { count: Some(count), metadata, name, secrets: yes(secrets), disk_only: yes(disk_only) };
            snapshots::fork(ctx, &from, request).await
        }
        Command::Rollback { session, snapshot, disk_only } => {
            snapshots::rollback(ctx, &session, &snapshot, disk_only).await.map(done)
        }
        Command::Storage { command } => storage::command(ctx, command).await,
        Command::Export { session, file } => carry::export(ctx, &session, &file).await.map(done),
        Command::Import { file, new_id, disk_only, trust_runtime } => {
            carry::import(ctx, &file, carry::How { new_id, disk_only, trust_runtime }).await.map(done)
        }
        Command::Backup { list: true, .. } => storage::backups(ctx).await.map(done),
        Command::Backup { rm: Some(name), .. } => storage::backup_remove(ctx, &name).await.map(done),
        Command::Backup { to, .. } => storage::backup(ctx, to).await,
        Command::SnapshotRm { snapshots } => snapshots::remove(ctx, &snapshots).await,
        Command::History { session } => history::command(ctx, &session).await.map(done),
        Command::Cp { source, target } => copy::command(ctx, &source, &target).await.map(done),
        Command::Files(files) => files::command(ctx, files).await.map(done),
        Command::Port { session, port: None, .. } => ports::list(ctx, &session).await.map(done),
        Command::Port { session, port: Some(port), link: true, lasts, .. } => {
            ports::link(ctx, &session, port.get(), lasts).await.map(done)
        }
        Command::Port { session, port: Some(port), here, .. } => ports::forward(ctx, &session, port.get(), here).await.map(done),
        Command::Secret(command) => secrets::command(ctx, command).await.map(done),
        Command::Template(template) => admin::template(ctx, template).await.map(done),
        Command::Token(token) => admin::token(ctx, token).await.map(done),
        Command::Events { session, follow } => events::command(ctx, session.as_deref(), follow).await.map(done),
        Command::Down { hibernate } => admin::down(ctx, hibernate).await.map(done),
        Command::Version => admin::version(ctx).await.map(done),
        Command::Serve(_)
        | Command::Supervise { .. }
        | Command::Doctor
        | Command::Completions { .. }
        | Command::Restore { .. } => Err(Failure::usage("this command doesn't talk to a server")),
    }
}
