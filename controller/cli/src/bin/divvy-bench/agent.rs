//! `divvy-bench agent`: what the node's agent costs that looks after shares, and how soon it gives back what a dead
//! container had.
//!
//! The agent runs in this process, as in the node daemon, and this process does nothing else meanwhile: its CPU time is the
//! agent's, but for the thread that waits for the GPUs' events. The simulated NVML waits by looking again and again, which
//! a real one does not: what that takes is told apart. NVML's answers to the agent are in the figure. Tenants are CUDA
//! programs (`e2e/escape/programs`) in containers with the library and a share each: some hold memory and sleep, others
//! launch all they can of their part of the GPU's time, and others yet lend, weigh and precede one another, which is what
//! the agent has most to do with.
//!
//! What the arbiter of compute time costs is what these add to an agent whose tenants only hold memory, as that audits accounts
//! and processes once a second all the same. That is rather too much than too little: busy tenants leave the audits, too, less of the caches.
//! So where `work` or `policies` are asked for, `cpu` is measured first.

use crate::program;
use crate::shares::most;
use crate::stats::{bar, figure, median, percentile};
use anyhow::{Context, Result, ensure};
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{Compute, MIB, Node, Share};
use divvy_escape::programs;
use divvy_escape::watch::Watch;
use divvy_sim::ledger;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command};
use std::time::{Duration, Instant};

/// As on a node, where pages lie in memory.
const MEMORY: &str = "/dev/shm";
/// Of a share, and what its program takes.
const LIMIT: u64 = 2048 * MIB;
const HELD_MIB: u64 = 256;
/// More than half of a share, less two contexts: two programs cannot have it at once.
const MOST_MIB: u64 = 1200;
/// Between an audit and the next; killing at other points of it each time.
const AUDIT: Duration = Duration::from_secs(1);
/// So long a program waits in vain without an agent.
const IN_VAIN: Duration = Duration::from_secs(4);
/// What a tenant at work launches, and its part in per cent where there are eight of a GPU.
const SHAPE: &str = "1ms";
const CORES: u32 = 12;
/// Five kernels in a row, and a pause ten times as long.
const BURSTS: &str = "bursts";
/// What is done once is done by then.
const SETTLED: Duration = Duration::from_secs(3);
/// Ticks of `/proc/self/stat` in a second.
const TICKS: f64 = 100.0;
/// The thread that waits for events.
const EVENTS: &str = "nvml-events";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Preload this library instead of building the shipping one
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// How many GPUs
    #[arg(long, default_value_t = 8)]
    gpus: usize,
    /// How many shares of each, with a process each
    #[arg(long, default_value_t = 8)]
    shares: usize,
    /// Seconds that the agent's CPU time is taken over
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    window: u64,
    /// Windows, and containers that die
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only these parts
    #[arg(long, value_delimiter = ',', value_parser = ["cpu", "work", "policies", "dead"])]
    only: Vec<String>,
}

pub(crate) fn all(arguments: &Arguments) -> Result<()> {
    let wanted = |part: &str| program::is_wanted(&arguments.only, part);
    let out = tempfile::tempdir()?;
    let library = program::library(arguments.library.as_deref(), out.path())?;
    let is_arbiter = wanted("work") || wanted("policies");
    let idle = if wanted("cpu") || is_arbiter { Some(cpu(arguments, &library)?) } else { None };
    let arbiter = |what: &str, costs: f64| {
        let name = format!("arbiter_cpu_{}_gpus_{}_shares_{what}_percent", arguments.gpus, arguments.shares);
        most(&name, costs - idle.unwrap_or_default(), 2.0, "percent");
    };
    if wanted("work") {
        let each = Compute { cores: CORES, ceiling: CORES, ..Compute::default() };
        arbiter("working", work(arguments, &library, "working", |_| (each, SHAPE))?);
    }
    if wanted("policies") {
        arbiter("by_policies", work(arguments, &library, "by_policies", by_policies)?);
    }
    if wanted("dead") {
        dead(arguments, &library)?;
    }
    Ok(())
}

/// The programs.
const HOLDER: &str = "bench";
const WORKER: &str = "compute";

/// A node with the programs on it.
struct World {
    node: Node,
    library: PathBuf,
}

impl World {
    fn up(gpus: usize, library: &Path) -> Result<Self> {
        let node = Node::up_in(&format!("{gpus}xL4"), Path::new(MEMORY))?;
        for program in [HOLDER, WORKER] {
            programs::compile(&[&format!("{program}.c")], &node.programs().join(program), &["-ldl"])?;
        }
        Ok(Self { node, library: library.to_owned() })
    }

