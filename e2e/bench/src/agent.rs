//! `divvy-bench agent`: CPU time of the node's agent, and how soon it releases the memory of a dead
//! container.
//!
//! The agent runs in this process, which does nothing else meanwhile: its CPU time is that of the
//! process, without the thread that waits for GPU events. That thread is reported separately,
//! because the simulated NVML polls and a real one does not. Time inside NVML counts as the
//! agent's. Tenants are CUDA programs (`e2e/escape/programs`), each in a container with the library
//! and a share.

use crate::stats::{at_most, figure, median, percentile, upper_bound};
use crate::{artifacts, program};
use anyhow::{Context, Result, ensure};
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{Compute, MIB, Node, Share};
use divvy_escape::programs;
use divvy_escape::watch::Watch;
use divvy_sim::usage;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command};
use std::time::{Duration, Instant};

/// Parent directory of the node: as on a real node, the share's pages are in memory.
const MEMORY_DIR: &str = "/dev/shm";
/// Memory limit of a share.
const LIMIT_BYTES: u64 = 2048 * MIB;
/// Memory that an idle program holds.
const HELD_MIB: u64 = 256;
/// More than half of the limit without two contexts, so that two programs cannot hold it at once.
const EXCLUSIVE_MIB: u64 = 1200;
/// The agent's audit interval. Each round kills at another point of it.
const AUDIT_INTERVAL: Duration = Duration::from_secs(1);
/// How long a program waits for memory without an agent, which must be in vain.
const WAIT_WITHOUT_AGENT: Duration = Duration::from_secs(4);
/// Kernels that a busy tenant launches.
const STEADY_KERNELS: &str = "1ms";
/// Five kernels in a row, and a pause ten times as long.
const BURST_KERNELS: &str = "bursts";
/// Compute share of a busy tenant: an eighth of the GPU, for the default of eight shares.
const BUSY_PERCENT: u32 = 12;
/// Bound of the agent's CPU time, in per cent of a core.
const CPU_MAX_PERCENT: f64 = 2.0;
/// Bound of the time from the death of a container to the full limit: the agent audits once a second.
const RELEASE_MAX_MS: f64 = 2000.0;
/// Time after which one-time work is done.
const WARM_UP: Duration = Duration::from_secs(3);
/// Clock ticks of `/proc/self/stat`.
const TICKS_PER_SECOND: f64 = 100.0;
/// Name of the thread that waits for GPU events.
const EVENT_THREAD: &str = "nvml-events";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Preload this library instead of building the one that the image ships
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Number of GPUs
    #[arg(long, default_value_t = 8)]
    gpus: usize,
    /// Number of shares per GPU, with one process each
    #[arg(long, default_value_t = 8)]
    shares: usize,
    /// Length of a window over which the agent's CPU time is measured, in s
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    window: u64,
    /// Number of windows, and of dying containers
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Run only these parts
    #[arg(long, value_delimiter = ',', value_parser = ["idle", "busy", "policies", "dead-container"])]
    only: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let selected = |part: &str| program::is_selected(&arguments.only, part);
    let out = tempfile::tempdir()?;
    let library = artifacts::interposer(arguments.library.as_deref(), out.path())?;
    let is_busy = selected("busy") || selected("policies");
    let idle = if selected("idle") || is_busy { Some(idle_cpu(arguments, &library)?) } else { None };
    // The scheduler's part is what busy tenants add to idle ones, since the audits run in both
    // cases. It is rather an overestimate: with busy tenants the audits find less in the caches.
    let scheduler = |what: &str, percent: f64| {
        let name =
            format!("scheduler_cpu_{}_gpus_{}_shares_{what}_percent", arguments.gpus, arguments.shares);
        at_most(&name, percent - idle.unwrap_or_default(), CPU_MAX_PERCENT, "percent");
    };
    if selected("busy") {
        let each = Compute { cores: BUSY_PERCENT, ceiling: BUSY_PERCENT, ..Compute::default() };
        scheduler("busy", busy_cpu(arguments, &library, "busy", |_| (each, STEADY_KERNELS))?);
    }
    if selected("policies") {
        scheduler("policies", busy_cpu(arguments, &library, "policies", mixed_policies)?);
    }
    if selected("dead-container") {
        dead_container(arguments, &library)?;
    }
    Ok(())
}

/// Program that holds memory.
const HOLDER: &str = "bench";
/// Program that launches kernels.
const WORKER: &str = "compute";

/// A simulated node with the programs on it.
struct AgentNode {
    node: Node,
    library: PathBuf,
}

impl AgentNode {
    fn start(gpus: usize, library: &Path) -> Result<Self> {
        let node = Node::up_in(&format!("{gpus}xL4"), Path::new(MEMORY_DIR))?;
        for program in [HOLDER, WORKER] {
            programs::compile(&[&format!("{program}.c")], &node.programs().join(program), &["-ldl"])?;
        }
        Ok(Self { node, library: library.to_owned() })
    }

