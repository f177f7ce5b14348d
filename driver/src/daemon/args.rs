//! The daemon's command line. Every flag can also be set by an environment variable.

use crate::cdi::HookMode;
use crate::kubelet::registration::PodUid;
use crate::paths::HostPaths;
use crate::shares::agent::{KillPolicy, TimeLaw};
use clap::{Args as ClapArgs, Parser};
use divvy_daemon::args::{Listen, LogArgs, absolute, listen, object_name, time};
use divvy_slices::KubernetesVersion;
use std::path::PathBuf;
use std::time::Duration;

/// Prepares NVIDIA GPUs for the pods of one node.
///
/// Registers with the kubelet as the DRA driver gpu.divvy.dev, publishes the node's GPUs as
/// ResourceSlices, and creates MIG instances and CDI files for claims. Run it as root, once per node.
/// All state is in files, so it can be killed and replaced at any time. On SIGUSR1 it releases the
/// GPU driver, so that the driver can be replaced; on SIGUSR2 it uses the driver again.
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
    pub timeouts: TimeoutArgs,
    #[command(flatten)]
    pub observation: ObservationArgs,
}

/// The cluster and the node.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Name of this Node; also the name of its pool of ResourceSlices
    #[arg(long, env = "DIVVY_NODE_NAME", value_name = "NAME", value_parser = object_name)]
    pub node_name: String,
    /// Kubeconfig file [default: the pod's ServiceAccount]
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// UID of this pod. With it, the daemon uses its own sockets, so that two instances can overlap in
    /// a rolling update
    #[arg(long, env = "DIVVY_POD_UID", value_name = "UID", value_parser = pod_uid)]
    pub pod_uid: Option<PodUid>,
    /// Remove Divvy from this node before an uninstall: serve until the last claim is released, then
    /// remove all state of Divvy. /readyz reports ready when that is done
    #[arg(long, env = "DIVVY_DECOMMISSION")]
    pub decommission: bool,
    /// Kubernetes version of the scheduler. A scheduler with known bugs gets no devices with counters
    /// [default: the version of the API server]
    #[arg(long, env = "DIVVY_SCHEDULER_VERSION", value_name = "VERSION")]
    pub scheduler_version: Option<KubernetesVersion>,
    /// Issue number of a known scheduler bug that the vendor has fixed in an affected version: 139034
    /// or 138882
    #[arg(
        long, env = "DIVVY_IGNORE_SCHEDULER_BUG", value_name = "ISSUE", value_delimiter = ',',
        value_parser = scheduler_bug
    )]
    pub ignore_scheduler_bug: Vec<u32>,
}

/// Paths on the host.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Host paths")]
pub struct HostArgs {
    /// The kubelet's --root-dir
    #[arg(
        long, env = "DIVVY_KUBELET_ROOT", value_name = "DIR", value_parser = absolute,
        default_value = "/var/lib/kubelet"
    )]
    pub kubelet_root: PathBuf,
    /// Directory from which the container runtime reads CDI files
    #[arg(
        long, env = "DIVVY_CDI_DIR", value_name = "DIR", value_parser = absolute,
        default_value = "/var/run/cdi"
    )]
    pub cdi_dir: PathBuf,
    /// Root of the GPU driver's libraries and programs: / or /run/nvidia/driver
    #[arg(long, env = "DIVVY_DRIVER_ROOT", value_name = "DIR", default_value = "/", value_parser = absolute)]
    pub driver_root: PathBuf,
    /// Directory that contains dev/ with the GPU driver's device nodes [default: --driver-root if it
    /// has them, else /]
    #[arg(long, env = "DIVVY_DEV_ROOT", value_name = "DIR", value_parser = absolute)]
    pub dev_root: Option<PathBuf>,
    /// Path of the host's root in this process. In a pod: the directory at which the host's root, or
    /// the driver root and the dev root, are mounted
    #[arg(long, env = "DIVVY_HOST_PREFIX", value_name = "DIR", default_value = "/", value_parser = absolute)]
    pub host_prefix: PathBuf,
    /// The host's /proc in this process, for files of the GPU driver
    #[arg(
        long, env = "DIVVY_PROC_ROOT", value_name = "DIR", value_parser = absolute,
        default_value = "/proc"
    )]
    pub proc_root: PathBuf,
    /// The host's /proc in this process, for processes. Differs from --proc-root only with a
    /// simulated GPU driver
    #[arg(
        long, env = "DIVVY_PROCESS_ROOT", value_name = "DIR", value_parser = absolute,
        default_value = "/proc"
    )]
    pub process_root: PathBuf,
    /// The host's /sys in this process
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/sys", value_parser = absolute)]
    pub sys_root: PathBuf,
    /// Directory for records, GPU numbers and locks. Must be on disk [default: state/ in the plugin
    /// directory]
    #[arg(long, env = "DIVVY_STATE_DIR", value_name = "DIR", value_parser = absolute)]
    pub state_dir: Option<PathBuf>,
    /// Directory for MPS sockets and shared memory, and for pages of shares. Must be in memory
    #[arg(
        long, env = "DIVVY_RUN_DIR", value_name = "DIR", value_parser = absolute,
        default_value = "/run/divvy"
    )]
    pub run_dir: PathBuf,
    /// OCI hook that makes the GPU driver's libraries findable in containers, or "none" [default:
    /// divvy-hook next to this program]
    #[arg(long, env = "DIVVY_HOOK", value_name = "FILE|none")]
    pub hook: Option<PathBuf>,
    /// Directory of the libraries that enforce the limits of shares. Without them, no shares are
    /// offered [default: ../lib/divvy relative to this program]
    #[arg(long, env = "DIVVY_LIBRARY_DIR", value_name = "DIR", value_parser = absolute)]
    pub library_dir: Option<PathBuf>,
    /// Configuration files of container runtimes, checked at start to warn if CDI is off
    #[arg(
        long, env = "DIVVY_RUNTIME_CONFIG", value_name = "FILE",
        default_values = crate::cdi::runtime::CONFIGS
    )]
    pub runtime_config: Vec<PathBuf>,
}

