//! One GPU's queue: what can be asked of a GPU. Each call is a job of the
//! GPU's thread (see `job`), in order and with a deadline.

use crate::compute_mode::ComputeMode;
use crate::error::NvmlError;
use crate::gpm::InstanceTimes;
use crate::job::{self, Shared, StuckCall, Worker};
use crate::raw::CgroupMemory;
use crate::read::{Description, RawInstance, State};
use crate::session::Limits;
use crate::usage::{ProcessTimes, ProcessUse};
use divvy_api::GpuUuid;
use divvy_model::inventory::{ComputeInstance, GpuInstance, MigMode};
use divvy_model::placement::Placement;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Calls on one GPU, in order, each with a deadline. Cheap to clone.
#[derive(Clone)]
pub struct GpuQueue {
    shared: Arc<Shared>,
    limits: Limits,
    not_after: Option<Instant>,
}

impl GpuQueue {
    pub(crate) fn new(shared: Shared, limits: Limits) -> Self {
        Self { shared: Arc::new(shared), limits, not_after: None }
    }

    /// No new calls; the thread ends after those it has.
    pub(crate) fn close(&self) {
        self.shared.close();
    }

    /// The GPU.
    pub fn gpu(&self) -> &GpuUuid {
        self.shared.gpu()
    }

    /// The same queue, whose calls answer by `when` even if their own limit is later.
    pub fn not_after(&self, when: Instant) -> Self {
        let not_after = Some(self.not_after.map_or(when, |have| have.min(when)));
        Self { not_after, ..self.clone() }
    }

    /// The call that has not returned, while there is one.
    pub fn stuck(&self) -> Option<StuckCall> {
        self.shared.stuck()
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

    /// Changes the compute mode of the whole GPU; the mode it has already is fine.
    pub async fn set_compute_mode(&self, mode: ComputeMode) -> Result<(), NvmlError> {
        self.submit("nvmlDeviceSetComputeMode", self.limits.query, move |worker| {
            worker.set_compute_mode(mode)
        })
        .await
    }

    /// The processes on the GPU and its instances, with the memory of each.
    pub async fn usage(&self) -> Result<Vec<ProcessUse>, NvmlError> {
        self.submit("nvmlDeviceGetComputeRunningProcesses_v3", self.limits.query, Worker::usage).await
    }

    /// How much of the GPU's time processes had since that time of the system clock, in microseconds, or for as long
    /// as the GPU driver remembers. None where it does not say.
    pub async fn times(&self, since_us: u64) -> Result<Option<ProcessTimes>, NvmlError> {
        let call = "nvmlDeviceGetProcessUtilization";
        self.submit(call, self.limits.query, move |worker| worker.times(since_us)).await
    }

    /// How much of their time these GPU instances had since this was asked of each the last time, and where `whole` the GPU; others
    /// are asked of for the first time after this.
    pub async fn instance_times(
        &self,
        instances: Vec<GpuInstance>,
        whole: bool,
    ) -> Result<InstanceTimes, NvmlError> {
        let call = if whole { "nvmlGpmSampleGet" } else { "nvmlGpmMigSampleGet" };
        self.submit(call, self.limits.query, move |worker| worker.instance_times(&instances, whole)).await
    }

    /// Has the GPU driver hold a cgroup (its directory) to so many bytes of the GPU's memory;
    /// false where it cannot. A limit that is there already costs one query.
    pub async fn hold_cgroup(&self, cgroup: PathBuf, limit: u64) -> Result<bool, NvmlError> {
        self.submit("nvmlDeviceSetMemoryLimits_v1", self.limits.query, move |worker| {
            worker.hold_cgroup(&cgroup, limit)
        })
        .await
    }

    /// What the GPU driver holds a cgroup (its directory) to; none where to nothing.
    pub async fn cgroup_memory(&self, cgroup: PathBuf) -> Result<Option<CgroupMemory>, NvmlError> {
        self.submit("nvmlDeviceGetMemoryLimits_v1", self.limits.query, move |worker| {
            worker.cgroup_memory(&cgroup)
        })
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
        job::submit(&self.shared, call, deadline, work)
    }
}
