//! A node with simulated GPUs, a driver on it, and the state that is visible from outside.

use super::programs::program;
use divvy_api::text::error_chain;
use divvy_api::{AllocatedClaim, AllocatedDevice, ClaimRef, ClaimUid, Hold};
use divvy_driver::cdi::{Cdi, HookMode};
use divvy_driver::claims::engine::{Engine, EngineOptions, PrepareError, RecoveryReport};
use divvy_driver::claims::records::PreparedDevice;
use divvy_driver::gpu::{Gpus, GpusOptions, HEALTH_POLL_INTERVAL};
use divvy_driver::paths::HostPaths;
use divvy_model::GpuPolicy;
use divvy_nvml::Timeouts;
use divvy_sim::Sim;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) const H100: &str = "H100-SXM5-80GB";
pub(crate) const A100: &str = "A100-SXM4-40GB";

/// The node: everything that outlives the driver.
pub(crate) struct TestNode {
    pub(crate) sim: Sim,
    pub(crate) paths: HostPaths,
    pub(crate) timeouts: Timeouts,
    pub(crate) health_poll: Duration,
    pub(crate) hold_off: Duration,
    pub(crate) exclusive: bool,
    dir: tempfile::TempDir,
}

/// A running driver on a [`TestNode`].
pub(crate) struct Driver {
    pub(crate) engine: Engine,
    pub(crate) gpus: Gpus,
    pub(crate) report: RecoveryReport,
}

impl TestNode {
    pub(crate) fn new(gpus: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        let program = program("divvy-sim");
        let options = divvy_sim::Options::new(divvy_sim::library().unwrap(), program);
        let sim = divvy_sim::create(&root, gpus, &options).unwrap();
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
        Self {
            sim,
            paths,
            timeouts: Timeouts::default(),
            health_poll: HEALTH_POLL_INTERVAL,
            hold_off,
            exclusive: false,
            dir,
        }
    }

    /// A directory with placeholders for the files that are mounted into containers with a share. No test
    /// here reads their content.
    fn library(&self) -> PathBuf {
        let dir = self.dir.path().join("library");
        std::fs::create_dir_all(dir.join("shim")).unwrap();
        for name in ["libdivvy.so", "shim/libcuda.so.1", "shim/libnvidia-ml.so.1"] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        dir
    }

    /// Starts a driver. Tests start several at once to imitate an upgrade.
    pub(crate) async fn start_driver(&self) -> Driver {
        self.start_driver_with_timeout(Duration::from_secs(40)).await
    }

    /// Starts a driver with this limit for the answer to one call.
    pub(crate) async fn start_driver_with_timeout(&self, answer_timeout: Duration) -> Driver {
        let (timeouts, health_poll) = (self.timeouts, self.health_poll);
        let options = GpusOptions { timeouts, health_poll, ..GpusOptions::new(&self.paths) };
        let gpus = Gpus::start(options).await;
        let policy = GpuPolicy { exclusive_ownership: self.exclusive, ..GpuPolicy::default() };
        gpus.set_policy(Arc::new(move |_| policy.clone())).await;
        let options = EngineOptions {
            paths: self.paths.clone(),
            pool: "node".into(),
            mig_hold_off: self.hold_off,
            answer_timeout,
        };
        let cdi = Cdi::new(&self.paths, HookMode::None, &self.library());
        let (engine, report) = Engine::start(options, gpus.clone(), cdi).await.unwrap();
        Driver { engine, gpus, report }
    }

    /// Resets the GPUs as a reboot of the node does.
    pub(crate) fn reboot_gpus(&self) {
        self.sim
            .update(|state| {
                state.reboot();
                Ok(())
            })
            .unwrap();
    }

    /// The state of each simulated GPU: MIG mode, then `profile@start` for each instance, with a `+` for each
    /// compute instance.
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

    /// The names of the entries of a directory, sorted.
    pub(crate) fn files(dir: &PathBuf) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub(crate) fn records_dir(&self) -> PathBuf {
        self.paths.state_dir.join("claims")
    }

    /// Adds a process to the node that has files of the claim mounted, as a container does. It ends when
    /// the answer is dropped.
    pub(crate) fn use_claim(&self, claim: &str) -> tempfile::TempDir {
        let process =
            tempfile::Builder::new().prefix("4711").rand_bytes(0).tempdir_in(&self.paths.process_root);
        let process = process.unwrap();
        let mounted = format!("/cdi/gpu.divvy.dev-claim_{claim}.json");
        let line = format!("36 35 0:98 {mounted} /run/divvy-claims/{claim}.json ro - tmpfs tmpfs rw\n");
        std::fs::write(process.path().join("mountinfo"), line).unwrap();
        process
    }

    /// Takes `nvidia-smi` away until the returned function is called.
    pub(crate) fn hide_nvidia_smi(&self) -> impl FnOnce() + use<> {
        let program = self.paths.driver_root.join("usr/bin/nvidia-smi");
        let aside = program.with_extension("aside");
        std::fs::rename(&program, &aside).unwrap();
        move || std::fs::rename(&aside, &program).unwrap()
    }

    /// Checks that no record and no CDI file of any claim is left.
    #[track_caller]
    pub(crate) fn expect_no_claim_files(&self) {
        assert_eq!(Self::files(&self.records_dir()), [""; 0]);
        assert_eq!(Self::files(&self.paths.cdi_dir), [""; 0]);
    }

    pub(crate) fn cdi_file(&self, claim: &str) -> PathBuf {
        self.paths.cdi_dir.join(format!("gpu.divvy.dev-claim_{claim}.json"))
    }
}

impl Driver {
    pub(crate) async fn prepare(
        &self,
        claim: &str,
        devices: &str,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        self.engine.prepare(&allocated(claim, devices)).await
    }

    pub(crate) async fn unprepare(&self, claim: &str) -> Result<(), String> {
        self.engine.unprepare(&ClaimUid::from(claim)).await.map_err(|error| error_chain(&error))
    }

    /// Checks that the prepare fails with this text.
    #[track_caller]
    pub(crate) fn expect_refused<'a>(
        &'a self,
        claim: &'a str,
        devices: &'a str,
        text: &'a str,
    ) -> impl Future<Output = ()> + 'a {
        let at = std::panic::Location::caller();
        async move {
            let error = error_chain(&self.prepare(claim, devices).await.unwrap_err());
            assert!(error.contains(text), "{at}: {error}");
            assert!(
                error.contains(&format!("ns/{claim}")),
                "{at}: the message does not name the claim: {error}"
            );
        }
    }

    /// Stops the driver, as a restart does. The node stays.
    pub(crate) async fn stop(self) {
        self.engine.shutdown().await;
        self.gpus.shutdown().await;
    }
}

/// A claim whose UID is its name, with one request for each device of the list.
///
/// A device is exclusive, or has a prefix: `admin:DEVICE` for admin access, `share:DEVICE/THREADS/MEMORY` for
/// an MPS or time-slice share, and `share:DEVICE=MEMORY` for a memory share of a GPU or MIG instance.
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
                let mut fields = name.split('/');
                let name = fields.next().unwrap();
                let amounts = fields.map(|amount| amount.parse().unwrap());
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

/// Waits until the condition holds, for at most 30 seconds. `what` names it in the panic message.
#[track_caller]
pub(crate) fn until(what: &'static str, done: impl Fn() -> bool) -> impl Future<Output = ()> {
    let at = std::panic::Location::caller();
    async move {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{at}: timed out waiting until {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
