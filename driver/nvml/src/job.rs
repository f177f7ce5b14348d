//! Jobs of the thread of one GPU, and the callers that wait for them.
//!
//! A job is `Queued`, `Running`, then `Done`. A caller can abandon its job: a queued job is then
//! never started, and a running one makes the GPU stuck until it returns. An abandoned job finishes
//! its current C call and makes no further one; [`Event::LateReturn`] reports it. Phase and stuck
//! state change under the lock of the job, so they always agree.

use crate::code::Code;
use crate::error::NvmlError;
use crate::events::{Event, LateReturn, StuckCall};
use crate::raw::{CiProfile, Device, Library, TimedSample};
use crate::types::Description;
use divvy_api::GpuUuid;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Instant;
use tokio::sync::{mpsc::UnboundedSender, oneshot, watch};

/// Reserved address space of the thread. Only touched pages use memory, and the stack use of NVML
/// is unknown.
const THREAD_STACK_BYTES: usize = 256 * 1024;

/// State shared by the callers and the thread of a GPU.
pub(crate) struct Shared {
    gpu: GpuUuid,
    state: Mutex<Thread>,
    stuck: watch::Sender<Option<StuckCall>>,
    lost: AtomicBool,
    events: UnboundedSender<Event>,
}

enum Thread {
    /// No call was made yet, so there is no thread.
    Idle(Box<Seed>),
    Running(mpsc::Sender<Job>),
    Closed,
}

/// Data to start the thread. `alive` is dropped after the library.
pub(crate) struct Seed {
    pub(crate) library: Arc<Library>,
    /// The handle from the enumeration, if the GPU was found.
    pub(crate) device: Option<Device>,
    pub(crate) alive: tokio::sync::mpsc::Sender<()>,
}

type Job = Box<dyn FnOnce(&mut Worker) + Send>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Queued,
    Running,
    Done,
    Abandoned,
}

/// Progress of a job, shared by its caller and the thread.
struct Progress {
    phase: Phase,
    call: &'static str,
    begun: Instant,
}

/// The state of the thread: it makes the calls and caches constant data.
pub(crate) struct Worker {
    library: Arc<Library>,
    shared: Arc<Shared>,
    device: Option<Device>,
    progress: Arc<Mutex<Progress>>,
    /// Constant while the library is open.
    pub(crate) description: Option<Arc<Description>>,
    /// Compute instance profiles by GPU instance profile id.
    pub(crate) ci_profiles: BTreeMap<u32, Arc<[CiProfile]>>,
    /// The last GPM sample by GPU instance; `None` is the whole GPU.
    pub(crate) gpm_samples: BTreeMap<Option<u32>, TimedSample>,
    // The last field, so it is dropped after the library.
    _alive: tokio::sync::mpsc::Sender<()>,
}

/// Locks a mutex. A panic under the lock leaves plain values behind, so poisoning is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Without a seed, every call fails with [`NvmlError::Closed`].
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

    /// Rejects new jobs. The thread exits after the queued ones.
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
            gpm_samples: BTreeMap::new(),
            _alive: seed.alive,
        };
        std::thread::Builder::new()
            .name("nvml-gpu".to_owned())
            .stack_size(THREAD_STACK_BYTES)
            .spawn(move || {
                for job in queue {
                    job(&mut worker);
                }
            })
            .map_err(|cause| NvmlError::Thread { gpu: self.gpu.clone(), cause: cause.kind() })?;
        Ok(jobs)
    }

    fn send_event(&self, event: Event) {
        // After close there is no receiver.
        let _no_receiver = self.events.send(event);
    }
}

/// Queues a job at once and returns the future of its result.
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
    // Subscribe before the job is sent, so that no later stuck state is missed.
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

/// The caller's side of a job. Dropping it before the job is done abandons the job.
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
        let stuck_call = tokio::select! {
            biased;
            answer = &mut result => return answer.unwrap_or(Err(NvmlError::Closed { gpu })),
            () = &mut timer => None,
            seen = stuck.wait_for(Option::is_some) => seen.ok().and_then(|seen| seen.clone()),
        };
        match (self.abandon(), stuck_call) {
            (Phase::Queued, Some(StuckCall { call, since, .. })) => {
                Err(NvmlError::Stuck { call, gpu, since })
            }
            (Phase::Queued, None) => Err(NvmlError::Busy { call, gpu, after }),
            (Phase::Running | Phase::Abandoned, _) => {
                let call = lock(&self.progress).call;
                Err(NvmlError::Deadline { call, gpu, after })
            }
            (Phase::Done, _) => result.await.unwrap_or(Err(NvmlError::Closed { gpu })),
        }
    }

    /// Abandons the job and returns its previous phase.
    fn abandon(&self) -> Phase {
        let mut progress = lock(&self.progress);
        let was = progress.phase;
        match was {
            Phase::Queued => progress.phase = Phase::Abandoned,
            Phase::Running => {
                progress.phase = Phase::Abandoned;
                let stuck =
                    StuckCall { gpu: self.shared.gpu.clone(), call: progress.call, since: progress.begun };
                self.shared.send_event(Event::Stuck(stuck.clone()));
                self.shared.stuck.send_replace(Some(stuck));
            }
            Phase::Done | Phase::Abandoned => {}
        }
        was
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.abandon();
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
        self.handle_result(&result);

        let mut progress = lock(&progress);
        if progress.phase == Phase::Abandoned {
            self.shared.stuck.send_replace(None);
            let after = progress.begun.elapsed();
            let late = LateReturn {
                gpu: self.shared.gpu.clone(),
                call: progress.call,
                after,
                result: result.map(drop),
            };
            self.shared.send_event(Event::LateReturn(late));
        } else {
            progress.phase = Phase::Done;
            // The caller keeps the receiver until the phase is Done or Abandoned.
            let _no_receiver = answer.send(result);
        }
    }

    /// Reports a lost GPU once. After an error that may mean a stale handle, drops the handle so
    /// that it is looked up again.
    fn handle_result<T>(&mut self, result: &Result<T, NvmlError>) {
        match result {
            Ok(_) => self.shared.lost.store(false, Ordering::Relaxed),
            Err(NvmlError::Lost { call, gpu }) => {
                if !self.shared.lost.swap(true, Ordering::Relaxed) {
                    self.shared.send_event(Event::Lost { gpu: gpu.clone(), call });
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

    /// The UUID of the GPU.
    pub(crate) fn gpu(&self) -> GpuUuid {
        self.shared.gpu.clone()
    }

    /// Sends an event of the GPU.
    pub(crate) fn send_event(&self, event: Event) {
        self.shared.send_event(event);
    }

    /// Makes one C call of the current job, unless the job was abandoned.
    pub(crate) fn call<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&Library) -> Result<T, Code>,
    ) -> Result<T, NvmlError> {
        {
            let mut progress = lock(&self.progress);
            if progress.phase == Phase::Abandoned {
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

    /// The GPU's handle, looked up by UUID if the enumeration did not return it.
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
