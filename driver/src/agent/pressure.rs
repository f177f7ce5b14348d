//! What is to be done where shares hold more memory than their GPU has: pure, from one look after the other.
//!
//! A share that over-commits holds what does not fit as managed memory, which the GPU driver moves to the device when
//! it is used and away when others need the room. As long as those who work fit together nobody notices. Where they do not,
//! each pushes the others' memory out and waits for its own, launch by launch, and nothing gets done.
//!
//! **Thrashing** is seen by how long launches take against the fastest of their kernel, which libraries tell: more than
//! [`SLOW`] times as long for [`LONG`], by all that was measured in that time, while all that is held is more than the GPU has.
//! (A kernel whose every launch had to wait has no faster one to be held against: who has thrashed since it began is not
//! seen, until one of its launches goes without.) Kernels of several tenants that share its time are slower too, but no more than there are tenants. Then the
//! shares that hold managed memory take turns, of ten times what it takes to bring back what the others have pushed
//! out, until they fit or only one of them works. A tenant that lies about this can have a GPU that is held by more
//! than it has go by turns, in which it has no more than before.
//!
//! **Pools** that keep what they do not use are asked to give it back where that is missing: where a share was
//! refused memory that cannot move, or little of the GPU is left. Asked are those that do not work, and whoever
//! was refused itself. It costs a share the growth of its pools when it goes on.

use super::bell::Key;
use std::collections::BTreeMap;

const SECOND: u64 = 1_000_000_000;
/// Launches take so many times as long.
const SLOW: u64 = 5;
/// For so long, in nanoseconds.
const LONG: u64 = 2 * SECOND;
/// A turn is so many times what the change to it costs.
const TIMES: u64 = 10;
/// The bounds of a turn, in nanoseconds.
const QUANTUM: (u64, u64) = (SECOND / 2, 30 * SECOND);
/// Who does nothing for so long rests, in nanoseconds.
const RESTS: u64 = SECOND / 4;
/// Bytes a second at which memory comes back, before it was measured: a page of 2 MiB by a fault and over a bus of 12 GB/s.
const COMES: u64 = 10_000_000_000;
/// Nobody is asked more often while little is left, in nanoseconds.
const ASKED: u64 = 10 * SECOND;
/// Little is left of a GPU.
const PER_CENT: u64 = 5;

/// What a share says at this moment; its processes write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) key: Key,
    /// What a class wants a turn to be at least, in nanoseconds.
    pub(super) slice: u64,
    /// Bytes, in all and what of it is managed memory.
    pub(super) used: u64,
    pub(super) managed: u64,
    /// Since its processes began, in nanoseconds: what measured launches took, and at the fastest.
    pub(super) took: u64,
    pub(super) least: u64,
    /// Grows while it works.
    pub(super) works: u64,
    /// How often it was refused memory.
    pub(super) refused: u64,
}

/// What is remembered of a GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    shares: BTreeMap<Key, Known>,
    turns: Option<Turns>,
    asked: Option<u64>,
}

impl Memory {
    /// Shares take turns.
    pub(super) fn has_turns(&self) -> bool {
        self.turns.is_some()
    }
}

#[derive(Clone, Debug)]
struct Known {
    said: Said,
    /// When it was last seen to work.
    worked: u64,
    /// Since when launches are slow, and what they took and would have taken since.
    slow: Option<(u64, u64, u64)>,
    /// What it waited for memory since it last began to.
    waited: u64,
}

#[derive(Clone, Debug)]
struct Turns {
    since: u64,
    /// What it costs to change, in nanoseconds.
    swap: u64,
}

/// What is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Decided {
    /// Who takes turns, and of how many nanoseconds; nobody: all work side by side.
    pub(super) turns: Vec<Key>,
    pub(super) quantum: u64,
    /// Who is asked to give back what its pools keep for nothing.
    pub(super) trims: Vec<Key>,
}