/// Use of the GPUs.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "GPUs")]
pub struct GpuArgs {
    /// How long MIG mode stays on after the last instance of a GPU is destroyed
    #[arg(long, env = "DIVVY_MIG_HOLD_OFF", value_name = "TIME", default_value = "30s", value_parser = time)]
    pub mig_hold_off: Duration,
    /// How long a GPU may be missing before its number and its devices are forgotten. A GPU that a
    /// claim or a rule of the node configuration names is kept
    #[arg(
        long, env = "DIVVY_FORGET_GPU_AFTER", value_name = "TIME", default_value = "1h",
        value_parser = hours
    )]
    pub forget_gpu_after: Duration,
    /// Node configuration file, which sets the modes of each GPU. Changes apply without a restart;
    /// "divvy config explain" shows the result [default: every GPU offers every mode]
    #[arg(long, env = "DIVVY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Offer shares of GPUs and MIG instances. With "false", each device goes to one claim at a time,
    /// and existing shares stay. The node configuration overrides this
    #[arg(
        long, env = "DIVVY_SHARES", value_name = "true|false", action = clap::ArgAction::Set,
        default_value_t = true, default_missing_value = "true", num_args = 0..=1, require_equals = true
    )]
    pub shares: bool,
    /// Findings for which processes of a share are killed: "none" or a comma-separated list of the
    /// following. All findings are reported. unregistered: uses the GPU without the library that
    /// enforces the limit. over-memory-limit: uses too much memory. over-compute-limit: uses too much
    /// compute time. pages-masked: another file is mounted over its pages. pages-missing: its pages
    /// are not mounted. under-reported: reports less memory than it uses
    #[arg(
        long, env = "DIVVY_KILL_PROCESSES", value_name = "LIST",
        default_value_t = KillPolicy::default()
    )]
    pub kill_processes: KillPolicy,
    /// How the time of a GPU or instance is divided between its shares. rates: every share launches at
    /// a rate that the daemon corrects. quanta: one share at a time launches
    #[arg(long, env = "DIVVY_GPU_TIME_LAW", value_enum, default_value_t)]
    pub gpu_time_law: TimeLaw,
    /// Treat all MIG instances on this node as owned by Divvy, and destroy those without a claim.
    /// exclusiveOwnership in the node configuration overrides this
    #[arg(long, env = "DIVVY_EXCLUSIVE_OWNERSHIP")]
    pub exclusive_ownership: bool,
}

/// Timeouts.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Timeouts")]
pub struct TimeoutArgs {
    /// Time limit for an answer to the kubelet, which waits 45s
    #[arg(
        long, env = "DIVVY_ANSWER_TIMEOUT", value_name = "TIME", value_parser = time,
        default_value = "40s"
    )]
    pub answer_timeout: Duration,
    /// Time limit for reading a claim from the API server
    #[arg(long, env = "DIVVY_READ_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = time)]
    pub read_timeout: Duration,
    /// Time limit for an NVML query
    #[arg(
        long, env = "DIVVY_NVML_QUERY_TIMEOUT", value_name = "TIME", value_parser = time,
        default_value = "10s"
    )]
    pub nvml_query_timeout: Duration,
    /// Time limit for enabling or disabling MIG mode
    #[arg(
        long, env = "DIVVY_NVML_MODE_TIMEOUT", value_name = "TIME", value_parser = time,
        default_value = "20s"
    )]
    pub nvml_mode_timeout: Duration,
    /// Time limit for creating a MIG instance
    #[arg(
        long, env = "DIVVY_NVML_CREATE_TIMEOUT", value_name = "TIME", value_parser = time,
        default_value = "20s"
    )]
    pub nvml_create_timeout: Duration,
    /// Time limit for destroying a MIG instance
    #[arg(
        long, env = "DIVVY_NVML_DESTROY_TIMEOUT", value_name = "TIME", value_parser = time,
        default_value = "20s"
    )]
    pub nvml_destroy_timeout: Duration,
}

