//! The kernel log of the node: a file in the record format of `/dev/kmsg`.
//!
//! Operations add lines to the state, and the store appends them to the file when it writes the
//! state. A boot starts a new file. Unlike the device, the file ends where the device would block.

use crate::state::{Gpu, KernelLog, State};
use rustix::fs::{Mode, OFlags};
use rustix::time::ClockId;
use std::io::{self, Write};
use std::path::Path;

/// Facility `kern` (0) and level `warning` (4), the kernel's default for messages without a level.
const PRIORITY: u32 = 4;
/// XID that reports another recovery action.
pub(crate) const RECOVERY_ACTION_XID: u64 = 154;

impl KernelLog {
    /// Adds a line.
    pub(crate) fn push(&mut self, line: String) {
        self.lines.push(line);
    }

    /// Starts a new log, as a boot does.
    pub(crate) fn restart(&mut self) {
        *self = Self { restarts: true, ..Self::default() };
    }

    /// Writes the lines to the file. The caller holds the state's lock.
    pub(crate) fn write(&mut self, path: &Path) -> io::Result<()> {
        if std::mem::take(&mut self.restarts) {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let flags = OFlags::APPEND | OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        let mut file = std::fs::File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))?);
        let now = rustix::time::clock_gettime(ClockId::Monotonic);
        let us = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        for line in std::mem::take(&mut self.lines) {
            // Each record is one write, so that a reader never sees a part of one.
            file.write_all(format!("{PRIORITY},{},{us},-;{line}\n", self.next).as_bytes())?;
            self.next += 1;
        }
        Ok(())
    }

    /// Whether there is nothing to write.
    pub(crate) fn is_written(&self) -> bool {
        self.lines.is_empty() && !self.restarts
    }
}

impl State {
    /// Logs an XID as the driver does (`kernel_rc.c` of the open kernel modules).
    pub(crate) fn log_xid(&mut self, slot: usize, xid: u64, instance: Option<(u32, u32)>) {
        let Some(gpu) = self.gpus.get(slot) else { return };
        let text = match xid {
            RECOVERY_ACTION_XID => recovery_text(gpu.health.recovery_action, gpu.health.recovery_action),
            _ => format!("{}, {}", process(gpu, instance), message(xid)),
        };
        self.log_xid_text(slot, xid, instance, &text);
    }

    /// Logs that the recovery action has changed.
    pub(crate) fn log_recovery_action(&mut self, slot: usize, from: u32, to: u32) {
        self.log_xid_text(slot, RECOVERY_ACTION_XID, None, &recovery_text(from, to));
    }

    fn log_xid_text(&mut self, slot: usize, xid: u64, instance: Option<(u32, u32)>, text: &str) {
        let Some(gpu) = self.gpus.get(slot) else { return };
        // The driver prints the address without the function, and instances with two digits.
        let address = gpu.bdf.split_once('.').map_or(gpu.bdf.as_str(), |(address, _function)| address);
        let place = instance.map_or(String::new(), |(gi, ci)| format!(" GPU-I:{gi:02} GPU-CI:{ci:02}"));
        self.kernel_log.push(format!("NVRM: Xid (PCI:{address}{place}): {xid}, {text}"));
    }

    /// Logs that the driver was loaded.
    pub(crate) fn log_module_load(&mut self) {
        let (architecture, version) = (std::env::consts::ARCH, &self.driver);
        let line = format!(
            "NVRM: loading NVIDIA UNIX Open Kernel Module for {architecture}  {version}  Release Build  \
             (simulated)"
        );
        self.kernel_log.push(line);
    }
}

fn process(gpu: &Gpu, instance: Option<(u32, u32)>) -> String {
    match gpu.processes.iter().find(|process| process.instance == instance) {
        Some(process) => format!("pid={}, name={}", process.pid, process.name),
        None => "pid='<unknown>', name=<unknown>".to_owned(),
    }
}

fn recovery_text(from: u32, to: u32) -> String {
    let name = |action: u32| match action {
        0 => "None",
        1 => "GPU Reset Required",
        2 => "Node Reboot Required",
        3 => "Drain P2P",
        4 => "Drain and Reset",
        _ => "Unknown",
    };
    format!("GPU recovery action changed from {from:#x} ({}) to {to:#x} ({})", name(from), name(to))
}

/// The driver's messages for XIDs that tests need often.
fn message(xid: u64) -> &'static str {
    match xid {
        13 => "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Out Of Range Address",
        31 => {
            "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ \
             0x7f00_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"
        }
        43 | 45 => "Ch 00000008",
        48 => "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer.",
        63 => "Row Remapper: New row marked for remapping, reset gpu to activate.",
        64 => "Row Remapper: Failed to remap a row.",
        74 => "NVLink: fatal error detected on link 0",
        79 => "GPU has fallen off the bus.",
        94 => "Contained: SM (0x1). RST: No, D-RST: No",
        95 => "Uncontained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No",
        119 => "Timeout after 6s of waiting for RPC response from GPU GSP!",
        _ => "(simulated)",
    }
}
