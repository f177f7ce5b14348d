//! Shares that hold more than there is, second by second, and what is decided for them.

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
    Said { key: key(name), is_high: false, used, managed, took: 0, least: 0, works: 0, refused: 0 }
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

/// Whether shares take turns, and whether one has a trial.
fn is_taken(decided: &[Decided]) -> Vec<bool> {
    decided.iter().map(|decided| decided.why == Some(Why::Thrash)).collect()
}

fn is_tried(decided: &[Decided]) -> Vec<bool> {
    decided.iter().map(|decided| decided.why == Some(Why::Trial)).collect()
}

#[test]
fn who_pushes_each_other_out_takes_turns_within_three_seconds() {
    let (mut all, mut memory) = (two(), Memory::default());
    let before = run(&mut all, &[1, 1], &mut memory, 0, 60);
    assert!(!is_taken(&before).contains(&true), "all is well");
    let during = run(&mut all, &[20, 20], &mut memory, 15 * SECOND, 12);
    let first = is_taken(&during).iter().position(|taken| *taken).expect("turns");
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

const MS: u64 = 1_000_000;

/// Whose turn it is, and since when.
#[derive(Default)]
struct Turn(Option<(Key, u64)>);

impl Turn {
    fn follow(&mut self, decided: &Decided, now: u64) {
        let at = self.0.as_ref().and_then(|(key, since)| {
            let at = decided.turns.iter().position(|one| one == key)?;
            let is_over = now - since >= decided.quantum;
            Some(if is_over { (at + 1, now) } else { (at, *since) })
        });
        let (at, since) = at.unwrap_or((0, now));
        let count = decided.turns.len().max(1);
        self.0 = decided.turns.get(at % count).map(|key| (key.clone(), since));
    }

    /// Whether nobody has one, or this one.
    fn is_for(&self, key: &Key) -> bool {
        self.0.as_ref().is_none_or(|(one, _)| one == key)
    }
}

/// Shares of which one, when it has the GPU for itself, needs a millisecond for a launch, and so many beside others:
/// what was decided, look by look, and who was in turn.
fn live(all: &mut [Said], beside: u64, memory: &mut Memory, from: u64, looks: u64) -> Vec<Decided> {
    let mut fastest = vec![u64::MAX; all.len()];
    let mut turn = Turn::default();
    let look = |at: u64| {
        for (said, fastest) in all.iter_mut().zip(&mut fastest) {
            if !turn.is_for(&said.key) {
                continue;
            }
            let length = if turn.0.is_some() { MS } else { beside * MS };
            *fastest = length.min(*fastest);
            let launches = LOOK / length;
            (said.took, said.least) = (said.took + launches * length, said.least + launches * *fastest);
            said.works += launches;
        }
        let (decided, after) = decide(PHYSICAL, all, std::mem::take(memory), from + at * LOOK);
        turn.follow(&decided, from + at * LOOK);
        *memory = after;
        decided
    };
    (1..=looks).map(look).collect()
}

#[test]
fn who_has_pushed_each_other_out_since_they_began_takes_turns_after_a_trial() {
    let (mut all, mut memory) = (two(), Memory::default());
    let decided = live(&mut all, 100, &mut memory, 0, 40);
    let (tried, taken) = (is_tried(&decided), is_taken(&decided));
    let first = tried.iter().position(|tried| *tried).expect("a trial");
    assert!((4..12).contains(&first), "look {first}");
    let last = tried.iter().rposition(|tried| *tried).expect("a trial");
    assert!(last - first <= 4 * LOOKS as usize, "{first} to {last}");
    let turns = taken.iter().position(|taken| *taken).expect("turns");
    assert!(turns > last && turns < last + 12 && !taken[turns..].contains(&false), "{last}, {turns}");
}

/// A tenant whose launches take 10 ms when it has the GPU for itself, and as long as others' memory needs to go and its own
/// to come where it has not: beside others each, alone the first.
struct Tenant {
    said: Said,
    fetch: u64,
    fastest: u64,
    is_alone: bool,
    /// Of the launch under way.
    length: u64,
    left: u64,
}

impl Tenant {
    fn new(said: Said, fetch: u64, left: u64) -> Self {
        Self { said, fetch, fastest: u64::MAX, is_alone: false, length: 10 * MS + fetch, left }
    }

    fn work(&mut self, mut time: u64, is_alone: bool) {
        self.said.works += 1;
        while time >= self.left {
            time -= self.left;
            self.fastest = self.fastest.min(self.length);
            (self.said.took, self.said.least) =
                (self.said.took + self.length, self.said.least + self.fastest);
            self.length = 10 * MS + if is_alone && self.is_alone { 0 } else { self.fetch };
            (self.is_alone, self.left) = (is_alone, self.length);
        }
        self.left -= time;
    }
}

/// When they last worked side by side, and what they do in the end.
fn side_by_side(fetch: u64, phase: u64) -> (u64, Decided) {
    let [a, b] = two();
    let mut tenants = [Tenant::new(a, fetch, phase), Tenant::new(b, fetch, fetch)];
    let (mut memory, mut decided, mut turn) = (Memory::default(), Decided::default(), Turn::default());
    let (mut now, mut beside) = (0, 0);
    while now < 20 * SECOND {
        let pause = if memory.is_urgent(now) { SECOND / 10 } else { LOOK };
        now += pause;
        for tenant in &mut tenants {
            if turn.is_for(&tenant.said.key) {
                tenant.work(pause, turn.0.is_some());
            } else {
                tenant.is_alone = false;
            }
        }
        beside = if turn.0.is_none() { now } else { beside };
        let all = tenants.each_ref().map(|tenant| tenant.said.clone());
        (decided, memory) = decide(PHYSICAL, &all, memory, now);
        turn.follow(&decided, now);
    }
    (beside, decided)
}

#[test]
fn who_was_never_fast_takes_turns_for_good_within_three_seconds() {
    for (fetch, phase) in
        [100, 200, 350].into_iter().flat_map(|fetch| (1..10).map(move |at| (fetch, fetch * at / 10)))
    {
        let (beside, decided) = side_by_side(fetch * MS, phase * MS);
        assert_eq!(decided.why, Some(Why::Thrash));
        assert!(beside <= 3 * SECOND, "{fetch} ms, {phase} ms: {} ms", beside / MS);
    }
}

#[test]
fn who_waits_for_little_works_side_by_side_again() {
    // As fast as alone, as slow as the time of two explains, and a little slower.
    for fetch in [0, 10, 30] {
        let (beside, decided) = side_by_side(fetch * MS, 1);
        assert!(decided.turns.is_empty() && beside >= 20 * SECOND, "{fetch} ms: {decided:?}");
    }
}

#[test]
fn one_that_waits_after_trials_shows_nothing_and_two_do() {
    let check = |waits: [u64; 2], expected: bool| {
        let (mut all, mut memory) = (two(), Memory::default());
        live(&mut all, 2, &mut memory, 0, 20);
        assert!(memory.tried.is_some_and(|tried| tried.count == TRIALS), "{:?}", memory.tried);
        // Once, of a quarter of a second.
        for (said, waits) in all.iter_mut().zip(waits) {
            (said.took, said.least) = (said.took + waits * SECOND / 4, said.least + waits * SECOND / 100);
            said.works += 1;
        }
        let (decided, _) = decide(PHYSICAL, &all, memory, 21 * LOOK);
        assert_eq!(decided.why == Some(Why::Thrash), expected, "{waits:?}");
    };
    check([1, 0], false);
    check([1, 1], true);
}

#[test]
fn a_trial_for_nothing_is_short_and_seldom_and_another_ones_each_time() {
    let (mut all, mut memory) = (two(), Memory::default());
    let decided = live(&mut all, 2, &mut memory, 0, 4 * 60 * 5);
    let tried = is_tried(&decided).into_iter().filter(|tried| *tried).count();
    assert!((4 * LOOKS as usize..=decided.len() / 20).contains(&tried), "{tried} looks");
    assert!(!is_taken(&decided).contains(&true));
    let mut firsts: Vec<&Key> = decided.iter().filter_map(|decided| decided.turns.first()).collect();
    firsts.dedup();
    assert_eq!(firsts[..2], [&key("a"), &key("b")]);
    // Where more is held.
    let from = 5 * 60 * SECOND;
    all[0].used += GIB;
    let decided = live(&mut all, 2, &mut memory, from, 4 * 25);
    assert!(is_tried(&decided).contains(&true));
}

#[test]
fn there_is_no_trial_where_all_fits_or_one_works() {
    let check = |mut all: Vec<Said>, slow: &[u64]| {
        let decided = run(&mut all, slow, &mut Memory::default(), 0, 300);
        assert!(decided.iter().all(|decided| decided.turns.is_empty()), "{slow:?}");
    };
    check(vec![said("a", 4 * GIB, GIB), said("b", 6 * GIB, GIB)], &[1, 1]);
    check(two().to_vec(), &[1, 0]);
    check(vec![said("a", 6 * GIB, GIB), said("b", 6 * GIB, 0)], &[1, 1]);
}

#[test]
fn what_is_held_beyond_the_claim_is_managed_whatever_is_said() {
    assert_eq!(managed(3, 10, 8), 3);
    assert_eq!(managed(0, 10, 8), 2);
    assert_eq!(managed(0, 10, 12), 0);
    assert_eq!(managed(u64::MAX, 10, 8), 10);
}

#[test]
fn every_other_turn_is_one_of_high_priority() {
    let of = |names: &[(&str, bool)]| {
        let shares = names.iter().map(|(name, is_high)| Said { is_high: *is_high, ..said(name, GIB, GIB) });
        let order = order(&shares.collect::<Vec<_>>());
        order.into_iter().map(|(claim, _)| claim.to_string()).collect::<String>()
    };
    assert_eq!(of(&[("a", false), ("b", false)]), "ab");
    assert_eq!(of(&[("a", true), ("b", true)]), "ab");
    assert_eq!(of(&[("a", false), ("b", false), ("c", true)]), "cacb");
    assert_eq!(of(&[("a", false), ("b", true), ("c", true)]), "baca");
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
            prop_assert_eq!(decided.turns.is_empty(), decided.why.is_none());
            let is_there = |key: &Key| all.iter().any(|said| said.key == *key);
            prop_assert!(decided.turns.iter().chain(&decided.trims).all(is_there));
        }
    }

    /// However tenants lie, and though use grows all the time.
    #[test]
    fn trials_take_a_part_of_the_time_that_is_bounded(
        looks in proptest::collection::vec((0..2 * LOOK, any::<bool>(), 0..GIB), 1..2000),
    ) {
        let (mut all, mut memory, mut taken) = (two(), Memory::default(), 0_u64);
        for ((took, works, more), at) in looks.iter().zip(1_u64..) {
            for said in &mut all {
                // As slow as its fastest.
                (said.took, said.least) = (said.took + took, said.least + took);
                (said.works, said.used) = (said.works + u64::from(*works), said.used + more);
            }
            let (decided, after) = decide(PHYSICAL, &all, memory, at * LOOK);
            memory = after;
            taken += u64::from(!decided.turns.is_empty());
            prop_assert!(decided.why != Some(Why::Thrash));
            prop_assert!(taken * LOOK <= u64::from(TRIALS) * (TRIAL.1 + LOOK) + at * LOOK / PAUSE, "{} of {}", taken, at);
        }
    }
}
