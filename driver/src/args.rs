//! The daemon's command line. Each flag has an environment variable, so that a
//! manifest can set either.

use crate::agent::Response;
use crate::cdi::HookMode;
use crate::paths::HostPaths;
use crate::registration::PodUid;
use clap::{Args as ClapArgs, Parser};
use divvy_daemon::args::{Listen, LogArgs, absolute, listen, object_name, time};
use std::path::PathBuf;
use std::time::Duration;

/// Prepares NVIDIA GPUs for the pods of one node.
///
/// Registers with the kubelet as the DRA driver gpu.divvy.dev, publishes the
/// node's GPUs as ResourceSlices and, claim by claim, makes MIG instances and
/// CDI files. Runs as root, one per node; all its state is in files, so it can
/// be killed and replaced at any time. SIGUSR1 makes it let go of the GPU driver,
/// so that the driver can be replaced; SIGUSR2 makes it use the driver again.
#[derive(Clone, Debug, Parser)]
#[command(name = "divvy-node", version, max_term_width = 100)]
pub struct Args {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(flatten)]
    pub host: HostArgs,
    #[command(flatten)]
    pub gpus: GpuArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub watching: WatchingArgs,
}

/// Which cluster and which node of it.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Name of the Node this daemon serves; also the name of its pool
    #[arg(long, env = "NODE_NAME", value_name = "NAME", value_parser = object_name)]
    pub node_name: String,
    /// Kubeconfig file; without it the pod's ServiceAccount is used
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// UID of this pod; gives this instance sockets of its own, so that two can
    /// overlap in a rolling update
    #[arg(long, env = "POD_UID", value_name = "UID", value_parser = pod_uid)]
    pub pod_uid: Option<PodUid>,
    /// Leave this node for good, before an uninstall: serve until the last claim is released, then
    /// remove everything Divvy has on it; ready when that is done
    #[arg(long, env = "LEAVE")]
    pub leave: bool,
}

/// Where things are on the host.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Host paths")]
pub struct HostArgs {
    /// The kubelet's --root-dir
    #[arg(long, env = "KUBELET_ROOT", value_name = "DIR", default_value = "/var/lib/kubelet", value_parser = absolute)]
    pub kubelet_root: PathBuf,
    /// Where the container runtime looks for CDI files
    #[arg(long, env = "CDI_DIR", value_name = "DIR", default_value = "/var/run/cdi", value_parser = absolute)]
    pub cdi_dir: PathBuf,
    /// Root of the GPU driver's libraries and programs, / or /run/nvidia/driver
    #[arg(long, env = "DRIVER_ROOT", value_name = "DIR", default_value = "/", value_parser = absolute)]
    pub driver_root: PathBuf,
    /// Directory with dev/ in it, the GPU driver's device nodes below [default: --driver-root if
    /// that has device nodes of the GPU driver, else /]
    #[arg(long, env = "DEV_ROOT", value_name = "DIR", value_parser = absolute)]
    pub dev_root: Option<PathBuf>,
    /// Where this process sees the host's root: in a pod the directory at which it, or the driver
    /// root and the device nodes of it, are mounted
    #[arg(long, env = "HOST_PREFIX", value_name = "DIR", default_value = "/", value_parser = absolute)]
    pub host_prefix: PathBuf,
    /// The host's /proc as this process sees it: what the GPU driver tells there
    #[arg(long, env = "PROC_ROOT", value_name = "DIR", default_value = "/proc", value_parser = absolute)]
    pub proc_root: PathBuf,
    /// The same, for the host's processes, where a simulated GPU driver has a /proc of its own
    #[arg(long, env = "PROCESS_ROOT", value_name = "DIR", default_value = "/proc", value_parser = absolute)]
    pub process_root: PathBuf,
    /// The host's /sys as this process sees it
    #[arg(long, env = "SYS_ROOT", value_name = "DIR", default_value = "/sys", value_parser = absolute)]
    pub sys_root: PathBuf,
    /// Records, GPU numbers and locks; must be on disk [default: state/ in the plugin directory]
    #[arg(long, env = "STATE_DIR", value_name = "DIR", value_parser = absolute)]
    pub state_dir: Option<PathBuf>,
    /// Sockets and shared memory of MPS, pages of shares; must be in memory
    #[arg(long, env = "RUN_DIR", value_name = "DIR", default_value = "/run/divvy", value_parser = absolute)]
    pub run_dir: PathBuf,
    /// The OCI hook that makes driver libraries findable in containers, or "none"
    /// [default: divvy-hook beside this program]
    #[arg(long, env = "HOOK", value_name = "FILE|none")]
    pub hook: Option<PathBuf>,
    /// Directory of the libraries that keep the limits of shares in containers; without them there
    /// are no shares [default: ../lib/divvy beside this program]
    #[arg(long, env = "LIBRARY_DIR", value_name = "DIR", value_parser = absolute)]
    pub library_dir: Option<PathBuf>,
    /// Container runtime configuration, read for the warning that CDI is off there
    #[arg(long, env = "RUNTIME_CONFIG", value_name = "FILE", default_values = crate::cri::CONFIGS)]
    pub runtime_config: Vec<PathBuf>,
}

