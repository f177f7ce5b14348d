//! A test node with simulated GPUs, shares of them, and processes in their containers.

use super::account::Page;
use super::programs::program;
use super::tenant::{Tenant, mount_over, mounts};
use divvy_driver::gpu::{Gpus, GpusOptions};
use divvy_driver::paths::HostPaths;
use divvy_driver::shares::Shares;
use divvy_driver::shares::agent::{Action, Agent, KillPolicy, Kind, Report, TimeLaw};
use divvy_pages::{Compute, Flags, GpuUuid, Memory, Policy, Text};
use divvy_sim::Sim;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Receiver;

pub(crate) const H100: &str = "H100-SXM5-80GB";
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const CONTEXT: u64 = 300;
/// Limit for waits that normally take a few seconds.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct TestNode {
    pub(crate) sim: Sim,
    pub(crate) paths: HostPaths,
    _dir: tempfile::TempDir,
}

/// A running agent with its reports.
pub(crate) struct RunningAgent {
    task: tokio::task::JoinHandle<()>,
    reports: Receiver<Report>,
    gpus: Gpus,
}

/// A finding without its text: kind, pid and action.
pub(crate) type ReportedFinding = (Kind, Option<u32>, Action);

impl TestNode {
    pub(crate) fn new(driver: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = divvy_sim::Options::new(divvy_sim::library().unwrap(), program("divvy-sim"));
        options.driver = driver.to_owned();
        let sim = divvy_sim::create(&dir.path().join("root"), H100, &options).unwrap();
        let paths = HostPaths {
            kubelet_root: dir.path().join("kubelet"),
            cdi_dir: dir.path().join("cdi"),
            driver_root: sim.root().to_owned(),
            dev_root: sim.root().to_owned(),
            host_prefix: "/".into(),
            proc_root: dir.path().join("proc"),
            process_root: dir.path().join("proc"),
            sys_root: dir.path().join("sys"),
            state_dir: dir.path().join("state"),
            run_dir: dir.path().join("run"),
        };
        for dir in [&paths.proc_root, &paths.run_dir, &paths.state_dir] {
            fs::create_dir(dir).unwrap();
        }
        fs::create_dir_all(paths.sys_root.join("fs/cgroup")).unwrap();
        Self { sim, paths, _dir: dir }
    }

    /// Creates a claim with a share of the first GPU and a container, and maps its account page.
    pub(crate) fn share(&self, claim: &str, mib: u64) -> Page {
        Page::map(&self.pages(claim, mib).join("account"), mib * MIB)
    }

    /// Creates the same without opening the pages. Returns their directory.
    pub(crate) fn pages(&self, claim: &str, mib: u64) -> PathBuf {
        self.pages_with(claim, mib, Compute::default())
    }

    /// Creates the same with these compute limits.
    pub(crate) fn pages_with(&self, claim: &str, mib: u64, compute: Compute) -> PathBuf {
        let uuid = self.sim.read().unwrap().gpus[0].uuid.clone();
        let policy = Policy {
            claim: Text::new(claim).unwrap(),
            share: Text::new("s").unwrap(),
            gpu: GpuUuid::parse(&uuid).unwrap(),
            mig: None,
            pci: Text::EMPTY,
            memory: Memory { limit: mib * MIB, context: CONTEXT * MIB, ..Memory::default() },
            compute,
            codec: Default::default(),
            flags: Flags::default(),
        };
        let shares = Shares::new(&self.paths);
        shares.write(&claim.into(), &"s".into(), &policy).unwrap();
        let dir = shares.of(&claim.into(), &"s".into());
        fs::write(dir.join("cgroups/container"), cgroup(claim)).unwrap();
        dir
    }

