//! Tenants of a simulated GPU: a program in a container each, and the GPU time that the simulator
//! accounts to it.

use super::cases::{Case, CaseTenant, UNLIMITED};
use crate::interleave;
use crate::program::{self, read_line};
use crate::stats::percentile;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{Compute, MIB, Node, Share};
use divvy_escape::programs;
use divvy_escape::watch::{self, Watch};
use divvy_sim::usage::{ProcessTime, UsageMonitor};
use rustix::process::{Pid, Signal, kill_process};
use std::cell::Cell;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Parent directory of the node: as on a real node, the share's pages are in memory.
const MEMORY_DIR: &str = "/dev/shm";
const GPU_MODEL: &str = "H100-SXM5-80GB";
const AMPERE_MODEL: &str = "A100-SXM4-80GB";
/// Memory limit of each share.
const LIMIT_BYTES: u64 = 8192 * MIB;
/// Most tenants that run at once.
const MAX_TENANTS: usize = 5;
/// Interval between two samples of the simulator's accounting.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(5);
/// Length of the short windows whose shares are reported.
const SHORT_WINDOW_NS: u64 = 100_000_000;
/// Limit for the exit of a tenant.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit for the exit of a tenant that is no longer on the GPU.
const CRASH_TIMEOUT: Duration = Duration::from_secs(1);
/// Launches per program when only the time of launches is measured.
const TIMED_LAUNCHES: u64 = 200_000;

/// The device that the tenants share.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Device {
    /// A whole GPU whose NVML reports the total usage of all processes, like an H100
    Gpu,
    /// A whole GPU whose NVML reports the usage of each process
    PerProcessGpu,
    /// A MIG instance whose NVML reports the total usage of all processes
    Mig,
    /// A MIG instance of an older GPU whose NVML reports no usage
    AmpereMig,
}

/// How to start a node.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) device: Device,
    /// The library of the tenants.
    pub(crate) library: PathBuf,
    pub(crate) times: Times,
    /// Time that a change between processes takes, in microseconds; `None` for that of the GPU model.
    pub(crate) switch_us: Option<u32>,
    /// Number of GPUs.
    pub(crate) gpus: u32,
}

/// The times of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Time that tenants run before the window.
    pub(crate) warm_up: Duration,
    pub(crate) window: Duration,
    /// GPU time that a share may save up while it is idle.
    pub(crate) burst: Duration,
}

/// A simulated node on which tenants run.
pub(crate) struct ComputeNode {
    /// Declared before `node`, so that it is dropped first: it reads the node's pages.
    agent: Option<Watch>,
    pub(crate) node: Rc<Node>,
    watcher: Rc<UsageMonitor>,
    library: PathBuf,
    pub(crate) times: Times,
    /// Number of shares so far. It names the claims, so that each run has new pages.
    share_count: Rc<Cell<u32>>,
}

/// The measurements of a tenant.
#[derive(Clone, Debug)]
pub(crate) struct TenantResult {
    /// GPU time, in per cent of the window.
    pub(crate) share: f64,
    /// GPU time in each 100 ms of the window, in per cent.
    pub(crate) shares_100ms: Vec<f64>,
    /// GPU time, in per cent of the warm-up.
    pub(crate) warm_up_share: f64,
    /// Duration of the longest launch in the window.
    pub(crate) stall_ns: f64,
    /// Duration of the longest launch in the warm-up.
    pub(crate) warm_up_stall_ns: f64,
    pub(crate) launches_per_second: f64,
    /// CPU time, in per cent of a core.
    pub(crate) cpu: f64,
    /// Durations of the bursts of a program that runs in bursts.
    pub(crate) bursts: Option<Bursts>,
}

/// Durations of bursts, from the first launch to the end of the work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bursts {
    pub(crate) count: f64,
    pub(crate) p50_ns: f64,
    pub(crate) p99_ns: f64,
}

impl Bursts {
    /// The bursts that a program has printed, if any.
    pub(crate) fn printed(printed: &str) -> Option<Self> {
        let value = |name| printed_value(printed, name).ok();
        Some(Self { count: value("bursts")?, p50_ns: value("burst_p50")?, p99_ns: value("burst_p99")? })
    }
}

