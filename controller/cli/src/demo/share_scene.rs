//! Programs in two shares of one GPU: `nvidia-smi` shows the share, an allocation beyond it fails in
//! that share alone, and the GPU time of both is measured while they work.
//!
//! Times come from the simulated GPU, not from the programs or from the driver that limits them.

use super::cuda::CudaProgram;
use super::map::{self, HeldMode, Holder};
use super::node::CUDA_PROGRAMS;
use super::session::{Session, name_of};
use anyhow::{Context, Result, ensure};
use divvy_sim::usage::{Place, UsageMonitor};
use serde_json::json;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::Command;

/// Time until the rates of both shares have settled. The chart shows it, and the means leave it out.
const WARM_UP: Duration = Duration::from_millis(2000);
/// Time of the measurement after that.
const MEASURED: Duration = Duration::from_millis(3000);
/// Time of one column of the chart.
const COLUMN: Duration = Duration::from_millis(100);
/// Limit for the launches of the other share while one is refused memory.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(10);
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A share with its program.
struct Tenant {
    holder: Holder,
    program: CudaProgram,
    pid: u32,
    /// GPU time so far, in ns, and the time of that measurement.
    last: (u64, u64),
    first: (u64, u64),
    /// Per cent of the GPU's time, per column.
    columns: Vec<f64>,
}

/// Runs the scene in the shares that the session holds.
pub(crate) async fn run(session: &Session<'_>) -> Result<()> {
    let holders: Vec<Holder> =
        session.holders().into_iter().filter(|holder| holder.mode == HeldMode::Share).collect();
    ensure!(holders.len() == 2, "{} shares are held instead of 2", holders.len());
    show_smi(session, &holders[0]).await?;
    let mut tenants = Vec::new();
    for (holder, program) in holders.into_iter().zip(CUDA_PROGRAMS) {
        let program = CudaProgram::start(command(session, &holder, &session.node.program(program))?).await?;
        let pid = program.pid().context("a CUDA program without a process")?;
        tenants.push(Tenant { holder, program, pid, last: (0, 0), first: (0, 0), columns: Vec::new() });
    }
    let [small, large] = tenants.as_mut_slice() else { return Ok(()) };
    refuse(session, small, large).await?;
    measure(session, small, large).await?;
    for tenant in tenants {
        tenant.program.kill().await?;
    }
    Ok(())
}

/// A command that runs a program in the container of a share.
fn command(session: &Session<'_>, holder: &Holder, program: &Path) -> Result<Command> {
    let mut held = session.held.iter().map(|held| &held.claim);
    let claim = held.find(|claim| name_of(claim) == holder.claim).context("the claim is not held")?;
    let cdi = session.cdi(claim)?;
    session.node.with_paths(|paths| cdi.command(paths, program))
}

