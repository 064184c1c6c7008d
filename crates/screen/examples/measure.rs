//! Prints what a terminal with a full scrollback costs: time to feed and redraw it, and memory.
//!
//! `cargo run --release -p screen --example measure [COLS]`

use std::time::Instant;

use screen::{DEFAULT_SCROLLBACK, Screen};

/// Resident memory of this process in KiB (Linux).
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or_default()
}

fn main() {
    let cols: u16 = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(80);
    let start = resident();
    let mut screen = Screen::new(cols, 24, DEFAULT_SCROLLBACK);
    println!("an empty terminal of {cols}x24: {} KiB", resident() - start);

    let mut lines = String::new();
    for line in 0..11_000 {
        let colour = 31 + line % 7;
        lines += &format!("\x1b[{colour}m{line:>6}\x1b[0m plain text of a usual length \x1b[1mbold\x1b[0m and a tail\r\n");
    }
    let begin = Instant::now();
    screen.feed(lines.as_bytes());
    let megabytes = lines.len() as f64 / 1e6;
    println!("feed {megabytes:.1} MB: {:.1} MB/s", megabytes / begin.elapsed().as_secs_f64());
    let begin = Instant::now();
    screen.feed(lines.as_bytes());
    println!("feed it again, scrollback full: {:.1} MB/s", megabytes / begin.elapsed().as_secs_f64());
    println!("with {} lines of scrollback: {} KiB", screen.scrollback_lines(), resident() - start);

    let mut times: Vec<_> = (0..11)
        .map(|_| {
            let begin = Instant::now();
            let bytes = screen.redraw().len();
            (begin.elapsed(), bytes)
        })
        .collect();
    times.sort();
    println!("redraw: best {:?}, median {:?}, worst {:?}, {} bytes", times[0].0, times[5].0, times[10].0, times[5].1);

    let begin = Instant::now();
    let bytes = screen.redraw_for(cols / 2, 50).len();
    println!("redraw at half the width: {:?}, {bytes} bytes", begin.elapsed());
    println!("afterwards: {} KiB", resident() - start);
}
