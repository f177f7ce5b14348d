//! A node with one simulated GPU, the pages of its shares as files, and what its processes really use.
//!
//! What is used is read from the simulator's own ledger, which is exact to the byte and which neither the library nor
//! its pages have a part in: the judge of every trick that is about memory.

use crate::cgroup;
use crate::rows::On;
use anyhow::{Context, Result, ensure};
pub use divvy_pages::policy::Compute;
use divvy_pages::policy::{Flags, Memory, Policy};
use divvy_pages::{GpuUuid, Text, account};
use divvy_sim::ledger::{Place, Watcher};
use divvy_sim::{Ledger, Options, Sim};
use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
/// A GPU driver that keeps limits of cgroups.
const LIMITING: &str = "615.10.01";
/// Half of an A100 or H100: NVML's numbers of the profiles of three slices and, in it, `3c`.
const HALF: (u32, u32) = (9, 2);
/// What a context takes on the simulated GPU.
pub const CONTEXT: u64 = 300 * MIB;

#[derive(Debug)]
pub struct Node {
    dir: TempDir,
    pub sim: Sim,
    ledger: Arc<Ledger>,
    uuid: GpuUuid,
    /// Of a MIG instance, the numbers of GPU and compute instance and the UUID.
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
    /// A node with that GPU.
    pub fn up(gpu: &str) -> Result<Self> {
        Self::up_in(gpu, &std::env::temp_dir())
    }

    /// The same with its files in a directory of this one.
    pub fn up_in(gpu: &str, parent: &Path) -> Result<Self> {
        Self::with(gpu, parent, |_| ())
    }

    /// The same where samples of the GPU's time say what each process had.
    pub fn dividing(gpu: &str, parent: &Path) -> Result<Self> {
        Self::with(gpu, parent, |options| options.host.divides_samples = true)
    }

    /// A node with one device of that sort.
    pub fn of(on: On) -> Result<Self> {
        let parent = std::env::temp_dir();
        match on {
            On::Gpu => Self::up("L4"),
            On::Hopper => Self::up("H100-SXM5-80GB"),
            On::Instance => Self::of_half("H100-SXM5-80GB", &parent),
            On::Limiting => {
                let node = Self::with("L4", &parent, |options| options.driver = LIMITING.to_owned())?;
                let sysfs = node.sim.root().join("sys/fs");
                std::fs::create_dir_all(&sysfs)?;
                symlink(cgroup::root()?, sysfs.join("cgroup"))?;
                Ok(node)
            }
        }
    }

    /// A node with that GPU, half of which is a MIG instance, with its files in a directory of this one.
    pub fn of_half(gpu: &str, parent: &Path) -> Result<Self> {
        let mut node = Self::up_in(gpu, parent)?;
        let (gi, ci) = node.sim.update(|state| {
            // Before Hopper the mode changes with a reset.
            state.set_mig_mode(0, true)?;
            state.reset(0, false)?;
            let gi = state.create_gi(0, HALF.0, None)?;
            Ok((gi.id, state.create_ci(0, gi.id, HALF.1, None)?))
        })?;
        node.mig = Some(((gi, ci.id), GpuUuid::parse(&ci.uuid).context("an instance without a UUID")?));
        Ok(node)
    }

