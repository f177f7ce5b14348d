//! Tenants of a simulated GPU: each a program in a container, and what the ledger says that it had.

use super::cells::{Cell, UNLIMITED};
use crate::program::{self, hear};
use crate::turns;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{Compute, MIB, Node, Share};
use divvy_escape::programs;
use divvy_escape::watch::{self, Watch};
use divvy_sim::ledger::{Served, Watcher};
use rustix::process::{Pid, Signal, kill_process};
use std::cell::Cell as Counter;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// On a node pages lie in memory.
const MEMORY: &str = "/dev/shm";
const MODEL: &str = "H100-SXM5-80GB";
const AMPERE: &str = "A100-SXM4-80GB";
const LIMIT: u64 = 8192 * MIB;
/// As many tenants work at once at most.
const MOST: usize = 5;
/// Between two looks at the ledger.
const LOOK: Duration = Duration::from_millis(5);
/// Shares of windows of this length are told.
const STEP: u64 = 100_000_000;
/// A tenant has started or ended by then.
const PATIENCE: Duration = Duration::from_secs(60);
/// A tenant that left the GPU has ended by then.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Launches of a run that only launches.
const LAUNCHES: u64 = 200_000;

/// What the tenants have parts of.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum On {
    /// A whole GPU, of which NVML tells what its processes had together, as it does of an H100
    Gpu,
    /// The same, of which NVML tells what each had
    DividingGpu,
    /// A MIG instance, of which NVML tells what its processes had together
    Instance,
    /// One of an older GPU, of which it tells nothing
    AmpereInstance,
}

/// A node, and what its tenants do.
pub(crate) struct Stage {
    /// Before the node, whose pages it reads.
    agent: Option<Watch>,
    pub(crate) node: Rc<Node>,
    watcher: Rc<Watcher>,
    library: PathBuf,
    pub(crate) before: Duration,
    pub(crate) window: Duration,
    burst: Duration,
    /// Shares made so far: each run has pages of its own.
    shares: Rc<Counter<u32>>,
}

/// What a tenant got.
#[derive(Clone, Debug)]
pub(crate) struct Got {
    /// Per cent of the window, of each 100 ms of it, and of the time before it.
    pub(crate) share: f64,
    pub(crate) windows: Vec<f64>,
    pub(crate) early: f64,
    /// The longest that one launch took.
    pub(crate) stall_ns: f64,
    pub(crate) early_stall_ns: f64,
    pub(crate) launches_per_second: f64,
    /// Per cent of one core.
    pub(crate) cpu: f64,
}

/// What came of a cell.
pub(crate) struct Played {
    pub(crate) got: Vec<Got>,
    /// What the agent found fault with; nothing, as its tenants are honest.
    pub(crate) told: String,
}

/// A running program. It ends with its container.
pub(crate) struct Tenant {
    /// As the ledger has it.
    name: String,
    child: Child,
    said: BufReader<ChildStdout>,
    _container: Container,
    pages: Option<Pages>,
}

/// A share, whose claim's pages go with it.
struct Pages(Share);

impl Drop for Pages {
    fn drop(&mut self) {
        // What is left is in the directory of this run, which goes with the node.
        let _ = self.0.directory.parent().map(std::fs::remove_dir_all);
    }
}

/// When, and nanoseconds that somebody had had by then.
pub(crate) type Point = (u64, u64);

impl Stage {
    pub(crate) fn up(
        on: On,
        library: PathBuf,
        before: Duration,
        window: Duration,
        burst: Duration,
        agent: bool,
    ) -> Result<Self> {
        let parent = Path::new(MEMORY);
        let node = Rc::new(match on {
            On::Gpu => Node::up_in(MODEL, parent)?,
            On::DividingGpu => Node::dividing(MODEL, parent)?,
            On::Instance => Node::of_half(MODEL, parent)?,
            On::AmpereInstance => Node::of_half(AMPERE, parent)?,
        });
        let watcher = Rc::new(node.watcher()?);
        // A program of its own for each tenant, so that the ledger tells them apart by name.
        let first = node.programs().join(file_of(0));
        programs::compile(&["compute.c"], &first, &["-ldl"])?;
        for tenant in 1..MOST {
            std::fs::copy(&first, node.programs().join(file_of(tenant)))?;
        }
        let agent = agent.then(|| Watch::start(&node)).transpose()?;
        Ok(Self { agent, node, watcher, library, before, window, burst, shares: Rc::default() })
    }

    /// The same node for runs whose windows are so long.
    pub(crate) fn lasting(&self, window: Duration) -> Self {
        let Self { node, watcher, library, before, burst, shares, .. } = self;
        let (node, watcher, shares) = (Rc::clone(node), Rc::clone(watcher), Rc::clone(shares));
        Self {
            agent: None,
            node,
            watcher,
            library: library.clone(),
            before: *before,
            window,
            burst: *burst,
            shares,
        }
    }