/// The results of a case.
pub(crate) struct CaseResult {
    pub(crate) tenants: Vec<TenantResult>,
    /// Findings of the agent. All of them are false positives, since the tenants keep their limits.
    pub(crate) findings: String,
}

/// The running programs of a tenant. They are killed with their container.
pub(crate) struct Tenant {
    /// Name of its processes in the simulator's accounting.
    name: String,
    programs: Vec<Program>,
    gpus: usize,
    /// Whether its processes start and exit all the time. At most one tenant of a run can do so,
    /// since its GPU time is that of the GPU without that of the other tenants.
    transient: bool,
    _container: Container,
    pages: Vec<Pages>,
}

struct Program {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

/// The programs and shares of a tenant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start<'a> {
    pub(crate) compute: Option<Compute>,
    /// Name of the kernel shape.
    pub(crate) shape: &'a str,
    pub(crate) processes: usize,
    /// Number of GPUs, with a share of each.
    pub(crate) gpus: usize,
    pub(crate) transient: bool,
}

/// A share. Dropping it removes the directory of its claim.
struct Pages(Share);

impl Drop for Pages {
    fn drop(&mut self) {
        // After a failure the files are removed with the node's directory.
        let _ = self.0.directory.parent().map(std::fs::remove_dir_all);
    }
}

/// A time, and the GPU time of a tenant up to it; both in nanoseconds.
pub(crate) type Sample = (u64, u64);

impl ComputeNode {
    pub(crate) fn start(setup: &Setup, agent: bool) -> Result<Self> {
        let Setup { device, library, times, switch_us, gpus } = setup.clone();
        let model = if let Device::AmpereMig = device { AMPERE_MODEL } else { GPU_MODEL };
        let node = Node::up_with(&format!("{gpus}x{model}"), Path::new(MEMORY_DIR), |options| {
            options.host.divides_samples = matches!(device, Device::PerProcessGpu);
            options.host.switch_us = switch_us;
        })?;
        let node = Rc::new(match device {
            Device::Mig | Device::AmpereMig => node.with_half_instance()?,
            Device::Gpu | Device::PerProcessGpu => node,
        });
        let watcher = Rc::new(node.watcher()?);
        // Each tenant has a copy of the program, so that the simulator's accounting has a name for each.
        let first = node.programs().join(file_of(0));
        programs::compile(&["compute.c"], &first, &["-ldl"])?;
        for tenant in 1..MAX_TENANTS {
            std::fs::copy(&first, node.programs().join(file_of(tenant)))?;
        }
        let agent = agent.then(|| Watch::start(&node)).transpose()?;
        Ok(Self { agent, node, watcher, library, times, share_count: Rc::default() })
    }

    /// The same node for runs with another window.
    pub(crate) fn with_window(&self, window: Duration) -> Self {
        let Self { node, watcher, library, times, share_count, .. } = self;
        Self {
            agent: None,
            node: Rc::clone(node),
            watcher: Rc::clone(watcher),
            library: library.clone(),
            times: Times { window, ..*times },
            share_count: Rc::clone(share_count),
        }
    }

    /// Start and end of the window of a tenant with these samples, in nanoseconds.
    pub(crate) fn window_of(&self, samples: &[Sample]) -> (u64, u64) {
        let start = samples.first().map_or(0, |(at, _)| *at) + nanoseconds(self.times.warm_up);
        (start, start + nanoseconds(self.times.window))
    }

    /// The policy of a share with this request, in per cent, as both guarantee and ceiling; `None`
    /// for [`UNLIMITED`].
    pub(crate) fn fixed_policy(&self, request: u32) -> Result<Option<Compute>> {
        let burst_us = u64::try_from(self.times.burst.as_micros())?;
        let compute = Compute { cores: request, ceiling: request, burst_us, ..Compute::default() };
        Ok((request != UNLIMITED).then_some(compute))
    }