/// How GPUs are treated.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "GPUs")]
pub struct GpuArgs {
    /// How long MIG mode stays on after a GPU's last instance
    #[arg(long, env = "MIG_HOLD_OFF", value_name = "TIME", default_value = "30s", value_parser = time)]
    pub mig_hold_off: Duration,
    /// Node configuration: which GPU offers which modes. Followed when it changes; explained
    /// by "divvy config explain" [default: every GPU offers every mode]
    #[arg(long, env = "CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Deal GPUs and MIG instances out in shares of their memory too; without, each goes to one claim
    /// at a time, and claims that have shares keep them. shares in the node configuration comes first
    #[arg(long, env = "SHARES", value_name = "true|false", default_value_t = true, default_missing_value = "true", num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set)]
    pub shares: bool,
    /// Of claims with a share of a GPU: which processes are ended, "none" or a list of hidden (uses the GPU
    /// behind the library that keeps the limit), over-limit, over-time (of the GPU), pages (has something else
    /// mounted over its pages), no-pages and understated. Everything found is reported
    #[arg(long, env = "END_PROCESSES", value_name = "LIST", default_value_t = Response::default())]
    pub end_processes: Response,
    /// All GPU instances of this node are Divvy's: those that no claim explains are destroyed.
    /// exclusiveOwnership in the node configuration comes first
    #[arg(long, env = "EXCLUSIVE_OWNERSHIP")]
    pub exclusive_ownership: bool,
}

/// How long things may take.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Deadlines")]
pub struct LimitArgs {
    /// Answer to the kubelet, which waits 45s
    #[arg(long, env = "ANSWER_WITHIN", value_name = "TIME", default_value = "40s", value_parser = time)]
    pub answer_within: Duration,
    /// Reading a claim from the API server
    #[arg(long, env = "READ_WITHIN", value_name = "TIME", default_value = "10s", value_parser = time)]
    pub read_within: Duration,
    /// An NVML query
    #[arg(long, env = "NVML_QUERY_WITHIN", value_name = "TIME", default_value = "10s", value_parser = time)]
    pub nvml_query_within: Duration,
    /// Turning MIG mode on or off
    #[arg(long, env = "NVML_MODE_WITHIN", value_name = "TIME", default_value = "20s", value_parser = time)]
    pub nvml_mode_within: Duration,
    /// Creating an instance
    #[arg(long, env = "NVML_CREATE_WITHIN", value_name = "TIME", default_value = "20s", value_parser = time)]
    pub nvml_create_within: Duration,
    /// Destroying an instance
    #[arg(long, env = "NVML_DESTROY_WITHIN", value_name = "TIME", default_value = "20s", value_parser = time)]
    pub nvml_destroy_within: Duration,
}

/// How to look at it.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Observation")]
pub struct WatchingArgs {
    /// Address of /metrics, /livez and /readyz, or "off"
    #[arg(long, env = "HTTP_ADDRESS", value_name = "ADDRESS|off", default_value = "0.0.0.0:9843", value_parser = listen)]
    pub http_address: Listen,
    #[command(flatten)]
    pub log: LogArgs,
}

impl HostArgs {
    /// The paths, with defaults that depend on other paths filled in.
    pub fn paths(&self) -> HostPaths {
        let mut paths = HostPaths {
            kubelet_root: self.kubelet_root.clone(),
            cdi_dir: self.cdi_dir.clone(),
            driver_root: self.driver_root.clone(),
            dev_root: PathBuf::from("/"),
            // What the kernel calls an open file is compared with it.
            host_prefix: self.host_prefix.canonicalize().unwrap_or_else(|_| self.host_prefix.clone()),
            proc_root: self.proc_root.clone(),
            process_root: self.process_root.clone(),
            sys_root: self.sys_root.clone(),
            state_dir: PathBuf::new(),
            run_dir: self.run_dir.clone(),
        };
        let own_nodes = paths.seen(&paths.driver_root.join("dev/nvidiactl")).exists();
        paths.dev_root = match &self.dev_root {
            Some(dir) => dir.clone(),
            None if own_nodes => paths.driver_root.clone(),
            None => paths.dev_root,
        };
        paths.state_dir = self.state_dir.clone().unwrap_or_else(|| paths.plugin_dir().join("state"));
        paths
    }

    /// Where the libraries for shares are.
    pub fn library_dir(&self) -> std::io::Result<PathBuf> {
        match &self.library_dir {
            Some(dir) => Ok(dir.clone()),
            None => {
                let beside = std::env::current_exe()?;
                let prefix = beside.parent().and_then(std::path::Path::parent);
                Ok(prefix.unwrap_or(std::path::Path::new("/usr")).join("lib/divvy"))
            }
        }
    }

    /// Which hook containers get.
    pub fn hook(&self) -> std::io::Result<HookMode> {
        match &self.hook {
            None => HookMode::beside_executable(),
            Some(none) if none.as_os_str() == "none" => Ok(HookMode::None),
            Some(file) => Ok(HookMode::Own(file.clone())),
        }
    }
}

/// As Kubernetes names nodes; it goes into URLs and selectors.
fn pod_uid(text: &str) -> Result<PodUid, String> {
    text.parse().map_err(|err: crate::registration::PodUidError| err.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn only_the_node_name_must_be_given() {
        let args = Args::try_parse_from(["divvy-node", "--node-name", "n1", "--kubelet-root", "/k"]).unwrap();
        assert_eq!(args.host.paths().state_dir, PathBuf::from("/k/plugins/gpu.divvy.dev/state"));
        assert_eq!(args.limits.answer_within, Duration::from_secs(40));
    }

    #[test]
    fn shares_are_on_until_they_are_turned_off() {
        let shares = |args: &[&str]| {
            let args = ["divvy-node", "--node-name", "n1"].iter().chain(args);
            Args::try_parse_from(args).unwrap().gpus.shares
        };
        assert!(shares(&[]) && shares(&["--shares"]) && shares(&["--shares=true"]));
        assert!(!shares(&["--shares=false"]));
    }

    proptest::proptest! {
        #[test]
        fn no_uid_makes_the_command_line_panic(text in "\\PC{0,12}") {
            let _ = pod_uid(&text);
        }
    }
}
