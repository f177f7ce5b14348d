//! [`Sim`]: one simulator, identified by its root.

use crate::code::Code;
use crate::live_process::{self, LiveProcess};
use crate::mig::memory_mib;
use crate::modprobe;
use crate::operations::unix_ms;
use crate::state::{Privilege, Process, State};
use crate::store::{KERNEL_LOG, Store, StoreError};
use crate::usage::{self, GpuUsage};
use crate::visible_devices::VisibleDevices;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Directory of the state below a root. Containers share this path with the host.
pub(crate) const STATE_DIR: &str = "run/divvy-sim";

/// File with the path of the root, in the state's directory.
const ROOT_FILE: &str = "root";

/// Directory of libraries below a root.
pub(crate) const LIB_DIR: &str =
    if cfg!(target_arch = "aarch64") { "usr/lib/aarch64-linux-gnu" } else { "usr/lib/x86_64-linux-gnu" };

/// A simulator: its driver root and its state.
#[derive(Debug)]
pub struct Sim {
    root: PathBuf,
    dir: PathBuf,
    store: Store,
}

/// The reason why the state was not read or changed.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The simulator's files cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The simulated driver refuses the request.
    #[error("{0}")]
    Refused(#[from] Code),
}

impl From<SimError> for Code {
    fn from(failure: SimError) -> Self {
        match failure {
            SimError::Store(error) => error.into(),
            SimError::Refused(code) => code,
        }
    }
}

/// The simulator's directory, if this process can reach it and its state is the one in `dir`.
fn reachable_root(dir: &Path) -> Option<PathBuf> {
    let root = PathBuf::from(OsString::from_vec(std::fs::read(dir.join(ROOT_FILE)).ok()?));
    let inode = |dir: &Path| std::fs::metadata(dir).map(|data| (data.dev(), data.ino())).ok();
    let same = inode(dir).is_some() && inode(dir) == inode(&root.join(STATE_DIR));
    (same && root != Path::new("/")).then_some(root)
}

