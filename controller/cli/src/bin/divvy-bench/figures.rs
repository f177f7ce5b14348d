//! The figures: what is measured, between which floors, how often.

use crate::stats::{figure, line, median, micros};
use crate::world::World;
use anyhow::{Context, Result};
use divvy_kubelet::dra::v1::Claim as WireClaim;
use divvy_model::inventory::Inventory;
use divvy_model::numbers::GpuNumbers;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What to measure, and how often.
pub(crate) struct Plan {
    pub(crate) node: PathBuf,
    pub(crate) disk: PathBuf,
    pub(crate) tmpfs: PathBuf,
    pub(crate) rounds: u32,
    pub(crate) samples: u32,
    pub(crate) only: Vec<String>,
}

const EIGHT: &str = "8xH100-SXM5-80GB";

/// Measures everything, or what `--only` names.
pub(crate) async fn all(plan: &Plan) -> Result<()> {
    let wanted = |part: &str| plan.only.is_empty() || plan.only.iter().any(|only| only == part);
    if wanted("gpu") {
        gpu(plan, &plan.tmpfs, "tmpfs").await.context("gpu on tmpfs")?;
        gpu(plan, &plan.disk, "disk").await.context("gpu on disk")?;
    }
    if wanted("mig") {
        mig(plan).await.context("mig")?;
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
    Ok(())
}

/// What no driver can avoid: reading the claim, being called, writing three files.
struct Floor {
    /// p50 of a GET and p50 of an empty call, added; microseconds.
    call: f64,
    /// p50 of three temp-file-and-rename writes; microseconds.
    files: f64,
}

impl Floor {
    async fn measure(world: &World, claim: &WireClaim, sizes: &Sizes, samples: u32) -> Result<Self> {
        let (mut gets, mut calls, mut files) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..samples {
            gets.push(micros(world.get(claim).await?));
            calls.push(micros(world.prepare(&[]).await?));
            files.push(micros(sizes.write()?));
        }
        Ok(Self { call: median(&gets) + median(&calls), files: median(&files) })
    }

    fn whole(&self) -> f64 {
        self.call + self.files
    }
}

/// The files of one prepare: two versions of the record, one CDI file.
struct Sizes {
    records: PathBuf,
    cdi: PathBuf,
    record: usize,
    spec: usize,
}

impl Sizes {
    /// Reads the sizes of a claim that is prepared now.
    fn of(world: &World, claim: &WireClaim) -> Result<Self> {
        let find = |dir: PathBuf| -> Result<(PathBuf, usize)> {
            let file = walk(&dir)
                .into_iter()
                .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().contains(&claim.uid)))
                .with_context(|| format!("no file of claim {} below {}", claim.name, dir.display()))?;
            let size = usize::try_from(std::fs::metadata(&file)?.len())?;
            Ok((file.parent().map(Path::to_owned).unwrap_or(dir), size))
        };
        let (records, record) = find(world.root.join("kubelet/plugins"))?;
        let (cdi, spec) = find(world.root.join("cdi"))?;
        // The files of the floor lie beside the real ones, on the same file system, not among them.
        let floor = |dir: &Path| -> Result<PathBuf> {
            let dir = dir.parent().context("no parent")?.join("floor");
            std::fs::create_dir_all(&dir)?;
            Ok(dir)
        };
        Ok(Self { records: floor(&records)?, cdi: floor(&cdi)?, record, spec })
    }

    fn write(&self) -> Result<Duration> {
        let (record, spec) = (vec![b'r'; self.record], vec![b's'; self.spec]);
        let put = |dir: &Path, name: &str, bytes: &[u8]| -> std::io::Result<()> {
            let part = dir.join(format!(".{name}.part"));
            std::fs::write(&part, bytes)?;
            std::fs::rename(part, dir.join(name))
        };
        let began = Instant::now();
        put(&self.records, "record", &record)?;
        put(&self.cdi, "spec", &spec)?;
        put(&self.records, "record", &record)?;
        let took = began.elapsed();
        std::fs::remove_file(self.records.join("record"))?;
        std::fs::remove_file(self.cdi.join("spec"))?;
        Ok(took)
    }
}

