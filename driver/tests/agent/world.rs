//! A node with simulated GPUs, shares of them, and processes in their containers.

use super::account::Page;
use super::programs::program;
use divvy_driver::agent::{Agent, Done, Kind, Report, Response};
use divvy_driver::gpus::{Gpus, GpusOptions};
use divvy_driver::paths::HostPaths;
use divvy_driver::shares::Shares;
use divvy_pages::{Compute, Flags, GpuUuid, Identity, Memory, Policy, Text};
use divvy_sim::Sim;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
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

/// A process in a container, on the first GPU.
pub(crate) struct Tenant {
    child: Child,
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
        let uuid = self.sim.read().unwrap().gpus[0].uuid.clone();
        let policy = Policy {
            claim: Text::new(claim).unwrap(),
            share: Text::new("s").unwrap(),
            gpu: GpuUuid::parse(&uuid).unwrap(),
            mig: None,
            pci: Text::EMPTY,
            memory: Memory { limit: mib * MIB, context: CONTEXT * MIB, ..Memory::default() },
            compute: Compute::default(),
            flags: Flags::default(),
        };
        let shares = Shares::new(&self.paths);
        shares.write(&claim.into(), &"s".into(), &policy).unwrap();
        let dir = shares.of(&claim.into(), &"s".into());
        fs::write(dir.join("cgroups/container"), cgroup(claim)).unwrap();
        Page::map(&dir.join("account"), mib * MIB)
    }

    /// A process of that claim's container that takes so many MiB of the first GPU.
    pub(crate) fn tenant(&self, claim: &str, mib: u64) -> Tenant {
        let tenant = Tenant::start(self, mib);
        self.place(claim, tenant.pid());
        tenant
    }

    /// Lets a process be seen in that claim's container.
    pub(crate) fn place(&self, claim: &str, pid: u32) {
        let dir = self.paths.proc_root.join(pid.to_string());
        fs::create_dir(&dir).unwrap();
        for name in ["stat", "status", "ns"] {
            symlink(format!("/proc/{pid}/{name}"), dir.join(name)).unwrap();
        }
        fs::write(dir.join("cgroup"), cgroup(claim)).unwrap();
        fs::write(dir.join("mountinfo"), self.mounts(claim)).unwrap();
    }

    fn mounts(&self, claim: &str) -> String {
        let page = Shares::new(&self.paths).of(&claim.into(), &"s".into());
        let device = fs::metadata(page.join("policy")).unwrap().dev();
        let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let line = |(id, file, options): (u32, &str, &str)| {
            format!(
                "{id} 1 {device} /x/shares/{claim}/s/{file} /run/divvy/{claim}/s/{file} {options} - tmpfs t rw\n"
            )
        };
        let root = "1 0 0:50 / / rw - overlay overlay rw\n".to_owned();
        root + &line((2, "policy", "ro")) + &line((3, "account", "rw"))
    }

    /// Mounts something over the policy page of a process.
    pub(crate) fn cover(&self, claim: &str, pid: u32) {
        let path = self.paths.proc_root.join(pid.to_string()).join("mountinfo");
        let over = format!("9 2 0:77 /x /run/divvy/{claim}/s/policy rw - tmpfs t rw\n");
        fs::write(&path, self.mounts(claim) + &over).unwrap();
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

impl Tenant {
    /// What a program does that takes memory of the GPU without any library.
    fn start(world: &World, mib: u64) -> Self {
        let mut command = Command::new(program("divvy-sim"));
        command.arg("-C").arg(world.sim.root()).args(["client", "--memory", &mib.to_string()]);
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains(&format!("\"pid\":{}", child.id())), "{line}");
        Self { child }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// As the process says it to an account page.
    pub(crate) fn who(&self) -> Identity {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
        let namespace = fs::read_link(format!("/proc/{}/ns/pid", self.pid())).unwrap();
        let namespace =
            namespace.to_str().unwrap().trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
        let field = |number: usize| fields[number - 3].parse().unwrap();
        Identity { pid: self.pid(), namespace, start: field(22), image: field(28) }
    }

    pub(crate) fn lives(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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
                Report::Audited { took } => all.push(took),
                report => panic!("{report:?}"),
            }
        }
        all
    }

    pub(crate) async fn well(&mut self) {
        while !matches!(self.reports.recv().await.unwrap(), Report::Well { .. }) {}
    }

    /// As when the daemon is killed: nothing is tidied up.
    pub(crate) async fn kill(self) {
        self.task.abort();
        // The lock goes with the task.
        let _ = self.task.await;
        self.gpus.shutdown().await;
    }
}
