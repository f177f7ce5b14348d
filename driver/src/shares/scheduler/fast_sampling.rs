//! Triggers extra snapshots when shares start or stop working.
//!
//! Kernel times depend on which shares are active, so a change needs new correction factors
//! ([`super::controller`]), one step per snapshot. With one snapshot a second this would take
//! seconds. So snapshots follow faster for a while. They only correct rates; the interval between
//! checks of findings stays.

use divvy_pages::GpuUuid;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// From the change to the first look, and from one to the next.
pub(crate) const FIRST: Duration = Duration::from_millis(250);
pub(crate) const PAUSE: Duration = Duration::from_millis(500);
/// Fast snapshots continue for this time.
const LASTS: Duration = Duration::from_millis(2800);
/// Minimum time until the next series of fast snapshots.
pub(crate) const REST: Duration = Duration::from_secs(5);

/// Other shares of a GPU work than did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ActivityChange {
    pub(crate) gpu: GpuUuid,
    /// One of them for the first time.
    pub(crate) is_first: bool,
}

/// The last change of each GPU that triggered snapshots.
///
/// - The first snapshot follows when NVML's samples, six a second, show only the present shares.
///
/// - A share that is active for less than a second triggers none. Longer ones trigger at most these
///   few in each [`REST`].
///
/// - A share that is active for the first time always triggers them, because least is known of it.
///
/// - A new share on a GPU with others triggers a snapshot at once. Until then its launches are not paced.
#[derive(Debug, Default)]
pub(crate) struct FastSampling(BTreeMap<GpuUuid, Instant>);

impl FastSampling {
    /// Shares on these GPUs started or stopped. Returns whether a snapshot is due in [`FIRST`]; not
    /// if one is due soon anyway, which is never postponed.
    pub(crate) fn begin(&mut self, moved: Vec<ActivityChange>, now: Instant) -> bool {
        let is_any = self.is_any(now);
        let mut has_begun = false;
        for ActivityChange { gpu, is_first } in moved {
            // Simultaneous changes are one change.
            let rest = if is_first { PAUSE } else { REST };
            if self.0.get(&gpu).is_none_or(|since| now.duration_since(*since) >= rest) {
                self.0.insert(gpu, now);
                has_begun = true;
            }
        }
        self.0.retain(|_, since| now.duration_since(*since) < REST);
        !is_any && has_begun
    }

    /// Shares have come to these GPUs that are not planned yet: whether there are any, for which a
    /// look is to come at once.
    pub(crate) fn comes(&mut self, gpus: impl Iterator<Item = GpuUuid>, now: Instant) -> bool {
        let mut is_any = false;
        for gpu in gpus {
            self.0.insert(gpu, now);
            is_any = true;
        }
        is_any
    }

    /// Whether this GPU is looked at though its audit is not due.
    pub(crate) fn has(&self, gpu: &GpuUuid, now: Instant) -> bool {
        self.0.get(gpu).is_some_and(|since| now.duration_since(*since) < LASTS)
    }

    /// Whether another look is to follow soon.
    pub(crate) fn is_any(&self, now: Instant) -> bool {
        self.0.values().any(|since| now.duration_since(*since) + PAUSE < LASTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: GpuUuid = GpuUuid([1; 16]);
    const OTHER: GpuUuid = GpuUuid([2; 16]);
    /// The snapshots after one change.
    const FEW: [u64; 6] = [250, 750, 1250, 1750, 2250, 2750];

    fn moved(gpu: GpuUuid) -> Vec<ActivityChange> {
        vec![ActivityChange { gpu, is_first: false }]
    }

    /// The snapshots after changes at these milliseconds, and after shares that begin for the first
    /// time, in milliseconds.
    fn looks(changes: &[u64], firsts: &[u64], until: u64) -> Vec<u64> {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let (mut soon, mut next, mut looks) = (FastSampling::default(), None, Vec::new());
        for ms in 0..until {
            let is_first = firsts.contains(&ms);
            if (is_first || changes.contains(&ms))
                && soon.begin(vec![ActivityChange { gpu: GPU, is_first }], at(ms))
            {
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
    fn new_share_triggers_snapshots_despite_recent_ones() {
        let (mut soon, now) = (FastSampling::default(), Instant::now());
        assert!(!soon.comes(std::iter::empty(), now) && !soon.has(&GPU, now));
        for at in [now, now + LASTS - PAUSE] {
            assert!(soon.comes([GPU].into_iter(), at));
            assert!(soon.has(&GPU, at + LASTS - PAUSE) && soon.is_any(at) && !soon.has(&OTHER, at));
        }
    }

    #[test]
    fn snapshot_is_not_delayed_for_another_gpu() {
        let (mut soon, now) = (FastSampling::default(), Instant::now());
        assert!(soon.begin(moved(GPU), now));
        assert!(!soon.begin(moved(OTHER), now + FIRST / 2));
        assert!(soon.has(&OTHER, now + FIRST));
    }

    #[test]
    fn many_changes_trigger_no_more_snapshots_than_one() {
        assert_eq!(looks(&[0], &[], 20_000), FEW);
        assert_eq!(looks(&[0, 100, 600, 4900], &[], 20_000), FEW);
        let all: Vec<u64> = (0..10_000).collect();
        assert_eq!(looks(&all, &[], 10_000).len(), 2 * FEW.len());
    }

    #[test]
    fn first_activity_triggers_snapshots() {
        let next = FEW.map(|ms| 4000 + ms);
        assert_eq!(looks(&[0, 3900], &[4000, 4100], 20_000), [FEW, next].concat());
        assert_eq!(looks(&[0], &[600], 20_000), [&FEW[..], &[3250]].concat(), "and has them go on");
    }
}
