//! Figures of GPUs that claims share: what a later claim of a time-sliced GPU
//! costs, and one of a GPU whose MPS control daemon runs already; and the memory
//! of the keeper that runs it.

use crate::figures::{Plan, warm};
use crate::floor::Floor;
use crate::stats::{figure, median, micros};
use crate::world::{Dirs, World};
use anyhow::{Context, Result};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const EIGHT: &str = "8xH100-SXM5-80GB";

/// A keeper that is killed when dropped. Its daemons outlive it, so claims on
/// them are released before.
struct Keeper(Child);

impl Keeper {
    fn start(program: &Path, world: &World) -> Result<Self> {
        let child = Command::new(program)
            .arg("--run-dir")
            .arg(&world.run)
            .arg("--driver-root")
            .arg(world.sim.root())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self(child))
    }

    fn memory_mib(&self) -> Result<f64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = text.lines().find(|line| line.starts_with("VmRSS")).context("no VmRSS")?;
        let kib: f64 = line.split_whitespace().nth(1).context("no number")?.parse()?;
        Ok(kib / 1024.0)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Both modes.
pub(crate) async fn all(plan: &Plan) -> Result<()> {
    // An MPS daemon has a /dev/shm of its own, in which no simulator lies. The
    // claims measured here call NVML not once, so it may be slow.
    let dirs = Dirs { memory: &plan.disk, files: &plan.tmpfs };
    let world = World::start(&plan.node, EIGHT, &dirs).await?;
    later(plan, &world, "timeslice").await?;
    let keeper = Keeper::start(&plan.keeper()?, &world)?;
    later(plan, &world, "mps").await?;
    let mut daemons = Vec::new();
    for gpu in 0..8 {
        daemons.push(world.claim(&format!("mps-of-{gpu}"), &format!("gpu-{gpu}-mps")).await?);
    }
    world.prepare(&daemons).await?;
    let memory = keeper.memory_mib();
    world.unprepare(&daemons).await?;
    figure("rss_keeper_mib", &[memory?], "MiB");
    Ok(())
}

/// A claim of a GPU that another claim has already in that mode.
async fn later(plan: &Plan, world: &World, mode: &str) -> Result<()> {
    let device = format!("gpu-0-{mode}");
    let stays = world.claim(&format!("{mode}-stays"), &device).await?;
    let claim = world.claim(mode, &device).await?;
    let (stays, one) = (std::slice::from_ref(&stays), std::slice::from_ref(&claim));
    let first = micros(world.prepare(stays).await?);
    let sizes = warm(world, &claim).await?;
    let (mut prepares, mut unprepares, mut ratios) = (vec![], vec![], vec![]);
    for _ in 0..plan.rounds {
        let (mut floor, mut prepare, mut unprepare) = (Floor::default(), vec![], vec![]);
        for _ in 0..plan.samples {
            floor.sample(world, &claim, &sizes).await?;
            prepare.push(micros(world.prepare(one).await?));
            unprepare.push(micros(world.unprepare(one).await?));
        }
        prepares.push(median(&prepare));
        unprepares.push(median(&unprepare));
        ratios.push(median(&prepare) / floor.whole());
    }
    world.unprepare(stays).await?;
    figure(&format!("first_{mode}_ms"), &[first / 1000.0], "ms");
    figure(&format!("prepare_{mode}_us"), &prepares, "us");
    figure(&format!("unprepare_{mode}_us"), &unprepares, "us");
    figure(&format!("prepare_{mode}_ratio"), &ratios, "ratio");
    Ok(())
}
