//! Limits the memory that glibc's allocator keeps for the process.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;
use tokio::sync::watch;

/// Settings of glibc malloc: one arena for all threads, and trimming above 64 KiB of free memory.
const MALLOC_SETTINGS: [(&str, &str); 3] =
    [("MALLOC_ARENA_MAX", "1"), ("MALLOC_TRIM_THRESHOLD_", "65536"), ("MALLOC_MMAP_THRESHOLD_", "65536")];

/// Executes the program again with the settings of [`MALLOC_SETTINGS`]; call it first in `main`.
///
/// glibc reads these variables only before `main`. Variables that the operator has set stay.
/// If `exec` fails, the process continues without the settings.
pub fn reexec_with_settings(program: &str) {
    let unset = MALLOC_SETTINGS.iter().filter(|(name, _)| std::env::var_os(name).is_none()).copied();
    let unset: Vec<(&str, &str)> = unset.collect();
    if unset.is_empty() {
        return;
    }
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    let cause = Command::new("/proc/self/exe").arg0(name).args(args).envs(unset).exec();
    eprintln!("{program}: cannot re-execute with smaller malloc arenas: {cause}");
}

/// Delay before trimming, to cover the follow-up work of a change, such as the watch events of
/// the process's own writes.
const TRIM_DELAY: Duration = Duration::from_secs(1);

/// Trims the heap after every change of the channel, for as long as it has a sender. Meant for
/// values whose computation needs much memory for a short time.
///
/// glibc returns only the end of the heap by itself. Without this task, an eight-GPU node kept
/// two megabytes of free memory below the end.
pub async fn trim_after_changes<T>(mut values: watch::Receiver<T>) {
    while values.changed().await.is_ok() {
        tokio::time::sleep(TRIM_DELAY).await;
        values.mark_unchanged();
        trim();
    }
    std::future::pending().await
}

/// Returns all free heap pages to the system.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code, reason = "a call of the C library that std does not have")]
fn trim() {
    // SAFETY: `malloc_trim` takes no pointer, locks the heap itself and touches free memory alone.
    unsafe { libc::malloc_trim(0) };
}

/// Other C libraries trim by themselves or have no function for it.
#[cfg(not(target_env = "gnu"))]
fn trim() {}
