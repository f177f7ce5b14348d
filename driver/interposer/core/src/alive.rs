//! When a process is proven dead.
//!
//! A peer may free the slot of another only with proof, since a wrong one would let the
//! share exceed its limit. The pid must be of the caller's own pid namespace: elsewhere the
//! same number is another process (the node, which sees all namespaces, judges those).
//! And `/proc` must be of that namespace too: a container may have that of its parent,
//! in which the same number is another process again. Then only a signal's answer is proof.

use divvy_pages::Identity;

/// Of `/proc/<pid>/stat` (proc_pid_stat(5)), what identifies the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Field 1: the pid, in the namespace of that `/proc`.
    pub pid: u32,
    /// Field 3: a zombie or dead, and (field 20) with no other thread. A zombie has closed
    /// its files, so the driver has freed its memory; a leader that ended before its
    /// threads looks like one but has not.
    pub ended: bool,
    /// Field 22.
    pub start: u64,
    /// Field 28; 0 or 1 where the reader may not see it, then 0 here.
    pub image: u64,
}

impl Stat {
    /// Reads the text. The name in field 2 may hold anything, so the fields count from the last `)`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let pid = number(text.split(|byte| *byte == b' ').next()?)?;
        let close = text.iter().rposition(|byte| *byte == b')')?;
        let mut fields = text.get(close + 2..)?.split(|byte| matches!(byte, b' ' | b'\n'));
        // The first of these is field 3, and `nth` counts on from where it left.
        let state = fields.next()?;
        let threads = number(fields.nth(16)?)?;
        let start = number(fields.nth(1)?)?;
        let image = number(fields.nth(5)?)?;
        Some(Self {
            pid: u32::try_from(pid).ok()?,
            ended: matches!(state, b"Z" | b"X") && threads <= 1,
            start,
            image: if image <= 1 { 0 } else { image },
        })
    }
}

/// A decimal number; field 26 and later may be huge but are never negative.
fn number(text: &[u8]) -> Option<u64> {
    (!text.is_empty()).then_some(())?;
    text.iter().try_fold(0_u64, |number, byte| {
        let digit = char::from(*byte).to_digit(10)?;
        number.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// What a signal to a pid says (`kill(pid, 0)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// It could be sent, or was forbidden: there is such a process.
    Exists,
    /// `ESRCH`.
    NoSuchProcess,
}

/// True where `who` is proven to be gone.
///
/// `own_proc` says that `/proc` shows the caller under its own pid; `stat` is what it shows
/// under the pid of `who`, where it can be read.
pub fn gone(me: &Identity, who: &Identity, signal: Signal, own_proc: bool, stat: Option<Stat>) -> bool {
    if who.namespace != me.namespace || me.namespace == 0 {
        return false;
    }
    if signal == Signal::NoSuchProcess {
        return true;
    }
    let Some(stat) = stat.filter(|stat| own_proc && stat.pid == who.pid) else { return false };
    let another_image = who.image != 0 && stat.image != 0 && who.image != stat.image;
    stat.ended || stat.start != who.start || another_image
}
