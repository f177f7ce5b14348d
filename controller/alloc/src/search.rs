//! First-fit search with backtracking: requests in order, devices in order, and back if a later
//! request finds no device. The list of picks is the only state; every check evaluates it anew, so
//! undoing a pick only removes it.

use crate::allocations::{Allocations, Amounts, add};
use crate::capacity;
use crate::error::{AllocationError, CLAIM_DEVICES_MAX, Obstacle};
use crate::pool::{Candidate, Pools, State};
use crate::request::{Alternative, Count, ParsedClaim};
use crate::taint;
use std::collections::{BTreeMap, BTreeSet};

/// Limit of attempts to pick a device in one search. It bounds the work independently of time.
const ATTEMPTS_MAX: usize = 500_000;

/// A device that was picked for a request.
#[derive(Clone, Debug)]
pub(crate) struct Pick<'a> {
    pub(crate) request: usize,
    pub(crate) alternative: usize,
    pub(crate) device: usize,
    /// The amounts of this share, for a device with multiple allocations.
    pub(crate) share: Option<Amounts<'a>>,
}

pub(crate) struct Search<'s, 'a> {
    pub(crate) pools: &'s Pools<'a>,
    pub(crate) allocations: &'s Allocations<'a>,
    pub(crate) parsed: &'s ParsedClaim<'a>,
    picks: Vec<Pick<'a>>,
    /// Cached results of selectors by (request, alternative, device): they depend on nothing else.
    selected: BTreeMap<(usize, usize, usize), Option<Obstacle>>,
    attempts: usize,
}

/// Index of a request, and of an alternative in it.
pub(crate) type AlternativeIndex = (usize, usize);

