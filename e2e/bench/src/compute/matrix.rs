//! Runs cases and reports their errors.
//!
//! A case takes ten seconds, in which its tenants mostly sleep, so cases can run in parallel, each
//! on its own node. With few CPUs they still disturb each other: cases with a large error or
//! a long stall run again alone, and both runs are reported. Programs that wait for each launch
//! spin, and reach their share only with a free CPU, so those cases always run in sequence.

use super::cases::{self, Case, CaseTenant, SHAPES, Shape, UNLIMITED};
use super::tenants::{CaseResult, ComputeNode, TenantResult};
use super::{Arguments, CaseSet, SHARE_ERROR_MAX_POINTS};
use crate::stats::{at_least, at_most, line, percentile, upper_bound};
use anyhow::{Result, ensure};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Duration;

/// The request for which the longest stall has a bound, in per cent.
const STALL_REQUEST_PERCENT: u32 = 30;
/// Shortfall that fails `--check` when it occurs in two runs, in percentage points. A slow machine
/// explains it only once.
const SHORTFALL_MAX_POINTS: f64 = 2.0 * SHARE_ERROR_MAX_POINTS;

/// Shortfall that a share on a full GPU may have if changes between processes take
/// [`LONG_SWITCH_US`], in percentage points.
const LONG_SWITCH_SHORTFALL_MAX_POINTS: f64 = 3.0;
/// In microseconds.
const LONG_SWITCH_US: u32 = 500;
/// Root mean square of the errors of all shares, in percentage points.
const ERROR_ROOT_MEAN_SQUARE_MAX_POINTS: f64 = 0.8;
/// Least GPU time that the tenants of a full GPU get together, in per cent. A GPU with longer changes
/// than an H100 has no bound.
const DELIVERED_MIN_PERCENT: f64 = 97.0;
/// The changes between processes of an H100, in microseconds.
const H100_SWITCH_US: u32 = 170;
/// Longest nominal kernel whose share has a lower bound, in ms: a quantum ends with the kernel that
/// runs.
const BOUNDED_KERNEL_MS: f64 = 20.0;

/// Runs the selected cases; `start_node` starts a node for them.
///
/// # Errors
/// A case cannot run, or with `--check` a share is outside its bounds or the agent reports a tenant.
pub(super) fn run(
    arguments: &Arguments,
    start_node: impl Fn() -> Result<ComputeNode> + Sync,
    burst: Duration,
) -> Result<()> {
    let selected = selected_cases(arguments);
    ensure!(!selected.is_empty(), "no case matches --shapes, --requests and --tenants");
    let (spinning, sleeping): (Vec<Case>, Vec<Case>) = selected.into_iter().partition(Case::waits);
    let is_used = |shape: &cases::Shape| {
        shape.waits && spinning.iter().flat_map(|case| &case.tenants).any(|tenant| tenant.shape == *shape)
    };
    let unlimited: Vec<Case> =
        SHAPES.iter().filter(|shape| is_used(shape)).map(|shape| Case::equal(shape, &[UNLIMITED])).collect();
    let (mut summary, mut failures, mut reruns) = (Summary::default(), Vec::new(), Vec::new());
    let (mut case_count, mut cases_off_target, mut false_positives) = (0, 0, 0);
    let mut deviations = Deviations::default();
    let mut finished = |case: &Case, is_reference: bool, CaseResult { tenants, findings }: CaseResult| {
        if !findings.is_empty() {
            let findings = findings.trim_start_matches("; ");
            println!("compute_{}_false_positive\t{findings}\ttext", case.name());
            false_positives += 1;
            failures.push(format!("{}: reported by the agent", case.name()));
        }
        if is_reference {
            for (tenant, result) in case.tenants.iter().zip(&tenants) {
                line(&format!("compute_{}_unlimited_share", tenant.shape.name), result.share, "%");
            }
            return;
        }
        case_count += 1;
        print_case(case, "", &tenants, burst);
        deviations.add(case, &tenants);
        if excess_points(case, &tenants).any(|points| points > SHARE_ERROR_MAX_POINTS) {
            failures.push(format!("{}: above its request", case.name()));
        }
        let of_case = Summary::of(case, &tenants, burst);
        cases_off_target += usize::from(of_case.off_target() > 0);
        if of_case.off_target() + of_case.stalled() > 0 {
            reruns.push(case.clone());
        }
        summary.add(of_case);
    };
    let parallel = arguments.parallel as usize;
    run_cases(&sleeping, &start_node, parallel, |at, result| finished(&sleeping[at], false, result))?;
    run_cases(&unlimited, &start_node, 1, |at, result| finished(&unlimited[at], true, result))?;
    run_cases(&spinning, &start_node, 1, |at, result| finished(&spinning[at], false, result))?;
    let mut rerun_summary = Summary::default();
    if !arguments.no_rerun && (arguments.parallel > 1 || arguments.check) {
        run_cases(&reruns, &start_node, 1, |at, CaseResult { tenants, .. }| {
            let case = &reruns[at];
            print_case(case, "_rerun", &tenants, burst);
            // A kernel longer than a quantum is late, and its neighbours run beside it.
            let is_bounded = !case.tenants.iter().any(|tenant| is_long(&tenant.shape));
            if is_bounded && shortfall_points(case, &tenants).any(|points| points > SHORTFALL_MAX_POINTS) {
                failures.push(format!("{}: below its request in two runs", case.name()));
            }
            rerun_summary.add(Summary::of(case, &tenants, burst));
        })?;
    }
    line("compute_cases", f64::from(case_count), "cases");
    line("compute_cases_off_target", cases_off_target as f64, "cases");
    at_most("compute_false_positives", f64::from(false_positives), 0.0, "cases");
    summary.print("compute");
    if !rerun_summary.errors.is_empty() {
        rerun_summary.print("compute_rerun");
    }
    deviations.print(arguments.switch_cost);
    if !summary.stalls.is_empty() {
        upper_bound("compute_longest_stall", percentile(&summary.stalls, 1.0), 1.0, "of its bound");
    }
    ensure!(!arguments.check || failures.is_empty(), "the check failed: {}", failures.join(", "));
    Ok(())
}