    /// When the window opens of one whose points these are, and when it ends.
    pub(crate) fn opens(&self, points: &[Point]) -> (u64, u64) {
        let opens = points.first().map_or(0, |(at, _)| *at) + nanoseconds(self.before);
        (opens, opens + nanoseconds(self.window))
    }

    /// What a share of so many per cent says, of which no more is lent; none of one without a share.
    pub(crate) fn fixed(&self, request: u32) -> Result<Option<Compute>> {
        let burst_us = u64::try_from(self.burst.as_micros())?;
        let compute = Compute { cores: request, ceiling: request, burst_us, ..Compute::default() };
        Ok((request != UNLIMITED).then_some(compute))
    }

    /// The container of a tenant with such a share, and where its pages are.
    fn container(&self, compute: Option<Compute>) -> Result<(Container, Option<Pages>)> {
        let environment = vec![program::jitter()];
        let Some(compute) = compute else {
            let recipe = Recipe { environment, ..Recipe::default() };
            return Ok((Container::start(&self.node, &recipe)?, None));
        };
        let claim = format!("claim-{}", self.shares.replace(self.shares.get() + 1));
        let share = self.node.share_of(0, &claim, "0", LIMIT, compute)?;
        let (library, shares) = (Some(self.library.clone()), vec![share.clone()]);
        let recipe = Recipe { environment, library, shares, ..Recipe::default() };
        Ok((Container::start(&self.node, &recipe)?, Some(Pages(share))))
    }

    /// Nanoseconds of a launch of a kernel of no length in each turn, by the tenants with these requests.
    pub(crate) fn launches(&self, requests: [u32; 2]) -> Result<[Vec<f64>; 2]> {
        let (turns, each) = turns::of(LAUNCHES);
        let mut tenants = Vec::new();
        for request in requests {
            tenants.push(self.container(self.fixed(request)?)?);
        }
        let command = |container: &Container| {
            let mut command = container.command(&self.node.programs().join(file_of(0)));
            command.args(["turns", "launch", &each]);
            command
        };
        let took = turns::take(tenants.iter().map(|(container, _)| command(container)).collect(), turns)?;
        took.try_into().ok().context("a tenant without figures")
    }

    /// Plays a cell.
    pub(crate) fn play(&self, cell: &Cell) -> Result<Played> {
        let mut tenants = Vec::new();
        for (at, request) in cell.requests.iter().enumerate() {
            tenants.push(self.tenant(at, self.fixed(*request)?, cell.shape.name)?);
        }
        let served = self.watch(&mut tenants, |_, _| Ok(())).with_context(|| cell.name())?;
        let mut got = Vec::new();
        for (tenant, points) in tenants.into_iter().zip(served) {
            got.push(self.got(&tenant.end()?, &points)?);
        }
        Ok(Played { got, told: self.told() })
    }

    /// Lets tenants go, and looks at what each has had until all is over. `meanwhile` is called before each look with
    /// the tenants and the time since the begin.
    pub(crate) fn watch(
        &self,
        tenants: &mut [Tenant],
        mut meanwhile: impl FnMut(&[Tenant], Duration) -> Result<()>,
    ) -> Result<Vec<Vec<Point>>> {
        tenants.iter_mut().try_for_each(Tenant::ready)?;
        tenants.iter_mut().try_for_each(Tenant::go)?;
        let begin = divvy_sim::ledger::now();
        let end = begin + nanoseconds(self.before + self.window);
        let mut served = vec![vec![(begin, 0)]; tenants.len()];
        while served.iter().any(|points| points.last().is_none_or(|(at, _)| *at < end)) {
            meanwhile(tenants, Duration::from_nanos(divvy_sim::ledger::now() - begin))?;
            std::thread::sleep(LOOK);
            let now = self.watcher.served();
            for (tenant, points) in tenants.iter_mut().zip(&mut served) {
                match had(&now, &tenant.name) {
                    Some(point) => points.push(point),
                    None => bail!("{}{}", tenant.ended(), self.told()),
                }
            }
        }
        Ok(served)
    }

    /// What the agent has found, as it may have ended a tenant for it.
    fn told(&self) -> String {
        let told = self.agent.iter().flat_map(|agent| agent.until(Instant::now(), |_| true));
        told.map(|told| {
            format!("; the agent {}: {}", if told.ended { "ended it" } else { "said" }, told.text)
        })
        .collect()
    }

    /// A tenant that waits for its start; none for one without a share.
    pub(crate) fn tenant(&self, at: usize, compute: Option<Compute>, shape: &str) -> Result<Tenant> {
        let (container, pages) = self.container(compute)?;
        let name = file_of(at);
        let millis = |time: Duration| time.as_millis().to_string();
        let mut command = container.command(&self.node.programs().join(&name));
        command.args(["run", shape, &millis(self.before), &millis(self.window)]);
        let mut child = program::start(command)?;
        let said = BufReader::new(child.stdout.take().context("no output")?);
        Ok(Tenant { name, child, said, _container: container, pages })
    }

