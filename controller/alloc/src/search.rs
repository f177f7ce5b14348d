//! First-fit search with backtracking over all claims of a pod: claims and requests in order,
//! devices in order, and back if a later request finds no device.
//!
//! The order of the attempts is that of the scheduler, so the first solution is the same. All work
//! is counted in steps, so every search ends: one per device that is considered, per comparison of
//! a constraint, per capacity and per counter, and [`SELECTOR_STEPS`] per CEL evaluation.

use crate::allocations::Allocations;
use crate::capacity;
use crate::constraint::{Scalar, Verdict};
use crate::error::{AllocationError, CLAIM_DEVICES_MAX, Obstacle};
use crate::pool::{Candidate, Pools, State};
use crate::release::Release;
use crate::request::{Alternative, Count, ParsedClaim};
use crate::selectors::{MatchError, Matches, Selectors};
use crate::taint;
use divvy_api::Quantity;
use std::rc::Rc;

/// Limit of steps in one search, so that it ends within a second. A step takes up to 39 ns in a
/// release build (`cargo test --release -p divvy-alloc --test bounds`, two cores, 8 x H100).
const STEPS_MAX: usize = 10_000_000;

/// Steps of a CEL evaluation: up to 10 us in a release build.
const SELECTOR_STEPS: usize = 200;

/// A device that was picked for a request.
#[derive(Clone, Debug)]
pub(crate) struct Pick {
    pub(crate) slot: Slot,
    pub(crate) device: usize,
    /// The amounts of this share in the order of the device's capacities, for a device with multiple
    /// allocations.
    pub(crate) share: Option<Rc<[Quantity]>>,
}

/// Indices of a claim, of a request in it, and of an alternative in that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) claim: usize,
    pub(crate) request: usize,
    pub(crate) alternative: usize,
}

/// The input of a search.
pub(crate) struct Problem<'s, 'a> {
    pub(crate) pools: &'s Pools<'a>,
    pub(crate) allocations: &'s Allocations<'a>,
    pub(crate) claims: &'s [ParsedClaim<'a>],
    pub(crate) selectors: &'s Selectors<'a>,
    pub(crate) release: Release,
}

pub(crate) struct Search<'s, 'a> {
    problem: Problem<'s, 'a>,
    matches: Matches<'s, 'a>,
    /// By claim, request and alternative.
    slots: Vec<Vec<Vec<SlotState>>>,
    /// By claim and constraint: the attribute's value of each device.
    values: Vec<Vec<Vec<Scalar<'a>>>>,
    /// By claim.
    picks: Vec<Vec<Pick>>,
    devices: Vec<DeviceState>,
    pools: Vec<PoolState>,
    steps: usize,
    /// The claim and the number of devices of the attempt that exceeded [`CLAIM_DEVICES_MAX`] least.
    exceeded: Option<(usize, usize)>,
}

#[derive(Default)]
struct SlotState {
    /// The devices for `All`.
    all: Vec<usize>,
    /// By device: the facts that do not depend on picks.
    fits: Vec<Option<Fit>>,
    /// By constraint of the claim.
    covered: Vec<bool>,
}

/// How a device fits a request before any pick.
#[derive(Clone)]
struct Fit {
    /// The class, a selector or a capacity rejects the device.
    rejected: Option<Obstacle>,
    taint: Option<Obstacle>,
    taken: Rc<[Quantity]>,
}

/// The part of a device that the picks hold.
#[derive(Clone, Default)]
struct DeviceState {
    /// Claims that hold the device exclusively.
    holders: Vec<usize>,
    shares: usize,
    /// In nano-units, by capacity.
    amounts: Vec<i128>,
}

struct PoolState {
    /// In nano-units, by counter.
    left: Vec<i128>,
    /// Number of negative counters.
    negative: usize,
}

enum Outcome {
    Done,
    Failed,
    /// Nothing that was tried stays within the limit of devices in a claim.
    Exceeded,
}

