//! Runs operations on a node and checks the results against the model.

use crate::claim_spec::ClaimSpec;
use crate::device_nodes::wrong_device_node;
use crate::harness::{DRIVER, Daemon, KubeletCall, NODE, POLL_INTERVAL, TestNode};
use crate::invariants::{differences, forbidden_state};
use crate::model::{ModelClaim, ModelDevice, Sharing, Stage};
use crate::operations::{
    CLAIM_SLOTS, FATAL_XIDS, GPU_COUNT, GPUS, MIG_ON_GPU, MisallocatedDevice, Operation, Victim,
};
use crate::processes::{Client, DeviceAccess, Supervisor, mps_processes};
use crate::scheduler::{Decision, Scheduler, claim};
use crate::sequence::Failure;
use divvy_api::sharing::Mode;
use divvy_fakes::apiserver::Outage;
use divvy_fakes::kubelet::Outcome;
use divvy_kubelet::dra::v1::Claim;
use divvy_sim::control::{Pattern, When};
use divvy_sim::state::Loss;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Flags of the daemon, besides the node configuration.
const FLAGS: [&str; 4] = ["--mig-hold-off", "0s", "--answer-timeout", "30s"];

/// A node under random operations, and its model.
pub(crate) struct Runner {
    // Processes are declared before `node`, so that they are killed before the node is removed.
    pub(crate) daemon: Option<Daemon>,
    /// Running clients, with the slot of their claim.
    pub(crate) clients: Vec<(usize, Client)>,
    pub(crate) supervisor: Supervisor,
    pub(crate) node: TestNode,
    scheduler: Scheduler,
    pub(crate) claims: Vec<Option<ModelClaim>>,
    pub(crate) settle_timeout: Duration,
    /// Number of claims so far, from which UIDs are made.
    claims_created: usize,
    /// GPUs with a failure since the node last settled. The daemon may refuse calls for them.
    pub(crate) degraded: BTreeSet<usize>,
    outage: bool,
    /// The daemon has answered a call since it started, so it has recovered.
    answered: bool,
    /// GPUs that are lost or missing.
    absent_gpus: BTreeSet<usize>,
    /// A GPU had a fatal XID in this boot.
    marked: bool,
    /// NVML is closed by SIGUSR1.
    drained: bool,
    /// `nvidia-smi` is missing.
    without_tool: bool,
    /// The daemon has not yet reconciled its records with the API server since its start, so it may
    /// still release deleted claims by itself. It retries a failed reconciliation later.
    pub(crate) reconciling: bool,
    /// Number of events, by name, for the summary.
    pub(crate) tally: BTreeMap<String, usize>,
}

impl Runner {
    /// A node with this time limit for settling.
    pub(crate) async fn new(settle_timeout: Duration) -> Self {
        let node = TestNode::new(GPUS).await;
        node.update_sim(|state| state.set_mig_mode(MIG_ON_GPU, true).map(|_| ()).unwrap());
        node.write_long_timeslice_config();
        let supervisor = Supervisor::new(&node);
        let mut runner = Self {
            daemon: None,
            clients: Vec::new(),
            supervisor,
            node,
            scheduler: Scheduler::new(),
            claims: vec![None; CLAIM_SLOTS],
            settle_timeout,
            claims_created: 0,
            degraded: BTreeSet::new(),
            outage: false,
            answered: false,
            absent_gpus: BTreeSet::new(),
            marked: false,
            drained: false,
            without_tool: false,
            reconciling: true,
            tally: BTreeMap::new(),
        };
        runner.start_daemon();
        runner.node.kubelet.wait_registered(DRIVER, 1, settle_timeout).await.unwrap();
        crate::harness::until("slices are published", || !runner.node.published().is_empty()).await;
        runner
    }

    pub(crate) fn start_daemon(&mut self) {
        self.node.api.clear_requests();
        let config = self.node.path("config.yaml").display().to_string();
        let flags: Vec<&str> = FLAGS.iter().copied().chain(["--config", &config]).collect();
        self.daemon = Some(self.node.spawn_daemon(&flags));
    }

    pub(crate) fn count(&mut self, event: impl Into<String>) {
        *self.tally.entry(event.into()).or_default() += 1;
    }