    fn got(&self, said: &str, points: &[Point]) -> Result<Got> {
        let begin = points.first().map_or(0, |(at, _)| *at);
        let (opens, ends) = self.opens(points);
        let seconds = self.window.as_secs_f64();
        let windows = (opens..ends).step_by(STEP as usize).map(|at| share(points, at, (at + STEP).min(ends)));
        Ok(Got {
            share: share(points, opens, ends),
            windows: windows.collect(),
            early: share(points, begin, opens),
            stall_ns: figure(said, "stall")?,
            early_stall_ns: figure(said, "early_stall")?,
            launches_per_second: figure(said, "launches")? / seconds,
            cpu: figure(said, "cpu")? / 1e9 / seconds * 100.0,
        })
    }
}

impl Tenant {
    fn ready(&mut self) -> Result<()> {
        if hear(&mut self.said)? == "ready\n" { Ok(()) } else { bail!("{}", self.ended()) }
    }

    fn go(&mut self) -> Result<()> {
        self.child.stdin.take().context("no input")?.write_all(b"\n").context("a tenant has ended")
    }

    /// That it does not work, and why: it has ended, as a rule.
    fn ended(&mut self) -> String {
        let deadline = Instant::now() + LAST_WORDS;
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status.to_string(),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK),
                _ => break "it runs, and is not on the GPU".to_owned(),
            }
        };
        // It is of no use any more.
        let _ = self.child.kill();
        let mut words = String::new();
        if let Some(mut wrong) = self.child.stderr.take() {
            let _ = wrong.read_to_string(&mut words);
        }
        format!("{} does not work: {status} {}", self.name, words.trim())
    }

    /// Stops its program, which the ledger knows, or has it go on.
    pub(crate) fn rest(&self, stage: &Stage, rests: bool) -> Result<()> {
        let served = stage.watcher.served();
        let found = served.iter().find(|found| found.name == self.name);
        let pid = found.map(|found| found.pid).with_context(|| format!("{} is not on the GPU", self.name))?;
        let send = |pid: u32, signal| -> Result<()> {
            Ok(kill_process(Pid::from_raw(i32::try_from(pid)?).context("no process")?, signal)?)
        };
        if rests {
            return send(pid, Signal::STOP);
        }
        // nsenter stops with its program by itself, and does not go on with it.
        send(pid, Signal::CONT)?;
        send(self.child.id(), Signal::CONT)
    }

    /// Has its share be that from now on.
    pub(crate) fn change(&self, stage: &Stage, compute: Compute) -> Result<()> {
        let share = &self.pages.as_ref().context("a tenant without a share")?.0;
        watch::change(&stage.node, share, compute)
    }

    /// What it says in the end.
    pub(crate) fn end(mut self) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait()?.is_none() {
            ensure!(Instant::now() < deadline, "{} does not end", self.name);
            std::thread::sleep(LOOK);
        }
        let mut said = String::new();
        self.said.read_to_string(&mut said)?;
        Ok(said)
    }
}

/// File name of a tenant's program, and so the name of its process.
fn file_of(tenant: usize) -> String {
    format!("compute-{tenant}")
}

fn had(served: &[Served], name: &str) -> Option<Point> {
    served.iter().find(|found| found.name == name).map(|found| (found.at, found.served))
}

/// Per cent of the time between two times, by the looks nearest to them.
pub(crate) fn share(points: &[Point], from: u64, to: u64) -> f64 {
    let nearest = |time: u64| points.iter().min_by_key(|(at, _)| at.abs_diff(time));
    match (nearest(from), nearest(to)) {
        (Some(from), Some(to)) if to.0 > from.0 => (to.1 - from.1) as f64 / (to.0 - from.0) as f64 * 100.0,
        _ => 0.0,
    }
}

pub(crate) fn figure(said: &str, name: &str) -> Result<f64> {
    let found = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    found.with_context(|| format!("the program does not say {name}"))
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_taken_between_the_looks_that_are_nearest() {
        let points = [(0, 0), (100, 30), (210, 60), (290, 100)];
        assert_eq!(share(&points, 0, 100), 30.0);
        assert_eq!(share(&points, 90, 300), 70.0 / 190.0 * 100.0);
        assert_eq!(share(&points, 300, 400), 0.0);
        assert_eq!(share(&[], 0, 100), 0.0);
    }

    #[test]
    fn a_figure_is_found_by_its_whole_name() {
        let said = "early_stall 5\nstall 7\n";
        assert_eq!((figure(said, "stall").ok(), figure(said, "early_stall").ok()), (Some(7.0), Some(5.0)));
        assert!(figure(said, "cpu").is_err());
    }
}
