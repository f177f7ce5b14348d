//! Runs operations on a node and holds what comes of them against the model.

use crate::calls::Call;
use crate::harness::{DRIVER, Daemon, NODE, World};
use crate::look::never;
use crate::model::{Modelled, Stage};
use crate::operations::{CLAIMS, GPUS, MIG_ON, Odd, Operation};
use crate::processes::{Client, Keeper};
use crate::scheduler::{Decision, Scheduler, claim};
use crate::sequence::Failure;
use crate::wish::Wish;
use divvy_api::sharing::Mode;
use divvy_fakes::apiserver::Outage;
use divvy_fakes::kubelet::Outcome;
use divvy_kubelet::dra::v1::Claim;
use divvy_sim::control::Pattern;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const FLAGS: [&str; 4] = ["--mig-hold-off", "0s", "--answer-within", "30s"];

/// A node in the storm.
pub(crate) struct Runner {
    // Processes before the world, which is removed last.
    pub(crate) node: Option<Daemon>,
    pub(crate) clients: Vec<(usize, Client)>,
    pub(crate) keeper: Keeper,
    pub(crate) world: World,
    scheduler: Scheduler,
    pub(crate) claims: Vec<Option<Modelled>>,
    pub(crate) patience: Duration,
    /// Makes UIDs.
    made: usize,
    /// GPUs on which something is or was wrong: refusals may have that reason.
    pub(crate) rough: BTreeSet<usize>,
    outage: bool,
    /// The node daemon has not held its records against the API server yet, as it does after its start, and again a while after
    /// it has failed to: it may find out which claims are deleted.
    pub(crate) reconciling: bool,
    /// What happened, for the summary.
    pub(crate) tally: BTreeMap<String, usize>,
}

impl Runner {
    /// A node that may take so long to settle.
    pub(crate) async fn up(patience: Duration) -> Self {
        let world = World::up(GPUS).await;
        world.change(|state| state.set_mig_mode(MIG_ON, true).map(|_| ()).unwrap());
        world.long_turns();
        let keeper = Keeper::new(&world);
        let mut runner = Self {
            node: None,
            clients: Vec::new(),
            keeper,
            world,
            scheduler: Scheduler::new(),
            claims: vec![None; CLAIMS],
            patience,
            made: 0,
            rough: BTreeSet::new(),
            outage: false,
            reconciling: true,
            tally: BTreeMap::new(),
        };
        runner.start_node();
        runner.world.kubelet.wait_registered(DRIVER, 1, patience).await.unwrap();
        crate::harness::until("slices are published", || !runner.world.published().is_empty()).await;
        runner
    }

    pub(crate) fn start_node(&mut self) {
        self.world.api.clear_requests();
        let config = self.world.path("config.yaml").display().to_string();
        let flags: Vec<&str> = FLAGS.iter().copied().chain(["--config", &config]).collect();
        self.node = Some(self.world.spawn(&flags));
    }

    pub(crate) fn count(&mut self, what: impl Into<String>) {
        *self.tally.entry(what.into()).or_default() += 1;
    }

