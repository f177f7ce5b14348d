//! Runs operations on a node and checks the answers against the model.

use crate::device_nodes::wrong_device_node;
use crate::harness::{Daemon, KubeletCall, POLL_INTERVAL, TestNode, compare_dir};
use crate::invariants::{differences, forbidden_state};
use crate::model::{ModelClaim, ModelDevice, Stage};
use crate::operations::{CLAIM_SLOTS, FATAL_XIDS, GPUS, HangUntil, Operation};
use crate::sequence::Failure;
use crate::supervisor::FakeSupervisor;
use divvy_fakes::apiserver::Outage;
use divvy_fakes::kubelet::Outcome;
use divvy_sim::control::{Pattern, When};
use divvy_sim::state::Loss;
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Flags of the daemon, besides the node configuration.
const FLAGS: [&str; 8] = [
    "--mig-hold-off",
    "0s",
    // Short timeouts, so that the daemon soon answers a kubelet call whose NVML call hangs.
    "--nvml-mode-timeout",
    "2s",
    "--nvml-create-timeout",
    "2s",
    "--nvml-destroy-timeout",
    "2s",
];

/// Time between two device nodes that appear late, in ms.
const NODE_DELAY_MS: u64 = 50;

/// A node under random operations, and its model.
pub(crate) struct Runner {
    // Declared before `node`, so that the daemon is killed before the node is removed.
    daemon: Option<Daemon>,
    _supervisor: FakeSupervisor,
    node: TestNode,
    claims: Vec<Option<ModelClaim>>,
    settle_timeout: Duration,
    /// Number of faults that hit a call, and of calls that hung.
    pub(crate) faults_hit: usize,
    pub(crate) calls_held: usize,
    /// Number of claims so far, from which UIDs are made.
    claims_created: usize,
    /// A failure is or was active since the node last settled, so the daemon may refuse calls.
    degraded: bool,
    /// The daemon has not answered since it started. A fault may hit its recovery, which the daemon retries
    /// later.
    recovering: bool,
    outage: bool,
    /// Indices of GPUs that are lost or missing.
    absent_gpus: Vec<usize>,
    /// A GPU had a fatal XID in this boot.
    marked: bool,
    /// NVML is closed by SIGUSR1.
    drained: bool,
    /// `nvidia-smi` is missing.
    without_tool: bool,
}

fn flags(node: &TestNode) -> Vec<String> {
    let config = node.write_long_timeslice_config().display().to_string();
    FLAGS.iter().map(|flag| (*flag).to_owned()).chain(["--config".to_owned(), config]).collect()
}

impl Runner {
    /// A node with this time limit for settling.
    pub(crate) async fn new(settle_timeout: Duration) -> Self {
        let node = TestNode::new(GPUS).await;
        let supervisor = FakeSupervisor::start(&node.run_dir());
        let flags = flags(&node);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let daemon = Some(node.start_daemon(&flags).await);
        let claims = vec![None; CLAIM_SLOTS];
        Self {
            daemon,
            _supervisor: supervisor,
            node,
            claims,
            settle_timeout,
            faults_hit: 0,
            calls_held: 0,
            claims_created: 0,
            degraded: false,
            recovering: false,
            outage: false,
            absent_gpus: Vec::new(),
            marked: false,
            drained: false,
            without_tool: false,
        }
    }

