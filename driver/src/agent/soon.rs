//! Looks that do not wait for the next audit.
//!
//! What kernels look like depends on who else works, so when that changes the trims of the shares on that GPU are found anew
//! ([`super::arbiter`]), one step a look. With a look a second that is seconds in which shares have too little. So for a
//! while looks follow each other faster, and only correct: whether something is wrong is asked as often as ever.
//!
//! The first look comes when NVML, which samples six times a second, has seen none but those who work now in what
//! it will say at the second. Who comes and goes all the time is met on the mean of a second: it brings no more looks than
//! these few in each [`REST`].

use divvy_pages::GpuUuid;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// From the change to the first look, and from one to the next.
pub(super) const FIRST: Duration = Duration::from_millis(250);
pub(super) const PAUSE: Duration = Duration::from_millis(500);
/// Looks follow each other fast for so long.
const LASTS: Duration = Duration::from_millis(1800);
/// And not again within so long.
const REST: Duration = Duration::from_secs(5);

/// When the last change was that brought looks, by GPU.
#[derive(Debug, Default)]
pub(super) struct Soon(BTreeMap<GpuUuid, Instant>);

impl Soon {
    /// More or fewer work on these GPUs: whether a look is to come in [`FIRST`]. Not where one comes soon in any case, which
    /// is put off for nobody.
    pub(super) fn begin(&mut self, moved: Vec<GpuUuid>, now: Instant) -> bool {
        self.0.retain(|_, since| now.duration_since(*since) < REST);
        let (is_any, before) = (self.is_any(now), self.0.len());
        for gpu in moved {
            self.0.entry(gpu).or_insert(now);
        }
        !is_any && self.0.len() > before
    }

    /// Whether this GPU is looked at though its audit is not due.
    pub(super) fn has(&self, gpu: &GpuUuid, now: Instant) -> bool {
        self.0.get(gpu).is_some_and(|since| now.duration_since(*since) < LASTS)
    }

    /// Whether another look is to follow soon.
    pub(super) fn is_any(&self, now: Instant) -> bool {
        self.0.values().any(|since| now.duration_since(*since) + PAUSE < LASTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: GpuUuid = GpuUuid([1; 16]);
    const OTHER: GpuUuid = GpuUuid([2; 16]);

    /// The looks that changes so many milliseconds after the first bring, in milliseconds.
    fn looks(changes: &[u64], until: u64) -> Vec<u64> {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let (mut soon, mut next, mut looks) = (Soon::default(), None, Vec::new());
        for ms in 0..until {
            if changes.contains(&ms) && soon.begin(vec![GPU], at(ms)) {
                next = Some(ms + FIRST.as_millis() as u64);
            }
            if next == Some(ms) {
                assert!(soon.has(&GPU, at(ms)) && !soon.has(&OTHER, at(ms)));
                looks.push(ms);
                next = soon.is_any(at(ms)).then(|| ms + PAUSE.as_millis() as u64);
            }
        }
        looks
    }

    #[test]
    fn a_look_is_not_put_off_for_another_gpu() {
        let (mut soon, now) = (Soon::default(), Instant::now());
        assert!(soon.begin(vec![GPU], now));
        assert!(!soon.begin(vec![OTHER], now + FIRST / 2));
        assert!(soon.has(&OTHER, now + FIRST));
    }

    #[test]
    fn a_change_brings_a_few_looks_and_many_changes_no_more() {
        let few = [250, 750, 1250, 1750];
        assert_eq!(looks(&[0], 20_000), few);
        assert_eq!(looks(&[0, 100, 600, 4900], 20_000), few);
        let all: Vec<u64> = (0..10_000).collect();
        assert_eq!(looks(&all, 10_000).len(), 2 * few.len());
    }
}
