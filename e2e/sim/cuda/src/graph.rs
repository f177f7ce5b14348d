//! Graphs: nodes in order, and memory that belongs to them.
//!
//! Memory of allocation nodes has its address from the day the node is made, and is there from a launch until it is
//! freed, by a node or by the program.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::argument::{In, Out};
use crate::code::Code;
use crate::content::Content;
use crate::context::Context;
use crate::device::read_all;
use crate::frame::{Outcome, entry};
use crate::handle::{Handle, Object};
use crate::memory::Payer;
use crate::process::Process;
use crate::steps::Step;

/// A graph.
#[derive(Default)]
pub(crate) struct Graph {
    nodes: Mutex<Vec<Handle<Node>>>,
}

impl Object for Graph {
    const MAGIC: u64 = 0x6772_6170_5f6c_6976;
}

/// A node of a graph.
pub(crate) struct Node {
    pub(crate) graph: Handle<Graph>,
    pub(crate) task: Task,
    needs: Mutex<Vec<Handle<Node>>>,
}

impl Object for Node {
    const MAGIC: u64 = 0x6e6f_6465_5f6c_6976;
}

/// What a node does, with its `CUgraphNodeType`.
#[derive(Clone, Copy)]
pub(crate) enum Task {
    /// For so many nanoseconds.
    Kernel(u64),
    /// Of a type that takes no time here.
    Moment(u32),
    Allocate {
        address: u64,
        size: u64,
        /// Ordinal.
        device: i32,
    },
    Free(u64),
    Child(Handle<Graph>),
}

impl Task {
    pub(crate) const fn kind(self) -> u32 {
        match self {
            Self::Kernel(_) => 0,
            Self::Moment(kind) => kind,
            Self::Allocate { .. } => 10,
            Self::Free(_) => 11,
            Self::Child(_) => 4,
        }
    }
}

pub(crate) const COPY: u32 = 1;
pub(crate) const FILL: u32 = 2;
pub(crate) const HOST: u32 = 3;
pub(crate) const EMPTY: u32 = 5;
pub(crate) const WAIT: u32 = 6;
pub(crate) const RECORD: u32 = 7;

impl Graph {
    fn nodes(&self) -> MutexGuard<'_, Vec<Handle<Node>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its nodes as they are now, and those of the graphs within it.
    pub(crate) fn steps(&self) -> Outcome<Vec<Step>> {
        let nodes = self.nodes().clone();
        let places: HashMap<usize, usize> = nodes.iter().map(|node| node.number()).zip(0..).collect();
        let step = |handle: &Handle<Node>| {
            let node = handle.get()?;
            let needs = node.needs.lock().unwrap_or_else(PoisonError::into_inner);
            let place = |need: &Handle<Node>| places.get(&need.number()).copied().ok_or(Code::InvalidValue);
            let mut needs = needs.iter().map(place).collect::<Outcome<Vec<usize>>>()?;
            needs.sort_unstable();
            let within = if let Task::Child(graph) = node.task { graph.get()?.steps()? } else { Vec::new() };
            Ok(Step { node: *handle, task: node.task, needs, within })
        };
        nodes.iter().map(step).collect()
    }
}

pub(crate) fn add(graph: Handle<Graph>, needs: &[Handle<Node>], task: Task) -> Outcome<Handle<Node>> {
    let mut nodes = graph.get()?.nodes();
    if needs.iter().any(|need| !need.get().is_ok_and(|node| node.graph == graph)) {
        return Err(Code::InvalidValue);
    }
    let node = Handle::new(Node { graph, task, needs: Mutex::new(needs.to_vec()) });
    nodes.push(node);
    Ok(node)
}

/// An address for a graph's memory, which is not there yet.
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

/// Nodes as the caller asks for them: how many, and as many as fit.
fn list(found: &[Handle<Node>], nodes: Out<Handle<Node>>, count: Out<u64>) -> Outcome {
    if !nodes.is_null() {
        let room = count.get()? as usize;
        nodes.fill(room, found.iter().copied().chain(std::iter::repeat(Handle::NULL)))?;
        return count.set(found.len().min(room) as u64);
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
    let room = count.get()? as usize;
    from.fill(room, found.iter().map(|(from, _)| *from))?;
    to.fill(room, found.iter().map(|(_, to)| *to))?;
    count.set(found.len().min(room) as u64)
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
        _process; graph: Handle<Graph>, from: Out<Handle<Node>>, to: Out<Handle<Node>>, _data: Out<u64>, count: Out<u64>,
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
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, _data: In<u64>, count: u64,
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
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, _data: In<u64>, count: u64,
    ) {
        graph.get()?;
        connect(from, to, count, false)
    }
}
