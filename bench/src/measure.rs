//! Samples and what is read off them.

use std::time::{Duration, Instant};

/// Durations or rates of one thing, measured several times.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Runs `work` and keeps how many milliseconds it took.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.push(millis(start.elapsed()));
        result
    }

    /// The value below which `percent` of the samples lie; NaN without samples.
    pub fn percentile(&self, percent: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        let at = (percent / 100.0 * last as f64).round() as usize;
        sorted.get(at).copied().unwrap_or(f64::NAN)
    }

    pub fn median(&self) -> f64 {
        self.percentile(50.0)
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }
}

pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Megabytes (10^6) per second.
pub fn rate(bytes: usize, duration: Duration) -> f64 {
    bytes as f64 / 1e6 / duration.as_secs_f64()
}

/// Memory of a process that is in RAM, in MiB.
pub fn resident_mib(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = text.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    kib.map_or(f64::NAN, |kib| kib / 1024.0)
}
