//! Policies of shares: fixed guarantees, weights, lending, and priority.
//!
//! GPU time comes from the simulator's accounting, as in the cases. A tenant is idle while its
//! program is stopped. Its return is the first work that the GPU does for it after that.

use super::cases::{Case, SHAPES, Shape};
use super::tenants::{ComputeNode, Sample, TenantResult, printed_value, share};
use crate::stats::{at_most, figure, figure_at_most, line, median, percentile, upper_bound};
use anyhow::{Context, Result, bail, ensure};
use divvy_escape::node::Compute;
use std::time::Duration;

/// In nanoseconds, as all times of samples.
pub(super) const MILLISECOND: u64 = 1_000_000;
pub(super) const SECOND: u64 = 1000 * MILLISECOND;
/// The agent's control period, within which lent time is reclaimed.
const CONTROL_PERIOD_NS: u64 = 20 * MILLISECOND;
/// Bound of the delay of a burst with high priority.
const PRIORITY_DELAY_MAX_MS: f64 = 5.0;
/// GPU time of a burst of `compute.c`.
const BURST_MS: f64 = 5.0;
/// A policy without guarantee, ceiling, weight and priority.
pub(super) const NO_POLICY: Compute = Compute { cores: 0, ceiling: 0, weight: 0, priority: 0, burst_us: 0 };

/// Waits until the agent has seen new pages: it audits once a second. On a node they exist long
/// before a container starts.
pub(super) fn wait_for_audit() {
    std::thread::sleep(Duration::from_millis(1200));
}

/// The kernel shape of that name.
pub(super) fn shape(name: &str) -> Result<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name).with_context(|| format!("no kernel shape {name}"))
}

/// Prints the largest of several errors and its bound, in percentage points.
fn largest_error(name: &str, errors: &[f64], bound: f64) {
    at_most(&format!("{name}_error"), percentile(errors, 1.0), bound, "points");
}

/// Two tenants with a fixed share each.
pub(super) fn fixed(node: &ComputeNode, max_points: f64) -> Result<()> {
    let tenants = node.run(&Case { shape: shape("1ms")?, requests: vec![30, 60] })?.tenants;
    let error = |(request, tenant): (&f64, &TenantResult)| (tenant.share - request).abs();
    let errors: Vec<f64> = [30.0, 60.0].iter().zip(&tenants).map(error).collect();
    largest_error("policy_fixed_30_60", &errors, max_points);
    Ok(())
}

/// Four tenants without a guarantee, with the weights 1 to 4.
pub(super) fn weights(node: &ComputeNode, max_points: f64) -> Result<()> {
    let shares = run_weighted(node, |_| Ok(()))?;
    for (at, share) in shares.iter().enumerate() {
        line(&format!("policy_weight_{}_share", at + 1), *share, "%");
    }
    largest_error("policy_weights", &weight_errors(&shares), max_points);
    Ok(())
}

