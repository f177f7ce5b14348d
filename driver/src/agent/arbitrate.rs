//! What the arbiter goes by, from one look.
//!
//! [`super::arbiter`] and [`super::orders`] decide; here what each share had and was charged ([`super::meter`]) becomes
//! what it wants.
//!
//! Nothing is kept: the next agent begins with what the policies and the last grants say. Of a share that it sees for
//! the first time it knows only that it works, and takes it to want all that it may have.
//!
//! **Where NVML does not say what a share had**, as on a MIG instance of which several have parts, its own word says what it
//! wants, and nothing is corrected by that: who says that it rests gets less, and who says that it works gets
//! what its policy gives it beside those who do. So nobody gains by a lie, and others lose no more by it than if it were true.

use super::arbiter::{self, Company, SECOND, Seen, Terms};
use super::desk::Had;
use super::look::{Look, Share};
use super::meter::{Metered, Times, time};
use super::orders::{Sight, Standing};
use divvy_api::{ClaimUid, ShareId};
use std::collections::BTreeMap;

type Key = (ClaimUid, ShareId);

/// The priority of a share that precedes others, and above.
const HIGH: u32 = 1;

/// What a share was to have, in nanoseconds a second, of which NVML does not say what it had: what it was granted where it waited for more, else
/// no more than it says that it had.
pub(super) fn due(had: Option<&Had>, metered: &Metered) -> u64 {
    let (Some(had), Some((charged, waited))) = (had, metered.said) else { return 0 };
    let (granted, _) = had.memory.granted();
    let is_held = had.memory.is_held(Seen { busy: charged, charged, waited }, had.company);
    let likely = charged as f64 / had.memory.trim(had.company.is_beside).max(1.0);
    if is_held { granted.min(SECOND) } else { granted.min(likely as u64) }
}

