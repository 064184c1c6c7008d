//! A late viewer sees what tmux shows for the same stream: recordings of real programs, at three sizes.
//!
//! The reference is always tmux given the raw recording in an 80x24 pane, which is then resized as the case says. It
//! is compared with a pane that has the case's size from its beginning and gets nothing but our redraw. Both panes
//! belong to one tmux, so colours and attributes are compared in its own words (`capture-pane -e`).

mod common;

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Cell, RECORDINGS, cells, recording, screen};

/// A private tmux server, ended with this value.
struct Tmux {
    socket: String,
    folder: tempfile::TempDir,
    panes: AtomicU32,
}

/// What tmux can tell about a pane.
#[derive(Debug, PartialEq)]
struct Pane {
    /// Scrollback and screen, or only the screen.
    lines: Vec<Vec<Cell>>,
    cursor: (u16, u16),
    size: String,
    flags: String,
}

impl Tmux {
    fn start() -> Self {
        static SERVERS: AtomicU32 = AtomicU32::new(0);
        let socket = format!("screen-{}-{}", std::process::id(), SERVERS.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::tempdir().expect("temporary folder");
        let tmux = Self { socket, folder, panes: AtomicU32::new(0) };
        tmux.run(&["new-session", "-d", "-s", "test", "-x", "80", "-y", "24", "cat"]);
        for (option, value) in [("status", "off"), ("history-limit", "20000"), ("allow-rename", "off")] {
            tmux.run(&["set-option", "-g", option, value]);
        }
        tmux
    }

    fn run(&self, args: &[&str]) -> String {
        let output = Command::new("tmux")
            .args(["-u", "-L", &self.socket, "-f", "/dev/null"])
            .args(args)
            .env("TMUX_TMPDIR", self.folder.path())
            .env("LC_ALL", "C.UTF-8")
            .env_remove("TMUX")
            .output()
            .expect("tmux must be installed for these tests");
        assert!(output.status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("tmux prints UTF-8")
    }

    /// A pane of the given size that shows `bytes`. Returns when tmux has read them all: the pane asks for the
    /// terminal's status (DSR 5) behind them and waits for the answer.
    fn pane(&self, bytes: &[u8], (cols, rows): (u16, u16)) -> String {
        let number = self.panes.fetch_add(1, Ordering::Relaxed);
        let file = self.folder.path().join(format!("bytes-{number}"));
        std::fs::write(&file, bytes).expect("write bytes");
        let (cols, rows) = (cols.to_string(), rows.to_string());
        let script = format!(
            "stty raw -echo; cat '{}'; printf '\\033[5n'; while [ \"$(dd bs=1 count=1 2>/dev/null)\" != n ]; do :; done; \
             tmux -L {} wait-for -S done-{number}; cat > /dev/null",
            file.display(),
            self.socket,
        );
        let pane = self.run(&["new-session", "-d", "-x", &cols, "-y", &rows, "-P", "-F", "#{pane_id}", &script]);
        self.run(&["wait-for", &format!("done-{number}")]);
        pane.trim().to_owned()
    }

    fn resize(&self, pane: &str, (cols, rows): (u16, u16)) {
        self.run(&["resize-window", "-t", pane, "-x", &cols.to_string(), "-y", &rows.to_string()]);
    }

    fn look(&self, pane: &str, capture: &[&str]) -> Pane {
        let ask = |format: &str| self.run(&["display-message", "-p", "-t", pane, format]).trim_end().to_owned();
        let number = |format: &str| ask(format).parse().expect("a number");
        let content = self.run(&[&["capture-pane", "-p", "-N", "-t", pane], capture].concat());
        Pane {
            lines: cells(&content).into_iter().map(trimmed).collect(),
            cursor: (number("#{cursor_x}"), number("#{cursor_y}")),
            size: ask("#{pane_width}x#{pane_height}"),
            flags: ask("alternate #{alternate_on} cursor #{cursor_flag} keys #{keypad_cursor_flag} keypad #{keypad_flag} \
                 mouse #{mouse_any_flag} #{mouse_standard_flag} #{mouse_button_flag} #{mouse_all_flag} \
                 #{mouse_sgr_flag} #{mouse_utf8_flag} insert #{insert_flag} wrap #{wrap_flag} origin #{origin_flag} \
                 region #{scroll_region_upper}-#{scroll_region_lower} tabs #{pane_tabs} title #{pane_title} \
                 hidden cursor \
                 #{?alternate_on,#{alternate_saved_x} #{alternate_saved_y},}"),
        }
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        let _ = Command::new("tmux")
            .args(["-L", &self.socket, "kill-server"])
            .env("TMUX_TMPDIR", self.folder.path())
            .env_remove("TMUX")
            .status();
    }
}

/// Without what doesn't count at the end of a line: tmux captures printed blanks there and leaves out erased cells,
/// even coloured ones, and no viewer sees the difference. The colour of these is compared with xterm.js, in
/// `reference.rs`.
fn trimmed(mut line: Vec<Cell>) -> Vec<Cell> {
    let shows = |(c, style): &Cell| *c != ' ' || style.iter().any(|part| !part.starts_with("bg "));
    line.truncate(line.iter().rposition(shows).map_or(0, |at| at + 1));
    line
}

fn compare(name: &str, theirs: &Pane, ours: &Pane) {
    let text = |line: &[Cell]| line.iter().map(|(c, _)| *c).collect::<String>();
    for (at, (theirs, ours)) in theirs.lines.iter().zip(&ours.lines).enumerate() {
        assert_eq!(text(theirs), text(ours), "{name}: text of line {at}");
        for (col, (theirs, ours)) in theirs.iter().zip(ours).enumerate() {
            assert_eq!(theirs, ours, "{name}: line {at}, character {col}");
        }
    }
    assert_eq!(theirs.lines.len(), ours.lines.len(), "{name}: lines");
    assert_eq!((theirs.cursor, &theirs.size, &theirs.flags), (ours.cursor, &ours.size, &ours.flags), "{name}");
}

/// Scrollback and screen with colours, cursor and modes, and what the alternate screen hides, are all equal.
#[test]
fn same_size_is_equal_in_everything_tmux_tells() {
    let tmux = Tmux::start();
    for name in RECORDINGS {
        let bytes = recording(name);
        let theirs = tmux.pane(&bytes, (80, 24));
        let ours = tmux.pane(&screen(&bytes).redraw(), (80, 24));
        compare(name, &tmux.look(&theirs, &["-e", "-S", "-"]), &tmux.look(&ours, &["-e", "-S", "-"]));
    }
}

/// The visible screen after a resize, with colours, cursor and modes, is equal too: full-screen programs are cut or
/// padded, the main screen's wrapped lines reflow as tmux reflows them. One thing differs: tmux leaves the alternate
/// screen's cursor right of the edge of a screen that became narrower, where it is drawn in the last column.
#[test]
fn other_sizes_are_equal() {
    let tmux = Tmux::start();
    for name in RECORDINGS {
        for size in [(20, 5), (300, 100)] {
            let bytes = recording(name);
            let theirs = tmux.pane(&bytes, (80, 24));
            tmux.resize(&theirs, size);
            let (mut theirs, at_once) = (tmux.look(&theirs, &["-e"]), screen(&bytes).redraw_for(size.0, size.1));
            theirs.cursor.0 = theirs.cursor.0.min(size.0 - 1);
            let name = format!("{name} at {size:?}");
            compare(&name, &theirs, &tmux.look(&tmux.pane(&at_once, size), &["-e"]));

            let mut resized = screen(&bytes);
            resized.resize(size.0, size.1);
            assert!(resized.redraw() == at_once, "{name}: a resized screen redraws differently");
        }
    }
}

/// A viewer may come from anywhere: the redraw is equal also in a terminal that was left in another program's state.
#[test]
fn a_redraw_clears_what_was_there() {
    let tmux = Tmux::start();
    let bytes = recording("agent-inline");
    let theirs = tmux.look(&tmux.pane(&bytes, (80, 24)), &["-e", "-S", "-"]);
    for before in ["agent-full", "vim", "htop", "shell"] {
        let bytes =
            [recording(before), b"\x1b[?6h\x1b[4h\x1b[?7l\x0e\x1b)0\x1b]8;;http://x/".to_vec(), screen(&bytes).redraw()].concat();
        compare(before, &theirs, &tmux.look(&tmux.pane(&bytes, (80, 24)), &["-e", "-S", "-"]));
    }
}
