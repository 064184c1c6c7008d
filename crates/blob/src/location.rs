//! Where a repository lies: a local folder, or a bucket of an S3-compatible store.

use crate::error::Error;
use object_store::{
    ClientOptions, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    local::LocalFileSystem,
};
use std::{
    collections::BTreeMap,
    fmt, fs,
    net::IpAddr,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest silence within an answer.
const SILENCE: Duration = Duration::from_secs(30);
/// Longest time for one request: a whole pack over a slow line.
const REQUEST: Duration = Duration::from_secs(300);

/// A place for a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A folder of this machine. It is made with mode 0700 where it doesn't exist.
    Folder(PathBuf),
    /// A bucket, and a prefix inside of it.
    S3(S3),
}

/// A place in an S3-compatible store.
#[derive(Clone, PartialEq, Eq)]
pub struct S3 {
    bucket: String,
    prefix: String,
    /// Names in capitals, as in the environment: `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID` …
    settings: Vec<(String, String)>,
}

impl fmt::Debug for S3 {
    /// Without the settings, which have secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}/{}", self.bucket, self.prefix)
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Folder(path) => write!(f, "{}", path.display()),
            Location::S3(s3) => write!(f, "{s3:?}"),
        }
    }
}

impl Location {
    /// Reads `s3://bucket/prefix`, or a path. Endpoint, region and credentials are those of the environment (`AWS_…`).
    ///
    /// # Errors
    /// [`Error::Location`].
    pub fn parse(text: &str) -> Result<Location, Error> {
        let variables =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Location::parse_with(text, variables)
    }

    /// The same with settings in place of the environment.
    ///
    /// # Errors
    /// [`Error::Location`].
    pub fn parse_with(text: &str, settings: impl IntoIterator<Item = (String, String)>) -> Result<Location, Error> {
        let wrong = |what: &str| Error::Location { text: text.to_owned(), what: what.to_owned() };
        let Some(rest) = text.strip_prefix("s3://") else {
            return match text {
                "" => Err(wrong("it is empty")),
                _ if text.contains("://") => Err(wrong("only s3:// and folders are known")),
                _ => Ok(Location::Folder(PathBuf::from(text))),
            };
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(wrong("it names no bucket: write s3://BUCKET/PREFIX"));
        }
        let prefix = prefix.trim_matches('/');
        if object_store::path::Path::parse(prefix).is_err() {
            return Err(wrong("its prefix has empty or strange parts"));
        }
        let settings = settings.into_iter().filter(|(name, value)| name.starts_with("AWS_") && !value.is_empty());
        // By name, so that AWS_ENDPOINT_URL comes after AWS_ENDPOINT, and wins.
        let settings = settings.collect::<BTreeMap<_, _>>().into_iter().collect();
        Ok(Location::S3(S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned(), settings }))
    }

    /// Another place, below this one.
    #[must_use]
    pub fn below(&self, name: &str) -> Location {
        match self {
            Location::Folder(path) => Location::Folder(path.join(name)),
            Location::S3(s3) => {
                let prefix = if s3.prefix.is_empty() { name.to_owned() } else { format!("{}/{name}", s3.prefix) };
                Location::S3(S3 { prefix, ..s3.clone() })
            }
        }
    }

    /// The prefix of all paths.
    pub(crate) fn prefix(&self) -> &str {
        match self {
            Location::Folder(_) => "",
            Location::S3(s3) => &s3.prefix,
        }
    }

    /// Makes the folder, where it is one.
    pub(crate) fn ensure(&self) -> Result<(), Error> {
        let Location::Folder(path) = self else { return Ok(()) };
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|e| Error::io(format!("can't make the folder {}", path.display()), e))
    }

    /// The store at this place. Asks it nothing yet.
    pub(crate) fn connect(&self) -> Result<Arc<dyn ObjectStore>, Error> {
        let wrong = |e: object_store::Error| Error::Location { text: self.to_string(), what: e.to_string() };
        match self {
            Location::Folder(path) if !path.is_dir() => Err(Error::NoRepository { store: self.to_string() }),
            Location::Folder(path) => Ok(Arc::new(LocalFileSystem::new_with_prefix(path).map_err(wrong)?.with_fsync(true))),
            Location::S3(s3) => s3.connect(),
        }
    }

    /// Removes what writes that were cut off have left in a folder. Only for who alone writes there.
    pub(crate) fn sweep_leftovers(&self) {
        let Location::Folder(root) = self else { return };
        if let Err(error) = sweep(root) {
            tracing::warn!(folder = %root.display(), %error, "can't look for the rests of writes that were cut off");
        }
    }
}