fn walk(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { files.extend(walk(&path)) } else { files.push(path) }
    }
    files
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
async fn warm(world: &World, claim: &WireClaim) -> Result<Sizes> {
    world.prepare(std::slice::from_ref(claim)).await?;
    let sizes = Sizes::of(world, claim)?;
    world.unprepare(std::slice::from_ref(claim)).await?;
    cycles(world, claim, 5).await?;
    Ok(sizes)
}

/// Whole GPU, none held.
async fn gpu(plan: &Plan, base: &Path, kind: &str) -> Result<()> {
    let mut world = World::start(&plan.node, EIGHT, base, false).await?;
    let claim = world.claim("whole", "gpu-0").await?;
    let sizes = warm(&world, &claim).await?;
    let (mut calls, mut files, mut prepares, mut ratios, mut unprepares) =
        (vec![], vec![], vec![], vec![], vec![]);
    for _ in 0..plan.rounds {
        let floor = Floor::measure(&world, &claim, &sizes, plan.samples).await?;
        let (prepare, unprepare) = cycles(&world, &claim, plan.samples).await?;
        calls.push(floor.call);
        files.push(floor.files);
        prepares.push(median(&prepare));
        unprepares.push(median(&unprepare));
        ratios.push(median(&prepare) / floor.whole());
    }
    if kind == "tmpfs" {
        let server = world.server.time("default", "whole")?;
        figure("floor_us", &calls, "us");
        line("api_server_us", server, "us");
        line("api_server_part_of_floor", server / median(&calls), "ratio");
    }
    figure(&format!("fs_floor_us_{kind}"), &files, "us");
    figure(&format!("prepare_gpu_us_{kind}"), &prepares, "us");
    figure(&format!("unprepare_gpu_us_{kind}"), &unprepares, "us");
    figure(&format!("prepare_gpu_ratio_{kind}"), &ratios, "ratio");
    Ok(())
}

/// A MIG instance beside another that stays, less the time inside NVML; and
/// what the first instance of a GPU pays for the mode.
async fn mig(plan: &Plan) -> Result<()> {
    let world = World::start(&plan.node, EIGHT, &plan.tmpfs, true).await?;
    let stays = world.claim("stays", "gpu-0-mig-1g10gb-19-6").await?;
    let claim = world.claim("slice", "gpu-0-mig-1g10gb-19-0").await?;
    world.prepare(std::slice::from_ref(&stays)).await?;
    let sizes = warm(&world, &claim).await?;
    let (mut prepares, mut unprepares) = (vec![], vec![]);
    let mut offset = world.nvml(0)?.1;
    let one = std::slice::from_ref(&claim);
    for _ in 0..plan.rounds {
        let floor = Floor::measure(&world, &claim, &sizes, plan.samples).await?;
        let (mut own_prepare, mut own_unprepare) = (vec![], vec![]);
        for _ in 0..plan.samples {
            // The inventory is read again after a change; that is not part of the call.
            tokio::time::sleep(Duration::from_millis(2)).await;
            offset = world.nvml(offset)?.1;
            let took = micros(world.prepare(one).await?);
            let (nvml, end) = world.nvml(offset)?;
            own_prepare.push(took - nvml.min(took));
            tokio::time::sleep(Duration::from_millis(2)).await;
            offset = world.nvml(end)?.1;
            let took = micros(world.unprepare(one).await?);
            let (nvml, end) = world.nvml(offset)?;
            own_unprepare.push(took - nvml.min(took));
            offset = end;
        }
        prepares.push(median(&own_prepare) / floor.whole());
        unprepares.push(median(&own_unprepare) / floor.whole());
    }
    figure("prepare_mig_ratio", &prepares, "ratio");
    figure("unprepare_mig_ratio", &unprepares, "ratio");

    let first = world.claim("first", "gpu-1-mig-1g10gb-19-0").await?;
    let (mut toggles, one) = (vec![], std::slice::from_ref(&first));
    for _ in 0..plan.rounds {
        let with = micros(world.prepare(one).await?);
        world.unprepare(one).await?;
        // The mode goes off after the hold-off, which is nothing here.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (without, _) = cycles(&world, &claim, 3).await?;
        toggles.push((with - median(&without)) / 1000.0);
    }
    figure("mode_toggle_ms", &toggles, "ms");
    Ok(())
}

