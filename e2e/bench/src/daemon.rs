//! Costs of the node daemon: preparing and unpreparing claims, its memory, its start, and computing
//! its slices.
//!
//! The duration of a prepare is compared with a floor that no driver can avoid ([`Floor`]),
//! measured in the same rounds.

use crate::node::{BenchNode, Dirs};
use crate::stats::{figure, figure_at_most, line, median, micros};
use crate::{artifacts, program};
use anyhow::{Context, Result};
use divvy_driver::gpu::inventory::{self, PendingOwnership, ReadScope};
use divvy_kubelet::dra::v1::Claim as WireClaim;
use divvy_model::inventory::Inventory;
use divvy_model::numbers::GpuNumbers;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

pub(crate) const EIGHT_GPUS: &str = "8xH100-SXM5-80GB";
const SIXTEEN_GPUS: &str = "16xH100-SXM5-80GB";

/// The programs, directories and parts of a run, and its length.
pub(crate) struct Plan {
    /// The `divvy-node` to measure.
    pub(crate) node: PathBuf,
    /// Directory on a disk.
    pub(crate) disk: PathBuf,
    /// Directory in memory.
    pub(crate) tmpfs: PathBuf,
    pub(crate) rounds: u32,
    pub(crate) samples: u32,
    /// Selected parts; empty for all.
    pub(crate) only: Vec<String>,
    /// The controller to measure instead of the shipping one.
    pub(crate) controller: Option<PathBuf>,
    /// The MPS supervisor to run instead of the shipping one.
    pub(crate) supervisor: Option<PathBuf>,
}

impl Plan {
    /// The controller to measure; builds the shipping one if none was given.
    pub(crate) fn controller(&self) -> Result<PathBuf> {
        match &self.controller {
            Some(controller) => Ok(controller.clone()),
            None => artifacts::build("divvy-controller", "divvy-controller"),
        }
    }

    /// The MPS supervisor; builds the shipping one if none was given.
    pub(crate) fn supervisor(&self) -> Result<PathBuf> {
        match &self.supervisor {
            Some(supervisor) => Ok(supervisor.clone()),
            None => artifacts::build_static("divvy-mps-supervisor", "divvy-mps-supervisor"),
        }
    }

    /// Directories of a node whose records and CDI files are below `files`.
    fn dirs<'a>(&'a self, files: &'a Path) -> Dirs<'a> {
        Dirs { memory: &self.tmpfs, files, library: None }
    }

    /// Starts a node with all its files in memory.
    async fn start_node(&self, gpus: &str) -> Result<BenchNode> {
        BenchNode::start(&self.node, gpus, &self.dirs(&self.tmpfs)).await
    }
}

/// Prepares and unprepares a claim repeatedly. Returns the duration of each prepare and unprepare
/// in microseconds.
async fn cycles(node: &BenchNode, claim: &WireClaim, samples: u32) -> Result<(Vec<f64>, Vec<f64>)> {
    let one = std::slice::from_ref(claim);
    let (mut prepares, mut unprepares) = (Vec::new(), Vec::new());
    for _ in 0..samples {
        prepares.push(micros(node.prepare(one).await?));
        unprepares.push(micros(node.unprepare(one).await?));
    }
    Ok((prepares, unprepares))
}

/// Warms up with a claim, and reads the sizes of its files.
async fn warm_up(node: &BenchNode, claim: &WireClaim) -> Result<FileSizes> {
    node.prepare(std::slice::from_ref(claim)).await?;
    let sizes = FileSizes::of(node, claim)?;
    node.unprepare(std::slice::from_ref(claim)).await?;
    cycles(node, claim, 20).await?;
    Ok(sizes)
}

/// Longest time that the daemon takes to read the inventory again after a burst of changes.
const SETTLE_TIME: Duration = Duration::from_millis(300);

async fn settle() {
    tokio::time::sleep(SETTLE_TIME).await;
}

