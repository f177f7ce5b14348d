//! Graphs with memory nodes, for programs in a container.
#![allow(unsafe_code, reason = "the driver is called through C")]

use super::guest::{Guest, MIB, Properties, UNTOUCHED, call, format_result, number};

/// CUDA_MEM_ALLOC_NODE_PARAMS.
#[repr(C)]
struct Allocation {
    pool: Properties,
    access: usize,
    count: usize,
    bytes: u64,
    address: u64,
}

/// CUDA_GRAPH_INSTANTIATE_PARAMS.
#[repr(C)]
struct Instantiation {
    flags: u64,
    stream: u64,
    failed: u64,
    result: u32,
}

/// CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD.
const UPLOAD: u64 = 2;
/// CU_GRAPH_NODE_TYPE_GRAPH.
const CHILD: u64 = 4;

impl Guest {
    /// Creates an executable graph of `MIB`, optionally nested `DEPTH` deep, uploaded at once, or
    /// on both devices.
    pub(super) fn graph(&self, words: &[&str]) -> String {
        match words {
            [mib] => self.instantiate(self.nest(self.allocating_graph(0, number(mib)), 0)),
            ["uploaded", mib] => self.uploaded(self.allocating_graph(0, number(mib))),
            ["both", first, second] => {
                let (outer, inner) =
                    (self.allocating_graph(0, number(first)), self.allocating_graph(1, number(second)));
                self.add_child(outer, inner);
                self.instantiate(outer)
            }
            [mib, depth] => self.instantiate(self.nest(self.allocating_graph(0, number(mib)), number(depth))),
            other => panic!("no such graph: {other:?}"),
        }
    }

    /// Updates an executable graph to a graph of `MIB`, optionally nested `DEPTH` deep.
    pub(super) fn update(&self, way: &str, executable: u64, words: &[&str]) -> String {
        let graph = match words {
            [mib] => self.allocating_graph(0, number(mib)),
            [mib, depth] => self.nest(self.allocating_graph(0, number(mib)), number(depth)),
            other => panic!("no such graph: {other:?}"),
        };
        let (mut node, mut report) = (UNTOUCHED, [UNTOUCHED; 3]);
        let (code, result) = match way {
            "v1" => {
                let mut result = UNTOUCHED as u32;
                let code = call!(self, "cuGraphExecUpdate", executable => u64, graph => u64,
                    &mut node => &mut u64, &mut result => &mut u32);
                (code, result)
            }
            "v2" => {
                let code = call!(self, "cuGraphExecUpdate_v2", executable => u64, graph => u64,
                    &mut report => &mut [u64; 3]);
                (code, report[0] as u32)
            }
            other => panic!("no such way: {other}"),
        };
        format!("{code} {result}")
    }

    /// Creates an executable graph with a child graph of `mib` MiB. Returns the graph and the
    /// child's node.
    pub(super) fn nested(&self, mib: u64) -> String {
        let mut outer = 0u64;
        assert_eq!(call!(self, "cuGraphCreate", &mut outer => &mut u64, 0 => u32), 0);
        let node = self.add_child(outer, self.allocating_graph(0, mib));
        format!("{} {node}", self.instantiate(outer))
    }

    /// Replaces the child graph with one of `mib` MiB.
    pub(super) fn replace_child(&self, way: &str, executable: u64, node: u64, mib: u64) -> String {
        let graph = self.allocating_graph(0, mib);
        let code = match way {
            "child" => {
                call!(self, "cuGraphExecChildGraphNodeSetParams", executable => u64, node => u64,
                    graph => u64)
            }
            "any" => {
                let mut how = [0u64; 32];
                (how[0], how[2]) = (CHILD, graph);
                call!(self, "cuGraphExecNodeSetParams", executable => u64, node => u64, &how => &[u64; 32])
            }
            other => panic!("no such way: {other}"),
        };
        code.to_string()
    }

    /// Creates a graph that allocates memory of a device and frees it, twice.
    fn allocating_graph(&self, device: i32, mib: u64) -> u64 {
        let (mut graph, mut node) = (0u64, 0u64);
        let none = std::ptr::null::<u64>();
        let mut codes = vec![call!(self, "cuGraphCreate", &mut graph => &mut u64, 0 => u32)];
        for _ in 0..2 {
            let bytes = mib * MIB;
            let mut made =
                Allocation { pool: Properties::on(device), access: 0, count: 0, bytes, address: 0 };
            let (before, count) = if node == 0 { (none, 0) } else { (&raw const node, 1) };
            let mut after = 0u64;
            codes.push(call!(self, "cuGraphAddMemAllocNode", &mut after => &mut u64, graph => u64,
                before => *const u64, count => u64, &mut made => &mut Allocation));
            codes.push(call!(self, "cuGraphAddMemFreeNode", &mut node => &mut u64, graph => u64,
                &after => &u64, 1 => u64, made.address => u64));
        }
        assert!(codes.iter().all(|code| *code == 0), "no graph: {codes:?}");
        graph
    }

    fn nest(&self, graph: u64, depth: u64) -> u64 {
        (0..depth).fold(graph, |inner, _| {
            let mut outer = 0u64;
            assert_eq!(call!(self, "cuGraphCreate", &mut outer => &mut u64, 0 => u32), 0);
            self.add_child(outer, inner);
            outer
        })
    }

    fn add_child(&self, outer: u64, inner: u64) -> u64 {
        let (mut node, none) = (0u64, std::ptr::null::<u64>());
        let code = call!(self, "cuGraphAddChildGraphNode", &mut node => &mut u64, outer => u64,
            none => *const u64, 0 => u64, inner => u64);
        assert_eq!(code, 0);
        node
    }

    fn instantiate(&self, graph: u64) -> String {
        let mut executable = UNTOUCHED;
        let code =
            call!(self, "cuGraphInstantiateWithFlags", &mut executable => &mut u64, graph => u64, 0 => u64);
        format_result(code, executable)
    }

    fn uploaded(&self, graph: u64) -> String {
        let mut executable = UNTOUCHED;
        let mut how = Instantiation { flags: UPLOAD, stream: 0, failed: 0, result: 0 };
        let code = call!(self, "cuGraphInstantiateWithParams", &mut executable => &mut u64, graph => u64,
            &mut how => &mut Instantiation);
        format_result(code, executable)
    }
}
