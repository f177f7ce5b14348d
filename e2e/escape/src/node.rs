//! A node with one simulated GPU, and the pages of its shares as files.
//!
//! GPU usage is read from the simulator's usage file, which is exact to the byte and independent of
//! the library and its pages. It decides every attack on memory.

use crate::cgroup;
use crate::isolation_cases::Device;
use anyhow::{Context, Result, ensure};
pub use divvy_pages::policy::Compute;
use divvy_pages::policy::{Flags, Memory, Policy};
use divvy_pages::{GpuUuid, Text, account};
use divvy_sim::usage::{Place, UsageMonitor};
use divvy_sim::{GpuUsage, Options, Sim};
use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
/// The version of a GPU driver that enforces memory limits of cgroups.
const CGROUP_LIMITS_DRIVER: &str = "615.10.01";
/// Half of an A100 or H100: NVML's profile ids of the GPU instance with three slices (`3g`) and of
/// the compute instance `3c` in it.
const HALF_PROFILE_IDS: (u32, u32) = (9, 2);
/// Memory of a context on the simulated GPU, in bytes.
pub const CONTEXT: u64 = 300 * MIB;

#[derive(Debug)]
pub struct Node {
    dir: TempDir,
    pub sim: Sim,
    usage: Arc<GpuUsage>,
    uuid: GpuUuid,
    /// For a MIG instance: the ids of GPU and compute instance, and its UUID.
    mig: Option<((u32, u32), GpuUuid)>,
}

/// The pages of one share, as files.
#[derive(Clone, Debug)]
pub struct Share {
    pub claim: String,
    pub id: String,
    pub directory: PathBuf,
}

impl Node {
    /// A node with one GPU of that model.
    pub fn up(gpu: &str) -> Result<Self> {
        Self::up_in(gpu, &std::env::temp_dir())
    }

    /// The same with its files below `parent`.
    pub fn up_in(gpu: &str, parent: &Path) -> Result<Self> {
        Self::up_with(gpu, parent, |_| ())
    }

    /// A node with one device of that kind.
    pub fn for_device(device: Device) -> Result<Self> {
        let parent = std::env::temp_dir();
        match device {
            Device::Gpu => Self::up("L4"),
            Device::Hopper => Self::up("H100-SXM5-80GB"),
            Device::MigInstance => Self::up("H100-SXM5-80GB")?.with_half_instance(),
            Device::CgroupLimits => {
                let node =
                    Self::up_with("L4", &parent, |options| options.driver = CGROUP_LIMITS_DRIVER.to_owned())?;
                let sysfs = node.sim.root().join("sys/fs");
                std::fs::create_dir_all(&sysfs)?;
                symlink(cgroup::root()?, sysfs.join("cgroup"))?;
                Ok(node)
            }
        }
    }

    /// The same node with half of its GPU as a MIG instance, whose shares it then has.
    pub fn with_half_instance(mut self) -> Result<Self> {
        let (gi, ci) = self.sim.update(|state| {
            // Before Hopper a change of the MIG mode takes effect only after a reset.
            state.set_mig_mode(0, true)?;
            state.reset(0, false)?;
            let gi = state.create_gi(0, HALF_PROFILE_IDS.0, None)?;
            Ok((gi.id, state.create_ci(0, gi.id, HALF_PROFILE_IDS.1, None)?))
        })?;
        self.mig = Some(((gi, ci.id), GpuUuid::parse(&ci.uuid).context("the instance has no valid UUID")?));
        Ok(self)
    }

