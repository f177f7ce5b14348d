//! `divvy-bench overcommit`: shares that together hold more memory than their GPU has.
//!
//! Part `turns`: two tenants with working sets of 60 % of the GPU each. Without the agent they evict
//! each other with every launch (thrashing). The agent first runs one tenant at a time as a trial,
//! and permanently once running side by side proves slower.
//!
//! Part `pools`: how soon the agent reclaims the unused pool of one tenant after another tenant's
//! request is refused. The program of both parts is `e2e/escape/programs/overcommit.c`.

use crate::stats::{at_least, at_most, figure, line, percentile};
use crate::{artifacts, program};
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

/// Parent directory of the node: as on a real node, the share's pages are in memory.
const MEMORY_DIR: &str = "/dev/shm";
/// Working set of a tenant, in per cent of the GPU's memory.
///
/// On the simulated GPU a kernel waits 20 us for each missing page of 2 MiB, plus its transfer at
/// 12 GB/s each way.
const WORKING_SET_PERCENT: u64 = 60;
/// Part of the working set that the claim requests as GPU memory, in per cent of the GPU's memory.
/// The rest is managed memory.
const CLAIMED_PERCENT: u64 = 20;
/// Lower bound of the throughput in turns, relative to thrashing.
const TURNS_TO_THRASHING_MIN_RATIO: f64 = 2.0;
/// Longest time from the start to the first turn, and to permanent turns, in seconds.
const SWITCH_MAX_SECONDS: f64 = 3.0;
/// Part of an idle pool that may be unreclaimed after [`RECLAIM_TIME`], in per cent.
const UNRECLAIMED_MAX_PERCENT: f64 = 10.0;
/// Time from the refused request to the check of the pool.
const RECLAIM_TIME: Duration = Duration::from_secs(1);
/// Offset of the gate on a policy page, in bytes. The gate is non-zero while the share must not launch.
const GATE_OFFSET: u64 = 64;
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Longest gap between the turns of two tenants.
const TURN_CHANGE_MAX: Duration = Duration::from_millis(100);
/// Limit for the exit of a program, and for the reclaim of a pool.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Measure this library instead of building the one that the image ships
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Model of the simulated GPU
    #[arg(long, default_value = "T4")]
    gpu: String,
    /// Duration of a kernel, in ms
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..1000),
    )]
    kernel: u64,
    /// How long tenants run, in s; kernels are counted in the last two thirds
    #[arg(
        long,
        value_name = "S",
        default_value_t = 24,
        value_parser = clap::value_parser!(u64).range(6..600),
    )]
    window: u64,
    /// Number of rounds of the part `pools`
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Run only these parts
    #[arg(long, value_delimiter = ',', value_parser = ["turns", "pools"])]
    only: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let selected = |part: &str| program::is_selected(&arguments.only, part);
    let library =
        artifacts::interposer(arguments.library.as_deref(), &std::env::temp_dir().join("divvy-bench"))?;
    if selected("turns") {
        let thrashing = run_tenants(arguments, &library, false)?;
        let turns = run_tenants(arguments, &library, true)?;
        at_most("overcommit_refused", thrashing.refused_mib + turns.refused_mib, 0.0, "MiB");
        line("overcommit_thrashing_kernels", thrashing.kernels_per_second, "1/s");
        line("overcommit_turns_kernels", turns.kernels_per_second, "1/s");
        line("overcommit_turns_slowest_tenant_kernels", turns.slowest_tenant, "1/s");
        line("overcommit_turn_start_to_first_kernel", percentile(&turns.first_kernel_ms, 0.5), "ms");
        let ratio = turns.kernels_per_second / thrashing.kernels_per_second;
        at_least("overcommit_turns_to_thrashing", ratio, TURNS_TO_THRASHING_MIN_RATIO, "ratio");
        let first_turn = turns.first_turn.map_or(f64::INFINITY, |time| time.as_secs_f64());
        at_most("overcommit_first_turn", first_turn, SWITCH_MAX_SECONDS, "s");
        // From this time on, the turns are permanent.
        let last_side_by_side = turns.last_side_by_side.as_secs_f64();
        at_most("overcommit_last_side_by_side", last_side_by_side, SWITCH_MAX_SECONDS, "s");
    }
    if selected("pools") {
        let (mut times, mut unreclaimed) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds {
            let (time, percent) = reclaim_pool(&arguments.gpu, &library)?;
            times.push(time.as_secs_f64() * 1e3);
            unreclaimed.push(percent);
        }
        figure("overcommit_pool_reclaim", &times, "ms");
        at_most("overcommit_pool_unreclaimed", percentile(&unreclaimed, 1.0), UNRECLAIMED_MAX_PERCENT, "%");
    }
    Ok(())
}

