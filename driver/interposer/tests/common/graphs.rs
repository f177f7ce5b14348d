//! Graphs with memory nodes of a program in a container.
#![allow(unsafe_code, reason = "the driver is called through C")]

use super::guest::{Guest, MIB, Properties, UNTOUCHED, call, number, said};

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
    /// An executable graph: of so many MiB, within so many other graphs; uploaded at once; or of two devices.
    pub(super) fn graph(&self, words: &[&str]) -> String {
        match words {
            [mib] => self.runnable(self.within(self.allocating(0, number(mib)), 0)),
            ["uploaded", mib] => self.uploaded(self.allocating(0, number(mib))),
            ["both", first, second] => {
                let (outer, inner) = (self.allocating(0, number(first)), self.allocating(1, number(second)));
                self.put_into(outer, inner);
                self.runnable(outer)
            }
            [mib, depth] => self.runnable(self.within(self.allocating(0, number(mib)), number(depth))),
            other => panic!("no such graph: {other:?}"),
        }
    }

    /// Has an executable graph do what another one says: of so many MiB, or within so many graphs.
    pub(super) fn update(&self, way: &str, runnable: u64, words: &[&str]) -> String {
        let graph = match words {
            [mib] => self.allocating(0, number(mib)),
            [mib, depth] => self.within(self.allocating(0, number(mib)), number(depth)),
            other => panic!("no such graph: {other:?}"),
        };
        let (mut node, mut report) = (UNTOUCHED, [UNTOUCHED; 3]);
        let (code, result) = match way {
            "v1" => {
                let mut result = UNTOUCHED as u32;
                let code = call!(self, "cuGraphExecUpdate", runnable => u64, graph => u64,
                    &mut node => &mut u64, &mut result => &mut u32);
                (code, result)
            }
            "v2" => {
                let code = call!(self, "cuGraphExecUpdate_v2", runnable => u64, graph => u64,
                    &mut report => &mut [u64; 3]);
                (code, report[0] as u32)
            }
            other => panic!("no such way: {other}"),
        };
        format!("{code} {result}")
    }

    /// An executable graph with a graph of so many MiB within, and the node that has it.
    pub(super) fn nested(&self, mib: u64) -> String {
        let mut outer = 0u64;
        assert_eq!(call!(self, "cuGraphCreate", &mut outer => &mut u64, 0 => u32), 0);
        let node = self.put_into(outer, self.allocating(0, mib));
        format!("{} {node}", self.runnable(outer))
    }

    /// Puts one of so many MiB in its place.
    pub(super) fn put_instead(&self, way: &str, runnable: u64, node: u64, mib: u64) -> String {
        let graph = self.allocating(0, mib);
        let code = match way {
            "child" => {
                call!(self, "cuGraphExecChildGraphNodeSetParams", runnable => u64, node => u64, graph => u64)
            }
            "any" => {
                let mut how = [0u64; 32];
                (how[0], how[2]) = (CHILD, graph);
                call!(self, "cuGraphExecNodeSetParams", runnable => u64, node => u64, &how => &[u64; 32])
            }
            other => panic!("no such way: {other}"),
        };
        code.to_string()
    }

    /// A graph that allocates memory of a device, frees it, and does so again.
    fn allocating(&self, device: i32, mib: u64) -> u64 {
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

    fn within(&self, graph: u64, depth: u64) -> u64 {
        (0..depth).fold(graph, |inner, _| {
            let mut outer = 0u64;
            assert_eq!(call!(self, "cuGraphCreate", &mut outer => &mut u64, 0 => u32), 0);
            self.put_into(outer, inner);
            outer
        })
    }

    fn put_into(&self, outer: u64, inner: u64) -> u64 {
        let (mut node, none) = (0u64, std::ptr::null::<u64>());
        let code = call!(self, "cuGraphAddChildGraphNode", &mut node => &mut u64, outer => u64,
            none => *const u64, 0 => u64, inner => u64);
        assert_eq!(code, 0);
        node
    }

    fn runnable(&self, graph: u64) -> String {
        let mut runnable = UNTOUCHED;
        let code =
            call!(self, "cuGraphInstantiateWithFlags", &mut runnable => &mut u64, graph => u64, 0 => u64);
        said(code, runnable)
    }

    fn uploaded(&self, graph: u64) -> String {
        let mut runnable = UNTOUCHED;
        let mut how = Instantiation { flags: UPLOAD, stream: 0, failed: 0, result: 0 };
        let code = call!(self, "cuGraphInstantiateWithParams", &mut runnable => &mut u64, graph => u64,
            &mut how => &mut Instantiation);
        said(code, runnable)
    }
}
