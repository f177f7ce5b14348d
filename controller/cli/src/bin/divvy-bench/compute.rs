//! `divvy-bench compute`: whether a share of compute time is what it was asked to be, and what that costs.
//!
//! A cell is a shape of kernels and the requests of one, two or four tenants. Each tenant is a program in C
//! (`e2e/escape/programs/compute.c`) in a container of its own, which wants all the time that it can get, on one
//! simulated GPU whose kernels take up to 20 per cent more or less than they should, watched by the node's agent. What a tenant had is read from the
//! simulator's ledger, never from the program, the library or its pages. Its share is the time that it had in the
//! window over the time that passed; what it had before the window is told apart, as its start.
//!
//! Every line is `NAME<TAB>value<TAB>unit`; behind a figure that must hold stands
//! `NAME_bar<TAB>most<TAB>unit<TAB>held|MISSED`.

mod away;
mod cells;
mod draw;
mod matrix;
mod policies;
mod tenants;

use crate::program;
use crate::stats::{bar, figure, median};
use crate::turns;
use anyhow::Result;
use cells::{Cell, SHAPES, UNLIMITED};
use clap::ValueEnum;
use divvy_escape::watch::Watch;
use std::path::PathBuf;
use std::time::Duration;
use tenants::{On, Stage};

/// So many points a share may be off.
const POINTS: f64 = 2.0;
/// What costs a few nanoseconds is measured in so many times as many rounds.
const OFTEN: u32 = 5;
/// Nanoseconds that a launch of a tenant with a limit may take over native.
const LAUNCH: f64 = 25.0;
/// Per cent of what one unlimited tenant gets done that two of 50 % may lose.
const LOSS: f64 = 3.0;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Measure this library instead of building the shipping one
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Which cells: ci (25) or all (870)
    #[arg(long, value_enum, default_value_t = Which::Ci)]
    cells: Which,
    /// Only these shapes of kernels
    #[arg(long, value_delimiter = ',', value_parser = clap::builder::PossibleValuesParser::new(cells::names()))]
    shapes: Vec<String>,
    /// These cells instead: requests in per cent, tenants joined by a plus, as in 30,50+50; 100 is no share at all
    #[arg(long, value_delimiter = ',', value_parser = cells::parse)]
    requests: Vec<Vec<u32>>,
    /// Only cells with so many tenants
    #[arg(long, value_delimiter = ',')]
    tenants: Vec<usize>,
    /// Cells that are played at once, each on a node of its own: 870 one after the other take two hours
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    at_once: u32,
    /// Seed of the cells that are drawn; the time if none is given
    #[arg(long)]
    seed: Option<u64>,
    /// How long tenants run before the window, in ms
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    before: u64,
    /// Length of the window, in ms
    #[arg(long, value_name = "MS", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(200..))]
    window: u64,
    /// Unused time that a share may keep, in ms of GPU time
    #[arg(long, value_name = "MS", default_value_t = 20)]
    burst: u64,
    /// What tenants have shares of
    #[arg(long, value_enum, default_value_t = On::Gpu)]
    on: On,
    /// Without the node's agent, which corrects what the library misjudges
    #[arg(long)]
    no_agent: bool,
    /// Rounds of the figures that are compared
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Draw what tenants get over time by each policy, as pictures in this directory, and nothing else
    #[arg(long, value_name = "DIR")]
    draw: Option<PathBuf>,
    /// Fail where a share of a cell had more than its part and the points that it may be off, or less by twice as many in two
    /// plays: once may be the machine's doing; and where the node's agent found fault with one
    #[arg(long)]
    check: bool,
    /// Be the agent of the node whose driver and pages are there
    #[arg(long, hide = true, num_args = 2)]
    agent_of: Vec<PathBuf>,
    /// Only these parts
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = [
            "cells", "aggregate", "fixed", "weights", "lending", "priority",
            "launch", "lost", "away",
        ]
    )]
    only: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Which {
    Ci,
    All,
}

pub(crate) fn all(arguments: &Arguments) -> Result<()> {
    if let [root, directory] = arguments.agent_of.as_slice() {
        return Watch::serve(root, directory, false);
    }
    let wanted = |part: &str| program::is_wanted(&arguments.only, part);
    let library = program::library(arguments.library.as_deref(), &std::env::temp_dir().join("divvy-bench"))?;
    let millis = Duration::from_millis;
    let (before, window, burst) =
        (millis(arguments.before), millis(arguments.window), millis(arguments.burst));
    if let Some(dir) = &arguments.draw {
        return draw::all(&library, dir);
    }
    let up = || Stage::up(arguments.on, library.clone(), before, window, burst, !arguments.no_agent);
    if wanted("cells") {
        matrix::play(arguments, up, burst)?;
    }
    let stage = up()?;
    if wanted("aggregate") {
        aggregate(&stage, arguments.rounds)?;
    }
    if wanted("fixed") {
        policies::fixed(&stage, POINTS)?;
    }
    if wanted("weights") {
        policies::weights(&stage, POINTS)?;
    }
    if wanted("lending") {
        policies::lending(&stage, POINTS, arguments.rounds)?;
    }
    if wanted("priority") {
        policies::priority(&stage, arguments.rounds)?;
    }
    if wanted("launch") {
        let (mut natives, mut over) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds.saturating_mul(OFTEN) {
            // The second to start takes longer, whichever it is.
            let [native, limited] = stage.launches([UNLIMITED, 99])?;
            let [limited_first, native_second] = stage.launches([99, UNLIMITED])?;
            let both = [(native, limited), (native_second, limited_first)];
            natives.extend(both.iter().map(|(native, _)| median(native)));
            let differences = both.map(|(native, limited)| median(&turns::differences(&native, &limited)));
            over.push(differences.iter().sum::<f64>() / 2.0);
        }
        figure("launch_limited_native_ns", &natives, "ns");
        figure("launch_limited_over_native_ns", &over, "ns");
        bar("launch_limited_over_native_ns", median(&over), LAUNCH, "ns");
    }
    // Its agents are others.
    drop(stage);
    if wanted("lost") || wanted("away") {
        let stage = Stage::up(arguments.on, library, before, window, burst, false)?;
        if wanted("lost") {
            policies::lost(&stage, POINTS, burst)?;
        }
        if wanted("away") {
            away::all(&stage)?;
        }
    }
    Ok(())
}

/// What two tenants of half a GPU each get done together, against one that has it alone.
fn aggregate(stage: &Stage, rounds: u32) -> Result<()> {
    for shape in SHAPES.iter().filter(|shape| shape.aggregated) {
        let (mut time, mut launches) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let sums = |requests: &[u32]| -> Result<(f64, f64)> {
                let got = stage.play(&Cell { shape, requests: requests.to_vec() })?.got;
                let share = got.iter().map(|got| got.share).sum();
                Ok((share, got.iter().map(|got| got.launches_per_second).sum()))
            };
            let (alone, halves) = (sums(&[UNLIMITED])?, sums(&[50, 50])?);
            time.push((1.0 - halves.0 / alone.0) * 100.0);
            launches.push((1.0 - halves.1 / alone.1) * 100.0);
        }
        let name = format!("compute_two_halves_{}", shape.name);
        figure(&format!("{name}_lost_launches"), &launches, "%");
        bar(&format!("{name}_lost_launches"), median(&launches), LOSS, "%");
        figure(&format!("{name}_lost"), &time, "%");
        bar(&format!("{name}_lost"), median(&time), LOSS, "%");
    }
    Ok(())
}
