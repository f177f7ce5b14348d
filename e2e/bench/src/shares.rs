//! `divvy-bench shares`: overhead of the interposer library in a CUDA program, and exactness of the
//! memory limit when processes race or are killed.
//!
//! A C program measures itself (`e2e/escape/programs/bench.c`), in a container without the library
//! and in one with it. The two run in alternating turns ([`crate::interleave`]), and differences
//! and ratios are taken within a turn.

use crate::interleave::{self, differences};
use crate::stats::{at_most, figure, figure_at_most, line, median, percentile};
use crate::{artifacts, program};
use anyhow::{Context, Result, ensure};
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{MIB, Node};
use divvy_escape::programs;
use std::path::{Path, PathBuf};

/// Memory limit of the share, in bytes; the GPU has more.
const LIMIT_BYTES: u64 = 16384 * MIB;
/// Parent directory of the node: as on a real node, the share's pages are in memory. On a disk the
/// first write to a page is slower.
const MEMORY_DIR: &str = "/dev/shm";
/// Minimum process starts per round, one process at a time.
///
/// One in about 200 starts loses the CPU and then takes fifty times as long. The p99 of a few
/// hundred starts would often be one of those by chance.
const SINGLE_STARTS_PER_ROUND: u64 = 4000;
/// Minimum process starts per round, with many processes at once.
///
/// Two in 100 starts lose the CPU, and the p99 is the time that one of them waits for the others.
/// That time varies widely, so comparing two such figures takes many starts.
const PARALLEL_STARTS_PER_ROUND: u64 = 20_000;
/// Minimum process starts per turn.
const STARTS_PER_TURN: u64 = 500;
/// Factor on the rounds for calls that cost a few nanoseconds: two identical programs differ by ten
/// times as much, and each pair by a different amount.
const SHORT_CALL_ROUNDS_FACTOR: u32 = 20;
/// Longest time until a killed process's memory is available again: the agent audits once a second.
const KILL_TO_FULL_LIMIT_MAX_MS: f64 = 2000.0;
/// Order in which allocations are freed. `random-back-to-back` starts each call at once, without
/// waiting for the one before: the CPU then overlaps cache misses of several calls, more of them
/// without the library.
const ORDERS: [&str; 4] = ["lifo", "fifo", "random", "random-back-to-back"];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Measure this library instead of building the one that the image ships
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Number of rounds per figure
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of calls per round
    #[arg(long, default_value_t = 200_000)]
    calls: u64,
    /// Numbers of live allocations
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1_000, 10_000, 100_000])]
    live: Vec<u64>,
    /// Numbers of processes that initialise at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 200, 1_000])]
    processes: Vec<u64>,
    /// Number of races of two processes for the last free byte
    #[arg(long, default_value_t = 10_000)]
    races: u64,
    /// Number of processes killed at random points
    #[arg(long, default_value_t = 1_000)]
    kills: u64,
    /// Random seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only these parts
    #[arg(long, value_delimiter = ',', value_parser = ["launch", "info", "alloc", "init", "race", "kills"])]
    only: Vec<String>,
}