    /// A container that has a share of a GPU and sees no other.
    fn container(&self, share: &Share, slot: usize) -> Result<Container> {
        let environment = vec![("CUDA_VISIBLE_DEVICES".to_owned(), slot.to_string()), program::jitter()];
        let (library, shares) = (Some(self.library.clone()), vec![share.clone()]);
        Container::start(&self.node, &Recipe { shares, library, environment, ..Recipe::default() })
    }

    /// All the shares that were asked for, with their number on their GPU.
    fn containers(
        &self,
        arguments: &Arguments,
        of: impl Fn(usize) -> Compute,
    ) -> Result<Vec<(usize, Container)>> {
        let all =
            (0..arguments.gpus).flat_map(|slot| (0..arguments.shares).map(move |number| (slot, number)));
        all.map(|(slot, number)| {
            let claim = format!("claim-{slot}-{number}");
            let share = self.node.share_of(slot, &claim, "0", LIMIT, of(number))?;
            Ok((number, self.container(&share, slot)?))
        })
        .collect()
    }

    /// A program that takes so much and stays.
    fn hold(&self, container: &Container, mib: u64) -> Result<Program> {
        let mut command = container.command(&self.node.programs().join(HOLDER));
        command.args(["hold", &mib.to_string()]);
        Program::start(command)
    }

    /// A program that works for so long when it is told to.
    fn worker(&self, container: &Container, shape: &str, time: Duration) -> Result<Program> {
        let mut command = container.command(&self.node.programs().join(WORKER));
        command.args(["run", shape, "0", &time.as_millis().to_string()]);
        let mut worker = Program::start(command)?;
        ensure!(program::hear(&mut worker.said)? == "ready\n", "a program has ended");
        Ok(worker)
    }
}

/// It ends with its container.
struct Program {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Program {
    fn start(command: Command) -> Result<Self> {
        let mut child = program::start(command)?;
        let said = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(Self { child, said })
    }

    /// Has it begin.
    fn go(&mut self) -> Result<()> {
        self.child.stdin.as_mut().context("no input")?.write_all(b"\n").context("a program has ended")
    }

