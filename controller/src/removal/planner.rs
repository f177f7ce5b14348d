//! Decides which closings may be removed, and which claims are on removed devices. Pure: the time is
//! an argument, as the time since any fixed moment.

use divvy_model::closing::{Allocated, ClosingId, GpuMode, ModeSet, Removals};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Name of a Node, and of its pool.
pub type NodeName = Arc<str>;

/// Claims on removed devices that are named per node, to bound the size of the annotation: a claim is
/// 70 to 400 bytes. One is rare already, and those beyond are still refused by the node's records.
const ALLOCATED_MAX: usize = 64;

/// The closings of all nodes, as the leader has observed them.
#[derive(Debug)]
pub struct Planner {
    /// Time without an allocation before a removal.
    delay: Duration,
    closings: BTreeMap<NodeName, BTreeMap<GpuMode, Tracked>>,
}

#[derive(Clone, Copy, Debug)]
struct Tracked {
    id: ClosingId,
    /// Since when it is known and not allocated; `None` while it is allocated.
    quiet_since: Option<Duration>,
    is_approved: bool,
}

/// A claim that keeps a closing mode published.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Blocked {
    pub id: ClosingId,
    pub by: Allocated,
}

impl Planner {
    pub fn new(delay: Duration) -> Self {
        Self { delay, closings: BTreeMap::new() }
    }

    /// Updates the closings of a node from its modes that are off and its allocations.
    pub fn observe(
        &mut self,
        now: Duration,
        node: &NodeName,
        off: &ModeSet,
        allocated: &BTreeSet<Allocated>,
    ) {
        let mut closings = self.closings.remove(node).unwrap_or_default();
        let current = off.closings();
        closings.retain(|of, tracked| current.get(of) == Some(&tracked.id));
        for (of, id) in current {
            let new = Tracked { id, quiet_since: Some(now), is_approved: false };
            let tracked = closings.entry(of).or_insert(new);
            if is_allocated(allocated, of) {
                (tracked.quiet_since, tracked.is_approved) = (None, false);
            } else {
                tracked.quiet_since.get_or_insert(now);
            }
        }
        if !closings.is_empty() {
            self.closings.insert(node.clone(), closings);
        }
    }

    /// Forgets a node.
    pub fn forget(&mut self, node: &NodeName) {
        self.closings.remove(node);
    }

    /// When the next removal is due; `None` if none is waiting.
    pub fn next_due(&self) -> Option<Duration> {
        let all = self.closings.values().flat_map(BTreeMap::values);
        all.filter(|tracked| !tracked.is_approved)
            .filter_map(|tracked| Some(tracked.quiet_since? + self.delay))
            .min()
    }

    /// Approves what is due. `confirmed` are the allocations of a node as the API server has them now,
    /// which the watch may not have reported. Returns the nodes that changed.
    pub fn approve<'a>(
        &mut self,
        now: Duration,
        confirmed: impl Fn(&NodeName) -> &'a BTreeSet<Allocated>,
    ) -> BTreeSet<NodeName> {
        let mut changed = BTreeSet::new();
        for (node, closings) in &mut self.closings {
            for (of, tracked) in closings {
                let is_due = tracked.quiet_since.is_some_and(|since| now >= since + self.delay);
                if tracked.is_approved || !is_due {
                    continue;
                }
                if is_allocated(confirmed(node), *of) {
                    tracked.quiet_since = Some(now);
                } else {
                    tracked.is_approved = true;
                    changed.insert(node.clone());
                }
            }
        }
        changed
    }

    /// The approved closings of a node.
    pub fn removable(&self, node: &NodeName) -> ModeSet {
        let approved =
            self.closings.get(node).into_iter().flatten().filter(|(_, tracked)| tracked.is_approved);
        approved.map(|(of, tracked)| (*of, Some(tracked.id))).collect()
    }

    /// The number of closings that wait for the time, that claims hold, and that are approved.
    pub fn counts(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for tracked in self.closings.values().flat_map(BTreeMap::values) {
            let state = match (tracked.is_approved, tracked.quiet_since) {
                (true, _) => 2,
                (false, None) => 1,
                (false, Some(_)) => 0,
            };
            counts[state] += 1;
        }
        counts
    }

    /// The closings of a node that claims hold, with one claim each.
    pub fn blocked(&self, node: &NodeName, allocated: &BTreeSet<Allocated>) -> Vec<Blocked> {
        let closings = self.closings.get(node).into_iter().flatten();
        let blocked = closings.filter_map(|(of, tracked)| {
            let by = allocated.iter().find(|one| one.gpu_mode() == Some(*of))?;
            Some(Blocked { id: tracked.id, by: by.clone() })
        });
        blocked.collect()
    }
}

fn is_allocated(allocated: &BTreeSet<Allocated>, of: GpuMode) -> bool {
    allocated.iter().any(|one| one.gpu_mode() == Some(of))
}

