//! In which order the devices of a GPU are published.
//!
//! The scheduler takes the first device that fits, in the order published:
//! slices by name, then devices as they stand. That order is all the packing
//! there is, and it is fixed before anyone asks, so it must be good for every
//! sequence of claims:
//!
//! - **Within a profile**, by damage. Each next placement is the one that ends
//!   the fewest placements still possible, those of larger profiles counting
//!   before those of smaller ones; equals go to the higher start. On the
//!   8-slice GPUs that gives 6, 5, 4, 3, 2, 1, 0 for `1g`: three instances later
//!   a `4g` still fits, where the plain order 0, 1, 2 loses it to the first. (No
//!   fixed order is best for every number of instances: for exactly four of
//!   them 0, 1, 2, 3 would keep a `3g`.) All profiles press to the same end, so
//!   mixed claims pack too.
//! - **Between profiles**, small before large, and without media engines before
//!   with: a claim that asks for "at least 10 GB" gets the least that will do.
//! - **Whole GPUs** stand in slices of their own, behind all instances, the last
//!   GPU first. Instances fill the node from its first GPU, whole GPUs from its
//!   last; the two meet in the middle as late as possible. With each whole GPU
//!   beside its instances both would press to GPU 0, and every whole GPU given
//!   back would be the next to be cut although another is cut already. The
//!   price: a taint on one GPU touches two slices and so costs a new generation
//!   of the pool. GPUs fail seldom, and are asked for all day.
//! - **GPUs for several claims** stand behind all whole ones, the last GPU first
//!   too. A claim that leaves the type open gets a GPU of its own as long as there
//!   is one; shares of one type go to the same GPU until it is full, because its
//!   device is always the first to be tried.

use divvy_model::inventory::MigProfile;
use divvy_model::placement::Placement;
use std::cmp::Reverse;

/// The profiles, small before large.
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

/// The placements of a profile, least damage first.
pub(crate) fn placements(profile: &MigProfile, all: &[MigProfile]) -> Vec<Placement> {
    // What can be damaged, largest first: every placement of every profile, so
    // that a place where two profiles fit counts twice.
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

/// Less damage is less; `possible` is sorted by size, largest first.
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

    /// The largest size of which a placement is still free, and how many of it are.
    fn left(all: &[MigProfile], taken: &[Placement]) -> (u32, usize) {
        let free = |at: &Placement| !taken.iter().any(|other| other.overlaps(*at));
        let possible: Vec<Placement> =
            all.iter().flat_map(|profile| profile.placements.iter().copied()).filter(free).collect();
        let largest = possible.iter().map(|at| at.size).max().unwrap_or(0);
        (largest, possible.iter().filter(|at| at.size == largest).count())
    }

    #[test]
    fn no_other_next_placement_would_keep_more_of_the_largest_size() {
        for model in divvy_sim::catalogue::all().map(divvy_sim::catalogue::Model::row) {
            let all = crate::tests::profiles(model);
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
        let all = crate::tests::profiles(divvy_sim::catalogue::find(model).unwrap().row());
        let profile = all.iter().find(|profile| profile.id == id).unwrap();
        let order: Vec<u32> = placements(profile, &all).iter().map(|at| at.start).collect();
        assert_eq!(order, starts, "{model} {}", profile.name);
    }

    #[test]
    fn small_instances_press_to_the_end_that_the_largest_placement_does_not_need() {
        check("H100-SXM5-80GB", 19, &[6, 5, 4, 3, 2, 1, 0]);
        check("H100-SXM5-80GB", 15, &[6, 4, 2, 0]);
        check("H100-SXM5-80GB", 14, &[4, 2, 0]);
        check("H100-SXM5-80GB", 9, &[4, 0]);
        check("A30-24GB", 14, &[3, 2, 1, 0]);
        check("RTX-PRO-6000", 14, &[9, 6, 3, 0]);
    }
}
