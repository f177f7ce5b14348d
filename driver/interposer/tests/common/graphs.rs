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

    fn put_into(&self, outer: u64, inner: u64) {
        let (mut node, none) = (0u64, std::ptr::null::<u64>());
        let code = call!(self, "cuGraphAddChildGraphNode", &mut node => &mut u64, outer => u64,
            none => *const u64, 0 => u64, inner => u64);
        assert_eq!(code, 0);
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
