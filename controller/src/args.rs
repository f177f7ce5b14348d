//! The command line. Each flag has an environment variable, so a manifest can set either.

use clap::{Args as ClapArgs, Parser, Subcommand};
use divvy_daemon::args::{Listen, LogArgs, absolute, listen, object_name, time};
use std::path::PathBuf;
use std::time::Duration;

/// Cluster-wide services of Divvy: DeviceClasses of MIG profiles, and admission
#[derive(Clone, Debug, Parser)]
#[command(name = "divvy-controller", version, max_term_width = 100)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Maintain DeviceClasses and answer admission reviews
    ///
    /// Creates a DeviceClass for every MIG profile that a node offers, as long as
    /// the class mig.divvy.dev exists. Rejects claims and pods that could never be
    /// prepared. Several replicas may run: all of them answer reviews, and the one
    /// that holds the lease writes.
    Run(Box<RunArgs>),
    /// Revert what Divvy changed in the cluster and on its nodes, before it is uninstalled
    ///
    /// Refuses while a claim is allocated to gpu.divvy.dev. Then it makes the node
    /// daemons restore their nodes, and deletes the objects that the controller created.
    Decommission(DecommissionArgs),
}

/// The cluster, and the objects of Divvy in it.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Kubeconfig file; without it the pod's ServiceAccount is used
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace Divvy is installed in
    #[arg(
        long,
        env = "DIVVY_POD_NAMESPACE",
        value_name = "NAME",
        default_value = "divvy",
        value_parser = object_name
    )]
    pub namespace: String,
    /// Lease for leader election
    #[arg(
        long,
        env = "DIVVY_LEASE",
        value_name = "NAME",
        default_value = "divvy-controller",
        value_parser = object_name
    )]
    pub lease: String,
    /// Secret with the webhook's certificate, created by the controller
    #[arg(
        long,
        env = "DIVVY_CERTIFICATE_SECRET",
        value_name = "NAME",
        default_value = "divvy-webhook-certificate",
        value_parser = object_name
    )]
    pub certificate_secret: String,
}

#[derive(Clone, Debug, ClapArgs)]
pub struct RunArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Name of this replica, usually the name of its pod
    #[arg(
        long,
        env = "DIVVY_POD_NAME",
        value_name = "NAME",
        default_value = "divvy-controller",
        help_heading = "Cluster"
    )]
    pub identity: String,
    /// Lease duration: a leader that has not renewed for this time is replaced
    #[arg(
        long,
        env = "DIVVY_LEASE_DURATION",
        value_name = "TIME",
        default_value = "15s",
        value_parser = seconds,
        help_heading = "Cluster"
    )]
    pub lease_duration: Duration,
    /// How long the DeviceClass of a profile stays after the last node stopped offering the profile
    #[arg(
        long,
        env = "DIVVY_CLASS_HOLD_OFF",
        value_name = "TIME",
        default_value = "10m",
        value_parser = time,
        help_heading = "DeviceClasses"
    )]
    pub class_hold_off: Duration,
    /// Whether the classes get the extended resource names nvidia.com/mig-<profile>. A name that
    /// a class of another owner uses is never set
    #[arg(
        long,
        env = "DIVVY_EXTENDED_RESOURCES",
        value_name = "true|false",
        default_value_t = true,
        action = clap::ArgAction::Set,
        help_heading = "DeviceClasses"
    )]
    pub extended_resources: bool,
    /// How long devices of a mode that is off stay published without an allocation. The time must
    /// exceed the lag of the scheduler's caches, so shorten it only in tests
    #[arg(
        long,
        env = "DIVVY_REMOVAL_DELAY",
        value_name = "TIME",
        default_value = "10m",
        value_parser = time,
        help_heading = "Modes that are off"
    )]
    pub removal_delay: Duration,
    #[command(flatten)]
    pub webhook: WebhookArgs,
    #[command(flatten)]
    pub foreign: ForeignArgs,
    /// Address of /metrics, /livez and /readyz, or "off"
    #[arg(
        long,
        env = "DIVVY_HTTP_ADDRESS",
        value_name = "ADDRESS|off",
        default_value = "0.0.0.0:9844",
        value_parser = listen,
        help_heading = "Observation"
    )]
    pub http_address: Listen,
    #[command(flatten)]
    pub log: LogArgs,
}

