//! Random claims of every kind on a whole node: no GPU is ever in two modes.
//!
//! The offline allocator allocates claims on the slices that the real `divvy-node` publishes.
//! Processes use them, with the real `divvy-mps-supervisor`, on GPUs of four models.
//! `no_gpu_is_ever_in_two_modes` lists the invariants. A failing sequence is reduced to a short
//! one. `DIVVY_STORM_OPERATIONS` sets the number of operations (default 1000), `DIVVY_STORM_SEED`
//! the seed (default: from the clock, printed).
#![allow(clippy::unwrap_used)]

#[path = "storm/claim_spec.rs"]
mod claim_spec;
#[path = "harness/device_nodes.rs"]
mod device_nodes;
mod harness;
#[path = "storm/invariants.rs"]
mod invariants;
#[path = "storm/model.rs"]
mod model;
#[path = "storm/operations.rs"]
mod operations;
#[path = "storm/processes.rs"]
mod processes;
#[path = "harness/programs.rs"]
mod programs;
#[path = "storm/runner.rs"]
mod runner;
#[path = "storm/scheduler.rs"]
mod scheduler;
#[path = "harness/sequence.rs"]
mod sequence;

use operations::Operation;
use runner::Runner;
use sequence::{Failure, Rng, env_number, seed_from_clock, shrink};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Number of operations without `DIVVY_STORM_OPERATIONS`: short enough for every run of the test suite.
const DEFAULT_OPERATIONS: usize = 1000;
/// Operations on one node. The next ones run on a new node, so that a failing sequence is short enough to
/// repeat.
const OPERATIONS_PER_NODE: usize = 500;
/// Time limit for the node to settle. It is shorter while a failing sequence is reduced, because every run
/// that fails ends with this wait.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(40);
const SHRINK_SETTLE_TIMEOUT: Duration = Duration::from_secs(12);

/// Statistics for the summary.
#[derive(Default)]
struct Counts {
    operations: BTreeMap<&'static str, (usize, Duration)>,
    /// Number of events, by name.
    tally: BTreeMap<String, usize>,
}

/// After each operation, these invariants hold.
///
/// - A GPU shows at most one mode, which is the mode of the claims that are prepared on it.
///
/// - A CDI file has the device nodes of its claim's GPUs only, and no node is in the files of two claims that
///   exclude each other.
///
/// - The scheduler allocates no device or share twice.
///
/// - A claim that the scheduler allocates is prepared, unless its GPUs have a failure or another claim holds
///   them.
///
/// - A process with a prepared claim gets a CUDA context.
///
/// After each `Settle`, the node is exactly in the state that its claims need. After the last
/// claim, every GPU can be allocated whole.
#[tokio::test]
async fn no_gpu_is_ever_in_two_modes() {
    let total = env_number("DIVVY_STORM_OPERATIONS").map_or(DEFAULT_OPERATIONS, |number| number as usize);
    let seed = env_number("DIVVY_STORM_SEED").unwrap_or_else(seed_from_clock);
    let settings = format!("DIVVY_STORM_SEED={seed} DIVVY_STORM_OPERATIONS={total}");
    println!("{settings}");
    let mut rng = Rng::new(seed);
    let begun = Instant::now();
    let mut counts = Counts::default();
    for done in (0..total).step_by(OPERATIONS_PER_NODE) {
        let count = OPERATIONS_PER_NODE.min(total - done);
        let operations: Vec<Operation> = (0..count).map(|_| Operation::draw(&mut rng)).collect();
        if let Err(failure) = run_on_new_node(&operations, SETTLE_TIMEOUT, &mut counts).await {
            let rerun = async |operations: &[Operation]| {
                run_on_new_node(operations, SHRINK_SETTLE_TIMEOUT, &mut Counts::default()).await
            };
            shrink(&format!("{settings}, after the first {done}"), &operations, failure, rerun).await;
        }
        println!("{} operations in {:?}", done + count, begun.elapsed());
    }
    for (name, (count, time)) in &counts.operations {
        println!("{count:6} {name:12} {:8.1} ms each", time.as_secs_f64() * 1000.0 / *count as f64);
    }
    for (event, count) in &counts.tally {
        println!("{count:6} {event}");
    }
    if total >= DEFAULT_OPERATIONS {
        for mode in ["whole", "share", "mig", "mig share", "timeslice", "mps"] {
            assert!(
                counts.tally.contains_key(&format!("prepared: {mode}")),
                "no claim of mode {mode} was prepared"
            );
        }
    }
}

async fn run_on_new_node(
    operations: &[Operation],
    settle_timeout: Duration,
    counts: &mut Counts,
) -> Result<(), Failure> {
    let mut runner = Runner::new(settle_timeout).await;
    for (at, operation) in operations.iter().enumerate() {
        let begun = Instant::now();
        runner.run(operation).await.map_err(|cause| runner.failed(at, cause))?;
        let count = counts.operations.entry(operation.name()).or_default();
        *count = (count.0 + 1, count.1 + begun.elapsed());
    }
    runner.run(&Operation::ReleaseAll).await.map_err(|cause| runner.failed(operations.len(), cause))?;
    for (event, count) in std::mem::take(&mut runner.tally) {
        *counts.tally.entry(event).or_default() += count;
    }
    Ok(())
}
