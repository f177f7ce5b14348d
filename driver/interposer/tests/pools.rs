//! The memory limit for explicit pools, on the simulated driver: each is charged to the device that
//! has its memory, for any number of pools and whatever the driver reports.

mod common;

use common::container::{Node, key};
use common::program::Program;

/// Entry point of the programs in the containers.
#[test]
fn scenario_program() {
    common::container::guest();
}

/// A share of 1,024 MiB on one GPU and of 2,048 MiB on another (pools grow by 32 MiB).
fn pooled(node: &Node, test: impl FnOnce(&mut Program, &dyn Fn() -> [u64; 2])) {
    let shares =
        [node.share("claim", "a", node.policy(0, 1024)), node.share("claim", "b", node.policy(1, 2048))];
    let container = node.container(&shares);
    test(&mut container.started(), &|| [0, 1].map(|at: usize| shares[at].used_mib()));
}

/// More pools than a table of fixed size would hold.
const POOLS: usize = 100;

#[test]
fn pool_owner_is_known_on_drivers_before_cuda_13() {
    pooled(&Node::before_cuda_13("2xL4"), |program, used| {
        let pools: Vec<String> = (0..POOLS).map(|_| key(&program.ask("pool 1"))).collect();
        let last = pools.last().expect("pools");
        assert_eq!(program.ask(&format!("alloc pool 2049 {last}")), "error 2");
        let made = key(&program.ask(&format!("alloc pool 2048 {last}")));
        assert_eq!(used(), [0, 2048]);
        assert_eq!(program.ask(&format!("free async {made}")), "0");
        for pool in &pools {
            assert_eq!(program.ask(&format!("free pool {pool}")), "0");
        }
        assert_eq!(used(), [0, 0]);
    });
}

#[test]
fn many_pools_are_trimmed_before_a_refusal() {
    pooled(&Node::up("2xL4"), |program, used| {
        for _ in 0..32 {
            let pool = key(&program.ask("pool 0"));
            let made = key(&program.ask(&format!("alloc pool 1 {pool}")));
            assert_eq!(program.ask(&format!("free async {made}")), "0");
        }
        assert_eq!(used(), [1024, 0], "kept");
        key(&program.ask("alloc v2 1024"));
        assert_eq!(used(), [1024, 0]);
    });
}

/// Host pools are not charged. Managed pools are charged to the device that uses them.
#[test]
fn host_pools_are_not_charged_and_managed_pools_are() {
    for node in [Node::up("2xL4"), Node::before_cuda_13("2xL4")] {
        pooled(&node, |program, used| {
            let [host, managed] = ["host", "managed"].map(|kind| key(&program.ask(&format!("pool {kind}"))));
            key(&program.ask(&format!("alloc pool 1025 {host}")));
            assert_eq!(used(), [0, 0]);
            assert_eq!(program.ask(&format!("alloc pool 1025 {managed}")), "error 2");
            key(&program.ask(&format!("alloc pool 1024 {managed}")));
            assert_eq!(used(), [1024, 0]);
            // A stream of the other device does not change the owner.
            assert_eq!(program.ask("start 1"), "ok");
            assert_eq!(program.ask(&format!("alloc pool 1 {managed}")), "error 2");
        });
    }
}
