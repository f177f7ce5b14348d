//! First fit with backtracking: requests in order, devices in order, and back
//! when a later request finds nothing.
//!
//! All that changes is the list of picks; every check is asked of that list
//! anew. Undoing a pick is removing it, so nothing can be left behind.

use crate::MOST_DEVICES;
use crate::capacity;
use crate::ledger::{Amounts, Ledger, add};
use crate::pool::{Candidate, Pools, State};
use crate::request::{Alternative, Asked, Count};
use crate::taint;
use crate::why::{Obstacle, WhyNot};
use std::collections::{BTreeMap, BTreeSet};

/// How often a device is tried before the search gives up.
const MOST_TRIES: usize = 500_000;

/// A device taken for a request.
#[derive(Clone, Debug)]
pub(crate) struct Pick<'a> {
    pub(crate) request: usize,
    pub(crate) alternative: usize,
    pub(crate) device: usize,
    /// Of a multi-allocation device, what this share takes.
    pub(crate) share: Option<Amounts<'a>>,
}

pub(crate) struct Search<'s, 'a> {
    pub(crate) pools: &'s Pools<'a>,
    pub(crate) ledger: &'s Ledger<'a>,
    pub(crate) asked: &'s Asked<'a>,
    picks: Vec<Pick<'a>>,
    /// Selectors depend on nothing but the device: (request, alternative, device).
    selected: BTreeMap<(usize, usize, usize), Option<Obstacle>>,
    tries: usize,
}

/// A place in the claim.
type Slot = (usize, usize);

