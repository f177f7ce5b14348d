//! One line on the container's stderr when a limit first takes effect, per process and kind.
//!
//! A program that meets its limit sees only out of memory, or slow launches. The line says which
//! limit it met, the usage, and the remedy. A forked child inherits what its parent has printed.
//! A class turns the lines off ([`Flags::NO_MESSAGES`]).

use crate::pages::SharePages;
use crate::process_state::Device;
use crate::system::System;
use divvy_pages::account::SlotState;
use divvy_pages::sync::{AtomicU32, Ordering::Relaxed};
use divvy_pages::{Compute, Flags};

/// Maximum length of a line, in bytes: above the longest with 20 digits per number. A write of at
/// most 512 bytes to a pipe is atomic (POSIX `PIPE_BUF`).
const LINE_BYTES_MAX: usize = 256;

struct Line {
    text: [u8; LINE_BYTES_MAX],
    length: usize,
}

impl Line {
    fn new() -> Self {
        Self { text: [0; LINE_BYTES_MAX], length: 0 }
    }

    fn byte(&mut self, byte: u8) {
        if let Some(place) = self.text.get_mut(self.length) {
            *place = byte;
            self.length += 1;
        }
    }

    fn text(&mut self, text: &str) {
        text.bytes().for_each(|byte| self.byte(byte));
    }

    fn number(&mut self, number: u64) {
        if number >= 10 {
            self.number(number / 10);
        }
        self.byte(b'0' + (number % 10) as u8);
    }

    /// Bytes as GiB or MiB with one decimal, rounded down.
    fn bytes(&mut self, bytes: u64) {
        let (unit, name) = if bytes >= 1 << 30 { (1 << 30, " GiB") } else { (1 << 20, " MiB") };
        self.number(bytes / unit);
        self.byte(b'.');
        self.number(bytes % unit * 10 / unit);
        self.text(name);
    }

    fn end(&mut self) -> &[u8] {
        self.byte(b'\n');
        self.text.get(..self.length).unwrap_or_default()
    }
}

impl<S: System> Device<'_, S> {
    /// Reports an allocation of `bytes` that exceeds the memory limit. The caller returns out of
    /// memory to the program.
    #[cold]
    #[inline(never)]
    pub fn report_refusal(&self, bytes: u64) {
        if !self.may_print(&self.process.printed_refusal) {
            return;
        }
        let usage = self.memory_usage();
        let mut line = Line::new();
        line.text("divvy: allocation of ");
        line.bytes(bytes);
        line.text(" refused: ");
        line.bytes(usage.used);
        line.text(" of ");
        line.bytes(usage.limit);
        line.text(" used by ");
        let processes = self.processes();
        line.number(processes);
        line.text(if processes == 1 { " process" } else { " processes" });
        line.text("; free memory, or raise `memory` in the claim");
        self.process.system.print(line.end());
    }

    /// Reports that a launch waits for the share's compute limit.
    #[cold]
    #[inline(never)]
    pub(crate) fn report_throttling(&self) {
        if !self.may_print(&self.process.printed_throttling) {
            return;
        }
        let limits = self.pages.shares().filter_map(SharePages::policy);
        let percent = limits.map(|(_, policy)| limit_percent(policy.compute)).max();
        let mut line = Line::new();
        line.text("divvy: launches are throttled to ");
        line.number(percent.unwrap_or_default().into());
        line.text(" % of the GPU's compute time; to get more, raise `cores` in the claim");
        self.process.system.print(line.end());
    }

    /// Whether this message may be printed now. Marks it as printed.
    fn may_print(&self, printed: &AtomicU32) -> bool {
        !self.has(Flags::NO_MESSAGES) && printed.swap(1, Relaxed) == 0
    }

    /// Number of live processes of the share with the most.
    fn processes(&self) -> u64 {
        let live = |share: &SharePages| {
            let slots = share.account().map_or(&[][..], |page| page.slots());
            slots.iter().filter(|slot| slot.owner().state() == SlotState::Live).count() as u64
        };
        self.pages.shares().map(live).max().unwrap_or_default()
    }
}

/// The share's limit in percent of the device: the ceiling if it has one, else the guarantee.
fn limit_percent(compute: Compute) -> u32 {
    match (compute.cores, compute.ceiling) {
        (cores, 0) => cores,
        (_, ceiling) => ceiling,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal() {
        let check = |bytes: u64, expected: &str| {
            let mut line = Line::new();
            line.bytes(bytes);
            assert_eq!(line.end(), format!("{expected}\n").as_bytes());
        };
        check(0, "0.0 MiB");
        check(512 << 20, "512.0 MiB");
        check((1 << 30) - 1, "1023.9 MiB");
        check(10 << 30, "10.0 GiB");
        check((10 << 30) + (1 << 29), "10.5 GiB");
        check(u64::MAX, "17179869183.9 GiB");
    }

    #[test]
    fn line_that_is_too_long_is_cut() {
        let mut line = Line::new();
        (0..LINE_BYTES_MAX * 2).for_each(|_| line.byte(b'x'));
        assert_eq!(line.end().len(), LINE_BYTES_MAX);
    }
}
