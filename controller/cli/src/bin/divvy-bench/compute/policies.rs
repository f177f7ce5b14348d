//! Cells of policies: what tenants get whose shares lend, weigh, or precede others, and when the agent is lost.
//!
//! As in the other cells, what a tenant had is the ledger's word. A tenant rests while its program is stopped; it is back
//! with the first of its work that the GPU does after that, so what returns to it is taken from then on.

use super::cells::{Cell, SHAPES, Shape};
use super::tenants::{Point, Stage, figure as said, share};
use crate::program::hear;
use crate::stats::{bar, figure, line, median, percentile};
use anyhow::{Context, Result, ensure};
use divvy_escape::node::Compute;
use std::cell::RefCell;
use std::io::BufReader;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
/// The control period, within which what was lent is back.
const PERIOD: u64 = 20 * MS;
/// A launch of high priority may take so much longer than its work, in ms.
const REACTION: f64 = 5.0;
/// What a burst of `compute.c` is, in ms.
const BURST: f64 = 5.0;
pub(super) const NONE: Compute = Compute { cores: 0, ceiling: 0, weight: 0, priority: 0, burst_us: 0 };

/// On a node pages are there long before a container has started: the agent has seen them by then.
pub(super) fn seen() {
    std::thread::sleep(Duration::from_millis(1200));
}

/// The agent in a process of its own, so that it can be killed as a node daemon is.
pub(super) struct Agent(Child);

impl Agent {
    pub(super) fn start(stage: &Stage) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["compute", "--agent-of"]).args([stage.node.sim.root(), stage.node.path()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("no agent")?;
        let said = child.stdout.take().context("no output")?;
        // Killed from here on, whatever it says.
        let agent = Self(child);
        ensure!(hear(&mut BufReader::new(said))? == "up\n", "the agent does not start");
        Ok(agent)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SIGKILL: it can put nothing in order.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn shape(name: &str) -> Result<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name).context("no such shape")
}

/// The largest of some errors, in points.
fn off(name: &str, errors: &[f64], most: f64) {
    let largest = percentile(errors, 1.0);
    line(&format!("{name}_error"), largest, "points");
    bar(&format!("{name}_error"), largest, most, "points");
}

/// Two that get a part each.
pub(super) fn fixed(stage: &Stage, points: f64) -> Result<()> {
    let got = stage.play(&Cell { shape: shape("1ms")?, requests: vec![30, 60] })?.got;
    let errors: Vec<f64> =
        [30.0, 60.0].iter().zip(&got).map(|(asked, got)| (got.share - asked).abs()).collect();
    off("policy_fixed_30_60", &errors, points);
    Ok(())
}

/// Four without a guarantee, by their weights.
pub(super) fn weights(stage: &Stage, points: f64) -> Result<()> {
    let got = by_weight(stage, |_| Ok(()))?;
    for (at, got) in got.iter().enumerate() {
        line(&format!("policy_weight_{}_share", at + 1), *got, "%");
    }
    off("policy_weights", &off_by_weight(&got), points);
    Ok(())
}