/// Runs cases, `parallel` at a time. Calls `then` with the index and result of each case when it finishes.
///
/// # Errors
/// The first case that fails; the cases that are running then still finish.
fn run_cases(
    cases: &[Case],
    start_node: impl Fn() -> Result<ComputeNode> + Sync,
    parallel: usize,
    mut then: impl FnMut(usize, CaseResult),
) -> Result<()> {
    let (next, start_node) = (&AtomicUsize::new(0), &start_node);
    std::thread::scope(|scope| {
        let (send, results) = mpsc::channel();
        for _ in 0..parallel.min(cases.len()) {
            let send = send.clone();
            scope.spawn(move || {
                let run_next = |node: &ComputeNode| {
                    let at = next.fetch_add(1, Relaxed);
                    let result = node.run(cases.get(at)?).map(|result| (at, result));
                    // After another case has failed, the receiver is closed.
                    send.send(result).ok()
                };
                match start_node() {
                    Ok(node) => while run_next(&node).is_some() {},
                    Err(error) => drop(send.send(Err(error))),
                }
            });
        }
        drop(send);
        results.into_iter().try_for_each(|result| result.map(|(at, result)| then(at, result)))
    })
}

/// The cases that the arguments select.
fn selected_cases(arguments: &Arguments) -> Vec<Case> {
    let seed = || {
        let time = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
        let seed = arguments.seed.unwrap_or_else(|| time.map_or(1, |time| time.as_secs()));
        println!("compute_seed\t{seed}\tnumber");
        seed
    };
    let all = if !arguments.case.is_empty() {
        arguments.case.clone()
    } else if !arguments.requests.is_empty() {
        let of_each = |requests: &Vec<u32>| SHAPES.map(|shape| Case::equal(&shape, requests));
        arguments.requests.iter().flat_map(of_each).collect()
    } else {
        match arguments.cases {
            CaseSet::Ci => cases::ci_cases(seed()),
            CaseSet::Listed => cases::listed_cases(),
            CaseSet::Drawn => cases::drawn_cases(seed()),
            CaseSet::Kinds => cases::kind_cases(),
            CaseSet::Equal => cases::equal_cases(seed()),
            CaseSet::All => cases::all_cases(),
        }
    };
    let has_shape =
        |tenant: &CaseTenant| arguments.shapes.iter().any(|name| *name == tenant.shape.name.to_string());
    let is_selected = |case: &Case| {
        (arguments.shapes.is_empty() || case.tenants.iter().all(has_shape))
            && (arguments.tenants.is_empty() || arguments.tenants.contains(&case.tenants.len()))
    };
    all.into_iter().filter(is_selected).collect()
}