impl Sim {
    /// Opens the simulator with that driver root. The root `/` means a container or another mount
    /// namespace, which has the state and its own `/dev`. The trees are rendered in the directory
    /// of the simulator if it can be reached from there, else by the next process on the host.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let root = root.into();
        let dir = root.join(STATE_DIR);
        let render = if root == Path::new("/") { reachable_root(&dir) } else { Some(root.clone()) };
        let store = Store::open(dir.clone(), render)?;
        Ok(Self { root, dir, store })
    }

    /// Opens the simulator that a file of its driver root belongs to: the nearest parent directory
    /// that has a state.
    pub fn from_library_path(file: &Path) -> Result<Self, StoreError> {
        let file = file.canonicalize().unwrap_or_else(|_| file.to_owned());
        let root = file.ancestors().skip(1).find(|dir| dir.join(STATE_DIR).join("state.json").exists());
        Self::open(root.unwrap_or(Path::new("/")))
    }

    pub(crate) fn create(root: PathBuf, state: State) -> Result<Self, StoreError> {
        let dir = root.join(STATE_DIR);
        let store = Store::create(dir.clone(), root.clone(), state)?;
        let path = dir.join(ROOT_FILE);
        std::fs::write(&path, root.as_os_str().as_bytes()).map_err(|source| StoreError::Io {
            what: "write",
            path,
            source,
        })?;
        Ok(Self { root, dir, store })
    }

    /// The driver root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Path of one of the driver's libraries.
    pub fn library(&self, name: &str) -> PathBuf {
        self.root.join(LIB_DIR).join(name)
    }

    /// Directory of the state. Test harnesses mount it at `/run/divvy-sim` in containers.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of device nodes.
    pub fn dev(&self) -> PathBuf {
        self.root.join("dev")
    }

    /// Path of the trace, which has one JSON line for each call.
    pub fn trace_path(&self) -> PathBuf {
        self.dir.join("trace.jsonl")
    }

    /// Path of the kernel log, see [`crate::kernel_log`]. `dev/kmsg` below the root links to it.
    pub fn kernel_log_path(&self) -> PathBuf {
        self.dir.join(KERNEL_LOG)
    }

    /// The current state with the CUDA processes that run now. Cheap while the state does not
    /// change.
    pub fn read(&self) -> Result<Arc<State>, SimError> {
        self.create_due_nodes();
        Ok(self.store.read()?)
    }

    /// The state as stored, without CUDA processes that run now.
    pub fn read_stored(&self) -> Result<Arc<State>, SimError> {
        self.create_due_nodes();
        Ok(self.store.read_stored()?)
    }

    /// The processes of a GPU: `manual` ones from the stored state, and CUDA processes that run
    /// now.
    pub fn with_gpu_processes(&self, slot: usize, manual: Vec<Process>) -> Vec<Process> {
        let gpu_processes = self.usage().map(|usage| usage.processes_on_gpu(slot)).unwrap_or_default();
        usage::with_gpu_processes(manual, &gpu_processes)
    }

    /// GPU usage of CUDA processes; none if the files are of another build.
    pub fn usage(&self) -> Option<&Arc<GpuUsage>> {
        self.store.usage()
    }

    /// Changes the state and the trees that depend on it. If `change` fails, nothing changes.
    pub fn update<T>(&self, change: impl FnOnce(&mut State) -> Result<T, Code>) -> Result<T, SimError> {
        self.store.update(|state| {
            state.create_due_nodes();
            change(state).map_err(SimError::Refused)
        })
    }

    /// Creates the device nodes that are due, if this process may.
    fn create_due_nodes(&self) {
        let is_due = |state: &State| state.next_node_ms().is_some_and(|due| due <= unix_ms());
        if self.store.read_stored().is_ok_and(|state| is_due(&state)) {
            drop(self.update(|_| Ok(())));
        }
    }

    /// Creates device nodes when they are due, and returns when all exist.
    pub fn create_late_nodes(&self) -> Result<(), SimError> {
        while let Some(due) = self.read_stored()?.next_node_ms() {
            std::thread::sleep(Duration::from_millis(due.saturating_sub(unix_ms())));
            self.update(|_| Ok(()))?;
        }
        Ok(())
    }

    /// Starts a process that creates device nodes when they are due. Without it, each node appears
    /// when a process reads the state after the due time.
    pub fn start_node_helper(&self) -> Result<(), SimError> {
        if self.read_stored()?.next_node_ms().is_none() {
            return Ok(());
        }
        let program = self.root.join("usr/bin/nvidia-modprobe");
        let mut command = Command::new(&program);
        command.arg(modprobe::LATE_NODES).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = command.spawn().map(drop);
        started.map_err(|source: io::Error| StoreError::Io { what: "run", path: program, source }.into())
    }

    /// Whether the simulated driver treats this process as root.
    pub fn privileged(&self, state: &State) -> bool {
        match state.host.privilege {
            Privilege::Nobody => false,
            Privilege::Owner => {
                let user = rustix::process::geteuid();
                user.is_root() || rustix::fs::stat(&self.dir).is_ok_and(|stat| stat.st_uid == user.as_raw())
            }
        }
    }

    /// Adds a real process to a GPU. Its entry has another id if a living process already gpu_processes its
    /// process id. Fails with MEMORY if the GPU or instance has too little left, and with IN_USE if
    /// the compute mode forbids it.
    pub fn attach_process(&self, slot: usize, process: Process) -> Result<LiveProcess, SimError> {
        self.update(|state| {
            let (pid, lock) = live_process::lock_pid(&self.dir().join(live_process::DIR), process.pid)?;
            let process = Process { pid, ..process };
            let gpu = state.gpu(slot)?;
            let gi = process.instance.map(|(gi, _)| gi);
            if gpu.used_mib(gi) + process.memory_mib > memory_mib(gpu, gi) {
                return Err(Code::Memory);
            }
            if gpu.cgroup_bytes_left(process.pid).is_some_and(|left| process.memory_mib << 20 > left) {
                return Err(Code::Memory);
            }
            state.add_process(slot, process)?;
            Ok(LiveProcess { pid, _lock: lock })
        })
    }

    /// Removes the entries of dead processes. Every change of the state does this too.
    pub fn remove_dead_processes(&self) -> Result<(), SimError> {
        let any = std::fs::read_dir(self.dir().join(live_process::DIR))
            .is_ok_and(|mut names| names.next().is_some());
        if any { self.update(|_| Ok(())) } else { Ok(()) }
    }

    /// The devices that are visible to this process now.
    pub fn visible_devices(&self) -> VisibleDevices {
        VisibleDevices::read(&self.dev())
    }
}
