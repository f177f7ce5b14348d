//! The memory limit for graphs with memory nodes, on the simulated driver: a graph's need is known
//! before its launch, for any number of graphs, nesting depth and device.

mod common;

use common::container::{Node, key};
use common::program::Program;

/// Entry point of the programs in the containers.
#[test]
fn scenario_program() {
    common::container::guest();
}

/// A GPU with one share of 1,024 MiB (pools grow by 32 MiB).
fn pooled(test: impl FnOnce(&mut Program, &dyn Fn() -> u64)) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1024));
    let container = node.container(std::slice::from_ref(&share));
    test(&mut container.started(), &|| share.used_mib());
}

#[test]
fn graph_memory_is_limited() {
    pooled(|program, used| {
        // Each graph has two allocations, to which the simulated driver gives separate addresses.
        let large = key(&program.ask("graph 513"));
        assert_eq!(program.ask(&format!("launch {large}")), "2");
        let graph = key(&program.ask("graph 512"));
        assert_eq!(program.ask(&format!("launch {graph}")), "0");
        assert_eq!(program.ask("synchronize"), "0");
        assert_eq!(used(), 1024, "kept for the next launch");
        assert_eq!(program.ask("alloc v2 1"), "error 2");
        assert_eq!(program.ask("trim-graphs 0"), "0");
        assert_eq!(used(), 0);
        let made = key(&program.ask("alloc v2 1"));
        assert_eq!(program.ask(&format!("launch {graph}")), "2");
        assert_eq!(program.ask(&format!("free v2 {made}")), "0");
        assert_eq!(program.ask(&format!("launch {graph}")), "0");
    });
}

/// More executable graphs than a table of fixed size would hold.
const GRAPHS: usize = 300;

#[test]
fn graph_is_limited_before_launch_among_many() {
    pooled(|program, used| {
        for _ in 0..GRAPHS {
            key(&program.ask("graph 1"));
        }
        let large = key(&program.ask("graph 513"));
        assert_eq!((program.ask(&format!("launch {large}")), used()), ("2".into(), 0));
        let fitting = key(&program.ask("graph 512"));
        assert_eq!((program.ask(&format!("launch {fitting}")), used()), ("0".into(), 1024));
    });
}

#[test]
fn graph_is_limited_after_a_failed_destroy() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1024));
    let container = node.container(std::slice::from_ref(&share));
    let mut program = container.with("export DIVVY_SIM_CUDA=cuGraphExecDestroy=1").started();
    let large = key(&program.ask("graph 513"));
    assert_eq!(program.ask(&format!("destroy-graph {large}")), "1");
    assert_eq!((program.ask(&format!("launch {large}")), share.used_mib()), ("2".into(), 0));
}

#[test]
fn graph_uploaded_at_instantiation_is_limited() {
    pooled(|program, used| {
        assert_eq!((program.ask("graph uploaded 513"), used()), ("error 2".into(), 0));
        let fitting = key(&program.ask("graph uploaded 512"));
        assert_eq!(used(), 1024, "it has its memory");
        assert_eq!(program.ask("alloc v2 1"), "error 2");
        assert_eq!(program.ask(&format!("launch {fitting}")), "0");
    });
}

#[test]
fn nested_graphs_are_limited() {
    pooled(|program, used| {
        for depth in [1, 9, 32] {
            let large = key(&program.ask(&format!("graph 513 {depth}")));
            assert_eq!((program.ask(&format!("launch {large}")), used()), ("2".into(), 0), "{depth}");
        }
        // The library looks no deeper, and a graph of unknown need is refused.
        assert_eq!(program.ask("graph 1 33"), "error 2");
        let deep = key(&program.ask("graph 512 32"));
        assert_eq!((program.ask(&format!("launch {deep}")), used()), ("0".into(), 1024));
    });
}

/// Two GPUs with a share of 1,024 MiB each.
#[test]
fn graph_memory_is_charged_per_device() {
    let node = Node::up("2xL4");
    let shares =
        [node.share("claim", "a", node.policy(0, 1024)), node.share("claim", "b", node.policy(1, 1024))];
    let container = node.container(&shares);
    let mut program = container.started();
    key(&program.ask("context primary 1"));
    let used = || (shares[0].used_mib(), shares[1].used_mib());
    for large in ["513 1", "1 513"] {
        let graph = key(&program.ask(&format!("graph both {large}")));
        assert_eq!((program.ask(&format!("launch {graph}")), used()), ("2".into(), (0, 0)), "{large}");
    }
    let graph = key(&program.ask("graph both 512 256"));
    assert_eq!((program.ask(&format!("launch {graph}")), used()), ("0".into(), (1024, 512)));
    assert_eq!((program.ask("trim-graphs 1"), used()), ("0".into(), (1024, 0)));
}

#[test]
fn updated_graph_is_charged_its_new_need() {
    pooled(|program, used| {
        let graph = key(&program.ask("graph 100"));
        let launch = format!("launch {graph}");
        for way in ["v1", "v2"] {
            assert_eq!(program.ask(&format!("update {way} {graph} 513")), "0 0", "{way}");
            assert_eq!((program.ask(&launch), used()), ("2".into(), 0), "{way}: more than there is");
            assert_eq!(program.ask(&format!("update {way} {graph} 512")), "0 0", "{way}");
            assert_eq!((program.ask(&launch), used()), ("0".into(), 1024), "{way}: all that there is");
            assert_eq!((program.ask("trim-graphs 0"), used()), ("0".into(), 0));
        }
    });
}

#[test]
fn refused_update_keeps_the_graph_need() {
    pooled(|program, used| {
        let deep = key(&program.ask("graph 512 1"));
        // Refused by the driver, and by the library because it is too deep.
        assert_eq!(program.ask(&format!("update v2 {deep} 1")), "910 2");
        for way in ["v1", "v2"] {
            assert_eq!(program.ask(&format!("update {way} {deep} 1 33")), "2 1", "{way}");
        }
        assert_eq!(program.ask(&format!("update v2 {deep} 513 2")), "910 2");
        assert_eq!((program.ask(&format!("launch {deep}")), used()), ("0".into(), 1024));
        assert_eq!((program.ask("trim-graphs 0"), used()), ("0".into(), 0));
        key(&program.ask("alloc v2 1"));
        assert_eq!((program.ask(&format!("launch {deep}")), used()), ("2".into(), 1));
    });
}

#[test]
fn child_graph_update_with_larger_need_is_refused() {
    pooled(|program, used| {
        let made = program.ask("nested 256");
        let (graph, node) = made.rsplit_once(' ').expect("a graph and a node");
        let graph = key(graph);
        for way in ["child", "any"] {
            let put = |program: &mut Program, mib| {
                program.ask(&format!("replace-child {way} {graph} {node} {mib}"))
            };
            for same in 0..3 {
                assert_eq!(put(program, 256), "0", "{way}, {same}");
            }
            assert_eq!(put(program, 257), "2", "{way}");
            assert_eq!((program.ask(&format!("launch {graph}")), used()), ("0".into(), 512), "{way}");
        }
    });
}
