//! Outages of the agent under load: kill and restart, and upgrades of the process that hosts it.
//!
//! Shares with a guarantee alone need no agent: their library enforces it. Weights, lending and
//! priority need one.

use super::policies::{
    MILLISECOND, NO_POLICY, SECOND, run_bursts, run_lending, run_weighted, shape, wait_for_audit,
    weight_errors,
};
use super::tenants::{ComputeNode, Sample, share};
use crate::program::read_line;
use crate::stats::{at_most, line, percentile};
use anyhow::{Context, Result, ensure};
use divvy_escape::node::Compute;
use std::cell::RefCell;
use std::io::BufReader;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The agent in its own process, so that it can be killed like a node daemon. Killed when dropped.
struct AgentProcess(Child);

impl AgentProcess {
    fn start(node: &ComputeNode) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["compute", "--agent-of"]).args([node.node.sim.root(), node.node.path()]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.context("cannot start the agent")?;
        let stdout = child.stdout.take().context("no output")?;
        // From here on, an error kills the process.
        let agent = Self(child);
        ensure!(read_line(&mut BufReader::new(stdout))? == "up\n", "the agent does not start");
        Ok(agent)
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        // SIGKILL, so that it cannot clean up.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kills the agent while tenants run, and starts it again later or, for an upgrade, starts the next
/// agent before that.
pub(super) fn agent_restart(node: &ComputeNode, max_points: f64, burst: Duration) -> Result<()> {
    /// Guarantee and ceiling of each tenant, in per cent: three fixed shares, and one that borrows a little.
    const POLICIES: [(u32, u32); 4] = [(20, 20), (30, 30), (35, 35), (5, 15)];
    let node = &node.with_window(Duration::from_secs(14));
    let kernel_ms = shape("1ms")?.longest_ms;
    for (name, gap) in [
        ("killed", Some(Duration::from_millis(2500))),
        ("killed_long", Some(Duration::from_secs(6))),
        ("upgraded", None),
    ] {
        let agents = RefCell::new(vec![AgentProcess::start(node)?]);
        let mut tenants = Vec::new();
        for (at, (cores, ceiling)) in POLICIES.into_iter().enumerate() {
            let compute = node.fixed_policy(cores)?.map(|fixed| Compute { ceiling, ..fixed });
            tenants.push(node.start_tenant(at, compute, "1ms")?);
        }
        tenants.push(node.start_tenant(POLICIES.len(), Some(NO_POLICY), "1ms")?);
        let outage = node.times.warm_up + Duration::from_secs(2);
        let (mut is_killed, mut is_back, mut back_at) = (false, false, 0);
        wait_for_audit();
        let samples = node.sample(&mut tenants, |_, since| {
            if gap.is_none() && !is_back && since >= outage {
                agents.borrow_mut().push(AgentProcess::start(node)?);
                is_back = true;
            }
            if !is_killed && since >= outage + Duration::from_millis(500) {
                drop(agents.borrow_mut().remove(0));
                (is_killed, back_at) = (true, divvy_sim::usage::now());
            }
            if let Some(gap) = gap
                && !is_back
                && since >= outage + gap
            {
                agents.borrow_mut().push(AgentProcess::start(node)?);
                (is_back, back_at) = (true, divvy_sim::usage::now());
            }
            Ok(())
        })?;
        tenants.into_iter().try_for_each(|tenant| tenant.finish().map(drop))?;
        let (mut excess, mut shortfall) = (Vec::new(), Vec::new());
        for ((cores, ceiling), samples) in POLICIES.into_iter().zip(&samples) {
            let (start, end) = node.window_of(samples);
            // In 100 ms, a ceiling in per cent is as many milliseconds.
            let allowed_ms = f64::from(ceiling) + burst.as_secs_f64() * 1e3 + kernel_ms;
            excess.push(max_in_100_ms(samples, start) / 1e6 - allowed_ms);
            let recovered = share(samples, back_at + SECOND, (back_at + 4 * SECOND).min(end));
            shortfall.push(f64::from(cores) - recovered);
        }
        let name = |what: &str| format!("agent_restart_{name}_{what}");
        at_most(&name("excess_in_100ms"), percentile(&excess, 1.0), 0.0, "ms");
        at_most(&name("shortfall_after_1s"), percentile(&shortfall, 1.0), max_points, "points");
    }
    Ok(())
}

/// The largest GPU time in any 100 ms after `from`, in nanoseconds.
fn max_in_100_ms(samples: &[Sample], from: u64) -> f64 {
    const LENGTH: u64 = 100 * MILLISECOND;
    let gpu_ns = |(at, before): &Sample| {
        let end = samples.iter().find(|sample| sample.0 >= at + LENGTH)?;
        // A late sample covers more than 100 ms, so the time is scaled.
        Some((end.1 - before) as f64 * LENGTH as f64 / (end.0 - at) as f64)
    };
    samples.iter().filter(|sample| sample.0 >= from).filter_map(gpu_ns).fold(0.0, f64::max)
}

/// Length of the outage, and of the window.
const OUTAGE: Duration = Duration::from_secs(5);
/// Time that the next agent runs before the first one is killed.
const OVERLAP: Duration = Duration::from_secs(1);
/// The lending owner is paused this long before the outage, in nanoseconds.
const PAUSE_BEFORE_OUTAGE_NS: u64 = 1_500_000_000;
/// The lending owner continues this long after the outage has begun, in nanoseconds.
const CONTINUE_AFTER_OUTAGE_NS: u64 = 500_000_000;

/// The change of the agent at the start of the window.
#[derive(Clone, Copy, PartialEq)]
enum Upgrade {
    /// Nothing: the agent runs on.
    None,
    /// The next agent is already running when the agent is killed, as in an upgrade of the node daemon.
    Overlapping,
    /// There is no agent in the window, as in an upgrade of the MPS supervisor, which only runs once.
    Absent,
}

/// The agents of a run.
struct AgentHost<'a> {
    node: &'a ComputeNode,
    upgrade: Upgrade,
    agent: Option<AgentProcess>,
    next: Option<AgentProcess>,
}