/// Eight prepares on eight GPUs whose creation takes 100 ms each, against one.
async fn parallel(plan: &Plan) -> Result<()> {
    let world = World::start(&plan.node, EIGHT, &plan.tmpfs, false).await?;
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
    let mut ratios = Vec::new();
    for _ in 0..plan.rounds {
        let one = world.prepare(&claims[..1]).await?;
        world.unprepare(&claims[..1]).await?;
        let together = world.prepare(&claims).await?;
        world.unprepare(&claims).await?;
        let began = Instant::now();
        futures::future::try_join_all(claims.iter().map(|claim| world.prepare(std::slice::from_ref(claim))))
            .await?;
        let apart = began.elapsed();
        world.unprepare(&claims).await?;
        ratios.push(together.max(apart).as_secs_f64() / one.as_secs_f64());
    }
    figure("parallel8_ratio", &ratios, "ratio");
    Ok(())
}

/// A whole GPU while the others hold a hundred instances, against none.
async fn held(plan: &Plan) -> Result<()> {
    let world = World::start(&plan.node, "16xH100-SXM5-80GB", &plan.tmpfs, false).await?;
    let claim = world.claim("whole", "gpu-15").await?;
    let mut holders = Vec::new();
    for index in 0..100 {
        let device = format!("gpu-{}-mig-1g10gb-19-{}", index / 7, index % 7);
        holders.push(world.claim(&format!("holder-{index}"), &device).await?);
    }
    cycles(&world, &claim, 10).await?;
    let mut slopes = Vec::new();
    for _ in 0..plan.rounds {
        let (none, _) = cycles(&world, &claim, plan.samples).await?;
        world.prepare(&holders).await?;
        cycles(&world, &claim, 5).await?;
        let (many, _) = cycles(&world, &claim, plan.samples).await?;
        world.unprepare(&holders).await?;
        // Let the modes go off and the inventory settle.
        tokio::time::sleep(Duration::from_millis(300)).await;
        slopes.push((median(&many) - median(&none)) / 100.0);
    }
    figure("held_slope_us", &slopes, "us");
    Ok(())
}

/// Forty claims one after the other.
async fn burst(plan: &Plan) -> Result<()> {
    let world = World::start(&plan.node, EIGHT, &plan.tmpfs, false).await?;
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
        ratios.push(median(&took[30..40]) / median(&took[1..11]));
    }
    figure("burst40_ratio", &ratios, "ratio");
    Ok(())
}

/// The daemon's memory after two thousand cycles.
async fn memory(plan: &Plan) -> Result<()> {
    let world = World::start(&plan.node, EIGHT, &plan.tmpfs, false).await?;
    let mut claims = Vec::new();
    for gpu in 0..8 {
        let device = if gpu % 2 == 0 { format!("gpu-{gpu}") } else { format!("gpu-{gpu}-mig-1g10gb-19-0") };
        claims.push(world.claim(&format!("claim-{gpu}"), &device).await?);
    }
    let mut half = 0.0;
    for cycle in 0..2000_usize {
        if cycle == 1000 {
            half = world.memory_kib("RssAnon")?;
        }
        let claim = &claims[cycle % claims.len()];
        cycles(&world, claim, 1).await?;
    }
    line("rss_mib", world.memory_kib("VmRSS")? / 1024.0, "MiB");
    line("rss_anon_mib", world.memory_kib("RssAnon")? / 1024.0, "MiB");
    line("rss_anon_growth_kib", world.memory_kib("RssAnon")? - half, "KiB");
    Ok(())
}

/// From nothing to slices, and from wiped slices to slices.
async fn start(plan: &Plan) -> Result<()> {
    let (mut starts, mut bars, mut wipes) = (vec![], vec![], vec![]);
    for round in 0..plan.rounds {
        let world = World::start(&plan.node, EIGHT, &plan.tmpfs, true).await?;
        let (nvml, _) = world.nvml(0)?;
        starts.push(world.start_to_slice.as_secs_f64() * 1000.0 - nvml / 1000.0);
        let claim = world.claim(&format!("whole-{round}"), "gpu-0").await?;
        let sizes = warm(&world, &claim).await?;
        let floor = Floor::measure(&world, &claim, &sizes, plan.samples).await?;
        bars.push(100.0 + 10.0 * floor.call / 1000.0);
        wipes.push(world.wipe().await?.as_secs_f64() * 1000.0);
    }
    figure("start_to_slice_ms", &starts, "ms");
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
        &|_, _, _| false,
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
    Ok(())
}