/// Shares as they stand, by index. `joint` tells of one that has neighbours on its MIG instance by what factor its
/// kernels look longer, and whether their words explain what the instance had.
pub(super) fn standings(
    look: &Look,
    times: &Times,
    metered: &[Metered],
    had: &BTreeMap<Key, Had>,
    joint: impl Fn(&Share) -> Option<(f64, bool)>,
) -> Vec<Standing> {
    let all = times.iter().flat_map(BTreeMap::values).map(|percent| time(*percent)).sum::<u64>().min(SECOND);
    let standing = |(share, metered): (&Share, &Metered)| {
        let (charged, waited) = metered.said.unwrap_or_default();
        let busy = metered.busy.unwrap_or(charged);
        // Of an instance it is only known who has all of it.
        let all = if share.policy.mig.is_none() { all } else { busy };
        // Not what its own processes had of each other: with many of them that would explain anything. Nor does what
        // others have explain why one has nothing.
        let between = if busy > 0 { all.saturating_sub(busy) } else { 0 };
        let seen = Seen { busy, charged, waited };
        let compute = share.policy.compute;
        let terms = Terms::of(compute);
        let (sight, trim) = match (metered.busy, joint(share)) {
            (Some(_), _) => (Sight::Own, 1.0),
            (None, Some((trim, is_explained))) => (Sight::Together { is_explained }, trim),
            (None, None) => (Sight::Word, 1.0),
        };
        let (wants, memory) = match had.get(&share.key()) {
            // Who was kept out could not show what it wants.
            Some(had) => {
                let company = Company { between, ..had.company };
                let wants = terms.wants(seen, had.memory.is_held(seen, company));
                let memory = match sight {
                    Sight::Own => arbiter::corrected(had.memory, seen, company),
                    _ => had.memory.by_word(trim),
                };
                (wants.max(had.wanted.unwrap_or(0)), memory)
            }
            None => (if busy > 0 { terms.ceiling } else { 0 }, arbiter::Memory::default()),
        };
        let (is_high, is_limited) = (compute.priority >= HIGH, compute.is_limited());
        Standing { terms, is_high, is_limited, wants, is_awake: false, turn: None, sight, memory }
    };
    look.shares.iter().zip(metered).map(standing).collect()
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::super::meter::{Memory, meter};
    use super::super::orders::tests::orders;
    use super::*;
    use divvy_pages::{Compute, GpuUuid, Owner};
    use std::time::{Duration, Instant};

    const POINT: u64 = SECOND / 100;

    /// A share of 30 % whose process 7 has counted so much.
    fn look(charged: u64, waited: u64) -> Look {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(CONTEXT).slot(7, CONTEXT);
        let mut look = scene.look();
        look.shares[0].policy.compute = Compute { cores: 30, ceiling: 30, ..Compute::default() };
        let slots = look.shares[0].account.as_mut().expect("a page");
        let report = &mut slots.slots[0].report;
        (report.charged_ns, report.waited_ns) = (charged, waited);
        look
    }

    fn nothing(_: &Share) -> Option<(f64, bool)> {
        None
    }

    fn times(all: &[(u32, u32)]) -> Times {
        Some(all.iter().copied().collect())
    }

    /// After a first look, others two seconds apart: the rate of the share in points after the last.
    fn after(first: &Look, others: &[&Look], times: &Times) -> u64 {
        let mut at = Instant::now();
        let decided = |standings: &[Standing]| {
            let [standing] = standings else { panic!("one share") };
            orders(&[*standing])[0]
        };
        let idle = Some(BTreeMap::new());
        let (metered, _, mut memory) = meter(first, &idle, None, Memory::default(), at);
        let mut order = decided(&standings(first, &idle, &metered, &BTreeMap::new(), nothing));
        assert_eq!(order.rate, Some(30 * POINT));
        for look in others {
            at += Duration::from_secs(2);
            let had = [(first.shares[0].key(), Had { memory: order.memory, ..Had::default() })].into();
            let (metered, _, after) = meter(look, times, None, memory, at);
            (order, memory) = (decided(&standings(look, times, &metered, &had, nothing)), after);
        }
        order.rate.expect("it is limited") / POINT
    }

    #[test]
    fn what_a_share_was_to_have_is_what_it_was_granted_if_it_waited_and_else_no_more_than_it_says() {
        let terms = Terms { guarantee: 30 * POINT, ceiling: 30 * POINT, weight: 1 };
        let (_, memory) =
            arbiter::Memory::inherited([1.0, 1.5].map(f64::to_bits)).rate(terms, 30 * POINT, true);
        let company = Company { is_beside: true, lasted: SECOND, ..Company::default() };
        let had = Had { memory, company, ..Had::default() };
        let check = |said: Option<(u64, u64)>, expected: u64| {
            let said = said.map(|(charged, waited)| (charged * POINT, waited * POINT));
            let due = due(Some(&had), &Metered { said, ..Metered::default() });
            assert_eq!((due + POINT / 2) / POINT, expected, "{said:?}");
        };
        check(Some((24, 60)), 30);
        check(Some((45, 5)), 30);
        // By a trim of one and a half.
        check(Some((24, 0)), 16);
        check(Some((90, 0)), 30);
        check(None, 0);
        assert_eq!(due(None, &Metered { said: Some((SECOND, SECOND)), ..Metered::default() }), 0);
    }

    #[test]
    fn who_had_too_little_and_waited_gets_more_and_who_had_too_much_less() {
        let before = look(5, 5);
        let worked = |seconds: u64| look(5 + 30 * seconds * POINT, 5 + seconds * SECOND);
        let (two, four) = (worked(2), worked(4));
        let check = |looks: &[&Look], had: u32, expected: u64| {
            assert_eq!(after(&before, looks, &times(&[(7, had)])), expected, "{had}");
        };
        check(&[&two], 30, 30);
        check(&[&two], 60, 15);
        // Once may be its begin.
        check(&[&two], 25, 30);
        check(&[&two, &four], 25, 35);
        // It waited for nothing; another's time.
        let idle = look(5 + 50 * POINT, 5);
        check(&[&idle, &idle], 25, 30);
        assert_eq!(after(&before, &[&two, &four], &times(&[(8, 60)])), 30);
    }

    #[test]
    fn who_has_used_all_of_its_rate_and_waits_a_little_wants_all_that_it_may_have() {
        let (first, idle, at) = (look(5, 5), Some(BTreeMap::new()), Instant::now());
        let (metered, _, memory) = meter(&first, &idle, None, Memory::default(), at);
        let standing = standings(&first, &idle, &metered, &BTreeMap::new(), nothing)[0];
        let had =
            [(first.shares[0].key(), Had { memory: orders(&[standing])[0].memory, ..Had::default() })].into();
        // It waits for each launch: 20 % of the GPU, and 50 ms a second in launches.
        let wants = |charged: u64| {
            let second = look(5 + 2 * charged * POINT, 5 + 10 * POINT);
            let times = times(&[(7, 20)]);
            let (metered, ..) = meter(&second, &times, None, memory.clone(), at + Duration::from_secs(2));
            standings(&second, &times, &metered, &had, nothing)[0].wants / POINT
        };
        assert_eq!([wants(30), wants(20)], [30, 26]);
    }

    #[test]
    fn what_another_owner_of_the_slot_counted_is_not_counted() {
        let mut second = look(60 * POINT, 2 * SECOND);
        let slots = second.shares[0].account.as_mut().expect("a page");
        slots.slots[0].report.owner = Owner(slots.slots[0].report.owner.0 + (1 << 32));
        assert_eq!(after(&look(5, 5), &[&second, &second], &times(&[(7, 25)])), 30);
    }

    #[test]
    fn where_nvml_does_not_say_who_had_what_it_is_by_the_shares_own_word_and_corrects_nothing() {
        let begin = Instant::now();
        let at = |charged: u64, waited: u64| {
            let mut look = look(charged * POINT, waited * POINT);
            look.shares[0].policy.mig = Some(GpuUuid([7; 16]));
            look.shares[0].policy.compute = Compute { ceiling: 80, ..look.shares[0].policy.compute };
            look
        };
        let (_, _, memory) = meter(&at(0, 0), &None, None, Memory::default(), begin);
        let owes = arbiter::Memory::inherited([0.5f64, 3.0].map(f64::to_bits));
        let check =
            |charged: u64, waited: u64, joint: Option<(f64, bool)>, expected: (u64, Sight, [f64; 2])| {
                let look = at(charged, waited);
                let (metered, ..) = meter(&look, &None, None, memory.clone(), begin + Duration::from_secs(1));
                let had = [(look.shares[0].key(), Had { memory: owes, ..Had::default() })].into();
                let is = standings(&look, &None, &metered, &had, |_| joint)[0];
                let trims = [is.memory.trim(false), is.memory.trim(true)];
                assert_eq!((is.wants / POINT, is.sight, trims), expected, "{charged} {waited}");
            };
        check(0, 0, None, (0, Sight::Word, [0.5, 1.0]));
        check(20, 0, None, (26, Sight::Word, [0.5, 1.0]));
        check(30, 70, None, (80, Sight::Word, [0.5, 1.0]));
        check(30, 70, Some((1.5, true)), (80, Sight::Together { is_explained: true }, [0.5, 1.5]));
        check(30, 70, Some((1.5, false)), (80, Sight::Together { is_explained: false }, [0.5, 1.5]));
    }

    #[test]
    fn the_one_share_of_an_instance_is_held_to_what_the_instance_had_and_has_no_company() {
        const MIG: GpuUuid = GpuUuid([7; 16]);
        let at = |seconds: u64, busy: u64| {
            let mut look = look(30 * seconds * POINT, seconds * SECOND);
            look.shares[0].policy.mig = Some(MIG);
            look.uses[0].device.mig = Some(MIG);
            look.busy = [(MIG, busy * POINT)].into();
            look
        };
        // What NVML says of a process is not of an instance.
        let times = times(&[(8, 90)]);
        let begin = Instant::now();
        let (metered, _, memory) = meter(&at(0, 0), &times, None, Memory::default(), begin);
        let first = standings(&at(0, 0), &times, &metered, &BTreeMap::new(), nothing)[0];
        assert_eq!((first.sight, first.wants), (Sight::Word, 0), "it may be another's that was there before");
        let rate = |busy: u64| {
            let (mut memory, mut had, mut rate) = (memory.clone(), BTreeMap::new(), None);
            for second in 1..=2 {
                let look = at(second, busy);
                let now = begin + Duration::from_secs(second);
                let (metered, _, after) = meter(&look, &times, None, memory, now);
                let order = orders(&standings(&look, &times, &metered, &had, nothing))[0];
                had = [(look.shares[0].key(), Had { memory: order.memory, ..Had::default() })].into();
                (memory, rate) = (after, order.rate);
            }
            rate.expect("it is limited") / POINT
        };
        // Beside others a kernel may look longer than it is: not here.
        assert_eq!([rate(30), rate(60), rate(20)], [30, 15, 30]);
    }

    #[test]
    fn who_is_seen_for_the_first_time_and_who_was_kept_out_wants_what_it_may_have() {
        let look = look(0, 0);
        let wants = |had: &BTreeMap<Key, Had>, busy: u32| {
            let times = times(&[(7, busy)]);
            let (metered, ..) = meter(&look, &times, None, Memory::default(), Instant::now());
            standings(&look, &times, &metered, had, nothing)[0].wants / POINT
        };
        assert_eq!([wants(&BTreeMap::new(), 5), wants(&BTreeMap::new(), 0)], [30, 0]);
        let had = |wanted| {
            let had = Had { wanted, ..Had::default() };
            [(look.shares[0].key(), had)].into()
        };
        assert_eq!([wants(&had(None), 5), wants(&had(Some(20 * POINT)), 5)], [7, 20]);
    }
}
