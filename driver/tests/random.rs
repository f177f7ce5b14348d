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

use operations::{Dice, Operation};
use run::{Failure, Runner};
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

/// A world of its own for so many operations: a failure is then quickly walked again.
const ROUND: usize = 500;
/// How long a node may take to settle; less while a failing sequence is cut
/// down, because each of its walks ends with that wait.
const PATIENCE: Duration = Duration::from_secs(30);
const IMPATIENCE: Duration = Duration::from_secs(4);
/// For cutting a failing sequence down.
const SHRINKING: Duration = Duration::from_secs(180);

/// What happened, for the summary.
#[derive(Default)]
struct Counts {
    operations: BTreeMap<&'static str, (usize, Duration)>,
    struck: usize,
    held: usize,
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

#[tokio::test]
async fn whatever_happens_the_node_is_what_the_model_says() {
    let wanted = number("DIVVY_RANDOM_OPERATIONS").unwrap_or(1000) as usize;
    let clock = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos().into();
    let seed = number("DIVVY_RANDOM_SEED").unwrap_or_else(clock);
    println!("DIVVY_RANDOM_SEED={seed} DIVVY_RANDOM_OPERATIONS={wanted}");
    let mut dice = Dice::new(seed);
    let operations: Vec<Operation> = (0..wanted).map(|_| Operation::draw(&mut dice)).collect();
    let begun = Instant::now();
    let mut counts = Counts::default();
    for (round, operations) in operations.chunks(ROUND).enumerate() {
        if let Err(failure) = run(operations, PATIENCE, &mut counts).await {
            shrink(seed, round * ROUND, operations, failure).await;
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

/// Cuts ever smaller pieces out of the sequence for as long as it still fails.
async fn shrink(seed: u64, skipped: usize, operations: &[Operation], mut failure: Failure) -> ! {
    println!("operation {} failed, cutting the sequence down: {}", skipped + failure.at, failure.why);
    let begun = Instant::now();
    let mut left: Vec<Operation> = operations.iter().take(failure.at + 1).cloned().collect();
    let mut piece = left.len().div_ceil(2);
    while piece > 0 && begun.elapsed() < SHRINKING {
        let mut at = 0;
        while at < left.len() && begun.elapsed() < SHRINKING {
            let mut tried = left.clone();
            tried.drain(at..(at + piece).min(left.len()));
            match run(&tried, IMPATIENCE, &mut Counts::default()).await {
                Err(fails) => {
                    tried.truncate(fails.at + 1);
                    (left, failure) = (tried, fails);
                }
                Ok(()) => at += piece,
            }
        }
        piece /= 2;
    }
    let steps: String = left.iter().map(|operation| format!("  {operation:?}\n")).collect();
    panic!(
        "{}\nDIVVY_RANDOM_SEED={seed}; the shortest sequence that was seen to fail:\n{steps}{}",
        failure.why, failure.log
    );
}