/// Runs four tenants with the weights 1 to 4. Returns their shares of the window in per cent.
///
/// Calls `meanwhile` with the time since the start, before each sample.
pub(super) fn run_weighted(
    node: &ComputeNode,
    mut meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<Vec<f64>> {
    let mut tenants = Vec::new();
    for at in 0..4 {
        let compute = Compute { weight: at as u32 + 1, ..NO_POLICY };
        tenants.push(node.start_tenant(at, Some(compute), "1ms")?);
    }
    wait_for_audit();
    let samples = node.sample(&mut tenants, |_, since| meanwhile(since))?;
    tenants.into_iter().try_for_each(|tenant| tenant.finish().map(drop))?;
    Ok(samples.iter().map(|samples| window_share(node, samples)).collect())
}

/// Errors of the shares of [`run_weighted`], in percentage points.
pub(super) fn weight_errors(shares: &[f64]) -> Vec<f64> {
    shares.iter().zip(1..).map(|(share, weight)| (share - 10.0 * f64::from(weight)).abs()).collect()
}

/// GPU time in per cent of the window.
fn window_share(node: &ComputeNode, samples: &[Sample]) -> f64 {
    let (start, end) = node.window_of(samples);
    share(samples, start, end)
}

/// Guarantee of the borrower, in per cent. Its ceiling is 100 %.
const BORROWER_PERCENT: u32 = 20;
/// Guarantee of the owner, in per cent. It is idle at times and lends its time then.
const OWNER_PERCENT: u32 = 60;
/// Share of the borrower while the owner runs: its guarantee and the time that is not guaranteed.
const BORROWER_WITH_OWNER_PERCENT: f64 = 40.0;

/// Lending, with an owner that is idle for three seconds of every five.
pub(super) fn lending(node: &ComputeNode, max_points: f64, rounds: u32) -> Result<()> {
    const IDLE: u64 = 3 * SECOND;
    const BUSY: u64 = 2 * SECOND;
    let node = &node.with_window(Duration::from_nanos((IDLE + BUSY) * u64::from(rounds)));
    let warm_up = node.times.warm_up.as_nanos() as u64;
    let window = warm_up..warm_up + node.times.window.as_nanos() as u64;
    // Not at the very end: a program that is stopped and continued at once may stay stopped.
    let is_idle = |since: u64| window.contains(&since) && (since - warm_up) % (IDLE + BUSY) < IDLE;
    let loans = run_lending(node, is_idle, |_| Ok(()))?;
    ensure!(!loans.is_empty(), "the owner never returned");
    let all = |value: fn(&Loan) -> f64| loans.iter().map(value).collect::<Vec<f64>>();
    let share = all(|loan| loan.share);
    figure("policy_lent_after_100ms_share", &all(|loan| loan.share_after_100_ms), "%");
    figure("policy_lent_share", &share, "%");
    upper_bound("policy_lent_unused", 100.0 - median(&share), max_points, "points");
    let (excess, shortfall) = (all(|loan| loan.borrower_excess), all(|loan| loan.owner_shortfall));
    figure_at_most("policy_reclaimed_after_20ms_borrower_excess", &excess, max_points, "points");
    figure_at_most("policy_reclaimed_owner_shortfall", &shortfall, max_points, "points");
    Ok(())
}

/// Results of one idle period of the owner.
pub(super) struct Loan {
    /// The borrower's share in the half second that begins 100 ms after the owner's last work, in per cent.
    share_after_100_ms: f64,
    /// The borrower's share in the last second of the period, in per cent.
    share: f64,
    /// Excess of the borrower's share in the half second that begins one control period after the
    /// owner's return, in percentage points.
    pub(super) borrower_excess: f64,
    /// Shortfall of the owner's share in the first second after its return, in percentage points.
    pub(super) owner_shortfall: f64,
}

/// Runs a borrower and an owner. The owner is paused while `is_idle` returns true for the
/// nanoseconds since the start. Returns the results of each idle period.
pub(super) fn run_lending(
    node: &ComputeNode,
    is_idle: impl Fn(u64) -> bool,
    mut meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<Vec<Loan>> {
    let borrower = Compute { cores: BORROWER_PERCENT, ceiling: 100, ..NO_POLICY };
    let owner = Compute { cores: OWNER_PERCENT, ..NO_POLICY };
    let mut tenants =
        vec![node.start_tenant(0, Some(borrower), "1ms")?, node.start_tenant(1, Some(owner), "1ms")?];
    let (mut paused_at, mut is_paused, mut periods) = (0, false, Vec::new());
    wait_for_audit();
    let samples = node.sample(&mut tenants, |tenants, since| {
        meanwhile(since)?;
        let pause = is_idle(since.as_nanos() as u64);
        if pause != is_paused {
            tenants[1].set_paused(node, pause)?;
            is_paused = pause;
            match pause {
                true => paused_at = divvy_sim::usage::now(),
                false => periods.push((paused_at, divvy_sim::usage::now())),
            }
        }
        Ok(())
    })?;
    if is_paused {
        tenants[1].set_paused(node, false)?;
    }
    tenants.into_iter().try_for_each(|tenant| tenant.finish().map(drop))?;
    let [borrower, owner] = &samples[..] else {
        bail!("two tenants have {} series of samples", samples.len())
    };
    let loan = |(paused_at, continued_at): (u64, u64)| {
        // The owner's last and first work mark the idle period.
        let gpu_ns = owner.iter().rfind(|sample| sample.0 <= continued_at).map_or(0, |sample| sample.1);
        let (first, _) = *owner.iter().find(|sample| sample.0 > continued_at && sample.1 > gpu_ns)?;
        let last = owner.iter().find(|sample| sample.0 >= paused_at && sample.1 >= gpu_ns);
        let last = last.map_or(paused_at, |sample| sample.0);
        let lent = last + 100 * MILLISECOND;
        let reclaimed = first + CONTROL_PERIOD_NS;
        Some(Loan {
            share_after_100_ms: share(borrower, lent, lent + SECOND / 2),
            share: share(borrower, continued_at - SECOND, continued_at),
            borrower_excess: share(borrower, reclaimed, reclaimed + SECOND / 2) - BORROWER_WITH_OWNER_PERCENT,
            owner_shortfall: f64::from(OWNER_PERCENT) - share(owner, first, first + SECOND),
        })
    };
    Ok(periods.into_iter().filter_map(loan).collect())
}

/// Delay of bursts beside a tenant that uses all of the GPU, without and with high priority.
///
/// Each round adds 12 s. A p99 of the 230 bursts of one round would be their third worst, which the
/// machine's load determines in one round of four on two CPUs.
pub(super) fn priority(node: &ComputeNode, rounds: u32) -> Result<()> {
    let node = &node.with_window(Duration::from_secs(12) * rounds);
    for (name, priority) in [("without", 0), ("with", 1)] {
        let delay = run_bursts(node, priority, |_| Ok(()))?;
        let name = |what: &str| format!("policy_priority_{name}_{what}");
        line(&name("bursts"), delay.bursts, "number");
        line(&name("delay_p50"), delay.p50_ms, "ms");
        line(&name("delay_p99"), delay.p99_ms, "ms");
        if priority > 0 {
            upper_bound(&name("delay_p99"), delay.p99_ms, PRIORITY_DELAY_MAX_MS, "ms");
        }
        line(&name("other_share"), delay.other_share, "%");
    }
    Ok(())
}

/// Delay of bursts: how much longer a burst takes than its GPU time.
pub(super) struct BurstDelay {
    /// Number of bursts in the window.
    bursts: f64,
    p50_ms: f64,
    pub(super) p99_ms: f64,
    /// Share of the other tenant, in per cent.
    other_share: f64,
}

/// Runs a tenant with that priority in bursts, beside a tenant of low priority that uses all of the GPU.
pub(super) fn run_bursts(
    node: &ComputeNode,
    priority: u32,
    mut meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<BurstDelay> {
    let bursts = node.start_tenant(0, Some(Compute { priority, ..NO_POLICY }), "bursts")?;
    let mut tenants = vec![bursts, node.start_tenant(1, Some(NO_POLICY), "1ms")?];
    wait_for_audit();
    let samples = node.sample(&mut tenants, |_, since| meanwhile(since))?;
    let mut printed = Vec::new();
    for tenant in tenants {
        printed.push(tenant.finish()?);
    }
    let delay_ms = |what: &str| Ok::<f64, anyhow::Error>(printed_value(&printed[0], what)? / 1e6 - BURST_MS);
    Ok(BurstDelay {
        bursts: printed_value(&printed[0], "bursts")?,
        p50_ms: delay_ms("burst_p50")?,
        p99_ms: delay_ms("burst_p99")?,
        other_share: window_share(node, &samples[1]),
    })
}
