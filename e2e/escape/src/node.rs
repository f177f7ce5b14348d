//! A node with one simulated GPU, the pages of its shares as files, and what its processes really use.
//!
//! What is used is read from the simulator's own ledger, which is exact to the byte and which neither the library nor
//! its pages have a part in: the judge of every trick that is about memory.

use anyhow::{Context, Result, ensure};
use divvy_pages::policy::{Compute, Flags, Memory, Policy};
use divvy_pages::{GpuUuid, Text, account};
use divvy_sim::{Ledger, Options, Sim};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
/// What a context takes on the simulated GPU.
pub const CONTEXT: u64 = 300 * MIB;

#[derive(Debug)]
pub struct Node {
    dir: TempDir,
    pub sim: Sim,
    ledger: Arc<Ledger>,
    uuid: GpuUuid,
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
        let dir = tempfile::Builder::new().prefix("escape-").tempdir_in(parent)?;
        let options = Options::new(divvy_sim::library()?, std::env::current_exe()?);
        let sim = divvy_sim::up(&dir.path().join("gpu"), gpu, &options)?;
        let state = sim.read()?;
        let uuid =
            state.gpus.first().and_then(|gpu| GpuUuid::parse(&gpu.uuid)).context("a GPU without a UUID")?;
        std::fs::create_dir(dir.path().join("programs"))?;
        let ledger = Arc::new(Ledger::open(sim.dir())?);
        Ok(Self { dir, ledger, uuid, sim })
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
        let directory = self.path().join("shares").join(claim).join(id);
        let state = self.sim.read()?;
        let physical = divvy_sim::mig::memory_mib(state.gpus.first().context("no GPU")?, None) * MIB;
        write_pages(&directory, claim, id, self.uuid, limit, physical)?;
        Ok(Share { claim: claim.to_owned(), id: id.to_owned(), directory })
    }

    /// Pages of the same GPU that allow everything, which no node has made.
    pub fn forged(&self) -> Result<PathBuf> {
        let directory = self.path().join("forged");
        write_pages(&directory, "mine", "share", self.uuid, 1 << 43, 1 << 43)?;
        Ok(directory)
    }

    /// Bytes that living processes use of the GPU.
    pub fn used(&self) -> u64 {
        self.ledger.uses().iter().map(|found| found.bytes).sum()
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
        let file = self.path().join("ld.so.preload");
        std::fs::write(&file, format!("{library}\n"))?;
        Ok(file)
    }
}

/// Writes the pages of a share of a GPU; amounts in bytes.
pub fn write_pages(
    directory: &Path,
    claim: &str,
    id: &str,
    gpu: GpuUuid,
    limit: u64,
    physical: u64,
) -> Result<()> {
    let short = |text: &str| Text::new(text).context("too long an id");
    let policy = Policy {
        claim: short(claim)?,
        share: short(id)?,
        gpu,
        mig: None,
        pci: Text::EMPTY,
        memory: Memory { limit, physical, context: CONTEXT, ..Memory::default() },
        compute: Compute::default(),
        flags: Flags::NVML_VIEW,
    };
    let mut page = vec![0; account::SIZE];
    let head = account::fresh();
    page[..head.len()].copy_from_slice(&head);
    std::fs::create_dir_all(directory)?;
    write(&directory.join("policy"), &policy.encode(), 0o444)?;
    Ok(write(&directory.join("account"), &page, 0o666)?)
}

fn write(file: &Path, content: &[u8], mode: u32) -> std::io::Result<()> {
    std::fs::write(file, content)?;
    std::fs::set_permissions(file, Permissions::from_mode(mode))
}

impl Share {
    /// Nanoseconds of compute time that the account page says are left.
    pub fn balance(&self) -> Result<i64> {
        let page = std::fs::read(self.directory.join("account"))?;
        Ok(account::Snapshot::new(&page)?.balance())
    }
}