    pub(crate) fn failed(&self, at: usize, cause: String) -> Failure {
        let tail = |text: String| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(60)..].join("\n")
        };
        let daemon = tail(self.daemon.as_ref().map(Daemon::log).unwrap_or_default());
        let supervisor = tail(std::fs::read_to_string(self.node.path("supervisor-log")).unwrap_or_default());
        let clients: Vec<_> = self.clients.iter().map(|(slot, client)| (*slot, client.id())).collect();
        let gpus = self.node.sim.read().map(|state| format!("{:#?}", state.gpus)).unwrap_or_default();
        let log = format!(
            "--- divvy-node\n{daemon}\n--- divvy-mps-supervisor\n{supervisor}\n\
             --- clients (slot, process): {clients:?}\n{gpus}"
        );
        Failure { at, cause, log }
    }

    pub(crate) async fn run(&mut self, operation: &Operation) -> Result<(), String> {
        match operation {
            Operation::Claim { slot, devices } => {
                self.allocate(*slot, devices)?;
                self.prepare(*slot).await?;
            }
            Operation::Allocate { slot, devices } => self.allocate(*slot, devices)?,
            Operation::Misallocate { slot, devices } => {
                if self.claims[*slot].is_none() {
                    self.misallocate(*slot, devices);
                    self.prepare(*slot).await?;
                }
            }
            Operation::Unprepare { slot } => {
                let slot = self.next_slot(*slot, |_| true);
                self.unprepare(slot).await?;
            }
            Operation::ForceDelete { slot } => {
                let slot = self.next_slot(*slot, |claim| claim.is_prepared() && !claim.deleted);
                self.force_delete(slot).await;
            }
            Operation::Use { slot } => {
                let slot = self.next_slot(*slot, |claim| {
                    claim.devices().any(|device| !device.admin) && claim.is_prepared()
                });
                self.use_devices(slot).await?;
            }
            Operation::Fault { slot, devices, call, when, code } => {
                let Some((kubelet_call, model)) = self.next_call(*slot, devices).await? else {
                    return Ok(());
                };
                let calls = kubelet_call.driver_calls(&model);
                let Some(call) = calls.get(call % calls.len().max(1)) else { return Ok(()) };
                let gpus: Vec<usize> = model.devices().map(|device| device.gpu).collect();
                self.node.update_sim(|state| state.add_fault(pattern(call, &gpus), Some(1), *when, *code));
                let before = self.degraded.clone();
                self.degraded.extend(&gpus);
                let answer = kubelet_call.send_with_retry(&self.node, &model.claim).await?;
                self.answered(kubelet_call, *slot, answer)?;
                let hit = self.node.sim.read().unwrap().control.faults.is_empty();
                self.count(format!("fault of {call}{}", if hit { "" } else { " not reached" }));
                self.node.update_sim(|state| state.clear_faults(None));
                // A GPU that could not be read stays out of service for a while. A dead MPS daemon
                // is restarted.
                if !call.contains("Get") && !call.starts_with("mps") {
                    self.degraded = before;
                }
            }
            Operation::KillDuringCall { slot, devices, call, when, victim } => {
                let Some((kubelet_call, model)) = self.next_call(*slot, devices).await? else {
                    return Ok(());
                };
                let calls = kubelet_call.driver_calls(&model);
                let Some(call) = calls.get(call % calls.len().max(1)) else { return Ok(()) };
                self.kill_during_call(*slot, (kubelet_call, model), call, *when, *victim).await?;
            }
            Operation::Kill { victim } => self.kill(*victim, |_| ()),
            Operation::KillMps { which, server } => self.kill_mps(*which, *server),
            Operation::Configure { interval, gpu, modes } => {
                let rules = format!(
                    "rules: [{{interval: {interval}, migShares: true}}, \
                     {{match: {{indices: [{gpu}]}}, modes: {modes}}}]"
                );
                self.configure(&rules);
            }
            Operation::Kubelet => self.node.kubelet.restart(),
            Operation::Reboot => self.reboot(None).await,
            // An absent GPU cannot be reset.
            Operation::Reset { gpu } if self.absent_gpus.contains(gpu) => {}
            Operation::Reset { gpu } => self.reset(*gpu).await,
            Operation::Lose { gpu, reboots: true } => self.reboot(Some(*gpu)).await,
            Operation::Lose { gpu, reboots: false } => {
                if self.absent_gpus.insert(*gpu) {
                    // nvidia-smi fails on all GPUs while one is lost.
                    self.degraded.extend(0..GPU_COUNT);
                    let loss = Loss { silent: true, code: None };
                    self.node.update_sim(|state| state.lose_as(*gpu, true, loss).unwrap());
                }
            }
            Operation::Xid { gpu, xid } => {
                if !self.absent_gpus.contains(gpu) {
                    if FATAL_XIDS.contains(xid) {
                        self.marked = true;
                        self.degraded.insert(*gpu);
                    }
                    self.node.update_sim(|state| state.xid(*gpu, *xid, None).unwrap());
                }
            }
            Operation::Drain { over } => self.drain(*over).await,
            Operation::RemoveTool { over } => self.remove_tool(*over),
            Operation::Outage { over } => self.set_outage(!over),
            Operation::Settle => self.settle().await?,
            Operation::ReleaseAll => {
                self.settle().await?;
                for slot in 0..CLAIM_SLOTS {
                    self.unprepare(slot).await?;
                }
                self.settle().await?;
                self.expect_all_gpus_whole().await?;
            }
        }
        let claims: Vec<&ModelClaim> = self.claims.iter().flatten().collect();
        let is_admin = |uid: &str| {
            let claim = claims.iter().find(|claim| claim.claim.uid == uid);
            claim.is_some_and(|claim| claim.devices().any(|device| device.admin))
        };
        let device_node = || self.answered.then(|| wrong_device_node(&self.node, is_admin)).flatten();
        forbidden_state(&self.node, &claims).or_else(device_node).map_or(Ok(()), Err)
    }

    /// The slot of the next claim that matches, from `slot` on; `slot` itself if there is none.
    fn next_slot(&self, slot: usize, wanted: impl Fn(&ModelClaim) -> bool) -> usize {
        let mut slots = (slot..CLAIM_SLOTS).chain(0..slot);
        slots.find(|at| self.claims[*at].as_ref().is_some_and(&wanted)).unwrap_or(slot)
    }

    /// The next call for the claim. A claim that could not be prepared is first replaced by a new one.
    async fn next_call(
        &mut self,
        slot: usize,
        devices: &ClaimSpec,
    ) -> Result<Option<(KubeletCall, ModelClaim)>, String> {
        if self.claims[slot]
            .as_ref()
            .is_some_and(|claim| claim.stage == Stage::Preparing || claim.is_unsatisfiable())
        {
            self.unprepare(slot).await?;
        }
        self.allocate(slot, devices)?;
        let model = self.claims[slot].clone();
        let next = model.and_then(|model| match model.stage {
            Stage::Forgotten => None,
            Stage::Allocated | Stage::Preparing if model.deleted => None,
            Stage::Allocated | Stage::Preparing => Some((KubeletCall::Prepare, model)),
            Stage::Prepared(_) | Stage::Releasing => Some((KubeletCall::Unprepare, model)),
        });
        if matches!(next, Some((KubeletCall::Unprepare, _))) {
            self.end_clients(slot).await;
        }
        Ok(next)
    }

    /// A new claim name.
    fn new_name(&mut self) -> String {
        self.claims_created += 1;
        format!("c{}", self.claims_created)
    }

    /// Creates a claim in an empty slot and lets the scheduler allocate it.
    pub(crate) fn allocate(&mut self, slot: usize, ClaimSpec(devices): &ClaimSpec) -> Result<(), String> {
        if self.claims[slot].is_some() {
            return Ok(());
        }
        let name = self.new_name();
        let known = self.claims.iter().flatten().filter(|claim| !claim.misallocated && !claim.deleted);
        let known: Vec<&ModelClaim> = known.collect();
        let sees = |name: &str| known.iter().any(|claim| claim.claim.name == name);
        let allocation = match self.scheduler.decide(&self.node, &name, devices, sees) {
            Decision::Allocated(allocation) => allocation,
            Decision::Refused(cause) => {
                self.count(format!("refused at admission: {cause}"));
                return Ok(());
            }
            Decision::Pending => {
                let kind = |request: &Value| {
                    request["exactly"]["deviceClassName"].as_str().unwrap_or("firstAvailable").to_owned()
                };
                let kinds: Vec<_> = devices["requests"].as_array().unwrap().iter().map(kind).collect();
                self.count(format!("pending: {}", kinds.join(" and ")));
                return Ok(());
            }
        };
        let model = self.put_claim(&name, devices, &allocation, false);
        if let Some(other) = known.iter().find(|other| other.excludes(&model)) {
            return Err(format!("the scheduler allocated {model:?} although {other:?} holds its devices"));
        }
        if model.is_unsatisfiable() || model.exceeds_memory(&known) {
            return Err(format!("the scheduler allocated more than exists: {model:?} beside {known:?}"));
        }
        self.claims[slot] = Some(model);
        Ok(())
    }

    /// Allocates these devices to a claim, regardless of other claims.
    fn misallocate(&mut self, slot: usize, devices: &[MisallocatedDevice]) {
        let name = self.new_name();
        let result = |(at, misallocated): (usize, &MisallocatedDevice)| {
            let mut result = json!({
                "request": format!("r{at}"), "driver": DRIVER, "pool": NODE, "device": misallocated.name,
            });
            if misallocated.admin {
                result["adminAccess"] = json!(true);
            }
            let consumed = match misallocated.name.rsplit('-').next() {
                Some("timeslice") => json!({"slots": "1"}),
                Some("mps") => json!({"threads": "10", "memory": "1Gi", "clients": "1"}),
                _ => return result,
            };
            result["shareID"] = json!(format!("{name}-share-{at}"));
            result["consumedCapacity"] = consumed;
            result
        };
        let results: Vec<Value> = devices.iter().enumerate().map(result).collect();
        let allocation = serde_json::from_value(json!({"devices": {"results": results}})).unwrap();
        self.claims[slot] = Some(self.put_claim(&name, &json!({}), &allocation, true));
    }

    /// Writes the claim to the API server and returns its model.
    fn put_claim(
        &self,
        name: &str,
        devices: &Value,
        allocation: &AllocationResult,
        misallocated: bool,
    ) -> ModelClaim {
        let mut object = claim(name, devices);
        object["status"] = json!({"allocation": allocation});
        self.node.api.put(object);
        let claim_ref = Claim { namespace: "ns".to_owned(), uid: name.to_owned(), name: name.to_owned() };
        ModelClaim::new(claim_ref, allocation, &self.node.sim.read().unwrap().gpus, misallocated)
    }

    pub(crate) async fn prepare(&mut self, slot: usize) -> Result<(), String> {
        let Some(model) = self.claims[slot].clone() else { return Ok(()) };
        if model.deleted || matches!(model.stage, Stage::Releasing | Stage::Forgotten) {
            return Ok(());
        }
        let outcome = KubeletCall::Prepare.send_with_retry(&self.node, &model.claim).await?;
        self.prepared(slot, outcome)
    }

    /// Whether the daemon may refuse the claim because of a failure.
    fn is_degraded(&self, claim: &ModelClaim) -> bool {
        self.outage || claim.devices().any(|device| self.degraded.contains(&device.gpu))
    }

    /// The claims that exclude this one and of which the node may hold devices.
    pub(crate) fn conflicting_claims<'a>(
        &'a self,
        slot: usize,
        claim: &'a ModelClaim,
    ) -> impl Iterator<Item = &'a ModelClaim> {
        let others = self.claims.iter().enumerate().filter(move |(at, _)| *at != slot);
        others
            .filter_map(|(_, other)| other.as_ref())
            .filter(|other| other.may_hold() && other.excludes(claim))
    }

    /// The other claims of which the node may hold devices.
    fn other_holders(&self, slot: usize) -> Vec<&ModelClaim> {
        let others = self.claims.iter().enumerate().filter(|(at, _)| *at != slot);
        others.filter_map(|(_, other)| other.as_ref()).filter(|other| other.may_hold()).collect()
    }

    /// Whether the memory shares that the node may hold leave too little memory, or another share's
    /// MIG instance may be only partly created.
    pub(crate) fn may_exceed_memory(&self, slot: usize, claim: &ModelClaim) -> bool {
        let others = self.other_holders(slot);
        let partly_prepared = |other: &&ModelClaim| !other.is_prepared() && other.shares_instance_with(claim);
        claim.exceeds_memory(&others) || others.iter().any(partly_prepared)
    }

    /// Checks the answer of a prepare against the model.
    fn prepared(&mut self, slot: usize, outcome: Outcome) -> Result<(), String> {
        self.answered = true;
        let Some(model) = self.claims[slot].clone() else { return Ok(()) };
        let uid = &model.claim.uid;
        let degraded = self.is_degraded(&model);
        let stage = match (outcome, &model.stage) {
            (Ok(answer), Stage::Prepared(before)) if answer != *before => {
                return Err(format!("the answer for {uid} changed from {before:?} to {answer:?}"));
            }
            (Ok(answer), _) => {
                if model.is_unsatisfiable() {
                    return Err(format!("unsatisfiable claim {model:?} was prepared"));
                }
                if let Some(other) = self.conflicting_claims(slot, &model).find(|other| other.is_prepared()) {
                    return Err(format!("{model:?} was prepared although it conflicts with {other:?}"));
                }
                let prepared: Vec<&ModelClaim> =
                    self.other_holders(slot).into_iter().filter(|other| other.is_prepared()).collect();
                if model.exceeds_memory(&prepared) {
                    return Err(format!("{model:?} was prepared although {prepared:?} use the memory"));
                }
                if !model.is_prepared() {
                    for device in model.devices() {
                        let how = device.sharing.filter(|_| matches!(device.mode, Mode::Whole | Mode::Mig));
                        let how = how.map_or(String::new(), |how| format!(" with {how:?}"));
                        let part = device.memory.is_some() && device.mode != Mode::Share;
                        let how = if part { " share".to_owned() } else { how };
                        let misallocated = if model.misallocated { " misallocated" } else { "" };
                        let admin = if device.admin { " with admin access" } else { "" };
                        self.count(format!("prepared: {}{how}{admin}{misallocated}", device.mode));
                    }
                }
                Stage::Prepared(answer)
            }
            (Err(error), stage) => {
                let conflicting_claims = self.conflicting_claims(slot, &model).next();
                let no_memory = self.may_exceed_memory(slot, &model);
                if !degraded && !model.is_unsatisfiable() && conflicting_claims.is_none() && !no_memory {
                    return Err(format!("{model:?} was refused: {error}"));
                }
                let cause = match conflicting_claims {
                    _ if model.is_unsatisfiable() => "unsatisfiable",
                    Some(other) if other.deleted => "force deleted claim",
                    Some(_) => "conflicting claim",
                    None if no_memory => "memory",
                    None => "failure",
                };
                self.count(format!("refused: {cause}"));
                match stage {
                    // A refusal while planning leaves nothing.
                    Stage::Allocated if !degraded => Stage::Allocated,
                    Stage::Allocated => Stage::Preparing,
                    stage => stage.clone(),
                }
            }
        };
        self.claims[slot] = Some(ModelClaim { stage, ..model });
        Ok(())
    }

    pub(crate) async fn unprepare(&mut self, slot: usize) -> Result<(), String> {
        self.end_clients(slot).await;
        let Some(model) = self.claims[slot].clone() else { return Ok(()) };
        let outcome = KubeletCall::Unprepare.send_with_retry(&self.node, &model.claim).await?;
        self.unprepared(slot, outcome)
    }

    /// Checks the answer of an unprepare against the model.
    fn unprepared(&mut self, slot: usize, outcome: Outcome) -> Result<(), String> {
        self.answered = true;
        let Some(model) = self.claims[slot].take() else { return Ok(()) };
        match outcome {
            Ok(_) => {
                self.node.api.delete::<ResourceClaim>("ns", &model.claim.name);
            }
            Err(error) if !self.is_degraded(&model) => {
                return Err(format!("{model:?} was not released: {error}"));
            }
            Err(_) => self.claims[slot] = Some(ModelClaim { stage: Stage::Releasing, ..model }),
        }
        Ok(())
    }

    pub(crate) fn answered(
        &mut self,
        kubelet_call: KubeletCall,
        slot: usize,
        outcome: Outcome,
    ) -> Result<(), String> {
        match kubelet_call {
            KubeletCall::Prepare => self.prepared(slot, outcome),
            KubeletCall::Unprepare => self.unprepared(slot, outcome),
        }
    }

    async fn force_delete(&mut self, slot: usize) {
        if self.reconciling {
            self.end_clients(slot).await;
        }
        if let Some(model) = &mut self.claims[slot] {
            if self.reconciling {
                // The daemon may find the deletion.
                model.stage = Stage::Releasing;
            }
            model.deleted = true;
            self.node.delete_by_force(&model.claim);
        }
    }

    pub(crate) fn configure(&self, rules: &str) {
        let text = format!("apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\n{rules}\n");
        let (path, device) = (self.node.path("config.yaml"), self.node.path("config.part"));
        std::fs::write(&device, text).and_then(|()| std::fs::rename(device, path)).unwrap();
    }

    pub(crate) fn set_outage(&mut self, begins: bool) {
        self.outage = begins;
        self.node.api.set_outage(begins.then_some(Outage::Refuse));
    }
}

