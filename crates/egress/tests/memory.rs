//! What idle connections cost. A process of its own, so that nothing else is counted.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod common;

use common::*;
use egress::Ask;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    net::{TcpListener, TcpStream},
};

/// Bytes of this process that are in memory.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// A tunnel that has moved some bytes both ways, and is idle now.
async fn idle(world: &World, listener: &TcpListener, port: u16) -> (DuplexStream, TcpStream) {
    let (mut inside, edge) = duplex(512);
    let egress = world.egress.clone();
    tokio::spawn(async move { egress.serve(edge, Ask::Proxy, |_| {}).await });
    inside.write_all(format!("CONNECT a.test:{port} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    read_head(&mut inside).await;
    let (mut outside, _) = listener.accept().await.unwrap();
    let mut buffer = [0; 4096];
    for _ in 0..4 {
        outside.write_all(&buffer).await.unwrap();
        inside.read_exact(&mut buffer).await.unwrap();
        inside.write_all(&buffer).await.unwrap();
        outside.read_exact(&mut buffer).await.unwrap();
    }
    (inside, outside)
}

#[tokio::test]
async fn five_hundred_idle_connections_cost_at_most_ten_mebibytes() {
    let world = world(json!({}));
    let (listener, port) = listen().await;
    let warm = idle(&world, &listener, port).await;
    let before = resident();
    let mut held = Vec::new();
    for _ in 0..500 {
        held.push(idle(&world, &listener, port).await);
    }
    let cost = resident().saturating_sub(before);
    assert_eq!(world.egress.open().len(), 501);
    assert!(cost <= 10 << 20, "{} KiB for each connection", cost / 500 / 1024);
    println!("{} bytes for each connection", cost / 500);
    drop((held, warm));
}