    /// What it says next of that name.
    fn says(&mut self, name: &str) -> Result<f64> {
        loop {
            let line = program::hear(&mut self.said)?;
            let (what, value) = line.trim_end().split_once(' ').context("the program has ended")?;
            if what == name {
                return Ok(value.parse()?);
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Killed with its container, or about to be.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Per cent of one core, beside tenants that hold memory and do nothing.
fn cpu(arguments: &Arguments, library: &Path) -> Result<f64> {
    let world = World::up(arguments.gpus, library)?;
    let watch = Watch::start(&world.node)?;
    costs("agent_cpu_without_shares", arguments)?;
    let mut tenants = Vec::new();
    for (number, container) in world.containers(arguments, |_| Compute::default())? {
        let mut holder = world.hold(&container, HELD_MIB)?;
        holder.says("held").with_context(|| format!("share {number} of a GPU"))?;
        tenants.push((container, holder));
    }
    let costs = has_cost("idle", arguments)?;
    is_content(&watch)?;
    Ok(costs)
}

/// Of each GPU's shares by their number: one precedes the others in bursts, one has a guarantee and borrows, one works in
/// bursts of what it lends, and the others divide the rest by weight.
fn by_policies(number: usize) -> (Compute, &'static str) {
    let weight = 100 * (number as u32 + 1);
    match number {
        0 => (Compute { priority: 1, ..Compute::default() }, BURSTS),
        1 => (Compute { cores: 10, ceiling: 100, ..Compute::default() }, SHAPE),
        2 => (Compute { cores: 20, ..Compute::default() }, BURSTS),
        _ => (Compute { weight, ..Compute::default() }, SHAPE),
    }
}

/// The same beside tenants that launch all they can, or in bursts; `of` says of each of a GPU's shares what it is promised and
/// what it launches.
fn work(
    arguments: &Arguments,
    library: &Path,
    what: &str,
    of: impl Fn(usize) -> (Compute, &'static str),
) -> Result<f64> {
    let world = World::up(arguments.gpus, library)?;
    let watch = Watch::start(&world.node)?;
    let time = SETTLED + Duration::from_secs(arguments.window) * (arguments.rounds + 1);
    let mut tenants = Vec::new();
    for (number, container) in world.containers(arguments, |number| of(number).0)? {
        let worker = world.worker(&container, of(number).1, time)?;
        tenants.push((container, worker));
    }
    tenants.iter_mut().try_for_each(|(_, worker)| worker.go())?;
    let costs = has_cost(what, arguments)?;
    let mut has_ended = tenants.iter_mut().map(|(_, worker)| worker.child.try_wait());
    ensure!(has_ended.all(|ended| matches!(ended, Ok(None))), "a program has ended too soon");
    is_content(&watch)?;
    Ok(costs)
}

/// Measures windows: what they cost at the median.
fn has_cost(what: &str, arguments: &Arguments) -> Result<f64> {
    let name = format!("agent_cpu_{}_gpus_{}_shares_{what}", arguments.gpus, arguments.shares);
    let costs = median(&costs(&name, arguments)?);
    bar(&format!("{name}_percent"), costs, 2.0, "percent");
    Ok(costs)
}

/// What windows cost, in per cent of a core.
fn costs(name: &str, arguments: &Arguments) -> Result<Vec<f64>> {
    std::thread::sleep(SETTLED);
    let window = Duration::from_secs(arguments.window);
    let rounds: Vec<(f64, f64)> =
        (0..arguments.rounds).map(|_| share_of_a_core(window)).collect::<Result<_>>()?;
    let (own, events): (Vec<f64>, Vec<f64>) = rounds.into_iter().unzip();
    figure(&format!("{name}_percent"), &own, "percent");
    figure(&format!("{name}_simulated_events_percent"), &events, "percent");
    Ok(own)
}

fn is_content(watch: &Watch) -> Result<()> {
    let told = watch.until(Instant::now(), |_| true);
    ensure!(told.is_empty(), "the agent finds fault with honest programs: {told:?}");
    Ok(())
}

/// What this process takes of a core, and what its wait for events takes of one.
fn share_of_a_core(window: Duration) -> Result<(f64, f64)> {
    let (begun, before, events_before) = (Instant::now(), ticks()? / TICKS, of_events()?);
    std::thread::sleep(window);
    let (all, events) = (ticks()? / TICKS - before, of_events()? - events_before);
    let per_cent = |seconds: f64| seconds / begun.elapsed().as_secs_f64() * 100.0;
    Ok((per_cent(all - events), per_cent(events)))
}

/// CPU time in seconds of the threads that wait for events.
fn of_events() -> Result<f64> {
    let mut nanoseconds = 0.0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        // A thread may end meanwhile; these do not.
        let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        if name.trim_end() == EVENTS {
            let spent = std::fs::read_to_string(task.join("schedstat"))?;
            nanoseconds += spent.split(' ').next().context("no time")?.parse::<f64>()?;
        }
    }
    Ok(nanoseconds / 1e9)
}

/// CPU time of this process: fields 14 and 15.
fn ticks() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let numbers = fields.split_ascii_whitespace().skip(11).take(2);
    Ok(numbers.map(str::parse::<f64>).sum::<Result<f64, _>>()?)
}

/// A container dies with all it had of a claim; how long until another one of the claim, which cannot see its
/// processes, can have that.
fn dead(arguments: &Arguments, library: &Path) -> Result<()> {
    let world = World::up(1, library)?;
    let share = world.node.share_of(0, "claim-0", "0", LIMIT, Compute::default())?;
    // When one died, and one that waits for what it had.
    let inherit = |wait: Duration| -> Result<(f64, Program, Container)> {
        let (container, heir) = (world.container(&share, 0)?, world.container(&share, 0)?);
        let mut holder = world.hold(&container, MOST_MIB)?;
        holder.says("held")?;
        let mut waiter = world.hold(&heir, MOST_MIB)?;
        waiter.says("waiting")?;
        std::thread::sleep(wait);
        let begun = ledger::now();
        drop(container);
        Ok((begun as f64, waiter, heir))
    };
    let (begun, mut waiter, heir) = inherit(Duration::ZERO)?;
    std::thread::sleep(IN_VAIN);
    let watch = Watch::start(&world.node)?;
    let without = (waiter.says("held")? - begun) / 1e6;
    ensure!(
        without >= IN_VAIN.as_secs_f64() * 1e3,
        "what was dead was free after {without} ms without an agent"
    );
    drop((heir, waiter));
    let mut took = Vec::new();
    for round in 0..arguments.rounds {
        let (begun, mut waiter, _heir) = inherit(AUDIT * round / arguments.rounds)?;
        took.push((waiter.says("held")? - begun) / 1e6);
    }
    figure("dead_container_to_whole_limit_ms", &took, "ms");
    most("dead_container_to_whole_limit_worst_ms", percentile(&took, 1.0), 2000.0, "ms");
    drop(watch);
    Ok(())
}