/// A container without the library, one with it, and the program that runs in both.
struct Bench {
    program: PathBuf,
    native: Container,
    share: Container,
    node: Node,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let bench = Bench::start(arguments.library.as_deref())?;
    let selected = |part: &str| program::is_selected(&arguments.only, part);
    if selected("launch") {
        bench.over_native("launch", arguments, 2.0)?;
    }
    if selected("info") {
        bench.over_native("info", arguments, 60.0)?;
    }
    if selected("alloc") {
        bench.alloc(arguments)?;
    }
    if selected("init") {
        for count in &arguments.processes {
            bench.init(arguments.rounds, *count)?;
        }
    }
    let seed = arguments.seed.to_string();
    if selected("race") {
        let printed = bench.run(&bench.share, &["race", &arguments.races.to_string(), &seed])?;
        line("races", arguments.races as f64, "rounds");
        never("races_above_the_limit", value(&printed, "above")?, "rounds");
        never("races_without_winner", value(&printed, "neither")?, "rounds");
        never("races_refused_although_both_fit", value(&printed, "missed")?, "rounds");
    }
    if selected("kills") {
        let printed = bench.run(&bench.share, &["kills", &arguments.kills.to_string(), &seed])?;
        line("kills", arguments.kills as f64, "processes");
        let worst_ms = value(&printed, "worst")? / 1e6;
        at_most("kill_to_full_limit_worst_ms", worst_ms, KILL_TO_FULL_LIMIT_MAX_MS, "ms");
        at_most("kill_slowest_call_ms", value(&printed, "slowest")? / 1e6, 10_000.0, "ms");
        never("kills_without_full_limit_after_2_s", value(&printed, "late")?, "processes");
    }
    ensure!(bench.node.used() == 0, "memory is in use after the last program has exited");
    Ok(())
}

impl Bench {
    fn start(library: Option<&Path>) -> Result<Self> {
        let node = Node::up_in("L4", Path::new(MEMORY_DIR))?;
        let program = node.programs().join("bench");
        programs::compile(&["bench.c"], &program, &["-ldl"])?;
        let library = artifacts::interposer(library, node.path())?;
        let shares = vec![node.share("claim-0", "0", LIMIT_BYTES)?];
        let native = Container::start(&node, &Recipe::default())?;
        let share = Container::start(&node, &Recipe { library: Some(library), shares, ..Recipe::default() })?;
        Ok(Self { program, native, share, node })
    }