    fn with(gpu: &str, parent: &Path, adjust: impl FnOnce(&mut Options)) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("escape-").tempdir_in(parent)?;
        let mut options = Options::new(divvy_sim::library()?, std::env::current_exe()?);
        adjust(&mut options);
        let sim = divvy_sim::up(&dir.path().join("gpu"), gpu, &options)?;
        let state = sim.read()?;
        let uuid =
            state.gpus.first().and_then(|gpu| GpuUuid::parse(&gpu.uuid)).context("a GPU without a UUID")?;
        std::fs::create_dir(dir.path().join("programs"))?;
        let ledger = Arc::new(Ledger::open(sim.dir())?);
        Ok(Self { dir, ledger, uuid, sim, mig: None })
    }

    /// A directory for what a run needs.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Where the programs lie that run in containers.
    pub fn programs(&self) -> PathBuf {
        self.path().join("programs")
    }

    /// Where the driver's libraries lie.
    pub fn libraries(&self) -> PathBuf {
        self.sim.root().join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH))
    }

    /// The driver's CUDA library.
    pub fn libcuda(&self) -> PathBuf {
        self.libraries().join("libcuda.so.1")
    }

    /// A share of the GPU with so many bytes, as the node daemon writes its pages.
    pub fn share(&self, claim: &str, id: &str, limit: u64) -> Result<Share> {
        self.share_of(0, claim, id, limit, Compute::default())
    }

    /// The same of the GPU in that slot, with that much of its time. A node with an instance has one GPU.
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
        let device = (GpuUuid::parse(&gpu.uuid).context("a GPU without a UUID")?, self.instance());
        write_pages(&directory, claim, id, device, limit, physical, compute)?;
        Ok(Share { claim: claim.to_owned(), id: id.to_owned(), directory })
    }

    /// A share that has `claimed` bytes of the GPU and may hold `limit` in all, as managed memory.
    pub fn over_committed(&self, claim: &str, id: &str, claimed: u64, limit: u64) -> Result<Share> {
        let share = self.share(claim, id, limit)?;
        let path = share.directory.join("policy");
        let (_, policy) = Policy::decode(&std::fs::read(&path)?)?;
        let memory = Memory { soft: claimed, overcommit: limit, ..policy.memory };
        let policy = Policy { memory, flags: policy.flags.with(Flags::UVM), ..policy };
        // Nobody has it yet.
        std::fs::remove_file(&path)?;
        write(&path, &policy.encode(), 0o444)?;
        Ok(share)
    }

    /// Pages of the same GPU that allow everything, which no node has made.
    pub fn forged(&self) -> Result<PathBuf> {
        let directory = self.path().join("forged");
        let device = (self.uuid, self.instance());
        write_pages(&directory, "mine", "share", device, 1 << 43, 1 << 43, Compute::default())?;
        Ok(directory)
    }

    fn instance(&self) -> Option<GpuUuid> {
        self.mig.map(|(_, uuid)| uuid)
    }

    /// Whether the GPU driver keeps a limit of that cgroup.
    pub fn limits(&self, cgroup: &Path) -> Result<bool> {
        let state = self.sim.read()?;
        let path = cgroup.to_str().context("a path that is no text")?;
        Ok(state.gpus.first().is_some_and(|gpu| gpu.cgroup_limit(path).is_ok()))
    }

    /// Bytes that living processes use of the GPU.
    pub fn used(&self) -> u64 {
        self.ledger.uses().iter().map(|found| found.bytes).sum()
    }

    /// What the node's shares are of.
    fn place(&self) -> Place {
        Place { slot: 0, instance: self.mig.map(|(numbers, _)| numbers) }
    }

    /// Processes that use the GPU.
    pub fn processes(&self) -> BTreeSet<u32> {
        self.ledger.uses().iter().map(|found| found.pid).collect()
    }

    /// The time, and for how long of it the GPU or its instance has been at work but for processes that live all the while; nanoseconds.
    pub fn busy(&self, but: &BTreeSet<u32>) -> Result<(u64, u64)> {
        let watcher = self.watcher()?;
        let theirs: u64 =
            watcher.served().iter().filter(|one| but.contains(&one.pid)).map(|one| one.served).sum();
        let (at, all) = watcher.busy(self.place()).context("no GPU")?;
        Ok((at, all.saturating_sub(theirs)))
    }

    /// The part of the last sixth of a second in which it was at work but for these.
    pub fn busy_lately(&self, but: &BTreeSet<u32>) -> Result<f64> {
        let sampled = self.watcher()?.last_sampled(self.place());
        Ok(sampled.map_or(0.0, |sampled| {
            let theirs: u64 =
                sampled.processes.iter().filter(|(pid, _)| but.contains(pid)).map(|(_, had)| had).sum();
            sampled.busy.saturating_sub(theirs) as f64 / sampled.span as f64
        }))
    }

    /// Who sees what time processes have had of the GPU.
    pub fn watcher(&self) -> Result<Watcher> {
        Watcher::new(&self.ledger).context("the simulator's ledger cannot be watched")
    }

    /// A loader cache in which the driver's libraries are, as `ldconfig` in a container leaves one.
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

    /// An `ld.so.preload` that names the library.
    pub(crate) fn preload(&self, library: &str) -> Result<PathBuf> {
        // Never in place: a loader of another container that maps it meanwhile would end by SIGBUS.
        let mut part = tempfile::NamedTempFile::new_in(self.path())?;
        writeln!(part, "{library}")?;
        part.as_file().set_permissions(Permissions::from_mode(0o644))?;
        let file = self.path().join("ld.so.preload");
        part.persist(&file)?;
        Ok(file)
    }
}

/// Writes the pages of a share of a GPU, or of the MIG instance beside it; amounts in bytes.
pub fn write_pages(
    directory: &Path,
    claim: &str,
    id: &str,
    (gpu, mig): (GpuUuid, Option<GpuUuid>),
    limit: u64,
    physical: u64,
    compute: Compute,
) -> Result<()> {
    let short = |text: &str| Text::new(text).context("too long an id");
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
    // The agent may be at work: with the policy page there is a share.
    write(&directory.join("account"), &page, 0o666)?;
    Ok(write(&directory.join("policy"), &policy.encode(), 0o444)?)
}

fn write(file: &Path, content: &[u8], mode: u32) -> std::io::Result<()> {
    std::fs::write(file, content)?;
    std::fs::set_permissions(file, Permissions::from_mode(mode))
}

impl Share {
    /// Notes a container with this share and its cgroup, as the OCI hook does.
    pub(crate) fn tell_container(&self, id: &str, line: &str) -> Result<()> {
        let known = self.directory.join("cgroups");
        std::fs::create_dir_all(&known)?;
        Ok(std::fs::write(known.join(id), line)?)
    }

    /// Nanoseconds of compute time that the account page says are left.
    pub fn balance(&self) -> Result<i64> {
        Ok(account::Snapshot::new(&self.account()?)?.balance())
    }

    /// Bytes that the account page says are used.
    pub fn used(&self) -> Result<u64> {
        Ok(account::Snapshot::new(&self.account()?)?.used())
    }

    fn account(&self) -> std::io::Result<Vec<u8>> {
        std::fs::read(self.directory.join("account"))
    }
}
