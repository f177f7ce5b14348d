//! The stand-in for `nvidia-modprobe`: loads modules and creates device nodes.
//!
//! It has the options that drivers and container tools use: `-c MINOR` for a GPU's node, `-u` for
//! unified memory, `-m` for mode setting, `-f FILE` for the node of a capability file. Without
//! options it loads the driver. With [`LATE_NODES`] it only creates nodes that are on their way.

use crate::sim::{Sim, SimError};
use crate::state::Gpu;
use crate::tree;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// First minor that is not a GPU's but one of the driver's own nodes.
const MODESET: u32 = 254;

/// Creates the device nodes of GPUs that the driver has loaded, each when it is due.
pub(crate) const LATE_NODES: &str = "--late-nodes";

/// How often the program checks whether the node that it waits for exists.
const NODE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The parsed arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    late_nodes: bool,
    uvm: bool,
    modeset: bool,
    minors: Vec<u32>,
    capabilities: Vec<PathBuf>,
}

/// The reason why a module was not loaded or a node not created.
#[derive(Debug, thiserror::Error)]
enum ModprobeError {
    #[error("unrecognized option {0:?}")]
    Option(String),
    #[error("option {0} needs a number")]
    Number(String),
    #[error("no GPU with minor {0}")]
    NoGpu(u32),
    #[error("{0} is not a capability file")]
    NotCapability(PathBuf),
    #[error(transparent)]
    State(#[from] SimError),
    #[error(transparent)]
    Render(#[from] tree::RenderError),
}

/// Main of `nvidia-modprobe`. The simulator is the one whose driver root contains the program.
pub(crate) fn main() -> ExitCode {
    let args = std::env::args().skip(1).collect::<Vec<_>>();
    match parse(&args).and_then(|wanted| run(&wanted)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvidia-modprobe: ERROR: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(args: &[String]) -> Result<Wanted, ModprobeError> {
    let mut wanted = Wanted::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        // `-c 0`, `-c=0`, `-c0`, `--create-nvidia-device-node=0`.
        let (name, value) = match arg.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None if arg.len() > 2 && !arg.starts_with("--") => (&arg[..2], Some(arg[2..].to_owned())),
            None => (arg.as_str(), None),
        };
        let mut value = || value.clone().or_else(|| args.next().cloned()).unwrap_or_default();
        match name {
            "-c" | "--create-nvidia-device-node" => {
                wanted.minors.push(value().parse().map_err(|_| ModprobeError::Number(arg.clone()))?);
            }
            LATE_NODES => wanted.late_nodes = true,
            "-u" | "--unified-memory" => wanted.uvm = true,
            "-m" | "--modeset" => wanted.modeset = true,
            "-f" | "--create-nvidia-cap-device-node" => wanted.capabilities.push(value().into()),
            // The simulator has no nodes for NVSwitches and NVLinks.
            "-s" | "--nvswitch" | "-l" | "--nvlink" => {}
            _ => return Err(ModprobeError::Option(arg.clone())),
        }
    }
    Ok(wanted)
}

fn run(wanted: &Wanted) -> Result<(), ModprobeError> {
    let program = std::env::current_exe().unwrap_or_default();
    let sim = Sim::from_library_path(&program).map_err(SimError::from)?;
    if wanted.late_nodes {
        return Ok(sim.create_late_nodes()?);
    }
    // The real program is set-uid root, so that any user may run it.
    for minor in &wanted.minors {
        let known = |gpu: &Gpu| !gpu.missing && gpu.minor == *minor;
        if *minor < MODESET && !wanted.uvm && !sim.read()?.gpus.iter().any(known) {
            return Err(ModprobeError::NoGpu(*minor));
        }
    }
    let slow = sim.read()?.host.node_delay_ms > 0;
    let loads = sim.update(|state| {
        let loads = state.load_module();
        state.modules.uvm |= wanted.uvm;
        state.modules.modeset |= wanted.modeset;
        if loads && slow {
            state.start_nodes();
        }
        Ok(loads)
    })?;
    if loads && slow {
        sim.start_node_helper()?;
    }
    // On a slow host this program waits for its turn, as the real one does.
    let on_its_way = |gpu: &Gpu| gpu.node_due_ms.is_some() && wanted.minors.contains(&gpu.minor);
    while sim.read()?.gpus.iter().any(on_its_way) {
        std::thread::sleep(NODE_POLL_INTERVAL);
    }
    sim.update(|state| {
        for gpu in &mut state.gpus {
            gpu.node |= wanted.minors.contains(&gpu.minor);
        }
        Ok(())
    })?;
    let state = sim.read()?;
    let ensure = |node: &str| tree::ensure_node(sim.root(), &state, &format!("dev/{node}"));
    ensure("nvidiactl")?;
    if wanted.uvm {
        ensure("nvidia-uvm")?;
        ensure("nvidia-uvm-tools")?;
    }
    for minor in wanted.minors.iter().filter(|minor| **minor < MODESET) {
        ensure(&format!("nvidia{minor}"))?;
    }
    if wanted.modeset || wanted.minors.contains(&MODESET) {
        ensure("nvidia-modeset")?;
    }
    for file in &wanted.capabilities {
        let minor = capability(sim.root(), file);
        let made = match minor {
            Some(minor) => ensure(&format!("nvidia-caps/nvidia-cap{minor}"))?,
            None => false,
        };
        if !made {
            return Err(ModprobeError::NotCapability(file.clone()));
        }
    }
    Ok(())
}

/// The minor in a capability file. The path may be as in the driver's `/proc` or include the root.
fn capability(root: &Path, file: &Path) -> Option<u32> {
    let below = root.join(file.strip_prefix("/").unwrap_or(file));
    let text = std::fs::read_to_string(below).or_else(|_| std::fs::read_to_string(file)).ok()?;
    text.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(args: &str, expected: Option<Wanted>) {
        let args: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
        assert_eq!(parse(&args).ok(), expected, "{args:?}");
    }

    #[test]
    fn options_are_parsed_in_every_spelling() {
        let minor = |minor| Some(Wanted { minors: vec![minor], ..Wanted::default() });
        check("", Some(Wanted::default()));
        check("-c 3", minor(3));
        check("-c3", minor(3));
        check("-c=3", minor(3));
        check("--create-nvidia-device-node=3", minor(3));
        check("-u -c 0", Some(Wanted { uvm: true, minors: vec![0], ..Wanted::default() }));
        check("-f /a/b", Some(Wanted { capabilities: vec!["/a/b".into()], ..Wanted::default() }));
        check("-c", None);
        check("-x", None);
    }
}
