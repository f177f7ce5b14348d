//! Events: marks on the timeline of a stream, to wait for and to measure between.

use std::sync::{Arc, Mutex, PoisonError};

use divvy_sim::GpuProcess;
use divvy_sim::usage::{Mark, now};

use crate::argument::Out;
use crate::code::{Code, Outcome};
use crate::frame::entry;
use crate::handle::{Handle, Object};
use crate::objects::{Context, SHORT_SPIN_TIME, SPIN_TIME, Stream, current_context};

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIME: u32 = 2;
/// `CU_EVENT_BLOCKING_SYNC`.
const BLOCKING_SYNC: u32 = 1;

/// An event.
pub(crate) struct Event {
    context: &'static Context,
    flags: u32,
    recorded: Mutex<Option<Recorded>>,
}

impl Object for Event {
    const MAGIC: u64 = 0x6576_6e74_5f6c_6976;
}

#[derive(Clone)]
struct Recorded {
    mark: Mark,
    /// The process whose timeline the mark is on.
    gpu_process: Arc<GpuProcess>,
    /// The time of the recording, if all earlier work was done by then.
    time: Option<u64>,
}

impl Recorded {
    fn is_done(&self) -> bool {
        self.time.is_some() || self.gpu_process.progress() >= self.mark
    }

    fn time(&self) -> u64 {
        self.time.unwrap_or_else(|| self.gpu_process.time_of(self.mark))
    }
}

impl Event {
    fn recorded(&self) -> Option<Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn record(&self, stream: &'static Stream) {
        let mark = stream.end();
        let gpu_process = Arc::clone(&stream.context.gpu_process);
        let time = (gpu_process.progress() >= mark).then(now);
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Recorded { mark, gpu_process, time });
    }
}

fn record(event: Handle<Event>, stream: Handle<Stream>, own: bool) -> Outcome {
    let (event, stream) = (event.get()?, Stream::of(stream, own)?);
    if event.context.id != stream.context.id {
        return Err(Code::InvalidHandle);
    }
    if !stream.capture_work(0) {
        event.record(stream);
    }
    Ok(())
}

fn elapsed(milliseconds: Out<f32>, begin: Handle<Event>, end: Handle<Event>) -> Outcome {
    milliseconds.check()?;
    let (begin, end) = (begin.get()?, end.get()?);
    if (begin.flags | end.flags) & NO_TIME != 0 {
        return Err(Code::InvalidHandle);
    }
    let recorded = |event: &Event| event.recorded().ok_or(Code::InvalidHandle);
    let (begin, end) = (recorded(begin)?, recorded(end)?);
    if !begin.is_done() || !end.is_done() {
        return Err(Code::NotReady);
    }
    let nanoseconds = end.time() as i64 - begin.time() as i64;
    milliseconds.set(nanoseconds as f32 / 1e6)
}

entry! {
    fn cuStreamWaitEvent | cuStreamWaitEvent_ptsz(
        _process, own; stream: Handle<Stream>, event: Handle<Event>, _flags: u32,
    ) {
        let (stream, event) = (Stream::of(stream, own)?, event.get()?);
        if let Some(recorded) = event.recorded() {
            if Arc::ptr_eq(&recorded.gpu_process, &stream.context.gpu_process) {
                stream.wait_behind(recorded.mark);
            } else {
                // Marks on the timelines of two devices cannot be compared.
                recorded.gpu_process.wait_for(recorded.mark, SHORT_SPIN_TIME);
            }
        }
        Ok(())
    }

    fn cuEventCreate(_process; event: Out<Handle<Event>>, flags: u32) {
        event.check()?;
        if flags & !7 != 0 {
            return Err(Code::InvalidValue);
        }
        event.set(Handle::new(Event { context: current_context()?, flags, recorded: Mutex::new(None) }))
    }

    fn cuEventDestroy(_process; event: Handle<Event>) {
        event.end().map(drop)
    }

    fn cuEventDestroy_v2(_process; event: Handle<Event>) {
        event.end().map(drop)
    }

    fn cuEventRecord | cuEventRecord_ptsz(_process, own; event: Handle<Event>, stream: Handle<Stream>) {
        record(event, stream, own)
    }

    fn cuEventRecordWithFlags | cuEventRecordWithFlags_ptsz(
        _process, own; event: Handle<Event>, stream: Handle<Stream>, _flags: u32,
    ) {
        record(event, stream, own)
    }

    fn cuEventQuery(_process; event: Handle<Event>) {
        let done = event.get()?.recorded().is_none_or(|recorded| recorded.is_done());
        if done { Ok(()) } else { Err(Code::NotReady) }
    }

    fn cuEventSynchronize(_process; event: Handle<Event>) {
        let event = event.get()?;
        if let Some(recorded) = event.recorded().filter(|recorded| recorded.time.is_none()) {
            let sleeps = event.flags & BLOCKING_SYNC != 0;
            recorded.gpu_process.wait_for(recorded.mark, if sleeps { SHORT_SPIN_TIME } else { SPIN_TIME });
        }
        event.context.device.settle_pools();
        Ok(())
    }

    fn cuEventElapsedTime(_process; milliseconds: Out<f32>, begin: Handle<Event>, end: Handle<Event>) {
        elapsed(milliseconds, begin, end)
    }

    fn cuEventElapsedTime_v2(_process; milliseconds: Out<f32>, begin: Handle<Event>, end: Handle<Event>) {
        elapsed(milliseconds, begin, end)
    }
}