/// Error of a tenant's share in percentage points; `None` for a tenant without a share or with little
/// demand.
fn error(tenant: &CaseTenant, result: &TenantResult) -> Option<f64> {
    (tenant.request != UNLIMITED && tenant.shape.saturates)
        .then(|| (result.share - f64::from(tenant.request)).abs())
}

/// Excess of each share over its request in percentage points, negative below the request.
fn excess_points(case: &Case, results: &[TenantResult]) -> impl Iterator<Item = f64> {
    let shares = case.tenants.iter().zip(results).filter(|(tenant, _)| tenant.request != UNLIMITED);
    shares.map(|(tenant, result)| result.share - f64::from(tenant.request))
}

/// Shortfall of each share that demands all of its request, in percentage points.
fn shortfall_points(case: &Case, results: &[TenantResult]) -> impl Iterator<Item = f64> {
    let shares = case.tenants.iter().zip(results).filter(|(tenant, result)| error(tenant, result).is_some());
    shares.map(|(tenant, result)| f64::from(tenant.request) - result.share)
}

/// Bound of the longest launch with a request of [`STALL_REQUEST_PERCENT`], in milliseconds.
fn stall_bound_ms(tenant: &CaseTenant, burst: Duration) -> f64 {
    2.0 * burst.as_secs_f64() * 1e3 + tenant.shape.longest_ms
}

/// Whether kernels exceed the length up to which a shortfall has a bound.
fn is_long(shape: &Shape) -> bool {
    shape.longest_ms > 1.2 * BOUNDED_KERNEL_MS
}

/// The deviations of many cases from their requests, and what full GPUs deliver.
#[derive(Default)]
struct Deviations {
    /// Excess of each share, in percentage points.
    excess: Vec<f64>,
    /// Shortfall of each share with kernels of bounded length, in percentage points: on GPUs with and
    /// without spare time.
    shortfall: Vec<f64>,
    full_shortfall: Vec<f64>,
    /// Shortfall of each share with longer kernels, in percentage points.
    long_shortfall: Vec<f64>,
    /// Cases with a share above or below its request by more than the allowed error.
    cases_above: usize,
    cases_below: usize,
    /// GPU time of all tenants of each full GPU in per cent, and the name of the case.
    delivered: Vec<(f64, String)>,
}

impl Deviations {
    fn add(&mut self, case: &Case, results: &[TenantResult]) {
        let is_off = |points: f64| points > SHARE_ERROR_MAX_POINTS;
        self.excess.extend(excess_points(case, results));
        self.cases_above += usize::from(excess_points(case, results).any(is_off));
        self.cases_below += usize::from(shortfall_points(case, results).any(is_off));
        let saturated = case.tenants.iter().filter(|tenant| tenant.shape.saturates);
        for (tenant, shortfall) in saturated.zip(shortfall_points(case, results)) {
            let is_long = is_long(&tenant.shape);
            let list = match (is_long, case.is_full()) {
                (true, _) => &mut self.long_shortfall,
                (false, true) => &mut self.full_shortfall,
                (false, false) => &mut self.shortfall,
            };
            list.push(shortfall);
        }
        if case.is_full() {
            self.delivered.push((results.iter().map(|result| result.share).sum(), case.name()));
        }
    }

    /// Prints the bounds. `switch_us` is the cost of changes between processes, if not an H100's.
    fn print(&self, switch_us: Option<u32>) {
        let switch_us = switch_us.unwrap_or(H100_SWITCH_US);
        let largest = |name: &str, points: &[f64], bound: f64| {
            if !points.is_empty() {
                at_most(name, percentile(points, 1.0), bound, "points");
            }
        };
        line("compute_cases_above", self.cases_above as f64, "cases");
        line("compute_cases_below", self.cases_below as f64, "cases");
        largest("compute_largest_excess", &self.excess, SHARE_ERROR_MAX_POINTS);
        largest("compute_largest_shortfall", &self.shortfall, SHARE_ERROR_MAX_POINTS);
        let bound = match switch_us {
            ..LONG_SWITCH_US => SHARE_ERROR_MAX_POINTS,
            _ => LONG_SWITCH_SHORTFALL_MAX_POINTS,
        };
        largest("compute_full_largest_shortfall", &self.full_shortfall, bound);
        if !self.long_shortfall.is_empty() {
            line("compute_long_kernels_largest_shortfall", percentile(&self.long_shortfall, 1.0), "points");
        }
        if let Some((least, name)) = self.delivered.iter().min_by(|one, other| one.0.total_cmp(&other.0)) {
            let sum: f64 = self.delivered.iter().map(|(percent, _)| percent).sum();
            line("compute_full_delivered_mean", sum / self.delivered.len() as f64, "%");
            println!("compute_full_delivered_least_case\t{name}\ttext");
            let least_name = "compute_full_delivered_least";
            match switch_us {
                ..=H100_SWITCH_US => at_least(least_name, *least, DELIVERED_MIN_PERCENT, "%"),
                _ => line(least_name, *least, "%"),
            }
        }
    }
}

