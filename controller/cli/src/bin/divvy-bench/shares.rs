//! `divvy-bench shares`: what the library in a container with a share costs a CUDA program, and whether the limit is
//! exact when processes race or are killed.
//!
//! Every figure is a program in C that measures itself (`e2e/escape/programs/bench.c`), in a container without the library
//! and in one with it. Within a round the two take turns of milliseconds ([`crate::turns`]), and differences and ratios are
//! taken within a turn: a machine whose processors are shared is another one a second later. Behind a figure stands the
//! most that it may be, and whether it is: `NAME_bar<TAB>most<TAB>unit<TAB>held|MISSED`.

use crate::program;
use crate::stats::{bar, figure, line, median, percentile};
use crate::turns::{self, differences};
use anyhow::{Context, Result, ensure};
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{MIB, Node};
use divvy_escape::programs;
use std::path::{Path, PathBuf};

/// The share of a GPU that has more.
const LIMIT: u64 = 16384 * MIB;
/// On a node pages lie in memory; a file system on a disk makes the first write to one slower.
const MEMORY: &str = "/dev/shm";
/// Starts of processes in a round, at least: of one at a time, and of many at once. Of one about one in two hundred loses
/// the processor meanwhile, and waits fifty times as long as it takes: a p99 of a few hundred starts would be one of those in
/// many a round by chance. Of many it is two in a hundred, and the p99 is how long one of them waits for the others,
/// anything up to all of them: it takes many starts to tell two such figures apart.
const STARTS: (u64, u64) = (4000, 20_000);
/// Of them in a turn, at least.
const STARTS_IN_TURN: u64 = 500;
/// What costs a few nanoseconds is measured in so many times as many rounds: two programs that are the same differ by ten times
/// as much, each pair by another amount.
const OFTEN: u32 = 20;
/// Which allocation is freed next. Each call by itself; and any while calls follow each other at once: then the processor waits
/// for the memory of several at a time, of more of them without the library.
const ORDERS: [&str; 4] = ["lifo", "fifo", "random", "random-back-to-back"];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Measure this library instead of building the shipping one
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Rounds of each figure
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Calls of each round
    #[arg(long, default_value_t = 200_000)]
    calls: u64,
    /// How many live allocations
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1_000, 10_000, 100_000])]
    live: Vec<u64>,
    /// How many processes initialise at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 200, 1_000])]
    processes: Vec<u64>,
    /// Rounds of two processes that race for the last byte
    #[arg(long, default_value_t = 10_000)]
    races: u64,
    /// Processes killed at random points
    #[arg(long, default_value_t = 1_000)]
    kills: u64,
    /// Seed of what is random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only these parts
    #[arg(long, value_delimiter = ',', value_parser = ["launch", "info", "alloc", "init", "race", "kills"])]
    only: Vec<String>,
}

/// The two containers, and the program in them.
struct Bench {
    program: PathBuf,
    native: Container,
    share: Container,
    node: Node,
}

pub(crate) fn all(arguments: &Arguments) -> Result<()> {
    let bench = Bench::start(arguments.library.as_deref())?;
    let wanted = |part: &str| program::is_wanted(&arguments.only, part);
    if wanted("launch") {
        bench.over_native("launch", arguments, 2.0)?;
    }
    if wanted("info") {
        bench.over_native("info", arguments, 60.0)?;
    }
    if wanted("alloc") {
        bench.alloc(arguments)?;
    }
    if wanted("init") {
        for count in &arguments.processes {
            bench.init(arguments.rounds, *count)?;
        }
    }
    let seed = arguments.seed.to_string();
    if wanted("race") {
        let said = bench.run(&bench.share, &["race", &arguments.races.to_string(), &seed])?;
        line("races", arguments.races as f64, "rounds");
        none("races_above_the_limit", one(&said, "above")?, "rounds");
        none("races_that_nobody_won", one(&said, "neither")?, "rounds");
        none("races_refused_though_both_fit", one(&said, "missed")?, "rounds");
    }
    if wanted("kills") {
        let said = bench.run(&bench.share, &["kills", &arguments.kills.to_string(), &seed])?;
        line("kills", arguments.kills as f64, "processes");
        most("kill_to_whole_limit_worst_ms", one(&said, "worst")? / 1e6, 2000.0, "ms");
        most("kill_slowest_call_ms", one(&said, "slowest")? / 1e6, 10_000.0, "ms");
        none("kills_not_whole_within_2_s", one(&said, "late")?, "processes");
    }
    ensure!(bench.node.used() == 0, "memory is in use after the last program has ended");
    Ok(())
}

impl Bench {
    fn start(library: Option<&Path>) -> Result<Self> {
        let node = Node::up_in("L4", Path::new(MEMORY))?;
        let program = node.programs().join("bench");
        programs::compile(&["bench.c"], &program, &["-ldl"])?;
        let library = program::library(library, node.path())?;
        let shares = vec![node.share("claim-0", "0", LIMIT)?];
        let native = Container::start(&node, &Recipe::default())?;
        let share = Container::start(&node, &Recipe { library: Some(library), shares, ..Recipe::default() })?;
        Ok(Self { program, native, share, node })
    }

