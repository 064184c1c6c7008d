//! The command line: every command and flag, and what they mean.

use crate::serve::ServeArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use model::{Timestamp, parse_duration};
use std::{path::PathBuf, time::Duration};

/// Durable sandbox sessions for AI agents, on your own machines.
#[derive(Debug, Parser)]
#[command(name = "dormouse", version, propagate_version = true)]
#[command(after_help = "Exit status: 0 good, 1 failed, 2 usage, 3 not found, 4 refused, 5 conflict, 69 server not reachable.\n\
    exec, run and attach exit with the command's own status, 128+signal, or 125 for a failure of their own.")]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// The server: http://HOST:PORT or unix:PATH [default: http://127.0.0.1:7420]
    #[arg(long, global = true, env = "DORMOUSE_URL", value_name = "URL")]
    pub url: Option<String>,
    /// Access token; where missing, the local server's token file is read
    #[arg(long, global = true, env = "DORMOUSE_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// Machine-readable output
    #[arg(long, global = true)]
    pub json: bool,
    /// Print only what was asked for
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// How much to log to standard error: error, warn, info, debug, trace, or a filter such as 'api=debug'
    #[arg(long, global = true, env = "DORMOUSE_LOG_LEVEL", value_name = "LEVEL")]
    pub log_level: Option<String>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the server in the foreground
    Serve(ServeArgs),
    /// Look after one sandbox; started by the server
    #[command(hide = true)]
    Supervise {
        #[arg(long, value_name = "FILE")]
        spec: PathBuf,
        /// A descriptor that is told once the socket listens
        #[arg(long, value_name = "N")]
        ready_fd: Option<i32>,
    },
    /// End the server; running sessions go on without it
    Down {
        /// Hibernate every running session first
        #[arg(long)]
        hibernate: bool,
    },
    /// Say what this machine can do, what is missing, and the command that mends it
    Doctor,
    /// Print the versions of this program and of the server
    Version,
    /// Print a script that completes commands in your shell
    Completions { shell: clap_complete::Shell },

    /// Get or create a session; prints its id
    New {
        /// Gives the same session each time
        key: Option<String>,
        #[command(flatten)]
        options: NewOptions,
    },
    /// Get or create a session, start a command in a terminal and attach to it
    Run {
        key: Option<String>,
        #[command(flatten)]
        options: NewOptions,
        /// Delete the session when the command has ended
        #[arg(long)]
        rm: bool,
        #[command(flatten)]
        keys: DetachFlag,
        /// The command
        #[arg(last = true, required = true, value_name = "CMD")]
        argv: Vec<String>,
    },
    /// List sessions
    Ls {
        /// Only those in this state
        #[arg(long)]
        state: Option<String>,
        /// Only those with this metadata
        #[arg(long, value_name = "K=V", value_parser = pair)]
        meta: Vec<(String, String)>,
        /// Those that were deleted, too
        #[arg(long)]
        all: bool,
        /// Columns: a list of id, key, name, state, reason, generation, runtime, template, active, created, task, wide for
        /// all of them
        #[arg(short = 'o', long = "output", value_name = "COLUMNS")]
        columns: Option<String>,
    },
    /// Show everything about a session
    Show {
        session: String,
        /// Its network instead: policy, open connections, traffic
        #[arg(long)]
        network: bool,
    },
    /// Change a session
    Set {
        session: String,
        /// What its programs may reach: JSON, or a file with it. In force at once
        #[arg(long, value_name = "JSON|@FILE")]
        network: String,
    },
    /// Show what sessions use
    Stats { session: Option<String> },
    /// Wait until a session's sandbox, or an exec, has ended
    Wait { session: String, exec: Option<String> },

    /// Watch a terminal and type into it; detach with ctrl-\ d
    Attach {
        session: String,
        /// Id or name; the newest that runs where missing, else a new login shell
        terminal: Option<String>,
        /// Only watch
        #[arg(long, conflicts_with = "take")]
        observe: bool,
        /// Take the writer's role from whoever has it
        #[arg(long)]
        take: bool,
        #[command(flatten)]
        keys: DetachFlag,
    },
    /// Run a command in a session
    Exec(ExecArgs),
    /// List a session's execs, terminals and services
    Ps {
        session: String,
        /// Those that have ended, too
        #[arg(short, long)]
        all: bool,
    },
    /// Print what execs, terminals and services have written
    Logs {
        session: String,
        /// An exec, a terminal or a service; without it all execs and services, line by line; 'requests': what went out over
        /// its network, where its policy has that written down
        source: Option<String>,
        /// Go on as more is written
        #[arg(short, long)]
        follow: bool,
        /// From this byte of an exec's standard output or of a terminal
        #[arg(long, value_name = "OFFSET")]
        from: Option<u64>,
        /// Only what is younger
        #[arg(long, value_name = "AGE", value_parser = parse_duration)]
        since: Option<Duration>,
    },
    /// Send a signal to an exec
    Kill {
        session: String,
        exec: String,
        #[arg(default_value = "TERM")]
        signal: api_types::Signal,
    },

    /// Put memory and disk to storage and end the sandbox
    Hibernate {
        #[command(flatten)]
        which: Which,
        /// Wake by itself then: a time such as 2026-03-01T08:00:00Z, or a duration from now
        #[arg(long, value_name = "TIME", value_parser = moment)]
        until: Option<Timestamp>,
    },
    /// Bring a hibernated session back, memory and all
    Wake(Which),
    /// Freeze a session in place
    Pause(Which),
    /// Let a paused session go on
    Unpause(Which),
    /// End the sandbox without keeping its memory
    Stop(Which),
    /// Boot a stopped session afresh on its disk
    Start {
        #[command(flatten)]
        which: Which,
        /// Give up a saved memory first: for one that is damaged, or can't be loaded here
        #[arg(long)]
        disk_only: bool,
    },
    /// Delete sessions
    Rm(Which),
    /// Let a session run longer
    Extend {
        session: String,
        #[arg(value_parser = parse_duration, value_name = "DURATION")]
        by: Duration,
    },

    /// Keep a session as it is now; prints the snapshot's id
    Snapshot {
        session: String,
        /// A name to find it by; with one it stays until it is deleted, else until 7 days after its session is
        #[arg(long)]
        name: Option<model::SnapshotName>,
        /// How long to keep it, such as 7d
        #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
        keep: Option<Duration>,
        /// Only the disk
        #[arg(long)]
        no_memory: bool,
        #[arg(long, value_name = "K=V", value_parser = pair)]
        label: Vec<(String, String)>,
    },
    /// List snapshots
    Snapshots {
        /// Only those of this session
        session: Option<String>,
        /// Those that were deleted, too
        #[arg(long)]
        all: bool,
    },
    /// Make sessions from a snapshot, or from a session as it is now; prints their ids
    Fork {
        /// Id, key or name
        #[arg(value_name = "SESSION|SNAPSHOT")]
        from: String,
        /// How many, 1 to 100
        #[arg(short = 'n', long, value_name = "N", default_value = "1")]
        count: api_types::ForkCount,
        /// A name for people
        #[arg(long)]
        name: Option<String>,
        /// Added to what the source has
        #[arg(long, value_name = "K=V", value_parser = pair)]
        meta: Vec<(String, String)>,
        /// Leave its memory alone and boot afresh on its disk
        #[arg(long)]
        disk_only: bool,
        /// Give the secrets along that its network policy names
        #[arg(long)]
        secrets: bool,
    },
    /// Set a session back to a snapshot; one of now is taken first
    Rollback {
        session: String,
        /// Id or name
        snapshot: String,
        /// Leave its memory alone and boot afresh on its disk
        #[arg(long)]
        disk_only: bool,
    },
    /// Delete snapshots
    SnapshotRm {
        /// Ids or names
        #[arg(required = true, value_name = "SNAPSHOT")]
        snapshots: Vec<String>,
    },
    /// Show what uses space in the object store; verify it, or free what nothing needs
    Storage {
        #[command(subcommand)]
        command: Option<StorageCommand>,
    },
    /// Write a session into one file, to be imported elsewhere
    Export {
        session: String,
        /// Where to; '-' is standard output
        file: PathBuf,
    },
    /// Make a session of an exported file; prints its id
    Import {
        /// '-' is standard input
        file: PathBuf,
        /// Under an id of its own: the session may be here already
        #[arg(long)]
        new_id: bool,
        /// Without its memory
        #[arg(long)]
        disk_only: bool,
        /// Let its memory bring the runsc it was made with: only for files that you trust
        #[arg(long)]
        trust_runtime: bool,
    },
    /// Keep all that the server has, while it runs; prints the backup's name
    Backup {
        /// A folder of the server's machine, or s3://BUCKET/PREFIX [default: the server's object store]
        to: Option<String>,
        /// List the backups in the server's object store instead
        #[arg(long, conflicts_with_all = ["to", "rm"])]
        list: bool,
        /// Give up one of them instead; 'storage collect' frees what nothing else needs
        #[arg(long, value_name = "NAME", conflicts_with = "to")]
        rm: Option<String>,
    },
    /// Make a data directory of a backup, for a server that is started on it with --object-store PLACE
    Restore {
        /// Where the backup is
        place: String,
        /// Which one [default: the latest]
        #[arg(long)]
        backup: Option<String>,
        /// The data directory to make
        #[arg(long, env = "DORMOUSE_DATA", value_name = "DIR")]
        data: Option<PathBuf>,
        /// The key of an encrypted one
        #[arg(long, env = "DORMOUSE_OBJECT_STORE_KEY_FILE", value_name = "FILE")]
        key_file: Option<PathBuf>,
    },
    /// Show a session's snapshots and forks as a tree
    History { session: String },

    /// Copy files between a session and this machine: one side is SESSION:/path, '-' is standard input or output
    #[command(long_about = "Copy files between a session and this machine. One side is SESSION:/path.\n\n\
        '-' is standard input or output: of a file its bytes, of a directory a tar archive. Standard input is unpacked as a \
        tar archive where the path in the session ends with '/', and written to a file otherwise.\n\n\
        As with cp, an existing directory as the target gets the source under its own name. What comes out of a session is \
        not trusted: links that lead outside, devices and setuid bits are left out, and said so.")]
    Cp {
        #[arg(value_name = "SRC")]
        source: String,
        #[arg(value_name = "DST")]
        target: String,
    },
    /// List what listens in a session, or reach a port of it from this machine
    Port {
        session: String,
        /// The port in the session; without it those that are listened on are listed
        port: Option<std::num::NonZeroU16>,
        /// The port here; 0 takes a free one [default: the same number]
        #[arg(value_name = "LOCAL", conflicts_with = "link")]
        here: Option<u16>,
        /// Print a link to its preview instead: whoever has it gets in
        #[arg(long, requires = "port")]
        link: bool,
        /// How long the link is good for [default: 1h]
        #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration, requires = "link")]
        lasts: Option<Duration>,
    },
    /// Secrets that are added to requests outside of sessions
    #[command(subcommand)]
    Secret(SecretCommand),
    /// Look at and change files in a session
    #[command(subcommand)]
    Files(FilesCommand),
    /// Templates that sandboxes start from
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Access tokens
    #[command(subcommand)]
    Token(TokenCommand),
    /// Print what happened, in all sessions or in one
    Events {
        session: Option<String>,
        /// Go on as more happens
        #[arg(short, long)]
        follow: bool,
    },
}

