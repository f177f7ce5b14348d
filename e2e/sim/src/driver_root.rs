//! Creates a simulator: a driver root and its first state.
//!
//! The root holds the files of a GPU driver that a Kubernetes driver looks for. These are the
//! simulated `libnvidia-ml` and `libcuda`, empty libraries of the same version, the programs
//! `nvidia-smi`, `nvidia-modprobe` and those of MPS, and the rendered trees.

use crate::board;
use crate::catalogue::{ListError, Model, parse_list};
use crate::code::Code;
use crate::control::Control;
use crate::elf::shared_object;
use crate::sim::{LIB_DIR, STATE_DIR, Sim, SimError};
use crate::state::KernelLog;
use crate::state::{Events, FORMAT, Gpu, Host, Modules, State};
use crate::store::StoreError;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// File name of the simulated libnvidia-ml, as cargo builds it.
const NVML_FILE_NAME: &str = "libdivvy_sim_nvml.so";
/// File name of the simulated libcuda. It is installed if it exists beside libnvidia-ml.
const CUDA_FILE_NAME: &str = "libdivvy_sim_cuda.so";

/// Empty libraries: their names, and the numbers in the sonames that have one.
const EMPTY_LIBRARIES: &[(&str, Option<u32>)] = &[
    ("libcuda", Some(1)),
    ("libcudadebugger", Some(1)),
    ("libnvcuvid", Some(1)),
    ("libnvidia-allocator", Some(1)),
    ("libnvidia-cfg", Some(1)),
    ("libnvidia-encode", Some(1)),
    ("libnvidia-gpucomp", None),
    ("libnvidia-nvvm", Some(4)),
    ("libnvidia-opticalflow", Some(1)),
    ("libnvidia-ptxjitcompiler", Some(1)),
];

/// Programs that the multi-call program stands in for.
const PROGRAMS: &[&str] =
    &["nvidia-smi", "nvidia-modprobe", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];

/// The directory that holds all files of the driver, below the root.
const MOUNTED: &str = "usr";

/// How to create a simulator.
#[derive(Clone, Debug)]
pub struct Options {
    /// The simulated `libnvidia-ml`, see [`library`].
    pub library: PathBuf,
    /// A program that calls [`crate::command::main`] or [`crate::command::multicall`].
    pub multicall: PathBuf,
    /// Version of the GPU driver, such as `580.95.05`.
    pub driver: String,
    pub cuda: (u32, u32),
    /// Determines the ids of the GPUs. Nodes with different seeds have different GPUs.
    pub seed: u64,
    /// Number of NUMA nodes. The GPUs are distributed over them in order.
    pub numa_nodes: u32,
    pub host: Host,
}

impl Options {
    /// A bare-metal node with two sockets.
    pub fn new(library: PathBuf, multicall: PathBuf) -> Self {
        Self {
            library,
            multicall,
            driver: "580.95.05".to_owned(),
            cuda: (13, 0),
            seed: 0,
            numa_nodes: 2,
            host: Host::default(),
        }
    }
}

/// The reason why a simulator was not created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error(transparent)]
    List(#[from] ListError),
    #[error("{version:?} is not a driver version such as 580.95.05")]
    Version { version: String },
    #[error("{dir} already has simulated GPUs; remove it or choose another directory")]
    Exists { dir: PathBuf },
    #[error("module nvidia is in use: a process has NVML or CUDA initialised, or a GPU has processes")]
    InUse,
    #[error("driver {version} is loaded; unload it first")]
    Loaded { version: String },
    #[error("/ cannot be a simulated driver root; choose a directory")]
    Root,
    #[error("cannot create {path}")]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "{NVML_FILE_NAME} is not in {near}; build it with `cargo build -p divvy-sim-nvml`, or pass --library"
    )]
    NoLibrary { near: PathBuf },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Refused(#[from] SimError),
}

