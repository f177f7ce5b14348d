//! `divvy-bench compute`: accuracy of compute-time shares, and their cost.
//!
//! Each tenant is a C program (`e2e/escape/programs/compute.c`) in its own container that uses all
//! the GPU time that it can get. The GPU is simulated, its kernels take up to 20 % more or less
//! than nominal, and the node's agent runs. A tenant's share is its GPU time in the window divided
//! by the length of the window. GPU time comes from the simulator's accounting, never from the
//! program, the library or its pages.

mod cases;
mod charts;
mod matrix;
mod outage;
mod policies;
mod scenarios;
mod tenants;

use crate::stats::{figure, figure_at_most, median};
use crate::{artifacts, interleave, program};
use anyhow::Result;
use cases::{Case, SHAPES, UNLIMITED};
use clap::ValueEnum;
use divvy_escape::watch::Watch;
use std::path::PathBuf;
use std::time::Duration;
use tenants::{ComputeNode, Device, Setup, Times};

/// Largest error of a share, in percentage points.
const SHARE_ERROR_MAX_POINTS: f64 = 2.0;
/// Factor on the rounds of a launch, which costs a few nanoseconds and varies by as much.
const LAUNCH_ROUNDS_FACTOR: u32 = 5;
/// Bound of the additional time of a launch with a limit, in nanoseconds.
const LAUNCH_OVERHEAD_MAX_NS: f64 = 25.0;
/// Throughput that two tenants of 50 % may lose together, in per cent of one unlimited tenant.
const AGGREGATE_LOSS_MAX_PERCENT: f64 = 3.0;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Measure this library instead of building the one that the image ships
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Which cases to run
    #[arg(long, value_enum, default_value_t = CaseSet::Ci)]
    cases: CaseSet,
    /// Run these cases instead, by the names in the output, for example 1ms_30+5ms_50 or
    /// spin:700000_30+1ms*4_50
    #[arg(long, value_delimiter = ',', value_parser = cases::parse_case)]
    case: Vec<Case>,
    /// Only cases all of whose tenants have one of these kernel shapes
    #[arg(long, value_delimiter = ',', value_parser = parse_shape_name)]
    shapes: Vec<String>,
    /// Run cases with these requests instead, in per cent, with a plus between tenants, for example
    /// 30,50+50; 100 stands for a tenant without a share
    #[arg(long, value_delimiter = ',', value_parser = cases::parse_requests)]
    requests: Vec<Vec<u32>>,
    /// Only cases with these numbers of tenants
    #[arg(long, value_delimiter = ',')]
    tenants: Vec<usize>,
    /// Number of cases to run in parallel, each on its own node; the 870 cases take two hours in sequence
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    parallel: u32,
    /// Seed that selects random cases; by default the current time
    #[arg(long)]
    seed: Option<u64>,
    /// How long tenants run before the window, in ms
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    warm_up: u64,
    /// Length of the measured window, in ms
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 5000,
        value_parser = clap::value_parser!(u64).range(200..),
    )]
    window: u64,
    /// GPU time that a share may save up while it is idle, in ms
    #[arg(long, value_name = "MS", default_value_t = 20)]
    burst: u64,
    /// Device that the tenants share
    #[arg(long, value_enum, default_value_t = Device::Gpu)]
    device: Device,
    /// Time that a change between processes takes on the GPU, such as 0, 170us or 0.5ms; by default
    /// that of the GPU model
    #[arg(long, value_name = "TIME", value_parser = parse_microseconds)]
    switch_cost: Option<u32>,
    /// Run without the node's agent, which corrects the library's estimates
    #[arg(long)]
    no_agent: bool,
    /// Number of rounds of the parts that compare figures
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only draw charts of the tenants' GPU time under each policy, as SVG files in this directory
    #[arg(long, value_name = "DIR")]
    charts: Option<PathBuf>,
    /// Do not repeat cases that are off
    #[arg(long)]
    no_rerun: bool,
    /// Fail if a share in a case exceeds its request by more than the allowed error, falls short by
    /// more than twice the allowed error in two runs, or is reported by the node's agent
    #[arg(long)]
    check: bool,
    /// Run as the agent of the node with this driver root and directory (used by the benchmark itself)
    #[arg(long, hide = true, num_args = 2)]
    agent_of: Vec<PathBuf>,
    /// Run only these parts
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = [
            "cases", "aggregate", "fixed", "weights", "lending", "guarantee", "priority", "lateness",
            "stopped", "churn", "endless", "pair", "launch", "agent-restart", "host-upgrade",
        ]
    )]
    only: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum CaseSet {
    /// 20 pairs and sets of four that the seed selects from listed and drawn
    Ci,
    /// 78 pairs and sets of four, with equal and with different kernels
    Listed,
    /// 60 cases whose kernel lengths, from 5 us to 50 ms, and requests are drawn by the seed
    Drawn,
    /// Tenants that are idle or work in bursts, and shares of several processes
    Kinds,
    /// 25 cases whose tenants have equal kernels, five of them selected by the seed
    Equal,
    /// All 870 sets of one, two and four requests with equal kernels
    All,
}

/// Checks the name of a kernel shape.
fn parse_shape_name(text: &str) -> Result<String, String> {
    let found = cases::Shape::find(text).map(|_| text.to_owned());
    found.ok_or_else(|| format!("expected one of {} or spin:NANOSECONDS", cases::names().join(", ")))
}

