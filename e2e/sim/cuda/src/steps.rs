//! What an executable graph does: a copy of the graph that it was made of.
//!
//! Nodes are paired with those of another graph by the order in which they were made.

use crate::code::Code;
use crate::frame::Outcome;
use crate::graph::{Node, Task};
use crate::handle::Handle;

/// A node as an executable graph has it.
#[derive(Clone)]
pub(crate) struct Step {
    /// Whose copy it is.
    pub(crate) node: Handle<Node>,
    pub(crate) task: Task,
    /// The places of those before it, the first one first.
    pub(crate) needs: Vec<usize>,
    /// Of a child graph.
    pub(crate) within: Vec<Step>,
}

/// `CUgraphExecUpdateResult`: why an update is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Differs {
    Topology = 2,
    Kind = 3,
    NotSupported = 6,
}

/// Nanoseconds of the longest chain.
pub(crate) fn length(steps: &[Step]) -> Outcome<u64> {
    let mut ends: Vec<Option<u64>> = vec![None; steps.len()];
    loop {
        let before = ends.iter().flatten().count();
        for (at, step) in steps.iter().enumerate() {
            let ready = |last: u64, need: &usize| ends.get(*need).copied().flatten().map(|end| end.max(last));
            if let Some(ready) = step.needs.iter().try_fold(0, ready) {
                let time = match step.task {
                    Task::Kernel(time) => time,
                    Task::Child(_) => length(&step.within)?,
                    Task::Moment(_) | Task::Allocate { .. } | Task::Free(_) => 0,
                };
                ends[at] = Some(ready + time);
            }
        }
        // Nodes may need nodes that were made later.
        match ends.iter().flatten().count() {
            all if all == steps.len() => return Ok(ends.into_iter().flatten().max().unwrap_or(0)),
            // A circle.
            same if same == before => return Err(Code::InvalidValue),
            _ => {}
        }
    }
}

/// Calls with each task, those of child graphs too.
pub(crate) fn each(steps: &[Step], visit: &mut impl FnMut(Task)) {
    for step in steps {
        visit(step.task);
        each(&step.within, visit);
    }
}

/// Why an executable graph that does `old` cannot do `new` in its place, and the node at which they differ.
pub(crate) fn differ(old: &[Step], new: &[Step]) -> Option<(Differs, Handle<Node>)> {
    if old.len() != new.len() {
        return Some((Differs::Topology, Handle::NULL));
    }
    old.iter().zip(new).find_map(|(old, new)| match () {
        () if old.task.kind() != new.task.kind() => Some((Differs::Kind, new.node)),
        () if old.needs != new.needs => Some((Differs::Topology, new.node)),
        () => differ(&old.within, &new.within),
    })
}
