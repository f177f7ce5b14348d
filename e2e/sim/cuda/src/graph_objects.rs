//! Graphs: nodes with dependencies. A capture is a graph that a stream's work is added to.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::code::{Code, Outcome};
use crate::handle::{Handle, Object};

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
    pub(crate) needs: Mutex<Vec<Handle<Node>>>,
}

impl Object for Node {
    const MAGIC: u64 = 0x6e6f_6465_5f6c_6976;
}

/// A copy of a node in an executable graph.
#[derive(Clone)]
pub(crate) struct Step {
    /// The node that it is a copy of.
    pub(crate) node: Handle<Node>,
    pub(crate) task: Task,
    /// The positions of its dependencies, in ascending order.
    pub(crate) needs: Vec<usize>,
    /// The steps of a child graph.
    pub(crate) within: Vec<Step>,
}

/// The work of a node, by its `CUgraphNodeType`.
#[derive(Clone, Copy)]
pub(crate) enum Task {
    /// Runs for that many nanoseconds.
    Kernel(u64),
    /// A node of that type, which takes no time here.
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
    pub(crate) fn nodes(&self) -> MutexGuard<'_, Vec<Handle<Node>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies of its nodes, child graphs included.
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

/// A capture of a stream: the chain of nodes that were submitted.
pub(crate) struct Capture {
    id: u64,
    graph: Handle<Graph>,
    last: Option<Handle<Node>>,
}

impl Capture {
    pub(crate) fn new(id: u64) -> Self {
        Self { id, graph: Handle::new(Graph::default()), last: None }
    }

    pub(crate) const fn id(&self) -> u64 {
        self.id
    }

    pub(crate) const fn graph(&self) -> Handle<Graph> {
        self.graph
    }

    pub(crate) fn append(&mut self, task: Task) {
        let needs: Vec<Handle<Node>> = self.last.into_iter().collect();
        // The graph exists as long as the capture, unless the program destroys it.
        self.last = add(self.graph, &needs, task).ok().or(self.last);
    }

    pub(crate) fn work(&mut self, time: u64) {
        self.append(if time == 0 { Task::Moment(EMPTY) } else { Task::Kernel(time) });
    }

    pub(crate) fn free(&mut self, address: u64) {
        self.append(Task::Free(address));
    }
}