impl<'s, 'a> Search<'s, 'a> {
    pub(crate) fn new(
        pools: &'s Pools<'a>,
        allocations: &'s Allocations<'a>,
        parsed: &'s ParsedClaim<'a>,
    ) -> Result<Self, AllocationError> {
        let least = |alternative: &Alternative<'_>| match alternative.count {
            Count::Exactly(count) => count,
            Count::All => 1,
        };
        let needs =
            parsed.requests.iter().map(|request| request.alternatives.iter().map(least).min().unwrap_or(0));
        let needs = needs.fold(0usize, usize::saturating_add);
        if needs > CLAIM_DEVICES_MAX {
            return Err(AllocationError::TooMany { claim: parsed.claim.clone(), devices: needs });
        }
        Ok(Self { pools, allocations, parsed, picks: Vec::new(), selected: BTreeMap::new(), attempts: 0 })
    }

    /// The picks of the first solution, or `None`.
    pub(crate) fn run(&mut self) -> Result<Option<Vec<Pick<'a>>>, AllocationError> {
        self.picks.clear();
        Ok(self.solve_from(0)?.then(|| std::mem::take(&mut self.picks)))
    }

    pub(crate) fn alternative(&self, (request, alternative): AlternativeIndex) -> &'s Alternative<'a> {
        &self.parsed.requests[request].alternatives[alternative]
    }

    fn solve_from(&mut self, request: usize) -> Result<bool, AllocationError> {
        let Some(parsed) = self.parsed.requests.get(request) else {
            return Ok(true);
        };
        for alternative in 0..parsed.alternatives.len() {
            let slot = (request, alternative);
            let done = match parsed.alternatives[alternative].count {
                Count::Exactly(count) => self.pick_count(slot, count, 0)?,
                Count::All => {
                    let devices = self.all_of(slot)?;
                    !devices.is_empty() && self.pick_all(slot, &devices)?
                }
            };
            if done {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Picks `count` more devices for a request, starting at index `from`.
    fn pick_count(
        &mut self,
        slot: AlternativeIndex,
        count: usize,
        from: usize,
    ) -> Result<bool, AllocationError> {
        if count == 0 {
            return self.solve_from(slot.0 + 1);
        }
        if self.picks.len() + count > CLAIM_DEVICES_MAX {
            return Ok(false);
        }
        for device in from..self.pools.devices.len() {
            if self.pick(slot, device)? {
                if self.pick_count(slot, count - 1, device + 1)? {
                    return Ok(true);
                }
                self.picks.pop();
            }
        }
        Ok(false)
    }

    /// Picks exactly these devices. Their order is irrelevant, so there is no backtracking.
    fn pick_all(&mut self, slot: AlternativeIndex, devices: &[usize]) -> Result<bool, AllocationError> {
        let before = self.picks.len();
        let mut all = before + devices.len() <= CLAIM_DEVICES_MAX;
        for device in devices {
            all = all && self.pick(slot, *device)?;
        }
        if all && self.solve_from(slot.0 + 1)? {
            return Ok(true);
        }
        self.picks.truncate(before);
        Ok(false)
    }

    /// The devices for `All`: every selected device whose empty capacity suffices.
    pub(crate) fn all_of(&mut self, slot: AlternativeIndex) -> Result<Vec<usize>, AllocationError> {
        let alternative = self.alternative(slot);
        if let Some(pool) = self.pools.pools.iter().find(|pool| pool.state != State::Usable) {
            return Err(AllocationError::AllOfPool {
                claim: self.parsed.claim.clone(),
                request: alternative.name.clone(),
                pool: format!("{}/{}", pool.driver, pool.name),
            });
        }
        let mut devices = Vec::new();
        for index in 0..self.pools.devices.len() {
            let device = &self.pools.devices[index];
            let fits = || {
                let taken = capacity::consumed(&device.capacity, &alternative.capacity);
                taken.is_some_and(|taken| capacity::fits(&device.capacity, &taken))
            };
            if self.selector_obstacle(slot, index)?.is_none() && fits() {
                devices.push(index);
            }
        }
        Ok(devices)
    }

    /// Picks a device if it has no obstacle.
    fn pick(&mut self, slot: AlternativeIndex, device: usize) -> Result<bool, AllocationError> {
        self.attempts += 1;
        if self.attempts > ATTEMPTS_MAX {
            return Err(AllocationError::GaveUp { claim: self.parsed.claim.clone(), tries: ATTEMPTS_MAX });
        }
        if self.obstacle(slot, device)?.is_some() {
            return Ok(false);
        }
        let candidate = &self.pools.devices[device];
        let taken =
            || capacity::consumed(&candidate.capacity, &self.alternative(slot).capacity).unwrap_or_default();
        let share = candidate.multiple.then(taken);
        self.picks.push(Pick { request: slot.0, alternative: slot.1, device, share });
        Ok(true)
    }

    /// The first obstacle to adding a device to the picks.
    pub(crate) fn obstacle(
        &mut self,
        slot: AlternativeIndex,
        index: usize,
    ) -> Result<Option<Obstacle>, AllocationError> {
        let (alternative, device) = (self.alternative(slot), &self.pools.devices[index]);
        if self.is_in_use(alternative, index, device) {
            return Ok(Some(Obstacle::InUse));
        }
        if let Some(obstacle) = self.selector_obstacle(slot, index)? {
            return Ok(Some(obstacle));
        }
        if !self.has_capacity(alternative, index, device) {
            return Ok(Some(Obstacle::Capacity));
        }
        if !self.has_counters(index, device) {
            return Ok(Some(Obstacle::Counters));
        }
        if let Some(taint) = taint::untolerated(device.wire.taints.as_ref(), alternative.tolerations) {
            return Ok(Some(Obstacle::Taint { key: taint.key.clone() }));
        }
        let together = || {
            let picked = self.picks.iter().map(|pick| {
                (self.alternative((pick.request, pick.alternative)).names(), &self.pools.devices[pick.device])
            });
            picked.chain([(alternative.names(), device)])
        };
        let allowed = self.parsed.constraints.iter().all(|constraint| constraint.allows(together()));
        Ok((!allowed).then_some(Obstacle::Constraint))
    }

    /// Whether an exclusive device is taken. adminAccess ignores other claims, but a claim cannot
    /// pick the device twice.
    fn is_in_use(&self, alternative: &Alternative<'_>, index: usize, device: &Candidate<'a>) -> bool {
        let picked = !device.multiple && self.picks.iter().any(|pick| pick.device == index);
        picked || (!alternative.admin && self.allocations.is_dedicated(&device.key))
    }

    fn has_capacity(&self, alternative: &Alternative<'_>, index: usize, device: &Candidate<'a>) -> bool {
        let Some(mut sum) = capacity::consumed(&device.capacity, &alternative.capacity) else {
            return false;
        };
        let picked =
            self.picks.iter().filter(|pick| pick.device == index).filter_map(|pick| pick.share.as_ref());
        for (name, amount) in picked.chain(self.allocations.shared(&device.key)).flatten() {
            add(&mut sum, name, *amount);
        }
        capacity::fits(&device.capacity, &sum)
    }

    /// Whether the counters suffice. A device with multiple allocations is charged only once, with
    /// its first share.
    fn has_counters(&self, index: usize, device: &Candidate<'a>) -> bool {
        let shared_before = self.allocations.shared(&device.key).is_some()
            || self.picks.iter().any(|pick| pick.device == index);
        if device.counters.is_empty() || (device.multiple && shared_before) {
            return true;
        }
        let mut left = self.pools.pools[device.pool].available.clone();
        let mut paying: BTreeSet<usize> = self.picks.iter().map(|pick| pick.device).collect();
        paying.insert(index);
        for other in paying.iter().map(|index| &self.pools.devices[*index]).filter(|d| d.pool == device.pool)
        {
            if other.multiple && self.allocations.shared(&other.key).is_some() {
                continue;
            }
            for (counter, amount) in &other.counters {
                if let Some(left) = left.get_mut(counter) {
                    *left = left.saturating_sub(*amount);
                }
            }
        }
        // As in the scheduler, one negative counter makes the whole pool unavailable.
        left.values().all(|left| *left >= 0)
    }

    /// The obstacle that the selectors of class or request report, if any.
    fn selector_obstacle(
        &mut self,
        slot: AlternativeIndex,
        index: usize,
    ) -> Result<Option<Obstacle>, AllocationError> {
        let key = (slot.0, slot.1, index);
        if let Some(known) = self.selected.get(&key) {
            return Ok(known.clone());
        }
        let (alternative, device) = (self.alternative(slot), &self.pools.devices[index]);
        let matched = |selectors: &[crate::cel::Selector<'_>]| {
            for selector in selectors {
                match selector.matches(device) {
                    Ok(true) => {}
                    Ok(false) => return Ok(false),
                    Err(cause) => {
                        return Err(AllocationError::Selector {
                            claim: self.parsed.claim.clone(),
                            request: alternative.name.clone(),
                            device: device.key.device.to_owned(),
                            cause,
                        });
                    }
                }
            }
            Ok(true)
        };
        let obstacle = if !matched(&alternative.class_selectors)? {
            let class = alternative.class.metadata.name.clone().unwrap_or_default();
            Some(Obstacle::Class { class })
        } else if !matched(&alternative.selectors)? {
            Some(Obstacle::Selector)
        } else {
            None
        };
        self.selected.insert(key, obstacle.clone());
        Ok(obstacle)
    }
}
