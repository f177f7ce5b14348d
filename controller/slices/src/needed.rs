//! The counters that a GPU publishes in addition to those of its memory slices.
//!
//! Every counter costs the scheduler memory and time, once per device. A counter is needed only if
//! some set of instances that the other counters admit would exceed it. On an H100 that is
//! `ofa-engines` alone: disjoint placements never exceed the other engines, the multiprocessors or
//! the memory. The search is exact, so the scheduler admits the same sets of instances as with all
//! counters, on any GPU.

use divvy_api::Quantity;
use divvy_model::Placement;
use divvy_model::inventory::MigProfile;
use k8s_openapi::api::resource::v1::Counter;
use std::collections::BTreeMap;

/// A counter and what instances take of it.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) name: String,
    pub(crate) total: u64,
    /// The amount of each profile, in the order of the profiles.
    pub(crate) takes: Vec<u64>,
    pub(crate) unit: Unit,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Unit {
    Count,
    Bytes,
}

impl Limit {
    /// Name and value of the counter for an amount.
    pub(crate) fn counter(&self, amount: u64) -> (String, Counter) {
        let value = match self.unit {
            Unit::Count => Quantity::count(amount),
            Unit::Bytes => Quantity::bytes(amount),
        };
        (self.name.clone(), Counter { value: value.into() })
    }
}

/// Upper limit of search states per memory slice, so that the search takes milliseconds whatever a
/// GPU reports. A counter whose search would exceed it is published, which is always right.
const STATES_MAX: usize = 4096;

/// The limits that are needed, in their order. An earlier one is preferred to a later one that
/// would restrict the same sets.
pub(crate) fn needed(profiles: &[MigProfile], limits: Vec<Limit>) -> Vec<Limit> {
    let placements =
        || profiles.iter().enumerate().flat_map(|(n, one)| one.placements.iter().map(move |at| (n, *at)));
    // Memory slices do not limit instances without any.
    if placements().any(|(_, at)| at.size == 0) {
        return limits;
    }
    let mut instances: BTreeMap<u32, Vec<(usize, Placement)>> = BTreeMap::new();
    for (profile, at) in placements() {
        instances.entry(at.start).or_default().push((profile, at));
    }
    let mut needed: Vec<Limit> = Vec::new();
    for limit in limits {
        if can_exceed(&instances, &limit, &needed) {
            needed.push(limit);
        }
    }
    // A later counter may make an earlier one redundant.
    for index in (0..needed.len()).rev() {
        let limit = needed.remove(index);
        if can_exceed(&instances, &limit, &needed) {
            needed.insert(index, limit);
        }
    }
    needed
}

/// Whether a set of disjoint instances within the `others` takes more than the total of `limit`.
fn can_exceed(instances: &BTreeMap<u32, Vec<(usize, Placement)>>, limit: &Limit, others: &[Limit]) -> bool {
    // The largest amount of the limit that a set takes, for each first free memory slice and each
    // amount taken of the others.
    let mut sets: BTreeMap<u32, BTreeMap<Vec<u64>, u64>> = BTreeMap::new();
    sets.entry(0).or_default().insert(vec![0; others.len()], 0);
    while let Some((free, states)) = sets.pop_first() {
        if states.len() > STATES_MAX {
            return true;
        }
        for (taken, most) in states {
            if most > limit.total {
                return true;
            }
            let mut add = |free, taken, amount: u64| {
                let known = sets.entry(free).or_default().entry(taken).or_insert(amount);
                *known = amount.max(*known);
            };
            // One more slice may stay unused, up to the next placement.
            if let Some((start, _)) = instances.range(free + 1..).next() {
                add(*start, taken.clone(), most);
            }
            for (profile, at) in instances.get(&free).into_iter().flatten() {
                let sum = others
                    .iter()
                    .zip(&taken)
                    .map(|(other, taken)| taken.saturating_add(other.takes[*profile]));
                let sum: Vec<u64> = sum.collect();
                if others.iter().zip(&sum).all(|(other, sum)| *sum <= other.total) {
                    add(at.slices().end, sum, most.saturating_add(limit.takes[*profile]));
                }
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::amounts::Totals;
    use proptest::prelude::*;

    fn names(limits: &[Limit]) -> Vec<&str> {
        limits.iter().map(|limit| limit.name.as_str()).collect()
    }

    /// Visits all sets of disjoint instances at or after a slice, as indexes of their profiles.
    fn each_set(profiles: &[MigProfile], free: u32, set: &mut Vec<usize>, visit: &mut impl FnMut(&[usize])) {
        visit(set);
        for (index, profile) in profiles.iter().enumerate() {
            for at in profile.placements.iter().filter(|at| at.start >= free) {
                set.push(index);
                each_set(profiles, at.slices().end, set, visit);
                set.pop();
            }
        }
    }

    fn admits(limits: &[Limit], set: &[usize]) -> bool {
        limits.iter().all(|limit| set.iter().map(|index| limit.takes[*index]).sum::<u64>() <= limit.total)
    }

    /// Requires that the needed limits admit the same sets as all limits, and that none can be left out.
    fn check(profiles: &[MigProfile]) -> Vec<Limit> {
        let all = Totals::of(profiles).limits(profiles);
        let needed = needed(profiles, all.clone());
        let mut used = vec![false; needed.len()];
        each_set(profiles, 0, &mut Vec::new(), &mut |set| {
            assert_eq!(admits(&needed, set), admits(&all, set), "{set:?}");
            for (index, used) in used.iter_mut().enumerate().filter(|(_, used)| !**used) {
                let mut others = needed.clone();
                others.remove(index);
                *used = admits(&others, set) && !admits(&needed, set);
            }
        });
        assert!(used.iter().all(|used| *used), "{:?}: {used:?}", names(&needed));
        needed
    }

    #[test]
    fn catalogue_admits_the_same_instances_as_with_all_counters() {
        let needed = |key: &str| {
            let model = divvy_catalogue::find(key).expect("model");
            names(&check(&divvy_catalogue::node::profiles(model.row()))).join(" ")
        };
        for model in divvy_catalogue::all() {
            check(&divvy_catalogue::node::profiles(model.row()));
        }
        assert_eq!(needed("H100-SXM5-80GB"), "ofa-engines");
        assert_eq!(needed("A100-SXM4-40GB"), "ofa-engines");
    }

    fn profile(id: u32) -> impl Strategy<Value = MigProfile> {
        let placements = prop::collection::vec((0u32..6, 1u32..4), 0..4);
        ([0u32..4, 0..3, 0..3, 0..2], placements).prop_map(
            move |([processors, copy, decoders, ofa], places)| MigProfile {
                id,
                index: id,
                name: format!("{id}"),
                memory_mib: u64::from(processors) << 10,
                multiprocessors: processors,
                copy_engines: copy,
                decoders,
                encoders: 0,
                jpeg_engines: ofa,
                ofa_engines: ofa,
                max_instances: 1 + copy,
                placements: places.into_iter().map(|(start, size)| Placement { start, size }).collect(),
            },
        )
    }

    proptest! {
        #[test]
        fn needed_counters_admit_the_same_sets_as_all(profiles in (profile(0), profile(1), profile(2))) {
            check(&[profiles.0, profiles.1, profiles.2]);
        }
    }
}
