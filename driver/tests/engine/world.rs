//! A node with simulated GPUs, and what can be seen of it from outside.

use super::programs::program;
use divvy_api::{AllocatedClaim, AllocatedDevice, ClaimRef, ClaimUid, Hold};
use divvy_driver::cdi::{Cdi, HookMode};
use divvy_driver::engine::{Engine, EngineOptions, PrepareError, PreparedDevice, RecoveryReport};
use divvy_driver::gpus::{Gpus, GpusOptions};
use divvy_driver::paths::HostPaths;
use divvy_model::GpuPolicy;
use divvy_nvml::Limits;
use divvy_sim::Sim;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) const H100: &str = "H100-SXM5-80GB";
pub(crate) const A100: &str = "A100-SXM4-40GB";

/// The node: what outlives the driver.
pub(crate) struct World {
    pub(crate) sim: Sim,
    pub(crate) paths: HostPaths,
    pub(crate) limits: Limits,
    pub(crate) hold_off: Duration,
    pub(crate) exclusive: bool,
    dir: tempfile::TempDir,
}

/// The driver on it.
pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) gpus: Gpus,
    pub(crate) report: RecoveryReport,
}

impl World {
    pub(crate) fn up(gpus: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        let program = program("divvy-sim");
        let options = divvy_sim::Options::new(divvy_sim::library().unwrap(), program);
        let sim = divvy_sim::up(&root, gpus, &options).unwrap();
        let paths = HostPaths {
            kubelet_root: dir.path().join("kubelet"),
            cdi_dir: dir.path().join("cdi"),
            driver_root: sim.root().to_owned(),
            dev_root: sim.root().to_owned(),
            host_prefix: "/".into(),
            proc_root: sim.root().join("proc"),
            process_root: sim.root().join("proc"),
            sys_root: sim.root().join("sys"),
            state_dir: dir.path().join("state"),
            run_dir: dir.path().join("run"),
        };
        std::fs::create_dir(&paths.cdi_dir).unwrap();
        let hold_off = Duration::from_secs(3600);
        Self { sim, paths, limits: Limits::default(), hold_off, exclusive: false, dir }
    }

    /// A directory with what goes into containers with a share, by name; its content is of no matter here.
    fn library(&self) -> PathBuf {
        let dir = self.dir.path().join("library");
        std::fs::create_dir_all(dir.join("shim")).unwrap();
        for name in ["libdivvy.so", "shim/libcuda.so.1", "shim/libnvidia-ml.so.1"] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        dir
    }

    /// Starts a driver; several at once are as during an upgrade.
    pub(crate) async fn start(&self) -> Node {
        self.start_answering(Duration::from_secs(40)).await
    }

    /// Starts a driver that answers within that time.
    pub(crate) async fn start_answering(&self, answer_within: Duration) -> Node {
        let gpus = Gpus::start(GpusOptions { limits: self.limits, ..GpusOptions::new(&self.paths) }).await;
        let policy = GpuPolicy { exclusive_ownership: self.exclusive, ..GpuPolicy::default() };
        gpus.set_policy(Arc::new(move |_| policy.clone())).await;
        let options = EngineOptions {
            paths: self.paths.clone(),
            pool: "node".into(),
            mig_hold_off: self.hold_off,
            answer_within,
        };
        let cdi = Cdi::new(&self.paths, HookMode::None, &self.library());
        let (engine, report) = Engine::start(options, gpus.clone(), cdi).await.unwrap();
        Node { engine, gpus, report }
    }

    /// Takes what a reboot of the node takes from the GPUs.
    pub(crate) fn reboot_gpus(&self) {
        self.sim
            .update(|state| {
                state.reboot();
                Ok(())
            })
            .unwrap();
    }

    /// The GPUs as the hardware has them: mode, then profile@start for each
    /// instance, with a `+` for each compute instance.
    pub(crate) fn hardware(&self) -> Vec<String> {
        let state = self.sim.read().unwrap();
        let gpu = |gpu: &divvy_sim::state::Gpu| {
            let mut text = String::from(if gpu.mig.current { "mig" } else { "off" });
            let mut instances: Vec<_> = gpu.instances.iter().collect();
            instances.sort_by_key(|gi| gi.placement.start);
            for gi in instances {
                text += &format!(" {}@{}{}", gi.profile, gi.placement.start, "+".repeat(gi.cis.len()));
            }
            text
        };
        state.gpus.iter().map(gpu).collect()
    }

