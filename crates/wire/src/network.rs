//! What programs inside are told, so that they find their way out by themselves; known to the guest, which sets it, and
//! to the server, which shows it.

use crate::guest::{Network, PROXY_PORT};

/// The session's own certificate authority alone. Where Debian's tools look when they make the bundle anew.
pub const CERTIFICATE: &str = "/usr/local/share/ca-certificates/dormouse-session.crt";
/// The system's bundle, with the authority.
pub const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
/// The same for Java.
pub const JAVA_BUNDLE: &str = "/etc/ssl/dormouse-java-cacerts";
pub const JAVA_PASSWORD: &str = "changeit";
/// Where `ssh` reads how to go out.
pub const SSH_CONFIG: &str = "/etc/ssh/ssh_config.d/dormouse.conf";
/// Where programs that know no proxy read whom to ask for names.
pub const RESOLVER: &str = "/etc/resolv.conf";

/// Hosts inside, which need no proxy.
const NO_PROXY: &str = "localhost,127.0.0.1,127.0.0.0/8,::1";

/// The variables of everything that is started in the session. What the session or the program says itself comes first.
pub fn environment(network: &Network) -> Vec<(&'static str, String)> {
    let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
    let mut all = Vec::new();
    // Also for `ALL_PROXY` the form of HTTP: a SOCKS address there breaks clients that lack the library for it.
    for name in ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
        all.push((name, proxy.clone()));
    }
    for name in ["no_proxy", "NO_PROXY"] {
        all.push((name, NO_PROXY.to_owned()));
    }
    all.push(("NODE_USE_ENV_PROXY", "1".to_owned()));
    if network.ca.is_some() {
        // Those that bring certificates of their own and would not look at the system's.
        for name in ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "GIT_SSL_CAINFO"] {
            all.push((name, BUNDLE.to_owned()));
        }
        for name in ["NODE_EXTRA_CA_CERTS", "DENO_CERT"] {
            all.push((name, CERTIFICATE.to_owned()));
        }
        let java = format!("-Djavax.net.ssl.trustStore={} -Djavax.net.ssl.trustStorePassword={}", JAVA_BUNDLE, JAVA_PASSWORD);
        all.push(("JAVA_TOOL_OPTIONS", java));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_named_only_where_there_is_one() {
        let names = |ca: Option<&str>| -> Vec<&str> {
            environment(&Network { ca: ca.map(str::to_owned) }).into_iter().map(|(name, _)| name).collect()
        };
        assert!(!names(None).contains(&"SSL_CERT_FILE") && names(Some("pem")).contains(&"SSL_CERT_FILE"));
        assert!(names(None).contains(&"https_proxy"));
    }
}
