//! The user's own terminal: raw mode, size, input, and one line of our own at its bottom.

use super::modes::Modes;
use crate::client::{
    failure::{Failure, Result},
    text::{clip, safe},
};
use std::{
    io::{IsTerminal, Read, Write},
    time::Duration,
};
use tokio::sync::mpsc;

/// The user's terminal in raw mode. Dropping it puts everything back.
pub struct Tty {
    modes: Modes,
    raw: bool,
}

impl Tty {
    /// Takes the terminal over.
    ///
    /// # Errors
    /// Standard input or output is none.
    pub fn open() -> Result<Tty> {
        Tty::check()?;
        crossterm::terminal::enable_raw_mode()
            .map_err(|e| Failure::failed(format!("can't switch the terminal to raw mode: {e}")))?;
        Ok(Tty { modes: Modes::default(), raw: true })
    }

    /// Says whether there is a terminal to take over.
    ///
    /// # Errors
    /// There is none.
    pub fn check() -> Result<()> {
        if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
            return Ok(());
        }
        Err(Failure::failed("attach needs a terminal — in a script use 'dormouse exec', or 'dormouse logs -f' to follow output"))
    }

    /// Columns and rows; 80 by 24 where they aren't known.
    pub fn size() -> (u16, u16) {
        match crossterm::terminal::size() {
            Ok((cols, rows)) if cols > 0 && rows > 0 => (cols, rows),
            _ => (80, 24),
        }
    }

    /// Output of the session, as it is.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn output(&mut self, bytes: &[u8]) -> Result<()> {
        self.modes.feed(bytes);
        write(bytes)
    }

    /// A cleared terminal, then what redraws the session's screen on it.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn redraw(&mut self, bytes: &[u8]) -> Result<()> {
        let mut all = self.modes.switch_off();
        all.extend_from_slice(b"\x1b[H\x1b[2J");
        all.extend_from_slice(bytes);
        self.modes.feed(bytes);
        write(&all)
    }

    /// Writes `text` in reverse video over the bottom line. The cursor stays where it was; the line is gone with the next
    /// redraw.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn bottom_line(&mut self, text: &str, bell: bool) -> Result<()> {
        let (cols, rows) = Tty::size();
        let text = clip(&safe(text), usize::from(cols));
        let bell = if bell { "\x07" } else { "" };
        write(format!("\x18{bell}\x1b7\x1b[?6l\x1b[{rows};1H\x1b[0;7m\x1b[2K{text}\x1b[0m\x1b8").as_bytes())
    }

    /// Puts the terminal back and leaves the cursor on a fresh line below where it was: what was shown stays in sight.
    pub fn restore(&mut self) {
        if !std::mem::take(&mut self.raw) {
            return;
        }
        let mut bytes = self.modes.switch_off();
        bytes.extend_from_slice(b"\r\n\x1b[J");
        // Nothing is left to be done for a terminal that is gone.
        let _ = write(&bytes);
        let _ = crossterm::terminal::disable_raw_mode();
    }
}

impl Drop for Tty {
    fn drop(&mut self) {
        self.restore();
    }
}

fn write(bytes: &[u8]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|e| Failure::failed(format!("the terminal is gone: {e}")))
}

/// What is typed, read by a thread of its own: reading from a terminal can't be cancelled, so the thread ends with the
/// process. The channel closes at the input's end.
pub fn typed() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::Builder::new()
        .name("terminal input".to_owned())
        .spawn(move || {
            let mut buffer = vec![0; 16 * 1024];
            loop {
                match std::io::stdin().lock().read(&mut buffer) {
                    Ok(0) => return,
                    Ok(n) if sender.blocking_send(buffer[..n].to_vec()).is_err() => return,
                    Ok(_) => {}
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(10)),
                    Err(_) => return,
                }
            }
        })
        .expect("a process that has one thread can have another");
    receiver
}
