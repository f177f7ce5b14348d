//! A program that waits keeps what it needs, not what it once needed.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;
use tokio::sync::watch;

/// What glibc is told of memory: one arena for all threads, and freed memory goes
/// back soon.
const FRUGAL: [(&str, &str); 3] =
    [("MALLOC_ARENA_MAX", "1"), ("MALLOC_TRIM_THRESHOLD_", "65536"), ("MALLOC_MMAP_THRESHOLD_", "65536")];

/// glibc reads its settings before `main`, so the process becomes itself once
/// more with them; an operator's own settings stay. Where that fails, it goes on
/// as it is, only larger. Called first in `main`.
pub fn begin_again(program: &str) {
    let unset = FRUGAL.iter().filter(|(name, _)| std::env::var_os(name).is_none()).copied();
    let unset: Vec<(&str, &str)> = unset.collect();
    if unset.is_empty() {
        return;
    }
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    let cause = Command::new("/proc/self/exe").arg0(name).args(args).envs(unset).exec();
    eprintln!("{program}: cannot start with less memory: {cause}");
}

/// What follows a change, such as the events of one's own writes, is over by then.
const QUIET: Duration = Duration::from_secs(1);

/// Gives memory back after each time that something was made that takes much of
/// it for a moment; for as long as there is somebody to make it.
///
/// glibc gives back the end of the heap alone, and what stays is never at its
/// beginning: an eight-GPU node held two megabytes of holes for good.
pub async fn give_back_after<T>(mut made: watch::Receiver<T>) {
    while made.changed().await.is_ok() {
        tokio::time::sleep(QUIET).await;
        made.mark_unchanged();
        give_back();
    }
    std::future::pending().await
}

/// Every free page of the heap goes back to the system.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code, reason = "a call of the C library that std does not have")]
fn give_back() {
    // SAFETY: `malloc_trim` takes no pointer, locks the heap itself and touches free memory alone.
    unsafe { libc::malloc_trim(0) };
}

/// Other C libraries do so by themselves or have no call for it.
#[cfg(not(target_env = "gnu"))]
fn give_back() {}
