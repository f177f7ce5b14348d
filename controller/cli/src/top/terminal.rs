//! A terminal that is taken for the live view and given back as it was, whichever way the program ends: by a key, by a
//! signal, by an error or a panic, and while it is stopped. Only SIGKILL leaves it to the shell.

use super::screen::Size;
use anyhow::{Context, Result};
use rustix::process::{Signal, getpid, kill_process};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, IsTerminal};
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::sync::mpsc;

/// The other screen, which leaves what was on this one, without a cursor; and back.
const TAKE: &[u8] = b"\x1b[?1049h\x1b[?25l";
const GIVE_BACK: &[u8] = b"\x1b[?25h\x1b[?1049l";
/// To the upper left corner; the rest of the line; the rest of the screen.
const HOME: &[u8] = b"\x1b[H";
const LINE: &[u8] = b"\x1b[K";
const REST: &[u8] = b"\x1b[J";

/// While the terminal is taken, what its input was before; nothing inside where the input is no terminal.
static TAKEN: Mutex<Option<Option<Termios>>> = Mutex::new(None);

/// What ends the wait between two looks.
pub(super) enum Event {
    /// Bytes as the terminal sends them.
    Keys(Vec<u8>),
    /// Time is up, or the screen is to be drawn for another reason.
    Again,
    /// Somebody wants it to end.
    End,
}

/// Taken as long as this lives.
pub(super) struct Terminal {
    /// None where the input is no terminal: then only signals end it.
    keys: Option<mpsc::Receiver<Vec<u8>>>,
    ends: [Signals; 3],
    resized: Signals,
    stops: Signals,
}

impl Terminal {
    /// # Errors
    /// The terminal is gone, or signals cannot be waited for.
    pub(super) fn enter() -> Result<Self> {
        let on = |one: Signal| signal(SignalKind::from_raw(one.as_raw()));
        let terminal = Self {
            keys: io::stdin().is_terminal().then(keys),
            ends: [on(Signal::INT)?, on(Signal::TERM)?, on(Signal::HUP)?],
            resized: on(Signal::WINCH)?,
            stops: on(Signal::TSTP)?,
        };
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            // First, so that what the panic says is seen.
            std::panic::set_hook(Box::new(move |panic| {
                give_back();
                before(panic);
            }));
        });
        take().context("the terminal cannot be taken")?;
        Ok(terminal)
    }

    /// Of the output.
    pub(super) fn size(&self) -> Size {
        match tcgetwinsize(io::stdout()) {
            Ok(size) => Size { rows: size.ws_row, columns: size.ws_col },
            Err(_) => Size { rows: 0, columns: 0 },
        }
    }

    /// Puts these lines in the place of those before. Lines are written over, so that nothing flickers.
    pub(super) fn show(&self, lines: &[String]) -> io::Result<()> {
        let mut screen = HOME.to_vec();
        for (index, line) in lines.iter().enumerate() {
            // None behind the last line, where it would scroll the first away.
            screen.extend_from_slice(if index == 0 { b"" } else { b"\r\n" });
            screen.extend_from_slice(line.as_bytes());
            screen.extend_from_slice(LINE);
        }
        screen.extend_from_slice(REST);
        write(&screen)
    }

    /// Waits so long for something to happen.
    pub(super) async fn event(&mut self, at_most: Duration) -> Result<Event> {
        let [interrupted, terminated, hung_up] = &mut self.ends;
        tokio::select! {
            keys = pressed(self.keys.as_mut()) => Ok(keys),
            _ = interrupted.recv() => Ok(Event::End),
            _ = terminated.recv() => Ok(Event::End),
            _ = hung_up.recv() => Ok(Event::End),
            _ = self.resized.recv() => Ok(Event::Again),
            _ = self.stops.recv() => {
                give_back();
                // Goes on behind this when it is continued.
                kill_process(getpid(), Signal::STOP)?;
                take().context("the terminal cannot be taken again")?;
                Ok(Event::Again)
            }
            () = tokio::time::sleep(at_most) => Ok(Event::Again),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        give_back();
    }
}

async fn pressed(keys: Option<&mut mpsc::Receiver<Vec<u8>>>) -> Event {
    let Some(keys) = keys else { return std::future::pending().await };
    // None at the end of the input, as when the terminal is closed.
    keys.recv().await.map_or(Event::End, Event::Keys)
}

/// What is typed. The thread ends with the program: a read of a terminal cannot be called off.
fn keys() -> mpsc::Receiver<Vec<u8>> {
    let (send, keys) = mpsc::channel(16);
    std::thread::spawn(move || {
        let mut some = [0; 64];
        while let Ok(length @ 1..) = rustix::io::retry_on_intr(|| rustix::io::read(io::stdin(), &mut some)) {
            if send.blocking_send(some[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    keys
}

/// Keys come one by one and are not shown; those that send signals still do.
fn take() -> io::Result<()> {
    let before = tcgetattr(io::stdin()).ok();
    if let Some(before) = &before {
        let mut modes = before.clone();
        modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        tcsetattr(io::stdin(), OptionalActions::Now, &modes)?;
    }
    *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
    write(TAKE)
}

/// Once for each time that it was taken.
fn give_back() {
    let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(before) = taken else { return };
    // Whoever cannot write to it any more has nothing to give back.
    let _ = write(GIVE_BACK);
    if let Some(before) = before {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
    }
}

/// Past the buffer of the standard library: a panic may come while that is in use.
fn write(mut text: &[u8]) -> io::Result<()> {
    while !text.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(io::stdout(), text))?;
        text = &text[written..];
    }
    Ok(())
}