    pub(crate) fn failed(&self, at: usize, why: String) -> Failure {
        let tail = |text: String| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(60)..].join("\n")
        };
        let node = tail(self.node.as_ref().map(Daemon::log).unwrap_or_default());
        let keeper = tail(std::fs::read_to_string(self.world.path("keeper-log")).unwrap_or_default());
        let clients: Vec<_> = self.clients.iter().map(|(slot, client)| (*slot, client.id())).collect();
        let gpus = self.world.sim.read().map(|state| format!("{:#?}", state.gpus)).unwrap_or_default();
        let log = format!(
            "--- divvy-node\n{node}\n--- divvy-keeper\n{keeper}\n--- clients (slot, process): {clients:?}\n{gpus}"
        );
        Failure { at, why, log }
    }

    pub(crate) async fn run(&mut self, operation: &Operation) -> Result<(), String> {
        match operation {
            Operation::Claim { slot, devices } => {
                self.allocate(*slot, devices)?;
                self.prepare(*slot).await?;
            }
            Operation::Allocate { slot, devices } => self.allocate(*slot, devices)?,
            Operation::Bogus { slot, devices } => {
                if self.claims[*slot].is_none() {
                    self.misallocate(*slot, devices);
                    self.prepare(*slot).await?;
                }
            }
            Operation::Unprepare { slot } => {
                let slot = self.next(*slot, |_| true);
                self.unprepare(slot).await?;
            }
            Operation::Force { slot } => {
                let slot = self.next(*slot, |claim| claim.is_prepared() && !claim.deleted);
                self.force(slot).await;
            }
            Operation::Use { slot } => {
                let slot =
                    self.next(*slot, |claim| claim.parts().any(|part| !part.admin) && claim.is_prepared());
                self.use_devices(slot).await?;
            }
            Operation::Fault { slot, devices, call, when, code } => {
                let Some((asked, modelled)) = self.next_call(*slot, devices).await? else { return Ok(()) };
                let calls = asked.hardware(&modelled);
                let Some(call) = calls.get(call % calls.len().max(1)) else { return Ok(()) };
                let gpus: Vec<usize> = modelled.parts().map(|part| part.gpu).collect();
                self.world.change(|state| state.add_fault(pattern(call, &gpus), Some(1), *when, *code));
                let before = self.rough.clone();
                self.rough.extend(&gpus);
                let answer = asked.answer(&self.world, &modelled.claim).await?;
                self.answered(asked, *slot, answer)?;
                let struck = self.world.sim.read().unwrap().control.faults.is_empty();
                self.count(format!("fault of {call}{}", if struck { "" } else { " not met" }));
                self.world.change(|state| state.clear_faults(None));
                // A GPU that could not be read is out of service for a while, and a daemon that died starts anew.
                if !call.contains("Get") && !call.starts_with("mps") {
                    self.rough = before;
                }
            }
            Operation::Cut { slot, devices, call, when, who } => {
                let Some((asked, modelled)) = self.next_call(*slot, devices).await? else { return Ok(()) };
                let calls = asked.hardware(&modelled);
                let Some(call) = calls.get(call % calls.len().max(1)) else { return Ok(()) };
                self.cut(*slot, (asked, modelled), call, *when, *who).await?;
            }
            Operation::Kill { who } => self.kill(*who, |_| ()),
            Operation::KillMps { which, server } => self.kill_mps(*which, *server),
            Operation::Configure { interval, gpu, modes } => {
                let rules = format!(
                    "rules: [{{interval: {interval}}}, {{match: {{indices: [{gpu}]}}, modes: {modes}}}]"
                );
                self.configure(&rules);
            }
            Operation::Kubelet => self.world.kubelet.restart(),
            Operation::Reboot => self.reboot().await,
            Operation::Reset { gpu } => self.reset(*gpu).await,
            Operation::Outage { over } => self.set_outage(!over),
            Operation::Settle => self.settle().await?,
            Operation::ReleaseAll => {
                self.settle().await?;
                for slot in 0..CLAIMS {
                    self.unprepare(slot).await?;
                }
                self.settle().await?;
                self.all_is_whole().await?;
            }
        }
        let claims: Vec<&Modelled> = self.claims.iter().flatten().collect();
        never(&self.world, &claims).map_or(Ok(()), Err)
    }

    /// The next such claim from there on, if there is one.
    fn next(&self, slot: usize, wanted: impl Fn(&Modelled) -> bool) -> usize {
        let mut slots = (slot..CLAIMS).chain(0..slot);
        slots.find(|at| self.claims[*at].as_ref().is_some_and(&wanted)).unwrap_or(slot)
    }

    /// What is next in the claim's life; one that waits in vain makes room for another.
    async fn next_call(&mut self, slot: usize, devices: &Wish) -> Result<Option<(Call, Modelled)>, String> {
        if self.claims[slot].as_ref().is_some_and(|claim| claim.stage == Stage::Waiting || claim.is_absurd())
        {
            self.unprepare(slot).await?;
        }
        self.allocate(slot, devices)?;
        let modelled = self.claims[slot].clone();
        let next = modelled.and_then(|modelled| match modelled.stage {
            Stage::Forgotten => None,
            Stage::Allocated | Stage::Waiting if modelled.deleted => None,
            Stage::Allocated | Stage::Waiting => Some((Call::Prepare, modelled)),
            Stage::Prepared(_) | Stage::Ending => Some((Call::Unprepare, modelled)),
        });
        if matches!(next, Some((Call::Unprepare, _))) {
            self.end_clients(slot).await;
        }
        Ok(next)
    }

    fn name(&mut self) -> String {
        self.made += 1;
        format!("c{}", self.made)
    }

    /// Lets the scheduler find devices for a claim, unless there is one.
    pub(crate) fn allocate(&mut self, slot: usize, Wish(devices): &Wish) -> Result<(), String> {
        if self.claims[slot].is_some() {
            return Ok(());
        }
        let name = self.name();
        let known = self.claims.iter().flatten().filter(|claim| !claim.bogus && !claim.deleted);
        let known: Vec<&Modelled> = known.collect();
        let sees = |name: &str| known.iter().any(|claim| claim.claim.name == name);
        let allocation = match self.scheduler.decide(&self.world, &name, devices, sees) {
            Decision::Allocated(allocation) => allocation,
            Decision::Refused(why) => {
                self.count(format!("refused at admission: {why}"));
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
        let modelled = self.model(&name, devices, &allocation, false);
        if let Some(other) = known.iter().find(|other| other.excludes(&modelled)) {
            return Err(format!("the scheduler gave {modelled:?} what {other:?} has"));
        }
        if modelled.is_absurd() || modelled.has_no_room(&known) {
            return Err(format!("the scheduler gave what cannot be had: {modelled:?} beside {known:?}"));
        }
        self.claims[slot] = Some(modelled);
        Ok(())
    }

    /// Gives a claim these devices, whoever else has them.
    fn misallocate(&mut self, slot: usize, devices: &[Odd]) {
        let name = self.name();
        let result = |(at, odd): (usize, &Odd)| {
            let mut result = json!({
                "request": format!("r{at}"), "driver": DRIVER, "pool": NODE, "device": odd.name,
            });
            if odd.admin {
                result["adminAccess"] = json!(true);
            }
            let consumed = match odd.name.rsplit('-').next() {
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
        self.claims[slot] = Some(self.model(&name, &json!({}), &allocation, true));
    }

    /// Has the API server know the claim.
    fn model(&self, name: &str, devices: &Value, allocation: &AllocationResult, bogus: bool) -> Modelled {
        let mut object = claim(name, devices);
        object["status"] = json!({"allocation": allocation});
        self.world.api.put(object);
        let reference = Claim { namespace: "ns".to_owned(), uid: name.to_owned(), name: name.to_owned() };
        Modelled::new(reference, allocation, &self.world.sim.read().unwrap().gpus, bogus)
    }

    pub(crate) async fn prepare(&mut self, slot: usize) -> Result<(), String> {
        let Some(modelled) = self.claims[slot].clone() else { return Ok(()) };
        if modelled.deleted || matches!(modelled.stage, Stage::Ending | Stage::Forgotten) {
            return Ok(());
        }
        let outcome = Call::Prepare.answer(&self.world, &modelled.claim).await?;
        self.prepared(slot, outcome)
    }

    /// Whether a refusal may have a reason in the node.
    fn is_rough(&self, claim: &Modelled) -> bool {
        self.outage || claim.parts().any(|part| self.rough.contains(&part.gpu))
    }

    /// Claims that the node may have something of and that exclude this one.
    pub(crate) fn in_the_way<'a>(
        &'a self,
        slot: usize,
        claim: &'a Modelled,
    ) -> impl Iterator<Item = &'a Modelled> {
        let others = self.claims.iter().enumerate().filter(move |(at, _)| *at != slot);
        others
            .filter_map(|(_, other)| other.as_ref())
            .filter(|other| other.may_hold() && other.excludes(claim))
    }

    /// Other claims that the node may have something of.
    fn holders(&self, slot: usize) -> Vec<&Modelled> {
        let others = self.claims.iter().enumerate().filter(|(at, _)| *at != slot);
        others.filter_map(|(_, other)| other.as_ref()).filter(|other| other.may_hold()).collect()
    }

    /// Whether shares that the node may have leave no room, or nobody knows whether
    /// their instance is there.
    pub(crate) fn is_crowded(&self, slot: usize, claim: &Modelled) -> bool {
        let others = self.holders(slot);
        let half_done = |other: &&Modelled| !other.is_prepared() && other.is_beside_in_instance(claim);
        claim.has_no_room(&others) || others.iter().any(half_done)
    }

    /// Holds the answer of a prepare against the model.
    fn prepared(&mut self, slot: usize, outcome: Outcome) -> Result<(), String> {
        let Some(modelled) = self.claims[slot].clone() else { return Ok(()) };
        let uid = &modelled.claim.uid;
        let rough = self.is_rough(&modelled);
        let stage = match (outcome, &modelled.stage) {
            (Ok(answer), Stage::Prepared(before)) if answer != *before => {
                return Err(format!("{uid} was answered {before:?}, then {answer:?}"));
            }
            (Ok(answer), _) => {
                if modelled.is_absurd() {
                    return Err(format!("{modelled:?} was prepared"));
                }
                if let Some(other) = self.in_the_way(slot, &modelled).find(|other| other.is_prepared()) {
                    return Err(format!("{modelled:?} was prepared in spite of {other:?}"));
                }
                let prepared: Vec<&Modelled> =
                    self.holders(slot).into_iter().filter(|other| other.is_prepared()).collect();
                if modelled.has_no_room(&prepared) {
                    return Err(format!("{modelled:?} was prepared in spite of {prepared:?}"));
                }
                if !modelled.is_prepared() {
                    for part in modelled.parts() {
                        let how = part.sharing.filter(|_| matches!(part.mode, Mode::Whole | Mode::Mig));
                        let how = how.map_or(String::new(), |how| format!(" with {how:?}"));
                        let how = if part.memory.is_some() { " share".to_owned() } else { how };
                        let who = if modelled.bogus { " though bogus" } else { "" };
                        let admin = if part.admin { " looked on" } else { "" };
                        self.count(format!("prepared: {}{how}{admin}{who}", part.mode));
                    }
                }
                Stage::Prepared(answer)
            }
            (Err(error), stage) => {
                let in_the_way = self.in_the_way(slot, &modelled).next();
                let crowded = self.is_crowded(slot, &modelled);
                if !rough && !modelled.is_absurd() && in_the_way.is_none() && !crowded {
                    return Err(format!("{modelled:?} was refused: {error}"));
                }
                let why = match in_the_way {
                    _ if modelled.is_absurd() => "absurd",
                    Some(other) if other.deleted => "forced",
                    Some(_) => "in the way",
                    None if crowded => "crowded",
                    None => "rough",
                };
                self.count(format!("refused: {why}"));
                match stage {
                    // A plan that is refused leaves nothing.
                    Stage::Allocated if !rough => Stage::Allocated,
                    Stage::Allocated => Stage::Waiting,
                    stage => stage.clone(),
                }
            }
        };
        self.claims[slot] = Some(Modelled { stage, ..modelled });
        Ok(())
    }

    pub(crate) async fn unprepare(&mut self, slot: usize) -> Result<(), String> {
        self.end_clients(slot).await;
        let Some(modelled) = self.claims[slot].clone() else { return Ok(()) };
        let outcome = Call::Unprepare.answer(&self.world, &modelled.claim).await?;
        self.unprepared(slot, outcome)
    }

    /// Holds the answer of an unprepare against the model.
    fn unprepared(&mut self, slot: usize, outcome: Outcome) -> Result<(), String> {
        let Some(modelled) = self.claims[slot].take() else { return Ok(()) };
        match outcome {
            Ok(_) => {
                self.world.api.delete::<ResourceClaim>("ns", &modelled.claim.name);
            }
            Err(error) if !self.is_rough(&modelled) => {
                return Err(format!("{modelled:?} was not released: {error}"));
            }
            Err(_) => self.claims[slot] = Some(Modelled { stage: Stage::Ending, ..modelled }),
        }
        Ok(())
    }

    pub(crate) fn answered(&mut self, asked: Call, slot: usize, outcome: Outcome) -> Result<(), String> {
        match asked {
            Call::Prepare => self.prepared(slot, outcome),
            Call::Unprepare => self.unprepared(slot, outcome),
        }
    }

    async fn force(&mut self, slot: usize) {
        if self.reconciling {
            self.end_clients(slot).await;
        }
        if let Some(modelled) = &mut self.claims[slot] {
            if self.reconciling {
                // It may find out.
                modelled.stage = Stage::Ending;
            }
            modelled.deleted = true;
            self.world.api.delete::<ResourceClaim>("ns", &modelled.claim.name);
        }
    }

    pub(crate) fn configure(&self, rules: &str) {
        let text = format!("apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\n{rules}\n");
        let (path, part) = (self.world.path("config.yaml"), self.world.path("config.part"));
        std::fs::write(&part, text).and_then(|()| std::fs::rename(part, path)).unwrap();
    }

    pub(crate) fn set_outage(&mut self, begins: bool) {
        self.outage = begins;
        self.world.api.set_outage(begins.then_some(Outage::Refuse));
    }
}

/// Those calls of the first GPU alone, where they say which they are about:
/// control daemons of others are asked all the time. nvidia-smi does not say it.
pub(crate) fn pattern(call: &str, gpus: &[usize]) -> Pattern {
    let gpu = gpus.first().copied().filter(|_| call.starts_with("mps"));
    Pattern { call: call.to_owned(), gpu }
}
