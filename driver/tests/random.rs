//! Random operations on a node, checked against a model.
//!
//! Operations are drawn from a seed: prepare, unprepare, kills, reboots, VM moves, drains, GPU resets, losses
//! and XIDs, faults and hangs of NVML and `nvidia-smi`, API server outages. After each one, the answers, the
//! GPUs and the device nodes in the CDI files must agree with the model. At each `Settle` the node must
//! equal the model exactly. A failing sequence is reduced to a short one.
//! `DIVVY_RANDOM_OPERATIONS` sets their number (default 1000), `DIVVY_RANDOM_SEED` the seed (default: from
//! the clock, printed).
#![allow(clippy::unwrap_used)]

#[path = "random/invariants.rs"]
mod invariants;
#[path = "random/model.rs"]
mod model;
#[path = "random/operations.rs"]
mod operations;
#[path = "random/runner.rs"]
mod runner;

#[path = "harness/device_nodes.rs"]
mod device_nodes;
mod harness;
#[path = "harness/programs.rs"]
mod programs;
#[path = "harness/sequence.rs"]
mod sequence;
#[path = "harness/supervisor.rs"]
mod supervisor;

use operations::Operation;
use runner::Runner;
use sequence::{Failure, Rng, env_number, seed_from_clock, shrink};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Number of operations without `DIVVY_RANDOM_OPERATIONS`: short enough for every run of the test suite.
const DEFAULT_OPERATIONS: u64 = 1000;
/// Operations on one node. The next ones run on a new node, so that a failing sequence is short enough to
/// repeat.
const OPERATIONS_PER_NODE: usize = 500;
/// Time limit for the node to settle. It is shorter while a failing sequence is reduced, because every run
/// that fails ends with this wait.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);
const SHRINK_SETTLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Statistics for the summary.
#[derive(Default)]
struct Counts {
    operations: BTreeMap<&'static str, (usize, Duration)>,
    faults_hit: usize,
    calls_held: usize,
}

#[tokio::test]
async fn node_state_matches_the_model_under_random_operations() {
    let count = env_number("DIVVY_RANDOM_OPERATIONS").unwrap_or(DEFAULT_OPERATIONS) as usize;
    let seed = env_number("DIVVY_RANDOM_SEED").unwrap_or_else(seed_from_clock);
    let settings = format!("DIVVY_RANDOM_SEED={seed} DIVVY_RANDOM_OPERATIONS={count}");
    println!("{settings}");
    let mut rng = Rng::new(seed);
    let operations: Vec<Operation> = (0..count).map(|_| Operation::draw(&mut rng)).collect();
    let begun = Instant::now();
    let mut counts = Counts::default();
    for (round, operations) in operations.chunks(OPERATIONS_PER_NODE).enumerate() {
        if let Err(failure) = run_on_new_node(operations, SETTLE_TIMEOUT, &mut counts).await {
            let rerun = async |operations: &[Operation]| {
                run_on_new_node(operations, SHRINK_SETTLE_TIMEOUT, &mut Counts::default()).await
            };
            shrink(
                &format!("{settings}, after the first {}", round * OPERATIONS_PER_NODE),
                operations,
                failure,
                rerun,
            )
            .await;
        }
        println!("{} operations in {:?}", round * OPERATIONS_PER_NODE + operations.len(), begun.elapsed());
    }
    for (name, (calls, time)) in counts.operations {
        println!("{calls:6} {name:12} {:8.1} ms each", time.as_secs_f64() * 1000.0 / calls as f64);
    }
    println!("{} faults hit a call, {} calls hung", counts.faults_hit, counts.calls_held);
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
    counts.faults_hit += runner.faults_hit;
    counts.calls_held += runner.calls_held;
    runner.run(&Operation::ReleaseAll).await.map_err(|cause| runner.failed(operations.len(), cause))
}
