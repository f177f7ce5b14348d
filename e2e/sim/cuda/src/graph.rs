//! Graphs: nodes with dependencies, and the memory of their allocation nodes.
//!
//! An allocation node has its address from its creation. The memory exists from a launch until a
//! node or the program frees it.

use std::sync::PoisonError;

use crate::argument::{In, Out, read_all};
use crate::code::{Code, Outcome};
use crate::content::Content;
use crate::frame::entry;
use crate::graph_objects::{Graph, Node, Task};
use crate::handle::Handle;
use crate::objects::{Context, Payer, Process};

/// Reserves an address for a graph's memory, which is not allocated yet.
pub(crate) fn plan_memory(process: &'static Process, context: &'static Context, size: u64) -> Outcome<Task> {
    if size == 0 {
        return Err(Code::InvalidValue);
    }
    let pool = context.device.graph_pool(process);
    let payer = Payer::Graph { pool, live: false, node: true, runnable: false };
    let address = process.memory.add(context, size, payer, 0, Content::NONE)?;
    Ok(Task::Allocate { address, size, device: context.device.ordinal })
}

fn destroy(process: &Process, graph: Handle<Graph>) -> Outcome {
    let graph = graph.end()?;
    for node in graph.nodes().drain(..) {
        if let Ok(Node { task: Task::Allocate { address, .. }, .. }) = node.end() {
            process.memory.forget(*address);
        }
    }
    Ok(())
}

pub(crate) fn needs(list: In<Handle<Node>>, count: u64) -> Outcome<Vec<Handle<Node>>> {
    read_all(list, count as usize)
}

/// Fills a list for the caller: the count, and as many nodes as fit.
fn list(found: &[Handle<Node>], nodes: Out<Handle<Node>>, count: Out<u64>) -> Outcome {
    if !nodes.is_null() {
        let cell = count.get()? as usize;
        nodes.fill(cell, found.iter().copied().chain(std::iter::repeat(Handle::NULL)))?;
        return count.set(found.len().min(cell) as u64);
    }
    count.set(found.len() as u64)
}

fn edges(graph: Handle<Graph>, from: Out<Handle<Node>>, to: Out<Handle<Node>>, count: Out<u64>) -> Outcome {
    let mut found = Vec::new();
    for node in graph.get()?.nodes().iter() {
        let needs = node.get()?.needs.lock().unwrap_or_else(PoisonError::into_inner);
        found.extend(needs.iter().map(|need| (*need, *node)));
    }
    if from.is_null() || to.is_null() {
        return count.set(found.len() as u64);
    }
    let cell = count.get()? as usize;
    from.fill(cell, found.iter().map(|(from, _)| *from))?;
    to.fill(cell, found.iter().map(|(_, to)| *to))?;
    count.set(found.len().min(cell) as u64)
}

fn connect(from: In<Handle<Node>>, to: In<Handle<Node>>, count: u64, keep: bool) -> Outcome {
    for (from, to) in needs(from, count)?.into_iter().zip(needs(to, count)?) {
        let mut known = to.get()?.needs.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|need| *need != from);
        if keep {
            from.get()?;
            known.push(from);
        }
    }
    Ok(())
}

fn dependencies(node: Handle<Node>, nodes: Out<Handle<Node>>, count: Out<u64>) -> Outcome {
    let found = node.get()?.needs.lock().unwrap_or_else(PoisonError::into_inner).clone();
    list(&found, nodes, count)
}

fn dependents(node: Handle<Node>, nodes: Out<Handle<Node>>, count: Out<u64>) -> Outcome {
    let graph = node.get()?.graph.get()?.nodes().clone();
    let needs_it = |other: &&Handle<Node>| {
        let needs = other
            .get()
            .map(|other| other.needs.lock().unwrap_or_else(PoisonError::into_inner).contains(&node));
        needs.unwrap_or(false)
    };
    let found: Vec<Handle<Node>> = graph.iter().filter(needs_it).copied().collect();
    list(&found, nodes, count)
}

