//! Device nodes of a claim, with numbers from the kernel's tables below the proc root: majors from
//! `devices`, minors of MIG capabilities from the instance's `access` file.
//!
//! Nodes on the host are checked only for existence. If one is missing, the GPU driver's
//! `nvidia-modprobe` loads the kernel module or creates the node.

use super::document::DeviceNode;
use crate::paths::HostPaths;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Time for `nvidia-modprobe` to load a module.
const MODPROBE_DEADLINE: Duration = Duration::from_secs(10);
const CONTROL_MINOR: u32 = 255;
const MODESET_MINOR: u32 = 254;

/// The hardware of a device. `minor` is the GPU's minor number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceNodes {
    /// A whole GPU.
    Gpu { minor: u32 },
    /// A compute instance and the GPU instance that contains it.
    Mig { minor: u32, gpu_instance: u32, compute_instance: u32 },
    /// adminAccess to a GPU: the GPU and its live instances, as (GPU instance, compute instances).
    Admin { minor: u32, instances: Vec<(u32, Vec<u32>)> },
}

/// Why the device nodes of a claim cannot be determined.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    #[error("{path} cannot be read; is the NVIDIA kernel module loaded?")]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{path} has no field {field}")]
    Field { path: PathBuf, field: &'static str },
    #[error("{path} does not list {module}; load the kernel module")]
    Module { path: PathBuf, module: &'static str },
    #[error("device node {path} is missing")]
    Node { path: PathBuf },
    #[error("{missing}, and {program} could not create it: {output}")]
    Modprobe { missing: Box<NodesError>, program: PathBuf, output: String },
}

/// The nodes that every container with a GPU gets, in their current state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommonNodes {
    gpu_major: u32,
    uvm_major: u32,
    modeset: bool,
}

impl CommonNodes {
    /// Finds the nodes, and creates missing ones. Also returns the majors for the nodes of GPUs.
    pub fn find(paths: &HostPaths) -> Result<(Self, Majors), NodesError> {
        // Two kernel modules may be missing, one after the other.
        let mut attempts = Vec::new();
        loop {
            let missing = match Self::probe(paths) {
                Err((missing, args)) if !attempts.contains(&args) => (missing, args),
                done => return done.map_err(|(missing, _)| missing),
            };
            modprobe(paths, missing.0, missing.1)?;
            attempts.push(missing.1);
        }
    }

    /// The same without creating anything; `None` if a node is missing.
    pub fn find_existing(paths: &HostPaths) -> Option<(Self, Majors)> {
        Self::probe(paths).ok()
    }

    /// The nodes, or the missing node and the arguments for `nvidia-modprobe`.
    fn probe(paths: &HostPaths) -> Result<(Self, Majors), (NodesError, &'static [&'static str])> {
        const LOAD: &[&str] = &["-c", "255"];
        const LOAD_UVM: &[&str] = &["-u"];
        let majors = Majors::read(paths).map_err(|cause| (cause, LOAD))?;
        let gpu_major = majors.get(GPU_MODULES).map_err(|cause| (cause, LOAD))?;
        present(paths, "/dev/nvidiactl").map_err(|cause| (cause, LOAD))?;
        let uvm_major = majors.get(&["nvidia-uvm"]).map_err(|cause| (cause, LOAD_UVM))?;
        for node in ["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"] {
            present(paths, node).map_err(|cause| (cause, LOAD_UVM))?;
        }
        let modeset = present(paths, "/dev/nvidia-modeset").is_ok();
        Ok((Self { gpu_major, uvm_major, modeset }, majors))
    }

    /// The nodes for a CDI file.
    pub fn nodes(&self) -> Vec<DeviceNode> {
        let mut nodes = vec![
            DeviceNode::new("/dev/nvidiactl", self.gpu_major, CONTROL_MINOR),
            DeviceNode::new("/dev/nvidia-uvm", self.uvm_major, 0),
            DeviceNode::new("/dev/nvidia-uvm-tools", self.uvm_major, 1),
        ];
        if self.modeset {
            nodes.push(DeviceNode::new("/dev/nvidia-modeset", self.gpu_major, MODESET_MINOR));
        }
        nodes
    }
}

