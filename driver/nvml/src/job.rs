//! Jobs of a GPU's thread, and those who wait for them.
//!
//! A job is `Queued`, `Running`, then `Done`. Its caller may give it up: a
//! queued job is then never begun, a running one makes the GPU stuck until it
//! returns. A job that was given up makes no further C call after the one it
//! is in, and what it did by then is announced as [`Event::Late`]. Phase and
//! stuck mark change under the job's lock, so the two always agree.

use crate::code::Code;
use crate::error::NvmlError;
use crate::events::{Event, Late};
use crate::gpm::Sampled;
use crate::raw::{CiProfile, Device, Library};
use crate::read::Description;
use divvy_api::GpuUuid;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Instant;
use tokio::sync::{mpsc::UnboundedSender, oneshot, watch};

/// Address space only: pages count once they are touched, and NVML's own
/// frames are not ours to measure.
const STACK: usize = 256 * 1024;

/// A call that nobody waits for any more and that is still running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StuckCall {
    pub gpu: GpuUuid,
    pub call: &'static str,
    pub since: Instant,
}

/// What callers and thread of a GPU share.
pub(crate) struct Shared {
    gpu: GpuUuid,
    state: Mutex<Thread>,
    stuck: watch::Sender<Option<StuckCall>>,
    lost: AtomicBool,
    events: UnboundedSender<Event>,
}

enum Thread {
    /// Not started: no call was made yet.
    Idle(Box<Seed>),
    Running(mpsc::Sender<Job>),
    Closed,
}

/// What the thread needs to start; `alive` is dropped after the library.
pub(crate) struct Seed {
    pub(crate) library: Arc<Library>,
    /// As enumeration gave it.
    pub(crate) device: Option<Device>,
    pub(crate) alive: tokio::sync::mpsc::Sender<()>,
}

type Job = Box<dyn FnOnce(&mut Worker) + Send>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Queued,
    Running,
    Done,
    GivenUp,
}

/// Where a job stands, shared by its caller and the thread.
struct Progress {
    phase: Phase,
    call: &'static str,
    begun: Instant,
}

/// The thread's side: makes the calls and remembers what does not change.
pub(crate) struct Worker {
    library: Arc<Library>,
    shared: Arc<Shared>,
    device: Option<Device>,
    progress: Arc<Mutex<Progress>>,
    /// What stays as it is while the library is open.
    pub(crate) description: Option<Arc<Description>>,
    /// Compute-instance profiles by GPU-instance profile.
    pub(crate) ci_profiles: BTreeMap<u32, Arc<[CiProfile]>>,
    /// By GPU instance.
    pub(crate) sampled: BTreeMap<Option<u32>, Sampled>,
    // Last, so that it is dropped after the library.
    _alive: tokio::sync::mpsc::Sender<()>,
}

