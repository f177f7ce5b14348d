//! Processes that use what claims have, as those of their containers do.

use crate::model::{Modelled, Part, Shared};
use crate::processes::{Client, Given};
use crate::run::Runner;
use serde_json::Value;

impl Runner {
    /// A process of a container of the claim; it must be let in.
    pub(crate) async fn use_devices(&mut self, slot: usize) -> Result<(), String> {
        let Some(modelled) = self.claims[slot].clone().filter(Modelled::is_prepared) else { return Ok(()) };
        let Some(part) = modelled.parts().find(|part| !part.admin) else { return Ok(()) };
        let rough = self.rough.contains(&part.gpu);
        let given = match self.given(&modelled, part) {
            Ok(given) => given,
            Err(_) if rough => return Ok(()),
            Err(why) => return Err(format!("{modelled:?} cannot be used: {why}")),
        };
        match Client::start(&self.world, &given).await {
            Ok(client) => self.clients.push((slot, client)),
            Err(_) if rough => return Ok(()),
            Err(why) => return Err(format!("a process was not let in, with {}: {why}", part.name)),
        }
        self.count(format!("used: {:?}", part.sharing));
        Ok(())
    }

    fn given(&self, modelled: &Modelled, part: &Part) -> Result<Given, String> {
        let shared = part.sharing == Some(Shared::Mps);
        let mps = shared.then(|| self.edits(&modelled.claim.uid, part)).transpose()?;
        let state = self.world.sim.read().unwrap();
        let gpu = &state.gpus[part.gpu];
        let device = match &part.place {
            None => gpu.uuid.clone(),
            Some((profile, slices)) => {
                let mut instances = gpu.instances.iter();
                let gi = instances.find(|gi| gi.profile == *profile && gi.placement.start == slices.start);
                gi.and_then(|gi| gi.cis.first()).ok_or("the instance is not there")?.uuid.clone()
            }
        };
        Ok(Given { device, mps })
    }

    /// What the claim's CDI file says of a part.
    fn edits(&self, uid: &str, part: &Part) -> Result<Value, String> {
        let file = self.world.cdi_dir().join(format!("gpu.divvy.dev-claim_{uid}.json"));
        let text = std::fs::read(&file).map_err(|error| error.to_string())?;
        let file: Value = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
        let share = part.share.iter().map(|share| format!("-{share}"));
        let name: String = [format!("{uid}-{}", part.name)].into_iter().chain(share).collect();
        let mut devices = file["devices"].as_array().into_iter().flatten();
        let device = devices.find(|it| it["name"] == name).ok_or("its CDI file lacks the device")?;
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
