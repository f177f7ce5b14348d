//! Decides when a process is proven dead.
//!
//! A peer may free another process's slot only with proof: a wrong decision would let the share
//! exceed its limit. The pid must be in the caller's own pid namespace; the node judges processes
//! of other namespaces. A container may also have its parent namespace's `/proc`, where the same
//! number is another process. In that case only the result of a signal is proof.

use divvy_pages::Identity;

/// The fields of `/proc/<pid>/stat` (proc_pid_stat(5)) that identify a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Field 1: the pid, in the namespace of that `/proc`.
    pub pid: u32,
    /// Field 3 is zombie or dead, and field 20 counts no other thread. A zombie has closed its
    /// files, so the driver has freed its memory. A leader that exits before its threads looks the
    /// same, but its memory is still allocated.
    pub exited: bool,
    /// Field 22: the start time, in clock ticks since boot.
    pub start: u64,
    /// Field 28: the stack's start address. The kernel shows 0 or 1 to readers without permission;
    /// both are stored as 0.
    pub image: u64,
}

impl Stat {
    /// Parses the text. The name in field 2 may hold any byte, so fields are counted from the last
    /// `)`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let pid = number(text.split(|byte| *byte == b' ').next()?)?;
        let close = text.iter().rposition(|byte| *byte == b')')?;
        let mut fields = text.get(close + 2..)?.split(|byte| matches!(byte, b' ' | b'\n'));
        // The first item is field 3. `nth` continues from the current position.
        let state = fields.next()?;
        let threads = number(fields.nth(16)?)?;
        let start = number(fields.nth(1)?)?;
        let image = number(fields.nth(5)?)?;
        Some(Self {
            pid: u32::try_from(pid).ok()?,
            exited: matches!(state, b"Z" | b"X") && threads <= 1,
            start,
            image: if image <= 1 { 0 } else { image },
        })
    }
}

/// Parses a decimal number. Field 26 and later can be huge but are never negative.
fn number(text: &[u8]) -> Option<u64> {
    (!text.is_empty()).then_some(())?;
    text.iter().try_fold(0_u64, |number, byte| {
        let digit = char::from(*byte).to_digit(10)?;
        number.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// The result of a signal to a pid (`kill(pid, 0)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The signal was sent, or sending it was forbidden: the process exists.
    Exists,
    /// `ESRCH`.
    NoSuchProcess,
}

/// Returns true if `peer` is proven dead.
///
/// `own_proc` is true if `/proc` shows the caller under its own pid. `stat` is the entry of `/proc`
/// under the peer's pid, if it can be read.
pub fn gone(me: &Identity, peer: &Identity, signal: Signal, own_proc: bool, stat: Option<Stat>) -> bool {
    if peer.namespace != me.namespace || me.namespace == 0 {
        return false;
    }
    if signal == Signal::NoSuchProcess {
        return true;
    }
    let Some(stat) = stat.filter(|stat| own_proc && stat.pid == peer.pid) else { return false };
    let another_image = peer.image != 0 && stat.image != 0 && peer.image != stat.image;
    stat.exited || stat.start != peer.start || another_image
}
