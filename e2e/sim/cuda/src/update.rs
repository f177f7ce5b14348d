//! Updates: an executable graph that does what another graph says, as long as that has nodes of the same types in the same
//! order.
//!
//! Memory nodes allocate what those of the other graph do, of whatever size, unless another executable graph may be
//! launched with it. Nodes by themselves take other parameters unless they are memory nodes.

use crate::argument::Out;
use crate::code::Code;
use crate::executable::{Executable, Plan};
use crate::frame::{Outcome, entry};
use crate::graph::{Graph, Node, Task};
use crate::handle::Handle;
use crate::node::task;
use crate::process::Process;
use crate::steps::{self, Differs, Step};

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Report {
    result: u32,
    node: Handle<Node>,
    from: Handle<Node>,
}

/// What an update says besides its code.
fn report(refused: Option<(Differs, Handle<Node>)>) -> (Outcome, Report) {
    let (result, node) = refused.map_or((0, Handle::NULL), |(why, node)| (why as u32, node));
    let outcome = if refused.is_none() { Ok(()) } else { Err(Code::GraphExecUpdateFailure) };
    (outcome, Report { result, node, from: Handle::NULL })
}

/// Has an executable graph do other steps: why it cannot.
fn update(
    process: &Process,
    executable: Handle<Executable>,
    steps: Vec<Step>,
) -> Outcome<Option<(Differs, Handle<Node>)>> {
    let mut plan = executable.get()?.plan();
    if let Some(refused) = steps::differ(&plan.steps, &steps) {
        return Ok(Some(refused));
    }
    let new = Plan::of(steps)?;
    if !new.claim(process, Some(&plan)) {
        return Ok(Some((Differs::NotSupported, Handle::NULL)));
    }
    plan.unclaim(process, Some(&new));
    *plan = new;
    Ok(None)
}

/// The same with one node changed.
fn change(process: &Process, executable: Handle<Executable>, node: Handle<Node>, task: Task) -> Outcome {
    let mut steps = executable.get()?.plan().steps.clone();
    let step = steps.iter_mut().find(|step| step.node == node).ok_or(Code::InvalidValue)?;
    if step.task.kind() != task.kind() {
        return Err(Code::InvalidValue);
    }
    if let Task::Child(graph) = task {
        let within = graph.get()?.steps()?;
        if steps::differ(&step.within, &within).is_some() {
            return Err(Code::InvalidValue);
        }
        step.within = within;
    }
    step.task = task;
    match update(process, executable, steps)? {
        None => Ok(()),
        Some(_) => Err(Code::InvalidValue),
    }
}

entry! {
    fn cuGraphExecUpdate(
        process; executable: Handle<Executable>, graph: Handle<Graph>, node: Out<Handle<Node>>, result: Out<u32>,
    ) {
        let (outcome, report) = report(update(process, executable, graph.get()?.steps()?)?);
        node.offer(report.node);
        result.offer(report.result);
        outcome
    }

    fn cuGraphExecUpdate_v2(process; executable: Handle<Executable>, graph: Handle<Graph>, result: Out<Report>) {
        let (outcome, report) = report(update(process, executable, graph.get()?.steps()?)?);
        result.offer(report);
        outcome
    }

    fn cuGraphExecChildGraphNodeSetParams(
        process; executable: Handle<Executable>, node: Handle<Node>, child: Handle<Graph>,
    ) {
        change(process, executable, node, Task::Child(child))
    }

    fn cuGraphExecNodeSetParams(process; executable: Handle<Executable>, node: Handle<Node>, parameters: Out<u8>) {
        change(process, executable, node, task(parameters)?)
    }
}
