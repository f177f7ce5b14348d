//! Tenants that do not cooperate with a scheduler: they are stopped, exit, never end, or wait for each
//! other on two GPUs.

use super::cases::UNLIMITED;
use super::policies::{SECOND, wait_for_audit, window_share};
use super::tenants::{ComputeNode, Sample, Start, Tenant, printed_value, share};
use crate::stats::{at_most, line, percentile};
use anyhow::{Context, Result};
use std::time::Duration;

/// Requests of the tenant that does not cooperate, and of the other one, in per cent.
const REQUESTS_PERCENT: [u32; 2] = [50, 30];
/// How long a tenant is stopped and then runs, in nanoseconds.
const STOPPED_NS: u64 = SECOND;
const RUNNING_NS: u64 = SECOND;
/// Number of stops.
const STOPS: u64 = 6;
/// Longest time between two rounds of kernels that wait for each other, in ms. It covers the deadline
/// of a hand-over.
const ROUND_MAX_MS: f64 = 100.0;

/// Starts the tenant that does not cooperate and one with kernels of 1 ms.
fn start_two(node: &ComputeNode, shape: &str, transient: bool) -> Result<Vec<Tenant>> {
    let [request, other_request] = REQUESTS_PERCENT;
    let start = Start { transient, ..Start::of(node.fixed_policy(request)?, shape) };
    let first = node.start_programs(0, start)?;
    let other = node.start_tenant(1, node.fixed_policy(other_request)?, "1ms")?;
    wait_for_audit();
    Ok(vec![first, other])
}

/// Prints the shares of two tenants, and the shortfall of the second one with its bound.
fn print_two(node: &ComputeNode, name: &str, samples: &[Vec<Sample>], max_points: f64) {
    let shares: Vec<f64> = samples.iter().map(|samples| window_share(node, samples)).collect();
    for (tenant, share) in ["tenant", "other"].iter().zip(&shares) {
        line(&format!("{name}_{tenant}_share"), *share, "%");
    }
    let findings = node.findings();
    if !findings.is_empty() {
        println!("{name}_findings\t{}\ttext", findings.trim_start_matches("; "));
    }
    if let Some(other) = shares.get(1) {
        let shortfall = f64::from(REQUESTS_PERCENT[1]) - other;
        at_most(&format!("{name}_other_shortfall"), shortfall, max_points, "points");
    }
}

/// A tenant that is stopped again and again, at any point of its quanta.
pub(super) fn stopped(node: &ComputeNode, max_points: f64) -> Result<()> {
    let node = &node.with_window(Duration::from_nanos((STOPPED_NS + RUNNING_NS) * STOPS));
    let warm_up = node.times.warm_up.as_nanos() as u64;
    let window = warm_up..warm_up + node.times.window.as_nanos() as u64;
    let mut tenants = start_two(node, "1ms", false)?;
    let (mut is_stopped, mut stops) = (false, Vec::new());
    let samples = node.sample(&mut tenants, |tenants, since| {
        let since = since.as_nanos() as u64;
        let stop = window.contains(&since) && (since - warm_up) % (STOPPED_NS + RUNNING_NS) < STOPPED_NS;
        if stop != is_stopped {
            tenants[0].set_paused(node, stop)?;
            is_stopped = stop;
            if stop {
                stops.push(divvy_sim::usage::now());
            }
        }
        Ok(())
    })?;
    if is_stopped {
        tenants[0].set_paused(node, false)?;
    }
    tenants.into_iter().try_for_each(|tenant| tenant.finish().map(drop))?;
    print_two(node, "stopped", &samples, max_points);
    let (Some(tenant), Some(other)) = (samples.first(), samples.get(1)) else { return Ok(()) };
    // The lowest share of the other tenant while the first one is stopped.
    let beside: Vec<f64> = stops.iter().map(|at| share(other, *at, at + STOPPED_NS)).collect();
    line("stopped_other_lowest_share", percentile(&beside, 0.0), "%");
    let running = |at: &u64| share(tenant, at + STOPPED_NS, at + STOPPED_NS + RUNNING_NS);
    let excess = stops.iter().map(running).sum::<f64>() / stops.len() as f64 - f64::from(REQUESTS_PERCENT[0]);
    at_most("stopped_tenant_excess", excess, max_points, "points");
    Ok(())
}

/// A tenant whose processes exit after one to six kernels of 1 ms, in half of the cases with work in
/// flight.
pub(super) fn churn(node: &ComputeNode, max_points: f64) -> Result<()> {
    let mut tenants = start_two(node, "churn", true)?;
    let samples = node.sample(&mut tenants, |_, _| Ok(()))?;
    let mut printed = Vec::new();
    for tenant in tenants {
        printed.extend(tenant.finish()?);
    }
    let processes = printed_value(printed.first().context("no output")?, "launches")?;
    line("churn_processes", processes / node.times.window.as_secs_f64(), "1/s");
    print_two(node, "churn", &samples, max_points);
    let excess = samples.first().map_or(0.0, |samples| window_share(node, samples));
    at_most("churn_tenant_excess", excess - f64::from(REQUESTS_PERCENT[0]), max_points, "points");
    Ok(())
}

/// A tenant with one kernel that never ends. Only the time slices of the GPU interrupt it, so it can
/// exceed its request.
pub(super) fn endless(node: &ComputeNode, max_points: f64) -> Result<()> {
    let mut tenants = start_two(node, "endless", false)?;
    let samples = node.sample(&mut tenants, |_, _| Ok(()))?;
    tenants.into_iter().try_for_each(|tenant| tenant.finish().map(drop))?;
    print_two(node, "endless", &samples, max_points);
    Ok(())
}

/// Two claims of two GPUs each. The kernels of a claim wait for each other and then run for 1 ms.
pub(super) fn pair(node: &ComputeNode) -> Result<()> {
    let requests = [(UNLIMITED, 0), (REQUESTS_PERCENT[0], 0), (REQUESTS_PERCENT[0], REQUESTS_PERCENT[1])];
    for (request, other) in requests {
        let mut tenants = Vec::new();
        for (at, request) in [request, other].into_iter().filter(|request| *request > 0).enumerate() {
            let start = Start { gpus: 2, ..Start::of(node.fixed_policy(request)?, "pair") };
            tenants.push(node.start_programs(at, start)?);
        }
        wait_for_audit();
        let name = if other > 0 { format!("pair_{request}+{other}") } else { format!("pair_{request}") };
        let samples = node.sample(&mut tenants, |_, _| Ok(())).with_context(|| name.clone())?;
        for (at, (tenant, samples)) in tenants.into_iter().zip(&samples).enumerate() {
            let name = |what: &str| format!("{name}_{at}_{what}");
            let printed = tenant.finish()?;
            let value = |what: &str| printed_value(printed.first().context("no output")?, what);
            // GPU time includes the time in which kernels wait.
            line(&name("share"), window_share(node, samples) / 2.0, "%");
            line(&name("rounds"), value("launches")? / node.times.window.as_secs_f64(), "1/s");
            at_most(&name("longest_round"), value("stall")? / 1e6, ROUND_MAX_MS, "ms");
        }
    }
    Ok(())
}