/// Creates a simulator in `dir` with GPUs such as `8xH100-SXM5-80GB,2xL4`.
pub fn create(dir: &Path, gpus: &str, options: &Options) -> Result<Sim, CreateError> {
    let models = parse_list(gpus)?;
    check_version(&options.driver)?;
    std::fs::create_dir_all(dir).map_err(|source| io_error(dir, source))?;
    let root = dir.canonicalize().map_err(|source| io_error(dir, source))?;
    if root == Path::new("/") {
        return Err(CreateError::Root);
    }
    if root.join(STATE_DIR).join("state.json").exists() {
        return Err(CreateError::Exists { dir: root });
    }
    let cuda = options.library.with_file_name(CUDA_FILE_NAME);
    install(&root, &options.library, &cuda, &options.driver)?;
    let bin = root.join("usr/bin");
    std::fs::create_dir_all(&bin).map_err(|source| io_error(&bin, source))?;
    for program in PROGRAMS {
        link_or_copy(&options.multicall, &bin.join(program))?;
    }
    let mut state = State {
        format: FORMAT,
        generation: 1,
        boot: 1,
        driver: options.driver.clone(),
        cuda: options.cuda,
        host: options.host.clone(),
        modules: Modules::at_boot(options.host.bare),
        gpus: boards(&models, options),
        events: Events::default(),
        control: Control::default(),
        kernel_log: KernelLog::default(),
        module_loads: 0,
        unmounted: false,
        migrates: false,
    };
    state.assign_minors();
    if state.modules.nvidia {
        state.start_nodes();
        state.log_module_load();
    }
    Ok(Sim::create(root, state)?)
}

/// Installs another version of the GPU driver, as an upgrade does: replaces its files and reloads
/// its modules. Only the boards keep their state.
pub fn replace_driver(sim: &Sim, version: &str) -> Result<(), CreateError> {
    check_version(version)?;
    let old = sim.read()?.driver.clone();
    mount(sim)?;
    install_upgrade(sim, &old, version)?;
    sim.update(|state| {
        (state.driver, state.unmounted) = (version.to_owned(), false);
        state.reboot();
        Ok(())
    })?;
    remove_libraries(sim, &old, version)
}

/// Unloads the GPU driver as the GPU operator does before an upgrade: removes its modules, and
/// unmounts its libraries and programs. Instances and settings are lost. Fails while a process has
/// NVML or CUDA initialised.
pub fn unload_driver(sim: &Sim) -> Result<(), CreateError> {
    let in_use =
        |code: Code| if code == Code::InUse { CreateError::InUse } else { SimError::from(code).into() };
    let _unused = sim.lock_unused_module().map_err(in_use)?;
    sim.update(State::unload_driver).map_err(|error| match error {
        SimError::Refused(code) => in_use(code),
        other => other.into(),
    })?;
    let (from, to) = (sim.root().join(MOUNTED), unmounted(sim));
    match std::fs::rename(&from, &to) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(io_error(&from, source)),
        _ => Ok(()),
    }
}

/// Loads a version of the GPU driver after [`unload_driver`], as the driver container does.
pub fn load_driver(sim: &Sim, version: &str) -> Result<(), CreateError> {
    check_version(version)?;
    let state = sim.read()?;
    if state.modules.nvidia {
        return Err(CreateError::Loaded { version: state.driver.clone() });
    }
    mount(sim)?;
    install_upgrade(sim, &state.driver, version)?;
    sim.update(|state| {
        state.load_driver(version);
        Ok(())
    })?;
    remove_libraries(sim, &state.driver, version)
}

/// Where the driver's files are while they are unmounted.
fn unmounted(sim: &Sim) -> PathBuf {
    sim.dir().join("unmounted-usr")
}

/// Mounts the driver's files if they are unmounted.
fn mount(sim: &Sim) -> Result<(), CreateError> {
    let (from, to) = (unmounted(sim), sim.root().join(MOUNTED));
    if !from.exists() {
        return Ok(());
    }
    std::fs::rename(&from, &to).map_err(|source| io_error(&to, source))
}

/// Installs the simulated libraries again under another version.
fn install_upgrade(sim: &Sim, old: &str, version: &str) -> Result<(), CreateError> {
    let present = |name: &str| sim.library(&format!("{name}.so.{old}"));
    install(sim.root(), &present("libnvidia-ml"), &present("libcuda"), version)
}

/// Removes the libraries of the old version after an upgrade.
fn remove_libraries(sim: &Sim, old: &str, version: &str) -> Result<(), CreateError> {
    if old != version {
        for name in EMPTY_LIBRARIES.iter().map(|(name, _)| *name).chain(["libnvidia-ml"]) {
            let path = sim.library(&format!("{name}.so.{old}"));
            std::fs::remove_file(&path).map_err(|source| io_error(&path, source))?;
        }
    }
    Ok(())
}

/// Finds the simulated libnvidia-ml where cargo builds it: beside this program or in `deps`.
pub fn library() -> Result<PathBuf, CreateError> {
    let program = std::env::current_exe().map_err(|source| io_error(Path::new("/proc/self/exe"), source))?;
    let near = program.parent().unwrap_or(Path::new("/")).to_owned();
    [
        near.join(NVML_FILE_NAME),
        near.join("deps").join(NVML_FILE_NAME),
        near.join("..").join("deps").join(NVML_FILE_NAME),
    ]
    .into_iter()
    .find(|path| path.exists())
    .ok_or(CreateError::NoLibrary { near })
}