/// The webhook's address, Service, configuration and certificate.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Admission")]
pub struct WebhookArgs {
    /// Address of the webhook, or "off"
    #[arg(
        long,
        env = "DIVVY_WEBHOOK_ADDRESS",
        value_name = "ADDRESS|off",
        default_value = "0.0.0.0:9443",
        value_parser = listen
    )]
    pub webhook_address: Listen,
    /// Service in front of the webhook
    #[arg(
        long,
        env = "DIVVY_WEBHOOK_SERVICE",
        value_name = "NAME",
        default_value = "divvy-webhook",
        value_parser = object_name
    )]
    pub webhook_service: String,
    /// ValidatingWebhookConfiguration whose CA bundle the controller sets
    #[arg(
        long,
        env = "DIVVY_WEBHOOK_CONFIGURATION",
        value_name = "NAME",
        default_value = "divvy",
        value_parser = object_name
    )]
    pub webhook_configuration: String,
    /// Directory with tls.crt and tls.key from another issuer, such as cert-manager, which also
    /// sets the CA bundle; without it the controller creates and rotates a certificate
    #[arg(long, env = "DIVVY_CERTIFICATE_DIR", value_name = "DIR", value_parser = absolute)]
    pub certificate_dir: Option<PathBuf>,
}

/// Pods with requests of other GPU schedulers.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Requests of other GPU schedulers")]
pub struct ForeignArgs {
    /// Whether pods with requests of HAMi (nvidia.com/gpumem, nvidia.com/gpucores) and KAI (gpu-memory)
    /// get claims. Needs the mutating webhook and permission to write ResourceClaimTemplates
    #[arg(
        long,
        env = "DIVVY_FOREIGN_REQUESTS",
        value_name = "true|false",
        default_value_t = false,
        action = clap::ArgAction::Set
    )]
    pub foreign_requests: bool,
    /// MutatingWebhookConfiguration whose CA bundle the controller sets
    #[arg(
        long,
        env = "DIVVY_FOREIGN_WEBHOOK_CONFIGURATION",
        value_name = "NAME",
        default_value = "divvy-foreign-requests",
        value_parser = object_name
    )]
    pub foreign_webhook_configuration: String,
    /// Memory of every GPU, for requests of a percentage, such as 80Gi
    #[arg(long, env = "DIVVY_FOREIGN_GPU_MEMORY", value_name = "SIZE")]
    pub foreign_gpu_memory: Option<String>,
    /// Memory and DeviceClass of the shares of a GPU model, for pods that name the model
    #[arg(long, env = "DIVVY_FOREIGN_GPU_MODELS", value_name = "MODEL=SIZE[:CLASS]", value_delimiter = ',')]
    pub foreign_gpu_model: Vec<String>,
    /// How long a ResourceClaimTemplate stays after the last pod that uses it
    #[arg(
        long,
        env = "DIVVY_TEMPLATE_HOLD_OFF",
        value_name = "TIME",
        default_value = "10m",
        value_parser = time
    )]
    pub template_hold_off: Duration,
}

#[derive(Clone, Debug, ClapArgs)]
pub struct DecommissionArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// DaemonSet of the node daemon
    #[arg(
        long,
        env = "DIVVY_NODE_DAEMONSET",
        value_name = "NAME",
        default_value = "divvy-node",
        value_parser = object_name,
        help_heading = "Cluster"
    )]
    pub node_daemonset: String,
    /// Deployment of the controller; it is scaled to 0 before its objects are deleted
    #[arg(
        long,
        env = "DIVVY_CONTROLLER_DEPLOYMENT",
        value_name = "NAME",
        default_value = "divvy-controller",
        value_parser = object_name,
        help_heading = "Cluster"
    )]
    pub controller_deployment: String,
    /// How long to wait for allocated claims to be released; 0s refuses at once
    #[arg(
        long,
        env = "DIVVY_WAIT",
        value_name = "TIME",
        default_value = "0s",
        value_parser = time,
        help_heading = "Deadlines"
    )]
    pub wait: Duration,
    /// How long to wait for the node daemons to restore their nodes
    #[arg(
        long,
        env = "DIVVY_DECOMMISSION_TIMEOUT",
        value_name = "TIME",
        default_value = "5m",
        value_parser = time,
        help_heading = "Deadlines"
    )]
    pub timeout: Duration,
    #[command(flatten)]
    pub log: LogArgs,
}

/// A lease stores its duration in whole seconds, so it must be at least one.
fn seconds(text: &str) -> Result<Duration, String> {
    match time(text)? {
        time if time >= Duration::from_secs(1) => Ok(time),
        _ => Err("must be at least 1s".to_owned()),
    }
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
    fn all_flags_have_defaults() {
        let args = Args::try_parse_from(["divvy-controller", "run"]).unwrap();
        let Command::Run(args) = args.command else { panic!("{args:?}") };
        assert_eq!(args.cluster.namespace, "divvy");
        assert_eq!(args.removal_delay, divvy_model::closing::REMOVAL_DELAY);
        assert!(Args::try_parse_from(["divvy-controller", "decommission", "--wait", "5m"]).is_ok());
        assert!(Args::try_parse_from(["divvy-controller", "run", "--lease-duration", "10ms"]).is_err());
    }
}
