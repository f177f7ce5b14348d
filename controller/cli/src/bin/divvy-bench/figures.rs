//! The figures: what is measured, between which floors, how often.

use crate::floor::{Floor, Sizes};
use crate::stats::{figure, line, median, micros};
use crate::world::{Dirs, World};
use anyhow::{Context, Result};
use divvy_kubelet::dra::v1::Claim as WireClaim;
use divvy_model::inventory::Inventory;
use divvy_model::numbers::GpuNumbers;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

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
        gpu(plan, &plan.tmpfs, "tmpfs").await.context("gpu on tmpfs")?;
        gpu(plan, &plan.disk, "disk").await.context("gpu on disk")?;
    }
    if wanted("mig") {
        mig(plan).await.context("mig")?;
    }
    if wanted("shared") {
        crate::shared::all(plan).await.context("shared")?;
    }
    if wanted("parallel") {
        parallel(plan).await.context("parallel")?;
    }
    if wanted("held") {
        held(plan).await.context("held")?;
    }
    if wanted("burst") {
        burst(plan).await.context("burst")?;
    }
    if wanted("memory") {
        memory(plan).await.context("memory")?;
    }
    if wanted("start") {
        start(plan).await.context("start")?;
    }
    if wanted("pool") {
        pool(plan).await.context("pool")?;
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

/// Whole GPU, none held.
async fn gpu(plan: &Plan, files: &Path, kind: &str) -> Result<()> {
    let mut world = World::start(&plan.node, EIGHT, &plan.dirs(files)).await?;
    let claim = world.claim("whole", "gpu-0").await?;
    let one = std::slice::from_ref(&claim);
    let sizes = warm(&world, &claim).await?;
    let (mut calls, mut writes, mut prepares, mut ratios, mut unprepares) =
        (vec![], vec![], vec![], vec![], vec![]);
    let (mut servers, mut parts) = (vec![], vec![]);
    for _ in 0..plan.rounds {
        let (mut floor, mut prepare, mut unprepare) = (Floor::default(), vec![], vec![]);
        for _ in 0..plan.samples {
            floor.sample(&world, &claim, &sizes).await?;
            prepare.push(micros(world.prepare(one).await?));
            unprepare.push(micros(world.unprepare(one).await?));
        }
        calls.push(floor.call());
        writes.push(floor.files());
        prepares.push(median(&prepare));
        unprepares.push(median(&unprepare));
        ratios.push(median(&prepare) / floor.whole());
        let server = world.server.time("default", "whole")?;
        servers.push(server);
        parts.push(server / floor.call());
    }
    if kind == "tmpfs" {
        figure("floor_us", &calls, "us");
        figure("api_server_us", &servers, "us");
        figure("api_server_part_of_floor", &parts, "ratio");
        anyhow::ensure!(
            median(&parts) <= 0.4,
            "the API server itself is more than 40 % of the floor: ratios would flatter"
        );
    }
    figure(&format!("fs_floor_us_{kind}"), &writes, "us");
    figure(&format!("prepare_gpu_us_{kind}"), &prepares, "us");
    figure(&format!("unprepare_gpu_us_{kind}"), &unprepares, "us");
    figure(&format!("prepare_gpu_ratio_{kind}"), &ratios, "ratio");
    Ok(())
}

/// A MIG instance beside another that stays, less the time inside NVML; and
/// what the first instance of a GPU pays for the mode. Writing the trace is not
/// part of what it tells, so that each NVML call costs us a little.
async fn mig(plan: &Plan) -> Result<()> {
    let world = plan.world(EIGHT).await?;
    let stays = world.claim("stays", "gpu-0-mig-1g10gb-19-6").await?;
    let claim = world.claim("slice", "gpu-0-mig-1g10gb-19-0").await?;
    world.prepare(std::slice::from_ref(&stays)).await?;
    let sizes = warm(&world, &claim).await?;
    let one = std::slice::from_ref(&claim);
    world.trace(true)?;
    cycles(&world, &claim, 5).await?;
    let (mut prepares, mut unprepares) = (vec![], vec![]);
    let (mut prepare_nvmls, mut unprepare_nvmls) = (vec![], vec![]);
    let (mut prepare_ratios, mut unprepare_ratios) = (vec![], vec![]);
    for _ in 0..plan.rounds {
        let mut floor = Floor::default();
        let (mut prepare, mut prepare_nvml, mut unprepare, mut unprepare_nvml) =
            (vec![], vec![], vec![], vec![]);
        for _ in 0..plan.samples {
            floor.sample(&world, &claim, &sizes).await?;
            world.forget_trace()?;
            let began = SystemTime::now();
            let took = micros(world.prepare(one).await?);
            let between = SystemTime::now();
            let took_back = micros(world.unprepare(one).await?);
            let (nvml, nvml_back) = (world.nvml(began, between)?, world.nvml(between, SystemTime::now())?);
            prepare.push(took - nvml);
            prepare_nvml.push(nvml);
            unprepare.push(took_back - nvml_back);
            unprepare_nvml.push(nvml_back);
        }
        prepares.push(median(&prepare));
        prepare_nvmls.push(median(&prepare_nvml));
        unprepares.push(median(&unprepare));
        unprepare_nvmls.push(median(&unprepare_nvml));
        prepare_ratios.push(median(&prepare) / floor.whole());
        unprepare_ratios.push(median(&unprepare) / floor.whole());
    }
    world.trace(false)?;
    figure("prepare_mig_us", &prepares, "us");
    figure("prepare_mig_nvml_us", &prepare_nvmls, "us");
    figure("unprepare_mig_us", &unprepares, "us");
    figure("unprepare_mig_nvml_us", &unprepare_nvmls, "us");
    figure("prepare_mig_ratio", &prepare_ratios, "ratio");
    figure("unprepare_mig_ratio", &unprepare_ratios, "ratio");

    let first = world.claim("first", "gpu-1-mig-1g10gb-19-0").await?;
    let (mut toggles, first) = (vec![], std::slice::from_ref(&first));
    for _ in 0..plan.rounds {
        let with = micros(world.prepare(first).await?);
        world.unprepare(first).await?;
        // The mode goes off after the hold-off, which is nothing here.
        settled().await;
        let (without, _) = cycles(&world, &claim, 5).await?;
        settled().await;
        toggles.push((with - median(&without)) / 1000.0);
    }
    figure("mode_toggle_ms", &toggles, "ms");
    Ok(())
}

/// Eight prepares on eight GPUs whose creation takes 100 ms each, against one.
async fn parallel(plan: &Plan) -> Result<()> {
    let world = plan.world(EIGHT).await?;
    let mut claims = Vec::new();
    for gpu in 0..8 {
        let stays = world.claim(&format!("stays-{gpu}"), &format!("gpu-{gpu}-mig-1g10gb-19-6")).await?;
        world.prepare(&[stays]).await?;
        claims.push(world.claim(&format!("slice-{gpu}"), &format!("gpu-{gpu}-mig-1g10gb-19-0")).await?);
    }
    world.sim.update(|state| {
        state.set_latency(divvy_sim::control::Latency {
            pattern: divvy_sim::control::Pattern::new("nvmlDeviceCreateGpuInstanceWithPlacement"),
            ms: 100,
            global_lock: false,
        });
        Ok(())
    })?;
    let (mut togethers, mut aparts, mut worse) = (vec![], vec![], vec![]);
    for _ in 0..plan.rounds {
        settled().await;
        let one = world.prepare(&claims[..1]).await?;
        world.unprepare(&claims[..1]).await?;
        settled().await;
        let together = world.prepare(&claims).await?;
        world.unprepare(&claims).await?;
        settled().await;
        let began = Instant::now();
        futures::future::try_join_all(claims.iter().map(|claim| world.prepare(std::slice::from_ref(claim))))
            .await?;
        let apart = began.elapsed();
        world.unprepare(&claims).await?;
        togethers.push(together.as_secs_f64() / one.as_secs_f64());
        aparts.push(apart.as_secs_f64() / one.as_secs_f64());
        worse.push(together.max(apart).as_secs_f64() / one.as_secs_f64());
    }
    figure("parallel8_one_call_ratio", &togethers, "ratio");
    figure("parallel8_eight_calls_ratio", &aparts, "ratio");
    figure("parallel8_ratio", &worse, "ratio");
    Ok(())
}

/// A whole GPU while the others hold a hundred instances, against none.
async fn held(plan: &Plan) -> Result<()> {
    let world = plan.world("16xH100-SXM5-80GB").await?;
    let claim = world.claim("whole", "gpu-15").await?;
    let mut holders = Vec::new();
    for index in 0..100 {
        let device = format!("gpu-{}-mig-1g10gb-19-{}", index / 7, index % 7);
        holders.push(world.claim(&format!("holder-{index}"), &device).await?);
    }
    cycles(&world, &claim, 10).await?;
    let mut slopes = Vec::new();
    for _ in 0..plan.rounds {
        // With none before and after, so that a drift of the machine falls out.
        let (mut none, _) = cycles(&world, &claim, plan.samples).await?;
        world.prepare(&holders).await?;
        settled().await;
        cycles(&world, &claim, 5).await?;
        let (many, _) = cycles(&world, &claim, 2 * plan.samples).await?;
        world.unprepare(&holders).await?;
        // The modes go off as well.
        settled().await;
        cycles(&world, &claim, 5).await?;
        none.extend(cycles(&world, &claim, plan.samples).await?.0);
        slopes.push((median(&many) - median(&none)) / 100.0);
    }
    figure("held_slope_us", &slopes, "us");
    Ok(())
}

/// Forty claims one after the other.
async fn burst(plan: &Plan) -> Result<()> {
    let world = plan.world(EIGHT).await?;
    let mut claims = Vec::new();
    for gpu in 0..8 {
        let stays = world.claim(&format!("stays-{gpu}"), &format!("gpu-{gpu}-mig-1g10gb-19-6")).await?;
        world.prepare(&[stays]).await?;
        for start in 0..5 {
            let device = format!("gpu-{gpu}-mig-1g10gb-19-{start}");
            claims.push(world.claim(&format!("slice-{gpu}-{start}"), &device).await?);
        }
    }
    let mut ratios = Vec::new();
    for _ in 0..plan.rounds {
        let mut took = Vec::new();
        for claim in &claims {
            took.push(micros(world.prepare(std::slice::from_ref(claim)).await?));
        }
        world.unprepare(&claims).await?;
        settled().await;
        ratios.push(median(&took[30..40]) / median(&took[1..11]));
    }
    figure("burst40_ratio", &ratios, "ratio");
    Ok(())
}

/// The daemon's memory after two thousand cycles.
async fn memory(plan: &Plan) -> Result<()> {
    let (mut resident, mut anonymous, mut growth) = (vec![], vec![], vec![]);
    for _ in 0..plan.rounds {
        let world = plan.world(EIGHT).await?;
        let mut claims = Vec::new();
        for gpu in 0..8 {
            let device =
                if gpu % 2 == 0 { format!("gpu-{gpu}") } else { format!("gpu-{gpu}-mig-1g10gb-19-0") };
            claims.push(world.claim(&format!("claim-{gpu}"), &device).await?);
        }
        let mut half = 0.0;
        for cycle in 0..2000_usize {
            if cycle == 1000 {
                half = world.memory_kib("RssAnon")?;
            }
            cycles(&world, &claims[cycle % claims.len()], 1).await?;
        }
        resident.push(world.memory_kib("VmRSS")? / 1024.0);
        anonymous.push(world.memory_kib("RssAnon")? / 1024.0);
        growth.push(world.memory_kib("RssAnon")? - half);
    }
    figure("rss_mib", &resident, "MiB");
    figure("rss_anon_mib", &anonymous, "MiB");
    figure("rss_anon_growth_kib", &growth, "KiB");
    Ok(())
}

/// From nothing to slices, and from wiped slices to slices.
async fn start(plan: &Plan) -> Result<()> {
    let (mut starts, mut nvmls, mut bars, mut wipes) = (vec![], vec![], vec![], vec![]);
    for round in 0..plan.rounds {
        let dirs = plan.dirs(&plan.tmpfs);
        let (world, slices) = World::starting(&plan.node, EIGHT, &dirs, true).await?;
        slices.complete(&world).await?;
        let (took, now) = (world.started.0.elapsed(), SystemTime::now());
        let nvml = world.nvml(world.started.1, now)?;
        world.registered().await?;
        world.trace(false)?;
        starts.push((micros(took) - nvml) / 1000.0);
        nvmls.push(nvml / 1000.0);
        let claim = world.claim(&format!("whole-{round}"), "gpu-0").await?;
        let sizes = warm(&world, &claim).await?;
        let mut floor = Floor::default();
        for _ in 0..plan.samples {
            floor.sample(&world, &claim, &sizes).await?;
        }
        bars.push(100.0 + 10.0 * floor.call() / 1000.0);
        settled().await;
        wipes.push(micros(world.wipe().await?) / 1000.0);
    }
    figure("start_to_slice_ms", &starts, "ms");
    figure("start_to_slice_nvml_ms", &nvmls, "ms");
    figure("start_to_slice_bar_ms", &bars, "ms");
    figure("republish_ms", &wipes, "ms");
    Ok(())
}

/// Inventory to validated slices, sixteen GPUs, in this process.
async fn pool(plan: &Plan) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let options = divvy_sim::Options::new(divvy_sim::library()?, std::env::current_exe()?);
    let sim = divvy_sim::up(dir.path(), "16xH100-SXM5-80GB", &options)?;
    let library = sim.root().join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
    let session = divvy_nvml::Session::open(&library, divvy_nvml::Limits::default())?;
    let snapshot = session.snapshot().await?;
    let sysfs = divvy_driver::sysfs::Sysfs::new(sim.root().join("sys"));
    let addresses =
        snapshot.gpus.iter().filter_map(|gpu| Some(gpu.reading.as_ref().ok()?.0.pci_bus_id.clone()));
    let pci = addresses.map(|address| (address.clone(), sysfs.pci(&address))).collect();
    let inventory = divvy_driver::discover::inventory(
        &snapshot,
        &pci,
        &mut GpuNumbers::default(),
        divvy_driver::discover::Doubts::default().judge(&|_, _, _| false, divvy_driver::discover::Fresh::All),
        &Inventory::default(),
    );
    session.close().await;
    let options = divvy_slices::PoolOptions::default();
    let (mut rounds, mut devices, mut bytes) = (vec![], 0_usize, 0_usize);
    for _ in 0..plan.rounds {
        let mut samples = Vec::new();
        for _ in 0..plan.samples {
            let began = Instant::now();
            let pool = divvy_slices::pool(&inventory, &options);
            let slices = divvy_slices::slices(pool);
            let verdict = divvy_slices::validate(&slices);
            samples.push(micros(began.elapsed()));
            anyhow::ensure!(verdict.is_ok(), "the pool is not valid");
            devices = slices.iter().map(|slice| slice.devices.len()).sum();
            bytes = slices
                .iter()
                .filter_map(|slice| serde_json::to_vec(&slice.devices).ok())
                .map(|json| json.len())
                .sum();
        }
        rounds.push(median(&samples) / devices as f64);
    }
    figure("pool_us_per_device", &rounds, "us");
    line("pool_devices", devices as f64, "devices");
    line("pool_bytes", bytes as f64, "bytes");
    // What thousands of nodes keep in one etcd, with and without the devices that claims share.
    let mut eight = inventory;
    eight.gpus.truncate(8);
    for (name, shares) in [("slice_kib_per_node", true), ("slice_kib_per_node_exclusive", false)] {
        let support = divvy_slices::Support { shares, ..divvy_slices::Support::default() };
        let slices = divvy_slices::slices(divvy_slices::pool(&eight, &divvy_slices::PoolOptions { support }));
        let json = slices.iter().map(|slice| serde_json::to_vec(&(&slice.counters, &slice.devices)));
        let bytes = json.map(|json| json.map_or(0, |json| json.len())).sum::<usize>();
        line(name, bytes as f64 / 1024.0, "KiB");
    }
    Ok(())
}
