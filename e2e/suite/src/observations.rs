//! Reads from the pods' logs which GPUs, memory and compute time the containers see.

use crate::cluster::{Cluster, eventually};
use crate::objects::END_OF_LISTING;
use anyhow::{Context, Result, ensure};
use kube::api::LogParams;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;

/// The report of `divvy-sim client`, a stand-in for a CUDA process.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MpsClient {
    /// Whether it uses MPS.
    pub(crate) mps: bool,
    pub(crate) device: String,
    /// Process id of the MPS server.
    #[serde(default)]
    pub(crate) server: u32,
    #[serde(default)]
    pub(crate) thread_percentage: f64,
    #[serde(default)]
    pub(crate) memory_limit_mib: Option<u64>,
}

/// The report of `cuda-client` about memory, in MiB.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct ProgramMemory {
    /// The device's memory as CUDA reports it.
    pub(crate) total: u64,
    pub(crate) held: u64,
    /// The CUDA error that stopped the allocations; 0 for none.
    pub(crate) error: u32,
    /// The memory sizes that nvidia-smi printed before.
    #[serde(skip)]
    pub(crate) nvidia_smi: BTreeSet<u64>,
}

/// The report of `cuda-client` about compute time, in per cent.
#[derive(Deserialize)]
struct BusyReport {
    busy: f64,
}

impl Cluster {
    /// Waits until the pod's containers see exactly the devices of its claims. Returns the UUIDs.
    pub(crate) async fn verify_visible_devices(&self, pod: &str) -> Result<BTreeSet<String>> {
        let mut expected = BTreeSet::new();
        for held in self.allocated_devices(pod).await? {
            expected.extend(self.expected_uuids(&held).await?);
        }
        eventually(&format!("visible devices of pod {pod}"), || async {
            let seen = self.visible_uuids(pod).await?;
            ensure!(seen == expected, "it sees {seen:?}, its claims hold {expected:?}");
            Ok(())
        })
        .await?;
        Ok(expected)
    }

    /// The UUIDs in the latest output of `nvidia-smi -L` of all containers, once it is complete.
    pub(crate) async fn visible_uuids(&self, name: &str) -> Result<BTreeSet<String>> {
        let pod = self.pods.get(name).await?;
        let uuid = |line: &str| Some(line.split_once("UUID: ")?.1.split(')').next()?.to_owned());
        let mut uuids = BTreeSet::new();
        for container in pod.spec.into_iter().flat_map(|spec| spec.containers) {
            let of = LogParams { container: Some(container.name), ..LogParams::default() };
            let text = self.pods.logs(name, &of).await?;
            let (seen, _) =
                text.split_once(END_OF_LISTING).with_context(|| format!("its output is {text:?}"))?;
            uuids.extend(seen.lines().filter_map(uuid));
        }
        Ok(uuids)
    }

    /// The report of the pod's `divvy-sim client`, once it is connected.
    pub(crate) async fn mps_client(&self, name: &str) -> Result<MpsClient> {
        eventually(&format!("pod {name} connected"), || async { Ok(self.last_json_line(name).await?.0) })
            .await
    }

    /// The memory report of the pod's `nvidia-smi` and `cuda-client`.
    pub(crate) async fn program_memory(&self, name: &str) -> Result<ProgramMemory> {
        eventually(&format!("memory report of pod {name}"), || async {
            let (memory, text) = self.last_json_line::<ProgramMemory>(name).await?;
            // A line like `   123MiB /  10240MiB`, for a GPU or an instance.
            let size = |line: &str| line.split_once("MiB /")?.1.split_once("MiB")?.0.trim().parse().ok();
            Ok(ProgramMemory { nvidia_smi: text.lines().filter_map(size).collect(), ..memory })
        })
        .await
    }

    /// The part of the device's time that the pod's `cuda-client` used in a window, in per cent.
    pub(crate) async fn busy_percent(&self, name: &str, window: usize) -> Result<f64> {
        eventually(&format!("compute time report of pod {name}"), || async {
            let all = self.all_busy_percent(name).await?;
            all.get(window).copied().with_context(|| format!("the reports so far are {all:?}"))
        })
        .await
    }

    /// The same for the latest window, which must have begun after the first `windows` ended.
    pub(crate) async fn busy_percent_since(&self, name: &str, windows: usize) -> Result<f64> {
        let all = self.all_busy_percent(name).await?;
        let latest = all.get(windows + 1..).unwrap_or_default().last();
        latest.copied().with_context(|| format!("the reports so far are {all:?}"))
    }

    /// The number of windows that have ended.
    pub(crate) async fn window_count(&self, name: &str) -> Result<usize> {
        Ok(self.all_busy_percent(name).await?.len())
    }

    async fn all_busy_percent(&self, name: &str) -> Result<Vec<f64>> {
        let text = self.pods.logs(name, &LogParams::default()).await?;
        let reports = text.lines().filter_map(|line| serde_json::from_str::<BusyReport>(line).ok());
        Ok(reports.map(|report| report.busy).collect())
    }

    /// The latest line of JSON in a pod's output, and the whole output.
    async fn last_json_line<T: DeserializeOwned>(&self, name: &str) -> Result<(T, String)> {
        let text = self.pods.logs(name, &LogParams::default()).await?;
        let line = text.lines().rev().find(|line| line.starts_with('{'));
        let report = serde_json::from_str(line.with_context(|| format!("its output is {text:?}"))?)?;
        Ok((report, text))
    }
}