/// After a look at the shares of a GPU with so many bytes; times are of the monotonic clock.
pub(super) fn decide(physical: u64, all: &[Said], memory: Memory, now: u64) -> (Decided, Memory) {
    let Memory { shares: mut before, turns, asked } = memory;
    let mut shares = BTreeMap::new();
    let (mut refused, mut idle) = (Vec::new(), Vec::new());
    for said in all {
        let known = before.remove(&said.key);
        if known.as_ref().is_some_and(|known| said.refused > known.said.refused) {
            refused.push(said.key.clone());
        }
        let known = Known::after(known, said, now);
        if now.saturating_sub(known.worked) >= SECOND {
            idle.push(said.key.clone());
        }
        shares.insert(said.key.clone(), known);
    }
    let turns = take_turns(physical, all, &mut shares, turns, now);
    let mut decided = Decided::default();
    if let Some(turns) = &turns {
        let slice = all.iter().map(|said| said.slice).max().unwrap_or(0);
        decided.turns = managing(all).map(|said| said.key.clone()).collect();
        decided.quantum = turns.swap.saturating_mul(TIMES).max(slice).clamp(QUANTUM.0, QUANTUM.1);
    }
    let stays = all.iter().map(|said| said.used.saturating_sub(said.managed)).fold(0, u64::saturating_add);
    let is_little = stays > physical - physical / 100 * PER_CENT;
    let is_time = asked.is_none_or(|asked| now.saturating_sub(asked) >= ASKED);
    let is_asked = !refused.is_empty() || is_little && is_time;
    if is_asked {
        idle.retain(|key| !refused.contains(key));
        decided.trims = refused.into_iter().chain(idle).collect();
    }
    let asked = if is_asked { Some(now) } else { asked };
    (decided, Memory { shares, turns, asked })
}

fn managing(all: &[Said]) -> impl Iterator<Item = &Said> {
    all.iter().filter(|said| said.managed > 0)
}

/// Whether those who hold managed memory take turns from now on.
fn take_turns(
    physical: u64,
    all: &[Said],
    shares: &mut BTreeMap<Key, Known>,
    turns: Option<Turns>,
    now: u64,
) -> Option<Turns> {
    let used = all.iter().map(|said| said.used).fold(0, u64::saturating_add);
    let over = used.saturating_sub(physical);
    let count = managing(all).count() as u64;
    if over == 0 || count < 2 {
        return None;
    }
    let measured = shares.values_mut().filter_map(|known| known.waited_for(now)).max();
    match turns {
        None => {
            let is_slow = |known: &Known| known.is_slow(now);
            let swap = (u128::from(over) * u128::from(SECOND) / u128::from(COMES)) as u64;
            let turns = shares.values().any(is_slow).then_some(Turns { since: now, swap });
            if turns.is_some() {
                shares.values_mut().for_each(|known| known.waited = 0);
            }
            turns
        }
        Some(turns) => {
            // What was waited since turns began: of launches that came after others' turns.
            let swap = measured.map_or(turns.swap, |measured| u64::midpoint(turns.swap, measured));
            // Everybody has had a turn, and only one of them had anything to do.
            let round = swap.saturating_mul(TIMES).clamp(QUANTUM.0, QUANTUM.1).saturating_mul(count + 1);
            let works = |known: &&Known| known.said.managed > 0 && now.saturating_sub(known.worked) <= round;
            let is_over =
                now.saturating_sub(turns.since) > round && shares.values().filter(works).count() < 2;
            (!is_over).then_some(Turns { swap, ..turns })
        }
    }
}

impl Known {
    fn after(before: Option<Self>, said: &Said, now: u64) -> Self {
        let Some(before) = before else {
            return Self { said: said.clone(), worked: now, slow: None, waited: 0 };
        };
        // A process that has ended takes its sums along.
        let (took, least) =
            match (said.took.checked_sub(before.said.took), said.least.checked_sub(before.said.least)) {
                (Some(took), Some(least)) => (took, least),
                _ => (0, 0),
            };
        let worked = if said.works == before.said.works { before.worked } else { now };
        let slow = match before.slow {
            _ if took == 0 => before.slow,
            // It has been slow for as long as that took.
            None => Some((now.saturating_sub(took.min(LONG)), took, least)),
            Some((since, all, fastest)) => {
                Some((since, all.saturating_add(took), fastest.saturating_add(least)))
            }
        };
        // Who does not work any more thrashes no more.
        let is_fresh = now.saturating_sub(worked) < LONG;
        let slow = slow.filter(|(_, took, least)| is_fresh && *took > least.saturating_mul(SLOW));
        // A little slower than the fastest they always are.
        let waits = if took > least.saturating_mul(2) { took.saturating_sub(least) } else { 0 };
        let waited = before.waited.saturating_add(waits);
        Self { said: said.clone(), worked, slow, waited }
    }

