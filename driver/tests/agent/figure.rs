//! What an audit costs; the figure is for people.

use super::world::{MIB, World};

/// `cargo test -p divvy-driver --release --test agent -- --nocapture figure` prints it.
#[tokio::test]
async fn figure_of_64_honest_processes_of_which_nothing_is_said() {
    let world = World::up("580.95.05");
    let mut tenants = Vec::new();
    let pages: Vec<_> = (0..8).map(|claim| world.share(&format!("claim-{claim}"), 9000)).collect();
    for (at, page) in pages.iter().enumerate() {
        for _ in 0..8 {
            let tenant = world.tenant(&format!("claim-{at}"), 1000);
            assert!(page.charge(page.register(&tenant.who()), 1000 * MIB));
            tenants.push(tenant);
        }
    }
    let mut agent = world.agent("none").await;
    // The first two write the lines of all slots.
    agent.finds_nothing(2).await;
    let (before, mut took) = (cpu(), agent.finds_nothing(ROUNDS).await);
    took.sort();
    println!(
        "64 processes of 8 shares: CPU of an audit {:.1} ms (mean of {ROUNDS}), wall {:.1} ms (median)",
        (cpu() - before) as f64 / ROUNDS as f64,
        took[ROUNDS / 2].as_secs_f64() * 1e3
    );
    for (at, tenant) in tenants.iter().enumerate() {
        let slots = pages[at / 8].lines();
        assert!(
            slots.contains(&tenant.pid()),
            "process {} was not found to be the owner of a slot",
            tenant.pid()
        );
    }
}

const ROUNDS: usize = 5;

/// CPU time of this process in milliseconds; fields 14 and 15 are in ticks of 10 ms.
fn cpu() -> u64 {
    let usage = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = usage.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
    (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()) * 10
}
