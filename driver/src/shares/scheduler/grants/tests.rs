//! Shares as an audit and their doorbells leave them, and what their pages are to say; gates and
//! turns on a clock of numbers.

use super::*;
use divvy_pages::Compute;
use divvy_pages::policy::UNBOUNDED;
use proptest::collection::vec;
use proptest::prelude::*;

const POINT: u64 = NS_PER_SECOND / 100;
const MS: u64 = 1_000_000;

/// The page contents, with the parts of exactly these shares.
pub(crate) fn orders(shares: &[ShareStatus]) -> Vec<GrantUpdate> {
    super::orders(shares, &parts(shares))
}

/// A share with this guarantee, ceiling and weight that demands these points.
fn share(cores: u32, ceiling: u32, weight: u32, wants: u64) -> ShareStatus {
    let compute = Compute { cores, ceiling, weight, ..Compute::default() };
    ShareStatus {
        terms: Entitlement::of(compute),
        is_high: false,
        is_limited: compute.is_limited(),
        wants: wants * POINT,
        is_awake: false,
        turn: None,
        attribution: Attribution::PerProcess,
        memory: controller::ControllerState::default(),
    }
}

fn awake(share: ShareStatus) -> ShareStatus {
    ShareStatus { is_awake: true, ..share }
}

fn high(share: ShareStatus) -> ShareStatus {
    ShareStatus { is_high: true, ..share }
}

/// Rates in points, none where launches are not paced; and who is asked.
fn check(what: &str, shares: &[ShareStatus], rates: &[Option<u64>], asked: &[bool]) {
    let orders = orders(shares);
    assert_eq!(
        orders.iter().map(|order| order.rate.map(|rate| rate.min(NS_PER_SECOND) / POINT)).collect::<Vec<_>>(),
        rates,
        "{what}"
    );
    assert_eq!(orders.iter().map(|order| order.is_asked).collect::<Vec<_>>(), asked, "{what}");
}

#[test]
fn gpu_time_is_divided_among_active_shares() {
    let free = |weight, wants| share(0, 0, weight, wants);
    check("alone", &[free(1, 100)], &[None], &[false]);
    check("beside one that sleeps", &[free(1, 100), free(1, 0)], &[Some(100), Some(50)], &[false, true]);
    let in_bursts = [free(1, 100), free(3, 8)];
    check("beside one that works in bursts", &in_bursts, &[Some(92), Some(75)], &[false; 2]);
    let small = [share(95, 95, 1, 95), free(1, 0), free(1, 1)];
    check("beside a guarantee of nearly all", &small, &[Some(95), Some(5), Some(5)], &[false, true, false]);
    check("that wakes", &[free(1, 100), awake(free(1, 0))], &[Some(50), Some(50)], &[false; 2]);
    let four = [free(1, 100), free(2, 100), free(3, 100), free(4, 100)];
    check("by weight", &four, &[Some(10), Some(20), Some(30), Some(40)], &[false; 4]);
    let crowd = [share(50, 50, 1, 100), free(1, 100), free(1, 100)];
    check("beside a guarantee", &crowd, &[Some(50), Some(25), Some(25)], &[false; 3]);
    check("it sleeps", &[share(50, 50, 1, 0), free(1, 100)], &[Some(50), Some(100)], &[true, false]);
}

#[test]
fn unexplained_use_is_charged_in_full() {
    let of = |share: ShareStatus, attribution, trim| ShareStatus {
        attribution,
        memory: controller::ControllerState::default().by_word(trim),
        ..share
    };
    let together = |is_explained| Attribution::DeviceTotal { is_explained };
    let (limited, free) = (share(30, 40, 1, 100), |weight| share(0, 0, weight, 100));
    let rates = |what: &str, shares: &[ShareStatus], expected: &[Option<u64>], doubted: [bool; 2]| {
        check(what, shares, expected, &[false; 2]);
        assert_eq!([0, 1].map(|at| orders(shares)[at].is_doubted), doubted, "{what}");
    };
    let two = |attribution, trim| [limited, free(1)].map(|share| of(share, attribution, trim));
    rates("by NVML", &two(Attribution::PerProcess, 1.5), &[Some(60), Some(90)], [false; 2]);
    rates("together", &two(together(true), 1.5), &[Some(60), Some(90)], [false; 2]);
    rates("in doubt", &two(together(false), 1.5), &[Some(60), Some(90)], [true; 2]);
    rates("by word", &two(Attribution::SelfReported, 1.0), &[Some(40), Some(60)], [true, false]);
    let alike = |attribution| [free(1), free(1)].map(|share| of(share, attribution, 1.0));
    rates("alike", &alike(Attribution::SelfReported), &[None, None], [false; 2]);
    rates("alike, together", &alike(together(true)), &[Some(50), Some(50)], [false; 2]);
    rates(
        "other weights",
        &[free(1), free(3)].map(|share| of(share, Attribution::SelfReported, 1.0)),
        &[Some(25), Some(75)],
        [false; 2],
    );
}

