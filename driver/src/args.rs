//! The daemon's command line. Each flag has an environment variable, so that a
//! manifest can set either.

use crate::cdi::HookMode;
use crate::paths::HostPaths;
use crate::registration::PodUid;
use clap::{Args as ClapArgs, Parser, ValueEnum};
use std::net::SocketAddr;
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
    #[arg(long, env = "NODE_NAME", value_name = "NAME", value_parser = node_name)]
    pub node_name: String,
    /// Kubeconfig file; without it the pod's ServiceAccount is used
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// UID of this pod; gives this instance sockets of its own, so that two can
    /// overlap in a rolling update
    #[arg(long, env = "POD_UID", value_name = "UID", value_parser = pod_uid)]
    pub pod_uid: Option<PodUid>,
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
    /// The host's /proc as this process sees it
    #[arg(long, env = "PROC_ROOT", value_name = "DIR", default_value = "/proc", value_parser = absolute)]
    pub proc_root: PathBuf,
    /// The host's /sys as this process sees it
    #[arg(long, env = "SYS_ROOT", value_name = "DIR", default_value = "/sys", value_parser = absolute)]
    pub sys_root: PathBuf,
    /// Records, GPU numbers and locks; must be on disk [default: state/ in the plugin directory]
    #[arg(long, env = "STATE_DIR", value_name = "DIR", value_parser = absolute)]
    pub state_dir: Option<PathBuf>,
    /// Sockets and shared memory of MPS; must be in memory
    #[arg(long, env = "RUN_DIR", value_name = "DIR", default_value = "/run/divvy", value_parser = absolute)]
    pub run_dir: PathBuf,
    /// The OCI hook that makes driver libraries findable in containers, or "none"
    /// [default: divvy-hook beside this program]
    #[arg(long, env = "HOOK", value_name = "FILE|none")]
    pub hook: Option<PathBuf>,
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
    #[arg(long, env = "HTTP_ADDRESS", value_name = "ADDRESS|off", default_value = "0.0.0.0:9843", value_parser = http)]
    pub http_address: Http,
    /// One line per state change, as text or as JSON
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// error, warn, info, debug, trace, or per module as in "info,divvy_driver=debug"
    #[arg(long, env = "LOG_LEVEL", value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// Where metrics and probes are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http {
    Off,
    On(SocketAddr),
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
fn node_name(text: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    let edges = text.starts_with(['-', '.']) || text.ends_with(['-', '.']);
    let fits = (1..=253).contains(&text.len()) && text.bytes().all(plain) && !edges;
    if fits { Ok(text.to_owned()) } else { Err("must be the name of a Node: a-z, 0-9, - and .".to_owned()) }
}

fn pod_uid(text: &str) -> Result<PodUid, String> {
    text.parse().map_err(|err: crate::registration::PodUidError| err.to_string())
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let plain = path.is_absolute() && !path.components().any(|part| part == std::path::Component::ParentDir);
    if plain { Ok(path) } else { Err("must be an absolute path without ..".to_owned()) }
}

fn http(text: &str) -> Result<Http, String> {
    match text {
        "off" => Ok(Http::Off),
        _ => text.parse().map(Http::On).map_err(|_| "must be IP:PORT or off".to_owned()),
    }
}

/// `90s`, `1500ms`, `2m`; a deadline or hold-off of more than an hour is a slip.
fn time(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, unit) = text.split_at(digits);
    let milliseconds = match unit {
        "ms" => Some(1),
        "s" => Some(1_000),
        "m" => Some(60_000),
        _ => None,
    };
    let count: Option<u64> = count.parse().ok();
    match milliseconds.zip(count).and_then(|(unit, count)| count.checked_mul(unit)) {
        Some(total @ 0..=3_600_000) => Ok(Duration::from_millis(total)),
        _ => Err("must be a time of at most 60m, such as 1500ms, 30s or 2m".to_owned()),
    }
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

    fn check_time(text: &str, milliseconds: Option<u64>) {
        assert_eq!(time(text).ok(), milliseconds.map(Duration::from_millis), "{text}");
    }

    #[test]
    fn times_have_a_unit_and_a_bound() {
        check_time("1500ms", Some(1500));
        check_time("30s", Some(30_000));
        check_time("2m", Some(120_000));
        for bad in ["", "s", "30", "30 s", "-1s", "61m", "99999999999999999999m", "1h", "s1"] {
            check_time(bad, None);
        }
    }

    #[test]
    fn a_node_name_is_safe_in_a_url() {
        assert!(node_name("ip-10-0-0-1.ec2.internal").is_ok());
        for bad in ["", "a/b", "A", "a,b", "-a", "a.", "a b"] {
            assert!(node_name(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_value_makes_the_command_line_panic(text in "\\PC{0,12}") {
            let _ = (time(&text), http(&text), absolute(&text), node_name(&text), pod_uid(&text));
        }
    }

    #[test]
    fn relative_paths_are_refused() {
        for bad in ["", "x", "../x", "/a/../b"] {
            assert!(absolute(bad).is_err(), "{bad}");
        }
    }
}
