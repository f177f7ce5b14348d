//! Updates of executable graphs: which are accepted, and the memory that they take.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use common::*;

#[test]
fn scenario_program() {
    common::scenario(|_, other| panic!("unknown command {other:?}"));
}

/// CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE.
const UPDATE_FAILURE: u32 = 910;

/// CUgraphExecUpdateResultInfo.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Report {
    result: u32,
    node: usize,
    from: usize,
}

/// CUgraphNodeParams.
#[repr(C)]
struct Parameters {
    kind: u32,
    reserved: [u32; 3],
    first: u64,
    rest: [u64; 29],
}

impl Cuda {
    /// A captured graph that allocates each of these MiB and frees it.
    fn graph(&self, allocations: &[u64]) -> usize {
        let (cuda, mut stream, mut graph) = (self, 0_usize, 0_usize);
        assert_eq!(call!(cuda.cuStreamCreate(&mut stream => &mut usize, 1 => u32)), SUCCESS);
        assert_eq!(call!(cuda.cuStreamBeginCapture_v2(stream => usize, 0 => u32)), SUCCESS);
        for mib in allocations {
            let mut address = 0_u64;
            let code =
                call!(cuda.cuMemAllocAsync(&mut address => &mut u64, mib * MIB => u64, stream => usize));
            assert_eq!(code, SUCCESS);
            assert_eq!(call!(cuda.cuMemFreeAsync(address => u64, stream => usize)), SUCCESS);
        }
        assert_eq!(call!(cuda.cuStreamEndCapture(stream => usize, &mut graph => &mut usize)), SUCCESS);
        graph
    }

    fn runnable(&self, graph: usize) -> usize {
        let (cuda, mut made) = (self, 0_usize);
        let code = call!(cuda.cuGraphInstantiateWithFlags(&mut made => &mut usize, graph => usize, 0 => u64));
        assert_eq!(code, SUCCESS);
        made
    }

    /// Updates by both versions of the call, which must agree.
    fn update(&self, runnable: usize, graph: usize) -> (u32, Report) {
        let cuda = self;
        let mut report = Report { result: 99, node: 99, from: 99 };
        let code = call!(cuda.cuGraphExecUpdate_v2(
            runnable => usize, graph => usize, &mut report => &mut Report
        ));
        let (mut node, mut result) = (99_usize, 99_u32);
        let before = call!(cuda.cuGraphExecUpdate(
            runnable => usize, graph => usize, &mut node => &mut usize, &mut result => &mut u32
        ));
        assert_eq!((before, result, node), (code, report.result, report.node));
        (code, report)
    }

    fn launch(&self, runnable: usize) -> u32 {
        let cuda = self;
        call!(cuda.cuGraphLaunch(runnable => usize, 0 => usize))
    }

    fn nodes(&self, graph: usize) -> Vec<usize> {
        let (cuda, mut nodes, mut count) = (self, [0_usize; 16], 16_u64);
        let list = nodes.as_mut_ptr();
        let code = call!(cuda.cuGraphGetNodes(graph => usize, list => *mut usize, &mut count => &mut u64));
        assert_eq!(code, SUCCESS);
        nodes[..count as usize].to_vec()
    }

    fn destroy(&self, graph: usize) {
        let cuda = self;
        assert_eq!(call!(cuda.cuGraphDestroy(graph => usize)), SUCCESS);
    }

    fn end(&self, runnable: usize) {
        let cuda = self;
        assert_eq!(call!(cuda.cuGraphExecDestroy(runnable => usize)), SUCCESS);
    }
}

const DONE: (u32, Report) = (SUCCESS, Report { result: 0, node: 0, from: 0 });

fn refused(result: u32, node: usize) -> (u32, Report) {
    (UPDATE_FAILURE, Report { result, node, from: 0 })
}

#[test]
fn update_may_enlarge_the_memory_of_a_graph() {
    let it = start("L4");
    let cuda = &it.cuda;
    let small = cuda.graph(&[64]);
    let runnable = cuda.runnable(small);
    assert_eq!((cuda.launch(runnable), it.used()), (SUCCESS, 64 * MIB));
    let large = cuda.graph(&[512]);
    assert_eq!(cuda.update(runnable, large), DONE);
    assert_eq!(cuda.update(runnable, large), DONE, "as it is already");
    // Programs may keep only the executable graph.
    for graph in [small, large] {
        cuda.destroy(graph);
    }
    assert_eq!((cuda.launch(runnable), it.used()), (SUCCESS, 512 * MIB));
    cuda.end(runnable);
    assert_eq!(cuda.launch(runnable), INVALID_HANDLE);
}

