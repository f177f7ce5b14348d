//! A node, its daemon, the controller and the scheduler as one state, in seconds of simulated time.
//!
//! Each party acts on its own old view. Slices are written as a whole, because schedulers ignore an
//! incomplete pool. A new scheduler reads everything again, as informers do before they start, and the
//! allocations that the old one had not written are lost.

use crate::gpus;
use crate::oracle::Problem;
use crate::sequence::Rng;
use divvy_alloc::{ClusterView, Release, allocate};
use divvy_api::sharing::Mode;
use divvy_api::{ClaimRef, DeviceName};
use divvy_catalogue as catalogue;
use divvy_controller::removal::{NodeName, Planner, removals};
use divvy_model::closing::{Allocated, GpuMode, ModeSet, REMOVAL_DELAY, Removals};
use divvy_model::{DeviceId, Inventory};
use divvy_slices::{ModeStates, PoolOptions, pool, slices};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, from_value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Greatest lag of each view, in seconds.
const LAG_MAX: u64 = 60;
/// Greatest time between an allocation and the write of it, in seconds: the pod waits for volumes.
const WRITE_DELAY_MAX: u64 = 30;
/// The same for a pod that waits for other pods of its group, longer than [`REMOVAL_DELAY`] allows for.
const LATE_WRITE_DELAY_MAX: u64 = 1200;
/// Allocations that are kept for the comparison with upstream.
const PROBLEMS_MAX: usize = 400;
const NODE: &str = "n1";

/// The rules in force. The storm must fail without any of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) has_delay: bool,
    pub(crate) checks_id: bool,
    pub(crate) checks_records: bool,
    pub(crate) checks_removed: bool,
    /// Claims tolerate every taint and are written late, so that they are on removed devices.
    pub(crate) has_tolerant_claims: bool,
    /// Keeps allocations for the comparison with upstream.
    pub(crate) keeps_problems: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            has_delay: true,
            checks_id: true,
            checks_records: true,
            checks_removed: true,
            has_tolerant_claims: false,
            keeps_problems: false,
        }
    }
}

struct Claim {
    name: String,
    object: ResourceClaim,
    device: DeviceName,
    /// The scheduler that decided.
    by: u64,
    /// When the API server has it, and when it lost it.
    written: u64,
    released: Option<u64>,
    is_prepared: bool,
}

impl Claim {
    fn is_allocated(&self, at: u64) -> bool {
        self.written <= at && self.released.is_none_or(|released| released > at)
    }

    fn reference(&self) -> ClaimRef {
        let name = || self.name.clone();
        ClaimRef { namespace: "ns".to_owned(), name: name(), uid: name().into() }
    }
}

#[derive(Clone)]
struct Slices {
    objects: Arc<Vec<ResourceSlice>>,
    off: Arc<ModeSet>,
}

pub(crate) struct World {
    rules: Rules,
    rng: Rng,
    now: u64,
    /// The inventory as the daemon sees it, with the configuration that is in force.
    inventory: Inventory,
    node: Node,
    classes: Vec<DeviceClass>,
    /// All versions of the slices and of the Node's annotations, with the time of each.
    slices: Vec<(u64, Slices)>,
    annotations: Vec<(u64, Removals)>,
    claims: Vec<Claim>,
    daemon: Option<ModeStates>,
    disk: Vec<u8>,
    controller: Option<Planner>,
    /// Times of the views: the scheduler's slices and claims, the controller's slices and claims, and the
    /// daemon's Node.
    views: [u64; 5],
    lags: [u64; 5],
    scheduler: u64,
    /// GPU and mode of the last change of the configuration.
    changed: (usize, Mode),
    names: u64,
    allocated: u64,
    refused: u64,
    removed: u64,
    prepared: u64,
    /// Claims that were written while their device was not published.
    late: u64,
    pub(crate) problems: Vec<Problem>,
}

const SCHEDULER_SLICES: usize = 0;
const SCHEDULER_CLAIMS: usize = 1;
const CONTROLLER_SLICES: usize = 2;
const CONTROLLER_CLAIMS: usize = 3;
const DAEMON_NODE: usize = 4;