/// A summary of many shares.
#[derive(Default)]
struct Summary {
    /// Error of each share, in percentage points.
    errors: Vec<f64>,
    /// Longest stall of each share with [`STALL_REQUEST_PERCENT`], relative to its bound.
    stalls: Vec<f64>,
}

impl Summary {
    fn of(case: &Case, results: &[TenantResult], burst: Duration) -> Self {
        let both = || case.tenants.iter().zip(results);
        let stall = |(tenant, result): (&CaseTenant, &TenantResult)| {
            is_stall_bounded(tenant).then(|| result.stall_ns / 1e6 / stall_bound_ms(tenant, burst))
        };
        Self {
            errors: both().filter_map(|(tenant, result)| error(tenant, result)).collect(),
            stalls: both().filter_map(stall).collect(),
        }
    }

    fn add(&mut self, other: Self) {
        self.errors.extend(other.errors);
        self.stalls.extend(other.stalls);
    }

    fn off_target(&self) -> usize {
        self.errors.iter().filter(|error| **error > SHARE_ERROR_MAX_POINTS).count()
    }

    fn stalled(&self) -> usize {
        self.stalls.iter().filter(|stall| **stall > 1.0).count()
    }

    fn print(&self, name: &str) {
        line(&format!("{name}_shares"), self.errors.len() as f64, "shares");
        line(&format!("{name}_shares_off_target"), self.off_target() as f64, "shares");
        // Tenants without a share have no error.
        if !self.errors.is_empty() {
            let squares: f64 = self.errors.iter().map(|error| error * error).sum();
            let mean = (squares / self.errors.len() as f64).sqrt();
            let bound = ERROR_ROOT_MEAN_SQUARE_MAX_POINTS;
            at_most(&format!("{name}_error_root_mean_square"), mean, bound, "points");
            line(&format!("{name}_largest_error"), percentile(&self.errors, 1.0), "points");
        }
        if !self.stalls.is_empty() {
            line(&format!("{name}_shares_with_30"), self.stalls.len() as f64, "shares");
            line(&format!("{name}_shares_stalled"), self.stalled() as f64, "shares");
            line(&format!("{name}_longest_stall"), percentile(&self.stalls, 1.0), "of its bound");
        }
    }
}

/// Whether the longest launch of the tenant has a bound. Several processes throttle each other, and a
/// program with little demand sleeps in its launches.
fn is_stall_bounded(tenant: &CaseTenant) -> bool {
    tenant.request == STALL_REQUEST_PERCENT && tenant.shape.saturates && tenant.processes == 1
}

/// Prints the lines of a case. `run` is the part of the names that says which run it was.
fn print_case(case: &Case, run: &str, results: &[TenantResult], burst: Duration) {
    for (at, (tenant, result)) in case.tenants.iter().zip(results).enumerate() {
        let name = |what: &str| format!("compute_{}{run}_{at}_{what}", case.name());
        line(&name("share"), result.share, "%");
        if let Some(error) = error(tenant, result) {
            at_most(&name("error"), error, SHARE_ERROR_MAX_POINTS, "points");
            line(&name("warm_up_error"), result.warm_up_share - f64::from(tenant.request), "points");
        }
        line(&name("share_100ms_p5"), percentile(&result.shares_100ms, 0.05), "%");
        line(&name("share_100ms_p95"), percentile(&result.shares_100ms, 0.95), "%");
        let stall = result.stall_ns / 1e6;
        line(&name("stall"), stall, "ms");
        if is_stall_bounded(tenant) {
            upper_bound(&name("stall"), stall, stall_bound_ms(tenant, burst), "ms");
        }
        line(&name("warm_up_stall"), result.warm_up_stall_ns / 1e6, "ms");
        line(&name("launches"), result.launches_per_second, "1/s");
        line(&name("cpu"), result.cpu, "%");
        if let Some(bursts) = result.bursts {
            line(&name("burst_p50"), bursts.p50_ns / 1e6, "ms");
            line(&name("burst_p99"), bursts.p99_ns / 1e6, "ms");
        }
    }
}