/// The annotations of a Node after its claims or modes changed; `before` are the current ones.
///
/// A claim that was allocated while its device was removed is named until it ends or its mode is on
/// again, because another claim may have got an overlapping device meanwhile.
pub fn removals(
    removable: ModeSet,
    off: &ModeSet,
    allocated: &BTreeSet<Allocated>,
    before: &Removals,
) -> Removals {
    let is_removed = |one: &Allocated| match one.gpu_mode().and_then(|of| off.0.get(&of)) {
        Some(None) => true,
        Some(Some(_)) => before.allocated.contains(one),
        None => false,
    };
    let allocated = allocated.iter().filter(|one| is_removed(one)).take(ALLOCATED_MAX);
    Removals { removable, allocated: allocated.cloned().collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_api::ClaimRef;

    const DELAY: Duration = Duration::from_secs(600);

    fn allocated(all: &[(&str, &str)]) -> BTreeSet<Allocated> {
        let one = |(device, claim): &(&str, &str)| {
            let (namespace, name) = ("ns".to_owned(), (*claim).to_owned());
            let claim = ClaimRef { namespace, name, uid: (*claim).into() };
            Allocated { device: (*device).into(), claim }
        };
        all.iter().map(one).collect()
    }

    struct Leader {
        planner: Planner,
        node: NodeName,
    }

    impl Leader {
        fn new() -> Self {
            Self { planner: Planner::new(DELAY), node: "n1".into() }
        }

        /// The approved closings at this second, if the server has the same allocations as the watch.
        fn at(&mut self, seconds: u64, off: &str, claims: &[(&str, &str)]) -> String {
            let (now, claims) = (Duration::from_secs(seconds), allocated(claims));
            self.planner.observe(now, &self.node, &ModeSet::parse(off), &claims);
            self.planner.approve(now, |_| &claims);
            self.planner.removable(&self.node).to_string()
        }
    }

    #[test]
    fn closing_is_approved_after_the_delay_without_an_allocation() {
        let mut leader = Leader::new();
        assert_eq!(leader.at(100, "mps@7:0", &[]), "");
        assert_eq!(leader.planner.next_due(), Some(Duration::from_secs(700)));
        assert_eq!(leader.at(699, "mps@7:0", &[("gpu-0", "other mode"), ("gpu-1-mps", "other GPU")]), "");
        assert_eq!(leader.at(700, "mps@7:0", &[]), "mps@7:0");
        assert_eq!(leader.planner.next_due(), None);
        assert_eq!(leader.at(701, "mps:0", &[]), "", "the devices are removed");
    }

    #[test]
    fn allocation_restarts_the_delay_and_withdraws_the_approval() {
        let mut leader = Leader::new();
        leader.at(0, "mps@7:0", &[]);
        assert_eq!(leader.at(599, "mps@7:0", &[("gpu-0-mps", "c")]), "");
        assert_eq!(leader.planner.next_due(), None);
        assert_eq!(leader.at(5000, "mps@7:0", &[("gpu-0-mps", "c")]), "");
        assert_eq!(leader.at(5001, "mps@7:0", &[]), "");
        assert_eq!(leader.at(5600, "mps@7:0", &[]), "");
        assert_eq!(leader.at(5601, "mps@7:0", &[]), "mps@7:0");
        assert_eq!(leader.at(5602, "mps@7:0", &[("gpu-0-mps", "c")]), "");
    }

    #[test]
    fn new_closing_starts_the_delay_again() {
        let mut leader = Leader::new();
        leader.at(0, "mps@7:0", &[]);
        assert_eq!(leader.at(600, "mps@8:0", &[]), "");
        assert_eq!(leader.at(1199, "mps@8:0", &[]), "");
        assert_eq!(leader.at(1200, "mps@8:0", &[]), "mps@8:0");
        leader.planner.forget(&"n1".into());
        assert_eq!(leader.at(1201, "mps@8:0", &[]), "");
    }

    #[test]
    fn allocation_that_the_watch_has_not_reported_counts() {
        let mut planner = Planner::new(DELAY);
        let (node, off) = (NodeName::from("n1"), ModeSet::parse("mps@7:0,1"));
        planner.observe(Duration::ZERO, &node, &off, &allocated(&[]));
        let (now, unseen) = (DELAY, allocated(&[("gpu-0-mps", "c")]));
        assert_eq!(planner.approve(now, |_| &unseen), [node.clone()].into());
        assert_eq!(planner.removable(&node).to_string(), "mps@7:1");
        assert_eq!(planner.next_due(), Some(DELAY * 2));
        assert_eq!(planner.counts(), [1, 0, 1]);
    }

    #[test]
    fn claim_on_a_removed_device_is_named_until_it_ends() {
        let claims = allocated(&[("gpu-0", "a"), ("gpu-0-mps", "b"), ("gpu-1-mps", "c")]);
        let named = |off: &str, claims: &BTreeSet<Allocated>, before: &Removals| {
            removals(ModeSet::default(), &ModeSet::parse(off), claims, before)
        };
        let nothing = Removals::default();
        assert!(named("mps@7:0,1", &claims, &nothing).is_empty(), "a closing mode is still charged");
        let found = named("mps@7:0 mps:1", &claims, &nothing);
        assert_eq!(found.allocated, allocated(&[("gpu-1-mps", "c")]).into_iter().collect::<Vec<_>>());
        assert_eq!(named("mps@7:0 mps@8:1", &claims, &found), found, "it is published again");
        assert!(named("mps@7:0", &claims, &found).is_empty(), "the mode is on again");
        assert!(named("mps@7:0 mps@8:1", &allocated(&[("gpu-0", "a")]), &found).is_empty(), "it ended");
    }
}
