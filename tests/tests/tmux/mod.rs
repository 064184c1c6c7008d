//! A private tmux: a terminal that a test can type into and look at, and another implementation to compare with.

// Each test program uses a part of this.
#![allow(dead_code)]

use dormouse_tests::{eventually, server::binary};
use std::{
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

/// A tmux server of its own, ended with this value.
pub struct Tmux {
    socket: String,
    folder: tempfile::TempDir,
    panes: AtomicU32,
}

impl Tmux {
    pub fn start() -> Tmux {
        static SERVERS: AtomicU32 = AtomicU32::new(0);
        let socket = format!("dormouse-{}-{}", std::process::id(), SERVERS.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::tempdir().expect("temporary folder");
        let tmux = Tmux { socket, folder, panes: AtomicU32::new(0) };
        tmux.run(&["new-session", "-d", "-s", "first", "-x", "80", "-y", "24", "cat"]);
        for (option, value) in [("status", "off"), ("history-limit", "20000"), ("allow-rename", "off"), ("escape-time", "0")] {
            tmux.run(&["set-option", "-g", option, value]);
        }
        tmux
    }

    pub fn run(&self, args: &[&str]) -> String {
        let mut command = Command::new("tmux");
        command.args(["-u", "-L", &self.socket, "-f", "/dev/null"]).args(args).env("TMUX_TMPDIR", self.folder.path());
        let output =
            command.env("LC_ALL", "C.UTF-8").env_remove("TMUX").output().expect("tmux must be installed for these tests");
        assert!(output.status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("tmux prints UTF-8")
    }

    /// A pane that runs a shell command; it stays as it is when that has ended.
    pub fn pane(&self, command: &str, (cols, rows): (u16, u16)) -> Pane<'_> {
        let script = format!("{command}; exec sleep 1000");
        let (cols, rows) = (cols.to_string(), rows.to_string());
        let id = self.run(&["new-session", "-d", "-x", &cols, "-y", &rows, "-P", "-F", "#{pane_id}", &script]);
        Pane { tmux: self, id: id.trim().to_owned() }
    }

    /// A pane in which the binary under test runs with `args` (shell words), and then its status is shown.
    pub fn dormouse(&self, server: &dormouse_tests::Server, args: &str, size: (u16, u16)) -> Pane<'_> {
        let (url, token, program) = (&server.client.base, &server.client.token, binary());
        let program = program.display();
        self.pane(&format!("DORMOUSE_URL={url} DORMOUSE_TOKEN={token} '{program}' {args}; echo \"status=$?\""), size)
    }

    /// A pane that shows `bytes`. Returns when tmux has read them all: the pane asks for the terminal's status (DSR 5)
    /// behind them and waits for the answer.
    pub fn showing(&self, bytes: &[u8], size: (u16, u16)) -> Pane<'_> {
        let number = self.panes.fetch_add(1, Ordering::Relaxed);
        let file = self.folder.path().join(format!("bytes-{number}"));
        std::fs::write(&file, bytes).expect("write bytes");
        let script = format!(
            "stty raw -echo; cat '{}'; printf '\\033[5n'; while [ \"$(dd bs=1 count=1 2>/dev/null)\" != n ]; do :; done; \
             tmux -L {} wait-for -S done-{number}",
            file.display(),
            self.socket,
        );
        let pane = self.pane(&script, size);
        self.run(&["wait-for", &format!("done-{number}")]);
        pane
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        let mut command = Command::new("tmux");
        command.args(["-L", &self.socket, "kill-server"]).env("TMUX_TMPDIR", self.folder.path()).env_remove("TMUX");
        let _ = command.status();
    }
}

/// A pane of a [`Tmux`].
pub struct Pane<'a> {
    tmux: &'a Tmux,
    pub id: String,
}

impl Pane<'_> {
    pub fn resize(&self, (cols, rows): (u16, u16)) {
        self.tmux.run(&["resize-window", "-t", &self.id, "-x", &cols.to_string(), "-y", &rows.to_string()]);
    }

    /// Presses keys by tmux's names: `C-\`, `Enter`, `d`.
    pub fn press(&self, keys: &[&str]) {
        self.tmux.run(&[&["send-keys", "-t", &self.id], keys].concat());
    }

    /// Types text as it is.
    pub fn text(&self, text: &str) {
        self.tmux.run(&["send-keys", "-t", &self.id, "-l", text]);
    }

    /// Types a line.
    pub fn line(&self, text: &str) {
        self.text(text);
        self.press(&["Enter"]);
    }

    /// Pastes as a terminal does: in brackets where the program has asked for them.
    pub fn paste(&self, text: &str) {
        self.tmux.run(&["set-buffer", "-b", "paste", text]);
        self.tmux.run(&["paste-buffer", "-p", "-b", "paste", "-t", &self.id]);
    }

    pub fn capture(&self, args: &[&str]) -> String {
        self.tmux.run(&[&["capture-pane", "-p", "-t", &self.id], args].concat())
    }

    pub fn screen(&self) -> String {
        self.capture(&[])
    }

    /// One of tmux's formats.
    pub fn ask(&self, format: &str) -> String {
        self.tmux.run(&["display-message", "-p", "-t", &self.id, format]).trim_end().to_owned()
    }

    /// Waits until the screen is as `good` wants it.
    #[track_caller]
    pub fn until(&self, what: &str, mut good: impl FnMut(&str) -> bool) -> String {
        let mut last = String::new();
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            eventually(what, || {
                last = self.screen();
                good(&last).then(|| last.clone())
            })
        }));
        found.unwrap_or_else(|_| panic!("{what}; the screen is\n{}", self.screen()))
    }

    /// Waits until `text` is on the screen.
    #[track_caller]
    pub fn shows(&self, text: &str) -> String {
        self.until(&format!("'{text}' is shown"), |screen| screen.contains(text))
    }

    /// Waits until a line of the screen is `text`.
    #[track_caller]
    pub fn shows_line(&self, text: &str) -> String {
        self.until(&format!("a line '{text}' is shown"), |screen| screen.lines().any(|line| line == text))
    }
}
