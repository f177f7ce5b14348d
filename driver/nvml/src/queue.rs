//! The calls that can be made on one GPU. Each is a job of its thread (see `job`) and has a
//! deadline.

use crate::compute_mode::ComputeMode;
use crate::error::NvmlError;
use crate::events::StuckCall;
use crate::gpm::InstanceUtilization;
use crate::job::{self, Shared, Worker};
use crate::raw::CgroupMemory;
use crate::types::{Description, RawInstance, State};
use crate::usage::{ProcessUse, ProcessUtilization};
use divvy_api::GpuUuid;
use divvy_model::HealthReading;
use divvy_model::inventory::{ComputeInstance, GpuInstance, MigMode};
use divvy_model::placement::Placement;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeouts of calls by kind. A caller gets an error after this time, while the call keeps running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    pub query: Duration,
    pub mig_mode: Duration,
    pub create: Duration,
    pub destroy: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        let slow = Duration::from_secs(20);
        Self { query: Duration::from_secs(10), mig_mode: slow, create: slow, destroy: slow }
    }
}

/// Makes calls on one GPU, in order, each with a deadline. Cheap to clone.
#[derive(Clone)]
pub struct GpuQueue {
    shared: Arc<Shared>,
    timeouts: Timeouts,
    deadline: Option<Instant>,
}

impl GpuQueue {
    pub(crate) fn new(shared: Shared, timeouts: Timeouts) -> Self {
        Self { shared: Arc::new(shared), timeouts, deadline: None }
    }

    /// Rejects new calls. The thread exits after the queued ones.
    pub(crate) fn close(&self) {
        self.shared.close();
    }

    /// The UUID of the GPU.
    pub fn gpu(&self) -> &GpuUuid {
        self.shared.gpu()
    }

    /// The same queue with an additional deadline for all its calls.
    pub fn with_deadline(&self, when: Instant) -> Self {
        let deadline = Some(self.deadline.map_or(when, |have| have.min(when)));
        Self { deadline, ..self.clone() }
    }

    /// The stuck call, if there is one.
    pub fn stuck(&self) -> Option<StuckCall> {
        self.shared.stuck()
    }

    /// The current MIG mode.
    pub async fn mig_mode(&self) -> Result<MigMode, NvmlError> {
        self.submit("nvmlDeviceGetMigMode", self.timeouts.query, Worker::mig_mode).await
    }

    /// Sets the MIG mode and checks that it was activated. Does nothing if the mode is set already.
    pub async fn set_mig_mode(&self, mode: MigMode) -> Result<(), NvmlError> {
        self.submit("nvmlDeviceSetMigMode", self.timeouts.mig_mode, move |worker| worker.set_mig_mode(mode))
            .await
    }

    /// Sets the compute mode of the whole GPU. Does nothing if the mode is set already.
    pub async fn set_compute_mode(&self, mode: ComputeMode) -> Result<(), NvmlError> {
        self.submit("nvmlDeviceSetComputeMode", self.timeouts.query, move |worker| {
            worker.set_compute_mode(mode)
        })
        .await
    }

    /// The processes on the GPU and its instances, with their memory.
    pub async fn usage(&self) -> Result<Vec<ProcessUse>, NvmlError> {
        self.submit("nvmlDeviceGetComputeRunningProcesses_v3", self.timeouts.query, Worker::usage).await
    }

    /// The utilization of the GPU by each process since `since_us`, in microseconds since the Unix
    /// epoch; 0 means all samples that the GPU driver has. `None` if the GPU driver does not report
    /// it.
    pub async fn process_utilization(&self, since_us: u64) -> Result<Option<ProcessUtilization>, NvmlError> {
        let call = "nvmlDeviceGetProcessUtilization";
        self.submit(call, self.timeouts.query, move |worker| worker.process_utilization(since_us)).await
    }

    /// The utilization of these GPU instances since the previous query of each and, with `whole`,
    /// of the whole GPU. The samples of all other instances are dropped.
    pub async fn instance_utilization(
        &self,
        instances: Vec<GpuInstance>,
        whole: bool,
    ) -> Result<InstanceUtilization, NvmlError> {
        let call = if whole { "nvmlGpmSampleGet" } else { "nvmlGpmMigSampleGet" };
        self.submit(call, self.timeouts.query, move |worker| worker.instance_utilization(&instances, whole))
            .await
    }

