//! `dormouse serve`: what it can be told, by flag, by environment and in a file.

mod data;
pub mod restore;
mod run;
mod sockets;

use crate::client::default_data_dir;
use anyhow::{Context, bail};
use model::parse_duration;
use serde::Deserialize;
use std::{
    net::{SocketAddr, ToSocketAddrs},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

/// How long something sleeps before it is packed, where nobody says anything else.
const PACK_AFTER: Duration = Duration::from_secs(300);
/// How large the cache is then.
const CACHE: u64 = 10 << 30;

/// Flags of `serve`. Each is also a `DORMOUSE_…` variable and a key of the configuration file; a flag counts before a
/// variable, and a variable before the file.
#[derive(Debug, Clone, Default, PartialEq, clap::Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServeArgs {
    /// Address to listen on; port 0 takes a free one [default: 127.0.0.1:7420]
    #[arg(long, env = "DORMOUSE_LISTEN", value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Where sessions are kept [default: /var/lib/dormouse for root, else ~/.local/share/dormouse]
    #[arg(long, env = "DORMOUSE_DATA", value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// A TOML file with any of these settings
    #[arg(long, env = "DORMOUSE_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Where templates are kept; several servers can share it [default: DATA/templates]
    #[arg(long, env = "DORMOUSE_TEMPLATES", value_name = "DIR")]
    pub templates: Option<PathBuf>,
    /// The server's Unix socket [default: DATA/dormouse.sock; /run/dormouse/server.sock for root's default data directory]
    #[arg(long, env = "DORMOUSE_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Take over from a server that runs on the same data directory
    #[arg(long, env = "DORMOUSE_TAKE_OVER", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub take_over: Option<bool>,
    /// Booted sandboxes that are kept ready; 0 for none [default: 2, fewer when memory is short]
    #[arg(long, env = "DORMOUSE_POOL", value_name = "N")]
    pub pool: Option<u32>,
    /// The gVisor program [default: runsc on the PATH]
    #[arg(long, env = "DORMOUSE_RUNSC", value_name = "PATH")]
    pub runsc: Option<PathBuf>,
    /// How gVisor catches system calls: systrap or ptrace [default: systrap]
    #[arg(long, env = "DORMOUSE_PLATFORM", value_name = "NAME")]
    pub platform: Option<String>,
    /// Drop a sandbox right after its memory is saved, without trying the image out first
    #[arg(long, env = "DORMOUSE_NO_CONFIRM", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub no_confirm: Option<bool>,
    /// How much of the latest output of each exec, terminal and service is kept, besides its first MiB [default: 1GiB]
    #[arg(long, env = "DORMOUSE_KEEP_OUTPUT", value_name = "SIZE")]
    pub keep_output: Option<String>,
    /// Where what sleeps is packed: a folder, or s3://BUCKET/PREFIX with AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID
    /// and AWS_SECRET_ACCESS_KEY in the environment [default: DATA/objects]
    #[arg(long, env = "DORMOUSE_OBJECT_STORE", value_name = "PLACE")]
    pub object_store: Option<String>,
    /// Encrypt what is packed under the key in this file: at least 32 random bytes
    #[arg(long, env = "DORMOUSE_OBJECT_STORE_KEY_FILE", value_name = "FILE", conflicts_with = "object_store_key_command")]
    pub object_store_key_file: Option<PathBuf>,
    /// The same under the key that this command prints
    #[arg(long, env = "DORMOUSE_OBJECT_STORE_KEY_COMMAND", value_name = "COMMAND")]
    pub object_store_key_command: Option<String>,
    /// Take the object store from another server, which is gone for good
    #[arg(long, env = "DORMOUSE_OBJECT_STORE_TAKE_OVER", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub object_store_take_over: Option<bool>,
    /// Encrypt secrets under the key in this file: at least 32 random bytes [default: the systemd credential dormouse-key,
    /// else DATA/secrets.key]
    #[arg(long, env = "DORMOUSE_KEY_FILE", value_name = "FILE", conflicts_with = "key_command")]
    pub key_file: Option<PathBuf>,
    /// The same under the key that this command prints
    #[arg(long, env = "DORMOUSE_KEY_COMMAND", value_name = "COMMAND")]
    pub key_command: Option<String>,
    /// Remove the secrets that the key doesn't open: it is lost for good
    #[arg(long, env = "DORMOUSE_FORGET_SECRETS", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub forget_secrets: Option<bool>,
    /// Certificates of authorities, in PEM, that the servers may be known by which sessions talk to, beside the system's
    #[arg(long, env = "DORMOUSE_EGRESS_CA", value_name = "FILE")]
    pub egress_ca: Option<PathBuf>,
    /// Previews of sessions' pages are at PORT-SESSION.DOMAIN [default: localhost]
    #[arg(long, env = "DORMOUSE_PREVIEW_DOMAIN", value_name = "DOMAIN")]
    pub preview_domain: Option<String>,
    /// What has slept for so long is packed into the object store [default: 5m]
    #[arg(long, env = "DORMOUSE_PACK_AFTER", value_name = "DURATION")]
    pub pack_after: Option<String>,
    /// How much of what is packed may lie unpacked beside the sessions, too, for a quick wake [default: 10GiB]
    #[arg(long, env = "DORMOUSE_CACHE_SIZE", value_name = "SIZE")]
    pub cache_size: Option<String>,
    /// Tell events to this address by signed HTTP POSTs; the file can name several, and which events: [[webhook]] with
    /// url, secret, events
    #[arg(long = "webhook", env = "DORMOUSE_WEBHOOK", value_name = "URL", hide_env_values = true)]
    #[serde(skip)]
    pub webhook_url: Option<String>,
    /// What --webhook's POSTs are signed with: plain text, or whsec_ and base64
    #[arg(long, env = "DORMOUSE_WEBHOOK_SECRET", value_name = "SECRET", hide_env_values = true)]
    #[serde(skip)]
    pub webhook_secret: Option<String>,
    /// Those of the file.
    #[arg(skip)]
    #[serde(rename = "webhook")]
    pub webhooks: Vec<WebhookEntry>,
    /// For developers: another program as PID 1 of new sandboxes, instead of the one that this program carries
    #[arg(long, env = "DORMOUSE_GUEST", value_name = "PATH", hide_short_help = true)]
    pub guest: Option<PathBuf>,
    /// Set from the flag of every command.
    #[arg(skip)]
    pub log_level: Option<String>,
}

