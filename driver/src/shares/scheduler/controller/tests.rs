use super::*;
use divvy_pages::Compute;
use proptest::collection::vec;
use proptest::prelude::*;

const IDLE: Seen = Seen { busy: 0, charged: 0, waited: 0 };

/// A second is over: the rate of the next.
fn rate(
    terms: Entitlement,
    seen: Seen,
    between: u64,
    target: u64,
    memory: ControllerState,
) -> (u64, ControllerState) {
    let company =
        CoRunners { is_beside: between > 0, between, lasted: NS_PER_SECOND, ..CoRunners::default() };
    corrected(memory, seen, company).rate(terms, target, between > 0)
}

fn fixed(percent: u64) -> Entitlement {
    Entitlement { guarantee: percent * POINT, ceiling: percent * POINT, weight: 1 }
}

fn wanted(terms: Entitlement, seen: Seen) -> u64 {
    terms.wants(seen, seen.is_held_up())
}

/// This time as NVML reports it: in whole per cent.
fn told(busy: u64) -> u64 {
    (busy + POINT / 2) / POINT * POINT
}

/// A share alone, second by second: what it has of a rate is `model` times that, as far as it wants it.
struct Share {
    terms: Entitlement,
    memory: ControllerState,
    rate: u64,
    /// What others have.
    between: u64,
}

impl Share {
    fn new(terms: Entitlement) -> Self {
        let (rate, memory) = rate(terms, IDLE, 0, terms.guarantee, ControllerState::default());
        Self { terms, memory, rate, between: 0 }
    }

    /// Beside others that have all the rest.
    fn beside(terms: Entitlement) -> Self {
        Self { between: NS_PER_SECOND - terms.guarantee, ..Self::new(terms) }
    }

    /// A second: what the share had.
    fn second(&mut self, model: f64, wants: f64, says: impl FnOnce(u64) -> (u64, u64)) -> u64 {
        let had = ((self.rate as f64 * model * wants) as u64).min(NS_PER_SECOND);
        let (charged, waited) = says(had);
        let seen = Seen { busy: told(had), charged, waited };
        let target = targets(&[(self.terms, wanted(self.terms, seen))])[0];
        (self.rate, self.memory) = rate(self.terms, seen, self.between, target, self.memory);
        had
    }

    /// The same of one that wants all that there is, and says so.
    fn busy_second(&mut self, model: f64) -> u64 {
        self.second(model, 1.0, |had| ((had as f64 / model) as u64, NS_PER_SECOND - had))
    }
}

fn seen() -> impl Strategy<Value = Seen> {
    let waited = prop_oneof![Just(0), 0..4 * NS_PER_SECOND];
    (0..=NS_PER_SECOND, waited).prop_map(|(busy, waited)| Seen { busy, charged: busy, waited })
}

/// A value that a tenant may have written.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u64>(), Just(u64::MAX)]
}

/// Entitlement whose guarantees fit on one GPU.
fn shares() -> impl Strategy<Value = Vec<(Entitlement, u64)>> {
    vec((0..=100_u64, 0..=100_u64, 1..10_u32, seen()), 1..9).prop_map(|all| {
        let sum: u64 = all.iter().map(|(guarantee, ..)| guarantee).sum::<u64>().max(100);
        let one = |(guarantee, above, weight, seen): (u64, u64, u32, Seen)| {
            let guarantee = guarantee * NS_PER_SECOND / sum;
            let terms =
                Entitlement { guarantee, ceiling: (guarantee + above * POINT).min(NS_PER_SECOND), weight };
            (terms, wanted(terms, seen))
        };
        all.into_iter().map(one).collect()
    })
}