async fn show_smi(session: &Session<'_>, holder: &Holder) -> Result<()> {
    let began = Instant::now();
    let smi = session.node.sim.root().join("usr/bin/nvidia-smi");
    let mut command = command(session, holder, &smi)?;
    command.args(["--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]);
    let out = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
    let (shown, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    ensure!(out.status.success(), "nvidia-smi in {}: {}{}", holder.claim, shown.trim(), errors.trim());
    let shown = shown.trim();
    let expected = holder.memory_mib.unwrap_or_default();
    ensure!(
        shown.contains(&format!("{expected} MiB")),
        "nvidia-smi in {} shows {shown} instead of {expected} MiB",
        holder.claim
    );
    let event = json!({"event": "nvidia-smi", "claim": holder.claim, "shown": shown});
    session.report.done(&format!("{}: nvidia-smi shows {shown}", holder.claim), began.elapsed(), event);
    Ok(())
}

/// One share allocates more than it has while the other one works.
async fn refuse(session: &Session<'_>, small: &mut Tenant, large: &mut Tenant) -> Result<()> {
    let began = Instant::now();
    large.ask("work").await?;
    let limit = small.holder.memory_mib.unwrap_or_default();
    let half = limit * 6 / 10;
    small.ask(&format!("alloc {half}")).await?;
    let before = large.launches().await?;
    let refused = small.program.ask(&format!("alloc {half}")).await?;
    ensure!(refused != "ok", "{} got {} MiB of {limit} MiB", small.holder.claim, 2 * half);
    let deadline = Instant::now() + LAUNCH_TIMEOUT;
    let mut now = large.launches().await?;
    while now <= before {
        ensure!(Instant::now() < deadline, "{} does not go on", large.holder.claim);
        tokio::time::sleep(Duration::from_millis(10)).await;
        now = large.launches().await?;
    }
    let (one, other) = (&small.holder.claim, &large.holder.claim);
    let text = format!(
        "{one}: has {half} MiB of {} and asks for {half} MiB more: {refused}. {other} goes on",
        map::memory(limit)
    );
    let event = json!({"event": "limited", "claim": one, "limitMiB": limit, "error": refused});
    session.report.done(&text, began.elapsed(), event);
    Ok(())
}

/// Both shares work, and the simulator's accounting shows the GPU time of each.
async fn measure(session: &Session<'_>, small: &mut Tenant, large: &mut Tenant) -> Result<()> {
    small.ask("work").await?;
    let usage = session.node.sim.usage().context("the simulated GPUs have no accounting")?;
    let monitor = UsageMonitor::new(usage)?;
    let began = Instant::now();
    let mut tenants = [small, large];
    let place = place(session, &tenants[0].holder)?;
    let mut changes = Changes::default();
    for tenant in &mut tenants {
        tenant.first = tenant.gpu_time(&monitor)?;
        tenant.last = tenant.first;
    }
    let mut drawn = 0;
    while began.elapsed() < WARM_UP + MEASURED {
        tokio::time::sleep(COLUMN).await;
        for tenant in &mut tenants {
            tenant.sample(&monitor)?;
            if began.elapsed() < WARM_UP {
                tenant.first = tenant.last;
            }
        }
        let times = monitor.times(place).context("no GPU")?;
        changes.last = (times.switch_ns, times.at);
        if began.elapsed() < WARM_UP {
            changes.first = changes.last;
        }
        if session.report.is_live() {
            let lines: Vec<String> = tenants.iter().map(|tenant| tenant.line()).collect();
            session.report.redraw(drawn, &lines);
            drawn = lines.len();
        }
    }
    if drawn == 0 {
        tenants.iter().for_each(|tenant| session.report.detail(&tenant.line()));
    }
    let of = |tenant: &&mut Tenant| {
        let (claim, cores, percent) = (&tenant.holder.claim, tenant.cores(), tenant.mean());
        json!({"claim": claim, "cores": cores, "percent": (percent * 10.0).round() / 10.0})
    };
    let shares = tenants.iter().map(of).collect::<Vec<_>>();
    let changes = percent(changes.first, changes.last);
    let event =
        json!({"event": "measured", "shares": shares, "changesPercent": (changes * 10.0).round() / 10.0});
    let text = tenants.iter().map(|tenant| {
        format!("{} asked for {} % and got {:.1} %", tenant.holder.claim, tenant.cores(), tenant.mean())
    });
    let text = text.collect::<Vec<_>>().join("; ");
    let text = format!("GPU time: {text}; changes between them took {changes:.1} %");
    session.report.done(&text, began.elapsed(), event);
    Ok(())
}

/// GPU time of the changes between programs and the time of the measurement, in ns.
#[derive(Clone, Copy, Debug, Default)]
struct Changes {
    first: (u64, u64),
    last: (u64, u64),
}

/// The GPU of a share.
fn place(session: &Session<'_>, holder: &Holder) -> Result<Place> {
    let state = session.node.sim.read()?;
    let slot = state.gpus.iter().position(|gpu| gpu.uuid == holder.gpu);
    Ok(Place { slot: slot.context("the GPU of the share has gone")?, instance: None })
}

impl Tenant {
    async fn ask(&mut self, command: &str) -> Result<()> {
        let answer = self.program.ask(command).await?;
        ensure!(answer == "ok", "{}: {command}: {answer}", self.holder.claim);
        Ok(())
    }

    async fn launches(&mut self) -> Result<u64> {
        let answer = self.program.ask("count").await?;
        answer.parse().with_context(|| format!("a CUDA program printed {answer:?}"))
    }

    /// GPU time of the program and the time of the measurement, in ns.
    fn gpu_time(&self, monitor: &UsageMonitor) -> Result<(u64, u64)> {
        let times = monitor.process_times();
        let mut own = times.iter().filter(|time| time.pid == self.pid);
        let time = own.next().with_context(|| format!("{} is not on the GPU", self.holder.claim))?;
        Ok((time.gpu_ns, time.at))
    }

    fn sample(&mut self, monitor: &UsageMonitor) -> Result<()> {
        let now = self.gpu_time(monitor)?;
        self.columns.push(percent(self.last, now));
        self.last = now;
        Ok(())
    }

    fn cores(&self) -> u64 {
        self.holder.cores.unwrap_or_default()
    }

    /// Per cent of the GPU's time since the warm-up.
    fn mean(&self) -> f64 {
        percent(self.first, self.last)
    }

    /// Name, request, chart and measured part.
    fn line(&self) -> String {
        let columns = ((WARM_UP + MEASURED).as_millis() / COLUMN.as_millis()) as usize;
        let skipped = self.columns.len().saturating_sub(columns);
        let chart: String = self.columns.iter().skip(skipped).map(|percent| block(*percent)).collect();
        // Until the mean begins, the last column.
        let shown = match self.first == self.last {
            true => self.columns.last().copied().unwrap_or_default(),
            false => self.mean(),
        };
        format!("{:<6}{:>3} %  {chart:<columns$}  {shown:>5.1} %", self.holder.claim, self.cores())
    }
}

/// Per cent of the time between two measurements.
fn percent(from: (u64, u64), to: (u64, u64)) -> f64 {
    let time = to.1.saturating_sub(from.1).max(1);
    to.0.saturating_sub(from.0) as f64 / time as f64 * 100.0
}

fn block(percent: f64) -> char {
    let at = (percent / 100.0 * BLOCKS.len() as f64).clamp(0.0, (BLOCKS.len() - 1) as f64);
    BLOCKS[at as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_of_the_time_between_measurements() {
        assert_eq!(percent((0, 100), (30, 200)), 30.0);
        assert_eq!(percent((30, 200), (30, 200)), 0.0);
        assert_eq!([0.0, 30.0, 60.0, 99.0, 250.0].map(block), ['▁', '▃', '▅', '█', '█']);
    }
}