impl DeviceNodes {
    /// The nodes for a CDI file; a missing node of the GPU is created.
    pub fn nodes(&self, paths: &HostPaths, majors: &Majors) -> Result<Vec<DeviceNode>, NodesError> {
        match self.existing(paths, majors) {
            Err(missing @ NodesError::Node { .. }) => {
                let (minor, _) = self.access_files();
                modprobe(paths, missing, &["-c", &minor.to_string()])?;
                self.existing(paths, majors)
            }
            nodes => nodes,
        }
    }

    /// The same without creating anything.
    pub fn existing(&self, paths: &HostPaths, majors: &Majors) -> Result<Vec<DeviceNode>, NodesError> {
        let (minor, access) = self.access_files();
        let path = format!("/dev/nvidia{minor}");
        present(paths, &path)?;
        let mut nodes = vec![DeviceNode::new(path, majors.get(GPU_MODULES)?, minor)];
        for file in access {
            let major = majors.get(&["nvidia-caps"])?;
            nodes.push(capability(&paths.proc_root, &file, major)?);
        }
        Ok(nodes)
    }

    /// The GPU's minor number, and the capability files of the instances, relative to the proc root.
    fn access_files(&self) -> (u32, Vec<String>) {
        let instances = |minor: u32, instances: &[(u32, Vec<u32>)]| {
            let mut files = Vec::new();
            for (gpu_instance, compute_instances) in instances {
                let dir = format!("driver/nvidia/capabilities/gpu{minor}/mig/gi{gpu_instance}");
                files.push(format!("{dir}/access"));
                files.extend(compute_instances.iter().map(|ci| format!("{dir}/ci{ci}/access")));
            }
            files
        };
        match self {
            Self::Gpu { minor } => (*minor, Vec::new()),
            Self::Mig { minor, gpu_instance, compute_instance } => {
                (*minor, instances(*minor, &[(*gpu_instance, vec![*compute_instance])]))
            }
            Self::Admin { minor, instances: live } => (*minor, instances(*minor, live)),
        }
    }
}

/// Creates missing nodes of all GPUs that the kernel knows, because NVML lists only GPUs with a node.
pub fn ensure_gpus(paths: &HostPaths) -> Result<(), NodesError> {
    // Without the directory there is no GPU, or no module, which other checks report.
    let Ok(gpus) = std::fs::read_dir(paths.proc_root.join("driver/nvidia/gpus")) else { return Ok(()) };
    for gpu in gpus.flatten() {
        let path = gpu.path().join("information");
        let text = read(&path)?;
        let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:"));
        let minor = minor.and_then(|minor| minor.trim().parse::<u32>().ok());
        let minor = minor.ok_or(NodesError::Field { path, field: "Device Minor" })?;
        if let Err(missing) = present(paths, &format!("/dev/nvidia{minor}")) {
            modprobe(paths, missing, &["-c", &minor.to_string()])?;
        }
    }
    Ok(())
}

/// Names of the GPUs' major number in different driver versions.
const GPU_MODULES: &[&str] = &["nvidia", "nvidiactl", "nvidia-frontend"];

/// Majors of character devices, by name.
#[derive(Debug)]
pub struct Majors {
    path: PathBuf,
    by_name: BTreeMap<String, u32>,
}

impl Majors {
    fn read(paths: &HostPaths) -> Result<Self, NodesError> {
        let path = paths.proc_root.join("devices");
        let text = read(&path)?;
        Ok(Self { by_name: parse_majors(&text), path })
    }