/// The local store writes to `NAME#NUMBER`, then renames.
fn sweep(dir: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_rest = name.rsplit_once('#').is_some_and(|(_, n)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
        if entry.file_type()?.is_dir() {
            sweep(&entry.path())?;
        } else if is_rest {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

impl S3 {
    fn connect(&self) -> Result<Arc<dyn ObjectStore>, Error> {
        let text = Location::S3(self.clone()).to_string();
        let wrong = |what: String| Error::Location { text: text.clone(), what };
        let mut builder = AmazonS3Builder::new().with_bucket_name(&self.bucket);
        let insecure_is_meant = self.settings.iter().any(|(name, value)| name == "AWS_ALLOW_HTTP" && value == "true");
        let mut allow_http = insecure_is_meant;
        for (name, value) in &self.settings {
            let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() else { continue };
            if matches!(key, AmazonS3ConfigKey::Endpoint | AmazonS3ConfigKey::S3Endpoint) && value.starts_with("http://") {
                if !is_loopback(value) && !insecure_is_meant {
                    return Err(wrong(format!("{name} is '{value}': http only for this machine itself, else use https")));
                }
                allow_http = true;
            }
            builder = builder.with_config(key, value);
        }
        let options = ClientOptions::new()
            .with_allow_http(allow_http)
            .with_connect_timeout(CONNECT)
            .with_read_timeout(SILENCE)
            .with_timeout(REQUEST)
            .with_pool_idle_timeout(Duration::from_secs(30));
        // Tries are counted in one place, ours: it can be cancelled and knows the caller's patience.
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let store = builder.with_client_options(options).with_retry(retry).build().map_err(|e| wrong(e.to_string()))?;
        Ok(Arc::new(store))
    }
}

fn is_loopback(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = match authority.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_apart() {
        assert_eq!(Location::parse("/var/lib/x").unwrap(), Location::Folder("/var/lib/x".into()));
        let Location::S3(s3) = Location::parse_with("s3://pail/a/b/", []).unwrap() else { panic!("no S3") };
        assert_eq!((s3.bucket.as_str(), s3.prefix.as_str()), ("pail", "a/b"));
        for wrong in ["", "s3://", "s3:///x", "gs://x/y", "s3://pail/a//b"] {
            assert!(matches!(Location::parse_with(wrong, []), Err(Error::Location { .. })), "{wrong}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let settings = [("AWS_SECRET_ACCESS_KEY".to_owned(), "hush".to_owned())];
        let place = Location::parse_with("s3://pail/a", settings).unwrap();
        assert_eq!(format!("{place} {place:?}"), "s3://pail/a S3(s3://pail/a)");
    }

    #[test]
    fn plain_http_is_for_this_machine_only() {
        for local in ["http://127.0.0.1:9000", "http://localhost", "http://[::1]:80/x", "http://127.9.9.9"] {
            assert!(is_loopback(local), "{local}");
        }
        for other in ["http://127.0.0.1.example.org", "http://10.0.0.1", "http://localhost.example.org:80"] {
            assert!(!is_loopback(other), "{other}");
            let settings = [("AWS_ENDPOINT_URL".to_owned(), other.to_owned())];
            assert!(Location::parse_with("s3://pail", settings).unwrap().connect().is_err(), "{other}");
        }
    }
}
