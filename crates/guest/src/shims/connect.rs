//! `dormouse-guest connect HOST PORT`: a connection to the outside on standard input and output, for `ssh`'s
//! `ProxyCommand` and whoever else can use one.

use super::fail;
use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpStream},
    process::ExitCode,
};
use wire::guest::PROXY_PORT;

const NAME: &str = "dormouse-guest connect";

pub fn run(args: &[String]) -> ExitCode {
    let (host, port) = match args {
        [host, port] => match port.parse::<u16>() {
            Ok(port @ 1..) => (host.trim_start_matches('[').trim_end_matches(']'), port),
            _ => return fail(NAME, &format!("{port:?} is no port"), 2),
        },
        _ => return fail(NAME, "usage: dormouse-guest connect HOST PORT", 2),
    };
    match open(host, port).and_then(move_both_ways) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(NAME, &format!("{host}:{port}: {error}"), 1),
    }
}

/// A connection that the proxy has made.
fn open(host: &str, port: u16) -> io::Result<(TcpStream, Vec<u8>)> {
    let stream = TcpStream::connect(("127.0.0.1", PROXY_PORT))?;
    let at = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    write!(&stream, "CONNECT {at} HTTP/1.1\r\nHost: {at}\r\n\r\n")?;
    let mut answer = BufReader::new(stream.try_clone()?);
    let mut status = String::new();
    answer.read_line(&mut status)?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        if answer.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap_or(0);
        }
    }
    if status.split(' ').nth(1) == Some("200") {
        let early = answer.buffer().to_vec();
        return Ok((stream, early));
    }
    let mut reason = String::new();
    answer.take(u64::min(length, 4096)).read_to_string(&mut reason)?;
    let reason = if reason.trim().is_empty() { status } else { reason };
    Err(io::Error::other(reason.trim().to_owned()))
}

fn move_both_ways((stream, early): (TcpStream, Vec<u8>)) -> io::Result<()> {
    let mut up = stream.try_clone()?;
    std::thread::spawn(move || {
        // Its end, however it comes, is the end of what goes up.
        let _ = copy(&mut io::stdin().lock(), &mut up);
        let _ = up.shutdown(Shutdown::Write);
    });
    let mut out = io::stdout().lock();
    out.write_all(&early)?;
    out.flush()?;
    copy(&mut &stream, &mut out)
}

fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                to.write_all(&buffer[..count])?;
                to.flush()?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