impl World {
    pub(crate) fn new(rules: Rules, rng: Rng) -> Self {
        let gpu = |(key, number)| gpus::gpu(catalogue::find(key).unwrap().row(), number);
        let inventory = gpus::node([("A30-24GB", 0), ("L4", 1)].map(gpu).to_vec());
        let class = |(name, type_): (&str, &str)| {
            let own = "device.driver == 'gpu.divvy.dev'";
            let expression = format!("{own} && device.attributes['gpu.divvy.dev'].type == '{type_}'");
            let selectors = json!([{"cel": {"expression": expression}}]);
            from_value(json!({"metadata": {"name": name}, "spec": {"selectors": selectors}})).unwrap()
        };
        let classes = [
            ("whole", "gpu"),
            ("share", "share"),
            ("mig", "mig"),
            ("timeslice", "timeslice"),
            ("mps", "mps"),
        ];
        let nothing = Slices { objects: Arc::default(), off: Arc::default() };
        Self {
            rules,
            rng,
            now: 1_000_000,
            inventory,
            node: from_value(json!({"metadata": {"name": NODE}})).unwrap(),
            classes: classes.map(class).to_vec(),
            slices: vec![(0, nothing)],
            annotations: vec![(0, Removals::default())],
            claims: Vec::new(),
            daemon: Some(ModeStates::default()),
            disk: Vec::new(),
            controller: None,
            views: [1_000_000; 5],
            lags: [0; 5],
            scheduler: 0,
            changed: (0, Mode::Whole),
            names: 0,
            allocated: 0,
            refused: 0,
            removed: 0,
            prepared: 0,
            late: 0,
            problems: Vec::new(),
        }
    }

    pub(crate) fn statistics(&self) -> String {
        let Self { allocated, refused, removed, prepared, late, .. } = self;
        format!(
            "{allocated} allocated, {refused} refused, {late} on removed devices, {prepared} prepared, \
             {removed} modes removed, {} versions of the slices",
            self.slices.len()
        )
    }

    pub(crate) fn has_seen_everything(&self) -> bool {
        self.allocated > 200 && self.prepared > 100 && self.removed > 5
    }

    fn dice(&mut self, sides: u64) -> u64 {
        self.rng.below(sides as usize) as u64
    }

    /// One random operation, then everybody that runs acts on its view.
    pub(crate) fn step(&mut self) -> Result<(), String> {
        // Mostly seconds, sometimes minutes.
        let advance = match self.dice(24) {
            0 => self.dice(300),
            _ => self.dice(8),
        };
        self.now += advance;
        self.forget_old();
        for view in 0..self.views.len() {
            // Views have different lags for a while, so that one is old while the others are fresh.
            if self.dice(40) == 0 {
                self.lags[view] = [0, 0, LAG_MAX, self.dice(LAG_MAX)][self.dice(4) as usize];
            }
            self.views[view] = self.views[view].max(self.now - self.lags[view]);
        }
        match self.dice(100) {
            0..=7 => self.toggle(),
            8..=29 => self.claim(),
            30..=49 => self.prepare()?,
            50..=69 => self.release(),
            70..=71 => self.daemon = None,
            72..=77 => self.start_daemon(),
            78..=80 => self.controller = None,
            81..=83 => self.start_controller(),
            85 => self.restart_scheduler(),
            86 => self.wipe(),
            _ => {}
        }
        self.check_writes()?;
        if self.dice(4) > 0 {
            self.run_daemon();
        }
        if self.dice(4) > 0 {
            self.run_controller();
        }
        Ok(())
    }