/// How a session is made.
#[derive(Debug, Clone, Default, Args)]
pub struct NewOptions {
    #[arg(long)]
    pub template: Option<String>,
    /// gvisor, host or interpreter
    #[arg(long)]
    pub runtime: Option<model::Runtime>,
    #[arg(long)]
    pub machine: Option<String>,
    /// What it is for
    #[arg(long)]
    pub task: Option<String>,
    /// A name for people
    #[arg(long)]
    pub name: Option<String>,
    #[arg(long, value_name = "K=V", value_parser = pair)]
    pub meta: Vec<(String, String)>,
    /// Environment of everything in it; K alone takes the value from here
    #[arg(short, long, value_name = "K=V", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Where execs and terminals start
    #[arg(long, value_name = "PATH")]
    pub workdir: Option<String>,
    /// A git repository, or a tar archive (a name that ends with .tar, .tar.gz or .tgz), for its first files
    #[arg(long, value_name = "URL[#REF]")]
    pub source: Option<String>,
    /// How long nothing happens before --on-idle [default: 30m]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub idle: Option<Duration>,
    /// [default: hibernate]
    #[arg(long, value_enum)]
    pub on_idle: Option<OnIdle>,
    /// How long each of its sandboxes may run, in awake time
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// How long it exists before it is deleted
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub ttl: Option<Duration>,
    /// Never stored: no hibernation, gone when its sandbox ends
    #[arg(long)]
    pub ephemeral: bool,
    /// Make it from a snapshot: an id or a name
    #[arg(long, value_name = "SNAPSHOT", conflicts_with_all = ["template", "source"])]
    pub from: Option<String>,
    /// Leave the snapshot's memory alone and boot afresh on its disk
    #[arg(long, requires = "from")]
    pub disk_only: bool,
    #[arg(long, value_name = "NAME:/path[:ro]")]
    pub volume: Vec<String>,
    /// What its programs may reach: JSON, or a file with it [default: everything]
    #[arg(long, value_name = "JSON|@FILE")]
    pub network: Option<String>,
    /// Cores, in fractions
    #[arg(long)]
    pub cpus: Option<f64>,
    /// Memory limit, such as 2g
    #[arg(long, value_parser = model::parse_bytes)]
    pub memory: Option<model::ByteSize>,
    /// Disk limit, such as 10g
    #[arg(long, value_parser = model::parse_bytes)]
    pub disk: Option<model::ByteSize>,
    /// Most processes and threads
    #[arg(long)]
    pub pids: Option<u64>,
    /// Make a new session where the key's has expired or failed
    #[arg(long)]
    pub replace: bool,
}

