use super::*;

/// A kernel with enough measured launches.
fn known(estimate: u64) -> Cost {
    let (measured, key) = (AtomicU16::new(FIRST), AtomicU64::new(0x5eed << 20 | 1));
    let estimate = AtomicU64::new(estimate);
    // SAFETY: atomics throughout, for which zeros are valid.
    #[allow(unsafe_code)]
    Cost { measured, key, estimate, ..unsafe { core::mem::zeroed() } }
}

/// The charge of 10,000 measured launches that vary by 20 % and to which preemption `adds` time,
/// relative to the undisturbed time.
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

/// Adds a slice to one in `of` launches.
fn one_in(of: u64) -> impl Fn(u64) -> u64 {
    move |number| if number.is_multiple_of(of) { SLICE } else { 0 }
}

fn check(charged: f64, expected: f64) {
    assert!((0.95..1.05).contains(&(charged / expected)), "{charged}");
}

#[test]
fn few_preemptions_are_left_out_only_while_watched() {
    check(charged(20_000, one_in(50), true), 1.0);
    check(charged(20_000, one_in(50), false), 3.0);
}

#[test]
fn preemption_of_nearly_all_launches_is_left_out() {
    let adds = |number: u64| if number < 16 || number.is_multiple_of(50) { 0 } else { SLICE };
    let charged = charged(1_000_000, adds, true);
    assert!((0.9..1.15).contains(&charged), "{charged}");
}

#[test]
fn preemption_of_most_launches_counts_a_quarter() {
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
fn undisturbed_kernels_count_in_full() {
    for length in [1000, 20_000, 60_000, 100_000, 1_000_000, 1_900_000, 5_000_000] {
        check(charged(length, |_| 0, true), 1.0);
    }
}

#[test]
fn preempted_first_launches_do_not_fix_the_estimate() {
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
fn overlapping_kernels_count_how_far_they_moved_the_end() {
    // Four at a time; the first moves the end by its whole length.
    let moved = |number: u64| if number.is_multiple_of(4) { 1_000_000 } else { 20_000 };
    let cost = known(0);
    let charged: u64 = (0..1000).map(|number| cost.learn(moved(number), 1_000_000, true)).sum();
    assert_eq!(charged, (0..1000).map(moved).sum());
}

#[test]
fn overlapping_kernels_leave_a_slice_out_once() {
    let cost = known(250_000);
    let (mut charged, mut own) = (0, 0);
    for number in 0..10_000_u64 {
        // Four at once, which end one after the other; half of them are preempted.
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
fn long_kernel_is_measured_at_each_launch() {
    let cost = known(0);
    for _ in 0..1000 {
        cost.learn(20_000, 1_000_000, true);
        assert_eq!(cost.next(&Tempo::default(), || 0).1, Measure::For(1));
    }
    assert!(cost.next(&Tempo::default(), || 0).0 < LONG, "it is charged what it moves");
}

#[test]
fn uncharged_time_is_reported() {
    // Ratios of the counted time, and of the counted plus spared time, to the real time.
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
    // Nearly all are preempted; a quarter of the measured time counts.
    check(40, |number| if number.is_multiple_of(64) { 0 } else { SLICE }, 0.91, 1.13);
}

#[test]
fn frequent_long_launches_count_in_full() {
    check(charged(20_000, one_in(4), true), 26.0);
}

#[test]
fn kernel_is_identified_by_function_and_grid_size() {
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
