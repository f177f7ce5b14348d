//! The memory limit over graphs with memory nodes, against the simulated driver: what a graph needs is known before it is
//! launched, however many there are, however deep they lie and on whichever devices.

mod common;

use common::container::{Node, key};
use common::program::Program;

/// The programs in the containers.
#[test]
fn it_is_a_program_too() {
    common::container::guest();
}

/// A GPU with one share of 1,024 MiB, as pools grow by 32 MiB.
fn pooled(test: impl FnOnce(&mut Program, &dyn Fn() -> u64)) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1024));
    let container = node.container(std::slice::from_ref(&share));
    test(&mut container.started(), &|| share.used_mib());
}

#[test]
fn memory_of_graphs() {
    pooled(|program, used| {
        // Two nodes each, which the simulated driver gives addresses of their own.
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

/// More executable graphs with memory than any table of a fixed size would hold.
const MANY: usize = 300;

#[test]
fn one_graph_more_is_limited_before_its_launch_however_many_there_are() {
    pooled(|program, used| {
        for _ in 0..MANY {
            key(&program.ask("graph 1"));
        }
        let large = key(&program.ask("graph 513"));
        assert_eq!((program.ask(&format!("launch {large}")), used()), ("2".into(), 0));
        let fitting = key(&program.ask("graph 512"));
        assert_eq!((program.ask(&format!("launch {fitting}")), used()), ("0".into(), 1024));
    });
}

#[test]
fn a_graph_that_the_driver_does_not_end_is_limited_still() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1024));
    let container = node.container(std::slice::from_ref(&share));
    let mut program = container.with("export DIVVY_SIM_CUDA=cuGraphExecDestroy=1").started();
    let large = key(&program.ask("graph 513"));
    assert_eq!(program.ask(&format!("end-graph {large}")), "1");
    assert_eq!((program.ask(&format!("launch {large}")), share.used_mib()), ("2".into(), 0));
}

#[test]
fn a_graph_that_is_uploaded_as_it_is_made_is_limited_too() {
    pooled(|program, used| {
        assert_eq!((program.ask("graph uploaded 513"), used()), ("error 2".into(), 0));
        let fitting = key(&program.ask("graph uploaded 512"));
        assert_eq!(used(), 1024, "it has its memory");
        assert_eq!(program.ask("alloc v2 1"), "error 2");
        assert_eq!(program.ask(&format!("launch {fitting}")), "0");
    });
}

#[test]
fn a_graph_within_graphs_is_limited_too() {
    pooled(|program, used| {
        for depth in [1, 9, 32] {
            let large = key(&program.ask(&format!("graph 513 {depth}")));
            assert_eq!((program.ask(&format!("launch {large}")), used()), ("2".into(), 0), "{depth}");
        }
        // Nobody looks deeper, and what is not known is not made.
        assert_eq!(program.ask("graph 1 33"), "error 2");
        let deep = key(&program.ask("graph 512 32"));
        assert_eq!((program.ask(&format!("launch {deep}")), used()), ("0".into(), 1024));
    });
}

/// Two GPUs with a share of 1,024 MiB each.
#[test]
fn each_device_is_charged_what_a_graph_allocates_there() {
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
fn a_graph_that_does_what_another_one_says_is_limited_by_that() {
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
fn an_update_that_is_refused_leaves_what_a_graph_needs() {
    pooled(|program, used| {
        let deep = key(&program.ask("graph 512 1"));
        // By the driver, and as nobody looks so deep.
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
fn a_graph_within_another_is_not_replaced_by_one_that_needs_more() {
    pooled(|program, used| {
        let made = program.ask("nested 256");
        let (graph, node) = made.rsplit_once(' ').expect("a graph and a node");
        let graph = key(graph);
        for way in ["child", "any"] {
            let put =
                |program: &mut Program, mib| program.ask(&format!("put-instead {way} {graph} {node} {mib}"));
            for same in 0..3 {
                assert_eq!(put(program, 256), "0", "{way}, {same}");
            }
            assert_eq!(put(program, 257), "2", "{way}");
            assert_eq!((program.ask(&format!("launch {graph}")), used()), ("0".into(), 512), "{way}");
        }
    });
}