/// A pattern for this call. Calls to MPS control daemons are limited to the first GPU, because the
/// daemons of other GPUs are polled all the time. Calls of nvidia-smi do not name a GPU.
pub(crate) fn pattern(call: &str, gpus: &[usize]) -> Pattern {
    let gpu = gpus.first().copied().filter(|_| call.starts_with("mps"));
    Pattern { call: call.to_owned(), gpu }
}

impl Runner {
    /// Starts a process in a container of the claim. It must get a context.
    pub(crate) async fn use_devices(&mut self, slot: usize) -> Result<(), String> {
        let Some(model) = self.claims[slot].clone().filter(ModelClaim::is_prepared) else { return Ok(()) };
        let Some(device) = model.devices().find(|device| !device.admin) else { return Ok(()) };
        let degraded = self.degraded.contains(&device.gpu);
        let access = match self.device_access(&model, device) {
            Ok(access) => access,
            Err(_) if degraded => return Ok(()),
            Err(error) => return Err(format!("{model:?} cannot be used: {error}")),
        };
        match Client::start(&self.node, &access).await {
            Ok(client) => self.clients.push((slot, client)),
            Err(_) if degraded => return Ok(()),
            Err(error) => return Err(format!("a process got no context on {}: {error}", device.name)),
        }
        self.count(format!("used: {:?}", device.sharing));
        Ok(())
    }