/// A panic while a lock is held leaves plain values behind; they stay usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Without a seed it answers [`NvmlError::Closed`] to everything.
    pub(crate) fn new(gpu: GpuUuid, seed: Option<Seed>, events: UnboundedSender<Event>) -> Self {
        let state = seed.map_or(Thread::Closed, |seed| Thread::Idle(Box::new(seed)));
        let (state, stuck, lost) = (Mutex::new(state), watch::Sender::new(None), AtomicBool::new(false));
        Self { gpu, state, stuck, lost, events }
    }

    pub(crate) fn gpu(&self) -> &GpuUuid {
        &self.gpu
    }

    pub(crate) fn stuck(&self) -> Option<StuckCall> {
        self.stuck.borrow().clone()
    }

    /// No new jobs; the thread ends after those it has.
    pub(crate) fn close(&self) {
        *lock(&self.state) = Thread::Closed;
    }

    fn send(self: &Arc<Self>, job: Job) -> Result<(), NvmlError> {
        let closed = || NvmlError::Closed { gpu: self.gpu.clone() };
        let mut state = lock(&self.state);
        if let Thread::Idle(_) = &*state {
            let Thread::Idle(seed) = std::mem::replace(&mut *state, Thread::Closed) else {
                return Err(closed());
            };
            *state = Thread::Running(self.start(*seed)?);
        }
        match &*state {
            Thread::Running(jobs) => jobs.send(job).map_err(|_| closed()),
            Thread::Idle(_) | Thread::Closed => Err(closed()),
        }
    }

    fn start(self: &Arc<Self>, seed: Seed) -> Result<mpsc::Sender<Job>, NvmlError> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let mut worker = Worker {
            library: seed.library,
            shared: Arc::clone(self),
            device: seed.device,
            progress: Arc::new(Mutex::new(Progress { phase: Phase::Done, call: "", begun: Instant::now() })),
            description: None,
            ci_profiles: BTreeMap::new(),
            sampled: BTreeMap::new(),
            _alive: seed.alive,
        };
        std::thread::Builder::new()
            .name("nvml-gpu".to_owned())
            .stack_size(STACK)
            .spawn(move || {
                for job in queue {
                    job(&mut worker);
                }
            })
            .map_err(|cause| NvmlError::Thread { gpu: self.gpu.clone(), cause: cause.kind() })?;
        Ok(jobs)
    }

    fn tell(&self, event: Event) {
        // Nobody listens after close.
        let _unheard = self.events.send(event);
    }
}

/// Queues a job now and gives the future of its result.
pub(crate) fn submit<T, F>(
    shared: &Arc<Shared>,
    call: &'static str,
    deadline: Instant,
    work: F,
) -> impl Future<Output = Result<T, NvmlError>> + use<T, F>
where
    T: Send + 'static,
    F: FnOnce(&mut Worker) -> Result<T, NvmlError> + Send + 'static,
{
    let now = Instant::now();
    let progress = Arc::new(Mutex::new(Progress { phase: Phase::Queued, call, begun: now }));
    let (answer, result) = oneshot::channel();
    let job: Job = Box::new({
        let progress = Arc::clone(&progress);
        move |worker| worker.run(progress, answer, work)
    });
    // Before the job is sent: a GPU that gets stuck from here on is seen.
    let stuck = shared.stuck.subscribe();
    let sent = match shared.stuck() {
        Some(StuckCall { call, since, gpu }) => Err(NvmlError::Stuck { call, gpu, since }),
        None => shared.send(job),
    };
    let waiting = Waiting { shared: Arc::clone(shared), progress };
    async move {
        sent?;
        waiting.wait(call, now, deadline, result, stuck).await
    }
}

/// The caller's side of a job. Dropped before the job is done, it gives the job up.
struct Waiting {
    shared: Arc<Shared>,
    progress: Arc<Mutex<Progress>>,
}

impl Waiting {
    async fn wait<T>(
        self,
        call: &'static str,
        sent: Instant,
        deadline: Instant,
        mut result: oneshot::Receiver<Result<T, NvmlError>>,
        mut stuck: watch::Receiver<Option<StuckCall>>,
    ) -> Result<T, NvmlError> {
        let gpu = self.shared.gpu.clone();
        let after = deadline.saturating_duration_since(sent);
        let timer = tokio::time::sleep_until(deadline.into());
        tokio::pin!(timer);
        let another_is_stuck = tokio::select! {
            biased;
            answer = &mut result => return answer.unwrap_or(Err(NvmlError::Closed { gpu })),
            () = &mut timer => None,
            seen = stuck.wait_for(Option::is_some) => seen.ok().and_then(|seen| seen.clone()),
        };
        match (self.give_up(), another_is_stuck) {
            (Phase::Queued, Some(StuckCall { call, since, .. })) => {
                Err(NvmlError::Stuck { call, gpu, since })
            }
            (Phase::Queued, None) => Err(NvmlError::Busy { call, gpu, after }),
            (Phase::Running | Phase::GivenUp, _) => {
                let call = lock(&self.progress).call;
                Err(NvmlError::Deadline { call, gpu, after })
            }
            (Phase::Done, _) => result.await.unwrap_or(Err(NvmlError::Closed { gpu })),
        }
    }

