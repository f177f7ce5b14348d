//! The memory limit over pools of the program's own, against the simulated driver: each is charged to the device whose
//! memory it has, however many there are and whatever the driver tells of them.

mod common;

use common::container::{Node, key};
use common::program::Program;

/// The programs in the containers.
#[test]
fn it_is_a_program_too() {
    common::container::guest();
}

/// Two GPUs, of the first a share of 1,024 MiB and of the second one of 2,048, as pools grow by 32 MiB.
fn pooled(node: &Node, test: impl FnOnce(&mut Program, &dyn Fn() -> [u64; 2])) {
    let shares =
        [node.share("claim", "a", node.policy(0, 1024)), node.share("claim", "b", node.policy(1, 2048))];
    let container = node.container(&shares);
    test(&mut container.started(), &|| [0, 1].map(|at: usize| shares[at].used_mib()));
}

/// More pools than any table of a fixed size would hold.
const MANY: usize = 100;

#[test]
fn a_driver_that_does_not_tell_whose_memory_a_pool_has_need_not() {
    pooled(&Node::before_cuda_13("2xL4"), |program, used| {
        let pools: Vec<String> = (0..MANY).map(|_| key(&program.ask("pool 1"))).collect();
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
fn what_many_pools_keep_is_given_back_before_anything_is_refused() {
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

/// The host's is nobody's; what may move to the device that uses it is that one's.
#[test]
fn pools_of_the_host_are_free_and_managed_ones_are_not() {
    for node in [Node::up("2xL4"), Node::before_cuda_13("2xL4")] {
        pooled(&node, |program, used| {
            let [host, managed] = ["host", "managed"].map(|kind| key(&program.ask(&format!("pool {kind}"))));
            key(&program.ask(&format!("alloc pool 1025 {host}")));
            assert_eq!(used(), [0, 0]);
            assert_eq!(program.ask(&format!("alloc pool 1025 {managed}")), "error 2");
            key(&program.ask(&format!("alloc pool 1024 {managed}")));
            assert_eq!(used(), [1024, 0]);
            // By a stream of the other device too: it stays the first one's.
            assert_eq!(program.ask("start 1"), "ok");
            assert_eq!(program.ask(&format!("alloc pool 1 {managed}")), "error 2");
        });
    }
}
