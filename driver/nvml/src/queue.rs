//! One GPU's queue: a thread that runs calls in order, and the deadlines of
//! those who wait for them.
//!
//! A job is `Queued`, `Running`, then `Done`. Its caller may give it up: a
//! queued job is then never begun, a running one makes the GPU stuck until it
//! returns. A job that was given up makes no further C call after the one it
//! is in, and what it did by then is announced as [`Event::Late`]. Phase and
//! stuck mark change under the job's lock, so the two always agree.

use crate::code::Code;
use crate::error::NvmlError;
use crate::events::{Event, Late};
use crate::raw::{CiProfile, Device, Library};
use crate::read::{Description, RawInstance, State};
use crate::session::Limits;
use divvy_api::GpuUuid;
use divvy_model::inventory::{ComputeInstance, MigMode};
use divvy_model::placement::Placement;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
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

/// Calls on one GPU, in order, each with a deadline. Cheap to clone.
#[derive(Clone)]
pub struct GpuQueue {
    shared: Arc<Shared>,
    limits: Limits,
    not_after: Option<Instant>,
}

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
struct Seed {
    library: Arc<Library>,
    device: Option<Device>,
    alive: tokio::sync::mpsc::Sender<()>,
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
    // Last, so that it is dropped after the library.
    _alive: tokio::sync::mpsc::Sender<()>,
}

/// A panic while a lock is held leaves plain values behind; they stay usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GpuQueue {
    pub(crate) fn new(
        gpu: GpuUuid,
        library: Arc<Library>,
        device: Option<Device>,
        alive: tokio::sync::mpsc::Sender<()>,
        events: UnboundedSender<Event>,
        limits: Limits,
    ) -> Self {
        let shared = Shared {
            gpu,
            state: Mutex::new(Thread::Idle(Box::new(Seed { library, device, alive }))),
            stuck: watch::Sender::new(None),
            lost: AtomicBool::new(false),
            events,
        };
        Self { shared: Arc::new(shared), limits, not_after: None }
    }

    /// A queue that answers [`NvmlError::Closed`] to everything.
    pub(crate) fn closed(gpu: GpuUuid, events: UnboundedSender<Event>, limits: Limits) -> Self {
        let shared = Shared {
            gpu,
            state: Mutex::new(Thread::Closed),
            stuck: watch::Sender::new(None),
            lost: AtomicBool::new(false),
            events,
        };
        Self { shared: Arc::new(shared), limits, not_after: None }
    }

    /// No new calls; the thread ends after those it has.
    pub(crate) fn close(&self) {
        *lock(&self.shared.state) = Thread::Closed;
    }

    /// The GPU.
    pub fn gpu(&self) -> &GpuUuid {
        &self.shared.gpu
    }

    /// The same queue, whose calls answer by `when` even if their own limit is later.
    pub fn not_after(&self, when: Instant) -> Self {
        let not_after = Some(self.not_after.map_or(when, |have| have.min(when)));
        Self { not_after, ..self.clone() }
    }

    /// The call that has not returned, while there is one.
    pub fn stuck(&self) -> Option<StuckCall> {
        self.shared.stuck.borrow().clone()
    }

    /// Current MIG mode.
    pub async fn mig_mode(&self) -> Result<MigMode, NvmlError> {
        self.submit("nvmlDeviceGetMigMode", self.limits.query, Worker::mig_mode).await
    }

    /// Changes the MIG mode and checks that it was activated; the mode it has already is fine.
    pub async fn set_mig_mode(&self, mode: MigMode) -> Result<(), NvmlError> {
        self.submit("nvmlDeviceSetMigMode", self.limits.mig_mode, move |worker| worker.set_mig_mode(mode))
            .await
    }

    /// GPU instances that exist, with their compute instances. With MIG off there are none.
    pub async fn instances(&self) -> Result<Vec<RawInstance>, NvmlError> {
        self.submit("nvmlDeviceGetGpuInstances", self.limits.query, |worker| worker.instances_of(None)).await
    }

    /// The GPU instance of that profile at that start, if it exists; cheaper than all of them.
    pub async fn instance(&self, profile_id: u32, start: u32) -> Result<Option<RawInstance>, NvmlError> {
        self.submit("nvmlDeviceGetGpuInstances", self.limits.query, move |worker| {
            let found = worker.instances_of(Some(profile_id))?;
            Ok(found.into_iter().find(|instance| instance.placement.start == start))
        })
        .await
    }

    /// What changes with use: minor, MIG mode, instances.
    pub async fn state(&self) -> Result<State, NvmlError> {
        self.submit("nvmlDeviceGetMinorNumber", self.limits.query, Worker::state).await
    }

    /// Description and state. Sent at once; the future waits for the answer.
    pub fn read(&self) -> impl Future<Output = Result<(Arc<Description>, State), NvmlError>> + use<> {
        self.submit("nvmlDeviceGetName", self.limits.query, |worker| {
            Ok((worker.description()?, worker.state()?))
        })
    }

    /// Makes a GPU instance there and gives its id.
    pub async fn create_gpu_instance(&self, profile_id: u32, placement: Placement) -> Result<u32, NvmlError> {
        self.submit("nvmlDeviceCreateGpuInstanceWithPlacement", self.limits.create, move |worker| {
            worker.create_gpu_instance(profile_id, placement)
        })
        .await
    }

    /// Makes the compute instance that fills a GPU instance.
    pub async fn create_compute_instance(&self, gpu_instance: u32) -> Result<ComputeInstance, NvmlError> {
        self.submit("nvmlGpuInstanceCreateComputeInstance", self.limits.create, move |worker| {
            worker.create_compute_instance(gpu_instance)
        })
        .await
    }

    /// Destroys a compute instance; one that is not there is fine.
    pub async fn destroy_compute_instance(
        &self,
        gpu_instance: u32,
        compute_instance: u32,
    ) -> Result<(), NvmlError> {
        self.submit("nvmlComputeInstanceDestroy", self.limits.destroy, move |worker| {
            worker.destroy_compute_instance(gpu_instance, compute_instance)
        })
        .await
    }

    /// Destroys a GPU instance without compute instances; one that is not there is fine.
    pub async fn destroy_gpu_instance(&self, gpu_instance: u32) -> Result<(), NvmlError> {
        self.submit("nvmlGpuInstanceDestroy", self.limits.destroy, move |worker| {
            worker.destroy_gpu_instance(gpu_instance)
        })
        .await
    }

    /// Queues a job now and gives the future of its result.
    fn submit<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        work: F,
    ) -> impl Future<Output = Result<T, NvmlError>> + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce(&mut Worker) -> Result<T, NvmlError> + Send + 'static,
    {
        let now = Instant::now();
        let deadline = self.not_after.map_or(now + limit, |not_after| not_after.min(now + limit));
        let progress = Arc::new(Mutex::new(Progress { phase: Phase::Queued, call, begun: now }));
        let (answer, result) = oneshot::channel();
        let job: Job = Box::new({
            let progress = Arc::clone(&progress);
            move |worker| worker.run(progress, answer, work)
        });
        // Before the job is sent: a GPU that gets stuck from here on is seen.
        let stuck = self.shared.stuck.subscribe();
        let sent = match self.stuck() {
            Some(StuckCall { call, since, .. }) => {
                Err(NvmlError::Stuck { call, gpu: self.gpu().clone(), since })
            }
            None => self.shared.send(job),
        };
        let waiting = Waiting { shared: Arc::clone(&self.shared), progress };
        async move {
            sent?;
            waiting.wait(call, now, deadline, result, stuck).await
        }
    }
}

impl Shared {
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