    fn device_access(&self, model: &ModelClaim, device: &ModelDevice) -> Result<DeviceAccess, String> {
        let uses_mps = device.sharing == Some(Sharing::Mps);
        let mps = uses_mps.then(|| self.container_edits(&model.claim.uid, device)).transpose()?;
        let state = self.node.sim.read().unwrap();
        let gpu = &state.gpus[device.gpu];
        let device = match &device.placement {
            None => gpu.uuid.clone(),
            Some((profile, slices)) => {
                let mut instances = gpu.instances.iter();
                let gi = instances.find(|gi| gi.profile == *profile && gi.placement.start == slices.start);
                gi.and_then(|gi| gi.cis.first()).ok_or("the MIG instance does not exist")?.uuid.clone()
            }
        };
        Ok(DeviceAccess { device, mps })
    }

    /// The container edits of a device in the claim's CDI file.
    fn container_edits(&self, uid: &str, device: &ModelDevice) -> Result<Value, String> {
        let file = self.node.cdi_dir().join(format!("gpu.divvy.dev-claim_{uid}.json"));
        let text = std::fs::read(&file).map_err(|error| error.to_string())?;
        let file: Value = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
        let share = device.share.iter().map(|share| format!("-{share}"));
        let name: String = [format!("{uid}-{}", device.name)].into_iter().chain(share).collect();
        let mut devices = file["devices"].as_array().into_iter().flatten();
        let device =
            devices.find(|it| it["name"] == name).ok_or("the CDI file does not contain the device")?;
        Ok(device["containerEdits"].clone())
    }