/// What idleness leads to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OnIdle {
    #[default]
    Hibernate,
    Stop,
    None,
}

/// What to do with the object store.
#[derive(Debug, Clone, Subcommand)]
pub enum StorageCommand {
    /// Read and verify everything in it
    Check,
    /// Remove from it what nothing needs any more
    Collect,
    /// Pack at once what sleeps
    Pack,
    /// Have an encrypted object store open with another key from now on
    RotateKey {
        /// A file on the server's machine with the new key
        key_file: PathBuf,
    },
}

/// The keys that detach.
#[derive(Debug, Clone, Args)]
pub struct DetachFlag {
    /// Keys that detach, one after the other: letters, and ctrl-X for a to z, @, [, \, ], ^ and _
    #[arg(long, default_value = r"ctrl-\,d", env = "DORMOUSE_DETACH_KEYS")]
    pub detach_keys: crate::client::DetachKeys,
}

/// One or many sessions.
#[derive(Debug, Clone, Args)]
pub struct Which {
    /// Ids, keys, or unique beginnings or ends of ids
    #[arg(value_name = "SESSION", required_unless_present_any = ["all", "meta"])]
    pub sessions: Vec<String>,
    /// All that this can be done to
    #[arg(long, conflicts_with = "sessions")]
    pub all: bool,
    /// All with this metadata
    #[arg(long, value_name = "K=V", value_parser = pair, conflicts_with = "sessions")]
    pub meta: Vec<(String, String)>,
}

