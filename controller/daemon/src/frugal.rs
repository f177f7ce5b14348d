//! A program that waits keeps what it needs, not what it once needed.

use std::os::unix::process::CommandExt;
use std::process::Command;

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
