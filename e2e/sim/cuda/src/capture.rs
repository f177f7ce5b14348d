//! Captures: what a stream notes as nodes of a graph instead of doing it.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use crate::argument::Out;
use crate::code::Code;
use crate::context::Context;
use crate::frame::{Outcome, entry};
use crate::graph::{EMPTY, Graph, Node, Task, add, plan_memory};
use crate::handle::Handle;
use crate::process::Process;
use crate::stream::{LEGACY, Stream, next_id};

/// What a stream notes instead of doing it: a chain of nodes.
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

    fn append(&mut self, task: Task) {
        let needs: Vec<Handle<Node>> = self.last.into_iter().collect();
        // The graph lives as long as the capture, unless the program destroys it.
        self.last = add(self.graph, &needs, task).ok().or(self.last);
    }

    pub(crate) fn work(&mut self, time: u64) {
        self.append(if time == 0 { Task::Moment(EMPTY) } else { Task::Kernel(time) });
    }

    pub(crate) fn free(&mut self, address: u64) {
        self.append(Task::Free(address));
    }

    pub(crate) fn allocation(
        &mut self,
        process: &'static Process,
        context: &'static Context,
        size: u64,
    ) -> Outcome<u64> {
        let task = plan_memory(process, context, size)?;
        self.append(task);
        if let Task::Allocate { address, .. } = task { Ok(address) } else { Err(Code::Unknown) }
    }
}

impl Stream {
    pub(crate) fn capturing(&self) -> MutexGuard<'_, Option<Capture>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In a capture, the address of a node that will allocate.
    pub(crate) fn capture_allocation(&self, process: &'static Process, size: u64) -> Outcome<Option<u64>> {
        if !self.captures.load(Ordering::Acquire) {
            return Ok(None);
        }
        let mut capture = self.capturing();
        capture.as_mut().map(|capture| capture.allocation(process, self.context, size)).transpose()
    }

    /// In a capture, a node that will free.
    pub(crate) fn capture_free(&self, address: u64) -> bool {
        self.captures.load(Ordering::Acquire)
            && self.capturing().as_mut().map(|capture| capture.free(address)).is_some()
    }

    /// In a capture, a node that works for so long.
    #[inline]
    pub(crate) fn capture_work(&self, length: u64) -> bool {
        self.captures.load(Ordering::Acquire) && self.note_work(length)
    }

    fn note_work(&self, length: u64) -> bool {
        self.capturing().as_mut().map(|capture| capture.work(length)).is_some()
    }
}

fn begin_capture(stream: Handle<Stream>, own: bool) -> Outcome {
    // The legacy stream cannot be captured.
    if !own && matches!(stream.number(), 0 | LEGACY) {
        return Err(Code::StreamCaptureUnsupported);
    }
    let stream = Stream::of(stream, own)?;
    let mut capture = stream.capturing();
    if capture.is_some() {
        return Err(Code::IllegalState);
    }
    *capture = Some(Capture::new(next_id()));
    stream.captures.store(true, Ordering::Release);
    Ok(())
}

fn capture_info(
    stream: Handle<Stream>,
    own: bool,
    status: Out<u32>,
    id: Out<u64>,
    graph: Option<Out<Handle<Graph>>>,
) -> Outcome {
    status.check()?;
    let capture = Stream::of(stream, own)?.capturing();
    status.set(u32::from(capture.is_some()))?;
    if let Some(capture) = &*capture {
        id.offer(capture.id());
        if let Some(graph) = graph {
            graph.offer(capture.graph());
        }
    }
    Ok(())
}

entry! {
    fn cuStreamIsCapturing | cuStreamIsCapturing_ptsz(_process, own; stream: Handle<Stream>, status: Out<u32>) {
        status.set(u32::from(Stream::of(stream, own)?.capturing().is_some()))
    }

    fn cuStreamBeginCapture | cuStreamBeginCapture_ptsz(_process, own; stream: Handle<Stream>) {
        begin_capture(stream, own)
    }

    fn cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz(_process, own; stream: Handle<Stream>, _mode: u32) {
        begin_capture(stream, own)
    }

    fn cuStreamEndCapture | cuStreamEndCapture_ptsz(_process, own; stream: Handle<Stream>, graph: Out<Handle<Graph>>) {
        graph.check()?;
        let stream = Stream::of(stream, own)?;
        let capture = stream.capturing().take().ok_or(Code::StreamCaptureUnmatched)?;
        stream.captures.store(false, Ordering::Release);
        graph.set(capture.graph())
    }

    fn cuStreamGetCaptureInfo | cuStreamGetCaptureInfo_ptsz(
        _process, own; stream: Handle<Stream>, status: Out<u32>, id: Out<u64>,
    ) {
        capture_info(stream, own, status, id, None)
    }

    fn cuStreamGetCaptureInfo_v2 | cuStreamGetCaptureInfo_v2_ptsz(
        _process, own; stream: Handle<Stream>, status: Out<u32>, id: Out<u64>, graph: Out<Handle<Graph>>,
        _nodes: Out<usize>, count: Out<u64>,
    ) {
        count.offer(0);
        capture_info(stream, own, status, id, Some(graph))
    }

    fn cuStreamGetCaptureInfo_v3 | cuStreamGetCaptureInfo_v3_ptsz(
        _process, own; stream: Handle<Stream>, status: Out<u32>, id: Out<u64>, graph: Out<Handle<Graph>>,
        _nodes: Out<usize>, _edges: Out<usize>, count: Out<u64>,
    ) {
        count.offer(0);
        capture_info(stream, own, status, id, Some(graph))
    }

    /// The mode that was: the strictest, and the only one here.
    fn cuThreadExchangeStreamCaptureMode(_process; mode: Out<u32>) {
        mode.set(0)
    }
}
