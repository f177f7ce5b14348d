//! `divvy-bench overcommit`: shares that hold more memory than their GPU has.
//!
//! Two tenants whose working sets are 60 % of the GPU each, of which a third is memory of the GPU that they claimed and
//! the rest is managed (`e2e/escape/programs/overcommit.c`). On the simulated GPU a kernel waits for what is not there: 20 us
//! and a way of 12 GB/s for each page of 2 MiB. Without the node's agent they push each other out, launch by launch; with
//! it they take turns: one at first as a trial, then, when side by side is seen to be slower, all for good. What gets done is what the
//! programs count, when turns begin is what stands on the policy pages.
//!
//! And a tenant whose pools keep what it does not use, beside one that is refused memory: when the ledger has it back.
//!
//! Every line is `NAME<TAB>value<TAB>unit`; behind a figure that must hold stands `NAME_bar<TAB>bound<TAB>unit<TAB>held|MISSED`.

use crate::program;
use crate::shares::most;
use crate::stats::{figure, line, percentile};
use anyhow::{Context, Result, bail, ensure};
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{CONTEXT, MIB, Node, Share};
use divvy_escape::programs;
use divvy_escape::watch::Watch;
use std::io::{BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout};
use std::time::{Duration, Instant};

/// On a node pages lie in memory.
const MEMORY: &str = "/dev/shm";
/// Per cent of the GPU: what a tenant works with, and what of it is claimed.
const SET: u64 = 60;
const CLAIMED: u64 = 20;
/// Turns get so many times done what thrashing does.
const GAIN: f64 = 2.0;
/// Seconds from when they begin to push each other out to the first turn, and to turns without an end.
const SWITCH: f64 = 3.0;
/// Per cent of what an idle pool keeps that may be left after a second.
const LEFT: f64 = 10.0;
const DEMAND: Duration = Duration::from_secs(1);
/// Where the gate is on a policy page.
const GATE: u64 = 64;
const LOOK: Duration = Duration::from_millis(5);
/// A turn is given on within that.
const CHANGE: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Measure this library instead of building the shipping one
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The simulated GPU
    #[arg(long, default_value = "T4")]
    gpu: String,
    /// Length of a kernel, in ms
    #[arg(long, value_name = "MS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..1000))]
    kernel: u64,
    /// How long tenants work, in s; what gets done is counted in the last two thirds
    #[arg(long, value_name = "S", default_value_t = 24, value_parser = clap::value_parser!(u64).range(6..600))]
    window: u64,
    /// Rounds of what pools give back
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only these parts
    #[arg(long, value_delimiter = ',', value_parser = ["turns", "pools"])]
    only: Vec<String>,
}

pub(crate) fn all(arguments: &Arguments) -> Result<()> {
    let wanted = |part: &str| program::is_wanted(&arguments.only, part);
    let library = program::library(arguments.library.as_deref(), &std::env::temp_dir().join("divvy-bench"))?;
    if wanted("turns") {
        let thrash = work(arguments, &library, false)?;
        let turns = work(arguments, &library, true)?;
        most("overcommit_refused", thrash.refused + turns.refused, 0.0, "MiB");
        line("overcommit_thrash_done", thrash.done, "1/s");
        line("overcommit_turns_done", turns.done, "1/s");
        line("overcommit_turns_least_tenant", turns.least, "1/s");
        line("overcommit_turns_first_kernel", percentile(&turns.first, 0.5), "ms");
        at_least("overcommit_turns_over_thrash", turns.done / thrash.done, GAIN, "ratio");
        let switch = turns.switch.map_or(f64::INFINITY, |switch| switch.as_secs_f64());
        most("overcommit_switch", switch, SWITCH, "s");
        // The last that is not a turn: from then on they are taken for good.
        most("overcommit_last_side_by_side", turns.beside.as_secs_f64(), SWITCH, "s");
    }
    if wanted("pools") {
        let (mut times, mut left) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds {
            let (time, rest) = give_back(&arguments.gpu, &library)?;
            times.push(time.as_secs_f64() * 1e3);
            left.push(rest);
        }
        figure("overcommit_pool_back", &times, "ms");
        most("overcommit_pool_left", percentile(&left, 1.0), LEFT, "%");
    }
    Ok(())
}

