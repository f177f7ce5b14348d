//! Random opens, closes, claims, releases, kills and restarts against the deciders of the daemon and of
//! the controller, in simulated time. The scheduler allocates with `divvy-alloc` from views of slices and
//! of claims that lag independently by up to 60 s, as do the views of the daemon and the controller.
//!
//! `DIVVY_REMOVAL_OPERATIONS` sets the number of operations, `DIVVY_REMOVAL_SEED` the seed (default: from
//! the clock, printed). With `DIVVY_REMOVAL_ORACLE` set, the allocations are compared with those of the
//! upstream allocator, which needs Go.
#![allow(clippy::unwrap_used, reason = "test helpers")]

#[path = "../slices/tests/common/mod.rs"]
mod gpus;
#[path = "removal_storm/oracle.rs"]
mod oracle;
#[path = "../../driver/tests/harness/sequence.rs"]
mod sequence;
#[path = "removal_storm/world.rs"]
mod world;

use sequence::{Rng, env_number, seed_from_clock};
use world::{Rules, World};

/// Operations without `DIVVY_REMOVAL_OPERATIONS`.
const OPERATIONS: u64 = 10_000;

fn storm(rules: Rules, seed: u64, operations: u64) -> Result<World, String> {
    let mut world = World::new(rules, Rng::new(seed));
    for operation in 0..operations {
        world.step().map_err(|why| format!("operation {operation}: {why}"))?;
    }
    world.settle()?;
    Ok(world)
}

fn settings() -> (u64, u64) {
    let seed = env_number("DIVVY_REMOVAL_SEED").unwrap_or_else(seed_from_clock);
    let operations = env_number("DIVVY_REMOVAL_OPERATIONS").unwrap_or(OPERATIONS);
    println!("DIVVY_REMOVAL_SEED={seed} DIVVY_REMOVAL_OPERATIONS={operations}");
    (seed, operations)
}

#[test]
fn no_overlapping_devices_are_allocated_or_held() {
    let (seed, operations) = settings();
    let keeps_problems = std::env::var_os("DIVVY_REMOVAL_ORACLE").is_some();
    let rules = Rules { keeps_problems, ..Rules::default() };
    let world = storm(rules, seed, operations).unwrap_or_else(|why| panic!("{why}"));
    println!("{}", world.statistics());
    assert!(operations < OPERATIONS || world.has_seen_everything(), "{}", world.statistics());
    if keeps_problems {
        oracle::compare(&world.problems);
    }
}

#[test]
fn claims_that_tolerate_the_taint_are_never_held_twice() {
    let (seed, operations) = settings();
    let rules = Rules { has_tolerant_claims: true, ..Rules::default() };
    let world = storm(rules, seed, operations).unwrap_or_else(|why| panic!("{why}"));
    println!("{}", world.statistics());
}

/// Checks that the storm finds the missing rule. `first` is a seed that found it; the next ones are
/// tried too, because any change of the storm changes its operations.
fn check_found(rules: Rules, first: u64, expected: &str) {
    let failed = (first..first + 20).find_map(|seed| storm(rules, seed, OPERATIONS).err());
    let why = failed.unwrap_or_else(|| panic!("{rules:?} was not found"));
    assert!(why.contains(expected), "{why}");
}

#[test]
fn storm_fails_without_the_delay() {
    check_found(Rules { has_delay: false, ..Rules::default() }, 7, "both allocated");
}

#[test]
fn storm_fails_if_any_approval_counts() {
    check_found(Rules { checks_id: false, ..Rules::default() }, 7, "both allocated");
}

#[test]
fn storm_fails_without_the_check_of_removed_devices() {
    let rules = Rules { has_tolerant_claims: true, checks_removed: false, ..Rules::default() };
    check_found(rules, 4, "prepared although");
}

#[test]
fn storm_fails_without_the_checks_of_prepare() {
    let without = Rules { checks_removed: false, checks_records: false, ..Rules::default() };
    check_found(Rules { has_tolerant_claims: true, ..without }, 3, "prepared");
}