    /// Timeouts a cgroup (its directory) to `limit` bytes of the GPU's memory. Returns false if the
    /// GPU driver cannot. A limit that is set already costs one query.
    pub async fn limit_cgroup_memory(&self, cgroup: PathBuf, limit: u64) -> Result<bool, NvmlError> {
        self.submit("nvmlDeviceSetMemoryLimits_v1", self.timeouts.query, move |worker| {
            worker.limit_cgroup_memory(&cgroup, limit)
        })
        .await
    }

    /// The memory limit and usage of a cgroup (its directory); `None` if it has no limit.
    pub async fn cgroup_memory(&self, cgroup: PathBuf) -> Result<Option<CgroupMemory>, NvmlError> {
        self.submit("nvmlDeviceGetMemoryLimits_v1", self.timeouts.query, move |worker| {
            worker.cgroup_memory(&cgroup)
        })
        .await
    }

    /// All GPU instances with their compute instances; empty if MIG is off.
    pub async fn instances(&self) -> Result<Vec<RawInstance>, NvmlError> {
        self.submit("nvmlDeviceGetGpuInstances", self.timeouts.query, |worker| worker.instances_of(None))
            .await
    }

    /// The GPU instance of that profile and start, if it exists. Cheaper than
    /// [`GpuQueue::instances`].
    pub async fn instance(&self, profile_id: u32, start: u32) -> Result<Option<RawInstance>, NvmlError> {
        self.submit("nvmlDeviceGetGpuInstances", self.timeouts.query, move |worker| {
            let found = worker.instances_of(Some(profile_id))?;
            Ok(found.into_iter().find(|instance| instance.placement.start == start))
        })
        .await
    }

    /// The properties that change: minor number, MIG mode and instances.
    pub async fn state(&self) -> Result<State, NvmlError> {
        self.submit("nvmlDeviceGetMinorNumber", self.timeouts.query, Worker::state).await
    }

    /// Description and state. The job is queued at once; the future waits for the result.
    pub fn read(&self) -> impl Future<Output = Result<(Arc<Description>, State), NvmlError>> + use<> {
        self.submit("nvmlDeviceGetName", self.timeouts.query, |worker| {
            Ok((worker.description()?, worker.state()?))
        })
    }

    /// The health of the GPU. The job is queued at once; the future waits for the result.
    pub fn health(&self) -> impl Future<Output = Result<HealthReading, NvmlError>> + use<> {
        self.submit("nvmlDeviceGetMemoryInfo_v2", self.timeouts.query, Worker::health)
    }

    /// Creates a GPU instance at that placement and returns its id.
    pub async fn create_gpu_instance(&self, profile_id: u32, placement: Placement) -> Result<u32, NvmlError> {
        self.submit("nvmlDeviceCreateGpuInstanceWithPlacement", self.timeouts.create, move |worker| {
            worker.create_gpu_instance(profile_id, placement)
        })
        .await
    }

    /// Creates the compute instance that fills a GPU instance.
    pub async fn create_compute_instance(&self, gpu_instance: u32) -> Result<ComputeInstance, NvmlError> {
        self.submit("nvmlGpuInstanceCreateComputeInstance", self.timeouts.create, move |worker| {
            worker.create_compute_instance(gpu_instance)
        })
        .await
    }

    /// Destroys a compute instance. A missing one is no error.
    pub async fn destroy_compute_instance(
        &self,
        gpu_instance: u32,
        compute_instance: u32,
    ) -> Result<(), NvmlError> {
        self.submit("nvmlComputeInstanceDestroy", self.timeouts.destroy, move |worker| {
            worker.destroy_compute_instance(gpu_instance, compute_instance)
        })
        .await
    }

    /// Destroys a GPU instance without compute instances. A missing one is no error.
    pub async fn destroy_gpu_instance(&self, gpu_instance: u32) -> Result<(), NvmlError> {
        self.submit("nvmlGpuInstanceDestroy", self.timeouts.destroy, move |worker| {
            worker.destroy_gpu_instance(gpu_instance)
        })
        .await
    }

    /// Queues a job at once and returns the future of its result.
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
        let deadline = self.deadline.map_or(now + limit, |deadline| deadline.min(now + limit));
        job::submit(&self.shared, call, deadline, work)
    }
}
