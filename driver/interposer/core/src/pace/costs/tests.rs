use super::*;

/// A kernel of which enough are known.
fn known(estimate: u64) -> Cost {
    let (measured, key) = (AtomicU16::new(FIRST), AtomicU64::new(0x5eed << 20 | 1));
    let estimate = AtomicU64::new(estimate);
    // SAFETY: atomics throughout, for which zeros are valid.
    #[allow(unsafe_code)]
    Cost { measured, key, estimate, ..unsafe { core::mem::zeroed() } }
}

/// What is charged for 10,000 measured launches, each by a fifth longer or shorter, to which neighbours add so
/// much; over what they take without.
fn charged(length: u64, adds: impl Fn(u64) -> u64, is_watched: bool) -> f64 {
    let cost = known(length);
    let (mut charged, mut own) = (0, 0);
    for number in 1..10_000_u64 {
        let length = length * (800 + number * 7919 % 400) / 1000;
        let took = length + adds(number);
        charged += cost.learn(took, took, is_watched);
        own += length;
    }
    charged as f64 / own as f64
}

const SLICE: u64 = 2_000_000;
const MS: u64 = 1_000_000;

/// To each of so many.
fn one_in(of: u64) -> impl Fn(u64) -> u64 {
    move |number| if number.is_multiple_of(of) { SLICE } else { 0 }
}

fn check(charged: f64, expected: f64) {
    assert!((0.95..1.05).contains(&(charged / expected)), "{charged}");
}

#[test]
fn what_a_few_slices_add_is_left_out_while_the_node_watches_and_only_then() {
    check(charged(20_000, one_in(50), true), 1.0);
    check(charged(20_000, one_in(50), false), 3.0);
}

#[test]
fn of_kernels_that_fit_a_slice_it_is_left_out_though_one_in_fifty_alone_is_not_cut() {
    let adds = |number: u64| if number < 16 || number.is_multiple_of(50) { 0 } else { SLICE };
    let charged = charged(1_000_000, adds, true);
    assert!((0.9..1.15).contains(&charged), "{charged}");
}

#[test]
fn of_kernels_that_fit_a_slice_it_is_left_out_though_most_are_cut_but_for_a_quarter() {
    let cuts = [0, SLICE / 2, 0, SLICE, SLICE * 2];
    let mean = cuts.iter().sum::<u64>() / cuts.len() as u64;
    for length in [100_000, 300_000, 1_000_000, 1_500_000] {
        let adds = |number| cuts[number as usize % cuts.len()];
        let all = (length + mean) as f64 / length as f64;
        let (counted, quarter) = (charged(length, adds, true), all / 4.0);
        assert!(counted >= quarter && counted <= (quarter * 1.5).max(1.1), "{length}: {counted} of {all}");
        check(charged(length, adds, false), all);
    }
}

#[test]
fn where_nothing_is_added_nothing_is_left_out() {
    for length in [1000, 20_000, 60_000, 100_000, 1_000_000, 1_900_000, 5_000_000] {
        check(charged(length, |_| 0, true), 1.0);
    }
}

#[test]
fn a_kernel_whose_first_launches_were_cut_is_known_as_soon_as_one_was_not() {
    let check = |is_watched: bool, expected: u64| {
        let cost = Cost { measured: AtomicU16::new(0), ..known(0) };
        for took in [3 * SLICE, 2 * SLICE, 20_000, 21_000] {
            cost.learn(took, took, is_watched);
        }
        let next = cost.next(&Tempo::default(), || 0).0;
        let is_near = expected.abs_diff(next) <= expected / 10;
        assert!(is_near, "{next}, watched: {is_watched}");
    };
    check(true, 20_500);
    check(false, (5 * SLICE + 41_000) / 4);
}

#[test]
fn of_kernels_that_overlap_each_counts_for_what_it_moved_the_end() {
    // Four at a time, of which the first moves it by all of its length.
    let moved = |number: u64| if number.is_multiple_of(4) { 1_000_000 } else { 20_000 };
    let cost = known(0);
    let charged: u64 = (0..1000).map(|number| cost.learn(moved(number), 1_000_000, true)).sum();
    assert_eq!(charged, (0..1000).map(moved).sum());
}

#[test]
fn of_kernels_that_overlap_a_slice_is_left_out_once() {
    let cost = known(250_000);
    let (mut charged, mut own) = (0, 0);
    for number in 0..10_000_u64 {
        // Four at once, which end one after the other, and half of which are cut.
        let (moved, length) = (250_000, 800_000 + number * 7919 % 400_000);
        let is_cut = number % 16 < 8;
        let adds = if is_cut { SLICE } else { 0 };
        let first = if number.is_multiple_of(4) { adds } else { 0 };
        charged += cost.learn(moved + first, length + adds, true);
        own += moved;
    }
    let ratio = charged as f64 / own as f64;
    assert!((0.85..1.1).contains(&ratio), "{ratio}");
}

#[test]
fn a_long_kernel_is_measured_each_time_however_little_it_moves_the_end() {
    let cost = known(0);
    for _ in 0..1000 {
        cost.learn(20_000, 1_000_000, true);
        assert_eq!(cost.next(&Tempo::default(), || 0).1, Measure::For(1));
    }
    assert!(cost.next(&Tempo::default(), || 0).0 < LONG, "it is charged what it moves");
}

#[test]
fn what_may_have_been_the_kernels_own_is_told_where_it_is_not_charged() {
    // Of what launches took, over what they count as, and over that and what they were spared.
    let check = |vary: u64, adds: fn(u64) -> u64, counted: f64, with_spared: f64| {
        let (cost, mut own, mut counts, mut spared) = (known(MS), 0, 0, 0);
        for number in 1..20_000_u64 {
            let length = MS - MS / 100 * vary + MS / 50 * vary * (number * 7919 % 1000) / 1000;
            let took = length + adds(number);
            let now = cost.learn(took, took, true);
            own += length;
            counts += now;
            spared += cost.spared(took, now);
        }
        let is = [counts, counts + spared].map(|sum| sum as f64 / own as f64);
        let is_near = |(is, expected): (f64, f64)| (is - expected).abs() < 0.04;
        assert!([(is[0], counted), (is[1], with_spared)].into_iter().all(is_near), "{is:?} of {vary}");
    };
    check(20, |_| 0, 1.0, 1.0);
    check(40, |_| 0, 0.78, 1.0);
    // Nearly all are cut; a quarter of what they took counts.
    check(40, |number| if number.is_multiple_of(64) { 0 } else { SLICE }, 0.91, 1.13);
}

#[test]
fn what_is_long_too_often_is_no_slice() {
    check(charged(20_000, one_in(4), true), 26.0);
}

#[test]
fn a_kernel_is_known_by_its_function_and_the_size_of_its_grid() {
    // SAFETY: atomics throughout, for which zeros are valid.
    #[allow(unsafe_code)]
    let costs: Box<Costs> = unsafe { Box::new_zeroed().assume_init() };
    let at = |function, blocks| costs.number(Work { function, blocks });
    assert_eq!(at(1, 1000), at(1, 1000));
    assert_eq!(at(1, 1000), at(1, 1023));
    assert_ne!(at(1, 1000), at(1, 20));
    assert_ne!(at(1, 1000), at(2, 1000));
    let highest = (0..10_000).map(|function| at(function << 8, 1)).max();
    assert_eq!(highest, Some(KERNELS - 1), "too many are one");
}