impl<'s, 'a> Search<'s, 'a> {
    pub(crate) fn new(
        pools: &'s Pools<'a>,
        ledger: &'s Ledger<'a>,
        asked: &'s Asked<'a>,
    ) -> Result<Self, WhyNot> {
        let least = |alternative: &Alternative<'_>| match alternative.count {
            Count::Exactly(count) => count,
            Count::All => 1,
        };
        let needs =
            asked.requests.iter().map(|request| request.alternatives.iter().map(least).min().unwrap_or(0));
        let needs = needs.fold(0usize, usize::saturating_add);
        if needs > MOST_DEVICES {
            return Err(WhyNot::TooMany { claim: asked.claim.clone(), devices: needs });
        }
        Ok(Self { pools, ledger, asked, picks: Vec::new(), selected: BTreeMap::new(), tries: 0 })
    }

    /// The picks of the first solution.
    pub(crate) fn run(&mut self) -> Result<Option<Vec<Pick<'a>>>, WhyNot> {
        self.picks.clear();
        Ok(self.request(0)?.then(|| std::mem::take(&mut self.picks)))
    }

    pub(crate) fn alternative(&self, (request, alternative): Slot) -> &'s Alternative<'a> {
        &self.asked.requests[request].alternatives[alternative]
    }

    fn request(&mut self, request: usize) -> Result<bool, WhyNot> {
        let Some(asked) = self.asked.requests.get(request) else {
            return Ok(true);
        };
        for alternative in 0..asked.alternatives.len() {
            let slot = (request, alternative);
            let done = match asked.alternatives[alternative].count {
                Count::Exactly(count) => self.some(slot, count, 0)?,
                Count::All => {
                    let devices = self.all_of(slot)?;
                    !devices.is_empty() && self.each(slot, &devices)?
                }
            };
            if done {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// So many more devices for a request, looking from a device on.
    fn some(&mut self, slot: Slot, count: usize, from: usize) -> Result<bool, WhyNot> {
        if count == 0 {
            return self.request(slot.0 + 1);
        }
        if self.picks.len() + count > MOST_DEVICES {
            return Ok(false);
        }
        for device in from..self.pools.devices.len() {
            if self.pick(slot, device)? {
                if self.some(slot, count - 1, device + 1)? {
                    return Ok(true);
                }
                self.picks.pop();
            }
        }
        Ok(false)
    }

    /// Exactly these devices; their order decides nothing.
    fn each(&mut self, slot: Slot, devices: &[usize]) -> Result<bool, WhyNot> {
        let before = self.picks.len();
        let mut all = before + devices.len() <= MOST_DEVICES;
        for device in devices {
            all = all && self.pick(slot, *device)?;
        }
        if all && self.request(slot.0 + 1)? {
            return Ok(true);
        }
        self.picks.truncate(before);
        Ok(false)
    }

    /// What `All` means: every device that is selected and big enough when empty.
    pub(crate) fn all_of(&mut self, slot: Slot) -> Result<Vec<usize>, WhyNot> {
        let alternative = self.alternative(slot);
        if let Some(pool) = self.pools.pools.iter().find(|pool| pool.state != State::Usable) {
            return Err(WhyNot::AllOfPool {
                claim: self.asked.claim.clone(),
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
            if self.selection(slot, index)?.is_none() && fits() {
                devices.push(index);
            }
        }
        Ok(devices)
    }

    /// Takes a device if nothing stands in its way.
    fn pick(&mut self, slot: Slot, device: usize) -> Result<bool, WhyNot> {
        self.tries += 1;
        if self.tries > MOST_TRIES {
            return Err(WhyNot::GaveUp { claim: self.asked.claim.clone(), tries: MOST_TRIES });
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

    /// The first thing that keeps a device from being added to the picks.
    pub(crate) fn obstacle(&mut self, slot: Slot, index: usize) -> Result<Option<Obstacle>, WhyNot> {
        let (alternative, device) = (self.alternative(slot), &self.pools.devices[index]);
        if self.is_in_use(alternative, index, device) {
            return Ok(Some(Obstacle::InUse));
        }
        if let Some(obstacle) = self.selection(slot, index)? {
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
                (self.alternative((pick.request, pick.alternative)), &self.pools.devices[pick.device])
            });
            picked.chain([(alternative, device)])
        };
        let allowed = self.asked.constraints.iter().all(|constraint| constraint.allows(together()));
        Ok((!allowed).then_some(Obstacle::Constraint))
    }

    /// A device of one holder: adminAccess looks past other claims, not past its own.
    fn is_in_use(&self, alternative: &Alternative<'_>, index: usize, device: &Candidate<'a>) -> bool {
        let picked = !device.multiple && self.picks.iter().any(|pick| pick.device == index);
        picked || (!alternative.admin && self.ledger.is_dedicated(&device.key))
    }

    fn has_capacity(&self, alternative: &Alternative<'_>, index: usize, device: &Candidate<'a>) -> bool {
        let Some(mut sum) = capacity::consumed(&device.capacity, &alternative.capacity) else {
            return false;
        };
        let picked =
            self.picks.iter().filter(|pick| pick.device == index).filter_map(|pick| pick.share.as_ref());
        for (name, amount) in picked.chain(self.ledger.shared(&device.key)).flatten() {
            add(&mut sum, name, *amount);
        }
        capacity::fits(&device.capacity, &sum)
    }

    /// A multi-allocation device pays its counters with its first share only.
    fn has_counters(&self, index: usize, device: &Candidate<'a>) -> bool {
        let shared_before =
            self.ledger.shared(&device.key).is_some() || self.picks.iter().any(|pick| pick.device == index);
        if device.counters.is_empty() || (device.multiple && shared_before) {
            return true;
        }
        let mut left = self.pools.pools[device.pool].available.clone();
        let mut paying: BTreeSet<usize> = self.picks.iter().map(|pick| pick.device).collect();
        paying.insert(index);
        for other in paying.iter().map(|index| &self.pools.devices[*index]).filter(|d| d.pool == device.pool)
        {
            if other.multiple && self.ledger.shared(&other.key).is_some() {
                continue;
            }
            for (counter, amount) in &other.counters {
                if let Some(left) = left.get_mut(counter) {
                    *left = left.saturating_sub(*amount);
                }
            }
        }
        // One overdrawn counter, whoever overdrew it, closes the whole pool.
        left.values().all(|left| *left >= 0)
    }

    /// What the selectors of class and request say.
    fn selection(&mut self, slot: Slot, index: usize) -> Result<Option<Obstacle>, WhyNot> {
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
                        return Err(WhyNot::Selector {
                            claim: self.asked.claim.clone(),
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