impl<'s, 'a> Search<'s, 'a> {
    /// Prepares a search. As in the scheduler, requests for all devices are evaluated first.
    pub(crate) fn new(problem: Problem<'s, 'a>) -> Result<Self, AllocationError> {
        let devices = problem.pools.devices.len();
        let value = |constraint: &crate::constraint::Constraint<'_>| {
            problem.pools.devices.iter().map(|device| constraint.value(problem.release, device)).collect()
        };
        let values = problem.claims.iter().map(|claim| claim.constraints.iter().map(value).collect());
        let slot = |claim: &ParsedClaim<'_>, alternative: &Alternative<'_>| SlotState {
            covered: claim
                .constraints
                .iter()
                .map(|constraint| constraint.covers(alternative.names()))
                .collect(),
            ..SlotState::default()
        };
        let slots = problem.claims.iter().map(|claim| {
            let of = |alternatives: &[Alternative<'_>]| {
                alternatives.iter().map(|alternative| slot(claim, alternative)).collect()
            };
            claim.requests.iter().map(|request| of(&request.alternatives)).collect()
        });
        let pool = |pool: &crate::pool::Pool<'_>| PoolState {
            left: pool.available.clone(),
            negative: pool.available.iter().filter(|left| **left < 0).count(),
        };
        let mut search = Self {
            matches: Matches::new(problem.selectors, devices),
            slots: slots.collect(),
            values: values.collect(),
            picks: vec![Vec::new(); problem.claims.len()],
            devices: vec![DeviceState::default(); devices],
            pools: problem.pools.pools.iter().map(pool).collect(),
            steps: 0,
            exceeded: None,
            problem,
        };
        for claim in 0..search.problem.claims.len() {
            search.prepare(claim)?;
        }
        Ok(search)
    }

    /// Evaluates the requests of a claim for all devices, and checks its least number of devices.
    fn prepare(&mut self, claim: usize) -> Result<(), AllocationError> {
        let parsed = &self.problem.claims[claim];
        let mut needs = 0usize;
        for (request, wanted) in parsed.requests.iter().enumerate() {
            let mut least = usize::MAX;
            for alternative in 0..wanted.alternatives.len() {
                let slot = Slot { claim, request, alternative };
                if self.alternative(slot).count == Count::All {
                    let all = self.find_all(slot)?;
                    self.slots[claim][request][alternative].all = all;
                }
                least = least.min(self.wanted(slot));
            }
            needs = needs.saturating_add(least);
        }
        match needs > CLAIM_DEVICES_MAX {
            true => Err(AllocationError::TooMany { claim: parsed.claim.clone(), devices: needs }),
            false => Ok(()),
        }
    }

    /// The picks of the first solution by claim, or `None`.
    pub(crate) fn run(&mut self) -> Result<Option<Vec<Vec<Pick>>>, AllocationError> {
        match self.solve_request(0, 0)? {
            Outcome::Done => Ok(Some(std::mem::take(&mut self.picks))),
            Outcome::Failed => Ok(None),
            Outcome::Exceeded => {
                let (claim, devices) = self.exceeded.unwrap_or((0, CLAIM_DEVICES_MAX + 1));
                Err(AllocationError::TooMany { claim: self.problem.claims[claim].claim.clone(), devices })
            }
        }
    }

    /// Starts counting steps anew, to explain a failed search.
    pub(crate) fn restart(&mut self) {
        self.steps = 0;
    }

    pub(crate) fn problem(&self) -> &Problem<'s, 'a> {
        &self.problem
    }

    pub(crate) fn alternative(&self, slot: Slot) -> &'s Alternative<'a> {
        &self.problem.claims[slot.claim].requests[slot.request].alternatives[slot.alternative]
    }

    /// The number of devices that a request needs.
    pub(crate) fn wanted(&self, slot: Slot) -> usize {
        match self.alternative(slot).count {
            Count::Exactly(count) => count,
            Count::All => self.state(slot).all.len(),
        }
    }

    fn state(&self, slot: Slot) -> &SlotState {
        &self.slots[slot.claim][slot.request][slot.alternative]
    }

    fn charge(&mut self, slot: Slot, steps: usize) -> Result<(), AllocationError> {
        self.steps = self.steps.saturating_add(steps);
        match self.steps > STEPS_MAX {
            true => Err(AllocationError::GaveUp { claim: self.claim_name(slot), steps: STEPS_MAX }),
            false => Ok(()),
        }
    }

    fn claim_name(&self, slot: Slot) -> String {
        self.problem.claims[slot.claim].claim.clone()
    }

    /// Solves a request, and all requests and claims after it.
    fn solve_request(&mut self, claim: usize, request: usize) -> Result<Outcome, AllocationError> {
        let claims = self.problem.claims;
        let Some(parsed) = claims.get(claim) else {
            return Ok(Outcome::Done);
        };
        let Some(wanted) = parsed.requests.get(request) else {
            // A claim that exceeds the limit may not do so after other picks for earlier claims.
            return Ok(match self.solve_request(claim + 1, 0)? {
                Outcome::Exceeded => Outcome::Failed,
                outcome => outcome,
            });
        };
        let mut exceeded = true;
        for alternative in 0..wanted.alternatives.len() {
            match self.solve_devices(Slot { claim, request, alternative }, 0, 0)? {
                Outcome::Done => return Ok(Outcome::Done),
                Outcome::Failed => exceeded = false,
                Outcome::Exceeded => {}
            }
        }
        Ok(if exceeded { Outcome::Exceeded } else { Outcome::Failed })
    }

    /// Picks the remaining devices of a request, from an index on, and solves all requests after it.
    fn solve_devices(&mut self, slot: Slot, picked: usize, from: usize) -> Result<Outcome, AllocationError> {
        self.charge(slot, 1)?;
        let is_all = self.alternative(slot).count == Count::All;
        let wanted = self.wanted(slot);
        if is_all && wanted == 0 {
            return Ok(Outcome::Failed);
        }
        if picked >= wanted {
            return self.solve_request(slot.claim, slot.request + 1);
        }
        let total = self.picks[slot.claim].len().saturating_add(wanted - picked);
        if total > CLAIM_DEVICES_MAX {
            if self.exceeded.is_none_or(|(_, least)| total < least) {
                self.exceeded = Some((slot.claim, total));
            }
            return Ok(Outcome::Exceeded);
        }
        if is_all {
            // The order is irrelevant, so only the next device is tried.
            let device = self.state(slot).all[picked];
            if !self.pick(slot, device, true)? {
                return Ok(Outcome::Failed);
            }
            let outcome = self.solve_devices(slot, picked + 1, 0)?;
            if !matches!(outcome, Outcome::Done) {
                self.undo(slot);
            }
            return Ok(outcome);
        }
        for device in from..self.devices.len() {
            if !self.pick(slot, device, false)? {
                continue;
            }
            match self.solve_devices(slot, picked + 1, device + 1)? {
                Outcome::Done => return Ok(Outcome::Done),
                outcome => {
                    self.undo(slot);
                    if matches!(outcome, Outcome::Exceeded) {
                        return Ok(outcome);
                    }
                }
            }
        }
        Ok(Outcome::Failed)
    }

    /// The devices for `All`: every selected device whose empty capacity suffices.
    fn find_all(&mut self, slot: Slot) -> Result<Vec<usize>, AllocationError> {
        if let Some(pool) = self.problem.pools.pools.iter().find(|pool| pool.state != State::Usable) {
            return Err(AllocationError::AllOfPool {
                claim: self.claim_name(slot),
                request: self.alternative(slot).name.clone(),
                pool: format!("{}/{}", pool.driver, pool.name),
            });
        }
        let mut devices = Vec::new();
        for device in 0..self.devices.len() {
            self.charge(slot, 1)?;
            if self.fit(slot, device)?.rejected.is_none() {
                devices.push(device);
            }
        }
        Ok(devices)
    }

    /// Picks a device if it has no obstacle. `is_all`: the request needs exactly this device, so the
    /// scheduler stops if a constraint excludes it.
    fn pick(&mut self, slot: Slot, device: usize, is_all: bool) -> Result<bool, AllocationError> {
        match self.obstacle(slot, device)? {
            None => {}
            Some(Obstacle::Constraint) if is_all => {
                let name = self.problem.pools.devices[device].key.device;
                return Err(AllocationError::Request {
                    claim: self.claim_name(slot),
                    request: self.alternative(slot).name.clone(),
                    cause: format!("it requests all devices, but a constraint excludes device {name}"),
                });
            }
            Some(_) => return Ok(false),
        }
        let taken = Rc::clone(&self.fit(slot, device)?.taken);
        if self.pays_counters(device) {
            self.charge_counters(device, -1);
        }
        let state = &mut self.devices[device];
        let share = self.problem.pools.devices[device].multiple.then_some(taken);
        match &share {
            Some(taken) => {
                state.shares += 1;
                state.amounts.resize(taken.len(), 0);
                for (sum, amount) in state.amounts.iter_mut().zip(taken.iter()) {
                    *sum = sum.saturating_add(amount.as_nano());
                }
            }
            None => state.holders.push(slot.claim),
        }
        self.picks[slot.claim].push(Pick { slot, device, share });
        Ok(true)
    }

    /// Undoes the last pick of a claim.
    fn undo(&mut self, slot: Slot) {
        let Some(pick) = self.picks[slot.claim].pop() else { return };
        let state = &mut self.devices[pick.device];
        match &pick.share {
            Some(taken) => {
                state.shares -= 1;
                for (sum, amount) in state.amounts.iter_mut().zip(taken.iter()) {
                    *sum = sum.saturating_sub(amount.as_nano());
                }
            }
            None => drop(state.holders.pop()),
        }
        if self.pays_counters(pick.device) {
            self.charge_counters(pick.device, 1);
        }
    }

    /// Whether an allocation of the device consumes its counters. A device with multiple allocations
    /// pays once, with its first share.
    fn pays_counters(&self, device: usize) -> bool {
        let candidate = &self.problem.pools.devices[device];
        let first =
            || self.devices[device].shares == 0 && self.problem.allocations.shared(&candidate.key).is_none();
        !candidate.counters.is_empty() && (!candidate.multiple || first())
    }

    /// Adds the device's counters `times` times to the remainders of its pool.
    fn charge_counters(&mut self, device: usize, times: i128) {
        let candidate = &self.problem.pools.devices[device];
        let pool = &mut self.pools[candidate.pool];
        for (counter, amount) in &candidate.counters {
            let left = &mut pool.left[*counter];
            let before = *left < 0;
            *left = left.saturating_add(amount.saturating_mul(times));
            match (before, *left < 0) {
                (false, true) => pool.negative += 1,
                (true, false) => pool.negative -= 1,
                _ => {}
            }
        }
    }

    /// The first obstacle to adding a device to the picks.
    pub(crate) fn obstacle(
        &mut self,
        slot: Slot,
        device: usize,
    ) -> Result<Option<Obstacle>, AllocationError> {
        self.charge(slot, 1)?;
        let candidate = &self.problem.pools.devices[device];
        if self.is_in_use(slot, device, candidate) {
            return Ok(Some(Obstacle::InUse));
        }
        let fit = self.fit(slot, device)?;
        if let Some(rejected) = &fit.rejected {
            return Ok(Some(rejected.clone()));
        }
        let (taken, taint) = (Rc::clone(&fit.taken), fit.taint.clone());
        self.charge(slot, taken.len() + candidate.counters.len())?;
        if !self.has_capacity(device, candidate, &taken) {
            return Ok(Some(Obstacle::Capacity));
        }
        if self.pays_counters(device) {
            self.charge_counters(device, -1);
            // As in the scheduler, one negative counter makes the whole pool unavailable.
            let enough = self.pools[candidate.pool].negative == 0;
            self.charge_counters(device, 1);
            if !enough {
                return Ok(Some(Obstacle::Counters));
            }
        }
        if taint.is_some() {
            return Ok(taint);
        }
        Ok((!self.is_allowed(slot, device)?).then_some(Obstacle::Constraint))
    }

    /// Whether an exclusive device is taken. adminAccess ignores other claims, but a claim cannot
    /// pick the device twice.
    fn is_in_use(&self, slot: Slot, device: usize, candidate: &Candidate<'a>) -> bool {
        let (state, allocations) = (&self.devices[device], self.problem.allocations);
        if self.alternative(slot).admin {
            return state.holders.contains(&slot.claim);
        }
        let former_shares = || {
            self.problem.release.respects_former_shares()
                && !candidate.multiple
                && allocations.shared(&candidate.key).is_some()
        };
        !state.holders.is_empty() || allocations.is_dedicated(&candidate.key) || former_shares()
    }

    fn has_capacity(&self, device: usize, candidate: &Candidate<'_>, taken: &[Quantity]) -> bool {
        let amounts = &self.devices[device].amounts;
        let picked = |index| amounts.get(index).copied().unwrap_or(0);
        candidate.capacity.values().enumerate().zip(taken).all(|((index, capacity), taken)| {
            let sum = candidate.held[index].saturating_add(picked(index)).saturating_add(taken.as_nano());
            sum <= capacity.value()
        })
    }

    /// Whether all constraints of the claim allow the device beside the claim's picks.
    fn is_allowed(&mut self, slot: Slot, device: usize) -> Result<bool, AllocationError> {
        let parsed = &self.problem.claims[slot.claim];
        self.charge(slot, parsed.constraints.len() * (1 + self.picks[slot.claim].len()))?;
        for (index, constraint) in parsed.constraints.iter().enumerate() {
            if !self.state(slot).covered[index] {
                continue;
            }
            let values = &self.values[slot.claim][index];
            let covered = self.picks[slot.claim].iter().filter(|pick| self.state(pick.slot).covered[index]);
            let picked = covered.map(|pick| values[pick.device]);
            match constraint.verdict(self.problem.release, values[device], picked) {
                Verdict::Allowed => {}
                Verdict::Excluded => return Ok(false),
                Verdict::Unsupported => {
                    let name = self.problem.pools.devices[device].key.device;
                    return Err(AllocationError::Request {
                        claim: self.claim_name(slot),
                        request: self.alternative(slot).name.clone(),
                        cause: format!("a constraint does not support the list attribute of device {name}"),
                    });
                }
            }
        }
        Ok(true)
    }

    /// The facts about a device that do not depend on picks.
    fn fit(&mut self, slot: Slot, device: usize) -> Result<&Fit, AllocationError> {
        let fits = &self.state(slot).fits;
        if fits.get(device).is_none_or(Option::is_none) {
            let found = self.find_fit(slot, device)?;
            let count = self.devices.len();
            let fits = &mut self.slots[slot.claim][slot.request][slot.alternative].fits;
            fits.resize(count, None);
            fits[device] = Some(found);
        }
        let known = self.state(slot).fits[device].as_ref();
        Ok(known.expect("it was computed above"))
    }

    fn find_fit(&mut self, slot: Slot, device: usize) -> Result<Fit, AllocationError> {
        let alternative = self.alternative(slot);
        let candidate = &self.problem.pools.devices[device];
        let rejected = |obstacle| Fit { rejected: Some(obstacle), taint: None, taken: Rc::new([]) };
        if !self.selects(slot, &alternative.class_selectors, device)? {
            let class = alternative.class.metadata.name.clone().unwrap_or_default();
            return Ok(rejected(Obstacle::Class { class }));
        }
        if !self.selects(slot, &alternative.selectors, device)? || !candidate.here {
            return Ok(rejected(Obstacle::Selector));
        }
        let taken = capacity::consumed(
            self.problem.release,
            candidate.key.driver,
            &candidate.capacity,
            &alternative.capacity,
        );
        let taken = taken.map_err(|cause| AllocationError::Request {
            claim: self.claim_name(slot),
            request: alternative.name.clone(),
            cause: format!("device {}: {cause}", candidate.key.device),
        })?;
        let within = |taken: &Vec<Quantity>| {
            candidate
                .capacity
                .values()
                .zip(taken)
                .all(|(capacity, taken)| taken.as_nano() <= capacity.value())
        };
        let Some(taken) = taken.filter(within) else {
            return Ok(rejected(Obstacle::Capacity));
        };
        let taint = taint::untolerated(candidate.wire.taints.as_ref(), alternative.tolerations);
        let taint = taint.map(|taint| Obstacle::Taint { key: taint.key.clone() });
        Ok(Fit { rejected: None, taint, taken: taken.into() })
    }

    /// Whether all of the expressions select the device.
    fn selects(&mut self, slot: Slot, selectors: &[usize], device: usize) -> Result<bool, AllocationError> {
        let candidate = &self.problem.pools.devices[device];
        for selector in selectors {
            if !self.matches.is_known(*selector, device) {
                self.charge(slot, SELECTOR_STEPS)?;
            }
            let error = match self.matches.matches(*selector, device, candidate) {
                Ok(true) => continue,
                Ok(false) => return Ok(false),
                Err(error) => error,
            };
            let (claim, request) = (self.claim_name(slot), self.alternative(slot).name.clone());
            let device = candidate.key.device.to_owned();
            return Err(match error {
                MatchError::Compile(cause) => AllocationError::Request { claim, request, cause },
                MatchError::Evaluate(cause) => AllocationError::Selector { claim, request, device, cause },
            });
        }
        Ok(true)
    }
}
