//! Plays cells and says what came of them.
//!
//! A cell takes ten seconds, in which its tenants sleep most of the time, so several can be played at once, each on a node
//! of its own. On a machine with few processors they get in each other's way all the same: what is off there, or
//! stood still for too long, is played again alone, and both are told. Who waits for each launch, as CUDA programs do, spins, and has what it
//! asked for only where it has a processor when its kernel ends: such cells are played one after the other.

use super::cells::{self, Cell, SHAPES, UNLIMITED};
use super::tenants::{Got, Played, Stage};
use super::{Arguments, POINTS, Which};
use crate::stats::{bar, line, percentile};
use anyhow::{Result, ensure};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Duration;

/// The request whose longest stall has a bar.
const STALLED: u32 = 30;
/// So many points less than its part nobody has twice, on a machine that is not much too slow.
const LACKS: f64 = 2.0 * POINTS;

/// Plays the cells that are asked for; `up` makes a node for them.
pub(super) fn play(
    arguments: &Arguments,
    up: impl Fn() -> Result<Stage> + Sync,
    burst: Duration,
) -> Result<()> {
    let chosen = chosen(arguments);
    ensure!(!chosen.is_empty(), "no cell is as asked");
    let (spinning, sleeping): (Vec<Cell>, Vec<Cell>) = chosen.into_iter().partition(|cell| cell.shape.waits);
    let waits = |shape: &&cells::Shape| spinning.iter().any(|cell| cell.shape == *shape);
    let unlimited: Vec<Cell> =
        SHAPES.iter().filter(waits).map(|shape| Cell { shape, requests: vec![UNLIMITED] }).collect();
    let (mut sum, mut wrong, mut again) = (Sum::default(), Vec::new(), Vec::new());
    let (mut cells, mut cells_off, mut blamed) = (0, 0, 0);
    let mut ended = |cell: &Cell, is_measure: bool, Played { got, told: blame }: Played| {
        if !blame.is_empty() {
            println!("compute_{}_blamed\t{}\ttext", cell.name(), blame.trim_start_matches("; "));
            blamed += 1;
            wrong.push(format!("{}: blamed", cell.name()));
        }
        if is_measure {
            got.iter().for_each(|got| {
                line(&format!("compute_{}_unlimited_share", cell.shape.name), got.share, "%")
            });
            return;
        }
        cells += 1;
        told(cell, "", &got, burst);
        if by_points(cell, &got).any(|points| points > POINTS) {
            wrong.push(format!("{}: more", cell.name()));
        }
        let of_cell = Sum::of(cell, &got, burst);
        cells_off += usize::from(of_cell.off() > 0);
        if of_cell.off() + of_cell.stalled() > 0 {
            again.push(cell.clone());
        }
        sum.add(of_cell);
    };
    let at_once = arguments.at_once as usize;
    played(&sleeping, &up, at_once, |at, got| ended(&sleeping[at], false, got))?;
    played(&unlimited, &up, 1, |at, got| ended(&unlimited[at], true, got))?;
    played(&spinning, &up, 1, |at, got| ended(&spinning[at], false, got))?;
    let mut sum_again = Sum::default();
    if arguments.at_once > 1 || arguments.check {
        played(&again, &up, 1, |at, Played { got, .. }| {
            told(&again[at], "_again", &got, burst);
            if by_points(&again[at], &got).any(|points| points < -LACKS) {
                wrong.push(format!("{}: less, twice", again[at].name()));
            }
            sum_again.add(Sum::of(&again[at], &got, burst));
        })?;
    }
    line("compute_cells", f64::from(cells), "cells");
    line("compute_cells_off", cells_off as f64, "cells");
    line("compute_cells_blamed", f64::from(blamed), "cells");
    bar("compute_cells_blamed", f64::from(blamed), 0.0, "cells");
    sum.told("compute");
    if !sum_again.errors.is_empty() {
        sum_again.told("compute_again");
    }
    bar("compute_largest_error", percentile(&sum.errors, 1.0), POINTS, "points");
    if !sum.stalls.is_empty() {
        bar("compute_longest_stall", percentile(&sum.stalls, 1.0), 1.0, "of its bar");
    }
    ensure!(
        !arguments.check || wrong.is_empty(),
        "shares had not their part, or were blamed for it: {}",
        wrong.join(", ")
    );
    Ok(())
}

/// Plays cells, so many at once; `then` is told which has ended and what its tenants got, as they end. The first that
/// fails ends it, when those that are being played are over.
fn played(
    cells: &[Cell],
    up: impl Fn() -> Result<Stage> + Sync,
    at_once: usize,
    mut then: impl FnMut(usize, Played),
) -> Result<()> {
    let (next, up) = (&AtomicUsize::new(0), &up);
    std::thread::scope(|scope| {
        let (tell, ended) = mpsc::channel();
        for _ in 0..at_once.min(cells.len()) {
            let tell = tell.clone();
            scope.spawn(move || {
                let play = |stage: &Stage| {
                    let at = next.fetch_add(1, Relaxed);
                    let got = stage.play(cells.get(at)?).map(|played| (at, played));
                    // Nobody listens any more where another has failed.
                    tell.send(got).ok()
                };
                match up() {
                    Ok(stage) => while play(&stage).is_some() {},
                    Err(error) => drop(tell.send(Err(error))),
                }
            });
        }
        drop(tell);
        ended.into_iter().try_for_each(|got| got.map(|(at, played)| then(at, played)))
    })
}

