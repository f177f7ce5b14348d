//! The recent grants and co-runners of a share, to be reported for exactly the time that NVML covers.
//!
//! NVML takes six samples a second, so its figures end up to a sixth of a second before a snapshot.
//! They start as long before the last one. Compared with the grants between two snapshots, a new
//! correction factor would seem too small for a third of that time and be raised again. A share that
//! has just become active would seem to lack the time before.

use crate::shares::scheduler::controller::{self, CoRunners};
use std::collections::VecDeque;

/// In less time than this, in nanoseconds, one sample more or less is too much of what NVML tells.
const SHORT: u64 = 300_000_000;
/// As many changes are remembered at most.
const MOST: usize = 1024;

/// PercentByPid in nanoseconds of any one clock.
#[derive(Debug)]
pub(crate) struct GrantHistory {
    /// The begin of the current summary.
    began: u64,
    spells: VecDeque<Spell>,
    /// When it came to rest or began.
    moves: VecDeque<u64>,
    /// There was one such change in the time that was told of last.
    has_changed: bool,
    has_moved: bool,
}

/// The grant that held from a moment on.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Spell {
    from: u64,
    granted: u64,
    allowed: u64,
    trim: f64,
    is_beside: bool,
}

impl GrantHistory {
    pub(crate) fn new(now: u64) -> Self {
        Self {
            began: now,
            spells: VecDeque::new(),
            moves: VecDeque::new(),
            has_changed: false,
            has_moved: false,
        }
    }

    /// Replaces all later entries by this grant, or by none if its gate is closed.
    pub(crate) fn holds(
        &mut self,
        memory: &controller::ControllerState,
        is_beside: bool,
        is_out: bool,
        now: u64,
    ) {
        while self.spells.back().is_some_and(|last| last.from > now) {
            self.spells.pop_back();
        }
        let (granted, allowed) = if is_out { (0, 0) } else { memory.granted() };
        let spell = Spell { from: now, granted, allowed, trim: memory.trim(is_beside), is_beside };
        if self.spells.back().is_none_or(|last| (Spell { from: now, ..*last }) != spell) {
            self.spells.push_back(spell);
        }
        if self.spells.len() > MOST {
            self.spells.pop_front();
        }
    }

    pub(crate) fn moves(&mut self, now: u64) {
        self.moves.push_back(now);
        if self.moves.len() > MOST {
            self.moves.pop_front();
        }
    }

