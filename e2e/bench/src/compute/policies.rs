//! Policies of shares: fixed guarantees, weights, lending, and priority.
//!
//! GPU time comes from the simulator's accounting, as in the cases. A tenant is idle while its
//! program is stopped. Its return is the first work that the GPU does for it after that.

use super::cases::{Case, Shape};
use super::tenants::{Bursts, ComputeNode, Sample, TenantResult, share};
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
/// Guarantee of a share that works in bursts of a tenth of the time, in per cent.
const BURSTING_PERCENT: u32 = 30;
/// Bounds of the lateness of bursts beside one share with kernels of 1 ms.
const LATENESS_P50_MAX_MS: f64 = 6.0;
const LATENESS_P99_MAX_MS: f64 = 15.0;
/// A policy without guarantee, ceiling, weight and priority.
pub(super) const NO_POLICY: Compute = Compute { cores: 0, ceiling: 0, weight: 0, priority: 0, burst_us: 0 };

/// Waits until the agent has seen new pages: it audits once a second. On a node they exist long
/// before a container starts.
pub(super) fn wait_for_audit() {
    std::thread::sleep(Duration::from_millis(1200));
}

/// The kernel shape of that name.
pub(super) fn shape(name: &str) -> Result<Shape> {
    Shape::find(name).with_context(|| format!("no kernel shape {name}"))
}

/// Prints the largest of several errors and its bound, in percentage points.
fn largest_error(name: &str, errors: &[f64], bound: f64) {
    at_most(&format!("{name}_error"), percentile(errors, 1.0), bound, "points");
}

/// Two tenants with a fixed share each.
pub(super) fn fixed(node: &ComputeNode, max_points: f64) -> Result<()> {
    let tenants = node.run(&Case::equal(&shape("1ms")?, &[30, 60]))?.tenants;
    let error = |(request, tenant): (&f64, &TenantResult)| (tenant.share - request).abs();
    let errors: Vec<f64> = [30.0, 60.0].iter().zip(&tenants).map(error).collect();
    largest_error("policy_fixed_30_60", &errors, max_points);
    Ok(())
}

/// Two saturating shares with different policies, and the parts of the GPU that they must get.
pub(super) fn guarantee(node: &ComputeNode, max_points: f64) -> Result<()> {
    let fixed = |cores| Compute { cores, ..NO_POLICY };
    let pairs = [
        ("guarantee_beside_none", [fixed(40), NO_POLICY], [40.0, 60.0]),
        ("fixed_beside_burst", [fixed(60), Compute { cores: 30, ceiling: 80, ..NO_POLICY }], [60.0, 40.0]),
    ];
    for (name, policies, expected) in pairs {
        let mut tenants = Vec::new();
        for (at, compute) in policies.into_iter().enumerate() {
            tenants.push(node.start_tenant(at, Some(compute), "1ms")?);
        }
        wait_for_audit();
        let samples = node.sample(&mut tenants, |_, _| Ok(()))?;
        tenants.into_iter().try_for_each(|tenant| tenant.finish().map(drop))?;
        let shares = samples.iter().map(|samples| window_share(node, samples));
        let errors: Vec<f64> =
            shares.zip(expected).map(|(share, expected)| (share - expected).abs()).collect();
        largest_error(&format!("policy_{name}"), &errors, max_points);
    }
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
pub(super) fn window_share(node: &ComputeNode, samples: &[Sample]) -> f64 {
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
        delay.print(
            &format!("policy_priority_{name}"),
            (priority > 0).then_some((None, PRIORITY_DELAY_MAX_MS)),
        );
    }
    let high = Compute { priority: 1, ..NO_POLICY };
    let delay = run_bursts_of(node, &SINGLE, high, &[(NO_POLICY, "1ms")], |_| Ok(()))?;
    delay.print("policy_priority_single_kernel", Some((None, PRIORITY_DELAY_MAX_MS)));
    Ok(())
}