/// The cells that were asked for.
fn chosen(arguments: &Arguments) -> Vec<Cell> {
    let all = if !arguments.requests.is_empty() {
        let each = |requests: &Vec<u32>| {
            let requests = requests.clone();
            SHAPES.iter().map(move |shape| Cell { shape, requests: requests.clone() })
        };
        arguments.requests.iter().flat_map(each).collect()
    } else if let Which::All = arguments.cells {
        cells::every()
    } else {
        let time = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
        let seed = arguments.seed.unwrap_or_else(|| time.map_or(1, |time| time.as_secs()));
        println!("compute_seed\t{seed}\tnumber");
        cells::few(seed)
    };
    let asked = |cell: &Cell| {
        (arguments.shapes.is_empty() || arguments.shapes.iter().any(|name| name == cell.shape.name))
            && (arguments.tenants.is_empty() || arguments.tenants.contains(&cell.requests.len()))
    };
    all.into_iter().filter(asked).collect()
}

/// Points between what a tenant asked for and what it got; none of one without a share.
fn error(request: u32, got: &Got) -> Option<f64> {
    (request != UNLIMITED).then(|| (got.share - f64::from(request)).abs())
}

/// How many points more than it asked for each tenant got, of those that have a share.
fn by_points(cell: &Cell, got: &[Got]) -> impl Iterator<Item = f64> {
    let tenants = cell.requests.iter().zip(got).filter(|(request, _)| **request != UNLIMITED);
    tenants.map(|(request, got)| got.share - f64::from(*request))
}

/// The longest that a launch may stand still at 30 %, in milliseconds.
fn longest_stall(cell: &Cell, burst: Duration) -> f64 {
    2.0 * burst.as_secs_f64() * 1e3 + cell.shape.longest_ms
}

/// What many shares come to.
#[derive(Default)]
struct Sum {
    /// Points, of each tenant that has a share.
    errors: Vec<f64>,
    /// The longest stall of each that has 30 %, in terms of what it may be.
    stalls: Vec<f64>,
}

impl Sum {
    fn of(cell: &Cell, got: &[Got], burst: Duration) -> Self {
        let most = longest_stall(cell, burst);
        let tenants = || cell.requests.iter().zip(got);
        let stalled = tenants().filter(|(request, _)| **request == STALLED);
        Self {
            errors: by_points(cell, got).map(f64::abs).collect(),
            stalls: stalled.map(|(_, got)| got.stall_ns / 1e6 / most).collect(),
        }
    }

    fn add(&mut self, other: Self) {
        self.errors.extend(other.errors);
        self.stalls.extend(other.stalls);
    }

    fn off(&self) -> usize {
        self.errors.iter().filter(|error| **error > POINTS).count()
    }

    fn stalled(&self) -> usize {
        self.stalls.iter().filter(|stall| **stall > 1.0).count()
    }

    fn told(&self, name: &str) {
        line(&format!("{name}_shares"), self.errors.len() as f64, "shares");
        line(&format!("{name}_shares_off"), self.off() as f64, "shares");
        // A share that is the whole GPU has no error.
        if !self.errors.is_empty() {
            let squares: f64 = self.errors.iter().map(|error| error * error).sum();
            let mean = (squares / self.errors.len() as f64).sqrt();
            line(&format!("{name}_error_root_mean_square"), mean, "points");
            line(&format!("{name}_largest_error"), percentile(&self.errors, 1.0), "points");
        }
        if !self.stalls.is_empty() {
            line(&format!("{name}_shares_of_30"), self.stalls.len() as f64, "shares");
            line(&format!("{name}_shares_stalled"), self.stalled() as f64, "shares");
            line(&format!("{name}_longest_stall"), percentile(&self.stalls, 1.0), "of its bar");
        }
    }
}

/// The lines of a cell, and of when it was played.
fn told(cell: &Cell, when: &str, got: &[Got], burst: Duration) {
    for (at, (request, got)) in cell.requests.iter().zip(got).enumerate() {
        let name = |what: &str| format!("compute_{}{when}_{at}_{what}", cell.name());
        line(&name("share"), got.share, "%");
        if let Some(error) = error(*request, got) {
            line(&name("error"), error, "points");
            bar(&name("error"), error, POINTS, "points");
            line(&name("start_error"), got.early - f64::from(*request), "points");
        }
        line(&name("share_100ms_p5"), percentile(&got.windows, 0.05), "%");
        line(&name("share_100ms_p95"), percentile(&got.windows, 0.95), "%");
        let stall = got.stall_ns / 1e6;
        line(&name("stall"), stall, "ms");
        if *request == STALLED {
            bar(&name("stall"), stall, longest_stall(cell, burst), "ms");
        }
        line(&name("start_stall"), got.early_stall_ns / 1e6, "ms");
        line(&name("launches"), got.launches_per_second, "1/s");
        line(&name("cpu"), got.cpu, "%");
    }
}
