//! Looks that do not wait for the next audit.
//!
//! What kernels look like depends on who else works, so when that changes the trims of the shares on that GPU are found anew
//! ([`super::arbiter`]), one step a look. With a look a second that is seconds in which shares have too little. So for a
//! while looks follow each other faster, and only correct: whether something is wrong is asked as often as ever.
//!
//! The first look comes when NVML, which samples six times a second, has seen none but those who work now in what
//! it will say at the second. Who comes and goes within a second is met on the mean of that and brings no looks; who stays for
//! longer brings no more than these few in each [`REST`]. Who begins for the first time is known least of and comes once: that
//! brings looks whenever it is. Where a share comes to others the first look comes at once: what it launches is paced only once it
//! is planned, and a thousand launches that were not are seconds of everybody's time, which nobody takes back.

use super::desk::Moved;
use divvy_pages::GpuUuid;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// From the change to the first look, and from one to the next.
pub(super) const FIRST: Duration = Duration::from_millis(250);
pub(super) const PAUSE: Duration = Duration::from_millis(500);
/// Looks follow each other fast for so long.
const LASTS: Duration = Duration::from_millis(2800);
/// And not again within so long.
pub(super) const REST: Duration = Duration::from_secs(5);

/// When the last change was that brought looks, by GPU.
#[derive(Debug, Default)]
pub(super) struct Soon(BTreeMap<GpuUuid, Instant>);

impl Soon {
    /// More or fewer work on these GPUs: whether a look is to come in [`FIRST`]. Not where one comes soon in any case, which
    /// is put off for nobody.
    pub(super) fn begin(&mut self, moved: Vec<Moved>, now: Instant) -> bool {
        let is_any = self.is_any(now);
        let mut has_begun = false;
        for Moved { gpu, is_first } in moved {
            // What changes together is one change.
            let rest = if is_first { PAUSE } else { REST };
            if self.0.get(&gpu).is_none_or(|since| now.duration_since(*since) >= rest) {
                self.0.insert(gpu, now);
                has_begun = true;
            }
        }
        self.0.retain(|_, since| now.duration_since(*since) < REST);
        !is_any && has_begun
    }

    /// Shares have come to these GPUs that are not planned yet: whether there are any, for which a look is to come at once.
    pub(super) fn comes(&mut self, gpus: impl Iterator<Item = GpuUuid>, now: Instant) -> bool {
        let mut is_any = false;
        for gpu in gpus {
            self.0.insert(gpu, now);
            is_any = true;
        }
        is_any
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
    /// What one change brings.
    const FEW: [u64; 6] = [250, 750, 1250, 1750, 2250, 2750];

    fn moved(gpu: GpuUuid) -> Vec<Moved> {
        vec![Moved { gpu, is_first: false }]
    }

    /// The looks that changes so many milliseconds after the first bring, and those who begin for the first time, in
    /// milliseconds.
    fn looks(changes: &[u64], firsts: &[u64], until: u64) -> Vec<u64> {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let (mut soon, mut next, mut looks) = (Soon::default(), None, Vec::new());
        for ms in 0..until {
            let is_first = firsts.contains(&ms);
            if (is_first || changes.contains(&ms)) && soon.begin(vec![Moved { gpu: GPU, is_first }], at(ms)) {
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
    fn a_share_that_comes_brings_looks_though_there_were_some() {
        let (mut soon, now) = (Soon::default(), Instant::now());
        assert!(!soon.comes(std::iter::empty(), now) && !soon.has(&GPU, now));
        for at in [now, now + LASTS - PAUSE] {
            assert!(soon.comes([GPU].into_iter(), at));
            assert!(soon.has(&GPU, at + LASTS - PAUSE) && soon.is_any(at) && !soon.has(&OTHER, at));
        }
    }

    #[test]
    fn a_look_is_not_put_off_for_another_gpu() {
        let (mut soon, now) = (Soon::default(), Instant::now());
        assert!(soon.begin(moved(GPU), now));
        assert!(!soon.begin(moved(OTHER), now + FIRST / 2));
        assert!(soon.has(&OTHER, now + FIRST));
    }

    #[test]
    fn a_change_brings_a_few_looks_and_many_changes_no_more() {
        assert_eq!(looks(&[0], &[], 20_000), FEW);
        assert_eq!(looks(&[0, 100, 600, 4900], &[], 20_000), FEW);
        let all: Vec<u64> = (0..10_000).collect();
        assert_eq!(looks(&all, &[], 10_000).len(), 2 * FEW.len());
    }

    #[test]
    fn who_begins_for_the_first_time_brings_looks_though_there_were_some() {
        let next = FEW.map(|ms| 4000 + ms);
        assert_eq!(looks(&[0, 3900], &[4000, 4100], 20_000), [FEW, next].concat());
        assert_eq!(looks(&[0], &[600], 20_000), [&FEW[..], &[3250]].concat(), "and has them go on");
    }
}
