//! Sequences of operations that a seed decides, and how one that fails is cut
//! down to the shortest that still fails.
#![allow(dead_code)] // Each test uses a part of it.

use std::fmt::Debug;
use std::time::{Duration, Instant, SystemTime};

/// For cutting a failing sequence down.
const SHRINKING: Duration = Duration::from_secs(180);

/// A sequence that went wrong.
pub(crate) struct Failure {
    /// Which of its operations did.
    pub(crate) at: usize,
    pub(crate) why: String,
    pub(crate) log: String,
}

/// A number from the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

/// A seed that nobody has chosen.
pub(crate) fn any_seed() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos().into()
}

/// Cuts ever smaller pieces out of a sequence for as long as it still fails,
/// then fails with what is left of it.
pub(crate) async fn shrink<O: Clone + Debug>(
    seed: &str,
    operations: &[O],
    mut failure: Failure,
    walk: impl AsyncFn(&[O]) -> Result<(), Failure>,
) -> ! {
    println!("operation {} failed, cutting the sequence down: {}", failure.at, failure.why);
    let begun = Instant::now();
    let mut left: Vec<O> = operations.iter().take(failure.at + 1).cloned().collect();
    let mut piece = left.len().div_ceil(2);
    while piece > 0 && begun.elapsed() < SHRINKING {
        let mut at = 0;
        while at < left.len() && begun.elapsed() < SHRINKING {
            let mut tried = left.clone();
            tried.drain(at..(at + piece).min(left.len()));
            match walk(&tried).await {
                Err(fails) => {
                    tried.truncate(fails.at + 1);
                    (left, failure) = (tried, fails);
                }
                Ok(()) => at += piece,
            }
        }
        piece /= 2;
    }
    let steps: String = left.iter().map(|operation| format!("  {operation:?}\n")).collect();
    panic!("{}\n{seed}; the shortest sequence that was seen to fail:\n{steps}{}", failure.why, failure.log);
}

/// Numbers that a seed decides (SplitMix64).
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Once in so many times.
    pub(crate) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}