    /// The context size of the first GPU that the node measured.
    pub(crate) fn context_mib(&self) -> Option<u64> {
        let uuid = self.sim.read().unwrap().gpus[0].uuid.clone();
        let file = self.paths.run_dir.join("contexts").join(uuid.trim_start_matches("GPU-"));
        let bytes = fs::read_to_string(file).ok()?;
        Some(bytes.parse::<u64>().ok()? / MIB)
    }

    /// Starts a process of the claim's container that uses this much memory of the first GPU.
    pub(crate) fn tenant(&self, claim: &str, mib: u64) -> Tenant {
        let tenant = Tenant::start(self.sim.root(), mib);
        tenant.set_proc(&self.paths.proc_root, &cgroup(claim), &self.mounts(claim));
        tenant
    }

    fn mounts(&self, claim: &str) -> String {
        mounts(&Shares::new(&self.paths).of(&claim.into(), &"s".into()), claim, "s")
    }

    /// Mounts another file over the policy page of a process.
    pub(crate) fn mask_policy(&self, claim: &str, tenant: &Tenant) {
        tenant.set_mounts(&self.paths.proc_root, &(self.mounts(claim) + &mount_over(claim, "s")));
    }

    /// Creates a cgroup v2 tree with this process in the claim's cgroup.
    pub(crate) fn unified_cgroup(&self, claim: &str, pid: u32) -> PathBuf {
        let root = self.paths.sys_root.join("fs/cgroup");
        fs::write(root.join("cgroup.controllers"), "memory\n").unwrap();
        let dir = root.join("kubepods").join(claim);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("cgroup.procs"), format!("{pid}\n")).unwrap();
        dir
    }

    pub(crate) async fn agent(&self, response: &str) -> RunningAgent {
        let gpus = Gpus::start(GpusOptions::new(&self.paths)).await;
        let (agent, reports) = Agent::new(
            gpus.clone(),
            &self.paths,
            response.parse::<KillPolicy>().unwrap(),
            TimeLaw::default(),
        );
        RunningAgent { task: tokio::spawn(agent.run()), reports, gpus }
    }
}

fn cgroup(claim: &str) -> String {
    format!("4:memory:/machine\n0::/kubepods/{claim}\n")
}

impl RunningAgent {
    /// Returns all findings up to the first one of this kind.
    pub(crate) async fn until(&mut self, kind: Kind) -> Vec<ReportedFinding> {
        let begun = Instant::now();
        let mut findings: Vec<ReportedFinding> = Vec::new();
        while !findings.iter().any(|(known, ..)| *known == kind) {
            match tokio::time::timeout(TIMEOUT, self.reports.recv()).await.unwrap().unwrap() {
                Report::Found { finding, action } => {
                    findings.push((
                        finding.kind,
                        finding.process.as_ref().map(|process| process.pid),
                        action,
                    ));
                }
                _ => assert!(begun.elapsed() < TIMEOUT, "timeout while waiting for {kind:?}: {findings:?}"),
            }
        }
        findings
    }

    /// Waits for audits without findings. Returns how long each took.
    pub(crate) async fn audits_without_findings(&mut self, audits: usize) -> Vec<Duration> {
        let mut all = Vec::new();
        while all.len() < audits {
            match tokio::time::timeout(TIMEOUT, self.reports.recv()).await.unwrap().unwrap() {
                Report::Audited { took, .. } => all.push(took),
                report => panic!("{report:?}"),
            }
        }
        all
    }

    pub(crate) async fn resolved(&mut self) {
        let well = async { while !matches!(self.reports.recv().await.unwrap(), Report::Resolved { .. }) {} };
        tokio::time::timeout(TIMEOUT, well).await.unwrap();
    }

    /// Closes NVML.
    pub(crate) async fn drain(&self) {
        self.gpus.drain().await;
    }

    /// Stops the agent as if the daemon was killed, without any cleanup.
    pub(crate) async fn kill(self) {
        self.task.abort();
        // The lock is released with the task.
        let _ = self.task.await;
        self.gpus.shutdown().await;
    }
}