    /// Ends all claims, and checks that every mode that is off becomes absent.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        self.start_daemon();
        self.start_controller();
        self.now += LATE_WRITE_DELAY_MAX;
        let now = self.now;
        for claim in &mut self.claims {
            claim.is_prepared = false;
            claim.released.get_or_insert(now);
        }
        for _ in 0..(REMOVAL_DELAY.as_secs() * 3 / LAG_MAX) {
            self.now += LAG_MAX;
            self.views = [self.now; 5];
            self.run_daemon();
            self.run_controller();
        }
        let left = self.latest_slices().off.closings();
        if left.is_empty() { Ok(()) } else { Err(format!("still published at the end: {left:?}")) }
    }

    fn toggle(&mut self) {
        // Often the mode of the last change, so that a closing follows another one shortly.
        if self.dice(2) == 0 {
            self.changed = (self.dice(2) as usize, Mode::ALL[self.dice(5) as usize]);
        }
        // Or one whose removal is approved, so that the approval becomes old.
        let approved = self.annotations.last().unwrap().1.removable.0.keys().next().copied();
        if let Some((gpu, mode)) = approved
            && self.dice(2) == 0
        {
            self.changed = (gpu.0 as usize, mode);
        }
        let (gpu, mode) = self.changed;
        let policy = &mut self.inventory.gpus[gpu].policy;
        match mode {
            Mode::Share => policy.shares = !policy.shares,
            mode if !policy.modes.remove(&mode) => _ = policy.modes.insert(mode),
            _ => {}
        }
    }

    fn wanted(&mut self) -> Value {
        let mode = match self.dice(3) {
            0 => self.changed.1,
            _ => Mode::ALL[self.dice(5) as usize],
        };
        let mut request = json!({"deviceClassName": mode.as_str()});
        if mode == Mode::Share {
            request["capacity"] = json!({"requests": {"memory": "4Gi"}});
        }
        if self.rules.has_tolerant_claims && self.dice(2) == 0 {
            request["tolerations"] = json!([{"operator": "Exists"}]);
        }
        request
    }

    /// The scheduler allocates a claim from its views, and writes it later.
    fn claim(&mut self) {
        self.names += 1;
        let name = format!("c{}", self.names);
        let metadata = json!({"namespace": "ns", "name": name, "uid": name});
        let requests = json!([{"name": "r", "exactly": self.wanted()}]);
        let spec = json!({"devices": {"requests": requests}});
        let mut object: ResourceClaim = from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
        let seen = self.views[SCHEDULER_CLAIMS];
        let is_seen = |claim: &&Claim| {
            let is_known = claim.by == self.scheduler || claim.written <= seen;
            is_known && claim.released.is_none_or(|released| released > seen)
        };
        let claims: Vec<ResourceClaim> =
            self.claims.iter().filter(is_seen).map(|claim| claim.object.clone()).collect();
        let slices = self.slices_at(self.views[SCHEDULER_SLICES]).objects;
        let view = ClusterView {
            slices: &slices,
            classes: &self.classes,
            claims: &claims,
            node: &self.node,
            release: Release::default(),
        };
        let mut shares = 0;
        let result = allocate(&view, &object, &mut || {
            shares += 1;
            format!("{name}-{shares}")
        });
        if self.rules.keeps_problems && self.problems.len() < PROBLEMS_MAX {
            self.problems.push(Problem::new(&view, &object, &result));
        }
        let Ok(result) = result else {
            self.refused += 1;
            return;
        };
        self.allocated += 1;
        let device = result.devices.as_ref().unwrap().results.as_ref().unwrap()[0].device.as_str().into();
        object.status.get_or_insert_default().allocation = Some(result);
        let delay_max = match self.rules.has_tolerant_claims && self.dice(4) == 0 {
            true => LATE_WRITE_DELAY_MAX,
            false => WRITE_DELAY_MAX,
        };
        let written = self.now + self.dice(delay_max + 1);
        let by = self.scheduler;
        self.claims.push(Claim { name, object, device, by, written, released: None, is_prepared: false });
    }

    /// Checks the claims that were written since the last operation.
    fn check_writes(&mut self) -> Result<(), String> {
        let now = self.now;
        let allocated: Vec<&Claim> = self.claims.iter().filter(|claim| claim.is_allocated(now)).collect();
        if !self.rules.has_tolerant_claims {
            for (index, one) in allocated.iter().enumerate() {
                if let Some(two) = allocated[..index].iter().find(|two| self.overlap(one, two)) {
                    return Err(format!(
                        "{} and {} are both allocated, {} and {}",
                        one.device, two.device, one.name, two.name
                    ));
                }
            }
        }
        let held: Vec<&Claim> = self.claims.iter().filter(|claim| claim.is_prepared).collect();
        for (index, one) in held.iter().enumerate() {
            if let Some(two) = held[..index].iter().find(|two| self.overlap(one, two)) {
                return Err(format!("{} and {} are both prepared", one.device, two.device));
            }
        }
        let removed = &self.latest_slices().off;
        let is_removed = |claim: &&&Claim| removed.0.get(&gpu_mode(&claim.device)) == Some(&None);
        self.late = self.late.max(allocated.iter().filter(is_removed).count() as u64);
        Ok(())
    }

    /// Whether two claims exclude each other.
    fn overlap(&self, one: &Claim, two: &Claim) -> bool {
        let id = |claim: &Claim| DeviceId::try_from(&claim.device).unwrap();
        let (first, second) = (id(one), id(two));
        if first.gpu() != second.gpu() {
            return false;
        }
        if first == second {
            return matches!(first.mode(), Mode::Whole | Mode::Mig);
        }
        let placement =
            |id: &DeviceId| id.resolve(&self.inventory).unwrap().1.map(|(_, placement)| placement);
        match (placement(&first), placement(&second)) {
            (Some(first), Some(second)) => first.overlaps(second),
            _ => true,
        }
    }

    /// The kubelet asks the daemon to prepare an allocated claim.
    fn prepare(&mut self) -> Result<(), String> {
        let now = self.now;
        let ready: Vec<usize> =
            (0..self.claims.len()).filter(|at| self.claims[*at].is_allocated(now)).collect();
        if ready.is_empty() || self.daemon.is_none() {
            return Ok(());
        }
        let at = ready[self.dice(ready.len() as u64) as usize];
        let inventory = self.seen_by_daemon();
        let claim = &self.claims[at];
        let is_removed = inventory.removals.overlap(&inventory, &claim.name.as_str().into(), &claim.device);
        if self.rules.checks_removed && is_removed.is_some() {
            return Ok(());
        }
        let is_held = self.claims.iter().any(|other| other.is_prepared && self.overlap(claim, other));
        if self.rules.checks_records && is_held {
            return Ok(());
        }
        // A claim on a removed device comes first.
        let named = |other: &&Claim| {
            let is_named = |claim: &Claim| {
                inventory.removals.allocated.iter().any(|entry| entry.claim.uid.as_str() == claim.name)
            };
            let (gpu, mode) = gpu_mode(&other.device);
            let is_off = !inventory.gpus[gpu.0 as usize].policy.offers(mode);
            let is_other = other.device != claim.device;
            is_off && is_other && is_named(other) && !is_named(claim) && self.overlap(claim, other)
        };
        if let Some(other) = self.claims.iter().filter(|other| other.is_allocated(now)).find(named) {
            return Err(format!("{} was prepared although {} was named", claim.device, other.device));
        }
        self.prepared += 1;
        self.claims[at].is_prepared = true;
        Ok(())
    }

    /// A pod ends: unprepare, then the allocation is removed. Unprepare needs the daemon.
    fn release(&mut self) {
        let now = self.now;
        let has_daemon = self.daemon.is_some();
        let live = (0..self.claims.len()).filter(|at| {
            let claim = &self.claims[*at];
            claim.is_allocated(now) && (has_daemon || !claim.is_prepared)
        });
        let live: Vec<usize> = live.collect();
        if live.is_empty() {
            return;
        }
        let at = live[self.dice(live.len() as u64) as usize];
        self.claims[at].is_prepared = false;
        self.claims[at].released = Some(now);
    }

    fn start_daemon(&mut self) {
        if self.daemon.is_none() {
            self.daemon = Some(ModeStates::from_bytes(&self.disk).unwrap_or_default());
        }
    }

    fn start_controller(&mut self) {
        if self.controller.is_none() {
            let delay = if self.rules.has_delay { REMOVAL_DELAY } else { Duration::ZERO };
            self.controller = Some(Planner::new(delay));
        }
    }

    fn restart_scheduler(&mut self) {
        let (now, scheduler) = (self.now, self.scheduler);
        self.claims.retain(|claim| claim.written <= now || claim.by != scheduler);
        self.scheduler += 1;
        (self.views[SCHEDULER_SLICES], self.views[SCHEDULER_CLAIMS]) = (now, now);
    }

    /// A starting kubelet deletes the slices.
    fn wipe(&mut self) {
        self.publish(Slices { objects: Arc::default(), off: Arc::default() });
    }

    /// The inventory with the annotations of an old version of the Node.
    fn seen_by_daemon(&self) -> Inventory {
        let removals = at(&self.annotations, self.views[DAEMON_NODE]);
        Inventory { removals, ..self.inventory.clone() }
    }

    fn run_daemon(&mut self) {
        let mut inventory = self.seen_by_daemon();
        let Some(mut states) = self.daemon.take() else { return };
        if !self.rules.checks_id {
            let current = states.off().0.clone();
            for (of, id) in &mut inventory.removals.removable.0 {
                *id = current.get(of).copied().flatten();
            }
        }
        let held = self.claims.iter().filter(|claim| claim.is_prepared);
        let held: BTreeSet<String> = held.map(|claim| claim.device.to_string()).collect();
        let there = self.latest_slices();
        let closings = states.decide(&inventory, &held, there.objects.iter(), self.now);
        let off = Arc::new(states.off().clone());
        self.disk = states.to_bytes();
        self.daemon = Some(states);
        if there.off != off || there.objects.is_empty() {
            let gone = |(of, id): (&GpuMode, &Option<_>)| {
                id.is_none() && matches!(there.off.0.get(of), Some(Some(_)))
            };
            self.removed += off.0.iter().filter(|entry| gone(*entry)).count() as u64;
            let options = PoolOptions { closings, ..PoolOptions::default() };
            self.publish(Slices { objects: Arc::new(wire(&inventory, &options)), off });
        }
    }

    fn run_controller(&mut self) {
        let Some(mut planner) = self.controller.take() else { return };
        let (node, since) = (NodeName::from(NODE), Duration::from_secs(self.now));
        let off = self.slices_at(self.views[CONTROLLER_SLICES]).off;
        let seen = self.allocations(self.views[CONTROLLER_CLAIMS]);
        planner.observe(since, &node, &off, &seen);
        let confirmed = self.allocations(self.now);
        planner.approve(since, |_| &confirmed);
        let before = self.annotations.last().unwrap().1.clone();
        // A node without slices is left alone.
        if !off.0.is_empty() {
            let after = removals(planner.removable(&node), &off, &seen, &before);
            if after != before {
                self.annotations.push((self.now, after));
            }
        }
        self.controller = Some(planner);
    }

    fn allocations(&self, at: u64) -> BTreeSet<Allocated> {
        let allocated = self.claims.iter().filter(|claim| claim.is_allocated(at));
        allocated.map(|claim| Allocated { device: claim.device.clone(), claim: claim.reference() }).collect()
    }

    fn publish(&mut self, slices: Slices) {
        self.slices.push((self.now, slices));
    }

    fn latest_slices(&self) -> Slices {
        self.slices.last().unwrap().1.clone()
    }

    fn slices_at(&self, time: u64) -> Slices {
        at(&self.slices, time)
    }

    /// Drops claims that every view has lost.
    fn forget_old(&mut self) {
        let oldest = self.now.saturating_sub(2 * LAG_MAX);
        self.claims.retain(|claim| claim.released.is_none_or(|released| released >= oldest));
    }
}

/// The version at a time.
fn at<T: Clone>(versions: &[(u64, T)], time: u64) -> T {
    let index = versions.partition_point(|(since, _)| *since <= time);
    versions[index.max(1) - 1].1.clone()
}

fn gpu_mode(device: &DeviceName) -> GpuMode {
    divvy_model::removed::gpu_mode(device).unwrap()
}

/// The slices as the server has them.
fn wire(inventory: &Inventory, options: &PoolOptions) -> Vec<ResourceSlice> {
    let contents = slices(pool(inventory, options));
    let count = contents.len();
    let some = |list: Value| if list == json!([]) { Value::Null } else { list };
    let slice = |(index, content): (usize, divvy_slices::Content)| {
        let spec = json!({
            "driver": "gpu.divvy.dev", "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": count},
            "sharedCounters": some(json!(content.counters)), "devices": some(json!(content.devices)),
        });
        from_value(json!({"metadata": {"name": format!("slice-{index:03}")}, "spec": spec})).unwrap()
    };
    contents.into_iter().enumerate().map(slice).collect()
}