#[test]
fn lent_time_returns_when_its_owner_wakes() {
    let (borrower, owner) = (share(20, 100, 1, 100), share(60, 60, 1, 0));
    check("lent", &[borrower, owner], &[Some(100), Some(60)], &[false, true]);
    check("returned", &[borrower, awake(owner)], &[Some(40), Some(60)], &[false; 2]);
    let fixed = [share(20, 20, 1, 20), share(60, 60, 1, 0)];
    check("nobody borrows", &fixed, &[Some(20), Some(60)], &[false, true]);
}

#[test]
fn high_priority_leaves_the_rest_to_the_others() {
    let (first, low) = (high(share(0, 0, 1, 8)), share(0, 0, 1, 100));
    check("it sleeps", &[first, low, low], &[Some(100), Some(50), Some(50)], &[true, false, false]);
    check("it works", &[awake(first), low], &[Some(100), Some(100)], &[false; 2]);
    assert!(is_high_at_work(&[awake(first), low]) && !is_high_at_work(&[first, awake(low)]));
    check("two of it", &[awake(first), awake(first), low], &[Some(50), Some(50), Some(100)], &[false; 3]);
    check("there is no other", &[first, awake(first)], &[Some(50), Some(92)], &[false; 2]);
    assert!(!is_high_at_work(&[first, awake(first)]));
    check("it is limited", &[high(awake(share(30, 0, 1, 30))), low], &[Some(30), Some(100)], &[false; 2]);
}

#[test]
fn share_in_turn_may_use_the_whole_gpu() {
    let take = |turn, share| ShareStatus { turn: Some(turn), ..share };
    let shares = [take(Turn::Own, share(0, 0, 1, 50)), take(Turn::Anothers, share(0, 0, 1, 50))];
    assert_eq!(orders(&shares)[0].rate, Some(UNBOUNDED));
    assert!(orders(&shares).iter().all(|order| order.rate.is_some() && !order.is_asked));
}

fn any_share() -> impl Strategy<Value = ShareStatus> {
    (0..30_u32, 0..=100_u32, 0..5_u32, 0..=100_u64, any::<bool>()).prop_map(
        |(cores, ceiling, weight, wants, is_awake)| ShareStatus {
            is_awake,
            ..share(cores, ceiling, weight, wants)
        },
    )
}

#[test]
fn share_waiting_for_its_turn_closes_no_gate() {
    let take = |turn, share| ShareStatus { turn: Some(turn), ..share };
    let (first, low) = (high(awake(share(0, 0, 1, 8))), share(0, 0, 1, 100));
    assert!(!is_high_at_work(&[take(Turn::Anothers, first), take(Turn::Own, low)]));
    assert!(
        is_high_at_work(&[take(Turn::Own, first), take(Turn::Anothers, low)]),
        "it precedes who takes none"
    );
    assert!(is_high_at_work(&[first, take(Turn::Own, low), take(Turn::Anothers, low)]), "nor is it in it");
    // A sleeping share notifies the node when it wakes, whichever share has the turn.
    let asleep = high(share(0, 0, 1, 8));
    for turn in [Turn::Own, Turn::Anothers] {
        assert!(orders(&[take(turn, asleep), low])[0].is_asked);
    }
}

