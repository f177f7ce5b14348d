//! The command line. Each flag has an environment variable, so that a manifest
//! can set either.

use clap::{Args as ClapArgs, Parser, Subcommand};
use divvy_daemon::args::{Listen, LogArgs, absolute, listen, object_name, time};
use std::path::PathBuf;
use std::time::Duration;

/// What a cluster needs once: DeviceClasses of MIG profiles, and admission.
#[derive(Clone, Debug, Parser)]
#[command(name = "divvy-controller", version, max_term_width = 100)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Keep DeviceClasses and answer admission reviews
    ///
    /// Keeps a DeviceClass for every MIG profile that some node offers, as long
    /// as the class mig.divvy.dev exists, and refuses claims and pods that could
    /// never be prepared. Several replicas may run: all answer reviews, the one
    /// that holds the lease writes.
    Run(Box<RunArgs>),
    /// Undo what Divvy did in the cluster and on its nodes, before it is uninstalled
    ///
    /// Refuses while a claim is allocated to gpu.divvy.dev. Then makes the node
    /// daemons give everything back, and removes what the controller made.
    Leave(LeaveArgs),
}

/// Which cluster, and what is ours in it.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Kubeconfig file; without it the pod's ServiceAccount is used
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace Divvy is installed in
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME", default_value = "divvy", value_parser = object_name)]
    pub namespace: String,
    /// Lease by which one replica is chosen
    #[arg(long, env = "LEASE", value_name = "NAME", default_value = "divvy-controller", value_parser = object_name)]
    pub lease: String,
    /// Secret with the webhook's certificate, made by the controller
    #[arg(long, env = "CERTIFICATE_SECRET", value_name = "NAME", default_value = "divvy-webhook-certificate", value_parser = object_name)]
    pub certificate_secret: String,
}

#[derive(Clone, Debug, ClapArgs)]
pub struct RunArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Name of this replica, as its pod's
    #[arg(
        long,
        env = "POD_NAME",
        value_name = "NAME",
        default_value = "divvy-controller",
        help_heading = "Cluster"
    )]
    pub identity: String,
    /// A replica that gave no sign of life for so long has its lease taken
    #[arg(long, env = "LEASE_DURATION", value_name = "TIME", default_value = "15s", value_parser = seconds, help_heading = "Cluster")]
    pub lease_duration: Duration,
    /// How long the DeviceClass of a profile stays when no node offers it any more
    #[arg(long, env = "CLASS_HOLD_OFF", value_name = "TIME", default_value = "10m", value_parser = time, help_heading = "DeviceClasses")]
    pub class_hold_off: Duration,
    /// Whether the classes get the extended resource names nvidia.com/mig-<profile>; one that a
    /// class of somebody else has is not set in any case
    #[arg(long, env = "EXTENDED_RESOURCES", value_name = "true|false", default_value_t = true, action = clap::ArgAction::Set, help_heading = "DeviceClasses")]
    pub extended_resources: bool,
    #[command(flatten)]
    pub webhook: WebhookArgs,
    /// Address of /metrics, /livez and /readyz, or "off"
    #[arg(long, env = "HTTP_ADDRESS", value_name = "ADDRESS|off", default_value = "0.0.0.0:9844", value_parser = listen, help_heading = "Observation")]
    pub http_address: Listen,
    #[command(flatten)]
    pub log: LogArgs,
}

/// How reviews come in.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Admission")]
pub struct WebhookArgs {
    /// Address of the webhook, or "off"
    #[arg(long, env = "WEBHOOK_ADDRESS", value_name = "ADDRESS|off", default_value = "0.0.0.0:9443", value_parser = listen)]
    pub webhook_address: Listen,
    /// Service in front of the webhook
    #[arg(long, env = "WEBHOOK_SERVICE", value_name = "NAME", default_value = "divvy-webhook", value_parser = object_name)]
    pub webhook_service: String,
    /// ValidatingWebhookConfiguration that is told which certificate to trust
    #[arg(long, env = "WEBHOOK_CONFIGURATION", value_name = "NAME", default_value = "divvy", value_parser = object_name)]
    pub webhook_configuration: String,
    /// Directory with tls.crt and tls.key of somebody else, such as cert-manager, who also says
    /// what to trust; without it the controller makes and rotates a certificate
    #[arg(long, env = "CERTIFICATE_DIR", value_name = "DIR", value_parser = absolute)]
    pub certificate_dir: Option<PathBuf>,
}

#[derive(Clone, Debug, ClapArgs)]
pub struct LeaveArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// DaemonSet of the node daemon
    #[arg(long, env = "NODE_DAEMONSET", value_name = "NAME", default_value = "divvy-node", value_parser = object_name, help_heading = "Cluster")]
    pub node_daemonset: String,
    /// Deployment of the controller; stopped before what it made is removed
    #[arg(long, env = "CONTROLLER_DEPLOYMENT", value_name = "NAME", default_value = "divvy-controller", value_parser = object_name, help_heading = "Cluster")]
    pub controller_deployment: String,
    /// Wait so long for allocated claims to go; 0s refuses at once
    #[arg(long, env = "WAIT", value_name = "TIME", default_value = "0s", value_parser = time, help_heading = "Deadlines")]
    pub wait: Duration,
    /// How long the node daemons may take to give everything back
    #[arg(long, env = "LEAVE_WITHIN", value_name = "TIME", default_value = "5m", value_parser = time, help_heading = "Deadlines")]
    pub within: Duration,
    #[command(flatten)]
    pub log: LogArgs,
}

/// A lease is written in whole seconds.
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
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn nothing_must_be_given() {
        let args = Args::try_parse_from(["divvy-controller", "run"]).unwrap();
        let Command::Run(args) = args.command else { panic!("{args:?}") };
        assert_eq!(args.cluster.namespace, "divvy");
        assert!(Args::try_parse_from(["divvy-controller", "leave", "--wait", "5m"]).is_ok());
        assert!(Args::try_parse_from(["divvy-controller", "run", "--lease-duration", "10ms"]).is_err());
    }
}
