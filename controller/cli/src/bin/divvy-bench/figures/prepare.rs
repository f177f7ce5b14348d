//! What preparing a claim takes: of a whole GPU and of a MIG instance against their floor, of eight GPUs at once, while
//! much is held, and of many claims one after the other.

use super::{EIGHT, Plan, cycles, settled, warm};
use crate::floor::Floor;
use crate::stats::{figure, median, micros};
use crate::world::World;
use anyhow::Result;
use std::path::Path;
use std::time::{Instant, SystemTime};

/// Whole GPU, none held.
pub(super) async fn gpu(plan: &Plan, files: &Path, kind: &str) -> Result<()> {
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
pub(super) async fn mig(plan: &Plan) -> Result<()> {
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
pub(super) async fn parallel(plan: &Plan) -> Result<()> {
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
pub(super) async fn held(plan: &Plan) -> Result<()> {
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
pub(super) async fn burst(plan: &Plan) -> Result<()> {
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
