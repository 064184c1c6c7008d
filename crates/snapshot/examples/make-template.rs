//! Makes a built-in template in a folder, and says how long it took and how much disk it cost.
//!
//! `cargo run --release -p snapshot --example make-template -- DIR debian|host`

use snapshot::template::TemplateStore;
use std::{process::ExitCode, time::Instant};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, name] = arguments.as_slice() else {
        eprintln!("usage: make-template DIR debian|host");
        return ExitCode::from(2);
    };
    let started = Instant::now();
    let mut progress = |line: &str| eprintln!("{:6.1} s  {line}", started.elapsed().as_secs_f64());
    let made = TemplateStore::open(dir).and_then(|store| {
        let template = match name.as_str() {
            "host" => store.ensure_host(&mut progress)?,
            _ => store.ensure_debian(&mut progress)?,
        };
        let descriptor = store.descriptor(template.hash)?;
        let changed = store.verify_host(template.hash)?;
        Ok((template, descriptor, changed))
    });
    match made {
        Ok((template, descriptor, changed)) => {
            println!("{} {}", template.hash, template.root_path.display());
            println!("{:.1} s, {} files, {} bytes", started.elapsed().as_secs_f64(), descriptor.files, descriptor.size_bytes);
            println!("{} changed since it was taken", changed.len());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
