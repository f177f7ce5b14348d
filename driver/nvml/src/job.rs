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
use std::panic::{AssertUnwindSafe, catch_unwind};
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
    /// The seed starts another thread if this one ends.
    Running(mpsc::Sender<Job>, Box<Seed>),
    Closed,
}

/// Data to start the thread. `alive` is dropped after the library.
#[derive(Clone)]
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
    /// `None` until the GPU is looked up, and after an error that may mean a stale handle.
    pub(crate) device: Option<Device>,
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
        let (job, seed) = match &*state {
            Thread::Closed => return Err(closed()),
            Thread::Idle(seed) => (job, seed.clone()),
            Thread::Running(jobs, seed) => match jobs.send(job) {
                Ok(()) => return Ok(()),
                Err(mpsc::SendError(job)) => {
                    tracing::error!(gpu = %self.gpu, "the thread of the GPU has ended; starting another");
                    (job, seed.clone())
                }
            },
        };
        let jobs = self.start((*seed).clone())?;
        let sent = jobs.send(job).map_err(|_| closed());
        *state = Thread::Running(jobs, seed);
        sent
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
            // Without an answer the thread has ended, which only a panic explains.
            answer = &mut result => return answer.unwrap_or(Err(NvmlError::Panicked { call, gpu })),
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
            (Phase::Done, _) => result.await.unwrap_or(Err(NvmlError::Panicked { call, gpu })),
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

impl Drop for Worker {
    fn drop(&mut self) {
        // A thread that ends in a stuck call must not leave the GPU stuck.
        self.shared.stuck.send_replace(None);
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
        // The worker's fields are caches, and a panic clears them.
        let result = catch_unwind(AssertUnwindSafe(|| work(self))).unwrap_or_else(|_| Err(self.panicked()));
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

    /// Clears the caches after a panic, which may have left any of them half changed.
    fn panicked(&mut self) -> NvmlError {
        self.device = None;
        self.description = None;
        self.ci_profiles.clear();
        self.gpm_samples.clear();
        let (call, gpu) = (lock(&self.progress).call, self.gpu());
        tracing::error!(%gpu, call, "the code around an NVML call panicked; the GPU's thread goes on");
        NvmlError::Panicked { call, gpu }
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
            Err(NvmlError::Call { code, .. }) if code.is_stale_handle() => self.device = None,
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

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_sim::{Options, create};
    use std::time::Duration;

    /// The GPU of a simulated node with one GPU.
    fn gpu(dir: &std::path::Path) -> (Arc<Shared>, tokio::sync::mpsc::UnboundedReceiver<Event>) {
        let library = divvy_sim::library().expect("simulated library");
        let program = std::env::current_exe().expect("this test");
        let sim = create(dir, "L4", &Options::new(library, program)).expect("simulator");
        let library = sim.library("libnvidia-ml.so.1").canonicalize().expect("library");
        let library = Arc::new(Library::open(&library, true).expect("open"));
        let uuid = GpuUuid::from(sim.read().expect("state").gpus[0].uuid.as_str());
        let (events, received) = tokio::sync::mpsc::unbounded_channel();
        let (alive, _) = tokio::sync::mpsc::channel(1);
        (Arc::new(Shared::new(uuid, Some(Seed { library, device: None, alive }), events)), received)
    }

    async fn run<T: Send + 'static>(
        shared: &Arc<Shared>,
        limit: Duration,
        work: impl FnOnce(&mut Worker) -> Result<T, NvmlError> + Send + 'static,
    ) -> Result<T, NvmlError> {
        submit(shared, "test", Instant::now() + limit, work).await
    }

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn h12_panic_fails_its_job_and_the_thread_goes_on() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let (shared, mut events) = gpu(dir.path());
        let first = run(&shared, LONG, |_| Ok(std::thread::current().id())).await;
        let error = run(&shared, LONG, |_| -> Result<(), _> { panic!("a bug") }).await.expect_err("panic");
        assert_eq!(error, NvmlError::Panicked { call: "test", gpu: shared.gpu().clone() });
        assert!(error.may_take_effect() && error.code().is_none());
        assert_eq!(run(&shared, LONG, |_| Ok(std::thread::current().id())).await, first);
        assert!(run(&shared, LONG, Worker::state).await.is_ok());

        // A panic of an abandoned job ends the stuck state.
        let late = |_: &mut Worker| -> Result<(), NvmlError> {
            std::thread::sleep(Duration::from_millis(300));
            panic!("a bug")
        };
        assert!(run(&shared, Duration::from_millis(50), late).await.is_err());
        assert!(matches!(events.recv().await, Some(Event::Stuck(_))));
        let returned = events.recv().await;
        let is_panic = |late: &LateReturn| matches!(late.result, Err(NvmlError::Panicked { .. }));
        assert!(matches!(&returned, Some(Event::LateReturn(late)) if is_panic(late)), "{returned:?}");
        assert!(run(&shared, LONG, Worker::state).await.is_ok());
    }

    #[tokio::test]
    async fn h12_ended_thread_is_started_again() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let (shared, _events) = gpu(dir.path());
        assert!(run(&shared, LONG, Worker::state).await.is_ok());
        // Stands for a panic outside the jobs.
        match &mut *lock(&shared.state) {
            Thread::Running(jobs, _) => *jobs = mpsc::channel().0,
            _ => panic!("no thread"),
        }
        assert!(run(&shared, LONG, Worker::state).await.is_ok());
        shared.close();
        let closed = NvmlError::Closed { gpu: shared.gpu().clone() };
        assert_eq!(run(&shared, LONG, Worker::state).await, Err(closed));
    }
}