fn check_version(version: &str) -> Result<(), CreateError> {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let good = version.split('.').count() >= 2 && version.split('.').all(number);
    if good { Ok(()) } else { Err(CreateError::Version { version: version.to_owned() }) }
}

/// The boards of the node, in PCI order, as in the driver.
fn boards(models: &[Model], options: &Options) -> Vec<Gpu> {
    let board = |(position, model): (usize, &Model)| {
        let numa = match options.numa_nodes {
            0 => None,
            nodes => u32::try_from(position * nodes as usize / models.len()).ok(),
        };
        board::board(*model, position, board::device_id(options.seed, position as u64), numa)
    };
    let mut boards: Vec<Gpu> = models.iter().enumerate().map(board).collect();
    boards.sort_by(|one, other| one.bdf.cmp(&other.bdf));
    boards
}

/// Installs the libraries of a version and points the links at them. Without a simulated libcuda it
/// installs an empty one, which is enough for tests that only mount it.
fn install(root: &Path, library: &Path, cuda: &Path, version: &str) -> Result<(), CreateError> {
    let lib = root.join(LIB_DIR);
    std::fs::create_dir_all(&lib).map_err(|source| io_error(&lib, source))?;
    for (name, number) in EMPTY_LIBRARIES {
        let file = format!("{name}.so.{version}");
        let soname = number.map_or(file.clone(), |number| format!("{name}.so.{number}"));
        let path = lib.join(&file);
        if *name == "libcuda" && cuda.exists() {
            copy(cuda, &path)?;
        } else {
            std::fs::write(&path, shared_object(&soname)).map_err(|source| io_error(&path, source))?;
        }
        if number.is_some() {
            link(&file, &lib.join(&soname))?;
        }
    }
    link("libcuda.so.1", &lib.join("libcuda.so"))?;
    let file = format!("libnvidia-ml.so.{version}");
    copy(library, &lib.join(&file))?;
    link(&file, &lib.join("libnvidia-ml.so.1"))
}

/// Copies a library. Each root needs its own inode: the loader treats files with one inode as one
/// library, so with hard links a process could load the library of only one simulator.
fn copy(from: &Path, to: &Path) -> Result<(), CreateError> {
    let new = to.with_extension("new");
    std::fs::copy(from, &new).and_then(|_| std::fs::rename(&new, to)).map_err(|source| io_error(to, source))
}

/// Makes a hard link if the file system allows it, else a copy. Both can be mounted into a
/// container; a symlink cannot.
fn link_or_copy(from: &Path, to: &Path) -> Result<(), CreateError> {
    let from = from.canonicalize().map_err(|source| io_error(from, source))?;
    if from == *to {
        return Ok(());
    }
    drop(std::fs::remove_file(to));
    std::fs::hard_link(&from, to)
        .or_else(|_| std::fs::copy(&from, to).map(drop))
        .map_err(|source| io_error(to, source))
}

/// Replaces a symlink atomically.
fn link(target: &str, path: &Path) -> Result<(), CreateError> {
    let new = path.with_extension("new");
    drop(std::fs::remove_file(&new));
    symlink(target, &new).and_then(|()| std::fs::rename(&new, path)).map_err(|source| io_error(path, source))
}

fn io_error(path: &Path, source: io::Error) -> CreateError {
    CreateError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(list: &str, expected: Result<&[&str], &str>) {
        let got = parse_list(list).map_err(|error| error.to_string());
        match expected {
            Ok(keys) => assert_eq!(
                got.map(|models| models.iter().map(|model| model.row().key.clone()).collect::<Vec<_>>()),
                Ok(keys.iter().map(|&key| key.to_owned()).collect())
            ),
            Err(part) => assert!(got.as_ref().is_err_and(|error| error.contains(part)), "{list}: {got:?}"),
        }
    }

    #[test]
    fn gpu_list_has_counts_and_names() {
        check("2xL4,H200", Ok(&["L4", "L4", "H200-SXM-141GB"]));
        check("L40S", Ok(&["L40S"]));
        check("RTX-PRO-6000", Ok(&["RTX-PRO-6000"]));
        check("", Err("GPU list"));
        check("0xL4", Err("GPU list"));
        check("2x", Err("GPU list"));
        check("33xL4", Err("too many"));
        check("99999999999999999999xL4", Err("GPU list"));
        check("H100", Err("no GPU model"));
        check("nonsense", Err("known models: T4"));
    }
}