    pub(crate) async fn end_clients(&mut self, slot: usize) {
        let (ended, others) = std::mem::take(&mut self.clients).into_iter().partition(|(of, _)| *of == slot);
        self.clients = others;
        let ended: Vec<(usize, Client)> = ended;
        for (_, client) in ended {
            client.end().await;
        }
    }
}

impl Runner {
    /// Kills the victim with SIGKILL, runs `between`, and starts the victim again.
    pub(crate) fn kill(&mut self, victim: Victim, between: impl FnOnce(&TestNode)) {
        if let (true, Some(daemon)) =
            (victim.includes_node(), self.daemon.take_if(|_| victim.includes_node()))
        {
            daemon.kill();
            // The old log is long and no longer needed.
            let _ = std::fs::remove_file(self.node.path("log"));
        }
        if victim.includes_supervisor() {
            self.supervisor.kill();
        }
        between(&self.node);
        if victim.includes_supervisor() {
            self.supervisor.start(&self.node);
        }
        if victim.includes_node() {
            self.start_daemon();
            (self.answered, self.drained) = (false, false);
            // At start, the daemon releases deleted claims.
            for (slot, claim) in self.claims.iter_mut().enumerate() {
                let Some(claim) = claim.as_mut().filter(|claim| claim.deleted) else { continue };
                claim.stage = Stage::Forgotten;
                self.clients.retain(|(of, _)| *of != slot);
            }
            self.reconciling = true;
        }
    }