/// Results of two tenants that run together.
struct TenantsResult {
    /// Kernels per second of both tenants.
    kernels_per_second: f64,
    /// Kernels per second of the slower tenant.
    slowest_tenant: f64,
    /// Refused memory, in MiB.
    refused_mib: f64,
    /// Times from the start of a turn to the end of its first kernel.
    first_kernel_ms: Vec<f64>,
    /// Time from the start to the first turn.
    first_turn: Option<Duration>,
    /// Time from the start to the last moment at which both tenants could launch.
    last_side_by_side: Duration,
}

/// The gate of a tenant, as polled from its policy page.
#[derive(Default)]
struct Gate {
    is_closed: bool,
    /// Times at which it opened, in ms since the start.
    opened_ms: Vec<u64>,
}

/// Physical memory of the GPU, in bytes.
fn physical(node: &Node) -> Result<u64> {
    let state = node.sim.read()?;
    Ok(divvy_sim::mig::memory_mib(state.gpus.first().context("no GPU")?, None) * MIB)
}

fn start_node(gpu: &str) -> Result<Node> {
    let node = Node::up_in(gpu, Path::new(MEMORY_DIR))?;
    programs::compile(&["overcommit.c"], &node.programs().join("overcommit"), &["-ldl"])?;
    Ok(node)
}