    /// The same as [`Node::up_in`] with other options of the simulator.
    pub fn up_with(gpu: &str, parent: &Path, adjust: impl FnOnce(&mut Options)) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("escape-").tempdir_in(parent)?;
        let mut options = Options::new(divvy_sim::library()?, std::env::current_exe()?);
        adjust(&mut options);
        let sim = divvy_sim::create(&dir.path().join("gpu"), gpu, &options)?;
        let state = sim.read()?;
        let uuid = state
            .gpus
            .first()
            .and_then(|gpu| GpuUuid::parse(&gpu.uuid))
            .context("the GPU has no valid UUID")?;
        std::fs::create_dir(dir.path().join("programs"))?;
        let usage = Arc::new(GpuUsage::open(sim.dir())?);
        Ok(Self { dir, usage, uuid, sim, mig: None })
    }

    /// The directory for the files of a run.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The directory of the programs that run in containers.
    pub fn programs(&self) -> PathBuf {
        self.path().join("programs")
    }

    /// The directory of the driver's libraries.
    pub fn libraries(&self) -> PathBuf {
        self.sim.root().join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH))
    }

    /// The driver's CUDA library.
    pub fn libcuda(&self) -> PathBuf {
        self.libraries().join("libcuda.so.1")
    }

    /// Creates a share of the GPU with a limit in bytes, with the pages that the node daemon
    /// writes.
    pub fn share(&self, claim: &str, id: &str, limit: u64) -> Result<Share> {
        self.share_of(0, claim, id, limit, Compute::default())
    }

    /// The same for the GPU in that slot and with a compute policy. A node with a MIG instance has
    /// one GPU.
    pub fn share_of(
        &self,
        slot: usize,
        claim: &str,
        id: &str,
        limit: u64,
        compute: Compute,
    ) -> Result<Share> {
        let directory = self.path().join("shares").join(claim).join(id);
        let state = self.sim.read()?;
        let gpu = state.gpus.get(slot).context("no such GPU")?;
        let physical = divvy_sim::mig::memory_mib(gpu, self.mig.map(|((gi, _), _)| gi)) * MIB;
        let device = (GpuUuid::parse(&gpu.uuid).context("the GPU has no valid UUID")?, self.instance());
        write_pages(&directory, claim, id, device, limit, physical, compute)?;
        Ok(Share { claim: claim.to_owned(), id: id.to_owned(), directory })
    }

    /// Creates a share that claims `claimed` bytes and may hold `limit` bytes including managed memory.
    pub fn over_committed_share(&self, claim: &str, id: &str, claimed: u64, limit: u64) -> Result<Share> {
        let share = self.share(claim, id, limit)?;
        let path = share.directory.join("policy");
        let (_, policy) = Policy::decode(&std::fs::read(&path)?)?;
        let memory = Memory { soft: claimed, overcommit: limit, ..policy.memory };
        let policy = Policy { memory, flags: policy.flags.with(Flags::UVM), ..policy };
        // No container has mapped the page yet.
        std::fs::remove_file(&path)?;
        write(&path, &policy.encode(), 0o444)?;
        Ok(share)
    }

    /// Writes pages of the same GPU that allow everything and that the node daemon did not write.
    pub fn forged(&self) -> Result<PathBuf> {
        let directory = self.path().join("forged");
        let device = (self.uuid, self.instance());
        write_pages(&directory, "mine", "share", device, 1 << 43, 1 << 43, Compute::default())?;
        Ok(directory)
    }

    fn instance(&self) -> Option<GpuUuid> {
        self.mig.map(|(_, uuid)| uuid)
    }

    /// Whether the GPU driver has a memory limit for that cgroup.
    pub fn has_cgroup_limit(&self, cgroup: &Path) -> Result<bool> {
        let state = self.sim.read()?;
        let path = cgroup.to_str().context("the path is not UTF-8")?;
        Ok(state.gpus.first().is_some_and(|gpu| gpu.cgroup_limit(path).is_ok()))
    }

    /// Bytes of GPU memory that living processes use.
    pub fn used(&self) -> u64 {
        self.usage.processes().iter().map(|found| found.bytes).sum()
    }

    /// The device that the node's shares are of.
    pub fn place(&self) -> Place {
        Place { slot: 0, instance: self.mig.map(|(numbers, _)| numbers) }
    }

    /// The ids of the processes that use the GPU.
    pub fn processes(&self) -> BTreeSet<u32> {
        self.usage.processes().iter().map(|found| found.pid).collect()
    }

    /// The current time, and the GPU time of all processes on the GPU or its instance except the
    /// `except` processes, which must be alive; in nanoseconds. Changes between processes are not
    /// included: they are time of no process.
    pub fn busy(&self, except: &BTreeSet<u32>) -> Result<(u64, u64)> {
        let watcher = self.watcher()?;
        let excepted: u64 = watcher
            .process_times()
            .iter()
            .filter(|one| except.contains(&one.pid))
            .map(|one| one.gpu_ns)
            .sum();
        let times = watcher.times(self.place()).context("no GPU")?;
        Ok((times.at, times.served_ns.saturating_sub(excepted)))
    }

    /// The busy part of the last sampling period (a sixth of a second), without the `except` processes.
    pub fn recently_busy(&self, except: &BTreeSet<u32>) -> Result<f64> {
        let sampled = self.watcher()?.last_utilization(self.place());
        Ok(sampled.map_or(0.0, |sampled| {
            let excepted: u64 =
                sampled.processes.iter().filter(|(pid, _)| except.contains(pid)).map(|(_, had)| had).sum();
            sampled.busy.saturating_sub(sampled.switching + excepted) as f64 / sampled.span as f64
        }))
    }

    /// A monitor of the GPU time of processes.
    pub fn watcher(&self) -> Result<UsageMonitor> {
        UsageMonitor::new(&self.usage).context("the simulator's usage cannot be watched")
    }

    /// A loader cache that contains the driver's libraries, as `ldconfig` in a container creates
    /// it.
    pub(crate) fn loader_cache(&self) -> Result<PathBuf> {
        let (cache, list) = (self.path().join("ld.so.cache"), self.path().join("ld.so.conf"));
        if !cache.exists() {
            let libraries = self.libraries();
            std::fs::write(&list, format!("{}\ninclude /etc/ld.so.conf\n", libraries.display()))?;
            let sbin = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
            let mut ldconfig = Command::new("ldconfig");
            ldconfig.env("PATH", sbin).arg("-X").arg("-C").arg(&cache).arg("-f").arg(&list);
            let out = ldconfig.output().context("cannot start ldconfig")?;
            ensure!(out.status.success(), "ldconfig: {}", String::from_utf8_lossy(&out.stderr));
        }
        Ok(cache)
    }

    /// Writes an `ld.so.preload` that names the library.
    pub(crate) fn preload(&self, library: &str) -> Result<PathBuf> {
        // Replaced atomically: the loader of another container may have the file mapped, and would
        // get SIGBUS.
        let mut part = tempfile::NamedTempFile::new_in(self.path())?;
        writeln!(part, "{library}")?;
        part.as_file().set_permissions(Permissions::from_mode(0o644))?;
        let file = self.path().join("ld.so.preload");
        part.persist(&file)?;
        Ok(file)
    }
}

