//! The one connection pool to the API server. Nothing limits the rate of
//! requests on this side: a burst of prepares is as fast as the server.

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("kubeconfig {path} cannot be used")]
    Kubeconfig {
        path: PathBuf,
        #[source]
        cause: Box<kube::config::KubeconfigError>,
    },
    #[error("no ServiceAccount in this pod; name a kubeconfig with --kubeconfig")]
    InCluster(#[source] kube::config::InClusterError),
    #[error("the API server cannot be talked to with this configuration")]
    Client(#[source] Box<kube::Error>),
}

const CONNECT: Duration = Duration::from_secs(5);

/// A client by that kubeconfig, or by the pod's ServiceAccount. Connects on first use.
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let mut config = match kubeconfig {
        None => Config::incluster().map_err(ClientError::InCluster)?,
        Some(path) => {
            let failed = |cause| ClientError::Kubeconfig { path: path.to_owned(), cause: Box::new(cause) };
            let file = Kubeconfig::read_from(path).map_err(failed)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(failed)?
        }
    };
    config.connect_timeout = Some(CONNECT);
    Client::try_from(config).map_err(|cause| ClientError::Client(Box::new(cause)))
}