/// A `[[webhook]]` of the configuration file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookEntry {
    pub url: String,
    pub secret: String,
    /// Kinds such as `wake.done`, `exec.*`, `*`; [`engine::Webhook::DEFAULT_EVENTS`] where missing.
    #[serde(default)]
    pub events: Option<Vec<String>>,
}

/// The settings of a server, with what nobody set filled in.
#[derive(Debug, Clone)]
pub struct Settings {
    pub listen: SocketAddr,
    pub data: PathBuf,
    pub templates: PathBuf,
    pub socket: PathBuf,
    /// True where the socket is the machine's: every user may connect, and is told apart by uid.
    pub socket_for_all: bool,
    pub take_over: bool,
    /// `None`: the server decides.
    pub pool: Option<u32>,
    /// `None`: looked for on the PATH.
    pub runsc: Option<PathBuf>,
    pub platform: String,
    pub confirm: bool,
    /// `None`: as much as journals keep by themselves.
    pub keep_output: Option<model::ByteSize>,
    pub webhooks: Vec<engine::Webhook>,
    pub object_store: engine::ObjectStore,
    pub pack_after: Duration,
    pub cache_bytes: u64,
    /// `None`: the data directory's.
    pub secrets_key: Option<blob::KeySource>,
    pub forget_secrets: bool,
    pub egress_ca: Option<PathBuf>,
    pub preview_domain: String,
    /// `None`: the one that this program carries.
    pub guest: Option<PathBuf>,
    pub log_level: String,
}

impl ServeArgs {
    /// These settings, and those of `file` where these say nothing.
    fn or(self, file: ServeArgs) -> ServeArgs {
        ServeArgs {
            listen: self.listen.or(file.listen),
            data: self.data.or(file.data),
            config: self.config,
            templates: self.templates.or(file.templates),
            socket: self.socket.or(file.socket),
            take_over: self.take_over.or(file.take_over),
            pool: self.pool.or(file.pool),
            runsc: self.runsc.or(file.runsc),
            platform: self.platform.or(file.platform),
            no_confirm: self.no_confirm.or(file.no_confirm),
            keep_output: self.keep_output.or(file.keep_output),
            object_store: self.object_store.or(file.object_store),
            object_store_key_file: self.object_store_key_file.or(file.object_store_key_file),
            object_store_key_command: self.object_store_key_command.or(file.object_store_key_command),
            object_store_take_over: self.object_store_take_over.or(file.object_store_take_over),
            key_file: self.key_file.or(file.key_file),
            key_command: self.key_command.or(file.key_command),
            forget_secrets: self.forget_secrets.or(file.forget_secrets),
            egress_ca: self.egress_ca.or(file.egress_ca),
            preview_domain: self.preview_domain.or(file.preview_domain),
            pack_after: self.pack_after.or(file.pack_after),
            cache_size: self.cache_size.or(file.cache_size),
            webhook_url: self.webhook_url,
            webhook_secret: self.webhook_secret,
            webhooks: file.webhooks,
            guest: self.guest.or(file.guest),
            log_level: self.log_level.or(file.log_level),
        }
    }

