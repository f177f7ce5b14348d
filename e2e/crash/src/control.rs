//! Reads the control file, counts, and kills.
//!
//! Everything here may itself open and read files; a thread-local flag keeps
//! those calls out of the count.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

struct Settings {
    control: PathBuf,
    under: Vec<PathBuf>,
}

/// The control file's content as last seen, and the calls counted under it.
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

/// Makes the call, and kills the process before or after it if it is the one.
/// `path` says what the call writes to, `None` if it writes to nothing of interest.
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

/// Counts the call; says whether it is the one to stop at.
fn stop_at(path: &Path) -> Option<When> {
    let settings = settings()?;
    // The folder may be named through `..` or a link; the entry itself may not exist yet.
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
