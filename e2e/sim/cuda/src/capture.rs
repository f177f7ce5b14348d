//! Stream captures: submitted work becomes nodes of a graph instead of being executed.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use crate::argument::Out;
use crate::code::{Code, Outcome};
use crate::frame::entry;
use crate::graph::plan_memory;
use crate::graph_objects::{Capture, Graph, Task};
use crate::handle::Handle;
use crate::objects::{Context, LEGACY_STREAM, Process, Stream, next_id};

impl Capture {
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

    /// In a capture, adds an allocation node and returns its address.
    pub(crate) fn capture_allocation(&self, process: &'static Process, size: u64) -> Outcome<Option<u64>> {
        if !self.captures.load(Ordering::Acquire) {
            return Ok(None);
        }
        let mut capture = self.capturing();
        capture.as_mut().map(|capture| capture.allocation(process, self.context, size)).transpose()
    }

    /// In a capture, adds a free node. Returns whether the stream is in a capture.
    pub(crate) fn capture_free(&self, address: u64) -> bool {
        self.captures.load(Ordering::Acquire)
            && self.capturing().as_mut().map(|capture| capture.free(address)).is_some()
    }

    /// In a capture, adds a node with `length` nanoseconds of work. Returns whether the stream is
    /// in a capture.
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
    if !own && matches!(stream.number(), 0 | LEGACY_STREAM) {
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
    fn cuStreamIsCapturing | cuStreamIsCapturing_ptsz(
        _process, own; stream: Handle<Stream>, status: Out<u32>,
    ) {
        status.set(u32::from(Stream::of(stream, own)?.capturing().is_some()))
    }

    fn cuStreamBeginCapture | cuStreamBeginCapture_ptsz(_process, own; stream: Handle<Stream>) {
        begin_capture(stream, own)
    }

    fn cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz(
        _process, own; stream: Handle<Stream>, _mode: u32,
    ) {
        begin_capture(stream, own)
    }

    fn cuStreamEndCapture | cuStreamEndCapture_ptsz(
        _process, own; stream: Handle<Stream>, graph: Out<Handle<Graph>>,
    ) {
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

    /// Returns the previous mode: always the strictest, the only one that is implemented.
    fn cuThreadExchangeStreamCaptureMode(_process; mode: Out<u32>) {
        mode.set(0)
    }
}