/// `exec`.
#[derive(Debug, Clone, Args)]
pub struct ExecArgs {
    pub session: String,
    /// Environment; K alone takes the value from here
    #[arg(short, long, value_name = "K=V", value_parser = variable)]
    pub env: Vec<(String, String)>,
    #[arg(short = 'w', long, value_name = "PATH")]
    pub cwd: Option<String>,
    /// A name or uid[:gid]; root where missing
    #[arg(short, long)]
    pub user: Option<String>,
    /// Kill it after this time awake
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// Start it, print its id, and don't wait
    #[arg(short, long)]
    pub detach: bool,
    /// The same key runs it only once in the session
    #[arg(long)]
    pub key: Option<String>,
    /// Pass standard input on to it
    #[arg(short = 'i', long)]
    pub stdin: bool,
    /// Start a stopped session for it
    #[arg(long)]
    pub start: bool,
    /// The command
    #[arg(last = true, required = true, value_name = "CMD")]
    pub argv: Vec<String>,
}

/// `files`.
#[derive(Debug, Subcommand)]
pub enum FilesCommand {
    /// List a directory
    Ls {
        session: String,
        #[arg(default_value = "/root")]
        path: String,
        /// How many levels
        #[arg(long, default_value_t = 1)]
        depth: u32,
    },
    /// Print a file
    Cat { session: String, path: String },
    /// Delete a file or a directory with all it holds
    Rm { session: String, path: String },
    /// Make a directory
    Mkdir {
        session: String,
        path: String,
        /// And its parents; no error where it is there
        #[arg(short, long)]
        parents: bool,
    },
    /// Print changes as they happen
    Watch {
        session: String,
        path: String,
        /// Directories below, too
        #[arg(short, long)]
        recursive: bool,
    },
}

