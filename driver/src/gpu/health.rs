//! Health of the GPUs: which findings XIDs, readings of NVML and failed calls leave, and how they end.
//!
//! [`Tracker`] is pure. An XID leaves a mark until the GPU is reset, the node reboots, or NVIDIA's
//! recovery action returns to "none". NVIDIA documents "none" as "can be immediately used again", but
//! not every driver sets the action with every XID, so "none" alone ends no mark. [`HealthMonitor`] reads
//! the GPUs and stores the tracker in `health.json`, because a daemon may restart between XID and reset.

use crate::gpu::GpusOptions;
use crate::gpu::epoch::Epoch;
use crate::gpu::numbers::{remove_temporary_files, write};
use divvy_api::GpuUuid;
use divvy_model::inventory::{Condition, GpuInstance, Inventory, Presence};
use divvy_model::xid::XidClass;
use divvy_model::{Finding, HealthReading, HealthState, Placement, xid};
use divvy_nvml::{Code, NvmlError, RawInstance, Session};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::task::JoinSet;
use tokio::time::Instant;

const FILE: &str = "health.json";
const VERSION: u32 = 1;
/// Readings with NVML's error "unknown" in a row after which the GPU counts as lost. One odd answer
/// must not taint a GPU; two polls are within 30 s.
const UNKNOWN_ERRORS_MAX: u32 = 1;

/// An XID that changed the state of a GPU or of one of its instances.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mark {
    xid: u64,
    /// Time of the first XID with this number, in seconds since the Unix epoch. For people.
    since: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance: Option<MarkedInstance>,
}

/// The instance that NVML attributed an XID to. A later instance with the same id is another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MarkedInstance {
    id: u32,
    profile_id: u32,
    placement: Placement,
    /// Of its compute instances; empty if there were none.
    uuids: Vec<String>,
}

/// Marks, last reading and last failure of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct GpuRecord {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    marks: Vec<Mark>,
    /// The last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reading: Option<HealthReading>,
    /// From the last call, until a reading succeeds.
    #[serde(skip)]
    failure: Option<Finding>,
    /// Readings in a row that failed with NVML's error "unknown".
    #[serde(skip)]
    unknown_errors: u32,
}

/// Health of all GPUs in one boot and one load of the kernel module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Tracker {
    version: u32,
    epoch: Epoch,
    gpus: BTreeMap<GpuUuid, GpuRecord>,
}

impl Tracker {
    /// Forgets everything if the node was booted or the kernel module loaded again. Returns whether it
    /// was.
    pub(super) fn observe_epoch(&mut self, now: Epoch) -> bool {
        let is_over = self.epoch.is_over(&now);
        if is_over {
            self.gpus.clear();
        }
        let Epoch { boot, module } = now;
        self.epoch = Epoch { boot: boot.or(self.epoch.boot.take()), module: module.or(self.epoch.module) };
        is_over
    }

    /// Notes an XID. `instance` is the one that NVML names. Returns whether the findings changed.
    pub(super) fn observe_xid(
        &mut self,
        gpu: &GpuUuid,
        number: u64,
        instance: Option<&GpuInstance>,
        now: u64,
    ) -> bool {
        let Some(state) = xid::find(number).and_then(|xid| xid.class.state()) else { return false };
        // The recovery action and the bus belong to the whole GPU.
        let is_of_gpu = state == HealthState::Lost || number == xid::RECOVERY_ACTION_CHANGED;
        let instance = instance.filter(|_| !is_of_gpu).map(|instance| MarkedInstance {
            id: instance.id,
            profile_id: instance.profile_id,
            placement: instance.placement,
            uuids: instance.compute_instances.iter().map(|compute| compute.uuid.clone()).collect(),
        });
        let marks = &mut self.gpus.entry(gpu.clone()).or_default().marks;
        if marks.iter().any(|mark| mark.xid == number && mark.instance == instance) {
            return false;
        }
        marks.push(Mark { xid: number, since: now, instance });
        true
    }

    /// Notes a reading of the GPU's health. Returns whether the findings changed.
    pub(super) fn observe_reading(&mut self, gpu: &GpuUuid, reading: HealthReading) -> bool {
        let before = self.findings(gpu);
        let record = self.gpus.entry(gpu.clone()).or_default();
        if record.reading.is_some_and(|earlier| reading.is_after_reset(&earlier)) {
            record.marks.clear();
        }
        record.reading = Some(reading);
        record.failure = None;
        record.unknown_errors = 0;
        self.findings(gpu) != before
    }