proptest! {
    #[test]
    fn targets_fit_and_leave_no_demanded_time(shares in shares()) {
        let targets = targets(&shares);
        let sum: u64 = targets.iter().sum();
        prop_assert!(sum <= NS_PER_SECOND);
        for ((terms, wants), target) in shares.iter().zip(&targets) {
            prop_assert!(*target <= terms.ceiling);
            prop_assert!(*target >= terms.guarantee.min(*wants));
            // But for what cannot be divided by the weights.
            prop_assert!(sum + 100 > NS_PER_SECOND || target == wants);
        }
    }

    #[test]
    fn misjudged_kernels_are_corrected_within_three_seconds(
        percent in 1..=100_u64, model in 0.5..=2.0,
    ) {
        let mut share = Share::new(fixed(percent));
        let had: Vec<u64> = (0..6).map(|_| share.busy_second(model)).collect();
        // A share with too little time at first may just have begun.
        for had in &had[if model > 1.0 { 2 } else { 3 }..] {
            // NVML's rounding, once when it is corrected and once when that is paid back.
            prop_assert!(had.abs_diff(percent * POINT) <= POINT * 3 / 2, "{had:?}");
        }
    }

    #[test]
    fn share_exceeds_its_ceiling_for_at_most_a_second(
        percent in 1..=100_u64, models in vec((0.5..=2.0, 1..6_usize), 1..12),
    ) {
        let mut share = Share::new(fixed(percent));
        for (model, seconds) in models {
            for second in 0..seconds {
                let had = share.busy_second(model);
                // But for the first second after the library has begun to judge otherwise, and for
                // NVML's rounding.
                prop_assert!(second == 0 || had <= (percent + 2) * POINT, "second {second}: {had}");
            }
        }
    }

    #[test]
    fn preemption_is_corrected_while_co_runners_last(
        percent in 1..=100_u64, longer in 0.0..=1.0,
    ) {
        let mut share = Share::beside(fixed(percent));
        // At the longest it was under way all the time.
        let model = 1.0 + longer * (percent as f64 / 100.0 - 1.0);
        let had: Vec<u64> = (0..8).map(|_| share.busy_second(model)).collect();
        for had in &had[4..] {
            prop_assert!(had.abs_diff(percent * POINT) <= POINT * 3 / 2, "{had:?}");
        }
        // Nor is it kept over a pause.
        let mut paused = Share { between: 0, ..share };
        paused.second(1.0, 0.0, |_| (0, 0));
        prop_assert!(paused.busy_second(1.0) <= 2 * percent * POINT);
        share.between = 0;
        share.busy_second(1.0);
        let alone = share.busy_second(1.0);
        prop_assert!(alone <= (percent + 2) * POINT, "{alone}");
    }

    #[test]
    fn unmeasured_long_kernels_are_limited_within_seconds(percent in 1..=50_u64, model in 2.0..=100.0) {
        let mut share = Share::new(fixed(percent));
        for second in 0..20 {
            let rate = share.rate;
            // It says that it was charged all that it could be, and waited.
            let had = share.second(model, 1.0, |_| (rate, NS_PER_SECOND));
            prop_assert!(second < 8 || had <= (percent + 2) * POINT, "second {second}: {had}");
        }
    }

    #[test]
    fn false_reports_gain_at_most_a_second(
        percent in 1..=50_u64, plays in vec((0.02..=2.0, 0.0..=1.0, 0..=NS_PER_SECOND), 1..5),
    ) {
        let mut share = Share::beside(fixed(percent));
        let (mut had, mut entitled) = (0, 0);
        for (model, wants, charged) in plays.into_iter().cycle().take(300) {
            had += share.second(model, wants, |_| (charged, NS_PER_SECOND));
            entitled += percent * POINT + QUANTUM;
            prop_assert!(had <= entitled + NS_PER_SECOND + 4 * percent * POINT, "{had} of {entitled}");
        }
    }

    #[test]
    fn false_waiting_reports_gain_nothing(
        percent in 1..=50_u64, plays in vec((0.5..=2.0, 0.0..=1.0, 0..=NS_PER_SECOND), 1..5),
    ) {
        let mut share = Share::new(fixed(percent));
        let (mut had, mut entitled) = (0, 0);
        // The same trick again and again: what it gains each time would add up.
        for (model, wants, charged) in plays.into_iter().cycle().take(300) {
            had += share.second(model, wants, |_| (charged, NS_PER_SECOND));
            // NVML's precision, too.
            entitled += percent * POINT + QUANTUM;
            prop_assert!(had <= entitled + 4 * percent * POINT, "{had} of {entitled}");
        }
    }

    #[test]
    fn rate_is_valid_for_any_report(
        percent in 1..=100_u64,
        looks in vec((0..=NS_PER_SECOND, word(), word(), word(), 0..=NS_PER_SECOND), 1..20),
    ) {
        let mut memory = ControllerState::default();
        for (busy, charged, waited, lasted, between) in looks {
            let company = CoRunners { is_beside: between > 0, between, lasted, ..CoRunners::default() };
            let after = corrected(memory, Seen { busy, charged, waited }, company);
            let (rate, next) = after.rate(fixed(percent), percent * POINT, between > 0);
            prop_assert!(rate > 0);
            prop_assert!(next.trims.iter().all(|trim| trim.is_finite() && *trim >= LEAST), "{next:?}");
            memory = next;
        }
    }

    #[test]
    fn share_that_does_not_wait_gets_no_larger_correction(
        percent in 1..=100_u64,
        plays in vec((0.5..=2.0, 0.0..=1.0), 1..50),
    ) {
        let mut share = Share::new(fixed(percent));
        let mut before = share.memory.trims[0];
        for (model, wants) in plays {
            share.second(model, wants, |had| (had, 0));
            prop_assert!(share.memory.trims[0] <= before);
            before = share.memory.trims[0];
        }
    }
}

