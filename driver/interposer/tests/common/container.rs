//! A container on a simulated node: a process tree with its own namespaces, with pages mounted as
//! the node daemon mounts them, and the library preloaded.
//!
//! No root is needed: `unshare -Urm` creates a user namespace in which this user is root, and a
//! mount namespace in which `/run` is a fresh tmpfs. A page is a file outside, mounted as a single
//! file, the policy read-only.

use super::guest::Guest;
use super::program::{self, Program};
use divvy_pages::policy::{Flags, Memory, Policy};
use divvy_pages::{GpuUuid, Text, account};
use divvy_sim::{Options, Sim};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;

/// A node with simulated GPUs and shares.
pub(crate) struct Node {
    dir: TempDir,
    pub(crate) sim: Sim,
}

/// The pages of one share, as files.
#[derive(Clone)]
pub(crate) struct Share {
    pub(crate) claim: &'static str,
    pub(crate) id: &'static str,
    pub(crate) directory: PathBuf,
}

impl Node {
    pub(crate) fn up(gpus: &str) -> Self {
        Self::with(gpus, |_| ())
    }

    /// A node with a CUDA 12.8 driver, which lacks the queries of later versions.
    #[allow(dead_code, reason = "not every test asks for it")]
    pub(crate) fn before_cuda_13(gpus: &str) -> Self {
        Self::with(gpus, |options| {
            options.driver = "570.124.06".to_owned();
            options.cuda = (12, 8);
        })
    }

    /// A node with the newest CUDA driver that the symbol lists cover.
    #[allow(dead_code, reason = "not every test asks for it")]
    pub(crate) fn newest(gpus: &str) -> Self {
        Self::with(gpus, |options| options.cuda = (13, 5))
    }

    fn with(gpus: &str, change: impl FnOnce(&mut Options)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let program = std::env::current_exe().expect("this test");
        let nvml = program.with_file_name("libdivvy_sim_nvml.so");
        let mut options = Options::new(nvml, program);
        change(&mut options);
        let sim = divvy_sim::create(dir.path(), gpus, &options).expect("simulated GPUs");
        Self { dir, sim }
    }

    /// The path of one of the driver's programs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.dir.path().join("usr/bin").join(name)
    }

    pub(crate) fn gpu(&self, slot: usize) -> GpuUuid {
        let state = self.sim.read().expect("a state");
        GpuUuid::parse(&state.gpus[slot].uuid).expect("the simulator's UUIDs are UUIDs")
    }

    /// The policy of a share with a limit in MiB and defaults otherwise.
    pub(crate) fn policy(&self, slot: usize, mib: u64) -> Policy {
        Policy {
            claim: Text::EMPTY,
            share: Text::EMPTY,
            gpu: self.gpu(slot),
            mig: None,
            pci: Text::EMPTY,
            memory: Memory { limit: mib * MIB, physical: 23034 * MIB, context: 0, ..Memory::default() },
            compute: Default::default(),
            codec: Default::default(),
            flags: Flags::NVML_VIEW,
        }
    }

    /// Writes the pages of a share, as the node daemon does at prepare.
    pub(crate) fn share(&self, claim: &'static str, id: &'static str, policy: Policy) -> Share {
        let directory = self.dir.path().join("shares").join(claim).join(id);
        std::fs::create_dir_all(&directory).expect("a directory for the pages");
        let text = |text| Text::new(text).expect("a short text");
        let policy = Policy { claim: text(claim), share: text(id), ..policy };
        std::fs::write(directory.join("policy"), policy.encode()).expect("a policy page");
        let mut page = vec![0; account::SIZE];
        let fresh = account::fresh();
        page[..fresh.len()].copy_from_slice(&fresh);
        std::fs::write(directory.join("account"), page).expect("an account page");
        Share { claim, id, directory }
    }

    /// A container with these shares.
    pub(crate) fn container(&self, shares: &[Share]) -> Container<'_> {
        Container { node: self, shares: shares.to_vec(), extra_script: String::new(), shims: false }
    }
}

impl Share {
    /// Bytes charged, from the account page.
    pub(crate) fn used(&self) -> u64 {
        let page = std::fs::read(self.directory.join("account")).expect("an account page");
        account::Snapshot::new(&page).expect("a page of this version").used()
    }

    /// GPU time charged by its processes, in milliseconds.
    #[allow(dead_code, reason = "not every test launches")]
    pub(crate) fn charged_ms(&self) -> u64 {
        let page = std::fs::read(self.directory.join("account")).expect("an account page");
        let page = account::Snapshot::new(&page).expect("a page of this version");
        page.slots().map(|slot| slot.charged_ns).sum::<u64>() / 1_000_000
    }