    fn is_slow(&self, now: u64) -> bool {
        self.slow.is_some_and(|(since, ..)| now.saturating_sub(since) >= LONG)
    }

    /// What it waited for memory when it last worked, once it does so no more.
    fn waited_for(&mut self, now: u64) -> Option<u64> {
        let rests = now.saturating_sub(self.worked) >= RESTS;
        (rests && self.waited > 0).then(|| std::mem::take(&mut self.waited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;
    const PHYSICAL: u64 = 10 * GIB;
    /// Between two looks.
    const LOOK: u64 = SECOND / 4;

    fn key(name: &str) -> Key {
        (name.into(), "share".into())
    }

    fn said(name: &str, used: u64, managed: u64) -> Said {
        Said { key: key(name), slice: 0, used, managed, took: 0, least: 0, works: 0, refused: 0 }
    }

    /// Two shares that hold 6 GiB each, of which one is managed.
    fn two() -> [Said; 2] {
        ["a", "b"].map(|name| said(name, 6 * GIB, GIB))
    }

    /// Looks on while each share that works is so many times as slow as it could be, for so long: what was decided,
    /// look by look.
    fn run(all: &mut [Said], slow: &[u64], memory: &mut Memory, from: u64, looks: u64) -> Vec<Decided> {
        let look = |at: u64| {
            for (said, slow) in all.iter_mut().zip(slow).filter(|(_, slow)| **slow > 0) {
                said.took += LOOK / 2;
                said.least += LOOK / 2 / slow;
                said.works += 1;
            }
            let (decided, after) = decide(PHYSICAL, all, std::mem::take(memory), from + at * LOOK);
            *memory = after;
            decided
        };
        (1..=looks).map(look).collect()
    }

    fn is_taken(decided: &[Decided]) -> Vec<bool> {
        decided.iter().map(|decided| !decided.turns.is_empty()).collect()
    }

    #[test]
    fn who_pushes_each_other_out_takes_turns_within_three_seconds() {
        let (mut all, mut memory) = (two(), Memory::default());
        let before = run(&mut all, &[1, 1], &mut memory, 0, 20);
        assert!(!is_taken(&before).contains(&true), "all is well");
        let during = run(&mut all, &[20, 20], &mut memory, 5 * SECOND, 12);
        let first = during.iter().position(|decided| !decided.turns.is_empty()).expect("turns");
        assert!((4..12).contains(&first), "look {first}");
        let last = during.last().expect("looks");
        assert_eq!(last.turns, [key("a"), key("b")]);
        assert!(last.quantum > SECOND && last.quantum < 4 * SECOND, "{}", last.quantum);
    }

    #[test]
    fn nobody_takes_turns_who_fits_or_is_alone_or_a_little_slow() {
        let check = |mut all: Vec<Said>, slow: &[u64]| {
            let decided = run(&mut all, slow, &mut Memory::default(), 0, 40);
            assert!(!is_taken(&decided).contains(&true), "{slow:?}");
        };
        check(two().to_vec(), &[4, 4]);
        check(two().to_vec(), &[0, 0]);
        check(vec![said("a", 4 * GIB, GIB), said("b", 6 * GIB, GIB)], &[20, 20]);
        check(vec![said("a", 6 * GIB, GIB), said("b", 6 * GIB, 0)], &[20, 20]);
        check(vec![said("a", 12 * GIB, 2 * GIB)], &[20]);
    }

    #[test]
    fn turns_end_with_what_they_are_for() {
        let taken = || {
            let (mut all, mut memory) = (two(), Memory::default());
            assert!(is_taken(&run(&mut all, &[20, 20], &mut memory, 0, 20)).contains(&true));
            (all, memory)
        };
        let (mut all, mut memory) = taken();
        all[0].used = 3 * GIB;
        assert_eq!(is_taken(&run(&mut all, &[20, 20], &mut memory, 5 * SECOND, 1)), [false], "they fit");
        let (mut all, mut memory) = taken();
        let alone = is_taken(&run(&mut all, &[1, 0], &mut memory, 5 * SECOND, 200));
        assert!(alone[0] && !alone[199], "one works alone");
        let (mut all, mut memory) = taken();
        assert!(!is_taken(&run(&mut all, &[1, 1], &mut memory, 5 * SECOND, 200)).contains(&false));
    }

    #[test]
    fn a_turn_is_ten_times_what_its_begin_was_waited_for() {
        let (mut all, mut memory) = (two(), Memory::default());
        all[1].slice = 3 * SECOND;
        run(&mut all, &[20, 20], &mut memory, 0, 20);
        // From now on a change costs 400 ms: one works, then the other.
        let mut last = Decided::default();
        for round in 0..20_usize {
            all[round % 2].took += 2 * SECOND / 5;
            let slow = if round % 2 == 0 { [1, 0] } else { [0, 1] };
            let decided = run(&mut all, &slow, &mut memory, (5 + 2 * round as u64) * SECOND, 8);
            last = decided.last().cloned().expect("looks");
        }
        assert!(last.quantum.abs_diff(4 * SECOND) < SECOND / 5, "{}", last.quantum);
        let slice = Said { slice: 20 * SECOND, ..all[1].clone() };
        let (decided, _) = decide(PHYSICAL, &[all[0].clone(), slice], memory, 46 * SECOND);
        assert_eq!(decided.quantum, 20 * SECOND, "a class wants more");
    }

    #[test]
    fn what_pools_keep_is_asked_for_where_somebody_is_refused() {
        let mut all = [said("works", GIB, 0), said("rests", GIB, 0), said("wants", GIB, 0)];
        let mut memory = Memory::default();
        let mut run = |all: &mut [Said], at: u64| run(all, &[1, 0, 0], &mut memory, at * SECOND, 8);
        assert!(run(&mut all, 0).iter().all(|decided| decided.trims.is_empty()));
        all[2].refused += 1;
        let decided = run(&mut all, 2);
        assert_eq!(decided[0].trims, [key("wants"), key("rests")]);
        assert!(decided[1..].iter().all(|decided| decided.trims.is_empty()), "once");
        all[1].used = 8 * GIB;
        let decided: Vec<Decided> = (4..24).step_by(2).flat_map(|at| run(&mut all, at)).collect();
        let asked = decided.iter().filter(|decided| !decided.trims.is_empty()).count();
        assert!((1..=3).contains(&asked), "now and then while little is left: {asked}");
    }

    proptest! {
        /// Tenants write what is decided by.
        #[test]
        fn whatever_is_said_turns_are_bounded_and_of_who_is_there(
            looks in proptest::collection::vec(proptest::collection::vec(any::<[u64; 6]>(), 0..4), 1..20),
        ) {
            let mut memory = Memory::default();
            for (look, at) in looks.iter().zip(0_u64..) {
                let all: Vec<Said> = look
                    .iter()
                    .zip(["a", "b", "c", "d"])
                    .map(|([used, managed, took, least, works, refused], name)| Said {
                        took: *took, least: *least, works: *works, refused: *refused, ..said(name, *used, *managed)
                    })
                    .collect();
                let (decided, after) = decide(PHYSICAL, &all, memory, at * SECOND);
                memory = after;
                prop_assert!(decided.turns.is_empty() || (QUANTUM.0..=QUANTUM.1).contains(&decided.quantum));
                prop_assert!(decided.turns.len() != 1);
                let is_there = |key: &Key| all.iter().any(|said| said.key == *key);
                prop_assert!(decided.turns.iter().chain(&decided.trims).all(is_there));
            }
        }
    }
}