    /// Kills the victim during a driver call.
    pub(crate) async fn kill_during_call(
        &mut self,
        slot: usize,
        (kubelet_call, model): (KubeletCall, ModelClaim),
        name: &str,
        when: When,
        victim: Victim,
    ) -> Result<(), String> {
        let gpus: Vec<usize> = model.devices().map(|device| device.gpu).collect();
        self.node.update_sim(|state| state.add_hold(pattern(name, &gpus), Some(1), when));
        let before = self.degraded.clone();
        self.degraded.extend(&gpus);
        let answer = {
            let node = &self.node;
            let held = || !node.sim.read().unwrap().control.held.is_empty();
            let call = kubelet_call.send_with_retry(node, &model.claim);
            tokio::pin!(call);
            let early = tokio::select! {
                answer = &mut call => Some(answer),
                () = async { while !held() { tokio::time::sleep(POLL_INTERVAL).await } } => None,
            };
            match early {
                Some(answer) => {
                    node.clear_faults();
                    Some(answer?)
                }
                None if victim == Victim::Supervisor => {
                    self.supervisor.kill();
                    self.supervisor.start(node);
                    node.clear_faults();
                    Some(call.await?)
                }
                None => None,
            }
        };
        self.count(format!("{victim:?} killed during {name}"));
        // A dead MPS daemon has lost its clients.
        if !name.starts_with("mps") {
            self.degraded = before;
        }
        if let Some(answer) = answer {
            return self.answered(kubelet_call, slot, answer);
        }
        self.kill(victim, TestNode::clear_faults);
        if let Some(claim) = self.claims[slot].as_mut().filter(|claim| claim.stage != Stage::Forgotten) {
            claim.stage =
                if kubelet_call == KubeletCall::Prepare { Stage::Preparing } else { Stage::Releasing };
        }
        Ok(())
    }