/// `secret`.
#[derive(Debug, Subcommand)]
pub enum SecretCommand {
    /// Set a secret; its value is read from standard input
    Set {
        name: model::network::SecretName,
        /// A host that it may be sent to, such as api.example.com or *.example.com; several can be given [default: those
        /// that it has]
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<String>,
        /// Wherever rules that an administrator has set send it
        #[arg(long, conflicts_with = "hosts")]
        any_host: bool,
    },
    /// List names and hosts
    Ls,
    /// Give secrets up
    Rm {
        #[arg(required = true)]
        names: Vec<model::network::SecretName>,
    },
}

/// `template`.
#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    Ls,
    /// Take a tree of files on the server's machine as a template
    #[command(group(clap::ArgGroup::new("kind").required(true)))]
    Add {
        name: String,
        /// A directory that is a root file system
        #[arg(long, group = "kind", value_name = "PATH")]
        dir: Option<PathBuf>,
        /// A tar archive of one
        #[arg(long, group = "kind", value_name = "FILE")]
        tar: Option<PathBuf>,
        /// A directory in the OCI image layout
        #[arg(long, group = "kind", value_name = "PATH")]
        oci_layout: Option<PathBuf>,
    },
    /// Make a built-in template where it is missing, without a server; prints its hash
    Make {
        which: BuiltIn,
        /// The template folder [default: the default data directory's]
        #[arg(long, env = "DORMOUSE_TEMPLATES", value_name = "DIR")]
        templates: Option<PathBuf>,
    },
    Rm {
        #[arg(required = true)]
        names: Vec<String>,
    },
}

/// A template that is made from what this machine has or can fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BuiltIn {
    /// A small Debian bookworm with the usual tools
    Debian,
    /// This machine's own tools
    Host,
}

impl std::fmt::Display for BuiltIn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            BuiltIn::Debian => "debian",
            BuiltIn::Host => "host",
        })
    }
}

/// What the sessions of a token may take together.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct LimitFlags {
    /// Most sessions that it has, asleep ones too
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_sessions: Option<u64>,
    /// Most sessions that run or are paused at a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_running: Option<u64>,
    /// Most cores of those that run; its sessions need --cpus
    #[arg(long, value_name = "CPUS")]
    pub max_cpus: Option<f64>,
    /// Most memory of those that run; its sessions need --memory
    #[arg(long, value_name = "SIZE", value_parser = model::parse_bytes)]
    pub max_memory: Option<model::ByteSize>,
    /// Most disk of all its sessions
    #[arg(long, value_name = "SIZE", value_parser = model::parse_bytes)]
    pub max_disk: Option<model::ByteSize>,
    /// Most space of all its sessions' snapshots
    #[arg(long, value_name = "SIZE", value_parser = model::parse_bytes)]
    pub max_snapshots: Option<model::ByteSize>,
}

/// `token`.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make a token and print it, this once
    New {
        name: String,
        /// read, write, host, admin
        #[arg(long, value_delimiter = ',', default_value = "read,write")]
        scope: Vec<api_types::Scope>,
        /// Only for these sessions
        #[arg(long)]
        session: Vec<String>,
        #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
        ttl: Option<Duration>,
        #[command(flatten)]
        limits: LimitFlags,
    },
    Ls,
    /// End tokens at once
    Revoke {
        #[arg(required = true, value_name = "TOKEN")]
        tokens: Vec<String>,
    },
}

