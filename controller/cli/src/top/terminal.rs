//! The terminal of the live view.
//!
//! Its modes and screen are restored however the program exits: by a key, a signal, an error or a
//! panic, and while it is stopped. Only SIGKILL leaves it in raw mode.

use super::live_view::Size;
use anyhow::{Context, Result};
use rustix::process::{Signal, getpid, kill_process};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, IsTerminal};
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::sync::mpsc;

/// Switches to the alternate screen and hides the cursor.
const ENTER_SCREEN: &[u8] = b"\x1b[?1049h\x1b[?25l";
/// Shows the cursor and switches back to the normal screen.
const LEAVE_SCREEN: &[u8] = b"\x1b[?25h\x1b[?1049l";
/// Moves the cursor to the upper left corner.
const CURSOR_HOME: &[u8] = b"\x1b[H";
/// Clears from the cursor to the end of the line.
const CLEAR_LINE: &[u8] = b"\x1b[K";
/// Clears from the cursor to the end of the screen.
const CLEAR_BELOW: &[u8] = b"\x1b[J";

/// While the live view is on: the previous modes of standard input, or `None` inside if it is not a terminal.
static SAVED_MODES: Mutex<Option<Option<Termios>>> = Mutex::new(None);

/// The event that ends the wait for the next update.
pub(super) enum Event {
    /// Bytes as the terminal sends them.
    Keys(Vec<u8>),
    /// The interval has passed, or the terminal was resized or continued.
    Redraw,
    /// A signal, or the end of the input.
    Quit,
}

/// The terminal in raw mode. Dropping it restores the terminal.
pub(super) struct Terminal {
    /// `None` if standard input is not a terminal: then only signals quit.
    keys: Option<mpsc::Receiver<Vec<u8>>>,
    quits: [Signals; 3],
    resized: Signals,
    stops: Signals,
}

impl Terminal {
    /// Enters raw mode and the alternate screen.
    ///
    /// # Errors
    /// The terminal or the signal handlers cannot be set up.
    pub(super) fn enter() -> Result<Self> {
        let on = |one: Signal| signal(SignalKind::from_raw(one.as_raw()));
        let terminal = Self {
            keys: io::stdin().is_terminal().then(keys),
            quits: [on(Signal::INT)?, on(Signal::TERM)?, on(Signal::HUP)?],
            resized: on(Signal::WINCH)?,
            stops: on(Signal::TSTP)?,
        };
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            // Restore the terminal before the panic message is printed.
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                before(panic);
            }));
        });
        enter().context("cannot set up the terminal")?;
        Ok(terminal)
    }

    /// Size of the output terminal.
    pub(super) fn size(&self) -> Size {
        match tcgetwinsize(io::stdout()) {
            Ok(size) => Size { rows: size.ws_row, columns: size.ws_col },
            Err(_) => Size { rows: 0, columns: 0 },
        }
    }

    /// Replaces the lines on the screen. It overwrites them in place, so that the screen does not flicker.
    pub(super) fn show(&self, lines: &[String]) -> io::Result<()> {
        let mut screen = CURSOR_HOME.to_vec();
        for (index, line) in lines.iter().enumerate() {
            // No line break after the last line: it would scroll the first line away.
            screen.extend_from_slice(if index == 0 { b"" } else { b"\r\n" });
            screen.extend_from_slice(line.as_bytes());
            screen.extend_from_slice(CLEAR_LINE);
        }
        screen.extend_from_slice(CLEAR_BELOW);
        write(&screen)
    }

    /// Waits for an event, at most for `timeout`.
    pub(super) async fn event(&mut self, timeout: Duration) -> Result<Event> {
        let [interrupted, terminated, hung_up] = &mut self.quits;
        tokio::select! {
            keys = pressed(self.keys.as_mut()) => Ok(keys),
            _ = interrupted.recv() => Ok(Event::Quit),
            _ = terminated.recv() => Ok(Event::Quit),
            _ = hung_up.recv() => Ok(Event::Quit),
            _ = self.resized.recv() => Ok(Event::Redraw),
            _ = self.stops.recv() => {
                restore();
                // The call returns when the process is continued.
                kill_process(getpid(), Signal::STOP)?;
                enter().context("cannot set up the terminal again")?;
                Ok(Event::Redraw)
            }
            () = tokio::time::sleep(timeout) => Ok(Event::Redraw),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore();
    }
}

async fn pressed(keys: Option<&mut mpsc::Receiver<Vec<u8>>>) -> Event {
    let Some(keys) = keys else { return std::future::pending().await };
    // `None` at the end of the input, for example when the terminal is closed.
    keys.recv().await.map_or(Event::Quit, Event::Keys)
}

/// Key presses, read by a thread. The thread runs until the process exits: a read from a terminal
/// cannot be cancelled.
fn keys() -> mpsc::Receiver<Vec<u8>> {
    let (send, keys) = mpsc::channel(16);
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok(length @ 1..) = rustix::io::retry_on_intr(|| rustix::io::read(io::stdin(), &mut buffer))
        {
            if send.blocking_send(buffer[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    keys
}

/// Disables line mode and echo; keys like Ctrl-C still send signals.
fn enter() -> io::Result<()> {
    let before = tcgetattr(io::stdin()).ok();
    if let Some(before) = &before {
        let mut modes = before.clone();
        modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        tcsetattr(io::stdin(), OptionalActions::Now, &modes)?;
    }
    *SAVED_MODES.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
    write(ENTER_SCREEN)
}

/// Restores the terminal. Does nothing if [`enter`] was not called since the last time.
fn restore() {
    let saved = SAVED_MODES.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(before) = saved else { return };
    // An error means that the terminal is gone.
    let _ = write(LEAVE_SCREEN);
    if let Some(before) = before {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
    }
}

/// Writes without the standard library's buffer: a panic may occur while that is locked.
fn write(mut text: &[u8]) -> io::Result<()> {
    while !text.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(io::stdout(), text))?;
        text = &text[written..];
    }
    Ok(())
}