    /// Kills an MPS control daemon or server, if one runs.
    pub(crate) fn kill_mps(&mut self, which: usize, server: bool) {
        let mut processes = mps_processes(&self.node.run_dir());
        processes.retain(|process| process.is_server == server);
        let Some(process) = processes.get(which % processes.len().max(1)) else { return };
        process.kill();
        self.count(if server { "MPS server killed" } else { "MPS control daemon killed" });
        self.degraded.extend(self.gpu_of_target(&process.target));
    }

    /// Reboots the node with the GPUs that were lost, perhaps without one.
    pub(crate) async fn reboot(&mut self, without: Option<usize>) {
        for slot in 0..self.claims.len() {
            self.end_clients(slot).await;
        }
        if let Some(daemon) = self.daemon.take() {
            daemon.kill();
        }
        self.supervisor.kill_all();
        let back = std::mem::replace(&mut self.absent_gpus, without.into_iter().collect());
        self.marked = false;
        self.kill(Victim::Both, |node| {
            node.update_sim(|state| {
                back.iter().for_each(|gpu| state.find(*gpu).unwrap());
                if let Some(gpu) = without {
                    state.lose(gpu, false).unwrap();
                }
                state.reboot();
            });
            node.clear_run_dir();
        });
        // The daemon restores prepared claims after a moment.
        self.degraded.extend(0..GPU_COUNT);
    }

    /// Resets a GPU, which loses its state. Its processes exit first.
    pub(crate) async fn reset(&mut self, gpu: usize) {
        for slot in 0..self.claims.len() {
            if self.claims[slot].as_ref().is_some_and(|claim| claim.is_on(gpu)) {
                self.end_clients(slot).await;
            }
        }
        let is_on_gpu = |target: &str| self.gpu_of_target(target) == Some(gpu);
        let servers = mps_processes(&self.node.run_dir());
        servers.iter().filter(|one| one.is_server && is_on_gpu(&one.target)).for_each(|server| server.kill());
        self.degraded.insert(gpu);
        self.node.update_sim(|state| state.reset(gpu, true).unwrap());
    }

    /// Drains the daemon, or ends that. A daemon that has not answered yet may not handle the signals.
    async fn drain(&mut self, over: bool) {
        if !self.answered || self.drained != over {
            return;
        }
        let Some(daemon) = &self.daemon else { return };
        self.degraded.extend(0..GPU_COUNT);
        self.drained = !over;
        daemon.drain(over).await;
    }

