//! Measures the cost of an audit. The figure is printed, not checked.

use super::test_node::{MIB, TestNode};

/// `cargo test -p divvy-driver --release --test agent -- --nocapture figure` prints it.
#[tokio::test]
async fn figure_64_honest_processes_without_findings() {
    let node = TestNode::new("580.95.05");
    let mut tenants = Vec::new();
    let pages: Vec<_> = (0..8).map(|claim| node.share(&format!("claim-{claim}"), 9000)).collect();
    for (at, page) in pages.iter().enumerate() {
        for _ in 0..8 {
            let tenant = node.tenant(&format!("claim-{at}"), 1000);
            assert!(page.charge(page.register(&tenant.identity()), 1000 * MIB));
            tenants.push(tenant);
        }
    }
    let mut agent = node.agent("none").await;
    // The first two audits write the lines of all slots.
    agent.audits_without_findings(2).await;
    let (before, mut took) = (cpu(), agent.audits_without_findings(ROUNDS).await);
    took.sort();
    println!(
        "64 processes of 8 shares: CPU per audit {:.1} ms (mean of {ROUNDS}), wall {:.1} ms (median)",
        (cpu() - before) as f64 / ROUNDS as f64,
        took[ROUNDS / 2].as_secs_f64() * 1e3
    );
    for (at, tenant) in tenants.iter().enumerate() {
        let slots = pages[at / 8].host_pids();
        assert!(slots.contains(&tenant.pid()), "process {} is not the owner of a slot", tenant.pid());
    }
}

const ROUNDS: usize = 5;

/// CPU time of this process in milliseconds; fields 14 and 15 are in ticks of 10 ms.
fn cpu() -> u64 {
    let usage = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = usage.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
    (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()) * 10
}