    /// Returns true if the first process reports unpaid work that may be running: the last word of
    /// the second line of its slot.
    #[allow(dead_code, reason = "not every test launches")]
    pub(crate) fn has_unmeasured(&self) -> bool {
        let page = std::fs::read(self.directory.join("account")).expect("an account page");
        page[account::HEADER + 120..account::HEADER + 128] != [0; 8]
    }

    pub(crate) fn used_mib(&self) -> u64 {
        self.used() / MIB
    }
}

pub(crate) struct Container<'a> {
    node: &'a Node,
    shares: Vec<Share>,
    extra_script: String,
    shims: bool,
}

impl Container<'_> {
    /// Adds shell commands that run in the container before its program starts.
    pub(crate) fn with(mut self, script: &str) -> Self {
        self.extra_script += script;
        self.extra_script.push('\n');
        self
    }

    fn script(&self) -> String {
        let mut script = "set -e\nmount -t tmpfs tmpfs /run\nmkdir -p /run/divvy\n".to_owned();
        for Share { claim, id, directory } in &self.shares {
            let directory = directory.display();
            script += &format!(
                "at=/run/divvy/{claim}/{id}\nmkdir -p $at\ntouch $at/policy $at/account\n\
                 mount --bind {directory}/account $at/account\n\
                 mount -o remount,bind,nosuid,nodev,noexec $at/account\n\
                 mount --bind {directory}/policy $at/policy\n\
                 mount -o remount,bind,ro,nosuid,nodev,noexec $at/policy\n"
            );
        }
        script + &self.extra_script + "\nexec \"$@\"\n"
    }

    /// A command in the container.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("unshare");
        command.args(["-Urm", "sh", "-c", &self.script(), "sh", "env"]);
        // Set only for the program, not for the shell that mounts.
        command.arg(match self.shims {
            true => "LD_LIBRARY_PATH=/run/divvy/lib/shim".to_owned(),
            false => format!("LD_PRELOAD={}", super::shipped().join("libdivvy.so").display()),
        });
        command.arg(program);
        command
    }

    #[allow(dead_code, reason = "not every test names it")]
    pub(crate) fn driver(&self) -> PathBuf {
        if self.shims { "libcuda.so.1".into() } else { self.node.sim.library("libcuda.so.1") }
    }

    /// Starts this test's program in the container. It waits for commands.
    pub(crate) fn program(&self) -> Program {
        Program::start(self.command(&std::env::current_exe().expect("this test")), &self.driver())
    }

    /// Uses shim mode: the shims replace the driver's libraries, which are mounted in a separate
    /// directory, and nothing is preloaded. The node's devices and the simulator's state are
    /// mounted as in a container.
    pub(crate) fn with_shims(mut self) -> Self {
        let shims = super::shipped().join("shim");
        let sim = &self.node.sim;
        let mut script = format!(
            "mkdir -p /run/divvy/lib/real /run/divvy/lib/shim /run/divvy-sim\n\
             mount --bind {} /run/divvy-sim\n\
             mount --bind {} /dev\n",
            sim.dir().display(),
            sim.dev().display()
        );
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            let real = self.node.sim.library(name).canonicalize().expect("the driver's library");
            let (real, shim) = (real.display(), shims.join(name));
            let shim = shim.display();
            script += &format!(
                "touch /run/divvy/lib/real/{name} /run/divvy/lib/shim/{name}\n\
                 mount --bind {real} /run/divvy/lib/real/{name}\n\
                 mount --bind {shim} /run/divvy/lib/shim/{name}\n"
            );
        }
        self.extra_script += &script;
        self.shims = true;
        self
    }

    /// Like [`Self::program`], with a current context on the first GPU.
    pub(crate) fn started(&self) -> Program {
        let mut program = self.program();
        assert_eq!(program.ask("start 0"), "ok");
        program
    }
}

/// Test entry for the program in the container. As a program it executes commands; as a test it
/// starts one and asks it.
pub(crate) fn guest() {
    if !answer() {
        assert_eq!(Node::up("L4").container(&[]).program().ask("init"), "0");
    }
}

/// Executes commands if this process is a program in a container. Returns false otherwise.
pub(crate) fn answer() -> bool {
    let Some(driver) = program::driver() else { return false };
    let guest = Guest::open(&driver);
    program::answer_each(|words| guest.run(words));
    true
}

/// The key of an answer "ok KEY".
pub(crate) fn key(answer: &str) -> String {
    answer.strip_prefix("ok ").unwrap_or_else(|| panic!("it was answered {answer}")).to_owned()
}