    /// Starts a container with a share of a GPU, which sees only this GPU.
    fn container(&self, share: &Share, slot: usize) -> Result<Container> {
        let environment = vec![("CUDA_VISIBLE_DEVICES".to_owned(), slot.to_string()), program::jitter()];
        let (library, shares) = (Some(self.library.clone()), vec![share.clone()]);
        Container::start(&self.node, &Recipe { shares, library, environment, ..Recipe::default() })
    }

    /// Starts a container for each share of each GPU. `compute` returns the policy for the number
    /// of a share on its GPU. Returns this number with each container.
    fn containers(
        &self,
        arguments: &Arguments,
        compute: impl Fn(usize) -> Compute,
    ) -> Result<Vec<(usize, Container)>> {
        let all =
            (0..arguments.gpus).flat_map(|slot| (0..arguments.shares).map(move |number| (slot, number)));
        all.map(|(slot, number)| {
            let claim = format!("claim-{slot}-{number}");
            let share = self.node.share_of(slot, &claim, "0", LIMIT_BYTES, compute(number))?;
            Ok((number, self.container(&share, slot)?))
        })
        .collect()
    }

    /// Starts a program that allocates memory and keeps it.
    fn start_holder(&self, container: &Container, mib: u64) -> Result<Program> {
        let mut command = container.command(&self.node.programs().join(HOLDER));
        command.args(["hold", &mib.to_string()]);
        Program::start(command)
    }

    /// Starts a program that launches kernels for `time` after [`Program::begin`].
    fn start_worker(&self, container: &Container, kernels: &str, time: Duration) -> Result<Program> {
        let mut command = container.command(&self.node.programs().join(WORKER));
        command.args(["run", kernels, "0", &time.as_millis().to_string()]);
        let mut worker = Program::start(command)?;
        ensure!(program::read_line(&mut worker.stdout)? == "ready\n", "a program exited");
        Ok(worker)
    }
}

/// A running program. It is killed with its container.
struct Program {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Program {
    fn start(command: Command) -> Result<Self> {
        let mut child = program::spawn_piped(command)?;
        let stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(Self { child, stdout })
    }

    /// Starts its work.
    fn begin(&mut self) -> Result<()> {
        self.child.stdin.as_mut().context("no input")?.write_all(b"\n").context("a program exited")
    }

