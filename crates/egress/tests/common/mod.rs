//! A world for the tests: an edge, names that all mean this machine, servers on loopback, clients on in-memory streams.
#![allow(dead_code, reason = "each test file uses its own part")]

use bytes::Bytes;
use egress::{
    Ask, CaKey, Credentials, Denied, Egress, Grant, Observer, RequestLine, Resolve, Resolving, Settings, ca_certificate,
};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, pem::PemObject},
};
use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, Once,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, duplex},
    net::{TcpListener, TcpStream},
    sync::Notify,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

pub const SECRET: &str = "canary-3b1f-secret";
pub const SEED: [u8; 32] = [7; 32];

/// What the edge told.
#[derive(Default)]
pub struct Seen {
    pub denied: Mutex<Vec<Denied>>,
    pub requests: Mutex<Vec<RequestLine>>,
    pub traffic: AtomicUsize,
    pub changed: Notify,
}

impl Observer for Seen {
    fn denied(&self, denied: Denied) {
        self.denied.lock().unwrap().push(denied);
        self.changed.notify_waiters();
    }

    fn traffic(&self) {
        self.traffic.fetch_add(1, SeqCst);
        self.changed.notify_waiters();
    }

    fn request(&self, request: RequestLine) {
        self.requests.lock().unwrap().push(request);
        self.changed.notify_waiters();
    }
}

impl Seen {
    /// Waits until something is true.
    pub async fn until(&self, what: impl Fn(&Seen) -> bool) {
        loop {
            let changed = self.changed.notified();
            if what(self) {
                return;
            }
            changed.await;
        }
    }

    pub fn reasons(&self) -> Vec<String> {
        self.denied.lock().unwrap().iter().map(|denied| denied.reason.clone()).collect()
    }
}

/// Names to lists of addresses: each time the name is asked for, the next list, and the last one for ever.
#[derive(Default)]
pub struct Names {
    pub known: Mutex<HashMap<String, Vec<Vec<IpAddr>>>>,
    pub asked: Mutex<Vec<String>>,
}

impl Names {
    pub fn set(&self, name: &str, answers: &[&[&str]]) {
        let answers = answers.iter().map(|list| list.iter().map(|ip| ip.parse().unwrap()).collect()).collect();
        self.known.lock().unwrap().insert(name.to_owned(), answers);
    }
}

impl Resolve for Names {
    fn resolve<'a>(&'a self, name: &'a str) -> Resolving<'a> {
        Box::pin(async move {
            self.asked.lock().unwrap().push(name.to_owned());
            let mut known = self.known.lock().unwrap();
            let answers = known.get_mut(name).ok_or_else(|| io::Error::other("no such name"))?;
            Ok(if answers.len() > 1 { answers.remove(0) } else { answers[0].clone() })
        })
    }
}

pub struct World {
    pub egress: Egress,
    pub seen: Arc<Seen>,
    pub names: Arc<Names>,
    roots: tempfile::TempDir,
    ca: rcgen::Issuer<'static, rcgen::KeyPair>,
}

/// A world in which `*.test` means this machine, with a policy whose loopback is open.
pub fn world(policy: serde_json::Value) -> World {
    let world = world_without_policy();
    world.set_policy(policy);
    world.egress.set_credentials(credentials());
    world
}

pub fn world_without_policy() -> World {
    world_with(|_| {})
}

pub fn world_with(change: impl FnOnce(&mut Settings)) -> World {
    let (seen, names) = (Arc::new(Seen::default()), Arc::new(Names::default()));
    for name in ["a.test", "b.test", "api.test", "other.test"] {
        names.set(name, &[&["127.0.0.1"]]);
    }
    let roots = tempfile::tempdir().unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let path = roots.path().join("roots.pem");
    std::fs::write(&path, params.self_signed(&key).unwrap().pem()).unwrap();
    let mut settings = Settings { extra_roots: Some(path), ..Settings::default() };
    change(&mut settings);
    let egress = Egress::with_resolver(settings, seen.clone(), names.clone());
    World { egress, seen, names, roots, ca: rcgen::Issuer::new(params, key) }
}

pub fn ca_key() -> CaKey {
    CaKey { seed: SEED, label: "test".into(), not_before: 1_700_000_000 }
}

pub fn credentials() -> Credentials {
    let mut credentials = Credentials::default();
    credentials.ca = Some(ca_key());
    credentials.secrets.insert("KEY".parse().unwrap(), SECRET.into());
    credentials
}