/// Costs of a prepare that no driver can avoid: reading the claim, one RPC, and writing three files.
///
/// All samples are in microseconds.
#[derive(Default)]
struct Floor {
    gets: Vec<f64>,
    calls: Vec<f64>,
    files: Vec<f64>,
}

impl Floor {
    async fn sample(&mut self, node: &BenchNode, claim: &WireClaim, sizes: &FileSizes) -> Result<()> {
        self.gets.push(micros(node.get(claim).await?));
        self.calls.push(micros(node.prepare(&[]).await?));
        self.files.push(micros(sizes.write()?));
        Ok(())
    }

    /// Median of a GET plus median of an empty call.
    fn call(&self) -> f64 {
        median(&self.gets) + median(&self.calls)
    }

    /// Median of writing the files of one prepare.
    fn files(&self) -> f64 {
        median(&self.files)
    }

    fn total(&self) -> f64 {
        self.call() + self.files()
    }
}

/// The files that one prepare writes: the record twice and the CDI file.
struct FileSizes {
    record: SampleFile,
    spec: SampleFile,
}

/// A file that is written by rename, as the driver does.
struct SampleFile {
    dir: PathBuf,
    bytes: Vec<u8>,
}

impl SampleFile {
    /// A file of the same size as the claim's file below `dir`, and in the same directory.
    fn of(dir: &Path, claim: &WireClaim) -> Result<Self> {
        let named =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().contains(&claim.uid));
        let file = walk(dir).into_iter().find(named);
        let file =
            file.with_context(|| format!("no file of claim {} below {}", claim.name, dir.display()))?;
        let bytes = vec![b'x'; usize::try_from(std::fs::metadata(&file)?.len())?];
        Ok(Self { dir: file.parent().context("no parent")?.to_owned(), bytes })
    }

    // The driver and the container runtime read .json files only.
    fn path(&self) -> PathBuf {
        self.dir.join("floor")
    }

    fn write(&self) -> std::io::Result<()> {
        let part = self.dir.join("floor.part");
        std::fs::write(&part, &self.bytes)?;
        std::fs::rename(part, self.path())
    }
}

impl FileSizes {
    /// Reads the sizes of the files of a prepared claim.
    fn of(node: &BenchNode, claim: &WireClaim) -> Result<Self> {
        Ok(Self { record: SampleFile::of(&node.state, claim)?, spec: SampleFile::of(&node.cdi, claim)? })
    }

