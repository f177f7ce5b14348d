//! Reads the control file, counts the calls, and kills the process.
//!
//! This code opens and reads files itself; a thread-local flag excludes those calls from the count.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

struct Settings {
    control: PathBuf,
    under: Vec<PathBuf>,
}

/// The control file's last content, and the number of calls since it changed.
static COUNT: Mutex<(String, u64)> = Mutex::new((String::new(), 0));

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

fn settings() -> Option<&'static Settings> {
    static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();
    let read = || {
        let control = PathBuf::from(std::env::var_os("DIVVY_CRASH_CONTROL")?);
        let under = std::env::split_paths(&std::env::var_os("DIVVY_CRASH_UNDER")?).collect();
        Some(Settings { control, under })
    };
    SETTINGS.get_or_init(read).as_ref()
}

/// Makes the call, and kills the process before or after it if the control file says so. `path` is
/// the file that the call writes, `None` if the call must not be counted.
pub(crate) fn around<T>(path: impl FnOnce() -> Option<PathBuf>, call: impl FnOnce() -> T) -> T {
    if INSIDE.with(|inside| inside.replace(true)) {
        return call();
    }
    let stop = path().and_then(|path| {
        let stop = stop_at(&path);
        if stop.is_some() {
            eprintln!("killed at {}", path.display());
        }
        stop
    });
    INSIDE.with(|inside| inside.set(false));
    if stop == Some(When::Before) {
        kill();
    }
    let result = call();
    if stop == Some(When::After) {
        kill();
    }
    result
}

#[derive(Clone, Copy, PartialEq)]
enum When {
    Before,
    After,
}

/// Counts the call. Returns when to kill, if this is the call to kill at.
fn stop_at(path: &Path) -> Option<When> {
    let settings = settings()?;
    // The directory may be given by `..` or a link, and the file itself may not exist yet.
    let folder = path.parent()?.canonicalize().ok()?;
    if !settings.under.iter().any(|dir| folder.starts_with(dir)) {
        return None;
    }
    let control = std::fs::read_to_string(&settings.control).ok()?;
    let (number, when) = control.trim().split_once(' ')?;
    let when = if when == "after" { When::After } else { When::Before };
    let number: u64 = number.parse().ok()?;
    let mut count = COUNT.lock().ok()?;
    if count.0 != control {
        *count = (control, 0);
    }
    count.1 += 1;
    (count.1 == number).then_some(when)
}

fn kill() -> ! {
    // SAFETY: both calls take plain integers; SIGKILL does not return.
    unsafe {
        libc::kill(libc::getpid(), libc::SIGKILL);
        libc::abort()
    }
}