impl World {
    /// Sets a policy, in which loopback is opened by a last rule.
    pub fn set_policy(&self, mut policy: serde_json::Value) {
        let rules = policy["rules"].as_array_mut().map(std::mem::take).unwrap_or_default();
        let rules: Vec<_> = rules.into_iter().chain([serde_json::json!({ "allow": "127.0.0.0/8" })]).collect();
        policy["rules"] = rules.into();
        self.egress.set_policy(Grant { policy: serde_json::from_value(policy).unwrap(), closed: Vec::new() });
    }

    /// A stream into the edge.
    pub fn stream(&self, ask: Ask) -> DuplexStream {
        let (inside, edge) = duplex(64 * 1024);
        let egress = self.egress.clone();
        tokio::spawn(async move { egress.serve(edge, ask, |_| {}).await });
        inside
    }

    pub fn proxy(&self) -> DuplexStream {
        self.stream(Ask::Proxy)
    }

    pub fn dial(&self, host: &str, port: u16) -> DuplexStream {
        self.stream(Ask::To { host: host.into(), port })
    }

    /// Everything that a proxy's client gets for these bytes, until the end.
    pub async fn exchange(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut stream = self.proxy();
        // What is refused early isn't read to its end.
        let _ = stream.write_all(bytes.as_ref()).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// A tunnel that was opened by CONNECT.
    pub async fn tunnel(&self, to: &str) -> DuplexStream {
        let mut stream = self.proxy();
        stream.write_all(format!("CONNECT {to} HTTP/1.1\r\nhost: {to}\r\n\r\n").as_bytes()).await.unwrap();
        let head = read_head(&mut stream).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        stream
    }

    /// TLS to a name over a tunnel, trusting the session's CA only.
    pub async fn tls(&self, to: &str, sni: &str, alpn: &[&str]) -> io::Result<tokio_rustls::client::TlsStream<DuplexStream>> {
        let stream = self.tunnel(to).await;
        connector(alpn).connect(ServerName::try_from(sni.to_owned()).unwrap(), stream).await
    }

    /// A TLS server's configuration for `*.test`, under the CA that the edge trusts.
    pub fn server_config(&self, alpn: &[&str]) -> ServerConfig {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["api.test".into(), "other.test".into()]).unwrap();
        server_config(params.signed_by(&key, &self.ca).unwrap(), &key, alpn)
    }
}

pub fn server_config(certificate: rcgen::Certificate, key: &rcgen::KeyPair, alpn: &[&str]) -> ServerConfig {
    install();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let builder = ServerConfig::builder().with_no_client_auth();
    let mut config = builder.with_single_cert(vec![certificate.der().clone()], key).unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    config
}

fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| rustls::crypto::aws_lc_rs::default_provider().install_default().unwrap());
}

pub fn connector(alpn: &[&str]) -> TlsConnector {
    install();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca_certificate(&ca_key()).as_bytes()).unwrap()).unwrap();
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    TlsConnector::from(Arc::new(config))
}

/// Reads up to the empty line of an HTTP head, and not further.
pub async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

/// A listener on loopback.
pub async fn listen() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// A server that sends back what it gets, and ends when its client does.
pub async fn echo() -> u16 {
    let (listener, port) = listen().await;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
                let _ = write.shutdown().await;
            });
        }
    });
    port
}

pub type Answer = Response<BoxBody<Bytes, Infallible>>;

pub fn text(text: impl Into<Bytes>) -> Answer {
    Response::new(Full::new(text.into()).boxed())
}

/// An HTTP server: it says what it got, and has some special paths.
pub struct Origin {
    pub port: u16,
    /// Requests: method, target, version, and headers as "name: value".
    pub got: Arc<Mutex<Vec<String>>>,
    /// Connections that were accepted.
    pub accepted: Arc<AtomicUsize>,
    /// Lets `/sse` send one more event.
    pub next_event: Arc<Notify>,
}

impl Origin {
    pub fn last(&self) -> String {
        self.got.lock().unwrap().last().cloned().unwrap_or_default()
    }

    pub fn count(&self) -> usize {
        self.got.lock().unwrap().len()
    }
}

pub async fn origin(tls: Option<ServerConfig>) -> Origin {
    let (listener, port) = listen().await;
    let origin = Origin { port, got: Arc::default(), accepted: Arc::default(), next_event: Arc::default() };
    let (got, accepted, next) = (origin.got.clone(), origin.accepted.clone(), origin.next_event.clone());
    let acceptor = tls.map(|config| TlsAcceptor::from(Arc::new(config)));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            accepted.fetch_add(1, SeqCst);
            let (got, next, acceptor) = (got.clone(), next.clone(), acceptor.clone());
            tokio::spawn(async move {
                match acceptor {
                    None => serve(stream, false, got, next).await,
                    Some(acceptor) => {
                        let Ok(stream) = acceptor.accept(stream).await else { return };
                        let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                        serve(stream, h2, got, next).await;
                    }
                }
            });
        }
    });
    origin
}

