//! Creates the client of the API server. It has no client-side rate limit, so that a burst of
//! prepare calls is limited only by the server.

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why no client could be created.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot use the kubeconfig {path}")]
    Kubeconfig {
        path: PathBuf,
        #[source]
        cause: Box<kube::config::KubeconfigError>,
    },
    #[error("cannot find the pod's ServiceAccount; outside a cluster, set --kubeconfig")]
    InCluster(#[source] kube::config::InClusterError),
    #[error("cannot create a client for the API server from this configuration")]
    Client(#[source] Box<kube::Error>),
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Creates a client from the kubeconfig, or from the pod's ServiceAccount. It connects on first use.
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let mut config = match kubeconfig {
        None => Config::incluster().map_err(ClientError::InCluster)?,
        Some(path) => {
            let failed = |cause| ClientError::Kubeconfig { path: path.to_owned(), cause: Box::new(cause) };
            let file = Kubeconfig::read_from(path).map_err(failed)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(failed)?
        }
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    Client::try_from(config).map_err(|cause| ClientError::Client(Box::new(cause)))
}
