//! Runs operations on a node and holds the answers against the model.

use crate::calls::{Call, PAUSE};
use crate::harness::{Daemon, World};
use crate::keeper::FakeKeeper;
use crate::model::{Modelled, Part, Stage};
use crate::operations::{CLAIMS, GPUS, Operation, Until};
use crate::sequence::Failure;
use crate::settled::{differences, never};
use divvy_fakes::apiserver::Outage;
use divvy_fakes::kubelet::Outcome;
use divvy_sim::control::{Pattern, When};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::time::{Duration, Instant};

const FLAGS: [&str; 8] = [
    "--mig-hold-off",
    "0s",
    // A hang is answered soon.
    "--nvml-mode-within",
    "2s",
    "--nvml-create-within",
    "2s",
    "--nvml-destroy-within",
    "2s",
];

pub(crate) struct Runner {
    // Before the world, which is removed last.
    daemon: Option<Daemon>,
    _keeper: FakeKeeper,
    world: World,
    claims: Vec<Option<Modelled>>,
    patience: Duration,
    /// Faults that struck, and calls that hung.
    pub(crate) struck: usize,
    pub(crate) held: usize,
    /// Makes UIDs.
    made: usize,
    /// Something is or was wrong with the node: refusals may have that reason.
    rough: bool,
    /// The daemon has answered nothing since it started: what strikes now may
    /// strike its recovery, which tries again after a while.
    recovering: bool,
    outage: bool,
    /// GPUs that are lost or missing.
    away: Vec<usize>,
}

fn flags(world: &World) -> Vec<String> {
    let config = world.long_turns().display().to_string();
    FLAGS.iter().map(|flag| (*flag).to_owned()).chain(["--config".to_owned(), config]).collect()
}

impl Runner {
    /// A node that may take so long to settle.
    pub(crate) async fn up(patience: Duration) -> Self {
        let world = World::up(GPUS).await;
        let keeper = FakeKeeper::start(&world.run_dir());
        let flags = flags(&world);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let daemon = Some(world.start(&flags).await);
        let claims = vec![None; CLAIMS];
        Self {
            daemon,
            _keeper: keeper,
            world,
            claims,
            patience,
            struck: 0,
            held: 0,
            made: 0,
            rough: false,
            recovering: false,
            outage: false,
            away: Vec::new(),
        }
    }