/// Lateness of a share with a guarantee that works in bursts, beside saturating shares without one.
pub(super) fn lateness(node: &ComputeNode, rounds: u32) -> Result<()> {
    let node = &node.with_window(Duration::from_secs(12) * rounds);
    let bursts = Compute { cores: BURSTING_PERCENT, ..NO_POLICY };
    let one: [(Compute, &str); 1] = [(NO_POLICY, "1ms")];
    for (name, others, bounds) in [
        ("one_1ms", &one[..], Some((Some(LATENESS_P50_MAX_MS), LATENESS_P99_MAX_MS))),
        ("three_1ms", &[(NO_POLICY, "1ms"); 3], None),
        ("one_5ms", &[(NO_POLICY, "5ms")], None),
        ("one_mixed", &[(NO_POLICY, "mixed")], None),
    ] {
        let delay = run_bursts_of(node, &FIVE, bursts, others, |_| Ok(()))?;
        delay.print(&format!("policy_lateness_beside_{name}"), bounds);
    }
    Ok(())
}

/// Bursts of `compute.c`: the name of the shape and the GPU time of a burst, in ms.
struct BurstShape {
    name: &'static str,
    gpu_ms: f64,
}

const FIVE: BurstShape = BurstShape { name: "bursts", gpu_ms: 5.0 };
const SINGLE: BurstShape = BurstShape { name: "single", gpu_ms: 1.0 };

/// Delay of bursts: how much longer a burst takes than its GPU time.
pub(super) struct BurstDelay {
    /// Number of bursts in the window.
    bursts: f64,
    p50_ms: f64,
    pub(super) p99_ms: f64,
    /// Share of the other tenants together, in per cent.
    other_share: f64,
}

impl BurstDelay {
    /// Prints the figures, with the bounds of p50 and p99 in ms if there are any.
    fn print(&self, prefix: &str, bounds: Option<(Option<f64>, f64)>) {
        let name = |what: &str| format!("{prefix}_{what}");
        line(&name("bursts"), self.bursts, "number");
        line(&name("delay_p50"), self.p50_ms, "ms");
        if let Some((Some(bound), _)) = bounds {
            upper_bound(&name("delay_p50"), self.p50_ms, bound, "ms");
        }
        line(&name("delay_p99"), self.p99_ms, "ms");
        if let Some((_, bound)) = bounds {
            upper_bound(&name("delay_p99"), self.p99_ms, bound, "ms");
        }
        line(&name("other_share"), self.other_share, "%");
    }
}

/// Runs a tenant with that priority in bursts, beside a tenant of low priority that uses all of the GPU.
pub(super) fn run_bursts(
    node: &ComputeNode,
    priority: u32,
    meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<BurstDelay> {
    let bursts = Compute { priority, ..NO_POLICY };
    run_bursts_of(node, &FIVE, bursts, &[(NO_POLICY, "1ms")], meanwhile)
}

/// Runs a tenant in bursts beside others with these policies and kernels.
fn run_bursts_of(
    node: &ComputeNode,
    shape: &BurstShape,
    compute: Compute,
    others: &[(Compute, &str)],
    mut meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<BurstDelay> {
    let mut tenants = vec![node.start_tenant(0, Some(compute), shape.name)?];
    for (at, (compute, kernels)) in others.iter().enumerate() {
        tenants.push(node.start_tenant(at + 1, Some(*compute), kernels)?);
    }
    wait_for_audit();
    let samples = node.sample(&mut tenants, |_, since| meanwhile(since))?;
    let mut printed = Vec::new();
    for tenant in tenants {
        printed.extend(tenant.finish()?);
    }
    let bursts = printed.first().and_then(|printed| Bursts::printed(printed)).context("no bursts")?;
    let delay_ms = |ns: f64| ns / 1e6 - shape.gpu_ms;
    Ok(BurstDelay {
        bursts: bursts.count,
        p50_ms: delay_ms(bursts.p50_ns),
        p99_ms: delay_ms(bursts.p99_ns),
        other_share: samples.iter().skip(1).map(|samples| window_share(node, samples)).sum(),
    })
}