    /// Reads the configuration file, where one is named, and fills in the defaults.
    ///
    /// # Errors
    /// A file that can't be read or has unknown keys; an address that is none.
    pub fn settle(mut self) -> anyhow::Result<Settings> {
        if let Some(path) = self.config.clone() {
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("can't read the configuration {}", path.display()))?;
            let file: ServeArgs =
                toml::from_str(&text).with_context(|| format!("the configuration {} is not right", path.display()))?;
            self = self.or(file);
        }
        let is_root = rustix::process::geteuid().is_root();
        self.settle_for(is_root, default_data_dir())
    }

    fn settle_for(self, is_root: bool, default_data: PathBuf) -> anyhow::Result<Settings> {
        let listen = self.listen.as_deref().unwrap_or("127.0.0.1:7420");
        let Some(listen) = listen.to_socket_addrs().ok().and_then(|mut found| found.next()) else {
            bail!("can't listen on '{listen}': write HOST:PORT, such as 127.0.0.1:7420");
        };
        let data = std::path::absolute(self.data.unwrap_or(default_data)).context("the data directory has no absolute path")?;
        let machine_wide = is_root && data == Path::new("/var/lib/dormouse");
        let socket_for_all = machine_wide && self.socket.is_none();
        let socket = self
            .socket
            .unwrap_or_else(|| if machine_wide { "/run/dormouse/server.sock".into() } else { data.join("dormouse.sock") });
        let platform = self.platform.unwrap_or_else(|| "systrap".to_owned());
        if !matches!(platform.as_str(), "systrap" | "ptrace") {
            bail!("'{platform}' is not a platform: use systrap or ptrace");
        }
        let keep_output = self.keep_output.as_deref().map(model::parse_bytes).transpose();
        let keep_output = keep_output.context("'keep_output' is a size, such as 256MiB")?;
        let pack_after = self.pack_after.as_deref().map_or(Ok(PACK_AFTER), parse_duration);
        let pack_after = pack_after.map_err(|e| anyhow::anyhow!("'pack_after' is a duration, such as 10m: {e}"))?;
        let cache_bytes = self.cache_size.as_deref().map_or(Ok(CACHE), |text| model::parse_bytes(text).map(|size| size.0));
        let cache_bytes = cache_bytes.context("'cache_size' is a size, such as 20GiB")?;
        let key = key_of("object_store_key", self.object_store_key_file, self.object_store_key_command)?;
        let secrets_key = key_of("key", self.key_file, self.key_command)?.or_else(credential);
        let egress_ca = self.egress_ca.map(std::path::absolute).transpose()?;
        if let Some(missing) = egress_ca.as_ref().filter(|path| !path.is_file()) {
            bail!("there are no certificates at {}", missing.display());
        }
        let preview_domain = model::network::host_name(self.preview_domain.as_deref().unwrap_or("localhost"));
        let preview_domain = preview_domain.map_err(|e| anyhow::anyhow!("'preview_domain' is a domain: {e}"))?;
        let place = self.object_store.unwrap_or_else(|| data.join("objects").to_string_lossy().into_owned());
        let location = blob::Location::parse(&place).context("the object store")?;
        let take_over = self.object_store_take_over.unwrap_or(false);
        let webhooks = webhooks(self.webhooks, self.webhook_url, self.webhook_secret)?;
        Ok(Settings {
            listen,
            templates: self.templates.unwrap_or_else(|| data.join("templates")),
            socket,
            socket_for_all,
            data,
            take_over: self.take_over.unwrap_or(false),
            pool: self.pool,
            runsc: self.runsc,
            platform,
            confirm: !self.no_confirm.unwrap_or(false),
            keep_output,
            webhooks,
            object_store: engine::ObjectStore { location, key, take_over },
            pack_after,
            cache_bytes,
            secrets_key,
            forget_secrets: self.forget_secrets.unwrap_or(false),
            egress_ca,
            preview_domain,
            guest: self.guest,
            log_level: self.log_level.unwrap_or_else(|| "info".to_owned()),
        })
    }
}

/// Where a key comes from, whose settings begin with `name`.
fn key_of(name: &str, file: Option<PathBuf>, command: Option<String>) -> anyhow::Result<Option<blob::KeySource>> {
    match (file, command) {
        (Some(_), Some(_)) => bail!("'{name}_file' and '{name}_command' exclude each other"),
        (Some(file), None) => Ok(Some(blob::KeySource::File(std::path::absolute(file)?))),
        (None, command) => Ok(command.map(blob::KeySource::Command)),
    }
}

/// The key that systemd gives the server (systemd.exec(5), LoadCredential=).
pub(crate) fn credential() -> Option<blob::KeySource> {
    let path = PathBuf::from(std::env::var_os("CREDENTIALS_DIRECTORY")?).join("dormouse-key");
    path.is_file().then_some(blob::KeySource::File(path))
}