entry! {
    fn cuGraphCreate(_process; graph: Out<Handle<Graph>>, flags: u32) {
        graph.check()?;
        if flags != 0 { Err(Code::InvalidValue) } else { graph.set(Handle::new(Graph::default())) }
    }

    fn cuGraphDestroy(process; graph: Handle<Graph>) {
        destroy(process, graph)
    }

    fn cuGraphDestroyNode(_process; node: Handle<Node>) {
        let gone = node.get()?;
        if matches!(gone.task, Task::Allocate { .. } | Task::Free(_)) {
            return Err(Code::NotSupported);
        }
        node.end()?;
        let mut nodes = gone.graph.get()?.nodes();
        nodes.retain(|known| *known != node);
        for other in nodes.iter().filter_map(|other| other.get().ok()) {
            other.needs.lock().unwrap_or_else(PoisonError::into_inner).retain(|need| *need != node);
        }
        Ok(())
    }

    fn cuGraphNodeGetType(_process; node: Handle<Node>, kind: Out<u32>) {
        kind.set(node.get()?.task.kind())
    }

    fn cuGraphGetNodes(_process; graph: Handle<Graph>, nodes: Out<Handle<Node>>, count: Out<u64>) {
        let found = graph.get()?.nodes().clone();
        list(&found, nodes, count)
    }

    fn cuGraphGetRootNodes(_process; graph: Handle<Graph>, nodes: Out<Handle<Node>>, count: Out<u64>) {
        let root = |node: &&Handle<Node>| {
            node.get().is_ok_and(|node| node.needs.lock().unwrap_or_else(PoisonError::into_inner).is_empty())
        };
        let found: Vec<Handle<Node>> = graph.get()?.nodes().iter().filter(root).copied().collect();
        list(&found, nodes, count)
    }

    fn cuGraphGetEdges(
        _process; graph: Handle<Graph>, from: Out<Handle<Node>>, to: Out<Handle<Node>>, count: Out<u64>,
    ) {
        edges(graph, from, to, count)
    }

    fn cuGraphGetEdges_v2(
        _process; graph: Handle<Graph>, from: Out<Handle<Node>>, to: Out<Handle<Node>>, _data: Out<u64>,
        count: Out<u64>,
    ) {
        edges(graph, from, to, count)
    }

    fn cuGraphNodeGetDependencies(_process; node: Handle<Node>, nodes: Out<Handle<Node>>, count: Out<u64>) {
        dependencies(node, nodes, count)
    }

    fn cuGraphNodeGetDependencies_v2(
        _process; node: Handle<Node>, nodes: Out<Handle<Node>>, _data: Out<u64>, count: Out<u64>,
    ) {
        dependencies(node, nodes, count)
    }

    fn cuGraphNodeGetDependentNodes(_process; node: Handle<Node>, nodes: Out<Handle<Node>>, count: Out<u64>) {
        dependents(node, nodes, count)
    }

    fn cuGraphNodeGetDependentNodes_v2(
        _process; node: Handle<Node>, nodes: Out<Handle<Node>>, _data: Out<u64>, count: Out<u64>,
    ) {
        dependents(node, nodes, count)
    }

    fn cuGraphAddDependencies(
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, count: u64,
    ) {
        graph.get()?;
        connect(from, to, count, true)
    }

    fn cuGraphAddDependencies_v2(
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, _data: In<u64>, count:
        u64,
    ) {
        graph.get()?;
        connect(from, to, count, true)
    }

    fn cuGraphRemoveDependencies(
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, count: u64,
    ) {
        graph.get()?;
        connect(from, to, count, false)
    }

    fn cuGraphRemoveDependencies_v2(
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, _data: In<u64>, count:
        u64,
    ) {
        graph.get()?;
        connect(from, to, count, false)
    }
}
