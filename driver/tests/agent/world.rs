//! A node with simulated GPUs, shares of them, and processes in their containers.

use super::account::Page;
use super::programs::program;
use super::tenant::{Tenant, mounts, over};
use divvy_driver::agent::{Agent, Done, Kind, Report, Response};
use divvy_driver::gpus::{Gpus, GpusOptions};
use divvy_driver::paths::HostPaths;
use divvy_driver::shares::Shares;
use divvy_pages::{Compute, Flags, GpuUuid, Memory, Policy, Text};
use divvy_sim::Sim;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Receiver;

pub(crate) const H100: &str = "H100-SXM5-80GB";
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const CONTEXT: u64 = 300;
/// No test waits longer for what should come within seconds.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct World {
    pub(crate) sim: Sim,
    pub(crate) paths: HostPaths,
    _dir: tempfile::TempDir,
}

/// An agent at work, and what it tells.
pub(crate) struct Working {
    task: tokio::task::JoinHandle<()>,
    reports: Receiver<Report>,
    gpus: Gpus,
}

/// A finding, without its words.
pub(crate) type Told = (Kind, Option<u32>, Done);

impl World {
    pub(crate) fn up(driver: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = divvy_sim::Options::new(divvy_sim::library().unwrap(), program("divvy-sim"));
        options.driver = driver.to_owned();
        let sim = divvy_sim::up(&dir.path().join("root"), H100, &options).unwrap();
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

    /// A claim with a share of so many MiB of the first GPU, and a container of its own.
    pub(crate) fn share(&self, claim: &str, mib: u64) -> Page {
        Page::map(&self.pages(claim, mib).join("account"), mib * MIB)
    }

    /// The same with nobody who has the pages open.
    pub(crate) fn pages(&self, claim: &str, mib: u64) -> PathBuf {
        self.pages_with(claim, mib, Compute::default())
    }

    /// The same with that much of its time.
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

    /// What contexts of the first GPU were seen to take, as the node remembers it.
    pub(crate) fn context_mib(&self) -> Option<u64> {
        let uuid = self.sim.read().unwrap().gpus[0].uuid.clone();
        let file = self.paths.run_dir.join("contexts").join(uuid.trim_start_matches("GPU-"));
        let bytes = fs::read_to_string(file).ok()?;
        Some(bytes.parse::<u64>().ok()? / MIB)
    }

    /// A process of that claim's container that takes so many MiB of the first GPU.
    pub(crate) fn tenant(&self, claim: &str, mib: u64) -> Tenant {
        let tenant = Tenant::start(self.sim.root(), mib);
        tenant.place(&self.paths.proc_root, &cgroup(claim), &self.mounts(claim));
        tenant
    }

    fn mounts(&self, claim: &str) -> String {
        mounts(&Shares::new(&self.paths).of(&claim.into(), &"s".into()), claim, "s")
    }

    /// Mounts something over the policy page of a process.
    pub(crate) fn cover(&self, claim: &str, tenant: &Tenant) {
        tenant.remount(&self.paths.proc_root, &(self.mounts(claim) + &over(claim, "s")));
    }

    /// A cgroup v2 tree as the GPU driver sees it, with that process in the claim's cgroup.
    pub(crate) fn unified(&self, claim: &str, pid: u32) -> PathBuf {
        let root = self.paths.sys_root.join("fs/cgroup");
        fs::write(root.join("cgroup.controllers"), "memory\n").unwrap();
        let dir = root.join("kubepods").join(claim);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("cgroup.procs"), format!("{pid}\n")).unwrap();
        dir
    }

    pub(crate) async fn agent(&self, response: &str) -> Working {
        let gpus = Gpus::start(GpusOptions::new(&self.paths)).await;
        let (agent, reports) = Agent::new(gpus.clone(), &self.paths, response.parse::<Response>().unwrap());
        Working { task: tokio::spawn(agent.run()), reports, gpus }
    }
}

fn cgroup(claim: &str) -> String {
    format!("4:memory:/machine\n0::/kubepods/{claim}\n")
}

impl Working {
    /// What it finds, up to and with the finding of that sort.
    pub(crate) async fn until(&mut self, kind: Kind) -> Vec<Told> {
        let begun = Instant::now();
        let mut told: Vec<Told> = Vec::new();
        while !told.iter().any(|(known, ..)| *known == kind) {
            match tokio::time::timeout(PATIENCE, self.reports.recv()).await.unwrap().unwrap() {
                Report::Found { finding, done } => {
                    told.push((finding.kind, finding.process.as_ref().map(|process| process.pid), done));
                }
                _ => assert!(begun.elapsed() < PATIENCE, "waited in vain for {kind:?}: {told:?}"),
            }
        }
        told
    }

    /// So many audits from now, in which it finds nothing; how long each took.
    pub(crate) async fn finds_nothing(&mut self, audits: usize) -> Vec<Duration> {
        let mut all = Vec::new();
        while all.len() < audits {
            match tokio::time::timeout(PATIENCE, self.reports.recv()).await.unwrap().unwrap() {
                Report::Audited { took, .. } => all.push(took),
                report => panic!("{report:?}"),
            }
        }
        all
    }

    pub(crate) async fn well(&mut self) {
        let well = async { while !matches!(self.reports.recv().await.unwrap(), Report::Well { .. }) {} };
        tokio::time::timeout(PATIENCE, well).await.unwrap();
    }

    /// As when the daemon is killed: nothing is tidied up.
    pub(crate) async fn kill(self) {
        self.task.abort();
        // The lock goes with the task.
        let _ = self.task.await;
        self.gpus.shutdown().await;
    }
}