/// Metrics, health checks and logs.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Observation")]
pub struct ObservationArgs {
    /// Address of /metrics, /livez and /readyz, or "off"
    #[arg(
        long, env = "DIVVY_HTTP_ADDRESS", value_name = "ADDRESS|off", value_parser = listen,
        default_value = "0.0.0.0:9843"
    )]
    pub http_address: Listen,
    #[command(flatten)]
    pub log: LogArgs,
}

impl HostArgs {
    /// All paths, with the defaults that depend on other paths.
    pub fn paths(&self) -> HostPaths {
        let mut paths = HostPaths {
            kubelet_root: self.kubelet_root.clone(),
            cdi_dir: self.cdi_dir.clone(),
            driver_root: self.driver_root.clone(),
            dev_root: PathBuf::from("/"),
            // Canonical, because the kernel's names of open files are compared with it.
            host_prefix: self.host_prefix.canonicalize().unwrap_or_else(|_| self.host_prefix.clone()),
            proc_root: self.proc_root.clone(),
            process_root: self.process_root.clone(),
            sys_root: self.sys_root.clone(),
            state_dir: PathBuf::new(),
            run_dir: self.run_dir.clone(),
        };
        let own_nodes = paths.local_path(&paths.driver_root.join("dev/nvidiactl")).exists();
        paths.dev_root = match &self.dev_root {
            Some(dir) => dir.clone(),
            None if own_nodes => paths.driver_root.clone(),
            None => paths.dev_root,
        };
        paths.state_dir = self.state_dir.clone().unwrap_or_else(|| paths.plugin_dir().join("state"));
        paths
    }

    /// Directory of the libraries for shares.
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

    /// The hook for containers.
    pub fn hook(&self) -> std::io::Result<HookMode> {
        match &self.hook {
            None => HookMode::beside_executable(),
            Some(none) if none.as_os_str() == "none" => Ok(HookMode::None),
            Some(file) => Ok(HookMode::Own(file.clone())),
        }
    }
}

/// Parses a time that may be longer than [`time`] allows: hours, or a shorter time.
fn hours(text: &str) -> Result<Duration, String> {
    /// A year. More would be a typing error.
    const MAX_HOURS: u64 = 8_760;
    let Some(count) = text.strip_suffix('h') else { return time(text) };
    match count.parse() {
        Ok(count @ 0..=MAX_HOURS) => Ok(Duration::from_secs(count * 3_600)),
        _ => Err(format!("must be a time of at most {MAX_HOURS}h, such as 30m, 1h or 48h")),
    }
}

fn pod_uid(text: &str) -> Result<PodUid, String> {
    text.parse().map_err(|err: crate::kubelet::registration::PodUidError| err.to_string())
}

fn scheduler_bug(text: &str) -> Result<u32, String> {
    let issue = text.parse().ok().filter(|issue| divvy_slices::is_known_bug(*issue));
    issue.ok_or_else(|| "it is not 139034 or 138882".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_valid() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn only_the_node_name_is_required() {
        let args = Args::try_parse_from(["divvy-node", "--node-name", "n1", "--kubelet-root", "/k"]).unwrap();
        assert_eq!(args.host.paths().state_dir, PathBuf::from("/k/plugins/gpu.divvy.dev/state"));
        assert_eq!(args.timeouts.answer_timeout, Duration::from_secs(40));
        assert_eq!(args.gpus.forget_gpu_after, Duration::from_secs(3_600));
    }

    #[test]
    fn shares_are_on_by_default() {
        let shares = |args: &[&str]| {
            let args = ["divvy-node", "--node-name", "n1"].iter().chain(args);
            Args::try_parse_from(args).unwrap().gpus.shares
        };
        assert!(shares(&[]) && shares(&["--shares"]) && shares(&["--shares=true"]));
        assert!(!shares(&["--shares=false"]));
    }

    #[test]
    fn scheduler_flags_name_versions_and_known_bugs() {
        let cluster = |args: &[&str]| {
            let args = ["divvy-node", "--node-name", "n1"].iter().chain(args);
            Args::try_parse_from(args).map(|args| args.cluster)
        };
        let some = cluster(&["--scheduler-version=v1.36.1", "--ignore-scheduler-bug=139034,138882"]).unwrap();
        assert_eq!(some.scheduler_version, "1.36.1".parse().ok());
        assert_eq!(some.ignore_scheduler_bug, [139_034, 138_882]);
        assert!(cluster(&["--scheduler-version=new"]).is_err());
        assert!(cluster(&["--ignore-scheduler-bug=1"]).is_err());
    }

    #[test]
    fn long_times_may_have_hours() {
        assert_eq!(hours("48h"), Ok(Duration::from_secs(172_800)));
        assert_eq!(hours("0s"), Ok(Duration::ZERO));
        for text in ["h", "-1h", "8761h", "1.5h", "99999999999999999999h", "1d"] {
            assert!(hours(text).is_err(), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_pod_uid_causes_a_panic(text in "\\PC{0,12}") {
            let _ = pod_uid(&text);
        }
    }
}