    /// Means over the time since the previous call: granted and allowed time, and the co-runners.
    pub(crate) fn until(&mut self, until: u64) -> ((u64, u64), CoRunners) {
        let began = self.began;
        self.began = began.max(until);
        let passed = until.saturating_sub(began);
        let nexts = self.spells.iter().skip(1).map(|spell| spell.from).chain([until]);
        let spells: Vec<(Spell, u128)> = self
            .spells
            .iter()
            .zip(nexts)
            .map(|(spell, next)| (*spell, next.min(until).saturating_sub(spell.from.max(began)).into()))
            .collect();
        let mean = |of: fn(&Spell) -> u64| {
            let sum: u128 = spells.iter().map(|(spell, lasted)| lasted * u128::from(of(spell))).sum();
            u64::try_from(sum / u128::from(passed.max(1))).unwrap_or(u64::MAX)
        };
        let beside: u128 = spells.iter().filter(|(spell, _)| spell.is_beside).map(|(_, lasted)| lasted).sum();
        let is_beside = beside * 2 > passed.into();
        // Of what was granted it is the part that counts.
        let weighs = |(spell, lasted): &(Spell, u128)| *lasted as f64 * spell.granted as f64;
        let of_side = || spells.iter().filter(|(spell, _)| spell.is_beside == is_beside);
        let weight: f64 = of_side().map(weighs).sum();
        let sum: f64 = of_side().map(|spell| weighs(spell) * spell.0.trim).sum();
        let within = |at: u64| at > began && at <= until;
        let turns = self.spells.iter().zip(self.spells.iter().skip(1));
        let changes =
            turns.filter(|(one, next)| one.is_beside != next.is_beside && within(next.from)).count();
        let moves = self.moves.iter().filter(|at| within(**at)).count();
        // Intermittent shares, and shares beside them, are counted by their means.
        let had_changed = std::mem::replace(&mut self.has_changed, changes > 0);
        let had_moved = std::mem::replace(&mut self.has_moved, moves > 0);
        let company = CoRunners {
            is_beside,
            has_changed: passed < SHORT || changes == 1 && !had_changed,
            has_moved: moves == 1 && !had_moved,
            between: 0,
            lasted: passed,
            held: (weight > 0.0).then(|| sum / weight),
        };
        let granted = (mean(|spell| spell.granted), mean(|spell| spell.allowed));
        while self.spells.get(1).is_some_and(|next| next.from <= until) {
            self.spells.pop_front();
        }
        self.moves.retain(|at| *at > until);
        (granted, company)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::scheduler::controller::{ControllerState, Entitlement, NS_PER_SECOND};
    use proptest::collection::vec;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    const POINT: u64 = NS_PER_SECOND / 100;

    /// This grant in points, with this trim beside others.
    fn granted(points: u64, trim: f64) -> ControllerState {
        let terms = Entitlement { guarantee: points * POINT, ceiling: points * POINT, weight: 1 };
        ControllerState::inherited([1.0, trim].map(f64::to_bits)).rate(terms, points * POINT, true).1
    }

    #[test]
    fn history_reports_exactly_the_requested_time() {
        let mut past = GrantHistory::new(0);
        past.holds(&granted(30, 1.0), true, false, 0);
        past.holds(&granted(60, 2.0), true, false, 1000 * MS);
        let mut check = |until_ms: u64, points: u64, held: f64, lasted_ms: u64| {
            let ((granted, allowed), company) = past.until(until_ms * MS);
            assert_eq!([granted / POINT, allowed / POINT, company.lasted / MS], [points, points, lasted_ms]);
            assert!((company.held.expect("something held") - held).abs() < 1e-9, "{company:?}");
        };
        check(500, 30, 1.0, 500);
        // Half of the time, and two thirds of what was granted.
        check(1500, 45, 5.0 / 3.0, 1000);
        check(2000, 60, 2.0, 500);
    }

    #[test]
    fn gated_share_is_granted_nothing() {
        let mut past = GrantHistory::new(0);
        past.holds(&granted(30, 1.0), true, true, 0);
        past.holds(&granted(30, 1.5), true, false, 500 * MS);
        let ((granted, _), company) = past.until(1000 * MS);
        assert_eq!((granted, company.held), (15 * POINT, Some(1.5)));
    }

    #[test]
    fn many_changes_are_averaged() {
        let mut past = GrantHistory::new(0);
        let memory = granted(30, 1.0);
        past.holds(&memory, false, false, 0);
        past.holds(&memory, true, false, 700 * MS);
        past.moves(700 * MS);
        let told = |past: &mut GrantHistory, until_ms: u64| {
            let company = past.until(until_ms * MS).1;
            [company.is_beside, company.has_changed, company.has_moved]
        };
        assert_eq!(told(&mut past, 500), [false, false, false]);
        assert_eq!(told(&mut past, 1000), [true, true, true]);
        assert_eq!(told(&mut past, 1250), [true, true, false], "too short to go by");
        for ms in [1300, 1400] {
            past.moves(ms * MS);
            past.holds(&memory, ms == 1400, false, ms * MS);
        }
        assert_eq!(told(&mut past, 2000), [true, false, false]);
    }

    #[test]
    fn history_is_bounded() {
        let mut past = GrantHistory::new(0);
        for at in 0..10 * MOST as u64 {
            past.holds(&granted(30, 1.0), at % 2 == 0, false, at);
            past.moves(at);
        }
        assert!(past.spells.len() <= MOST && past.moves.len() <= MOST);
    }

    proptest! {
        #[test]
        fn history_reports_each_moment_once(steps in vec((1..500_u64, 1..=99_u64, 0..400_u64), 1..40)) {
            let (mut past, mut now, mut points) = (GrantHistory::new(0), 0, 50);
            past.holds(&granted(points, 1.0), true, false, now);
            let (mut told, mut held) = (0, 0);
            let mut ask = |past: &mut GrantHistory, until: u64| {
                let ((granted, _), company) = past.until(until);
                told += u128::from(granted) * u128::from(company.lasted);
            };
            for (ms, next, ago) in &steps {
                held += u128::from(points * POINT) * u128::from(ms * MS);
                (now, points) = (now + ms * MS, *next);
                past.holds(&granted(points, 1.0), true, false, now);
                ask(&mut past, now.saturating_sub(ago * MS));
            }
            ask(&mut past, now);
            // But for what a mean is rounded by.
            let rounded = u128::from(now) * (steps.len() as u128 + 1);
            prop_assert!(told <= held && held - told <= rounded, "{told} of {held}");
        }
    }
}
