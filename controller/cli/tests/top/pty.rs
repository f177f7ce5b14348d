//! A terminal with a program in it, as somebody has who types and looks.
#![allow(dead_code, reason = "not every test types and looks")]

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What the live view takes a terminal by, and gives it back by.
pub(crate) const TAKE: &str = "\x1b[?1049h";
pub(crate) const GIVE_BACK: &str = "\x1b[?1049l";

pub(crate) struct Pty {
    child: Child,
    near: File,
    /// Held open, so that the terminal is there until all is read.
    far: File,
    before: Termios,
    written: Arc<Mutex<Vec<u8>>>,
}

impl Pty {
    /// Starts it with the terminal as its input, output and errors; 24 rows of 100 characters.
    pub(crate) fn start(command: &mut Command) -> Self {
        let near = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&near).expect("granted");
        unlockpt(&near).expect("unlocked");
        let name = ptsname(&near, Vec::new()).expect("its name");
        let far = rustix::fs::open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY, Mode::empty());
        let (near, far) = (File::from(near), File::from(far.expect("the other end")));
        let end = || Stdio::from(far.try_clone().expect("another end"));
        let before = tcgetattr(&far).expect("modes");
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("it starts");
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut from, into) = (near.try_clone().expect("another end"), Arc::clone(&written));
        // Ends when the terminal is closed.
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            while let Ok(length @ 1..) = from.read(&mut some) {
                into.lock().expect("not poisoned").extend_from_slice(&some[..length]);
            }
        });
        let pty = Self { child, near, far, before, written };
        pty.resize(24, 100);
        pty
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.near, size).expect("a size");
    }

    pub(crate) fn press(&self, keys: &str) {
        (&self.near).write_all(keys.as_bytes()).expect("typed");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("a signal");
    }

    /// All that was written so far.
    pub(crate) fn written(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().expect("not poisoned")).into_owned()
    }

    /// What stands there since it was last drawn whole: behind the last way to the upper left corner.
    pub(crate) fn screen(&self) -> String {
        let all = self.written();
        all.rsplit("\x1b[H").find(|drawn| drawn.contains("\x1b[J")).unwrap_or_default().to_owned()
    }

    /// Waits until it is so.
    pub(crate) fn until(&self, what: &str, mut so: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !so(self) {
            assert!(Instant::now() < deadline, "{what}: not within a minute:\n{:?}", self.written());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Lines come when they are ended, and are shown as they are typed.
    pub(crate) fn is_as_before(&self) -> bool {
        tcgetattr(&self.far).expect("modes").local_modes == self.before.local_modes
    }

    /// Keys come one by one and are not shown, and Ctrl-C is as ever.
    pub(crate) fn is_taken(&self) -> bool {
        let modes = tcgetattr(&self.far).expect("modes").local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO) && modes.contains(LocalModes::ISIG)
    }

    /// Waits for its end.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut ended = None;
        let deadline = Instant::now() + Duration::from_secs(60);
        while ended.is_none() {
            assert!(Instant::now() < deadline, "it goes on:\n{:?}", self.written());
            std::thread::sleep(Duration::from_millis(20));
            ended = self.child.try_wait().expect("waited");
        }
        ended.expect("it ended")
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        // Nothing to do where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