    /// Gives the job up and tells in which phase it was.
    fn give_up(&self) -> Phase {
        let mut progress = lock(&self.progress);
        let was = progress.phase;
        match was {
            Phase::Queued => progress.phase = Phase::GivenUp,
            Phase::Running => {
                progress.phase = Phase::GivenUp;
                let stuck =
                    StuckCall { gpu: self.shared.gpu.clone(), call: progress.call, since: progress.begun };
                self.shared.tell(Event::Stuck(stuck.clone()));
                self.shared.stuck.send_replace(Some(stuck));
            }
            Phase::Done | Phase::GivenUp => {}
        }
        was
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl Worker {
    fn run<T>(
        &mut self,
        progress: Arc<Mutex<Progress>>,
        answer: oneshot::Sender<Result<T, NvmlError>>,
        work: impl FnOnce(&mut Self) -> Result<T, NvmlError>,
    ) {
        {
            let mut progress = lock(&progress);
            if progress.phase != Phase::Queued {
                return;
            }
            progress.phase = Phase::Running;
            progress.begun = Instant::now();
        }
        self.progress = Arc::clone(&progress);
        let result = work(self);
        self.notice(&result);

        let mut progress = lock(&progress);
        if progress.phase == Phase::GivenUp {
            self.shared.stuck.send_replace(None);
            let after = progress.begun.elapsed();
            let late =
                Late { gpu: self.shared.gpu.clone(), call: progress.call, after, result: result.map(drop) };
            self.shared.tell(Event::Late(late));
        } else {
            progress.phase = Phase::Done;
            // The caller holds the other end until the phase is Done or GivenUp.
            let _unheard = answer.send(result);
        }
    }

    /// Tells once when the GPU is lost, and looks the handle up again after an answer that fits a stale one.
    fn notice<T>(&mut self, result: &Result<T, NvmlError>) {
        match result {
            Ok(_) => self.shared.lost.store(false, Ordering::Relaxed),
            Err(NvmlError::Lost { call, gpu }) => {
                if !self.shared.lost.swap(true, Ordering::Relaxed) {
                    self.shared.tell(Event::Lost { gpu: gpu.clone(), call });
                }
            }
            Err(NvmlError::Call {
                code: Code::InvalidArgument | Code::Uninitialized | Code::GpuNotFound,
                ..
            }) => {
                self.device = None;
            }
            Err(_) => {}
        }
    }

    /// The GPU.
    pub(crate) fn gpu(&self) -> GpuUuid {
        self.shared.gpu.clone()
    }

    /// Makes one C call of the current job, unless the job was given up.
    pub(crate) fn call<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&Library) -> Result<T, Code>,
    ) -> Result<T, NvmlError> {
        {
            let mut progress = lock(&self.progress);
            if progress.phase == Phase::GivenUp {
                let after = progress.begun.elapsed();
                return Err(NvmlError::Deadline { call: progress.call, gpu: self.gpu(), after });
            }
            progress.call = name;
        }
        call(&self.library).map_err(|code| match code {
            Code::GpuIsLost => NvmlError::Lost { call: name, gpu: self.gpu() },
            code => NvmlError::Call { call: name, gpu: self.gpu(), code },
        })
    }

    /// The GPU's handle, looked up by UUID where enumeration did not give it.
    pub(crate) fn device(&mut self) -> Result<Device, NvmlError> {
        if let Some(device) = self.device {
            return Ok(device);
        }
        let device =
            self.call("nvmlDeviceGetHandleByUUID", |nvml| nvml.device_by_uuid(self.shared.gpu.as_str()))?;
        self.device = Some(device);
        Ok(device)
    }
}