#[test]
fn entitlement_of_policies() {
    let busy = Seen { busy: 20 * POINT, charged: 20 * POINT, waited: NS_PER_SECOND };
    let light = Seen { busy: 4 * POINT, charged: 4 * POINT, waited: 0 };
    let terms =
        |cores, ceiling, weight| Entitlement::of(Compute { cores, ceiling, weight, ..Compute::default() });
    let check = |what: &str, shares: &[(Entitlement, Seen)], expected: &[u64]| {
        let shares: Vec<_> = shares.iter().map(|(terms, seen)| (*terms, wanted(*terms, *seen))).collect();
        let percent: Vec<u64> = targets(&shares).iter().map(|target| target / POINT).collect();
        assert_eq!(percent, expected, "{what}");
    };
    let fixed = terms(30, 0, 0);
    check("fixed", &[(fixed, busy), (terms(60, 60, 0), IDLE)], &[30, 0]);
    let equal = terms(0, 0, 0);
    check("equal", &[(equal, busy), (equal, busy), (equal, IDLE)], &[50, 50, 0]);
    check("equal beside fixed", &[(equal, busy), (fixed, busy), (equal, busy)], &[35, 30, 35]);
    let (one, three) = (terms(0, 0, 1), terms(0, 0, 3));
    check("weights", &[(one, busy), (three, busy)], &[25, 75]);
    check("weights, who wants little", &[(one, busy), (three, light)], &[94, 6]);
    let (small, large) = (terms(20, 50, 1), terms(40, 100, 3));
    check("burst", &[(small, busy), (large, IDLE)], &[50, 0]);
    check("burst, returned", &[(small, busy), (large, busy)], &[30, 70]);
    check("burst, lent to two", &[(small, busy), (small, busy), (large, IDLE)], &[50, 50, 0]);
}

#[test]
fn waking_share_has_its_guarantee() {
    let woken = |terms| rate(terms, IDLE, 0, 0, ControllerState::default()).0 / POINT;
    assert_eq!(woken(fixed(30)), 30);
    assert_eq!(woken(fixed(1)), 1);
    assert_eq!(woken(Entitlement { guarantee: 0, ceiling: NS_PER_SECOND, weight: 1 }), 5);
}