    /// Runs the program and returns the names and values that it prints.
    fn run(&self, container: &Container, words: &[&str]) -> Result<Vec<(String, f64)>> {
        let ran = container.command(&self.program).args(words).output().context("cannot start nsenter")?;
        let (printed, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        ensure!(ran.status.success(), "bench {}: {} {}", words.join(" "), ran.status, errors.trim());
        let pairs = printed.lines().filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        Ok(pairs.collect())
    }

    /// Runs one round of programs with these arguments. For each program, returns the nanoseconds
    /// per call in each turn, without the library and with it.
    ///
    /// With `library_first` the program with the library starts first.
    fn round(&self, programs: &[Vec<&str>], calls: u64, library_first: bool) -> Result<Vec<[Vec<f64>; 2]>> {
        let (turns, each) = interleave::split(calls);
        let mut commands = Vec::new();
        let containers = [&self.native, &self.share];
        for words in programs {
            for at in [usize::from(library_first), usize::from(!library_first)] {
                let mut command = containers[at].command(&self.program);
                command.arg("turns").args(words).arg(&each);
                commands.push(command);
            }
        }
        let mut took = interleave::run(commands, turns)?.into_iter();
        let pair = || Some([took.next()?, took.next()?]);
        let in_order =
            |[first, second]: [_; 2]| if library_first { [second, first] } else { [first, second] };
        Ok(std::iter::from_fn(pair).map(in_order).collect())
    }

    /// Measures how much longer a call takes with the library; at most `bound` nanoseconds are expected.
    ///
    /// In the simulated driver, the second of two identical programs to start takes 3 ns more per
    /// call. So a round runs both orders and takes the mean.
    fn over_native(&self, call: &str, arguments: &Arguments, bound: f64) -> Result<()> {
        let (mut natives, mut over) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds.saturating_mul(SHORT_CALL_ROUNDS_FACTOR) {
            let mut both = 0.0;
            for library_first in [false, true] {
                for [native, share] in self.round(&[vec![call]], arguments.calls, library_first)? {
                    natives.push(median(&native));
                    both += median(&differences(&native, &share));
                }
            }
            over.push(both / 2.0);
        }
        figure(&format!("{call}_native_ns"), &natives, "ns");
        figure_at_most(&format!("{call}_over_native_ns"), &over, bound, "ns");
        Ok(())
    }

    fn alloc(&self, arguments: &Arguments) -> Result<()> {
        let live: Vec<String> = arguments.live.iter().map(u64::to_string).collect();
        for order in ORDERS {
            let programs: Vec<_> = live.iter().map(|live| vec!["alloc", live.as_str(), order]).collect();
            let mut costs = vec![(Vec::new(), Vec::new()); live.len()];
            let mut ratios = Vec::new();
            for at in 0..arguments.rounds {
                let round = self.round(&programs, arguments.calls, at % 2 == 1)?;
                let over: Vec<_> = round.iter().map(|[native, share]| differences(native, share)).collect();
                for ((costs, [native, _]), over) in costs.iter_mut().zip(&round).zip(&over) {
                    costs.0.push(median(native));
                    costs.1.push(median(over));
                }
                if let (Some(fewest), Some(most)) = (over.first(), over.last()) {
                    ratios.push(median(most) / median(fewest));
                }
            }
            let name = order.replace('-', "_");
            for (live, (natives, over)) in live.iter().zip(&costs) {
                figure(&format!("alloc_free_{live}_{name}_native_ns"), natives, "ns");
                figure_at_most(&format!("alloc_free_{live}_{name}_over_native_ns"), over, 300.0, "ns");
            }
            figure_at_most(&format!("alloc_free_{name}_most_live_to_fewest_ratio"), &ratios, 1.2, "ratio");
        }
        Ok(())
    }

    /// Starts `count` processes at once, repeatedly until a round has enough samples for a p99.
    fn init(&self, rounds: u32, count: u64) -> Result<()> {
        let (mut added, mut walls, mut slowest) = (Vec::new(), Vec::new(), 0.0_f64);
        let starts = if count > 1 { PARALLEL_STARTS_PER_ROUND } else { SINGLE_STARTS_PER_ROUND };
        let times = STARTS_PER_TURN.div_ceil(count.max(1));
        let words = ["init", &count.to_string(), &times.to_string()];
        for _ in 0..rounds {
            let mut printed = [Vec::new(), Vec::new()];
            for turn in 0..starts.div_ceil(times * count.max(1)) {
                // The order alternates: a thousand processes keep the machine busy for a while
                // after their exit.
                for at in [turn % 2, (turn + 1) % 2] {
                    let (container, printed) = match (at, &mut printed) {
                        (0, [native, _]) => (&self.native, native),
                        (_, [_, share]) => (&self.share, share),
                    };
                    printed.extend(self.run(container, &words)?);
                }
            }
            let [native, share] = printed;
            let p99 = |printed: &[(String, f64)], name| percentile(&values(printed, name), 0.99);
            added.push((p99(&share, "cpu") - p99(&native, "cpu")) / 1000.0);
            walls.push(p99(&share, "wall") / p99(&native, "wall"));
            slowest = slowest.max(percentile(&values(&share, "wall"), 1.0) / 1e6);
        }
        figure_at_most(&format!("init_{count}_cpu_added_p99_us"), &added, 1000.0, "us");
        figure_at_most(&format!("init_{count}_wall_p99_ratio"), &walls, 1.2, "ratio");
        at_most(&format!("init_{count}_slowest_ms"), slowest, 10_000.0, "ms");
        Ok(())
    }
}

/// Prints a count that must be zero.
fn never(name: &str, count: f64, unit: &str) {
    at_most(name, count, 0.0, unit);
}

/// All values of that name.
fn values(printed: &[(String, f64)], name: &str) -> Vec<f64> {
    printed.iter().filter(|(what, _)| what == name).map(|(_, value)| *value).collect()
}

/// The first value of that name.
fn value(printed: &[(String, f64)], name: &str) -> Result<f64> {
    values(printed, name).first().copied().with_context(|| format!("the program does not print {name}"))
}