proptest! {
    /// The gates of shares that take turns: there is always one that no waiting share blocks.
    #[test]
    fn turns_and_priority_never_close_all_gates(
        all in vec((any_share(), any::<bool>()), 2..6), holder in any::<prop::sample::Index>(),
    ) {
        let holder = holder.index(all.len());
        let turn = |at: usize| Some(if at == holder { Turn::Own } else { Turn::Anothers });
        let shares: Vec<ShareStatus> = all
            .into_iter()
            .enumerate()
            .map(|(at, (share, is_high))| ShareStatus { is_high, turn: turn(at), ..share })
            .collect();
        prop_assert!(shares[holder].is_high || !is_high_at_work(&shares));
        let orders = orders(&shares);
        prop_assert!(orders[holder].rate.is_none_or(|rate| rate > 1 || !shares[holder].is_high));
    }

    /// Although the list is made again at each check, and a share is in it twice.
    #[test]
    fn every_share_has_a_turn_in_each_round(
        order in vec(0..4_u8, 2..8),
        quantum in 100..1000_u64,
        step in 1..90_u64,
        rests in vec(any::<bool>(), 4),
    ) {
        let (quantum, step) = (quantum * 10 * MS, step * MS);
        let (mut turns, mut now, mut last) = (Turns::new(order.clone(), quantum, None, 0), 0, [0_u64; 4]);
        let round = (quantum + step) * (order.len() as u64 + 1);
        while now < 4 * round {
            now += step;
            turns = Turns::new(order.clone(), quantum, Some(turns), now);
            turns.go_on(|key| if rests[usize::from(*key)] { 0 } else { now }, now);
            let own: Vec<u8> = (0..4).filter(|key| turns.of(key) == Some(Turn::Own)).collect();
            prop_assert_eq!(own.len(), 1);
            last[usize::from(own[0])] = now;
            for key in &order {
                prop_assert!(now - last[usize::from(*key)] <= round, "{key} at {now}");
            }
        }
    }

    #[test]
    fn grants_respect_ceilings_and_guarantees(shares in vec(any_share(), 1..4)) {
        for (share, order) in shares.iter().zip(orders(&shares)) {
            let rate = order.rate.unwrap_or(NS_PER_SECOND).min(NS_PER_SECOND);
            prop_assert!(rate <= share.terms.ceiling.max(1) && rate >= share.terms.guarantee, "{order:?}");
            prop_assert!(!(order.is_asked && share.is_awake));
            prop_assert!(order.rate.is_some() || !share.is_limited);
        }
    }

    #[test]
    fn gated_share_gets_an_opening_each_second(pauses in vec((1..400_u64, 0..20_u64), 1..100)) {
        let start = 7 * NS_PER_SECOND;
        let (mut gate, mut now, mut open, mut last) = (Gate::default(), start, 0, start);
        for (works, rests) in pauses {
            for (keeps_out, ms) in [(true, works), (false, rests)] {
                for _ in 0..ms {
                    let (is_closed, _) = gate.is_closed(keeps_out, now);
                    now += MS;
                    open = if is_closed { open } else { open + MS };
                    if open >= OPENING {
                        (open, last) = (0, now);
                    }
                    prop_assert!(now - last <= NS_PER_SECOND + OPENING, "{} ms", (now - last) / MS);
                }
            }
        }
    }
}

#[test]
fn gate_reports_its_next_change() {
    let mut gate = Gate::default();
    assert_eq!(gate.is_closed(false, 5), (false, u64::MAX));
    assert_eq!(gate.is_closed(true, 10 * MS), (true, 1005 * MS));
    assert_eq!(gate.is_closed(true, 1005 * MS), (false, 1010 * MS));
    assert_eq!(gate.is_closed(true, 1010 * MS), (true, 2005 * MS));
}

#[test]
fn turns_rotate_and_an_idle_share_yields() {
    // Of 8 s: an eighth is 1 s, a third 2667 ms.
    let mut turns = Turns::new(vec!['a', 'b', 'c'], 8000 * MS, None, 0);
    let mut at = |now: u64, last: [u64; 3]| {
        let next = turns.go_on(|key| last[(*key as u8 - b'a') as usize] * MS, now * MS);
        ("abcx".chars().filter(|key| turns.of(key) != Some(Turn::Anothers)).collect::<String>(), next / MS)
    };
    assert_eq!(at(0, [0; 3]), ("ax".into(), 2666));
    assert_eq!(at(2600, [2600, 0, 0]), ("ax".into(), 3600));
    assert_eq!(at(7900, [7900, 0, 0]), ("ax".into(), 8000));
    assert_eq!(at(8000, [8000, 0, 0]), ("bx".into(), 10_666));
    assert_eq!(at(10_700, [8000, 0, 0]), ("cx".into(), 13_366));
    assert_eq!(at(11_000, [8000, 0, 11_000]), ("cx".into(), 13_366), "its first launch may be under way");
    assert_eq!(at(13_300, [8000, 0, 12_900]), ("cx".into(), 13_900));
    assert_eq!(at(13_900, [8000, 0, 12_900]), ("ax".into(), 16_566));
}

#[test]
fn a_short_turn_is_not_given_up_for_a_kernel() {
    let mut turns = Turns::new(vec!['a', 'b'], 600 * MS, None, 0);
    assert_eq!(turns.go_on(|_| 0, 0), 250 * MS);
    assert_eq!(turns.go_on(|_| 100 * MS, 240 * MS), 350 * MS, "no less than a quarter of a second");
}

#[test]
fn a_turn_goes_on_when_the_list_is_made_anew() {
    let mut turns = Turns::new(vec!['a', 'b'], 800 * MS, None, 0);
    turns.go_on(|_| 800 * MS, 800 * MS);
    let mut turns = Turns::new(vec!['c', 'b'], 400 * MS, Some(turns), 900 * MS);
    assert_eq!(turns.go_on(|_| 1190 * MS, 1190 * MS), 1200 * MS);
    assert_eq!((turns.of(&'c'), turns.of(&'b')), (Some(Turn::Anothers), Some(Turn::Own)));
    let mut turns = Turns::new(vec!['c', 'd'], 400 * MS, Some(turns), 1300 * MS);
    turns.go_on(|_| 1300 * MS, 1300 * MS);
    assert_eq!(turns.of(&'d'), Some(Turn::Anothers));
}