    fn get(&self, names: &[&'static str]) -> Result<u32, NodesError> {
        let found = names.iter().find_map(|name| self.by_name.get(*name));
        found.copied().ok_or_else(|| NodesError::Module { path: self.path.clone(), module: names[0] })
    }
}

fn parse_majors(text: &str) -> BTreeMap<String, u32> {
    let characters = text.lines().take_while(|line| !line.starts_with("Block devices"));
    characters
        .filter_map(|line| {
            let (major, name) = line.trim().split_once(char::is_whitespace)?;
            Some((name.trim().to_owned(), major.parse().ok()?))
        })
        .collect()
}

/// The node of a capability, with minor and mode from its file.
fn capability(proc_root: &Path, file: &str, major: u32) -> Result<DeviceNode, NodesError> {
    let path = proc_root.join(file);
    let text = read(&path)?;
    let number = |field: &'static str| {
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let number = value.and_then(|value| value.trim().parse::<u32>().ok());
        number.ok_or_else(|| NodesError::Field { path: path.clone(), field })
    };
    let minor = number("DeviceFileMinor")?;
    let mode = number("DeviceFileMode")? & 0o777;
    let node = DeviceNode::new(format!("/dev/nvidia-caps/nvidia-cap{minor}"), major, minor);
    Ok(DeviceNode { file_mode: Some(mode), ..node })
}

fn read(path: &Path) -> Result<String, NodesError> {
    std::fs::read_to_string(path).map_err(|cause| NodesError::Read { path: path.to_owned(), cause })
}

fn present(paths: &HostPaths, node: &str) -> Result<(), NodesError> {
    let path = paths.dev(node);
    if paths.local_path(&path).exists() { Ok(()) } else { Err(NodesError::Node { path }) }
}

/// Runs the GPU driver's helper to create what is missing.
fn modprobe(paths: &HostPaths, missing: NodesError, args: &[&str]) -> Result<(), NodesError> {
    let program = paths.driver_root.join("usr/bin/nvidia-modprobe");
    run(&paths.local_path(&program), args, MODPROBE_DEADLINE).map_err(|output| NodesError::Modprobe {
        missing: Box::new(missing),
        program,
        output,
    })
}

/// Runs a program without the environment of this process. It is killed after the deadline.
fn run(program: &Path, args: &[&str], deadline: Duration) -> Result<(), String> {
    let child = Command::new(program)
        .args(args)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|cause| cause.to_string())?;
    let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
    // A child that is loading a kernel module may not die at once, so nothing waits for the thread
    // that waits for it.
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    match result.recv_timeout(deadline) {
        Ok(Ok(output)) if output.status.success() => Ok(()),
        Ok(Ok(output)) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let line = stderr.lines().next().unwrap_or_default();
            Err(format!("{} {line}", output.status).trim().to_owned())
        }
        Ok(Err(cause)) => Err(cause.to_string()),
        Err(_) => {
            if let Some(pid) = pid {
                // The deadline is the error to report, not a failed kill.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            Err(format!("no answer within {} s", deadline.as_secs()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DEVICES: &str = "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n\
        237 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n  7 loop\n 99 nvidia-uvm\n";

    #[test]
    fn only_majors_of_character_devices_are_read() {
        let majors = parse_majors(DEVICES);
        assert_eq!(majors.get("nvidia-uvm"), Some(&511));
        assert_eq!(majors.get("nvidia-caps"), Some(&237));
        assert_eq!(majors.get("loop"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_a_panic(text in ".*") {
            parse_majors(&text);
        }
    }

    #[test]
    fn hanging_helper_is_killed_at_the_deadline() {
        let output = run(Path::new("/bin/sleep"), &["600"], Duration::from_millis(50)).unwrap_err();
        assert!(output.contains("no answer"), "{output}");
    }

    #[test]
    fn error_output_of_the_helper_is_reported() {
        let output =
            run(Path::new("/bin/sh"), &["-c", "echo no module >&2; exit 3"], MODPROBE_DEADLINE).unwrap_err();
        assert!(output.contains("exit status: 3") && output.contains("no module"), "{output}");
        let output = run(Path::new("/nonexistent"), &[], MODPROBE_DEADLINE).unwrap_err();
        assert!(output.contains("No such file"), "{output}");
    }
}