/// A figure and the least that it may be.
fn at_least(name: &str, value: f64, least: f64, unit: &str) {
    line(name, value, unit);
    let verdict = if value >= least { "held" } else { "MISSED" };
    println!("{name}_bar\t{least:.3}\t{unit}\t{verdict}");
}

/// What two tenants got done.
struct Worked {
    /// Kernels a second, of both and of the one that had less.
    done: f64,
    least: f64,
    /// MiB that they were refused.
    refused: f64,
    /// From when it is a tenant's turn to when its first kernel has ended, in ms.
    first: Vec<f64>,
    /// From their begin to the first turn, and to when they last worked side by side.
    switch: Option<Duration>,
    beside: Duration,
}

/// Of a tenant: whether it is closed, and when it opened, in ms from the begin.
#[derive(Default)]
struct Gate {
    is_closed: bool,
    opened: Vec<u64>,
}

/// Bytes of the GPU.
fn physical(node: &Node) -> Result<u64> {
    let state = node.sim.read()?;
    Ok(divvy_sim::mig::memory_mib(state.gpus.first().context("no GPU")?, None) * MIB)
}

fn node(gpu: &str) -> Result<Node> {
    let node = Node::up_in(gpu, Path::new(MEMORY))?;
    programs::compile(&["overcommit.c"], &node.programs().join("overcommit"), &["-ldl"])?;
    Ok(node)
}

fn work(arguments: &Arguments, library: &Path, agent: bool) -> Result<Worked> {
    let node = node(&arguments.gpu)?;
    let physical = physical(&node)?;
    let (claimed, limit) = (physical / 100 * CLAIMED, physical / 100 * SET + CONTEXT + 64 * MIB);
    let shares = ["one", "two"].map(|claim| node.over_committed(claim, "0", claimed, limit));
    let [one, two] = shares;
    let shares = [one?, two?];
    let _agent = agent.then(|| Watch::start(&node)).transpose()?;
    let set = physical / 100 * SET / MIB / 64 * 64;
    let (kernel, window) = (arguments.kernel.to_string(), (arguments.window * 1000).to_string());
    let mut tenants = Vec::new();
    for share in &shares {
        tenants.push(Tenant::start(&node, library, share, &["work", &set.to_string(), &kernel, &window])?);
    }
    let held = tenants.iter_mut().map(Tenant::ready).collect::<Result<Vec<u64>>>()?;
    for tenant in &mut tenants {
        tenant.say()?;
    }
    let begin = Instant::now();
    let pages: Vec<std::fs::File> = shares
        .iter()
        .map(|share| std::fs::File::open(share.directory.join("policy")))
        .collect::<std::io::Result<_>>()?;
    let (mut switch, mut beside, mut closed) = (None, Duration::ZERO, Duration::ZERO);
    let mut gates = [Gate::default(), Gate::default()];
    while begin.elapsed() < Duration::from_secs(arguments.window) {
        for (gate, page) in gates.iter_mut().zip(&pages) {
            let mut word = [0; 4];
            let is_closed = page.read_exact_at(&mut word, GATE).is_ok() && word != [0; 4];
            if std::mem::replace(&mut gate.is_closed, is_closed) && !is_closed {
                gate.opened.push(begin.elapsed().as_millis() as u64);
            }
        }
        if gates.iter().any(|gate| gate.is_closed) {
            closed = begin.elapsed();
            switch.get_or_insert(closed);
        } else if begin.elapsed() > closed + CHANGE {
            beside = begin.elapsed();
        }
        std::thread::sleep(LOOK);
    }
    let (from, to) = (arguments.window * 1000 / 3, arguments.window * 1000);
    let (mut done, mut first) = (Vec::new(), Vec::new());
    for (mut tenant, gate) in tenants.into_iter().zip(&gates) {
        let said = tenant.end()?;
        let times = said.lines().filter_map(|line| line.strip_prefix("done ")?.parse::<u64>().ok());
        let times: Vec<u64> = times.collect();
        let within = |time: &&u64| (from..to).contains(*time);
        done.push(times.iter().filter(within).count() as f64 * 1000.0 / (to - from) as f64);
        let after = |opened: &u64| Some((times.iter().find(|time| *time > opened)? - opened) as f64);
        first.extend(gate.opened.iter().filter(within).filter_map(after));
    }
    Ok(Worked {
        done: done.iter().sum(),
        least: percentile(&done, 0.0),
        first,
        refused: held.iter().map(|held| set.saturating_sub(*held)).sum::<u64>() as f64,
        switch,
        beside,
    })
}

