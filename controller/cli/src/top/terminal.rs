//! A terminal: shown anew each second, until `q` or Ctrl-C.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use std::io::{self, Read, Write};
use std::time::Duration;

/// To the upper left corner; the rest of the line; the rest of the screen.
const HOME: &[u8] = b"\x1b[H";
const LINE: &[u8] = b"\x1b[K\n";
const REST: &[u8] = b"\x1b[J";

/// Puts a text in the place of the one before. Lines are written over, so that nothing flickers.
pub(super) fn show(text: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(HOME)?;
    for line in text.strip_suffix(b"\n").unwrap_or(text).split(|byte| *byte == b'\n') {
        out.write_all(line)?;
        out.write_all(LINE)?;
    }
    out.write_all(REST)?;
    out.flush()
}

/// The keys, one by one and not shown, as long as this lives; none where the input is no terminal.
pub(super) struct Keys(Option<Termios>);

impl Keys {
    pub(super) fn read() -> Self {
        let before = tcgetattr(io::stdin()).ok();
        if let Some(before) = &before {
            let mut modes = before.clone();
            // Ctrl-C is a key too, so that what was changed here is put back.
            modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
            // Otherwise `q` wants a return after it, and Ctrl-C does as ever.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &modes);
        }
        Self(before)
    }

    /// Waits that long for a key that ends it.
    pub(super) fn ends_within(&self, time: Duration) -> bool {
        if self.0.is_none() {
            std::thread::sleep(time);
            return false;
        }
        let stdin = io::stdin();
        let mut ready = [PollFd::new(&stdin, PollFlags::IN)];
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let mut key = [0];
        match poll(&mut ready, Some(&time)) {
            Ok(0) | Err(_) => false,
            // The end of the input ends it too. Ctrl-C is byte 3.
            Ok(_) => !matches!(stdin.lock().read(&mut key), Ok(1) if !matches!(key, [b'q' | b'Q' | 3])),
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // Nothing else to be done about it.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}