    pub(crate) fn failed(&mut self, at: usize, why: String) -> Failure {
        let log = self.daemon.as_ref().map(Daemon::log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let log = lines[lines.len().saturating_sub(60)..].join("\n");
        Failure { at, why, log }
    }

    pub(crate) async fn run(&mut self, operation: &Operation) -> Result<(), String> {
        match operation {
            Operation::Prepare { claim, devices } => self.prepare(*claim, devices).await?,
            Operation::Unprepare { claim } => self.unprepare(*claim).await?,
            Operation::Fault { claim, devices, call, nth, when, code } => {
                let Some((asked, modelled)) = self.next_call(*claim, devices).await? else { return Ok(()) };
                let call = asked.hardware(&modelled.devices, *call);
                self.world.change(|state| state.add_fault(Pattern::new(call), Some(*nth), *when, *code));
                let before = std::mem::replace(&mut self.rough, true) || self.recovering;
                let answer = asked.answer(&self.world, &modelled.claim).await?;
                self.answered(asked, *claim, answer)?;
                self.struck += usize::from(self.world.sim.read().unwrap().control.faults.is_empty());
                self.world.change(|state| state.clear_faults(None));
                // A GPU that could not be read is out of service for a while.
                self.rough = before || call.contains("Get");
            }
            Operation::Hang { claim, devices, call, when, until } => {
                self.hang(*claim, devices, *call, *when, *until).await?;
            }
            Operation::Kill => self.restart(|_| ()),
            Operation::Forget { claim } => self.forget(*claim),
            Operation::Reboot { without } => self.reboot(*without),
            Operation::Reset { gpu } => {
                self.rough = true;
                // A GPU that is away has nothing to lose.
                if !self.away.contains(gpu) {
                    self.world.change(|state| state.reset(*gpu, true).unwrap());
                }
            }
            Operation::Lose { gpu } => {
                if !self.away.contains(gpu) {
                    self.rough = true;
                    self.away.push(*gpu);
                    self.world.change(|state| state.lose(*gpu, true).unwrap());
                }
            }
            Operation::Outage { over } => self.outage(!over),
            Operation::Settle => self.settle().await?,
            Operation::ReleaseAll => {
                self.settle().await?;
                for slot in 0..CLAIMS {
                    self.unprepare(slot).await?;
                }
                self.settle().await?;
            }
        }
        let claims: Vec<&Modelled> = self.claims.iter().flatten().collect();
        never(&self.world, &claims).map_or(Ok(()), Err)
    }

    /// What is next in the claim's life; one that waits in vain makes room for another.
    async fn next_call(
        &mut self,
        slot: usize,
        devices: &[String],
    ) -> Result<Option<(Call, Modelled)>, String> {
        if self.claims[slot].as_ref().is_some_and(|claim| claim.stage == Stage::Waiting) {
            self.unprepare(slot).await?;
        }
        self.allocate(slot, devices);
        let modelled = self.claims[slot].clone();
        Ok(modelled.and_then(|modelled| match modelled.stage {
            Stage::Forgotten => None,
            Stage::Waiting => Some((Call::Prepare, modelled)),
            Stage::Prepared(_) | Stage::Ending => Some((Call::Unprepare, modelled)),
        }))
    }

    fn allocate(&mut self, slot: usize, devices: &[String]) {
        if self.claims[slot].is_some() {
            return;
        }
        self.made += 1;
        let names: Vec<&str> = devices.iter().map(String::as_str).collect();
        let claim = self.world.claim(&format!("c{}", self.made), &names);
        let devices = names.into_iter().map(Part::of).collect();
        self.claims[slot] = Some(Modelled { claim, devices, stage: Stage::Waiting });
    }

    async fn prepare(&mut self, slot: usize, devices: &[String]) -> Result<(), String> {
        self.allocate(slot, devices);
        let Some(modelled) = self.claims[slot].clone() else { return Ok(()) };
        if matches!(modelled.stage, Stage::Ending | Stage::Forgotten) {
            return Ok(());
        }
        let outcome = Call::Prepare.answer(&self.world, &modelled.claim).await?;
        self.prepared(slot, outcome)
    }

    /// Holds the answer of a prepare against the model.
    fn prepared(&mut self, slot: usize, outcome: Outcome) -> Result<(), String> {
        self.recovering = false;
        let Some(modelled) = self.claims[slot].clone() else { return Ok(()) };
        let uid = &modelled.claim.uid;
        let others: Vec<&Modelled> = self.others(slot).collect();
        let prepared: Vec<&Modelled> = others.iter().copied().filter(|other| other.is_prepared()).collect();
        let stage = match (outcome, &modelled.stage) {
            (Ok(answer), Stage::Prepared(before)) if answer != *before => {
                return Err(format!("{uid} was answered {before:?}, then {answer:?}"));
            }
            (Ok(answer), _) => {
                if modelled.is_absurd() {
                    return Err(format!("{modelled:?} was prepared"));
                }
                if modelled.is_kept_away(&prepared) {
                    return Err(format!("{modelled:?} was prepared in spite of {prepared:?}"));
                }
                Stage::Prepared(answer)
            }
            (Err(error), stage) => {
                let half_done =
                    |other: &&Modelled| !other.is_prepared() && other.is_beside_in_instance(&modelled);
                let refused =
                    modelled.is_absurd() || modelled.is_kept_away(&others) || others.iter().any(half_done);
                if !self.rough && !refused {
                    return Err(format!("{modelled:?} was refused: {error}"));
                }
                stage.clone()
            }
        };
        self.claims[slot] = Some(Modelled { stage, ..modelled });
        Ok(())
    }

    fn others(&self, slot: usize) -> impl Iterator<Item = &Modelled> {
        self.claims
            .iter()
            .enumerate()
            .filter(move |(at, _)| *at != slot)
            .filter_map(|(_, other)| other.as_ref())
    }

    async fn unprepare(&mut self, slot: usize) -> Result<(), String> {
        let Some(modelled) = self.claims[slot].clone() else { return Ok(()) };
        if modelled.stage == Stage::Forgotten {
            return Ok(());
        }
        let outcome = Call::Unprepare.answer(&self.world, &modelled.claim).await?;
        self.unprepared(slot, outcome)
    }

    /// Holds the answer of an unprepare against the model.
    fn unprepared(&mut self, slot: usize, outcome: Outcome) -> Result<(), String> {
        self.recovering = false;
        let Some(modelled) = self.claims[slot].take() else { return Ok(()) };
        match outcome {
            Ok(_) => {
                self.world.api.delete::<ResourceClaim>("ns", &modelled.claim.name);
            }
            Err(error) if !self.rough => return Err(format!("{modelled:?} was not released: {error}")),
            Err(_) => self.claims[slot] = Some(Modelled { stage: Stage::Ending, ..modelled }),
        }
        Ok(())
    }

    fn answered(&mut self, asked: Call, slot: usize, outcome: Outcome) -> Result<(), String> {
        match asked {
            Call::Prepare => self.prepared(slot, outcome),
            Call::Unprepare => self.unprepared(slot, outcome),
        }
    }

    async fn hang(
        &mut self,
        slot: usize,
        devices: &[String],
        call: usize,
        when: When,
        until: Until,
    ) -> Result<(), String> {
        let Some((asked, modelled)) = self.next_call(slot, devices).await? else { return Ok(()) };
        let name = asked.hardware(&modelled.devices, call);
        let before = std::mem::replace(&mut self.rough, true) || self.recovering;
        self.world.change(|state| state.add_hold(Pattern::new(name), Some(1), when));
        let held = || !self.world.sim.read().unwrap().control.held.is_empty();
        let mut reached = true;
        let answer = {
            let call = asked.answer(&self.world, &modelled.claim);
            tokio::pin!(call);
            let early = tokio::select! {
                answer = &mut call => Some(answer),
                () = async { while !held() { tokio::time::sleep(PAUSE).await } } => None,
            };
            match (early, until) {
                (Some(answer), _) => {
                    reached = false;
                    Some(answer?)
                }
                (None, Until::Answered) => Some(call.await?),
                (None, Until::Noticed) => {
                    self.world.release();
                    Some(call.await?)
                }
                (None, Until::Killed) => None,
            }
        };
        self.held += usize::from(reached);
        let Some(answer) = answer else {
            self.rough = before;
            self.restart(|world| world.release());
            if let (Call::Unprepare, Some(modelled)) = (asked, &mut self.claims[slot]) {
                modelled.stage = Stage::Ending;
            }
            return Ok(());
        };
        self.world.release();
        self.answered(asked, slot, answer)?;
        // A GPU that was given up as stuck is out of service for a while.
        self.rough = before || until == Until::Answered;
        Ok(())
    }

    fn restart(&mut self, between: impl FnOnce(&World)) {
        if let Some(daemon) = self.daemon.take() {
            daemon.kill();
        }
        between(&self.world);
        // What was logged so far is of no use any more, and much.
        let _ = std::fs::remove_file(self.world.path("log"));
        let flags = flags(&self.world);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        self.daemon = Some(self.world.spawn(&flags));
        self.recovering = true;
    }

    fn forget(&mut self, slot: usize) {
        let Some(modelled) = &mut self.claims[slot] else { return };
        modelled.stage = Stage::Forgotten;
        self.world.api.delete::<ResourceClaim>("ns", &modelled.claim.name);
        self.restart(|_| ());
    }

    fn reboot(&mut self, without: Option<usize>) {
        let away: Vec<usize> = without.into_iter().collect();
        self.rough |= !away.is_empty();
        let back = std::mem::replace(&mut self.away, away);
        self.restart(|world| {
            world.change(|state| {
                for gpu in back {
                    state.find(gpu).unwrap();
                }
                if let Some(gpu) = without {
                    state.lose(gpu, false).unwrap();
                }
                state.reboot();
            });
            world.clear_run_dir();
        });
    }

    fn outage(&mut self, begins: bool) {
        self.outage = begins;
        self.rough |= begins;
        self.world.api.set_outage(begins.then_some(Outage::Refuse));
    }

    /// Ends what is wrong, asks for what waits, and looks at the node.
    async fn settle(&mut self) -> Result<(), String> {
        self.world.release();
        if self.outage {
            self.outage(false);
        }
        if !self.away.is_empty() {
            self.reboot(None);
        }
        for slot in 0..CLAIMS {
            self.conclude(slot).await?;
        }
        let begun = Instant::now();
        loop {
            let claims: Vec<&Modelled> = self.claims.iter().flatten().filter(|c| c.is_prepared()).collect();
            let found = differences(&self.world, &claims);
            if found.is_empty() {
                break;
            }
            if begun.elapsed() > self.patience {
                return Err(format!("the node has not settled:\n{}", found.join("\n")));
            }
            tokio::time::sleep(PAUSE).await;
        }
        self.claims.iter_mut().for_each(|claim| drop(claim.take_if(|claim| !claim.is_prepared())));
        self.rough = false;
        Ok(())
    }

    /// Asks until the claim is prepared or gone.
    async fn conclude(&mut self, slot: usize) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let Some(modelled) = self.claims[slot].clone() else { return Ok(()) };
            let others: Vec<&Modelled> = self.others(slot).collect();
            let hopeless = modelled.is_absurd()
                || modelled.is_kept_away(&others)
                || others.iter().any(|other| !other.is_prepared() && other.is_beside_in_instance(&modelled));
            match modelled.stage {
                // Seen to when everything else is done.
                Stage::Forgotten => return Ok(()),
                Stage::Prepared(_) | Stage::Waiting if !hopeless => self.prepare(slot, &[]).await?,
                Stage::Prepared(_) => return Ok(()),
                Stage::Waiting | Stage::Ending => self.unprepare(slot).await?,
            }
            match &self.claims[slot] {
                None => return Ok(()),
                Some(now) if matches!(modelled.stage, Stage::Waiting) && now.is_prepared() => return Ok(()),
                Some(now) if modelled.is_prepared() && now.is_prepared() => return Ok(()),
                Some(now) if begun.elapsed() > self.patience => {
                    return Err(format!("neither prepared nor released in {:?}: {now:?}", self.patience));
                }
                Some(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }
}
