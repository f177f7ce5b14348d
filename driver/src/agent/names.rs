//! Samples of a GPU's time that name one process each, and what is known by them: pure.
//!
//! Where processes take turns on a GPU, NVML may say of each sample what all of them had, and
//! name one of them, with as much chance as it had of it ([`divvy_nvml::ProcessTimes::divides`]). Of a share that works alone that
//! is as good as its own. Beside others it is five throws of dice a second, which tell after minutes who had what and before
//! that nothing; so what they had together is all that is known, as it is of a MIG instance.

use super::arbiter::SECOND;
use super::look::Look;
use super::meter::{Metered, Times, time};
use divvy_api::{ClaimUid, ShareId};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

type Key = (ClaimUid, ShareId);

/// Whoever worked within that time may work still where samples name one process: of five a second none may name one that has a third,
/// and says nothing, for a second or two.
const LATELY: Duration = Duration::from_secs(5);
/// What is remembered of a GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    /// NVML's samples were seen to say what each process had. Until then they may name one each, as those of most GPUs do: of a share
    /// that has the most of it all of five may name no other, and what is taken for each one's own would be wrong by half.
    pub(super) divides: bool,
    /// When a share was last seen to work, by its word or by samples; `None`: somebody without one.
    worked: BTreeMap<Option<Key>, Instant>,
}

/// What all processes of the GPU had together, in nanoseconds a second, where NVML's samples name one process each, and more than
/// one share or somebody without one is at work: then nobody's own is known.
pub(super) fn together(
    look: &Look,
    times: &Times,
    divides: Option<bool>,
    metered: &mut [Metered],
    memory: &mut Memory,
    now: Instant,
) -> Option<u64> {
    memory.divides = divides.unwrap_or(memory.divides);
    let times = times.as_ref().filter(|_| !memory.divides)?;
    let mut of_gpu: Vec<_> =
        look.shares.iter().zip(metered).filter(|(share, _)| share.policy.mig.is_none()).collect();
    let works = |metered: &Metered| {
        metered.busy.is_some_and(|busy| busy > 0) || metered.said.is_some_and(|(charged, _)| charged > 0)
    };
    let at_work = of_gpu.iter().filter(|(_, metered)| works(metered)).map(|(share, _)| Some(share.key()));
    let others = times.keys().any(|pid| is_of_none(look, *pid)).then_some(None);
    let at_work: Vec<_> = at_work.chain(others).collect();
    let is_sole = at_work.len() == 1;
    memory.worked.extend(at_work.into_iter().map(|who| (who, now)));
    let is_there = |who: &Option<Key>| {
        who.as_ref().is_none_or(|key| of_gpu.iter().any(|(share, _)| share.key() == *key))
    };
    memory.worked.retain(|who, at| is_there(who) && now.duration_since(*at) < LATELY);
    if memory.worked.len() < 2 {
        return None;
    }
    for (_, metered) in &mut of_gpu {
        metered.is_sole = is_sole && works(metered);
        metered.named = metered.busy.take();
    }
    Some(times.values().map(|percent| time(*percent)).sum::<u64>().min(SECOND))
}

/// Whoever has ended is of none either.
fn is_of_none(look: &Look, pid: u32) -> bool {
    look.processes.get(&pid).is_none_or(|process| look.shares_of(process).is_empty())
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::*;

    fn times(all: &[(u32, u32)]) -> Times {
        Some(all.iter().copied().collect())
    }

    #[test]
    fn where_samples_name_one_process_what_one_of_several_had_is_not_known_and_what_all_had_is() {
        let mut scene = Scene::share(10_000);
        scene
            .second_share(10_000)
            .process(7)
            .has(CONTEXT)
            .slot(7, CONTEXT)
            .process(8)
            .elsewhere_cgroup()
            .sees("");
        let look = scene.look();
        let says = |busy: u64, charged: u64| Metered {
            busy: Some(busy * SECOND / 100),
            said: Some((charged * SECOND / 100, 0)),
            ..Metered::default()
        };
        let now = Instant::now();
        // Of the shares what each is told to have had and says it had, and of whom samples tell.
        let check = |divides: Option<bool>,
                     all: [(u64, u64); 2],
                     told: &[(u32, u32)],
                     expected: Option<u64>| {
            let mut metered = all.map(|(busy, charged)| says(busy, charged));
            let mut memory = Memory::default();
            let whole = together(&look, &times(told), divides, &mut metered, &mut memory, now);
            assert_eq!(whole.map(|whole| whole / (SECOND / 100)), expected, "{divides:?} {all:?} {told:?}");
            assert!(metered.iter().all(|metered| metered.busy.is_none() == expected.is_some()));
        };
        let (both, one) = ([(60, 30), (20, 50)], [(80, 30), (0, 50)]);
        check(Some(false), both, &[(7, 60), (9, 20)], Some(80));
        check(Some(false), one, &[(7, 80)], Some(80));
        check(Some(true), both, &[(7, 80)], None);
        // Nothing was seen of it yet.
        check(None, both, &[(7, 80)], Some(80));
        // One works alone, or beside somebody without a share.
        check(Some(false), [(30, 30), (0, 0)], &[(7, 30)], None);
        check(Some(false), [(30, 30), (0, 0)], &[(7, 30), (8, 40)], Some(70));
        // What was seen once holds.
        for divides in [true, false] {
            let mut memory = Memory::default();
            let mut metered = one.map(|(busy, charged)| says(busy, charged));
            together(&look, &times(&[(7, 60), (8, 20)]), Some(divides), &mut metered, &mut memory, now);
            let mut metered = one.map(|(busy, charged)| says(busy, charged));
            let whole = together(&look, &times(&[(7, 80)]), None, &mut metered, &mut memory, now);
            assert_eq!(whole.is_none(), divides);
        }
        // Nobody named the other one for a second, which says nothing: it may have had as much all the same.
        let mut memory = Memory::default();
        let mut metered = one.map(|(busy, charged)| says(busy, charged));
        together(&look, &times(&[(7, 60), (8, 20)]), Some(false), &mut metered, &mut memory, now);
        let mut alone = |after: u64| {
            let mut metered = [(80, 30), (0, 0)].map(|(busy, charged)| says(busy, charged));
            let now = now + Duration::from_secs(after);
            together(&look, &times(&[(7, 80)]), None, &mut metered, &mut memory, now).is_none()
        };
        assert_eq!([alone(1), alone(4), alone(6)], [false, false, true]);
    }
}