    /// Ends the marks of a GPU that an operator took back. Readings and errors still count.
    pub(super) fn observe_take_back(&mut self, gpu: &GpuUuid) {
        if let Some(record) = self.gpus.get_mut(gpu) {
            record.marks.clear();
        }
    }

    /// Notes a failed call. `is_reading` tells that it was a reading of the GPU's health. Errors that
    /// say nothing about the GPU are ignored. Returns whether the findings changed.
    pub(super) fn observe_error(&mut self, gpu: &GpuUuid, error: &NvmlError, is_reading: bool) -> bool {
        let record = self.gpus.entry(gpu.clone()).or_default();
        let (state, cause) = match error {
            NvmlError::Lost { call, .. } => (HealthState::Lost, format!("{call} found no GPU")),
            NvmlError::Call { call, code: Code::ResetRequired, .. } => {
                (HealthState::NeedsReset, format!("{call} asks for a reset"))
            }
            NvmlError::Call { call, code: Code::GpuNotFound, .. }
            | NvmlError::Call { call: call @ "nvmlDeviceGetHandleByUUID", code: Code::NotFound, .. } => {
                (HealthState::Lost, format!("{call} found no GPU"))
            }
            NvmlError::Call { call, code: Code::IrqIssue, .. } => {
                (HealthState::Lost, format!("{call} reports an interrupt problem"))
            }
            NvmlError::Call { call, code: Code::Unknown, .. } if is_reading => {
                record.unknown_errors = record.unknown_errors.saturating_add(1);
                if record.unknown_errors <= UNKNOWN_ERRORS_MAX {
                    return false;
                }
                (HealthState::Lost, format!("{call} fails with an unknown error"))
            }
            _ => return false,
        };
        let failure = Some(Finding::of_gpu(state, cause));
        let changed = record.failure != failure;
        record.failure = failure;
        changed
    }

    /// Ends the marks of instances that are not among the GPU's instances any more. Returns whether the
    /// findings changed.
    pub(super) fn observe_instances(&mut self, gpu: &GpuUuid, instances: &[RawInstance]) -> bool {
        self.retain(gpu, |marked| {
            instances.iter().any(|instance| {
                let is_of =
                    |compute: &divvy_model::inventory::ComputeInstance| marked.uuids.contains(&compute.uuid);
                instance.id == marked.id
                    && instance.profile_id == marked.profile_id
                    && instance.placement == marked.placement
                    && (marked.uuids.is_empty()
                        || instance.compute_instances.is_empty()
                        || instance.compute_instances.iter().any(is_of))
            })
        })
    }

    /// Ends the marks of a destroyed instance. Returns whether the findings changed.
    pub(super) fn observe_destruction(&mut self, gpu: &GpuUuid, gpu_instance: u32) -> bool {
        self.retain(gpu, |marked| marked.id != gpu_instance)
    }

    /// Keeps the marks of instances that fulfil a condition, and all marks of the whole GPU.
    fn retain(&mut self, gpu: &GpuUuid, keep: impl Fn(&MarkedInstance) -> bool) -> bool {
        let Some(record) = self.gpus.get_mut(gpu) else { return false };
        let before = record.marks.len();
        record.marks.retain(|mark| mark.instance.as_ref().is_none_or(&keep));
        record.marks.len() != before
    }

    /// Why the GPU is not healthy, from the worst state on.
    pub(super) fn findings(&self, gpu: &GpuUuid) -> Vec<Finding> {
        let Some(record) = self.gpus.get(gpu) else { return Vec::new() };
        let reading = record.reading.iter().flat_map(HealthReading::findings);
        let marks = record.marks.iter().filter_map(Mark::finding);
        let mut findings: Vec<_> = record.failure.iter().cloned().chain(reading).chain(marks).collect();
        // A stable sort: the sources keep their order of reliability.
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.state));
        findings
    }

    /// Whether a call on the GPU failed and no reading has succeeded since.
    pub(super) fn has_failure(&self, gpu: &GpuUuid) -> bool {
        self.gpus.get(gpu).is_some_and(|record| record.failure.is_some() || record.unknown_errors > 0)
    }

    /// The stored part without the energies, which change with every reading.
    fn essence(&self) -> Self {
        let mut essence = self.clone();
        for record in essence.gpus.values_mut() {
            (record.failure, record.unknown_errors) = (None, 0);
            if let Some(reading) = &mut record.reading {
                reading.energy_mj = None;
            }
        }
        essence.gpus.retain(|_, record| *record != GpuRecord::default());
        essence
    }
}

impl Mark {
    /// `None` for a number that this version does not know, from a file of a newer one.
    fn finding(&self) -> Option<Finding> {
        let xid = xid::find(self.xid)?;
        Some(Finding {
            state: xid.class.state()?,
            cause: format!("XID {}: {}", self.xid, xid.meaning),
            instance: self.instance.as_ref().map(|instance| instance.placement),
        })
    }
}