/// The webhooks of the file, and the one of the flags. Where the file has the same address, the flags count.
fn webhooks(mut entries: Vec<WebhookEntry>, url: Option<String>, secret: Option<String>) -> anyhow::Result<Vec<engine::Webhook>> {
    match (url, secret) {
        (None, None) => {}
        (Some(url), Some(secret)) => {
            entries.retain(|entry| entry.url != url);
            entries.push(WebhookEntry { url, secret, events: None });
        }
        _ => bail!("--webhook and --webhook-secret go together"),
    }
    let mut webhooks: Vec<engine::Webhook> = Vec::with_capacity(entries.len());
    for WebhookEntry { url, secret, events } in entries {
        let webhook = engine::Webhook::new(&url, &secret, events).map_err(anyhow::Error::msg)?;
        if webhooks.iter().any(|other| other.url() == webhook.url()) {
            bail!("two webhooks have the same address: one can name all events of both");
        }
        webhooks.push(webhook);
    }
    Ok(webhooks)
}

/// Runs the server until it is told to end.
///
/// # Errors
/// Settings that aren't right, and whatever keeps the server from starting.
pub fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    run::run(args.settle()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settle(args: ServeArgs) -> Settings {
        args.settle_for(false, "/home/u/.local/share/dormouse".into()).unwrap()
    }

    #[test]
    fn what_nobody_set_is_filled_in() {
        let settings = settle(ServeArgs::default());
        assert_eq!(settings.listen.to_string(), "127.0.0.1:7420");
        assert_eq!(settings.socket, Path::new("/home/u/.local/share/dormouse/dormouse.sock"));
        assert_eq!(settings.templates, Path::new("/home/u/.local/share/dormouse/templates"));
        let root = ServeArgs::default().settle_for(true, "/var/lib/dormouse".into()).unwrap();
        assert_eq!(root.socket, Path::new("/run/dormouse/server.sock"));
        assert!(root.socket_for_all);
        let elsewhere = ServeArgs { data: Some("/d".into()), ..Default::default() };
        let elsewhere = elsewhere.settle_for(true, "/var/lib/dormouse".into()).unwrap();
        assert_eq!((elsewhere.socket.as_path(), elsewhere.socket_for_all), (Path::new("/d/dormouse.sock"), false));
    }

    #[test]
    fn a_flag_counts_before_the_file() {
        let file: ServeArgs = toml::from_str("listen = \"127.0.0.1:1\"\npool = 5\ntake_over = true").unwrap();
        let settings = settle(ServeArgs { pool: Some(0), ..Default::default() }.or(file));
        assert_eq!((settings.listen.port(), settings.pool, settings.take_over), (1, Some(0), true));
    }

    #[test]
    fn webhooks_come_from_the_file_and_from_flags() {
        let file = "[[webhook]]\nurl = \"http://a/\"\nsecret = \"s\"\nevents = [\"oom\"]\n[[webhook]]\nurl = \"http://b/\"\nsecret = \"s\"";
        let file: ServeArgs = toml::from_str(file).unwrap();
        let flag =
            |url: &str| ServeArgs { webhook_url: Some(url.into()), webhook_secret: Some("f".into()), ..Default::default() };
        let urls = |settings: Settings| settings.webhooks.iter().map(|hook| hook.url().to_owned()).collect::<Vec<_>>();
        assert_eq!(urls(settle(flag("http://c/").or(file.clone()))), ["http://a/", "http://b/", "http://c/"]);
        let same = settle(flag("http://a/").or(file.clone()));
        assert_eq!(same.webhooks[1], engine::Webhook::new("http://a/", "f", None).unwrap(), "the flags count");
        let entry = WebhookEntry { url: "http://a".into(), secret: "s".into(), events: None };
        for args in [
            ServeArgs { webhook_url: Some("http://a/".into()), ..Default::default() },
            ServeArgs { webhooks: vec![WebhookEntry { secret: String::new(), ..entry.clone() }], ..Default::default() },
            ServeArgs { webhooks: vec![entry.clone(), WebhookEntry { url: "http://a/".into(), ..entry }], ..Default::default() },
        ] {
            assert!(args.settle_for(false, "/x".into()).is_err());
        }
        assert!(toml::from_str::<ServeArgs>("[[webhook]]\nurl = \"http://a/\"").is_err(), "a secret is needed");
    }

    #[test]
    fn mistakes_are_named() {
        assert!(toml::from_str::<ServeArgs>("lisen = 1").unwrap_err().to_string().contains("lisen"));
        let error =
            ServeArgs { listen: Some("nowhere".into()), ..Default::default() }.settle_for(false, "/x".into()).unwrap_err();
        assert!(error.to_string().contains("nowhere"));
    }
}
