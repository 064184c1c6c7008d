//! TLS configurations, to the inside and to the outside.

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::Resumption,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, pem::PemObject},
    sign::{CertifiedKey, SingleCertAndKey},
};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};
use tokio::sync::OnceCell;

/// HTTP/2 and HTTP/1.1 as ALPN knows them (RFC 7301).
pub(crate) const H2: &[u8] = b"h2";
pub(crate) const HTTP1: &[u8] = b"http/1.1";

/// Sessions that are kept for a short handshake with upstream servers.
const RESUMABLE: usize = 64;

/// Configurations for upstream servers, by what they offer; the trusted CAs are read when first needed.
pub(crate) struct Clients {
    extra_roots: Option<PathBuf>,
    roots: OnceCell<Arc<RootCertStore>>,
    made: Mutex<HashMap<Vec<Vec<u8>>, Arc<ClientConfig>>>,
}

impl Clients {
    pub fn new(extra_roots: Option<PathBuf>) -> Clients {
        Clients { extra_roots, roots: OnceCell::new(), made: Mutex::default() }
    }

    /// The configuration that offers these protocols.
    pub async fn offering(&self, protocols: Vec<Vec<u8>>) -> Result<Arc<ClientConfig>, rustls::Error> {
        let roots = self.roots.get_or_init(|| async {
            let extra = self.extra_roots.clone();
            // Hundreds of files may have to be read.
            tokio::task::spawn_blocking(move || Arc::new(load_roots(extra.as_deref())))
                .await
                .unwrap_or_else(|_| Arc::new(RootCertStore::empty()))
        });
        let roots = Arc::clone(roots.await);
        let mut made = crate::locked(&self.made);
        if let Some(config) = made.get(&protocols) {
            return Ok(Arc::clone(config));
        }
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols.clone_from(&protocols);
        config.resumption = Resumption::in_memory_sessions(RESUMABLE);
        let config = Arc::new(config);
        made.insert(protocols, Arc::clone(&config));
        Ok(config)
    }
}

/// The configuration for one stream from inside.
pub(crate) fn server(leaf: Arc<CertifiedKey>, protocol: Option<&[u8]>) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(leaf)));
    config.alpn_protocols = protocol.map(<[u8]>::to_vec).into_iter().collect();
    // There is nothing to come back to: each stream has a configuration of its own.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: std::sync::OnceLock<Arc<CryptoProvider>> = std::sync::OnceLock::new();
    Arc::clone(PROVIDER.get_or_init(|| Arc::new(aws_lc_rs::default_provider())))
}

fn load_roots(extra: Option<&Path>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    for error in &system.errors {
        tracing::warn!(%error, "a CA of the system can't be read");
    }
    roots.add_parsable_certificates(system.certs);
    let Some(path) = extra else { return roots };
    match CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>) {
        Ok(certificates) => {
            let (added, ignored) = roots.add_parsable_certificates(certificates);
            if added == 0 || ignored > 0 {
                tracing::warn!(path = %path.display(), added, ignored, "some CAs that were named can't be used");
            }
        }
        Err(error) => tracing::warn!(path = %path.display(), %error, "the CAs that were named can't be read"),
    }
    roots
}