    /// Starts the container of a tenant, with a share if `compute` is given.
    fn start_container(&self, compute: Option<Compute>, gpus: usize) -> Result<(Container, Vec<Pages>)> {
        let environment = vec![program::jitter()];
        let Some(compute) = compute else {
            let recipe = Recipe { environment, ..Recipe::default() };
            return Ok((Container::start(&self.node, &recipe)?, Vec::new()));
        };
        let claim = format!("claim-{}", self.share_count.replace(self.share_count.get() + 1));
        let share = |slot: usize| self.node.share_of(slot, &claim, &slot.to_string(), LIMIT_BYTES, compute);
        let shares = (0..gpus).map(share).collect::<Result<Vec<Share>>>()?;
        let (library, pages) = (Some(self.library.clone()), shares.iter().cloned().map(Pages).collect());
        let recipe = Recipe { environment, library, shares, ..Recipe::default() };
        Ok((Container::start(&self.node, &recipe)?, pages))
    }

    /// Duration of launching an empty kernel in each turn, in nanoseconds, for two tenants with
    /// these requests.
    pub(crate) fn launch_times(&self, requests: [u32; 2]) -> Result<[Vec<f64>; 2]> {
        let (turns, each) = interleave::split(TIMED_LAUNCHES);
        let mut tenants = Vec::new();
        for request in requests {
            tenants.push(self.start_container(self.fixed_policy(request)?, 1)?);
        }
        let command = |container: &Container| {
            let mut command = container.command(&self.node.programs().join(file_of(0)));
            command.args(["turns", "launch", &each]);
            command
        };
        let commands = tenants.iter().map(|(container, _)| command(container)).collect();
        interleave::run(commands, turns)?.try_into().ok().context("a tenant without figures")
    }

    /// Runs a case.
    pub(crate) fn run(&self, case: &Case) -> Result<CaseResult> {
        let mut tenants = Vec::new();
        for (at, CaseTenant { shape, request, processes }) in case.tenants.iter().enumerate() {
            let name = shape.name.to_string();
            let start = Start::of(self.fixed_policy(*request)?, &name);
            tenants.push(self.start_programs(at, Start { processes: *processes, ..start })?);
        }
        let samples = self.sample(&mut tenants, |_, _| Ok(())).with_context(|| case.name())?;
        let mut results = Vec::new();
        for (tenant, samples) in tenants.into_iter().zip(samples) {
            results.push(self.result(&tenant.finish()?, &samples)?);
        }
        Ok(CaseResult { tenants: results, findings: self.findings() })
    }

    /// Starts the tenants' work and samples their GPU time until the end of the window. Calls
    /// `meanwhile` before each sample, with the tenants and the time since the start.
    pub(crate) fn sample(
        &self,
        tenants: &mut [Tenant],
        mut meanwhile: impl FnMut(&[Tenant], Duration) -> Result<()>,
    ) -> Result<Vec<Vec<Sample>>> {
        tenants.iter_mut().try_for_each(Tenant::wait_ready)?;
        // The programs have not used the GPU yet.
        let served_ns_before = self.watcher.times(self.node.place()).context("no GPU")?.served_ns;
        tenants.iter_mut().try_for_each(Tenant::begin)?;
        let begin = divvy_sim::usage::now();
        let end = begin + nanoseconds(self.times.warm_up + self.times.window);
        let mut samples = vec![vec![(begin, 0)]; tenants.len()];
        while samples.iter().any(|samples| samples.last().is_none_or(|(at, _)| *at < end)) {
            meanwhile(tenants, Duration::from_nanos(divvy_sim::usage::now() - begin))?;
            std::thread::sleep(SAMPLE_INTERVAL);
            let now = self.watcher.process_times();
            let times = self.watcher.times(self.node.place()).context("no GPU")?;
            let mut others = 0;
            let mut transient = None;
            for (at, (tenant, samples)) in tenants.iter_mut().zip(&mut samples).enumerate() {
                if tenant.transient {
                    transient = Some(at);
                    continue;
                }
                let Some(sample) = sample_of(&now, tenant) else {
                    bail!("{}{}", tenant.failure(), self.findings())
                };
                others += sample.1;
                samples.push(sample);
            }
            if let Some(samples) = transient.and_then(|at| samples.get_mut(at)) {
                samples.push((times.at, (times.served_ns - served_ns_before).saturating_sub(others)));
            }
        }
        Ok(samples)
    }