async fn serve<S>(stream: S, h2: bool, got: Arc<Mutex<Vec<String>>>, next: Arc<Notify>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let (got, next) = (got.clone(), next.clone());
        async move { Ok::<_, Infallible>(answer(request, &got, next).await) }
    });
    let stream = TokioIo::new(stream);
    if h2 {
        let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(stream, service).await;
    } else {
        let _ = hyper::server::conn::http1::Builder::new().serve_connection(stream, service).with_upgrades().await;
    }
}

async fn answer(mut request: Request<Incoming>, got: &Mutex<Vec<String>>, next: Arc<Notify>) -> Answer {
    let mut line = format!("{} {} {:?}\n", request.method(), request.uri(), request.version());
    for (name, value) in request.headers() {
        line.push_str(&format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes())));
    }
    got.lock().unwrap().push(line.clone());
    match request.uri().path() {
        "/echo" => {
            let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            text(body)
        }
        "/stream" => Response::new(request.into_body().map_err(|error| panic!("{error}")).boxed()),
        "/sse" => {
            let events = futures_util::stream::unfold(0, move |n| {
                let next = next.clone();
                async move {
                    next.notified().await;
                    Some((Ok(Frame::data(Bytes::from(format!("data: {n}\n\n")))), n + 1))
                }
            });
            Response::builder().header("content-type", "text/event-stream").body(StreamBody::new(events).boxed()).unwrap()
        }
        "/endless" => {
            let zeros = futures_util::stream::repeat_with(|| Ok(Frame::data(Bytes::from_static(&[0; 16384]))));
            Response::new(StreamBody::new(zeros).boxed())
        }
        "/trailers" => {
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", "0".parse().unwrap());
            let frames = [Ok(Frame::data(Bytes::from_static(b"data"))), Ok(Frame::trailers(trailers))];
            Response::builder()
                .header("trailer", "grpc-status")
                .body(StreamBody::new(futures_util::stream::iter(frames)).boxed())
                .unwrap()
        }
        "/close" => {
            let mut answer = text("closing");
            answer.headers_mut().insert("connection", "close".parse().unwrap());
            answer
        }
        "/ws" => {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let (mut read, mut write) = tokio::io::split(TokioIo::new(upgrade.await.unwrap()));
                let _ = tokio::io::copy(&mut read, &mut write).await;
                let _ = write.shutdown().await;
            });
            Response::builder()
                .status(StatusCode::SWITCHING_PROTOCOLS)
                .header("connection", "upgrade")
                .header("upgrade", "websocket")
                .header("sec-websocket-accept", "x")
                .body(Empty::new().boxed())
                .unwrap()
        }
        _ => text(line),
    }
}

/// A hyper client inside.
pub type Client1 = hyper::client::conn::http1::SendRequest<BoxBody<Bytes, Infallible>>;
pub type Client2 = hyper::client::conn::http2::SendRequest<BoxBody<Bytes, Infallible>>;

pub async fn client1<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(stream: S) -> Client1 {
    let (sender, task) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(task.with_upgrades());
    sender
}

pub async fn client2<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(stream: S) -> Client2 {
    let (sender, task) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(task);
    sender
}

/// A request without a body.
pub fn get(uri: &str, headers: &[(&str, &str)]) -> Request<BoxBody<Bytes, Infallible>> {
    ask("GET", uri, headers, "")
}

pub fn ask(method: &str, uri: &str, headers: &[(&str, &str)], body: &'static str) -> Request<BoxBody<Bytes, Infallible>> {
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = if body.is_empty() { Empty::new().boxed() } else { Full::new(Bytes::from(body)).boxed() };
    request.body(body).unwrap()
}

/// Status, the reason header, and the whole body.
pub async fn read(response: Response<Incoming>) -> (u16, String, String) {
    let status = response.status().as_u16();
    let denied = response.headers().get("x-dormouse-denied").map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, denied, String::from_utf8_lossy(&body).into_owned())
}

/// A server that takes no connection: its queue is full.
pub async fn deaf() -> (SocketAddr, Vec<TcpStream>, tokio::net::TcpSocket) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    (address, Vec::new(), socket)
}

/// The longest that anything here may take: it ends tests that hang, and judges no speed.
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("this takes too long")
}
