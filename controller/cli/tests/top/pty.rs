//! A pseudo-terminal with a program in it, for tests.
#![allow(dead_code, reason = "not every test uses all of it")]

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The escape sequences of the alternate screen.
pub(crate) const ENTER_SCREEN: &str = "\x1b[?1049h";
pub(crate) const LEAVE_SCREEN: &str = "\x1b[?1049l";

pub(crate) struct Pty {
    child: Child,
    /// The controlling side: the test's keyboard and screen.
    controller: File,
    /// The terminal of the program, kept open until the test has read everything.
    terminal: File,
    before: Termios,
    written: Arc<Mutex<Vec<u8>>>,
}

impl Pty {
    /// Starts a program with the terminal as input, output and errors. It has 24 rows of 100 characters.
    pub(crate) fn start(command: &mut Command) -> Self {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&controller).expect("granted");
        unlockpt(&controller).expect("unlocked");
        let name = ptsname(&controller, Vec::new()).expect("its name");
        let terminal = rustix::fs::open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY, Mode::empty());
        let (controller, terminal) =
            (File::from(controller), File::from(terminal.expect("the program's side")));
        let stdio = || Stdio::from(terminal.try_clone().expect("a descriptor"));
        let before = tcgetattr(&terminal).expect("modes");
        let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().expect("it starts");
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut from, into) = (controller.try_clone().expect("a descriptor"), Arc::clone(&written));
        // The thread exits when the terminal is closed.
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                into.lock().expect("not poisoned").extend_from_slice(&buffer[..length]);
            }
        });
        let pty = Self { child, controller, terminal, before, written };
        pty.resize(24, 100);
        pty
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.controller, size).expect("a size");
    }

    pub(crate) fn press(&self, keys: &str) {
        (&self.controller).write_all(keys.as_bytes()).expect("typed");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("a signal");
    }

    /// Everything that the program has written so far.
    pub(crate) fn written(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().expect("not poisoned")).into_owned()
    }

    /// The screen as last drawn completely: the output after the last move to the upper left corner.
    pub(crate) fn screen(&self) -> String {
        let all = self.written();
        all.rsplit("\x1b[H").find(|drawn| drawn.contains("\x1b[J")).unwrap_or_default().to_owned()
    }

    /// Waits until the condition is true; `what` names it in the panic after a minute.
    pub(crate) fn until(&self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !condition(self) {
            assert!(Instant::now() < deadline, "{what}: not within a minute:\n{:?}", self.written());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether the terminal has its original modes: line input with echo.
    pub(crate) fn is_restored(&self) -> bool {
        tcgetattr(&self.terminal).expect("modes").local_modes == self.before.local_modes
    }

    /// Whether the terminal reports single keys without echo, and Ctrl-C still sends a signal.
    pub(crate) fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.terminal).expect("modes").local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO) && modes.contains(LocalModes::ISIG)
    }

    /// Waits for the program's exit.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        let deadline = Instant::now() + Duration::from_secs(60);
        while status.is_none() {
            assert!(Instant::now() < deadline, "the program does not exit:\n{:?}", self.written());
            std::thread::sleep(Duration::from_millis(20));
            status = self.child.try_wait().expect("waited");
        }
        status.expect("it exited")
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        // The program may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
