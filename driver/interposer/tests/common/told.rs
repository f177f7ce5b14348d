//! What a program in a container sees of itself: what the driver tells of an address, and its own threads.
#![allow(unsafe_code, reason = "the driver is called through C")]

use super::guest::{Guest, call};

/// CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _IS_MANAGED, _HOST_POINTER.
const ASKED: [i32; 3] = [2, 8, 4];

impl Guest {
    /// Type, whether it is managed, and its address for the host: asked one by one, and all at once.
    pub(crate) fn told(&self, address: u64) -> String {
        let one = ASKED.map(|which| {
            let mut out = 0u64;
            let code =
                call!(self, "cuPointerGetAttribute", &mut out => &mut u64, which => i32, address => u64);
            if code == 0 { said(out, address) } else { format!("error {code}") }
        });
        let mut all = [0u64; 3];
        let [first, second, third] = &mut all;
        let places: [*mut u64; 3] = [first, second, third];
        let code = call!(self, "cuPointerGetAttributes", 3 => u32, ASKED.as_ptr() => *const i32,
            places.as_ptr() => *const *mut u64, address => u64);
        let all = all.map(|out| said(out, address));
        format!("{} | {code} {}", one.join(" "), all.join(" "))
    }
}

fn said(out: u64, address: u64) -> String {
    if out == address { "itself".to_owned() } else { out.to_string() }
}

/// How many threads the process has, and how many of them have all signals blocked.
pub(crate) fn threads() -> String {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a process");
    let (mut all, mut deaf) = (0, 0);
    for task in tasks {
        let status =
            std::fs::read_to_string(task.expect("a thread").path().join("status")).unwrap_or_default();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap_or_default().trim();
        let mask = u64::from_str_radix(blocked, 16).unwrap_or(0);
        all += 1;
        // KILL and STOP cannot be blocked, and libc keeps two for itself.
        let kept = 1 << 8 | 1 << 18 | 3 << 31;
        deaf += u32::from(mask | kept == u64::MAX);
    }
    format!("{all} {deaf}")
}