impl<'a> AgentHost<'a> {
    fn start(node: &'a ComputeNode, upgrade: Upgrade) -> Result<Self> {
        Ok(Self { node, upgrade, agent: Some(AgentProcess::start(node)?), next: None })
    }

    /// Starts and kills agents as due at the time since the start.
    fn advance(&mut self, since: Duration) -> Result<()> {
        let outage = self.node.times.warm_up;
        if self.upgrade == Upgrade::Overlapping && self.next.is_none() && since + OVERLAP >= outage {
            self.next = Some(AgentProcess::start(self.node)?);
        }
        if self.upgrade != Upgrade::None && since >= outage {
            // The first call kills it.
            self.agent = None;
        }
        Ok(())
    }
}

/// Loss of accuracy during an upgrade of the process that hosts the agent. This is why the node
/// daemon hosts it.
///
/// The node must have no agent of its own.
pub(super) fn host_upgrade(node: &ComputeNode) -> Result<()> {
    let node = &node.with_window(OUTAGE);
    let outage = node.times.warm_up.as_nanos() as u64;
    let upgrades =
        [("none", Upgrade::None), ("overlapping", Upgrade::Overlapping), ("absent", Upgrade::Absent)];
    for (name, upgrade) in upgrades {
        let name = |what: &str| format!("host_upgrade_{name}_{what}");
        let mut host = AgentHost::start(node, upgrade)?;
        let shares = run_weighted(node, |since| host.advance(since))?;
        line(&name("weights_error"), percentile(&weight_errors(&shares), 1.0), "points");
        let mut host = AgentHost::start(node, upgrade)?;
        let is_idle = |since: u64| {
            (outage - PAUSE_BEFORE_OUTAGE_NS..outage + CONTINUE_AFTER_OUTAGE_NS).contains(&since)
        };
        for loan in run_lending(node, is_idle, |since| host.advance(since))? {
            line(&name("borrower_excess"), loan.borrower_excess, "points");
            line(&name("owner_shortfall"), loan.owner_shortfall, "points");
        }
        let mut host = AgentHost::start(node, upgrade)?;
        let delay = run_bursts(node, 1, |since| host.advance(since))?;
        line(&name("high_priority_delay_p99"), delay.p99_ms, "ms");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_in_100_ms_is_found_at_any_offset() {
        let samples: Vec<Sample> =
            [(0, 0), (50, 10), (100, 20), (150, 60), (200, 100), (250, 105), (300, 110), (350, 115)]
                .map(|(at, gpu)| (at * MILLISECOND, gpu * MILLISECOND))
                .into();
        assert_eq!(max_in_100_ms(&samples, 0), 80.0 * MILLISECOND as f64);
        assert_eq!(max_in_100_ms(&samples, 150 * MILLISECOND), 45.0 * MILLISECOND as f64);
    }
}
