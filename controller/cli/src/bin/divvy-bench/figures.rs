//! The figures: what is measured, between which floors, how often.

mod daemon;
mod prepare;

use crate::floor::Sizes;
use crate::stats::micros;
use crate::world::{Dirs, World};
use anyhow::{Context, Result};
use divvy_kubelet::dra::v1::Claim as WireClaim;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What to measure, and how often.
pub(crate) struct Plan {
    pub(crate) node: PathBuf,
    pub(crate) disk: PathBuf,
    pub(crate) tmpfs: PathBuf,
    pub(crate) rounds: u32,
    pub(crate) samples: u32,
    pub(crate) only: Vec<String>,
    /// Instead of the shipping one.
    pub(crate) controller: Option<PathBuf>,
    pub(crate) keeper: Option<PathBuf>,
}

const EIGHT: &str = "8xH100-SXM5-80GB";

/// Measures everything, or what `--only` names.
pub(crate) async fn all(plan: &Plan) -> Result<()> {
    let wanted = |part: &str| crate::program::is_wanted(&plan.only, part);
    if wanted("gpu") {
        prepare::gpu(plan, &plan.tmpfs, "tmpfs").await.context("gpu on tmpfs")?;
        prepare::gpu(plan, &plan.disk, "disk").await.context("gpu on disk")?;
    }
    if wanted("mig") {
        prepare::mig(plan).await.context("mig")?;
    }
    if wanted("shared") {
        crate::shared::all(plan).await.context("shared")?;
    }
    if wanted("parallel") {
        prepare::parallel(plan).await.context("parallel")?;
    }
    if wanted("held") {
        prepare::held(plan).await.context("held")?;
    }
    if wanted("burst") {
        prepare::burst(plan).await.context("burst")?;
    }
    if wanted("memory") {
        daemon::memory(plan).await.context("memory")?;
    }
    if wanted("start") {
        daemon::start(plan).await.context("start")?;
    }
    if wanted("pool") {
        daemon::pool(plan).await.context("pool")?;
    }
    if wanted("controller") {
        crate::controller::memory(plan).await.context("controller")?;
    }
    if wanted("webhook") {
        crate::controller::webhook(plan).await.context("webhook")?;
    }
    Ok(())
}

impl Plan {
    /// The controller as the image ships it.
    pub(crate) fn controller(&self) -> Result<PathBuf> {
        match &self.controller {
            Some(controller) => Ok(controller.clone()),
            None => crate::build("divvy-controller", "divvy-controller"),
        }
    }

    /// The keeper.
    pub(crate) fn keeper(&self) -> Result<PathBuf> {
        match &self.keeper {
            Some(keeper) => Ok(keeper.clone()),
            None => crate::build_static("divvy-keeper", "divvy-keeper"),
        }
    }

    /// The directories of a world whose records and CDI files lie below `files`.
    fn dirs<'a>(&'a self, files: &'a Path) -> Dirs<'a> {
        Dirs { memory: &self.tmpfs, files }
    }

    async fn world(&self, gpus: &str) -> Result<World> {
        World::start(&self.node, gpus, &self.dirs(&self.tmpfs)).await
    }
}

/// One prepare and one unprepare of a claim, again and again; microseconds of each.
async fn cycles(world: &World, claim: &WireClaim, samples: u32) -> Result<(Vec<f64>, Vec<f64>)> {
    let one = std::slice::from_ref(claim);
    let (mut prepares, mut unprepares) = (Vec::new(), Vec::new());
    for _ in 0..samples {
        prepares.push(micros(world.prepare(one).await?));
        unprepares.push(micros(world.unprepare(one).await?));
    }
    Ok((prepares, unprepares))
}

/// Prepares once, to warm up and to learn the sizes of the files.
pub(crate) async fn warm(world: &World, claim: &WireClaim) -> Result<Sizes> {
    world.prepare(std::slice::from_ref(claim)).await?;
    let sizes = Sizes::of(world, claim)?;
    world.unprepare(std::slice::from_ref(claim)).await?;
    cycles(world, claim, 20).await?;
    Ok(sizes)
}

/// A burst of changes is over and the inventory was read again.
async fn settled() {
    tokio::time::sleep(Duration::from_millis(300)).await;
}