    fn remove_tool(&mut self, over: bool) {
        if self.without_tool != over {
            return;
        }
        self.without_tool = !over;
        self.degraded.extend(0..GPU_COUNT);
        let tool = self.node.sim.root().join("usr/bin/nvidia-smi");
        let aside = tool.with_extension("aside");
        let (from, to) = if over { (aside, tool) } else { (tool, aside) };
        std::fs::rename(from, to).unwrap();
    }

    /// The GPU of an MPS directory.
    fn gpu_of_target(&self, name: &str) -> Option<usize> {
        let state = self.node.sim.read().unwrap();
        state.gpus.iter().position(|gpu| name.starts_with(&gpu.uuid))
    }
}

impl Runner {
    /// Ends all failures, retries pending calls, and waits until the node equals the model.
    pub(crate) async fn settle(&mut self) -> Result<(), String> {
        self.node.clear_faults();
        self.set_outage(false);
        self.drain(true).await;
        let debts_may_be_left = self.without_tool;
        self.remove_tool(true);
        if !self.absent_gpus.is_empty() || self.marked {
            self.reboot(None).await;
        } else if debts_may_be_left {
            // A start settles debts at once; a running daemon waits for its next audit.
            self.kill(Victim::Node, |_| ());
        }
        for slot in 0..CLAIM_SLOTS {
            self.finish_claim(slot).await?;
        }
        let begun = Instant::now();
        loop {
            let claims: Vec<&ModelClaim> = self.claims.iter().flatten().filter(|c| c.is_prepared()).collect();
            let found = differences(&self.node, &claims);
            if found.is_empty() {
                break;
            }
            if begun.elapsed() > self.settle_timeout {
                return Err(format!("the node has not settled:\n{}", found.join("\n")));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        // The daemon has released the deleted claims by now.
        self.claims.iter_mut().for_each(|claim| drop(claim.take_if(|claim| !claim.is_prepared())));
        self.degraded.clear();
        let has_reconciled = |node: &Daemon| node.has_logged("records reconciled with the API server");
        self.reconciling = self.reconciling && !self.daemon.as_ref().is_some_and(has_reconciled);
        Ok(())
    }

    /// Retries until the claim is prepared or released.
    async fn finish_claim(&mut self, slot: usize) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let Some(model) = self.claims[slot].clone() else { return Ok(()) };
            let cannot_be_prepared = model.deleted
                || model.is_unsatisfiable()
                || self.may_exceed_memory(slot, &model)
                || self.conflicting_claims(slot, &model).next().is_some();
            match model.stage {
                // The daemon releases the claim by itself.
                Stage::Forgotten => return Ok(()),
                Stage::Prepared(_) if model.deleted => self.unprepare(slot).await?,
                Stage::Prepared(_) if cannot_be_prepared => return Ok(()),
                Stage::Prepared(_) | Stage::Allocated | Stage::Preparing if !cannot_be_prepared => {
                    self.prepare(slot).await?
                }
                _ => self.unprepare(slot).await?,
            }
            match &self.claims[slot] {
                None => return Ok(()),
                Some(now) if now.is_prepared() && !now.deleted => return Ok(()),
                Some(now) if begun.elapsed() > self.settle_timeout => {
                    return Err(format!(
                        "claim neither prepared nor released within {:?}: {now:?}",
                        self.settle_timeout
                    ));
                }
                Some(_) => tokio::time::sleep(POLL_INTERVAL).await,
            }
        }
    }

    /// Checks that every GPU can be allocated whole, as on a new node.
    pub(crate) async fn expect_all_gpus_whole(&mut self) -> Result<(), String> {
        self.configure("rules: [{interval: Long, migShares: true}]");
        let request = json!({"deviceClassName": "gpu.divvy.dev", "count": GPU_COUNT - 1});
        let devices = ClaimSpec(json!({"requests": [{"name": "all", "exactly": request}]}));
        let begun = Instant::now();
        // The daemon removes taints a moment after their cause.
        while self.claims[0].is_none() {
            self.allocate(0, &devices)?;
            if begun.elapsed() > self.settle_timeout {
                return Err(format!("not every GPU can be allocated whole after {:?}", self.settle_timeout));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        self.prepare(0).await?;
        self.unprepare(0).await
    }
}