    #[track_caller]
    pub(crate) fn expect_hardware(&self, gpus: &[&str]) {
        assert_eq!(self.hardware(), gpus);
    }

    /// Files of a directory, by name.
    pub(crate) fn files(dir: &PathBuf) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub(crate) fn claims(&self) -> PathBuf {
        self.paths.state_dir.join("claims")
    }

    /// Nothing of any claim is left in any directory.
    #[track_caller]
    pub(crate) fn expect_no_trace(&self) {
        assert_eq!(Self::files(&self.claims()), [""; 0]);
        assert_eq!(Self::files(&self.paths.cdi_dir), [""; 0]);
    }

    pub(crate) fn cdi_file(&self, claim: &str) -> PathBuf {
        self.paths.cdi_dir.join(format!("gpu.divvy.dev-claim_{claim}.json"))
    }
}

impl Node {
    pub(crate) async fn prepare(
        &self,
        claim: &str,
        devices: &str,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        self.engine.prepare(&allocated(claim, devices)).await
    }

    pub(crate) async fn unprepare(&self, claim: &str) -> Result<(), String> {
        self.engine.unprepare(&ClaimUid::from(claim)).await.map_err(|error| chain(&error))
    }

    /// The claim is refused, for that reason.
    #[track_caller]
    pub(crate) fn refused<'a>(
        &'a self,
        claim: &'a str,
        devices: &'a str,
        because: &'a str,
    ) -> impl Future<Output = ()> + 'a {
        let at = std::panic::Location::caller();
        async move {
            let error = chain(&self.prepare(claim, devices).await.unwrap_err());
            assert!(error.contains(because), "{at}: {error}");
            assert!(error.contains(&format!("ns/{claim}")), "{at}: the message names the claim: {error}");
        }
    }

    /// As a restart does; the world stays.
    pub(crate) async fn stop(self) {
        self.engine.shutdown().await;
        self.gpus.shutdown().await;
    }
}

/// A claim whose UID is its name; `admin:` before a device says how it is held,
/// and so does `share:`, with `/threads/memory` behind the device, for a GPU or a
/// MIG instance with `=memory`. Each device is of a request of its own.
pub(crate) fn allocated(claim: &str, devices: &str) -> AllocatedClaim {
    let device = |(at, text): (usize, &str)| {
        let (hold, name) = match text.split_once(':') {
            Some(("admin", name)) => (Hold::Admin { id: None }, name),
            Some((_, text)) if text.contains('=') => {
                let (name, memory) = text.split_once('=').unwrap();
                let consumed = [("memory".to_owned(), memory.parse().unwrap())].into();
                (Hold::Share { id: format!("{claim}-{at}").into(), consumed }, name)
            }
            Some((_, name)) => {
                let mut words = name.split('/');
                let name = words.next().unwrap();
                let amounts = words.map(|amount| amount.parse().unwrap());
                let consumed = ["threads", "memory"].map(str::to_owned).into_iter().zip(amounts).collect();
                (Hold::Share { id: format!("{claim}-{at}").into(), consumed }, name)
            }
            None => (Hold::Exclusive, text),
        };
        AllocatedDevice {
            request: format!("r{at}").into(),
            chosen: format!("r{at}"),
            pool: "node".into(),
            device: name.into(),
            class: None,
            hold,
            configs: Vec::new(),
        }
    };
    AllocatedClaim {
        claim: ClaimRef { namespace: "ns".into(), name: claim.into(), uid: claim.into() },
        pod_claim: None,
        devices: devices.split_whitespace().enumerate().map(device).collect(),
    }
}

pub(crate) fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line += &format!(": {error}");
        cause = error.source();
    }
    line
}

/// Waits for what tasks of the driver do by themselves.
#[track_caller]
pub(crate) fn until(what: &'static str, done: impl Fn() -> bool) -> impl Future<Output = ()> {
    let at = std::panic::Location::caller();
    async move {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{at}: waited in vain until {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
