//! The end of all trouble, and what the node must be then.

use crate::calls::PAUSE;
use crate::harness::Daemon;
use crate::look::differences;
use crate::model::{Modelled, Stage};
use crate::operations::{ALL, CLAIMS};
use crate::run::Runner;
use crate::wish::Wish;
use serde_json::json;
use std::time::Instant;

impl Runner {
    /// Ends what is wrong, asks for what waits, and looks at the node.
    pub(crate) async fn settle(&mut self) -> Result<(), String> {
        self.world.release();
        self.set_outage(false);
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
        // What the node has found out by itself is gone now.
        self.claims.iter_mut().for_each(|claim| drop(claim.take_if(|claim| !claim.is_prepared())));
        self.rough.clear();
        let has_held = |node: &Daemon| node.has_logged("records were held against the API server");
        self.reconciling = self.reconciling && !self.node.as_ref().is_some_and(has_held);
        Ok(())
    }

    /// Asks until the claim is prepared or gone.
    async fn conclude(&mut self, slot: usize) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let Some(modelled) = self.claims[slot].clone() else { return Ok(()) };
            let hopeless = modelled.deleted
                || modelled.is_absurd()
                || self.is_crowded(slot, &modelled)
                || self.in_the_way(slot, &modelled).next().is_some();
            match modelled.stage {
                // Seen to when everything else is done.
                Stage::Forgotten => return Ok(()),
                Stage::Prepared(_) if modelled.deleted => self.unprepare(slot).await?,
                Stage::Prepared(_) if hopeless => return Ok(()),
                Stage::Prepared(_) | Stage::Allocated | Stage::Waiting if !hopeless => {
                    self.prepare(slot).await?
                }
                _ => self.unprepare(slot).await?,
            }
            match &self.claims[slot] {
                None => return Ok(()),
                Some(now) if now.is_prepared() && !now.deleted => return Ok(()),
                Some(now) if begun.elapsed() > self.patience => {
                    return Err(format!("neither prepared nor released in {:?}: {now:?}", self.patience));
                }
                Some(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Every GPU can be had whole, as on the first day.
    pub(crate) async fn all_is_whole(&mut self) -> Result<(), String> {
        self.configure("rules: [{interval: Long}]");
        let request = json!({"deviceClassName": "gpu.divvy.dev", "count": ALL - 1});
        let devices = Wish(json!({"requests": [{"name": "all", "exactly": request}]}));
        let begun = Instant::now();
        // Taints are published a moment after their cause has gone.
        while self.claims[0].is_none() {
            self.allocate(0, &devices)?;
            if begun.elapsed() > self.patience {
                return Err(format!("not every GPU is whole after {:?}", self.patience));
            }
            tokio::time::sleep(PAUSE).await;
        }
        self.prepare(0).await?;
        self.unprepare(0).await
    }
}
