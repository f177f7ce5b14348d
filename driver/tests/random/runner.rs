//! Runs operations on a node and checks the answers against the model.

use crate::harness::{Daemon, KubeletCall, POLL_INTERVAL, TestNode};
use crate::invariants::{differences, forbidden_state, wrong_device_nodes};
use crate::model::{ModelClaim, ModelDevice, Stage};
use crate::operations::{CLAIM_SLOTS, GPUS, HangUntil, Operation};
use crate::sequence::Failure;
use crate::supervisor::FakeSupervisor;
use divvy_fakes::apiserver::Outage;
use divvy_fakes::kubelet::Outcome;
use divvy_sim::control::{Pattern, When};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::time::{Duration, Instant};

/// Time for the daemon to close or open NVML. A call that hangs keeps the library loaded.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two device nodes after a late boot.
const LATE_NODES_MS: u64 = 300;
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
    /// Whether a GPU had a fatal XID since the last reboot.
    marked: bool,
    /// Whether NVML is closed by a signal.
    drained: bool,
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
            Operation::Reboot { without, late } => self.reboot(*without, *late),
            Operation::Xid { gpu, xid } => {
                let is_fatal = divvy_model::xid::find(*xid).is_some_and(|xid| xid.class.state().is_some());
                if !self.absent_gpus.contains(gpu) {
                    self.degraded |= is_fatal;
                    self.marked |= is_fatal;
                    self.node.update_sim(|state| state.xid(*gpu, *xid, None).unwrap());
                }
            }
            Operation::Drain { over } => self.drain(!over).await,
            Operation::Tool { back } => self.remove_tool(!back),
            Operation::Reset { gpu } => {
                self.degraded = true;
                // An absent GPU cannot be reset.
                if !self.absent_gpus.contains(gpu) {
                    self.node.update_sim(|state| state.reset(*gpu, true).unwrap());
                }
            }
            Operation::Lose { gpu } => {
                if !self.absent_gpus.contains(gpu) {
                    self.degraded = true;
                    self.absent_gpus.push(*gpu);
                    self.node.update_sim(|state| state.lose(*gpu, true).unwrap());
                }
            }
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
        let found = forbidden_state(&self.node, &claims);
        // A daemon that has just started has not withheld files yet. No container can start before.
        let found =
            found.or_else(|| if self.recovering { None } else { wrong_device_nodes(&self.node, &claims) });
        found.map_or(Ok(()), Err)
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
        (self.recovering, self.drained) = (true, false);
    }

    fn forget(&mut self, slot: usize) {
        let Some(model) = &mut self.claims[slot] else { return };
        model.stage = Stage::Forgotten;
        self.node.delete_by_force(&model.claim);
        self.restart(|_| ());
    }

    /// Closes NVML, as before a replacement of the GPU driver, or opens it again.
    async fn drain(&mut self, begins: bool) {
        // A daemon that has just started has not installed its signal handlers.
        if let Some(daemon) = &self.daemon
            && begins != self.drained
            && !self.recovering
        {
            (self.drained, self.degraded) = (begins, true);
            let signal = if begins { "-USR1" } else { "-USR2" };
            let sent = std::process::Command::new("kill").args([signal, &daemon.pid().to_string()]).status();
            assert!(sent.unwrap().success());
            // Two signals that are pending at once have no order.
            let maps = format!("/proc/{}/maps", daemon.pid());
            let begun = Instant::now();
            while std::fs::read_to_string(&maps).unwrap().contains("libnvidia-ml") == begins
                && begun.elapsed() < SIGNAL_TIMEOUT
            {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
    }

    fn remove_tool(&mut self, is_removed: bool) {
        let tool = self.node.sim.root().join("usr/bin/nvidia-smi");
        let aside = tool.with_extension("aside");
        let (from, to) = if is_removed { (&tool, &aside) } else { (&aside, &tool) };
        if from.exists() {
            self.degraded = true;
            std::fs::rename(from, to).unwrap();
        }
    }

    fn reboot(&mut self, without: Option<usize>, late: bool) {
        let absent_gpus: Vec<usize> = without.into_iter().collect();
        self.degraded |= !absent_gpus.is_empty() || late;
        self.marked = false;
        let back = std::mem::replace(&mut self.absent_gpus, absent_gpus);
        self.restart(|node| {
            node.update_sim(|state| {
                for gpu in back {
                    state.find(gpu).unwrap();
                }
                if let Some(gpu) = without {
                    state.lose(gpu, false).unwrap();
                }
                state.host.node_delay_ms = if late { LATE_NODES_MS } else { 0 };
                state.reboot();
            });
            if late {
                node.sim.start_node_helper().unwrap();
            }
            node.clear_run_dir();
        });
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
        self.drain(false).await;
        self.remove_tool(false);
        if !self.absent_gpus.is_empty() || self.marked {
            self.reboot(None, false);
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