/// The state of a share of 50 % beside others that used these points in this time, and waited or
/// not.
fn after(memory: ControllerState, busy: u64, charged: u64, waits: bool, ms: u64) -> ControllerState {
    let waited = if waits { NS_PER_SECOND } else { 0 };
    let seen = Seen { busy: busy * POINT, charged: charged * POINT, waited };
    let lasted = ms * NS_PER_SECOND / 1000;
    let company = CoRunners { is_beside: true, between: 40 * POINT, lasted, ..CoRunners::default() };
    corrected(memory, seen, company)
}

fn granted(trim: f64) -> ControllerState {
    let (granted, allowed) = (50 * POINT, 50 * POINT);
    ControllerState {
        trims: [1.0, trim],
        granted,
        allowed,
        believed: true,
        worked: START,
        ..ControllerState::default()
    }
}

#[test]
fn unused_rate_is_cut_at_once() {
    let trim = |waits| after(granted(1.75), 55, 55, waits, 1000).trims[1];
    assert_eq!(trim(false), SPARE);
    // A share that waits may have had more by chance.
    assert_eq!(trim(true), (1.75 + SPARE) / 2.0);
    let honest = after(granted(1.75), 55, 96, true, 1000).trims[1];
    assert!((1.6..1.7).contains(&honest), "{honest}");
}

#[test]
fn share_waiting_for_each_launch_lacks_time() {
    let trim = |charged: u64, waited: u64| {
        let seen = Seen { busy: 46 * POINT, charged: charged * POINT, waited: waited * POINT };
        let company =
            CoRunners { is_beside: true, between: 50 * POINT, lasted: NS_PER_SECOND, ..CoRunners::default() };
        let memory = granted(1.0);
        (corrected(memory, seen, company).trims[1], memory.is_held(seen, company))
    };
    let (more, is_held) = trim(50, 10);
    assert!(more > 1.03 && is_held, "{more}");
    // It did not want more.
    assert_eq!([trim(48, 10), trim(50, 0)], [(1.0, false); 2]);
}

#[test]
fn insufficient_steps_are_followed_by_longer_ones() {
    let step: f64 = 50.0 / 40.5;
    let steps = |lacked: u8, between: u64| {
        let memory = ControllerState { lacked, follows: [1.0; 2], ..granted(1.0) };
        let seen = Seen { busy: 40 * POINT, charged: 50 * POINT, waited: NS_PER_SECOND };
        let company = CoRunners {
            is_beside: true,
            between: between * POINT,
            lasted: NS_PER_SECOND,
            ..CoRunners::default()
        };
        corrected(memory, seen, company).trims[1].log(step).round()
    };
    // At the first look none has been taken.
    assert_eq!([0, 1, 2, 3, 4].map(|lacked| steps(lacked, 40)), [1.0, 1.0, 2.0, 3.0, 3.0]);
    assert_eq!([52, 55, 58].map(|between| steps(4, between)), [3.0, 2.0, 1.0]);
}

#[test]
fn long_kernel_shortfall_is_corrected_while_gpu_is_idle() {
    let follows = |memory: ControllerState, busy: u64, charged: u64, waited: u64, between: u64| {
        let seen = Seen { busy: busy * POINT, charged: charged * POINT, waited: waited * POINT };
        let company = CoRunners {
            is_beside: true,
            between: between * POINT,
            lasted: NS_PER_SECOND,
            ..CoRunners::default()
        };
        let more = 50.0 / (busy as f64 + 0.5) - 1.0;
        (corrected(memory, seen, company).trims[1] - 1.0) / more
    };
    let check = |looks: &[f64], expected: f64| {
        assert!(looks.iter().all(|look| (look - expected).abs() < 1e-9), "{looks:?}");
    };
    let known = granted(1.0);
    check(&[follows(known, 30, 48, 60, 45), follows(known, 30, 50, 70, 55)], 1.0);
    // Others would lose by it, it has not used all, or had something else to do.
    check(
        &[follows(known, 30, 40, 70, 45), follows(known, 30, 48, 70, 55), follows(known, 30, 50, 60, 55)],
        0.5,
    );
    // It may be chance.
    check(&[follows(known, 46, 50, 70, 55)], 0.5);
    // It has only just begun: its kernels are not known.
    let begins = ControllerState { worked: 0, ..known };
    check(&[follows(begins, 30, 48, 60, 45), follows(begins, 30, 50, 70, 55)], 0.5);
}