/// How long it took until nine tenths of what a pool keeps for nothing was back after a neighbour was refused memory, and
/// how many per cent were missing after a second.
fn give_back(gpu: &str, library: &Path) -> Result<(Duration, f64)> {
    const IDLE: u64 = 4096;
    let node = node(gpu)?;
    let shares = [
        node.over_committed("keeps", "0", IDLE * MIB + 2 * CONTEXT, 2 * IDLE * MIB)?,
        node.over_committed("wants", "0", 1024 * MIB + CONTEXT, 2048 * MIB)?,
    ];
    let _agent = Watch::start(&node)?;
    let idle = IDLE.to_string();
    let mut keeps = Tenant::start(&node, library, &shares[0], &["pool", &idle])?;
    let mut wants = Tenant::start(&node, library, &shares[1], &["take", "512"])?;
    keeps.ready()?;
    wants.ready()?;
    // It rests for as long as an agent needs to see that.
    std::thread::sleep(Duration::from_secs(2));
    let mut before = node.used();
    let begin = loop {
        wants.say()?;
        let code = wants.line()?;
        match code.as_str() {
            "0" => before = node.used(),
            "2" => break Instant::now(),
            code => bail!("cuMemCreate answered {code}"),
        }
    };
    let missing = || {
        let back = before.saturating_sub(node.used());
        100.0 - back.min(IDLE * MIB) as f64 / (IDLE * MIB) as f64 * 100.0
    };
    let mut time = None;
    let mut left = missing();
    while time.is_none() || begin.elapsed() < DEMAND {
        let now = missing();
        if begin.elapsed() <= DEMAND {
            left = now;
        }
        if now <= LEFT {
            time.get_or_insert(begin.elapsed());
        }
        ensure!(begin.elapsed() < PATIENCE, "{now:.0} % of what the pool keeps is not given back");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok((time.unwrap_or_default(), left))
}

/// A program in a container of its own; both end with it.
struct Tenant {
    child: Child,
    input: ChildStdin,
    said: BufReader<ChildStdout>,
    _container: Container,
}

impl Tenant {
    fn start(node: &Node, library: &Path, share: &Share, words: &[&str]) -> Result<Self> {
        let (library, shares, environment) =
            (Some(library.to_owned()), vec![share.clone()], vec![program::jitter()]);
        let container =
            Container::start(node, &Recipe { library, shares, environment, ..Recipe::default() })?;
        let mut command = container.command(&node.programs().join("overcommit"));
        command.args(words);
        let mut child = program::start(command)?;
        let said = BufReader::new(child.stdout.take().context("no output")?);
        let input = child.stdin.take().context("no input")?;
        Ok(Self { child, input, said, _container: container })
    }

    fn line(&mut self) -> Result<String> {
        let line = program::hear(&mut self.said)?;
        if line.is_empty() {
            let mut why = String::new();
            if let Some(mut wrong) = self.child.stderr.take() {
                wrong.read_to_string(&mut why)?;
            }
            bail!("a tenant has ended: {}", why.trim());
        }
        Ok(line.trim().to_owned())
    }

    /// MiB that it holds.
    fn ready(&mut self) -> Result<u64> {
        let line = self.line()?;
        line.strip_prefix("ready ").and_then(|held| held.parse().ok()).with_context(|| format!("said {line}"))
    }

    fn say(&mut self) -> Result<()> {
        self.input.write_all(b"\n").context("a tenant has ended")
    }

    /// What it says in the end.
    fn end(&mut self) -> Result<String> {
        let next =
            || program::hear(&mut self.said).map(|line| (!line.is_empty()).then_some(line)).transpose();
        let said = std::iter::from_fn(next).collect::<Result<_>>()?;
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait()?.is_none() {
            ensure!(Instant::now() < deadline, "a tenant does not end");
            std::thread::sleep(LOOK);
        }
        Ok(said)
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
