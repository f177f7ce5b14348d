//! What goes wrong: processes that are killed, machines that boot.

use crate::calls::{Call, PAUSE};
use crate::harness::World;
use crate::model::{Modelled, Stage};
use crate::operations::{ALL, Who};
use crate::processes::mps_processes;
use crate::run::{Runner, pattern};
use divvy_sim::control::When;

impl Runner {
    /// SIGKILL, something in between, and a new start.
    pub(crate) fn kill(&mut self, who: Who, between: impl FnOnce(&World)) {
        if let (true, Some(node)) = (who.is_node(), self.node.take_if(|_| who.is_node())) {
            node.kill();
            // What was logged so far is of no use any more, and much.
            let _ = std::fs::remove_file(self.world.path("log"));
        }
        if who.is_keeper() {
            self.keeper.kill();
        }
        between(&self.world);
        if who.is_keeper() {
            self.keeper.start(&self.world);
        }
        if who.is_node() {
            self.start_node();
            // A node that starts releases what it finds deleted.
            for (slot, claim) in self.claims.iter_mut().enumerate() {
                let Some(claim) = claim.as_mut().filter(|claim| claim.deleted) else { continue };
                claim.stage = Stage::Forgotten;
                self.clients.retain(|(of, _)| *of != slot);
            }
            self.reconciling = true;
        }
    }

    /// Kills in the middle of a call.
    pub(crate) async fn cut(
        &mut self,
        slot: usize,
        (asked, modelled): (Call, Modelled),
        name: &str,
        when: When,
        who: Who,
    ) -> Result<(), String> {
        let gpus: Vec<usize> = modelled.parts().map(|part| part.gpu).collect();
        self.world.change(|state| state.add_hold(pattern(name, &gpus), Some(1), when));
        let before = self.rough.clone();
        self.rough.extend(&gpus);
        let answer = {
            let world = &self.world;
            let held = || !world.sim.read().unwrap().control.held.is_empty();
            let call = asked.answer(world, &modelled.claim);
            tokio::pin!(call);
            let early = tokio::select! {
                answer = &mut call => Some(answer),
                () = async { while !held() { tokio::time::sleep(PAUSE).await } } => None,
            };
            match early {
                Some(answer) => {
                    world.release();
                    Some(answer?)
                }
                None if who == Who::Keeper => {
                    self.keeper.kill();
                    self.keeper.start(world);
                    world.release();
                    Some(call.await?)
                }
                None => None,
            }
        };
        self.count(format!("cut {name} by {who:?}"));
        // Clients of a daemon that has not survived are lost.
        if !name.starts_with("mps") {
            self.rough = before;
        }
        if let Some(answer) = answer {
            return self.answered(asked, slot, answer);
        }
        self.kill(who, World::release);
        if let Some(claim) = self.claims[slot].as_mut().filter(|claim| claim.stage != Stage::Forgotten) {
            claim.stage = if asked == Call::Prepare { Stage::Waiting } else { Stage::Ending };
        }
        Ok(())
    }

    /// Kills a control daemon or a server, if there is one.
    pub(crate) fn kill_mps(&mut self, which: usize, server: bool) {
        let mut processes = mps_processes(&self.world.run_dir());
        processes.retain(|process| process.is_server == server);
        let Some(process) = processes.get(which % processes.len().max(1)) else { return };
        process.kill();
        self.count(if server { "MPS server killed" } else { "MPS control daemon killed" });
        self.rough.extend(self.gpu_of_target(&process.target));
    }

    pub(crate) async fn reboot(&mut self) {
        for slot in 0..self.claims.len() {
            self.end_clients(slot).await;
        }
        if let Some(node) = self.node.take() {
            node.kill();
        }
        self.keeper.kill_all();
        self.kill(Who::Both, |world| {
            world.change(divvy_sim::State::reboot);
            world.clear_run_dir();
        });
        // What is prepared is made again in a moment.
        self.rough.extend(0..ALL);
    }

    /// A GPU loses what was on it; its processes end.
    pub(crate) async fn reset(&mut self, gpu: usize) {
        for slot in 0..self.claims.len() {
            if self.claims[slot].as_ref().is_some_and(|claim| claim.is_on(gpu)) {
                self.end_clients(slot).await;
            }
        }
        let served = |target: &str| self.gpu_of_target(target) == Some(gpu);
        let servers = mps_processes(&self.world.run_dir());
        servers.iter().filter(|one| one.is_server && served(&one.target)).for_each(|server| server.kill());
        self.rough.insert(gpu);
        self.world.change(|state| state.reset(gpu, true).unwrap());
    }

    /// The GPU that an MPS directory is for.
    fn gpu_of_target(&self, name: &str) -> Option<usize> {
        let state = self.world.sim.read().unwrap();
        state.gpus.iter().position(|gpu| name.starts_with(&gpu.uuid))
    }
}