    fn write(&self) -> Result<Duration> {
        let began = Instant::now();
        self.record.write()?;
        self.spec.write()?;
        self.record.write()?;
        let took = began.elapsed();
        std::fs::remove_file(self.record.path())?;
        std::fs::remove_file(self.spec.path())?;
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

/// Prepare of a whole GPU on an idle node.
pub(crate) async fn gpu(plan: &Plan, files: &Path, kind: &str) -> Result<()> {
    let mut node = BenchNode::start(&plan.node, EIGHT_GPUS, &plan.dirs(files)).await?;
    let claim = node.claim("whole", "gpu-0").await?;
    let one = std::slice::from_ref(&claim);
    let sizes = warm_up(&node, &claim).await?;
    let (mut calls, mut writes, mut prepares, mut ratios, mut unprepares) =
        (vec![], vec![], vec![], vec![], vec![]);
    let (mut servers, mut server_parts) = (vec![], vec![]);
    for _ in 0..plan.rounds {
        let (mut floor, mut prepare, mut unprepare) = (Floor::default(), vec![], vec![]);
        for _ in 0..plan.samples {
            floor.sample(&node, &claim, &sizes).await?;
            prepare.push(micros(node.prepare(one).await?));
            unprepare.push(micros(node.unprepare(one).await?));
        }
        calls.push(floor.call());
        writes.push(floor.files());
        prepares.push(median(&prepare));
        unprepares.push(median(&unprepare));
        ratios.push(median(&prepare) / floor.total());
        let server = node.server.time_get("default", "whole")?;
        servers.push(server);
        server_parts.push(server / floor.call());
    }
    if kind == "tmpfs" {
        figure("floor_us", &calls, "us");
        figure("api_server_us", &servers, "us");
        figure("api_server_part_of_floor", &server_parts, "ratio");
        anyhow::ensure!(
            median(&server_parts) <= 0.4,
            "the API server takes more than 40 % of the floor, so the ratios would be too good"
        );
    }
    figure(&format!("fs_floor_us_{kind}"), &writes, "us");
    figure(&format!("prepare_gpu_us_{kind}"), &prepares, "us");
    figure(&format!("unprepare_gpu_us_{kind}"), &unprepares, "us");
    figure(&format!("prepare_gpu_ratio_{kind}"), &ratios, "ratio");
    Ok(())
}

/// Prepare of a MIG instance on a GPU with another instance, without the time inside NVML; and the
/// additional cost of enabling MIG mode for the first instance of a GPU.
///
/// The time of writing the trace is not part of the traced NVML time, so it counts as the daemon's.
pub(crate) async fn mig(plan: &Plan) -> Result<()> {
    let node = plan.start_node(EIGHT_GPUS).await?;
    let neighbour = node.claim("neighbour", "gpu-0-mig-1g10gb-19-6").await?;
    let claim = node.claim("slice", "gpu-0-mig-1g10gb-19-0").await?;
    node.prepare(std::slice::from_ref(&neighbour)).await?;
    let sizes = warm_up(&node, &claim).await?;
    let one = std::slice::from_ref(&claim);
    node.set_trace(true)?;
    cycles(&node, &claim, 5).await?;
    let (mut prepares, mut unprepares) = (vec![], vec![]);
    let (mut prepare_nvmls, mut unprepare_nvmls) = (vec![], vec![]);
    let (mut prepare_ratios, mut unprepare_ratios) = (vec![], vec![]);
    for _ in 0..plan.rounds {
        let mut floor = Floor::default();
        let (mut prepare, mut prepare_nvml, mut unprepare, mut unprepare_nvml) =
            (vec![], vec![], vec![], vec![]);
        for _ in 0..plan.samples {
            floor.sample(&node, &claim, &sizes).await?;
            node.clear_trace()?;
            let began = SystemTime::now();
            let took = micros(node.prepare(one).await?);
            let between = SystemTime::now();
            let unprepare_took = micros(node.unprepare(one).await?);
            let (nvml, nvml_back) =
                (node.nvml_micros(began, between)?, node.nvml_micros(between, SystemTime::now())?);
            prepare.push(took - nvml);
            prepare_nvml.push(nvml);
            unprepare.push(unprepare_took - nvml_back);
            unprepare_nvml.push(nvml_back);
        }
        prepares.push(median(&prepare));
        prepare_nvmls.push(median(&prepare_nvml));
        unprepares.push(median(&unprepare));
        unprepare_nvmls.push(median(&unprepare_nvml));
        prepare_ratios.push(median(&prepare) / floor.total());
        unprepare_ratios.push(median(&unprepare) / floor.total());
    }
    node.set_trace(false)?;
    figure("prepare_mig_us", &prepares, "us");
    figure("prepare_mig_nvml_us", &prepare_nvmls, "us");
    figure("unprepare_mig_us", &unprepares, "us");
    figure("unprepare_mig_nvml_us", &unprepare_nvmls, "us");
    figure("prepare_mig_ratio", &prepare_ratios, "ratio");
    figure("unprepare_mig_ratio", &unprepare_ratios, "ratio");

    let first = node.claim("first", "gpu-1-mig-1g10gb-19-0").await?;
    let (mut toggles, first) = (vec![], std::slice::from_ref(&first));
    for _ in 0..plan.rounds {
        let with = micros(node.prepare(first).await?);
        node.unprepare(first).await?;
        // MIG mode is disabled at once: --mig-hold-off is 0 here.
        settle().await;
        let (without, _) = cycles(&node, &claim, 5).await?;
        settle().await;
        toggles.push((with - median(&without)) / 1000.0);
    }
    figure("mode_toggle_ms", &toggles, "ms");
    Ok(())
}

/// Bound of an unprepare in units of the prepare of the same claim, both on a disk.
const RELEASE_RATIO_MAX: f64 = 1.3;

/// Unprepare compared with prepare, with files on a disk: alone, and beside a process that syncs a file
/// all the time, as another driver does.
pub(crate) async fn release(plan: &Plan) -> Result<()> {
    let node = BenchNode::start(&plan.node, EIGHT_GPUS, &plan.dirs(&plan.disk)).await?;
    let neighbour = node.claim("neighbour", "gpu-1-mig-1g10gb-19-6").await?;
    node.prepare(std::slice::from_ref(&neighbour)).await?;
    for (kind, device) in [("gpu", "gpu-0"), ("mig", "gpu-1-mig-1g10gb-19-0")] {
        let claim = node.claim(kind, device).await?;
        cycles(&node, &claim, 20).await?;
        for beside in ["alone", "fsync"] {
            let _syncing = if beside == "fsync" { Some(Syncing::start(&plan.disk)?) } else { None };
            let (mut prepares, mut unprepares, mut ratios) = (vec![], vec![], vec![]);
            for _ in 0..plan.rounds {
                let (prepare, unprepare) = cycles(&node, &claim, plan.samples).await?;
                ratios.push(median(&unprepare) / median(&prepare));
                prepares.push(median(&prepare));
                unprepares.push(median(&unprepare));
            }
            figure(&format!("release_{kind}_{beside}_prepare_us"), &prepares, "us");
            figure(&format!("release_{kind}_{beside}_unprepare_us"), &unprepares, "us");
            figure_at_most(&format!("release_{kind}_{beside}_ratio"), &ratios, RELEASE_RATIO_MAX, "ratio");
        }
    }
    Ok(())
}

/// A thread that writes and syncs a file until it is dropped.
struct Syncing {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Syncing {
    fn start(dir: &Path) -> Result<Self> {
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let mut file = tempfile::tempfile_in(dir)?;
        let until = stop.clone();
        let thread = std::thread::spawn(move || {
            while !until.load(std::sync::atomic::Ordering::Relaxed) {
                // An error would only end the load, and then the figure is that of the quiet disk.
                let written = std::io::Write::write_all(&mut file, &[0; 4096]);
                if written.and_then(|()| file.sync_all()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Syncing {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panicked thread has stopped too.
            let _ = thread.join();
        }
    }
}

/// Eight prepares on eight GPUs, on which creating an instance takes 100 ms, compared with one prepare.
pub(crate) async fn parallel(plan: &Plan) -> Result<()> {
    let node = plan.start_node(EIGHT_GPUS).await?;
    let mut claims = Vec::new();
    for gpu in 0..8 {
        let neighbour =
            node.claim(&format!("neighbour-{gpu}"), &format!("gpu-{gpu}-mig-1g10gb-19-6")).await?;
        node.prepare(&[neighbour]).await?;
        claims.push(node.claim(&format!("slice-{gpu}"), &format!("gpu-{gpu}-mig-1g10gb-19-0")).await?);
    }
    node.sim.update(|state| {
        state.set_latency(divvy_sim::control::Latency {
            pattern: divvy_sim::control::Pattern::new("nvmlDeviceCreateGpuInstanceWithPlacement"),
            ms: 100,
            global_lock: false,
        });
        Ok(())
    })?;
    let (mut togethers, mut aparts, mut worse) = (vec![], vec![], vec![]);
    for _ in 0..plan.rounds {
        settle().await;
        let one = node.prepare(&claims[..1]).await?;
        node.unprepare(&claims[..1]).await?;
        settle().await;
        let together = node.prepare(&claims).await?;
        node.unprepare(&claims).await?;
        settle().await;
        let began = Instant::now();
        futures::future::try_join_all(claims.iter().map(|claim| node.prepare(std::slice::from_ref(claim))))
            .await?;
        let apart = began.elapsed();
        node.unprepare(&claims).await?;
        togethers.push(together.as_secs_f64() / one.as_secs_f64());
        aparts.push(apart.as_secs_f64() / one.as_secs_f64());
        worse.push(together.max(apart).as_secs_f64() / one.as_secs_f64());
    }
    figure("parallel8_one_call_ratio", &togethers, "ratio");
    figure("parallel8_eight_calls_ratio", &aparts, "ratio");
    figure("parallel8_ratio", &worse, "ratio");
    Ok(())
}

/// Additional cost of a prepare per held claim: with a hundred MIG instances held, compared with none.
pub(crate) async fn held(plan: &Plan) -> Result<()> {
    let node = plan.start_node(SIXTEEN_GPUS).await?;
    let claim = node.claim("whole", "gpu-15").await?;
    let mut holders = Vec::new();
    for index in 0..100 {
        let device = format!("gpu-{}-mig-1g10gb-19-{}", index / 7, index % 7);
        holders.push(node.claim(&format!("holder-{index}"), &device).await?);
    }
    cycles(&node, &claim, 10).await?;
    let mut slopes = Vec::new();
    for _ in 0..plan.rounds {
        // Measured without claims before and after, so that a drift of the machine's speed cancels out.
        let (mut none, _) = cycles(&node, &claim, plan.samples).await?;
        node.prepare(&holders).await?;
        settle().await;
        cycles(&node, &claim, 5).await?;
        let (many, _) = cycles(&node, &claim, 2 * plan.samples).await?;
        node.unprepare(&holders).await?;
        // This also waits until MIG mode is disabled.
        settle().await;
        cycles(&node, &claim, 5).await?;
        none.extend(cycles(&node, &claim, plan.samples).await?.0);
        slopes.push((median(&many) - median(&none)) / 100.0);
    }
    figure("held_slope_us", &slopes, "us");
    Ok(())
}

/// Forty prepares in sequence: the last ten compared with the first ten.
pub(crate) async fn burst(plan: &Plan) -> Result<()> {
    let node = plan.start_node(EIGHT_GPUS).await?;
    let mut claims = Vec::new();
    for gpu in 0..8 {
        let neighbour =
            node.claim(&format!("neighbour-{gpu}"), &format!("gpu-{gpu}-mig-1g10gb-19-6")).await?;
        node.prepare(&[neighbour]).await?;
        for start in 0..5 {
            let device = format!("gpu-{gpu}-mig-1g10gb-19-{start}");
            claims.push(node.claim(&format!("slice-{gpu}-{start}"), &device).await?);
        }
    }
    let mut ratios = Vec::new();
    for _ in 0..plan.rounds {
        let mut took = Vec::new();
        for claim in &claims {
            took.push(micros(node.prepare(std::slice::from_ref(claim)).await?));
        }
        node.unprepare(&claims).await?;
        settle().await;
        ratios.push(median(&took[30..40]) / median(&took[1..11]));
    }
    figure("burst40_ratio", &ratios, "ratio");
    Ok(())
}

/// A running MPS supervisor, killed when dropped. Its MPS daemons outlive it, so their claims are
/// released before.
struct Supervisor(Child);

impl Supervisor {
    fn start(program: &Path, node: &BenchNode) -> Result<Self> {
        let child = Command::new(program)
            .arg("--run-dir")
            .arg(&node.run)
            .arg("--driver-root")
            .arg(node.sim.root())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self(child))
    }

    fn memory_mib(&self) -> Result<f64> {
        Ok(program::memory_kib(self.0.id(), "VmRSS")? / 1024.0)
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Prepares on GPUs that already have a claim of the same mode (time-slicing or MPS), and the
/// memory of the MPS supervisor.
pub(crate) async fn shared(plan: &Plan) -> Result<()> {
    // An MPS daemon has a /dev/shm of its own, without the simulator's state, so the state is on
    // disk. A slow simulator does not matter: these prepares make no NVML call.
    let dirs = Dirs { memory: &plan.disk, files: &plan.tmpfs, library: None };
    let node = BenchNode::start(&plan.node, EIGHT_GPUS, &dirs).await?;
    prepare_shared(plan, &node, "timeslice").await?;
    let supervisor = Supervisor::start(&plan.supervisor()?, &node)?;
    prepare_shared(plan, &node, "mps").await?;
    let mut daemons = Vec::new();
    for gpu in 0..8 {
        daemons.push(node.claim(&format!("mps-{gpu}"), &format!("gpu-{gpu}-mps")).await?);
    }
    node.prepare(&daemons).await?;
    let memory = supervisor.memory_mib();
    node.unprepare(&daemons).await?;
    figure("rss_mps_supervisor_mib", &[memory?], "MiB");
    Ok(())
}

/// Prepare on a GPU that already has a claim of that mode.
async fn prepare_shared(plan: &Plan, node: &BenchNode, mode: &str) -> Result<()> {
    let device = format!("gpu-0-{mode}");
    let neighbour = node.claim(&format!("{mode}-neighbour"), &device).await?;
    let claim = node.claim(mode, &device).await?;
    let (neighbour, one) = (std::slice::from_ref(&neighbour), std::slice::from_ref(&claim));
    let first = micros(node.prepare(neighbour).await?);
    let sizes = warm_up(node, &claim).await?;
    let (mut prepares, mut unprepares, mut ratios) = (vec![], vec![], vec![]);
    for _ in 0..plan.rounds {
        let (mut floor, mut prepare, mut unprepare) = (Floor::default(), vec![], vec![]);
        for _ in 0..plan.samples {
            floor.sample(node, &claim, &sizes).await?;
            prepare.push(micros(node.prepare(one).await?));
            unprepare.push(micros(node.unprepare(one).await?));
        }
        prepares.push(median(&prepare));
        unprepares.push(median(&unprepare));
        ratios.push(median(&prepare) / floor.total());
    }
    node.unprepare(neighbour).await?;
    figure(&format!("first_{mode}_ms"), &[first / 1000.0], "ms");
    figure(&format!("prepare_{mode}_us"), &prepares, "us");
    figure(&format!("unprepare_{mode}_us"), &unprepares, "us");
    figure(&format!("prepare_{mode}_ratio"), &ratios, "ratio");
    Ok(())
}

/// Prepares of the memory benchmark; the growth is that of the second half.
const CYCLES: usize = 2000;

/// The daemon's memory after [`CYCLES`] prepares.
pub(crate) async fn memory(plan: &Plan) -> Result<()> {
    let (mut resident, mut anonymous, mut growth) = (vec![], vec![], vec![]);
    for _ in 0..plan.rounds {
        let node = plan.start_node(EIGHT_GPUS).await?;
        let mut claims = Vec::new();
        for gpu in 0..8 {
            let device =
                if gpu % 2 == 0 { format!("gpu-{gpu}") } else { format!("gpu-{gpu}-mig-1g10gb-19-0") };
            claims.push(node.claim(&format!("claim-{gpu}"), &device).await?);
        }
        let mut after_half = 0.0;
        for cycle in 0..CYCLES {
            if cycle == CYCLES / 2 {
                after_half = node.memory_kib("RssAnon")?;
            }
            cycles(&node, &claims[cycle % claims.len()], 1).await?;
        }
        resident.push(node.memory_kib("VmRSS")? / 1024.0);
        anonymous.push(node.memory_kib("RssAnon")? / 1024.0);
        growth.push(node.memory_kib("RssAnon")? - after_half);
    }
    figure("rss_mib", &resident, "MiB");
    figure("rss_anon_mib", &anonymous, "MiB");
    figure("rss_anon_growth_kib", &growth, "KiB");
    Ok(())
}

/// Time from the daemon's start to complete slices, and from deleted slices to new ones.
pub(crate) async fn start(plan: &Plan) -> Result<()> {
    let (mut starts, mut nvmls, mut bounds, mut republishes) = (vec![], vec![], vec![], vec![]);
    for round in 0..plan.rounds {
        let dirs = plan.dirs(&plan.tmpfs);
        let (node, slices) = BenchNode::spawn(&plan.node, EIGHT_GPUS, &dirs, true).await?;
        slices.complete(&node).await?;
        let (took, now) = (node.started.0.elapsed(), SystemTime::now());
        let nvml = node.nvml_micros(node.started.1, now)?;
        node.registered().await?;
        node.set_trace(false)?;
        starts.push((micros(took) - nvml) / 1000.0);
        nvmls.push(nvml / 1000.0);
        let claim = node.claim(&format!("whole-{round}"), "gpu-0").await?;
        let sizes = warm_up(&node, &claim).await?;
        let mut floor = Floor::default();
        for _ in 0..plan.samples {
            floor.sample(&node, &claim, &sizes).await?;
        }
        bounds.push(100.0 + 10.0 * floor.call() / 1000.0);
        settle().await;
        republishes.push(micros(node.delete_slices().await?) / 1000.0);
    }
    figure("start_to_slice_ms", &starts, "ms");
    figure("start_to_slice_nvml_ms", &nvmls, "ms");
    figure("start_to_slice_bound_ms", &bounds, "ms");
    figure("republish_ms", &republishes, "ms");
    Ok(())
}

/// Time from an inventory of sixteen GPUs to validated slices, in this process; and the size of the slices.
pub(crate) async fn pool(plan: &Plan) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let options = divvy_sim::Options::new(divvy_sim::library()?, std::env::current_exe()?);
    let sim = divvy_sim::create(dir.path(), SIXTEEN_GPUS, &options)?;
    let library = sim.root().join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
    let session = divvy_nvml::Session::open(&library, divvy_nvml::Timeouts::default())?;
    let snapshot = session.snapshot().await?;
    let sysfs = divvy_driver::gpu::sysfs::Sysfs::new(sim.root().join("sys"));
    let addresses =
        snapshot.gpus.iter().filter_map(|gpu| Some(gpu.reading.as_ref().ok()?.0.pci_bus_id.clone()));
    let pci = addresses.map(|address| (address.clone(), sysfs.pci(&address))).collect();
    let inventory = inventory::inventory(
        &snapshot,
        &pci,
        &mut GpuNumbers::default(),
        PendingOwnership::default().classify(&|_, _, _| false, ReadScope::All),
        &|_| false,
        &Default::default(),
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
    // The size of one node's slices in etcd, with and without the devices that claims share.
    let mut eight_gpus = inventory;
    eight_gpus.gpus.truncate(8);
    for (name, shares) in [("slice_kib_per_node", true), ("slice_kib_per_node_exclusive", false)] {
        let support = divvy_slices::Support { shares, ..divvy_slices::Support::default() };
        let slices = divvy_slices::slices(divvy_slices::pool(
            &eight_gpus,
            &divvy_slices::PoolOptions { support, ..Default::default() },
        ));
        let json = slices.iter().map(|slice| serde_json::to_vec(&(&slice.counters, &slice.devices)));
        let bytes = json.map(|json| json.map_or(0, |json| json.len())).sum::<usize>();
        line(name, bytes as f64 / 1024.0, "KiB");
    }
    Ok(())
}