/// Writes the pages of a share of a GPU or of a MIG instance of it. `limit` and `physical` are in
/// bytes.
pub fn write_pages(
    directory: &Path,
    claim: &str,
    id: &str,
    (gpu, mig): (GpuUuid, Option<GpuUuid>),
    limit: u64,
    physical: u64,
    compute: Compute,
) -> Result<()> {
    let short = |text: &str| Text::new(text).context("the id is too long");
    let policy = Policy {
        claim: short(claim)?,
        share: short(id)?,
        gpu,
        mig,
        pci: Text::EMPTY,
        memory: Memory { limit, physical, context: CONTEXT, ..Memory::default() },
        compute,
        codec: Default::default(),
        flags: Flags::NVML_VIEW,
    };
    let mut page = vec![0; account::SIZE];
    let head = account::fresh();
    page[..head.len()].copy_from_slice(&head);
    std::fs::create_dir_all(directory)?;
    // Written before the policy page: the agent takes a directory with a policy page for a share.
    write(&directory.join("account"), &page, 0o666)?;
    Ok(write(&directory.join("policy"), &policy.encode(), 0o444)?)
}

fn write(file: &Path, content: &[u8], mode: u32) -> std::io::Result<()> {
    std::fs::write(file, content)?;
    std::fs::set_permissions(file, Permissions::from_mode(mode))
}

impl Share {
    /// Registers a container with this share and its cgroup, as the OCI hook does.
    pub(crate) fn register_container(&self, id: &str, line: &str) -> Result<()> {
        let cgroups = self.directory.join("cgroups");
        std::fs::create_dir_all(&cgroups)?;
        Ok(std::fs::write(cgroups.join(id), line)?)
    }

    /// The balance of compute time on the account page, in nanoseconds.
    pub fn balance(&self) -> Result<i64> {
        Ok(account::Snapshot::new(&self.account()?)?.balance())
    }

    /// The used bytes on the account page.
    pub fn used(&self) -> Result<u64> {
        Ok(account::Snapshot::new(&self.account()?)?.used())
    }

    fn account(&self) -> std::io::Result<Vec<u8>> {
        std::fs::read(self.directory.join("account"))
    }
}