#[test]
fn usage_is_compared_with_the_correction_in_force() {
    let trim = |busy: u64, held: Option<f64>| {
        let seen = Seen { busy: busy * POINT, charged: busy * POINT, waited: NS_PER_SECOND };
        let company = CoRunners {
            is_beside: true,
            between: 40 * POINT,
            lasted: NS_PER_SECOND,
            held,
            ..CoRunners::default()
        };
        corrected(granted(2.0), seen, company).trims[1]
    };
    let check = |trim: f64, seen: f64| assert!((trim - (2.0 + seen) / 2.0).abs() < 1e-9, "{trim}");
    check(trim(45, None), 2.0 * 50.0 / 45.5);
    // For half of the time half of it held: by that the last one gives it too much.
    check(trim(45, Some(1.5)), 1.5 * 50.0 / 45.5);
    check(trim(50, Some(1.5)), 1.5);
}

#[test]
fn debt_depends_on_the_duration_of_excess() {
    let debt = |ms| after(granted(1.0), 60, 60, true, ms).debt;
    assert_eq!([debt(1000), debt(500), debt(2000)], [10, 5, 20].map(|points| points * signed(POINT)));
}

#[test]
fn earlier_shortfall_offsets_later_excess() {
    let lacked = after(granted(1.0), 30, 50, true, 1000);
    assert_eq!(lacked.debt, -20 * signed(POINT));
    assert_eq!(after(lacked, 65, 100, true, 1000).debt, -5 * signed(POINT));
    // A share that does not wait lacks nothing, and neither does one whose reports were never
    // believed.
    assert_eq!(after(granted(1.0), 30, 30, false, 1000).debt, -5 * signed(POINT));
    assert_eq!(after(ControllerState { believed: false, ..granted(1.0) }, 30, 30, false, 1000).debt, 0);
}

#[test]
fn startup_shortfall_is_not_refunded_but_excess_is_paid() {
    let begins = ControllerState { worked: 0, ..granted(1.0) };
    for (busy, one, three) in [(60, 5, 15), (34, -8, 0)] {
        let looks = |ms: &[u64]| ms.iter().fold(begins, |memory, ms| after(memory, busy, 60, true, *ms));
        let debts = [looks(&[500]).debt, looks(&[500, 500, 500]).debt];
        assert_eq!(debts, [one, three].map(|points| points * signed(POINT)));
    }
    // It rests.
    assert_eq!(after(after(begins, 60, 60, true, 1000), 0, 0, false, 1000).debt, -5 * signed(POINT));
}

#[test]
fn shortfall_beside_co_runners_is_refunded() {
    let check = |percent: u64, debt: u64, is_beside: bool, granted: u64| {
        let memory = ControllerState {
            believed: true,
            debt: -signed(debt),
            worked: START,
            ..ControllerState::default()
        };
        let rate =
            |memory: ControllerState| memory.rate(fixed(percent), percent * POINT, is_beside).1.granted;
        assert_eq!(rate(memory), granted, "{percent}");
        assert_eq!(rate(ControllerState { worked: START - 1, ..memory }), percent * POINT, "while it begins");
    };
    check(30, 3 * POINT, false, 30 * POINT);
    check(30, 3 * POINT, true, 30 * POINT + POINT * 3 / 4);
    check(70, 7 * POINT, true, 71 * POINT);
    check(99, 9 * POINT, true, 99 * POINT);
    check(100, 10 * POINT, true, NS_PER_SECOND);
}