/// What four whose weights are 1 to 4 have in the window; `meanwhile` is told the time since the begin.
pub(super) fn by_weight(
    stage: &Stage,
    mut meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<Vec<f64>> {
    let mut tenants = Vec::new();
    for at in 0..4 {
        tenants.push(stage.tenant(at, Some(Compute { weight: at as u32 + 1, ..NONE }), "1ms")?);
    }
    seen();
    let served = stage.watch(&mut tenants, |_, since| meanwhile(since))?;
    tenants.into_iter().try_for_each(|tenant| tenant.end().map(drop))?;
    Ok(served.iter().map(|points| of_window(stage, points)).collect())
}

/// By how many points each of these is off.
pub(super) fn off_by_weight(got: &[f64]) -> Vec<f64> {
    got.iter().zip(1..).map(|(got, weight)| (got - 10.0 * f64::from(weight)).abs()).collect()
}

/// Per cent of the window.
fn of_window(stage: &Stage, points: &[Point]) -> f64 {
    let (opens, ends) = stage.opens(points);
    share(points, opens, ends)
}

/// One that may have all that others leave, and the other that rests at times: what they are promised, in per cent.
const BORROWER: u32 = 20;
const OWNER: u32 = 60;
/// Of each other when both work, in per cent.
const WITH_OWNER: f64 = 40.0;

/// 20 that may have all that others leave, beside 60 that rest for three seconds of every five.
pub(super) fn lending(stage: &Stage, points: f64, rounds: u32) -> Result<()> {
    const REST: u64 = 3 * SECOND;
    const WORK: u64 = 2 * SECOND;
    let stage = &stage.lasting(Duration::from_nanos((REST + WORK) * u64::from(rounds)));
    let before = stage.before.as_nanos() as u64;
    let window = before..before + stage.window.as_nanos() as u64;
    // Not at the very end: whoever is stopped and woken at once may stay stopped.
    let rests = |since: u64| window.contains(&since) && (since - before) % (REST + WORK) < REST;
    let lent = lend(stage, rests, |_| Ok(()))?;
    ensure!(!lent.is_empty(), "nobody came back");
    let of = |what: fn(&Lent) -> f64| lent.iter().map(what).collect::<Vec<f64>>();
    let (share, soon) = (of(|lent| lent.share), of(|lent| lent.after_100_ms));
    let (over, lacks) = (of(|lent| lent.borrower_over), of(|lent| lent.owner_lacks));
    figure("policy_lent_after_100ms_share", &soon, "%");
    figure("policy_lent_share", &share, "%");
    bar("policy_lent_lost", 100.0 - median(&share), points, "points");
    figure("policy_returned_after_20ms_borrower_over", &over, "points");
    bar("policy_returned_after_20ms_borrower_over", median(&over), points, "points");
    figure("policy_returned_owner_lacks", &lacks, "points");
    bar("policy_returned_owner_lacks", median(&lacks), points, "points");
    Ok(())
}

/// What came of a rest of the owner.
pub(super) struct Lent {
    /// Per cent that the borrower had in the half second that begins 100 ms after the owner's last work, and in the last second.
    after_100_ms: f64,
    share: f64,
    /// Points that it had too much in half a second from a control period after the owner is back, and that the owner
    /// had too little in the first second.
    pub(super) borrower_over: f64,
    pub(super) owner_lacks: f64,
}

/// Lets both go: of each rest what came of it. The owner rests while `rests` says so of the nanoseconds since the begin.
pub(super) fn lend(
    stage: &Stage,
    rests: impl Fn(u64) -> bool,
    mut meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<Vec<Lent>> {
    let (borrower, owner) =
        (Compute { cores: BORROWER, ceiling: 100, ..NONE }, Compute { cores: OWNER, ..NONE });
    let mut tenants = vec![stage.tenant(0, Some(borrower), "1ms")?, stage.tenant(1, Some(owner), "1ms")?];
    let (mut left, mut is_resting, mut turns) = (0, false, Vec::new());
    seen();
    let served = stage.watch(&mut tenants, |tenants, since| {
        meanwhile(since)?;
        let is_to = rests(since.as_nanos() as u64);
        if is_to != is_resting {
            tenants[1].rest(stage, is_to)?;
            is_resting = is_to;
            match is_to {
                true => left = divvy_sim::ledger::now(),
                false => turns.push((left, divvy_sim::ledger::now())),
            }
        }
        Ok(())
    })?;
    if is_resting {
        tenants[1].rest(stage, false)?;
    }
    tenants.into_iter().try_for_each(|tenant| tenant.end().map(drop))?;
    let of = |(left, at): (u64, u64)| {
        // Its own first work is what tells that it is back, and its last that it is gone.
        let had = served[1].iter().rfind(|point| point.0 <= at).map_or(0, |point| point.1);
        let (first, _) = *served[1].iter().find(|point| point.0 > at && point.1 > had)?;
        let last =
            served[1].iter().find(|point| point.0 >= left && point.1 >= had).map_or(left, |point| point.0);
        Some(Lent {
            after_100_ms: share(&served[0], last + 100 * MS, last + 100 * MS + SECOND / 2),
            share: share(&served[0], at - SECOND, at),
            borrower_over: share(&served[0], first + PERIOD, first + PERIOD + SECOND / 2) - WITH_OWNER,
            owner_lacks: f64::from(OWNER) - share(&served[1], first, first + SECOND),
        })
    };
    Ok(turns.into_iter().filter_map(of).collect())
}

/// How much longer than its work a burst takes beside one that wants all of the GPU. A p99 of the 230 bursts of one round would be
/// the third worst of them, which on a machine of two processors is its doing in one round of four.
pub(super) fn priority(stage: &Stage, rounds: u32) -> Result<()> {
    let stage = &stage.lasting(Duration::from_secs(12) * rounds);
    for (name, priority) in [("without", 0), ("with", 1)] {
        let late = precede(stage, priority, |_| Ok(()))?;
        let name = |what: &str| format!("policy_priority_{name}_{what}");
        line(&name("bursts"), late.bursts, "number");
        line(&name("late_p50"), late.p50, "ms");
        line(&name("late_p99"), late.p99, "ms");
        if priority > 0 {
            bar(&name("late_p99"), late.p99, REACTION, "ms");
        }
        line(&name("other_share"), late.other, "%");
    }
    Ok(())
}

/// Bursts of the window, how late they were in ms, and what the other had in per cent.
pub(super) struct Late {
    bursts: f64,
    p50: f64,
    pub(super) p99: f64,
    other: f64,
}

/// Bursts of one with that priority, beside one of low priority that wants all of the GPU.
pub(super) fn precede(
    stage: &Stage,
    priority: u32,
    mut meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<Late> {
    let high = Compute { priority, ..NONE };
    let mut tenants = vec![stage.tenant(0, Some(high), "bursts")?, stage.tenant(1, Some(NONE), "1ms")?];
    seen();
    let served = stage.watch(&mut tenants, |_, since| meanwhile(since))?;
    let mut words = Vec::new();
    for tenant in tenants {
        words.push(tenant.end()?);
    }
    let late = |what: &str| Ok::<f64, anyhow::Error>(said(&words[0], what)? / 1e6 - BURST);
    Ok(Late {
        bursts: said(&words[0], "bursts")?,
        p50: late("burst_p50")?,
        p99: late("burst_p99")?,
        other: of_window(stage, &served[1]),
    })
}

/// The agent is killed while tenants work, and comes back; or another one waits to take its place.
pub(super) fn lost(stage: &Stage, points: f64, burst: Duration) -> Result<()> {
    // Guarantees and ceilings: three that get a part each, and one that borrows a little.
    const ASKED: [(u32, u32); 4] = [(20, 20), (30, 30), (35, 35), (5, 15)];
    let stage = &stage.lasting(Duration::from_secs(14));
    let kernel = shape("1ms")?.longest_ms;
    for (name, gap) in [
        ("killed", Some(Duration::from_millis(2500))),
        ("killed_long", Some(Duration::from_secs(6))),
        ("upgraded", None),
    ] {
        let agents = RefCell::new(vec![Agent::start(stage)?]);
        let mut tenants = Vec::new();
        for (at, (cores, ceiling)) in ASKED.into_iter().enumerate() {
            let compute = stage.fixed(cores)?.map(|fixed| Compute { ceiling, ..fixed });
            tenants.push(stage.tenant(at, compute, "1ms")?);
        }
        tenants.push(stage.tenant(ASKED.len(), Some(NONE), "1ms")?);
        let lost = stage.before + Duration::from_secs(2);
        let (mut is_lost, mut is_back, mut back) = (false, false, 0);
        seen();
        let served = stage.watch(&mut tenants, |_, since| {
            if gap.is_none() && !is_back && since >= lost {
                agents.borrow_mut().push(Agent::start(stage)?);
                is_back = true;
            }
            if !is_lost && since >= lost + Duration::from_millis(500) {
                drop(agents.borrow_mut().remove(0));
                (is_lost, back) = (true, divvy_sim::ledger::now());
            }
            if let Some(gap) = gap
                && !is_back
                && since >= lost + gap
            {
                agents.borrow_mut().push(Agent::start(stage)?);
                (is_back, back) = (true, divvy_sim::ledger::now());
            }
            Ok(())
        })?;
        tenants.into_iter().try_for_each(|tenant| tenant.end().map(drop))?;
        let (mut over, mut lacks) = (Vec::new(), Vec::new());
        for ((cores, ceiling), points) in ASKED.into_iter().zip(&served) {
            let (opens, ends) = stage.opens(points);
            over.push(
                most_in_100_ms(points, opens) / 1e6 - f64::from(ceiling) - burst.as_secs_f64() * 1e3 - kernel,
            );
            lacks.push(f64::from(cores) - share(points, back + SECOND, (back + 4 * SECOND).min(ends)));
        }
        let name = |what: &str| format!("policy_agent_{name}_{what}");
        line(&name("over_in_100ms"), percentile(&over, 1.0), "ms");
        bar(&name("over_in_100ms"), percentile(&over, 1.0), 0.0, "ms");
        line(&name("lacks_after_1s"), percentile(&lacks, 1.0), "points");
        bar(&name("lacks_after_1s"), percentile(&lacks, 1.0), points, "points");
    }
    Ok(())
}

/// The most nanoseconds of any 100 ms from then on, by the looks.
fn most_in_100_ms(points: &[Point], from: u64) -> f64 {
    let of = |(at, had): &Point| {
        let end = points.iter().find(|point| point.0 >= at + 100 * MS)?;
        // A look that came late saw more than 100 ms.
        Some((end.1 - had) as f64 * (100 * MS) as f64 / (end.0 - at) as f64)
    };
    points.iter().filter(|point| point.0 >= from).filter_map(of).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_of_100_ms_is_found_wherever_it_lies() {
        let points: Vec<Point> =
            [(0, 0), (50, 10), (100, 20), (150, 60), (200, 100), (250, 105), (300, 110), (350, 115)]
                .map(|(at, had)| (at * MS, had * MS))
                .into();
        assert_eq!(most_in_100_ms(&points, 0), 80.0 * MS as f64);
        assert_eq!(most_in_100_ms(&points, 150 * MS), 45.0 * MS as f64);
    }
}
