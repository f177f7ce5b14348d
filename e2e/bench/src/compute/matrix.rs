//! Runs cases and reports their errors.
//!
//! A case takes ten seconds, in which its tenants mostly sleep, so cases can run in parallel, each
//! on its own node. With few CPUs they still disturb each other: cases with a large error or
//! a long stall run again alone, and both runs are reported. Programs that wait for each launch
//! spin, and reach their share only with a free CPU, so those cases always run in sequence.

use super::cases::{self, Case, SHAPES, UNLIMITED};
use super::tenants::{CaseResult, ComputeNode, TenantResult};
use super::{Arguments, CaseSet, SHARE_ERROR_MAX_POINTS};
use crate::stats::{at_most, line, percentile, upper_bound};
use anyhow::{Result, ensure};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Duration;

/// The request for which the longest stall has a bound, in per cent.
const STALL_REQUEST_PERCENT: u32 = 30;
/// Shortfall that fails `--check` when it occurs in two runs, in percentage points. A slow machine
/// explains it only once.
const SHORTFALL_MAX_POINTS: f64 = 2.0 * SHARE_ERROR_MAX_POINTS;

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
    let (spinning, sleeping): (Vec<Case>, Vec<Case>) =
        selected.into_iter().partition(|case| case.shape.waits);
    let waits = |shape: &&cases::Shape| spinning.iter().any(|case| case.shape == *shape);
    let unlimited: Vec<Case> =
        SHAPES.iter().filter(waits).map(|shape| Case { shape, requests: vec![UNLIMITED] }).collect();
    let (mut summary, mut failures, mut reruns) = (Summary::default(), Vec::new(), Vec::new());
    let (mut case_count, mut cases_off_target, mut false_positives) = (0, 0, 0);
    let mut finished = |case: &Case, is_reference: bool, CaseResult { tenants, findings }: CaseResult| {
        if !findings.is_empty() {
            let findings = findings.trim_start_matches("; ");
            println!("compute_{}_false_positive\t{findings}\ttext", case.name());
            false_positives += 1;
            failures.push(format!("{}: reported by the agent", case.name()));
        }
        if is_reference {
            tenants.iter().for_each(|tenant| {
                line(&format!("compute_{}_unlimited_share", case.shape.name), tenant.share, "%")
            });
            return;
        }
        case_count += 1;
        print_case(case, "", &tenants, burst);
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
    if arguments.parallel > 1 || arguments.check {
        run_cases(&reruns, &start_node, 1, |at, CaseResult { tenants, .. }| {
            let case = &reruns[at];
            print_case(case, "_rerun", &tenants, burst);
            if excess_points(case, &tenants).any(|points| points < -SHORTFALL_MAX_POINTS) {
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
    upper_bound("compute_largest_error", percentile(&summary.errors, 1.0), SHARE_ERROR_MAX_POINTS, "points");
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
    let all = if !arguments.requests.is_empty() {
        let each = |requests: &Vec<u32>| {
            let requests = requests.clone();
            SHAPES.iter().map(move |shape| Case { shape, requests: requests.clone() })
        };
        arguments.requests.iter().flat_map(each).collect()
    } else if let CaseSet::All = arguments.cases {
        cases::all_cases()
    } else {
        let time = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
        let seed = arguments.seed.unwrap_or_else(|| time.map_or(1, |time| time.as_secs()));
        println!("compute_seed\t{seed}\tnumber");
        cases::ci_cases(seed)
    };
    let is_selected = |case: &Case| {
        (arguments.shapes.is_empty() || arguments.shapes.iter().any(|name| name == case.shape.name))
            && (arguments.tenants.is_empty() || arguments.tenants.contains(&case.requests.len()))
    };
    all.into_iter().filter(is_selected).collect()
}

/// Error of a tenant's share in percentage points; `None` for a tenant without a share.
fn error(request: u32, tenant: &TenantResult) -> Option<f64> {
    (request != UNLIMITED).then(|| (tenant.share - f64::from(request)).abs())
}

/// Excess of each share over its request in percentage points, negative below the request.
fn excess_points(case: &Case, tenants: &[TenantResult]) -> impl Iterator<Item = f64> {
    let shares = case.requests.iter().zip(tenants).filter(|(request, _)| **request != UNLIMITED);
    shares.map(|(request, tenant)| tenant.share - f64::from(*request))
}

/// Bound of the longest launch with a request of [`STALL_REQUEST_PERCENT`], in milliseconds.
fn stall_bound_ms(case: &Case, burst: Duration) -> f64 {
    2.0 * burst.as_secs_f64() * 1e3 + case.shape.longest_ms
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
    fn of(case: &Case, tenants: &[TenantResult], burst: Duration) -> Self {
        let bound = stall_bound_ms(case, burst);
        let bounded = case.requests.iter().zip(tenants);
        let bounded = bounded.filter(|(request, _)| **request == STALL_REQUEST_PERCENT);
        Self {
            errors: excess_points(case, tenants).map(f64::abs).collect(),
            stalls: bounded.map(|(_, tenant)| tenant.stall_ns / 1e6 / bound).collect(),
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
            line(&format!("{name}_error_root_mean_square"), mean, "points");
            line(&format!("{name}_largest_error"), percentile(&self.errors, 1.0), "points");
        }
        if !self.stalls.is_empty() {
            line(&format!("{name}_shares_with_30"), self.stalls.len() as f64, "shares");
            line(&format!("{name}_shares_stalled"), self.stalled() as f64, "shares");
            line(&format!("{name}_longest_stall"), percentile(&self.stalls, 1.0), "of its bound");
        }
    }
}

/// Prints the lines of a case. `run` is the part of the names that says which run it was.
fn print_case(case: &Case, run: &str, tenants: &[TenantResult], burst: Duration) {
    for (at, (request, tenant)) in case.requests.iter().zip(tenants).enumerate() {
        let name = |what: &str| format!("compute_{}{run}_{at}_{what}", case.name());
        line(&name("share"), tenant.share, "%");
        if let Some(error) = error(*request, tenant) {
            at_most(&name("error"), error, SHARE_ERROR_MAX_POINTS, "points");
            line(&name("warm_up_error"), tenant.warm_up_share - f64::from(*request), "points");
        }
        line(&name("share_100ms_p5"), percentile(&tenant.shares_100ms, 0.05), "%");
        line(&name("share_100ms_p95"), percentile(&tenant.shares_100ms, 0.95), "%");
        let stall = tenant.stall_ns / 1e6;
        line(&name("stall"), stall, "ms");
        if *request == STALL_REQUEST_PERCENT {
            upper_bound(&name("stall"), stall, stall_bound_ms(case, burst), "ms");
        }
        line(&name("warm_up_stall"), tenant.warm_up_stall_ns / 1e6, "ms");
        line(&name("launches"), tenant.launches_per_second, "1/s");
        line(&name("cpu"), tenant.cpu, "%");
    }
}