/// Reads `K=V`.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".to_owned()),
    }
}

/// Reads `K=V`, or `K` with the value that it has here.
fn variable(text: &str) -> Result<(String, String), String> {
    if text.contains('=') || text.is_empty() {
        return pair(text);
    }
    let value = std::env::var(text).map_err(|_| format!("{text} isn't set here; write it as {text}=VALUE"))?;
    Ok((text.to_owned(), value))
}

/// Reads an instant in RFC 3339, or a duration from now.
fn moment(text: &str) -> Result<Timestamp, String> {
    if let Ok(span) = parse_duration(text) {
        return Ok(crate::client::now().plus(span));
    }
    text.parse()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn commands_of_the_contract_are_understood() {
        for line in [
            "serve --listen 127.0.0.1:0 --data /d --config f.toml --templates /t --socket /s --take-over --pool 3 --log-level debug",
            "supervise --spec x",
            "down --hibernate",
            "new",
            "new k --template debian --runtime gvisor --task t --meta a=b --meta c= --env A=1 --source https://x/y#main --idle 30m --on-idle none --timeout 1h --ttl 7d --ephemeral",
            "run k --rm -- claude --help",
            "run --runtime host -- claude",
            "ls --state running --meta a=b --all --json",
            "attach s t --observe --detach-keys ctrl-p,ctrl-q",
            "attach s --take",
            "exec s --env A=1 --cwd /x --user 1000:1000 --timeout 5s --detach --key k --stdin -- sh -c x",
            "logs s -f --since 10m",
            "logs s e --from 100",
            "kill s e SIGKILL",
            "hibernate a b --until 2026-03-01T08:00:00Z",
            "hibernate --all --until 2h",
            "rm --meta a=b",
            "extend s 1h",
            "snapshot s",
            "snapshot s --name before-upgrade --keep 7d --no-memory --label step=3 --label who=ci",
            "snapshots",
            "snapshots s --all --json",
            "fork s",
            "fork base -n 10 --name try --meta attempt=1",
            "rollback s before-upgrade",
            "snapshot-rm a b",
            "history s",
            "port s",
            "port s 8080 --json",
            "port s 8080 0",
            "port s 8080 --link --for 2h",
            "secret set TOKEN --host api.example.com --host *.example.org",
            "secret set TOKEN --any-host",
            "secret ls",
            "secret rm A B",
            "set s --network @policy.json",
            "show s --network",
            "logs s requests -f",
            "fork s --secrets",
            "new k --network {\"default\":\"deny\"}",
            "new k --from base --on-idle none",
            "cp s:/x -",
            "files mkdir -p s /x",
            "template add n --oci-layout p",
            "template make debian --templates /t",
            "token new n --scope read --ttl 7d",
            "token new n --max-sessions 9 --max-running 3 --max-cpus 1.5 --max-memory 4g --max-disk 20g",
            "events -f",
            "completions bash",
            "--url unix:/x version",
        ] {
            let words = std::iter::once("dormouse").chain(line.split(' '));
            assert!(Cli::try_parse_from(words).is_ok(), "{line}: {}", Cli::try_parse_from(line.split(' ')).unwrap_err());
        }
    }

    #[test]
    fn contradictions_are_usage_errors() {
        for line in [
            "attach s --observe --take",
            "run k",
            "exec s",
            "new --env =x",
            "new --idle soon",
            "rm",
            "rm a --all",
            "template add n",
            "template add n --dir a --tar b",
            "kill s e NOPE",
            "snapshot s --name a/b",
            "snapshot s --name 01890000-0000-7000-8000-000000000001",
            "snapshot s --keep soon",
            "fork s -n 0",
            "fork s -n -1",
            "fork s -n 1000000",
            "fork",
            "rollback s",
            "snapshot-rm",
            "port s 0",
            "port s 70000",
            "port s --link",
            "port s 80 --for 1h",
            "secret set a-b",
            "secret set TOKEN value",
            "set s",
            "new --from base --template debian",
            "new --from base --source https://x/y",
            "token new n --max-sessions 0",
        ] {
            let error = Cli::try_parse_from(std::iter::once("dormouse").chain(line.split(' '))).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