#[test]
fn update_needs_nodes_of_same_types_in_same_order() {
    let it = start("L4");
    let cuda = &it.cuda;
    let graph = cuda.graph(&[64, 64]);
    let runnable = cuda.runnable(graph);
    assert_eq!(cuda.update(runnable, cuda.graph(&[64])), refused(2, 0), "fewer nodes");
    let other = cuda.graph(&[64, 64]);
    let [first, _, third, _] = cuda.nodes(other)[..] else { panic!("four nodes") };
    let code = call!(cuda.cuGraphAddDependencies(
        other => usize, &first => &usize, &third => &usize, 1 => u64
    ));
    assert_eq!((code, cuda.update(runnable, other)), (SUCCESS, refused(2, third)), "one edge more");
    let mut empty = 0_usize;
    let (other, node) = (cuda.graph(&[64]), &mut empty);
    let [_, last] = cuda.nodes(other)[..] else { panic!("two nodes") };
    for after in [last, 0] {
        let after = if after == 0 { *node } else { after };
        let code =
            call!(cuda.cuGraphAddEmptyNode(node => &mut usize, other => usize, &after => &usize, 1 => u64));
        assert_eq!(code, SUCCESS);
    }
    let [_, _, third, _] = cuda.nodes(other)[..] else { panic!("four nodes") };
    assert_eq!(cuda.update(runnable, other), refused(3, third), "another type");
    assert_eq!((cuda.launch(runnable), it.used()), (SUCCESS, 128 * MIB), "it is what it was");
}

#[test]
fn graph_with_memory_has_one_executable_at_a_time() {
    let it = start("L4");
    let cuda = &it.cuda;
    let (graph, other) = (cuda.graph(&[64]), cuda.graph(&[512]));
    let (runnable, elsewhere) = (cuda.runnable(graph), cuda.runnable(other));
    assert_eq!(cuda.update(runnable, other), refused(6, 0));
    cuda.end(elsewhere);
    assert_eq!(cuda.update(runnable, other), DONE);
    // Its former graph is free again.
    cuda.end(cuda.runnable(graph));
    // A graph without memory may have many.
    let plain = cuda.graph(&[]);
    let (one, two) = (cuda.runnable(plain), cuda.runnable(plain));
    assert_eq!((cuda.update(one, plain), cuda.update(two, plain)), (DONE, DONE));
}

#[test]
fn memory_nodes_cannot_change_but_child_graphs_may_grow() {
    let it = start("L4");
    let cuda = &it.cuda;
    let graph = cuda.graph(&[64]);
    let runnable = cuda.runnable(graph);
    let set = |runnable: usize, node: usize, kind: u32, first: u64| {
        let parameters = Parameters { kind, reserved: [0; 3], first, rest: [0; 29] };
        call!(cuda.cuGraphExecNodeSetParams(runnable => usize, node => usize, &parameters => &Parameters))
    };
    for (node, kind) in cuda.nodes(graph).into_iter().zip([10, 11]) {
        assert_eq!(set(runnable, node, kind, 0), NOT_SUPPORTED);
    }
    let (mut outer, mut node) = (0_usize, 0_usize);
    assert_eq!(call!(cuda.cuGraphCreate(&mut outer => &mut usize, 0 => u32)), SUCCESS);
    let within = cuda.graph(&[64]);
    let code = call!(cuda.cuGraphAddChildGraphNode(
        &mut node => &mut usize, outer => usize, 0 => usize, 0 => u64, within => usize
    ));
    assert_eq!(code, SUCCESS);
    let runnable = cuda.runnable(outer);
    let child = |graph: usize| {
        call!(cuda.cuGraphExecChildGraphNodeSetParams(
            runnable => usize, node => usize, graph => usize
        ))
    };
    assert_eq!((child(cuda.graph(&[64, 64])), cuda.launch(runnable)), (INVALID_VALUE, SUCCESS));
    assert_eq!(it.used(), 64 * MIB);
    assert_eq!((child(cuda.graph(&[256])), cuda.launch(runnable)), (SUCCESS, SUCCESS));
    assert_eq!(it.used(), 256 * MIB);
    assert_eq!(
        (set(runnable, node, 4, cuda.graph(&[512]) as u64), cuda.launch(runnable)),
        (SUCCESS, SUCCESS)
    );
    assert_eq!(it.used(), 512 * MIB);
}