/// The file `health.json` in the state directory. A damaged one is renamed and ignored.
struct HealthFile {
    path: PathBuf,
    /// The essence of the stored tracker; `None` before the first store.
    written: Option<Tracker>,
}

impl HealthFile {
    fn load(state_dir: &Path) -> (Self, Tracker) {
        let path = state_dir.join(FILE);
        remove_temporary_files(state_dir, FILE);
        let tracker = match std::fs::read(&path) {
            Ok(bytes) => parse(&bytes).unwrap_or_else(|cause| {
                let damaged = path.with_extension("json.damaged");
                let moved = std::fs::rename(&path, &damaged).is_ok();
                tracing::warn!(
                    path = %path.display(), renamed_to = %damaged.display(), moved, cause,
                    "the health of the GPUs is damaged; it starts anew"
                );
                Tracker::default()
            }),
            Err(cause) => {
                if cause.kind() != std::io::ErrorKind::NotFound {
                    tracing::warn!(path = %path.display(), %cause, "cannot read the health of the GPUs");
                }
                Tracker::default()
            }
        };
        (Self { path, written: None }, tracker)
    }

    /// Stores the tracker if anything but the energies changed.
    fn store(&mut self, tracker: &Tracker) {
        let essence = tracker.essence();
        if self.written.as_ref() == Some(&essence) {
            return;
        }
        let bytes = serde_json::to_vec(&Tracker { version: VERSION, ..tracker.clone() });
        match bytes.map_err(Into::into).and_then(|bytes| write(&self.path, &bytes)) {
            Ok(()) => self.written = Some(essence),
            Err(cause) => tracing::error!(
                path = %self.path.display(), %cause,
                "cannot store the health of the GPUs; retrying at the next reading"
            ),
        }
    }
}

/// An empty file, which a power failure during the first start may leave, counts as none.
fn parse(bytes: &[u8]) -> Result<Tracker, String> {
    if bytes.is_empty() {
        return Ok(Tracker::default());
    }
    let tracker: Tracker = serde_json::from_slice(bytes).map_err(|cause| cause.to_string())?;
    match tracker.version {
        VERSION => Ok(tracker),
        newer => Err(format!("format {newer} is not format {VERSION}")),
    }
}

/// A finished reading.
pub(super) struct Reading {
    pub gpu: GpuUuid,
    pub started: Instant,
    pub result: Result<HealthReading, NvmlError>,
}

/// Reads the health of the GPUs, at most once at a time per GPU, and keeps the tracker and its file.
pub(super) struct HealthMonitor {
    tracker: Tracker,
    file: HealthFile,
    /// `/proc` and `/sys`.
    roots: (PathBuf, PathBuf),
    readings: JoinSet<Reading>,
    /// GPUs with a reading in progress, and whether another one must follow.
    in_progress: BTreeMap<GpuUuid, bool>,
}

impl HealthMonitor {
    pub(super) fn new(options: &GpusOptions) -> Self {
        let (file, tracker) = HealthFile::load(&options.state_dir);
        let mut monitor = Self {
            tracker,
            file,
            roots: (options.proc_root.clone(), options.sys_root.clone()),
            readings: JoinSet::new(),
            in_progress: BTreeMap::new(),
        };
        monitor.observe_epoch();
        monitor
    }

    /// Checks whether the kernel module was loaded again. Returns whether the findings may have changed.
    pub(super) fn observe_epoch(&mut self) -> bool {
        let changed = self.tracker.observe_epoch(Epoch::now(&self.roots.0, &self.roots.1));
        if changed {
            tracing::info!("the node was booted or the GPU driver was loaded again; all GPUs count as reset");
        }
        changed
    }

    /// Starts a reading. If one is in progress, which may be too early, another one follows.
    pub(super) fn start(&mut self, session: &Session, gpu: &GpuUuid) {
        if let Some(again) = self.in_progress.get_mut(gpu) {
            *again = true;
            return;
        }
        self.in_progress.insert(gpu.clone(), false);
        let (gpu, started) = (gpu.clone(), Instant::now());
        let reading = session.gpu(&gpu).health();
        self.readings.spawn(async move { Reading { gpu, started, result: reading.await } });
    }

    /// Starts readings of all GPUs, for the poll. A GPU whose reading is still in progress is left out.
    pub(super) fn start_all(&mut self, session: &Session) {
        for gpu in session.gpus() {
            if !self.in_progress.contains_key(gpu) {
                self.start(session, gpu);
            }
        }
    }

