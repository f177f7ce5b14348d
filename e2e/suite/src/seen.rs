//! What containers see of GPUs: their own words, from the pods' logs.

use crate::objects::SEEN;
use crate::world::{World, eventually};
use anyhow::{Context, Result, ensure};
use kube::api::LogParams;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;

/// What a stand-in for a CUDA process says it has got.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Connected {
    /// Whether through MPS.
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

/// What a CUDA program of ours says of memory, in MiB.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct Memory {
    /// What CUDA tells it that the device has.
    pub(crate) total: u64,
    pub(crate) held: u64,
    /// The driver's error that ended its allocating; 0: none.
    pub(crate) error: u32,
    /// The sizes that nvidia-smi told before.
    #[serde(skip)]
    pub(crate) told: BTreeSet<u64>,
}

/// What it says of time.
#[derive(Deserialize)]
struct Busy {
    busy: f64,
}

impl World {
    /// The pod's container sees exactly the devices of its claims.
    pub(crate) async fn sees_its_devices(&self, pod: &str) -> Result<BTreeSet<String>> {
        let mut expected = BTreeSet::new();
        for held in self.held(pod).await? {
            expected.extend(self.uuids(&held).await?);
        }
        eventually(&format!("what pod {pod} sees"), || async {
            let seen = self.seen(pod).await?;
            ensure!(seen == expected, "it sees {seen:?} and holds {expected:?}");
            Ok(())
        })
        .await?;
        Ok(expected)
    }

    /// UUIDs in the latest output of `nvidia-smi -L` of all containers, once it is complete.
    async fn seen(&self, name: &str) -> Result<BTreeSet<String>> {
        let pod = self.pods.get(name).await?;
        let uuid = |line: &str| Some(line.split_once("UUID: ")?.1.split(')').next()?.to_owned());
        let mut uuids = BTreeSet::new();
        for container in pod.spec.into_iter().flat_map(|spec| spec.containers) {
            let of = LogParams { container: Some(container.name), ..LogParams::default() };
            let text = self.pods.logs(name, &of).await?;
            let (seen, _) = text.split_once(SEEN).with_context(|| format!("its output is {text:?}"))?;
            uuids.extend(seen.lines().filter_map(uuid));
        }
        Ok(uuids)
    }

    /// What the pod's `divvy-sim client` has got, once it is connected.
    pub(crate) async fn connected(&self, name: &str) -> Result<Connected> {
        eventually(&format!("pod {name} connected"), || async { Ok(self.told(name).await?.0) }).await
    }

    /// What the pod's `cuda-client`, after an `nvidia-smi`, says of memory.
    pub(crate) async fn memory(&self, name: &str) -> Result<Memory> {
        eventually(&format!("pod {name} told its memory"), || async {
            let (memory, text) = self.told::<Memory>(name).await?;
            // `   123MiB /  10240MiB`, for a GPU or an instance.
            let size = |line: &str| line.split_once("MiB /")?.1.split_once("MiB")?.0.trim().parse().ok();
            Ok(Memory { told: text.lines().filter_map(size).collect(), ..memory })
        })
        .await
    }

    /// Per cent of the device's time that the pod's `cuda-client` had, in the window of that number.
    pub(crate) async fn busy(&self, name: &str, window: usize) -> Result<f64> {
        eventually(&format!("pod {name} worked"), || async {
            let all = self.all_busy(name).await?;
            all.get(window).copied().with_context(|| format!("it told {all:?}"))
        })
        .await
    }

    /// The same in the latest window, which must have begun after that many were over.
    pub(crate) async fn busy_since(&self, name: &str, windows: usize) -> Result<f64> {
        let all = self.all_busy(name).await?;
        let latest = all.get(windows + 1..).unwrap_or_default().last();
        latest.copied().with_context(|| format!("it told {all:?}"))
    }

    /// How many windows are over.
    pub(crate) async fn windows(&self, name: &str) -> Result<usize> {
        Ok(self.all_busy(name).await?.len())
    }

    async fn all_busy(&self, name: &str) -> Result<Vec<f64>> {
        let text = self.pods.logs(name, &LogParams::default()).await?;
        let told = text.lines().filter_map(|line| serde_json::from_str::<Busy>(line).ok());
        Ok(told.map(|told| told.busy).collect())
    }

    /// The latest line of JSON in a pod's output, and all of that.
    async fn told<T: DeserializeOwned>(&self, name: &str) -> Result<(T, String)> {
        let text = self.pods.logs(name, &LogParams::default()).await?;
        let line = text.lines().rev().find(|line| line.starts_with('{'));
        let told = serde_json::from_str(line.with_context(|| format!("its output is {text:?}"))?)?;
        Ok((told, text))
    }
}