/// Runs two tenants for the window, with or without the agent.
fn run_tenants(arguments: &Arguments, library: &Path, agent: bool) -> Result<TenantsResult> {
    let node = start_node(&arguments.gpu)?;
    let physical = physical(&node)?;
    let claimed = physical / 100 * CLAIMED_PERCENT;
    let limit = physical / 100 * WORKING_SET_PERCENT + CONTEXT + 64 * MIB;
    let shares = ["one", "two"].map(|claim| node.over_committed_share(claim, "0", claimed, limit));
    let [one, two] = shares;
    let shares = [one?, two?];
    let _agent = agent.then(|| Watch::start(&node)).transpose()?;
    let set = physical / 100 * WORKING_SET_PERCENT / MIB / 64 * 64;
    let (kernel, window) = (arguments.kernel.to_string(), (arguments.window * 1000).to_string());
    let mut tenants = Vec::new();
    for share in &shares {
        tenants.push(Tenant::start(&node, library, share, &["work", &set.to_string(), &kernel, &window])?);
    }
    let held = tenants.iter_mut().map(Tenant::ready).collect::<Result<Vec<u64>>>()?;
    for tenant in &mut tenants {
        tenant.send_newline()?;
    }
    let start = Instant::now();
    let pages: Vec<std::fs::File> = shares
        .iter()
        .map(|share| std::fs::File::open(share.directory.join("policy")))
        .collect::<std::io::Result<_>>()?;
    let (mut first_turn, mut last_side_by_side, mut last_closed) = (None, Duration::ZERO, Duration::ZERO);
    let mut gates = [Gate::default(), Gate::default()];
    while start.elapsed() < Duration::from_secs(arguments.window) {
        for (gate, page) in gates.iter_mut().zip(&pages) {
            let mut word = [0; 4];
            let is_closed = page.read_exact_at(&mut word, GATE_OFFSET).is_ok() && word != [0; 4];
            if std::mem::replace(&mut gate.is_closed, is_closed) && !is_closed {
                gate.opened_ms.push(start.elapsed().as_millis() as u64);
            }
        }
        if gates.iter().any(|gate| gate.is_closed) {
            last_closed = start.elapsed();
            first_turn.get_or_insert(last_closed);
        } else if start.elapsed() > last_closed + TURN_CHANGE_MAX {
            last_side_by_side = start.elapsed();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let (from, to) = (arguments.window * 1000 / 3, arguments.window * 1000);
    let (mut rates, mut first_kernel_ms) = (Vec::new(), Vec::new());
    for (mut tenant, gate) in tenants.into_iter().zip(&gates) {
        let printed = tenant.finish()?;
        let times = printed.lines().filter_map(|line| line.strip_prefix("done ")?.parse::<u64>().ok());
        let times: Vec<u64> = times.collect();
        let within = |time: &&u64| (from..to).contains(*time);
        rates.push(times.iter().filter(within).count() as f64 * 1000.0 / (to - from) as f64);
        let after = |opened: &u64| Some((times.iter().find(|time| *time > opened)? - opened) as f64);
        first_kernel_ms.extend(gate.opened_ms.iter().filter(within).filter_map(after));
    }
    Ok(TenantsResult {
        kernels_per_second: rates.iter().sum(),
        slowest_tenant: percentile(&rates, 0.0),
        first_kernel_ms,
        refused_mib: held.iter().map(|held| set.saturating_sub(*held)).sum::<u64>() as f64,
        first_turn,
        last_side_by_side,
    })
}

/// Fills a pool, frees its memory, and lets another tenant's request be refused.
///
/// Returns the time from the refusal until the pool is reclaimed up to [`UNRECLAIMED_MAX_PERCENT`],
/// and the per cent that are unreclaimed after [`RECLAIM_TIME`].
fn reclaim_pool(gpu: &str, library: &Path) -> Result<(Duration, f64)> {
    const POOL_MIB: u64 = 4096;
    // The agent needs this time to see that the pool is idle.
    const IDLE_TIME: Duration = Duration::from_secs(2);
    let node = start_node(gpu)?;
    let shares = [
        node.over_committed_share("pool", "0", POOL_MIB * MIB + 2 * CONTEXT, 2 * POOL_MIB * MIB)?,
        node.over_committed_share("request", "0", 1024 * MIB + CONTEXT, 2048 * MIB)?,
    ];
    let _agent = Watch::start(&node)?;
    let pool_mib = POOL_MIB.to_string();
    let mut owner = Tenant::start(&node, library, &shares[0], &["pool", &pool_mib])?;
    let mut requester = Tenant::start(&node, library, &shares[1], &["take", "512"])?;
    owner.ready()?;
    requester.ready()?;
    std::thread::sleep(IDLE_TIME);
    let mut before = node.used();
    let refused = loop {
        requester.send_newline()?;
        let code = requester.line()?;
        match code.as_str() {
            "0" => before = node.used(),
            "2" => break Instant::now(),
            code => bail!("cuMemCreate returned {code}"),
        }
    };
    let unreclaimed = || {
        let reclaimed = before.saturating_sub(node.used());
        100.0 - reclaimed.min(POOL_MIB * MIB) as f64 / (POOL_MIB * MIB) as f64 * 100.0
    };
    let mut time = None;
    let mut percent = unreclaimed();
    while time.is_none() || refused.elapsed() < RECLAIM_TIME {
        let now = unreclaimed();
        if refused.elapsed() <= RECLAIM_TIME {
            percent = now;
        }
        if now <= UNRECLAIMED_MAX_PERCENT {
            time.get_or_insert(refused.elapsed());
        }
        ensure!(refused.elapsed() < TIMEOUT, "{now:.0} % of the pool was not reclaimed within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok((time.unwrap_or_default(), percent))
}

/// A program in its own container; both are killed when it is dropped.
struct Tenant {
    child: Child,
    input: ChildStdin,
    stdout: BufReader<ChildStdout>,
    _container: Container,
}

impl Tenant {
    fn start(node: &Node, library: &Path, share: &Share, arguments: &[&str]) -> Result<Self> {
        let (library, shares, environment) =
            (Some(library.to_owned()), vec![share.clone()], vec![program::jitter()]);
        let container =
            Container::start(node, &Recipe { library, shares, environment, ..Recipe::default() })?;
        let mut command = container.command(&node.programs().join("overcommit"));
        command.args(arguments);
        let mut child = program::spawn_piped(command)?;
        let stdout = BufReader::new(child.stdout.take().context("no output")?);
        let input = child.stdin.take().context("no input")?;
        Ok(Self { child, input, stdout, _container: container })
    }

    /// The next line of its output.
    ///
    /// # Errors
    /// The program has exited; the error contains its standard error.
    fn line(&mut self) -> Result<String> {
        let line = program::read_line(&mut self.stdout)?;
        if line.is_empty() {
            let mut message = String::new();
            if let Some(mut stderr) = self.child.stderr.take() {
                stderr.read_to_string(&mut message)?;
            }
            bail!("a tenant exited: {}", message.trim());
        }
        Ok(line.trim().to_owned())
    }

    /// Waits until it is ready. Returns the MiB that it holds.
    fn ready(&mut self) -> Result<u64> {
        let line = self.line()?;
        line.strip_prefix("ready ")
            .and_then(|held| held.parse().ok())
            .with_context(|| format!("a tenant printed {line:?}"))
    }

    /// Sends a newline, on which the program begins or continues.
    fn send_newline(&mut self) -> Result<()> {
        self.input.write_all(b"\n").context("a tenant exited")
    }

    /// Waits for its exit. Returns the rest of its output.
    fn finish(&mut self) -> Result<String> {
        let next = || {
            program::read_line(&mut self.stdout).map(|line| (!line.is_empty()).then_some(line)).transpose()
        };
        let printed = std::iter::from_fn(next).collect::<Result<_>>()?;
        let deadline = Instant::now() + TIMEOUT;
        while self.child.try_wait()?.is_none() {
            ensure!(Instant::now() < deadline, "a tenant does not exit");
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(printed)
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