    /// Whether a reading is in progress.
    pub(super) fn is_reading(&self) -> bool {
        !self.readings.is_empty()
    }

    /// The next finished reading. Waits for ever while none is in progress.
    pub(super) async fn next(&mut self) -> Reading {
        loop {
            match self.readings.join_next().await {
                Some(Ok(reading)) => return reading,
                // A panicked reading counts as none.
                Some(Err(cause)) => {
                    tracing::error!(%cause, "a reading of a GPU's health panicked");
                    self.in_progress.clear();
                }
                None => std::future::pending().await,
            }
        }
    }

    /// Notes that an operator took a GPU back: the marks of its XIDs end. A counter may not show the reset,
    /// because it soon exceeds that of a short time before.
    pub(super) fn observe_take_back(&mut self, gpu: &GpuUuid) {
        self.tracker.observe_take_back(gpu);
        self.report(gpu, true);
    }

    /// Notes a finished reading. Returns whether the findings changed.
    pub(super) fn finish(&mut self, session: &Session, finished: Reading) -> bool {
        let Reading { gpu, result, .. } = finished;
        let changed = match result {
            Ok(reading) => self.tracker.observe_reading(&gpu, reading),
            Err(error) => self.tracker.observe_error(&gpu, &error, true),
        };
        if self.in_progress.remove(&gpu) == Some(true) {
            self.start(session, &gpu);
        }
        self.report(&gpu, changed);
        changed
    }

    /// Notes an XID, and reads the health of the GPU, which may have changed with it. An XID of a program
    /// costs no reading, so that a tenant cannot keep the GPU's thread busy. Returns whether the findings
    /// changed.
    pub(super) fn observe_xid(
        &mut self,
        session: &Session,
        gpu: &GpuUuid,
        number: u64,
        instance: Option<&GpuInstance>,
    ) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let changed = self.tracker.observe_xid(gpu, number, instance, now);
        match xid::find(number) {
            Some(xid) => tracing::warn!(
                %gpu, xid = number, meaning = xid.meaning, class = xid.class.as_str(),
                gpu_instance = ?instance.map(|instance| instance.id), "GPU driver reports an XID"
            ),
            None => tracing::warn!(
                %gpu, xid = number,
                "GPU driver reports an XID that Divvy does not know; it changes no state"
            ),
        }
        if xid::find(number).is_none_or(|xid| xid.class != XidClass::Application) {
            self.start(session, gpu);
        }
        if changed {
            self.report(gpu, changed);
        }
        changed
    }

    /// Notes the result of another reading of the GPU: its instances, if they are readable, or an error.
    /// Returns whether the findings changed.
    pub(super) fn observe_state(
        &mut self,
        session: &Session,
        gpu: &GpuUuid,
        state: Result<Option<&[RawInstance]>, &NvmlError>,
    ) -> bool {
        let changed = match state {
            Err(error) => self.tracker.observe_error(gpu, error, false),
            Ok(instances) => {
                if self.tracker.has_failure(gpu) {
                    self.start(session, gpu);
                }
                instances.is_some_and(|instances| self.tracker.observe_instances(gpu, instances))
            }
        };
        self.report(gpu, changed);
        changed
    }

    /// Notes that a GPU instance was destroyed. Returns whether the findings changed.
    pub(super) fn observe_destruction(&mut self, gpu: &GpuUuid, gpu_instance: u32) -> bool {
        let changed = self.tracker.observe_destruction(gpu, gpu_instance);
        self.report(gpu, changed);
        changed
    }

    fn report(&mut self, gpu: &GpuUuid, changed: bool) {
        if changed {
            let findings = self.tracker.findings(gpu);
            match findings.first() {
                None => tracing::info!(%gpu, "GPU is healthy again"),
                Some(worst) => tracing::warn!(%gpu, findings = findings.len(), "{worst}"),
            }
        }
        self.file.store(&self.tracker);
    }

    /// Adds the findings to the GPUs of an inventory.
    pub(super) fn add_conditions(&self, inventory: &mut Inventory) {
        for gpu in inventory.gpus.iter_mut().filter(|gpu| gpu.presence != Presence::Missing) {
            for finding in self.tracker.findings(&gpu.uuid) {
                let condition = Condition::Health(finding);
                if !gpu.conditions.contains(&condition) {
                    gpu.conditions.push(condition);
                }
            }
        }
    }

    /// Abandons all readings.
    pub(super) async fn stop(&mut self) {
        self.readings.abort_all();
        while self.readings.join_next().await.is_some() {}
        self.in_progress.clear();
    }
}

#[cfg(test)]
mod tests;
