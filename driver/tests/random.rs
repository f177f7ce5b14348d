//! Anything in any order, against a model that knows what must come of it.
//!
//! A sequence of operations is drawn from a seed: claims are prepared, asked
//! for again and released, some in each other's way on purpose; the daemon is
//! killed, also in the middle of an NVML call; the machine boots, with GPUs
//! missing or back; GPUs are reset and lost; NVML calls fail or hang; the API
//! server goes away. After each operation the answers must be what the model
//! allows; two modes may never be on one GPU; whenever the dust has settled the
//! node must be exactly what the model says, and nothing else may be left. A
//! keeper that obeys at once runs beside it. A sequence that fails is cut down
//! to the shortest that still fails.
//!
//! ```text
//! DIVVY_RANDOM_OPERATIONS   how many (1000)
//! DIVVY_RANDOM_SEED         which (drawn from the clock, and printed)
//! ```
#![allow(clippy::unwrap_used)]

#[path = "random/call.rs"]
mod call;
#[path = "harness/calls.rs"]
mod calls;
#[path = "harness/files.rs"]
mod files;
#[path = "random/model.rs"]
mod model;
#[path = "random/operations.rs"]
mod operations;
#[path = "random/run.rs"]
mod run;
#[path = "random/settled.rs"]
mod settled;

mod harness;
#[path = "harness/keeper.rs"]
mod keeper;
#[path = "harness/programs.rs"]
mod programs;
#[path = "harness/sequence.rs"]
mod sequence;

use operations::Operation;
use run::Runner;
use sequence::{Dice, Failure, any_seed, number, shrink};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A world of its own for so many operations: a failure is then quickly walked again.
const ROUND: usize = 500;
/// How long a node may take to settle; less while a failing sequence is cut
/// down, because each of its walks ends with that wait.
const PATIENCE: Duration = Duration::from_secs(30);
const IMPATIENCE: Duration = Duration::from_secs(4);

/// What happened, for the summary.
#[derive(Default)]
struct Counts {
    operations: BTreeMap<&'static str, (usize, Duration)>,
    struck: usize,
    held: usize,
}

#[tokio::test]
async fn whatever_happens_the_node_is_what_the_model_says() {
    let wanted = number("DIVVY_RANDOM_OPERATIONS").unwrap_or(1000) as usize;
    let seed = number("DIVVY_RANDOM_SEED").unwrap_or_else(any_seed);
    let named = format!("DIVVY_RANDOM_SEED={seed} DIVVY_RANDOM_OPERATIONS={wanted}");
    println!("{named}");
    let mut dice = Dice::new(seed);
    let operations: Vec<Operation> = (0..wanted).map(|_| Operation::draw(&mut dice)).collect();
    let begun = Instant::now();
    let mut counts = Counts::default();
    for (round, operations) in operations.chunks(ROUND).enumerate() {
        if let Err(failure) = run(operations, PATIENCE, &mut counts).await {
            let again =
                async |operations: &[Operation]| run(operations, IMPATIENCE, &mut Counts::default()).await;
            shrink(&format!("{named}, behind the first {}", round * ROUND), operations, failure, again).await;
        }
        println!("{} operations in {:?}", round * ROUND + operations.len(), begun.elapsed());
    }
    for (name, (count, time)) in counts.operations {
        println!("{count:6} {name:12} {:8.1} ms each", time.as_secs_f64() * 1000.0 / count as f64);
    }
    println!("{} faults struck, {} calls hung", counts.struck, counts.held);
}

async fn run(operations: &[Operation], patience: Duration, counts: &mut Counts) -> Result<(), Failure> {
    let mut runner = Runner::up(patience).await;
    for (at, operation) in operations.iter().enumerate() {
        let begun = Instant::now();
        runner.run(operation).await.map_err(|why| runner.failed(at, why))?;
        let count = counts.operations.entry(operation.name()).or_default();
        *count = (count.0 + 1, count.1 + begun.elapsed());
    }
    counts.struck += runner.struck;
    counts.held += runner.held;
    runner.run(&Operation::ReleaseAll).await.map_err(|why| runner.failed(operations.len(), why))
}