    /// Reads its output up to the next value of that name.
    fn wait_for(&mut self, name: &str) -> Result<f64> {
        loop {
            let line = program::read_line(&mut self.stdout)?;
            let (found, value) = line.trim_end().split_once(' ').context("the program exited")?;
            if found == name {
                return Ok(value.parse()?);
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Its container kills it as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The agent's CPU time while tenants hold memory and do nothing, in per cent of a core.
fn idle_cpu(arguments: &Arguments, library: &Path) -> Result<f64> {
    let node = AgentNode::start(arguments.gpus, library)?;
    let watch = Watch::start(&node.node)?;
    measure_windows("agent_cpu_without_shares", arguments)?;
    let mut tenants = Vec::new();
    for (number, container) in node.containers(arguments, |_| Compute::default())? {
        let mut holder = node.start_holder(&container, HELD_MIB)?;
        holder.wait_for("held").with_context(|| format!("share {number} of a GPU"))?;
        tenants.push((container, holder));
    }
    let percent = measure_cpu("idle", arguments)?;
    expect_no_findings(&watch)?;
    Ok(percent)
}

/// Policy and kernels by the number of the share on its GPU.
///
/// One share has high priority and runs in bursts, one has a guarantee and borrows time, one lends
/// its time between bursts, and the others divide the rest by weight.
fn mixed_policies(number: usize) -> (Compute, &'static str) {
    let weight = 100 * (number as u32 + 1);
    match number {
        0 => (Compute { priority: 1, ..Compute::default() }, BURST_KERNELS),
        1 => (Compute { cores: 10, ceiling: 100, ..Compute::default() }, STEADY_KERNELS),
        2 => (Compute { cores: 20, ..Compute::default() }, BURST_KERNELS),
        _ => (Compute { weight, ..Compute::default() }, STEADY_KERNELS),
    }
}

/// The agent's CPU time while tenants launch kernels, in per cent of a core. `tenant` returns
/// policy and kernels by the number of the share on its GPU.
fn busy_cpu(
    arguments: &Arguments,
    library: &Path,
    what: &str,
    tenant: impl Fn(usize) -> (Compute, &'static str),
) -> Result<f64> {
    let node = AgentNode::start(arguments.gpus, library)?;
    let watch = Watch::start(&node.node)?;
    let time = WARM_UP + Duration::from_secs(arguments.window) * (arguments.rounds + 1);
    let mut tenants = Vec::new();
    for (number, container) in node.containers(arguments, |number| tenant(number).0)? {
        let worker = node.start_worker(&container, tenant(number).1, time)?;
        tenants.push((container, worker));
    }
    tenants.iter_mut().try_for_each(|(_, worker)| worker.begin())?;
    let percent = measure_cpu(what, arguments)?;
    let mut exits = tenants.iter_mut().map(|(_, worker)| worker.child.try_wait());
    ensure!(exits.all(|exit| matches!(exit, Ok(None))), "a program exited too soon");
    expect_no_findings(&watch)?;
    Ok(percent)
}

/// Measures and prints the CPU time over several windows. Returns the median, in per cent of a core.
fn measure_cpu(what: &str, arguments: &Arguments) -> Result<f64> {
    let name = format!("agent_cpu_{}_gpus_{}_shares_{what}", arguments.gpus, arguments.shares);
    let percent = median(&measure_windows(&name, arguments)?);
    upper_bound(&format!("{name}_percent"), percent, CPU_MAX_PERCENT, "percent");
    Ok(percent)
}

/// Measures and prints windows, in per cent of a core. Returns the time without the event thread.
fn measure_windows(name: &str, arguments: &Arguments) -> Result<Vec<f64>> {
    std::thread::sleep(WARM_UP);
    let window = Duration::from_secs(arguments.window);
    let rounds: Vec<(f64, f64)> =
        (0..arguments.rounds).map(|_| measure_window(window)).collect::<Result<_>>()?;
    let (own, events): (Vec<f64>, Vec<f64>) = rounds.into_iter().unzip();
    figure(&format!("{name}_percent"), &own, "percent");
    figure(&format!("{name}_simulated_events_percent"), &events, "percent");
    Ok(own)
}

/// Fails if the agent reported any tenant: all of them keep their limits.
fn expect_no_findings(watch: &Watch) -> Result<()> {
    let findings = watch.until(Instant::now(), |_| true);
    ensure!(findings.is_empty(), "false positives of the agent: {findings:?}");
    Ok(())
}

/// CPU time over a window: of this process without the event thread, and of the event thread. In
/// per cent of a core.
fn measure_window(window: Duration) -> Result<(f64, f64)> {
    let (begun, before, events_before) =
        (Instant::now(), process_ticks()? / TICKS_PER_SECOND, event_thread_seconds()?);
    std::thread::sleep(window);
    let all = process_ticks()? / TICKS_PER_SECOND - before;
    let events = event_thread_seconds()? - events_before;
    let percent = |seconds: f64| seconds / begun.elapsed().as_secs_f64() * 100.0;
    Ok((percent(all - events), percent(events)))
}

/// CPU time of the event threads, in seconds.
fn event_thread_seconds() -> Result<f64> {
    let mut nanoseconds = 0.0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        // Other threads may exit meanwhile; the event threads do not.
        let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        if name.trim_end() == EVENT_THREAD {
            let spent = std::fs::read_to_string(task.join("schedstat"))?;
            nanoseconds += spent.split(' ').next().context("no time")?.parse::<f64>()?;
        }
    }
    Ok(nanoseconds / 1e9)
}

/// CPU time of this process in clock ticks: fields 14 and 15 of `/proc/self/stat`.
fn process_ticks() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let numbers = fields.split_ascii_whitespace().skip(11).take(2);
    Ok(numbers.map(str::parse::<f64>).sum::<Result<f64, _>>()?)
}

/// Time from the death of a container to the moment when another container of the same claim can
/// allocate its memory.
///
/// The second container cannot see the processes of the first, so that only the agent can release
/// their memory.
fn dead_container(arguments: &Arguments, library: &Path) -> Result<()> {
    let node = AgentNode::start(1, library)?;
    let share = node.node.share_of(0, "claim-0", "0", LIMIT_BYTES, Compute::default())?;
    // Returns the time of death, and the program and container that wait for the memory.
    let kill_holder = |wait: Duration| -> Result<(f64, Program, Container)> {
        let (container, second) = (node.container(&share, 0)?, node.container(&share, 0)?);
        let mut holder = node.start_holder(&container, EXCLUSIVE_MIB)?;
        holder.wait_for("held")?;
        let mut waiter = node.start_holder(&second, EXCLUSIVE_MIB)?;
        waiter.wait_for("waiting")?;
        std::thread::sleep(wait);
        let begun = usage::now();
        drop(container);
        Ok((begun as f64, waiter, second))
    };
    let (begun, mut waiter, second) = kill_holder(Duration::ZERO)?;
    std::thread::sleep(WAIT_WITHOUT_AGENT);
    let watch = Watch::start(&node.node)?;
    let without = (waiter.wait_for("held")? - begun) / 1e6;
    ensure!(
        without >= WAIT_WITHOUT_AGENT.as_secs_f64() * 1e3,
        "the memory of a dead container was released after {without} ms without an agent"
    );
    drop((second, waiter));
    let mut took = Vec::new();
    for round in 0..arguments.rounds {
        let (begun, mut waiter, _second) = kill_holder(AUDIT_INTERVAL * round / arguments.rounds)?;
        took.push((waiter.wait_for("held")? - begun) / 1e6);
    }
    figure("dead_container_to_full_limit_ms", &took, "ms");
    at_most("dead_container_to_full_limit_worst_ms", percentile(&took, 1.0), RELEASE_MAX_MS, "ms");
    drop(watch);
    Ok(())
}