    /// Findings of the agent so far. It may have killed a tenant.
    pub(crate) fn findings(&self) -> String {
        let findings = self.agent.iter().flat_map(|agent| agent.until(Instant::now(), |_| true));
        findings
            .map(|finding| {
                let action = if finding.killed { "killed a process" } else { "reported" };
                format!("; the agent {action}: {}", finding.text)
            })
            .collect()
    }

    /// Starts a tenant, which waits until [`Self::sample`]. Without `compute` it has no share.
    pub(crate) fn start_tenant(&self, at: usize, compute: Option<Compute>, shape: &str) -> Result<Tenant> {
        self.start_programs(at, Start::of(compute, shape))
    }

    /// The same for tenants of other kinds.
    pub(crate) fn start_programs(&self, at: usize, start: Start<'_>) -> Result<Tenant> {
        let Start { compute, shape, processes, gpus, transient } = start;
        let (container, pages) = self.start_container(compute, gpus)?;
        let name = file_of(at);
        let millis = |time: Duration| time.as_millis().to_string();
        let mut programs = Vec::new();
        for _ in 0..processes {
            let mut command = container.command(&self.node.programs().join(&name));
            command.args(["run", shape, &millis(self.times.warm_up), &millis(self.times.window)]);
            let mut child = program::spawn_piped(command)?;
            let stdout = BufReader::new(child.stdout.take().context("no output")?);
            programs.push(Program { child, stdout });
        }
        Ok(Tenant { name, programs, gpus, transient, _container: container, pages })
    }

    fn result(&self, printed: &[String], samples: &[Sample]) -> Result<TenantResult> {
        let begin = samples.first().map_or(0, |(at, _)| *at);
        let (start, end) = self.window_of(samples);
        let seconds = self.times.window.as_secs_f64();
        let short_windows = (start..end).step_by(SHORT_WINDOW_NS as usize);
        let all = |name: &str| {
            printed.iter().map(|printed| printed_value(printed, name)).collect::<Result<Vec<f64>>>()
        };
        let short_share = |at: u64| share(samples, at, (at + SHORT_WINDOW_NS).min(end));
        Ok(TenantResult {
            share: share(samples, start, end),
            shares_100ms: short_windows.map(short_share).collect(),
            warm_up_share: share(samples, begin, start),
            stall_ns: percentile(&all("stall")?, 1.0),
            warm_up_stall_ns: percentile(&all("early_stall")?, 1.0),
            launches_per_second: all("launches")?.iter().sum::<f64>() / seconds,
            cpu: all("cpu")?.iter().sum::<f64>() / 1e9 / seconds * 100.0,
            bursts: printed.first().and_then(|printed| Bursts::printed(printed)),
        })
    }
}

impl<'a> Start<'a> {
    /// One program on one GPU.
    pub(crate) fn of(compute: Option<Compute>, shape: &'a str) -> Self {
        Self { compute, shape, processes: 1, gpus: 1, transient: false }
    }
}

