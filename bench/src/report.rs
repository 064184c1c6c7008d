//! The table.

/// Which way a figure should go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    Lower,
    Higher,
}

/// One line of the table.
#[derive(Debug, Clone)]
pub struct Row {
    pub id: &'static str,
    pub what: String,
    pub unit: &'static str,
    pub ours: f64,
    /// What stands beside it, with its name.
    pub beside: String,
    /// The raw figure that the ratio is made with.
    pub raw: Option<f64>,
    /// In the unit of `ours`.
    pub target: f64,
    /// How the target came about, such as `1.3 × raw`.
    pub target_text: String,
    pub better: Better,
}

impl Row {
    /// A figure that should stay below a fixed one.
    pub fn at_most(id: &'static str, what: impl Into<String>, ours: f64, unit: &'static str, target: f64) -> Row {
        Row {
            id,
            what: what.into(),
            unit,
            ours,
            beside: "–".to_owned(),
            raw: None,
            target,
            target_text: format!("≤ {}", figure(target, unit)),
            better: Better::Lower,
        }
    }

    /// A figure that should reach a fixed one.
    pub fn at_least(id: &'static str, what: impl Into<String>, ours: f64, unit: &'static str, target: f64) -> Row {
        let text = format!("≥ {}", figure(target, unit));
        Row { target_text: text, better: Better::Higher, ..Row::at_most(id, what, ours, unit, target) }
    }

    /// The target is a multiple of the raw tool's figure.
    pub fn times_raw(self, raw: f64, factor: f64) -> Row {
        let sign = if self.better == Better::Lower { '≤' } else { '≥' };
        Row { target: raw * factor, target_text: format!("{sign} {factor} × raw"), raw: Some(raw), ..self }
    }

    pub fn beside(self, text: impl Into<String>) -> Row {
        Row { beside: text.into(), ..self }
    }

    /// A row that couldn't be measured.
    pub fn broken(id: &'static str, why: &str) -> Row {
        Row::at_most(id, format!("not measured: {}", why.replace(['|', '\n'], " ")), f64::NAN, "", f64::NAN)
    }

    fn is_met(&self) -> bool {
        match self.better {
            Better::Lower => self.ours <= self.target,
            Better::Higher => self.ours >= self.target,
        }
    }

    /// Also true for what couldn't be measured.
    pub fn is_over_twice(&self) -> bool {
        let good = match self.better {
            Better::Lower => self.ours <= 2.0 * self.target,
            Better::Higher => self.ours >= self.target / 2.0,
        };
        !good
    }

    fn line(&self) -> String {
        let ratio = self.raw.map_or("–".to_owned(), |raw| format!("{:.2} ×", self.ours / raw));
        let met = if self.is_met() { "yes" } else { "**no**" };
        let (ours, target) = (figure(self.ours, self.unit), &self.target_text);
        format!("| `{}` | {} | {ours} | {} | {ratio} | {target} | {met} |", self.id, self.what, self.beside)
    }
}

/// A figure with as many digits as say something.
pub fn figure(value: f64, unit: &str) -> String {
    let digits = match value.abs() {
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

/// What the figures were measured on.
pub struct Machine {
    load: String,
    started: std::time::Instant,
}

impl Machine {
    pub fn now() -> Machine {
        Machine { load: load(), started: std::time::Instant::now() }
    }
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// Prints the table as Markdown.
pub fn print(start: &Machine, rows: &[Row]) {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let (load, seconds) = (&start.load, start.started.elapsed().as_secs());
    println!("{cpus} CPUs, Linux {}, {}", kernel.trim(), crate::raw::version());
    println!("load average {load} before, {} after {seconds} s (the bench's own load included)\n", self::load());
    println!("| row | what | ours | beside | ratio | target | met |\n|---|---|---|---|---|---|---|");
    for row in rows {
        println!("{}", row.line());
    }
    let met = rows.iter().filter(|row| row.is_met()).count();
    println!("\n{met} of {} targets are met.", rows.len());
}
