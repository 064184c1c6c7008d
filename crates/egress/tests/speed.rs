//! How fast bytes pass, for people: `cargo test -p egress --release --test speed -- --ignored --nocapture`.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod common;

use common::*;
use http_body_util::BodyExt;
use serde_json::json;
use std::time::Instant;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const BYTES: usize = 2 << 30;

fn shown(what: &str, bytes: usize, since: Instant) {
    println!("{what}: {:.0} MB/s", bytes as f64 / since.elapsed().as_secs_f64() / 1e6);
}

async fn drain(mut stream: impl tokio::io::AsyncRead + Unpin) {
    let (mut buffer, mut left) = (vec![0; 256 * 1024], BYTES);
    while left > 0 {
        left = left.saturating_sub(stream.read(&mut buffer).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "prints figures and judges none"]
async fn one_download() {
    let world = world(json!({ "rules": [{ "allow": "api.test", "methods": ["GET"] }] }));
    let (listener, port) = listen().await;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move { while stream.write_all(&vec![0; 256 * 1024]).await.is_ok() {} });
        }
    });
    let start = Instant::now();
    drain(TcpStream::connect(("127.0.0.1", port)).await.unwrap()).await;
    shown("directly", BYTES, start);
    let stream = world.dial("a.test", port);
    let start = Instant::now();
    drain(stream).await;
    shown("as a stream", BYTES, start);
    for alpn in ["http/1.1", "h2"] {
        let origin = origin(Some(world.server_config(&[alpn]))).await;
        let to = format!("api.test:{}", origin.port);
        let stream = world.tls(&to, "api.test", &[alpn]).await.unwrap();
        let request = |uri: &str| get(uri, &[("host", &to)]);
        let response = if alpn == "h2" {
            client2(stream).await.send_request(request(&format!("https://{to}/endless"))).await
        } else {
            client1(stream).await.send_request(request("/endless")).await
        };
        let (mut body, mut left, start) = (response.unwrap().into_body(), BYTES / 4, Instant::now());
        while left > 0 {
            left = left.saturating_sub(body.frame().await.unwrap().unwrap().into_data().unwrap().len());
        }
        shown(&format!("with TLS ended, {alpn}"), BYTES / 4, start);
    }
}