impl Tenant {
    fn wait_ready(&mut self) -> Result<()> {
        for at in 0..self.programs.len() {
            if read_line(&mut self.programs[at].stdout)? != "ready\n" {
                bail!("{}", self.failure());
            }
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<()> {
        let begin = |program: &mut Program| {
            program.child.stdin.take().context("no input")?.write_all(b"\n").context("a tenant exited")
        };
        self.programs.iter_mut().try_for_each(begin)
    }

    /// Kills the tenant and returns an error message with its exit status and standard error.
    fn failure(&mut self) -> String {
        let deadline = Instant::now() + CRASH_TIMEOUT;
        let status = loop {
            let exited = self.programs.iter_mut().find_map(|program| program.child.try_wait().ok()?);
            match exited {
                Some(status) => break status.to_string(),
                None if Instant::now() < deadline => std::thread::sleep(SAMPLE_INTERVAL),
                None => break "it runs, but not on the GPU;".to_owned(),
            }
        };
        let mut message = String::new();
        for Program { child, .. } in &mut self.programs {
            // It may still run, but the case has failed.
            let _ = child.kill();
            if let Some(mut stderr) = child.stderr.take() {
                let _ = stderr.read_to_string(&mut message);
            }
        }
        format!("{} failed: {status} {}", self.name, message.trim())
    }

    /// Pauses its programs with SIGSTOP, or continues them. Their PIDs come from the simulator's
    /// accounting.
    pub(crate) fn set_paused(&self, node: &ComputeNode, paused: bool) -> Result<()> {
        let served = node.watcher.process_times();
        let pids: Vec<u32> =
            served.iter().filter(|found| found.name == self.name).map(|found| found.pid).collect();
        ensure!(!pids.is_empty(), "{} is not on the GPU", self.name);
        let send = |pid: u32, signal| -> Result<()> {
            Ok(kill_process(Pid::from_raw(i32::try_from(pid)?).context("no process")?, signal)?)
        };
        if paused {
            return pids.into_iter().try_for_each(|pid| send(pid, Signal::STOP));
        }
        // nsenter stops when its program stops, but does not continue by itself.
        let parents = self.programs.iter().map(|program| program.child.id());
        pids.into_iter().chain(parents).try_for_each(|pid| send(pid, Signal::CONT))
    }

    /// Changes the policy of its share.
    pub(crate) fn change_policy(&self, node: &ComputeNode, compute: Compute) -> Result<()> {
        let share = &self.pages.first().context("a tenant without a share")?.0;
        watch::change(&node.node, share, compute)
    }

    /// Waits for the exit of its programs and returns the output of each.
    pub(crate) fn finish(mut self) -> Result<Vec<String>> {
        let deadline = Instant::now() + EXIT_TIMEOUT;
        let mut all = Vec::new();
        for Program { child, stdout } in &mut self.programs {
            while child.try_wait()?.is_none() {
                ensure!(Instant::now() < deadline, "{} does not exit", self.name);
                std::thread::sleep(SAMPLE_INTERVAL);
            }
            let mut printed = String::new();
            stdout.read_to_string(&mut printed)?;
            all.push(printed);
        }
        Ok(all)
    }
}

/// File name of a tenant's program, which is also the name of its process.
fn file_of(tenant: usize) -> String {
    format!("compute-{tenant}")
}

/// The GPU time of a tenant, summed over its processes and GPUs; `None` if one of them is missing.
fn sample_of(served: &[ProcessTime], tenant: &Tenant) -> Option<Sample> {
    let its: Vec<&ProcessTime> = served.iter().filter(|found| found.name == tenant.name).collect();
    let at = its.iter().map(|found| found.at).max()?;
    let is_complete = its.len() >= tenant.programs.len() * tenant.gpus;
    is_complete.then(|| (at, its.iter().map(|found| found.gpu_ns).sum()))
}

/// GPU time between the samples nearest to two times, in per cent of the time between them.
pub(crate) fn share(samples: &[Sample], from: u64, to: u64) -> f64 {
    let nearest = |time: u64| samples.iter().min_by_key(|(at, _)| at.abs_diff(time));
    match (nearest(from), nearest(to)) {
        (Some(from), Some(to)) if to.0 > from.0 => (to.1 - from.1) as f64 / (to.0 - from.0) as f64 * 100.0,
        _ => 0.0,
    }
}

/// The value of that name in a program's output.
pub(crate) fn printed_value(printed: &str, name: &str) -> Result<f64> {
    let found = printed.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    found.with_context(|| format!("the program does not print {name}"))
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_uses_the_nearest_samples() {
        let samples = [(0, 0), (100, 30), (210, 60), (290, 100)];
        assert_eq!(share(&samples, 0, 100), 30.0);
        assert_eq!(share(&samples, 90, 300), 70.0 / 190.0 * 100.0);
        assert_eq!(share(&samples, 300, 400), 0.0);
        assert_eq!(share(&[], 0, 100), 0.0);
    }

    #[test]
    fn printed_value_matches_the_whole_name() {
        let printed = "early_stall 5\nstall 7\n";
        let value = |name| printed_value(printed, name).ok();
        assert_eq!([value("stall"), value("early_stall"), value("cpu")], [Some(7.0), Some(5.0), None]);
    }
}
