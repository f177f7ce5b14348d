//! The allocation order of MIG instances.
//!
//! The scheduler takes the first published device that fits: slices by name, then devices in the
//! order of the slice. This fixed order is the only control over packing, so it must suit every
//! sequence of claims.

use divvy_model::inventory::MigProfile;
use divvy_model::placement::Placement;
use std::cmp::Reverse;

/// Sorts profiles by size, and those without media engines before those with. A claim for "at
/// least 10 GB" then gets the smallest instance that fits.
pub(crate) fn profiles(profiles: &[MigProfile]) -> Vec<&MigProfile> {
    let mut sorted: Vec<&MigProfile> = profiles.iter().collect();
    sorted.sort_by_key(|profile| {
        let size = profile.placements.iter().map(|at| at.size).max();
        let media = profile.decoders
            + profile.encoders
            + profile.jpeg_engines
            + profile.ofa_engines
            + profile.copy_engines;
        (size, profile.memory_mib, profile.multiprocessors, media, profile.id)
    });
    sorted
}

/// Sorts the placements of a profile so that each one blocks the fewest placements that are still
/// free. Placements of larger profiles count first, and ties go to the higher start.
///
/// On 8-slice GPUs `1g` gets 6, 5, 4, 3, 2, 1, 0: after three instances a `4g` still fits, while
/// the order 0, 1, 2 blocks it with the first. No fixed order is optimal for every count: for
/// exactly four instances, 0, 1, 2, 3 would keep a `3g` free. All profiles fill the same end, so
/// mixed claims pack too.
pub(crate) fn placements(profile: &MigProfile, all: &[MigProfile]) -> Vec<Placement> {
    // All placements that can be blocked, largest first. A place where two profiles fit counts twice.
    let smallest = profile.placements.iter().map(|at| at.size).min().unwrap_or(0);
    let mut possible: Vec<Placement> = all
        .iter()
        .flat_map(|profile| profile.placements.iter().copied())
        .filter(|at| at.size >= smallest)
        .collect();
    possible.sort_by_key(|at| Reverse(at.size));
    let mut left = profile.placements.clone();
    let mut ordered = Vec::with_capacity(left.len());
    while let Some((index, next)) = left
        .iter()
        .copied()
        .enumerate()
        .min_by(|(_, a), (_, b)| compare(*a, *b, &possible).then(b.start.cmp(&a.start)))
    {
        left.remove(index);
        possible.retain(|at| !at.overlaps(next));
        ordered.push(next);
    }
    ordered
}

/// Compares by blocked placements; fewer is less. `possible` is sorted by size, largest first.
fn compare(a: Placement, b: Placement, possible: &[Placement]) -> std::cmp::Ordering {
    for size in possible.chunk_by(|x, y| x.size == y.size) {
        let damage = |to: Placement| size.iter().filter(|at| **at != to && at.overlaps(to)).count();
        let order = damage(a).cmp(&damage(b));
        if order.is_ne() {
            return order;
        }
    }
    std::cmp::Ordering::Equal
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest size with a free placement, and the number of those placements.
    fn left(all: &[MigProfile], taken: &[Placement]) -> (u32, usize) {
        let free = |at: &Placement| !taken.iter().any(|other| other.overlaps(*at));
        let possible: Vec<Placement> =
            all.iter().flat_map(|profile| profile.placements.iter().copied()).filter(free).collect();
        let largest = possible.iter().map(|at| at.size).max().unwrap_or(0);
        (largest, possible.iter().filter(|at| at.size == largest).count())
    }

    #[test]
    fn order_keeps_the_most_placements_of_the_largest_size() {
        for model in divvy_catalogue::all().map(divvy_catalogue::Model::row) {
            let all = divvy_catalogue::node::profiles(model);
            for profile in &all {
                let order = placements(profile, &all);
                assert_eq!(order.len(), profile.placements.len());
                let mut taken: Vec<Placement> = Vec::new();
                for at in order {
                    let with = |next: Placement| left(&all, &[taken.as_slice(), &[next]].concat());
                    let disjoint = |next: &&Placement| !taken.iter().any(|other| other.overlaps(**next));
                    if !disjoint(&&at) {
                        continue;
                    }
                    let best = profile.placements.iter().filter(disjoint).map(|next| with(*next)).max();
                    assert_eq!(
                        Some(with(at)),
                        best,
                        "{} {} at {at} after {taken:?}",
                        model.key,
                        profile.name
                    );
                    taken.push(at);
                }
            }
        }
    }

    fn check(model: &str, id: u32, starts: &[u32]) {
        let all = divvy_catalogue::node::profiles(divvy_catalogue::find(model).unwrap().row());
        let profile = all.iter().find(|profile| profile.id == id).unwrap();
        let order: Vec<u32> = placements(profile, &all).iter().map(|at| at.start).collect();
        assert_eq!(order, starts, "{model} {}", profile.name);
    }

    #[test]
    fn small_instances_leave_room_for_the_largest_placement() {
        check("H100-SXM5-80GB", 19, &[6, 5, 4, 3, 2, 1, 0]);
        check("H100-SXM5-80GB", 15, &[6, 4, 2, 0]);
        check("H100-SXM5-80GB", 14, &[4, 2, 0]);
        check("H100-SXM5-80GB", 9, &[4, 0]);
        check("A30-24GB", 14, &[3, 2, 1, 0]);
        check("RTX-PRO-6000", 14, &[9, 6, 3, 0]);
    }
}
