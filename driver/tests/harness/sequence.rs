//! Random sequences of operations that a seed determines, and the reduction of a failing sequence to
//! a short one that still fails.
#![allow(dead_code)] // Each test target uses only some of these items.

use std::fmt::Debug;
use std::time::{Duration, Instant, SystemTime};

/// Time limit for reducing a failing sequence. The shortest one found by then is reported.
const SHRINK_TIMEOUT: Duration = Duration::from_secs(180);

/// A sequence that failed.
pub(crate) struct Failure {
    /// Index of the operation that failed.
    pub(crate) at: usize,
    pub(crate) cause: String,
    pub(crate) log: String,
}

/// The number in an environment variable, if it is set.
pub(crate) fn env_number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

/// A seed for runs without a chosen one.
pub(crate) fn seed_from_clock() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos().into()
}

/// Removes smaller and smaller pieces from a sequence while it still fails, then panics with the
/// remaining sequence. `run` runs a sequence on a new node.
pub(crate) async fn shrink<O: Clone + Debug>(
    seed: &str,
    operations: &[O],
    mut failure: Failure,
    run: impl AsyncFn(&[O]) -> Result<(), Failure>,
) -> ! {
    println!("operation {} failed, reducing the sequence: {}", failure.at, failure.cause);
    let begun = Instant::now();
    let mut left: Vec<O> = operations.iter().take(failure.at + 1).cloned().collect();
    let mut piece = left.len().div_ceil(2);
    while piece > 0 && begun.elapsed() < SHRINK_TIMEOUT {
        let mut at = 0;
        while at < left.len() && begun.elapsed() < SHRINK_TIMEOUT {
            let mut tried = left.clone();
            tried.drain(at..(at + piece).min(left.len()));
            match run(&tried).await {
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
    panic!("{}\n{seed}; shortest failing sequence found:\n{steps}{}", failure.cause, failure.log);
}

/// Pseudo-random numbers from a seed (SplitMix64).
pub(crate) struct Rng(u64);

impl Rng {
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

    /// True with probability `1 / times`.
    pub(crate) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn choose<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}