/// Parses a time such as `0`, `170us` or `0.5ms`, to microseconds.
fn parse_microseconds(text: &str) -> Result<u32, String> {
    let (number, factor) = match text.strip_suffix("us") {
        Some(number) => (number, 1.0),
        None => text.strip_suffix("ms").map_or((text, 0.0), |number| (number, 1000.0)),
    };
    let time = number.parse::<f64>().ok().filter(|time| (0.0..1e6).contains(time));
    // A number without a unit can only be 0.
    let time = time.filter(|time| factor > 0.0 || *time == 0.0);
    time.map(|time| (time * factor).round() as u32)
        .ok_or_else(|| "expected a time like 0, 170us or 0.5ms".to_owned())
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if let [root, directory] = arguments.agent_of.as_slice() {
        return Watch::serve(root, directory, false);
    }
    let selected = |part: &str| program::is_selected(&arguments.only, part);
    let library =
        artifacts::interposer(arguments.library.as_deref(), &std::env::temp_dir().join("divvy-bench"))?;
    let millis = Duration::from_millis;
    let (warm_up, window, burst) =
        (millis(arguments.warm_up), millis(arguments.window), millis(arguments.burst));
    if let Some(dir) = &arguments.charts {
        return charts::draw_all(&library, dir);
    }
    let times = Times { warm_up, window, burst };
    let setup = Setup { device: arguments.device, library, times, switch_us: arguments.switch_cost, gpus: 1 };
    let start_node = || ComputeNode::start(&setup, !arguments.no_agent);
    if selected("cases") {
        matrix::run(arguments, start_node, burst)?;
    }
    let node = start_node()?;
    if selected("aggregate") {
        aggregate(&node, arguments.rounds)?;
    }
    if selected("fixed") {
        policies::fixed(&node, SHARE_ERROR_MAX_POINTS)?;
    }
    if selected("weights") {
        policies::weights(&node, SHARE_ERROR_MAX_POINTS)?;
    }
    if selected("lending") {
        policies::lending(&node, SHARE_ERROR_MAX_POINTS, arguments.rounds)?;
    }
    if selected("guarantee") {
        policies::guarantee(&node, SHARE_ERROR_MAX_POINTS)?;
    }
    if selected("priority") {
        policies::priority(&node, arguments.rounds)?;
    }
    if selected("lateness") {
        policies::lateness(&node, arguments.rounds)?;
    }
    if selected("stopped") {
        scenarios::stopped(&node, SHARE_ERROR_MAX_POINTS)?;
    }
    if selected("churn") {
        scenarios::churn(&node, SHARE_ERROR_MAX_POINTS)?;
    }
    if selected("endless") {
        scenarios::endless(&node, SHARE_ERROR_MAX_POINTS)?;
    }
    if selected("launch") {
        let (mut natives, mut over) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds.saturating_mul(LAUNCH_ROUNDS_FACTOR) {
            // The second program to start takes longer, whichever it is, so both orders are measured.
            let [native, limited] = node.launch_times([UNLIMITED, 99])?;
            let [limited_first, native_second] = node.launch_times([99, UNLIMITED])?;
            let both = [(native, limited), (native_second, limited_first)];
            natives.extend(both.iter().map(|(native, _)| median(native)));
            let differences =
                both.map(|(native, limited)| median(&interleave::differences(&native, &limited)));
            over.push(differences.iter().sum::<f64>() / 2.0);
        }
        figure("launch_limited_native_ns", &natives, "ns");
        figure_at_most("launch_limited_over_native_ns", &over, LAUNCH_OVERHEAD_MAX_NS, "ns");
    }
    drop(node);
    if selected("pair") {
        match arguments.device {
            Device::Gpu | Device::PerProcessGpu => {
                scenarios::pair(&ComputeNode::start(
                    &Setup { gpus: 2, ..setup.clone() },
                    !arguments.no_agent,
                )?)?;
            }
            // A program has one MIG instance.
            Device::Mig | Device::AmpereMig => {}
        }
    }
    // The remaining parts start and kill agents themselves.
    if selected("agent-restart") || selected("host-upgrade") {
        let node = ComputeNode::start(&setup, false)?;
        if selected("agent-restart") {
            outage::agent_restart(&node, SHARE_ERROR_MAX_POINTS, burst)?;
        }
        if selected("host-upgrade") {
            outage::host_upgrade(&node)?;
        }
    }
    Ok(())
}

/// Compares the total throughput of two tenants with 50 % each with that of one tenant without a limit.
fn aggregate(node: &ComputeNode, rounds: u32) -> Result<()> {
    for shape in SHAPES.iter().filter(|shape| shape.aggregated) {
        let (mut time, mut launches) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let sums = |requests: &[u32]| -> Result<(f64, f64)> {
                let tenants = node.run(&Case::equal(shape, requests))?.tenants;
                let share = tenants.iter().map(|tenant| tenant.share).sum();
                Ok((share, tenants.iter().map(|tenant| tenant.launches_per_second).sum()))
            };
            let (alone, halves) = (sums(&[UNLIMITED])?, sums(&[50, 50])?);
            time.push((1.0 - halves.0 / alone.0) * 100.0);
            launches.push((1.0 - halves.1 / alone.1) * 100.0);
        }
        let name = format!("compute_two_halves_{}", shape.name);
        let (lost_launches, lost_time) = (format!("{name}_lost_launches"), format!("{name}_lost_time"));
        figure_at_most(&lost_launches, &launches, AGGREGATE_LOSS_MAX_PERCENT, "%");
        figure_at_most(&lost_time, &time, AGGREGATE_LOSS_MAX_PERCENT, "%");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit_unless_they_are_zero() {
        let times = ["0", "170us", "0.5ms", "0us"].map(parse_microseconds);
        assert_eq!(times, [Ok(0), Ok(170), Ok(500), Ok(0)]);
        for wrong in ["", "5", "us", "-1us", "1s", "nanus"] {
            assert!(parse_microseconds(wrong).is_err(), "{wrong}");
        }
    }
}
