//! The memory limit for memory in other locations and from other functions, on the simulated
//! driver. The device that has the memory is charged, with padding.

mod common;

use common::container::{MIB, Node, key};
use common::program::Program;

/// Entry point of the programs in the containers.
#[test]
fn scenario_program() {
    common::container::guest();
}

/// Two GPUs with a share of 1,024 MiB each (pools grow by 32 MiB) and contexts of 300 MiB.
fn shared(node: &Node, test: impl FnOnce(&mut Program, &dyn Fn() -> [u64; 2])) {
    let shares = [("a", 0), ("b", 1)].map(|(id, slot)| {
        let mut policy = node.policy(slot, 1024);
        policy.memory.context = 300 * MIB;
        node.share("claim", id, policy)
    });
    let container = node.container(&shares);
    let mut program = container.program();
    assert_eq!(program.ask("init"), "0");
    test(&mut program, &|| [0, 1].map(|at: usize| shares[at].used_mib()));
}

#[test]
fn physical_memory_is_charged_to_its_device() {
    shared(&Node::up("2xL4"), |program, used| {
        assert_eq!(program.ask("start 0"), "ok");
        let made = key(&program.ask("create-at 600 1"));
        assert_eq!(used(), [300, 600]);
        assert_eq!(program.ask("create-at 426 1"), "error 2");
        key(&program.ask("create-at 424 1"));
        key(&program.ask("create-at 724 0"));
        assert_eq!(used(), [1024, 1024]);
        assert_eq!(program.ask("create-at 2 0"), "error 2");
        assert_eq!((program.ask(&format!("free release {made}")), used()), ("0".into(), [1024, 424]));
    });
}

#[test]
fn host_physical_memory_is_not_charged() {
    shared(&Node::up("2xL4"), |program, used| {
        for place in ["host", "numa", "numa-current"] {
            let made = key(&program.ask(&format!("create-at 2048 {place}")));
            assert_eq!(used(), [0, 0], "{place}");
            assert_eq!(program.ask(&format!("free release {made}")), "0");
        }
    });
}

#[test]
fn padded_rows_are_charged_with_padding() {
    shared(&Node::up("2xL4"), |program, used| {
        assert_eq!(program.ask("start 0"), "ok");
        // 367 MiB are requested, and 725 granted.
        assert_eq!((program.ask("padded 725"), used()), ("error 2".into(), [300, 0]));
        let made = key(&program.ask("padded 724"));
        assert_eq!((used(), program.ask("alloc v2 1")), ([1024, 0], "error 2".into()));
        assert_eq!((program.ask(&format!("free v2 {made}")), used()), ("0".into(), [300, 0]));
        key(&program.ask("alloc v2 724"));
    });
}

/// With the functions of all versions, and with those that exist since CUDA 13.
#[test]
fn default_pools_are_charged_to_their_device() {
    const OLD: [&str; 2] = ["cuDeviceGetMemPool", "cuDeviceGetDefaultMemPool"];
    const NEW: [&str; 2] = ["cuMemGetMemPool", "cuMemGetDefaultMemPool"];
    for (node, ways) in
        [(Node::before_cuda_13("2xL4"), OLD.to_vec()), (Node::up("2xL4"), [OLD, NEW].concat())]
    {
        shared(&node, |program, used| {
            assert_eq!((program.ask("start 0"), program.ask("start 1")), ("ok".into(), "ok".into()));
            for way in ways {
                for (device, full) in [(0, [1004, 300]), (1, [300, 1004])] {
                    let pool = key(&program.ask(&format!("current-pool get {way} {device}")));
                    assert_eq!(program.ask(&format!("alloc pool 725 {pool}")), "error 2", "{way}");
                    let made = key(&program.ask(&format!("alloc pool 704 {pool}")));
                    assert_eq!(used(), full, "{way}");
                    assert_eq!(program.ask(&format!("free async {made}")), "0");
                    assert_eq!(program.ask(&format!("trim {pool}")), "0");
                    assert_eq!(used(), [300, 300], "{way}");
                }
            }
        });
    }
}

#[test]
fn async_allocations_are_charged_to_the_current_pool() {
    let nodes = [
        (Node::before_cuda_13("2xL4"), "cuDeviceSetMemPool"),
        (Node::up("2xL4"), "cuDeviceSetMemPool"),
        (Node::up("2xL4"), "cuMemSetMemPool"),
    ];
    for (node, way) in nodes {
        shared(&node, |program, used| {
            assert_eq!(program.ask("start 0"), "ok");
            let pool = key(&program.ask("pool 0"));
            assert_eq!(program.ask(&format!("current-pool set {way} 0 {pool}")), "0");
            assert_eq!(program.ask("alloc async 725"), "error 2", "{way}");
            let made = key(&program.ask("alloc async 704"));
            assert_eq!((used(), program.ask("alloc v2 21")), ([1004, 0], "error 2".into()), "{way}");
            assert_eq!(program.ask(&format!("free async {made}")), "0");
            assert_eq!(used(), [1004, 0], "{way}: kept");
            assert_eq!((program.ask(&format!("free pool {pool}")), used()), ("0".into(), [300, 0]), "{way}");
            key(&program.ask("alloc async 704"));
            assert_eq!(used(), [1004, 0], "{way}: from the pool before");
        });
    }
}

/// Vulkan memory, for example: its owner is another library or process.
#[test]
fn memory_of_another_library_is_not_charged() {
    shared(&Node::up("2xL4"), |program, used| {
        assert_eq!(program.ask("start 0"), "ok");
        key(&program.ask("alloc v2 724"));
        let external = key(&program.ask("external 64"));
        assert_eq!((used(), program.ask("alloc v2 1")), ([1024, 0], "error 2".into()));
        assert_eq!((program.ask(&format!("free v2 {external}")), used()), ("0".into(), [1024, 0]));
    });
}

#[test]
fn attached_context_ends_with_its_last_detach() {
    shared(&Node::up("2xL4"), |program, used| {
        let context = key(&program.ask("context v2 0"));
        assert_eq!(key(&program.ask("attach")), context);
        key(&program.ask("alloc v2 500"));
        assert_eq!((program.ask(&format!("free detach {context}")), used()), ("0".into(), [800, 0]));
        assert_eq!((program.ask(&format!("free detach {context}")), used()), ("0".into(), [0, 0]));
    });
}