    /// What the program prints: names and values.
    fn run(&self, container: &Container, words: &[&str]) -> Result<Vec<(String, f64)>> {
        let ran = container.command(&self.program).args(words).output().context("cannot start nsenter")?;
        let (said, wrong) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        ensure!(ran.status.success(), "bench {}: {} {}", words.join(" "), ran.status, wrong.trim());
        let pairs = said.lines().filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        Ok(pairs.collect())
    }

    /// A round of programs with these words: of each, nanoseconds of a call in each turn, without the library and with it.
    /// With `library_first` those with it start first.
    fn round(&self, programs: &[Vec<&str>], calls: u64, library_first: bool) -> Result<Vec<[Vec<f64>; 2]>> {
        let (turns, each) = turns::of(calls);
        let mut commands = Vec::new();
        let containers = [&self.native, &self.share];
        for words in programs {
            for at in [usize::from(library_first), usize::from(!library_first)] {
                let mut command = containers[at].command(&self.program);
                command.arg("turns").args(words).arg(&each);
                commands.push(command);
            }
        }
        let mut took = turns::take(commands, turns)?.into_iter();
        let pair = || Some([took.next()?, took.next()?]);
        let in_order =
            |[first, second]: [_; 2]| if library_first { [second, first] } else { [first, second] };
        Ok(std::iter::from_fn(pair).map(in_order).collect())
    }

    /// A call, `most` nanoseconds over native. Of two programs that are the same, the second to start takes 3 ns more in the
    /// simulated driver, so each starts first as often, and what a round has is the mean of both orders.
    fn over_native(&self, call: &str, arguments: &Arguments, most: f64) -> Result<()> {
        let (mut natives, mut over) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds.saturating_mul(OFTEN) {
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
        bounded(&format!("{call}_over_native_ns"), &over, most, "ns");
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
                bounded(&format!("alloc_free_{live}_{name}_over_native_ns"), over, 300.0, "ns");
            }
            bounded(&format!("alloc_free_{name}_most_live_to_fewest_ratio"), &ratios, 1.2, "ratio");
        }
        Ok(())
    }

    /// So many processes at once, and that as often as a round has samples enough to have a p99: of one process it
    /// would be that process, and of 200 what happens to two of them.
    fn init(&self, rounds: u32, count: u64) -> Result<()> {
        let (mut added, mut walls, mut slowest) = (Vec::new(), Vec::new(), 0.0_f64);
        let starts = if count > 1 { STARTS.1 } else { STARTS.0 };
        let times = STARTS_IN_TURN.div_ceil(count.max(1));
        let words = ["init", &count.to_string(), &times.to_string()];
        for _ in 0..rounds {
            let mut said = [Vec::new(), Vec::new()];
            for turn in 0..starts.div_ceil(times * count.max(1)) {
                // Who goes first takes turns: a thousand processes leave the machine busy for a while.
                for at in [turn % 2, (turn + 1) % 2] {
                    let (container, said) = match (at, &mut said) {
                        (0, [native, _]) => (&self.native, native),
                        (_, [_, share]) => (&self.share, share),
                    };
                    said.extend(self.run(container, &words)?);
                }
            }
            let [native, share] = said;
            let p99 = |said: &[(String, f64)], name| percentile(&every(said, name), 0.99);
            added.push((p99(&share, "cpu") - p99(&native, "cpu")) / 1000.0);
            walls.push(p99(&share, "wall") / p99(&native, "wall"));
            slowest = slowest.max(percentile(&every(&share, "wall"), 1.0) / 1e6);
        }
        bounded(&format!("init_{count}_cpu_added_p99_us"), &added, 1000.0, "us");
        bounded(&format!("init_{count}_wall_p99_ratio"), &walls, 1.2, "ratio");
        most(&format!("init_{count}_slowest_ms"), slowest, 10_000.0, "ms");
        Ok(())
    }
}

/// A figure over rounds, and the most that its median may be.
fn bounded(name: &str, rounds: &[f64], most: f64, unit: &str) {
    figure(name, rounds, unit);
    bar(name, median(rounds), most, unit);
}

/// A figure of one run, and the most that it may be.
pub(crate) fn most(name: &str, value: f64, most: f64, unit: &str) {
    line(name, value, unit);
    bar(name, value, most, unit);
}

/// What must not happen at all.
fn none(name: &str, value: f64, unit: &str) {
    most(name, value, 0.0, unit);
}

fn every(said: &[(String, f64)], name: &str) -> Vec<f64> {
    said.iter().filter(|(what, _)| what == name).map(|(_, value)| *value).collect()
}

pub(crate) fn one(said: &[(String, f64)], name: &str) -> Result<f64> {
    every(said, name).first().copied().with_context(|| format!("the program does not say {name}"))
}