    pub(crate) fn failed(&mut self, at: usize, cause: String) -> Failure {
        let log = self.daemon.as_ref().map(Daemon::log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let log = lines[lines.len().saturating_sub(60)..].join("\n");
        Failure { at, cause, log }
    }

    pub(crate) async fn run(&mut self, operation: &Operation) -> Result<(), String> {
        match operation {
            Operation::Prepare { claim, devices } => self.prepare(*claim, devices).await?,
            Operation::Unprepare { claim } => self.unprepare(*claim).await?,
            Operation::Fault { claim, devices, call, nth, when, code } => {
                let Some((kubelet_call, model)) = self.next_call(*claim, devices).await? else {
                    return Ok(());
                };
                let call = kubelet_call.nvml_call(&model.devices, *call);
                self.node.update_sim(|state| state.add_fault(Pattern::new(call), Some(*nth), *when, *code));
                let before = std::mem::replace(&mut self.degraded, true) || self.recovering;
                let answer = kubelet_call.send_with_retry(&self.node, &model.claim).await?;
                self.answered(kubelet_call, *claim, answer)?;
                self.faults_hit += usize::from(self.node.sim.read().unwrap().control.faults.is_empty());
                self.node.update_sim(|state| state.clear_faults(None));
                // A GPU that could not be read stays out of service for a while.
                self.degraded = before || call.contains("Get");
            }
            Operation::Hang { claim, devices, call, when, until } => {
                self.hang(*claim, devices, *call, *when, *until).await?;
            }
            Operation::Kill => self.restart(|_| ()),
            Operation::Forget { claim } => self.forget(*claim),
            Operation::Reboot { without } => self.reboot(*without, 0),
            Operation::RebootWithLateNodes => {
                self.degraded = true;
                self.reboot(None, NODE_DELAY_MS);
            }
            Operation::Move => self.move_away_and_back().await?,
            Operation::Reset { gpu } => {
                self.degraded = true;
                // An absent GPU cannot be reset.
                if !self.absent_gpus.contains(gpu) {
                    self.node.update_sim(|state| state.reset(*gpu, true).unwrap());
                }
            }
            Operation::Lose { gpu, silent } => {
                if !self.absent_gpus.contains(gpu) {
                    self.degraded = true;
                    self.absent_gpus.push(*gpu);
                    let loss = Loss { silent: *silent, code: None };
                    self.node.update_sim(|state| state.lose_as(*gpu, true, loss).unwrap());
                }
            }
            Operation::Xid { gpu, xid } => {
                if !self.absent_gpus.contains(gpu) {
                    let is_fatal = FATAL_XIDS.contains(xid);
                    self.degraded |= is_fatal;
                    self.marked |= is_fatal;
                    self.node.update_sim(|state| state.xid(*gpu, *xid, None).unwrap());
                }
            }
            Operation::Drain { over } => self.drain(*over).await,
            Operation::RemoveTool { over } => self.remove_tool(*over),
            Operation::Outage { over } => self.outage(!over),
            Operation::Settle => self.settle().await?,
            Operation::ReleaseAll => {
                self.settle().await?;
                for slot in 0..CLAIM_SLOTS {
                    self.unprepare(slot).await?;
                }
                self.settle().await?;
            }
        }
        let claims: Vec<&ModelClaim> = self.claims.iter().flatten().collect();
        let device_node = || (!self.recovering).then(|| wrong_device_node(&self.node, |_| false)).flatten();
        forbidden_state(&self.node, &claims).or_else(device_node).map_or(Ok(()), Err)
    }

    /// The next call for the claim. A claim that could not be prepared is first replaced by a new one.
    async fn next_call(
        &mut self,
        slot: usize,
        devices: &[String],
    ) -> Result<Option<(KubeletCall, ModelClaim)>, String> {
        if self.claims[slot].as_ref().is_some_and(|claim| claim.stage == Stage::Preparing) {
            self.unprepare(slot).await?;
        }
        self.allocate(slot, devices);
        let model = self.claims[slot].clone();
        Ok(model.and_then(|model| match model.stage {
            Stage::Forgotten => None,
            Stage::Preparing => Some((KubeletCall::Prepare, model)),
            Stage::Prepared(_) | Stage::Releasing => Some((KubeletCall::Unprepare, model)),
        }))
    }

    fn allocate(&mut self, slot: usize, devices: &[String]) {
        if self.claims[slot].is_some() {
            return;
        }
        self.claims_created += 1;
        let names: Vec<&str> = devices.iter().map(String::as_str).collect();
        let claim = self.node.claim(&format!("c{}", self.claims_created), &names);
        let devices = names.into_iter().map(ModelDevice::parse).collect();
        self.claims[slot] = Some(ModelClaim { claim, devices, stage: Stage::Preparing });
    }

    async fn prepare(&mut self, slot: usize, devices: &[String]) -> Result<(), String> {
        self.allocate(slot, devices);
        let Some(model) = self.claims[slot].clone() else { return Ok(()) };
        if matches!(model.stage, Stage::Releasing | Stage::Forgotten) {
            return Ok(());
        }
        let outcome = KubeletCall::Prepare.send_with_retry(&self.node, &model.claim).await?;
        self.prepared(slot, outcome)
    }

    /// Checks the answer of a prepare against the model.
    fn prepared(&mut self, slot: usize, outcome: Outcome) -> Result<(), String> {
        self.recovering = false;
        let Some(model) = self.claims[slot].clone() else { return Ok(()) };
        let uid = &model.claim.uid;
        let others: Vec<&ModelClaim> = self.others(slot).collect();
        let prepared: Vec<&ModelClaim> = others.iter().copied().filter(|other| other.is_prepared()).collect();
        let stage = match (outcome, &model.stage) {
            (Ok(answer), Stage::Prepared(before)) if answer != *before => {
                return Err(format!("the answer for {uid} changed from {before:?} to {answer:?}"));
            }
            (Ok(answer), _) => {
                if model.is_unsatisfiable() {
                    return Err(format!("unsatisfiable claim {model:?} was prepared"));
                }
                if model.conflicts_with_any(&prepared) {
                    return Err(format!("{model:?} was prepared although it conflicts with {prepared:?}"));
                }
                Stage::Prepared(answer)
            }
            (Err(error), stage) => {
                let partly_prepared =
                    |other: &&ModelClaim| !other.is_prepared() && other.shares_instance_with(&model);
                let refused = model.is_unsatisfiable()
                    || model.conflicts_with_any(&others)
                    || others.iter().any(partly_prepared);
                if !self.degraded && !refused {
                    return Err(format!("{model:?} was refused: {error}"));
                }
                stage.clone()
            }
        };
        self.claims[slot] = Some(ModelClaim { stage, ..model });
        Ok(())
    }

    fn others(&self, slot: usize) -> impl Iterator<Item = &ModelClaim> {
        self.claims
            .iter()
            .enumerate()
            .filter(move |(at, _)| *at != slot)
            .filter_map(|(_, other)| other.as_ref())
    }

    async fn unprepare(&mut self, slot: usize) -> Result<(), String> {
        let Some(model) = self.claims[slot].clone() else { return Ok(()) };
        if model.stage == Stage::Forgotten {
            return Ok(());
        }
        let outcome = KubeletCall::Unprepare.send_with_retry(&self.node, &model.claim).await?;
        self.unprepared(slot, outcome)
    }

    /// Checks the answer of an unprepare against the model.
    fn unprepared(&mut self, slot: usize, outcome: Outcome) -> Result<(), String> {
        self.recovering = false;
        let Some(model) = self.claims[slot].take() else { return Ok(()) };
        match outcome {
            Ok(_) => {
                self.node.api.delete::<ResourceClaim>("ns", &model.claim.name);
            }
            Err(error) if !self.degraded => return Err(format!("{model:?} was not released: {error}")),
            Err(_) => self.claims[slot] = Some(ModelClaim { stage: Stage::Releasing, ..model }),
        }
        Ok(())
    }

    fn answered(&mut self, kubelet_call: KubeletCall, slot: usize, outcome: Outcome) -> Result<(), String> {
        match kubelet_call {
            KubeletCall::Prepare => self.prepared(slot, outcome),
            KubeletCall::Unprepare => self.unprepared(slot, outcome),
        }
    }

    async fn hang(
        &mut self,
        slot: usize,
        devices: &[String],
        call: usize,
        when: When,
        until: HangUntil,
    ) -> Result<(), String> {
        let Some((kubelet_call, model)) = self.next_call(slot, devices).await? else { return Ok(()) };
        let name = kubelet_call.nvml_call(&model.devices, call);
        let before = std::mem::replace(&mut self.degraded, true) || self.recovering;
        self.node.update_sim(|state| state.add_hold(Pattern::new(name), Some(1), when));
        let held = || !self.node.sim.read().unwrap().control.held.is_empty();
        let mut reached = true;
        let answer = {
            let call = kubelet_call.send_with_retry(&self.node, &model.claim);
            tokio::pin!(call);
            let early = tokio::select! {
                answer = &mut call => Some(answer),
                () = async { while !held() { tokio::time::sleep(POLL_INTERVAL).await } } => None,
            };
            match (early, until) {
                (Some(answer), _) => {
                    reached = false;
                    Some(answer?)
                }
                (None, HangUntil::Answered) => Some(call.await?),
                (None, HangUntil::Reached) => {
                    self.node.clear_faults();
                    Some(call.await?)
                }
                (None, HangUntil::Killed) => None,
            }
        };
        self.calls_held += usize::from(reached);
        let Some(answer) = answer else {
            self.degraded = before;
            self.restart(|node| node.clear_faults());
            if let (KubeletCall::Unprepare, Some(model)) = (kubelet_call, &mut self.claims[slot]) {
                model.stage = Stage::Releasing;
            }
            return Ok(());
        };
        self.node.clear_faults();
        self.answered(kubelet_call, slot, answer)?;
        // A GPU that was marked as stuck stays out of service for a while.
        self.degraded = before || until == HangUntil::Answered;
        Ok(())
    }

    fn restart(&mut self, between: impl FnOnce(&TestNode)) {
        if let Some(daemon) = self.daemon.take() {
            daemon.kill();
        }
        between(&self.node);
        // The old log is long and no longer needed.
        let _ = std::fs::remove_file(self.node.path("log"));
        let flags = flags(&self.node);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        self.daemon = Some(self.node.spawn_daemon(&flags));
        self.recovering = true;
        self.drained = false;
    }

    fn forget(&mut self, slot: usize) {
        let Some(model) = &mut self.claims[slot] else { return };
        model.stage = Stage::Forgotten;
        self.node.delete_by_force(&model.claim);
        self.restart(|_| ());
    }

    /// Reboots the node with the GPUs that were lost, perhaps without one. The device nodes appear with
    /// this delay between two of them.
    fn reboot(&mut self, without: Option<usize>, node_delay_ms: u64) {
        let absent_gpus: Vec<usize> = without.into_iter().collect();
        self.degraded |= !absent_gpus.is_empty();
        let back = std::mem::replace(&mut self.absent_gpus, absent_gpus);
        self.marked = false;
        self.restart(|node| {
            node.update_sim(|state| {
                for gpu in back {
                    state.find(gpu).unwrap();
                }
                if let Some(gpu) = without {
                    state.lose(gpu, false).unwrap();
                }
                state.host.node_delay_ms = node_delay_ms;
                state.reboot();
                state.host.node_delay_ms = 0;
            });
            node.clear_run_dir();
        });
    }

    /// Boots on another host, where no claim can be used, and then on the first host again.
    async fn move_away_and_back(&mut self) -> Result<(), String> {
        let boards = self.node.sim.read().unwrap().gpus.clone();
        self.node.update_sim(divvy_sim::State::migrate);
        self.degraded = true;
        self.reboot(None, 0);
        let prepared = self.claims.iter().flatten().find(|claim| claim.is_prepared()).cloned();
        if let Some(model) = prepared {
            let outcome = KubeletCall::Prepare.send_with_retry(&self.node, &model.claim).await?;
            if let Ok(answer) = outcome {
                return Err(format!("{model:?} was prepared on another host: {answer:?}"));
            }
            let mut found = Vec::new();
            compare_dir(&self.node.cdi_dir(), &BTreeSet::new(), &mut found);
            if let Some(found) = found.pop() {
                return Err(format!("on another host, {found}"));
            }
        }
        self.node.update_sim(|state| {
            for (gpu, board) in state.gpus.iter_mut().zip(boards) {
                (gpu.uuid, gpu.serial, gpu.pdi) = (board.uuid, board.serial, board.pdi);
            }
        });
        self.reboot(None, 0);
        Ok(())
    }

    /// Drains the daemon, or ends that. A daemon that has not answered yet may not handle the signals.
    async fn drain(&mut self, over: bool) {
        if self.recovering || self.drained != over {
            return;
        }
        let Some(daemon) = &self.daemon else { return };
        self.degraded = true;
        self.drained = !over;
        daemon.drain(over).await;
    }

    fn remove_tool(&mut self, over: bool) {
        if self.without_tool != over {
            return;
        }
        self.without_tool = !over;
        self.degraded = true;
        let tool = self.node.sim.root().join("usr/bin/nvidia-smi");
        let aside = tool.with_extension("aside");
        let (from, to) = if over { (aside, tool) } else { (tool, aside) };
        std::fs::rename(from, to).unwrap();
    }

    fn outage(&mut self, begins: bool) {
        self.outage = begins;
        self.degraded |= begins;
        self.node.api.set_outage(begins.then_some(Outage::Refuse));
    }

    /// Ends all failures, retries pending calls, and waits until the node equals the model.
    async fn settle(&mut self) -> Result<(), String> {
        self.node.clear_faults();
        if self.outage {
            self.outage(false);
        }
        self.drain(true).await;
        let debts_may_be_left = self.without_tool;
        self.remove_tool(true);
        if !self.absent_gpus.is_empty() || self.marked {
            self.reboot(None, 0);
        } else if debts_may_be_left {
            // A start settles debts at once; a running daemon waits for its next audit.
            self.restart(|_| ());
        }
        for slot in 0..CLAIM_SLOTS {
            self.finish_claim(slot).await?;
        }
        let begun = Instant::now();
        loop {
            let claims: Vec<&ModelClaim> = self.claims.iter().flatten().filter(|c| c.is_prepared()).collect();
            let mut found = differences(&self.node, &claims);
            // Until then, the slices are those of an earlier daemon.
            let published = |daemon: &Daemon| daemon.has_logged(r#"ready condition="published""#);
            if !self.daemon.as_ref().is_some_and(published) {
                found.push("the daemon has not published its devices".to_owned());
            }
            if found.is_empty() {
                break;
            }
            if begun.elapsed() > self.settle_timeout {
                return Err(format!("the node has not settled:\n{}", found.join("\n")));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        self.claims.iter_mut().for_each(|claim| drop(claim.take_if(|claim| !claim.is_prepared())));
        self.degraded = false;
        Ok(())
    }

    /// Retries until the claim is prepared or released.
    async fn finish_claim(&mut self, slot: usize) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let Some(model) = self.claims[slot].clone() else { return Ok(()) };
            let others: Vec<&ModelClaim> = self.others(slot).collect();
            let cannot_be_prepared = model.is_unsatisfiable()
                || model.conflicts_with_any(&others)
                || others.iter().any(|other| !other.is_prepared() && other.shares_instance_with(&model));
            match model.stage {
                // The daemon releases the claim by itself.
                Stage::Forgotten => return Ok(()),
                Stage::Prepared(_) | Stage::Preparing if !cannot_be_prepared => {
                    self.prepare(slot, &[]).await?
                }
                Stage::Prepared(_) => return Ok(()),
                Stage::Preparing | Stage::Releasing => self.unprepare(slot).await?,
            }
            match &self.claims[slot] {
                None => return Ok(()),
                Some(now) if matches!(model.stage, Stage::Preparing) && now.is_prepared() => return Ok(()),
                Some(now) if model.is_prepared() && now.is_prepared() => return Ok(()),
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
}
