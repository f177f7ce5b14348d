//! Waiting for a point of one's axis.
//!
//! The real driver spins all the while unless the program asks for something else (`CU_CTX_SCHED_AUTO`: CUDA driver API,
//! context management), so whoever waits for a kernel goes on the moment it ends. Who sleeps is woken 100 us late, which
//! is a tenth of a kernel of a millisecond, and spinning all the while would leave nothing of the processors to the
//! others. So who waits sleeps as long as the point cannot be reached, short of the end, and spins for the rest.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::engine::{Mark, now};
use super::guest::Guest;
use super::map::ROWS;

/// Who waits looks this often at least.
const LOOK: Duration = Duration::from_millis(20);

impl Guest {
    /// Waits until a point is reached, and spins from so much before. Others' work can only make it later, so it is
    /// looked at again and again.
    pub fn wait_for(&self, mark: Mark, spins: Duration) {
        loop {
            let rest = self.rest(mark);
            if rest == 0 {
                return;
            }
            match Duration::from_nanos(rest).min(LOOK).checked_sub(spins) {
                Some(pause) => std::thread::sleep(pause),
                None => {
                    let until = now() + rest;
                    while now() < until {
                        std::hint::spin_loop();
                    }
                }
            }
        }
    }

    /// So many ns pass before a point is reached, unless somebody whose turn it is dies.
    fn rest(&self, mark: Mark) -> u64 {
        if self.in_order() {
            return mark.saturating_sub(now());
        }
        let (ledger, part, row) = (self.ledger(), self.part_index(), self.row());
        let _held = ledger.hold(self.locks(), part, row);
        ledger.play(part, now());
        let rest_of =
            |row: usize, mark: Mark| mark.saturating_sub(ledger.work(row).served.load(Ordering::Relaxed));
        let own = rest_of(row, mark);
        let engine = ledger.engine(part);
        let turn = engine.turn.load(Ordering::Relaxed).checked_sub(1).map(|row| row as usize % ROWS);
        match turn.filter(|other| own > 0 && *other != row) {
            Some(other) => {
                let end = ledger.work(other).submitted.load(Ordering::Relaxed);
                own + rest_of(other, end).min(engine.left.load(Ordering::Relaxed))
            }
            None => own,
        }
    }
}
