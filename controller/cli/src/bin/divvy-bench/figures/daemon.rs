//! What the daemon takes besides: its memory, the time from its start to slices, and that of making them.

use super::{EIGHT, Plan, cycles, settled, warm};
use crate::floor::Floor;
use crate::stats::{figure, line, median, micros};
use crate::world::World;
use anyhow::Result;
use divvy_model::inventory::Inventory;
use divvy_model::numbers::GpuNumbers;
use std::time::{Instant, SystemTime};

/// The daemon's memory after two thousand cycles.
pub(super) async fn memory(plan: &Plan) -> Result<()> {
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
pub(super) async fn start(plan: &Plan) -> Result<()> {
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
pub(super) async fn pool(plan: &Plan) -> Result<()> {
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
