//! Never two modes on one GPU: a storm of claims on a whole node.
//!
//! Claims of every kind are drawn from a seed, allocated by the offline
//! allocator over the slices that the node daemon has really published, prepared,
//! used by processes and released. Some are taken from the scheduler while the
//! node still has them, some get devices that no scheduler would give; the node
//! daemon, the keeper and what it keeps are killed, also in the middle of calls;
//! calls fail, GPUs are reset, the machine boots, the administrator changes his
//! mind. GPUs of four kinds and real `divvy-node` and `divvy-keeper` processes
//! are in it. Held all the time:
//!
//! - a GPU shows one mode at most, and that of the claims that are prepared on it;
//! - the scheduler never gives one thing twice;
//! - what admission lets in and the scheduler allocates is prepared, unless
//!   something is known to be wrong or in the way;
//! - a process with a prepared claim gets a context;
//! - whenever the dust has settled the node is exactly what its claims need, and
//!   after the last of them every GPU is whole.
//!
//! A sequence that fails is cut down to the shortest that still fails.
//!
//! ```text
//! DIVVY_STORM_OPERATIONS   how many (1000)
//! DIVVY_STORM_SEED         which (drawn from the clock, and printed)
//! ```
#![allow(clippy::unwrap_used)]

#[path = "storm/call.rs"]
mod call;
#[path = "harness/calls.rs"]
mod calls;
#[path = "harness/files.rs"]
mod files;
mod harness;
#[path = "storm/look.rs"]
mod look;
#[path = "storm/model.rs"]
mod model;
#[path = "storm/operations.rs"]
mod operations;
#[path = "storm/processes.rs"]
mod processes;
#[path = "harness/programs.rs"]
mod programs;
#[path = "storm/run.rs"]
mod run;
#[path = "storm/scheduler.rs"]
mod scheduler;
#[path = "harness/sequence.rs"]
mod sequence;
#[path = "storm/settle.rs"]
mod settle;
#[path = "storm/trouble.rs"]
mod trouble;
#[path = "storm/usage.rs"]
mod usage;
#[path = "storm/wish.rs"]
mod wish;

use operations::Operation;
use run::Runner;
use sequence::{Dice, Failure, any_seed, number, shrink};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A world of its own for so many operations: a failure is then quickly walked again.
const ROUND: usize = 500;
/// How long a node may take to settle; less while a failing sequence is cut
/// down, because each of its walks ends with that wait.
const PATIENCE: Duration = Duration::from_secs(40);
const IMPATIENCE: Duration = Duration::from_secs(12);

/// What happened, for the summary.
#[derive(Default)]
struct Counts {
    operations: BTreeMap<&'static str, (usize, Duration)>,
    tally: BTreeMap<String, usize>,
}

#[tokio::test]
async fn no_gpu_is_ever_in_two_modes() {
    let wanted = number("DIVVY_STORM_OPERATIONS").unwrap_or(1000) as usize;
    let seed = number("DIVVY_STORM_SEED").unwrap_or_else(any_seed);
    let named = format!("DIVVY_STORM_SEED={seed} DIVVY_STORM_OPERATIONS={wanted}");
    println!("{named}");
    let mut dice = Dice::new(seed);
    let begun = Instant::now();
    let mut counts = Counts::default();
    for done in (0..wanted).step_by(ROUND) {
        let count = ROUND.min(wanted - done);
        let operations: Vec<Operation> = (0..count).map(|_| Operation::draw(&mut dice)).collect();
        if let Err(failure) = walk(&operations, PATIENCE, &mut counts).await {
            let again =
                async |operations: &[Operation]| walk(operations, IMPATIENCE, &mut Counts::default()).await;
            shrink(&format!("{named}, behind the first {done}"), &operations, failure, again).await;
        }
        println!("{} operations in {:?}", done + count, begun.elapsed());
    }
    for (name, (count, time)) in &counts.operations {
        println!("{count:6} {name:12} {:8.1} ms each", time.as_secs_f64() * 1000.0 / *count as f64);
    }
    for (what, count) in &counts.tally {
        println!("{count:6} {what}");
    }
    if wanted >= 1000 {
        for mode in ["whole", "mig", "timeslice", "mps"] {
            assert!(
                counts.tally.contains_key(&format!("prepared: {mode}")),
                "no claim of mode {mode} in the storm"
            );
        }
    }
}

async fn walk(operations: &[Operation], patience: Duration, counts: &mut Counts) -> Result<(), Failure> {
    let mut runner = Runner::up(patience).await;
    for (at, operation) in operations.iter().enumerate() {
        let begun = Instant::now();
        runner.run(operation).await.map_err(|why| runner.failed(at, why))?;
        let count = counts.operations.entry(operation.name()).or_default();
        *count = (count.0 + 1, count.1 + begun.elapsed());
    }
    runner.run(&Operation::ReleaseAll).await.map_err(|why| runner.failed(operations.len(), why))?;
    for (what, count) in std::mem::take(&mut runner.tally) {
        *counts.tally.entry(what).or_default() += count;
    }
    Ok(())
}
